/*
 * Parts that every kernel file uses: dtypes, 16-byte loads and stores, reductions in a fixed order, the dispatch
 * from a tensor's dtype to a template, and the shape of a launcher.
 *
 * A launcher is  extern "C" Err cuda_NAME(Stream *s, const NAME_args *a)  for NAME of device/ops.def. It
 * checks what the declaration does not say, launches on cuda_stream(s) and returns; it never waits, never
 * allocates, never calls the host's clock. The table (table.c) wraps it in an NVTX range and asks CUDA for
 * the launch's error, so that launchers need not. Memory besides the arguments is s->dev->workspace
 * (workspace_bytes; contents undefined, one op at a time). s->dev->threads is the number of multiprocessors.
 *
 * Everything repeats bit for bit: no floating-point atomics, all sums in an order that depends on the shape
 * alone. Arithmetic is fp32, whatever the storage.
 */
#ifndef MEGATRAIN_CUDA_KERNEL_CUH
#define MEGATRAIN_CUDA_KERNEL_CUH

#include "common.cuh"
extern "C" {
#include "base/rng.h"
#include "device/ops.h"
}

typedef __nv_bfloat16 bf16;
typedef __half f16;

static inline cudaStream_t cuda_stream(Stream *s) { return static_cast<cudaStream_t>(s->handle); }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* A grid of n blocks. A launch of none is an error, an op on empty tensors is not: its kernel finds no work. */
static inline unsigned grid_blocks(int64_t n) { return static_cast<unsigned>(n > 0 ? n : 1); }

/* Runs `call` with the type name T for a compute dtype; ERR_SHAPE for any other. */
#define DISPATCH(dtype, ...)                                                            \
    switch (dtype) {                                                                    \
    case F32: { typedef float T; __VA_ARGS__; } break;                                  \
    case BF16: { typedef bf16 T; __VA_ARGS__; } break;                                  \
    case F16: { typedef f16 T; __VA_ARGS__; } break;                                    \
    default: return err_set(ERR_SHAPE, "no CUDA kernel for %s", dtype_name(dtype));     \
    }

/* The same with T of the residual stream, which may be float beside a 16-bit N of all else. */
#define DISPATCH_STREAM(stream, dtype, ...)                                                                      \
    if ((stream) == (dtype)) {                                                                                   \
        DISPATCH(dtype, typedef T N; __VA_ARGS__);                                                               \
    } else {                                                                                                     \
        if ((stream) != F32 || ((dtype) != BF16 && (dtype) != F16))                                              \
            return err_set(ERR_SHAPE, "no CUDA kernel for %s beside %s", dtype_name(stream), dtype_name(dtype)); \
        typedef float T;                                                                                         \
        if ((dtype) == BF16) { typedef bf16 N; __VA_ARGS__; }                                                    \
        else { typedef f16 N; __VA_ARGS__; }                                                                     \
    }

template <class T> static inline T *data_of(Tensor t) { return static_cast<T *>(t.data); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16(x); }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half(x); }

/* Two numbers in a register, as mma.sync takes them. */
__device__ __forceinline__ uint32_t pack_pair(float low, float high, bf16)
{
    const __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&p);
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, f16)
{
    const __half2 p = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&p);
}

/* 16 bytes of T: 4 floats or 8 16-bit numbers. Addresses are multiples of 16. */
template <class T> struct alignas(16) Pack {
    static constexpr int COUNT = 16 / sizeof(T);
    T v[COUNT];
};

template <class T> __device__ __forceinline__ Pack<T> load16(const T *p)
{
    Pack<T> r;
    need_aligned(p, 16);
    *reinterpret_cast<int4 *>(&r) = *reinterpret_cast<const int4 *>(p);
    return r;
}

template <class T> __device__ __forceinline__ void store16(T *p, const Pack<T> &x)
{
    need_aligned(p, 16);
    *reinterpret_cast<int4 *>(p) = *reinterpret_cast<const int4 *>(&x);
}

/*
 * The same to global memory, and surely one instruction: a plain assignment of 16 bytes is split into its
 * elements now and then (nvcc 13.0, where the address has a part known only to the block). Past L1, which
 * would not keep it anyway.
 */
