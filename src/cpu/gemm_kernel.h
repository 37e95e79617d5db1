/*
 * The register kernels below every product: a tile of C of at most TILE_ROWS x TILE_COLS, kept in vector
 * registers while k runs. Used by gemm.c and gemm_pairs.c.
 *
 *            b[k][0 .. cols)          one row of B: `vecs` vectors of 16
 *          +------------------+
 *   a[i][k]| acc[rows][vecs]  |       acc = fma(broadcast a, b, acc), k ascending
 *          +------------------+
 *
 * Each lane is the scalar chain c = fmaf(a, b, c), so tile sizes, which differ between the instruction sets
 * and at the edges of a matrix, never change a bit. A is read as scalars with any two strides, so a
 * row-major A needs no packing; B needs contiguous rows.
 *
 * There are three families of them, by what a k is (gemm.h, DOT_VDPBF16): fma as above; flushed, the same without
 * denormals; pairs, where an element is two bf16 numbers that lie in place of a float, and k counts these. Beside them
 * are depths (gemm_depths.h), which sum as DOT_AMX does.
 *
 * 8 x 48 (AVX-512): 24 accumulators, 8 broadcasts and 3 loads for 24 fma. 6 x 16 (AVX2): 12 accumulators.
 */
#ifndef MEGATRAIN_CPU_GEMM_KERNEL_H
#define MEGATRAIN_CPU_GEMM_KERNEL_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "cpu/vec.h"

#if defined(GEMM_TILES)
enum { TILE_ROWS = 32, TILE_VECS = 2 }; /* 2 x 2 tiles of TDPBF16PS */
#elif defined(CPU_ISA_avx512)
enum { TILE_ROWS = 8, TILE_VECS = 3 };
#elif defined(CPU_ISA_avx2)
enum { TILE_ROWS = 6, TILE_VECS = 1 };
#else
enum { TILE_ROWS = 4, TILE_VECS = 1 };
#endif
enum { TILE_COLS = TILE_VECS * VEC, TILE_ELEMS = TILE_ROWS * TILE_COLS };

typedef enum {
    TILE_SET,      /* c = chain from 0 */
    TILE_CONTINUE, /* c = chain from c */
    TILE_ADD,      /* c = c + chain from 0 */
} TileStart;

typedef enum { TILE_FMA, TILE_FLUSHED, TILE_PAIRS } TileFamily;

/* For chains that will be integers: notes squares, of one or summed, not below `limit2`. Whole vectors only. Meanwhile
 * the kernel asks for rows of integers that come next, one every SOON_K k's: of more lines at once than a processor
 * keeps track of the chain would wait for the rest. */
enum { SOON_K = 32 };
typedef struct {
    float limit2;
    bool beyond;      /* set, never cleared */
    const char *soon; /* these rows: TILE_COLS integers each */
    int64_t soon_row; /* bytes from one to the next */
    int64_t soon_rows;
} TileFixed;

typedef struct {
    const float *a, *b;
    int64_t a_row, a_k; /* element (i, k) of A is a[i * a_row + k * a_k] */
    int64_t b_k;        /* row k of B starts at b + k * b_k */
    int64_t ahead;      /* rows of B to prefetch ahead */
    float *c;
    int64_t c_row;
    int64_t k;
    int64_t rows, cols; /* the tile's, at most TILE_ROWS and TILE_COLS */
    TileStart start;
    int64_t more;                   /* further tiles, of the same shape: */
    int64_t a_tile, b_tile, c_tile; /* floats from one to the next */
    /* Not NULL: tile i has starts[i + 1] - starts[i] k's instead of `k`, and its a and b begin where those of the tile
     * before end. */
    const int64_t *starts;
    TileFixed *fixed;
} Tile;

#if defined(__AVX512BF16__)
VEC_FN vf vf_pair(const float *p)
{
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
}
VEC_FN vf vf_fma_pairs(vf x, vf y, vf c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(x), (__m512bh)_mm512_castps_si512(y));
}
#else
VEC_FN vf vf_pair(const float *p) { return vf_set1(*p); }
VEC_FN vf vf_fma_pairs(vf x, vf y, vf c) { return vf_fma(x, y, c); } /* (no family of it is built) */
#endif

