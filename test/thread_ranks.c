/*
 * See thread_ranks.h. Each member of a group owns a queue and a worker thread that runs its requests in order.
 * One request is three meetings of the workers at a barrier:
 *
 *   publish the request | barrier | reduce or copy own slice | barrier | fetch the others' slices | barrier
 *
 * In the middle phase rank r writes only slice r of its own buffer, which nobody else reads, and in the last
 * phase it writes only slices p != r, so in-place requests need no copy.
 *
 * An exchange meets nobody: a worker offers its messages to the group, copies those that the others offer it, and is
 * through when it has all and its own were taken.
 */
#include "thread_ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/reduce.h"

enum { QUEUE_SIZE = 64, GROUP_MAX = 64, GROUPS_MAX = 256 };

/* What a member sends in the exchange that it runs; a bit a message. */
typedef struct {
    const CommRequest *request; /* NULL: it runs none */
    uint32_t claimed, taken;    /* by the receiver: it copies, it has copied */
} Offer;

typedef struct {
    char name[16];
    int members[GROUP_MAX], size;
    int arrived, round; /* barrier */
    pthread_cond_t met; /* or something happened to an offer */
    CommRequest posted[GROUP_MAX];
    Offer offers[GROUP_MAX];
} Group;

struct CommHub {
    pthread_mutex_t lock; /* of everything here; conditions are per group and per member */
    int world_size, delay_ms;
    bool aborted;
    char why[256];
    Group groups[GROUPS_MAX];
    int group_count;
};

typedef struct {
    CommHub *hub;
    Group *group;
    int rank;
    pthread_t worker;
    pthread_cond_t queue_changed;
    CommRequest queue[QUEUE_SIZE];
    int64_t head, tail; /* next to run, next free; under hub->lock */
    bool closing;
    uint64_t received[GROUP_MAX]; /* messages so far, by sender */
} Member;

Err comm_hub_open(int world_size, int delay_ms, CommHub **out)
{
    CommHub *h = calloc(1, sizeof *h);
    if (!h) return err_set(ERR_MEMORY, "no memory for the thread communicator");
    pthread_mutex_init(&h->lock, NULL);
    h->world_size = world_size;
    h->delay_ms = delay_ms;
    *out = h;
    return ERR_OK;
}

void comm_hub_close(CommHub *hub)
{
    pthread_mutex_destroy(&hub->lock);
    for (int i = 0; i < hub->group_count; i++) pthread_cond_destroy(&hub->groups[i].met);
    free(hub);
}

/* Under the lock. */
static void stop(CommHub *hub, const char *why)
{
    if (!hub->aborted) snprintf(hub->why, sizeof hub->why, "%s", why);
    hub->aborted = true;
    for (int i = 0; i < hub->group_count; i++) pthread_cond_broadcast(&hub->groups[i].met);
}

void comm_hub_abort(CommHub *hub, const char *why)
{
    pthread_mutex_lock(&hub->lock);
    stop(hub, why);
    pthread_mutex_unlock(&hub->lock);
}

/* All members of the group meet; false when the hub was aborted. */
static bool meet(Member *m)
{
    CommHub *h = m->hub;
    Group *g = m->group;
    pthread_mutex_lock(&h->lock);
    int round = g->round;
    if (++g->arrived == g->size) {
        g->arrived = 0;
        g->round++;
        pthread_cond_broadcast(&g->met);
    }
    while (g->round == round && !h->aborted) pthread_cond_wait(&g->met, &h->lock);
    bool ok = !h->aborted;
    pthread_mutex_unlock(&h->lock);
    return ok;
}

/* Copied: when calls differ a member may be gone while others still compare. False when the hub was aborted. */
static bool post(Member *m, const CommRequest *r)
{
    pthread_mutex_lock(&m->hub->lock);
    bool ok = !m->hub->aborted;
    if (ok) m->group->posted[m->rank] = *r;
    pthread_mutex_unlock(&m->hub->lock);
    return ok;
}

