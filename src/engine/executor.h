/*
 * Runs one rank's action list (pipeline/schedule.h) on the stages that the rank holds. What is not the model's business
 * (where batches come from, reducing, updating) comes through one table of hooks that the trainer fills.
 *
 *   F            takes a slot and two blocks of save memory, reads boundary buffer `in`, writes `out`
 *   B, or I W    backward; after I (or B) the block of REGION_I is free again, after W (or B) all of the slot
 *   SEND, RECV   a group of messages starts and goes on beside what follows; whoever reads or overwrites one of its
 *                buffers waits for it
 *
 * What passes through the stages at once is a unit of the schedule: a micro-batch, or a part of one. Slices of a
 * micro-batch are units whose layers read each other's slots (layer/keys.c); an evaluation, which has no backwards,
 * frees them with the last slice. Slots are taken in
 * the order of the list, first free first, and so are addresses in the save memory: the same in every step.
 *
 * The two actions of a pair run one after the other, or in turn (pair.h).
 */
#ifndef MEGATRAIN_ENGINE_EXECUTOR_H
#define MEGATRAIN_ENGINE_EXECUTOR_H

#include "engine/pair.h"
#include "engine/save_heap.h"
#include "model/model.h"
#include "pipeline/schedule.h"
#include "pipeline/simulate.h"

typedef struct {
    void *user;
    Err (*batch)(void *user, int unit, Batch *batch); /* fill the slot's tensors */
    Err (*tied)(void *user);
    Err (*reduce)(void *user, int replica);
    Err (*norm)(void *user);
    Err (*update)(void *user, int replica);
} ExecutorHooks;

/* Of one unit of one stage, from its F to its B or W. */
typedef struct {
    Slot slot;
    StageSave save;
    Batch batch;
    SaveBlock block[REGION_COUNT];
    int unit; /* -1 = free */
} ExecutorSlot;

/* One stage of one replica on this rank. */
typedef struct {
    int stage, replica; /* global */
    const Stage *model;
    ParamStore *params;
    Tensor loads_so_far;              /* layer.h, Ctx; absent unless mixtures count so */
    Tensor balance_losses;            /* likewise; absent unless losses balance mixtures */
    SliceGrads *slice_grads;          /* likewise; NULL where sequences are whole */
    int64_t save_bytes[REGION_COUNT]; /* of a unit */
    int64_t peak_bytes[REGION_COUNT]; /* of a unit so far */
    ExecutorSlot *slots;
    int slot_count;
} ExecutorStage;

typedef struct Executor Executor;

/* A unit on its way through a stage. */
typedef struct {
    const ExecutorStage *stage;
    ExecutorSlot *slot;
    Boundary in, out; /* the action's buffers for this unit */
    Ctx *ctx;         /* of the stage and the slot */
} ExecutorUnit;

/* What computes a unit: the layers of its stage, or in a test of the order of things something that only takes time. */
typedef struct {
    Err (*forward)(Executor *e, const ExecutorUnit *u);
    Err (*backward)(Executor *e, const ExecutorUnit *u); /* with ctx.split_backward the dgrad alone */
    Err (*weights)(Executor *e, const ExecutorUnit *u);  /* the wgrad */
} ExecutorCompute;

/*
 * What an action enqueues, recorded as a device graph: all its addresses and shapes are the same every time,
 * and what varies from step to step stands in device memory. The first time it runs as it is, the second time
 * it is recorded, from then on the record is replayed and the host code is passed over.
 */
typedef struct {
    int runs;
    DeviceGraph *graph;
} ActionGraph;

/* A group of messages under way. */
typedef struct {
    Event done;
    int buffers; /* that have not waited for it yet; 0 = free */
} Transfer;

struct Executor {
    ExecutorStage *stages;
    int stage_count;
    Ctx ctx;
    Event moved; /* its rows */
    Pair pair;   /* opened by whoever wants pairs to run in turn (pair_open) */
    Comm *pp;
    Tensor sums; /* [3] i64, ops.def loss_sum */
    ExecutorHooks hooks;
    const ExecutorCompute *compute; /* NULL until executor_init: the model's */
    SaveHeap heap[REGION_COUNT];    /* a region each: blocks of one size then leave no gaps */
    Tensor *buffers;                /* [buffer_count] boundary buffers, [buffer_tensors R, D] */
    int buffer_tensors;             /* boundary tensors that each has room for */
    int last_stage, last_inputs;    /* the boundary tensors before the last stage; before all others is one */
    int buffer_count;
    int *moving;           /* [buffer_count] transfer that a buffer is part of, -1: none */
    Transfer *transfers;   /* [buffer_count + 1] */
    CommMessage *messages; /* [buffer_count] of a group */
    ActionGraph
        *graphs;      /* [ACT_KINDS][slots of the one stage][2: the step's first unit, later ones], or NULL */
    bool graphs_wait; /* what could be recorded runs as it is, as long as it is set */
    bool training;    /* dropout on, saves are kept; else every F ends the unit */
    int units;        /* of a list that are run, what later ones need being left out; 0: all */
    int64_t runs;     /* of lists so far */
    /* [actions of a step's list] when each ran, by clock_s, of a group its first, of a pair in turn both from the begin
     * to the end of the pair; NULL: nobody asks */
    Span *times;
};

/* Takes the tables of messages for e->buffer_count buffers. */
Err executor_init(Executor *e, SetupArena *setup);
/* Records and replays from now on (single rank, one stage, a device that can). */
Err executor_use_graphs(Executor *e, SetupArena *setup);
/* Owns: what the two, and pair_open, took beside setup memory. */
void executor_release(Executor *e);

/* Points a context at a stage and one of its slots. */
void executor_enter(Ctx *c, ExecutorStage *s, ExecutorSlot *slot);
/* Save memory for a slot, and back. ERR_MEMORY. */
Err executor_take(Executor *e, ExecutorStage *s, ExecutorSlot *slot);
void executor_give(Executor *e, ExecutorStage *s, ExecutorSlot *slot);

/* Bytes of save memory that a list needs with s->save_bytes as they are. Uses e->heap's tables: before the
 * first run. */
Err executor_need(Executor *e, const ActionList *list, bool training, int64_t bytes[REGION_COUNT]);

/* training: a step's list, with dropout; else a list of forwards for the loss alone. Returns when all its messages have
 * gone. */
Err executor_run(Executor *e, const ActionList *list, bool training);

/* A step's list in two calls: all that leaves weights and optimizer as they are, and the rest, from the norm on.
 * Between them the first may be done again. */
Err executor_run_units(Executor *e, const ActionList *list);
Err executor_run_update(Executor *e, const ActionList *list);
/* After a failure: gives the units back that were under way. */
void executor_drop_units(Executor *e);

#endif
