/*
 * Stages: registration, forward, backward; see model.h.
 *
 * Segments of a slot: 0 = the embedding's output (or the incoming boundary), 1 + i = block i and its output,
 * layer_count + 1 = final norm and head. The output of a block lies at the start of its successor's turn, at
 * the end of its own segment; that of the last one, without a head, in the outgoing boundary.
 */
#include "model/model.h"

/* whole: the head, if it reads the table, too, is in the same registry. */
static EmbeddingSpec embedding_spec(const ModelSpec *spec, bool whole)
{
    return (EmbeddingSpec){ .vocab = spec->vocab,
                            .padded_vocab = spec->padded_vocab,
                            .hidden = spec->hidden,
                            .seq = spec->seq,
                            .learned_positions = spec->learned_positions,
                            .shared = spec->tied && !whole,
                            .std = spec->init_std,
                            .dropout = spec->dropout,
                            .seed = spec->seed };
}

StageShare stage_whole(const ModelSpec *spec) { return (StageShare){ 0, spec->layers, true, true }; }

/* The table of tied embeddings in a registry without the embedding: the head's own copy. */
static Err register_table_copy(const ModelSpec *spec, ParamRegistry *reg, int *id)
{
    const EmbeddingSpec table = embedding_spec(spec, false);
    return param_add(reg, embedding_table(&table, PARAM_COPY), id);
}

static Err register_head(Stage *st, ParamRegistry *reg, const ModelSpec *spec)
{
    int table = -1;
    TRY(norm_register(&st->final_norm, reg, "final_norm", spec->hidden, spec->rms, spec->norm_eps,
                      PARTIAL_ROWS));
    if (spec->tied) {
        table = param_find(reg, EMBEDDING_TABLE);
        if (table < 0) TRY(register_table_copy(spec, reg, &table));
    }
    return head_register(&st->head, reg, table, spec->vocab, spec->padded_vocab, spec->hidden,
                         spec->init_std);
}

Err stages_register(Stage *st, const StageShare *shares, int count, ParamRegistry *reg, const ModelSpec *spec,
                    SetupArena *setup)
{
    bool embedding = false, head = false;
    for (int i = 0; i < count; i++) embedding |= shares[i].embedding, head |= shares[i].head;
    for (int i = 0; i < count; i++, st++) {
        *st = (Stage){ .spec = *spec, .share = shares[i] };
        const int layers = st->share.layer_count;
        if (st->share.embedding)
            TRY(embedding_register(&st->embedding, reg, embedding_spec(spec, embedding && head)));
        TRY(setup_array(setup, layers, &st->blocks));
        for (int b = 0; b < layers; b++) {
            TRY(block_register(&st->blocks[b], reg, spec, st->share.first_layer + b));
            st->blocks[b].moe.block = b;
        }
        if (st->share.head) TRY(register_head(st, reg, spec));
    }
    return ERR_OK;
}

Err stage_save_init(const Stage *st, StageSave *save, SetupArena *setup)
{
    *save = (StageSave){ 0 };
    TRY(setup_array(setup, st->share.layer_count + 1, &save->x));
    return setup_array(setup, st->share.layer_count, &save->blocks);
}

int stage_segments(const Stage *st) { return st->share.layer_count + 2; }

int stage_linears(const Stage *st)
{
    int linears = 1; /* the head */
    for (int i = 0; i < st->share.layer_count; i++)
        linears += (st->blocks[i].latent ? MLA_LINEARS : 2) + (st->blocks[i].mixture ? MOE_LINEARS : 2);
    return linears;
}

/* Saves go to scratch until the end of the scope: nothing of the forward is kept, or it is made again. */
static void saves_to_scratch(Ctx *c, Arena *kept[REGION_COUNT])
{
    for (int r = 0; r < REGION_COUNT; r++) {
        kept[r] = c->into[r];
        c->into[r] = c->scratch;
    }
}

static void saves_restored(Ctx *c, Arena *const kept[REGION_COUNT])
{
    for (int r = 0; r < REGION_COUNT; r++) c->into[r] = kept[r];
}

/* Where the input of block i (at the end, of the head) goes: kept for backward, or to the boundary. */
static Err stream_alloc(const Stage *st, Ctx *c, StageSave *save, int i, const Boundary *out, Tensor *x)
{
    if (i < st->share.layer_count || st->share.head)
        return save_new(c, REGION_I, x, &save->x[i], c->dtype, ctx_rows(c), st->spec.hidden);
    *x = out->t[0];
    return ERR_OK;
}

