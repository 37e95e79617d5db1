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

enum {
    WORKSPACE_BYTES = DEVICE_WORKSPACE_BYTES, /* part of what the heuristic chooses by */
    ALIGN_MOST = 128,           /* bytes; no algorithm asks for more */
    PLANS_MOST = 384            /* then the table is emptied: shapes are then not repeating anyway */
};

/* Split sums that are added in a fixed order and in fp32. (Of sums in place no order is promised.) */
static uint32_t reductions_of(const GemmKey *k)
{
    const uint32_t any = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    return k->out == F32 ? any | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE : any;
}

static CudaGemm *gemm_of(Stream *s) { return ((CudaDevice *)s->dev->cuda)->gemm; }

/* ---- messages ---- */

/* "linear_fwd (N 64, O 3072, I 768, bf16)" */
static void describe(const GemmKey *key, char *out, size_t size)
{
    long long m = key->m, n = key->n, k = key->k, N, O, I;
    if (key->op == OP_linear_fwd || key->op == OP_fp8_product) N = n, O = m, I = k;
    else if (key->op == OP_linear_dx) N = n, O = k, I = m;
    else N = k, O = n, I = m;
    snprintf(out, size, "%s (N %lld, O %lld, I %lld, %s%s)", op_info((OpId)key->op)->name, N, O, I,
             dtype_name((DType)key->type), gemm_has_gelu(key) ? ", with gelu" : "");
}

Err gemm_error(const GemmKey *key, const char *what, cublasStatus_t status)
{
    char op[128];
    describe(key, op, sizeof op);
    return err_set(ERR_DEVICE, "%s: %s: %s (%s)", op, what, cublasLtGetStatusString(status),
                   cublasLtGetStatusName(status));
}

/* ---- opening ---- */

/* What choices hold for. */
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

/* ---- plans ---- */

static bool key_equal(const GemmKey *a, const GemmKey *b) { return memcmp(a, b, sizeof *a) == 0; }

/* Where the key's plan is, or the free slot where it would be. */
static Plan *plan_slot(CudaGemm *g, const GemmKey *key)
{
    const int64_t *number = (const int64_t *)key;
    uint64_t h = 0;
    for (size_t i = 0; i < KEY_NUMBERS; i++)
        h = (h ^ (uint64_t)number[i]) * 0x9E3779B97F4A7C15u, h ^= h >> 32;
    for (size_t i = h;; i++) {
        Plan *p = &g->plans[i % PLAN_SLOTS];
        if (!p->used || key_equal(&p->key, key)) return p;
    }
}

static cudaDataType_t cuda_type(int64_t type)
{
    static const cudaDataType_t types[DTYPE_COUNT] = { [F32] = CUDA_R_32F,
                                                       [BF16] = CUDA_R_16BF,
                                                       [F16] = CUDA_R_16F,
                                                       [E4M3] = CUDA_R_8F_E4M3,
                                                       [E5M2] = CUDA_R_8F_E5M2 };
    return types[type];
}

/* A matrix with `rows` contiguous elements a column; transposed: as it lies, not as the product reads it. */
static cublasStatus_t layout_set(cublasLtMatrixLayoutOpaque_t *l, int64_t type, bool transposed, int64_t rows,
                                 int64_t cols, int64_t ld)
{
    if (transposed) return layout_set(l, type, false, cols, rows, ld);
    return cublasLtMatrixLayoutInit(l, cuda_type(type), (uint64_t)rows, (uint64_t)cols, ld);
}

static cublasStatus_t desc_set(Plan *p, cublasLtMatmulDescAttributes_t what, const void *value, size_t size)
{
    return cublasLtMatmulDescSetAttribute(&p->desc, what, value, size);
}

/* Pointers stand in the descriptor; they differ from call to call. */
static cublasStatus_t set_pointers(Plan *p, const Product *x)
{
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (x->bias) status = desc_set(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &x->bias, sizeof x->bias);
    if (!status && x->key.fp8)
        status = desc_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &x->a_scale, sizeof x->a_scale);
    if (!status && x->key.fp8)
        status = desc_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x->b_scale, sizeof x->b_scale);
    if (status || !x->aux) return status;
    return desc_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &x->aux, sizeof x->aux);
}

/* Both have factors of e8m0. */
static cublasStatus_t set_tiles(Plan *p)
{
#if CUBLAS_VERSION >= 120800
    const int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    const cublasStatus_t status = desc_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode);
    return status ? status : desc_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode);
#else
    (void)p;
    return CUBLAS_STATUS_NOT_SUPPORTED;
