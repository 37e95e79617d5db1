/* See offload.h. */
#include "layer/offload.h"

Err offload_init(Offload *o, Device *dev, bool keep_w)
{
    for (int i = 0; i < OFFLOAD_BUFFERS; i++) {
        event_init(&o->buffer[i].filled);
        event_init(&o->buffer[i].copied);
    }
    o->copies = &dev->copies;
    o->keep_w = keep_w;
    for (int i = 0; i < OFFLOAD_BUFFERS; i++) {
        TRY(device_mark(&dev->stream, &o->buffer[i].filled));
        TRY(device_mark(o->copies, &o->buffer[i].copied));
    }
    return ERR_OK;
}

void offload_release(Offload *o)
{
    for (int i = 0; o->copies && i < OFFLOAD_BUFFERS; i++) {
        event_release(&o->buffer[i].filled);
        event_release(&o->buffer[i].copied);
    }
}

static OffloadBuffer *buffer_of(const Ctx *c, int at) { return &c->offload->buffer[at % OFFLOAD_BUFFERS]; }

/* Regions whose saves leave. */
static int regions(const Ctx *c) { return c->offload->keep_w ? REGION_W : REGION_COUNT; }

/* The compute stream goes on when the buffer's last copy has ended. */
static Err wait_copied(Ctx *c, OffloadBuffer *b)
{
    if (!b->copying) return ERR_OK;
    b->copying = false;
    return stream_wait(c->s, &b->copied);
}

/* Copies go on when the compute stream has come to this point. */
static Err wait_filled(Ctx *c, OffloadBuffer *b)
{
    TRY(device_mark(c->s, &b->filled));
    return stream_wait(c->offload->copies, &b->filled);
}

static Err copy_begun(Ctx *c, OffloadBuffer *b)
{
    b->copying = true;
    return device_mark(c->offload->copies, &b->copied);
}

Err offload_begin(Ctx *c, int at)
{
    OffloadBuffer *b = buffer_of(c, at);
    TRY(wait_copied(c, b));
    arena_release(&b->room, 0);
    for (int r = 0; r < regions(c); r++) c->into[r] = &b->room;
    return ERR_OK;
}

Err offload_leave(Ctx *c, int at)
{
    OffloadBuffer *b = buffer_of(c, at);
    SaveAway *away = &c->slot->away[at];
    for (int r = 0; r < REGION_COUNT; r++) c->into[r] = &c->slot->region[r];
    if (!c->mode.training) return ERR_OK;
    away->size_bytes = b->room.used_bytes;
    TRY(arena_alloc(&c->slot->host, away->size_bytes, &away->host));
    TRY(wait_filled(c, b));
    TRY(device_read_later(c->offload->copies, away->host, b->room.base, away->size_bytes));
    return copy_begun(c, b);
}

Err offload_fetch(Ctx *c, int at)
{
    OffloadBuffer *b = buffer_of(c, at);
    const SaveAway *away = &c->slot->away[at];
    void *to;
    b->room.used_bytes = 0; /* (not released: what was there may still be on its way out) */
    TRY(arena_alloc(&b->room, away->size_bytes, &to));
    for (int r = 0; r < regions(c); r++) c->slot->segments[at].base[r] = to;
    TRY(wait_filled(c, b));
    TRY(device_write_later(c->offload->copies, to, away->host, away->size_bytes));
    return copy_begun(c, b);
}

Err offload_arrive(Ctx *c, int at) { return wait_copied(c, buffer_of(c, at)); }
