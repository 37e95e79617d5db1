/*
 * Operands of bf16 in the order in which the register kernels read them, in units of a form (gemm_form.h). Used by
 * gemm.c alone.
 */
#ifndef MEGATRAIN_CPU_GEMM_NARROW_H
#define MEGATRAIN_CPU_GEMM_NARROW_H

#include "cpu/gemm_form.h"
#include "cpu/gemm_pack.h"

/* Like pack_b, for a run that is `at` units behind the slab's first. */
VEC_FN void narrow_pack_b_form(GemmForm form, float *dst, int64_t panel, int64_t at, const uint16_t *src, int64_t ld,
                               int64_t numbers, int64_t cols)
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

static void narrow_pack_b(GemmForm form, float *dst, int64_t panel, int64_t at, const uint16_t *src, int64_t ld,
                          int64_t numbers, int64_t cols)
{
    if (form == FORM_PAIRS) narrow_pack_b_form(FORM_PAIRS, dst, panel, at, src, ld, numbers, cols);
    else if (form == FORM_WIDE) narrow_pack_b_form(FORM_WIDE, dst, panel, at, src, ld, numbers, cols);
    else if (form == FORM_DEPTHS) narrow_pack_b_form(FORM_DEPTHS, dst, panel, at, src, ld, numbers, cols);
    else if (form == FORM_TILES) narrow_pack_b_form(FORM_TILES, dst, panel, at, src, ld, numbers, cols);
    else narrow_pack_b_form(FORM_SWAPPED, dst, panel, at, src, ld, numbers, cols);
}

/* Like pack_b_transposed, for a run. */
static void narrow_pack_b_transposed(GemmForm form, float *dst, int64_t panel, int64_t at, const uint16_t *src,
                                     int64_t ld, int64_t numbers, int64_t cols)
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

enum { NARROW_ROWS_MOST = 64 }; /* rows of a transposed A that are packed at a time */

/* Like pack_a, for a run. */
static void narrow_pack_a(GemmForm form, float *dst, int64_t panel, const uint16_t *src, int64_t ld, int64_t numbers,
                          int64_t rows)
{
    float line[NARROW_ROWS_MOST] __attribute__((aligned(64)));
    const int64_t units = form_units(form, numbers);
    for (int64_t q = 0; q < units; q++) {
        for (int64_t r = 0; r < rows; r += VEC) vf_store(line + r, narrow_line(form, src, ld, numbers, q, r, rows - r));
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            float *out = dst + r / TILE_ROWS * panel + q * TILE_ROWS;
            if (rows - r >= TILE_ROWS) memcpy(out, line + r, TILE_ROWS * sizeof *out);
            else memcpy(out, line + r, (size_t)(rows - r) * sizeof *out);
        }
    }
}

/* Like narrow_pack_rows, for a transposed A. */
static inline void narrow_pack_turned(GemmForm form, float *dst, int64_t stride, const uint16_t *src, int64_t ld,
                                      int64_t numbers, int64_t rows)
{
    float lines[VEC * NARROW_ROWS_MOST] __attribute__((aligned(64)));
    const int64_t units = form_units(form, numbers);
    for (int64_t q = 0; q < units; q += VEC) {
        const int64_t count = units - q < VEC ? units - q : VEC;
        for (int64_t i = 0; i < count; i++)
            for (int64_t r = 0; r < rows; r += VEC)
                vf_store(lines + i * NARROW_ROWS_MOST + r, narrow_line(form, src, ld, numbers, q + i, r, rows - r));
        transpose_any(dst + q, stride, lines, NARROW_ROWS_MOST, count, rows);
    }
}

/* Rows of an A whose k's follow one another, `stride` units apart. */
static void narrow_pack_rows(GemmForm form, float *dst, int64_t stride, const uint16_t *src, int64_t ld,
                             int64_t numbers, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++) narrow_row(form, dst + r * stride, src + r * ld, numbers);
}

#endif
