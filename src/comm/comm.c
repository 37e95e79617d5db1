/* The calls common to all tables, and the self table. */
#include "comm/comm.h"

#include <stdio.h>
#include <string.h>

#include "device/digest.h"

static const char *const kind_names[COMM_KIND_COUNT] = {
    [COMM_ALL_GATHER] = "all-gather",
    [COMM_REDUCE_TREE_F32] = "reduce-tree",
    [COMM_REDUCE_SCATTER_TREE_F32] = "reduce-scatter-tree",
    [COMM_REDUCE_SCATTER_I64] = "reduce-scatter-i64",
    [COMM_SUM_I64] = "sum-i64",
    [COMM_MAX_I64] = "max-i64",
    [COMM_BARRIER] = "barrier",
    [COMM_ALL_TO_ALL_ROWS] = "all-to-all",
    [COMM_EXCHANGE] = "exchange",
};

const char *comm_kind_name(CommKind kind) { return kind_names[kind]; }

CommCall comm_call(const CommRequest *r)
{
    return (CommCall){ r->sequence, r->count, r->elem_bytes, r->kind, r->rows.back };
}

static void describe(const CommCall *call, char *text, size_t size)
{
    bool known = call->kind >= 0 && call->kind < COMM_KIND_COUNT;
    snprintf(text, size, "%s%s of %lld x %lld bytes (call %llu)",
             known ? comm_kind_name((CommKind)call->kind) : "unknown call", call->back ? " back" : "",
             (long long)call->count, (long long)call->elem_bytes, (unsigned long long)call->sequence);
}

bool comm_same_calls(const char *name, const CommCall *calls, int size, char *message, size_t message_size)
{
    for (int p = 1; p < size; p++) {
        if (!memcmp(&calls[p], &calls[0], sizeof *calls)) continue;
        char first[80], other[80];
        describe(&calls[0], first, sizeof first);
        describe(&calls[p], other, sizeof other);
        snprintf(message, message_size, "%s: ranks issued different calls: member 0 %s, member %d %s", name, first, p,
                 other);
        return false;
    }
    return true;
}

bool comm_same_message(const char *name, int from, int to, const CommNote ends[2], char *text, size_t size)
{
    char what[2][64];
    if (!memcmp(&ends[0], &ends[1], sizeof *ends)) return true;
    for (int i = 0; i < 2; i++) message_text(ends[i].what, what[i], sizeof what[i]);
    snprintf(text, size,
             "%s: message %llu from member %d to member %d: sent as %s of %lld bytes, received as %s of %lld", name,
             (unsigned long long)ends[0].number, from, to, what[0], (long long)ends[0].bytes, what[1],
             (long long)ends[1].bytes);
    return false;
}

static CommPiece rows_piece(const CommRequest *r, bool local, int size, int member, int64_t chunk)
{
    const CommRows *x = &r->rows;
    const int64_t i = local ? member / x->copies * x->chunks + chunk : chunk * size + member;
    const int64_t *offset = (local ? x->local_offset : x->remote_offset) + i * x->stride;
    const int64_t array = local && x->back ? member % x->copies * r->count : 0;
    return (CommPiece){ (local ? x->local : x->remote) + (array + offset[0]) * r->elem_bytes,
                        (offset[x->stride] - offset[0]) * r->elem_bytes };
}

CommPiece comm_piece_out(const CommRequest *r, int size, int member, int64_t chunk)
{
    return rows_piece(r, !r->rows.back, size, member, chunk);
}

CommPiece comm_piece_in(const CommRequest *r, int size, int member, int64_t chunk)
{
    return rows_piece(r, r->rows.back, size, member, chunk);
}

/* (of a group of one every reduction, gather and scatter is a copy, and so is what it sends itself) */
static Err submit_self(Comm *c, const CommRequest *r)
{
    const int64_t count =
        r->kind == COMM_ALL_TO_ALL_ROWS ? r->rows.local_offset[r->rows.chunks * r->rows.stride] : r->count;
    (void)c;
    if (r->dst != r->src && r->src && count) memmove(r->dst, r->src, (size_t)(count * r->elem_bytes));
    r->done->idle = true;
    event_complete(r->done, ERR_OK, "");
    return ERR_OK;
}

