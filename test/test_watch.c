/*
 * Liveness between processes: one rank is killed, stopped, loops, leaves; every other must name it, for what it is: the
 * limits that have nothing to do with it are out of reach. And the judge alone, with made-up times.
 */
#include "ranks.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "comm/gloo.h"
#include "boot/greet.h"
#include "boot/judge.h"
#include "boot/watch.h"
#include "scratch.h"
#include "train/speaker.h"

#define FREEZE_S 1.0
#define STALL_S 1.0
#define NEVER_S 300.0 /* a limit that no test lasts for */
#define END_S 30.0    /* all have ended long before */

static Ranks ranks;

typedef enum { WORK, NO_WATCH, LOOP, CHAIN, LEAVE, REPORT_ALL, DIE_IN_A_CALL, FINISH, FINISH_LATE } Act;

typedef struct {
    int size, port, actor; /* the rank that does what `act` says; -1: all */
    Act act;
    double freeze_s, stall_s;
    int exit_code;
} Plan;

/* ---- what a rank does ---- */

static double opened_at;
static CommObserver dp, tp;

/* Ends the process, as the verdict does in a run. */
static void on_verdict(void *context, const Verdict *v)
{
    static const char *const names[WATCH_WHAT_COUNT] = { "killed", "frozen", "hung", "left", "error" };
    (void)context;
    fprintf(out, "%.6f|verdict|%s|%d|%d|%s|%s\n", test_now(), names[v->what], v->rank, v->exit_code, v->host, v->text);
    fflush(out);
    _exit(v->exit_code);
}

static int open_both(int rank, const Plan *p, Store **s, Watch **w)
{
    Boot b = boot_of(rank, p->size, p->port);
    if (store_open(&b, 20, s) || watch_open(*s, p->freeze_s, p->stall_s, on_verdict, NULL, w)) {
        fprintf(out, "%.6f|error|%s\n", test_now(), err_message());
        return 1;
    }
    opened_at = test_now();
    dp = watch_join(*w, 7, "dp");
    tp = watch_join(*w, 3, "tp");
    return 0;
}

/* Steps of 20 ms, with a call on each communicator. */
static void work(Watch *w, int steps)
{
    for (uint64_t step = 16; step < 16 + (uint64_t)steps; step++) {
        watch_phase(w, PHASE_STEP, (int64_t)step);
        observer_issued(dp, step);
        observer_completed(dp, step);
        observer_issued(tp, step);
        usleep(20000);
        observer_completed(tp, step);
    }
}

static Err set_in_store(void *user, const char *key, const void *bytes, int64_t n)
{
    return store_set(user, key, bytes, (size_t)n);
}

static Err get_from_store(void *user, const char *key, void *bytes, int64_t cap, int64_t *n, double timeout_s)
{
    size_t size;
    TRY(store_get(user, key, bytes, (size_t)cap, &size, timeout_s));
    *n = (int64_t)size;
    return ERR_OK;
}

/* A pipeline, over Gloo: each waits for what the next rank sends; the actor, the last, hangs or is ended. */
static int chain(int rank, const Plan *p, Store *s, Watch *w)
{
    static const int members[] = { 0, 1, 2, 3 };
    GlooOptions o = { .rank = rank,
                      .size = p->size,
                      .address = "127.0.0.1",
                      .secret = "a secret of tests",
                      .start = "a start",
                      .timeout_s = 20,
                      .store = { s, set_in_store, get_from_store } };
    GlooWorld *world;
    Device device;
    Comm pp;
    Event done;
    uint8_t x[100];
    Verdict v;
    if (gloo_world_open(o, &world) || comm_open_gloo(world, &pp, "pp", members, p->size) ||
        device_open(&device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }))
        return 1;
    comm_observe(&pp, watch_join(w, 9, "pp"));
    event_init(&done);
    for (int i = 0; i < 8; i++) { /* ranks in the middle issue two, those at the ends one */
        const CommMessage up = { .send = true, .peer = rank + 1, .data = x, .bytes = 10 };
        const CommMessage down = { .send = false, .peer = rank - 1, .data = x, .bytes = 10 };
        if (rank < p->size - 1 && comm_exchange(&pp, &device.stream, &up, 1, NULL)) return 1;
        if (rank && comm_exchange(&pp, &device.stream, &down, 1, NULL)) return 1;
    }
    fprintf(out, "%.6f|ready|%d\n", test_now(), rank);
    const CommMessage last = { .peer = rank + 1, .data = x, .bytes = sizeof x,
                               .what = { MESSAGE_GRADIENT, (uint16_t)rank, 5 } };
    if (rank == p->actor) usleep(20000000);
    Err err = comm_exchange(&pp, &device.stream, &last, 1, &done);
    if (!err) err = comm_sum_i64(&pp, &device.stream, (int64_t[]){ 1 }, 1, NULL); /* behind it, also of the actor */
    watch_report(w, err, err_message(), &v);
    usleep(2000000); /* on_verdict ends the process */
    return 1;
}

