/*
 * One named test for each seam that later work (process groups, pipelines, MoE, context parallelism, fp8, CUDA
 * graphs) relies on; docs/seams.md lists them. Those proven elsewhere: 2 in test_shard, 20 in test_keys.sh.
 */
#include "test.h"
#include "tiny.h"

/* A single-rank trainer over tiny tokens. */
typedef struct {
    World world;
    Trainer t;
} Rig;

static Err rig_open(Rig *r, const TrainSpec *spec)
{
    MemoryPlan plan;
    TRY(world_open_self(&r->world));
    TRY(trainer_plan(spec, r->world.grid, 0, &plan));
    return trainer_open(&r->t, spec, &r->world, &plan);
}

static void rig_close(Rig *r)
{
    trainer_close(&r->t);
    world_close(&r->world);
}

/* Step values and cleared sums, as trainer_step does before it runs its list. */
static Err rig_prepare(Rig *r)
{
    Trainer *t = &r->t;
    int64_t nominal = t->spec.global_batch * t->spec.model.seq;
    StepValues v = { .step = 1, .nominal = nominal, .lr = 1e-3f, .correct1 = 0.1f, .correct2 = 0.05f, .clip = 1,
                     .loss_scale = 1 / (float)nominal, .unscale = 1 };
    t->serving.source = (TokenSource){ NULL, tiny_tokens };
    t->serving.first_sample = 0;
    memcpy(t->step_values, &v, sizeof v);
    memset(t->executor.sums.data, 0, 24);
    param_store_begin(&t->stores[0]);
    return ERR_OK;
}

static uint64_t grad_hash(const Rig *r)
{
    uint64_t h = tiny_hash(7, r->t.executor.sums.data, 24);
    for (int i = 0; i < r->t.stores[0].reg->count; i++) {
        Tensor g = param_store_grad(&r->t.stores[0], i);
        h = tiny_hash(h, g.data, (size_t)tensor_bytes(g));
    }
    return h;
}

static Err run_actions(Rig *r, const Action *list, int count)
{
    return executor_run(&r->t.executor, &(ActionList){ .action = (Action *)list, .count = count }, true);
}

/* Hash of gradients and loss after running `list` on a spec. */
static uint64_t run_list(const TrainSpec *spec, const Action *list, int count)
{
    Rig r;
    OK(rig_open(&r, spec));
    OK(rig_prepare(&r));
    OK(run_actions(&r, list, count));
    uint64_t h = grad_hash(&r);
    rig_close(&r);
    return h;
}

#define DO(what, unit) { .kind = ACT_##what, .microbatch = (unit), .count = 1, .in = -1, .out = -1 }
static const Action fused[] = { DO(F, 0), DO(B, 0), DO(F, 1), DO(B, 1),
                                DO(F, 2), DO(B, 2), DO(F, 3), DO(B, 3) };
static const Action delayed[] = { DO(F, 0), DO(I, 0), DO(F, 1), DO(I, 1),
                                  DO(F, 2), DO(I, 2), DO(F, 3), DO(I, 3),
                                  DO(W, 0), DO(W, 1), DO(W, 2), DO(W, 3) };

/* Scratch and the I region are filled with NaN after each I; W runs three micro-batches later. */
TEST(seam01_delayed_w_with_poisoned_arenas)
{
    TrainSpec specs[] = { tiny_gpt2(), tiny_llama() };
    for (int i = 0; i < 2; i++)
        for (int recompute = RECOMPUTE_NONE; recompute < TINY_RECOMPUTES; recompute++) {
            TrainSpec s = specs[i];
            s.poison = true;
            uint64_t want = run_list(&s, fused, 8);
            s.model.recompute = tiny_recompute(recompute);
            CHECK(run_list(&s, fused, 8) == want);
            s.pipeline.schedule = "gpipe+split"; /* room for four micro-batches, and for gradients that wait */
            CHECK_MSG(run_list(&s, delayed, 12) == want, "model %d recompute %d", i, recompute);
        }
}

