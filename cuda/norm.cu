/*
 * LayerNorm and RMSNorm (mean left out).
 *
 *   fwd   xhat = (x - mean) * rstd,  y = xhat * w + b;  x may be a residual sum, made here (residual.cuh)
 *   bwd   g = dy * w,  dx += rstd * (g - mean(g) - xhat * mean(g * xhat))       RMSNorm: without mean(g)
 *         dw += sum_n dy * xhat,  db += sum_n dy,  dsum += sum_n dx (the gradient of a bias in the sum that x is)
 *
 * Mapping   8 lanes, a warp or a block to a row, by its width (RowPart). Rows are taken as packs of 16 bytes, all loads
 *           of a batch of packs before the first is used. They stay in registers where they fit; rows that are not
 *           aligned, or wider than 16,384, go element by element.
 *           bwd, rows of at most 256 packs: a block takes a slice of rows, 8 or 32 at a time, into shared memory, and
 *           reads them there for the rows' sums, for dx, and by columns for dw and db; dsum adds up dx while L1 and L2
 *           have it. A second kernel adds the slices. As many slices as blocks that an H100 runs at once. Wider rows: a
 *           block each, and a kernel of its own for the slices. Slices depend on the shape alone, all sums run in a
 *           fixed order.
 * Traffic   bytes per element with bf16, and the time for 65,536 x 768 at 4.3 TB/s:
 *             fwd   read x, write y                   4     47 us
 *             residual_norm_fwd  read residual, x, write sum, y    8    94 us    (apart 10)
 *             bwd   read x, dy, dx, write dx          8     94 us    (rows of more than 256 packs: 12)
 *             bwd, fresh_dx  read x, dy, write dx     6     70 us
 *           With x, dx, sum and residual in fp32 beside 16 bits: 6, 12, 14 and 10 bytes.
 *           the slices' sums add 2%. Adding to the residual stream's gradient is part of bwd: no pass of its own.
 *           8 and 16 FLOP an element: bound by memory. w and b come from L1.
 * Needs     any D (bwd: below a million); 16-byte aligned rows for full speed. Workspace: 13 MiB.
 * Source    Ba et al. 2016 (LayerNorm), Zhang & Sennrich 2019 (RMSNorm).
 */
#include "residual.cuh"

constexpr int NORM_THREADS = 256;   /* of a block whose rows belong to lanes or warps */
constexpr int NORM_BLOCK_MAX = 512; /* of a block that shares a row, and then */
constexpr int NORM_KEPT = 32;       /* elements of the row that each of them holds */

constexpr int NORM_WIDEST = 1 << 20; /* of norm_bwd: its slices' sums fit the workspace */
constexpr int RESIDENT = 2;          /* blocks of rows by lanes on a multiprocessor, at least: 128 registers a thread */
constexpr int STAGED_MOST = 4;       /* the same of norm_bwd, whose rows lie in shared memory, at most: 64 registers */
constexpr int GRAD_PACKS = 32;       /* of a block's columns in norm_grad_kernel, at most */
constexpr int GRAD_BLOCKS = 528;     /* that slices are chosen for: 4 an SM of an H100 */
constexpr int STAGED_BYTES = 220 << 10; /* of shared memory on one, for as many blocks as find room there at once */
constexpr int GRAD_ROWS = 32;        /* of a slice in norm_grad_kernel, at least */
constexpr int SUM_THREADS = 16;      /* of a column, adding slices */

/* The least power of two that is at least n. */
static inline int64_t power_of_two(int64_t n)
{
    int64_t p = 1;
    while (p < n) p *= 2;
    return p;
}

/* The pack itself, converted to fp32 anew by each of its uses: what a thread keeps is then the pack alone. */
template <class T> __device__ __forceinline__ Pack<T> in_place(Pack<T> p)
{
    int *word = reinterpret_cast<int *>(&p);
    UNROLL
    for (int i = 0; i < 4; i++) word[i] = in_place(word[i]);
    return p;
}

/* ---- a row among threads ---- */

/*
 * LANES threads of a warp (8 or 32), or the whole block (0), share a row of N; pack k of a thread begins at column
 * at(k). PACKS of them are kept in registers; 0: any number, read again each time (from L1, if the row is not
 * long). They are gone through in batches of BATCH, of which all are loaded first. WIDE: rows are aligned; packs in
 * registers always are.
 */
