/*
 * How long a step takes on a device that may be absent: dry runs of the pipeline's ranks on a time line
 * (cost/time_line.h), then the schedule with what each stage takes (pipeline/simulate.h). docs/prediction.md says how
 * far that is from measured steps.
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
#include "plan/layer_cost.h"

typedef struct {
    double step_s, tokens_s;
    /* FLOP a second of a device, by 6 N + 12 L C T; its share of the peak, 0: that is not known */
    double flop_s, mfu;
    int pp_rank;       /* the one that is busy longest, of which are: */
    TimeShares shares; /* its step without waiting for other stages */
    double bubble_s;   /* and that: step_s = shares.now + bubble_s */
    double rest_s;     /* seconds of the step behind its units */
    double forward_s;  /* an evaluation of as many samples */
    /* Bytes of the device, on the rank among those looked at that takes most (memory_plan_total). */
    int64_t bytes;
    int worst_pp;   /* and that one's pipeline rank */
    int64_t params; /* parameters of the model */
} Prediction;

/* Like trainer_plan, with times. Several threads may call it at once. */
Err predict_rank(const CostModel *m, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan, StepTimes *times);

/* A message between pipeline ranks, in seconds: the longest, and each one's to the next (the last one's to the first),
 * which crosses the network if it does so in any pipeline. ERR_MEMORY. */
double predict_hop(const CostModel *m, const TrainSpec *spec, Grid grid);
Err predict_hops(const CostModel *m, const TrainSpec *spec, Grid grid, double *hop);

/* Dry runs by that model. */
CostSource predict_source(const CostModel *m);

/* What of a step is run dry: as few micro-batches as show what more do; all of them; and of each pipeline rank also the
 * other tp and cp ranks whose bytes may differ. The first two run one rank of each pipeline rank. */
typedef enum { PREDICT_BRIEF, PREDICT_STEP, PREDICT_RANKS } PredictHow;

/* ERR_CONFIG: the device has no products of the recipe, in the words of a run that begins there (fp8_spec_on_gpu). */
Err predict_allowed(const DeviceFile *d, const TrainSpec *spec);

/* Errors: those of trainer_plan and predict_allowed. */
Err predict(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out);

/* Predicts by any source, without forward_s; brief: nearly so. If costs are no numbers, step_s is NaN. */
Err predict_by(const CostSource *source, const TrainSpec *spec, Grid grid, PredictHow how, Prediction *out);

/* And draws the step, with a row for each pipeline rank (pipeline/chart.h). */
Err predict_svg(const CostModel *m, const TrainSpec *spec, Grid grid, Prediction *out, FILE *svg);

/* Parts of a step, by name: "products", "waits for sp", "waits for other stages", ... */
typedef struct {
    char name[48];
    double seconds;
} PredictionShare;
enum { PREDICTION_SHARES = FAMILIES + WORLD_COMMS + 3 };

/* All of them, in the same order for every prediction. */
void prediction_shares(const Prediction *p, PredictionShare out[PREDICTION_SHARES]);
/* The largest, by which the step is bound. */
PredictionShare prediction_bound(const Prediction *p);

#endif
