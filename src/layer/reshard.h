/*
 * The positions and heads of a sequence that each rank of world->cp has, for mixers that want other ones than the
 * layers around them (reshard.c).
 */
#ifndef MEGATRAIN_LAYER_RESHARD_H
#define MEGATRAIN_LAYER_RESHARD_H

#include "layer/internal.h"

/* ---- positions ---- */

/* Positions of a slice, on all ranks; of a sequence that is not cut. Those of slice s. */
int64_t slice_length(const Ctx *c);
Spans slice_span(const Ctx *c, int s);

/* A sequence has 2 n equal parts: the rank that has part `part`; the first (0) or second (1) part of a rank. */
int context_owner(ContextCut cut, int parts, int part);
int context_part(ContextCut cut, int parts, int rank, int which);
/* Rows in the order of ranks, x [ranks, samples, T, ...], to rows in the order of positions, `whole`
 * [samples, seq, K, C]; or back. */
Err context_move(Ctx *c, ContextCut cut, int ranks, Tensor x, Tensor whole, bool back);
/* Part `which` (0, 1) of this rank's positions, from rows [B, T, ...] to part [B, T / 2, ...]; or back. */
Err context_move_part(Ctx *c, Tensor rows, Tensor part, int which, bool back);
/* t [B, T, K, C] of a rank's positions becomes [B, seq, K, C] of the group's, in scratch. */
Err context_gather(Ctx *c, ContextCut cut, Comm *group, Tensor *t);
/* x[0] = the tree over the first dim of x [chunks, n, columns]. */
Err context_sum_chunks(Ctx *c, Tensor x);

/* ---- other positions, other heads ---- */

/* Changes on the way in, and back on the way out. */
typedef struct {
    bool cut;    /* positions are first changed for those of the other ContextCut */
    Comm *heads; /* ranks that then exchange positions for heads; NULL: none do */
} ReshardPlan;

/*
 * The arguments of a call whose positions or heads the plan changes. reshard_in replaces what `in`, `doc` and `out`
 * point at by tensors in scratch that are of the new ones; reshard_out brings results back to where they belong.
 * out[i] has the positions and heads of in[i], and columns of its own.
 */
typedef struct {
    Tensor *in[5], *doc, *out[3]; /* [B, T, heads, columns]; doc [B, T], or without data; unused ones NULL */
    Tensor own[2][3];             /* `out` before each change */
} Reshard;

Err reshard_in(Ctx *c, const ReshardPlan *p, Reshard *r);
Err reshard_out(Ctx *c, const ReshardPlan *p, Reshard *r);
/* Kept keys or values of an earlier slice become what reshard_in makes of those of the slice at work. */
Err reshard_kept(Ctx *c, const ReshardPlan *p, Tensor *t);

#endif
