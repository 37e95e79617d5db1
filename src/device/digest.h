/* Digests of arguments: equal numbers in the same order have the same digest; others, but for one in 2^64, another. */
#ifndef MEGATRAIN_DEVICE_DIGEST_H
#define MEGATRAIN_DEVICE_DIGEST_H

#include <stdint.h>
#include <string.h>

#include "base/fp8.h"
#include "device/step.h"
#include "device/tensor.h"

enum { DIGEST_EMPTY = 1 };

static inline uint64_t digest_add(uint64_t digest, uint64_t x)
{
    digest = (digest ^ x) * UINT64_C(0x9E3779B97F4A7C15);
    digest = (digest ^ digest >> 29) * UINT64_C(0xBF58476D1CE4E5B9);
    return digest ^ digest >> 32;
}

static inline uint64_t digest_int(uint64_t digest, int64_t x) { return digest_add(digest, (uint64_t)x); }

static inline uint64_t digest_pointer(uint64_t digest, const void *p) { return digest_add(digest, (uintptr_t)p); }

static inline uint64_t digest_float(uint64_t digest, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return digest_add(digest, bits);
}

/* (Never the bytes of a struct: those between its members may be anything.) */
static inline uint64_t digest_tensor(uint64_t digest, const Tensor *t)
{
    digest = digest_pointer(digest, t->data);
    if (!t->data) return digest;
    for (int d = 0; d < t->ndim; d++) digest = digest_int(digest, t->dim[d]);
    digest = digest_int(digest, t->ld);
    digest = digest_int(digest, t->ndim);
    digest = digest_int(digest, t->dtype);
    digest = digest_pointer(digest, t->rows);
    digest = digest_int(digest, t->group);
    return t->scale ? digest_tensor(digest, t->scale) : digest;
}

static inline uint64_t digest_dropout(uint64_t digest, Dropout d)
{
    return digest_float(digest_add(digest_add(digest, d.key), d.threshold), d.scale);
}

static inline uint64_t digest_router(uint64_t digest, Router r)
{
    digest = digest_int(digest_int(digest, r.score), r.normalize);
    digest = digest_float(digest, r.scale);
    return digest_int(digest_int(digest_int(digest, r.groups), r.group_topk), r.group_best);
}

static inline uint64_t digest_rows(uint64_t digest, QkRows q)
{
    digest = digest_int(digest, q.chunk);
    for (int i = 0; i < 2; i++) digest = digest_int(digest_int(digest, q.rows[i]), q.kind[i]);
    return digest_int(digest_int(digest, q.heads), q.chunks);
}

static inline uint64_t digest_spans(uint64_t digest, Spans s)
{
    for (int i = 0; i < 2; i++) digest = digest_int(digest_int(digest, s.first[i]), s.count[i]);
    return digest;
}

static inline uint64_t digest_blocks(uint64_t digest, Fp8Blocks b)
{
    return digest_int(digest_int(digest_int(digest, b.rows), b.columns), b.scale);
}

/* Digests a scalar argument by its type. */
#define digest_scalar(digest, x) \
    _Generic((x),                     \
        Dropout: digest_dropout,      \
        Router: digest_router,        \
        QkRows: digest_rows,          \
        Spans: digest_spans,          \
        Fp8Blocks: digest_blocks,     \
        float: digest_float,          \
        uint64_t: digest_add,         \
        StepValues *: digest_pointer, \
        const StepValues *: digest_pointer, \
        default: digest_int)(digest, x)

#endif
