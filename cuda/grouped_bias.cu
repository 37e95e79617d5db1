/*
 * Biases of experts: added to the rows of each, and their gradients. Where an expert's rows lie is known to the device
 * alone (device/ops.def).
 *
 * Mapping   grouped_bias: a thread has 2 packs of 16 bytes (PackGrid of kernel.cuh) and finds each row's expert by
 *           halving the experts; the offsets stay in L1. Gradient: a block of 8 warps has 32 packs of columns of one
 *           expert and goes down its rows in ascending order, warp w the rows w, w + 8, ...; the warps' sums are added
 *           in order. The cut depends on the shape alone, so results repeat bit for bit.
 * Traffic   grouped_bias reads and writes y, 4 P O bytes with bf16; the gradient reads dy, 2 P O. P 131,072, O 5760:
 *           3.0 and 1.5 GB, 0.70 and 0.35 ms at 4.3 TB/s. The gradient needs some 100 blocks to come near: E O / 256 of
 *           them.
 * Needs     16-byte aligned rows for full speed, else element by element; an F32 accumulator.
 */
#include "kernel.cuh"

struct ExpertRows {
    const int64_t *offset;
    int64_t runs; /* of an expert */
    int experts;
    __device__ __forceinline__ int64_t start(int e) const { return offset[e * runs]; }

    /* The expert of a row in use: of those that begin at it or before, the last. */
    __device__ __forceinline__ int of(int64_t row) const
    {
        int low = 0, high = experts;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (start(middle) <= row) low = middle;
            else high = middle;
        }
        return low;
    }
};

static Err expert_rows(const char *name, Tensor offset, int64_t experts, ExpertRows *out)
{
    if (experts < 1 || (offset.dim[0] - 1) % experts)
        return err_set(ERR_SHAPE, "%s: %lld offsets for %lld experts", name, static_cast<long long>(offset.dim[0]),
                       static_cast<long long>(experts));
    *out = { data_of<const int64_t>(offset), (offset.dim[0] - 1) / experts, static_cast<int>(experts) };
    return ERR_OK;
}

template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS)
    grouped_bias_kernel(Rows<T> y, Rows<const T> bias, ExpertRows experts, PackGrid g)
{
    const int64_t used = experts.start(experts.experts), all = rows_in_use(g.rows), rows = used < all ? used : all;
    Pack<T> x[PACK_UNROLL], b[PACK_UNROLL];
    UNROLL
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        x[u] = load_pack<T, WIDE>(y.at(p.row) + p.column, p.left);
        b[u] = load_pack<T, WIDE>(bias.at(experts.of(p.row)) + p.column, p.left);
    }
    UNROLL
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        for (int i = 0; i < Pack<T>::COUNT; i++)
            x[u].v[i] = from_float<T>(to_float(x[u].v[i]) + to_float(b[u].v[i]));
        store_pack<T, WIDE>(y.at(p.row) + p.column, x[u], p.left);
    }
}

template <class T> static void launch_bias(Stream *s, const grouped_bias_args *a, const ExpertRows &experts)
{
    const PackGrid g = pack_grid(row_count(a->y, a->y), 1, a->y.dim[1], Pack<T>::COUNT);
    const Rows<T> y = rows_of<T>(a->y);
    const Rows<const T> bias = rows_of<const T>(a->bias);
    if (rows_aligned(a->y) && rows_aligned(a->bias))
        LAUNCH((grouped_bias_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), y, bias, experts, g);
    else LAUNCH((grouped_bias_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), y, bias, experts, g);
}

extern "C" Err cuda_grouped_bias(Stream *s, const grouped_bias_args *a)
{
    ExpertRows experts;
    TRY(expert_rows("grouped_bias", a->offset, a->bias.dim[0], &experts));
    DISPATCH(a->y.dtype, launch_bias<T>(s, a, experts));
    return ERR_OK;
}

constexpr int SUM_WARPS = 8, SUM_THREADS = SUM_WARPS * WARP, SUM_UNROLL = 4;

template <class T, bool WIDE>
__global__ void __launch_bounds__(SUM_THREADS)
    grouped_bias_grad_kernel(Rows<float> dbias, Rows<const T> dy, ExpertRows experts, int64_t O)
{
    constexpr int COUNT = Pack<T>::COUNT, COLUMNS = WARP * COUNT;
    SHARED(float, part, [SUM_WARPS][COLUMNS]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t first = blockIdx.x * static_cast<int64_t>(COLUMNS), column = first + lane * COUNT, left = O - column;
    const int64_t end = experts.start(blockIdx.y + 1);
    float sum[COUNT] = {};
    for (int64_t n = experts.start(blockIdx.y) + warp; n < end && left > 0; n += SUM_UNROLL * SUM_WARPS) {
        Pack<T> p[SUM_UNROLL];
        for (int u = 0; u < SUM_UNROLL; u++)
            if (n + u * SUM_WARPS < end) p[u] = load_pack<T, WIDE>(dy.at(n + u * SUM_WARPS) + column, left);
        for (int u = 0; u < SUM_UNROLL; u++)
            for (int k = 0; k < COUNT; k++)
                if (n + u * SUM_WARPS < end) sum[k] += to_float(p[u].v[k]);
    }
    for (int k = 0; k < COUNT; k++) part[warp][lane * COUNT + k] = sum[k];
    __syncthreads();
    const int mine = threadIdx.x;
    if (mine >= COLUMNS || first + mine >= O) return;
    float total = 0;
    for (int w = 0; w < SUM_WARPS; w++) total += part[w][mine];
    dbias.at(blockIdx.y)[first + mine] += total;
}

template <class T> static void launch_grad(Stream *s, const grouped_bias_grad_args *a, const ExpertRows &experts)
{
    const int64_t O = a->dy.dim[1];
    const dim3 grid(grid_blocks(ceil_div(O, WARP * Pack<T>::COUNT)), grid_blocks(experts.experts));
    const Rows<float> dbias = rows_of<float>(a->dbias);
    const Rows<const T> dy = rows_of<const T>(a->dy);
    if (rows_aligned(a->dy))
        LAUNCH((grouped_bias_grad_kernel<T, true>), grid, SUM_THREADS, 0, cuda_stream(s), dbias, dy, experts, O);
    else LAUNCH((grouped_bias_grad_kernel<T, false>), grid, SUM_THREADS, 0, cuda_stream(s), dbias, dy, experts, O);
}

extern "C" Err cuda_grouped_bias_grad(Stream *s, const grouped_bias_grad_args *a)
{
    ExpertRows experts;
    if (a->dbias.dtype != F32) return err_set(ERR_SHAPE, "grouped_bias_grad on cuda has no fixed point: dbias is f32");
    TRY(expert_rows("grouped_bias_grad", a->offset, a->dbias.dim[0], &experts));
    DISPATCH(a->dy.dtype, launch_grad<T>(s, a, experts));
    return ERR_OK;
}
