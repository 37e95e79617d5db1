/*
 * Runs a rank's list of actions (pipeline/schedule.h) on the stages that the rank holds. The executor knows neither
 * data nor optimizer: the trainer passes in a table of hooks for them.
 *
 *   F            takes a free slot and a block of save memory in each region, reads boundary buffer `in`, writes `out`;
 *                and a block of the host's memory for saves that leave the device
 *   B, or I W    runs backward; I (or B) frees the block of REGION_I, W (or B) frees all of the slot
 *   SEND, RECV   starts a group of messages, which proceeds beside the actions that follow; an action that reads or
 *                overwrites one of its buffers waits for the group first
 *
 * The schedule calls what passes through a stage at once a unit: a micro-batch, a half of one, or a slice of one. The
 * layers of a slice read the slots of earlier slices (layer/keys.c); an evaluation has no backward, so it frees all
 * of them with the last slice. An F takes the first slot that is free, and the list's order is the same in every step,
 * so every step uses the same addresses of save memory.
 *
 * The two actions of a pair run one after the other or in turn (pair.h).
 */
#ifndef MEGATRAIN_ENGINE_EXECUTOR_H
#define MEGATRAIN_ENGINE_EXECUTOR_H

#include "engine/pair.h"
#include "engine/replays.h"
#include "engine/save_heap.h"
#include "layer/offload.h"
#include "model/model.h"
#include "pipeline/schedule.h"
#include "pipeline/simulate.h"

/* Memory that one unit occupies in one stage, from its F to its B or W. */
typedef struct {
    Slot slot;
    StageSave save;
    Batch batch;
    SaveBlock block[REGION_COUNT], away;
    int unit; /* -1: the slot is free */
} ExecutorSlot;

typedef struct {
    void *user;
    Err (*batch)(void *user, int unit, Batch *batch); /* fills the tensors of the unit's slot */
    Err (*tied)(void *user);
    Err (*reduce)(void *user, int replica);
    Err (*norm)(void *user);
    Err (*update)(void *user, int replica);
    /* Without training, behind an F of the head: the unit's logits lie in its save. NULL: nobody reads them. */
    Err (*rows)(void *user, const ExecutorSlot *slot);
} ExecutorHooks;

/* One stage of one replica on this rank. */
typedef struct {
    int stage, replica; /* numbers in the whole pipeline */
    const Stage *model;
    ParamStore *params;
    Tensor loads_so_far;              /* as in Ctx (layer.h); absent if no mixture counts its loads over the batch */
    Tensor balance_losses;            /* as in Ctx; absent if no loss balances the mixtures */
    void **slice_grads;               /* as in Ctx; NULL if sequences are not cut into slices */
    bool turns_back;                  /* in a step the backward of a unit is always the next action after its forward */
    int64_t save_bytes[REGION_COUNT]; /* save memory that a unit needs */
    int64_t peak_bytes[REGION_COUNT]; /* the most that a unit has used so far */
    int64_t away_bytes, away_peak;    /* the same two for the host's memory */
    ExecutorSlot *slots;
    int slot_count;
} ExecutorStage;

typedef struct Executor Executor;

/* A unit on its way through a stage. */
typedef struct {
    const ExecutorStage *stage;
    ExecutorSlot *slot;
    Boundary in, out; /* the boundary buffers that the action reads and writes */
    Ctx *ctx;         /* set to the stage and the slot */
} ExecutorUnit;

/* The functions that compute a unit: normally the layers of the stage. A test of the order of actions puts functions in
 * their place that only take time. */
typedef struct {
    Err (*forward)(Executor *e, const ExecutorUnit *u);
    /* The dgrad; without ctx.mode.split_backward the wgrad, too. */
    Err (*backward)(Executor *e, const ExecutorUnit *u);
    Err (*weights)(Executor *e, const ExecutorUnit *u); /* the wgrad */
} ExecutorCompute;

/* A group of messages that has been started. */
typedef struct {
    Event done;
    int buffers; /* number of its buffers that nobody has waited for yet; 0: this entry is free */
} Transfer;

