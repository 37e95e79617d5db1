/*
 * Everything a model is, in numbers, filled from the configuration by train/. Layers register from it, keep a pointer
 * to it and derive the rest.
 */
#ifndef MEGATRAIN_LAYER_SPEC_H
#define MEGATRAIN_LAYER_SPEC_H

#include "base/activation.h"
#include "base/choices.h"
#include "base/dispatcher.h"
#include "base/err.h"
#include "base/fp8_recipe.h"
#include "base/layer_set.h"
#include "device/step.h"

/* Kinds of layers, for ModelSpec. */
typedef enum {
#define MIXER(number, kind) number,
#include "layer/kinds.def"
} MixerKind;

typedef enum {
#define FFN(number, kind) number,
#include "layer/kinds.def"
} FfnKind;

/* How a router is made to use all experts (docs/moe.md). */
typedef struct {
    int64_t unit;  /* samples over which rows are counted for the auxiliary loss and for capacities */
    float aux, z;  /* weights of the auxiliary loss and of the z-loss; 0: none */
    bool global;   /* the auxiliary loss counts all units of the step's batch so far, in data order */
    bool sinkhorn; /* choices are made by what Sinkhorn's method makes of a unit's logits */
    bool forced;   /* experts take turns, whatever the router says: for benchmarks */
    /* > 0: choices are made with a bias for each expert, which changes by so much after a step */
    float bias_rate;
} Balance;

/* How many rows of a balance unit an expert takes, and which: the others' choices of it are dropped. */
typedef struct {
    double factor;    /* multiple of the mean over all experts; 0: all rows */
    bool by_position; /* the first rows, else those with the largest weights */
    /* Room of a rank's experts, as a multiple of an even share; 0: for all rows that can come. */
    double slack;
    bool drop; /* rows beyond it; else the step is not to be used (StepValues.over_limit): */
    bool redo; /* it is done again in pieces (Mode.retry_in_pieces) */
} Capacity;

/* Mixtures of experts (moe.c); experts 0: a dense model. */
typedef struct {
    int experts, topk;
    int parts; /* parts of the dense layer as which they begin; 0: they begin at random */
    int64_t ffn, shared_ffn;
    int64_t latent; /* width of the rows that experts read and write; 0: hidden */
    bool shared_gate;
    DispatcherKind dispatcher;
    Router router;
    Balance balance;
    Capacity capacity;
    float jitter;
    LayerSet layers; /* the blocks that are mixtures */
} MixtureSpec;

/* Rotary positions; rope.c has the formulas. */
typedef struct {
    LayerPattern layers;    /* 1: the block has them */
    float base, local_base; /* local_base: of blocks with a window, unscaled; 0: the same */
    int columns;            /* columns of a head that turn; 0: all */
    RopeScaling scaling;
    double factor;     /* all but PLAIN */
    double original;   /* LLAMA3, YARN: positions first trained on, */
    double slow, fast; /* and how often a pair turns in them */
    double magnitude;  /* YARN */
    bool truncate;
} RopeSpec;

typedef struct {
    int64_t q_rank, kv_rank; /* widths of the latents; q_rank 0: queries are made of the row itself */
    /* of a head: columns of queries and keys without positions, with them; of values */
    int64_t nope, rope, value;
} MlaWidths;

/* Multi-head latent attention (mla.c). */
typedef struct {
    MlaWidths width;
    float scale;    /* factor of scores, besides 1 / sqrt(head_dim) */
    float norm_eps; /* of the norms of latents; 0: of the model's others */
    bool absorb;    /* generation meets the latents themselves, where the device has heads that wide */
} LatentSpec;

/* Gated DeltaNet (delta.c); key_heads 0: no block has it. */
typedef struct {
    int key_heads, value_heads; /* value_heads / key_heads of values read one of keys */
    int64_t key, value;         /* widths of heads: of queries and keys, of values */
    int conv;                   /* rows that the short convolution sees */
    bool negative;              /* write strengths are up to 2 instead of 1 */
    float norm_eps;             /* of the norm of what heads give; 0: the model's */
} DeltaSpec;

