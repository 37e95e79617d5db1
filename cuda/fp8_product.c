/*
 * Products of 8-bit codes, fp8_product and fp8_product_add of device/ops.def, as cuBLASLt products (gemm.c).
 *
 *   fp8_product      y^T  [O x N] = w   x^T     A = w transposed   B = x    m O  n N  k I   bias along m
 *   fp8_product_add  dw^T [I x O] = x^T dy      A = x transposed   B = dy   m I  n O  k N   D fp32, C = D
 *
 * Both operands lie with k contiguous, the one form that the library has for fp8 (8.9, 9.0). Factors: one for each
 * matrix from 8.9 on; of 128 elements along k, of one of them 128 x 128, on 9.0 alone, from cuBLAS 12.9 on; of 32 along
 * k, as exponents, on 10.0 and 10.3, from 12.8 on. The library multiplies by them, and rounds once: y from fp32, after
 * the bias.
 *
 * `fast`: what tensor cores add up stays in their registers, with some 14 bits, to the end; else the library adds it to
 * sums in fp32 on the way, as it always does with factors of blocks.
 *
 * Source: cublasLt.h of CUDA 13 and the cuBLAS manual, "Narrow Precision Data Types Usage" and cublasLtMatmul.
 */
#include "device/fp8_gpus.h"
#include "device/ops.h"
#include "fp8.h"
#include "gemm_plan.h"

Err cuda_fp8_product(Stream *s, const fp8_product_args *a);
Err cuda_fp8_product_add(Stream *s, const fp8_product_add_args *a);
Err cuda_gelu_fwd(Stream *s, const gelu_fwd_args *a); /* elementwise.cu */

/* kind: of cuBLASLt's products. */
Err cuda_fp8_gpu(const Stream *s, OpId op, Fp8Kind kind);

Err cuda_fp8_gpu(const Stream *s, OpId op, Fp8Kind kind)
{
    const CudaGemm *g = ((CudaDevice *)s->dev->cuda)->gemm;
    const char *name = op_info(op)->name;
    const Fp8Factors factors = kind == FP8_WHOLE   ? FP8_FACTOR_OF_TENSOR
                               : kind == FP8_TILES ? FP8_FACTORS_OF_32
                                                   : FP8_FACTORS_OF_128;
    TRY(err_prefix(fp8_gpu_multiplies(factors, g->capability, g->gpu), "%s", name));
    if (kind == FP8_WHOLE) return ERR_OK;
    const size_t needs = kind == FP8_TILES ? 120800 : 120900;
    if (CUBLAS_VERSION >= needs && cublasLtGetVersion() >= needs) return ERR_OK;
    return err_set(ERR_CONFIG, "%s: cuBLASLt has products of %s from CUDA 12.%zu on", name,
                   kind == FP8_TILES ? "mxfp8" : "fp8 in blocks", needs / 100 % 100),
           err_hint("set run.fp8=tensorwise");
}

/* Sizes of the codes that are A and B, [m, k] and [n, k], and where the library does not have their kinds. */
static Err check_codes(OpId op, Tensor a, Tensor b)
{
    const Fp8Kind ka = fp8_kind(a), kb = fp8_kind(b);
    const char *name = op_info(op)->name;
    if (a.dtype == E2M1 || b.dtype == E2M1) return err_set(ERR_SHAPE, "%s on cuda: %s", name, E2M1_NOT_ON_GPUS);
    if (a.rows || b.rows) return err_set(ERR_SHAPE, "%s on cuda takes no row counts in device memory", name);
    if (a.dim[0] % 16 || b.dim[0] % 16 || a.dim[1] % 16 || a.ld % 16 || b.ld % 16)
        return err_set(ERR_SHAPE, "%s on cuda: sizes are no multiples of 16", name);
    if (ka == FP8_OTHER_BLOCKS || kb == FP8_OTHER_BLOCKS || (ka == FP8_WHOLE) != (kb == FP8_WHOLE) ||
        (ka == FP8_TILES) != (kb == FP8_TILES) || (ka == FP8_SQUARES && kb == FP8_SQUARES))
        return err_set(ERR_SHAPE, "%s on cuda: factors of %s", name, "blocks that the library has no product for");
    if (ka == FP8_TILES && a.dim[1] % FP8_E8M0_BLOCK)
        return err_set(ERR_SHAPE, "%s on cuda: with mxfp8 the sum is over no multiple of 32", name);
    if (a.dtype == E5M2) return err_set(ERR_SHAPE, "%s on cuda: w, or x, is e5m2", name);
    return ERR_OK;
}

static Err describe(Stream *s, OpId op, Tensor a, Tensor b, Tensor d, bool fast, Product *out)
{
    const Fp8Kind ka = fp8_kind(a), kb = fp8_kind(b);
    const int64_t how = ka == FP8_TILES ? FP8_ROWS_E8M0 : ka != FP8_WHOLE ? FP8_ROWS : fast ? FP8_FAST : 0;
    TRY(check_codes(op, a, b));
    TRY(cuda_fp8_gpu(s, op, ka));
    *out = gemm_product(op, a, true, b, false, d);
    out->a_scale = a.scale->data;
    out->b_scale = b.scale->data;
    out->key.fp8 = FP8_PRODUCT | (b.dtype == E5M2 ? FP8_E5M2_B : 0) | how |
                   (ka == FP8_SQUARES ? FP8_SQUARES_A : 0) | (kb == FP8_SQUARES ? FP8_SQUARES_B : 0);
    return ERR_OK;
}

/* (the library's bias on fp32 results would be bf16) */
static Err check_results(const fp8_product_args *a)
{
    const bool extra = a->bias.data || a->gelu.data;
    if (!extra || (a->y.dtype != F32 && (!a->bias.data || a->bias.dtype == a->y.dtype))) return ERR_OK;
    return err_set(ERR_SHAPE, "fp8_product on cuda: y is %s, and has a bias or gelu", dtype_name(a->y.dtype));
}

Err cuda_fp8_product(Stream *s, const fp8_product_args *a)
{
    bool done = false;
    Product x;
    TRY(check_results(a));
    TRY(describe(s, OP_fp8_product, a->w, a->x, a->y, a->fast, &x));
    gemm_add_bias(&x, a->bias);
    if (!a->gelu.data) return gemm_run(s, &x);
    if (!(x.key.fp8 & (FP8_ROWS | FP8_ROWS_E8M0)))
        TRY(gemm_run_with_gelu(s, x, a->gelu, a->y,
                               x.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX, &done));
    if (done) return ERR_OK;
    TRY(gemm_run(s, &x));
    return cuda_gelu_fwd(s, &(gelu_fwd_args){ .y = a->gelu, .x = a->y });
}

Err cuda_fp8_product_add(Stream *s, const fp8_product_add_args *a)
{
    Product x;
    if (a->dw.dtype != F32) return err_set(ERR_SHAPE, "fp8_product_add on cuda has no fixed point: dw is f32");
    TRY(describe(s, OP_fp8_product_add, a->x, a->dy, a->dw, false, &x));
    x.beta = a->fresh ? 0 : 1;
    return gemm_run(s, &x);
}
