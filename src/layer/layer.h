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
    Fp8Recipe fp8;            /* the product's */
    Tensor amax;              /* [fp8_amax_count] i64, if Fp8Facts.tensor: op fp8_amax's result for dy */
    Tensor turned, factor;    /* dy transposed in 8 bits, if it has been cast already */
    Tensor offset;            /* for a weight of experts: where each expert's rows begin (ops.def); else absent */
} Wgrad;

/* Place of the saves of a block that have left the device (offload.h). */
typedef struct {
    void *host;
    int64_t size_bytes;
} SaveAway;

typedef struct Offload Offload;

/* The memory of one unit in flight: a micro-batch, or a half or a slice of one. */
typedef struct {
    Arena region[REGION_COUNT];
    Segment *segments; /* one for each block, and one for the head */
    int segment_count;
    Arena host;     /* in the host's memory: saves that left the device */
    SaveAway *away; /* [blocks of the stage]; NULL if no saves leave the device */
    void **kept;    /* [blocks of the stage], their mixers' (Carry.kept); NULL if sequences are not cut into slices */
    Wgrad *queue;
    int queued, queue_capacity;
    /* [parameters of the stage x fp8_amax_count] i64, by a linear layer's weight: op fp8_amax's result for its input in
     * the forward, over all ranks that have some of the input. Absent: no recipe wants it. */
    Tensor amax;
} Slot;

/* ---- context ---- */

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
    int headroom_bits;   /* log2 of the largest number of leaves that one gradient element can receive in a step */
} Canon;

/* One micro-batch on the device. Tensors with one entry a row have the N gathered rows. */
typedef struct {
    int64_t B, T;  /* samples; rows of a sample on this rank */
    int64_t first; /* number of its first sample in the step's batch */
    /* Number of samples, the last ones, that only fill up an evaluation's batch. They do not count, and experts get no
     * rows of them. */
    int64_t filling;
    int64_t seq;   /* positions of a whole sample */
    Spans span;    /* the positions of the T rows */
    Tensor token;  /* [N] i32 */
    Tensor target; /* [N] i32; -1: the row does not count */
    /* [depths, N] i32, or absent. Row k - 1 has the token k positions further on, or -1 if there is none, and the
     * target of a module that reads it (model/mtp.c). */
    Tensor further_token, further_target;
    Tensor position;     /* [N] i32: position in the sample; it numbers the draws of dropout */
    Spans position_span; /* the span that `position` was filled for; all 0: it has not been filled */
    Tensor doc_position; /* [N] i32: position in the document; absent if documents are not kept apart */
    Tensor sample;       /* [N] i64: number of the row's sample in the data order */
    Tensor samples;      /* [B] i64: the same for each sample */
    Tensor doc;          /* [B, T] i32: position at which the row's document begins; absent as `doc_position` */
    Tensor apart[2];     /* room for the two where documents are kept apart in some batches only; else absent */
    /* [1 + tp, N] f32: evaluation leaves each row's loss here, and the target's logit on each rank of tp, 0 on those
     * that do not have it. Absent: nobody asks. */
    Tensor scores;
} Batch;

/* With cp: the positions that a rank has. ZIGZAG: a part from the front of the sequence and one from its back.
 * CONTIGUOUS: one run. */
typedef enum { CONTEXT_ZIGZAG, CONTEXT_CONTIGUOUS } ContextCut;

/* How layers compute. Code that wants another mode than its caller's changes it in a copy of the Ctx. */
typedef struct {
    bool training;        /* a step's forward: with dropout, noise, and all that only its loss needs */
    bool split_backward;  /* W runs later, so dy of linears must outlive the dgrad */
    bool retry_in_pieces; /* tokens pass the experts in pieces of MoeLimits.piece instead of all at once */
    int version;          /* age of the weights to read, in updates */
    Pass pass; /* the pass of the action at work; a forward that is made again in a backward is part of the backward */
} Mode;

/* The block at work. */
typedef struct {
    ContextComm context; /* how the ranks of world->cp meet in it */
    int layer;           /* its number among the blocks of the stage, behind which come those of MTP */
    void *cache;         /* its mixer's (Carry.cache), in generation; NULL in training and evaluation */
} BlockAt;

