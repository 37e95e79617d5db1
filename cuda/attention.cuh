/*
 * Shared parts of the attention kernels: the problem as a kernel sees it, tiles of rows, who sees whom, dropout.
 *
 * Three kernels (attention_fwd.cu, attention_dq.cu, attention_dkv.cu) hold the loops over tiles and the
 * softmax. They are templates over an *engine*, which holds everything that depends on the instruction set:
 * tiles in shared memory, products, which thread has which score. There are two:
 *
 *   attention_mma.cuh   16-bit inputs: cp.async, ldmatrix, mma.sync
 *   attention_fma.cuh   fp32 inputs: plain FMA (no TF32)
 *
 * A block owns ROWS rows (queries; for dk and dv keys), its warps WARP_ROWS consecutive ones each, and walks
 * over tiles of COLS rows of the other side. Of the ROWS x COLS scores a thread has R rows x N columns:
 *
 *   E::Place                       where score (i, j) of this thread lies in the tile
 *   E::multiply(s, a, b)           s += a b^T     a: the block's rows, b: the tile's, both in shared memory
 *   E::add_weighted(o, s, b)       o += s b       s: scores turned into weights, by the warp that has the rows
 *   E::row_max, E::row_sum         over the threads that share a row
 *   E::keep_bits                   the dropout mask of a tile
 *   E::store                       o times a factor a row, to global memory
 *   E::add_wide                    the same, added to what fp32 memory has times another factor
 *
 * Hopper has a third one (attention_wgmma.cuh: wgmma on tiles that TMA brings) and, since there are warps that only
 * load, a second form of the loops: attention_fwd_hopper.cu.
 *
 * Row t of a side stands at position spans_position(span, t). A tile never leaves its span, so its positions
 * are consecutive. Query at position p sees keys from `low` to p; low follows from the document and the window.
 */
#ifndef MEGATRAIN_CUDA_ATTENTION_CUH
#define MEGATRAIN_CUDA_ATTENTION_CUH

#include <limits.h>
#include <math.h>

#include "kernel.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

/* Two runs of consecutive positions: rows 0 .. count[0] - 1, and the rows behind them. */
struct AttnSpans {
    int first[2], count[2];
};

/* One call, without its matrices. */
struct AttnProblem {
    AttnSpans q, k;
    int T, C, group;    /* rows of q; width of queries and keys; query heads per key head */
    int V;              /* width of values */
    int window;         /* 0: no limit */
    int head0;
    float scale;        /* above 0 */
    float softcap;      /* 0: none; else, as operands that no register has to hold: */
    float cap_inner, cap_outer, cap_unit; /* 2 log2(e) scale / softcap; softcap / scale; scale / softcap */
    const void *sink;   /* [H] of the matrices' type, or NULL; forward alone reads it */
    const int32_t *doc; /* or NULL */
    int64_t doc_ld;
    const int64_t *sample;
    Dropout dropout;
};

/* A [B T H C] tensor; steps in elements. */
template <class T> struct Heads {
    T *data;
    int64_t sample, row, head;
    __device__ __forceinline__ T *at(int b, int t, int h) const { return data + b * sample + t * row + h * head; }
};

template <class T> static inline Heads<T> heads_of(Tensor t)
{
    Heads<T> h = { data_of<T>(t), t.dim[1] * t.dim[2] * t.ld, t.dim[2] * t.ld, t.ld };
    return h;
}

/* The same of query heads, of which those that read one key head may lie side by side, as a group (Tensor.group). */
template <class T> struct QueryHeads {
    T *data;
    int64_t sample, row, head;
    /* from where the next head of a group would lie to the first of the next group; 0: they are even */
    int64_t between;
    /* The division takes registers that a loop may not have: loops have where their heads begin in shared memory. */
    __device__ __forceinline__ int64_t offset(const AttnProblem &p, int b, int t, int h) const
    {
        return b * sample + t * row + h * head + h / p.group * between;
    }
    __device__ __forceinline__ T *at(const AttnProblem &p, int b, int t, int h) const
    {
        return data + offset(p, b, t, h);
    }
};

template <class T> static inline QueryHeads<T> query_heads_of(Tensor t)
{
    const int64_t group = t.group > 1 ? t.group : 1, row = t.dim[2] / group * t.ld;
    QueryHeads<T> h = { data_of<T>(t), t.dim[1] * row, row, t.ld, 0 };
    if (group > 1) h.head = t.dim[3], h.between = t.ld - group * t.dim[3];
    return h;
}

