/*
 * A product through a ring of stages, as kernels for Hopper are built, and everything that can be done wrong in it; for
 * test_emu_checks.cpp, see kernels.h. Some of it the emulator names, some gives wrong numbers in some order of events.
 */
#include <cuda.h>
#include <cudaTypedefs.h>

#include "hopper.cuh"

#include "kernels.h"

enum {
    DEPTH = 64,
    STAGES = 2,
    ROUNDS = RING_DEPTH / DEPTH,
    TILE_BYTES = 64 * DEPTH * 2,
    STAGE_BYTES = 2 * TILE_BYTES
};
static_assert(RING_COLUMNS == 64, "a tile of b is like one of a");

struct Ring {
    Barrier *full, *empty;
    unsigned char *memory;
    int what;
};

__device__ void produce(const Ring &r, const TensorMap &a, const TensorMap &b)
{
    const int what = r.what;
    for (int i = 0; i < ROUNDS; i++) {
        const int s = i % STAGES, phase = i / STAGES & 1;
        unsigned char *stage = r.memory + s * STAGE_BYTES + (what == RING_TILE_MOVED ? 512 : 0);
        barrier_wait(r.empty + s, what == RING_PRODUCER_PHASE ? phase : phase ^ 1);
        barrier_expect(r.full + s, what == RING_FEW_BYTES    ? TILE_BYTES
                                   : what == RING_MANY_BYTES ? STAGE_BYTES + 16
                                                             : STAGE_BYTES);
        if (what == RING_RANK) tma_load_3d(stage, a, r.full + s, i * DEPTH, 0, 0);
        else
            tma_load_2d(stage + (what == RING_COPY_ALIGN ? 64 : 0), a, r.full + s,
                        i * DEPTH - (what == RING_COORDINATE ? 4 : 0), what == RING_BEHIND);
        tma_load_2d(stage + TILE_BYTES, b, r.full + s, i * DEPTH, 0);
    }
    if (what == RING_COPY_LEFT) {
        barrier_wait(r.empty, 0);
        barrier_wait(r.empty + 1, 0);
        barrier_wait(r.empty, 1);
        tma_load_2d(r.memory, a, r.full, 0, 0);
    }
}

__device__ void multiply(const Ring &r, float (&d)[32], int round, int s)
{
    const int what = r.what, t = threadIdx.x % 128;
    unsigned char *stage = r.memory + s * STAGE_BYTES + (what == RING_TILE_MOVED ? 512 : 0);
    const Swizzle mode = what == RING_MODE ? SWIZZLE_32 : SWIZZLE_128;
    const int stride = what == RING_STRIDE ? 512 : 1024;
    uint64_t a = shared_matrix(stage, 16, stride, mode),
             b = shared_matrix(stage + TILE_BYTES, 16, 1024, mode);
    if (what == RING_BIT) b ^= uint64_t{ 1 } << 33;
    if (what == RING_RESERVED_BIT) b |= uint64_t{ 1 } << 46;
    if (what == RING_UNEQUAL && t >= 96) a += 2;
    if (what == RING_THREE_WARPS && t >= 96) return;
    if (what != RING_NO_BEGIN || round != 1) wgmma_begin(d);
    if (what == RING_CHANGED) d[0] += 1;
    for (int k = 0; k < DEPTH / 16; k++) {
        wgmma<false, false>(d, a + 2 * k, b + 2 * k, what == RING_KEEP ? k > 0 : true, bf16());
        if (what == RING_TOUCHED && k == 1) d[3] = 0;
        if (what == RING_WARP_COMMITS && k == 1 && t >= 32) wgmma_commit();
    }
    if (what != RING_NO_COMMIT) wgmma_commit();
}

__device__ void consume(const Ring &r, float (&d)[32])
{
    const int what = r.what;
    for (int i = 0; i < ROUNDS; i++) {
        const int s = i % STAGES, phase = i / STAGES & 1;
        if (what == RING_SELDOM && threadIdx.x % 128 == 7 && i >= STAGES && i < ROUNDS - STAGES) {
        } else if (what != RING_NO_WAIT) barrier_wait(r.full + s, what == RING_CONSUMER_PHASE ? 0 : phase);
        multiply(r, d, i, s);
        if (what == RING_RELEASED_EARLY && threadIdx.x % 32 == 0) barrier_arrive(r.empty + s);
        if (what == RING_GROUP_LATE) wgmma_wait<1>();
        else if (what != RING_NO_PRODUCT_WAIT) wgmma_wait<0>();
        if (what == RING_GROUP_LATE && threadIdx.x % 32 == 0) barrier_arrive(r.empty + s);
        if (what != RING_GROUP_LATE && what != RING_NO_PRODUCT_WAIT) wgmma_end(d);
        if (what == RING_RELEASED_EARLY || what == RING_GROUP_LATE) continue;
        if (what == RING_RELEASED_BY_ONE) {
            if (threadIdx.x % 128 == 0)
                for (int w = 0; w < 4; w++) barrier_arrive(r.empty + s);
        } else if (what == RING_RELEASED_BY_ALL || threadIdx.x % 32 == 0) barrier_arrive(r.empty + s);
    }
    if (what == RING_GROUP_LATE) wgmma_wait<0>();
}

