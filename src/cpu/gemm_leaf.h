/*
 * The register kernel of leaves of a fixed-point product, for whole tiles of packed operands. A leaf that is made lies
 * in the L1 cache, in floats, and waits for the kernel of the next one. That one rounds it and adds it to integers
 * while its own chain runs, a vector at each k. A chain fills the pipes that multiply and leaves the others idle;
 * rounding alone does the reverse. Used by gemm.c and gemm_pairs.c.
 */
#ifndef MEGATRAIN_CPU_GEMM_LEAF_H
#define MEGATRAIN_CPU_GEMM_LEAF_H

#include "cpu/gemm_kernel.h"

/* Leaves of a tile that lie in memory, TILE_ELEMS apart, become one sum of integers. */
typedef struct {
    const float *leaf;
    int64_t rows, cols;
    const int64_t *from; /* integers that the leaves are added to; NULL: 0 */
    int64_t *to;         /* where the sum goes */
    int64_t from_row, to_row;
    float scale; /* 2^shift */
    float limit; /* a leaf times 2^shift must be below */
    bool stream; /* the result passes the caches */
} FixedAdd;

typedef struct {
    const float *a, *b; /* [k][TILE_ROWS], [k][TILE_COLS] */
    int64_t k;
    float *sum;              /* [TILE_ROWS][TILE_COLS] */
    const FixedAdd *waiting; /* one leaf, of a whole tile, that has `from`; NULL: none */
    double magic;            /* 1.5 * 2^(52 - shift): the last bit of a sum with it is 2^-shift */
    TileFixed *fixed;
} Leaf;

typedef void (*LeafKernel)(const Leaf *);

#if defined(CPU_ISA_avx512) && !defined(GEMM_TILES)
#define EACH_ROW _Pragma("GCC unroll 8") for (int i = 0; i < TILE_ROWS; i++)
#define EACH_VEC _Pragma("GCC unroll 3") for (int v = 0; v < TILE_VECS; v++)

VEC_FN void leaf_k(vf acc[TILE_ROWS][TILE_VECS], const float *a, const float *b, TileFamily family)
{
    enum { AHEAD = 8 * TILE_COLS };
    vf row[TILE_VECS];
    EACH_VEC row[v] = vf_load(b + v * VEC);
    EACH_VEC __builtin_prefetch(b + AHEAD + v * VEC);
    EACH_ROW
    {
        const vf x = family == TILE_PAIRS ? vf_pair(a + i) : vf_set1(a[i]);
        EACH_VEC acc[i][v] = tile_step(family, x, row[v], acc[i][v]);
    }
}

/* A row of the integers that come next (TileFixed). */
VEC_FN void leaf_soon(TileFixed *f)
{
    if (f->soon_rows <= 0) return;
    for (int v = 0; v < 2 * TILE_VECS; v++) __builtin_prefetch(f->soon + v * 64, 1);
    f->soon += f->soon_row;
    f->soon_rows--;
}

/* Rest of a leaf that waits. */
typedef struct {
    const float *leaf;
    const int64_t *from;
    int64_t *to;
    int64_t from_row, to_row, rows;
    double magic;
    int64_t magic_bits;
    bool stream;
} Waiting;

/* Vector v of its next row. |leaf * 2^shift| < 2^51, so the bits of the sum with `magic` are those of `magic` plus the
 * integer, rounded as llrint does. */
VEC_FN void leaf_add(const Waiting *w, int v)
{
    for (int j = v * VEC; j < (v + 1) * VEC; j += 8) {
        const __m512d x = _mm512_add_pd(_mm512_cvtps_pd(_mm256_loadu_ps(w->leaf + j)), _mm512_set1_pd(w->magic));
        const __m512i n = _mm512_sub_epi64(_mm512_castpd_si512(x), _mm512_set1_epi64(w->magic_bits));
        const __m512i sum = _mm512_add_epi64(n, _mm512_loadu_si512(w->from + j));
        if (w->stream) _mm512_stream_si512((void *)(w->to + j), sum);
        else _mm512_storeu_si512(w->to + j, sum);
    }
}

VEC_FN void leaf_next_row(Waiting *w)
{
    w->leaf += TILE_COLS, w->from += w->from_row, w->to += w->to_row;
    w->rows--;
}

VEC_FN Waiting leaf_waiting(const Leaf *t)
{
    const FixedAdd *f = t->waiting;
    if (!f) return (Waiting){ 0 };
    Waiting w = { f->leaf, f->from, f->to, f->from_row, f->to_row, TILE_ROWS, t->magic, .stream = f->stream };
    memcpy(&w.magic_bits, &w.magic, sizeof w.magic_bits);
    return w;
}

VEC_FN void leaf_close(const Leaf *t, vf acc[TILE_ROWS][TILE_VECS])
{
    vf squares[TILE_VECS];
    vm fit = vm_first_n(VEC);
    EACH_VEC squares[v] = vf_zero();
    EACH_ROW EACH_VEC squares[v] = vf_fma(acc[i][v], acc[i][v], squares[v]);
    EACH_ROW EACH_VEC vf_store(t->sum + i * TILE_COLS + v * VEC, acc[i][v]);
    EACH_VEC fit = vm_and(fit, vf_lt(squares[v], vf_set1(t->fixed->limit2)));
    if (vm_any(vm_not(fit))) t->fixed->beyond = true;
}

VEC_FN void leaf_kernel(const Leaf *t, TileFamily family)
{
    vf acc[TILE_ROWS][TILE_VECS];
    const float *a = t->a, *b = t->b;
    int64_t left = t->k;
    Waiting w = leaf_waiting(t);
    EACH_ROW EACH_VEC acc[i][v] = vf_zero();
    leaf_soon(t->fixed);
    for (; w.rows > 0 && left >= TILE_VECS; left -= TILE_VECS) {
        EACH_VEC
        {
            leaf_k(acc, a + v * TILE_ROWS, b + v * TILE_COLS, family);
            leaf_add(&w, v);
        }
        a += TILE_VECS * TILE_ROWS, b += TILE_VECS * TILE_COLS;
        leaf_next_row(&w);
    }
    while (left > 0) {
        int64_t k = left < SOON_K ? left : SOON_K;
        left -= k;
        for (; k > 0; k--, a += TILE_ROWS, b += TILE_COLS) leaf_k(acc, a, b, family);
        leaf_soon(t->fixed);
    }
    for (; w.rows > 0; leaf_next_row(&w)) EACH_VEC leaf_add(&w, v);
    leaf_close(t, acc);
}
#undef EACH_VEC
#undef EACH_ROW

#define LEAF_KERNEL(family, name) \
    static void name(const Leaf *t) { leaf_kernel(t, family); }
#endif

/* The kernel of pairs, where there are tile_pairs (gemm_pairs.c). */
LeafKernel CPU(leaf_pairs)(void);

#endif
