/*
 * What stands around recurrences, the gated delta rule and Mamba-2: the convolution with SiLU, keys and queries of unit
 * length, gates, and the norm with a gate. Formulas: device/ops.def, src/cpu/conv.c, src/cpu/gates.c.
 *
 * Mapping   conv: a thread an element; backward makes the gradient in front of SiLU anew for each of the K rows that
 *           saw an element. unit, gated norm: a warp a row. gates: a thread a gate. Sums over rows: the threads of a
 *           block have 32 columns and 8 slices of the rows, and a second kernel adds the slices of all blocks in order.
 * Traffic   conv reads and writes 2 elements forward, some 2 + K backward, mostly from L1. This form is plain: element
 *           by element, without packs. Speed is still to come.
 * Needs     at most 8 taps; an F32 accumulator; workspace for the slices.
 */
#include "delta_around.cuh"

constexpr int SLICE_BLOCKS = 16; /* blocks that share the rows of some columns */
constexpr int CONV_TAPS = 8;

/* silu'(x) */
__device__ __forceinline__ float silu_slope(float x)
{
    const float s = sigmoid_of(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
}

/* ---- sums over rows ---- */

/* Adds the slices' sums [slices][columns] to out, or puts them there: element c at c / width * ld + c % width. */
__global__ void __launch_bounds__(AROUND_THREADS, 1)
    slices_sum_kernel(float *out, int64_t width, int64_t ld, const float *part, int64_t stride, int64_t columns,
                      int fresh)
{
    const int64_t c = blockIdx.x * static_cast<int64_t>(AROUND_THREADS) + threadIdx.x;
    if (c >= columns) return;
    float *to = out + c / width * ld + c % width, sum = fresh ? 0.0f : *to;
    for (int i = 0; i < SLICE_BLOCKS; i++) sum += part[i * stride + c];
    *to = sum;
}

/* Columns `from` to `from` + `columns` of the slices, of which each has `stride`. */
static void launch_slices(Stream *s, Tensor out, const float *part, int64_t stride, int64_t columns, int fresh)
{
    const int64_t width = out.ndim == 1 ? columns : out.dim[1];
    LAUNCH(slices_sum_kernel, grid_blocks(ceil_div(columns, AROUND_THREADS)), AROUND_THREADS, 0, cuda_stream(s),
           data_of<float>(out), width, out.ndim == 1 ? columns : out.ld, part, stride, columns, fresh);
}

static Err slices_fit(Stream *s, const char *name, int64_t columns, Tensor acc)
{
    if (acc.dtype != F32) return err_set(ERR_SHAPE, "%s on cuda has no fixed point: its sums are f32", name);
    if (SLICE_BLOCKS * columns * 4 > s->dev->workspace_bytes)
        return err_set(ERR_SHAPE, "%s: %lld columns", name, static_cast<long long>(columns));
    return ERR_OK;
}

/* ---- convolution ---- */

template <class T> struct Conv {
    Rows<const T> x, before; /* data of before: or NULL */
    Vector w, bias;
    const int32_t *doc;
    int64_t doc_ld, first, T_rows, rows, C; /* rows: of all samples */
    int taps;

    __device__ __forceinline__ int back(int64_t b, int64_t t) const
    {
        int64_t n = first + t - (doc ? doc[b * doc_ld + t] : 0);
        if (!before.data && n > t) n = t;
        return static_cast<int>(n < taps - 1 ? n : taps - 1);
    }
    __device__ __forceinline__ float row(int64_t b, int64_t t, int64_t c) const
    {
        return to_float(t < 0 ? before.at(b * (taps - 1) + taps - 1 + t)[c] : x.at(b * T_rows + t)[c]);
    }
    /* The convolution of row t, which sees n rows before it. */
    __device__ __forceinline__ float at(int64_t b, int64_t t, int64_t c, int n) const
    {
        float sum = bias.data ? bias.at(0, c) : 0.0f;
        for (int j = 0; j <= n; j++) sum = fmaf(w.at(c, taps - 1 - n + j), row(b, t - n + j, c), sum);
        return sum;
    }
};

template <class T, class Args> static Err conv_of(const Args *a, Tensor more, Conv<T> *c)
{
    const int64_t taps = a->w.dim[1];
    if (taps < 1 || taps > CONV_TAPS)
        return err_set(ERR_SHAPE, "conv_silu: %lld taps, of at most %d", static_cast<long long>(taps), CONV_TAPS);
    const Tensor ahead = a->before.data ? a->before : more;
    if (ahead.data && ahead.dim[1] != taps - 1)
        return err_set(ERR_SHAPE, "conv_silu: %lld rows for %lld taps", static_cast<long long>(ahead.dim[1]),
                       static_cast<long long>(taps));
    *c = { rows_of<const T>(a->x),
           rows_of<const T>(a->before),
           vector_of(a->w),
           vector_of(a->bias),
           data_of<const int32_t>(a->doc),
           a->doc.ld,
           a->first,
           a->x.dim[1],
           a->x.dim[0] * a->x.dim[1],
           a->x.dim[2],
           static_cast<int>(taps) };
    return ERR_OK;
}

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) conv_silu_fwd_kernel(Rows<T> y, Conv<T> v)
{
    const int64_t c = blockIdx.y * static_cast<int64_t>(AROUND_THREADS) + threadIdx.x;
    if (c >= v.C) return;
    for (int64_t n = blockIdx.x; n < v.rows; n += gridDim.x) {
        const int64_t b = n / v.T_rows, t = n % v.T_rows;
        const float u = v.at(b, t, c, v.back(b, t));
        y.at(n)[c] = from_float<T>(u * sigmoid_of(u));
    }
}

