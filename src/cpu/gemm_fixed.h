/*
 * The way from leaves in float to sums of integers: the last step of a fixed-point product's tile. Where the register
 * kernel has seen no leaf beyond a limit (gemm_kernel.h, TileFixed), which is nearly everywhere, leaves are rounded
 * without a further look. Used by gemm.c alone.
 */
#ifndef MEGATRAIN_CPU_GEMM_FIXED_H
#define MEGATRAIN_CPU_GEMM_FIXED_H

#include "cpu/gemm_leaf.h"

enum { LEAVES = 4 }; /* leaves that are converted at once */

/*
 * A leaf whose square is below this needs no check: |leaf * 2^shift| is below 2^51 and below the limit. 0, which no
 * square is below, if a float does not reach so far.
 */
static float fixed_quick(int shift, int headroom_bits)
{
    const int power = 2 * ((62 - headroom_bits < 51 ? 62 - headroom_bits : 51) - shift);
    return power >= -126 && power <= 127 ? fix_scale(power) : 0;
}

/* Whole lines that nobody reads soon: not fetched before they are written. */
static inline void store_line_l(int64_t *p, vl v, bool stream)
{
#if defined(CPU_ISA_avx512)
    if (stream) return _mm512_stream_si512((void *)p, v.a), _mm512_stream_si512((void *)(p + 8), v.b);
#elif defined(CPU_ISA_avx2)
    if (stream) {
        _mm256_stream_si256((void *)p, v.a), _mm256_stream_si256((void *)(p + 4), v.b);
        _mm256_stream_si256((void *)(p + 8), v.c), _mm256_stream_si256((void *)(p + 12), v.d);
        return;
    }
#endif
    (void)stream;
    vl_store(p, v);
}

/*
 * |leaf * 2^shift| < 2^51: added to M = 1.5 * 2^52, an even number, it is rounded as llrint does, and the bits of the
 * sum are those of M plus the integer. Of two leaves (M + x) - (M - y) leaves no M behind.
 */
static inline __attribute__((always_inline)) void fixed_add_quick(const FixedAdd *f, int count, bool from)
{
    const FixedAdd a = *f;
    const double scale = a.scale;
    for (int64_t i = 0; i < a.rows; i++) {
        for (int64_t j = 0; j < a.cols; j += VEC) {
            const float *leaf = a.leaf + i * TILE_COLS + j;
            vl sum = from ? vl_load(a.from + i * a.from_row + j) : vl_zero();
            for (int n = 0; n < count; n += 2, leaf += 2 * TILE_ELEMS) {
                const vl minus = n + 1 < count ? vl_round(leaf + TILE_ELEMS, -scale) : vl_set1(VL_MAGIC_BITS);
                sum = vl_add(sum, vl_sub(vl_round(leaf, scale), minus));
            }
            store_line_l(a.to + i * a.to_row + j, sum, a.stream);
        }
    }
}

static inline __attribute__((always_inline)) void fixed_add_count(const FixedAdd *f, int count)
{
    if (f->from) fixed_add_quick(f, count, true);
    else fixed_add_quick(f, count, false);
}

/* No leaf is beyond fixed_quick(). */
static void fixed_add(const FixedAdd *f, int64_t count)
{
    switch (count) {
    case 1: fixed_add_count(f, 1); break;
    case 2: fixed_add_count(f, 2); break;
    case 3: fixed_add_count(f, 3); break;
    default: fixed_add_count(f, LEAVES);
    }
}

/* Any leaves; those that do not fit add 0, and true is returned. */
static __attribute__((noinline)) bool fixed_add_checked(const FixedAdd *f, int64_t count)
{
    const vf scale = vf_set1(f->scale);
    bool misfit = false;
    for (int64_t i = 0; i < f->rows; i++) {
        for (int64_t j = 0; j < f->cols; j += VEC) {
            vl sum = f->from ? vl_load(f->from + i * f->from_row + j) : vl_zero();
            for (int64_t n = 0; n < count; n++) {
                const vf v = vf_mul(vf_load(f->leaf + n * TILE_ELEMS + i * TILE_COLS + j), scale);
                const vm bad = vf_fix_bad(v, f->limit);
                misfit |= vm_any(bad) != 0;
                sum = vl_add(sum, vl_from_f(vf_select(bad, vf_zero(), v)));
            }
            store_line_l(f->to + i * f->to_row + j, sum, f->stream);
        }
    }
    return misfit;
}

#endif
