/* A client of rank 0's store: one request at a time, one answer each. */
#include "boot/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "boot/meet.h"

#define ANSWER_S 10.0 /* how long an answer that rank 0 gives at once may take */

struct Store {
    Boot boot;
    Hello hello;
    Meeting meeting;
    Host *host; /* rank 0 only */
    pthread_mutex_t lock;
    uint32_t requests;
    int agreements;
    char start[320];
};

static Err lost(const Store *s)
{
    return err_set(ERR_PEER, "rank %d lost the store of rank 0 (host %s, pid %u): %s", s->boot.rank,
                   s->meeting.welcome.host, s->meeting.welcome.pid, strerror(errno));
}

/* The hint: the frame's, or `usual`. */
static Err failed(const Store *s, const Frame *f, const char *usual)
{
    const char *line = memchr(f->data, '\n', f->bytes);
    const size_t n = line ? (size_t)(line - f->data) : f->bytes;
    err_set(ERR_RENDEZVOUS, "rank %d: %.*s", s->boot.rank, (int)n, f->data);
    return line ? err_hint("%.*s", (int)(f->bytes - n - 1), line + 1) : err_hint("%s", usual);
}

/* Before all have met. Of workers, rank 0's next one says why. */
static Err lost_early(const Store *s)
{
    return s->boot.supervised ? err_elsewhere(lost(s)) : err_as(lost(s), ERR_RENDEZVOUS);
}

static Err outdated(const Store *s, const Frame *f)
{
    char why[512];
    snprintf(why, sizeof why, "%.*s", (int)f->bytes, f->data);
    return meet_outdated(&s->boot, why);
}

/* ---- opening and closing ---- */

/* False: a rank did not end in order; `why` tells. */
static bool leave(Store *s, double timeout_s, char *why, size_t size)
{
    Link *l = &s->meeting.link;
    if (l->fd >= 0 && link_put(l, FRAME_BYE, 0, NULL, 0, NULL, 0)) link_flush_until(l, clock_s() + 1);
    link_close(l);
    bool fine = !s->host || host_close(s->host, timeout_s, why, size);
    pthread_mutex_destroy(&s->lock);
    free(s);
    return fine;
}

Err store_close(Store *s, double timeout_s)
{
    char why[1024];
    if (!s || leave(s, timeout_s, why, sizeof why)) return ERR_OK;
    return err_set(ERR_PEER, "at the end of the run, %s", why);
}

static Err wait_all_here(Store *s, double timeout_s, double deadline)
{
    Link *l = &s->meeting.link;
    Frame f;
    link_put(l, FRAME_HERE, 0, NULL, 0, NULL, 0);
    if (!link_flush_until(l, deadline)) return lost_early(s);
    bool told = link_wait_or_stop(l, &f, deadline, s->boot.stop);
    if (!told && (errno == ETIMEDOUT || errno == ECANCELED)) { /* rank 0 knows who is missing */
        double now = clock_s(), waited_s = errno == ETIMEDOUT ? timeout_s : timeout_s - (deadline - now);
        if (errno == ECANCELED) deadline = now;
        link_put(l, FRAME_MISSING, 0, &waited_s, sizeof waited_s, NULL, 0);
        told = link_flush_until(l, deadline + 1) && link_wait(l, &f, deadline + 1);
    }
    if (!told) return lost_early(s);
    if (f.kind == FRAME_ALL_HERE) return link_drop_frame(l), ERR_OK;
    if (f.kind == FRAME_OUTDATED) return outdated(s, &f);
    Err err =
        failed(s, &f, "is every rank started, and do all have the same MASTER_ADDR, MASTER_PORT and number of ranks?");
    return s->boot.rank ? err_elsewhere(err) : err;
}

Err store_open(const Boot *boot, double timeout_s, Store **out)
{
    double deadline = clock_s() + timeout_s;
    ASSERT(*boot->secret);
    Store *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_MEMORY, "no memory for the store");
    s->boot = *boot;
    s->hello = greet_hello(boot);
    s->meeting.link.fd = -1;
    pthread_mutex_init(&s->lock, NULL);
    Err err = boot->rank == 0 ? meet_as_host(boot, &s->hello, deadline, &s->host, &s->meeting)
                              : meet_host(boot, &s->hello, timeout_s, deadline, &s->meeting);
    if (!err) err = wait_all_here(s, timeout_s, deadline);
    char ignored[1];
    if (err) return leave(s, 1, ignored, sizeof ignored), err;
    snprintf(s->start, sizeof s->start, "%s, process %016llx", boot->job,
             (unsigned long long)s->meeting.welcome.process);
    *out = s;
    return ERR_OK;
}

