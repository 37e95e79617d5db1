/*
 * Shows how far a job over input files has come: on a terminal by a line at the bottom that changes, elsewhere by a
 * line now and then, more and more rarely.
 */
#ifndef MEGATRAIN_DATA_PROGRESS_H
#define MEGATRAIN_DATA_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int64_t total, start; /* in bytes or items; start: -1 before the first piece */
    const char *what;     /* the things counted: "tokens" */
    double start_s, next_s, pause_s;
    bool live;
} Progress;

/* total: how many bytes the inputs have, or for progress_items how many items there are; 0: not known (stdin). what:
 * NULL if nothing is counted. */
void progress_open(Progress *p, int64_t total, const char *what);
/* To be called after each piece; shows something when it is time. done_bytes: how much of all inputs is done, also by
 * an earlier process; count: how many of `what`. */
void progress_show(Progress *p, int64_t done_bytes, int64_t count);
/* The same for work that is no reading: so many of `total` items are done. */
void progress_items(Progress *p, int64_t done);
void progress_close(Progress *p); /* one that was not opened is fine */

#endif
