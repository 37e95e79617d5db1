/*
 * Every layer against finite differences: the loss is the sum of the layer's outputs times fixed random
 * numbers, added up in double; along random directions of the input and of each parameter its difference
 * quotient of fourth order must be what backward's gradient says. One direction is the gradient itself, where
 * a gradient that is wrong by 1% is wrong by 1% of everything; that this would be seen is checked each time.
 *
 * Also: how weights begin, and that evaluation drops nothing.
 */
#include "test.h"
#include "base/json.h"
#include "engine/trainer_open.h"
#include "tiny.h"

enum { B = 2, T = 24, N = B * T, HIDDEN = 32, VOCAB = 39, PADDED = 48, SHIFT = 30, DIRECTIONS = 4 };
static const double STEP = 0.004, TOLERANCE = 1e-3;

typedef struct {
    World world;
    Device device;
    SetupArena setup;
    Arena state, scratch;
    ParamRegistry registry;
    ParamStore params;
    GradStats stats;
    Slot slot;
    Batch batch;
    StepValues step;
    Ctx ctx;
    int64_t sums[3];
    Tensor x, y;    /* y without data: the loss is in sums */
    double *weight; /* of the outputs, in the loss */
    uint64_t seed;
    ModelSpec spec;
    /* the layer under test, and what it kept */
    Embedding embedding;
    Norm norm;
    Linear linear;
    const LayerKind *kind;
    void *own, *save; /* of the kind */
    Head head;
    Block block, second;
    NormSave norm_save;
    HeadSave head_save;
    BlockSave block_save, second_save;
    Saved mid; /* between the two */
    Mtp further[2];
    MtpSave further_save[2];
} Rig;

typedef struct {
    Err (*forward)(Rig *r);
    Err (*backward)(Rig *r, Tensor dy, Tensor dx);
    int64_t in, out; /* columns; 0: no input, or the loss itself as output */
    bool adds;       /* backward adds to dx */
    int idle; /* parameters without effect in the layer: biases that a residual add applies */
} Case;

static int rope_columns; /* of a head, that turn; 0: all */

/* ---- the rig ---- */

static void *zeroed(int64_t bytes)
{
    void *p = aligned_alloc(256, (size_t)(bytes + 255) / 256 * 256);
    memset(p, 0, (size_t)(bytes + 255) / 256 * 256);
    return p;
}

static void open_arena(Arena *a, int64_t size_bytes)
{
    arena_init(a, "test", zeroed(size_bytes), size_bytes);
}

static void uniform(Rig *r, float *out, int64_t n, double width, double add)
{
    for (int64_t i = 0; i < n; i++) out[i] += (float)(add + test_uniform(&r->seed, -width, width));
}

static void rig_open(Rig *r)
{
    *r = (Rig){ .seed = 11 };
    OK(world_open_self(&r->world));
    OK(device_open(&r->device, (DeviceChoice){ .threads = 2 }));
    setup_init(&r->setup);
    open_arena(&r->state, 8 << 20);
    open_arena(&r->scratch, 8 << 20);
    param_registry_init(&r->registry, &r->setup, param_place_single());
}

static void fill_batch(Rig *r)
{
    Batch *b = &r->batch;
    *b = (Batch){ .B = B, .T = T, .seq = T, .span = spans_whole(T) };
    OK(tensor_new(&r->state, &b->token, I32, N));
    OK(tensor_new(&r->state, &b->target, I32, N));
    OK(tensor_new(&r->state, &b->position, I32, N));
    OK(tensor_new(&r->state, &b->sample, I64, N));
    OK(tensor_new(&r->state, &b->samples, I64, B));
    OK(tensor_new(&r->state, &b->further_token, I32, 2, N));
    for (int n = 0; n < 2 * N; n++)
        ((int32_t *)b->further_token.data)[n] = n % 5 == 2 ? -1 : (int32_t)(test_rand(&r->seed) % VOCAB);
    for (int n = 0; n < N; n++) {
        ((int32_t *)b->token.data)[n] = (int32_t)(test_rand(&r->seed) % VOCAB);
        ((int32_t *)b->target.data)[n] = n % 7 == 3 ? -1 : (int32_t)(test_rand(&r->seed) % VOCAB);
        ((int32_t *)b->position.data)[n] = n % T;
        ((int64_t *)b->sample.data)[n] = 40 + n / T;
        ((int64_t *)b->samples.data)[n / T] = 40 + n / T;
    }
}

/* Weights that give outputs of order 1; 0 in padding. */
static void fill_params(Rig *r)
{
    for (int i = 0; i < r->registry.count; i++) {
        const Param *p = &r->registry.items[i];
        float *w = param_store_value(&r->params, i, 0).data;
        bool scale = p->spec.init == INIT_ONE;
        memset(w, 0, (size_t)p->count * sizeof *w);
        for (int64_t row = 0; row < p->local[0]; row++)
            if (param_plain_row(p, row) >= 0) uniform(r, w + row * p->local[1], p->local[1], 0.35, scale);
        ((int32_t *)r->stats.shift.data)[i] = SHIFT;
    }
}

/* After the layer has registered its parameters. */
static void rig_ready(Rig *r, const Case *c)
{
    ModelSpec rope = { .rope = { .layers = layer_pattern_all(1), .base = 100, .columns = rope_columns },
                       .head_dim = 8,
                       .seq = T };
    OK(param_layout(&r->registry, INT64_MAX));
    OK(grad_stats_init(&r->stats, r->registry.count, true, &r->state));
    OK(param_store_init(&r->params, &r->registry, &r->stats, (StoreMemory){ &r->state, &r->state },
                        (StoreKinds){ .grads = GRADS_I64 }));
    fill_params(r);
    fill_batch(r);
    r->step = (StepValues){ .loss_scale = 1 };
    r->slot = (Slot){ .segment_count = 1 + 2 * MTP_SEGMENTS };
    OK(setup_array(&r->setup, r->slot.segment_count, &r->slot.segments));
    r->ctx = (Ctx){ .s = &r->device.stream,
                    .world = &r->world,
                    .params = &r->params,
                    .slot = &r->slot,
                    .scratch = &r->scratch,
                    .batch = &r->batch,
                    .step = &r->step,
                    .mode.training = true,
                    .canon = { true, 2, T / 2, 4, 8, T / 2, 16 } };
    for (int k = 0; k < REGION_COUNT; k++) {
        open_arena(&r->slot.region[k], 4 << 20);
        r->ctx.into[k] = &r->slot.region[k];
    }
    OK(model_rope_tables(&rope, r->ctx.s, &r->state, &r->setup, &r->ctx.rope));
    if (c->in) OK(tensor_new(&r->state, &r->x, F32, N, c->in));
    if (c->in) uniform(r, r->x.data, N * c->in, 1.7, 0);
    if (c->out) OK(tensor_new(&r->state, &r->y, F32, N, c->out));
    r->weight = zeroed(N * (c->out + 1) * (int64_t)sizeof *r->weight);
    for (int64_t i = 0; i < N * c->out; i++) r->weight[i] = (float)test_uniform(&r->seed, -1.7, 1.7);
}

static void rig_close(Rig *r)
{
    for (int k = 0; k < REGION_COUNT; k++) free(r->slot.region[k].base);
    free(r->state.base);
    free(r->scratch.base);
    free(r->weight);
    setup_release(&r->setup);
    device_close(&r->device);
    world_close(&r->world);
}

/* ---- loss, gradient, difference quotient ---- */

static double loss(Rig *r, const Case *c)
{
    for (int k = 0; k < REGION_COUNT; k++) arena_release(&r->slot.region[k], 0);
    arena_release(&r->scratch, 0);
    memset(r->sums, 0, sizeof r->sums);
    if (c->out) memset(r->y.data, 0xff, (size_t)tensor_bytes(r->y));
    segment_begin(&r->ctx, 0);
    OK(c->forward(r));
    segment_end(&r->ctx);
    double sum = (double)r->sums[0] * 0x1p-28;
    for (int64_t i = 0; i < N * c->out; i++) sum += ((float *)r->y.data)[i] * r->weight[i];
    return sum;
}

