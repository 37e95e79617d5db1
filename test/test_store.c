/*
 * The rendezvous and the key/value store, between processes on the loopback address. Who is to be there first, or to
 * go first, is waited for: nothing here takes it that a process has come so far after so many milliseconds.
 */
#include "ranks.h"

#include <dirent.h>

#include "base/clock.h"
#include "boot/link.h"
#include "boot/meet.h"
#include "boot/store.h"
#include "boot/supervised.h"

static Ranks ranks;

typedef struct {
    int size, port, as_rank[RANKS_MAX], attempt[RANKS_MAX];
    bool supervised;
    double timeout_s;
    const char *job;
    const char *facts[RANKS_MAX];
} Plan;

static Plan plan_of(int size)
{
    Plan p = { .size = size, .port = free_port(), .timeout_s = 100 };
    for (int i = 0; i < RANKS_MAX; i++) p.as_rank[i] = i;
    return p;
}

static int tell(Err err, double t0)
{
    double seconds = test_now() - t0;
    fprintf(out, "%s|%.6f|%.6f|%s%s\n", err_name(err), seconds, t0, err ? err_message() : "",
            err && err_is_elsewhere() ? " (elsewhere)" : "");
    return err_exit_code(err);
}

static Supervised shared;                  /* with no supervisor */
static volatile sig_atomic_t told_to_stop; /* by SIGUSR1 */
static void on_usr1(int sig) { (void)sig, told_to_stop = 1; }

static Err join(int i, const Plan *p, Store **s)
{
    Boot b = boot_of(p->as_rank[i], p->size, p->port);
    if (p->job) snprintf(b.job, sizeof b.job, "%s", p->job);
    b.attempt = p->attempt[i];
    if (p->supervised) b.supervised = &shared;
    signal(SIGUSR1, on_usr1);
    b.stop = &told_to_stop;
    return store_open(&b, p->timeout_s, s);
}

static void start(int (*fn)(int, void *), int first, int count, Plan *p)
{
    for (int i = first; i < first + count; i++) ranks_start(&ranks, fn, i, p);
}

/* (ten times as long on the slowest machine) */
static void finish(double seconds)
{
    CHECK_MSG(ranks_listen(&ranks, 10 * seconds, NULL), "the processes did not end");
    CHECK_MSG(ranks_end(&ranks) == 0, "processes were left over");
}

static void all_ok(void)
{
    for (int i = 0; i < ranks.count; i++)
        CHECK_MSG(ranks.rank[i].status == 0, "process %d: status %d: %s", i, ranks.rank[i].status, ranks.rank[i].said);
}

/* `size` ranks do `what`, and all end well in time. */
static void all_do(int (*what)(int, void *), int size, double seconds)
{
    ranks.count = 0;
    Plan p = plan_of(size);
    start(what, 0, size, &p);
    finish(seconds);
    all_ok();
}

static void says(int i, int status, const char *text)
{
    const RankProcess *p = &ranks.rank[i];
    CHECK_MSG(p->status == status, "process %d: status %d, want %d: %s", i, p->status, status, p->said);
    CHECK_MSG(strstr(p->said, text) != NULL, "process %d does not say '%s': %s", i, text, p->said);
}

static double seconds_of(int i)
{
    const char *p = strchr(ranks.rank[i].said, '|');
    return p ? atof(p + 1) : NAN;
}

/* On the clock of all processes. */
static double began_at(int i)
{
    const char *p = strchr(ranks.rank[i].said, '|');
    p = p ? strchr(p + 1, '|') : NULL;
    return p ? atof(p + 1) : NAN;
}

static bool last_has_spoken(const Ranks *g) { return g->rank[g->count - 1].said_bytes > 0; }

static bool first_has_ended(const Ranks *g) { return g->rank[0].ended && g->rank[0].pipe < 0; }

static bool last_has_ended(const Ranks *g)
{
    const RankProcess *p = &g->rank[g->count - 1];
    return p->ended && p->pipe < 0;
}

static void wait_for_listener(int port)
{
    int fd = -1;
    for (double end = test_now() + 60; fd < 0 && test_now() < end; usleep(1000)) fd = connect_at(port);
    CHECK_MSG(fd >= 0, "nobody listens on port %d", port);
    close(fd);
}

