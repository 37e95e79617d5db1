/*
 * Pipelines: the same model under every schedule, cut over thread ranks, gives the hash of one rank alone: losses,
 * weights and both moments, in global plain order. Each rank does, sends and keeps what was planned for it (tiny.h).
 *
 * test_pipeline [case]; MEGATRAIN_PIPELINES=all runs all combinations instead of a covering subset.
 */
#include <math.h>

#include "test.h"
#include "tiny.h"

typedef struct {
    const char *schedule, *layout;
    int pp, chunks, group;
    int tp, sp, dp, zero, overlap;
    Recompute recompute;
    int micro;
    GridOrder order;
} Layout;

enum { STEPS = 4, BUCKET_BYTES = 64 << 10 };


static TrainSpec model(bool llama, int layers)
{
    TrainSpec s = llama ? tiny_llama() : tiny_gpt2();
    s.model.layers = layers;
    s.global_batch = 16;
    s.bucket_bytes = BUCKET_BYTES;
    return s;
}

static int ones(int n) { return n ? n : 1; }

static TinyRun run_of(const TrainSpec *spec, const Layout *l)
{
    TinyRun r = { .spec = *spec,
                  .steps = STEPS,
                  .grid = { .tp = ones(l->tp), .dp = ones(l->dp), .pp = ones(l->pp), .sp = l->sp, .order = l->order } };
    r.spec.pipeline = (PipelineSpec){ .schedule = l->schedule, .layout = l->layout, .chunks = l->chunks, .group = l->group };
    r.spec.micro_batch = l->micro ? l->micro : 2;
    r.spec.zero = l->zero;
    r.spec.overlap_grad = r.spec.overlap_param = l->overlap;
    r.spec.model.recompute = l->recompute;
    if (l->schedule) OK(schedule_two_way(l->schedule, &r.grid.bidirectional));
    return r;
}

static uint64_t hash_of(const TrainSpec *spec, const Layout *l)
{
    TinyRun r = run_of(spec, l);
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s pp %d: %s", l->schedule ? l->schedule : "1f1b", l->pp, r.message);
    return r.hash;
}

static void check_layouts(const TrainSpec *spec, uint64_t want, const Layout *list, int count)
{
    for (int i = 0; i < count; i++) {
        const Layout *l = &list[i];
        const uint64_t h = hash_of(spec, l);
        CHECK_MSG(h == want, "%s layout '%s' pp %d x %d, tp %d sp %d dp %d zero %d overlap %d recompute %d micro %d",
                  l->schedule ? l->schedule : "1f1b", l->layout ? l->layout : "", l->pp, l->chunks, l->tp, l->sp,
                  l->dp, l->zero, l->overlap, l->recompute, l->micro);
    }
}

#define CHECK_LIST(spec, want, list) check_layouts(&(spec), (want), (list), (int)(sizeof(list) / sizeof *(list)))

/* Every synchronous schedule on 2 and 4 ranks, tied embeddings with dropout and untied ones. */
static void check_schedules(bool llama, int pp)
{
    const TrainSpec s = model(llama, 8);
    const Layout alone = { .pp = 1 };
    const uint64_t want = hash_of(&s, &alone);
    for (int i = 0; schedule_name(i); i++) {
        Layout l = { .schedule = schedule_name(i), .pp = pp };
        const ScheduleSpec shape = { .name = l.schedule, .ranks = pp, .microbatches = 8 };
        Schedule made = { 0 };
        if (schedule_make(&shape, &made) == ERR_OK && made.versions == VERSIONS_STEP && made.stages <= 8)
            check_layouts(&s, want, &l, 1);
        schedule_free(&made);
    }
}

TEST(gpt2_every_schedule_on_two_ranks) { check_schedules(false, 2); }
TEST(gpt2_every_schedule_on_four_ranks) { check_schedules(false, 4); }
TEST(llama_every_schedule_on_two_ranks) { check_schedules(true, 2); }
TEST(llama_every_schedule_on_four_ranks) { check_schedules(true, 4); }

