/*
 * Shared parts of the kernels of experts' products on Hopper (grouped_hopper.cu, fp8_grouped_hopper.cu): how many
 * threads do what, the ring of stages, and how a warp writes its part of a tile.
 */
#ifndef MEGATRAIN_CUDA_GROUPED_HOPPER_CUH
#define MEGATRAIN_CUDA_GROUPED_HOPPER_CUH

#include "grouped.cuh"
#include "hopper.cuh"

enum : int {
    HOPPER_GROUP = 128, /* threads of a warpgroup */
    HOPPER_WORKERS = 2, /* warpgroups that multiply */
    HOPPER_THREADS = HOPPER_GROUP * (1 + HOPPER_WORKERS),
    HOPPER_ROWS = 64 * HOPPER_WORKERS, /* of a tile */
    HOPPER_SHEET = 4096                /* bytes: a warp's results on their way */
};

/* A place in the ring of stages, and the parity of its barriers. */
template <int STAGES> struct StageRing {
    int at = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

/* All threads call it first. One arrival fills a stage; each warp that multiplies gives it back. */
template <int STAGES> __device__ __forceinline__ void ring_ready(Barrier *full, Barrier *empty)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, HOPPER_WORKERS * HOPPER_GROUP / WARP);
        }
        barriers_ready();
    }
    __syncthreads();
}

/* This warp's 16 rows, 64 columns at a time: its sheet holds two such, rows of 128 bytes with their chunks moved. */
template <int N, class T>
__device__ __forceinline__ void store_product(const float (&d)[N / 2], char *sheets, const Panel<T> &out)
{
    const int l = threadIdx.x % WARP;
    UNROLL
    for (int c = 0; c < N / 64; c++) {
        T *sheet = reinterpret_cast<T *>(sheets + c % 2 * (HOPPER_SHEET / 2));
        UNROLL
        for (int j = 0; j < 8; j++) UNROLL
        for (int h = 0; h < 2; h++) {
            const int row = l / 4 + h * 8, r = c * 32 + j * 4 + h * 2;
            *reinterpret_cast<uint32_t *>(sheet + row * 64 + (j ^ (row & 7)) * 8 + l % 4 * 2) =
                pack_pair(d[r], d[r + 1], T());
        }
        __syncwarp(); /* who has passed this has read the other half */
        UNROLL
        for (int i = 0; i < 4; i++) {
            const int row = i * 4 + l / 8, chunk = l % 8, column = c * 64 + chunk * 8;
            if (row < out.rows && column < out.columns)
                store16_global(out.data + row * out.ld + column,
                               load16(sheet + row * 64 + (chunk ^ (row & 7)) * 8));
        }
    }
}

/* Lane l's part of 16 rows and 64 columns of fp32 from `column` on: 4 columns of every second row. */
struct HopperPart {
    Pack<float> x[8];
};

__device__ __forceinline__ void load_part(HopperPart *p, const Panel<float> &out, int column, bool add)
{
    const int l = threadIdx.x % WARP;
    column += l % 16 * 4;
    UNROLL
    for (int i = 0; i < 8; i++) {
        const int row = i * 2 + l / 16;
        if (add && row < out.rows && column < out.columns) p->x[i] = load16(out.data + row * out.ld + column);
        else p->x[i] = Pack<float>{};
    }
}

/* The same as store_product of fp32: a sheet of 64 columns. `some`: else the product of no rows. */
template <int N>
__device__ __forceinline__ void add_product(const float (&d)[N / 2], char *sheets, const Panel<float> &out,
                                            bool add, bool some)
{
    const int l = threadIdx.x % WARP;
    float *sheet = reinterpret_cast<float *>(sheets);
    UNROLL
    for (int c = 0; c < N / 64; c++) {
        HopperPart now;
        load_part(&now, out, c * 64, add);
        UNROLL
        for (int j = 0; j < 8; j++) UNROLL
        for (int h = 0; h < 2; h++) {
            const int row = l / 4 + h * 8, r = c * 32 + j * 4 + h * 2, chunk = j * 2 + l % 4 / 2;
            *reinterpret_cast<float2 *>(sheet + row * 64 + (chunk ^ (row & 7) * 2) * 4 + l % 2 * 2) =
                make_float2(some ? d[r] : 0.0f, some ? d[r + 1] : 0.0f);
        }
        __syncwarp();
        UNROLL
        for (int i = 0; i < 8; i++) {
            const int row = i * 2 + l / 16, chunk = l % 16, column = c * 64 + chunk * 4;
            const Pack<float> sum = load16(sheet + row * 64 + (chunk ^ (row & 7) * 2) * 4);
            UNROLL
            for (int v = 0; v < 4; v++) now.x[i].v[v] += sum.v[v];
            if (row < out.rows && column < out.columns)
                store16_global(out.data + row * out.ld + column, now.x[i]);
        }
        __syncwarp(); /* the sheet has been read */
    }
}

#endif
