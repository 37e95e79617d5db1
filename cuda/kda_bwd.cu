/*
 * Kimi Delta Attention's rule, backward; kda.cuh. What is computed, and in which order, stands in src/cpu/kda_bwd.c.
 *
 * Mapping   as the forward's, windows and runs descending.
 * Work      7 n D E + 3 n n (D + E) multiplications and n n D / 4 + 18 n D exponentials a run of n rows, from L2.
 * Needs     workspace for at least one block: 1.1 MiB of heads of 128.
 */
#include "device/scan_room.h"
#include "kda.cuh"

template <class T> struct KdaBwd {
    DeltaCall<T> c;
    GroupedRows<T> dq, dk, dv;
    GroupedRows<const T> go;
    Rows<float> dg, dbeta, dbefore; /* data of dbefore: or NULL */
    Rows<const float> dafter, states;
};

/* Beside KdaParts: the names of src/cpu/kda_bwd.c. */
struct KdaBack {
    float *dq, *dk, *dg, *product, *dread, *dkk, *go, *dwrite, *derror, *state, *dstate;
};

__device__ __forceinline__ KdaBack kda_back(float *at, int D, int E)
{
    const int64_t keys = DELTA_WINDOW * static_cast<int64_t>(D), rows = DELTA_WINDOW * static_cast<int64_t>(E);
    KdaBack k;
    k.dq = scan_take(at, keys), k.dk = scan_take(at, keys), k.dg = scan_take(at, keys);
    k.product = scan_take(at, keys);
    k.dread = scan_take(at, DELTA_SQUARE), k.dkk = scan_take(at, DELTA_SQUARE);
    k.go = scan_take(at, rows), k.dwrite = scan_take(at, rows), k.derror = scan_take(at, rows);
    k.state = scan_take(at, static_cast<int64_t>(D) * E), k.dstate = at;
    return k;
}

/* A thread has a column. dx += e y; dg[m] += the sum over rows i >= m of x e y. */
__device__ __forceinline__ void since_backward(float *dx, float *dg, const float *x, const float *e, const float *y,
                                               int n, int D)
{
    for (int d = threadIdx.x; d < D; d += SCAN_THREADS) {
        float sum = 0;
        for (int i = n - 1; i >= 0; i--) {
            const float t = e[i * D + d] * y[i * D + d];
            dx[i * D + d] += t;
            dg[i * D + d] += sum = fmaf(x[i * D + d], t, sum);
        }
    }
    __syncthreads();
}

/* The same, but dg[m] += the sum over rows j < m. */
__device__ __forceinline__ void until_backward(float *dx, float *dg, const float *x, const float *e, const float *y,
                                               int n, int D)
{
    for (int d = threadIdx.x; d < D; d += SCAN_THREADS) {
        float sum = 0;
        for (int j = 0; j < n; j++) {
            const float t = e[j * D + d] * y[j * D + d];
            dx[j * D + d] += t;
            dg[j * D + d] += sum;
            sum = fmaf(x[j * D + d], t, sum);
        }
    }
    __syncthreads();
}

/* dwrite, derror; and of each pair of rows dread and dkk. */
template <class T>
__device__ __forceinline__ void back_writes(const KdaBwd<T> &f, const KdaParts &p, const KdaBack &k, const ScanRun &r)
{
    const int D = f.c.D, E = f.c.E, n = r.n;
    const Matrix across = { p.write, 1, E };
    if (r.last) {
        kda_times(p.k_rows, p.k, p.last, n, D);
        scan_product(k.dwrite, E, { p.k_rows, D, 1 }, { k.dstate, E, 1 }, n, E, D, false);
    } else {
        scan_clear(k.dwrite, n * static_cast<int64_t>(E));
    }
    delta_solve_back(k.dwrite, k.derror, p.read, p.low, p.beta, k.go, n, E);
    scan_product(k.dread, DELTA_WINDOW, { k.go, E, 1 }, across, n, n, E, false);
    scan_product(k.dkk, DELTA_WINDOW, { k.derror, E, 1 }, across, n, n, E, false);
    for (int i = threadIdx.x; i < DELTA_SQUARE; i += SCAN_THREADS) k.dkk[i] = -k.dkk[i];
    __syncthreads();
}

