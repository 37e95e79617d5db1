/*
 * What kinds of attention carry along the sequence, and how their queries meet keys wherever these are (keys.c): on
 * other ranks of world->cp, or in earlier slices. docs/context.md has the picture.
 */
#ifndef MEGATRAIN_LAYER_CONTEXT_H
#define MEGATRAIN_LAYER_CONTEXT_H

#include "layer/internal.h"

/*
 * The attention ops for this rank's queries of the slice at work and all keys that they may see: its own, those of the
 * other ranks of world->cp, and of earlier slices (keys.c). k, v, dk and dv are of its own positions, [B, T, K, C], and
 * k_span is q_span; dk and dv are whole; logit_max is of all heads of the layer. Where sequences are whole and a rank
 * has all of them, these are the ops.
 */
Err context_attention(Ctx *c, attention_fwd_args a);
Err context_attention_bwd(Ctx *c, attention_bwd_args a);

/* Rows and heads of lse and delta of context_attention's queries, [rows, heads] by their size: all heads of own
 * positions, or some of them of more positions. */
typedef struct {
    int64_t rows, first, heads;
} HeadRows;

HeadRows context_head_rows(const Ctx *c, int64_t rows, int64_t heads);

/* Ranks meet in every way but that of states. */
enum { ATTENTION_WAYS = ((1 << CONTEXT_COMMS) - 1) & ~(1 << CONTEXT_STATE) };

/* ---- slices (Carry) ---- */

/* Keys and values of an attention layer, [B, T, K, C], that later slices of the sequences read in this slot. ndim 0:
 * they have not been computed yet. */
typedef struct {
    Saved k, v;
} SliceKeys;

/*
 * Hands over the keys and values of a layer, [B, T, K, C], before context_attention, where sequences pass in slices
 * (c->slices.count > 1): later slices read them. pass: they do not lie in the slot's REGION_I, and are copied there.
 */
Err slice_keep_keys(Ctx *c, Tensor k, Tensor v, bool pass);

/* Gradients of keys and of values. In one layer, the sums to which later slices of a micro-batch have added so far are
 * f32 [places, elements of one slice] (keys_sums.c). */
typedef struct {
    Tensor of[2];
} SliceGrads;

/* The keys of a rank in one attention layer: heads, chunks of query heads that read one of them, widths. */
typedef struct {
    int64_t heads, chunks, k_cols, v_cols;
} SliceKeyShape;

/* Allocates in `state` the gradients that wait for c->slices.count slices, each of the shape of c->batch. The ranks of
 * cp meet in the layer as c->block.context says. ERR_MEMORY. */
Err slice_grads_init(const Ctx *c, SliceKeyShape shape, SliceGrads *g, Arena *state);

#endif
