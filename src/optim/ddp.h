/*
 * Data parallelism: sums gradients over the ranks with the same parameters (ParamStore.group: dp, of experts their dp,
 * and in a bidirectional pipeline both replicas of a stage) bucket by bucket (param/param.h), as soon as a bucket is
 * complete if `overlap_grad`, and hands out the weights that each rank updated. With ZeRO-1 (slices = ranks of the
 * group) a bucket is reduce-scattered in place, the optimizer touches this rank's slice alone, and the bucket's values
 * are gathered again; with one slice a bucket is summed on every rank.
 *
 * When a gradient is complete is learned: the first step counts how often each is added to, later steps start a
 * bucket when all of its counts are reached, which is in the backward of the last micro-batch. All ranks of a dp
 * group run the same actions on the same layers, so they start buckets in the same order.
 *
 * Gradients that are partial over other ranks (Partial) are summed there first, one call each kind; their buckets
 * follow.
 *
 * Gathers go out in forward's order, and if `overlap_param` nobody waits for them but ddp_wait_value(), which
 * param_value() calls: the first layers run while the last weights are on their way.
 *
 * Timing changes no bit: sums are integers, or trees over ranks.
 */
#ifndef MEGATRAIN_OPTIM_DDP_H
#define MEGATRAIN_OPTIM_DDP_H

#include "param/param.h"

typedef struct {
    ParamStore *params;
    Stream *stream;
    World *world;
    bool overlap_grad, overlap_param;
    Event *reduced, *gathered; /* [buckets] */
    bool *started, *gathering; /* [buckets] */
    int *missing;              /* [buckets] parameters that still wait for additions */
    int *added, *expected;     /* [params] additions in this step; in a whole step, 0 = not known yet */
} Ddp;

/* Host memory from the registry's setup. Becomes the store's listener (ParamStore.listener). */
Err ddp_init(Ddp *d, ParamStore *params, Stream *stream, World *world, bool overlap_grad, bool overlap_param);
void ddp_release(Ddp *d);

/* A step begins, again if it is repeated. */
void ddp_begin(Ddp *d);

/* Steps have another number of micro-batches from here on: what was learned of the additions is no longer so. */
void ddp_forget(Ddp *d);

/*
 * The gradient of a table that the first and the last stage read, summed over these two; before ddp_reduce. d[count]:
 * all replicas' on this rank. With two each rank of the pair adds its own two, and the reduction over the replicas does
 * the rest.
 */
Err ddp_sum_stages(Ddp *d, int count);

/* Returns when all gradients are summed; what got none in this step is 0. */
Err ddp_reduce(Ddp *d);

/* After the update of the slices: starts handing them out, and without overlap_param waits for it. */
Err ddp_gather(Ddp *d);

/* All gathers have ended: before anything but param_value() reads values. */
Err ddp_settle(Ddp *d);

#endif
