/* Communicators of thread ranks, of one rank, and of the dry run: results, counters, differing calls. */
#include "comm/comm.h"
#include "comm_cases.h"

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

static void run_threads(ThreadRank *t, int size, Err (*body)(CaseRun *run))
{
    CommHub *hub;
    pthread_t thread[RANKS_MAX];
    OK(comm_hub_open(size, 0, &hub));
    for (int r = 0; r < size; r++) {
        t[r] = (ThreadRank){ .hub = hub, .rank = r, .size = size, .body = body };
        OK(device_open(&t[r].device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    }
    for (int r = 0; r < size; r++) CHECK(!pthread_create(&thread[r], NULL, thread_rank, &t[r]));
    for (int r = 0; r < size; r++) pthread_join(thread[r], NULL);
    for (int r = 0; r < size; r++) device_close(&t[r].device);
    comm_hub_close(hub);
}

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
                CHECK_MSG(w.comm[kind].size == size && w.comm[kind].rank == before, "%s of rank %d", group_name(kind), rank);
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
    static const int64_t want[COMM_KIND_COUNT] = { 3 * 48, 72, 3 * 48, 3 * 96, 144, 144, 0 };
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