/* The gradient of x in dx, of the parameters in r->params. */
static void gradient(Rig *r, const Case *c, Tensor dx)
{
    Tensor dy = { 0 };
    loss(r, c);
    if (c->out) OK(tensor_new(&r->state, &dy, F32, N, c->out));
    for (int64_t i = 0; i < N * c->out; i++) ((float *)dy.data)[i] = (float)r->weight[i];
    if (c->in) memset(dx.data, c->adds ? 0 : 0xff, (size_t)tensor_bytes(dx));
    OK(c->backward(r, dy, dx));
    CHECK(*(int32_t *)r->stats.overflow.data == 0);
}

typedef struct {
    const char *what;
    float *value;
    double *gradient;
    int64_t n;
    const Param *param; /* NULL: the input */
} Probe;

static bool padding(const Probe *p, int64_t i)
{
    return p->param && param_plain_row(p->param, i / p->param->local[1]) < 0;
}

static double norm_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

/* Values of root mean square 1; the first direction is the gradient's: so steep that a shorter one does, of length 1 at
 * least, along which few values show 1% too much, too. */
static void choose_direction(Rig *r, const Probe *p, int number, double norm, double *u)
{
    double along = number || !(norm > 0) ? 0 : fmax(0.1 * sqrt((double)p->n), 1) / norm;
    for (int64_t i = 0; i < p->n; i++) {
        u[i] = along > 0 ? along * p->gradient[i] : test_uniform(&r->seed, -1.7, 1.7);
        if (padding(p, i)) u[i] = 0;
    }
}

static double quotient(Rig *r, const Case *c, const Probe *p, const double *u)
{
    static const double step[] = { 1, -1, 2, -2 }, weight[] = { 8, -8, -1, 1 };
    float *kept = zeroed(p->n * (int64_t)sizeof *kept);
    double sum = 0;
    memcpy(kept, p->value, (size_t)p->n * sizeof *kept);
    for (int k = 0; k < 4; k++) {
        for (int64_t i = 0; i < p->n; i++) p->value[i] = (float)(kept[i] + STEP * step[k] * u[i]);
        sum += weight[k] * loss(r, c);
    }
    memcpy(p->value, kept, (size_t)p->n * sizeof *kept);
    free(kept);
    return sum / (12 * STEP);
}

/* False if the parameter has no gradient and no effect. */
static bool check_probe(Rig *r, const Case *c, const Probe *p, double *worst)
{
    double norm = norm_of(p->gradient, p->n), *u = zeroed(p->n * (int64_t)sizeof *u), wrong = 0;
    for (int k = 0; k < DIRECTIONS; k++) {
        double said = 0;
        choose_direction(r, p, k, norm, u);
        for (int64_t i = 0; i < p->n; i++) said += p->gradient[i] * u[i];
        double found = quotient(r, c, p, u), scale = fmax(fabs(said), norm);
        CHECK_MSG(fabs(found - said) <= TOLERANCE * scale, "%s, direction %d: quotient %.7g, gradient %.7g",
                  p->what, k, found, said);
        if (scale > 0) *worst = fmax(*worst, fabs(found - said) / scale);
        wrong = fmax(wrong, fabs(found - 1.01 * said) / scale);
    }
    CHECK_MSG(!(norm > 0) || wrong > 5 * TOLERANCE, "%s: 1%% too much would pass", p->what);
    free(u);
    return norm > 0;
}

/* Gradients of everything, then the probes; releases the rig. */
static void check_layer(Rig *r, Case c)
{
    Tensor dx = { 0 };
    double worst = 0;
    int idle = 0, count = r->registry.count;
    rig_ready(r, &c);
    if (c.in) OK(tensor_new(&r->state, &dx, F32, N, c.in));
    gradient(r, &c, dx);
    for (int i = -1; i < count; i++) {
        const Param *p = i < 0 ? NULL : &r->registry.items[i];
        if (p && p->spec.group == PARAM_STATE) continue;
        Probe probe = { p ? p->name : "input", r->x.data, NULL, N * c.in, p };
        if (!p && !c.in) continue;
        if (p) probe.n = p->count, probe.value = param_store_value(&r->params, i, 0).data;
        probe.gradient = zeroed(probe.n * (int64_t)sizeof(double));
        const int64_t *fixed = p ? param_store_grad(&r->params, i).data : NULL;
        for (int64_t k = 0; k < probe.n; k++)
            probe.gradient[k] = p ? ldexp((double)fixed[k], -SHIFT) : ((float *)dx.data)[k];
        idle += !check_probe(r, &c, &probe, &worst);
        free(probe.gradient);
    }
    CHECK_MSG(idle == c.idle, "%d parameters without effect", idle);
    printf("    worst of %d parameters%s: %.1e\n", count, c.in ? " and the input" : "", worst);
    rig_close(r);
}

/* ---- layers ---- */

static Err embedding_f(Rig *r) { return embedding_forward(&r->embedding, &r->ctx, r->batch.token, r->y); }

static Err embedding_b(Rig *r, Tensor dy, Tensor dx)
{
    (void)dx;
    return embedding_backward(&r->embedding, &r->ctx, r->batch.token, dy);
}

static void check_embedding(bool positions, float dropout)
{
    Rig r;
    rig_open(&r);
    r.spec = (ModelSpec){ .vocab = VOCAB,
                          .padded_vocab = PADDED,
                          .hidden = HIDDEN,
                          .seq = T,
                          .learned_positions = positions,
                          .dropout = dropout,
                          .seed = 3 };
    OK(embedding_register(&r.embedding, &r.registry, &r.spec, false));
    check_layer(&r, (Case){ embedding_f, embedding_b, .out = HIDDEN });
}

TEST(embedding) { check_embedding(false, 0); }
TEST(embedding_positions_dropout) { check_embedding(true, 0.2f); }

static Err norm_f(Rig *r) { return norm_forward(&r->norm, &r->ctx, r->x, r->y, &r->norm_save); }
static Err norm_b(Rig *r, Tensor dy, Tensor dx)
{
    return norm_backward(&r->norm, &r->ctx, &r->norm_save, r->x, dy, dx);
}

static void check_norm(bool rms)
{
    Rig r;
    rig_open(&r);
    OK(norm_register(&r.norm, &r.registry, "norm", 27, rms, 1e-3f, PARTIAL_ROWS));
    check_layer(&r, (Case){ norm_f, norm_b, 27, 27, .adds = true });
}

TEST(layer_norm) { check_norm(false); }
TEST(rms_norm) { check_norm(true); }

static Err linear_f(Rig *r) { return linear_forward(&r->linear, &r->ctx, r->x, r->y); }
static Err linear_b(Rig *r, Tensor dy, Tensor dx)
{
    return linear_backward(&r->linear, &r->ctx, r->x, dy, dx);
}

static void check_linear(LinearKind kind)
{
    Rig r;
    rig_open(&r);
    OK(linear_register(&r.linear, &r.registry,
                       (LinearSpec){ .owner = "the",
                                     .name = "linear",
                                     .in = 34,
                                     .out = 22,
                                     .kind = kind,
                                     .bias = kind != LINEAR_WHOLE,
                                     .std = 1 }));
    check_layer(&r, (Case){ linear_f, linear_b, 34, 22, .idle = kind == LINEAR_ROW });
}

TEST(linear_column) { check_linear(LINEAR_COLUMN); }
TEST(linear_row) { check_linear(LINEAR_ROW); }
TEST(linear_whole) { check_linear(LINEAR_WHOLE); }