/* ---- requests ---- */

/* Sends and waits for the answer, which stays in the link: link_drop_frame() it. Under the lock. */
static Err request(Store *s, FrameKind kind, const char *key, const void *value, size_t size, double timeout_s,
                   Frame *answer)
{
    Link *l = &s->meeting.link;
    double deadline = clock_s() + timeout_s;
    size_t key_bytes = strlen(key) + 1;
    ASSERT(key_bytes > 1 && key_bytes <= STORE_KEY_MAX + 1);
    if (size > STORE_VALUE_MAX)
        return err_set(ERR_RENDEZVOUS, "store key '%s': a value of %zu bytes, at most %d", key, size, STORE_VALUE_MAX);
    uint32_t id = ++s->requests;
    if (!link_put(l, kind, id, key, key_bytes, value, size)) return err_set(ERR_MEMORY, "no memory for the store");
    if (!link_flush_until(l, deadline)) return lost(s);
    for (;;) {
        if (!link_wait(l, answer, deadline)) break;
        if (answer->kind == FRAME_REPLY && answer->id == id) return ERR_OK;
        if (answer->kind == FRAME_FAIL && answer->id == id) {
            failed(s, answer, "");
            return link_drop_frame(l), ERR_RENDEZVOUS;
        }
        link_drop_frame(l); /* the answer to a request that was given up */
    }
    if (errno != ETIMEDOUT) return lost(s);
    return err_set(ERR_PEER, "rank %d waited %.3g s for '%s' in the store of rank 0", s->boot.rank, timeout_s, key);
}

Err store_set(Store *s, const char *key, const void *value, size_t size)
{
    Frame answer;
    pthread_mutex_lock(&s->lock);
    Err err = request(s, FRAME_SET, key, value, size, ANSWER_S, &answer);
    if (!err) link_drop_frame(&s->meeting.link);
    pthread_mutex_unlock(&s->lock);
    return err;
}

Err store_get(Store *s, const char *key, void *value, size_t capacity, size_t *size, double timeout_s)
{
    Frame answer;
    pthread_mutex_lock(&s->lock);
    Err err = request(s, FRAME_GET, key, NULL, 0, timeout_s, &answer);
    if (!err) {
        if (answer.bytes > capacity)
            err =
                err_set(ERR_RENDEZVOUS, "store key '%s': %u bytes, at most %zu expected", key, answer.bytes, capacity);
        else if (answer.bytes) memcpy(value, answer.data, answer.bytes);
        if (size) *size = answer.bytes;
        link_drop_frame(&s->meeting.link);
    }
    pthread_mutex_unlock(&s->lock);
    return err;
}

Err store_add(Store *s, const char *key, int64_t delta, int64_t *sum)
{
    Frame answer;
    pthread_mutex_lock(&s->lock);
    Err err = request(s, FRAME_ADD, key, &delta, sizeof delta, ANSWER_S, &answer);
    if (!err) {
        if (answer.bytes != sizeof *sum)
            err = err_set(ERR_RENDEZVOUS, "store counter '%s': %u bytes, not %zu", key, answer.bytes, sizeof *sum);
        else if (sum) memcpy(sum, answer.data, sizeof *sum);
        link_drop_frame(&s->meeting.link);
    }
    pthread_mutex_unlock(&s->lock);
    return err;
}

Err store_local_addr(const Store *s, char *out, size_t size)
{
    if (net_local_addr(s->meeting.link.fd, out, size)) return ERR_OK;
    return err_set(ERR_RENDEZVOUS, "rank %d cannot tell its own address", s->boot.rank);
}

int store_port(const Store *s) { return s->meeting.port; }

const char *store_start(const Store *s) { return s->start; }

const Meeting *store_meeting(const Store *s) { return &s->meeting; }

const Hello *store_hello(const Store *s) { return &s->hello; }

struct Supervised *store_supervised(const Store *s) { return s->boot.supervised; }

/* ---- agreement ---- */

static size_t line_bytes(const char *text) { return strcspn(text, "\n"); }

/* The first line that differs; false if none does. */
static bool differing_line(const char *a, const char *b, const char **line_a, const char **line_b)
{
    while (*a || *b) {
        size_t n = line_bytes(a), m = line_bytes(b);
        *line_a = a;
        *line_b = b;
        if (n != m || memcmp(a, b, n)) return true;
        a += n + (a[n] == '\n');
        b += m + (b[m] == '\n');
    }
    return false;
}

/* Ranks send this, and rank 0 compares thousands of them without a text on the way. */
typedef struct {
    int64_t bytes;
    uint64_t hash;
} Digest;