/* ---- values ---- */

#define NEED(cond) \
    if (!(cond)) return fprintf(out, "line %d: %s (%s)\n", __LINE__, #cond, err_message()), 1

static int use_values(int rank, void *arg)
{
    Store *s;
    char key[32], text[64] = "";
    size_t size = 0;
    int64_t sum = 0;
    static char big[STORE_VALUE_BYTES + 1], back[STORE_VALUE_BYTES];
    NEED(!join(rank, arg, &s));
    int n = ((Plan *)arg)->size;
    snprintf(key, sizeof key, "name/%d", rank);
    snprintf(text, sizeof text, "I am %d", rank);
    NEED(!store_set(s, key, text, strlen(text)));
    for (int r = 0; r < n; r++) { /* some are there, some are waited for */
        char want[64], got[64] = "";
        snprintf(key, sizeof key, "name/%d", r);
        snprintf(want, sizeof want, "I am %d", r);
        NEED(!store_get(s, key, got, sizeof got, &size, 10) && size == strlen(want) && !strcmp(got, want));
    }
    NEED(!store_add(s, "count", rank + 1, &sum) && sum >= rank + 1);
    NEED(!store_add(s, "met", 1, &sum));
    if (sum == n) NEED(!store_set(s, "all", "", 0));
    NEED(!store_get(s, "all", NULL, 0, &size, 10) && size == 0);
    NEED(!store_add(s, "count", 0, &sum) && sum == n * (n + 1) / 2);
    for (size_t i = 0; i < sizeof big; i++) big[i] = (char)(i * 7 + i / 1000);
    if (rank == n - 1) NEED(!store_set(s, "big", big, sizeof back));
    NEED(!store_get(s, "big", back, sizeof back, &size, 10) && size == sizeof back && !memcmp(big, back, size));
    NEED(store_set(s, "big", big, sizeof big) == ERR_RENDEZVOUS);      /* too long */
    NEED(store_get(s, "big", back, 10, &size, 10) == ERR_RENDEZVOUS);   /* too small a buffer */
    NEED(store_add(s, "met", 0, NULL) == ERR_OK);                       /* and goes on */
    NEED(store_add(s, "name/0", 1, NULL) == ERR_RENDEZVOUS && strstr(err_message(), "no number"));
    NEED(!store_get(s, "name/0", text, sizeof text, &size, 10) && size == 6); /* and goes on */
    double t0 = test_now();
    NEED(store_get(s, "never", text, sizeof text, &size, 0.2) == ERR_PEER && strstr(err_message(), "'never'"));
    NEED(test_now() - t0 >= 0.199 && test_now() - t0 < 60);
    NEED(!store_get(s, "name/0", text, sizeof text, &size, 10) && size == 6); /* not the answer to that */
    NEED(!store_local_addr(s, text, sizeof text) && !strcmp(text, "127.0.0.1"));
    store_close(s, 10);
    return 0;
}

TEST(set_get_add)
{
    all_do(use_values, 4, 20);
}

static int just_open(int i, void *arg)
{
    Store *s;
    double t0 = test_now();
    Err err = join(i, arg, &s);
    int status = tell(err, t0);
    if (!err) store_close(s, 10);
    return status;
}

TEST(one_rank_alone)
{
    all_do(just_open, 1, 10);
}

/* Nobody waits for the limit, which is 20 s. */
TEST(eight_ranks_meet)
{
    all_do(just_open, 8, 20);
    for (int i = 0; i < 8; i++) CHECK_MSG(seconds_of(i) < 10, "rank %d: %.3f s", i, seconds_of(i));
}

/* The others look for rank 0 before it is there. */
TEST(rank_0_comes_last)
{
    ranks.count = 0;
    Plan p = plan_of(3);
    start(just_open, 1, 2, &p);
    ranks_listen(&ranks, 0.5, NULL);
    start(just_open, 0, 1, &p);
    finish(20);
    all_ok();
}

/* ---- ports ---- */

static int take_ports(int i, void *arg)
{
    (void)i, (void)arg;
    for (int k = 0; k < 5; k++) fprintf(out, "%d ", free_port());
    fprintf(out, "\n");
    return pause();
}

static bool two_have_spoken(const Ranks *g)
{
    return strchr(g->rank[0].said, '\n') && strchr(g->rank[1].said, '\n');
}

/* Two programs of this kind that run at once do not meet by mistake. */
TEST(tests_have_ports_of_their_own)
{
    ranks.count = 0;
    int port[2][5];
    for (int i = 0; i < 2; i++) ranks_start(&ranks, take_ports, i, NULL);
    CHECK(ranks_listen(&ranks, 10, two_have_spoken));
    for (int i = 0; i < 2; i++) {
        int *p = port[i];
        CHECK(sscanf(ranks.rank[i].said, "%d %d %d %d %d", &p[0], &p[1], &p[2], &p[3], &p[4]) == 5);
    }
    CHECK(ranks_end(&ranks) == 2);
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 5; k++) CHECK_MSG(abs(port[0][i] - port[1][k]) >= 20, "%d and %d", port[0][i], port[1][k]);
}

