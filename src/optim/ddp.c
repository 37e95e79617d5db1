/* See ddp.h. */
#include "optim/ddp.h"

#include <string.h>

#include "device/digest.h"

static const ParamRegistry *registry(const Ddp *d) { return d->params->reg; }

static Comm *group(const Ddp *d, const Bucket *b) { return d->params->group[b->group]; }

/* ---- gradients ---- */

/* Integers add up exactly in any order; with f32 accumulators the sum is a tree over ranks. */
static Err sum_over(Ddp *d, Comm *c, Tensor g, Event *done)
{
    if (g.dtype == I64) return comm_sum_i64(c, d->stream, g.data, tensor_count(g), done);
    return comm_reduce_tree_f32(c, d->stream, g, done);
}

static Err start_bucket(Ddp *d, int b)
{
    const Bucket *k = &registry(d)->buckets[b];
    Comm *c = group(d, k);
    const Tensor whole = d->params->whole_grad[b], own = param_bucket_grad(d->params, b);
    d->started[b] = true;
    d->stream->dev->beside++;
    if (k->near_shards == 1) return sum_over(d, c, whole, &d->reduced[b]);
    return units_sum_shard(c, d->stream, whole, own, &d->reduced[b]);
}

static Err on_added(void *user, int id)
{
    Ddp *d = user;
    const int b = registry(d)->items[id].bucket;
    const Bucket *k = &registry(d)->buckets[b];
    if (k->grad_cut) return ERR_OK;
    if (++d->added[id] != d->expected[id] || --d->missing[b] > 0) return ERR_OK;
    if (!d->spec.overlap_grad || k->partial || group(d, k)->size == 1) return ERR_OK;
    return start_bucket(d, b);
}

static bool is_cut(const Ddp *d, int id) { return registry(d)->buckets[registry(d)->items[id].bucket].grad_cut; }

/* Sets gradients to which nothing was added in this step to 0. */
static Err clear_fresh(Ddp *d)
{
    for (int i = 0; i < registry(d)->count; i++)
        if (!is_cut(d, i)) TRY(param_store_clear_fresh(d->params, d->stream, i));
    return ERR_OK;
}

/* Over tp and sp: two ranges at the end of `grad`, padding (zeros) included. */
static Err sum_partial(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    const int64_t heads = r->partial_at[PARTIAL_HEADS], rows = r->partial_at[PARTIAL_ROWS], end = r->grad_count;
    if (rows > heads) TRY(sum_over(d, &d->world->tp, tensor_row_slice(d->params->grad, heads, rows - heads), NULL));
    if (end == rows) return ERR_OK;
    return sum_over(d, &d->world->sp, tensor_row_slice(d->params->grad, rows, end - rows), NULL);
}

/* The range of a table that several stages read, or what this rank has of it; of no elements if there is none. */
static Tensor shared_table(const Ddp *d)
{
    const int64_t *at = registry(d)->partial_at;
    return tensor_row_slice(d->params->grad, at[PARTIAL_STAGES], at[PARTIAL_HEADS] - at[PARTIAL_STAGES]);
}

Err ddp_sum_stages(Ddp *d, int count)
{
    for (int r = 0; r < count; r++) {
        TRY(units_reduce(&d[r].units));
        TRY(clear_fresh(&d[r]));
    }
    Tensor table = shared_table(d);
    if (count > 1) {
        Tensor other = shared_table(&d[1]);
        if (!tensor_count(table)) return ERR_OK;
        TRY(op(d->stream, add_acc, .y = table, .x = other));
        return device_copy(d->stream, other.data, table.data, tensor_bytes(table));
    }
    return tensor_count(table) ? sum_over(d, &d->world->embd, table, NULL) : ERR_OK;
}

/* The ranks that have the same near shard of a bucket in other groups of ZeRO; NULL: there are none. */
static Comm *others(const Ddp *d, const Bucket *b)
{
    Comm *far = d->params->far[b->group];
    return far && far->size > 1 ? far : NULL;
}

