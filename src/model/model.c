/*
 * Stages: registration, forward, backward; see model.h.
 *
 * Segments of a slot: i = block i, behind its input; layer_count = final norm and head, behind theirs; then
 * MTP_SEGMENTS for each module of multi-token prediction, or, of a head that stands alone behind them, one for each
 * further depth. The first input is the embedding's output or the incoming boundary; the output of the last block,
 * without a head, goes to the outgoing boundary.
 */
#include <stdio.h>
#include <string.h>

#include "base/int64.h"
#include "layer/offload.h"
#include "model/model.h"

StageShare stage_whole(const ModelSpec *spec) { return (StageShare){ 0, spec->layers, true, true, spec->mtp.count }; }

/* The embedding's table for others that read it; in a registry without the embedding a copy. */
static Err find_table(const ModelSpec *spec, ParamRegistry *reg, int *id)
{
    *id = param_find(reg, EMBEDDING_TABLE);
    return *id >= 0 ? ERR_OK : param_add(reg, embedding_table(spec, true, PARAM_COPY), id);
}

/* A head behind the modules, in a stage of its own, has what it reads from theirs. */
static bool head_alone(const ModelSpec *spec, StageShare share) { return share.head && share.mtp < spec->mtp.count; }

/* The norm behind the last block is where its output is first read. */
static bool has_norm(const Stage *st) { return st->share.mtp || (st->share.head && !head_alone(st->spec, st->share)); }

int stage_inputs(const ModelSpec *spec, StageShare share) { return head_alone(spec, share) ? 1 + spec->mtp.count : 1; }

int stage_further(const Stage *st) { return st->share.head || st->share.mtp ? st->spec->mtp.count : 0; }

static Err register_head(Stage *st, ParamRegistry *reg, const ModelSpec *spec)
{
    int table = -1;
    if (spec->tied) TRY(find_table(spec, reg, &table));
    return head_register(&st->head, reg, spec, table);
}

static Err register_blocks(Stage *st, ParamRegistry *reg, const ModelSpec *spec, SetupArena *setup)
{
    TRY(setup_array(setup, st->share.layer_count, &st->blocks));
    for (int b = 0; b < st->share.layer_count; b++) {
        char name[PARAM_NAME_MAX];
        const int layer = st->share.first_layer + b;
        param_begin_unit(reg);
        snprintf(name, sizeof name, "layers.%d", layer);
        TRY(block_register(&st->blocks[b], reg, spec, name, layer, setup));
        st->blocks[b].index = b;
    }
    return ERR_OK;
}

/* The first segment of the modules, or of the further depths that a head alone reads. */
static int further_segment(const Stage *st) { return st->share.layer_count + 1; }

static Err register_mtp(Stage *st, ParamRegistry *reg, const ModelSpec *spec, SetupArena *setup)
{
    int table;
    TRY(find_table(spec, reg, &table));
    TRY(setup_array(setup, st->share.mtp, &st->mtp));
    for (int i = 0; i < st->share.mtp; i++) {
        st->mtp[i].depth = i + 1;
        st->mtp[i].segment = further_segment(st) + i * MTP_SEGMENTS;
        param_begin_unit(reg);
        TRY(mtp_register(&st->mtp[i], reg, spec, table, setup));
        st->mtp[i].block.index = st->share.layer_count + i;
    }
    return ERR_OK;
}

/* shared: others than this registry's read the embedding's table. */
static Err register_stage(Stage *st, ParamRegistry *reg, bool shared, SetupArena *setup)
{
    const ModelSpec *spec = st->spec;
    param_begin_unit(reg);
    if (st->share.embedding) TRY(embedding_register(&st->embedding, reg, spec, shared));
    TRY(register_blocks(st, reg, spec, setup));
    param_begin_unit(reg);
    if (has_norm(st))
        TRY(norm_register(&st->final_norm, reg, "final_norm", spec->hidden, model_norm_kind(spec), spec->norm_eps,
                          PARTIAL_ROWS));
    if (st->share.head) TRY(register_head(st, reg, spec));
    return st->share.mtp ? register_mtp(st, reg, spec, setup) : ERR_OK;
}

