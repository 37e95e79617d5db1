/*
 * The loader hands one data-parallel rank its samples, fetched ahead of time by a thread.
 *
 * Global batches of G samples follow each other from position `first` on, G being the ramp's of that
 * step; of these, rank r of dp holds the slice of G / dp positions that starts at r G / dp. Whatever is
 * asked for, the answer is that of dataset_get: prefetching only decides how long it takes. A
 * request inside the present slice or the next one is a copy; as soon as one reaches into the next
 * slice, that becomes the present one and the thread starts on its successor. Any other request (a
 * jump, another slice) is fetched on the spot.
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
    int64_t first_position; /* of the first global batch, */
    int64_t first_step;     /* and its number, from 1 on */
    BatchRamp ramp;         /* G of each step; multiples of dp */
    int dp, dp_rank;
} LoaderOptions;

typedef struct Loader Loader;

/* What a loader takes of the host's memory for `samples` a slice: the present slice and the next one. */
int64_t loader_bytes(int64_t samples, int64_t seq);

Err loader_open(const LoaderOptions *o, Loader **out); /* ERR_MEMORY */
void loader_close(Loader *l);                          /* NULL is fine */

/*
 * tokens[count][seq + 1] of the positions first_position .. first_position + count - 1.
 * ERR_DATA as dataset_get, prefetched or not.
 */
Err loader_get(Loader *l, int64_t first_position, int64_t count, int32_t *tokens);

typedef struct {
    int64_t copied_samples, fetched_samples; /* served from a buffer; fetched on the spot */
} LoaderStats;
LoaderStats loader_stats(const Loader *l);

#endif