static Err kind_f(Rig *r) { return r->kind->forward(r->own, &r->ctx, r->x, r->y, r->save); }
static Err kind_b(Rig *r, Tensor dy, Tensor dx) { return r->kind->backward(r->own, &r->ctx, r->save, r->x, dy, dx); }

static void add_kind(Rig *r, const LayerKind *kind, const char *name)
{
    r->kind = kind;
    OK(setup_alloc(&r->setup, kind->own_bytes, &r->own));
    OK(setup_alloc(&r->setup, kind->save_bytes, &r->save));
    OK(kind->add(r->own, &r->registry, &r->spec, name, 0));
}

static void check_kind(Rig *r, const LayerKind *kind, const char *name, int idle)
{
    add_kind(r, kind, name);
    check_layer(r, (Case){ kind_f, kind_b, HIDDEN, HIDDEN, .idle = idle });
}

static void check_attention(ModelSpec s)
{
    Rig r;
    rig_open(&r);
    r.spec = s;
    r.spec.layers = 1;
    r.spec.hidden = HIDDEN;
    if (!s.heads) r.spec.heads = r.spec.tp_blocks = 4;
    r.spec.head_dim = 8;
    r.spec.norm_eps = 1e-3f;
    check_kind(&r, model_mixer(&r.spec, 0), "attention", model_proj_bias(&r.spec));
}

TEST(attention) { check_attention((ModelSpec){ .kv_heads = 4, .bias = true }); }
TEST(attention_grouped) { check_attention((ModelSpec){ .kv_heads = 2 }); }
TEST(attention_biases) /* other than feed-forward layers' */
{
    for (int k = ATTENTION_BIAS_NONE; k <= ATTENTION_BIAS_ALL; k++)
        for (int bias = 0; bias < 2; bias++)
            check_attention((ModelSpec){ .kv_heads = 2, .bias = bias, .attention_bias = (AttentionBias)k });
}
TEST(attention_groups) /* of 1, 2, 3 and 8 queries a key, which lie side by side in the projection */
{
    static const int kv_heads[] = { 3, 4, 2, 1 }, groups[] = { 1, 2, 3, 8 };
    for (int i = 0; i < 4; i++)
        for (int more = 0; more < 2; more++)
            check_attention((ModelSpec){ .heads = kv_heads[i] * groups[i],
                                         .kv_heads = kv_heads[i],
                                         .tp_blocks = kv_heads[i],
                                         .rope.layers = layer_pattern_all(1),
                                         .qk_norm = more ? QK_NORM_HEADS : QK_NORM_NONE,
                                         .attention_gate = more });
}
TEST(attention_rope) { check_attention((ModelSpec){ .kv_heads = 4, .rope.layers = layer_pattern_all(1) }); }
TEST(attention_rope_in_part)
{
    rope_columns = 6;
    check_attention((ModelSpec){ .kv_heads = 4, .rope.layers = layer_pattern_all(1) });
    rope_columns = 0;
}
TEST(attention_norms) /* of single heads, and of all together; with kv heads whole, in parts, and beside a gate */
{
    for (int kind = QK_NORM_HEADS; kind <= QK_NORM_FULL; kind++)
        for (int kv_heads = 1; kv_heads <= 4; kv_heads *= 2)
            check_attention((ModelSpec){ .kv_heads = kv_heads,
                                         .qk_norm = (QkNorm)kind,
                                         .attention_gate = kv_heads == 4,
                                         .rope.layers = layer_pattern_all(1) });
}
TEST(attention_softcap)
{
    check_attention((ModelSpec){ .kv_heads = 2, .attention_softcap = 1.5f, .rope.layers = layer_pattern_all(1) });
}
TEST(attention_sinks) { check_attention((ModelSpec){ .kv_heads = 2, .sinks = true, .window = layer_pattern_all(7) }); }
TEST(attention_gate) { check_attention((ModelSpec){ .kv_heads = 2, .attention_gate = true, .bias = true }); }
TEST(attention_variants)
{
    check_attention((ModelSpec){ .kv_heads = 1,
                                     .attention_gate = true,
                                     .sinks = true,
                                     .qk_norm = QK_NORM_HEADS,
                                     .rope.layers = layer_pattern_all(1),
                                     .attention_softcap = 2,
                                     .window = layer_pattern_all(9),
                                     .attention_dropout = 0.2f });
}
TEST(attention_window) { check_attention((ModelSpec){ .kv_heads = 4, .window = layer_pattern_all(5) }); }
TEST(attention_dropout) { check_attention((ModelSpec){ .kv_heads = 1, .attention_dropout = 0.2f, .bias = true }); }

static void check_mla_with(ModelSpec s, bool rotary)
{
    Rig r;
    rope_columns = 6;
    rig_open(&r);
    r.spec = s;
    r.spec.layers = 1;
    r.spec.hidden = HIDDEN;
    r.spec.heads = r.spec.kv_heads = r.spec.tp_blocks = 4;
    r.spec.head_dim = 11;
    r.spec.latent.width = (MlaWidths){ s.latent.width.q_rank, .kv_rank = 12, .nope = 5, .rope = 6, .value = 7 };
    if (!(s.latent.scale > 0)) r.spec.latent.scale = 1;
    r.spec.rope.layers = layer_pattern_all(rotary);
    r.spec.norm_eps = 1e-3f;
    r.spec.mixer = layer_pattern_all(MIXER_LATENT);
    check_kind(&r, model_mixer(&r.spec, 0), "attention", model_proj_bias(&r.spec));
    rope_columns = 0;
}

static void check_mla(ModelSpec s) { check_mla_with(s, true); }

TEST(latent_attention) { check_mla((ModelSpec){ 0 }); }
TEST(latent_attention_without_rotary_positions) { check_mla_with((ModelSpec){ .attention_gate = true }, false); }
TEST(latent_attention_of_queries)
{
    check_mla((ModelSpec){
        .latent = { .width.q_rank = 9, .scale = 1.5f }, .window = layer_pattern_all(7), .sinks = true });
}
TEST(latent_attention_gate) { check_mla((ModelSpec){ .bias = true, .attention_gate = true }); }
TEST(latent_attention_recomputed)
{
    check_mla((ModelSpec){ .latent.width.q_rank = 9,
                           .attention_softcap = 2,
                           .attention_dropout = 0.2f,
                           .recompute = layer_pattern_all(RECOMPUTE_SELECTIVE) });
    check_mla((ModelSpec){ .latent.width.q_rank = 9,
                           .bias = true,
                           .attention_gate = true,
                           .recompute = layer_pattern_all(RECOMPUTE_SELECTIVE) });
}

static void check_delta(DeltaSpec delta, bool again)
{
    Rig r;
    rig_open(&r);
    r.spec = (ModelSpec){ .layers = 1,
                          .hidden = HIDDEN,
                          .delta = delta,
                          .tp_blocks = 2,
                          .norm_eps = 1e-3f,
                          .mixer = layer_pattern_all(MIXER_DELTA),
                          .recompute = layer_pattern_all(again ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE) };
    check_kind(&r, model_mixer(&r.spec, 0), "delta", 0);
}

TEST(delta) { check_delta((DeltaSpec){ 2, 2, 16, 12, 4, false, 0 }, false); }
TEST(delta_groups) { check_delta((DeltaSpec){ 2, 6, 15, 7, 3, true, 0.3f }, false); }
TEST(delta_recomputed) { check_delta((DeltaSpec){ 2, 4, 8, 3, 2, false, 0 }, true); }

static void open_mamba(Rig *r, MambaSpec mamba, bool again)
{
    rig_open(r);
    r->spec = (ModelSpec){ .layers = 1,
                           .hidden = HIDDEN,
                           .mamba = mamba,
                           .tp_blocks = 2,
                           .norm_eps = 1e-3f,
                           .mixer = layer_pattern_all(MIXER_MAMBA2),
                           .recompute = layer_pattern_all(again ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE) };
}

