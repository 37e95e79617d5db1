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
 *
 * Operands of bf16 are read as they are and summed in fp32, in chains of the device's kind (Device.dot): DOT_FMA is
 * the chain above. DOT_VDPBF16 is that of the instruction VDPBF16PS; a leaf (of a CHAIN: what a call has) is pairs of
 * k's from its first on, behind an odd last one a 0 of both operands. With flush(x) = 0 of x's sign for a denormal, an
 * A and B flushed:
 *
 *   c = flush(c); for k of each pair, ascending:
 *     c = step(A(i,k+1), B(k+1,j), c); c = step(A(i,k), B(k,j), c)
 *   step(a, b, c) = fmaf(a, b, c), or 0 of its sign where a b + c is below 2^-126 once it is rounded to 24 bits
 *
 * DOT_AMX is that of the instruction TDPBF16PS on tiles of 32 k's. A leaf is depths of 32 k's from its first on, the
 * last one filled up with 0 of both operands; with the same step and flush:
 *
 *   for each depth: even = odd = 0; for k of each pair of it, ascending:
 *     even = step(A(i,k), B(k,j), even); odd = step(A(i,k+1), B(k+1,j), odd)
 *     c = flush(flush(c) + flush(even + odd))
 *
 * Trees, integers and bias are the same for all kinds. A CHAIN of pairs goes on over calls that begin at even k's, one
 * of depths over calls that begin at multiples of 32.
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
    const uint16_t *bf16; /* instead of data, of both operands or of none */
} GemmOperand;

/* bf16 results that CHAIN and TREE write instead of c, each number rounded once. */
typedef struct {
    uint16_t *c; /* [M x N], rows ldc apart */
    const uint16_t *bias;
    uint16_t *gelu; /* besides c: gelu_fwd of c as it is stored, which a recomputation reads; NULL: none */
    int64_t gelu_ld;
    const uint16_t *gelu_x; /* c is gelu_bwd of the product at this x; NULL: the product */
    int64_t gelu_x_ld;
} GemmNarrow;

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
    GemmNarrow narrow; /* results for bf16 operands; without c here: c or fixed as above */
} Gemm;

/* Forms that kernels read, four bytes along k at a time: numbers, or pairs of bf16 numbers (gemm_form.h). */
typedef enum { FORM_F32, FORM_WIDE, FORM_SWAPPED, FORM_PAIRS, FORM_DEPTHS, FORM_TILES } GemmForm;

/*
 * A small product, for tiles that lie in the L1 or L2 cache: C[m x n] = (beta ? C : 0) + A[m x k] B[k x n]
 * as one CHAIN. A is read as scalars with any strides; rows of B and C are contiguous. Fast when
 * n % 16 == 0. A and B are units of the form, of which k are counted.
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
    GemmForm form;
} TileGemm;

/*
 * Each instruction set has its own copy of these, all with the same bits; inside src/cpu call CPU(name).
 *
 * gemm       uses dev->threads threads and dev->workspace, allocates nothing. M, N, K may be 0. Returns true
 *            if an I64 leaf was NaN or |leaf * 2^shift| >= 2^(62 - headroom_bits); such a leaf adds 0.
 * gemm_bytes the workspace that it needs with one thread.
 * gemm_speedup  by so much more than one thread do dev->threads threads at once: tasks are few, and not of one size.
 * gemm_form  the form of operands of bf16 that a small product (tile_gemm) has on this device. By DOT_AMX such products
 *            are those of DOT_VDPBF16: their tiles are too small to fill those of the instruction.
 * by_tiles   the three of bf16 by TDPBF16PS, where this build has it (gemm_tiles.c): of dev->dot_tiles alone.
 * tiles_agree  whether the instruction, which this processor must have, gives the bits of the definition.
 * tile_gemm  one thread, no workspace.
 * transpose  dst[j * ldd + i] = src[i * lds + j] for i < rows, j < cols; one thread.
 */
#define GEMM_DECLARE(isa)                                                       \
    bool cpu_##isa##_gemm(const Device *dev, const Gemm *g);                    \
    int64_t cpu_##isa##_gemm_bytes(const Device *dev, const Gemm *g);           \
    double cpu_##isa##_gemm_speedup(const Device *dev, const Gemm *g);          \
    bool cpu_##isa##_gemm_by_tiles(const Device *dev, const Gemm *g);           \
    int64_t cpu_##isa##_gemm_bytes_by_tiles(const Device *dev, const Gemm *g);  \
    double cpu_##isa##_gemm_speedup_by_tiles(const Device *dev, const Gemm *g); \
    bool cpu_##isa##_tiles_agree(void);                                         \
    GemmForm cpu_##isa##_gemm_form(const Device *dev);                          \
    void cpu_##isa##_tile_gemm(const TileGemm *g);                              \
    void cpu_##isa##_transpose(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols);
GEMM_DECLARE(avx512)
GEMM_DECLARE(avx2)
GEMM_DECLARE(c)

#endif
