/*
 * Products over experts of 8-bit codes with factors of blocks (device/ops.def):
 *
 *   fp8_grouped      y [rows x O] = x [rows x I] w[e]^T         A = x    factors of 128 along I, of w 128 x 128
 *   fp8_grouped_add  dw[e] [O x I] (+)= dy x^T over its columns   A = dy   both of 128 tokens
 *
 * Both operands lie with what is summed contiguous, the one form that tensor cores have for 8 bits.
 *
 * Mapping   as grouped.cu's by mma.sync: tiles of 128 x 64, 8 warps with 32 x 32 each, three stages of 64 codes of the
 *           depth by cp.async, blocks in bands. mma.sync m16n8k32 adds up 128 codes, the length of a block, in sums of
 *           its own, of which a chip keeps some 14 bits; these times the factors are added to fp32.
 * FLOP      2 P O I each. No GPU has run it.
 * Traffic   a tile reads 192 x depth codes, three quarters of what a result of a tile of 128 x 128 of bf16 takes;
 *           factors are 4 bytes in 128 codes.
 * Hopper    where object code of sm_90a runs: fp8_grouped_hopper.cu, by wgmma.
 * Needs     compute capability 8.9; rows of codes on 16 bytes, depths that are whole blocks; y is bf16, dw F32.
 */
#include "fp8_grouped.cuh"
extern "C" {
#include "fp8.h"
}

constexpr int CODE_TILE = 128, CODE_WIDE = 64, CODE_DEPTH = 64, CODE_STAGES = 3, CODE_THREADS = 256, CODE_CHUNK = 16;
constexpr int CODE_A_STAGE = CODE_TILE * CODE_DEPTH, CODE_B_STAGE = CODE_WIDE * CODE_DEPTH;
constexpr int CODE_ACROSS = CODE_DEPTH / CODE_CHUNK;
constexpr int CODE_M = 2, CODE_N = 4; /* tiles of 16 and 8 of a warp */
constexpr int CODE_DOWN = CODE_TILE / (16 * CODE_M); /* warps down */
constexpr int CODE_STEPS = FP8_BLOCK / CODE_DEPTH;                /* stages of a block of the depth */
constexpr size_t CODE_SHARED = CODE_STAGES * (CODE_A_STAGE + CODE_B_STAGE);
static_assert(CODE_SHARED <= 48 << 10, "all stages fit");

/* An operand: rows of codes, and of each its factors, `step` floats from one block of the depth to the next. */
struct CodeRows {
    const uint8_t *codes;
    const float *factors;
    int ld, rows, step; /* (64 bits would be registers that there are not) */
};

/* Task of a block. */
struct CodeTask {
    CodeRows a, b;
    int blocks; /* of the depth */
};

/* From a row and column on, at most a tile. */
__device__ __forceinline__ CodeRows code_rows(const uint8_t *codes, int64_t ld, int64_t row, int64_t column,
                                              int64_t rows, const float *factors, int64_t all)
{
    const int64_t some = rows < CODE_TILE ? rows : CODE_TILE;
    return { codes + row * ld + column, factors + column / FP8_BLOCK * all + row, static_cast<int>(ld),
             static_cast<int>(some), static_cast<int>(all) };
}

/* ---- stages ---- */

/* Place of 16-byte chunk `c` of row r, such that the 8 rows of a matrix fall into different banks. */
__device__ __forceinline__ int code_offset(int r, int c) { return r * CODE_DEPTH + (c ^ (r / 2 & 3)) * CODE_CHUNK; }

template <int STAGE> __device__ __forceinline__ void load_codes(uint8_t *to, const CodeRows &p, int at)
{
    UNROLL
    for (int i = 0; i < STAGE / CODE_CHUNK / CODE_THREADS; i++) {
        const int n = i * CODE_THREADS + threadIdx.x, r = n / CODE_ACROSS, c = n % CODE_ACROSS;
        const bool there = r < p.rows;
        const uint8_t *from = p.codes + static_cast<int64_t>(r) * p.ld + at + c * CODE_CHUNK;
        cp_async_16(to + code_offset(r, c), there ? from : p.codes, there);
    }
}

struct CodeSums {
    float x[CODE_M][CODE_N][4];
};

