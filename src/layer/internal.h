/* Shared by the layers alone. */
#ifndef MEGATRAIN_LAYER_INTERNAL_H
#define MEGATRAIN_LAYER_INTERNAL_H

#include "layer/layer.h"

Err wgrad_push(Ctx *c, Wgrad w);

/* The accumulator of a gradient, to be added to: cleared if nothing was in this step. */
Err grad_open(Ctx *c, int id, Tensor *acc);

/* The same, for an op that overwrites it instead of adding if nothing was: *fresh. */
Tensor grad_target(Ctx *c, int id, bool *fresh);

/* To be called when the op that adds is on the stream. */
Err grad_added(Ctx *c, int id);

/* sum += x, of rows as outside tensor-parallel regions. */
Err add_rows(Ctx *c, Tensor sum, Tensor x);

/* Products of a leaf, at most, where a sum can be cut into so short ones (linear.c). */
enum { LEAF_MOST = 2048 };

/*
 * The attention ops for this rank's queries of the slice at work and all keys that they may see: its own, those of the
 * other ranks of world->cp, and of earlier slices (keys.c). k, v, dk and dv are of its own positions, [B, T, K, C], and
 * k_span is q_span; dk and dv are whole. Where sequences are whole and a rank has all of them, these are the ops.
 */
Err context_attention(Ctx *c, attention_fwd_args a);
Err context_attention_bwd(Ctx *c, attention_bwd_args a);

/*
 * Where sequences pass in slices (c->slices.count > 1) a layer hands its keys and values, [B, T, K, C], over before
 * context_attention: later slices read them. pass: they do not lie in the slot's REGION_I, and are copied there.
 */
Err slice_keep_keys(Ctx *c, Tensor k, Tensor v, bool pass);

/* What lse and delta of context_attention's queries, [rows, heads] by their size, are of: all heads of own positions,
 * or some of them of more positions. */
typedef struct {
    int64_t rows, first, heads;
} HeadRows;

HeadRows context_head_rows(const Ctx *c, int64_t rows, int64_t heads);

/* rows [B * T, columns] of a rank's positions become [B * seq, columns] of all, in scratch; and back. As they are where
 * no ranks share sequences. Collective over cp. */
Err context_all_rows(Ctx *c, Tensor *rows);
Err context_own_rows(Ctx *c, Tensor *rows);
/* A tensor in a region of the segment at work, as it is kept; and one that another slot keeps. */
Saved saved_of(const Ctx *c, Region region, Tensor t);
Tensor save_in(const Slot *slot, Saved saved);

/* y = x, to the nearest of y's dtype. */
Err cast_values(Ctx *c, Tensor y, Tensor x);
/* x itself if it is in fp32, else a copy in scratch that is. */
Err as_fp32(Ctx *c, Tensor x, Tensor *wide);
/* Where what several calls add to x is summed: x itself, or as much in fp32, in scratch; and x from it. */
Err wide_sum(Ctx *c, Tensor x, Tensor *sum);
Err round_sum(Ctx *c, Tensor x, Tensor sum);
/* Leaf of a sum that every rank forms whole. */
int64_t whole_leaf(int64_t length);

/* Leaf of a sum that tp cuts: a canonical chunk of the global length, or a part of one; not exact: of the local one. */
int64_t tree_leaf(const Ctx *c, int64_t global, int64_t local);

#endif
