/*
 * Operands of bf16 in the order in which the register kernels read them. Used by gemm.c alone.
 *
 * Kernels count units of four bytes along k. What a unit is, its form says:
 *
 *   FORM_WIDE     a number as a float
 *   FORM_SWAPPED  the same, of each pair of k's the second one first, and no denormals: in this order the family
 *                 `flushed` has the bits of VDPBF16PS, which is DOT_VDPBF16 where there is no such instruction
 *   FORM_PAIRS    two numbers, the first in the low half
 *
 * Where forms have pairs, every leaf begins with one, and behind an odd last number there is a 0. A run below is a
 * leaf's numbers, or some of them from an even one on.
 */
#ifndef MEGATRAIN_CPU_GEMM_NARROW_H
#define MEGATRAIN_CPU_GEMM_NARROW_H

#include "cpu/gemm_pack.h"

typedef enum { FORM_F32, FORM_WIDE, FORM_SWAPPED, FORM_PAIRS } GemmForm;

/* So many units are `numbers` numbers. */
static inline int64_t form_units(GemmForm form, int64_t numbers)
{
    return form == FORM_PAIRS ? (numbers + 1) / 2 : form == FORM_SWAPPED ? (numbers + 1) / 2 * 2 : numbers;
}

static inline int64_t form_numbers(GemmForm form, int64_t units)
{
    return form == FORM_PAIRS ? 2 * units : units;
}

static inline vf load_bf16(const uint16_t *p, int64_t left)
{
    return left >= VEC ? vf_load_bf16(p) : vf_load_bf16_n(p, left);
}

static inline void store_bf16(uint16_t *p, vf v, int64_t left)
{
    if (left >= VEC) vf_store_bf16(p, v);
    else vf_store_bf16_n(p, v, left);
}

/* Numbers of `low`, which lies in the lower halves, and `high`. */
static inline vf narrow_pairs(vf low, vf high)
{
#if defined(CPU_ISA_avx512)
    const __m512i shifted = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(shifted, _mm512_castps_si512(high)));
#else
    (void)high;
    return low; /* (FORM_PAIRS is AVX-512's) */
#endif
}

/* Columns from j on, of which `left` remain, of unit q of a run of `numbers` numbers, which are rows. */
static inline vf narrow_line(GemmForm form, const uint16_t *src, int64_t ld, int64_t numbers, int64_t q,
                             int64_t j, int64_t left)
{
    if (form == FORM_WIDE) return load_bf16(src + q * ld + j, left);
    const int64_t first = form == FORM_PAIRS ? 2 * q : q ^ 1;
    const vf x = first < numbers ? load_bf16(src + first * ld + j, left) : vf_zero();
    if (form == FORM_SWAPPED) return vf_flush(x);
    return narrow_pairs(x, first + 1 < numbers ? load_bf16(src + (first + 1) * ld + j, left) : vf_zero());
}

/* Units of a run of numbers that follow one another. */
static void narrow_row(GemmForm form, float *dst, const uint16_t *src, int64_t numbers)
{
    if (form == FORM_PAIRS) {
        memcpy(dst, src, (size_t)numbers * sizeof *src);
        if (numbers % 2) memset((uint16_t *)(void *)dst + numbers, 0, sizeof *src);
        return;
    }
    int64_t i = 0;
    for (; i + VEC <= numbers; i += VEC) vf_store(dst + i, vf_load_bf16(src + i));
    for (; i < numbers; i++) dst[i] = bf16_to_float(src[i]);
    if (form == FORM_WIDE) return;
    if (numbers % 2) dst[i++] = 0;
    for (int64_t k = 0; k < i; k += 2) {
        const float even = dst[k];
        dst[k] = dst[k + 1], dst[k + 1] = even;
    }
    const int64_t units = i;
    for (i = 0; i + VEC <= units; i += VEC) vf_store(dst + i, vf_flush(vf_load(dst + i)));
    if (i < units) vf_store_n(dst + i, vf_flush(vf_load_n(dst + i, units - i)), units - i);
}

