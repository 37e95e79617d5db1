/*
 * The residual block: x + layer(norm(x)). With norms of the layers' outputs, too, it is x + post_norm(layer(norm(x)));
 * with these alone it is x + post_norm(layer(x)). What is added to x is multiplied by residual_scale. Its gradient d
 * [R, D] lives in one buffer. The branch reads it. The backward of the norm before the layer adds the branch's
 * contribution to it; without that norm an addition does. A block has a mixer and then a feed-forward layer, or one of
 * the two.
 *
 * Where the layers stand in parallel both read norms of x, or one norm, and what they give is added in turn. Both read
 * the same d in backward, the feed-forward layer first. If they share the norm their gradients are added before its
 * backward; else each norm adds its own.
 */
#include <stdio.h>

#include "model/model.h"

Err model_norm_register(Norm *n, ParamRegistry *reg, const ModelSpec *s, const char *owner, const char *which)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", owner, which);
    return norm_register(n, reg, name, s->hidden, model_norm_kind(s), s->norm_eps, PARTIAL_ROWS);
}

/* "layers.3", "norm1"; norm NULL: the branch has none of its own */
typedef struct {
    const char *block, *norm;
    BlockNorms norms;
} BranchNames;

/* (a block of one layer has one branch) */
static bool is_there(const Branch *r) { return r->kind->add != NULL; }
static bool has_both(const Block *b) { return is_there(&b->mixer) && is_there(&b->ffn); }

static Err branch_register(Branch *r, ParamRegistry *reg, const ModelSpec *s, BranchNames names, int layer,
                           SetupArena *setup)
{
    char name[PARAM_NAME_MAX], post_norm[16];
    if (!is_there(r)) return ERR_OK;
    snprintf(name, sizeof name, "%s.%s", names.block, r->kind->name);
    r->dropout_key = model_key(s, name, "residual");
    TRY(setup_alloc(setup, r->kind->own_bytes, &r->own));
    if (names.norm && norms_before(names.norms)) TRY(model_norm_register(&r->norm, reg, s, names.block, names.norm));
    TRY(r->kind->add(r->own, reg, s, name, layer));
    if (!norms_behind(names.norms)) return ERR_OK;
    snprintf(post_norm, sizeof post_norm, "post_%s", names.norm);
    return model_norm_register(&r->post_norm, reg, s, names.block, post_norm);
}

Err block_register(Block *b, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer, SetupArena *setup)
{
    *b = (Block){ .spec = s,
                  .mixer = { .kind = model_mixer(s, layer) },
                  .ffn = { .kind = model_ffn(s, layer) },
                  .norms = model_block_norms(s, layer),
                  .context = (ContextComm)layer_pattern_at(&s->context, model_like(s, layer)) };
    ASSERT(has_both(b) || !model_parallel(s));
    TRY(branch_register(&b->mixer, reg, s, (BranchNames){ name, "norm1", b->norms }, layer, setup));
    b->shares_norm = b->norms == BLOCK_NORMS_PARALLEL;
    return branch_register(&b->ffn, reg, s, (BranchNames){ name, b->shares_norm ? NULL : "norm2", b->norms }, layer,
                           setup);
}

Err block_save_init(const Block *b, BlockSave *save, SetupArena *setup)
{
    *save = (BlockSave){ 0 };
    TRY(setup_alloc(setup, b->mixer.kind->save_bytes, &save->mixer.own));
    return setup_alloc(setup, b->ffn.kind->save_bytes, &save->ffn.own);
}

/* Layers read the stream itself where no norm is before them, unless it is wider than what they read. */
static bool layers_read_stream(const Ctx *c, BlockNorms norms)
{
    return !norms_before(norms) && ctx_residual(c) == c->dtype;
}

Err stream_new(Ctx *c, const ModelSpec *spec, BlockNorms norms, Tensor *x, Saved *saved)
{
    const Region region = layers_read_stream(c, norms) ? REGION_W : REGION_I;
    return save_new(c, region, x, saved, ctx_residual(c), ctx_rows(c), spec->hidden);
}