static void slice_of(int64_t count, int size, int rank, int64_t *first, int64_t *end)
{
    *first = count * rank / size;
    *end = count * (rank + 1) / size;
}

/* dst[count] = what the members hold from element `first` of their sources. */
static void reduce_range(const Group *g, const CommRequest *r, void *dst, int64_t first, int64_t count)
{
    const void *src[GROUP_MAX];
    for (int p = 0; p < g->size; p++) src[p] = (const char *)g->posted[p].src + first * r->elem_bytes;
    comm_reduce(r->kind, dst, src, g->size, count);
}

/* What the members have for this one. */
static void fetch_rows(const Member *m, const CommRequest *r)
{
    const Group *g = m->group;
    for (int p = 0; p < g->size; p++)
        for (int64_t c = 0; c < r->rows.chunks; c++) {
            const CommPiece to = comm_piece_in(r, g->size, p, c);
            const CommPiece from = comm_piece_out(&g->posted[p], g->size, m->rank, c);
            ASSERT(to.bytes == from.bytes);
            if (to.bytes) memcpy(to.data, from.data, (size_t)to.bytes);
        }
}

/* Middle phase: what this rank computes from everybody's source. */
static void reduce_own(const Member *m, const CommRequest *r)
{
    const Group *g = m->group;
    int64_t first, end, bytes = r->count * r->elem_bytes;
    switch (r->kind) {
    case COMM_REDUCE_TREE_F32:
    case COMM_SUM_I64:
    case COMM_MAX_I64:
        slice_of(r->count, g->size, m->rank, &first, &end);
        reduce_range(g, r, (char *)r->dst + first * r->elem_bytes, first, end - first);
        break;
    case COMM_REDUCE_SCATTER_TREE_F32:
    case COMM_REDUCE_SCATTER_I64: reduce_range(g, r, r->dst, m->rank * r->count, r->count); break;
    case COMM_ALL_GATHER:
        for (int p = 0; p < g->size; p++) {
            char *slot = (char *)r->dst + p * bytes;
            if (slot != g->posted[p].src) memmove(slot, g->posted[p].src, (size_t)bytes);
        }
        break;
    case COMM_ALL_TO_ALL_ROWS: fetch_rows(m, r); break;
    case COMM_BARRIER:
    case COMM_EXCHANGE:
    case COMM_KIND_COUNT: break;
    }
}

/* Last phase: the slices that the other ranks computed. */
static void fetch_others(const Member *m, const CommRequest *r)
{
    if (r->kind != COMM_REDUCE_TREE_F32 && r->kind != COMM_SUM_I64 && r->kind != COMM_MAX_I64) return;
    for (int p = 0; p < m->group->size; p++) {
        int64_t first, end;
        slice_of(r->count, m->group->size, p, &first, &end);
        if (p != m->rank)
            memcpy((char *)r->dst + first * r->elem_bytes,
                   (const char *)m->group->posted[p].dst + first * r->elem_bytes,
                   (size_t)((end - first) * r->elem_bytes));
    }
}

static Err check_same(const Member *m, char *message, size_t size)
{
    CommCall calls[GROUP_MAX];
    for (int p = 0; p < m->group->size; p++) calls[p] = comm_call(&m->group->posted[p]);
    return comm_same_calls(m->group->name, calls, m->group->size, message, size) ? ERR_OK : ERR_INTERNAL;
}

static Err stopped(const Member *m, char *message, size_t size)
{
    snprintf(message, size, "%s: stopped because %.200s", m->group->name, m->hub->why);
    return ERR_PEER;
}

static Err run_collective(Member *m, const CommRequest *r, char *message, size_t size)
{
    bool ok = post(m, r) && meet(m);
    Err err = ok ? check_same(m, message, size) : ERR_OK;
    if (err) return comm_hub_abort(m->hub, message), err;
    if (ok) reduce_own(m, r);
    ok = ok && meet(m);
    if (ok) fetch_others(m, r);
    ok = ok && meet(m);
    return ok ? ERR_OK : stopped(m, message, size);
}