/* A [B T H] tensor. */
struct RowValues {
    float *data;
    int64_t ld;
    __device__ __forceinline__ float *at(const AttnProblem &p, int b, int t, int h) const
    {
        return data + (static_cast<int64_t>(b) * p.T + t) * ld + h;
    }
};

static inline RowValues values_of(Tensor t)
{
    RowValues v = { data_of<float>(t), t.ld };
    return v;
}

/* Results of the queries in fp32, beside matrices of 16 bits or for keys that come in several calls: each call adds to
 * what those before it have left. */
struct WideRows {
    QueryHeads<float> rows; /* data NULL: results are of the matrices' type */
    bool resumed;
};

static inline WideRows wide_rows(Tensor t, DType matrices, bool several, bool resumed)
{
    WideRows w = { query_heads_of<float>(t), resumed };
    if (!several && t.dtype == matrices) w.rows.data = NULL;
    return w;
}

/* ---- tiles ---- */

struct RowTile {
    int row, position, count;
};

/* The tiles of `size` rows, counted from the start of their span, that hold positions of a range. */
struct TileWalk {
    int first[2], tiles[2]; /* of each span */
};

/* Positions from .. to, both included. */
__host__ __device__ __forceinline__ TileWalk walk_of(const AttnSpans &spans, int from, int to, int size)
{
    TileWalk w;
    UNROLL
    for (int s = 0; s < 2; s++) {
        const int begin = from > spans.first[s] ? from - spans.first[s] : 0;
        const int64_t reach = static_cast<int64_t>(to) - spans.first[s] + 1;
        const int end = reach < spans.count[s] ? static_cast<int>(reach) : spans.count[s];
        w.first[s] = begin / size;
        w.tiles[s] = end > begin ? (end - 1) / size + 1 - w.first[s] : 0;
    }
    return w;
}

__device__ __forceinline__ RowTile walk_tile(const TileWalk &w, const AttnSpans &spans, int i, int size)
{
    const bool second = i >= w.tiles[0]; /* chosen value by value: an index would put the structs into memory */
    const int at = (second ? i - w.tiles[0] + w.first[1] : i + w.first[0]) * size;
    const int left = (second ? spans.count[1] : spans.count[0]) - at;
    RowTile t = { at + (second ? spans.count[0] : 0), at + (second ? spans.first[1] : spans.first[0]),
                  min(left, size) };
    return t;
}

/* All tiles of a side. */
__host__ __device__ __forceinline__ TileWalk walk_all(const AttnSpans &spans, int size)
{
    return walk_of(spans, 0, INT_MAX, size);
}

__host__ __device__ __forceinline__ int walk_count(const TileWalk &w) { return w.tiles[0] + w.tiles[1]; }

/* ---- who sees whom ---- */

/* The first position that the query in `row` at `position` may see. */
__device__ __forceinline__ int row_low(const AttnProblem &p, int b, int row, int position)
{
    int low = p.doc ? p.doc[b * p.doc_ld + row] : 0;
    if (p.window > 0 && low < position - p.window + 1) low = position - p.window + 1;
    return low > 0 ? low : 0;
}

/* Smallest and largest row_low of a tile of queries, the same in all lanes of the warp. */
__device__ __forceinline__ void tile_lows(const AttnProblem &p, int b, const RowTile &q, int *least, int *most)
{
    if (!p.doc) {
        *least = row_low(p, b, q.row, q.position);
        *most = row_low(p, b, q.row + q.count - 1, q.position + q.count - 1);
        return;
    }
    int low = INT_MAX, high = 0;
    for (int i = threadIdx.x % WARP; i < q.count; i += WARP) {
        const int x = row_low(p, b, q.row + i, q.position + i);
        low = min(low, x);
        high = max(high, x);
    }
    for (int d = WARP / 2; d > 0; d /= 2) {
        low = min(low, __shfl_xor_sync(ALL_LANES, low, d));
        high = max(high, __shfl_xor_sync(ALL_LANES, high, d));
    }
    *least = low, *most = high;
}

/* Positions first .. last. */
struct Range {
    int first, last;
};

__device__ __forceinline__ Range range_of(const RowTile &t)
{
    Range r = { t.position, t.position + t.count - 1 };
    return r;
}