/* The dtype of a branch's output, and of the gradient that the branch reads of it. A post-norm would round them to 16
 * bits, so with one the layer's dtype stays. */
static DType branch_dtype(const Ctx *c, BlockNorms norms, bool sums_rows)
{
    return sums_rows && !norms_behind(norms) ? ctx_row_sums(c) : c->dtype;
}

/* The dtype of the gradient of a branch's input: the norm before the layer takes it unrounded. */
static DType input_dtype(const Ctx *c, BlockNorms norms, bool sums_rows)
{
    return sums_rows && norms_before(norms) ? ctx_row_sums(c) : c->dtype;
}

Ctx block_ctx(const Block *b, const Ctx *stage)
{
    Ctx c = *stage;
    c.block.context = b->context;
    c.block.layer = b->index;
    return c;
}

int block_linears(const Block *b) { return b->mixer.kind->linears + b->ffn.kind->linears; }

/* ---- forward ---- */

static int bias_of(const Branch *r) { return r->kind->residual_bias ? r->kind->residual_bias(r->own) : -1; }

/* Between the branch and the sum: dropout, and the model's factor. */
static Dropout branch_dropout(const Block *b, const Branch *r, const Ctx *c)
{
    Dropout d = ctx_dropout(c, b->spec->dropout, r->dropout_key);
    d.scale *= model_residual_scale(b->spec);
    return d;
}

/* Does it change nothing? */
static bool branch_goes_through(Dropout d) { return !d.threshold && !(d.scale < 1) && !(d.scale > 1); }

/* sum = x + dropout(branch + bias of the branch's last linear) */
static ResidualSum behind(const Block *b, const Branch *r, const Ctx *c, Tensor x, Tensor branch, Tensor sum)
{
    return (ResidualSum){ .sum = sum,
                          .residual = x,
                          .branch = branch,
                          .bias = param_value(c, bias_of(r)),
                          .dropout = branch_dropout(b, r, c) };
}

Err residual_stream(Ctx *c, const ModelSpec *spec, Tensor x, ResidualStream *out)
{
    const BlockNorms norms = spec->state_pre_norms ? BLOCK_NORMS_PRE : spec->block_norms;
    const DType widest = branch_dtype(c, norms, spec->moe.experts > 0);
    *out = (ResidualStream){ .sum = { .sum = x } };
    if (model_parallel(spec)) TRY(tensor_new(c->scratch, &out->mid, ctx_residual(c), x.dim[0], x.dim[1]));
    return tensor_new(c->scratch, &out->branch, widest, x.dim[0], x.dim[1]);
}

/* y [R, D], in scratch: the layer's output for the input n, behind a post-norm if the block has one. */
static Err layer_forward(const Block *b, const Branch *r, Ctx *c, Tensor n, BranchSave *save, Tensor y)
{
    Tensor out;
    if (!norms_behind(b->norms)) return r->kind->forward(r->own, c, n, y, save->own);
    TRY(save_new(c, REGION_I, &out, &save->out, c->dtype, y.dim[0], y.dim[1]));
    TRY(r->kind->forward(r->own, c, n, out, save->own));
    return norm_forward(&r->post_norm, c, out, y, &save->post_norm);
}

/* *n: the layer's input. It is the stream behind the norm, which makes the stream's sum, or the stream itself in the
 * dtype that layers read. Backward casts the latter again. */
static Err layer_input(const Block *b, const Branch *r, Ctx *c, const ResidualSum *x, BranchSave *save, Tensor *n)
{
    *n = x->sum;
    if (!norms_before(b->norms)) {
        TRY(residual_add(c, x));
        if (layers_read_stream(c, b->norms)) return ERR_OK;
        TRY(tensor_new(c->scratch, n, c->dtype, n->dim[0], n->dim[1]));
        return cast_values(c, *n, x->sum);
    }
    TRY(save_if(c, !ctx_recomputes(c, b->spec), REGION_W, n, &save->n, c->dtype, n->dim[0], n->dim[1]));
    return norm_forward_sum(&r->norm, c, x, *n, &save->norm);
}

