/* Sockets that never block, and frames over them. */
#include "boot/link.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

enum { READ_BYTES = 16384, BACKLOG = 4096, OUT_MAX = 8 << 20 };
#define STOP_LOOK_S 0.2

/* ---- links ---- */

void link_open(Link *l, int fd, uint32_t frame_max)
{
    int on = 1;
    *l = (Link){ .fd = fd };
    link_frames(l, frame_max);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void link_close(Link *l)
{
    if (l->fd >= 0) close(l->fd);
    free(l->in);
    free(l->out);
    *l = (Link){ .fd = -1 };
}

void link_frames(Link *l, uint32_t frame_max) { l->limit = frame_max + sizeof(FrameHead); }

void link_limit(Link *l, size_t bytes) { l->limit = bytes; }

int link_release(Link *l)
{
    const int fd = l->fd;
    l->fd = -1;
    link_close(l);
    return fd;
}

static bool reserve(char **buffer, size_t *capacity, size_t need)
{
    if (need <= *capacity) return true;
    size_t grown = need < 2 * *capacity ? 2 * *capacity : need;
    char *p = realloc(*buffer, grown);
    if (!p) return false;
    *buffer = p;
    *capacity = grown;
    return true;
}

/* A long message is rare, and rank 0 has two links to each rank: what it took is given back when it is through. */
static void release_large(char **buffer, size_t *capacity, size_t used)
{
    if (used || *capacity <= 2 * READ_BYTES) return;
    free(*buffer);
    *buffer = NULL;
    *capacity = 0;
}

int link_fill(Link *l)
{
    if (l->in_size >= l->limit) return 1;
    size_t room = l->limit - l->in_size < READ_BYTES ? l->limit - l->in_size : READ_BYTES;
    if (!reserve(&l->in, &l->in_capacity, l->in_size + room)) return -1;
    ssize_t n = recv(l->fd, l->in + l->in_size, room, 0);
    if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
    if (n == 0) return errno = ECONNRESET, -1;
    l->in_size += (size_t)n;
    return 1;
}

int link_frame(const Link *l, Frame *out)
{
    FrameHead head;
    if (l->in_size < sizeof head) return 0;
    memcpy(&head, l->in, sizeof head);
    if (head.bytes > l->limit - sizeof head) return -1;
    if (l->in_size < sizeof head + head.bytes) return 0;
    *out = (Frame){ .kind = head.kind, .id = head.id, .bytes = head.bytes, .data = l->in + sizeof head };
    return 1;
}

void link_drop(Link *l, size_t bytes)
{
    memmove(l->in, l->in + bytes, l->in_size - bytes);
    l->in_size -= bytes;
    release_large(&l->in, &l->in_capacity, l->in_size);
}

void link_drop_frame(Link *l)
{
    FrameHead head;
    memcpy(&head, l->in, sizeof head);
    link_drop(l, sizeof head + head.bytes);
}

bool link_put_raw(Link *l, const void *data, size_t bytes)
{
    if (!bytes) return true;
    if (l->out_size + bytes > OUT_MAX) return false; /* a peer that asks and never reads */
    if (!reserve(&l->out, &l->out_capacity, l->out_size + bytes)) return false;
    memcpy(l->out + l->out_size, data, bytes);
    l->out_size += bytes;
    return true;
}

bool link_put(Link *l, FrameKind kind, uint32_t id, const void *head, size_t head_bytes, const void *body,
              size_t body_bytes)
{
    FrameHead h = { .bytes = (uint32_t)(head_bytes + body_bytes), .kind = kind, .id = id };
    if (l->out_size + sizeof h + h.bytes > OUT_MAX) return false; /* nor the head alone */
    if (!reserve(&l->out, &l->out_capacity, l->out_size + sizeof h + h.bytes)) return false;
    return link_put_raw(l, &h, sizeof h) && link_put_raw(l, head, head_bytes) && link_put_raw(l, body, body_bytes);
}

bool link_flush(Link *l)
{
    while (l->out_size) {
        ssize_t n = send(l->fd, l->out, l->out_size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno == EAGAIN;
        memmove(l->out, l->out + n, l->out_size - (size_t)n);
        l->out_size -= (size_t)n;
    }
    release_large(&l->out, &l->out_capacity, l->out_size);
    return true;
}

int link_poll(struct pollfd *fds, int count, double deadline)
{
    for (;;) {
        double left = deadline - clock_s();
        int ms = left <= 0 ? 0 : left > 1e6 ? 1000000000 : (int)(left * 1e3) + 1; /* rounded up: never early */
        int n = poll(fds, (nfds_t)count, ms);
        if (n >= 0 || errno != EINTR) return n;
    }
}

bool link_flush_until(Link *l, double deadline)
{
    for (;;) {
        if (!link_flush(l)) return false;
        if (!l->out_size) return true;
        struct pollfd p = { .fd = l->fd, .events = POLLOUT };
        if (link_poll(&p, 1, deadline) == 0) return errno = ETIMEDOUT, false;
    }
}

static bool fill_until(Link *l, double deadline)
{
    struct pollfd p = { .fd = l->fd, .events = POLLIN };
    if (link_poll(&p, 1, deadline) == 0) return errno = ETIMEDOUT, false;
    return link_fill(l) >= 0;
}

bool link_wait(Link *l, Frame *out, double deadline)
{
    for (;;) {
        int r = link_frame(l, out);
        if (r < 0) return errno = EPROTO, false;
        if (r > 0) return true;
        if (!fill_until(l, deadline)) return false;
    }
}

bool link_wait_or_stop(Link *l, Frame *out, double deadline, const volatile sig_atomic_t *stop)
{
    for (;;) { /* in short waits: a signal may come between looking at it and waiting */
        double now = clock_s(), until = now + STOP_LOOK_S;
        if (stop && *stop) return errno = ECANCELED, false;
        if (!stop || until > deadline) until = deadline;
        if (link_wait(l, out, until)) return true;
        if (errno != ETIMEDOUT || until == deadline) return false;
    }
}

bool link_wait_bytes(Link *l, size_t bytes, double deadline)
{
    while (l->in_size < bytes)
        if (!fill_until(l, deadline)) return false;
    return true;
}

int link_thread(pthread_t *thread, void *(*run)(void *), void *arg)
{
    const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT };
    sigset_t all, old;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

/* ---- sockets ---- */

static int close_for(int fd, int why)
{
    close(fd);
    errno = why;
    return -1;
}

static int listen_on(int family, const void *address, socklen_t size, bool dual)
{
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1, off = 0;
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); /* not kept out by the last run's closed connections */
    if (dual) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, address, size) == 0 && listen(fd, BACKLOG) == 0) return fd;
    return close_for(fd, errno);
}

