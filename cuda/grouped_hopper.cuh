/*
 * The products of grouped.cu on Hopper, 16 bits: copies by TMA, products by wgmma (hopper.cuh).
 *
 * Mapping   one block a multiprocessor, which takes tile after tile: its number, number + blocks, ... of the order that
 *           grouped_order.h gives. A tile is 128 rows by N columns. Warp 0 looks tiles up in the offsets and has steps of
 *           64 of the depth copied into a ring of stages; two warpgroups multiply them, 64 rows each. What a tile is
 *           stands beside its first stage, so that nobody else reads offsets, and the next tile's steps are under way
 *           while results are stored.
 * Depth     ends in zeros: behind rows and columns of a tensor TMA fills them in. Where the depth goes down an expert's
 *           rows (dw), those of the next follow; of the last step they are set to zero in both operands.
 * Sums      in ascending steps of the depth, in an order that the chip alone knows but that does not depend on the tile.
 */
#ifndef MEGATRAIN_CUDA_GROUPED_HOPPER_CUH
#define MEGATRAIN_CUDA_GROUPED_HOPPER_CUH

#include "hopper.cuh"

#ifndef HOPPER_CLUSTER
#define HOPPER_CLUSTER 1
#endif
#ifndef HOPPER_W
#define HOPPER_W 2
#endif
#ifndef HOPPER_LEAD
#define HOPPER_LEAD 0
#endif

constexpr int HOPPER_ROWS = 64 * HOPPER_W, HOPPER_DEPTH = 64, HOPPER_WORKERS = HOPPER_W;    /* of a tile; warpgroups that multiply */
constexpr int HOPPER_GROUP = 128, HOPPER_THREADS = HOPPER_GROUP * (1 + HOPPER_WORKERS);
constexpr int HOPPER_SHARE = HOPPER_ROWS / HOPPER_WORKERS;                 /* rows of a warpgroup */
constexpr int HOPPER_BOX = 64 * 64;                                        /* elements; rows of 128 bytes, swizzled */
constexpr int HOPPER_SHEET = 16 * 64;                                      /* elements: a warp's results on their way */
static_assert(HOPPER_SHARE == 64 && HOPPER_DEPTH == 64, "an operand's share is a box, its depth a row of one");

constexpr int HOPPER_SHARED = 226 * 1024; /* bytes of a block's 227 KB: barriers take the rest */

/* The tile: N columns; as many stages as there is room for. */
template <int N> struct HopperTile {
    static constexpr int A = HOPPER_ROWS * HOPPER_DEPTH, B = N * HOPPER_DEPTH, STAGE = A + B; /* elements */
    static constexpr int SHEETS = 2 * HOPPER_SHEET * 4 * HOPPER_WORKERS;
    static constexpr int ROOM = (HOPPER_SHARED / 2 - SHEETS) / STAGE, STAGES = ROOM < 8 ? ROOM : 8;
    static constexpr size_t SHARED = (STAGES * STAGE + SHEETS) * 2;
    static constexpr int BYTES = STAGE * 2;
};

/* What a tile is. Results: rows [row, row + rows), columns [column, column + columns). */
struct HopperJob {
    int row, rows, column, columns;
    int steps, last; /* of the depth; rows of the last of them that count. steps < 0: there is no further tile */
};

/* Where the copies of a tile begin: rows of A or its columns, an expert's rows of B. */
struct HopperFrom {
    int a, b, expert;
};

