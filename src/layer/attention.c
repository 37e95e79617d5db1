/*
 * Causal self-attention with grouped queries, heads cut over tp:
 *
 *   qkv = x Wqkv (+ b)      columns lie chunk by chunk: the q heads of a kv head, its k, its v; or a part of them
 *   q, k, v                 views of qkv, or split; optional RMSNorm per head; optional rotary positions
 *   o = attention(q, k, v)  online softmax, key blocks in canonical order (device/ops.def); optional cap and sinks
 *   o = o * sigmoid(gate)   optional; the gate is a fourth part of qkv's columns, as wide as q
 *   y = o Wproj             bias added by the residual add
 *
 * Kept for backward: q, k, v after rotation, o, log-sum-exp; with q/k norms also q and k before them, with a gate it
 * and what it leaves of o.
 *
 * Where each query head has a kv head of its own, heads lie evenly in the columns of qkv: all that follows reads and
 * rotates them there, and their gradients are written where those of qkv belong. Otherwise they are copied apart and
 * back: with grouped queries, with parts of kv heads, and where k and v go to other ranks or into a cache.
 *
 * More ranks than kv heads: the ranks of world->kv, neighbours in tp, share one. Each computes some columns of its
 * k and v, and has some of the query heads that read them; no weight is there twice:
 *
 *   forward    own columns of k | v --all-gather--> the whole head, on which each rank goes on
 *   backward   dk | dv of own query heads --sum, a tree--> the whole head's; each rank goes on with its columns
 *
 * In between, k's norm and rotation are the same on all of these ranks; the norm's gradient counts once (norm.c).
 *
 * Rows of other positions, where ranks share sequences: keys.c.
 */
#include <math.h>
#include <stdio.h>

#include "base/heads.h"
#include "base/rng.h"
#include "layer/internal.h"

static Err register_qk_norms(Attention *a, ParamRegistry *reg, const AttentionSpec *spec)
{
    char name[PARAM_NAME_MAX];
    if (!spec->qk_norm) return ERR_OK;
    snprintf(name, sizeof name, "%s.q_norm", spec->name);
    TRY(norm_register(&a->q_norm, reg, name, spec->head_dim, true, spec->norm_eps, PARTIAL_HEADS));
    snprintf(name, sizeof name, "%s.k_norm", spec->name);
    TRY(norm_register(&a->k_norm, reg, name, spec->head_dim, true, spec->norm_eps, PARTIAL_HEADS));
    a->k_norm.shared = true;
    return ERR_OK;
}

Err sinks_register(ParamRegistry *reg, const char *attention, int heads, int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.sinks", attention);
    return param_add(
        reg,
        (ParamSpec){ .name = name, .ndim = 1, .shape = { heads, 1 }, .cut = { CUT_TP }, .init = INIT_ZERO },
        id);
}

Err attention_register(Attention *a, ParamRegistry *reg, AttentionSpec spec)
{
    char name[PARAM_NAME_MAX];
    int64_t q = (int64_t)spec.heads * spec.head_dim, kv = (int64_t)spec.kv_heads * spec.head_dim;
    const int64_t gate = spec.gate ? q : 0;
    *a = (Attention){ .sink = -1,
                      .qk_norm = spec.qk_norm,
                      .rope = spec.rope,
                      .gate = spec.gate,
                      .heads = spec.heads,
                      .kv_heads = spec.kv_heads,
                      .head_dim = spec.head_dim,
                      .kv_parts = kv_head_parts(spec.tp_blocks, spec.heads, spec.kv_heads, spec.head_dim),
                      .window = spec.window,
                      .softcap = spec.softcap,
                      .dropout = spec.dropout };
    snprintf(name, sizeof name, "%s.attention_dropout", spec.name);
    a->dropout_key = rng_key(spec.seed, name);
    snprintf(name, sizeof name, "%s.qkv", spec.name);
    TRY(linear_register(&a->qkv, reg,
                        (LinearSpec){ .name = name,
                                      .in = spec.hidden,
                                      .out = q + 2 * kv + gate,
                                      .kind = LINEAR_COLUMN,
                                      .bias = spec.bias,
                                      .std = spec.std,
                                      .section = { q, kv, kv, gate },
                                      .interleave = spec.kv_heads * a->kv_parts }));
    TRY(register_qk_norms(a, reg, &spec));
    if (spec.sinks) TRY(sinks_register(reg, spec.name, spec.heads, &a->sink));
    snprintf(name, sizeof name, "%s.proj", spec.name);
    return linear_register(&a->proj, reg,
                           (LinearSpec){ .name = name,
                                         .in = q,
                                         .out = spec.hidden,
                                         .kind = LINEAR_ROW,
                                         .bias = spec.bias,
                                         .std = spec.proj_std });
}

