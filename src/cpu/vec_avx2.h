/*
 * Primitives of vec.h for AVX2 and FMA: two registers for vf, vi and vm, four for vl. AVX2 has no
 * conversions between int64 and floats; they are made here from additions of large constants in double.
 */
#ifndef MEGATRAIN_CPU_VEC_AVX2_H
#define MEGATRAIN_CPU_VEC_AVX2_H

#include <immintrin.h>
#include <string.h>

#include "cpu/vec.h"

typedef struct {
    __m256 a, b;
} vf;
typedef struct {
    __m256i a, b;
} vi;
typedef struct {
    __m256 a, b; /* all bits of a lane, or none */
} vm;
typedef struct {
    __m256i a, b, c, d;
} vl;

VEC_FN vm vm_cast(__m256i a, __m256i b) { return (vm){ _mm256_castsi256_ps(a), _mm256_castsi256_ps(b) }; }
VEC_FN vm vm_first_n(int64_t n)
{
    __m256i count = _mm256_set1_epi32((int)n);
    return vm_cast(_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
                   _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)));
}
VEC_FN vm vm_from_bits(uint32_t bits)
{
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    __m256i all = _mm256_set1_epi32((int)bits);
    return vm_cast(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low),
                   _mm256_cmpeq_epi32(_mm256_and_si256(all, high), high));
}
VEC_FN uint32_t vm_bits(vm m) { return (uint32_t)_mm256_movemask_ps(m.a) | (uint32_t)_mm256_movemask_ps(m.b) << 8; }
VEC_FN vm vm_and(vm x, vm y) { return (vm){ _mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b) }; }
VEC_FN vm vm_or(vm x, vm y) { return (vm){ _mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b) }; }
VEC_FN vm vm_not(vm x)
{
    const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    return (vm){ _mm256_xor_ps(x.a, ones), _mm256_xor_ps(x.b, ones) };
}
VEC_FN int vm_any(vm x) { return vm_bits(x) != 0; }

VEC_FN vf vf_load(const float *p) { return (vf){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
VEC_FN void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
VEC_FN vf vf_load_n(const float *p, int64_t n)
{
    vm m = vm_first_n(n);
    return (vf){ _mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b)) };
}
VEC_FN void vf_store_n(float *p, vf v, int64_t n)
{
    vm m = vm_first_n(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), v.a);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), v.b);
}
VEC_FN vf vf_load_bf16(const uint16_t *p)
{
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)));
    return (vf){ _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)) };
}
VEC_FN vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
    uint16_t part[VEC] = { 0 };
    memcpy(part, p, (size_t)n * sizeof *part);
    return vf_load_bf16(part);
}
VEC_FN __m256i vec_bf16(__m256 v)
{
    const __m256i bits = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
    __m256i up = _mm256_add_epi32(bits, _mm256_and_si256(_mm256_srli_epi32(bits, 16), one));
    up = _mm256_srli_epi32(_mm256_add_epi32(up, _mm256_set1_epi32(0x7FFF)), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7FFF), nan);
}
VEC_FN void vf_store_bf16(uint16_t *p, vf v)
{
    const __m256i packed = _mm256_packus_epi32(vec_bf16(v.a), vec_bf16(v.b));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
VEC_FN void vf_store_bf16_n(uint16_t *p, vf v, int64_t n)
{
    uint16_t part[VEC];
    vf_store_bf16(part, v);
    memcpy(p, part, (size_t)n * sizeof *part);
}
VEC_FN vf vf_set1(float x) { return (vf){ _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
VEC_FN vf vf_zero(void) { return (vf){ _mm256_setzero_ps(), _mm256_setzero_ps() }; }
VEC_FN vf vf_add(vf x, vf y) { return (vf){ _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b) }; }
VEC_FN vf vf_sub(vf x, vf y) { return (vf){ _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b) }; }
VEC_FN vf vf_mul(vf x, vf y) { return (vf){ _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b) }; }
VEC_FN vf vf_div(vf x, vf y) { return (vf){ _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b) }; }
VEC_FN vf vf_fma(vf x, vf y, vf z) { return (vf){ _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) }; }
VEC_FN vf vf_fnma(vf x, vf y, vf z) { return (vf){ _mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b) }; }
VEC_FN vf vf_max(vf x, vf y) { return (vf){ _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b) }; }
VEC_FN vf vf_min(vf x, vf y) { return (vf){ _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b) }; }
VEC_FN vf vf_sqrt(vf x) { return (vf){ _mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b) }; }
VEC_FN vf vf_neg(vf x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){ _mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign) };
}
VEC_FN vf vf_abs(vf x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){ _mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b) };
}
VEC_FN vm vf_lt(vf x, vf y) { return (vm){ _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ) }; }
VEC_FN vm vf_ge(vf x, vf y) { return (vm){ _mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ) }; }
VEC_FN vf vf_select(vm m, vf x, vf y)
{
    return (vf){ _mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b) };
}

