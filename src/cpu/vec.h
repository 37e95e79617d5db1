/*
 * 16-lane arithmetic with one meaning on three instruction sets. A kernel written with it gives the same
 * bits built for AVX-512, AVX2 and plain C: every function is either exact, or correctly rounded lane by
 * lane, or made here from such functions. (NaN stays NaN, but its bit pattern is not promised.)
 *
 *   vf 16 x float    vi 16 x 32-bit integer    vl 16 x int64_t    vm mask of 16 lanes
 *
 * Primitives: vec_avx512.h, vec_avx2.h, vec_c.h (the definition to read first). This file adds what is the
 * same everywhere.
 *
 *   x_load x_store        any alignment
 *   vf_load_n vf_store_n  the first n lanes, 0 <= n <= 16; memory beyond is not touched, other lanes load 0
 *   vf_load_bf16 vf_store_bf16 (and _n): of base/half.h's numbers
 *   vf_fma(a, b, c)       a * b + c, rounded once;   vf_fnma: c - a * b
 *   vf_max(a, b)          a > b ? a : b    so a NaN in b stays, a NaN in a is lost
 *   vf_min(a, b)          a < b ? a : b
 *   vf_lt vf_ge           false for NaN
 *   vf_select(m, a, b)    m ? a : b
 *   vf_sum vf_hmax        over lanes: i with i + 8, then + 4, + 2, + 1
 *   vf_scale2(p, t)       p * 2^k for t = VF_MAGIC + k, -151 <= k <= 130, rounded once
 *   vl_from_f             llrint of each lane; lanes must be below 2^62 in size (vf_fix_bad)
 *   vl_round(p, scale)    bits of VL_MAGIC + p[i] * scale in double: VL_MAGIC_BITS plus the llrint of a product that is
 *                         exact and below 2^51 in size
 *   vf_from_l             (float) of each lane, rounded once
 *   vi_mul_wide           low and high 32 bits of the unsigned products
 *   vl_mul32              unsigned product of the low 32 bits of each lane
 *   vm_from_bits          bit i of the number = lane i
 *
 * A tail is computed by the same instructions as the body, on vectors loaded with vf_load_n; so an
 * element's result does not depend on where it lies. Includes: only files of src/cpu.
 */
#ifndef MEGATRAIN_CPU_VEC_H
#define MEGATRAIN_CPU_VEC_H

#include <stdint.h>

#include "base/half.h"
#include "base/rng.h"
#include "cpu/isa.h"

enum { VEC = 16 };

#define VF_MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits */
#define VL_MAGIC 0x1.8p52    /* 1.5 * 2^52, the same for doubles */
#define VL_MAGIC_BITS 0x4338000000000000
#define VEC_FN static inline __attribute__((always_inline))

#if defined(CPU_ISA_avx512)
#include "cpu/vec_avx512.h"
#elif defined(CPU_ISA_avx2)
#include "cpu/vec_avx2.h"
#else
#include "cpu/vec_c.h"
#endif

/*
 * exp(x) within 2 ulp: x = k ln 2 + r, |r| <= 0.347, a polynomial of degree 6 in r (minimax, relative error
 * 3e-9), times 2^k. Exactly 0 below -104 (also -inf), inf above 88.73, NaN for NaN.
 */
