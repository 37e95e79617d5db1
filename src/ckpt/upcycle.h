/*
 * Upcycling: the weights of a dense model as the start of a mixture of experts (docs/moe.md). A dense feed-forward
 * layer is cut along its width into `parts`, and expert e begins as part e % parts: of every part there are as many
 * copies.
 *
 *   dense    fc1 [F, D] (swiglu: gate, then up [F, D])            fc2 [D, F]
 *   expert   rows e % parts of F / parts (of gate and of up)      columns e % parts, times factor
 *
 * Biases, if both have them: of fc1 as its rows are; of fc2 the whole [D], which each of the chosen experts adds, times
 * factor / parts.
 *
 * The router has no model and begins at random; its rows begin alike for the parts of one copy (ParamSpec.init_repeat),
 * so that a token chooses whole copies.
 */
#ifndef MEGATRAIN_CKPT_UPCYCLE_H
#define MEGATRAIN_CKPT_UPCYCLE_H

#include "param/shard.h"

/* Source: He et al. 2024, "Upcycling Large Language Models into Mixture of Experts". */
typedef struct {
    int experts;
    int parts; /* divides experts, and topk */
    float
        factor; /* of fc2's weight, by which the sum over the chosen experts comes to what the dense layer gave */
} Upcycle;

/* The name of the dense tensor that this one of a mixture begins as; false: there is none. out: PARAM_NAME_MAX. */
bool upcycle_source(const char *name, char *out);

/* True for a tensor of a mixture that no dense model has anything for. */
bool upcycle_is_new(const char *name);

/* The shape that the dense tensor must have for this one, of a mixture. */
void upcycle_shape(const Upcycle *u, const Param *p, int64_t shape[2]);

/* Where a part of the stored tensor belongs: box `to` of the parameter holds what `from` + to's offset is in the stored
 * one, times factor. */
typedef struct {
    Box to;
    int64_t from[2];
    float factor;
} UpcycleWindow;

int upcycle_windows(const Upcycle *u, const Param *p); /* how many */
UpcycleWindow upcycle_window(const Upcycle *u, const Param *p, int index);

#endif