/* In two factors, the first of them exact: k alone may lie outside the exponents of a float. */
VEC_FN __m256 vec_scale2(__m256 p, __m256 t)
{
    const __m256i bias = _mm256_set1_epi32(127);
    __m256i k = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_castps_si256(_mm256_set1_ps(VF_MAGIC)));
    __m256i half = _mm256_srai_epi32(k, 1), rest = _mm256_sub_epi32(k, half);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
VEC_FN vf vf_scale2(vf p, vf t) { return (vf){ vec_scale2(p.a, t.a), vec_scale2(p.b, t.b) }; }

VEC_FN float vf_sum(vf v)
{
    __m256 s = _mm256_add_ps(v.a, v.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

VEC_FN float vf_hmax(vf v)
{
    __m256 s = _mm256_max_ps(v.a, v.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

VEC_FN vi vi_load(const int32_t *p)
{
    return (vi){ _mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8)) };
}
VEC_FN void vi_store(int32_t *p, vi v)
{
    _mm256_storeu_si256((__m256i *)p, v.a);
    _mm256_storeu_si256((__m256i *)(p + 8), v.b);
}
VEC_FN vi vi_set1(int32_t x) { return (vi){ _mm256_set1_epi32(x), _mm256_set1_epi32(x) }; }
VEC_FN vi vi_iota(void)
{
    return (vi){ _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15) };
}
VEC_FN vi vi_add(vi x, vi y) { return (vi){ _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b) }; }
VEC_FN vi vi_xor(vi x, vi y) { return (vi){ _mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b) }; }
VEC_FN vm vi_ge_u(vi x, vi y)
{
    return vm_cast(_mm256_cmpeq_epi32(_mm256_max_epu32(x.a, y.a), x.a),
                   _mm256_cmpeq_epi32(_mm256_max_epu32(x.b, y.b), x.b));
}

VEC_FN void vec_mul_wide(__m256i x, __m256i y, __m256i *low, __m256i *high)
{
    __m256i even = _mm256_mul_epu32(x, y);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
VEC_FN void vi_mul_wide(vi x, vi y, vi *low, vi *high)
{
    vec_mul_wide(x.a, y.a, &low->a, &high->a);
    vec_mul_wide(x.b, y.b, &low->b, &high->b);
}

VEC_FN __m256i vec_load(const int64_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
VEC_FN vl vl_load(const int64_t *p) { return (vl){ vec_load(p), vec_load(p + 4), vec_load(p + 8), vec_load(p + 12) }; }
VEC_FN void vl_store(int64_t *p, vl v)
{
    _mm256_storeu_si256((__m256i *)p, v.a);
    _mm256_storeu_si256((__m256i *)(p + 4), v.b);
    _mm256_storeu_si256((__m256i *)(p + 8), v.c);
    _mm256_storeu_si256((__m256i *)(p + 12), v.d);
}
/* vl of a function of each quarter of x, or of x and y */
#define VL_EACH(f, x) \
    (vl) { f((x).a), f((x).b), f((x).c), f((x).d) }
#define VL_EACH2(f, x, y) \
    (vl) { f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d) }
VEC_FN vl vl_zero(void)
{
    __m256i zero = _mm256_setzero_si256();
    return (vl){ zero, zero, zero, zero };
}
VEC_FN vl vl_set1(int64_t x)
{
    __m256i v = _mm256_set1_epi64x(x);
    return (vl){ v, v, v, v };
}
VEC_FN __m256i vec_abs64(__m256i x)
{
    __m256i sign = _mm256_cmpgt_epi64(_mm256_setzero_si256(), x);
    return _mm256_sub_epi64(_mm256_xor_si256(x, sign), sign);
}
VEC_FN __m256i vec_max64(__m256i x, __m256i y) { return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi64(x, y)); }
VEC_FN __m256i vec_shr32(__m256i x) { return _mm256_srli_epi64(x, 32); }
VEC_FN __m256i vec_low32(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi64x(0xFFFFFFFF)); }
VEC_FN vl vl_add(vl x, vl y) { return VL_EACH2(_mm256_add_epi64, x, y); }
VEC_FN vl vl_sub(vl x, vl y) { return VL_EACH2(_mm256_sub_epi64, x, y); }
VEC_FN vl vl_abs(vl x) { return VL_EACH(vec_abs64, x); }
VEC_FN vl vl_max(vl x, vl y) { return VL_EACH2(vec_max64, x, y); }
VEC_FN vl vl_shr32(vl x) { return VL_EACH(vec_shr32, x); }
VEC_FN vl vl_low32(vl x) { return VL_EACH(vec_low32, x); }
VEC_FN vl vl_mul32(vl x, vl y) { return VL_EACH2(_mm256_mul_epu32, x, y); }

