/* The cases of products, norms, elementwise ops, loss and optimizer. See cases.h, make_case.h. */
#include "measure/make_case.h"

#include <math.h>
#include <stdlib.h>

#include "base/rng.h"

Err run_any(Stream *s, OpId id, const AnyArgs *a)
{
    switch (id) {
#define OP(name, flop, args) \
    case OP_##name:          \
        return op_##name(s, &a->name);
#include "device/ops.def"
#undef OP
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
    StepValues v = { .step = 100,
                     .nominal = tokens_of(m),
                     .lr = 1e-4f,
                     .correct1 = 0.9f,
                     .correct2 = 0.9f,
                     .clip = 1,
                     .loss_scale = 1 / (float)tokens_of(m),
                     .unscale = 1,
                     .grad_scale = 1,
                     .counted = tokens_of(m) };
    void *p;
    TRY(arena_alloc(m->arena, sizeof v, &p));
    *out = p;
    return device_write(&m->dev->stream, p, &v, sizeof v);
}

/* ---- products ---- */

void linear_dims(const Maker *m, int64_t *N, int64_t *O, int64_t *I)
{
    const Dims *d = m->d;
    const int64_t heads = d->H * d->C;
    const int64_t sizes[][2] = { [QKV] = { 3 * heads, d->D },
                                 [PROJ] = { d->D, heads },
                                 [FC1] = { d->F, d->D },
                                 [FC2] = { d->D, d->F },
                                 [HEAD] = { d->V, d->D } };
    *N = tokens_of(m);
    *O = sizes[m->c->shape][0];
    *I = sizes[m->c->shape][1];
}

BENCH(linear_fwd, { "qkv", QKV }, { "proj", PROJ }, { "fc1", FC1 }, { "fc1 and GELU", FC1, 1 }, { "fc2", FC2 },
      { "head", HEAD })
{
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

BENCH(linear_dx, { "qkv", QKV }, { "proj", PROJ }, { "fc1", FC1 }, { "fc2", FC2 }, { "fc2 and GELU", FC2, 1 },
      { "head", HEAD })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    ONCE(dx, N, I);
    ONCE(dy, N, O);
    ONCE(w, O, I);
    if (m->c->option) ONCE(gelu_x, N, I);
    a->leaf = O;
    return ERR_OK;
}

BENCH(linear_dw, { "qkv", QKV }, { "proj", PROJ }, { "fc1", FC1 }, { "fc1, accumulated", FC1, 1 }, { "fc2", FC2 },
      { "head", HEAD })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    MAKE(dw, m->c->option ? 2 : 1, UNIFORM, m->acc, O, I);
    ONCE(dy, N, O);
    ONCE(x, N, I);
    SHIFT_OF_GRADIENT;
    a->leaf = m->d->T;
    a->fresh = !m->c->option;
    return ERR_OK;
}

BENCH(bias_grad, { "qkv", QKV }, { "fc1", FC1 })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    MAKE(dbias, 2, UNIFORM, m->acc, O);
    ONCE(dy, N, O);
    SHIFT_OF_GRADIENT;
    a->leaf = m->d->T;
    return ERR_OK;
}

/* ---- embedding ---- */

BENCH(embedding_fwd, { "tokens" })
{
    int64_t N = tokens_of(m);
    ONCE(y, N, m->d->D);
    UNCOUNTED(table, m->d->V, m->d->D);
    MAKE(index, 1, TOKENS, I32, N);
    m->bytes += distinct_tokens(m) * m->d->D * dtype_size(m->dtype);
    return ERR_OK;
}

BENCH(embedding_grad, { "tokens" })
{
    int64_t N = tokens_of(m);
    MAKE(dtable, 0, UNIFORM, m->acc, m->d->V, m->d->D);
    ONCE(dy, N, m->d->D);
    MAKE(index, 1, TOKENS, I32, N);
    SHIFT_OF_GRADIENT;
    m->bytes += 2 * distinct_tokens(m) * m->d->D * dtype_size(m->acc);
    return ERR_OK;
}

