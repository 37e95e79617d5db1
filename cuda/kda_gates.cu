/*
 * The gates of Kimi Delta Attention (device/ops.def, kda_gates_fwd; src/cpu/kda_gates.c).
 *
 * Mapping   forward: a thread an element. Backward: a block a head, whose threads have 32 columns and 8 slices of the
 *           rows; slices are added in order. This form is plain. Speed is still to come.
 * Needs     F32 accumulators.
 */
#include "delta_around.cuh"

template <class T> struct KdaGates {
    Rows<float> beta, g;
    Rows<T> db;
    GroupedRows<T> draw;
    Rows<const float> dbeta, dg;
    Rows<const T> b;
    GroupedRows<const T> raw;
    Vector a_log, dt_bias;
    float *da_log, *ddt_bias;
    int64_t ddt_ld;
    RowCount rows;
    int64_t V, D;
    float bound;
    int fresh;

    __device__ __forceinline__ float x(int64_t n, int64_t h, int64_t d) const
    {
        return to_float(raw.at(n * V + h)[d]) + dt_bias.at(h, d);
    }
};

/* g and its slope over x. */
__device__ __forceinline__ float decay_of(float x, float rate, float bound, float *slope)
{
    if (bound < 0) {
        const float s = sigmoid_of(rate * x);
        *slope = bound * rate * s * (1.0f - s);
        return bound * s;
    }
    *slope = -rate * sigmoid_of(x);
    return -rate * softplus_of(x);
}

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) kda_gates_fwd_kernel(KdaGates<T> k)
{
    const int64_t i = blockIdx.x * static_cast<int64_t>(AROUND_THREADS) + threadIdx.x, n = i / (k.V * k.D);
    const int64_t h = i / k.D % k.V, d = i % k.D;
    float slope;
    if (n >= rows_in_use(k.rows)) return;
    if (d == 0) k.beta.at(n)[h] = sigmoid_of(to_float(k.b.at(n)[h]));
    k.g.at(n * k.V + h)[d] = decay_of(k.x(n, h, d), expf(k.a_log.at(0, h)), k.bound, &slope);
}

/* Column d of a head: draw of this thread's rows; *bias and *log: what they add to ddt_bias and da_log. */
template <class T>
__device__ __forceinline__ void gates_column(const KdaGates<T> &k, int64_t h, int64_t d, float *bias, float *log)
{
    const float rate = expf(k.a_log.at(0, h));
    float slope;
    for (int64_t n = threadIdx.x / WARP; n < rows_in_use(k.rows); n += AROUND_WARPS) {
        const float x = k.x(n, h, d), g = decay_of(x, rate, k.bound, &slope), dg = k.dg.at(n * k.V + h)[d];
        const float draw = dg * slope;
        k.draw.at(n * k.V + h)[d] = from_float<T>(draw);
        *bias += draw;
        *log = k.bound < 0 ? fmaf(draw, x, *log) : fmaf(dg, g, *log);
    }
}

template <class T> __global__ void __launch_bounds__(AROUND_THREADS, 1) kda_gates_bwd_kernel(KdaGates<T> k)
{
    SHARED(float, part, [AROUND_WARPS][WARP]);
    const int64_t h = blockIdx.x, rows = rows_in_use(k.rows);
    float log = 0;
    for (int64_t first = 0; first < k.D; first += WARP) {
        const int64_t d = first + threadIdx.x % WARP;
        float bias[1] = {};
        if (d < k.D) gates_column(k, h, d, &bias[0], &log);
        sum_of_warps<1>(bias, part);
        float *to = k.ddt_bias + h * k.ddt_ld + d;
        if (threadIdx.x < WARP && d < k.D) *to = (k.fresh ? 0.0f : *to) + bias[0];
    }
    for (int64_t n = threadIdx.x; n < rows; n += AROUND_THREADS) {
        const float s = sigmoid_of(to_float(k.b.at(n)[h]));
        k.db.at(n)[h] = from_float<T>(s * (1.0f - s) * k.dbeta.at(n)[h]);
    }
    log = block_sum(log, part[0]);
    if (threadIdx.x == 0) k.da_log[h] = (k.fresh ? 0.0f : k.da_log[h]) + log;
}

template <class T, class Args> static KdaGates<T> gates_of(const Args *a)
{
    KdaGates<T> k = {};
    k.b = rows_of<const T>(a->b), k.raw = grouped_rows_of<const T>(a->raw);
    k.a_log = vector_of(a->a_log), k.dt_bias = vector_of(a->dt_bias);
    k.V = a->raw.dim[1], k.D = a->raw.dim[2], k.bound = a->bound;
    return k;
}

template <class T> static void launch_fwd(Stream *s, const kda_gates_fwd_args *a)
{
    KdaGates<T> k = gates_of<T>(a);
    k.beta = rows_of<float>(a->beta), k.g = rows_of<float>(a->g), k.rows = row_count(a->beta, a->b);
    LAUNCH((kda_gates_fwd_kernel<T>), grid_blocks(ceil_div(a->b.dim[0] * k.V * k.D, AROUND_THREADS)), AROUND_THREADS, 0,
           cuda_stream(s), k);
}

extern "C" Err cuda_kda_gates_fwd(Stream *s, const kda_gates_fwd_args *a)
{
    DISPATCH(a->b.dtype, launch_fwd<T>(s, a));
    return ERR_OK;
}

template <class T> static void launch_bwd(Stream *s, const kda_gates_bwd_args *a)
{
    KdaGates<T> k = gates_of<T>(a);
    k.db = rows_of<T>(a->db), k.draw = grouped_rows_of<T>(a->draw);
    k.dbeta = rows_of<const float>(a->dbeta), k.dg = rows_of<const float>(a->dg);
    k.da_log = data_of<float>(a->da_log), k.ddt_bias = data_of<float>(a->ddt_bias), k.ddt_ld = a->ddt_bias.ld;
    k.rows = row_count(a->db, a->dbeta), k.fresh = a->fresh;
    LAUNCH((kda_gates_bwd_kernel<T>), grid_blocks(k.V), AROUND_THREADS, 0, cuda_stream(s), k);
}

extern "C" Err cuda_kda_gates_bwd(Stream *s, const kda_gates_bwd_args *a)
{
    if (a->da_log.dtype != F32) return err_set(ERR_SHAPE, "kda_gates_bwd on cuda has no fixed point: its sums are f32");
    DISPATCH(a->b.dtype, launch_bwd<T>(s, a));
    return ERR_OK;
}
