/*
 * The state of a run's loop (train.c), and how it is opened and closed. Only src/train/ uses it.
 */
#ifndef MEGATRAIN_TRAIN_LOOP_H
#define MEGATRAIN_TRAIN_LOOP_H

#include "base/identity.h"
#include "engine/expert_load.h"
#include "record/metrics.h"
#include "train/dump.h"
#include "train/rank_times.h"
#include "train/ranks.h"
#include "train/run.h"
#include "train/timeline.h"
#include "train/train.h"

typedef struct {
    const Config *cfg;
    Ranks ranks;
    bool lead;            /* this is the rank that writes what is written once */
    bool tracing;         /* spans are being recorded, perhaps on some ranks only */
    Timeline *timeline;   /* NULL: there is one rank */
    MetricsBubble bubble; /* bubble of the step before the next line of metrics */
    ExpertLoads loads;    /* those of a mixture in the last step */
    RankTimes times;      /* with several ranks, what they came to in the last step */
    MetricsRanks slowest;
    Run run;
    Loader *loader;
    Ckpt ckpt;
    Metrics metrics;
    Dump dump;
    int lock_fd;
    bool folder_gone; /* it was said */
    char *config_text;
    char machine[IDENTITY_MACHINE_BYTES], job[320]; /* on rank 0, for people: where this start computes, who began it */
    double peak_flops, flop_per_token, started_s;
    double begun_s; /* when the step of the next line of metrics began */
    const char *peak_source;
    int skipped_in_a_row;
    int64_t failed_saves; /* in a row */
    int64_t saved_step, steps_done;
    double stall_s;    /* how long the save in flight has held training up */
    MetricsSave saved; /* the save since the last step */
} Loop;

/* Joins the ranks, takes the run's folder, builds or resumes the run and opens all that it writes. loop_close is to be
 * called after a failure, too; it returns the error to report. */
Err loop_open(Loop *l, Config *cfg, const Boot *boot, const LayoutChoice *choice);
Err loop_close(Loop *l, Err err);

#endif
