/*
 * What `plan` counts (cmd_plan.c), between its table (there) and its JSON (plan_figures.c). Ranks with the same tp and
 * pp rank hold the same shard and do the same work: a kind.
 */
#ifndef MEGATRAIN_CLI_PLAN_H
#define MEGATRAIN_CLI_PLAN_H

#include "config/config_device.h"
#include "train/spec.h"

/* Ranks that need the same. */
typedef struct {
    MemoryPlan plan;
    int pp_rank, first_tp_rank, tp_ranks;
    int first_cp_rank, cp_ranks;
} PlanKind;

typedef struct {
    const Config *cfg;
    const DeviceFile *target; /* the GPU to plan for; NULL: this machine, or a CPU */
    TrainSpec spec;
    Grid grid;
    PlanKind *kinds;
    int count;
    int64_t *shards; /* bytes of each rank's part of a checkpoint; 0: it writes none */
} PlanTable;

/* A figure of a kind of ranks, in bytes or FLOP, by its names in the JSON, in a line, and above a narrow column. */
typedef struct {
    const char *key, *label, *heading;
    int64_t (*value)(const PlanTable *,
                     const PlanKind *); /* NULL: a member of MemoryPlan, int64_t, at `field` */
    bool (*shown)(const PlanTable *);   /* as text; NULL: always */
    size_t field;
    bool is_count, on_host; /* FLOP; of the host's memory, wherever the total is that of a GPU */
} PlanFigure;

/* What a rank takes, the total last, and what it does in a step; a figure without a key ends each. */
extern const PlanFigure plan_memory[], plan_work[];
int64_t plan_value(const PlanTable *t, const PlanKind *k, const PlanFigure *f);
/* Weights, gradients and moments. */
int64_t plan_param_bytes(const PlanTable *t, const PlanKind *k);

/* Of the rank that takes the most; with what CUDA and its libraries take beside the plan, on `target`. */
int64_t plan_largest_total(const PlanTable *t);
bool plan_fits(const PlanTable *t);
int64_t
plan_library_bytes(const PlanTable *t); /* of CUDA, its libraries, and NCCL's communicators, at most */

int64_t plan_checkpoint(const PlanTable *t); /* of all shards */

/* On stdout. ERR_MEMORY. */
Err plan_print_json(const PlanTable *t);

#endif
