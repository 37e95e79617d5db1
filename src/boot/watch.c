/*
 * A rank's side of the watch. What it tells are atomics that any thread sets and the watch thread sends; the watch
 * thread alone uses the connection. It draws one conclusion itself: what became of rank 0.
 */
#include "boot/watch.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "boot/judge.h"
#include "boot/meet.h"
#include "boot/supervised.h"

enum { REPORT_WAIT_S = 2, JOIN_S = 5 };
#define BEAT_S 0.5
#define BEAT_MIN_S 0.02
#define OPEN_S 10.0
#define LEAVE_S 2.0 /* so long rank 0 has to take note of the goodbye */
#define AWAY_S 1.0  /* so long without a turn: this process was stopped or starved */

typedef struct {
    uint32_t id;
    char name[WATCH_NAME_BYTES];
    _Atomic uint64_t issued, completed, exchanges_issued, exchanges_completed;
    _Atomic int waits_for;
    _Atomic uint32_t waits_in; /* WatchWaitsIn */
    _Atomic MessageLabel waits_what;
} Member;

struct Watch {
    Link link;
    Welcome rank_0;
    int wake;
    pthread_t thread;
    WatchFn on_verdict;
    void *context;
    double beat_s, freeze_s, stall_s;
    _Atomic uint32_t phase, members;
    _Atomic int64_t step;
    _Atomic uint64_t progress;
    Supervised *supervised;
    Member member[WATCH_COMMS];
    pthread_mutex_t lock;   /* guards what follows */
    pthread_cond_t changed; /* state, ended */
    WatchState state;
    Verdict verdict;
    bool to_leave, ended;       /* ended: the thread is at its end */
    int report_code, exit_code; /* report_code 0: nothing to report, or not any more */
    char report_text[WATCH_TEXT_BYTES], exit_text[WATCH_TEXT_BYTES];
};

/* ---- what other threads tell ---- */

static void wake(Watch *w)
{
    uint64_t one = 1;
    while (write(w->wake, &one, sizeof one) < 0 && errno == EINTR) {}
}

void watch_phase(Watch *w, WatchPhase phase, int64_t step)
{
    if (!w) return;
    w->step = step;
    watch_progress(w);
    if (atomic_exchange(&w->phase, phase) != phase) wake(w); /* rare, and worth to be known at once */
}

void watch_progress(Watch *w)
{
    if (w) atomic_fetch_add_explicit(&w->progress, 1, memory_order_relaxed);
}

static void issued(void *who, uint64_t number)
{
    Member *m = who;
    if (number) atomic_store_explicit(&m->issued, number, memory_order_relaxed);
    else atomic_fetch_add_explicit(&m->exchanges_issued, 1, memory_order_relaxed);
}

static void completed(void *who, uint64_t number)
{
    Member *m = who;
    if (number) atomic_store_explicit(&m->completed, number, memory_order_relaxed);
    else atomic_fetch_add_explicit(&m->exchanges_completed, 1, memory_order_relaxed);
}

/* (a beat between two stores tells a mixture, the next one the truth; a hang lasts for many) */
static void waits(void *who, int rank, bool taken, const MessageLabel *what)
{
    Member *m = who;
    const WatchWaitsIn in = !what ? WAITS_IN_COLLECTIVE : taken ? WAITS_IN_SEND : WAITS_IN_RECEIVE;
    atomic_store_explicit(&m->waits_what, what ? *what : (MessageLabel){ 0 }, memory_order_relaxed);
    atomic_store_explicit(&m->waits_in, in, memory_order_relaxed);
    atomic_store_explicit(&m->waits_for, rank, memory_order_relaxed);
}

CommObserver watch_join(Watch *w, uint32_t comm_id, const char *name)
{
    if (!w) return (CommObserver){ 0 };
    pthread_mutex_lock(&w->lock);
    uint32_t n = w->members;
    ASSERT(n < WATCH_COMMS);
    Member *m = &w->member[n];
    m->id = comm_id;
    snprintf(m->name, sizeof m->name, "%s", name);
    m->waits_for = OBSERVER_NOBODY;
    w->members = n + 1; /* seen by others after the rest */
    pthread_mutex_unlock(&w->lock);
    return (CommObserver){ m, issued, completed, waits };
}

static struct timespec in_seconds(int seconds)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += seconds;
    return t;
}

bool watch_report(Watch *w, Err err, const char *text, Verdict *out)
{
    if (!w) return false;
    struct timespec until = in_seconds(REPORT_WAIT_S);
    pthread_mutex_lock(&w->lock);
    if (!w->report_code) {
        w->report_code = err_exit_code(err);
        snprintf(w->report_text, sizeof w->report_text, "%s", text);
    }
    wake(w);
    while (w->state != WATCH_JUDGED && pthread_cond_timedwait(&w->changed, &w->lock, &until) == 0) {}
    bool judged = w->state == WATCH_JUDGED;
    if (judged && out) *out = w->verdict;
    pthread_mutex_unlock(&w->lock);
    return judged;
}

