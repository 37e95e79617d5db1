/*
 * One thread, one poll(), no call that waits: a connection that sends slowly, garbage or nothing costs a slot
 * until GREETING_S have passed and never delays another. Before its greeting is done a connection may send as many
 * bytes as that has, and hears nothing of the run; after it, frames of a known size at most.
 */
#include "boot/host.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "boot/host_impl.h"

enum { STRANGERS_MAX = 128, NAMED_MAX = 16, OWN_WATCH_FILES = 2 };
#define GREETING_S 5.0
#define ENDING_S 2.0
#define ACCEPT_PAUSE_S 0.1
#define STRANGER_LINE_S 60.0
#define OWN_VERDICT_S 0.4
#define TICK_S 0.1
#define AWAY_S 1.0 /* so long without a turn: this process was stopped or starved */

/* ---- connections ---- */

static void drop(Host *h, int i)
{
    Conn *c = h->conns[i];
    if (c->state == CONN_STORE) h->peers[c->rank].here = h->peers[c->rank].heard = false;
    if ((c->state == CONN_STORE && h->all_here) || c->state == CONN_WATCH) judge_lost(h->judge, clock_s(), c->rank);
    link_close(&c->link);
    free(c);
    h->conns[i] = h->conns[--h->count];
}

static bool grow(Host *h)
{
    if (h->count < h->capacity) return true;
    int capacity = h->capacity ? 2 * h->capacity : 64;
    Conn **conns = realloc(h->conns, (size_t)capacity * sizeof *conns);
    if (conns) h->conns = conns;
    struct pollfd *polls = realloc(h->polls, ((size_t)capacity + 2) * sizeof *polls);
    if (polls) h->polls = polls;
    if (!conns || !polls) return false;
    h->capacity = capacity;
    return true;
}

/* Makes room for so many connections that have not greeted, by dropping the oldest of them. */
static void limit_strangers(Host *h)
{
    int strangers = 0, oldest = -1;
    for (int i = 0; i < h->count; i++) {
        if (h->conns[i]->rank >= 0) continue;
        strangers++;
        if (oldest < 0 || h->conns[i]->since < h->conns[oldest]->since) oldest = i;
    }
    if (strangers >= STRANGERS_MAX + h->boot.size) drop(h, oldest);
}

/* ---- who is here ---- */

static void fail_all(Host *h)
{
    char text[sizeof h->failure_text + sizeof h->failure_hint];
    const int n = snprintf(text, sizeof text, "%s%s%s", h->failure_text, *h->failure_hint ? "\n" : "", h->failure_hint);
    h->failed = true;
    for (int i = 0; i < h->count; i++)
        if (h->conns[i]->state == CONN_STORE) link_put(&h->conns[i]->link, FRAME_FAIL, 0, text, (size_t)n, NULL, 0);
}

/* `error`: EMFILE or ENFILE. */
static void fail_without_descriptors(Host *h, int error)
{
    err_set(ERR_RENDEZVOUS, "no file descriptor is left for connections of %d ranks: %s", h->boot.size,
            strerror(error));
    err_hint_descriptors(error);
    snprintf(h->failure_text, sizeof h->failure_text, "%s", err_message());
    snprintf(h->failure_hint, sizeof h->failure_hint, "%s", err_hint_text());
    fail_all(h);
}

/* "waited 30 s for ranks 1, 3 of 4" */
static void missing_text(const Host *h, double waited_s, char *text, size_t size)
{
    int missing = 0, gave_up = 0, named = 0;
    for (int r = 0; r < h->boot.size; r++) {
        missing += !h->peers[r].here;
        gave_up += !h->peers[r].here && h->peers[r].gave_up;
    }
    bool name_all = missing == gave_up; /* else those that gave up waiting for others are not the ones to look for */
    if (!name_all) missing -= gave_up;
    size_t n = (size_t)snprintf(text, size, "waited %.3g s for rank%s", waited_s, missing == 1 ? "" : "s");
    for (int r = 0; r < h->boot.size && named < NAMED_MAX; r++) {
        const Peer *p = &h->peers[r];
        if (p->here || (p->gave_up && !name_all)) continue;
        n += (size_t)snprintf(text + n, size - n, "%s %d", named++ ? "," : "", r);
        if (p->known && n + LINK_HOST_BYTES + 64 < size)
            n += (size_t)snprintf(text + n, size - n, " (host %s, pid %u, came and %s)", p->hello.host, p->hello.pid,
                                  p->gave_up ? "gave up" : "left again");
        if (n + 64 > size) break;
    }
    if (missing > named) n += (size_t)snprintf(text + n, size - n, " and %d more", missing - named);
    snprintf(text + n, size - n, " of %d", h->boot.size);
}

