/*
 * Tiles in C: what cpu/tiles.h takes instead of the processor's where TILE_EMULATION is defined. State is each thread's
 * own. What the processor would refuse (shapes that are none, or do not fit each other; no shapes at all) is noted in
 * tile_fault, and nothing is done.
 */
#ifndef MEGATRAIN_TEST_TILE_EMULATION_H
#define MEGATRAIN_TEST_TILE_EMULATION_H

#if !defined(TILE_EMULATION)
#define TILE_EMULATION "tile_emulation.h" /* (in the tests themselves) */
#endif
#include "cpu/tiles.h"

/* Processors that do not keep to the definition, each in another way, for the check that has to see it. */
typedef enum {
    TILES_AS_DEFINED,
    TILES_IN_PAIRS,        /* as VDPBF16PS: one sum, of a pair the second number first */
    TILES_ODD_FIRST,       /* not wrong: the two sums added the other way round */
    TILES_ONE_BY_ONE,      /* evens, then odds, onto the sum itself */
    TILES_KEEP_DENORMALS,
    TILES_FLUSH_BEFORE_ROUNDING,
    TILES_ROUND_PRODUCTS,  /* no fma */
    TILES_KINDS,
} TilesKind;
extern TilesKind tiles_kind;
extern const char *tile_fault; /* the first one; NULL: none */
extern long tile_products;     /* TDPBF16PS executed */

void tile_loadconfig(const TileShapes *shapes);
void tile_release(void);
void tile_move(int n, char *memory, int64_t stride, int to_memory);
void tile_multiply(int c, int a, int b);

#define _tile_loadconfig(shapes) tile_loadconfig(shapes)
#define _tile_release() tile_release()
#define _tile_loadd(n, p, stride) tile_move(n, (char *)(p), (int64_t)(stride), 0)
#define _tile_stored(n, p, stride) tile_move(n, (char *)(p), (int64_t)(stride), 1)
#define _tile_dpbf16ps(c, a, b) tile_multiply(c, a, b)

#endif