/* Rows of the block that begins with row s with those of the blocks before it. */
__device__ __forceinline__ void back_before(const KdaParts &p, const KdaBack &k, int s, int m, int D)
{
    const int at = s * D, square = s * DELTA_WINDOW;
    kda_times(p.sums, p.k, p.until, s, D);
    scan_product(k.product, D, { k.dread + square, DELTA_WINDOW, 1 }, { p.sums, D, 1 }, m, D, s, false);
    since_backward(k.dq + at, k.dg + at, p.q + at, p.since, k.product, m, D);
    scan_product(k.product, D, { k.dkk + square, DELTA_WINDOW, 1 }, { p.sums, D, 1 }, m, D, s, false);
    since_backward(k.dk + at, k.dg + at, p.k + at, p.since, k.product, m, D);
    kda_times(p.q_rows, p.q + at, p.since, m, D);
    kda_times(p.k_rows, p.k + at, p.since, m, D);
    scan_product(k.product, D, { k.dread + square, 1, DELTA_WINDOW }, { p.q_rows, D, 1 }, s, D, m, false);
    scan_product(k.product, D, { k.dkk + square, 1, DELTA_WINDOW }, { p.k_rows, D, 1 }, s, D, m, true);
    until_backward(k.dk, k.dg, p.k, p.until, k.product, s, D);
}

/* Rows of the block with each other; a thread has a column. */
__device__ __forceinline__ void back_inside(const KdaParts &p, const KdaBack &k, int s, int m, int D)
{
    for (int d = threadIdx.x; d < D; d += SCAN_THREADS) {
        float *sum = p.sums + d; /* of row j at [j * D] */
        for (int i = s; i < s + m; i++) {
            const float *dread = k.dread + i * DELTA_WINDOW, *dkk = k.dkk + i * DELTA_WINDOW;
            const float q = p.q[i * D + d], key = p.k[i * D + d], g = p.g[i * D + d];
            float run = 0, dq = fmaf(dread[i], key, k.dq[i * D + d]), dk = fmaf(dread[i], q, k.dk[i * D + d]);
            for (int j = s; j < i; j++) {
                sum[j * D] += g;
                const float e = expf(sum[j * D]), x = p.k[j * D + d], t = e * fmaf(dread[j], q, dkk[j] * key);
                dq = fmaf(dread[j], e * x, dq);
                dk = fmaf(dkk[j], e * x, dk);
                k.dk[j * D + d] += t;
                run = fmaf(x, t, run);
                k.dg[(j + 1) * D + d] += run;
            }
            sum[i * D] = 0;
            k.dq[i * D + d] = dq, k.dk[i * D + d] = dk;
        }
    }
    __syncthreads();
}

/* Through the state behind the run, and the one before it; dstate becomes the gradient of the latter. */
template <class T>
__device__ __forceinline__ void back_state(const KdaBwd<T> &f, const KdaParts &p, const KdaBack &k, const ScanRun &r)
{
    const int D = f.c.D, E = f.c.E, n = r.n;
    const Matrix turned = { k.state, 1, E };
    if (r.last) {
        scan_product(k.product, D, { p.write, E, 1 }, { k.dstate, 1, E }, n, D, E, false);
        until_backward(k.dk, k.dg, p.k, p.last, k.product, n, D);
    }
    if (r.begins) return scan_clear(k.dstate, static_cast<int64_t>(D) * E);
    scan_product(k.product, D, { k.go, E, 1 }, turned, n, D, E, false);
    since_backward(k.dq, k.dg, p.q, p.from, k.product, n, D);
    scan_product(k.product, D, { k.derror, E, 1 }, turned, n, D, E, false);
    for (int i = threadIdx.x; i < n * D; i += SCAN_THREADS) k.product[i] = -k.product[i];
    __syncthreads();
    since_backward(k.dk, k.dg, p.k, p.from, k.product, n, D);
    for (int d = threadIdx.x; d < D && r.last; d += SCAN_THREADS) {
        const float left = p.from[(n - 1) * D + d];
        float sum = 0;
        for (int e = 0; e < E; e++) {
            sum = fmaf(k.dstate[d * E + e], k.state[d * E + e], sum);
            k.dstate[d * E + e] *= left;
        }
        for (int m = 0; m < n; m++) k.dg[m * D + d] += left * sum;
    }
    __syncthreads();
    kda_times(p.q_rows, p.q, p.from, n, D);
    scan_product(k.dstate, E, { p.q_rows, 1, D }, { k.go, E, 1 }, D, E, n, true);
    kda_times(p.k_rows, p.k, p.from, n, D, -1);
    scan_product(k.dstate, E, { p.k_rows, 1, D }, { k.derror, E, 1 }, D, E, n, true);
}

