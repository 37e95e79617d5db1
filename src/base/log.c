/*
 * A line is put together in one buffer and leaves in one write, so that lines of several ranks and threads
 * never mix inside a line. A line longer than the buffer is cut. Nothing here allocates: training logs too.
 */
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"
#include "base/plain.h"

#define ERASE "\r\x1b[K" /* a terminal's line */
enum { LINE_BYTES = 4096, ONCE_MAX = 128, EARLY_BYTES = 16384 };

static atomic_int lowest_level = LOG_INFO;
static pthread_mutex_t status_lock = PTHREAD_MUTEX_INITIALIZER;
static char status[LOG_STATUS_BYTES];
static _Thread_local int my_rank, my_world_size = 1;

void log_set_level(LogLevel lowest) { atomic_store(&lowest_level, (int)lowest); }

void log_set_rank(int rank, int world_size)
{
    my_rank = rank;
    my_world_size = world_size;
}

int log_rank(void) { return my_rank; }

static void put_bytes(const char *bytes, int n)
{
    ssize_t ignored = write(STDERR_FILENO, bytes, (size_t)n);
    (void)ignored; /* a closed stderr must not stop a run */
}

/* ---- the copy in a file ---- */

static int copy_fd = -1;
static char early[EARLY_BYTES]; /* lines from before there was a file, while there may still be one */
static int early_used;

/* Whole or not at all; false, and errno. */
static bool write_all(const char *bytes, int n)
{
    while (n > 0) {
        const ssize_t done = write(copy_fd, bytes, (size_t)n);
        if (done < 0 && errno != EINTR) return false;
        if (done > 0) bytes += done, n -= (int)done;
    }
    return true;
}

static void lose_file(void)
{
    char line[256];
    put_bytes(line,
              snprintf(line, sizeof line, "warning: the log file cannot be written: %s; the run goes on without\n",
                       strerror(errno)));
    close(copy_fd);
    copy_fd = -1;
    early_used = EARLY_BYTES;
}

/* A line with its time, without escape sequences. With the lock held. */
static void copy_line(const char *text, int n)
{
    char line[LINE_BYTES + 32];
    struct tm t;
    const time_t now = time(NULL);
    int used = (int)strftime(line, 32, "%Y-%m-%dT%H:%M:%SZ ", gmtime_r(&now, &t));
    for (int i = 0; i < n && used < (int)sizeof line - 1; i++) {
        if (text[i] == '\x1b')
            while (i < n && text[i] != 'm') i++;
        else if (text[i] != '\n' || i == n - 1) line[used++] = text[i];
        else line[used++] = ' '; /* a list of several lines stays one record */
    }
    if (copy_fd >= 0) {
        if (!write_all(line, used)) lose_file();
    } else if (early_used + used <= EARLY_BYTES) {
        memcpy(early + early_used, line, (size_t)used);
        early_used += used;
    }
}

void log_copy(const char *fmt, ...)
{
    char line[LINE_BYTES];
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(line, sizeof line - 1, fmt, args);
    va_end(args);
    strcat(line, "\n");
    pthread_mutex_lock(&status_lock);
    if (n > 0) copy_line(line, (int)strlen(line));
    pthread_mutex_unlock(&status_lock);
}

bool log_to_file(const char *path)
{
    int fd;
    do fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) return false;
    pthread_mutex_lock(&status_lock);
    if (copy_fd >= 0) close(copy_fd);
    copy_fd = fd;
    if (early_used < EARLY_BYTES && !write_all(early, early_used)) lose_file();
    early_used = EARLY_BYTES;
    pthread_mutex_unlock(&status_lock);
    return true;
}

/* ---- stderr ---- */

static void put_line(LogLevel level, const char *fmt, va_list args)
{
    static const char *const label[] = { "debug: ", "", "warning: ", "error: " };
    if ((int)level < atomic_load(&lowest_level)) return;

    char line[LINE_BYTES + sizeof ERASE + LOG_STATUS_BYTES];
    pthread_mutex_lock(&status_lock);
    int n = status[0] ? snprintf(line, sizeof line, ERASE) : 0;
    if (my_world_size > 1) n += snprintf(line + n, sizeof line - (size_t)n, "[rank %d] ", my_rank);
    n += snprintf(line + n, sizeof line - (size_t)n, "%s", label[level]);
    int text = vsnprintf(line + n, (size_t)(LINE_BYTES - n), fmt, args);
    plain_make(line + n, PLAIN_COLORS);
    n = text < 0 || n + text > LINE_BYTES - 2 ? LINE_BYTES - 2 : n + text;
    const int from = status[0] ? (int)strlen(ERASE) : 0, end = n + 1;
    n += snprintf(line + n, sizeof line - (size_t)n, "\n%s", status);
    put_bytes(line, n);
    copy_line(line + from, end - from);
    pthread_mutex_unlock(&status_lock);
}

void log_status(const char *text)
{
    char line[sizeof ERASE + LOG_STATUS_BYTES];
    pthread_mutex_lock(&status_lock);
    snprintf(status, sizeof status, "%s", text ? text : "");
    put_bytes(line, snprintf(line, sizeof line, ERASE "%s", status));
    pthread_mutex_unlock(&status_lock);
}

bool log_is_live(void)
{
    const char *term = getenv("TERM");
    return isatty(STDERR_FILENO) && term && *term && strcmp(term, "dumb") != 0;
}

#define LOG_FUNCTION(name, level)   \
    void name(const char *fmt, ...) \
    {                               \
        va_list args;               \
        va_start(args, fmt);        \
        put_line(level, fmt, args); \
        va_end(args);               \
    }
LOG_FUNCTION(log_debug, LOG_DEBUG)
LOG_FUNCTION(log_info, LOG_INFO)
LOG_FUNCTION(log_warn, LOG_WARN)

/* True the first time. Keys are literals, but the same literal may have several addresses. */
static bool first_time(const char *key)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const char *seen[ONCE_MAX];
    static int count;

    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < count && strcmp(seen[i], key) != 0) i++;
    bool first = i == count;
    if (first) {
        ASSERT(count < ONCE_MAX);
        seen[count++] = key;
    }
    pthread_mutex_unlock(&lock);
    return first;
}

void log_warn_once(const char *key, const char *fmt, ...)
{
    if (!first_time(key)) return;
    va_list args;
    va_start(args, fmt);
    put_line(LOG_WARN, fmt, args);
    va_end(args);
}
