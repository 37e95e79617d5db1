/*
 * Causal self-attention with grouped queries, heads cut over tp:
 *
 *   qkv = x Wqkv (+ b)      columns lie chunk by chunk: the q heads of a kv head, its k, its v; or a part of them
 *   q, k, v                 views of qkv, or split; optional RMSNorms; optional rotary positions
 *   o = attention(q, k, v)  online softmax, key blocks in canonical order (device/ops.def); optional cap and sinks
 *   o = o * sigmoid(gate)   optional; the gate is a fourth part of qkv's columns, as wide as q
 *   y = o Wproj             bias added by the residual add
 *
 * q and k may have an RMSNorm each: of single heads, the same for all, or of all heads side by side, which tp cuts
 * (layer.h, CutNorm).
 *
 * Kept for backward: q, k, v after rotation, o, log-sum-exp; with q/k norms also q and k before them, with a gate it
 * and what it leaves of o.
 *
 * Where kv heads are whole, heads are views of the columns of qkv, the queries of a kv head a group (tensor.h): all
 * that follows reads and rotates them there, and their gradients are written where those of qkv belong. Otherwise they
 * are copied apart and back: with parts of kv heads, with norms of all heads, and where k and v go to other ranks or to
 * later slices.
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
#include "layer/attend.h"

typedef struct {
    const ModelSpec *spec;
    AttentionCore core;
    Linear qkv, proj;
    Norm q_norm, k_norm;
    int64_t kv_parts; /* canonical parts into which a kv head is cut (base/heads.h) */
} Attention;

/* Queries and keys are kept behind their norms and their rotation. With norms of single heads, q_raw and the k in qkv
 * or kv are kept as they were before; with norms of all heads whole rows are, in all_q and all_k. */
typedef struct {
    Saved qkv;         /* if heads are views of it; otherwise q, kv and gate */
    Saved q, kv, gate; /* kv [2, N, K, C] */
    Saved q_raw, k;    /* with norms of single heads; q then is kept beside qkv, too */
    Saved o, lse;
    Saved gated; /* o multiplied by the gate, if there is one */
    NormSave q_norm, k_norm;
    CutNormSave all_q, all_k;
} AttentionSave;

/* Norms of single heads; those of all heads together are part of the split into heads. */
static bool norms_heads(const Attention *a) { return a->spec->qk_norm == QK_NORM_HEADS; }
static bool norms_all(const Attention *a) { return a->spec->qk_norm == QK_NORM_FULL; }

static Err register_qk_norms(Attention *a, ParamRegistry *reg, const char *attention)
{
    const ModelSpec *s = a->spec;
    const int64_t q = norms_all(a) ? s->heads : 1, k = norms_all(a) ? s->kv_heads : 1;
    char name[PARAM_NAME_MAX];
    if (s->qk_norm == QK_NORM_NONE) return ERR_OK;
    snprintf(name, sizeof name, "%s.q_norm", attention);
    TRY(norm_register(&a->q_norm, reg, name, q * s->head_dim, NORM_RMS, s->norm_eps, PARTIAL_HEADS));
    snprintf(name, sizeof name, "%s.k_norm", attention);
    TRY(norm_register(&a->k_norm, reg, name, k * s->head_dim, NORM_RMS, s->norm_eps, PARTIAL_HEADS));
    a->k_norm.shared = norms_heads(a);
    return ERR_OK;
}

static Err attention_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    Attention *a = own;
    const int64_t q = (int64_t)s->heads * s->head_dim, kv = (int64_t)s->kv_heads * s->head_dim;
    const int64_t gate = s->attention_gate ? q : 0;
    *a = (Attention){ .spec = s,
                      .core = attention_core(s, name, layer, model_attention_scale(s, 1)),
                      .kv_parts = kv_head_parts(s->tp_blocks, s->heads, s->kv_heads, s->head_dim) };
    const int64_t chunks = s->kv_heads * a->kv_parts;
    const QkRows qk = { .chunk = (q + 2 * kv + gate) / chunks,
                        .rows = { q / chunks, kv / chunks },
                        .kind = { QK_QUERY, QK_KEY },
                        .heads = s->heads / s->kv_heads,
                        .chunks = (int)a->kv_parts };
    TRY(linear_register(&a->qkv, reg,
                        (LinearSpec){ name, "qkv", s->hidden, q + 2 * kv + gate, LINEAR_COLUMN,
                                      .bias = model_qkv_bias(s), .std = model_hidden_std(s),
                                      .section = { q, kv, kv, gate }, .interleave = chunks,
                                      .head_rows = { s->head_dim, s->head_dim, s->head_dim, s->head_dim }, .qk = qk,
                                      .block = layer, .fp8 = model_fp8(s, layer) }));
    TRY(register_qk_norms(a, reg, name));
    TRY(attention_core_sinks(&a->core, reg, name));
    return linear_register(&a->proj, reg,
                           (LinearSpec){ name, "proj", q, s->hidden, LINEAR_ROW, .bias = model_proj_bias(s),
                                         .std = model_projection_std(s), .fp8 = model_fp8(s, layer) });
}

