/* Shared parts of kinds of attention once they have queries, keys and values (attend.c). */
#ifndef MEGATRAIN_LAYER_ATTEND_H
#define MEGATRAIN_LAYER_ATTEND_H

#include "layer/context.h"

typedef struct {
    const ModelSpec *spec;
    int layer;   /* the block's number in the model */
    int sink;    /* parameter with a number for each head; -1: none */
    float scale; /* factor of the products of queries and keys */
    int64_t window;
    bool rope;  /* queries and keys turn with their positions, */
    bool local; /* angles by the table for blocks with a window */
    uint64_t dropout_key;
} AttentionCore;

/* Heads of a rank's rows: q [N, H, C], k and v [N or more, K, C], and a gate [N, H, C] or, without one, no data. */
typedef struct {
    Tensor q, k, v, gate;
} Heads;

/* The core without sinks; a layer adds these where they stand among its parameters. A sink is a score for each head
 * beside those of the keys: a sink of 0 is a key that is orthogonal to all queries. */
AttentionCore attention_core(const ModelSpec *spec, const char *name, int layer, float scale);
Err attention_core_sinks(AttentionCore *a, ParamRegistry *reg, const char *name);

/* x [N, H, C] turns with its rows' positions, or, inverse, back; without rotary positions nothing is done. */
Err attention_core_rotate(const AttentionCore *a, Ctx *c, Tensor x, Tensor position, int inverse);

/* o [N, H, C] and lse [B, T, H] of h, whose keys are those of the rows, or with a cache of all positions so far. */
Err attention_core_forward(const AttentionCore *a, Ctx *c, const Heads *h, Tensor o, Tensor lse);

/* Tensors that backward reads of a call besides its heads, and that it needs. */
typedef struct {
    Tensor o, go, lse; /* go: the gradient of o, behind the gate */
    Tensor delta;      /* [B, T, H], to be filled */
    int64_t chunk;     /* query heads in a leaf of the sum over those that read one key */
} AttendSave;

/* d becomes the gradients of h; the gradient of the sinks is added to theirs. */
Err attention_core_backward(const AttentionCore *a, Ctx *c, const Heads *h, const AttendSave *save, const Heads *d);

/* Keeps the rows' keys and values where later slices find them; see slice_keep_keys. */
Err attend_keep(Ctx *c, const Heads *h, bool pass);

/* All heads of queries: LayerKind.score_heads. */
int attention_score_heads(const ModelSpec *spec);

/* The keys and values that generation keeps, from position 0 on, each [1, seq, K, C]. Latent attention keeps k alone,
 * [1, seq, 1, kv_rank + rope]: the latent behind its norm, then the rotated part of the key that all heads share. */
typedef struct {
    Tensor k, v;
} KvCache;

/* The numbers that a cache has of each position. v_cols 0: keys alone. */
typedef struct {
    int64_t heads, k_cols, v_cols;
} KvShape;

Err cache_new(const ModelSpec *spec, KvShape shape, DType dtype, KvCache *cache, Arena *state);
/* own [T * heads, columns] is written to `kept` [seq * heads, columns], behind the positions before the batch's; all
 * becomes both together. */
Err cache_join(Ctx *c, Tensor kept, Tensor own, int64_t heads, Tensor *all);
/* The same with keys and values [T, K, C] and the cache of the block at work; without one nothing is done. */
Err cache_join_heads(Ctx *c, Heads *h);

/* Heads side by side: [N, H, C] -> [N, H * C]; and below each other, [N * H, C]. */
Tensor heads_as_columns(Tensor t);
Tensor heads_as_rows(Tensor t);

/* o [N, H, C] times the sigmoid of a gate of the same shape, kept for backward; without a gate (no data) o itself. */
Err heads_gate_forward(Ctx *c, Tensor o, Tensor gate, Saved *saved, Tensor *gated);
/* go [N, H, C], the gradient of o under the gate, becomes that of o. Without a gate nothing is done. */
Err heads_gate_backward(Ctx *c, Tensor go, Tensor dgate, Tensor o, Tensor gate);

#endif