static void close_nothing(Comm *c) { (void)c; }

static const CommTable self_table = { "self", submit_self, close_nothing };

void comm_init(Comm *c, const CommTable *table, const char *name, int rank, int size, void *impl)
{
    *c = (Comm){ .table = table, .name = name, .rank = rank, .size = size, .impl = impl };
    event_init(&c->own);
    event_init(&c->pending);
    for (int i = 0; i < COMM_BESIDE_MOST; i++) event_init(&c->beside[i]);
}

void comm_open_self(Comm *c, const char *name) { comm_init(c, &self_table, name, 0, 1, NULL); }

void comm_close(Comm *c)
{
    if (!c->table) return;
    c->table->close(c);
    event_release(&c->own);
    event_release(&c->pending);
    for (int i = 0; i < COMM_BESIDE_MOST; i++) event_release(&c->beside[i]);
    memset(c, 0, sizeof *c);
}

void comm_check_calls(Comm *c, bool on) { c->check = on; }

void comm_observe(Comm *c, CommObserver observer) { c->observer = observer; }

/* Bytes this rank has to send at the least, per kind: gather forwards n-1 blocks, all-reduce moves twice that. */
static int64_t payload(const Comm *c, const CommRequest *r)
{
    const int64_t count = r->kind == COMM_ALL_TO_ALL_ROWS && r->rows.even ? r->rows.even : r->count;
    const int64_t bytes = count * r->elem_bytes, others = c->size - 1;
    if (r->kind == COMM_EXCHANGE) return bytes;
    if (r->kind == COMM_ALL_TO_ALL_ROWS) return bytes * r->rows.copies * others / c->size;
    if (r->kind == COMM_ALL_GATHER || r->kind == COMM_REDUCE_SCATTER_TREE_F32 || r->kind == COMM_REDUCE_SCATTER_I64)
        return bytes * others;
    return 2 * bytes * others / c->size;
}

/* The number that observers count by. */
static uint64_t number_of(const CommRequest *r) { return r->kind == COMM_EXCHANGE ? 0 : r->sequence + 1; }

void comm_tell_completed(const CommRequest *r)
{
    if (!r->carrier) observer_completed(r->observer, number_of(r));
}

/* A call, as it is made and made again by what was recorded (device/recorder.h). */
typedef struct {
    Comm *comm;
    Event *done;
    CommRequest request;
} Issue;

static Err issue(Stream *s, const void *args)
{
    const Issue *i = args;
    Comm *c = i->comm;
    CommRequest r = i->request;
    Event *done = i->done;
    const bool exchange = r.kind == COMM_EXCHANGE;
    r.sequence = exchange ? c->exchanges++ : c->sequence++;
    r.done = done ? done : &c->own;
    r.stream = s;
    r.check = c->check;
    r.observer = c->observer;
    r.carrier = c->carrier;
    if (!r.carrier) observer_issued(r.observer, number_of(&r));
    const CommRows *x = &r.rows;
    int64_t sent = payload(c, &r);
    if (r.kind == COMM_ALL_TO_ALL_ROWS) c->rows_most += (x->back ? x->remote_rows : r.count * x->copies) * r.elem_bytes;
    c->calls[r.kind]++;
    c->bytes[r.kind] += sent;
    c->sent_bytes += sent;
    c->last_bytes = sent;
    event_reset(r.done);
    TRY(c->table->submit(c, &r));
    return done ? ERR_OK : stream_wait(s, &c->own);
}

static uint64_t rows_digest(uint64_t digest, const CommRows *x)
{
    digest = digest_pointer(digest_pointer(digest, x->local), x->remote);
    digest = digest_pointer(digest_pointer(digest, x->local_offset), x->remote_offset);
    digest = digest_int(digest_int(digest_int(digest, x->chunks), x->stride), x->copies);
    digest = digest_int(digest_int(digest_int(digest, x->back), x->remote_rows), x->even);
    return digest_pointer(digest, x->known);
}

