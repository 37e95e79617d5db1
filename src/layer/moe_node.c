/*
 * The dispatcher of a tp-ep group that lies on several hosts: a row crosses the network once to each host that has
 * experts of its token, and is passed on there. There are H hosts, with equally many ranks of the group on each;
 * ranks with the same place on their hosts are a rail.
 *
 *   x [N, D] of this rank's tokens
 *     -> sent    by host: a token's row once for each of its hosts        to the rail (ep-rail)
 *     -> got     by source host: what tokens of the rail have for experts of this host
 *     -> passed  by expert of this host, source host: a row for each choice     to the host's ranks (ep-host)
 *     -> rows [Q, D] of this rank's experts: by expert, source host, rail: as all-to-all leaves them
 *
 * What decides all three orders, the choices of the rail's tokens, is learned once; the orders are made again in each
 * call, which is cheaper than to keep them. Gradients of results go the same way, dy instead of x; the weights of
 * choices follow them, and rows are weighed where they are passed on.
 *
 * Results and gradients of rows return as by all-to-all: a token's sum over its choices is a chain in the order of the
 * choices (docs/moe.md), so those of one host have no sum of their own that could travel in their stead.
 */
#include "base/int64.h"
#include "layer/moe.h"

static int hosts(const Ctx *c) { return c->world->ep_rail.size; }
static int64_t host_experts(const Moe *m, const Ctx *c) { return m->spec->experts / hosts(c); }

/* ---- choices of the rail's tokens ---- */

/* Tokens of a rank, filled up to whole runs: so those of each rank begin a run. */
static int64_t rail_tokens(const Ctx *c)
{
    const int64_t run = moe_run_tokens(c);
    return (ctx_rows(c) + run - 1) / run * run;
}

static int64_t rail_choices(const Moe *m, const Ctx *c) { return hosts(c) * rail_tokens(c) * m->spec->topk; }

/* Gathers from the rail what each rank has put into its slot of all [H * tokens, K]. */
static Err gather_slots(Ctx *c, Tensor all)
{
    Comm *rail = &c->world->ep_rail;
    const Tensor own = tensor_row_slice(all, rail->rank * rail_tokens(c), rail_tokens(c));
    return comm_all_gather(rail, c->s, all, own, NULL);
}

static Tensor own_slot(const Ctx *c, Tensor all, int64_t tokens)
{
    return tensor_row_slice(all, c->world->ep_rail.rank * rail_tokens(c), tokens);
}

static Tensor learned_choices(const Moe *m, const Ctx *c, const MoeRows *t)
{
    return tensor_reshape(t->learned, hosts(c) * rail_tokens(c), m->spec->topk);
}

static Err learn_rail(const Moe *m, Ctx *c, const MoeRows *t)
{
    const Tensor all = learned_choices(m, c, t);
    TRY(moe_learn_offsets(m, c, t));
    TRY(op(c->s, choice_groups, .group = own_slot(c, all, rail_tokens(c)), .index = t->index_NK, .row = t->row_NK,
           .own = 1, .count = m->spec->experts)); /* those that have a row */
    return gather_slots(c, all);
}

/* ---- the three orders ---- */

/* Rows in groups of experts, as permute_index leaves them, with as many runs as t->offset. */
typedef struct {
    Tensor row, choice, offset;
} Order;

typedef struct {
    int64_t first, own, count; /* of choice_groups */
} Groups;