static void check_all_here(Host *h)
{
    for (int r = 0; r < h->boot.size; r++)
        if (!h->peers[r].heard) return;
    if (h->all_here || h->failed) return;
    if (!file_descriptors_left(h->boot.size + OWN_WATCH_FILES)) { /* a watch could not be refused in words */
        fail_without_descriptors(h, EMFILE);
        return;
    }
    h->all_here = true;
    judge_met(h->judge, clock_s());
    for (int i = 0; i < h->count; i++)
        if (h->conns[i]->state == CONN_STORE) link_put(&h->conns[i]->link, FRAME_ALL_HERE, 0, NULL, 0, NULL, 0);
}

/* Ends a connection such that all that was sent arrives: closing with something unread would break the connection and
 * perhaps lose it. */
static void end(Conn *c)
{
    c->state = CONN_ENDING;
    c->since = clock_s();
}

static void welcome(Host *h, Conn *c, WelcomeKind kind, const char *text)
{
    Welcome w = { .kind = kind, .pid = h->self.pid, .process = h->self.process };
    memcpy(w.host, h->self.host, sizeof w.host);
    snprintf(w.text, sizeof w.text, "%s", text);
    greet_welcome(&c->greeting, &c->link, &w);
    if (kind != WELCOME) end(c);
}

/* Two processes say that they are rank r. Before all are here nobody can know which is right: the start fails.
 * Later it is the newcomer that does not belong. */
static void refuse_twin(Host *h, Conn *c, const Hello *hello, const Peer *p)
{
    char text[512];
    snprintf(text, sizeof text, "two processes are rank %u of %d: host %s, pid %u, and host %s, pid %u", hello->rank,
             h->boot.size, p->hello.host, p->hello.pid, hello->host, hello->pid);
    welcome(h, c, h->all_here ? WELCOME_REFUSED : WELCOME_FAILED, text);
    if (h->all_here || h->failed) return;
    snprintf(h->failure_text, sizeof h->failure_text, "%s", text);
    fail_all(h);
}

/* Supervisors start workers anew one by one (train/supervisor.h), so a later worker may call while earlier ones still
 * meet, and an earlier one when later ones do. The earlier ones end, and their supervisors follow. Once all have met,
 * the judge finds that a worker is gone; the later one calls until then. True: it is another start's, and was told. */
static bool of_other_start(Host *h, Conn *c, const Hello *hello)
{
    if (hello->attempt == h->self.attempt) return false;
    if (hello->attempt < h->self.attempt) {
        welcome(h, c, WELCOME_OUTDATED, "rank 0 was started anew");
        return true;
    }
    end(c);
    if (h->all_here || h->failed) return true;
    h->failed = h->outdated = true;
    snprintf(h->failure_text, sizeof h->failure_text, "rank %u (host %s, pid %u) was started anew before all had met",
             hello->rank, hello->host, hello->pid);
    for (int i = 0; i < h->count; i++)
        if (h->conns[i]->state == CONN_STORE)
            link_put(&h->conns[i]->link, FRAME_OUTDATED, 0, h->failure_text, strlen(h->failure_text), NULL, 0);
    return true;
}

/* The connection that a rank has in this state, or NULL. */
static Conn *conn_of(const Host *h, ConnState state, uint32_t rank)
{
    for (int i = 0; i < h->count; i++)
        if (h->conns[i]->state == state && h->conns[i]->rank == (int)rank) return h->conns[i];
    return NULL;
}

