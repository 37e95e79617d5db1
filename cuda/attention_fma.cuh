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

    static __device__ __forceinline__ int row(int i) { return threadIdx.x / ACROSS * R + i; }
    static __device__ __forceinline__ int column(int j) { return threadIdx.x % ACROSS + j * ACROSS; }
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
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < N; j++) s.x[i][j] = 0;
    }

    static __device__ __forceinline__ void multiply(Scores &s, const float *a, const float *b)
    {
#pragma unroll 2
        for (int c = 0; c < C / CHUNK; c++) {
            Pack<float> left[R], right[N];
#pragma unroll
            for (int i = 0; i < R; i++) left[i] = load16(a + offset(row(i), c));
#pragma unroll
            for (int j = 0; j < N; j++) right[j] = load16(b + offset(column(j), c));
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
#pragma unroll
                for (int i = 0; i < R; i++)
#pragma unroll
                    for (int j = 0; j < N; j++) s.x[i][j] = fmaf(left[i].v[e], right[j].v[e], s.x[i][j]);
        }
    }

    static __device__ __forceinline__ void clear(Sums &o)
    {
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int c = 0; c < C / ACROSS; c++) o.x[i][c] = 0;
    }

    static __device__ __forceinline__ void scale_rows(Sums &o, const float factor[R])
    {
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int c = 0; c < C / ACROSS; c++) o.x[i][c] *= factor[i];
    }

    static __device__ __forceinline__ void add_weighted(Sums &o, const Scores &s, const float *b, float *stage)
    {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < N; j++) stage[row(i) * STAGE_PITCH + column(j)] = s.x[i][j];
        __syncwarp();
#pragma unroll 1
        for (int j = 0; j < COLS; j += CHUNK) {
            Pack<float> weight[R];
#pragma unroll
            for (int i = 0; i < R; i++) weight[i] = load16(stage + row(i) * STAGE_PITCH + j);
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
#pragma unroll
                for (int k = 0; k < C / ACROSS / CHUNK; k++) {
                    const Pack<float> x = load16(b + offset(j + e, k * ACROSS + threadIdx.x % ACROSS));
#pragma unroll
                    for (int i = 0; i < R; i++)
#pragma unroll
                        for (int c = 0; c < CHUNK; c++)
                            o.x[i][k * CHUNK + c] = fmaf(weight[i].v[e], x.v[c], o.x[i][k * CHUNK + c]);
                }
        }
    }

    template <bool KEYS_DOWN>
    static __device__ __forceinline__ void keep_bits(Keep &keep, const HeadDropout &d, int rows, int columns)
    {
        keep.word = 0;
#pragma unroll 1
        for (int k = 0; k < R * N; k++) {
            const int x = rows + row(k / N), y = columns + column(k % N);
            keep.word |= keep_one(d, KEYS_DOWN ? y : x, KEYS_DOWN ? x : y) << k;
        }
    }

    static __device__ __forceinline__ bool kept(const Keep &k, int i, int j) { return k.word >> (i * N + j) & 1; }

    /* As MmaEngine::store; 8 threads write 128 bytes at once without help of the tile. */
    static __device__ __forceinline__ void store(const Sums &o, const float factor[R], float *, float *to, int64_t step,
                                                 int count, int width)
    {
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int k = 0; k < C / ACROSS / CHUNK; k++) {
                const int column = (k * ACROSS + static_cast<int>(threadIdx.x) % ACROSS) * CHUNK;
                Pack<float> x;
#pragma unroll
                for (int c = 0; c < CHUNK; c++) x.v[c] = o.x[i][k * CHUNK + c] * factor[i];
                if (row(i) < count && column < width) store16(to + row(i) * step + column, x);
            }
    }
};

#endif
