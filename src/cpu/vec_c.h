/*
 * Primitives of vec.h in plain C, lane by lane: the definition of what the others compute, and the build for
 * processors without AVX2. Integers are unsigned inside, so that they wrap.
 */
#ifndef MEGATRAIN_CPU_VEC_C_H
#define MEGATRAIN_CPU_VEC_C_H

#include <string.h>

#include "cpu/vec.h"

typedef struct {
    float v[16];
} vf;
typedef struct {
    uint32_t v[16];
} vi;
typedef struct {
    uint32_t bits;
} vm;
typedef struct {
    int64_t v[16];
} vl;

#define VEC_EACH(type, expr)                                                                      \
    type r;                                                                                       \
    for (int i = 0; i < VEC; i++) r.v[i] = (expr);                                                \
    return r
#define VEC_TEST(cond)                                                                            \
    vm r = { 0 };                                                                                 \
    for (int i = 0; i < VEC; i++) r.bits |= (uint32_t)((cond) != 0) << i;                         \
    return r

VEC_FN vm vm_first_n(int64_t n) { return (vm){ (1u << n) - 1 }; }
VEC_FN vm vm_from_bits(uint32_t bits) { return (vm){ bits & 0xFFFF }; }
VEC_FN uint32_t vm_bits(vm m) { return m.bits; }
VEC_FN vm vm_and(vm x, vm y) { return (vm){ x.bits & y.bits }; }
VEC_FN vm vm_or(vm x, vm y) { return (vm){ x.bits | y.bits }; }
VEC_FN vm vm_not(vm x) { return (vm){ ~x.bits & 0xFFFF }; }
VEC_FN int vm_any(vm x) { return x.bits != 0; }

