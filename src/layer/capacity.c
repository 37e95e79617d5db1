/*
 * Choices of a mixture that its experts take (spec.h, Capacity; docs/moe.md), and how many rows those are at most:
 * what memory is taken for.
 *
 * Capacities are about experts and units, whatever the layout. Room is about ranks: where not all rows that may come
 * have room, each rank learns how many rows the others want to send, and all cut the pieces by one rule.
 *
 * A balance unit is whole samples, and its rows are ordered by position. With sequence and context parallelism they lie
 * on several ranks; each of these then gathers the choices of all and comes to the same result. The last unit of an
 * evaluation may have fewer samples: its capacity is that of the rows that it has.
 */
#include "base/int64.h"
#include "layer/moe.h"

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

/* ---- from host to host ---- */

/* The most hosts that a token goes to. */
static int64_t most_hosts(const MoeCut *c)
{
    const int on_host = c->experts / c->hosts, most = c->hosts < c->topk ? c->hosts : c->topk;
    if (c->groups < 2) return most;
    const int in_group = c->experts / c->groups;
    if (on_host % in_group == 0) return min64(most, c->group_topk);
    return in_group % on_host ? most : min64(most, c->group_topk * (in_group / on_host));
}

/* The share of the ways to choose k of n things that take none of `few`. */
static double share_without(int n, int few, int k)
{
    double share = 1;
    for (int i = 0; i < k; i++) share *= n - few - i > 0 ? (double)(n - few - i) / (n - i) : 0;
    return share;
}

/* Choose k of n: how often are exactly j among `few` of them? */
static double share_with(int n, int few, int k, int j)
{
    double ways = 1; /* of which j of the k places are the few's */
    for (int i = 0; i < j; i++) ways *= (double)(k - i) / (i + 1);
    for (int i = 0; i < k; i++) ways *= (double)(i < j ? few - i : n - few - (i - j)) / (n - i);
    return ways > 0 ? ways : 0;
}

/* If all choices are as likely: the share of tokens that have none of a host's experts. */
static double share_elsewhere(const MoeCut *c)
{
    const int on_host = c->experts / c->hosts;
    if (c->groups < 2) return share_without(c->experts, on_host, c->topk);
    const int in_group = c->experts / c->groups, among = c->group_topk * in_group;
    const int here = on_host > in_group ? on_host / in_group : 1; /* groups with experts of the host */
    double share = 0;
    for (int j = 0; j <= here && j <= c->group_topk; j++)
        share += share_with(c->groups, here, c->group_topk, j) *
                 share_without(among, j * (on_host < in_group ? on_host : in_group), c->topk);
    return share;
}

double moe_even_hosts(const MoeCut *c) { return c->hosts * (1 - share_elsewhere(c)); }

static void limit_crossing(const MoeCut *c, MoeLimits *r)
{
    const int64_t choices = min64(c->rows * min64(c->experts / c->hosts, c->topk), r->sent);
    const double share = __builtin_ceil(c->capacity.slack * (double)(c->rows * c->topk));
    r->crossing = min64(c->rows * most_hosts(c), r->sent);
    r->even_crossing = min64(r->crossing, (int64_t)((double)c->rows * moe_even_hosts(c) + 0.5));
    r->most_passed = c->hosts * choices;
    r->passed = c->capacity.slack > 0 && share < (double)r->most_passed ? (int64_t)share : r->most_passed;
    if (sharing_ranks(c) == c->hosts) r->passed = r->most_passed = r->owned; /* nobody to pass them on to */
    r->arriving = min64(c->hosts * c->rows, r->passed);
}

MoeLimits moe_limits(const MoeCut *c)
{
    const int64_t rows = c->balance_unit * c->seq, capacity = capacity_of(c, rows * c->cp), own = c->experts / c->ep;
    MoeLimits r = { .capacity = capacity,
                    .sent = min64(c->rows * c->topk, c->experts * units_touched(c->rows, rows) * capacity) };
    r.worst = r.owned = r.sent;
    r.piece = c->rows;
    if (sharing_ranks(c) == 1) return r;
    const int64_t most = c->rows * min64(own, c->topk); /* from one rank */
    r.worst = min64(most * sharing_ranks(c), own * group_units(c, rows) * capacity);
    const double share = __builtin_ceil(c->capacity.slack * (double)(c->rows * c->topk * c->etp));
    r.owned = c->capacity.slack > 0 && share < (double)r.worst ? (int64_t)share : r.worst;
    if (c->hosts > 1) limit_crossing(c, &r);
    if (r.owned == r.worst) return r;
    r.piece = r.owned / (min64(own, c->topk) * sharing_ranks(c));
    r.piece -= r.piece % c->leaf;
    return r;
}

