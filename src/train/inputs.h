/*
 * What the ranks of a run read must be the same on all of them: hosts with disks of their own may hold other files
 * under the same names, and a run on them would train on, with numbers that mean nothing.
 *
 * One list (inputs.c) says what a run reads besides its configuration, each with a line that identifies its content.
 * All ranks make these lines and compare them before step 1. A new input of a run is a row of that list.
 *
 * Token files are identified by their sizes, the checksum of the index, the one of the content where PREFIX.crc has it,
 * and the checksum of a sample of the tokens, which does not believe PREFIX.crc.
 */
#ifndef MEGATRAIN_TRAIN_INPUTS_H
#define MEGATRAIN_TRAIN_INPUTS_H

#include "train/run.h"

/* Collective. ERR_DATA on all ranks, and rank 0 names the rank and both lines: data, tokenizer or tasks differ. */
Err inputs_agree(const Run *r);

/* The same of what the command line gives a command to read. `facts`: one line, without '\n'. */
Err inputs_agree_on_argument(const Run *r, const char *facts);

/* The same of weights that are about to be loaded from a checkpoint's folder or one of Hugging Face's. ERR_CKPT; with
 * *damaged a rank cannot read them, so that an older checkpoint may be tried. */
Err inputs_agree_on_weights(Run *r, const char *path, bool *damaged);

/* Kind of thing that `path` is on each rank, which decides who calls what next. ERR_CKPT where ranks differ. */
Err inputs_agree_on_source(const Run *r, const char *path, const char *kind);

#endif
