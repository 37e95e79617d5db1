/*
 * Data parallelism: sums gradients over the ranks with the same parameters (ParamStore.group) and hands out the weights
 * that each rank updated. These ranks are dp, for experts their own dp, and in a bidirectional pipeline both replicas
 * of a stage as well. Gradients are summed bucket by bucket (param/param.h), with `overlap_grad` as soon as a bucket is
 * complete. With ZeRO-1 a bucket has a shard for each rank of the group: it is reduce-scattered in place, the optimizer
 * touches this rank's shard alone, and the bucket's values are gathered again. Without, a bucket is summed on every
 * rank. With ZeRO-2 and ZeRO-3 units.h does this for the weights of units, while the step runs. Groups of ZeRO do all
 * this in themselves; at the end of a step ranks that have the same shard in several groups sum and update a part of it
 * each, and gather these parts.
 *
 * When a gradient is complete is learned: the first step counts how often each is added to. Later steps start a bucket
 * when all of its counts are reached, which is in the backward of the last micro-batch. All ranks of a dp group run the
 * same actions on the same layers, so they start buckets in the same order.
 *
 * Gradients that are partial over other ranks (Partial) are summed there first, with one call for each kind; their
 * buckets follow.
 *
 * Gathers go out in forward's order, and if `overlap_param` nobody waits for them but ddp_wait_value(), which
 * param_value() calls: the first layers run while the last weights are on their way.
 *
 * Device.beside counts what was started and not yet waited for, in the order in which the host issues work: products
 * that are issued meanwhile leave the collectives room.
 *
 * Gathers outlive the step, so what is still to be waited for is kept up by calls (device_call), which a step that is
 * replayed makes, too. The first read of a step makes one in any case: whether there is anything to wait for is not the
 * same in each. All else here is over when a step ends.
 *
 * Timing changes no bit: sums are integers, or trees over ranks.
 */
#ifndef MEGATRAIN_OPTIM_DDP_H
#define MEGATRAIN_OPTIM_DDP_H

#include "optim/units.h"

typedef struct {
    bool overlap_grad, overlap_param;
    int stages;   /* stages of the rank */
    bool in_turn; /* forwards and backwards may run in turn (engine/pair.h) */
} DdpSpec;

typedef struct {
    ParamStore *params;
    Stream *stream;
    World *world;
    DdpSpec spec;
    Event *reduced, *gathered; /* [buckets] */
    bool *started, *gathering; /* [buckets] */
    bool *asked;               /* [buckets] a value was read since the step began, or since it is gathered */
    int *missing;              /* [buckets] parameters that still wait for additions */
    int *added, *expected;     /* [params] additions so far in this step, and in a whole step; 0: not known yet */
    Units units;               /* the units of ZeRO-2 and 3, which are not kept whole */
} Ddp;

/* Takes host memory from the registry's setup, and buffers of units from `state`. *d becomes the store's listener
 * (ParamStore.listener). ERR_MEMORY. */
Err ddp_init(Ddp *d, ParamStore *params, Stream *stream, World *world, DdpSpec spec, Arena *state);
void ddp_release(Ddp *d);

/* A step begins, perhaps the same once more. */
Err ddp_begin(Ddp *d);

/* From here on steps have another number of micro-batches: forgets what was learned of the additions. */
void ddp_forget(Ddp *d);

/*
 * Sums the gradient of a table that the first and the last stage read over these two; to be called before ddp_reduce.
 * d[count]: one for each replica on this rank. If there are two, each rank of the pair adds its own two, and the
 * reduction over the replicas does the rest.
 */
Err ddp_sum_stages(Ddp *d, int count);

/* Returns when all gradients are summed; a gradient to which nothing was added in this step is 0. */
Err ddp_reduce(Ddp *d);

/* To be called after the update: starts handing out the ZeRO shards, and without overlap_param waits for it. */
Err ddp_gather(Ddp *d);

/* Waits until all gathers have ended, and forgets what is gathered of units. To be called before anything but
 * param_value() reads values, or changes them. */
Err ddp_settle(Ddp *d);

#endif
