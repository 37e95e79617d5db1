/*
 * Muon on what ranks have of matrices, for float gradients: rectangles on their way to and from the rank that has the
 * whole matrix, and its norm. The matrices' products are cublasLt's, sums of two of them elementwise.cu's, the moment
 * optim.cu's.
 *
 *   muon_pack    y = m, or beta m + (1 - beta) g, at each rectangle's place
 *   muon_apply   w -= lr (decay w + scale x) with x from there; writes w again as the layers read it (copy)
 *   box_copy     a packed rectangle to its place in a matrix, or back
 *   normalize    y = x / max(|x|, eps): sums of squares of rows, their sum, the product
 *
 * Mapping   Rectangles: a table of FlatBox in chunks, 4 blocks a chunk, which they find by halving; a thread steps
 *           over neighbours of a row, which lie side by side in the flat buffers; where the matrix is transposed the
 *           other side is scattered. normalize: a block a row, then one block, then a block a row; sums in double.
 * Traffic   per element: muon_pack reads 8 bytes and writes 4, muon_apply reads w and x and writes w and a copy, 12,
 *           box_copy moves 4 to 8, normalize reads 8 and writes 2: with matrices as large as products take, a few
 *           hundredths of these.
 * Rounding  as the CPU's, operation by operation, but for the order in which squares are summed, which depends on the
 *           shape alone.
 * Needs     F32 accumulators, no alignment.
 */
#include "kernel.cuh"

constexpr int BOX_THREADS = 256, BOX_BLOCKS = 4;

struct BoxList {
    const FlatBox *box;
    int64_t count;
};

static BoxList box_list(Tensor boxes)
{
    const BoxList l = { data_of<const FlatBox>(boxes), boxes.dim[0] };
    return l;
}

static unsigned box_grid(int64_t chunks) { return static_cast<unsigned>(chunks * BOX_BLOCKS); }

/* A block's share of a rectangle: `count` elements, row by row, from (row, column) on. */
struct BoxShare {
    FlatBox box;
    int64_t row;
    uint32_t column, count;
};

__device__ __forceinline__ BoxShare box_share(BoxList l)
{
    const int64_t chunk = blockIdx.x / BOX_BLOCKS;
    int64_t low = 0, high = l.count; /* box[low].chunk <= chunk < box[high].chunk */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (l.box[middle].chunk <= chunk) low = middle;
        else high = middle;
    }
    BoxShare s;
    s.box = l.box[low];
    const int64_t all = static_cast<int64_t>(s.box.rows) * s.box.columns, each = FLAT_CHUNK / BOX_BLOCKS;
    const int64_t begin = (chunk - s.box.chunk) * FLAT_CHUNK + blockIdx.x % BOX_BLOCKS * each, left = all - begin;
    s.row = begin / s.box.columns;
    s.column = static_cast<uint32_t>(begin % s.box.columns);
    s.count = static_cast<uint32_t>(left <= 0 ? 0 : left < each ? left : each);
    return s;
}

/* Place of its i-th element: behind the first in the flat buffers, and in the other buffer. */
struct BoxPlace {
    int64_t flat, other;
};

__device__ __forceinline__ BoxPlace box_place(const BoxShare &s, uint32_t i)
{
    const uint32_t columns = static_cast<uint32_t>(s.box.columns), along = s.column + i;
    const int64_t row = s.row + along / columns, column = along % columns;
    const BoxPlace p = { row * s.box.ld + column, s.box.at + row * s.box.row_step + column * s.box.column_step };
    return p;
}

/* ---- to the owner ---- */

struct MuonPackArgs {
    float *y;
    const float *m, *g;
    const StepValues *step;
    BoxList boxes;
    float beta;
    bool nesterov;
};

__global__ void __launch_bounds__(BOX_THREADS) muon_pack_kernel(MuonPackArgs a)
{
    const BoxShare s = box_share(a.boxes);
    const float scale = a.step->grad_scale, rest = 1.0f - a.beta;
    for (uint32_t i = threadIdx.x; i < s.count; i += BOX_THREADS) {
        const BoxPlace p = box_place(s, i);
        float u = a.m[s.box.shard + p.flat];
        if (a.nesterov) u = fmaf(a.beta, u, rest * (a.g[s.box.grad + p.flat] * scale));
        a.y[p.other] = u;
    }
}

extern "C" Err cuda_muon_pack(Stream *s, const muon_pack_args *a)
{
    if (a->g.dtype != F32) return err_set(ERR_SHAPE, "muon_pack: g is %s", dtype_name(a->g.dtype));
    const MuonPackArgs args = { data_of<float>(a->y), data_of<const float>(a->m), data_of<const float>(a->g), a->step,
                                box_list(a->boxes),   a->beta,                    a->nesterov != 0 };
    LAUNCH(muon_pack_kernel, box_grid(a->chunks), BOX_THREADS, 0, cuda_stream(s), args);
    return ERR_OK;
}

/* ---- from the owner ---- */

/* X, C: dtypes of x and copy; copy: nullptr, or w lies as m does. */
template <class X, class C> struct MuonApplyArgs {
    float *w;
    C *copy;
    const X *x;
    const StepValues *step;
    BoxList boxes;
    float decay;
};

