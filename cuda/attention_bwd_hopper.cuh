/*
 * What the two kernels of attention's backward pass for Hopper share (attention_dq_hopper.cu, attention_dkv_hopper.cu):
 * tiles in shared memory, products of them by wgmma, the order of the blocks' work.
 *
 * Calls that come here (attention_bwd_hopper_fits) have matrices of 16 bits whose wider side has 40 to 128 columns, and
 * at least 64 queries and 64 keys. All else goes to mma.sync (attention_dq.cu, attention_dkv.cu). The shape alone
 * decides; both kernels of a call are of the same kind.
 *
 * A block has two warpgroups that compute, 64 rows each, and behind them one whose first warp moves tiles: it runs
 * ahead of the others by as many tiles as there are stages, and into the next rows' work while they store the last.
 * A block works on row tiles until none is left (`BlockOrder`), so no loads of rows stop the products.
 *
 * Tiles: columns in runs of ATOM (128 bytes), a run after the other; as TMA writes them, swizzled. Widths that are less
 * than W are filled with zeros. Rows beyond a tile's count are those that follow in the tensor, or zeros: what is
 * computed of them has weight 0.
 */
#ifndef MEGATRAIN_CUDA_ATTENTION_BWD_HOPPER_CUH
#define MEGATRAIN_CUDA_ATTENTION_BWD_HOPPER_CUH

#include "attention_mma.cuh"
#include "hopper.cuh"

constexpr int WARPGROUP = 128, GROUP_ROWS = 64;

/* ---- the engine ---- */

