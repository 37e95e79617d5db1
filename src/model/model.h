/*
 * Models: a stage is [embedding] + blocks + [final norm and head], registered from one ModelSpec.
 * Behind the head may be modules that predict tokens further on (mtp.c), with the head's loss for each.
 *
 * A stage takes and gives a short list of boundary tensors (the residual stream between stages) and sees the
 * whole batch, so that stages can be cut anywhere between blocks. Block l of the model is always
 * "layers.l", whatever stage holds it. One stage alone is a whole model.
 *
 *   block            mid = x + drop(attn(norm1(x)) + b)     y = mid + drop(mlp(norm2(mid)) + b)
 *   norms of both    mid = x + drop(post_norm1(attn(norm1(x)))) ...
 *   post-norm        mid = x + drop(post_norm1(attn(x)))    y = mid + drop(post_norm2(mlp(mid)))
 *   parallel         mid = x + drop(attn(norm1(x)) + b)     y = mid + drop(mlp(norm1(x)) + b), or mlp(norm2(x))
 *   one layer        y = x + drop(attn(norm1(x)) + b)       or y = x + drop(mlp(norm2(x)) + b)
 *
 * In a mixture of experts some blocks, or all, have a router and experts in the place of the mlp.
 *
 * Recomputation: selective computes norm outputs, the activation's output and permuted rows again in backward; full
 * keeps only a block's input. Each block of a stage may have a kind of its own (ModelSpec.recompute).
 *
 * Offloading: what the first blocks of a stage keep, their inputs too, waits in the host's memory (ModelSpec.offload,
 * layer/offload.h). Their backwards come last, so copies have the longest time.
 */
#ifndef MEGATRAIN_MODEL_MODEL_H
#define MEGATRAIN_MODEL_MODEL_H

#include "layer/layer.h"

/* One of the two branches of a block: a layer whose output is added to the residual stream, and its norms
 * (model_block_norms). */
typedef struct {
    Norm norm, post_norm; /* before the layer; of its output */
    const LayerKind *kind;
    void *own; /* the layer, of this kind */
    uint64_t dropout_key;
} Branch;

typedef struct {
    Saved n; /* the output of the norm before; not kept with selective recomputation */
    NormSave norm;
    Saved out; /* with post_norm: the layer's output */
    NormSave post_norm;
    void *own; /* the kind's save */
} BranchSave;

typedef struct {
    const ModelSpec *spec;
    Branch mixer, ffn;
    BlockNorms norms;
    bool shares_norm; /* the feed-forward layer reads the mixer's norm */
    ContextComm context;
    int index; /* among the stage's blocks, those of MTP behind the others */
} Block;

typedef struct {
    Saved mid;   /* the stream between the branches, where there are two and they do not stand in parallel */
    int segment; /* that all of it lies in */
    BranchSave mixer, ffn;
} BlockSave;

/* A module of multi-token prediction: depth 1 predicts the token behind the one that the head does. */
typedef struct {
    int depth;
    int segment; /* the first of its MTP_SEGMENTS in a slot */
    Embedding embedding;
    Norm embedding_norm, hidden_norm, final_norm;
    Linear proj; /* [D, 2 D] */
    Block block;
} Mtp;

typedef struct {
    Saved embedding, joined, x, y, out; /* [R, D], [R, 2 D], and the block's input, output, and that normalised */
    NormSave embedding_norm, hidden_norm, final_norm;
    BlockSave block;
    HeadSave head;
} MtpSave;

enum { MTP_SEGMENTS = 3 };

/* Part of the model that a stage has: blocks [first_layer, first_layer + layer_count), and what else. */
typedef struct {
    int first_layer, layer_count;
    bool embedding, head;
    int mtp; /* modules of multi-token prediction: all, or none; with the head, or in the stage before it */
} StageShare;

typedef struct {
    const ModelSpec *spec; /* the caller's, to which its layers keep pointers, too */
    StageShare share;
    Embedding embedding;
    Block *blocks;
    Norm final_norm;
    Head head;
    Mtp *mtp;
} Stage;

/* Saves of one micro-batch in a stage. x[i]: input of block i; x[layer_count], with the head: of the final norm. */
typedef struct {
    Saved *x;
    BlockSave *blocks;
    Saved final_out;
    NormSave final_norm;
    HeadSave head;
    MtpSave *mtp;
} StageSave;

