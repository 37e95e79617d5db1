/*
 * boot/meet.c: what answers a rank that looks for rank 0. Input: pieces, each what one connection does before it ends:
 * a byte of flags, two of length, the bytes that it sends. Flags: 1: nobody listens at all; 2: it greets first, as who
 * has the secret does; 4: but for the welcome, in whose place its bytes are; 8: with another secret; 16: it refuses.
 * Taken for rank 0, or for one that refuses, is only who has the secret, and what it sent behind its welcome is still
 * there to be read; then one more connection is made to it.
 */
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "boot/meet.h"

/* Time stands still while there are pieces, and then all patience has ended. */
static double now_s(void);
static int dial(void);
static GreetStep greet_each_other(Greeting *g, Link *l, Welcome *out);
#define clock_s() now_s()
#define nanosleep(a, b) ((void)(a))
#define net_dial(addr, port, deadline, why, size) (snprintf(why, size, "port %d: refused", port), dial())
#define greet_until(g, l, out, deadline) ((void)(deadline), greet_each_other(g, l, out))

#include "boot/meet.c"
#include "fuzz.h"

#undef clock_s

enum { NOBODY = 1, GREETS = 2, NO_WELCOME = 4, OTHER_SECRET = 8, REFUSES = 16 };

static const uint8_t *rest;
static size_t rest_bytes;
static const uint8_t *last; /* what the last connection sends */
static size_t last_bytes;
static int last_flags;
static int others[64], other_count;
static bool refused_by_right;

static double now_s(void) { return rest_bytes ? 0 : 1e12; }

static int dial(void)
{
    int pair[2], room = 1 << 22;
    if (rest_bytes < 3) return rest_bytes = 0, -1;
    last_flags = rest[0];
    size_t n = rest[1] + 256u * rest[2];
    rest += 3;
    rest_bytes -= 3;
    if (n > rest_bytes) n = rest_bytes;
    last = rest;
    last_bytes = n;
    rest += n;
    rest_bytes -= n;
    if (last_flags & NOBODY || other_count == 64) return -1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair)) abort();
    setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    others[other_count++] = pair[1];
    return pair[0];
}

static bool has_secret(void) { return (last_flags & (GREETS | OTHER_SECRET)) == GREETS; }

/* What the other end does with what has come. */
static void answer(Greeting *g, Link *l)
{
    const WelcomeKind kind = last_flags & REFUSES ? WELCOME_REFUSED : WELCOME;
    const Welcome w = { .kind = kind, .process = 7, .pid = 8, .host = "h\x1b", .text = "no\n" };
    link_fill(l);
    if (greet_host(g, l) == GREET_DONE && !(last_flags & NO_WELCOME)) greet_welcome(g, l, &w);
    link_flush(l);
}

static GreetStep greet_each_other(Greeting *g, Link *l, Welcome *out)
{
    Greeting theirs;
    Link other;
    const int fd = others[other_count - 1];
    const GreetKey key = last_flags & OTHER_SECRET ? greet_key("another secret of tests", "job") : g->key;
    GreetStep step = GREET_MORE;
    link_open(&other, fd, 0);
    greet_expect(&theirs, &other, &key, (int)g->port);
    for (int turn = 0; last_flags & GREETS && turn < 2; turn++) {
        link_flush(l);
        answer(&theirs, &other);
        link_fill(l);
        if (step == GREET_MORE) step = greet_caller(g, l, out);
    }
    link_release(&other);
    if (last_bytes && send(fd, last, last_bytes, MSG_NOSIGNAL) < 0) abort();
    shutdown(fd, SHUT_WR);
    for (int got = 1; step == GREET_MORE && got > 0;) {
        got = link_fill(l);
        step = greet_caller(g, l, out);
    }
    FUZZ_CHECK(step != GREET_DONE || (has_secret() && !(last_flags & NO_WELCOME)), "a stranger, flags %d", last_flags);
    refused_by_right |= step == GREET_DONE && last_flags & REFUSES;
    return step == GREET_MORE ? GREET_STRANGER : step;
}

static void check_welcome(const Meeting *m)
{
    const Welcome *w = &m->welcome;
    FUZZ_CHECK(w->kind == WELCOME && w->process == 7 && w->pid == 8, "another process");
    FUZZ_CHECK(!strcmp(w->host, "h?") && !strcmp(w->text, "no?"), "'%s', '%s'", w->host, w->text);
    FUZZ_CHECK(m->link.fd >= 0 && !m->link.in_size, "%zu bytes read too soon", m->link.in_size);
    char behind[1 << 12];
    const ssize_t n = recv(m->link.fd, behind, sizeof behind, MSG_PEEK);
    FUZZ_CHECK((size_t)(n > 0 ? n : 0) == (last_bytes < sizeof behind ? last_bytes : sizeof behind) &&
                   !memcmp(behind, last, (size_t)(n > 0 ? n : 0)),
               "%zd bytes behind it", n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Boot boot = { .launcher = "none", .rank = 1, .size = 2, .port = 100, .addr = "host", .job = "job" };
    strcpy(boot.secret, "a secret of tests");
    Hello hello = greet_hello(&boot);
    Meeting m = { 0 };
    Link second;
    rest = data;
    rest_bytes = size > 1 << 17 ? 0 : size;
    other_count = 0;
    refused_by_right = false;
    fuzz_memory_start();
    Err err = meet_host(&boot, &hello, 1, 1e11, &m);
    fuzz_check_error(err, ERR_RENDEZVOUS, ERR_RENDEZVOUS, false);
    FUZZ_CHECK(!err || refused_by_right == (strstr(err_message(), "was refused") != NULL), "%s", err_message());
    if (!err) {
        check_welcome(&m);
        err = meet_again(&m, &hello, 1e11, &second);
        fuzz_check_error(err, ERR_PEER, ERR_PEER, false);
        if (!err) link_close(&second);
        link_close(&m.link);
    }
    FUZZ_MEMORY_BOUND(size, 4, 1 << 17);
    while (other_count) close(others[--other_count]);
    return 0;
}
