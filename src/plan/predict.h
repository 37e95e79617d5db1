/*
 * How long a step takes on a device that may be absent: dry runs of the pipeline's ranks on a time line
 * (cost/time_line.h), then the schedule with what each stage takes (pipeline/simulate.h). docs/planner.md says how far
 * that is from measured steps.
 *
 *   step    the schedule's units + what the slowest rank does besides: sums of gradients that units do not hide, the
 *           norm, the update
 *
 * Not in it: waiting for data, and steps that are done again; for evaluations and checkpoints: besides.h.
 */
#ifndef MEGATRAIN_PLAN_PREDICT_H
#define MEGATRAIN_PLAN_PREDICT_H

#include <stdio.h>

#include "cost/time_line.h"
#include "engine/trainer.h"

typedef struct {
    double step_s, tokens_s;
    double flop_s, mfu; /* of a device, by 6 N + 12 L C T; its share of the peak, 0: that is not known */
    int pp_rank;        /* the one that is busy longest, of which are: */
    TimeShares shares;  /* its step without waiting for other stages */
    double bubble_s;    /* and that: step_s = shares.now + bubble_s */
    double rest_s;      /* of the step behind its units */
    double forward_s;   /* an evaluation of as many samples */
    int64_t bytes; /* of the device, on the rank among those looked at that takes most (memory_plan_total) */
} Prediction;

/* As trainer_plan, with times. Several threads may call it at once. */
Err predict_rank(const CostModel *m, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan,
                 StepTimes *times);

/* A message between pipeline ranks, in seconds: the longest, and each one's to the next (the last one's to the first),
 * which crosses the network if it does so in any pipeline. ERR_MEMORY. */
double predict_hop(const CostModel *m, const TrainSpec *spec, Grid grid);
Err predict_hops(const CostModel *m, const TrainSpec *spec, Grid grid, double *hop);

/* Errors: those of trainer_plan. */
Err predict(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out);

/* And draws the step, with a row for each pipeline rank (pipeline/chart.h). */
Err predict_svg(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out, FILE *svg);

/* What the step is bound by: the largest share, "products", "waits for sp", "waits for other stages", ...; *seconds
 * of it, if not NULL. */
const char *prediction_bound(const Prediction *p, double *seconds, char buf[48]);

#endif