/* Sequences that pass in slices; count is 0 or 1 if they are whole. */
typedef struct {
    int count, at;            /* how many there are, and which one is at work */
    Slot *slots[SLICES_MOST]; /* slots of the slices up to the one at work */
    void **grads;             /* [blocks of the stage]: their mixers' (Carry.grads) */
} Slices;

/* Counts and sums of the balance losses of a stage's mixtures. */
typedef struct {
    /*
     * [blocks of the stage, then those of MTP; balance units; experts] i64, for a balance loss over the whole batch:
     * how many rows of the batch, up to the end of each unit, would choose each expert by scores alone. Forward
     * writes it; its units come in the order of the data. Absent if no mixture is balanced so.
     */
    Tensor so_far;
    /* The losses (ops.def, router_balance), summed over mixtures and over the step. Backward writes them. Absent if no
     * loss balances. */
    Tensor losses;
} BalanceSums;

/* Rows on their way to their experts or back. */
typedef struct {
    Event *done;  /* the end of the call that is running */
    Event *known; /* the point where it is known how many rows go from whom to whom */
    /* In a pair (engine/pair.h): called before rows, or their numbers, are waited for, so that the other half goes on
     * meanwhile. Else NULL. */
    Err (*other_half)(void *pair);
    void *pair;
} RowMoves;

/* [seq, half of the columns that turn]; absent without rotary positions */
typedef struct {
    Tensor cos, sin;
} RopeTable;

typedef struct {
    RopeTable all, local; /* local: of blocks with a window, if they turn in another way */
} RopeTables;

/*
 * Sees the tensors of products of 8 bits as they are made (debug.dump). weight: the parameter's name; what: the
 * product, the operand and which of its tensors, such as "forward.x.codes". see = NULL: nobody looks.
 */
typedef struct {
    Err (*see)(void *user, const char *weight, const char *what, Tensor t);
    void *user;
} Onlooker;

/* The context that the layers of a stage share while they compute one unit. */
typedef struct {
    Stream *s;
    World *world;
    ParamStore *params;
    Slot *slot;
    int segment; /* the segment that save_new fills */
    /* Arenas in which save_new allocates: the slot's regions, scratch, or those that are offloaded. */
    Arena *into[REGION_COUNT];
    Offload *offload; /* NULL: all saves stay on the device */
    Arena *scratch;
    const Batch *batch;
    const StepValues *step; /* in device memory */
    RopeTables rope;
    Canon canon;
    ContextCut cut; /* positions of each rank of world->cp */
    int bands;      /* bands in which rows enter and leave tensor-parallel regions (bands.c); 0, 1: all at once */
    DType dtype;    /* dtype of activations, and of the weights that layers read */
    /* The residual stream and its gradient are fp32, whatever the other tensors are (ctx_residual). */
    bool fp32_residual;
    bool fp32_row_sums; /* sums of rows beside the stream are fp32, too (ctx_row_sums) */
    Mode mode;
    BlockAt block;
    Slices slices;
    BalanceSums balance;
    /* [blocks of the model, heads] i64: logit_order of each head's largest score in this step, as far as this rank has
     * seen it. Training forwards write it. Absent: nobody asks. */
    Tensor logit_max;
    RowMoves moves;
    Onlooker onlooker;
} Ctx;

/* Layers of the block at work keep less of what backward needs, and make it again. */
static inline bool ctx_recomputes(const Ctx *c, const ModelSpec *spec)
{
    return model_recompute(spec, c->block.layer) == RECOMPUTE_SELECTIVE;
}

/* The dtype of the residual stream and its gradient. */
static inline DType ctx_residual(const Ctx *c) { return c->fp32_residual ? F32 : c->dtype; }

/* The dtype of sums of rows beside the stream (LayerKind.sums_rows): never wider than the stream. */
static inline DType ctx_row_sums(const Ctx *c) { return c->fp32_row_sums ? ctx_residual(c) : c->dtype; }

