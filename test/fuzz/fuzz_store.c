/*
 * boot/store.c, a client: what rank 0 (or whoever has its port) answers. Input: a byte that chooses the rank (0 or
 * 1) and the calls, then all that the other side sends; with LONG_VALUE before it an answer of the largest value and
 * as many bytes as the next byte says. Values are as long as the frame said that brought them, counters are 8 bytes;
 * errors are those of store.h.
 */
#include "boot/store.c"
#include "fuzz.h"

#include <sys/socket.h>
#include <unistd.h>

enum { RANK = 1, MEET = 2, GET = 4, ADD = 8, SET = 16, AGREE = 32, LONG_VALUE = 64 };

static void put_long_value(Link *l, size_t more)
{
    FrameHead head = { .bytes = (uint32_t)(STORE_VALUE_MAX + more), .kind = FRAME_REPLY, .id = 1 };
    l->in_size = l->in_capacity = sizeof head + head.bytes;
    l->in = calloc(1, l->in_size);
    if (!l->in) abort();
    memcpy(l->in, &head, sizeof head);
}

static Store *store_new(const uint8_t *data, size_t size, int rank)
{
    int pair[2], room = 1 << 22;
    Store *s = calloc(1, sizeof *s);
    if (!s || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair)) abort();
    setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    s->boot = (Boot){ .launcher = "none", .rank = rank, .size = 2 };
    pthread_mutex_init(&s->lock, NULL);
    link_open(&s->meeting.link, pair[0], STORE_FRAME_MAX);
    if (size && send(pair[1], data, size, MSG_NOSIGNAL) < 0) abort();
    /* what we send is read by nobody, and nothing more comes: no call waits */
    shutdown(pair[1], SHUT_WR);
    s->requests = (uint32_t)pair[1]; /* kept for store_free; ids go on from there */
    return s;
}

static void store_free(Store *s, int fd)
{
    link_close(&s->meeting.link);
    close(fd);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* The first answer to the first request has brought these 8 bytes. */
static void check_counter(const uint8_t *data, size_t size, int64_t sum)
{
    FrameHead head = { 0 };
    for (; size >= sizeof head; data += sizeof head + head.bytes, size -= sizeof head + head.bytes) {
        memcpy(&head, data, sizeof head);
        if (head.kind == FRAME_REPLY && head.id == 1) break;
    }
    FUZZ_CHECK(head.bytes == sizeof sum && !memcmp(&sum, data + sizeof head, sizeof sum),
               "%u bytes for a counter", head.bytes);
}

static const Agreement agreement = { .facts = "what: this\nthat: other",
                                     .err = ERR_CONFIG,
                                     .what = "the ranks differ",
                                     .way = "make them alike" };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char value[64];
    size_t got = 0;
    int64_t sum = 0;
    if (size < 2 || size > 1 << 17) return 0;
    int calls = data[0];
    fuzz_memory_start();
    Store *s = store_new(data + 1, size - 1, calls & RANK);
    int other_side = (int)s->requests;
    s->requests = 0;
    if (calls & LONG_VALUE) put_long_value(&s->meeting.link, data[1]);
    Err err = calls & MEET ? wait_all_here(s, 1, clock_s() + 1) : ERR_OK;
    if (!err && calls & GET) {
        memset(value, 0x7E, sizeof value);
        err = store_get(s, "key", value, sizeof value - 1, &got, 1);
        FUZZ_CHECK(err || got < sizeof value, "%zu bytes", got);
        for (size_t i = err ? 0 : got; i < sizeof value; i++)
            FUZZ_CHECK(value[i] == 0x7E, "byte %zu was written", i);
    }
    if (!err && calls & ADD) {
        err = store_add(s, "counter", 1, &sum);
        if (calls == ADD && !err) check_counter(data + 1, size - 1, sum);
    }
    if (!err && calls & SET) err = store_set(s, "key", "value", 5);
    if (!err && calls & AGREE) err = store_agree(s, &agreement, 1);
    FUZZ_MEMORY_BOUND(size, 4, 2 * STORE_FRAME_MAX + (1 << 18));
    fuzz_check_error(err, err == ERR_CONFIG ? ERR_CONFIG : ERR_RENDEZVOUS, ERR_PEER, false);
    store_free(s, other_side);
    return 0;
}