static void check_mamba(MambaSpec mamba, bool again)
{
    Rig r;
    open_mamba(&r, mamba, again);
    check_kind(&r, model_mixer(&r.spec, 0), "mamba", 0);
}

static void check_kda(KdaSpec kda, bool again)
{
    Rig r;
    rig_open(&r);
    r.spec = (ModelSpec){ .layers = 1,
                          .hidden = HIDDEN,
                          .kda = kda,
                          .tp_blocks = 2,
                          .norm_eps = 1e-3f,
                          .mixer = layer_pattern_all(MIXER_KDA),
                          .recompute = layer_pattern_all(again ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE) };
    check_kind(&r, model_mixer(&r.spec, 0), "kda", 0);
}

TEST(kda) { check_kda((KdaSpec){ 2, 16, 4, 0 }, false); }
TEST(kda_bounded) { check_kda((KdaSpec){ 4, 7, 3, -5 }, false); }
TEST(kda_recomputed) { check_kda((KdaSpec){ 4, 9, 2, 0 }, true); }

TEST(mamba) { check_mamba((MambaSpec){ 2, 2, 9, 30, 4, true, 0 }, false); }
TEST(mamba_groups) { check_mamba((MambaSpec){ 6, 2, 5, 33, 3, false, 0 }, false); }
TEST(mamba_recomputed) { check_mamba((MambaSpec){ 4, 2, 3, 40, 2, true, 1e-3f }, true); }

/* Wdt and dt_bias have no gradient where every step is the least one, and the others have; where none is, all have. */
TEST(mamba_least_steps)
{
    static const float least[] = { 8, 1e-9f };
    for (int i = 0; i < 2; i++) {
        Rig r;
        Tensor dx;
        const Case c = { kind_f, kind_b, HIDDEN, HIDDEN };
        open_mamba(&r, (MambaSpec){ 4, 2, 9, 6, 4, true, least[i] }, false);
        add_kind(&r, model_mixer(&r.spec, 0), "mamba");
        rig_ready(&r, &c);
        OK(tensor_new(&r.state, &dx, F32, N, c.in));
        gradient(&r, &c, dx);
        for (int k = 0; k < r.registry.count; k++) {
            const Param *p = &r.registry.items[k];
            const int64_t *fixed = param_store_grad(&r.params, k).data;
            const bool of_steps = strstr(p->name, ".dt.weight") || strstr(p->name, ".dt_bias");
            int64_t some = 0;
            for (int64_t e = 0; e < p->count; e++) some += fixed[e] != 0;
            CHECK_MSG((some > 0) == (i || !of_steps), "%s, least %g: %lld", p->name, (double)least[i], (long long)some);
        }
        rig_close(&r);
    }
}

static void check_mlp(Activation activation, bool bias, bool recompute)
{
    Rig r;
    rig_open(&r);
    r.spec = (ModelSpec){ .layers = 1,
                          .hidden = HIDDEN,
                          .ffn = 44,
                          .activation = activation,
                          .activation_limit = 4,
                          .tp_blocks = 2,
                          .bias = bias,
                          .recompute = layer_pattern_all(recompute ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE) };
    check_kind(&r, model_ffn(&r.spec, 0), "mlp", bias);
}

TEST(mlp_gelu) { check_mlp(ACT_GELU, true, false); }
TEST(mlp_gelu_erf) { check_mlp(ACT_GELU_ERF, true, false); }
TEST(mlp_relu2) { check_mlp(ACT_RELU2, true, false); }
TEST(mlp_swiglu) { check_mlp(ACT_SWIGLU, false, false); }
TEST(mlp_geglu) { check_mlp(ACT_GEGLU, false, false); }
TEST(mlp_clamped) { check_mlp(ACT_CLAMPED_SWIGLU, true, false); }
TEST(mlp_recomputed) { check_mlp(ACT_SWIGLU, true, true); }
TEST(mlp_relu2_recomputed) { check_mlp(ACT_RELU2, false, true); }
TEST(mlp_gelu_recomputed) { check_mlp(ACT_GELU, true, true); }

/* Every token goes to all experts: where a step changes the choice there is no derivative (test_golden.c has
 * choices). */
static void check_moe(ModelSpec s)
{
    Rig r;
    rig_open(&r);
    r.spec = s;
    r.spec.layers = 1, r.spec.hidden = HIDDEN, r.spec.tp_blocks = 2;
    r.spec.moe.ffn = 20, r.spec.moe.experts = r.spec.moe.topk = 4;
    r.spec.moe.router.scale = 1.5f, r.spec.moe.router.groups = r.spec.moe.router.group_topk = 1;
    r.spec.moe.balance.unit = 1;
    r.spec.moe.layers.word[0] = 1;
    check_kind(&r, model_ffn(&r.spec, 0), "moe", 0);
}

TEST(moe_softmax)
{
    check_moe((ModelSpec){ .activation = ACT_SWIGLU, .moe.router = { .score = ROUTER_SOFTMAX, .normalize = 1 } });
}
TEST(moe_softmax_pre)
{
    check_moe((ModelSpec){ .activation = ACT_GELU, .moe.router = { .score = ROUTER_SOFTMAX_PRE } });
}
TEST(moe_sigmoid_shared)
{
    check_moe((ModelSpec){
        .activation = ACT_GELU, .moe.shared_ffn = 24, .bias = true, .moe.router = { .score = ROUTER_SIGMOID } });
    check_moe((ModelSpec){
        .activation = ACT_SWIGLU, .moe.shared_ffn = 24, .moe.router = { .score = ROUTER_SIGMOID, .normalize = 1 } });
}
TEST(moe_latent) /* of experts with a gate and without, beside a shared expert with a gate, without, and without one */
{
    for (int i = 0; i < 6; i++)
        check_moe((ModelSpec){ .activation = i % 2 ? ACT_SWIGLU : ACT_RELU2,
                               .moe.latent = 12,
                               .bias = i == 0,
                               .moe.shared_ffn = i / 2 ? 24 : 0,
                               .moe.shared_gate = i / 2 == 2,
                               .recompute = layer_pattern_all(i % 2 ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE),
                               .moe.router = { .score = ROUTER_SIGMOID, .normalize = 1 } });
}
/* ---- a LatentMoE in numbers that another program computed in float64 (transformers' class agrees) ---- */

#define GOLDEN "../shared/fixtures/kinds/latent_moe.json"
enum { G_ROWS = 5, G_HIDDEN = 6, G_MOST = 512 };

/* All numbers of an array of any depth; returns how many. */
static int64_t numbers(const Json *j, double *to)
{
    int64_t n = 0;
    if (!json_count(j)) {
        *to = json_number(j, NAN);
        return 1;
    }
    for (int64_t i = 0; i < json_count(j); i++) n += numbers(json_at(j, i), to + n);
    return n;
}

static int golden_param(Rig *r, const char *name)
{
    char full[PARAM_NAME_MAX];
    snprintf(full, sizeof full, "moe.%s", name);
    return param_find(&r->registry, full);
}

static void golden_set(Rig *r, const Json *from, const char *key, const char *name)
{
    double to[G_MOST];
    const int id = golden_param(r, name);
    const Param *p = &r->registry.items[id];
    const bool state = p->spec.group == PARAM_STATE;
    float *w = (state ? param_state(&r->ctx, id) : param_store_value(&r->params, id, 0)).data;
    CHECK_MSG(numbers(json_get(from, key), to) == p->count, "%s", key);
    for (int64_t i = 0; i < p->count; i++) w[i] = (float)to[i];
}