/* ---- exchanges: all under the lock but the copying ---- */

static uint32_t bit(int i) { return (uint32_t)1 << i; }

static uint32_t messages_of(const CommRequest *r, bool send)
{
    uint32_t all = 0;
    for (int i = 0; i < r->message_count; i++)
        if (r->messages[i].send == send) all |= bit(i);
    return all;
}

/* The first message to this member that `peer` offers and that was not taken; -1: none. */
static int offered(const Member *m, int peer)
{
    const Offer *o = &m->group->offers[peer];
    for (int i = 0; o->request && i < o->request->message_count; i++)
        if (o->request->messages[i].send && o->request->messages[i].peer == m->rank && !(o->claimed & bit(i)))
            return i;
    return -1;
}

/* Copies the message, or finds that it is another one than `own` expects. */
static Err take(Member *m, const CommMessage *own, int index, char *text, size_t size)
{
    Offer *o = &m->group->offers[own->peer];
    const CommMessage *theirs = &o->request->messages[index];
    const uint64_t number = m->received[own->peer]++;
    const CommNote ends[2] = { { number, theirs->bytes, theirs->what }, { number, own->bytes, own->what } };
    if (!comm_same_message(m->group->name, own->peer, m->rank, ends, text, size)) return ERR_INTERNAL;
    o->claimed |= bit(index);
    pthread_mutex_unlock(&m->hub->lock);
    if (own->bytes) memcpy(own->data, theirs->data, (size_t)own->bytes);
    pthread_mutex_lock(&m->hub->lock);
    o->taken |= bit(index);
    pthread_cond_broadcast(&m->group->met);
    return ERR_OK;
}

/* Takes what is there of the messages that are still `missing`: of one sender, in the order of the list. */
static Err take_all(Member *m, const CommRequest *r, uint32_t *missing, char *text, size_t size)
{
    bool waits[GROUP_MAX] = { false };
    for (int i = 0; i < r->message_count; i++) {
        const CommMessage *own = &r->messages[i];
        if (!(*missing & bit(i)) || waits[own->peer]) continue;
        const int index = offered(m, own->peer);
        waits[own->peer] = index < 0;
        if (index < 0) continue;
        TRY(take(m, own, index, text, size));
        *missing &= ~bit(i);
    }
    return ERR_OK;
}

static Err run_exchange(Member *m, const CommRequest *r, char *message, size_t size)
{
    CommHub *h = m->hub;
    Offer *own = &m->group->offers[m->rank];
    const uint32_t sent = messages_of(r, true);
    uint32_t missing = messages_of(r, false);
    Err err = ERR_OK;
    pthread_mutex_lock(&h->lock);
    *own = (Offer){ .request = r };
    pthread_cond_broadcast(&m->group->met);
    while (!h->aborted && (missing || own->taken != sent)) {
        const uint32_t before = missing;
        err = take_all(m, r, &missing, message, size);
        if (err) stop(h, message);
        else if (missing == before)
            pthread_cond_wait(&m->group->met, &h->lock); /* nothing came while it copied */
    }
    while (own->claimed != own->taken)
        pthread_cond_wait(&m->group->met, &h->lock); /* somebody still copies */
    if (!err && (missing || own->taken != sent)) err = stopped(m, message, size);
    own->request = NULL;
    pthread_mutex_unlock(&h->lock);
    return err;
}

/* ---- the worker ---- */

static void run(Member *m, const CommRequest *r)
{
    char message[256] = "";
    if (m->hub->delay_ms) {
        struct timespec t = { 0, m->hub->delay_ms * 1000000L };
        nanosleep(&t, NULL);
    }
    Err err = r->kind == COMM_EXCHANGE ? run_exchange(m, r, message, sizeof message)
                                       : run_collective(m, r, message, sizeof message);
    event_complete(r->done, err, message);
}

