/* A folder for the files of a test program, removed at its end. */
#ifndef MEGATRAIN_TEST_SCRATCH_H
#define MEGATRAIN_TEST_SCRATCH_H

#include "test.h"

#include <unistd.h>

#include "base/file.h"

static char scratch_dir[64];

/* Path of a name in the folder; the last eight answers stay valid. */
static const char *in_dir(const char *name)
{
    static char paths[8][512];
    static int turn;
    if (!*scratch_dir) {
        snprintf(scratch_dir, sizeof scratch_dir, "/tmp/megatrain-test-%d", (int)getpid());
        if (file_make_dirs(scratch_dir) != ERR_OK) exit(1);
    }
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", scratch_dir, name);
    return path;
}

__attribute__((destructor)) static void scratch_clean(void)
{
    if (*scratch_dir) file_remove_tree(scratch_dir);
}

static inline void write_bytes(const char *name, const void *data, int64_t size)
{
    OK(file_replace(in_dir(name), data, size));
}

static inline const char *write_text(const char *name, const char *text)
{
    write_bytes(name, text, (int64_t)strlen(text));
    return in_dir(name);
}

static inline bool same_files(const char *a, const char *b)
{
    char *x, *y;
    int64_t nx, ny;
    OK(file_read_all(in_dir(a), 1 << 28, &x, &nx));
    OK(file_read_all(in_dir(b), 1 << 28, &y, &ny));
    bool same = nx == ny && memcmp(x, y, (size_t)nx) == 0;
    free(x);
    free(y);
    return same;
}

static inline bool dir_is_empty(const char *name)
{
    char command[256];
    snprintf(command, sizeof command, "test -z \"$(ls -A %s)\"", in_dir(name));
    return system(command) == 0;
}

#endif
