/*
 * All layers on one page, and Ctx, what they share. A layer is a struct of parameter ids, and a forward and a
 * backward that are written by hand. Each backward mirrors its forward from the last line to the first.
 *
 * Rows. A micro-batch has N = B * T rows. Outside of the tensor-parallel regions a rank holds R of them: its slice of
 * the N rows with sequence parallelism, all of them without. gather_rows() enters such a region and reduce_rows()
 * leaves it. Both cost nothing in a group of one rank.
 *
 * Memory. The caller allocates outputs. A backward overwrites gradients of activations, unless a comment says that it
 * adds to them. It always adds to gradients of parameters, and only through grad_add_*.
 *
 * Saves. A layer keeps what its backward needs in two regions of the micro-batch's Slot. The dgrad of backward frees
 * REGION_I. The wgrad frees REGION_W, which holds inputs and output gradients of linears. A block's save is one
 * contiguous segment that may move, so a Saved is a segment and an offset, not a pointer.
 */
#ifndef MEGATRAIN_LAYER_LAYER_H
#define MEGATRAIN_LAYER_LAYER_H

#include "layer/spec.h"
#include "param/param.h"

/* ---- saves ---- */

typedef enum { REGION_I, REGION_W, REGION_COUNT } Region;

typedef struct {
    int64_t offset; /* bytes from the segment's base in its region */
    int64_t dim[TENSOR_MAX_DIMS];
    int16_t segment;
    int8_t region, ndim;
    DType dtype;
} Saved;

typedef struct {
    char *base[REGION_COUNT];
    int64_t size_bytes[REGION_COUNT];
} Segment;

/* A weight gradient that waits for its W: dw += dy^T x. Both tensors lie in REGION_W, or in scratch if it does not
 * wait. */
typedef struct {
    int weight;
    Tensor dy, x;
    bool gather_x, gather_dy; /* its rows are still sharded and must be gathered first */
    Tensor offset; /* for a weight of experts: where each expert's rows begin (ops.def); else absent */
} Wgrad;

/* Keys and values of an attention layer, [B, T, K, C], that later slices of the sequences read in this slot. ndim 0:
 * they have not been computed yet. */
typedef struct {
    Saved k, v;
} SliceKeys;

/* The memory of one unit in flight: of a micro-batch, or of a half or a slice of one. */
typedef struct {
    Arena region[REGION_COUNT];
    Segment *segments; /* one for the embedding, for each block, for the head */
    int segment_count;
    SliceKeys *keys; /* [attention layers of the stage]; NULL if sequences are not cut into slices */
    Wgrad *queue;
    int queued, queue_capacity;
} Slot;

/* ---- context ---- */

/* Gradients of keys and of values. What later slices of a micro-batch have added so far to those of one layer is f32
 * [places, elements of one slice] (keys_sums.c). */
typedef struct {
    Tensor of[2];
} SliceGrads;

enum { SLICES_MOST = 64 }; /* into which a sequence may be cut */

/* Canonical blocks, which decide where every sum rounds. They belong to the model, not to the layout
 * (docs/determinism.md). */
typedef struct {
    /* reproducible = layout: sums follow these blocks; otherwise they run over what a rank holds */
    bool exact;
    int tp_blocks;       /* chunks into which every dim is divided that tp may cut */
    int64_t leaf_tokens; /* tokens in a leaf of a linear's weight gradient: seq / seq_blocks */
    int64_t leaf_rows;   /* rows in a leaf of a gradient of a bias or a norm */
    int64_t attn_block;  /* keys in a block of softmax */
    int64_t query_leaf;  /* query positions in a leaf of dk and dv */
    int room; /* log2 of the largest number of leaves that one gradient element can receive in a step */
} Canon;