static int run_rank(int rank, void *arg)
{
    const Plan *p = arg;
    bool acts = rank == p->actor || p->actor < 0;
    Store *s;
    Watch *w;
    if (acts && p->act == NO_WATCH) {
        Boot b = boot_of(rank, p->size, p->port);
        if (store_open(&b, 20, &s)) return 1;
        usleep(300000);
        fprintf(out, "%.6f|ready|%d\n", test_now(), rank);
        store_close(s, 3);
        return 2;
    }
    if (open_both(rank, p, &s, &w)) return 1;
    for (int i = 0; i < 15; i++) { /* 0.3 s; all ranks are then in step 15 */
        watch_phase(w, PHASE_STEP, i + 1);
        observer_issued(dp, (uint64_t)i + 1);
        usleep(20000);
        observer_completed(dp, (uint64_t)i + 1);
    }
    if (p->act == CHAIN) return chain(rank, p, s, w);
    fprintf(out, "%.6f|ready|%d\n", test_now(), rank);
    if (acts && p->act == LOOP) { /* outside of communication, while the others wait for it */
        for (volatile double x = 0;; x = x + 1) usleep(1000);
    }
    if (acts && p->act == LEAVE) {
        watch_close(w, p->exit_code, "the token file is damaged");
        store_close(s, 3);
        return p->exit_code;
    }
    if (acts && p->act == DIE_IN_A_CALL) { /* when a report of the others has arrived */
        if (store_set(s, "in the call", "", 0)) return 1;
        while (watch_state(w, NULL) == WATCH_FINE) usleep(1000);
        fprintf(out, "%.6f|dying|\n", test_now());
        raise(SIGKILL);
    }
    if (p->act == REPORT_ALL || p->act == DIE_IN_A_CALL) { /* the others' call fails */
        Verdict v;
        if (p->act == DIE_IN_A_CALL && store_get(s, "in the call", NULL, 0, NULL, 10)) return 1;
        if (!acts && p->act == REPORT_ALL) /* the actor is the first */
            while (watch_state(w, NULL) == WATCH_FINE) usleep(1000);
        bool told = watch_report(w, ERR_PEER, "dp: call 16 failed: connection closed by peer", &v);
        fprintf(out, "%.6f|reported|%d\n", test_now(), told);
        usleep((useconds_t)(END_S * 1e6)); /* on_verdict ends the process */
        return 1;
    }
    if (p->act == LOOP) {
        observer_issued(dp, 16);
        usleep((useconds_t)(END_S * 1e6));
    }
    work(w, p->act == FINISH_LATE && acts ? 50 : p->act == FINISH || p->act == FINISH_LATE ? 10 : 1000);
    watch_close(w, p->exit_code, "");
    store_close(s, 10);
    fprintf(out, "%.6f|end|%d\n", test_now(), watch_state(NULL, NULL));
    return p->exit_code;
}

/* ---- what the test sees ---- */

static void start(Plan *p)
{
    p->port = free_port();
    ranks.count = 0;
    for (int r = 0; r < p->size; r++) ranks_start(&ranks, run_rank, r, p);
}

static bool all_ready(const Ranks *g)
{
    for (int i = 0; i < g->count; i++)
        if (!strstr(g->rank[i].said, "|ready|")) return false;
    return true;
}

static bool one_is_left(const Ranks *g)
{
    int left = 0;
    for (int i = 0; i < g->count; i++) left += !g->rank[i].ended || g->rank[i].pipe >= 0;
    return left <= 1;
}

static const char *line_of(int rank, const char *what)
{
    const char *p = strstr(ranks.rank[rank].said, what);
    while (p && p > ranks.rank[rank].said && p[-1] != '\n') p--;
    return p;
}

