/*
 * The step engine: the stages of a model on one rank, their optimizer state and memory, and a step over them.
 * Knows nothing of configuration or the run folder (train/train.h does).
 *
 * Memory is planned by running this very code on the null device (trainer_plan, plan.c): a step and an evaluation
 * that compute nothing and count everything. Of the units of a step a few are walked, however many there are: the
 * first, and one that shows what each further one adds; how many are held at once follows from the action list.
 * trainer_open then takes exactly that much, and nothing is allocated afterwards.
 */
#ifndef MEGATRAIN_ENGINE_TRAINER_H
#define MEGATRAIN_ENGINE_TRAINER_H

#include "base/batch_ramp.h"
#include "engine/batches.h"
#include "engine/executor.h"
#include "engine/parts.h"
#include "optim/ddp.h"
#include "optim/optim.h"

/* Source of tokens: samples [first, first + count) of the data order, each seq + 1 tokens. */
typedef struct {
    void *user;
    Err (*get)(void *user, int64_t first, int64_t count, int32_t *tokens);
    /* For trainer_scores, else NULL. A sample is requests one behind the other. Of each position, [count][seq]: where
     * its request begins, and whether what is predicted from it counts. */
    Err (*requests)(void *user, int64_t first, int64_t count, int32_t *begin, bool *counts);
} TokenSource;

typedef struct {
    OptimizerKind optimizer; /* the optimizer of matrices */
    AdamWSpec adamw;
    DType moments;       /* F32 or BF16 */
    bool states_on_host; /* the states that the optimizer alone reads (ParamStore) */
    QkClip qk_clip;      /* with a threshold of 0: none */
    MuonSpec muon;
    float clip;
    LrSchedule lr;
    ZeroCut zero;         /* states that are cut over dp, and over the replicas of a stage */
    int64_t bucket_bytes; /* gradients of a bucket; 0 = one bucket */
    bool overlap_grad, overlap_param;
} UpdateSpec;

/* Purposes for which a trainer is opened, besides training. */
typedef struct {
    bool forward_only; /* evaluation, generation: no gradients, no optimizer */
    bool generate;     /* keeps keys and values; forward_only, one rank, micro_batch 1 */
    bool logits;       /* trainer_row_logits will be called; forward_only */
    bool scores;       /* trainer_scores will be called */
    bool ahead;        /* the run will read its batches ahead (data/loader.h) */
    bool snapshot;     /* the run will copy its state to write it (checkpoint.async) */
} TrainPurpose;

typedef struct {
    ModelSpec model;
    PipelineSpec pipeline;
    int64_t micro_batch, global_batch;
    /* Samples of each step. global_batch is the largest of them; all zero: each step has global_batch. */
    BatchRamp ramp;
    DocumentSpec documents;
    int seq_blocks;     /* canonical sequence blocks (a power of two dividing seq) */
    int64_t attn_block; /* keys per softmax block */
    ContextCut cut;     /* cut of sequences over the ranks that share them */
    DType compute;      /* F32, BF16, F16: activations, and weights as the layers see them */
    bool fp32_residual; /* the residual stream is fp32 in any case */
    bool fp32_vectors;  /* layers read weights that are no matrices in fp32 (param/param.h) */
    bool fp32_row_sums; /* sums that mixtures make of rows are fp32, where the two above hold (layer/layer.h) */
    bool exact;         /* reproducible = layout */
    UpdateSpec update;
    int overlap_tp;   /* bands of rows that travel beside tensor-parallel products (layer/bands.c); 0 or 1: none do */
    bool overlap_moe; /* rows travel to experts while the other half of a pair of actions computes (pair.h) */
    uint64_t seed;
    DeviceChoice device; /* its kind, index, threads of a rank and instruction set */
    TrainPurpose purpose;
    bool graphs;     /* steps are recorded and replayed as device graphs (replays.h) */
    bool poison;     /* debug.poison */
    int extra_shift; /* debug.extra_shift */
    /* The largest logits of each step are to be reported; with QK-clip they are anyway. */
    bool attention_logits;
} TrainSpec;

