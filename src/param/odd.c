/* See odd.h. */
#include "param/odd.h"

#include <math.h>
#include <stdlib.h>

#include "base/int64.h"
#include "base/log.h"

enum { PIECE_FLOATS = 1 << 18 }; /* (a GPU is asked for each) */

Err odd_open(OddValues *o, const ParamRegistry *whole, SetupArena *a)
{
    o->whole = whole;
    return setup_array(a, whole->count, &o->has);
}

void odd_look(OddValues *o, int id, const float *x, int64_t count)
{
    int64_t odd = 0;
    for (int64_t i = 0; i < count; i++) odd += !isfinite(x[i]);
    if (odd) __atomic_store_n(&o->has[id], 1, __ATOMIC_RELAXED);
}

static Err look_at(OddValues *o, const ParamStore *s, int at, Stream *stream, float *piece)
{
    const int id = param_find(o->whole, s->reg->items[at].name);
    const ParamRange own = param_held(s, at, s->master);
    const float *from = (const float *)s->master.data + param_origin(s, at, s->master);
    for (int64_t i = own.first, n; i < own.first + own.count; i += n) {
        n = min64(PIECE_FLOATS, own.first + own.count - i);
        TRY(device_read(stream, piece, from + i, n * (int64_t)sizeof *piece));
        odd_look(o, id, piece, n);
    }
    return ERR_OK;
}

Err odd_look_at_store(OddValues *o, const ParamStore *s, Stream *stream)
{
    float *piece = malloc(PIECE_FLOATS * sizeof *piece);
    Err err = piece ? ERR_OK : err_set(ERR_MEMORY, "no memory to look at weights");
    for (int i = 0; !err && i < s->reg->count; i++) err = look_at(o, s, i, stream, piece);
    free(piece);
    return err;
}

Err odd_share(OddValues *o, Comm *c, Stream *stream)
{
    const int count = o->whole->count;
    int64_t *has = calloc((size_t)count, sizeof *has);
    if (!has) return err_set(ERR_MEMORY, "no memory for what ranks found in their weights");
    for (int i = 0; i < count; i++) has[i] = o->has[i];
    const Err err = comm_max_i64(c, stream, has, count, NULL);
    for (int i = 0; !err && i < count; i++) o->has[i] = (int)has[i];
    free(has);
    return err;
}

void odd_warn(const OddValues *o, const char *from)
{
    int count = 0, first = 0;
    for (int i = o->whole->count - 1; i >= 0; i--)
        if (o->has[i]) count++, first = i;
    if (!count) return;
    log_warn("'%s': NaN or infinite weights in %d of %d tensors, first in '%s': the model computes nothing else; use "
             "other weights",
             from, count, o->whole->count, o->whole->items[first].name);
}
