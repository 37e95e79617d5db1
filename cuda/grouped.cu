/*
 * Products over experts: a matrix for each run of rows, where the runs lie is known to the device alone.
 *
 *   fwd  y [rows x O] = x [rows x I] w[e]^T       A = x    B = w[e]
 *   dx  dx [rows x I] = dy [rows x O] w[e]        A = dy   B = w[e], depth down its rows
 *   dw  dw[e] [O x I] (+)= dy^T x over its rows   A = dy, B = x, depth down the rows of both
 *
 * Mapping   fwd, dx: the grid has a block for each tile of rows that there can be, P / TILE + experts, by tiles of
 *           columns. A block looks its tile up in the offsets, 32 experts at a time; those behind the last have
 *           nothing to do. dw: a block for each tile of dw[e], which walks over the expert's rows in ascending order,
 *           so that sums repeat bit for bit. Blocks are numbered in bands of 16 tiles of rows (grouped_order.h).
 *           16 bits: tiles of 128 x 128, 8 warps with 64 x 32 each, mma.sync m16n8k16; three stages of 32 of the
 *           depth arrive by cp.async. fp32: tiles of 64 x 64, 16 sums a thread, plain FMA (no TF32).
 *           16 bits, rows at multiples of 16 bytes, a GPU of 9.0 and its object code: grouped_hopper.cu, by wgmma.
 * FLOP      2 P O I each. P 131,072 rows (65,536 tokens, 2 choices), O 3072, I 768, 8 experts: 0.62 TFLOP. On an H100
 *           2.2 to 2.7 ms, 230 to 280 TFLOP/s, by mma.sync; 0.81 to 0.95 ms, 650 to 760 TFLOP/s, by wgmma.
 * Traffic   bf16: a tile reads 2 x 128 x depth numbers, so that L2 serves P O I / 32 bytes, 9.7 GB for the above.
 *           Device memory serves 2 P (O + I) bytes and the weights, where a band of 16 tiles fits into L2, 1.0 GB, 0.35
 *           ms; up to four times that with depths of 14,336 (test_grouped_order counts). Bound by the tensor cores once
 *           an expert has some 300 rows; with fewer by the weights.
 * Needs     16-byte aligned rows for cp.async, else element by element; dw is F32.
 */
#include "grouped.cuh"

/* Task of a block: out = a b, over `depth` numbers. */
template <class T, class Out> struct Task {
    Panel<const T> a, b;
    Panel<Out> out;
    int64_t depth;
};

/* false: nothing to do. */
template <int KIND, int TILE, class T, class Out>
__device__ __forceinline__ bool find_task(const Grouped<T, Out> &g, Task<T, Out> *t)
{
    const GroupedPlace place = grouped_place(blockIdx.x, g.rows, g.columns);
    const int64_t column = place.column * static_cast<int64_t>(TILE);
    if (KIND == GROUPED_DW) {
        const int e = blockIdx.y;
        const int64_t first = g.start(e), rows = g.start(e + 1) - first, row = place.row * static_cast<int64_t>(TILE);
        t->a = { g.a + first * g.lda + row, g.lda, rows, g.O - row };
        t->b = { g.b + first * g.ldb + column, g.ldb, rows, g.I - column };
        t->out = { g.out + (e * static_cast<int64_t>(g.O) + row) * g.ldo + column, g.ldo, g.O - row, g.I - column };
        t->depth = rows;
        return rows > 0 || !g.add;
    }
    const RowTile r = find_rows(g, place.row, TILE);
    if (r.expert < 0) return false;
    const bool fwd = KIND == GROUPED_FWD;
    const int64_t depth = fwd ? g.I : g.O, across = fwd ? g.O : g.I, row = r.expert * static_cast<int64_t>(g.O);
    t->a = { g.a + r.first * g.lda, g.lda, r.end - r.first, depth };
    if (fwd) t->b = { g.b + (row + column) * g.ldb, g.ldb, across - column, depth };
    else t->b = { g.b + row * g.ldb + column, g.ldb, depth, across - column };
    t->out = { g.out + r.first * g.ldo + column, g.ldo, r.end - r.first, across - column };
    t->depth = depth;
    return true;
}

/*
 * Pack (r, c) of a tile of a panel, `at` along the depth: where it begins, and how many of its elements there are.
 * DOWN: row r of the tile is row at + r of the panel; else its columns begin at column `at`.
 */