/* dg, and dbeta, of which a thread has a row. */
template <class T>
__device__ __forceinline__ void store_gates(const KdaBwd<T> &f, const KdaParts &p, const KdaBack &k, const ScanRun &r,
                                            int head)
{
    const DeltaCall<T> &c = f.c;
    for (int i = threadIdx.x; i < r.n * c.D; i += SCAN_THREADS)
        f.dg.at((r.b * c.rows.T + r.row + i / c.D) * c.V + head)[i % c.D] = k.dg[i];
    for (int i = threadIdx.x; i < r.n; i += SCAN_THREADS)
        f.dbeta.at(r.b * c.rows.T + r.row + i)[head] = row_dot(k.dwrite + i * c.E, p.error + i * c.E, c.E);
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void back_run(const KdaBwd<T> &f, const KdaParts &p, const KdaBack &k, const ScanRun &r,
                                         int head)
{
    const DeltaCall<T> &c = f.c;
    const int64_t row = ((r.b * c.windows + r.row / DELTA_WINDOW) * c.V + head) * c.D;
    if (!r.begins) scan_load_state(k.state, f.states, row, c.D, c.E);
    kda_head(c, p, r, head, k.state);
    scan_load(k.go, f.go, r, c.rows.T, c.V, head, c.E);
    scan_clear(k.dq, 3 * DELTA_WINDOW * static_cast<int64_t>(c.D)); /* and dk, dg */
    back_writes(f, p, k, r);
    for (int s = 0; s < r.n; s += KDA_ROWS) {
        const int m = r.n - s < KDA_ROWS ? r.n - s : KDA_ROWS;
        kda_block(p, s, m, c.D);
        if (s) back_before(p, k, s, m, c.D);
        back_inside(p, k, s, m, c.D);
    }
    back_state(f, p, k, r);
    scan_store(f.dq, k.dq, r, c.rows.T, c.V, head, c.D);
    scan_store(f.dk, k.dk, r, c.rows.T, c.V, head, c.D);
    scan_store(f.dv, k.derror, r, c.rows.T, c.V, head, c.E);
    store_gates(f, p, k, r, head);
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) kda_bwd_kernel(KdaBwd<T> f)
{
    const DeltaCall<T> &c = f.c;
    float *at = c.workspace + blockIdx.x * c.floats;
    const KdaParts p = kda_parts(c, at);
    const KdaBack k = kda_back(at, c.D, c.E);
    for (int64_t item = blockIdx.x; item < c.rows.B * c.V; item += gridDim.x) {
        const int64_t b = item / c.V;
        scan_load_state(k.dstate, f.dafter, item * c.D, c.D, c.E);
        for (int64_t end = c.rows.T; end > 0;) {
            const ScanRun r = c.rows.run_before(b, end);
            back_run(f, p, k, r, static_cast<int>(item % c.V));
            end = r.row;
        }
        if (f.dbefore.data) scan_store_state(f.dbefore, k.dstate, item * c.D, c.D, c.E);
    }
}

template <class T> static Err launch_bwd(Stream *s, const kda_bwd_args *a)
{
    KdaBwd<T> f;
    unsigned blocks = 0;
    TRY(delta_call(s, KDA_NAME, a, a->states, kda_room_cuda(a->q.dim[3], a->v.dim[3]) / 4, &f.c, &blocks));
    f.dq = grouped_rows_of<T>(a->dq), f.dk = grouped_rows_of<T>(a->dk), f.dv = grouped_rows_of<T>(a->dv);
    f.go = grouped_rows_of<const T>(a->go);
    f.dg = rows_of<float>(a->dg), f.dbeta = rows_of<float>(a->dbeta), f.dbefore = rows_of<float>(a->dbefore);
    f.dafter = rows_of<const float>(a->dafter), f.states = rows_of<const float>(a->states);
    LAUNCH((kda_bwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    return ERR_OK;
}

extern "C" Err cuda_kda_bwd(Stream *s, const kda_bwd_args *a)
{
    DISPATCH(a->q.dtype, return launch_bwd<T>(s, a));
    return ERR_OK;
}