/* The registry alone says shapes, cuts and where a gradient is partial. */
TEST(seam03_ownership_in_the_registry)
{
    TrainSpec s = tiny_llama();
    int64_t total = tiny_global_count(&s.model);
    int64_t elements = 0;
    for (int tp = 1; tp <= 4; tp *= 4) {
        Stage st;
        SetupArena setup;
        ParamRegistry reg;
        setup_init(&setup);
        param_registry_init(&reg, &setup, param_place((Grid){ .tp = tp, .dp = 1 }, tp - 1, false));
        const StageShare all = stage_whole(&s.model);
        OK(stages_register(&st, &all, 1, &reg, &s.model, &setup));
        CHECK(param_total(&reg) == total);
        for (int i = 0; i < reg.count; i++) {
            const Param *p = &reg.items[i];
            bool norm = strstr(p->name, "norm") != NULL, head = strstr(p->name, "q_norm") || strstr(p->name, "k_norm");
            bool cut = p->spec.cut[0] == CUT_TP || p->spec.cut[1] == CUT_TP;
            CHECK_MSG(norm == (p->spec.partial != PARTIAL_NONE), "%s", p->name);
            CHECK_MSG(!head || p->spec.partial == PARTIAL_HEADS, "%s", p->name);
            CHECK_MSG(cut == !norm, "%s", p->name);
            CHECK_MSG(!norm == !!(p->spec.flags & PARAM_DECAY), "%s", p->name);
            CHECK(p->count == p->local[0] * p->local[1] && p->spec.group == PARAM_DENSE);
            elements += cut ? p->count * tp : p->count;
        }
        setup_release(&setup);
    }
    CHECK(elements >= 2 * total); /* padding of the vocabulary on top */
}

/* Two stores of the same registry: pointing the context at the other one is all it takes. */
TEST(seam04_weights_by_id)
{
    TrainSpec s = tiny_gpt2(), other = s;
    other.seed = 99;
    Rig a, b;
    double loss_a, loss_b, loss_ab;
    int64_t n;
    TokenSource source = { NULL, tiny_tokens };
    OK(rig_open(&a, &s));
    OK(rig_open(&b, &other));
    OK(trainer_eval(&a.t, source, 0, a.t.spec.global_batch, &loss_a, &n));
    OK(trainer_eval(&b.t, source, 0, b.t.spec.global_batch, &loss_b, &n));
    a.t.executor.stages[0].params = &b.t.stores[0];
    OK(trainer_eval(&a.t, source, 0, a.t.spec.global_batch, &loss_ab, &n));
    CHECK(loss_a != loss_b);
    CHECK(loss_ab == loss_b);
    rig_close(&a);
    rig_close(&b);
}

static uint64_t train_hash(TrainSpec spec, Grid g, int delay_ms)
{
    TinyRun r = { .spec = spec, .grid = g, .steps = 2, .delay_ms = delay_ms };
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
    return r.hash;
}

/* Every layer calls the collectives; cut over 2 and 4 ranks, with and without sharded rows. */
TEST(seam05_collectives_from_day_one)
{
    TrainSpec specs[] = { tiny_gpt2(), tiny_llama() };
    for (int i = 0; i < 2; i++) {
        uint64_t want = train_hash(specs[i], (Grid){ .tp = 1, .dp = 1 }, 0);
        for (int tp = 2; tp <= 4; tp *= 2)
            for (int sp = 0; sp < 2; sp++)
                CHECK(train_hash(specs[i], (Grid){ .tp = tp, .dp = 1, .sp = sp }, 0) == want);
    }
}

/* Every completion comes 20 ms late: nothing may be read before its event. */
TEST(seam06_every_completion_delayed)
{
    TrainSpec s = tiny_gpt2();
    s.model.layers = 1;
    uint64_t want = train_hash(s, (Grid){ .tp = 1, .dp = 1 }, 0);
    CHECK(train_hash(s, (Grid){ .tp = 2, .dp = 2, .sp = true }, 20) == want);
    s.overlap_tp = 2;
    CHECK(train_hash(s, (Grid){ .tp = 4, .dp = 1, .sp = true }, 20) == want);
}

static Batch *batch_of(Rig *r)
{
    return &r->t.executor.stages[0].slots[0].batch;
}

/* Gradients of one step whose rows lie in the order of `span`. */
static uint64_t hash_with_span(TrainSpec s, Spans span)
{
    Rig r;
    OK(rig_open(&r, &s));
    batch_of(&r)->span = span;
    OK(rig_prepare(&r));
    OK(run_actions(&r, fused, 8));
    uint64_t h = grad_hash(&r);
    rig_close(&r);
    return h;
}

