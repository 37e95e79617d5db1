/*
 * Shared parts of all kinds of attention: heads, and their way once they are made. How they are made: attention.c,
 * mla.c. Keys of other ranks and of earlier slices: keys.c.
 */
#include <stdio.h>

#include "layer/attend.h"

AttentionCore attention_core(const ModelSpec *s, const char *name, int layer, float scale)
{
    const int64_t window = layer_pattern_at(&s->window, model_like(s, layer));
    return (AttentionCore){ .spec = s,
                            .layer = layer,
                            .sink = -1,
                            .scale = scale,
                            .window = window,
                            .local = window && s->rope.local_base > 0,
                            .rope = layer_pattern_at(&s->rope.layers, model_like(s, layer)),
                            .dropout_key = model_key(s, name, "attention_dropout") };
}

Err attention_core_sinks(AttentionCore *a, ParamRegistry *reg, const char *attention)
{
    char name[PARAM_NAME_MAX];
    if (!a->spec->sinks) return ERR_OK;
    snprintf(name, sizeof name, "%s.sinks", attention);
    const ParamSpec sinks = {
        .name = name, .ndim = 1, .shape = { a->spec->heads, 1 }, .cut = { CUT_TP }, .init = INIT_ZERO
    };
    return param_add(reg, sinks, &a->sink);
}

/* ---- shapes ---- */

Tensor heads_as_columns(Tensor t) { return tensor_reshape(t, t.dim[0], t.dim[1] * t.dim[2]); }
Tensor heads_as_rows(Tensor t) { return tensor_reshape(t, t.dim[0] * t.dim[1], t.dim[2]); }

/* [N, H, C] -> [B, T, H, C], of the same rows: heads may be columns of something wider. */
static Tensor by_sample(const Ctx *c, Tensor t)
{
    const int64_t B = c->batch->B;
    return (Tensor){ .data = t.data,
                     .dim = { B, t.dim[0] / B, t.dim[1], t.dim[2] },
                     .ld = t.ld,
                     .group = t.group,
                     .ndim = 4,
                     .dtype = t.dtype };
}

Err attention_core_rotate(const AttentionCore *a, Ctx *c, Tensor x, Tensor position, int inverse)
{
    if (!a->rope) return ERR_OK;
    const RopeTable *t = a->local ? &c->rope.local : &c->rope.all;
    return op(c->s, rope, .x = x, .position = position, .cos = t->cos, .sin = t->sin, .inverse = inverse);
}

/* ---- queries meet keys ---- */

static int64_t first_head(const Ctx *c, const Heads *h) { return h->q.dim[1] * c->world->tp.rank; }

int attention_score_heads(const ModelSpec *s) { return s->heads; }

/* The maxima of all heads of the layer. Evaluation and generation leave them alone. */
static Tensor logit_max(const AttentionCore *a, const Ctx *c)
{
    const int64_t heads = attention_score_heads(a->spec);
    if (!c->logit_max.data || !c->mode.training) return (Tensor){ 0 };
    return tensor_reshape(tensor_row_slice(c->logit_max, a->layer, 1), heads);
}

Err attention_core_forward(const AttentionCore *a, Ctx *c, const Heads *h, Tensor o, Tensor lse)
{
    const ModelSpec *s = a->spec;
    const Spans keys = c->block.cache ? spans_whole(h->k.dim[0]) : c->batch->span;
    return context_attention(c, (attention_fwd_args){ .o = by_sample(c, o),
                                                      .lse = lse,
                                                      .logit_max = logit_max(a, c),
                                                      .q = by_sample(c, h->q),
                                                      .k = by_sample(c, h->k),
                                                      .v = by_sample(c, h->v),
                                                      .doc = c->batch->doc,
                                                      .sample = c->batch->samples,
                                                      .q_span = c->batch->span,
                                                      .k_span = keys,
                                                      .scale = a->scale,
                                                      .block = c->canon.attn_block,
                                                      .window = a->window,
                                                      .dropout = ctx_dropout(c, s->attention_dropout, a->dropout_key),
                                                      .head0 = first_head(c, h),
                                                      .softcap = s->attention_softcap,
                                                      .sink = param_value(c, a->sink) });
}

