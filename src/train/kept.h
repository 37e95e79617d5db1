/*
 * What a run's folder keeps so that it can be understood and used without what is around it:
 *
 *   log.txt             all lines that rank 0 says, with their times
 *   starts/N.ini        the resolved configuration of the N-th start, and from which step it went on
 *   starts/saved        a checkpoint has been written since the run began: which step had the first
 *   tokenizer/          a copy of data.tokenizer's files, as a folder that is a tokenizer; `byte` has none
 */
#ifndef MEGATRAIN_TRAIN_KEPT_H
#define MEGATRAIN_TRAIN_KEPT_H

#include <limits.h>
#include <stdint.h>

#include "base/err.h"

/* Keeps the configuration of a start, and which program, machine and job it is of. To be called under the folder's
 * lock, once it is known from which step the start goes on. machine, job: for people, a line. ERR_IO. */
Err kept_start(const char *run_dir, const char *config_text, int64_t step, const char *machine, const char *job);
/* Keeps that there is a checkpoint, of this step: a later start that finds none knows that it is gone. A start from
 * step 0 forgets it. ERR_IO. */
Err kept_saved(const char *run_dir, int64_t step);
bool kept_was_saved(const char *run_dir);
/* Keeps a copy of the tokenizer `spec`, which replaces what is there and differs. ERR_IO, ERR_MEMORY. */
Err kept_tokenizer(const char *run_dir, const char *spec);

/*
 * The files of a tokenizer: those that say how it cuts, then what transformers keeps beside them (special tokens, chat
 * template, how to generate). NULL behind the last. A spec may name tokenizer.json's file itself: the others then lie
 * beside it if it has that name. False: the tokenizer has no such file.
 */
extern const char *const kept_tokenizer_files[];
bool kept_tokenizer_path(const char *spec, const char *name, char out[PATH_MAX]);

/* out = the copy that a run has. False: there is none. */
bool kept_find_tokenizer(const char *run_dir, char out[PATH_MAX]);

#endif