/* index [R, K]: choices of tokens, which are at most `rows` rows. */
static Err order_rows(Ctx *c, Tensor index, Groups g, int64_t rows, Order *o)
{
    const int64_t R = index.dim[0], K = index.dim[1], run = moe_run_tokens(c);
    Tensor group;
    TRY(tensor_new(c->scratch, &o->row, I32, R, K));
    TRY(tensor_new(c->scratch, &o->choice, I32, rows));
    TRY(tensor_new(c->scratch, &o->offset, I64, g.count * (R / run) + 1));
    ArenaMark mark = arena_mark(c->scratch);
    TRY(tensor_new(c->scratch, &group, I32, R, K));
    TRY(op(c->s, choice_groups, .group = group, .index = index, .first = g.first, .own = g.own, .count = g.count));
    TRY(op(c->s, permute_index, .row = o->row, .choice = o->choice, .offset = o->offset, .index = group,
           .experts = g.count, .run = run));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* All three, so that a transport that needs their offsets on the host waits for them once. */
typedef struct {
    MoeLimits limits;
    Order by_host, arrived, by_expert;
} Way;

static Err learn_way(const Moe *m, Ctx *c, const MoeRows *t, Way *w)
{
    const MoeLimits limits = w->limits = moe_limits_of(m, c);
    const int64_t experts = host_experts(m, c), first = c->world->ep_rail.rank * experts;
    const Tensor all = learned_choices(m, c, t), own = own_slot(c, all, rail_tokens(c));
    TRY(order_rows(c, own, (Groups){ .own = experts, .count = hosts(c) }, limits.crossing, &w->by_host));
    TRY(order_rows(c, all, (Groups){ first, experts, 1 }, limits.arriving, &w->arrived));
    TRY(order_rows(c, all, (Groups){ first, 1, experts }, limits.passed, &w->by_expert));
    return device_mark(c->s, c->moves.known);
}

/* ---- stages ---- */

/* Rows of `from` to the others of a group, which get them as `to`: their orders are those of the two. */
typedef struct {
    Comm *group;
    Tensor from, to, from_offset, to_offset;
    int64_t chunks, copies;
} Stage;

static Err move_stage(const Moe *m, Ctx *c, const MoeRows *t, const Stage *g)
{
    const CommRows rows = { .local = g->from.data,
                            .remote = g->to.data,
                            .local_offset = g->from_offset.data,
                            .remote_offset = g->to_offset.data,
                            .chunks = g->chunks,
                            .stride = (t->offset.dim[0] - 1) / m->spec->experts,
                            .copies = g->copies,
                            .remote_rows = g->to.dim[0],
                            .even = g->from.expected,
                            .known = c->moves.known };
    TRY(comm_all_to_all_rows(g->group, c->s, &rows, g->from.dim[0], g->from.dim[1] * dtype_size(g->from.dtype),
                             c->moves.done));
    return moe_rows_end(c, g->group);
}

/* got [H N, D] of x [N, D], ordered by source host. */
static Err cross_network(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, const Way *w, Tensor got)
{
    const Order *o = &w->by_host;
    ArenaMark mark = arena_mark(c->scratch);
    Tensor sent;
    TRY(tensor_new(c->scratch, &sent, x.dtype, w->limits.crossing, x.dim[1]));
    sent.expected = w->limits.even_crossing;
    TRY(op(c->s, permute_rows, .y = sent, .x = x, .choice = moe_in_use(o->choice, o->offset), .topk = m->spec->topk));
    TRY(move_stage(m, c, t,
                   &(Stage){ .group = &c->world->ep_rail,
                             .from = sent,
                             .to = got,
                             .from_offset = o->offset,
                             .to_offset = w->arrived.offset,
                             .chunks = 1,
                             .copies = 1 }));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* rows [Q, D] of this rank's experts, from the rows of tokens that came to this host, times their weights, if any. */
static Err pass_on(const Moe *m, Ctx *c, const MoeRows *t, const Way *w, Tensor got, Tensor weight, Tensor rows)
{
    const Order *o = &w->by_expert;
    Comm *group = &c->world->ep_host;
    const bool alone = group->size == 1; /* then the order is that of its experts' rows */
    Tensor passed = rows;
    if (!alone) {
        TRY(tensor_new(c->scratch, &passed, rows.dtype, w->limits.passed, rows.dim[1]));
        passed.expected = w->limits.sent;
    }
    TRY(op(c->s, take_rows, .y = moe_in_use(passed, o->offset), .x = got, .choice = o->choice, .weight = weight,
           .row = w->arrived.row, .topk = m->spec->topk));
    if (alone) return ERR_OK;
    return move_stage(m, c, t,
                      &(Stage){ .group = group,
                                .from = passed,
                                .to = rows,
                                .from_offset = o->offset,
                                .to_offset = t->owned,
                                .chunks = moe_own_experts(m, c) * hosts(c),
                                .copies = c->world->grid.etp });
}

static Err send_through(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor weight, Tensor rows)
{
    ArenaMark mark = arena_mark(c->scratch);
    Way way;
    Tensor got;
    TRY(learn_way(m, c, t, &way));
    TRY(tensor_new(c->scratch, &got, x.dtype, way.limits.arriving, x.dim[1]));
    got.expected = min64(way.limits.even_crossing, way.limits.arriving);
    TRY(cross_network(m, c, t, x, &way, got));
    TRY(pass_on(m, c, t, &way, got, weight, rows));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err send_tokens(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor rows)
{
    return send_through(m, c, t, x, (Tensor){ 0 }, rows);
}

static Err send_weighed(const Moe *m, Ctx *c, const MoeRows *t, Tensor dy, MovedRows d)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor weights;
    TRY(tensor_new(c->scratch, &weights, F32, hosts(c) * rail_tokens(c), m->spec->topk));
    TRY(cast_values(c, own_slot(c, weights, dy.dim[0]), t->weight_NK));
    TRY(gather_slots(c, weights));
    TRY(send_through(m, c, t, dy, weights, d.remote));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* t->learned: the choices of the rail's tokens [H, tokens of a rank, K], -1 where one was dropped. */
const Dispatcher moe_dispatcher_node = { .remote = true,
                                         .weighs = true,
                                         .learned = rail_choices,
                                         .learn = learn_rail,
                                         .send = send_tokens,
                                         .bring_begin = moe_bring_begin,
                                         .bring_end = moe_bring_end,
                                         .send_gradient = send_weighed };
