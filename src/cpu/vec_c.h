/*
 * Primitives of vec.h without any instruction set, for processors without AVX2: GCC's vectors of four
 * floats, which every target has or imitates. The shortest of the three to read. Integers are unsigned
 * inside, so that they wrap.
 */
#ifndef MEGATRAIN_CPU_VEC_C_H
#define MEGATRAIN_CPU_VEC_C_H

#include <string.h>

#include "cpu/vec.h"

typedef float vec_f4 __attribute__((vector_size(16)));
typedef int32_t vec_i4 __attribute__((vector_size(16)));
typedef uint32_t vec_u4 __attribute__((vector_size(16)));
typedef float vec_f2 __attribute__((vector_size(8)));
typedef double vec_d2 __attribute__((vector_size(16)));
typedef int64_t vec_l2 __attribute__((vector_size(16)));

typedef struct {
    vec_f4 a, b, c, d;
} vf;
typedef struct {
    vec_u4 a, b, c, d;
} vi;
typedef struct {
    vec_i4 a, b, c, d; /* all bits of a lane, or none */
} vm;
typedef struct {
    int64_t v[16];
} vl;

/* Functions of each quarter: of one, two or three vectors, and by an operator. */
#define VEC_EACH(type, f, x) \
    (type) { f((x).a), f((x).b), f((x).c), f((x).d) }
#define VEC_EACH2(type, f, x, y) \
    (type) { f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d) }
#define VEC_EACH3(type, f, x, y, z) \
    (type) { f((x).a, (y).a, (z).a), f((x).b, (y).b, (z).b), f((x).c, (y).c, (z).c), f((x).d, (y).d, (z).d) }
#define VEC_OP(type, x, o, y) \
    (type) { (x).a o(y).a, (x).b o(y).b, (x).c o(y).c, (x).d o(y).d }
#define VEC_SAME(type, x) \
    (type) { (x), (x), (x), (x) }

VEC_FN vi vi_load(const int32_t *p)
{
    vi r;
    memcpy(&r, p, sizeof r);
    return r;
}
VEC_FN void vi_store(int32_t *p, vi v) { memcpy(p, &v, sizeof v); }
VEC_FN vi vi_set1(int32_t x) { return VEC_SAME(vi, (vec_u4){ 0 } + (uint32_t)x); }
VEC_FN vi vi_iota(void) { return (vi){ { 0, 1, 2, 3 }, { 4, 5, 6, 7 }, { 8, 9, 10, 11 }, { 12, 13, 14, 15 } }; }
VEC_FN vi vi_add(vi x, vi y) { return VEC_OP(vi, x, +, y); }
VEC_FN vi vi_xor(vi x, vi y) { return VEC_OP(vi, x, ^, y); }
VEC_FN vm vi_ge_u(vi x, vi y) { return VEC_OP(vm, x, >=, y); }
VEC_FN void vec_mul_wide(vec_u4 x, vec_u4 y, vec_u4 *low, vec_u4 *high)
{
    uint64_t p = (uint64_t)x[0] * y[0], q = (uint64_t)x[1] * y[1];
    uint64_t r = (uint64_t)x[2] * y[2], s = (uint64_t)x[3] * y[3];
    *low = (vec_u4){ (uint32_t)p, (uint32_t)q, (uint32_t)r, (uint32_t)s };
    *high = (vec_u4){ (uint32_t)(p >> 32), (uint32_t)(q >> 32), (uint32_t)(r >> 32), (uint32_t)(s >> 32) };
}
VEC_FN void vi_mul_wide(vi x, vi y, vi *low, vi *high)
{
    vec_mul_wide(x.a, y.a, &low->a, &high->a);
    vec_mul_wide(x.b, y.b, &low->b, &high->b);
    vec_mul_wide(x.c, y.c, &low->c, &high->c);
    vec_mul_wide(x.d, y.d, &low->d, &high->d);
}

VEC_FN vm vm_first_n(int64_t n) { return VEC_OP(vm, vi_set1((int32_t)n), >, vi_iota()); }
VEC_FN vm vm_from_bits(uint32_t bits)
{
    const vi lane = { { 1, 2, 4, 8 }, { 16, 32, 64, 128 }, { 256, 512, 1024, 2048 }, { 4096, 8192, 16384, 32768 } };
    vi all = vi_set1((int32_t)bits), set = VEC_OP(vi, all, &, lane);
    return VEC_OP(vm, set, ==, lane);
}
VEC_FN uint32_t vec_bits(vec_i4 m) { return (uint32_t)((m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8)); }
VEC_FN uint32_t vm_bits(vm m) { return vec_bits(m.a) | vec_bits(m.b) << 4 | vec_bits(m.c) << 8 | vec_bits(m.d) << 12; }
VEC_FN vm vm_and(vm x, vm y) { return VEC_OP(vm, x, &, y); }
VEC_FN vm vm_or(vm x, vm y) { return VEC_OP(vm, x, |, y); }
VEC_FN vm vm_not(vm x) { return (vm){ ~x.a, ~x.b, ~x.c, ~x.d }; }
VEC_FN int vm_any(vm x)
{
    vec_l2 any = (vec_l2)(x.a | x.b | x.c | x.d);
    return (any[0] | any[1]) != 0;
}

