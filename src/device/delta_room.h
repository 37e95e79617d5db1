/* Bytes of the kernels' workspace (Device.workspace) that a key head of the gated delta rule takes in backward, which
 * takes more than forward. Heads that find no room can be refused before a run. */
#ifndef MEGATRAIN_DEVICE_DELTA_ROOM_H
#define MEGATRAIN_DEVICE_DELTA_ROOM_H

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
    const int64_t window = DELTA_WINDOW * (SQUARES * DELTA_WINDOW + ROWS * (D + E) + 4);
    return 4 * (window + (group + 1) * D * E);
}

#endif
