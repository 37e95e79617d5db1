/*
 * The gated delta rule, backward; delta.cuh. What is computed, and in which order, stands in src/cpu/delta_bwd.c.
 *
 * Mapping   as the forward's, windows and runs descending.
 * Work      7 n D E + 3.5 n n E multiplications a run of n rows and value head, from L2: far from the machine's.
 * Needs     workspace for at least one block: 1.3 MiB of heads of 128.
 */
#include <type_traits>

#include "delta.cuh"
#include "device/scan_room.h"

/* Beside DeltaParts: the names of src/cpu/delta_bwd.c. */
struct BackParts {
    float *dqk, *dkk, *both, *dq, *dk, *scaled, *product, *go, *dwrite, *derror, *dfrom, *dlast, *state, *dstate;
};

__device__ __forceinline__ BackParts back_parts(float *at, int D, int E)
{
    const int64_t keys = DELTA_WINDOW * static_cast<int64_t>(D), rows = DELTA_WINDOW * static_cast<int64_t>(E);
    BackParts p;
    p.dqk = scan_take(at, DELTA_SQUARE), p.dkk = scan_take(at, DELTA_SQUARE), p.both = scan_take(at, DELTA_SQUARE);
    p.dq = scan_take(at, keys), p.dk = scan_take(at, keys);
    p.scaled = scan_take(at, keys), p.product = scan_take(at, keys);
    p.go = scan_take(at, rows), p.dwrite = scan_take(at, rows), p.derror = scan_take(at, rows);
    p.dfrom = scan_take(at, DELTA_WINDOW), p.dlast = scan_take(at, DELTA_WINDOW);
    p.state = scan_take(at, static_cast<int64_t>(D) * E), p.dstate = at;
    return p;
}

/* Gradients of what the rows wrote: dwrite, derror and dlast. */
template <class T>
__device__ __forceinline__ void back_writes(const DeltaBwd<T> &f, const DeltaParts &p, const BackParts &k,
                                            const ScanRun &r, const float *dstate)
{
    const int E = f.c.E, n = r.n;
    const float *last = p.decay + (n - 1) * DELTA_WINDOW;
    if (r.last) {
        scan_product(k.dwrite, E, { p.k, f.c.D, 1 }, { dstate, E, 1 }, n, E, f.c.D, false);
        for (int j = threadIdx.x; j < n; j += SCAN_THREADS) k.dlast[j] = row_dot(p.write + j * E, k.dwrite + j * E, E);
        __syncthreads();
    } else {
        scan_clear(k.dwrite, n * static_cast<int64_t>(E));
        scan_clear(k.dlast, n);
    }
    scan_scale(k.dwrite, k.dwrite, last, n, E);
    delta_solve_back(k.dwrite, k.derror, p.read, p.low, p.beta, k.go, n, E);
}

/* Gradients of what the rows gave to each other: the group's dqk and dkk, and decay times its gradient. */
__device__ __forceinline__ void back_pairs(const DeltaParts &p, const BackParts &k, int n, int E)
{
    for (int t = threadIdx.x; t < n * n; t += SCAN_THREADS) {
        const int i = t / n, j = t % n, at = i * DELTA_WINDOW + j;
        k.both[at] = 0;
        if (j > i) continue;
        const float read = row_dot(k.go + i * E, p.write + j * E, E);
        const float low = j < i ? row_dot(k.derror + i * E, p.write + j * E, E) : 0.0f;
        k.dqk[at] = fmaf(read, p.decay[at], k.dqk[at]);
        k.dkk[at] = fmaf(-low, p.decay[at], k.dkk[at]);
        if (j < i) k.both[at] = fmaf(low, p.low[at], read * p.read[at]);
    }
    __syncthreads();
}