int64_t ctx_rows(const Ctx *c); /* R: rows that this rank holds outside of tensor-parallel regions */
Tensor ctx_row_slice(const Ctx *c, Tensor per_row); /* this rank's R of the N entries */
Tensor ctx_doc_position(const Ctx *c);              /* [N] i32: the positions that learned and rotary positions go by */
Dropout ctx_dropout(const Ctx *c, float p, uint64_t key); /* off if this is not training */

/* Begins segment `index`, to which later saves belong. */
void segment_begin(Ctx *c, int index);
void segment_end(const Ctx *c); /* notes the sizes of the segment */
/* Allocates a tensor that is kept for backward. ERR_MEMORY. */
#define save_new(c, region, t, saved, dtype, ...) save_if(c, true, region, t, saved, dtype, __VA_ARGS__)
/* The same if `keep`; else the tensor is made again in backward, and lies in scratch. */
#define save_if(c, keep, region, t, saved, dtype, ...)       \
    save_alloc((c), (keep), (region), (t), (saved), (dtype), \
               (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ })
Err save_alloc(Ctx *c, bool keep, Region region, Tensor *t, Saved *saved, DType dtype, int ndim, const int64_t *dim);
Tensor save_get(const Ctx *c, Saved saved);
/* Allocates a gradient that a queued linear will read: in REGION_W if W runs later, else in scratch. */
Err dy_alloc(Ctx *c, Tensor *t, int64_t rows, int64_t cols);

/* These are the only ways to the memory of a parameter. Where a layer has none (id -1) the value is absent. */
Tensor param_value(const Ctx *c, int id);
Tensor param_grad(const Ctx *c, int id);
Tensor param_state(const Ctx *c, int id); /* a STATE parameter in fp32, as the last update left it */

/* ---- gradients of parameters: accumulators, written only here; the first contribution of a step overwrites ---- */

/* Adds `rows` to the table's gradient, at row first + index of each. */
Err grad_add_rows(Ctx *c, int table, Tensor rows, Tensor index, int64_t first);
/* Adds the column sums of dy to the bias's gradient, from its element `first` on. bias -1: does nothing. */
Err grad_add_columns(Ctx *c, int bias, Tensor dy, int64_t first);

/* Computes all weight gradients in the slot's queue and empties it. */
Err wgrad_drain(Ctx *c);

/* ---- rows in and out of tensor-parallel regions ---- */

/* full [N, D] = the rows of all ranks, of which x has this rank's R. In a group of one rank full is x itself;
 * otherwise it lies in scratch. */
Err gather_rows(Ctx *c, Tensor x, Tensor *full);
/* The same in two calls; work between them overlaps it. Only one gather may be under way, and one sum. */
Err gather_rows_begin(Ctx *c, Tensor x, Tensor *full);
Err gather_rows_end(Ctx *c);
/* y [R, D] = this rank's rows of the sum of partial [N, D] over tp, added as a tree. partial comes from
 * partial_alloc(). */
Err reduce_rows(Ctx *c, Tensor partial, Tensor y);
/* The same in two calls. What lies in scratch at begin must stay there until end. */
typedef struct {
    Tensor y, parts; /* parts: what the ranks have sent, if this rank adds it up itself (sums.c) */
    Tensor wide;     /* the sum in fp32, which end rounds to y; no data: y has it */
    Event *done;     /* all has been sent */
} PendingSum;
Err reduce_rows_begin(Ctx *c, Tensor partial, Tensor y, PendingSum *out);
Err reduce_rows_end(Ctx *c, PendingSum r);
/* x = the sum of x over the ranks of `group`, added as a tree. x has any float type, as the rows above. */
Err reduce_values(Ctx *c, Comm *group, Tensor x);
/* y = this rank's slice of the same sum. x has one slice for each rank of `group`. */
Err reduce_scatter_values(Ctx *c, Comm *group, Tensor x, Tensor y);
/* sum += x, of rows as outside tensor-parallel regions. */
Err add_rows(Ctx *c, Tensor sum, Tensor x);
/* y = x, to the nearest of y's dtype. */
Err cast_values(Ctx *c, Tensor y, Tensor x);
/* y = x [rows, columns]. Each may be some columns of a wider tensor. */
Err copy_rows(Ctx *c, Tensor y, Tensor x);
/* The tensor to compute the partial sum of y in: y itself if rows are not sharded, else [N, D] in scratch. */
Err partial_alloc(Ctx *c, Tensor y, Tensor *partial);
/* The same for a partial sum that is a product of this rank's operands. In exact runs the parts of several ranks are
 * fp32, so that only their sum is rounded. */
