/*
 * The thread's failure record: one message, one hint, the calls it came up through. Fixed buffers in
 * thread-local storage, so recording a failure can neither fail nor allocate; what does not fit is cut.
 * A message is formatted into a second buffer first, because its arguments may point into the record
 * (err_set(code, "...: %s", err_message())).
 */
#include "base/err.h"

#include <errno.h>
#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/log.h"
#include "base/plain.h"
#include "base/words.h"

enum { MESSAGE_BYTES = 16384, HINT_BYTES = 1024, TRAIL_MAX = 24, BACKTRACE_MAX = 48 };

typedef struct {
    Err code;
    int trail_count, way_count;
    bool elsewhere;
    char message[MESSAGE_BYTES], hint[HINT_BYTES], ways[ERR_WAYS][ERR_WAY_BYTES];
    struct {
        const char *file, *expr;
        int line;
    } trail[TRAIL_MAX];
} ErrRecord;

static _Thread_local ErrRecord record;
static _Thread_local char draft[MESSAGE_BYTES];

static const struct {
    const char *name;
    int status;
} kinds[ERR_COUNT] = {
#define X(kind, name, status) [ERR_##kind] = { name, status },
    ERR_LIST(X)
#undef X
};

Err err_set(Err code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(draft, sizeof draft, fmt, args);
    va_end(args);
    plain_make(draft, code == ERR_CONFIG ? "\n" : PLAIN_LINE); /* (a list of mistakes has several lines) */
    memcpy(record.message, draft, strlen(draft) + 1);
    record.code = code;
    record.hint[0] = 0;
    record.trail_count = record.way_count = 0;
    record.elsewhere = false;
    return code;
}

Err err_hint(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(draft, HINT_BYTES, fmt, args);
    va_end(args);
    plain_make(draft, PLAIN_LINE);
    memcpy(record.hint, draft, strlen(draft) + 1);
    return record.code;
}

Err err_no_thread(const char *what, int error)
{
    err_set(ERR_MEMORY, "%s: no thread: %s", what, strerror(error));
    return err_hint("raise ulimit -u, pids.max of the control group, or ulimit -v");
}

Err err_hint_descriptors(int error)
{
    struct rlimit files = { 0 };
    if (error == ENFILE) return err_hint("raise the system's limit, fs.file-max");
    getrlimit(RLIMIT_NOFILE, &files);
    return err_hint("raise ulimit -n, now %llu: a rank has a connection to each other",
                    (unsigned long long)files.rlim_cur);
}

Err err_take(const char *fmt, ...)
{
    va_list args;
    if (record.way_count == ERR_WAYS) return record.code;
    va_start(args, fmt);
    vsnprintf(draft, ERR_WAY_BYTES, fmt, args);
    va_end(args);
    plain_make(draft, PLAIN_LINE);
    memcpy(record.ways[record.way_count++], draft, strlen(draft) + 1);
    return record.code;
}

/* (trying may record failures of its own) */
void err_ways_keep(bool (*passes)(const void *user, const char *way), const void *user)
{
    enum { MOST = 2 };
    ErrRecord kept = record;
    kept.way_count = 0;
    for (int i = 0, all = record.way_count; i < all && kept.way_count < MOST; i++) {
        char way[ERR_WAY_BYTES];
        memcpy(way, kept.ways[i], sizeof way);
        if (passes(user, way)) memcpy(kept.ways[kept.way_count++], way, sizeof way);
    }
    record = kept;
}

