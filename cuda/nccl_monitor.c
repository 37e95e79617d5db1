/*
 * How communicators over NCCL fail and wait; see nccl_world.h.
 *
 * Everything is non-blocking (blocking = 0): a call that has not finished inside NCCL is polled here, with a deadline.
 * The monitor thread polls NCCL's asynchronous errors and the oldest call of each group.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "nccl_world.h"

enum { ABORT_LOCK_S = 2, MONITOR_US = 10 * 1000 };

/* ---- failing ---- */

Err nccl_stopped(NcclWorld *w)
{
    pthread_mutex_lock(&w->lock);
    Err err = err_set(w->kind, "%s", w->why);
    pthread_mutex_unlock(&w->lock);
    return err;
}

/* Asks now and then: pthread's calls with a deadline are on the wall clock, or hidden from ThreadSanitizer. */
static bool lock_within(pthread_mutex_t *lock, double seconds)
{
    for (const double until = clock_s() + seconds; clock_s() < until; usleep(NAP_US))
        if (!pthread_mutex_trylock(lock)) return true;
    return false;
}

/* Waits for a thread inside NCCL, whose polls end when the world is stopped; but not for ever: a launch may hang. */
static void abort_group(Group *g)
{
    const bool locked = lock_within(&g->calling, ABORT_LOCK_S);
    ncclComm_t comm = atomic_exchange(&g->comm, NULL);
    if (locked) pthread_mutex_unlock(&g->calling);
    if (comm) nccl.CommAbort(comm);
}

Err nccl_stop(NcclWorld *w, Err kind, const char *why)
{
    pthread_mutex_lock(&w->lock);
    if (!w->stopped) {
        w->kind = kind;
        snprintf(w->why, sizeof w->why, "%s", why);
        w->stopped = true;
        for (int i = 0; i < GROUPS_MAX; i++)
            if (w->groups[i]) abort_group(w->groups[i]);
    }
    pthread_mutex_unlock(&w->lock);
    return nccl_stopped(w);
}

void nccl_world_abort(NcclWorld *w, const char *why)
{
    if (w) nccl_stop(w, ERR_PEER, why);
}

Err nccl_kind(ncclResult_t rc)
{
    return rc == ncclRemoteError || rc == ncclSystemError ? ERR_PEER
           : rc == ncclInvalidUsage                       ? ERR_CONFIG
           : rc == ncclUnhandledCudaError                 ? ERR_DEVICE
                                                          : ERR_INTERNAL;
}

const char *nccl_text(ncclResult_t rc, ncclComm_t comm, char text[WHY_BYTES])
{
    const char *last = nccl.GetLastError(comm);
    snprintf(text, WHY_BYTES, "%s%s%.160s", nccl.GetErrorString(rc), last && *last ? ": " : "", last ? last : "");
    return text;
}

/*
 * With blocking = 0 NCCL hands every call to a thread of its own and returns "in progress" (2.28), a few tens of
 * microseconds before it is through: asking at once costs that much of the host's time, sleeping first many times as
 * much, ten times a layer. So this thread asks at first, giving way to others; what takes longer waits for peers.
 */
ncclResult_t nccl_settle(NcclWorld *w, ncclComm_t comm, ncclResult_t rc, double until)
{
    for (int asked = 0; rc == ncclInProgress && !w->stopped; asked++) {
        if (asked > NCCL_SPINS && clock_s() > until) return rc;
        if (asked < NCCL_SPINS) sched_yield();
        else usleep(NAP_US);
        ncclResult_t answer = nccl.CommGetAsyncError(comm, &rc);
        if (answer != ncclSuccess) return answer;
    }
    return rc;
}

/* ---- the monitor ---- */

/* Tells the observer that a call is done. */
static void tell_done(Group *g, const Flight *f)
{
    const bool exchange = f->kind == COMM_EXCHANGE;
    if (exchange) observer_waits(g->observer, OBSERVER_NOBODY);
    observer_completed(g->observer, exchange ? 0 : f->sequence + 1);
}

