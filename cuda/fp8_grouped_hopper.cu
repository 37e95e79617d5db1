/*
 * The products of fp8_grouped.cu on Hopper: codes arrive by TMA and are multiplied by wgmma (hopper.cuh).
 *
 * Mapping   as grouped_hopper.cu: one block a multiprocessor, tile after tile of 128 x 128; warp 0 has steps copied
 *           into a ring of six stages, two warpgroups multiply 64 rows each. A step is 128 codes of the depth: a row of
 *           the swizzle, and a block with factors of its own.
 * Sums      the four wgmma of a step begin anew, in a sum of which a chip keeps some 14 bits. This times the factors is
 *           added in fp32 to what the steps before gave (the promotion of DeepSeek-AI 2024), while the tensor cores
 *           multiply for the other warpgroup. Two sums are 128 registers, so that tiles are no wider.
 * Factors   reach each warp from L2, loaded a step ahead. fp8_grouped: a number for each of a thread's two rows, and
 *           one for the tile's columns. fp8_grouped_add: 128 of columns besides, which pass through the warp's sheet.
 * Depth     is whole blocks in both forms, so that no step holds codes of two experts.
 * FLOP      2 P O I each. No GPU has run it.
 * Traffic   a tile reads 256 x depth codes, half of what one of 16 bits takes.
 * Needs     object code of sm_90a; results on 16 bytes.
 */
#include "fp8_grouped.cuh"
#include "grouped_hopper.cuh"
extern "C" {
#include "device_cuda.h"
#include "fp8.h"
}

/* (as enumerators: where the kernel is empty, nobody uses some of them) */
enum : int {
    CODES_WIDE = 128, /* columns of a tile */
    CODES_DEPTH = FP8_BLOCK,
    CODES_A = HOPPER_ROWS * CODES_DEPTH,
    CODES_STAGE = CODES_A + CODES_WIDE * CODES_DEPTH,
    CODES_STAGES = 6,
    CODES_SHARED = CODES_STAGES * CODES_STAGE + HOPPER_WORKERS * 4 * HOPPER_SHEET,
    CODES_AHEAD = 12 /* steps before the last that what results are added to is fetched */
};
static_assert(CODES_DEPTH == 128, "a step is a row of the swizzle");
static_assert(2 * CODES_WIDE * sizeof(float) <= HOPPER_SHEET, "factors of two steps fit into a sheet");

/* A tile. Results: rows from `row` on, `rows` of them or fewer than a tile has; columns likewise. */
struct CodesJob {
    int row, rows, column, columns;
    int steps; /* < 0: there is no further tile */
    int64_t a, b; /* where the first step's factors begin */
};

/* Begin of the copies of a tile: rows, and codes along them. */
struct CodesFrom {
    int a, b, a_at, b_at;
};

typedef StageRing<CODES_STAGES> CodesRing;

struct CodesShared {
    uint8_t *stages;
    char *sheets;
    Barrier *full, *empty; /* of each stage */
    CodesJob *job;         /* of the tile whose first step the stage holds */
};

/*
 * The tiles that this block computes, in the order of grouped_order.h. fp8_grouped: every gridDim.x-th. DW, where an
 * expert's tiles take as long as it has rows: the next that nobody has taken, by a count in device memory. By a warp.
 */
