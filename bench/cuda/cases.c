/* See cases.h; mixtures of experts: cases_moe.c. */
#include "make_case.h"

#include <math.h>
#include <stdlib.h>

#include "base/rng.h"

Err run_any(Stream *s, OpId id, const AnyArgs *a)
{
    switch (id) {
#define T(name, dims)
#define S(type, name)
#define OP(name, flop, args) \
    case OP_##name: return op_##name(s, &a->name);
#include "device/ops.def"
#undef OP
#undef S
#undef T
    case OP_COUNT: break;
    }
    return err_set(ERR_INTERNAL, "no op %d", (int)id);
}

/* Different ones among the N tokens of a batch. */
static int64_t distinct_tokens(const Maker *m)
{
    int64_t N = tokens_of(m), count = 0;
    char *seen = calloc((size_t)m->d->V, 1);
    ASSERT(seen);
    for (int64_t i = 0; i < N; i++) {
        char *s = &seen[m->tokens[i % m->pattern_items]];
        count += !*s;
        *s = 1;
    }
    free(seen);
    return count;
}

Err make_step(Maker *m, StepValues **out)
{
    StepValues v = { .step = 100, .nominal = tokens_of(m), .lr = 1e-4f, .correct1 = 0.9f, .correct2 = 0.9f, .clip = 1,
                     .loss_scale = 1 / (float)tokens_of(m), .unscale = 1, .grad_scale = 1, .counted = tokens_of(m) };
    void *p;
    TRY(arena_alloc(m->arena, sizeof v, &p));
    *out = p;
    return device_write(&m->dev->stream, p, &v, sizeof v);
}

/* ---- products ---- */

static void linear_dims(const Maker *m, int64_t *N, int64_t *O, int64_t *I)
{
    const Dims *d = m->d;
    const int64_t heads = d->H * d->C;
    const int64_t sizes[][2] = { [QKV] = { 3 * heads, d->D }, [PROJ] = { d->D, heads }, [FC1] = { d->F, d->D },
                                 [FC2] = { d->D, d->F }, [HEAD] = { d->V, d->D } };
    *N = tokens_of(m);
    *O = sizes[m->c->shape][0];
    *I = sizes[m->c->shape][1];
}

static Err make_linear_fwd(Maker *m, AnyArgs *any)
{
    linear_fwd_args *a = &any->linear_fwd;
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    ONCE(y, N, O);
    ONCE(x, N, I);
    ONCE(w, O, I);
    if (m->c->shape != HEAD) ONCE(bias, O);
    if (m->c->option) ONCE(gelu, N, O);
    a->leaf = I;
    return ERR_OK;
}

static Err make_linear_dx(Maker *m, AnyArgs *any)
{
    linear_dx_args *a = &any->linear_dx;
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    ONCE(dx, N, I);
    ONCE(dy, N, O);
    ONCE(w, O, I);
    if (m->c->option) ONCE(gelu_x, N, I);
    a->leaf = O;
    return ERR_OK;
}

static Err make_linear_dw(Maker *m, AnyArgs *any)
{
    linear_dw_args *a = &any->linear_dw;
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    MAKE(dw, m->c->option ? 2 : 1, UNIFORM, F32, O, I);
    ONCE(dy, N, O);
    ONCE(x, N, I);
    SHIFT_OF_GRADIENT;
    a->leaf = m->d->T;
    a->fresh = !m->c->option;
    return ERR_OK;
}

static Err make_bias_grad(Maker *m, AnyArgs *any)
{
    bias_grad_args *a = &any->bias_grad;
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    MAKE(dbias, 2, UNIFORM, F32, O);
    ONCE(dy, N, O);
    SHIFT_OF_GRADIENT;
    a->leaf = m->d->T;
    return ERR_OK;
}

/* ---- embedding ---- */

static Err make_embedding_fwd(Maker *m, AnyArgs *any)
{
    embedding_fwd_args *a = &any->embedding_fwd;
    int64_t N = tokens_of(m);
    ONCE(y, N, m->d->D);
    UNCOUNTED(table, m->d->V, m->d->D);
    MAKE(index, 1, TOKENS, I32, N);
    m->bytes += distinct_tokens(m) * m->d->D * dtype_size(m->dtype);
    return ERR_OK;
}

static Err make_embedding_grad(Maker *m, AnyArgs *any)
{
    embedding_grad_args *a = &any->embedding_grad;
    int64_t N = tokens_of(m);
    MAKE(dtable, 0, UNIFORM, F32, m->d->V, m->d->D);
    ONCE(dy, N, m->d->D);
    MAKE(index, 1, TOKENS, I32, N);
    SHIFT_OF_GRADIENT;
    m->bytes += 2 * distinct_tokens(m) * m->d->D * 4;
    return ERR_OK;
}

