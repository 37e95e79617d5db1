/*
 * Matrix products of the linear ops (linear_fwd, linear_dx, linear_dw of device/ops.def), by cuBLASLt.
 *
 * A product's plan (descriptor, layouts, algorithm) is made when its shape is first seen and kept in a table;
 * a repeated shape costs a look-up. Everything the algorithm depends on is in the key: op, dtypes, sizes, row
 * lengths, epilogue, alignment of the addresses. (Not beta: the library chooses without it.) Let each shape run once
 * before it is captured into a graph: the library may load code for it.
 *
 * Algorithm: the heuristic's first, so that runs repeat. With autotune, the fastest of its candidates, timed
 * once per shape on the call's own tensors, and if wanted only of those that gave the first one's bits there (tiles of
 * another shape often do), so that timing does not change results (one that overflowed shows nothing: then the shape's
 * next call decides); such choices can be saved as text and loaded by other ranks and later runs. Either way only
 * algorithms whose sums have a fixed order: no split of the summed dim, or one whose fp32 parts are added by a separate
 * pass. An algorithm of which the library does not say which it does is passed over; if that leaves none, those that do
 * not split at all are asked for.
 *
 * GELU and its gradient are part of the product in 16 bits from compute capability 9.0 on (there it is reported to pay,
 * on 8.0 to lose), if the library has an algorithm for the shape; else elementwise.cu does them afterwards. The
 * epilogue takes GELU of the fp32 sums, the separate kernel of what was stored: the last bit may differ.
 *
 * Arithmetic: fp32 accumulation, no TF32. Outputs of fwd and dx are rounded once from fp32, after the bias; an fp32
 * output of 16-bit operands (a router's logits) is not rounded: products of such numbers are exact in fp32, so tensor
 * cores lose what their sums of 16 cut off, by the coarsest model (test/emu/README.md) at most 9/8 I times 2^-24 of the
 * sum of |x w|, where a chain of fp32 additions may lose I times that; in practice some 3 times what the chain loses at
 * 2,048 products, whose errors half cancel. dw is an fp32 buffer that is accumulated into or overwritten.
 */
#ifndef MEGATRAIN_CUDA_GEMM_H
#define MEGATRAIN_CUDA_GEMM_H

#include "device_cuda.h"

/* Enough for cuda_gemm_save whatever was chosen, with its closing zero. */
enum { CUDA_GEMM_TEXT_BYTES = DEVICE_CHOICES_BYTES };

/* For the current GPU. ERR_CONFIG: no library; ERR_MEMORY; ERR_DEVICE with the library's own text. */
Err cuda_gemm_open(CudaGemm **out);
void cuda_gemm_close(CudaGemm *g); /* NULL is fine */

/*
 * How shapes without a choice are chosen from now on. Timing takes some milliseconds per shape and waits for
 * the GPU; it happens at the shape's first call that is not being captured into a graph and does not
 * accumulate (calls before that take the heuristic's first).
 */
void cuda_gemm_autotune(CudaGemm *g, DeviceTuning how);

/*
 * So many multiprocessors are left to a communicator's kernels, up to half of them, by products that are issued beside
 * such (Device.beside); 0: none. The library's choice for these counts waves of the others only
 * (CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET). It is timed together with the one for all multiprocessors, on the same
 * tensors, and taken only with the bits of that one, unless any bits will do: so what runs beside a product changes its
 * time alone. Without timing, or where the data tell nothing, products take all. Choices made or loaded before are
 * forgotten.
 */
void cuda_gemm_leave_free(CudaGemm *g, int multiprocessors);

/* Whether GELU may be part of a product; from compute capability 9.0 on it is. For comparisons. */
void cuda_gemm_fuse_gelu(CudaGemm *g, bool on);

/*
 * Writes the timed choices as text: a line that names library and GPU, then one line per shape. Returns the
 * length; `text` has room for CUDA_GEMM_TEXT_BYTES.
 */
int64_t cuda_gemm_save(const CudaGemm *g, char *text);

/*
 * Replaces all choices by those of such a text; shapes that it does not name are chosen anew. For bit-equal
 * ranks, load rank 0's text on every rank. ERR_CONFIG when the text is damaged or was written with another
 * library or on another kind of GPU; the choices are then as before.
 */
Err cuda_gemm_load(CudaGemm *g, const char *text);

/* Like cuda_gemm_load, but choices that are held stay: only those for other shapes are added. */
Err cuda_gemm_add(CudaGemm *g, const char *text);

/*
 * Calls, those with GELU inside, plans made, shapes timed since cuda_gemm_open; algorithms passed over because the
 * library does not say how they add, and products that take unsplit sums alone for that reason; choices held. For
 * tests and reports.
 */
typedef struct {
    int64_t calls, fused, plans, timed, unknown, unsplit;
    int choices;
} CudaGemmCounts;
CudaGemmCounts cuda_gemm_counts(const CudaGemm *g);

#endif