/* One micro-batch on the device. Tensors with one entry a row have the N gathered rows. */
typedef struct {
    int64_t B, T;  /* samples; rows of a sample on this rank */
    int64_t first; /* number of its first sample in the step's batch */
    /* How many of the last samples only fill up an evaluation's batch. They do not count, and experts get no rows of
     * them. */
    int64_t filling;
    int64_t seq;   /* positions of a whole sample */
    Spans span;    /* the positions of the T rows */
    Tensor token;  /* [N] i32 */
    Tensor target; /* [N] i32; -1: the row does not count */
    /* [depths, N] i32, or absent. Row k - 1 has the token k positions further on, or -1 if there is none, and the
     * target of a module that reads it (model/mtp.c). */
    Tensor further_token, further_target;
    Tensor position; /* [N] i32: position in the sample; it numbers the draws of dropout */
    Spans placed;    /* the span that `position` was filled for; all 0: it has not been filled */
    Tensor place;  /* [N] i32: position in the document (ctx_place); absent if documents are not kept apart */
    Tensor sample; /* [N] i64: number of the row's sample in the data order */
    Tensor samples; /* [B] i64: the same for each sample */
    Tensor doc;     /* [B, T] i32: position at which the row's document begins; absent as `place` */
} Batch;

/* With cp: the positions that a rank has. ZIGZAG: a part from the front of the sequence and one from its back.
 * CONTIGUOUS: one run. */
typedef enum { CONTEXT_ZIGZAG, CONTEXT_CONTIGUOUS } ContextCut;

/* The keys and values of one attention layer that generation keeps, from position 0 on, each [1, seq, K, C]. Latent
 * attention keeps k alone, [1, seq, 1, kv_rank + rope]: the latent behind its norm, then the rotated part of the key
 * that all heads share. */
typedef struct {
    Tensor k, v;
} KvCache;

/*
 * The gradient of the last bias of a block is the column sum of the gradient of the residual stream behind the block.
 * The first norm of the next block writes that gradient, so it sums the columns in the same pass. This is what two
 * neighbouring blocks tell each other about it.
 */
typedef struct {
    bool
        wanted; /* the block at work sums the columns of its input's gradient, for `bias` of the block before */
    int bias;
    bool done; /* the block behind has summed those for the bias of the block at work */
} InputSum;

/* What the layers of a stage share while they compute one unit. */
typedef struct {
    Stream *s;
    World *world;
    ParamStore *params;
    Slot *slot;
    int segment;               /* the segment that save_new fills */
    Arena *into[REGION_COUNT]; /* where save_new allocates: in the slot's regions or in scratch */
    Arena *scratch;
    const Batch *batch;
    const StepValues *step;    /* in device memory */
    Tensor rope_cos, rope_sin; /* [seq, half of the columns that turn]; absent without rotary positions */
    Canon canon;
    ContextComm context; /* how the ranks of world->cp meet in the block at work */
    ContextCut cut;      /* which positions each of them has */
    const KvCache *kv;   /* the cache of the block at work; NULL in training and evaluation */
    InputSum below;      /* for the block at work, in backward */
    /*
     * [blocks of the stage, then those of MTP; balance units; experts] i64, for a balance loss over the whole batch:
     * how many rows of the batch, up to the end of each unit, would choose each expert by scores alone. Forward
     * writes it; its units come in the order of the data. Absent if no mixture is balanced so.
     */
    Tensor loads_so_far;
    /* The losses that balance the mixtures of the stage (ops.def, router_balance), summed over mixtures and over the
     * step. Backward writes them. Absent if no loss balances. */
    Tensor balance_losses;
    DType dtype;         /* of activations, and of the weights that layers read */
    bool dropout_on;     /* in training: dropout, noise, and what only the loss of a step needs */
    bool in_pieces;      /* tokens pass the experts in pieces of MoeRoom.piece instead of all at once */
    bool split_backward; /* W runs later, so dy of linears must outlive the dgrad */
    int version;         /* age of the weights to read, in updates */
    Event *moved;        /* the call under way that moves rows to their experts or back */
    /* In a pair (engine/pair.h): called before rows are waited for, so that the other half goes on meanwhile. Else
     * NULL. */
    Err (*other_half)(void *pair);
    void *pair;
    /*
     * If sequences are cut into slices: how many slices there are, the one at work, the slots of the slices up to it,
     * and for each attention layer of the stage the gradients that wait for earlier slices. slice_count is 0 or 1 if
     * they are not cut.
     */
    int slice_count, slice;
    Slot *slices[SLICES_MOST];
    SliceGrads *slice_grads;
    int layer; /* number of the attention layer at work in the stage: first those of blocks, then those of MTP */
} Ctx;