constexpr int64_t ROW_BLOCKS = 1 << 16;

template <class T> static Err launch_conv_fwd(Stream *s, const conv_silu_fwd_args *a)
{
    Conv<T> v;
    TRY(conv_of<T>(a, a->before, &v));
    const dim3 grid(grid_blocks(v.rows < ROW_BLOCKS ? v.rows : ROW_BLOCKS), grid_blocks(ceil_div(v.C, AROUND_THREADS)));
    LAUNCH((conv_silu_fwd_kernel<T>), grid, AROUND_THREADS, 0, cuda_stream(s), rows_of<T>(a->y), v);
    return ERR_OK;
}

extern "C" Err cuda_conv_silu_fwd(Stream *s, const conv_silu_fwd_args *a)
{
    DISPATCH(a->x.dtype, return launch_conv_fwd<T>(s, a));
    return ERR_OK;
}

template <class T> struct ConvGrad {
    Conv<T> v;
    Rows<T> dx;
    Rows<float> dbefore; /* data: or NULL, and so with after */
    Rows<const T> dy;
    Rows<const float> after;
    int64_t samples;
};

/* A row of dx, or of dbefore if t < 0. */
template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) conv_silu_dx_kernel(ConvGrad<T> g)
{
    const Conv<T> &v = g.v;
    const int64_t c = blockIdx.y * static_cast<int64_t>(AROUND_THREADS) + threadIdx.x, ahead = v.taps - 1;
    const int64_t each = v.T_rows + (g.dbefore.data ? ahead : 0);
    if (c >= v.C) return;
    for (int64_t n = blockIdx.x; n < g.samples * each; n += gridDim.x) {
        const int64_t b = n / each, t = v.T_rows - 1 - n % each;
        float sum = t + ahead >= v.T_rows && g.after.data ? g.after.at(b * ahead + t + ahead - v.T_rows)[c] : 0.0f;
        for (int64_t u = t + ahead < v.T_rows ? t + ahead : v.T_rows - 1; u >= t && u >= 0; u--) {
            const int back = v.back(b, u);
            if (u - t > back) continue;
            const float du = to_float(g.dy.at(b * v.T_rows + u)[c]) * silu_slope(v.at(b, u, c, back));
            sum = fmaf(v.w.at(c, ahead - (u - t)), du, sum);
        }
        if (t < 0) g.dbefore.at(b * ahead + ahead + t)[c] = sum;
        else g.dx.at(b * v.T_rows + t)[c] = from_float<T>(sum);
    }
}