/* Kimi Delta Attention (kda.c); heads 0: no block has it. */
typedef struct {
    int heads;
    int64_t head; /* width of a head, and of the latents */
    int conv;     /* rows that the short convolution sees */
    float bound;  /* below 0: the logarithm of a decay is above it; 0: none */
} KdaSpec;

/* Mamba-2 (mamba2.c); heads 0: no block has it. */
typedef struct {
    int heads, groups;   /* heads / groups of heads read the keys and queries of a group */
    int64_t head, state; /* widths: of a head; of keys and queries */
    int conv;            /* rows that the short convolution sees */
    bool conv_bias;
    float least; /* of a head's steps */
} MambaSpec;

typedef struct {
    float scale, softcap; /* 0: none */
    bool bias;            /* added to them before both */
} LogitsSpec;

enum { MTP_MOST = 8 };

/* Multi-token prediction (mtp.c): modules behind the last block, each for a token further on. */
typedef struct {
    int count;    /* 0: none */
    float weight; /* weight of all their losses together, each counting the same */
} MtpSpec;

/*
 * Maximal update parametrization (docs/mup.md): a model as wide as another, of which it keeps the learning rate. All 0:
 * the usual parametrization, which is also what comes out where width is 1 and head_dim the model's.
 */
typedef struct {
    float width;  /* hidden / that of the base model */
    int head_dim; /* the base model's */
} MupSpec;

typedef struct {
    bool keeps_weights; /* codes of weights, from one update to the next */
    Fp8Recipe recipe;   /* recipe of these blocks' linear layers: */
    LayerSet blocks;
    bool experts; /* their products too; the recipe then has blocks */
} Fp8Spec;

/* ERR_CONFIG: the GPU (capability: 90 is 9.0) has no products of the recipe (device/fp8_gpus.h). */
Err fp8_spec_on_gpu(const Fp8Spec *s, int capability, const char *gpu);

/* 8 bits in all blocks but `keep` at each end. */
static inline Fp8Spec fp8_between(Fp8Recipe recipe, int layers, int keep)
{
    Fp8Spec out = { .recipe = recipe };
    for (int i = keep; i < layers - keep; i++) out.blocks.word[i / 64] |= (uint64_t)1 << i % 64;
    return out;
}

typedef struct {
    /* With latent attention kv_heads = heads and head_dim = nope + rope. */
    int layers, heads, kv_heads, head_dim;
    int64_t hidden, ffn, seq, vocab, padded_vocab;
    LayerPattern mixer;   /* MixerKind of each block */
    LayerSet without_ffn; /* blocks that have a mixer alone */
    LayerPattern window;  /* window of each block; 0: all positions */
    LayerPattern context; /* ContextComm of each block */
    RopeSpec rope;
    LatentSpec latent;
    DeltaSpec delta;
    KdaSpec kda;
    MambaSpec mamba;
    bool learned_positions, rms, bias, tied, sinks, attention_gate;
    bool bare_norms; /* LayerNorms have no biases */
    BlockNorms block_norms;
    bool state_pre_norms; /* blocks with a state have norms before their layers alone */
    QkNorm qk_norm;
    AttentionBias attention_bias;
    Activation activation;
    float activation_limit; /* limit of the clamped activation */
    float norm_eps, dropout, attention_dropout, attention_softcap, init_std;
    float attention_scale;             /* 0: 1 / sqrt(head_dim); with mup, of the base model */
    float embed_scale, residual_scale; /* 0: none */
    LogitsSpec logits;
    uint64_t seed;
    LayerPattern recompute; /* Recompute of each block of a stage; the last one is that of those behind */
    int offload;            /* blocks of a stage, the first ones, whose saves wait in the host's memory */
    int tp_blocks;
    MixtureSpec moe;
    MtpSpec mtp;
    MupSpec mup;
    Fp8Spec fp8;
} ModelSpec;

/* Recomputation of the block with that number among those of its stage. */
static inline Recompute model_recompute(const ModelSpec *spec, int at)
{
    return (Recompute)layer_pattern_on(&spec->recompute, at);
}