/* Rows in two spans, the later positions first: what a rank of zigzag context parallelism holds. */
TEST(seam07_positions_not_row_numbers)
{
    TrainSpec specs[] = { tiny_gpt2(), tiny_llama() };
    for (int i = 0; i < 2; i++) {
        uint64_t want = hash_with_span(specs[i], spans_whole(TINY_SEQ));
        CHECK(hash_with_span(specs[i], (Spans){ { 48, 0 }, { 16, 48 } }) == want);
        CHECK(hash_with_span(specs[i], (Spans){ { 32, 0 }, { 32, 32 } }) == want);
    }
}

/* Masks are a function of (site, sample, position, feature): another sample number is another mask. */
TEST(seam08_dropout_by_global_coordinates)
{
    TrainSpec s = tiny_gpt2();
    Rig r;
    uint64_t h[2];
    for (int i = 0; i < 2; i++) {
        OK(rig_open(&r, &s));
        OK(rig_prepare(&r));
        int vocab = TINY_VOCAB;
        r.t.serving.source.user = &vocab;
        OK(run_actions(&r, fused, 2));
        h[i] = grad_hash(&r);
        rig_close(&r);
    }
    CHECK(h[0] == h[1]);
    uint64_t key = rng_key(1, "a"), other = rng_key(1, "b");
    int same = 0, kept = 0;
    uint32_t threshold = dropout_threshold(0.1f);
    for (int f = 0; f < 4096; f++) {
        int keep = dropout_keep(key, threshold, 5, 6, f);
        kept += keep;
        same += keep == dropout_keep(other, threshold, 5, 6, f);
    }
    CHECK(abs(kept - 3686) < 60);
    CHECK(same < 3600);
}

typedef struct {
    Rig *rig;
    ExecutorHooks real;
    char log[64];
    int logged;
} Spy;

static Err masked_batch(void *user, int m, Batch *b)
{
    Spy *spy = user;
    TRY(spy->real.batch(spy->real.user, m, b));
    int32_t *target = b->target.data;
    for (int64_t n = 0; n < b->B * b->T; n += 2) target[n] = -1;
    return ERR_OK;
}

/* Half of the targets do not count: the mean is over those that do, and so is its gradient. */
TEST(seam09_loss_scale)
{
    TrainSpec s = tiny_gpt2();
    Rig r;
    OK(rig_open(&r, &s));
    Spy spy = { .rig = &r, .real = r.t.executor.hooks };
    r.t.executor.hooks.user = &spy;
    r.t.executor.hooks.batch = masked_batch;
    OK(rig_prepare(&r));
    OK(run_actions(&r, fused, 8));
    r.t.executor.hooks = spy.real;
    OK(optim_norm(&r.t.optim));
    const StepValues *v = r.t.step_values;
    CHECK(v->nominal == 8 * TINY_SEQ && v->counted == 4 * TINY_SEQ);
    double clipped = v->grad_norm > 1 ? 1 / (v->grad_norm + 1e-6) : 1;
    CHECK_CLOSE(v->grad_scale, 2 * clipped, 1e-5, " ");
    CHECK_CLOSE((double)v->loss_fixed * 0x1p-28 / (double)v->counted, log(TINY_VOCAB), 0.1, " ");
    rig_close(&r);
}

static Err broken_reduce(void *user, int replica)
{
    Spy *spy = user;
    ((float *)param_store_grad(&spy->rig->t.stores[0], 0).data)[0] = INFINITY;
    return spy->real.reduce(spy->real.user, replica);
}

static Err real_norm(void *user) { return ((Spy *)user)->real.norm(((Spy *)user)->real.user); }

static Err real_update(void *user, int replica)
{
    return ((Spy *)user)->real.update(((Spy *)user)->real.user, replica);
}

static Err real_tied(void *user) { return ((Spy *)user)->real.tied(((Spy *)user)->real.user); }

