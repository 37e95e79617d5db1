/*
 * Numbers of bf16 as units of the register kernels, which count four bytes along k. What a unit is, its form says
 * (GemmForm, gemm.h):
 *
 *   FORM_WIDE     a number as a float
 *   FORM_SWAPPED  the same, of each pair of k's the second one first, and no denormals: in this order the family
 *                 `flushed` has the bits of VDPBF16PS, which is DOT_VDPBF16 where there is no such instruction
 *   FORM_PAIRS    two numbers, the first in the low half
 *
 * Where forms have pairs, every leaf begins with one, and behind an odd last number there is a 0. A run below is a
 * leaf's numbers, or some of them from an even one on. Used by gemm.c and attention.
 */
#ifndef MEGATRAIN_CPU_GEMM_FORM_H
#define MEGATRAIN_CPU_GEMM_FORM_H

#include <string.h>

#include "base/half.h"
#include "cpu/gemm.h"
#include "cpu/vec.h"

static inline bool form_pairs(GemmForm form) { return form == FORM_SWAPPED || form == FORM_PAIRS; }

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
static inline void narrow_row(GemmForm form, float *dst, const uint16_t *src, int64_t numbers)
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

#endif
