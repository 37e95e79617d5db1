/*
 * LayerNorm and RMSNorm (mean left out).
 *
 *   fwd   xhat = (x - mean) * rstd,  y = xhat * w + b
 *   bwd   g = dy * w,  dx += rstd * (g - mean(g) - xhat * mean(g * xhat))       RMSNorm: without mean(g)
 *   grad  dw += sum_n dy * xhat,  db += sum_n dy
 *
 * Mapping   fwd, bwd: 8 lanes, a warp or a block to a row, by its width; the row is read once and stays in
 *           registers (RowPart), as packs of 16 bytes. Rows that are not aligned, or wider than 16,384, are
 *           read again for each pass, element by element.
 *           grad: a block sums a slice of rows for 32 packs of columns; a second kernel adds the slices. The
 *           slices depend on the shape alone, all sums run in a fixed order.
 * Traffic   bytes per element with bf16, and the time for 65,536 x 768 at 4.3 TB/s:
 *             fwd   read x, write y                   4     47 us
 *             bwd   read x, dy, dx, write dx          8     94 us     (adding to the residual's gradient is
 *                                                                      thus part of it)
 *             grad  read x, dy                        4     47 us     (slices: 3%)
 *           8, 12 and 4 FLOP an element: bound by memory. w and b come from L1.
 * Needs     any D; 16-byte aligned rows for full speed; workspace: 2 floats a column and slice, at most 4 MiB
 *           below 262,144 columns.
 * Source    Ba et al. 2016 (LayerNorm), Zhang & Sennrich 2019 (RMSNorm).
 */
#include "kernel.cuh"

constexpr int NORM_THREADS = 256;   /* of a block whose rows belong to lanes or warps */
constexpr int NORM_BLOCK_MAX = 512; /* of a block that shares a row, and then */
constexpr int NORM_KEPT = 32;       /* elements of the row that each of them holds */

/* ---- a row among threads ---- */

/*
 * LANES threads of a warp (8 or 32), or the whole block (0), share a row; pack k of a thread begins at column
 * at(k). PACKS of them are kept in registers; 0: any number, read again each time.
 */
