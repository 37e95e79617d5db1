/*
 * Rows of tokens to rows of experts and back, and the gate of a shared expert. The order: permute_index.cu.
 *
 *   permute_rows      y[p] = x[choice[p] / topk]
 *   take_rows         the same of all ranks' tokens, or of some of them, for the rows of some experts, times their
 *                     weights
 *   unpermute_rows    y[n] = sum over k of weight[n][k] x[row[n][k]] (+ y[n]), k ascending, in fp32; no row: row -1
 *   unpermute_bwd     dx[row[n][k]] = weight[n][k] dy[n], dweight[n][k] = sum dy[n] x[row[n][k]]
 *   sum_parts         y[p] = the tree over parts i of x[i P + p], in fp32
 *   gated_add_fwd     y = residual + sigmoid(gate) x
 *   gated_add_bwd     dx = sigmoid(gate) dy, dgate = sigmoid'(gate) sum dy x
 *
 * Mapping   copies and sums over k: two packs of 16 bytes a thread (PackGrid of kernel.cuh), of 4 choices at a time.
 *           Dot products of two rows: a warp for each; neighbouring warps of unpermute_bwd share a row of dy, which
 *           then lies in L1.
 * Traffic   bf16, 65,536 tokens of width 1024, 2 choices each; a tensor of tokens has 134 MB, one of permuted rows
 *           268 MB. permute_rows writes 268 MB and reads 134 MB (268 MB, where L2 lost a row before its second
 *           reader came), 94 us at 4.3 TB/s; unpermute_rows the other way round. unpermute_bwd 268 MB twice and 134
 *           MB, 156 us. gated_add: three tensors of tokens, 94 us. At most 3 FLOP an element: bound by memory.
 * Needs     16-byte aligned rows for full speed, else element by element.
 */
#include "kernel.cuh"

/* ---- copies ---- */

/* E is any type of the elements' size. */
template <class E, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS)
permute_rows_kernel(Rows<E> y, Rows<const E> x, const int32_t *choice, RowCount tokens, int topk, PackGrid g)
{
    const int64_t chosen = rows_in_use(tokens) * topk, kept = rows_in_use(g.rows), rows = chosen < kept ? chosen : kept;
    Pack<E> pack[PACK_UNROLL];
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<E>::COUNT>(g, rows, u);
        if (p.used) pack[u] = load_pack<E, WIDE>(x.at(choice[p.row] / topk) + p.column, p.left);
    }
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<E>::COUNT>(g, rows, u);
        if (p.used) store_pack<E, WIDE>(y.at(p.row) + p.column, pack[u], p.left);
    }
}

template <class E> static void launch_permute(Stream *s, const permute_rows_args *a)
{
    const PackGrid g = pack_grid(row_count(a->choice, a->choice), 1, a->y.dim[1], Pack<E>::COUNT);
    const Rows<E> y = rows_of<E>(a->y);
    const Rows<const E> x = rows_of<const E>(a->x);
    const int32_t *choice = data_of<const int32_t>(a->choice);
    const RowCount tokens = row_count(a->x, a->x);
    const int topk = static_cast<int>(a->topk);
    if (rows_aligned(a->y) && rows_aligned(a->x))
        LAUNCH((permute_rows_kernel<E, true>), g.grid, g.block, 0, cuda_stream(s), y, x, choice, tokens, topk, g);
    else LAUNCH((permute_rows_kernel<E, false>), g.grid, g.block, 0, cuda_stream(s), y, x, choice, tokens, topk, g);
}

extern "C" Err cuda_permute_rows(Stream *s, const permute_rows_args *a)
{
    if (dtype_size(a->y.dtype) == 4) launch_permute<uint32_t>(s, a);
    else launch_permute<uint16_t>(s, a);
    return ERR_OK;
}

