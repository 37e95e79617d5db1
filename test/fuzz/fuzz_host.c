/*
 * boot/host.c, rank 0's server: frames from several connections. Input: pieces, each with a byte that says on which
 * connection (lower 3 bits; rank = its lower 2), what (2 bits; 0: bytes as they are; 1: this rank's right greeting for
 * the store; 2: for the watch; 3: the end of the connection) and what is wrong with a greeting (3 bits: another
 * process, another version, another secret); a byte of length; the bytes. The host's answers are a greeting, proven to
 * who has the secret and to nobody else more than a call's, and whole frames; a verdict can be told and left with;
 * memory is bounded by what was sent.
 */
#include "base/clock.h"

/* Time goes on by a tenth of a second each turn, so that deadlines are met and runs are repeatable. */
static double turn_s;
#define clock_s() turn_s

#include "boot/host.c"
#include "fuzz.h"

enum { PEERS = 4, RANKS = 3 };

static Host *host_new(void)
{
    Host *h = calloc(1, sizeof *h);
    if (!h) abort();
    h->boot = (Boot){ .launcher = "none", .size = RANKS, .job = "job", .secret = "a secret of tests" };
    h->self = (Hello){ .process = 100, .host = "h" };
    h->key = greet_key(h->boot.secret, h->boot.job);
    log_set_level(LOG_ERROR); /* strangers are warned of */
    h->listener = h->wake = -1;
    h->peers = calloc(RANKS, sizeof *h->peers);
    h->judge = judge_open(RANKS);
    if (!h->peers || !h->judge || !kv_open(&h->values, RANKS)) abort();
    h->peers[0] = (Peer){ .known = true, .hello = h->self };
    return h;
}

static void connect_peer(Host *h, int *fd)
{
    int pair[2];
    Conn *c = grow(h) ? calloc(1, sizeof *c) : NULL;
    if (!c || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair)) abort();
    link_open(&c->link, pair[0], 0);
    greet_expect(&c->greeting, &c->link, &h->key, h->port);
    c->rank = -1;
    c->since = turn_s;
    h->conns[h->count++] = c;
    *fd = pair[1];
}

/* What one turn of serve() does. */
static void turn(Host *h)
{
    turn_s += 0.1;
    int polled = prepare_polls(h, turn_s);
    for (int i = 0; i < polled; i++) h->polls[i].revents = POLLIN;
    read_conns(h, polled, turn_s);
    judge(h, turn_s);
    flush_conns(h);
}

/* A connection of the other side: what it has heard. */
typedef struct {
    int fd;
    Link link;
    Greeting greeting;
    bool called, welcomed, other_key;
} Ear;

static void hear_greeting(Ear *e)
{
    Welcome w;
    const GreetStep step = e->called ? greet_caller(&e->greeting, &e->link, &w) : GREET_MORE;
    FUZZ_CHECK(e->called || e->link.in_size <= sizeof(Answer), "a stranger hears %zu bytes", e->link.in_size);
    FUZZ_CHECK(!e->other_key || !e->greeting.called, "an answer that has another secret");
    if (step != GREET_DONE) return;
    FUZZ_CHECK(w.kind <= WELCOME_OUTDATED && memchr(w.text, 0, sizeof w.text), "welcome");
    e->welcomed = true;
    link_frames(&e->link, STORE_FRAME_MAX);
}

static void hear(Ear *e)
{
    Frame f;
    int r;
    link_fill(&e->link);
    if (!e->welcomed) hear_greeting(e);
    while (e->welcomed && (r = link_frame(&e->link, &f)) != 0) {
        FUZZ_CHECK(r > 0, "a frame that is too long");
        FUZZ_CHECK(f.kind >= FRAME_ALL_HERE && f.kind <= FRAME_VERDICT, "frame of kind %u", f.kind);
        if (f.kind == FRAME_VERDICT) {
            Verdict v;
            FUZZ_CHECK(f.bytes == sizeof v, "verdict of %u bytes", f.bytes);
            memcpy(&v, f.data, sizeof v);
            FUZZ_CHECK(v.rank >= 0 && v.rank < RANKS && (unsigned)v.what < WATCH_WHAT_COUNT, "verdict on %d",
                       v.rank);
            FUZZ_CHECK(v.exit_code > 0 && v.exit_code < 256, "a verdict to leave with %d", v.exit_code);
        }
        link_drop_frame(&e->link);
    }
}

/* What the first byte of a piece says. */
typedef struct {
    int who, what;
    bool other_process, other_version, other_secret;
} Piece;

static Piece piece_of(uint8_t b) { return (Piece){ b % 8, b / 8 % 4, b >> 5 & 1, b >> 6 & 1, b >> 7 }; }

static void call(Ear *e, const Host *h, Piece p)
{
    Hello hello = h->self;
    GreetKey key = h->key;
    hello.rank = (uint32_t)(p.who % PEERS);
    hello.process += hello.rank + (p.other_process ? 1000 : 0);
    hello.role = p.what == 2 ? ROLE_WATCH : ROLE_STORE;
    if (p.other_secret) key = greet_key("another secret of tests", h->boot.job);
    if (e->called) return;
    e->called = greet_call(&e->greeting, &e->link, &key, &hello, h->port);
    e->other_key = p.other_secret;
    if (p.other_version) e->link.out[offsetof(Call, version)]++;
}

static void say(Ear *e, const Host *h, Piece p, const uint8_t *bytes, size_t size)
{
    if (p.what == 1 || p.what == 2) call(e, h, p);
    else if (p.what == 3) shutdown(e->fd, SHUT_WR);
    else if (send(e->fd, bytes, size, MSG_NOSIGNAL) < 0) return; /* the host has closed it */
    link_flush(&e->link);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Ear ears[2 * PEERS];
    turn_s = 1;
    fuzz_memory_start();
    Host *h = host_new();
    for (int i = 0; i < 2 * PEERS; i++) {
        connect_peer(h, &ears[i].fd);
        ears[i] = (Ear){ .fd = ears[i].fd };
        link_open(&ears[i].link, ears[i].fd, STORE_FRAME_MAX);
    }
    for (size_t at = 0; at + 2 <= size;) {
        Piece p = piece_of(data[at]);
        size_t n = data[at + 1];
        at += 2;
        if (n > size - at) n = size - at;
        say(&ears[p.who], h, p, data + at, n);
        if (!p.what) at += n;
        for (int i = 0; i < 2; i++) { /* what is heard of a greeting is answered */
            turn(h);
            hear(&ears[p.who]);
            link_flush(&ears[p.who].link);
        }
    }
    for (int i = 0; i < 3; i++) {
        turn(h);
        for (int k = 0; k < 2 * PEERS; k++) hear(&ears[k]);
    }
    /* buffers of the links of both sides; a request of 14 bytes is answered by all that was stored before, so that what
     * waits to be sent is bounded by the link's own limit, here by the requests that fit into a piece */
    FUZZ_MEMORY_BOUND(size, 64, 2 * 2 * PEERS * (2 << 14) + (1 << 16));
    for (int i = 0; i < 2 * PEERS; i++) link_close(&ears[i].link);
    while (h->count) drop(h, h->count - 1);
    kv_free(&h->values);
    free(h->conns);
    free(h->polls);
    judge_close(h->judge);
    free(h->peers);
    free(h);
    return 0;
}