/* This warp's part of the tile. */
struct CodeWarp {
    int row, column, lane;
    __device__ __forceinline__ CodeWarp()
        : row(threadIdx.x / WARP % CODE_DOWN * CODE_M * 16), column(threadIdx.x / WARP / CODE_DOWN * CODE_N * 8),
          lane(threadIdx.x % WARP)
    {
    }
    /* Row of sum i of tile (m, n). */
    __device__ __forceinline__ int row_of(int m, int i) const { return row + m * 16 + i / 2 * 8 + lane / 4; }
    __device__ __forceinline__ int column_of(int n, int i) const { return column + n * 8 + lane % 4 * 2 + i % 2; }
};

__device__ __forceinline__ void multiply_codes(CodeSums &s, const uint8_t *a, const uint8_t *b)
{
    const CodeWarp w;
    const int l = w.lane;
    UNROLL
    for (int k = 0; k < CODE_DEPTH / 32; k++) {
        uint32_t left[4], right[CODE_N / 2][4]; /* (of two columns of tiles each) */
        UNROLL
        for (int n = 0; n < CODE_N / 2; n++)
            ldmatrix_x4(right[n], b + code_offset(w.column + n * 16 + l % 8 + l / 16 * 8, k * 2 + l / 8 % 2));
        UNROLL
        for (int m = 0; m < CODE_M; m++) {
            ldmatrix_x4(left, a + code_offset(w.row + m * 16 + l % 16, k * 2 + l / 16));
            UNROLL
            for (int n = 0; n < CODE_N; n++) mma_16832_e4m3(s.x[m][n], left, right[n / 2] + n % 2 * 2);
        }
    }
}

/* ---- a block of the depth ---- */

/* all += part * factors, and part is 0 again. SQUARE: b's factor is one for all columns of the tile. */
template <bool SQUARE>
__device__ __forceinline__ void promote(CodeSums &all, CodeSums &part, const CodeTask &t, int block)
{
    const CodeWarp w;
    UNROLL
    for (int m = 0; m < CODE_M; m++) {
        const int64_t here = in_place(block); /* not all factors at once */
        const float *a = t.a.factors + here * t.a.step, *b = t.b.factors + here * t.b.step;
        UNROLL
        for (int i = 0; i < 4; i++) {
            const int row = w.row_of(m, i);
            const float fa = row < t.a.rows ? a[row] : 0;
            UNROLL
            for (int n = 0; n < CODE_N; n++) {
                const int column = w.column_of(n, i);
                const float fb = SQUARE ? *b : column < t.b.rows ? b[column] : 0;
                all.x[m][n][i] = fmaf(part.x[m][n][i], fa * fb, all.x[m][n][i]);
                part.x[m][n][i] = 0;
            }
        }
    }
}

template <bool SQUARE>
__device__ __forceinline__ void sum_codes(CodeSums &all, const CodeTask &t, uint8_t *shared)
{
    uint8_t *b_stages = shared + CODE_STAGES * CODE_A_STAGE;
    const int steps = t.blocks * CODE_STEPS;
    CodeSums part = {};
    for (int k = 0; k < steps + CODE_STAGES - 1; k++) { /* the step that is loaded; multiplied: as many behind */
        const int now = k - (CODE_STAGES - 1);
        if (now >= 0) {
            cp_async_wait<CODE_STAGES - 2>();
            __syncthreads(); /* all see the step `now`, and are done with what the next load overwrites */
        }
        const int slot = k % CODE_STAGES;
        if (k < steps) {
            load_codes<CODE_A_STAGE>(shared + slot * CODE_A_STAGE, t.a, k * CODE_DEPTH);
            load_codes<CODE_B_STAGE>(b_stages + slot * CODE_B_STAGE, t.b, k * CODE_DEPTH);
        }
        cp_async_commit();
        const int own = (k + 1) % CODE_STAGES; /* of step `now` */
        if (now < 0) continue;
        multiply_codes(part, shared + own * CODE_A_STAGE, b_stages + own * CODE_B_STAGE);
        if (now % CODE_STEPS == CODE_STEPS - 1) promote<SQUARE>(all, part, t, now / CODE_STEPS);
    }
}

/* ---- kernels ---- */

