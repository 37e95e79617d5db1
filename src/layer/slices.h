/* Keys of sequences that pass in slices: shared by slices.c, which says more, and slices_bwd.c alone. */
#ifndef MEGATRAIN_LAYER_SLICES_H
#define MEGATRAIN_LAYER_SLICES_H

#include "layer/ring.h"

/* Positions of slice s, on all ranks. */
Spans slice_span(const Ctx *c, int s);

/* May a query of the present slice, on any rank, see a key of slice s? */
bool slice_sees(const Ctx *c, int64_t window, int s);

/* The walk that keys of other ranks come by, if in parts: to be opened, for this rank's k and v of slice s. */
RingWalk slice_ring(const Ctx *c, Comm *ranks, int64_t window, int s, Tensor k, Tensor v);

/* Keys and values of slice s: into *k and *v, which hold this rank's of the present slice. All of them; for a ring this
 * rank's. Those that move are in scratch. */
Err slice_keys(Ctx *c, const KeyPlan *p, int s, Tensor *k, Tensor *v);

#endif