int64_t ctx_rows(const Ctx *c); /* R: rows that this rank holds outside of tensor-parallel regions */
Tensor ctx_row_slice(const Ctx *c, Tensor per_row); /* this rank's R of the N entries */
Tensor ctx_place(const Ctx *c); /* [N] i32: the positions that learned and rotary positions go by */
Dropout ctx_dropout(const Ctx *c, float p, uint64_t key); /* off if this is not training */

/* Begins segment `index`, to which later saves belong. */
void segment_begin(Ctx *c, int index);
void segment_end(Ctx *c); /* notes the sizes of the segment */
/* Allocates a tensor that is kept for backward. ERR_MEMORY. */
Err save_alloc(Ctx *c, Region region, Tensor *t, Saved *saved, DType dtype, int ndim, const int64_t *dim);
#define save_new(c, region, t, saved, dtype, ...)                           \
    save_alloc((c), (region), (t), (saved), (dtype),                        \
               (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), \
               (const int64_t[]){ __VA_ARGS__ })
Tensor save_get(const Ctx *c, Saved saved);
/* Allocates a gradient that a queued linear will read: in REGION_W if W runs later, else in scratch. */
Err dy_alloc(Ctx *c, Tensor *t, int64_t rows, int64_t cols);

/* These are the only ways to the memory of a parameter. */
Tensor param_value(const Ctx *c, int id);
Tensor param_grad(const Ctx *c, int id);
Tensor param_state(const Ctx *c, int id); /* a STATE parameter in fp32, as the last update left it */

/* ---- gradients of parameters: accumulators, written only here; the first contribution of a step overwrites ---- */

/* Adds `rows` to the table's gradient, at row first + index of each. */
Err grad_add_rows(Ctx *c, int table, Tensor rows, Tensor index, int64_t first);
/* Adds the column sums of dy to the bias's gradient, from its element `first` on. */
Err grad_add_columns(Ctx *c, int bias, Tensor dy, int64_t first);

/* Computes all weight gradients in the slot's queue and empties it. */
Err wgrad_drain(Ctx *c);

/* ---- rows in and out of tensor-parallel regions ---- */

/* full [N, D] = the rows of all ranks, of which x has this rank's R. In a group of one rank full is x itself;
 * otherwise it lies in scratch. */
Err gather_rows(Ctx *c, Tensor x, Tensor *full);
/* The same in two calls; work between them overlaps it. Only one gather or sum may be under way. */
Err gather_rows_begin(Ctx *c, Tensor x, Tensor *full);
Err gather_rows_end(Ctx *c);
/* y [R, D] = this rank's rows of the sum of partial [N, D] over tp, added as a tree. partial comes from
 * partial_alloc(). */
Err reduce_rows(Ctx *c, Tensor partial, Tensor y);
/* The same in two calls. What lies in scratch at begin must stay there until end. */
typedef struct {
    Tensor y, parts; /* parts: what the ranks have sent, if this rank adds it up itself (sums.c) */
} PendingSum;
Err reduce_rows_begin(Ctx *c, Tensor partial, Tensor y, PendingSum *out);
Err reduce_rows_end(Ctx *c, PendingSum r);
/* x = the sum of x over the ranks of `group`, added as a tree. x has any float type, as the rows above. */
Err reduce_values(Ctx *c, Comm *group, Tensor x);
/* y = this rank's slice of the same sum. x has one slice for each rank of `group`. */
Err reduce_scatter_values(Ctx *c, Comm *group, Tensor x, Tensor y);
/* y = x [rows, columns]. Each may be some columns of a wider tensor. */
Err copy_rows(Ctx *c, Tensor y, Tensor x);
/* The tensor to compute the partial sum of y in: y itself if rows are not sharded, else [N, D] in scratch. */
Err partial_alloc(Ctx *c, Tensor y, Tensor *partial);

