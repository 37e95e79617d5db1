/*
 * Hopper's own instructions (sm_90a), for kernels of 16-bit and 8-bit products: wgmma, the bulk tensor copy (TMA),
 * mbarrier, setmaxnreg, named barriers, proxy fences. PTX stands here and in common.cuh alone; on a CPU test/emu
 * executes the same names (emu_hopper.h). Tensor maps, made by the host: tensor_map.h.
 *
 * HOPPER is 1 where the instructions exist; a kernel's body stands in `#if HOPPER`, so that it is empty in the object
 * code of other GPUs, which never launch it (hopper_code).
 *
 *   barrier_init(b, n)        one thread; n arrivals end a phase. Then barriers_ready() by it, __syncthreads() by all
 *   barrier_expect(b, bytes)  an arrival; the phase waits for so many bytes of copies, too
 *   barrier_arrive(b)         an arrival
 *   barrier_wait(b, parity)   until the phase of this parity is over: fresh, parity 0 waits and 1 passes
 *   tma_load_2d(to, map, b, x, y), _3d .. _5d    by one thread; coordinates in elements, innermost first, x a multiple
 *                                                of
 *                             16 bytes, outside as well; what lies outside becomes 0 and counts as bytes all the same.
 *                             Rows of a box shorter than the swizzle's lie each in a row of the swizzle
 *   proxy_fence()             by each thread that wrote shared memory by stores, before the barrier behind which wgmma
 *                             or a copy reads it. Without it an H100 does read old numbers
 *   registers_give<N>(), registers_take<N>()    by all warps of a warpgroup
 *   named_sync(id, threads), named_arrive(id, threads)    barriers 1 .. 15 of the block; threads counts both
 *
 * Products: d += a b, 64 rows of a by N columns of b, 16 of the depth; by the four warps of a warpgroup, in step.
 * wgmma_begin(d); any number of wgmma(...); wgmma_commit(); wgmma_wait<PENDING>() (all but the newest PENDING groups);
 * wgmma_end(d) before d is read. `keep` false: d = a b. A warp's wait says nothing of the other three, which may still
 * read: each warp arrives at the barrier that gives the shared memory back.
 *
 * A product has the bits of mma.sync's, whatever its columns, layouts and place in a tile: 16 of the depth at a time,
 * each cut off at 2^-25 of the largest (test/cuda/test_cuda_hopper.cu, which tests all of this on the device).
 *
 *   wgmma<TRANS_A, TRANS_B>(d, a, b, keep, T())      a, b: matrices in shared memory, by descriptor
 *   wgmma_rows<TRANS_B>(d, a, b, keep, T())          a in registers
 *   wgmma_e4m3(d, a, b, keep)                        8-bit codes, 32 of the depth, which lies along rows of both: 8
 *                                                    bits have no other form. Of 32 products and d some 14 bits are
 *                                                    kept
 *
 * d[r] of thread t: row 16 (t / 32) + 8 (r / 2 % 2) + t % 32 / 4, column 8 (r / 4) + 2 (t % 4) + r % 2. Register j of
 * a: row 16 (t / 32) + t % 32 / 4 + 8 (j % 2), depth 2 (t % 4) + 8 (j / 2) and the next: d of 8 columns pairs, rounded.
 *
 * Descriptor of a tile that TMA wrote in the same swizzle; S bytes a row of the swizzle, tile at a multiple of 8 S:
 *   depth along rows (TRANS false)  rows of S bytes; stride 8 S from 8 rows to the next 8; lead unused. 16 of the depth
 *                                   (32 codes) further: + 32 bytes, + 2 in the descriptor
 *   depth down (TRANS true)         rows of S bytes are S / 2 numbers of one depth; lead from S / 2 rows (columns) of
 *                                   the operand to the next; stride 8 S from 8 of the depth to the next 8. 16 of the
 *                                   depth further: + 16 S bytes
 * Source: PTX ISA 8.0 and newer, sections on wgmma, mbarrier, cp.async.bulk.tensor; CUTLASS's mma_sm90_desc.hpp.
 */
#ifndef MEGATRAIN_CUDA_HOPPER_CUH
#define MEGATRAIN_CUDA_HOPPER_CUH

#include "kernel.cuh"
#include "tensor_map.h"