int net_listen(int port, bool loopback_only, bool *taken)
{
    struct sockaddr_in6 all = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    if (loopback_only) v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = -1;
    errno = EAFNOSUPPORT;
    if (!loopback_only) fd = listen_on(AF_INET6, &all, sizeof all, true);
    if (fd < 0 && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL)) fd = listen_on(AF_INET, &v4, sizeof v4, false);
    *taken = fd < 0 && errno == EADDRINUSE;
    return fd;
}

static int begin_to_connect(const struct addrinfo *a)
{
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || !connect(fd, a->ai_addr, a->ai_addrlen) || errno == EINPROGRESS) return fd;
    return close_for(fd, errno);
}

bool net_connected(int fd)
{
    int err = 0;
    socklen_t size = sizeof err;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &size);
    /* a port of the ephemeral range that nobody listens on may connect to itself */
    struct sockaddr_storage here = { 0 }, there = { 0 };
    socklen_t n = sizeof here, m = sizeof there;
    if (!err && !getsockname(fd, (void *)&here, &n) && !getpeername(fd, (void *)&there, &m) && n == m &&
        !memcmp(&here, &there, n))
        err = ECONNREFUSED;
    errno = err;
    return !err;
}

static int connect_to(const struct addrinfo *a, double deadline)
{
    int fd = begin_to_connect(a);
    struct pollfd p = { .fd = fd, .events = POLLOUT };
    if (fd < 0) return -1;
    if (link_poll(&p, 1, deadline) == 0) return close_for(fd, ETIMEDOUT);
    return net_connected(fd) ? fd : close_for(fd, errno);
}