/* ---- sequences shared by the ranks of world->cp ---- */

/* The positions of a sample that a rank holds. The sample is cut into 2 * ranks equal parts. Rank r has the parts r
 * and 2 * ranks - 1 - r (ZIGZAG) or 2 * r and 2 * r + 1 (CONTIGUOUS); docs/context.md. */
Spans context_span(ContextCut cut, int64_t seq, int ranks, int rank);

/* The same for the slice at work, if sequences are cut into slices, else for the sample. */
Spans context_at_work(const Ctx *c, ContextCut cut, int ranks, int rank);

/* The keys of a rank in one attention layer: heads, chunks of query heads that read one of them, widths. */
typedef struct {
    int64_t heads, chunks, k_cols, v_cols;
} SliceKeyShape;

/* Allocates in `state` what waits for c->slice_count slices, each of the shape of c->batch, in a layer whose ranks of
 * cp meet as c->context says. ERR_MEMORY. */
Err slice_grads_init(const Ctx *c, SliceKeyShape shape, SliceGrads *g, Arena *state);

/* ---- linear ---- */

typedef enum { LINEAR_COLUMN, LINEAR_ROW, LINEAR_WHOLE } LinearKind;

typedef struct {
    int weight, bias; /* bias -1: none */
    int64_t in, out;  /* over all ranks */
    LinearKind kind;
} Linear;

typedef struct {
    const char *owner, *name; /* "layers.3.attn", "qkv": its weight is "layers.3.attn.qkv.weight" */
    int64_t in, out;
    LinearKind kind;
    bool bias;
    float std;
    int64_t section[PARAM_MAX_SECTIONS], interleave; /* of the output dim */
} LinearSpec;

Err linear_register(Linear *l, ParamRegistry *reg, LinearSpec spec);
/*
 * COLUMN: x [R, in] -> y [N, out / tp], with the bias.
 * ROW:    x [N, in / tp] -> y [R, out], WITHOUT the bias: the residual add applies it once.
 * WHOLE:  x [R, in] -> y [R, out], with the bias; every rank has the whole weight.
 */
Err linear_forward(const Linear *l, Ctx *c, Tensor x, Tensor y);
/* COLUMN only: computes active = gelu(y) in the same op. */
Err linear_forward_gelu(const Linear *l, Ctx *c, Tensor x, Tensor y, Tensor active);
/* dx has the shape of x, dy comes from dy_alloc. Queues dw. COLUMN and WHOLE add the gradient of their bias; the
 * caller of ROW adds that of ROW's. */
Err linear_backward(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor dx);
/* ROW only, if x was gelu(gelu_x): dx is the gradient of gelu_x. */
Err linear_backward_gelu(const Linear *l, Ctx *c, Tensor x, Tensor dy, Tensor gelu_x, Tensor dx);

/* ---- embedding ---- */

typedef struct {
    int table, position; /* position -1: no learned positions */
    int64_t vocab_rows;  /* padded rows on this rank */
    uint64_t dropout_key;
    const ModelSpec *spec;
} Embedding;

#define EMBEDDING_TABLE "embedding.token.weight"
/* The parameter [vocab, hidden], cut over tp by rows. shared: a head of another registry reads it, too. */
ParamSpec embedding_table(const ModelSpec *spec, bool shared, int flags);
Err embedding_register(Embedding *e, ParamRegistry *reg, const ModelSpec *spec, bool shared);
/* An embedding without positions that looks up rows of a table that is registered already. */
void embedding_share(Embedding *e, const ParamRegistry *reg, const ModelSpec *spec, const char *owner,
                     int table);
