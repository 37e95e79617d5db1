/*
 * Mamba-2's recurrence by tensor cores: what its two passes share.
 */
#ifndef MEGATRAIN_CUDA_MAMBA_TILES_CUH
#define MEGATRAIN_CUDA_MAMBA_TILES_CUH

#include "mamba.cuh"
#include "scan_tiles.cuh"

constexpr int MAMBA_TILE = MAMBA_WINDOW * TILE, MAMBA_WARPS = SCAN_THREADS / WARP; /* elements of a window's rows */
static_assert(MAMBA_WARPS * 16 == MAMBA_WINDOW, "a warp has 16 rows of a window");

typedef WindowGates<MAMBA_WINDOW> MambaGates;

__device__ __forceinline__ void load_gates(MambaGates &a, void *room, const MambaCall<bf16> &c, const Window &w,
                                           int head)
{
    load_gates(a, room, c.g, c.delta, c.rows, w, head);
}

/* Launches the two passes of states, forward or backward. */
Err mamba_tiles_states(Stream *s, const MambaFwd<bf16> &f);
Err mamba_tiles_states(Stream *s, const MambaBwd<bf16> &f);

#endif