__global__ void __launch_bounds__(CODE_THREADS) fp8_grouped_kernel(CodeProduct p, bf16 *y)
{
    DYNAMIC_SHARED(uint8_t, shared); /* [stages] of A, then of B */
    const GroupedPlace place = grouped_place(blockIdx.x, p.g.rows, p.g.columns);
    const int64_t column = place.column * static_cast<int64_t>(CODE_WIDE);
    const RowTile r = find_rows(p.g, place.row, CODE_TILE);
    if (r.expert < 0) return;
    const int64_t high = r.end - r.first < CODE_TILE ? r.end - r.first : CODE_TILE;
    const int64_t row = p.beside ? column : r.expert * static_cast<int64_t>(p.g.O) + column;
    const int64_t at = p.beside ? r.expert * static_cast<int64_t>(p.g.I) : 0;
    CodeTask t;
    t.a = code_rows(p.g.a, p.g.lda, r.first, 0, high, p.a_factors, p.a_rows);
    t.b = code_rows(p.g.b, p.g.ldb, row, at, CODE_WIDE, p.b_factors, p.b_rows);
    t.b.factors = p.b_factors + row / FP8_BLOCK * p.squares_ld + at / FP8_BLOCK;
    t.b.step = 1;
    t.blocks = p.g.I / FP8_BLOCK;
    CodeSums s = {};
    sum_codes<true>(s, t, shared);
    const CodeWarp w;
    UNROLL
    for (int m = 0; m < CODE_M; m++)
        UNROLL
        for (int n = 0; n < CODE_N; n++)
            UNROLL
            for (int i = 0; i < 4; i += 2) {
                if (w.row_of(m, i) >= high) continue;
                bf16 *to = y + (r.first + w.row_of(m, i)) * p.g.ldo + column + w.column_of(n, i);
                need_aligned(to, 4);
                *reinterpret_cast<uint32_t *>(to) = pack_pair(s.x[m][n][i], s.x[m][n][i + 1], bf16());
            }
}

__global__ void __launch_bounds__(CODE_THREADS) fp8_grouped_add_kernel(CodeProduct p, float *dw)
{
    DYNAMIC_SHARED(uint8_t, shared); /* [stages] of A, then of B */
    const GroupedPlace place = grouped_place(blockIdx.x, p.g.rows, p.g.columns);
    const int64_t row = place.row * static_cast<int64_t>(CODE_TILE);
    const int64_t column = place.column * static_cast<int64_t>(CODE_WIDE);
    const int e = blockIdx.y;
    const int64_t at = p.g.start(e);
    CodeTask t;
    t.a = code_rows(p.g.a, p.g.lda, row, at, p.g.O - row, p.a_factors, p.a_rows);
    t.b = code_rows(p.g.b, p.g.ldb, column, at, p.g.I - column, p.b_factors, p.b_rows);
    t.blocks = static_cast<int>((p.g.start(e + 1) - at) / FP8_BLOCK);
    CodeSums s = {};
    sum_codes<false>(s, t, shared);
    const CodeWarp w;
    UNROLL
    for (int m = 0; m < CODE_M; m++)
        UNROLL
        for (int n = 0; n < CODE_N; n++)
            UNROLL
            for (int i = 0; i < 4; i++) {
                if (w.row_of(m, i) >= t.a.rows || w.column_of(n, i) >= t.b.rows) continue;
                const int64_t at_row = e * static_cast<int64_t>(p.g.O) + row + w.row_of(m, i);
                float *to = dw + at_row * p.g.ldo + column + w.column_of(n, i);
                *to = p.g.add ? *to + s.x[m][n][i] : s.x[m][n][i];
            }
}

/* ---- launching ---- */

extern "C" Err cuda_fp8_gpu(const Stream *s, OpId op, Fp8Kind kind); /* fp8_product.c */

static Err check_codes(OpId op, Tensor codes, Fp8Kind kind)
{
    const char *name = op_info(op)->name;
    if (codes.dtype != E4M3 || fp8_kind(codes) != kind)
        return err_set(ERR_SHAPE, "%s on cuda: codes are not e4m3 with factors of 128%s", name,
                       kind == FP8_SQUARES ? " x 128" : "");
    if (codes.dim[0] > INT32_MAX || codes.ld > INT32_MAX)
        return err_set(ERR_SHAPE, "%s on cuda numbers rows and columns of codes in 31 bits", name);
    if (codes.dim[1] % FP8_BLOCK || codes.ld % CODE_CHUNK || reinterpret_cast<uintptr_t>(codes.data) % CODE_CHUNK)
        return err_set(ERR_SHAPE, "%s on cuda: rows of codes are not whole blocks on 16 bytes", name);
    return ERR_OK;
}