/* ---- norms; option: RMSNorm ---- */

static Err make_norm_fwd(Maker *m, AnyArgs *any)
{
    norm_fwd_args *a = &any->norm_fwd;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N, D);
    if (!m->c->option) MAKE(mean, 1, UNIFORM, F32, N);
    MAKE(rstd, 1, POSITIVE, F32, N);
    ONCE(x, N, D);
    ONCE(w, D);
    if (!m->c->option) ONCE(b, D);
    a->eps = 1e-5f;
    return ERR_OK;
}

static Err make_norm_bwd(Maker *m, AnyArgs *any)
{
    norm_bwd_args *a = &any->norm_bwd;
    int64_t N = tokens_of(m), D = m->d->D;
    TWICE(dx, N, D);
    MAKE(dw, 2, UNIFORM, F32, D);
    if (!m->c->option) MAKE(db, 2, UNIFORM, F32, D);
    ONCE(dy, N, D);
    ONCE(x, N, D);
    ONCE(w, D);
    if (!m->c->option) MAKE(mean, 1, UNIFORM, F32, N);
    MAKE(rstd, 1, POSITIVE, F32, N);
    MAKE(shift_w, 0, ZERO, I32, 1);
    if (!m->c->option) MAKE(shift_b, 0, ZERO, I32, 1);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->leaf = 16;
    return ERR_OK;
}

/* ---- elementwise; option: dropout ---- */

static Dropout tenth(const Maker *m)
{
    return m->c->option ? (Dropout){ rng_key(1, "bench"), dropout_threshold(0.1f), 1 / 0.9f } : (Dropout){ 0, 0, 1 };
}

static Err make_residual_fwd(Maker *m, AnyArgs *any)
{
    residual_fwd_args *a = &any->residual_fwd;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N, D);
    ONCE(residual, N, D);
    ONCE(x, N, D);
    ONCE(bias, D);
    MAKE(position, 0, POSITIONS, I32, N);
    MAKE(sample, 0, SAMPLES, I64, N);
    a->dropout = tenth(m);
    return ERR_OK;
}

/* Without dropout: residual_fwd shows what that costs. */
static Err make_residual_norm_fwd(Maker *m, AnyArgs *any)
{
    residual_norm_fwd_args *a = &any->residual_norm_fwd;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N, D);
    if (!m->c->option) MAKE(mean, 1, UNIFORM, F32, N);
    MAKE(rstd, 1, POSITIVE, F32, N);
    ONCE(sum, N, D);
    ONCE(residual, N, D);
    ONCE(x, N, D);
    ONCE(w, D);
    if (!m->c->option) ONCE(bias, D);
    if (!m->c->option) ONCE(b, D);
    MAKE(position, 0, POSITIONS, I32, N);
    MAKE(sample, 0, SAMPLES, I64, N);
    a->dropout = (Dropout){ 0, 0, 1 };
    a->eps = 1e-5f;
    return ERR_OK;
}

static Err make_residual_bwd(Maker *m, AnyArgs *any)
{
    residual_bwd_args *a = &any->residual_bwd;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(dx, N, D);
    ONCE(dy, N, D);
    MAKE(position, 0, POSITIONS, I32, N);
    MAKE(sample, 0, SAMPLES, I64, N);
    a->dropout = tenth(m);
    return ERR_OK;
}

