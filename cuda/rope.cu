/*
 * Attention's columns: rotary positions, and q, k, v out of and back into the fused projection.
 *
 * rope      in place, half-rotation layout: (x[i], x[i + R]) turned by angle (position, i), i < R;
 *           columns from 2 R on stay.
 *   Mapping a thread takes the same pack of both halves of up to 4 heads of a row, which share the row's cosines
 *           and sines in registers.
 *   Traffic reads and writes x: 4 bytes an element in bf16, and 8 / H for the table, which stays in L2. q of
 *           65,536 x 12 x 64: 201 MB, 47 us at 4.3 TB/s. 3 FLOP an element: bound by memory.
 * qkv       columns of qkv lie chunk by chunk: columns of q, of k, as many of v; with a gate as many of it as of q.
 *   Mapping a thread copies one pack of a head (as wide as the chunk's columns of k) in 4 rows.
 *   Traffic reads and writes every element once: 4 bytes in bf16; 65,536 x 36 heads x 64: 604 MB, 140 us.
 *
 * join      columns that several ranks hold of each row, side by side.
 *   Mapping as qkv, a rank for a head. Traffic reads and writes every element once.
 *
 * Threads of a block lie packs x heads x rows, so that a block reads and writes whole stretches of memory.
 *
 * Needs     heads of at most 1024 columns; rows, R and C in multiples of 16 bytes for full speed.
 * Source    Su et al. 2021 (RoPE), in GPT-NeoX's order of columns.
 */
#include "kernel.cuh"

constexpr int HEAD_THREADS = 256;

/* threadIdx: pack of the head, item (a head, or some that one thread takes), row; blockIdx: rows, items. */
struct HeadGrid {
    dim3 grid, block;
    RowCount rows;
    int64_t items;
    int64_t width; /* elements of a head that are cut into packs */
};

static Err head_grid(HeadGrid *g, const char *name, RowCount rows, int64_t items, int64_t width, int count,
                     int rows_a_thread)
{
    const int64_t x = ceil_div(width, count);
    if (x > HEAD_THREADS)
        return err_set(ERR_SHAPE, "%s: a head of %lld columns", name, static_cast<long long>(width));
    const int64_t across = ceil_div(items, HEAD_THREADS / x), y = ceil_div(items, across), z = HEAD_THREADS / (x * y);
    const int64_t high = z > 64 ? 64 : z, down = ceil_div(rows.capacity, high * rows_a_thread);
    g->grid = dim3(static_cast<unsigned>(down > 0 ? down : 1), static_cast<unsigned>(ceil_div(items, y)));
    g->block = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(high));
    g->rows = rows;
    g->items = items;
    g->width = width;
    return ERR_OK;
}

/* ---- rotary positions ---- */

constexpr int ROPE_HEADS = 4; /* of a thread: item, item + items, ... */

struct RopeTable {
    Rows<const float> cosine, sine;
    const int32_t *position;
    float sign; /* -1 turns back */
    int heads;
    int group; /* of heads that lie side by side; all where heads lie evenly */
};

/* Places of heads; steps in elements. */
template <class T> struct RopeHeads {
    T *data;
    int64_t row, head;
    int64_t between; /* behind the heads of a group, beside the step */
};

template <class T> static RopeHeads<T> rope_heads_of(Tensor t)
{
    const int64_t group = t.group > 1 ? t.group : 1;
    RopeHeads<T> h = { data_of<T>(t), t.dim[1] / group * t.ld, t.ld, 0 };
    if (group > 1) h.head = t.dim[2], h.between = t.ld - group * t.dim[2];
    return h;
}

/* The angles of a pack of T; the table is fp32, so that they are 1 or 2 packs of it. */
template <class T, bool WIDE>
__device__ __forceinline__ void rope_angles(float *to, const float *from, int64_t left)
{
    for (int k = 0; k < Pack<T>::COUNT; k += 4) {
        const Pack<float> four = load_pack<float, WIDE>(from + k, left - k);
        for (int i = 0; i < 4; i++) to[k + i] = four.v[i];
    }
}

template <class T>
__device__ __forceinline__ void rope_turn(Pack<T> *x, Pack<T> *y, const float *c, const float *s)
{
    for (int i = 0; i < Pack<T>::COUNT; i++) {
        const float u = to_float(x->v[i]), v = to_float(y->v[i]);
        x->v[i] = from_float<T>(fmaf(-v, s[i], u * c[i]));
        y->v[i] = from_float<T>(fmaf(u, s[i], v * c[i]));
    }
}

template <class T, bool WIDE>
__global__ void __launch_bounds__(HEAD_THREADS) rope_kernel(RopeHeads<T> x, RopeTable table, HeadGrid g)
{
    constexpr int COUNT = Pack<T>::COUNT;
    const int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.z) + threadIdx.z;
    const int item = blockIdx.y * blockDim.y + threadIdx.y, column = threadIdx.x * COUNT;
    if (row >= rows_in_use(g.rows) || item >= g.items) return;
    const int64_t left = g.width - column, position = table.position[row];
    T *at[ROPE_HEADS];
    Pack<T> low[ROPE_HEADS], high[ROPE_HEADS];
    float c[COUNT], s[COUNT];
