/*
 * The calls of all ranks never wait for each other (call_order.h): found where they would, in logs by hand and in one
 * of a real layout that is put out of order; and shown for layouts of every schedule beside all that cuts a model.
 * Every layout that other tests train (tiny.h) is looked at, too.
 */
#include "call_order.h"

#include "test.h"
#include "tiny.h"

/* ---- by hand ---- */

enum { RANKS = 4 };

/* Two groups of all ranks: world and host. */
static const GridShape two_ranks = { .world = 2, .tp = 2, .cp = 1, .pp = 1, .ep = 1, .etp = 2 };
static const GridShape four_ranks = { .world = 4, .tp = 2, .cp = 1, .pp = 1, .ep = 1, .etp = 2 };

static int call(CallLog *log, GroupKind group, CommKind kind, int64_t count)
{
    uint64_t before = 0;
    for (int i = 0; i < log->count; i++) before += log->entries[i].waits_for < 0 && log->entries[i].group == group;
    call_log_add(log, (LogEntry){ .group = group, .waits_for = -1, .call = { before, count, 4, kind, 0 } });
    return log->count - 1;
}

static void wait_for(CallLog *log, int call) { call_log_add(log, (LogEntry){ .waits_for = call }); }

static void call_and_wait(CallLog *log, GroupKind group) { wait_for(log, call(log, group, COMM_SUM_I64, 8)); }

static int message(CallLog *log, GroupKind group, bool send, int peer, int64_t bytes)
{
    LogEntry e = { .group = group, .waits_for = -1, .call = { .kind = COMM_EXCHANGE }, .message_count = 1 };
    e.messages[0] = (CommMessage){ .send = send, .peer = peer, .bytes = bytes };
    call_log_add(log, e);
    return log->count - 1;
}

/* What the play says: "" if all comes to an end. */
static const char *verdict_of(GridShape shape, CallLog *logs, CallQueues queues)
{
    static char text[512];
    const Err err = call_order_check(shape, logs, queues);
    snprintf(text, sizeof text, "%s", err ? err_message() : "");
    CHECK(!err || err == ERR_INTERNAL);
    return text;
}

static const char *verdict(GridShape shape, CallLog *logs)
{
    const char *text = verdict_of(shape, logs, GROUPS_BESIDE);
    call_logs_free(logs, shape.world);
    return text;
}

#define CHECK_SAYS(shape, logs, words)                                              \
    do {                                                                            \
        const char *says = verdict(shape, logs);                                    \
        CHECK_MSG(*(words) ? strstr(says, words) != NULL : !*says, "'%s'", says);   \
    } while (0)

TEST(one_order)
{
    CallLog logs[RANKS] = { { 0 } };
    for (int r = 0; r < 2; r++) call_and_wait(&logs[r], GROUP_WORLD), call_and_wait(&logs[r], GROUP_HOST);
    CHECK_SAYS(two_ranks, logs, "");
}

TEST(two_groups_in_another_order)
{
    CallLog logs[RANKS] = { { 0 } };
    call_and_wait(&logs[0], GROUP_WORLD), call_and_wait(&logs[0], GROUP_HOST);
    call_and_wait(&logs[1], GROUP_HOST), call_and_wait(&logs[1], GROUP_WORLD);
    CHECK_SAYS(two_ranks, logs, "rank 0, entry 1: waits for sum-i64 of 8 x 4 bytes (call 0) in world");
}

/* Groups run beside each other: nobody waits before both are enqueued. In one queue the first holds up the second. */
TEST(another_order_that_nobody_waits_in)
{
    CallLog logs[RANKS] = { { 0 } };
    for (int r = 0; r < 2; r++) {
        const int first = call(&logs[r], r ? GROUP_HOST : GROUP_WORLD, COMM_SUM_I64, 8);
        call_and_wait(&logs[r], r ? GROUP_WORLD : GROUP_HOST);
        wait_for(&logs[r], first);
    }
    const char *shared = verdict_of(two_ranks, logs, ONE_QUEUE);
    CHECK_MSG(strstr(shared, "rank 0, entry 1: has enqueued sum-i64 of 8 x 4 bytes (call 0) in world"), "'%s'", shared);
    CHECK_SAYS(two_ranks, logs, "");
}