/* The first one is this rank's, and nothing happens to it. */
static void refuse_second(Host *h, Conn *c, const Hello *hello)
{
    char text[64];
    snprintf(text, sizeof text, "rank %u has this connection already", hello->rank);
    welcome(h, c, WELCOME_REFUSED, text);
}

static void enter_store(Host *h, Conn *c, const Hello *hello)
{
    Peer *p = &h->peers[hello->rank];
    Conn *first = conn_of(h, CONN_STORE, hello->rank);
    bool twin = p->known && p->hello.process != hello->process;
    if (twin && (p->here || h->all_here || hello->rank == 0)) {
        refuse_twin(h, c, hello, p);
        return;
    }
    if (h->failed) {
        welcome(h, c, h->outdated ? WELCOME_OUTDATED : WELCOME_FAILED, h->failure_text);
        return;
    }
    if (first && p->heard) {
        refuse_second(h, c, hello);
        return;
    }
    /* The same process once more: under load it has not waited for its first welcome. So a rank counts for all_here,
     * and its connection's end for its own, only when it has heard one. */
    if (first) end(first);
    c->rank = (int)hello->rank;
    c->state = CONN_STORE;
    link_frames(&c->link, STORE_FRAME_MAX);
    *p = (Peer){ .known = true, .here = true, .hello = *hello };
    judge_name(h->judge, c->rank, hello->host, (int)hello->pid);
    welcome(h, c, WELCOME, "");
}

static bool enter_watch(Host *h, Conn *c, const Hello *hello)
{
    const Peer *p = &h->peers[hello->rank];
    if (!h->all_here || p->hello.process != hello->process) return false;
    if (conn_of(h, CONN_WATCH, hello->rank)) return refuse_second(h, c, hello), true;
    c->rank = (int)hello->rank;
    c->state = CONN_WATCH;
    h->watching = true;
    link_frames(&c->link, BEAT_BYTES_MAX);
    judge_watched(h->judge, clock_s(), c->rank);
    welcome(h, c, WELCOME, "");
    if (h->told_judging) link_put(&c->link, FRAME_JUDGING, 0, NULL, 0, NULL, 0);
    if (h->judged) link_put(&c->link, FRAME_VERDICT, 0, &h->verdict, sizeof h->verdict, NULL, 0);
    return true;
}

/* A line a minute: who knocks all the time must not fill the log. */
static void tell_of_stranger(Host *h, const Conn *c)
{
    char from[64] = "?";
    const double now = clock_s();
    if (now < h->stranger_line_at) return;
    h->stranger_line_at = now + STRANGER_LINE_S;
    net_peer_addr(c->link.fd, from, sizeof from);
    log_warn("port %d: who called from %s has not this run's secret, and heard nothing", h->port, from);
}

static bool enter(Host *h, Conn *c)
{
    const Hello hello = greet_introduced(&c->greeting);
    if (hello.rank >= (uint32_t)h->boot.size || hello.to != 0) return false;
    if (hello.role == ROLE_WATCH) return enter_watch(h, c, &hello);
    if (hello.role != ROLE_STORE) return false;
    if (!of_other_start(h, c, &hello)) enter_store(h, c, &hello);
    return true;
}

/* False: not one of ours. */
static bool greet(Host *h, Conn *c)
{
    switch (greet_host(&c->greeting, &c->link)) {
    case GREET_MORE: return true;
    case GREET_DONE: c->proven = true; return enter(h, c);
    case GREET_OTHER_VERSION: end(c); return true;
    default: tell_of_stranger(h, c); return false;
    }
}

/* ---- what a rank asks for ---- */

/* This rank's patience is at its end. Rank 0's end is everybody's: nobody could meet without it. */
static bool tell_missing(Host *h, Conn *c, const Frame *f)
{
    char text[sizeof h->failure_text];
    double waited_s;
    if (f->bytes != sizeof waited_s) return false;
    memcpy(&waited_s, f->data, sizeof waited_s);
    if (h->failed || h->all_here) return true; /* its answer is on the way */
    missing_text(h, waited_s, text, sizeof text);
    h->peers[c->rank].gave_up = true;
    h->peers[c->rank].here = false; /* it goes, whoever comes before that is known */
    if (c->rank != 0) return link_put(&c->link, FRAME_FAIL, 0, text, strlen(text), NULL, 0);
    memcpy(h->failure_text, text, sizeof text);
    fail_all(h);
    return true;
}

