/* Saves, parameters, gradient accumulators, rows into tensor-parallel regions (out of them: sums.c); see layer.h. */
#include <string.h>

#include "base/rng.h"
#include "layer/internal.h"

int64_t ctx_rows(const Ctx *c) { return c->batch->B * c->batch->T / c->world->sp.size; }

Tensor ctx_row_slice(const Ctx *c, Tensor per_row)
{
    int64_t R = ctx_rows(c);
    return tensor_row_slice(per_row, R * c->world->sp.rank, R);
}

Tensor ctx_doc_position(const Ctx *c)
{
    return c->batch->doc_position.data ? c->batch->doc_position : c->batch->position;
}

Dropout ctx_dropout(const Ctx *c, float p, uint64_t key)
{
    if (!c->mode.training || !(p > 0)) return (Dropout){ 0, 0, 1 };
    return (Dropout){ key, dropout_threshold(p), 1 / (1 - p) };
}

void segment_begin(Ctx *c, int index)
{
    ASSERT(index < c->slot->segment_count);
    c->segment = index;
    Segment *g = &c->slot->segments[index];
    for (int r = 0; r < REGION_COUNT; r++) g->base[r] = c->into[r]->base + c->into[r]->used_bytes;
}

void segment_end(const Ctx *c)
{
    Segment *g = &c->slot->segments[c->segment];
    for (int r = 0; r < REGION_COUNT; r++) g->size_bytes[r] = c->into[r]->base + c->into[r]->used_bytes - g->base[r];
}

Saved saved_of(const Ctx *c, Region region, Tensor t)
{
    Saved s = { .offset = (char *)t.data - c->slot->segments[c->segment].base[region],
                .segment = (int16_t)c->segment,
                .region = (int8_t)region,
                .ndim = (int8_t)t.ndim,
                .dtype = t.dtype };
    memcpy(s.dim, t.dim, sizeof s.dim);
    return s;
}

Err save_alloc(Ctx *c, bool keep, Region region, Tensor *t, Saved *saved, DType dtype, int ndim, const int64_t *dim)
{
    if (!keep) return tensor_alloc(c->scratch, t, dtype, ndim, dim);
    TRY(tensor_alloc(c->into[region], t, dtype, ndim, dim));
    *saved = saved_of(c, region, *t);
    return ERR_OK;
}

Tensor save_in(const Slot *slot, Saved saved)
{
    char *base = slot->segments[saved.segment].base[saved.region];
    return tensor_view(base + saved.offset, saved.dtype, saved.ndim, saved.dim);
}

Err save_for_slices(Ctx *c, Tensor t, bool pass, Saved *out)
{
    const Tensor from = t;
    if (pass) {
        TRY(tensor_alloc(&c->slot->region[REGION_I], &t, from.dtype, from.ndim, from.dim));
        TRY(device_copy(c->s, t.data, from.data, tensor_bytes(from)));
    }
    *out = saved_of(c, REGION_I, t);
    return ERR_OK;
}

Tensor save_get(const Ctx *c, Saved saved) { return save_in(c->slot, saved); }

Err dy_alloc(Ctx *c, Tensor *t, int64_t rows, int64_t cols)
{
    return tensor_new(c->mode.split_backward ? c->into[REGION_W] : c->scratch, t, c->dtype, rows, cols);
}

static void note_failure(ParamStore *s, Err err)
{
    if (err && !s->failed) s->failed = err;
}

Tensor param_value(const Ctx *c, int id)
{
    ParamStore *s = c->params;
    const ParamListener *l = &s->listener;
    if (id < 0) return (Tensor){ 0 };
    if (l->read) note_failure(s, l->read(l->user, id, c->mode.pass));
    return param_store_value(s, id, c->mode.version);
}

Tensor param_grad(const Ctx *c, int id)
{
    ParamStore *s = c->params;
    const ParamListener *l = &s->listener;
    if (l->write) note_failure(s, l->write(l->user, id));
    return param_store_grad(s, id);
}

Tensor param_state(const Ctx *c, int id)
{
    ASSERT(c->params->reg->items[id].spec.group == PARAM_STATE);
    return param_zero_shard_master(c->params, id);
}

/* True for the first contribution in a step, or to a unit's buffer, which overwrites. */
static bool grad_first(const Ctx *c, int id)
{
    bool first = c->params->fresh[id];
    c->params->fresh[id] = false;
    return first;
}

Err grad_added(Ctx *c, int id)
{
    const ParamListener *l = &c->params->listener;
    return l->added ? l->added(l->user, id) : ERR_OK;
}

