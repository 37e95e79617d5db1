/*
 * TCP with deadlines, for bootstrap and liveness (inside boot/ only): listening, dialling, and links, which
 * carry frames over a socket that never blocks.
 *
 * All times are clock_s() deadlines. Nothing here raises SIGPIPE, is inherited by exec, or allocates by a length
 * that a stranger sent: a link takes frames up to its own limit, and breaks at a longer one.
 */
#ifndef MEGATRAIN_BOOT_LINK_H
#define MEGATRAIN_BOOT_LINK_H

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum { LINK_HOST_BYTES = 64 };

/* ---- what travels: a greeting (boot/greet.h), then frames ---- */

typedef enum {
    /* These go to rank 0: */
    FRAME_SET = 1, /* key, 0, value */
    FRAME_GET,     /* key, 0 */
    FRAME_ADD,     /* key, 0, int64 */
    FRAME_HERE,    /* the welcome was heard */
    FRAME_MISSING, /* who has not come yet? */
    FRAME_BYE,     /* the store connection ends in order */
    FRAME_BEAT,
    FRAME_REPORT,
    FRAME_LEAVE,
    FRAME_GOT, /* the verdict has arrived */
    /* These come from rank 0: */
    FRAME_ALL_HERE,
    FRAME_REPLY,    /* value; id of the request */
    FRAME_FAIL,     /* text of an ERR_RENDEZVOUS, perhaps a line of hint; id of the request, 0: the ranks do not meet */
    FRAME_OUTDATED, /* text: a rank has a later worker, and this start is over */
    FRAME_ALIVE,
    FRAME_JUDGING,
    FRAME_VERDICT
} FrameKind;

/* An exit status, in frames that have one; a larger one would be cut by the system, perhaps to 0. */
enum { EXIT_CODE_MAX = 255 };

typedef struct {
    uint32_t bytes, kind, id;
} FrameHead;

typedef struct {
    uint32_t kind, id, bytes;
    const char *data; /* inside the link; valid until the next link_fill or link_drop */
} Frame;

/* ---- links ---- */

typedef struct {
    int fd;       /* -1: closed */
    size_t limit; /* no more is read before some is dropped: the sender waits in its own buffers */
    char *in, *out;
    size_t in_size, in_capacity, out_size, out_capacity;
} Link;

void link_open(Link *l, int fd, uint32_t frame_max);
void link_close(Link *l);
/* From now on frames have at most so many bytes. */
void link_frames(Link *l, uint32_t frame_max);
/* From now on no frames are read but so many bytes; what is behind them stays unread. */
void link_limit(Link *l, size_t bytes);
/* Gives up the link without closing its descriptor, which it returns; the caller owns it. */
int link_release(Link *l);

/* Takes what has arrived. 1: there was something, 0: nothing now, -1: the link is closed or broken, or there is no
 * memory. */
int link_fill(Link *l);
/* 1: a frame is there (link_drop it after use), 0: not yet, -1: it is longer than agreed. */
int link_frame(const Link *l, Frame *out);
void link_drop(Link *l, size_t bytes);
void link_drop_frame(Link *l);

/* Appends to what waits for sending. False: there is no memory. */
bool link_put(Link *l, FrameKind kind, uint32_t id, const void *head, size_t head_bytes, const void *body,
              size_t body_bytes);
bool link_put_raw(Link *l, const void *data, size_t bytes);
/* Sends what can be sent without waiting. False: the connection is broken. */
bool link_flush(Link *l);

/* For clients: false at the deadline (errno ETIMEDOUT) or when the connection is broken. */
bool link_flush_until(Link *l, double deadline);
bool link_wait(Link *l, Frame *out, double deadline);
bool link_wait_bytes(Link *l, size_t bytes, double deadline);
/* Like link_wait; also ends soon after *stop is not 0 (may be NULL): errno ECANCELED. */
bool link_wait_or_stop(Link *l, Frame *out, double deadline, const volatile sig_atomic_t *stop);

/* poll() that is not disturbed by signals; 0 at the deadline. */
int link_poll(struct pollfd *fds, int count, double deadline);

/* Starts a thread that leaves signals to the others. Returns 0, or an error number. */
int link_thread(pthread_t *thread, void *(*run)(void *), void *arg);

/* ---- sockets ---- */

/* Opens a listening socket on all addresses of this host, or on the loopback ones. -1: it failed; *taken tells whether
 * the port is in use, and if not, errno says why. */
int net_listen(int port, bool loopback_only, bool *taken);

/* Listens on this port of this numeric address; 0: a free one. -1: it failed, see errno; EINVAL: the address is not
 * numeric. */
int net_listen_on(const char *address, int port);
/* Begins to connect to a numeric address. When the descriptor is writable, it is connected or has an error
 * (net_connected). -1: it failed, see errno. */
int net_connect(const char *address, int port);
bool net_connected(int fd); /* false: errno says why */
/* The port of this end of a connection, or of a listener; 0: it cannot be told. */
int net_local_port(int fd);

/* Connects to addr:port, IPv4 first. -1: it failed, and `why` tells. (The system's resolver looks up names and has its
 * own limits.) */
int net_dial(const char *addr, int port, double deadline, char *why, size_t why_size);

/* The numeric address of this end of a connection. */
bool net_local_addr(int fd, char *out, size_t size);
bool net_peer_addr(int fd, char *out, size_t size); /* the address of the other end */

void net_host_name(char out[LINK_HOST_BYTES]);
/* Makes text of another process fit to be printed: in place, every byte that is no printable ASCII becomes '?'. */
void net_make_printable(char *text);

#endif
