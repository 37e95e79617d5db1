/*
 * Wrong kernels for test_emu.cpp; see kernels.h. Each does one thing that a GPU would let pass, or answer with
 * nothing but a wrong number, and that the emulator must name.
 */
#include "common.cuh"

#include "kernels.h"

constexpr unsigned ALL = 0xffffffffu;

__device__ void wrong_warp(int what, int *memory)
{
    const int lane = threadIdx.x % 32;
    int x = lane;
    switch (what) {
    case WRONG_SHUFFLE_EXITED:
        if (lane >= 16) return;
        x = __shfl_xor_sync(ALL, x, 16);
        break;
    case WRONG_SHUFFLE_ABSENT: x = __shfl_down_sync(ALL, x, 16); break; /* the last warp has 16 lanes */
    case WRONG_SHUFFLE_DIVERGENT:
        if (lane < 16) x = __shfl_xor_sync(ALL, x, 1);
        else x = __shfl_xor_sync(ALL, x, 1) + 1;
        break;
    case WRONG_MASK: x = __shfl_sync(0xfu, x, 0); break;
    case WRONG_BARRIER_DIVERGENT:
        if (threadIdx.x < 32) __syncthreads();
        else
            __syncthreads();
        break;
    case WRONG_DEADLOCK:
        if (lane == 0) x = __shfl_sync(ALL, x, 0);
        else __syncthreads();
        break;
    case WRONG_TRAP: __trap();
    }
    memory[lane] = x;
}

__global__ void wrong_warp_kernel(int what, int *memory) { wrong_warp(what, memory); }

__global__ void wrong_shared_kernel(int what, int *memory, int index)
{
    DYNAMIC_SHARED(int, dynamic);
    SHARED(int, numbers, [64]);
    int *p = numbers;
    if (what == WRONG_SHARED_BEHIND) p[index] = 1;
    if (what == WRONG_DYNAMIC_BEHIND) dynamic[index] = 1;
    if (what == WRONG_SHARED_SIZE) {
        SHARED(int, many, [13000]);
        many[index] = 1;
    }
    memory[0] = numbers[0];
}

/* `host` is an address as a number: pointers are checked at the launch already */
__global__ void wrong_address_kernel(int what, int *memory, uintptr_t host, int index)
{
    SHARED(int, buffer, [256]);
    uint32_t r[4] = { 0, 0, 0, 0 };
    for (int i = threadIdx.x; i < 256; i += blockDim.x) buffer[i] = i;
    __syncthreads();
    switch (what) {
    case WRONG_GLOBAL_BEHIND: memory[64] = 1; break;
    case WRONG_GLOBAL_MARGIN: memory[25] = 1; break; /* of an allocation of 100 bytes */
    case WRONG_GLOBAL_FAR: memory[index << 20] = 1; break;
    case WRONG_LDMATRIX_ALIGN: ldmatrix_x4(r, buffer + threadIdx.x * 4 + 2); break;
    case WRONG_LDMATRIX_GLOBAL: ldmatrix_x4(r, memory); break;
    case WRONG_LDG_ALIGN: r[0] = __ldg(reinterpret_cast<const int2 *>(memory + 1)).x; break;
    case WRONG_VECTOR_ALIGN: *reinterpret_cast<int4 *>(memory + 1) = make_int4(1, 2, 3, 4); break;
    case WRONG_COPY_ALIGN: cp_async_16(buffer + 4, memory + 2); break;
    case WRONG_COPY_HOST: cp_async_16(buffer, reinterpret_cast<const void *>(host)); break;
    case WRONG_COPY_UNWAITED:
        cp_async_16(buffer + threadIdx.x * 4, memory);
        cp_async_commit();
        break;
    }
    if (r[0] == 12345) memory[1] = 1;
}

struct Problem {
    int64_t rows;
    const int *values;
};

__global__ void wrong_struct_kernel(int *memory, Problem p) { memory[0] = p.values[p.rows]; }

__global__ void wrong_mma_kernel(float *memory)
{
    const uint32_t a[4] = { 0, 0, 0, 0 }, b[2] = { 0, 0 };
    float d[4] = { 0, 0, 0, 0 };
    mma_16816(d, a, b, __half());
    memory[threadIdx.x] = d[0];
}

