/* See kept.h. */
#include "train/kept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/run_files.h"

enum { TOKENIZER_MAX_BYTES = 1 << 30, STARTS_MAX = 1000000 };

static Err path_of(char out[PATH_MAX], const char *folder, const char *name)
{
    if (snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX) return ERR_OK;
    return err_set(ERR_IO, "path is too long: '%s/%s'", folder, name);
}

/* ---- starts ---- */

/* The configuration behind a line that says of which start it is. */
static Err write_start(const char *path, int number, const char *config_text, int64_t step, const char *machine,
                       const char *job)
{
    char date[32], *text = NULL;
    size_t size = 0;
    struct tm t;
    const time_t now = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &t));
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the configuration");
    fprintf(f, "; start %d, %s, from step %lld, megatrain %s, %s, %s\n%s", number, date, (long long)step,
            identity_program(), machine, job, config_text);
    const bool whole = !ferror(f);
    Err err = fclose(f) || !whole ? err_set(ERR_MEMORY, "no memory for the configuration")
                                  : file_replace(path, text, (int64_t)size);
    free(text);
    return err;
}

Err kept_start(const char *run_dir, const char *config_text, int64_t step, const char *machine, const char *job)
{
    char folder[PATH_MAX], name[32], path[PATH_MAX];
    TRY(path_of(path, run_dir, RUN_LOG));
    if (file_check_link(path)) log_warn("no log file: %s", err_message());
    else if (!log_to_file(path)) log_warn("no log file: cannot open '%s': %m", path);
    TRY(path_of(folder, run_dir, RUN_STARTS));
    TRY(file_make_dirs(folder));
    TRY(path_of(path, folder, "saved"));
    if (!step) TRY(file_remove_tree(path)); /* what begins anew has no checkpoint yet */
    for (int number = 1; number < STARTS_MAX; number++) {
        snprintf(name, sizeof name, "%d.ini", number);
        TRY(path_of(path, folder, name));
        if (!file_exists(path)) return write_start(path, number, config_text, step, machine, job);
    }
    return err_set(ERR_IO, "too many starts in '%s'", folder);
}

Err kept_saved(const char *run_dir, int64_t step)
{
    char folder[PATH_MAX], path[PATH_MAX], text[64];
    TRY(path_of(folder, run_dir, RUN_STARTS));
    TRY(path_of(path, folder, "saved"));
    if (file_exists(path)) return ERR_OK;
    TRY(file_make_dirs(folder)); /* somebody may have removed the run's folder while it runs */
    const int n = snprintf(text, sizeof text, "first checkpoint: step %lld\n", (long long)step);
    return file_replace(path, text, n);
}

bool kept_was_saved(const char *run_dir)
{
    char path[PATH_MAX];
    return !path_of(path, run_dir, RUN_STARTS "/saved") && file_exists(path);
}

/* ---- the tokenizer ---- */

static Err copy_file(const char *from, const char *to)
{
    char *text, *there = NULL;
    int64_t size, size_there = -1;
    TRY(file_read_all(from, TOKENIZER_MAX_BYTES, &text, &size));
    if (file_exists(to) && file_read_all(to, TOKENIZER_MAX_BYTES, &there, &size_there)) there = NULL;
    const bool same = there && size == size_there && memcmp(text, there, (size_t)size) == 0;
    Err err = same ? ERR_OK : file_replace(to, text, size);
    free(text);
    free(there);
    return err;
}

enum { CUTTING_FILES = 5 };

const char *const kept_tokenizer_files[] = { "encoder.json",
                                             "vocab.bpe",
                                             "vocab.json",
                                             "merges.txt",
                                             "tokenizer.json",
                                             "tokenizer_config.json",
                                             "special_tokens_map.json",
                                             "generation_config.json",
                                             "chat_template.jinja",
                                             "added_tokens.json",
                                             "tokenizer.model",
                                             NULL };

bool kept_tokenizer_path(const char *spec, const char *name, char out[PATH_MAX])
{
    const char *slash = strrchr(spec, '/'), *file = slash ? slash + 1 : spec;
    if (file_is_dir(spec)) return snprintf(out, PATH_MAX, "%s/%s", spec, name) < PATH_MAX && file_exists(out);
    if (!strcmp(name, "tokenizer.json")) return snprintf(out, PATH_MAX, "%s", spec) < PATH_MAX;
    for (int i = 0; i < CUTTING_FILES; i++)
        if (!strcmp(name, kept_tokenizer_files[i])) return false; /* the file says it all */
    return !strcmp(file, "tokenizer.json") &&
           snprintf(out, PATH_MAX, "%.*s%s", (int)(file - spec), spec, name) < PATH_MAX && file_exists(out);
}

Err kept_tokenizer(const char *run_dir, const char *spec)
{
    char folder[PATH_MAX], from[PATH_MAX], to[PATH_MAX];
    if (!strcmp(spec, "byte")) return ERR_OK;
    TRY(path_of(folder, run_dir, RUN_TOKENIZER));
    TRY(file_make_dirs(folder));
    for (int i = 0; kept_tokenizer_files[i]; i++) {
        TRY(path_of(to, folder, kept_tokenizer_files[i]));
        if (kept_tokenizer_path(spec, kept_tokenizer_files[i], from)) TRY(copy_file(from, to));
        else TRY(file_remove_tree(to)); /* an earlier start with another tokenizer left it */
    }
    return ERR_OK;
}

bool kept_find_tokenizer(const char *run_dir, char out[PATH_MAX])
{
    return !path_of(out, run_dir, RUN_TOKENIZER) && file_is_dir(out);
}
