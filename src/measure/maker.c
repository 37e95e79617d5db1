/* Tensors with contents, for cases.c: copied from patterns that are made once. See cases.h. */
#include "measure/cases.h"

#include <stdlib.h>

#include "base/fp8.h"
#include "base/rng.h"

static double uniform01(int64_t i) { return (double)(rng_mix((uint64_t)i) >> 11) * 0x1p-53; }

/* Cubed: few tokens are frequent, most are rare, as in text. */
static int32_t token_at(const Maker *m, int64_t i)
{
    double u = uniform01(i);
    return (int32_t)((double)m->d->V * u * u * u);
}

static int32_t index_at(const Maker *m, Fill fill, int64_t i)
{
    const double u = uniform01(i);
    if (fill == FILL_EXPERTS) return (int32_t)((double)m->d->experts * (m->d->skewed ? u * u : u));
    return fill == FILL_TOKENS ? token_at(m, i) : (int32_t)(i % m->d->T);
}

static int32_t document_at(const Maker *m, int64_t i)
{
    const int64_t length = m->d->T / 8;
    return (int32_t)(i % m->d->T / length * length);
}

static void put_item(const Maker *m, Fill fill, DType t, char *at, int64_t i)
{
    double u = uniform01(i), value = fill == FILL_POSITIVE ? u : 2 * u - 1;
    if (fill == FILL_DOCUMENTS) ((int32_t *)at)[i] = document_at(m, i);
    else if (t == I32) ((int32_t *)at)[i] = index_at(m, fill, i);
    else if (t == I64) ((int64_t *)at)[i] = fill == FILL_SAMPLES ? i / m->d->T : (int64_t)(value * 0x1p40);
    else if (t == F32) ((float *)at)[i] = (float)value;
    else if (t == E4M3) ((uint8_t *)at)[i] = e4m3_from_float((float)value * E4M3_MOST);
    else if (t == E5M2) ((uint8_t *)at)[i] = e5m2_from_float((float)value * E5M2_MOST);
    else ((uint16_t *)at)[i] = t == BF16 ? bf16_from_float((float)value) : f16_from_float((float)value);
}

static Err make_pattern(Maker *m, Fill fill, DType t, void *host)
{
    for (int64_t i = 0; i < m->pattern_items; i++) put_item(m, fill, t, host, i);
    TRY(arena_alloc(m->arena, m->pattern_items * dtype_size(t), &m->pattern[fill][t]));
    return device_write(&m->dev->stream, m->pattern[fill][t], host, m->pattern_items * dtype_size(t));
}

static Err make_patterns(Maker *m, void *host)
{
    static const struct {
        Fill fill;
        DType t;
    } wanted[] = {
        { FILL_UNIFORM, F32 },   { FILL_UNIFORM, BF16 },  { FILL_UNIFORM, F16 }, { FILL_POSITIVE, F32 },
        { FILL_POSITIONS, I32 }, { FILL_DOCUMENTS, I32 }, { FILL_SAMPLES, I64 }, { FILL_EXPERTS, I32 },
        { FILL_UNIFORM, E4M3 },  { FILL_UNIFORM, E5M2 },  { FILL_TOKENS, I32 }
    }; /* the tokens, made last, stay */
    if (m->acc == I64) TRY(make_pattern(m, FILL_UNIFORM, I64, host));
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) TRY(make_pattern(m, wanted[i].fill, wanted[i].t, host));
    return device_sync(&m->dev->stream);
}

Err maker_open(Maker *m, Device *dev, Arena *arena, const Dims *d, DType dtype, DType acc, int64_t pattern_items)
{
    ASSERT(pattern_items % d->T == 0);
    void *host = malloc((size_t)pattern_items * sizeof(int64_t));
    *m = (Maker){ .dev = dev, .arena = arena, .d = d, .dtype = dtype, .acc = acc, .pattern_items = pattern_items };
    if (!host) return err_set(ERR_MEMORY, "no memory for what tensors are filled with");
    m->tokens = host;
    const Err err = make_patterns(m, host);
    if (err) maker_close(m);
    return err;
}

void maker_close(Maker *m)
{
    free(m->tokens);
    m->tokens = NULL;
}

Err maker_tensor(Maker *m, Tensor *out, int times, Fill fill, DType t, int ndim, const int64_t *dim)
{
    Stream *s = &m->dev->stream;
    TRY(tensor_alloc(m->arena, out, t, ndim, dim));
    int64_t size = tensor_bytes(*out), step = m->pattern_items * dtype_size(t);
    m->bytes += times * size;
    if (fill == FILL_ZERO) return device_zero(s, out->data, size);
    ASSERT(m->pattern[fill][t]);
    for (int64_t at = 0; at < size; at += step)
        TRY(device_copy(s, (char *)out->data + at, m->pattern[fill][t], size - at < step ? size - at : step));
    return ERR_OK;
}
