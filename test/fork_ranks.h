/*
 * Ranks as processes for tests: fork_ranks runs a body in N children, waits with a deadline, and counts each
 * child's failed checks as failures of the case. Call it before the program has threads. The children share
 * `shared_page`: a store for rendezvous and room for what they tell each other.
 */
#ifndef MEGATRAIN_TEST_FORK_RANKS_H
#define MEGATRAIN_TEST_FORK_RANKS_H

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/gloo.h"
#include "test.h"

enum { SHARED_KEYS = 16, SHARED_VALUE_BYTES = 2048, SHARED_RANKS = 16 };

typedef struct {
    struct {
        atomic_int ready;
        char key[32];
        int64_t n;
        char bytes[SHARED_VALUE_BYTES];
    } store[SHARED_KEYS];
    atomic_int next_key, flag, met;
    atomic_ullong digest[SHARED_RANKS];
    _Atomic double at[SHARED_RANKS];
    pid_t pid[SHARED_RANKS];
} SharedPage;

static SharedPage *shared_page;

/* Returns when all `size` ranks have called it, as often as it was called before. At the start: from here on the
 * patience of one with another counts. Before one dies: what came before is behind them all. */
static inline void shared_meet(int size)
{
    const int turn = atomic_fetch_add(&shared_page->met, 1) / size;
    while (shared_page->met < (turn + 1) * size) usleep(200);
}

static inline Err shared_set(void *user, const char *key, const void *bytes, int64_t n)
{
    SharedPage *page = user;
    int i = atomic_fetch_add(&page->next_key, 1);
    if (i >= SHARED_KEYS || n > SHARED_VALUE_BYTES) return err_set(ERR_INTERNAL, "the test's store is full");
    snprintf(page->store[i].key, sizeof page->store[i].key, "%s", key);
    memcpy(page->store[i].bytes, bytes, (size_t)n);
    page->store[i].n = n;
    page->store[i].ready = 1;
    return ERR_OK;
}

static inline Err shared_get(void *user, const char *key, void *bytes, int64_t cap, int64_t *n, double timeout_s)
{
    SharedPage *page = user;
    for (double end = test_now() + timeout_s; test_now() < end; usleep(500))
        for (int i = 0; i < SHARED_KEYS; i++)
            if (page->store[i].ready && !strcmp(page->store[i].key, key)) {
                *n = page->store[i].n;
                if (*n > cap) return err_set(ERR_INTERNAL, "value of '%s' is too long", key);
                memcpy(bytes, page->store[i].bytes, (size_t)*n);
                return ERR_OK;
            }
    return err_set(ERR_RENDEZVOUS, "nobody set '%s'", key);
}

static inline void fork_child(void (*body)(int rank, int size, void *arg), int rank, int size, void *arg)
{
    test_failures = 0;
    test_checks = 0;
    if (!setjmp(test_out)) body(rank, size, arg);
    if (!test_checks) TEST_FAIL("rank %d checks nothing", rank);
    fflush(NULL);
    exit(test_failures ? 1 : 0); /* (with the sanitizers' check for leaks) */
}

/* Signals are fine for `killed` (-1: none), which must die of SIGKILL. */
static inline void fork_ranks(void (*body)(int rank, int size, void *arg), int size, void *arg, int killed,
                              double limit_s)
{
    if (shared_page) munmap(shared_page, sizeof *shared_page);
    shared_page = mmap(NULL, sizeof *shared_page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fflush(NULL);
    for (int r = 0; r < size; r++) {
        pid_t pid = fork();
        if (pid == 0) fork_child(body, r, size, arg);
        shared_page->pid[r] = pid;
    }
    double end = test_now() + limit_s;
    for (int r = 0; r < size; r++) {
        int status = 0;
        pid_t got;
        while ((got = waitpid(shared_page->pid[r], &status, WNOHANG)) == 0 && test_now() < end) usleep(1000);
        if (got == 0) {
            kill(shared_page->pid[r], SIGKILL);
            waitpid(shared_page->pid[r], &status, 0);
            CHECK_MSG(false, "rank %d of %d did not end within %.0f s", r, size, limit_s);
        } else if (r == killed) {
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        } else {
            CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d of %d: status 0x%x", r, size, status);
        }
    }
}

#endif
