/* See kept.h. */
#include "train/kept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "base/log.h"
#include "base/version.h"

enum { TOKENIZER_MAX_BYTES = 1 << 30, STARTS_MAX = 1000000 };

static Err path_of(char out[PATH_MAX], const char *folder, const char *name)
{
    if (snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX) return ERR_OK;
    return err_set(ERR_IO, "path is too long: '%s/%s'", folder, name);
}

/* ---- starts ---- */

/* The configuration behind a line that says of which start it is. */
static Err write_start(const char *path, int number, const char *config_text, int64_t step)
{
    char date[32], *text = NULL;
    size_t size = 0;
    struct tm t;
    const time_t now = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &t));
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the configuration");
    fprintf(f, "; start %d, %s, from step %lld, megatrain %s\n%s", number, date, (long long)step,
            MEGATRAIN_VERSION, config_text);
    const bool whole = !ferror(f);
    Err err = fclose(f) || !whole ? err_set(ERR_MEMORY, "no memory for the configuration")
                                  : file_replace(path, text, (int64_t)size);
    free(text);
    return err;
}

Err kept_start(const char *run_dir, const char *config_text, int64_t step)
{
    char folder[PATH_MAX], name[32], path[PATH_MAX];
    TRY(path_of(path, run_dir, "log.txt"));
    if (file_check_link(path)) log_warn("no log file: %s", err_message());
    else if (!log_to_file(path)) log_warn("no log file: cannot open '%s': %m", path);
    TRY(path_of(folder, run_dir, "starts"));
    TRY(file_make_dirs(folder));
    for (int number = 1; number < STARTS_MAX; number++) {
        snprintf(name, sizeof name, "%d.ini", number);
        TRY(path_of(path, folder, name));
        if (!file_exists(path)) return write_start(path, number, config_text, step);
    }
    return err_set(ERR_IO, "too many starts in '%s'", folder);
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

Err kept_tokenizer(const char *run_dir, const char *spec)
{
    static const char *const names[] = { "encoder.json", "vocab.bpe", "vocab.json", "merges.txt",
                                         "tokenizer.json" };
    char folder[PATH_MAX], from[PATH_MAX], to[PATH_MAX];
    if (!strcmp(spec, "byte")) return ERR_OK;
    const bool is_folder = file_is_dir(spec);
    TRY(path_of(folder, run_dir, "tokenizer"));
    TRY(file_make_dirs(folder));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const bool the_file = !is_folder && !strcmp(names[i], "tokenizer.json");
        TRY(path_of(from, spec, names[i]));
        TRY(path_of(to, folder, names[i]));
        if (the_file || (is_folder && file_exists(from))) TRY(copy_file(the_file ? spec : from, to));
        else TRY(file_remove_tree(to)); /* an earlier start with another tokenizer left it */
    }
    return ERR_OK;
}

bool kept_find_tokenizer(const char *run_dir, char out[PATH_MAX])
{
    return !path_of(out, run_dir, "tokenizer") && file_is_dir(out);
}