/* The residual stream, of ctx_residual; before a head that stands alone behind the modules, what it reads of each depth
 * (mtp.c), of the Ctx's dtype. */
enum { BOUNDARY_MAX = 1 + MTP_MOST };
typedef struct {
    int count;
    Tensor t[BOUNDARY_MAX]; /* [R, D] each */
} Boundary;

int stage_inputs(const ModelSpec *spec, StageShare share); /* boundary tensors before such a stage */

/* The whole model as one stage. */
StageShare stage_whole(const ModelSpec *spec);

/*
 * Shares of `stages` stages, [stages]. layout: of each stage the embedding 'E', blocks 't', modules of multi-token
 * prediction 'm' and the head 'L', stages apart by '|', with repetition "x*n" and "(...)*n" as in "Et|(tt|)*2,tmL"
 * (Megatron-LM's; commas mean nothing). Empty: as even as can be, stages in the middle taking what is left over.
 * ERR_CONFIG saying what is wrong with it.
 */
Err stage_shares(const ModelSpec *spec, const char *layout, int stages, StageShare *out);
/* How many stages a layout has; 0 for an empty one. ERR_CONFIG for one that is not well formed. */
Err stage_layout_count(const char *layout, int *stages);

/*
 * Registers stages, ascending, whose parameters share one registry. A table that a tied head or modules of multi-token
 * prediction read, too, is registered with the embedding, and once more with those in another registry: that one is
 * PARAM_COPY, both are PARTIAL_STAGES.
 */
Err stages_register(Stage *st, const StageShare *shares, int count, ParamRegistry *reg, const ModelSpec *spec,
                    SetupArena *setup);
Err stage_save_init(const Stage *st, StageSave *save, SetupArena *setup);
int stage_further(const Stage *st);  /* depths of further tokens that its modules read, or its head's losses are of */
int stage_segments(const Stage *st); /* segments a Slot of this stage needs */
int stage_linears(const Stage *st);  /* weight gradients a micro-batch can queue */

/*
 * in: the residual stream before the first block, or what a head alone reads; empty with the embedding. It may change
 * when the call has returned. out: where the stream after the last block goes, or what a head alone reads; empty with
 * the head, and then sums [3 (1 + modules of multi-token prediction)] accumulates the losses, those of the modules in
 * training alone. The saves go to c->slot.
 */
Err stage_forward(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, const Boundary *out, Tensor sums);
/* dout: the gradient of out. din: where that of in goes, may be dout itself. Empty as out and in are. */
Err stage_backward(const Stage *st, Ctx *c, StageSave *save, const Boundary *dout, const Boundary *din);

/*
 * For sequences in slices, what mixers carry along them (Carry): what a slot keeps, to be cleared when a unit takes it;
 * and in `state` the gradients of one micro-batch. Each is an array of the stage's blocks, and those of MTP. c: with
 * slices.count, and a batch of the stage.
 */
Err stage_kept_init(const Stage *st, void ***kept, SetupArena *setup);
void stage_kept_clear(const Stage *st, void *const *kept);
Err stage_grads_init(const Stage *st, const Ctx *c, void ***grads, Arena *state, SetupArena *setup);

/* Caches of one sample in generation, in `state`: one for each block, of its mixer's kind. */
Err stage_caches_init(const Stage *st, void ***caches, DType dtype, Arena *state, SetupArena *setup);

/*
 * Logits [1, padded_vocab] of the batch's last row. The batch holds one sample's positions past .. past + T - 1;
 * the caches hold those before, from earlier calls, and then these too. Forward only, one rank.
 */
Err stage_logits(const Stage *st, Ctx *c, StageSave *save, void *const *caches, Tensor logits);

/* Share that scaling leaves of the angle by which a pair of that many turning columns turns: 1 / factor to 1. */
double model_rope_share(const RopeSpec *r, int columns, int64_t pair);

/* Cosines and sines [seq, columns / 2] in `state`, when a block rotates. */
Err model_rope_tables(const ModelSpec *spec, Stream *s, Arena *state, SetupArena *setup, RopeTables *out);

/* How many of so many parameters a token meets: all but the experts that it is not sent to. */
int64_t model_active_params(const ModelSpec *spec, int64_t params_unpadded);
/* FLOP of scores and weighted values, forward and backward: 12 L C T, C the columns of all heads (where keys and values
 * differ in width, the mean of both), T the sequence's keys, or those of a block's window where these are fewer. */
