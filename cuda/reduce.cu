/*
 * Bias gradients: dbias[o] += sum over rows n of dy[n, o].
 *
 * Mapping   two stages, because one thread block per column could not fill the device. Stage 1: a block of 8
 *           warps sums 32 packs of columns over at least 128 rows, warp w the rows w, w + 8, ..., a lane a pack;
 *           the warps' sums, in order, go to the workspace. Stage 2: 32 columns a block, warp w adds the stage-1
 *           sums w, w + 8, ..., the warps' sums are added in order, and the result to dbias. The cut depends on
 *           the shape alone, so results repeat bit for bit.
 * Traffic   stage 1 reads dy once, 2 N O bytes with bf16; its sums are at most 2 * 4 / 128 of 2 N O bytes
 *           more. N = 65,536, O = 768: 0.10 GB, 24 us at 4.3 TB/s, and stage 2 some 5 us of latency. One FLOP an
 *           element: bound by memory.
 * Needs     16-byte aligned rows for full speed, else element by element; an F32 accumulator; workspace for
 *           4 O bytes for every 128 rows, at most 256 times (fewer, longer runs of rows where it is short).
 */
#include "kernel.cuh"

constexpr int REDUCE_WARPS = 8, REDUCE_THREADS = REDUCE_WARPS * WARP, REDUCE_UNROLL = 4;
constexpr int64_t RUN_ROWS_LEAST = 128, RUNS_MOST = 256;

struct ColumnRuns {
    float *sum; /* [runs, O] */
    RowCount rows;
    int64_t O, runs, run_rows;
    bool fresh; /* dbias holds nothing yet */
};

template <class T, bool WIDE>
__global__ void __launch_bounds__(REDUCE_THREADS) bias_grad_runs_kernel(Rows<const T> dy, ColumnRuns c)
{
    constexpr int COUNT = Pack<T>::COUNT, COLUMNS = WARP * COUNT;
    SHARED(float, part, [REDUCE_WARPS][COLUMNS]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t first = blockIdx.x * static_cast<int64_t>(COLUMNS), column = first + lane * COUNT;
    const int64_t left = c.O - column, rows = rows_in_use(c.rows), begin = blockIdx.y * c.run_rows;
    const int64_t end = begin + c.run_rows < rows ? begin + c.run_rows : rows;
    float sum[COUNT] = {};
    for (int64_t n = begin + warp; n < end && left > 0; n += REDUCE_UNROLL * REDUCE_WARPS) {
        Pack<T> p[REDUCE_UNROLL];
        for (int u = 0; u < REDUCE_UNROLL; u++)
            if (n + u * REDUCE_WARPS < end) p[u] = load_pack<T, WIDE>(dy.at(n + u * REDUCE_WARPS) + column, left);
        for (int u = 0; u < REDUCE_UNROLL; u++)
            for (int k = 0; k < COUNT; k++)
                if (n + u * REDUCE_WARPS < end) sum[k] += to_float(p[u].v[k]);
    }
    for (int k = 0; k < COUNT; k++) part[warp][lane * COUNT + k] = sum[k];
    __syncthreads();
    const int mine = threadIdx.x;
    if (mine >= COLUMNS || first + mine >= c.O) return;
    float total = 0;
    for (int w = 0; w < REDUCE_WARPS; w++) total += part[w][mine];
    c.sum[blockIdx.y * c.O + first + mine] = total;
}

__global__ void __launch_bounds__(REDUCE_THREADS) bias_grad_sum_kernel(float *dbias, ColumnRuns c)
{
    SHARED(float, part, [REDUCE_WARPS][WARP]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t column = blockIdx.x * static_cast<int64_t>(WARP) + lane;
    float sum = 0;
#pragma unroll 8
    for (int64_t r = warp; r < c.runs; r += REDUCE_WARPS)
        if (column < c.O) sum += c.sum[r * c.O + column];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= c.O) return;
    float total = 0;
    for (int w = 0; w < REDUCE_WARPS; w++) total += part[w][lane];
    dbias[column] = c.fresh ? total : dbias[column] + total;
}

template <class T> static void launch_runs(Stream *s, Tensor dy, const ColumnRuns &c)
{
    const dim3 grid(grid_blocks(ceil_div(c.O, WARP * Pack<T>::COUNT)), grid_blocks(c.runs));
    const Rows<const T> rows = rows_of<const T>(dy);
    if (rows_aligned(dy)) LAUNCH((bias_grad_runs_kernel<T, true>), grid, REDUCE_THREADS, 0, cuda_stream(s), rows, c);
    else LAUNCH((bias_grad_runs_kernel<T, false>), grid, REDUCE_THREADS, 0, cuda_stream(s), rows, c);
}

extern "C" Err cuda_bias_grad(Stream *s, const bias_grad_args *a)
{
    const int64_t N = a->dy.dim[0], O = a->dy.dim[1], fit = s->dev->workspace_bytes / (O * 4);
    if (a->dbias.dtype != F32) return err_set(ERR_SHAPE, "bias_grad: dbias is %s", dtype_name(a->dbias.dtype));
    if (fit < 1) return err_set(ERR_SHAPE, "bias_grad: %lld columns are too many", static_cast<long long>(O));
    const int64_t most = fit < RUNS_MOST ? fit : RUNS_MOST, even = ceil_div(N, most);
    const int64_t run_rows = even > RUN_ROWS_LEAST ? even : RUN_ROWS_LEAST;
    const ColumnRuns c = { reinterpret_cast<float *>(s->dev->workspace), row_count(a->dy, a->dy), O,
                           ceil_div(N, run_rows), run_rows, a->fresh != 0 };
    DISPATCH(a->dy.dtype, launch_runs<T>(s, a->dy, c));
    LAUNCH(bias_grad_sum_kernel, grid_blocks(ceil_div(O, WARP)), REDUCE_THREADS, 0, cuda_stream(s),
           data_of<float>(a->dbias), c);
    return ERR_OK;
}
