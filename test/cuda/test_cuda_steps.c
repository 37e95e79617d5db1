/*
 * Steps enqueued while the device works on the one before (trainer_start) against steps that are waited for: the same
 * reports and weights, also where a step is skipped or done again; and what the host waits for meanwhile.
 */
#include <string.h>

#include "engine/trainer.h"
#include "test.h"
#include "tiny.h"

enum { STEPS = 5, SPOILT = 3 /* the step that something happens to */ };

typedef enum { SPOIL_NOTHING, SPOIL_LOSS, SPOIL_SHIFT, SPOILS } Spoil;

typedef struct {
    Trainer t;
    World world;
    ExecutorHooks real;
    Spoil spoil;
    int norms; /* so far */
    StepReport report[STEPS];
    uint64_t weights;
} Run;

/* Acts as if a loss were not finite, or, once, a gradient had not fitted its shift. */
static Err spoiling_norm(void *user)
{
    Run *r = user;
    Trainer *t = &r->t;
    const int64_t one = 1;
    if (++r->norms == SPOILT && r->spoil == SPOIL_LOSS)
        TRY(device_write(&t->device.stream, (int64_t *)t->executor.sums.data + 2, &one, sizeof one));
    if (r->norms == SPOILT && r->spoil == SPOIL_SHIFT)
        TRY(device_write(&t->device.stream, t->stats.overflow.data, &one, sizeof(int32_t)));
    return r->real.norm(r->real.user);
}

static const ExecutorHooks *real(void *user) { return &((Run *)user)->real; }

static Err real_batch(void *user, int unit, Batch *b) { return real(user)->batch(real(user)->user, unit, b); }
static Err real_tied(void *user) { return real(user)->tied(real(user)->user); }
static Err real_reduce(void *user, int replica) { return real(user)->reduce(real(user)->user, replica); }
static Err real_update(void *user, int replica) { return real(user)->update(real(user)->user, replica); }

static TrainSpec spec_of(DType compute, bool graphs)
{
    TrainSpec s = tiny_gpt2();
    s.exact = false;
    s.model.layers = 1; /* (the emulator is slow) */
    s.global_batch = 2 * (s.micro_batch = 1);
    s.device.kind = DEVICE_CUDA;
    s.compute = compute;
    s.graphs = graphs;
    return s;
}

static Err run_open_as(Run *r, TrainSpec s, Spoil spoil)
{
    MemoryPlan plan;
    *r = (Run){ .spoil = spoil };
    TRY(world_open_self(&r->world));
    TRY(trainer_plan(&s, r->world.grid, 0, &plan));
    TRY(trainer_open(&r->t, &s, &r->world, &plan));
    r->real = r->t.executor.hooks;
    if (spoil)
        r->t.executor.hooks = (ExecutorHooks){ r, real_batch, real_tied, real_reduce, spoiling_norm, real_update };
    return ERR_OK;
}

static Err run_open(Run *r, DType compute, bool graphs, Spoil spoil)
{
    return run_open_as(r, spec_of(compute, graphs), spoil);
}

/* Hashes the weights. */
static Err run_close(Run *r)
{
    const Tensor w = r->t.stores[0].master;
    char *bytes = malloc((size_t)tensor_bytes(w));
    Err err = device_read(&r->t.device.stream, bytes, w.data, tensor_bytes(w));
    r->weights = tiny_hash(7, bytes, (size_t)tensor_bytes(w));
    free(bytes);
    trainer_close(&r->t);
    world_close(&r->world);
    return err;
}

static Err waited(Run *r)
{
    for (int i = 0; i < STEPS; i++) TRY(trainer_step(&r->t, tiny_source(&r->t), &r->report[i]));
    return run_close(r);
}

/* waits: the most of a call of trainer_start with a step in flight, from the third on (graphs being made by then). */
static Err ahead(Run *r, int64_t *waits)
{
    StepReport before;
    *waits = 0;
    for (int i = 0; i < STEPS; i++) {
        const int64_t so_far = r->t.device.counters.host_waits;
        TRY(trainer_start(&r->t, tiny_source(&r->t), &before));
        const int64_t n = r->t.device.counters.host_waits - so_far;
        if (i >= 2 && n > *waits) *waits = n;
        CHECK_MSG(before.step == i, "step %d has a report of %lld", i + 1, (long long)before.step);
        CHECK(r->t.progress.step == i && trainer_next_step(&r->t) == i + 2);
        if (i) r->report[i - 1] = before;
    }
    TRY(trainer_finish(&r->t, &r->report[STEPS - 1]));
    CHECK(r->t.progress.step == STEPS && r->t.progress.samples == trainer_next_sample(&r->t));
    return run_close(r);
}