/* Something else listens on the first two ports: one talks first, one is silent; neither is ours. */
TEST(taken_ports)
{
    ranks.count = 0;
    Plan p = plan_of(4);
    int talker = listen_at(p.port), silent = listen_at(p.port + 1);
    CHECK(talker >= 0 && silent >= 0);
    start(just_open, 0, 4, &p);
    double end = test_now() + 60;
    while (!ranks_listen(&ranks, 0.02, NULL) && test_now() < end) {
        struct pollfd poll_talker = { .fd = talker, .events = POLLIN };
        if (poll(&poll_talker, 1, 0) <= 0) continue;
        int fd = accept4(talker, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) continue;
        char banner[300];
        memset(banner, 'x', sizeof banner);
        send(fd, banner, sizeof banner, MSG_NOSIGNAL);
        close(fd);
    }
    finish(1);
    all_ok();
    close(talker);
    close(silent);
}

TEST(no_port_is_free)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    int fds[BOOT_PORTS];
    p.timeout_s = 5;
    for (int i = 0; i < BOOT_PORTS; i++) fds[i] = i < 2 ? listen_at(p.port + i) : bind_at(p.port + i);
    start(just_open, 0, 1, &p);
    finish(12);
    says(0, 10, "all taken");
    for (int i = 0; i < BOOT_PORTS; i++) close(fds[i]);
}

/* Two jobs that were given one port: each finds its own. */
TEST(two_jobs_on_one_port)
{
    ranks.count = 0;
    Plan a = plan_of(3), b = a;
    a.job = "one";
    b.job = "the other";
    start(just_open, 0, 1, &a);
    start(just_open, 1, 2, &b);
    start(just_open, 1, 2, &a);
    start(just_open, 0, 1, &b);
    finish(20);
    all_ok();
}

TEST(another_job_is_named)
{
    ranks.count = 0;
    Plan a = plan_of(2), b = a;
    a.job = "job one";
    b.timeout_s = 3;
    start(just_open, 0, 1, &a);
    wait_for_listener(a.port);
    start(just_open, 1, 1, &b);
    CHECK(ranks_listen(&ranks, 60, last_has_ended));
    kill(ranks.rank[0].pid, SIGUSR1);
    finish(5);
    says(0, 10, " s for rank 1 of 2");
    says(1, 10, "belongs to another job");
}

/* Answers like the host of another job: with a proof that is not ours. */
static void answer_for_another_job(int listener)
{
    Call call;
    Answer answer = { .proof = { 1 } };
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0 && recv(fd, &call, sizeof call, MSG_WAITALL) == sizeof call);
    answer.call = call;
    CHECK(send(fd, &answer, sizeof answer, MSG_NOSIGNAL) == sizeof answer);
    close(fd);
}

/* An answer that the deadline cuts off is no finding: what that port is was known before. */
TEST(another_job_that_falls_silent_is_named)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    p.timeout_s = 1.5; /* after four answers patience with a port is longer than that */
    int listener = listen_at(p.port), answers = 0;
    start(just_open, 1, 1, &p);
    while (!ranks_listen(&ranks, 0.01, NULL) && answers < 4) {
        struct pollfd poll_listener = { .fd = listener, .events = POLLIN };
        if (poll(&poll_listener, 1, 10) == 1) answer_for_another_job(listener), answers++;
    }
    finish(10);
    says(0, 10, "belongs to another job");
    close(listener);
}