/* Tiles in the order of their numbers. By a whole warp. */
template <int KIND, int N, class G> struct HopperTiles {
    const G &g;
    uint32_t at, count;
    __device__ __forceinline__ explicit HopperTiles(const G &grouped) : g(grouped), at(blockIdx.x / HOPPER_CLUSTER)
    {
        count = g.rows * g.columns * (KIND == GROUPED_DW ? g.experts : 1);
    }

    /* false: there is none. */
    __device__ __forceinline__ bool next(HopperJob *j, HopperFrom *f)
    {
        for (; at < count; at += gridDim.x / HOPPER_CLUSTER) {
            if (KIND == GROUPED_DW ? down(j, f) : along(j, f)) {
                at += gridDim.x / HOPPER_CLUSTER;
                return true;
            }
        }
        return false;
    }

    __device__ __forceinline__ bool along(HopperJob *j, HopperFrom *f)
    {
        const GroupedPlace place = grouped_place(at, g.rows, g.columns);
        const RowTile r = find_rows(g, place.row, HOPPER_ROWS * HOPPER_CLUSTER);
        if (r.expert < 0) return false;
        const int depth = KIND == GROUPED_FWD ? g.I : g.O, across = KIND == GROUPED_FWD ? g.O : g.I;
        const int column = static_cast<int>(place.column) * N;
        const int row = static_cast<int>(r.first) + cluster_rank() * HOPPER_ROWS, steps = (depth + HOPPER_DEPTH - 1) / HOPPER_DEPTH;
        *j = { row, static_cast<int>(r.end) - row, column, across - column, steps, HOPPER_DEPTH };
        *f = { row, column, r.expert };
        return true;
    }

    __device__ __forceinline__ bool down(HopperJob *j, HopperFrom *f)
    {
        const uint32_t tiles = g.rows * g.columns;
        const int e = static_cast<int>(at / tiles);
        const GroupedPlace place = grouped_place(at % tiles, g.rows, g.columns);
        const int first = static_cast<int>(g.start(e)), depth = static_cast<int>(g.start(e + 1)) - first;
        if (depth == 0 && g.add) return false;
        const int row = (static_cast<int>(place.row) * HOPPER_CLUSTER + cluster_rank()) * HOPPER_ROWS, column = static_cast<int>(place.column) * N;
        const int steps = (depth + HOPPER_DEPTH - 1) / HOPPER_DEPTH;
        *j = { e * g.O + row, g.O - row, column, g.I - column, steps, depth - (steps - 1) * HOPPER_DEPTH };
        *f = { row, column, first };
        return true;
    }
};