template <class T, int LANES, int PACKS, bool WIDE, class N = T> struct RowPart {
    static constexpr int COUNT = Pack<T>::COUNT, BATCH = PACKS > 0 ? PACKS : WIDE ? 4 : 1;
    const N *row;
    int width; /* 0: nothing to do, but the thread still takes part in sums */
    Pack<T> kept[BATCH]; /* all of the row, or a batch of it */

    static __device__ __forceinline__ int lanes() { return LANES > 0 ? LANES : blockDim.x; }
    static __device__ __forceinline__ int at(int k) { return (k * lanes() + threadIdx.x % lanes()) * COUNT; }
    __device__ __forceinline__ int packs() const
    {
        return PACKS > 0 ? PACKS : (width + lanes() * COUNT - 1) / (lanes() * COUNT);
    }
    __device__ __forceinline__ void load(const N *from, int columns)
    {
        row = from;
        width = columns;
        if constexpr (PACKS > 0) {
#pragma unroll
            for (int k = 0; k < PACKS; k++)
                if (at(k) < width) kept[k] = load_as<T, true>(row + at(k), COUNT);
        }
    }
    /* The row is residual + dropout(x + bias), computed here and stored at `to`, from where it is read again. */
    template <class X>
    __device__ __forceinline__ void add(const Residual<T, X> &r, int64_t n, T *to, int columns)
    {
        row = to;
        width = columns;
        if constexpr (PACKS > 0) {
            constexpr int AT_ONCE = PACKS > 4 && LANES > 0 ? 2 : PACKS; /* more would not fit the registers */
#pragma unroll
            for (int first = 0; first < PACKS; first += AT_ONCE) {
                ResidualPack<T> parts[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    if (at(first + k) < width)
                        parts[k] = residual_load<T, true>(r, n, at(first + k), width - at(first + k));
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if (at(first + k) >= width) continue;
                    kept[first + k] =
                        in_place(residual_add<T, true>(r, parts[k], n, at(first + k), width - at(first + k)));
                    write(to, first + k, kept[first + k]);
                }
            }
        } else {
            for (int k = 0; at(k) < width; k++) {
                const ResidualPack<T> parts = residual_load<T, WIDE>(r, n, at(k), width - at(k));
                write(to, k, residual_add<T, WIDE>(r, parts, n, at(k), width - at(k)));
            }
        }
    }
    /* Pack k; at(k) < width. */
    __device__ __forceinline__ Pack<T> get(int k) const
    {
        if constexpr (PACKS > 0) return got(k);
        else return read(row, k);
    }
    template <class M> __device__ __forceinline__ Pack<T> read(const M *other, int k) const
    {
        return load_as<T, WIDE>(other + at(k), width - at(k));
    }
    /* Then pack first + k is got(k), for k < BATCH; beyond the row zeros, or what it was where all are kept. */
    __device__ __forceinline__ void get_batch(int first)
    {
        if constexpr (PACKS == 0) {
            UNROLL
            for (int k = 0; k < BATCH; k++)
                kept[k] = at(first + k) < width ? read(row, first + k) : Pack<T>();
        }
    }
    __device__ __forceinline__ Pack<T> got(int k) const { return in_place(kept[k]); }
    /* Prefetches a row that is read soon. */
    __device__ __forceinline__ void prefetch(const T *other) const
    {
        UNROLL_BY(BATCH)
        for (int k = 0; k < packs(); k++)
            if (at(k) < width) prefetch_l2(other + at(k));
    }
    template <class M> __device__ __forceinline__ void write(M *other, int k, const Pack<T> &x) const
    {
        store_as<T, WIDE>(other + at(k), x, width - at(k));
    }
    /* The elements of pack k inside the row. */
    __device__ __forceinline__ int valid(int k) const
    {
        const int left = width - at(k);
        return WIDE || left > COUNT ? COUNT : left;
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

/* Launches L::run<LANES, PACKS, WIDE>(). packs: of a row; 0 when rows are not aligned. */
template <class T, class L> static void norm_choose(const L &launch, int64_t packs)
{
    constexpr int kept = NORM_KEPT / Pack<T>::COUNT;
    if (packs <= 0 || packs > kept * NORM_BLOCK_MAX) launch.template run<0, 0, false>(NORM_THREADS);
    else if (packs <= 2 * 8) launch.template run<8, 2, true>(NORM_THREADS);
    else if (packs <= 2 * WARP) launch.template run<WARP, 2, true>(NORM_THREADS);
    else if (packs <= 4 * WARP) launch.template run<WARP, 4, true>(NORM_THREADS);
    else if (packs <= 8 * WARP) launch.template run<WARP, 8, true>(NORM_THREADS);
    else launch.template run<0, kept, true>(ceil_div(packs, kept * WARP) * WARP);
}

static inline unsigned positive(int64_t blocks) { return static_cast<unsigned>(blocks > 0 ? blocks : 1); }

struct NormStats {
    float *mean, *rstd; /* mean NULL: RMSNorm */
};

static inline NormStats norm_stats(Tensor mean, Tensor rstd)
{
    NormStats s = { data_of<float>(mean), data_of<float>(rstd) };
    return s;
}

/* ---- forward ---- */

/* The row is x; with ADD it is `add`, stored in `sum`. T: of the row, N: of all else. */
template <class T, class N, int LANES, int PACKS, bool WIDE, bool ADD>
__global__ void __launch_bounds__(LANES > 0 ? NORM_THREADS : NORM_BLOCK_MAX, LANES > 0 ? RESIDENT : 1)
    norm_fwd_kernel(Rows<N> y, NormStats stats, GroupedRows<const T> x, Residual<T, N> add, Rows<T> sum, const N *w,
                    const N *b, RowCount count, int D, float eps)
{
    typedef RowPart<T, LANES, PACKS, WIDE> Part;
    SHARED(float, part, [WARP]);
    const int lanes = Part::lanes();
    const int64_t n = blockIdx.x * static_cast<int64_t>(blockDim.x / lanes) + threadIdx.x / lanes;
    const bool used = n < rows_in_use(count);
    Part p;
    if constexpr (ADD) p.add(add, n, sum.at(n), used ? D : 0);
    else p.load(x.at(n), used ? D : 0);
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

/* Both ops share a row alike. So the sums, and their bits, do not depend on where the row comes from. */
template <class T, class N, bool ADD> struct NormFwd {
    cudaStream_t stream;
    Rows<N> y;
    Rows<T> sum;
    GroupedRows<const T> x;
    Residual<T, N> add;
    Tensor w, b, mean, rstd;
    RowCount count;
    int64_t D;
    float eps;
    template <int LANES, int PACKS, bool WIDE> void run(int64_t threads) const
    {
        const int64_t blocks = LANES > 0 ? ceil_div(count.capacity, NORM_THREADS / LANES) : count.capacity;
        LAUNCH((norm_fwd_kernel<T, N, LANES, PACKS, WIDE, ADD>), positive(blocks),
               static_cast<unsigned>(threads), 0, stream, y, norm_stats(mean, rstd), x, add, sum,
               data_of<const N>(w), data_of<const N>(b), count, static_cast<int>(D), eps);
    }
    void launch(bool aligned) const
    {
        const bool wide = aligned && rows_aligned(w) && (!b.data || rows_aligned(b));
        norm_choose<T>(*this, wide ? D / Pack<T>::COUNT : 0);
    }
};

template <class T, class N> static void launch_norm_fwd(Stream *s, const norm_fwd_args *a)
{
    NormFwd<T, N, false> n = {};
    n.stream = cuda_stream(s), n.count = row_count(a->y, a->x), n.D = a->x.dim[1], n.eps = a->eps;
    n.y = rows_of<N>(a->y), n.mean = a->mean, n.rstd = a->rstd, n.w = a->w, n.b = a->b;
    n.x = grouped_rows_of<const T>(a->x);
    n.launch(rows_aligned(a->y) && rows_aligned(a->x));
}

extern "C" Err cuda_norm_fwd(Stream *s, const norm_fwd_args *a)
{
    DISPATCH_STREAM(a->x.dtype, a->y.dtype, (launch_norm_fwd<T, N>(s, a)));
    return ERR_OK;
}

template <class T, class N> static void launch_residual_norm_fwd(Stream *s, const residual_norm_fwd_args *a)
{
    NormFwd<T, N, true> n = {};
    n.stream = cuda_stream(s), n.count = row_count(a->y, a->x), n.D = a->x.dim[1], n.eps = a->eps;
    n.y = rows_of<N>(a->y), n.mean = a->mean, n.rstd = a->rstd, n.w = a->w, n.b = a->b;
    n.add = residual_of<T, N>(a), n.sum = rows_of<T>(a->sum);
    n.launch(rows_aligned(a->y) && rows_aligned(a->sum) && residual_aligned(a));
}

extern "C" Err cuda_residual_norm_fwd(Stream *s, const residual_norm_fwd_args *a)
{
    if (a->residual.dtype != a->sum.dtype)
        return err_set(ERR_SHAPE, "residual_norm_fwd on cuda: residual and sum are of one dtype");
    if (a->x.dtype != a->y.dtype) return err_set(ERR_SHAPE, "residual_norm_fwd on cuda: x and y are of one dtype");
    DISPATCH_STREAM(a->sum.dtype, a->x.dtype, (launch_residual_norm_fwd<T, N>(s, a)));
    return ERR_OK;
}

/* ---- dw, db and dsum: sums over the rows of a slice ---- */

constexpr int NORM_SUMS = 3;

/*
 * The block's threads lie `across` packs of columns (a power of two) by NORM_THREADS / across rows, taken in
 * turn; a thread sums its columns, and finish() adds the threads of a column in the order of their rows.
 */
template <class T, bool WIDE> struct GradSums {
    static constexpr int COUNT = Pack<T>::COUNT;
    float sum[NORM_SUMS][COUNT]; /* dw, db, dsum */
    int across, row, column, left;

    __device__ __forceinline__ void start(int packs_across, int first_column, int D)
    {
        across = packs_across;
        row = threadIdx.x / across;
        column = first_column + threadIdx.x % across * COUNT;
        left = D - column;
        for (int i = 0; i < NORM_SUMS * COUNT; i++) sum[i / COUNT][i % COUNT] = 0;
    }
    __device__ __forceinline__ void add_results(GroupedRows<T> dx, int64_t begin, int64_t end)
    {
        if (left <= 0) return;
#pragma unroll 4
        for (int64_t n = begin + row; n < end; n += NORM_THREADS / across) {
            const Pack<T> v = load_pack<T, WIDE>(dx.at(n) + column, left);
            for (int i = 0; i < COUNT; i++) sum[2][i] += to_float(v.v[i]);
        }
    }
    template <class N, class X>
    __device__ __forceinline__ void add(Rows<const N> dy, const X &x, NormStats stats, int64_t begin, int64_t end)
    {
        constexpr int AT_ONCE = sizeof(N) == sizeof(T) ? 4 : WIDE ? 2 : 1; /* (widening takes registers) */
        if (left <= 0) return;
        UNROLL_BY(AT_ONCE)
        for (int64_t n = begin + row; n < end; n += NORM_THREADS / across) {
            const Pack<T> vx = load_pack<T, WIDE>(x.at(n) + column, left);
            const Pack<T> vd = load_as<T, WIDE>(dy.at(n) + column, left);
            const float rstd = stats.rstd[n], mean = stats.mean ? stats.mean[n] : 0;
            for (int i = 0; i < COUNT; i++) {
                const float d = to_float(vd.v[i]);
                sum[0][i] = fmaf(d, (to_float(vx.v[i]) - mean) * rstd, sum[0][i]);
                sum[1][i] += d;
            }
        }
    }
    /* to: the slice's [dw, db, dsum][D], from the block's first column on; `columns` of them are left. */
    __device__ __forceinline__ void finish(float *to, int D, int columns, int wanted)
    {
        SHARED(float, sums, [NORM_THREADS * Pack<T>::COUNT]);
        const int tile = across * COUNT;
        for (int which = 0; which < wanted; which++) {
            for (int i = 0; i < COUNT; i++)
                sums[threadIdx.x * COUNT + i] = which == 0 ? sum[0][i] : which == 1 ? sum[1][i] : sum[2][i];
            __syncthreads();
            for (int c = threadIdx.x; c < tile && c < columns; c += NORM_THREADS) {
                float total = 0;
                for (int r = 0; r < NORM_THREADS / across; r++) total += sums[r * tile + c];
                to[which * static_cast<int64_t>(D) + c] = total;
            }
            __syncthreads();
        }
    }
};

/* Destination of the slices' sums: partial[slice][dw, db, dsum][D]. */
struct NormSlices {
    float *partial; /* NULL: not summed by this kernel */
    int64_t rows;   /* of a slice */
    int count, across;
    int wanted;     /* 2; with dsum 3 */
};

/* blockIdx: slice, tile of columns. */
template <class T, class N, bool WIDE>
__global__ void __launch_bounds__(NORM_THREADS)
    norm_grad_kernel(NormSlices to, GroupedRows<T> dx, Rows<const N> dy, GroupedRows<const T> x, NormStats stats,
                     RowCount count, int D)
{
    const int64_t rows = rows_in_use(count), begin = blockIdx.x * to.rows;
    const int64_t end = begin + to.rows < rows ? begin + to.rows : rows;
    const int first = blockIdx.y * to.across * Pack<T>::COUNT;
    GradSums<T, WIDE> sums;
    sums.start(to.across, first, D);
    sums.add(dy, x, stats, begin, end);
    if (to.wanted > 2) sums.add_results(dx, begin, end);
    sums.finish(to.partial + blockIdx.x * to.wanted * static_cast<int64_t>(D) + first, D, D - first, to.wanted);
}

/* dw, db (may be NULL) and dsum (where there are 3 sums a slice), and whether each holds nothing yet. */
struct NormGrads {
    float *to[NORM_SUMS];
    bool fresh[NORM_SUMS];
};

/* Each += its sums over slices; 32 columns a block, 16 threads a column. blockIdx.y: which. */
__global__ void __launch_bounds__(WARP *SUM_THREADS)
    norm_grad_sum_kernel(NormGrads grads, const float *partial, int slices, int wanted, int D)
{
    SHARED(float, sums, [SUM_THREADS][WARP]);
    float *to = blockIdx.y == 0 ? grads.to[0] : blockIdx.y == 1 ? grads.to[1] : grads.to[2];
    const bool fresh = blockIdx.y == 0 ? grads.fresh[0] : blockIdx.y == 1 ? grads.fresh[1] : grads.fresh[2];
    const int column = blockIdx.x * WARP + threadIdx.x;
    float sum = 0;
    if (column < D) {
#pragma unroll 8
        for (int s = threadIdx.y; s < slices; s += SUM_THREADS)
            sum += partial[(s * wanted + blockIdx.y) * static_cast<int64_t>(D) + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= D || !to) return;
    float total = 0;
    for (int s = 0; s < SUM_THREADS; s++) total += sums[s][threadIdx.x];
    to[column] = fresh ? total : to[column] + total;
}

/* ---- backward: rows by lanes ---- */

/* One row, by LANES threads: dx of it. Each reads of x what it has copied there itself; packs 0: no row. */
template <class T, class N, int LANES>
__device__ __forceinline__ void norm_bwd_row(T *dx, bool fresh, const T *x, const N *d, const N *w, int packs,
                                             float mean, float rstd, bool centred, int D)
{
    typedef Pack<T> P;
    const int lane = threadIdx.x % LANES;
    float sum_g = 0, sum_gh = 0;
    for (int k = lane; k < packs; k += LANES) {
        const P vx = load16(x + k * P::COUNT), vd = load_as<T, true>(d + k * P::COUNT, P::COUNT);
        const P scale = load_as<T, true>(w + k * P::COUNT, P::COUNT);
        for (int i = 0; i < P::COUNT; i++) {
            const float g = to_float(vd.v[i]) * to_float(scale.v[i]);
            sum_g += g;
            sum_gh = fmaf(g, (to_float(vx.v[i]) - mean) * rstd, sum_gh);
        }
    }
    for (int i = LANES / 2; i > 0; i /= 2) {
        sum_g += __shfl_xor_sync(ALL_LANES, sum_g, i);
        sum_gh += __shfl_xor_sync(ALL_LANES, sum_gh, i);
    }
    const float mean_g = centred ? sum_g / D : 0, mean_gh = sum_gh / D;
    for (int k = lane; k < packs; k += LANES) {
        const P vx = load16(x + k * P::COUNT), vd = load_as<T, true>(d + k * P::COUNT, P::COUNT);
        const P scale = load_as<T, true>(w + k * P::COUNT, P::COUNT);
        P sum = fresh ? P() : load16(dx + k * P::COUNT);
        for (int i = 0; i < P::COUNT; i++) {
            const float g = to_float(vd.v[i]) * to_float(scale.v[i]), h = (to_float(vx.v[i]) - mean) * rstd;
            sum.v[i] = from_float<T>(fmaf(rstd, fmaf(-h, mean_gh, g - mean_g), to_float(sum.v[i])));
        }
        store16(dx + k * P::COUNT, sum);
    }
}

/*
 * The rows of a slice in turn, as many at a time as the block has LANES of: x and dy of them are brought to shared
 * memory, from where they are read three times, for the row's sums, for dx, and by columns for dw and db.
 */
template <class T, class N, int LANES>
__global__ void __launch_bounds__(NORM_THREADS, STAGED_MOST)
    norm_bwd_rows_kernel(GroupedRows<T> dx, bool fresh, Rows<const N> dy, GroupedRows<const T> x, const N *w,
                         NormStats stats, NormSlices to, RowCount count, int D)
{
    constexpr int AT_ONCE = NORM_THREADS / LANES, COUNT = Pack<T>::COUNT, D_COUNT = Pack<N>::COUNT;
    DYNAMIC_SHARED(T, staged_x); /* x, then dy: [AT_ONCE][D] each */
    N *staged_d = reinterpret_cast<N *>(staged_x + AT_ONCE * D);
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES, all = D / COUNT;
    T *own_x = staged_x + row * D;
    N *own_d = staged_d + row * D;
    const int64_t rows = rows_in_use(count), begin = blockIdx.x * to.rows;
    const int64_t end = begin + to.rows < rows ? begin + to.rows : rows;
    GradSums<T, true> sums;
    sums.start(to.across, 0, D);
    for (int64_t first = begin; first < end; first += AT_ONCE) { /* the same for all threads of the block */
        const int64_t n = first + row, stop = first + AT_ONCE < end ? first + AT_ONCE : end;
        const int packs = n < end ? all : 0;
        for (int k = lane; k < packs; k += LANES) {
            cp_async_16(own_x + k * COUNT, x.at(n) + k * COUNT);
            if (COUNT == D_COUNT || k < packs * COUNT / D_COUNT)
                cp_async_16(own_d + k * D_COUNT, dy.at(n) + k * D_COUNT);
            if (!fresh) prefetch_l2(dx.at(n) + k * COUNT);
        }
        cp_async_commit();
        const float rstd = packs ? stats.rstd[n] : 0, mean = packs && stats.mean ? stats.mean[n] : 0;
        cp_async_wait<0>();
        if constexpr (COUNT != D_COUNT) __syncwarp(); /* a pack of dy that one has copied two others read */
        norm_bwd_row<T, N, LANES>(dx.at(n), fresh, own_x, own_d, w, packs, mean, rstd, stats.mean != nullptr, D);
        __syncthreads(); /* x and dy of all rows are there, their dx is written */
        sums.add(Rows<const N>{ staged_d - first * D, D }, Rows<const T>{ staged_x - first * D, D }, stats, first,
                 stop);
        if (to.wanted > 2) sums.add_results(dx, first, stop);
        __syncthreads(); /* before the next rows arrive */
    }
    sums.finish(to.partial + blockIdx.x * to.wanted * static_cast<int64_t>(D), D, D, to.wanted);
}

/* ---- backward: a row by a block ---- */

/* use(k, packs k of x, dy and w) for all k of a row, batch by batch. */
template <class T, class N, int PACKS, bool WIDE, class Use>
__device__ __forceinline__ void norm_bwd_packs(RowPart<T, 0, PACKS, WIDE> &px, RowPart<T, 0, PACKS, WIDE, N> &pd,
                                               const N *w, const Use &use)
{
    typedef RowPart<T, 0, PACKS, WIDE> Part;
    for (int first = 0; first < px.packs(); first += Part::BATCH) {
        px.get_batch(first);
        pd.get_batch(first);
        UNROLL
        for (int k = 0; k < Part::BATCH; k++)
            if (px.at(first + k) < px.width) use(first + k, px.got(k), pd.got(k), px.read(w, first + k));
    }
}

/* dx of row blockIdx.x; another kernel sums dw and db. */
template <class T, class N, int PACKS, bool WIDE>
__global__ void __launch_bounds__(NORM_BLOCK_MAX, 1)
    norm_bwd_kernel(GroupedRows<T> dx, bool fresh, Rows<const N> dy, GroupedRows<const T> x, const N *w,
                    NormStats stats, RowCount count, int D)
{
    typedef RowPart<T, 0, PACKS, WIDE> Part;
    typedef Pack<T> P;
    SHARED(float, part, [WARP]);
    const int64_t n = blockIdx.x;
    if (n >= rows_in_use(count)) return;
    Part px;
    RowPart<T, 0, PACKS, WIDE, N> pd;
    px.load(x.at(n), D);
    pd.load(dy.at(n), D);
    if (!fresh) px.prefetch(dx.at(n));
    const float rstd = stats.rstd[n], mean = stats.mean ? stats.mean[n] : 0;
    float sum_g = 0, sum_gh = 0;
    norm_bwd_packs(px, pd, w, [&](int, P vx, P vd, P scale) {
        for (int i = 0; i < Part::COUNT; i++) { /* beyond the row g is 0 */
            const float g = to_float(vd.v[i]) * to_float(scale.v[i]);
            sum_g += g;
            sum_gh = fmaf(g, (to_float(vx.v[i]) - mean) * rstd, sum_gh);
        }
    });
    const float mean_g = stats.mean ? Part::sum(sum_g, part) / D : 0, mean_gh = Part::sum(sum_gh, part) / D;
    norm_bwd_packs(px, pd, w, [&](int k, P vx, P vd, P scale) {
        P sum = fresh ? P() : px.read(dx.at(n), k);
        for (int i = 0; i < Part::COUNT; i++) {
            const float g = to_float(vd.v[i]) * to_float(scale.v[i]), h = (to_float(vx.v[i]) - mean) * rstd;
            sum.v[i] = from_float<T>(fmaf(rstd, fmaf(-h, mean_gh, g - mean_g), to_float(sum.v[i])));
        }
        px.write(dx.at(n), k, sum);
    });
}

/* Slices of at least `least` rows, about `slices` of them: a matter of the shape alone. */
static NormSlices norm_slices(Stream *s, int64_t rows, int64_t least, int64_t slices, int64_t across)
{
    NormSlices to = { reinterpret_cast<float *>(s->dev->workspace), ceil_div(rows, slices), 1,
                      static_cast<int>(across), 2 };
    to.rows = ceil_div(to.rows > 0 ? to.rows : 1, least) * least;
    to.count = static_cast<int>(positive(ceil_div(rows, to.rows)));
    return to;
}

static int norm_sums(const norm_bwd_args *a) { return a->dsum.data ? 3 : 2; }

template <class T, class N>
static void launch_norm_grad(Stream *s, const norm_bwd_args *a, bool wide, NormSlices *to)
{
    const int64_t D = a->x.dim[1], packs = ceil_div(D, Pack<T>::COUNT);
    const int64_t across = packs < GRAD_PACKS ? power_of_two(packs) : GRAD_PACKS,
                  tiles = ceil_div(packs, across);
    *to = norm_slices(s, a->x.dim[0], GRAD_ROWS, ceil_div(GRAD_BLOCKS, tiles), across);
    to->wanted = norm_sums(a);
    const dim3 grid(static_cast<unsigned>(to->count), static_cast<unsigned>(tiles));
    const Rows<const N> dy = rows_of<const N>(a->dy);
    const GroupedRows<T> dx = grouped_rows_of<T>(a->dx);
    const GroupedRows<const T> x = grouped_rows_of<const T>(a->x);
    const NormStats stats = norm_stats(a->mean, a->rstd);
    const RowCount count = row_count(a->dx, a->dy);
    if (wide)
        LAUNCH((norm_grad_kernel<T, N, true>), grid, NORM_THREADS, 0, cuda_stream(s), *to, dx, dy, x, stats, count,
               static_cast<int>(D));
    else
        LAUNCH((norm_grad_kernel<T, N, false>), grid, NORM_THREADS, 0, cuda_stream(s), *to, dx, dy, x, stats, count,
               static_cast<int>(D));
}

/* Slices' sums into dw, db and dsum. */
static void launch_norm_grad_sum(Stream *s, const norm_bwd_args *a, const NormSlices &from)
{
    const NormGrads grads = { { data_of<float>(a->dw), data_of<float>(a->db), data_of<float>(a->dsum) },
                              { a->fresh != 0, a->fresh != 0, a->fresh_sum != 0 } };
    const unsigned which = from.wanted > 2 ? 3 : a->db.data ? 2 : 1;
    const int64_t D = a->x.dim[1];
    LAUNCH(norm_grad_sum_kernel, dim3(static_cast<unsigned>(ceil_div(D, WARP)), which), dim3(WARP, SUM_THREADS), 0,
           cuda_stream(s), grads, from.partial, from.count, from.wanted, static_cast<int>(D));
}

template <class T, class N, int LANES> static Err launch_norm_bwd_rows(Stream *s, const norm_bwd_args *a)
{
    const int64_t D = a->x.dim[1], at_once = NORM_THREADS / LANES, bytes = at_once * D * (sizeof(T) + sizeof(N));
    const int64_t room = STAGED_BYTES / (bytes + NORM_THREADS * Pack<T>::COUNT * 4);
    const int64_t slices = GRAD_BLOCKS / STAGED_MOST * (room < STAGED_MOST ? room : STAGED_MOST);
    NormSlices to = norm_slices(s, a->x.dim[0], at_once, slices, power_of_two(D / Pack<T>::COUNT));
    to.wanted = norm_sums(a);
    TRY(allow_shared((norm_bwd_rows_kernel<T, N, LANES>), static_cast<int>(bytes)));
    LAUNCH((norm_bwd_rows_kernel<T, N, LANES>), static_cast<unsigned>(to.count), NORM_THREADS,
           static_cast<size_t>(bytes), cuda_stream(s), grouped_rows_of<T>(a->dx), a->fresh_dx != 0,
           rows_of<const N>(a->dy), grouped_rows_of<const T>(a->x), data_of<const N>(a->w),
           norm_stats(a->mean, a->rstd), to, row_count(a->dx, a->dy), static_cast<int>(D));
    launch_norm_grad_sum(s, a, to);
    return ERR_OK;
}

/* PACKS of a thread; 0: more than registers hold, read again each time. */
template <class T, class N, int PACKS, bool WIDE>
static void launch_norm_bwd_blocks(Stream *s, const norm_bwd_args *a, int64_t threads)
{
    const int D = static_cast<int>(a->x.dim[1]);
    NormSlices to;
    LAUNCH((norm_bwd_kernel<T, N, PACKS, WIDE>), positive(a->x.dim[0]), static_cast<unsigned>(threads), 0,
           cuda_stream(s), grouped_rows_of<T>(a->dx), a->fresh_dx != 0, rows_of<const N>(a->dy),
           grouped_rows_of<const T>(a->x), data_of<const N>(a->w), norm_stats(a->mean, a->rstd),
           row_count(a->dx, a->dy), D);
    launch_norm_grad<T, N>(s, a, WIDE, &to);
    launch_norm_grad_sum(s, a, to);
}

template <class T, class N> static Err launch_norm_bwd(Stream *s, const norm_bwd_args *a)
{
    constexpr int KEPT = NORM_KEPT / Pack<T>::COUNT;
    const bool wide = rows_aligned(a->dx) && rows_aligned(a->dy) && rows_aligned(a->x) && rows_aligned(a->w);
    const int64_t packs = a->x.dim[1] / Pack<T>::COUNT;
    if (wide && packs > 0 && packs <= 2 * 8) return launch_norm_bwd_rows<T, N, 8>(s, a);
    if (wide && packs > 0 && packs <= 8 * WARP) return launch_norm_bwd_rows<T, N, WARP>(s, a);
    if (!wide || packs == 0 || packs > KEPT * NORM_BLOCK_MAX)
        launch_norm_bwd_blocks<T, N, 0, false>(s, a, NORM_THREADS);
    else /* (two long fp32 rows are too much for registers) */
        launch_norm_bwd_blocks<T, N, sizeof(T) == 4 ? 0 : KEPT, true>(s, a, ceil_div(packs, KEPT * WARP) * WARP);
    return ERR_OK;
}

extern "C" Err cuda_norm_bwd(Stream *s, const norm_bwd_args *a)
{
    if (a->dw.dtype != F32) return err_set(ERR_SHAPE, "norm_bwd: gradients are fp32 on CUDA");
    if (a->x.dim[1] > NORM_WIDEST)
        return err_set(ERR_SHAPE, "norm_bwd: %lld columns", static_cast<long long>(a->x.dim[1]));
    if (a->dx.dtype != a->x.dtype) return err_set(ERR_SHAPE, "norm_bwd on cuda: dx and x are of one dtype");
    DISPATCH_STREAM(a->x.dtype, a->dy.dtype, TRY((launch_norm_bwd<T, N>(s, a))));
    return ERR_OK;
}