Tensor grad_target(Ctx *c, int id, bool *fresh)
{
    const Tensor acc = param_grad(c, id); /* (a buffer that is taken for it now makes it fresh) */
    *fresh = grad_first(c, id);
    return acc;
}

Err grad_open(Ctx *c, int id, Tensor *acc)
{
    *acc = param_grad(c, id);
    if (!grad_first(c, id)) return ERR_OK;
    return op(c->s, fill_zero_acc, .x = tensor_reshape(*acc, tensor_count(*acc)));
}

Err grad_add_rows(Ctx *c, int table, Tensor rows, Tensor index, int64_t first)
{
    Tensor acc;
    TRY(grad_open(c, table, &acc));
    TRY(op(c->s, embedding_grad, .dtable = acc, .dy = rows, .index = index,
           .shift = param_store_shift(c->params, table), .overflow = c->params->stats->overflow, .first = first,
           .headroom_bits = c->canon.headroom_bits));
    return grad_added(c, table);
}

Err grad_add_columns(Ctx *c, int bias, Tensor dy, int64_t first)
{
    Tensor acc;
    bool fresh = false;
    if (bias < 0) return ERR_OK;
    acc = param_grad(c, bias);
    if (dy.dim[1] == acc.dim[0]) acc = grad_target(c, bias, &fresh);
    else TRY(grad_open(c, bias, &acc));
    TRY(op(c->s, bias_grad, .dbias = tensor_row_slice(acc, first, dy.dim[1]), .dy = dy,
           .shift = param_store_shift(c->params, bias), .overflow = c->params->stats->overflow,
           .leaf = c->canon.leaf_rows, .headroom_bits = c->canon.headroom_bits, .fresh = fresh));
    return grad_added(c, bias);
}

Err gather_rows_begin(Ctx *c, Tensor x, Tensor *full)
{
    Comm *sp = &c->world->sp;
    *full = x;
    if (sp->size == 1) return ERR_OK;
    TRY(tensor_new(c->scratch, full, x.dtype, x.dim[0] * sp->size, x.dim[1]));
    c->s->dev->beside++;
    return comm_all_gather(sp, c->s, *full, x, &sp->pending);
}

Err gather_rows_end(Ctx *c)
{
    Comm *sp = &c->world->sp;
    if (sp->size == 1) return ERR_OK;
    c->s->dev->beside--;
    return stream_wait(c->s, &sp->pending);
}

Err gather_rows(Ctx *c, Tensor x, Tensor *full)
{
    TRY(gather_rows_begin(c, x, full));
    return gather_rows_end(c);
}

Err partial_alloc(Ctx *c, Tensor y, Tensor *partial)
{
    *partial = y;
    if (c->world->sp.size == 1) return ERR_OK;
    return tensor_new(c->scratch, partial, y.dtype, y.dim[0] * c->world->sp.size, y.dim[1]);
}

Err product_alloc(Ctx *c, Tensor y, Tensor *partial)
{
    if (!c->canon.exact || c->world->tp.size == 1 || y.dtype == F32) return partial_alloc(c, y, partial);
    return tensor_new(c->scratch, partial, F32, y.dim[0] * c->world->sp.size, y.dim[1]);
}

Err copy_rows(Ctx *c, Tensor y, Tensor x)
{
    const int64_t n = x.dim[0], columns = x.dim[1];
    const Tensor from = { .data = x.data, .dim = { 1, n, columns }, .ld = x.ld, .ndim = 3, .dtype = x.dtype };
    const Tensor to = { .data = y.data, .dim = { n, 1, columns }, .ld = y.ld, .ndim = 3, .dtype = y.dtype };
    return op(c->s, join_columns, .y = to, .x = from);
}

Err cast_values(Ctx *c, Tensor y, Tensor x)
{
    return op(c->s, cast, .y = tensor_reshape(y, tensor_count(y)), .x = tensor_reshape(x, tensor_count(x)));
}

Err as_fp32(Ctx *c, Tensor x, Tensor *wide)
{
    TRY(wide_sum(c, x, wide));
    return x.dtype == F32 ? ERR_OK : cast_values(c, *wide, x);
}

Err wide_sum(Ctx *c, Tensor x, Tensor *sum)
{
    *sum = x;
    return x.dtype == F32 ? ERR_OK : tensor_alloc(c->scratch, sum, F32, x.ndim, x.dim);
}

Err round_sum(Ctx *c, Tensor x, Tensor sum) { return sum.data == x.data ? ERR_OK : cast_values(c, x, sum); }
