/*
 * Multi-head latent attention: keys and values of all heads are made of one narrow latent a row, and the part of the
 * key that has positions is shared by all heads. Heads are cut over tp; the latents are whole on each rank.
 *
 *   c    = norm(x Wq_a)                    [R, q_rank]; without q_rank queries are made of x itself
 *   q    = c Wq                            a head: [nope | rope columns], the last rotated
 *   l, p = x Wkv_a                         [R, kv_rank], [R, rope]; l is normed, p rotated
 *   k, v = norm(l) Wkv_b                   a head: [nope | value columns]; k is [nope | p]
 *   o    = attention(q, k, v)              scores q k / sqrt(nope + rope), times what YaRN asks for
 *   o    = o * sigmoid(x Wgate)            optional
 *   y    = o Wproj                         with biases Wq_a, Wkv_a, Wgate and Wproj have one
 *
 *   rows      x --Wq_a, Wkv_a--> latents, R rows of a rank --norm--> --gather--> N rows --Wq, Wkv_b--> own heads
 *   backward  dp is summed over own heads, a tree over canonical chunks of them, and over ranks: the rest of the tree
 *
 * Kept for backward: both latents and their norms, q, k, v, o and the log-sum-exp, a gate and what it leaves of o.
 * Selective recomputation leaves out what is made of the latents: norms, q, k and v.
 *
 * Generation keeps norm(l) and the rotated p of earlier positions side by side, kv_rank + rope numbers a row. A token
 * behind others meets these themselves: Wkv_b is absorbed into its queries and into what they give (docs/attention.md).
 *
 * Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
 */
#include <math.h>
#include <stdio.h>

#include "layer/attend.h"

/*
 * Parameters:
 *
 *   q_a [q_rank, D]      q_a_norm [q_rank]   q_b [H * (nope + rope), q_rank]; or q [H * (nope + rope), D] alone
 *   kv_a [kv_rank + rope, D]   kv_a_norm [kv_rank]   kv_b [H * (nope + value), kv_rank]   proj [D, H * value]
 *   gate [H * value, D], if there is one: the heads' outputs are multiplied by its sigmoid
 *
 * Biases, if the model has them, belong to q_a, kv_a, gate and proj (which the residual add applies). The products
 * that give the heads' queries, keys and values have none, as in the published code.
 */
typedef struct {
    const ModelSpec *spec;
    AttentionCore core;
    Linear q_a, q, kv_a, kv_b, gate, proj; /* q reads the latent, or the row if there is no q_a */
    Norm q_norm, kv_norm;
    int64_t head_chunk; /* heads in a canonical chunk */
} Mla;

/* With selective recomputation q_latent, kv_latent, q, k and v are not kept. */
typedef struct {
    Saved q_a, kv_a;           /* latents before their norms; behind kv_a's the shared part of the key */
    Saved q_latent, kv_latent; /* latents behind their norms */
    Saved q, k, v, o, lse;
    Saved gate, gated; /* the gate, and o multiplied by it, if there is one */
    NormSave q_norm, kv_norm;
} MlaSave;

/* ---- registration ---- */

static Err add_norm(ParamRegistry *reg, const ModelSpec *s, const char *owner, const char *what, int64_t width, Norm *n)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", owner, what);
    const float eps = s->latent.norm_eps > 0 ? s->latent.norm_eps : s->norm_eps;
    return norm_register(n, reg, name, width, NORM_RMS, eps, PARTIAL_ROWS);
}

