/* Seconds that only ever go forward, for measuring how long something took. */
#ifndef MEGATRAIN_BASE_CLOCK_H
#define MEGATRAIN_BASE_CLOCK_H

#include <time.h>

static inline double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
