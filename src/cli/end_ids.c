/* See end_ids.h. */
#include "cli/end_ids.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/run_files.h"
#include "ckpt/ckpt.h"
#include "hf/folder.h"
#include "train/kept.h"

static const char name[] = RUN_GENERATION;

static bool lies_in(const char *folder, const char *file, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, file) < PATH_MAX && file_exists(path);
}

/* Is the checkpoint in a run's folder, and not copied out of it? */
static bool find_run(const char *checkpoint, char run[PATH_MAX])
{
    char checkpoints[PATH_MAX + 32];
    snprintf(checkpoints, sizeof checkpoints, "%s/../../checkpoints", checkpoint);
    return file_is_dir(checkpoints) && snprintf(run, PATH_MAX, "%s/../..", checkpoint) < PATH_MAX;
}

Err end_ids_of(const char *checkpoint, const char *data, const char *tokenizer, char path[PATH_MAX], HfIds *out)
{
    char run[PATH_MAX];
    *out = (HfIds)HF_NO_IDS;
    if (strcmp(tokenizer, "byte") != 0 && kept_tokenizer_path(tokenizer, name, path)) return hf_ids_read(path, out);
    const bool trained = data && strstr(data, ", tokenizer ");
    if (!trained && find_run(checkpoint, run) && lies_in(run, name, path)) return hf_ids_read(path, out);
    *path = 0;
    return ERR_OK;
}

typedef struct {
    const char *tokenizer;
    HfIds *out;
} Wanted;

static Err read_ids(const char *checkpoint, void *arg)
{
    const Wanted *w = arg;
    char path[PATH_MAX];
    SetupArena setup;
    CkptMeta meta;
    setup_init(&setup);
    Err err = ckpt_meta(checkpoint, &setup, &meta);
    if (!err) err = end_ids_of(checkpoint, meta.data, w->tokenizer, path, w->out);
    setup_release(&setup);
    return err;
}

Err end_ids_of_run(const char *run_dir, int64_t step, const char *tokenizer, HfIds *out)
{
    Wanted w = { tokenizer, out };
    char path[PATH_MAX];
    bool found;
    *out = (HfIds)HF_NO_IDS;
    if (step < 0) return ckpt_visit_newest(run_dir, read_ids, &w, &found);
    TRY(ckpt_of_step(run_dir, step, path));
    return read_ids(path, &w);
}

Err end_ids_keep(const char *folder, const char *to)
{
    char path[PATH_MAX], copy[PATH_MAX], *text;
    int64_t size;
    HfIds ids;
    if (!lies_in(folder, name, path)) {
        if (!lies_in(folder, "config.json", path)) return ERR_OK;
        TRY(hf_ids_read(path, &ids));
        return ids.end_count ? hf_ids_write(&ids, to) : ERR_OK;
    }
    TRY(hf_ids_read(path, &ids));
    if (lies_in(to, name, copy)) return ERR_OK; /* it came with the tokenizer */
    TRY_AS(ERR_CKPT, file_read_all(path, HF_JSON_MOST, &text, &size));
    const Err err = file_replace(copy, text, size);
    free(text);
    return err_as(err, ERR_STORAGE);
}