template <class T> __device__ __forceinline__ void store16_global(T *p, const Pack<T> &x)
{
    __stcg(reinterpret_cast<int4 *>(p), *reinterpret_cast<const int4 *>(&x));
}

/*
 * A pack of a row of which `left` >= 1 elements remain. WIDE: 16 bytes at once, for rows that rows_aligned()
 * allows; else one by one, with zeros beyond the row and nothing stored there.
 */
template <class T, bool WIDE> __device__ __forceinline__ Pack<T> load_pack(const T *p, int64_t left)
{
    if constexpr (WIDE) {
        return load16(p);
    } else {
        Pack<T> r;
        for (int i = 0; i < Pack<T>::COUNT; i++) r.v[i] = i < left ? p[i] : T(0.0f);
        return r;
    }
}

template <class T, bool WIDE> __device__ __forceinline__ void store_pack(T *p, const Pack<T> &x, int64_t left)
{
    if constexpr (WIDE) {
        store16_global(p, x);
    } else {
        for (int i = 0; i < Pack<T>::COUNT; i++)
            if (i < left) p[i] = x.v[i];
    }
}

/* The same of a row of N, whose numbers are widened or rounded: 4 of 16 bits, 8 bytes at once, beside a pack of
 * floats. */
template <class N> struct alignas(8) NarrowPack {
    N v[4];
};

template <class T, bool WIDE, class N> __device__ __forceinline__ Pack<T> load_as(const N *p, int64_t left)
{
    if constexpr (sizeof(N) == sizeof(T)) {
        return load_pack<T, WIDE>(p, left);
    } else {
        NarrowPack<N> q;
        Pack<T> r;
        if constexpr (WIDE) {
            need_aligned(p, 8);
            *reinterpret_cast<int2 *>(&q) = *reinterpret_cast<const int2 *>(p);
        } else {
            for (int i = 0; i < 4; i++) q.v[i] = i < left ? p[i] : N(0.0f);
        }
        for (int i = 0; i < 4; i++) r.v[i] = to_float(q.v[i]);
        return r;
    }
}

template <class T, bool WIDE, class N>
__device__ __forceinline__ void store_as(N *p, const Pack<T> &x, int64_t left)
{
    if constexpr (sizeof(N) == sizeof(T)) {
        store_pack<T, WIDE>(p, x, left);
    } else {
        NarrowPack<N> q;
        for (int i = 0; i < 4; i++) q.v[i] = from_float<N>(to_float(x.v[i]));
        if constexpr (WIDE) {
            need_aligned(p, 8);
            __stcg(reinterpret_cast<int2 *>(p), *reinterpret_cast<const int2 *>(&q));
        } else {
            for (int i = 0; i < 4; i++)
                if (i < left) p[i] = q.v[i];
        }
    }
}

/* Allows the kernel its dynamic shared memory. */
template <class... P> static Err allow_shared(void (*kernel)(P...), int bytes)
{
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess) return ERR_OK;
    return err_set(ERR_DEVICE, "this GPU does not grant '%d' bytes of shared memory to a block", bytes);
}

/* Rows of a tensor as a kernel sees them. */
template <class T> struct Rows {
    T *data;
    int64_t ld;
    __device__ __forceinline__ T *at(int64_t row) const { return data + row * ld; }
};

template <class T> static inline Rows<T> rows_of(Tensor t)
{
    Rows<T> r = { data_of<T>(t), t.ld };
    return r;
}

/* The same of rows that may lie in groups (Tensor.group). */
template <class T> struct GroupedRows {
    T *data;
    int64_t step, between; /* from row to row; behind each group, beside the step; 0: rows lie evenly */
    uint32_t inverse;      /* 2^shift / group, rounded up: the quotient of a row below 2^31 without a division */
    int shift;
    __device__ __forceinline__ T *at(int64_t row) const
    {
        const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(row)) * inverse;
        return data + row * step + static_cast<int64_t>(product >> shift) * between;
    }
};