/* The rows of a tile of ROWS that this warp has; empty (last < first) when the tile ends before them. */
template <class E> __device__ __forceinline__ Range warp_range(const RowTile &t)
{
    const int begin = threadIdx.x / WARP * E::WARP_ROWS, end = min(begin + E::WARP_ROWS, t.count);
    Range r = { t.position + begin, t.position + end - 1 };
    return r;
}

/* May some query of q see some key of k? Documents are not asked. */
__device__ __forceinline__ bool may_see(const AttnProblem &p, const Range &q, const Range &k)
{
    return q.first <= q.last && k.first <= k.last && k.first <= q.last &&
           (p.window == 0 || q.first - p.window < k.last);
}

/* Does every query of q (whose lows end at `most`) see every key of k? */
__device__ __forceinline__ bool all_see(const Range &q, int most, const Range &k)
{
    return k.last <= q.first && most <= k.first;
}

/* Queries down, keys across. */
template <class E>
__device__ __forceinline__ void mask_keys(const AttnProblem &p, typename E::Scores &s, int b, const RowTile &q,
                                          const RowTile &k)
{
    const typename E::Place at = E::place();
    UNROLL
    for (int i = 0; i < E::R; i++) {
        const int row = min(at.row(i), q.count - 1), position = q.position + row;
        const int last = min(position - k.position, k.count - 1);
        const int first = row_low(p, b, q.row + row, position) - k.position;
        UNROLL
        for (int j = 0; j < E::N; j++) {
            const int c = at.column(j);
            if (c > last || c < first) s.at(i, j) = -INFINITY;
        }
    }
}

/* ---- capped scores ---- */

/*
 * A capped score is softcap * tanh(scale / softcap * q k). In registers it is kept divided by scale, so that all that
 * follows is as without a cap: s becomes softcap / scale * tanh(scale / softcap * s). Before masks.
 */
template <class E> __device__ __forceinline__ void cap_scores(const AttnProblem &p, typename E::Scores &s)
{
    UNROLL
    for (int i = 0; i < E::R; i++)
        UNROLL
        for (int j = 0; j < E::N; j++) {
            const float x = s.at(i, j) * p.cap_inner, e = E::exp2(fminf(fabsf(x), 64.0f)); /* exp(2 |u|) */
            const float t = 1.0f - __fdividef(2.0f, e + 1.0f);
            s.at(i, j) = x != x ? x : copysignf(t, x) * p.cap_outer;
        }
}

/* Slope of a capped score that cap_scores has left, of a masked one 0. */
__device__ __forceinline__ float cap_slope(const AttnProblem &p, float s)
{
    const float t = fmaxf(s * p.cap_unit, -1.0f);
    return fmaf(-t, t, 1.0f);
}

/* ---- dropout ---- */

/* Dropout of one head of one sample. */
struct HeadDropout {
    uint64_t key;
    uint32_t threshold, sample_low, sample_high;
};

__device__ __forceinline__ HeadDropout head_dropout(const AttnProblem &p, int b, int head)
{
    const uint64_t sample = static_cast<uint64_t>(p.sample[b]);
    HeadDropout d = { p.dropout.key, p.dropout.threshold, static_cast<uint32_t>(sample),
                      static_cast<uint32_t>(sample >> 32) << 16 | static_cast<uint32_t>(p.head0 + head) };
    return d;
}

/* Bit i: is key `key / 4 * 4 + i` kept for this query? The draws of dropout_keep_attn. */
__device__ __forceinline__ uint32_t keep_four(const HeadDropout &d, int query, int key)
{
    const Philox r = philox(d.key, static_cast<uint32_t>(key) >> 2, static_cast<uint32_t>(query), d.sample_low,
                            d.sample_high);
    uint32_t bits = 0;
    UNROLL
    for (int i = 0; i < 4; i++) bits |= static_cast<uint32_t>(r.v[i] >= d.threshold) << i;
    return bits;
}

__device__ __forceinline__ uint32_t keep_one(const HeadDropout &d, int query, int key)
{
    return keep_four(d, query, key) >> (key & 3) & 1;
}

/* ---- moving tiles ---- */

/*
 * Starts the copy of `count` of at most ROWS rows of `width` elements to shared memory; the rest of the tile
 * becomes 0. Rows lie `step` elements apart.
 */
