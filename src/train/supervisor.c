/* See supervisor.h. */
#include "train/supervisor.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
    const Config *cfg;
    sigset_t caught, before;  /* signals that this process waits for; its mask as it was */
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

/* Waits for HEAR_S at most. True: the worker has heard a signal more. */
static bool is_heard(const Supervisor *v, uint64_t before)
{
    const struct timespec pause = { 0, 10 * 1000 * 1000 };
    for (const double until = clock_s() + HEAR_S; clock_s() < until && v->shared->signals == before;)
        nanosleep(&pause, NULL);
    return v->shared->signals != before;
}

/* A terminal, or a launcher, may have sent it to the whole process group: a second SIGINT would end the worker at
 * once. */
static void pass_on(Supervisor *v, pid_t worker, int sig, uint64_t *heard)
{
    v->stopping = true;
    if (!is_heard(v, *heard)) kill(worker, sig), is_heard(v, *heard);
    *heard = v->shared->signals;
}

/* ---- a worker's life ---- */

/* Ends a worker that others wait for and that gives no sign of life, or that does not end after its verdict. */
static void look_at_worker(const Supervisor *v, pid_t worker, double silent_s, double judged_s)
{
    char text[128];
    const bool silent = v->boot->size > 1 && silent_s > v->cfg->parallel.freeze_s + SPARE_S;
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

/* The cause is what the worker said, or how its process ended, which nobody else says. */
static void find_cause(const Supervisor *v, pid_t worker, int status)
{
    Supervised *s = v->shared;
    char text[96];
    if (WIFSIGNALED(status))
        snprintf(text, sizeof text, "rank %d (pid %d) was ended by SIG%s", v->boot->rank, (int)worker,
                 sigabbrev_np(WTERMSIG(status)));
    else
        snprintf(text, sizeof text, "rank %d (pid %d) left with status %d", v->boot->rank, (int)worker,
                 WEXITSTATUS(status));
    if (WIFSIGNALED(status)) log_warn("%s", text);
    snprintf(s->before, sizeof s->before, "%s", *s->cause ? s->cause : text);
    s->lost_s = clock_s();
    s->lost_step = s->step;
}

/* Keeps for the next worker what became of this one. False: it was the last. */
static bool goes_on(Supervisor *v, pid_t worker, int status)
{
    Supervised *s = v->shared;
    const int64_t most = v->cfg->run.restarts;
    if (v->stopping || s->done || !is_lost(v, status)) return false;
    find_cause(v, worker, status);
    if (s->saved > v->saved) v->saved = s->saved, v->fruitless = 0;
    v->lost_code = WIFSIGNALED(status) || !WEXITSTATUS(status) ? err_exit_code(ERR_PEER) : WEXITSTATUS(status);
    if (v->fruitless++ < most) return true;
    if (!v->boot->rank)
        log_warn("the run ends: it was started again %lld time%s without a new checkpoint (run.restarts), the last "
                 "time %s",
                 (long long)most, most == 1 ? "" : "s", s->before);
    return false;
}

/* 0, 1, 2, 4 ... s: what fails at once again may need time; the ranks that wait meanwhile must not give up. Of a start
 * that was over before all had met, another rank's supervisor waits. */
static double pause_of(const Supervisor *v)
{
    const double most = fmin(PAUSE_MOST_S, v->cfg->parallel.timeout_s / 4);
    double s = 0;
    for (int64_t n = 1; n < v->fruitless && s < most && !v->shared->outdated; n++) s = s > 0 ? 2 * s : 1;
    return fmin(s, most);
}

/* False: it was asked to stop meanwhile, and said so. */
static bool pause_before(Supervisor *v)
{
    const double s = pause_of(v);
    if (s > 0 && !v->boot->rank) log_info("the next start begins in %.3g s", s);
    for (const double until = clock_s() + s;;) {
        const double left = until - clock_s();
        if (left <= 0) return true;
        const int sig = next_signal(v, left);
        if (!sig || sig == SIGCHLD) continue;
        err_set(ERR_STOPPED, "stopped by SIG%s between two starts of the ranks", sigabbrev_np(sig));
        err_hint("the same command goes on from the newest checkpoint in '%s', if there is one", v->cfg->run.dir);
        err_print(ERR_STOPPED, v->boot->rank != 0);
        return false;
    }
}

static void start_anew(Supervised *s)
{
    s->beats = s->signals = 0;
    s->judged = s->ended = s->outdated = false;
    *s->cause = 0;
    s->attempt++;
}

/* The words of this process, as execv takes them; NULL: no memory, or no /proc. */
static char **own_words(void)
{
    FILE *f = fopen("/proc/self/cmdline", "re");
    char **words = NULL, *word = NULL;
    size_t count = 0, size = 0;
    while (f && getdelim(&word, &size, 0, f) > 0) {
        char **more = realloc(words, (count + 2) * sizeof *more);
        if (!more) break;
        words = more;
        words[count++] = word;
        words[count] = word = NULL;
        size = 0;
    }
    if (f) fclose(f);
    return words;
}

/* In the child: the program anew, for a device's library bears no fork. It takes the supervisor's death for SIGTERM. */
static void become_worker(const Supervisor *v, char **words, pid_t supervisor)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != supervisor) raise(SIGTERM);
    sigprocmask(SIG_SETMASK, &v->before, NULL);
    execv("/proc/self/exe", words);
    _exit(err_exit_code(ERR_INTERNAL));
}

static void end(int code)
{
    fflush(NULL);
    _exit(code);
}

Err supervise(const Boot *boot, const Config *cfg, const char *config)
{
    const pid_t self = getpid();
    char **words = own_words();
    Supervisor v = { .boot = boot, .cfg = cfg };
    if (!words) return err_set(ERR_MEMORY, "cannot read the words of this process in /proc");
    TRY(supervised_make(config, &v.shared));
    v.shared->step = -1;
    v.shared->begun_s = clock_s();
    block_signals(&v);
    signals_follow_launcher();
    for (;;) {
        fflush(NULL);
        const pid_t worker = fork();
        if (!worker) become_worker(&v, words, self);
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
