/*
 * How queries meet the keys of other ranks and of earlier slices (docs/context.md has the picture). Shared by keys.c,
 * reshard.c and the files that they name alone.
 */
#ifndef MEGATRAIN_LAYER_KEYS_H
#define MEGATRAIN_LAYER_KEYS_H

#include "layer/internal.h"

/* What is decided before the first message, for one layer. */
typedef struct {
    bool cut;    /* positions in order are first changed for zigzag parts */
    Comm *heads; /* ranks that then exchange positions for heads; NULL: none do */
    Comm
        *ranks; /* ranks that then have zigzag parts of the keys' slices; NULL: every rank has whole slices */
    bool parts; /* keys of `ranks` come part by part, instead of all at once */
} KeyPlan;

/* Of the layer at work: by c->context, c->cut, the ranks of cp and slices. */
KeyPlan key_plan(const Ctx *c);

/* ---- positions (reshard.c) ---- */

/* Positions of a slice, on all ranks; of a sequence that is not cut. */
int64_t slice_length(const Ctx *c);
/* Rows in the order of ranks, x [ranks, samples, T, ...], to rows in the order of positions, `whole`
 * [samples, seq, K, C]; or back. */
Err context_move(Ctx *c, ContextCut cut, int ranks, Tensor x, Tensor whole, bool back);
/* Part `which` (0, 1) of this rank's positions, from rows [B, T, ...] to part [B, T / 2, ...]; or back. */
Err context_move_part(Ctx *c, Tensor rows, Tensor part, int which, bool back);
/* t [B, T, K, C] of a rank's positions becomes [B, seq, K, C] of the group's, in scratch. */
Err context_gather(Ctx *c, ContextCut cut, Comm *group, Tensor *t);
/* x[0] = the tree over the first dim of x [chunks, n, columns]. */
Err context_sum_chunks(Ctx *c, Tensor x);

/*
 * The arguments of a call whose positions or heads the plan changes. reshard_in replaces what `in`, `doc` and `out`
 * point at by tensors in scratch that are of the new ones; reshard_out brings results back to where they belong.
 * out[i] has the positions and heads of in[i], and columns of its own.
 */
typedef struct {
    Tensor *in[5], *doc, *out[3]; /* [B, T, heads, columns]; doc [B, T], or without data; unused ones NULL */
    Tensor own[2][3];             /* `out` before each change */
} Reshard;

Err reshard_in(Ctx *c, const KeyPlan *p, Reshard *r);
Err reshard_out(Ctx *c, const KeyPlan *p, Reshard *r);
/* Kept keys or values of an earlier slice become what reshard_in makes of those of the slice at work. */
Err reshard_kept(Ctx *c, const KeyPlan *p, Tensor *t);

/* ---- the ways that they come (context_ring.c, slices.c) ---- */

Err context_ring(Ctx *c, Comm *group, attention_fwd_args a);
Err context_ring_bwd(Ctx *c, Comm *group, attention_bwd_args a);
Err slice_attention(Ctx *c, const KeyPlan *p, attention_fwd_args a);
Err slice_attention_bwd(Ctx *c, const KeyPlan *p, attention_bwd_args a);

#endif
