/*
 * Models: a stage is [embedding] + blocks + [final norm and head], registered from one ModelSpec.
 *
 * A stage takes and gives a short list of boundary tensors (the residual stream between stages) and sees the
 * whole batch, so that stages can be cut anywhere between blocks. Block l of the model is always
 * "layers.l", whatever stage holds it.
 *
 *   pre-norm block   mid = x + drop(attn(norm1(x)) + b)     y = mid + drop(mlp(norm2(mid)) + b)
 *
 * Recomputation: selective computes norm outputs and the activation's output again in backward; full keeps
 * only each block's input.
 */
#ifndef MEGATRAIN_MODEL_MODEL_H
#define MEGATRAIN_MODEL_MODEL_H

#include "layer/layer.h"

typedef enum { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL } Recompute;

/* Everything a model is, in numbers; filled from the configuration by train/. */
typedef struct {
    int layers, heads, kv_heads, head_dim;
    int64_t hidden, ffn, seq, vocab, padded_vocab, window;
    bool learned_positions, rope, rms, bias, tied, qk_norm;
    Activation activation;
    float norm_eps, dropout, attention_dropout, init_std, rope_base;
    uint64_t seed;
    Recompute recompute;
    int tp_blocks;
} ModelSpec;

typedef struct {
    Norm norm1, norm2;
    Attention attn;
    Mlp mlp;
    float dropout;
    uint64_t attn_dropout_key, mlp_dropout_key;
    bool keep_norms; /* false under selective recomputation */
} Block;

typedef struct {
    NormSave norm1, norm2;
    Saved n1, n2, mid;
    AttentionSave attn;
    MlpSave mlp;
} BlockSave;

typedef struct {
    ModelSpec spec;
    int first_layer, layer_count;
    bool has_embedding, has_head;
    Embedding embedding;
    Block *blocks;
    Norm final_norm;
    Head head;
} Stage;

/* What a stage keeps of one micro-batch. x[i]: input of block i; x[layer_count]: input of the final norm. */
typedef struct {
    Saved *x;
    BlockSave *blocks;
    Saved final_out;
    NormSave final_norm;
    HeadSave head;
} StageSave;

enum { BOUNDARY_MAX = 4 };
typedef struct {
    int count;
    Tensor t[BOUNDARY_MAX]; /* [R, D] each */
} Boundary;

/* Blocks [first_layer, first_layer + layer_count); embedding with the first, head with the last. */
Err stage_register(Stage *st, ParamRegistry *reg, const ModelSpec *spec, int first_layer, int layer_count,
                   SetupArena *setup);
Err stage_save_init(const Stage *st, StageSave *save, SetupArena *setup);
int stage_segments(const Stage *st); /* segments a Slot of this stage needs */
int stage_linears(const Stage *st);  /* weight gradients a micro-batch can queue */

/*
 * in: empty with the embedding. out: the residual stream after the last block (empty with the head; then
 * sums accumulates the loss). The saves go to c->slot.
 */
Err stage_forward(const Stage *st, Ctx *c, StageSave *save, const Boundary *in, Boundary *out, Tensor sums);
/* dout as out, used up. din: the gradient of in, in scratch: valid until the caller releases scratch. */
Err stage_backward(const Stage *st, Ctx *c, StageSave *save, const Boundary *dout, Boundary *din);

/* Room for the keys and values of one sample in `state`: a KvCache for each block. */
Err stage_kv_init(const Stage *st, KvCache **kv, DType dtype, Arena *state, SetupArena *setup);

/*
 * Logits [1, padded_vocab] of the batch's last row. The batch holds one sample's positions past .. past + T - 1;
 * kv holds those before, from earlier calls, and then these too. Forward only, one rank.
 */
Err stage_logits(const Stage *st, Ctx *c, StageSave *save, const KvCache *kv, Tensor logits);

/* Sine and cosine tables [seq, head_dim / 2] in `state`, when the model rotates. */
Err model_rope_tables(const ModelSpec *spec, Stream *s, Arena *state, SetupArena *setup, Tensor *cos,
                      Tensor *sin);

int64_t model_flop_per_token(const ModelSpec *spec, int64_t params_unpadded); /* 6 N + 12 L C T */

/* block.c */
Err block_register(Block *b, ParamRegistry *reg, const ModelSpec *spec, int layer);
/* y: where the block's output goes; allocated by the caller after the saves through `alloc_y`. */
Err block_forward(const Block *b, Ctx *c, Tensor x, BlockSave *save, Tensor y);
Err block_backward(const Block *b, Ctx *c, const BlockSave *save, Tensor x, Tensor d); /* d in: dy, out: dx */

#endif