/* part: [SLICE_BLOCKS][C taps, then C of the bias] */
template <class T>
__global__ void __launch_bounds__(AROUND_THREADS, 1) conv_silu_dw_kernel(float *part, ConvGrad<T> g)
{
    SHARED(float, of_warps, [AROUND_WARPS][WARP]);
    const Conv<T> &v = g.v;
    const int64_t c = blockIdx.x * static_cast<int64_t>(WARP) + threadIdx.x % WARP, lanes = SLICE_BLOCKS * AROUND_WARPS;
    float sum[CONV_TAPS + 1] = {};
    for (int64_t n = blockIdx.y * static_cast<int64_t>(AROUND_WARPS) + threadIdx.x / WARP; n < v.rows && c < v.C;
         n += lanes) {
        const int64_t b = n / v.T_rows, t = n % v.T_rows;
        const int back = v.back(b, t);
        const float du = to_float(g.dy.at(n)[c]) * silu_slope(v.at(b, t, c, back));
        for (int j = 0; j < CONV_TAPS; j++) {
            const int behind = v.taps - 1 - j; /* tap j reads the row so far back */
            if (behind >= 0 && behind <= back) sum[j] = fmaf(du, v.row(b, t - behind, c), sum[j]);
        }
        sum[CONV_TAPS] += du;
    }
    sum_of_warps<CONV_TAPS + 1>(sum, of_warps);
    if (threadIdx.x >= WARP || c >= v.C) return;
    float *to = part + blockIdx.y * (v.C * (v.taps + 1));
    for (int j = 0; j < CONV_TAPS; j++)
        if (j < v.taps) to[c * v.taps + j] = sum[j];
    to[v.C * v.taps + c] = sum[CONV_TAPS];
}

template <class T> static Err launch_conv_bwd(Stream *s, const conv_silu_bwd_args *a)
{
    ConvGrad<T> g;
    TRY(conv_of<T>(a, a->dbefore.data ? a->dbefore : a->after, &g.v));
    const int64_t C = g.v.C, taps = g.v.taps, stride = C * (taps + 1);
    float *part = reinterpret_cast<float *>(s->dev->workspace);
    TRY(slices_fit(s, "conv_silu_bwd", stride, a->dw));
    g.dx = rows_of<T>(a->dx), g.dbefore = rows_of<float>(a->dbefore), g.dy = rows_of<const T>(a->dy);
    g.after = rows_of<const float>(a->after), g.samples = a->x.dim[0];
    const int64_t rows = g.v.rows + g.samples * (taps - 1);
    const dim3 grid(grid_blocks(rows < ROW_BLOCKS ? rows : ROW_BLOCKS), grid_blocks(ceil_div(C, AROUND_THREADS)));
    LAUNCH((conv_silu_dx_kernel<T>), grid, AROUND_THREADS, 0, cuda_stream(s), g);
    LAUNCH((conv_silu_dw_kernel<T>), dim3(grid_blocks(ceil_div(C, WARP)), SLICE_BLOCKS), AROUND_THREADS, 0,
           cuda_stream(s), part, g);
    launch_slices(s, a->dw, part, stride, C * taps, a->fresh);
    if (a->dbias.data) launch_slices(s, a->dbias, part + C * taps, stride, C, a->fresh);
    return ERR_OK;
}

extern "C" Err cuda_conv_silu_bwd(Stream *s, const conv_silu_bwd_args *a)
{
    DISPATCH(a->x.dtype, return launch_conv_bwd<T>(s, a));
    return ERR_OK;
}

/* ---- unit length ---- */

template <class T> __device__ __forceinline__ float squares_of(const T *x, int64_t D)
{
    float sum = 0;
    for (int64_t i = threadIdx.x % WARP; i < D; i += WARP) sum = fmaf(to_float(x[i]), to_float(x[i]), sum);
    return warp_sum(sum);
}

