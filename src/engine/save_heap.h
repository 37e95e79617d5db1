/*
 * Memory for what is kept between forward and backward, cut into blocks whose lives overlap without nesting. First fit
 * by address, so the same calls give the same addresses every step, and blocks of one size leave no gaps: the peak is
 * then their greatest number times that size. Walking an action list with `heap_take` and `heap_give` alone tells what
 * the list needs.
 */
#ifndef MEGATRAIN_ENGINE_SAVE_HEAP_H
#define MEGATRAIN_ENGINE_SAVE_HEAP_H

#include "base/arena.h"

typedef struct {
    int64_t offset, size_bytes;
} SaveBlock;

typedef struct {
    char *base; /* NULL where only the need is counted */
    int64_t size_bytes, peak_bytes;
    SaveBlock *live; /* [capacity], ascending */
    int count, capacity;
} SaveHeap;

/* At most `blocks` at a time; the table is from `setup`. */
Err heap_init(SaveHeap *h, void *base, int64_t size_bytes, int blocks, SetupArena *setup);
/* Sizes are rounded up to ARENA_ALIGN; 0 takes nothing. ERR_MEMORY when it does not fit. */
Err heap_take(SaveHeap *h, int64_t size_bytes, SaveBlock *out);
void heap_give(SaveHeap *h, SaveBlock block);

#endif