Err stages_register(Stage *st, const StageShare *shares, int count, ParamRegistry *reg, const ModelSpec *spec,
                    SetupArena *setup)
{
    bool head = !spec->tied, mtp = !spec->mtp.count; /* or there is none that reads the table */
    /* (widths that no block has would be a model of another kind than was meant) */
    ASSERT(layer_pattern_has(&spec->mixer, MIXER_LATENT) == (spec->latent.width.kv_rank > 0));
    for (int i = 0; i < count; i++) head |= shares[i].head, mtp |= shares[i].mtp > 0;
    for (int i = 0; i < count; i++, st++) {
        *st = (Stage){ .spec = spec, .share = shares[i] };
        TRY(register_stage(st, reg, !(head && mtp), setup));
    }
    return ERR_OK;
}

Err stage_save_init(const Stage *st, StageSave *save, SetupArena *setup)
{
    *save = (StageSave){ 0 };
    TRY(setup_array(setup, st->share.layer_count + 1, &save->x));
    TRY(setup_array(setup, stage_further(st), &save->mtp));
    TRY(setup_array(setup, st->share.layer_count, &save->blocks));
    for (int i = 0; i < st->share.layer_count; i++) TRY(block_save_init(&st->blocks[i], &save->blocks[i], setup));
    for (int i = 0; i < st->share.mtp; i++) TRY(block_save_init(&st->mtp[i].block, &save->mtp[i].block, setup));
    return ERR_OK;
}

int stage_segments(const Stage *st)
{
    return further_segment(st) + (st->share.mtp ? st->share.mtp * MTP_SEGMENTS : stage_further(st));
}

int stage_linears(const Stage *st)
{
    int linears = 1 + (st->share.mtp ? 0 : stage_further(st)); /* the head, at each depth */
    for (int i = 0; i < st->share.layer_count; i++) linears += block_linears(&st->blocks[i]);
    for (int i = 0; i < st->share.mtp; i++) linears += 2 + block_linears(&st->mtp[i].block);
    return linears;
}

/* Takes the input of block i (at the end, of the head): memory that is kept for backward, or the boundary. */
static Err stream_alloc(const Stage *st, Ctx *c, StageSave *save, int i, const Boundary *out, Tensor *x)
{
    const bool block = i < st->share.layer_count;
    const BlockNorms norms = block ? st->blocks[i].norms : BLOCK_NORMS_PRE; /* (the head has one before it) */
    if (block || has_norm(st)) return stream_new(c, st->spec, norms, x, &save->x[i]);
    *x = out->t[0];
    return ERR_OK;
}

/* How many blocks leave their saves to the host. */
static int offloaded(const Stage *st, const Ctx *c)
{
    const int most = c->offload ? st->spec->offload : 0;
    return most < st->share.layer_count ? most : st->share.layer_count;
}

/* Begins segment i, with the input of its block, or of the head. */
static Err begin_segment(const Stage *st, Ctx *c, StageSave *save, int i, const Boundary *out, Tensor *x)
{
    if (i < offloaded(st, c)) TRY(offload_begin(c, i));
    segment_begin(c, i);
    return stream_alloc(st, c, save, i, out, x);
}

/* One block; its output begins the next segment. Under full recomputation only the input stays. */
static Err run_block(const Stage *st, Ctx *c, StageSave *save, int i, const Boundary *out, ResidualStream *x)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor y;
    TRY(block_run(&st->blocks[i], c, x, &save->blocks[i]));
    if (i < offloaded(st, c)) TRY(offload_leave(c, i));
    TRY(begin_segment(st, c, save, i + 1, out, &y));
    TRY(block_output(&st->blocks[i], c, x, y));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Begins the stream, in scratch. */
