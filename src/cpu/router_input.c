/*
 * Inputs of routers: noise, and logits that make experts take turns (device/ops.def, jitter, router_even; docs/moe.md).
 * Threads own rows; draws depend on global coordinates alone.
 */
#include "base/rng.h"
#include "cpu/rows.h"

static void jitter_part(const void *args, int64_t first, int64_t end)
{
    const jitter_args *a = args;
    const int64_t D = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const int64_t position = ((const int32_t *)a->position.data)[n], sample = ((const int64_t *)a->sample.data)[n];
        const float *x = row_f32(a->x, n);
        float *y = row_f32(a->y, n), u[4];
        for (int64_t i = 0; i < D; i++) {
            if (i % 4 == 0) uniform_4(a->key, sample, position, i, u);
            y[i] = x[i] * (1 + a->eps * (2 * u[i % 4] - 1));
        }
    }
}

Err CPU(jitter)(Stream *s, const jitter_args *a)
{
    par_rows(s, rows_both(a->y, a->x), 8 * a->x.dim[1], jitter_part, a);
    return ERR_OK;
}

static void even_part(const void *args, int64_t first, int64_t end)
{
    const router_even_args *a = args;
    const int64_t E = a->logits.dim[1];
    for (int64_t n = first; n < end; n++) {
        const int64_t position = ((const int32_t *)a->position.data)[n], sample = ((const int64_t *)a->sample.data)[n];
        const int64_t best = (sample % E * (a->seq % E) + position) % E * a->topk % E;
        float *x = row_f32(a->logits, n);
        for (int64_t i = 0; i < E; i++) x[(best + i) % E] = -4 * (float)i / (float)E;
    }
}

Err CPU(router_even)(Stream *s, const router_even_args *a)
{
    par_rows(s, rows_used(a->logits), a->logits.dim[1], even_part, a);
    return ERR_OK;
}
