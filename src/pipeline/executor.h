/*
 * Runs one rank's action list. A micro-batch takes a free slot at its F and gives it back at its B or W.
 * What is not the model's business (where batches come from, reducing, updating) comes through one table of
 * hooks that train/ fills.
 */
#ifndef MEGATRAIN_PIPELINE_EXECUTOR_H
#define MEGATRAIN_PIPELINE_EXECUTOR_H

#include "model/model.h"
#include "pipeline/schedule.h"

typedef struct {
    void *user;
    Err (*batch)(void *user, int microbatch, Batch *batch); /* fill the slot's tensors */
    Err (*reduce)(void *user);
    Err (*norm)(void *user);
    Err (*update)(void *user);
} ExecutorHooks;

typedef struct {
    Slot slot;
    StageSave save;
    Batch batch;
    int microbatch; /* -1 = free */
} ExecutorSlot;

typedef struct {
    const Stage *stage;
    Ctx ctx;
    Tensor sums; /* [3] i64, ops.def loss_sum */
    ExecutorHooks hooks;
    ExecutorSlot *slots;
    int slot_count;
} Executor;

Err executor_run(Executor *e, const Action *list, int count);

/* Forward of one micro-batch for the loss alone; saves are dropped. Dropout is off. */
Err executor_eval(Executor *e, int microbatch);

#endif
