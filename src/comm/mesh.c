/*
 * See mesh.h. One poll() over all that is under way. A call that fails is made again until the time is over; one
 * that is made again takes the place of the first, which its caller has given up.
 */
#include "comm/mesh.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "boot/greet.h"

enum { STRANGERS_MAX = 128, NOBODY = -1, ACCEPTED_A_TURN = 16 };
#define GREETING_S 5.0
#define AGAIN_S 0.05
#define TICK_S 0.1

typedef enum { END_CONNECTING, END_CALLER, END_HOST, END_LEAVING } EndState; /* LEAVING: the welcome is to be sent */

enum { PORT_MAX = 65535 };

/* This process's end of a connection under way. */
typedef struct {
    Link link;
    Greeting greeting;
    EndState state;
    int peer; /* NOBODY: has not said yet */
    double since;
} End;

struct Mesh {
    int rank, size, listener, port;
    GreetKey key;
    End *ends;
    struct pollfd *polls; /* one more than ends: the listener's */
    int count, capacity;
    double *call_at; /* by rank: not before; INFINITY while a call is under way */
    const char (*addresses)[MESH_ADDRESS_BYTES];
    int *fds;
    char why[128];    /* the last call that failed */
    double accept_at; /* not before */
    int exhausted;    /* errno where no descriptor was left and none can come back; 0 */
};

/* -1: it failed, see errno. */
static int listen_at(MeshPlace place)
{
    int fd = -1;
    for (int i = 0; fd < 0 && i < MESH_PORTS; i++) {
        fd = net_listen_on(place.address, place.port + i * place.step);
        if (fd < 0 && (errno != EADDRINUSE || !place.port)) return -1;
    }
    return fd;
}

static Err no_listener(MeshPlace place)
{
    const int error = errno;
    if (error == EMFILE || error == ENFILE) {
        err_set(ERR_RENDEZVOUS, "cannot listen on address '%s': %s", place.address, strerror(error));
        return err_hint_descriptors(error);
    }
    if (error == EINVAL) return err_set(ERR_CONFIG, "address '%s' of this rank is not numeric", place.address);
    if (error != EADDRINUSE || !place.port)
        return err_set(ERR_CONFIG, "cannot listen on address '%s': %s", place.address, strerror(error));
    err_set(ERR_RENDEZVOUS, "the %d data ports %d, %d, ... %d of this rank are all taken", MESH_PORTS, place.port,
            place.port + place.step, place.port + (MESH_PORTS - 1) * place.step);
    return err_hint("give another parallel.data_port, or 0 for any free port");
}

static Err check_ports(MeshPlace place)
{
    const int last = place.port + (MESH_PORTS - 1) * place.step, most = PORT_MAX + 1 - MESH_PORTS * place.step;
    if (!place.port || last <= PORT_MAX) return ERR_OK;
    err_set(ERR_CONFIG, "the %d data ports %d, %d, ... of this rank, for %d ranks on its host, lie beyond %d",
            MESH_PORTS, place.port, place.port + place.step, place.step, PORT_MAX);
    if (most < 1) return err_hint("give parallel.data_port=0: any free port");
    return err_hint("give a parallel.data_port of at most %d, or 0 for any free port", most);
}

Err mesh_open(int rank, int size, MeshPlace place, MeshKey key, Mesh **out)
{
    TRY(check_ports(place));
    Mesh *m = calloc(1, sizeof *m);
    if (!m) return err_set(ERR_MEMORY, "no memory for connections of %d ranks", size);
    *m = (Mesh){ .rank = rank, .size = size, .key = greet_key(key.secret, key.start), .listener = listen_at(place) };
    if (m->listener < 0) {
        const Err err = no_listener(place);
        mesh_close(m);
        return err;
    }
    m->capacity = size + STRANGERS_MAX;
    m->ends = calloc((size_t)m->capacity, sizeof *m->ends);
    m->polls = calloc((size_t)m->capacity + 1, sizeof *m->polls);
    m->call_at = calloc((size_t)size, sizeof *m->call_at);
    if (!m->ends || !m->polls || !m->call_at)
        return mesh_close(m), err_set(ERR_MEMORY, "no memory for connections of %d ranks", size);
    m->port = net_local_port(m->listener);
    *out = m;
    return ERR_OK;
}

void mesh_address(const Mesh *m, char out[MESH_ADDRESS_BYTES])
{
    char address[48] = "";
    memset(out, 0, MESH_ADDRESS_BYTES);
    net_local_addr(m->listener, address, sizeof address);
    snprintf(out, MESH_ADDRESS_BYTES, "%s %d", address, m->port);
}

