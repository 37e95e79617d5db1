/* The registry and its flat buffers; see param.h. Boxes and pieces for checkpoints are in shard.c. */
#include "param/param.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mathx.h"
#include "base/rng.h"

enum { FILL_ELEMS = 1 << 20 };

void param_registry_init(ParamRegistry *r, SetupArena *setup, int tp, int tp_rank)
{
    *r = (ParamRegistry){ .tp = tp, .tp_rank = tp_rank, .setup = setup };
}

/* Where the name's index + 1 stands, or 0 where it belongs. */
static int *name_entry(const ParamRegistry *r, const char *name)
{
    uint64_t at = rng_key(0, name), mask = 2 * (uint64_t)r->capacity - 1;
    while (r->by_name[at & mask] && strcmp(r->items[r->by_name[at & mask] - 1].name, name)) at++;
    return &r->by_name[at & mask];
}

/* The tables double in setup memory; the old copies stay there, which is bounded by the final size. */
static Err grow(ParamRegistry *r)
{
    if (r->count < r->capacity) return ERR_OK;
    int capacity = r->capacity ? 2 * r->capacity : 64;
    Param *items;
    TRY(setup_array(r->setup, capacity, &items));
    TRY(setup_array(r->setup, 2 * (int64_t)capacity, &r->by_name));
    if (r->count) memcpy(items, r->items, (size_t)r->count * sizeof *items);
    r->items = items;
    r->capacity = capacity;
    for (int i = 0; i < r->count; i++) *name_entry(r, items[i].name) = i + 1;
    return ERR_OK;
}

static Err check_spec(const ParamRegistry *r, const ParamSpec *s)
{
    if (*name_entry(r, s->name)) return err_set(ERR_INTERNAL, "parameter '%s' twice", s->name);
    if (strlen(s->name) >= PARAM_NAME_MAX)
        return err_set(ERR_INTERNAL, "parameter name '%s' too long", s->name);
    int64_t sum = 0;
    for (int i = 0; i < PARAM_MAX_SECTIONS; i++) {
        sum += s->section[i];
        if (s->section[i] % s->interleave)
            return err_set(ERR_CONFIG, "%s: section of %lld rows does not divide into %lld chunks", s->name,
                           (long long)s->section[i], (long long)s->interleave);
    }
    if (sum && sum != s->shape[0]) return err_set(ERR_INTERNAL, "%s: sections do not add up", s->name);
    if (s->cut[0] == CUT_TP && s->interleave > 1 && s->interleave % r->tp)
        return err_set(ERR_CONFIG, "%s: %lld chunks cannot be cut over tp=%d", s->name,
                       (long long)s->interleave, r->tp);
    return ERR_OK;
}

static int64_t padded(int64_t count) { return (count + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN; }

Err param_add(ParamRegistry *r, ParamSpec spec, int *id)
{
    if (!spec.padded_rows) spec.padded_rows = spec.shape[0];
    if (!spec.interleave) spec.interleave = 1;
    if (spec.ndim == 1) spec.shape[1] = 1;
    TRY(grow(r));
    TRY(check_spec(r, &spec));
    Param *p = &r->items[r->count];
    snprintf(p->name, sizeof p->name, "%s", spec.name);
    p->spec = spec;
    p->spec.name = NULL; /* the caller's text may go; ours is p->name */
    const int64_t whole[2] = { spec.padded_rows, spec.shape[1] };
    for (int d = 0; d < 2; d++) {
        int parts = spec.cut[d] == CUT_TP ? r->tp : 1;
        if (whole[d] % parts)
            return err_set(ERR_CONFIG, "%s: dim %d of %lld cannot be cut over tp=%d", p->name, d,
                           (long long)whole[d], parts);
        p->local[d] = whole[d] / parts;
        p->first[d] = parts > 1 ? p->local[d] * r->tp_rank : 0;
    }
    p->count = p->local[0] * p->local[1];
    p->offset = r->flat_count;
    r->flat_count += padded(p->count);
    *id = r->count++;
    *name_entry(r, p->name) = r->count;
    return ERR_OK;
}

int64_t param_total(const ParamRegistry *r)
{
    int64_t n = 0;
    for (int i = 0; i < r->count; i++) n += r->items[i].spec.shape[0] * r->items[i].spec.shape[1];
    return n;
}

/* A single product is the whole gradient only where no other rank holds a part of it. */
static Err place_grads(ParamStore *s, Arena *state, GradKind grads)
{
    int64_t once = 0, other = 0;
    TRY(setup_array(s->reg->setup, s->reg->count, &s->place));
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        GradPlace *g = &s->place[i];
        g->once =
            grads == GRADS_I64_ONCE && p->spec.flags & PARAM_ONE_PRODUCT && p->spec.partial == PARTIAL_NONE;
        int64_t *end = g->once ? &once : &other;
        g->offset = *end;
        *end += padded(p->count);
    }
    param_store_begin(s);
    TRY(tensor_new(state, &s->grad, grads == GRADS_F32 ? F32 : I64, other));
    return tensor_new(state, &s->grad_once, F32, once);
}

