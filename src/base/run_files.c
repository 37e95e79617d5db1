/* See run_files.h. */
#include "base/run_files.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

static const char *const whole[] = {
    RUN_CONFIG,           RUN_METRICS,    RUN_LOG,        RUN_CURVE, RUN_TIMELINE,
    RUN_TIMELINE_PICTURE, RUN_ALGORITHMS, RUN_GENERATION, RUN_LOCK,  RUN_LOCK ".held" /* (base/held.h) */,
    RUN_CHECKPOINTS,      RUN_STARTS,     RUN_TOKENIZER
};
static const char *const begun[] = { RUN_EVENTS, RUN_SHARED_MARK, RUN_SPOKEN, RUN_SECRET };

bool run_file_is_own(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        if (strlen(whole[i]) == n && !strncmp(whole[i], name, n)) return true;
    for (size_t i = 0; i < sizeof begun / sizeof *begun; i++)
        if (strlen(begun[i]) <= n && !strncmp(begun[i], name, strlen(begun[i]))) return true;
    return false;
}

/* (A lock may be of a start that was killed at once, a log is added to, and algorithms are read.) */
const char *run_file_foreign(const char *run_dir)
{
    static const char *const replaced[] = { RUN_CONFIG,           RUN_METRICS,    RUN_CURVE,    RUN_TIMELINE,
                                            RUN_TIMELINE_PICTURE, RUN_GENERATION, RUN_TOKENIZER };
    if (file_holds(run_dir, RUN_STARTS) || file_holds(run_dir, RUN_CHECKPOINTS)) return NULL;
    for (size_t i = 0; i < sizeof replaced / sizeof *replaced; i++)
        if (file_holds(run_dir, replaced[i])) return replaced[i];
    return NULL;
}

size_t run_file_unfinished(const char *name)
{
    const char *end = strstr(name, ".tmp-");
    return end && end[5] && !end[5 + strspn(end + 5, "0123456789")] ? (size_t)(end - name) : 0;
}

/* Adds one part of a path to the folder `out`, and follows it if it is a link. */
static void add_part(char out[PATH_MAX], const char *part, int n)
{
    char longer[2 * PATH_MAX];
    char *slash = strrchr(out, '/');
    if (!n || (n == 1 && part[0] == '.')) return;
    if (n == 2 && !strncmp(part, "..", 2)) {
        slash[slash == out] = 0;
        return;
    }
    snprintf(longer, sizeof longer, "%s%s%.*s", out, out[1] ? "/" : "", n, part);
    if (!realpath(longer, out)) snprintf(out, PATH_MAX, "%.*s", PATH_MAX - 1, longer);
}

/* realpath, also of what is not there yet. */
static void resolve(const char *path, char out[PATH_MAX])
{
    if (*path == '/' || !realpath(".", out)) strcpy(out, "/");
    for (size_t n; *path; path += n + (path[n] == '/')) {
        n = strcspn(path, "/");
        add_part(out, path, (int)n);
    }
}

bool run_file_is_at(const char *path, const char *run_dir)
{
    char folder[PATH_MAX], there[PATH_MAX], inside[2 * PATH_MAX];
    snprintf(inside, sizeof inside, "%.*s/%.*s", PATH_MAX - 1, run_dir, PATH_MAX - 1, path);
    resolve(run_dir, folder);
    resolve(strchr(path, '/') ? path : inside, there);
    const size_t n = strlen(folder), length = n == 1 ? 0 : n; /* "/" ends in the slash that follows others */
    if (strncmp(folder, there, length) != 0 || there[length] != '/') return false;
    const char *name = there + length + 1;
    const size_t unfinished = run_file_unfinished(name);
    return run_file_is_own(name, unfinished ? unfinished : strcspn(name, "/"));
}