/* Calls of one step of a rank, by communicator and kind of call. Bytes are the payload of the minimal algorithm. */
typedef struct {
    int64_t calls, bytes;
    int64_t most; /* the most bytes that routing could cause, where they depend on it; else 0 */
} CommWork;

/* The clock of a dry run (cost/time_line.h). attach: from now on it hears ops and calls. read: their sums so far;
 * counts[0] are the seconds that `now` says. The other counts are the clock's own, and add up as seconds do. */
enum { CLOCK_COUNTS = 40 + 2 * OP_COUNT };
typedef struct {
    void *user;
    void (*attach)(void *user, Device *dev, World *world);
    double (*now)(const void *user);
    void (*read)(const void *user, double counts[CLOCK_COUNTS]);
} DryClock;

/* Memory that one stage costs its rank. */
typedef struct {
    int stage, replica, layers;
    int in_flight;              /* most units between their F and their B or W */
    int64_t save[REGION_COUNT]; /* bytes kept of a unit */
    int64_t away;               /* bytes of these in the host's memory (train.offload) */
} StagePlan;

/* Work of one step of a rank. */
typedef struct {
    int64_t flop, op_bytes; /* FLOP, and bytes of ops */
    int64_t comm_bytes;     /* bytes sent by the rank */
    int64_t comm_beside;    /* bytes of these in calls beside which ops run */
    CommWork comm[WORLD_COMMS][COMM_KIND_COUNT];
    double clock[CLOCK_COUNTS]; /* counts by the clock of trainer_time */
} StepWork;

/* Parameters of a rank, in elements but for the last three. */
typedef struct {
    int64_t model;        /* the whole model's, unpadded */
    int64_t flat;         /* this rank's, in buckets (param/param.h) */
    int64_t values;       /* of flat, those that the layers' weights have */
    int64_t zero;         /* of flat, those that each moment has (ZeRO) */
    int64_t second;       /* elements that have a second moment */
    int64_t experts;      /* elements of experts, a part of flat */
    int64_t padding;      /* elements of no parameter, a part of flat */
    int64_t grad_bytes;   /* bytes of gradients */
    int64_t unit_buffers; /* bytes of the buffers in which units are whole (optim/units.h) */
    int buckets;          /* number of buckets */
} ParamCounts;

/* FLOP of Newton-Schulz in one step. */
typedef struct {
    double flop;      /* a part of the rank's */
    double mean;      /* the mean over the ranks of its stages */
    double imbalance; /* those of a stage's busiest rank over the mean; 0: none */
} MuonWork;

/* Bytes of one rank, and its work; what `megatrain plan` prints. */
typedef struct {
    int64_t state; /* weights, gradients, moments, tables, batches, boundary buffers */
    /* States that the optimizer alone reads: with states_on_host in the host's memory, else part of state. */
    int64_t states;
    int64_t save;                      /* saves of all units in flight, over all stages */
    int64_t save_region[REGION_COUNT]; /* the part of save in each region */
    StagePlan stages[PARTS_STAGES];
    int stage_count;
    int64_t boundary; /* boundary buffers, a part of state */
    int64_t scratch, workspace;
    /* Scratch for forwards that may run in turn with a backward (pair.h), a part of scratch. */
    int64_t scratch_forward;
    int64_t staging;  /* widened copies of 16-bit tensors (cpu) */
    int64_t ahead;    /* batches read ahead, in the host's memory */
    int64_t pinned;   /* batches of two steps on their way to the GPU, a part of ahead */
    int64_t snapshot; /* a checkpoint's copy of the state, in the host's memory */
    bool host_apart;  /* the device has other memory than the host */
    /* Saves that wait in the host's memory (train.offload): bytes of the device's buffers, then of the buffers of
     * forwards in pairs; the sum of both; and bytes that wait in the host's memory. */
    int64_t offload[2][OFFLOAD_BUFFERS];
    int64_t offload_buffers, offload_host;
    int64_t unit; /* samples that pass through the stages at once */
    StepWork work;
    int64_t flop_of_op; /* FLOP of an op, the mean over all that was walked to plan */
    ParamCounts params;
    MuonWork muon;
} MemoryPlan;

