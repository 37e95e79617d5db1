/*
 * Ranks as processes, for tests: forked before there are threads, each with a pipe for what it has to tell, and
 * none outlives its test.
 */
#ifndef MEGATRAIN_TEST_RANKS_H
#define MEGATRAIN_TEST_RANKS_H

#include "test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "boot/boot.h"

enum { RANKS_MAX = 16, SAID_BYTES = 4096 };

typedef struct {
    pid_t pid;
    int pipe;
    char said[SAID_BYTES]; /* all that it wrote to `out` */
    size_t said_bytes;
    bool ended;
    int status;     /* exit status, or -signal */
    double ended_at; /* test_now() */
} RankProcess;

typedef struct {
    int count;
    RankProcess rank[RANKS_MAX];
} Ranks;

static FILE *out; /* in a child: what the parent reads as `said` */

/* Starts one process more; fn's return value is its exit status. */
static inline int ranks_start(Ranks *g, int (*fn)(int rank, void *arg), int rank, void *arg)
{
    int ends[2];
    RankProcess *p = &g->rank[g->count];
    *p = (RankProcess){ 0 };
    fflush(stdout);
    fflush(stderr);
    if (pipe2(ends, O_CLOEXEC)) exit(1);
    p->pid = fork();
    if (p->pid < 0) exit(1);
    if (p->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 0; i < g->count; i++) close(g->rank[i].pipe);
        out = fdopen(ends[1], "w");
        setvbuf(out, NULL, _IOLBF, 0);
        _exit(fn(rank, arg));
    }
    close(ends[1]);
    p->pipe = ends[0];
    return g->count++;
}

static inline void ranks_look(RankProcess *p)
{
    int status;
    if (p->ended || waitpid(p->pid, &status, WNOHANG) != p->pid) return;
    p->ended = true;
    p->ended_at = test_now();
    p->status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* Takes in what the processes say until `until` (may be NULL) holds, all have ended or the time is over. */
static inline bool ranks_listen(Ranks *g, double seconds, bool (*until)(const Ranks *))
{
    double end = test_now() + seconds;
    for (;;) {
        struct pollfd polls[RANKS_MAX];
        bool all_ended = true;
        for (int i = 0; i < g->count; i++) {
            RankProcess *p = &g->rank[i];
            polls[i] = (struct pollfd){ .fd = p->pipe, .events = POLLIN };
            ranks_look(p);
            all_ended = all_ended && p->ended && p->pipe < 0;
        }
        if (all_ended || test_now() > end) return all_ended;
        if (until && until(g)) return true;
        poll(polls, (nfds_t)g->count, 5);
        for (int i = 0; i < g->count; i++) {
            RankProcess *p = &g->rank[i];
            if (p->pipe < 0 || !polls[i].revents) continue;
            ssize_t n = read(p->pipe, p->said + p->said_bytes, SAID_BYTES - 1 - p->said_bytes);
            if (n > 0) p->said_bytes += (size_t)n;
            else close(p->pipe), p->pipe = -1;
        }
    }
}

/* Whoever is still there is ended; returns how many that were. */
static inline int ranks_end(Ranks *g)
{
    int left = 0;
    for (int i = 0; i < g->count; i++) {
        RankProcess *p = &g->rank[i];
        ranks_look(p);
        if (!p->ended) {
            left++;
            kill(p->pid, SIGKILL);
            waitpid(p->pid, NULL, 0);
            p->ended = true;
        }
        if (p->pipe >= 0) close(p->pipe);
        p->pipe = -1;
    }
    return left;
}

/* Takes a port of the loopback address without listening; -1 if it is taken. */
static inline int bind_at(int port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(fd, (struct sockaddr *)&a, sizeof a)) return close(fd), -1;
    return fd;
}

static inline int listen_at(int port)
{
    int fd = bind_at(port);
    if (fd >= 0 && listen(fd, 16)) return close(fd), -1;
    return fd;
}

static inline int connect_at(int port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&a, sizeof a)) return close(fd), -1;
    return fd;
}

/*
 * The first of 19 free ports that no other test has: test_faults.sh takes its from 10000 on, launchers from 20000, the
 * system those of outgoing connections from 32768. The 20th stays bound as long as the program lives and keeps other
 * programs of this kind away, which would not see a port that nobody listens on yet.
 */
static inline int free_port(void)
{
    enum { FIRST = 4000, WINDOW = 20, WINDOWS = 300 };
    static int turn = -1;
    if (turn < 0) turn = getpid() % WINDOWS;
    for (;; turn++) {
        int port = FIRST + turn % WINDOWS * WINDOW, free_ones = 0, guard = bind_at(port + WINDOW - 1);
        if (guard < 0) continue;
        for (; free_ones < WINDOW - 1; free_ones++) {
            int fd = bind_at(port + free_ones);
            if (fd < 0) break;
            close(fd);
        }
        if (free_ones == WINDOW - 1) return port;
        close(guard);
    }
}

static inline Boot boot_of(int rank, int size, int port)
{
    Boot b = { .launcher = "test", .rank = rank, .size = size, .local_rank = rank, .local_size = size };
    b.port = port;
    b.port_given = true;
    strcpy(b.addr, "127.0.0.1");
    strcpy(b.secret, "a secret of tests");
    snprintf(b.job, sizeof b.job, "test of %d ranks at %d", size, port);
    return b;
}

#endif
