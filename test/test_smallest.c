/*
 * Read this first: a model of two layers, trained by nothing but calls of layers (src/layer/layer.h). There is no engine,
 * schedule or optimizer here, and there are no other ranks. The text counts in steps of 5, and the model learns it.
 */
#include "test.h"

#include "device/device.h"
#include "layer/layer.h"

enum { B = 4, T = 16, N = B * T, D = 32, VOCAB = 48, LAYERS = 2, STEPS = 80, MEMORY = 8 << 20 };
static const float RATE = 0.5f;

typedef struct {
    Norm norm1, norm2;
    Attention attention;
    Mlp mlp;
    NormSave norm1_save, norm2_save;
    AttentionSave attention_save;
    MlpSave mlp_save;
    Tensor x, n1, mid, n2; /* [N, D]: input, its norm, the stream behind attention, its norm */
} Layer;

typedef struct {
    Embedding embedding;
    Layer layer[LAYERS];
    Norm norm;
    NormSave norm_save;
    Head head;
    HeadSave head_save;
    Tensor x, n;
} Model;

static Err rows(Ctx *c, Tensor *t) { return tensor_new(c->scratch, t, F32, N, D); }

/* ---- what the model is: every layer registers its parameters ---- */

static Err model_register(Model *m, ParamRegistry *reg, const ModelSpec *spec)
{
    static const char *const names[LAYERS][4] = {
        { "layers.0.norm1", "layers.0.attn", "layers.0.norm2", "layers.0.mlp" },
        { "layers.1.norm1", "layers.1.attn", "layers.1.norm2", "layers.1.mlp" }
    };
    TRY(embedding_register(&m->embedding, reg, spec, false));
    for (int i = 0; i < LAYERS; i++) {
        Layer *l = &m->layer[i];
        TRY(norm_register(&l->norm1, reg, names[i][0], D, spec->rms, spec->norm_eps, PARTIAL_ROWS));
        TRY(attention_register(&l->attention, reg, spec, names[i][1], i));
        TRY(norm_register(&l->norm2, reg, names[i][2], D, spec->rms, spec->norm_eps, PARTIAL_ROWS));
        TRY(mlp_register(&l->mlp, reg, spec, names[i][3], spec->ffn));
    }
    TRY(norm_register(&m->norm, reg, "norm", D, spec->rms, spec->norm_eps, PARTIAL_ROWS));
    return head_register(&m->head, reg, spec, -1);
}

/* ---- forward, and backward as its mirror ---- */

/* y = x + attention(norm(x)), and the same with the mlp. */
static Err layer_forward(Layer *l, Ctx *c, Tensor x, Tensor y)
{
    Tensor branch;
    l->x = x;
    TRY(rows(c, &l->n1));
    TRY(rows(c, &l->mid));
    TRY(rows(c, &l->n2));
    TRY(rows(c, &branch));
    TRY(norm_forward(&l->norm1, c, x, l->n1, &l->norm1_save));
    TRY(attention_forward(&l->attention, c, l->n1, branch, &l->attention_save));
    TRY(residual_add(c, &(ResidualSum){ .sum = l->mid, .residual = x, .branch = branch }));
    TRY(norm_forward(&l->norm2, c, l->mid, l->n2, &l->norm2_save));
    TRY(mlp_forward(&l->mlp, c, l->n2, branch, &l->mlp_save));
    return residual_add(c, &(ResidualSum){ .sum = y, .residual = l->mid, .branch = branch });
}

/* d is the gradient of y, then that of x. */
static Err layer_backward(const Layer *l, Ctx *c, Tensor d)
{
    Tensor dn;
    TRY(rows(c, &dn));
    TRY(mlp_backward(&l->mlp, c, &l->mlp_save, l->n2, d, dn));
    TRY(norm_backward(&l->norm2, c, &l->norm2_save, l->mid, dn, d));
    TRY(attention_backward(&l->attention, c, &l->attention_save, l->n1, d, dn));
    return norm_backward(&l->norm1, c, &l->norm1_save, l->x, dn, d);
}

static Err model_forward(Model *m, Ctx *c, Tensor sums)
{
    Tensor x, y;
    TRY(rows(c, &x));
    TRY(embedding_forward(&m->embedding, c, c->batch->token, x));
    for (int i = 0; i < LAYERS; i++, x = y) {
        TRY(rows(c, &y));
        TRY(layer_forward(&m->layer[i], c, x, y));
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
    for (int i = LAYERS - 1; i >= 0; i--) TRY(layer_backward(&m->layer[i], c, d));
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
    OK(model_register(&model, &reg, &spec));
    OK(param_layout(&reg, INT64_MAX));
    OK(grad_stats_init(&stats, reg.count, true, &state));
    OK(param_store_init(&params, &reg, &stats, &state, F32, GRADS_F32));
    OK(param_store_fill(&params, &device.stream, spec.seed, 1));
    OK(fill_batch(&batch, &state));
    Ctx c = { .s = &device.stream, .world = &world, .params = &params, .slot = &slot, .scratch = &scratch, .batch = &batch,
              .step = &step, .into = { &slot.region[REGION_I], &slot.region[REGION_W] },
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