/* Rows of the batch are the five in turn, as each is computed by itself; those behind them have no gradient. */
static void golden_rows(Rig *r, const Json *j)
{
    double x[G_MOST], dy[G_MOST];
    CHECK(numbers(json_get(json_get(j, "input"), "x"), x) == G_ROWS * G_HIDDEN);
    CHECK(numbers(json_get(j, "dy"), dy) == G_ROWS * G_HIDDEN);
    for (int64_t i = 0; i < N * G_HIDDEN; i++) {
        const int64_t at = i % (G_ROWS * G_HIDDEN);
        ((float *)r->x.data)[i] = (float)x[at];
        r->weight[i] = i < G_ROWS * G_HIDDEN ? dy[at] : 0;
    }
}

static void golden_check(const double *got, const Json *from, const char *name, int64_t n)
{
    double want[G_MOST];
    CHECK_MSG(numbers(json_get(from, name), want) == n, "%s", name);
    for (int64_t i = 0; i < n; i++) CHECK_CLOSE(got[i], want[i], 3e-6, "%s %d", name, (int)i);
}

static void golden_grad(Rig *r, const Json *from, const char *key, const char *name)
{
    double got[G_MOST];
    const int id = golden_param(r, name);
    const int64_t n = r->registry.items[id].count, *fixed = param_store_grad(&r->params, id).data;
    for (int64_t i = 0; i < n; i++) got[i] = ldexp((double)fixed[i], -SHIFT);
    golden_check(got, from, key, n);
}

static void golden_layer(Rig *r, Recompute recompute)
{
    rig_open(r);
    r->spec = (ModelSpec){ .layers = 1, .hidden = G_HIDDEN, .tp_blocks = 1, .activation = ACT_RELU2 };
    r->spec.recompute = layer_pattern_all(recompute);
    r->spec.moe = (MixtureSpec){ .experts = 8, .topk = 2, .ffn = 5, .shared_ffn = 7, .latent = 4,
                                 .router = { ROUTER_SIGMOID, 1, 2.5f, 1, 1 },
                                 .balance = { .unit = 1, .bias_rate = 0.1f } };
    r->spec.moe.layers.word[0] = 1;
    r->kind = model_ffn(&r->spec, 0);
    OK(setup_alloc(&r->setup, r->kind->own_bytes, &r->own));
    OK(setup_alloc(&r->setup, r->kind->save_bytes, &r->save));
    OK(r->kind->add(r->own, &r->registry, &r->spec, "moe", 0));
}

TEST(moe_latent_golden)
{
    static const char *const names[][2] = { { "gate", "router.weight" },
                                            { "fc1_latent_proj", "latent_in.weight" },
                                            { "fc2_latent_proj", "latent_out.weight" },
                                            { "experts_up", "experts.fc1.weight" },
                                            { "experts_down", "experts.fc2.weight" },
                                            { "shared_up", "shared.fc1.weight" },
                                            { "shared_down", "shared.fc2.weight" } };
    const Case c = { kind_f, kind_b, G_HIDDEN, G_HIDDEN };
    Json *j;
    FILE *f = fopen(GOLDEN, "r");
    if (!f) SKIP("no " GOLDEN);
    fclose(f);
    OK(json_read_file(GOLDEN, 1 << 20, &j));
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_SELECTIVE; recompute++) {
        double y[G_MOST], dx[G_MOST];
        Tensor d;
        Rig r;
        golden_layer(&r, (Recompute)recompute);
        rig_ready(&r, &c);
        for (int i = 0; i < 7; i++) golden_set(&r, json_get(j, "input"), names[i][0], names[i][1]);
        golden_set(&r, j, "bias", "router.bias");
        golden_rows(&r, j);
        OK(tensor_new(&r.state, &d, F32, N, G_HIDDEN));
        gradient(&r, &c, d);
        for (int i = 0; i < G_ROWS * G_HIDDEN; i++)
            y[i] = ((float *)r.y.data)[i], dx[i] = ((float *)d.data)[i];
        golden_check(y, j, "y", G_ROWS * G_HIDDEN);
        golden_check(dx, json_get(j, "grad"), "x", G_ROWS * G_HIDDEN);
        for (int i = 0; i < 3; i++) golden_grad(&r, json_get(j, "grad"), names[i][0], names[i][1]);
        rig_close(&r);
    }
    json_free(j);
}

/* ---- Kimi Delta Attention in numbers that another program computed in float64 (transformers' class agrees) ---- */

#define KDA_GOLDEN "../shared/fixtures/kinds/kda.json"
enum { K_ROWS = 6, K_HIDDEN = 6, K_HEADS = 2, K_HEAD = 4, K_ALL = K_HEADS * K_HEAD };

/* The parameter's rows are those of some arrays, one below the other. */
static void golden_put(Rig *r, const Json *in, const char *name, const char *const keys[3])
{
    double to[G_MOST];
    int64_t n = 0;
    const int id = param_find(&r->registry, name);
    const Param *p = &r->registry.items[id];
    float *w = param_store_value(&r->params, id, 0).data;
    for (int i = 0; i < 3 && keys[i]; i++) n += numbers(json_get(in, keys[i]), to + n);
    CHECK_MSG(n == p->count, "%s", name);
    for (int64_t i = 0; i < p->count; i++)
        w[i] = (float)to[param_plain_row(p, i / p->local[1]) * p->local[1] + i % p->local[1]];
}

/* Rows from `first` on of the parameter's gradient, which stand as they do in it. */
static void golden_rows_grad(Rig *r, const Json *grad, const char *key, const char *name, int64_t first, int64_t n)
{
    double got[G_MOST];
    const int id = param_find(&r->registry, name);
    const int64_t *fixed = param_store_grad(&r->params, id).data;
    for (int64_t i = 0; i < n; i++) got[i] = ldexp((double)fixed[first + i], -SHIFT);
    golden_check(got, grad, key, n);
}

static void golden_kda(Rig *r, const Case *c, const Json *j)
{
    static const struct {
        const char *name, *keys[3];
    } params[] = { { "kda.qkv.weight", { "q_proj", "k_proj", "v_proj" } },
                   { "kda.fgb.weight", { "f_a_proj", "g_a_proj", "b_proj" } },
                   { "kda.decay.weight", { "f_b_proj" } },
                   { "kda.gate.weight", { "g_b_proj" } },
                   { "kda.conv.weight", { "conv" } },
                   { "kda.a_log", { "A_log" } },
                   { "kda.dt_bias", { "dt_bias" } },
                   { "kda.norm.weight", { "o_norm" } },
                   { "kda.proj.weight", { "o_proj" } } };
    double x[G_MOST], dy[G_MOST];
    rig_open(r);
    r->spec = (ModelSpec){ .layers = 1, .hidden = K_HIDDEN, .tp_blocks = 1, .norm_eps = 1e-5f };
    r->spec.kda = (KdaSpec){ K_HEADS, K_HEAD, 4, 0 };
    r->spec.mixer = layer_pattern_all(MIXER_KDA);
    r->kind = model_mixer(&r->spec, 0);
    OK(setup_alloc(&r->setup, r->kind->own_bytes, &r->own));
    OK(setup_alloc(&r->setup, r->kind->save_bytes, &r->save));
    OK(r->kind->add(r->own, &r->registry, &r->spec, "kda", 0));
    rig_ready(r, c);
    for (size_t i = 0; i < sizeof params / sizeof *params; i++)
        golden_put(r, json_get(j, "input"), params[i].name, params[i].keys);
    CHECK(numbers(json_get(json_get(j, "input"), "x"), x) == K_ROWS * K_HIDDEN);
    CHECK(numbers(json_get(j, "dy"), dy) == K_ROWS * K_HIDDEN);
    for (int64_t i = 0; i < N * K_HIDDEN; i++) r->weight[i] = i < K_ROWS * K_HIDDEN ? dy[i] : 0;
    for (int64_t i = 0; i < K_ROWS * K_HIDDEN; i++) ((float *)r->x.data)[i] = (float)x[i];
}

