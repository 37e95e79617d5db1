/*
 * Which of a mixture's choices its experts take (layer.h, Capacity; docs/moe.md), and how many rows those are at most:
 * what memory is taken for.
 *
 * Capacities are about experts and units, whatever the layout. Room is about ranks: where not all rows that may come
 * have room, each rank learns how many rows the others want to send, and all cut the pieces by one rule.
 *
 * A balance unit is whole samples, and its rows are ordered by position. With sequence and context parallelism they lie
 * on several ranks; each of these then gathers the choices of all and comes to the same result.
 */
#include "base/int64.h"
#include "layer/internal.h"

/* ---- the most rows there can be ---- */

/* Rows that an expert takes of a unit of so many; all where none are dropped. */
static int64_t capacity_of(const MoeCut *c, int64_t rows)
{
    if (!(c->capacity.factor > 0)) return rows;
    const double most = __builtin_ceil(c->capacity.factor * (double)(rows * c->topk) / c->experts);
    return most < (double)rows ? (int64_t)most : rows;
}

/* Units of `rows` rows that `span` rows touch at most, which begin at a multiple of span: and so, in their first unit,
 * at a multiple of what divides both. */
static int64_t units_touched(int64_t span, int64_t rows)
{
    return (rows - common_divisor(span, rows) + span - 1) / rows + 1;
}

/* Ranks that share the experts. */
static int sharing_ranks(const MoeCut *c) { return c->ep * c->etp; }

/* Units that lie on these ranks, where one cp rank has `rows` rows of each: neighbours, along sp first, then along cp,
 * which brings no other units. */
static int64_t group_units(const MoeCut *c, int64_t rows)
{
    const int n = sharing_ranks(c);
    if (c->sp % n == 0) return units_touched(c->rows * n, rows);
    if (n % c->sp) return n * units_touched(c->rows, rows);
    const int contexts = n / c->sp, samples = contexts % c->cp ? contexts : contexts / c->cp;
    return (c->cp % contexts ? samples : 1) * units_touched(c->rows * c->sp, rows);
}

MoeRoom moe_room(const MoeCut *c)
{
    const int64_t rows = c->unit * c->seq, capacity = capacity_of(c, rows * c->cp), own = c->experts / c->ep;
    MoeRoom r = { .capacity = capacity,
                  .sent = min64(c->rows * c->topk, c->experts * units_touched(c->rows, rows) * capacity) };
    r.pair = r.worst = r.owned = r.sent;
    r.piece = c->rows;
    if (sharing_ranks(c) == 1) return r;
    const int64_t most = c->rows * min64(own, c->topk); /* from one rank */
    r.worst = min64(most * sharing_ranks(c), own * group_units(c, rows) * capacity);
    const double share = __builtin_ceil(c->capacity.slack * (double)(c->rows * c->topk * c->etp));
    r.owned = c->capacity.slack > 0 && share < (double)r.worst ? (int64_t)share : r.worst;
    r.pair = min64(most, min64(r.sent, r.owned));
    if (r.owned == r.worst) return r;
    r.piece = r.owned / (min64(own, c->topk) * sharing_ranks(c));
    r.piece -= r.piece % c->leaf;
    return r;
}

/* Generation has room for all and drops nothing: its calls cut a text anyhow. */
MoeRoom moe_room_of(const Moe *m, const Ctx *c)
{
    const MoeCut cut = { .experts = m->experts,
                         .topk = m->topk,
                         .unit = m->balance.unit,
                         .rows = ctx_rows(c),
                         .seq = c->batch->T,
                         .leaf = c->canon.leaf_tokens,
                         .sp = c->world->sp.size,
                         .cp = c->world->cp.size,
                         .ep = c->world->tp_ep.size / c->world->grid.etp,
                         .etp = c->world->grid.etp,
                         .capacity = c->kv ? (Capacity){ 0 } : m->capacity };
    return moe_room(&cut);
}