/* Generation has room for all and drops nothing: its calls cut a text anyhow. */
static MoeCut cut_of(const Moe *m, const Ctx *c)
{
    return (MoeCut){ .experts = m->spec->experts,
                     .topk = m->spec->topk,
                     .balance_unit = m->spec->balance.unit,
                     .rows = ctx_rows(c),
                     .seq = c->batch->T,
                     .leaf = c->canon.leaf_tokens,
                     .sp = c->world->sp.size,
                     .cp = c->world->cp.size,
                     .ep = c->world->tp_ep.size / c->world->grid.etp,
                     .etp = c->world->grid.etp,
                     .hosts = c->world->ep_rail.size,
                     .groups = m->spec->router.groups,
                     .group_topk = m->spec->router.group_topk,
                     .capacity = c->block.cache ? (Capacity){ 0 } : m->spec->capacity };
}

MoeLimits moe_limits_of(const Moe *m, const Ctx *c)
{
    const MoeCut cut = cut_of(m, c);
    return moe_limits(&cut);
}

/* ---- what is dropped ---- */

Err moe_gather_balance_rows(Ctx *c, Tensor own, Tensor *all)
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

int moe_own_experts(const Moe *m, const Ctx *c)
{
    return m->spec->experts / (c->world->tp_ep.size / c->world->grid.etp);
}

int64_t moe_balance_rows(const Moe *m, const Ctx *c) { return m->spec->balance.unit * c->batch->T * c->world->cp.size; }

/* Choices of A rows, to go through unit by unit. */
typedef struct {
    Tensor index;          /* [A, K] */
    Tensor weight;         /* [A, K] by which experts choose among them; no data: by position */
    Tensor kept;           /* [A, K] index, with -1 in the places of what is dropped */
    Tensor choice, offset; /* for lists of all rows, of so many units */
} Choices;

static Err choices_new(const Moe *m, Ctx *c, int64_t units, Choices *a)
{
    const int64_t rows = a->index.dim[0], K = m->spec->topk;
    TRY(tensor_new(c->scratch, &a->kept, I32, rows, K));
    TRY(tensor_new(c->scratch, &a->choice, I32, rows * K));
    return tensor_new(c->scratch, &a->offset, I64, m->spec->experts * units + 1);
}

/* An expert takes `most` rows of each of these units, which begin at row `first`. */
static Err take_at_most(const Moe *m, Ctx *c, const Choices *a, int64_t first, int64_t units, int64_t rows,
                        int64_t most)
{
    const int64_t count = units * rows;
    if (!count) return ERR_OK;
    const Tensor choice = tensor_row_slice(a->choice, 0, count * m->spec->topk);
    const Tensor offset = tensor_row_slice(a->offset, 0, m->spec->experts * units + 1);
    const Tensor kept = tensor_row_slice(a->kept, first, count);
    const Tensor weight = a->weight.data ? tensor_row_slice(a->weight, first, count) : a->weight;
    TRY(op(c->s, permute_index, .row = kept, .choice = choice, .offset = offset,
           .index = tensor_row_slice(a->index, first, count), .experts = m->spec->experts, .run = rows));
    return op(c->s, choice_drop, .kept = kept, .weight = weight, .choice = choice, .offset = offset,
              .experts = m->spec->experts, .most = most);
}

/* Takes units of `unit` rows: whole ones, then the rows that the last one has; none of those that fill up behind
 * them. */
static Err take_units(const Moe *m, Ctx *c, const Choices *a, int64_t unit, int64_t filling)
{
    const MoeCut cut = cut_of(m, c);
    const int64_t rows = a->index.dim[0] - filling, rest = rows % unit;
    TRY(take_at_most(m, c, a, 0, rows / unit, unit, capacity_of(&cut, unit)));
    TRY(take_at_most(m, c, a, rows - rest, 1, rest, capacity_of(&cut, rest)));
    return take_at_most(m, c, a, rows, 1, filling, 0);
}

