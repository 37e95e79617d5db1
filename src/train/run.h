/*
 * A run: configuration, data, model, checkpoints, in the order in which they can fail. Shared by training,
 * evaluation and generation.
 */
#ifndef MEGATRAIN_TRAIN_RUN_H
#define MEGATRAIN_TRAIN_RUN_H

#include "config/config.h"
#include "ckpt/ckpt.h"
#include "data/loader.h"
#include "data/sets.h"
#include "data/tokenizer.h"
#include "train/overrides.h"
#include "train/ranks.h"
#include "engine/trainer.h"

typedef struct {
    const Config *cfg;
    SetupArena setup; /* of checkpoints' tables and texts */
    Tokenizer *tokenizer;
    Dataset *train; /* NULL when not opened */
    Sets valid;     /* none when not opened or not given */
    int best_set;   /* of them, whose loss checkpoint.keep_best goes by */
    double valid_loss[SETS_MAX];
    int64_t valid_step; /* at which they had these losses; 0: not evaluated yet */
    Ranks *ranks;       /* NULL: one process */
    World *world, self;
    TrainSpec spec;
    MemoryPlan plan;
    Trainer trainer;
    bool trainer_open;
    char *data_id;       /* identity of the training data (data_id.h), kept in checkpoints */
    Overrides overrides; /* what differs from the checkpoint that the run went on from */
} Run;

typedef enum { RUN_TRAIN, RUN_EVAL, RUN_GENERATE } RunPurpose;

/*
 * Opens tokenizer, data (as the purpose needs) and trainer with initial weights; on `ranks`, or NULL, alone.
 * ERR_MEMORY, with the table of arenas and three ways out, when the plan exceeds the machine's memory.
 */
Err run_open(Run *r, const Config *cfg, RunPurpose purpose, Ranks *ranks);
void run_close(Run *r);

/* Weights (and, unless weights_only, everything else) from a checkpoint folder into the trainer. */
Err run_load(Run *r, const char *path, bool weights_only, bool *damaged);

/*
 * The weights of `from`: a checkpoint's own folder, or a run's, and then those of a step or, with RUN_NEWEST, of the
 * newest valid checkpoint, falling back to older ones when it turns out damaged. ERR_CKPT if there is none.
 */
enum { RUN_NEWEST = -1 };
Err run_load_weights(Run *r, const char *from, int64_t step);

/* By checkpoint.resume and checkpoint.load; the trainer's progress fields tell where the run stands. */
Err run_resume(Run *r);

/* What a checkpoint of the present state says; the texts live as long as the run. */
CkptMeta run_meta(const Run *r, const char *config_text);

/* Samples of an evaluation on a validation set: all, or the first of train.eval_batches. */
int64_t run_valid_samples(const Run *r, const Dataset *set);

/* Token source over one of the data sets, without prefetching. */
TokenSource run_tokens(const Dataset *d);

/*
 * What mfu is a share of, FLOP/s, and where it comes from (static text): on a known GPU its maker's figure for
 * dense products of the run's precision; else the measured rate of our own products.
 */
Err run_peak_rate(Run *r, double *flops, const char **source);

/* Removes the files that a killed run was writing to take the place of others. Under the run folder's lock; what cannot
 * be removed is warned of. */
void run_sweep(const char *run_dir);

/* Removes a run's folder that holds nothing but its lock: of a start that failed. While the lock is held. */
void run_leave(const char *run_dir);

/*
 * run.autotune (tune.c): choices kept in the run folder are taken up, others are made by timing and written there, by
 * rank 0. Collective: afterwards all ranks have the same.
 */
Err run_tune(Run *r);
Err run_keep_choices(Run *r);

#endif
