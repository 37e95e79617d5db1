/*
 * How far a job over input files has come: a line that changes at the bottom of a terminal, elsewhere a line now and
 * then, more and more rarely.
 */
#ifndef MEGATRAIN_DATA_PROGRESS_H
#define MEGATRAIN_DATA_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int64_t total, start; /* bytes or items; start: -1 before the first piece */
    const char *what;     /* is counted: "tokens" */
    double start_s, next_s, pause_s;
    bool live;
} Progress;

/* total: bytes of the inputs, 0: not known (stdin); of progress_items, items. what: NULL if nothing is counted. */
void progress_open(Progress *p, int64_t total, const char *what);
/* After each piece; done_bytes: of all inputs, by an earlier process too; count: of `what`. Shown when it is time. */
void progress_show(Progress *p, int64_t done_bytes, int64_t count);
/* The same of work that is no reading: so many of `total` items are done. */
void progress_items(Progress *p, int64_t done);
void progress_close(Progress *p); /* one that was not opened is fine */

#endif
