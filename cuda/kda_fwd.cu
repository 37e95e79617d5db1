/*
 * Kimi Delta Attention's rule, forward; kda.cuh.
 *
 * Mapping   a block a head of a sample, its windows and runs in order.
 * Work      3 n D E + n n E multiplications and n n D / 8 + 9 n D exponentials a run of n rows, from L2.
 * Needs     workspace for at least one block: 0.6 MiB of heads of 128.
 */
#include "kda.cuh"

template <class T> struct KdaFwd {
    DeltaCall<T> c;
    GroupedRows<T> o;
    Rows<float> states, after; /* data: or NULL */
    Rows<const float> before;
};

template <class T>
__device__ __forceinline__ void forward_run(const KdaFwd<T> &f, const KdaParts &p, float *o, const ScanRun &r,
                                            int head, float *state)
{
    const int D = f.c.D, E = f.c.E;
    kda_head(f.c, p, r, head, state);
    if (!r.begins) {
        kda_times(p.q_rows, p.q, p.from, r.n, D);
        scan_product(o, E, { p.q_rows, D, 1 }, { state, E, 1 }, r.n, E, D, false);
    }
    scan_product(o, E, { p.read, DELTA_WINDOW, 1 }, { p.write, E, 1 }, r.n, E, r.n, !r.begins);
    scan_store(f.o, o, r, f.c.rows.T, f.c.V, head, E);
    if (!r.last) return;
    if (!r.begins) kda_fade(state, p.from + (r.n - 1) * D, D, E);
    kda_times(p.k_rows, p.k, p.last, r.n, D);
    scan_product(state, E, { p.k_rows, 1, D }, { p.write, E, 1 }, D, E, r.n, !r.begins);
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) kda_fwd_kernel(KdaFwd<T> f)
{
    const DeltaCall<T> &c = f.c;
    float *at = c.workspace + blockIdx.x * c.floats;
    const KdaParts p = kda_parts(c, at);
    float *o = scan_take(at, DELTA_WINDOW * static_cast<int64_t>(c.E)), *state = at;
    for (int64_t item = blockIdx.x; item < c.rows.B * c.V; item += gridDim.x) {
        const int64_t b = item / c.V;
        const int head = static_cast<int>(item % c.V);
        scan_load_state(state, f.before, item * c.D, c.D, c.E);
        for (int64_t row = 0, n; row < c.rows.T; row += n) {
            const ScanRun r = c.rows.run(b, row);
            n = r.n;
            if (row % DELTA_WINDOW == 0 && r.begins) scan_clear(state, static_cast<int64_t>(c.D) * c.E);
            if (row % DELTA_WINDOW == 0 && f.states.data)
                scan_store_state(f.states, state, ((b * c.windows + row / DELTA_WINDOW) * c.V + head) * c.D, c.D, c.E);
            forward_run(f, p, o, r, head, state);
        }
        if (f.after.data) scan_store_state(f.after, state, item * c.D, c.D, c.E);
    }
}

template <class T> static Err launch_fwd(Stream *s, const kda_fwd_args *a)
{
    const int D = static_cast<int>(a->q.dim[3]), E = static_cast<int>(a->v.dim[3]);
    KdaFwd<T> f;
    unsigned blocks = 0;
    const int64_t floats = kda_floats(D, E) + (DELTA_WINDOW + D) * static_cast<int64_t>(E);
    TRY(delta_call(s, KDA_NAME, a, a->states, floats, &f.c, &blocks));
    f.o = grouped_rows_of<T>(a->o);
    f.states = rows_of<float>(a->states), f.after = rows_of<float>(a->after);
    f.before = rows_of<const float>(a->before);
    LAUNCH((kda_fwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    return ERR_OK;
}

extern "C" Err cuda_kda_fwd(Stream *s, const kda_fwd_args *a)
{
    DISPATCH(a->q.dtype, return launch_fwd<T>(s, a));
    return ERR_OK;
}
