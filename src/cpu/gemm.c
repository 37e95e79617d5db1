/* see gemm.h */
#include "cpu/gemm.h"

#include "cpu/gemm_kernel.h"
#include "cpu/gemm_pack.h"
#include "cpu/isa.h"

void CPU(transpose)(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols)
{
    transpose_any(dst, ldd, src, lds, rows, cols);
}

void CPU(tile_gemm)(const TileGemm *g)
{
    /* Two strips of 32 columns are faster than 48 + 16: a strip of 16 has too few chains in flight. */
    int64_t strip = g->n == 64 && TILE_VECS == 3 ? 32 : TILE_COLS;
    for (int64_t j = 0; j < g->n; j += strip) {
        int64_t cols = g->n - j < strip ? g->n - j : strip;
        Tile t = { .a = g->a, .a_row = g->a_row, .a_k = g->a_k, .b = g->b + j, .b_k = g->ldb, .c = g->c + j,
                   .c_row = g->ldc, .k = g->k, .start = g->beta ? TILE_CONTINUE : TILE_SET };
        tile_run(t, g->m, cols);
    }
}