#pragma unroll
    for (int k = 0; k < ROPE_HEADS; k++) {
        const int head = item + k * static_cast<int>(g.items);
        if (head >= table.heads) continue;
        at[k] = x.data + row * x.row + head * x.head + head / table.group * x.between + column;
        low[k] = load_pack<T, WIDE>(at[k], left);
        high[k] = load_pack<T, WIDE>(at[k] + g.width, left);
    }
    rope_angles<T, WIDE>(c, table.cosine.at(position) + column, left);
    rope_angles<T, WIDE>(s, table.sine.at(position) + column, left);
    for (int i = 0; i < COUNT; i++) s[i] *= table.sign;
#pragma unroll
    for (int k = 0; k < ROPE_HEADS; k++) {
        const int64_t head = item + k * g.items;
        if (head >= table.heads) continue;
        rope_turn<T>(&low[k], &high[k], c, s);
        store_pack<T, WIDE>(at[k], low[k], left);
        store_pack<T, WIDE>(at[k] + g.width, high[k], left);
    }
}

template <class T> static Err launch_rope(Stream *s, const rope_args *a)
{
    const int64_t R = a->cos.dim[1];
    HeadGrid g;
    if (2 * R > a->x.dim[2])
        return err_set(ERR_SHAPE, "rope: %lld angles for %lld columns", static_cast<long long>(R),
                       static_cast<long long>(a->x.dim[2]));
    TRY(head_grid(&g, "rope", row_count(a->x, a->position), ceil_div(a->x.dim[1], ROPE_HEADS), R,
                  Pack<T>::COUNT, 1));
    const RopeTable table = { rows_of<const float>(a->cos), rows_of<const float>(a->sin),
                              data_of<const int32_t>(a->position), a->inverse ? -1.0f : 1.0f,
                              static_cast<int>(a->x.dim[1]),
                              static_cast<int>(a->x.group > 1 ? a->x.group : a->x.dim[1]) };
    const RopeHeads<T> x = rope_heads_of<T>(a->x);
    if (rows_aligned(a->x) && rows_aligned(a->cos) && rows_aligned(a->sin) && R % Pack<T>::COUNT == 0)
        LAUNCH((rope_kernel<T, true>), g.grid, g.block, 0, cuda_stream(s), x, table, g);
    else LAUNCH((rope_kernel<T, false>), g.grid, g.block, 0, cuda_stream(s), x, table, g);
    return ERR_OK;
}

extern "C" Err cuda_rope(Stream *s, const rope_args *a)
{
    DISPATCH(a->x.dtype, TRY(launch_rope<T>(s, a)));
    return ERR_OK;
}

/* ---- q, k, v <-> qkv, and columns of ranks; E is any type of the elements' size ---- */

constexpr int QKV_ROWS = 4; /* of a thread */

template <class E> struct QkvHeads {
    Rows<E> q, k, v, gate, qkv;
    int group;     /* heads of q in a chunk, and of the gate */
    int slots;     /* heads of a chunk */
    int64_t width; /* of a head */
};

/* Place of head `slot` of qkv's columns in row n of q, k or v. */
template <class E> __device__ __forceinline__ E *qkv_head(const QkvHeads<E> &t, int slot, int64_t n)
{
    const int chunk = slot / t.slots, place = slot - chunk * t.slots;
    if (place < t.group) return t.q.at(n) + (chunk * t.group + place) * t.width;
    if (place >= t.group + 2) return t.gate.at(n) + (chunk * t.group + place - t.group - 2) * t.width;
    return (place == t.group ? t.k.at(n) : t.v.at(n)) + chunk * t.width;
}

template <class E, bool WIDE, bool MERGE>
__global__ void __launch_bounds__(HEAD_THREADS) qkv_kernel(QkvHeads<E> t, HeadGrid g)
{
    const int64_t rows = rows_in_use(g.rows),
                  first = blockIdx.x * static_cast<int64_t>(blockDim.z) * QKV_ROWS + threadIdx.z;
    const int slot = blockIdx.y * blockDim.y + threadIdx.y, column = threadIdx.x * Pack<E>::COUNT;
    if (slot >= g.items) return;
    const int64_t left = g.width - column, wide_column = slot * g.width + column;
    Pack<E> pack[QKV_ROWS];
#pragma unroll
    for (int u = 0; u < QKV_ROWS; u++) {
        const int64_t n = first + u * static_cast<int64_t>(blockDim.z);
        if (n < rows)
            pack[u] =
                load_pack<E, WIDE>(MERGE ? qkv_head(t, slot, n) + column : t.qkv.at(n) + wide_column, left);
    }
#pragma unroll
    for (int u = 0; u < QKV_ROWS; u++) {
        const int64_t n = first + u * static_cast<int64_t>(blockDim.z);
        if (n < rows)
            store_pack<E, WIDE>(MERGE ? t.qkv.at(n) + wide_column : qkv_head(t, slot, n) + column, pack[u],
                                left);
    }
}