/* Local sizes. */
typedef struct {
    int64_t B, T, N, H, K, C;
    int64_t chunks, kv_cols; /* of this rank's qkv; its columns of k, as many of v */
    int64_t columns;         /* of this rank's qkv */
    int64_t group;           /* query heads that read a kv head */
    int64_t query_chunk;     /* query heads of a chunk: a leaf of the sum over those that read a kv head */
    bool views;              /* heads are views of qkv's columns */
} Dims;

static Dims dims_of(const Attention *a, const Ctx *c)
{
    int tp = c->world->tp.size, sharing = c->world->kv.size;
    ASSERT(sharing == (tp > a->spec->kv_heads ? tp / a->spec->kv_heads : 1));
    Dims d = { .B = c->batch->B,
               .T = c->batch->T,
               .H = a->spec->heads / tp,
               .K = a->spec->kv_heads * sharing / tp,
               .C = a->spec->head_dim,
               .chunks = a->spec->kv_heads * a->kv_parts / tp };
    d.N = d.B * d.T;
    d.kv_cols = d.K * d.C / sharing;
    d.columns = (a->spec->attention_gate ? 2 : 1) * d.H * d.C + 2 * d.kv_cols;
    d.query_chunk = c->canon.exact ? a->spec->heads / (a->spec->kv_heads * a->kv_parts) : d.H / d.K;
    d.group = d.H / d.K;
    d.views = a->kv_parts == 1 && sharing == 1 && c->world->cp.size == 1 && c->slices.count <= 1 && !norms_all(a);
    return d;
}

static SliceKeyShape keys_of(const Attention *a, const Ctx *c)
{
    const Dims d = dims_of(a, c);
    return (SliceKeyShape){ .heads = d.K, .chunks = d.H / d.K / d.query_chunk, .k_cols = d.C, .v_cols = d.C };
}

static const Tensor none;

/* View of `group` heads side by side in each of the K chunks of qkv's columns, behind `before` others. */
static Tensor head_view(const Dims *d, Tensor qkv, int64_t before, int64_t group)
{
    const Tensor from = tensor_col_slice(qkv, before * d->C, d->C);
    Tensor t = tensor_of(from.data, from.dtype, d->N, d->K * group, d->C);
    t.ld = d->columns / d->K;
    t.group = group;
    return t;
}

