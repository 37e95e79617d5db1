/*
 * The CUDA language on a CPU: what a .cu file needs when a host C++17 compiler reads it instead of nvcc.
 * cuda/common.cuh includes this file and describes the names at the bottom (LAUNCH, SHARED, cp_async_16, ...).
 *
 * Types, and arithmetic on bf16 and fp16, come from NVIDIA's own headers, which compile on the host. Every CUDA
 * thread runs on a fiber (fiber.cpp); a fiber gives way only at a barrier or a warp operation, so that the order
 * of threads is chosen by the emulator and a missing barrier shows (README.md). Warp operations, barriers and
 * asynchronous copies are in warp.cpp. Not offered on purpose: __activemask, floating-point atomics, __shared__
 * (SHARED), textures, cooperative groups.
 *
 * All that touches a kernel's memory is inline here, because this file is compiled with the kernel and so is
 * watched by the sanitizers; the emulator's own code is not.
 */
#ifndef MEGATRAIN_EMU_H
#define MEGATRAIN_EMU_H

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <typeinfo>

namespace emu
{

/* A line of the kernel: a default argument `Site at = Site::here()` is the caller's line. */
struct Site {
    const char *file;
    int line;
    static constexpr Site here(const char *file = __builtin_FILE(), int line = __builtin_LINE())
    {
        return { file, line };
    }
};

/* The thread that runs now, and its launch. Blocks run one after another. */
struct Thread {
    uint3 index;
    int lane;
};
extern Thread *self;
extern uint3 block_index;
extern dim3 block_dim, grid_dim;

/* Prints the kernel, the block, the thread and the text, and ends the process with status 97. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What __launch_bounds__ of the running kernel says; bounds.awk puts the call there. */
void launch_bounds(unsigned threads, int blocks = 1);

void barrier(Site at);
int barrier_count(bool predicate, Site at); /* threads whose predicate holds */
int barrier_or(bool predicate, Site at);
int barrier_and(bool predicate, Site at);
void fence();

/* Warp operations: `mask` names the lanes that take part. Values are up to 8 bytes, as bits. */
enum Shuffle { SHUFFLE_INDEX, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR };
enum Reduce {
    REDUCE_ADD,
    REDUCE_MIN,
    REDUCE_MAX,
    REDUCE_MIN_SIGNED,
    REDUCE_MAX_SIGNED,
    REDUCE_AND,
    REDUCE_OR,
    REDUCE_XOR
};
void warp_sync(uint32_t mask, Site at);
uint64_t warp_shuffle(Shuffle kind, uint32_t mask, uint64_t bits, int argument, int width, Site at);
uint32_t warp_ballot(uint32_t mask, bool predicate, Site at);
uint32_t warp_match(uint32_t mask, uint64_t bits, Site at);
uint32_t warp_reduce(Reduce kind, uint32_t mask, uint32_t value, Site at);

/* Shared memory of the block. A slot is a static array: the same key gives the same memory within a block. */
void *shared_slot(const void *key, const char *name, size_t size, size_t align);
void *shared_dynamic();
uint32_t shared_offset(const void *p, size_t size, Site at); /* fails if [p, p + size) is not shared memory */

/* Asynchronous copies of 16 bytes: taken from the list, at the wait or at once (`now`), by the thread itself. */
struct Copy {
    void *to;
    const void *from;
    bool valid; /* false: zeros, and `from` is not read */
};
bool copy_begin(Copy c, Site at); /* true: land it now */
void copy_commit();
const Copy *copies_due(int pending, int *count); /* the oldest, to be landed now */
void copies_landed(int count);

inline void land(Copy c)
{
    const int4 zero = { 0, 0, 0, 0 };
    *static_cast<int4 *>(c.to) = c.valid ? *static_cast<const int4 *>(c.from) : zero;
}

/* Matrix operations of a whole warp. */
enum Half { BFLOAT16, FLOAT16 };
void warp_ldmatrix(uint32_t out[4], const uint64_t row[2], bool transposed, Site at);
void warp_mma(float d[4], const uint32_t a[4], const uint32_t b[2], Half type, Site at);
void warp_mma_e4m3(float d[4], const uint32_t a[4], const uint32_t b[2], Site at);

/* ---- rounding (round.cpp) ---- */

extern const bool chip_rounding; /* EMU_ROUND=chip */
/* A result of a fast function: x itself, or, as a chip rounds, off by up to 2^-22 of it; whole powers of 2 stay. */
float rough(float x);

/* ---- launches ---- */

/* A number of blocks or threads in each dimension. A 64-bit count that does not fit is a failure, not a wrap. */
struct Extent {
    dim3 d;
    Extent(dim3 dims) : d(dims) {}
    template <class I, class = std::enable_if_t<std::is_integral_v<I>>> Extent(I n) : d(static_cast<unsigned>(n))
    {
        if (n < 0 || static_cast<uint64_t>(n) > 0xffffffffu) fail("a launch of %lld blocks or threads", (long long)n);
    }
};

struct Launch {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    Site at;
    const void *kernel = nullptr;
    const char *tag = nullptr; /* mangled name of Tag<kernel> */
    Launch(Extent g, Extent b, size_t shared, cudaStream_t s, Site site)
        : grid(g.d), block(b.d), shared_bytes(shared), stream(s), at(site)
    {
    }
};

/* Puts a launch into its stream; each thread calls `body`. Errors go where cudaGetLastError finds them. */
void enqueue(const Launch &launch, std::function<void()> body);
/*
 * A pointer handed to a kernel must be null or lead to device or pinned memory. In a struct every word that is
 * the address of mapped host memory is taken for a pointer; padding, where old pointers may lie, must be known.
 */
void check_pointer(const Launch &launch, int index, const void *p);
void check_words(const Launch &launch, int index, const void *words, size_t count);
template <class T> void check_value(const Launch &launch, int index, T value)
{
    if constexpr (std::is_pointer_v<T>) check_pointer(launch, index, reinterpret_cast<const void *>(value));
    else if constexpr (std::is_class_v<T> && alignof(T) >= 8) {
#ifdef __clang__
        if constexpr (!std::has_unique_object_representations_v<T>) return;
#else
        __builtin_clear_padding(&value);
#endif
        check_words(launch, index, &value, sizeof(T) / 8);
    }
}

template <auto KERNEL> struct Tag {
};

template <auto KERNEL, class... P> void launch_typed(Launch l, void (*)(P...), std::common_type_t<P>... values)
{
    const std::tuple<std::decay_t<P>...> arguments(values...);
    static_assert(sizeof arguments <= 4096, "a kernel has at most 4 KiB of arguments");
    l.kernel = reinterpret_cast<const void *>(KERNEL);
    l.tag = typeid(Tag<KERNEL>).name();
    int index = 0;
    (check_value(l, ++index, values), ...);
    enqueue(l, [arguments] { std::apply(KERNEL, arguments); });
}

template <auto KERNEL, class... A> void launch(const Launch &l, A &&...values)
{
    launch_typed<KERNEL>(l, KERNEL, std::forward<A>(values)...);
}

/* ---- bits ---- */

template <class TO, class FROM> TO bits_as(const FROM &x)
{
    static_assert(sizeof(TO) >= sizeof(FROM) || sizeof(FROM) == 8, "sizes");
    TO r{};
    __builtin_memcpy(static_cast<void *>(&r), &x, sizeof(FROM) < sizeof(TO) ? sizeof(FROM) : sizeof(TO));
    return r;
}

template <class T> T shuffle(Shuffle kind, uint32_t mask, T v, int argument, int width, Site at)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a shuffle moves up to 8 bytes");
    return bits_as<T>(warp_shuffle(kind, mask, bits_as<uint64_t>(v), argument, width, at));
}