/* A place in the ring of stages, and the parity of its barriers. */
template <int STAGES> struct HopperRing {
    int at = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

template <class T> struct HopperShared {
    T *stages, *sheets;
    Barrier *full, *empty;
    HopperJob *job;
};

/* Copies of step k of a tile. By one thread. */
template <int KIND, int N, class T>
__device__ __forceinline__ void copy_step(T *a, Barrier *full, const TensorMap &map_a, const TensorMap &map_b,
                                          const HopperFrom &f, int k)
{
    T *b = a + HopperTile<N>::A;
    const int at = k * HOPPER_DEPTH;
    constexpr int EACH = N / 64 / HOPPER_CLUSTER;
    const int from = HOPPER_CLUSTER > 1 ? cluster_rank() * EACH : 0;
    if (KIND == GROUPED_DW) {
        UNROLL
        for (int i = 0; i < HOPPER_ROWS / 64; i++) tma_load_2d(a + i * HOPPER_BOX, map_a, full, f.a + i * 64, f.expert + at);
    } else tma_load_2d(a, map_a, full, at, f.a);
    b += from * HOPPER_BOX;
    const int first = f.b + from * 64;
    if (KIND == GROUPED_FWD) {
        if (HOPPER_CLUSTER > 1) tma_spread_3d(b, map_b, full, 3, at, first, f.expert);
        else tma_load_3d(b, map_b, full, at, first, f.expert);
        return;
    }
    UNROLL
    for (int i = 0; i < EACH; i++) {
        if (KIND == GROUPED_DW) {
            if (HOPPER_CLUSTER > 1) tma_spread_2d(b + i * HOPPER_BOX, map_b, full, 3, first + i * 64, f.expert + at);
            else tma_load_2d(b + i * HOPPER_BOX, map_b, full, first + i * 64, f.expert + at);
        } else {
            if (HOPPER_CLUSTER > 1) tma_spread_3d(b + i * HOPPER_BOX, map_b, full, 3, first + i * 64, at, f.expert);
            else tma_load_3d(b + i * HOPPER_BOX, map_b, full, first + i * 64, at, f.expert);
        }
    }
}

/* The stage may be filled anew, by all who copy to it. By one lane a warp. */
__device__ __forceinline__ void stage_free(Barrier *empty)
{
    if (HOPPER_CLUSTER == 1) barrier_arrive(empty);
    else
        for (int i = 0; i < HOPPER_CLUSTER; i++) barrier_arrive_at(empty, i);
}

template <int KIND, int N, class T, class G>
__device__ __forceinline__ void copy_tiles(const G &g, const HopperShared<T> &s, const TensorMap &map_a,
                                           const TensorMap &map_b)
{
    typedef HopperTile<N> Tile;
    const bool leader = threadIdx.x % WARP == 0;
    HopperTiles<KIND, N, G> tiles(g);
    HopperRing<Tile::STAGES> ring;
    HopperJob j;
    HopperFrom f;
    while (tiles.next(&j, &f)) {
#ifdef HOPPER_PREFETCH
        if (KIND == GROUPED_DW && g.add)
            for (int i = threadIdx.x; i < HOPPER_ROWS * (N / 32); i += WARP) {
                const int row = i / (N / 32), column = i % (N / 32) * 32;
                if (row < j.rows && column < j.columns) prefetch_l2(g.out + (j.row + row) * g.ldo + j.column + column);
            }
#endif
        for (int k = 0; k < (j.steps > 0 ? j.steps : 1); k++, ring.next()) {
            if (!leader) continue;
            barrier_wait(s.empty + ring.at, ring.parity ^ 1);
            if (k == 0) s.job[ring.at] = j;
            if (j.steps == 0) {
                barrier_arrive(s.full + ring.at);
                continue;
            }
            barrier_expect(s.full + ring.at, Tile::BYTES);
            copy_step<KIND, N>(s.stages + ring.at * Tile::STAGE, s.full + ring.at, map_a, map_b, f, k);
        }
        __syncwarp();
    }
    if (!leader) return;
    barrier_wait(s.empty + ring.at, ring.parity ^ 1);
    s.job[ring.at].steps = -1;
    barrier_arrive(s.full + ring.at);
}

/* Rows from `rows` on of this warpgroup's A and of all B are set to zero: by both warpgroups. */
template <int N, class T> __device__ __forceinline__ void end_depth(T *a, int rows)
{
    const int t = threadIdx.x - HOPPER_GROUP;
    for (int box = 0; box < HOPPER_ROWS / 64 + N / 64; box++)
        for (int at = rows * 64 + t * 8; at < HOPPER_BOX; at += HOPPER_GROUP * HOPPER_WORKERS * 8)
            store16(a + box * HOPPER_BOX + at, Pack<T>{});
    proxy_fence();
    named_sync(1, HOPPER_GROUP * HOPPER_WORKERS);
}

/* One step's products. */
template <int KIND, int N, class T> __device__ __forceinline__ void multiply_step(float (&d)[N / 2], const T *stage, int k)
{
    const int worker = threadIdx.x / HOPPER_GROUP - 1;
    const uint64_t a = shared_matrix(stage + worker * HOPPER_BOX, HOPPER_BOX * 2, 1024, SWIZZLE_128);
    const uint64_t b = shared_matrix(stage + HopperTile<N>::A, HOPPER_BOX * 2, 1024, SWIZZLE_128);
    UNROLL
    for (int i = 0; i < HOPPER_DEPTH / 16; i++)
        wgmma<Down<KIND>::A, Down<KIND>::B>(d, a + i * (Down<KIND>::A ? 128 : 2), b + i * (Down<KIND>::B ? 128 : 2),
                                            k > 0 || i > 0, T());
}

/* This warp's 16 rows by N columns, through its two sheets, rows of 128 bytes whose chunks are moved. */
template <int N, class T>
__device__ __forceinline__ void store_product(const float (&d)[N / 2], T *sheets, const Panel<T> &out)
{
    const int l = threadIdx.x % WARP;
    UNROLL
    for (int c = 0; c < N / 64; c++) {
        T *sheet = sheets + c % 2 * HOPPER_SHEET;
        UNROLL
        for (int j = 0; j < 8; j++)
            UNROLL
            for (int h = 0; h < 2; h++) {
                const int row = l / 4 + h * 8, r = c * 32 + j * 4 + h * 2;
                *reinterpret_cast<uint32_t *>(sheet + row * 64 + (j ^ (row & 7)) * 8 + l % 4 * 2) =
                    pack_pair(d[r], d[r + 1], T());
            }
        __syncwarp(); /* the other sheet has been read when this is passed */
        UNROLL
        for (int i = 0; i < 4; i++) {
            const int row = i * 4 + l / 8, chunk = l % 8, column = c * 64 + chunk * 8;
            if (row < out.rows && column < out.columns)
                store16_global(out.data + row * out.ld + column, load16(sheet + row * 64 + (chunk ^ (row & 7)) * 8));
        }
    }
}

/* The same of fp32, from registers: four lanes write a sector of 32 bytes. `none`: the product of no rows. */
template <int N>
__device__ __forceinline__ void add_product(const float (&d)[N / 2], const Panel<float> &out, bool add, bool none)
{
    const int l = threadIdx.x % WARP;
    UNROLL
    for (int h = 0; h < 2; h++) {
        const int row = l / 4 + h * 8;
        float *to = out.data + row * out.ld + l % 4 * 2;
        const int64_t left = row < out.rows ? out.columns - l % 4 * 2 : 0;
        UNROLL
        for (int j = 0; j < N / 8; j += 8) {
            float2 x[8];
            UNROLL
            for (int i = 0; i < 8; i++)
                x[i] = add && (j + i) * 8 < left ? *reinterpret_cast<const float2 *>(to + (j + i) * 8)
                                                 : make_float2(0.0f, 0.0f);
            UNROLL
            for (int i = 0; i < 8; i++) {
                const int r = (j + i) * 4 + h * 2;
                if (!none) x[i].x += d[r], x[i].y += d[r + 1];
                if ((j + i) * 8 < left) *reinterpret_cast<float2 *>(to + (j + i) * 8) = x[i];
            }
        }
    }
}

template <int KIND, int N, class T, class Out>
__device__ __forceinline__ void multiply_tiles(const Grouped<T, Out> &g, const HopperShared<T> &s)
{
    typedef HopperTile<N> Tile;
    const bool leader = threadIdx.x % WARP == 0;
    const int warp = threadIdx.x / WARP - HOPPER_GROUP / WARP;
    HopperRing<Tile::STAGES> ring;
#if HOPPER_LEAD
    int lead = HOPPER_LEAD;
    if (threadIdx.x >= 2 * HOPPER_GROUP) lead = 0, named_sync(2, HOPPER_GROUP * HOPPER_WORKERS);
#endif
    for (;;) {
        barrier_wait(s.full + ring.at, ring.parity);
        const HopperJob j = s.job[ring.at];
        if (j.steps < 0) break;
        float d[N / 2];
        int before = ring.at;
        for (int k = 0; k < j.steps; k++, ring.next()) {
            if (k > 0) barrier_wait(s.full + ring.at, ring.parity);
            T *stage = s.stages + ring.at * Tile::STAGE;
            if (KIND == GROUPED_DW && k == j.steps - 1 && j.last < HOPPER_DEPTH) end_depth<N>(stage, j.last);
            wgmma_begin(d);
            multiply_step<KIND, N>(d, stage, k);
            wgmma_commit();
            wgmma_wait<1>(); /* the step before is done with its stage */
            if (k > 0 && leader) stage_free(s.empty + before);
            before = ring.at;
#if HOPPER_LEAD
            if (lead > 0 && --lead == 0) named_arrive(2, HOPPER_GROUP * HOPPER_WORKERS);
#endif
        }
        wgmma_wait<0>();
        wgmma_end(d);
        if (KIND == GROUPED_DW && j.steps == 0) ring.next();
        if (leader) stage_free(s.empty + before);
#ifdef HOPPER_NOSTORE
        if (d[0] != 1.2345e30f) continue;
#endif
        const int64_t row = j.row + warp * 16;
        const Panel<Out> out = { g.out + row * g.ldo + j.column, g.ldo, j.rows - warp * 16, j.columns };
        if constexpr (KIND == GROUPED_DW) add_product<N>(d, out, g.add, j.steps == 0);
        else store_product<N>(d, s.sheets + warp * 2 * HOPPER_SHEET, out);
    }
#if HOPPER_LEAD
    if (lead > 0) named_arrive(2, HOPPER_GROUP * HOPPER_WORKERS);
#endif
}

template <class T, class Out, int KIND, int N>
__global__ void __cluster_dims__(HOPPER_CLUSTER, 1, 1) __launch_bounds__(HOPPER_THREADS, 1)
    grouped_wgmma_kernel(Grouped<T, Out> g, TENSOR_MAP(map_a), TENSOR_MAP(map_b))
{
#if HOPPER
    typedef HopperTile<N> Tile;
    DYNAMIC_SHARED(T, shared); /* [stages] of A and B; sheets of each warp */
    SHARED(Barrier, full, [Tile::STAGES]);
    SHARED(Barrier, empty, [Tile::STAGES]);
    SHARED(HopperJob, job, [Tile::STAGES]);
    const HopperShared<T> s = { shared, shared + Tile::STAGES * Tile::STAGE, full, empty, job };
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, HOPPER_CLUSTER * HOPPER_WORKERS * HOPPER_GROUP / WARP);
        }
        barriers_ready();
    }
    if (HOPPER_CLUSTER > 1) cluster_sync();
    else __syncthreads();
    if (threadIdx.x < HOPPER_GROUP) {
        registers_give<HOPPER_W == 3 ? 32 : 40>();
        if (threadIdx.x < WARP) copy_tiles<KIND, N>(g, s, map_a, map_b);
    } else {
        registers_take<HOPPER_W == 3 ? 160 : 232>();
        multiply_tiles<KIND, N>(g, s);
    }
    if (HOPPER_CLUSTER > 1) __syncwarp(), cluster_sync(); /* nothing arrives in a block that has left */