TEST(kda_golden)
{
    const Case c = { kind_f, kind_b, K_HIDDEN, K_HIDDEN };
    double y[G_MOST], dx[G_MOST];
    Tensor d;
    Rig r;
    Json *j;
    FILE *f = fopen(KDA_GOLDEN, "r");
    if (!f) SKIP("no " KDA_GOLDEN);
    fclose(f);
    OK(json_read_file(KDA_GOLDEN, 1 << 20, &j));
    golden_kda(&r, &c, j);
    OK(tensor_new(&r.state, &d, F32, N, K_HIDDEN));
    gradient(&r, &c, d);
    for (int i = 0; i < K_ROWS * K_HIDDEN; i++) y[i] = ((float *)r.y.data)[i], dx[i] = ((float *)d.data)[i];
    const Json *grad = json_get(j, "grad");
    golden_check(y, j, "y", K_ROWS * K_HIDDEN);
    golden_check(dx, grad, "x", K_ROWS * K_HIDDEN);
    golden_rows_grad(&r, grad, "f_b_proj", "kda.decay.weight", 0, K_ALL * K_HEAD);
    golden_rows_grad(&r, grad, "b_proj", "kda.fgb.weight", 2 * K_HEAD * K_HIDDEN, K_HEADS * K_HIDDEN);
    golden_rows_grad(&r, grad, "A_log", "kda.a_log", 0, K_HEADS);
    golden_rows_grad(&r, grad, "dt_bias", "kda.dt_bias", 0, K_ALL);
    golden_rows_grad(&r, grad, "o_norm", "kda.norm.weight", 0, K_HEAD);
    rig_close(&r);
    json_free(j);
}

TEST(moe_relu2)
{
    for (int recompute = 0; recompute < 2; recompute++)
        check_moe((ModelSpec){ .activation = ACT_RELU2,
                             .moe.shared_ffn = 24,
                             .recompute = layer_pattern_all(recompute ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE),
                             .moe.router = { .score = ROUTER_SIGMOID, .normalize = 1 } });
}
/* (Limits so far out that few numbers lie near them: across one a step finds no derivative.) */
TEST(moe_biases_clamped)
{
    for (int recompute = 0; recompute < 2; recompute++)
        check_moe((ModelSpec){ .activation = ACT_CLAMPED_SWIGLU,
                             .activation_limit = 4,
                             .bias = true,
                             .recompute = layer_pattern_all(recompute ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE),
                             .moe.router = { .score = ROUTER_SOFTMAX, .normalize = 1 } });
}
TEST(moe_sqrt_softplus_gated_recomputed)
{
    check_moe((ModelSpec){ .activation = ACT_GELU,
                         .moe.shared_ffn = 24,
                         .moe.shared_gate = true,
                         .bias = true,
                         .recompute = layer_pattern_all(RECOMPUTE_SELECTIVE),
                         .moe.router = { .score = ROUTER_SQRT_SOFTPLUS } });
}

/* Experts take the first 60 % of the rows: with them by weight a step would change what is dropped. */
TEST(moe_capacity)
{
    for (int recompute = 0; recompute < 2; recompute++)
        check_moe((ModelSpec){ .activation = ACT_SWIGLU,
                             .recompute = layer_pattern_all(recompute ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE),
                             .moe.capacity = { .factor = 0.6, .by_position = true },
                             .moe.router = { .score = ROUTER_SOFTMAX, .normalize = 1 } });
}

/* The router sees x with noise: gradients pass it. */
TEST(moe_jitter)
{
    check_moe((ModelSpec){ .activation = ACT_SWIGLU, .moe.jitter = 0.5f, .moe.router = { .score = ROUTER_SIGMOID } });
}

static Err head_f(Rig *r)
{
    const HeadLoss to = { r->batch.target, tensor_of(r->sums, I64, 3), 1 };
    return head_forward(&r->head, &r->ctx, r->x, &to, &r->head_save);
}

static Err head_b(Rig *r, Tensor dy, Tensor dx)
{
    (void)dy;
    return head_backward(&r->head, &r->ctx, &r->head_save, r->x, dx);
}

TEST(head_and_loss)
{
    static const float factors[][2] = { { 0, 0 }, { 3, 0 }, { 0, 0.4f }, { 3, 5 } };
    for (size_t i = 0; i < 2 * sizeof factors / sizeof *factors; i++) {
        Rig r;
        rig_open(&r);
        r.spec = (ModelSpec){ .vocab = VOCAB,
                              .padded_vocab = PADDED,
                              .hidden = HIDDEN,
                              .mup.width = factors[i / 2][0],
                              .logits.scale = factors[i / 2][1],
                              .logits.bias = i % 2 };
        OK(head_register(&r.head, &r.registry, &r.spec, -1));
        check_layer(&r, (Case){ head_f, head_b, HIDDEN });
    }
}

static Err block_f(Rig *r)
{
    ResidualStream x;
    TRY(residual_stream(&r->ctx, &r->spec, r->x, &x));
    TRY(block_forward(&r->block, &r->ctx, &x, &r->block_save, r->y));
    return residual_add(&r->ctx, &x.sum);
}

static Err block_b(Rig *r, Tensor dy, Tensor dx)
{
    memcpy(dx.data, dy.data, (size_t)tensor_bytes(dy)); /* one buffer for both */
    return block_backward(&r->block, &r->ctx, &r->block_save, r->x, dx, (InputSum){ .bias = -1 });
}

static void check_block(ModelSpec s)
{
    Rig r;
    rig_open(&r);
    r.spec = s;
    r.spec.layers = 1;
    r.spec.hidden = HIDDEN;
    r.spec.heads = 4;
    r.spec.head_dim = 8;
    r.spec.ffn = 40;
    r.spec.tp_blocks = 2;
    r.spec.norm_eps = 1e-3f;
    OK(block_register(&r.block, &r.registry, &r.spec, "layers.0", 0, &r.setup));
    OK(block_save_init(&r.block, &r.block_save, &r.setup));
    check_layer(&r, (Case){ block_f, block_b, HIDDEN, HIDDEN });
}

TEST(block_gpt2)
{
    check_block((ModelSpec){
        .kv_heads = 4, .bias = true, .activation = ACT_GELU, .dropout = 0.2f, .attention_dropout = 0.2f });
}

/* A mixer alone, or a feed-forward layer. */
TEST(block_of_one_layer)
{
    for (int ffn = 0; ffn < 2; ffn++)
        for (int norms = BLOCK_NORMS_PRE; norms <= BLOCK_NORMS_POST; norms++)
            for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_SELECTIVE; recompute++) {
                ModelSpec s = { .kv_heads = 2,
                                .bias = norms == BLOCK_NORMS_PRE,
                                .rms = norms != BLOCK_NORMS_PRE,
                                .block_norms = (BlockNorms)norms,
                                .activation = ACT_RELU2,
                                .dropout = 0.1f,
                                .mixer = layer_pattern_all(ffn ? MIXER_NONE : MIXER_ATTENTION),
                                .without_ffn.word[0] = !ffn,
                                .recompute = layer_pattern_all(recompute) };
                check_block(s);
            }
}

/* A block of attention and a block of a feed-forward layer, behind each other. */
static Err two_f(Rig *r)
{
    ResidualStream x;
    Tensor mid;
    TRY(stream_new(&r->ctx, &r->spec, r->spec.block_norms, &mid, &r->mid));
    TRY(residual_stream(&r->ctx, &r->spec, r->x, &x));
    TRY(block_forward(&r->block, &r->ctx, &x, &r->block_save, mid));
    TRY(block_forward(&r->second, &r->ctx, &x, &r->second_save, r->y));
    return residual_add(&r->ctx, &x.sum);
}

static Err two_b(Rig *r, Tensor dy, Tensor dx)
{
    const int between = block_bias_of_output(&r->block, &r->ctx);
    memcpy(dx.data, dy.data, (size_t)tensor_bytes(dy));
    TRY(block_backward(&r->second, &r->ctx, &r->second_save, save_get(&r->ctx, r->mid), dx, (InputSum){ between }));
    return block_backward(&r->block, &r->ctx, &r->block_save, r->x, dx, (InputSum){ -1, between >= 0 });
}

