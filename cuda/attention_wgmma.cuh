/*
 * The engine of attention (attention.cuh) for Hopper: wgmma on tiles that TMA has brought, fp32 sums.
 *
 * GROUPS warpgroups of 64 rows each. Scores stay in the registers that wgmma left them in: as two 16-bit numbers a
 * register they are the left operand of the second product. A warp's registers lie as mma.sync's do.
 *
 * Shared memory: a tile of n rows is boxes of n rows x SPAN bytes, one behind the other, as TMA writes them in the
 * swizzle of SPAN bytes. Columns behind a matrix' own width are zeros.
 *
 * Thread: g = lane / 4, t = lane % 4. Row i: 8 i + g. Column j: 8 (j / 2) + 2 t + j % 2.
 */
#ifndef MEGATRAIN_CUDA_ATTENTION_WGMMA_CUH
#define MEGATRAIN_CUDA_ATTENTION_WGMMA_CUH

#include "attention_mma.cuh"
#include "hopper.cuh"

/* C: width of queries and keys, V: of values. */
template <class T_, int C_, int V_, int COLS_, int GROUPS_, bool PLAIN_> struct WgmmaEngine {
    typedef T_ T;
    static constexpr int C = C_, V = V_, COLS = COLS_, GROUPS = GROUPS_, WARPS = 4 * GROUPS, THREADS = WARPS * WARP;
    static constexpr int WARP_ROWS = 16, GROUP_ROWS = 64, ROWS = GROUPS * GROUP_ROWS, R = 2, N = COLS / 4;
    static constexpr int SPAN = C % 64 || V % 64 ? 64 : 128, BOX = SPAN / 2; /* of a box: bytes, columns */
    static constexpr Swizzle MODE = SPAN == 128 ? SWIZZLE_128 : SWIZZLE_64;
    static constexpr bool PLAIN = PLAIN_; /* neither cap nor dropout */
    static constexpr int STEP = 16; /* of the depth, an instruction */
    static_assert(C % BOX == 0 && V % BOX == 0 && COLS % 32 == 0, "whole boxes; keep_bits draws for 32 columns");

    struct Scores {
        float x[COLS / 2];
        __device__ __forceinline__ float &at(int i, int j) { return x[j / 2 * 4 + i * 2 + j % 2]; }
    };
    struct Sums {
        float x[V / 2];
    };
    struct Weights {
        uint32_t x[COLS / STEP][4];
    };

    /* ---- 32 columns of the mask of dropout are drawn as mma.sync's engine does it ---- */

    typedef MmaEngine<T, 32, 1, WARPS, 32, 1> Part;
    typedef typename Part::Place Place;
    struct Keep {
        typename Part::Keep part[COLS / 32];
    };
    static __device__ __forceinline__ Place place() { return Part::place(); }
    static __device__ __forceinline__ float exp2(float x) { return exp2_approx(x); }
    static __device__ __forceinline__ float row_sum(float x) { return Part::row_sum(x); }
    static __device__ __forceinline__ float row_max(float x) { return Part::row_max(x); }

    template <bool KEYS_DOWN>
    static __device__ __forceinline__ void keep_bits(Keep &keep, const HeadDropout &d, int rows, int columns)
    {
        UNROLL
        for (int i = 0; i < COLS / 32; i++)
            Part::template keep_bits<KEYS_DOWN>(keep.part[i], d, rows, columns + 32 * i);
    }
    static __device__ __forceinline__ bool kept(const Keep &k, int i, int j)
    {
        return Part::kept(k.part[j / 8], i, j % 8);
    }

    /* ---- products: issued, to be committed and waited for ---- */

    /* s = a b^T; a: this group's 64 rows, b: COLS rows. */
    static __device__ __forceinline__ void multiply(Scores &s, const T *a, const T *b)
    {
        const uint64_t left = shared_matrix(a, 16, 8 * SPAN, MODE), right = shared_matrix(b, 16, 8 * SPAN, MODE);
        UNROLL
        for (int k = 0; k < C / STEP; k++) {
            const int box = k * STEP / BOX, byte = k * STEP % BOX * 2;
            wgmma<false, false>(s.x, left + ((box * GROUP_ROWS * SPAN + byte) >> 4),
                                right + ((box * COLS * SPAN + byte) >> 4), k > 0, T());
        }
    }

    /* o += w b; b: COLS rows. */
    static __device__ __forceinline__ void add_weighted(Sums &o, const Weights &w, const T *b)
    {
        const uint64_t right = shared_matrix(b, COLS * SPAN, 8 * SPAN, MODE);
        UNROLL
        for (int k = 0; k < COLS / STEP; k++)
            wgmma_rows<true>(o.x, w.x[k], right + (k * STEP * SPAN >> 4), true, T());
    }

    static __device__ __forceinline__ void round(Weights &w, const Scores &s)
    {
        UNROLL
        for (int k = 0; k < COLS / STEP; k++)
            UNROLL
            for (int e = 0; e < 4; e++)
                w.x[k][e] = pack_pair(s.x[k * 8 + e * 2], s.x[k * 8 + e * 2 + 1], T());
    }

    static __device__ __forceinline__ void clear(Sums &o)
    {
        UNROLL
        for (int i = 0; i < V / 2; i++) o.x[i] = 0;
    }

    static __device__ __forceinline__ void scale_rows(Sums &o, const float factor[R])
    {
        UNROLL
        for (int i = 0; i < V / 2; i++) o.x[i] *= factor[i / 2 % 2];
    }

    /* ---- results ---- */

    /* 4 registers of each of 4 lanes, transposed: register i of lane t becomes register t of lane i. */
    static __device__ __forceinline__ void transpose_four(uint32_t x[4])
    {
        const int t = in_place(threadIdx.x) % 4;
        UNROLL
        for (int d = 1; d <= 2; d *= 2)
            UNROLL
            for (int i = 0; i < 4; i++) {
                if (i & d) continue;
                const bool upper = t & d;
                const uint32_t got = __shfl_xor_sync(ALL_LANES, upper ? x[i] : x[i + d], d);
                if (upper) x[i] = got;
                else x[i + d] = got;
            }
    }

    /* Like MmaEngine's; the four lanes of a row exchange their numbers, to write 16 bytes a time. */
    static __device__ __forceinline__ void store(const Sums &o, const float factor[R], T *, T *to, int64_t step,
                                                 int count, int width)
    {
        const Place at = place();
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int n = 0; n < V / 8; n += 4) {
                union {
                    uint32_t word[4];
                    Pack<T> pack;
                } out;
                UNROLL
                for (int m = 0; m < 4; m++) {
                    const float *x = o.x + (n + m) * 4 + i * 2;
                    out.word[m] = pack_pair(x[0] * factor[i], x[1] * factor[i], T());
                }
                transpose_four(out.word);
                const int column = n * 8 + at.column0 * 4;
                if (at.row(i) < count && column < width) store16(to + at.row(i) * step + column, out.pack);
            }
    }

    /* Like MmaEngine's. */
    static __device__ __forceinline__ void add_wide(const Sums &o, const float factor[R], const float keep[R],
                                                    bool resumed, float *to, int64_t step, int count, int width)
    {
        const Place at = place();
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int n = 0; n < V / 8; n++) {
                if (at.row(i) >= count || n * 8 >= width) continue;
                float2 *p = reinterpret_cast<float2 *>(to + at.row(i) * step + n * 8 + at.column0);
                const float *x = o.x + n * 4 + i * 2;
                float2 y = make_float2(0, 0);
                if (resumed) y = *p;
                y.x = fmaf(y.x, keep[i], x[0] * factor[i]);
                y.y = fmaf(y.y, keep[i], x[1] * factor[i]);
                *p = y;
            }
    }
};

#endif
