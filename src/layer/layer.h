/*
 * Ctx, what all layers share, and the layers on one page: a struct of ids and sizes, and forward and
 * backward by hand. Backward reads as the mirror of forward, from the bottom.
 *
 * Rows. N = B * T rows of a micro-batch. Outside the tensor-parallel regions a rank holds R rows: its slice
 * of the N when rows are sharded (sequence parallelism), all of them otherwise. gather_rows() enters such a
 * region, reduce_rows() leaves it; in a group of one both are free.
 *
 * Outputs are allocated by the caller; gradients of activations are overwritten, except where a comment says
 * that they accumulate; gradients of parameters always accumulate, only through grad_add_*.
 *
 * Saves. What backward needs is kept in the two regions of the micro-batch's Slot: REGION_I is free after the
 * dgrad of backward, REGION_W (inputs and output gradients of linears) after the wgrad. A Saved is
 * segment + offset, not a pointer: each block's save is one contiguous segment that may move.
 */
#ifndef MEGATRAIN_LAYER_LAYER_H
#define MEGATRAIN_LAYER_LAYER_H

#include "base/activation.h"
#include "param/param.h"

/* ---- saves ---- */

typedef enum { REGION_I, REGION_W, REGION_COUNT } Region;

typedef struct {
    int64_t offset; /* bytes, from the segment's base in its region */
    int64_t dim[TENSOR_MAX_DIMS];
    int16_t segment;
    int8_t region, ndim;
    DType dtype;
} Saved;

typedef struct {
    char *base[REGION_COUNT];
    int64_t size_bytes[REGION_COUNT];
} Segment;

/* A weight gradient waiting for its W: dw += dy^T x. Both tensors lie in REGION_W (or scratch, if done at once). */
typedef struct {
    int weight;
    Tensor dy, x;
    bool gather_x, gather_dy; /* rows still sharded */
    Tensor offset;            /* of a weight of experts: the runs of their rows (ops.def); else absent */
} Wgrad;

/* Where a slot has the keys and values of an attention layer, [B, T, K, C], for later slices; ndim 0: not yet. */
typedef struct {
    Saved k, v;
} SliceKeys;

/* Memory of one unit in flight: a micro-batch, or a part or slice of one. */
typedef struct {
    Arena region[REGION_COUNT];
    Segment *segments; /* embedding, blocks, head */
    int segment_count;
    SliceKeys *keys; /* [attention layers of the stage], or NULL where sequences are whole */
    Wgrad *queue;
    int queued, queue_capacity;
} Slot;

/* ---- context ---- */

/* Gradients of keys and of values. A layer's, as far as later slices of a micro-batch gave them (keys_sums.c), are f32
 * [places, elements of one slice]. */
typedef struct {
    Tensor of[2];
} SliceGrads;

enum { SLICES_MOST = 64 }; /* of a sequence */

/* Canonical blocks: facts of the model that fix every rounding (docs/determinism.md). */
typedef struct {
    bool exact;          /* reproducible = layout: canonical trees and leaves; else over what a rank holds */
    int tp_blocks;       /* chunks of every dim that tp may cut */
    int64_t leaf_tokens; /* tokens per leaf of a linear's weight gradient: seq / seq_blocks */
    int64_t leaf_rows;   /* rows per leaf of bias and norm gradients */
    int64_t attn_block;  /* keys per softmax block */
    int64_t query_leaf;  /* query positions per leaf of dk and dv */
    int room;            /* log2 of the most leaves an element can get in a step */
} Canon;

/* One micro-batch on the device. Per-row tensors cover the N gathered rows. */
typedef struct {
    int64_t B, T;  /* samples, rows of a sample on this rank */
    int64_t first; /* of its samples, in the step's batch */
    int64_t
        filling; /* samples at the end that only fill it up, in an evaluation; experts get none of their rows */
    int64_t seq;   /* positions of a whole sample */
    Spans span;    /* which positions the T rows are */
    Tensor token;  /* [N] i32 */
    Tensor target; /* [N] i32, -1 = does not count */
    /* optional [depths, N] i32: row k - 1 the token k further on, -1 = none, and the target behind it (model/mtp.c) */
    Tensor further_token, further_target;
    Tensor position; /* [N] i32, in the sample: what dropout is drawn by */
    Spans placed;    /* the span that `position` was filled for; all 0: it was not */
    Tensor place;    /* optional [N] i32: position in its document; see ctx_place */
    Tensor sample;   /* [N] i64, global index in the data order */
    Tensor samples;  /* [B] i64, the same per sample */
    Tensor doc;      /* optional [B, T] i32: first position of the row's document */
} Batch;

