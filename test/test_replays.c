/*
 * Steps that are recorded and replayed (engine/replays.h) on ranks that are threads of a process, with graphs of the
 * CPU (cpu_graphs.h): every layout, schedule and kind of mixture gives the bits of the same run without them. An
 * evaluation comes between steps, and every completion of a communicator is late, so that what a replay does not wait
 * for is read too early. The same on the emulator, with CUDA's graphs: test_cuda_graphs.sh.
 */
#include "test.h"
#include "tiny.h"

#include "cpu_graphs.h"

/* Steps before those that tiny_train() does: two are listened to, or four, and one is recorded; an evaluation follows
 * steps 2 and 5. */
enum { BEFORE = 6, STEPS = 2, DELAY_MS = 1, BUCKET_BYTES = 64 << 10 };

typedef struct {
    const char *name;
    int dp, tp, pp, cp, ep, etp, sp;
    int zero, group, overlap, bands, micro, slices, chunks, hosts;
    const char *schedule;
    ContextComm context;
    DispatcherKind dispatcher;
    bool pairs, muon, global, full;
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
                  .grid = { .tp = tp, .dp = dp, .pp = x->pp, .cp = x->cp, .sp = x->sp, .ep = x->ep, .etp = x->etp,
                            .ep_hosts = x->hosts, .zero_group = x->group },
                  .steps = STEPS,
                  .delay_ms = DELAY_MS,
                  .before = first_steps,
                  .after = look,
                  .user = o };
    if (x->schedule) OK(schedule_two_way(x->schedule, &r.grid.bidirectional));
    r.spec.micro_batch = x->micro ? x->micro : 2;
    r.spec.global_batch = 8;
    r.spec.pipeline = (PipelineSpec){ x->schedule, NULL, x->chunks, 0, x->slices };
    r.spec.update.zero = x->zero;
    r.spec.update.overlap_grad = r.spec.update.overlap_param = x->overlap;
    r.spec.update.bucket_bytes = BUCKET_BYTES;
    r.spec.overlap_tp = x->bands ? x->bands : 1;
    r.spec.overlap_moe = x->pairs;
    r.spec.model.context = layer_pattern_all((int32_t)x->context);
    if (x->full) r.spec.model.recompute = layer_pattern_all(RECOMPUTE_FULL);
    if (r.spec.model.moe.experts) {
        r.spec.model.moe.dispatcher = x->dispatcher;
        if (x->global) r.spec.model.moe.balance.global = true;
    }
    return r;
}

static void compare(const Case *cases, int count, TrainSpec spec)
{
    static int turn;
    for (int i = 0; i < count; i++) {
        const Case *x = &cases[i];
        if (brief() && turn++ % 3) continue; /* under a sanitizer */
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

TEST(dense_layouts)
{
    static const Case cases[] = {
        { "one rank" },
        { "tp 2", .tp = 2 },
        { "tp 2, rows sharded, recomputed", .tp = 2, .sp = 1, .full = true },
        { "tp 4 in bands", .tp = 4, .sp = 1, .bands = 2 },
        { "dp 2", .dp = 2 },
        { "dp 2, beside", .dp = 2, .overlap = 1 },
        { "zero 1", .dp = 2, .zero = 1 },
        { "zero 1, beside", .dp = 2, .zero = 1, .overlap = 1 },
        { "zero 2, beside", .dp = 2, .zero = 2, .overlap = 1 },
        { "zero 3, beside", .dp = 2, .zero = 3, .overlap = 1 },
        { "zero 3 in groups", .dp = 4, .zero = 3, .group = 2, .overlap = 1 },
        { "zero 1 in groups", .dp = 4, .zero = 1, .group = 2, .overlap = 1 },
        { "tp 2 x dp 2", .dp = 2, .tp = 2, .sp = 1, .zero = 1, .overlap = 1 },
        { "ring", .cp = 2, .context = CONTEXT_RING },
        { "gathered keys", .cp = 2, .context = CONTEXT_ALLGATHER },
        { "keys for heads", .cp = 2, .context = CONTEXT_A2A },
    };
    COMPARE(cases, tiny_gpt2());
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

TEST(pipelines)
{
    static const Case cases[] = {
        { "gpipe", .pp = 2, .schedule = "gpipe" },
        { "1f1b", .pp = 2, .schedule = "1f1b" },
        { "1f1b, zero 3", .pp = 2, .dp = 2, .zero = 3, .overlap = 1, .schedule = "1f1b" },
        { "interleaved", .pp = 2, .chunks = 2, .micro = 1, .schedule = "interleaved" },
        { "zb-h1", .pp = 2, .micro = 1, .schedule = "zb-h1" },
        { "zb-h1 x tp 2", .pp = 2, .tp = 2, .sp = 1, .micro = 1, .schedule = "zb-h1" },
        { "dualpipev", .pp = 2, .micro = 1, .schedule = "dualpipev" },
        { "chimera", .pp = 2, .micro = 1, .schedule = "chimera" },
        { "slices", .pp = 2, .slices = 2, .schedule = "seq1f1b" },
        { "slices in halves", .pp = 2, .slices = 2, .schedule = "seq1f1b+split" },
    };
    TrainSpec s = tiny_llama();
    s.model.layers = 4;
    COMPARE(cases, s);
}

TEST(mixtures)
{
    static const Case cases[] = {
        { "one rank" },
        { "ep 2", .dp = 2, .ep = 2, .zero = 1, .overlap = 1 },
        { "ep 2, gathered", .dp = 2, .ep = 2, .dispatcher = DISPATCH_ALLGATHER },
        { "ep 2, by hosts", .dp = 2, .ep = 2, .dispatcher = DISPATCH_NODE, .hosts = 2 },
        { "ep 2 x etp 2", .dp = 2, .tp = 2, .sp = 1, .ep = 2, .etp = 2 },
        { "ep 2, zero 3", .dp = 2, .ep = 2, .zero = 3, .overlap = 1 },
        { "ep 2 in pairs", .dp = 2, .ep = 2, .pp = 2, .micro = 1, .schedule = "dualpipev", .pairs = true },
        { "counted over the batch", .tp = 2, .sp = 1, .global = true },
    };
    TrainSpec s = tiny_mixture(TINY_MIXTRAL, 4);
    COMPARE(cases, s);
}

TEST_MAIN
