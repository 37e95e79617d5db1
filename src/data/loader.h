/*
 * The loader hands one data-parallel rank its samples, fetched ahead of time by a thread.
 *
 * Global batches of G samples follow each other from position `first_position` on; the ramp says what G is in a step.
 * Rank r of dp has a window of each: the G / dp positions from r G / dp on. Whatever is asked for, the answer is that
 * of dataset_get: prefetching only decides how long it takes. A request inside the present window or the next one is a
 * copy; as soon as one reaches into the next window, that becomes the present one and the thread starts on its
 * successor. Any other request (a jump, another rank's window) is fetched on the spot.
 *
 * Nothing is allocated after loader_open. One thread calls loader_get.
 */
#ifndef MEGATRAIN_DATA_LOADER_H
#define MEGATRAIN_DATA_LOADER_H

#include <stdint.h>

#include "base/batch_ramp.h"
#include "base/err.h"
#include "data/dataset.h"

typedef struct {
    const Dataset *dataset; /* must outlive the loader */
    int64_t first_position; /* where the first global batch begins */
    int64_t first_step;     /* the number of its step, from 1 on */
    BatchRamp ramp;         /* the global batch G of each step, a multiple of dp */
    int dp, dp_rank;
} LoaderOptions;

typedef struct Loader Loader;

/* How much of the host's memory a loader takes, if a window has `samples`: that of the present window and
 * the next one. */
int64_t loader_bytes(int64_t samples, int64_t seq);

Err loader_open(const LoaderOptions *o, Loader **out); /* ERR_MEMORY */
void loader_close(Loader *l);                          /* NULL is fine */

/*
 * Reads tokens[count][seq + 1] at the positions first_position .. first_position + count - 1. ERR_DATA as dataset_get,
 * whether they were fetched ahead or not.
 */
Err loader_get(Loader *l, int64_t first_position, int64_t count, int32_t *tokens);

typedef struct {
    int64_t copied_samples, fetched_samples; /* how many came from a buffer; how many were fetched on the spot */
} LoaderStats;
LoaderStats loader_stats(const Loader *l);

#endif
