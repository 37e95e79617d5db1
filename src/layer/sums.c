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

/* x as rows: what is cut into a part for each rank (exchange.c). */
static Tensor rows_of(Tensor x)
{
    const int64_t columns = x.dim[x.ndim - 1];
    return tensor_reshape(x, tensor_count(x) / columns, columns);
}

static bool by_parts(const Comm *g, Tensor x) { return g->size > 1 && x.dtype != F32; }

/* Every rank's part of x for this rank, into parts: [ranks * rows of it, columns], in scratch. */
static Err scatter_begin(Ctx *c, Comm *g, Tensor x, Tensor *parts, Event *done)
{
    const Tensor rows = rows_of(x), own = equal_part(rows, g->size, g->rank);
    TRY(tensor_new(c->scratch, parts, x.dtype, g->size * own.dim[0], own.dim[1]));
    TRY(device_copy(c->s, equal_part(*parts, g->size, g->rank).data, own.data, tensor_bytes(own)));
    const PartMoves scatter = { .group = g, .bands = 1, .rows = rows, .parts = *parts, .kind = MESSAGE_SUM };
    return exchange_band(c, &scatter, 0, done);
}

Err sum_parts_to(Ctx *c, Tensor parts, int64_t count, Tensor y)
{
    if (!tensor_count(y)) return ERR_OK;
    if (parts.dtype == y.dtype) return op(c->s, sum_parts, .y = y, .x = parts, .parts = count);
    const Tensor first = equal_part(parts, count, 0);
    TRY(op(c->s, sum_parts, .y = first, .x = parts, .parts = count));
    return cast_values(c, y, first);
}

/* This rank's part of x becomes the sum, and then the others' from them. */
static Err all_reduce_end(Ctx *c, Comm *g, Tensor parts, Tensor x)
{
    const PartMoves gather = { .group = g, .bands = 1, .rows = rows_of(x), .kind = MESSAGE_SUM };
    TRY(sum_parts_to(c, parts, g->size, equal_part(gather.rows, g->size, g->rank)));
    return exchange_band(c, &gather, 0, NULL);
}

Comm *rows_group(const Ctx *c) { return c->world->sp.size > 1 ? &c->world->sp : &c->world->tp; }

Err reduce_rows_begin(Ctx *c, Tensor partial, Tensor y, PendingSum *out)
{
    Comm *g = rows_group(c);
    *out = (PendingSum){ .y = y, .done = g->beside };
    c->s->dev->beside += g->size > 1;
    if (by_parts(g, partial)) return scatter_begin(c, g, partial, &out->parts, out->done);
    Tensor sum = c->world->sp.size == 1 ? partial : y;
    if (y.dtype != F32) {
        if (c->world->sp.size > 1) TRY(tensor_new(c->scratch, &sum, F32, y.dim[0], y.dim[1]));
        out->wide = sum;
    }
    if (c->world->sp.size == 1) return comm_reduce_tree_f32(g, c->s, sum, out->done);
    return comm_reduce_scatter_tree_f32(g, c->s, sum, partial, out->done);
}

Err reduce_rows_end(Ctx *c, PendingSum r)
{
    Comm *g = rows_group(c);
    c->s->dev->beside -= g->size > 1;
    TRY(stream_wait(c->s, r.done));
    if (r.wide.data && r.wide.data != r.y.data) return cast_values(c, r.y, r.wide);
    if (!r.parts.data) return ERR_OK;
    return c->world->sp.size > 1 ? sum_parts_to(c, r.parts, g->size, r.y) : all_reduce_end(c, g, r.parts, r.y);
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
    TRY(sum_parts_to(c, parts, group->size, rows_of(y)));
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
