/* See loads.h. The accumulators of experts' biases hold the rows of the whole step on every rank of a stage. */
#include "engine/loads.h"

#include <stdio.h>
#include <string.h>

enum { UNITS = 1000 };

/* rows[experts], i64 or f32 by the accumulator's dtype. */
static int64_t unevenness(const void *rows, DType dtype, int64_t experts)
{
    double most = 0, sum = 0;
    for (int64_t e = 0; e < experts; e++) {
        const double n = dtype == I64 ? (double)((const int64_t *)rows)[e] : (double)((const float *)rows)[e];
        if (n > most) most = n;
        sum += n;
    }
    return sum > 0 ? (int64_t)(UNITS * most * (double)experts / sum + 0.5) : 0;
}

/* What one rank of each stage says of the layers that it holds. */
static Err own_loads(Trainer *t, const ParamStore *s, void *rows, int64_t *load)
{
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const Tensor count = param_store_grad(s, i);
        int layer;
        if (p->spec.group != PARAM_STATE || p->copy || sscanf(p->name, "layers.%d.", &layer) != 1) continue;
        TRY(device_read(&t->device.stream, rows, count.data, tensor_bytes(count)));
        load[layer] = unevenness(rows, count.dtype, p->count);
    }
    return ERR_OK;
}

Err loads_read(Trainer *t, double *load)
{
    const ModelSpec *m = &t->spec.model;
    int64_t *all = t->host_loads, *rows = all + m->layers;
    memset(all, 0, (size_t)m->layers * sizeof *all);
    for (int r = 0; r < t->params.replicas; r++)
        if (!t->world->tp_rank && !t->world->cp_rank && !t->world->dp_rank)
            TRY(own_loads(t, &t->stores[r], rows, all));
    TRY(comm_sum_i64(&t->world->host, &t->device.stream, all, m->layers, NULL));
    for (int i = 0; i < m->layers; i++) load[i] = (double)all[i] / UNITS;
    return ERR_OK;
}
