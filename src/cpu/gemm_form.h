/*
 * Numbers of bf16 as units of the register kernels, which count four bytes along k. What a unit is, its form says
 * (GemmForm, gemm.h):
 *
 *   FORM_WIDE     a number as a float
 *   FORM_SWAPPED  the same, of each pair of k's the second one first, and no denormals: in this order the family
 *                 `flushed` has the bits of VDPBF16PS, which is DOT_VDPBF16 where there is no such instruction
 *   FORM_PAIRS    two numbers, the first in the low half
 *   FORM_DEPTHS   a number as a float, no denormals: what gemm_depths.h sums as DOT_AMX does, without the instruction
 *   FORM_TILES    two numbers as in FORM_PAIRS: what TDPBF16PS reads
 *
 * Where forms have pairs, every leaf begins with one, and behind an odd last number there is a 0; those of DOT_AMX have
 * depths of 32 numbers instead of pairs. A run below is a leaf's numbers, or some of them from one on that begins a
 * pair (a depth). Used by gemm.c and, but for the last two, by attention.
 */
#ifndef MEGATRAIN_CPU_GEMM_FORM_H
#define MEGATRAIN_CPU_GEMM_FORM_H

#include <string.h>

#include "base/half.h"
#include "cpu/gemm.h"
#include "cpu/vec.h"

static inline bool form_pairs(GemmForm form) { return form == FORM_SWAPPED || form == FORM_PAIRS; }

static inline bool form_packs(GemmForm form) { return form == FORM_PAIRS || form == FORM_TILES; }

enum { DEPTH = 32 };

/* A leaf is filled up to a multiple of so many numbers. */
static inline int64_t form_step(GemmForm form)
{
    return form == FORM_DEPTHS || form == FORM_TILES ? DEPTH : form_pairs(form) ? 2 : 1;
}

/* Units that `numbers` numbers make. */
static inline int64_t form_units(GemmForm form, int64_t numbers)
{
    switch (form) {
    case FORM_PAIRS: return (numbers + 1) / 2;
    case FORM_SWAPPED: return (numbers + 1) / 2 * 2;
    case FORM_DEPTHS: return (numbers + DEPTH - 1) / DEPTH * DEPTH;
    case FORM_TILES: return (numbers + DEPTH - 1) / DEPTH * (DEPTH / 2);
    default: return numbers;
    }
}

static inline int64_t form_numbers(GemmForm form, int64_t units) { return form_packs(form) ? 2 * units : units; }

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
    uint32_t first[VEC], second[VEC];
    memcpy(first, &low, sizeof first), memcpy(second, &high, sizeof second);
    for (int i = 0; i < VEC; i++) second[i] |= first[i] >> 16;
    memcpy(&high, second, sizeof high);
    return high;
#endif
}

/* Columns from j on, of which `left` remain, of unit q of a run of `numbers` numbers, which are rows. */
static inline vf narrow_line(GemmForm form, const uint16_t *src, int64_t ld, int64_t numbers, int64_t q, int64_t j,
                             int64_t left)
{
    if (form == FORM_WIDE) return load_bf16(src + q * ld + j, left);
    const int64_t first = form_packs(form) ? 2 * q : form == FORM_SWAPPED ? q ^ 1 : q;
    const vf x = first < numbers ? load_bf16(src + first * ld + j, left) : vf_zero();
    if (!form_packs(form)) return vf_flush(x);
    return narrow_pairs(x, first + 1 < numbers ? load_bf16(src + (first + 1) * ld + j, left) : vf_zero());
}

/* Units of a run of numbers that follow one another. */
static inline void narrow_row(GemmForm form, float *dst, const uint16_t *src, int64_t numbers)
{
    const int64_t units = form_units(form, numbers);
    if (form_packs(form)) {
        const int64_t behind = 2 * units - numbers;
        memcpy(dst, src, (size_t)numbers * sizeof *src);
        if (behind) memset((uint16_t *)(void *)dst + numbers, 0, (size_t)behind * sizeof *src);
        return;
    }
    int64_t i = 0;
    for (; i + VEC <= numbers; i += VEC) vf_store(dst + i, vf_load_bf16(src + i));
    for (; i < numbers; i++) dst[i] = bf16_to_float(src[i]);
    if (form == FORM_WIDE) return;
    while (i < units) dst[i++] = 0;
    for (int64_t k = 0; form == FORM_SWAPPED && k < units; k += 2) {
        const float even = dst[k];
        dst[k] = dst[k + 1], dst[k + 1] = even;
    }
    for (i = 0; i + VEC <= units; i += VEC) vf_store(dst + i, vf_flush(vf_load(dst + i)));
    if (i < units) vf_store_n(dst + i, vf_flush(vf_load_n(dst + i, units - i)), units - i);
}

#endif
