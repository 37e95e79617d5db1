/*
 * Sums over ranks: of fp32 values by the communicator (comm.h), of 16-bit values here. Those travel as they are, and
 * each rank sums a part of the rows itself, in fp32 and in the order of ranks, and rounds the sum once:
 *
 *   rank 0  x0 x1 x2 x3  |  part i of all ranks        x0 of 0, 1, 2, 3  |  y0 = ((x0 + x0) + (x0 + x0))
 *   rank 1  x0 x1 x2 x3  |  goes to rank i        -->  x1 of 0, 1, 2, 3  |  y1 = ...
 *
 * With sharded rows that is all; else the sums go to all ranks. So 16-bit sums have the bits of sums in fp32, whatever
 * carries them, for the bytes of 16.
 */
#include "layer/internal.h"

/* ---- parts and their messages ---- */

/* x as rows: what is cut into a part for each rank. */
static Tensor rows_of(Tensor x)
{
    const int64_t columns = x.dim[x.ndim - 1];
    return tensor_reshape(x, tensor_count(x) / columns, columns);
}

/* Rows are cut into as many parts as there are ranks; some parts may have a row more. */
static Tensor equal_part(Tensor rows, int ranks, int i)
{
    const int64_t first = rows.dim[0] * i / ranks, end = rows.dim[0] * (i + 1) / ranks;
    return tensor_row_slice(rows, first, end - first);
}

/* To the rank `distance` ahead and from the one as far behind: scatter: its part of rows, for its place among
 * `parts`; else this rank's part of rows, for the same part of its. */
static void put_messages(const Comm *g, Tensor rows, Tensor parts, int distance, CommMessage m[2])
{
    const bool scatter = parts.data;
    const int to = (g->rank + distance) % g->size, from = (g->rank + g->size - distance) % g->size;
    const Tensor out = equal_part(rows, g->size, scatter ? to : g->rank);
    const Tensor in = equal_part(scatter ? parts : rows, g->size, from);
    const MessageLabel what = { .kind = MESSAGE_SUM };
    m[0] =
        (CommMessage){ .send = true, .peer = to, .data = out.data, .bytes = tensor_bytes(out), .what = what };
    m[1] = (CommMessage){ .peer = from, .data = in.data, .bytes = tensor_bytes(in), .what = what };
}

/* Between all ranks, in as many exchanges as that takes; `done` is the last one's. */
static Err exchange_parts(Ctx *c, Comm *g, Tensor rows, Tensor parts, Event *done)
{
    CommMessage m[COMM_MESSAGES_MAX];
    int count = 0;
    for (int distance = 1; distance < g->size; distance++) {
        const bool last = distance == g->size - 1;
        put_messages(g, rows, parts, distance, &m[count]);
        count += 2;
        if (!last && count + 2 <= COMM_MESSAGES_MAX) continue;
        TRY(comm_exchange(g, c->s, m, count, last ? done : NULL));
        count = 0;
    }
    return ERR_OK;
}

/* ---- sums ---- */

static bool by_parts(const Comm *g, Tensor x) { return g->size > 1 && x.dtype != F32; }

/* Every rank's part of x for this rank, into parts: [ranks * rows of it, columns], in scratch. */
static Err scatter_begin(Ctx *c, Comm *g, Tensor x, Tensor *parts, Event *done)
{
    const Tensor rows = rows_of(x), own = equal_part(rows, g->size, g->rank);
    TRY(tensor_new(c->scratch, parts, x.dtype, g->size * own.dim[0], own.dim[1]));
    TRY(device_copy(c->s, equal_part(*parts, g->size, g->rank).data, own.data, tensor_bytes(own)));
    return exchange_parts(c, g, rows, *parts, done);
}

/* The sum of the parts, rounded to y. */
static Err sum_parts_to(Ctx *c, const Comm *g, Tensor parts, Tensor y)
{
    if (!tensor_count(y)) return ERR_OK;
    return op(c->s, sum_parts, .y = y, .x = parts, .parts = g->size);
}

/* This rank's part of x becomes the sum, and then the others' from them. */
static Err all_reduce_end(Ctx *c, Comm *g, Tensor parts, Tensor x)
{
    const Tensor rows = rows_of(x), none = { 0 };
    TRY(sum_parts_to(c, g, parts, equal_part(rows, g->size, g->rank)));
    return exchange_parts(c, g, rows, none, NULL);
}

Err reduce_rows_begin(Ctx *c, Tensor partial, Tensor y, PendingSum *out)
{
    Comm *g = c->world->sp.size > 1 ? &c->world->sp : &c->world->tp;
    *out = (PendingSum){ .y = y };
    if (by_parts(g, partial)) return scatter_begin(c, g, partial, &out->parts, &g->pending);
    if (c->world->sp.size == 1) return comm_reduce_tree_f32(g, c->s, partial, &g->pending);
    return comm_reduce_scatter_tree_f32(g, c->s, y, partial, &g->pending);
}

Err reduce_rows_end(Ctx *c, PendingSum r)
{
    Comm *g = c->world->sp.size > 1 ? &c->world->sp : &c->world->tp;
    TRY(stream_wait(c->s, &g->pending));
    if (!r.parts.data) return ERR_OK;
    return c->world->sp.size > 1 ? sum_parts_to(c, g, r.parts, r.y) : all_reduce_end(c, g, r.parts, r.y);
}

Err reduce_rows(Ctx *c, Tensor partial, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    PendingSum r;
    TRY(reduce_rows_begin(c, partial, y, &r));
    TRY(reduce_rows_end(c, r));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err reduce_scatter_values(Ctx *c, Comm *group, Tensor x, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor parts;
    if (!by_parts(group, x)) return comm_reduce_scatter_tree_f32(group, c->s, y, x, NULL);
    TRY(scatter_begin(c, group, x, &parts, NULL));
    TRY(sum_parts_to(c, group, parts, rows_of(y)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err reduce_values(Ctx *c, Comm *group, Tensor x)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor parts;
    if (!by_parts(group, x)) return comm_reduce_tree_f32(group, c->s, x, NULL);
    TRY(scatter_begin(c, group, x, &parts, NULL));
    TRY(all_reduce_end(c, group, parts, x));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
