/*
 * Training and evaluation as commands do them: run folder, step loop, metrics, checkpoints, signals.
 */
#ifndef MEGATRAIN_TRAIN_TRAIN_H
#define MEGATRAIN_TRAIN_TRAIN_H

#include "config/config.h"
#include "boot/boot.h"
#include "train/room.h"

/* How the ranks of a run with parallel.auto come by their layout, or with train.micro_batch=auto by that number. */
typedef struct {
    void *user;
    bool by_room; /* choose wants a room */
    /* On rank 0: `text`, of at most `size` bytes, is what all ranks are to be told. room: that of each rank, or NULL.
     * Errors end the run. */
    Err (*choose)(void *user, const Config *cfg, const Boot *boot, const Room *room, char *text, size_t size);
    /* On every rank: *cfg, which was read for no layout yet, becomes the configuration that the text says. */
    Err (*take)(void *user, const char *text, const Boot *boot, Config *cfg);
} LayoutChoice;

/*
 * Trains, as the process `boot` of those that were started together, to the end, to train.stop_at, or until it is
 * told to stop. ERR_STOPPED after a SIGTERM, SIGUSR1, SIGHUP, the first SIGINT or train.max_minutes, with a checkpoint
 * written; other errors as they come. choice: of a configuration with parallel.auto or train.micro_batch=auto, else
 * NULL.
 */
Err train_run(Config *cfg, const Boot *boot, const LayoutChoice *choice);

/* The checkpoint that is evaluated, and the data. */
typedef struct {
    /* A run's folder. NULL: checkpoint.load or .resume where one names a checkpoint, else run.dir. */
    const char *run_dir;
    int64_t step; /* step of the run's checkpoint; -1: the newest */
    /* Instead of the loss on the validation data: the logits of the sequences in `ids` go to `logits` (logits.h). NULL:
     * the loss. */
    const char *ids, *logits;
    bool json; /* prints one JSON object */
} EvalOptions;

/* Prints loss, perplexity and bits per byte on the validation data and the accuracies of train.eval_tasks, on stdout of
 * rank 0, or writes logits. A process
 * alone takes a checkpoint of any layout; several processes are the ranks of the layout that `cfg` says. */
Err eval_run(const Config *cfg, const Boot *boot, const EvalOptions *o);

#endif