/* The stream x, whose sum was made, goes on as sum `y` with the branch's output for the input n. */
static Err branch_output(const Block *b, const Branch *r, Ctx *c, ResidualStream *x, Tensor n, BranchSave *save,
                         Tensor y)
{
    const Tensor in = x->sum.sum;
    Tensor branch = x->branch;
    branch.dtype = branch_dtype(c, b->norms, r->kind->sums_rows);
    TRY(layer_forward(b, r, c, n, save, branch));
    x->sum = behind(b, r, c, in, branch, y);
    return ERR_OK;
}

static Err branch_forward(const Block *b, const Branch *r, Ctx *c, ResidualStream *x, BranchSave *save, Tensor y)
{
    Tensor n;
    TRY(layer_input(b, r, c, &x->sum, save, &n));
    return branch_output(b, r, c, x, n, save, y);
}

/* The sum behind the mixer is made at once: both branches' outputs lie in the same place. */
static Err parallel_forward(const Block *b, Ctx *c, ResidualStream *x, BlockSave *save, Tensor y)
{
    const ResidualSum in = { .sum = x->sum.sum };
    Tensor n, own;
    TRY(layer_input(b, &b->mixer, c, &x->sum, &save->mixer, &n));
    own = n;
    if (!b->shares_norm) TRY(layer_input(b, &b->ffn, c, &in, &save->ffn, &own));
    TRY(branch_output(b, &b->mixer, c, x, n, &save->mixer, x->mid));
    TRY(residual_add(c, &x->sum));
    x->sum = (ResidualSum){ .sum = x->mid };
    return branch_output(b, &b->ffn, c, x, own, &save->ffn, y);
}

Err block_forward(const Block *b, Ctx *c, ResidualStream *x, BlockSave *save, Tensor y)
{
    Tensor mid;
    save->segment = c->segment;
    if (model_parallel(b->spec)) return parallel_forward(b, c, x, save, y);
    if (!is_there(&b->ffn)) return branch_forward(b, &b->mixer, c, x, &save->mixer, y);
    if (!is_there(&b->mixer)) return branch_forward(b, &b->ffn, c, x, &save->ffn, y);
    TRY(stream_new(c, b->spec, b->norms, &mid, &save->mid));
    TRY(branch_forward(b, &b->mixer, c, x, &save->mixer, mid));
    return branch_forward(b, &b->ffn, c, x, &save->ffn, y);
}

/* ---- backward ---- */

/*
 * Gradient of the branch behind a residual add: d through the dropout mask and times the model's factor. Without both
 * it is d itself, with two exceptions: a queued weight gradient will read it after d has moved on, or d is wider than
 * the gradient that the layer reads. (If the layer reads a gradient wider than its weights' products do, it makes a
 * copy for these.) summed: the bias's gradient has been summed already. Where it is d itself that gradient is the sum
 * of d, never of a rounded copy, as the norm behind the branch would sum it.
 */
static Err branch_gradient(const Block *b, const Branch *r, Ctx *c, Tensor d, bool summed, Tensor *out)
{
    const Dropout drop = branch_dropout(b, r, c);
    const bool other = !branch_goes_through(drop);
    const DType dtype = branch_dtype(c, b->norms, r->kind->sums_rows);
    const bool queued = dtype == c->dtype;
    *out = d;
    if (other || (queued && c->mode.split_backward) || d.dtype != dtype) {
        TRY(queued ? dy_alloc(c, out, d.dim[0], d.dim[1]) : tensor_new(c->scratch, out, dtype, d.dim[0], d.dim[1]));
        TRY(op(c->s, residual_bwd, .dx = *out, .dy = d, .position = ctx_row_slice(c, c->batch->position),
               .sample = ctx_row_slice(c, c->batch->sample), .dropout = drop));
    }
    return summed ? ERR_OK : grad_add_columns(c, bias_of(r), other ? *out : d, 0);
}

