/* What the two files of rank 0's server share (inside boot/ only): its state, and the requests of host_values.c. */
#ifndef MEGATRAIN_BOOT_HOST_IMPL_H
#define MEGATRAIN_BOOT_HOST_IMPL_H

#include <poll.h>
#include <pthread.h>

#include "boot/host.h"
#include "boot/judge.h"
#include "boot/kv.h"

typedef enum {
    CONN_GREETING,
    CONN_STORE,
    CONN_WATCH,
    CONN_ENDING
} ConnState; /* ENDING: closed when the other side is */

typedef struct {
    Link link;
    Greeting greeting;
    ConnState state;
    int rank;
    double since; /* accepted at, ending since */
    bool proven;  /* has shown that it has the run's secret */
    bool shut;    /* ENDING, and our side is closed */
    bool waits;   /* for a key to be set */
    char wanted[STORE_KEY_MAX + 1];
    uint32_t wanted_id;
    double alive_at; /* WATCH: next sign of life */
    bool told;       /* WATCH: the verdict has arrived there */
} Conn;

typedef struct {
    bool known, here; /* known: has been here; here: its store connection is open */
    bool heard;       /* and there it has said that it heard its welcome: it will not call again */
    bool gave_up;     /* its own patience ended while it waited for others */
    Hello hello;
} Peer;

struct Host {
    Boot boot;
    Hello self;
    GreetKey key;
    int listener, port, wake;
    pthread_t thread;
    bool closing; /* set and read atomically, after close_at */
    double close_at;
    Conn **conns;
    struct pollfd *polls;
    int count, capacity;
    double accept_after, stranger_line_at;
    Peer *peers;
    bool all_here;
    bool failed;
    char failure_text[512];
    Kv values;
    Judge *judge;
    bool watching; /* some rank opened its watch: without any, nobody is judged */
    bool told_judging, judged;
    Verdict verdict;
    double own_verdict_at; /* rank 0 hears it after the others, or then; 0: none to tell */
};

/* One request of a rank, answered at once, or when the key is set. */
void host_set(Host *h, Conn *c, uint32_t id, const char *key, const void *value, size_t size, size_t echo);
void host_get(Host *h, Conn *c, uint32_t id, const char *key);
/* False: not a number's bytes. */
bool host_add(Host *h, Conn *c, uint32_t id, const char *key, const char *value, size_t size);

#endif
