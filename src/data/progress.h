/*
 * How far a job over input files has come: a line that changes at the bottom of a terminal, elsewhere a line now and
 * then, more and more rarely.
 */
#ifndef MEGATRAIN_DATA_PROGRESS_H
#define MEGATRAIN_DATA_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int64_t total_bytes, start_bytes; /* start: -1 before the first piece */
    double start_s, next_s, pause_s;
    bool live;
} Progress;

void progress_open(Progress *p, int64_t total_bytes);
/* After each piece; done_bytes: of all inputs, by an earlier process too. Shown when it is time. */
void progress_show(Progress *p, int64_t done_bytes, int64_t tokens);
void progress_close(Progress *p);

#endif
