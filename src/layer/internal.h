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

/* Leaf of a sum that tp cuts: a canonical chunk of the global length, or one chain over the local one. */
int64_t tree_leaf(const Ctx *c, int64_t global, int64_t local);

#endif