/* tp_blocks must divide the number of heads. */
static Err mla_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    Mla *m = own;
    const MlaWidths w = s->latent.width;
    const int64_t D = s->hidden, H = s->heads;
    const bool bias = model_qkv_bias(s); /* (a projection's own choice is refused, config.def) */
    const float std = model_hidden_std(s);
    LinearSpec q_a = { name, "q_a", D, w.q_rank, LINEAR_WHOLE, bias, std };
    const int64_t rows = s->head_dim;
    const int64_t pair = w.nope + w.value; /* of a head: its own part of the key, and the value */
    const QkRows queries = { rows, { w.nope, w.rope }, { QK_QUERY, QK_SHARED }, 1, 1 };
    const QkRows keys = { pair, { w.nope, 0 }, { QK_KEY, QK_KEY }, 1, 1 };
    LinearSpec q_b = { name, "q_b", w.q_rank, H * rows, LINEAR_COLUMN, false, std, .head_rows = { rows } };
    LinearSpec q = { name, "q", D, H * rows, LINEAR_COLUMN, false, std, .head_rows = { rows } };
    LinearSpec kv_a = { name, "kv_a", D, w.kv_rank + w.rope, LINEAR_WHOLE, bias, std };
    LinearSpec kv_b = { name, "kv_b", w.kv_rank, H * pair, LINEAR_COLUMN, false, std, .head_rows = { pair } };
    LinearSpec gate = { name, "gate", D, H * w.value, LINEAR_COLUMN, bias, std, .head_rows = { w.value } };
    LinearSpec proj = { name, "proj", H * w.value, D, LINEAR_ROW, bias, model_projection_std(s) };
    *m = (Mla){ .spec = s,
                .core = attention_core(s, name, layer, model_attention_scale(s, s->latent.scale)),
                .head_chunk = s->heads / s->tp_blocks };
    q_b.qk = q.qk = queries;
    kv_b.qk = keys;
    q_b.block = q.block = kv_b.block = layer;
    q_a.fp8 = q_b.fp8 = q.fp8 = kv_a.fp8 = kv_b.fp8 = gate.fp8 = proj.fp8 = model_fp8(s, layer);
    ASSERT(w.kv_rank > 0 && s->heads % s->tp_blocks == 0);
    if (w.q_rank) TRY(linear_register(&m->q_a, reg, q_a));
    if (w.q_rank) TRY(add_norm(reg, s, name, "q_a_norm", w.q_rank, &m->q_norm));
    TRY(linear_register(&m->q, reg, w.q_rank ? q_b : q));
    TRY(linear_register(&m->kv_a, reg, kv_a));
    TRY(add_norm(reg, s, name, "kv_a_norm", w.kv_rank, &m->kv_norm));
    TRY(linear_register(&m->kv_b, reg, kv_b));
    TRY(attention_core_sinks(&m->core, reg, name));
    if (s->attention_gate) TRY(linear_register(&m->gate, reg, gate));
    return linear_register(&m->proj, reg, proj);
}

/* ---- what both directions share ---- */

/* One call, and its local sizes. */
typedef struct {
    const Mla *m;
    Ctx *c;
    const MlaSave *save;
    MlaWidths w;
    int64_t B, T, N, R, H;
    int64_t key; /* columns of a head's queries and keys */
} Call;

static Call call_of(const Mla *m, Ctx *c, const MlaSave *save)
{
    const int64_t B = c->batch->B, T = c->batch->T;
    return (Call){ .m = m,
                   .c = c,
                   .save = save,
                   .w = m->spec->latent.width,
                   .B = B,
                   .T = T,
                   .N = B * T,
                   .R = ctx_rows(c),
                   .H = m->spec->heads / c->world->tp.size,
                   .key = m->spec->head_dim };
}

static Tensor one_head(Tensor t) /* [N, C] -> [N, 1, C], of the same rows */
{
    return (Tensor){ .data = t.data, .dim = { t.dim[0], 1, t.dim[1] }, .ld = t.ld, .ndim = 3, .dtype = t.dtype };
}

static Tensor latent_of(const Call *k, Tensor kv_a) { return tensor_col_slice(kv_a, 0, k->w.kv_rank); }

static Tensor shared_of(const Call *k, Tensor kv_a) { return tensor_col_slice(kv_a, k->w.kv_rank, k->w.rope); }

