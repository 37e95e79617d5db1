/*
 * The gated delta rule, forward; delta.cuh.
 *
 * Mapping   a block a key head of a sample, its windows and runs in order, its value heads one after the other.
 * Work      3 n D E + n n E multiplications a run of n rows and value head, from L2: far from the machine's.
 * Needs     workspace for at least one block: 0.9 MiB of heads of 128.
 */
#include <type_traits>

#include "delta.cuh"

template <class T>
__device__ __forceinline__ void forward_output(const DeltaFwd<T> &f, const DeltaParts &p, float *o, const ScanRun &r,
                                               int head, const float *state)
{
    const int E = f.c.E;
    if (!r.begins) {
        scan_product(o, E, { p.q, f.c.D, 1 }, { state, E, 1 }, r.n, E, f.c.D, false);
        for (int i = threadIdx.x; i < r.n * E; i += SCAN_THREADS) o[i] *= p.from[i / E];
        __syncthreads();
    }
    scan_product(o, E, { p.read, DELTA_WINDOW, 1 }, { p.write, E, 1 }, r.n, E, r.n, !r.begins);
    scan_store(f.o, o, r, f.c.rows.T, f.c.V, head, E);
}

/* The state behind the run. */
template <class T>
__device__ __forceinline__ void forward_state(const DeltaFwd<T> &f, const DeltaParts &p, const ScanRun &r,
                                              float *state)
{
    const int E = f.c.E, last = r.n - 1;
    for (int i = threadIdx.x; i < r.n * E; i += SCAN_THREADS)
        p.x[i] = p.decay[last * DELTA_WINDOW + i / E] * p.write[i];
    for (int i = threadIdx.x; i < f.c.D * E && !r.begins; i += SCAN_THREADS) state[i] *= p.from[last];
    __syncthreads();
    scan_product(state, E, { p.k, 1, f.c.D }, { p.x, E, 1 }, f.c.D, E, r.n, !r.begins);
}

template <class T> __global__ void __launch_bounds__(SCAN_THREADS, 1) delta_fwd_kernel(DeltaFwd<T> f)
{
    const DeltaCall<T> &c = f.c;
    float *at = c.workspace + blockIdx.x * c.floats;
    const DeltaParts p = delta_parts(c, at);
    float *o = scan_take(at, DELTA_WINDOW * static_cast<int64_t>(c.E)), *states = at;
    const int64_t size = static_cast<int64_t>(c.D) * c.E;
    for (int64_t item = blockIdx.x; item < c.rows.B * c.K; item += gridDim.x) {
        const int64_t b = item / c.K;
        const int key_head = static_cast<int>(item % c.K), head = key_head * c.group;
        for (int j = 0; j < c.group; j++)
            scan_load_state(states + j * size, f.before, (b * c.V + head + j) * c.D, c.D, c.E);
        for (int64_t row = 0, n; row < c.rows.T; row += n) {
            const ScanRun r = c.rows.run(b, row);
            const int64_t window = row / DELTA_WINDOW;
            n = r.n;
            delta_keys(c, p, r, key_head);
            for (int j = 0; j < c.group; j++) {
                float *state = states + j * size;
                const int64_t kept = ((b * c.windows + window) * c.V + head + j) * c.D;
                if (row % DELTA_WINDOW == 0 && r.begins) scan_clear(state, size);
                if (row % DELTA_WINDOW == 0 && f.states.data) scan_store_state(f.states, state, kept, c.D, c.E);
                delta_head(c, p, r, head + j, state);
                forward_output(f, p, o, r, head + j, state);
                if (r.last) forward_state(f, p, r, state);
            }
        }
        for (int j = 0; j < c.group && f.after.data; j++)
            scan_store_state(f.after, states + j * size, (b * c.V + head + j) * c.D, c.D, c.E);
    }
}

template <class T> static Err launch_fwd(Stream *s, const delta_fwd_args *a)
{
    const int D = static_cast<int>(a->q.dim[3]), E = static_cast<int>(a->v.dim[3]);
    const int64_t group = a->v.dim[2] / (a->q.dim[2] ? a->q.dim[2] : 1);
    const int64_t floats = delta_floats(D, E) + DELTA_WINDOW * static_cast<int64_t>(E) + group * D * E;
    DeltaFwd<T> f;
    unsigned blocks = 0;
    TRY(delta_call(s, DELTA_NAME, a, a->states, floats, &f.c, &blocks));
    f.o = grouped_rows_of<T>(a->o);
    f.states = rows_of<float>(a->states), f.after = rows_of<float>(a->after);
    f.before = rows_of<const float>(a->before);
    if constexpr (std::is_same<T, bf16>::value) {
        bool done;
        TRY(delta_tiles_fwd(s, a, f, &done));
        if (done) return ERR_OK;
    }
    LAUNCH((delta_fwd_kernel<T>), blocks, SCAN_THREADS, 0, cuda_stream(s), f);
    return ERR_OK;
}

extern "C" Err cuda_delta_fwd(Stream *s, const delta_fwd_args *a)
{
    DISPATCH(a->q.dtype, return launch_fwd<T>(s, a));
    return ERR_OK;
}