#endif
}

/* ---- launching ---- */

/* Dimensions innermost first: rows of `across` numbers, `rows` of them, in `planes`; a copy moves high x 64. */
static inline Err hopper_map(TensorMap *out, Tensor t, int64_t across, int64_t rows, int64_t planes, int high)
{
    const int64_t size = dtype_size(t.dtype);
    const TensorBox b = { t.data, planes ? 3 : 2, { across, rows > 0 ? rows : 1, planes },
                          { size, t.ld * size, rows * t.ld * size }, { 64, high, 1 }, 128 };
    return tensor_map(out, &b);
}

template <class T, int KIND, int N> static Err launch_hopper(Stream *s, const GroupedArgs &a)
{
    typedef typename std::conditional<KIND == GROUPED_DW, float, T>::type Out;
    const int64_t E = a.weights.dim[0], O = a.weights.dim[1], I = a.weights.dim[2], P = a.a.dim[0];
    Grouped<T, Out> g = grouped_of<T, Out, KIND>(a, HOPPER_ROWS);
    g.rows = grid_blocks(KIND == GROUPED_DW ? ceil_div(O, HOPPER_ROWS * HOPPER_CLUSTER) : P / (HOPPER_ROWS * HOPPER_CLUSTER) + E);
    g.columns = grid_blocks(ceil_div(KIND == GROUPED_FWD ? O : I, N));
    TensorMap map_a, map_b;
    TRY(hopper_map(&map_a, a.a, KIND == GROUPED_FWD ? I : O, P, 0, KIND == GROUPED_DW ? 64 : HOPPER_ROWS));
    if (KIND == GROUPED_DW) TRY(hopper_map(&map_b, a.b, I, P, 0, 64));
    else TRY(hopper_map(&map_b, a.b, I, O, E, KIND == GROUPED_FWD ? N / HOPPER_CLUSTER : 64));
    const int bytes = static_cast<int>(HopperTile<N>::SHARED);
    TRY(cuda_check(cudaFuncSetAttribute(grouped_wgmma_kernel<T, Out, KIND, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "grouped"));
    LAUNCH((grouped_wgmma_kernel<T, Out, KIND, N>), s->dev->threads / HOPPER_CLUSTER * HOPPER_CLUSTER, HOPPER_THREADS, HopperTile<N>::SHARED,
           cuda_stream(s), g, map_a, map_b);
    return ERR_OK;
}

#endif