/* Over the groups of ZeRO, which have summed in themselves: of this rank's near shards its ZeRO shards. */
static Err sum_far(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    for (int b = 0; b < r->bucket_count; b++) {
        const Tensor near = param_bucket_grad(d->params, b);
        Comm *far = others(d, &r->buckets[b]);
        if (!far) continue;
        d->stream->dev->beside++;
        if (r->buckets[b].zero_shards == 1) TRY(sum_over(d, far, near, &d->reduced[b]));
        else TRY(units_sum_shard(far, d->stream, near, param_bucket_own(d->params, b, near), &d->reduced[b]));
    }
    for (int b = 0; b < r->bucket_count; b++) {
        if (!others(d, &r->buckets[b])) continue;
        d->stream->dev->beside--;
        TRY(stream_wait(d->stream, &d->reduced[b]));
    }
    return ERR_OK;
}

Err ddp_reduce(Ddp *d)
{
    TRY(units_reduce(&d->units));
    TRY(units_forget(&d->units)); /* (the update changes them; an action that failed may have left some) */
    TRY(clear_fresh(d));
    TRY(sum_partial(d));
    memcpy(d->expected, d->added, (size_t)registry(d)->count * sizeof *d->expected);
    const ParamRegistry *r = registry(d);
    for (int b = 0; b < r->bucket_count; b++)
        if (!d->started[b] && !r->buckets[b].grad_cut && group(d, &r->buckets[b])->size > 1) TRY(start_bucket(d, b));
    for (int b = 0; b < r->bucket_count; b++) {
        if (!d->started[b]) continue;
        d->stream->dev->beside--;
        TRY(stream_wait(d->stream, &d->reduced[b]));
    }
    return sum_far(d);
}

/* ---- values ---- */

typedef struct {
    Ddp *ddp;
    int bucket;
} BucketCall;

static Err call_bucket(Ddp *d, int b, DeviceCall *call)
{
    const BucketCall x = { d, b };
    return device_call(d->stream, call, &x, sizeof x, digest_int(digest_pointer(DIGEST_EMPTY, d), b));
}

static Err wait_now(Stream *s, const void *args)
{
    const BucketCall *x = args;
    Ddp *d = x->ddp;
    if (!d->gathering[x->bucket]) return ERR_OK;
    d->gathering[x->bucket] = false;
    s->dev->beside--;
    return stream_wait(s, &d->gathered[x->bucket]);
}

static Err wait_bucket(Ddp *d, int b) { return call_bucket(d, b, wait_now); }

static bool is_gathered(const Bucket *k) { return k->near_shards > 1 && !k->value_cut; }

static Err on_read(void *user, int id, Pass pass)
{
    Ddp *d = user;
    const int b = registry(d)->items[id].bucket;
    if (d->spec.overlap_param && !d->asked[b] && is_gathered(&registry(d)->buckets[b])) TRY(wait_bucket(d, b));
    d->asked[b] = true;
    return units_read(&d->units, id, pass);
}

static Err on_write(void *user, int id) { return units_write(&((Ddp *)user)->units, id); }

static void on_begins(void *user, Visit now, Visit next) { units_begins(&((Ddp *)user)->units, now, next); }

static Err on_ended(void *user, Pass pass, bool keeps) { return units_ended(&((Ddp *)user)->units, pass, keeps); }

Err ddp_settle(Ddp *d)
{
    TRY(units_forget(&d->units));
    for (int b = 0; b < registry(d)->bucket_count; b++)
        if (is_gathered(&registry(d)->buckets[b])) TRY(wait_bucket(d, b));
    return ERR_OK;
}

static void gather_begun(Ddp *d, int b)
{
    d->gathering[b] = true;
    d->asked[b] = false;
    d->stream->dev->beside++;
}

