/*
 * Communicators over NCCL; see comm/gpu.h. With nccl_library.c and nccl_monitor.c the files that see NCCL.
 *
 *   caller's stream   ... inputs | ready                              waits for done | ...
 *   group's stream                 waits for ready | collective | done
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "nccl_world.h"

/* ---- calls ---- */

/* One group, in which all messages make progress together. Empty ones move nothing, on both ends. */
static ncclResult_t enqueue_messages(Group *g, const CommRequest *r)
{
    ncclResult_t rc = nccl.GroupStart();
    if (rc) return rc;
    for (int i = 0; i < r->message_count && !rc; i++) {
        const CommMessage *m = &r->messages[i];
        rc = nccl_message(g, m->send, m->peer, m->data, m->bytes);
    }
    const ncclResult_t ended = nccl.GroupEnd();
    return rc ? rc : ended;
}

static ncclResult_t enqueue(Group *g, const CommRequest *r)
{
    const ncclDataType_t type = r->elem_bytes == 8 ? ncclUint64 : ncclFloat32;
    const size_t n = (size_t)r->count;
    switch (r->kind) {
    case COMM_ALL_GATHER:
        return nccl.AllGather(r->src, r->dst, n * (size_t)r->elem_bytes, ncclUint8, g->comm, g->stream);
    case COMM_REDUCE_SCATTER_TREE_F32:
    case COMM_REDUCE_SCATTER_I64:
        return nccl.ReduceScatter(r->src, r->dst, n, type, ncclSum, g->comm, g->stream);
    case COMM_REDUCE_TREE_F32:
    case COMM_SUM_I64: return nccl.AllReduce(r->src, r->dst, n, type, ncclSum, g->comm, g->stream);
    case COMM_MAX_I64: return nccl.AllReduce(r->src, r->dst, n, ncclInt64, ncclMax, g->comm, g->stream);
    case COMM_BARRIER: return nccl.AllReduce(g->cell, g->cell, 1, ncclUint64, ncclSum, g->comm, g->stream);
    case COMM_EXCHANGE: return enqueue_messages(g, r);
    case COMM_ALL_TO_ALL_ROWS: return nccl_enqueue_rows(g, r);
    case COMM_KIND_COUNT: break;
    }
    return ncclInternalError;
}

/* Into the group's stream. The first call of a kind connects, which needs the peers: hence a deadline. */
static Err launch(Group *g, const CommRequest *r)
{
    NcclWorld *w = g->world;
    char text[WHY_BYTES], reason[WHY_BYTES] = "";
    pthread_mutex_lock(&g->calling);
    ncclResult_t rc = ncclSuccess;
    if (g->comm && !w->stopped)
        rc = nccl_settle(w, g->comm, enqueue(g, r), clock_s() + w->o.timeout_s);
    if (rc && rc != ncclInProgress) nccl_text(rc, g->comm, reason);
    pthread_mutex_unlock(&g->calling);
    if (w->stopped) return nccl_stopped(w);
    if (!rc) return ERR_OK;
    if (rc == ncclInProgress) snprintf(reason, sizeof reason, "no answer in %.1f s", w->o.timeout_s);
    snprintf(text, sizeof text, "%s: %s of %lld (call %llu): %.160s", g->name, comm_kind_name(r->kind),
             (long long)r->count, (unsigned long long)r->sequence, reason);
    return nccl_stop(w, rc == ncclInProgress ? ERR_HANG : nccl_kind(rc), text);
}

/* The members send each other notes of the messages first. */
static Err compare_messages(Group *g, const CommRequest *r)
{
    CommMessage messages[COMM_MESSAGES_MAX];
    CommNote own[COMM_MESSAGES_MAX], theirs[COMM_MESSAGES_MAX];
    char text[WHY_BYTES];
    Event met;
    for (int i = 0; i < r->message_count; i++) {
        const CommMessage *m = &r->messages[i];
        own[i] = (CommNote){ g->numbers[2 * m->peer + !m->send]++, m->bytes, m->what };
        messages[i] = *m;
        messages[i].data = m->send ? &own[i] : &theirs[i];
        messages[i].bytes = sizeof *own;
    }
    event_init(&met);
    Err err = comm_exchange(&g->host, r->stream, messages, r->message_count, &met);
    if (!err) err = event_wait(&met, 0);
    event_release(&met);
    for (int i = 0; i < r->message_count && !err; i++) {
        const CommMessage *m = &r->messages[i];
        const CommNote ends[2] = { theirs[i], own[i] };
        if (!m->send && !comm_same_message(g->name, m->peer, g->host.rank, ends, text, sizeof text))
            err = nccl_stop(g->world, ERR_INTERNAL, text);
    }
    return err;
}

