/* Sums over ranks, in pieces small enough that partial sums stay in the nearest cache; see reduce.h. */
#include "comm/reduce.h"

#include <string.h>

enum { PIECE = 256, DEPTH = 24 }; /* elements; a tree over 2^22 ranks */

/* (out may be a: the same index, so nothing in the way of vectors) */
static void add_f32(float *out, const float *a, const float *b, int64_t n)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static void add_i64(int64_t *out, const int64_t *a, int64_t n)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) out[i] = (int64_t)((uint64_t)out[i] + (uint64_t)a[i]);
}

static void max_i64(int64_t *out, const int64_t *a, int64_t n)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) out[i] = a[i] > out[i] ? a[i] : out[i];
}

/* A binary counter of partial sums: entry k is a source, or the sum in sums[k]. */
static void tree_f32(float *dst, const void *const *src, int ranks, int64_t first, int64_t n)
{
    float sums[DEPTH][PIECE];
    const float *part[DEPTH];
    int top = 0;
    for (int r = 0; r < ranks; r++) {
        part[top++] = (const float *)src[r] + first;
        bool last = r == ranks - 1;
        for (int x = r; top > 1 && (last || (x & 1)); x >>= 1) {
            top--;
            add_f32(sums[top - 1], part[top - 1], part[top], n);
            part[top - 1] = sums[top - 1];
        }
    }
    memmove(dst + first, part[0], (size_t)n * sizeof *dst);
}

static void integers(CommKind kind, int64_t *dst, const void *const *src, int ranks, int64_t first, int64_t n)
{
    int64_t result[PIECE];
    memcpy(result, (const int64_t *)src[0] + first, (size_t)n * sizeof *result);
    for (int r = 1; r < ranks; r++) {
        const int64_t *next = (const int64_t *)src[r] + first;
        if (kind == COMM_MAX_I64) max_i64(result, next, n);
        else add_i64(result, next, n);
    }
    memcpy(dst + first, result, (size_t)n * sizeof *result);
}

void comm_reduce(CommKind kind, void *dst, const void *const *src, int ranks, int64_t count)
{
    bool is_float = kind == COMM_REDUCE_TREE_F32 || kind == COMM_REDUCE_SCATTER_TREE_F32;
    for (int64_t first = 0; first < count; first += PIECE) {
        int64_t n = count - first < PIECE ? count - first : PIECE;
        if (is_float) tree_f32(dst, src, ranks, first, n);
        else integers(kind, dst, src, ranks, first, n);
    }
}
