/*
 * The products of grouped.cu on Hopper, 16 bits: operands arrive by TMA and are multiplied by wgmma (hopper.cuh).
 *
 * Mapping   one block a multiprocessor, which computes tile after tile. Warp 0 takes them from a list (HopperTiles) and
 *           has steps of 64 of the depth copied into a ring of four stages; two warpgroups multiply, 64 rows of the
 *           tile each. What a tile is stands beside its first stage, so that nobody else reads offsets, and the next
 *           tile's steps are under way while results are stored.
 * Depth     ends in zeros: TMA fills them in behind the rows and columns of a tensor. Where the depth goes down an
 *           expert's rows (dw), the next expert's follow them: in the last step those are set to zero in both operands.
 * Results   16 bits: through shared memory, to be written in lines of 128 bytes. dw: the same in fp32, and what they
 *           are added to is brought to L2 some steps ahead.
 * Sums      one chain in ascending depth, 16 numbers an instruction, in tiles of any width: of the same bits as by
 *           mma.sync on an H100.
 */
#include "grouped_hopper.cuh"
extern "C" {
#include "device_cuda.h"
}

/* (as enumerators: where the kernel is empty, nobody uses some of them) */
enum : int {
    HOPPER_WIDE = 256, /* columns of a tile, if not narrow */
    HOPPER_NARROW = 128,
    HOPPER_DEPTH = 64, /* of a step */
    HOPPER_BOX = 64 * 64, /* elements that lie together: rows of 128 bytes, swizzled */
    HOPPER_A = HOPPER_ROWS * HOPPER_DEPTH,
    HOPPER_STAGE = HOPPER_A + HOPPER_WIDE * HOPPER_DEPTH,
    HOPPER_STAGES = 4,
    HOPPER_SHARED = HOPPER_STAGES * HOPPER_STAGE * 2 + HOPPER_WORKERS * 4 * HOPPER_SHEET,
    HOPPER_AHEAD = 24 /* steps before the last that what results are added to is fetched */
};
static_assert(HOPPER_DEPTH == 64, "a warpgroup's rows of a step are a box");

/* A tile. Results: rows from `row` on, `rows` of them or fewer than a tile has; columns likewise. */
struct HopperJob {
    int row, rows, column, columns;
    int steps,
        last; /* of the depth; numbers of the last of them that count. steps < 0: there is no further tile */
    int narrow;
};

/* Begin of the copies of a tile: in A, in B; fwd, dx: the expert, dw: its first row. */
struct HopperFrom {
    int a, b, expert;
};

/*
 * The tiles that this block computes, of a list: first wide ones in the order of grouped_order.h. Where the last round
 * would leave half of the multiprocessors idle or more, its tiles are cut in two: all left halves, then all right ones.
 * fwd, dx: every gridDim.x-th. dw, where an expert's tiles take as long as it has rows: the next that nobody has taken,
 * by a count in device memory; no result depends on who computes it. By a whole warp.
 */
template <int KIND, class G> struct HopperTiles {
    const G &g;
    unsigned *taken;
    int across;
    uint32_t at, wide, cut;
    __device__ __forceinline__ HopperTiles(const G &grouped, unsigned *count)
        : g(grouped), taken(count), across(KIND == GROUPED_FWD ? grouped.O : grouped.I), at(blockIdx.x)
    {
        const uint32_t tiles = g.rows * g.columns * (KIND == GROUPED_DW ? g.experts : 1),
                       rest = tiles % gridDim.x;
        cut = across <= HOPPER_NARROW ? tiles : rest * 2 <= gridDim.x ? rest : 0;
        wide = tiles - cut;
    }

    __device__ __forceinline__ void step()
    {
        if (KIND == GROUPED_DW) {
            unsigned before = 0;
            if (threadIdx.x == 0) before = atomicAdd(taken, 1u);
            at = gridDim.x + __shfl_sync(ALL_LANES, before, 0);
        } else at += gridDim.x;
    }

    /* false: there is none. */
    __device__ __forceinline__ bool next(HopperJob *j, HopperFrom *f)
    {
        while (at < wide + 2 * cut) {
            const bool right = at >= wide + cut, narrow = at >= wide;
            const uint32_t tile = right ? at - cut : at;
            step();
            if (KIND == GROUPED_DW ? down(j, f, tile) : along(j, f, tile)) {
                if (right) j->column += HOPPER_NARROW, j->columns -= HOPPER_NARROW, f->b += HOPPER_NARROW;
                j->narrow = narrow || j->columns <= HOPPER_NARROW;
                if (j->columns > 0) return true;
            }
        }
        return false;
    }

    __device__ __forceinline__ bool along(HopperJob *j, HopperFrom *f, uint32_t tile) const
    {
        const GroupedPlace place = grouped_place(tile, g.rows, g.columns);
        const RowTile r = find_rows(g, place.row, HOPPER_ROWS);
        if (r.expert < 0) return false;
        const int depth = KIND == GROUPED_FWD ? g.I : g.O,
                  column = static_cast<int>(place.column) * HOPPER_WIDE;
        const int row = static_cast<int>(r.first), steps = (depth + HOPPER_DEPTH - 1) / HOPPER_DEPTH;
        *j = { row, static_cast<int>(r.end) - row, column, across - column, steps, HOPPER_DEPTH, 0 };
        *f = { row, column, r.expert };
        return true;
    }

    __device__ __forceinline__ bool down(HopperJob *j, HopperFrom *f, uint32_t tile) const
    {
        const uint32_t tiles = g.rows * g.columns;
        const int e = static_cast<int>(tile / tiles);
        const int first = static_cast<int>(g.start(e)), depth = static_cast<int>(g.start(e + 1)) - first;
        if (depth == 0 && g.add) return false;
        const GroupedPlace place = grouped_place(tile % tiles, g.rows, g.columns);
        const int row = static_cast<int>(place.row) * HOPPER_ROWS,
                  column = static_cast<int>(place.column) * HOPPER_WIDE;
        const int steps = (depth + HOPPER_DEPTH - 1) / HOPPER_DEPTH;
        *j = {
            e * g.O + row, g.O - row, column, across - column, steps, depth - (steps - 1) * HOPPER_DEPTH, 0
        };
        *f = { row, column, first };
        return true;
    }
};

