/* Lists the checkpoints of a run folder, and finds the newest good one; see ckpt.h. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/rng.h"
#include "base/run_files.h"
#include "ckpt/folder.h"
#include "ckpt/manifest.h"

/* Manifest right, files there. *newer: of a format that is not ours yet. */
static Err check(const char *path, bool *newer)
{
    SetupArena a;
    Manifest m = { 0 };
    setup_init(&a);
    Err err = manifest_read(path, &a, &m);
    if (!err) err = manifest_check_files(&m);
    *newer = m.format > CKPT_FORMAT;
    setup_release(&a);
    return err;
}

/* A command looks several times, for the configuration and then for the weights: it says each damage once. */
static void say_passed_over(const char *path)
{
    enum { MOST = 16 };
    static _Thread_local uint64_t said[MOST];
    static _Thread_local int count;
    const uint64_t now = rng_key(rng_key(0, path), err_message());
    for (int i = 0; i < count; i++)
        if (said[i] == now) return;
    if (count < MOST) said[count++] = now;
    log_warn("checkpoint '%s' is passed over: %s", path, err_message());
}

/* gone, unless it is NULL: one of e[count] is not there any more, nothing is said of what it was found to be. */
static Err find(const char *folder, const CkptEntry *e, int count, int64_t below, char path[PATH_MAX], bool *gone)
{
    for (int i = 0; i < count; i++) {
        bool newer;
        if (e[i].step >= below) continue;
        TRY(entry_path(path, folder, e[i]));
        Err err = check(path, &newer);
        if (!err) return ERR_OK;
        if (gone) *gone = !file_is_dir(path);
        if (gone && *gone) return err;
        if (newer || err != ERR_CKPT) return err;
        say_passed_over(path);
    }
    return err_set(ERR_CKPT, "'%s' holds %d checkpoints, and none is valid", folder, count),
           err_hint("see the warnings above; resume=none in a new run.dir starts afresh");
}

Err ckpt_find(const char *run_dir, int64_t below, char path[PATH_MAX], bool *found)
{
    char folder[PATH_MAX];
    CkptEntry *e;
    int count;
    Err err;
    bool gone;
    *found = false;
    TRY(folder_name(folder, run_dir));
    for (int again = CKPT_RESCANS; again >= 0; again--) {
        gone = false;
        TRY(folder_scan(folder, &e, &count));
        if (!count) return ERR_OK;
        err = find(folder, e, count, below, path, again ? &gone : NULL);
        free(e);
        if (!gone) break;
    }
    *found = err == ERR_OK;
    return err;
}

Err ckpt_removed(const char *path, Err err)
{
    if (!err || file_is_dir(path)) return err;
    return err_set(ERR_CKPT, "'%s' was removed while it was read (checkpoint.keep)", path),
           err_hint("the run has newer ones; checkpoint.keep_every keeps some for good");
}

Err ckpt_visit_newest(const char *run_dir, Err (*visit)(const char *path, void *arg), void *arg, bool *found)
{
    char path[PATH_MAX];
    for (int again = CKPT_RESCANS;; again--) {
        TRY(ckpt_find(run_dir, INT64_MAX, path, found));
        if (!*found) return ERR_OK;
        const Err err = visit(path, arg);
        if (!err || file_is_dir(path)) return err;
        if (!again) return ckpt_removed(path, err);
        log_info("'%s' was removed while it was read: looking again", path);
    }
}

static Err no_such_step(const char *folder, const CkptEntry *e, int count, int64_t step)
{
    int64_t below = -1, above = -1;
    if (!count) return err_set(ERR_CKPT, "no checkpoint in '%s'", folder);
    for (int i = 0; i < count; i++) { /* newest first */
        if (e[i].step > step) above = e[i].step;
        if (e[i].step < step && below < 0) below = e[i].step;
    }
    err_set(ERR_CKPT, "no checkpoint of step %lld in '%s'", (long long)step, folder);
    if (below >= 0 && above >= 0)
        return err_hint("the nearest are of steps %lld and %lld", (long long)below, (long long)above);
    return err_hint("the nearest is of step %lld", (long long)(below < 0 ? above : below));
}

static Err entry_of_step(const char *folder, const CkptEntry *e, int count, int64_t step, char path[PATH_MAX])
{
    bool newer;
    for (int i = 0; i < count; i++) {
        if (e[i].step != step) continue;
        TRY(entry_path(path, folder, e[i]));
        return ckpt_removed(path, check(path, &newer));
    }
    return no_such_step(folder, e, count, step);
}

Err ckpt_of_step(const char *run_dir, int64_t step, char path[PATH_MAX])
{
    char folder[PATH_MAX];
    CkptEntry *e;
    int count;
    TRY(folder_name(folder, run_dir));
    TRY(folder_scan(folder, &e, &count));
    Err err = entry_of_step(folder, e, count, step, path);
    free(e);
    return err;
}

bool ckpt_any(const char *run_dir)
{
    char folder[PATH_MAX];
    CkptEntry *e;
    int count;
    if (folder_name(folder, run_dir) || folder_scan(folder, &e, &count)) return false;
    free(e);
    return count > 0;
}

Err ckpt_lock(const char *run_dir, int *fd_out)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/" RUN_LOCK, run_dir) >= (int)sizeof path)
        return err_set(ERR_CONFIG, "run.dir is too long: '%s'", run_dir);
    TRY_AS(ERR_STORAGE, file_make_dirs(run_dir));
    TRY_AS(ERR_STORAGE, file_lock(path, fd_out));
    return ERR_OK;
}
