/*
 * What device memory serves of a grouped product (cuda/grouped.cu) whose blocks run in some order: a model of L2.
 *
 * A wave of blocks runs at once, in step along the depth; then comes the next wave. L2 keeps what was used last, in
 * pieces of a tile by as much depth; results take room in it as well. A chip's L2 is two halves that keep some things
 * twice, and its blocks do not stay in step: the counts are for comparing orders, and a floor.
 */
#ifndef MEGATRAIN_BENCH_L2_MODEL_H
#define MEGATRAIN_BENCH_L2_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../cuda/grouped_order.h"
#include "base/err.h"

enum {
    L2_TILE = 128,
    L2_PIECE = L2_TILE * L2_TILE * 2, /* bytes */
    L2_WAVE = 2 * 132,                /* two blocks on each multiprocessor of an H100 */
    L2_BYTES = 50000000,
    L2_BUCKETS = 1 << 16
};

/* ---- what was used last ---- */

typedef struct {
    uint64_t key;
    int older, newer; /* pieces used before and after it, -1: none */
    int next;         /* in its bucket */
} L2Piece;

typedef struct {
    L2Piece *piece;
    int room, count, newest, oldest;
    int bucket[L2_BUCKETS];
} L2;

static inline void l2_open(L2 *l, int64_t bytes)
{
    l->room = (int)(bytes / L2_PIECE);
    l->count = 0;
    l->newest = l->oldest = -1;
    memset(l->bucket, 0xff, sizeof l->bucket);
    l->piece = malloc((size_t)l->room * sizeof *l->piece);
    ASSERT(l->piece);
}

static inline void l2_close(L2 *l) { free(l->piece); }

static inline int *l2_bucket(L2 *l, uint64_t key) { return &l->bucket[key * 0x9E3779B97F4A7C15u >> 48]; }

static inline void l2_take_out(L2 *l, int i)
{
    const L2Piece *p = &l->piece[i];
    *(p->newer < 0 ? &l->newest : &l->piece[p->newer].older) = p->older;
    *(p->older < 0 ? &l->oldest : &l->piece[p->older].newer) = p->newer;
}

static inline void l2_put_first(L2 *l, int i)
{
    L2Piece *p = &l->piece[i];
    p->newer = -1, p->older = l->newest;
    *(p->older < 0 ? &l->oldest : &l->piece[p->older].newer) = i;
    l->newest = i;
}

/* Room for a piece: what was not used for the longest time is forgotten. */
static inline int l2_free_piece(L2 *l)
{
    if (l->count < l->room) return l->count++;
    const int i = l->oldest;
    int *at = l2_bucket(l, l->piece[i].key);
    while (*at != i) at = &l->piece[*at].next;
    *at = l->piece[i].next;
    l2_take_out(l, i);
    return i;
}

/* Bytes that memory has to serve: 0, or the piece. */
static inline int64_t l2_use(L2 *l, uint64_t key)
{
    int *bucket = l2_bucket(l, key), i = *bucket;
    while (i >= 0 && l->piece[i].key != key) i = l->piece[i].next;
    const bool missed = i < 0;
    if (missed) {
        i = l2_free_piece(l);
        l->piece[i].key = key, l->piece[i].next = *bucket;
        *bucket = i;
    } else l2_take_out(l, i);
    l2_put_first(l, i);
    return missed ? L2_PIECE : 0;
}

/* ---- a product ---- */

/* out [rows x columns] (+)= a b over `depth`, in 16 bits. fwd, dx: the rows are those of all experts, as many each; dw:
 * of one, and there is such a product for each expert. */
typedef struct {
    int64_t rows, columns, depth;
    int experts;
    bool dw;
} GroupedShape;

typedef GroupedPlace GroupedOrder(uint32_t block, uint32_t rows, uint32_t columns);

static inline int64_t l2_tiles(int64_t n) { return (n + L2_TILE - 1) / L2_TILE; }

typedef struct {
    GroupedShape shape;
    GroupedOrder *order;
    int64_t expert_tiles, rows, columns; /* tiles: of an expert, of all in a product */
} GroupedWalk;

static inline uint64_t l2_key(int64_t operand, int64_t panel, int64_t piece)
{
    return (uint64_t)((operand << 40 | panel) << 20 | piece);
}

/* Place of block number `n` of all products. */
static inline GroupedPlace l2_place(const GroupedWalk *w, int64_t n, int64_t *product)
{
    *product = n / (w->rows * w->columns);
    return w->order((uint32_t)(n % (w->rows * w->columns)), (uint32_t)w->rows, (uint32_t)w->columns);
}

static inline int64_t l2_step(L2 *l, const GroupedWalk *w, int64_t n, int64_t piece)
{
    int64_t product;
    const GroupedPlace p = l2_place(w, n, &product);
    const int64_t expert = w->shape.dw ? product : p.row / w->expert_tiles;
    return l2_use(l, l2_key(0, product * w->rows + p.row, piece)) +
           l2_use(l, l2_key(1, expert * w->columns + p.column, piece));
}

/* Results of 32 bits are two pieces. */
static inline int64_t l2_store(L2 *l, const GroupedWalk *w, int64_t n)
{
    int64_t bytes = 0;
    for (int i = 0; i <= w->shape.dw; i++) bytes += l2_use(l, l2_key(2, n, i));
    return bytes;
}

/* Bytes read from and written to device memory. */
static inline int64_t grouped_traffic(GroupedShape shape, GroupedOrder *order, int64_t l2_bytes)
{
    GroupedWalk w = { shape, order, l2_tiles(shape.rows / shape.experts), 0, l2_tiles(shape.columns) };
    w.rows = shape.dw ? l2_tiles(shape.rows) : w.expert_tiles * shape.experts;
    const int64_t blocks = w.rows * w.columns * (shape.dw ? shape.experts : 1), pieces = l2_tiles(shape.depth);
    int64_t bytes = 0;
    static L2 l2;
    l2_open(&l2, l2_bytes);
    for (int64_t first = 0; first < blocks; first += L2_WAVE) {
        const int64_t end = first + L2_WAVE < blocks ? first + L2_WAVE : blocks;
        for (int64_t k = 0; k < pieces; k++)
            for (int64_t n = first; n < end; n++) bytes += l2_step(&l2, &w, n, k);
        for (int64_t n = first; n < end; n++) bytes += l2_store(&l2, &w, n);
    }
    l2_close(&l2);
    return bytes;
}

#endif