/* The warp's row; beyond the rows in use -1. */
__device__ __forceinline__ int64_t row_of_warp(RowCount rows)
{
    const int64_t n = blockIdx.x * static_cast<int64_t>(AROUND_WARPS) + threadIdx.x / WARP;
    return n < rows_in_use(rows) ? n : -1;
}

template <class T>
__global__ void __launch_bounds__(AROUND_THREADS, 1)
    unit_fwd_kernel(GroupedRows<T> y, GroupedRows<const T> x, RowCount rows, int64_t D, float factor, float eps)
{
    const int64_t n = row_of_warp(rows);
    if (n < 0) return;
    const float r = factor / sqrtf(squares_of(x.at(n), D) + eps);
    for (int64_t i = threadIdx.x % WARP; i < D; i += WARP) y.at(n)[i] = from_float<T>(to_float(x.at(n)[i]) * r);
}

extern "C" Err cuda_unit_fwd(Stream *s, const unit_fwd_args *a)
{
    const unsigned blocks = grid_blocks(ceil_div(a->x.dim[0], AROUND_WARPS));
    DISPATCH(a->x.dtype,
             LAUNCH((unit_fwd_kernel<T>), blocks, AROUND_THREADS, 0, cuda_stream(s), grouped_rows_of<T>(a->y),
                    grouped_rows_of<const T>(a->x), row_count(a->y, a->x), a->x.dim[1], a->factor, a->eps));
    return ERR_OK;
}

template <class T> struct UnitBwd {
    GroupedRows<T> dx;
    GroupedRows<const T> dy, x;
    RowCount rows;
    int64_t D;
    float factor, eps;
};

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) unit_bwd_kernel(UnitBwd<T> a)
{
    const int64_t n = row_of_warp(a.rows);
    if (n < 0) return;
    const T *x = a.x.at(n), *dy = a.dy.at(n);
    const float r = 1.0f / sqrtf(squares_of(x, a.D) + a.eps);
    float dot = 0;
    for (int64_t i = threadIdx.x % WARP; i < a.D; i += WARP) dot = fmaf(to_float(x[i]) * r, to_float(dy[i]), dot);
    dot = warp_sum(dot);
    for (int64_t i = threadIdx.x % WARP; i < a.D; i += WARP)
        a.dx.at(n)[i] = from_float<T>(a.factor * r * fmaf(-(to_float(x[i]) * r), dot, to_float(dy[i])));
}

extern "C" Err cuda_unit_bwd(Stream *s, const unit_bwd_args *a)
{
    const unsigned blocks = grid_blocks(ceil_div(a->x.dim[0], AROUND_WARPS));
    DISPATCH(a->x.dtype, const UnitBwd<T> args = { grouped_rows_of<T>(a->dx), grouped_rows_of<const T>(a->dy),
                                                   grouped_rows_of<const T>(a->x), row_count(a->dx, a->dy),
                                                   a->x.dim[1], a->factor, a->eps };
             LAUNCH((unit_bwd_kernel<T>), blocks, AROUND_THREADS, 0, cuda_stream(s), args));
    return ERR_OK;
}

/* ---- gates ---- */

template <class T> struct Gates {
    Rows<float> beta, g;
    Rows<T> db, da;
    Rows<const float> dbeta, dg;
    Rows<const T> b, a;
    Vector a_log, dt_bias;
    RowCount rows;
    int64_t V;
    float top;
};

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) delta_gates_fwd_kernel(Gates<T> k)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(AROUND_THREADS) + threadIdx.x, n = i / k.V, h = i % k.V;
    if (n >= rows_in_use(k.rows)) return;
    k.beta.at(n)[h] = k.top * sigmoid_of(to_float(k.b.at(n)[h]));
    k.g.at(n)[h] = -expf(k.a_log.at(0, h)) * softplus_of(to_float(k.a.at(n)[h]) + k.dt_bias.at(0, h));
}

