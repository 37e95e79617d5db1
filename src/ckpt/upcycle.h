/*
 * Upcycling: the weights of a dense model as the start of a mixture of experts (docs/moe.md). A dense feed-forward
 * layer is cut along its width into `parts`, and expert e begins as part e % parts. There are as many copies of every
 * part.
 *
 *   dense    fc1 [F, D] (swiglu: gate, then up [F, D])            fc2 [D, F]
 *   expert   rows e % parts of F / parts (of gate and of up)      columns e % parts, times factor
 *
 * If both models have biases, the bias of fc1 is cut as its rows are. That of fc2 stays whole, [D], and is multiplied
 * by factor / parts, because each of the chosen experts adds it.
 *
 * The dense model has nothing for the router, which begins at random. Its rows begin alike for the parts of one copy
 * (ParamSpec.init_repeat), so that a token chooses whole copies.
 */
#ifndef MEGATRAIN_CKPT_UPCYCLE_H
#define MEGATRAIN_CKPT_UPCYCLE_H

#include "param/shard.h"

/* Source: He et al. 2024, "Upcycling Large Language Models into Mixture of Experts". */
typedef struct {
    int experts;
    int parts; /* divides experts, and topk */
    /* The weight of fc2 is multiplied by this, so that the sum over the chosen experts is what the dense layer gave. */
    float factor;
} Upcycle;

/* out [PARAM_NAME_MAX]: the name of the dense tensor that this tensor of a mixture begins as. False: there is none. */
bool upcycle_source(const char *name, char *out);

/* True if no dense model has anything for this tensor of a mixture. */
bool upcycle_is_new(const char *name);

/* The shape that the dense tensor must have for this parameter of a mixture. */
void upcycle_shape(const Upcycle *u, const Param *p, int64_t shape[2]);

/* Place of a part of the stored tensor: an element of the parameter that lies in box `to`, at (r, c), is the element at
 * (r, c) + `from` of the stored tensor, times factor. */
typedef struct {
    Box to;
    int64_t from[2];
    float factor;
} UpcycleWindow;

int upcycle_windows(const Upcycle *u, const Param *p); /* how many windows there are */
UpcycleWindow upcycle_window(const Upcycle *u, const Param *p, int index);

#endif