/* One gradient that is infinite at any scale: the step is skipped, and the scale stays what it was for the next. */
TEST(seam09_a_skipped_step_keeps_the_scale)
{
    TrainSpec s = tiny_gpt2();
    s.exact = false;
    s.compute = F16;
    Rig r;
    StepReport report;
    OK(rig_open(&r, &s));
    const LossScale before = r.t.progress.loss_scale = (LossScale){ .log2 = 3, .good_steps = 7 };
    Spy spy = { .rig = &r, .real = r.t.executor.hooks };
    r.t.executor.hooks = (ExecutorHooks){ &spy, masked_batch, real_tied, broken_reduce, real_norm, real_update };
    OK(trainer_step(&r.t, tiny_source(&r.t), &report));
    CHECK(report.skipped && report.rescaled == before.log2 && isfinite(report.loss) && isnan(report.grad_norm));
    CHECK_MSG(r.t.progress.loss_scale.log2 == before.log2 && r.t.progress.loss_scale.good_steps == before.good_steps,
              "2^%lld, was 2^%lld", (long long)r.t.progress.loss_scale.log2, (long long)before.log2);
    rig_close(&r);
}

static Err heavy_batch(void *user, int m, Batch *b)
{
    Spy *spy = user;
    ((int64_t *)spy->rig->t.executor.sums.data)[0] = (int64_t)1 << 62;
    return spy->real.batch(spy->real.user, m, b);
}

/* Losses of many batches may add up to more than the 64 bits that hold those of one. */
TEST(seam09_a_long_evaluation)
{
    TrainSpec s = tiny_gpt2();
    s.micro_batch = s.global_batch = 2;
    Rig r;
    double loss[2];
    int64_t counted;
    OK(rig_open(&r, &s));
    OK(trainer_eval(&r.t, tiny_source(&r.t), 0, 8 * r.t.spec.global_batch, &loss[0], &counted));
    Spy spy = { .rig = &r, .real = r.t.executor.hooks };
    r.t.executor.hooks.user = &spy;
    r.t.executor.hooks.batch = heavy_batch;
    r.t.executor.hooks.rows = NULL; /* (it would take the spy for the trainer) */
    OK(trainer_eval(&r.t, tiny_source(&r.t), 0, 8 * r.t.spec.global_batch, &loss[1], &counted));
    CHECK(counted == 8 * 2 * TINY_SEQ);
    CHECK_CLOSE(loss[1], loss[0] + 8 * 0x1p34 / (double)counted, 1e-12, " ");
    r.t.executor.hooks = spy.real;
    rig_close(&r);
}

/* No host read of device memory between the first and the last action of a step. */
TEST(seam10_step_values_on_the_device)
{
    TrainSpec s = tiny_llama();
    Rig r;
    OK(rig_open(&r, &s));
    OK(rig_prepare(&r));
    int64_t before = r.t.device.counters.host_reads;
    OK(executor_run(&r.t.executor, &r.t.parts.step.rank[0], true));
    CHECK(r.t.device.counters.host_reads == before);
    CHECK(r.t.step_values->grad_norm > 0);
    rig_close(&r);
}

/* Between F and B a block's save moves elsewhere; the old place is overwritten with NaN. */
TEST(seam12_movable_saves)
{
    TrainSpec s = tiny_gpt2();
    uint64_t want = run_list(&s, fused, 2);
    Rig r;
    OK(rig_open(&r, &s));
    OK(rig_prepare(&r));
    OK(run_actions(&r, fused, 1));
    Segment *g = &r.t.executor.stages[0].slots[0].slot.segments[1];
    char *moved[REGION_COUNT];
    for (int k = 0; k < REGION_COUNT; k++) {
        CHECK(g->size_bytes[k] > 0);
        moved[k] = aligned_alloc(256, (size_t)g->size_bytes[k]);
        memcpy(moved[k], g->base[k], (size_t)g->size_bytes[k]);
        memset(g->base[k], 0xff, (size_t)g->size_bytes[k]);
        g->base[k] = moved[k];
    }
    OK(run_actions(&r, fused + 1, 1));
    CHECK(grad_hash(&r) == want);
    for (int k = 0; k < REGION_COUNT; k++) free(moved[k]);
    rig_close(&r);
}

/* A quantised weight reaches a backend that cannot read it: refused, not read as if it were plain. */
TEST(seam13_factors_are_of_codes_alone)
{
    Device cpu;
    float data[3][64] = { { 0 } }, one = 1;
    OK(device_open(&cpu, (DeviceChoice){ .threads = 1 }));
    Tensor scale = tensor_of(&one, F32, 1), w = tensor_of(data[0], F32, 8, 8);
    Tensor x = tensor_of(data[1], F32, 8, 8), y = tensor_of(data[2], F32, 8, 8);
    OK(op(&cpu.stream, linear_fwd, .y = y, .x = x, .w = w, .leaf = 8));
    w.scale = &scale;
    FAILS(op(&cpu.stream, linear_fwd, .y = y, .x = x, .w = w, .leaf = 8), ERR_SHAPE, "of codes alone");
    device_close(&cpu);
}

