/* See units.h. */
#include "optim/units.h"

static const ParamRegistry *registry(const Units *u) { return u->params->reg; }

static const Bucket *bucket_of(const Units *u, int b) { return &registry(u)->buckets[b]; }

static Comm *group(const Units *u, int b) { return u->params->group[bucket_of(u, b)->group]; }

static UnitBuffer *holder(UnitBuffer *buffers, int count, int unit)
{
    for (int i = 0; i < count; i++)
        if (buffers[i].unit == unit) return &buffers[i];
    return NULL;
}

/* The nth bucket of a unit in a buffer, where they lie one behind the other. */
static Tensor whole(const Units *u, const UnitBuffer *x, int nth)
{
    const Unit *n = &u->unit[x->unit];
    int64_t at = 0;
    for (int k = 0; k < nth; k++) at += bucket_of(u, n->bucket[k])->count;
    return tensor_row_slice(x->memory, at, bucket_of(u, n->bucket[nth])->count);
}

static Err wait(Units *u, UnitBuffer *x)
{
    if (!x->moving) return ERR_OK;
    x->moving = false;
    for (int k = 0; k < u->unit[x->unit].count; k++) {
        u->stream->dev->beside--;
        TRY(stream_wait(u->stream, &x->done[k]));
    }
    return ERR_OK;
}

/* ---- values ---- */

static Err drop(Units *u, UnitBuffer *x)
{
    if (x->unit < 0) return ERR_OK;
    const Err err = wait(u, x);
    for (int k = 0; k < u->unit[x->unit].count; k++) u->params->whole_value[u->unit[x->unit].bucket[k]] = (Tensor){ 0 };
    x->unit = -1;
    x->ahead = false;
    return err;
}

static bool is_read(const Units *u, const UnitBuffer *x)
{
    for (Pass p = 0; p < PASSES; p++)
        if (x->unit >= 0 && u->reading[p] == x->unit) return true;
    return false;
}

/* The buffer to gather into: that of no unit at work. One that was filled ahead is the last choice. */
static UnitBuffer *room(Units *u)
{
    UnitBuffer *best = NULL;
    for (int i = 0; i < u->values; i++) {
        UnitBuffer *x = &u->value[i];
        if (is_read(u, x)) continue;
        if (!best || x->ahead < best->ahead || (x->ahead == best->ahead && x->used < best->used)) best = x;
    }
    return best;
}

/* (Layers get an address even if a call fails: the executor stops behind the action.) */
static Err gather(Units *u, UnitBuffer *x, int unit)
{
    const Unit *n = &u->unit[unit];
    Err err = drop(u, x);
    x->unit = unit;
    x->used = ++u->turn;
    for (int k = 0; k < n->count; k++) u->params->whole_value[n->bucket[k]] = whole(u, x, k);
    for (int k = 0; k < n->count && !err; k++) {
        const int b = n->bucket[k];
        u->stream->dev->beside++;
        err = comm_all_gather(group(u, b), u->stream, u->params->whole_value[b], param_bucket_value(u->params, b),
                              &x->done[k]);
    }
    x->moving = !err;
    return err;
}

static Err gather_ahead(Units *u, int unit)
{
    if (unit < 0 || holder(u->value, u->values, unit)) return ERR_OK;
    UnitBuffer *x = room(u);
    if (!x || x->ahead) return ERR_OK;
    TRY(gather(u, x, unit));
    x->ahead = true;
    return ERR_OK;
}

/* NULL: the visit is none. */
static UnitOrder *order_of(Units *u, Visit v)
{
    ASSERT(v.stage < u->stages);
    return v.stage < 0 ? NULL : &u->order[v.stage * PASSES + (int)v.pass];
}

static void note_read(Units *u, int unit, Pass pass)
{
    UnitOrder *o = order_of(u, u->now[pass]);
    const int at = u->at[pass]++;
    if (!o || at >= o->capacity) return;
    if (at >= o->count) o->count = at + 1;
    o->unit[at] = unit;
}

/* The unit that will be read behind the one at work; -1: that is not known, or there is none. */
static int next_unit(Units *u, Pass pass)
{
    const UnitOrder *now = order_of(u, u->now[pass]), *then = order_of(u, u->then[pass]);
    const int at = u->at[pass];
    if (!now || !now->whole) return -1;
    if (at < now->count) return now->unit[at];
    return then && then->count ? then->unit[0] : -1;
}

Err units_read(Units *u, int id, Pass pass)
{
    const Bucket *b = bucket_of(u, registry(u)->items[id].bucket);
    const int from = u->reading[pass], unit = b->unit;
    if (!b->value_cut) return ERR_OK;
    UnitBuffer *x = holder(u->value, u->values, unit);
    if (from == unit && x && !x->moving) return ERR_OK;
    u->reading[pass] = unit;
    if (!x) {
        x = room(u);
        ASSERT(x);
        TRY(gather(u, x, unit));
    }
    TRY(wait(u, x));
    x->ahead = false;
    x->used = ++u->turn;
    if (from == unit) return ERR_OK;
    note_read(u, unit, pass);
    return gather_ahead(u, next_unit(u, pass));
}

