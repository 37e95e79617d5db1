/*
 * Mamba-2's recurrence, forward and backward; scan.cuh. What is computed, and in which order, stands in
 * src/cpu/mamba.c, whose two passes each way these kernels have.
 *
 * Mapping   states: a block a head of a sample, its windows in order. Rows: a block a window of a group of a sample,
 *           its heads one after the other, so that the group's gradients have the CPU's order.
 * Work      that of src/cpu/mamba.c, from L2: far from the machine's.
 * Needs     workspace for at least one block: 1.1 MiB of states of 128 and heads of 64.
 */
#include "device/scan_room.h"
#include "mamba.cuh"

constexpr int MAMBA_SQUARE = MAMBA_WINDOW * MAMBA_WINDOW;

/* ---- states ---- */

/* A block's part of the workspace. */
struct StateParts {
    float *keys, *values, *state, *added, *decay, *from, *g, *step;
};

static int64_t states_floats(int64_t N, int64_t P)
{
    return MAMBA_WINDOW * (N + P) + 2 * N * P + MAMBA_SQUARE + 3 * MAMBA_WINDOW;
}

template <class T> __device__ __forceinline__ StateParts state_parts(const MambaCall<T> &c)
{
    float *at = c.workspace + blockIdx.x * c.floats;
    const int64_t size = static_cast<int64_t>(c.N) * c.P;
    StateParts p;
    p.keys = scan_take(at, MAMBA_WINDOW * static_cast<int64_t>(c.N));
    p.values = scan_take(at, MAMBA_WINDOW * static_cast<int64_t>(c.P));
    p.state = scan_take(at, size), p.added = scan_take(at, size), p.decay = scan_take(at, MAMBA_SQUARE);
    p.from = scan_take(at, MAMBA_WINDOW), p.g = scan_take(at, MAMBA_WINDOW), p.step = scan_take(at, MAMBA_WINDOW);
    return p;
}

/* state = factor * state, or 0, + the sum over the rows of keys and values. */
template <class T>
__device__ __forceinline__ void move_state(const MambaCall<T> &c, const StateParts &p, int n, bool goes_on)
{
    const float factor = p.from[n - 1];
    scan_product(p.added, c.P, { p.keys, 1, c.N }, { p.values, c.P, 1 }, c.N, c.P, n, false);
    for (int i = threadIdx.x; i < c.N * c.P; i += SCAN_THREADS)
        p.state[i] = goes_on ? fmaf(factor, p.state[i], p.added[i]) : p.added[i];
    __syncthreads();
}

/* Rows that a run of a head reads: gates, keys or queries, and values. */
template <class T>
__device__ __forceinline__ void load_run(const MambaCall<T> &c, const StateParts &p, GroupedRows<const T> keys,
                                         GroupedRows<const T> values, const ScanRun &r, int head)
{
    scan_load_column(p.g, c.g, r, c.rows.T, head);
    scan_load_column(p.step, c.delta, r, c.rows.T, head);
    scan_load(p.keys, keys, r, c.rows.T, c.G, head / c.group, c.N);
    scan_load(p.values, values, r, c.rows.T, c.H, head, c.P);
    scan_decays(p.decay, p.from, p.g, r.n, MAMBA_WINDOW);
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) mamba_states_fwd_kernel(MambaFwd<T> f)
{
    const MambaCall<T> &c = f.c;
    const StateParts p = state_parts(c);
    for (int64_t item = blockIdx.x; item < c.rows.B * c.H; item += gridDim.x) {
        const int64_t b = item / c.H;
        const int head = static_cast<int>(item % c.H);
        scan_load_state(p.state, f.before, item * c.N, c.N, c.P);
        for (int64_t w = 0; w < c.windows; w++) {
            const ScanRun r = c.rows.run_before(b, c.window_end(w));
            if (c.rows.begins(b, w * MAMBA_WINDOW)) scan_clear(p.state, static_cast<int64_t>(c.N) * c.P);
            scan_store_state(f.states, p.state, c.state_row(b, w, head), c.N, c.P);
            load_run(c, p, c.k, c.x, r, head);
            scan_scale(p.values, p.values, p.step, r.n, c.P);
            scan_scale(p.values, p.values, p.decay + (r.n - 1) * MAMBA_WINDOW, r.n, c.P);
            move_state(c, p, r.n, !r.begins);
        }
        if (f.after.data) scan_store_state(f.after, p.state, item * c.N, c.N, c.P);
    }
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) mamba_states_bwd_kernel(MambaBwd<T> f)
{
    const MambaCall<T> &c = f.c;
    const StateParts p = state_parts(c);
    for (int64_t item = blockIdx.x; item < c.rows.B * c.H; item += gridDim.x) {
        const int64_t b = item / c.H;
        const int head = static_cast<int>(item % c.H);
        scan_load_state(p.state, f.dafter, item * c.N, c.N, c.P);
        for (int64_t w = c.windows - 1; w >= 0; w--) {
            const ScanRun r = c.rows.run(b, w * MAMBA_WINDOW);
            scan_store_state(f.dstates, p.state, c.state_row(b, w, head), c.N, c.P);
            if (r.begins) {
                scan_clear(p.state, static_cast<int64_t>(c.N) * c.P);
                continue;
            }
            load_run(c, p, c.q, f.go, r, head);
            scan_scale(p.values, p.values, p.from, r.n, c.P);
            move_state(c, p, r.n, r.last);
        }
        if (f.dbefore.data) scan_store_state(f.dbefore, p.state, item * c.N, c.N, c.P);
    }
}