template <bool DW> struct CodesTiles {
    const CodeProduct &p;
    unsigned *taken;
    uint32_t at;
    __device__ __forceinline__ CodesTiles(const CodeProduct &product, unsigned *count)
        : p(product), taken(count), at(blockIdx.x)
    {
    }

    __device__ __forceinline__ void step()
    {
        if (DW) {
            unsigned before = 0;
            if (threadIdx.x == 0) before = atomicAdd(taken, 1u);
            at = gridDim.x + __shfl_sync(ALL_LANES, before, 0);
        } else at += gridDim.x;
    }

    /* false: there is none. */
    __device__ __forceinline__ bool next(CodesJob *j, CodesFrom *f)
    {
        const uint32_t tiles = p.g.rows * p.g.columns * (DW ? p.g.experts : 1);
        while (at < tiles) {
            const uint32_t tile = at;
            step();
            if (DW ? down(j, f, tile) : along(j, f, tile)) return true;
        }
        return false;
    }

    __device__ __forceinline__ bool along(CodesJob *j, CodesFrom *f, uint32_t tile) const
    {
        const GroupedPlace place = grouped_place(tile, p.g.rows, p.g.columns);
        const RowTile r = find_rows(p.g, place.row, HOPPER_ROWS);
        if (r.expert < 0) return false;
        const int column = static_cast<int>(place.column) * CODES_WIDE, first = static_cast<int>(r.first);
        const int b = p.beside ? column : r.expert * p.g.O + column, at_b = p.beside ? r.expert * p.g.I : 0;
        *j = { first, static_cast<int>(r.end) - first, column, p.g.O - column, p.g.I / CODES_DEPTH, first,
               b / FP8_BLOCK * p.squares_ld + at_b / FP8_BLOCK };
        *f = { first, b, 0, at_b };
        return true;
    }

    __device__ __forceinline__ bool down(CodesJob *j, CodesFrom *f, uint32_t tile) const
    {
        const uint32_t tiles = p.g.rows * p.g.columns;
        const int e = static_cast<int>(tile / tiles);
        const int first = static_cast<int>(p.g.start(e)), depth = static_cast<int>(p.g.start(e + 1)) - first;
        if (depth == 0 && p.g.add) return false;
        const GroupedPlace place = grouped_place(tile % tiles, p.g.rows, p.g.columns);
        const int row = static_cast<int>(place.row) * HOPPER_ROWS, column = static_cast<int>(place.column) * CODES_WIDE;
        const int64_t block = first / FP8_BLOCK;
        *j = { e * p.g.O + row,          p.g.O - row,         column,
               p.g.I - column,           depth / CODES_DEPTH, block * p.a_rows + row,
               block * p.b_rows + column };
        *f = { row, column, first, first };
        return true;
    }
};

/* ---- copies: one warp ---- */

/* Prefetches the sums that results will be added to, by a warp. */
__device__ __forceinline__ void prefetch_results(const CodesJob &j, const float *dw, int64_t ld)
{
    const int columns = j.columns < CODES_WIDE ? j.columns : CODES_WIDE;
    for (int row = threadIdx.x; row < HOPPER_ROWS && row < j.rows; row += WARP)
        prefetch_l2_bytes(dw + (j.row + row) * ld + j.column, columns * 4);
}