/* A call waits for those before it in its group: here for one that the other rank has not come to. */
TEST(a_queue_holds_up)
{
    CallLog logs[RANKS] = { { 0 } };
    call(&logs[0], GROUP_WORLD, COMM_SUM_I64, 8);
    call_and_wait(&logs[0], GROUP_WORLD);
    call_and_wait(&logs[0], GROUP_HOST);
    call(&logs[1], GROUP_WORLD, COMM_SUM_I64, 8);
    call_and_wait(&logs[1], GROUP_HOST);
    call_and_wait(&logs[1], GROUP_WORLD);
    CHECK_SAYS(two_ranks, logs, "rank 0, entry 2: waits for sum-i64 of 8 x 4 bytes (call 1) in world");
}

TEST(different_calls)
{
    CallLog logs[RANKS] = { { 0 } };
    for (int r = 0; r < 2; r++) call(&logs[r], GROUP_TP, COMM_SUM_I64, 8 + r);
    CHECK_SAYS(two_ranks, logs, "tp: ranks issued different calls");
}

TEST(a_call_too_few)
{
    CallLog logs[RANKS] = { { 0 } };
    for (int r = 0; r < 3; r++) call(&logs[r], GROUP_WORLD, COMM_SUM_I64, 8);
    CHECK_SAYS(four_ranks, logs, "rank 0, entry 1: has enqueued sum-i64");
}

/* Three groups of two in a ring, each rank in another one first. */
TEST(a_ring)
{
    static const int first[RANKS] = { GROUP_TP, GROUP_DP, GROUP_DP, GROUP_TP }; /* (0 1) (2 3), (0 2) (1 3) */
    CallLog logs[RANKS] = { { 0 } };
    for (int r = 0; r < 4; r++)
        call_and_wait(&logs[r], first[r]), call_and_wait(&logs[r], GROUP_TP + GROUP_DP - first[r]);
    CHECK_SAYS(four_ranks, logs, "never ends");
}

TEST(a_message_before_a_sum)
{
    for (int wrong = 0; wrong < 2; wrong++) {
        CallLog logs[RANKS] = { { 0 } };
        wait_for(&logs[0], message(&logs[0], GROUP_TP, true, 1, 64));
        call_and_wait(&logs[0], GROUP_WORLD);
        if (wrong) call_and_wait(&logs[1], GROUP_WORLD);
        wait_for(&logs[1], message(&logs[1], GROUP_TP, false, 0, 64));
        if (!wrong) call_and_wait(&logs[1], GROUP_WORLD);
        CHECK_SAYS(two_ranks, logs, wrong ? "rank 0, entry 1: waits for exchange" : "");
    }
}

TEST(messages_that_differ)
{
    CallLog logs[RANKS] = { { 0 } };
    message(&logs[0], GROUP_TP, true, 1, 64);
    message(&logs[1], GROUP_TP, false, 0, 32);
    CHECK_SAYS(two_ranks, logs, "sent as message of 64 bytes, received as message of 32");
}

/* ---- layouts ---- */

typedef struct {
    int tp, sp, cp, dp, ep, etp;
    ContextComm context;
} Plane;

static const Plane planes[] = {
    { 1, 0, 1, 1 },       { 2, 1, 1, 1 },       { 2, 0, 1, 1, 1, 2 }, { 1, 0, 1, 2, 2 },
    { 2, 1, 1, 2, 2, 2 }, { 1, 0, 2, 1, 1, 2, CONTEXT_RING },         { 1, 0, 2, 2, 2, 1, CONTEXT_A2A },
    { 1, 0, 4, 1, 4, 1, CONTEXT_HIERARCHICAL },                       { 4, 1, 1, 1, 2, 2 },
};

enum { PLANES = sizeof planes / sizeof *planes, MODELS = 5 };

static TrainSpec model_of(int kind, int layers)
{
    TrainSpec s = kind == 0   ? tiny_gpt2()
                  : kind == 1 ? tiny_llama()
                  : kind == 2 ? tiny_further(tiny_mixture(TINY_DEEPSEEK, layers), 1)
                  : kind == 3 ? tiny_latent(tiny_gpt2(), 12)
                              : tiny_gptoss(layers);
    s.model.layers = layers;
    s.update.bucket_bytes = 64 << 10;
    return s;
}

