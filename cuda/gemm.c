/*
 * The linear ops as cuBLASLt products; what and why: gemm.h.
 *
 * The library thinks in columns: a row-major matrix with rows `ld` apart is, to it, the transposed matrix
 * with columns `ld` apart. So each op is asked for transposed, D [m x n] = op(A) op(B), all column-major:
 *
 *   fwd  y^T  [O x N] = w   x^T     A = w transposed   B = x               m O  n N  k I   bias along m
 *   dx   dx^T [I x N] = w^T dy^T    A = w              B = dy              m I  n N  k O
 *   dw   dw^T [I x O] = x^T dy      A = x              B = dy transposed   m I  n O  k N   D fp32, C = D
 *
 * Bytes and FLOP: 2 N O I FLOP; 2 (N I + O I + N O) bytes in 16 bits (dw: 4 O I, twice when it accumulates).
 * N 65536, O 3072, I 768 is 309 GFLOP, 0.39 ms at 790 TFLOP/s, and 0.5 GB, 0.12 ms at 4.3 TB/s: bound by the
 * tensor cores. Descriptors and layouts live inside the plan (the library's Init functions), so that making
 * one allocates nothing.
 *
 * Source: cublasLt.h of CUDA 13 and the cuBLAS manual, chapter cuBLASLt.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "device/ops.h"
#include "gemm_plan.h"

enum { ALIGN_MOST = 128 }; /* bytes; no algorithm asks for more */

static CudaGemm *gemm_of(Stream *s) { return ((CudaDevice *)s->dev->cuda)->gemm; }

/* ---- opening ---- */

/* Names the machine for which choices hold. */
static void name_machine(CudaGemm *g)
{
    char count[48];
    if (g->target) snprintf(count, sizeof count, "%d or %d", (int)g->target, g->multiprocessors);
    else snprintf(count, sizeof count, "%d", g->multiprocessors);
    snprintf(g->made_for, sizeof g->made_for, "cublasLt %zu, %s, %s multiprocessors", cublasLtGetVersion(), g->gpu,
             count);
}

static Err open_parts(CudaGemm *g)
{
    int index;
    struct cudaDeviceProp prop;
    const char *why;
    if (!device_cuda_blas(&why))
        return err_set(ERR_CONFIG, "cuBLASLt is not to be had: %s", why),
               err_hint("it is part of CUDA: install libcublas, or name its folder in LD_LIBRARY_PATH; or set "
                        "run.device=cpu");
    TRY(cuda_check(cudaGetDevice(&index), "asking for the current GPU"));
    TRY(cuda_check(cudaGetDeviceProperties(&prop, index), "reading the GPU's properties"));
    snprintf(g->gpu, sizeof g->gpu, "%s", prop.name);
    g->multiprocessors = prop.multiProcessorCount;
    g->capability = prop.major * 10 + prop.minor;
    name_machine(g);
    g->fuse_gelu = prop.major >= 9;
    TRY(cuda_check(cudaEventCreate(&g->start), "creating an event"));
    TRY(cuda_check(cudaEventCreate(&g->stop), "creating an event"));
    cublasStatus_t status = cublasLtCreate(&g->lt);
    if (!status) return ERR_OK;
    return err_set(ERR_DEVICE, "opening cublasLt: %s (%s)", cublasLtGetStatusString(status),
                   cublasLtGetStatusName(status));
}

Err cuda_gemm_open(CudaGemm **out)
{
    CudaGemm *g = *out = calloc(1, sizeof *g);
    if (!g) return err_set(ERR_MEMORY, "no host memory for the table of products");
    Err err = open_parts(g);
    if (!err) return ERR_OK;
    cuda_gemm_close(g);
    *out = NULL;
    return err;
}

void cuda_gemm_close(CudaGemm *g)
{
    if (!g) return;
    if (g->lt) cublasLtDestroy(g->lt);
    if (g->start) cudaEventDestroy(g->start);
    if (g->stop) cudaEventDestroy(g->stop);
    free(g);
}

void cuda_gemm_autotune(CudaGemm *g, DeviceTuning how) { g->tuning = how; }
void cuda_gemm_fuse_gelu(CudaGemm *g, bool on) { g->fuse_gelu = on; }

void cuda_gemm_leave_free(CudaGemm *g, int multiprocessors)
{
    const int left = g->multiprocessors - multiprocessors, half = (g->multiprocessors + 1) / 2;
    g->target = multiprocessors <= 0 ? 0 : left > half ? left : half;
    name_machine(g);
    g->choice_count = 0;
    gemm_forget_plans(g);
}

CudaGemmCounts cuda_gemm_counts(const CudaGemm *g)
{
    CudaGemmCounts c = g->counts;
    c.choices = g->choice_count;
    return c;
}

/* ---- a call ---- */

/* The plan of the same product for fewer multiprocessors, which has a choice. */
static Err plan_beside(CudaGemm *g, const Product *x, Plan **out)
{
    Product few = *x;
    few.key.target = g->target;
    return gemm_plan_of(g, &few, out);
}

/* *done false: nothing was done, for want of an algorithm with this epilogue (only with GELU). */
static Err run_if_any(Stream *s, const Product *x, bool *done)
{
    CudaGemm *g = gemm_of(s);
    Plan *p;
    *done = true;
    if (x->key.m == 0 || x->key.n == 0) return ERR_OK;
    g->counts.calls++;
    TRY(gemm_plan_of(g, x, &p));
    if (p->missing) {
        *done = false;
        return ERR_OK;
    }
    if (g->tuning && !p->final && g->choice_count < CHOICES_MOST - 1) {
        bool yes;
        TRY(gemm_can_time(s, x, &yes));
        if (yes) TRY(gemm_time(g, s, p, x));
    }
    if (p->beside && s->dev->beside) TRY(plan_beside(g, x, &p));
    LT(&p->key, "the product", gemm_multiply(g, s, p, x, &p->algo));
    return ERR_OK;
}

