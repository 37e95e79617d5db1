/*
 * What a run says about itself while it goes: a line of metrics.jsonl for every step, the live line of the
 * terminal (plain lines elsewhere), and loss.svg.
 *
 *   metrics_open -> metrics_step, metrics_valid ... -> metrics_close      on one rank, the others leave it zero
 *
 * A resumed run goes on with the file as it was at the checkpoint: lines of later steps, of a run that was
 * killed, are cut off first. The curve covers the earlier steps too.
 *
 * All memory is taken by metrics_open; the curve has at most CURVE_POINTS points, each standing for `stride`
 * steps, doubled whenever they run out. A Metrics that is all zero ignores every call.
 *
 * A full disk must not end a run that could go on: a line that cannot be written is dropped with a warning,
 * never half of it stays, and metrics_close then fails.
 */
#ifndef MEGATRAIN_TRAIN_METRICS_H
#define MEGATRAIN_TRAIN_METRICS_H

#include "base/arena.h"
#include "base/file.h"
#include "base/log.h"
#include "train/svg.h"

enum { CURVE_POINTS = 1024, CURVE_DOTS = 512, METRICS_NAMES = 8 };

/* One step, as in metrics.jsonl. NaN and Inf are allowed and become null. */
typedef struct {
    int64_t step, tokens; /* tokens: so far, of the whole run */
    double loss;          /* mean per token, nats */
    double grad_norm, lr;
    double step_ms, tokens_per_s;
    double mfu, tflops; /* share of the peak; per device */
    int64_t memory_bytes;
    bool skipped;
} MetricsRecord;

typedef struct {
    const char *run_dir; /* exists */
    const char *title;   /* of the picture: the run's name */
    bool jsonl;          /* log.jsonl */
    int color;           /* log.color: LOG_COLOR_AUTO, LOG_COLOR_ALWAYS, LOG_COLOR_NEVER */
    int64_t log_every;   /* steps between plain lines */
    int64_t total_steps; /* for the time left; 0: not known */
    int64_t resume_step; /* of the checkpoint the run starts from; 0: from the beginning */
} MetricsOptions;

/* The loss of all steps so far, thinned out. */
typedef struct {
    SvgPoint *points; /* the last one may stand for fewer steps than the others */
    int count;
    int64_t stride;
    SvgDot *dots;
    int dot_count; /* when they run out, every second one is dropped */
} MetricsCurve;

typedef struct {
    bool open;
    MetricsOptions o;
    SetupArena memory;
    FileWriter jsonl;
    int64_t lost_lines;
    MetricsCurve curve;
    char name[METRICS_NAMES][SVG_NAME_BYTES]; /* of the validation sets */
    int names;
    char *picture;              /* SVG_BYTES */
    double picture_s, status_s; /* when they were last brought up to date */
    double mean_ms;             /* of a step, the last ones counting most */
    bool live, colored;
    char text[LOG_STATUS_BYTES]; /* of the last step */
    char jsonl_path[PATH_MAX], svg_path[PATH_MAX];
} Metrics;

/*
 * ERR_STORAGE: the folder cannot be written. ERR_MEMORY. On error nothing stays open.
 * Lines of an earlier metrics.jsonl that are no JSON are dropped: a torn last one silently, others with a warning.
 */
Err metrics_open(Metrics *m, MetricsOptions o);

void metrics_step(Metrics *m, const MetricsRecord *r);

/* An evaluation after `step` steps. name: of the validation set, "" if there is only one; cut to what
 * SVG_NAME_BYTES hold. */
void metrics_valid(Metrics *m, int64_t step, int64_t tokens, const char *name, double loss);

/* Ends the live line, writes loss.svg. ERR_STORAGE when lines or the picture could not be written. */
Err metrics_close(Metrics *m);

#endif
