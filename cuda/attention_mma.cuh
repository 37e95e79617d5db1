/*
 * The engine of attention (attention.cuh) for 16-bit inputs: mma.sync m16n8k16, fp32 sums.
 *
 * A warp has M tiles of 16 rows; with M = 2 every fragment of the other side, read from shared memory once,
 * serves two mma. Scores stay in the registers that mma left them in: as two 16-bit numbers a register they
 * are the left operand of the second product, so weights never pass through shared memory.
 *
 * Shared memory: rows of C elements without padding; 16-byte chunk c of row r lies at chunk c ^ f(r), with f so
 * that the 8 rows of an 8 x 8 matrix (same c) fall into different banks: r mod 8 when a row is a multiple of
 * 128 bytes, r / 2 mod 4 when it is 64 bytes more.
 *
 * Thread: g = lane / 4, t = lane % 4. Row i: 16 (i / 2) + 8 (i % 2) + g. Column j: 8 (j / 2) + 2 t + j % 2.
 */
#ifndef MEGATRAIN_CUDA_ATTENTION_MMA_CUH
#define MEGATRAIN_CUDA_ATTENTION_MMA_CUH

#include "attention.cuh"

/* BLOCKS: of this kernel on a multiprocessor, at least; it bounds the registers. */
template <class T_, int C_, int M, int WARPS_, int COLS_, int BLOCKS_> struct MmaEngine {
    typedef T_ T;
    static constexpr int C = C_, WARPS = WARPS_, COLS = COLS_, BLOCKS = BLOCKS_, THREADS = WARPS * WARP;
    static constexpr int WARP_ROWS = 16 * M, ROWS = WARPS * WARP_ROWS, R = 2 * M, N = COLS / 4;
    static constexpr int PITCH = C, STAGE = 0; /* elements of a row in shared memory; floats of scratch */
    static constexpr int STEPS = C % 64 ? C / 16 : 4; /* of multiply at once: more in flight, more registers */
    static constexpr int CHUNK = 8, CHUNK_MASK = C % 64 ? 3 : 7;
    static_assert(C % 32 == 0 && COLS % 16 == 0 && COLS <= 64, "keep_bits holds a row of tiles in one word");

    struct Scores {
        float x[M][COLS / 8][4];
        __device__ __forceinline__ float &at(int i, int j) { return x[i / 2][j / 2][i % 2 * 2 + j % 2]; }
    };
    struct Sums {
        float x[M][C / 8][4];
    };
    struct Keep {
        uint32_t word[M]; /* bit 4 (j / 2) + 2 (i % 2) + j % 2 */
    };

    struct Place {
        int row0, column0;
        __device__ __forceinline__ int row(int i) const { return row0 + i / 2 * 16 + i % 2 * 8; }
        __device__ __forceinline__ int column(int j) const { return column0 + j / 2 * 8 + j % 2; }
    };
    static __device__ __forceinline__ Place place()
    {
        const int thread = in_place(threadIdx.x);
        Place p = { thread / WARP * WARP_ROWS + thread % WARP / 4, thread % 4 * 2 };
        return p;
    }
    static __device__ __forceinline__ int offset(int row, int chunk)
    {
        return row * PITCH + (chunk ^ ((C % 64 ? row / 2 : row) & CHUNK_MASK)) * CHUNK;
    }

    static __device__ __forceinline__ float exp2(float x) { return exp2_approx(x); }

    static __device__ __forceinline__ float row_sum(float x)
    {
        x += __shfl_xor_sync(ALL_LANES, x, 1);
        return x + __shfl_xor_sync(ALL_LANES, x, 2);
    }
    static __device__ __forceinline__ float row_max(float x)
    {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
        return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
    }

    static __device__ __forceinline__ void clear(Scores &s)
    {
        UNROLL
        for (int m = 0; m < M; m++)
            UNROLL
            for (int n = 0; n < COLS / 8; n++)
                UNROLL
                for (int e = 0; e < 4; e++) s.x[m][n][e] = 0;
    }

    static __device__ __forceinline__ void multiply(Scores &s, const T *a, const T *b)
    {
        const int thread = in_place(threadIdx.x), l = thread % WARP;
        const int a_row = thread / WARP * WARP_ROWS + l % 16, b_row = l % 8 + l / 16 * 8;
        UNROLL_BY(STEPS)
        for (int k = 0; k < C / 16; k++) {
            uint32_t left[M][4], right[4];
            UNROLL
            for (int m = 0; m < M; m++) ldmatrix_x4(left[m], a + offset(a_row + m * 16, k * 2 + l / 16));
            UNROLL
            for (int n = 0; n < COLS / 8; n += 2) {
                ldmatrix_x4(right, b + offset(b_row + n * 8, k * 2 + l / 8 % 2));
                UNROLL
                for (int m = 0; m < M; m++) {
                    mma_16816(s.x[m][n], left[m], right, T());
                    mma_16816(s.x[m][n + 1], left[m], right + 2, T());
                }
            }
        }
    }

    static __device__ __forceinline__ void clear(Sums &o)
    {
        UNROLL
        for (int m = 0; m < M; m++)
            UNROLL
            for (int n = 0; n < C / 8; n++)
                UNROLL
                for (int e = 0; e < 4; e++) o.x[m][n][e] = 0;
    }

    static __device__ __forceinline__ void scale_rows(Sums &o, const float factor[R])
    {
        UNROLL
        for (int m = 0; m < M; m++)
            UNROLL
            for (int n = 0; n < C / 8; n++)
                UNROLL
                for (int e = 0; e < 4; e++) o.x[m][n][e] *= factor[m * 2 + e / 2];
    }

    static __device__ __forceinline__ void add_weighted(Sums &o, const Scores &s, const T *b, float *)
    {
        const int l = in_place(threadIdx.x) % WARP;
        UNROLL
        for (int k = 0; k < COLS / 16; k++) {
            uint32_t left[M][4], right[4];
            UNROLL
            for (int m = 0; m < M; m++)
                UNROLL
                for (int e = 0; e < 4; e++)
                    left[m][e] = pack_pair(s.x[m][k * 2 + e / 2][e % 2 * 2], s.x[m][k * 2 + e / 2][e % 2 * 2 + 1], T());
            UNROLL
            for (int n = 0; n < C / 8; n += 2) {
                ldmatrix_x4_trans(right, b + offset(k * 16 + l % 16, n + l / 16));
                UNROLL
                for (int m = 0; m < M; m++) {
                    mma_16816(o.x[m][n], left[m], right, T());
                    mma_16816(o.x[m][n + 1], left[m], right + 2, T());
                }
            }
        }
    }

    /*
     * One Philox call gives the bits of four neighbouring keys of one query. With queries down, two lanes
     * share those keys, for both their rows: each draws for one row. With keys down, four lanes share them,
     * for two columns of two row tiles: each draws one of the four. KEYS_DOWN; positions of the tile's row 0
     * and column 0.
     */
    template <bool KEYS_DOWN>
    static __device__ __forceinline__ void keep_bits(Keep &keep, const HeadDropout &d, int rows, int columns)
    {
        const bool aligned = (KEYS_DOWN ? rows : columns) % 4 == 0;
        const Place at = place();
        UNROLL
        for (int m = 0; m < M; m++) {
            const int r = rows + at.row(2 * m), c = columns + at.column0;
            if (!aligned) keep.word[m] = draw_each<KEYS_DOWN>(d, r, c);
            else if (KEYS_DOWN) keep.word[m] = draw_keys_down(d, r, c);
            else keep.word[m] = draw_queries_down(d, r, c);
        }
    }

    static __device__ __forceinline__ bool kept(const Keep &k, int i, int j)
    {
        return k.word[i / 2] >> (j / 2 * 4 + i % 2 * 2 + j % 2) & 1;
    }

    /* r, c: positions of this thread's first row in the tile of 16, and of its first column. */
    static __device__ __forceinline__ uint32_t draw_queries_down(const HeadDropout &d, int r, int c)
    {
        const int odd = in_place(threadIdx.x) % 2;
        uint32_t mine = 0; /* four keys of row r, or of row r + 8 in odd lanes */
        UNROLL_BY(2)
        for (int n = 0; n < COLS / 8; n++)
            mine |= keep_four(d, r + odd * 8, c + n * 8) << n * 4;
        const uint32_t other = __shfl_xor_sync(ALL_LANES, mine, 1);
        const uint32_t upper = odd ? other : mine, lower = odd ? mine : other;
        return (upper >> odd * 2 & 0x33333333u) | (lower >> odd * 2 & 0x33333333u) << 2;
    }

    static __device__ __forceinline__ uint32_t draw_keys_down(const HeadDropout &d, int r, int c)
    {
        const int lane = in_place(threadIdx.x) % WARP, e = lane / 4 % 4; /* draws for column e % 2, row r + 8 (e / 2) */
        uint32_t mine = 0, bits = 0;
        UNROLL_BY(2)
        for (int n = 0; n < COLS / 8; n++)
            mine |= keep_four(d, c + n * 8 + e % 2, r + e / 2 * 8) << n * 4;
        UNROLL
        for (int i = 0; i < 4; i++) {
            const uint32_t drawn = __shfl_sync(ALL_LANES, mine, lane + (i - e) * 4);
            bits |= (drawn >> e & 0x11111111u) << i;
        }
        return bits;
    }

    template <bool KEYS_DOWN>
    static __device__ __forceinline__ uint32_t draw_each(const HeadDropout &d, int r, int c)
    {
        uint32_t bits = 0;
        UNROLL_BY(1)
        for (int i = 0; i < COLS / 2; i++) {
            const int x = r + i / 2 % 2 * 8, y = c + i / 4 * 8 + i % 2;
            bits |= keep_one(d, KEYS_DOWN ? y : x, KEYS_DOWN ? x : y) << i;
        }
        return bits;
    }

    /*
     * Rows of the tile `to` (row 0; rows `step` apart, `count` of them, `width` elements) = o * factor. Goes
     * through `tile`, shared memory whose rows of this warp nobody else touches, to be written 16 bytes a time.
     */
    static __device__ __forceinline__ void store(const Sums &o, const float factor[R], T *tile, T *to, int64_t step,
                                                 int count, int width)
    {
        const int l = in_place(threadIdx.x) % WARP, first = threadIdx.x / WARP * WARP_ROWS;
        const Place at = place();
        __syncwarp();
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int n = 0; n < C / 8; n++) {
                const float *x = o.x[i / 2][n] + i % 2 * 2;
                *reinterpret_cast<uint32_t *>(tile + offset(at.row(i), n) + at.column0) =
                    pack_pair(x[0] * factor[i], x[1] * factor[i], T());
            }
        __syncwarp();
        constexpr int CHUNKS = C / CHUNK;
        for (int i = l; i < WARP_ROWS * CHUNKS; i += WARP) {
            const int r = first + i / CHUNKS, chunk = i % CHUNKS;
            if (r < count && chunk * CHUNK < width)
                store16(to + r * step + chunk * CHUNK, load16(tile + offset(r, chunk)));
        }
    }

    /* Rows of `to`, fp32 = o * factor, and if `resumed` + keep times what they hold. 4 lanes read and write 32 bytes
     * at once, a sector. */
    static __device__ __forceinline__ void add_wide(const Sums &o, const float factor[R], const float keep[R],
                                                    bool resumed, float *to, int64_t step, int count, int width)
    {
        const Place at = place();
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int n = 0; n < C / 8; n++) {
                if (at.row(i) >= count || n * 8 >= width) continue;
                float2 *p = reinterpret_cast<float2 *>(to + at.row(i) * step + n * 8 + at.column0);
                const float *x = o.x[i / 2][n] + i % 2 * 2;
                float2 y = make_float2(0, 0);
                if (resumed) y = *p;
                y.x = fmaf(y.x, keep[i], x[0] * factor[i]);
                y.y = fmaf(y.y, keep[i], x[1] * factor[i]);
                *p = y;
            }
    }
};

#endif
