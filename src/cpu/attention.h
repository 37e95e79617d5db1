/*
 * What the forward and the backward pass of attention share: tiles of queries, runs of keys, scores.
 *
 * Everything works on *transposed* score tiles, keys down and queries across:
 *
 *                 queries of a tile: 16 lanes a vector
 *               +----------------------+
 *   keys of a   |  s[key][query]       |   ld = ATTN_QUERIES
 *   run         +----------------------+
 *
 * so that the softmax of 16 queries is vertical, a dropout call serves four keys of 16 queries, and only the
 * tile of queries has to be transposed, once, not every block of keys. Keys, values and queries are copied
 * to dense scratch first (rows of `width` = C rounded up to 16, of values `v_width` = V so; zeros behind): rows of one
 * head lie K * C apart, which the sets of an L1 cache do not like, and padded rows need no tails.
 *
 * Bits. What a query row or a key row gets depends on positions alone: every score is one fmaf chain over C;
 * keys come in ascending position; how rows are grouped into tiles changes nothing. A masked key weighs
 * exactly +0, and fmaf(+0, x, y) is y for finite x but for the sign of a zero, so results are stored with +0
 * added (-0 becomes +0) and tiles may skip masked keys or not as they like. That is why ops.def wants finite rows:
 * keeping masked keys out of the products would cost a branch or a select on every one of the diagonal's weights.
 */
#ifndef MEGATRAIN_CPU_ATTENTION_H
#define MEGATRAIN_CPU_ATTENTION_H

#include "cpu/isa.h"
#include "cpu/vec.h"
#include "device/ops.h"

enum { ATTN_QUERIES = 64 };

/* Consecutive positions, which lie in consecutive rows. */
typedef struct {
    int64_t first, count, row;
} AttnSpan;

/* One call. Spans are sorted by position. */
typedef struct {
    Tensor q, k, v, doc, sample;
    Spans q_spans, k_spans;
    float scale, softcap;
    int64_t block, window, head0;
    Dropout dropout;
    AttnSpan q_span[2], k_span[2];
    int64_t C, width, V, v_width;
    int64_t group; /* query heads per key head */
} Attn;

/* Up to ATTN_QUERIES queries of one head in consecutive rows and positions. */
typedef struct {
    int64_t b, head, row, n, first; /* first: position of query 0 */
    int64_t low_min, low_max;       /* the least and the greatest of `low` of the n queries */
    int32_t low[ATTN_QUERIES]; /* the first key that each may see; beyond n -1, above any unsigned position */
} AttnTile;

/* Keys of one key head in ascending position, copied together. */
typedef struct {
    int64_t n;
    float *k, *v; /* [n][width], [n][v_width] */
    int32_t *position;
} AttnKeys;

#define ATTN_OF(a)                                                                                    \
    {                                                                                                 \
        .q = (a)->q, .k = (a)->k, .v = (a)->v, .doc = (a)->doc, .sample = (a)->sample,                \
        .q_spans = (a)->q_span, .k_spans = (a)->k_span, .scale = (a)->scale, .softcap = (a)->softcap, \
        .block = (a)->block, .window = (a)->window, .head0 = (a)->head0, .dropout = (a)->dropout      \
    }

/* Checks what the shape check cannot (spans against T and S, H against K) and fills the rest. ERR_SHAPE;
 * ERR_CONFIG if the tensors, of which `result` may have a dtype of its own, are not f32. */
Err CPU(attn_open)(Attn *a, Tensor result);

/* How many keys lie before `position`. */
int64_t CPU(attn_keys_before)(const Attn *a, int64_t position);

/* The row of dim S that holds key number `index` in ascending order. */
int64_t CPU(attn_key_row)(const Attn *a, int64_t index);

/* Copies keys number i0 .. i1 - 1 of key head `head` of sample b. */
void CPU(attn_keys)(const Attn *a, AttnKeys *keys, int64_t b, int64_t head, int64_t i0, int64_t i1);

/* A tile of n queries from `row` on, which must lie in one span. */
void CPU(attn_tile)(const Attn *a, AttnTile *t, int64_t b, int64_t head, int64_t row, int64_t n);

/* The part of `keys`, in place, that some query of the tile may see. */
AttnKeys CPU(attn_seen)(const Attn *a, const AttnTile *t, const AttnKeys *keys);

/* The tile's rows of x, [B T H C] or [B T H V]: dense [n][its width], and transposed [C][ATTN_QUERIES], 0 beyond n. */
void CPU(attn_rows)(float *dense, float *across, Tensor x, const AttnTile *t);

/* How many threads compute `items` items that need `bytes` of workspace each: at least one. ERR_CONFIG: not even one
 * has enough. */
Err CPU(attn_threads)(const Device *dev, int64_t items, int64_t bytes, int *out);

static inline float *attn_row(Tensor x, int64_t b, int64_t row, int64_t head)
{
    return (float *)x.data + tensor_row_at(x, (b * x.dim[1] + row) * x.dim[2] + head);
}

/* The element of a [B T H] tensor. */
static inline float *attn_value(Tensor x, int64_t b, int64_t row, int64_t head)
{
    return (float *)x.data + (b * x.dim[1] + row) * x.ld + head;
}

/* How many lanes the vectors have that cover n queries. */
static inline int64_t attn_lanes(int64_t n) { return (n + VEC - 1) / VEC * VEC; }

/* Must some score be masked? */
static inline bool attn_needs_mask(const AttnTile *t, const AttnKeys *keys)
{
    return keys->position[0] < t->low_max || keys->position[keys->n - 1] > t->first;
}

/* 16 queries of a tile, as the softmax sees them. */
typedef struct {
    vi position, low;
    uint64_t key;
    uint32_t threshold;
    float keep_scale;
    vi sample_low, sample_high;
    int32_t drawn_for; /* the key position / 4 that `drawn` belongs to */
    vi drawn[4];
} AttnColumn;

static inline void attn_column(AttnColumn *c, const Attn *a, const AttnTile *t, int64_t first)
{
    int64_t sample = ((const int64_t *)a->sample.data)[t->b];
    c->position = vi_add(vi_set1((int32_t)(t->first + first)), vi_iota());
    c->low = vi_load(t->low + first);
    c->key = a->dropout.key;
    c->threshold = a->dropout.threshold;
    c->keep_scale = a->dropout.scale;
    c->sample_low = vi_set1((int32_t)(uint32_t)sample);
    c->sample_high = vi_set1((int32_t)((uint32_t)(sample >> 32) << 16 | (uint32_t)(a->head0 + t->head)));
    c->drawn_for = -1;
}

static inline vm attn_visible(const AttnColumn *c, int32_t key)
{
    return vm_and(vi_ge_u(c->position, vi_set1(key)), vi_ge_u(vi_set1(key), c->low));
}

/* The factor of dropout for one key: 0 or 1 / (1 - p). The same counter as dropout_keep_attn. */
static inline vf attn_keep(AttnColumn *c, int32_t key)
{
    if (c->drawn_for != key >> 2) {
        c->drawn_for = key >> 2;
        philox16(c->key, vi_set1(key >> 2), c->position, c->sample_low, c->sample_high, c->drawn);
    }
    vm keep = vi_ge_u(c->drawn[key & 3], vi_set1((int32_t)c->threshold));
    return vf_select(keep, vf_set1(c->keep_scale), vf_zero());
}

#endif