/* W: width of all matrices, zeros behind the narrower. */
template <class T_, int W_, int COLS_> struct BackEngine {
    typedef T_ T;
    static constexpr int GROUPS = 2; /* warpgroups that compute */
    static constexpr int W = W_, COLS = COLS_, ROWS = GROUP_ROWS * GROUPS, WARP_ROWS = 16;
    static_assert(W % 64 == 0, "whole runs");
    static constexpr int R = 2, N = COLS / 4, WARPS = 4 * GROUPS, WORKERS = WARPGROUP * GROUPS;
    static constexpr int THREADS = WORKERS + WARPGROUP;
    static constexpr int ATOM = 64, ATOMS = W / ATOM, SPAN = ATOM * 2; /* elements; bytes of a run */
    static constexpr Swizzle MODE = SWIZZLE_128;
    static constexpr int GIVE = 40, TAKE = 232; /* registers of a thread that loads, of one that computes */
    typedef MmaEngine<T, 64, 1, WARPS, COLS <= 64 ? COLS : 64, 1> Draws; /* of dropout: rows and columns lie alike */

    struct Scores {
        float x[COLS / 2];
        __device__ __forceinline__ float &at(int i, int j) { return x[j / 2 * 4 + i * 2 + j % 2]; }
    };
    struct Weights {
        uint32_t x[COLS / 16][4];
    };
    struct Sums {
        float x[W / 2];
    };

    struct Place {
        int row0, column0;
        __device__ __forceinline__ int row(int i) const { return row0 + i * 8; }
        __device__ __forceinline__ int column(int j) const { return column0 + j / 2 * 8 + j % 2; }
    };
    static __device__ __forceinline__ Place place()
    {
        const int thread = in_place(threadIdx.x);
        Place p = { thread / WARP * WARP_ROWS + thread % WARP / 4, thread % 4 * 2 };
        return p;
    }

    static __device__ __forceinline__ float exp2(float x) { return exp2_approx(x); }

    /* Matrices that wgmma reads are named by where they begin, in units of 16 bytes: from that to a descriptor, and
     * from one part of a tile to the next, it is one addition. Whatever takes more delays the products. */
    static __device__ __forceinline__ uint32_t begin_of(const T *tile) { return (shared_address(tile) & 0x3FFFF) >> 4; }
    static __host__ __device__ __forceinline__ constexpr int units(int elements) { return elements * 2 / 16; }

    template <int LEAD> static __device__ __forceinline__ uint64_t matrix(uint32_t begin)
    {
        constexpr uint32_t HIGH = static_cast<uint32_t>(MODE) << 30 | (8 * SPAN) >> 4;
        return static_cast<uint64_t>(HIGH) << 32 | (begin + ((LEAD >> 4) << 16));
    }

    /* Starts s = a b^T. a: 64 rows of a tile of ROWS; b: a tile of COLS rows. */
    static __device__ __forceinline__ void multiply(Scores &s, uint32_t a, uint32_t b)
    {
        constexpr int STEPS = ATOM / 16;
        wgmma_begin(s.x);
        UNROLL
        for (int k = 0; k < W / 16; k++)
            wgmma<false, false>(s.x, matrix<16>(a + units(k / STEPS * (ROWS * ATOM) + k % STEPS * 16)),
                                matrix<16>(b + units(k / STEPS * (COLS * ATOM) + k % STEPS * 16)), k > 0, T());
        wgmma_commit();
    }

    static __device__ __forceinline__ void round(Weights &w, const Scores &s)
    {
        UNROLL
        for (int k = 0; k < COLS / 16; k++)
            UNROLL
            for (int e = 0; e < 4; e++) w.x[k][e] = pack_pair(s.x[k * 8 + e * 2], s.x[k * 8 + e * 2 + 1], T());
    }

    /* Starts o += w b; b: a tile of COLS rows. */
    static __device__ __forceinline__ void add_weighted(Sums &o, const Weights &w, uint32_t b)
    {
        wgmma_begin(o.x);
        UNROLL
        for (int k = 0; k < COLS / 16; k++)
            wgmma_rows<true>(o.x, w.x[k], matrix<COLS * SPAN>(b + units(k * 16 * ATOM)), true, T());
        wgmma_commit();
    }

    static __device__ __forceinline__ void clear(Sums &o)
    {
        UNROLL
        for (int i = 0; i < W / 2; i++) o.x[i] = 0;
    }

    /* Place in the block's tile of a row's chunk of 16 bytes, on its way to global memory. */
    static __device__ __forceinline__ int offset(int row, int chunk)
    {
        constexpr int CHUNKS = ATOM / 8;
        return chunk / CHUNKS * (ROWS * ATOM) + row * ATOM + (chunk % CHUNKS ^ row / (8 / CHUNKS) % CHUNKS) * 8;
    }

    /*
     * Rows of `to` (row 0 of the block's; `step` apart, `count` of them, `width` elements) = o * factor. Goes through
     * `tile`, whose rows of this warpgroup no product reads any more.
     */
    static __device__ __forceinline__ void store(const Sums &o, float factor, T *tile, T *to, int64_t step, int count,
                                                 int width)
    {
        const Place at = place();
        UNROLL
        for (int i = 0; i < 2; i++)
            UNROLL
            for (int n = 0; n < W / 8; n++)
                *reinterpret_cast<uint32_t *>(tile + offset(at.row(i), n) + at.column0) =
                    pack_pair(o.x[n * 4 + i * 2] * factor, o.x[n * 4 + i * 2 + 1] * factor, T());
        __syncwarp();
        const int first = in_place(threadIdx.x) / WARP * WARP_ROWS;
        for (int i = threadIdx.x % WARP; i < WARP_ROWS * (W / 8); i += WARP) {
            const int r = first + i / (W / 8), chunk = i % (W / 8);
            if (r < count && chunk * 8 < width)
                store16_global(to + r * step + chunk * 8, load16(tile + offset(r, chunk)));
        }
    }

    static __device__ __forceinline__ void add_wide(const Sums &o, float factor, bool resumed, float *to, int64_t step,
                                                    int count, int width)
    {
        const Place at = place();
        UNROLL
        for (int i = 0; i < 2; i++)
            UNROLL
            for (int n = 0; n < W / 8; n++) {
                if (at.row(i) >= count || n * 8 >= width) continue;
                float2 *p = reinterpret_cast<float2 *>(to + at.row(i) * step + n * 8 + at.column0);
                float2 y = make_float2(0, 0);
                if (resumed) y = *p;
                y.x = fmaf(o.x[n * 4 + i * 2], factor, y.x);
                y.y = fmaf(o.x[n * 4 + i * 2 + 1], factor, y.y);
                *p = y;
            }
    }
};

