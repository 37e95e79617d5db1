/*
 * Jobs done by several threads, whose results are taken in order: job i fills a slot of memory, and the caller writes
 * what the slots hold one after the other. There are a few more slots than threads, so memory does not depend on how
 * many jobs there are, and the result not on the number of threads.
 */
#ifndef MEGATRAIN_HF_JOBS_H
#define MEGATRAIN_HF_JOBS_H

#include <stdint.h>

#include "base/arena.h"

typedef struct Jobs Jobs;

typedef struct {
    void *user;
    /* Does job `index`: fills `slot`, and says how many bytes. On any thread. scratch: as large as a slot. */
    Err (*work)(void *user, int64_t index, char *slot, char *scratch, int64_t *size_bytes);
    int64_t first, count, slot_bytes; /* jobs [first, count) */
    int threads;
} JobsSpec;

/* Memory is of `a`. jobs_close, also after an error of the others, waits for the threads. */
Err jobs_open(const JobsSpec *spec, SetupArena *a, Jobs **out);
/* The next job's result, which stays until the next call. The error of a job that failed. */
Err jobs_next(Jobs *j, const void **data, int64_t *size_bytes);
void jobs_close(Jobs *j); /* NULL is fine */

#endif