struct Executor {
    ExecutorStage *stages;
    int stage_count;
    Ctx ctx;
    Event moved, known; /* ctx.moves points to them */
    Pair pair;          /* pair_open, if pairs are to run in turn */
    Comm *pp;
    Tensor sums; /* [3] i64, ops.def loss_sum */
    ExecutorHooks hooks;
    const ExecutorCompute *compute; /* if it is NULL, executor_init sets it to the layers */
    SaveHeap heap[REGION_COUNT];    /* one for each region, so that blocks of one size leave no gaps */
    SaveHeap away;                  /* in the host's memory, for saves that have left the device */
    Offload offload[2];             /* ctx.offload points to the first; the second serves forwards in pairs */
    Tensor *buffers;                /* [buffer_count] boundary buffers, [buffer_tensors R, D] */
    int buffer_tensors;             /* boundary tensors that fit into each */
    /* The last stage reads last_inputs boundary tensors, every other stage reads one. */
    int last_stage, last_inputs;
    int buffer_count;
    int *moving;           /* [buffer_count] the transfer that a buffer is part of; -1: none */
    Transfer *transfers;   /* [buffer_count + 1] */
    CommMessage *messages; /* [buffer_count] the messages of the group that is being started */
    Replays replays;
    Replays *graphs;        /* these, if steps are recorded and replayed; or NULL */
    bool graphs_wait;       /* while this is set, steps run as ordinary ones and nothing is recorded */
    const ActionList *list; /* the list that runs */
    int units;              /* number of units of the list that run; later units' actions are left out; 0: all run */
    /* The next action behind the one at work that computes and reads weights of its replica; NULL: there is none. */
    const Action *next;
    int64_t runs; /* number of lists that have run */
    /*
     * [actions of a step's list] The time of each action, by clock_s. In a group of messages only the first action has
     * a time. Both actions of a pair that ran in turn have the time from the pair's begin to its end. NULL: nobody
     * asks.
     */
    Span *times;
    double (*clock)(const void *user); /* instead of clock_s, in a dry run; or NULL */
    const void *clock_user;
};

/* Allocates the tables for e->buffer_count buffers. ERR_MEMORY. */
Err executor_init(Executor *e, SetupArena *setup);
/* From now on steps, which are this list, are recorded and replayed (replays.h). The device must support graphs.
 * ERR_MEMORY. */
Err executor_use_graphs(Executor *e, const ActionList *list, SetupArena *setup);
/* From here on steps have another number of units. */
void executor_forget_graphs(Executor *e);
/* Frees the memory that executor_init, executor_use_graphs and pair_open took outside of setup memory. */
void executor_release(Executor *e);

/* ExecutorStage.turns_back, by the list of a step. */
bool executor_turns_back(const ActionList *list, int replica, int stage);

/* Points a context at a stage and one of its slots. */
void executor_enter(Ctx *c, ExecutorStage *s, ExecutorSlot *slot);
/* Take the save memory of a slot, and give it back. ERR_MEMORY. */
Err executor_take(Executor *e, ExecutorStage *s, ExecutorSlot *slot);
void executor_give(Executor *e, ExecutorStage *s, ExecutorSlot *slot);

/* The bytes of save memory, and of the host's, that a list needs if units need what save_bytes and away_bytes say. It
 * uses the tables of the heaps, so it must be called before the first run. */
typedef struct {
    int64_t save[REGION_COUNT], away;
} SaveNeed;
Err executor_need(Executor *e, const ActionList *list, bool training, SaveNeed *out);

/* Runs a list: that of a step, or without `training` one that has forwards alone, for the loss. It returns when all
 * messages of the list are done. Errors: those of hooks, layers and messages. */
Err executor_run(Executor *e, const ActionList *list, bool training);

/* The same for a step in two calls: the first runs everything that leaves weights and optimizer as they are, the second
 * runs the rest, from the norm on. The first may be repeated before the second. */
Err executor_run_units(Executor *e, const ActionList *list);
Err executor_run_update(Executor *e, const ActionList *list);
/* Frees all units that are under way, after a failure. */
void executor_drop_units(Executor *e);

#endif