VEC_FN vf vf_load(const float *p)
{
    vf r;
    memcpy(&r, p, sizeof r);
    return r;
}
VEC_FN void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
VEC_FN vf vf_load_n(const float *p, int64_t n)
{
    float part[VEC] = { 0 };
    memcpy(part, p, (size_t)n * sizeof *part);
    return vf_load(part);
}
VEC_FN void vf_store_n(float *p, vf v, int64_t n) { memcpy(p, &v, (size_t)n * sizeof *p); }
VEC_FN vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
    float part[VEC] = { 0 };
    for (int64_t i = 0; i < n; i++) part[i] = bf16_to_float(p[i]);
    return vf_load(part);
}
VEC_FN vf vf_load_bf16(const uint16_t *p) { return vf_load_bf16_n(p, VEC); }
VEC_FN void vf_store_bf16_n(uint16_t *p, vf v, int64_t n)
{
    float part[VEC];
    vf_store(part, v);
    for (int64_t i = 0; i < n; i++) p[i] = bf16_from_float(part[i]);
}
VEC_FN void vf_store_bf16(uint16_t *p, vf v) { vf_store_bf16_n(p, v, VEC); }
VEC_FN vf vf_set1(float x)
{
    vec_f4 all = { x, x, x, x };
    return VEC_SAME(vf, all);
}
VEC_FN vf vf_zero(void) { return vf_set1(0.0f); }
VEC_FN vf vf_add(vf x, vf y) { return VEC_OP(vf, x, +, y); }
VEC_FN vf vf_sub(vf x, vf y) { return VEC_OP(vf, x, -, y); }
VEC_FN vf vf_mul(vf x, vf y) { return VEC_OP(vf, x, *, y); }
VEC_FN vf vf_div(vf x, vf y) { return VEC_OP(vf, x, /, y); }
VEC_FN vf vf_neg(vf x) { return (vf){ -x.a, -x.b, -x.c, -x.d }; }
VEC_FN vec_f4 vec_abs(vec_f4 x) { return (vec_f4)((vec_i4)x & INT32_MAX); }
VEC_FN vf vf_abs(vf x) { return VEC_EACH(vf, vec_abs, x); }
VEC_FN vec_f4 vec_sqrt(vec_f4 x)
{
    return (vec_f4){ __builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3]) };
}
VEC_FN vf vf_sqrt(vf x) { return VEC_EACH(vf, vec_sqrt, x); }

/*
 * a * b + c rounded once, without an instruction for it. In double the product is exact. The sum is rounded
 * to odd: where it is not exact (error from Knuth's two-sum) and its last bit is 0, it moves one step
 * towards the exact value. Having 29 bits more than a float, it then rounds to the float that the exact
 * value rounds to. NaN and Inf have a NaN error, which is neither above nor below 0.
 */
VEC_FN vec_d2 vec_add_odd(vec_d2 p, vec_d2 c)
{
    vec_d2 s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
    vec_l2 above = error > 0.0, below = error < 0.0, bits = (vec_l2)s;
    vec_l2 step = (above ^ (s > 0.0)) | 1; /* a larger number: one up in bits if positive, one down if not */
    bits += step & (above | below) & ((bits & 1) - 1);
    return (vec_d2)bits;
}
/* Uses __builtin_convertvector: GCC 12 drops the rounding of { (float)d[0], ... } where it is made double again. */
VEC_FN vec_f2 vec_fma2(vec_f2 x, vec_f2 y, vec_f2 z)
{
    vec_d2 p = __builtin_convertvector(x, vec_d2) * __builtin_convertvector(y, vec_d2);
    return __builtin_convertvector(vec_add_odd(p, __builtin_convertvector(z, vec_d2)), vec_f2);
}
VEC_FN vec_f4 vec_fma(vec_f4 x, vec_f4 y, vec_f4 z)
{
    vec_f2 low = vec_fma2((vec_f2){ x[0], x[1] }, (vec_f2){ y[0], y[1] }, (vec_f2){ z[0], z[1] });
    vec_f2 high = vec_fma2((vec_f2){ x[2], x[3] }, (vec_f2){ y[2], y[3] }, (vec_f2){ z[2], z[3] });
    return (vec_f4){ low[0], low[1], high[0], high[1] };
}
VEC_FN vf vf_fma(vf x, vf y, vf z) { return VEC_EACH3(vf, vec_fma, x, y, z); }
VEC_FN vf vf_fnma(vf x, vf y, vf z) { return vf_fma(vf_neg(x), y, z); }

