/*
 * comm/meet.c: what answers a rank that looks for rank 0. Input: pieces, each what one connection sends before it ends:
 * a byte of flags (1: nobody listens at all; 2: begins with the right magic), two of length, the bytes. Welcomed is
 * only who says so with the right magic, and what it sent behind that is still there to be read; then one more connection
 * is made to it.
 */
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/meet.h"

/* Time stands still while there are pieces, and then all patience has ended. */
static double now_s(void);
static int dial(void);
#define clock_s() now_s()
#define nanosleep(a, b) ((void)(a))
#define net_dial(addr, port, deadline, why, size) (snprintf(why, size, "port %d: refused", port), dial())

#include "comm/meet.c"
#include "fuzz.h"

#undef clock_s

static const uint8_t *rest;
static size_t rest_bytes;
static const uint8_t *last; /* what the last connection sent */
static size_t last_bytes;
static bool last_has_magic;
static int others[64], other_count;

static double now_s(void) { return rest_bytes ? 0 : 1e12; }

static int dial(void)
{
    const uint64_t magic = LINK_MAGIC;
    int pair[2], room = 1 << 22;
    if (rest_bytes < 3) return rest_bytes = 0, -1;
    int flags = rest[0];
    size_t n = rest[1] + 256u * rest[2];
    rest += 3;
    rest_bytes -= 3;
    if (n > rest_bytes) n = rest_bytes;
    last = rest;
    last_bytes = n;
    last_has_magic = flags & 2;
    rest += n;
    rest_bytes -= n;
    if (flags & 1 || other_count == 64) return -1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair)) abort();
    setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    if (last_has_magic && send(pair[1], &magic, sizeof magic, MSG_NOSIGNAL) < 0) abort();
    if (n && send(pair[1], last, n, MSG_NOSIGNAL) < 0) abort();
    shutdown(pair[1], SHUT_WR);
    others[other_count++] = pair[1];
    return pair[0];
}

/* The answer as it was sent, and what came behind it. */
static void check_welcome(const Meeting *m)
{
    uint8_t sent[sizeof(Welcome)];
    const uint64_t magic = LINK_MAGIC;
    const size_t head = last_has_magic ? sizeof magic : 0, behind = sizeof sent - head;
    Welcome w;
    FUZZ_CHECK(last_bytes >= behind, "welcomed with %zu bytes", last_bytes);
    memcpy(sent, &magic, head);
    memcpy(sent + head, last, behind);
    memcpy(&w, sent, sizeof w);
    FUZZ_CHECK(w.magic == LINK_MAGIC && w.kind == WELCOME && m->welcome.process == w.process && m->welcome.pid == w.pid,
               "another process");
    FUZZ_CHECK(memchr(m->welcome.host, 0, sizeof w.host) && memchr(m->welcome.text, 0, sizeof w.text),
               "a text without end");
    FUZZ_CHECK(m->link.fd >= 0 && m->link.in_size <= last_bytes - behind &&
                   !memcmp(m->link.in, last + behind, m->link.in_size),
               "%zu bytes behind it", m->link.in_size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Boot boot = { .launcher = "none", .rank = 1, .size = 2, .port = 100, .addr = "host", .job = "job" };
    Hello hello = meet_hello(&boot);
    Meeting m = { 0 };
    Link second;
    rest = data;
    rest_bytes = size > 1 << 17 ? 0 : size;
    other_count = 0;
    fuzz_memory_start();
    Err err = meet_host(&boot, &hello, 1, 1e11, &m);
    fuzz_check_error(err, ERR_RENDEZVOUS, ERR_RENDEZVOUS, false);
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