enum Swizzle : int { SWIZZLE_NONE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2, SWIZZLE_32 = 3 }; /* as descriptors have it */

#ifdef __CUDACC__

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER 0
#define HOPPER_ASM(...)
#endif

typedef uint64_t Barrier;

/* A parameter that copies read from: the map itself, not its address, passes to the kernel. (clang, by which CI
 * compiles against older headers, knows no such attribute.) */
#ifdef __clang__
#define TENSOR_MAP(name) const TensorMap name
#else
#define TENSOR_MAP(name) const __grid_constant__ TensorMap name
#endif

__device__ __forceinline__ void barrier_init(Barrier *b, int arrivals)
{
    HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(b)), "r"(arrivals));
}

__device__ __forceinline__ void barriers_ready()
{
    HOPPER_ASM("fence.mbarrier_init.release.cluster;\n");
    HOPPER_ASM("fence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(Barrier *b, int bytes)
{
    HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier *b)
{
    HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(b)) : "memory");
}

__device__ __forceinline__ void barrier_wait(Barrier *b, int parity)
{
    uint32_t over = 1;
    do {
        HOPPER_ASM("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
                   : "=r"(over)
                   : "r"(shared_address(b)), "r"(parity)
                   : "memory");
    } while (!over);
}

#define TMA_LOAD(dims, at)                                                                                            \
    "cp.async.bulk.tensor." dims ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" at "}], [%2];\n"

__device__ __forceinline__ void tma_load_2d(void *to, const TensorMap &map, Barrier *b, int x, int y)
{
    HOPPER_ASM(TMA_LOAD("2d", "%3, %4")::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)), "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void tma_load_3d(void *to, const TensorMap &map, Barrier *b, int x, int y, int z)
{
    HOPPER_ASM(TMA_LOAD("3d", "%3, %4, %5")::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void tma_load_4d(void *to, const TensorMap &map, Barrier *b, int x, int y, int z, int w)
{
    HOPPER_ASM(TMA_LOAD("4d", "%3, %4, %5, %6")::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)), "r"(x),
               "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ void tma_load_5d(void *to, const TensorMap &map, Barrier *b, int x, int y, int z, int w,
                                            int v)
{
    HOPPER_ASM(TMA_LOAD("5d", "%3, %4, %5, %6, %7")::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)),
               "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
               : "memory");
}
#undef TMA_LOAD

/* These bytes of global memory, multiples of 16 at a multiple of 16, are brought to L2; nothing waits for it. */
__device__ __forceinline__ void prefetch_l2_bytes(const void *p, int bytes)
{
    HOPPER_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(p), "r"(bytes) : "memory");
}

__device__ __forceinline__ void proxy_fence() { HOPPER_ASM("fence.proxy.async.shared::cta;\n" ::: "memory"); }

template <int N> __device__ __forceinline__ void registers_give()
{
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}

template <int N> __device__ __forceinline__ void registers_take()
{
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}