#endif
}

/* What is special to fp8. One factor a matrix is how the library takes them unless it is told otherwise. */
static cublasStatus_t describe_fp8(Plan *p)
{
    const int64_t fp8 = p->key.fp8;
    const int8_t fast = (fp8 & FP8_FAST) != 0;
    cublasStatus_t status = desc_set(p, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    if (status || !(fp8 & (FP8_ROWS | FP8_ROWS_E8M0))) return status;
    if (fp8 & FP8_ROWS_E8M0) return set_tiles(p);
#if CUBLAS_VERSION >= 120900
    const int32_t rows = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, squares = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    status = desc_set(p, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, fp8 & FP8_SQUARES_A ? &squares : &rows, sizeof rows);
    if (status) return status;
    return desc_set(p, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, fp8 & FP8_SQUARES_B ? &squares : &rows, sizeof rows);
#else
    return CUBLAS_STATUS_NOT_SUPPORTED;
#endif
}

Err gemm_describe(Plan *p, const Product *x)
{
    static const char what[] = "describing the product";
    const GemmKey *k = &x->key;
    const int32_t target = (int32_t)k->target;
    const int32_t ta = x->ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb = x->tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint32_t epilogue = (uint32_t)k->epilogue;
    LT(k, what, cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT(k, what, desc_set(p, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta));
    LT(k, what, desc_set(p, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb));
    LT(k, what, desc_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (target) LT(k, what, desc_set(p, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &target, sizeof target));
    LT(k, what, set_pointers(p, x));
    if (k->fp8) LT(k, what, describe_fp8(p));
    if (x->aux) LT(k, what, desc_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &k->ldaux, sizeof k->ldaux));
    LT(k, what, layout_set(&p->a, k->type, x->ta, k->m, k->k, k->lda));
    LT(k, what, layout_set(&p->b, k->fp8 & FP8_E5M2_B ? E5M2 : k->type, x->tb, k->k, k->n, k->ldb));
    LT(k, what, layout_set(&p->d, k->out, false, k->m, k->n, k->ldd));
    return ERR_OK;
}

static Err preference_set(cublasLtMatmulPreferenceOpaque_t *pref, const GemmKey *k, uint32_t reductions)
{
    static const char what[] = "describing the wanted algorithm";
    const uint64_t workspace = WORKSPACE_BYTES;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t value;
    } rows[] = { { CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions },
                 { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)k->align_a },
                 { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)k->align_b },
                 { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)k->align_d },
                 { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)k->align_d } };
    LT(k, what, cublasLtMatmulPreferenceInit(pref));
    LT(k, what,
       cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                            sizeof workspace));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        LT(k, what,
           cublasLtMatmulPreferenceSetAttribute(pref, rows[i].attribute, &rows[i].value,
                                                sizeof rows[i].value));
    return ERR_OK;
}

/* Does the algorithm add in a fixed order? The library need not say. */
typedef enum { ORDER_FIXED, ORDER_FREE, ORDER_UNKNOWN } SumOrder;

static SumOrder order_of(const GemmKey *k, const cublasLtMatmulAlgo_t *algo)
{
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_MASK;
    size_t got;
    if (cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &got))
        return ORDER_UNKNOWN;
    return scheme & ~reductions_of(k) ? ORDER_FREE : ORDER_FIXED;
}

static bool has_room(const cublasLtMatmulHeuristicResult_t *r)
{
    return !r->state && r->workspaceSize <= WORKSPACE_BYTES;
}

static void say_unknown(CudaGemm *g, const GemmKey *key, const cublasLtMatmulAlgo_t *algo)
{
    char op[128];
    int32_t id = -1;
    size_t got;
    if (g->counts.unknown++) return; /* the first is enough to know the kind */
    cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &got);
    describe(key, op, sizeof op);
    log_warn("%s: cublasLt does not say in what order its algorithm %d adds: that one is passed over", op, (int)id);
}

/* Those that the library offers under this mask of schemes. `trusting` the mask: without asking each for its own. */
static Err ask_library(CudaGemm *g, Plan *p, uint32_t reductions, bool trusting, Candidates *out)
{
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t result[CANDIDATES];
    int found = 0;
    TRY(preference_set(&pref, &p->key, reductions));
    out->status = cublasLtMatmulAlgoGetHeuristic(g->lt, &p->desc, &p->a, &p->b, &p->d, &p->d, &pref,
                                                 CANDIDATES, result, &found);
    for (int i = 0; !out->status && i < found; i++) {
        const SumOrder order = order_of(&p->key, &result[i].algo);
        const bool unknown = order == ORDER_UNKNOWN && !trusting;
        if (unknown) out->unknown++, say_unknown(g, &p->key, &result[i].algo);
        if (order != ORDER_FREE && !unknown && has_room(&result[i])) out->algo[out->count++] = result[i].algo;
    }
    return ERR_OK;
}