inline void aligned(const void *p, size_t bytes, const char *what)
{
    if (reinterpret_cast<uintptr_t>(p) % bytes) fail("%s: address %p is not a multiple of %zu", what, p, bytes);
}

template <class T, class F> T atomic_update(T *p, F next)
{
    static_assert(std::is_integral_v<T> && sizeof(T) >= 4,
                  "atomics are for integers: sums of floats would depend on order");
    aligned(p, sizeof(T), "atomic");
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &old, next(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}

} // namespace emu

/* ---- keywords and built-in variables ---- */

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ shared_memory_is_declared_by_SHARED
#define __launch_bounds__(...)
#define __grid_constant__
#ifndef __clang__
#define __builtin_assume(condition) static_cast<void>(0)
#endif

#define threadIdx (::emu::self->index)
#define blockIdx (::emu::block_index)
#define blockDim (::emu::block_dim)
#define gridDim (::emu::grid_dim)
constexpr int warpSize = 32;

/* ---- barriers and fences ---- */

inline void __syncthreads(emu::Site at = emu::Site::here()) { emu::barrier(at); }
inline int __syncthreads_count(int p, emu::Site at = emu::Site::here()) { return emu::barrier_count(p != 0, at); }
inline int __syncthreads_or(int p, emu::Site at = emu::Site::here()) { return emu::barrier_or(p != 0, at); }
inline int __syncthreads_and(int p, emu::Site at = emu::Site::here()) { return emu::barrier_and(p != 0, at); }
inline void __syncwarp(unsigned mask = 0xffffffffu, emu::Site at = emu::Site::here()) { emu::warp_sync(mask, at); }
inline void __threadfence() { emu::fence(); }
inline void __threadfence_block() { emu::fence(); }
inline void __trap() { emu::fail("__trap"); }