__global__ void __launch_bounds__(256, 1) ring_kernel(TENSOR_MAP(a), TENSOR_MAP(b), int what, float *out)
{
#if HOPPER
    DYNAMIC_SHARED(unsigned char, memory);
    SHARED(Barrier, full, [STAGES]);
    SHARED(Barrier, empty, [STAGES]);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            if (what != RING_NO_INIT || s == 0) barrier_init(full + s, 1);
            barrier_init(empty + s, 4);
        }
        if (what == RING_INIT_TWICE) barrier_init(full, 1);
        if (what != RING_NOT_READY) barriers_ready();
    }
    __syncthreads();
    const Ring r = { full, empty, memory, what };
    if (threadIdx.x < 128) {
        if (threadIdx.x == 0) produce(r, a, b);
        return;
    }
    float d[32];
    for (float &x : d) x = 0;
    consume(r, d);
    for (int i = 0; i < 32; i++) {
        const int t = threadIdx.x % 128, row = t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4,
                  column = i / 4 * 8 + t % 4 * 2 + i % 2;
        out[row * RING_COLUMNS + column] = d[i];
    }
#endif
}

typedef PFN_cuTensorMapEncodeTiled_v12000 Encode;

static Encode encode()
{
    void *call = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &call, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &call, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<Encode>(call);
}

bool make_map(CUtensorMap *out, const void *data, const MapShape &m)
{
    const cuuint64_t dim[] = { m.columns, m.rows }, stride[] = { m.stride };
    const cuuint32_t box[] = { m.box_columns, m.box_rows }, step[] = { 1, 1 };
    return encode()(out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(data), dim, stride, box,
                    step, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(m.swizzle),
                    CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

void run_ring(enum RingWrong what, float *out, const uint16_t *a, const uint16_t *b, cudaStream_t stream)
{
    TensorMap ma, mb;
    MapShape shape = { RING_DEPTH, 64, RING_DEPTH * 2, DEPTH, 64, CU_TENSOR_MAP_SWIZZLE_128B };
    make_map(&mb, b, shape);
    if (what == RING_NO_MAP) memset(&mb, 0, sizeof mb);
    if (what == RING_BEHIND) shape.rows = 65;
    make_map(&ma, a, shape);
    LAUNCH(ring_kernel, 1, 256, STAGES * STAGE_BYTES + 1024, stream, ma, mb, static_cast<int>(what), out);
}

/* ---- what stores show; registers; named barriers ---- */

/* Threads store a and b, of 64 rows of 64, and multiply. out: the first row of each. */
__global__ void __launch_bounds__(128) stored_kernel(int what, float *out)
{
#if HOPPER
    DYNAMIC_SHARED(unsigned char, memory);
    bf16 *tiles = reinterpret_cast<bf16 *>(memory);
    const int t = threadIdx.x;
    if (what == STORED_FENCE_BEFORE) proxy_fence();
    for (int i = t * 64; i < t * 64 + 64; i++) tiles[i] = __float2bfloat16(1.0f);
    if (what != STORED_NO_FENCE && what != STORED_FENCE_BEFORE && (what != STORED_ONE_FENCE || t == 64))
        proxy_fence();
    if (what != STORED_NO_BARRIER) __syncthreads();
    float d[32];
    for (float &x : d) x = 0;
    wgmma_begin(d);
    for (int k = 0; k < 4; k++)
        wgmma<false, false>(d, shared_matrix(tiles, 16, 1024, SWIZZLE_128) + 2 * k,
                            shared_matrix(tiles + 4096, 16, 1024, SWIZZLE_128) + 2 * k, true, bf16());
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_end(d);
    float sum = 0;
    for (const float x : d) sum += x;
    out[t] = sum;
#endif
}

__device__ void take_and_give(int what)
{
    const int group = threadIdx.x / 128;
    if (what == REGISTERS_ONE_WARP) {
        if (threadIdx.x < 32) registers_give<24>();
    } else if (group == 0) registers_give<24>();
    else if (what == REGISTERS_TOO_MANY) registers_take<248>();
    else if (what == REGISTERS_LESS) registers_take<160>();
    else registers_take<240>();
}

__global__ void __launch_bounds__(384, 1) registers_kernel(int what, int *out)
{
    take_and_give(what);
    out[threadIdx.x] = 1;
}

__global__ void unbounded_kernel(int what, int *out)
{
    take_and_give(what);
    out[threadIdx.x] = 1;
}

/* The second warp writes what the first reads. */
__global__ void __launch_bounds__(64) named_kernel(int what, int *out)
{
    SHARED(int, x, [32]);
    const int lane = threadIdx.x % 32;
    if (threadIdx.x >= 32) {
        if (what == NAMED_LATE) named_arrive(1, 64);
        x[lane] = lane;
        if (what == NAMED_ZERO) named_arrive(0, 64);
        else if (what == NAMED_COUNT) named_arrive(1, 32);
        else if (what != NAMED_NO_ARRIVAL && what != NAMED_LATE) named_arrive(1, 64);
    } else {
        named_sync(1, 64);
        out[lane] = x[lane];
    }
}

void run_together(enum Together what, float *out, cudaStream_t stream)
{
    int *numbers = reinterpret_cast<int *>(out);
    if (what < REGISTERS_RIGHT) LAUNCH(stored_kernel, 1, 128, 16384, stream, what, out);
    else if (what == REGISTERS_UNBOUNDED) LAUNCH(unbounded_kernel, 1, 384, 0, stream, what, numbers);
    else if (what < NAMED_RIGHT) LAUNCH(registers_kernel, 1, 384, 0, stream, what, numbers);
    else LAUNCH(named_kernel, 1, 64, 0, stream, what, numbers);
}
