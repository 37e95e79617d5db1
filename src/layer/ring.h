/*
 * What the two walks of keys round a ring of ranks share: context_ring.c takes parts in the order of positions,
 * context_rotate.c in that of arrival. docs/context.md has the picture.
 */
#ifndef MEGATRAIN_LAYER_RING_H
#define MEGATRAIN_LAYER_RING_H

#include "layer/keys.h"

/* Rank i of n has the parts i and 2 n - 1 - i of each sequence; keys and values of a part lie one behind the other. */
typedef struct {
    Comm *group;
    int parts, rank;
    int64_t length, window; /* positions of a part */
    int64_t first, behind;  /* position of the first key, and from there to the first query of all ranks */
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

/* In the order of positions: for attention of sequences in slices as well. In scratch, until the caller releases it. */
typedef struct {
    Ring of;
    Tensor own, arriving; /* [2 parts], [2 turns], each [keys | values] */
    bool moving;          /* an exchange is on its way */
} RingWalk;

/* Keys and values of one part; not to be read unless this rank sees some of them. */
typedef struct {
    Tensor k, v;
    Spans span;
    bool seen;
} RingPart;

/* For the keys and values k and v of this rank, which w->of was made for. */
Err ring_open(Ctx *c, RingWalk *w, Tensor k, Tensor v);
/* Part `part` is there, and the next one on its way. */
Err ring_advance(Ctx *c, RingWalk *w, int part, RingPart *out);
/* All calls of attention over the parts that this rank sees; `more`: others come behind the last of them. */
Err ring_attend(Ctx *c, RingWalk *w, bool more, attention_fwd_args *a);
/* d is what each rank's queries gave to the part, 0 if it sees nothing; on its owner d = the sum over ranks. */
Err ring_sum(Ctx *c, const Ring *r, int part, Tensor d);

/* context_ring and context_ring_bwd (keys.h), in the order of arrival. */
Err context_rotate(Ctx *c, Comm *group, attention_fwd_args a);
Err context_rotate_bwd(Ctx *c, Comm *group, attention_bwd_args a);

#endif