static Err run_input(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, const Boundary *out,
                     ResidualStream *stream)
{
    Tensor x;
    TRY(begin_segment(st, c, save, 0, out, &x));
    if (st->share.embedding) TRY(embedding_forward(&st->embedding, c, c->batch->token, x));
    else TRY(device_copy(c->s, x.data, in->t[0].data, tensor_bytes(x)));
    return residual_stream(c, st->spec, x, stream);
}

static Err run_final_norm(const Stage *st, Ctx *c, StageSave *save, const ResidualStream *x, Tensor *out)
{
    const Tensor sum = x->sum.sum;
    TRY(save_new(c, REGION_W, out, &save->final_out, c->dtype, sum.dim[0], sum.dim[1]));
    return norm_forward_sum(&st->final_norm, c, &x->sum, *out, &save->final_norm);
}

/* ---- the losses: that of the head is of depth 0, then come the modules' ---- */

static HeadSave *head_save(StageSave *save, int depth) { return depth ? &save->mtp[depth - 1].head : &save->head; }

/* Input of the head. */
static Tensor hidden_of(const Ctx *c, const StageSave *save, int depth)
{
    return save_get(c, depth ? save->mtp[depth - 1].out : save->final_out);
}

static Tensor target_of(const Batch *b, int depth)
{
    if (!depth) return b->target;
    return tensor_reshape(tensor_row_slice(b->further_target, depth - 1, 1), b->further_target.dim[1]);
}