void mesh_close(Mesh *m)
{
    if (!m) return;
    for (int i = 0; i < m->count; i++) link_close(&m->ends[i].link);
    if (m->listener >= 0) close(m->listener);
    free(m->ends);
    free(m->polls);
    free(m->call_at);
    free(m);
}

/* ---- ends ---- */

static void drop_end(Mesh *m, int i)
{
    link_close(&m->ends[i].link);
    m->ends[i] = m->ends[--m->count];
}

/* Room for the next: the stranger who has been here longest goes. */
static void limit_strangers(Mesh *m)
{
    int oldest = -1;
    for (int i = 0; i < m->count; i++)
        if (m->ends[i].peer == NOBODY && (oldest < 0 || m->ends[i].since < m->ends[oldest].since)) oldest = i;
    if (m->count == m->capacity && oldest >= 0) drop_end(m, oldest);
}

/* NULL: no room, and it is closed. */
static End *add_end(Mesh *m, int fd, EndState state, int peer)
{
    limit_strangers(m);
    if (m->count == m->capacity) return close(fd), NULL;
    End *e = &m->ends[m->count++];
    *e = (End){ .state = state, .peer = peer, .since = clock_s() };
    link_open(&e->link, fd, 0);
    return e;
}

/* Called and not connected: that rank may not listen any more, or it was somebody else's port. */
static void give_up_call(Mesh *m, int i, const char *why)
{
    const int peer = m->ends[i].peer;
    snprintf(m->why, sizeof m->why, "'%s': %s", m->addresses[peer], why);
    m->call_at[peer] = clock_s() + AGAIN_S;
    drop_end(m, i);
}

static void finish_end(Mesh *m, int i)
{
    const int peer = m->ends[i].peer;
    if (m->fds[peer] >= 0) close(m->fds[peer]);
    m->fds[peer] = link_release(&m->ends[i].link);
    drop_end(m, i);
}

/* There is no socket for another connection; errno says why. Who has not said which rank it is may yet give its
 * descriptor back; ranks keep theirs. */
static void note_no_socket(Mesh *m)
{
    if (errno != EMFILE && errno != ENFILE) return;
    for (int i = 0; i < m->count; i++)
        if (m->ends[i].peer == NOBODY) return;
    m->exhausted = errno;
}

/* ---- calls ---- */

/* "10.1.2.3 40123" */
static int dial(const char *text)
{
    char address[MESH_ADDRESS_BYTES];
    int port;
    if (sscanf(text, "%63s %d", address, &port) != 2 || port < 1 || port > PORT_MAX) return errno = EINVAL, -1;
    return net_connect(address, port);
}

static int port_of(const char *text)
{
    const char *blank = strchr(text, ' ');
    return blank ? atoi(blank) : 0;
}

static void begin_calls(Mesh *m)
{
    const double now = clock_s();
    for (int p = 0; p < m->rank; p++) {
        if (m->fds[p] >= 0 || now < m->call_at[p]) continue;
        const int fd = dial(m->addresses[p]);
        if (fd < 0) note_no_socket(m);
        if (fd < 0) snprintf(m->why, sizeof m->why, "'%s': %s", m->addresses[p], strerror(errno));
        m->call_at[p] = fd >= 0 && add_end(m, fd, END_CONNECTING, p) ? INFINITY : now + AGAIN_S;
    }
}

static void begin_greeting(Mesh *m, int i)
{
    End *e = &m->ends[i];
    const Hello hello = { .role = ROLE_DATA, .rank = (uint32_t)m->rank, .to = (uint32_t)e->peer };
    e->state = END_CALLER;
    if (!net_connected(e->link.fd)) give_up_call(m, i, strerror(errno));
    else if (!greet_call(&e->greeting, &e->link, &m->key, &hello, port_of(m->addresses[e->peer])))
        give_up_call(m, i, "no memory");
}

static void go_on_calling(Mesh *m, int i)
{
    End *e = &m->ends[i];
    Welcome w;
    const bool open = link_fill(&e->link) >= 0;
    const GreetStep step = greet_caller(&e->greeting, &e->link, &w);
    if (step == GREET_DONE) finish_end(m, i);
    else if (step != GREET_MORE) give_up_call(m, i, "somebody else answers");
    else if (!open) give_up_call(m, i, "the connection was closed");
}

/* ---- those who call ---- */

/* Without descriptors the listener would stay readable and the loop spin. */
static void pause_accepting(Mesh *m)
{
    if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
    m->accept_at = clock_s() + AGAIN_S;
    note_no_socket(m);
}

static void accept_some(Mesh *m)
{
    for (int i = 0; i < ACCEPTED_A_TURN; i++) {
        const int fd = accept4(m->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) pause_accepting(m);
        End *e = fd < 0 ? NULL : add_end(m, fd, END_HOST, NOBODY);
        if (!e) return;
        greet_expect(&e->greeting, &e->link, &m->key, m->port);
    }
}

