/* Bytes of the kernels' workspace (Device.workspace) that a thread or a block needs in backward, which takes more than
 * forward: for a key head of the gated delta rule, a head of Kimi's, and a window of Mamba-2. Heads that find no room
 * can be refused before a run. */
#ifndef MEGATRAIN_DEVICE_SCAN_ROOM_H
#define MEGATRAIN_DEVICE_SCAN_ROOM_H

#include "device/step.h"

/* D, E: widths of keys and values; group: value heads of a key head. */
static inline int64_t delta_room_cpu(int64_t D, int64_t E, int64_t group)
{
    enum { LANES = 16, SQUARES = 9, ROWS = 7 };
    const int64_t keys = (D + LANES - 1) / LANES * LANES, values = (E + LANES - 1) / LANES * LANES;
    const int64_t window = DELTA_WINDOW * (SQUARES * DELTA_WINDOW + ROWS * (keys + values) + 1);
    return 4 * (window + 2 * keys * values + group * D * values);
}

static inline int64_t delta_room_cuda(int64_t D, int64_t E, int64_t group)
{
    enum { SQUARES = 8, ROWS = 6 };
    const int64_t window = DELTA_WINDOW * (SQUARES * DELTA_WINDOW + ROWS * (D + E) + 5);
    return 4 * (window + (group + 1) * D * E);
}

static inline int64_t kda_room_cpu(int64_t D, int64_t E)
{
    enum { LANES = 16, SQUARES = 4, KEYS = 12, ROWS = 6, BLOCK_ROWS = 2 * 16 };
    const int64_t keys = (D + LANES - 1) / LANES * LANES, values = (E + LANES - 1) / LANES * LANES;
    const int64_t window = DELTA_WINDOW * (SQUARES * DELTA_WINDOW + KEYS * keys + ROWS * values);
    return 4 * (window + BLOCK_ROWS * keys + 3 * keys * values);
}

static inline int64_t kda_room_cuda(int64_t D, int64_t E)
{
    enum { SQUARES = 4, KEYS = 14, ROWS = 6 };
    return 4 * (DELTA_WINDOW * (SQUARES * DELTA_WINDOW + KEYS * D + ROWS * E + 1) + 2 * D * E);
}

/* N, P: widths of state and head. */
static inline int64_t mamba_room_cpu(int64_t N, int64_t P)
{
    enum { LANES = 16, SQUARES = 5, KEYS = 6, ROWS = 5 };
    const int64_t keys = (N + LANES - 1) / LANES * LANES, values = (P + LANES - 1) / LANES * LANES;
    const int64_t window = MAMBA_WINDOW * (SQUARES * MAMBA_WINDOW + KEYS * keys + ROWS * values);
    return 4 * (window + keys * values + 2 * N * values);
}

static inline int64_t mamba_room_cuda(int64_t N, int64_t P)
{
    enum { SQUARES = 5, KEYS = 5, ROWS = 4 };
    return 4 * (MAMBA_WINDOW * (SQUARES * MAMBA_WINDOW + KEYS * N + ROWS * P + 5) + 2 * N * P);
}

/* Widths of keys and values that the kernels of the gated delta rule by tensor cores take, in bf16 and in rows at
 * multiples of 16 bytes. */
static inline bool delta_has_tiles(int64_t D, int64_t E) { return D % 8 == 0 && E % 8 == 0 && D <= 128; }

/* Widths of a state and of a head that the kernels of Mamba-2 by tensor cores take, in bf16 and in rows at multiples of
 * 16 bytes. */
static inline bool mamba_has_tiles(int64_t N, int64_t P) { return N % 8 == 0 && P % 8 == 0 && N <= 256 && P <= 64; }

#endif
