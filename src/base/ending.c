/* See ending.h. */
#include "base/ending.h"

#include <stdbool.h>
#include <stddef.h>

const int ending_signals[ENDING_COUNT] = { SIGINT, SIGTERM, SIGHUP };

void ending_catch(const struct sigaction *action)
{
    for (int i = 0; i < ENDING_COUNT; i++) {
        struct sigaction now;
        const bool ignored = !sigaction(ending_signals[i], NULL, &now) && now.sa_handler == SIG_IGN;
        if (ending_signals[i] != SIGHUP || !ignored) sigaction(ending_signals[i], action, NULL);
    }
}