static uint64_t message_digest(uint64_t digest, const CommMessage *m)
{
    digest = digest_int(digest_int(digest_pointer(digest, m->data), m->bytes), m->peer);
    digest = digest_int(digest_int(digest, m->send), m->what.kind);
    return digest_int(digest_int(digest, m->what.stage), m->what.microbatch);
}

static uint64_t issue_digest(const Issue *i)
{
    const CommRequest *r = &i->request;
    uint64_t digest = digest_pointer(digest_pointer(digest_int(DIGEST_EMPTY, r->kind), i->comm), i->done);
    digest = digest_pointer(digest_pointer(digest, r->dst), r->src);
    digest = digest_int(digest_int(digest, r->count), r->elem_bytes);
    if (r->kind == COMM_ALL_TO_ALL_ROWS) digest = rows_digest(digest, &r->rows);
    for (int k = 0; k < r->message_count; k++) digest = message_digest(digest, &r->messages[k]);
    return digest;
}

/* (A group of one gives the stream nothing. What carries another's call is part of that.) */
static Err start(Comm *c, Stream *s, CommRequest r, Event *done)
{
    const Issue i = { c, done, r };
    if (c->size == 1 || c->carrier) return issue(s, &i);
    return device_call(s, issue, &i, sizeof i, issue_digest(&i));
}

Err comm_all_gather(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done)
{
    int64_t n = tensor_count(src);
    ASSERT(tensor_count(dst) == n * c->size && dst.dtype == src.dtype);
    return start(c, s, (CommRequest){ COMM_ALL_GATHER, dst.data, src.data, n, dtype_size(src.dtype) }, done);
}

Err comm_reduce_tree_f32(Comm *c, Stream *s, Tensor buf, Event *done)
{
    ASSERT(buf.dtype == F32 || c->size == 1);
    return start(c, s, (CommRequest){ COMM_REDUCE_TREE_F32, buf.data, buf.data, tensor_count(buf), 4 }, done);
}

Err comm_reduce_scatter_tree_f32(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done)
{
    int64_t n = tensor_count(dst);
    ASSERT(tensor_count(src) == n * c->size && dst.dtype == F32 && src.dtype == F32);
    return start(c, s, (CommRequest){ COMM_REDUCE_SCATTER_TREE_F32, dst.data, src.data, n, 4 }, done);
}

Err comm_reduce_scatter_i64(Comm *c, Stream *s, int64_t *dst, const int64_t *src, int64_t count, Event *done)
{
    return start(c, s, (CommRequest){ COMM_REDUCE_SCATTER_I64, dst, src, count, 8 }, done);
}

Err comm_sum_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done)
{
    return start(c, s, (CommRequest){ COMM_SUM_I64, buf, buf, count, 8 }, done);
}

Err comm_max_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done)
{
    return start(c, s, (CommRequest){ COMM_MAX_I64, buf, buf, count, 8 }, done);
}

Err comm_barrier(Comm *c, Stream *s) { return start(c, s, (CommRequest){ COMM_BARRIER, NULL, NULL, 0, 1 }, NULL); }

Err comm_all_to_all_rows(Comm *c, Stream *s, const CommRows *rows, int64_t count, int64_t row_bytes, Event *done)
{
    return start(c, s,
                 (CommRequest){ .kind = COMM_ALL_TO_ALL_ROWS,
                                .dst = rows->back ? rows->local : rows->remote,
                                .src = rows->back ? rows->remote : rows->local,
                                .count = count,
                                .elem_bytes = row_bytes,
                                .rows = *rows },
                 done);
}

Err comm_exchange(Comm *c, Stream *s, const CommMessage *messages, int count, Event *done)
{
    CommRequest r = { .kind = COMM_EXCHANGE, .elem_bytes = 1, .message_count = count };
    ASSERT(count >= 0 && count <= COMM_MESSAGES_MAX);
    for (int i = 0; i < count; i++) {
        const CommMessage *m = &messages[i];
        ASSERT(m->peer >= 0 && m->peer < c->size && m->peer != c->rank && m->bytes >= 0);
        r.messages[i] = *m;
        if (m->send) r.count += m->bytes;
    }
    return start(c, s, r, done);
}