static double time_of(int rank, const char *what)
{
    const char *p = line_of(rank, what);
    return p ? atof(p) : NAN;
}

/* The verdict names the culprit by rank, host and pid, came after t0, and is the exit status. */
static void heard(int rank, const char *what, int culprit, int code, const char *text, double t0)
{
    char want[64], pid[32];
    snprintf(want, sizeof want, "|verdict|%s|%d|%d|", what, culprit, code);
    snprintf(pid, sizeof pid, "pid %d)", (int)ranks.rank[culprit].pid);
    const char *line = line_of(rank, "|verdict|");
    CHECK_MSG(line && strstr(line, want) && strstr(line, pid) && strstr(line, text), "rank %d, want %s '%s': %s", rank,
              want, text, ranks.rank[rank].said);
    double after = time_of(rank, "|verdict|") - t0;
    CHECK_MSG(after >= 0, "rank %d heard it after %.3f s", rank, after);
    CHECK_MSG(ranks.rank[rank].status == code, "rank %d: status %d, want %d", rank, ranks.rank[rank].status, code);
}

static void finish(void)
{
    CHECK_MSG(ranks_listen(&ranks, END_S, NULL), "the ranks did not end");
    CHECK_MSG(ranks_end(&ranks) == 0, "processes were left over");
}

/* ---- one rank is killed ---- */

TEST(killed)
{
    for (int victim = 0; victim < 4; victim++) {
        Plan p = { .size = 4, .actor = -2, .freeze_s = NEVER_S, .stall_s = NEVER_S };
        start(&p);
        CHECK(ranks_listen(&ranks, END_S, all_ready));
        double t0 = test_now();
        kill(ranks.rank[victim].pid, SIGKILL);
        finish();
        for (int r = 0; r < 4; r++)
            if (r != victim) heard(r, "killed", victim, 7, victim ? "in step" : "lost", t0);
        CHECK(ranks.rank[victim].status == -SIGKILL);
    }
}

/* The others' calls fail at once, and they say so before rank 0 knows of the death. */
TEST(killed_while_others_report)
{
    Plan p = { .size = 4, .actor = 2, .act = DIE_IN_A_CALL, .freeze_s = NEVER_S, .stall_s = NEVER_S };
    start(&p);
    finish();
    double t0 = time_of(2, "|dying|");
    for (int r = 0; r < 4; r++)
        if (r != 2) heard(r, "killed", 2, 7, "in step", t0);
}

TEST(two_killed)
{
    Plan p = { .size = 4, .actor = -2, .freeze_s = NEVER_S, .stall_s = NEVER_S };
    start(&p);
    CHECK(ranks_listen(&ranks, END_S, all_ready));
    double t0 = test_now();
    kill(ranks.rank[3].pid, SIGKILL);
    kill(ranks.rank[1].pid, SIGKILL);
    finish();
    bool first_is_3 = line_of(0, "|verdict|killed|3|") != NULL; /* rank 0 may see both at once */
    for (int r = 0; r < 4; r += 2)
        heard(r, "killed", first_is_3 ? 3 : 1, 7, first_is_3 ? "also lost: rank 1" : "also lost: rank 3", t0);
}

/* ---- one rank is stopped ---- */

TEST(frozen)
{
    for (int victim = 0; victim < 4; victim++) {
        Plan p = { .size = 4, .actor = -2, .freeze_s = FREEZE_S, .stall_s = 0 };
        start(&p);
        CHECK(ranks_listen(&ranks, END_S, all_ready));
        double t0 = test_now();
        kill(ranks.rank[victim].pid, SIGSTOP);
        ranks_listen(&ranks, END_S, one_is_left);
        for (int r = 0; r < 4; r++)
            if (r != victim) heard(r, "frozen", victim, 7, "no sign of life", t0);
        for (int r = 0; r < 4; r++)
            if (r != victim) CHECK(time_of(r, "|verdict|") - t0 > 0.5 * FREEZE_S);
        kill(ranks.rank[victim].pid, SIGCONT); /* too late: it learns that it is out */
        finish();
        CHECK_MSG(ranks.rank[victim].status == 7, "rank %d: status %d: %s", victim, ranks.rank[victim].status,
                  ranks.rank[victim].said);
    }
}

