/*
 * Communicators over NCCL; see comm/gpu.h. The one file that sees NCCL.
 *
 *   caller's stream   ... inputs | ready                              waits for done | ...
 *   group's stream                 waits for ready | collective | done
 *
 * Everything is non-blocking (blocking = 0): a call that has not finished inside NCCL is polled here, with a deadline.
 * The monitor thread polls NCCL's asynchronous errors and the oldest call of each group. A communicator is aborted by
 * one thread while no other is inside NCCL with it: Group.calling.
 */
#include <dlfcn.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/gpu.h"
#include "device_cuda.h"
#include "padded_rows.h"

enum { GROUPS_MAX = 16, FLIGHTS = 256, NAP_US = 200, MONITOR_US = 10 * 1000, ABORT_LOCK_S = 2, WHY_BYTES = 256 };
enum { OLDEST = NCCL_VERSION(2, 27, 0) }; /* names of communicators */

/* A call that the device has not finished. */
typedef struct {
    cudaEvent_t ready, done;
    CommKind kind;
    int64_t count;
    uint64_t sequence;
    CommMessage message; /* of an exchange: the first that is received, else sent; bytes 0: all are empty */
} Flight;

typedef struct {
    NcclWorld *world;
    char name[24]; /* "tp0": NCCL's logs and ours */
    Comm host;     /* for comparing calls: */
    CommCall *calls; /* the members' */
    uint64_t *numbers; /* of messages so far: sent to each member, received from it; for comparing */
    int *members;      /* world ranks */
    int size;
    cudaStream_t stream;
    int64_t *cell; /* what a barrier sums */
    Watch *watch;
    uint32_t watch_id;
    pthread_mutex_t calling; /* held inside NCCL */
    ncclComm_t comm;         /* under calling; NULL once aborted */
    pthread_mutex_t lock;    /* of what follows */
    Flight flights[FLIGHTS];
    int64_t issued, finished; /* flights so far */
    double since;             /* when the oldest flight was first seen with its inputs there; 0: not yet */
} Group;

struct NcclWorld {
    NcclOptions o;
    ncclComm_t base; /* all ranks; groups are split from it */
    pthread_t monitor;
    bool monitored;
    pthread_mutex_t lock; /* of what follows */
    Group *groups[GROUPS_MAX];
    Err kind;
    char why[WHY_BYTES];
    atomic_bool stopped, closing;
};

/* ---- the library ---- */

/* Looked up when the first communicator is wanted: a program that needs none starts without the library. */
#define FUNCTIONS(F)                                                                                                \
    F(AllGather) F(AllReduce) F(ReduceScatter) F(Send) F(Recv) F(GroupStart) F(GroupEnd) F(CommAbort)               \
    F(CommDestroy) F(CommFinalize) F(CommGetAsyncError) F(CommInitRankConfig) F(CommSplit) F(GetErrorString)        \
    F(GetLastError) F(GetUniqueId) F(GetVersion)

static struct {
#define MEMBER(name) __typeof__(&nccl##name) name;
    FUNCTIONS(MEMBER)
    bool tried, loaded;
    char why[WHY_BYTES], version[24];
} nccl;

#ifdef MEGATRAIN_NCCL_LINKED
static void *find(void *library, const char *name)
{
    (void)library;
#define FOUND(f) if (!strcmp(name, "nccl" #f)) return (void *)nccl##f;
    FUNCTIONS(FOUND)
    return NULL;
}
static void *open_library(void) { return &nccl; }
#else
static void *find(void *library, const char *name) { return dlsym(library, name); }
static void *open_library(void) { return dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL); }
#endif

