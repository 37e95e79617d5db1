/* See save_heap.h. */
#include "engine/save_heap.h"

#include <string.h>

Err heap_init(SaveHeap *h, void *base, int64_t size_bytes, int blocks, SetupArena *setup)
{
    *h = (SaveHeap){ .base = base, .size_bytes = size_bytes, .capacity = blocks };
    return setup_array(setup, blocks, &h->live);
}

Err heap_take(SaveHeap *h, int64_t size_bytes, SaveBlock *out)
{
    int64_t at = 0;
    int i = 0;
    *out = (SaveBlock){ 0 };
    if (!size_bytes) return ERR_OK;
    size_bytes = arena_padded(size_bytes);
    while (i < h->count && h->live[i].offset - at < size_bytes) {
        at = h->live[i].offset + h->live[i].size_bytes;
        i++;
    }
    if (size_bytes > h->size_bytes - at)
        return err_set(ERR_MEMORY, "the saves of a micro-batch take %lld bytes, %lld of %lld are left",
                       (long long)size_bytes, (long long)(h->size_bytes - at), (long long)h->size_bytes);
    ASSERT(h->count < h->capacity);
    memmove(h->live + i + 1, h->live + i, (size_t)(h->count - i) * sizeof *h->live);
    h->count++;
    h->live[i] = *out = (SaveBlock){ at, size_bytes };
    if (at + size_bytes > h->peak_bytes) h->peak_bytes = at + size_bytes;
    return ERR_OK;
}

void heap_give(SaveHeap *h, SaveBlock block)
{
    int i = 0;
    if (!block.size_bytes) return;
    while (i < h->count && h->live[i].offset != block.offset) i++;
    ASSERT(i < h->count);
    h->count--;
    memmove(h->live + i, h->live + i + 1, (size_t)(h->count - i) * sizeof *h->live);
}