static Err make_gelu_fwd(Maker *m, AnyArgs *any)
{
    gelu_fwd_args *a = &any->gelu_fwd;
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

static Err make_gelu_bwd(Maker *m, AnyArgs *any)
{
    gelu_bwd_args *a = &any->gelu_bwd;
    ONCE(dx, tokens_of(m), m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

static Err make_swiglu_fwd(Maker *m, AnyArgs *any)
{
    swiglu_fwd_args *a = &any->swiglu_fwd;
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    return ERR_OK;
}

static Err make_swiglu_bwd(Maker *m, AnyArgs *any)
{
    swiglu_bwd_args *a = &any->swiglu_bwd;
    ONCE(dx, tokens_of(m), 2 * m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    return ERR_OK;
}

static Err make_clamped_swiglu_fwd(Maker *m, AnyArgs *any)
{
    clamped_swiglu_fwd_args *a = &any->clamped_swiglu_fwd;
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    a->limit = 7;
    return ERR_OK;
}

static Err make_clamped_swiglu_bwd(Maker *m, AnyArgs *any)
{
    clamped_swiglu_bwd_args *a = &any->clamped_swiglu_bwd;
    ONCE(dx, tokens_of(m), 2 * m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    a->limit = 7;
    return ERR_OK;
}

static Err make_fill_zero(Maker *m, AnyArgs *any)
{
    fill_zero_args *a = &any->fill_zero;
    ONCE(x, tokens_of(m), m->d->D);
    return ERR_OK;
}

static Err make_fill_zero_acc(Maker *m, AnyArgs *any)
{
    fill_zero_acc_args *a = &any->fill_zero_acc;
    MAKE(x, 1, UNIFORM, F32, m->d->P);
    return ERR_OK;
}

static Err make_add_acc(Maker *m, AnyArgs *any)
{
    add_acc_args *a = &any->add_acc;
    MAKE(y, 1, UNIFORM, F32, m->d->P);
    MAKE(x, 1, UNIFORM, F32, m->d->P);
    return ERR_OK;
}

static Err make_cast(Maker *m, AnyArgs *any)
{
    cast_args *a = &any->cast;
    ONCE(y, m->d->P);
    MAKE(x, 1, UNIFORM, F32, m->d->P);
    return ERR_OK;
}

/* ---- loss ---- */

enum { VOCAB_BLOCKS = 8 };

static Err make_xent_stats(Maker *m, AnyArgs *any)
{
    xent_stats_args *a = &any->xent_stats;
    int64_t N = tokens_of(m), V = m->d->V;
    MAKE(block_max, 1, UNIFORM, F32, N, VOCAB_BLOCKS);
    MAKE(block_sum, 1, UNIFORM, F32, N, VOCAB_BLOCKS);
    MAKE(target_logit, 1, UNIFORM, F32, N);
    ONCE(logits, N, V);
    MAKE(target, 1, TOKENS, I32, N);
    a->block = V / VOCAB_BLOCKS;
    a->vocab = V;
    return ERR_OK;
}

static Err make_xent_loss(Maker *m, AnyArgs *any)
{
    xent_loss_args *a = &any->xent_loss;
    int64_t N = tokens_of(m);
    MAKE(loss, 1, UNIFORM, F32, N);
    MAKE(row_max, 1, UNIFORM, F32, N);
    MAKE(row_sum, 1, UNIFORM, F32, N);
    MAKE(block_max, 1, UNIFORM, F32, 1, N, VOCAB_BLOCKS);
    MAKE(block_sum, 1, POSITIVE, F32, 1, N, VOCAB_BLOCKS);
    MAKE(target_logit, 1, UNIFORM, F32, 1, N);
    MAKE(target, 1, TOKENS, I32, N);
    return ERR_OK;
}

static Err make_xent_bwd(Maker *m, AnyArgs *any)
{
    xent_bwd_args *a = &any->xent_bwd;
    int64_t N = tokens_of(m), V = m->d->V;
    StepValues *step;
    TWICE(logits, N, V);
    MAKE(target, 1, TOKENS, I32, N);
    MAKE(row_max, 1, POSITIVE, F32, N);
    MAKE(row_sum, 1, POSITIVE, F32, N);
    TRY(make_step(m, &step));
    a->step = step;
    a->weight = 1;
    a->vocab = V;
    return ERR_OK;
}

static Err make_xent_row(Maker *m, AnyArgs *any)
{
    xent_row_args *a = &any->xent_row;
    int64_t N = tokens_of(m), V = m->d->V;
    StepValues *step;
    MAKE(loss, 1, UNIFORM, F32, N);
    TWICE(logits, N, V);
    MAKE(target, 1, TOKENS, I32, N);
    TRY(make_step(m, &step));
    a->step = step;
    a->weight = 1;
    a->block = V / VOCAB_BLOCKS;
    a->vocab = V;
    return ERR_OK;
}

static Err make_loss_sum(Maker *m, AnyArgs *any)
{
    loss_sum_args *a = &any->loss_sum;
    MAKE(sums, 0, ZERO, I64, 3);
    MAKE(loss, 1, POSITIVE, F32, tokens_of(m));
    MAKE(target, 1, TOKENS, I32, tokens_of(m));
    return ERR_OK;
}

/* ---- optimizer ---- */

enum { TENSORS = 148 }; /* a model of 12 layers has some 150 parameter tensors */

/* Of P elements: a third of the tensors, as of GPT-2's, are matrices, the others vectors. */
static Err make_parts(Maker *m, Tensor *out, int64_t *chunks)
{
    const int64_t matrices = TENSORS / 3, vectors = TENSORS - matrices, vector = m->d->D;
    const int64_t matrix = (m->d->P - vectors * vector) / matrices / 64 * 64;
    FlatPart part[TENSORS];
    int64_t at = 0;
    *chunks = 0;
    ASSERT(matrix > 0);
    for (int i = 0; i < TENSORS; i++) {
        const int64_t count = i < matrices ? matrix : vector;
        part[i] = (FlatPart){ .flat = at, .slice = at, .count = count, .chunk = *chunks, .number = i,
                              .flags = FLAT_COUNTS | FLAT_DECAYS };
        at += count;
        *chunks += flat_chunks(count);
    }
    TRY(tensor_new(m->arena, out, I64, TENSORS, 5));
    return device_write(&m->dev->stream, out->data, part, sizeof part);
}

static Err make_grad_stats(Maker *m, AnyArgs *any)
{
    grad_stats_args *a = &any->grad_stats;
    MAKE(max, 0, ZERO, I64, TENSORS);
    MAKE(sumsq, 0, ZERO, I64, TENSORS, 4);
    MAKE(g, 1, UNIFORM, F32, m->d->P);
    MAKE(shift, 0, ZERO, I32, TENSORS);
    return make_parts(m, &a->parts, &a->chunks);
}

static Err make_step_finish(Maker *m, AnyArgs *any)
{
    step_finish_args *a = &any->step_finish;
    MAKE(max, 1, ZERO, I64, TENSORS);
    MAKE(sumsq, 1, ZERO, I64, TENSORS, 4);
    MAKE(shift, 1, ZERO, I32, TENSORS);
    MAKE(next_shift, 1, ZERO, I32, TENSORS);
    MAKE(loss_sums, 0, ZERO, I64, 3);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->acc = F32;
    return make_step(m, &a->step);
}

static Err make_adamw(Maker *m, AnyArgs *any)
{
    adamw_args *a = &any->adamw;
    StepValues *step;
    MAKE(w, 2, UNIFORM, F32, m->d->P);
    MAKE(m, 2, UNIFORM, F32, m->d->P);
    MAKE(v, 2, POSITIVE, F32, m->d->P);
    MAKE(g, 1, UNIFORM, F32, m->d->P);
    ONCE(copy, m->d->P);
    MAKE(shift, 0, ZERO, I32, TENSORS);
    TRY(make_parts(m, &a->parts, &a->chunks));
    TRY(make_step(m, &step));
    a->step = step;
    a->beta1 = 0.9f, a->beta2 = 0.95f, a->eps = 1e-8f, a->decay = 0.1f;
    return ERR_OK;
}

/* ---- the list ---- */

#define CASE(name, what, ...) { OP_##name, what, make_##name, __VA_ARGS__ }

const Case bench_cases[] = {
    CASE(linear_fwd, "qkv", QKV),
    CASE(linear_fwd, "proj", PROJ),
    CASE(linear_fwd, "fc1", FC1),
    CASE(linear_fwd, "fc1 and GELU", FC1, 1),
    CASE(linear_fwd, "fc2", FC2),
    CASE(linear_fwd, "head", HEAD),
    CASE(linear_dx, "qkv", QKV),
    CASE(linear_dx, "proj", PROJ),
    CASE(linear_dx, "fc1", FC1),
    CASE(linear_dx, "fc2", FC2),
    CASE(linear_dx, "fc2 and GELU", FC2, 1),
    CASE(linear_dx, "head", HEAD),
    CASE(linear_dw, "qkv", QKV),
    CASE(linear_dw, "proj", PROJ),
    CASE(linear_dw, "fc1", FC1),
    CASE(linear_dw, "fc1, accumulated", FC1, 1),
    CASE(linear_dw, "fc2", FC2),
    CASE(linear_dw, "head", HEAD),
    CASE(jitter, "", NO_SHAPE),
    CASE(router_even, "", NO_SHAPE),
    CASE(sinkhorn, "", NO_SHAPE),
    CASE(router_fwd, "sigmoid", NO_SHAPE),
    CASE(router_bwd, "sigmoid", NO_SHAPE),
    CASE(router_count, "", NO_SHAPE),
    CASE(router_balance, "sigmoid, z", NO_SHAPE),
    CASE(expert_count, "", NO_SHAPE),
    CASE(expert_bias, "", NO_SHAPE),
    CASE(choice_drop, "half of them", NO_SHAPE),
    CASE(room_limits, "8 ranks", NO_SHAPE),
    CASE(permute_index, "", NO_SHAPE),
    CASE(dispatch_offsets, "8 ranks", NO_SHAPE),
    CASE(dispatch_choices, "1 rank", NO_SHAPE),
    CASE(take_rows, "weighted", NO_SHAPE),
    CASE(sum_parts, "2 parts", NO_SHAPE),
    CASE(permute_rows, "", NO_SHAPE),
    CASE(unpermute_rows, "weighted", NO_SHAPE),
    CASE(unpermute_rows, "added", NO_SHAPE, 1),
    CASE(unpermute_bwd, "", NO_SHAPE),
    CASE(grouped_fwd, "fc1", FC1),
    CASE(grouped_fwd, "fc2", FC2),
    CASE(grouped_dx, "fc1", FC1),
    CASE(grouped_dx, "fc2", FC2),
    CASE(grouped_dw, "fc1", FC1),
    CASE(grouped_dw, "fc2", FC2),
    CASE(grouped_bias, "fc1", FC1),
    CASE(grouped_bias_grad, "fc1", FC1),
    CASE(gated_add_fwd, "", NO_SHAPE),
    CASE(gated_add_bwd, "", NO_SHAPE),
    CASE(attention_fwd, "causal", NO_SHAPE),
    CASE(attention_fwd, "causal, grouped", NO_SHAPE, GROUPED),
    CASE(attention_fwd, "8 documents, FLOP of 1", NO_SHAPE, DOCUMENTS),
    CASE(attention_bwd, "causal", NO_SHAPE),
    CASE(attention_bwd, "causal, grouped", NO_SHAPE, GROUPED),
    CASE(attention_bwd, "8 documents, FLOP of 1", NO_SHAPE, DOCUMENTS),
    CASE(attention_fwd, "causal, capped, sinks", NO_SHAPE, CAPPED),
    CASE(attention_bwd, "causal, capped", NO_SHAPE, CAPPED),
    CASE(sink_bwd, "", NO_SHAPE),
    CASE(gate_fwd, "", NO_SHAPE),
    CASE(gate_bwd, "", NO_SHAPE),
    CASE(qkv_split, "", NO_SHAPE),
    CASE(qkv_split, "grouped", NO_SHAPE, GROUPED),
    CASE(qkv_merge, "", NO_SHAPE),
    CASE(join_columns, "", NO_SHAPE),
    CASE(mla_split, "", NO_SHAPE),
    CASE(mla_merge, "", NO_SHAPE),
    CASE(rope, "q", NO_SHAPE),
    CASE(bias_grad, "qkv", QKV),
    CASE(bias_grad, "fc1", FC1),
    CASE(embedding_fwd, "tokens", NO_SHAPE),
    CASE(embedding_grad, "tokens", NO_SHAPE),
    CASE(norm_fwd, "LayerNorm", NO_SHAPE),
    CASE(norm_fwd, "RMSNorm", NO_SHAPE, 1),
    CASE(residual_norm_fwd, "LayerNorm", NO_SHAPE),
    CASE(residual_norm_fwd, "RMSNorm", NO_SHAPE, 1),
    CASE(norm_bwd, "LayerNorm", NO_SHAPE),
    CASE(norm_bwd, "RMSNorm", NO_SHAPE, 1),
    CASE(residual_fwd, "", NO_SHAPE),
    CASE(residual_fwd, "dropout", NO_SHAPE, 1),
    CASE(residual_bwd, "dropout", NO_SHAPE, 1),
    CASE(gelu_fwd, "", NO_SHAPE),
    CASE(gelu_bwd, "", NO_SHAPE),
    CASE(swiglu_fwd, "", NO_SHAPE),
    CASE(swiglu_bwd, "", NO_SHAPE),
    CASE(clamped_swiglu_fwd, "", NO_SHAPE),
    CASE(clamped_swiglu_bwd, "", NO_SHAPE),
    CASE(fill_zero, "", NO_SHAPE),
    CASE(fill_zero_acc, "all gradients", NO_SHAPE),
    CASE(add_acc, "all gradients", NO_SHAPE),
    CASE(cast, "all weights, from fp32", NO_SHAPE),
    CASE(xent_stats, "", NO_SHAPE),
    CASE(xent_loss, "", NO_SHAPE),
    CASE(xent_bwd, "", NO_SHAPE),
    CASE(xent_row, "", NO_SHAPE),
    CASE(loss_sum, "", NO_SHAPE),
    CASE(grad_stats, "all gradients", NO_SHAPE),
    CASE(step_finish, "", NO_SHAPE),
    CASE(adamw, "all weights", NO_SHAPE),
};

const Case bench_square = CASE(linear_fwd, "square", PROJ);
const int bench_case_count = sizeof bench_cases / sizeof *bench_cases;

Err maker_make(Maker *m, const Case *c, AnyArgs *out)
{
    *out = (AnyArgs){ 0 };
    m->c = c;
    m->bytes = 0;
    return c->make(m, out);
}