template <class T> static inline GroupedRows<T> grouped_rows_of(Tensor t)
{
    GroupedRows<T> r = { data_of<T>(t), t.ld, 0, 0, 31 };
    if (t.group <= 1) return r;
    r.step = t.dim[t.ndim - 1], r.between = t.ld - t.group * r.step;
    while ((int64_t{ 1 } << (r.shift - 31)) < t.group) r.shift++;
    r.inverse = static_cast<uint32_t>(ceil_div(int64_t{ 1 } << r.shift, t.group));
    return r;
}

/*
 * How many rows of dim 0 are in use: at most `capacity`, fewer where a tensor carries a count (Tensor.rows),
 * which lies in device memory. Grids cover the capacity; threads beyond rows_in_use() have nothing to do.
 */
struct RowCount {
    int64_t capacity;
    const int64_t *count[2];
};

static inline RowCount row_count(Tensor t, Tensor u)
{
    RowCount r = { t.dim[0], { t.rows, u.rows } };
    return r;
}

__device__ __forceinline__ int64_t rows_in_use(RowCount r)
{
    for (int i = 0; i < 2; i++)
        if (r.count[i] && *r.count[i] < r.capacity) r.capacity = *r.count[i];
    return r.capacity;
}

/* Rows of these tensors can be read 16 bytes at a time: base and row length are multiples of 16 bytes. */
static inline bool rows_aligned(Tensor t)
{
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.ld * dtype_size(t.dtype) % 16 == 0 &&
           t.dim[t.ndim - 1] * dtype_size(t.dtype) % 16 == 0;
}

/*
 * The usual cut of elementwise work: rows in use, of `parts` parts each (heads, chunks), of `width` elements
 * each, taken pack by pack. The block's threads lie `x` packs across a part and `y` rows high; each takes its
 * pack in PACK_UNROLL rows, so that all its loads are under way at once and what belongs to the column is
 * read once. blockIdx: rows, packs across, part. No division anywhere.
 */
constexpr int PACK_THREADS = 256, PACK_UNROLL = 2;

struct PackGrid {
    dim3 grid, block;
    RowCount rows;
    int64_t width;
};

static inline PackGrid pack_grid(RowCount rows, int64_t parts, int64_t width, int count)
{
    const int64_t packs = ceil_div(width, count), across = ceil_div(packs, PACK_THREADS);
    const int64_t x = ceil_div(packs, across), y = PACK_THREADS / x, down = ceil_div(rows.capacity, y * PACK_UNROLL);
    PackGrid g;
    g.grid = dim3(static_cast<unsigned>(down > 0 ? down : 1), static_cast<unsigned>(across),
                  static_cast<unsigned>(parts));
    g.block = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
    g.rows = rows;
    g.width = width;
    return g;
}

struct PackPlace {
    int64_t row, column, left; /* left: elements of the part from `column` on */
    bool used;                 /* else outside: nothing to do */
};

/* Place of pack `u` of this thread in part blockIdx.z; `rows` is rows_in_use(g.rows). */
template <int COUNT> __device__ __forceinline__ PackPlace pack_place(const PackGrid &g, int64_t rows, int u)
{
    PackPlace p;
    p.row = (blockIdx.x * static_cast<int64_t>(PACK_UNROLL) + u) * blockDim.y + threadIdx.y;
    p.column = (blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x) * COUNT;
    p.left = g.width - p.column;
    p.used = p.row < rows && p.left > 0;
    return p;
}

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

/* Over the lanes of a full warp; every lane gets the result, the same bits. */
__device__ __forceinline__ float warp_sum(float x)
{
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
    for (int d = WARP / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
    return x;
}

/*
 * Over all threads of a one-dimensional block of whole warps; every thread gets the result. `part` is shared
 * memory for one float a warp; two barriers, so it may be used again at once.
 */
__device__ __forceinline__ float block_sum(float x, float *part)
{
    const int warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < warps; w++) sum += part[w];
    __syncthreads();
    return sum;
}

__device__ __forceinline__ float block_max(float x, float *part)
{
    const int warps = blockDim.x / WARP;
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = part[0];
    for (int w = 1; w < warps; w++) most = fmaxf(most, part[w]);
    __syncthreads();
    return most;
}

#endif
