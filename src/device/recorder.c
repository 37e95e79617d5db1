/* See recorder.h. */
#include "device/recorder.h"

#include <stdlib.h>

enum { ARGS_ALIGN = 16 };

/*
 * ---- graphs of the device ----
 *
 * Between begin and end the stream's work is recorded, not done; replay does it, any number of times. Nothing in
 * between may wait for the device, mark or wait for an event, or move host memory. record_end after a failure drops the
 * record. *launches: how many the record is in one; if 0 there is no graph.
 */

static Err record_begin(Stream *s) { return s->dev->backend->record_begin(s); }

static Err record_end(Stream *s, DeviceGraph **out, int64_t *launches)
{
    return s->dev->backend->record_end(s, out, launches);
}

static Err replay(Stream *s, DeviceGraph *graph) { return s->dev->backend->replay(s, graph); }

static void graph_free(Device *dev, DeviceGraph *graph)
{
    if (graph) dev->backend->graph_free(graph);
}

/* ---- items ---- */

static Err grow(void **memory, int64_t *capacity, int64_t needed, int64_t size)
{
    if (needed <= *capacity) return ERR_OK;
    const int64_t more = needed > 2 * *capacity ? needed : 2 * *capacity;
    void *moved = realloc(*memory, (size_t)(more * size));
    if (!moved) return err_set(ERR_MEMORY, "no host memory for a recording");
    *memory = moved;
    *capacity = more;
    return ERR_OK;
}

static Err add_item(Recording *r, RecordedItem item)
{
    void *items = r->items;
    const Err err = grow(&items, &r->capacity, r->count + 1, sizeof *r->items);
    r->items = items;
    if (!err) r->items[r->count++] = item;
    return err;
}

static Err add_call(Recording *r, DeviceCall *call, const void *args, int64_t bytes)
{
    void *memory = r->args;
    const int64_t at = r->args_bytes, end = (at + bytes + ARGS_ALIGN - 1) / ARGS_ALIGN * ARGS_ALIGN;
    const Err err = grow(&memory, &r->args_capacity, end, 1);
    r->args = memory;
    TRY(err);
    memcpy(r->args + at, args, (size_t)bytes);
    r->args_bytes = end;
    r->calls++;
    return add_item(r, (RecordedItem){ .call = call, .at = at });
}

void recording_release(Recording *r, Device *dev)
{
    for (int64_t i = 0; i < r->count; i++) graph_free(dev, r->items[i].graph);
    free(r->items);
    free(r->args);
    *r = (Recording){ 0 };
}

Err recording_replay(const Recording *r, Stream *s)
{
    DeviceCounters *counters = &s->dev->counters;
    for (int64_t i = 0; i < r->count; i++) {
        const RecordedItem *item = &r->items[i];
        if (item->graph) TRY(replay(s, item->graph));
        else TRY(item->call(s, r->args + item->at));
    }
    counters->flop += r->flop;
    counters->bytes += r->bytes;
    counters->ops += r->ops;
    counters->graphs += r->graphs;
    counters->graph_launches += r->launches;
    counters->graph_calls += r->calls;
    return ERR_OK;
}

/* ---- recording ---- */

/* Says what a human can do who only wants the run to go on. */
static Err say_how(Err err)
{
    err_hint("run.graphs=false runs steps op by op");
    return err;
}

/* The piece that is being captured ends, and runs. (One that turned out to be empty is none.) */
static Err close_piece(Recorder *r, Stream *s)
{
    RecordedItem piece = { .at = 0 };
    if (!r->open) return ERR_OK;
    r->open = false;
    Err err = record_end(s, &piece.graph, &piece.launches);
    if (err) return say_how(err);
    if (!piece.graph) return ERR_OK;
    err = add_item(r->into, piece);
    if (err) return graph_free(s->dev, piece.graph), err;
    r->into->graphs++;
    r->into->launches += piece.launches;
    return replay(s, piece.graph);
}

/* Behind a failure of host code: what was captured is nothing. */
static void drop_piece(Recorder *r, Stream *s, Err err)
{
    DeviceGraph *graph = NULL;
    int64_t launches;
    ErrKept kept;
    if (!r->open) return;
    r->open = false;
    err_keep(&kept);
    if (!record_end(s, &graph, &launches)) graph_free(s->dev, graph);
    err_again(&kept, err);
}

void recorder_begin(Recorder *r, Stream *s, Recording *into)
{
    ASSERT(!s->dev->recorder && s == &s->dev->stream);
    *r = (Recorder){ .digest = DIGEST_EMPTY, .into = into, .before = s->dev->counters };
    s->dev->recorder = r;
}

Err recorder_end(Recorder *r, Stream *s, Err err)
{
    if (err) drop_piece(r, s, err);
    else err = close_piece(r, s);
    s->dev->recorder = NULL;
    if (!r->into) return err;
    if (err) return recording_release(r->into, s->dev), err;
    const DeviceCounters *now = &s->dev->counters;
    r->into->digest = r->digest;
    r->into->flop = now->flop - r->before.flop;
    r->into->bytes = now->bytes - r->before.bytes;
    r->into->ops = now->ops - r->before.ops;
    return ERR_OK;
}

/* (Whether collectives go on beside an op, which decides how a product is made, changes no bit of it: it is recorded as
 * it was.) */
Err recorder_work(Stream *s, uint64_t digest)
{
    Recorder *r = s->dev->recorder;
    if (s != &s->dev->stream) return recorder_refuse(s, "copies in a second stream");
    r->digest = digest_add(r->digest, digest);
    if (!r->into || r->open) return ERR_OK;
    const Err err = record_begin(s);
    r->open = !err;
    return err ? say_how(err) : ERR_OK;
}

Err recorder_refuse(Stream *s, const char *what)
{
    Recorder *r = s->dev->recorder;
    if (!r->refused) r->refused = what;
    return close_piece(r, &s->dev->stream);
}

Err recorder_call(Stream *s, DeviceCall *call, const void *args, int64_t bytes, uint64_t digest)
{
    Recorder *r = s->dev->recorder;
    if (s != &s->dev->stream) {
        TRY(recorder_refuse(s, "a second stream"));
        return call(s, args);
    }
    r->digest = digest_add(digest_add(r->digest, digest), (uintptr_t)call);
    TRY(close_piece(r, s));
    if (r->into) TRY(add_call(r->into, call, args, bytes));
    r->inside++;
    const Err err = call(s, args);
    r->inside--;
    return err;
}
