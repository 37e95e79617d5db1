/* Kernels for test_emu.cpp; see kernels.h. Ordinary CUDA, compiled by the host's compiler with emu.h. */
#include "common.cuh"

#include "kernels.h"

constexpr unsigned ALL = 0xffffffffu;

/* ---- right ---- */

__global__ void indices_kernel(int *out)
{
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
    out[i] = i;
}

void run_indices(int *out, dim3 grid, dim3 block, cudaStream_t stream)
{
    LAUNCH(indices_kernel, grid, block, 0, stream, out);
}

template <class T, int WARPS> __device__ __forceinline__ T block_sum(T x)
{
    SHARED(T, part, [WARPS]);
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    T sum = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; w++) sum += part[w];
    __syncthreads();
    return sum;
}

template <class T, int WARPS> __global__ void __launch_bounds__(WARPS * 32) block_sum_kernel(T *sums, const T *x, int n)
{
    T sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[static_cast<int64_t>(blockIdx.x) * n + i];
    sum = block_sum<T, WARPS>(sum);
    sum = block_sum<T, WARPS>(threadIdx.x == 0 ? sum : T(0)); /* again: the shared array is free */
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

void run_block_sum(float *sums, const float *x, int n, int blocks, int threads, cudaStream_t stream)
{
    LAUNCH((block_sum_kernel<float, 32>), blocks, threads, 0, stream, sums, x, n);
}

__global__ void ticket_sum_kernel(int64_t *sum, int64_t *part, unsigned *ticket, const int *x, int n)
{
    SHARED(bool, last, [1]);
    int64_t mine = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) mine += x[i];
    mine = block_sum<int64_t, 4>(mine);
    if (threadIdx.x == 0) {
        part[blockIdx.x] = mine;
        __threadfence();
        last[0] = atomicAdd(ticket, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last[0] || threadIdx.x > 0) return;
    int64_t all = 0;
    for (unsigned b = 0; b < gridDim.x; b++) all += part[b];
    *sum = all;
}

void run_ticket_sum(int64_t *sum, int64_t *part, unsigned *ticket, const int *x, int n, int blocks, cudaStream_t stream)
{
    LAUNCH(ticket_sum_kernel, blocks, 128, 0, stream, sum, part, ticket, x, n);
}

__global__ void warp_kernel(uint32_t *out)
{
    const int lane = threadIdx.x;
    uint32_t *o = out + lane * 16;
    o[0] = __shfl_sync(ALL, lane * 3, 5);
    o[1] = __shfl_sync(ALL, lane * 3, 9, 8); /* lane 1 of its group of 8 */
    o[2] = __shfl_up_sync(ALL, lane, 3);
    o[3] = __shfl_down_sync(ALL, lane, 3, 16);
    o[4] = __shfl_xor_sync(ALL, lane, 6);
    o[5] = __ballot_sync(ALL, lane % 3 == 0);
    o[6] = __any_sync(ALL, lane == 7) * 2 + __all_sync(ALL, lane < 31);
    o[7] = __match_any_sync(ALL, lane / 5);
    o[8] = __reduce_add_sync(ALL, lane - 16);
    o[9] = __reduce_min_sync(ALL, lane - 16);
    o[10] = __reduce_max_sync(ALL, static_cast<unsigned>(lane - 16));
    o[11] = __reduce_xor_sync(ALL, 1u << lane);
    o[12] = 0;
    if (lane < 8) o[12] = __shfl_xor_sync(0xffu, lane, 1); /* a part of the warp */
    else o[12] = __shfl_down_sync(0xffffff00u, lane, 1, 8);
    const double d = __shfl_sync(ALL, lane + 0.5, 31 - lane);
    o[13] = static_cast<uint32_t>(2 * d);
    o[14] = __half2float(__shfl_xor_sync(ALL, __float2half(static_cast<float>(lane)), 1));
    __syncwarp();
    o[15] = __popc(ALL >> lane) + __clz(1 << lane);
}

void run_warp(uint32_t *out, cudaStream_t stream) { LAUNCH(warp_kernel, 1, 32, 0, stream, out); }

__global__ void votes_kernel(int *out, int n)
{
    const int p = static_cast<int>(threadIdx.x) < n;
    const int count = __syncthreads_count(p), any = __syncthreads_or(p), all = __syncthreads_and(p);
    if (threadIdx.x == 0) out[0] = count, out[1] = any, out[2] = all;
}

void run_votes(int *out, int n, int threads, cudaStream_t stream)
{
    LAUNCH(votes_kernel, 1, threads, 0, stream, out, n);
}

template <class T> __global__ void mma_kernel(float *d, const T *a, const T *b)
{
    SHARED(T, as, [16][24]); /* rows of 48 bytes */
    SHARED(T, bs, [16][8]);
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) as[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += 32) bs[i / 8][i % 8] = b[i];
    __syncwarp();
    uint32_t fa[4], fb[4];
    float fd[4] = { 0, 0, 0, 0 };
    ldmatrix_x4(fa, &as[lane % 16][lane / 16 * 8]);
    ldmatrix_x4_trans(fb, &bs[lane % 16][0]); /* matrices 2 and 3 repeat 0 and 1 */
    mma_16816(fd, fa, fb, T());
    for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = fd[i];
}

