/*
 * Read this first: a model of two layers, trained by nothing but calls of layers (src/layer/layer.h). There is no
 * engine, schedule or optimizer here, and there are no other ranks. The text counts in steps of 5, and the model learns
 * it.
 */
#include "test.h"

#include "device/device.h"
#include "layer/layer.h"

enum { B = 4, T = 16, N = B * T, D = 32, VOCAB = 48, LAYERS = 2, STEPS = 80, MEMORY = 8 << 20 };
static const float RATE = 0.5f;

/* y = x + layer(norm(x)): the layer is attention, then an mlp. */
typedef struct {
    Norm norm;
    const LayerKind *kind;
    void *layer, *save; /* of this kind */
    NormSave norm_save;
    Tensor x, n; /* [N, D] */
} Branch;

enum { BRANCHES = 2 * LAYERS };

typedef struct {
    Embedding embedding;
    Branch branch[BRANCHES];
    Norm norm;
    NormSave norm_save;
    Head head;
    HeadSave head_save;
    Tensor x, n;
} Model;

static Err rows(Ctx *c, Tensor *t) { return tensor_new(c->scratch, t, F32, N, D); }

/* ---- what the model is: every layer registers its parameters ---- */

static Err model_register(Model *m, ParamRegistry *reg, const ModelSpec *spec, SetupArena *setup)
{
    static const char *const names[BRANCHES][2] = { { "layers.0.norm1", "layers.0.attn" },
                                                    { "layers.0.norm2", "layers.0.mlp" },
                                                    { "layers.1.norm1", "layers.1.attn" },
                                                    { "layers.1.norm2", "layers.1.mlp" } };
    TRY(embedding_register(&m->embedding, reg, spec, false));
    for (int i = 0; i < BRANCHES; i++) {
        Branch *b = &m->branch[i];
        b->kind = i % 2 ? model_ffn(spec, i / 2) : model_mixer(spec, i / 2);
        TRY(setup_alloc(setup, b->kind->own_bytes, &b->layer));
        TRY(setup_alloc(setup, b->kind->save_bytes, &b->save));
        TRY(norm_register(&b->norm, reg, names[i][0], D, spec->rms, spec->norm_eps, PARTIAL_ROWS));
        TRY(b->kind->add(b->layer, reg, spec, names[i][1], i / 2));
    }
    TRY(norm_register(&m->norm, reg, "norm", D, spec->rms, spec->norm_eps, PARTIAL_ROWS));
    return head_register(&m->head, reg, spec, -1);
}

/* ---- forward, and backward as its mirror ---- */

static Err branch_forward(Branch *b, Ctx *c, Tensor x, Tensor y)
{
    Tensor out;
    b->x = x;
    TRY(rows(c, &b->n));
    TRY(rows(c, &out));
    TRY(norm_forward(&b->norm, c, x, b->n, &b->norm_save));
    TRY(b->kind->forward(b->layer, c, b->n, out, b->save));
    return residual_add(c, &(ResidualSum){ .sum = y, .residual = x, .branch = out });
}

/* d is the gradient of y, then that of x. */
static Err branch_backward(const Branch *b, Ctx *c, Tensor d)
{
    Tensor dn;
    TRY(rows(c, &dn));
    TRY(b->kind->backward(b->layer, c, b->save, b->n, d, dn));
    return norm_backward(&b->norm, c, &b->norm_save, b->x, dn, d);
}

static Err model_forward(Model *m, Ctx *c, Tensor sums)
{
    Tensor x, y;
    TRY(rows(c, &x));
    TRY(embedding_forward(&m->embedding, c, c->batch->token, x));
    for (int i = 0; i < BRANCHES; i++, x = y) {
        TRY(rows(c, &y));
        TRY(branch_forward(&m->branch[i], c, x, y));
    }
    m->x = x;
    TRY(rows(c, &m->n));
    TRY(norm_forward(&m->norm, c, x, m->n, &m->norm_save));
    const HeadLoss loss = { .target = c->batch->target, .sums = sums, .weight = 1 };
    return head_forward(&m->head, c, m->n, &loss, &m->head_save);
}

static Err model_backward(const Model *m, Ctx *c)
{
    Tensor d, dn;
    TRY(rows(c, &d));
    TRY(rows(c, &dn));
    TRY(head_backward(&m->head, c, &m->head_save, m->n, dn));
    TRY(norm_backward_into(&m->norm, c, &m->norm_save, m->x, dn, d));
    for (int i = BRANCHES - 1; i >= 0; i--) TRY(branch_backward(&m->branch[i], c, d));
    return embedding_backward(&m->embedding, c, c->batch->token, d);
}

/* ---- memory, data, and the loop ---- */

static void arena_open(Arena *a, const char *name)
{
    char *memory = aligned_alloc(256, MEMORY);
    arena_init(a, name, memset(memory, 0, MEMORY), MEMORY);
}