static Digest digest_of(const char *text)
{
    return (Digest){ .bytes = (int64_t)strlen(text), .hash = rng_key(0, text) };
}

enum { NOBODY = -1, LINE_SHOWN = 600 };

/* Rank 0: the lowest rank whose digest is not its own. */
static Err find_other(Store *s, Digest own, double deadline, int32_t *other)
{
    char key[64];
    *other = NOBODY;
    for (int r = 1; r < s->boot.size && *other == NOBODY; r++) {
        Digest theirs;
        size_t size = 0;
        snprintf(key, sizeof key, "agree/%d/%d", s->agreements, r);
        const double left = deadline - clock_s();
        TRY(err_prefix(store_get(s, key, &theirs, sizeof theirs, &size, left > 0 ? left : 0), "rank %d's facts", r));
        if (size != sizeof theirs || theirs.bytes != own.bytes || theirs.hash != own.hash) *other = r;
    }
    return ERR_OK;
}

/* Rank 0 has asked `other` for its text: which line is the first that differs? */
static Err compare_texts(Store *s, const Agreement *a, int other, double timeout_s, char *verdict, size_t verdict_size)
{
    char key[64], *theirs = malloc(STORE_VALUE_MAX + 1);
    const char *our_line = "", *their_line = "";
    size_t size = 0;
    if (!theirs) return err_set(ERR_MEMORY, "no memory for the store");
    snprintf(key, sizeof key, "agree/%d/text", s->agreements);
    Err err = err_prefix(store_get(s, key, theirs, STORE_VALUE_MAX, &size, timeout_s), "rank %d's facts", other);
    if (!err) {
        theirs[size] = 0;
        differing_line(a->facts, theirs, &our_line, &their_line);
        const size_t n = line_bytes(their_line), m = line_bytes(our_line);
        snprintf(verdict, verdict_size, "rank %d and rank 0 differ: '%.*s' there, '%.*s' here", other,
                 (int)(n < LINE_SHOWN ? n : LINE_SHOWN), their_line, (int)(m < LINE_SHOWN ? m : LINE_SHOWN), our_line);
    }
    free(theirs);
    return err;
}

/* The verdict is "" or the error's text. */
static Err agree_as_first(Store *s, const Agreement *a, double timeout_s, char *verdict, size_t verdict_size)
{
    char asked[64], judged[64];
    int32_t other;
    snprintf(asked, sizeof asked, "agree/%d/asked", s->agreements);
    snprintf(judged, sizeof judged, "agree/%d/verdict", s->agreements);
    TRY(find_other(s, digest_of(a->facts), clock_s() + timeout_s, &other));
    TRY(store_set(s, asked, &other, sizeof other));
    if (other == NOBODY) return ERR_OK;
    TRY(compare_texts(s, a, other, timeout_s, verdict, verdict_size));
    return store_set(s, judged, verdict, strlen(verdict));
}

static Err agree_as_other(Store *s, const Agreement *a, double timeout_s, char *verdict, size_t verdict_size)
{
    char key[64];
    size_t size = 0, n = strlen(a->facts);
    int32_t other = NOBODY;
    const Digest own = digest_of(a->facts);
    snprintf(key, sizeof key, "agree/%d/%d", s->agreements, s->boot.rank);
    TRY(store_set(s, key, &own, sizeof own));
    snprintf(key, sizeof key, "agree/%d/asked", s->agreements);
    TRY(store_get(s, key, &other, sizeof other, &size, timeout_s));
    if (other == NOBODY) return ERR_OK;
    snprintf(key, sizeof key, "agree/%d/text", s->agreements);
    if (other == s->boot.rank) TRY(store_set(s, key, a->facts, n < STORE_VALUE_MAX ? n : STORE_VALUE_MAX));
    snprintf(key, sizeof key, "agree/%d/verdict", s->agreements);
    TRY(store_get(s, key, verdict, verdict_size - 1, &size, timeout_s));
    verdict[size] = 0;
    verdict[line_bytes(verdict)] = 0;
    return ERR_OK;
}

Err store_agree(Store *s, const Agreement *a, double timeout_s)
{
    char verdict[2 * LINE_SHOWN + 128] = "";
    s->agreements++;
    TRY((s->boot.rank ? agree_as_other : agree_as_first)(s, a, timeout_s, verdict, sizeof verdict));
    if (!*verdict) return ERR_OK;
    err_set(a->err, "%s: %s", a->what, verdict);
    Err err = err_hint("%s", a->way);
    return s->boot.rank ? err_elsewhere(err) : err;
}
