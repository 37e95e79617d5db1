/* See supervisor.h. */
#include "train/supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/ending.h"
#include "base/err.h"
#include "base/log.h"
#include "boot/supervised.h"
#include "train/signals.h"

#define TURN_S 0.25
#define AWAY_S 1.0     /* so long without a turn: this process was stopped or starved, as the worker may have been */
#define SPARE_S 1.0    /* beyond freeze_s the other ranks have judged a silent worker */
#define LEAVING_S 10.0 /* a worker that heard a verdict is gone by then, unless a driver holds it */
#define HEAR_S 0.2     /* so soon a worker has heard a signal that its whole process group got */
#define PAUSE_MOST_S 32.0

typedef struct {
    Supervised *shared;
    const Boot *boot;
    sigset_t caught, before; /* signals that this process waits for; its mask as it was */
    int64_t restarts;        /* run.restarts */
    double freeze_s;
    bool stopping;            /* it was asked to: no worker comes after this one */
    int64_t fruitless, saved; /* restarts since the newest checkpoint; its step */
    int lost_code;            /* exit status of the last worker that was lost; 0: none was */
} Supervisor;

/* ---- signals ---- */

/* Whoever ignores SIGHUP (nohup) goes on. */
static void block_signals(Supervisor *v)
{
    struct sigaction was;
    sigemptyset(&v->caught);
    sigaddset(&v->caught, SIGCHLD);
    sigaddset(&v->caught, SIGUSR1);
    for (int i = 0; i < ENDING_COUNT; i++)
        if (ending_signals[i] != SIGHUP || sigaction(SIGHUP, NULL, &was) || was.sa_handler != SIG_IGN)
            sigaddset(&v->caught, ending_signals[i]);
    sigprocmask(SIG_BLOCK, &v->caught, &v->before);
}

/* The next signal within so many seconds; 0: none came. */
static int next_signal(const Supervisor *v, double seconds)
{
    const struct timespec t = { (time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds)) };
    const int sig = sigtimedwait(&v->caught, NULL, &t);
    return sig > 0 ? sig : 0;
}

static void nap(double seconds)
{
    struct timespec t = { 0, (long)(1e9 * seconds) };
    nanosleep(&t, NULL);
}

/* A terminal, or a launcher, may have sent it to the whole process group: a second SIGINT would end the worker at
 * once. */
static void pass_on(Supervisor *v, pid_t worker, int sig, uint64_t *heard)
{
    v->stopping = true;
    for (const double until = clock_s() + HEAR_S; clock_s() < until && v->shared->signals == *heard;) nap(0.01);
    if (v->shared->signals == *heard) kill(worker, sig);
    for (const double until = clock_s() + HEAR_S; clock_s() < until && v->shared->signals == *heard;) nap(0.01);
    *heard = v->shared->signals;
}

/* ---- a worker's life ---- */

/* Ends a worker that others wait for and that gives no sign of life, or that does not end after its verdict. */
static void look_at_worker(const Supervisor *v, pid_t worker, double silent_s, double judged_s)
{
    char text[128];
    const bool silent = v->boot->size > 1 && silent_s > v->freeze_s + SPARE_S;
    if (!silent && judged_s < LEAVING_S) return;
    if (silent) snprintf(text, sizeof text, "rank %d gave no sign of life for %.3g s", v->boot->rank, silent_s);
    else snprintf(text, sizeof text, "rank %d did not end after its verdict", v->boot->rank);
    if (!*v->shared->cause) supervised_cause(v->shared, text);
    kill(worker, SIGKILL);
}

/* Waits for its end; the status is as of waitpid. It is alive while its thread that watches gives signs of life, and
 * before it has that thread, and after, while nobody stops it. */
static int await_worker(Supervisor *v, pid_t worker)
{
    const Supervised *s = v->shared;
    uint64_t beats = 0, heard = 0;
    double now = clock_s(), alive_s = now, judged_s = now;
    bool stopped = false;
    for (int status;;) {
        const int sig = next_signal(v, TURN_S);
        if (waitpid(worker, &status, WNOHANG | WUNTRACED | WCONTINUED) == worker) {
            if (WIFEXITED(status) || WIFSIGNALED(status)) return status;
            stopped = WIFSTOPPED(status);
        }
        if (sig && sig != SIGCHLD) pass_on(v, worker, sig, &heard);
        const double before = now;
        now = clock_s();
        if (now - before > AWAY_S) alive_s += now - before;
        if (s->beats != beats || !(s->beats || stopped)) beats = s->beats, alive_s = now;
        if (!s->judged) judged_s = now;
        look_at_worker(v, worker, now - alive_s, now - judged_s);
    }
}

/* Was the worker lost, by a fault that another one may not meet? A wrong configuration, a full disk or a request to
 * stop ends the run; so do ranks that do not come any more. */