template <bool DW, class Out>
__device__ __forceinline__ void copy_codes(const CodeProduct &p, Out *out, unsigned *taken, const CodesShared &s,
                                           const TensorMap &map_a, const TensorMap &map_b)
{
    const bool leader = threadIdx.x == 0;
    CodesTiles<DW> tiles(p, taken);
    CodesRing ring;
    CodesJob j;
    CodesFrom f;
    while (tiles.next(&j, &f)) {
        const int stages = j.steps > 0 ? j.steps : 1, late = stages > CODES_AHEAD ? stages - CODES_AHEAD : 0;
        for (int k = 0; k < stages; k++, ring.next()) {
            if constexpr (DW)
                if (p.g.add && k == late) prefetch_results(j, out, p.g.ldo);
            if (leader) {
                Barrier *full = s.full + ring.at;
                uint8_t *stage = s.stages + ring.at * CODES_STAGE;
                barrier_wait(s.empty + ring.at, ring.parity ^ 1);
                if (k == 0) s.job[ring.at] = j;
                if (j.steps > 0) {
                    barrier_expect(full, CODES_STAGE);
                    tma_load_2d(stage, map_a, full, f.a_at + k * CODES_DEPTH, f.a);
                    tma_load_2d(stage + CODES_A, map_b, full, f.b_at + k * CODES_DEPTH, f.b);
                } else barrier_arrive(full);
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

/* A thread's factors of a step: of its two rows, and of the tile's columns, or of 4 columns for the whole warp. */
template <bool DW> struct CodesFactors {
    float a[2], b[DW ? 4 : 1];

    __device__ __forceinline__ void load(const CodeProduct &p, const CodesJob &j, int step)
    {
        const int l = threadIdx.x % WARP, row = (threadIdx.x / WARP - HOPPER_GROUP / WARP) * 16 + l / 4;
        const float *from_a = p.a_factors + j.a + step * p.a_rows;
        UNROLL
        for (int h = 0; h < 2; h++) a[h] = row + h * 8 < j.rows ? from_a[row + h * 8] : 0;
        if (!DW) b[0] = p.b_factors[j.b + step];
        UNROLL
        for (int i = 0; i < 4 && DW; i++) {
            const int column = l + i * WARP;
            b[DW ? i : 0] = column < j.columns ? p.b_factors[j.b + step * p.b_rows + column] : 0;
        }
    }

    /* To where all lanes find those of all columns. */
    __device__ __forceinline__ void share(float *columns) const
    {
        UNROLL
        for (int i = 0; i < 4 && DW; i++) columns[threadIdx.x % WARP + i * WARP] = b[DW ? i : 0];
        if (DW) __syncwarp(); /* (who has passed this has read those of the step before the last) */
    }
};

/* all += part * factors; as fp8_grouped.cu's promote, to the bit. */
template <bool DW>
__device__ __forceinline__ void promote(float (&all)[CODES_WIDE / 2], const float (&part)[CODES_WIDE / 2],
                                        const float (&a)[2], float b, const float *columns)
{
    UNROLL
    for (int j = 0; j < CODES_WIDE / 8; j++) {
        float2 fb = make_float2(b, b);
        if (DW) fb = *reinterpret_cast<const float2 *>(columns + j * 8 + threadIdx.x % 4 * 2);
        UNROLL
        for (int h = 0; h < 2; h++) {
            const int r = j * 4 + h * 2;
            all[r] = fmaf(part[r], a[h] * fb.x, all[r]);
            all[r + 1] = fmaf(part[r + 1], a[h] * fb.y, all[r + 1]);
        }
    }
}

/* part = this warpgroup's product of a step. */
__device__ __forceinline__ void multiply_step(float (&part)[CODES_WIDE / 2], const uint8_t *stage)
{
    const int worker = threadIdx.x / HOPPER_GROUP - 1;
    const uint64_t a = shared_matrix(stage + worker * (CODES_A / HOPPER_WORKERS), 16, 1024, SWIZZLE_128);
    const uint64_t b = shared_matrix(stage + CODES_A, 16, 1024, SWIZZLE_128);
    wgmma_begin(part);
    UNROLL
    for (int i = 0; i < CODES_DEPTH / 32; i++) wgmma_e4m3(part, a + i * 2, b + i * 2, i > 0);
    wgmma_commit();
}

template <bool DW, class Out>
__device__ __forceinline__ void multiply_codes(const CodeProduct &p, Out *out, const CodesShared &s)
{
    const bool leader = threadIdx.x % WARP == 0;
    const int warp = threadIdx.x / WARP - HOPPER_GROUP / WARP;
    char *sheets = s.sheets + warp * HOPPER_SHEET;
    CodesRing ring;
    float part[CODES_WIDE / 2] = {};
    for (;;) {
        barrier_wait(s.full + ring.at, ring.parity);
        const CodesJob j = s.job[ring.at];
        __syncwarp(); /* the stage may be given back: all have read what it says */
        if (j.steps < 0) return;
        float all[CODES_WIDE / 2] = {};
        CodesFactors<DW> next = {};
        if (j.steps > 0) next.load(p, j, 0);
        for (int k = 0; k < j.steps; k++) {
            if (k > 0) barrier_wait(s.full + ring.at, ring.parity);
            multiply_step(part, s.stages + ring.at * CODES_STAGE);
            const CodesFactors<DW> now = next;
            float *columns = reinterpret_cast<float *>(sheets) + k % 2 * CODES_WIDE;
            now.share(columns);
            if (k + 1 < j.steps) next.load(p, j, k + 1);
            wgmma_wait<0>();
            wgmma_end(part);
            if (leader) barrier_arrive(s.empty + ring.at);
            ring.next();
            promote<DW>(all, part, now.a, now.b[0], columns);
        }
        if (j.steps == 0) {
            if (leader) barrier_arrive(s.empty + ring.at);
            ring.next();
        }
        if (DW) __syncwarp(); /* the sheet's factors have been read */
        const Panel<Out> to = { out + (j.row + warp * 16) * p.g.ldo + j.column, p.g.ldo, j.rows - warp * 16,
                                j.columns };
        if constexpr (DW) add_product<CODES_WIDE>(all, sheets, to, p.g.add, true);
        else store_product<CODES_WIDE>(all, sheets, to);
    }
}

template <bool DW, class Out>
__global__ void __launch_bounds__(HOPPER_THREADS, 1)
    fp8_grouped_wgmma_kernel(CodeProduct p, Out *out, unsigned *taken, TENSOR_MAP(map_a), TENSOR_MAP(map_b))
{
#if HOPPER
    DYNAMIC_SHARED(uint8_t, stages); /* [stages] of A and B; a sheet for each warp that multiplies */
    SHARED(Barrier, full, [CODES_STAGES]);
    SHARED(Barrier, empty, [CODES_STAGES]);
    SHARED(CodesJob, job, [CODES_STAGES]);
    const CodesShared s = { stages, reinterpret_cast<char *>(stages + CODES_STAGES * CODES_STAGE), full, empty, job };
    ring_ready<CODES_STAGES>(full, empty);
    if (threadIdx.x < HOPPER_GROUP) {
        registers_give<40>();
        if (threadIdx.x < WARP) copy_codes<DW>(p, out, taken, s, map_a, map_b);
    } else {
        registers_take<232>();
        multiply_codes<DW>(p, out, s);
    }
#endif
}

/* ---- launching ---- */

/* Copies of 128 codes of 128 rows. */
static Err codes_map(TensorMap *out, Tensor t)
{
    TensorBox b = {};
    b.data = t.data, b.rank = 2, b.swizzle = CODES_DEPTH, b.codes = true;
    b.dim[0] = t.dim[1], b.dim[1] = t.dim[0] > 0 ? t.dim[0] : 1;
    b.stride[1] = t.ld;
    b.box[0] = CODES_DEPTH, b.box[1] = HOPPER_ROWS;
    return tensor_map(out, &b);
}

template <bool DW, class Out>
static Err launch_codes(Stream *s, CodeProduct p, Tensor a, Tensor b, Tensor out, bool *done)
{
    static const bool there = hopper_code(fp8_grouped_wgmma_kernel<DW, Out>);
    const int64_t most = INT32_MAX - HOPPER_ROWS; /* coordinates of copies are of 32 bits */
    *done = there && rows_aligned(out) && a.dim[0] <= most && a.dim[1] <= most && b.dim[0] <= most &&
            b.dim[1] <= most && a.dim[1] > 0 && (!DW || static_cast<int64_t>(p.g.experts) * p.g.O <= most);
    if (!*done) return ERR_OK;
    p.g.columns = grid_blocks(ceil_div(DW ? p.g.I : p.g.O, CODES_WIDE));
    TensorMap map_a, map_b;
    TRY(codes_map(&map_a, a));
    TRY(codes_map(&map_b, b));
    const int threads = HOPPER_THREADS, bytes = CODES_SHARED;
    TRY(allow_shared(fp8_grouped_wgmma_kernel<DW, Out>, bytes));
    unsigned *taken = nullptr;
    if (DW) TRY(items_taken(s, &taken));
    LAUNCH((fp8_grouped_wgmma_kernel<DW, Out>), s->dev->threads, threads, bytes, cuda_stream(s), p,
           data_of<Out>(out), taken, map_a, map_b);
    return ERR_OK;
}

Err fp8_grouped_hopper(Stream *s, const CodeProduct &p, Tensor a, Tensor b, Tensor y, bool *done)
{
    return launch_codes<false, bf16>(s, p, a, b, y, done);
}

Err fp8_grouped_add_hopper(Stream *s, const CodeProduct &p, Tensor a, Tensor b, Tensor dw, bool *done)
{
    return launch_codes<true, float>(s, p, a, b, dw, done);
}