template <class T> struct PanelPack {
    const T *from;
    int64_t left;
};

template <bool DOWN, class T>
__device__ __forceinline__ PanelPack<T> panel_pack(const Panel<const T> &p, int64_t at, int r, int c)
{
    const int64_t row = DOWN ? at + r : r, column = (DOWN ? 0 : at) + c * Pack<T>::COUNT;
    return { p.data + row * p.ld + column, row < p.rows ? p.columns - column : 0 };
}

/* ---- 16 bits: tensor cores ---- */

constexpr int MMA_TILE = 128, MMA_DEPTH = 32, MMA_STAGES = 3, MMA_THREADS = 256;
constexpr int MMA_CHUNK = 8, MMA_STAGE = MMA_TILE * MMA_DEPTH; /* elements of 16 bytes, of a tile */
constexpr int MMA_DOWN = MMA_TILE / 64, MMA_M = 4, MMA_N = 4;  /* warps down; tiles of 16 and 8 of a warp */
constexpr size_t MMA_SHARED = 2 * MMA_STAGES * MMA_STAGE * 2;
static_assert(MMA_SHARED >= MMA_TILE * MMA_TILE * 2 && MMA_SHARED <= 48 << 10, "the results fit; so do all stages");

/*
 * Place of 16-byte chunk `c` of row r in shared memory: rows without padding, chunks moved so that the 8 rows of an 8 x
 * 8 matrix fall into different banks. WIDE_ROWS: rows of MMA_TILE elements, else of MMA_DEPTH.
 */
template <bool WIDE_ROWS> __device__ __forceinline__ int chunk_offset(int r, int c)
{
    if (WIDE_ROWS) return r * MMA_TILE + (c ^ (r & 7)) * MMA_CHUNK;
    return r * MMA_DEPTH + (c ^ (r / 2 & 3)) * MMA_CHUNK;
}

template <bool DOWN, bool WIDE, class T>
__device__ __forceinline__ void load_stage(T *to, const Panel<const T> &p, int64_t at)
{
    constexpr int ACROSS = (DOWN ? MMA_TILE : MMA_DEPTH) / MMA_CHUNK;
    UNROLL
    for (int i = 0; i < MMA_STAGE / MMA_CHUNK / MMA_THREADS; i++) {
        const int n = i * MMA_THREADS + threadIdx.x, r = n / ACROSS, c = n % ACROSS;
        const PanelPack<T> x = panel_pack<DOWN>(p, at, r, c);
        T *slot = to + chunk_offset<DOWN>(r, c);
        if constexpr (WIDE) cp_async_16(slot, x.left > 0 ? x.from : p.data, x.left > 0);
        else store16(slot, load_pack<T, false>(x.from, x.left));
    }
}

struct Sums {
    float x[MMA_M][MMA_N][4];
};

/* Left operand: rows m .. m + 15 of the tile, 16 of the depth from 16 k on. */
template <bool DOWN, class T> __device__ __forceinline__ void load_left(uint32_t r[4], const T *a, int m, int k)
{
    const int l = threadIdx.x % WARP;
    if (DOWN) ldmatrix_x4_trans(r, a + chunk_offset<true>(k * 16 + l % 8 + l / 16 * 8, m / 8 + l / 8 % 2));
    else ldmatrix_x4(r, a + chunk_offset<false>(m + l % 16, k * 2 + l / 16));
}

/* Right operand of two neighbouring mma: columns n .. n + 15. */
template <bool DOWN, class T> __device__ __forceinline__ void load_right(uint32_t r[4], const T *b, int n, int k)
{
    const int l = threadIdx.x % WARP;
    if (DOWN) ldmatrix_x4_trans(r, b + chunk_offset<true>(k * 16 + l % 16, n / 8 + l / 16));
    else ldmatrix_x4(r, b + chunk_offset<false>(n + l % 8 + l / 16 * 8, k * 2 + l / 8 % 2));
}

/* This warp's part of the tile. */
struct WarpPlace {
    int row, column;
    __device__ __forceinline__ WarpPlace()
        : row(threadIdx.x / WARP % MMA_DOWN * MMA_M * 16), column(threadIdx.x / WARP / MMA_DOWN * MMA_N * 8)
    {
    }
};