/* ---- who is missing, who is there twice ---- */

TEST(missing_ranks_are_named)
{
    ranks.count = 0;
    Plan p = plan_of(4);
    p.timeout_s = 1;
    start(just_open, 0, 1, &p);
    start(just_open, 2, 1, &p);
    finish(10);
    double first = fmin(began_at(0), began_at(1)); /* one's end may be the other's */
    for (int i = 0; i < 2; i++) {
        double patience = began_at(i) + seconds_of(i) - first;
        says(i, 10, "waited 1 s for ranks 1, 3 of 4");
        CHECK_MSG(patience > 0.9999 && seconds_of(i) < 60, "process %d: %.3f s, %.3f", i, seconds_of(i), patience);
    }
}

TEST(rank_0_missing)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    p.timeout_s = 1;
    start(just_open, 1, 1, &p);
    finish(10);
    says(0, 10, "waited 1 s for rank 0 of 2 at '127.0.0.1'");
    CHECK_MSG(seconds_of(0) >= 1 && seconds_of(0) < 60, "%.3f s", seconds_of(0));
}

/* Meets rank 0, says so, and no more. */
static int only_come(int i, void *arg)
{
    const Plan *p = arg;
    Boot b = boot_of(p->as_rank[i], p->size, p->port);
    Hello hello = greet_hello(&b);
    Meeting m;
    NEED(!meet_host(&b, &hello, p->timeout_s, clock_s() + p->timeout_s, &m));
    fprintf(out, "here\n");
    return pause();
}

/* Says who it is, and goes before it has heard its welcome, as a process does whose host is slow; then comes again. */
static int come_again(int i, void *arg)
{
    const Plan *p = arg;
    Boot b = boot_of(p->as_rank[i], p->size, p->port);
    const Hello hello = greet_hello(&b);
    const GreetKey key = greet_key(b.secret, b.job);
    Greeting g;
    Welcome w;
    Link l;
    link_open(&l, connect_at(p->port), 0);
    NEED(greet_call(&g, &l, &key, &hello, p->port));
    NEED(link_flush(&l));
    while (!g.called) { /* (the hello goes out when the answer has come) */
        const int got = link_fill(&l);
        NEED(got >= 0);
        usleep(1000);
        if (got == 0) continue;
        NEED(greet_caller(&g, &l, &w) == GREET_MORE && link_flush(&l));
    }
    link_close(&l);
    usleep(300 * 1000); /* (nothing fails if the host is slower than this: then both come at once) */
    return just_open(i, arg);
}

/* A rank is here when it has heard that it is: before, the end of its connection is not its own. */
TEST(a_rank_that_calls_again_is_not_lost)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    start(just_open, 0, 1, &p);
    wait_for_listener(p.port);
    start(come_again, 1, 1, &p);
    finish(20);
    all_ok();
}

/* Rank 1 dies, rank 2 has less patience, rank 3 never comes. */
TEST(a_rank_that_left_is_named)
{
    ranks.count = 0;
    Plan p = plan_of(4), hasty = p;
    hasty.timeout_s = 0.4;
    start(just_open, 0, 1, &p);
    start(only_come, 1, 1, &p);
    CHECK(ranks_listen(&ranks, 10, last_has_spoken));
    kill(ranks.rank[1].pid, SIGKILL);
    CHECK(ranks_listen(&ranks, 10, last_has_ended));
    start(just_open, 2, 1, &hasty);
    CHECK(ranks_listen(&ranks, 10, last_has_ended));
    kill(ranks.rank[0].pid, SIGUSR1);
    finish(5);
    char text[200], host[64];
    gethostname(host, sizeof host);
    snprintf(text, sizeof text, " s for ranks 1 (host %s, pid %d, came and left again), 3 of 4", host,
             (int)ranks.rank[1].pid);
    says(0, 10, text);
    says(2, 10, "waited 0.4 s for");
    says(2, 10, text);
}