/* With cp: how queries meet the keys of other ranks: gathered; part by part; each rank gets some of the
 * heads; or neighbours do, in rings (world->cp_heads, cp_ring). */
typedef enum { CONTEXT_ALLGATHER, CONTEXT_RING, CONTEXT_A2A, CONTEXT_HIERARCHICAL } ContextComm;

/* And which positions a rank has: a part from each end, or a run of them. */
typedef enum { CONTEXT_ZIGZAG, CONTEXT_CONTIGUOUS } ContextCut;

/* Generation: keys and values of one attention layer at positions 0, 1, ...; each [1, seq, K, C]. Of a latent one
 * (Mla) k alone, [1, seq, 1, kv_rank + rope]: the normed latents, with the rotated shared part of the key behind. */
typedef struct {
    Tensor k, v;
} KvCache;

/*
 * Who sums the gradient of the last bias of a block whose output another block reads: that of the residual stream,
 * column by column. Beside the norm that writes the gradient it costs no pass of its own.
 */
typedef struct {
    bool wanted; /* `bias` is of the block before: to be summed with the gradient of this block's input */
    int bias;
    bool done; /* this block's own was, with its output's gradient */
} InputSum;

/* What the layers of one unit of a stage share while they run. */
typedef struct {
    Stream *s;
    World *world;
    ParamStore *params;
    Slot *slot;
    int segment;               /* the one that save_new fills */
    Arena *into[REGION_COUNT]; /* where save_new allocates: the slot's regions, or scratch */
    Arena *scratch;
    const Batch *batch;
    const StepValues *step;    /* device memory */
    Tensor rope_cos, rope_sin; /* [seq, columns that turn / 2], or absent */
    Canon canon;
    ContextComm context; /* of the block at work: between the ranks of world->cp */
    ContextCut cut;      /* of sequences over these */
    const KvCache *kv;   /* of the block at work; NULL in training and evaluation */
    InputSum below;      /* in backward, of the block at work */
    /* Where balance counts the batch so far: [blocks of the stage, those of MTP last, units, experts] i64, the rows
     * that would choose each expert by scores alone, of the batch up to each unit; written in forward, whose units come
     * in data order. */
    Tensor loads_so_far;
    /* Of the mixtures of the stage, together: what balances them (ops.def, router_balance), summed over the step;
     * absent where nothing does. Written in backward. */
    Tensor balance_losses;
    DType dtype;         /* of activations and of weights as layers see them */
    bool dropout_on;     /* training: dropout, noise, and what only the loss of a step is for */
    bool in_pieces;      /* tokens pass experts in pieces of MoeRoom.piece, not all at once */
    bool split_backward; /* W runs later: dy of linears must outlive the dgrad */
    int version;         /* age of the weights to read, in updates */
    Event *moved;        /* of the call under way that moves rows to their experts or back */
    /* Called before rows are waited for: in a pair (engine/pair.h) the other half goes on meanwhile. Else NULL. */
    Err (*other_half)(void *pair);
    void *pair;
    /* Where sequences pass in slices: how many, the one at work, the slots up to its own, and what waits for earlier
     * slices' keys in each attention layer of the stage. slice_count 0 or 1: sequences are whole. */
    int slice_count, slice;
    Slot *slices[SLICES_MOST];
    SliceGrads *slice_grads;
    int layer; /* attention layer of the stage: its blocks, then those of MTP */
} Ctx;

int64_t ctx_rows(const Ctx *c); /* R: rows this rank holds outside tensor-parallel regions */
Tensor ctx_row_slice(const Ctx *c, Tensor per_row); /* this rank's R of N entries */
Tensor ctx_place(const Ctx *c); /* [N] i32: the positions that the model sees, learned and rotary */
Dropout ctx_dropout(const Ctx *c, float p, uint64_t key); /* off when not training */

