/*
 * Schedules are data: a list of actions for one stage, made by a pure function of (stage, stages,
 * micro-batches). The executor, tests and later the simulator read the same lists.
 *
 *   F forward   B backward, both halves   I input half of backward   W weight half
 *   then, once a step: REDUCE gradients over ranks, NORM of all gradients, UPDATE of the weights
 */
#ifndef MEGATRAIN_PIPELINE_SCHEDULE_H
#define MEGATRAIN_PIPELINE_SCHEDULE_H

#include <stdbool.h>

typedef enum { ACT_F, ACT_B, ACT_I, ACT_W, ACT_REDUCE, ACT_NORM, ACT_UPDATE, ACT_KINDS } ActionKind;

typedef struct {
    ActionKind kind;
    int stage; /* global */
    int microbatch;
} Action;

/* One-forward-one-backward for `stage`. Writes 2 * microbatches + 3 actions; returns how many. */
int schedule_1f1b(Action *out, int stage, int stages, int microbatches);

/* F, B, I and W are about one micro-batch, the others about the step. */
static inline bool action_has_slot(ActionKind kind) { return kind < ACT_REDUCE; }

/* Most micro-batches in flight (from F to B or W) anywhere in the list. */
int schedule_in_flight(const Action *list, int count);

#endif
