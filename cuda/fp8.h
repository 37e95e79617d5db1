/*
 * The layout of the factors of fp8 codes (device/ops.def) on a GPU: as cuBLASLt wants them, so that products read what
 * casts wrote. A tensor's factors [rows / block rows, columns / block columns] are
 *
 *   one            that
 *   of 128 columns of a row       the rows' lie side by side: row r, block b at b * rows + r
 *   of 128 x 128                  row by row of blocks, whose rows have room for a multiple of 4
 *   of 32 columns of a row, e8m0  a byte each, the exponent with its bias of 127, in tiles of 128 rows and 4 blocks,
 *                                 one row of tiles behind the other; in a tile row r, block b at
 *                                 r % 32 * 16 + r / 32 * 4 + b. Bytes of rows and blocks that there are none of are 0:
 *                                 NaN's, times the zeros that the library takes behind a row's end, would be NaN.
 *
 * The CPU has all of them in fp32, row by row, and so much room they have here, too (fp8_factor_rows, fp8_factor_ld).
 * Nothing else of megatrain reads factors.
 *
 * Source: the cuBLAS manual, "Scaling factors layouts" of "128-element 1D and 128x128 2D Block Scaling For FP8 Data
 * Types" and of "1D Block Scaling for FP8 and FP4 Data Types"; for the tiles also cuDNN Frontend's "MXFP8 scale factor
 * 128x4 layout" (nvidia.github.io/cudnn-frontend).
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

enum { FP8_BLOCK = 128, FP8_E8M0_BLOCK = 32 };
enum { FP8_TILE_ROWS = 128, FP8_TILE_BLOCKS = 4, FP8_TILE = FP8_TILE_ROWS * FP8_TILE_BLOCKS };

typedef enum { FP8_WHOLE, FP8_ROW_BLOCKS, FP8_SQUARES, FP8_TILES, FP8_OTHER_BLOCKS } Fp8Kind;

/* (fp8_factor_ld of base/fp8.h) */
FP8_FN int64_t fp8_squares_ld(int64_t blocks)
{
    return (blocks + FP8_FACTORS_UNIT - 1) / FP8_FACTORS_UNIT * FP8_FACTORS_UNIT;
}

/* Tiles beside each other. */
FP8_FN int64_t fp8_tiles_across(int64_t columns)
{
    enum { COLUMNS = FP8_TILE_BLOCKS * FP8_E8M0_BLOCK };
    return (columns + COLUMNS - 1) / COLUMNS;
}

/* Bytes of all tiles of codes [rows, columns]. */
FP8_FN int64_t fp8_tiles_bytes(int64_t rows, int64_t columns)
{
    return (rows + FP8_TILE_ROWS - 1) / FP8_TILE_ROWS * fp8_tiles_across(columns) * FP8_TILE;
}

FP8_FN int64_t fp8_tile_place(int64_t columns, int64_t row, int64_t block)
{
    const int64_t tile = row / FP8_TILE_ROWS * fp8_tiles_across(columns) + block / FP8_TILE_BLOCKS;
    return tile * FP8_TILE + row % 32 * 16 + row % FP8_TILE_ROWS / 32 * 4 + block % FP8_TILE_BLOCKS;
}

/* Place of a factor among those of codes [rows, columns]: in bytes with FP8_TILES, else in floats. */
FP8_FN int64_t fp8_factor_place(Fp8Kind kind, int64_t rows, int64_t columns, int64_t row_block, int64_t column_block)
{
    if (kind == FP8_WHOLE) return 0;
    if (kind == FP8_ROW_BLOCKS) return column_block * rows + row_block;
    if (kind == FP8_TILES) return fp8_tile_place(columns, row_block, column_block);
    return row_block * fp8_squares_ld((columns + FP8_BLOCK - 1) / FP8_BLOCK) + column_block;
}

/* Kind of the factors of these codes: by their number and, where a row has one, by how far rows are apart. */
static inline Fp8Kind fp8_kind(Tensor codes)
{
    const Tensor f = *codes.scale;
    const int64_t rows = codes.dim[0], row_blocks = (rows + FP8_BLOCK - 1) / FP8_BLOCK;
    if (f.ndim == 1) return FP8_WHOLE;
    if (f.dim[0] == rows && f.dim[1] == (codes.dim[1] + FP8_E8M0_BLOCK - 1) / FP8_E8M0_BLOCK &&
        f.ld == FP8_TILE_BLOCKS * fp8_tiles_across(codes.dim[1]))
        return FP8_TILES;
    if (f.dim[1] != (codes.dim[1] + FP8_BLOCK - 1) / FP8_BLOCK) return FP8_OTHER_BLOCKS;
    return f.dim[0] == rows ? FP8_ROW_BLOCKS : f.dim[0] == row_blocks ? FP8_SQUARES : FP8_OTHER_BLOCKS;
}

#endif