/* The calls of all members, over Gloo, before NCCL sees them: it would hang or add up the wrong things. */
static Err compare_calls(Group *g, const CommRequest *r)
{
    char text[WHY_BYTES];
    const int64_t words = sizeof(CommCall) / sizeof(int64_t);
    if (!r->check) return ERR_OK;
    g->host.observer = r->observer;
    if (r->kind == COMM_EXCHANGE) return compare_messages(g, r);
    CommCall *own = &g->calls[g->host.rank];
    *own = comm_call(r);
    Event met;
    event_init(&met);
    Err err = comm_all_gather(&g->host, r->stream, tensor_of(g->calls, I64, words * g->size),
                              tensor_of(own, I64, words), &met);
    if (!err) err = event_wait(&met, 0);
    event_release(&met);
    if (!err && !comm_same_calls(g->name, g->calls, g->size, text, sizeof text))
        err = nccl_stop(g->world, ERR_INTERNAL, text);
    return err;
}

/* A slot for one more call; there is always one unless the host is FLIGHTS calls ahead. */
static Err take_flight(Group *g, Flight **out)
{
    for (;;) {
        pthread_mutex_lock(&g->lock);
        cudaError_t code = g->issued - g->finished > FLIGHTS / 2 ? nccl_reap(g) : cudaSuccess;
        const bool room = g->issued - g->finished < FLIGHTS;
        *out = &g->flights[g->issued % FLIGHTS];
        pthread_mutex_unlock(&g->lock);
        TRY(cuda_check(code, "waiting for a communicator"));
        if (g->world->stopped) return nccl_stopped(g->world);
        if (room) return ERR_OK;
        usleep(NAP_US);
    }
}

/* The first that is received, else the first that is sent. */
static CommMessage first_message(const CommRequest *r)
{
    for (int send = 0; send < 2; send++)
        for (int i = 0; i < r->message_count; i++)
            if (r->messages[i].bytes && r->messages[i].send == send) return r->messages[i];
    return (CommMessage){ 0 };
}

static void nap(void *world) { usleep((useconds_t)((NcclWorld *)world)->o.delay_ms * 1000); }

static Err put_in(Group *g, const CommRequest *r)
{
    const bool rows = r->kind == COMM_ALL_TO_ALL_ROWS;
    CommRequest here = *r;
    Flight *f;
    TRY(compare_calls(g, r));
    TRY(take_flight(g, &f));
    *f = (Flight){ f->ready, f->done, r->kind, r->count, r->sequence, first_message(r) };
    TRY(cuda_check(cudaEventRecord(f->ready, r->stream->handle), "marking a point in the stream"));
    TRY(cuda_check(cudaStreamWaitEvent(g->stream, f->ready, 0), "waiting for an event"));
    if (rows) TRY(nccl_read_rows(g, &here));
    TRY(launch(g, &here));
    if (g->world->o.delay_ms) TRY(cuda_check(cudaLaunchHostFunc(g->stream, nap, g->world), "delaying a call"));
    TRY(cuda_check(cudaEventRecord(f->done, g->stream), "marking a point in the stream"));
    TRY(cuda_event_mark(r->done, g->stream));
    pthread_mutex_lock(&g->lock);
    g->observer = r->observer;
    g->issued++;
    pthread_mutex_unlock(&g->lock);
    return ERR_OK;
}

/* Device.failure of devices that worked for this world. */
static Err failure(void *user)
{
    NcclWorld *w = user;
    return w->stopped ? nccl_stopped(w) : ERR_OK;
}

/* The event is completed in any case: somebody may wait for it. */
static Err submit(Comm *c, const CommRequest *r)
{
    Group *g = c->impl;
    r->stream->dev->failure = failure;
    r->stream->dev->failure_user = g->world;
    Err err = put_in(g, r);
    event_complete(r->done, err, err ? err_message() : "");
    return err;
}

/* ---- groups ---- */

/* NCCL's own leave-taking, for as long as a peer may need. */
static void close_comm(NcclWorld *w, ncclComm_t comm)
{
    enum { LEAVE_S = 10 };
    if (!comm) return;
    ncclResult_t rc = w->stopped ? ncclInProgress : nccl.CommFinalize(comm);
    if (!w->stopped) rc = nccl_settle(w, comm, rc, clock_s() + LEAVE_S);
    if (rc == ncclSuccess) nccl.CommDestroy(comm);
    else nccl.CommAbort(comm);
}

