/*
 * Communicators over device memory for ranks that NCCL cannot serve; see comm/gpu.h. A request on the group's thread,
 * in pieces of what fits into the pinned memory:
 *
 *   wait for the caller's stream | copy to pinned memory | the same call over Gloo | copy back | mark the event
 *
 * The messages of an exchange are not cut: all of them lie in pinned memory, as much as that takes, so that each goes
 * when its other end is there. (In pieces through less memory, one would wait for pieces of another.) Rows from all to
 * all lie there, too, with the offsets that say how many there are.
 *
 * (Not from host functions of a stream: those share one thread of the driver, on which two groups would wait for
 * each other.)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/gpu.h"
#include "device_cuda.h"

enum { QUEUE_SIZE = 64, STAGE_BYTES = 4 << 20 };

typedef struct {
    CommRequest request;
    cudaEvent_t ready; /* in the caller's stream: the inputs are there */
} Job;

typedef struct {
    Comm host;
    int gpu;
    cudaStream_t stream;
    char *in, *out; /* pinned, STAGE_BYTES each */
    char *messages;    /* pinned: of an exchange, or rows; grows */
    int64_t capacity;
    Event arrived;
    pthread_t worker;
    bool started;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    Job queue[QUEUE_SIZE];
    int64_t head, tail;
    bool closing;
    Err failed; /* the first failure, which all later requests have too */
} Staged;

/* ---- one request ---- */

static bool gathers(const CommRequest *r) { return r->kind == COMM_ALL_GATHER; }

static bool scatters(const CommRequest *r)
{
    return r->kind == COMM_REDUCE_SCATTER_TREE_F32 || r->kind == COMM_REDUCE_SCATTER_I64;
}

/* Rows of `bytes`, `pitch` apart on the device, one behind the other in pinned memory. */
static Err copy_rows(Staged *g, void *device, void *pinned, int rows, int64_t pitch, int64_t bytes, bool to_host)
{
    void *to = to_host ? pinned : device, *from = to_host ? device : pinned;
    int64_t to_pitch = to_host ? bytes : pitch, from_pitch = to_host ? pitch : bytes;
    return cuda_check(cudaMemcpy2DAsync(to, (size_t)to_pitch, from, (size_t)from_pitch, (size_t)bytes, (size_t)rows,
                                        to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, g->stream),
                      "staging a message");
}

static Tensor bytes_of(void *p, int64_t n, int64_t elem_bytes)
{
    const DType dtype = elem_bytes == 8 ? I64 : elem_bytes == 4 ? F32 : BF16;
    return (Tensor){ .data = p, .dtype = dtype, .ndim = 1, .dim = { n }, .ld = n };
}

/* The call on pinned memory; `n` elements of each rank's share. */
static Err call_host(Staged *g, const CommRequest *r, int64_t n)
{
    Comm *c = &g->host;
    Tensor in = bytes_of(g->in, scatters(r) ? n * c->size : n, r->elem_bytes);
    Tensor out = bytes_of(g->out, gathers(r) ? n * c->size : n, r->elem_bytes);
    int64_t *numbers = (int64_t *)g->in;
    Event *e = &g->arrived;
    switch (r->kind) {
    case COMM_ALL_GATHER: TRY(comm_all_gather(c, r->stream, out, in, e)); break;
    case COMM_REDUCE_TREE_F32: TRY(comm_reduce_tree_f32(c, r->stream, in, e)); break;
    case COMM_REDUCE_SCATTER_TREE_F32: TRY(comm_reduce_scatter_tree_f32(c, r->stream, out, in, e)); break;
    case COMM_REDUCE_SCATTER_I64:
        TRY(comm_reduce_scatter_i64(c, r->stream, (int64_t *)g->out, numbers, n, e));
        break;
    case COMM_SUM_I64: TRY(comm_sum_i64(c, r->stream, numbers, n, e)); break;
    case COMM_MAX_I64: TRY(comm_max_i64(c, r->stream, numbers, n, e)); break;
    case COMM_BARRIER: TRY(comm_sum_i64(c, r->stream, numbers, 1, e)); break;
    case COMM_ALL_TO_ALL_ROWS:
    case COMM_EXCHANGE:
    case COMM_KIND_COUNT: break;
    }
    return event_wait(e, 0); /* Gloo has the deadline */
}

/* Elements [first, first + n) of each rank's share. */
static Err run_piece(Staged *g, const CommRequest *r, int64_t first, int64_t n)
{
    const int64_t bytes = n * r->elem_bytes, offset = first * r->elem_bytes, pitch = r->count * r->elem_bytes;
    const int size = g->host.size, rows_in = scatters(r) ? size : 1, rows_out = gathers(r) ? size : 1;
    if (bytes) TRY(copy_rows(g, (char *)r->src + offset, g->in, rows_in, rows_in > 1 ? pitch : bytes, bytes, true));
    TRY(cuda_check(cudaStreamSynchronize(g->stream), "staging a message"));
    TRY(call_host(g, r, n));
    char *from = gathers(r) || scatters(r) ? g->out : g->in;
    if (bytes) TRY(copy_rows(g, (char *)r->dst + offset, from, rows_out, rows_out > 1 ? pitch : bytes, bytes, false));
    return cuda_check(cudaStreamSynchronize(g->stream), "staging a message");
}