typedef StageRing<HOPPER_STAGES> HopperRing;

template <class T> struct HopperShared {
    T *stages;
    char *sheets;
    Barrier *full, *empty; /* of each stage */
    HopperJob *job;        /* of the tile whose first step the stage holds */
};

/* ---- copies: one warp ---- */

/* Step k of a tile, by one thread. */
template <int KIND, class T>
__device__ __forceinline__ void copy_step(T *a, Barrier *full, const TensorMap &map_a, const TensorMap &map_b,
                                          const HopperFrom &f, int k, int columns)
{
    T *b = a + HOPPER_A;
    const int at = k * HOPPER_DEPTH;
    barrier_expect(full, (HOPPER_A + columns * HOPPER_DEPTH) * 2);
    if (KIND == GROUPED_DW) {
        UNROLL
        for (int i = 0; i < HOPPER_ROWS; i += 64)
            tma_load_2d(a + i * 64, map_a, full, f.a + i, f.expert + at);
        for (int i = 0; i < columns; i += 64) tma_load_2d(b + i * 64, map_b, full, f.b + i, f.expert + at);
        return;
    }
    tma_load_2d(a, map_a, full, at, f.a);
    if (KIND == GROUPED_FWD) {
        for (int i = 0; i < columns; i += HOPPER_NARROW)
            tma_load_3d(b + i * 64, map_b, full, at, f.b + i, f.expert);
    } else {
        for (int i = 0; i < columns; i += 64) tma_load_3d(b + i * 64, map_b, full, f.b + i, at, f.expert);
    }
}

/* Prefetches the sums that results will be added to, by a warp. */
template <class G> __device__ __forceinline__ void prefetch_results(const G &g, const HopperJob &j)
{
    const int most = j.narrow ? HOPPER_NARROW : HOPPER_WIDE, columns = j.columns < most ? j.columns : most;
    for (int row = threadIdx.x; row < HOPPER_ROWS && row < j.rows; row += WARP)
        prefetch_l2_bytes(g.out + (j.row + row) * g.ldo + j.column, columns * 4);
}

template <int KIND, class T, class G>
__device__ __forceinline__ void copy_tiles(const G &g, unsigned *taken, const HopperShared<T> &s,
                                           const TensorMap &map_a, const TensorMap &map_b)
{
    const bool leader = threadIdx.x == 0;
    HopperTiles<KIND, G> tiles(g, taken);
    HopperRing ring;
    HopperJob j;
    HopperFrom f;
    while (tiles.next(&j, &f)) {
        const int stages = j.steps > 0 ? j.steps : 1,
                  late = stages > HOPPER_AHEAD ? stages - HOPPER_AHEAD : 0;
        for (int k = 0; k < stages; k++, ring.next()) {
            if (KIND == GROUPED_DW && g.add && k == late) prefetch_results(g, j);
            if (leader) {
                barrier_wait(s.empty + ring.at, ring.parity ^ 1);
                if (k == 0) s.job[ring.at] = j;
                if (j.steps > 0)
                    copy_step<KIND>(s.stages + ring.at * HOPPER_STAGE, s.full + ring.at, map_a, map_b, f, k,
                                    j.narrow ? HOPPER_NARROW : HOPPER_WIDE);
                else barrier_arrive(s.full + ring.at);
            }
            __syncwarp();
        }
    }
    if (!leader) return;
    barrier_wait(s.empty + ring.at, ring.parity ^ 1);
    s.job[ring.at].steps = -1;
    barrier_arrive(s.full + ring.at);
}

