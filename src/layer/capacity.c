/*
 * Which of a mixture's choices its experts take (layer.h, Capacity; docs/moe.md), and how many rows those are at most:
 * what memory is taken for.
 *
 * A balance unit is whole samples, and its rows are ordered by position. With sequence parallelism they lie on several
 * ranks; each of these then gathers the choices of all and comes to the same result.
 */
#include "layer/internal.h"

static int64_t unit_rows(const Moe *m, const Ctx *c) { return m->balance.unit * c->batch->T; }

/* Rows that an expert takes of a unit; all where none are dropped. Generation drops nothing: its calls cut a text
 * anyhow. */
static int64_t capacity_of(const Moe *m, const Ctx *c)
{
    const int64_t rows = unit_rows(m, c);
    if (!(m->capacity.factor > 0) || c->kv) return rows;
    const double most = __builtin_ceil(m->capacity.factor * (double)(rows * m->topk) / m->experts);
    return most < (double)rows ? (int64_t)most : rows;
}

/* ---- the most rows there can be ---- */

/* Units of `rows` rows that `span` rows touch at most, which begin at a multiple of span: and so, in their first unit,
 * at a multiple of what divides both. */
static int64_t units_touched(int64_t span, int64_t rows)
{
    int64_t common = span, rest = rows;
    while (rest) {
        const int64_t next = common % rest;
        common = rest, rest = next;
    }
    return (rows - common + span - 1) / rows + 1;
}

/* Units that lie on the ranks of an ep group: neighbours, along sp first. */
static int64_t group_units(const Moe *m, const Ctx *c)
{
    const int64_t rows = unit_rows(m, c), N = ctx_rows(c), ep = c->world->ep.size, sp = c->world->sp.size;
    if (ep % sp == 0) return ep / sp * units_touched(N * sp, rows);
    return sp % ep == 0 ? units_touched(N * ep, rows) : ep * units_touched(N, rows);
}

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t moe_most_sent(const Moe *m, const Ctx *c)
{
    const int64_t N = ctx_rows(c), units = units_touched(N, unit_rows(m, c));
    return lesser(N * m->topk, m->experts * units * capacity_of(m, c));
}

int64_t moe_most_owned(const Moe *m, const Ctx *c)
{
    const int64_t N = ctx_rows(c), ep = c->world->ep.size, own = m->experts / ep;
    if (ep == 1) return moe_most_sent(m, c);
    return lesser(N * ep * lesser(own, m->topk), own * group_units(m, c) * capacity_of(m, c));
}

/* ---- what is dropped ---- */

/* Of this rank's rows to those of the micro-batch. */
static Err gather_units(Ctx *c, Tensor own, Tensor *all)
{
    Comm *sp = &c->world->sp;
    *all = own;
    if (sp->size == 1) return ERR_OK;
    TRY(tensor_new(c->scratch, all, own.dtype, own.dim[0] * sp->size, own.dim[1]));
    return comm_all_gather(sp, c->s, *all, own, NULL);
}

Err moe_choices_kept(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept)
{
    const int64_t rows = unit_rows(m, c), most = capacity_of(m, c), N = index.dim[0], K = m->topk;
    Tensor all, weights = { 0 }, choice, offset, taken;
    *kept = index;
    if (most == rows) return ERR_OK;
    TRY(gather_units(c, index, &all));
    if (!m->capacity.by_position) TRY(gather_units(c, weight, &weights));
    const int64_t all_rows = all.dim[0], units = all_rows / rows;
    ASSERT(all_rows == units * rows);
    TRY(tensor_new(c->scratch, &taken, I32, all_rows, K));
    TRY(tensor_new(c->scratch, &choice, I32, all_rows * K));
    TRY(tensor_new(c->scratch, &offset, I64, m->experts * units + 1));
    TRY(op(c->s, permute_index, .row = taken, .choice = choice, .offset = offset, .index = all,
           .experts = m->experts, .run = rows));
    TRY(op(c->s, choice_drop, .kept = taken, .weight = weights, .choice = choice, .offset = offset,
           .experts = m->experts, .most = most));
    *kept = tensor_row_slice(taken, c->world->sp.rank * N, N);
    return ERR_OK;
}