/* Local sizes and the shared arguments of the attention ops. */
typedef struct {
    int64_t B, T, N, H, K, C, head0;
    int64_t chunks, kv_cols; /* of this rank's qkv; its columns of k, as many of v */
    int64_t columns;         /* of this rank's qkv */
    int64_t query_chunk;     /* query heads of a chunk: a leaf of the sum over those that read a kv head */
    bool views;              /* heads are views of qkv's columns */
    float scale;
    Dropout dropout;
} Dims;

static Dims dims_of(const Attention *a, const Ctx *c)
{
    int tp = c->world->tp.size, sharing = c->world->kv.size;
    ASSERT(sharing == (tp > a->kv_heads ? tp / a->kv_heads : 1));
    Dims d = { .B = c->batch->B,
               .T = c->batch->T,
               .H = a->heads / tp,
               .K = a->kv_heads * sharing / tp,
               .C = a->head_dim,
               .chunks = a->kv_heads * a->kv_parts / tp };
    d.N = d.B * d.T;
    d.kv_cols = d.K * d.C / sharing;
    d.columns = (a->gate ? 2 : 1) * d.H * d.C + 2 * d.kv_cols;
    d.query_chunk = c->canon.exact ? a->heads / (a->kv_heads * a->kv_parts) : d.H / d.K;
    d.head0 = d.H * c->world->tp.rank;
    const bool whole = c->world->cp.size == 1 && c->slice_count <= 1;
    d.views = a->heads == a->kv_heads && a->kv_parts == 1 && whole && !c->kv;
    d.scale = 1 / sqrtf((float)d.C);
    d.dropout = ctx_dropout(c, a->dropout, a->dropout_key);
    return d;
}

SliceKeyShape attention_keys(const Attention *a, const Ctx *c)
{
    const Dims d = dims_of(a, c);
    return (SliceKeyShape){ .heads = d.K, .chunks = d.H / d.K / d.query_chunk, .k_cols = d.C, .v_cols = d.C };
}

static const Tensor none;

/* Of the rows of a rank: [N, H, C], [N, K, C] twice, and the gate [N, H, C], if there is one. */
typedef struct {
    Tensor q, k, v, gate;
} Heads;

/* Head 0 at `first` of qkv's columns, the others at equal distances. */
static Tensor head_view(const Dims *d, Tensor qkv, int64_t first)
{
    const Tensor from = tensor_col_slice(qkv, first, d->C);
    Tensor t = tensor_of(from.data, from.dtype, d->N, d->H, d->C);
    t.ld = d->columns / d->H;
    return t;
}

static Heads heads_in(const Attention *a, const Dims *d, Tensor qkv)
{
    return (Heads){ head_view(d, qkv, 0), head_view(d, qkv, d->C), head_view(d, qkv, 2 * d->C),
                    a->gate ? head_view(d, qkv, 3 * d->C) : none };
}

static Tensor heads_as_rows(Tensor t) /* [N, H, C] -> [N * H, C] */
{
    return tensor_reshape(t, t.dim[0] * t.dim[1], t.dim[2]);
}