static void compare(const Run *a, const Run *b, const char *what)
{
    CHECK_MSG(a->weights == b->weights, "%s: weights", what);
    for (int i = 0; i < STEPS; i++) {
        const StepReport *x = &a->report[i], *y = &b->report[i];
        CHECK_MSG(x->step == i + 1 && y->step == i + 1, "%s, step %d: %lld", what, i + 1, (long long)y->step);
        CHECK_MSG(!memcmp(&x->loss, &y->loss, sizeof x->loss) && x->counted == y->counted && x->counted > 0,
                  "%s, step %d: loss %.17g, %.17g", what, i + 1, x->loss, y->loss);
        CHECK_MSG(x->skipped || x->grad_norm == y->grad_norm, "%s, step %d: %g, %g", what, i + 1, (double)x->grad_norm,
                  (double)y->grad_norm);
        CHECK_MSG(x->lr == y->lr && x->samples == y->samples, "%s, step %d: lr %g, %g", what, i + 1, (double)x->lr,
                  (double)y->lr);
        CHECK_MSG(x->skipped == y->skipped && x->redone == y->redone, "%s, step %d", what, i + 1);
        CHECK(x->skipped == (a->spoil == SPOIL_LOSS && i + 1 == SPOILT));
        CHECK(x->redone == (a->spoil == SPOIL_SHIFT && i + 1 == SPOILT));
    }
}

/* Each step waits for the one before it, and for nothing else. */
TEST(a_step_waits_for_the_one_before)
{
    for (int graphs = 0; graphs < 2; graphs++) {
        static Run a, b;
        int64_t waits;
        OK(run_open(&a, BF16, graphs, SPOIL_NOTHING));
        CHECK(trainer_runs_ahead(&a.t));
        OK(waited(&a));
        OK(run_open(&b, BF16, graphs, SPOIL_NOTHING));
        OK(ahead(&b, &waits));
        CHECK_MSG(waits == 1, "%lld waits", (long long)waits);
        compare(&a, &b, graphs ? "graphs" : "no graphs");
    }
}

TEST(a_step_that_was_not_as_expected)
{
    for (Spoil spoil = SPOIL_LOSS; spoil < SPOILS; spoil++) {
        static Run a, b;
        int64_t waits;
        OK(run_open(&a, F32, false, spoil));
        OK(waited(&a));
        OK(run_open(&b, F32, false, spoil));
        OK(ahead(&b, &waits));
        compare(&a, &b, spoil == SPOIL_LOSS ? "skipped" : "done again");
    }
}

/* A scale that the outcome of every step may change: nothing is enqueued ahead. */
TEST(fp16_waits)
{
    static Run a;
    OK(run_open(&a, F16, false, SPOIL_NOTHING));
    CHECK(!trainer_runs_ahead(&a.t));
    OK(run_close(&a));
}

/* Saves that wait in the host's memory are those that stayed on the device: of all layers or some, of layers that keep
 * their inputs alone, beside a host that is a step ahead, where a step is done again. */
TEST(offloaded_saves_come_back)
{
    static const struct {
        Recompute recompute;
        Spoil spoil;
        int offload;
    } ways[] = { { RECOMPUTE_NONE, SPOIL_SHIFT, 3 }, { RECOMPUTE_FULL, SPOIL_NOTHING, 2 } };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        TrainSpec s = spec_of(BF16, false);
        Run kept, away;
        int64_t waits;
        s.model.layers = 3;
        s.model.recompute = layer_pattern_all(ways[i].recompute);
        OK(run_open_as(&kept, s, ways[i].spoil));
        OK(waited(&kept));
        s.model.offload = ways[i].offload;
        OK(run_open_as(&away, s, ways[i].spoil));
        CHECK(away.t.plan.offload_host > 0);
        OK(ahead(&away, &waits));
        compare(&kept, &away, "offloaded");
    }
}

TEST_MAIN