/*
 * llrint: d = high * 2^32 + low with both parts rounded to integers by adding 1.5 * 2^52. Rounding low to
 * even rounds d to even, because high * 2^32 is even; the constant's own low 32 bits are 0.
 */
VEC_FN __m256i vec_l_from_d(__m256d d)
{
    const __m256d magic = _mm256_set1_pd(0x1.8p52);
    __m256d high = _mm256_add_pd(_mm256_mul_pd(d, _mm256_set1_pd(0x1p-32)), magic);
    __m256d low = _mm256_sub_pd(d, _mm256_mul_pd(_mm256_sub_pd(high, magic), _mm256_set1_pd(0x1p32)));
    __m256i low_bits = _mm256_castpd_si256(_mm256_add_pd(low, magic));
    return _mm256_add_epi64(_mm256_slli_epi64(_mm256_castpd_si256(high), 32),
                            _mm256_sub_epi64(low_bits, _mm256_castpd_si256(magic)));
}
/* The same for |d| <= 2^51, where one part is enough. */
VEC_FN __m256i vec_l_from_small(__m256d d)
{
    const __m256d magic = _mm256_set1_pd(0x1.8p52);
    return _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(d, magic)), _mm256_castpd_si256(magic));
}
typedef struct {
    __m256d a, b, c, d;
} vec_doubles;
VEC_FN vl vl_from_f(vf v)
{
    vec_doubles x = { _mm256_cvtps_pd(_mm256_castps256_ps128(v.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(v.a, 1)),
                      _mm256_cvtps_pd(_mm256_castps256_ps128(v.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(v.b, 1)) };
    if (__builtin_expect(vm_any(vf_ge(vf_abs(v), vf_set1(0x1p51f))), 0)) return VL_EACH(vec_l_from_d, x);
    return VL_EACH(vec_l_from_small, x);
}

VEC_FN __m256i vec_round(const float *p, double scale)
{
    const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(p));
    return _mm256_castpd_si256(_mm256_fmadd_pd(x, _mm256_set1_pd(scale), _mm256_set1_pd(VL_MAGIC)));
}
VEC_FN vl vl_round(const float *p, double scale)
{
    return (vl){ vec_round(p, scale), vec_round(p + 4, scale), vec_round(p + 8, scale), vec_round(p + 12, scale) };
}

/* x replaced by a number that is exact as a double and rounds to the same float: where |x| is 2^52 or more,
 * one sticky bit stands for the low 11 bits. */
VEC_FN __m256i vec_sticky(__m256i x)
{
    const __m256i low11 = _mm256_set1_epi64x(0x7FF), zero = _mm256_setzero_si256();
    __m256i large = _mm256_cmpgt_epi64(vec_abs64(x), _mm256_set1_epi64x(0xFFFFFFFFFFFFF));
    __m256i exact = _mm256_cmpeq_epi64(_mm256_and_si256(x, low11), zero);
    __m256i sticky = _mm256_andnot_si256(exact, _mm256_set1_epi64x(0x400));
    return _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_andnot_si256(low11, x), sticky), large);
}
/* From 2^52 + low word, and 2^84 + 2^32 * (high word + 2^31), put together as bits. */
VEC_FN __m128 vec_f_from_l(__m256i x)
{
    __m256i low = _mm256_blend_epi32(x, _mm256_castpd_si256(_mm256_set1_pd(0x1p52)), 0xAA);
    __m256i high = _mm256_xor_si256(_mm256_srli_epi64(x, 32), _mm256_set1_epi64x(0x4530000080000000));
    __m256d d = _mm256_sub_pd(_mm256_castsi256_pd(high), _mm256_set1_pd(0x1p84 + 0x1p63 + 0x1p52));
    return _mm256_cvtpd_ps(_mm256_add_pd(d, _mm256_castsi256_pd(low)));
}
VEC_FN __m256i vec_beyond52(__m256i x) { return _mm256_add_epi64(x, _mm256_set1_epi64x(1LL << 52)); }
VEC_FN vf vf_from_l(vl x)
{
    vl up = VL_EACH(vec_beyond52, x); /* below 2^53 exactly where -2^52 <= x < 2^52 */
    __m256i any = _mm256_or_si256(_mm256_or_si256(up.a, up.b), _mm256_or_si256(up.c, up.d));
    if (__builtin_expect(!_mm256_testz_si256(any, _mm256_set1_epi64x(-(1LL << 53))), 0)) x = VL_EACH(vec_sticky, x);
    return (vf){ _mm256_set_m128(vec_f_from_l(x.b), vec_f_from_l(x.a)),
                 _mm256_set_m128(vec_f_from_l(x.d), vec_f_from_l(x.c)) };
}

#endif
