/*
 * Finds the fastest of the library's algorithms for a product, and whether it gives the bits that it must; gemm.h says
 * what and why.
 */
#include "device/ops.h"
#include "gemm_plan.h"

enum {
    TIMED_RUNS = 6,
    TELLING_F32 = 1 << 10, /* finite results other than zero that show in which order they were added; */
    TELLING_16 = 1 << 20   /* when they are rounded to 16 bits one in some 2^15 shows it */
};

Err gemm_can_time(Stream *s, const Product *x, bool *yes)
{
    enum cudaStreamCaptureStatus capturing;
    *yes = false;
    if (x->beta != 0) return ERR_OK;
    TRY(cuda_check(cudaStreamIsCapturing(s->handle, &capturing), "asking whether the stream is captured"));
    *yes = capturing == cudaStreamCaptureStatusNone;
    return ERR_OK;
}

Err gemm_result_bits(Stream *s, const Product *x, Fingerprint *out)
{
    const GemmKey *k = &x->key;
    Tensor d = tensor_of(x->d, (DType)k->out, k->n, k->m), aux = tensor_of(x->aux, (DType)k->out, k->n, k->m);
    Fingerprint also = { 0 };
    d.ld = k->ldd;
    aux.ld = k->ldaux;
    TRY(cuda_fingerprint(s, d, out));
    if (k->op != OP_linear_dx && gemm_has_gelu(k)) TRY(cuda_fingerprint(s, aux, &also));
    out->bits += 3 * also.bits; /* an odd factor: the two do not change places unseen */
    return ERR_OK;
}

/* Milliseconds of `TIMED_RUNS` runs. */
static Err time_runs(CudaGemm *g, Stream *s, Plan *p, const Product *x, const cublasLtMatmulAlgo_t *algo, float *ms)
{
    TRY(cuda_check(cudaEventRecord(g->start, s->handle), "timing a product"));
    for (int i = 0; i < TIMED_RUNS; i++) LT(&p->key, "timing", gemm_multiply(g, s, p, x, algo));
    TRY(cuda_check(cudaEventRecord(g->stop, s->handle), "timing a product"));
    TRY(cuda_check(cudaEventSynchronize(g->stop), "timing a product"));
    return cuda_check(cudaEventElapsedTime(ms, g->start, g->stop), "timing a product");
}

/* Whether the bits of results tell two orders of sums apart: enough of them are numbers other than zero. */
static bool tells_order(const GemmKey *k, Fingerprint result)
{
    return k->m * k->n - result.zeros - result.not_finite >= (k->out == F32 ? TELLING_F32 : TELLING_16);
}

/* Whether they do not, but would, had not so many overflowed (as with a loss scale that is still too large). */
static bool overflow_hides_order(const GemmKey *k, Fingerprint result)
{
    if (tells_order(k, result)) return false;
    result.not_finite = 0;
    return tells_order(k, result);
}

/* The bits that a product's algorithms must give. */
typedef struct {
    bool known; /* else those of the first that runs */
    Fingerprint result;
} WantedBits;

/*
 * The fastest of those that run, after a run each that warms up; a later candidate must win by 2%, else noise would
 * choose. Where bits are to stay, of those with the wanted ones; if these tell nothing, the first. *best is -1 if there
 * is none.
 */
static Err fastest(CudaGemm *g, Stream *s, Plan *p, const Product *x, const Candidates *c, WantedBits *want, int *best)
{
    const bool same_bits = g->tuning == TUNE_SAME_BITS;
    Fingerprint bits = { 0 };
    float best_ms = 0, ms;
    *best = -1;
    for (int i = 0; i < c->count; i++) {
        if (gemm_multiply(g, s, p, x, &c->algo[i])) continue;
        if (same_bits) TRY(gemm_result_bits(s, x, &bits));
        if (!want->known) *want = (WantedBits){ true, bits };
        if (bits.bits != want->result.bits) continue;
        if (same_bits && !tells_order(&x->key, bits)) return *best = i, ERR_OK;
        TRY(time_runs(g, s, p, x, &c->algo[i], &ms));
        if (*best < 0 || ms < 0.98f * best_ms) *best = i, best_ms = ms;
    }
    return ERR_OK;
}

static void keep_choice(CudaGemm *g, const GemmKey *key, const cublasLtMatmulAlgo_t *algo)
{
    g->counts.timed++;
    g->choices[g->choice_count++] = (Choice){ *key, *algo };
}

/* The same product for fewer multiprocessors; if no algorithm has the wanted bits for sure, it has none of its own. */
static Err time_beside(CudaGemm *g, Stream *s, const Product *x, WantedBits *want, bool *found)
{
    Product few = *x;
    Plan p = { 0 };
    Candidates c;
    int best;
    few.key.target = g->target;
    p.key = few.key;
    *found = false;
    if (g->tuning == TUNE_SAME_BITS && !tells_order(&x->key, want->result)) return ERR_OK;
    TRY(gemm_describe(&p, &few));
    TRY(gemm_candidates(g, &p, CANDIDATES, &c));
    TRY(fastest(g, s, &p, &few, &c, want, &best));
    if (best >= 0) keep_choice(g, &p.key, &c.algo[best]);
    *found = best >= 0;
    return ERR_OK;
}

Err gemm_time(CudaGemm *g, Stream *s, Plan *p, const Product *x)
{
    Candidates c;
    WantedBits want = { 0 };
    int best = 0;
    TRY(gemm_candidates(g, p, CANDIDATES, &c));
    if (c.count != 1 || g->target) TRY(fastest(g, s, p, x, &c, &want, &best));
    if (best < 0) return gemm_error(&p->key, "no candidate runs", CUBLAS_STATUS_NOT_SUPPORTED);
    p->algo = c.algo[best];
    if (overflow_hides_order(&x->key, want.result)) return ERR_OK;
    p->final = true;
    keep_choice(g, &p->key, &p->algo);
    return g->target ? time_beside(g, s, x, &want, &p->beside) : ERR_OK;
}
