/*
 * Costs of the parts of a model on a rank, by dry runs of a model that has one block of each kind, every part of it in
 * a stage of its own: bytes, and through a clock seconds. A stage of any layout is then a sum over its parts. That sum
 * orders layouts; the cost of a layout is always a dry run of its own.
 */
#ifndef MEGATRAIN_PLAN_LAYER_COST_H
#define MEGATRAIN_PLAN_LAYER_COST_H

#include "cost/cost.h"
#include "engine/trainer.h"

/* A rank's step in seconds: of each of its stages one unit; what ends the step, and of it what ranks with the same
 * weights exchange; a message to the next stage. */
typedef struct {
    StageCost stage[PARTS_STAGES];
    double tail, reduce, hop;
} RankTimes;

/* Source of seconds: like trainer_plan, with times. Several threads call it at once. */
typedef struct {
    const void *user;
    Err (*dry_run)(const void *user, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan, RankTimes *times);
    const CostModel *model; /* model of the device; NULL: only dry_run knows something of it */
} CostSource;

enum { BLOCK_KINDS = 12 };

/* The kinds of a model's blocks; that of its last block is the last, as the blocks of its modules are of that kind. */
typedef struct {
    int count, first[BLOCK_KINDS]; /* a block of each */
    uint8_t kind[LAYERS_MAX];      /* kind of each block */
} BlockKinds;

/* false: there are more than BLOCK_KINDS. */
bool block_kinds(const ModelSpec *m, BlockKinds *out);

/* How a backward runs: at once, or with its wgrad apart, which keeps more of a unit for longer. */
enum { BACKWARD_WHOLE, BACKWARD_SPLIT, BACKWARDS };

/* One part: the embedding, a block, the modules that predict further tokens, or the head. */
typedef struct {
    StageCost cost[BACKWARDS];
    int64_t kept[BACKWARDS][REGION_COUNT]; /* bytes of a unit */
    double update, reduce;  /* at the end of a step; the second by how many ranks have the same weights */
    int64_t dense, experts; /* elements of parameters, without padding */
    int64_t scratch;
} PartCost;

typedef struct {
    PartCost embedding, block[BLOCK_KINDS], modules, head;
    double hop;
    int copies; /* ranks with the same dense weights, when `reduce` was measured */
} LayerCosts;

/* The parts to be measured anew; the others stay as they are in *out. */
typedef enum { PARTS_ALL, PARTS_WITH_EXPERTS } PartsMeasured;

/* Costs of a rank of spec and grid, whatever their pipeline is. Errors: those of the source. */
Err layer_costs(const CostSource *source, const TrainSpec *spec, Grid grid, const BlockKinds *kinds,
                PartsMeasured which, LayerCosts *out);

/* The first rank of the grid that is on this pipeline rank. */
int grid_rank_at(Grid g, int pp_rank, int tp_rank, int cp_rank);

#endif