/* NULL: not numeric. */
static struct addrinfo *numeric(const char *address, int port)
{
    char service[16];
    struct addrinfo want = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV }, *list = NULL;
    snprintf(service, sizeof service, "%d", port);
    if (getaddrinfo(address, service, &want, &list)) errno = EINVAL;
    return list;
}

int net_listen_on(const char *address, int port)
{
    struct addrinfo *a = numeric(address, port);
    if (!a) return -1;
    int fd = listen_on(a->ai_family, a->ai_addr, a->ai_addrlen, false), why = errno;
    freeaddrinfo(a);
    errno = why;
    return fd;
}

int net_connect(const char *address, int port)
{
    struct addrinfo *a = numeric(address, port);
    if (!a) return -1;
    int fd = begin_to_connect(a), why = errno;
    freeaddrinfo(a);
    errno = why;
    return fd;
}

int net_dial(const char *addr, int port, double deadline, char *why, size_t why_size)
{
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo want = { .ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC, .ai_flags = AI_NUMERICSERV }, *list;
    int rc = getaddrinfo(addr, service, &want, &list);
    if (rc) {
        snprintf(why, why_size, "cannot resolve '%s': %s", addr, gai_strerror(rc));
        return -1;
    }
    int fd = -1;
    snprintf(why, why_size, "'%s' has no address", addr);
    for (int pass = 0; fd < 0 && pass < 2; pass++) /* IPv4 first on every rank: their addresses must be of one kind */
        for (struct addrinfo *a = list; fd < 0 && a; a = a->ai_next) {
            if ((a->ai_family == AF_INET) != (pass == 0)) continue;
            fd = connect_to(a, deadline);
            if (fd < 0) snprintf(why, why_size, "port %d: %s", port, strerror(errno));
        }
    freeaddrinfo(list);
    return fd;
}

static bool addr_text(const struct sockaddr_storage *a, socklen_t n, char *out, size_t size)
{
    if (getnameinfo((const void *)a, n, out, (socklen_t)size, NULL, 0, NI_NUMERICHOST)) return false;
    if (!strncmp(out, "::ffff:", 7)) memmove(out, out + 7, strlen(out) - 6); /* IPv4 over a dual-stack socket */
    return true;
}

bool net_local_addr(int fd, char *out, size_t size)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    return !getsockname(fd, (void *)&a, &n) && addr_text(&a, n, out, size);
}

bool net_peer_addr(int fd, char *out, size_t size)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    return !getpeername(fd, (void *)&a, &n) && addr_text(&a, n, out, size);
}

int net_local_port(int fd)
{
    struct sockaddr_storage a = { 0 };
    socklen_t n = sizeof a;
    if (getsockname(fd, (void *)&a, &n)) return 0;
    if (a.ss_family == AF_INET) return ntohs(((const struct sockaddr_in *)&a)->sin_port);
    return a.ss_family == AF_INET6 ? ntohs(((const struct sockaddr_in6 *)&a)->sin6_port) : 0;
}

void net_host_name(char out[LINK_HOST_BYTES])
{
    if (gethostname(out, LINK_HOST_BYTES)) strcpy(out, "unknown-host");
    out[LINK_HOST_BYTES - 1] = 0;
}

void net_make_printable(char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~') *text = '?';
}
