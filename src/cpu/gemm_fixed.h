/*
 * The way from leaves in float to sums of integers: the last step of a fixed-point product's tile. Leaves come scaled
 * and checked from the register kernel (gemm_kernel.h, TileFixed). Used by gemm.c alone.
 */
#ifndef MEGATRAIN_CPU_GEMM_FIXED_H
#define MEGATRAIN_CPU_GEMM_FIXED_H

#include "cpu/gemm_kernel.h"

enum { LEAVES = 4 }; /* to convert at once */

/* Leaves of a tile that lie in memory, scaled: `count` of them, TILE_ELEMS apart, become one sum of integers. */
typedef struct {
    const float *leaf;
    int64_t rows, cols;
    const int64_t *from; /* what they are added to; NULL: 0 */
    int64_t *to;         /* where the sum goes; NULL: as floats, times `unit`, to c */
    float *c;
    int64_t from_row, to_row, c_row;
    float unit;
    bool stream; /* the result passes the caches */
} FixedAdd;

/* llrint of 16 numbers in memory: converting from there saves AVX-512 a shuffle. */
static inline vl fix_load(const float *p)
{
#if defined(CPU_ISA_avx512)
    return (vl){ _mm512_cvtps_epi64(_mm256_loadu_ps(p)), _mm512_cvtps_epi64(_mm256_loadu_ps(p + 8)) };
#else
    return vl_from_f(vf_load(p));
#endif
}

/* Whole lines that nobody reads soon: not fetched before they are written. */
static inline void store_line_l(int64_t *p, vl v, bool stream)
{
#if defined(CPU_ISA_avx512)
    if (stream) return _mm512_stream_si512((void *)p, v.a), _mm512_stream_si512((void *)(p + 8), v.b);
#endif
    (void)stream;
    vl_store(p, v);
}

static inline void store_line_f(float *p, vf v, bool stream)
{
#if defined(CPU_ISA_avx512)
    if (stream) return _mm512_stream_ps(p, v);
#endif
    (void)stream;
    vf_store(p, v);
}

static inline __attribute__((always_inline)) void fixed_add_some(const FixedAdd *f, int count, bool from,
                                                                 bool to)
{
    const FixedAdd a = *f;
    const vf unit = vf_set1(a.unit);
    for (int64_t i = 0; i < a.rows; i++) {
        const float *leaf = a.leaf + i * TILE_COLS;
        for (int64_t j = 0; j < a.cols; j += VEC) {
            vl sum = fix_load(leaf + j);
            for (int n = 1; n < count; n++) sum = vl_add(sum, fix_load(leaf + n * TILE_ELEMS + j));
            if (from) sum = vl_add(sum, vl_load(a.from + i * a.from_row + j));
            if (to) {
                store_line_l(a.to + i * a.to_row + j, sum, a.stream);
                continue;
            }
            const vf v = vf_mul(vf_from_l(sum), unit);
            if (a.cols - j >= VEC) store_line_f(a.c + i * a.c_row + j, v, a.stream);
            else vf_store_n(a.c + i * a.c_row + j, v, a.cols - j);
        }
    }
}

static inline __attribute__((always_inline)) void fixed_add_count(const FixedAdd *f, int count)
{
    if (f->from && f->to) fixed_add_some(f, count, true, true);
    else if (f->from) fixed_add_some(f, count, true, false);
    else if (f->to) fixed_add_some(f, count, false, true);
    else fixed_add_some(f, count, false, false);
}

static void fixed_add(const FixedAdd *f, int64_t count)
{
    switch (count) {
    case 1: fixed_add_count(f, 1); break;
    case 2: fixed_add_count(f, 2); break;
    case 3: fixed_add_count(f, 3); break;
    default: fixed_add_count(f, LEAVES);
    }
}

#endif
