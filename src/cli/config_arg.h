/* The configuration of commands that take --config FILE or --run DIR, and [section.key=value ...]. */
#ifndef MEGATRAIN_CLI_CONFIG_ARG_H
#define MEGATRAIN_CLI_CONFIG_ARG_H

#include "config/config.h"
#include "cli/command.h"

#define REST_OVERRIDES "[section.key=value ...]"

/* The source for config_read: that file (NULL: none), these overrides, this many ranks, on this machine. */
ConfigSource config_source_here(const char *path, Words overrides, int64_t world_size);

/* From now on the file at `path` has this text, whatever becomes of it. Both must stay. */
void config_arg_keep(const char *path, const char *text);

/* config_read for that file (NULL: none), these overrides and this many ranks. config_release also on error. */
Err config_arg(Config *c, const char *path, Words overrides, int64_t world_size);

/* Reads what the checkpoint of that step has, or for -1 the newest one. ERR_CKPT: there is none. */
Err config_of_run(Config *c, const char *run_dir, int64_t step, Words overrides, int64_t world_size);

/* For how many ranks a configuration is read: `given`, or, if that is 0, the launcher's number, or CONFIG_ANY_WORLD. */
Err config_world(int64_t given, int64_t *out);

/* ERR_CONFIG: a launcher has started more than one process, which is not built yet. */
Err single_process(void);

/* Is the folder a model of Hugging Face's? */
bool config_arg_is_hf(const char *path);

#endif
