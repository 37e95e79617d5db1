/* Lists the files that a job reads, where it is given folders (input.h). */
#include <errno.h>
#include <fts.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/grow.h"
#include "data/input.h"

static int by_name(const FTSENT **a, const FTSENT **b) { return strcmp((*a)->fts_name, (*b)->fts_name); }

static Err add(InputFiles *f, const char *path)
{
    char *copy;
    TRY(setup_strdup(&f->mem, path, &copy));
    TRY(grow_to(&f->paths, &f->capacity, f->count + 1));
    f->paths[f->count++] = copy;
    return ERR_OK;
}

/* Adds one entry that is found below a folder. */
static Err add_entry(InputFiles *f, FTS *tree, FTSENT *entry)
{
    if (entry->fts_level > 0 && *entry->fts_name == '.') return fts_set(tree, entry, FTS_SKIP), ERR_OK;
    switch (entry->fts_info) {
    case FTS_F: return add(f, entry->fts_path);
    case FTS_D:
    case FTS_DP: return ERR_OK;
    case FTS_DC: return err_set(ERR_DATA, "'%s' leads back to a folder that it lies in", entry->fts_path);
    case FTS_DNR:
    case FTS_ERR:
    case FTS_NS: errno = entry->fts_errno; return err_set(ERR_DATA, "cannot read '%s': %m", entry->fts_path);
    default: return err_set(ERR_DATA, "'%s' is neither a file nor a folder", entry->fts_path);
    }
}

static Err add_folder(InputFiles *f, const char *folder)
{
    char *paths[] = { (char *)(uintptr_t)folder, NULL };
    const int before = f->count;
    Err err = ERR_OK;
    FTS *tree = fts_open(paths, FTS_LOGICAL | FTS_NOCHDIR, by_name);
    if (!tree) return err_set(ERR_DATA, "cannot read the folder '%s': %m", folder);
    for (FTSENT *entry; !err && (entry = fts_read(tree));) err = add_entry(f, tree, entry);
    fts_close(tree);
    if (!err && f->count == before) return err_set(ERR_DATA, "the folder '%s' holds no files", folder);
    return err;
}

/* Files that a quoted pattern names, in the order of their names' bytes; as a shell would have handed them over. */
static Err add_pattern(InputFiles *f, const char *pattern)
{
    glob_t found;
    Err err = ERR_OK;
    const int rc = glob(pattern, 0, NULL, &found);
    if (rc == GLOB_NOMATCH) return err_set(ERR_DATA, "no file matches '%s'", pattern);
    if (rc) return err_set(rc == GLOB_NOSPACE ? ERR_MEMORY : ERR_DATA, "cannot list '%s': %m", pattern);
    for (size_t i = 0; i < found.gl_pathc && !err; i++)
        err = file_is_dir(found.gl_pathv[i]) ? add_folder(f, found.gl_pathv[i]) : add(f, found.gl_pathv[i]);
    globfree(&found);
    return err;
}

static Err add_word(InputFiles *f, const char *word)
{
    if (file_is_dir(word)) return add_folder(f, word);
    return strpbrk(word, "*?[") && !file_exists(word) ? add_pattern(f, word) : add(f, word);
}

Err input_files_open(const char *const *words, int count, InputFiles *out)
{
    *out = (InputFiles){ 0 };
    setup_init(&out->mem);
    Err err = ERR_OK;
    for (int i = 0; !err && i < count; i++) err = add_word(out, words[i]);
    if (err) input_files_close(out);
    return err;
}

void input_files_close(InputFiles *f)
{
    free(f->paths);
    setup_release(&f->mem);
    *f = (InputFiles){ 0 };
}

/* The folder that a file would lie in, as the system knows it; "": it is not there yet, nor is what is in it. */
static void real_folder(const char *path, char out[PATH_MAX])
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    if (!slash) strcpy(folder, ".");
    else snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    if (!realpath(folder, out)) *out = 0;
}

Err input_files_check_output(const char *const *words, int count, const char *output)
{
    char folder[PATH_MAX], at[PATH_MAX];
    real_folder(output, at);
    for (int i = 0; i < count; i++) {
        if (!file_is_dir(words[i]) || !realpath(words[i], folder)) continue;
        const size_t n = strlen(folder);
        if (strncmp(at, folder, n) || (n > 1 && at[n] && at[n] != '/')) continue;
        err_set(ERR_CONFIG, "--output '%s' lies in the folder '%s', which --input names", output, words[i]);
        return err_hint("what is written there would be read: choose an output outside of it");
    }
    return ERR_OK;
}
