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

/*
 * What an action enqueues, recorded as a device graph: all its addresses and shapes are the same every time,
 * and what varies from step to step stands in device memory. The first time it runs as it is, the second time
 * it is recorded, from then on the record is replayed and the host code is passed over.
 */
typedef struct {
    int runs;
    DeviceGraph *graph;
} ActionGraph;

typedef struct {
    const Stage *stage;
    Ctx ctx;
    Tensor sums; /* [3] i64, ops.def loss_sum */
    ExecutorHooks hooks;
    ExecutorSlot *slots;
    int slot_count;
    ActionGraph *graphs; /* [ACT_KINDS][slot_count][2: the step's first micro-batch, later ones], or NULL */
} Executor;

/* Records and replays from now on (single rank, a device that can). Owns: release with executor_release. */
Err executor_use_graphs(Executor *e, SetupArena *setup);
void executor_release(Executor *e);

Err executor_run(Executor *e, const Action *list, int count);

/* Forward of one micro-batch for the loss alone; saves are dropped. Dropout is off. */
Err executor_eval(Executor *e, int microbatch);

#endif