/* All are stopped for longer than the threshold (a suspended laptop, a debugger): nobody is to blame. */
TEST(all_stopped_for_a_while)
{
    for (int first = 0; first < 3; first += 2) { /* who wakes first finds the others silent */
        Plan p = { .size = 3, .actor = -1, .act = FINISH_LATE, .freeze_s = 1, .stall_s = 5 };
        start(&p);
        CHECK(ranks_listen(&ranks, END_S, all_ready));
        for (int r = 0; r < 3; r++) kill(ranks.rank[r].pid, SIGSTOP);
        usleep(1700000);
        for (int r = 0; r < 3; r++) {
            kill(ranks.rank[(first + r) % 3].pid, SIGCONT);
            usleep(100000);
        }
        finish();
        for (int r = 0; r < 3; r++)
            CHECK_MSG(ranks.rank[r].status == 0, "rank %d: status %d: %s", r, ranks.rank[r].status, ranks.rank[r].said);
    }
}

/* ---- one rank loops ---- */

TEST(hung)
{
    for (int victim = 0; victim < 4; victim += 3) {
        Plan p = { .size = 4, .actor = victim, .act = LOOP, .freeze_s = NEVER_S, .stall_s = STALL_S };
        start(&p);
        CHECK(ranks_listen(&ranks, END_S, all_ready));
        double t0 = test_now();
        finish();
        for (int r = 0; r < 4; r++)
            heard(r, "hung", victim, 8, "has issued 15 calls on 'dp'", t0);
        CHECK(strstr(ranks.rank[1].said, "waits there in call 16") != NULL);
    }
}

/* Ranks 0, 1, 2 wait in a receive, each for the next; rank 3 is hung, killed or stopped. Nobody else is blamed. */
TEST(end_of_a_chain_of_receives)
{
    static const char *const ends[] = { "hung", "killed", "frozen" };
    static const char *const text[] = { "rank 2 waits on 'pp' for it to send: gradient of micro-batch 5 for stage 2",
                                        "in step", "no sign of life" };
    for (int i = 0; i < 3; i++) {
        Plan p = { .size = 4, .actor = 3, .act = CHAIN, .freeze_s = i == 2 ? FREEZE_S : NEVER_S,
                   .stall_s = i ? 0 : STALL_S };
        start(&p);
        CHECK(ranks_listen(&ranks, END_S, all_ready));
        double t0 = test_now();
        if (i) kill(ranks.rank[3].pid, i == 1 ? SIGKILL : SIGSTOP);
        if (i == 2) ranks_listen(&ranks, END_S, one_is_left);
        else finish();
        for (int r = 0; r < 3; r++) heard(r, ends[i], 3, i ? 7 : 8, text[i], t0);
        if (i == 2) kill(ranks.rank[3].pid, SIGCONT);
        if (i == 2) finish();
    }
}

/* ---- a rank leaves ---- */

TEST(left_with_an_error)
{
    for (int leaver = 0; leaver < 4; leaver += 2) {
        Plan p = { .size = 4, .actor = leaver, .act = LEAVE, .freeze_s = NEVER_S, .stall_s = NEVER_S, .exit_code = 3 };
        start(&p);
        CHECK(ranks_listen(&ranks, END_S, all_ready));
        finish();
        double t0 = time_of(leaver, "|ready|");
        for (int r = 0; r < 4; r++)
            if (r != leaver)
                heard(r, "left", leaver, 3, "left with exit status 3: the token file is damaged", t0);
        CHECK(ranks.rank[leaver].status == 3 && !line_of(leaver, "|verdict|"));
    }
}

TEST(left_before_it_was_watched)
{
    Plan p = { .size = 3, .actor = 1, .act = NO_WATCH, .freeze_s = NEVER_S, .stall_s = NEVER_S };
    start(&p);
    finish();
    for (int r = 0; r < 3; r += 2) heard(r, "error", 1, 7, "before its watch", time_of(1, "|ready|"));
}

TEST(all_report_one_is_named)
{
    Plan p = { .size = 3, .actor = 1, .act = REPORT_ALL, .freeze_s = NEVER_S, .stall_s = NEVER_S };
    start(&p);
    finish();
    for (int r = 0; r < 3; r++)
        heard(r, "error", 1, 7, "reports: dp: call 16 failed", time_of(1, "|ready|"));
}

