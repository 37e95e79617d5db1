/*
 * Schedules that update while the pipeline runs against a plain loop of their papers' rules (engine/async.h): one rank
 * keeps every version of every weight, composes for each micro-batch the ones that the rule names, stage by stage,
 * takes the gradient there and updates the newest. The pipeline must give its bits: losses, weights, both moments.
 */
#include <math.h>

#include "base/mathx.h"
#include "test.h"
#include "tiny.h"

enum { STEPS = 2, UPDATES = 12 };

/* Under a sanitizer (brief) one step, of every second case. */
static int step_count(void)
{
    return brief() ? 1 : STEPS;
}

typedef enum { STASH, VERTICAL, DOUBLE } Rule;

typedef struct {
    const char *schedule;
    Rule rule;
    int pp, dp, zero, zero_group, group; /* group: micro-batches of an update, over one dp rank */
    Recompute recompute;
    bool narrow; /* in bf16, what is no matrix in fp32 beside */
} Case;

static TrainSpec spec_of(const Case *c)
{
    TrainSpec s = tiny_llama();
    s.model.layers = 4;
    s.update.clip = 0;
    s.micro_batch = 1;
    s.global_batch = UPDATES * c->group * c->dp;
    s.update.bucket_bytes = 64 << 10;
    s.update.zero = c->zero;
    s.model.recompute = layer_pattern_all(c->recompute);
    s.pipeline = (PipelineSpec){ .schedule = c->schedule, .group = c->rule == DOUBLE ? c->group : 0 };
    if (c->narrow) s.compute = BF16, s.fp32_vectors = true;
    return s;
}

/* ---- the plain loop ---- */

typedef struct {
    Case c;
    World world;
    Trainer t;
    char *version[UPDATES + 1]; /* all weights after so many updates of the step */
} Loop;

/* The pipeline stage of a parameter: four blocks in even shares, embedding first, norm and head last. */
static int stage_of(const Loop *l, const char *name)
{
    int layer;
    if (sscanf(name, "layers.%d.", &layer) == 1) return layer * l->c.pp / 4;
    return strstr(name, "embedding") ? 0 : l->c.pp - 1;
}

static int version_of(const Loop *l, int stage, int update)
{
    const int delay = l->c.rule == DOUBLE ? 1 : l->c.rule == VERTICAL ? l->c.pp - 1 : l->c.pp - 1 - stage;
    return update > delay ? update - delay : 0;
}

static void compose(Loop *l, int update)
{
    ParamStore *s = &l->t.stores[0];
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const char *from = l->version[version_of(l, stage_of(l, p->name), update)];
        const Tensor value = param_store_value(s, i, 0);
        memcpy(value.data, from + ((char *)value.data - (char *)s->value.data), (size_t)tensor_bytes(value));
    }
}

static void set_values(Loop *l, int step, int update)
{
    const TrainSpec *s = &l->t.spec;
    const double n = (double)(step * UPDATES + update + 1);
    const int64_t nominal = (int64_t)l->c.group * l->c.dp * TINY_SEQ;
    *l->t.step_values = (StepValues){ .step = step + 1,
                                      .nominal = nominal,
                                      .lr = (float)lr_at(&s->update.lr, step + 1),
                                      .correct1 = (float)(1 - m_pow(s->update.adamw.beta1, n)),
                                      .correct2 = (float)(1 - m_pow(s->update.adamw.beta2, n)),
                                      .loss_scale = 1 / (float)nominal,
                                      .unscale = 1 };
}

/* Forward and backward of every micro-batch of an update, over all data-parallel shares. */
static void gradient_of(Loop *l, int update)
{
    const int share = UPDATES * l->c.group;
    for (int d = 0; d < l->c.dp; d++)
        for (int g = 0; g < l->c.group; g++) {
            const int unit = d * share + update * l->c.group + g;
            Action list[] = { { .kind = ACT_F, .microbatch = unit, .count = 1, .in = -1, .out = -1 },
                              { .kind = ACT_B, .microbatch = unit, .count = 1, .in = -1, .out = -1 } };
            OK(executor_run(&l->t.executor, &(ActionList){ .action = list, .count = 2 }, true));
        }
}