void units_begins(Units *u, Visit now, Visit next)
{
    u->now[now.pass] = now;
    u->then[now.pass] = next;
    u->at[now.pass] = 0;
}

void units_unlearn(Units *u)
{
    for (int i = 0; i < u->stages * PASSES; i++) u->order[i].count = 0, u->order[i].whole = false;
}

Err units_forget(Units *u)
{
    for (int i = 0; i < u->values; i++) TRY(drop(u, &u->value[i]));
    return ERR_OK;
}

/* ---- gradients ---- */

Err units_sum_shard(Comm *c, Stream *s, Tensor whole, Tensor own, Event *done)
{
    if (whole.dtype == F32) return comm_reduce_scatter_tree_f32(c, s, own, whole, done);
    return comm_reduce_scatter_i64(c, s, own.data, whole.data, tensor_count(own), done);
}

static Tensor own_part(const Units *u, int b, Tensor of)
{
    const Bucket *k = bucket_of(u, b);
    const int64_t length = k->count / k->near_shards;
    return tensor_row_slice(of, k->near_shard * length, length);
}

/* Parameters that nothing was added to since the buffer was taken have 0. */
static Err clear_fresh(Units *u, int b)
{
    const ParamRegistry *r = registry(u);
    for (int i = 0; i < r->buckets[b].params; i++)
        TRY(param_store_clear_fresh(u->params, u->stream, r->order[u->first_param[b] + i]));
    return ERR_OK;
}

/* Its gradients are complete: nobody adds to them any more. */
static Err close_grads(Units *u, UnitBuffer *x)
{
    const Unit *n = &u->unit[x->unit];
    for (int k = 0; k < n->count; k++) TRY(clear_fresh(u, n->bucket[k]));
    x->open = false;
    x->used = ++u->turn;
    for (int k = 0; k < n->count; k++) {
        const int b = n->bucket[k];
        const Tensor of = u->params->whole_grad[b];
        u->params->whole_grad[b] = (Tensor){ 0 };
        x->add[k] = u->summed[b];
        u->summed[b] = true;
        const Tensor own = x->add[k] ? own_part(u, b, of) : param_bucket_grad(u->params, b);
        u->stream->dev->beside++;
        TRY(units_sum_shard(group(u, b), u->stream, of, own, &x->done[k]));
    }
    x->moving = true;
    return ERR_OK;
}

/* The sum of what was closed is in this rank's shard. */
static Err finish_grads(Units *u, UnitBuffer *x)
{
    const Unit *n = &u->unit[x->unit];
    TRY(wait(u, x));
    for (int k = 0; k < n->count; k++) {
        const int b = n->bucket[k];
        if (!x->add[k]) continue;
        TRY(op(u->stream, add_acc, .y = param_bucket_grad(u->params, b), .x = own_part(u, b, whole(u, x, k))));
    }
    x->unit = -1;
    return ERR_OK;
}

static Err close_open(Units *u)
{
    for (int i = 0; i < u->grads; i++)
        if (u->grad[i].open) TRY(close_grads(u, &u->grad[i]));
    return ERR_OK;
}

/* The buffer that was closed first; NULL: none is closed. */
static UnitBuffer *first_closed(Units *u)
{
    UnitBuffer *first = NULL;
    for (int i = 0; i < u->grads; i++)
        if (u->grad[i].unit >= 0 && (!first || u->grad[i].used < first->used)) first = &u->grad[i];
    return first;
}

/* A buffer that is nobody's: if there is none, the one that has had the longest time is finished. */
static Err take_grads(Units *u, UnitBuffer **out)
{
    *out = holder(u->grad, u->grads, -1);
    if (*out) return ERR_OK;
    *out = first_closed(u);
    return finish_grads(u, *out);
}

static Err open_grads(Units *u, int unit)
{
    const ParamRegistry *r = registry(u);
    const Unit *n = &u->unit[unit];
    UnitBuffer *x;
    Err err = close_open(u), other = take_grads(u, &x);
    x->unit = unit;
    x->open = true;
    for (int k = 0; k < n->count; k++) {
        u->params->whole_grad[n->bucket[k]] = whole(u, x, k);
        for (int i = 0; i < r->buckets[n->bucket[k]].params; i++)
            u->params->fresh[r->order[u->first_param[n->bucket[k]] + i]] = true;
    }
    return err ? err : other;
}

Err units_write(Units *u, int id)
{
    const int b = registry(u)->items[id].bucket;
    if (!bucket_of(u, b)->grad_cut || u->params->whole_grad[b].data) return ERR_OK;
    return open_grads(u, bucket_of(u, b)->unit);
}

Err units_reduce(Units *u)
{
    TRY(close_open(u));
    for (UnitBuffer *x; (x = first_closed(u));) TRY(finish_grads(u, x));
    for (int b = 0; b < registry(u)->bucket_count; b++) {
        if (!bucket_of(u, b)->grad_cut || u->summed[b]) continue;
        TRY(op(u->stream, fill_zero_acc, .x = param_bucket_grad(u->params, b)));
        u->summed[b] = true;
    }
    return ERR_OK;
}

