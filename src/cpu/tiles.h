/*
 * Intel's AMX tiles, eight registers of up to 16 rows of 64 bytes: the compiler's intrinsics, or those of the header
 * that TILE_EMULATION names, the same in C, by which tests execute the kernels on a processor without them. Used by
 * gemm_depths.h alone.
 *
 *   _tile_loadconfig(shapes)   the shapes of all eight; what they hold is 0 then
 *   _tile_release()            no shapes: nothing to save any more when threads change
 *   _tile_loadd(n, p, stride)  rows of register n from memory, so many bytes apart; _tile_stored: to memory
 *   _tile_dpbf16ps(c, a, b)    TDPBF16PS: c += a b, as gemm.h defines one depth of DOT_AMX
 */
#ifndef MEGATRAIN_CPU_TILES_H
#define MEGATRAIN_CPU_TILES_H

#include <stdint.h>

/* Memory that LDTILECFG reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[8]; /* bytes of a row of each register */
    uint16_t no_bytes[8];
    uint8_t rows[8], no_rows[8];
} TileShapes;

#if defined(TILE_EMULATION)
#include TILE_EMULATION
#else
#include <immintrin.h>
#endif

#endif