/* A row of a plan. The rows add up to its total. */
typedef struct {
    const char *name; /* what the bytes hold */
    size_t field;     /* offset in MemoryPlan of an int64_t: bytes */
    bool on_host;     /* the bytes lie in the host's memory, whatever the device is */
} MemoryRow;
enum { MEMORY_ROWS = 10 };
extern const MemoryRow memory_rows[MEMORY_ROWS];

int64_t memory_plan_bytes(const MemoryPlan *p, const MemoryRow *row);
int64_t memory_plan_host(const MemoryPlan *p);  /* bytes in the host's memory, whatever the device is */
int64_t memory_plan_total(const MemoryPlan *p); /* bytes in the device's memory; if that is the host's, all */

/* The largest score of attention over all tokens of a step, as softmax meets it: scaled, capped, of keys that are seen,
 * without sinks. NaN: one was not finite. */
typedef struct {
    const double *by_layer; /* [model_blocks], the trainer's, until the next report; NULL: not asked for */
    double most;            /* the largest of all layers */
    int layer, head;        /* layer and head of that logit */
} AttentionLogits;

typedef struct {
    int64_t step;
    double loss;               /* mean per counted token, nats; NaN when not finite */
    int64_t counted;           /* tokens */
    double mtp_loss[MTP_MOST]; /* mean loss of each module of multi-token prediction on its own targets */
    float grad_norm, lr;       /* grad_norm: NaN in a skipped step */
    int64_t samples;           /* samples of its global batch */
    bool skipped;              /* loss or gradients not finite: nothing was changed */
    int redone;                /* times the step was repeated with another fixed-point shift */
    int rescaled;              /* times it was repeated with a smaller loss scale */
    bool retried_in_pieces;    /* it was repeated with tokens passing experts in pieces (moe.overflow = redo) */
    AttentionLogits logits;
} StepReport;

/*
 * Dynamic loss scaling for fp16: backward works on 2^log2 times the loss. A step with a finite loss and gradients that
 * are not finite is done again with half the scale, so that no sample is lost. If they are not finite at any scale, the
 * step is skipped and the scale stays. After LOSS_SCALE_WINDOW steps without that the scale doubles. Start, window and
 * factors are Megatron's; Megatron skips the step instead of repeating it.
 */
typedef struct {
    int64_t log2, good_steps;
} LossScale;

enum { LOSS_SCALE_START = 32, LOSS_SCALE_WINDOW = 1000 };

/* Buffers of schedules that update while the pipeline runs (engine/async.h). */
typedef struct {
    StepValues *history, *outcome; /* [updates of a step]: device, host */
    Tensor tokens;                 /* [3] i64, as a loss's sums: the tokens that an update counts */
    int64_t *shifts;               /* [parameters of the model], host */
    int done;                      /* updates of this step */
} Async;

/*
 * A step that is enqueued and whose outcome nobody has read. Behind it, copies bring its outcome to memory of the host.
 */
typedef struct {
    bool running;
    int64_t batch;      /* number of its samples */
    StepValues *values; /* this and the next three are memory of device_host_alloc */
    int64_t *sums;      /* copy of the executor's */
    int64_t *logits;    /* copy of the executor's Ctx.logit_max; of no use if that is absent */
    char *loads;        /* rows that experts got (engine/expert_load.h) */
    Event done;
} StepInFlight;

/* How far training is, as checkpoints keep it. */
typedef struct {
    int64_t step, samples, updates, skipped;
    LossScale loss_scale;
} TrainProgress;

