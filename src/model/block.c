/*
 * The pre-norm residual block. Its gradient d [R, D] lives in one buffer: the branch reads it, and the norm's
 * backward adds the branch's contribution to it.
 */
#include <stdio.h>

#include "model/model.h"

Err model_norm_register(Norm *n, ParamRegistry *reg, const ModelSpec *s, const char *owner, const char *which)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", owner, which);
    return norm_register(n, reg, name, s->hidden, s->rms, s->norm_eps, PARTIAL_ROWS);
}

Err block_register(Block *b, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    char attn[PARAM_NAME_MAX], mlp[PARAM_NAME_MAX];
    snprintf(attn, sizeof attn, "%s.attn", name);
    snprintf(mlp, sizeof mlp, "%s.mlp", name);
    *b = (Block){ .spec = s,
                  .latent = model_is_latent(s),
                  .mixture = model_is_mixture(s, layer),
                  .context = (ContextComm)layer_pattern_at(&s->context, layer),
                  .attn_dropout_key = model_key(s, attn, "residual"),
                  .mlp_dropout_key = model_key(s, mlp, "residual") };
    TRY(model_norm_register(&b->norm1, reg, s, name, "norm1"));
    TRY(b->latent ? mla_register(&b->mla, reg, s, attn, layer)
                  : attention_register(&b->attn, reg, s, attn, layer));
    TRY(model_norm_register(&b->norm2, reg, s, name, "norm2"));
    return b->mixture ? moe_register(&b->moe, reg, s, mlp) : mlp_register(&b->mlp, reg, s, mlp, s->ffn);
}

/* The parameter of the bias that a branch leaves to the residual sum, or -1. */
static int attention_bias(const Block *b) { return b->latent ? b->mla.proj.bias : b->attn.proj.bias; }
static int mlp_bias(const Block *b) { return b->mixture ? -1 : b->mlp.fc2.bias; }

static Err heads_forward(const Block *b, Ctx *c, Tensor x, Tensor y, BlockSave *save)
{
    return b->latent ? mla_forward(&b->mla, c, x, y, &save->mla)
                     : attention_forward(&b->attn, c, x, y, &save->attn);
}

static Err heads_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor dy, Tensor dx)
{
    return b->latent ? mla_backward(&b->mla, c, &save->mla, x, dy, dx)
                     : attention_backward(&b->attn, c, &save->attn, x, dy, dx);
}

static Err ffn_forward(const Block *b, Ctx *c, Tensor x, Tensor y, BlockSave *save)
{
    return b->mixture ? moe_forward(&b->moe, c, x, y, &save->moe) : mlp_forward(&b->mlp, c, x, y, &save->mlp);
}

static Err ffn_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor dy, Tensor dx)
{
    return b->mixture ? moe_backward(&b->moe, c, &save->moe, x, dy, dx)
                      : mlp_backward(&b->mlp, c, &save->mlp, x, dy, dx);
}

/* sum = x + dropout(branch + bias of the branch's last linear) */
static ResidualSum behind(const Block *b, const Ctx *c, int bias, uint64_t key, Tensor x, Tensor branch,
                          Tensor sum)
{
    return (ResidualSum){ .sum = sum,
                          .residual = x,
                          .branch = branch,
                          .bias = bias >= 0 ? param_value(c, bias) : (Tensor){ 0 },
                          .dropout = ctx_dropout(c, b->spec->dropout, key) };
}

/* A norm's output: kept for the wgrad, or passing (selective recomputation). */
static Err norm_out(const Block *b, Ctx *c, Tensor x, Tensor *n, Saved *saved)
{
    if (!model_recomputes(b->spec)) return save_new(c, REGION_W, n, saved, c->dtype, x.dim[0], x.dim[1]);
    return tensor_new(c->scratch, n, c->dtype, x.dim[0], x.dim[1]);
}

Err residual_stream(Ctx *c, Tensor x, ResidualStream *out)
{
    *out = (ResidualStream){ .sum = { .sum = x } };
    return tensor_new(c->scratch, &out->branch, c->dtype, x.dim[0], x.dim[1]);
}

Err block_forward(const Block *b, Ctx *c, ResidualStream *x, BlockSave *save, Tensor y)
{
    const Tensor in = x->sum.sum;
    Tensor n, mid;
    c->context = b->context;
    c->layer = b->index;
    TRY(save_new(c, REGION_I, &mid, &save->mid, c->dtype, in.dim[0], in.dim[1]));
    TRY(norm_out(b, c, in, &n, &save->n1));
    TRY(norm_forward_sum(&b->norm1, c, &x->sum, n, &save->norm1));
    TRY(heads_forward(b, c, n, x->branch, save));
    x->sum = behind(b, c, attention_bias(b), b->attn_dropout_key, in, x->branch, mid);
    TRY(norm_out(b, c, mid, &n, &save->n2));
    TRY(norm_forward_sum(&b->norm2, c, &x->sum, n, &save->norm2));
    TRY(ffn_forward(b, c, n, x->branch, save));
    x->sum = behind(b, c, mlp_bias(b), b->mlp_dropout_key, mid, x->branch, y);
    return ERR_OK;
}