/* Either the block as a whole or as two of one layer, with the same names and so the same weights and dropout. */
static void open_block(Rig *r, ModelSpec s, int blocks, Tensor *dx)
{
    const Case c = { blocks > 1 ? two_f : block_f, blocks > 1 ? two_b : block_b, HIDDEN, HIDDEN };
    rig_open(r);
    r->spec = s;
    r->spec.layers = blocks;
    if (blocks > 1) {
        r->spec.mixer = (LayerPattern){ 2, { MIXER_ATTENTION, MIXER_NONE }, { 1, 1 } };
        r->spec.without_ffn.word[0] = 1;
        OK(block_register(&r->block, &r->registry, &r->spec, "layers.0", 0, &r->setup));
        OK(block_register(&r->second, &r->registry, &r->spec, "layers.0", 1, &r->setup));
        OK(block_save_init(&r->second, &r->second_save, &r->setup));
    } else {
        OK(block_register(&r->block, &r->registry, &r->spec, "layers.0", 0, &r->setup));
    }
    OK(block_save_init(&r->block, &r->block_save, &r->setup));
    rig_ready(r, &c);
    OK(tensor_new(&r->state, dx, F32, N, HIDDEN));
    gradient(r, &c, *dx);
}

TEST(a_block_is_two_of_one_layer_to_the_bit)
{
    for (int i = 0; i < 8; i++) {
        const bool post = i & 1, drop = i & 2;
        const ModelSpec s = { .hidden = HIDDEN,       .heads = 4,
                              .kv_heads = 2,          .head_dim = 8,
                              .ffn = 40,              .tp_blocks = 2,
                              .norm_eps = 1e-3f,      .bias = !post,
                              .rms = post,            .block_norms = post ? BLOCK_NORMS_BOTH : BLOCK_NORMS_PRE,
                              .activation = ACT_GELU, .dropout = drop ? 0.2f : 0,
                              .recompute = layer_pattern_all(i & 4 ? RECOMPUTE_SELECTIVE : RECOMPUTE_NONE) };
        Rig whole, two;
        Tensor dx, dx2;
        open_block(&whole, s, 1, &dx);
        open_block(&two, s, 2, &dx2);
        CHECK(!memcmp(whole.y.data, two.y.data, (size_t)tensor_bytes(whole.y)));
        CHECK(!memcmp(dx.data, dx2.data, (size_t)tensor_bytes(dx)));
        CHECK(whole.registry.count == two.registry.count);
        for (int k = 0; k < whole.registry.count; k++) {
            const Param *p = &whole.registry.items[k];
            const int64_t bytes = p->count * (int64_t)sizeof(int64_t);
            CHECK(!strcmp(p->name, two.registry.items[k].name));
            CHECK_MSG(!memcmp(param_store_grad(&whole.params, k).data, param_store_grad(&two.params, k).data,
                              (size_t)bytes),
                      "%s", p->name);
        }
        rig_close(&whole);
        rig_close(&two);
    }
}

/* What branches add is multiplied, with and without dropout; their last biases' gradients pass the factor, too. */
TEST(block_residual_scale)
{
    for (int drop = 0; drop < 2; drop++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_SELECTIVE; recompute++)
            check_block((ModelSpec){ .kv_heads = 4,
                                     .bias = true,
                                     .activation = ACT_GELU,
                                     .residual_scale = 0.3f,
                                     .dropout = drop ? 0.2f : 0,
                                     .recompute = layer_pattern_all(recompute) });
    check_block((ModelSpec){ .kv_heads = 2,
                             .rms = true,
                             .block_norms = BLOCK_NORMS_BOTH,
                             .rope = { .layers = layer_pattern_all(1) },
                             .activation = ACT_SWIGLU,
                             .residual_scale = 1.7f });
}

TEST(block_llama)
{
    check_block((ModelSpec){ .kv_heads = 2,
                             .rms = true,
                             .rope = { .layers = layer_pattern_all(1) },
                             .qk_norm = QK_NORM_HEADS,
                             .activation = ACT_SWIGLU,
                             .recompute = layer_pattern_all(RECOMPUTE_SELECTIVE) });
}

TEST(block_norms) /* of what layers give, beside those before them or alone */
{
    for (int norms = BLOCK_NORMS_BOTH; norms <= BLOCK_NORMS_POST; norms++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_SELECTIVE; recompute++)
            check_block((ModelSpec){ .kv_heads = 2,
                                     .rms = true,
                                     .block_norms = (BlockNorms)norms,
                                     .qk_norm = QK_NORM_FULL,
                                     .rope = { .layers = layer_pattern_all(1) },
                                     .activation = ACT_SWIGLU,
                                     .dropout = 0.1f,
                                     .recompute = layer_pattern_all(recompute) });
}

TEST(block_norms_of_states) /* before layers alone, whatever other blocks have; test_array has such a model */
{
    ModelSpec s = { .layers = 3, .block_norms = BLOCK_NORMS_POST, .state_pre_norms = true };
    static const MixerKind states[] = { MIXER_DELTA, MIXER_MAMBA2, MIXER_KDA };
    static const MixerKind others[] = { MIXER_ATTENTION, MIXER_LATENT, MIXER_NONE };
    for (int i = 0; i < 3; i++) {
        s.mixer = layer_pattern_all(states[i]);
        CHECK(model_block_norms(&s, 0) == BLOCK_NORMS_PRE);
        s.mixer = layer_pattern_all(others[i]);
        CHECK(model_block_norms(&s, 0) == BLOCK_NORMS_POST);
    }
}

TEST(block_parallel) /* layers that both read the block's input, behind one norm or two */
{
    for (int norms = BLOCK_NORMS_PARALLEL; norms <= BLOCK_NORMS_PARALLEL_TWO; norms++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_SELECTIVE; recompute++)
            for (int drop = 0; drop < 2; drop++)
                check_block((ModelSpec){ .kv_heads = 2,
                                         .rms = drop,
                                         .bare_norms = norms == BLOCK_NORMS_PARALLEL,
                                         .bias = true,
                                         .block_norms = (BlockNorms)norms,
                                         .rope = { .layers = layer_pattern_all(1) },
                                         .activation = drop ? ACT_SWIGLU : ACT_GELU_ERF,
                                         .residual_scale = drop ? 0.3f : 0,
                                         .dropout = drop ? 0.1f : 0,
                                         .recompute = layer_pattern_all(recompute) });
}

/* Two modules of multi-token prediction behind each other, and the head of the second: all that they read is probed. */
static Err further_f(Rig *r)
{
    const HeadLoss to = { r->batch.target, tensor_of(r->sums, I64, 3), 1 };
    TRY(mtp_forward(&r->further[0], &r->ctx, r->x, &r->further_save[0]));
    segment_end(&r->ctx);
    TRY(mtp_forward(&r->further[1], &r->ctx, save_get(&r->ctx, r->further_save[0].out), &r->further_save[1]));
    return head_forward(&r->head, &r->ctx, save_get(&r->ctx, r->further_save[1].out), &to, &r->head_save);
}

static Err further_b(Rig *r, Tensor dy, Tensor dx)
{
    const Tensor h = save_get(&r->ctx, r->further_save[0].out), last = save_get(&r->ctx, r->further_save[1].out);
    Tensor dlast, dh;
    (void)dy;
    TRY(tensor_new(&r->state, &dlast, F32, N, HIDDEN));
    TRY(tensor_new(&r->state, &dh, F32, N, HIDDEN));
    memset(dh.data, 0, (size_t)tensor_bytes(dh));
    memset(dx.data, 0, (size_t)tensor_bytes(dx));
    TRY(head_backward(&r->head, &r->ctx, &r->head_save, last, dlast));
    TRY(mtp_backward(&r->further[1], &r->ctx, &r->further_save[1], h, dlast, dh));
    return mtp_backward(&r->further[0], &r->ctx, &r->further_save[0], r->x, dh, dx);
}

