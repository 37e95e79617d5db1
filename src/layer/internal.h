/* Shared by the layers alone. */
#ifndef MEGATRAIN_LAYER_INTERNAL_H
#define MEGATRAIN_LAYER_INTERNAL_H

#include "layer/layer.h"

Err wgrad_push(Ctx *c, Wgrad w);

/* The accumulator of a gradient, to be added to: cleared if nothing was in this step. */
Err grad_open(Ctx *c, int id, Tensor *acc);

/* To be called when the op that adds is on the stream. */
Err grad_added(Ctx *c, int id);

/* What a feed-forward layer does between its two products; chunk: of swiglu's columns (ops.def). */
Err activation_forward(Ctx *c, Activation activation, int64_t chunk, Tensor hidden, Tensor active);

/*
 * Of a mixture's choices index [N, K], whose weights are those, the ones that its experts take and their
 * ranks have room for: index with -1 in the places of the others. In scratch; index itself where nothing is dropped.
 * Collective over sp and ep.
 */
Err moe_choices_kept(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept);

/* Rows of this rank, of any dtype, to those of the micro-batch, in scratch; `own` itself in a group of one. Collective
 * over sp. */
Err moe_gather_units(Ctx *c, Tensor own, Tensor *all);

MoeRoom moe_room_of(const Moe *m, const Ctx *c);

/* Products of a leaf, at most, where a sum can be cut into so short ones (linear.c). */
enum { LEAF_MOST = 2048 };

/* Leaf of a sum that every rank forms whole. */
int64_t whole_leaf(int64_t length);

/* Leaf of a sum that tp cuts: a canonical chunk of the global length, or a part of one; not exact: of the local one. */
int64_t tree_leaf(const Ctx *c, int64_t global, int64_t local);

#endif
