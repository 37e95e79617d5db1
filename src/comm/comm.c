/* The calls common to all tables, and the self and null tables; thread ranks are in threads.c. */
#include "comm/comm.h"

#include <string.h>

static Err submit_self(Comm *c, const CommRequest *r)
{
    (void)c;
    if (r->dst != r->src && r->src && r->count) memmove(r->dst, r->src, (size_t)(r->count * r->elem_bytes));
    event_complete(r->done, ERR_OK, "");
    return ERR_OK;
}

static Err submit_null(Comm *c, const CommRequest *r)
{
    (void)c;
    event_complete(r->done, ERR_OK, "");
    return ERR_OK;
}

static void close_nothing(Comm *c) { (void)c; }

static const CommTable self_table = { "self", submit_self, close_nothing };
static const CommTable null_table = { "null", submit_null, close_nothing };

static void open_plain(Comm *c, const CommTable *table, const char *name, int rank, int size)
{
    memset(c, 0, sizeof *c);
    c->table = table;
    c->name = name;
    c->rank = rank;
    c->size = size;
    event_init(&c->own);
}

void comm_open_self(Comm *c, const char *name) { open_plain(c, &self_table, name, 0, 1); }

void comm_open_null(Comm *c, const char *name, int rank, int size)
{
    open_plain(c, &null_table, name, rank, size);
}

void comm_close(Comm *c)
{
    if (!c->table) return;
    c->table->close(c);
    event_release(&c->own);
    memset(c, 0, sizeof *c);
}

/* Bytes this rank has to send at the least, per kind: gather forwards n-1 blocks, all-reduce moves twice that. */
static int64_t payload(const Comm *c, const CommRequest *r)
{
    int64_t bytes = r->count * r->elem_bytes, others = c->size - 1;
    if (r->kind == COMM_ALL_GATHER || r->kind == COMM_REDUCE_SCATTER_TREE_F32) return bytes * others;
    return 2 * bytes * others / c->size;
}

static Err start(Comm *c, Stream *s, CommRequest r, Event *done)
{
    r.sequence = c->sequence++;
    r.done = done ? done : &c->own;
    c->calls[r.kind]++;
    c->sent_bytes += payload(c, &r);
    event_reset(r.done);
    TRY((s->dev->is_null ? &null_table : c->table)->submit(c, &r));
    return done ? ERR_OK : stream_wait(s, &c->own);
}

Err comm_all_gather(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done)
{
    int64_t n = tensor_count(src);
    ASSERT(tensor_count(dst) == n * c->size && dst.dtype == src.dtype);
    return start(c, s, (CommRequest){ COMM_ALL_GATHER, dst.data, src.data, n, dtype_size(src.dtype), 0, 0 },
                 done);
}

Err comm_reduce_tree_f32(Comm *c, Stream *s, Tensor buf, Event *done)
{
    ASSERT(buf.dtype == F32 || c->size == 1);
    return start(c, s, (CommRequest){ COMM_REDUCE_TREE_F32, buf.data, buf.data, tensor_count(buf), 4, 0, 0 },
                 done);
}

Err comm_reduce_scatter_tree_f32(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done)
{
    int64_t n = tensor_count(dst);
    ASSERT(tensor_count(src) == n * c->size && dst.dtype == F32 && src.dtype == F32);
    return start(c, s, (CommRequest){ COMM_REDUCE_SCATTER_TREE_F32, dst.data, src.data, n, 4, 0, 0 }, done);
}

Err comm_sum_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done)
{
    return start(c, s, (CommRequest){ COMM_SUM_I64, buf, buf, count, 8, 0, 0 }, done);
}

Err comm_max_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done)
{
    return start(c, s, (CommRequest){ COMM_MAX_I64, buf, buf, count, 8, 0, 0 }, done);
}

Err comm_barrier(Comm *c, Stream *s)
{
    return start(c, s, (CommRequest){ COMM_BARRIER, NULL, NULL, 0, 1, 0, 0 }, NULL);
}