static Err sinks_backward(Ctx *c, int sink, Tensor lse, Tensor delta)
{
    const HeadRows of = context_head_rows(c, lse.dim[0] * lse.dim[1], lse.dim[2]);
    Tensor rows;
    if (sink < 0) return ERR_OK;
    TRY(tensor_new(c->scratch, &rows, c->dtype, of.rows, of.heads));
    TRY(op(c->s, sink_bwd, .dsink = rows, .sink = tensor_row_slice(param_value(c, sink), of.first, of.heads),
           .lse = tensor_reshape(lse, of.rows, of.heads), .delta = tensor_reshape(delta, of.rows, of.heads)));
    return grad_add_columns(c, sink, rows, of.first);
}

Err attention_core_backward(const AttentionCore *a, Ctx *c, const Heads *h, const AttendSave *save, const Heads *d)
{
    const ModelSpec *s = a->spec;
    TRY(context_attention_bwd(c, (attention_bwd_args){ .dq = by_sample(c, d->q),
                                                       .dk = by_sample(c, d->k),
                                                       .dv = by_sample(c, d->v),
                                                       .go = by_sample(c, save->go),
                                                       .q = by_sample(c, h->q),
                                                       .k = by_sample(c, h->k),
                                                       .v = by_sample(c, h->v),
                                                       .o = by_sample(c, save->o),
                                                       .lse = save->lse,
                                                       .delta = save->delta,
                                                       .doc = c->batch->doc,
                                                       .sample = c->batch->samples,
                                                       .q_span = c->batch->span,
                                                       .k_span = c->batch->span,
                                                       .scale = a->scale,
                                                       .block = c->canon.attn_block,
                                                       .window = a->window,
                                                       .dropout = ctx_dropout(c, s->attention_dropout, a->dropout_key),
                                                       .head0 = first_head(c, h),
                                                       .chunk = save->chunk,
                                                       .leaf = c->canon.query_leaf,
                                                       .positions = c->batch->seq,
                                                       .softcap = s->attention_softcap }));
    return sinks_backward(c, a->sink, save->lse, save->delta);
}

Err attend_keep(Ctx *c, const Heads *h, bool pass)
{
    return slice_keep_keys(c, by_sample(c, h->k), by_sample(c, h->v), pass);
}

Err cache_new(const ModelSpec *s, KvShape shape, DType dtype, KvCache *cache, Arena *state)
{
    TRY(tensor_new(state, &cache->k, dtype, 1, s->seq, shape.heads, shape.k_cols));
    return shape.v_cols ? tensor_new(state, &cache->v, dtype, 1, s->seq, shape.heads, shape.v_cols) : ERR_OK;
}

Err cache_join(Ctx *c, Tensor kept, Tensor own, int64_t heads, Tensor *all)
{
    const int64_t past = c->batch->span.first[0] * heads, rows = own.dim[0];
    ASSERT(c->batch->B == 1);
    *all = tensor_row_slice(kept, 0, past + rows);
    return copy_rows(c, tensor_row_slice(kept, past, rows), own);
}

static Err join_earlier(Ctx *c, Tensor kept, Tensor *t)
{
    const int64_t K = t->dim[1], C = t->dim[2];
    Tensor all;
    TRY(cache_join(c, tensor_reshape(kept, kept.dim[1] * K, C), heads_as_rows(*t), K, &all));
    *t = tensor_reshape(all, all.dim[0] / K, K, C);
    return ERR_OK;
}

Err cache_join_heads(Ctx *c, Heads *h)
{
    const KvCache *cache = c->block.cache;
    if (!cache) return ERR_OK;
    TRY(join_earlier(c, cache->k, &h->k));
    return join_earlier(c, cache->v, &h->v);
}

/* ---- gates ---- */

Err heads_gate_forward(Ctx *c, Tensor o, Tensor gate, Saved *saved, Tensor *gated)
{
    *gated = o;
    if (!gate.data) return ERR_OK;
    TRY(save_new(c, REGION_W, gated, saved, c->dtype, o.dim[0], o.dim[1], o.dim[2]));
    return op(c->s, gate_fwd, .y = heads_as_rows(*gated), .x = heads_as_rows(o), .gate = heads_as_rows(gate));
}

Err heads_gate_backward(Ctx *c, Tensor go, Tensor dgate, Tensor o, Tensor gate)
{
    if (!gate.data) return ERR_OK;
    return op(c->s, gate_bwd, .dx = heads_as_rows(go), .dgate = heads_as_rows(dgate), .dy = heads_as_rows(go),
              .x = heads_as_rows(o), .gate = heads_as_rows(gate));
}