VEC_FN vf vf_exp(vf x)
{
    x = vf_max(vf_set1(-104.0f), vf_min(vf_set1(89.0f), x));
    vf t = vf_fma(x, vf_set1(0x1.715476p+0f), vf_set1(VF_MAGIC));
    vf k = vf_sub(t, vf_set1(VF_MAGIC));
    vf r = vf_fnma(k, vf_set1(0x1.62e43p-1f), x);
    r = vf_fnma(k, vf_set1(-0x1.05c61p-29f), r);
    vf p = vf_set1(0x1.6a2256p-10f);
    p = vf_fma(p, r, vf_set1(0x1.123b02p-7f));
    p = vf_fma(p, r, vf_set1(0x1.5558f8p-5f));
    p = vf_fma(p, r, vf_set1(0x1.55549p-3f));
    p = vf_fma(p, r, vf_set1(0x1.fffffcp-2f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_scale2(p, t);
}

/*
 * tanh(x) within 2 ulp: below 0.625 x + x^3 times a polynomial in x^2 (minimax, relative error 5e-9), else
 * 1 - 2 / (exp(2 |x|) + 1) with the sign of x. NaN for NaN.
 */
VEC_FN vf vf_tanh(vf x)
{
    const vf one = vf_set1(1.0f), size = vf_abs(x), z = vf_mul(x, x);
    vf p = vf_set1(-0x1.75e1ccp-8f);
    p = vf_fma(p, z, vf_set1(0x1.52269ap-6f));
    p = vf_fma(p, z, vf_set1(-0x1.b83c5ap-5f));
    p = vf_fma(p, z, vf_set1(0x1.110726p-3f));
    p = vf_fma(p, z, vf_set1(-0x1.555532p-2f));
    vf near = vf_fma(vf_mul(p, z), x, x);
    vf far = vf_sub(one, vf_div(vf_set1(2.0f), vf_add(vf_exp(vf_add(size, size)), one)));
    far = vf_select(vf_lt(x, vf_zero()), vf_neg(far), far);
    return vf_select(vf_lt(size, vf_set1(0.625f)), near, far);
}

/* x, a denormal as 0 of its sign. */
VEC_FN vf vf_flush(vf x) { return vf_select(vf_lt(vf_abs(x), vf_set1(0x1p-126f)), vf_mul(x, vf_zero()), x); }

/*
 * vf_fma of numbers that are no denormals, where a result is not one either: 0 of its sign, if it is below 2^-126 when
 * rounded to 24 bits. That is seen at 2^24 times the size; what leaves the floats there is far from it.
 */
VEC_FN vf vf_fma_flushed(vf a, vf b, vf c)
{
    const vf up = vf_set1(0x1p24f), r = vf_fma(a, b, c), large = vf_fma(vf_mul(a, up), b, vf_mul(c, up));
    return vf_select(vf_lt(vf_abs(large), vf_set1(0x1p-102f)), vf_mul(r, vf_zero()), r);
}

/* Lanes that do not fit a fixed-point accumulator: |v| is not below limit, or NaN. */
VEC_FN vm vf_fix_bad(vf v, float limit) { return vm_not(vf_lt(vf_abs(v), vf_set1(limit))); }

/* 2^shift, for -126 <= shift <= 127; the scale of a fixed-point accumulator. */
VEC_FN float fix_scale(int shift)
{
    union {
        uint32_t bits;
        float value;
    } u = { (uint32_t)(shift + 127) << 23 };
    return u.value;
}

/* Bound of a leaf times 2^shift, which must stay below it: 2^(62 - headroom_bits). */
VEC_FN float fix_limit(int headroom_bits) { return fix_scale(62 - headroom_bits); }

/* 16 calls of philox() of base/rng.h, lane by lane. */
VEC_FN void philox16(uint64_t key, vi c0, vi c1, vi c2, vi c3, vi out[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    const vi m0 = vi_set1((int32_t)PHILOX_M0), m1 = vi_set1((int32_t)PHILOX_M1);
    for (int r = 0; r < PHILOX_ROUNDS; r++) {
        vi a_low, a_high, b_low, b_high;
        vi_mul_wide(m0, c0, &a_low, &a_high);
        vi_mul_wide(m1, c2, &b_low, &b_high);
        c0 = vi_xor(vi_xor(b_high, c1), vi_set1((int32_t)k0));
        c2 = vi_xor(vi_xor(a_high, c3), vi_set1((int32_t)k1));
        c1 = b_low;
        c3 = a_low;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Bit i of the low 16 goes to bit 4 i. */
VEC_FN uint64_t bits_spread4(uint64_t x)
{
    x = (x | x << 24) & 0x000000FF000000FFu;
    x = (x | x << 12) & 0x000F000F000F000Fu;
    x = (x | x << 6) & 0x0303030303030303u;
    return (x | x << 3) & 0x1111111111111111u;
}

/*
 * Dropout decisions of 64 neighbours: bit 4 i + j is set when word j of call i is at or above the threshold
 * (kept). With c0 = first / 4 + vi_iota() bit f belongs to feature first + f. For 16 of them:
 * vm_from_bits((uint32_t)(bits >> 16 * q)).
 */
VEC_FN uint64_t philox_keep64(uint64_t key, uint32_t threshold, vi c0, vi c1, vi c2, vi c3)
{
    vi r[4];
    philox16(key, c0, c1, c2, c3, r);
    uint64_t keep = 0;
    const vi limit = vi_set1((int32_t)threshold);
    for (int j = 0; j < 4; j++) keep |= bits_spread4(vm_bits(vi_ge_u(r[j], limit))) << j;
    return keep;
}

#endif