static Err run_collective(Staged *g, const CommRequest *r)
{
    const int64_t share = STAGE_BYTES / g->host.size / 8 * 8 / r->elem_bytes;
    for (int64_t first = 0; first < r->count || first == 0; first += share)
        TRY(run_piece(g, r, first, r->count - first < share ? r->count - first : share));
    return ERR_OK;
}

/* ---- exchanges ---- */

/* Room for `bytes` of messages. After the first steps there is. */
static Err reserve(Staged *g, int64_t bytes)
{
    if (bytes <= g->capacity) return ERR_OK;
    if (g->messages) cudaFreeHost(g->messages);
    g->messages = NULL;
    g->capacity = 0;
    TRY(cuda_check(cudaMallocHost((void **)&g->messages, (size_t)bytes), "taking pinned host memory"));
    g->capacity = bytes;
    return ERR_OK;
}

static int64_t aligned(int64_t bytes) { return (bytes + 255) & ~(int64_t)255; }

/* The messages, in places in pinned memory. */
static Err place_messages(Staged *g, const CommRequest *r, CommMessage *staged)
{
    int64_t end = 0, at = 0;
    for (int i = 0; i < r->message_count; i++) end += aligned(r->messages[i].bytes);
    TRY(reserve(g, end));
    for (int i = 0; i < r->message_count; at += aligned(r->messages[i++].bytes)) {
        staged[i] = r->messages[i];
        staged[i].data = r->messages[i].bytes ? g->messages + at : NULL; /* (if all are empty there is no memory) */
    }
    return ERR_OK;
}

/* Those that are sent, or received, between the device and pinned memory. */
static Err copy_messages(Staged *g, const CommRequest *r, const CommMessage *staged, bool sent)
{
    for (int i = 0; i < r->message_count; i++) {
        const CommMessage *m = &r->messages[i];
        if (m->send != sent || !m->bytes) continue;
        TRY(cuda_check(cudaMemcpyAsync(sent ? staged[i].data : m->data, sent ? m->data : staged[i].data,
                                       (size_t)m->bytes, sent ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                                       g->stream),
                       "staging a message"));
    }
    return cuda_check(cudaStreamSynchronize(g->stream), "staging a message");
}

static Err run_exchange(Staged *g, const CommRequest *r)
{
    CommMessage staged[COMM_MESSAGES_MAX];
    TRY(place_messages(g, r, staged));
    TRY(copy_messages(g, r, staged, true));
    TRY(comm_exchange(&g->host, r->stream, staged, r->message_count, &g->arrived));
    TRY(event_wait(&g->arrived, 0)); /* Gloo has the deadline */
    return copy_messages(g, r, staged, false);
}

/* ---- rows from all to all ---- */

static Err copy_bytes(Staged *g, void *to, const void *from, int64_t bytes, bool to_host)
{
    if (!bytes) return ERR_OK;
    const enum cudaMemcpyKind kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    return cuda_check(cudaMemcpyAsync(to, from, (size_t)bytes, kind, g->stream), "staging rows");
}

static Err copied(Staged *g) { return cuda_check(cudaStreamSynchronize(g->stream), "staging rows"); }

/* Both lists of offsets, `list` bytes each, to the beginning of pinned memory; bytes: of the rows of each tensor. */
static Err read_offsets(Staged *g, const CommRequest *r, int64_t list, int64_t bytes[2])
{
    const CommRows *x = &r->rows;
    const int64_t *offset[2] = { x->local_offset, x->remote_offset };
    const int64_t members[2] = { g->host.size / x->copies, g->host.size };
    for (int i = 0; i < 2; i++) {
        const int64_t n = members[i] * x->chunks * x->stride + 1;
        TRY(copy_bytes(g, g->messages + i * list, offset[i], n * 8, true));
        TRY(copied(g));
        bytes[i] = ((const int64_t *)(g->messages + i * list))[n - 1] * r->elem_bytes;
    }
    return ERR_OK;
}

/* Offsets, rows of local, rows of remote: as many as there are. */
static Err run_rows(Staged *g, const CommRequest *r)
{
    const int64_t list = aligned((g->host.size * r->rows.chunks * r->rows.stride + 1) * 8);
    const int64_t arrays = r->rows.back ? r->rows.copies : 1, pitch = r->count * r->elem_bytes; /* of local */
    int64_t need = 2 * list, bytes[2];
    do { /* again, where there was room for the offsets alone */
        TRY(reserve(g, need));
        TRY(read_offsets(g, r, list, bytes));
        need = 2 * list + aligned(arrays > 1 ? arrays * pitch : bytes[0]) + aligned(bytes[1]);
    } while (need > g->capacity);
    CommRows host = r->rows;
    host.local_offset = (const int64_t *)g->messages;
    host.remote_offset = (const int64_t *)(g->messages + list);
    host.local = g->messages + 2 * list;
    host.remote = host.local + aligned(arrays > 1 ? arrays * pitch : bytes[0]);
    const int out = host.back, in = !host.back;
    TRY(copy_bytes(g, out ? host.remote : host.local, r->src, bytes[out], true));
    TRY(copied(g));
    TRY(comm_all_to_all_rows(&g->host, r->stream, &host, r->count, r->elem_bytes, &g->arrived));
    TRY(event_wait(&g->arrived, 0)); /* Gloo has the deadline */
    for (int64_t i = 0; i < arrays; i++)
        TRY(copy_bytes(g, (char *)r->dst + i * pitch, (in ? host.remote : host.local) + i * pitch, bytes[in], false));
    return copied(g);
}

