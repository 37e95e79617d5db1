/*
 * Every algorithm that cuBLASLt offers for the products of a model, as `steps MODEL --candidates`: milliseconds, and
 * whether it gives the bits of the library's first, which timing must keep (gemm.h). Products are those that a step
 * has made plans for, on tensors of random numbers. The candidates run in turns, some 20 ms each, and a candidate's
 * time is the median of its turns: so no clock favours one of them.
 */
#ifndef MEGATRAIN_BENCH_CUDA_CANDIDATES_H
#define MEGATRAIN_BENCH_CUDA_CANDIDATES_H

#include "base/rng.h"
#include "gemm_plan.h"
#include "gpu.h"

enum { LISTED_MOST = 128, TURNS_MOST = 16, PATTERN_BYTES = 1 << 17 };
static const double TURN_MS = 20;

typedef struct {
    GemmKey keys[LISTED_MOST];
    int count, turns;
} Listed;

/* Keys of the 16-bit products that plans were made for, before the device that has them is closed. */
static inline void candidates_collect(const CudaGemm *g, Listed *l)
{
    for (int i = 0; i < PLAN_SLOTS && l->count < LISTED_MOST; i++)
        if (g->plans[i].used && !g->plans[i].key.fp8) l->keys[l->count++] = g->plans[i].key;
}

static inline Err candidates_random(Stream *s, void **out, int64_t size)
{
    static uint16_t numbers[PATTERN_BYTES / 2];
    for (int i = 0; i < PATTERN_BYTES / 2; i++) {
        const uint64_t r = rng_mix((uint64_t)i);
        numbers[i] = (uint16_t)((r & 1) << 15 | (0x3c00 + (r >> 1 & 0x37f))); /* of bf16: from 2^-7 to 2 */
    }
    TRY(gpu_check(cudaMalloc(out, (size_t)size), "taking memory for a product"));
    int64_t done = size < PATTERN_BYTES ? size : PATTERN_BYTES;
    TRY(device_write(s, *out, numbers, done));
    for (int64_t n; done < size; done += n) {
        n = size - done < done ? size - done : done;
        TRY(device_copy(s, (char *)*out + done, *out, n));
    }
    return ERR_OK;
}

/* A product of this key on tensors of its own: gemm.c says which operand is transposed in which op. */
static inline Err candidates_product(Stream *s, const GemmKey *k, Product *x, void *memory[5])
{
    const int64_t in = dtype_size((DType)k->type), out = dtype_size((DType)k->out);
    *x = (Product){ .key = *k, .ta = k->op == OP_linear_fwd, .tb = k->op == OP_linear_dw };
    TRY(candidates_random(s, &memory[0], in * k->lda * (x->ta ? k->m : k->k)));
    TRY(candidates_random(s, &memory[1], in * k->ldb * (x->tb ? k->k : k->n)));
    TRY(candidates_random(s, &memory[2], out * k->ldd * k->n));
    if (k->align_bias) TRY(candidates_random(s, &memory[3], 4 * (k->m > k->n ? k->m : k->n)));
    if (k->ldaux) TRY(candidates_random(s, &memory[4], out * k->ldaux * k->n));
    x->a = memory[0], x->b = memory[1], x->d = memory[2], x->bias = memory[3], x->aux = memory[4];
    return ERR_OK;
}

typedef struct {
    bool runs, same_bits;
    double ms[TURNS_MOST], median;
    int runs_a_turn;
} Candidate;

static inline Err candidates_turn(CudaGemm *g, Stream *s, Plan *p, const Product *x, const cublasLtMatmulAlgo_t *algo,
                                  int runs, double *ms)
{
    float all = 0;
    TRY(gpu_check(cudaEventRecord(g->start, gpu_stream(s)), "timing a product"));
    for (int i = 0; i < runs; i++) LT(&p->key, "timing", gemm_multiply(g, s, p, x, algo));
    TRY(gpu_check(cudaEventRecord(g->stop, gpu_stream(s)), "timing a product"));
    TRY(gpu_check(cudaEventSynchronize(g->stop), "timing a product"));
    TRY(gpu_check(cudaEventElapsedTime(&all, g->start, g->stop), "timing a product"));
    *ms = (double)all / runs;
    return ERR_OK;
}

