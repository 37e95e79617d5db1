/* Choices that were made when a run began, and that it keeps as it goes on from a checkpoint. */
#ifndef MEGATRAIN_CLI_GOING_ON_H
#define MEGATRAIN_CLI_GOING_ON_H

#include "config/config.h"

/*
 * Reads the configuration of the checkpoint that a run of c would go on from (checkpoint.resume), for any number of
 * ranks, and its step. *found: there is one; then *was is to be released. ERR_CKPT.
 */
Err going_on(const Config *c, Config *was, int64_t *step, bool *found);

#endif