/* Supervisors start workers anew one by one: whoever meets a later one's is over, with 7, and says nothing. */
TEST(an_earlier_start_is_over_when_a_later_worker_calls)
{
    ranks.count = 0;
    Plan p = plan_of(3);
    p.attempt[2] = 1;
    p.supervised = true;
    start(just_open, 0, 1, &p);
    wait_for_listener(p.port);
    start(only_come, 1, 1, &p);
    CHECK(ranks_listen(&ranks, 10, last_has_spoken));
    start(just_open, 2, 1, &p);
    CHECK(ranks_listen(&ranks, 10, first_has_ended));
    says(0, 7, "rank 2 (host ");
    says(0, 7, ") was started anew before all had met (elsewhere)");
    CHECK(ranks_end(&ranks) == 2); /* rank 2 calls on: it would meet those that are started next */
}

/* Rank 0 is no worker: nobody would start it again. */
TEST(a_rank_that_does_not_restart_says_so)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    p.attempt[1] = 1;
    start(just_open, 0, 1, &p);
    wait_for_listener(p.port);
    start(just_open, 1, 1, &p);
    CHECK(ranks_listen(&ranks, 10, first_has_ended));
    says(0, 10, "rank 0: rank 1 (host ");
    CHECK(ranks_end(&ranks) == 1);
}

TEST(a_worker_of_an_earlier_start_is_sent_away)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    p.attempt[0] = 2, p.attempt[1] = 1;
    p.supervised = true;
    start(just_open, 0, 1, &p);
    wait_for_listener(p.port);
    start(just_open, 1, 1, &p);
    CHECK(ranks_listen(&ranks, 10, last_has_ended));
    says(1, 7, "rank 0 was started anew (elsewhere)");
    p.attempt[1] = 2;
    start(just_open, 1, 1, &p);
    finish(20);
    CHECK(ranks.rank[0].status == 0 && ranks.rank[2].status == 0);
}

/* Like only_come; gives up at once, but is slow to go. */
static int give_up(int i, void *arg)
{
    const Plan *p = arg;
    Boot b = boot_of(p->as_rank[i], p->size, p->port);
    Hello hello = greet_hello(&b);
    Meeting m;
    Frame f;
    const double waited_s = 0.1, deadline = clock_s() + 10;
    NEED(!meet_host(&b, &hello, 10, deadline, &m));
    NEED(link_put(&m.link, FRAME_MISSING, 0, &waited_s, sizeof waited_s, NULL, 0) && link_flush(&m.link));
    NEED(link_wait(&m.link, &f, deadline) && f.kind == FRAME_FAIL);
    fprintf(out, "gave up\n");
    return pause();
}

/* Who has been told that ranks are missing does not count as there when these come. */
TEST(who_gave_up_is_missing)
{
    ranks.count = 0;
    Plan p = plan_of(3);
    start(just_open, 0, 1, &p);
    start(give_up, 1, 1, &p);
    CHECK(ranks_listen(&ranks, 10, last_has_spoken));
    p.timeout_s = 1;
    start(just_open, 2, 1, &p);
    CHECK(ranks_listen(&ranks, 10, last_has_ended));
    kill(ranks.rank[0].pid, SIGUSR1);
    kill(ranks.rank[1].pid, SIGKILL);
    finish(5);
    for (int i = 0; i < 3; i += 2) says(i, 10, " s for rank");
    says(2, 10, "came and gave up) of 3");
}

static void both_name(int i, int k)
{
    char a[32], b[32];
    snprintf(a, sizeof a, "pid %d", (int)ranks.rank[i].pid);
    snprintf(b, sizeof b, "pid %d", (int)ranks.rank[k].pid);
    for (int x = 0; x < 2; x++) {
        says(x ? i : k, 10, "two processes are rank");
        says(x ? i : k, 10, a);
        says(x ? i : k, 10, b);
    }
}

TEST(one_rank_twice)
{
    ranks.count = 0;
    Plan p = plan_of(3);
    p.as_rank[2] = 1;
    start(just_open, 0, 3, &p);
    finish(10);
    both_name(1, 2);
    says(0, 10, "two processes are rank 1 of 3");
    for (int i = 0; i < 3; i++) CHECK_MSG(seconds_of(i) < 60, "process %d: %.3f s", i, seconds_of(i));
}