/* Waits for the device to be through. */
static void leave(Group *g)
{
    NcclWorld *w = g->world;
    for (bool busy = true; busy && !w->stopped;) {
        pthread_mutex_lock(&g->lock);
        busy = !nccl_reap(g) && g->finished < g->issued;
        pthread_mutex_unlock(&g->lock);
        if (busy) usleep(NAP_US);
    }
    pthread_mutex_lock(&g->calling);
    ncclComm_t comm = atomic_exchange(&g->comm, NULL);
    pthread_mutex_unlock(&g->calling);
    close_comm(w, comm);
}

static void free_group(Group *g)
{
    if (!g) return;
    free(g->calls);
    free(g->numbers);
    free(g->members);
    free(g);
}

static void close_group(Comm *c)
{
    Group *g = c->impl;
    NcclWorld *w = g->world;
    leave(g);
    pthread_mutex_lock(&w->lock);
    for (int i = 0; i < GROUPS_MAX; i++)
        if (w->groups[i] == g) w->groups[i] = NULL;
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < FLIGHTS; i++) {
        if (g->flights[i].ready) cudaEventDestroy(g->flights[i].ready);
        if (g->flights[i].done) cudaEventDestroy(g->flights[i].done);
    }
    if (g->stream) cudaStreamDestroy(g->stream);
    if (g->reading) cudaStreamDestroy(g->reading);
    if (g->read) cudaEventDestroy(g->read);
    if (g->offsets) cudaFreeHost(g->offsets);
    if (g->cell) cudaFree(g->cell);
    comm_close(&g->host);
    pthread_mutex_destroy(&g->calling);
    pthread_mutex_destroy(&g->lock);
    free_group(g);
}

static const CommTable nccl_table = { "nccl", submit, close_group };

static Err make_parts(Group *g)
{
    const int highest = -5; /* CUDA takes the highest that there is: copies should not queue behind products */
    TRY(cuda_check(cudaSetDevice(g->world->o.gpu), "choosing the GPU"));
    TRY(cuda_check(cudaStreamCreateWithPriority(&g->stream, cudaStreamNonBlocking, highest), "creating a stream"));
    TRY(cuda_check(cudaMalloc((void **)&g->cell, sizeof *g->cell), "taking a communicator's cell"));
    TRY(cuda_check(cudaMemsetAsync(g->cell, 0, sizeof *g->cell, g->stream), "clearing a communicator's cell"));
    for (int i = 0; i < FLIGHTS; i++) {
        Flight *f = &g->flights[i];
        TRY(cuda_check(cudaEventCreateWithFlags(&f->ready, cudaEventDisableTiming), "making an event"));
        TRY(cuda_check(cudaEventCreateWithFlags(&f->done, cudaEventDisableTiming), "making an event"));
    }
    return ERR_OK;
}

/* Now, for no step should take pinned memory: it may wait for the device. */
static Err make_reading(Group *g, int64_t pieces)
{
    if (!pieces) return ERR_OK;
    g->offset_count = 2 * (pieces + 1);
    TRY(cuda_check(cudaStreamCreateWithFlags(&g->reading, cudaStreamNonBlocking), "creating a stream"));
    TRY(cuda_check(cudaEventCreateWithFlags(&g->read, cudaEventDisableTiming), "making an event"));
    return cuda_check(cudaMallocHost((void **)&g->offsets, (size_t)g->offset_count * sizeof *g->offsets),
                      "taking pinned host memory");
}

static Err connected(NcclWorld *w, const char *name, ncclComm_t comm, ncclResult_t rc)
{
    char reason[WHY_BYTES];
    if (rc == ncclSuccess) return ERR_OK;
    if (w->stopped) return nccl_stopped(w);
    if (rc == ncclInProgress)
        return err_set(ERR_RENDEZVOUS, "%s: NCCL did not connect the ranks within %.1f s", name, w->o.timeout_s),
               err_hint("NCCL_DEBUG=INFO tells what it tries; NCCL_SOCKET_IFNAME names the network interface");
    Err kind = nccl_kind(rc);
    return err_set(kind == ERR_PEER ? ERR_RENDEZVOUS : kind, "%s: NCCL: %s", name, nccl_text(rc, comm, reason)),
           err_hint("NCCL_DEBUG=INFO tells more");
}

/* A split takes all ranks of the world, those without a group, too. */
static Err split_for_others(NcclWorld *w, const char *name)
{
    ncclComm_t none = NULL;
    const double until = clock_s() + w->o.timeout_s;
    return connected(w, name, NULL,
                     nccl_settle(w, w->base, nccl.CommSplit(w->base, NCCL_SPLIT_NOCOLOR, 0, &none, NULL), until));
}

