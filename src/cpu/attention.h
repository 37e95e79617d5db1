/*
 * Shared parts of the forward and the backward pass of attention: tiles of queries, runs of keys, scores.
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
 *
 * Tensors of bf16 are read where they lie: what is copied into tiles becomes units of the device's form (gemm_form.h).
 * By DOT_FMA these are the numbers as floats, and everything has the bits of fp32. By DOT_VDPBF16 every chain is one of
 * pairs (gemm.h): over C and V from the first number on. Over keys the numbers of positions 2i and 2i + 1 are a pair
 * where both lie in one block, over queries where both lie in one leaf of backward; a number without its partner is
 * paired with 0. What the softmax gives to such a product, p and ds, is rounded to bf16 in front of it, a denormal as
 * 0; maxima, sums and everything else are of fp32. So that tiles can be cut anywhere between pairs, a key without its
 * partner has an empty slot behind it, which no query sees.
 */
#ifndef MEGATRAIN_CPU_ATTENTION_H
#define MEGATRAIN_CPU_ATTENTION_H

#include "cpu/gemm_form.h"
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
    GemmForm form;
    bool paired;
    int64_t k_units, v_units; /* units along a row of keys, of values */
    int64_t k_row, v_row;     /* from one such row to the next */
} Attn;

/* Up to ATTN_QUERIES queries of one head in consecutive rows and positions. */
typedef struct {
    int64_t b, head, row, n, first; /* first: position of query 0 */
    int64_t low_min, low_max;       /* the least and the greatest of `low` of the n queries */
    int32_t low[ATTN_QUERIES];      /* the first key that each may see; beyond n -1, above any unsigned position */
} AttnTile;

/* Keys of one key head in ascending position, copied together, for products along their rows and for products along
 * keys. Without pairs one copy serves both. */
typedef struct {
    int64_t n;                /* slots; with pairs an even number */
    float *k, *v;             /* [n][k_row], [n][v_row]; NULL: not wanted */
    float *k_lines, *v_lines; /* [units of n][width], [units of n][v_width]; NULL: not wanted */
    /* Position of each slot; of an empty one the position before it, and EMPTY_SLOT. */
    int32_t *position, *seen;
    bool empty; /* some slot is */
} AttnKeys;

enum { EMPTY_SLOT = INT32_MAX };

#define ATTN_OF(a)                                                                                             \
    {                                                                                                          \
        .q = (a)->q, .k = (a)->k, .v = (a)->v, .doc = (a)->doc, .sample = (a)->sample, .q_spans = (a)->q_span, \
        .k_spans = (a)->k_span, .scale = (a)->scale, .softcap = (a)->softcap, .block = (a)->block,             \
        .window = (a)->window, .head0 = (a)->head0, .dropout = (a)->dropout                                    \
    }

/* Checks what the shape check cannot (spans against T and S, H against K) and fills the rest. ERR_SHAPE;
 * ERR_CONFIG if the tensors, of which `result` may have a dtype of its own, are neither f32 nor bf16. */
Err CPU(attn_open)(Attn *a, const Device *dev, Tensor result);

/* How many keys lie before `position`. */
int64_t CPU(attn_keys_before)(const Attn *a, int64_t position);

/* The row of dim S that holds key number `index` in ascending order. */
int64_t CPU(attn_key_row)(const Attn *a, int64_t index);

/* How many slots hold any n keys of one block. */
static inline int64_t attn_slots(const Attn *a, int64_t n) { return a->paired ? (n + 5) / 2 * 2 : n; }

/* Copies keys number i0 .. i1 - 1 of key head `head` of sample b, or as many of them as `slots` slots hold; returns the
 * number of the next one. */
int64_t CPU(attn_keys)(const Attn *a, AttnKeys *keys, int64_t b, int64_t head, int64_t i0, int64_t i1, int64_t slots);

/* A tile of n queries from `row` on, which must lie in one span. */
void CPU(attn_tile)(const Attn *a, AttnTile *t, int64_t b, int64_t head, int64_t row, int64_t n);

/* The part of `keys`, in place, that some query of the tile may see. */
AttnKeys CPU(attn_seen)(const Attn *a, const AttnTile *t, const AttnKeys *keys);

/* The tile's rows of x, [B T H C] or [B T H V]: across, [its units][ATTN_QUERIES], for products along rows; in `lines`,
 * [units of n][its width], for products along queries, if these are wanted. 0 beyond n. */
void CPU(attn_rows)(const Attn *a, float *lines, float *across, Tensor x, const AttnTile *t, bool wants_lines);

/* Scores of 16 queries, [n][ATTN_QUERIES], as an operand whose k's are the keys. `to` may be `from`. */
void CPU(attn_keys_paired)(const Attn *a, float *to, const float *from, int64_t n);

/* The same from the column on of rows of queries, in place, as one whose k's are the queries; columns ascending. */
void CPU(attn_queries_paired)(const Attn *a, float *rows, int64_t column, int64_t n);

/* How many threads compute `items` items that need `bytes` of workspace each: at least one. ERR_CONFIG: not even one
 * has enough. */
Err CPU(attn_threads)(const Device *dev, int64_t items, int64_t bytes, int *out);

static inline void *attn_row(Tensor x, int64_t b, int64_t row, int64_t head)
{
    const int64_t at = tensor_row_at(x, (b * x.dim[1] + row) * x.dim[2] + head);
    return x.dtype == BF16 ? (void *)((uint16_t *)x.data + at) : (void *)((float *)x.data + at);
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
    return keys->empty || keys->position[0] < t->low_max || keys->position[keys->n - 1] > t->first;
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