static Err gather_far_now(Stream *s, const void *args)
{
    const BucketCall *x = args;
    Ddp *d = x->ddp;
    const Tensor near = param_bucket_value(d->params, x->bucket);
    TRY(comm_all_gather(others(d, &registry(d)->buckets[x->bucket]), s, near,
                        param_bucket_own(d->params, x->bucket, near), &d->gathered[x->bucket]));
    gather_begun(d, x->bucket);
    return ERR_OK;
}

static bool is_gathered_far(const Bucket *k) { return k->zero_shards != k->near_shards; }

/* Near shards, of the ZeRO shards of all that share them. */
static Err gather_far(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    for (int b = r->bucket_count - 1; b >= 0; b--)
        if (is_gathered_far(&r->buckets[b])) TRY(call_bucket(d, b, gather_far_now));
    for (int b = r->bucket_count - 1; b >= 0; b--)
        if (is_gathered_far(&r->buckets[b])) TRY(wait_bucket(d, b));
    return ERR_OK;
}

static Err gather_now(Stream *s, const void *args)
{
    const BucketCall *x = args;
    Ddp *d = x->ddp;
    TRY(comm_all_gather(group(d, &registry(d)->buckets[x->bucket]), s, d->params->whole_value[x->bucket],
                        param_bucket_value(d->params, x->bucket), &d->gathered[x->bucket]));
    gather_begun(d, x->bucket);
    return ERR_OK;
}

/* The buckets of norms and biases, which every block needs, lie last and go first: forward's order is the layout
 * read backwards. */
Err ddp_gather(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    TRY(gather_far(d));
    for (int b = r->bucket_count - 1; b >= 0; b--)
        if (is_gathered(&r->buckets[b])) TRY(call_bucket(d, b, gather_now));
    return d->spec.overlap_param ? ERR_OK : ddp_settle(d);
}

/* ---- life ---- */

Err ddp_init(Ddp *d, ParamStore *params, Stream *stream, World *world, DdpSpec spec, Arena *state)
{
    const ParamRegistry *r = params->reg;
    *d = (Ddp){ .params = params, .stream = stream, .world = world, .spec = spec };
    TRY(setup_array(r->setup, r->bucket_count, &d->started));
    TRY(setup_array(r->setup, r->bucket_count, &d->gathering));
    TRY(setup_array(r->setup, r->bucket_count, &d->asked));
    TRY(setup_array(r->setup, r->bucket_count, &d->missing));
    TRY(setup_array(r->setup, r->count, &d->added));
    TRY(setup_array(r->setup, r->count, &d->expected));
    TRY(setup_array(r->setup, r->bucket_count, &d->reduced));
    TRY(setup_array(r->setup, r->bucket_count, &d->gathered));
    for (int b = 0; b < r->bucket_count; b++) event_init(&d->reduced[b]), event_init(&d->gathered[b]);
    TRY(units_init(&d->units, params, stream, spec.stages, spec.in_turn, state));
    params->listener = (ParamListener){ d, on_begins, on_read, on_write, on_added, on_ended };
    return ddp_begin(d);
}

void ddp_release(Ddp *d)
{
    for (int b = 0; d->gathered && b < registry(d)->bucket_count; b++) {
        event_release(&d->reduced[b]);
        event_release(&d->gathered[b]);
    }
    units_release(&d->units);
}

void ddp_forget(Ddp *d)
{
    memset(d->expected, 0, (size_t)registry(d)->count * sizeof *d->expected);
    units_unlearn(&d->units);
}

Err ddp_begin(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    for (int b = 0; b < r->bucket_count; b++) {
        d->started[b] = d->asked[b] = false;
        d->missing[b] = r->buckets[b].params;
    }
    memset(d->added, 0, (size_t)r->count * sizeof *d->added);
    TRY(units_forget(&d->units)); /* (of an evaluation: a step that is replayed does not know of it) */
    return units_begin(&d->units);
}