static bool load(void)
{
    int v = 0;
    void *library = open_library();
    if (!library) return snprintf(nccl.why, sizeof nccl.why, "%.200s", dlerror()), false;
    const char *missing = NULL;
#define LOOK_UP(f)                                                     \
    nccl.f = (__typeof__(&nccl##f))find(library, "nccl" #f);           \
    if (!nccl.f) missing = "nccl" #f;
    FUNCTIONS(LOOK_UP)
    if (missing) return snprintf(nccl.why, sizeof nccl.why, "libnccl.so.2 has no %s", missing), false;
    if (nccl.GetVersion(&v)) return snprintf(nccl.why, sizeof nccl.why, "libnccl.so.2 has no version"), false;
    snprintf(nccl.version, sizeof nccl.version, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    if (v >= OLDEST) return true;
    return snprintf(nccl.why, sizeof nccl.why, "libnccl.so.2 is %s; 2.27 or newer is needed", nccl.version), false;
}

bool nccl_available(const char **why)
{
    if (!nccl.tried) nccl.loaded = load();
    nccl.tried = true;
    *why = nccl.why;
    return nccl.loaded;
}

const char *nccl_version(void)
{
    const char *why;
    return nccl_available(&why) ? nccl.version : "";
}

/* ---- failing ---- */

static Err stopped_error(NcclWorld *w)
{
    pthread_mutex_lock(&w->lock);
    Err err = err_set(w->kind, "%s", w->why);
    pthread_mutex_unlock(&w->lock);
    return err;
}

/* Device.failure of devices that worked for this world. */
static Err failure(void *user)
{
    NcclWorld *w = user;
    return w->stopped ? stopped_error(w) : ERR_OK;
}

/* Waits for a thread inside NCCL, whose polls end when the world is stopped; but not for ever: a launch may hang. */
static void abort_group(Group *g)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ABORT_LOCK_S;
    const bool locked = pthread_mutex_timedlock(&g->calling, &until) == 0;
    ncclComm_t comm = g->comm;
    g->comm = NULL;
    if (locked) pthread_mutex_unlock(&g->calling);
    if (comm) nccl.CommAbort(comm);
}

static Err stop(NcclWorld *w, Err kind, const char *why)
{
    pthread_mutex_lock(&w->lock);
    if (!w->stopped) {
        w->kind = kind;
        snprintf(w->why, sizeof w->why, "%s", why);
        w->stopped = true;
        for (int i = 0; i < GROUPS_MAX; i++)
            if (w->groups[i]) abort_group(w->groups[i]);
    }
    pthread_mutex_unlock(&w->lock);
    return stopped_error(w);
}

void nccl_world_abort(NcclWorld *w, const char *why)
{
    if (w) stop(w, ERR_PEER, why);
}

static Err kind_of(ncclResult_t rc)
{
    return rc == ncclRemoteError || rc == ncclSystemError ? ERR_PEER
           : rc == ncclInvalidUsage                       ? ERR_CONFIG
           : rc == ncclUnhandledCudaError                 ? ERR_DEVICE
                                                          : ERR_INTERNAL;
}

static const char *text_of(ncclResult_t rc, ncclComm_t comm, char text[WHY_BYTES])
{
    const char *last = nccl.GetLastError(comm);
    snprintf(text, WHY_BYTES, "%s%s%.160s", nccl.GetErrorString(rc), last && *last ? ": " : "", last ? last : "");
    return text;
}

/* Polls until what was begun on `comm` is through; `rc` is what the call returned. */
static ncclResult_t settle(NcclWorld *w, ncclComm_t comm, ncclResult_t rc, double until)
{
    while (rc == ncclInProgress && !w->stopped) {
        if (clock_s() > until) return rc;
        usleep(NAP_US);
        ncclResult_t asked = nccl.CommGetAsyncError(comm, &rc);
        if (asked != ncclSuccess) return asked;
    }
    return rc;
}

/* ---- the monitor ---- */

/* Tells the watch that a call is done. */
static void tell_done(Group *g, const Flight *f)
{
    if (f->kind == COMM_EXCHANGE) {
        watch_waits(g->watch, g->watch_id, WATCH_NOBODY);
        watch_exchange_completed(g->watch, g->watch_id);
    } else watch_completed(g->watch, g->watch_id, f->sequence + 1);
}

/* Counts what is finished. Under g->lock. */
static cudaError_t reap(Group *g)
{
    cudaError_t code = cudaSuccess;
    while (g->finished < g->issued) {
        const Flight *f = &g->flights[g->finished % FLIGHTS];
        code = cudaEventQuery(f->done);
        if (code != cudaSuccess) break;
        tell_done(g, f);
        g->finished++;
        g->since = 0;
    }
    cudaGetLastError(); /* cudaErrorNotReady is none */
    return code == cudaErrorNotReady ? cudaSuccess : code;
}

/* The oldest call runs from now on. Of an exchange the device does not say which message is missing: the first is
 * named. */
static void note_start(Group *g, const Flight *f)
{
    const CommMessage *m = &f->message;
    g->since = clock_s();
    if (f->kind == COMM_EXCHANGE && m->bytes)
        watch_waits_message(g->watch, g->watch_id, g->members[m->peer], m->send, m->what);
}

/* "reduce-tree of 5000 (call 7)", "exchange 7 (rank 3 is to send: activation of ...)" */
static void flight_text(const Group *g, const Flight *f, char *text, size_t size)
{
    char what[64];
    if (f->kind != COMM_EXCHANGE || !f->message.bytes) {
        snprintf(text, size, "%s of %lld (call %llu)", comm_kind_name(f->kind), (long long)f->count,
                 (unsigned long long)f->sequence);
        return;
    }
    message_text(f->message.what, what, sizeof what);
    snprintf(text, size, "exchange %llu (rank %d is to %s: %s)", (unsigned long long)f->sequence,
             g->members[f->message.peer], f->message.send ? "take" : "send", what);
}

/* Has the oldest call, its inputs there, run for too long? Says which. */
static bool overdue(Group *g, char *text)
{
    char call[160];
    bool late = false;
    pthread_mutex_lock(&g->lock);
    cudaError_t code = reap(g);
    const Flight *f = &g->flights[g->finished % FLIGHTS];
    if (!code && g->finished < g->issued) {
        if (!g->since && cudaEventQuery(f->ready) == cudaSuccess) note_start(g, f);
        late = g->since && clock_s() - g->since > g->world->o.timeout_s;
        cudaGetLastError();
    }
    if (late) {
        flight_text(g, f, call, sizeof call);
        snprintf(text, WHY_BYTES, "%s: %s did not finish in %.1f s", g->name, call, g->world->o.timeout_s);
    }
    pthread_mutex_unlock(&g->lock);
    return late;
}

/* NCCL's own finding about a group. A thread inside NCCL finds out for itself. */
static ncclResult_t async_error(Group *g, char *text)
{
    char reason[WHY_BYTES];
    ncclResult_t rc = ncclSuccess;
    if (pthread_mutex_trylock(&g->calling)) return ncclSuccess;
    if (g->comm && nccl.CommGetAsyncError(g->comm, &rc) == ncclSuccess && rc != ncclSuccess && rc != ncclInProgress)
        snprintf(text, WHY_BYTES, "%s: %.200s", g->name, text_of(rc, g->comm, reason));
    pthread_mutex_unlock(&g->calling);
    return rc == ncclInProgress ? ncclSuccess : rc;
}

static void look(NcclWorld *w)
{
    char text[WHY_BYTES];
    for (int i = 0; i < GROUPS_MAX && !w->stopped; i++) {
        pthread_mutex_lock(&w->lock); /* a group is closed under it */
        Err found = ERR_OK;
        Group *g = w->groups[i];
        ncclResult_t rc = g ? async_error(g, text) : ncclSuccess;
        if (rc) found = kind_of(rc);
        else if (g && overdue(g, text)) found = ERR_HANG;
        pthread_mutex_unlock(&w->lock);
        if (found) stop(w, found, text);
    }
}

static void *monitor(void *arg)
{
    NcclWorld *w = arg;
    cudaSetDevice(w->o.gpu);
    while (!w->closing && !w->stopped) {
        look(w);
        usleep(MONITOR_US);
    }
    return NULL;
}

/* ---- calls ---- */

/* Of a call inside a group: it is GroupEnd that begins. */
static ncclResult_t queued(ncclResult_t rc) { return rc == ncclInProgress ? ncclSuccess : rc; }

/* One group, in which all messages make progress together. Empty ones move nothing, on both ends. */
static ncclResult_t enqueue_messages(Group *g, const CommRequest *r)
{
    ncclResult_t rc = nccl.GroupStart();
    if (rc) return rc;
    for (int i = 0; i < r->message_count && !rc; i++) {
        const CommMessage *m = &r->messages[i];
        const size_t n = (size_t)m->bytes;
        if (!n) continue;
        rc = queued(m->send ? nccl.Send(m->data, n, ncclUint8, m->peer, g->comm, g->stream)
                            : nccl.Recv(m->data, n, ncclUint8, m->peer, g->comm, g->stream));
    }
    const ncclResult_t ended = nccl.GroupEnd();
    return rc ? rc : ended;
}

static PaddedRows padded_rows(const Group *g, const CommRequest *r)
{
    const CommRows *x = &r->rows;
    const int64_t slots = (g->size - 1) * x->most * r->elem_bytes;
    return (PaddedRows){ .local = x->local, .remote = x->remote, .local_offset = x->local_offset,
                         .remote_offset = x->remote_offset, .local_rows = r->count,
                         .remote_rows = x->remote_rows, .chunks = x->chunks, .stride = x->stride, .most = x->most,
                         .copies = (int)x->copies,
                         .row_bytes = r->elem_bytes, .members = g->size, .rank = g->host.rank, .back = x->back,
                         .out = x->room, .in = x->room + slots };
}

/* A slot to each other member, and one from each: as large as it can get, whatever is in it (padded_rows.h). */
static ncclResult_t enqueue_slots(Group *g, const CommRequest *r)
{
    const PaddedRows p = padded_rows(g, r);
    const size_t n = (size_t)(p.most * p.row_bytes);
    ncclResult_t rc = nccl.GroupStart();
    if (rc) return rc;
    for (int m = 0; m < p.members && n && !rc; m++) {
        if (m == p.rank) continue;
        rc = queued(nccl.Send(padded_slot(&p, p.out, m), n, ncclUint8, m, g->comm, g->stream));
        if (!rc) rc = queued(nccl.Recv(padded_slot(&p, p.in, m), n, ncclUint8, m, g->comm, g->stream));
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
    case COMM_ALL_TO_ALL_ROWS: return enqueue_slots(g, r);
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
        rc = settle(w, g->comm, enqueue(g, r), clock_s() + w->o.timeout_s);
    if (rc && rc != ncclInProgress) text_of(rc, g->comm, reason);
    pthread_mutex_unlock(&g->calling);
    if (w->stopped) return stopped_error(w);
    if (!rc) return ERR_OK;
    if (rc == ncclInProgress) snprintf(reason, sizeof reason, "no answer in %.1f s", w->o.timeout_s);
    snprintf(text, sizeof text, "%s: %s of %lld (call %llu): %.160s", g->name, comm_kind_name(r->kind),
             (long long)r->count, (unsigned long long)r->sequence, reason);
    return stop(w, rc == ncclInProgress ? ERR_HANG : kind_of(rc), text);
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
            err = stop(g->world, ERR_INTERNAL, text);
    }
    return err;
}

/* The calls of all members, over Gloo, before NCCL sees them: it would hang or add up the wrong things. */
static Err compare_calls(Group *g, const CommRequest *r)
{
    char text[WHY_BYTES];
    const int64_t words = sizeof(CommCall) / sizeof(int64_t);
    if (!r->check) return ERR_OK;
    g->host.watch = r->watch;
    g->host.watch_id = r->watch_id;
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
        err = stop(g->world, ERR_INTERNAL, text);
    return err;
}

/* A slot for one more call; there is always one unless the host is FLIGHTS calls ahead. */
static Err take_flight(Group *g, Flight **out)
{
    for (;;) {
        pthread_mutex_lock(&g->lock);
        cudaError_t code = g->issued - g->finished > FLIGHTS / 2 ? reap(g) : cudaSuccess;
        const bool room = g->issued - g->finished < FLIGHTS;
        *out = &g->flights[g->issued % FLIGHTS];
        pthread_mutex_unlock(&g->lock);
        TRY(cuda_check(code, "waiting for a communicator"));
        if (g->world->stopped) return stopped_error(g->world);
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

/* Rows into slots, or out of them. */
static Err move_rows(Group *g, const CommRequest *r, Err move(Stream *s, const PaddedRows *p))
{
    Stream own = { r->stream->dev, g->stream };
    if (r->kind != COMM_ALL_TO_ALL_ROWS) return ERR_OK;
    const PaddedRows p = padded_rows(g, r);
    TRY(move(&own, &p));
    return cuda_check(cudaGetLastError(), "moving rows to and from slots");
}

static void nap(void *world) { usleep((useconds_t)((NcclWorld *)world)->o.delay_ms * 1000); }

static Err put_in(Group *g, const CommRequest *r)
{
    Flight *f;
    TRY(compare_calls(g, r));
    TRY(take_flight(g, &f));
    *f = (Flight){ f->ready, f->done, r->kind, r->count, r->sequence, first_message(r) };
    TRY(cuda_check(cudaEventRecord(f->ready, r->stream->handle), "marking a point in the stream"));
    TRY(cuda_check(cudaStreamWaitEvent(g->stream, f->ready, 0), "waiting for an event"));
    TRY(move_rows(g, r, cuda_pack_rows));
    TRY(launch(g, r));
    TRY(move_rows(g, r, cuda_unpack_rows));
    if (g->world->o.delay_ms) TRY(cuda_check(cudaLaunchHostFunc(g->stream, nap, g->world), "delaying a call"));
    TRY(cuda_check(cudaEventRecord(f->done, g->stream), "marking a point in the stream"));
    TRY(cuda_event_mark(r->done, g->stream));
    pthread_mutex_lock(&g->lock);
    g->watch = r->watch;
    g->watch_id = r->watch_id;
    g->issued++;
    pthread_mutex_unlock(&g->lock);
    return ERR_OK;
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
    if (!w->stopped) rc = settle(w, comm, rc, clock_s() + LEAVE_S);
    if (rc == ncclSuccess) nccl.CommDestroy(comm);
    else nccl.CommAbort(comm);
}

/* Waits for the device to be through. */
static void leave(Group *g)
{
    NcclWorld *w = g->world;
    for (bool busy = true; busy && !w->stopped;) {
        pthread_mutex_lock(&g->lock);
        busy = !reap(g) && g->finished < g->issued;
        pthread_mutex_unlock(&g->lock);
        if (busy) usleep(NAP_US);
    }
    pthread_mutex_lock(&g->calling);
    ncclComm_t comm = g->comm;
    g->comm = NULL;
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

static Err connected(NcclWorld *w, const char *name, ncclComm_t comm, ncclResult_t rc)
{
    char reason[WHY_BYTES];
    if (rc == ncclSuccess) return ERR_OK;
    if (w->stopped) return stopped_error(w);
    if (rc == ncclInProgress)
        return err_set(ERR_RENDEZVOUS, "%s: NCCL did not connect the ranks within %.1f s", name, w->o.timeout_s),
               err_hint("NCCL_DEBUG=INFO tells what it tries; NCCL_SOCKET_IFNAME names the network interface");
    Err kind = kind_of(rc);
    return err_set(kind == ERR_PEER ? ERR_RENDEZVOUS : kind, "%s: NCCL: %s", name, text_of(rc, comm, reason)),
           err_hint("NCCL_DEBUG=INFO tells more");
}

/* A split takes all ranks of the world, those without a group, too. */
static Err split_for_others(NcclWorld *w, const char *name)
{
    ncclComm_t none = NULL;
    const double until = clock_s() + w->o.timeout_s;
    return connected(w, name, NULL,
                     settle(w, w->base, nccl.CommSplit(w->base, NCCL_SPLIT_NOCOLOR, 0, &none, NULL), until));
}

static Err split(Group *g, const int *members, int rank, NcclCtas ctas)
{
    NcclWorld *w = g->world;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.commName = g->name;
    if (ctas.min) config.minCTAs = ctas.min;
    if (ctas.max) config.maxCTAs = ctas.max;
    const double until = clock_s() + w->o.timeout_s;
    ncclResult_t rc = nccl.CommSplit(w->base, members[0], rank, &g->comm, &config);
    rc = settle(w, w->base, rc, until); /* g->comm is set now */
    if (rc == ncclSuccess) rc = settle(w, g->comm, ncclInProgress, until);
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
                   NcclCtas ctas)
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
    c->pads_rows = true;
    err = make_parts(g);
    if (!err) err = split(g, members, c->rank, ctas);
    int slot = 0;
    pthread_mutex_lock(&w->lock);
    while (slot < GROUPS_MAX && w->groups[slot]) slot++;
    if (!err && slot < GROUPS_MAX) w->groups[slot] = g;
    pthread_mutex_unlock(&w->lock);
    if (!err && slot == GROUPS_MAX) err = err_set(ERR_CONFIG, "more than %d groups", (int)GROUPS_MAX);
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
            return err_set(ERR_RENDEZVOUS, "NCCL finds no network interface: %s", text_of(rc, NULL, reason)),
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
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.commName = "all";
    TRY(cuda_check(cudaSetDevice(w->o.gpu), "choosing the GPU"));
    TRY(exchange_id(&w->o, &id));
    const double until = clock_s() + w->o.timeout_s;
    ncclResult_t rc = nccl.CommInitRankConfig(&w->base, w->o.size, id, w->o.rank, &config);
    return connected(w, "all", w->base, settle(w, w->base, rc, until));
}

Err nccl_world_open(const NcclOptions *o, NcclWorld **out)
{
    const char *why;
    *out = NULL;
    if (!nccl_available(&why))
        return err_set(ERR_CONFIG, "NCCL is not to be had: %s", why),
               err_hint("install libnccl2, or name its folder in LD_LIBRARY_PATH");
    if (getenv("NCCL_COMM_ID"))
        return err_set(ERR_CONFIG, "NCCL_COMM_ID is set: ranks would meet there, and not at the run's own store"),
               err_hint("unset NCCL_COMM_ID");
    /* kernels of several groups start in the order of issue on every rank: none waits for another's multiprocessors */
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    NcclWorld *w = calloc(1, sizeof *w);
    if (!w) return err_set(ERR_MEMORY, "no memory for the ranks' communicators");
    w->o = *o;
    pthread_mutex_init(&w->lock, NULL);
    Err err = connect_all(w);
    if (!err) {
        w->monitored = pthread_create(&w->monitor, NULL, monitor, w) == 0;
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
