/* See ddp.h. */
#include "optim/ddp.h"

#include <string.h>

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
    const int64_t length = k->count / k->zero_shards;
    Comm *c = group(d, k);
    Tensor whole = tensor_row_slice(d->params->grad, k->first, k->count);
    Tensor own = tensor_row_slice(whole, k->zero_shard * length, length);
    d->started[b] = true;
    d->stream->dev->beside++;
    if (k->zero_shards == 1) return sum_over(d, c, whole, &d->reduced[b]);
    if (whole.dtype == F32) return comm_reduce_scatter_tree_f32(c, d->stream, own, whole, &d->reduced[b]);
    return comm_reduce_scatter_i64(c, d->stream, own.data, whole.data, length, &d->reduced[b]);
}

static Err on_added(void *user, int id)
{
    Ddp *d = user;
    const int b = registry(d)->items[id].bucket;
    const Bucket *k = &registry(d)->buckets[b];
    if (++d->added[id] != d->expected[id] || --d->missing[b] > 0) return ERR_OK;
    if (!d->overlap_grad || k->partial || group(d, k)->size == 1) return ERR_OK;
    return start_bucket(d, b);
}

/* What got no gradient in this step has 0. */
static Err clear_fresh(Ddp *d)
{
    for (int i = 0; i < registry(d)->count; i++) {
        if (!d->params->fresh[i]) continue;
        Tensor g = tensor_reshape(param_store_grad(d->params, i), registry(d)->items[i].count);
        TRY(op(d->stream, fill_zero_acc, .x = g));
        d->params->fresh[i] = false;
    }
    return ERR_OK;
}

/* Over tp and sp: two ranges at the end of `grad`, padding (zeros) included. */
static Err sum_partial(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    const int64_t heads = r->partial_at[PARTIAL_HEADS], rows = r->partial_at[PARTIAL_ROWS],
                  end = r->flat_count;
    if (rows > heads)
        TRY(sum_over(d, &d->world->tp, tensor_row_slice(d->params->grad, heads, rows - heads), NULL));
    if (end == rows) return ERR_OK;
    return sum_over(d, &d->world->sp, tensor_row_slice(d->params->grad, rows, end - rows), NULL);
}

/* The range of a table that several stages read; of no elements if there is none. */
static Tensor shared_table(const Ddp *d)
{
    const int64_t *at = registry(d)->partial_at;
    return tensor_row_slice(d->params->grad, at[PARTIAL_STAGES], at[PARTIAL_HEADS] - at[PARTIAL_STAGES]);
}

Err ddp_sum_stages(Ddp *d, int count)
{
    for (int r = 0; r < count; r++) TRY(clear_fresh(&d[r]));
    Tensor table = shared_table(d);
    if (count > 1) {
        Tensor other = shared_table(&d[1]);
        if (!tensor_count(table)) return ERR_OK;
        TRY(op(d->stream, add_acc, .y = table, .x = other));
        return device_copy(d->stream, other.data, table.data, tensor_bytes(table));
    }
    return tensor_count(table) ? sum_over(d, &d->world->embd, table, NULL) : ERR_OK;
}

Err ddp_reduce(Ddp *d)
{
    TRY(clear_fresh(d));
    TRY(sum_partial(d));
    memcpy(d->expected, d->added, (size_t)registry(d)->count * sizeof *d->expected);
    const ParamRegistry *r = registry(d);
    for (int b = 0; b < r->bucket_count; b++)
        if (!d->started[b] && group(d, &r->buckets[b])->size > 1) TRY(start_bucket(d, b));
    for (int b = 0; b < r->bucket_count; b++) {
        if (!d->started[b]) continue;
        d->stream->dev->beside--;
        TRY(stream_wait(d->stream, &d->reduced[b]));
    }
    return ERR_OK;
}

/* ---- values ---- */

static Err wait_bucket(Ddp *d, int b)
{
    if (!d->gathering[b]) return ERR_OK;
    d->gathering[b] = false;
    d->stream->dev->beside--;
    return stream_wait(d->stream, &d->gathered[b]);
}

static Err on_read(void *user, int id) { return wait_bucket(user, registry((Ddp *)user)->items[id].bucket); }

Err ddp_settle(Ddp *d)
{
    for (int b = 0; b < registry(d)->bucket_count; b++) TRY(wait_bucket(d, b));
    return ERR_OK;
}

/* The buckets of norms and biases, which every block needs, lie last and go first: forward's order is the layout
 * read backwards. */
Err ddp_gather(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    for (int b = r->bucket_count - 1; b >= 0; b--) {
        const Bucket *k = &r->buckets[b];
        if (k->zero_shards == 1) continue;
        Tensor whole = tensor_row_slice(d->params->value, k->first, k->count);
        Tensor own =
            tensor_row_slice(whole, k->zero_shard * (k->count / k->zero_shards), k->count / k->zero_shards);
        TRY(comm_all_gather(group(d, k), d->stream, whole, own, &d->gathered[b]));
        d->gathering[b] = true;
        d->stream->dev->beside++;
    }
    return d->overlap_param ? ERR_OK : ddp_settle(d);
}

/* ---- life ---- */

Err ddp_init(Ddp *d, ParamStore *params, Stream *stream, World *world, bool overlap_grad, bool overlap_param)
{
    const ParamRegistry *r = params->reg;
    *d = (Ddp){ params, stream, world, overlap_grad, overlap_param, 0 };
    TRY(setup_array(r->setup, r->bucket_count, &d->started));
    TRY(setup_array(r->setup, r->bucket_count, &d->gathering));
    TRY(setup_array(r->setup, r->bucket_count, &d->missing));
    TRY(setup_array(r->setup, r->count, &d->added));
    TRY(setup_array(r->setup, r->count, &d->expected));
    TRY(setup_array(r->setup, r->bucket_count, &d->reduced));
    TRY(setup_array(r->setup, r->bucket_count, &d->gathered));
    for (int b = 0; b < r->bucket_count; b++) event_init(&d->reduced[b]), event_init(&d->gathered[b]);
    params->listener = (ParamListener){ d, on_added, on_read };
    ddp_begin(d);
    return ERR_OK;
}

void ddp_release(Ddp *d)
{
    for (int b = 0; d->gathered && b < registry(d)->bucket_count; b++) {
        event_release(&d->reduced[b]);
        event_release(&d->gathered[b]);
    }
}

void ddp_forget(Ddp *d) { memset(d->expected, 0, (size_t)registry(d)->count * sizeof *d->expected); }

void ddp_begin(Ddp *d)
{
    const ParamRegistry *r = registry(d);
    for (int b = 0; b < r->bucket_count; b++) {
        d->started[b] = false;
        d->missing[b] = r->buckets[b].params;
    }
    memset(d->added, 0, (size_t)r->count * sizeof *d->added);
}