/* ---- rows, forward ---- */

/* A block's part of the workspace: the members of MambaHead and its keys in src/cpu/mamba.c. */
struct RowParts {
    float *q, *k, *qk, *decay, *read, *x, *write, *state, *from, *g, *step;
};

static int64_t rows_floats(int64_t N, int64_t P)
{
    return 3 * MAMBA_SQUARE + MAMBA_WINDOW * (2 * N + 2 * P + 3) + N * P;
}

template <class T> __device__ __forceinline__ RowParts row_parts(const MambaCall<T> &c, float *&at)
{
    const int64_t keys = MAMBA_WINDOW * static_cast<int64_t>(c.N), rows = MAMBA_WINDOW * static_cast<int64_t>(c.P);
    RowParts p;
    p.q = scan_take(at, keys), p.k = scan_take(at, keys);
    p.qk = scan_take(at, MAMBA_SQUARE), p.decay = scan_take(at, MAMBA_SQUARE), p.read = scan_take(at, MAMBA_SQUARE);
    p.x = scan_take(at, rows), p.write = scan_take(at, rows), p.state = scan_take(at, static_cast<int64_t>(c.N) * c.P);
    p.from = scan_take(at, MAMBA_WINDOW), p.g = scan_take(at, MAMBA_WINDOW), p.step = scan_take(at, MAMBA_WINDOW);
    return p;
}

template <class T>
__device__ __forceinline__ void load_keys(const MambaCall<T> &c, const RowParts &p, const ScanRun &r, int group)
{
    scan_load(p.q, c.q, r, c.rows.T, c.G, group, c.N);
    scan_load(p.k, c.k, r, c.rows.T, c.G, group, c.N);
    scan_product(p.qk, MAMBA_WINDOW, { p.q, c.N, 1 }, { p.k, 1, c.N }, r.n, r.n, c.N, false);
}

template <class T>
__device__ __forceinline__ void load_head(const MambaCall<T> &c, const RowParts &p, Rows<const float> states,
                                          const ScanRun &r, int head)
{
    scan_load_column(p.g, c.g, r, c.rows.T, head);
    scan_load_column(p.step, c.delta, r, c.rows.T, head);
    scan_decays(p.decay, p.from, p.g, r.n, MAMBA_WINDOW);
    scan_read(p.read, p.qk, p.decay, r.n, MAMBA_WINDOW);
    scan_load(p.x, c.x, r, c.rows.T, c.H, head, c.P);
    scan_scale(p.write, p.x, p.step, r.n, c.P);
    if (!r.begins) scan_load_state(p.state, states, c.state_row(r.b, r.row / MAMBA_WINDOW, head), c.N, c.P);
}

