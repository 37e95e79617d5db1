/*
 * Shared parts of the two kernels of dk and dv (attention_dkv.cu, attention_dkv_hopper.cu): lse and delta of a tile's
 * queries, masks with keys down, the table that says which tiles of queries see none of a block's keys.
 */
#ifndef MEGATRAIN_CUDA_ATTENTION_LOWS_CUH
#define MEGATRAIN_CUDA_ATTENTION_LOWS_CUH

#include "attention.cuh"

/* ---- the table of lows ---- */

/* Smallest and largest row_low of a tile of queries. */
struct Lows {
    int least, most;
};

/* table[b][tile], of tiles of `size` queries, when there are documents; else *out is NULL. In the workspace, LOWS_AT
 * bytes behind its start. */
constexpr int64_t LOWS_AT = 256;
Err attention_lows(Stream *s, const AttnProblem &p, int64_t samples, int size, const Lows **out);

/* Tile n of the walk in the table of lows. */
__device__ __forceinline__ int64_t lows_index(const TileWalk &walk, const int all[2], int n, int b)
{
    const int at = n < walk.tiles[0] ? n + walk.first[0] : n - walk.tiles[0] + walk.first[1] + all[0];
    return b * static_cast<int64_t>(all[0] + all[1]) + at;
}

/* Leaves out the tiles at both ends of each span whose documents begin behind `last`. For a whole warp. */
__device__ __forceinline__ void trim_walk(TileWalk *walk, const int all[2], const Lows *table, int last, int b)
{
    UNROLL
    for (int s = 1; s >= 0; s--) { /* the second first: its place in the table depends on the first */
        const int begin = s ? walk->tiles[0] : 0;
        int low = INT_MAX, high = -1;
        for (int i = threadIdx.x % WARP; i < walk->tiles[s]; i += WARP)
            if (table[lows_index(*walk, all, begin + i, b)].least <= last) {
                low = min(low, i);
                high = i;
            }
        for (int d = WARP / 2; d > 0; d /= 2) {
            low = min(low, __shfl_xor_sync(ALL_LANES, low, d));
            high = max(high, __shfl_xor_sync(ALL_LANES, high, d));
        }
        walk->tiles[s] = high < 0 ? 0 : high - low + 1;
        if (high >= 0) walk->first[s] += low;
    }
}

/* ---- a tile of queries ---- */

/* One query of a tile. lse2: lse in powers of 2; +inf for rows without keys and beyond the tile: weight 0. */
struct alignas(8) QueryValues {
    float lse2, delta;
};

template <class E>
__device__ __forceinline__ void mask_queries(const AttnProblem &p, typename E::Scores &s, int b, int position,
                                             const RowTile &rows)
{
    const typename E::Place at = E::place();
    UNROLL
    for (int j = 0; j < E::N; j++) {
        const int c = min(at.column(j), rows.count - 1), query = rows.position + c;
        const int first = row_low(p, b, rows.row + c, query) - position, last = query - position;
        UNROLL
        for (int i = 0; i < E::R; i++)
            if (at.row(i) > last || at.row(i) < first) s.at(i, j) = -INFINITY;
    }
}

#endif
