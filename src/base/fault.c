/* See fault.h. */
#include "base/fault.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef enum { ACT_KILL, ACT_STOP, ACT_LOOP, ACT_EXIT, ACT_SLOW, ACT_HOLD, ACT_COUNT } FaultAction;

enum { SLOW_US = 200000, HOLD_US = 1000 };

static const char *const actions[ACT_COUNT] = { "kill", "stop", "loop", "exit", "slow", "hold" };

static struct {
    bool armed;
    char point[32];
    long at;
    _Atomic long met;
    FaultAction action;
    pid_t parent;
} fault;

static bool read_fault(const char *text, int rank, int attempt)
{
    char copy[96], *word[5], *rest = copy;
    int words = 0, of, action = 0;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy) return false;
    while (rest && words < 5) word[words++] = strsep(&rest, ":");
    if (words < 3 || words > 4 || sscanf(word[0], "%d", &of) != 1 || strlen(word[1]) >= sizeof fault.point)
        return false;
    fault.at = words == 4 ? atol(word[2]) : 1;
    while (action < ACT_COUNT && strcmp(actions[action], word[words - 1])) action++;
    if (fault.at < 1 || action == ACT_COUNT) return false;
    fault.action = (FaultAction)action;
    strcpy(fault.point, word[1]);
    const char *faulty = getenv("MEGATRAIN_WORKERS_FAULT");
    fault.armed = of == rank && attempt < (faulty ? atoi(faulty) : 1);
    return true;
}

void fault_init(int rank, int attempt)
{
    const char *text = getenv("MEGATRAIN_RANK_FAULT");
    fault.parent = getppid();
    if (!text || read_fault(text, rank, attempt)) return;
    fprintf(stderr, "megatrain: error (configuration): MEGATRAIN_RANK_FAULT='%s' is not RANK:POINT[:N]:ACTION\n", text);
    _exit(2);
}

void fault_point(const char *name)
{
    if (!fault.armed || strcmp(name, fault.point)) return;
    const long met = atomic_fetch_add(&fault.met, 1) + 1;
    if (fault.action == ACT_SLOW && met > fault.at) usleep(SLOW_US);
    if (met != fault.at) return;
    fprintf(stderr, "fault: %s at %s, call %ld\n", actions[fault.action], name, fault.at);
    switch (fault.action) {
    case ACT_KILL: raise(SIGKILL); break;
    case ACT_STOP: kill(getpid(), SIGSTOP); break; /* the process, not the thread alone */
    case ACT_LOOP:
        for (volatile long turn = 0;; turn++) {}
    case ACT_EXIT: _exit(0);
    case ACT_SLOW: usleep(SLOW_US); break;
    case ACT_HOLD:
        while (getppid() == fault.parent) usleep(HOLD_US);
        break;
    case ACT_COUNT: break;
    }
}
