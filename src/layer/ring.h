/*
 * What the two walks of keys round a ring of ranks share: context_ring.c takes parts in the order of positions,
 * context_rotate.c in that of arrival. docs/context.md has the picture.
 */
#ifndef MEGATRAIN_LAYER_RING_H
#define MEGATRAIN_LAYER_RING_H

#include "layer/internal.h"

/* Rank i of n has the parts i and 2 n - 1 - i of each sequence; keys and values of a part lie one behind the other. */
typedef struct {
    Comm *group;
    int parts, rank;
    int64_t length, window; /* positions of a part */
    int64_t half[2][4];     /* shapes of a part's keys and of its values: [B, length, K, C] */
    DType dtype;
} Ring;

/* For the keys and values k and v of this rank, [B, 2 length, K, C]. */
Ring ring_of(Comm *group, Tensor k, Tensor v, int64_t window);
/* Elements of a part: keys and values. */
int64_t ring_part_count(const Ring *r);
int ring_owner(const Ring *r, int part);
/* Has `rank` a query that may see a key of the part, by causality and window? */
bool ring_sees(const Ring *r, int rank, int part);
Spans ring_span(const Ring *r, int part);
/* Keys (0) or values (1) of a part, which is one row of `parts`, of any dtype. */
Tensor ring_half(const Ring *r, Tensor parts, int row, int half);
/* Both parts of this rank, from rows k and v to parts [2, count]. */
Err ring_pack(Ctx *c, const Ring *r, Tensor k, Tensor v, Tensor parts);

/* context_ring and context_ring_bwd (internal.h), in the order of arrival. */
Err context_rotate(Ctx *c, Comm *group, attention_fwd_args a);
Err context_rotate_bwd(Ctx *c, Comm *group, attention_bwd_args a);

#endif