template <class T> struct Take {
    Rows<T> y;
    Rows<const T> x;
    Rows<const float> weight; /* data: or NULL */
    Rows<const int32_t> row; /* data: or NULL */
    const int32_t *choice;
    int topk;
    int64_t places; /* rows of x */
    /* Place of token n in x; within x, whatever came from a rank that was lost. */
    __device__ __forceinline__ int64_t place(int n) const
    {
        if (!row.data) return n;
        int64_t at = 0;
        for (int k = 0; k < topk; k++) at = max(at, int64_t{ row.at(n)[k] });
        return min(at, places - 1);
    }
};

template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS) take_rows_kernel(Take<T> a, PackGrid g)
{
    const int64_t rows = rows_in_use(g.rows);
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<Pack<T>::COUNT>(g, rows, u);
        if (!p.used) continue;
        const int choice = a.choice[p.row], n = choice / a.topk;
        Pack<T> x = load_pack<T, WIDE>(a.x.at(a.place(n)) + p.column, p.left);
        if (a.weight.data) {
            const float weight = a.weight.at(n)[choice - n * a.topk];
            for (int i = 0; i < Pack<T>::COUNT; i++) x.v[i] = from_float<T>(weight * to_float(x.v[i]));
        }
        store_pack<T, WIDE>(a.y.at(p.row) + p.column, x, p.left);
    }
}

template <class T> static void launch_take(Stream *s, const take_rows_args *a)
{
    const PackGrid g = pack_grid(row_count(a->y, a->y), 1, a->y.dim[1], Pack<T>::COUNT);
    const Take<T> args = { rows_of<T>(a->y), rows_of<const T>(a->x), rows_of<const float>(a->weight),
                           rows_of<const int32_t>(a->row), data_of<const int32_t>(a->choice), static_cast<int>(a->topk),
                           a->x.dim[0] };
    if (rows_aligned(a->y) && rows_aligned(a->x))
        LAUNCH((take_rows_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), args, g);
    else LAUNCH((take_rows_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), args, g);
}

/* (a residual stream in fp32 has sums of rows of its dtype on the CPU alone) */
static Err one_dtype(const char *op, Tensor a, Tensor b)
{
    return a.dtype == b.dtype ? ERR_OK : err_set(ERR_SHAPE, "%s on cuda: rows are of one dtype", op);
}

extern "C" Err cuda_take_rows(Stream *s, const take_rows_args *a)
{
    TRY(one_dtype("take_rows", a->y, a->x));
    DISPATCH(a->y.dtype, launch_take<T>(s, a));
    return ERR_OK;
}

/* ---- sums over a token's choices ---- */

constexpr int CHOICE_UNROLL = 4; /* rows of which a thread has a pack under way */

template <class T> struct Unpermute {
    Rows<T> y;
    Rows<const T> x;
    Rows<const int32_t> row;
    Rows<const float> weight; /* data: or NULL */
    int K;
    bool add;
};

template <class T, bool WIDE>
__device__ __forceinline__ void add_choices(const Unpermute<T> &a, const PackPlace &p, float (&sum)[Pack<T>::COUNT])
{
    const int32_t *row = a.row.at(p.row);
    const float *weight = a.weight.data ? a.weight.at(p.row) : nullptr;
    for (int k = 0; k < a.K; k += CHOICE_UNROLL) {
        Pack<T> x[CHOICE_UNROLL];
        for (int u = 0; u < CHOICE_UNROLL; u++)
            if (k + u < a.K && row[k + u] >= 0) x[u] = load_pack<T, WIDE>(a.x.at(row[k + u]) + p.column, p.left);
        for (int u = 0; u < CHOICE_UNROLL; u++) {
            if (k + u >= a.K) break;
            if (row[k + u] < 0) continue;
            const float w = weight ? weight[k + u] : 1.0f;
            for (int i = 0; i < Pack<T>::COUNT; i++) sum[i] = fmaf(w, to_float(x[u].v[i]), sum[i]);
        }
    }
}

template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS) unpermute_rows_kernel(Unpermute<T> a, PackGrid g)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const int64_t rows = rows_in_use(g.rows);
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        if (!p.used) continue;
        float sum[COUNT] = {};
        Pack<T> y;
        if (a.add) {
            y = load_pack<T, WIDE>(a.y.at(p.row) + p.column, p.left);
            for (int i = 0; i < COUNT; i++) sum[i] = to_float(y.v[i]);
        }
        add_choices<T, WIDE>(a, p, sum);
        for (int i = 0; i < COUNT; i++) y.v[i] = from_float<T>(sum[i]);
        store_pack<T, WIDE>(a.y.at(p.row) + p.column, y, p.left);
    }
}