/* Starts segment `index`: later saves belong to it. */
void segment_begin(Ctx *c, int index);
void segment_end(Ctx *c); /* notes the sizes */
/* A tensor kept for backward. Region as above. */
Err save_alloc(Ctx *c, Region region, Tensor *t, Saved *saved, DType dtype, int ndim, const int64_t *dim);
#define save_new(c, region, t, saved, dtype, ...)                           \
    save_alloc((c), (region), (t), (saved), (dtype),                        \
               (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), \
               (const int64_t[]){ __VA_ARGS__ })
Tensor save_get(const Ctx *c, Saved saved);
/* A gradient that a queued linear will read: REGION_W when W runs later, else scratch. */
Err dy_alloc(Ctx *c, Tensor *t, int64_t rows, int64_t cols);

Tensor param_value(const Ctx *c, int id); /* the only ways to a parameter's memory */
Tensor param_grad(const Ctx *c, int id);
Tensor param_state(const Ctx *c, int id); /* of a STATE parameter: fp32, as the last update left it */

/* ---- gradients: accumulators, written only here; the first contribution of a step overwrites ---- */

/* += rows, at `index` of the table's rows from `first` on. */
Err grad_add_rows(Ctx *c, int table, Tensor rows, Tensor index, int64_t first);
/* += column sums, to the numbers from `first` on. */
Err grad_add_columns(Ctx *c, int bias, Tensor dy, int64_t first);

/* Runs and empties the slot's queue of weight gradients. */
Err wgrad_drain(Ctx *c);

/* ---- rows in and out of tensor-parallel regions ---- */

/* full [N, D] = all rows, from this rank's R. In a group of one full is x itself; else it is in scratch. */
Err gather_rows(Ctx *c, Tensor x, Tensor *full);
/* The same in two: what is done in between goes on beside it. One gather or sum at a time. */
Err gather_rows_begin(Ctx *c, Tensor x, Tensor *full);
Err gather_rows_end(Ctx *c);
/* y [R, D] = tree over tp of partial [N, D], this rank's rows. Call partial_alloc() for partial. */
Err reduce_rows(Ctx *c, Tensor partial, Tensor y);
/* Likewise in two. What is in scratch since begin must stay there until end. */
typedef struct {
    Tensor y, parts; /* parts: what the ranks have sent, where that is summed here (sums.c) */
} PendingSum;
Err reduce_rows_begin(Ctx *c, Tensor partial, Tensor y, PendingSum *out);
Err reduce_rows_end(Ctx *c, PendingSum r);
/* x = tree over the ranks of `group` of x; of any float type, like the rows above. */
Err reduce_values(Ctx *c, Comm *group, Tensor x);
/* y = this rank's slice of the tree over the ranks of `group` of x, which has a slice for each of them. */
Err reduce_scatter_values(Ctx *c, Comm *group, Tensor x, Tensor y);
/* y = x [rows, columns], of which either may be columns of something wider. */
Err copy_rows(Ctx *c, Tensor y, Tensor x);
/* Where to put the partial of y: y itself when rows are not sharded, else [N, D] scratch. */
Err partial_alloc(Ctx *c, Tensor y, Tensor *partial);

/* ---- sequences shared by the ranks of world->cp ---- */

/* The positions of a sample that a rank holds, of 2 ranks equal parts: r and 2 ranks - 1 - r, or 2 r and 2 r + 1
 * (docs/context.md). */
Spans context_span(ContextCut cut, int64_t seq, int ranks, int rank);

/* Of the slice at work, where sequences pass in slices, or else of the sample. */
Spans context_at_work(const Ctx *c, ContextCut cut, int ranks, int rank);

/* Keys of a rank in one attention layer: heads, chunks of query heads that read one, widths. */
typedef struct {
    int64_t heads, chunks, k_cols, v_cols;
} SliceKeyShape;

/* Room in `state` for c->slice_count slices of c->batch's shape, in a layer whose ranks of cp meet by c->context. */
Err slice_grads_init(const Ctx *c, SliceKeyShape shape, SliceGrads *g, Arena *state);

/* ---- linear ---- */

typedef enum { LINEAR_COLUMN, LINEAR_ROW, LINEAR_WHOLE } LinearKind;

typedef struct {
    int weight, bias; /* bias -1 = none */
    int64_t in, out;  /* global */
    LinearKind kind;
} Linear;