Err gemm_run(Stream *s, const Product *x)
{
    bool done;
    return run_if_any(s, x, &done);
}

/* ---- the ops ---- */

/* Largest power of two, at most ALIGN_MOST, that divides the address and the distance of rows. */
static int64_t alignment(const void *data, int64_t ld, int64_t type)
{
    uint64_t bits = (uint64_t)(uintptr_t)data | (uint64_t)(ld * dtype_size((DType)type)) | ALIGN_MOST;
    return (int64_t)(bits & -bits);
}

/* Refuses what the library cannot do; no configuration asks for it. */
static Err check_rows(OpId op, Tensor a, Tensor b)
{
    if (!a.rows && !b.rows) return ERR_OK;
    return err_set(ERR_SHAPE, "%s on cuda takes no row counts in device memory", op_info(op)->name);
}

/* The library adds a bias of D's dtype, and GELU is taken of what is stored. */
static Err check_wide(const linear_fwd_args *a)
{
    const DType y = a->y.dtype;
    if ((!a->bias.data || a->bias.dtype == y) && (!a->gelu.data || a->gelu.dtype == y)) return ERR_OK;
    return err_set(ERR_SHAPE, "linear_fwd on cuda: y is %s, and its bias or gelu is not", dtype_name(y));
}

Product gemm_product(OpId op, Tensor a, bool ta, Tensor b, bool tb, Tensor d)
{
    Product x = { .ta = ta, .tb = tb, .a = a.data, .b = b.data, .d = d.data };
    x.key = (GemmKey){ .op = op,
                       .type = a.dtype,
                       .out = d.dtype,
                       .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
                       .m = d.dim[1],
                       .n = d.dim[0],
                       .k = a.dim[ta ? 1 : 0],
                       .lda = a.ld,
                       .ldb = b.ld,
                       .ldd = d.ld,
                       .align_a = alignment(a.data, a.ld, a.dtype),
                       .align_b = alignment(b.data, b.ld, b.dtype),
                       .align_d = alignment(d.data, d.ld, d.dtype) };
    return x;
}

Err cuda_linear_fwd(Stream *s, const linear_fwd_args *a);
Err cuda_linear_dx(Stream *s, const linear_dx_args *a);
Err cuda_linear_dw(Stream *s, const linear_dw_args *a);
Err cuda_gelu_fwd(Stream *s, const gelu_fwd_args *a); /* elementwise.cu */
Err cuda_gelu_bwd(Stream *s, const gelu_bwd_args *a);

void gemm_add_bias(Product *x, Tensor bias)
{
    if (!bias.data) return;
    x->bias = bias.data;
    x->key.epilogue = CUBLASLT_EPILOGUE_BIAS;
    x->key.align_bias = alignment(x->bias, 0, bias.dtype);
}

Err gemm_run_with_gelu(Stream *s, Product x, Tensor d, Tensor aux, cublasLtEpilogue_t epilogue, bool *done)
{
    *done = false;
    if (!gemm_of(s)->fuse_gelu || d.dtype == F32 || aux.ld % 8 != 0)
        return ERR_OK; /* 8: the library's rule */
    x.d = d.data;
    x.aux = aux.data;
    x.key.epilogue = epilogue;
    x.key.ldd = d.ld;
    x.key.ldaux = aux.ld;
    x.key.align_d = alignment(d.data, d.ld, d.dtype);
    x.key.align_aux = alignment(aux.data, aux.ld, aux.dtype);
    TRY(run_if_any(s, &x, done));
    if (*done) gemm_of(s)->counts.fused++;
    return ERR_OK;
}

Err cuda_linear_fwd(Stream *s, const linear_fwd_args *a)
{
    bool done = false;
    TRY(check_rows(OP_linear_fwd, a->y, a->x));
    TRY(check_wide(a));
    Product x = gemm_product(OP_linear_fwd, a->w, true, a->x, false, a->y);
    gemm_add_bias(&x, a->bias);
    if (!a->gelu.data) return gemm_run(s, &x);
    TRY(gemm_run_with_gelu(s, x, a->gelu, a->y, x.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX,
                  &done));
    if (done) return ERR_OK;
    TRY(gemm_run(s, &x));
    return cuda_gelu_fwd(s, &(gelu_fwd_args){ .y = a->gelu, .x = a->y });
}

Err cuda_linear_dx(Stream *s, const linear_dx_args *a)
{
    bool done = false;
    TRY(check_rows(OP_linear_dx, a->dx, a->dy));
    Product x = gemm_product(OP_linear_dx, a->w, false, a->dy, false, a->dx);
    if (!a->gelu_x.data) return gemm_run(s, &x);
    TRY(gemm_run_with_gelu(s, x, a->dx, a->gelu_x, CUBLASLT_EPILOGUE_DGELU, &done));
    if (done) return ERR_OK;
    TRY(gemm_run(s, &x));
    return cuda_gelu_bwd(s, &(gelu_bwd_args){ .dx = a->dx, .dy = a->dx, .x = a->gelu_x });
}

Err cuda_linear_dw(Stream *s, const linear_dw_args *a)
{
    TRY(check_rows(OP_linear_dw, a->dy, a->x));
    if (a->dw.dtype != F32)
        return err_set(ERR_SHAPE, "linear_dw on cuda has no fixed point: dw is f32");
    Product x = gemm_product(OP_linear_dw, a->x, false, a->dy, true, a->dw);
    x.beta = a->fresh ? 0 : 1;
    return gemm_run(s, &x);
}
