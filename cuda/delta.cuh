/*
 * Shared parts of the gated delta rule's kernels (delta_fwd.cu, delta_bwd.cu): the algorithm of src/cpu/delta.h, with
 * the same names, a block for a key head of a sample; scan.cuh.
 */
#ifndef MEGATRAIN_CUDA_DELTA_CUH
#define MEGATRAIN_CUDA_DELTA_CUH

#include "scan.cuh"

#define DELTA_NAME "the delta rule"

constexpr int DELTA_SQUARE = DELTA_WINDOW * DELTA_WINDOW;

/* One call. */
template <class T> struct DeltaCall {
    GroupedRows<const T> q, k, v;
    Rows<const float> g, beta;
    ScanRows rows;
    int K, V, D, E, group, windows;
    float *workspace;
    int64_t floats; /* of it that a block has */
};

template <class T> struct DeltaFwd {
    DeltaCall<T> c;
    GroupedRows<T> o;
    Rows<float> states, after; /* data: or NULL */
    Rows<const float> before;
};

template <class T> struct DeltaBwd {
    DeltaCall<T> c;
    GroupedRows<T> dq, dk, dv;
    GroupedRows<const T> go;
    Rows<float> dg, dbeta, dbefore; /* data of dbefore: or NULL */
    Rows<const float> dafter, states;
};

/* Tensor cores do it if they take the call: *done; else nothing happens. */
Err delta_tiles_fwd(Stream *s, const delta_fwd_args *a, const DeltaFwd<bf16> &f, bool *done);
Err delta_tiles_bwd(Stream *s, const delta_bwd_args *a, const DeltaBwd<bf16> &f, bool *done);

/* A block's part of the workspace: the members of src/cpu/delta.h. */
struct DeltaParts {
    float *q, *k, *kk, *qk, *decay, *low, *read, *from, *g, *beta, *error, *write, *x;
};

__host__ __device__ __forceinline__ int64_t delta_floats(int D, int E)
{
    return 2 * DELTA_WINDOW * static_cast<int64_t>(D) + 5 * DELTA_SQUARE + 3 * DELTA_WINDOW +
           3 * DELTA_WINDOW * static_cast<int64_t>(E);
}

template <class T> __device__ __forceinline__ DeltaParts delta_parts(const DeltaCall<T> &c, float *&at)
{
    const int64_t keys = DELTA_WINDOW * static_cast<int64_t>(c.D), rows = DELTA_WINDOW * static_cast<int64_t>(c.E);
    DeltaParts p;
    p.q = scan_take(at, keys), p.k = scan_take(at, keys);
    p.kk = scan_take(at, DELTA_SQUARE), p.qk = scan_take(at, DELTA_SQUARE), p.decay = scan_take(at, DELTA_SQUARE);
    p.low = scan_take(at, DELTA_SQUARE), p.read = scan_take(at, DELTA_SQUARE);
    p.from = scan_take(at, DELTA_WINDOW), p.g = scan_take(at, DELTA_WINDOW), p.beta = scan_take(at, DELTA_WINDOW);
    p.error = scan_take(at, rows), p.write = scan_take(at, rows), p.x = scan_take(at, rows);
    return p;
}

template <class T>
__device__ __forceinline__ void delta_keys(const DeltaCall<T> &c, const DeltaParts &p, const ScanRun &r, int key_head)
{
    scan_load(p.q, c.q, r, c.rows.T, c.K, key_head, c.D);
    scan_load(p.k, c.k, r, c.rows.T, c.K, key_head, c.D);
    const Matrix across = { p.k, 1, c.D };
    scan_product(p.kk, DELTA_WINDOW, { p.k, c.D, 1 }, across, r.n, r.n, c.D, false);
    scan_product(p.qk, DELTA_WINDOW, { p.q, c.D, 1 }, across, r.n, r.n, c.D, false);
}