Err units_ended(Units *u, Pass pass, bool keeps)
{
    UnitOrder *now = order_of(u, u->now[pass]);
    u->reading[pass] = -1;
    if (now && u->at[pass]) now->whole = true; /* (the weights' half of a backward reads none) */
    for (int i = 0; i < u->values && !keeps; i++)
        if (!u->value[i].ahead && !is_read(u, &u->value[i])) TRY(drop(u, &u->value[i]));
    return pass == PASS_BACKWARD ? close_open(u) : ERR_OK;
}

/* ---- life ---- */

Err units_begin(Units *u)
{
    for (Pass p = 0; p < PASSES; p++) u->reading[p] = -1;
    /* (each step gathers into the same buffers, whatever an evaluation has used last: graphs have their addresses) */
    u->turn = 0;
    for (int i = 0; i < u->values; i++) u->value[i].used = 0;
    for (int i = 0; i < u->grads; i++) { /* (a step that failed has left them as they were) */
        UnitBuffer *x = &u->grad[i];
        if (x->unit < 0) continue;
        TRY(wait(u, x));
        for (int k = 0; k < u->unit[x->unit].count; k++)
            u->params->whole_grad[u->unit[x->unit].bucket[k]] = (Tensor){ 0 };
        x->unit = -1;
        x->open = false;
    }
    for (int b = 0; b < registry(u)->bucket_count; b++) u->summed[b] = false;
    return ERR_OK;
}

static void list_units(Units *u)
{
    const ParamRegistry *r = registry(u);
    for (int b = 0, at = 0; b < r->bucket_count; at += r->buckets[b++].params) {
        u->first_param[b] = at;
        if (r->buckets[b].unit < 0) continue;
        Unit *n = &u->unit[r->buckets[b].unit];
        ASSERT(n->count < UNIT_BUCKETS);
        n->bucket[n->count++] = b;
    }
}

static int64_t largest(const Units *u)
{
    int64_t most = 0;
    for (int i = 0; i < u->count; i++) {
        int64_t elements = 0;
        for (int k = 0; k < u->unit[i].count; k++) elements += bucket_of(u, u->unit[i].bucket[k])->count;
        if (elements > most) most = elements;
    }
    return most;
}

static Err open_buffers(UnitBuffer *buffers, int count, DType dtype, int64_t elements, Arena *state)
{
    for (int i = 0; i < count; i++) {
        buffers[i].unit = -1;
        for (int k = 0; k < UNIT_BUCKETS; k++) event_init(&buffers[i].done[k]);
        TRY(tensor_new(state, &buffers[i].memory, dtype, elements));
    }
    return ERR_OK;
}

/* (In an action a unit may be read several times: the table by modules of multi-token prediction, and their head.) */
static Err open_orders(Units *u, int stages)
{
    u->stages = stages;
    TRY(setup_array(registry(u)->setup, stages * PASSES, &u->order));
    for (int i = 0; i < stages * PASSES; i++) {
        u->order[i].capacity = 4 * u->count;
        TRY(setup_array(registry(u)->setup, u->order[i].capacity, &u->order[i].unit));
    }
    return ERR_OK;
}

Err units_init(Units *u, ParamStore *params, Stream *stream, int stages, bool in_turn, Arena *state)
{
    const ParamRegistry *r = params->reg;
    *u = (Units){ .params = params, .stream = stream, .count = r->units + 1 };
    TRY(setup_array(r->setup, u->count, &u->unit));
    TRY(setup_array(r->setup, r->bucket_count, &u->first_param));
    TRY(setup_array(r->setup, r->bucket_count, &u->summed));
    for (Pass p = 0; p < PASSES; p++) {
        u->reading[p] = -1;
        u->now[p] = u->then[p] = (Visit){ -1, p };
    }
    TRY(open_orders(u, stages));
    list_units(u);
    const int64_t elements = largest(u);
    if (!elements) return ERR_OK;
    u->values = r->place.zero < ZERO_VALUES ? 0 : in_turn ? UNIT_VALUES : UNIT_VALUES / 2;
    u->grads = UNIT_GRADS;
    TRY(open_buffers(u->value, u->values, params->value.dtype, elements, state));
    return open_buffers(u->grad, u->grads, params->grad.dtype, elements, state);
}

int64_t units_buffers(const Units *u)
{
    int64_t bytes = 0;
    for (int i = 0; i < u->values; i++) bytes += tensor_bytes(u->value[i].memory);
    for (int i = 0; i < u->grads; i++) bytes += tensor_bytes(u->grad[i].memory);
    return bytes;
}

void units_release(Units *u)
{
    for (int k = 0; k < UNIT_BUCKETS; k++) {
        for (int i = 0; i < u->values; i++) event_release(&u->value[i].done[k]);
        for (int i = 0; i < u->grads; i++) event_release(&u->grad[i].done[k]);
    }
}