/* The model cut into stages, each with its own registry: between ranks, and between chunks of a rank. */
TEST(seam14_stages)
{
    TrainSpec specs[] = { tiny_gpt2(), tiny_llama() };
    for (int i = 0; i < 2; i++) {
        specs[i].model.layers = 4;
        uint64_t want = train_hash(specs[i], (Grid){ .tp = 1, .dp = 1 }, 0);
        CHECK(train_hash(specs[i], (Grid){ .tp = 1, .dp = 1, .pp = 2 }, 0) == want);
        CHECK(train_hash(specs[i], (Grid){ .tp = 1, .dp = 1, .pp = 4 }, 0) == want);
        specs[i].pipeline.layout = "E|t|tt|tL";
        CHECK(train_hash(specs[i], (Grid){ .tp = 1, .dp = 1, .pp = 4 }, 0) == want);
    }
}

/* Integer statistics of a gradient do not depend on how it is cut. */
TEST(seam15_order_free_norms)
{
    Device cpu;
    enum { N = 10007 };
    static int64_t g[N];
    int64_t max[2] = { 0 }, sum[2][4] = { { 0 } };
    int32_t shift = 40;
    uint64_t seed = 3;
    OK(device_open(&cpu, (DeviceChoice){ .threads = 2 }));
    for (int i = 0; i < N; i++) g[i] = (int64_t)test_rand(&seed) >> (2 + i % 50);
    FlatPart part = { .count = N, .flags = FLAT_COUNTS };
    Tensor sh = tensor_of(&shift, I32, 1), parts = tensor_of(&part, I64, 1, sizeof part / sizeof(int64_t));
    OK(op(&cpu.stream, grad_stats, .max = tensor_of(&max[0], I64, 1), .sumsq = tensor_of(sum[0], I64, 1, 4),
          .g = tensor_of(g, I64, N), .shift = sh, .parts = parts, .chunks = 1));
    for (int at = N; at > 0; at = (int)part.grad) { /* back to front, in uneven pieces */
        int64_t m = 0;
        part.count = at < 1234 ? at : 1234;
        part.grad = at - part.count;
        OK(op(&cpu.stream, grad_stats, .max = tensor_of(&m, I64, 1), .sumsq = tensor_of(sum[1], I64, 1, 4),
              .g = tensor_of(g, I64, N), .shift = sh, .parts = parts, .chunks = 1));
        if (m > max[1]) max[1] = m;
    }
    CHECK(max[0] == max[1]);
    double value[2] = { 0 }, want = 0;
    for (int k = 0; k < 2; k++)
        for (int l = 0; l < 4; l++) value[k] += ldexp((double)sum[k][l], 32 * l);
    for (int i = 0; i < N; i++) want += (double)(float)g[i] * (double)(float)g[i];
    CHECK(value[0] == value[1]);
    CHECK_CLOSE(value[0] / want, 1, 1e-12, " ");
    device_close(&cpu);
}

/* Initial weights: the same numbers on every grid and under every padding of the vocabulary. */
TEST(seam16_initial_values)
{
    TrainSpec s = tiny_llama(), padded = s;
    padded.model.padded_vocab = 384;
    TinyRun a = { .spec = s, .grid = { 1, 1, false }, .keep_state = true };
    TinyRun b = { .spec = s, .grid = { 4, 2, true }, .keep_state = true };
    TinyRun c = { .spec = padded, .grid = { 2, 1, false }, .keep_state = true };
    TinyRun *runs[] = { &a, &b, &c };
    for (int i = 0; i < 3; i++) {
        tiny_train(runs[i]);
        CHECK_MSG(!runs[i]->err, "%s", runs[i]->message);
        CHECK(!memcmp(runs[i]->state[0], a.state[0], (size_t)a.global_count * sizeof(float)));
    }
    double sum = 0, sq = 0;
    int64_t n = (int64_t)TINY_VOCAB * s.model.hidden; /* the embedding comes first */
    for (int64_t i = 0; i < n; i++) sum += a.state[0][i], sq += (double)a.state[0][i] * a.state[0][i];
    CHECK_CLOSE(sum / (double)n, 0, 1e-3, " ");
    CHECK_CLOSE(sqrt(sq / (double)n) / 0.02, 1, 0.02, " ");
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 3; k++) free(runs[i]->state[k]);
}

