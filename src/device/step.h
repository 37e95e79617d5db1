/*
 * Values that vary from step to step, as one struct in device memory: ops read them there, so that no host value is
 * baked into a launch and a step can be a CUDA graph. The host writes the first part before a step (step_values_set);
 * ops of the step write the second part; the host reads it after the step.
 */
#ifndef MEGATRAIN_DEVICE_STEP_H
#define MEGATRAIN_DEVICE_STEP_H

#include <stdint.h>
#include <string.h>

#include "base/choices.h"
#include "base/fp8.h"

typedef struct {
    /* written by the host before the step */
    int64_t step;     /* 1 for the first */
    int64_t nominal;  /* tokens of a whole global batch: global_batch * seq */
    float lr;         /* learning rate of this step */
    float correct1;   /* 1 - beta1^t, t = updates done including this one */
    float correct2;   /* 1 - beta2^t */
    float clip;       /* largest gradient norm; 0 = no clipping */
    float loss_scale; /* factor of backward: 1 / nominal (times the scaler's factor) */
    float unscale;    /* 1 / the scaler's factor; 1 without fp16 */
    /* written by ops during the step */
    int32_t overflow;       /* a gradient leaf did not fit its fixed point, or was not finite */
    int32_t nonfinite;      /* loss or gradient norm is NaN or Inf */
    int32_t skip;           /* the update must change nothing */
    int32_t loss_nonfinite; /* the loss already is */
    int32_t over_limit;     /* experts got more rows than there is room for (docs/moe.md, slack) */
    int64_t loss_fixed;     /* sum of per-token losses, LOSS_FIXED_BITS fraction bits */
    int64_t counted;        /* tokens that count, whole global batch */
    float grad_norm;        /* before clipping, of the mean loss */
    float grad_scale;       /* the update multiplies gradients by this: nominal / counted * unscale * clip factor */
} StepValues;

enum { LOSS_FIXED_BITS = 28 };

/* Positions of a sample between two states that are handed on, of the gated delta rule (delta_fwd) and of Mamba-2. */
enum { DELTA_WINDOW = 64, MAMBA_WINDOW = 128 };

/* Fixed point of losses that balance routers: 2^15 * 2^24 * 2^23 rows fit an int64. */
enum { ROUTER_LOSS_BITS = 24, ROUTER_LOSS_MOST = 1 << 15 };

/*
 * The part of one tensor that a rank has in the flat buffers (param/param.h), for ops that run over all tensors at
 * once. Such an op gets the parts as a table, an [n, 7] i64 tensor. It works in chunks of FLAT_CHUNK elements; the last
 * chunk of a part may be shorter. A part's `chunk` is the number of chunks of all parts before it. No part is empty.
 */
typedef struct {
    int64_t grad;  /* its first element in the buffer of gradients */
    int64_t value; /* and in that of what layers read */
    int64_t shard; /* and in those of this rank's ZeRO shards */
    int64_t v;     /* and in that of second moments; with FLAT_MUON it has none */
    int64_t count; /* elements */
    int64_t chunk;
    int32_t number; /* number of its shift and statistics */
    int32_t flags;  /* FLAT_... */
} FlatPart;

enum { FLAT_CHUNK = 32768 };
enum {
    FLAT_DECAYS = 1, /* its weights decay */
    FLAT_COUNTS = 2, /* it is in this rank's statistics */
    FLAT_HIDDEN = 4, /* it is a matrix of a block */
    FLAT_MUON = 8,   /* its weights are Muon's, else AdamW's */
    FLAT_WIDE = 16   /* its copy for layers is fp32, from `value` on, which counts elements of 16 bits */
};

static inline int64_t flat_chunks(int64_t count) { return (count + FLAT_CHUNK - 1) / FLAT_CHUNK; }

/*
 * A rectangle of a matrix that lies in this rank's part of the flat buffers, and where the same numbers lie in another
 * buffer, packed or in a matrix of their own, perhaps transposed. Ops get a table of them, an [n, 9] i64 tensor, and
 * work in chunks as above, of the rectangle row by row.
 */
typedef struct {
    int64_t grad, value, shard; /* as FlatPart, of its first element */
    int64_t at;                 /* its first element in the other buffer */
    int64_t chunk;
    int32_t rows, columns;         /* neither is 0 */
    int32_t ld;                    /* elements from row to row in the flat buffers */
    int32_t row_step, column_step; /* from row to row, and from column to column, in the other */
    int32_t number, flags;         /* as FlatPart */
    float scale;                   /* scale of the update (optim/muon.h) */
} FlatBox;