/* "take A, or B; " and the hint's text */
const char *err_hint_text(void)
{
    static _Thread_local char text[HINT_BYTES + ERR_WAYS * ERR_WAY_BYTES];
    int n = 0;
    text[0] = 0;
    for (int i = 0; i < record.way_count; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%s", i ? ", or " : "take ", record.ways[i]);
    snprintf(text + n, sizeof text - (size_t)n, "%s%s", n && *record.hint ? "; " : "", record.hint);
    return text;
}

void err_keep(ErrKept *out)
{
    text_cut(out->message, sizeof out->message, record.message);
    text_cut(out->hint, sizeof out->hint, err_hint_text());
    out->elsewhere = record.elsewhere;
}

Err err_again(const ErrKept *kept, Err err)
{
    err_set(err, "%s", kept->message);
    if (*kept->hint) err_hint("%s", kept->hint);
    record.elsewhere = kept->elsewhere;
    return err;
}

Err err_as(Err err, Err code)
{
    if (err == ERR_OK) return ERR_OK;
    record.code = code;
    return code;
}

Err err_prefix(Err err, const char *fmt, ...)
{
    if (err == ERR_OK) return ERR_OK;
    va_list args;
    va_start(args, fmt);
    vsnprintf(draft, sizeof draft, fmt, args);
    va_end(args);
    plain_make(draft, PLAIN_LINE);
    strncat(draft, ": ", sizeof draft - strlen(draft) - 1);
    const size_t used = strlen(draft);
    snprintf(draft + used, sizeof draft - used, "%s", record.message);
    memcpy(record.message, draft, strlen(draft) + 1);
    return err;
}

Err err_trail(Err err, const char *file, int line, const char *expr)
{
    if (record.trail_count < TRAIL_MAX) {
        int i = record.trail_count++;
        record.trail[i].file = file;
        record.trail[i].line = line;
        record.trail[i].expr = expr;
    }
    return err;
}

Err err_elsewhere(Err err)
{
    record.elsewhere = true;
    return err;
}

bool err_is_elsewhere(void) { return record.elsewhere; }

const char *err_message(void) { return record.message; }

const char *err_name(Err err) { return (unsigned)err < ERR_COUNT ? kinds[err].name : "unknown"; }

int err_exit_code(Err err) { return (unsigned)err < ERR_COUNT ? kinds[err].status : 1; }

/* The limit that may be why memory is refused, as no message of an allocation names it; 0: there is none. */
static unsigned long long space_kib(Err err)
{
    struct rlimit space;
    if (err != ERR_MEMORY || getrlimit(RLIMIT_AS, &space) || space.rlim_cur == RLIM_INFINITY) return 0;
    return (unsigned long long)space.rlim_cur / 1024;
}

void err_print(Err err, bool trail)
{
    if (record.elsewhere) return;
    char what[64] = "";
    const bool asked_for = err == ERR_STOPPED || err == ERR_INTERRUPTED; /* no error, whatever the exit status */
    if (!asked_for) snprintf(what, sizeof what, "error (%s): ", err_name(err));
    fprintf(stderr, "megatrain: %s%s\n", what, record.message);
    const char *hint = err_hint_text();
    if (*hint) fprintf(stderr, "hint: %s\n", hint);
    log_copy("megatrain: %s%s", what, record.message);
    if (*hint) log_copy("hint: %s", hint);
    const unsigned long long space = space_kib(err);
    if (space) fprintf(stderr, "hint: ulimit -v is %llu KiB of address space; raise it\n", space);
    for (int i = 0; trail && i < record.trail_count; i++)
        fprintf(stderr, "    at %s:%d: %s\n", record.trail[i].file, record.trail[i].line, record.trail[i].expr);
    fflush(stderr);
}

void assert_failed(const char *cond, const char *file, int line, const char *func)
{
    char text[512];
    int n = snprintf(text, sizeof text, "megatrain: bug on rank %d: %s:%d: %s: assertion failed: %s\n", log_rank(),
                     file, line, func, cond);
    if (n >= (int)sizeof text) n = (int)sizeof text - 1;
    ssize_t ignored = write(STDERR_FILENO, text, (size_t)n);
    (void)ignored; /* nothing is left to be done when stderr is gone */

    void *frames[BACKTRACE_MAX];
    backtrace_symbols_fd(frames, backtrace(frames, BACKTRACE_MAX), STDERR_FILENO);
    abort();
}
