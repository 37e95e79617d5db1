/*
 * What `plan` counts (cmd_plan.c), between its table (there) and its JSON (plan_figures.c). Ranks with the same tp and
 * pp rank hold the same shard and do the same work: a kind.
 */
#ifndef MEGATRAIN_CLI_PLAN_H
#define MEGATRAIN_CLI_PLAN_H

#include "train/spec.h"

/* A device to plan for: memory as its driver reports it, and what it is sold as; 0: a CPU. */
typedef struct {
    const char *name, *key; /* of --device; what that means for the configuration */
    int64_t mib;
    int gb;
} PlanTarget;

/* Ranks that need the same. */
typedef struct {
    MemoryPlan plan;
    int pp_rank, first_tp_rank, tp_ranks;
    int first_cp_rank, cp_ranks;
} PlanKind;

typedef struct {
    const Config *cfg;
    const PlanTarget *target; /* NULL: this machine */
    TrainSpec spec;
    Grid grid;
    PlanKind *kinds;
    int count, columns; /* shown side by side */
    int64_t *shards;    /* bytes of each rank's part of a checkpoint; 0: it writes none */
} PlanTable;

/* Bytes of one rank: by kind of memory, in all, read and written by ops, sent to others. */
int64_t plan_weights(const PlanTable *t, const PlanKind *k);
int64_t plan_narrow_weights(const PlanTable *t, const PlanKind *k);
int64_t plan_gradients(const PlanTable *t, const PlanKind *k);
int64_t plan_moments(const PlanTable *t, const PlanKind *k);
int64_t plan_boundary(const PlanTable *t, const PlanKind *k);
int64_t plan_tables(const PlanTable *t, const PlanKind *k);
int64_t plan_saves(const PlanTable *t, const PlanKind *k);
int64_t plan_scratch(const PlanTable *t, const PlanKind *k);
int64_t plan_scratch_forward(const PlanTable *t, const PlanKind *k); /* of it, that of forwards in pairs */
int64_t plan_workspace(const PlanTable *t, const PlanKind *k);
int64_t plan_staging(const PlanTable *t, const PlanKind *k);
int64_t plan_ahead(const PlanTable *t, const PlanKind *k);
int64_t plan_snapshot(const PlanTable *t, const PlanKind *k);
int64_t plan_total(const PlanTable *t, const PlanKind *k);
int64_t plan_op_bytes(const PlanTable *t, const PlanKind *k);
int64_t plan_comm_bytes(const PlanTable *t, const PlanKind *k);

/* Of the rank that takes the most; with what CUDA and its libraries take beside the plan, on `target`. */
int64_t plan_largest_total(const PlanTable *t);
bool plan_fits(const PlanTable *t);
int64_t
plan_library_bytes(const PlanTable *t); /* of CUDA, its libraries, and NCCL's communicators, at most */

int64_t plan_checkpoint(const PlanTable *t); /* of all shards */

/* On stdout. ERR_MEMORY. */
Err plan_print_json(const PlanTable *t);

#endif