static void *worker(void *arg)
{
    Member *m = arg;
    for (;;) {
        pthread_mutex_lock(&m->hub->lock);
        while (m->head == m->tail && !m->closing) pthread_cond_wait(&m->queue_changed, &m->hub->lock);
        bool end = m->head == m->tail;
        CommRequest r = m->queue[m->head % QUEUE_SIZE];
        pthread_mutex_unlock(&m->hub->lock);
        if (end) return NULL;
        run(m, &r);
        pthread_mutex_lock(&m->hub->lock);
        m->head++;
        pthread_cond_broadcast(&m->queue_changed);
        pthread_mutex_unlock(&m->hub->lock);
    }
}

static Err submit(Comm *c, const CommRequest *r)
{
    Member *m = c->impl;
    pthread_mutex_lock(&m->hub->lock);
    while (m->tail - m->head == QUEUE_SIZE) pthread_cond_wait(&m->queue_changed, &m->hub->lock);
    m->queue[m->tail++ % QUEUE_SIZE] = *r;
    pthread_cond_broadcast(&m->queue_changed);
    pthread_mutex_unlock(&m->hub->lock);
    return ERR_OK;
}

static void close_member(Comm *c)
{
    Member *m = c->impl;
    pthread_mutex_lock(&m->hub->lock);
    m->closing = true;
    pthread_cond_broadcast(&m->queue_changed);
    pthread_mutex_unlock(&m->hub->lock);
    pthread_join(m->worker, NULL);
    pthread_cond_destroy(&m->queue_changed);
    free(m);
}

static const CommTable threads_table = { "threads", submit, close_member };

/* The group of this name and member list; the first member to ask makes it. Under the lock. */
static Group *find_group(CommHub *h, const char *name, const int *members, int size)
{
    for (int i = 0; i < h->group_count; i++) {
        Group *g = &h->groups[i];
        if (!strcmp(g->name, name) && g->size == size &&
            !memcmp(g->members, members, (size_t)size * sizeof *members))
            return g;
    }
    if (h->group_count == GROUPS_MAX) return NULL;
    Group *g = &h->groups[h->group_count++];
    snprintf(g->name, sizeof g->name, "%s", name);
    memcpy(g->members, members, (size_t)size * sizeof *members);
    g->size = size;
    pthread_cond_init(&g->met, NULL);
    return g;
}

Err comm_open_threads(CommHub *hub, Comm *c, const char *name, int world_rank, const int *members, int size)
{
    ASSERT(size <= GROUP_MAX);
    if (size <= 1) return comm_open_self(c, name), ERR_OK;
    Member *m = calloc(1, sizeof *m);
    if (!m) return err_set(ERR_MEMORY, "no memory for communicator '%s'", name);
    m->hub = hub;
    pthread_cond_init(&m->queue_changed, NULL);
    for (int i = 0; i < size; i++)
        if (members[i] == world_rank) m->rank = i;
    pthread_mutex_lock(&hub->lock);
    m->group = find_group(hub, name, members, size);
    pthread_mutex_unlock(&hub->lock);
    if (!m->group || pthread_create(&m->worker, NULL, worker, m)) {
        free(m);
        return err_set(ERR_MEMORY, "cannot start communicator '%s'", name);
    }
    comm_init(c, &threads_table, name, m->rank, size, m);
    return ERR_OK;
}

typedef struct {
    CommHub *hub;
    int rank;
} ThreadRank;

static Err open_threads(void *user, Comm *c, GroupKind kind, const int *members, int size)
{
    const ThreadRank *t = user;
    return comm_open_threads(t->hub, c, group_name(kind), t->rank, members, size);
}

Err world_open_threads(World *w, CommHub *hub, Grid g, int rank)
{
    ThreadRank t = { hub, rank };
    return world_open(w, g, rank, (CommOpener){ &t, open_threads });
}