/* Gradients for the keys and decays through the state before the run, and for the keys through the one behind it. */
template <class T>
__device__ __forceinline__ void back_keys(const DeltaBwd<T> &f, const DeltaParts &p, const BackParts &k,
                                          const ScanRun &r, const float *dstate)
{
    const int D = f.c.D, E = f.c.E, n = r.n;
    const Matrix turned = { k.state, 1, E };
    scan_clear(k.dfrom, n);
    if (!r.begins) {
        scan_product(k.product, D, { k.go, E, 1 }, turned, n, D, E, false);
        for (int i = threadIdx.x; i < n; i += SCAN_THREADS) k.dfrom[i] = row_dot(p.q + i * D, k.product + i * D, D);
        scan_add(k.dq, k.product, p.from, 1, n, D);
        scan_product(k.product, D, { k.derror, E, 1 }, turned, n, D, E, false);
        for (int i = threadIdx.x; i < n; i += SCAN_THREADS)
            k.dfrom[i] = p.from[i] * (k.dfrom[i] - row_dot(p.k + i * D, k.product + i * D, D));
        scan_add(k.dk, k.product, p.from, -1, n, D);
    }
    if (!r.last) return;
    scan_product(k.product, D, { p.write, E, 1 }, { dstate, 1, E }, n, D, E, false);
    scan_add(k.dk, k.product, p.decay + (n - 1) * DELTA_WINDOW, 1, n, D);
}

/* dstate from that behind the run to that before it. */
template <class T>
__device__ __forceinline__ void back_state(const DeltaBwd<T> &f, const DeltaParts &p, const BackParts &k,
                                           const ScanRun &r, float *dstate, float *part)
{
    const int D = f.c.D, E = f.c.E, n = r.n;
    if (r.begins) return scan_clear(dstate, static_cast<int64_t>(D) * E);
    if (r.last) {
        float sum = 0;
        for (int i = threadIdx.x; i < D * E; i += SCAN_THREADS) sum = fmaf(dstate[i], k.state[i], sum);
        sum = block_sum(sum, part);
        if (threadIdx.x == 0) k.dfrom[n - 1] += p.from[n - 1] * sum;
        for (int i = threadIdx.x; i < D * E; i += SCAN_THREADS) dstate[i] *= p.from[n - 1];
    }
    for (int i = threadIdx.x; i < n * D; i += SCAN_THREADS) k.scaled[i] = p.from[i / D] * p.q[i];
    __syncthreads();
    scan_product(dstate, E, { k.scaled, 1, D }, { k.go, E, 1 }, D, E, n, true);
    for (int i = threadIdx.x; i < n * D; i += SCAN_THREADS) k.scaled[i] = -p.from[i / D] * p.k[i];
    __syncthreads();
    scan_product(dstate, E, { k.scaled, 1, D }, { k.derror, E, 1 }, D, E, n, true);
}

/* dg and dbeta; a thread has a row. */
template <class T>
__device__ __forceinline__ void back_gates(const DeltaBwd<T> &f, const DeltaParts &p, const BackParts &k,
                                           const ScanRun &r, int head)
{
    const int n = r.n, E = f.c.E, m = threadIdx.x;
    float *last = k.both + (n - 1) * DELTA_WINDOW;
    if (m < n - 1) last[m] += p.decay[(n - 1) * DELTA_WINDOW + m] * k.dlast[m];
    __syncthreads();
    if (m < n) {
        const int64_t row = r.b * f.c.rows.T + r.row + m;
        f.dg.at(row)[head] = scan_gate(k.both, k.dfrom, m, n, DELTA_WINDOW);
        f.dbeta.at(row)[head] = row_dot(k.dwrite + m * E, p.error + m * E, E);
    }
    __syncthreads();
}

template <class T>
__device__ __forceinline__ void back_head(const DeltaBwd<T> &f, const DeltaParts &p, const BackParts &k,
                                          const ScanRun &r, int head, float *dstate, float *part)
{
    const DeltaCall<T> &c = f.c;
    const int64_t row = ((r.b * c.windows + r.row / DELTA_WINDOW) * c.V + head) * c.D;
    if (!r.begins) scan_load_state(k.state, f.states, row, c.D, c.E);
    delta_head(c, p, r, head, k.state);
    scan_load(k.go, f.go, r, c.rows.T, c.V, head, c.E);
    back_writes(f, p, k, r, dstate);
    scan_store(f.dv, k.derror, r, c.rows.T, c.V, head, c.E);
    back_pairs(p, k, r.n, c.E);
    back_keys(f, p, k, r, dstate);
    back_state(f, p, k, r, dstate, part);
    back_gates(f, p, k, r, head);
}

