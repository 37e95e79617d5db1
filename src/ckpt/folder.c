/* See folder.h. */
#include "ckpt/folder.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/run_files.h"

bool entry_parse(const char *name, CkptEntry *out)
{
    char *end;
    if (strncmp(name, "step-", 5) || strspn(name + 5, "0123456789") < 8) return false;
    errno = 0;
    long long step = strtoll(name + 5, &end, 10);
    if (errno || (*end && strcmp(end, ".old"))) return false;
    *out = (CkptEntry){ step, *end != 0 };
    return true;
}

bool entry_of_path(const char *path, CkptEntry *out)
{
    char name[CKPT_NAME_MAX] = "";
    size_t end = strlen(path), begin;
    while (end && path[end - 1] == '/') end--;
    for (begin = end; begin && path[begin - 1] != '/';) begin--;
    if (end - begin < sizeof name) memcpy(name, path + begin, end - begin);
    return entry_parse(name, out);
}

bool entry_is_temporary(const char *name)
{
    return (!strncmp(name, "step-", 5) || !strncmp(name, "LATEST", 6)) && strstr(name, ".tmp-");
}

Err folder_name(char out[PATH_MAX], const char *run_dir)
{
    if (snprintf(out, PATH_MAX, "%s/" RUN_CHECKPOINTS, run_dir) < PATH_MAX - 128)
        return ERR_OK; /* room for names in it */
    return err_set(ERR_CONFIG, "run.dir is too long: '%s'", run_dir);
}

Err entry_path(char out[PATH_MAX], const char *folder, CkptEntry e)
{
    if (snprintf(out, PATH_MAX, "%s/step-%08lld%s", folder, (long long)e.step, e.old ? ".old" : "") < PATH_MAX)
        return ERR_OK;
    return err_set(ERR_CKPT, "path is too long: '%s'", folder);
}

static int newest_first(const void *a, const void *b)
{
    const CkptEntry *x = a, *y = b;
    if (x->step != y->step) return x->step > y->step ? -1 : 1;
    return x->old - y->old;
}

static Err scan(DIR *d, const char *folder, CkptEntry **out, int *count)
{
    CkptEntry e;
    int capacity = 0;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(d)); errno = 0) {
        if (!entry_parse(entry->d_name, &e)) continue;
        if (*count == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            CkptEntry *grown = realloc(*out, (size_t)capacity * sizeof *grown);
            if (!grown) return err_set(ERR_MEMORY, "no memory for the list of checkpoints in '%s'", folder);
            *out = grown;
        }
        (*out)[(*count)++] = e;
    }
    return errno ? err_set(ERR_CKPT, "cannot read folder '%s': %m", folder) : ERR_OK;
}

Err folder_scan(const char *folder, CkptEntry **out, int *count)
{
    *out = NULL;
    *count = 0;
    if (file_exists(folder)) TRY_AS(ERR_STORAGE, file_check_link(folder));
    DIR *d = opendir(folder);
    if (!d && errno == ENOENT) return ERR_OK;
    if (!d) return err_set(ERR_CKPT, "cannot read folder '%s': %m", folder);
    Err err = scan(d, folder, out, count);
    closedir(d);
    if (err) {
        free(*out);
        *out = NULL;
        return err;
    }
    if (*count) qsort(*out, (size_t)*count, sizeof **out, newest_first);
    return ERR_OK;
}
