/*
 * Loads of experts, and the biases that follow them (device/ops.def; docs/moe.md). What a balance loss adds to the
 * gradient of logits: router.cu.
 *
 *   router_count  load[u][e] += rows of balance unit u that chose expert e
 *   expert_count  load[e] += rows of expert e, by offsets
 *   expert_bias   bias[e] += rate * the sign of (mean load - load[e])
 *
 * Mapping   router_count: a block counts a piece of one unit's choices in shared memory, then adds its counts to the
 *           unit's by atomics on integers, whose order does not show. expert_count: a thread for each expert.
 *           expert_bias: one warp; loads are whole numbers, so their sum is exact in any order.
 * Traffic   router_count reads 4 bytes a choice: 65,536 rows of 8 choices, 2 MB, 1 us at 4.3 TB/s. All three are
 *           bound by the launch.
 * Needs     at most 12,288 experts in router_count; accumulators in fp32.
 */
#include "kernel.cuh"

constexpr int COUNT_THREADS = 256;
constexpr int64_t PIECE_CHOICES = 4096, PIECES_MOST = 64, COUNT_SHARED = 48 << 10;

/* ---- rows of balance units ---- */

struct UnitCount {
    unsigned long long *load;
    int64_t load_ld;
    Rows<const int32_t> index;
    RowCount tokens;
    int64_t first, rows, pieces, piece; /* piece: rows of a block; pieces: blocks of a unit */
    int E, K;
};

__global__ void __launch_bounds__(COUNT_THREADS) router_count_kernel(UnitCount c)
{
    DYNAMIC_SHARED(int, count);
    const int64_t unit = blockIdx.x / c.pieces, before = unit * c.rows - c.first, tokens = rows_in_use(c.tokens);
    const int64_t behind = before + c.rows < tokens ? before + c.rows : tokens;
    const int64_t from = before + blockIdx.x % c.pieces * c.piece, begin = from > 0 ? from : 0;
    const int64_t end = from + c.piece < behind ? from + c.piece : behind;
    for (int e = threadIdx.x; e < c.E; e += blockDim.x) count[e] = 0;
    __syncthreads();
    for (int64_t i = begin * c.K + threadIdx.x; i < end * c.K; i += blockDim.x) {
        const int64_t n = i / c.K;
        atomicAdd(&count[c.index.at(n)[i - n * c.K]], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < c.E; e += blockDim.x)
        if (count[e]) atomicAdd(&c.load[unit * c.load_ld + e], static_cast<unsigned long long>(count[e]));
}

extern "C" Err cuda_router_count(Stream *s, const router_count_args *a)
{
    UnitCount c = {};
    const int64_t units = a->load.dim[0], E = a->load.dim[1], N = a->index.dim[0], K = a->index.dim[1];
    const size_t shared = static_cast<size_t>(E) * sizeof(int);
    ASSERT(a->first + N <= a->rows * units);
    if (E * 4 > COUNT_SHARED)
        return err_set(ERR_SHAPE, "router_count: %lld experts are too many", static_cast<long long>(E));
    c.load = data_of<unsigned long long>(a->load), c.load_ld = a->load.ld;
    c.index = rows_of<const int32_t>(a->index);
    c.tokens = row_count(a->index, a->index);
    c.first = a->first, c.rows = a->rows;
    c.E = static_cast<int>(E), c.K = static_cast<int>(K);
    const int64_t wanted = ceil_div(a->rows * K, PIECE_CHOICES);
    c.piece = ceil_div(a->rows, wanted < PIECES_MOST ? wanted : PIECES_MOST);
    c.pieces = ceil_div(a->rows, c.piece);
    LAUNCH(router_count_kernel, grid_blocks(units * c.pieces), COUNT_THREADS, shared, cuda_stream(s), c);
    return ERR_OK;
}

/* ---- rows of experts ---- */

__global__ void __launch_bounds__(COUNT_THREADS)
expert_count_kernel(float *load, const int64_t *offset, int64_t E, int64_t runs)
{
    const int64_t e = blockIdx.x * static_cast<int64_t>(COUNT_THREADS) + threadIdx.x;
    if (e < E) load[e] += static_cast<float>(offset[(e + 1) * runs] - offset[e * runs]);
}

extern "C" Err cuda_expert_count(Stream *s, const expert_count_args *a)
{
    const int64_t E = a->load.dim[0], runs = (a->offset.dim[0] - 1) / E;
    if (a->load.dtype != F32) return err_set(ERR_SHAPE, "expert_count: load is %s", dtype_name(a->load.dtype));
    LAUNCH(expert_count_kernel, grid_blocks(ceil_div(E, COUNT_THREADS)), COUNT_THREADS, 0, cuda_stream(s),
           data_of<float>(a->load), data_of<const int64_t>(a->offset), E, runs);
    return ERR_OK;
}

/* ---- biases ---- */

__global__ void __launch_bounds__(WARP)
expert_bias_kernel(float *bias, const float *load, int64_t E, const StepValues *step, float rate)
{
    int64_t sum = 0;
    if (step->skip) return;
    for (int64_t e = threadIdx.x; e < E; e += WARP) sum += static_cast<int64_t>(load[e]);
    for (int d = WARP / 2; d > 0; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    for (int64_t e = threadIdx.x; e < E; e += WARP) {
        const int64_t over = static_cast<int64_t>(load[e]) * E - sum;
        if (over) bias[e] += over > 0 ? -rate : rate;
    }
}

extern "C" Err cuda_expert_bias(Stream *s, const expert_bias_args *a)
{
    if (a->load.dtype != F32) return err_set(ERR_SHAPE, "expert_bias: load is %s", dtype_name(a->load.dtype));
    LAUNCH(expert_bias_kernel, 1, WARP, 0, cuda_stream(s), data_of<float>(a->bias), data_of<const float>(a->load),
           a->bias.dim[0], a->step, a->rate);
    return ERR_OK;
}