/* Dropout as ops see it: the key of the site and the threshold of base/rng.h. threshold 0: nothing is dropped. */
typedef struct {
    uint64_t key;
    uint32_t threshold;
    /* Factor of values that are kept: 1 / (1 - p), in residual sums times the model's residual_scale. Attention reads
     * it only where something is dropped. */
    float scale;
} Dropout;

/*
 * How a router scores E experts by their logits l and weights the K that it chooses (docs/moe.md):
 *
 *   SOFTMAX        score l                     weight = softmax over the K chosen logits
 *   SOFTMAX_PRE    score softmax(l) over all E   weight = score
 *   SIGMOID        score 1 / (1 + exp(-l))     weight = score
 *   SQRT_SOFTPLUS  score sqrt(log(1 + exp(l)))   weight = score
 *
 * normalize: the K weights are divided by their sum + 1e-20 (those of SOFTMAX add up to 1 by themselves). All are
 * multiplied by `scale`. groups > 1: experts lie in so many equal groups; a group's score is the sum of its
 * group_best best (0: K / group_topk), and only the group_topk best groups are chosen from.
 */
enum { ROUTER_TOPK_MAX = 1024, SINKHORN_ROUNDS = 100 };

typedef struct {
    RouterScore score;
    int normalize;
    float scale;
    int groups, group_topk; /* 1, 1: no groups; without group_best group_topk divides K */
    int group_best;         /* at most as many as a group has */
} Router;

/*
 * Floats as integers in the same order, for maxima that no order of additions changes, over threads, ranks and calls.
 * 0 is below all of them: a maximum of nothing. NaN, of either sign, is above all. They have 32 bits.
 */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t
    logit_order(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return UINT32_MAX;
    return (int64_t)(bits < 0 ? bits ^ INT32_MAX : bits) - INT32_MIN;
}

/* Back; of 0, nothing, -Inf. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline float
    logit_of_order(int64_t order)
{
    const int64_t shifted = order + INT32_MIN;
    int32_t bits = (int32_t)(shifted < 0 ? shifted ^ INT32_MAX : shifted);
    float x;
    if (order == 0) bits = INT32_MIN | 0x7F800000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/*
 * Which rows of a matrix of queries and keys, in memory's order, QK-clip scales (docs/attention.md), and by what power
 * of the factor of their heads: rows come in chunks of `chunk`; of each the first rows[0] are of kind[0], the next
 * rows[1] of kind[1], the others stay. A head's scores are products of queries and keys, so that powers add up to 1.
 */
typedef enum {
    QK_QUERY, /* alpha */
    QK_KEY,   /* 1 - alpha */
    QK_SHARED /* 1: the query's columns that meet a key which all heads share, and which therefore stays */
} QkKind;

typedef struct {
    int64_t chunk; /* 0: nothing is scaled */
    int64_t rows[2];
    QkKind kind[2];
    int heads;  /* query heads that have one factor, that of the one with the largest score: those that read one key */
    int chunks; /* chunks of these heads */
} QkRows;

/* The kind of a row; -1: it stays. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int
    qk_row_kind(const QkRows *q, int64_t row)
{
    const int64_t in = row % q->chunk;
    return in < q->rows[0] ? (int)q->kind[0] : in < q->rows[0] + q->rows[1] ? (int)q->kind[1] : -1;
}

/* The largest score of the heads that a row is of. logit_max: of all heads. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline float
    qk_row_logit(const QkRows *q, int64_t row, const int64_t *logit_max)
{
    const int64_t *of = logit_max + row / q->chunk / q->chunks * q->heads;
    int64_t most = of[0];
    for (int i = 1; i < q->heads; i++)
        if (of[i] > most) most = of[i];
    return logit_of_order(most);
}

/*
 * Positions that a sequence of rows holds: span 0, then span 1 (count 0 when there is only one). Two spans are what one
 * rank of zigzag context parallelism owns.
 */
typedef struct {
    int64_t first[2], count[2];
} Spans;

static inline Spans spans_run(int64_t first, int64_t count) { return (Spans){ { first, 0 }, { count, 0 } }; }
static inline Spans spans_whole(int64_t T) { return spans_run(0, T); }

/* The same number of positions, `by` further on. */
static inline Spans spans_behind(Spans s, int64_t by)
{
    return (Spans){ { s.first[0] + by, s.first[1] + by }, { s.count[0], s.count[1] } };
}

/* Pairs of a query and a key that it sees: those up to its own position, of a window (0: none) the last so many.
 * Documents are not known: they are taken to be whole samples. All counts of FLOP and all predictions go by it. */
#ifdef __cplusplus
extern "C"
#endif
    int64_t
    spans_pairs(Spans q, Spans k, int64_t window);

#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t
    spans_position(Spans s, int64_t row)
{
    return row < s.count[0] ? s.first[0] + row : s.first[1] + row - s.count[0];
}

#endif
