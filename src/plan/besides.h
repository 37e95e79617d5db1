/*
 * Work of a run besides its steps, as so much more of each: evaluations, checkpoints, and the host between two steps.
 *
 *   evaluations   data.valid's sets, train.eval_samples samples of each every train.eval_every steps: forwards
 *   tasks         the questions of train.eval_tasks, whose files alone say how many there are: never known
 *   checkpoints   all shards over the device's file's disk_gb_s, every checkpoint.every steps. With checkpoint.async
 *                 training stands still for the copy alone, and for what of a write is left when the next is due
 *   the host      the device's file's step_us
 */
#ifndef MEGATRAIN_PLAN_BESIDES_H
#define MEGATRAIN_PLAN_BESIDES_H

#include "config/config.h"
#include "config/config_device.h"

typedef struct {
    double step_s, forward_s; /* predicted: of a step, of an evaluation's global batch */
    int ranks;
    int64_t checkpoint, shard; /* bytes of a checkpoint; of the largest rank's part */
} BesidesOf;

/* Seconds a step. NaN: there are some, and nobody knows how long they are (of whole sets, whose files alone say it; of
 * checkpoints without disk_gb_s). */
typedef struct {
    double evaluations, tasks, checkpoints, host;
} Besides;

Besides besides_of(const Config *cfg, const DeviceFile *d, const BesidesOf *of);

/* Sets that an evaluation reads. */
int besides_sets(const Config *cfg);

/* Sum of the parts that are known. */
double besides_sum(const Besides *b);

#endif
