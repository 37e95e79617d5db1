/*
 * The executor against the simulator: every synchronous schedule on ranks that are processes with messages over Gloo,
 * whose stages sleep instead of computing. What is executed is what was simulated, unit by unit; every unit finds in
 * its boundary buffer what its neighbour made for it; nothing begins before what it needs has ended; and no step is
 * shorter than its simulation. How much longer it is depends on the machine:
 *
 *   MEGATRAIN_EXECUTOR=measure test_executor      longer sleeps, prints the simulated time and the shortest and longest
 *                                                 measured of several; asserts the same
 */
#include "fork_ranks.h"

#include "base/clock.h"
#include "engine/executor.h"

enum { RANKS_MOST = 8, ACTIONS_MOST = 1024, STAGES_MOST = 64, REPEATS = 5 };

/* What went over a boundary, in its first bytes, and what a compute leaves in the log. */
typedef struct {
    int32_t kind, replica, stage, unit;
} Mark;

/* One schedule on one rank, whose computes sleep. */
typedef struct {
    Schedule schedule;
    Simulation sim;
    StageCost cost[STAGES_MOST]; /* seconds */
    SetupArena setup;
    Executor executor;
    ParamStore params;
    Mark log[2 * ACTIONS_MOST];
    int logged, ended; /* ended: what came after the last compute */
} Sleeper;

/* What the processes share; it is there before they are forked. */
typedef struct {
    Span span[RANKS_MOST][ACTIONS_MOST]; /* when each action of the schedule that runs ran */
} Together;

static Together *together;

static bool measuring(void) { return env_is("MEGATRAIN_EXECUTOR", "measure"); }

/* ---- stages that sleep ---- */

static void sleep_s(double seconds)
{
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    const int64_t ns = end.tv_nsec + (int64_t)(seconds * 1e9);
    end.tv_sec += ns / 1000000000;
    end.tv_nsec = ns % 1000000000;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL)) continue;
}

static Mark mark_of(const ExecutorUnit *u, ActionKind kind)
{
    return (Mark){ (int32_t)kind, u->stage->replica, u->stage->stage, u->slot->unit };
}

static void note(Executor *e, const ExecutorUnit *u, ActionKind kind)
{
    Sleeper *s = e->hooks.user;
    CHECK(s->logged < 2 * ACTIONS_MOST && !s->ended);
    s->log[s->logged++] = mark_of(u, kind);
}

/* The input is what the stage `step` further along made of this unit; the output says who made it. */
static void pass_on(const ExecutorUnit *u, ActionKind kind, int step)
{
    Mark want = mark_of(u, kind), own = want;
    want.stage += step;
    if (u->in.count)
        CHECK_MSG(!memcmp(u->in.t[0].data, &want, sizeof want), "%s of unit %d at stage %d: wrong input",
                  action_name(kind), own.unit, own.stage);
    if (u->out.count) memcpy(u->out.t[0].data, &own, sizeof own);
}

static const StageCost *cost_of(Executor *e, const ExecutorUnit *u)
{
    return &((Sleeper *)e->hooks.user)->cost[u->stage->stage];
}

static Err sleep_forward(Executor *e, const ExecutorUnit *u)
{
    note(e, u, ACT_F);
    sleep_s(cost_of(e, u)->f);
    pass_on(u, ACT_F, -1);
    return ERR_OK;
}

static Err sleep_backward(Executor *e, const ExecutorUnit *u)
{
    const bool half = u->ctx->mode.split_backward;
    note(e, u, half ? ACT_I : ACT_B);
    sleep_s(cost_of(e, u)->i + (half ? 0 : cost_of(e, u)->w));
    pass_on(u, ACT_B, 1);
    return ERR_OK;
}

static Err sleep_weights(Executor *e, const ExecutorUnit *u)
{
    note(e, u, ACT_W);
    sleep_s(cost_of(e, u)->w);
    return ERR_OK;
}

static const ExecutorCompute sleepers = { sleep_forward, sleep_backward, sleep_weights };

static Err no_batch(void *user, int unit, Batch *b)
{
    (void)user, (void)unit, (void)b;
    return ERR_OK;
}

static Err count_end(void *user)
{
    ((Sleeper *)user)->ended++;
    return ERR_OK;
}

static Err count_replica(void *user, int replica)
{
    (void)replica;
    return count_end(user);
}

/* ---- one schedule ---- */

static void open_stages(Sleeper *s, int rank)
{
    Executor *e = &s->executor;
    const Schedule *schedule = &s->schedule;
    e->stage_count = schedule->replicas * schedule->chunks;
    OK(setup_array(&s->setup, e->stage_count, &e->stages));
    for (int i = 0; i < e->stage_count; i++) {
        ExecutorStage *stage = &e->stages[i];
        stage->replica = i / schedule->chunks;
        stage->stage = schedule_stage_at(schedule, rank, stage->replica, i % schedule->chunks);
        stage->params = &s->params;
        stage->slot_count = schedule_in_flight(schedule, stage->replica, stage->stage, false);
        OK(setup_array(&s->setup, stage->slot_count, &stage->slots));
        for (int k = 0; k < stage->slot_count; k++) stage->slots[k].unit = -1;
    }
}

