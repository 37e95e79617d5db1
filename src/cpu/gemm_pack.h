/*
 * Copies of parts of a matrix in the order in which the register kernels read them. Used by gemm.c alone.
 *
 *   panel of B   [k][width]      rows of `width` = 16, 32 or 48 columns; columns beyond the matrix are 0
 *   panel of A   [k][TILE_ROWS]  only for a transposed A; otherwise the kernels read A where it lies
 *
 * Where the source runs along the other dim, blocks of 8 x 16 are transposed in registers; so are tiles of sums that a
 * product which was turned round writes.
 */
#ifndef MEGATRAIN_CPU_GEMM_PACK_H
#define MEGATRAIN_CPU_GEMM_PACK_H

#include <string.h>

#include "cpu/gemm_kernel.h"

/* dst[j][i] = src[i][j] for i < 8, j < 16. */
#if defined(CPU_ISA_avx512)
static inline void transpose_8x16(float *dst, int64_t ldd, const float *src, int64_t lds)
{
    __m512 r[8], t[8];
    /* After two rounds r[c] holds, in its 128-bit lane q, rows 0-3 of column 4q + c; r[4 + c] rows 4-7. */
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = _mm512_loadu_ps(src + i * lds);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#define PAIR(half, x, y) _mm512_castpd_ps(_mm512_unpack##half##_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)))
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = PAIR(lo, t[i], t[i + 2]);
        r[i + 1] = PAIR(hi, t[i], t[i + 2]);
        r[i + 2] = PAIR(lo, t[i + 1], t[i + 3]);
        r[i + 3] = PAIR(hi, t[i + 1], t[i + 3]);
    }
#undef PAIR
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512 even = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x88);
        __m512 odd = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xdd);
        even = _mm512_shuffle_f32x4(even, even, 0xd8);
        odd = _mm512_shuffle_f32x4(odd, odd, 0xd8);
        _mm256_storeu_ps(dst + c * ldd, _mm512_castps512_ps256(even));
        _mm256_storeu_ps(dst + (c + 4) * ldd, _mm512_castps512_ps256(odd));
        _mm256_storeu_ps(dst + (c + 8) * ldd, _mm512_extractf32x8_ps(even, 1));
        _mm256_storeu_ps(dst + (c + 12) * ldd, _mm512_extractf32x8_ps(odd, 1));
    }
}
#elif defined(CPU_ISA_avx2)
/* Columns of `rows` numbers, TILE_ROWS or 8. */
static inline void store_rows(float *p, __m256 v, int rows)
{
    if (rows == 8) return _mm256_storeu_ps(p, v);
    _mm_storeu_ps(p, _mm256_castps256_ps128(v));
    _mm_storel_pi((__m64 *)(void *)(p + 4), _mm256_extractf128_ps(v, 1));
}

static inline __attribute__((always_inline)) void transpose_x8(float *dst, int64_t ldd, const float *src, int64_t lds,
                                                               int rows)
{
    __m256 r[8], t[8];
    /* After two rounds r[c] holds, in its 128-bit lane q, rows 0-3 of column 4q + c; r[4 + c] rows 4-7. */
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = i < rows ? _mm256_loadu_ps(src + i * lds) : _mm256_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        store_rows(dst + c * ldd, _mm256_permute2f128_ps(r[c], r[c + 4], 0x20), rows);
        store_rows(dst + (c + 4) * ldd, _mm256_permute2f128_ps(r[c], r[c + 4], 0x31), rows);
    }
}

static inline void transpose_8x16(float *dst, int64_t ldd, const float *src, int64_t lds)
{
    transpose_x8(dst, ldd, src, lds, 8);
    transpose_x8(dst + 8 * ldd, ldd, src + 8, lds, 8);
}

/* The rows of a tile. */
static inline void transpose_tile(float *dst, int64_t ldd, const float *src, int64_t lds)
{
    transpose_x8(dst, ldd, src, lds, TILE_ROWS);
    transpose_x8(dst + 8 * ldd, ldd, src + 8, lds, TILE_ROWS);
}
#else
static inline void transpose_8x16(float *dst, int64_t ldd, const float *src, int64_t lds)
{
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 8; i++) dst[j * ldd + i] = src[i * lds + j];
}
#endif