__device__ int deep(int n) /* a frame of 4 KiB for each n */
{
    volatile int frame[1024];
    frame[n % 1024] = n;
    return n ? deep(n - 1) + frame[n % 1024] : 0;
}

__global__ void __launch_bounds__(32) wrong_bounds_kernel(int *memory)
{
    memory[threadIdx.x] = 0;
}

__global__ void wrong_stack_kernel(int *memory, int n) { memory[0] = deep(n); }

void run_wrong(enum Wrong what, int *memory, cudaStream_t stream)
{
    alignas(16) static int host[4];
    switch (what) {
    case WRONG_SHUFFLE_ABSENT: LAUNCH(wrong_warp_kernel, 1, 48, 0, stream, what, memory); break;
    case WRONG_SHUFFLE_EXITED:
    case WRONG_SHUFFLE_DIVERGENT:
    case WRONG_MASK:
    case WRONG_BARRIER_DIVERGENT:
    case WRONG_DEADLOCK:
    case WRONG_TRAP: LAUNCH(wrong_warp_kernel, 1, 64, 0, stream, what, memory); break;
    case WRONG_SHARED_BEHIND:
    case WRONG_DYNAMIC_BEHIND:
    case WRONG_SHARED_SIZE: LAUNCH(wrong_shared_kernel, 1, 1, 256, stream, what, memory, 64); break;
    case WRONG_SHARED_SUM: LAUNCH(wrong_shared_kernel, 1, 1, 48 << 10, stream, what, memory, 0); break;
    case WRONG_BOUNDS: LAUNCH(wrong_bounds_kernel, 1, dim3(8, 5), 0, stream, memory); break;
    case WRONG_MMA_PARTIAL: LAUNCH(wrong_mma_kernel, 1, 48, 0, stream, reinterpret_cast<float *>(memory)); break;
    case WRONG_STACK: LAUNCH(wrong_stack_kernel, 1, 1, 0, stream, memory, 1000); break;
    case WRONG_HOST_STRUCT: LAUNCH(wrong_struct_kernel, 1, 1, 0, stream, memory, Problem{ 1, host }); break;
    case WRONG_HOST_POINTER: LAUNCH(wrong_warp_kernel, 1, 1, 0, stream, what, host); break;
    default: LAUNCH(wrong_address_kernel, 1, 32, 0, stream, what, memory, reinterpret_cast<uintptr_t>(host), 1);
    }
}

/* ---- races ---- */

__global__ void race_kernel(int what, int *out, const int *in)
{
    SHARED(int, buffer, [256]);
    const int i = threadIdx.x;
    switch (what) {
    case RACE_NONE:
    case RACE_NO_BARRIER: /* the other end's value */
        buffer[i] = in[i];
        if (what == RACE_NONE) __syncthreads();
        out[i] = buffer[255 - i];
        break;
    case RACE_FROM_NEXT:
    case RACE_FROM_LAST:
        buffer[i] = in[i];
        out[i] = buffer[i + (what == RACE_FROM_NEXT ? i % 32 < 31 : -(i % 32 > 0))];
        break;
    case RACE_NO_WAIT:
        if (i < 64) cp_async_16(buffer + i * 4, in + i * 4);
        cp_async_commit();
        __syncthreads();
        out[i] = buffer[255 - i];
        cp_async_wait<0>();
        break;
    case RACE_EARLY_COPY: /* the barrier before the wait does not help those who read after the copy began */
        buffer[i] = in[i];
        __syncthreads();
        if (i < 64) cp_async_16(buffer + i * 4, in + i * 4 % 16);
        cp_async_commit();
        out[i] = buffer[255 - i];
        __syncthreads();
        cp_async_wait<0>();
        break;
    }
}

__global__ void race_blocks_kernel(int *out, const int *in)
{
    const int i = threadIdx.x;
    out[i] += in[blockIdx.x * 32 + i]; /* the values are right whenever blocks run one after another */
}

void run_race(enum Race what, int *out, const int *in, cudaStream_t stream)
{
    if (what == RACE_BLOCKS) LAUNCH(race_blocks_kernel, 8, 32, 0, stream, out, in);
    else LAUNCH(race_kernel, 1, 256, 0, stream, what, out, in);
}