/* token [N] i32; below 0 there is none, and the row is zeros. y [R, D]. */
Err embedding_forward(const Embedding *e, Ctx *c, Tensor token, Tensor y);
Err embedding_backward(const Embedding *e, Ctx *c, Tensor token, Tensor dy); /* dy is overwritten */

/* ---- norm ---- */

typedef struct {
    int weight, bias;   /* bias -1: none */
    bool rms, per_head; /* per_head: a row is a (token, head) pair, and tp cuts the heads */
    bool shared;        /* per_head, and the ranks of world->kv have the same heads */
    float eps;
} Norm;

typedef struct {
    Saved mean, rstd;
} NormSave;

/* partial: PARTIAL_ROWS for a norm of the residual stream, PARTIAL_HEADS for a norm of single heads. */
Err norm_register(Norm *n, ParamRegistry *reg, const char *name, int64_t width, bool rms, float eps,
                  Partial partial);
Err norm_forward(const Norm *n, Ctx *c, Tensor x, Tensor y, NormSave *save);

/* The residual stream behind a branch: sum = residual + dropout(branch + bias). bias may be absent. If branch is
 * absent, sum has been computed already. */
typedef struct {
    Tensor sum, residual, branch, bias;
    Dropout dropout;
} ResidualSum;

Err residual_add(Ctx *c, const ResidualSum *r);
/* residual_add, unless sum has been computed, and norm_forward of the sum, in one pass. */
Err norm_forward_sum(const Norm *n, Ctx *c, const ResidualSum *r, Tensor y, NormSave *save);

Err norm_again(const Norm *n, Ctx *c, Tensor x, Tensor y); /* computes y again, saving nothing */
Err norm_backward(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy, Tensor dx); /* dx += */
Err norm_backward_into(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy,
                       Tensor dx); /* dx = */

/* norm_backward_into, and the gradient of the bias `sum` (-1: none), which is the column sums of dx. x must be a sum
 * that the bias was added to, directly or in an earlier sum without dropout between them. */
typedef struct {
    Tensor x, dy, dx;
} NormRows;
Err norm_backward_sum(const Norm *n, Ctx *c, const NormSave *save, NormRows r, int sum);

/* ---- attention ---- */

/* What all kinds of attention do alike once they have queries, keys and values (attend.c). */
typedef struct {
    const ModelSpec *spec;
    int sink;    /* parameter with a number for each head; -1: none */
    float scale; /* of the products of queries and keys */
    int64_t window;
    uint64_t dropout_key;
} AttentionCore;

typedef struct {
    const ModelSpec *spec;
    AttentionCore core;
    Linear qkv, proj;
    Norm q_norm, k_norm;
    bool rope;
    int64_t kv_parts; /* canonical parts into which a kv head is cut (base/heads.h) */
} Attention;

/* Queries and keys are kept behind their norms and their rotation. With norms, q_raw and the k in qkv or kv are kept
 * as they were before. */
typedef struct {
    Saved qkv;         /* if heads are views of it (attention.c); otherwise q, kv and gate */
    Saved q, kv, gate; /* kv [2, N, K, C] */
    Saved q_raw, k;    /* with norms of queries and keys; q then is kept beside qkv, too */
    Saved o, lse;
    Saved gated; /* o multiplied by the gate, if there is one */
    NormSave q_norm, k_norm;
} AttentionSave;

/* name: for example "layers.3.attn". layer: the number by which the window and the rotation are looked up. */
Err attention_register(Attention *a, ParamRegistry *reg, const ModelSpec *spec, const char *name, int layer);
/* If there is a cache c->kv, with one sample and one span: the keys and values of the rows go into it, and queries
 * also see those that it had before. */
Err attention_forward(const Attention *a, Ctx *c, Tensor x, Tensor y, AttentionSave *save);
Err attention_backward(const Attention *a, Ctx *c, const AttentionSave *save, Tensor x, Tensor dy, Tensor dx);
SliceKeyShape attention_keys(const Attention *a, const Ctx *c);

