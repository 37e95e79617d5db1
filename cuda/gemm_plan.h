/*
 * Inside gemm.c, gemm_plan.c, gemm_timing.c and gemm_choices.c: what a product's algorithm depends on, the table of
 * plans, the timed choices.
 */
#ifndef MEGATRAIN_CUDA_GEMM_PLAN_H
#define MEGATRAIN_CUDA_GEMM_PLAN_H

#include <cublasLt.h>

#include "device/ops.h"
#include "fingerprint.h"
#include "gemm.h"

enum {
    PLAN_SLOTS = 512, /* a power of 2 */
    CHOICES_MOST = 384,
    CANDIDATES = 8, /* among which timing chooses */
    CANDIDATES_MOST = 64
};

/* Products of fp8: B's dtype beside A's, which matrices have factors of blocks, and how sums go. */
enum {
    FP8_E5M2_B = 1,      /* B is of E5M2; else of E4M3, as A is */
    FP8_FAST = 2,        /* what tensor cores add up stays there to the end: not added to fp32 sums after each 128 */
    FP8_ROWS = 4,        /* a factor for 128 elements of a row of B, and of A unless FP8_SQUARES; else one a matrix */
    FP8_SQUARES_A = 8,   /* a factor for 128 x 128 elements of A */
    FP8_SQUARES_B = 16,  /* or of B */
    FP8_PRODUCT = 32,    /* it is one */
    FP8_ROWS_E8M0 = 64   /* a factor for 32 elements of a row of each, as a byte */
};

/* All that the choice of an algorithm depends on. Only int64_t, so that it compares and prints as an array. */
typedef struct {
    int64_t op, type, out; /* OpId; DType of A and B; DType of D */
    int64_t epilogue, m, n, k, lda, ldb, ldd, ldaux;
    /* bytes; 0 for what the epilogue does not use */
    int64_t align_a, align_b, align_d, align_bias, align_aux;
    int64_t target; /* multiprocessors that the product should take; 0: all */
    int64_t fp8;    /* 0 unless both are of fp8; last, and written only then */
} GemmKey;

enum { KEY_NUMBERS = sizeof(GemmKey) / sizeof(int64_t), KEY_NAMES = 3 }; /* the first three print as names */

typedef struct {
    GemmKey key;
    bool used;
    bool final;   /* the algorithm stays; else it may still be timed */
    bool missing; /* no algorithm: the epilogue must be done apart */
    bool beside;  /* there is a choice for the same product beside collectives */
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} Plan;

/* The choice that timing made. */
typedef struct {
    GemmKey key;
    cublasLtMatmulAlgo_t algo;
} Choice;

struct CudaGemm {
    cublasLtHandle_t lt;
    cudaEvent_t start, stop;
    DeviceTuning tuning;
    bool fuse_gelu;
    char gpu[256];
    int capability; /* 90 is 9.0 */
    int multiprocessors;
    int64_t target;     /* multiprocessors that products beside collectives should take; 0: all */
    char made_for[512]; /* library, GPU and multiprocessors that the choices hold for */
    int plan_count, choice_count;
    CudaGemmCounts counts;
    Plan plans[PLAN_SLOTS]; /* open addressing */
    Choice choices[CHOICES_MOST];
};

/* One call: the key says how, this says where. */
typedef struct {
    GemmKey key;
    bool ta, tb;
    const void *a, *b, *bias;
    const void *a_scale, *b_scale; /* factors of fp8 */
    void *d, *aux; /* aux: what GELU is, or was, taken of */
    float beta;
} Product;

typedef struct {
    cublasLtMatmulAlgo_t algo[CANDIDATES_MOST]; /* best guess first */
    int count, unknown;    /* unknown: how many were passed over because the library does not say how they add */
    cublasStatus_t status; /* why there is none */
} Candidates;

#define LT(key, what, call)                                         \
    do {                                                            \
        cublasStatus_t lt_status = (call);                          \
        if (lt_status) return gemm_error((key), (what), lt_status); \
    } while (0)

/* D = op(a) op(b), of the dtypes and sizes that these have. */
Product gemm_product(OpId op, Tensor a, bool ta, Tensor b, bool tb, Tensor d);
/* Adds a bias of D's dtype. */
void gemm_add_bias(Product *x, Tensor bias);
Err gemm_run(Stream *s, const Product *x);
/* The product with GELU in it, where that is wanted and possible (*done): its result goes to `d`; what GELU is taken of
 * goes to `aux`, or for the gradient comes from there. */
Err gemm_run_with_gelu(Stream *s, Product x, Tensor d, Tensor aux, cublasLtEpilogue_t epilogue, bool *done);

static inline bool gemm_has_gelu(const GemmKey *k) { return k->ldaux > 0; }

/* ERR_DEVICE with the product's name and sizes, and the library's text. */
Err gemm_error(const GemmKey *key, const char *what, cublasStatus_t status);

/* The plan of x's key, made if it is not in the table. */
Err gemm_plan_of(CudaGemm *g, const Product *x, Plan **out);
/* Fills in descriptor and layouts. */
Err gemm_describe(Plan *p, const Product *x);
/* The first `most` of the library's algorithms for p, but for those that add in no fixed order; none: see `status`. */
Err gemm_candidates(CudaGemm *g, Plan *p, int most, Candidates *out);
cublasStatus_t gemm_multiply(CudaGemm *g, Stream *s, Plan *p, const Product *x, const cublasLtMatmulAlgo_t *algo);

/* Fingerprint of all that the product wrote. */
Err gemm_result_bits(Stream *s, const Product *x, Fingerprint *out);

/* Whether it may be run several times now: a product that reads what it writes must run once, and a stream that is
 * being captured runs nothing. */
Err gemm_can_time(Stream *s, const Product *x, bool *yes);
/* Chooses p's algorithm, and that of the same product beside collectives, by timing (gemm.h): for good, or for now if
 * results overflowed and only other data will tell their bits apart. There is room for two choices. */
Err gemm_time(CudaGemm *g, Stream *s, Plan *p, const Product *x);

const Choice *gemm_choice(const CudaGemm *g, const GemmKey *key); /* NULL: none */

/* Each plan is made again when its shape comes. */
static inline void gemm_forget_plans(CudaGemm *g)
{
    for (int i = 0; i < PLAN_SLOTS; i++) g->plans[i].used = false;
    g->plan_count = 0;
}

#endif
