/* Seconds: clock_s of a clock that only ever goes forward, for measuring how long something took; clock_unix_s of the
 * calendar's, since 1970 UTC, as the system has it. */
#ifndef MEGATRAIN_BASE_CLOCK_H
#define MEGATRAIN_BASE_CLOCK_H

#include <time.h>

static inline double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double clock_unix_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