VEC_FN vm vf_lt(vf x, vf y) { return VEC_OP(vm, x, <, y); }
VEC_FN vm vf_ge(vf x, vf y) { return VEC_OP(vm, x, >=, y); }
VEC_FN vec_f4 vec_select(vec_i4 m, vec_f4 x, vec_f4 y) { return (vec_f4)((m & (vec_i4)x) | (~m & (vec_i4)y)); }
VEC_FN vf vf_select(vm m, vf x, vf y) { return VEC_EACH3(vf, vec_select, m, x, y); }
VEC_FN vec_f4 vec_max(vec_f4 x, vec_f4 y) { return vec_select(x > y, x, y); }
VEC_FN vec_f4 vec_min(vec_f4 x, vec_f4 y) { return vec_select(x < y, x, y); }
VEC_FN vf vf_max(vf x, vf y) { return VEC_EACH2(vf, vec_max, x, y); }
VEC_FN vf vf_min(vf x, vf y) { return VEC_EACH2(vf, vec_min, x, y); }

/* In two factors, the first of them exact: k alone may lie outside the exponents of a float. */
VEC_FN vec_f4 vec_scale2(vec_f4 p, vec_f4 t)
{
    const vec_f4 magic = { VF_MAGIC, VF_MAGIC, VF_MAGIC, VF_MAGIC };
    vec_u4 k = (vec_u4)t - (vec_u4)magic, half = (vec_u4)((vec_i4)k >> 1);
    return p * (vec_f4)((half + 127) << 23) * (vec_f4)((k - half + 127) << 23);
}
VEC_FN vf vf_scale2(vf p, vf t) { return VEC_EACH2(vf, vec_scale2, p, t); }

VEC_FN float vf_sum(vf x)
{
    vec_f4 q = (x.a + x.c) + (x.b + x.d);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

VEC_FN float vf_hmax(vf x)
{
    vec_f4 q = vec_max(vec_max(x.a, x.c), vec_max(x.b, x.d));
    float even = q[0] > q[2] ? q[0] : q[2], odd = q[1] > q[3] ? q[1] : q[3];
    return even > odd ? even : odd;
}

#define VL_EACH(expr)                              \
    vl r;                                          \
    for (int i = 0; i < VEC; i++) r.v[i] = (expr); \
    return r

VEC_FN vl vl_load(const int64_t *p)
{
    vl r;
    memcpy(&r, p, sizeof r);
    return r;
}
VEC_FN void vl_store(int64_t *p, vl v) { memcpy(p, &v, sizeof v); }
VEC_FN vl vl_set1(int64_t x) { VL_EACH(x); }
VEC_FN vl vl_zero(void) { return (vl){ { 0 } }; }
VEC_FN vl vl_add(vl x, vl y) { VL_EACH((int64_t)((uint64_t)x.v[i] + (uint64_t)y.v[i])); }
VEC_FN vl vl_sub(vl x, vl y) { VL_EACH((int64_t)((uint64_t)x.v[i] - (uint64_t)y.v[i])); }
VEC_FN vl vl_abs(vl x) { VL_EACH(x.v[i] < 0 ? (int64_t)(0 - (uint64_t)x.v[i]) : x.v[i]); }
VEC_FN vl vl_max(vl x, vl y) { VL_EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
VEC_FN vl vl_shr32(vl x) { VL_EACH((int64_t)((uint64_t)x.v[i] >> 32)); }
VEC_FN vl vl_low32(vl x) { VL_EACH(x.v[i] & 0xFFFFFFFF); }
VEC_FN vl vl_mul32(vl x, vl y) { VL_EACH((int64_t)((uint64_t)(uint32_t)x.v[i] * (uint32_t)y.v[i])); }
VEC_FN vl vl_from_f(vf x)
{
    float lane[VEC];
    vf_store(lane, x);
    VL_EACH((int64_t)__builtin_llrintf(lane[i]));
}
VEC_FN vl vl_round(const float *p, double scale)
{
    double lane[VEC];
    for (int i = 0; i < VEC; i++) lane[i] = VL_MAGIC + p[i] * scale;
    vl r;
    memcpy(&r, lane, sizeof r);
    return r;
}
VEC_FN vf vf_from_l(vl x)
{
    float lane[VEC];
    for (int i = 0; i < VEC; i++) lane[i] = (float)x.v[i];
    return vf_load(lane);
}

#endif