/* ---- norms; option: RMSNorm ---- */

BENCH(norm_fwd, { "LayerNorm" }, { "RMSNorm", .option = 1 })
{
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

BENCH(norm_bwd, { "LayerNorm" }, { "RMSNorm", .option = 1 })
{
    int64_t N = tokens_of(m), D = m->d->D;
    TWICE(dx, N, D);
    MAKE(dw, 2, UNIFORM, m->acc, D);
    if (!m->c->option) MAKE(db, 2, UNIFORM, m->acc, D);
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

BENCH(residual_fwd, { "" }, { "dropout", .option = 1 })
{
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
BENCH(residual_norm_fwd, { "LayerNorm" }, { "RMSNorm", .option = 1 })
{
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

BENCH(residual_bwd, { "dropout", .option = 1 })
{
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(dx, N, D);
    ONCE(dy, N, D);
    MAKE(position, 0, POSITIONS, I32, N);
    MAKE(sample, 0, SAMPLES, I64, N);
    a->dropout = tenth(m);
    return ERR_OK;
}

BENCH(gelu_fwd, { "" })
{
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

BENCH(gelu_bwd, { "" })
{
    ONCE(dx, tokens_of(m), m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

BENCH(gelu_erf_fwd, { "" })
{
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

BENCH(gelu_erf_bwd, { "" })
{
    ONCE(dx, tokens_of(m), m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

BENCH(relu2_fwd, { "" })
{
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

BENCH(relu2_bwd, { "" })
{
    ONCE(dx, tokens_of(m), m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), m->d->F);
    return ERR_OK;
}

BENCH(swiglu_fwd, { "" })
{
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    return ERR_OK;
}

BENCH(swiglu_bwd, { "" })
{
    ONCE(dx, tokens_of(m), 2 * m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    return ERR_OK;
}

BENCH(geglu_fwd, { "" })
{
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    return ERR_OK;
}

BENCH(geglu_bwd, { "" })
{
    ONCE(dx, tokens_of(m), 2 * m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    return ERR_OK;
}

BENCH(scale, { "" })
{
    ONCE(y, tokens_of(m), m->d->D);
    ONCE(x, tokens_of(m), m->d->D);
    a->factor = 2;
    return ERR_OK;
}

BENCH(softcap, { "" })
{
    ONCE(y, tokens_of(m), m->d->V);
    ONCE(x, tokens_of(m), m->d->V);
    a->cap = 30;
    return ERR_OK;
}

BENCH(clamped_swiglu_fwd, { "" })
{
    ONCE(y, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    a->limit = 7;
    return ERR_OK;
}

BENCH(clamped_swiglu_bwd, { "" })
{
    ONCE(dx, tokens_of(m), 2 * m->d->F);
    ONCE(dy, tokens_of(m), m->d->F);
    ONCE(x, tokens_of(m), 2 * m->d->F);
    a->chunk = m->d->F / 8;
    a->limit = 7;
    return ERR_OK;
}

BENCH(fill_zero, { "" })
{
    ONCE(x, tokens_of(m), m->d->D);
    return ERR_OK;
}

BENCH(fill_zero_acc, { "all gradients" })
{
    MAKE(x, 1, UNIFORM, m->acc, m->d->P);
    return ERR_OK;
}

BENCH(add_acc, { "all gradients" })
{
    MAKE(y, 1, UNIFORM, m->acc, m->d->P);
    MAKE(x, 1, UNIFORM, m->acc, m->d->P);
    return ERR_OK;
}

BENCH(cast, { "all weights, from fp32" })
{
    ONCE(y, m->d->P);
    MAKE(x, 1, UNIFORM, F32, m->d->P);
    return ERR_OK;
}

/* ---- loss ---- */

enum { VOCAB_BLOCKS = 8 };

BENCH(xent_stats, { "" })
{
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

BENCH(xent_loss, { "" })
{
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

BENCH(xent_bwd, { "" })
{
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

BENCH(xent_row, { "" })
{
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

BENCH(loss_sum, { "" })
{
    MAKE(sums, 0, ZERO, I64, 3);
    MAKE(loss, 1, POSITIVE, F32, tokens_of(m));
    MAKE(target, 1, TOKENS, I32, tokens_of(m));
    return ERR_OK;
}

/* ---- optimizer ---- */

enum { TENSORS = 148 }; /* a model of 12 layers has some 150 parameter tensors */

/* Parts of P elements: a third of the tensors, as in GPT-2, are matrices, the others vectors. */
static Err make_parts(Maker *m, int flags, Tensor *out, int64_t *chunks)
{
    const int64_t matrices = TENSORS / 3, vectors = TENSORS - matrices, vector = m->d->D;
    const int64_t matrix = (m->d->P - vectors * vector) / matrices / 64 * 64;
    FlatPart part[TENSORS];
    int64_t at = 0;
    *chunks = 0;
    ASSERT(matrix > 0);
    for (int i = 0; i < TENSORS; i++) {
        const int64_t count = i < matrices ? matrix : vector;
        part[i] = (FlatPart){ .grad = at,
                              .value = at,
                              .shard = at,
                              .v = at,
                              .count = count,
                              .chunk = *chunks,
                              .number = i,
                              .flags = FLAT_COUNTS | FLAT_DECAYS | flags };
        at += count;
        *chunks += flat_chunks(count);
    }
    TRY(tensor_new(m->arena, out, I64, TENSORS, sizeof *part / sizeof(int64_t)));
    return device_write(&m->dev->stream, out->data, part, sizeof part);
}

BENCH(grad_stats, { "all gradients" })
{
    MAKE(max, 0, ZERO, I64, TENSORS);
    MAKE(sumsq, 0, ZERO, I64, TENSORS, 4);
    MAKE(g, 1, UNIFORM, m->acc, m->d->P);
    MAKE(shift, 0, ZERO, I32, TENSORS);
    return make_parts(m, 0, &a->parts, &a->chunks);
}

BENCH(step_finish, { "" })
{
    MAKE(max, 1, ZERO, I64, TENSORS);
    MAKE(sumsq, 1, ZERO, I64, TENSORS, 4);
    MAKE(shift, 1, ZERO, I32, TENSORS);
    MAKE(next_shift, 1, ZERO, I32, TENSORS);
    MAKE(loss_sums, 0, ZERO, I64, 3);
    MAKE(overflow, 0, ZERO, I32, 1);
    a->acc = m->acc;
    return make_step(m, &a->step);
}

BENCH(adamw, { "all weights" })
{
    StepValues *step;
    MAKE(w, 2, UNIFORM, F32, m->d->P);
    MAKE(m, 2, UNIFORM, F32, m->d->P);
    MAKE(v, 2, POSITIVE, F32, m->d->P);
    MAKE(g, 1, UNIFORM, m->acc, m->d->P);
    ONCE(copy, m->d->P);
    MAKE(shift, 0, ZERO, I32, TENSORS);
    TRY(make_parts(m, 0, &a->parts, &a->chunks));
    TRY(make_step(m, &step));
    a->step = step;
    a->beta1 = 0.9f, a->beta2 = 0.95f, a->eps = 1e-8f, a->decay = 0.1f;
    return ERR_OK;
}

BENCH(one_moment, { "all weights" })
{
    StepValues *step;
    MAKE(w, 2, UNIFORM, F32, m->d->P);
    MAKE(m, 2, UNIFORM, F32, m->d->P);
    MAKE(g, 1, UNIFORM, m->acc, m->d->P);
    ONCE(copy, m->d->P);
    MAKE(shift, 0, ZERO, I32, TENSORS);
    TRY(make_parts(m, 0, &a->parts, &a->chunks));
    TRY(make_step(m, &step));
    a->step = step;
    a->beta1 = 0.9f, a->beta2 = 0.99f, a->decay = 0.1f, a->lion = 1;
    return ERR_OK;
}

BENCH(qk_clip, { "queries" })
{
    enum { HEADS = 32 };
    StepValues *step;
    const int64_t columns = 1024, chunk = m->d->P / columns / HEADS + 1;
    MAKE(w, 2, UNIFORM, F32, m->d->P);
    ONCE(copy, m->d->P);
    MAKE(logit_max, 0, ZERO, I64, HEADS);
    TRY(make_step(m, &step));
    a->step = step;
    a->rows = (QkRows){ chunk, { chunk, 0 }, { QK_QUERY, QK_KEY }, .heads = 1, .chunks = 1 };
    a->columns = columns, a->threshold = 100, a->alpha = 0.5f;
    return ERR_OK;
}

/* ---- matrices of Muon, of which one is a rank's ---- */

static Err make_boxes(Maker *m, Tensor *out, int64_t *chunks)
{
    const int64_t D = m->d->D;
    const int32_t side = (int32_t)D;
    const FlatBox b = { .ld = side, .rows = side, .columns = side, .row_step = side, .column_step = 1, .scale = 1 };
    *chunks = flat_chunks(D * D);
    TRY(tensor_new(m->arena, out, I64, 1, sizeof b / sizeof(int64_t)));
    return device_write(&m->dev->stream, out->data, &b, sizeof b);
}

BENCH(muon_moment, { "all weights" })
{
    StepValues *step;
    MAKE(m, 2, UNIFORM, F32, m->d->P);
    MAKE(g, 1, UNIFORM, m->acc, m->d->P);
    MAKE(shift, 0, ZERO, I32, TENSORS);
    TRY(make_parts(m, FLAT_MUON, &a->parts, &a->chunks));
    TRY(make_step(m, &step));
    a->step = step;
    a->beta = 0.95f;
    return ERR_OK;
}

BENCH(muon_pack, { "" })
{
    StepValues *step;
    MAKE(y, 1, UNIFORM, F32, m->d->D * m->d->D);
    MAKE(m, 1, UNIFORM, F32, m->d->D * m->d->D);
    MAKE(g, 1, UNIFORM, m->acc, m->d->D * m->d->D);
    MAKE(shift, 0, ZERO, I32, TENSORS);
    TRY(make_boxes(m, &a->boxes, &a->chunks));
    TRY(make_step(m, &step));
    a->step = step;
    a->beta = 0.95f;
    a->nesterov = 1;
    return ERR_OK;
}

BENCH(muon_apply, { "" })
{
    StepValues *step;
    MAKE(w, 2, UNIFORM, F32, m->d->D * m->d->D);
    ONCE(copy, m->d->D * m->d->D);
    ONCE(x, m->d->D * m->d->D);
    TRY(make_boxes(m, &a->boxes, &a->chunks));
    TRY(make_step(m, &step));
    a->step = step;
    a->decay = 0.1f;
    return ERR_OK;
}

BENCH(box_copy, { "" })
{
    ONCE(y, m->d->D * m->d->D);
    ONCE(x, m->d->D * m->d->D);
    return make_boxes(m, &a->boxes, &a->chunks);
}

BENCH(normalize, { "" })
{
    ONCE(y, m->d->D, m->d->D);
    MAKE(sums, 0, ZERO, I64, m->d->D);
    MAKE(x, 2, UNIFORM, F32, m->d->D, m->d->D);
    a->eps = 1e-7f;
    return ERR_OK;
}

BENCH(mix, { "" })
{
    TWICE(y, m->d->D, m->d->D);
    ONCE(x, m->d->D, m->d->D);
    a->a = 1, a->b = 0.5f;
    return ERR_OK;
}

/* ---- the list ---- */

#define OP(name, flop, args) extern const OpCases bench_##name;
#include "device/ops.def"
#undef OP

const OpCases *const bench_ops[OP_COUNT] = {
#define OP(name, flop, args) [OP_##name] = &bench_##name,
#include "device/ops.def"
#undef OP
};

Err maker_make(Maker *m, OpId id, const Case *c, AnyArgs *out)
{
    *out = (AnyArgs){ 0 };
    m->c = c;
    m->bytes = 0;
    return bench_ops[id]->make(m, out);
}