/* *n: the layer's input, which was kept or is made again from the stream. */
static Err layer_input_again(const Block *b, Ctx *c, const Norm *norm, Saved saved, Tensor x, Tensor *n)
{
    *n = x;
    if (layers_read_stream(c, b->norms)) return ERR_OK;
    if (norms_before(b->norms) && !ctx_recomputes(c, b->spec)) {
        *n = save_get(c, saved);
        return ERR_OK;
    }
    TRY(dy_alloc(c, n, x.dim[0], x.dim[1]));
    return norms_before(b->norms) ? norm_again(norm, c, x, *n) : cast_values(c, *n, x);
}

/* The bias whose gradient the norm behind the branch can sum with that of the stream. -1: there is dropout or a factor
 * between them, or no bias. */
static int bias_of_stream(const Block *b, const Branch *r, const Ctx *c)
{
    return branch_goes_through(branch_dropout(b, r, c)) ? bias_of(r) : -1;
}

int block_bias_of_output(const Block *b, const Ctx *c)
{
    return bias_of_stream(b, is_there(&b->ffn) ? &b->ffn : &b->mixer, c);
}

/* dn, from the gradient dy of the branch's output. */
static Err layer_backward(const Block *b, const Branch *r, Ctx *c, const BranchSave *save, Tensor n, Tensor dy,
                          Tensor dn)
{
    Tensor dout;
    if (!norms_behind(b->norms)) return r->kind->backward(r->own, c, save->own, n, dy, dn);
    TRY(dy_alloc(c, &dout, dy.dim[0], dy.dim[1]));
    TRY(norm_backward_into(&r->post_norm, c, &save->post_norm, save_get(c, save->out), dy, dout));
    return r->kind->backward(r->own, c, save->own, n, dout, dn);
}

/* rows.dx += the gradient of x, from rows.dy, the gradient of the layer's input. */
static Err stream_backward(const Block *b, const Branch *r, Ctx *c, const BranchSave *save, NormRows rows, int bias)
{
    if (norms_before(b->norms)) return norm_backward_sum(&r->norm, c, &save->norm, rows, bias);
    ASSERT(bias < 0); /* (a bias would stand behind the norm of a layer's output: config.def refuses it) */
    return add_rows(c, rows.dx, rows.dy);
}

/* rows.dx in: the gradient of the sum behind the branch; out: that of x, the sum before it. rows.dy [R, D]: scratch. */
static Err branch_backward(const Block *b, const Branch *r, Ctx *c, const BranchSave *save, NormRows rows,
                           InputSum sums)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor n, dbranch;
    rows.dy.dtype = input_dtype(c, b->norms, r->kind->sums_rows);
    TRY(branch_gradient(b, r, c, rows.dx, sums.done, &dbranch));
    TRY(layer_input_again(b, c, &r->norm, save->n, rows.x, &n));
    TRY(layer_backward(b, r, c, save, n, dbranch, rows.dy));
    TRY(stream_backward(b, r, c, save, rows, sums.bias));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* dn: the gradient of the branch's input n, from d, which stays. */
static Err parallel_branch(const Block *b, const Branch *r, Ctx *c, const BranchSave *save, Tensor n, Tensor d,
                           bool summed, Tensor *dn)
{
    Tensor dbranch;
    TRY(tensor_new(c->scratch, dn, input_dtype(c, b->norms, r->kind->sums_rows), d.dim[0], d.dim[1]));
    TRY(branch_gradient(b, r, c, d, summed, &dbranch));
    return layer_backward(b, r, c, save, n, dbranch, *dn);
}

static Err parallel_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor d, InputSum sums)
{
    const Branch *const m = &b->mixer, *const f = &b->ffn;
    Tensor n, own, dn, down;
    TRY(layer_input_again(b, c, &m->norm, save->mixer.n, x, &n));
    own = n;
    if (!b->shares_norm) TRY(layer_input_again(b, c, &f->norm, save->ffn.n, x, &own));
    TRY(parallel_branch(b, f, c, &save->ffn, own, d, sums.done, &down));
    TRY(parallel_branch(b, m, c, &save->mixer, n, d, false, &dn));
    if (!b->shares_norm) {
        TRY(norm_backward_sum(&f->norm, c, &save->ffn.norm, (NormRows){ x, down, d }, -1));
    } else if (dn.dtype == c->dtype && down.dtype != c->dtype) { /* (the wider one takes both) */
        TRY(add_rows(c, down, dn));
        dn = down;
    } else {
        TRY(add_rows(c, dn, down));
    }
    return norm_backward_sum(&m->norm, c, &save->mixer.norm, (NormRows){ x, dn, d }, sums.bias);
}