template <class T> static void launch_unpermute(Stream *s, const unpermute_rows_args *a)
{
    const PackGrid g = pack_grid(row_count(a->y, a->row), 1, a->y.dim[1], Pack<T>::COUNT);
    const Unpermute<T> args = { rows_of<T>(a->y), rows_of<const T>(a->x), rows_of<const int32_t>(a->row),
                                rows_of<const float>(a->weight), static_cast<int>(a->row.dim[1]), a->add != 0 };
    if (rows_aligned(a->y) && rows_aligned(a->x))
        LAUNCH((unpermute_rows_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), args, g);
    else LAUNCH((unpermute_rows_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), args, g);
}

extern "C" Err cuda_unpermute_rows(Stream *s, const unpermute_rows_args *a)
{
    TRY(one_dtype("unpermute_rows", a->y, a->x));
    DISPATCH(a->y.dtype, launch_unpermute<T>(s, a));
    return ERR_OK;
}

/* ---- dx = factor dy, and the dot product of dy and x ---- */

constexpr int DOT_WARPS = 8, DOT_UNROLL = 2;

/* One row of D elements by a warp; every lane gets the product. dx may be NULL. */
template <class T, bool WIDE>
__device__ __forceinline__ float scale_and_dot(T *dx, const T *dy, const T *x, float factor, int64_t D)
{
    constexpr int COUNT = Pack<T>::COUNT, STEP = WARP * COUNT;
    float sum = 0;
    for (int64_t base = threadIdx.x % WARP * COUNT; base < D; base += DOT_UNROLL * STEP) {
        Pack<T> g[DOT_UNROLL], v[DOT_UNROLL];
        for (int u = 0; u < DOT_UNROLL; u++) {
            const int64_t at = base + u * STEP;
            if (at >= D) continue;
            g[u] = load_pack<T, WIDE>(dy + at, D - at);
            v[u] = load_pack<T, WIDE>(x + at, D - at);
        }
        for (int u = 0; u < DOT_UNROLL; u++) {
            const int64_t at = base + u * STEP;
            if (at >= D) continue;
            for (int i = 0; i < COUNT; i++) {
                sum = fmaf(to_float(g[u].v[i]), to_float(v[u].v[i]), sum);
                g[u].v[i] = from_float<T>(factor * to_float(g[u].v[i]));
            }
            if (dx) store_pack<T, WIDE>(dx + at, g[u], D - at);
        }
    }
    return warp_sum(sum);
}

template <class T> struct UnpermuteGrad {
    Rows<T> dx;
    Rows<float> dweight;
    Rows<const T> dy, x;
    Rows<const int32_t> row;
    Rows<const float> weight;
    RowCount tokens;
    int64_t D;
    int K;
};

template <class T, bool WIDE>
__global__ void __launch_bounds__(DOT_WARPS *WARP) unpermute_bwd_kernel(UnpermuteGrad<T> a)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(DOT_WARPS) + threadIdx.x / WARP, n = i / a.K;
    const int k = static_cast<int>(i - n * a.K);
    if (n >= rows_in_use(a.tokens)) return;
    const int64_t row = a.row.at(n)[k];
    T *dx = a.dx.data && row >= 0 ? a.dx.at(row) : nullptr;
    const float dot =
        row < 0 ? 0.0f : scale_and_dot<T, WIDE>(dx, a.dy.at(n), a.x.at(row), a.weight.at(n)[k], a.D);
    if (threadIdx.x % WARP == 0) a.dweight.at(n)[k] = dot;
}