/* ---- connecting ---- */

/*
 * NCCL connects the members of a group, and takes memory for that, with the first call that needs it. Which call needs
 * what depends on its kind and size (rings, trees, switches that add; each pair that exchanges messages): so each kind
 * is called with a few bytes and with many. What memory is left is looked at later (train/run.c).
 */
enum { FIRST_CALLS = 6, FIRST_BYTES = 4 << 20 /* twice, for input and output */ };

static ncclResult_t first_call(Group *g, int i, char *memory)
{
    const size_t share = i % 2 ? FIRST_BYTES / sizeof(float) / (size_t)g->size : 1;
    char *const out = memory + FIRST_BYTES;
    if (i < 2) return nccl.AllReduce(memory, out, share * (size_t)g->size, ncclFloat32, ncclSum, g->comm, g->stream);
    if (i < 4) return nccl.ReduceScatter(memory, out, share, ncclFloat32, ncclSum, g->comm, g->stream);
    return nccl.AllGather(memory, out, share * sizeof(float), ncclUint8, g->comm, g->stream);
}

/* Between this member and others. */
static ncclResult_t first_messages(Group *g, GroupMessages who, char *memory)
{
    const int rank = g->host.rank, next = (rank + 1) % g->size, last = (rank + g->size - 1) % g->size;
    const size_t n = 16;
    ncclResult_t rc = nccl.GroupStart();
    if (rc) return rc;
    for (int m = 0; m < g->size && !rc; m++) {
        if (m == rank || (who == MESSAGES_NEIGHBOURS && m != next && m != last)) continue;
        rc = nccl_queued(nccl.Send(memory, n, ncclUint8, m, g->comm, g->stream));
        if (!rc) rc = nccl_queued(nccl.Recv(memory + FIRST_BYTES + n * (size_t)m, n, ncclUint8, m, g->comm, g->stream));
    }
    const ncclResult_t ended = nccl.GroupEnd();
    return rc ? rc : ended;
}

/* Returns when the device is through with what was called, or not with ncclInProgress. */
static ncclResult_t first_done(Group *g, double until)
{
    const cudaEvent_t done = g->flights[0].done;
    if (cudaEventRecord(done, g->stream)) return ncclUnhandledCudaError;
    for (;;) {
        const cudaError_t code = cudaEventQuery(done);
        if (code == cudaSuccess) return ncclSuccess;
        cudaGetLastError();
        if (code != cudaErrorNotReady) return ncclUnhandledCudaError;
        ncclResult_t rc, answer = nccl.CommGetAsyncError(g->comm, &rc);
        if (answer) return answer;
        if (rc && rc != ncclInProgress) return rc;
        if (g->world->stopped || clock_s() > until) return ncclInProgress;
        usleep(NAP_US);
    }
}

static Err connect_group(Group *g, GroupMessages messages)
{
    NcclWorld *w = g->world;
    const double until = clock_s() + w->o.timeout_s;
    ncclResult_t rc = ncclSuccess;
    void *memory;
    TRY(cuda_check(cudaMalloc(&memory, 2 * FIRST_BYTES), "taking memory for first calls of NCCL"));
    TRY(cuda_check(cudaMemsetAsync(memory, 0, 2 * FIRST_BYTES, g->stream), "clearing memory for first calls of NCCL"));
    for (int i = 0; i < FIRST_CALLS && !rc; i++) rc = nccl_settle(w, g->comm, first_call(g, i, memory), until);
    if (!rc && messages) rc = nccl_settle(w, g->comm, first_messages(g, messages, memory), until);
    if (!rc) rc = first_done(g, until);
    if (!rc) return cuda_check(cudaFree(memory), "giving back memory of first calls of NCCL");
    return connected(w, g->name, g->comm, rc); /* what is under way may still write to it */
}

enum { CTAS_MOST = 64 /* NCCL takes more than it can use for that */ };

static Err split(Group *g, const int *members, int rank, NcclCtas ctas)
{
    NcclWorld *w = g->world;
    ncclConfig_t config = nccl_config(g->name);
    if (ctas.min) config.minCTAs = ctas.min, config.maxCTAs = CTAS_MOST; /* NCCL refuses a least number alone */
    if (ctas.max) config.maxCTAs = ctas.max;
    const double until = clock_s() + w->o.timeout_s;
    ncclResult_t rc = nccl.CommSplit(w->base, members[0], rank, (ncclComm_t *)&g->comm, &config);
    rc = nccl_settle(w, w->base, rc, until); /* g->comm is set now */
    if (rc == ncclSuccess) rc = nccl_settle(w, g->comm, ncclInProgress, until);
    return connected(w, g->name, g->comm, rc);
}