template <int KIND, class T> __device__ __forceinline__ void multiply_stage(Sums &s, const T *a, const T *b)
{
    const WarpPlace w;
    UNROLL
    for (int k = 0; k < MMA_DEPTH / 16; k++) {
        uint32_t left[MMA_M][4], right[4];
        UNROLL
        for (int m = 0; m < MMA_M; m++) load_left<Down<KIND>::A>(left[m], a, w.row + m * 16, k);
        UNROLL
        for (int n = 0; n < MMA_N; n += 2) {
            load_right<Down<KIND>::B>(right, b, w.column + n * 8, k);
            UNROLL
            for (int m = 0; m < MMA_M; m++) {
                mma_16816(s.x[m][n], left[m], right, T());
                mma_16816(s.x[m][n + 1], left[m], right + 2, T());
            }
        }
    }
}

/* Through shared memory, to be written 16 bytes at a time. */
template <bool WIDE, class T> __device__ __forceinline__ void store_sums(const Sums &s, T *tile, const Panel<T> &out)
{
    const WarpPlace w;
    const int l = threadIdx.x % WARP;
    UNROLL
    for (int m = 0; m < MMA_M; m++)
        UNROLL
        for (int n = 0; n < MMA_N; n++)
            UNROLL
            for (int i = 0; i < 2; i++)
                *reinterpret_cast<uint32_t *>(
                    tile + chunk_offset<true>(w.row + m * 16 + i * 8 + l / 4, w.column / 8 + n) + l % 4 * 2) =
                    pack_pair(s.x[m][n][i * 2], s.x[m][n][i * 2 + 1], T());
    __syncthreads();
    constexpr int ACROSS = MMA_TILE / MMA_CHUNK;
    for (int i = threadIdx.x; i < MMA_TILE * ACROSS; i += MMA_THREADS) {
        const int r = i / ACROSS, c = i % ACROSS;
        const int64_t left = out.columns - c * MMA_CHUNK;
        if (r < out.rows && left > 0)
            store_pack<T, WIDE>(out.data + r * out.ld + c * MMA_CHUNK, load16(tile + chunk_offset<true>(r, c)), left);
    }
}

/* Two neighbours; four lanes write a sector of 32 bytes. */
template <bool WIDE> __device__ __forceinline__ void put_pair(float *to, float x, float y, bool add, int64_t left)
{
    if constexpr (WIDE) {
        need_aligned(to, 8);
        float2 *at = reinterpret_cast<float2 *>(to);
        const float2 old = add ? *at : make_float2(0.0f, 0.0f);
        *at = make_float2(old.x + x, old.y + y);
    } else {
        *to = add ? *to + x : x;
        if (left > 1) to[1] = add ? to[1] + y : y;
    }
}

template <bool WIDE> __device__ __forceinline__ void add_sums(const Sums &s, const Panel<float> &out, bool add)
{
    const WarpPlace w;
    const int l = threadIdx.x % WARP;
    UNROLL
    for (int m = 0; m < MMA_M; m++)
        UNROLL
        for (int n = 0; n < MMA_N; n++)
            UNROLL
            for (int i = 0; i < 2; i++) {
                const int64_t row = w.row + m * 16 + i * 8 + l / 4, column = w.column + n * 8 + l % 4 * 2;
                if (row < out.rows && column < out.columns)
                    put_pair<WIDE>(out.data + row * out.ld + column, s.x[m][n][i * 2], s.x[m][n][i * 2 + 1], add,
                                   out.columns - column);
            }
}

