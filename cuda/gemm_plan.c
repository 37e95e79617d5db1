/* Plans of products: descriptors, layouts, the algorithms that the library offers for them. See gemm.h. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "device/ops.h"
#include "gemm_plan.h"

enum {
    WORKSPACE_BYTES = DEVICE_WORKSPACE_BYTES, /* part of what the heuristic chooses by */
    PLANS_MOST = 384 /* then the table is emptied: shapes are then not repeating anyway */
};

/* Split sums that are added in a fixed order and in fp32. (Of sums in place no order is promised.) */
static uint32_t reductions_of(const GemmKey *k)
{
    const uint32_t any = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    return k->out == F32 ? any | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE : any;
}

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

/* ---- plans ---- */

static bool key_equal(const GemmKey *a, const GemmKey *b) { return memcmp(a, b, sizeof *a) == 0; }

/* The key's plan, or the free slot where it would be. */
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

/* Describes fp8. The library takes one factor a matrix unless it is told otherwise. */
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
static Err ask_library(CudaGemm *g, Plan *p, int most, uint32_t reductions, bool trusting, Candidates *out)
{
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t result[CANDIDATES_MOST];
    int found = 0;
    TRY(preference_set(&pref, &p->key, reductions));
    out->status = cublasLtMatmulAlgoGetHeuristic(g->lt, &p->desc, &p->a, &p->b, &p->d, &p->d, &pref,
                                                 most, result, &found);
    for (int i = 0; !out->status && i < found; i++) {
        const SumOrder order = order_of(&p->key, &result[i].algo);
        const bool unknown = order == ORDER_UNKNOWN && !trusting;
        if (unknown) out->unknown++, say_unknown(g, &p->key, &result[i].algo);
        if (order != ORDER_FREE && !unknown && has_room(&result[i])) out->algo[out->count++] = result[i].algo;
    }
    return ERR_OK;
}

/* If no candidate is left for which the library says how it adds, takes those that do not split the sum: their order is
 * known to be safe. */
Err gemm_candidates(CudaGemm *g, Plan *p, int most, Candidates *out)
{
    char op[128];
    out->count = out->unknown = 0;
    TRY(ask_library(g, p, most, reductions_of(&p->key), false, out));
    if (out->count == 0 && out->unknown) {
        TRY(ask_library(g, p, most, CUBLASLT_REDUCTION_SCHEME_NONE, true, out));
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

/* ---- the table ---- */

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
        TRY(gemm_candidates(g, p, CANDIDATES, &c));
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

Err gemm_plan_of(CudaGemm *g, const Product *x, Plan **out)
{
    if (g->plan_count >= PLANS_MOST) gemm_forget_plans(g);
    *out = plan_slot(g, &x->key);
    return (*out)->used ? ERR_OK : plan_make(g, *out, x);
}
