/*
 * Data order: which sample stands at which position. All of it is arithmetic on (seed, position);
 * there is no shuffled index that has to be built, stored or could be damaged, and any position is
 * computed directly.
 *
 * Permutation of epoch e over n samples: a Feistel network over the smallest 2h-bit numbers that
 * reach n, keyed by (seed, e), walked along its cycle until it lands below n (fewer than 4 steps
 * on average).
 *
 *   key     rng_key(seed, "data.order")
 *   x       = left << h | right
 *   round   left, right = right, left ^ (philox(key, right, r, e low, e high).v[0] mod 2^h)
 *           for r = 0 .. ORDER_ROUNDS - 1
 *
 * Blend of several data sets: weights as 4096ths, one block of 4096 draws that every later block repeats. Where a
 * weight would round to nothing the block is longer: the least power of two in which the smallest weight has a draw.
 * Draw k goes to the data set that has begun its share by then and whose share is due first (the first of equals). So
 * after any number of draws no data set is a whole draw away from its exact share.
 * Source: cycle walking: Black & Rogaway 2002; the blend: Tijdeman 1980 (the chairman assignment
 * problem).
 */
#ifndef MEGATRAIN_DATA_ORDER_H
#define MEGATRAIN_DATA_ORDER_H

#include <stdint.h>

#include "base/arena.h"
#include "base/err.h"

enum { ORDER_ROUNDS = 8, BLEND_BLOCK = 4096, BLEND_BLOCK_MOST = 1 << 20, BLEND_SOURCES_MAX = 256 };

/* The sample (0 to n-1) that stands at position i (0 to n-1) of this epoch. n >= 1. */
int64_t order_permute(uint64_t seed, int64_t epoch, int64_t n, int64_t i);

typedef struct {
    int source_count;
    int32_t block;                    /* draws; BLEND_BLOCK, or more where a weight is smaller */
    int32_t units[BLEND_SOURCES_MAX]; /* weights; they add up to `block` */
    uint8_t *source;                  /* [block] the data set of each draw */
    uint8_t *ahead; /* [block] how many more earlier draws in the block have it than its weight says, 0 or 1 */
} Blend;

/* ERR_CONFIG: a weight is not positive and finite, or is nothing beside their sum; there are too many, or none. */
Err blend_check(const double *weights, int source_count);

/*
 * Rounds weights (any positive scale) to parts of the block by largest remainder and lays it out, in `mem`.
 * ERR_CONFIG as in blend_check, and if a weight is less than a BLEND_BLOCK_MOST-th of all.
 */
Err blend_init(Blend *b, const double *weights, int source_count, SetupArena *mem);

/* The data set of draw q >= 0, and how many draws that data set has had before. */
int blend_draw(const Blend *b, int64_t q, int64_t *earlier);

/* How many of the draws 0 .. count - 1 are of that data set. */
int64_t blend_taken(const Blend *b, int64_t count, int source);

#endif