void run_mma(float *d, const uint16_t *a, const uint16_t *b, int type, cudaStream_t stream)
{
    typedef __nv_bfloat16 bf16;
    if (type == 0)
        LAUNCH(mma_kernel<bf16>, 1, 32, 0, stream, d, reinterpret_cast<const bf16 *>(a),
               reinterpret_cast<const bf16 *>(b));
    else
        LAUNCH(mma_kernel<__half>, 1, 32, 0, stream, d, reinterpret_cast<const __half *>(a),
               reinterpret_cast<const __half *>(b));
}

__device__ float function_of(Function f, float x)
{
    switch (f) {
    case FUNCTION_EXP: return expf(x);
    case FUNCTION_FAST_EXP: return __expf(x);
    case FUNCTION_EXP2: return exp2_approx(x);
    case FUNCTION_LOG: return logf(x);
    case FUNCTION_RECIPROCAL: return __fdividef(1.0f, x);
    case FUNCTION_SQUARE_LESS: return x * x - 1.0f;
    default: return __fmul_rn(x, x) - 1.0f;
    }
}

__global__ void function_kernel(Function f, float *y, const float *x)
{
    y[threadIdx.x] = function_of(f, x[threadIdx.x]);
}

void run_function(Function f, float *y, const float *x, int n, cudaStream_t stream)
{
    LAUNCH(function_kernel, 1, n, 0, stream, f, y, x);
}

/* 4 tiles of 16 rows of 8 floats, two buffers */
__global__ void pipeline_kernel(float *to, const float *from, int valid)
{
    DYNAMIC_SHARED(float, buffer);
    const int row = threadIdx.x / 2, part = threadIdx.x % 2 * 4;
    const auto load = [&](int tile) {
        const int r = tile * 16 + row;
        if (tile < 4)
            cp_async_16(buffer + (tile % 2 * 16 + row) * 8 + part, from + (r < valid ? r : 0) * 8 + part, r < valid);
        cp_async_commit();
    };
    load(0);
    for (int tile = 0; tile < 4; tile++) {
        load(tile + 1);
        cp_async_wait<1>();
        __syncthreads();
        const int other = 15 - row; /* what another thread copied */
        for (int i = 0; i < 4; i++)
            to[(tile * 16 + other) * 8 + part + i] = buffer[(tile % 2 * 16 + other) * 8 + part + i];
        __syncthreads();
    }
}

void run_pipeline(float *to, const float *from, int valid, cudaStream_t stream)
{
    LAUNCH(pipeline_kernel, 1, 32, 2 * 16 * 8 * sizeof(float), stream, to, from, valid);
}

__device__ int landed(const float *buffer)
{
    return (buffer[0] == buffer[0]) + (buffer[4] == buffer[4]) + (buffer[8] == buffer[8]);
}

__global__ void waits_kernel(int *out, const float *from)
{
    SHARED(float, buffer, [12]); /* NaN at first */
    for (int i = 0; i < 3; i++) {
        cp_async_16(buffer + 4 * i, from + 4 * i);
        cp_async_commit();
    }
    cp_async_wait<2>();
    out[0] = landed(buffer);
    cp_async_wait<1>();
    out[1] = landed(buffer);
    cp_async_wait<0>();
    out[2] = landed(buffer);
}

void run_waits(int *out, const float *from, cudaStream_t stream) { LAUNCH(waits_kernel, 1, 1, 0, stream, out, from); }

template <int N> __device__ bool shared_is_fresh(int salt)
{
    SHARED(float, numbers, [N]);
    SHARED(int, one, );
    const bool fresh = numbers[N - 1] != numbers[N - 1] && one == -1;
    __syncthreads();
    if (threadIdx.x == 0) numbers[N - 1] = 1, one = salt;
    __syncthreads();
    return fresh && numbers[N - 1] == 1 && one == salt;
}

__global__ void shared_kernel(int *out, int dynamic_floats)
{
    DYNAMIC_SHARED(float, dynamic);
    bool good = reinterpret_cast<uintptr_t>(dynamic) % 1024 == 0;
    for (int i = 0; i < dynamic_floats; i++) good = good && dynamic[i] != dynamic[i];
    good = shared_is_fresh<3>(7) && good; /* two instances: arrays of their own */
    good = shared_is_fresh<5>(8) && good;
    __syncthreads();
    for (int i = threadIdx.x; i < dynamic_floats; i += blockDim.x) dynamic[i] = 0;
    if (threadIdx.x == blockDim.x - 1) out[blockIdx.x] = good;
}

void run_shared(int *out, int blocks, size_t dynamic_bytes, cudaStream_t stream)
{
    LAUNCH(shared_kernel, blocks, 64, dynamic_bytes, stream, out, static_cast<int>(dynamic_bytes / sizeof(float)));
}

void allow_shared(int bytes)
{
    cudaFuncSetAttribute(shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

__global__ void scale_kernel(float *y, float a, float b, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * y[i] + b;
}

void run_scale(float *y, float a, float b, int n, cudaStream_t stream)
{
    LAUNCH(scale_kernel, (n + 63) / 64, 64, 0, stream, y, a, b, n);
}
