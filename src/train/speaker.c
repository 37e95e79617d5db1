/* See speaker.h. */
#include "train/speaker.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"

enum { LOOK_US = 20 * 1000 };
#define FIRST_WAIT_S 0.6 /* rank 0 hears its own verdict up to 0.4 s after the others (boot/host.c) */
#define NEXT_WAIT_S 0.1
#define LAST_WAIT_S 3.0

static bool path_of(const char *folder, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/.spoken", folder) < PATH_MAX;
}

void speaker_clear(const char *folder)
{
    char path[PATH_MAX];
    if (path_of(folder, path)) unlink(path);
}

static double wait_of(int turn)
{
    const double s = FIRST_WAIT_S + NEXT_WAIT_S * (turn - 1);
    return turn == 0 ? 0 : s < LAST_WAIT_S ? s : LAST_WAIT_S;
}

bool speaker_is_me(const char *folder, int turn)
{
    char path[PATH_MAX];
    if (!path_of(folder, path)) return turn == 0;
    for (const double end = clock_s() + wait_of(turn); clock_s() < end; usleep(LOOK_US))
        if (access(path, F_OK) == 0) return false;
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return errno != EEXIST && turn == 0;
    close(fd);
    return true;
}