static Err run_request(Staged *g, const CommRequest *r)
{
    if (r->kind == COMM_EXCHANGE) return run_exchange(g, r);
    return r->kind == COMM_ALL_TO_ALL_ROWS ? run_rows(g, r) : run_collective(g, r);
}

static Err run_job(Staged *g, const Job *job)
{
    const CommRequest *r = &job->request;
    g->host.check = r->check;
    g->host.observer = r->observer;
    TRY(cuda_check(cudaStreamWaitEvent(g->stream, job->ready, 0), "staging a message"));
    TRY(run_request(g, r));
    comm_tell_completed(r);
    return cuda_event_mark(r->done, g->stream);
}

static void *work(void *arg)
{
    Staged *g = arg;
    cudaSetDevice(g->gpu);
    for (;;) {
        pthread_mutex_lock(&g->lock);
        while (g->head == g->tail && !g->closing) pthread_cond_wait(&g->changed, &g->lock);
        const bool end = g->head == g->tail;
        const Job *job = &g->queue[g->head % QUEUE_SIZE];
        pthread_mutex_unlock(&g->lock);
        if (end) return NULL;
        Err err = g->failed ? g->failed : run_job(g, job);
        g->failed = err;
        event_complete(job->request.done, err, err ? err_message() : "");
        pthread_mutex_lock(&g->lock);
        g->head++;
        pthread_cond_broadcast(&g->changed);
        pthread_mutex_unlock(&g->lock);
    }
}

static Err submit(Comm *c, const CommRequest *r)
{
    Staged *g = c->impl;
    pthread_mutex_lock(&g->lock);
    while (g->tail - g->head == QUEUE_SIZE) pthread_cond_wait(&g->changed, &g->lock);
    Job *job = &g->queue[g->tail % QUEUE_SIZE];
    pthread_mutex_unlock(&g->lock); /* the slot is nobody's, and only this thread adds */
    job->request = *r;
    const Err err = cuda_check(cudaEventRecord(job->ready, r->stream->handle), "marking a point in the stream");
    if (err) return event_complete(r->done, err, err_message()), err; /* somebody may wait for it */
    pthread_mutex_lock(&g->lock);
    g->tail++;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    return ERR_OK;
}

/* ---- life ---- */

static void close_staged(Comm *c)
{
    Staged *g = c->impl;
    pthread_mutex_lock(&g->lock);
    g->closing = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    if (g->started) pthread_join(g->worker, NULL);
    comm_close(&g->host);
    for (int i = 0; i < QUEUE_SIZE; i++)
        if (g->queue[i].ready) cudaEventDestroy(g->queue[i].ready);
    if (g->stream) cudaStreamDestroy(g->stream);
    if (g->in) cudaFreeHost(g->in);
    if (g->out) cudaFreeHost(g->out);
    if (g->messages) cudaFreeHost(g->messages);
    event_release(&g->arrived);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static const CommTable staged_table = { "staged", submit, close_staged };

static Err open_parts(Staged *g)
{
    TRY(cuda_check(cudaSetDevice(g->gpu), "choosing the GPU"));
    TRY(cuda_check(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking), "creating a stream"));
    TRY(cuda_check(cudaMallocHost((void **)&g->in, STAGE_BYTES), "taking pinned host memory"));
    TRY(cuda_check(cudaMallocHost((void **)&g->out, STAGE_BYTES), "taking pinned host memory"));
    memset(g->in, 0, STAGE_BYTES);
    for (int i = 0; i < QUEUE_SIZE; i++)
        TRY(cuda_check(cudaEventCreateWithFlags(&g->queue[i].ready, cudaEventDisableTiming), "making an event"));
    if (pthread_create(&g->worker, NULL, work, g)) return err_set(ERR_MEMORY, "cannot start a thread");
    g->started = true;
    return ERR_OK;
}

Err comm_open_staged(int gpu, GlooWorld *gloo, Comm *c, const char *name, const int *members, int size)
{
    if (size <= 1) return comm_open_self(c, name), ERR_OK;
    Staged *g = calloc(1, sizeof *g);
    if (!g) return err_set(ERR_MEMORY, "no memory for communicator '%s'", name);
    g->gpu = gpu;
    Err err = comm_open_gloo(gloo, &g->host, name, members, size);
    if (err) return free(g), err;
    g->host.carrier = true;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, NULL);
    event_init(&g->arrived);
    comm_init(c, &staged_table, name, g->host.rank, size, g);
    err = open_parts(g);
    if (err) comm_close(c);
    return err;
}