static Err fill_batch(Batch *b, Arena *state)
{
    *b = (Batch){ .B = B, .T = T, .seq = T, .span = spans_whole(T) };
    TRY(tensor_new(state, &b->token, I32, N));
    TRY(tensor_new(state, &b->target, I32, N));
    TRY(tensor_new(state, &b->position, I32, N));
    TRY(tensor_new(state, &b->sample, I64, N));
    TRY(tensor_new(state, &b->samples, I64, B));
    for (int n = 0; n < N; n++) {
        ((int32_t *)b->token.data)[n] = (11 * (n / T) + 5 * n) % VOCAB;
        ((int32_t *)b->target.data)[n] = (11 * (n / T) + 5 * (n + 1)) % VOCAB;
        ((int32_t *)b->position.data)[n] = n % T;
        ((int64_t *)b->sample.data)[n] = ((int64_t *)b->samples.data)[n / T] = n / T;
    }
    return ERR_OK;
}

/* One step of gradient descent; the mean loss before it. */
static Err train_step(Model *m, Ctx *c, double *loss)
{
    int64_t sums[3] = { 0 };
    for (int r = 0; r < REGION_COUNT; r++) arena_release(&c->slot->region[r], 0);
    arena_release(c->scratch, 0);
    param_store_begin(c->params);
    segment_begin(c, 0);
    TRY(model_forward(m, c, (Tensor){ .data = sums, .dim = { 3 }, .ndim = 1, .dtype = I64 }));
    segment_end(c);
    TRY(model_backward(m, c));
    *loss = ldexp((double)sums[0], -LOSS_FIXED_BITS) / N;
    float *weight = c->params->value.data;
    const float *gradient = c->params->grad.data;
    for (int64_t i = 0; i < c->params->reg->flat_count; i++) weight[i] -= RATE * gradient[i];
    return ERR_OK;
}

TEST(two_layers_learn_to_count)
{
    const ModelSpec spec = { .layers = LAYERS, .heads = 2, .kv_heads = 2, .head_dim = D / 2, .hidden = D, .ffn = 2 * D,
                             .seq = T, .vocab = VOCAB, .padded_vocab = head_padded_vocab(VOCAB, 1),
                             .learned_positions = true, .rms = true, .norm_eps = 1e-5f, .init_std = 0.1f, .seed = 1,
                             .tp_blocks = 1 };
    World world;
    Device device;
    SetupArena setup;
    Arena state, scratch;
    ParamRegistry reg;
    ParamStore params;
    GradStats stats;
    Model model;
    Batch batch;
    Segment segment;
    Slot slot = { .segments = &segment, .segment_count = 1 };
    const StepValues step = { .loss_scale = 1.0f / N };
    double loss = NAN, first = NAN;

    OK(world_open_self(&world));
    OK(device_open(&device, (DeviceChoice){ .threads = 1 }));
    setup_init(&setup);
    arena_open(&state, "state");
    arena_open(&scratch, "scratch");
    for (int r = 0; r < REGION_COUNT; r++) arena_open(&slot.region[r], "saves");
    param_registry_init(&reg, &setup, param_place_single());
    OK(model_register(&model, &reg, &spec, &setup));
    OK(param_layout(&reg, INT64_MAX));
    OK(grad_stats_init(&stats, reg.count, true, &state));
    OK(param_store_init(&params, &reg, &stats, (StoreMemory){ &state, &state }, (StoreKinds){ .grads = GRADS_F32 }));
    OK(param_store_fill(&params, &device.stream, spec.seed, 1));
    OK(fill_batch(&batch, &state));
    Ctx c = { .s = &device.stream,
              .world = &world,
              .params = &params,
              .slot = &slot,
              .scratch = &scratch,
              .batch = &batch,
              .step = &step,
              .into = { &slot.region[REGION_I], &slot.region[REGION_W] },
              .canon = { .tp_blocks = 1, .leaf_tokens = T, .leaf_rows = T, .attn_block = T, .query_leaf = T } };
    for (int i = 0; i < STEPS; i++) {
        OK(train_step(&model, &c, &loss));
        if (i == 0) first = loss;
        if (i % 20 == 0) printf("    step %d, loss %.4f\n", i, loss);
    }
    CHECK_MSG(fabs(first - log(VOCAB)) < 0.5, "%.4f before the first step; guessing costs %.4f", first, log(VOCAB));
    CHECK_MSG(loss < 0.1, "%.4f after %d steps", loss, STEPS);

    for (int r = 0; r < REGION_COUNT; r++) free(slot.region[r].base);
    free(state.base);
    free(scratch.base);
    setup_release(&setup);
    device_close(&device);
    world_close(&world);
}

TEST_MAIN