static inline void transpose_any(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i += 8) {
        int64_t j = 0;
        if (i + 8 <= rows)
            for (; j + 16 <= cols; j += 16) transpose_8x16(dst + j * ldd + i, ldd, src + i * lds + j, lds);
#if defined(CPU_ISA_avx2)
        else if (i + TILE_ROWS == rows)
            for (; j + 16 <= cols; j += 16) transpose_tile(dst + j * ldd + i, ldd, src + i * lds + j, lds);
#endif
        for (; j < cols; j++)
            for (int64_t r = i; r < rows && r < i + 8; r++) dst[j * ldd + r] = src[r * lds + j];
    }
}

enum {
    PACK_K = 64,       /* k's transposed at a time, so that what is written stays in the L1 cache */
    PACK_A_AHEAD = 16, /* rows of A to prefetch: each row copied is too short for the processor to do it */
};

static inline int64_t panel_width(int64_t cols) { return cols < TILE_COLS ? (cols + VEC - 1) / VEC * VEC : TILE_COLS; }

/*
 * Panels of B: k rows of `cols` columns as ceil(cols / TILE_COLS) panels, `panel` floats apart, each
 * [k][width], width = its columns rounded up to 16. `src` is at (first k, first column); rows lie as in B.
 */
static void pack_b(float *dst, int64_t panel, const float *src, int64_t ld, int64_t k, int64_t cols)
{
    const int64_t whole = cols / TILE_COLS, rest = cols % TILE_COLS, width = panel_width(rest);
    for (int64_t q = 0; q < k; q++, src += ld) {
        for (int64_t p = 0; p < whole; p++)
            for (int v = 0; v < TILE_COLS; v += VEC)
                vf_store(dst + p * panel + q * TILE_COLS + v, vf_load(src + p * TILE_COLS + v));
        for (int64_t v = 0; v < rest; v += VEC)
            vf_store(dst + whole * panel + q * width + v,
                     vf_load_n(src + whole * TILE_COLS + v, rest - v < VEC ? rest - v : VEC));
    }
}

/* The same from a transposed B: `src` is at (first column, first k). */
static void pack_b_transposed(float *dst, int64_t panel, const float *src, int64_t ld, int64_t k, int64_t cols)
{
    for (int64_t k0 = 0; k0 < k; k0 += PACK_K) {
        const int64_t count = k - k0 < PACK_K ? k - k0 : PACK_K;
        for (int64_t j = 0; j < cols; j += TILE_COLS) {
            const int64_t n = cols - j < TILE_COLS ? cols - j : TILE_COLS, width = panel_width(n);
            float *out = dst + j / TILE_COLS * panel + k0 * width;
            transpose_any(out, width, src + j * ld + k0, ld, n, count);
            for (int64_t q = 0; q < count && n < width; q++)
                memset(out + q * width + n, 0, (size_t)(width - n) * sizeof *out);
        }
    }
}

/* Panels of a transposed A: `rows` rows as panels of TILE_ROWS, [k][TILE_ROWS] each, `panel` floats apart. */
static void pack_a(float *dst, int64_t panel, const float *src, int64_t ld, int64_t k, int64_t rows)
{
    const int64_t whole = rows / TILE_ROWS, rest = rows % TILE_ROWS;
    for (int64_t q = 0; q < k; q++, src += ld) {
        float *out = dst + q * TILE_ROWS;
        for (int64_t r = 0; r < rows; r += VEC) __builtin_prefetch(src + PACK_A_AHEAD * ld + r);
        for (int64_t p = 0; p < whole; p++) memcpy(out + p * panel, src + p * TILE_ROWS, TILE_ROWS * sizeof *out);
        for (int64_t r = 0; r < rest; r++) out[whole * panel + r] = src[whole * TILE_ROWS + r];
    }
}

#endif
