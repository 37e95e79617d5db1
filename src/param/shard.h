/*
 * Boxes say which part of a global tensor a piece of local memory is.
 *
 * A global tensor is seen in plain order: sections one after the other, no padding, row-major [rows, columns]
 * (columns 1 for vectors). Memory of a rank is something else: a cut of dim 0 or 1, sections interleaved
 * chunk by chunk, vocabulary rows padded (param.h). The functions here say which global boxes a local range
 * holds and where in local memory each lies; checkpoints, which move parameters between grids, are intersections of
 * such boxes:
 *
 *   plain, 6 rows      memory, interleave = 2, tp = 2        boxes of rank 1, in plain order
 *   q0 q1 k0 k1 v0 v1  rank 0: q0 k0 v0   rank 1: q1 k1 v1   {row 1, at 0} {row 3, at 1} {row 5, at 2}
 *
 * Invariants, proven by test_shard on random shapes, cuts and grids: the boxes of all tp ranks of a cut
 * tensor tile its global box exactly once; a tensor that is not cut is tiled by every rank alone, and then
 * one of them is its owner. Padding is in no box.
 */
#ifndef MEGATRAIN_PARAM_SHARD_H
#define MEGATRAIN_PARAM_SHARD_H

#include "param/param.h"

/* Rows and columns of a global tensor in plain order. */
typedef struct {
    int64_t offset[2], shape[2];
} Box;

/* A box and where a rank keeps it: element (r, c) of the box is local element at + r * ld + c. */
typedef struct {
    Box box;
    int64_t at; /* elements from the start of the parameter's local memory */
    int64_t ld; /* elements from one row to the next */
} ShardBox;

/* The same parameter as seen by another rank, or in another grid that divides it (ASSERT). */
Param shard_param(const Param *p, const ParamPlace *place);

/* True if a tensor's shards are of different content on different ranks along an axis. */
bool shard_is_cut(const Param *p, Cut axis);

/*
 * True for the ranks that write what they hold of p, or whose numbers count. Of ranks with the same content this is
 * one; of ranks with different ZeRO shards of it, each. The same content have copies without ZeRO shards, all tp ranks
 * of a dense tensor that tp does not cut, and all etp ranks of an expert's tensor that etp does not cut.
 */
bool shard_owner(const Param *p, const ParamPlace *place);

/*
 * The boxes of all local elements of p that are not padding, matrix by matrix, and within one ordered by plain row.
 * Fills out[0..capacity) and returns how many there are; call with capacity 0 to ask. A matrix has at most sections *
 * chunks on this rank + sections.
 */
int shard_boxes(const Param *p, ShardBox *out, int capacity);

/*
 * The boxes of local elements [first, first + count), such as those of a ZeRO shard: a part of a row, whole rows, a
 * part of a row, so at most 2 boxes more than those of the whole. ASSERT: the range lies within p->count. Returns as
 * above.
 */
int shard_range(const Param *p, int64_t first, int64_t count, ShardBox *out, int capacity);

/*
 * How many of boxes[0..count), from the front on, make one global box when they are laid below one another. *merged:
 * that box. A stored piece is such a run: chunks that lie apart in memory are neighbours in plain order.
 */
int shard_merge(const ShardBox *boxes, int count, Box *merged);

Box shard_global(const Param *p); /* the whole tensor */

int64_t box_count(Box b); /* how many elements it has */

/* *out: what a and b have in common. False, and *out is untouched: nothing. */
bool box_intersect(Box a, Box b, Box *out);

/* *out: the part of s that lies in `within`, and where that is in memory. False: nothing does. */
bool shard_clip(ShardBox s, Box within, ShardBox *out);

#endif
