/*
 * What a run says about itself while it goes: a line of metrics.jsonl for every step, the live line of the
 * terminal (plain lines elsewhere), loss.svg, and event files for TensorBoard.
 *
 *   metrics_open -> metrics_step, metrics_valid, metrics_task ... -> metrics_close
 *
 * on one rank; the others leave it zero.
 *
 * A resumed run goes on with the files as they were at the checkpoint: lines and events of later steps, of a run
 * that was killed, are cut off first. The curve covers the earlier steps too.
 *
 * All memory is taken by metrics_open. A Metrics that is all zero ignores every call.
 *
 * A full disk must not end a run that could go on: a line or event that cannot be written is dropped with a warning,
 * never half of it stays, and metrics_close then fails.
 */
#ifndef MEGATRAIN_RECORD_METRICS_H
#define MEGATRAIN_RECORD_METRICS_H

#include "base/file.h"
#include "base/log.h"
#include "record/events.h"
#include "record/prometheus.h"
#include "record/record.h"

typedef struct {
    const char *run_dir;    /* exists */
    const char *title;      /* title of the picture: the run folder's name; copied */
    bool jsonl;             /* log.jsonl */
    bool tensorboard;       /* log.tensorboard */
    int color;              /* log.color: LOG_COLOR_AUTO, LOG_COLOR_ALWAYS, LOG_COLOR_NEVER */
    int64_t log_every;      /* steps between lines that stay; on a terminal the others show below them */
    int64_t total_steps;    /* for the time left; 0: not known */
    int64_t epoch_tokens;   /* for the epoch; 0: not known */
    const char *prometheus; /* log.prometheus; NULL or "": none */
    const char *config;     /* the resolved configuration, for TensorBoard; NULL: not shown */
    int64_t resume_step;    /* step of the checkpoint that the run starts from; 0: from the beginning */
} MetricsOptions;

typedef struct {
    bool open;
    MetricsOptions o;
    SetupArena memory;
    FileWriter jsonl;
    Events events;
    Prometheus prometheus;
    int64_t lost_lines, lost_events;
    Curve curve; /* curve of the loss */
    SvgSheet picture;
    double picture_s, status_s; /* when they were last brought up to date */
    double mean_ms;             /* mean time of a step, the last ones counting most */
    bool live, colored;
    bool said;                   /* text is a line of the log, not only the live one */
    char text[LOG_STATUS_BYTES]; /* status of the last step */
    char title[256];
    char line[RECORD_BYTES]; /* line of metrics.jsonl, as it is made */
    char jsonl_path[PATH_MAX], svg_path[PATH_MAX];
} Metrics;

/* The content of a run's metrics.jsonl. */
typedef struct {
    int64_t last_step; /* 0: of no step */
    bool saved;        /* a checkpoint was written */
} MetricsLeft;
Err metrics_left(const char *run_dir, MetricsLeft *left);

/*
 * ERR_STORAGE: the folder cannot be written. ERR_MEMORY. On error nothing stays open.
 * Lines of an earlier metrics.jsonl that are no JSON are dropped: a torn last one silently, others with a warning.
 */
Err metrics_open(Metrics *m, MetricsOptions o);

/* Something to read until the first step is done. */
void metrics_wait(Metrics *m);
void metrics_step(Metrics *m, const MetricsRecord *r);

/* An evaluation after so many steps. */
void metrics_valid(Metrics *m, const ValidRecord *r);

/* A task of that evaluation. */
void metrics_task(Metrics *m, const TaskRecord *r);

/* A key that differs from the checkpoint that the run went on from. */
void metrics_override(Metrics *m, const OverrideRecord *r);
void metrics_restart(Metrics *m, const RestartRecord *r);

/* Ends the live line, writes loss.svg. ERR_STORAGE when lines or the picture could not be written. */
Err metrics_close(Metrics *m);

#endif