typedef struct {
    const char *name; /* "layers.3.attn.qkv": ".weight" and ".bias" are appended */
    int64_t in, out;
    LinearKind kind;
    bool bias;
    float std;
    int64_t section[PARAM_MAX_SECTIONS], interleave; /* of the output dim */
} LinearSpec;

Err linear_register(Linear *l, ParamRegistry *reg, LinearSpec spec);
/*
 * COLUMN: x [R, in] -> y [N, out / tp], bias added.
 * ROW:    x [N, in / tp] -> y [R, out], bias NOT added (the residual add does it once).
 * WHOLE:  x [R, in] -> y [R, out], bias added; every rank has the whole weight.
 */
Err linear_forward(const Linear *l, Ctx *c, Tensor x, Tensor y);
/* COLUMN only: active = gelu(y) as well, in the same op. */
Err linear_forward_gelu(const Linear *l, Ctx *c, Tensor x, Tensor y, Tensor active);
/* dx as x; queues dw. COLUMN and WHOLE add their bias gradient; ROW's is added by its caller. dy from dy_alloc. */
Err linear_backward(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor dx);
/* ROW only: x was gelu(gelu_x), and dx is the gradient of gelu_x. */
Err linear_backward_gelu(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor gelu_x, Tensor dx);

/* ---- embedding ---- */

typedef struct {
    int table, position; /* position -1 = no learned positions */
    int64_t vocab_rows;  /* padded rows on this rank */
    float dropout;
    uint64_t dropout_key;
} Embedding;

typedef struct {
    int64_t vocab, padded_vocab, hidden, seq;
    bool learned_positions;
    bool shared; /* a head of another registry reads the table, too */
    float std, dropout;
    uint64_t seed;
} EmbeddingSpec;

#define EMBEDDING_TABLE "embedding.token.weight"
/* The table's registration: [vocab, hidden], cut over tp by rows. */
ParamSpec embedding_table(const EmbeddingSpec *spec, int flags);
Err embedding_register(Embedding *e, ParamRegistry *reg, EmbeddingSpec spec);
/* As embedding_register, of a table that is registered: lookups alone, without positions. */
void embedding_share(Embedding *e, const ParamRegistry *reg, int table, float dropout, uint64_t dropout_key);
/* token [N] i32, below 0 = none, a row of zeros; y [R, D]. */
Err embedding_forward(const Embedding *e, Ctx *c, Tensor token, Tensor y);
Err embedding_backward(const Embedding *e, Ctx *c, Tensor token, Tensor dy); /* dy is used up */

/* ---- norm ---- */

typedef struct {
    int weight, bias;   /* bias -1: none */
    bool rms, per_head; /* per_head: rows are (token, head) pairs, and heads are cut over tp */
    bool shared;        /* per_head, and the ranks of world->kv have the same heads */
    float eps;
} Norm;

typedef struct {
    Saved mean, rstd;
} NormSave;

/* partial: PARTIAL_ROWS for norms of the residual stream, PARTIAL_HEADS for norms of single heads. */
Err norm_register(Norm *n, ParamRegistry *reg, const char *name, int64_t width, bool rms, float eps,
                  Partial partial);
Err norm_forward(const Norm *n, Ctx *c, Tensor x, Tensor y, NormSave *save);

/* sum = residual + dropout(branch + bias): the stream behind a branch. bias may be absent. No branch: it is made. */
typedef struct {
    Tensor sum, residual, branch, bias;
    Dropout dropout;
} ResidualSum;

Err residual_add(Ctx *c, const ResidualSum *r);
/* residual_add, then norm_forward of the sum, in one pass; of one that is made, norm_forward. */
Err norm_forward_sum(const Norm *n, Ctx *c, const ResidualSum *r, Tensor y, NormSave *save);

Err norm_again(const Norm *n, Ctx *c, Tensor x, Tensor y); /* y once more, for recomputation; saves nothing */
Err norm_backward(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy, Tensor dx); /* dx += */
Err norm_backward_into(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy,
                       Tensor dx); /* dx = */

/* The same, and the gradient of a bias in the sum that x is, or in one before it without dropout between: the column
 * sums of dx. sum: the bias, or -1. */