typedef struct {
    SetupArena setup;
    Arena state, scratch, scratch_forward;
    Arena states; /* in the host's memory (device_alloc_far); empty without states_on_host */
    Arena save;   /* the memory of the executor's heaps */
    void *away;   /* the same for its heap in the host's memory */
} TrainMemory;

/* The batch that the hooks are serving. */
typedef struct {
    TokenSource source;
    int64_t first_sample, batch; /* its samples */
    int64_t counting;            /* number of these that count; the others fill up the batch */
    int64_t last_batch;          /* samples of the last step; 0: there was none */
} Serving;

/* Result of a row that counts: -log of the target's probability, and whether another token has a larger logit. */
typedef struct {
    float loss;
    int32_t outdone;
} RowScore;

/* Destination of an evaluation's rows; all zero: nobody asks for them. */
typedef struct {
    float *logits;     /* [samples, positions, vocab] */
    int64_t positions; /* how many of each sample, from the first on */
    RowScore *scores;  /* [samples, seq] */
    RowScore *room;    /* as many, for one batch; with purpose.scores */
    float *staging;    /* a unit's Batch.scores and the largest logits of its rows */
} RowsOut;

enum { REPLICAS = 2 }; /* most replicas of the model of which a rank holds stages */

typedef struct {
    TrainSpec spec;
    World *world;
    Device device;
    TrainMemory memory;
    Parts parts;
    GradStats stats;
    ParamStore stores[REPLICAS];
    ParamSet params;
    Ddp ddp[REPLICAS];
    Executor executor;
    Optim optim;
    Muon muon[REPLICAS];
    Async async;
    BatchMaker batches;
    StepValues *step_values; /* device */
    StepInFlight flight;
    void **caches;        /* one for each block, when generating */
    int32_t *host_shift;  /* [2][parameters of the model]: the step's shifts, and what a repetition tries */
    int64_t *host_loads;  /* loads that ranks tell each other of mixtures (engine/expert_load.c) */
    double *layer_logits; /* [model_blocks] of the last report; NULL: nobody asks for them */
    Serving serving;
    RowsOut rows;
    TrainProgress progress;
    MemoryPlan plan;
} Trainer;

/* Refuses, before there are ranks, every specification that trainer_plan or trainer_open refuse on any rank:
 * ERR_CONFIG. The size of the vocabulary does not count. */
Err trainer_check(const TrainSpec *spec, Grid grid);
/* Fills in the member of a grid that depends on the stages of the pipeline (Grid.embd). The specification must fit. */
Err trainer_grid(const TrainSpec *spec, Grid *grid);

/* Dry run for rank `rank` of the grid. ERR_CONFIG when schedule, layout and grid do not fit, or the work of a step
 * cannot be counted. */
Err trainer_plan(const TrainSpec *spec, Grid grid, int rank, MemoryPlan *out);

/*
 * The same beside a clock, of a step that is not the run's first. unit: seconds of a unit in each of the rank's stages
 * (MemoryPlan.stages), where nothing goes on beside it but its own calls. rest: what a step takes besides its units:
 * sums of gradients as far as units do not hide them, the norm, the update. out->clock: of the whole step, without
 * waiting for other pipeline ranks.
 */
typedef struct {
    StageCost unit[PARTS_STAGES];
    double rest;
} StepTimes;
Err trainer_time(const TrainSpec *spec, Grid grid, int rank, const DryClock *clock, MemoryPlan *out, StepTimes *times);

/* The schedule of a step. ERR_CONFIG as trainer_check. Owns: schedule_free, also after an error. */
Err trainer_schedule(const TrainSpec *spec, Grid grid, Schedule *out);
/* The schedule of an evaluation of as many samples. */
Err trainer_forwards(const TrainSpec *spec, Grid grid, Schedule *out);

/* ckpt_shard_bytes for a run with that specification: [grid_size(grid)]. */
Err trainer_shard_bytes(const TrainSpec *spec, Grid grid, int64_t *bytes);

