/*
 * Log lines on stderr: "[rank 3] warning: text". Results go to stdout and never through here.
 * What is said is made plain (base/plain.h), but for its lines and colours.
 * The rank prefix is per thread and shown only when there is more than one rank.
 */
#ifndef MEGATRAIN_BASE_LOG_H
#define MEGATRAIN_BASE_LOG_H

#include <stdbool.h>

typedef enum { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR } LogLevel;

void log_set_level(LogLevel lowest);         /* default LOG_INFO; process-wide */
void log_set_rank(int rank, int world_size); /* the calling thread's rank */
int log_rank(void);

void log_debug(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_info(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/*
 * Keeps a copy of all lines, with their times (UTC) and without colours, at the end of a file: of those said so far too
 * (the first 16 KiB of them), to the end of the process. False, and errno: it cannot be opened. A file that cannot be
 * written any more is told once and let go: no run ends for its log.
 */
bool log_to_file(const char *path);
/* A line to the file alone, of what is written to stderr otherwise. */
void log_copy(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Prints a warning the first time this `key` (a string literal) is seen in the process. */
void log_warn_once(const char *key, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A line that stays at the bottom of the terminal, below all log lines: shown at once, shown again after each
 * of them, replaced by the next call; NULL takes it away. For terminals only; cut after LOG_STATUS_BYTES. */
enum { LOG_STATUS_BYTES = 512 };
void log_status(const char *text);
bool log_is_live(void); /* stderr is a terminal that can do that */

#endif