static void say_bye(Host *h, Conn *c)
{
    h->peers[c->rank].here = false;
    if (h->all_here) judge_unwatched(h->judge, clock_s(), c->rank);
    end(c);
}

/* False: the connection breaks a rule. */
static bool store_frame(Host *h, Conn *c, const Frame *f)
{
    char key[STORE_KEY_MAX + 1];
    c->waits = false; /* one request at a time: a new one takes the place of one that was given up */
    if (f->kind == FRAME_HERE) return h->peers[c->rank].heard = true, check_all_here(h), true;
    if (f->kind == FRAME_BYE) return say_bye(h, c), true;
    if (f->kind == FRAME_MISSING) return tell_missing(h, c, f);
    const char *end = memchr(f->data, 0, f->bytes <= STORE_KEY_MAX ? f->bytes : STORE_KEY_MAX + 1);
    if (!end || end == f->data) return false;
    size_t key_bytes = (size_t)(end - f->data) + 1, size = f->bytes - key_bytes;
    memcpy(key, f->data, key_bytes);
    switch (f->kind) {
    case FRAME_SET: return host_set(h, c, f->id, key, end + 1, size, 0), true;
    case FRAME_GET: return host_get(h, c, f->id, key), true;
    case FRAME_ADD: return host_add(h, c, f->id, key, end + 1, size);
    default: return false;
    }
}

/* ---- liveness ---- */

static bool watch_frame(Host *h, Conn *c, const Frame *f)
{
    char text[WATCH_TEXT_BYTES];
    double now = clock_s();
    snprintf(text, sizeof text, "%.*s", (int)f->bytes, f->data);
    if (f->id > EXIT_CODE_MAX || (f->kind == FRAME_REPORT && !f->id)) return false;
    switch (f->kind) {
    case FRAME_BEAT: return judge_beat(h->judge, now, c->rank, f->data, f->bytes);
    case FRAME_REPORT: return judge_report(h->judge, now, c->rank, (int)f->id, text), true;
    case FRAME_LEAVE: return judge_left(h->judge, now, c->rank, (int)f->id, text), end(c), true;
    case FRAME_GOT: return c->told = true;
    default: return false;
    }
}

static void tell_watches(Host *h, FrameKind kind, const void *data, size_t bytes, bool rank_0)
{
    for (int i = 0; i < h->count; i++) {
        Conn *c = h->conns[i];
        if (c->state == CONN_WATCH && (c->rank == 0) == rank_0) link_put(&c->link, kind, 0, data, bytes, NULL, 0);
    }
}

static void send_signs_of_life(Host *h, double now)
{
    for (int i = 0; i < h->count; i++) {
        Conn *c = h->conns[i];
        if (c->state != CONN_WATCH || now < c->alive_at || c->link.out_size) continue;
        link_put(&c->link, FRAME_ALIVE, 0, NULL, 0, NULL, 0);
        c->alive_at = now + judge_beat_s(h->judge, c->rank);
    }
}

/* Rank 0 may end its process on hearing the verdict, and this thread with it: it hears last. */
static void tell_rank_0(Host *h, double now)
{
    if (!h->own_verdict_at) return;
    for (int i = 0; i < h->count && now < h->own_verdict_at; i++) {
        const Conn *c = h->conns[i];
        if (c->state == CONN_WATCH && c->rank != 0 && c->rank != h->verdict.rank && !c->told) return;
    }
    h->own_verdict_at = 0;
    tell_watches(h, FRAME_VERDICT, &h->verdict, sizeof h->verdict, true);
}

