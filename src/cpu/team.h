/* How many threads a parallel region of an op begins with. */
#ifndef MEGATRAIN_CPU_TEAM_H
#define MEGATRAIN_CPU_TEAM_H

#include <omp.h>

#include "device/device.h"

/*
 * Threads of a region in which so many have work: one, or all. A team that is smaller than the one before it costs more
 * than threads that find nothing to do: libgomp ends those that it leaves out, and makes them anew for the next.
 */
static inline int team_of(const Device *dev, int64_t useful) { return useful > 1 ? dev->threads : 1; }

#endif
