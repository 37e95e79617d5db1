/*
 * Shared parts of the gated delta rule's kernels (delta_fwd.cu, delta_bwd.cu): the algorithm of src/cpu/delta.h and
 * docs/determinism.md, with the same names, a block of DELTA_THREADS for a key head of a sample. Matrices of a run lie
 * in the block's part of the workspace, which stays in L2; a thread has elements of a product, each a chain in the
 * CPU's order.
 *
 * This form is plain: no tensor cores, and windows of a head one after the other. Speed is still to come.
 */
#ifndef MEGATRAIN_CUDA_DELTA_CUH
#define MEGATRAIN_CUDA_DELTA_CUH

#include "kernel.cuh"

constexpr int DELTA_THREADS = 256, DELTA_SQUARE = DELTA_WINDOW * DELTA_WINDOW;

/* One call. */
template <class T> struct DeltaCall {
    GroupedRows<const T> q, k, v;
    Rows<const float> g, beta;
    const int32_t *doc;
    int64_t doc_ld, first, B, T_rows;
    int K, V, D, E, group, windows;
    float *workspace;
    int64_t floats; /* of it that a block has */
};

/* Consecutive rows of a window that one document has. */
struct DeltaRun {
    int64_t b, row;
    int n;
    bool begins, last;
};

/* A block's part of the workspace: the members of src/cpu/delta.h. */
struct DeltaParts {
    float *q, *k, *kk, *qk, *decay, *low, *read, *from, *beta, *error, *write, *x;
};

/* Takes `count` floats. */
__device__ __forceinline__ float *delta_take(float *&at, int64_t count)
{
    float *p = at;
    at += count;
    return p;
}

__host__ __device__ __forceinline__ int64_t delta_floats(int D, int E)
{
    return 2 * DELTA_WINDOW * static_cast<int64_t>(D) + 5 * DELTA_SQUARE + 2 * DELTA_WINDOW +
           3 * DELTA_WINDOW * static_cast<int64_t>(E);
}

template <class T> __device__ __forceinline__ DeltaParts delta_parts(const DeltaCall<T> &c, float *&at)
{
    const int64_t keys = DELTA_WINDOW * static_cast<int64_t>(c.D), rows = DELTA_WINDOW * static_cast<int64_t>(c.E);
    DeltaParts p;
    p.q = delta_take(at, keys), p.k = delta_take(at, keys);
    p.kk = delta_take(at, DELTA_SQUARE), p.qk = delta_take(at, DELTA_SQUARE), p.decay = delta_take(at, DELTA_SQUARE);
    p.low = delta_take(at, DELTA_SQUARE), p.read = delta_take(at, DELTA_SQUARE);
    p.from = delta_take(at, DELTA_WINDOW), p.beta = delta_take(at, DELTA_WINDOW);
    p.error = delta_take(at, rows), p.write = delta_take(at, rows), p.x = delta_take(at, rows);
    return p;
}

template <class T> __device__ __forceinline__ bool delta_begins(const DeltaCall<T> &c, int64_t b, int64_t row)
{
    return c.doc && c.doc[b * c.doc_ld + row] == c.first + row;
}

/* The run that begins with `row`, which a window or a document begins. */
template <class T> __device__ __forceinline__ DeltaRun delta_run(const DeltaCall<T> &c, int64_t b, int64_t row)
{
    const int64_t border = (row / DELTA_WINDOW + 1) * DELTA_WINDOW, end = border < c.T_rows ? border : c.T_rows;
    int64_t stop = row + 1;
    while (stop < end && !delta_begins(c, b, stop)) stop++;
    return { b, row, static_cast<int>(stop - row), delta_begins(c, b, row), stop == end };
}

/* Element i, j of a matrix is p[i * row + j * column]. */
struct Matrix {
    const float *p;
    int64_t row, column;
};

/* c = (`add`: c +) a b, [m x n], n elements of a row side by side, rows ldc apart; each a chain over k. */
__device__ __forceinline__ void delta_product(float *c, int64_t ldc, Matrix a, Matrix b, int m, int n, int k, bool add)
{
    for (int i = threadIdx.x; i < m * n; i += DELTA_THREADS) {
        const int row = i / n, column = i % n;
        float *to = c + row * ldc + column, sum = add ? *to : 0.0f;
        const float *x = a.p + row * a.row, *y = b.p + column * b.column;
        for (int j = 0; j < k; j++) sum = fmaf(x[j * a.column], y[j * b.row], sum);
        *to = sum;
    }
    __syncthreads();
}