template <class T, int LANES, int PACKS> struct RowPart {
    static constexpr int COUNT = Pack<T>::COUNT;
    const T *row;
    int width; /* 0: nothing to do, but the thread still takes part in sums */
    Pack<T> kept[PACKS > 0 ? PACKS : 1];

    static __device__ __forceinline__ int lanes() { return LANES > 0 ? LANES : blockDim.x; }
    static __device__ __forceinline__ int at(int k) { return (k * lanes() + threadIdx.x % lanes()) * COUNT; }
    __device__ __forceinline__ int packs() const
    {
        return PACKS > 0 ? PACKS : (width + lanes() * COUNT - 1) / (lanes() * COUNT);
    }
    __device__ __forceinline__ void load(const T *from, int columns)
    {
        row = from;
        width = columns;
        if constexpr (PACKS > 0) {
#pragma unroll
            for (int k = 0; k < PACKS; k++)
                if (at(k) < width) kept[k] = load16(row + at(k));
        }
    }
    /* Pack k; at(k) < width. */
    __device__ __forceinline__ Pack<T> get(int k) const
    {
        if constexpr (PACKS > 0) return kept[k];
        else return load_pack<T, false>(row + at(k), width - at(k));
    }
    __device__ __forceinline__ Pack<T> read(const T *other, int k) const
    {
        return load_pack<T, (PACKS > 0)>(other + at(k), width - at(k));
    }
    __device__ __forceinline__ void write(T *other, int k, const Pack<T> &x) const
    {
        store_pack<T, (PACKS > 0)>(other + at(k), x, width - at(k));
    }
    /* The elements of pack k inside the row. */
    __device__ __forceinline__ int valid(int k) const
    {
        const int left = width - at(k);
        return PACKS > 0 || left > COUNT ? COUNT : left;
    }
    static __device__ __forceinline__ int64_t index() /* of this thread's row */
    {
        return blockIdx.x * static_cast<int64_t>(blockDim.x / lanes()) + threadIdx.x / lanes();
    }
    static __device__ __forceinline__ bool first() { return threadIdx.x % lanes() == 0; }

    /* Over the threads of a row; all get it. `part` as for block_sum(). */
    static __device__ __forceinline__ float sum(float x, float *part)
    {
        if constexpr (LANES == 0) {
            return block_sum(x, part);
        } else {
            for (int d = LANES / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
            return x;
        }
    }
};

/* ---- forward ---- */

struct NormStats {
    float *mean, *rstd; /* mean NULL: RMSNorm */
};

template <class T, int LANES, int PACKS>
__global__ void __launch_bounds__(LANES > 0 ? NORM_THREADS : NORM_BLOCK_MAX)
    norm_fwd_kernel(Rows<T> y, NormStats stats, Rows<const T> x, const T *w, const T *b, RowCount count,
                    int D, float eps)
{
    typedef RowPart<T, LANES, PACKS> Part;
    SHARED(float, part, [WARP]);
    const int64_t n = Part::index();
    const bool used = n < rows_in_use(count);
    Part p;
    p.load(x.at(n), used ? D : 0);
    float mean = 0, squares = 0;
    if (stats.mean) {
        float sum = 0;
        for (int k = 0; k < p.packs(); k++) {
            if (p.at(k) >= p.width) continue;
            const Pack<T> v = p.get(k);
            for (int i = 0; i < Part::COUNT; i++) sum += to_float(v.v[i]); /* zeros beyond the row */
        }
        mean = Part::sum(sum, part) / D;
    }
    for (int k = 0; k < p.packs(); k++) {
        if (p.at(k) >= p.width) continue;
        const Pack<T> v = p.get(k);
        for (int i = 0; i < p.valid(k); i++) {
            const float d = to_float(v.v[i]) - mean;
            squares = fmaf(d, d, squares);
        }
    }
    const float rstd = 1.0f / sqrtf(Part::sum(squares, part) / D + eps);
    if (used && Part::first()) {
        if (stats.mean) stats.mean[n] = mean;
        stats.rstd[n] = rstd;
    }
    for (int k = 0; k < p.packs(); k++) {
        if (p.at(k) >= p.width) continue;
        Pack<T> v = p.get(k), shift;
        const Pack<T> scale = p.read(w, k);
        if (b) shift = p.read(b, k);
        for (int i = 0; i < Part::COUNT; i++) {
            const float h = (to_float(v.v[i]) - mean) * rstd;
            v.v[i] = from_float<T>(b ? fmaf(h, to_float(scale.v[i]), to_float(shift.v[i]))
                                     : h * to_float(scale.v[i]));
        }
        p.write(y.at(n), k, v);
    }
}

/* ---- which kernel for which width ---- */

/* Launches L::run<LANES, PACKS>(grid, block). packs: of a row; 0 when rows are not aligned. */
template <class T, class L> static void norm_choose(const L &launch, int64_t rows, int64_t packs)
{
    constexpr int kept = NORM_KEPT / Pack<T>::COUNT;
    const int64_t warp_rows = NORM_THREADS / WARP, lane_rows = NORM_THREADS / 8;
    if (rows <= 0) return;
    if (packs <= 0 || packs > kept * NORM_BLOCK_MAX) launch.template run<0, 0>(rows, NORM_THREADS);
    else if (packs <= 2 * 8) launch.template run<8, 2>(ceil_div(rows, lane_rows), NORM_THREADS);
    else if (packs <= 2 * WARP) launch.template run<WARP, 2>(ceil_div(rows, warp_rows), NORM_THREADS);
    else if (packs <= 4 * WARP) launch.template run<WARP, 4>(ceil_div(rows, warp_rows), NORM_THREADS);
    else launch.template run<0, kept>(rows, ceil_div(packs, kept * WARP) * WARP);
}

template <class T> struct NormFwd {
    cudaStream_t stream;
    const norm_fwd_args *a;
    template <int LANES, int PACKS> void run(int64_t blocks, int64_t threads) const
    {
        const NormStats stats = { data_of<float>(a->mean), data_of<float>(a->rstd) };
        LAUNCH((norm_fwd_kernel<T, LANES, PACKS>), static_cast<unsigned>(blocks),
               static_cast<unsigned>(threads), 0, stream, rows_of<T>(a->y), stats, rows_of<const T>(a->x),
               data_of<const T>(a->w), data_of<const T>(a->b), row_count(a->y, a->x),
               static_cast<int>(a->x.dim[1]), a->eps);
    }
};

template <class T> static void launch_norm_fwd(Stream *s, const norm_fwd_args *a)
{
    const NormFwd<T> launch = { cuda_stream(s), a };
    const bool wide =
        rows_aligned(a->y) && rows_aligned(a->x) && rows_aligned(a->w) && (!a->b.data || rows_aligned(a->b));
    norm_choose<T>(launch, a->x.dim[0], wide ? a->x.dim[1] / Pack<T>::COUNT : 0);
}

extern "C" Err cuda_norm_fwd(Stream *s, const norm_fwd_args *a)
{
    DISPATCH(a->x.dtype, launch_norm_fwd<T>(s, a));
    return ERR_OK;
}

/* ---- backward ---- */

template <class T, int LANES, int PACKS>
__global__ void __launch_bounds__(LANES > 0 ? NORM_THREADS : NORM_BLOCK_MAX)
    norm_bwd_kernel(Rows<T> dx, Rows<const T> dy, Rows<const T> x, const T *w, NormStats stats,
                    RowCount count, int D)
{
    typedef RowPart<T, LANES, PACKS> Part;
    SHARED(float, part, [WARP]);
    const int64_t n = Part::index();
    const bool used = n < rows_in_use(count);
    Part px, pd;
    px.load(x.at(n), used ? D : 0);
    pd.load(dy.at(n), used ? D : 0);
    const float rstd = used ? stats.rstd[n] : 0, mean = used && stats.mean ? stats.mean[n] : 0;
    float sum_g = 0, sum_gh = 0;
    for (int k = 0; k < px.packs(); k++) {
        if (px.at(k) >= px.width) continue;
        const Pack<T> vx = px.get(k), vd = pd.get(k), scale = px.read(w, k);
        for (int i = 0; i < Part::COUNT; i++) { /* beyond the row g is 0 */
            const float g = to_float(vd.v[i]) * to_float(scale.v[i]), h = (to_float(vx.v[i]) - mean) * rstd;
            sum_g += g;
            sum_gh = fmaf(g, h, sum_gh);
        }
    }
    const float mean_g = stats.mean ? Part::sum(sum_g, part) / D : 0, mean_gh = Part::sum(sum_gh, part) / D;
    for (int k = 0; k < px.packs(); k++) {
        if (px.at(k) >= px.width) continue;
        const Pack<T> vx = px.get(k), vd = pd.get(k), scale = px.read(w, k);
        Pack<T> sum = px.read(dx.at(n), k);
        for (int i = 0; i < Part::COUNT; i++) {
            const float g = to_float(vd.v[i]) * to_float(scale.v[i]), h = (to_float(vx.v[i]) - mean) * rstd;
            sum.v[i] = from_float<T>(fmaf(rstd, fmaf(-h, mean_gh, g - mean_g), to_float(sum.v[i])));
        }
        px.write(dx.at(n), k, sum);
    }
}

template <class T> struct NormBwd {
    cudaStream_t stream;
    const norm_bwd_args *a;
    template <int LANES, int PACKS> void run(int64_t blocks, int64_t threads) const
    {
        const NormStats stats = { data_of<float>(a->mean), data_of<float>(a->rstd) };
        LAUNCH((norm_bwd_kernel<T, LANES, PACKS>), static_cast<unsigned>(blocks),
               static_cast<unsigned>(threads), 0, stream, rows_of<T>(a->dx), rows_of<const T>(a->dy),
               rows_of<const T>(a->x), data_of<const T>(a->w), stats, row_count(a->dx, a->dy),
               static_cast<int>(a->x.dim[1]));
    }
};

template <class T> static void launch_norm_bwd(Stream *s, const norm_bwd_args *a)
{
    const NormBwd<T> launch = { cuda_stream(s), a };
    const bool wide = rows_aligned(a->dx) && rows_aligned(a->dy) && rows_aligned(a->x) && rows_aligned(a->w);
    norm_choose<T>(launch, a->x.dim[0], wide ? a->x.dim[1] / Pack<T>::COUNT : 0);
}

extern "C" Err cuda_norm_bwd(Stream *s, const norm_bwd_args *a)
{
    DISPATCH(a->x.dtype, launch_norm_bwd<T>(s, a));
    return ERR_OK;
}

/* ---- gradients of w and b ---- */

constexpr int GRAD_PACKS = 32;   /* of a block's columns, at most */
constexpr int GRAD_BLOCKS = 528; /* that the slices are chosen for: 4 an SM of an H200 */
constexpr int GRAD_ROWS = 32;    /* of a slice, at least */

/*
 * partial[slice][0] = the slice's share of dw, [1] of db. Threads of the block lie blockDim.x packs of columns
 * by blockDim.y rows; these take the slice's rows in turn, and their sums are added in the order of y.
 */
template <class T, bool WIDE>
__global__ void __launch_bounds__(NORM_THREADS)
    norm_grad_kernel(float *partial, Rows<const T> dy, Rows<const T> x, NormStats stats, RowCount count,
                     int D, int64_t slice)
{
    constexpr int COUNT = Pack<T>::COUNT;
    SHARED(float, sums, [NORM_THREADS * COUNT]);
    const int64_t rows = rows_in_use(count), begin = blockIdx.x * slice,
                  end = begin + slice < rows ? begin + slice : rows;
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * COUNT, left = D - column;
    float sum[2][COUNT] = {};
    if (left > 0) {
#pragma unroll 4
        for (int64_t n = begin + threadIdx.y; n < end; n += blockDim.y) {
            const Pack<T> vx = load_pack<T, WIDE>(x.at(n) + column, left),
                          vd = load_pack<T, WIDE>(dy.at(n) + column, left);
            const float rstd = stats.rstd[n], mean = stats.mean ? stats.mean[n] : 0;
            for (int i = 0; i < COUNT; i++) {
                const float d = to_float(vd.v[i]);
                sum[0][i] = fmaf(d, (to_float(vx.v[i]) - mean) * rstd, sum[0][i]);
                sum[1][i] += d;
            }
        }
    }
    const int columns = blockDim.x * COUNT, thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int which = 0; which < 2; which++) {
        for (int i = 0; i < COUNT; i++) sums[thread * COUNT + i] = sum[which][i];
        __syncthreads();
        for (int c = thread; c < columns; c += blockDim.x * blockDim.y) {
            const int64_t at = blockIdx.y * static_cast<int64_t>(columns) + c;
            float total = 0;
            for (unsigned r = 0; r < blockDim.y; r++) total += sums[r * columns + c];
            if (at < D) partial[(blockIdx.x * 2 + which) * static_cast<int64_t>(D) + at] = total;
        }
        __syncthreads();
    }
}