extern "C" Err cuda_delta_gates_fwd(Stream *s, const delta_gates_fwd_args *a)
{
    const int64_t V = a->b.dim[1];
    const unsigned blocks = grid_blocks(ceil_div(a->b.dim[0] * V, AROUND_THREADS));
    DISPATCH(a->b.dtype, Gates<T> k = {}; k.beta = rows_of<float>(a->beta); k.g = rows_of<float>(a->g);
             k.b = rows_of<const T>(a->b); k.a = rows_of<const T>(a->a); k.a_log = vector_of(a->a_log);
             k.dt_bias = vector_of(a->dt_bias); k.rows = row_count(a->beta, a->b); k.V = V; k.top = a->top;
             LAUNCH((delta_gates_fwd_kernel<T>), blocks, AROUND_THREADS, 0, cuda_stream(s), k));
    return ERR_OK;
}

/* part: [SLICE_BLOCKS][V of a_log, V of dt_bias] */
template <class T>
__global__ void __launch_bounds__(AROUND_THREADS, 1) delta_gates_bwd_kernel(float *part, Gates<T> k)
{
    SHARED(float, of_warps, [AROUND_WARPS][WARP]);
    const int64_t h = blockIdx.x * static_cast<int64_t>(WARP) + threadIdx.x % WARP, rows = rows_in_use(k.rows);
    float sum[2] = {};
    for (int64_t n = blockIdx.y * static_cast<int64_t>(AROUND_WARPS) + threadIdx.x / WARP; n < rows && h < k.V;
         n += SLICE_BLOCKS * AROUND_WARPS) {
        const float s = sigmoid_of(to_float(k.b.at(n)[h])), x = to_float(k.a.at(n)[h]) + k.dt_bias.at(0, h);
        const float rate = -expf(k.a_log.at(0, h)), dg = k.dg.at(n)[h], da = rate * sigmoid_of(x) * dg;
        k.db.at(n)[h] = from_float<T>(k.top * s * (1.0f - s) * k.dbeta.at(n)[h]);
        k.da.at(n)[h] = from_float<T>(da);
        sum[0] = fmaf(rate * softplus_of(x), dg, sum[0]);
        sum[1] += da;
    }
    sum_of_warps<2>(sum, of_warps);
    if (threadIdx.x >= WARP || h >= k.V) return;
    part[blockIdx.y * 2 * k.V + h] = sum[0];
    part[blockIdx.y * 2 * k.V + k.V + h] = sum[1];
}

template <class T> static void launch_gates_bwd(Stream *s, const delta_gates_bwd_args *a)
{
    const int64_t V = a->b.dim[1];
    float *part = reinterpret_cast<float *>(s->dev->workspace);
    Gates<T> k = {};
    k.db = rows_of<T>(a->db), k.da = rows_of<T>(a->da);
    k.dbeta = rows_of<const float>(a->dbeta), k.dg = rows_of<const float>(a->dg);
    k.b = rows_of<const T>(a->b), k.a = rows_of<const T>(a->a);
    k.a_log = vector_of(a->a_log), k.dt_bias = vector_of(a->dt_bias);
    k.rows = row_count(a->db, a->dbeta), k.V = V, k.top = a->top;
    LAUNCH((delta_gates_bwd_kernel<T>), dim3(grid_blocks(ceil_div(V, WARP)), SLICE_BLOCKS), AROUND_THREADS, 0,
           cuda_stream(s), part, k);
    launch_slices(s, a->da_log, part, 2 * V, V, a->fresh);
    launch_slices(s, a->ddt_bias, part + V, 2 * V, V, a->fresh);
}

extern "C" Err cuda_delta_gates_bwd(Stream *s, const delta_gates_bwd_args *a)
{
    TRY(slices_fit(s, "delta_gates_bwd", 2 * a->b.dim[1], a->da_log));
    DISPATCH(a->b.dtype, launch_gates_bwd<T>(s, a));
    return ERR_OK;
}

