/* Saves, parameters, gradient accumulators, rows in and out of tensor-parallel regions; see layer.h. */
#include <string.h>

#include "base/rng.h"
#include "layer/internal.h"

int64_t ctx_rows(const Ctx *c) { return c->batch->B * c->batch->T / c->world->sp.size; }

Tensor ctx_row_slice(const Ctx *c, Tensor per_row)
{
    int64_t R = ctx_rows(c);
    return tensor_row_slice(per_row, R * c->world->sp.rank, R);
}

Dropout ctx_dropout(const Ctx *c, float p, uint64_t key)
{
    if (!c->dropout_on || !(p > 0)) return (Dropout){ 0, 0, 1 };
    return (Dropout){ key, dropout_threshold(p), 1 / (1 - p) };
}

void segment_begin(Ctx *c, int index)
{
    ASSERT(index < c->slot->segment_count);
    c->segment = index;
    Segment *g = &c->slot->segments[index];
    for (int r = 0; r < REGION_COUNT; r++) g->base[r] = c->into[r]->base + c->into[r]->used_bytes;
}

void segment_end(Ctx *c)
{
    Segment *g = &c->slot->segments[c->segment];
    for (int r = 0; r < REGION_COUNT; r++)
        g->size_bytes[r] = c->into[r]->base + c->into[r]->used_bytes - g->base[r];
}

Err save_alloc(Ctx *c, Region region, Tensor *t, Saved *saved, DType dtype, int ndim, const int64_t *dim)
{
    TRY(tensor_alloc(c->into[region], t, dtype, ndim, dim));
    *saved = (Saved){ .offset = (char *)t->data - c->slot->segments[c->segment].base[region],
                      .segment = (int16_t)c->segment,
                      .region = (int8_t)region,
                      .ndim = (int8_t)ndim,
                      .dtype = dtype };
    memcpy(saved->dim, t->dim, sizeof saved->dim);
    return ERR_OK;
}

Tensor save_get(const Ctx *c, Saved saved)
{
    char *base = c->slot->segments[saved.segment].base[saved.region];
    return tensor_view(base + saved.offset, saved.dtype, saved.ndim, saved.dim);
}

Err dy_alloc(Ctx *c, Tensor *t, int64_t rows, int64_t cols)
{
    return tensor_new(c->split_backward ? c->into[REGION_W] : c->scratch, t, c->dtype, rows, cols);
}

Tensor param_value(const Ctx *c, int id) { return param_view(&c->params->reg->items[id], c->params->value); }

Tensor param_grad(const Ctx *c, int id) { return param_store_grad(c->params, id); }

/* True for the first contribution in a step, which overwrites. A place for one product takes no second one. */
static bool grad_first(const Ctx *c, int id)
{
    GradPlace *g = &c->params->place[id];
    bool first = g->fresh;
    ASSERT(first || !g->once);
    g->fresh = false;
    return first;
}

Err grad_open(Ctx *c, int id, Tensor *acc)
{
    *acc = param_grad(c, id);
    ASSERT(!c->params->place[id].once);
    if (!grad_first(c, id)) return ERR_OK;
    return op(c->s, fill_zero_acc, .x = tensor_reshape(*acc, tensor_count(*acc)));
}

Err grad_add_product(Ctx *c, int weight, Tensor dy, Tensor x)
{
    return op(c->s, linear_dw, .dw = param_grad(c, weight), .dy = dy, .x = x,
              .shift = param_store_shift(c->params, weight), .overflow = c->params->overflow,
              .leaf = c->canon.leaf_tokens, .room = c->canon.room, .fresh = grad_first(c, weight),
              .rounded = c->params->place[weight].once);
}

Err grad_add_rows(Ctx *c, int table, Tensor rows, Tensor index, int64_t first)
{
    Tensor acc;
    TRY(grad_open(c, table, &acc));
    return op(c->s, embedding_grad, .dtable = acc, .dy = rows, .index = index,
              .shift = param_store_shift(c->params, table), .overflow = c->params->overflow, .first = first,
              .room = c->canon.room);
}

Err grad_add_columns(Ctx *c, int bias, Tensor dy)
{
    Tensor acc;
    TRY(grad_open(c, bias, &acc));
    return op(c->s, bias_grad, .dbias = acc, .dy = dy, .shift = param_store_shift(c->params, bias),
              .overflow = c->params->overflow, .leaf = c->canon.leaf_rows, .room = c->canon.room);
}

static Err wgrad_run(Ctx *c, const Wgrad *w)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dy = w->dy, x = w->x;
    if (w->gather_x) TRY(gather_rows(c, x, &x));
    if (w->gather_dy) TRY(gather_rows(c, dy, &dy));
    TRY(grad_add_product(c, w->weight, dy, x));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err wgrad_drain(Ctx *c)
{
    for (int i = 0; i < c->slot->queued; i++) TRY(wgrad_run(c, &c->slot->queue[i]));
    c->slot->queued = 0;
    return ERR_OK;
}

/* Now, or in the slot's queue for a later W. */
Err wgrad_push(Ctx *c, Wgrad w)
{
    if (!c->split_backward) return wgrad_run(c, &w);
    Slot *s = c->slot;
    ASSERT(s->queued < s->queue_capacity);
    s->queue[s->queued++] = w;
    return ERR_OK;
}

Err gather_rows(Ctx *c, Tensor x, Tensor *full)
{
    *full = x;
    if (c->world->sp.size == 1) return ERR_OK;
    TRY(tensor_new(c->scratch, full, x.dtype, x.dim[0] * c->world->sp.size, x.dim[1]));
    return comm_all_gather(&c->world->sp, c->s, *full, x, NULL);
}

Err partial_alloc(Ctx *c, Tensor y, Tensor *partial)
{
    *partial = y;
    if (c->world->sp.size == 1) return ERR_OK;
    return tensor_new(c->scratch, partial, y.dtype, y.dim[0] * c->world->sp.size, y.dim[1]);
}

Err reduce_rows(Ctx *c, Tensor partial, Tensor y)
{
    if (c->world->sp.size > 1) return comm_reduce_scatter_tree_f32(&c->world->sp, c->s, y, partial, NULL);
    return comm_reduce_tree_f32(&c->world->tp, c->s, y, NULL);
}
