/*
 * The register kernels that multiply pairs of bf16 numbers by VDPBF16PS: two products for each lane and instruction,
 * twice what fp32 has. Of the build for AVX-512 this file alone is compiled for AVX512-BF16 (Makefile), if the compiler
 * knows it; whether the processor does is asked at run time (dot_supported).
 */
#include "cpu/gemm_leaf.h"

#if defined(__AVX512BF16__)
TILE_FAMILY(TILE_PAIRS, tiles_pairs)

LEAF_KERNEL(TILE_PAIRS, leaf_of_pairs)

const TileKernels *CPU(tile_pairs)(void) { return tiles_pairs; }
LeafKernel CPU(leaf_pairs)(void) { return leaf_of_pairs; }

bool cpu_avx512_has_pairs(void) { return __builtin_cpu_supports("avx512bf16"); }

void CPU(pairs_of_rows)(float *to, const float *from, int64_t ld, int64_t n)
{
    static const int16_t between[32] = { 0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31 };
    const __m512i order = _mm512_loadu_si512(between);
    for (int64_t i = 0; i < n; i += 2, from += 2 * ld, to += ld) {
        const __m512bh two = _mm512_cvtne2ps_pbh(vf_load(from + ld), vf_load(from));
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, (__m512i)two));
    }
}

void CPU(pairs_of_columns)(float *to, const float *from, int64_t ld, int64_t n)
{
    for (int64_t i = 0; i < n; i++, from += ld, to += ld)
        _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(vf_load(from)));
}
#else
const TileKernels *CPU(tile_pairs)(void) { return NULL; }
LeafKernel CPU(leaf_pairs)(void) { return NULL; }
void CPU(pairs_of_rows)(float *to, const float *from, int64_t ld, int64_t n)
{
    (void)to, (void)from, (void)ld, (void)n;
}
void CPU(pairs_of_columns)(float *to, const float *from, int64_t ld, int64_t n)
{
    (void)to, (void)from, (void)ld, (void)n;
}
#if defined(CPU_ISA_avx512)
bool cpu_avx512_has_pairs(void) { return false; }
#endif
#endif