/* ---- warp operations ---- */

template <class T> T __shfl_sync(unsigned mask, T v, int lane, int width = 32, emu::Site at = emu::Site::here())
{
    return emu::shuffle(emu::SHUFFLE_INDEX, mask, v, lane, width, at);
}

template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, emu::Site at = emu::Site::here())
{
    return emu::shuffle(emu::SHUFFLE_UP, mask, v, static_cast<int>(delta), width, at);
}

template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, emu::Site at = emu::Site::here())
{
    return emu::shuffle(emu::SHUFFLE_DOWN, mask, v, static_cast<int>(delta), width, at);
}

template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, emu::Site at = emu::Site::here())
{
    return emu::shuffle(emu::SHUFFLE_XOR, mask, v, bits, width, at);
}

inline unsigned __ballot_sync(unsigned mask, int p, emu::Site at = emu::Site::here())
{
    return emu::warp_ballot(mask, p != 0, at);
}

inline int __any_sync(unsigned mask, int p, emu::Site at = emu::Site::here())
{
    return emu::warp_ballot(mask, p != 0, at) != 0;
}

inline int __all_sync(unsigned mask, int p, emu::Site at = emu::Site::here())
{
    return emu::warp_ballot(mask, p == 0, at) == 0;
}

template <class T> unsigned __match_any_sync(unsigned mask, T v, emu::Site at = emu::Site::here())
{
    static_assert(sizeof(T) <= 8, "match compares up to 8 bytes");
    return emu::warp_match(mask, emu::bits_as<uint64_t>(v), at);
}

template <class T> T __reduce_add_sync(unsigned mask, T v, emu::Site at = emu::Site::here())
{
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, "reductions are for 32-bit integers");
    return static_cast<T>(emu::warp_reduce(emu::REDUCE_ADD, mask, static_cast<uint32_t>(v), at));
}

template <class T> T __reduce_min_sync(unsigned mask, T v, emu::Site at = emu::Site::here())
{
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, "reductions are for 32-bit integers");
    const emu::Reduce kind = std::is_signed_v<T> ? emu::REDUCE_MIN_SIGNED : emu::REDUCE_MIN;
    return static_cast<T>(emu::warp_reduce(kind, mask, static_cast<uint32_t>(v), at));
}

template <class T> T __reduce_max_sync(unsigned mask, T v, emu::Site at = emu::Site::here())
{
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, "reductions are for 32-bit integers");
    const emu::Reduce kind = std::is_signed_v<T> ? emu::REDUCE_MAX_SIGNED : emu::REDUCE_MAX;
    return static_cast<T>(emu::warp_reduce(kind, mask, static_cast<uint32_t>(v), at));
}

inline unsigned __reduce_and_sync(unsigned mask, unsigned v, emu::Site at = emu::Site::here())
{
    return emu::warp_reduce(emu::REDUCE_AND, mask, v, at);
}

inline unsigned __reduce_or_sync(unsigned mask, unsigned v, emu::Site at = emu::Site::here())
{
    return emu::warp_reduce(emu::REDUCE_OR, mask, v, at);
}

inline unsigned __reduce_xor_sync(unsigned mask, unsigned v, emu::Site at = emu::Site::here())
{
    return emu::warp_reduce(emu::REDUCE_XOR, mask, v, at);
}

/* ---- atomics on integers: relaxed, as on the device ---- */

