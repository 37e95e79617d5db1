/* See loads.h. The accumulators of experts' biases hold the rows that experts got in the whole step, on every rank of a
 * stage: what is missing to the choices made was dropped. */
#include "engine/loads.h"

#include <stdio.h>
#include <string.h>

#include "engine/async.h"

enum { UNITS = 1000 };

static int64_t sum_of(const void *rows, DType dtype, int64_t experts, double *most)
{
    double sum = 0; /* (counts and their sum are exact) */
    *most = 0;
    for (int64_t e = 0; e < experts; e++) {
        const double n = dtype == I64 ? (double)((const int64_t *)rows)[e] : (double)((const float *)rows)[e];
        if (n > *most) *most = n;
        sum += n;
    }
    return (int64_t)sum;
}

/* Of all tokens, since experts' rows were counted from 0. */
static int64_t choices_made(const Trainer *t)
{
    return t->batch * t->spec.model.seq * t->spec.model.moe.topk / async_updates(&t->parts.step);
}

/* What one rank of each stage says of the layers that it holds. */
static Err own_loads(Trainer *t, const ParamStore *s, void *rows, int64_t *load, int64_t *dropped)
{
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const Tensor count = param_store_grad(s, i);
        int layer;
        if (p->spec.group != PARAM_STATE || p->copy) continue;
        if (sscanf(p->name, "mtp.%d.", &layer) == 1) layer += t->spec.model.layers;
        else if (sscanf(p->name, "layers.%d.", &layer) != 1) continue;
        TRY(device_read(&t->device.stream, rows, count.data, tensor_bytes(count)));
        double most;
        const int64_t sum = sum_of(rows, count.dtype, p->count, &most);
        load[layer] = sum > 0 ? (int64_t)(UNITS * most * (double)p->count / (double)sum + 0.5) : 0;
        dropped[layer] = choices_made(t) - sum;
    }
    return ERR_OK;
}

Err loads_read(Trainer *t, ExpertLoads *out)
{
    const int layers = loads_layers(&t->spec.model);
    int64_t *load = t->host_loads, *dropped = load + layers, *rows = dropped + layers;
    memset(load, 0, 2 * (size_t)layers * sizeof *load);
    for (int r = 0; r < t->params.replicas; r++)
        if (!t->world->tp_rank && !t->world->cp_rank && !t->world->dp_rank)
            TRY(own_loads(t, &t->stores[r], rows, load, dropped));
    TRY(comm_sum_i64(&t->world->host, &t->device.stream, load, 2 * layers, NULL));
    for (int i = 0; i < layers; i++) {
        out->load[i] = (double)load[i] / UNITS;
        out->dropped[i] = dropped[i];
    }
    return ERR_OK;
}

Err loads_no_room(const Trainer *t, bool step)
{
    char when[48] = "evaluation";
    if (step) snprintf(when, sizeof when, "step %lld", (long long)t->step + 1);
    err_set(ERR_MEMORY, "%s: a rank's experts got more rows than moe.slack=%g has room for", when,
            t->spec.model.moe.capacity.slack);
    return err_hint(
        "raise moe.slack (0: room for all that can come), take moe.overflow=drop, or even out the load "
        "with moe.balance");
}

Err loads_check_room(Trainer *t)
{
    int64_t flags[2] = { 0 }; /* (nothing is read in a dry run) */
    Stream *stream = &t->device.stream;
    if (!(t->spec.model.moe.capacity.slack > 0)) return ERR_OK;
    TRY(device_read(stream, flags, t->stats.flags.data, sizeof flags));
    TRY(comm_max_i64(&t->world->host, stream, flags, 2, NULL));
    return flags[1] ? loads_no_room(t, false) : ERR_OK;
}
