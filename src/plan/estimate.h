/*
 * Stages as sums of their parts (layer_cost.h): a bound of a layout's bytes, and its time by a replay of its schedule.
 * Also the uneven cuts that are worth a look.
 */
#ifndef MEGATRAIN_PLAN_ESTIMATE_H
#define MEGATRAIN_PLAN_ESTIMATE_H

#include "plan/layer_cost.h"
#include "plan/layout.h"
#include "plan/shape.h"

/* Bytes of a rank's state by element of its parameters: cut over copies (moments, the master's weights), over those of
 * a group of ZeRO (gradients and values while nobody works on them), and whole. */
typedef struct {
    int64_t cut, near, whole;
    double dense_copies, expert_copies; /* ranks that cut it; 1 without ZeRO */
    double near_dense, near_experts;
} StateBytes;

StateBytes state_bytes(const TrainSpec *spec, Grid grid);

/* Facts that layouts with equal inner keys share. */
typedef struct {
    Layout layout; /* LAYOUT_INNER keys count */
    TrainSpec spec;
    Grid grid; /* grid of one of its pipelines */
    bool sums_by_message;
    int host_ranks;
    bool legal;
    int64_t weights; /* bytes that the mean rank of any pipeline takes at least, without what units keep */
    bool measured;   /* `costs` are known: there is a pipeline that may fit */
    LayerCosts costs;
} Inner;

typedef struct {
    const Inner *inner;
    const BlockKinds *kinds;
    const Shape *shape;
    const StageShare *shares; /* [stages] */
    StateBytes state;
    ZeroCut zero;
    int copies;        /* ranks with the same dense weights */
    int64_t libraries; /* bytes that they take beside a rank's plan */
} Pipeline;

/*
 * No rank of the layout that takes the most takes less. Parts of a stage need their parameters, kept activations and
 * scratch beside each other; at the moment of `held` a rank has these units of its stages at once; its arenas hold at
 * least what lies in them; and tables, batches, buffers and padding are not counted.
 */
int64_t pipeline_bytes(const Pipeline *p);

/* The same if all ranks took equally much: what no cut of these stages gets below. */
int64_t pipeline_mean_bytes(const Pipeline *p);

/* Seconds: no replay is shorter; a replay. ERR_MEMORY. */
double pipeline_bound(const Pipeline *p);
Err pipeline_seconds(const Pipeline *p, double *seconds);

/*
 * Texts for parallel.layout that may be faster than p's cut and fit `memory`: by partition.h where a rank has one
 * stage, else with some blocks less in the first and last stages. By a replay, the fastest first; at most `most`,
 * *count of them. ERR_MEMORY.
 */
typedef struct {
    char text[LAYOUT_TEXT];
    double seconds;
} CutText;
Err pipeline_cuts(const Pipeline *p, int64_t memory, int most, CutText *out, int *count);

#endif