static Group *new_group(NcclWorld *w, const int *members, int size)
{
    Group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->world = w;
    g->size = size;
    g->calls = calloc((size_t)size, sizeof *g->calls);
    g->numbers = calloc(2 * (size_t)size, sizeof *g->numbers);
    g->members = calloc((size_t)size, sizeof *g->members);
    if (!g->calls || !g->numbers || !g->members) return free_group(g), NULL;
    memcpy(g->members, members, (size_t)size * sizeof *members);
    return g;
}

Err comm_open_nccl(NcclWorld *w, GlooWorld *gloo, Comm *c, const char *name, const int *members, int size,
                   NcclUse use)
{
    if (size == 0) TRY(split_for_others(w, name));
    if (size <= 1) return comm_open_self(c, name), ERR_OK;
    Group *g = new_group(w, members, size);
    Err err = g ? comm_open_gloo(gloo, &g->host, name, members, size)
                : err_set(ERR_MEMORY, "no memory for communicator '%s'", name);
    if (err) return free_group(g), err;
    g->host.carrier = true;
    snprintf(g->name, sizeof g->name, "%.12s%d", name, members[0]);
    pthread_mutex_init(&g->calling, NULL);
    pthread_mutex_init(&g->lock, NULL);
    comm_init(c, &nccl_table, name, g->host.rank, size, g);
    c->reads_lengths = true;
    err = make_parts(g);
    if (!err) err = make_reading(g, use.pieces);
    if (!err) err = split(g, members, c->rank, use.ctas);
    if (!err) err = connect_group(g, use.messages);
    int slot = 0;
    pthread_mutex_lock(&w->lock);
    while (slot < GROUPS_MAX && w->groups[slot]) slot++;
    ASSERT(slot < GROUPS_MAX);
    if (!err) w->groups[slot] = g;
    pthread_mutex_unlock(&w->lock);
    if (err) comm_close(c);
    return err;
}

/* ---- the world ---- */

static Err exchange_id(const NcclOptions *o, ncclUniqueId *id)
{
    char reason[WHY_BYTES];
    int64_t n = 0;
    if (o->rank == 0) {
        ncclResult_t rc = nccl.GetUniqueId(id);
        if (rc)
            return err_set(ERR_RENDEZVOUS, "NCCL finds no network interface: %s", nccl_text(rc, NULL, reason)),
                   err_hint("NCCL_SOCKET_IFNAME names one; NCCL_DEBUG=INFO tells more");
        return o->store.set(o->store.user, "nccl", id, sizeof *id);
    }
    TRY(o->store.get(o->store.user, "nccl", id, sizeof *id, &n, o->timeout_s));
    if (n != sizeof *id) return err_set(ERR_RENDEZVOUS, "'nccl' in the store is not ours");
    return ERR_OK;
}

static Err connect_all(NcclWorld *w)
{
    ncclUniqueId id;
    ncclConfig_t config = nccl_config("all");
    TRY(cuda_check(cudaSetDevice(w->o.gpu), "choosing the GPU"));
    TRY(exchange_id(&w->o, &id));
    const double until = clock_s() + w->o.timeout_s;
    ncclResult_t rc = nccl.CommInitRankConfig(&w->base, w->o.size, id, w->o.rank, &config);
    return connected(w, "all", w->base, nccl_settle(w, w->base, rc, until));
}

Err nccl_world_open(const NcclOptions *o, NcclWorld **out)
{
    const char *why;
    *out = NULL;
    if (!nccl_available(&why))
        return err_set(ERR_CONFIG, "NCCL is not to be had: %s", why),
               err_hint("install NCCL 2.21 or newer, or name its folder in NCCL_HOME (that with lib/libnccl.so.2)");
    TRY(nccl_set_variables(o));
    NcclWorld *w = calloc(1, sizeof *w);
    if (!w) return err_set(ERR_MEMORY, "no memory for the ranks' communicators");
    w->o = *o;
    pthread_mutex_init(&w->lock, NULL);
    Err err = connect_all(w);
    if (!err) {
        w->monitored = pthread_create(&w->monitor, NULL, nccl_monitor, w) == 0;
        if (!w->monitored) err = err_set(ERR_MEMORY, "cannot start a thread");
    }
    if (err) {
        w->stopped = true;
        nccl_world_close(w);
        return err;
    }
    *out = w;
    return ERR_OK;
}

void nccl_world_close(NcclWorld *w)
{
    if (!w) return;
    w->closing = true;
    if (w->monitored) pthread_join(w->monitor, NULL);
    close_comm(w, w->base);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
