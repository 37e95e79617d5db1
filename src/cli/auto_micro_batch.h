/*
 * train.micro_batch=auto: the number of a run that begins is chosen by rank 0 (plan/micro_batch.h); one that goes on
 * from a checkpoint keeps the number that it had.
 */
#ifndef MEGATRAIN_CLI_AUTO_MICRO_BATCH_H
#define MEGATRAIN_CLI_AUTO_MICRO_BATCH_H

#include "cli/command.h"
#include "config/config.h"
#include "train/train.h"

typedef struct {
    const char *path; /* the configuration's, and the words beside it */
    Words words;
    const char *may_differ; /* train --override; NULL: nothing */
} AutoMicroBatch;

/* How train_run gets the number. *a must stay where it is. */
LayoutChoice auto_micro_batch_choice(AutoMicroBatch *a);

#endif
