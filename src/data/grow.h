/*
 * Arrays that grow by doubling, for the parts that run before training (tokenizers,
 * preprocessing). Owned by whoever declares the pointer; released with free().
 */
#ifndef MEGATRAIN_DATA_GROW_H
#define MEGATRAIN_DATA_GROW_H

#include <stdint.h>
#include <stdlib.h>

#include "base/err.h"

/* *items can hold at least `needed` items afterwards; ERR_MEMORY leaves it as it was. */
static inline Err grow_items(void **items, int64_t *capacity, int64_t needed, int64_t item_bytes)
{
    if (needed <= *capacity) return ERR_OK;
    int64_t count = *capacity < 16 ? 16 : *capacity, size_bytes;
    while (count < needed)
        if (__builtin_mul_overflow(count, 2, &count)) return err_set(ERR_MEMORY, "array length overflows");
    if (__builtin_mul_overflow(count, item_bytes, &size_bytes)) return err_set(ERR_MEMORY, "array size overflows");
    void *grown = realloc(*items, (size_t)size_bytes);
    if (!grown) return err_set(ERR_MEMORY, "cannot allocate %lld bytes of host memory", (long long)size_bytes);
    *items = grown;
    *capacity = count;
    return ERR_OK;
}

#define grow_to(items, capacity, needed) grow_items((void **)(items), (capacity), (needed), (int64_t)sizeof **(items))

#endif