VEC_FN vf tile_step(TileFamily family, vf x, vf y, vf c)
{
    return family == TILE_PAIRS     ? vf_fma_pairs(x, y, c)
           : family == TILE_FLUSHED ? vf_fma_flushed(x, y, c)
                                    : vf_fma(x, y, c);
}

/* One kernel for constant family, rows, vecs and (if not 0) columns `cols` < 16 in use of a single vector. */
VEC_FN void tile_kernel(const Tile *t, TileFamily family, int rows, int vecs, int cols)
{
    vf acc[TILE_ROWS][TILE_VECS];
    const int64_t s = t->a_row, a_k = t->a_k, b_k = t->b_k, ahead = t->ahead * b_k, c_row = t->c_row;
    const TileStart start = t->start;
    const float *a_tile = t->a, *b_tile = t->b;
    const int64_t *starts = t->starts;
    float *c = t->c;
    int64_t more = t->more;
#define EACH_ROW _Pragma("GCC unroll 8") for (int i = 0; i < rows; i++)
#define EACH_VEC _Pragma("GCC unroll 3") for (int v = 0; v < vecs; v++)
/* lest the addresses of all rows be worked out beforehand, and kept in memory while k runs */
#define HIDE(p) __asm__("" : "+r"(p))
#define LOAD(p) (cols ? vf_load_n((p), cols) : vf_load(p))
    const bool fixed = t->fixed && !cols;
    vf squares[TILE_VECS];
    EACH_VEC squares[v] = vf_zero();
    int64_t soon_rows = fixed ? t->fixed->soon_rows : 0;
    const char *soon = fixed ? t->fixed->soon : NULL;
    do {
        const float *b = b_tile, *a = a_tile, *a3 = rows > 3 ? a + 3 * s : a, *a6 = rows > 6 ? a + 6 * s : a;
        if (start == TILE_CONTINUE) {
            const float *row = c;
            HIDE(row);
            EACH_ROW
            {
                EACH_VEC acc[i][v] = LOAD(row + v * VEC);
                if (family == TILE_FLUSHED) EACH_VEC acc[i][v] = vf_flush(acc[i][v]);
                EACH_VEC if (more > 0) __builtin_prefetch(row + t->c_tile + v * VEC, 1);
                row += c_row;
            }
        } else {
            EACH_ROW EACH_VEC acc[i][v] = vf_zero();
        }
        for (int64_t left = starts ? starts[1] - starts[0] : t->k; left > 0;) {
            int64_t k = left < SOON_K ? left : SOON_K;
            left -= k;
            if (soon_rows > 0) {
                for (int v = 0; v < 2 * vecs; v++) __builtin_prefetch(soon + v * 64, 1);
                soon += t->fixed->soon_row;
                soon_rows--;
            }
            for (; k > 0; k--) {
                vf row[TILE_VECS];
                EACH_VEC row[v] = LOAD(b + v * VEC);
                EACH_VEC __builtin_prefetch(b + ahead + v * VEC);
                EACH_ROW
                {
                    /* i * s as the address modes of x86 have it: three bases and the factors 1, 2, 4 */
                    const float *p = i >= 6 ? a6 + (i - 6) * s : i == 3 || i == 5 ? a3 + (i - 3) * s : a + i * s;
                    const vf x = family == TILE_PAIRS ? vf_pair(p) : vf_set1(*p);
                    EACH_VEC acc[i][v] = tile_step(family, x, row[v], acc[i][v]);
                }
                a += a_k, a3 += a_k, a6 += a_k, b += b_k;
            }
        }
        if (fixed) EACH_ROW EACH_VEC squares[v] = vf_fma(acc[i][v], acc[i][v], squares[v]);
        float *row = c;
        HIDE(row);
        if (start == TILE_ADD) {
            const float *sum = row;
            EACH_ROW
            {
                EACH_VEC acc[i][v] = vf_add(LOAD(sum + v * VEC), acc[i][v]);
                sum += c_row;
            }
        }
        EACH_ROW
        {
            EACH_VEC
            {
                if (cols) vf_store_n(row + v * VEC, acc[i][v], cols);
                else vf_store(row + v * VEC, acc[i][v]);
            }
            row += c_row;
        }
        a_tile = starts ? a : a_tile + t->a_tile;
        b_tile = starts ? b : b_tile + t->b_tile;
        c += t->c_tile;
        if (starts) starts++;
    } while (more-- > 0);
    if (fixed) {
        /* if the sum of all squares is below the limit, each of them is */
        vm fit = vm_first_n(VEC);
        EACH_VEC fit = vm_and(fit, vf_lt(squares[v], vf_set1(t->fixed->limit2)));
        if (vm_any(vm_not(fit))) t->fixed->beyond = true;
        t->fixed->soon = soon, t->fixed->soon_rows = soon_rows;
    }
#undef LOAD
#undef HIDE
#undef EACH_VEC
#undef EACH_ROW
}