/* Number `turn` of all: schedule, ranks, precision, ZeRO, overlap, bands, plane and model. */
static void layout_of(const char *schedule, int pp, int turn, TrainSpec *s, Grid *g)
{
    const Plane *p = &planes[turn % PLANES];
    *s = model_of(turn % MODELS, 2 * pp);
    s->exact = turn % 3 == 0;
    s->compute = turn % 3 == 2 ? BF16 : F32;
    s->update.zero = turn % 4;
    s->update.overlap_grad = turn / 2 % 2, s->update.overlap_param = turn / 4 % 2;
    s->overlap_moe = turn % 2;
    s->overlap_tp = p->tp > 1 && turn / 3 % 2 ? p->tp : 1;
    s->model.recompute = layer_pattern_all(turn / 3 % 3);
    s->model.tied = turn / 5 % 2;
    s->model.context = layer_pattern_all((int32_t)p->context);
    s->pipeline = (PipelineSpec){ .schedule = schedule };
    *g = (Grid){ .tp = p->tp, .sp = p->sp, .cp = p->cp, .dp = p->dp, .pp = pp,
                 .cp_heads = p->context == CONTEXT_HIERARCHICAL ? 2 : 0,
                 .order = turn % 7 > 3 ? ORDER_PP_DP : ORDER_DP_PP };
    if (s->model.moe.experts) g->ep = p->ep ? p->ep : 1, g->etp = p->etp;
    g->kv = p->tp > s->model.kv_heads ? p->tp / s->model.kv_heads : 1;
    s->global_batch = 2 * s->micro_batch * pp * p->dp;
}

/* One rank of a real layout gathers its first weights, two buckets a stage, in the other order of its stages. */
TEST(a_layout_out_of_order)
{
    TrainSpec s = model_of(1, 4);
    Grid g = { .tp = 1, .dp = 1, .pp = 2, .bidirectional = true };
    s.exact = false, s.compute = BF16, s.update.zero = true, s.update.bucket_bytes = 0;
    s.pipeline.schedule = "chimera";
    OK(trainer_grid(&s, &g));
    for (int wrong = 0; wrong < 2; wrong++) {
        CallLog logs[RANKS] = { { 0 } };
        for (int r = 0; r < 2; r++) OK(call_log_record(&s, g, r, &logs[r]));
        LogEntry *e = logs[1].entries;
        for (int i = 0; i < 8; i += 2)
            CHECK(e[i].group == (i < 4 ? GROUP_STAGE_LOW : GROUP_STAGE_HIGH) && e[i + 1].waits_for == i);
        for (int i = 0; i < 8 && wrong; i += 2) {
            const LogEntry low = e[i];
            if (i < 4) e[i] = e[i + 4], e[i + 4] = low;
        }
        CHECK_SAYS(grid_shape(g), logs, wrong ? "rank 0, entry 1: waits for all-gather" : "");
    }
}

TEST(layouts)
{
    const int every = brief() ? 11 : 1; /* under a sanitizer */
    int seen = 0, two_way = 0, cut = 0, sixteen = 0;
    for (int i = 0, turn = 0; schedule_name(i); i++)
        for (int pp = 2; pp <= 4; pp += 2)
            for (int k = 0; k < 12; k++, turn++) {
                TrainSpec s;
                Grid g;
                if (turn % every) continue;
                layout_of(schedule_name(i), pp, turn, &s, &g);
                OK(schedule_two_way(schedule_name(i), &g.bidirectional));
                g.zero_group = param_zero_group(g, s.update.zero, 0);
                if (trainer_grid(&s, &g) || !grid_fits(grid_shape(g)) || trainer_check(&s, g)) continue;
                const Err err = call_order_of(&s, g);
                CHECK_MSG(!err, "%s, pp %d, turn %d: %s", schedule_name(i), pp, turn, err ? err_message() : "");
                seen++;
                two_way += g.bidirectional && s.update.zero;
                cut += g.zero_group > 1;
                sixteen += g.bidirectional && s.update.zero && s.compute == BF16;
            }
    printf("    %d layouts, of them %d with two replicas and ZeRO, %d with shards of gradients, %d in 16 bits\n", seen,
           two_way, cut, sixteen);
    CHECK(every > 1 ? seen >= 15 : seen >= 200 && two_way >= 20 && cut >= 10 && sixteen >= 5);
}

TEST_MAIN