WatchState watch_state(Watch *w, Verdict *out)
{
    if (!w) return WATCH_FINE;
    pthread_mutex_lock(&w->lock);
    WatchState state = w->state;
    if (state == WATCH_JUDGED && out) *out = w->verdict;
    pthread_mutex_unlock(&w->lock);
    return state;
}

/* ---- the watch thread ---- */

static void put_beat(Watch *w)
{
    WatchComm comm[WATCH_COMMS] = { 0 };
    WatchBeat beat = { .phase = w->phase, .comms = w->members, .step = w->step, .progress = w->progress };
    beat.beat_s = w->beat_s;
    beat.freeze_s = w->freeze_s;
    beat.stall_s = w->stall_s;
    for (uint32_t i = 0; i < beat.comms; i++) {
        Member *m = &w->member[i];
        comm[i].id = m->id;
        memcpy(comm[i].name, m->name, sizeof comm[i].name);
        comm[i].completed = m->completed; /* first: never more than issued */
        comm[i].issued = m->issued;
        comm[i].exchanges_completed = m->exchanges_completed;
        comm[i].exchanges_issued = m->exchanges_issued;
        comm[i].waits_for = m->waits_for;
        comm[i].waits_in = m->waits_in;
        comm[i].waits_what = m->waits_what;
    }
    link_put(&w->link, FRAME_BEAT, 0, &beat, sizeof beat, comm, beat.comms * sizeof *comm);
}

static void set_state(Watch *w, WatchState state, const Verdict *v)
{
    pthread_mutex_lock(&w->lock);
    bool first = w->state != WATCH_JUDGED && state == WATCH_JUDGED;
    if (w->state != WATCH_JUDGED) w->state = state;
    if (first) w->verdict = *v;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (first && w->on_verdict) w->on_verdict(w->context, v);
}

/* Takes what rank 0 sent; false when the connection is at its end. */
static bool hear(Watch *w, double *last_heard)
{
    int got = link_fill(&w->link), r;
    Frame f;
    while ((r = link_frame(&w->link, &f)) > 0) {
        Verdict v;
        FrameKind kind = f.kind;
        bool whole = kind == FRAME_VERDICT && f.bytes == sizeof v;
        if (whole) memcpy(&v, f.data, sizeof v);
        whole = whole && v.exit_code > 0 && v.exit_code <= EXIT_CODE_MAX;
        link_drop_frame(&w->link);
        *last_heard = clock_s();
        if (kind == FRAME_JUDGING) set_state(w, WATCH_JUDGING, NULL);
        if (!whole) continue;
        v.text[sizeof v.text - 1] = v.host[sizeof v.host - 1] = 0;
        if (link_put(&w->link, FRAME_GOT, 0, NULL, 0, NULL, 0)) link_flush(&w->link);
        set_state(w, WATCH_JUDGED, &v);
    }
    return got >= 0 && r >= 0;
}

static void judge_host(Watch *w, WatchWhat what)
{
    Verdict v;
    judge_rank_0(&v, what, w->rank_0.host, (int)w->rank_0.pid, w->freeze_s);
    set_state(w, WATCH_JUDGED, &v);
}

/* Sends what other threads asked for; true: the goodbye is among it. */
static bool put_requests(Watch *w)
{
    pthread_mutex_lock(&w->lock);
    bool leave = w->to_leave;
    if (w->report_code)
        link_put(&w->link, FRAME_REPORT, (uint32_t)w->report_code, w->report_text, strlen(w->report_text), NULL, 0);
    w->report_code = 0;
    pthread_mutex_unlock(&w->lock);
    return leave;
}

/* After a run without errors a rank 0 that does not take note is frozen. */
static void leave(Watch *w)
{
    const bool fine = w->exit_code == 0 || w->exit_code == err_exit_code(ERR_STOPPED);
    double deadline = clock_s() + (fine ? w->freeze_s : LEAVE_S);
    put_beat(w);
    link_put(&w->link, FRAME_LEAVE, (uint32_t)w->exit_code, w->exit_text, strlen(w->exit_text), NULL, 0);
    if (!link_flush_until(&w->link, deadline)) return;
    shutdown(w->link.fd, SHUT_WR);
    bool open = true;
    while (open && clock_s() < deadline) { /* until rank 0 has read it all */
        struct pollfd p = { .fd = w->link.fd, .events = POLLIN };
        w->link.in_size = 0; /* what others do is no concern of this rank any more */
        if (link_poll(&p, 1, deadline) > 0) open = link_fill(&w->link) >= 0;
    }
    if (open && fine) judge_host(w, WATCH_FROZEN);
}

