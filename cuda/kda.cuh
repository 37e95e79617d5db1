/*
 * Shared parts of the kernels of Kimi Delta Attention's rule (kda_fwd.cu, kda_bwd.cu): the algorithm of src/cpu/kda.h
 * and docs/determinism.md, with the same names, a block of SCAN_THREADS threads for a head of a sample. What it takes
 * from the gated delta rule, and how plain it is: delta.cuh, scan.cuh.
 */
#ifndef MEGATRAIN_CUDA_KDA_CUH
#define MEGATRAIN_CUDA_KDA_CUH

#include "delta.cuh"

#define KDA_NAME "Kimi's delta rule"

constexpr int KDA_ROWS = 16; /* of a block of rows */

/* A thread block's part of the workspace: the members of src/cpu/kda.h. */
struct KdaParts {
    float *q, *k, *g, *from, *last, *since, *until, *q_rows, *k_rows; /* [rows][D] */
    float *sums; /* inside a block, g from behind a row on; of rows before it, k until it begins */
    float *low, *read, *beta, *error, *write, *x;
};

__host__ __device__ __forceinline__ int64_t kda_floats(int D, int E)
{
    return 10 * DELTA_WINDOW * static_cast<int64_t>(D) + 2 * DELTA_SQUARE + DELTA_WINDOW +
           3 * DELTA_WINDOW * static_cast<int64_t>(E);
}

template <class T> __device__ __forceinline__ KdaParts kda_parts(const DeltaCall<T> &c, float *&at)
{
    const int64_t keys = DELTA_WINDOW * static_cast<int64_t>(c.D), rows = DELTA_WINDOW * static_cast<int64_t>(c.E);
    KdaParts p;
    p.q = scan_take(at, keys), p.k = scan_take(at, keys), p.g = scan_take(at, keys);
    p.from = scan_take(at, keys), p.last = scan_take(at, keys), p.since = scan_take(at, keys);
    p.until = scan_take(at, keys), p.q_rows = scan_take(at, keys), p.k_rows = scan_take(at, keys);
    p.sums = scan_take(at, keys);
    p.low = scan_take(at, DELTA_SQUARE), p.read = scan_take(at, DELTA_SQUARE), p.beta = scan_take(at, DELTA_WINDOW);
    p.error = scan_take(at, rows), p.write = scan_take(at, rows), p.x = scan_take(at, rows);
    return p;
}

/* y[i] = factor * x[i] * e[i] of n rows of D. */
__device__ __forceinline__ void kda_times(float *y, const float *x, const float *e, int n, int D, float factor = 1)
{
    for (int i = threadIdx.x; i < n * D; i += SCAN_THREADS) y[i] = factor * x[i] * e[i];
    __syncthreads();
}

/* A thread has a column: e[i] = exp(the sum of g from the first of n rows to i). */
__device__ __forceinline__ void fade_since(float *e, const float *g, int n, int D)
{
    for (int d = threadIdx.x; d < D; d += SCAN_THREADS) {
        float sum = 0;
        for (int i = 0; i < n; i++) e[i * D + d] = expf(sum += g[i * D + d]);
    }
    __syncthreads();
}

/* e[j] = exp(the sum of g behind row j up to the last of n rows). */
__device__ __forceinline__ void fade_until(float *e, const float *g, int n, int D)
{
    for (int d = threadIdx.x; d < D; d += SCAN_THREADS) {
        float sum = 0;
        for (int j = n - 1; j >= 0; j--) {
            e[j * D + d] = expf(sum);
            sum += g[j * D + d];
        }
    }
    __syncthreads();
}

/* Rows of the block that begins with row s with those of the blocks before it. */
__device__ __forceinline__ void kda_before(const KdaParts &p, int s, int m, int D)
{
    kda_times(p.q_rows, p.q + s * D, p.since, m, D);
    kda_times(p.k_rows, p.k + s * D, p.since, m, D, -1);
    kda_times(p.sums, p.k, p.until, s, D);
    const Matrix across = { p.sums, 1, D };
    scan_product(p.read + s * DELTA_WINDOW, DELTA_WINDOW, { p.q_rows, D, 1 }, across, m, s, D, false);
    scan_product(p.low + s * DELTA_WINDOW, DELTA_WINDOW, { p.k_rows, D, 1 }, across, m, s, D, false);
}

/* Rows of the block with each other; a thread has a row j and those behind it. */
__device__ __forceinline__ void kda_inside(const KdaParts &p, int s, int m, int D)
{
    for (int j = s + static_cast<int>(threadIdx.x); j < s + m; j += SCAN_THREADS) {
        float *sum = p.sums + j * D;
        for (int i = j; i < s + m; i++) {
            float low = 0, read = 0;
            for (int d = 0; d < D; d++) {
                sum[d] = i == j ? 0.0f : sum[d] + p.g[i * D + d];
                const float x = p.k[j * D + d] * expf(sum[d]);
                low = fmaf(-p.k[i * D + d], x, low);
                read = fmaf(p.q[i * D + d], x, read);
            }
            p.read[i * DELTA_WINDOW + j] = read;
            if (i > j) p.low[i * DELTA_WINDOW + j] = low;
        }
    }
    __syncthreads();
}

/* `since` and `until` of the block of m rows that begins with row s. */
__device__ __forceinline__ void kda_block(const KdaParts &p, int s, int m, int D)
{
    fade_since(p.since, p.g + s * D, m, D);
    fade_until(p.until, p.g, s, D);
}

template <class T>
__device__ __forceinline__ void kda_load(const DeltaCall<T> &c, const KdaParts &p, const ScanRun &r, int head)
{
    scan_load(p.q, c.q, r, c.rows.T, c.V, head, c.D);
    scan_load(p.k, c.k, r, c.rows.T, c.V, head, c.D);
    scan_load(p.error, c.v, r, c.rows.T, c.V, head, c.E);
    for (int i = threadIdx.x; i < r.n * c.D; i += SCAN_THREADS)
        p.g[i] = c.g.at((r.b * c.rows.T + r.row + i / c.D) * c.V + head)[i % c.D];
    scan_load_column(p.beta, c.beta, r, c.rows.T, head);
    scan_clear(p.low, 2 * DELTA_SQUARE); /* and read */
}

template <class T>
__device__ __forceinline__ void kda_head(const DeltaCall<T> &c, const KdaParts &p, const ScanRun &r, int head,
                                         const float *state)
{
    const int D = c.D, E = c.E;
    kda_load(c, p, r, head);
    fade_since(p.from, p.g, r.n, D);
    fade_until(p.last, p.g, r.n, D);
    for (int s = 0; s < r.n; s += KDA_ROWS) {
        const int m = r.n - s < KDA_ROWS ? r.n - s : KDA_ROWS;
        kda_block(p, s, m, D);
        kda_before(p, s, m, D);
        kda_inside(p, s, m, D);
    }
    if (!r.begins) {
        kda_times(p.k_rows, p.k, p.from, r.n, D);
        scan_product(p.x, E, { p.k_rows, D, 1 }, { state, E, 1 }, r.n, E, D, false);
        for (int i = threadIdx.x; i < r.n * E; i += SCAN_THREADS) p.error[i] -= p.x[i];
        __syncthreads();
    }
    delta_solve(p.error, p.write, p.low, p.beta, r.n, E);
}

/* Rows of a state, each times its column's factor. */
__device__ __forceinline__ void kda_fade(float *state, const float *left, int D, int E)
{
    for (int i = threadIdx.x; i < D * E; i += SCAN_THREADS) state[i] *= left[i / E];
    __syncthreads();
}

#endif