__device__ __forceinline__ void named_sync(int id, int threads)
{
    HOPPER_ASM("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads)
{
    HOPPER_ASM("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/* ---- products ---- */

/* Forces the numbers of d that the compiler keeps in registers to stand there from now on. */
template <int R> __device__ __forceinline__ void in_registers(float (&d)[R])
{
    UNROLL
    for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int R> __device__ __forceinline__ void wgmma_begin(float (&d)[R])
{
    in_registers(d);
    HOPPER_ASM("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() { HOPPER_ASM("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wgmma_wait()
{
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

template <int R> __device__ __forceinline__ void wgmma_end(float (&d)[R]) { in_registers(d); }

/* Operands of an instruction, as text and as a list: decades of the text, eights of the list. */
#define DECADE(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define TEXT_16 DECADE() ", %10, %11, %12, %13, %14, %15"
#define TEXT_32 DECADE() ", " DECADE(1) ", " DECADE(2) ", %30, %31"
#define TEXT_48 DECADE() ", " DECADE(1) ", " DECADE(2) ", " DECADE(3) ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT_60 DECADE() ", " DECADE(1) ", " DECADE(2) ", " DECADE(3) ", " DECADE(4) ", " DECADE(5)
#define TEXT_64 TEXT_60 ", %60, %61, %62, %63"
#define TEXT_90 TEXT_60 ", " DECADE(6) ", " DECADE(7) ", " DECADE(8)
#define TEXT_96 TEXT_90 ", %90, %91, %92, %93, %94, %95"
#define TEXT_128                                                                                    \
    TEXT_90 ", " DECADE(9) ", " DECADE(10) ", " DECADE(11) ", %120, %121, %122, %123, %124, %125, " \
                                                           "%126, %127"
#define LIST_8(i)                                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define LIST_16(i) LIST_8(i), LIST_8(i + 8)
#define LIST_32(i) LIST_16(i), LIST_16(i + 16)
#define LIST_48(i) LIST_32(i), LIST_16(i + 32)
#define LIST_64(i) LIST_32(i), LIST_32(i + 32)
#define LIST_96(i) LIST_64(i), LIST_32(i + 64)
#define LIST_128(i) LIST_64(i), LIST_64(i + 64)

/* n columns, r registers of d; p0 .. p6: the numbers of the operands behind them. */
#define WGMMA_OF(n, r, p0, p1, p2, p3, p4, p5, p6, type, text)                                                        \
    template <bool TRANS_A, bool TRANS_B>                                                                             \
    __device__ __forceinline__ void wgmma(float (&d)[r], uint64_t a, uint64_t b, bool keep, type)                     \
    {                                                                                                                 \
        HOPPER_ASM("{ .reg .pred p; setp.ne.b32 p, %" #p2 ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text \
                   "." text " {" TEXT_##r "}, %" #p0 ", %" #p1 ", p, 1, 1, %" #p3 ", %" #p4 "; }\n"                   \
                   : LIST_##r(0)                                                                                      \
                   : "l"(a), "l"(b), "r"(static_cast<int>(keep)), "n"(TRANS_A), "n"(TRANS_B));                        \
    }                                                                                                                 \
    template <bool TRANS_B>                                                                                           \
    __device__ __forceinline__ void wgmma_rows(float (&d)[r], const uint32_t (&a)[4], uint64_t b, bool keep, type)    \
    {                                                                                                                 \
        HOPPER_ASM("{ .reg .pred p; setp.ne.b32 p, %" #p5 ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text \
                   "." text " {" TEXT_##r "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1, %" #p6     \
                   "; }\n"                                                                                            \
                   : LIST_##r(0)                                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(keep)), "n"(TRANS_B));  \
    }
#define WGMMA_BOTH(...)                                 \
    WGMMA_OF(__VA_ARGS__, __nv_bfloat16, "bf16")        \
    WGMMA_OF(__VA_ARGS__, __half, "f16")
WGMMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133, 134)

__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool keep)
{
    HOPPER_ASM("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" TEXT_64
               "}, %64, %65, p, 1, 1; }\n"
               : LIST_64(0)
               : "l"(a), "l"(b), "r"(static_cast<int>(keep)));
}

#else
#include "emu_hopper.h"
static inline void prefetch_l2_bytes(const void *, int) {}
#endif

/* lead, stride in bytes. */
__device__ __forceinline__ uint64_t shared_matrix(const void *tile, int lead, int stride, Swizzle mode)
{
    return static_cast<uint64_t>((shared_address(tile) & 0x3FFFF) >> 4) | static_cast<uint64_t>(lead >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(mode) << 62;
}

/* A counter of the items that the blocks of a kernel take one after another, cleared: at the workspace's start. */
template <class N> static Err items_taken(Stream *s, N **out)
{
    *out = reinterpret_cast<N *>(s->dev->workspace);
    if (cudaMemsetAsync(*out, 0, sizeof **out, cuda_stream(s)) == cudaSuccess) return ERR_OK;
    return err_set(ERR_DEVICE, "cannot clear the counter of a kernel's items");
}

/* Is what runs of this kernel code for sm_90a? It is empty where the program was built for other GPUs alone. */
template <class... P> static bool hopper_code(void (*kernel)(P...))
{
    cudaFuncAttributes f;
    if (cudaFuncGetAttributes(&f, reinterpret_cast<const void *>(kernel)) != cudaSuccess)
        return cudaGetLastError(), false; /* of this question, not of the op */
    return f.binaryVersion == 90 && f.ptxVersion == 90;
}

#endif