static void open_buffers(Sleeper *s, int rank)
{
    Executor *e = &s->executor;
    e->buffer_tensors = e->last_inputs = 1;
    e->buffer_count = s->schedule.rank[rank].buffers;
    OK(setup_array(&s->setup, e->buffer_count, &e->buffers));
    for (int i = 0; i < e->buffer_count; i++) {
        void *data;
        OK(setup_alloc(&s->setup, sizeof(Mark), &data));
        e->buffers[i] = tensor_of(data, I32, sizeof(Mark) / sizeof(int32_t));
    }
}

static void open_sleeper(Sleeper *s, const ScheduleSpec *spec, Comm *pp, Stream *stream)
{
    Executor *e = &s->executor;
    ScheduleSpec expected = *spec;
    expected.costs = s->cost;
    OK(schedule_make(&expected, &s->schedule));
    OK(simulate(&s->schedule, &(SimulateCosts){ .stage = s->cost }, &s->sim));
    setup_init(&s->setup);
    e->pp = pp;
    e->ctx.s = stream;
    e->compute = &sleepers;
    e->hooks = (ExecutorHooks){ s, no_batch, count_end, count_replica, count_end, count_replica };
    e->times = together->span[pp->rank];
    open_stages(s, pp->rank);
    open_buffers(s, pp->rank);
    for (int r = 0; r < REGION_COUNT; r++) OK(heap_init(&e->heap[r], NULL, 0, 1, &s->setup));
    OK(executor_init(e, &s->setup));
}

static void close_sleeper(Sleeper *s)
{
    executor_release(&s->executor);
    simulation_free(&s->sim, &s->schedule);
    schedule_free(&s->schedule);
    setup_release(&s->setup);
}

/* The log is the list as it was simulated: by start, and where two start together in the order of the list. */
static void check_order(const Sleeper *s, int rank)
{
    const ActionList *list = &s->schedule.rank[rank];
    double start = 0;
    int at = 0;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        if (!action_is_compute(a->kind)) continue;
        CHECK(s->sim.span[rank][i].start >= start);
        start = s->sim.span[rank][i].start;
        for (int k = 0; k < a->count; k++, at++) {
            const Mark want = { a->kind, a->replica, a->stage, a->microbatch + k };
            CHECK_MSG(at < s->logged && !memcmp(&want, &s->log[at], sizeof want), "%s: rank %d, compute %d",
                      s->schedule.name, rank, at);
        }
    }
    CHECK(at == s->logged && at > 0);
    CHECK(s->ended >= 1 + 2 * s->schedule.replicas); /* a norm, and of each replica reduce and update */
}

/* ---- all ranks together, on rank 0 ---- */

/* When the output of (kind, replica, stage, unit) was made; -1: nobody makes it. */
static double made_at(const Schedule *s, bool forward, const Mark *m)
{
    if (m->stage < 0 || m->stage >= s->stages) return -1;
    const int rank = schedule_rank_of(s, m->replica, m->stage);
    for (int i = 0; i < s->rank[rank].count; i++) {
        const Action *a = &s->rank[rank].action[i];
        const bool kind = forward ? a->kind == ACT_F : a->kind == ACT_B || a->kind == ACT_I;
        if (kind && a->replica == m->replica && a->stage == m->stage && m->unit >= a->microbatch &&
            m->unit < a->microbatch + a->count)
            return together->span[rank][i].end;
    }
    return -1;
}

/* Each compute took its time, after the one before it on the rank and after what it needs. */
static void check_times(const Sleeper *s, int rank)
{
    const ActionList *list = &s->schedule.rank[rank];
    double end = 0;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        const Span t = together->span[rank][i];
        if (!action_is_compute(a->kind)) continue;
        const StageCost *c = &s->cost[a->stage];
        const double one = a->kind == ACT_F   ? c->f
                           : a->kind == ACT_I ? c->i
                           : a->kind == ACT_W ? c->w
                                              : c->i + c->w;
        CHECK(t.end - t.start >= a->count * one * 0.999);
        CHECK(t.start >= end);
        end = t.end;
        for (int k = 0; k < a->count && a->kind != ACT_W; k++) {
            const bool forward = a->kind == ACT_F;
            const Mark from = { 0, a->replica, a->stage + (forward ? -1 : 1), a->microbatch + k };
            CHECK(t.start >= made_at(&s->schedule, forward, &from));
        }
    }
}