/* The backward of a block of one layer. */
static Err single_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor d, InputSum sums)
{
    const bool mixer = is_there(&b->mixer);
    const Branch *r = mixer ? &b->mixer : &b->ffn;
    Tensor dn;
    TRY(tensor_new(c->scratch, &dn, input_dtype(c, b->norms, r->kind->sums_rows), d.dim[0], d.dim[1]));
    return branch_backward(b, r, c, mixer ? &save->mixer : &save->ffn, (NormRows){ x, dn, d }, sums);
}

static Err serial_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor d, InputSum sums)
{
    const int between = bias_of_stream(b, &b->mixer, c);
    const DType widest = input_dtype(c, b->norms, b->ffn.kind->sums_rows);
    Tensor dn;
    if (!has_both(b)) return single_backward(b, c, save, x, d, sums);
    TRY(tensor_new(c->scratch, &dn, widest, d.dim[0], d.dim[1]));
    TRY(branch_backward(b, &b->ffn, c, &save->ffn, (NormRows){ save_get(c, save->mid), dn, d },
                        (InputSum){ .bias = between, .done = sums.done }));
    return branch_backward(b, &b->mixer, c, &save->mixer, (NormRows){ x, dn, d },
                           (InputSum){ .bias = sums.bias, .done = between >= 0 });
}

Err block_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor d, InputSum sums)
{
    ArenaMark mark = arena_mark(c->scratch);
    TRY((model_parallel(b->spec) ? parallel_backward : serial_backward)(b, c, save, x, d, sums));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- full recomputation ---- */

/* Saves go to scratch: nothing of the forward is kept, or it is made again. */
static void saves_to_scratch(Ctx *c)
{
    for (int r = 0; r < REGION_COUNT; r++) c->into[r] = c->scratch;
}

static bool again_whole(const Block *b) { return model_recompute(b->spec, b->index) == RECOMPUTE_FULL; }

Err block_run(const Block *b, const Ctx *stage, ResidualStream *x, BlockSave *save)
{
    Ctx c = block_ctx(b, stage);
    if (again_whole(b)) saves_to_scratch(&c);
    TRY(block_forward(b, &c, x, save, (Tensor){ 0 }));
    segment_end(stage);
    return ERR_OK;
}

/* Under full recomputation the block's output is made at once: the terms of its sum are not kept. */
Err block_output(const Block *b, Ctx *c, ResidualStream *x, Tensor y)
{
    x->sum.sum = y;
    if (!again_whole(b)) return ERR_OK;
    TRY(residual_add(c, &x->sum));
    x->sum = (ResidualSum){ .sum = y };
    return ERR_OK;
}

/* Full recomputation: runs the block's forward once more, into scratch, then its backward from there. The output is not
 * made again, since backward does not read it. */
static Err backward_again(const Block *b, Ctx *c, BlockSave *save, Tensor x, Tensor d, InputSum sums)
{
    ArenaMark mark = arena_mark(c->scratch);
    ResidualStream stream;
    Segment *g = &c->slot->segments[save->segment], saved_segment = *g;
    saves_to_scratch(c);
    c->mode.split_backward = false; /* its W must follow at once: the inputs live in scratch */
    segment_begin(c, save->segment);
    TRY(residual_stream(c, b->spec, x, &stream));
    TRY(block_forward(b, c, &stream, save, (Tensor){ 0 }));
    TRY(block_backward(b, c, save, x, d, sums));
    *g = saved_segment; /* where the block's input still lies */
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err block_run_backward(const Block *b, const Ctx *stage, BlockSave *save, Tensor x, Tensor d, InputSum sums)
{
    Ctx c = block_ctx(b, stage);
    if (again_whole(b)) return backward_again(b, &c, save, x, d, sums);
    return block_backward(b, &c, save, x, d, sums);
}