TEST(orderly_ends_are_nobodys_fault)
{
    for (int i = 0; i < 3; i++) { /* all at once; rank 0 late; rank 2 late, after a stop on request */
        Plan p = { .size = 4, .actor = i == 1 ? 0 : 2, .act = i ? FINISH_LATE : FINISH };
        p.freeze_s = p.stall_s = NEVER_S, p.exit_code = i == 2 ? 75 : 0;
        start(&p);
        finish();
        for (int r = 0; r < 4; r++)
            CHECK_MSG(ranks.rank[r].status == p.exit_code && line_of(r, "|end|") && !line_of(r, "|verdict|"),
                      "rank %d: status %d: %s", r, ranks.rank[r].status, ranks.rank[r].said);
    }
}

/* ---- who speaks ---- */

TEST(one_rank_of_a_start_speaks_whatever_another_start_does)
{
    const char *dir = in_dir("run");
    static Speaker two[2], other, later;
    OK(file_make_dirs(dir));
    for (int r = 0; r < 2; r++) speaker_open(&two[r], dir, "a secret of tests", "a start");
    speaker_open(&other, dir, "a secret of tests", "another start");
    CHECK(speaker_is_me(&other, 0));
    CHECK(speaker_is_me(&two[1], 0));
    speaker_open(&other, dir, "a secret of tests", "another start");
    CHECK(!speaker_is_me(&two[0], 0) && !speaker_is_me(&two[1], 1));
    /* however the file server's clock goes: a start's file is no other start's */
    struct timespec early[2] = { { two[1].since.tv_sec + 1000, 0 }, { two[1].since.tv_sec + 1000, 0 } };
    CHECK(utimensat(AT_FDCWD, two[0].path, early, 0) == 0 && !speaker_is_me(&two[0], 0));
    CHECK(utimensat(AT_FDCWD, two[0].path, NULL, 0) == 0);
    /* the name tells nothing of the key */
    char key[40];
    unsigned long long first;
    const GreetKey of = greet_key("a secret of tests", "a start");
    memcpy(&first, of.bytes, sizeof first);
    snprintf(key, sizeof key, "%016llx", first);
    CHECK(!strstr(two[0].path, key) && strstr(two[0].path, ".spoken-"));
    /* the same job once more, later: what is there is of the last time */
    speaker_open_job(&later, dir, "a secret of tests", "a start");
    later.since.tv_sec += 60;
    CHECK(speaker_is_me(&later, 0) && !speaker_is_me(&two[0], 0));
    /* of long ago */
    struct timespec old[2] = { { 1000, 0 }, { 1000, 0 } };
    CHECK(utimensat(AT_FDCWD, other.path, old, 0) == 0 && file_exists(other.path));
    speaker_open(&two[0], dir, "a secret of tests", "a start");
    CHECK(!file_exists(other.path) && file_exists(two[0].path));
}

/* ---- the judge alone ---- */

typedef struct {
    uint64_t issued[3], completed[3]; /* of communicators 1, 2, 3; issued 99: not a member */
} Calls;

static void tell_beat(Judge *j, double now, int rank, double stall_s, const Calls *calls)
{
    struct {
        WatchBeat head;
        WatchComm comm[3];
    } b = { .head = { .phase = PHASE_STEP, .step = 5, .beat_s = 0.5, .freeze_s = 15, .stall_s = stall_s } };
    for (int i = 0; calls && i < 3; i++) {
        if (calls->issued[i] == 99) continue;
        WatchComm *c = &b.comm[b.head.comms++];
        *c = (WatchComm){ .id = (uint32_t)i + 1, .issued = calls->issued[i], .completed = calls->completed[i],
                            .waits_for = OBSERVER_NOBODY };
        snprintf(c->name, sizeof c->name, "c%d", i + 1);
    }
    CHECK(judge_beat(j, now, rank, &b, sizeof b.head + b.head.comms * sizeof *b.comm));
}

static Judge *judge_of(int size, double now)
{
    Judge *j = judge_open(size);
    for (int r = 0; r < size; r++) {
        judge_name(j, r, "h", 100 + r);
        judge_watched(j, now, r);
    }
    return j;
}