/* From the stage's input to the end of its blocks: what the head and the modules read, or `out`. */
static Err run_blocks(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, const Boundary *out,
                      Tensor *final_out)
{
    ArenaMark mark = arena_mark(c->scratch);
    ResidualStream x;
    TRY(run_input(st, c, save, in, out, &x));
    for (int i = 0; i < st->share.layer_count; i++) TRY(run_block(st, c, save, i, out, &x));
    if (has_norm(st)) TRY(run_final_norm(st, c, save, &x, final_out));
    else TRY(residual_add(c, &x.sum));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Ends the segment. */
static Err run_head(const Stage *st, Ctx *c, StageSave *save, int depth, Tensor sums)
{
    if (!st->share.head) {
        segment_end(c);
        return ERR_OK;
    }
    const MtpSpec *mtp = &st->spec->mtp;
    const HeadLoss to = { .target = target_of(c->batch, depth),
                          .sums = tensor_row_slice(sums, 3 * depth, 3),
                          .scores = c->mode.training ? (Tensor){ 0 } : c->batch->scores,
                          .weight = depth ? mtp->weight / (float)mtp->count : 1 };
    TRY(head_forward(&st->head, c, hidden_of(c, save, depth), &to, head_save(save, depth)));
    segment_end(c);
    return ERR_OK;
}

/* Depths further than the head's own that this call has: none in evaluation. */
static int depths_now(const Stage *st, const Ctx *c) { return c->mode.training ? stage_further(st) : 0; }

/* Runs heads alone, whose inputs come from the boundary. */
static Err run_heads(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, Tensor sums)
{
    for (int depth = 0; depth <= depths_now(st, c); depth++) {
        const Tensor from = in->t[depth];
        Tensor h;
        segment_begin(c, further_segment(st) - 1 + depth);
        TRY(save_new(c, REGION_W, &h, depth ? &save->mtp[depth - 1].out : &save->final_out, c->dtype, from.dim[0],
                     from.dim[1]));
        TRY(device_copy(c->s, h.data, from.data, tensor_bytes(h)));
        TRY(run_head(st, c, save, depth, sums));
    }
    return ERR_OK;
}

Err stage_forward(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, const Boundary *out, Tensor sums)
{
    Tensor final_out;
    if (head_alone(st->spec, st->share)) return run_heads(st, c, save, in, sums);
    TRY(run_blocks(st, c, save, in, out, &final_out));
    if (!has_norm(st)) return ERR_OK;
    TRY(run_head(st, c, save, 0, sums));
    for (int i = 0; i < depths_now(st, c); i++) {
        TRY(mtp_forward(&st->mtp[i], c, hidden_of(c, save, i), &save->mtp[i]));
        TRY(run_head(st, c, save, i + 1, sums));
    }
    for (int depth = 0; depth <= depths_now(st, c) && !st->share.head; depth++) {
        const Tensor h = hidden_of(c, save, depth);
        TRY(device_copy(c->s, out->t[depth].data, h.data, tensor_bytes(h)));
    }
    return ERR_OK;
}

static Err backward_heads(const Stage *st, Ctx *c, StageSave *save, const Boundary *din)
{
    for (int depth = stage_further(st); depth >= 0; depth--)
        TRY(head_backward(&st->head, c, head_save(save, depth), hidden_of(c, save, depth), din->t[depth]));
    return ERR_OK;
}

/* Gradient of the hidden state: the head makes it in dh, or it came over the boundary, and dh is that. */
static Err hidden_gradient(const Stage *st, Ctx *c, StageSave *save, int depth, const Boundary *dout, Tensor *dh)
{
    if (st->share.head) return head_backward(&st->head, c, head_save(save, depth), hidden_of(c, save, depth), *dh);
    *dh = dout->t[depth];
    return ERR_OK;
}

/*
 * Gradient of a head's input, from the head and from the module one depth further, which is done first. d may be the
 * memory of dout.
 */
static Err backward_from_heads(const Stage *st, Ctx *c, StageSave *save, const Boundary *dout, Tensor d)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dh[2], dx;
    int depth = st->share.mtp;
    for (int i = 0; i < (depth ? 2 : 1) && st->share.head; i++)
        TRY(tensor_new(c->scratch, &dh[i], c->dtype, d.dim[0], d.dim[1]));
    TRY(hidden_gradient(st, c, save, depth, dout, &dh[depth % 2]));
    for (; depth; depth--) {
        const Tensor h = hidden_of(c, save, depth - 1);
        Tensor *before = &dh[(depth - 1) % 2];
        TRY(hidden_gradient(st, c, save, depth - 1, dout, before));
        TRY(mtp_backward(&st->mtp[depth - 1], c, &save->mtp[depth - 1], h, dh[depth % 2], *before));
    }
    dx = d;
    if (!st->share.head) TRY(tensor_new(c->scratch, &dx, d.dtype, d.dim[0], d.dim[1]));
    TRY(norm_backward_into(&st->final_norm, c, &save->final_norm, save_get(c, save->x[st->share.layer_count]), dh[0],
                           dx));
    if (!st->share.head) TRY(device_copy(c->s, d.data, dx.data, tensor_bytes(d)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Those of the last two that left begin to come back, beside what comes before their backward. */
static Err fetch_first(const Stage *st, Ctx *c)
{
    const int last = offloaded(st, c) - 1;
    for (int i = last; i >= 0 && i > last - OFFLOAD_BUFFERS; i--) TRY(offload_fetch(c, i));
    return ERR_OK;
}

/* d in: the gradient of the block's output, out: of its input. */
static Err backward_block(const Stage *st, Ctx *c, StageSave *save, int i, Tensor d, InputSum sums)
{
    const bool away = i < offloaded(st, c);
    if (away) TRY(offload_arrive(c, i));
    TRY(block_run_backward(&st->blocks[i], c, &save->blocks[i], save_get(c, save->x[i]), d, sums));
    return away && i >= OFFLOAD_BUFFERS ? offload_fetch(c, i - OFFLOAD_BUFFERS) : ERR_OK;
}

Err stage_backward(const Stage *st, Ctx *c, StageSave *save, const Boundary *dout, const Boundary *din)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor d;
    TRY(fetch_first(st, c));
    if (head_alone(st->spec, st->share)) return backward_heads(st, c, save, din);
    if (din->count) d = din->t[0];
    else TRY(tensor_new(c->scratch, &d, ctx_residual(c), ctx_rows(c), st->spec->hidden));
    if (has_norm(st)) TRY(backward_from_heads(st, c, save, dout, d));
    else if (d.data != dout->t[0].data) TRY(device_copy(c->s, d.data, dout->t[0].data, tensor_bytes(d)));
    InputSum sums = { .bias = -1 };
    for (int i = st->share.layer_count - 1; i >= 0; i--) {
        sums = (InputSum){ .bias = i ? block_bias_of_output(&st->blocks[i - 1], c) : -1, .done = sums.bias >= 0 };
        TRY(backward_block(st, c, save, i, d, sums));
    }
    if (st->share.embedding) TRY(embedding_backward(&st->embedding, c, c->batch->token, d));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- what mixers carry along the sequence ---- */

static int all_blocks(const Stage *st) { return st->share.layer_count + st->share.mtp; }

static const Block *block_at(const Stage *st, int i)
{
    const int blocks = st->share.layer_count;
    return i < blocks ? &st->blocks[i] : &st->mtp[i - blocks].block;
}

Err stage_kept_init(const Stage *st, void ***kept, SetupArena *setup)
{
    TRY(setup_array(setup, all_blocks(st), kept));
    for (int i = 0; i < all_blocks(st); i++)
        TRY(setup_alloc(setup, block_at(st, i)->mixer.kind->carry.kept_bytes, &(*kept)[i]));
    return ERR_OK;
}

void stage_kept_clear(const Stage *st, void *const *kept)
{
    for (int i = 0; i < all_blocks(st); i++) memset(kept[i], 0, (size_t)block_at(st, i)->mixer.kind->carry.kept_bytes);
}

Err stage_grads_init(const Stage *st, const Ctx *c, void ***grads, Arena *state, SetupArena *setup)
{
    TRY(setup_array(setup, all_blocks(st), grads));
    for (int i = 0; i < all_blocks(st); i++) {
        const Block *b = block_at(st, i);
        const Carry *carry = &b->mixer.kind->carry;
        const Ctx at = block_ctx(b, c);
        TRY(setup_alloc(setup, carry->grads_bytes, &(*grads)[i]));
        TRY(carry->grads(b->mixer.own, &at, (*grads)[i], state));
    }
    return ERR_OK;
}

Err stage_caches_init(const Stage *st, void ***caches, DType dtype, Arena *state, SetupArena *setup)
{
    TRY(setup_array(setup, st->share.layer_count, caches));
    for (int i = 0; i < st->share.layer_count; i++) {
        const Branch *mixer = &st->blocks[i].mixer;
        const Carry *carry = &mixer->kind->carry;
        TRY(setup_alloc(setup, carry->cache_bytes, &(*caches)[i]));
        TRY(carry->cache(mixer->own, dtype, (*caches)[i], state));
    }
    return ERR_OK;
}

Err stage_logits(const Stage *st, Ctx *c, StageSave *save, void *const *caches, Tensor logits)
{
    ArenaMark mark = arena_mark(c->scratch);
    ResidualStream x;
    Tensor final_out;
    ASSERT(c->batch->B == 1 && c->world->size == 1);
    TRY(run_input(st, c, save, NULL, NULL, &x));
    Ctx with_cache = *c;
    for (int i = 0; i < st->share.layer_count; i++) {
        with_cache.block.cache = caches[i];
        TRY(run_block(st, &with_cache, save, i, NULL, &x));
    }
    TRY(run_final_norm(st, &with_cache, save, &x, &final_out));
    segment_end(&with_cache);
    arena_release(c->scratch, mark);
    return head_logits(&st->head, c, tensor_row_slice(final_out, c->batch->T - 1, 1), logits);
}

/* ---- parameters and FLOP ---- */

int64_t model_active_params(const ModelSpec *spec, int64_t params_unpadded)
{
    int64_t active = params_unpadded;
    for (int i = 0; i < model_blocks(spec); i++) {
        const LayerKind *ffn = model_ffn(spec, i);
        if (ffn->idle_params) active -= ffn->idle_params(spec);
    }
    return active;
}

/* Tables that rows are only looked up in; a tied one is the head's matrix, too. */
static int64_t lookup_params(const ModelSpec *spec)
{
    const int64_t tokens = spec->tied ? 0 : spec->vocab, positions = spec->learned_positions ? spec->seq : 0;
    return (tokens + positions) * spec->hidden;
}

static int64_t window_of(const ModelSpec *spec, int block)
{
    return layer_pattern_at(&spec->window, model_like(spec, block));
}

static int64_t state_flop(const ModelSpec *spec, int block)
{
    const LayerKind *mixer = model_mixer(spec, block);
    return mixer->state_flop ? mixer->state_flop(spec) : 0;
}

bool model_has_states(const ModelSpec *spec)
{
    for (int i = 0; i < spec->layers; i++)
        if (state_flop(spec, i)) return true;
    return false;
}

/* FLOP by the convention that all keys of the sequence count, or all of the window, seen or not. */
static int64_t score_flop_per_token(const ModelSpec *spec, int block)
{
    const int64_t window = window_of(spec, block), keys = window ? min64(window, spec->seq) : spec->seq;
    return keys * model_mixer(spec, block)->pair_flop(spec) + state_flop(spec, block);
}

int64_t model_attention_flop_per_token(const ModelSpec *spec)
{
    int64_t flop = 0;
    for (int i = 0; i < model_blocks(spec); i++) flop += score_flop_per_token(spec, i);
    return 3 * flop;
}

int64_t model_causal_flop_per_token(const ModelSpec *spec)
{
    const Spans all = spans_whole(spec->seq);
    double flop = 0; /* of a sequence */
    for (int i = 0; i < model_blocks(spec); i++)
        flop += (double)spans_pairs(all, all, window_of(spec, i)) * (double)model_mixer(spec, i)->pair_flop(spec) +
                (double)spec->seq * (double)state_flop(spec, i);
    return (int64_t)(3 * flop / (double)spec->seq);
}

int64_t model_flop_per_token(const ModelSpec *spec, int64_t params_unpadded)
{
    const int64_t heads_again = spec->mtp.count * spec->vocab * spec->hidden;
    return 6 * (model_active_params(spec, params_unpadded) - lookup_params(spec) + heads_again) +
           model_attention_flop_per_token(spec);
}

static int64_t block_flop_per_token(const ModelSpec *spec, int block)
{
    const LayerKind *mixer = model_mixer(spec, block), *ffn = model_ffn(spec, block);
    return mixer->flop(spec) + score_flop_per_token(spec, block) + ffn->flop(spec);
}

int64_t stage_flop_per_token(const ModelSpec *spec, StageShare share)
{
    const int64_t D = spec->hidden, head = 2 * D * spec->padded_vocab;
    const int heads = share.head ? 1 + spec->mtp.count : 0;
    int64_t flop = heads * head + D; /* (rows pass through an empty stage, too) */
    for (int i = 0; i < share.layer_count; i++) flop += block_flop_per_token(spec, share.first_layer + i);
    for (int i = 0; i < share.mtp; i++) flop += 4 * D * D + block_flop_per_token(spec, spec->layers + i);
    return flop;
}

int64_t stage_again_flop_per_token(const ModelSpec *spec, StageShare share)
{
    int64_t flop = 0;
    for (int at = 0; at < share.layer_count + share.mtp; at++) {
        const int further = at - share.layer_count;
        const int block = further < 0 ? share.first_layer + at : spec->layers + further;
        if (model_recompute(spec, at) == RECOMPUTE_FULL) flop += block_flop_per_token(spec, block);
    }
    return flop;
}