/* ---- what is dropped ---- */

Err moe_gather_units(Ctx *c, Tensor own, Tensor *all)
{
    Comm *sp = &c->world->sp;
    *all = own;
    if (sp->size > 1) {
        TRY(tensor_new(c->scratch, all, own.dtype, own.dim[0] * sp->size, own.dim[1]));
        TRY(comm_all_gather(sp, c->s, *all, own, NULL));
    }
    return context_all_rows(c, all);
}

Err moe_own_rows(Ctx *c, Tensor all, Tensor *own)
{
    TRY(context_own_rows(c, &all));
    *own = ctx_row_slice(c, all);
    return ERR_OK;
}

int64_t moe_unit_rows(const Moe *m, const Ctx *c)
{
    return m->balance.unit * c->batch->T * c->world->cp.size;
}

/* index [N, K], without the choices that a full expert does not take. */
static Err drop_beyond_capacity(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept)
{
    const int64_t rows = moe_unit_rows(m, c), K = m->topk;
    const int64_t all_rows = index.dim[0] * c->world->sp.size * c->world->cp.size, units = all_rows / rows;
    Tensor all, weights = { 0 }, choice, offset, taken;
    ASSERT(all_rows == units * rows);
    TRY(moe_gather_units(c, index, &all));
    if (!m->capacity.by_position) TRY(moe_gather_units(c, weight, &weights));
    TRY(tensor_new(c->scratch, &taken, I32, all_rows, K));
    TRY(tensor_new(c->scratch, &choice, I32, all_rows * K));
    TRY(tensor_new(c->scratch, &offset, I64, m->experts * units + 1));
    TRY(op(c->s, permute_index, .row = taken, .choice = choice, .offset = offset, .index = all,
           .experts = m->experts, .run = rows));
    TRY(op(c->s, choice_drop, .kept = taken, .weight = weights, .choice = choice, .offset = offset,
           .experts = m->experts, .most = moe_room_of(m, c).capacity));
    return moe_own_rows(c, taken, kept);
}

/* index [N, K], without the choices that the ranks of their experts have no room for. */
static Err drop_beyond_room(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept)
{
    const int64_t N = index.dim[0], K = m->topk, E = m->experts;
    const MoeRoom room = moe_room_of(m, c);
    Comm *group = &c->world->tp_ep;
    Tensor choice, offset, all, limit;
    const Tensor weights = m->capacity.by_position ? (Tensor){ 0 } : weight;
    const Tensor full = m->capacity.drop ? (Tensor){ 0 } : c->params->stats->no_room;
    TRY(tensor_new(c->scratch, kept, I32, N, K));
    TRY(tensor_new(c->scratch, &choice, I32, room.sent));
    TRY(tensor_new(c->scratch, &offset, I64, E + 1));
    TRY(tensor_new(c->scratch, &all, I64, group->size, E + 1));
    TRY(tensor_new(c->scratch, &limit, I64, E));
    TRY(op(c->s, permute_index, .row = *kept, .choice = choice, .offset = offset, .index = index,
           .experts = E, .run = N));
    TRY(comm_all_gather(group, c->s, all, offset, NULL));
    TRY(op(c->s, room_limits, .limit = limit, .full = full, .all = all, .own = moe_own_experts(m, c),
           .room = room.owned, .rank = group->rank));
    return op(c->s, choice_drop, .kept = *kept, .weight = weights, .choice = choice, .offset = offset,
              .limit = limit, .experts = E);
}

Err moe_choices_kept(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept)
{
    const MoeRoom room = moe_room_of(m, c);
    *kept = index;
    if (room.capacity < moe_unit_rows(m, c)) TRY(drop_beyond_capacity(m, c, index, weight, kept));
    if (room.owned == room.worst || c->in_pieces) return ERR_OK;
    return drop_beyond_room(m, c, *kept, weight, kept);
}