/* ---- loads ---- */

/* Heads of a [B T H width] tensor as five dimensions: width, heads of a group, groups, rows, samples. */
template <class T> struct HeadMap {
    const T *data;
    int64_t width, group, groups, rows, samples; /* elements of each dimension */
    int64_t head, beside, row, sample;           /* steps */
};

template <class T> static inline HeadMap<T> head_map(Tensor t, const Heads<const T> &h)
{
    HeadMap<T> m = { h.data, t.dim[3], 1, t.dim[2], t.dim[1], t.dim[0], h.head, h.head, h.row, h.sample };
    return m;
}

template <class T> static inline HeadMap<T> head_map(Tensor t, const QueryHeads<const T> &h, int group)
{
    HeadMap<T> m = { h.data, t.dim[3], group,           t.dim[2] / group, t.dim[1],
                     t.dim[0], h.head, group * h.head + h.between, h.row, h.sample };
    return m;
}

template <class E> static Err map_rows(TensorMap *out, const HeadMap<typename E::T> &m, int rows)
{
    TensorBox b = {};
    b.data = m.data, b.rank = 5, b.swizzle = E::SPAN;
    const int64_t dim[5] = { m.width, m.group, m.groups, m.rows, m.samples };
    const int64_t stride[5] = { 1, m.head, m.beside, m.row, m.sample };
    for (int i = 0; i < 5; i++) b.dim[i] = dim[i], b.stride[i] = stride[i] * 2, b.box[i] = 1;
    b.box[0] = E::ATOM, b.box[3] = rows;
    return tensor_map(out, &b);
}

/* Starts the load of a tile of ROWS rows of head h, by one thread. */
template <class E, int ROWS>
__device__ __forceinline__ void load_rows(typename E::T *to, const TensorMap &map, Barrier *b, int group, int h,
                                          int row, int sample)
{
    const int g = h / group, first = h - g * group;
    UNROLL
    for (int a = 0; a < E::ATOMS; a++)
        tma_load_5d(to + a * (ROWS * E::ATOM), map, b, a * E::ATOM, first, g, row, sample);
}

/* Stage and parity of a ring. */
template <int STAGES> struct Ring {
    int stage, parity;
    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

/* ---- order ---- */

/*
 * Heads come in sections, whose other side stays in L2; in a section the tiles with most work come first, of all
 * heads. Each block takes the next item as soon as its tiles have room, whichever block comes first: an item's results
 * do not depend on the block.
 */
struct BlockOrder {
    int tiles, heads, items, section; /* heads of a sample; heads of a section, over samples */
    int *next;                        /* the item that is taken next; at the workspace's start */
};

struct BlockItem {
    int tile, h, b;
};

/* bytes: of the other side, a head. */
static inline Err block_order(BlockOrder *out, Stream *s, int64_t tiles, int64_t heads, int64_t samples, int64_t bytes)
{
    const int64_t fit = (int64_t{ 16 } << 20) / (bytes > 0 ? bytes : 1), all = heads * samples;
    out->tiles = static_cast<int>(tiles);
    out->heads = static_cast<int>(heads);
    out->items = static_cast<int>(tiles * all);
    out->section = static_cast<int>(fit < 1 ? 1 : fit < all ? fit : all);
    return items_taken(s, &out->next);
}

static inline unsigned order_blocks(Stream *s, const BlockOrder &o)
{
    return static_cast<unsigned>(o.items < s->dev->threads ? o.items : s->dev->threads);
}

/* The item that this block takes next, by a warp; false: there is none any more. */
__device__ __forceinline__ bool block_item(const BlockOrder &o, BlockItem *out)
{
    int i = 0;
    if (threadIdx.x % WARP == 0) i = atomicAdd(o.next, 1);
    i = __shfl_sync(ALL_LANES, i, 0);
    if (i >= o.items) return false;
    const int begin = i / (o.section * o.tiles) * o.section, at = i - begin * o.tiles;
    const int here = min(o.section, o.items / o.tiles - begin), head = begin + at % here;
    out->tile = at / here;
    out->b = head / o.heads;
    out->h = head % o.heads;
    return true;
}

#endif