/* Where the library says of none that is left how it adds: those that do not split the sum, which is known safe. */
Err gemm_candidates(CudaGemm *g, Plan *p, Candidates *out)
{
    char op[128];
    out->count = out->unknown = 0;
    TRY(ask_library(g, p, reductions_of(&p->key), false, out));
    if (out->count == 0 && out->unknown) {
        TRY(ask_library(g, p, CUBLASLT_REDUCTION_SCHEME_NONE, true, out));
        describe(&p->key, op, sizeof op);
        if (!g->counts.unsplit++) log_warn("%s: only algorithms that do not split its sums are taken", op);
    }
    if (out->count == 0 && !out->status) out->status = CUBLAS_STATUS_NOT_SUPPORTED;
    return ERR_OK;
}

static Err no_algorithm(const GemmKey *k, cublasStatus_t status)
{
    Err err = gemm_error(k, "cublasLt has no algorithm", status);
    if (k->align_a < 16 || k->align_b < 16 || k->align_d < 16 || (k->align_bias && k->align_bias < 16))
        return err_hint("rows of its matrices are not on 16-byte boundaries: make the sizes multiples of 8");
    return err;
}

cublasStatus_t gemm_multiply(CudaGemm *g, Stream *s, Plan *p, const Product *x,
                               const cublasLtMatmulAlgo_t *algo)
{
    const float alpha = 1;
    cublasStatus_t status = set_pointers(p, x);
    if (status) return status;
    return cublasLtMatmul(g->lt, &p->desc, &alpha, x->a, &p->a, x->b, &p->b, &x->beta, x->d, &p->d, x->d,
                          &p->d, algo, s->dev->workspace, WORKSPACE_BYTES, s->handle);
}

/* ---- a call ---- */

static bool has_choice_beside(const CudaGemm *g, const GemmKey *key)
{
    GemmKey few = *key;
    few.target = g->target;
    return g->target && !key->target && gemm_choice(g, &few);
}

static Err plan_make(CudaGemm *g, Plan *p, const Product *x)
{
    Candidates c;
    const Choice *choice = gemm_choice(g, &x->key);
    *p = (Plan){ .key = x->key };
    TRY(gemm_describe(p, x));
    if (choice) {
        cublasLtMatmulHeuristicResult_t result = { 0 };
        result.algo = p->algo = choice->algo;
        LT(&p->key, "the chosen algorithm",
           cublasLtMatmulAlgoCheck(g->lt, &p->desc, &p->a, &p->b, &p->d, &p->d, &p->algo, &result));
        if (!has_room(&result) || order_of(&p->key, &result.algo) == ORDER_FREE)
            return gemm_error(&p->key, "the chosen algorithm", CUBLAS_STATUS_NOT_SUPPORTED);
    } else {
        TRY(gemm_candidates(g, p, &c));
        if (c.count == 0 && !gemm_has_gelu(&p->key)) return no_algorithm(&p->key, c.status);
        p->missing = c.count == 0;
        p->algo = c.algo[0];
    }
    p->final = choice || p->missing;
    p->beside = has_choice_beside(g, &x->key);
    p->used = true;
    g->plan_count++;
    g->counts.plans++;
    return ERR_OK;
}

static Err plan_of(CudaGemm *g, const Product *x, Plan **out)
{
    if (g->plan_count >= PLANS_MOST) gemm_forget_plans(g);
    *out = plan_slot(g, &x->key);
    return (*out)->used ? ERR_OK : plan_make(g, *out, x);
}

/* The plan of the same product for fewer multiprocessors, which has a choice. */
static Err plan_beside(CudaGemm *g, const Product *x, Plan **out)
{
    Product few = *x;
    few.key.target = g->target;
    return plan_of(g, &few, out);
}

/* *done false: nothing was done, for want of an algorithm with this epilogue (only with GELU). */
static Err run_if_any(Stream *s, const Product *x, bool *done)
{
    CudaGemm *g = gemm_of(s);
    Plan *p;
    *done = true;
    if (x->key.m == 0 || x->key.n == 0) return ERR_OK;
    g->counts.calls++;
    TRY(plan_of(g, x, &p));
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

/* What the library cannot do and no configuration asks for. */
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