/* The last columns of each head. */
static Err rotate_queries(const Call *k, Tensor q, int inverse)
{
    q.data = (char *)q.data + k->w.nope * dtype_size(q.dtype);
    q.dim[2] = k->w.rope;
    return attention_core_rotate(&k->m->core, k->c, q, ctx_doc_position(k->c), inverse);
}

/* The shared part of the keys of this rank's rows. */
static Err rotate_shared(const Call *k, Tensor p, int inverse)
{
    const Tensor position = ctx_row_slice(k->c, ctx_doc_position(k->c));
    return attention_core_rotate(&k->m->core, k->c, one_head(p), position, inverse);
}

/* ---- forward ---- */

/* Latents of this rank's rows behind their norms, and the rotated part of the key. */
typedef struct {
    Tensor q, kv;  /* [R, q_rank], or without one the rows themselves; [R, kv_rank] */
    Tensor shared; /* [R, rope] */
} Latents;

/* Are heads, made from the latents, kept for backward? With recomputation they are made again. */
static bool keeps(const Call *k) { return !ctx_recomputes(k->c, k->m->spec); }

/* k and v have `keys` rows: more than the batch's own where earlier ones are kept. */
static Err heads_alloc(const Call *k, int64_t keys, MlaSave *save, Heads *h)
{
    Ctx *c = k->c;
    TRY(save_if(c, keeps(k), REGION_I, &h->q, &save->q, c->dtype, k->N, k->H, k->key));
    TRY(save_if(c, keeps(k), REGION_I, &h->k, &save->k, c->dtype, keys, k->H, k->key));
    return save_if(c, keeps(k), REGION_I, &h->v, &save->v, c->dtype, keys, k->H, k->w.value);
}

/* The rotated part of the key, in scratch. */
static Err shared_key(const Call *k, Tensor kv_a, Tensor *shared)
{
    TRY(tensor_new(k->c->scratch, shared, k->c->dtype, k->R, k->w.rope));
    TRY(copy_rows(k->c, *shared, shared_of(k, kv_a)));
    return rotate_shared(k, *shared, 0);
}

static Err latents_forward(const Call *k, Tensor x, MlaSave *save, Latents *out)
{
    const Mla *m = k->m;
    Ctx *c = k->c;
    Tensor q_a, kv_a;
    out->q = x;
    if (k->w.q_rank) {
        TRY(save_new(c, REGION_I, &q_a, &save->q_a, c->dtype, k->R, k->w.q_rank));
        TRY(linear_forward(&m->q_a, c, x, q_a));
        TRY(save_if(c, keeps(k), REGION_W, &out->q, &save->q_latent, c->dtype, k->R, k->w.q_rank));
        TRY(norm_forward(&m->q_norm, c, q_a, out->q, &save->q_norm));
    }
    TRY(save_new(c, REGION_I, &kv_a, &save->kv_a, c->dtype, k->R, k->w.kv_rank + k->w.rope));
    TRY(linear_forward(&m->kv_a, c, x, kv_a));
    TRY(save_if(c, keeps(k), REGION_W, &out->kv, &save->kv_latent, c->dtype, k->R, k->w.kv_rank));
    TRY(norm_forward(&m->kv_norm, c, latent_of(k, kv_a), out->kv, &save->kv_norm));
    return shared_key(k, kv_a, &out->shared);
}

