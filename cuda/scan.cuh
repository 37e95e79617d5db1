/*
 * Shared parts of the kernels of recurrences (delta_fwd.cu, delta_bwd.cu, mamba.cu): the algorithm of src/cpu/scan.h
 * and docs/determinism.md, with the same names. A block of SCAN_THREADS works on matrices of a run, which lie in its
 * part of the workspace and stay in L2; a thread has elements of a product, each a chain in the CPU's order.
 *
 * This form is plain: no tensor cores, far from the machine's speed. scan_tiles.cuh has parts of a form with them.
 */
#ifndef MEGATRAIN_CUDA_SCAN_CUH
#define MEGATRAIN_CUDA_SCAN_CUH

#include "kernel.cuh"

constexpr int SCAN_THREADS = 256;

/* Consecutive rows of a window that one document has. */
struct ScanRun {
    int64_t b, row;
    int n;
    bool begins, last;
};

/* The rows of a call. */
struct ScanRows {
    const int32_t *doc;
    int64_t doc_ld, first, B, T;
    int window;

    __device__ __forceinline__ bool begins(int64_t b, int64_t row) const
    {
        return doc && doc[b * doc_ld + row] == first + row;
    }
    /* The run that begins with `row`, which a window or a document begins. */
    __device__ __forceinline__ ScanRun run(int64_t b, int64_t row) const
    {
        const int64_t border = (row / window + 1) * window, end = border < T ? border : T;
        int64_t stop = row + 1;
        while (stop < end && !begins(b, stop)) stop++;
        return { b, row, static_cast<int>(stop - row), begins(b, row), stop == end };
    }
    /* The run whose last row is `end` - 1. */
    __device__ __forceinline__ ScanRun run_before(int64_t b, int64_t end) const
    {
        int64_t row = end - 1;
        while (row % window && !begins(b, row)) row--;
        return run(b, row);
    }
};

/* The next `count` floats of `at`. */
__device__ __forceinline__ float *scan_take(float *&at, int64_t count)
{
    float *p = at;
    at += count;
    return p;
}

/* Element i, j of a matrix is p[i * row + j * column]. */
struct Matrix {
    const float *p;
    int64_t row, column;
};

/* c = (`add`: c +) a b, [m x n], n elements of a row side by side, rows ldc apart; each a chain over k. */
__device__ __forceinline__ void scan_product(float *c, int64_t ldc, Matrix a, Matrix b, int m, int n, int k, bool add)
{
    for (int i = threadIdx.x; i < m * n; i += SCAN_THREADS) {
        const int row = i / n, column = i % n;
        float *to = c + row * ldc + column, sum = add ? *to : 0.0f;
        const float *x = a.p + row * a.row, *y = b.p + column * b.column;
        for (int j = 0; j < k; j++) sum = fmaf(x[j * a.column], y[j * b.row], sum);
        *to = sum;
    }
    __syncthreads();
}

__device__ __forceinline__ float row_dot(const float *x, const float *y, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++) sum = fmaf(x[i], y[i], sum);
    return sum;
}