/* One of the ranks above: what it began before it has given up. */
static bool enter(Mesh *m, int i)
{
    End *e = &m->ends[i];
    const Hello *h = &e->greeting.hello;
    const Welcome w = { .kind = WELCOME };
    if (h->role != ROLE_DATA || h->to != (uint32_t)m->rank || h->rank <= (uint32_t)m->rank ||
        h->rank >= (uint32_t)m->size || !greet_welcome(&e->greeting, &e->link, &w))
        return false;
    e->peer = (int)h->rank;
    e->state = END_LEAVING;
    return true;
}

static void go_on_hosting(Mesh *m, int i)
{
    End *e = &m->ends[i];
    const bool open = link_fill(&e->link) >= 0;
    const GreetStep step = greet_host(&e->greeting, &e->link);
    const bool keep = step == GREET_DONE ? enter(m, i) : step == GREET_MORE && open;
    if (!keep) drop_end(m, i);
}

/* ---- the loop ---- */

static void prepare_polls(Mesh *m)
{
    m->polls[m->count] = (struct pollfd){ .fd = clock_s() < m->accept_at ? -1 : m->listener, .events = POLLIN };
    for (int i = 0; i < m->count; i++) {
        const End *e = &m->ends[i];
        const bool writes = e->state == END_CONNECTING || e->link.out_size;
        m->polls[i] = (struct pollfd){ .fd = e->link.fd, .events = (short)(writes ? POLLOUT : POLLIN) };
    }
}

static void go_on(Mesh *m, int i)
{
    switch (m->ends[i].state) {
    case END_CONNECTING: begin_greeting(m, i); break;
    case END_CALLER: go_on_calling(m, i); break;
    case END_HOST: go_on_hosting(m, i); break;
    case END_LEAVING: break;
    }
}

static void flush_end(Mesh *m, int i)
{
    End *e = &m->ends[i];
    const bool open = e->state == END_CONNECTING || link_flush(&e->link);
    if (open && e->state == END_LEAVING && !e->link.out_size) finish_end(m, i);
    else if (!open && e->state == END_CALLER) give_up_call(m, i, "the connection was closed");
    else if (!open) drop_end(m, i);
}

static void drop_slow(Mesh *m)
{
    const double now = clock_s();
    for (int i = m->count - 1; i >= 0; i--)
        if (m->ends[i].peer == NOBODY && now - m->ends[i].since > GREETING_S) drop_end(m, i);
}

static void take_turn(Mesh *m, double until)
{
    begin_calls(m);
    prepare_polls(m);
    const int count = m->count;
    link_poll(m->polls, count + 1, until);
    const bool called = m->polls[count].revents;
    for (int i = count - 1; i >= 0; i--) /* downwards: the last one moves to the place of one that ends */
        if (m->polls[i].revents) go_on(m, i);
    for (int i = m->count - 1; i >= 0; i--) flush_end(m, i);
    drop_slow(m);
    if (called) accept_some(m);
}

/* The first rank without a connection, or `size`. */
static int first_missing(const Mesh *m)
{
    int p = 0;
    while (p < m->size && (p == m->rank || m->fds[p] >= 0)) p++;
    return p;
}

static Err no_descriptor(const Mesh *m, int peer)
{
    err_set(ERR_RENDEZVOUS, "rank %d has no file descriptor left for its connection to rank %d: %s", m->rank, peer,
            strerror(m->exhausted));
    return err_hint_descriptors(m->exhausted);
}

static Err not_connected(const Mesh *m, int peer, double timeout_s)
{
    return err_set(ERR_RENDEZVOUS, "rank %d and rank %d do not connect in %.3g s%s%s", m->rank, peer, timeout_s,
                   peer < m->rank && *m->why ? ": " : "", peer < m->rank ? m->why : "");
}

Err mesh_connect(Mesh *m, const char (*addresses)[MESH_ADDRESS_BYTES], double timeout_s, int *fds)
{
    const double deadline = clock_s() + timeout_s;
    m->addresses = addresses;
    m->fds = fds;
    for (int p = 0; p < m->size; p++) fds[p] = -1;
    Err err = ERR_OK;
    for (int peer; !err && (peer = first_missing(m)) < m->size;) {
        const double now = clock_s();
        if (m->exhausted) err = no_descriptor(m, peer);
        else if (now >= deadline) err = not_connected(m, peer, timeout_s);
        else take_turn(m, now + TICK_S < deadline ? now + TICK_S : deadline);
    }
    for (int p = 0; err && p < m->size; p++)
        if (fds[p] >= 0) close(fds[p]), fds[p] = -1;
    return err;
}
