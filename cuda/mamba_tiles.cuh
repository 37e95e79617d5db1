/*
 * Mamba-2's recurrence by tensor cores: what its two passes share. A window goes as a whole, whatever documents it has:
 * their borders are zeros among its decays.
 *
 * Decays are powers of 2 of differences of sums. So sums are two floats, of a sum in fp64: a difference is then as
 * exact as the numbers it is of.
 */
#ifndef MEGATRAIN_CUDA_MAMBA_TILES_CUH
#define MEGATRAIN_CUDA_MAMBA_TILES_CUH

#include "mamba.cuh"
#include "scan_tiles.cuh"

constexpr int MAMBA_TILE = MAMBA_WINDOW * TILE, MAMBA_WARPS = SCAN_THREADS / WARP; /* elements of a window's rows */
static_assert(MAMBA_WARPS * 16 == MAMBA_WINDOW, "a warp has 16 rows of a window");

/* A head's gates in a window. */
struct WindowGates {
    int run[MAMBA_WINDOW];                       /* where a row's run begins; -1: before the window */
    float high[MAMBA_WINDOW], low[MAMBA_WINDOW]; /* of sums of g, in units of log 2 */
    float step[MAMBA_WINDOW];
    float from[MAMBA_WINDOW], left[MAMBA_WINDOW]; /* 0 beyond the first run and before the last */

    /* The decay of what row j wrote when row i reads it. */
    __device__ __forceinline__ float decay(int i, int j) const
    {
        if (i < j || run[i] != run[j]) return 0.0f;
        return exp2_approx((high[i] - high[j]) + (low[i] - low[j]));
    }
};

/* Room for its sums, as they come about. */
struct GateSums {
    double sum[2][MAMBA_WINDOW];
    int run[2][MAMBA_WINDOW];
};

/* A window of a sample. */
struct Window {
    int64_t b, w, row; /* row: the first, of [B T] */
    int n;
};

template <class T> __device__ __forceinline__ Window window_of(const MambaCall<T> &c, int64_t b, int64_t w)
{
    const int64_t first = w * MAMBA_WINDOW;
    return { b, w, b * c.rows.T + first, static_cast<int>(c.window_end(w) - first) };
}

/* The gates of a head; a thread has a row. room: shared memory for GateSums. */
template <class T>
__device__ __forceinline__ void load_gates(WindowGates &a, void *room, const MambaCall<T> &c, const Window &w, int head)
{
    static constexpr float LEAST = -200; /* (what exp makes 0, however much is added) */
    static constexpr double LOG2E = 1.4426950408889634;
    GateSums &s = *static_cast<GateSums *>(room);
    const int i = threadIdx.x;
    const bool mine = i < MAMBA_WINDOW, there = i < w.n;
    if (mine) {
        const float g = there ? c.g.at(w.row + i)[head] : 0.0f;
        a.step[i] = there ? c.delta.at(w.row + i)[head] : 0.0f;
        s.sum[0][i] = (g < LEAST ? LEAST : g) * LOG2E;
        s.run[0][i] = there && c.rows.begins(w.b, w.w * MAMBA_WINDOW + i) ? i : -1;
    }
    __syncthreads();
    for (int d = 1, k = 0; d < MAMBA_WINDOW; d *= 2, k ^= 1) {
        if (mine) {
            const bool add = i >= d;
            s.sum[k ^ 1][i] = add ? s.sum[k][i - d] + s.sum[k][i] : s.sum[k][i];
            s.run[k ^ 1][i] = add && s.run[k][i - d] > s.run[k][i] ? s.run[k][i - d] : s.run[k][i];
        }
        __syncthreads();
    }
    if (mine) {
        a.run[i] = s.run[1][i];
        a.high[i] = static_cast<float>(s.sum[1][i]);
        a.low[i] = static_cast<float>(s.sum[1][i] - a.high[i]);
        a.from[i] = there && s.run[1][i] < 0 ? exp2_approx(a.high[i] + a.low[i]) : 0.0f;
    }
    __syncthreads();
    if (mine) a.left[i] = there ? a.decay(w.n - 1, i) : 0.0f;
    __syncthreads();
}

/* Launches the two passes of states, forward or backward. */
Err mamba_tiles_states(Stream *s, const MambaFwd<bf16> &f);
Err mamba_tiles_states(Stream *s, const MambaBwd<bf16> &f);

#endif