/* ---- products: two warpgroups ---- */

/* Rows from `rows` on of A and of B's N columns are set to zero; by both. */
template <int N, class T> __device__ __forceinline__ void end_depth(T *stage, int rows)
{
    const int t = threadIdx.x - HOPPER_GROUP;
    for (int box = 0; box < (HOPPER_ROWS + N) / 64; box++)
        for (int at = rows * 64 + t * 8; at < HOPPER_BOX; at += HOPPER_GROUP * HOPPER_WORKERS * 8)
            store16(stage + box * HOPPER_BOX + at, Pack<T>{});
    proxy_fence();
    named_sync(1, HOPPER_GROUP * HOPPER_WORKERS);
}

template <int KIND, int N, class T>
__device__ __forceinline__ void hopper_step(float (&d)[N / 2], const T *stage, bool keep)
{
    const int worker = threadIdx.x / HOPPER_GROUP - 1;
    const uint64_t a = shared_matrix(stage + worker * HOPPER_BOX, HOPPER_BOX * 2, 1024, SWIZZLE_128);
    const uint64_t b = shared_matrix(stage + HOPPER_A, HOPPER_BOX * 2, 1024, SWIZZLE_128);
    constexpr int A_STEP = Down<KIND>::A ? 128 : 2, B_STEP = Down<KIND>::B ? 128 : 2; /* 16 of the depth */
    UNROLL
    for (int i = 0; i < HOPPER_DEPTH / 16; i++)
        wgmma<Down<KIND>::A, Down<KIND>::B>(d, a + i * A_STEP, b + i * B_STEP, keep || i > 0, T());
}

template <int KIND, int N, class T, class Out>
__device__ __forceinline__ void hopper_tile(const Grouped<T, Out> &g, const HopperShared<T> &s,
                                            HopperRing *ring, const HopperJob &j, float (&d)[N / 2])
{
    const bool leader = threadIdx.x % WARP == 0;
    const int warp = threadIdx.x / WARP - HOPPER_GROUP / WARP;
    int before = ring->at;
    for (int k = 0; k < j.steps; k++, ring->next()) {
        if (k > 0) barrier_wait(s.full + ring->at, ring->parity);
        T *stage = s.stages + ring->at * HOPPER_STAGE;
        if (KIND == GROUPED_DW && k == j.steps - 1 && j.last < HOPPER_DEPTH) end_depth<N>(stage, j.last);
        wgmma_begin(d);
        hopper_step<KIND, N>(d, stage, k > 0);
        wgmma_commit();
        wgmma_wait<1>(); /* the step before is done with its stage */
        if (k > 0 && leader) barrier_arrive(s.empty + before);
        before = ring->at;
    }
    wgmma_wait<0>();
    wgmma_end(d);
    if (KIND == GROUPED_DW && j.steps == 0) ring->next();
    if (leader) barrier_arrive(s.empty + before);
    char *sheets = s.sheets + warp * HOPPER_SHEET;
    const Panel<Out> out = { g.out + (j.row + warp * 16) * g.ldo + j.column, g.ldo, j.rows - warp * 16,
                             j.columns };
    if constexpr (KIND == GROUPED_DW) add_product<N>(d, sheets, out, g.add, j.steps > 0);
    else store_product<N>(d, sheets, out);
}

template <int KIND, class T, class Out>
__device__ __forceinline__ void multiply_tiles(const Grouped<T, Out> &g, const HopperShared<T> &s)
{
    HopperRing ring;
    float d[HOPPER_WIDE / 2]; /* (one array: registers that nothing was written to are kept apart for each) */
    for (;;) {
        barrier_wait(s.full + ring.at, ring.parity);
        const HopperJob j = s.job[ring.at];
        __syncwarp(); /* the stage may be given back: all have read what it says */
        if (j.steps < 0) return;
        if (j.narrow)
            hopper_tile<KIND, HOPPER_NARROW>(g, s, &ring, j,
                                             reinterpret_cast<float(&)[HOPPER_NARROW / 2]>(d));
        else hopper_tile<KIND, HOPPER_WIDE>(g, s, &ring, j, d);
    }
}