/*
 * Gradient of the branch behind a residual add: d through the dropout mask. Without dropout it is d itself,
 * unless a queued weight gradient will read it after d has moved on.
 */
static Err branch_gradient(const Block *b, Ctx *c, int bias, uint64_t key, Tensor d, Tensor *out)
{
    Dropout drop = ctx_dropout(c, b->spec->dropout, key);
    *out = d;
    if (drop.threshold || c->split_backward) {
        TRY(dy_alloc(c, out, d.dim[0], d.dim[1]));
        TRY(op(c->s, residual_bwd, .dx = *out, .dy = d, .position = ctx_row_slice(c, c->batch->position),
               .sample = ctx_row_slice(c, c->batch->sample), .dropout = drop));
    }
    return bias >= 0 ? grad_add_columns(c, bias, *out, 0) : ERR_OK;
}

static Err norm_output(const Block *b, Ctx *c, const Norm *norm, Saved saved, Tensor x, Tensor *n)
{
    if (!model_recomputes(b->spec)) {
        *n = save_get(c, saved);
        return ERR_OK;
    }
    TRY(dy_alloc(c, n, x.dim[0], x.dim[1]));
    return norm_again(norm, c, x, *n);
}

/* A bias whose gradient can be summed with that of the stream behind it: -1 if it has dropout before it, or is none. */
static int bias_of_stream(const Block *b, const Ctx *c, int bias, uint64_t key)
{
    return ctx_dropout(c, b->spec->dropout, key).threshold ? -1 : bias;
}

int block_bias_of_output(const Block *b, const Ctx *c)
{
    return bias_of_stream(b, c, mlp_bias(b), b->mlp_dropout_key);
}

Err block_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor d)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor mid = save_get(c, save->mid), n, dbranch, dn;
    const int sum = bias_of_stream(b, c, attention_bias(b), b->attn_dropout_key);
    c->context = b->context;
    c->layer = b->index;
    TRY(tensor_new(c->scratch, &dn, c->dtype, d.dim[0], d.dim[1]));
    ArenaMark half = arena_mark(c->scratch);
    TRY(branch_gradient(b, c, c->below.done ? -1 : mlp_bias(b), b->mlp_dropout_key, d, &dbranch));
    TRY(norm_output(b, c, &b->norm2, save->n2, mid, &n));
    TRY(ffn_backward(b, c, save, n, dbranch, dn));
    TRY(norm_backward_sum(&b->norm2, c, &save->norm2, (NormRows){ mid, dn, d }, sum));
    arena_release(c->scratch, half);
    TRY(branch_gradient(b, c, sum >= 0 ? -1 : attention_bias(b), b->attn_dropout_key, d, &dbranch));
    TRY(norm_output(b, c, &b->norm1, save->n1, x, &n));
    TRY(heads_backward(b, c, save, n, dbranch, dn));
    TRY(norm_backward_sum(&b->norm1, c, &save->norm1, (NormRows){ x, dn, d },
                          c->below.wanted ? c->below.bias : -1));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- full recomputation ---- */

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

/* Under full recomputation the block's output is made at once: what it is the sum of is not kept. */
Err block_run(const Block *b, Ctx *c, ResidualStream *x, BlockSave *save, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    if (b->spec->recompute != RECOMPUTE_FULL) {
        TRY(block_forward(b, c, x, save, y));
    } else {
        Arena *kept[REGION_COUNT];
        saves_to_scratch(c, kept);
        TRY(block_forward(b, c, x, save, y));
        TRY(residual_add(c, &x->sum));
        x->sum = (ResidualSum){ .sum = y };
        saves_restored(c, kept);
    }
    segment_end(c);
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Under full recomputation: the block's forward once more, into scratch, then its backward from there. The output, of
 * which backward reads nothing, is not made again. */
Err block_run_backward(const Block *b, Ctx *c, BlockSave *save, Tensor x, Tensor d)
{
    if (b->spec->recompute != RECOMPUTE_FULL) return block_backward(b, c, save, x, d);
    ArenaMark mark = arena_mark(c->scratch);
    ResidualStream stream;
    Arena *kept[REGION_COUNT];
    Segment *g = &c->slot->segments[save->mid.segment], saved_segment = *g;
    bool split = c->split_backward;
    saves_to_scratch(c, kept);
    c->split_backward = false; /* its W must follow at once: the inputs live in scratch */
    segment_begin(c, save->mid.segment);
    TRY(residual_stream(c, x, &stream));
    TRY(block_forward(b, c, &stream, save, (Tensor){ 0 }));
    TRY(block_backward(b, c, save, x, d));
    c->split_backward = split;
    saves_restored(c, kept);
    *g = saved_segment; /* where the block's output, its successor's input, still lies */
    arena_release(c->scratch, mark);
    return ERR_OK;
}