/* One block; its output is the last thing of its segment. Under full recomputation only the output stays. */
static Err run_block(const Stage *st, Ctx *c, StageSave *save, int i, const Boundary *out)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor x = save_get(c, save->x[i]), y;
    segment_begin(c, 1 + i);
    TRY(stream_alloc(st, c, save, i + 1, out, &y));
    if (st->spec.recompute != RECOMPUTE_FULL) {
        TRY(block_forward(&st->blocks[i], c, x, &save->blocks[i], y));
        segment_end(c);
    } else {
        Arena *kept[REGION_COUNT];
        segment_end(c);
        saves_to_scratch(c, kept);
        TRY(block_forward(&st->blocks[i], c, x, &save->blocks[i], y));
        saves_restored(c, kept);
    }
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err run_input(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, const Boundary *out)
{
    Tensor x;
    segment_begin(c, 0);
    TRY(stream_alloc(st, c, save, 0, out, &x));
    if (st->share.embedding) TRY(embedding_forward(&st->embedding, c, x));
    else TRY(device_copy(c->s, x.data, in->t[0].data, tensor_bytes(x)));
    segment_end(c);
    return ERR_OK;
}

static Err run_final_norm(const Stage *st, Ctx *c, StageSave *save, Tensor *out)
{
    Tensor x = save_get(c, save->x[st->share.layer_count]);
    segment_begin(c, st->share.layer_count + 1);
    TRY(save_new(c, REGION_W, out, &save->final_out, c->dtype, x.dim[0], x.dim[1]));
    return norm_forward(&st->final_norm, c, x, *out, &save->final_norm);
}

Err stage_forward(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, const Boundary *out,
                  Tensor sums)
{
    Tensor final_out;
    TRY(run_input(st, c, save, in, out));
    for (int i = 0; i < st->share.layer_count; i++) TRY(run_block(st, c, save, i, out));
    if (!st->share.head) return ERR_OK;
    TRY(run_final_norm(st, c, save, &final_out));
    TRY(head_forward(&st->head, c, final_out, sums, &save->head));
    segment_end(c);
    return ERR_OK;
}

