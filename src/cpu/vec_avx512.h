/* Primitives of vec.h for AVX-512 (F, DQ, VL, BW): one register for vf and vi, two for vl. */
#ifndef MEGATRAIN_CPU_VEC_AVX512_H
#define MEGATRAIN_CPU_VEC_AVX512_H

#include <immintrin.h>

#include "cpu/vec.h"

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;
typedef struct {
    __m512i a, b;
} vl;

VEC_FN vm vm_first_n(int64_t n) { return (vm)((1u << n) - 1); }
VEC_FN vm vm_from_bits(uint32_t bits) { return (vm)bits; }
VEC_FN uint32_t vm_bits(vm m) { return m; }
VEC_FN vm vm_and(vm a, vm b) { return a & b; }
VEC_FN vm vm_or(vm a, vm b) { return a | b; }
VEC_FN vm vm_not(vm a) { return (vm)~a; }
VEC_FN int vm_any(vm a) { return a != 0; }

VEC_FN vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
VEC_FN void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
VEC_FN vf vf_load_n(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(vm_first_n(n), p); }
VEC_FN void vf_store_n(float *p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, vm_first_n(n), v); }
VEC_FN vf vec_from_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
VEC_FN vf vf_load_bf16(const uint16_t *p) { return vec_from_bf16(_mm256_loadu_si256((const void *)p)); }
VEC_FN vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
    return vec_from_bf16(_mm256_maskz_loadu_epi16(vm_first_n(n), p));
}
VEC_FN __m256i vec_bf16(vf v)
{
    const __m512i bits = _mm512_castps_si512(v), even = _mm512_set1_epi32(1);
    __m512i up = _mm512_add_epi32(bits, _mm512_and_si512(_mm512_srli_epi32(bits, 16), even));
    up = _mm512_srli_epi32(_mm512_add_epi32(up, _mm512_set1_epi32(0x7FFF)), 16);
    const vm nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7FFF)));
}
VEC_FN void vf_store_bf16(uint16_t *p, vf v) { _mm256_storeu_si256((void *)p, vec_bf16(v)); }
VEC_FN void vf_store_bf16_n(uint16_t *p, vf v, int64_t n) { _mm256_mask_storeu_epi16(p, vm_first_n(n), vec_bf16(v)); }
VEC_FN vf vf_set1(float x) { return _mm512_set1_ps(x); }
VEC_FN vf vf_zero(void) { return _mm512_setzero_ps(); }
VEC_FN vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
VEC_FN vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
VEC_FN vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
VEC_FN vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
VEC_FN vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VEC_FN vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
VEC_FN vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
VEC_FN vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
VEC_FN vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
VEC_FN vf vf_neg(vf a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
VEC_FN vf vf_abs(vf a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
VEC_FN vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VEC_FN vm vf_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
VEC_FN vf vf_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
VEC_FN vf vf_scale2(vf p, vf t) { return _mm512_scalef_ps(p, _mm512_sub_ps(t, _mm512_set1_ps(VF_MAGIC))); }

VEC_FN float vf_sum(vf v)
{
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

VEC_FN float vf_hmax(vf v)
{
    __m256 s = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

VEC_FN vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
VEC_FN void vi_store(int32_t *p, vi v) { _mm512_storeu_si512(p, v); }
VEC_FN vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
VEC_FN vi vi_iota(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
VEC_FN vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
VEC_FN vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
VEC_FN vm vi_ge_u(vi a, vi b) { return _mm512_cmpge_epu32_mask(a, b); }

VEC_FN void vi_mul_wide(vi a, vi b, vi *low, vi *high)
{
    __m512i even = _mm512_mul_epu32(a, b);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    *low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, (_MM_PERM_ENUM)0xA0);
    *high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, (_MM_PERM_ENUM)0xF5);
}

VEC_FN vl vl_load(const int64_t *p) { return (vl){ _mm512_loadu_si512(p), _mm512_loadu_si512(p + 8) }; }
VEC_FN void vl_store(int64_t *p, vl v)
{
    _mm512_storeu_si512(p, v.a);
    _mm512_storeu_si512(p + 8, v.b);
}
VEC_FN vl vl_set1(int64_t x) { return (vl){ _mm512_set1_epi64(x), _mm512_set1_epi64(x) }; }
VEC_FN vl vl_zero(void) { return (vl){ _mm512_setzero_si512(), _mm512_setzero_si512() }; }
VEC_FN vl vl_add(vl x, vl y) { return (vl){ _mm512_add_epi64(x.a, y.a), _mm512_add_epi64(x.b, y.b) }; }
VEC_FN vl vl_sub(vl x, vl y) { return (vl){ _mm512_sub_epi64(x.a, y.a), _mm512_sub_epi64(x.b, y.b) }; }
VEC_FN vl vl_abs(vl x) { return (vl){ _mm512_abs_epi64(x.a), _mm512_abs_epi64(x.b) }; }
VEC_FN vl vl_max(vl x, vl y) { return (vl){ _mm512_max_epi64(x.a, y.a), _mm512_max_epi64(x.b, y.b) }; }
VEC_FN vl vl_shr32(vl x) { return (vl){ _mm512_srli_epi64(x.a, 32), _mm512_srli_epi64(x.b, 32) }; }
VEC_FN vl vl_low32(vl x)
{
    const __m512i low = _mm512_set1_epi64(0xFFFFFFFF);
    return (vl){ _mm512_and_si512(x.a, low), _mm512_and_si512(x.b, low) };
}
VEC_FN vl vl_mul32(vl x, vl y) { return (vl){ _mm512_mul_epu32(x.a, y.a), _mm512_mul_epu32(x.b, y.b) }; }

VEC_FN vl vl_from_f(vf v)
{
    return (vl){ _mm512_cvtps_epi64(_mm512_castps512_ps256(v)), _mm512_cvtps_epi64(_mm512_extractf32x8_ps(v, 1)) };
}

VEC_FN __m512i vec_round(const float *p, double scale)
{
    const __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(p));
    return _mm512_castpd_si512(_mm512_fmadd_pd(x, _mm512_set1_pd(scale), _mm512_set1_pd(VL_MAGIC)));
}
VEC_FN vl vl_round(const float *p, double scale) { return (vl){ vec_round(p, scale), vec_round(p + 8, scale) }; }

VEC_FN vf vf_from_l(vl x)
{
    __m512 low = _mm512_castps256_ps512(_mm512_cvtepi64_ps(x.a));
    return _mm512_insertf32x8(low, _mm512_cvtepi64_ps(x.b), 1);
}

#endif
