/* The layer that a block of one layer has in the place of the other: it has no parameters, and the block passes it. */
#include "layer/layer.h"

static int64_t no_flop(const ModelSpec *s)
{
    (void)s;
    return 0;
}

static int no_score_heads(const ModelSpec *s)
{
    (void)s;
    return 0;
}

static Err no_cache(const void *own, DType dtype, void *cache, Arena *state)
{
    (void)own, (void)dtype, (void)cache, (void)state;
    return ERR_OK;
}

static Err no_grads(const void *own, const Ctx *c, void *grads, Arena *state)
{
    (void)own, (void)c, (void)grads, (void)state;
    return ERR_OK;
}

const LayerKind none_kind = { .name = "none",
                              .flop = no_flop,
                              .pair_flop = no_flop,
                              .score_heads = no_score_heads,
                              .carry = { .ways = ~0U, .cache = no_cache, .grads = no_grads } };