Err product_alloc(Ctx *c, Tensor y, Tensor *partial);

/* ---- sequences shared by the ranks of world->cp ---- */

/* The positions of a sample that a rank holds. The sample is cut into 2 * ranks equal parts. Rank r has the parts r
 * and 2 * ranks - 1 - r (ZIGZAG) or 2 * r and 2 * r + 1 (CONTIGUOUS); docs/context.md. */
Spans context_span(ContextCut cut, int64_t seq, int ranks, int rank);

/* The same for the slice at work, if sequences are cut into slices, else for the sample. */
Spans context_at_work(const Ctx *c, ContextCut cut, int ranks, int rank);

/* ---- linear ---- */

typedef enum { LINEAR_COLUMN, LINEAR_ROW, LINEAR_WHOLE } LinearKind;

typedef struct {
    int weight, bias; /* bias -1: none */
    int64_t in, out;  /* over all ranks */
    LinearKind kind;
    Fp8Recipe fp8;
} Linear;

typedef struct {
    const char *owner, *name; /* "layers.3.attn", "qkv": its weight is "layers.3.attn.qkv.weight" */
    int64_t in, out;
    LinearKind kind;
    bool bias;
    float std;
    int64_t section[PARAM_MAX_SECTIONS], interleave; /* sections and chunks of the output dim */
    QkRows qk;                                       /* outputs that make queries and keys */
    int block;                                       /* the block of the model, if there are such outputs */
    int64_t head_rows[PARAM_MAX_SECTIONS];           /* outputs of a head in each section; all 0: it has no heads */
    Fp8Recipe fp8;
} LinearSpec;

Err linear_register(Linear *l, ParamRegistry *reg, LinearSpec spec);
/* Room in `state` for what products of 8 bits keep of weights; *s is a store of `spec`'s layers. */
Err fp8_keep_weights(ParamStore *s, const Fp8Spec *spec, Arena *state);
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
void embedding_share(Embedding *e, const ParamRegistry *reg, const ModelSpec *spec, const char *owner, int table);
/* token [N] i32; below 0 there is none, and the row is zeros. y [R, D]. */
Err embedding_forward(const Embedding *e, Ctx *c, Tensor token, Tensor y);
Err embedding_backward(const Embedding *e, Ctx *c, Tensor token, Tensor dy); /* dy is overwritten */

/* ---- norm ---- */

typedef struct {
    int weight, bias;      /* bias -1: none */
    bool rms, single_rows; /* single_rows: its rows are heads, which tp cuts; each row is a leaf of the gradient */
    bool shared;           /* its rows are heads, and the ranks of world->kv have the same ones */
    float eps;
} Norm;

typedef struct {
    Saved mean, rstd;
} NormSave;

