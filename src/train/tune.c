/*
 * run.autotune (run.h): timed algorithms of products, one choice for all ranks. Ranks time what they meet first, and
 * noise decides between what is equally fast: of two that chose differently the lower rank's choice becomes
 * everyone's, so that replicas compute alike; and stages of a pipeline have shapes that others have not. Rank 0 alone
 * reads and writes the file.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "base/run_files.h"
#include "train/run.h"

static void choices_path(const Run *r, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/" RUN_ALGORITHMS, r->cfg->run.dir);
}

/* Every rank's text of `bytes`: *out has `*pitch` bytes a rank, filled up with zeros, one at least. Collective. */
static Err share(Run *r, const char *text, int64_t bytes, char **out, int64_t *pitch)
{
    Comm *host = &r->world->host;
    Stream *s = &r->trainer.device.stream;
    int64_t most = bytes;
    TRY(comm_max_i64(host, s, &most, 1, NULL));
    *pitch = (most + 8) / 8 * 8;
    char *own = calloc(1, (size_t)*pitch);
    *out = calloc((size_t)host->size, (size_t)*pitch);
    Err err = own && *out ? ERR_OK : err_set(ERR_MEMORY, "no memory for the ranks' choices of algorithms");
    if (!err) {
        memcpy(own, text, (size_t)bytes);
        err = comm_all_gather(host, s, tensor_of(*out, I64, host->size * *pitch / 8), tensor_of(own, I64, *pitch / 8),
                              NULL);
    }
    free(own);
    if (err) free(*out);
    return err;
}

static Err read_choices(const Run *r, const char *path, char **text, int64_t *size)
{
    *text = NULL;
    *size = 0;
    if (r->world->rank || !file_exists(path)) return ERR_OK;
    return err_as(file_read_all(path, DEVICE_CHOICES_BYTES, text, size), ERR_STORAGE);
}

Err run_tune(Run *r)
{
    char path[PATH_MAX], *text, *all;
    int64_t size, pitch;
    if (!r->cfg->run.autotune) return ERR_OK;
    choices_path(r, path);
    TRY(read_choices(r, path, &text, &size));
    Err err = share(r, text ? text : "", size, &all, &pitch);
    free(text);
    if (err) return err;
    if (*all) err = device_choices_load(&r->trainer.device, all, false); /* rank 0's */
    free(all);
    if (err) log_warn("'%s' is passed over, shapes are timed again: %s", path, err_message());
    const bool any_bits = r->cfg->run.reproducible == RUN_REPRODUCIBLE_OFF;
    device_autotune(&r->trainer.device, any_bits ? TUNE_FASTEST : TUNE_SAME_BITS);
    return ERR_OK;
}

/* In the order of ranks; where GPUs differ, those of another kind keep what they have. */
static void take_all(Run *r, const char *all, int64_t pitch)
{
    for (int rank = 0; rank < r->world->size; rank++)
        if (device_choices_load(&r->trainer.device, all + rank * pitch, rank > 0))
            log_warn("choices of algorithms of rank %d are passed over: %s", rank, err_message());
}

static Err write_choices(const Run *r, char *text)
{
    char path[PATH_MAX];
    if (r->world->rank) return ERR_OK;
    choices_path(r, path);
    const int64_t size = device_choices_save(&r->trainer.device, text);
    return err_as(file_replace(path, text, size), ERR_STORAGE);
}

Err run_keep_choices(Run *r)
{
    char *all;
    int64_t pitch;
    if (!r->cfg->run.autotune) return ERR_OK;
    char *text = malloc(DEVICE_CHOICES_BYTES);
    if (!text) return err_set(ERR_MEMORY, "no memory for the chosen algorithms");
    Err err = share(r, text, device_choices_save(&r->trainer.device, text), &all, &pitch);
    if (!err) {
        take_all(r, all, pitch);
        free(all);
        err = write_choices(r, text);
    }
    free(text);
    return err;
}