/* Rows of a head of x [B T H C] to [n][C]. */
template <class T>
__device__ __forceinline__ void delta_load(float *to, GroupedRows<const T> x, const DeltaRun &r, int64_t T_rows, int H,
                                           int head, int C)
{
    for (int i = threadIdx.x; i < r.n * C; i += DELTA_THREADS)
        to[i] = to_float(x.at((r.b * T_rows + r.row + i / C) * H + head)[i % C]);
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void delta_store(GroupedRows<T> x, const float *from, const DeltaRun &r, int64_t T_rows,
                                            int H, int head, int C)
{
    for (int i = threadIdx.x; i < r.n * C; i += DELTA_THREADS)
        x.at((r.b * T_rows + r.row + i / C) * H + head)[i % C] = from_float<T>(from[i]);
    __syncthreads();
}

/* A state [D][E] of which `row` is the first row of x; data: or NULL. */
__device__ __forceinline__ void delta_load_state(float *to, Rows<const float> x, int64_t row, int D, int E)
{
    for (int i = threadIdx.x; i < D * E; i += DELTA_THREADS) to[i] = x.data ? x.at(row + i / E)[i % E] : 0.0f;
    __syncthreads();
}

__device__ __forceinline__ void delta_store_state(Rows<float> x, const float *from, int64_t row, int D, int E)
{
    for (int i = threadIdx.x; i < D * E; i += DELTA_THREADS) x.at(row + i / E)[i % E] = from[i];
    __syncthreads();
}

__device__ __forceinline__ void delta_clear(float *p, int64_t count)
{
    for (int64_t i = threadIdx.x; i < count; i += DELTA_THREADS) p[i] = 0.0f;
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void delta_keys(const DeltaCall<T> &c, const DeltaParts &p, const DeltaRun &r, int key_head)
{
    delta_load(p.q, c.q, r, c.T_rows, c.K, key_head, c.D);
    delta_load(p.k, c.k, r, c.T_rows, c.K, key_head, c.D);
    const Matrix across = { p.k, 1, c.D };
    delta_product(p.kk, DELTA_WINDOW, { p.k, c.D, 1 }, across, r.n, r.n, c.D, false);
    delta_product(p.qk, DELTA_WINDOW, { p.q, c.D, 1 }, across, r.n, r.n, c.D, false);
}

/* Decays and what goes by them; a thread has a column j, and thread n the state's. */
template <class T>
__device__ __forceinline__ void delta_decays(const DeltaCall<T> &c, const DeltaParts &p, const DeltaRun &r, int head)
{
    const int j = threadIdx.x;
    float sum = 0;
    for (int i = 0; i < r.n && j <= r.n; i++) {
        const int64_t row = r.b * c.T_rows + r.row + i;
        const float g = c.g.at(row)[head];
        if (j == r.n) {
            sum = i ? sum + g : g;
            p.from[i] = expf(sum);
            p.beta[i] = c.beta.at(row)[head];
            continue;
        }
        const int at = i * DELTA_WINDOW + j;
        if (i > j) sum += g;
        p.decay[at] = i < j ? 0.0f : i == j ? 1.0f : expf(sum);
        p.read[at] = i < j ? 0.0f : p.qk[at] * p.decay[at];
        p.low[at] = i <= j ? 0.0f : -(p.kk[at] * p.decay[at]);
    }
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void delta_head(const DeltaCall<T> &c, const DeltaParts &p, const DeltaRun &r, int head,
                                           const float *state)
{
    delta_decays(c, p, r, head);
    delta_load(p.error, c.v, r, c.T_rows, c.V, head, c.E);
    if (!r.begins) delta_product(p.x, c.E, { p.k, c.D, 1 }, { state, c.E, 1 }, r.n, c.E, c.D, false);
    for (int e = threadIdx.x; e < c.E; e += DELTA_THREADS)
        for (int i = 0; i < r.n; i++) {
            float x = p.error[i * c.E + e];
            if (!r.begins) x = fmaf(-p.from[i], p.x[i * c.E + e], x);
            for (int j = 0; j < i; j++) x = fmaf(p.low[i * DELTA_WINDOW + j], p.write[j * c.E + e], x);
            p.error[i * c.E + e] = x;
            p.write[i * c.E + e] = p.beta[i] * x;
        }
    __syncthreads();
}

/* ---- launching ---- */

/* Rows of q that a kernel numbers in 31 bits are checked by op_begin; here all else that the declaration does not say.
 * `floats` of workspace a block; *blocks: as many as there is work and room for. */
template <class T, class Args>
static Err delta_call(Stream *s, const Args *a, Tensor states, int64_t floats, DeltaCall<T> *c, unsigned *blocks)
{
    const int64_t B = a->q.dim[0], rows = a->q.dim[1], K = a->q.dim[2], V = a->v.dim[2];
    const int64_t windows = ceil_div(rows, DELTA_WINDOW), most = s->dev->workspace_bytes / (floats * 4);
    if (K < 1 || V % K)
        return err_set(ERR_SHAPE, "delta: %lld value heads for %lld key heads", static_cast<long long>(V),
                       static_cast<long long>(K));
    if (a->first % DELTA_WINDOW)
        return err_set(ERR_SHAPE, "delta: rows from position %lld on, which begins no window",
                       static_cast<long long>(a->first));
    if (states.data && states.dim[0] != B * windows * V)
        return err_set(ERR_SHAPE, "delta: %lld states for %lld windows of %lld samples and %lld heads",
                       static_cast<long long>(states.dim[0]), static_cast<long long>(windows),
                       static_cast<long long>(B), static_cast<long long>(V));
    if (most < 1)
        return err_set(ERR_CONFIG, "the delta rule needs %lld bytes of workspace, there are %lld",
                       static_cast<long long>(floats * 4), static_cast<long long>(s->dev->workspace_bytes));
    *c = { grouped_rows_of<const T>(a->q),
           grouped_rows_of<const T>(a->k),
           grouped_rows_of<const T>(a->v),
           rows_of<const float>(a->g),
           rows_of<const float>(a->beta),
           data_of<const int32_t>(a->doc),
           a->doc.ld,
           a->first,
           B,
           rows,
           static_cast<int>(K),
           static_cast<int>(V),
           static_cast<int>(a->q.dim[3]),
           static_cast<int>(a->v.dim[3]),
           static_cast<int>(V / K),
           static_cast<int>(windows),
           reinterpret_cast<float *>(s->dev->workspace),
           floats };
    *blocks = grid_blocks(B * K < most ? B * K : most);
    return ERR_OK;
}

#endif
