/*
 * Where the factors of fp8 codes (device/ops.def) lie on a GPU: as cuBLASLt wants them, so that products read what
 * casts wrote. A tensor's factors [rows / block rows, columns / block columns] are
 *
 *   one            that
 *   of 128 columns of a row       the rows' lie side by side: row r, block b at b * rows + r
 *   of 128 x 128                  row by row of blocks, whose rows have room for a multiple of 4
 *
 * The CPU has all of them row by row. Nothing else of megatrain reads factors.
 *
 * Source: the cuBLAS manual, "Scaling factors layouts" of "128-element 1D and 128x128 2D Block Scaling For FP8 Data
 * Types".
 */
#ifndef MEGATRAIN_CUDA_FP8_H
#define MEGATRAIN_CUDA_FP8_H

#include "base/fp8.h"
#include "device/tensor.h"

#ifdef __cplusplus
#define FP8_FN static inline __host__ __device__
#else
#define FP8_FN static inline
#endif

enum { FP8_BLOCK = 128 };

typedef enum { FP8_WHOLE, FP8_ROW_BLOCKS, FP8_SQUARES, FP8_OTHER_BLOCKS } Fp8Kind;

/* (fp8_factor_ld of base/fp8.h) */
FP8_FN int64_t fp8_squares_ld(int64_t blocks)
{
    return (blocks + FP8_SQUARES_UNIT - 1) / FP8_SQUARES_UNIT * FP8_SQUARES_UNIT;
}

/* Of codes [rows, columns]. */
FP8_FN int64_t fp8_factor_place(Fp8Kind kind, int64_t rows, int64_t columns, int64_t row_block, int64_t column_block)
{
    if (kind == FP8_WHOLE) return 0;
    if (kind == FP8_ROW_BLOCKS) return column_block * rows + row_block;
    return row_block * fp8_squares_ld((columns + FP8_BLOCK - 1) / FP8_BLOCK) + column_block;
}

/* What the factors of these codes belong to, by their number. */
static inline Fp8Kind fp8_kind(Tensor codes)
{
    const Tensor f = *codes.scale;
    const int64_t rows = codes.dim[0], row_blocks = (rows + FP8_BLOCK - 1) / FP8_BLOCK;
    if (f.ndim == 1) return FP8_WHOLE;
    if (f.dim[1] != (codes.dim[1] + FP8_BLOCK - 1) / FP8_BLOCK) return FP8_OTHER_BLOCKS;
    return f.dim[0] == rows ? FP8_ROW_BLOCKS : f.dim[0] == row_blocks ? FP8_SQUARES : FP8_OTHER_BLOCKS;
}

#endif