/* A, B and the experts' O and I, in offset's runs. */
static CodeProduct product_of(Tensor a, Tensor b, Tensor offset, int64_t experts, int64_t O, int64_t I)
{
    CodeProduct p = {};
    p.g.a = data_of<const uint8_t>(a), p.g.b = data_of<const uint8_t>(b);
    p.g.lda = a.ld, p.g.ldb = b.ld;
    p.g.offset = data_of<const int64_t>(offset);
    p.g.runs = (offset.dim[0] - 1) / experts;
    p.g.experts = static_cast<int>(experts);
    p.g.O = static_cast<int>(O), p.g.I = static_cast<int>(I);
    p.a_factors = data_of<const float>(*a.scale), p.b_factors = data_of<const float>(*b.scale);
    p.a_rows = a.dim[0], p.b_rows = b.dim[0];
    return p;
}

extern "C" Err cuda_fp8_grouped(Stream *s, const fp8_grouped_args *a)
{
    const int64_t O = a->y.dim[1], I = a->x.dim[1], down = a->w.dim[0] / O, across = a->w.dim[1] / I, E = down * across;
    TRY(cuda_fp8_gpu(s, OP_fp8_grouped, FP8_WHOLE));
    TRY(check_codes(OP_fp8_grouped, a->x, FP8_ROW_BLOCKS));
    TRY(check_codes(OP_fp8_grouped, a->w, FP8_SQUARES));
    if (a->y.dtype != BF16 || O % FP8_BLOCK || !rows_aligned(a->y))
        return err_set(ERR_SHAPE, "fp8_grouped on cuda: y is not bf16, or experts have not whole blocks");
    if (down * O != a->w.dim[0] || across * I != a->w.dim[1] || (down != 1 && across != 1) ||
        (a->offset.dim[0] - 1) % E)
        return err_set(ERR_SHAPE, "fp8_grouped on cuda: w, or offsets, are not of experts [%lld, %lld]",
                       static_cast<long long>(O), static_cast<long long>(I));
    CodeProduct p = product_of(a->x, a->w, a->offset, E, O, I);
    p.g.ldo = a->y.ld;
    p.g.rows = grid_blocks(a->y.dim[0] / CODE_TILE + E), p.g.columns = grid_blocks(O / CODE_WIDE);
    p.squares_ld = fp8_squares_ld(a->w.dim[1] / FP8_BLOCK);
    p.beside = across > 1;
    bool done;
    TRY(fp8_grouped_hopper(s, p, a->x, a->w, a->y, &done));
    if (done) return ERR_OK;
    LAUNCH(fp8_grouped_kernel, dim3(p.g.rows * p.g.columns), CODE_THREADS, CODE_SHARED, cuda_stream(s), p,
           data_of<bf16>(a->y));
    return ERR_OK;
}

extern "C" Err cuda_fp8_grouped_add(Stream *s, const fp8_grouped_add_args *a)
{
    const int64_t E = a->dw.dim[0], O = a->dw.dim[1], I = a->dw.dim[2];
    TRY(cuda_fp8_gpu(s, OP_fp8_grouped_add, FP8_WHOLE));
    TRY(check_codes(OP_fp8_grouped_add, a->dy, FP8_ROW_BLOCKS));
    TRY(check_codes(OP_fp8_grouped_add, a->x, FP8_ROW_BLOCKS));
    if (a->dw.dtype != F32) return err_set(ERR_SHAPE, "fp8_grouped_add on cuda has no fixed point: dw is f32");
    if ((a->begin.dim[0] - 1) % E) return err_set(ERR_SHAPE, "fp8_grouped_add: begins are not of all experts");
    CodeProduct p = product_of(a->dy, a->x, a->begin, E, O, I);
    p.g.ldo = a->dw.ld;
    p.g.add = !a->fresh;
    p.g.rows = grid_blocks(ceil_div(O, CODE_TILE)), p.g.columns = grid_blocks(ceil_div(I, CODE_WIDE));
    bool done;
    TRY(fp8_grouped_add_hopper(s, p, a->dy, a->x, a->dw, &done));
    if (done) return ERR_OK;
    const dim3 grid(p.g.rows * p.g.columns, grid_blocks(E));
    LAUNCH(fp8_grouped_add_kernel, grid, CODE_THREADS, CODE_SHARED, cuda_stream(s), p, data_of<float>(a->dw));
    return ERR_OK;
}