/* Decays and what goes by them. */
template <class T>
__device__ __forceinline__ void delta_decays(const DeltaCall<T> &c, const DeltaParts &p, const ScanRun &r, int head)
{
    scan_load_column(p.g, c.g, r, c.rows.T, head);
    scan_load_column(p.beta, c.beta, r, c.rows.T, head);
    scan_decays(p.decay, p.from, p.g, r.n, DELTA_WINDOW);
    scan_read(p.read, p.qk, p.decay, r.n, DELTA_WINDOW);
    for (int t = threadIdx.x; t < r.n * r.n; t += SCAN_THREADS) {
        const int i = t / r.n, j = t % r.n, at = i * DELTA_WINDOW + j;
        p.low[at] = i <= j ? 0.0f : -(p.kk[at] * p.decay[at]);
    }
    __syncthreads();
}

/* error[i] += the sum over j < i of low[i][j] write[j], and write[i] = beta[i] error[i]: i ascending; a thread has a
 * column. */
__device__ __forceinline__ void delta_solve(float *error, float *write, const float *low, const float *beta, int n,
                                            int E)
{
    for (int e = threadIdx.x; e < E; e += SCAN_THREADS)
        for (int i = 0; i < n; i++) {
            float x = error[i * E + e];
            for (int j = 0; j < i; j++) x = fmaf(low[i * DELTA_WINDOW + j], write[j * E + e], x);
            error[i * E + e] = x;
            write[i * E + e] = beta[i] * x;
        }
    __syncthreads();
}

/* dwrite[j] += the sum over i >= j of read[i][j] go[i], and that over i > j, descending, of low[i][j] derror[i];
 * derror[j] = beta[j] dwrite[j]: j descending; a thread has a column. */
__device__ __forceinline__ void delta_solve_back(float *dwrite, float *derror, const float *read, const float *low,
                                                 const float *beta, const float *go, int n, int E)
{
    for (int e = threadIdx.x; e < E; e += SCAN_THREADS)
        for (int j = n - 1; j >= 0; j--) {
            float x = dwrite[j * E + e];
            for (int i = j; i < n; i++) x = fmaf(read[i * DELTA_WINDOW + j], go[i * E + e], x);
            for (int i = n - 1; i > j; i--) x = fmaf(low[i * DELTA_WINDOW + j], derror[i * E + e], x);
            dwrite[j * E + e] = x;
            derror[j * E + e] = beta[j] * x;
        }
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void delta_head(const DeltaCall<T> &c, const DeltaParts &p, const ScanRun &r, int head,
                                           const float *state)
{
    delta_decays(c, p, r, head);
    scan_load(p.error, c.v, r, c.rows.T, c.V, head, c.E);
    if (!r.begins) scan_product(p.x, c.E, { p.k, c.D, 1 }, { state, c.E, 1 }, r.n, c.E, c.D, false);
    if (!r.begins) scan_add(p.error, p.x, p.from, -1, r.n, c.E);
    delta_solve(p.error, p.write, p.low, p.beta, r.n, c.E);
}

/* ---- launching ---- */

/* `floats` of workspace a block; *blocks: as many as there is work and room for. */
template <class T, class Args>
static Err delta_call(Stream *s, const char *name, const Args *a, Tensor states, int64_t floats, DeltaCall<T> *c,
                      unsigned *blocks)
{
    const int64_t K = a->q.dim[2], V = a->v.dim[2];
    const ScanRows rows = scan_rows_of(a->q, a->doc, a->first, DELTA_WINDOW);
    TRY(scan_check(name, rows, K, V, states));
    *c = { grouped_rows_of<const T>(a->q),
           grouped_rows_of<const T>(a->k),
           grouped_rows_of<const T>(a->v),
           rows_of<const float>(a->g),
           rows_of<const float>(a->beta),
           rows,
           static_cast<int>(K),
           static_cast<int>(V),
           static_cast<int>(a->q.dim[3]),
           static_cast<int>(a->v.dim[3]),
           static_cast<int>(V / K),
           static_cast<int>(ceil_div(rows.T, DELTA_WINDOW)),
           reinterpret_cast<float *>(s->dev->workspace),
           floats };
    return scan_blocks(s, name, rows.B * K, floats, blocks);
}

#endif