/* Full recomputation: the block's forward once more, into scratch, then its backward from there. */
static Err backward_block(const Stage *st, Ctx *c, StageSave *save, int i, Tensor d)
{
    const Block *b = &st->blocks[i];
    Tensor x = save_get(c, save->x[i]), y;
    if (st->spec.recompute != RECOMPUTE_FULL) return block_backward(b, c, &save->blocks[i], x, d);
    ArenaMark mark = arena_mark(c->scratch);
    Arena *kept[REGION_COUNT];
    Segment *g = &c->slot->segments[1 + i], saved_segment = *g;
    bool split = c->split_backward;
    saves_to_scratch(c, kept);
    c->split_backward = false; /* its W must follow at once: the inputs live in scratch */
    segment_begin(c, 1 + i);
    TRY(tensor_new(c->scratch, &y, c->dtype, x.dim[0], x.dim[1]));
    TRY(block_forward(b, c, x, &save->blocks[i], y));
    TRY(block_backward(b, c, &save->blocks[i], x, d));
    c->split_backward = split;
    saves_restored(c, kept);
    *g = saved_segment; /* where the block's output, its successor's input, still lies */
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err backward_head(const Stage *st, Ctx *c, StageSave *save, Tensor d)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dn;
    TRY(tensor_new(c->scratch, &dn, c->dtype, d.dim[0], d.dim[1]));
    TRY(head_backward(&st->head, c, &save->head, save_get(c, save->final_out), dn));
    TRY(op(c->s, fill_zero, .x = d));
    TRY(norm_backward(&st->final_norm, c, &save->final_norm, save_get(c, save->x[st->share.layer_count]), dn,
                      d));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err stage_backward(const Stage *st, Ctx *c, StageSave *save, const Boundary *dout, const Boundary *din)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor d;
    if (din->count) d = din->t[0];
    else TRY(tensor_new(c->scratch, &d, c->dtype, ctx_rows(c), st->spec.hidden));
    if (st->share.head) TRY(backward_head(st, c, save, d));
    else if (d.data != dout->t[0].data) TRY(device_copy(c->s, d.data, dout->t[0].data, tensor_bytes(d)));
    for (int i = st->share.layer_count - 1; i >= 0; i--) TRY(backward_block(st, c, save, i, d));
    if (st->share.embedding) TRY(embedding_backward(&st->embedding, c, d));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err stage_kv_init(const Stage *st, KvCache **kv, DType dtype, Arena *state, SetupArena *setup)
{
    const ModelSpec *m = &st->spec;
    const bool latent = model_is_latent(m);
    const int64_t heads = latent ? 1 : m->kv_heads;
    const int64_t k = latent ? m->latent.width.kv_rank : m->head_dim, v = latent ? m->latent.width.rope : k;
    TRY(setup_array(setup, st->share.layer_count, kv));
    for (int i = 0; i < st->share.layer_count; i++) {
        TRY(tensor_new(state, &(*kv)[i].k, dtype, 1, m->seq, heads, k));
        TRY(tensor_new(state, &(*kv)[i].v, dtype, 1, m->seq, heads, v));
    }
    return ERR_OK;
}

Err stage_logits(const Stage *st, Ctx *c, StageSave *save, const KvCache *kv, Tensor logits)
{
    Tensor final_out;
    ASSERT(c->batch->B == 1 && c->world->size == 1);
    TRY(run_input(st, c, save, NULL, NULL));
    for (int i = 0; i < st->share.layer_count; i++) {
        c->kv = &kv[i];
        TRY(run_block(st, c, save, i, NULL));
    }
    c->kv = NULL;
    TRY(run_final_norm(st, c, save, &final_out));
    segment_end(c);
    return head_logits(&st->head, c, tensor_row_slice(final_out, c->batch->T - 1, 1), logits);
}

bool model_is_mixture(const ModelSpec *spec, int layer)
{
    return spec->moe.experts && layer_set_has(&spec->moe.layers, layer);
}

bool model_is_latent(const ModelSpec *spec) { return spec->latent.width.kv_rank > 0; }

/* Matrices of a feed-forward layer. */
static int64_t ffn_matrices(const ModelSpec *spec) { return spec->activation == ACT_SWIGLU ? 3 : 2; }

int64_t model_active_params(const ModelSpec *spec, int64_t params_unpadded)
{
    const int64_t expert = ffn_matrices(spec) * spec->hidden * spec->moe.ffn;
    int mixtures = 0;
    for (int i = 0; i < spec->layers; i++) mixtures += model_is_mixture(spec, i);
    return params_unpadded - mixtures * (spec->moe.experts - spec->moe.topk) * expert;
}

/* Tables that rows are only looked up in; a tied one is the head's matrix, too. */
static int64_t lookup_params(const ModelSpec *spec)
{
    const int64_t tokens = spec->tied ? 0 : spec->vocab, positions = spec->learned_positions ? spec->seq : 0;
    return (tokens + positions) * spec->hidden;
}

/* Columns of a head's keys and of its values. */
static int64_t key_and_value(const ModelSpec *spec)
{
    return spec->head_dim + (model_is_latent(spec) ? spec->latent.width.value : spec->head_dim);
}

int64_t model_attention_flop_per_token(const ModelSpec *spec)
{
    return 6 * (int64_t)spec->layers * spec->heads * key_and_value(spec) * spec->seq;
}

int64_t model_flop_per_token(const ModelSpec *spec, int64_t params_unpadded)
{
    return 6 * (model_active_params(spec, params_unpadded) - lookup_params(spec)) +
           model_attention_flop_per_token(spec);
}

/* Of a block's attention: products with its weights, scores and weighted values. */
static double attention_flop_per_token(const ModelSpec *spec)
{
    const double D = (double)spec->hidden, C = spec->head_dim, heads = spec->heads;
    const double scores = 2 * heads * (double)key_and_value(spec) * (double)spec->seq;
    const double columns = (2 + spec->attention_gate) * heads + 2 * spec->kv_heads;
    if (!model_is_latent(spec)) return 2 * D * columns * C + scores;
    const MlaWidths w = spec->latent.width;
    const double q = w.q_rank ? (double)w.q_rank * (D + heads * C) : D * heads * C;
    const double kv =
        D * (double)(w.kv_rank + w.rope) + (double)w.kv_rank * heads * (double)(w.nope + w.value);
    return 2 * (q + kv + heads * (double)w.value * D) + scores;
}

/* Of a block's feed-forward part. */
static double ffn_flop_per_token(const ModelSpec *spec, int layer)
{
    const double D = (double)spec->hidden, row = 2 * D * (double)ffn_matrices(spec);
    if (!model_is_mixture(spec, layer)) return row * (double)spec->ffn;
    return row * (double)(spec->moe.topk * spec->moe.ffn + spec->moe.shared_ffn) +
           2 * D * (spec->moe.experts + spec->moe.shared_gate);
}

double stage_flop_per_token(const ModelSpec *spec, StageShare share)
{
    const double D = (double)spec->hidden, attention = attention_flop_per_token(spec);
    const double head = share.head ? 2 * D * (double)spec->padded_vocab : 0;
    double flop = head + D; /* (rows pass through an empty stage, too) */
    for (int i = 0; i < share.layer_count; i++)
        flop += attention + ffn_flop_per_token(spec, share.first_layer + i);
    return flop;
}