/* partial: PARTIAL_ROWS for a norm of the residual stream, PARTIAL_HEADS for one of heads, single or all together. */
Err norm_register(Norm *n, ParamRegistry *reg, const char *name, int64_t width, NormKind kind, float eps,
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
Err norm_backward(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy, Tensor dx);      /* dx += */
Err norm_backward_into(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy, Tensor dx); /* dx = */

/* norm_backward, and the gradient of the bias `sum` (-1: none), which is the column sums of dx. x must be a sum
 * that the bias was added to, directly or in an earlier sum without dropout between them. */
typedef struct {
    Tensor x, dy, dx;
} NormRows;
Err norm_backward_sum(const Norm *n, Ctx *c, const NormSave *save, NormRows r, int sum);

/*
 * An RMSNorm over columns that tp cuts: those of all its ranks, side by side in the order of ranks, are a row, and
 * `width` at registration is the length of these. A rank gives its columns x [N, columns] and gets as many of the
 * result. In between each has some rows whole (norm.c), so N must not be below the number of ranks.
 */
typedef struct {
    Saved rows; /* some whole rows of x */
    NormSave norm;
} CutNormSave;

typedef struct {
    Tensor rows, rstd;
} CutNorm;

/* Allocates the saves of N rows, of which this rank has `columns` columns. */
Err cut_norm_begin(Ctx *c, int64_t N, int64_t columns, CutNormSave *save, CutNorm *out);
/* The tensor to put x in, [N, columns]. It may be y, which will get the result. */
Tensor cut_norm_input(const Ctx *c, const CutNorm *t, Tensor y);
/* y, dense. */
Err cut_norm_forward(const Norm *n, Ctx *c, const CutNorm *t, Tensor y);
/* dx = the gradient of x, from dy. dx has dy's shape, and memory of its own. */
Err cut_norm_backward(const Norm *n, Ctx *c, const CutNormSave *save, Tensor dy, Tensor dx);

/* ---- kinds of layers ---- */

/*
 * What a mixer carries along the sequence, from the rows at work to later ones. Each is a struct of the kind's own,
 * which nobody else looks into.
 *
 *   cache    in generation: what calls leave to later calls, of one sample. Positions from 0 on begin it anew.
 *   kept     in slices: what the forward of a slice leaves, in its slot, to the slices behind it. Zeros when it begins;
 *            a forward that is made again finds what the first one left.
 *   grads    in slices: what the backward of a slice gives to those before it. They run from the last one to the first,
 *            and the slices of another micro-batch begin when these are done.
 */
typedef struct {
    unsigned ways;  /* in which ranks of cp can meet in it: 1 << ContextComm each */
    int slice_unit; /* of so many positions a slice, or a rank that hands a state on, has a whole number; 0: of 1 */
    int64_t cache_bytes, kept_bytes, grads_bytes;
    /* Neither is NULL: every model can generate and be sliced. A mixer that carries nothing takes nothing.
     * Allocates in `state` what a cache has on the device, for the model's sequence. dtype: the Ctx's. */
    Err (*cache)(const void *own, DType dtype, void *cache, Arena *state);
    /* The same of gradients, for c->slices.count slices of the shape of c->batch. c->block is the block. */
    Err (*grads)(const void *own, const Ctx *c, void *grads, Arena *state);
} Carry;

/*
 * A kind of layer. A mixer (attention.c, mla.c, delta.c, mamba2.c) lets the rows of a sequence see each other; a
 * feed-forward layer (mlp.c, moe.c) takes each row by itself. A block is a norm and a mixer, then a norm and a
 * feed-forward layer; or it is one of the two. A new kind is a file that ends with its LayerKind, and a row in
 * kinds.def.
 *
 * `own` is the kind's struct of parameter ids and of facts from the specification. `save` is its struct of what one
 * forward keeps for backward. Nobody else knows their members.
 */
typedef struct {
    const char *name; /* of such a layer in its block: "attn" as in "layers.3.attn", which checkpoints know it by */
    int64_t own_bytes, save_bytes;
    int linears; /* the most weight gradients that one call of backward queues */
    /* Sums its weights' gradients over the rows that this rank holds outside of tensor-parallel regions. */
    bool sums_own_rows;
    /* Each row of y is a sum of several rows, and each row of dx one of their gradients. So y, dx and dy may have the
     * dtype ctx_row_sums, too. */
    bool sums_rows;
    /* Registers the parameters. name: "layers.3.attn". layer: the block's number in the model. NULL: the block has no
     * such layer (none.c), and passes it. */
    Err (*add)(void *own, ParamRegistry *reg, const ModelSpec *spec, const char *name, int layer);
    /* x and y [R, D]; y must not be x. With a cache, c->block.cache, a mixer's rows also see those that came before,
     * and leave there what later ones need. */
    Err (*forward)(const void *own, Ctx *c, Tensor x, Tensor y, void *save);
    Err (*backward)(const void *own, Ctx *c, const void *save, Tensor x, Tensor dy, Tensor dx);
    /* The bias that it leaves to the residual sum, or -1; NULL: it never has one. */
    int (*residual_bias)(const void *own);
    /* FLOP of one token's forward in products with weights. */
    int64_t (*flop)(const ModelSpec *spec);
    /* FLOP of one token's forward in states of fixed size; NULL: it has none. */
    int64_t (*state_flop)(const ModelSpec *spec);
    /* Parameters that a token does not meet; NULL: it meets all. */
    int64_t (*idle_params)(const ModelSpec *spec);
    /* Mixers alone have these: FLOP of the scores of a query and a key, of all heads, and of the weighted value; heads
     * whose scores are noted; what goes along the sequence. */
    int64_t (*pair_flop)(const ModelSpec *spec);
    int (*score_heads)(const ModelSpec *spec);
    Carry carry;
} LayerKind;

/* The kinds of a block of the model. */
const LayerKind *model_mixer(const ModelSpec *spec, int layer);
const LayerKind *model_ffn(const ModelSpec *spec, int layer);
bool model_sums_own_rows(const ModelSpec *spec); /* some block does */
/* Heads of a block whose largest scores are noted (Ctx.logit_max). */
int model_score_heads(const ModelSpec *spec, int block);
/* ERR_CONFIG: ranks of cp cannot meet in some block as its ContextComm says; in a block of that kind. */
Err model_check_ways(const ModelSpec *spec);
Err kind_check_way(const LayerKind *kind, int block, ContextComm way);
/* ERR_CONFIG: some block cannot have sequences in so many slices, over so many ranks of cp. */
Err model_check_slices(const ModelSpec *spec, int64_t slices, int64_t cp);
/* ERR_CONFIG: heads with states are too wide to be trained in the workspace of that device. */
Err model_check_room(const ModelSpec *spec, DeviceKind device);

/* ---- rows of a mixture of experts (docs/moe.md) ---- */

/* Facts that decide how many rows of a micro-batch there can be: the mixture, and how the ranks share it. */
typedef struct {
    int experts, topk;
    int64_t balance_unit; /* samples */
    int64_t rows;         /* tokens that this rank holds */
    int64_t seq;          /* tokens of a sample on a rank of cp */
    int64_t leaf;         /* tokens in a leaf of the weights' gradients, which no piece cuts */
    int sp, cp, ep, etp;
    /* Hosts over which the ranks of ep are spread. 1: there is one, or rows cross the network as in any other call. */
    int hosts;
    int group_topk, groups; /* the router's */
    Capacity capacity;
} MoeCut;

typedef struct {
    int64_t capacity; /* rows of a balance unit that an expert takes */
    int64_t sent;     /* permuted rows of this rank's tokens */
    int64_t worst;    /* the most rows that this rank's experts can get */
    int64_t owned;    /* the rows that this rank's experts have memory for */
    /* Tokens of each rank that fit at once, wherever their rows go. 0: not even those of a leaf do. */
    int64_t piece;
    /* Where rows go from host to host (moe_node.c), else 0: */
    int64_t crossing;      /* most rows of this rank's tokens that are sent, one for each host of a token */
    int64_t even_crossing; /* the same if all experts get as many */
    int64_t arriving;      /* the rows of tokens that come to this rank from its rail at most */
    int64_t passed;        /* rows for experts of its host that it has memory to pass on */
    int64_t most_passed;   /* most of these rows that can come */
} MoeLimits;

MoeLimits moe_limits(const MoeCut *cut);
/* Hosts that a token goes to on the average, if all choices that the router may make are equally likely. */
double moe_even_hosts(const MoeCut *cut);

/* ---- head and loss: vocabulary-parallel logits and cross entropy ---- */

typedef struct {
    const ModelSpec *spec;
    int weight; /* the embedding's table if they are tied */
    int bias;   /* -1: none */
} Head;

/* Targets of the rows of a head, and the sums to which the loss is added. */
typedef struct {
    Tensor target; /* [N] i32, as Batch.target; must stay until backward has run */
    Tensor sums;   /* [3] i64, which are added to (ops.def, loss_sum) */
    float weight;  /* weight of this loss in the total that is differentiated */
    Tensor scores; /* as Batch.scores; absent in training */
} HeadLoss;

typedef struct {
    Saved logits, row_max, row_sum;
    bool at_once;  /* forward has already replaced the logits by their gradient */
    Tensor target; /* the HeadLoss's, and so is weight */
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
