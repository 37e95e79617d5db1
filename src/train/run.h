/*
 * A run: configuration, data, model and checkpoints, in the order in which they can fail. Training, evaluation and
 * generation share it.
 */
#ifndef MEGATRAIN_TRAIN_RUN_H
#define MEGATRAIN_TRAIN_RUN_H

#include "config/config.h"
#include "ckpt/ckpt.h"
#include "data/loader.h"
#include "data/sets.h"
#include "data/tasks.h"
#include "data/tokenizer.h"
#include "train/overrides.h"
#include "train/ranks.h"
#include "engine/trainer.h"

typedef struct {
    const Config *cfg;
    SetupArena setup; /* holds checkpoints' tables and texts */
    Tokenizer *tokenizer;
    Dataset *train; /* NULL: it was not opened */
    Sets valid;     /* there are none if they were not opened or not given */
    int best_set;   /* checkpoint.keep_best goes by the loss on this one */
    double valid_loss[SETS_MAX];
    Tasks tasks;        /* those of train.eval_tasks, unless the run only generates or gives logits */
    int64_t valid_step; /* the step at which they had these losses; 0: they were not evaluated yet */
    Ranks *ranks;       /* NULL: there is one process */
    World *world, self;
    TrainSpec spec;
    MemoryPlan plan;
    Trainer trainer;
    bool trainer_open;
    char *data_id;                  /* the identity of the training data (data_id.h), which checkpoints keep */
    int64_t data_begun, data_start; /* since so many samples were done it reads this data.train, from this sample on */
    Overrides overrides;            /* differences from the checkpoint that the run went on from */
} Run;

/* RUN_LOGITS: without data, for trainer_row_logits. */
typedef enum { RUN_TRAIN, RUN_EVAL, RUN_GENERATE, RUN_LOGITS } RunPurpose;

/*
 * Opens tokenizer, data (as the purpose needs) and trainer with initial weights; ranks NULL: for a process alone.
 * ERR_MEMORY, with the table of arenas and three ways out: the plan exceeds the machine's memory.
 */
Err run_open(Run *r, const Config *cfg, RunPurpose purpose, Ranks *ranks);
void run_close(Run *r);

/* Loads weights (and, unless weights_only, everything else) from a checkpoint folder into the trainer. */
Err run_load(Run *r, const char *path, bool weights_only, bool *damaged);

/*
 * Loads the weights of `from`, which is a checkpoint's own folder, or a run's. For a run's folder they are those of a
 * step or, with RUN_NEWEST, of the newest valid checkpoint; if that turns out damaged, an older one is tried. ERR_CKPT:
 * there is none.
 */
enum { RUN_NEWEST = -1 };
Err run_load_weights(Run *r, const char *from, int64_t step);

/* Loads what checkpoint.resume and checkpoint.load say; the trainer's progress fields tell where the run then
 * stands. */
Err run_resume(Run *r);

/* The meta data of a checkpoint of the present state. The texts live as long as the run. */
CkptMeta run_meta(const Run *r, const char *config_text);

/* How many samples an evaluation on a validation set has: all, or at most train.eval_samples. */
int64_t run_valid_samples(const Run *r, const Dataset *set);

/* Place from which data.train is read after so many samples of the run. */
int64_t run_data_position(const Run *r, int64_t samples);

/* Is there anything to evaluate on? */
bool run_evaluates(const Run *r);

/* Gives all requests of the tasks their scores. Collective. Errors as trainer_scores. */
Err run_score_tasks(Run *r);

/* A source of tokens from one of the data sets, without prefetching. */
TokenSource run_tokens(const Dataset *d);

/*
 * The FLOP/s that mfu is a share of, and where the number comes from (static text). On a known GPU it is its maker's
 * figure for dense products of the run's precision, else the measured rate of our own products.
 */
Err run_peak_rate(Run *r, double *flops, const char **source);

/* Removes the files that a killed run was writing to replace others. To be called under the run folder's lock. What
 * cannot be removed is warned of. */
void run_sweep(const char *run_dir);

/* Removes the folder of a start that failed, if it holds nothing but its lock. To be called while the lock is held. */
void run_leave(const char *run_dir);

/*
 * run.autotune (tune.c): takes up the choices that the run folder keeps; rank 0 makes others by timing and writes them
 * there. Collective: afterwards all ranks have the same.
 */
Err run_tune(Run *r);
Err run_keep_choices(Run *r);

#endif