static bool is_lost(const Supervisor *v, int status)
{
    if (WIFSIGNALED(status)) {
        const int sig = WTERMSIG(status);
        return sig == SIGKILL || sig == SIGSEGV || sig == SIGBUS || sig == SIGABRT || sig == SIGILL || sig == SIGFPE;
    }
    const int code = WEXITSTATUS(status);
    if (!code) return !v->shared->ended;
    return code == err_exit_code(ERR_INTERNAL) || code == err_exit_code(ERR_PEER) || code == err_exit_code(ERR_HANG) ||
           code == err_exit_code(ERR_GPU);
}

/* Exit status for the launcher. Ranks that were not there again: those of the loss. */
static int code_of(const Supervisor *v, int status)
{
    if (v->shared->done) return 0;
    if (WIFSIGNALED(status)) return 128 + WTERMSIG(status);
    const int code = WEXITSTATUS(status);
    return v->lost_code && code == err_exit_code(ERR_RENDEZVOUS) ? v->lost_code : code;
}

/* Keeps for the next worker what became of this one. False: it was the last. */
static bool goes_on(Supervisor *v, pid_t worker, int status)
{
    Supervised *s = v->shared;
    char text[96];
    if (v->stopping || s->done || !is_lost(v, status)) return false;
    if (s->saved > v->saved) v->saved = s->saved, v->fruitless = 0;
    if (v->fruitless++ == v->restarts) {
        if (!v->boot->rank)
            log_warn("started again %lld time%s without a new checkpoint (run.restarts): the run ends",
                     (long long)v->restarts, v->restarts == 1 ? "" : "s");
        return false;
    }
    v->lost_code = WIFSIGNALED(status) || !WEXITSTATUS(status) ? err_exit_code(ERR_PEER) : WEXITSTATUS(status);
    if (WIFSIGNALED(status))
        snprintf(text, sizeof text, "rank %d (pid %d) was ended by SIG%s", v->boot->rank, (int)worker,
                 sigabbrev_np(WTERMSIG(status)));
    else
        snprintf(text, sizeof text, "rank %d (pid %d) left with status %d", v->boot->rank, (int)worker,
                 WEXITSTATUS(status));
    snprintf(s->before, sizeof s->before, "%s", *s->cause ? s->cause : text);
    s->lost_s = clock_s();
    s->lost_step = s->step;
    return true;
}

/* 0, 1, 2, 4 ... s: what fails at once again may need time. False: it was asked to stop meanwhile. */
static bool pause_before(Supervisor *v)
{
    double s = 0;
    for (int64_t n = 1; n < v->fruitless && s < PAUSE_MOST_S; n++) s = s > 0 ? 2 * s : 1;
    for (const double until = clock_s() + s; !v->stopping;) {
        const double left = until - clock_s();
        if (left <= 0) return true;
        const int sig = next_signal(v, left);
        v->stopping = sig && sig != SIGCHLD;
    }
    return false;
}

static void start_anew(Supervised *s)
{
    s->beats = s->signals = 0;
    s->judged = s->ended = false;
    *s->cause = 0;
    s->attempt++;
}

/* In the worker. It takes the supervisor's death for SIGTERM. */
static void become_worker(const Supervisor *v, Boot *boot, pid_t supervisor)
{
    boot->attempt = v->shared->attempt;
    boot->supervised = v->shared;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != supervisor) raise(SIGTERM);
    sigprocmask(SIG_SETMASK, &v->before, NULL);
}

static void end(int code)
{
    fflush(NULL);
    _exit(code);
}

Err supervise(Boot *boot, int64_t restarts, double freeze_s)
{
    const pid_t self = getpid();
    Supervisor v = { .boot = boot, .restarts = restarts, .freeze_s = freeze_s, .saved = -1 };
    v.shared = mmap(NULL, sizeof *v.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (v.shared == MAP_FAILED) return err_set(ERR_MEMORY, "no memory for what a worker shares with its supervisor");
    v.shared->step = v.shared->saved = -1;
    v.shared->begun_s = clock_s();
    block_signals(&v);
    signals_follow_launcher();
    if (!boot->rank)
        log_info("run.restarts=%lld: a rank that is lost is started again, and the run goes on", (long long)restarts);
    for (;;) {
        fflush(NULL);
        const pid_t worker = fork();
        if (!worker) return become_worker(&v, boot, self), ERR_OK;
        if (worker < 0) {
            err_set(ERR_MEMORY, "no process for the rank: %s", strerror(errno));
            return err_hint("raise ulimit -u, or pids.max of the control group; or run.restarts=0");
        }
        const int status = await_worker(&v, worker);
        if (!goes_on(&v, worker, status)) end(code_of(&v, status));
        if (!pause_before(&v)) end(err_exit_code(ERR_STOPPED));
        start_anew(v.shared);
    }
}
