/* Communicators between processes: results to the bit, order, failures. */
#include <dirent.h>
#include <sys/resource.h>

#include "boot/link.h"
#include "comm/gloo.h"
#include "comm/mesh.h"
#include "comm_cases.h"
#include "fork_ranks.h"

typedef struct {
    Device device;
    GlooWorld *world;
    Comm comm; /* of all ranks */
} Rank;

static const int all_ranks[SHARED_RANKS] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };

#define SHORT_S 4.0 /* patience of ranks that wait in vain; time enough to connect */

/* Limits that only what hangs comes to, on the slowest machine: of waits that are to end by themselves, of what these
 * are told, of a case. */
enum { SOON_S = 60, PATIENT_S = 300, CASE_S = 400 };

static void open_rank(Rank *r, int rank, int size, double timeout_s)
{
    OK(device_open(&r->device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    shared_meet(size);
    OK(gloo_world_open((GlooOptions){ rank, size, "127.0.0.1", "a secret of tests", "a start", timeout_s,
                                      { shared_page, shared_set, shared_get } },
                       &r->world));
    OK(comm_open_gloo(r->world, &r->comm, "world", all_ranks, size));
}

static void close_rank(Rank *r)
{
    comm_close(&r->comm);
    gloo_world_close(r->world);
    device_close(&r->device);
}

static void every_kind(int rank, int size, void *arg)
{
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    comm_check_calls(&r.comm, arg != NULL);
    CaseRun run = { &r.comm, &r.device.stream, 1 };
    for (int i = 0; i < CASE_COUNTS; i++) OK(case_all_kinds(&run, case_counts[i]));
    shared_page->digest[rank] = run.digest;
    close_rank(&r);
}

TEST(every_kind)
{
    for (int size = 2; size <= 8; size += size < 4 ? 1 : 2) fork_ranks(every_kind, size, NULL, -1, CASE_S);
}

TEST(every_kind_compared) { fork_ranks(every_kind, 3, "compare", -1, CASE_S); }

static void large(int rank, int size, void *arg)
{
    (void)arg;
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    CaseRun run = { &r.comm, &r.device.stream, 1 };
    OK(case_all_kinds(&run, 600001));
    close_rank(&r);
}

TEST(large_in_blocks)
{
    for (int size = 2; size <= 4; size++) fork_ranks(large, size, NULL, -1, 60);
}

static Err open_grid_group(void *world, Comm *c, GroupKind kind, const int *members, int size)
{
    return comm_open_gloo(world, c, group_name(kind), members, size);
}

static void grid_worlds(int rank, int size, void *arg)
{
    static World world;
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    OK(world_open(&world, *(const Grid *)arg, rank, (CommOpener){ r.world, open_grid_group }));
    OK(case_world(&world, &r.device.stream));
    world_close(&world);
    close_rank(&r);
}

TEST(grid_worlds)
{
    for (int i = 0; i < CASE_GRIDS; i++)
        fork_ranks(grid_worlds, grid_size(case_grids[i]), (void *)&case_grids[i], -1, 60);
}

/* ---- order ---- */

enum { GROUPS = 12, ROUNDS = 40 };

/* Groups of 8 ranks (of the first `size` of them), many sharing two ranks; two have the same members. */
static const char *const member_lists[GROUPS] = { "01234567", "0123", "4567", "0246", "1357", "01",
                                                   "01",       "12",   "0167", "2345", "37",   "03" };

typedef struct {
    Comm comm;
    bool open;
    int64_t integers[300];
    float floats[5000];
    Event done[2];
} GroupCase;

static void open_group_case(GroupCase *g, Rank *r, int group, int rank, int size)
{
    int members[8], n = 0;
    for (const char *m = member_lists[group]; *m; m++)
        if (*m - '0' < size) members[n++] = *m - '0';
    for (int i = 0; i < n; i++) g->open |= members[i] == rank;
    if (!g->open) return;
    OK(comm_open_gloo(r->world, &g->comm, member_lists[group], members, n));
    event_init(&g->done[0]);
    event_init(&g->done[1]);
}

static void start_group_case(GroupCase *g, Stream *s, int salt)
{
    for (int i = 0; i < 300; i++) g->integers[i] = case_integer(salt, g->comm.rank, i);
    for (int i = 0; i < 5000; i++) g->floats[i] = case_float(salt, g->comm.rank, i);
    OK(comm_sum_i64(&g->comm, s, g->integers, 300, &g->done[0]));
    OK(comm_reduce_tree_f32(&g->comm, s, case_tensor(g->floats, 5000), &g->done[1]));
}

static void finish_group_case(GroupCase *g, int salt)
{
    CaseRun self = { &g->comm, NULL, 0 }, *run = &self;
    OK(event_wait(&g->done[0], 20));
    OK(event_wait(&g->done[1], 20));
    CASE_SAME(g->integers, 300, case_sum(salt, g->comm.size, i), "sum-i64");
    CASE_SAME(g->floats, 5000, case_tree(salt, 0, g->comm.size, i), "reduce-tree");
}

static void random_order(int rank, int size, void *arg)
{
    (void)arg;
    static GroupCase groups[GROUPS];
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    for (int i = 0; i < GROUPS; i++) open_group_case(&groups[i], &r, i, rank, size);
    uint64_t seed = (uint64_t)rank + 1;
    for (int round = 0; round < ROUNDS; round++) {
        int order[GROUPS];
        for (int i = 0; i < GROUPS; i++) {
            int j = (int)(test_rand(&seed) % (uint64_t)(i + 1));
            order[i] = order[j];
            order[j] = i;
        }
        for (int i = 0; i < GROUPS; i++)
            if (groups[order[i]].open) start_group_case(&groups[order[i]], &r.device.stream, 100 * round + order[i]);
        for (int i = 0; i < GROUPS; i++)
            if (groups[i].open) finish_group_case(&groups[i], 100 * round + i);
    }
    for (int i = 0; i < GROUPS; i++) {
        if (!groups[i].open) continue;
        comm_close(&groups[i].comm);
        event_release(&groups[i].done[0]);
        event_release(&groups[i].done[1]);
    }
    close_rank(&r);
}

TEST(groups_in_random_order)
{
    fork_ranks(random_order, 4, NULL, -1, 60);
    fork_ranks(random_order, 8, NULL, -1, 60);
}

static int entries(const char *folder)
{
    int n = 0;
    DIR *dir = opendir(folder);
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

static void open_and_close(int rank, int size, void *arg)
{
    (void)arg;
    Rank r;
    int threads = entries("/proc/self/task"), files = entries("/proc/self/fd");
    open_rank(&r, rank, size, PATIENT_S);
    OK(comm_barrier(&r.comm, &r.device.stream));
    CHECK(entries("/proc/self/task") > threads && entries("/proc/self/fd") > files);
    close_rank(&r);
    for (double end = test_now() + SOON_S; entries("/proc/self/task") != threads && test_now() < end;) usleep(1000);
    CHECK(entries("/proc/self/task") == threads); /* (one that was joined is listed a moment longer) */
    CHECK(entries("/proc/self/fd") == files);
}

TEST(nothing_left_after_close) { fork_ranks(open_and_close, 3, NULL, -1, CASE_S); }

/* ---- exchanges ---- */

static void exchanges(int rank, int size, void *arg)
{
    Rank r;
    Comm other; /* of the same ranks, at the same time */
    open_rank(&r, rank, size, PATIENT_S);
    OK(comm_open_gloo(r.world, &other, "other", all_ranks, size));
    comm_check_calls(&r.comm, arg != NULL);
    CaseRun run = { &r.comm, &r.device.stream, 1 }, second = { &other, &r.device.stream, 1 };
    for (uint64_t seed = 1; seed <= 2; seed++) {
        OK(case_exchanges(&run, seed, 400));
        OK(case_exchanges(&second, seed, 200));
    }
    comm_close(&other);
    close_rank(&r);
}

TEST(exchanges)
{
    for (int size = 2; size <= 8; size += 2) fork_ranks(exchanges, size, NULL, -1, 60);
    fork_ranks(exchanges, 3, "compare", -1, 60);
    fork_ranks(exchanges, 6, "compare", -1, 60);
}

/* One end waits for both messages at once, the other sends only when it has received: each must move alone. */
static void exchange_in_two_parts(int rank, int size, void *arg)
{
    enum { BYTES = 5 << 20 };
    static uint8_t out[BYTES], in[BYTES];
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    comm_check_calls(&r.comm, arg != NULL);
    memset(out, 1 + rank, BYTES);
    const CommMessage receive = { .peer = 1 - rank, .data = in, .bytes = BYTES };
    const CommMessage send = { .send = true, .peer = 1 - rank, .data = out, .bytes = BYTES };
    if (rank == 0)
        OK(comm_exchange(&r.comm, &r.device.stream, (const CommMessage[]){ receive, send }, 2, NULL));
    else {
        OK(comm_exchange(&r.comm, &r.device.stream, &receive, 1, NULL));
        OK(comm_exchange(&r.comm, &r.device.stream, &send, 1, NULL));
    }
    int64_t wrong = 0;
    for (int64_t i = 0; i < BYTES; i++) wrong += in[i] != 2 - rank;
    CHECK(wrong == 0);
    close_rank(&r);
}

TEST(exchange_in_two_parts)
{
    fork_ranks(exchange_in_two_parts, 2, NULL, -1, CASE_S);
    fork_ranks(exchange_in_two_parts, 2, "compare", -1, CASE_S);
}

/* ---- failures ---- */

/* Closing after a failure must not wait for anybody. */
static void close_at_once(Rank *r)
{
    double t0 = test_now();
    close_rank(r);
    CHECK(test_now() - t0 < SOON_S);
}

/* Sums until it fails; how it failed. */
static Err sum_until_failure(Rank *r)
{
    static float x[300000];
    Err err = ERR_OK;
    double end = test_now() + SOON_S;
    while (!err && test_now() < end)
        err = comm_reduce_tree_f32(&r->comm, &r->device.stream, case_tensor(x, 300000), NULL);
    return err;
}

static void killed_rank(int rank, int size, void *arg)
{
    (void)arg;
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    OK(comm_barrier(&r.comm, &r.device.stream));
    if (rank == 2) {
        static float x[300000];
        for (double end = test_now() + 0.05; test_now() < end;)
            OK(comm_reduce_tree_f32(&r.comm, &r.device.stream, case_tensor(x, 300000), NULL));
        usleep(20000); /* the others wait in a call by now */
        shared_page->at[0] = test_now();
        raise(SIGKILL);
    }
    CHECK(sum_until_failure(&r) == ERR_PEER);
    double late = test_now() - shared_page->at[0];
    CHECK_MSG(shared_page->at[0] > 0 && late < SOON_S, "%.3f s after the kill", late);
    CHECK_MSG(strstr(err_message(), "world: lost rank ") && strstr(err_message(), " in reduce-tree of 300000 (call "),
              "%s", err_message());
    FAILS(comm_barrier(&r.comm, &r.device.stream), ERR_PEER, "world: stopped because world: lost rank");
    close_at_once(&r);
}

TEST(killed_rank)
{
    for (int i = 0; i < 5; i++) fork_ranks(killed_rank, 4, NULL, 2, CASE_S);
}

static void *abort_later(void *world)
{
    usleep(100000);
    gloo_world_abort(world, "the test says so");
    gloo_world_abort(world, "a later reason");
    return NULL;
}

static void abort_from_thread(int rank, int size, void *arg)
{
    (void)arg;
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    if (rank == 1) {
        while (!shared_page->flag) usleep(1000);
        FAILS(comm_barrier(&r.comm, &r.device.stream), ERR_PEER, "world: lost rank 0 in barrier");
    } else {
        pthread_t helper;
        double t0 = test_now();
        CHECK(!pthread_create(&helper, NULL, abort_later, r.world));
        for (int i = 0; i < 2; i++)
            FAILS(comm_barrier(&r.comm, &r.device.stream), ERR_PEER, "world: stopped because the test says so");
        CHECK(test_now() - t0 >= 0.1 && test_now() - t0 < SOON_S);
        pthread_join(helper, NULL);
        shared_page->flag = 1;
    }
    close_at_once(&r);
}

TEST(abort_from_thread) { fork_ranks(abort_from_thread, 2, NULL, -1, CASE_S); }

static void absent_rank(int rank, int size, void *arg)
{
    (void)arg;
    Rank r;
    open_rank(&r, rank, size, SHORT_S);
    int64_t x[3] = { 1, 2, 3 };
    double t0 = test_now();
    if (rank == 0) {
        FAILS(comm_sum_i64(&r.comm, &r.device.stream, x, 3, NULL), ERR_HANG,
              "world: waited for rank 1 in sum-i64 of 3 (call 0): no answer in 4000 ms");
        CHECK(test_now() - t0 < SHORT_S + SOON_S);
        shared_page->flag = 1;
    } else
        while (!shared_page->flag) usleep(1000);
    CHECK(rank == 1 || test_now() - t0 >= SHORT_S);
    close_at_once(&r);
}

TEST(absent_rank) { fork_ranks(absent_rank, 2, NULL, -1, CASE_S); }

/* Rank 2 gives another count, later another kind. With comparison that is told, without it nobody meets. */
static void differing_calls(int rank, int size, void *arg)
{
    static int64_t x[64];
    bool compare = arg != NULL;
    Rank r;
    open_rank(&r, rank, size, compare ? PATIENT_S : SHORT_S);
    comm_check_calls(&r.comm, compare);
    OK(comm_sum_i64(&r.comm, &r.device.stream, x, 3, NULL));
    if (compare)
        FAILS(comm_max_i64(&r.comm, &r.device.stream, x, rank == 2 ? 5 : 4, NULL), ERR_INTERNAL,
              "world: ranks issued different calls: member 0 max-i64 of 4 x 8 bytes (call 1), member 2 max-i64 of 5 x "
              "8 bytes (call 1)");
    else {
        Err err = comm_max_i64(&r.comm, &r.device.stream, x, rank == 2 ? 5 : 4, NULL);
        CHECK_MSG(err == ERR_HANG || err == ERR_PEER, "%s", err_message());
    }
    close_at_once(&r);
}

TEST(differing_calls_compared) { fork_ranks(differing_calls, 3, "compare", -1, CASE_S); }
TEST(differing_calls_do_not_meet) { fork_ranks(differing_calls, 3, NULL, -1, CASE_S); }

/*
 * Ranks 0, 1, 2 wait for each other in a circle that rank 1 closes by a wrong message: the circle does not hide it.
 * Rank 0 waits for rank 2 first, and for the message from rank 1 behind it.
 */
static void differing_messages(int rank, int size, void *arg)
{
    static uint8_t x[64];
    const MessageLabel want = { MESSAGE_ACTIVATION, 0, 7 }, other = { MESSAGE_ACTIVATION, 0, 8 };
    const bool length = !strcmp(arg, "length");
    Rank r;
    open_rank(&r, rank, size, PATIENT_S);
    comm_check_calls(&r.comm, true);
    CommMessage from_last = { .peer = 2, .data = x, .bytes = 8 };
    CommMessage from_next = { .peer = 1, .data = x + 8, .bytes = 16, .what = want };
    CommMessage sent = { .send = true, .data = x, .bytes = length ? 24 : 16, .what = length ? want : other };
    CommMessage back = { .peer = 1, .data = x, .bytes = 4 };
    if (rank == 0) {
        const CommMessage both[] = { from_last, from_next };
        FAILS(comm_exchange(&r.comm, &r.device.stream, both, 2, NULL), ERR_INTERNAL,
              length ? "world: message 0 from member 1 to member 0: sent as activation of micro-batch 7 for stage 0 of "
                       "24 bytes, received as activation of micro-batch 7 for stage 0 of 16"
                     : "world: message 0 from member 1 to member 0: sent as activation of micro-batch 8 for stage 0 of "
                       "16 bytes, received as activation of micro-batch 7 for stage 0 of 16");
        shared_page->flag = 1;
    } else if (rank == 1) {
        Err err = comm_exchange(&r.comm, &r.device.stream, &sent, 1, NULL);
        CHECK(err == ERR_PEER || (!length && !err)); /* of the right length it arrives */
    } else
        CHECK(comm_exchange(&r.comm, &r.device.stream, &back, 1, NULL) == ERR_PEER);
    while (!shared_page->flag) usleep(1000);
    close_at_once(&r);
}

TEST(differing_messages)
{
    fork_ranks(differing_messages, 3, "length", -1, 15);
    fork_ranks(differing_messages, 3, "label", -1, 15);
}

/* A chain of receives: 0 waits for 1, 1 for 2, 2 for 3, which is lost, silent, or stopped by the test. */
static void chain(int rank, int size, void *arg)
{
    const bool killed = !strcmp(arg, "killed"), aborted = !strcmp(arg, "aborted");
    static uint8_t x[100000];
    Rank r;
    open_rank(&r, rank, size, killed || aborted ? PATIENT_S : SHORT_S);
    OK(comm_barrier(&r.comm, &r.device.stream));
    shared_meet(size);
    const CommMessage m = { .peer = rank + 1, .data = x, .bytes = sizeof x, .what = { MESSAGE_ACTIVATION, 2, 5 } };
    if (rank == size - 1) {
        usleep(100000);
        shared_page->at[0] = test_now();
        if (killed) raise(SIGKILL);
        while (!killed && !aborted && shared_page->flag < size - 1) usleep(1000);
        if (aborted) gloo_world_abort(r.world, "the test says so");
        CHECK(!killed);
    } else {
        Err err = comm_exchange(&r.comm, &r.device.stream, &m, 1, NULL);
        const double late = test_now() - shared_page->at[0];
        atomic_fetch_add(&shared_page->flag, 1);
        if (killed || aborted) CHECK_MSG(err == ERR_PEER && late < SOON_S, "%s after %.3f s", err_message(), late);
        else CHECK_MSG(err == ERR_HANG || err == ERR_PEER, "%s", err_message());
        if (rank == size - 2 && !killed && !aborted && err == ERR_HANG)
            CHECK_MSG(strstr(err_message(), "world: waited for rank 3 in exchange 0 (to send: activation of "
                                            "micro-batch 5 for stage 2): no answer in 4000 ms"),
                      "%s", err_message());
        if (rank == size - 2 && killed)
            CHECK_MSG(strstr(err_message(), "world: lost rank 3 in exchange 0 (to send: activation of micro-batch 5"),
                      "%s", err_message());
    }
    close_at_once(&r);
}

TEST(chain_of_receives)
{
    fork_ranks(chain, 4, "killed", 3, CASE_S);
    fork_ranks(chain, 4, "aborted", -1, CASE_S);
    fork_ranks(chain, 4, "silent", -1, CASE_S);
}

/* Two groups of the same ranks, opened in another order on rank 1. */
static void other_order_of_groups(int rank, int size, void *arg)
{
    (void)arg;
    Rank r;
    Comm a, b;
    int64_t x = 1;
    open_rank(&r, rank, size, SHORT_S);
    OK(comm_open_gloo(r.world, rank ? &b : &a, rank ? "b" : "a", all_ranks, size));
    OK(comm_open_gloo(r.world, rank ? &a : &b, rank ? "a" : "b", all_ranks, size));
    Err err = comm_sum_i64(rank ? &b : &a, &r.device.stream, &x, 1, NULL); /* the first opened, on both */
    CHECK_MSG(err == ERR_HANG || err == ERR_PEER, "%s, x = %lld", err_name(err), (long long)x);
    comm_close(&b);
    comm_close(&a);
    close_at_once(&r);
}

TEST(other_order_of_groups) { fork_ranks(other_order_of_groups, 2, NULL, -1, CASE_S); }

static void cannot_open(int rank, int size, void *arg)
{
    (void)arg;
    GlooWorld *world;
    GlooOptions o = {
        rank, size + 1, NULL, "a secret of tests", "a start", 0.5, { shared_page, shared_set, shared_get }
    };
    double t0 = test_now();
    o.address = "localhost";
    FAILS(gloo_world_open(o, &world), ERR_CONFIG, "address 'localhost' of this rank is not numeric");
    o.address = "192.0.2.1"; /* of no host */
    FAILS(gloo_world_open(o, &world), ERR_CONFIG,
          "cannot listen on address '192.0.2.1': Cannot assign requested address");
    o.address = "127.0.0.1";
    FAILS(gloo_world_open(o, &world), ERR_RENDEZVOUS, "nobody set 'gloo/1'");
    CHECK(!world);
    gloo_world_close(world);
    CHECK(test_now() - t0 < SOON_S);
}

TEST(cannot_open) { fork_ranks(cannot_open, 1, NULL, -1, CASE_S); }

/* Rank 1 publishes where it listens, and is gone. */
static void gone_after_rendezvous(int rank, int size, void *arg)
{
    (void)arg;
    GlooWorld *world;
    GlooOptions o = {
        rank, size, "127.0.0.1", "a secret of tests", "a start", 0.5, { shared_page, shared_set, shared_get }
    };
    CHECK(rank < size);
    if (rank == 1) {
        o.timeout_s = 0.01; /* rank 0 comes later */
        CHECK(gloo_world_open(o, &world) != ERR_OK);
        shared_page->flag = 1;
        return;
    }
    while (!shared_page->flag) usleep(1000);
    double t0 = test_now();
    FAILS(gloo_world_open(o, &world), ERR_RENDEZVOUS, "do not connect");
    CHECK(test_now() - t0 < SOON_S);
}

TEST(gone_after_rendezvous) { fork_ranks(gone_after_rendezvous, 2, NULL, -1, CASE_S); }

/* This process may open so many descriptors more; returns what it might. (LeakSanitizer opens some as it ends.) */
static rlim_t allow_descriptors(int more)
{
    struct rlimit files;
    const int next = dup(0);
    close(next);
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    const rlim_t before = files.rlim_cur;
    files.rlim_cur = (rlim_t)(next + more);
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    return before;
}

static void allow_again(rlim_t before)
{
    struct rlimit files;
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = before;
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
}

/* Rank 0 of 2 is called by `strangers` and may accept `more` of them; rank 1 calls. How that ends. */
static Err connect_with(int rank, int strangers, int more, double timeout_s)
{
    enum { MOST = 4 };
    char addresses[2][MESH_ADDRESS_BYTES];
    int fds[2] = { 0 }, calls[MOST], port;
    Mesh *m;
    OK(mesh_open(rank, 2, (MeshPlace){ "127.0.0.1" }, (MeshKey){ "a secret of tests", "a start" }, &m));
    for (int p = 0; p < 2; p++) mesh_address(m, addresses[p]);
    CHECK(sscanf(addresses[0], "127.0.0.1 %d", &port) == 1);
    for (int i = 0; i < strangers; i++) calls[i] = net_connect("127.0.0.1", port);
    const rlim_t before = allow_descriptors(more);
    const Err err = mesh_connect(m, addresses, timeout_s, fds);
    allow_again(before);
    CHECK(fds[0] == -1 && fds[1] == -1);
    mesh_close(m);
    for (int i = 0; i < strangers; i++) close(calls[i]);
    return err;
}

/* Rank 1 is of another job, and was told rank 0's address. */
static void of_another_job(int rank, int size, void *arg)
{
    CHECK(!arg);
    GlooOptions o = { rank, size, "127.0.0.1", "a secret of tests", rank ? "another start" : "a start", 0.5,
                      { shared_page, shared_set, shared_get } };
    GlooWorld *world;
    FAILS(gloo_world_open(o, &world), ERR_RENDEZVOUS, "do not connect in 0.5 s");
}

TEST(of_another_job) { fork_ranks(of_another_job, 2, NULL, -1, CASE_S); }

static void without_descriptors(int rank, int size, void *arg)
{
    CHECK(size == 1 && rank == 0 && !arg);
    FAILS(connect_with(0, 1, 0, 600), ERR_RENDEZVOUS,
          "rank 0 has no file descriptor left for its connection to rank 1");
    CHECK_MSG(strstr(err_hint_text(), "raise ulimit -n, now "), "%s", err_hint_text());
    FAILS(connect_with(1, 0, 0, 600), ERR_RENDEZVOUS,
          "rank 1 has no file descriptor left for its connection to rank 0");
    /* what a stranger has comes back */
    FAILS(connect_with(0, 2, 1, 0.2), ERR_RENDEZVOUS, "rank 0 and rank 1 do not connect in 0.2 s");
}

/* The first port is ours: the second is taken, or a later one if somebody has that, too. */
TEST(data_ports)
{
    const int ours = net_listen_on("127.0.0.1", 0), port = net_local_port(ours);
    char address[MESH_ADDRESS_BYTES];
    int got = 0;
    Mesh *m;
    OK(mesh_open(0, 2, (MeshPlace){ "127.0.0.1", port, 1 }, (MeshKey){ "a secret of tests", "a start" }, &m));
    mesh_address(m, address);
    mesh_close(m);
    CHECK_MSG(sscanf(address, "127.0.0.1 %d", &got) == 1 && got > port && got < port + MESH_PORTS, "%d, not above %d",
              got, port);
    FAILS(mesh_open(0, 2, (MeshPlace){ "127.0.0.1", port, 0 }, (MeshKey){ "a secret of tests", "a start" }, &m),
          ERR_RENDEZVOUS, "of this rank are all taken");
    close(ours);
    FAILS(mesh_open(0, 2, (MeshPlace){ "127.0.0.1", 49151, 1093 }, (MeshKey){ "a secret of tests", "a start" }, &m),
          ERR_CONFIG, "49151, 50244, ... of this rank, for 1093 ranks on its host, lie beyond 65535");
    CHECK_MSG(strstr(err_hint_text(), "of at most 48048, or 0"), "%s", err_hint_text());
}

/* (Gloo's world raises the limit to the hard one, so that is low, and others have the descriptors) */
static void gloo_without_descriptors(int rank, int size, void *arg)
{
    enum { MOST = 24 };
    GlooOptions o = {
        0, 2, "127.0.0.1", "a secret of tests", "a start", 0.05, { shared_page, shared_set, shared_get }
    };
    GlooWorld *world;
    int taken[MOST], count = 0;
    CHECK(rank == 0 && size == 1 && !arg);
    const int next = dup(0);
    close(next);
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){ (rlim_t)next + MOST - 1, (rlim_t)next + MOST - 1 }) == 0);
    while (count < MOST && (taken[count] = dup(0)) >= 0) count++;
    for (int more = 0; more < 2; more++) {
        FAILS(gloo_world_open(o, &world), ERR_RENDEZVOUS, "");
        CHECK_MSG(strstr(err_hint_text(), "raise ulimit -n, now "), "%d: %s, %s", more, err_message(), err_hint_text());
        close(taken[--count]);
    }
    while (count) close(taken[--count]);
}

TEST(gloo_without_descriptors)
{
    if (SANITIZED) SKIP("UBSan asks by a pipe whether an exception's memory is there");
    fork_ranks(gloo_without_descriptors, 1, NULL, -1, CASE_S);
}

TEST(without_descriptors) { fork_ranks(without_descriptors, 1, NULL, -1, CASE_S); }

TEST_MAIN