static void check_further(Recompute recompute, float dropout)
{
    Rig r;
    rig_open(&r);
    r.spec = (ModelSpec){ .layers = 1,
                          .hidden = HIDDEN,
                          .heads = 4,
                          .kv_heads = 2,
                          .head_dim = 8,
                          .ffn = 40,
                          .tp_blocks = 2,
                          .norm_eps = 1e-3f,
                          .bias = true,
                          .activation = ACT_GELU,
                          .vocab = VOCAB,
                          .padded_vocab = PADDED,
                          .dropout = dropout,
                          .seed = 5,
                          .recompute = layer_pattern_all(recompute),
                          .mup.width = dropout > 0 ? 0 : 1.5f };
    OK(head_register(&r.head, &r.registry, &r.spec, -1)); /* (as the table, too) */
    for (int i = 0; i < 2; i++) {
        r.further[i].depth = i + 1;
        r.further[i].segment = 1 + i * MTP_SEGMENTS;
        OK(mtp_register(&r.further[i], &r.registry, &r.spec, r.head.weight, &r.setup));
        OK(block_save_init(&r.further[i].block, &r.further_save[i].block, &r.setup));
    }
    check_layer(&r, (Case){ further_f, further_b, HIDDEN });
}

TEST(multi_token_prediction) { check_further(RECOMPUTE_NONE, 0.2f); }
TEST(multi_token_prediction_recomputed) { check_further(RECOMPUTE_FULL, 0); }

/* ---- how weights begin ---- */

/* Megatron's rules: projections back to the residual stream have std / the root of how many there are. */
static void check_beginning(ModelSpec m, double narrow, int projections)
{
    Rig r;
    Stage st;
    int smaller = 0;
    rig_open(&r);
    const StageShare all = stage_whole(&m);
    OK(stages_register(&st, &all, 1, &r.registry, &m, &r.setup));
    OK(param_layout(&r.registry, INT64_MAX));
    OK(grad_stats_init(&r.stats, r.registry.count, false, &r.state));
    OK(param_store_init(&r.params, &r.registry, &r.stats, (StoreMemory){ &r.state, &r.state },
                        (StoreKinds){ .grads = GRADS_NONE }));
    OK(param_store_fill(&r.params, &r.device.stream, 77, 2));
    for (int i = 0; i < r.registry.count; i++) {
        const Param *p = &r.registry.items[i];
        const float *w = param_store_value(&r.params, i, 0).data;
        bool projection = strstr(p->name, "proj.weight") || strstr(p->name, "fc2.weight");
        bool constant = p->spec.ndim == 1, one = strstr(p->name, "norm") && strstr(p->name, ".weight");
        double want = constant ? 0 : projection ? narrow : 0.02, sum = 0, squares = 0, n = 0;
        for (int64_t k = 0; k < p->count; k++) {
            if (param_plain_row(p, k / p->local[1]) < 0) continue;
            double d = w[k] - (one ? 1 : 0);
            sum += d;
            squares += d * d;
            n++;
        }
        CHECK_MSG(fabs(sum / n) <= 5 * want / sqrt(n), "%s: mean %g", p->name, sum / n);
        CHECK_MSG(fabs(sqrt(squares / n) - want) <= 4 * want / sqrt(2 * n), "%s: deviation %g, want %g",
                  p->name, sqrt(squares / n), want);
        smaller += projection;
    }
    CHECK(smaller == projections);
    rig_close(&r);
}

TEST(initial_weights)
{
    const TrainSpec s = tiny_gpt2();
    check_beginning(s.model, 0.02 / sqrt(2 * s.model.layers), 2 * s.model.layers);
    check_beginning(tiny_singles(s, 3).model, 0.02 / 2, 4); /* attention; a feed-forward layer; both */
    check_beginning(tiny_singles(s, 2).model, 0.02 / sqrt(2), 2);
}

static double tiny_eval(float dropout)
{
    TrainSpec s = tiny_gpt2();
    MemoryPlan plan;
    World w;
    Trainer t;
    double mean = NAN;
    int64_t counted;
    s.model.dropout = s.model.attention_dropout = dropout;
    OK(world_open_self(&w));
    OK(trainer_plan(&s, w.grid, 0, &plan));
    OK(trainer_open(&t, &s, &w, &plan));
    OK(trainer_eval(&t, (TokenSource){ NULL, tiny_tokens }, 0, t.spec.global_batch, &mean, &counted));
    trainer_close(&t);
    world_close(&w);
    return mean;
}

TEST(evaluation_drops_nothing)
{
    double without = tiny_eval(0);
    CHECK(without > 0);
    CHECK(tiny_eval(0.3f) == without);
}

/* ---- products of routers on a GPU ---- */

static int products_in_fp32, fp32_results;

static Err note_linear_fwd(Stream *s, const linear_fwd_args *a)
{
    (void)s;
    products_in_fp32 += a->x.dtype == F32;
    fp32_results += a->y.dtype == F32;
    return ERR_OK;
}

/* Ranks that share sequences meet in a mixer in the ways that its kind has. A way that it has not is refused, and those
 * that it has are named. */
TEST(ways_that_a_mixer_has)
{
    const LayerKind by_heads = { .name = "scan", .carry.ways = 1 << CONTEXT_A2A };
    ModelSpec s = { .layers = 3, .context = { 2, { CONTEXT_RING, CONTEXT_A2A }, { 1, 1 } } };
    OK(kind_check_way(&by_heads, 4, CONTEXT_A2A));
    for (ContextComm way = CONTEXT_ALLGATHER; way < CONTEXT_COMMS; way++)
        CHECK(way == CONTEXT_A2A || kind_check_way(&by_heads, 4, way) == ERR_CONFIG);
    CHECK_MSG(strstr(err_message(), "layers.4.scan"), "%s", err_message());
    CHECK_MSG(strstr(err_hint_text(), "parallel.cp_comm=a2a") && !strstr(err_hint_text(), "=ring") &&
                  strstr(err_hint_text(), "parallel.cp=1"),
              "%s", err_hint_text());
    for (MixerKind mixer = MIXER_ATTENTION; mixer <= MIXER_LATENT; mixer++) {
        s.mixer = layer_pattern_all(mixer);
        OK(model_check_ways(&s));
    }
}

/* In 16-bit runs all products are of 16-bit numbers, on tensor cores, and those of the routers and of a shared expert's
 * gate have fp32 results: two in each of two mixtures, behind the dense block. */
TEST(routers_multiply_in_16_bits)
{
    TrainSpec spec = tiny_mixture(TINY_DEEPSEEK, 3);
    const Grid grid = { .tp = 1, .dp = 1, .ep = 1 };
    MemoryPlan plan;
    World world;
    Trainer t;
    StepReport report;
    OpTable ops = null_ops;
    ops.linear_fwd = note_linear_fwd;
    spec.device.kind = DEVICE_CUDA;
    spec.compute = BF16;
    OK(trainer_plan(&spec, grid, 0, &plan));
    OK(world_open_null(&world, grid, 0));
    OK(trainer_open_on(&t, DEVICE_NULL, &spec, &world, &plan));
    t.device.ops = &ops;
    products_in_fp32 = fp32_results = 0;
    OK(trainer_step(&t, (TokenSource){ 0 }, &report));
    const int64_t units = spec.global_batch / spec.micro_batch;
    CHECK_MSG(products_in_fp32 == 0, "%d products in fp32", products_in_fp32);
    CHECK_MSG(fp32_results == 4 * units, "%d fp32 results of %lld micro-batches", fp32_results, (long long)units);
    trainer_close(&t);
    world_close(&world);
}

TEST_MAIN