template <class T>
__device__ __forceinline__ void head_forward(const MambaFwd<T> &f, const RowParts &p, float *o, const ScanRun &r,
                                             int head)
{
    const MambaCall<T> &c = f.c;
    const float skip = c.skip_of(head);
    if (!r.begins) {
        scan_product(o, c.P, { p.q, c.N, 1 }, { p.state, c.P, 1 }, r.n, c.P, c.N, false);
        scan_scale(o, o, p.from, r.n, c.P);
    }
    scan_product(o, c.P, { p.read, MAMBA_WINDOW, 1 }, { p.write, c.P, 1 }, r.n, c.P, r.n, !r.begins);
    for (int i = threadIdx.x; i < r.n * c.P; i += SCAN_THREADS) o[i] = fmaf(skip, p.x[i], o[i]);
    __syncthreads();
    scan_store(f.o, o, r, c.rows.T, c.H, head, c.P);
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) mamba_rows_fwd_kernel(MambaFwd<T> f)
{
    const MambaCall<T> &c = f.c;
    float *at = c.workspace + blockIdx.x * c.floats;
    const RowParts p = row_parts(c, at);
    const Rows<const float> states = { f.states.data, f.states.ld };
    for (int64_t item = blockIdx.x; item < c.rows.B * c.windows * c.G; item += gridDim.x) {
        const int group = static_cast<int>(item % c.G);
        const int64_t w = item / c.G % c.windows, b = item / c.G / c.windows, end = c.window_end(w);
        for (int64_t row = w * MAMBA_WINDOW; row < end;) {
            const ScanRun r = c.rows.run(b, row);
            load_keys(c, p, r, group);
            for (int head = group * c.group; head < (group + 1) * c.group; head++) {
                load_head(c, p, states, r, head);
                head_forward(f, p, at, r, head);
            }
            row += r.n;
        }
    }
}

/* ---- rows, backward ---- */

/* More parts, beside RowParts, with the names of Backward in src/cpu/mamba.c. */
struct BackParts {
    float *both, *dqk, *dq, *dk, *product, *go, *dwrite, *dstate, *dfrom, *dlast;
};

template <class T> __device__ __forceinline__ BackParts back_parts(const MambaCall<T> &c, float *at)
{
    const int64_t keys = MAMBA_WINDOW * static_cast<int64_t>(c.N), rows = MAMBA_WINDOW * static_cast<int64_t>(c.P);
    BackParts p;
    p.both = scan_take(at, MAMBA_SQUARE), p.dqk = scan_take(at, MAMBA_SQUARE);
    p.dq = scan_take(at, keys), p.dk = scan_take(at, keys), p.product = scan_take(at, keys);
    p.go = scan_take(at, rows), p.dwrite = scan_take(at, rows);
    p.dstate = scan_take(at, static_cast<int64_t>(c.N) * c.P);
    p.dfrom = scan_take(at, MAMBA_WINDOW), p.dlast = at;
    return p;
}

/* dwrite, and what becomes of it: dx in its place, ddelta, dskip; dlast. */
template <class T>
__device__ __forceinline__ void back_writes(const MambaBwd<T> &f, const RowParts &p, const BackParts &k,
                                            const ScanRun &r, int head)
{
    const MambaCall<T> &c = f.c;
    const int n = r.n, P = c.P;
    const float *left = p.decay + (n - 1) * MAMBA_WINDOW;
    const float skip = c.skip_of(head);
    if (r.last) {
        scan_product(k.dwrite, P, { p.k, c.N, 1 }, { k.dstate, P, 1 }, n, P, c.N, false);
        for (int j = threadIdx.x; j < n; j += SCAN_THREADS)
            k.dlast[j] = left[j] * row_dot(p.write + j * P, k.dwrite + j * P, P);
        __syncthreads();
        scan_scale(k.dwrite, k.dwrite, left, n, P);
    } else {
        scan_clear(k.dwrite, n * static_cast<int64_t>(P));
        scan_clear(k.dlast, n);
    }
    scan_product(k.dwrite, P, { p.read, 1, MAMBA_WINDOW }, { k.go, P, 1 }, n, P, n, true);
    for (int j = threadIdx.x; j < n; j += SCAN_THREADS) {
        const int64_t row = r.b * c.rows.T + r.row + j;
        f.ddelta.at(row)[head] = row_dot(k.dwrite + j * P, p.x + j * P, P);
        f.dskip.at(row)[head] = row_dot(k.go + j * P, p.x + j * P, P);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n * P; i += SCAN_THREADS)
        k.dwrite[i] = fmaf(skip, k.go[i], p.step[i / P] * k.dwrite[i]);
    __syncthreads();
    scan_store(f.dx, k.dwrite, r, c.rows.T, c.H, head, P);
}