TEST(rank_0_twice)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    p.as_rank[1] = 0;
    start(just_open, 0, 2, &p);
    finish(10);
    both_name(0, 1);
}

/* The first one, busy with something else, takes a while to answer. */
TEST(rank_0_twice_the_first_is_slow)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    p.as_rank[1] = 0;
    start(just_open, 0, 1, &p);
    wait_for_listener(p.port);
    kill(ranks.rank[0].pid, SIGSTOP);
    start(just_open, 1, 1, &p);
    ranks_listen(&ranks, 0.4, NULL); /* longer than the first look at it, shorter than the patience with it */
    kill(ranks.rank[0].pid, SIGCONT);
    finish(10);
    both_name(0, 1);
}

/* ---- strangers ---- */

static int meet_and_work(int i, void *arg)
{
    Store *s;
    double t0 = test_now();
    Err err = join(i, arg, &s);
    int status = tell(err, t0);
    if (err) return status;
    for (int k = 0; k < 200; k++) NEED(!store_add(s, "work", 1, NULL));
    char key[32], c;
    snprintf(key, sizeof key, "done/%d", i);
    NEED(!store_set(s, key, "x", 1));
    for (int r = 0; r < ((Plan *)arg)->size; r++) {
        snprintf(key, sizeof key, "done/%d", r);
        NEED(!store_get(s, key, &c, 1, NULL, 10));
    }
    store_close(s, 10);
    return status;
}

static long resident_kb(pid_t pid)
{
    char path[64], line[256];
    long kb = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) sscanf(line, "VmRSS: %ld", &kb);
    if (f) fclose(f);
    return kb;
}