static Err make_heads(const Call *k, const Latents *from, Heads h)
{
    const Mla *m = k->m;
    Ctx *c = k->c;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor kv, shared;
    TRY(linear_forward(&m->q, c, from->q, heads_as_columns(h.q)));
    TRY(rotate_queries(k, h.q, 0));
    TRY(tensor_new(c->scratch, &kv, c->dtype, h.k.dim[0], k->H, k->w.nope + k->w.value));
    TRY(linear_forward(&m->kv_b, c, from->kv, heads_as_columns(kv)));
    TRY(gather_rows(c, from->shared, &shared));
    TRY(op(c->s, mla_split, .k = h.k, .v = h.v, .kv = kv, .pe = shared));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* From the latents, o and its log-sum-exp. */
static Err split_forward(const Call *k, const Latents *t, MlaSave *save, Tensor o, Tensor lse)
{
    Ctx *c = k->c;
    const bool passes = !keeps(k) || c->into[REGION_I] == c->scratch;
    Heads h;
    TRY(heads_alloc(k, c->block.cache ? t->kv.dim[0] : k->N, save, &h));
    TRY(make_heads(k, t, h));
    if (!c->block.cache) TRY(attend_keep(c, &h, passes));
    return attention_core_forward(&k->m->core, c, &h, o, lse);
}

/* ---- generation ---- */

/* Latents and shared keys of the batch's rows go into the cache; those of all rows so far come from it. */
static Err join_cached(const Call *k, Latents *t)
{
    Ctx *c = k->c;
    const MlaWidths w = k->w;
    Tensor all;
    const KvCache *cache = c->block.cache;
    if (!cache) return ERR_OK;
    const Tensor kept = tensor_reshape(cache->k, cache->k.dim[1], w.kv_rank + w.rope);
    TRY(cache_join(c, latent_of(k, kept), t->kv, 1, &all));
    t->kv = all;
    TRY(cache_join(c, shared_of(k, kept), t->shared, 1, &all));
    t->shared = all;
    return ERR_OK;
}

/*
 * One row behind others. To make keys and values of all of them for it would cost kv_rank (nope + value) products a
 * head and earlier row, where the wider dot products cost about 2 kv_rank. Of many rows at once each would pay those.
 */
static bool absorbs(const Call *k)
{
    return k->c->block.cache && k->m->spec->latent.absorb && k->T == 1 && k->c->batch->span.first[0] > 0;
}

/* The rows of Wkv_b that make head h's own part of the key; and those that make its values. */
static Tensor key_rows(const Call *k, Tensor kv_b, int64_t h)
{
    const MlaWidths w = k->w;
    return tensor_row_slice(kv_b, h * (w.nope + w.value), w.nope);
}

static Tensor value_rows(const Call *k, Tensor kv_b, int64_t h)
{
    const MlaWidths w = k->w;
    return tensor_row_slice(kv_b, h * (w.nope + w.value) + w.nope, w.value);
}

/* Queries across the latent and the shared part of the key: a head's [Wk^T a | R b] for its columns [a | b]. */
static Err queries_absorbed(const Call *k, Tensor latent, Tensor kv_b, Tensor across)
{
    const Mla *m = k->m;
    const MlaWidths w = k->w;
    const int64_t wide = w.kv_rank + w.rope;
    Ctx *c = k->c;
    Tensor q;
    TRY(tensor_new(c->scratch, &q, c->dtype, k->N, k->H, k->key));
    TRY(linear_forward(&m->q, c, latent, heads_as_columns(q)));
    TRY(rotate_queries(k, q, 0));
    q = heads_as_columns(q);
    across = heads_as_columns(across);
    for (int64_t h = 0; h < k->H; h++) {
        TRY(op(c->s, linear_dx, .dx = tensor_col_slice(across, h * wide, w.kv_rank),
               .dy = tensor_col_slice(q, h * k->key, w.nope), .w = key_rows(k, kv_b, h), .leaf = w.nope));
        TRY(copy_rows(c, tensor_col_slice(across, h * wide + w.kv_rank, w.rope),
                      tensor_col_slice(q, h * k->key + w.nope, w.rope)));
    }
    return ERR_OK;
}

/* o and its log-sum-exp of one row whose latents t are the last in the cache: all heads have one key, the cached row,
 * and one value, its latent. Wkv_b makes each head's own values from the result. */
static Err absorbed_forward(const Call *k, const Latents *t, Tensor o, Tensor lse)
{
    Ctx *c = k->c;
    const MlaWidths w = k->w;
    const Tensor kv_b = param_value(c, k->m->kv_b.weight);
    const Tensor values = one_head(t->kv);
    Tensor across, mixed, keys = values;
    keys.dim[2] = w.kv_rank + w.rope;
    TRY(tensor_new(c->scratch, &across, c->dtype, k->N, k->H, w.kv_rank + w.rope));
    TRY(tensor_new(c->scratch, &mixed, c->dtype, k->N, k->H, w.kv_rank));
    TRY(queries_absorbed(k, t->q, kv_b, across));
    TRY(attention_core_forward(&k->m->core, c, &(Heads){ .q = across, .k = keys, .v = values }, mixed, lse));
    for (int64_t h = 0; h < k->H; h++)
        TRY(op(c->s, linear_fwd, .y = tensor_col_slice(heads_as_columns(o), h * w.value, w.value),
               .x = tensor_col_slice(heads_as_columns(mixed), h * w.kv_rank, w.kv_rank), .w = value_rows(k, kv_b, h),
               .leaf = whole_leaf(w.kv_rank)));
    return ERR_OK;
}

/* ---- forward, of either kind ---- */

/* o under the gate, which is made of x; without one itself. */
static Err gate_outputs(const Call *k, Tensor x, MlaSave *save, Tensor o, Tensor *gated)
{
    const Mla *m = k->m;
    Ctx *c = k->c;
    Tensor gate = { 0 };
    if (m->spec->attention_gate) {
        TRY(save_new(c, REGION_I, &gate, &save->gate, c->dtype, k->N, k->H, k->w.value));
        TRY(linear_forward(&m->gate, c, x, heads_as_columns(gate)));
    }
    return heads_gate_forward(c, o, gate, &save->gated, gated);
}

/* With absorb, a row that is computed alone behind cached ones rounds differently than the same row among many. */
static Err mla_forward(const void *own, Ctx *c, Tensor x, Tensor y, void *kept)
{
    const Mla *m = own;
    MlaSave *save = kept;
    ArenaMark mark = arena_mark(c->scratch);
    const Call k = call_of(m, c, save);
    const bool in_scratch = c->into[REGION_I] == c->scratch; /* full recomputation: the saves stay there */
    Latents t;
    Tensor o, lse, gated;
    TRY(save_new(c, m->spec->attention_gate ? REGION_I : REGION_W, &o, &save->o, c->dtype, k.N, k.H, k.w.value));
    TRY(save_new(c, REGION_I, &lse, &save->lse, F32, k.B, k.T, k.H));
    TRY(latents_forward(&k, x, save, &t));
    TRY(join_cached(&k, &t));
    TRY(absorbs(&k) ? absorbed_forward(&k, &t, o, lse) : split_forward(&k, &t, save, o, lse));
    if (!in_scratch) arena_release(c->scratch, mark);
    TRY(gate_outputs(&k, x, save, o, &gated));
    return linear_forward(&m->proj, c, heads_as_columns(gated), y);
}

/* ---- backward ---- */

/* With recomputation what forward did not keep: heads in scratch, latents where a later W finds them. */
static Err made_again(const Call *k, Latents *t, Heads *h)
{
    const Mla *m = k->m;
    Ctx *c = k->c;
    const Tensor kv_a = save_get(c, k->save->kv_a);
    MlaSave unused;
    if (k->w.q_rank) {
        TRY(dy_alloc(c, &t->q, k->R, k->w.q_rank));
        TRY(norm_again(&m->q_norm, c, save_get(c, k->save->q_a), t->q));
    }
    TRY(dy_alloc(c, &t->kv, k->R, k->w.kv_rank));
    TRY(norm_again(&m->kv_norm, c, latent_of(k, kv_a), t->kv));
    TRY(shared_key(k, kv_a, &t->shared));
    TRY(heads_alloc(k, k->N, &unused, h));
    return make_heads(k, t, *h);
}

static Err made(const Call *k, Tensor x, Latents *t, Heads *h)
{
    const MlaSave *s = k->save;
    *t = (Latents){ .q = x };
    if (ctx_recomputes(k->c, k->m->spec)) return made_again(k, t, h);
    if (k->w.q_rank) t->q = save_get(k->c, s->q_latent);
    t->kv = save_get(k->c, s->kv_latent);
    *h = (Heads){ .q = save_get(k->c, s->q), .k = save_get(k->c, s->k), .v = save_get(k->c, s->v) };
    return ERR_OK;
}

/* From go, the gradient of o, those of q, k and v, and of the sinks. */
static Err scores_backward(const Call *k, Tensor go, const Heads *h, const Heads *d)
{
    Ctx *c = k->c;
    AttendSave s = { .o = save_get(c, k->save->o), .go = go, .lse = save_get(c, k->save->lse), .chunk = 1 };
    TRY(tensor_new(c->scratch, &s.delta, F32, k->B, k->T, k->H));
    return attention_core_backward(&k->m->core, c, h, &s, d);
}

/* dx from the gradients of keys and values. partial: that of the shared part of all rows' keys, for own heads. */
static Err keys_backward(const Call *k, Tensor x, Tensor latent, Heads d, Tensor dx)
{
    const Mla *m = k->m;
    const MlaWidths w = k->w;
    Ctx *c = k->c;
    Tensor dkv, dkv_a, dlatent, dshared, partial;
    TRY(dy_alloc(c, &dkv, k->N, k->H * (w.nope + w.value)));
    TRY(dy_alloc(c, &dkv_a, k->R, w.kv_rank + w.rope));
    TRY(tensor_new(c->scratch, &dlatent, c->dtype, k->R, w.kv_rank));
    TRY(tensor_new(c->scratch, &dshared, c->dtype, k->R, w.rope));
    TRY(product_alloc(c, dshared, &partial));
    TRY(op(c->s, mla_merge, .kv = tensor_reshape(dkv, k->N, k->H, w.nope + w.value), .pe = partial, .k = d.k, .v = d.v,
           .chunk = c->canon.exact ? m->head_chunk : k->H));
    TRY(reduce_rows(c, partial, dshared));
    TRY(rotate_shared(k, dshared, 1));
    TRY(copy_rows(c, shared_of(k, dkv_a), dshared));
    TRY(linear_backward(&m->kv_b, c, latent, dkv, dlatent));
    TRY(norm_backward_into(&m->kv_norm, c, &k->save->kv_norm, latent_of(k, save_get(c, k->save->kv_a)), dlatent,
                           latent_of(k, dkv_a)));
    return linear_backward(&m->kv_a, c, x, dkv_a, dx);
}

/* dx from the gradient of queries [N, H * key], which comes from dy_alloc. */
static Err queries_backward(const Call *k, Tensor x, Tensor latent, Tensor dq, Tensor dx)
{
    const Mla *m = k->m;
    Ctx *c = k->c;
    Tensor dlatent, dq_a;
    if (!k->w.q_rank) return linear_backward(&m->q, c, x, dq, dx);
    TRY(tensor_new(c->scratch, &dlatent, c->dtype, k->R, k->w.q_rank));
    TRY(dy_alloc(c, &dq_a, k->R, k->w.q_rank));
    TRY(linear_backward(&m->q, c, latent, dq, dlatent));
    TRY(norm_backward_into(&m->q_norm, c, &k->save->q_norm, save_get(c, k->save->q_a), dlatent, dq_a));
    return linear_backward(&m->q_a, c, x, dq_a, dx);
}

/* go [N, H, value] from dy, and the gradient of the gate, [N, H * value], if there is one. */
static Err outputs_backward(const Call *k, Tensor dy, Tensor go, Tensor *dgate)
{
    const Mla *m = k->m;
    Ctx *c = k->c;
    const Tensor o = save_get(c, k->save->o);
    if (!m->spec->attention_gate) return linear_backward(&m->proj, c, heads_as_columns(o), dy, heads_as_columns(go));
    TRY(dy_alloc(c, dgate, k->N, k->H * k->w.value));
    TRY(linear_backward(&m->proj, c, heads_as_columns(save_get(c, k->save->gated)), dy, heads_as_columns(go)));
    return heads_gate_backward(c, go, tensor_reshape(*dgate, k->N, k->H, k->w.value), o, save_get(c, k->save->gate));
}

static Err mla_backward(const void *own, Ctx *c, const void *save, Tensor x, Tensor dy, Tensor dx)
{
    const Mla *m = own;
    ArenaMark mark = arena_mark(c->scratch);
    const Call k = call_of(m, c, save);
    Tensor go, dq, dgate, through;
    Latents t;
    Heads h, d;
    TRY(dy_alloc(c, &dq, k.N, k.H * k.key));
    TRY(made(&k, x, &t, &h));
    d.q = tensor_reshape(dq, k.N, k.H, k.key);
    TRY(tensor_new(c->scratch, &d.k, c->dtype, k.N, k.H, k.key));
    TRY(tensor_new(c->scratch, &d.v, c->dtype, k.N, k.H, k.w.value));
    TRY(tensor_new(c->scratch, &go, c->dtype, k.N, k.H, k.w.value));
    TRY(tensor_new(c->scratch, &through, c->dtype, dx.dim[0], dx.dim[1]));
    TRY(outputs_backward(&k, dy, go, &dgate));
    TRY(scores_backward(&k, go, &h, &d));
    TRY(rotate_queries(&k, d.q, 1));
    TRY(keys_backward(&k, x, t.kv, d, dx));
    TRY(queries_backward(&k, x, t.q, dq, through));
    TRY(add_rows(c, dx, through));
    if (m->spec->attention_gate) {
        TRY(linear_backward(&m->gate, c, x, dgate, through));
        TRY(add_rows(c, dx, through));
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the kind ---- */

static int mla_bias(const void *own) { return ((const Mla *)own)->proj.bias; }

static int64_t mla_flop(const ModelSpec *s)
{
    const MlaWidths w = s->latent.width;
    const int64_t D = s->hidden, queries = (int64_t)s->heads * s->head_dim;
    const int64_t q = w.q_rank ? w.q_rank * (D + queries) : D * queries;
    const int64_t kv = D * (w.kv_rank + w.rope) + w.kv_rank * s->heads * (w.nope + w.value);
    return 2 * (q + kv + (1 + s->attention_gate) * s->heads * w.value * D);
}

static int64_t mla_pair_flop(const ModelSpec *s) { return 2 * s->heads * (s->head_dim + s->latent.width.value); }

static Err mla_cache(const void *own, DType dtype, void *cache, Arena *state)
{
    const ModelSpec *s = ((const Mla *)own)->spec;
    return cache_new(s, (KvShape){ 1, s->latent.width.kv_rank + s->latent.width.rope, 0 }, dtype, cache, state);
}

static Err mla_grads(const void *own, const Ctx *c, void *grads, Arena *state)
{
    const ModelSpec *s = ((const Mla *)own)->spec;
    const SliceKeyShape keys = {
        .heads = s->heads / c->world->tp.size, .chunks = 1, .k_cols = s->head_dim, .v_cols = s->latent.width.value
    };
    return slice_grads_init(c, keys, grads, state);
}

const LayerKind mla_kind = { .name = "attn",
                             .own_bytes = sizeof(Mla),
                             .save_bytes = sizeof(MlaSave),
                             .linears = 6,
                             .sums_own_rows = true,
                             .add = mla_add,
                             .forward = mla_forward,
                             .backward = mla_backward,
                             .residual_bias = mla_bias,
                             .flop = mla_flop,
                             .pair_flop = mla_pair_flop,
                             .score_heads = attention_score_heads,
                             .carry = { .ways = ATTENTION_WAYS,
                                        .cache_bytes = sizeof(KvCache),
                                        .kept_bytes = sizeof(SliceKeys),
                                        .grads_bytes = sizeof(SliceGrads),
                                        .cache = mla_cache,
                                        .grads = mla_grads } };