static void run(Watch *w)
{
    double last_heard = clock_s(), next_beat = last_heard + w->beat_s, now = last_heard;
    for (;;) {
        struct pollfd p[] = { { .fd = w->link.fd, .events = (short)(POLLIN | (w->link.out_size ? POLLOUT : 0)) },
                              { .fd = w->wake, .events = POLLIN } };
        uint64_t n;
        double before = now;
        link_poll(p, 2, next_beat);
        now = clock_s();
        if (w->supervised) w->supervised->beats++;
        if (p[1].revents && read(w->wake, &n, sizeof n) > 0) next_beat = now;
        if (now - before > w->beat_s + AWAY_S) last_heard += now - before;
        if (p[0].revents && !hear(w, &last_heard)) break;
        if (put_requests(w)) {
            leave(w);
            return;
        }
        if (now >= next_beat && !w->link.out_size) put_beat(w);
        if (now >= next_beat) next_beat = now + w->beat_s;
        if (!link_flush(&w->link)) break;
        if (now - last_heard > w->freeze_s) {
            judge_host(w, WATCH_FROZEN);
            return;
        }
    }
    double ignored;
    for (int i = 0; i < 64 && hear(w, &ignored); i++) {} /* the verdict may have come just before the end */
    judge_host(w, WATCH_KILLED);
}

static void *run_thread(void *arg)
{
    Watch *w = arg;
    run(w);
    if (w->supervised) w->supervised->beats = 0; /* (what is left of the process has no such thread) */
    pthread_mutex_lock(&w->lock);
    w->ended = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* ---- opening and closing ---- */

static Err start(Watch *w, Store *s)
{
    Hello hello = *store_hello(s);
    double deadline = clock_s() + (w->freeze_s < OPEN_S ? w->freeze_s : OPEN_S);
    hello.role = ROLE_WATCH;
    w->rank_0 = store_meeting(s)->welcome;
    w->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (w->wake < 0) return err_set(ERR_MEMORY, "cannot start the watch: %s", strerror(errno));
    TRY(meet_again(store_meeting(s), &hello, deadline, &w->link));
    put_beat(w);
    if (!link_flush_until(&w->link, deadline))
        return err_set(ERR_PEER, "rank 0 (host %s, pid %u) does not listen", w->rank_0.host, w->rank_0.pid);
    const int error = link_thread(&w->thread, run_thread, w);
    if (!error) return ERR_OK;
    const Err err = err_no_thread("watching the ranks", error);
    w->exit_code = err_exit_code(err);
    snprintf(w->exit_text, sizeof w->exit_text, "%s", err_message());
    leave(w); /* without a goodbye the others would take this rank for killed */
    return err;
}

static void free_watch(Watch *w)
{
    link_close(&w->link);
    if (w->wake >= 0) close(w->wake);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

Err watch_open(Store *s, double freeze_s, double stall_s, WatchFn on_verdict, void *context, Watch **out)
{
    ASSERT(freeze_s > 0 && stall_s >= 0);
    Watch *w = calloc(1, sizeof *w);
    if (!w) return err_set(ERR_MEMORY, "no memory for the watch");
    w->link.fd = w->wake = -1;
    w->on_verdict = on_verdict;
    w->context = context;
    w->freeze_s = freeze_s;
    w->beat_s = freeze_s / 4 < BEAT_S ? freeze_s / 4 : BEAT_S;
    if (w->beat_s < BEAT_MIN_S) w->beat_s = BEAT_MIN_S;
    w->stall_s = stall_s;
    w->supervised = store_supervised(s);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    Err err = start(w, s);
    if (err) return free_watch(w), err;
    *out = w;
    return ERR_OK;
}

void watch_close(Watch *w, int exit_code, const char *message)
{
    if (!w) return;
    ASSERT(!pthread_equal(pthread_self(), w->thread));
    struct timespec until = in_seconds(JOIN_S + (int)w->freeze_s);
    pthread_mutex_lock(&w->lock);
    w->to_leave = true;
    w->exit_code = exit_code;
    snprintf(w->exit_text, sizeof w->exit_text, "%s", message ? message : "");
    wake(w);
    while (!w->ended && pthread_cond_timedwait(&w->changed, &w->lock, &until) == 0) {}
    bool ended = w->ended;
    pthread_mutex_unlock(&w->lock);
    if (!ended) return; /* a callback that does not return: the thread keeps what it uses */
    pthread_join(w->thread, NULL);
    free_watch(w);
}