/* index [N, K], without the choices that a full expert does not take. */
static Err drop_beyond_capacity(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept)
{
    const int64_t unit = moe_balance_rows(m, c), filling = c->batch->filling * c->batch->T * c->world->cp.size;
    Choices a = { 0 };
    TRY(moe_gather_balance_rows(c, index, &a.index));
    if (!m->spec->capacity.by_position) TRY(moe_gather_balance_rows(c, weight, &a.weight));
    ASSERT(a.index.dim[0] % unit == 0);
    TRY(choices_new(m, c, a.index.dim[0] / unit, &a));
    TRY(take_units(m, c, &a, unit, filling));
    return moe_own_rows(c, a.kept, kept);
}

/* index [N, K], without the choices of rows that fill up. Takes memory also where there are none: a plan is made once.
 */
static Err drop_filling(const Moe *m, Ctx *c, Tensor index, Tensor *kept)
{
    const int64_t N = index.dim[0], behind = (c->world->sp.size - 1 - c->world->sp.rank) * N;
    const int64_t filling = min64(max64(c->batch->filling * c->batch->T - behind, 0), N);
    Choices a = { .index = index };
    TRY(choices_new(m, c, 1, &a));
    if (!filling) return ERR_OK;
    *kept = a.kept;
    TRY(take_at_most(m, c, &a, 0, 1, N - filling, N));
    return take_at_most(m, c, &a, N - filling, 1, filling, 0);
}

/* Ranks that others of a group send rows to: each those for so many experts, of which it has room for so many rows. */
typedef struct {
    Comm *group;
    int64_t experts, rows;
} Room;

/* index [N, K], without the choices that there is no room for. */
static Err drop_beyond_limit(const Moe *m, Ctx *c, Room room, Tensor index, Tensor weight, Tensor *kept)
{
    const int64_t N = index.dim[0], K = m->spec->topk, E = m->spec->experts;
    Tensor choice, offset, all, limit;
    const Tensor weights = m->spec->capacity.by_position ? (Tensor){ 0 } : weight;
    const Tensor full = m->spec->capacity.drop ? (Tensor){ 0 } : c->params->stats->over_limit;
    TRY(tensor_new(c->scratch, kept, I32, N, K));
    TRY(tensor_new(c->scratch, &choice, I32, moe_limits_of(m, c).sent));
    TRY(tensor_new(c->scratch, &offset, I64, E + 1));
    TRY(tensor_new(c->scratch, &all, I64, room.group->size, E + 1));
    TRY(tensor_new(c->scratch, &limit, I64, E));
    TRY(op(c->s, permute_index, .row = *kept, .choice = choice, .offset = offset, .index = index, .experts = E,
           .run = N));
    TRY(comm_all_gather(room.group, c->s, all, offset, NULL));
    TRY(op(c->s, room_limits, .limit = limit, .full = full, .all = all, .own = room.experts, .room = room.rows,
           .rank = room.group->rank));
    return op(c->s, choice_drop, .kept = *kept, .weight = weights, .choice = choice, .offset = offset, .limit = limit,
              .experts = E);
}

Err moe_choices_kept(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept)
{
    const MoeLimits limits = moe_limits_of(m, c);
    *kept = index;
    if (limits.capacity < moe_balance_rows(m, c)) TRY(drop_beyond_capacity(m, c, index, weight, kept));
    else if (!c->mode.training && !c->block.cache) TRY(drop_filling(m, c, index, kept));
    if (c->mode.retry_in_pieces) return ERR_OK;
    const Room at_experts = { &c->world->tp_ep, moe_own_experts(m, c), limits.owned };
    const Room on_the_way = { &c->world->ep_rail, m->spec->experts / c->world->ep_rail.size, limits.passed };
    if (limits.owned < limits.worst) TRY(drop_beyond_limit(m, c, at_experts, *kept, weight, kept));
    if (limits.passed == limits.most_passed) return ERR_OK;
    return drop_beyond_limit(m, c, on_the_way, *kept, weight, kept);
}