template <class T, class Out, int KIND, bool WIDE>
__global__ void __launch_bounds__(MMA_THREADS, 2) grouped_mma_kernel(Grouped<T, Out> g)
{
    DYNAMIC_SHARED(T, shared); /* [stages] of A, then of B; in the end the results */
    Task<T, Out> t;
    if (!find_task<KIND, MMA_TILE>(g, &t)) return;
    T *b_stages = shared + MMA_STAGES * MMA_STAGE;
    const int64_t steps = (t.depth + MMA_DEPTH - 1) / MMA_DEPTH;
    Sums s = {};
    for (int64_t k = 0; k < steps + MMA_STAGES - 1; k++) { /* the step that is loaded; multiplied: as many behind */
        const int64_t now = k - (MMA_STAGES - 1);
        if (now >= 0) {
            cp_async_wait<MMA_STAGES - 2>();
            __syncthreads(); /* all see the step `now`, and are done with what the next load overwrites */
        }
        const int slot = static_cast<int>(k % MMA_STAGES) * MMA_STAGE;
        if (k < steps) {
            load_stage<Down<KIND>::A, WIDE>(shared + slot, t.a, k * MMA_DEPTH);
            load_stage<Down<KIND>::B, WIDE>(b_stages + slot, t.b, k * MMA_DEPTH);
        }
        cp_async_commit();
        const int own = static_cast<int>((k + 1) % MMA_STAGES) * MMA_STAGE; /* of step `now` */
        if (now >= 0) multiply_stage<KIND>(s, shared + own, b_stages + own);
    }
    if constexpr (KIND == GROUPED_DW) {
        add_sums<WIDE>(s, t.out, g.add);
    } else {
        __syncthreads();
        store_sums<WIDE>(s, shared, t.out);
    }
}

/* ---- fp32 ---- */

constexpr int FMA_TILE = 64, FMA_DEPTH = 16, FMA_THREADS = 256, FMA_PITCH = FMA_TILE + 4;
constexpr int FMA_EACH = 4, FMA_ACROSS = FMA_TILE / FMA_EACH; /* a thread's rows and columns; threads of a row */
static_assert(FMA_TILE * FMA_DEPTH == FMA_THREADS * 4, "each thread loads a pack of each operand");

/* This thread's pack of a tile: row and pack of the row, as it lies in memory. */
template <bool DOWN> struct FmaPack {
    int r, c;
    __device__ __forceinline__ FmaPack()
        : r(threadIdx.x / ((DOWN ? FMA_TILE : FMA_DEPTH) / 4)), c(threadIdx.x % ((DOWN ? FMA_TILE : FMA_DEPTH) / 4))
    {
    }
};

template <bool DOWN, bool WIDE>
__device__ __forceinline__ Pack<float> fetch(const Panel<const float> &p, int64_t at)
{
    const FmaPack<DOWN> mine;
    const PanelPack<float> x = panel_pack<DOWN>(p, at, mine.r, mine.c);
    if (x.left > 0) return load_pack<float, WIDE>(x.from, x.left);
    return {};
}

/* To shared memory, always [depth][tile]. */
template <bool DOWN> __device__ __forceinline__ void put(float (*to)[FMA_PITCH], const Pack<float> &x)
{
    const FmaPack<DOWN> mine;
    if (DOWN) store16(&to[mine.r][mine.c * 4], x);
    else
        for (int i = 0; i < 4; i++) to[mine.c * 4 + i][mine.r] = x.v[i];
}

__device__ __forceinline__ void multiply_tile(float (*s)[FMA_EACH], const float (*a)[FMA_PITCH],
                                              const float (*b)[FMA_PITCH])
{
    const int row = threadIdx.x / FMA_ACROSS * FMA_EACH, column = threadIdx.x % FMA_ACROSS * FMA_EACH;
    UNROLL
    for (int k = 0; k < FMA_DEPTH; k++) {
        const Pack<float> x = load16(&a[k][row]), y = load16(&b[k][column]);
        UNROLL
        for (int i = 0; i < FMA_EACH; i++)
            UNROLL
            for (int j = 0; j < FMA_EACH; j++) s[i][j] = fmaf(x.v[i], y.v[j], s[i][j]);
    }
}

template <bool WIDE>
__device__ __forceinline__ void put_rows(const float (*s)[FMA_EACH], const Panel<float> &out, bool add)
{
    const int row = threadIdx.x / FMA_ACROSS * FMA_EACH, column = threadIdx.x % FMA_ACROSS * FMA_EACH;
    const int64_t left = out.columns - column;
    UNROLL
    for (int i = 0; i < FMA_EACH; i++) {
        if (row + i >= out.rows || left <= 0) continue;
        float *to = out.data + (row + i) * out.ld + column;
        Pack<float> x = { { s[i][0], s[i][1], s[i][2], s[i][3] } };
        if (add) {
            const Pack<float> old = load_pack<float, WIDE>(to, left);
            for (int j = 0; j < FMA_EACH; j++) x.v[j] += old.v[j];
        }
        store_pack<float, WIDE>(to, x, left);
    }
}