VEC_FN vf vf_load(const float *p) { VEC_EACH(vf, p[i]); }
VEC_FN void vf_store(float *p, vf v) { memcpy(p, v.v, sizeof v.v); }
VEC_FN vf vf_load_n(const float *p, int64_t n) { VEC_EACH(vf, i < n ? p[i] : 0.0f); }
VEC_FN void vf_store_n(float *p, vf v, int64_t n) { memcpy(p, v.v, (size_t)n * sizeof(float)); }
VEC_FN vf vf_set1(float x) { VEC_EACH(vf, x); }
VEC_FN vf vf_zero(void) { return vf_set1(0.0f); }
VEC_FN vf vf_add(vf x, vf y) { VEC_EACH(vf, x.v[i] + y.v[i]); }
VEC_FN vf vf_sub(vf x, vf y) { VEC_EACH(vf, x.v[i] - y.v[i]); }
VEC_FN vf vf_mul(vf x, vf y) { VEC_EACH(vf, x.v[i] * y.v[i]); }
VEC_FN vf vf_div(vf x, vf y) { VEC_EACH(vf, x.v[i] / y.v[i]); }
VEC_FN vf vf_fma(vf x, vf y, vf z) { VEC_EACH(vf, __builtin_fmaf(x.v[i], y.v[i], z.v[i])); }
VEC_FN vf vf_fnma(vf x, vf y, vf z) { VEC_EACH(vf, __builtin_fmaf(-x.v[i], y.v[i], z.v[i])); }
VEC_FN vf vf_max(vf x, vf y) { VEC_EACH(vf, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
VEC_FN vf vf_min(vf x, vf y) { VEC_EACH(vf, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
VEC_FN vf vf_sqrt(vf x) { VEC_EACH(vf, __builtin_sqrtf(x.v[i])); }
VEC_FN vf vf_neg(vf x) { VEC_EACH(vf, -x.v[i]); }
VEC_FN vf vf_abs(vf x) { VEC_EACH(vf, __builtin_fabsf(x.v[i])); }
VEC_FN vm vf_lt(vf x, vf y) { VEC_TEST(x.v[i] < y.v[i]); }
VEC_FN vm vf_ge(vf x, vf y) { VEC_TEST(x.v[i] >= y.v[i]); }
VEC_FN vf vf_select(vm m, vf x, vf y) { VEC_EACH(vf, m.bits >> i & 1 ? x.v[i] : y.v[i]); }

VEC_FN float vec_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* In two factors, the first of them exact: k alone may lie outside the exponents of a float. */
VEC_FN float vec_scale2(float p, float t)
{
    const float magic = VF_MAGIC;
    uint32_t bits, zero;
    memcpy(&bits, &t, sizeof bits);
    memcpy(&zero, &magic, sizeof zero);
    int32_t k = (int32_t)(bits - zero), half = k >> 1;
    return p * vec_of_bits(((uint32_t)half + 127) << 23) * vec_of_bits(((uint32_t)k - (uint32_t)half + 127) << 23);
}
VEC_FN vf vf_scale2(vf p, vf t) { VEC_EACH(vf, vec_scale2(p.v[i], t.v[i])); }

VEC_FN float vf_sum(vf x)
{
    for (int n = 8; n >= 1; n /= 2) {
        for (int i = 0; i < n; i++) x.v[i] += x.v[i + n];
    }
    return x.v[0];
}

VEC_FN float vf_hmax(vf x)
{
    for (int n = 8; n >= 1; n /= 2) {
        for (int i = 0; i < n; i++) x.v[i] = x.v[i] > x.v[i + n] ? x.v[i] : x.v[i + n];
    }
    return x.v[0];
}

VEC_FN vi vi_load(const int32_t *p) { VEC_EACH(vi, (uint32_t)p[i]); }
VEC_FN void vi_store(int32_t *p, vi v) { memcpy(p, v.v, sizeof v.v); }
VEC_FN vi vi_set1(int32_t x) { VEC_EACH(vi, (uint32_t)x); }
VEC_FN vi vi_iota(void) { VEC_EACH(vi, (uint32_t)i); }
VEC_FN vi vi_add(vi x, vi y) { VEC_EACH(vi, x.v[i] + y.v[i]); }
VEC_FN vi vi_xor(vi x, vi y) { VEC_EACH(vi, x.v[i] ^ y.v[i]); }
VEC_FN vm vi_ge_u(vi x, vi y) { VEC_TEST(x.v[i] >= y.v[i]); }
VEC_FN void vi_mul_wide(vi x, vi y, vi *low, vi *high)
{
    for (int i = 0; i < VEC; i++) {
        uint64_t p = (uint64_t)x.v[i] * y.v[i];
        low->v[i] = (uint32_t)p;
        high->v[i] = (uint32_t)(p >> 32);
    }
}

VEC_FN vl vl_load(const int64_t *p) { VEC_EACH(vl, p[i]); }
VEC_FN void vl_store(int64_t *p, vl v) { memcpy(p, v.v, sizeof v.v); }
VEC_FN vl vl_zero(void) { VEC_EACH(vl, 0); }
VEC_FN vl vl_add(vl x, vl y) { VEC_EACH(vl, (int64_t)((uint64_t)x.v[i] + (uint64_t)y.v[i])); }
VEC_FN vl vl_abs(vl x) { VEC_EACH(vl, x.v[i] < 0 ? (int64_t)(0 - (uint64_t)x.v[i]) : x.v[i]); }
VEC_FN vl vl_max(vl x, vl y) { VEC_EACH(vl, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
VEC_FN vl vl_shr32(vl x) { VEC_EACH(vl, (int64_t)((uint64_t)x.v[i] >> 32)); }
VEC_FN vl vl_low32(vl x) { VEC_EACH(vl, x.v[i] & 0xFFFFFFFF); }
VEC_FN vl vl_mul32(vl x, vl y)
{
    VEC_EACH(vl, (int64_t)((uint64_t)(uint32_t)x.v[i] * (uint32_t)y.v[i]));
}
VEC_FN vl vl_from_f(vf x) { VEC_EACH(vl, (int64_t)__builtin_llrintf(x.v[i])); }
VEC_FN vf vf_from_l(vl x) { VEC_EACH(vf, (float)x.v[i]); }

#endif