template <class T> T atomicAdd(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T old) { return static_cast<T>(old + v); });
}
template <class T> T atomicSub(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T old) { return static_cast<T>(old - v); });
}
template <class T> T atomicMin(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T old) { return old < v ? old : v; });
}
template <class T> T atomicMax(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T old) { return old > v ? old : v; });
}
template <class T> T atomicAnd(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T old) { return old & v; });
}
template <class T> T atomicOr(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T old) { return old | v; });
}
template <class T> T atomicXor(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T old) { return old ^ v; });
}
template <class T> T atomicExch(T *p, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [v](T) { return v; });
}
template <class T> T atomicCAS(T *p, std::common_type_t<T> expected, std::common_type_t<T> v)
{
    return emu::atomic_update(p, [expected, v](T old) { return old == expected ? v : old; });
}
inline unsigned atomicInc(unsigned *p, unsigned limit)
{
    return emu::atomic_update(p, [limit](unsigned old) { return old >= limit ? 0 : old + 1; });
}

#include "emu_math.h"

/* ---- the names of cuda/common.cuh ---- */

#define LAUNCH(kernel, grid, block, smem, stream, ...) \
    ::emu::launch<kernel>(::emu::Launch(grid, block, smem, stream, ::emu::Site{ __FILE__, __LINE__ }), ##__VA_ARGS__)

#define SHARED(type, name, dims)       \
    static const char name##_key_ = 0; \
    auto &name = *static_cast<type(*) dims>(::emu::shared_slot(&name##_key_, #name, sizeof(type dims), alignof(type)))

#define DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(::emu::shared_dynamic())

inline void cp_async_16(void *to, const void *from, bool valid = true, emu::Site at = emu::Site::here())
{
    const emu::Copy c = { to, from, valid };
    if (emu::copy_begin(c, at)) emu::land(c);
}

inline void cp_async_commit() { emu::copy_commit(); }

template <int PENDING> void cp_async_wait()
{
    int count;
    const emu::Copy *due = emu::copies_due(PENDING, &count);
    for (int i = 0; i < count; i++) emu::land(due[i]);
    emu::copies_landed(count);
}

namespace emu
{
inline void ldmatrix(uint32_t r[4], const void *row, bool transposed, Site at)
{
    if (reinterpret_cast<uintptr_t>(row) % 16)
        fail("ldmatrix at %s:%d: row %p is not a multiple of 16", at.file, at.line, row);
    shared_offset(row, 16, at);
    const uint64_t *words = static_cast<const uint64_t *>(row); /* read here: each lane reads the row it names */
    const uint64_t mine[2] = { words[0], words[1] };
    warp_ldmatrix(r, mine, transposed, at);
}
} // namespace emu

inline void ldmatrix_x4(uint32_t r[4], const void *row, emu::Site at = emu::Site::here())
{
    emu::ldmatrix(r, row, false, at);
}

inline void ldmatrix_x4_trans(uint32_t r[4], const void *row, emu::Site at = emu::Site::here())
{
    emu::ldmatrix(r, row, true, at);
}

inline void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2], __nv_bfloat16,
                      emu::Site at = emu::Site::here())
{
    emu::warp_mma(d, a, b, emu::BFLOAT16, at);
}

inline void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2], __half, emu::Site at = emu::Site::here())
{
    emu::warp_mma(d, a, b, emu::FLOAT16, at);
}

inline void mma_16832_e4m3(float d[4], const uint32_t a[4], const uint32_t b[2], emu::Site at = emu::Site::here())
{
    emu::warp_mma_e4m3(d, a, b, at);
}

/* Before an access of several elements at once: the host's processor may let a wrong address pass. */
inline void need_aligned(const void *p, int bytes) { emu::aligned(p, static_cast<size_t>(bytes), "vector access"); }

inline uint32_t shared_address(const void *p, emu::Site at = emu::Site::here()) { return emu::shared_offset(p, 1, at); }

/* cuda_runtime.h's forms that C++ code uses */
template <class... P> cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}
template <class... P> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, void (*kernel)(P...))
{
    return cudaFuncGetAttributes(out, reinterpret_cast<const void *>(kernel));
}
template <class T> cudaError_t cudaMalloc(T **p, size_t size) { return cudaMalloc(reinterpret_cast<void **>(p), size); }

#endif