static int open_files(pid_t pid)
{
    char path[64];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Garbage, right beginnings, huge lengths, half a greeting, hundreds that only connect. */
TEST(strangers_do_not_disturb)
{
    ranks.count = 0;
    Plan p = plan_of(3);
    signal(SIGPIPE, SIG_IGN);
    start(meet_and_work, 0, 1, &p);
    wait_for_listener(p.port);
    long before = resident_kb(ranks.rank[0].pid);
    int files_before = open_files(ranks.rank[0].pid);
    int fds[300];
    uint64_t seed = 5;
    static char junk[1 << 20];
    for (size_t i = 0; i < sizeof junk; i++) junk[i] = (char)test_rand(&seed);
    for (int i = 0; i < 300; i++) {
        fds[i] = connect_at(p.port);
        if (fds[i] < 0) continue;
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
        if (i % 5 == 1) send(fds[i], junk, sizeof junk, MSG_NOSIGNAL);
        if (i % 5 == 2) send(fds[i], "MGTRAIN1", 8, MSG_NOSIGNAL); /* the magic, and no more */
        if (i % 5 == 3)
            send(fds[i], "MGTRAIN1\1\0\0\0\0\0\0\0", 16, MSG_NOSIGNAL), send(fds[i], junk, 4096, MSG_NOSIGNAL);
        if (i % 5 == 4) send(fds[i], "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL);
    }
    for (int i = 0; i < 300; i += 7)
        if (fds[i] >= 0) close(fds[i]), fds[i] = -1;
    ranks_listen(&ranks, 0.2, NULL);
    long after = resident_kb(ranks.rank[0].pid);
    int files = open_files(ranks.rank[0].pid) - files_before;
    CHECK_MSG(files_before > 3 && files < 150, "rank 0 has %d files more open", files);
    CHECK_MSG(before > 0 && after > 0 && after - before < 8192, "memory of rank 0: %ld, then %ld KiB", before, after);
    start(meet_and_work, 1, 2, &p);
    finish(15);
    all_ok();
    for (int i = 1; i < 3; i++) CHECK_MSG(seconds_of(i) < 10, "rank %d: %.3f s", i, seconds_of(i));
    for (int i = 0; i < 300; i++)
        if (fds[i] >= 0) close(fds[i]);
}

/* What comes after a greeting: frames in any pieces, and none longer than agreed. */
TEST(frames_have_a_limit)
{
    int ends[2];
    Link l;
    Frame f;
    FrameHead head = { .bytes = 5, .kind = FRAME_SET, .id = 9 };
    char bytes[sizeof head + 5];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    link_open(&l, ends[0], 100);
    memcpy(bytes, &head, sizeof head);
    memcpy(bytes + sizeof head, "hello", 5);
    for (size_t i = 0; i < sizeof bytes; i++) {
        CHECK(link_frame(&l, &f) == 0);
        CHECK(write(ends[1], bytes + i, 1) == 1 && link_fill(&l) == 1);
    }
    CHECK(link_frame(&l, &f) == 1 && f.kind == FRAME_SET && f.id == 9 && f.bytes == 5 && !memcmp(f.data, "hello", 5));
    link_drop_frame(&l);
    CHECK(link_frame(&l, &f) == 0 && link_fill(&l) == 0);
    double t0 = test_now();
    CHECK(!link_wait(&l, &f, t0 + 0.1) && errno == ETIMEDOUT && test_now() - t0 >= 0.1 && test_now() - t0 < 60);
    static char flood[1 << 16];
    CHECK(write(ends[1], flood, sizeof flood) > 1000);
    for (int i = 0; i < 10; i++) link_fill(&l);
    CHECK(l.in_size <= 100 + sizeof head); /* the rest stays with the sender */
    l.in_size = 0;
    head.bytes = 101;
    memcpy(l.in, &head, sizeof head);
    l.in_size = sizeof head;
    CHECK(link_frame(&l, &f) == -1);
    head.bytes = UINT32_MAX;
    memcpy(l.in, &head, sizeof head);
    CHECK(link_frame(&l, &f) == -1);
    close(ends[1]);
    link_close(&l);
}

/* ---- limits ---- */

/* A rank that stores as much as it can has its share, and leaves the others theirs. */
static int fill_store(int i, void *arg)
{
    Store *s;
    char key[32];
    static char big[STORE_VALUE_BYTES];
    int values = 0, keys = 0;
    NEED(!join(i, arg, &s));
    for (; i == 1 && values < 100; values++) {
        snprintf(key, sizeof key, "big/%d", values);
        if (store_set(s, key, big, sizeof big)) break;
    }
    if (i == 1) NEED(values == 4 && strstr(err_message(), "no more room for this rank"));
    for (; i == 2 && keys < 5000; keys++) {
        snprintf(key, sizeof key, "small/%d", keys);
        if (store_set(s, key, "", 0)) break;
    }
    if (i == 2) NEED(keys == 1024 && strstr(err_message(), "no more room for this rank"));
    if (i == 1) NEED(!store_set(s, "big/0", "", 0) && !store_set(s, "big/4", big, sizeof big)); /* gives room */
    if (i == 0) NEED(!store_set(s, "mine", big, sizeof big) && !store_get(s, "mine", big, sizeof big, NULL, 10));
    store_close(s, 10);
    return 0;
}

TEST(a_rank_has_a_share_of_the_store) { all_do(fill_store, 3, 20); }

/* A second connection with the secret and the process's own number. */
static int call_again(const Store *s, LinkRole role, Link *l)
{
    Meeting again = { .key = store_meeting(s)->key };
    Greeting g;
    const Meeting *m = store_meeting(s);
    Hello hello = *store_hello(s);
    char why[200];
    hello.role = role;
    int fd = net_dial(m->addr, m->port, clock_s() + 5, why, sizeof why);
    if (fd < 0) return -1;
    link_open(l, fd, 0);
    if (!greet_call(&g, l, &again.key, &hello, m->port) ||
        greet_until(&g, l, &again.welcome, clock_s() + 5) != GREET_DONE)
        return -1;
    return (int)again.welcome.kind;
}

static int connect_twice(int i, void *arg)
{
    Store *s;
    Link watch, second;
    int64_t sum = 0;
    NEED(!join(i, arg, &s));
    NEED(!store_add(s, "here", 1, NULL));
    NEED(call_again(s, ROLE_STORE, &second) == WELCOME_REFUSED);
    link_close(&second);
    NEED(call_again(s, ROLE_WATCH, &watch) == WELCOME);
    NEED(call_again(s, ROLE_WATCH, &second) == WELCOME_REFUSED);
    link_close(&second);
    NEED(!store_add(s, "here", 0, &sum) && sum >= 1); /* the first one goes on */
    NEED(link_put(&watch, FRAME_LEAVE, 0, NULL, 0, NULL, 0) && link_flush_until(&watch, clock_s() + 5));
    while (link_wait_bytes(&watch, watch.in_size + 1, clock_s() + 5)) {} /* until it is closed: not judged as lost */
    link_close(&watch);
    return store_close(s, 10) ? 1 : 0;
}

TEST(a_second_connection_is_refused) { all_do(connect_twice, 2, 30); }

/* ---- the end ---- */

static int leave_late(int i, void *arg)
{
    Store *s;
    NEED(!join(i, arg, &s));
    if (i == 0) NEED(!store_set(s, "closing", "", 0));
    if (i == 1) NEED(!store_get(s, "closing", NULL, 0, NULL, 10) && !usleep(300000));
    if (i > 0) NEED(!store_set(s, "k", "v", 1)); /* rank 0 serves still */
    double t0 = test_now();
    store_close(s, 10);
    return tell(ERR_OK, t0);
}

TEST(the_host_outlives_the_others)
{
    all_do(leave_late, 3, 15);
    double end = began_at(0) + seconds_of(0);
    CHECK_MSG(end >= began_at(1), "rank 0 ended %.3f s before rank 1", began_at(1) - end);
}

static int leave_stuck(int i, void *arg)
{
    Store *s;
    NEED(!join(i, arg, &s));
    if (i == 1) return store_get(s, "never", NULL, 0, NULL, 15) == ERR_PEER ? 0 : 1; /* as long as rank 0 is there */
    double t0 = test_now();
    store_close(s, 0.5);
    return tell(ERR_OK, t0);
}

TEST(the_host_does_not_wait_for_ever)
{
    all_do(leave_stuck, 2, 18);
    CHECK_MSG(seconds_of(0) >= 0.5 && seconds_of(0) < 10, "%.3f s", seconds_of(0));
}

static int lose_host(int i, void *arg)
{
    Store *s;
    char c;
    NEED(!join(i, arg, &s));
    if (i == 1) store_set(s, "here", "", 0); /* rank 0 may be gone before it answers */
    if (i == 0) NEED(!store_get(s, "here", NULL, 0, NULL, 10));
    if (i == 0) _exit(0);
    double t0 = test_now();
    return tell(store_get(s, "never", &c, 1, NULL, 10), t0);
}

TEST(a_dead_host_is_named)
{
    ranks.count = 0;
    Plan p = plan_of(2);
    start(lose_host, 0, 2, &p);
    finish(10);
    char pid[32];
    snprintf(pid, sizeof pid, "pid %d", (int)ranks.rank[0].pid);
    says(1, 7, pid);
    CHECK_MSG(seconds_of(1) < 8, "%.3f s", seconds_of(1));
}

/* ---- agreement ---- */

static int agree(int i, void *arg)
{
    Store *s;
    const Plan *p = arg;
    NEED(!join(i, arg, &s));
    double t0 = test_now();
    const Agreement same = { "program: 1\nshape: same", ERR_CONFIG, "another job", "start them alike" };
    const char *mine = p->facts[i] ? p->facts[i] : "program: 1\nconfiguration: abc";
    const Agreement own = { mine, ERR_DATA, "other data", "copy them" };
    Err err = store_agree(s, &same, 10);
    if (!err) err = store_agree(s, &own, 10);
    int status = tell(err, t0);
    store_close(s, 10);
    return status;
}

TEST(ranks_agree)
{
    all_do(agree, 4, 15);
}

TEST(a_rank_that_differs_is_named)
{
    ranks.count = 0;
    Plan p = plan_of(4);
    p.facts[2] = "program: 1\nconfiguration: abd";
    p.facts[3] = "program: 2\nconfiguration: abd";
    start(agree, 0, 4, &p);
    finish(15);
    for (int i = 0; i < 4; i++)
        says(i, 3, "other data: rank 2 and rank 0 differ: 'configuration: abd' there, 'configuration: abc' here");
}

TEST_MAIN
