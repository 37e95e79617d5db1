/*
 * The records of metrics.jsonl, written and read: one object a line, one line a step or an evaluation
 * (docs/watching.md). What a step's record holds is a table, so that the event files of TensorBoard say the same.
 */
#ifndef MEGATRAIN_RECORD_RECORD_H
#define MEGATRAIN_RECORD_RECORD_H

#include "base/json.h"
#include "base/layer_set.h"
#include "record/curve.h"

/* A checkpoint whose outcome was known since the step before: how long training stood still for it, how long writing
 * it took. */
typedef struct {
    int64_t step; /* 0: there was none */
    double stall_ms, save_ms;
    char failure[512]; /* why there is none; "" if there is */
} MetricsSave;

/* Shares of the ranks' time without compute, in a traced step of a pipeline (timeline.h). */
typedef struct {
    bool measured; /* else there is none */
    double bubble, bubble_simulated;
} MetricsBubble;

/* How the ranks of a step shared its time (rank_times.h). Of three numbers: the least, the median, the most. */
typedef struct {
    int slowest; /* the rank that computed longest beside its peers */
    /* Time by which it is longer than the median of the ranks; that time over the median. */
    double lag_ms, lag;
    double compute_ms[3], wait_ms[3]; /* times of all ranks */
    bool measured;                    /* else there is none */
    bool notable;                     /* for some steps now it is the same rank, by far */
} MetricsRanks;
static const double LAG_NOTABLE = 0.2; /* a rank is the slowest by far from this lag on */

/* The largest logits of attention in a step (engine/trainer.h). */
typedef struct {
    const double *by_layer; /* [MetricsRecord.layers]; NULL: nobody asked */
    double most;
    int layer, head; /* layer and head of that logit */
} MetricsLogits;

/*
 * The figures of a step, a line each: type, name in metrics.jsonl and of the member below, tag in TensorBoard's files
 * (GROUP/NAME; NULL: none). They stand in the file in this order. train/train.c: record_step says their values, and
 * docs/watching.md what they mean.
 */
/* clang-format off */
#define RECORD_STEP_FIELDS(F)                     \
    F(INT, step, NULL)                            \
    F(INT, tokens, "run/tokens")                  \
    F(REAL, loss, "loss/train")                   \
    F(REAL, grad_norm, "optim/grad_norm")         \
    F(REAL, lr, "optim/lr")                       \
    F(REAL, step_ms, "speed/step_ms")             \
    F(REAL, tokens_per_s, "speed/tokens_per_s")   \
    F(REAL, mfu, "speed/mfu")                     \
    F(REAL, tflops, "speed/tflops")               \
    F(INT, memory_bytes, "run/memory_bytes")      \
    F(BOOL, skipped, "optim/skipped")             \
    F(REAL, time, NULL)
/* clang-format on */

#define RECORD_TYPE_INT int64_t
#define RECORD_TYPE_REAL double
#define RECORD_TYPE_BOOL bool
#define RECORD_MEMBER(type, name, tag) RECORD_TYPE_##type name;
#define RECORD_ONE(type, name, tag) +1

/* One step. NaN and Inf are allowed and become null. */
typedef struct {
    RECORD_STEP_FIELDS(RECORD_MEMBER)
    /* not among the fields: */
    MetricsSave save;
    MetricsBubble bubble;
    MetricsRanks ranks;
    /* Loads of experts by layer, 0: no mixture (engine/expert_load.h); NULL: a dense model. */
    const double *load;
    /* Balance losses, before their coefficient; NULL: it is balanced in another way. */
    const double *aux_loss, *z_loss;
    const int64_t *dropped; /* choices of tokens by layer; NULL: experts take all */
    MetricsLogits logits;
    int layers;
    const double *mtp_loss; /* losses of the modules of multi-token prediction */
    int mtp;                /* number of these modules */
} MetricsRecord;

/* JSON escapes make a byte six; a load or a logit is a number of at most 24 characters, a count one of 19. */
enum {
    RECORD_FIELDS = RECORD_STEP_FIELDS(RECORD_ONE),
    RECORD_BYTES = 960 + 64 * RECORD_FIELDS + 6 * 512 + (45 + 25) * LAYERS_MAX
};

const char *record_tag(int field); /* tag in TensorBoard, GROUP/NAME; NULL: it has none */
double record_value(const MetricsRecord *r, int field);

/* One evaluation: the loss on a validation set, "" being the name of an only one. */
typedef struct {
    int64_t step, tokens;
    double loss, time; /* as of a step */
    char name[CURVE_NAME_BYTES];
} ValidRecord;

/* The result of a task of an evaluation (data/tasks.h): shares of its questions and their standard errors, by metric.
 * Metrics from `metrics` on mean nothing for it. */
enum { RECORD_TASK_METRICS = 3 };
typedef struct {
    int64_t step, tokens, questions;
    double time; /* as of a step */
    const char *name;
    const char *const *metric; /* their names */
    int metrics;
    double mean[RECORD_TASK_METRICS], error[RECORD_TASK_METRICS];
} TaskRecord;

/* A key that a resumed run has otherwise than its checkpoint (overrides.h). */
typedef struct {
    int64_t step; /* the first one that it applies to */
    const char *section, *key, *was, *is;
    double time; /* as of a step */
} OverrideRecord;

/* A run that went on by itself (run.restarts). */
typedef struct {
    int64_t step;    /* of the checkpoint that it went on from; 0: it began anew */
    int64_t restart; /* the how many-th of this start of the run */
    const char *cause;
    int64_t lost;   /* steps that are done again */
    double seconds; /* from the loss until all is open again */
    double time;    /* as of a step */
} RestartRecord;

typedef enum { RECORD_DAMAGED, RECORD_STEP, RECORD_VALID, RECORD_OVERRIDE, RECORD_OTHER } RecordKind;

enum { RECORD_KEY_BYTES = 96, RECORD_VALUE_BYTES = 256 };

typedef struct {
    RecordKind kind;
    /* Its load is the one below, of the layers that are mixtures alone; of ranks the first three are read, of logits
     * the largest. */
    MetricsRecord step;
    ValidRecord valid;
    struct {
        char key[RECORD_KEY_BYTES], was[RECORD_VALUE_BYTES], is[RECORD_VALUE_BYTES]; /* "section.key"; values cut */
    } override; /* a key that changed from step `step.step` on */
    double load[LAYERS_MAX];
} Record;

/* The objects, without the end of the line. */
void record_put_step(JsonOut *j, const MetricsRecord *r);
void record_put_valid(JsonOut *j, const ValidRecord *v);
void record_put_task(JsonOut *j, const TaskRecord *t);
void record_put_override(JsonOut *j, const OverrideRecord *r); /* long values are cut */
void record_put_restart(JsonOut *j, const RestartRecord *r);   /* as is a long cause */

/*
 * Reads a line. An evaluation has valid_loss, and the set's name in `valid`. Members that are missing are NaN, or 0 for
 * whole numbers. RECORD_OTHER: neither that nor a loss nor an override (a task, a restart). RECORD_DAMAGED: no JSON
 * object, or none with a step of 0 or more.
 */
void record_read(const char *line, int64_t size_bytes, Record *out);

#endif