typedef struct {
    Tensor x, dy, dx;
} NormRows;
Err norm_backward_sum(const Norm *n, Ctx *c, const NormSave *save, NormRows r, int sum);

/* ---- attention ---- */

typedef struct {
    Linear qkv, proj;
    Norm q_norm, k_norm;
    int sink; /* one number a head, or -1 */
    bool qk_norm, rope, gate;
    int heads, kv_heads, head_dim; /* global */
    int64_t kv_parts;              /* canonical parts of a kv head (base/heads.h) */
    int64_t window;
    float softcap; /* 0: none */
    float dropout;
    uint64_t dropout_key;
} Attention;

/* Behind norm and rotation; with q/k norms qkv or kv's k, and q_raw, are before them. */
typedef struct {
    Saved qkv;         /* where heads are views of it (attention.c); else */
    Saved q, kv, gate; /* kv [2, N, K, C] */
    Saved q_raw, k;    /* with q/k norms; q then is apart from qkv, too */
    Saved o, lse;
    Saved gated; /* o under the gate, if there is one */
    NormSave q_norm, k_norm;
} AttentionSave;

typedef struct {
    const char *name;
    int64_t hidden, window;
    int heads, kv_heads, head_dim, tp_blocks;
    bool bias, qk_norm, rope, sinks, gate;
    float std, proj_std, softcap, dropout, norm_eps;
    uint64_t seed;
} AttentionSpec;

Err attention_register(Attention *a, ParamRegistry *reg, AttentionSpec spec);
/* With c->kv (one sample, one span): the rows' keys and values go into it, and queries also see those before. */
Err attention_forward(const Attention *a, Ctx *c, Tensor x, Tensor y, AttentionSave *save);
Err attention_backward(const Attention *a, Ctx *c, const AttentionSave *save, Tensor x, Tensor dy, Tensor dx);
SliceKeyShape attention_keys(const Attention *a, const Ctx *c);

/* ---- multi-head latent attention, in the place of attention (docs/attention.md) ---- */

/*
 * Keys and values of all heads are made of one latent a row, and a part of the key, which has the rotary positions, is
 * shared by all heads.
 *
 *   q_a [q_rank, D]      q_a_norm [q_rank]   q_b [H * (nope + rope), q_rank]; or q [H * (nope + rope), D] alone
 *   kv_a [kv_rank + rope, D]   kv_a_norm [kv_rank]   kv_b [H * (nope + value), kv_rank]   proj [D, H * value]
 *   gate [H * value, D], if there is one: the heads' outputs are multiplied by its sigmoid
 *
 * With biases: of q_a, kv_a, gate and proj (added by the residual add). What makes heads' queries, keys and values has
 * none, as in the published code.
 */
typedef struct {
    int64_t q_rank, kv_rank; /* of the latents; q_rank 0: queries are made of the row itself */
    int64_t nope, rope,
        value; /* of a head: columns of queries and keys without positions, with them; of values */
} MlaWidths;

typedef struct {
    MlaWidths width;
    Linear q_a, q, kv_a, kv_b, gate, proj; /* q: that of the latent, or of the row */
    Norm q_norm, kv_norm;
    int sink;           /* one number a head, or -1 */
    int heads;          /* global */
    int64_t head_chunk; /* heads of a canonical chunk */
    float scale;        /* of products of queries and keys */
    bool rope, absorb, recompute, has_gate;
    int64_t window;
    float softcap, dropout;
    uint64_t dropout_key;
} Mla;

/* Selective recomputation leaves out q_latent, kv_latent, q, k and v. */
typedef struct {
    Saved q_a, kv_a;           /* latents before their norms; kv_a with the shared part of the key behind */
    Saved q_latent, kv_latent; /* behind them */
    Saved q, k, v, o, lse;
    Saved gate, gated; /* if there is one: it, and o under it */
    NormSave q_norm, kv_norm;
} MlaSave;

typedef struct {
    const char *name; /* "layers.3.attn" */
    MlaWidths width;
    int64_t hidden, window;
    int heads, tp_blocks; /* which divides heads */
    bool bias, rope, sinks, gate;
    bool recompute; /* selectively */
    bool absorb;    /* generation meets the latents themselves: heads of kv_rank + rope columns */
    float scale;    /* of scores, besides 1 / sqrt(nope + rope) */
    float std, proj_std, softcap, dropout, norm_eps;
    uint64_t seed;
} MlaSpec;