Err param_store_init(ParamStore *s, const ParamRegistry *reg, Arena *state, DType value_dtype, GradKind grads)
{
    *s = (ParamStore){ .reg = reg };
    TRY(tensor_new(state, &s->master, F32, reg->flat_count));
    s->value = s->master;
    if (value_dtype != F32) TRY(tensor_new(state, &s->value, value_dtype, reg->flat_count));
    TRY(tensor_new(state, &s->shift, I32, reg->count));
    if (grads == GRADS_NONE) return ERR_OK;
    TRY(tensor_new(state, &s->next_shift, I32, reg->count));
    TRY(tensor_new(state, &s->overflow_cell, I64, 1));
    s->overflow = tensor_of(s->overflow_cell.data, I32, 1);
    TRY(tensor_new(state, &s->max, I64, reg->count));
    TRY(tensor_new(state, &s->sumsq, I64, reg->count, 4));
    TRY(place_grads(s, state, grads));
    TRY(tensor_new(state, &s->m, F32, reg->flat_count));
    return tensor_new(state, &s->v, F32, reg->flat_count);
}

void param_store_begin(ParamStore *s)
{
    for (int i = 0; i < s->reg->count; i++) s->place[i].fresh = true;
}

static Tensor view_at(const Param *p, Tensor flat, int64_t offset)
{
    char *at = (char *)flat.data + offset * dtype_size(flat.dtype);
    if (p->spec.ndim == 1) return tensor_of(at, flat.dtype, p->local[0]);
    return tensor_of(at, flat.dtype, p->local[0], p->local[1]);
}

Tensor param_view(const Param *p, Tensor flat) { return view_at(p, flat, p->offset); }

Tensor param_store_grad(const ParamStore *s, int id)
{
    const GradPlace *g = &s->place[id];
    return view_at(&s->reg->items[id], g->once ? s->grad_once : s->grad, g->offset);
}

Tensor param_store_shift(const ParamStore *s, int id) { return tensor_row_slice(s->shift, id, 1); }

int64_t param_plain_row(const Param *p, int64_t r)
{
    const ParamSpec *s = &p->spec;
    int64_t row = p->first[0] + r;
    if (row >= s->shape[0]) return -1;
    if (!s->section[0]) return row;
    int64_t per_chunk = s->shape[0] / s->interleave, chunk = row / per_chunk, in = row % per_chunk, start = 0;
    for (int i = 0; i < PARAM_MAX_SECTIONS; i++) {
        int64_t part = s->section[i] / s->interleave;
        if (in < part) return start + chunk * part + in;
        in -= part;
        start += s->section[i];
    }
    ASSERT(!"row beyond the sections");
    return -1;
}

/*
 * Normal numbers, two per half of a Philox call, by Box and Muller; element i of a tensor uses counter i / 4.
 * Keyed by the plain global index: neither cut, padding nor interleaving enters.
 */
static float normal_at(uint64_t key, int64_t index)
{
    Philox r = philox(key, (uint32_t)(index >> 2), (uint32_t)(index >> 34), 0, 0);
    const uint32_t *u = &r.v[index & 2];
    double radius = sqrt(-2 * m_log(((double)u[0] + 1) * 0x1p-32)), angle = 2 * M_PI * (double)u[1] * 0x1p-32;
    return (float)(radius * (index & 1 ? m_sin(angle) : m_cos(angle)));
}

/* Local rows [first, first + count). */
static void fill_rows(const Param *p, float *out, int64_t first, int64_t count, uint64_t key, int threads)
{
    const ParamSpec *s = &p->spec;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < count; r++) {
        int64_t row = param_plain_row(p, first + r);
        for (int64_t c = 0; c < p->local[1]; c++) {
            float x = s->init == INIT_ONE ? 1 : 0;
            if (row >= 0 && s->init == INIT_NORMAL)
                x = s->std * normal_at(key, row * s->shape[1] + p->first[1] + c);
            out[r * p->local[1] + c] = row < 0 ? 0 : x;
        }
    }
}

/* By pieces of host memory, which the device then takes over. */
static Err fill_param(const Param *p, Stream *stream, Tensor flat, float *host, int64_t host_elems,
                      uint64_t key, int threads)
{
    int64_t cols = p->local[1], most = host_elems / cols;
    float *to = (float *)flat.data + p->offset;
    for (int64_t first = 0, count; first < p->local[0]; first += count) {
        count = p->local[0] - first < most ? p->local[0] - first : most;
        fill_rows(p, host, first, count, key, threads);
        TRY(device_write(stream, to + first * cols, host, count * cols * (int64_t)sizeof *host));
    }
    return ERR_OK;
}

static int64_t widest_row(const ParamRegistry *reg)
{
    int64_t most = FILL_ELEMS;
    for (int i = 0; i < reg->count; i++)
        if (reg->items[i].local[1] > most) most = reg->items[i].local[1];
    return most;
}

Err param_store_publish(ParamStore *s, Stream *stream)
{
    if (s->value.dtype == s->master.dtype) return ERR_OK;
    return op(stream, cast, .y = s->value, .x = s->master);
}

Err param_store_fill(ParamStore *s, Stream *stream, uint64_t seed, int shift, int threads)
{
    if (stream->dev->is_null) return ERR_OK;
    int64_t elems = widest_row(s->reg);
    float *host;
    int32_t *shifts;
    TRY(setup_array(s->reg->setup, elems, &host));
    TRY(setup_array(s->reg->setup, s->reg->count, &shifts));
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        shifts[i] = shift;
        TRY(fill_param(p, stream, s->master, host, elems, rng_key(seed, p->name), threads));
    }
    TRY(device_write(stream, s->shift.data, shifts, tensor_bytes(s->shift)));
    return param_store_publish(s, stream);
}
