/* Communicators of thread ranks, of one rank, and of the dry run: results, counters, differing calls. */
#include <unistd.h>

#include "comm/comm.h"
#include "comm_cases.h"
#include "thread_ranks.h"

enum { RANKS_MAX = 8 };

typedef struct {
    CommHub *hub;
    int rank, size;
    Err (*body)(CaseRun *run);
    Device device;
    CaseRun run;
    Err err;
    char message[256];
} ThreadRank;

static void *thread_rank(void *arg)
{
    static const int all[RANKS_MAX] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    ThreadRank *t = arg;
    Comm comm;
    t->err = comm_open_threads(t->hub, &comm, "all", t->rank, all, t->size);
    if (t->err) return NULL;
    t->run = (CaseRun){ &comm, &t->device.stream, 1 };
    t->err = t->body(&t->run);
    snprintf(t->message, sizeof t->message, "%s", t->err ? err_message() : "");
    comm_close(&comm);
    return NULL;
}

static void run_threads_late(ThreadRank *t, int size, int delay_ms, Err (*body)(CaseRun *run))
{
    CommHub *hub;
    pthread_t thread[RANKS_MAX];
    OK(comm_hub_open(size, delay_ms, &hub));
    for (int r = 0; r < size; r++) {
        t[r] = (ThreadRank){ .hub = hub, .rank = r, .size = size, .body = body };
        OK(device_open(&t[r].device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    }
    for (int r = 0; r < size; r++) CHECK(!pthread_create(&thread[r], NULL, thread_rank, &t[r]));
    for (int r = 0; r < size; r++) pthread_join(thread[r], NULL);
    for (int r = 0; r < size; r++) device_close(&t[r].device);
    comm_hub_close(hub);
}

static void run_threads(ThreadRank *t, int size, Err (*body)(CaseRun *run)) { run_threads_late(t, size, 0, body); }

static Err every_kind(CaseRun *run)
{
    for (int i = 0; i < CASE_COUNTS; i++) TRY(case_all_kinds(run, case_counts[i]));
    return ERR_OK;
}

TEST(threads_every_kind)
{
    for (int size = 2; size <= RANKS_MAX; size++) {
        ThreadRank t[RANKS_MAX];
        run_threads(t, size, every_kind);
        for (int r = 0; r < size; r++) CHECK_MSG(!t[r].err, "%s", t[r].message);
    }
}

typedef struct {
    CommHub *hub;
    Grid grid;
    int rank;
    World world; /* kept open for the others' sake until all are through */
    Err err;
} WorldRank;

static void *world_rank(void *arg)
{
    WorldRank *t = arg;
    Device device;
    t->err = device_open(&device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 });
    if (!t->err) t->err = world_open_threads(&t->world, t->hub, t->grid, t->rank);
    if (!t->err) t->err = case_world(&t->world, &device.stream);
    world_close(&t->world);
    device_close(&device);
    return NULL;
}

TEST(threads_worlds)
{
    for (int i = 0; i < CASE_GRIDS; i++) {
        static WorldRank t[RANKS_MAX];
        const int size = grid_size(case_grids[i]);
        CommHub *hub;
        pthread_t thread[RANKS_MAX];
        OK(comm_hub_open(size, 0, &hub));
        for (int r = 0; r < size; r++) {
            t[r] = (WorldRank){ .hub = hub, .grid = case_grids[i], .rank = r };
            CHECK(!pthread_create(&thread[r], NULL, world_rank, &t[r]));
        }
        for (int r = 0; r < size; r++) pthread_join(thread[r], NULL);
        for (int r = 0; r < size; r++) CHECK(!t[r].err);
        comm_hub_close(hub);
    }
}

/* The dry run's communicators are those of the rank that it stands for. */
TEST(null_worlds)
{
    for (int i = 0; i < CASE_GRIDS; i++)
        for (int rank = 0; rank < grid_size(case_grids[i]); rank++) {
            World w;
            OK(world_open_null(&w, case_grids[i], rank));
            for (int kind = 0; kind < WORLD_COMMS; kind++) {
                int size = 0, before = 0;
                for (int r = 0; r < w.size; r++) {
                    if (!case_together(w.grid, kind, rank, r)) continue;
                    size++;
                    before += r < rank;
                }
                CHECK_MSG(w.comm[kind].size == size && w.comm[kind].rank == before, "%s of rank %d", group_name(kind),
                          rank);
            }
            world_close(&w);
        }
}

TEST(self_every_kind)
{
    Device device;
    Comm comm;
    OK(device_open(&device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    comm_open_self(&comm, "self");
    CaseRun run = { &comm, &device.stream, 1 };
    OK(every_kind(&run));
    OK(comm_exchange(&comm, &device.stream, NULL, 0, NULL));
    CHECK(comm.sent_bytes == 0);
    comm_close(&comm);
    device_close(&device);
}

/* Rank 1 gathers where the others sum. */
static Err differing(CaseRun *run)
{
    int64_t x[16] = { 0 };
    TRY(comm_barrier(run->comm, run->stream));
    if (run->comm->rank == 1)
        return comm_all_gather(run->comm, run->stream, case_tensor(x, 6), case_tensor(x + 1, 2), NULL);
    return comm_sum_i64(run->comm, run->stream, x, 3, NULL);
}

TEST(threads_differing_calls)
{
    ThreadRank t[3];
    run_threads(t, 3, differing);
    int internal = 0;
    for (int r = 0; r < 3; r++) {
        CHECK(t[r].err == ERR_INTERNAL || t[r].err == ERR_PEER);
        internal += t[r].err == ERR_INTERNAL;
        CHECK_MSG(strstr(t[r].message, "member 0 sum-i64 of 3 x 8 bytes (call 1)") &&
                      strstr(t[r].message, "member 1 all-gather of 2 x 4 bytes (call 1)"),
                  "%s", t[r].message);
    }
    CHECK(internal >= 1);
}

static Err exchanges(CaseRun *run)
{
    for (uint64_t seed = 1; seed <= 4; seed++) TRY(case_exchanges(run, seed, 400));
    return ERR_OK;
}

static Err few_exchanges(CaseRun *run) { return case_exchanges(run, 5, 60); }

TEST(threads_exchanges)
{
    for (int size = 2; size <= RANKS_MAX; size += 2) {
        ThreadRank t[RANKS_MAX];
        run_threads(t, size, exchanges);
        for (int r = 0; r < size; r++) CHECK_MSG(!t[r].err, "%s", t[r].message);
        run_threads_late(t, size, 5, few_exchanges);
        for (int r = 0; r < size; r++) CHECK_MSG(!t[r].err, "%s", t[r].message);
    }
}

/* Both ends send first, and a pair needs nobody else: ranks 2 and 3 issue nothing. */
static Err pair_alone(CaseRun *run)
{
    const int rank = run->comm->rank;
    int64_t out[1000], in[1000] = { 0 };
    for (int64_t i = 0; i < 1000; i++) out[i] = 1000 * rank + i;
    CommMessage m[2] = { { .send = true, .peer = 1 - rank, .data = out, .bytes = sizeof out },
                         { .peer = 1 - rank, .data = in, .bytes = sizeof in } };
    TRY(comm_exchange(run->comm, run->stream, m, 0, NULL));
    if (rank > 1) return ERR_OK;
    TRY(comm_exchange(run->comm, run->stream, m, 2, NULL));
    CASE_SAME(in, 1000, 1000 * (1 - rank) + i, "exchange");
    return ERR_OK;
}

TEST(threads_pair_alone)
{
    ThreadRank t[4];
    run_threads(t, 4, pair_alone);
    for (int r = 0; r < 4; r++) CHECK_MSG(!t[r].err, "%s", t[r].message);
}

/* Rank 0 sends two messages of which the second is not what rank 1 expects; rank 2 waits for rank 1. */
static Err differing_messages(CaseRun *run)
{
    int64_t x[8] = { 0 };
    const MessageLabel fifth = { MESSAGE_GRADIENT, 2, 5 }, sixth = { MESSAGE_GRADIENT, 2, 6 };
    CommMessage m[2] = { { .send = run->comm->rank == 0, .peer = 1, .data = x, .bytes = 16, .what = fifth },
                         { .send = run->comm->rank == 0, .peer = 1, .data = x, .bytes = 16, .what = sixth } };
    if (run->comm->rank == 1) m[0].peer = m[1].peer = 0, m[1].data = x + 2, m[1].bytes = 24;
    return comm_exchange(run->comm, run->stream, m, run->comm->rank == 2 ? 1 : 2, NULL);
}

TEST(threads_differing_messages)
{
    ThreadRank t[3];
    run_threads(t, 3, differing_messages);
    CHECK(t[0].err == ERR_PEER && t[1].err == ERR_INTERNAL && t[2].err == ERR_PEER);
    for (int r = 0; r < 3; r++)
        CHECK_MSG(strstr(t[r].message,
                         "all: message 1 from member 0 to member 1: sent as gradient of micro-batch 6 for "
                         "stage 2 of 16 bytes, received as gradient of micro-batch 6 for stage 2 of 24"),
                  "%s", t[r].message);
}

static CommHub *to_abort;

static Err waits_for_nothing(CaseRun *run)
{
    int64_t x[4];
    CommMessage m = { .send = run->comm->rank == 2, .peer = (run->comm->rank + 1) % 3, .data = x, .bytes = sizeof x };
    if (run->comm->rank == 0) {
        usleep(50000);
        comm_hub_abort(to_abort, "the test says so");
    }
    return comm_exchange(run->comm, run->stream, &m, 1, NULL);
}

TEST(threads_aborted_exchange)
{
    ThreadRank t[3];
    pthread_t thread[3];
    OK(comm_hub_open(3, 0, &to_abort));
    for (int r = 0; r < 3; r++) {
        t[r] = (ThreadRank){ .hub = to_abort, .rank = r, .size = 3, .body = waits_for_nothing };
        OK(device_open(&t[r].device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    }
    for (int r = 0; r < 3; r++) CHECK(!pthread_create(&thread[r], NULL, thread_rank, &t[r]));
    for (int r = 0; r < 3; r++) {
        pthread_join(thread[r], NULL);
        device_close(&t[r].device);
        CHECK_MSG(t[r].err == ERR_PEER && strstr(t[r].message, "all: stopped because the test says so"), "%s",
                  t[r].message);
    }
    comm_hub_close(to_abort);
}

/* What one rank of four sends at the least, by hand: 12 floats or 12 integers a call. */
TEST(counters)
{
    Device device;
    Comm comm;
    float f[48];
    int64_t i[48];
    OK(device_open(&device, (DeviceChoice){ .kind = DEVICE_NULL }));
    comm_open_null(&comm, "null", 1, 4);
    Stream *s = &device.stream;
    OK(comm_all_gather(&comm, s, case_tensor(f, 48), case_tensor(f, 12), NULL));
    OK(comm_reduce_tree_f32(&comm, s, case_tensor(f, 12), NULL));
    OK(comm_reduce_scatter_tree_f32(&comm, s, case_tensor(f, 12), case_tensor(f, 48), NULL));
    OK(comm_reduce_scatter_i64(&comm, s, i, i, 12, NULL));
    OK(comm_sum_i64(&comm, s, i, 12, NULL));
    OK(comm_max_i64(&comm, s, i, 12, NULL));
    OK(comm_barrier(&comm, s));
    CommRows rows = { .local = (char *)f, .remote = (char *)i, .chunks = 1, .stride = 1, .copies = 1 };
    OK(comm_all_to_all_rows(&comm, s, &rows, 8, 5, NULL));
    const CommMessage messages[] = { { .send = true, .peer = 0, .data = f, .bytes = 10 },
                                     { .send = true, .peer = 2, .data = f, .bytes = 20 },
                                     { .send = false, .peer = 2, .data = i, .bytes = 40 } };
    OK(comm_exchange(&comm, s, messages, 3, NULL));
    static const int64_t want[COMM_KIND_COUNT] = { 3 * 48, 72, 3 * 48, 3 * 96, 144, 144, 0, 30, 30 };
    int64_t total = 0;
    for (int k = 0; k < COMM_KIND_COUNT; k++) {
        CHECK_MSG(comm.calls[k] == 1 && comm.bytes[k] == want[k], "%s: %lld bytes", comm_kind_name((CommKind)k),
                  (long long)comm.bytes[k]);
        total += want[k];
    }
    CHECK(comm.sent_bytes == total);
    comm_close(&comm);
    device_close(&device);
}

TEST_MAIN
