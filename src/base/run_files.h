/*
 * Names of what a run writes in its folder. The list in run_files.c has all of them: no other file that a user names
 * may be one, and what a killed run was writing beside one is swept.
 */
#ifndef MEGATRAIN_BASE_RUN_FILES_H
#define MEGATRAIN_BASE_RUN_FILES_H

#include <stdbool.h>
#include <stddef.h>

#define RUN_CONFIG "config.ini"
#define RUN_METRICS "metrics.jsonl"
#define RUN_LOG "log.txt"
#define RUN_CURVE "loss.svg"
#define RUN_TIMELINE "timeline.json"
#define RUN_TIMELINE_PICTURE "timeline.svg"
#define RUN_ALGORITHMS "gemm-algorithms.txt"
#define RUN_GENERATION "generation_config.json"
#define RUN_LOCK "lock"
#define RUN_CHECKPOINTS "checkpoints"
#define RUN_STARTS "starts"
#define RUN_TOKENIZER "tokenizer"
/* More follows these. */
#define RUN_EVENTS "events.out.tfevents."
#define RUN_SHARED_MARK ".shared-"
#define RUN_SPOKEN ".spoken"
#define RUN_SECRET ".secret-"

/* Are the first n bytes of `name` the name of a file or folder of a run? */
bool run_file_is_own(const char *name, size_t n);

/* The first file in run_dir that a run would replace or cut, though no run has begun there; NULL: there is none. */
const char *run_file_foreign(const char *run_dir);

/* Length of NAME in "NAME.tmp-123", which file_replace writes before it is NAME; 0: the name has no such end. */
size_t run_file_unfinished(const char *name);

/* Does `path` lead to a file of the run in run_dir, or into a folder of it? None of them need be there yet. A path
 * without a slash begins in run_dir. */
bool run_file_is_at(const char *path, const char *run_dir);

#endif
