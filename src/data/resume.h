/*
 * Files from which an interrupted job goes on: PREFIX.part/job.json, beside the tokens that are done
 * (indexed.h), and PREFIX.part/lock.
 *
 * The job is the same if its options, its tokenizer and the inputs up to the place it has come to are: those by name,
 * size and time of their last change. Inputs behind that place may change, come or go; if it is the one in progress
 * that changed, the job goes on from its beginning.
 */
#ifndef MEGATRAIN_DATA_RESUME_H
#define MEGATRAIN_DATA_RESUME_H

#include "data/cut.h"
#include "data/indexed.h"

/* How much of a job is done. */
typedef struct {
    InputPlace place;
    IndexedMark written;
    int64_t empty_documents, missing_lines, invalid_bytes;
} JobDone;

typedef struct {
    const char *prefix, *options; /* options: a line of text */
    uint32_t tokenizer;           /* its checksum */
    const char *const *inputs;
    const InputStat *stats; /* [input_count] */
    int64_t input_count;
} JobIdentity;

/* Makes the folder and locks it. ERR_STORAGE if another process has it, or as indexed_check_place; ERR_IO. */
Err job_lock(const char *prefix, int *lock);
/* Removes the folder if it is still the one that was locked, and nothing is there to go on from. */
void job_unlock(const char *prefix, int lock);

/*
 * Saves atomically how much is done. `done` must have been synced; file_start: what was done when the present input
 * began.
 */
Err job_save(const JobIdentity *id, const JobDone *done, const JobDone *file_start);

/*
 * *found: there is something to go on from, and done and file_start say what, as for job_save. From what is damaged
 * nothing goes on, and a warning says so. ERR_CONFIG (other options), ERR_DATA (other inputs or another tokenizer): it
 * is another job's, whose work is not thrown away.
 */
Err job_load(const JobIdentity *id, JobDone *done, JobDone *file_start, bool *found);

/* *out: a checksum of a tokenizer and of the files that it was read from. */
Err tokenizer_identity(const Tokenizer *t, const char *spec, uint32_t *out);

#endif