static Heads heads_in(const Attention *a, const Dims *d, Tensor qkv)
{
    const int64_t g = d->group;
    return (Heads){ head_view(d, qkv, 0, g), head_view(d, qkv, g, 1), head_view(d, qkv, g + 1, 1),
                    a->spec->attention_gate ? head_view(d, qkv, g + 2, g) : none };
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

/* Norms of all heads: room for their rows, q and k. */
typedef struct {
    CutNorm q, k;
} AllNorms;

static Err all_norms_begin(const Attention *a, Ctx *c, const Dims *d, AttentionSave *save, AllNorms *t)
{
    if (!norms_all(a)) return ERR_OK;
    TRY(cut_norm_begin(c, d->N, d->H * d->C, &save->all_q, &t->q));
    return cut_norm_begin(c, d->N, d->kv_cols, &save->all_k, &t->k);
}

/* This rank's columns of qkv, copied: q, its columns of k and v in kv [2, N, ...], and a gate, if any. q and k are
 * those behind the norms of all heads, if there are such. */
static Err split_columns(const Attention *a, Ctx *c, const Dims *d, Tensor qkv, const AllNorms *t, Heads h, Tensor kv)
{
    const Tensor q = heads_as_columns(h.q), k = kv_half(kv, 0);
    TRY(op(c->s, qkv_split, .q = norms_all(a) ? cut_norm_input(c, &t->q, q) : q,
           .k = norms_all(a) ? cut_norm_input(c, &t->k, k) : k, .v = kv_half(kv, 1),
           .gate = h.gate.data ? heads_as_columns(h.gate) : none, .qkv = qkv, .chunks = d->chunks));
    if (!norms_all(a)) return ERR_OK;
    TRY(cut_norm_forward(&a->q_norm, c, &t->q, q));
    return cut_norm_forward(&a->k_norm, c, &t->k, k);
}

/* The same with whole heads of k and v in kv [2, N, K, C]. */
static Err split_heads(const Attention *a, Ctx *c, const Dims *d, Tensor qkv, const AllNorms *t, Heads h, Tensor kv)
{
    ArenaMark mark = arena_mark(c->scratch);
    const int64_t sharing = c->world->kv.size;
    Tensor own, all;
    if (sharing == 1) return split_columns(a, c, d, qkv, t, h, kv);
    TRY(tensor_new(c->scratch, &own, c->dtype, 2, d->N, d->kv_cols));
    TRY(split_columns(a, c, d, qkv, t, h, own));
    TRY(tensor_new(c->scratch, &all, c->dtype, sharing, 2 * d->N, d->kv_cols));
    TRY(comm_all_gather(&c->world->kv, c->s, all, own, NULL));
    TRY(op(c->s, join_columns, .y = tensor_reshape(kv, 2 * d->N, sharing, d->kv_cols), .x = all));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The heads as the projection has left them, or behind the norms of all of them. */
static Err raw_heads(const Attention *a, Ctx *c, const Dims *d, Tensor qkv, AttentionSave *save, Heads *h)
{
    AllNorms norms = { 0 };
    Tensor kv;
    *h = d->views ? heads_in(a, d, qkv) : (Heads){ .gate = none };
    if (d->views) return ERR_OK;
    TRY(save_new(c, REGION_I, &h->q, norms_heads(a) ? &save->q_raw : &save->q, c->dtype, d->N, d->H, d->C));
    TRY(save_new(c, REGION_I, &kv, &save->kv, c->dtype, 2, d->N, d->K, d->C));
    if (a->spec->attention_gate) TRY(save_new(c, REGION_I, &h->gate, &save->gate, c->dtype, d->N, d->H, d->C));
    TRY(all_norms_begin(a, c, d, save, &norms));
    h->k = kv_heads(kv, 0);
    h->v = kv_heads(kv, 1);
    return split_heads(a, c, d, qkv, &norms, *h, kv);
}

static Heads saved_raw_heads(const Attention *a, const Ctx *c, const Dims *d, const AttentionSave *save)
{
    if (d->views) return heads_in(a, d, save_get(c, save->qkv));
    const Tensor kv = save_get(c, save->kv);
    return (Heads){ save_get(c, norms_heads(a) ? save->q_raw : save->q), kv_heads(kv, 0), kv_heads(kv, 1),
                    a->spec->attention_gate ? save_get(c, save->gate) : none };
}

/* q, k, v from the projection: heads, their norms, rotation. */
static Err heads_forward(const Attention *a, Ctx *c, Tensor qkv, const Dims *d, AttentionSave *save, Heads *out)
{
    TRY(raw_heads(a, c, d, qkv, save, out));
    if (norms_heads(a)) {
        const Heads raw = *out;
        TRY(save_new(c, REGION_I, &out->q, &save->q, c->dtype, d->N, d->H, d->C));
        TRY(save_new(c, REGION_I, &out->k, &save->k, c->dtype, d->N, d->K, d->C));
        TRY(norm_forward(&a->q_norm, c, heads_as_rows(raw.q), heads_as_rows(out->q), &save->q_norm));
        TRY(norm_forward(&a->k_norm, c, heads_as_rows(raw.k), heads_as_rows(out->k), &save->k_norm));
    }
    TRY(attention_core_rotate(&a->core, c, out->q, ctx_doc_position(c), 0));
    return attention_core_rotate(&a->core, c, out->k, ctx_doc_position(c), 0);
}

/* Heads as heads_forward has left them. */
static Heads saved_heads(const Attention *a, const Ctx *c, const Dims *d, const AttentionSave *save)
{
    Heads h = saved_raw_heads(a, c, d, save);
    if (norms_heads(a)) h.q = save_get(c, save->q), h.k = save_get(c, save->k);
    return h;
}

static Err attention_forward(const void *own, Ctx *c, Tensor x, Tensor y, void *kept)
{
    const Attention *a = own;
    AttentionSave *save = kept;
    ArenaMark mark = arena_mark(c->scratch);
    Dims d = dims_of(a, c);
    Tensor o, lse, qkv, gated;
    Heads h;
    bool in_scratch = c->into[REGION_I] == c->scratch; /* full recomputation: qkv must outlive the saves */
    TRY(save_new(c, a->spec->attention_gate ? REGION_I : REGION_W, &o, &save->o, c->dtype, d.N, d.H, d.C));
    TRY(save_new(c, REGION_I, &lse, &save->lse, F32, d.B, d.T, d.H));
    if (!in_scratch) mark = arena_mark(c->scratch);
    TRY(save_if(c, d.views, REGION_I, &qkv, &save->qkv, c->dtype, d.N, d.columns));
    TRY(linear_forward(&a->qkv, c, x, qkv));
    TRY(heads_forward(a, c, qkv, &d, save, &h));
    TRY(attend_keep(c, &h, in_scratch));
    TRY(cache_join_heads(c, &h));
    TRY(attention_core_forward(&a->core, c, &h, o, lse));
    TRY(heads_gate_forward(c, o, h.gate, &save->gated, &gated));
    if (!in_scratch) arena_release(c->scratch, mark);
    return linear_forward(&a->proj, c, heads_as_columns(gated), y);
}

/* Gradients of this rank's query heads, and what these heads give to keys and values. */
typedef struct {
    Heads of;    /* as attention_bwd leaves them */
    Tensor kv;   /* copies: k and v, [2, N, K, C] */
    Tensor dqkv; /* [N, columns] */
} HeadGrads;

static Err grads_alloc(const Attention *a, Ctx *c, const Dims *d, HeadGrads *g)
{
    TRY(dy_alloc(c, &g->dqkv, d->N, d->columns));
    g->of = d->views ? heads_in(a, d, g->dqkv) : (Heads){ .gate = none };
    if (!d->views || norms_heads(a)) TRY(tensor_new(c->scratch, &g->of.q, c->dtype, d->N, d->H, d->C));
    if (d->views) return norms_heads(a) ? tensor_new(c->scratch, &g->of.k, c->dtype, d->N, d->K, d->C) : ERR_OK;
    /* in exact runs what several ranks give to a head is not rounded before it is summed */
    const DType sum = c->canon.exact && c->world->kv.size > 1 ? F32 : c->dtype;
    TRY(tensor_new(c->scratch, &g->kv, sum, 2, d->N, d->K, d->C));
    g->of.k = kv_heads(g->kv, 0);
    g->of.v = kv_heads(g->kv, 1);
    return a->spec->attention_gate ? tensor_new(c->scratch, &g->of.gate, c->dtype, d->N, d->H, d->C) : ERR_OK;
}

/* dq and dk become those before the norms of single heads. */
static Err norms_backward(const Attention *a, Ctx *c, const AttentionSave *save, const Dims *d, HeadGrads *g)
{
    const Heads raw = saved_raw_heads(a, c, d, save), dy = g->of;
    if (!norms_heads(a)) return ERR_OK;
    if (d->views) {
        g->of = heads_in(a, d, g->dqkv);
    } else {
        TRY(tensor_new(c->scratch, &g->of.q, c->dtype, d->N, d->H, d->C));
        TRY(tensor_new(c->scratch, &g->of.k, c->dtype, d->N, d->K, d->C));
    }
    TRY(norm_backward_into(&a->q_norm, c, &save->q_norm, heads_as_rows(raw.q), heads_as_rows(dy.q),
                           heads_as_rows(g->of.q)));
    return norm_backward_into(&a->k_norm, c, &save->k_norm, heads_as_rows(raw.k), heads_as_rows(dy.k),
                              heads_as_rows(g->of.k));
}

/* This rank's columns of dq and dk become those before the norms of all heads. */
static Err all_norms_backward(const Attention *a, Ctx *c, const AttentionSave *save, Tensor *dq, Tensor *dk)
{
    const Tensor q = *dq, k = *dk;
    if (!norms_all(a)) return ERR_OK;
    TRY(tensor_new(c->scratch, dq, c->dtype, q.dim[0], q.dim[1]));
    TRY(tensor_new(c->scratch, dk, c->dtype, k.dim[0], k.dim[1]));
    TRY(cut_norm_backward(&a->q_norm, c, &save->all_q, q, *dq));
    return cut_norm_backward(&a->k_norm, c, &save->all_k, k, *dk);
}

/* Over the ranks that share kv heads. */
static Err sum_kv(Ctx *c, HeadGrads *g)
{
    const Tensor sum = g->kv;
    TRY(reduce_values(c, &c->world->kv, sum));
    if (sum.dtype == c->dtype) return ERR_OK;
    TRY(tensor_alloc(c->scratch, &g->kv, c->dtype, sum.ndim, sum.dim));
    g->of.k = kv_heads(g->kv, 0);
    g->of.v = kv_heads(g->kv, 1);
    return cast_values(c, g->kv, sum);
}

/* From what attention_bwd has left to dqkv. */
static Err heads_backward(const Attention *a, Ctx *c, const AttentionSave *save, const Dims *d, HeadGrads *g)
{
    const int64_t first = d->kv_cols * c->world->kv.rank;
    if (!d->views) TRY(sum_kv(c, g));
    TRY(attention_core_rotate(&a->core, c, g->of.q, ctx_doc_position(c), 1));
    TRY(attention_core_rotate(&a->core, c, g->of.k, ctx_doc_position(c), 1));
    TRY(norms_backward(a, c, save, d, g));
    if (d->views) return ERR_OK;
    Tensor dq = heads_as_columns(g->of.q), dk = tensor_col_slice(heads_as_columns(g->of.k), first, d->kv_cols);
    TRY(all_norms_backward(a, c, save, &dq, &dk));
    return op(c->s, qkv_merge, .qkv = g->dqkv, .q = dq, .k = dk,
              .v = tensor_col_slice(heads_as_columns(g->of.v), first, d->kv_cols),
              .gate = a->spec->attention_gate ? heads_as_columns(g->of.gate) : none, .chunks = d->chunks);
}

static Err attention_backward(const void *own, Ctx *c, const void *kept, Tensor x, Tensor dy, Tensor dx)
{
    const Attention *a = own;
    const AttentionSave *save = kept;
    ArenaMark mark = arena_mark(c->scratch);
    Dims d = dims_of(a, c);
    const Heads h = saved_heads(a, c, &d, save);
    Tensor o = save_get(c, save->o), gated = a->spec->attention_gate ? save_get(c, save->gated) : o, go, delta;
    HeadGrads g;
    TRY(grads_alloc(a, c, &d, &g));
    TRY(tensor_new(c->scratch, &go, c->dtype, d.N, d.H, d.C));
    TRY(tensor_new(c->scratch, &delta, F32, d.B, d.T, d.H));
    TRY(linear_backward(&a->proj, c, heads_as_columns(gated), dy, heads_as_columns(go)));
    TRY(heads_gate_backward(c, go, g.of.gate, o, h.gate));
    TRY(attention_core_backward(&a->core, c, &h, &(AttendSave){ o, go, save_get(c, save->lse), delta, d.query_chunk },
                                &g.of));
    TRY(heads_backward(a, c, save, &d, &g));
    TRY(linear_backward(&a->qkv, c, x, g.dqkv, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the kind ---- */

static int attention_bias(const void *own) { return ((const Attention *)own)->proj.bias; }

/* Wqkv with the gate, Wproj. */
static int64_t attention_flop(const ModelSpec *s)
{
    return 2 * s->hidden * ((2 + s->attention_gate) * s->heads + 2 * s->kv_heads) * s->head_dim;
}

static int64_t attention_pair_flop(const ModelSpec *s) { return 4 * (int64_t)s->heads * s->head_dim; }

static Err attention_cache(const void *own, DType dtype, void *cache, Arena *state)
{
    const ModelSpec *s = ((const Attention *)own)->spec;
    return cache_new(s, (KvShape){ s->kv_heads, s->head_dim, s->head_dim }, dtype, cache, state);
}

static Err attention_grads(const void *own, const Ctx *c, void *grads, Arena *state)
{
    return slice_grads_init(c, keys_of(own, c), grads, state);
}

const LayerKind attention_kind = { .name = "attn",
                                   .own_bytes = sizeof(Attention),
                                   .save_bytes = sizeof(AttentionSave),
                                   .linears = 2,
                                   .add = attention_add,
                                   .forward = attention_forward,
                                   .backward = attention_backward,
                                   .residual_bias = attention_bias,
                                   .flop = attention_flop,
                                   .pair_flop = attention_pair_flop,
                                   .score_heads = attention_score_heads,
                                   .carry = { .ways = ATTENTION_WAYS,
                                              .cache_bytes = sizeof(KvCache),
                                              .kept_bytes = sizeof(SliceKeys),
                                              .grads_bytes = sizeof(SliceGrads),
                                              .cache = attention_cache,
                                              .grads = attention_grads } };