/* qk' of the head is added to the group's; `both`: decays times their gradients. */
__device__ __forceinline__ void back_pairs(const RowParts &p, const BackParts &k, const ScanRun &r, int P)
{
    const int n = r.n;
    for (int t = threadIdx.x; t < n * n; t += SCAN_THREADS) {
        const int i = t / n, j = t % n, at = i * MAMBA_WINDOW + j;
        if (j > i) continue;
        const float x = row_dot(k.go + i * P, p.write + j * P, P);
        k.dqk[at] = fmaf(x, p.decay[at], k.dqk[at]);
        k.both[at] = x * p.read[at] + (i == n - 1 && j < i ? k.dlast[j] : 0.0f);
    }
    __syncthreads();
}

/* Gradients that pass through the states before the run and behind it. part: for block_sum */
template <class T>
__device__ __forceinline__ void back_states(const MambaCall<T> &c, const RowParts &p, const BackParts &k,
                                            const ScanRun &r, float *part)
{
    const int N = c.N, P = c.P, n = r.n;
    scan_clear(k.dfrom, n);
    if (!r.begins) {
        scan_product(k.product, N, { k.go, P, 1 }, { p.state, 1, P }, n, N, P, false);
        for (int i = threadIdx.x; i < n; i += SCAN_THREADS)
            k.dfrom[i] = p.from[i] * row_dot(p.q + i * N, k.product + i * N, N);
        scan_add(k.dq, k.product, p.from, 1, n, N);
    }
    if (!r.begins && r.last) {
        float sum = 0;
        for (int i = threadIdx.x; i < N * P; i += SCAN_THREADS) sum = fmaf(k.dstate[i], p.state[i], sum);
        sum = block_sum(sum, part);
        if (threadIdx.x == 0) k.dfrom[n - 1] += p.from[n - 1] * sum;
        __syncthreads();
    }
    if (!r.last) return;
    scan_product(k.product, N, { p.write, P, 1 }, { k.dstate, 1, P }, n, N, P, false);
    scan_add(k.dk, k.product, p.decay + (n - 1) * MAMBA_WINDOW, 1, n, N);
}

template <class T>
__device__ __forceinline__ void back_run(const MambaBwd<T> &f, const RowParts &p, const BackParts &k, const ScanRun &r,
                                         int group, float *part)
{
    const MambaCall<T> &c = f.c;
    const int n = r.n, N = c.N, m = threadIdx.x;
    load_keys(c, p, r, group);
    scan_clear(k.dqk, MAMBA_SQUARE);
    scan_clear(k.dq, n * static_cast<int64_t>(N)), scan_clear(k.dk, n * static_cast<int64_t>(N));
    for (int head = group * c.group; head < (group + 1) * c.group; head++) {
        const Rows<const float> dstates = { f.dstates.data, f.dstates.ld };
        load_head(c, p, f.states, r, head);
        scan_load(k.go, f.go, r, c.rows.T, c.H, head, c.P);
        if (r.last) scan_load_state(k.dstate, dstates, c.state_row(r.b, r.row / MAMBA_WINDOW, head), N, c.P);
        back_writes(f, p, k, r, head);
        back_pairs(p, k, r, c.P);
        back_states(c, p, k, r, part);
        if (m < n) f.dg.at(r.b * c.rows.T + r.row + m)[head] = scan_gate(k.both, k.dfrom, m, n, MAMBA_WINDOW);
        __syncthreads();
    }
    scan_product(k.dq, N, { k.dqk, MAMBA_WINDOW, 1 }, { p.k, N, 1 }, n, N, n, true);
    scan_product(k.dk, N, { k.dqk, 1, MAMBA_WINDOW }, { p.q, N, 1 }, n, N, n, true);
    scan_store(f.dq, k.dq, r, c.rows.T, c.G, group, N);
    scan_store(f.dk, k.dk, r, c.rows.T, c.G, group, N);
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) mamba_rows_bwd_kernel(MambaBwd<T> f)
{
    const MambaCall<T> &c = f.c;
    SHARED(float, part, [SCAN_THREADS / WARP]);
    float *at = c.workspace + blockIdx.x * c.floats;
    const RowParts p = row_parts(c, at);
    const BackParts k = back_parts(c, at);
    for (int64_t item = blockIdx.x; item < c.rows.B * c.windows * c.G; item += gridDim.x) {
        const int64_t w = item / c.G % c.windows, b = item / c.G / c.windows, end = c.window_end(w);
        for (int64_t row = w * MAMBA_WINDOW; row < end;) {
            const ScanRun r = c.rows.run(b, row);
            back_run(f, p, k, r, static_cast<int>(item % c.G), part);
            row += r.n;
        }
    }
}