template <class T> struct MambaGates {
    Rows<float> delta, g;
    Rows<T> ddt;
    Rows<const float> ddelta, dg;
    Rows<const T> dt;
    Vector a_log, dt_bias;
    RowCount rows;
    int64_t H;
    float low;
    /* The sum in front of softplus. */
    __device__ __forceinline__ float raw(int64_t n, int64_t h) const
    {
        return to_float(dt.at(n)[h]) + dt_bias.at(0, h);
    }
};

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) mamba_gates_fwd_kernel(MambaGates<T> k)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(AROUND_THREADS) + threadIdx.x, n = i / k.H, h = i % k.H;
    if (n >= rows_in_use(k.rows)) return;
    const float soft = softplus_of(k.raw(n, h)), delta = soft < k.low ? k.low : soft;
    k.delta.at(n)[h] = delta;
    k.g.at(n)[h] = -expf(k.a_log.at(0, h)) * delta;
}

extern "C" Err cuda_mamba_gates_fwd(Stream *s, const mamba_gates_fwd_args *a)
{
    const int64_t H = a->dt.dim[1];
    const unsigned blocks = grid_blocks(ceil_div(a->dt.dim[0] * H, AROUND_THREADS));
    DISPATCH(a->dt.dtype, MambaGates<T> k = {}; k.delta = rows_of<float>(a->delta); k.g = rows_of<float>(a->g);
             k.dt = rows_of<const T>(a->dt); k.a_log = vector_of(a->a_log); k.dt_bias = vector_of(a->dt_bias);
             k.rows = row_count(a->delta, a->dt); k.H = H; k.low = a->low;
             LAUNCH((mamba_gates_fwd_kernel<T>), blocks, AROUND_THREADS, 0, cuda_stream(s), k));
    return ERR_OK;
}

/* part: [SLICE_BLOCKS][H of a_log, H of dt_bias] */
template <class T>
__global__ void __launch_bounds__(AROUND_THREADS, 1) mamba_gates_bwd_kernel(float *part, MambaGates<T> k)
{
    SHARED(float, of_warps, [AROUND_WARPS][WARP]);
    const int64_t h = blockIdx.x * static_cast<int64_t>(WARP) + threadIdx.x % WARP, rows = rows_in_use(k.rows);
    float sum[2] = {};
    for (int64_t n = blockIdx.y * static_cast<int64_t>(AROUND_WARPS) + threadIdx.x / WARP; n < rows && h < k.H;
         n += SLICE_BLOCKS * AROUND_WARPS) {
        const float x = k.raw(n, h), soft = softplus_of(x), rate = -expf(k.a_log.at(0, h)), dg = k.dg.at(n)[h];
        const float ddt = soft < k.low ? 0.0f : sigmoid_of(x) * fmaf(rate, dg, k.ddelta.at(n)[h]);
        k.ddt.at(n)[h] = from_float<T>(ddt);
        sum[0] = fmaf(rate * (soft < k.low ? k.low : soft), dg, sum[0]);
        sum[1] += ddt;
    }
    sum_of_warps<2>(sum, of_warps);
    if (threadIdx.x >= WARP || h >= k.H) return;
    part[blockIdx.y * 2 * k.H + h] = sum[0];
    part[blockIdx.y * 2 * k.H + k.H + h] = sum[1];
}

template <class T> static void launch_mamba_gates_bwd(Stream *s, const mamba_gates_bwd_args *a)
{
    const int64_t H = a->dt.dim[1];
    float *part = reinterpret_cast<float *>(s->dev->workspace);
    MambaGates<T> k = {};
    k.ddt = rows_of<T>(a->ddt), k.ddelta = rows_of<const float>(a->ddelta), k.dg = rows_of<const float>(a->dg);
    k.dt = rows_of<const T>(a->dt), k.a_log = vector_of(a->a_log), k.dt_bias = vector_of(a->dt_bias);
    k.rows = row_count(a->ddt, a->ddelta), k.H = H, k.low = a->low;
    LAUNCH((mamba_gates_bwd_kernel<T>), dim3(grid_blocks(ceil_div(H, WARP)), SLICE_BLOCKS), AROUND_THREADS, 0,
           cuda_stream(s), part, k);
    launch_slices(s, a->da_log, part, 2 * H, H, a->fresh);
    launch_slices(s, a->ddt_bias, part + H, 2 * H, H, a->fresh);
}