static void judge(Host *h, double now)
{
    bool given = judge_tick(h->judge, now, &h->verdict);
    if (judge_is_judging(h->judge) && !h->told_judging) {
        h->told_judging = true;
        tell_watches(h, FRAME_JUDGING, NULL, 0, true);
        tell_watches(h, FRAME_JUDGING, NULL, 0, false);
    }
    if (given) {
        h->judged = true;
        tell_watches(h, FRAME_VERDICT, &h->verdict, sizeof h->verdict, false);
        h->own_verdict_at = now + OWN_VERDICT_S;
    }
    tell_rank_0(h, now);
    send_signs_of_life(h, now);
}

/* ---- the loop ---- */

/* Without descriptors the listener would stay readable and this thread spin. Who has not greeted may yet give its
 * descriptor back; ranks keep theirs, and a start that lacks one fails. */
static void pause_accepting(Host *h, double now)
{
    const int why = errno;
    bool may_come_back = h->all_here || h->failed;
    if (why == EAGAIN || why == EINTR || why == ECONNABORTED) return;
    h->accept_after = now + ACCEPT_PAUSE_S;
    if (why != EMFILE && why != ENFILE) return;
    for (int i = 0; i < h->count; i++) may_come_back |= h->conns[i]->state != CONN_STORE;
    if (!may_come_back) fail_without_descriptors(h, why);
    if (!may_come_back || h->said_full) return;
    h->said_full = true;
    err_set(ERR_RENDEZVOUS, "rank 0 has no file descriptor left for a rank that calls");
    err_hint_descriptors(why);
    log_warn("%s: %s", err_message(), err_hint_text());
}

static void accept_one(Host *h, double now)
{
    int fd = accept4(h->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        pause_accepting(h, now);
        return;
    }
    limit_strangers(h);
    Conn *c = grow(h) ? calloc(1, sizeof *c) : NULL;
    if (!c) {
        close(fd);
        return;
    }
    link_open(&c->link, fd, 0);
    greet_expect(&c->greeting, &c->link, &h->key, h->port);
    c->rank = -1;
    c->since = now;
    h->conns[h->count++] = c;
}

/* False: close it. */
static bool read_conn(Host *h, Conn *c)
{
    int got = link_fill(&c->link);
    if (got < 0) return false;
    if (c->state == CONN_GREETING && !greet(h, c)) return false;
    Frame f;
    int r = 0;
    while ((c->state == CONN_STORE || c->state == CONN_WATCH) && (r = link_frame(&c->link, &f)) > 0) {
        if (c->state == CONN_STORE ? !store_frame(h, c, &f) : !watch_frame(h, c, &f)) return false;
        link_drop_frame(&c->link);
    }
    if (c->state == CONN_ENDING) c->link.in_size = 0;
    return r >= 0;
}

static int prepare_polls(Host *h, double now)
{
    h->polls[0] = (struct pollfd){ .fd = h->wake, .events = POLLIN };
    h->polls[1] = (struct pollfd){ .fd = now < h->accept_after ? -1 : h->listener, .events = POLLIN };
    for (int i = 0; i < h->count; i++)
        h->polls[i + 2] = (struct pollfd){ .fd = h->conns[i]->link.fd,
                                           .events = (short)(POLLIN | (h->conns[i]->link.out_size ? POLLOUT : 0)) };
    return h->count + 2;
}

static void read_conns(Host *h, int polled, double now)
{
    for (int i = polled - 3; i >= 0; i--) { /* downwards: drop() moves the last one here */
        Conn *c = h->conns[i];
        bool keep = !h->polls[i + 2].revents || read_conn(h, c);
        if (c->state == CONN_GREETING && now - c->since > GREETING_S) keep = false;
        if (c->state == CONN_ENDING && now - c->since > ENDING_S) keep = false;
        if (!keep) drop(h, i);
    }
}

static void flush_conn(Host *h, int i)
{
    Conn *c = h->conns[i];
    bool broken = !link_flush(&c->link);
    if (c->state == CONN_ENDING && !c->link.out_size && !c->shut) c->shut = shutdown(c->link.fd, SHUT_WR) == 0;
    if (broken) drop(h, i);
}