static void one_update(Loop *l, int step, int update)
{
    Trainer *t = &l->t;
    ParamStore *s = &t->stores[0];
    const size_t bytes = (size_t)tensor_bytes(s->value);
    int64_t counted[3] = { 0, (int64_t)l->c.group * l->c.dp * TINY_SEQ, 0 };
    memcpy(l->version[update], s->value.data, bytes);
    set_values(l, step, update);
    param_store_begin(s);
    compose(l, update);
    gradient_of(l, update);
    memcpy(s->value.data, l->version[update], bytes);
    OK(optim_norm_local(&t->optim, tensor_of(counted, I64, 3)));
    CHECK(!t->step_values->skip);
    OK(optim_update(&t->optim, s));
    memcpy(t->stats.shift.data, t->stats.next_shift.data, (size_t)tensor_bytes(t->stats.shift));
}

/* The shift that a trainer of this kind starts with, on `dp` data-parallel ranks: a bit for each doubling of tokens. */
static int first_shift(const TrainSpec *s, int dp)
{
    TrainSpec one = *s;
    MemoryPlan plan;
    World world;
    Trainer t;
    one.global_batch /= dp;
    OK(world_open_self(&world));
    OK(trainer_plan(&one, world.grid, 0, &plan));
    OK(trainer_open(&t, &one, &world, &plan));
    const int shift = *(int32_t *)t.stats.shift.data + dp / 2;
    trainer_close(&t);
    world_close(&world);
    return shift;
}

static void run_loop(Loop *l, const TrainSpec *spec, double loss[STEPS])
{
    TrainSpec s = *spec;
    MemoryPlan plan;
    s.update.zero = false;
    s.pipeline = (PipelineSpec){ 0 };
    s.extra_shift = first_shift(spec, l->c.dp) - first_shift(&s, 1); /* fixed point is part of the bits */
    OK(world_open_self(&l->world));
    OK(trainer_plan(&s, l->world.grid, 0, &plan));
    OK(trainer_open(&l->t, &s, &l->world, &plan));
    for (int i = 0; i <= UPDATES; i++) l->version[i] = malloc((size_t)tensor_bytes(l->t.stores[0].value));
    l->t.serving.source = (TokenSource){ NULL, tiny_tokens };
    for (int step = 0; step < step_count(); step++) {
        int64_t *sums = l->t.executor.sums.data;
        l->t.serving.first_sample = step * s.global_batch;
        memset(sums, 0, 24);
        for (int u = 0; u < UPDATES; u++) one_update(l, step, u);
        loss[step] = (double)sums[0] * 0x1p-28 / (double)sums[1];
    }
}

static void close_loop(Loop *l)
{
    for (int i = 0; i <= UPDATES; i++) free(l->version[i]);
    trainer_close(&l->t);
    world_close(&l->world);
}

/* ---- the pipeline against it ---- */

static void compare(const Case *c)
{
    static int turn;
    if (step_count() == 1 && turn++ % 2) return;
    Loop l = { .c = *c };
    double loss[STEPS] = { 0 };
    const TrainSpec s = spec_of(c);
    TinyRun r = { .spec = s, .grid = { .tp = 1, .dp = c->dp, .pp = c->pp, .zero_group = c->zero_group },
                  .steps = step_count(), .keep_state = true };
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s pp %d: %s", c->schedule, c->pp, r.message);
    run_loop(&l, &s, loss);
    CHECK_MSG(!memcmp(loss, r.loss, sizeof loss), "%s pp %d dp %d: losses %.17g %.17g, want %.17g %.17g",
              c->schedule, c->pp, c->dp, r.loss[0], r.loss[1], loss[0], loss[1]);
    const ParamStore *store = &l.t.stores[0];
    const Tensor flat[3] = { store->master, store->m, store->v };
    for (int i = 0; i < 3; i++) {
        float *want = calloc((size_t)r.global_count, sizeof *want);
        tiny_scatter(&l.t, store, flat[i], want);
        CHECK_MSG(!memcmp(want, r.state[i], (size_t)r.global_count * sizeof *want), "%s pp %d dp %d: state %d",
                  c->schedule, c->pp, c->dp, i);
        free(want);
        free(r.state[i]);
    }
    close_loop(&l);
}