/* Pipelines beside everything else that cuts a model. */
TEST(mixed_layouts)
{
    static const Layout list[] = {
        { "1f1b", .pp = 2, .dp = 2 },
        { "1f1b", .pp = 2, .dp = 2, .zero = 1, .overlap = 1 },
        { "1f1b", .pp = 2, .dp = 2, .zero = 1, .order = ORDER_PP_DP },
        { "1f1b", .pp = 2, .tp = 2 },
        { "1f1b", .pp = 2, .tp = 2, .sp = 1, .recompute = RECOMPUTE_SELECTIVE },
        { "1f1b", .pp = 2, .tp = 2, .sp = 1, .dp = 2, .zero = 1, .overlap = 1 },
        { "1f1b", .pp = 4, .micro = 1, .recompute = RECOMPUTE_FULL },
        { "gpipe", .pp = 2, .micro = 4 },
        { "interleaved", .pp = 2, .chunks = 2, .dp = 2, .zero = 1, .overlap = 1 },
        { "interleaved+split", .pp = 2, .chunks = 4, .micro = 1, .recompute = RECOMPUTE_SELECTIVE },
        { "zb-h1", .pp = 2, .tp = 2, .sp = 1, .dp = 2, .zero = 1 },
        { "zb-h1", .pp = 4, .recompute = RECOMPUTE_FULL },
        { "zb-v", .pp = 2, .dp = 2, .zero = 1, .overlap = 1 },
        { "zb-v", .pp = 2, .tp = 2, .micro = 1, .recompute = RECOMPUTE_SELECTIVE },
        { "v-half", .pp = 4, .micro = 1 },
        { "dualpipev", .pp = 2, .tp = 2, .sp = 1 },
        { "hanayo", .pp = 2, .dp = 2, .overlap = 1 },
        { "bfs", .pp = 2, .dp = 2, .zero = 1 },
        { "chimera", .pp = 2, .dp = 2 },
        { "chimera", .pp = 2, .dp = 2, .zero = 1, .overlap = 1 },
        { "chimera", .pp = 4, .zero = 1, .overlap = 1 },
        { "chimera", .pp = 2, .tp = 2, .sp = 1, .dp = 2, .zero = 1, .order = ORDER_PP_DP },
        { "chimera-bhalf", .pp = 2, .tp = 2, .zero = 1 },
        { "dualpipe", .pp = 4, .zero = 1, .recompute = RECOMPUTE_SELECTIVE },
        { "gems", .pp = 2, .dp = 2, .overlap = 1 },
    };
    for (int llama = 0; llama < 2; llama++) {
        const TrainSpec s = model(llama, 8);
        const Layout alone = { .pp = 1 };
        CHECK_LIST(s, hash_of(&s, &alone), list);
    }
}

/* Uneven shares, an embedding and a head on stages of their own, a stage with nothing. */
TEST(layouts_by_hand)
{
    static const Layout list[] = {
        { "1f1b", "Ett|tL", .pp = 2 },          { "1f1b", "E|ttt|L", .pp = 3 },
        { "1f1b", "E|t|tt||L", .pp = 5 },       { "interleaved", "E|t|tt|L", .pp = 2, .chunks = 2 },
        { "zb-v", "E|t|tt|L", .pp = 2 },        { "chimera", "Et|ttL", .pp = 2, .zero = 1 },
        { "1f1b", "Et|(t)*2,|L", .pp = 3 },     { "1f1b", "E,t*3,|L", .pp = 2, .recompute = RECOMPUTE_FULL },
    };
    for (int llama = 0; llama < 2; llama++) {
        const TrainSpec s = model(llama, 3);
        const Layout alone = { .pp = 1 };
        CHECK_LIST(s, hash_of(&s, &alone), list);
    }
}

/* Documents apart, their ends without loss; and fewer micro-batches than stages. */
TEST(documents_and_short_steps)
{
    static const Layout list[] = { { "1f1b", .pp = 4 }, { "1f1b", .pp = 2, .micro = 16 }, { "gpipe", .pp = 4, .micro = 16 } };
    const TrainSpec s = tiny_apart(model(true, 4));
    const Layout alone = { .pp = 1 };
    CHECK_LIST(s, hash_of(&s, &alone), list);
}