/* Rank 0 itself hears last that all are here: if this process stops at what it does next, the others have heard. */
static void flush_conns(Host *h)
{
    for (int own = 0; own <= 1; own++)
        for (int i = h->count - 1; i >= 0; i--)
            if ((h->conns[i]->rank == 0) == own) flush_conn(h, i);
}

/* Strangers are not waited for: they could come without end. */
static bool may_end(Host *h, double now)
{
    if (!__atomic_load_n(&h->closing, __ATOMIC_ACQUIRE)) return false;
    if (now >= h->close_at) return true;
    if (h->watching && judge_is_judging(h->judge)) return h->judged && !h->own_verdict_at;
    for (int i = 0; i < h->count; i++)
        if (h->conns[i]->proven) return false;
    return true;
}

static void *serve(void *arg)
{
    Host *h = arg;
    for (double now = clock_s(); !may_end(h, now);) {
        int polled = prepare_polls(h, now);
        double before = now;
        uint64_t n;
        link_poll(h->polls, polled, now + TICK_S);
        if (h->polls[0].revents && read(h->wake, &n, sizeof n) < 0) n = 0;
        now = clock_s();
        if (now - before > AWAY_S) judge_was_away(h->judge, now - before);
        read_conns(h, polled, now);
        judge(h, now);
        flush_conns(h);
        if (h->polls[1].revents) accept_one(h, now);
    }
    return NULL;
}

/* ---- opening and closing ---- */

static void raise_file_limit(int size)
{
    struct rlimit limit;
    rlim_t want = (rlim_t)(2 * size + STRANGERS_MAX + 256);
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= want) return;
    limit.rlim_cur = limit.rlim_max < want ? limit.rlim_max : want;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void free_host(Host *h)
{
    while (h->count) drop(h, h->count - 1);
    kv_free(&h->values);
    close(h->listener);
    if (h->wake >= 0) close(h->wake);
    free(h->conns);
    free(h->polls);
    judge_close(h->judge);
    free(h->peers);
    free(h);
}

Err host_open(const Boot *boot, const Hello *self, int listener, Host **out)
{
    Host *h = calloc(1, sizeof *h);
    if (!h) return close(listener), err_set(ERR_MEMORY, "no memory for the store");
    h->boot = *boot;
    h->self = *self;
    h->key = greet_key(boot->secret, boot->job);
    h->listener = listener;
    h->port = net_local_port(listener);
    h->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    h->peers = calloc((size_t)boot->size, sizeof *h->peers);
    h->judge = judge_open(boot->size);
    raise_file_limit(boot->size);
    if (h->wake < 0 || !h->peers || !h->judge || !kv_open(&h->values, boot->size) || !grow(h))
        return free_host(h), err_set(ERR_MEMORY, "no memory for the store");
    h->peers[0] = (Peer){ .known = true, .hello = *self };
    const int error = link_thread(&h->thread, serve, h);
    if (error) {
        free_host(h);
        return err_no_thread("serving the store", error);
    }
    *out = h;
    return ERR_OK;
}

/* The first rank that is still connected, or -1. */
static int last_to_go(const Host *h)
{
    for (int i = 0; i < h->count; i++)
        if (h->conns[i]->state == CONN_STORE || h->conns[i]->state == CONN_WATCH) return h->conns[i]->rank;
    return -1;
}

bool host_close(Host *h, double timeout_s, char *why, size_t size)
{
    uint64_t one = 1;
    h->close_at = clock_s() + timeout_s;
    __atomic_store_n(&h->closing, true, __ATOMIC_RELEASE);
    while (write(h->wake, &one, sizeof one) < 0 && errno == EINTR) {}
    pthread_join(h->thread, NULL);
    const int rank = last_to_go(h);
    const bool guilty = h->watching && h->judged, fine = rank < 0 && !guilty;
    if (guilty) snprintf(why, size, "%s", h->verdict.text);
    else if (rank >= 0)
        snprintf(why, size, "rank %d (host %s, pid %u) has not ended in %.3g s", rank, h->peers[rank].hello.host,
                 h->peers[rank].hello.pid, timeout_s);
    free_host(h);
    return fine;
}
