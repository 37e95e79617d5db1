/*
 * What a run is at, as a file for the textfile collector of Prometheus's node_exporter: a gauge a line, replaced as a
 * whole, so that no reader ever sees half of it (docs/watching.md).
 *
 *   megatrain_step{run="books"} 1200
 */
#ifndef MEGATRAIN_RECORD_PROMETHEUS_H
#define MEGATRAIN_RECORD_PROMETHEUS_H

#include <limits.h>

#include "record/record.h"

enum { PROMETHEUS_RUN_BYTES = 256 };

typedef struct {
    char path[PATH_MAX];            /* "": there is none */
    char run[PROMETHEUS_RUN_BYTES]; /* the label's value: UTF-8, escaped */
    double written_s;               /* when, on clock_s */
    int64_t skipped;                /* steps of this start */
    int64_t saved_step;             /* step of the newest checkpoint of this start; 0: none yet */
    double valid_loss;              /* the last one, of the first set; NaN: none yet */
    int64_t valid_step;             /* its step */
    MetricsRecord last;
    bool lost; /* a write failed, which was warned of */
} Prometheus;

/* name: "" for none; a name without a slash lies in the run's folder. ERR_CONFIG: a file is there that is none of
 * these. ERR_STORAGE. */
Err prometheus_open(Prometheus *p, const char *name, const char *run_dir, const char *run);

/* Writes the file if the last time was 5 s ago. A failure is warned of once. */
void prometheus_step(Prometheus *p, const MetricsRecord *r);
void prometheus_valid(Prometheus *p, const ValidRecord *r);

/* Writes it once more, with the last step. */
void prometheus_close(Prometheus *p);

#endif