/* ---- multi-head latent attention, in the place of attention (docs/attention.md) ---- */

/*
 * The keys and values of all heads are computed from one latent a row. All heads share the part of the key that has
 * the rotary positions.
 *
 *   q_a [q_rank, D]      q_a_norm [q_rank]   q_b [H * (nope + rope), q_rank]; or q [H * (nope + rope), D] alone
 *   kv_a [kv_rank + rope, D]   kv_a_norm [kv_rank]   kv_b [H * (nope + value), kv_rank]   proj [D, H * value]
 *   gate [H * value, D], if there is one: the heads' outputs are multiplied by its sigmoid
 *
 * Biases, if the model has them, belong to q_a, kv_a, gate and proj (which the residual add applies). The products
 * that give the heads' queries, keys and values have none, as in the published code.
 */
typedef struct {
    const ModelSpec *spec;
    AttentionCore core;
    Linear q_a, q, kv_a, kv_b, gate, proj; /* q reads the latent, or the row if there is no q_a */
    Norm q_norm, kv_norm;
    int64_t head_chunk; /* heads in a canonical chunk */
    bool rope;
} Mla;

/* With selective recomputation q_latent, kv_latent, q, k and v are not kept. */
typedef struct {
    Saved q_a, kv_a;           /* latents before their norms; behind kv_a's the shared part of the key */
    Saved q_latent, kv_latent; /* latents behind their norms */
    Saved q, k, v, o, lse;
    Saved gate, gated; /* the gate, and o multiplied by it, if there is one */
    NormSave q_norm, kv_norm;
} MlaSave;

enum { MLA_LINEARS = 6 }; /* the most weight gradients that it queues */

/* tp_blocks must divide the number of heads. */
Err mla_register(Mla *m, ParamRegistry *reg, const ModelSpec *spec, const char *name, int layer);
/* x and y [R, D]; a cache c->kv is used as by attention_forward. With absorb, a row that is computed alone behind
 * cached ones rounds differently than the same row among many. */
Err mla_forward(const Mla *m, Ctx *c, Tensor x, Tensor y, MlaSave *save);
Err mla_backward(const Mla *m, Ctx *c, const MlaSave *save, Tensor x, Tensor dy, Tensor dx);
SliceKeyShape mla_keys(const Mla *m, const Ctx *c);

/* ---- mlp ---- */

typedef struct {
    const ModelSpec *spec;
    Linear fc1, fc2;
    int64_t ffn; /* width over all ranks */
} Mlp;

typedef struct {
    Saved hidden, active; /* before and behind the activation */
} MlpSave;

Err mlp_register(Mlp *m, ParamRegistry *reg, const ModelSpec *spec, const char *name, int64_t ffn);
Err mlp_forward(const Mlp *m, Ctx *c, Tensor x, Tensor y, MlpSave *save);
Err mlp_backward(const Mlp *m, Ctx *c, const MlpSave *save, Tensor x, Tensor dy, Tensor dx);

/* ---- mixture of experts, in the place of an mlp (docs/moe.md) ---- */

/* What decides how many rows of a micro-batch there can be: the mixture, and how the ranks share it. */
typedef struct {
    int experts, topk;
    int64_t unit; /* samples in a balance unit */
    int64_t rows; /* tokens that this rank holds */
    int64_t seq;  /* tokens of a sample on a rank of cp */
    int64_t leaf; /* tokens in a leaf of the weights' gradients, which no piece cuts */
    int sp, cp, ep, etp;
    Capacity capacity;
} MoeCut;

typedef struct {
    int64_t capacity; /* rows of a balance unit that an expert takes */
    int64_t sent;     /* permuted rows of this rank's tokens */
    int64_t pair;     /* the most of these that go to the experts of one rank */
    int64_t worst;    /* the most rows that this rank's experts can get */
    int64_t owned;    /* the rows that this rank's experts have memory for */
    /* So many tokens of each rank fit wherever their rows go. 0: not even those of a leaf do. */
    int64_t piece;
} MoeRoom;

