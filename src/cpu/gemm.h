/*
 * fp32 matrix products, defined element by element, so that no cut of M, N or K, no thread count, tile size
 * or instruction set can change a bit. The definition is this loop; everything in gemm.c is speed:
 *
 *   CHAIN  c = beta ? C[i][j] : 0; for k ascending: c = fmaf(A(i,k), B(k,j), c); C[i][j] = c
 *   TREE   one such chain from 0 for each leaf of `leaf` k's (the last may be shorter); the leaf sums are
 *          added pairwise, then pairs of pairs, ... (a binary counter; what is left over is added from the
 *          right), giving C[i][j]
 *   I64    the same leaf chains; g = beta ? G[i][j] : 0; g += llrint(leaf sum * 2^shift) for each; G[i][j] = g
 *
 * CHAIN and TREE then add bias[j], if any, once. With beta a CHAIN goes on where the last call stopped, so
 * cutting K over calls changes nothing; an aligned run of 2^n leaves is a subtree of the TREE; I64 does not
 * depend on the order of anything. Leaves of I64 may have any lengths (starts).
 */
#ifndef MEGATRAIN_CPU_GEMM_H
#define MEGATRAIN_CPU_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/int64.h"
#include "device/device.h"

typedef enum { GEMM_CHAIN, GEMM_TREE, GEMM_I64 } GemmMode;

/* A row-major matrix, rows `ld` apart; `transposed`: the product reads it with rows and columns swapped. */
typedef struct {
    const float *data;
    int64_t ld;
    bool transposed;
} GemmOperand;

typedef struct {
    GemmMode mode;
    int64_t M, N, K; /* C[M x N] = A[M x K] B[K x N] */
    int64_t leaf;    /* TREE and I64: how many k's a leaf has, > 0 */
    GemmOperand a, b;
    float *c;                 /* C of CHAIN and TREE */
    int64_t *fixed;           /* G of I64 */
    int64_t ldc;              /* elements from one row of c or fixed to the next */
    bool beta;                /* CHAIN and I64: what C or G holds is added to */
    const float *bias;        /* CHAIN and TREE: [N], or NULL */
    int shift, headroom_bits; /* I64: its fixed point */
    /* I64; NULL: `leaf` says. Leaf i has the k's from starts[i] - starts[0] to starts[i + 1] - starts[0]; there are as
     * many leaves as K needs, and some may be empty. */
    const int64_t *starts;
} Gemm;

/*
 * A small product, for tiles that lie in the L1 or L2 cache: C[m x n] = (beta ? C : 0) + A[m x k] B[k x n]
 * as one CHAIN. A is read as scalars with any strides; rows of B and C are contiguous. Fast when
 * n % 16 == 0.
 */
typedef struct {
    int64_t m, n, k;
    const float *a;
    int64_t a_row, a_k; /* element (i, k) is a[i * a_row + k * a_k] */
    const float *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    bool beta;
} TileGemm;

/*
 * Each instruction set has its own copy of these, all with the same bits; inside src/cpu call CPU(name).
 *
 * gemm       uses dev->threads threads and dev->workspace, allocates nothing. M, N, K may be 0. Returns true
 *            if an I64 leaf was NaN or |leaf * 2^shift| >= 2^(62 - headroom_bits); such a leaf adds 0.
 * gemm_bytes the workspace that it needs with one thread.
 * tile_gemm  one thread, no workspace.
 * transpose  dst[j * ldd + i] = src[i * lds + j] for i < rows, j < cols; one thread.
 */
#define GEMM_DECLARE(isa)                                                                            \
    bool cpu_##isa##_gemm(const Device *dev, const Gemm *g);                                         \
    int64_t cpu_##isa##_gemm_bytes(const Gemm *g);                                                   \
    void cpu_##isa##_tile_gemm(const TileGemm *g);                                                   \
    void cpu_##isa##_transpose(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, \
                               int64_t cols);
GEMM_DECLARE(avx512)
GEMM_DECLARE(avx2)
GEMM_DECLARE(c)

#endif
