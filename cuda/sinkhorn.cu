/*
 * Choices balanced by Sinkhorn's method (device/ops.def, sinkhorn; docs/moe.md).
 *
 * Mapping   a block for each balance unit: it needs all rows of a unit in every round. In one pass over them a warp has
 *           every warps-th row; from the sum over its row, by lanes, follows the row's share, and with that its part of
 *           the experts' sums, in shared memory. The warps' parts are added in their order.
 * Traffic   4 bytes a row and expert, read once a round: a unit of 4,096 rows and 64 experts, 1 MB, lies in L2. One
 *           block draws some 50 GB/s from it: 20 us a round, of which there are 5 to 30.
 * Needs     8 bytes of shared memory an expert, for q and the sums of one warp at least: at most 6,016 experts.
 */
#include "kernel.cuh"

constexpr int SINKHORN_WARPS = 32;
constexpr int64_t SINKHORN_SHARED = 47 << 10; /* and a number a warp */
constexpr float EPS = 1e-8f, CLOSE_ENOUGH = 1e-4f;

struct Sinkhorn {
    Rows<float> rank;
    Rows<const float> logits;
    float *share;
    int64_t rows;
    int E;
};

/* One round over the rows of this block's unit: shares, and the warp's part of the experts' sums. */
__device__ __forceinline__ void add_rows(const Sinkhorn &k, int64_t first, const float *q, float *sum)
{
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    for (int e = lane; e < k.E; e += WARP) sum[e] = 0;
    for (int64_t n = first + threadIdx.x / WARP; n < first + k.rows; n += warps) {
        const float *c = k.rank.at(n);
        float all = 0;
        for (int e = lane; e < k.E; e += WARP) all = fmaf(c[e], q[e], all);
        const float p = 1.0f / (static_cast<float>(k.rows) * (warp_sum(all) + EPS));
        if (lane == 0) k.share[n] = p;
        for (int e = lane; e < k.E; e += WARP) sum[e] = fmaf(c[e], p, sum[e]);
    }
}

__global__ void __launch_bounds__(SINKHORN_WARPS *WARP) sinkhorn_kernel(Sinkhorn k)
{
    DYNAMIC_SHARED(float, q); /* [E], then sums [warps, E] */
    SHARED(float, part, [SINKHORN_WARPS]);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    const int64_t first = blockIdx.x * k.rows;
    float *sum = q + k.E;
    for (int64_t n = first + warp; n < first + k.rows; n += warps)
        for (int e = lane; e < k.E; e += WARP) k.rank.at(n)[e] = expf(k.logits.at(n)[e]);
    for (int e = threadIdx.x; e < k.E; e += blockDim.x) q[e] = 1;
    __syncthreads();
    for (int round = 0; round < SINKHORN_ROUNDS; round++) {
        float change = 0;
        add_rows(k, first, q, sum + warp * k.E);
        __syncthreads();
        for (int e = threadIdx.x; e < k.E; e += blockDim.x) {
            float all = 0;
            for (int w = 0; w < warps; w++) all += sum[w * k.E + e];
            const float now = 1.0f / (static_cast<float>(k.E) * (all + EPS));
            change += fabsf(now - q[e]);
            q[e] = now;
        }
        if (block_sum(change, part) <= CLOSE_ENOUGH * static_cast<float>(k.E)) break;
    }
    for (int64_t n = first + warp; n < first + k.rows; n += warps) {
        const float p = k.share[n];
        for (int e = lane; e < k.E; e += WARP) k.rank.at(n)[e] *= q[e] * p;
    }
}

extern "C" Err cuda_sinkhorn(Stream *s, const sinkhorn_args *a)
{
    const int64_t E = a->rank.dim[1], units = a->rank.dim[0] / a->rows, fit = SINKHORN_SHARED / (E * 4) - 1;
    const Sinkhorn k = { rows_of<float>(a->rank), rows_of<const float>(a->logits), data_of<float>(a->share), a->rows,
                         static_cast<int>(E) };
    const int64_t warps = fit < SINKHORN_WARPS ? fit : SINKHORN_WARPS;
    ASSERT(units * a->rows == a->rank.dim[0]);
    if (warps < 1) return err_set(ERR_SHAPE, "sinkhorn: %lld experts are too many", static_cast<long long>(E));
    LAUNCH(sinkhorn_kernel, grid_blocks(units), static_cast<unsigned>(warps * WARP),
           static_cast<size_t>((warps + 1) * E * 4), cuda_stream(s), k);
    return ERR_OK;
}
