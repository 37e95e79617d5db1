/* Shared parts of the two files of rank 0's server (inside boot/ only): its state, and the requests of
 * host_values.c. */
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
} ConnState; /* ENDING: it is closed when the other side has closed it */

typedef struct {
    Link link;
    Greeting greeting;
    ConnState state;
    int rank;
    double since; /* when it was accepted; ENDING: since when it has been ending */
    bool proven;  /* has shown that it has the run's secret */
    bool shut;    /* ENDING, and our side is closed */
    bool waits;   /* it waits until a key is set */
    char wanted[STORE_KEY_MAX + 1];
    uint32_t wanted_id;
    double alive_at; /* WATCH: when the next sign of life is to be sent */
    bool told;       /* WATCH: the verdict has arrived there */
} Conn;

typedef struct {
    bool known, here; /* known: it has been here; here: its store connection is open */
    bool heard;       /* on it the rank said that it heard its welcome: it will not call again */
    bool gave_up;     /* its own patience ended while it waited for others */
    Hello hello;
} Peer;

struct Host {
    Boot boot;
    Hello self;
    GreetKey key;
    int listener, port, wake;
    pthread_t thread;
    bool closing; /* is set and read atomically; close_at is set before */
    double close_at;
    Conn **conns;
    struct pollfd *polls;
    int count, capacity;
    double accept_after, stranger_line_at;
    bool said_full; /* it said that no descriptor is left */
    Peer *peers;
    bool all_here;
    bool failed;
    bool outdated;                             /* it failed, as a rank's later worker called */
    char failure_text[512], failure_hint[256]; /* hint "": the usual one */
    Kv values;
    Judge *judge;
    bool watching; /* some rank opened its watch; before that nobody is judged */
    bool told_judging, judged;
    Verdict verdict;
    /* rank 0 hears the verdict after the others, or at this time; 0: there is none to tell */
    double own_verdict_at;
};

/* A request of a rank, which is answered at once, or when the key is set. */
void host_set(Host *h, Conn *c, uint32_t id, const char *key, const void *value, size_t size, size_t echo);
void host_get(Host *h, Conn *c, uint32_t id, const char *key);
/* False: not a number's bytes. */
bool host_add(Host *h, Conn *c, uint32_t id, const char *key, const char *value, size_t size);

#endif