TEST(seam17_threads)
{
    TrainSpec s = tiny_llama();
    uint64_t want = train_hash(s, (Grid){ .tp = 1, .dp = 1 }, 0);
    for (int threads = 2; threads <= 5; threads++) {
        s.device.threads = threads;
        CHECK(train_hash(s, (Grid){ .tp = 1, .dp = 1 }, 0) == want);
    }
}

static Err spy_batch(void *user, int m, Batch *b)
{
    Spy *spy = user;
    spy->log[spy->logged++] = (char)('0' + m);
    return spy->real.batch(spy->real.user, m, b);
}

static Err spy_tied(void *user)
{
    Spy *spy = user;
    spy->log[spy->logged++] = 't';
    return spy->real.tied(spy->real.user);
}

static Err spy_reduce(void *user, int replica)
{
    Spy *spy = user;
    spy->log[spy->logged++] = 'r';
    return spy->real.reduce(spy->real.user, replica);
}

static Err spy_norm(void *user)
{
    Spy *spy = user;
    spy->log[spy->logged++] = 'n';
    return spy->real.norm(spy->real.user);
}

static Err spy_update(void *user, int replica)
{
    Spy *spy = user;
    spy->log[spy->logged++] = 'u';
    return spy->real.update(spy->real.user, replica);
}

TEST(seam18_executor_hooks)
{
    TrainSpec s = tiny_gpt2();
    Rig r;
    StepReport report;
    OK(rig_open(&r, &s));
    Spy spy = { .rig = &r, .real = r.t.executor.hooks };
    r.t.executor.hooks = (ExecutorHooks){ &spy, spy_batch, spy_tied, spy_reduce, spy_norm, spy_update };
    OK(trainer_step(&r.t, (TokenSource){ NULL, tiny_tokens }, &report));
    CHECK_MSG(!strcmp(spy.log, "0123rnu"), "%s", spy.log);
    rig_close(&r);
}

/* The plan is the run: equal to the byte, and 256 bytes less of anything is too little. */
TEST(seam19_one_memory_truth)
{
    TrainSpec specs[] = { tiny_gpt2(), tiny_llama() };
    for (int i = 0; i < 2; i++)
        for (int recompute = 0; recompute < TINY_RECOMPUTES; recompute++) {
            Rig r;
            MemoryPlan plan, peak;
            StepReport report;
            double loss;
            int64_t n;
            TrainSpec s = specs[i];
            s.model.recompute = tiny_recompute(recompute);
            TokenSource source = { NULL, tiny_tokens };
            OK(rig_open(&r, &s));
            plan = r.t.plan;
            OK(trainer_step(&r.t, source, &report));
            OK(trainer_eval(&r.t, source, 0, r.t.spec.global_batch, &loss, &n));
            peak = trainer_peak(&r.t);
            CHECK(peak.state == plan.state && peak.scratch == plan.scratch && peak.save == plan.save);
            CHECK(!memcmp(peak.stages, plan.stages, sizeof peak.stages));
            CHECK(r.t.device.counters.flop >= plan.work.flop);
            rig_close(&r);
            int64_t *saves = plan.stages[0].save;
            int64_t *arenas[] = { &plan.state, &plan.scratch, &plan.save, &saves[REGION_I], &saves[REGION_W] };
            for (int k = 0; k < 5; k++) {
                World w;
                Trainer t;
                *arenas[k] -= 256;
                OK(world_open_self(&w));
                Err err = trainer_open(&t, &s, &w, &plan);
                if (!err) err = trainer_step(&t, source, &report);
                if (!err) err = trainer_eval(&t, source, 0, s.global_batch, &loss, &n);
                CHECK_MSG(err == ERR_MEMORY, "arena %d: %s", k, err_message());
                if (k) trainer_close(&t);
                world_close(&w);
                *arenas[k] += 256;
            }
        }
}

TEST_MAIN