typedef enum { NORM_LAYER, NORM_RMS, NORM_BARE } NormKind; /* BARE: a LayerNorm without a bias */

static inline NormKind model_norm_kind(const ModelSpec *spec)
{
    return spec->rms ? NORM_RMS : spec->bare_norms ? NORM_BARE : NORM_LAYER;
}

static inline bool norms_before(BlockNorms norms) { return norms != BLOCK_NORMS_POST; }
static inline bool norms_behind(BlockNorms norms) { return norms == BLOCK_NORMS_POST || norms == BLOCK_NORMS_BOTH; }

/* Do both layers of a block read its input? */
static inline bool model_parallel(const ModelSpec *spec) { return spec->block_norms >= BLOCK_NORMS_PARALLEL; }

/* Have queries, keys and values (or what latent attention makes them of) biases? Has the projection behind heads? */
static inline bool model_qkv_bias(const ModelSpec *spec)
{
    return spec->attention_bias ? spec->attention_bias != ATTENTION_BIAS_NONE : spec->bias;
}

static inline bool model_proj_bias(const ModelSpec *spec)
{
    return spec->attention_bias ? spec->attention_bias == ATTENTION_BIAS_ALL : spec->bias;
}

/* How many times as wide as the base model it is; 1 without mup. */
static inline float model_width(const ModelSpec *spec) { return spec->mup.width > 0 ? spec->mup.width : 1; }

/* Factor of what a branch adds to the residual stream. */
static inline float model_residual_scale(const ModelSpec *spec)
{
    return spec->residual_scale > 0 ? spec->residual_scale : 1;
}

/* Factor of logits: their scale, divided by the width of muP. */
static inline float model_logits_scale(const ModelSpec *spec)
{
    return (spec->logits.scale > 0 ? spec->logits.scale : 1) / model_width(spec);
}

/* Deviation of the matrices of blocks, whose inputs are as many as the model is wide: init_std / sqrt(width). */
float model_hidden_std(const ModelSpec *spec);
/* And of those whose products are added to the residual stream: smaller, by 1 / sqrt(what is added in all). */
float model_projection_std(const ModelSpec *spec);

/* Factor of products of queries and keys: attention_scale, or times / sqrt(head_dim); with mup both of the base model,
 * and times its head_dim / head_dim. */
float model_attention_scale(const ModelSpec *spec, float times);

/* How many layers add to the residual stream: two in most blocks, one in those of one layer. */
int model_branches(const ModelSpec *spec);

/* Key of the random numbers of "OWNER.SITE": "layers.3.attn", "attention_dropout". */
uint64_t model_key(const ModelSpec *spec, const char *owner, const char *site);

/* Blocks of the model. Those of multi-token prediction come behind the others, and are like the last of these. */
static inline int model_blocks(const ModelSpec *spec) { return spec->layers + spec->mtp.count; }
static inline int model_like(const ModelSpec *spec, int block)
{
    return block < spec->layers ? block : spec->layers - 1;
}

/* The norms of a block. */
static inline BlockNorms model_block_norms(const ModelSpec *spec, int block)
{
    const int64_t mixer = layer_pattern_at(&spec->mixer, model_like(spec, block));
    const bool state = mixer == MIXER_DELTA || mixer == MIXER_MAMBA2 || mixer == MIXER_KDA;
    return spec->state_pre_norms && state ? BLOCK_NORMS_PRE : spec->block_norms;
}

/* The recipe of a block's linear layers. */
static inline Fp8Recipe model_fp8(const ModelSpec *spec, int block)
{
    return block < spec->layers && layer_set_has(&spec->fp8.blocks, block) ? spec->fp8.recipe : FP8_NONE;
}

static inline bool model_has_ffn(const ModelSpec *spec, int block)
{
    return !layer_set_has(&spec->without_ffn, model_like(spec, block));
}

static inline bool model_is_mixture(const ModelSpec *spec, int block)
{
    return spec->moe.experts && layer_set_has(&spec->moe.layers, model_like(spec, block));
}

#endif