/* The same beats over and over; the verdict. */
static Verdict hang_of(int size, const Calls *calls)
{
    Verdict v = { .rank = -1 };
    Judge *j = judge_of(size, 0);
    bool given = false;
    for (double now = 0.5; now < 60 && !given; now += 0.5) {
        for (int r = 0; r < size; r++) tell_beat(j, now, r, 30, &calls[r]);
        given = judge_tick(j, now, &v);
        if (given) CHECK_MSG(now > 30 && now < 32, "judged at %.1f s", now);
    }
    CHECK(given);
    judge_close(j);
    return v;
}

/* Rank 2 is stopped long before freeze_s. It said last that it waits for rank 0, as the others wait for it. */
TEST(silence_comes_before_counters)
{
    const Calls calls[] = { { { 3, 99, 99 }, { 2, 99, 99 } },
                            { { 3, 99, 99 }, { 2, 99, 99 } },
                            { { 3, 99, 99 }, { 2, 99, 99 } } };
    Verdict v = { .rank = -1 };
    Judge *j = judge_of(3, 0);
    bool given = false;
    for (double now = 0.5; now < 30 && !given; now += 0.5) {
        for (int r = 0; r < 3; r++)
            if (r < 2 || now < 2) tell_beat(j, now, r, 4, &calls[r]);
        given = judge_tick(j, now, &v);
    }
    CHECK_MSG(given && v.rank == 2 && v.what == WATCH_HUNG, "rank %d: %s", v.rank, v.text);
    CHECK_MSG(strstr(v.text, "rank 2 (host h, pid 102) gave no sign of life for"), "%s", v.text);
    judge_close(j);
}

/* The verdict where the last rank beats no more, just before it comes. */
static Verdict hang_with_a_late_rank(int size, const Calls *calls)
{
    Verdict v = { .rank = -1 };
    Judge *j = judge_of(size, 0);
    bool given = false;
    for (double now = 0.5; now < 40 && !given; now += 0.5) {
        for (int r = 0; r < size; r++)
            if (r < size - 1 || now < 27) tell_beat(j, now, r, 30, &calls[r]);
        given = judge_tick(j, now, &v);
    }
    CHECK(given && v.what == WATCH_HUNG);
    judge_close(j);
    return v;
}

/* A watch thread that comes late has no part in what the others surely wait for. */
TEST(waiting_without_a_silent_rank_comes_first)
{
    /* rank 0 waits for 1 on 'c1', which waits for 0 on 'c2' */
    Calls circle[] = { { { 3, 4, 99 }, { 2, 4, 0 } }, { { 2, 5, 99 }, { 2, 4, 0 } }, { { 3, 99, 9 }, { 2, 0, 9 } } };
    Verdict v = hang_with_a_late_rank(3, circle);
    CHECK_MSG(v.rank == 0 && strstr(v.text, "in a circle"), "rank %d: %s", v.rank, v.text);
    /* rank 1 is outside all calls */
    Calls end[] = { { { 3, 4, 99 }, { 2, 4, 0 } }, { { 2, 4, 99 }, { 2, 4, 0 } }, { { 3, 99, 9 }, { 2, 0, 9 } } };
    v = hang_with_a_late_rank(3, end);
    CHECK_MSG(v.rank == 1 && strstr(v.text, "it has issued 2 calls on 'c1'"), "rank %d: %s", v.rank, v.text);
    /* it is in a call with the silent one */
    Calls shared[] = { { { 3, 99, 99 }, { 2, 0, 0 } }, { { 2, 5, 99 }, { 2, 4, 0 } }, { { 99, 5, 9 }, { 0, 4, 9 } } };
    v = hang_with_a_late_rank(3, shared);
    CHECK_MSG(v.rank == 2 && strstr(v.text, "gave no sign of life"), "rank %d: %s", v.rank, v.text);
    /* a circle, one of which waits for the silent one, too */
    Calls both[] = { { { 3, 4, 8 }, { 2, 4, 7 } }, { { 2, 5, 99 }, { 2, 4, 0 } }, { { 99, 99, 8 }, { 0, 0, 7 } } };
    v = hang_with_a_late_rank(3, both);
    CHECK_MSG(v.rank == 2 && strstr(v.text, "gave no sign of life"), "rank %d: %s", v.rank, v.text);
}