enum { MLA_LINEARS = 6 }; /* weight gradients that it can queue */

Err mla_register(Mla *m, ParamRegistry *reg, MlaSpec spec);
/* x and y [R, D]; with c->kv as attention_forward. With absorb one row behind others gets other roundings than among
 * many. */
Err mla_forward(const Mla *m, Ctx *c, Tensor x, Tensor y, MlaSave *save);
Err mla_backward(const Mla *m, Ctx *c, const MlaSave *save, Tensor x, Tensor dy, Tensor dx);
SliceKeyShape mla_keys(const Mla *m, const Ctx *c);

/* ---- mlp ---- */

/* What a feed-forward layer does between its two products. */
typedef struct {
    Activation kind;
    float limit;   /* of the clamped one (ops.def) */
    int64_t chunk; /* gated: columns of gate (and of up) per interleaved chunk */
} Act;

typedef struct {
    Linear fc1, fc2;
    Act act;
    int64_t ffn;    /* global */
    bool recompute; /* selective: the activation's output is computed again */
} Mlp;

typedef struct {
    Saved hidden, active; /* before and after the activation */
} MlpSave;

typedef struct {
    const char *name;
    int64_t hidden, ffn;
    Activation activation;
    float activation_limit;
    int tp_blocks;
    bool bias, recompute;
    float std, proj_std;
} MlpSpec;

Err mlp_register(Mlp *m, ParamRegistry *reg, MlpSpec spec);
Err mlp_forward(const Mlp *m, Ctx *c, Tensor x, Tensor y, MlpSave *save);
Err mlp_backward(const Mlp *m, Ctx *c, const MlpSave *save, Tensor x, Tensor dy, Tensor dx);

/* ---- mixture of experts, in the place of an mlp (docs/moe.md) ---- */

/*
 * A router sends each row to topk of the experts, each of which is an mlp of its own; y is the weighted sum of what
 * they give. A shared expert, which every row passes, is added to it, with a gate or without. The ranks of a
 * tp-ep group have E / ep experts each, of which etp neighbours have a part of each, and send each other's experts
 * their rows.
 *
 *   router [E, D]    experts.fc1 [E * F, D] (swiglu: [E * 2F, D], an expert's gate above its up)
 *                    experts.fc2 [E * D, F]; both cut over ep between experts, over etp along F
 *
 * With biases: of the logits [E]; of fc1 as its rows are; of fc2 [E * D], whole on each rank, as it is added where a
 * row's outputs come back to: the ranks that share an expert have parts of a sum.
 */
/* How a router is made to use all experts (docs/moe.md). */
typedef struct {
    int64_t unit;  /* samples over which rows are counted for the auxiliary loss and for capacities */
    float aux, z;  /* weights of the auxiliary loss and of the z-loss; 0: none */
    bool global;   /* the auxiliary loss counts all units of the step's batch so far, in data order */
    bool sinkhorn; /* choices are made by what Sinkhorn's method makes of a unit's logits */
    bool forced;   /* experts take turns, whatever the router says: for benchmarks */
    float
        bias_rate; /* > 0: choices are made with a bias for each expert, which changes by so much after a step */
} Balance;

/* How many rows of a balance unit an expert takes, and which: the others' choices of it are dropped. */
typedef struct {
    double factor;    /* of the mean over all experts; 0: all rows */
    bool by_position; /* the first rows, else those with the largest weights */
    double
        slack; /* room of a rank's experts, as a multiple of an even share; 0: for all rows that can come */
    bool drop; /* rows beyond it; else the step is not to be used (StepValues.no_room): */
    bool redo; /* it is done again in pieces (Ctx.in_pieces) */
} Capacity;

/* A mixture, and how it is cut: what decides on the most rows that there can be of a micro-batch. */
typedef struct {
    int experts, topk;
    int64_t unit, rows,
        seq;      /* samples of a balance unit; rows of this rank's tokens, of a sample on a cp rank */
    int64_t leaf; /* tokens of a leaf of the weights' gradients, which no piece cuts */
    int sp, cp, ep, etp;
    Capacity capacity;
} MoeCut;