int64_t model_attention_flop_per_token(const ModelSpec *spec);
/* Some block has a state, whose FLOP these count, too. */
bool model_has_states(const ModelSpec *spec);
/* The same of the keys alone that queries see, on the mean: what the ops of a step count. */
int64_t model_causal_flop_per_token(const ModelSpec *spec);
/* 6 N and that: N the active parameters but tables that rows are only looked up in, which cost no FLOP. */
int64_t model_flop_per_token(const ModelSpec *spec, int64_t params_unpadded);
/* FLOP of one stage's forward, without recomputation: of the products alone, and never 0. */
int64_t stage_flop_per_token(const ModelSpec *spec, StageShare share);
/* The part of these FLOP that full recomputation does again. */
int64_t stage_again_flop_per_token(const ModelSpec *spec, StageShare share);

/* block.c */
/* A norm of the residual stream: "OWNER.WHICH". */
Err model_norm_register(Norm *n, ParamRegistry *reg, const ModelSpec *spec, const char *owner, const char *which);
/* name: "layers.3"; layer: its number in the model. */
Err block_register(Block *b, ParamRegistry *reg, const ModelSpec *spec, const char *name, int layer, SetupArena *setup);
Err block_save_init(const Block *b, BlockSave *save, SetupArena *setup);
/* The context of the stage, with the block at work. */
Ctx block_ctx(const Block *b, const Ctx *stage);
/* Room for the residual stream before a branch of a block with such norms, which backward reads. */
Err stream_new(Ctx *c, const ModelSpec *spec, BlockNorms norms, Tensor *x, Saved *saved);
int block_linears(const Block *b); /* weight gradients that it can queue */
/*
 * The residual stream on its way through the blocks of a stage. Its last sum is still to be made where it has a branch:
 * by the norm that reads it, in one pass, or by residual_add.
 */
typedef struct {
    ResidualSum sum;
    /* [R, D] scratch: a branch's output until its sum is made, with room for the widest dtype. */
    Tensor branch;
    /* [R, D] scratch, where layers stand in parallel: the stream between them, until the sum behind the second is made.
     * Backward does not read it. */
    Tensor mid;
} ResidualStream;
/* Begins it with x, which is made. */
Err residual_stream(Ctx *c, const ModelSpec *spec, Tensor x, ResidualStream *out);

/* y: where the sum goes that is the block's output. */
Err block_forward(const Block *b, Ctx *c, ResidualStream *x, BlockSave *save, Tensor y);
/*
 * The gradient of the last bias of a branch is the column sum of the gradient of the residual stream behind the branch.
 * The norm that reads the stream next writes that gradient, so it sums the columns in the same pass. This is what a
 * branch, or a block, is told about it.
 */
typedef struct {
    /* Bias of the branch before, for which it sums the columns of its input's gradient; -1: none. */
    int bias;
    bool done; /* the branch behind has summed those for its own bias */
} InputSum;

/* d in: dy, out: dx. */
Err block_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor d, InputSum sums);
/* The last bias, if a block behind this one can sum its gradient (InputSum); else -1. */
int block_bias_of_output(const Block *b, const Ctx *c);

/*
 * The same in a stage: forward as what is left of the segment that was begun, which it ends; with what the model's
 * recomputation says kept or made again. Behind it block_output says where the sum goes that is the block's output;
 * till then what lies in scratch must stay there.
 */
Err block_run(const Block *b, const Ctx *stage, ResidualStream *x, BlockSave *save);
Err block_output(const Block *b, Ctx *c, ResidualStream *x, Tensor y);
Err block_run_backward(const Block *b, const Ctx *stage, BlockSave *save, Tensor x, Tensor d, InputSum sums);

/* mtp.c. With depth and segment set; table: the embedding's, in reg. */
Err mtp_register(Mtp *m, ParamRegistry *reg, const ModelSpec *spec, int table, SetupArena *setup);
/* h: what the head read one depth before, [R, D]; the module's own is left in save->out. Its last segment stays open
 * for the head's saves. */
Err mtp_forward(const Mtp *m, Ctx *c, Tensor h, MtpSave *save);
/* dout: the gradient of save->out; dh += that of h. */
Err mtp_backward(const Mtp *m, Ctx *c, MtpSave *save, Tensor h, Tensor dout, Tensor dh);

#endif
