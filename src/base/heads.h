/*
 * How far tensor parallelism may cut grouped-query attention: a fact of the model, and with it of every rounding, so
 * the configuration's rules and the layers must read it from one place.
 */
#ifndef MEGATRAIN_BASE_HEADS_H
#define MEGATRAIN_BASE_HEADS_H

#include <stdint.h>

/*
 * Canonical parts of one kv head: each has 1 / parts of the head's columns and of the query heads that read it. 1 where
 * tp_blocks leaves kv heads whole; otherwise the largest power of two that gives up to tp_blocks parts in all.
 * tp may be any divisor of kv_heads * parts.
 */
static inline int64_t kv_head_parts(int64_t tp_blocks, int64_t heads, int64_t kv_heads, int64_t head_dim)
{
    int64_t parts = tp_blocks % kv_heads ? 1 : tp_blocks / kv_heads;
    while (parts > 1 && (heads / kv_heads % parts || head_dim % parts)) parts /= 2;
    return parts;
}

#endif
