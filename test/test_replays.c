/*
 * Steps that are recorded and replayed (engine/replays.h) on ranks that are threads of a process, with graphs of the
 * CPU (cpu_graphs.h), between evaluations and while the batch grows: the bits of the same run without them. Every
 * completion of a communicator is late, so that what a replay does not wait for is read too early. In all layouts:
 * test_array; on the emulator, with CUDA's graphs: test_cuda_graphs.sh.
 */
#include "test.h"
#include "tiny.h"

#include "cpu_graphs.h"

/* Steps before those that tiny_train() does: two are listened to, or four, and one is recorded; an evaluation follows
 * steps 2 and 5. */
enum { BEFORE = 6, STEPS = 2, DELAY_MS = 1, BUCKET_BYTES = 64 << 10 };

typedef struct {
    const char *name;
    int dp, tp, pp, ep, zero, group, overlap, micro, slices;
    const char *schedule;
    bool pairs;
} Case;

typedef struct {
    bool graphs;
    int recorded; /* ranks that have replayed */
    pthread_mutex_t lock;
} Outcome;

static Err evaluate(Trainer *t)
{
    double loss;
    int64_t counted;
    return trainer_eval(t, tiny_source(t), 0, t->spec.global_batch, &loss, &counted);
}

static Err first_steps(Trainer *t, void *user)
{
    const Outcome *o = user;
    StepReport report;
    const bool grows = t->spec.ramp.count > 0; /* (plans are of the largest batch) */
    if (o->graphs) TRY(cpu_graphs_of_steps(t, NULL));
    for (int i = 0; i < (grows ? 2 * BEFORE : BEFORE); i++) {
        TRY(grows ? trainer_step(t, tiny_source(t), &report) : tiny_step(t, &report));
        if (i == 1 || i == 4) TRY(evaluate(t));
    }
    return ERR_OK;
}

static Err look(Trainer *t, void *user)
{
    Outcome *o = user;
    const DeviceCounters *c = &t->device.counters;
    const Replays *r = &t->executor.replays;
    pthread_mutex_lock(&o->lock);
    o->recorded += r->ready && c->graphs > 0 && c->graphs + c->graph_calls < c->graph_launches + c->graph_calls;
    pthread_mutex_unlock(&o->lock);
    return ERR_OK;
}

static TinyRun run_of(const Case *x, TrainSpec spec, Outcome *o)
{
    const int dp = x->dp ? x->dp : 1, tp = x->tp ? x->tp : 1;
    TinyRun r = { .spec = spec,
                  .grid = { .tp = tp, .dp = dp, .pp = x->pp, .ep = x->ep, .zero_group = x->group },
                  .steps = STEPS,
                  .delay_ms = DELAY_MS,
                  .before = first_steps,
                  .after = look,
                  .user = o };
    r.spec.micro_batch = x->micro ? x->micro : 2;
    r.spec.global_batch = 8;
    r.spec.pipeline = (PipelineSpec){ .schedule = x->schedule, .slices = x->slices };
    r.spec.update.zero = x->zero;
    r.spec.update.overlap_grad = r.spec.update.overlap_param = x->overlap;
    r.spec.update.bucket_bytes = BUCKET_BYTES;
    r.spec.overlap_moe = x->pairs;
    return r;
}

static void compare(const Case *cases, int count, TrainSpec spec)
{
    for (int i = 0; i < count; i++) {
        const Case *x = &cases[i];
        Outcome plain = { .graphs = false }, graphs = { .graphs = true };
        pthread_mutex_init(&plain.lock, NULL);
        pthread_mutex_init(&graphs.lock, NULL);
        TinyRun a = run_of(x, spec, &plain), b = run_of(x, spec, &graphs);
        a.delay_ms = 0;
        tiny_train(&a);
        CHECK_MSG(!a.err, "%s: %s", x->name, a.message);
        tiny_train(&b);
        CHECK_MSG(!b.err, "%s, with graphs: %s", x->name, b.message);
        CHECK_MSG(a.hash == b.hash, "%s: losses and weights are not those without graphs (%.9g, %.9g)", x->name,
                  a.loss[STEPS - 1], b.loss[STEPS - 1]);
        const int ranks = grid_size(a.grid);
        CHECK_MSG(!plain.recorded && graphs.recorded == ranks, "%s: %d of %d ranks replay", x->name, graphs.recorded,
                  ranks);
    }
}

#define COMPARE(cases, spec) compare(cases, (int)(sizeof(cases) / sizeof *(cases)), spec)

TEST(evaluations_between)
{
    static const Case dense[] = {
        { "zero 1, beside", .dp = 2, .zero = 1, .overlap = 1 },
        { "zero 3 in groups", .dp = 4, .zero = 3, .group = 2, .overlap = 1 },
        { "zb-h1", .pp = 2, .micro = 1, .schedule = "zb-h1" },
        { "slices in halves", .pp = 2, .slices = 2, .schedule = "seq1f1b+split" },
    };
    static const Case mixtures[] = {
        { "ep 2, zero 3", .dp = 2, .ep = 2, .zero = 3, .overlap = 1 },
        { "ep 2 in pairs", .dp = 2, .ep = 2, .pp = 2, .micro = 1, .schedule = "dualpipev", .pairs = true },
    };
    COMPARE(dense, tiny_gpt2());
    COMPARE(mixtures, tiny_mixture(TINY_MIXTRAL, 4));
}

/* Half of the batch for some steps; both sizes are recorded. */
TEST(a_batch_that_grows)
{
    static const Case cases[] = {
        { "tp 2, a batch that grows", .tp = 2, .micro = 1 },
        { "zero 1, a batch that grows", .dp = 2, .micro = 1, .zero = 1, .overlap = 1 },
        { "1f1b, a batch that grows", .pp = 2, .micro = 1, .schedule = "1f1b" },
    };
    TrainSpec s = tiny_gpt2();
    s.ramp = (BatchRamp){ .part = { { 4, BEFORE }, { 8, INT64_MAX } }, .count = 2 };
    COMPARE(cases, s);
}

TEST_MAIN
