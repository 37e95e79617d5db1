/* Pieces that the ops around recurrences share (delta_around.cu, kda_gates.cu): gates, vectors of parameters, sums over
 * the rows that a block has. */
#ifndef MEGATRAIN_CUDA_DELTA_AROUND_CUH
#define MEGATRAIN_CUDA_DELTA_AROUND_CUH

#include "kernel.cuh"

constexpr int AROUND_THREADS = 256, AROUND_WARPS = AROUND_THREADS / WARP;

__device__ __forceinline__ float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

/* log(1 + exp(x)) */
__device__ __forceinline__ float softplus_of(float x)
{
    return x > 20.0f ? x : fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

/* A number of a vector that has the compute dtype or fp32. */
struct Vector {
    const void *data;
    int64_t ld;
    DType dtype;
    __device__ __forceinline__ float at(int64_t row, int64_t i) const
    {
        const int64_t k = row * ld + i;
        if (dtype == BF16) return to_float(static_cast<const bf16 *>(data)[k]);
        if (dtype == F16) return to_float(static_cast<const f16 *>(data)[k]);
        return static_cast<const float *>(data)[k];
    }
};

static Vector vector_of(Tensor t) { return { t.data, t.ld, t.dtype }; }

/* Sums of COUNT numbers of a column, of all AROUND_WARPS threads that have the column; in the first of them. */
template <int COUNT> __device__ __forceinline__ void sum_of_warps(float *x, float (*part)[WARP])
{
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int i = 0; i < COUNT; i++) {
        part[warp][lane] = x[i];
        __syncthreads();
        float sum = 0;
        for (int w = 0; w < AROUND_WARPS; w++) sum += part[w][lane];
        x[i] = sum;
        __syncthreads();
    }
}

#endif