/* to += sum over slices; 32 columns a block, 8 threads a column. blockIdx.y: dw, db. */
__global__ void __launch_bounds__(NORM_THREADS)
    norm_grad_sum_kernel(float *dw, float *db, const float *partial, int slices, int D)
{
    SHARED(float, sums, [NORM_THREADS / WARP][WARP]);
    const int column = blockIdx.x * WARP + threadIdx.x;
    float sum = 0;
    if (column < D)
        for (int s = threadIdx.y; s < slices; s += blockDim.y)
            sum += partial[(s * 2 + blockIdx.y) * static_cast<int64_t>(D) + column];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= D) return;
    float total = 0;
    for (unsigned s = 0; s < blockDim.y; s++) total += sums[s][threadIdx.x];
    float *to = blockIdx.y ? db : dw;
    to[column] += total;
}

template <class T> static Err launch_norm_grad(Stream *s, const norm_grad_args *a)
{
    const int64_t N = a->x.dim[0], D = a->x.dim[1], packs = ceil_div(D, Pack<T>::COUNT);
    int64_t across =
        1; /* a power of two of at most GRAD_PACKS packs, so that narrow rows leave no thread idle */
    while (across < GRAD_PACKS && across < packs) across *= 2;
    const int64_t tiles = ceil_div(packs, across), most = ceil_div(N, GRAD_ROWS);
    const int64_t wanted = ceil_div(GRAD_BLOCKS, tiles), slices = wanted < most ? wanted
                                                                  : most > 0    ? most
                                                                                : 1;
    if (slices * 2 * D * 4 > s->dev->workspace_bytes)
        return err_set(ERR_MEMORY, "norm_grad: %lld columns need more workspace", static_cast<long long>(D));
    float *partial = reinterpret_cast<float *>(s->dev->workspace);
    const NormStats stats = { data_of<float>(a->mean), data_of<float>(a->rstd) };
    const Rows<const T> dy = rows_of<const T>(a->dy), x = rows_of<const T>(a->x);
    const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>(tiles));
    const dim3 block(static_cast<unsigned>(across), static_cast<unsigned>(NORM_THREADS / across));
    const RowCount count = row_count(a->dy, a->x);
    const int width = static_cast<int>(D);
    if (rows_aligned(a->dy) && rows_aligned(a->x))
        LAUNCH((norm_grad_kernel<T, true>), grid, block, 0, cuda_stream(s), partial, dy, x, stats, count,
               width, ceil_div(N, slices));
    else
        LAUNCH((norm_grad_kernel<T, false>), grid, block, 0, cuda_stream(s), partial, dy, x, stats, count,
               width, ceil_div(N, slices));
    LAUNCH(norm_grad_sum_kernel, dim3(static_cast<unsigned>(ceil_div(D, WARP)), a->db.data ? 2 : 1),
           dim3(WARP, NORM_THREADS / WARP), 0, cuda_stream(s), data_of<float>(a->dw), data_of<float>(a->db),
           partial, static_cast<int>(slices), width);
    return ERR_OK;
}

extern "C" Err cuda_norm_grad(Stream *s, const norm_grad_args *a)
{
    if (a->dw.dtype != F32) return err_set(ERR_SHAPE, "norm_grad: gradients are fp32 on CUDA");
    DISPATCH(a->x.dtype, TRY(launch_norm_grad<T>(s, a)));
    return ERR_OK;
}
