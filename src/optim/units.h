/*
 * ZeRO-2 and ZeRO-3: what ranks do not keep whole. A unit (param_begin_unit) is the weights of a block, of the
 * embedding or of the head. Its values and gradients are whole while a layer works on them, in buffers as large as the
 * largest unit of this rank:
 *
 *   values    ZERO_VALUES. The first read of a unit in an action takes a buffer and gathers the ranks' shards into it,
 *             and starts to gather the unit that came next when this action last ran, or the first of the next action:
 *             it travels while this one computes. Two buffers; four where a forward and a backward run in turn. The
 *             least recently read goes first. An action gives up what it has gathered, so that every action of a stage
 *             gathers the same, and a plan can count it; but a backward that always follows its forward begins with
 *             what that had last
 *   gradients ZERO_GRADS and ZERO_VALUES. The first addition takes a buffer. It is complete when the next unit's
 *             begins, or the action ends: then its reduce-scatter starts, while the next unit computes into the other
 *             buffer. Its sum is added to this rank's shard when a buffer is needed, or the step ends
 *
 *   backward   | block 3 -> A | block 2 -> B | block 1 -> A |
 *   reduce                    | A ......     | B ......      (before block 1 begins, A is added to the shard)
 *
 * All ranks of a group (ParamStore.group) run the same actions on the same layers, so that they call in one order; the
 * replicas of a bidirectional pipeline do not, and are in several groups. Whether a rank had any tokens for its experts
 * makes no difference to it. Timing changes no bit: sums are integers, or, with
 * f32 accumulators, trees over ranks of each unit's gradients, in the order of the actions.
 */
#ifndef MEGATRAIN_OPTIM_UNITS_H
#define MEGATRAIN_OPTIM_UNITS_H

#include "param/param.h"

enum { UNIT_BUCKETS = 2 };                /* one of experts and one of what is dense */
enum { UNIT_VALUES = 4, UNIT_GRADS = 2 }; /* buffers */

typedef struct {
    int bucket[UNIT_BUCKETS], count;
} Unit;

typedef struct {
    int *unit; /* [capacity] */
    int count, capacity;
    bool whole; /* an action has run to its end */
} UnitOrder;

typedef struct {
    Tensor memory;
    int unit;               /* the unit that has it; -1: none */
    bool moving;            /* its collectives were started and not waited for */
    bool ahead;             /* values: gathered before anyone has read them */
    bool open;              /* gradients: layers add to it */
    bool add[UNIT_BUCKETS]; /* gradients: the sum lies in this buffer, and is to be added to the shard */
    int64_t used;           /* the turn of its last use */
    Event done[UNIT_BUCKETS];
} UnitBuffer;

typedef struct {
    ParamStore *params;
    Stream *stream;
    Unit *unit;
    int count;        /* number of units; some may have nothing that is cut */
    int *first_param; /* [buckets] where in ParamRegistry.order the parameters of each begin */
    UnitBuffer value[UNIT_VALUES], grad[UNIT_GRADS];
    int values, grads;   /* how many buffers there are; 0: nothing is cut */
    int reading[PASSES]; /* the unit that an action of each pass is at; -1: none */
    UnitOrder *order;    /* [stages][PASSES] in which an action there reads units, as it did the last time */
    int stages;
    Visit now[PASSES], then[PASSES]; /* the action of each pass at work, and what follows it */
    int at[PASSES];                  /* how many units it has read */
    bool *summed;                    /* [buckets] this rank's shard has a sum of this step */
    int64_t turn;
} Units;

/* Allocates buffers in `state`, host memory in the registry's setup. stages: that the rank has. in_turn: forwards and
 * backwards may run in turn. ERR_MEMORY. */
Err units_init(Units *u, ParamStore *params, Stream *stream, int stages, bool in_turn, Arena *state);
void units_release(Units *u);

int64_t units_buffers(const Units *u); /* bytes of all buffers */

/* Forgets in which order actions read units: the next ones gather nothing ahead. */
void units_unlearn(Units *u);

/* A step begins, perhaps the same once more. */
Err units_begin(Units *u);

/* ParamListener's functions, for parameters whose bucket is cut. */
Err units_read(Units *u, int id, Pass pass);
Err units_write(Units *u, int id);
void units_begins(Units *u, Visit now, Visit next);
Err units_ended(Units *u, Pass pass, bool keeps);

/* Returns when this rank's shards of all gradients are sums over the ranks; those that nobody added to are 0. */
Err units_reduce(Units *u);

/* Starts the sum over `c` of `whole`, gradients of a bucket, of which `own` is to have this rank's shard: exact for
 * integers, a tree over ranks for f32. */
Err units_sum_shard(Comm *c, Stream *s, Tensor whole, Tensor own, Event *done);

/* Forgets all gathered values, because they change, or are read in another way. */
Err units_forget(Units *u);

#endif