MoeRoom moe_room(const MoeCut *cut);

/*
 * A router sends each row to topk of the experts. Each expert is an mlp of its own, and y is the weighted sum of
 * their outputs. A shared expert may be added, which every row passes, with a gate or without. The ranks of a tp-ep
 * group share the experts: each has E / ep of them, and etp neighbours have a part of each of these. They send their
 * rows to each other's experts.
 *
 *   router [E, D]    experts.fc1 [E * F, D] (swiglu: [E * 2F, D], an expert's gate above its up)
 *                    experts.fc2 [E * D, F]; both cut over ep between experts, over etp along F
 *
 * Biases, if the model has them: of the logits, [E]; of fc1, cut as its rows; of fc2, [E * D], whole on each rank.
 * The latter is added on the rank that a row's outputs return to, because ranks that share an expert have partial
 * sums.
 */
typedef struct {
    const ModelSpec *model;
    const MixtureSpec *spec;             /* &model->moe */
    int router, fc1, fc2;                /* weights */
    int router_bias, fc1_bias, fc2_bias; /* or -1 */
    int bias;  /* STATE: a bias for choosing each expert; its accumulator counts rows */
    int block; /* number of the block in its stage, MTP's last; set by the code that registers the stage */
    uint64_t jitter_key;
    Mlp shared;      /* if spec->shared_ffn */
    int shared_gate; /* weight [1, D], or -1 */
} Moe;

typedef struct {
    Saved logits, index, weight, row, choice, offset;
    Saved owned; /* offsets of this rank's experts; with one rank along ep they are `offset` */
    Saved taken; /* if all ranks' tokens are gathered: the choices whose rows this rank's experts take */
    Saved x, hidden, active; /* rows of this rank's experts: input, before and behind the activation */
    Saved out;               /* the experts' outputs for this rank's rows */
    Saved shared_out, gate;
    MlpSave shared;
} MoeSave;

enum { MOE_LINEARS = 6 }; /* the most weight gradients that it queues */

Err moe_register(Moe *m, ParamRegistry *reg, const ModelSpec *spec, const char *name);
/* x and y [R, D], rows as outside of tensor-parallel regions; y must not be x. */
Err moe_forward(const Moe *m, Ctx *c, Tensor x, Tensor y, MoeSave *save);
Err moe_backward(const Moe *m, Ctx *c, const MoeSave *save, Tensor x, Tensor dy, Tensor dx);

/* ---- head and loss: vocabulary-parallel logits and cross entropy ---- */

typedef struct {
    const ModelSpec *spec;
    int weight; /* the embedding's table if they are tied */
} Head;

/* What the rows of a head are to predict, and where the loss is added up. */
typedef struct {
    Tensor target; /* [N] i32, as Batch.target; must stay until backward has run */
    Tensor sums;   /* [3] i64, which are added to (ops.def, loss_sum) */
    float weight;  /* of this loss in the total that is differentiated */
} HeadLoss;

typedef struct {
    Saved logits, row_max, row_sum;
    bool at_once;  /* forward has already replaced the logits by their gradient */
    Tensor target; /* those of the HeadLoss */
    float weight;
} HeadSave;

/* The vocabulary with padding: tp_blocks chunks, each of whole vectors, which leaves of at most LEAF_MOST can cut. */
int64_t head_padded_vocab(int64_t vocab, int tp_blocks);

/* tied_weight: the embedding's table; -1: the head has a weight of its own. */
Err head_register(Head *h, ParamRegistry *reg, const ModelSpec *spec, int tied_weight);
Err head_forward(const Head *h, Ctx *c, Tensor x, const HeadLoss *to, HeadSave *save);
Err head_backward(const Head *h, Ctx *c, const HeadSave *save, Tensor x, Tensor dx);
/* For generation: only the logits [n, padded_vocab / tp], of any rows. */
Err head_logits(const Head *h, Ctx *c, Tensor x, Tensor logits);

#endif
