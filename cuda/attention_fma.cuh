/*
 * The engine of attention (attention.cuh) for fp32 inputs: plain FMA, every product and sum in fp32.
 *
 * A row belongs to 8 threads; a thread has R consecutive rows and N columns, 8 apart. Products read 4 floats
 * at a time; rows in shared memory are padded by 4 floats, so that the 8 rows that a quarter warp reads fall
 * into different banks. Weights reach the second product through scratch of the warp's own rows.
 */
#ifndef MEGATRAIN_CUDA_ATTENTION_FMA_CUH
#define MEGATRAIN_CUDA_ATTENTION_FMA_CUH

#include "attention.cuh"

template <int C_, int R_, int COLS_> struct FmaEngine {
    typedef float T;
    static constexpr int ACROSS = 8; /* threads of a row */
    static constexpr int C = C_, R = R_, COLS = COLS_, N = COLS / ACROSS, WARPS = 4, BLOCKS = 1, THREADS = WARPS * WARP;
    static constexpr int WARP_ROWS = WARP / ACROSS * R, ROWS = WARPS * WARP_ROWS;
    static constexpr int PITCH = C + 4, STAGE_PITCH = COLS + 4, STAGE = ROWS * STAGE_PITCH, CHUNK = 4;
    static_assert(C % (ACROSS * CHUNK) == 0 && COLS % ACROSS == 0 && R * N <= 32, "one word of keep bits");

    struct Scores {
        float x[R][N];
        __device__ __forceinline__ float &at(int i, int j) { return x[i][j]; }
    };
    struct Sums {
        float x[R][C / ACROSS]; /* columns 32 k + 4 (lane % 8) .. + 3 for each k */
    };
    struct Keep {
        uint32_t word; /* bit i N + j */
    };

    struct Place {
        int row0, column0;
        __device__ __forceinline__ int row(int i) const { return row0 + i; }
        __device__ __forceinline__ int column(int j) const { return column0 + j * ACROSS; }
    };
    static __device__ __forceinline__ Place place()
    {
        const int thread = in_place(threadIdx.x);
        Place p = { thread / ACROSS * R, thread % ACROSS };
        return p;
    }
    static __device__ __forceinline__ int offset(int row, int chunk) { return row * PITCH + chunk * CHUNK; }

    static __device__ __forceinline__ float exp2(float x) { return exp2f(x); }

    static __device__ __forceinline__ float row_sum(float x)
    {
        for (int d = 1; d < ACROSS; d *= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
        return x;
    }
    static __device__ __forceinline__ float row_max(float x)
    {
        for (int d = 1; d < ACROSS; d *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
        return x;
    }

    static __device__ __forceinline__ void clear(Scores &s)
    {
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int j = 0; j < N; j++) s.x[i][j] = 0;
    }

    static __device__ __forceinline__ void multiply(Scores &s, const float *a, const float *b)
    {
        const Place at = place();
        UNROLL_BY(2)
        for (int c = 0; c < C / CHUNK; c++) {
            Pack<float> left[R], right[N];
            UNROLL
            for (int i = 0; i < R; i++) left[i] = load16(a + offset(at.row(i), c));
            UNROLL
            for (int j = 0; j < N; j++) right[j] = load16(b + offset(at.column(j), c));
            UNROLL
            for (int e = 0; e < CHUNK; e++)
                UNROLL
                for (int i = 0; i < R; i++)
                    UNROLL
                    for (int j = 0; j < N; j++) s.x[i][j] = fmaf(left[i].v[e], right[j].v[e], s.x[i][j]);
        }
    }

    static __device__ __forceinline__ void clear(Sums &o)
    {
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int c = 0; c < C / ACROSS; c++) o.x[i][c] = 0;
    }

    static __device__ __forceinline__ void scale_rows(Sums &o, const float factor[R])
    {
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int c = 0; c < C / ACROSS; c++) o.x[i][c] *= factor[i];
    }

    static __device__ __forceinline__ void add_weighted(Sums &o, const Scores &s, const float *b, float *stage)
    {
        const Place at = place();
        __syncwarp();
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int j = 0; j < N; j++) stage[at.row(i) * STAGE_PITCH + at.column(j)] = s.x[i][j];
        __syncwarp();
        UNROLL_BY(1)
        for (int j = 0; j < COLS; j += CHUNK) {
            Pack<float> weight[R];
            UNROLL
            for (int i = 0; i < R; i++) weight[i] = load16(stage + at.row(i) * STAGE_PITCH + j);
            UNROLL
            for (int e = 0; e < CHUNK; e++)
                UNROLL
                for (int k = 0; k < C / ACROSS / CHUNK; k++) {
                    const Pack<float> x = load16(b + offset(j + e, k * ACROSS + at.column0));
                    UNROLL
                    for (int i = 0; i < R; i++)
                        UNROLL
                        for (int c = 0; c < CHUNK; c++)
                            o.x[i][k * CHUNK + c] = fmaf(weight[i].v[e], x.v[c], o.x[i][k * CHUNK + c]);
                }
        }
    }

    template <bool KEYS_DOWN>
    static __device__ __forceinline__ void keep_bits(Keep &keep, const HeadDropout &d, int rows, int columns)
    {
        const Place at = place();
        keep.word = 0;
        UNROLL_BY(1)
        for (int k = 0; k < R * N; k++) {
            const int x = rows + at.row(k / N), y = columns + at.column(k % N);
            keep.word |= keep_one(d, KEYS_DOWN ? y : x, KEYS_DOWN ? x : y) << k;
        }
    }

    static __device__ __forceinline__ bool kept(const Keep &k, int i, int j) { return k.word >> (i * N + j) & 1; }

    /* Like MmaEngine::store; 8 threads write 128 bytes at once without help of the tile. */
    static __device__ __forceinline__ void store(const Sums &o, const float factor[R], float *, float *to, int64_t step,
                                                 int count, int width)
    {
        const Place at = place();
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int k = 0; k < C / ACROSS / CHUNK; k++) {
                const int column = (k * ACROSS + at.column0) * CHUNK;
                Pack<float> x;
                UNROLL
                for (int c = 0; c < CHUNK; c++) x.v[c] = o.x[i][k * CHUNK + c] * factor[i];
                if (at.row(i) < count && column < width) store16(to + at.row(i) * step + column, x);
            }
    }

    /* Like MmaEngine::add_wide. */
    static __device__ __forceinline__ void add_wide(const Sums &o, const float factor[R], const float keep[R],
                                                    bool resumed, float *to, int64_t step, int count, int width)
    {
        const Place at = place();
        UNROLL
        for (int i = 0; i < R; i++)
            UNROLL
            for (int k = 0; k < C / ACROSS / CHUNK; k++) {
                const int column = (k * ACROSS + at.column0) * CHUNK;
                if (at.row(i) >= count || column >= width) continue;
                float *p = to + at.row(i) * step + column;
                Pack<float> x = {};
                if (resumed) x = load16(p);
                UNROLL
                for (int c = 0; c < CHUNK; c++) x.v[c] = fmaf(x.v[c], keep[i], o.x[i][k * CHUNK + c] * factor[i]);
                store16(p, x);
            }
    }
};

#endif