template <class E, int ROWS>
__device__ __forceinline__ void copy_rows(typename E::T *to, const typename E::T *from, int64_t step, int count,
                                          int width)
{
    constexpr int CHUNK = Pack<typename E::T>::COUNT, CHUNKS = E::C / CHUNK;
    constexpr int LANES = CHUNKS & -CHUNKS, PASS = E::THREADS / LANES; /* threads a row; rows at a time */
    const int thread = in_place(threadIdx.x), lane = thread % LANES, first = thread / LANES;
    UNROLL
    for (int c = 0; c < CHUNKS; c += LANES) {
        const int chunk = c + lane;
        const bool inside = chunk * CHUNK < width;
        const typename E::T *p = from + first * step + chunk * CHUNK;
        UNROLL
        for (int r = 0; r < ROWS; r += PASS) {
            const int row = r + first;
            if (ROWS % PASS == 0 || row < ROWS) {
                const bool valid = inside && row < count;
                cp_async_16(to + E::offset(row, chunk), valid ? p : from, valid);
            }
            p += PASS * step;
        }
    }
}

/* ---- a block of queries: forward and dq ---- */

/* The block's queries. In shared memory: the loop needs every register for scores and sums. */
template <class T> struct QueryBlock {
    RowTile rows;
    int most_low, tiles; /* largest row_low; tiles of keys to visit */
    TileWalk walk;
    const T *q, *k, *v; /* the rows; all keys and values of the sample and the key head */
};

/* blockIdx: tile of queries, the last first (it sees most keys); query head; sample. */
template <class E>
__device__ __forceinline__ void begin_queries(const AttnProblem &p, QueryBlock<typename E::T> *block,
                                              const QueryHeads<const typename E::T> &q,
                                              const Heads<const typename E::T> &k, const Heads<const typename E::T> &v)
{
    if (threadIdx.x < WARP) {
        QueryBlock<typename E::T> x;
        int least;
        x.rows = walk_tile(walk_all(p.q, E::ROWS), p.q, gridDim.x - 1 - blockIdx.x, E::ROWS);
        tile_lows(p, blockIdx.z, x.rows, &least, &x.most_low);
        x.walk = walk_of(p.k, least, x.rows.position + x.rows.count - 1, E::COLS);
        x.tiles = walk_count(x.walk);
        x.q = q.at(p, blockIdx.z, x.rows.row, blockIdx.y);
        x.k = k.at(blockIdx.z, 0, blockIdx.y / p.group);
        x.v = v.at(blockIdx.z, 0, blockIdx.y / p.group);
        if (threadIdx.x == 0) *block = x;
    }
    __syncthreads();
}

/* ---- launching ---- */

/* Arguments of the launchers of the three kernels. Matrices of the forward and of the backward pass. */
struct AttnForward {
    Tensor o, lse, max, sum, logit_max, q, k, v;
    bool resumed, unfinished;
};

struct AttnBackward {
    Tensor dq, dk, dv, go, q, k, v, o, lse, delta;
    bool resumed;
};

/* Width of the tiles that hold queries, keys and values. */
static inline int widest(const AttnProblem &p) { return p.C > p.V ? p.C : p.V; }

/* Checks spans, heads and widths; fills *p, without a sink. ERR_SHAPE. */
Err attention_problem(AttnProblem *p, const attention_fwd_args *a);

/* ERR_SHAPE unless rows begin at multiples of 16 bytes. */
Err attention_aligned(const char *name, Tensor t);

/* The same check; and ERR_SHAPE if keys come in several calls and a result of the queries is not in fp32. */
Err attention_result(const char *name, Tensor t, bool several);

Err attention_dq(Stream *s, const AttnProblem &p, const AttnBackward &a);  /* dq and delta */
Err attention_dkv(Stream *s, const AttnProblem &p, const AttnBackward &a); /* dk and dv; needs delta */

/* The same on Hopper, and whether these have kernels for the call. */
bool attention_bwd_hopper_fits(const AttnProblem &p, const AttnBackward &a);
Err attention_dq_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a);
Err attention_dkv_hopper(Stream *s, const AttnProblem &p, const AttnBackward &a);

/*
 * Shared memory that a block may have, arrays included: 99 KiB on 8.6, 8.9 and 12.0, 163 on 8.0, 227 on 9.0 and 10.0.
 * What is larger than the least has a second form of smaller tiles, for the same results: the sums over rows have the
 * same order.
 */
constexpr int SHARED_LEAST = 99 << 10;

/* Shared memory of arrays. The dynamic area lies behind them, at a multiple of 1 KiB (common.cuh). */
constexpr int shared_arrays(size_t bytes) { return static_cast<int>((bytes + 1023) / 1024 * 1024); }

#endif