extern "C" Err cuda_mamba_gates_bwd(Stream *s, const mamba_gates_bwd_args *a)
{
    TRY(slices_fit(s, "mamba_gates_bwd", 2 * a->dt.dim[1], a->da_log));
    DISPATCH(a->dt.dtype, launch_mamba_gates_bwd<T>(s, a));
    return ERR_OK;
}

/* ---- a norm with a gate ---- */

/* Terms of an element of a row: h = v r, the gate and its slope, and dh, the gradient of h. */
struct GatedTerms {
    float x, h, gate, slope, dyw, dh;
};

template <class T> struct GatedNorm {
    GroupedRows<T> y, dx, dz;
    GroupedRows<const T> dy, x, z;
    Vector w;
    RowCount rows;
    int64_t E, G;
    float eps;
    bool gate_first, sigmoid;

    /* silu(z), or sigmoid(z). */
    __device__ __forceinline__ float gate(int64_t n, int64_t i) const
    {
        const float u = to_float(z.at(n)[i]);
        return sigmoid ? sigmoid_of(u) : u * sigmoid_of(u);
    }
    /* v, of which the norm is: x or, with the gate first, x times it. */
    __device__ __forceinline__ float value(int64_t n, int64_t i) const
    {
        const float v = to_float(x.at(n)[i]);
        return gate_first ? v * gate(n, i) : v;
    }
    __device__ __forceinline__ float scale(int64_t n) const
    {
        float sum = 0;
        for (int64_t i = threadIdx.x % WARP; i < E; i += WARP) sum = fmaf(value(n, i), value(n, i), sum);
        return 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(E) + eps);
    }
    __device__ __forceinline__ GatedTerms terms(int64_t n, int64_t i, float r) const
    {
        const float u = to_float(z.at(n)[i]), s = sigmoid_of(u);
        GatedTerms t;
        t.x = to_float(x.at(n)[i]), t.gate = gate(n, i), t.slope = sigmoid ? s * (1.0f - s) : silu_slope(u);
        t.h = (gate_first ? t.x * t.gate : t.x) * r;
        t.dyw = to_float(dy.at(n)[i]) * w.at(n % G, i);
        t.dh = gate_first ? t.dyw : t.dyw * t.gate;
        return t;
    }
};

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) gated_norm_fwd_kernel(GatedNorm<T> k)
{
    const int64_t n = row_of_warp(k.rows);
    if (n < 0) return;
    const float r = k.scale(n);
    for (int64_t i = threadIdx.x % WARP; i < k.E; i += WARP) {
        const float hw = k.value(n, i) * r * k.w.at(n % k.G, i);
        k.y.at(n)[i] = from_float<T>(k.gate_first ? hw : hw * k.gate(n, i));
    }
}

static Err gated_check(Tensor x, Tensor w)
{
    if (w.dim[0] > 0 && x.dim[0] % w.dim[0] == 0) return ERR_OK;
    return err_set(ERR_SHAPE, "gated_norm: %lld rows of x for %lld of w", static_cast<long long>(x.dim[0]),
                   static_cast<long long>(w.dim[0]));
}

extern "C" Err cuda_gated_norm_fwd(Stream *s, const gated_norm_fwd_args *a)
{
    const unsigned blocks = grid_blocks(ceil_div(a->x.dim[0], AROUND_WARPS));
    TRY(gated_check(a->x, a->w));
    DISPATCH(a->x.dtype, GatedNorm<T> k = {}; k.y = grouped_rows_of<T>(a->y); k.x = grouped_rows_of<const T>(a->x);
             k.z = grouped_rows_of<const T>(a->z); k.w = vector_of(a->w); k.rows = row_count(a->y, a->x);
             k.E = a->x.dim[1]; k.G = a->w.dim[0]; k.eps = a->eps; k.gate_first = a->gate_first != 0;
             k.sigmoid = a->sigmoid != 0;
             LAUNCH((gated_norm_fwd_kernel<T>), blocks, AROUND_THREADS, 0, cuda_stream(s), k));
    return ERR_OK;
}