static double measured(const Schedule *s)
{
    double first = INFINITY, last = 0;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) {
            if (!action_is_compute(s->rank[r].action[i].kind)) continue;
            first = fmin(first, together->span[r][i].start);
            last = fmax(last, together->span[r][i].end);
        }
    return last - first;
}

/* A pair that may overlap waits in the simulation for what both need, in the executor each for its own. */
static bool has_pairs(const Schedule *s)
{
    for (int i = 0; i < s->rank[0].count; i++)
        if (s->rank[0].action[i].flags & ACTION_PAIR) return true;
    return false;
}

static void check_together(const Sleeper *s)
{
    const Schedule *schedule = &s->schedule;
    const double took = measured(schedule), plan = s->sim.makespan;
    for (int r = 0; r < schedule->ranks; r++) check_times(s, r);
    if (!has_pairs(schedule))
        CHECK_MSG(took >= plan * 0.999, "%s: %g s, simulated %g", schedule->name, took, plan);
}

/* took: the shortest and the longest of the repeats. */
static void print_times(const Sleeper *s, bool uneven, const double took[2])
{
    const double plan = s->sim.makespan;
    printf("%-18s %d ranks %2d micro-batches %-6s simulated %7.1f ms measured %7.1f to %7.1f ms %+6.2f to %+6.2f %%\n",
           s->schedule.name, s->schedule.ranks, s->schedule.microbatches, uneven ? "uneven" : "equal", 1e3 * plan,
           1e3 * took[0], 1e3 * took[1], 100 * (took[0] / plan - 1), 100 * (took[1] / plan - 1));
    fflush(stdout);
}

/* ---- every schedule ---- */

/* One step of all ranks; took is rank 0's to keep. */
static void run_step(Sleeper *s, Comm *pp, Stream *stream, double took[2])
{
    s->logged = s->ended = 0;
    OK(comm_barrier(pp, stream));
    OK(executor_run(&s->executor, &s->schedule.rank[pp->rank], true));
    OK(comm_barrier(pp, stream));
    check_order(s, pp->rank);
    if (pp->rank == 0) {
        check_together(s);
        took[0] = fmin(took[0], measured(&s->schedule));
        took[1] = fmax(took[1], measured(&s->schedule));
    }
    OK(comm_barrier(pp, stream)); /* the next step writes its times where these are */
}

static void run_schedule(const char *name, bool uneven, Comm *pp, Stream *stream)
{
    static Sleeper s;
    const double ms = measuring() ? 1e-3 : 2e-5;
    const ScheduleSpec spec = { .name = name, .ranks = pp->size, .microbatches = 2 * pp->size };
    Schedule shape = { 0 };
    memset(&s, 0, sizeof s);
    const Err err = schedule_make(&spec, &shape);
    const int stages = shape.stages;
    const bool whole_steps = !err && shape.versions == VERSIONS_STEP;
    schedule_free(&shape);
    if (!whole_steps) return;
    CHECK(stages <= STAGES_MOST);
    for (int i = 0; i < stages; i++) {
        const double by = uneven && (i == 0 || i == stages - 1) ? 1.5 * ms : ms;
        s.cost[i] = uneven ? (StageCost){ 12 * by, 14 * by, 9 * by } : (StageCost){ 12 * by, 12 * by, 12 * by };
    }
    open_sleeper(&s, &spec, pp, stream);
    CHECK(s.schedule.rank[pp->rank].count <= ACTIONS_MOST);
    double took[2] = { INFINITY, 0 };
    for (int i = 0; i < (measuring() ? REPEATS : 1); i++) run_step(&s, pp, stream, took);
    if (measuring() && pp->rank == 0) print_times(&s, uneven, took);
    close_sleeper(&s);
}

static void every_schedule(int rank, int size, void *arg)
{
    static const int members[RANKS_MOST] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    Device device;
    GlooWorld *world;
    Comm pp;
    (void)arg;
    OK(device_open(&device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    shared_meet(size);
    OK(gloo_world_open(
        (GlooOptions){
            rank, size, "127.0.0.1", "a secret of tests", "a start", 60, { shared_page, shared_set, shared_get } },
        &world));
    OK(comm_open_gloo(world, &pp, "pp", members, size));
    for (int i = 0; schedule_name(i); i++)
        for (int uneven = 0; uneven < 2; uneven++) run_schedule(schedule_name(i), uneven, &pp, &device.stream);
    comm_close(&pp);
    gloo_world_close(world);
    device_close(&device);
}

static void run_ranks(int ranks)
{
    together = mmap(NULL, sizeof *together, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(together != MAP_FAILED);
    fork_ranks(every_schedule, ranks, NULL, -1, measuring() ? 1200 : 300);
    munmap(together, sizeof *together);
}

TEST(every_schedule_on_four_ranks) { run_ranks(4); }
TEST(every_schedule_on_eight_ranks) { run_ranks(8); }

TEST_MAIN