TEST(weight_stashing)
{
    for (int pp = 1; pp <= 4; pp *= 2) compare(&(Case){ "pipedream", STASH, .pp = pp, .dp = 1, .group = 1 });
    compare(&(Case){ "pipedream", STASH, .pp = 2, .dp = 2, .zero = 1, .group = 1, .recompute = RECOMPUTE_FULL });
    compare(&(Case){ "pipedream", STASH, .pp = 2, .dp = 2, .zero = 2, .group = 1 });
}

TEST(vertical_sync)
{
    for (int pp = 2; pp <= 4; pp *= 2)
        compare(&(Case){ "pipedream-vertical", VERTICAL, .pp = pp, .dp = 1, .group = 1 });
}

TEST(two_buffered_weights)
{
    compare(&(Case){ "2bw", DOUBLE, .pp = 1, .dp = 1, .group = 1 });
    compare(&(Case){ "2bw", DOUBLE, .pp = 2, .dp = 1, .group = 2 });
    compare(&(Case){ "2bw", DOUBLE, .pp = 4, .dp = 1, .group = 4, .recompute = RECOMPUTE_SELECTIVE });
    compare(&(Case){ "2bw", DOUBLE, .pp = 2, .dp = 2, .zero = 1, .group = 2 });
    compare(&(Case){ "2bw", DOUBLE, .pp = 2, .dp = 4, .zero = 2, .zero_group = 2, .group = 2 });
}

/* Versions of 16 bits and of the vectors in fp32 that lie behind them: what layers read, not what is updated. */
TEST(versions_in_16_bits)
{
    compare(&(Case){ "pipedream", STASH, .pp = 2, .dp = 1, .group = 1, .narrow = true });
    compare(&(Case){ "pipedream", STASH, .pp = 4, .dp = 1, .group = 1, .recompute = RECOMPUTE_FULL, .narrow = true });
    compare(&(Case){ "pipedream", STASH, .pp = 2, .dp = 2, .zero = 2, .group = 1, .narrow = true });
    compare(&(Case){ "pipedream-vertical", VERTICAL, .pp = 2, .dp = 1, .group = 1, .narrow = true });
    compare(&(Case){ "2bw", DOUBLE, .pp = 2, .dp = 2, .zero = 1, .group = 2, .narrow = true });
}

/* A delay changes the numbers: the rules are not one rule. */
TEST(rules_differ)
{
    static const Case cases[] = { { "pipedream", STASH, .pp = 4, .dp = 1, .group = 1 },
                                  { "pipedream-vertical", VERTICAL, .pp = 4, .dp = 1, .group = 1 },
                                  { "2bw", DOUBLE, .pp = 1, .dp = 1, .group = 1 } };
    uint64_t hash[3];
    for (int i = 0; i < 3; i++) {
        TinyRun r = { .spec = spec_of(&cases[i]), .grid = { .tp = 1, .dp = 1, .pp = cases[i].pp }, .steps = 1 };
        tiny_train(&r);
        CHECK_MSG(!r.err, "%s", r.message);
        hash[i] = r.hash;
    }
    CHECK(hash[0] != hash[1] && hash[1] != hash[2] && hash[0] != hash[2]);
}

static void refuse(TrainSpec s, const char *why)
{
    MemoryPlan plan;
    FAILS(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1, .pp = 2 }, 0, &plan), ERR_CONFIG, why);
}

TEST(what_needs_all_stages_is_refused)
{
    TrainSpec s = spec_of(&(Case){ "2bw", DOUBLE, .pp = 2, .dp = 1, .group = 2 });
    TrainSpec clipped = s, tied = s, masked = s, odd = s;
    clipped.update.clip = 1;
    refuse(clipped, "there is no norm of the whole gradient to clip by");
    tied.model.tied = true;
    refuse(tied, "one gradient of the table");
    masked.documents.mask = true;
    refuse(masked, "do not know how many tokens count");
    odd.pipeline.group = 5;
    refuse(odd, "updates after every 5 micro-batches, and a step has 24");
}

TEST_MAIN