/* A warp has 32 columns of the rows of one group, and a slice of these rows. part: [SLICE_BLOCKS][G * E] */
template <class T>
__global__ void __launch_bounds__(AROUND_THREADS, 1) gated_norm_dw_kernel(float *part, GatedNorm<T> k)
{
    SHARED(float, of_warps, [AROUND_WARPS][WARP]);
    const int64_t chunks = (k.E + WARP - 1) / WARP, group = blockIdx.x / chunks, rows = rows_in_use(k.rows);
    const int64_t c = blockIdx.x % chunks * WARP + threadIdx.x % WARP;
    float sum[1] = {};
    for (int64_t n = (blockIdx.y * static_cast<int64_t>(AROUND_WARPS) + threadIdx.x / WARP) * k.G + group; n < rows;
         n += SLICE_BLOCKS * AROUND_WARPS * k.G) {
        const float r = k.scale(n);
        if (c >= k.E) continue;
        const GatedTerms t = k.terms(n, c, r);
        const float dy = to_float(k.dy.at(n)[c]);
        sum[0] = fmaf(k.gate_first ? dy : dy * t.gate, t.h, sum[0]);
    }
    sum_of_warps<1>(sum, of_warps);
    if (threadIdx.x < WARP && c < k.E) part[(blockIdx.y * k.G + group) * k.E + c] = sum[0];
}

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) gated_norm_dx_kernel(GatedNorm<T> k)
{
    const int64_t n = row_of_warp(k.rows);
    if (n < 0) return;
    const float r = k.scale(n);
    float sum = 0;
    for (int64_t i = threadIdx.x % WARP; i < k.E; i += WARP) {
        const GatedTerms t = k.terms(n, i, r);
        sum = fmaf(t.dh, t.h, sum);
    }
    const float mean = warp_sum(sum) / static_cast<float>(k.E);
    for (int64_t i = threadIdx.x % WARP; i < k.E; i += WARP) {
        const GatedTerms t = k.terms(n, i, r);
        const float dv = r * fmaf(-t.h, mean, t.dh);
        k.dx.at(n)[i] = from_float<T>(k.gate_first ? dv * t.gate : dv);
        k.dz.at(n)[i] = from_float<T>((k.gate_first ? dv * t.x : t.dyw * t.h) * t.slope);
    }
}

template <class T> static void launch_gated_bwd(Stream *s, const gated_norm_bwd_args *a)
{
    const int64_t E = a->x.dim[1], G = a->w.dim[0];
    float *part = reinterpret_cast<float *>(s->dev->workspace);
    GatedNorm<T> k = {};
    k.dx = grouped_rows_of<T>(a->dx), k.dz = grouped_rows_of<T>(a->dz), k.dy = grouped_rows_of<const T>(a->dy);
    k.x = grouped_rows_of<const T>(a->x), k.z = grouped_rows_of<const T>(a->z), k.w = vector_of(a->w);
    k.rows = row_count(a->dx, a->dy), k.E = E, k.G = G, k.eps = a->eps;
    k.gate_first = a->gate_first != 0, k.sigmoid = a->sigmoid != 0;
    LAUNCH((gated_norm_dw_kernel<T>), dim3(grid_blocks(ceil_div(E, WARP) * G), SLICE_BLOCKS), AROUND_THREADS, 0,
           cuda_stream(s), part, k);
    launch_slices(s, a->dw, part, G * E, G * E, a->fresh);
    LAUNCH((gated_norm_dx_kernel<T>), grid_blocks(ceil_div(a->x.dim[0], AROUND_WARPS)), AROUND_THREADS, 0,
           cuda_stream(s), k);
}

extern "C" Err cuda_gated_norm_bwd(Stream *s, const gated_norm_bwd_args *a)
{
    TRY(gated_check(a->x, a->w));
    TRY(slices_fit(s, "gated_norm_bwd", a->w.dim[0] * a->x.dim[1], a->dw));
    DISPATCH(a->x.dtype, launch_gated_bwd<T>(s, a));
    return ERR_OK;
}