template <class T> static void launch_unpermute_bwd(Stream *s, const unpermute_bwd_args *a)
{
    const int64_t K = a->row.dim[1];
    const UnpermuteGrad<T> args = { rows_of<T>(a->dx), rows_of<float>(a->dweight), rows_of<const T>(a->dy),
                                    rows_of<const T>(a->x), rows_of<const int32_t>(a->row),
                                    rows_of<const float>(a->weight), row_count(a->dy, a->row), a->dy.dim[1],
                                    static_cast<int>(K) };
    const unsigned grid = grid_blocks(ceil_div(a->dy.dim[0] * K, DOT_WARPS)), block = DOT_WARPS * WARP;
    if (rows_aligned(a->dx) && rows_aligned(a->dy) && rows_aligned(a->x))
        LAUNCH((unpermute_bwd_kernel<T, true>), grid, block, 0, cuda_stream(s), args);
    else LAUNCH((unpermute_bwd_kernel<T, false>), grid, block, 0, cuda_stream(s), args);
}

extern "C" Err cuda_unpermute_bwd(Stream *s, const unpermute_bwd_args *a)
{
    TRY(one_dtype("unpermute_bwd", a->dy, a->x));
    DISPATCH(a->dy.dtype, launch_unpermute_bwd<T>(s, a));
    return ERR_OK;
}

/* ---- parts of sums ---- */

constexpr int PARTS_LEVELS = 7; /* 64 parts */

/* sum[l]: of 2^l parts that wait for the next ones. */
template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS) sum_parts_kernel(Rows<T> y, Rows<const T> x, int parts, PackGrid g)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const int64_t rows = rows_in_use(g.rows);
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        if (!p.used) continue;
        float sum[PARTS_LEVELS][COUNT], total[COUNT];
        for (int part = 0; part < parts; part++) {
            const Pack<T> v = load_pack<T, WIDE>(x.at(part * g.rows.capacity + p.row) + p.column, p.left);
            for (int i = 0; i < COUNT; i++) total[i] = to_float(v.v[i]);
#pragma unroll
            for (int l = 0; l < PARTS_LEVELS; l++) {
                if (!(part >> l & 1)) { /* nothing waits there */
                    for (int i = 0; i < COUNT; i++) sum[l][i] = total[i];
                    break;
                }
                for (int i = 0; i < COUNT; i++) total[i] = sum[l][i] + total[i];
            }
        }
        bool any = false;
#pragma unroll
        for (int l = 0; l < PARTS_LEVELS; l++) {
            if (!(parts >> l & 1)) continue;
            for (int i = 0; i < COUNT; i++) total[i] = any ? sum[l][i] + total[i] : sum[l][i];
            any = true;
        }
        Pack<T> out;
        for (int i = 0; i < COUNT; i++) out.v[i] = from_float<T>(total[i]);
        store_pack<T, WIDE>(y.at(p.row) + p.column, out, p.left);
    }
}

template <class T> static void launch_sum_parts(Stream *s, const sum_parts_args *a)
{
    const PackGrid g = pack_grid(row_count(a->y, a->y), 1, a->y.dim[1], Pack<T>::COUNT);
    const int parts = static_cast<int>(a->parts);
    const Rows<T> y = rows_of<T>(a->y);
    const Rows<const T> x = rows_of<const T>(a->x);
    if (rows_aligned(a->y) && rows_aligned(a->x))
        LAUNCH((sum_parts_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), y, x, parts, g);
    else LAUNCH((sum_parts_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), y, x, parts, g);
}

extern "C" Err cuda_sum_parts(Stream *s, const sum_parts_args *a)
{
    if (a->x.dim[0] != a->y.dim[0] * a->parts || a->parts < 1 || a->parts >= 1 << PARTS_LEVELS)
        return err_set(ERR_SHAPE, "sum_parts: %lld rows are not %lld parts of %lld",
                       static_cast<long long>(a->x.dim[0]),
                       static_cast<long long>(a->parts), static_cast<long long>(a->y.dim[0]));
    DISPATCH(a->y.dtype, launch_sum_parts<T>(s, a));
    return ERR_OK;
}

/* ---- the gate of a shared expert ---- */

__device__ __forceinline__ float gate_value(float x) { return 1.0f / (1.0f + expf(-x)); }