/* ---- launching ---- */

static const char mamba_name[] = "the scan of Mamba-2";

template <class T, class Args> static Err mamba_call(Stream *s, const Args *a, MambaCall<T> *c)
{
    const int64_t G = a->k.dim[2], H = a->x.dim[2];
    const ScanRows rows = scan_rows_of(a->q, a->doc, a->first, MAMBA_WINDOW);
    TRY(scan_check(mamba_name, rows, G, H, a->states));
    *c = { grouped_rows_of<const T>(a->x),
           grouped_rows_of<const T>(a->k),
           grouped_rows_of<const T>(a->q),
           rows_of<const float>(a->delta),
           rows_of<const float>(a->g),
           a->skip.data,
           a->skip.dtype,
           rows,
           static_cast<int>(G),
           static_cast<int>(H),
           static_cast<int>(a->k.dim[3]),
           static_cast<int>(a->x.dim[3]),
           static_cast<int>(H / G),
           static_cast<int>(ceil_div(rows.T, MAMBA_WINDOW)),
           reinterpret_cast<float *>(s->dev->workspace),
           0 };
    return ERR_OK;
}

template <class T> static Err launch_fwd(Stream *s, const mamba_fwd_args *a)
{
    MambaFwd<T> f;
    unsigned blocks = 0;
    TRY(mamba_call(s, a, &f.c));
    MambaCall<T> &c = f.c;
    f.o = grouped_rows_of<T>(a->o);
    f.states = rows_of<float>(a->states), f.after = rows_of<float>(a->after);
    f.before = rows_of<const float>(a->before);
    if constexpr (std::is_same<T, bf16>::value)
        if (mamba_takes_tiles(s, a->x, a->k, { a->o, a->x, a->k, a->q, a->states, a->before, a->after }))
            return mamba_tiles_fwd(s, f);
    c.floats = states_floats(c.N, c.P);
    TRY(scan_blocks(s, mamba_name, c.rows.B * c.H, c.floats, &blocks));
    LAUNCH((mamba_states_fwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    c.floats = rows_floats(c.N, c.P) + MAMBA_WINDOW * static_cast<int64_t>(c.P);
    TRY(scan_blocks(s, mamba_name, c.rows.B * c.windows * c.G, c.floats, &blocks));
    LAUNCH((mamba_rows_fwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    return ERR_OK;
}

extern "C" Err cuda_mamba_fwd(Stream *s, const mamba_fwd_args *a)
{
    DISPATCH(a->x.dtype, return launch_fwd<T>(s, a));
    return ERR_OK;
}

template <class T> static Err launch_bwd(Stream *s, const mamba_bwd_args *a)
{
    MambaBwd<T> f;
    unsigned blocks = 0;
    TRY(mamba_call(s, a, &f.c));
    MambaCall<T> &c = f.c;
    f.dx = grouped_rows_of<T>(a->dx), f.dk = grouped_rows_of<T>(a->dk), f.dq = grouped_rows_of<T>(a->dq);
    f.go = grouped_rows_of<const T>(a->go);
    f.ddelta = rows_of<float>(a->ddelta), f.dg = rows_of<float>(a->dg), f.dskip = rows_of<float>(a->dskip);
    f.dbefore = rows_of<float>(a->dbefore), f.dstates = rows_of<float>(a->dstates);
    f.dafter = rows_of<const float>(a->dafter), f.states = rows_of<const float>(a->states);
    if constexpr (std::is_same<T, bf16>::value)
        if (mamba_takes_tiles(s, a->x, a->k, { a->dx, a->dk, a->dq, a->go, a->x, a->k, a->q, a->states, a->dstates,
                                               a->dbefore, a->dafter }))
            return mamba_tiles_bwd(s, f);
    c.floats = states_floats(c.N, c.P);
    TRY(scan_blocks(s, mamba_name, c.rows.B * c.H, c.floats, &blocks));
    LAUNCH((mamba_states_bwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    c.floats = mamba_room_cuda(c.N, c.P) / 4;
    TRY(scan_blocks(s, mamba_name, c.rows.B * c.windows * c.G, c.floats, &blocks));
    LAUNCH((mamba_rows_bwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    return ERR_OK;
}

extern "C" Err cuda_mamba_bwd(Stream *s, const mamba_bwd_args *a)
{
    DISPATCH(a->x.dtype, return launch_bwd<T>(s, a));
    return ERR_OK;
}
