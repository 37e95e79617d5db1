/*
 * Who holds what: the schedule of a step, the stages that it cuts the model into, and the parameters of every pipeline
 * rank. All of it is a pure function of the specification and the grid, so every rank knows it of all.
 *
 * A rank holds `chunks` stages of each replica of the model: one replica, or two where the pipeline runs in both
 * directions. The stages of one replica on a rank share a registry.
 */
#ifndef MEGATRAIN_ENGINE_PARTS_H
#define MEGATRAIN_ENGINE_PARTS_H

#include "model/model.h"
#include "optim/optimizer.h"
#include "pipeline/schedule.h"

enum { PARTS_STAGES = 64 }; /* most stages of a rank */

/* The user's choices for the pipeline; all zero: 1F1B with even shares. */
typedef struct {
    const char *schedule; /* name in the table of schedules */
    const char *layout;   /* shares of the stages, model.h */
    int chunks, group;    /* 0 = the schedule's usual; group: of 2bw micro-batches of an update, usually pp */
    int slices;           /* slices of a sequence; 0 = 1 */
} PipelineSpec;

typedef struct {
    const ModelSpec *model;
    PipelineSpec pipeline;
    int microbatches;        /* micro-batches of a step on a pipeline */
    int64_t micro_batch;     /* samples of each */
    int64_t bucket_elems;    /* gradients of a bucket */
    ZeroCut zero;            /* states that are cut over the ranks that hold the same parameters */
    OptimizerKind optimizer; /* the optimizer of matrices */
    const MuonSpec *muon;
    bool narrow, fp32_vectors; /* of ParamRegistry */
} PartsSpec;

typedef struct {
    Schedule step, forward;    /* schedules of a step and of an evaluation */
    StageShare *shares;        /* [step.stages] */
    ParamRegistry whole;       /* registry of the whole model */
    ParamRegistry *registries; /* [pipeline ranks][step.replicas] */
    Stage *stages;             /* [step.replicas][step.chunks], of this rank */
} Parts;

/* Checks the specification alone as parts_open does, for `ranks` pipeline ranks: ERR_CONFIG with the rule and what
 * would fit; else *unit: the samples that pass through the stages at once. Keeps no memory. */
Err parts_check(const PartsSpec *spec, int ranks, int64_t *unit);

/*
 * The pipeline ranks besides the first that hold the embedding's table, where modules of multi-token prediction stand
 * in another stage than the head; else zeros: if another one does, it is that of the last stage (Grid.embd). ERR_CONFIG
 * as parts_check.
 */
Err parts_table_ranks(const PartsSpec *spec, int ranks, int out[2]);

/* ERR_CONFIG where the schedule, the layout and the shape do not fit. Owns: release with parts_release, also after an
 * error. */
Err parts_open(Parts *p, const PartsSpec *spec, const World *world, SetupArena *setup);
void parts_release(Parts *p);

/* The schedule of a step alone. ERR_CONFIG as parts_open. Owns: schedule_free, also after an error. */
Err parts_schedule(const PartsSpec *spec, int ranks, Schedule *out);
Err parts_forwards(const PartsSpec *spec, int ranks, Schedule *out); /* the schedule of an evaluation */

/* The communicators over which the gradients of a replica's parameters are summed (ParamStore.group, far). */
Comm *parts_group(const Parts *p, World *world, int replica, ParamGroup group);
Comm *parts_far(const Parts *p, World *world, int replica, ParamGroup group);

static inline Stage *parts_stage(const Parts *p, int replica, int chunk)
{
    return &p->stages[replica * p->step.chunks + chunk];
}

#endif
