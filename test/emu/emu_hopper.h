/*
 * Hopper's instructions on a CPU: the names of cuda/hopper.cuh, which includes this file and describes them. hopper.cpp
 * has barriers, copies, registers; wgmma.cpp the products.
 *
 * What the chip does beside the threads (a copy, a product, a warp's part of it) is an event: it happens when no thread
 * can go on, the oldest first (EMU_ORDER=forward) or the newest (reverse), or at any time and in pieces (random). Until
 * it is waited for, d is NaN, and what a copy brings is not there.
 */
#ifndef MEGATRAIN_EMU_HOPPER_H
#define MEGATRAIN_EMU_HOPPER_H

#include "emu.h"
#include "tensor_map.h"

namespace emu
{

void mbarrier_init(uint64_t *b, int arrivals, Site at);
void mbarriers_ready();
void mbarrier_expect(uint64_t *b, int bytes, Site at);
void mbarrier_arrive(uint64_t *b, Site at);
void mbarrier_wait(uint64_t *b, int parity, Site at);
void tma_load(void *to, const TensorMap &map, uint64_t *b, const int *at, int rank, Site site);
void async_fence(Site at);
void set_registers(int count, bool more, Site at);
void named_barrier(int id, int threads, bool waits, Site at);

/* One product, as a thread asks for it. `d` has columns / 2 numbers. */
struct Product {
    uint64_t a, b;
    const uint32_t *rows; /* a in registers, or null */
    int columns;
    bool trans_a, trans_b, keep;
    bool codes; /* of e4m3, else numbers of `type` */
    Half type;
    Site at;
};
void wgmma_begin(float *d, int count, Site at);
void wgmma_issue(float *d, const Product &p);
void wgmma_commit(Site at);
void wgmma_wait(int pending, Site at);
void wgmma_end(const float *d, Site at);

constexpr bool wgmma_columns(int n)
{
    return n == 32 || n == 64 || n == 96 || n == 128 || n == 192 || n == 256;
}
template <class T> constexpr Half half_of() { return std::is_same_v<T, __nv_bfloat16> ? BFLOAT16 : FLOAT16; }

} // namespace emu

#define HOPPER 1

typedef uint64_t Barrier;

#define TENSOR_MAP(name) const TensorMap name

inline void barrier_init(Barrier *b, int arrivals, emu::Site at = emu::Site::here())
{
    emu::mbarrier_init(b, arrivals, at);
}
inline void barriers_ready() { emu::mbarriers_ready(); }
inline void barrier_expect(Barrier *b, int bytes, emu::Site at = emu::Site::here())
{
    emu::mbarrier_expect(b, bytes, at);
}
inline void barrier_arrive(Barrier *b, emu::Site at = emu::Site::here()) { emu::mbarrier_arrive(b, at); }
inline void barrier_wait(Barrier *b, int parity, emu::Site at = emu::Site::here())
{
    emu::mbarrier_wait(b, parity, at);
}

inline void tma_load_2d(void *to, const TensorMap &map, Barrier *b, int x, int y,
                        emu::Site at = emu::Site::here())
{
    const int c[] = { x, y };
    emu::tma_load(to, map, b, c, 2, at);
}
inline void tma_load_3d(void *to, const TensorMap &map, Barrier *b, int x, int y, int z,
                        emu::Site at = emu::Site::here())
{
    const int c[] = { x, y, z };
    emu::tma_load(to, map, b, c, 3, at);
}
inline void tma_load_4d(void *to, const TensorMap &map, Barrier *b, int x, int y, int z, int w,
                        emu::Site at = emu::Site::here())
{
    const int c[] = { x, y, z, w };
    emu::tma_load(to, map, b, c, 4, at);
}
inline void tma_load_5d(void *to, const TensorMap &map, Barrier *b, int x, int y, int z, int w, int v,
                        emu::Site at = emu::Site::here())
{
    const int c[] = { x, y, z, w, v };
    emu::tma_load(to, map, b, c, 5, at);
}

inline void proxy_fence(emu::Site at = emu::Site::here()) { emu::async_fence(at); }

template <int N> void registers_give(emu::Site at = emu::Site::here())
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers of a thread");
    emu::set_registers(N, false, at);
}
template <int N> void registers_take(emu::Site at = emu::Site::here())
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers of a thread");
    emu::set_registers(N, true, at);
}

inline void named_sync(int id, int threads, emu::Site at = emu::Site::here())
{
    emu::named_barrier(id, threads, true, at);
}
inline void named_arrive(int id, int threads, emu::Site at = emu::Site::here())
{
    emu::named_barrier(id, threads, false, at);
}

template <int R> void wgmma_begin(float (&d)[R], emu::Site at = emu::Site::here())
{
    emu::wgmma_begin(d, R, at);
}
inline void wgmma_commit(emu::Site at = emu::Site::here()) { emu::wgmma_commit(at); }
template <int PENDING> void wgmma_wait(emu::Site at = emu::Site::here())
{
    static_assert(PENDING >= 0 && PENDING <= 7, "groups under way");
    emu::wgmma_wait(PENDING, at);
}
template <int R> void wgmma_end(float (&d)[R], emu::Site at = emu::Site::here()) { emu::wgmma_end(d, at); }

template <bool TRANS_A, bool TRANS_B, int R, class T>
void wgmma(float (&d)[R], uint64_t a, uint64_t b, bool keep, T, emu::Site at = emu::Site::here())
{
    static_assert(emu::wgmma_columns(2 * R), "columns that hopper.cuh has");
    emu::wgmma_issue(d, { a, b, nullptr, 2 * R, TRANS_A, TRANS_B, keep, false, emu::half_of<T>(), at });
}

template <bool TRANS_B, int R, class T>
void wgmma_rows(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool keep, T,
                emu::Site at = emu::Site::here())
{
    static_assert(emu::wgmma_columns(2 * R), "columns that hopper.cuh has");
    emu::wgmma_issue(d, { 0, b, a, 2 * R, false, TRANS_B, keep, false, emu::half_of<T>(), at });
}

inline void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool keep, emu::Site at = emu::Site::here())
{
    emu::wgmma_issue(d, { a, b, nullptr, 128, false, false, keep, true, emu::BFLOAT16, at });
}

#endif