/* Rows of a head of x [B T H C] to [n][C]. */
template <class T>
__device__ __forceinline__ void scan_load(float *to, GroupedRows<const T> x, const ScanRun &r, int64_t T_rows, int H,
                                          int head, int C)
{
    for (int i = threadIdx.x; i < r.n * C; i += SCAN_THREADS)
        to[i] = to_float(x.at((r.b * T_rows + r.row + i / C) * H + head)[i % C]);
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void scan_store(GroupedRows<T> x, const float *from, const ScanRun &r, int64_t T_rows, int H,
                                           int head, int C)
{
    for (int i = threadIdx.x; i < r.n * C; i += SCAN_THREADS)
        x.at((r.b * T_rows + r.row + i / C) * H + head)[i % C] = from_float<T>(from[i]);
    __syncthreads();
}

/* A state [D][E] of which `row` is the first row of x; data: or NULL. */
__device__ __forceinline__ void scan_load_state(float *to, Rows<const float> x, int64_t row, int D, int E)
{
    for (int i = threadIdx.x; i < D * E; i += SCAN_THREADS) to[i] = x.data ? x.at(row + i / E)[i % E] : 0.0f;
    __syncthreads();
}

__device__ __forceinline__ void scan_store_state(Rows<float> x, const float *from, int64_t row, int D, int E)
{
    for (int i = threadIdx.x; i < D * E; i += SCAN_THREADS) x.at(row + i / E)[i % E] = from[i];
    __syncthreads();
}

/* Column `head` of x [B T V], in a run's rows. */
__device__ __forceinline__ void scan_load_column(float *to, Rows<const float> x, const ScanRun &r, int64_t T_rows,
                                                 int head)
{
    for (int i = threadIdx.x; i < r.n; i += SCAN_THREADS) to[i] = x.at(r.b * T_rows + r.row + i)[head];
    __syncthreads();
}

__device__ __forceinline__ void scan_clear(float *p, int64_t count)
{
    for (int64_t i = threadIdx.x; i < count; i += SCAN_THREADS) p[i] = 0.0f;
    __syncthreads();
}

/* decay and from, of the gates g; a thread has a column j, and thread n those of the state. */
__device__ __forceinline__ void scan_decays(float *decay, float *from, const float *g, int n, int window)
{
    const int j = threadIdx.x;
    float sum = 0;
    for (int i = 0; i < n && j <= n; i++) {
        if (j == n) {
            sum = i ? sum + g[i] : g[i];
            from[i] = expf(sum);
            continue;
        }
        if (i > j) sum += g[i];
        decay[i * window + j] = i < j ? 0.0f : i == j ? 1.0f : expf(sum);
    }
    __syncthreads();
}

/* read = products times decays, 0 above the diagonal. */
__device__ __forceinline__ void scan_read(float *read, const float *products, const float *decay, int n, int window)
{
    for (int t = threadIdx.x; t < n * n; t += SCAN_THREADS) {
        const int i = t / n, j = t % n, at = i * window + j;
        read[at] = i < j ? 0.0f : products[at] * decay[at];
    }
    __syncthreads();
}

/* y[i] += sign * scale[i] * x[i] of rows of C elements. */
__device__ __forceinline__ void scan_add(float *y, const float *x, const float *scale, float sign, int n, int C)
{
    for (int i = threadIdx.x; i < n * C; i += SCAN_THREADS) y[i] = fmaf(sign * scale[i / C], x[i], y[i]);
    __syncthreads();
}

/* y[i] = scale[i] * x[i] of rows of C elements; y may be x. */
__device__ __forceinline__ void scan_scale(float *y, const float *x, const float *scale, int n, int C)
{
    for (int i = threadIdx.x; i < n * C; i += SCAN_THREADS) y[i] = scale[i / C] * x[i];
    __syncthreads();
}

/* The gradient of g of row m, a thread: from decays, and what is left of the state, times their gradients. */
__device__ __forceinline__ float scan_gate(const float *both, const float *dfrom, int m, int n, int window)
{
    float sum = 0;
    for (int j = 0; j < m; j++)
        for (int i = m; i < n; i++) sum += both[i * window + j];
    for (int i = m; i < n; i++) sum += dfrom[i];
    return sum;
}

/* ---- launching ---- */

static inline ScanRows scan_rows_of(Tensor q, Tensor doc, int64_t first, int window)
{
    return { data_of<const int32_t>(doc), doc.ld, first, q.dim[0], q.dim[1], window };
}

/* Checks of V value heads and K key heads that the declaration of an op does not say. */
static inline Err scan_check(const char *name, const ScanRows &rows, int64_t K, int64_t V, Tensor states)
{
    const int64_t windows = ceil_div(rows.T, rows.window);
    if (K < 1 || V % K)
        return err_set(ERR_SHAPE, "%s: %lld value heads for %lld key heads", name, static_cast<long long>(V),
                       static_cast<long long>(K));
    if (rows.first % rows.window)
        return err_set(ERR_SHAPE, "%s: rows from position %lld on, which begins no window", name,
                       static_cast<long long>(rows.first));
    if (states.data && states.dim[0] != rows.B * windows * V)
        return err_set(ERR_SHAPE, "%s: %lld states for %lld windows of %lld samples and %lld heads", name,
                       static_cast<long long>(states.dim[0]), static_cast<long long>(windows),
                       static_cast<long long>(rows.B), static_cast<long long>(V));
    return ERR_OK;
}

/* Blocks for so many items, of which each has `floats` of workspace. */
static inline Err scan_blocks(Stream *s, const char *name, int64_t items, int64_t floats, unsigned *blocks)
{
    const int64_t most = s->dev->workspace_bytes / (floats * 4);
    if (most < 1)
        return err_set(ERR_CONFIG, "%s needs %lld bytes of workspace, there are %lld", name,
                       static_cast<long long>(floats * 4), static_cast<long long>(s->dev->workspace_bytes));
    *blocks = grid_blocks(items < most ? items : most);
    return ERR_OK;
}

#endif
