/*
 * Choices balanced by Sinkhorn's method (device/ops.def, sinkhorn; docs/moe.md). Threads own units. The sum over a row
 * is one of 16 lanes, that over the rows of a unit a chain for each expert.
 */
#include "cpu/rows.h"

#define EPS 1e-8f
#define CLOSE_ENOUGH 1e-4f

typedef struct {
    const sinkhorn_args *args;
    float *memory; /* 2 E floats a thread */
} Work;

/* p of a row, and what that adds to the experts' sums. */
static void row_round(const sinkhorn_args *a, int64_t n, const float *q, float *sum)
{
    const int64_t E = a->rank.dim[1];
    const float *c = row_f32(a->rank, n);
    vf lanes = vf_zero();
    for (int64_t i = 0; i < E; i += VEC)
        lanes = vf_fma(row_mask(row_load(c + i, E - i), E - i), row_load(q + i, E - i), lanes);
    const float p = 1 / ((float)a->rows * (vf_sum(lanes) + EPS));
    ((float *)a->share.data)[n] = p;
    for (int64_t i = 0; i < E; i += VEC)
        row_store(sum + i, vf_fma(row_load(c + i, E - i), vf_set1(p), row_load(sum + i, E - i)), E - i);
}

/* The mean of what q changed by. */
static float unit_round(const sinkhorn_args *a, int64_t first, float *q, float *sum)
{
    const int64_t E = a->rank.dim[1];
    float change = 0;
    memset(sum, 0, (size_t)E * sizeof *sum);
    for (int64_t n = first; n < first + a->rows; n++) row_round(a, n, q, sum);
    for (int64_t e = 0; e < E; e++) {
        const float now = 1 / ((float)E * (sum[e] + EPS));
        change += __builtin_fabsf(now - q[e]);
        q[e] = now;
    }
    return change / (float)E;
}

static void unit_ranks(const sinkhorn_args *a, int64_t first, float *q, float *sum)
{
    const int64_t E = a->rank.dim[1];
    for (int64_t n = first; n < first + a->rows; n++)
        for (int64_t i = 0; i < E; i += VEC)
            row_store(row_f32(a->rank, n) + i, vf_exp(row_load(row_f32(a->logits, n) + i, E - i)), E - i);
    for (int64_t e = 0; e < E; e++) q[e] = 1;
    for (int round = 0; round < SINKHORN_ROUNDS; round++)
        if (unit_round(a, first, q, sum) <= CLOSE_ENOUGH) break;
    for (int64_t n = first; n < first + a->rows; n++) {
        const vf p = vf_set1(((const float *)a->share.data)[n]);
        float *rank = row_f32(a->rank, n);
        for (int64_t i = 0; i < E; i += VEC) {
            const vf c = row_load(rank + i, E - i), by = row_load(q + i, E - i);
            row_store(rank + i, vf_mul(vf_mul(by, c), p), E - i);
        }
    }
}

static void sinkhorn_part(const void *args, int64_t first, int64_t end)
{
    const Work *w = args;
    const int64_t E = w->args->rank.dim[1];
    float *q = w->memory + omp_get_thread_num() * 2 * E;
    for (int64_t u = first; u < end; u++) unit_ranks(w->args, u * w->args->rows, q, q + E);
}

Err CPU(sinkhorn)(Stream *s, const sinkhorn_args *a)
{
    const int64_t E = a->rank.dim[1], units = a->rank.dim[0] / a->rows, need = 2 * E * (int64_t)sizeof(float);
    const Work w = { a, (float *)(void *)s->dev->workspace };
    Device dev = *s->dev;
    Stream own = *s;
    ASSERT(units * a->rows == a->rank.dim[0]);
    if (need > dev.workspace_bytes)
        return err_set(ERR_CONFIG, "sinkhorn of %lld experts needs %lld bytes of workspace, there are %lld",
                       (long long)E, (long long)need, (long long)dev.workspace_bytes);
    if (dev.threads > dev.workspace_bytes / need) dev.threads = (int)(dev.workspace_bytes / need);
    own.dev = &dev;
    par_rows(&own, units, 64 * a->rows * E, sinkhorn_part, &w);
    return ERR_OK;
}
