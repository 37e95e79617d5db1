/*
 * Shared parts of the kernels of grouped products (grouped.cu, grouped_hopper.cu): the problem as a kernel sees it,
 * places of a tile's rows, and the arguments of a call.
 */
#ifndef MEGATRAIN_CUDA_GROUPED_CUH
#define MEGATRAIN_CUDA_GROUPED_CUH

#include <type_traits>

#include "grouped_order.h"
#include "kernel.cuh"

enum GroupedKind { GROUPED_FWD, GROUPED_DX, GROUPED_DW };

/* ---- the cut into blocks ---- */

template <class T, class Out> struct Grouped {
    const T *a, *b;
    Out *out;
    int64_t lda, ldb, ldo;
    const int64_t *offset;
    int64_t runs; /* of an expert, in offset */
    int experts;
    int O, I;
    uint32_t rows, columns; /* tiles of them */
    bool add;               /* dw: to what is there */
    __device__ __forceinline__ int64_t start(int e) const { return offset[e * runs]; }
};

/* A matrix as it lies in memory, from a block's first element on. */
template <class T> struct Panel {
    T *data;
    int64_t ld, rows, columns;
};

/* Rows [first, end) of one expert. */
struct RowTile {
    int64_t first, end;
    int expert;
};

/* Tile number `left` of all experts' rows, `high` rows each; expert < 0: there are not so many. By a whole warp. */
template <class G> __device__ __forceinline__ RowTile find_rows(const G &g, int64_t left, int high)
{
    const int lane = threadIdx.x % WARP;
    for (int base = 0; base < g.experts; base += WARP) {
        const int e = base + lane;
        const int64_t first = e < g.experts ? g.start(e) : 0, end = e < g.experts ? g.start(e + 1) : 0;
        const int64_t tiles = (end - first + high - 1) / high;
        int64_t sum = tiles;
        for (int d = 1; d < WARP; d *= 2) {
            const int64_t below = __shfl_up_sync(ALL_LANES, sum, d);
            if (lane >= d) sum += below;
        }
        const unsigned beyond = __ballot_sync(ALL_LANES, sum > left);
        if (beyond) {
            const int from = __ffs(beyond) - 1;
            const int64_t mine = first + (left - (sum - tiles)) * high;
            RowTile t = { __shfl_sync(ALL_LANES, mine, from), __shfl_sync(ALL_LANES, end, from), base + from };
            return t;
        }
        left -= __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    return { 0, 0, -1 };
}

/* Does the depth go down the rows of A, of B? Else along them. */
template <int KIND> struct Down {
    static constexpr bool A = KIND == GROUPED_DW, B = KIND != GROUPED_FWD;
};

/* ---- launching ---- */

/* The tensors of one call: the product's, and the weights (dw: their gradient), which know E, O and I. */
struct GroupedArgs {
    Tensor a, b, out, weights, offset;
    bool add;
};

/* For tiles of `tile` by `tile`. */
template <class T, class Out, int KIND> static inline Grouped<T, Out> grouped_of(const GroupedArgs &a, int64_t tile)
{
    Grouped<T, Out> g = { data_of<const T>(a.a), data_of<const T>(a.b), data_of<Out>(a.out), a.a.ld, a.b.ld, a.out.ld };
    const int64_t E = a.weights.dim[0], O = a.weights.dim[1], I = a.weights.dim[2];
    g.offset = data_of<const int64_t>(a.offset);
    g.runs = (a.offset.dim[0] - 1) / E;
    g.experts = static_cast<int>(E);
    g.O = static_cast<int>(O), g.I = static_cast<int>(I);
    g.rows = grid_blocks(KIND == GROUPED_DW ? ceil_div(O, tile) : a.out.dim[0] / tile + E);
    g.columns = grid_blocks(ceil_div(KIND == GROUPED_FWD ? O : I, tile));
    g.add = a.add;
    return g;
}

/* On a GPU of compute capability 9.0, 16 bits, aligned rows: done; else nothing happens. */
Err grouped_hopper(Stream *s, int kind, const GroupedArgs &a, bool *done);

#endif