template <class X, class C>
__global__ void __launch_bounds__(BOX_THREADS) muon_apply_kernel(MuonApplyArgs<X, C> a)
{
    if (a.step->skip) return;
    const BoxShare s = box_share(a.boxes);
    const float lr = a.step->lr, decay = s.box.flags & FLAT_DECAYS ? a.decay : 0.0f;
    float *pw = a.w + (a.copy ? s.box.shard : s.box.value);
    for (uint32_t i = threadIdx.x; i < s.count; i += BOX_THREADS) {
        const BoxPlace p = box_place(s, i);
        const float old = pw[p.flat], w = fmaf(-lr, fmaf(decay, old, s.box.scale * to_float(a.x[p.other])), old);
        pw[p.flat] = w;
        if (a.copy) a.copy[s.box.value + p.flat] = from_float<C>(w);
    }
}

template <class X, class C> static void launch_muon_apply(Stream *s, const muon_apply_args *a)
{
    const MuonApplyArgs<X, C> args = { data_of<float>(a->w), data_of<C>(a->copy),  data_of<const X>(a->x),
                                       a->step,              box_list(a->boxes), a->decay };
    LAUNCH((muon_apply_kernel<X, C>), box_grid(a->chunks), BOX_THREADS, 0, cuda_stream(s), args);
}

template <class X> static Err muon_apply_of(Stream *s, const muon_apply_args *a)
{
    if (!a->copy.data) launch_muon_apply<X, float>(s, a);
    else DISPATCH(a->copy.dtype, (launch_muon_apply<X, T>(s, a)));
    return ERR_OK;
}

extern "C" Err cuda_muon_apply(Stream *s, const muon_apply_args *a)
{
    DISPATCH(a->x.dtype, return muon_apply_of<T>(s, a));
    return ERR_OK;
}

/* ---- at the owner ---- */

/* y at the rectangle's place and x packed, or back the other way round. */
template <class T>
__global__ void __launch_bounds__(BOX_THREADS) box_copy_kernel(T *y, const T *x, BoxList boxes, bool back)
{
    const BoxShare s = box_share(boxes);
    for (uint32_t i = threadIdx.x; i < s.count; i += BOX_THREADS) {
        const BoxPlace p = box_place(s, i);
        const int64_t packed = s.box.shard + p.flat;
        y[back ? packed : p.other] = x[back ? p.other : packed];
    }
}

extern "C" Err cuda_box_copy(Stream *s, const box_copy_args *a)
{
    if (a->x.dtype != a->y.dtype)
        return err_set(ERR_SHAPE, "box_copy: x is %s, y %s", dtype_name(a->x.dtype), dtype_name(a->y.dtype));
    DISPATCH(a->x.dtype, LAUNCH((box_copy_kernel<T>), box_grid(a->chunks), BOX_THREADS, 0, cuda_stream(s),
                                data_of<T>(a->y), data_of<const T>(a->x), box_list(a->boxes), a->back != 0));
    return ERR_OK;
}

/* Sum of all threads of a block, in thread 0: by warps, then one warp after the other. */
__device__ __forceinline__ double block_total(double x, double *part)
{
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int w = 1; threadIdx.x == 0 && w < BOX_THREADS / WARP; w++) x += part[w];
    return x;
}

__global__ void __launch_bounds__(BOX_THREADS) row_squares_kernel(double *sums, Rows<const float> x, int64_t columns)
{
    SHARED(double, part, [BOX_THREADS / WARP]);
    const float *row = x.at(blockIdx.x);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < columns; i += BOX_THREADS) {
        const double v = static_cast<double>(row[i]);
        sum = fma(v, v, sum);
    }
    sum = block_total(sum, part);
    if (!threadIdx.x) sums[blockIdx.x] = sum;
}

/* The factor, in the place of the first row's sum. */
__global__ void __launch_bounds__(BOX_THREADS) norm_factor_kernel(double *sums, int64_t rows, double eps)
{
    SHARED(double, part, [BOX_THREADS / WARP]);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < rows; i += BOX_THREADS) sum += sums[i];
    sum = block_total(sum, part);
    if (threadIdx.x) return;
    const double root = sqrt(sum);
    sums[0] = 1.0 / (root > eps ? root : eps);
}

template <class T>
__global__ void __launch_bounds__(BOX_THREADS)
    norm_scale_kernel(Rows<T> y, Rows<const float> x, const double *sums, int64_t columns)
{
    const float factor = static_cast<float>(sums[0]), *from = x.at(blockIdx.x);
    T *to = y.at(blockIdx.x);
    for (int64_t i = threadIdx.x; i < columns; i += BOX_THREADS) to[i] = from_float<T>(from[i] * factor);
}

extern "C" Err cuda_normalize(Stream *s, const normalize_args *a)
{
    const int64_t rows = a->x.dim[0], columns = a->x.dim[1];
    double *sums = static_cast<double *>(a->sums.data);
    const Rows<const float> x = rows_of<const float>(a->x);
    if (!rows) return ERR_OK;
    LAUNCH(row_squares_kernel, grid_blocks(rows), BOX_THREADS, 0, cuda_stream(s), sums, x, columns);
    LAUNCH(norm_factor_kernel, 1, BOX_THREADS, 0, cuda_stream(s), sums, rows, static_cast<double>(a->eps));
    DISPATCH(a->y.dtype, LAUNCH((norm_scale_kernel<T>), grid_blocks(rows), BOX_THREADS, 0, cuda_stream(s),
                                rows_of<T>(a->y), x, static_cast<const double *>(sums), columns));
    return ERR_OK;
}