TEST(the_culprit_of_a_hang_is_waited_for)
{
    /* rank 2 issued less on communicator 1 */
    Calls simple[] = { { { 8, 4, 4 }, { 7, 4, 4 } }, { { 8, 4, 4 }, { 7, 4, 4 } }, { { 7, 4, 4 }, { 7, 4, 4 } } };
    Verdict v = hang_of(3, simple);
    CHECK_MSG(v.what == WATCH_HUNG && v.rank == 2 && v.exit_code == 8, "%s", v.text);
    CHECK_MSG(strstr(v.text, "issued 7 calls on 'c1'") && strstr(v.text, "in call 8"), "%s", v.text);
    /* a chain: 0 waits for 1 on 'c1', 1 for 3 on 'c2', 2 for 3 on 'c3': 1 has issued little but is not to blame */
    Calls chain[] = { { { 8, 99, 99 }, { 7, 0, 0 } },
                      { { 3, 5, 99 }, { 3, 4, 0 } },
                      { { 99, 99, 9 }, { 0, 0, 8 } },
                      { { 99, 4, 8 }, { 0, 4, 8 } } };
    v = hang_of(4, chain);
    CHECK_MSG(v.rank == 3, "%s", v.text);
    /* issued ahead: the others wait in call 6, which rank 1 has issued and rank 0 not */
    Calls ahead[] = { { { 5, 0, 0 }, { 5, 0, 0 } }, { { 6, 0, 0 }, { 5, 0, 0 } }, { { 9, 0, 0 }, { 5, 0, 0 } } };
    v = hang_of(3, ahead);
    CHECK_MSG(v.rank == 0, "%s", v.text);
    /* all issued the same call, which does not end: the lowest number says nothing; somebody is named all the same */
    Calls equal[] = { { { 5, 0, 0 }, { 4, 0, 0 } }, { { 6, 0, 0 }, { 4, 0, 0 } } };
    v = hang_of(2, equal);
    CHECK_MSG(v.rank == 0, "%s", v.text);
    /* nobody waits but for rank 1's own work */
    Calls outside[] = { { { 5, 99, 0 }, { 4, 0, 0 } }, { { 99, 3, 0 }, { 0, 3, 0 } }, { { 5, 99, 0 }, { 4, 0, 0 } } };
    v = hang_of(3, outside);
    CHECK_MSG(v.rank == 1, "%s", v.text);
}

/* Who is in an exchange: rank r waits for waits_for[r] (-1: it is outside all calls), in the direction taken[r]. */
static Verdict exchange_hang_of(int size, const int *waits_for, const bool *taken, const uint64_t *exchanges)
{
    Verdict v = { .rank = -1 };
    Judge *j = judge_of(size, 0);
    bool given = false;
    for (double now = 0.5; now < 60 && !given; now += 0.5) {
        for (int r = 0; r < size; r++) {
            const bool waits = waits_for[r] >= 0;
            struct {
                WatchBeat head;
                WatchComm comm;
            } b = {
                .head = { .phase = PHASE_STEP, .step = 5, .comms = 1, .beat_s = 0.5, .freeze_s = 15, .stall_s = 30 },
                .comm = { .id = 9,
                          .name = "pp",
                          .issued = 4,
                          .completed = 4,
                          .exchanges_issued = exchanges[r] + waits,
                          .exchanges_completed = exchanges[r],
                          .waits_for = waits ? waits_for[r] : OBSERVER_NOBODY,
                          .waits_in = waits && taken[r] ? WAITS_IN_SEND : WAITS_IN_RECEIVE,
                          .waits_what = { MESSAGE_ACTIVATION, (uint16_t)r, 7 } }
            };
            CHECK(judge_beat(j, now, r, &b, sizeof b));
        }
        given = judge_tick(j, now, &v);
    }
    CHECK(given && v.what == WATCH_HUNG);
    judge_close(j);
    return v;
}

