/*
 * The register kernels that multiply pairs of bf16 numbers by VDPBF16PS: two products for each lane and instruction,
 * twice what fp32 has. Of the build for AVX-512 this file alone is compiled for AVX512-BF16 (Makefile), if the compiler
 * knows it; whether the processor does is asked at run time (dot_supported).
 */
#include "cpu/gemm_kernel.h"

#if defined(__AVX512BF16__)
TILE_FAMILY(TILE_PAIRS, tiles_pairs)

const TileKernels *CPU(tile_pairs)(void) { return tiles_pairs; }

bool cpu_avx512_has_pairs(void) { return __builtin_cpu_supports("avx512bf16"); }
#else
const TileKernels *CPU(tile_pairs)(void) { return NULL; }
#if defined(CPU_ISA_avx512)
bool cpu_avx512_has_pairs(void) { return false; }
#endif
#endif