/* Takes memory by `limits` (normally trainer_plan's result) and fills initial weights. ERR_MEMORY, which names the
 * arena, if a limit is too small. */
Err trainer_open(Trainer *t, const TrainSpec *spec, World *world, const MemoryPlan *limits);
void trainer_close(Trainer *t);

/* Before the stores are read by others: all weights that ranks hand each other have arrived. */
Err trainer_settle(Trainer *t);

/* Samples of a step, 1 being the first. */
int64_t trainer_batch(const Trainer *t, int64_t step);

/* One optimizer step on samples [t->samples, + trainer_batch). ERR_NUMERICS never: a bad step is skipped and
 * reported; the caller decides when there were too many. ERR_MEMORY on all ranks: experts got more rows than moe.slack
 * gives room for, and the step is not to be done again in pieces; nothing was changed. */
Err trainer_step(Trainer *t, TokenSource source, StepReport *report);

/*
 * The same in two calls, so that a GPU gets its next step while it works on one: trainer_start enqueues a step and does
 * not wait for it; trainer_finish waits for the step in flight and accounts for it. Progress (step, samples, updates),
 * what checkpoints hold of it, and reports are those of steps that were finished; numbers are those of trainer_step.
 *
 * Where trainer_runs_ahead, trainer_start may be called again without trainer_finish: it enqueues forward and backward,
 * then finishes the step before, then enqueues the update. *before is the report of the step it finished; step 0: none.
 * If it fails, the step before is finished, or still to be finished, as without the call.
 * trainer_finish's report is of step 0 if no step is in flight. Evaluating, saving and closing want that.
 */
Err trainer_start(Trainer *t, TokenSource source, StepReport *before);
Err trainer_finish(Trainer *t, StepReport *report);
bool trainer_runs_ahead(const Trainer *t);
int64_t trainer_next_step(const Trainer *t);   /* the step that trainer_start would start */
int64_t trainer_next_sample(const Trainer *t); /* first sample of that step */

/* Mean loss over `samples` samples from `first` of source on, each once, whatever the batches are; nothing is changed.
 * ERR_MEMORY as trainer_step.
 * With reproducible = layout the same bits from every layout and batch. */
Err trainer_eval(Trainer *t, TokenSource source, int64_t first, int64_t samples, double *loss, int64_t *counted);

/*
 * logits [samples, positions, vocab], on every rank: those of the first `positions` positions of `samples` samples from
 * `first` of source on, of which one call takes trainer_row_samples at most. There is room for an even number of
 * floats. With `first` 0 an evaluation begins: until the next one values stay. Bits as for trainer_eval. ERR_MEMORY as
 * trainer_step. For trainers opened for it.
 */
int64_t trainer_row_samples(const Trainer *t);
Err trainer_row_logits(Trainer *t, TokenSource source, int64_t first, int64_t samples, int64_t positions,
                       float *logits);

/*
 * *scores [samples, seq], on every rank: of samples of requests, of which one call takes the largest global batch at
 * most. With `first` 0 an evaluation begins: until the next one values stay. Requests do not see each other. The
 * memory is the trainer's, until the next call. Bits as for trainer_eval; ERR_MEMORY as trainer_step. For trainers
 * opened for it.
 */
Err trainer_scores(Trainer *t, TokenSource source, int64_t first, int64_t samples, const RowScore **scores);

/*
 * Logits [vocab] after n more tokens at positions past .. past + n - 1 (past + n <= seq); the `past` tokens before
 * were given to earlier calls. The same bits however a text is cut into calls. For trainers opened to generate.
 */
Err trainer_logits(Trainer *t, const int32_t *tokens, int64_t past, int64_t n, float *logits);

/* High-water marks of the run so far, in the form of a plan (flop and comm fields 0). */
MemoryPlan trainer_peak(const Trainer *t);

#endif
