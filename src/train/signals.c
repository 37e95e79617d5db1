/* Signals of a training run: signals.h says what each does. */
#include "train/signals.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/ending.h"
#include "base/err.h"
#include "base/log.h"

volatile sig_atomic_t signals_stop;
static volatile sig_atomic_t interrupted, step_now;
static volatile uint64_t *counter;
static bool tells, live; /* rank 0 says at once what a signal does: a step may be long; below a line that stays */

/* "megatrain: BEFORE step N AFTER"; nothing here but what a handler may call. */
static void tell(const char *before, const char *after)
{
    char text[160] = "", digits[24], *d = digits + sizeof digits;
    if (!tells) return;
    *--d = 0;
    for (long long n = step_now; n || !*d; n /= 10) *--d = (char)('0' + n % 10);
    const char *const parts[] = { live ? "\n" : "", "megatrain: ", before, " step ", d, after, "\n" };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) strncat(text, parts[i], sizeof text - 1 - strlen(text));
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return; /* (nobody is there to be told) */
}

static void on_signal(int sig)
{
    const int saved_errno = errno;
    if (counter) ++*counter;
    if (sig == SIGINT && interrupted) {
        tell("quit in", " without saving");
        _exit(err_exit_code(ERR_INTERRUPTED));
    }
    if (sig == SIGINT) tell("finishing", ", then saving; Ctrl-C again quits without saving");
    else if (!signals_stop) tell("finishing", ", then saving");
    if (sig == SIGINT) interrupted = 1;
    signals_stop = sig;
    errno = saved_errno;
}

void signals_catch(bool lead, volatile uint64_t *heard)
{
    counter = heard;
    tells = lead;
    live = log_is_live();
    step_now = 1;
    struct sigaction a = { .sa_handler = on_signal };
    sigemptyset(&a.sa_mask);
    a.sa_flags = SA_RESTART;
    signals_stop = interrupted = 0;
    ending_catch(&a);
    sigaction(SIGUSR1, &a, NULL);
    signal(SIGPIPE, SIG_IGN); /* a closed pipe of the log must not end a run */
}

void signals_step(int64_t step) { step_now = (sig_atomic_t)step; }

void signals_follow_launcher(void)
{
    const char *pid = getenv("MEGATRAIN_LAUNCHER_PID");
    if (!pid || atoi(pid) <= 1) return;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (kill(atoi(pid), 0) && errno == ESRCH) raise(SIGTERM); /* dead before it was asked for */
}
