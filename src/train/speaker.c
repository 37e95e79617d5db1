/* See speaker.h. */
#include "train/speaker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/run_files.h"
#include "boot/greet.h"

enum {
    LOOK_US = 20 * 1000,
    LONG_AGO_S = 3600,
    TOGETHER_S = 1 /* ranks of one start begin within it */
};
#define FIRST_WAIT_S 0.6 /* rank 0 hears its own verdict up to 0.4 s after the others (boot/host.c) */
#define NEXT_WAIT_S 0.1
#define LAST_WAIT_S 3.0

/* A start is over by then, so nobody looks for them any more. */
static void clear_old(const char *folder, time_t age_s)
{
    DIR *d = opendir(folder);
    const time_t now = time(NULL);
    struct stat s;
    for (struct dirent *e; d && (e = readdir(d));) {
        if (strncmp(e->d_name, RUN_SPOKEN, strlen(RUN_SPOKEN)) != 0) continue;
        if (!fstatat(dirfd(d), e->d_name, &s, AT_SYMLINK_NOFOLLOW) && now - s.st_mtim.tv_sec > age_s)
            unlinkat(dirfd(d), e->d_name, 0);
    }
    if (d) closedir(d);
}

static void name_file(Speaker *s, const char *folder, const GreetKey *key)
{
    const unsigned long long name = greet_name(key, "speaker");
    if (snprintf(s->path, sizeof s->path, "%s/" RUN_SPOKEN "-%016llx", folder, name) >= (int)sizeof s->path)
        s->path[0] = 0;
}

void speaker_open(Speaker *s, const char *folder, const char *secret, const char *start)
{
    const GreetKey key = greet_key(secret, start);
    *s = (Speaker){ 0 };
    name_file(s, folder, &key);
    clear_old(folder, LONG_AGO_S);
}

void speaker_forget(const char *folder) { clear_old(folder, -1); }

void speaker_open_job(Speaker *s, const char *folder, const char *secret, const char *job)
{
    speaker_open(s, folder, secret, job);
    clock_gettime(CLOCK_REALTIME, &s->since);
    s->since.tv_sec -= TOGETHER_S;
}

static double wait_of(int turn)
{
    const double s = FIRST_WAIT_S + NEXT_WAIT_S * (turn - 1);
    return turn == 0 ? 0 : s < LAST_WAIT_S ? s : LAST_WAIT_S;
}

static bool is_before(struct timespec a, struct timespec b)
{
    return a.tv_sec < b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec < b.tv_nsec);
}

/* Has a rank of this start spoken? A file of an earlier start, which *old says, is no answer. */
static bool is_spoken(const Speaker *s, bool *old)
{
    struct stat f;
    *old = false;
    if (lstat(s->path, &f)) return false;
    *old = is_before(f.st_mtim, s->since);
    return !*old;
}

bool speaker_is_me(const Speaker *s, int turn)
{
    bool old;
    if (!*s->path) return turn == 0;
    for (const double end = clock_s() + wait_of(turn); clock_s() < end; usleep(LOOK_US))
        if (is_spoken(s, &old)) return false;
    if (is_spoken(s, &old)) return false;
    if (old) unlink(s->path);
    const int fd = open(s->path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return errno != EEXIST && turn == 0;
    close(fd);
    return true;
}