typedef struct {
    int64_t capacity; /* rows of a balance unit that an expert takes */
    int64_t sent;     /* permuted rows of this rank's tokens */
    int64_t pair;     /* of these, for the experts of one rank */
    int64_t worst;    /* rows that its experts can get */
    int64_t owned;    /* rows that its experts have room for */
    int64_t
        piece; /* tokens of each rank whose rows have room wherever they go; 0: not even those of a leaf */
} MoeRoom;

MoeRoom moe_room(const MoeCut *cut);

typedef struct {
    int router, fc1, fc2;                /* weights */
    int router_bias, fc1_bias, fc2_bias; /* or -1 */
    int bias;                            /* STATE: of the experts; its accumulator counts their rows */
    int block; /* number of this one in its stage, MTP's behind the others; set by who registers the stage */
    int experts, topk;
    int64_t hidden, ffn;
    Act act;
    Router scoring;
    Balance balance;
    bool gathers; /* experts take their rows from all ranks' tokens, gathered, instead of being sent them */
    Capacity capacity;
    float jitter; /* of the router's input in training; 0: none */
    uint64_t jitter_key;
    bool has_shared, recompute; /* selective: permuted rows and the activation's output are made again */
    Mlp shared;
    int shared_gate; /* weight [1, D], or -1 */
} Moe;

typedef struct {
    Saved logits, index, weight, row, choice, offset;
    Saved owned; /* offsets of this rank's experts; with one rank along ep those above */
    Saved taken; /* where all ranks' tokens are gathered: the choices that its experts' rows are of */
    Saved x, hidden, active; /* rows of this rank's experts: input, before and after the activation */
    Saved out;               /* what this rank's rows were given */
    Saved shared_out, gate;
    MlpSave shared;
} MoeSave;

typedef struct {
    const char *name; /* "layers.3.mlp" */
    int experts, topk, tp_blocks;
    int parts; /* of a dense layer that they begin as: the router's rows of its parts begin alike. 0 = 1 */
    int64_t hidden, ffn, shared_ffn; /* shared_ffn 0: no shared expert */
    bool shared_gate, gathers, recompute;
    bool bias; /* of router and experts */
    Activation activation;
    float activation_limit;
    Router scoring;
    Balance balance;
    Capacity capacity;
    float jitter, std, proj_std;
    uint64_t seed;
} MoeSpec;

enum { MOE_LINEARS = 6 }; /* weight gradients that a mixture can queue */

Err moe_register(Moe *m, ParamRegistry *reg, MoeSpec spec);
/* x and y [R, D], another than x: rows as outside tensor-parallel regions. */
Err moe_forward(const Moe *m, Ctx *c, Tensor x, Tensor y, MoeSave *save);
Err moe_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, Tensor dy, Tensor dx);

/* ---- head and loss: vocabulary-parallel logits and cross entropy ---- */

typedef struct {
    int weight; /* the embedding's table when tied */
    int64_t vocab, padded_vocab;
} Head;

/* What a head's rows are to predict, and what comes of it. */
typedef struct {
    Tensor target; /* [N] i32, as Batch.target; the same memory in forward and backward */
    Tensor sums;   /* [3] i64: accumulate as ops.def, loss_sum */
    float weight;  /* of this loss in what backward is the gradient of */
} HeadLoss;

typedef struct {
    Saved logits, row_max, row_sum;
    bool at_once;  /* logits are their gradient already */
    Tensor target; /* of the loss, */
    float weight;
} HeadSave;

/* The vocabulary with padding: tp_blocks chunks of whole vectors, which can be cut into leaves of LEAF_MOST at most. */
int64_t head_padded_vocab(int64_t vocab, int tp_blocks);

Err head_register(Head *h, ParamRegistry *reg, int tied_weight, int64_t vocab, int64_t padded_vocab,
                  int64_t hidden, float std);
Err head_forward(const Head *h, Ctx *c, Tensor x, const HeadLoss *to, HeadSave *save);
Err head_backward(const Head *h, Ctx *c, const HeadSave *save, Tensor x, Tensor dx);
/* Logits only, of any rows: [n, padded_vocab / tp]. For generation. */
Err head_logits(const Head *h, Ctx *c, Tensor x, Tensor logits);

#endif
