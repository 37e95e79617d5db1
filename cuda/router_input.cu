/*
 * Inputs of routers: noise on their input, and logits that make experts take turns (device/ops.def, jitter,
 * router_even; docs/moe.md).
 *
 * Mapping   jitter: two packs of 16 bytes a thread (PackGrid of kernel.cuh), with a Philox call for four elements.
 *           router_even: a warp for each row, lane l the experts l, l + 32, ....
 * Traffic   jitter reads and writes 2 bytes an element in bf16: 65,536 rows of width 1024, 268 MB, 62 us at 4.3 TB/s;
 *           two Philox calls a pack, 140 of 213 instruction slots. router_even writes 4 E bytes a row.
 * Needs     16-byte aligned rows for full speed, else element by element; y may be x.
 */
#include "kernel.cuh"

template <class T> struct Jitter {
    Rows<T> y;
    Rows<const T> x;
    const int32_t *position;
    const int64_t *sample;
    uint64_t key;
    float eps;
};

template <class T, bool WIDE>
__global__ void __launch_bounds__(PACK_THREADS) jitter_kernel(Jitter<T> j, PackGrid g)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const int64_t rows = rows_in_use(g.rows);
    Pack<T> x[PACK_UNROLL];
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        if (p.used) x[u] = load_pack<T, WIDE>(j.x.at(p.row) + p.column, p.left);
    }
    for (int u = 0; u < PACK_UNROLL; u++) {
        const PackPlace p = pack_place<COUNT>(g, rows, u);
        if (!p.used) continue;
        for (int i = 0; i < COUNT; i += 4) {
            float draw[4];
            uniform_4(j.key, j.sample[p.row], j.position[p.row], p.column + i, draw);
            for (int k = 0; k < 4; k++)
                x[u].v[i + k] = from_float<T>(to_float(x[u].v[i + k]) * (1.0f + j.eps * (2.0f * draw[k] - 1.0f)));
        }
        store_pack<T, WIDE>(j.y.at(p.row) + p.column, x[u], p.left);
    }
}

template <class T> static void launch_jitter(Stream *s, const jitter_args *a)
{
    const PackGrid g = pack_grid(row_count(a->y, a->x), 1, a->x.dim[1], Pack<T>::COUNT);
    const Jitter<T> j = { rows_of<T>(a->y), rows_of<const T>(a->x), data_of<const int32_t>(a->position),
                          data_of<const int64_t>(a->sample), a->key, a->eps };
    if (rows_aligned(a->y) && rows_aligned(a->x))
        LAUNCH((jitter_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), j, g);
    else LAUNCH((jitter_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), j, g);
}

extern "C" Err cuda_jitter(Stream *s, const jitter_args *a)
{
    DISPATCH(a->x.dtype, launch_jitter<T>(s, a));
    return ERR_OK;
}

/* ---- turns ---- */

constexpr int EVEN_WARPS = 8;

struct Turns {
    Rows<float> logits;
    const int32_t *position;
    const int64_t *sample;
    RowCount rows;
    int64_t seq, topk;
    int E;
};

__global__ void __launch_bounds__(EVEN_WARPS *WARP) router_even_kernel(Turns t)
{
    const int64_t n = blockIdx.x * static_cast<int64_t>(EVEN_WARPS) + threadIdx.x / WARP;
    if (n >= rows_in_use(t.rows)) return;
    const int64_t turn = (t.sample[n] % t.E * (t.seq % t.E) + t.position[n]) % t.E;
    const int best = static_cast<int>(turn * t.topk % t.E);
    for (int e = threadIdx.x % WARP; e < t.E; e += WARP) {
        const int place = e >= best ? e - best : e - best + t.E;
        t.logits.at(n)[e] = -4.0f * static_cast<float>(place) / static_cast<float>(t.E);
    }
}

extern "C" Err cuda_router_even(Stream *s, const router_even_args *a)
{
    const Turns t = { rows_of<float>(a->logits), data_of<const int32_t>(a->position),
                      data_of<const int64_t>(a->sample), row_count(a->logits, a->logits), a->seq, a->topk,
                      static_cast<int>(a->logits.dim[1]) };
    const unsigned grid = grid_blocks(ceil_div(a->logits.dim[0], EVEN_WARPS));
    LAUNCH(router_even_kernel, grid, EVEN_WARPS * WARP, 0, cuda_stream(s), t);
    return ERR_OK;
}
