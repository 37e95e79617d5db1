/*
 * The device language of every .cu file: what differs between nvcc and the emulator (test/emu), and nothing
 * else. Launches, shared memory and PTX stand here and nowhere else (scripts/check-kernels.sh), so that the very
 * same kernels run on a CPU in CI (make test-emu). Vector loads, reductions and dtypes: kernel.cuh; Hopper's own
 * instructions, PTX as well: hopper.cuh.
 *
 *   LAUNCH(kernel, grid, block, smem_bytes, stream, args...)   kernel<<<...>>>(args...); a template
 *                         instance with commas goes in parentheses
 *   UNROLL, UNROLL_BY(n)             before a loop, where arrays must become registers
 *   SHARED(type, name, [dims])       static __shared__ array
 *   DYNAMIC_SHARED(type, name)       extern __shared__; one per kernel, 1024-byte aligned
 *
 * cp.async: 16 bytes global -> shared; `valid` false writes zeros and reads nothing. Landed only after
 * cp_async_wait<N>() (all but the newest N committed groups) *and* a barrier for the other threads.
 *
 * Fragments of mma.sync m16n8k16 (g = lane / 4, t = lane % 4; two 16-bit values a register, low half first):
 *   a[0] rows g, k 2t..   a[1] row g+8, k 2t..   a[2] row g, k 2t+8..   a[3] row g+8, k 2t+8..
 *   b[0] k 2t.., column g              b[1] k 2t+8.., column g
 *   d[0], d[1] row g, columns 2t, 2t+1               d[2], d[3] row g+8
 * Of m16n8k32 with 8-bit values four lie in a register, the first in the low byte: k 4t.. and 4t+16.. instead.
 * ldmatrix: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes each, 16-byte aligned); register
 * i holds matrix i, row lane / 4, columns 2 (lane % 4) and the next; _trans: the transposed matrix.
 * Source: PTX ISA, sections on mma.m16n8k16, mma.m16n8k32, ldmatrix, cp.async.
 */
#ifndef MEGATRAIN_CUDA_COMMON_CUH
#define MEGATRAIN_CUDA_COMMON_CUH

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#define LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<(grid), (block), (smem), (stream)>>>(__VA_ARGS__)
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(n) UNROLL_TEXT(unroll n)
#define UNROLL_TEXT(text) _Pragma(#text)
#define SHARED(type, name, dims) __shared__ __align__(16) type name dims
#define DYNAMIC_SHARED(type, name)                                     \
    extern __shared__ __align__(1024) unsigned char dynamic_shared_[]; \
    type *name = reinterpret_cast<type *>(dynamic_shared_)

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void cp_async_16(void *to, const void *from, bool valid = true)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

/* d += a b, fp32 sums; the dummy last argument chooses the type of a and b. */
#define MMA_16816(name, type, text)                                                                             \
    __device__ __forceinline__ void name(float d[4], const uint32_t a[4], const uint32_t b[2], type)            \
    {                                                                                                           \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." text "." text ".f32 {%0, %1, %2, %3}, "           \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"                                          \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                       \
    }
MMA_16816(mma_16816, __nv_bfloat16, "bf16")
MMA_16816(mma_16816, __half, "f16")
#undef MMA_16816

/* The same of e4m3 codes, 32 along k: from compute capability 8.9 on. */
__device__ __forceinline__ void mma_16832_e4m3(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    (void)d, (void)a, (void)b;
    __trap();
#endif
}

/* 2^x in one instruction, to 2^-22; results below 2^-126 are 0. */
__device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/* x itself; but what is computed from it is computed where it is used, not ahead of a loop: fewer registers. */
__device__ __forceinline__ int in_place(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* The line of global memory that p lies in is brought to L2; nothing waits for it. */
__device__ __forceinline__ void prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(p));
}

/* The device stops at a wrong address by itself; a host may not (emu.h). */
template <class T> __device__ __forceinline__ void need_aligned(const T *, int) {}

#else
#include "emu.h" /* test/emu: the same names, executed by fibers on the host */
#define UNROLL /* a host compiler would take minutes for nothing */
#define UNROLL_BY(n)
static inline int in_place(int x) { return x; }
static inline void prefetch_l2(const void *) {}
static inline float exp2_approx(float x) { return emu::exp2_approx(x); }
#endif

#endif
