/* The names in DIR/checkpoints and the search through it, which saving and finding share. */
#ifndef MEGATRAIN_CKPT_FOLDER_H
#define MEGATRAIN_CKPT_FOLDER_H

#include "ckpt/ckpt.h"

typedef struct {
    int64_t step;
    bool old; /* step-N.old: had the name before it was replaced, which may not have been finished */
} CkptEntry;

/* False if `name` is not that of a checkpoint's folder: "step-" and 8 or more digits, perhaps ".old". */
bool entry_parse(const char *name, CkptEntry *out);
bool entry_of_path(const char *path, CkptEntry *out); /* the same of the last part of a path */
bool entry_is_temporary(const char *name);            /* a save that ended was writing it: step-N.tmp-... */
Err entry_path(char out[PATH_MAX], const char *folder, CkptEntry e);

/* Lists the checkpoints in DIR/checkpoints, newest first, in memory that the caller frees. Without the folder there are
 * none. ERR_CKPT; ERR_STORAGE: it is a link that is not ours (file_check_link). */
Err folder_scan(const char *folder, CkptEntry **out, int *count);
Err folder_name(char out[PATH_MAX], const char *run_dir);

#endif
