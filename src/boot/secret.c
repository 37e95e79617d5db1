/* See secret.h. */
#include "boot/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/run_files.h"
#include "boot/supervised.h"

enum { RANDOM_BYTES = 32, DIGITS = 2 * RANDOM_BYTES };
#define LOOK_S 0.05
#define WRITTEN_S 1.0 /* writing the file takes no longer than this */

/* Ranks of one start of a job look for one file, those of another for another. */
static Err path_of(const Boot *b, const char *folder, char path[PATH_MAX])
{
    const int n = snprintf(path, PATH_MAX, "%s/" RUN_SECRET "%016llx", folder, (unsigned long long)boot_key(b));
    return n < PATH_MAX ? ERR_OK : err_set(ERR_STORAGE, "the folder's name '%.200s...' is too long", folder);
}

static Err hint_launcher(void)
{
    return err_hint("the ranks know each other by this file where their launcher gives them no MEGATRAIN_SECRET "
                    "(docs/security.md)");
}

static Err cannot(const char *what, const char *path)
{
    return err_set(ERR_STORAGE, "cannot %s '%s': %s", what, path, strerror(errno)), hint_launcher();
}

/* Is it this user's, and nobody else's? */
static Err check_owner(int fd, const char *path)
{
    struct stat s;
    if (fstat(fd, &s)) return cannot("look at", path);
    if (!S_ISREG(s.st_mode)) {
        err_set(ERR_STORAGE, "'%s' is %s, and should be a plain file", path,
                S_ISDIR(s.st_mode)    ? "a folder"
                : S_ISFIFO(s.st_mode) ? "a FIFO"
                                      : "a socket or a device");
        return err_hint("somebody made it where the ranks keep their secret while they meet: see who, and remove it");
    }
    if (s.st_uid == geteuid() && !(s.st_mode & 077)) return ERR_OK;
    err_set(ERR_STORAGE, "'%s' is not a file that user %u alone may read: it is user %u's, mode %03o", path,
            (unsigned)geteuid(), (unsigned)s.st_uid, (unsigned)s.st_mode & 0777);
    return err_hint("somebody else can write into this folder, or changed the file: see who, and remove it");
}

/* *whole false: it is not there, or not all of it yet (what a power cut leaves may be zeros). */
static Err read_file(Boot *b, const char *path, bool *whole)
{
    char text[DIGITS + 1] = "";
    *whole = false;
    const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return ERR_OK;
    if (fd < 0) return cannot("read", path);
    const Err err = check_owner(fd, path);
    *whole = !err && read(fd, text, DIGITS) == DIGITS && strspn(text, "0123456789abcdef") == DIGITS;
    close(fd);
    if (*whole) strcpy(b->secret, text);
    return err;
}

/* known: the secret, or "": it is drawn. *made false: there is a file. */
static Err make_file(const char *path, const char *known, bool *made)
{
    uint8_t bytes[RANDOM_BYTES];
    char text[DIGITS + 1];
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    *made = fd >= 0;
    if (fd < 0 && errno == EEXIST) return ERR_OK;
    if (fd < 0) return cannot("make", path);
    randombytes_buf(bytes, sizeof bytes);
    sodium_bin2hex(text, sizeof text, bytes, sizeof bytes);
    if (*known) snprintf(text, sizeof text, "%s", known);
    const bool written = write(fd, text, DIGITS) == DIGITS && !fsync(fd);
    if (!close(fd) && written) return ERR_OK;
    cannot("write", path);
    unlink(path);
    return ERR_STORAGE;
}

/* Reads it as soon as it is whole, until then (on clock_s). */
static Err look_until(Boot *b, const char *path, double until, bool *whole)
{
    const struct timespec pause = { 0, (long)(LOOK_S * 1e9) };
    TRY(read_file(b, path, whole));
    while (!*whole && clock_s() < until && !(b->stop && *b->stop)) {
        nanosleep(&pause, NULL);
        TRY(read_file(b, path, whole));
    }
    return ERR_OK;
}

/* The own one, or what an earlier start has left, which no other user knows either. One that stays cut short is of a
 * start that was killed as it wrote, and made anew. */
static Err leave_for_others(Boot *b, const char *folder, const char *path)
{
    bool made, whole;
    TRY_AS(ERR_STORAGE, file_make_dirs(folder));
    if (*b->secret) unlink(path); /* (an earlier worker's, perhaps cut short) */
    TRY(make_file(path, b->secret, &made));
    TRY(look_until(b, path, clock_s() + WRITTEN_S, &whole));
    if (whole) return ERR_OK;
    unlink(path);
    TRY(make_file(path, b->secret, &made));
    TRY(read_file(b, path, &whole));
    if (whole) return ERR_OK;
    return err_set(ERR_STORAGE, "'%s' is cut short", path), err_hint("remove it");
}

static Err wait_for_file(Boot *b, const char *path, double timeout_s)
{
    const double began = clock_s();
    bool whole;
    TRY(look_until(b, path, began + timeout_s, &whole));
    if (whole) return ERR_OK;
    err_set(ERR_RENDEZVOUS, "rank %d waited %.3g s for rank 0 of %d, which was to leave '%s'", b->rank,
            clock_s() - began, b->size, path);
    return err_hint("is rank 0 started, and do all ranks see this folder? Or set MEGATRAIN_SECRET on all of them "
                    "(docs/security.md)");
}

Err secret_find(Boot *b, const char *folder, double timeout_s)
{
    char path[PATH_MAX];
    TRY(path_of(b, folder, path));
    if (b->supervised) strcpy(b->secret, b->supervised->secret);
    if (b->rank == 0) TRY(leave_for_others(b, folder, path));
    else if (!*b->secret) TRY(wait_for_file(b, path, timeout_s));
    if (b->supervised) strcpy(b->supervised->secret, b->secret);
    return ERR_OK;
}

void secret_forget(const Boot *b, const char *folder)
{
    char path[PATH_MAX];
    if (b->rank == 0 && !path_of(b, folder, path)) unlink(path);
}