/* k (0) or v (1) of kv [2, N, ...] -> [N, columns] */
static Tensor kv_half(Tensor kv, int which)
{
    int64_t N = kv.dim[1], columns = tensor_count(kv) / (2 * N);
    return tensor_row_slice(tensor_reshape(kv, 2 * N, columns), which * N, N);
}

static Tensor kv_heads(Tensor kv, int which) /* kv [2, N, K, C] -> [N, K, C] */
{
    return tensor_reshape(kv_half(kv, which), kv.dim[1], kv.dim[2], kv.dim[3]);
}

static Tensor by_sample(Tensor t, const Dims *d) /* [N, H, C] -> [B, T, H, C] */
{
    return tensor_reshape(t, d->B, d->T, t.dim[1], t.dim[2]);
}

static Err rotate(const Attention *a, Ctx *c, Tensor x, int inverse)
{
    if (!a->rope) return ERR_OK;
    return op(c->s, rope, .x = x, .position = ctx_place(c), .cos = c->rope_cos, .sin = c->rope_sin,
              .inverse = inverse);
}

/* The heads of this rank's columns of qkv, copied: q, whole heads of k and v in kv [2, N, K, C], and a gate, if any. */
static Err split_columns(Ctx *c, const Dims *d, Tensor qkv, Heads h, Tensor kv)
{
    ArenaMark mark = arena_mark(c->scratch);
    int64_t sharing = c->world->kv.size;
    Tensor own = kv, all;
    if (sharing > 1) TRY(tensor_new(c->scratch, &own, c->dtype, 2, d->N, d->kv_cols));
    TRY(op(c->s, qkv_split, .q = heads_as_columns(h.q), .k = kv_half(own, 0), .v = kv_half(own, 1),
           .gate = h.gate.data ? heads_as_columns(h.gate) : none, .qkv = qkv, .chunks = d->chunks));
    if (sharing > 1) {
        TRY(tensor_new(c->scratch, &all, c->dtype, sharing, 2 * d->N, d->kv_cols));
        TRY(comm_all_gather(&c->world->kv, c->s, all, own, NULL));
        TRY(op(c->s, join_columns, .y = tensor_reshape(kv, 2 * d->N, sharing, d->kv_cols), .x = all));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Memory for the projection: kept if heads are views of it. */
static Err qkv_alloc(Ctx *c, const Dims *d, AttentionSave *save, Tensor *qkv)
{
    if (d->views) return save_new(c, REGION_I, qkv, &save->qkv, c->dtype, d->N, d->columns);
    return tensor_new(c->scratch, qkv, c->dtype, d->N, d->columns);
}

/* The heads as the projection has left them. */
static Err raw_heads(const Attention *a, Ctx *c, const Dims *d, Tensor qkv, AttentionSave *save, Heads *h)
{
    Tensor kv;
    *h = d->views ? heads_in(a, d, qkv) : (Heads){ .gate = none };
    if (d->views) return ERR_OK;
    TRY(save_new(c, REGION_I, &h->q, a->qk_norm ? &save->q_raw : &save->q, c->dtype, d->N, d->H, d->C));
    TRY(save_new(c, REGION_I, &kv, &save->kv, c->dtype, 2, d->N, d->K, d->C));
    if (a->gate) TRY(save_new(c, REGION_I, &h->gate, &save->gate, c->dtype, d->N, d->H, d->C));
    h->k = kv_heads(kv, 0);
    h->v = kv_heads(kv, 1);
    return split_columns(c, d, qkv, *h, kv);
}

static Heads saved_raw_heads(const Attention *a, const Ctx *c, const Dims *d, const AttentionSave *save)
{
    if (d->views) return heads_in(a, d, save_get(c, save->qkv));
    const Tensor kv = save_get(c, save->kv);
    return (Heads){ save_get(c, a->qk_norm ? save->q_raw : save->q), kv_heads(kv, 0), kv_heads(kv, 1),
                    a->gate ? save_get(c, save->gate) : none };
}

/* q, k, v from the projection: heads, their norms, rotation. */
static Err heads_forward(const Attention *a, Ctx *c, Tensor qkv, const Dims *d, AttentionSave *save,
                         Heads *out)
{
    TRY(raw_heads(a, c, d, qkv, save, out));
    if (a->qk_norm) {
        const Heads raw = *out;
        TRY(save_new(c, REGION_I, &out->q, &save->q, c->dtype, d->N, d->H, d->C));
        TRY(save_new(c, REGION_I, &out->k, &save->k, c->dtype, d->N, d->K, d->C));
        TRY(norm_forward(&a->q_norm, c, heads_as_rows(raw.q), heads_as_rows(out->q), &save->q_norm));
        TRY(norm_forward(&a->k_norm, c, heads_as_rows(raw.k), heads_as_rows(out->k), &save->k_norm));
    }
    TRY(rotate(a, c, out->q, 0));
    return rotate(a, c, out->k, 0);
}

/* As heads_forward has left them. */
static Heads saved_heads(const Attention *a, const Ctx *c, const Dims *d, const AttentionSave *save)
{
    Heads h = saved_raw_heads(a, c, d, save);
    if (a->qk_norm) h.q = save_get(c, save->q), h.k = save_get(c, save->k);
    return h;
}

Tensor heads_as_columns(Tensor t) { return tensor_reshape(t, t.dim[0], t.dim[1] * t.dim[2]); }

Err heads_gate_forward(Ctx *c, Tensor o, Tensor gate, Saved *saved, Tensor *gated)
{
    *gated = o;
    if (!gate.data) return ERR_OK;
    TRY(save_new(c, REGION_W, gated, saved, c->dtype, o.dim[0], o.dim[1], o.dim[2]));
    return op(c->s, gate_fwd, .y = heads_as_rows(*gated), .x = heads_as_rows(o), .gate = heads_as_rows(gate));
}

/* t [1, T, K, C] joins what `kept` has of positions before `past`, and both together take its place. */
static Err join_earlier(Ctx *c, Tensor kept, int64_t past, Tensor *t)
{
    const int64_t T = t->dim[1], K = t->dim[2], C = t->dim[3];
    ASSERT(t->dim[0] == 1);
    const Tensor rows = tensor_reshape(kept, kept.dim[1], K * C), own = tensor_row_slice(rows, past, T);
    TRY(device_copy(c->s, own.data, t->data, tensor_bytes(own)));
    *t = tensor_reshape(tensor_row_slice(rows, 0, past + T), 1, past + T, K, C);
    return ERR_OK;
}

Err attention_forward(const Attention *a, Ctx *c, Tensor x, Tensor y, AttentionSave *save)
{
    ArenaMark mark = arena_mark(c->scratch);
    Dims d = dims_of(a, c);
    Tensor o, lse, qkv, gated;
    Heads h;
    bool in_scratch = c->into[REGION_I] == c->scratch; /* full recomputation: qkv must outlive the saves */
    TRY(save_new(c, a->gate ? REGION_I : REGION_W, &o, &save->o, c->dtype, d.N, d.H, d.C));
    TRY(save_new(c, REGION_I, &lse, &save->lse, F32, d.B, d.T, d.H));
    if (!in_scratch) mark = arena_mark(c->scratch);
    TRY(qkv_alloc(c, &d, save, &qkv));
    TRY(linear_forward(&a->qkv, c, x, qkv));
    TRY(heads_forward(a, c, qkv, &d, save, &h));
    Tensor k = by_sample(h.k, &d), v = by_sample(h.v, &d);
    Spans k_span = c->batch->span;
    if (c->kv) {
        TRY(join_earlier(c, c->kv->k, k_span.first[0], &k));
        TRY(join_earlier(c, c->kv->v, k_span.first[0], &v));
        k_span = spans_whole(k.dim[1]);
    }
    TRY(slice_keep_keys(c, k, v, in_scratch));
    TRY(context_attention(c, (attention_fwd_args){ .o = by_sample(o, &d),
                                                   .lse = lse,
                                                   .q = by_sample(h.q, &d),
                                                   .k = k,
                                                   .v = v,
                                                   .doc = c->batch->doc,
                                                   .sample = c->batch->samples,
                                                   .q_span = c->batch->span,
                                                   .k_span = k_span,
                                                   .scale = d.scale,
                                                   .block = c->canon.attn_block,
                                                   .window = a->window,
                                                   .dropout = d.dropout,
                                                   .head0 = d.head0,
                                                   .softcap = a->softcap,
                                                   .sink = a->sink < 0 ? none : param_value(c, a->sink) }));
    TRY(heads_gate_forward(c, o, h.gate, &save->gated, &gated));
    if (!in_scratch) arena_release(c->scratch, mark);
    return linear_forward(&a->proj, c, heads_as_columns(gated), y);
}

/* Undoes the per-head norm of one of q, k: dy -> dx, the gradient of the raw heads. */
static Err head_backward_norm(const Norm *n, Ctx *c, const NormSave *save, Tensor raw, Tensor dy, Tensor dx)
{
    return norm_backward_into(n, c, save, heads_as_rows(raw), heads_as_rows(dy), heads_as_rows(dx));
}

Err heads_gate_backward(Ctx *c, Tensor go, Tensor dgate, Tensor o, Tensor gate)
{
    if (!gate.data) return ERR_OK;
    return op(c->s, gate_bwd, .dx = heads_as_rows(go), .dgate = heads_as_rows(dgate), .dy = heads_as_rows(go),
              .x = heads_as_rows(o), .gate = heads_as_rows(gate));
}

Err sinks_backward(Ctx *c, int sink, Tensor lse, Tensor delta)
{
    const HeadRows of = context_head_rows(c, lse.dim[0] * lse.dim[1], lse.dim[2]);
    Tensor rows;
    if (sink < 0) return ERR_OK;
    TRY(tensor_new(c->scratch, &rows, c->dtype, of.rows, of.heads));
    TRY(op(c->s, sink_bwd, .dsink = rows, .sink = tensor_row_slice(param_value(c, sink), of.first, of.heads),
           .lse = tensor_reshape(lse, of.rows, of.heads), .delta = tensor_reshape(delta, of.rows, of.heads)));
    return grad_add_columns(c, sink, rows, of.first);
}

/* Of this rank's query heads, and of keys and values from them. */
typedef struct {
    Heads of;    /* as attention_bwd leaves them */
    Tensor kv;   /* copies: k and v, [2, N, K, C] */
    Tensor dqkv; /* [N, columns] */
} HeadGrads;

static Err grads_alloc(const Attention *a, Ctx *c, const Dims *d, HeadGrads *g)
{
    TRY(dy_alloc(c, &g->dqkv, d->N, d->columns));
    g->of = d->views ? heads_in(a, d, g->dqkv) : (Heads){ .gate = none };
    if (!d->views || a->qk_norm) TRY(tensor_new(c->scratch, &g->of.q, c->dtype, d->N, d->H, d->C));
    if (d->views) return a->qk_norm ? tensor_new(c->scratch, &g->of.k, c->dtype, d->N, d->K, d->C) : ERR_OK;
    TRY(tensor_new(c->scratch, &g->kv, c->dtype, 2, d->N, d->K, d->C));
    g->of.k = kv_heads(g->kv, 0);
    g->of.v = kv_heads(g->kv, 1);
    return a->gate ? tensor_new(c->scratch, &g->of.gate, c->dtype, d->N, d->H, d->C) : ERR_OK;
}

/* dq and dk become those before the norms. */
static Err norms_backward(const Attention *a, Ctx *c, const AttentionSave *save, const Dims *d, HeadGrads *g)
{
    const Heads raw = saved_raw_heads(a, c, d, save), dy = g->of;
    if (!a->qk_norm) return ERR_OK;
    if (d->views) {
        g->of = heads_in(a, d, g->dqkv);
    } else {
        TRY(tensor_new(c->scratch, &g->of.q, c->dtype, d->N, d->H, d->C));
        TRY(tensor_new(c->scratch, &g->of.k, c->dtype, d->N, d->K, d->C));
    }
    TRY(head_backward_norm(&a->q_norm, c, &save->q_norm, raw.q, dy.q, g->of.q));
    return head_backward_norm(&a->k_norm, c, &save->k_norm, raw.k, dy.k, g->of.k);
}

/* From what attention_bwd has left to dqkv. */
static Err heads_backward(const Attention *a, Ctx *c, const AttentionSave *save, const Dims *d, HeadGrads *g)
{
    const int64_t first = d->kv_cols * c->world->kv.rank;
    if (!d->views) TRY(reduce_values(c, &c->world->kv, g->kv));
    TRY(rotate(a, c, g->of.q, 1));
    TRY(rotate(a, c, g->of.k, 1));
    TRY(norms_backward(a, c, save, d, g));
    if (d->views) return ERR_OK;
    return op(c->s, qkv_merge, .qkv = g->dqkv, .q = heads_as_columns(g->of.q),
              .k = tensor_col_slice(heads_as_columns(g->of.k), first, d->kv_cols),
              .v = tensor_col_slice(heads_as_columns(g->of.v), first, d->kv_cols),
              .gate = a->gate ? heads_as_columns(g->of.gate) : none, .chunks = d->chunks);
}

Err attention_backward(const Attention *a, Ctx *c, const AttentionSave *save, Tensor x, Tensor dy, Tensor dx)
{
    ArenaMark mark = arena_mark(c->scratch);
    Dims d = dims_of(a, c);
    const Heads h = saved_heads(a, c, &d, save);
    Tensor o = save_get(c, save->o), gated = a->gate ? save_get(c, save->gated) : o, go, delta;
    HeadGrads g;
    TRY(grads_alloc(a, c, &d, &g));
    TRY(tensor_new(c->scratch, &go, c->dtype, d.N, d.H, d.C));
    TRY(tensor_new(c->scratch, &delta, F32, d.B, d.T, d.H));
    TRY(linear_backward(&a->proj, c, heads_as_columns(gated), dy, heads_as_columns(go)));
    TRY(heads_gate_backward(c, go, g.of.gate, o, h.gate));
    TRY(context_attention_bwd(c, (attention_bwd_args){ .dq = by_sample(g.of.q, &d),
                                                       .dk = by_sample(g.of.k, &d),
                                                       .dv = by_sample(g.of.v, &d),
                                                       .go = by_sample(go, &d),
                                                       .q = by_sample(h.q, &d),
                                                       .k = by_sample(h.k, &d),
                                                       .v = by_sample(h.v, &d),
                                                       .o = by_sample(o, &d),
                                                       .lse = save_get(c, save->lse),
                                                       .delta = delta,
                                                       .doc = c->batch->doc,
                                                       .sample = c->batch->samples,
                                                       .q_span = c->batch->span,
                                                       .k_span = c->batch->span,
                                                       .scale = d.scale,
                                                       .block = c->canon.attn_block,
                                                       .window = a->window,
                                                       .dropout = d.dropout,
                                                       .head0 = d.head0,
                                                       .chunk = d.query_chunk,
                                                       .leaf = c->canon.query_leaf,
                                                       .positions = c->batch->seq,
                                                       .softcap = a->softcap }));
    TRY(sinks_backward(c, a->sink, save_get(c, save->lse), delta));
    TRY(heads_backward(a, c, save, &d, &g));
    TRY(linear_backward(&a->qkv, c, x, g.dqkv, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