template <class T>
__device__ __forceinline__ void back_run(const DeltaBwd<T> &f, const DeltaParts &p, const BackParts &k,
                                         const ScanRun &r, int key_head, float *part)
{
    const DeltaCall<T> &c = f.c;
    const int n = r.n, D = c.D;
    const int64_t size = static_cast<int64_t>(D) * c.E;
    delta_keys(c, p, r, key_head);
    scan_clear(k.dqk, DELTA_SQUARE), scan_clear(k.dkk, DELTA_SQUARE);
    scan_clear(k.dq, n * static_cast<int64_t>(D)), scan_clear(k.dk, n * static_cast<int64_t>(D));
    for (int j = 0; j < c.group; j++) back_head(f, p, k, r, key_head * c.group + j, k.dstate + j * size, part);
    for (int t = threadIdx.x; t < n * n; t += SCAN_THREADS)
        if (t % n < t / n) k.dkk[t % n * DELTA_WINDOW + t / n] = k.dkk[t / n * DELTA_WINDOW + t % n];
    __syncthreads();
    scan_product(k.dq, D, { k.dqk, DELTA_WINDOW, 1 }, { p.k, D, 1 }, n, D, n, true);
    scan_product(k.dk, D, { k.dkk, DELTA_WINDOW, 1 }, { p.k, D, 1 }, n, D, n, true);
    scan_product(k.dk, D, { k.dqk, 1, DELTA_WINDOW }, { p.q, D, 1 }, n, D, n, true);
    scan_store(f.dq, k.dq, r, c.rows.T, c.K, key_head, D);
    scan_store(f.dk, k.dk, r, c.rows.T, c.K, key_head, D);
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) delta_bwd_kernel(DeltaBwd<T> f)
{
    const DeltaCall<T> &c = f.c;
    SHARED(float, part, [SCAN_THREADS / WARP]);
    float *at = c.workspace + blockIdx.x * c.floats;
    const DeltaParts p = delta_parts(c, at);
    const BackParts k = back_parts(at, c.D, c.E);
    const int64_t size = static_cast<int64_t>(c.D) * c.E;
    for (int64_t item = blockIdx.x; item < c.rows.B * c.K; item += gridDim.x) {
        const int64_t b = item / c.K;
        const int key_head = static_cast<int>(item % c.K), head = key_head * c.group;
        for (int j = 0; j < c.group; j++)
            scan_load_state(k.dstate + j * size, f.dafter, (b * c.V + head + j) * c.D, c.D, c.E);
        for (int64_t end = c.rows.T; end > 0;) {
            const ScanRun r = c.rows.run_before(b, end);
            back_run(f, p, k, r, key_head, part);
            end = r.row;
        }
        for (int j = 0; j < c.group && f.dbefore.data; j++)
            scan_store_state(f.dbefore, k.dstate + j * size, (b * c.V + head + j) * c.D, c.D, c.E);
    }
}

template <class T> static Err launch_bwd(Stream *s, const delta_bwd_args *a)
{
    const int64_t group = a->v.dim[2] / (a->q.dim[2] ? a->q.dim[2] : 1);
    DeltaBwd<T> f;
    unsigned blocks = 0;
    TRY(delta_call(s, DELTA_NAME, a, a->states, delta_room_cuda(a->q.dim[3], a->v.dim[3], group) / 4,
                   &f.c, &blocks));
    f.dq = grouped_rows_of<T>(a->dq), f.dk = grouped_rows_of<T>(a->dk), f.dv = grouped_rows_of<T>(a->dv);
    f.go = grouped_rows_of<const T>(a->go);
    f.dg = rows_of<float>(a->dg), f.dbeta = rows_of<float>(a->dbeta), f.dbefore = rows_of<float>(a->dbefore);
    f.dafter = rows_of<const float>(a->dafter), f.states = rows_of<const float>(a->states);
    if constexpr (std::is_same<T, bf16>::value) {
        bool done;
        TRY(delta_tiles_bwd(s, a, f, &done));
        if (done) return ERR_OK;
    }
    LAUNCH((delta_bwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    return ERR_OK;
}

extern "C" Err cuda_delta_bwd(Stream *s, const delta_bwd_args *a)
{
    DISPATCH(a->q.dtype, return launch_bwd<T>(s, a));
    return ERR_OK;
}
