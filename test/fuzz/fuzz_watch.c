/*
 * boot/watch.c, a rank's side of its watch connection: what rank 0 sends. Input: the bytes. At most one verdict is
 * told; it has text that ends, and an exit status that a process can leave with.
 */
#include "boot/watch.c"
#include "fuzz.h"

static int told;

static void on_verdict(void *context, const Verdict *v)
{
    (void)context;
    told++;
    FUZZ_CHECK(memchr(v->text, 0, sizeof v->text) && memchr(v->host, 0, sizeof v->host),
               "a text without end");
    FUZZ_CHECK(v->exit_code > 0 && v->exit_code < 256, "a verdict to leave with %d", v->exit_code);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int pair[2], room = 1 << 22;
    double heard = 0;
    if (size > 1 << 17) return 0;
    fuzz_memory_start();
    Watch *w = calloc(1, sizeof *w);
    if (!w || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair)) abort();
    setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    w->on_verdict = on_verdict;
    w->wake = -1;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    link_open(&w->link, pair[0], STORE_FRAME_MAX);
    if (size && send(pair[1], data, size, MSG_NOSIGNAL) < 0) abort();
    shutdown(pair[1], SHUT_WR);
    told = 0;
    for (int i = 0; i < 64 && hear(w, &heard); i++) {}
    FUZZ_CHECK(told <= 1 && (w->state == WATCH_JUDGED) == (told == 1), "%d verdicts", told);
    FUZZ_MEMORY_BOUND(size, 4, 1 << 17);
    close(pair[1]);
    free_watch(w);
    return 0;
}