template <class T> struct GatedAdd {
    Rows<T> y;
    Rows<const T> residual, x;
    Rows<const float> gate;
};

template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS) gated_add_fwd_kernel(GatedAdd<T> a, PackGrid g)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const int64_t rows = rows_in_use(g.rows);
    Pack<T> x[PACK_UNROLL], y[PACK_UNROLL];
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        if (!p.used) continue;
        x[u] = load_pack<T, WIDE>(a.x.at(p.row) + p.column, p.left);
        y[u] = load_pack<T, WIDE>(a.residual.at(p.row) + p.column, p.left);
    }
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        if (!p.used) continue;
        const float gate = gate_value(*a.gate.at(p.row));
        for (int i = 0; i < COUNT; i++)
            y[u].v[i] = from_float<T>(fmaf(gate, to_float(x[u].v[i]), to_float(y[u].v[i])));
        store_pack<T, WIDE>(a.y.at(p.row) + p.column, y[u], p.left);
    }
}

template <class T> static void launch_gated_add(Stream *s, const gated_add_fwd_args *a)
{
    const PackGrid g = pack_grid(row_count(a->y, a->x), 1, a->y.dim[1], Pack<T>::COUNT);
    const GatedAdd<T> args = { rows_of<T>(a->y), rows_of<const T>(a->residual), rows_of<const T>(a->x),
                               rows_of<const float>(a->gate) };
    if (rows_aligned(a->y) && rows_aligned(a->residual) && rows_aligned(a->x))
        LAUNCH((gated_add_fwd_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), args, g);
    else LAUNCH((gated_add_fwd_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), args, g);
}

extern "C" Err cuda_gated_add_fwd(Stream *s, const gated_add_fwd_args *a)
{
    TRY(one_dtype("gated_add_fwd", a->y, a->x));
    TRY(one_dtype("gated_add_fwd", a->residual, a->x));
    DISPATCH(a->y.dtype, launch_gated_add<T>(s, a));
    return ERR_OK;
}

template <class T> struct GatedAddGrad {
    Rows<T> dx;
    Rows<float> dgate;
    Rows<const T> dy, x;
    Rows<const float> gate;
    RowCount rows;
    int64_t D;
};

template <class T, bool WIDE> __global__ void __launch_bounds__(DOT_WARPS *WARP) gated_add_bwd_kernel(GatedAddGrad<T> a)
{
    const int64_t n = blockIdx.x * static_cast<int64_t>(DOT_WARPS) + threadIdx.x / WARP;
    if (n >= rows_in_use(a.rows)) return;
    const float gate = gate_value(*a.gate.at(n));
    const float dot = scale_and_dot<T, WIDE>(a.dx.at(n), a.dy.at(n), a.x.at(n), gate, a.D);
    if (threadIdx.x % WARP == 0) *a.dgate.at(n) = dot * (gate * (1.0f - gate));
}

template <class T> static void launch_gated_add_bwd(Stream *s, const gated_add_bwd_args *a)
{
    const GatedAddGrad<T> args = { rows_of<T>(a->dx), rows_of<float>(a->dgate), rows_of<const T>(a->dy),
                                   rows_of<const T>(a->x), rows_of<const float>(a->gate), row_count(a->dx, a->dy),
                                   a->dy.dim[1] };
    const unsigned grid = grid_blocks(ceil_div(a->dy.dim[0], DOT_WARPS)), block = DOT_WARPS * WARP;
    if (rows_aligned(a->dx) && rows_aligned(a->dy) && rows_aligned(a->x))
        LAUNCH((gated_add_bwd_kernel<T, true>), grid, block, 0, cuda_stream(s), args);
    else LAUNCH((gated_add_bwd_kernel<T, false>), grid, block, 0, cuda_stream(s), args);
}

extern "C" Err cuda_gated_add_bwd(Stream *s, const gated_add_bwd_args *a)
{
    TRY(one_dtype("gated_add_bwd", a->dy, a->x));
    DISPATCH(a->dy.dtype, launch_gated_add_bwd<T>(s, a));
    return ERR_OK;
}
