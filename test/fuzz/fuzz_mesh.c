/*
 * comm/mesh.c: the greeting of data links. A byte of flags, then bytes. Flags 0: somebody calls rank 0 and sends the
 * bytes; 1: rank 1 calls somebody who sends them. 2: a caller that has the secret, of another start with 4, says in the
 * greeting what the bytes are: role, rank and the rank that it calls. A link is only made to that one, if it says that
 * it is rank 1 and calls rank 0 for data; nobody else hears more than a call or an answer.
 */
#include "fuzz.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "boot/greet.h"
#include "comm/mesh.h"

#define PATIENCE_S 0.05

typedef struct {
    int flags, fd, port;
    const uint8_t *data;
    size_t size;
    Hello hello;
    GreetStep step;
} Stranger;

/* Greets with the secret. */
static void *greet(void *arg)
{
    Stranger *s = arg;
    const GreetKey key = greet_key("a secret of tests", s->flags & 4 ? "another start" : "a start");
    Greeting g;
    Link l;
    Welcome w;
    link_open(&l, s->fd, 0);
    s->step = greet_call(&g, &l, &key, &s->hello, s->port) ? greet_until(&g, &l, &w, clock_s() + PATIENCE_S)
                                                            : GREET_STRANGER;
    link_close(&l);
    return NULL;
}

/* Is called, and sends the bytes. */
static void *answer(void *arg)
{
    Stranger *s = arg;
    char heard[4096];
    size_t most = 0;
    for (const double end = clock_s() + 2 * PATIENCE_S; clock_s() < end; usleep(1000)) {
        const int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) continue;
        struct timeval wait = { 0, 10000 };
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
        if (s->size && send(fd, s->data, s->size, MSG_NOSIGNAL) < 0) s->step = GREET_STRANGER;
        size_t n = 0;
        for (ssize_t got; n < sizeof heard && (got = recv(fd, heard + n, sizeof heard - n, 0)) > 0;) n += (size_t)got;
        if (n > most) most = n;
        close(fd);
    }
    FUZZ_CHECK(most <= sizeof(Call), "%zu bytes heard", most);
    return NULL;
}

static void check_heard(const Stranger *s)
{
    char heard[4096];
    ssize_t n = recv(s->fd, heard, sizeof heard, MSG_DONTWAIT);
    FUZZ_CHECK(n <= (ssize_t)sizeof(Answer), "%zd bytes heard", n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char addresses[2][MESH_ADDRESS_BYTES];
    int fds[2];
    Mesh *m;
    pthread_t thread;
    if (!size || size > 2048) return 0;
    Stranger s = { .flags = data[0] & 7, .data = data + 1, .size = size - 1 };
    const int calls = s.flags & 1, knows = !calls && s.flags & 2;
    uint32_t said[3] = { 0 };
    memcpy(said, s.data, s.size < sizeof said ? s.size : sizeof said);
    s.hello = (Hello){ .role = said[0], .rank = said[1], .to = said[2] };
    fuzz_memory_start();
    if (mesh_open(calls, 2, (MeshPlace){ "127.0.0.1" }, (MeshKey){ "a secret of tests", "a start" }, &m)) abort();
    for (int p = 0; p < 2; p++) mesh_address(m, addresses[p]);
    if (sscanf(addresses[0], "127.0.0.1 %d", &s.port) != 1) abort();
    s.fd = calls ? net_listen_on("127.0.0.1", 0) : net_connect("127.0.0.1", s.port);
    if (calls) snprintf(addresses[0], sizeof addresses[0], "127.0.0.1 %d", net_local_port(s.fd));
    if (!calls && !knows && s.size && send(s.fd, s.data, s.size, MSG_NOSIGNAL) < 0)
        s.step = GREET_STRANGER; /* unheard */
    const bool threaded = calls || knows;
    if (threaded && pthread_create(&thread, NULL, calls ? answer : greet, &s)) abort();
    const Err err = mesh_connect(m, (const char(*)[MESH_ADDRESS_BYTES])addresses, PATIENCE_S, fds);
    if (threaded) pthread_join(thread, NULL);
    if (!threaded) check_heard(&s);
    const bool right = knows && !(s.flags & 4) && said[0] == ROLE_DATA && said[1] == 1 && said[2] == 0;
    fuzz_check_error(err, ERR_RENDEZVOUS, ERR_RENDEZVOUS, false);
    FUZZ_CHECK(err || right, "a link to who says %u, %u, %u", said[0], said[1], said[2]);
    FUZZ_CHECK(!err == (fds[!calls] >= 0), "descriptor %d", fds[!calls]);
    if (!err) close(fds[!calls]);
    if (!knows) close(s.fd);
    mesh_close(m);
    FUZZ_MEMORY_BOUND(size, 64, 600 << 10);
    return 0;
}