template <int KIND, bool WIDE>
__global__ void __launch_bounds__(FMA_THREADS) grouped_fma_kernel(Grouped<float, float> g)
{
    SHARED(float, a, [2][FMA_DEPTH][FMA_PITCH]);
    SHARED(float, b, [2][FMA_DEPTH][FMA_PITCH]);
    Task<float, float> t;
    if (!find_task<KIND, FMA_TILE>(g, &t)) return;
    float s[FMA_EACH][FMA_EACH] = {};
    int which = 0;
    Pack<float> x = fetch<Down<KIND>::A, WIDE>(t.a, 0), y = fetch<Down<KIND>::B, WIDE>(t.b, 0);
    for (int64_t k = 0; k < t.depth; k += FMA_DEPTH, which ^= 1) {
        put<Down<KIND>::A>(a[which], x);
        put<Down<KIND>::B>(b[which], y);
        __syncthreads(); /* the other half may still be read, and is not written before the next barrier */
        x = fetch<Down<KIND>::A, WIDE>(t.a, k + FMA_DEPTH), y = fetch<Down<KIND>::B, WIDE>(t.b, k + FMA_DEPTH);
        multiply_tile(s, a[which], b[which]);
    }
    put_rows<WIDE>(s, t.out, KIND == GROUPED_DW && g.add);
}

/* ---- launching ---- */

template <class T, int KIND, bool WIDE> static void launch_grouped(Stream *s, const GroupedArgs &a)
{
    const unsigned experts = KIND == GROUPED_DW ? grid_blocks(a.weights.dim[0]) : 1;
    if constexpr (sizeof(T) == 4) {
        const Grouped<float, float> g = grouped_of<float, float, KIND>(a, FMA_TILE);
        LAUNCH((grouped_fma_kernel<KIND, WIDE>), dim3(g.rows * g.columns, experts), FMA_THREADS, 0, cuda_stream(s), g);
    } else {
        typedef typename std::conditional<KIND == GROUPED_DW, float, T>::type Out;
        const Grouped<T, Out> g = grouped_of<T, Out, KIND>(a, MMA_TILE);
        LAUNCH((grouped_mma_kernel<T, Out, KIND, WIDE>), dim3(g.rows * g.columns, experts), MMA_THREADS, MMA_SHARED,
               cuda_stream(s), g);
    }
}

template <int KIND> static Err grouped_run(Stream *s, const char *name, const GroupedArgs &a)
{
    if ((a.offset.dim[0] - 1) % a.weights.dim[0])
        return err_set(ERR_SHAPE, "%s: %lld offsets for %lld experts", name, static_cast<long long>(a.offset.dim[0]),
                       static_cast<long long>(a.weights.dim[0]));
    if (KIND != GROUPED_DW && a.out.dtype != a.a.dtype)
        return err_set(ERR_SHAPE, "%s on cuda writes %s, not %s", name, dtype_name(a.a.dtype), dtype_name(a.out.dtype));
    bool done;
    TRY(grouped_hopper(s, KIND, a, &done));
    if (done) return ERR_OK;
    const bool wide = rows_aligned(a.a) && rows_aligned(a.b) && rows_aligned(a.out);
    if (wide) { DISPATCH(a.a.dtype, (launch_grouped<T, KIND, true>(s, a))); }
    else { DISPATCH(a.a.dtype, (launch_grouped<T, KIND, false>(s, a))); }
    return ERR_OK;
}

extern "C" Err cuda_grouped_fwd(Stream *s, const grouped_fwd_args *a)
{
    const GroupedArgs args = { a->x, a->w, a->y, a->w, a->offset, false };
    return grouped_run<GROUPED_FWD>(s, "grouped_fwd", args);
}

extern "C" Err cuda_grouped_dx(Stream *s, const grouped_dx_args *a)
{
    const GroupedArgs args = { a->dy, a->w, a->dx, a->w, a->offset, false };
    return grouped_run<GROUPED_DX>(s, "grouped_dx", args);
}

extern "C" Err cuda_grouped_dw(Stream *s, const grouped_dw_args *a)
{
    if (a->dw.dtype != F32)
        return err_set(ERR_SHAPE, "grouped_dw on cuda has no fixed point: dw is f32");
    const GroupedArgs args = { a->dy, a->x, a->dw, a->dw, a->offset, !a->fresh };
    return grouped_run<GROUPED_DW>(s, "grouped_dw", args);
}