static inline Err candidates_measure(CudaGemm *g, Stream *s, Plan *p, const Product *x, const Candidates *c, int turns,
                                     Candidate *out)
{
    Fingerprint first = { 0 }, bits;
    bool known = false;
    for (int i = 0; i < c->count; i++) {
        double once = 0;
        out[i] = (Candidate){ .runs = !gemm_multiply(g, s, p, x, &c->algo[i]) };
        if (!out[i].runs) continue;
        TRY(gemm_result_bits(s, x, &bits));
        if (!known) first = bits, known = true;
        out[i].same_bits = bits.bits == first.bits;
        TRY(candidates_turn(g, s, p, x, &c->algo[i], 1, &once));
        out[i].runs_a_turn = once * 500 < TURN_MS ? 500 : once < TURN_MS ? (int)(TURN_MS / once) : 1;
    }
    for (int t = 0; t < turns; t++)
        for (int i = 0; i < c->count; i++)
            if (out[i].runs) TRY(candidates_turn(g, s, p, x, &c->algo[i], out[i].runs_a_turn, &out[i].ms[t]));
    for (int i = 0; i < c->count; i++) out[i].median = gpu_median(out[i].ms, turns);
    return ERR_OK;
}

/* Index of the fastest, of those with the first's bits or of all; -1: none runs. */
static inline int candidates_best(const Candidates *c, const Candidate *all, bool same_bits)
{
    int best = -1;
    for (int i = 0; i < c->count; i++)
        if (all[i].runs && (all[i].same_bits || !same_bits) && (best < 0 || all[i].median < all[best].median)) best = i;
    return best;
}

static inline void candidates_report(JsonOut *j, const GemmKey *k, const Candidates *c, const Candidate *all)
{
    const int same = candidates_best(c, all, true), any = candidates_best(c, all, false);
    const char *const op = op_info((OpId)k->op)->name, *gelu = k->ldaux ? " gelu" : "";
    json_open(j, NULL, '{');
    json_put_text(j, "op", op);
    json_put_text(j, "dtype", dtype_name((DType)k->type));
    json_put_text(j, "out", dtype_name((DType)k->out));
    json_put_bool(j, "gelu", k->ldaux > 0);
    json_put_bool(j, "bias", k->align_bias > 0);
    json_put_int(j, "m", k->m);
    json_put_int(j, "n", k->n);
    json_put_int(j, "k", k->k);
    json_open(j, "algorithms", '[');
    for (int i = 0; i < c->count; i++) {
        int32_t id = -1;
        size_t got;
        cublasLtMatmulAlgoConfigGetAttribute(&c->algo[i], CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &got);
        json_open(j, NULL, '{');
        json_put_int(j, "id", id);
        json_put_bool(j, "runs", all[i].runs);
        json_put_bool(j, "same_bits", all[i].same_bits);
        json_put_number(j, "ms", all[i].median);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_close(j, '}');
    const double flop = 2e-9 * (double)k->m * (double)k->n * (double)k->k;
    printf("%-10s %6lld x %6lld x %6lld%-5s %2d algorithms", op, (long long)k->m, (long long)k->n, (long long)k->k,
           gelu, c->count);
    if (any < 0) printf(", none runs\n");
    else
        printf(": first %8.4f ms, fastest of its bits %8.4f, of all %8.4f (%.0f TFLOP/s)%s\n", all[0].median,
               all[same].median, all[any].median, flop / all[any].median,
               all[any].median < 0.9 * all[same].median ? "  <" : "");
    fflush(stdout);
}

static inline Err candidates_of(Device *dev, const GemmKey *key, int turns, JsonOut *j)
{
    static Candidate all[CANDIDATES_MOST];
    static Candidates c;
    CudaGemm *g = ((CudaDevice *)dev->cuda)->gemm;
    void *memory[5] = { 0 };
    Plan p = { .key = *key };
    Product x;
    Err err = candidates_product(&dev->stream, key, &x, memory);
    if (!err) err = gemm_describe(&p, &x);
    if (!err) err = gemm_candidates(g, &p, CANDIDATES_MOST, &c);
    if (!err) err = candidates_measure(g, &dev->stream, &p, &x, &c, turns, all);
    if (!err) candidates_report(j, key, &c, all);
    for (int i = 0; i < 5; i++) cudaFree(memory[i]);
    return err;
}

/* On a device of its own; `candidates` of the JSON. */
static inline Err candidates_list(const Listed *l, JsonOut *j)
{
    Device dev;
    TRY(device_open(&dev, (DeviceChoice){ .kind = DEVICE_CUDA }));
    Err err = ERR_OK;
    json_open(j, "candidates", '[');
    for (int i = 0; i < l->count && !err; i++) err = candidates_of(&dev, &l->keys[i], l->turns, j);
    json_close(j, ']');
    device_close(&dev);
    return err;
}

#endif