TEST(waits_in_exchanges_are_followed)
{
    const bool receive[5] = { false };
    /* the ends of a pipeline have issued the fewest exchanges, and wait; rank 2 computes for ever */
    Verdict v = exchange_hang_of(5, (int[]){ 1, 2, -1, 2, 3 }, receive, (uint64_t[]){ 3, 7, 8, 7, 2 });
    CHECK_MSG(v.rank == 2 &&
                  strstr(v.text, "rank 1 waits on 'pp' for it to send: activation of micro-batch 7 for stage 1"),
              "%s", v.text);
    /* a message that is not taken */
    v = exchange_hang_of(3, (int[]){ 1, 2, -1 }, (bool[]){ true, true, false }, (uint64_t[]){ 9, 9, 1 });
    CHECK_MSG(v.rank == 2 && strstr(v.text, "rank 1 waits on 'pp' for it to take: activation"), "%s", v.text);
    /* a circle, with a rank that waits for one of it */
    v = exchange_hang_of(4, (int[]){ 2, 2, 3, 1 }, receive, (uint64_t[]){ 1, 5, 5, 5 });
    CHECK_MSG(v.rank == 1 && strstr(v.text, "rank 3 waits on 'pp' for it to send") && strstr(v.text, "in a circle"),
              "%s", v.text);
    /* all wait but rank 0, for which nobody does */
    v = exchange_hang_of(3, (int[]){ -1, 2, 1 }, receive, (uint64_t[]){ 9, 5, 5 });
    CHECK_MSG(v.rank == 1 && strstr(v.text, "in a circle"), "%s", v.text);
}

/* A slow rank keeps the others waiting, but gets on: no hang. */
TEST(who_gets_on_does_not_hang)
{
    Calls waiting = { { 8, 0, 0 }, { 7, 0, 0 } }, busy = { { 7, 0, 0 }, { 7, 0, 0 } };
    Verdict v;
    Judge *j = judge_of(2, 0);
    for (double now = 0.5; now < 300; now += 0.5) {
        tell_beat(j, now, 0, 30, &waiting);
        busy.issued[1] = busy.completed[1] = (uint64_t)(now / 20);
        tell_beat(j, now, 1, 30, &busy);
        CHECK(!judge_tick(j, now, &v));
    }
    judge_close(j);
    /* a longer limit of one rank holds for all; 0 is none */
    j = judge_of(2, 0);
    for (double now = 0.5; now < 100; now += 0.5) {
        tell_beat(j, now, 0, 30, &waiting);
        tell_beat(j, now, 1, now < 50 ? 0 : 110, &busy);
        CHECK(!judge_tick(j, now, &v));
    }
    judge_close(j);
}

TEST(causes_are_ranked)
{
    Verdict v;
    Judge *j = judge_of(4, 0);
    for (int r = 0; r < 4; r++) tell_beat(j, 0, r, 0, NULL);
    judge_report(j, 1.0, 0, 7, "call failed");
    CHECK(!judge_tick(j, 1.1, &v) && judge_is_judging(j));
    judge_left(j, 1.1, 1, 7, "rank 3 is gone");
    judge_left(j, 1.15, 2, 3, "bad data");
    CHECK(!judge_tick(j, 1.4, &v)); /* a report waits longer for its cause than a cause for another */
    CHECK(judge_tick(j, 1.5, &v) && v.what == WATCH_LEFT && v.rank == 2 && v.exit_code == 3);
    CHECK(!judge_tick(j, 2, &v)); /* once */
    judge_close(j);

    j = judge_of(4, 0);
    for (int r = 0; r < 4; r++) tell_beat(j, 0, r, 0, NULL);
    judge_left(j, 1.0, 2, 3, "bad data");
    judge_lost(j, 1.1, 2); /* its connection ends, too: nothing new */
    judge_report(j, 1.15, 3, 7, "call failed");
    judge_lost(j, 1.2, 3);
    CHECK(judge_tick(j, 1.35, &v) && v.what == WATCH_KILLED && v.rank == 3 && v.pid == 103 && v.exit_code == 7);
    judge_close(j);

    j = judge_of(4, 0); /* among equals the earliest */
    for (int r = 0; r < 4; r++) tell_beat(j, 0, r, 0, NULL);
    judge_lost(j, 1.0, 3);
    judge_lost(j, 1.1, 1);
    CHECK(judge_tick(j, 1.35, &v) && v.rank == 3 && strstr(v.text, "; also lost: rank 1"));
    judge_close(j);

    j = judge_of(2, 0);
    tell_beat(j, 0, 0, 0, NULL);
    tell_beat(j, 0, 1, 0, NULL);
    judge_was_away(j, 20);
    CHECK(!judge_tick(j, 34, &v) && !judge_is_judging(j));
    tell_beat(j, 34, 0, 0, NULL);
    CHECK(!judge_tick(j, 35.5, &v) && judge_tick(j, 35.9, &v) && v.what == WATCH_FROZEN && v.rank == 1);
    CHECK(!judge_beat(j, 36, 0, "abc", 3));
    judge_close(j);
}

TEST_MAIN