template <class E, bool MERGE> static Err launch_qkv(Stream *s, const qkv_split_args *a)
{
    const int64_t A = a->q.dim[1], K = a->k.dim[1], W = a->qkv.dim[1], like_q = a->gate.data ? 2 : 1;
    HeadGrid g;
    if (a->chunks < 1 || K % a->chunks || A % K || W != like_q * A + 2 * K)
        return err_set(ERR_SHAPE, "qkv: %lld columns for %lld x %lld and 2 x %lld in %lld chunks",
                       static_cast<long long>(W), static_cast<long long>(like_q), static_cast<long long>(A),
                       static_cast<long long>(K), static_cast<long long>(a->chunks));
    const int64_t group = A / K, slots = like_q * group + 2, width = K / a->chunks;
    TRY(head_grid(&g, "qkv", row_count(a->q, a->qkv), a->chunks * slots, width, Pack<E>::COUNT, QKV_ROWS));
    const QkvHeads<E> t = { rows_of<E>(a->q),    rows_of<E>(a->k),   rows_of<E>(a->v),
                            rows_of<E>(a->gate), rows_of<E>(a->qkv), static_cast<int>(group),
                            static_cast<int>(slots), width };
    const bool gate_aligned = !a->gate.data || rows_aligned(a->gate);
    if (rows_aligned(a->q) && rows_aligned(a->k) && rows_aligned(a->v) && gate_aligned && rows_aligned(a->qkv) &&
        width % Pack<E>::COUNT == 0)
        LAUNCH((qkv_kernel<E, true, MERGE>), g.grid, g.block, 0, cuda_stream(s), t, g);
    else LAUNCH((qkv_kernel<E, false, MERGE>), g.grid, g.block, 0, cuda_stream(s), t, g);
    return ERR_OK;
}

extern "C" Err cuda_qkv_split(Stream *s, const qkv_split_args *a)
{
    if (dtype_size(a->q.dtype) == 4) return launch_qkv<uint32_t, false>(s, a);
    return launch_qkv<uint16_t, false>(s, a);
}

extern "C" Err cuda_qkv_merge(Stream *s, const qkv_merge_args *a)
{
    qkv_split_args both = {};
    both.q = a->q, both.k = a->k, both.v = a->v, both.gate = a->gate, both.qkv = a->qkv, both.chunks = a->chunks;
    if (dtype_size(a->q.dtype) == 4) return launch_qkv<uint32_t, true>(s, &both);
    return launch_qkv<uint16_t, true>(s, &both);
}

/* A rank's heads may be wider than a head, and than a block: blockIdx.z, a block's share of it. */
template <class E, bool WIDE>
__global__ void __launch_bounds__(HEAD_THREADS) join_kernel(Rows<E> y, Rows<E> x, HeadGrid g)
{
    const int64_t rows = rows_in_use(g.rows),
                  first = blockIdx.x * static_cast<int64_t>(blockDim.z) * QKV_ROWS + threadIdx.z;
    const int rank = blockIdx.y * blockDim.y + threadIdx.y,
              column = (blockIdx.z * blockDim.x + threadIdx.x) * Pack<E>::COUNT;
    if (rank >= g.items || column >= g.width) return;
    Pack<E> pack[QKV_ROWS];
#pragma unroll
    for (int u = 0; u < QKV_ROWS; u++) {
        const int64_t n = first + u * static_cast<int64_t>(blockDim.z);
        if (n < rows) pack[u] = load_pack<E, WIDE>(x.at(rank * g.rows.capacity + n) + column, g.width - column);
    }
#pragma unroll
    for (int u = 0; u < QKV_ROWS; u++) {
        const int64_t n = first + u * static_cast<int64_t>(blockDim.z);
        if (n < rows) store_pack<E, WIDE>(y.at(n * g.items + rank) + column, pack[u], g.width - column);
    }
}

template <class E> static Err launch_join(Stream *s, const join_columns_args *a)
{
    HeadGrid g;
    const int64_t columns = a->y.dim[2], most = HEAD_THREADS * Pack<E>::COUNT, share = columns < most ? columns : most;
    TRY(head_grid(&g, "join_columns", row_count(a->y, a->y), a->y.dim[1], share, Pack<E>::COUNT, QKV_ROWS));
    g.grid.z = static_cast<unsigned>(ceil_div(columns, share));
    g.width = columns;
    const Rows<E> y = rows_of<E>(a->y), x = rows_of<E>(a->x);
    if (rows_aligned(a->y) && rows_aligned(a->x))
        LAUNCH((join_kernel<E, true>), g.grid, g.block, 0, cuda_stream(s), y, x, g);
    else LAUNCH((join_kernel<E, false>), g.grid, g.block, 0, cuda_stream(s), y, x, g);
    return ERR_OK;
}

extern "C" Err cuda_join_columns(Stream *s, const join_columns_args *a)
{
    if (dtype_size(a->y.dtype) == 4) return launch_join<uint32_t>(s, a);
    return launch_join<uint16_t>(s, a);
}