typedef void (*TileKernel)(const Tile *, int cols);

/* The instances of a family for so many rows, with 1, 2, ... full vectors; by_vecs[0] for the last columns, fewer than
 * 16. A family is a list of these, the largest first. */
typedef struct {
    int rows;
    TileKernel by_vecs[TILE_VECS + 1];
} TileKernels;

#define TILE_KERNEL(family, name, r, v)                            \
    static void kernel_##name##_##r##x##v(const Tile *t, int cols) \
    {                                                              \
        (void)cols;                                                \
        tile_kernel(t, family, r, v ? v : 1, v ? 0 : cols);        \
    }
#if defined(CPU_ISA_avx512)
#define TILE_ROW(f, n, r) \
    TILE_KERNEL(f, n, r, 0) TILE_KERNEL(f, n, r, 1) TILE_KERNEL(f, n, r, 2) TILE_KERNEL(f, n, r, 3)
#define TILE_NAMES(n, r)                                                                              \
    {                                                                                                 \
        r, { kernel_##n##_##r##x0, kernel_##n##_##r##x1, kernel_##n##_##r##x2, kernel_##n##_##r##x3 } \
    }
#define TILE_MOST 8
#else
#define TILE_ROW(f, n, r) TILE_KERNEL(f, n, r, 0) TILE_KERNEL(f, n, r, 1)
#define TILE_NAMES(n, r)                                  \
    {                                                     \
        r, { kernel_##n##_##r##x0, kernel_##n##_##r##x1 } \
    }
#endif
#if defined(CPU_ISA_avx2)
#define TILE_MOST 6
#endif
/* Defines a family, const TileKernels NAME[]. */
#if defined(TILE_MOST)
#define TILE_FAMILY(f, n)                                                                               \
    TILE_ROW_MOST(f, n, TILE_MOST)                                                                      \
    TILE_ROW(f, n, 4)                                                                                   \
    TILE_ROW(f, n, 2)                                                                                   \
    TILE_ROW(f, n, 1)                                                                                   \
    static const TileKernels n[] = { TILE_NAMES_MOST(n, TILE_MOST), TILE_NAMES(n, 4), TILE_NAMES(n, 2), \
                                     TILE_NAMES(n, 1) };
#define TILE_ROW_MOST(f, n, r) TILE_ROW(f, n, r)
#define TILE_NAMES_MOST(n, r) TILE_NAMES(n, r)
#else
#define TILE_FAMILY(f, n) \
    TILE_ROW(f, n, 4)     \
    TILE_ROW(f, n, 2)     \
    TILE_ROW(f, n, 1) static const TileKernels n[] = { TILE_NAMES(n, 4), TILE_NAMES(n, 2), TILE_NAMES(n, 1) };
#endif

/* The family pairs in the build for AVX-512, where the compiler knows VDPBF16PS; else NULL. gemm_pairs.c. */
const TileKernels *CPU(tile_pairs)(void);

/* With the family pairs: 16 floats of each of n rows, `ld` apart, rounded to bf16, a denormal as 0; also in place. Of
 * rows: n is even, and row i of the result has the pairs of rows 2i and 2i + 1. Of columns: each row has its own. */
void CPU(pairs_of_rows)(float *to, const float *from, int64_t ld, int64_t n);
void CPU(pairs_of_columns)(float *to, const float *from, int64_t ld, int64_t n);

#endif