/* One rank runs any schedule. */
TEST(one_rank)
{
    static const Layout list[] = { { "gpipe", .pp = 1 },
                                   { "1f1b+split", .pp = 1 },
                                   { "interleaved", .pp = 1, .chunks = 2 },
                                   { "zb-h1", .pp = 1 },
                                   { "zb-v", .pp = 1 } };
    const TrainSpec s = model(false, 4);
    const Layout alone = { .pp = 1 };
    CHECK_LIST(s, hash_of(&s, &alone), list);
}

/* By the check that needs no ranks and by the plan of one, in the same words. */
static void refuse(const Layout *l, const char *why, const char *hint)
{
    const TrainSpec s = model(false, 4);
    MemoryPlan plan;
    const TinyRun r = run_of(&s, l);
    FAILS(trainer_check(&r.spec, r.grid), ERR_CONFIG, why);
    CHECK_MSG(strstr(err_hint_text(), hint), "%s: '%s'", why, err_hint_text());
    FAILS(trainer_plan(&r.spec, r.grid, 0, &plan), ERR_CONFIG, why);
    CHECK_MSG(strstr(err_hint_text(), hint), "%s: '%s'", why, err_hint_text());
}

TEST(what_does_not_fit)
{
    static const char parts[] = "of each stage E (embedding), t (a block) and L (head)";
    static const struct {
        Layout layout;
        const char *why, *hint;
    } cases[] = {
        { { "1f1b", .pp = 8 }, "'4' blocks cannot be shared by '8' pipeline stages", "of at most 4" },
        { { "1f1b", .pp = 2, .chunks = 2 }, "has 1 chunk a rank, not 2", "" },
        { { "chimera", .pp = 3 }, "an even number of ranks", "4 ranks, 8 micro-batches" },
        { { "chimera-bhalf", .pp = 2, .micro = 1 }, "cuts a micro-batch into 2", "train.micro_batch=2" },
        { { "dualpipev", .pp = 2, .micro = 8 }, "at least twice as many micro-batches", "2 ranks, 4 micro-batches" },
        { { "interleaved", .pp = 2, .group = 1 }, "needs groups of at least as many", "groups of 2" },
        { { "zb-v", .pp = 2, .group = 2 * 2 }, "'zb-v' has no groups", "parallel.group=0" },
        { { "interleaved", .pp = 1, .chunks = 65 }, "would hold 65 stages; at most 64", "" },
        { { "1f1b", "Et|tL", .pp = 2 }, "has '2' blocks, the model '4'", "a 't' for each" },
        { { "1f1b", "Ett|ttL", .pp = 1, .chunks = 1 }, "has '2' stages, the pipeline '1'", "parallel.pp x parallel.vpp" },
        { { "1f1b", "Et|t|tt|L", .pp = 3 }, "no multiple of the '3' pipeline ranks", "parallel.pp=2 and 4" },
        { { "1f1b", "Ett|ttL", .pp = 3 }, "no multiple of the '3' pipeline ranks", "parallel.pp=2;" },
        { { "zb-v", "Ett|ttL", .pp = 2 }, "2 stages for 2 ranks: schedule 'zb-v' has 2 chunks a rank, not 1", "" },
        { { "1f1b", "tE|tttL", .pp = 2 }, "'E' must come first, at character 1", parts },
        { { "1f1b", "Ett|ttLt", .pp = 2 }, "'L' must come last", parts },
        { { "1f1b", "E(tt|tt|L", .pp = 2 }, "')' is missing", parts },
        { { "1f1b", "E()*9tt|ttL", .pp = 2 }, "a group of nothing", parts },
        { { "1f1b", "Ett|tt", .pp = 2 }, "one 'E' and one 'L'", parts },
        { { "1f1b", "Etx", .pp = 2 }, "not a part of a layout", parts },
        { { "1f1b", "E(((((((((t)))))))))L", .pp = 1 }, "groups too deep", parts },
        { { "1f1b", "E(t*60000)*60000L", .pp = 1 }, "too many blocks", parts },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refuse(&cases[i].layout, cases[i].why, cases[i].hint);
}

TEST_MAIN