template <class T, class Out, int KIND>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    grouped_wgmma_kernel(Grouped<T, Out> g, unsigned *taken, TENSOR_MAP(map_a), TENSOR_MAP(map_b))
{
#if HOPPER
    DYNAMIC_SHARED(T, stages); /* [stages] of A and B; a sheet for each warp that multiplies */
    SHARED(Barrier, full, [HOPPER_STAGES]);
    SHARED(Barrier, empty, [HOPPER_STAGES]);
    SHARED(HopperJob, job, [HOPPER_STAGES]);
    char *sheets = reinterpret_cast<char *>(stages + HOPPER_STAGES * HOPPER_STAGE);
    const HopperShared<T> s = { stages, sheets, full, empty, job };
    ring_ready<HOPPER_STAGES>(full, empty);
    if (threadIdx.x < HOPPER_GROUP) {
        registers_give<40>();
        if (threadIdx.x < WARP) copy_tiles<KIND>(g, taken, s, map_a, map_b);
    } else {
        registers_take<232>();
        multiply_tiles<KIND>(g, s);
    }
#endif
}

/* ---- launching ---- */

/* Copies of high x 64 from rows of `across` numbers, `rows` of them, in `planes` (0: no such dimension). */
static inline Err hopper_map(TensorMap *out, Tensor t, int64_t across, int64_t rows, int64_t planes, int high)
{
    const int64_t size = dtype_size(t.dtype);
    TensorBox b = { t.data,
                    planes ? 3 : 2,
                    { across, rows > 0 ? rows : 1, planes },
                    { size, t.ld * size },
                    { 64, high, 1 },
                    128 };
    b.stride[2] = rows * t.ld * size;
    return tensor_map(out, &b);
}

template <class T, int KIND> static Err launch_hopper(Stream *s, const GroupedArgs &a, bool *done)
{
    typedef typename std::conditional<KIND == GROUPED_DW, float, T>::type Out;
    static const bool there = hopper_code(grouped_wgmma_kernel<T, Out, KIND>);
    *done = there;
    if (!there) return ERR_OK;
    const int64_t E = a.weights.dim[0], O = a.weights.dim[1], I = a.weights.dim[2], P = a.a.dim[0];
    Grouped<T, Out> g = grouped_of<T, Out, KIND>(a, HOPPER_ROWS);
    g.columns = grid_blocks(ceil_div(KIND == GROUPED_FWD ? O : I, HOPPER_WIDE));
    TensorMap map_a, map_b;
    TRY(hopper_map(&map_a, a.a, KIND == GROUPED_FWD ? I : O, P, 0, KIND == GROUPED_DW ? 64 : HOPPER_ROWS));
    if (KIND == GROUPED_DW) TRY(hopper_map(&map_b, a.b, I, P, 0, 64));
    else TRY(hopper_map(&map_b, a.b, I, O, E, KIND == GROUPED_FWD ? HOPPER_NARROW : 64));
    const int threads = HOPPER_THREADS, bytes = HOPPER_SHARED;
    TRY(allow_shared(grouped_wgmma_kernel<T, Out, KIND>, bytes));
    unsigned *taken = nullptr;
    if (KIND == GROUPED_DW) TRY(items_taken(s, &taken));
    LAUNCH((grouped_wgmma_kernel<T, Out, KIND>), s->dev->threads, threads, bytes, cuda_stream(s), g, taken,
           map_a, map_b);
    return ERR_OK;
}

template <int KIND> static Err launch_kind(Stream *s, const GroupedArgs &a, bool *done)
{
    if (a.a.dtype == BF16) return launch_hopper<bf16, KIND>(s, a, done);
    return launch_hopper<f16, KIND>(s, a, done);
}

Err grouped_hopper(Stream *s, int kind, const GroupedArgs &a, bool *done)
{
    const int64_t most = INT32_MAX - HOPPER_ROWS,
                  *dim = a.weights.dim; /* coordinates of copies are of 32 bits */
    *done = false;
    if (a.a.dtype != BF16 && a.a.dtype != F16) return ERR_OK;
    if (!rows_aligned(a.a) || !rows_aligned(a.b) || !rows_aligned(a.out)) return ERR_OK;
    if (a.a.dim[0] > most || dim[0] * dim[1] > most || dim[2] > most) return ERR_OK;
    switch (kind) {
    case GROUPED_FWD: return launch_kind<GROUPED_FWD>(s, a, done);
    case GROUPED_DX: return launch_kind<GROUPED_DX>(s, a, done);
    default: return launch_kind<GROUPED_DW>(s, a, done);
    }
}
