/*
 * Errors: one list of kinds, the message of the first failure, and the trail of calls it came up through.
 *
 * Two kinds of trouble, two tools. A broken invariant of ours is a bug: ASSERT prints rank, place and
 * backtrace and aborts. A failure of the world (configuration, file, memory, peer) is an Err: the message
 * is written once, where the cause is known (err_set), and TRY carries the code up, adding a line of trail.
 * The record is per thread, so ranks that are threads of one process do not mix their messages.
 *
 * Messages: what failed first, lower case, no full stop, values in single quotes. A second line,
 * err_hint, says what a human can do about it. The text is made plain (base/plain.h).
 */
#ifndef MEGATRAIN_BASE_ERR_H
#define MEGATRAIN_BASE_ERR_H

#include <stdbool.h>

/* kind, name in messages, exit status of the process (docs: README, "Exit codes") */
#define ERR_LIST(X)                                                                          \
    X(OK, "ok", 0)                                                                           \
    X(INTERNAL, "internal", 1)    /* a rule of ours was broken but could be reported */      \
    X(CONFIG, "configuration", 2) /* usage, keys, values, requested feature missing */       \
    X(DATA, "data", 3)            /* token files, tokenizers, input text */                  \
    X(CKPT, "checkpoint", 4)      /* no valid checkpoint, or one that does not fit */        \
    X(PLAN, "no plan fits", 4)    /* of what was searched, for what was asked */             \
    X(STORAGE, "storage", 5)      /* run folder locked, read-only, disk full */              \
    X(NUMERICS, "numerics", 6)    /* NaN or overflow that redoing the step does not cure */  \
    X(PEER, "peer lost", 7)                                                                  \
    X(HANG, "hang", 8)                                                                       \
    X(MEMORY, "out of memory", 9)                                                            \
    X(RENDEZVOUS, "rendezvous", 10)                                                          \
    X(GPU, "device failed", 11) /* its hardware or driver gave it up: another host may do */ \
    X(IO, "input/output", 5)    /* raised by base/file.c; callers re-label it with err_as */ \
    X(DEVICE, "device", 1)      /* a call to the GPU failed in the middle of a run: a bug */ \
    X(SHAPE, "shape", 1)        /* an op was called with tensors that do not fit: a bug */   \
    X(STOPPED, "stopped", 75)   /* stopped on request after a checkpoint */                  \
    X(INTERRUPTED, "interrupted", 130)

typedef enum {
#define X(kind, name, status) ERR_##kind,
    ERR_LIST(X)
#undef X
        ERR_COUNT
} Err;

/* Records a new failure (drops any earlier one of this thread) and returns `code`. */
Err err_set(Err code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Adds the hint line to the recorded failure and returns its code: return err_set(...), err_hint(...). */
Err err_hint(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* A way out of the recorded failure: "section.key=value", several parted by blanks; at most ERR_WAYS. The hint names
 * them before its own text. Whoever can try them drops the others: err_ways_keep leaves the first two that pass. */
enum { ERR_WAYS = 8, ERR_WAY_BYTES = 192 };
Err err_take(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void err_ways_keep(bool (*passes)(const void *user, const char *way), const void *user);

/* Re-labels the recorded failure: the same message under another kind (IO -> DATA, CKPT, ...). OK stays OK. */
Err err_as(Err err, Err code);

/* Puts "text: " before the recorded message, for callers that know more (which file, which run). */
Err err_prefix(Err err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Sets this thread's failure aside while something else is tried; err_again records it anew and returns `err`. */
typedef struct {
    char message[1024], hint[512]; /* cut to fit */
    bool elsewhere;
} ErrKept;
void err_keep(ErrKept *out);
Err err_again(const ErrKept *kept, Err err);

/* The system refuses a thread (`error`, of pthread_create): ERR_MEMORY, with the limits to look at. */
Err err_no_thread(const char *what, int error);
/* The hint where no file descriptor is left (`error`: EMFILE or ENFILE). */
Err err_hint_descriptors(int error);

/* Used by TRY. */
Err err_trail(Err err, const char *file, int line, const char *expr);

/* The recorded failure is another rank's, whose error line says it: err_print writes nothing. Returns `err`. */
Err err_elsewhere(Err err);
bool err_is_elsewhere(void);

const char *err_message(void);   /* text of this thread's recorded failure; "" if none */
const char *err_hint_text(void); /* "" if none */
const char *err_name(Err err);
int err_exit_code(Err err);

/* Writes the primary line "megatrain: error (kind): message" ("megatrain: message" of a stop that was asked for), the
 * hint and, with `trail`, the trail to stderr. */
void err_print(Err err, bool trail);

#define TRY(expr)                                                          \
    do {                                                                   \
        Err try_err = (expr);                                              \
        if (try_err) return err_trail(try_err, __FILE__, __LINE__, #expr); \
    } while (0)

/* Like TRY, and a failure is re-labelled `code`. */
#define TRY_AS(code, expr)                                                               \
    do {                                                                                 \
        Err try_err = (expr);                                                            \
        if (try_err) return err_trail(err_as(try_err, code), __FILE__, __LINE__, #expr); \
    } while (0)

/* Broken invariant: prints and aborts. On in all builds. */
#define ASSERT(cond)                                                     \
    do {                                                                 \
        if (!(cond)) assert_failed(#cond, __FILE__, __LINE__, __func__); \
    } while (0)

void assert_failed(const char *cond, const char *file, int line, const char *func) __attribute__((noreturn));

#endif