cudaError_t nccl_reap(Group *g)
{
    cudaError_t code = cudaSuccess;
    while (g->finished < g->issued) {
        const Flight *f = &g->flights[g->finished % FLIGHTS];
        code = cudaEventQuery(f->done);
        if (code != cudaSuccess) break;
        tell_done(g, f);
        g->finished++;
        g->since = 0;
    }
    cudaGetLastError(); /* cudaErrorNotReady is none */
    return code == cudaErrorNotReady ? cudaSuccess : code;
}

/* The oldest call runs from now on. Of an exchange the device does not say which message is missing: the first is
 * named. */
static void note_start(Group *g, const Flight *f)
{
    const CommMessage *m = &f->message;
    g->since = clock_s();
    if (f->kind == COMM_EXCHANGE && m->bytes)
        observer_waits_message(g->observer, g->members[m->peer], m->send, m->what);
}

/* "reduce-tree of 5000 (call 7)", "exchange 7 (rank 3 is to send: activation of ...)" */
static void flight_text(const Group *g, const Flight *f, char *text, size_t size)
{
    char what[64];
    if (f->kind != COMM_EXCHANGE || !f->message.bytes) {
        snprintf(text, size, "%s of %lld (call %llu)", comm_kind_name(f->kind), (long long)f->count,
                 (unsigned long long)f->sequence);
        return;
    }
    message_text(f->message.what, what, sizeof what);
    snprintf(text, size, "exchange %llu (rank %d is to %s: %s)", (unsigned long long)f->sequence,
             g->members[f->message.peer], f->message.send ? "take" : "send", what);
}

/* Has the oldest call, its inputs there, run for too long? Says which. */
static bool overdue(Group *g, char *text)
{
    char call[160];
    bool late = false;
    pthread_mutex_lock(&g->lock);
    cudaError_t code = nccl_reap(g);
    const Flight *f = &g->flights[g->finished % FLIGHTS];
    if (!code && g->finished < g->issued) {
        if (!g->since && cudaEventQuery(f->ready) == cudaSuccess) note_start(g, f);
        late = g->since && clock_s() - g->since > g->world->o.timeout_s;
        cudaGetLastError();
    }
    if (late) {
        flight_text(g, f, call, sizeof call);
        snprintf(text, WHY_BYTES, "%s: %s did not finish in %.1f s", g->name, call, g->world->o.timeout_s);
    }
    pthread_mutex_unlock(&g->lock);
    return late;
}

/* NCCL's own finding about a group. A thread inside NCCL finds out for itself. */
static ncclResult_t async_error(Group *g, char *text)
{
    char reason[WHY_BYTES];
    ncclResult_t rc = ncclSuccess;
    if (pthread_mutex_trylock(&g->calling)) return ncclSuccess;
    if (g->comm && nccl.CommGetAsyncError(g->comm, &rc) == ncclSuccess && rc != ncclSuccess && rc != ncclInProgress)
        snprintf(text, WHY_BYTES, "%s: %.200s", g->name, nccl_text(rc, g->comm, reason));
    pthread_mutex_unlock(&g->calling);
    return rc == ncclInProgress ? ncclSuccess : rc;
}

static void look(NcclWorld *w)
{
    char text[WHY_BYTES];
    for (int i = 0; i < GROUPS_MAX && !w->stopped; i++) {
        pthread_mutex_lock(&w->lock); /* a group is closed under it */
        Err found = ERR_OK;
        Group *g = w->groups[i];
        ncclResult_t rc = g ? async_error(g, text) : ncclSuccess;
        if (rc) found = nccl_kind(rc);
        else if (g && overdue(g, text)) found = ERR_HANG;
        pthread_mutex_unlock(&w->lock);
        if (found) nccl_stop(w, found, text);
    }
}

void *nccl_monitor(void *world)
{
    NcclWorld *w = world;
    cudaSetDevice(w->o.gpu);
    while (!w->closing && !w->stopped) {
        look(w);
        usleep(MONITOR_US);
    }
    return NULL;
}