/* As pack_b, of a run, which is `at` units behind the slab's first. */
VEC_FN void narrow_pack_b_form(GemmForm form, float *dst, int64_t panel, int64_t at, const uint16_t *src,
                               int64_t ld, int64_t numbers, int64_t cols)
{
    const int64_t whole = cols / TILE_COLS, rest = cols % TILE_COLS, width = panel_width(rest);
    const int64_t units = form_units(form, numbers);
    for (int64_t q = 0; q < units; q++) {
        for (int64_t p = 0; p < whole; p++)
            for (int v = 0; v < TILE_COLS; v += VEC)
                vf_store(dst + p * panel + (at + q) * TILE_COLS + v,
                         narrow_line(form, src, ld, numbers, q, p * TILE_COLS + v, VEC));
        for (int64_t v = 0; v < rest; v += VEC)
            vf_store(dst + whole * panel + (at + q) * width + v,
                     narrow_line(form, src, ld, numbers, q, whole * TILE_COLS + v, rest - v));
    }
}

static void narrow_pack_b(GemmForm form, float *dst, int64_t panel, int64_t at, const uint16_t *src,
                          int64_t ld, int64_t numbers, int64_t cols)
{
    if (form == FORM_PAIRS) narrow_pack_b_form(FORM_PAIRS, dst, panel, at, src, ld, numbers, cols);
    else if (form == FORM_WIDE) narrow_pack_b_form(FORM_WIDE, dst, panel, at, src, ld, numbers, cols);
    else narrow_pack_b_form(FORM_SWAPPED, dst, panel, at, src, ld, numbers, cols);
}

/* As pack_b_transposed, of a run. */
static void narrow_pack_b_transposed(GemmForm form, float *dst, int64_t panel, int64_t at,
                                     const uint16_t *src, int64_t ld, int64_t numbers, int64_t cols)
{
    float rows[TILE_COLS * PACK_K] __attribute__((aligned(64)));
    const int64_t step = form_numbers(form, PACK_K);
    for (int64_t k = 0; k < numbers; k += step) {
        const int64_t some = numbers - k < step ? numbers - k : step, units = form_units(form, some);
        for (int64_t j = 0; j < cols; j += TILE_COLS) {
            const int64_t n = cols - j < TILE_COLS ? cols - j : TILE_COLS, width = panel_width(n);
            float *out = dst + j / TILE_COLS * panel + (at + form_units(form, k)) * width;
            for (int64_t i = 0; i < n; i++) narrow_row(form, rows + i * PACK_K, src + (j + i) * ld + k, some);
            transpose_any(out, width, rows, PACK_K, n, units);
            for (int64_t q = 0; q < units && n < width; q++)
                memset(out + q * width + n, 0, (size_t)(width - n) * sizeof *out);
        }
    }
}

enum { NARROW_ROWS_MOST = 64 }; /* of a transposed A that are packed at a time */

/* As pack_a, of a run. */
static void narrow_pack_a(GemmForm form, float *dst, int64_t panel, const uint16_t *src, int64_t ld,
                          int64_t numbers, int64_t rows)
{
    float line[NARROW_ROWS_MOST] __attribute__((aligned(64)));
    const int64_t units = form_units(form, numbers);
    for (int64_t q = 0; q < units; q++) {
        for (int64_t r = 0; r < rows; r += VEC)
            vf_store(line + r, narrow_line(form, src, ld, numbers, q, r, rows - r));
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            float *out = dst + r / TILE_ROWS * panel + q * TILE_ROWS;
            if (rows - r >= TILE_ROWS) memcpy(out, line + r, TILE_ROWS * sizeof *out);
            else memcpy(out, line + r, (size_t)(rows - r) * sizeof *out);
        }
    }
}

/* Rows of an A whose k's follow one another, `stride` units apart. */
static void narrow_pack_rows(GemmForm form, float *dst, int64_t stride, const uint16_t *src, int64_t ld,
                             int64_t numbers, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++) narrow_row(form, dst + r * stride, src + r * ld, numbers);
}

#endif
