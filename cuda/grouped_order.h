/*
 * In which order the tiles of a grouped product are computed (grouped.cu), for the kernel and for the test that counts
 * what device memory serves.
 *
 * Blocks start in the order of their numbers, some 260 at a time, and those that run at once read the same step of the
 * depth: a panel of 128 rows, or columns, is read from memory once for all tiles that need it. So the tiles that run at
 * once should form a square. Numbers go down a band of GROUPED_BAND tiles of rows, then down the same band of the next
 * column: 16 x 16 at once. When the band has passed all columns it has been read once if its panels fit into L2, and
 * the other operand once a band. Down all rows of a column first, as grids number blocks, A was read once a column.
 */
#ifndef MEGATRAIN_CUDA_GROUPED_ORDER_H
#define MEGATRAIN_CUDA_GROUPED_ORDER_H

#include <stdint.h>

#ifdef __CUDACC__
#define GROUPED_ORDER_FUNCTION __host__ __device__ static inline
#else
#define GROUPED_ORDER_FUNCTION static inline
#endif

enum { GROUPED_BAND = 16 };

typedef struct {
    uint32_t row, column; /* numbers of tiles */
} GroupedPlace;

/* Place of block number `block`, which is below rows * columns. */
GROUPED_ORDER_FUNCTION GroupedPlace grouped_place(uint32_t block, uint32_t rows, uint32_t columns)
{
    const uint32_t band = block / (GROUPED_BAND * columns), first = band * GROUPED_BAND, left = rows - first;
    const uint32_t high = left < GROUPED_BAND ? left : GROUPED_BAND, within = block - first * columns;
    const GroupedPlace p = { first + within % high, within / high };
    return p;
}

#endif
