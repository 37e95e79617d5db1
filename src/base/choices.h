/*
 * The choices that a user names and a layer, an optimizer or a device acts on, each declared once: a row has the
 * enumerator and the word in configurations. From a row come the enum, the key's words and type (ONE_OF in
 * config/config.def) and every table of names. Dispatchers, activations and recipes of fp8 have headers of their own.
 *
 *   ROW(NAME, "in configurations", facts ...)
 */
#ifndef MEGATRAIN_BASE_CHOICES_H
#define MEGATRAIN_BASE_CHOICES_H

#include <stdbool.h>

/* ROWs that a list is given: a row becomes an enumerator, or an entry of a table of words. */
#define CHOICE_NAME(name, ...) name,
#define CHOICE_TEXT(name, text, ...) [name] = text,

/* How a router scores an expert by its logit l (device/step.h); positive: scores are 0 and up, so that biases can be
 * added to them. A score of one logit alone has a case in cpu/router.c and cuda/router.cu. */
#define ROUTER_SCORES(ROW)                        \
    ROW(ROUTER_SOFTMAX, "softmax", false)         \
    ROW(ROUTER_SOFTMAX_PRE, "softmax_pre", false) \
    ROW(ROUTER_SIGMOID, "sigmoid", true)          \
    ROW(ROUTER_SQRT_SOFTPLUS, "sqrt_softplus", true)
typedef enum { ROUTER_SCORES(CHOICE_NAME) } RouterScore;

static inline bool router_score_positive(RouterScore score)
{
#define POSITIVE(name, text, positive) positive,
    static const bool all[] = { ROUTER_SCORES(POSITIVE) };
#undef POSITIVE
    return all[score];
}

/* Optimizers (optim/optimizer.h says what each updates). */
#define OPTIMIZER_LIST(ROW)       \
    ROW(OPTIMIZER_ADAMW, "adamw") \
    ROW(OPTIMIZER_MUON, "muon")   \
    ROW(OPTIMIZER_LION, "lion")   \
    ROW(OPTIMIZER_SGD, "sgd")
typedef enum { OPTIMIZER_LIST(CHOICE_NAME) OPTIMIZERS } OptimizerKind;

/* Coefficients of Muon's iteration. */
#define MUON_SET_LIST(ROW)                   \
    ROW(MUON_SIMPLE, "simple")               \
    ROW(MUON_QUINTIC, "quintic")             \
    ROW(MUON_POLAR_EXPRESS, "polar_express") \
    ROW(MUON_DEEPSEEKV4, "deepseekv4")
typedef enum { MUON_SET_LIST(CHOICE_NAME) MUON_SETS } MuonSet;

/* Factors on the orthogonal matrix [r, c]: 0.2 sqrt(max(r, c)), which makes an update as large as AdamW's, so that its
 * learning rates do; sqrt(max(r, c)); sqrt(max(1, r / c)); sqrt(r / c). */
#define MUON_SCALES(ROW)                         \
    ROW(MUON_MATCH_RMS_ADAMW, "match_rms_adamw") \
    ROW(MUON_SPECTRAL, "spectral")               \
    ROW(MUON_SHAPE, "shape")                     \
    ROW(MUON_UNIT_RMS_NORM, "unit_rms_norm")
typedef enum { MUON_SCALES(CHOICE_NAME) } MuonScale;

/* Parts of an attention layer's weight that count as one matrix. */
#define MUON_SPLITS(ROW)         \
    ROW(MUON_SPLIT_QKV, "qkv")   \
    ROW(MUON_SPLIT_HEAD, "head") \
    ROW(MUON_SPLIT_NONE, "none")
typedef enum { MUON_SPLITS(CHOICE_NAME) } MuonSplit;

/* Learning rates after the warm-up (optim/optim.h). */
#define LR_SHAPES(ROW)           \
    ROW(LR_CONSTANT, "constant") \
    ROW(LR_LINEAR, "linear")     \
    ROW(LR_COSINE, "cosine")     \
    ROW(LR_WSD, "wsd")           \
    ROW(LR_INVERSE_SQRT, "inverse_sqrt")
typedef enum { LR_SHAPES(CHOICE_NAME) } LrShape;

/* How rotary angles are scaled; the last word is config.json's. */
#define ROPE_SCALINGS(ROW)               \
    ROW(ROPE_PLAIN, "none", "default")   \
    ROW(ROPE_LINEAR, "linear", "linear") \
    ROW(ROPE_LLAMA3, "llama3", "llama3") \
    ROW(ROPE_YARN, "yarn", "yarn")
typedef enum { ROPE_SCALINGS(CHOICE_NAME) } RopeScaling;

/* Biases of attention's linear layers: as all layers have them, none, of queries, keys and values alone, or all. */
#define ATTENTION_BIASES(ROW)          \
    ROW(ATTENTION_BIAS_AS_ALL, "auto") \
    ROW(ATTENTION_BIAS_NONE, "none")   \
    ROW(ATTENTION_BIAS_QKV, "qkv")     \
    ROW(ATTENTION_BIAS_ALL, "all")
typedef enum { ATTENTION_BIASES(CHOICE_NAME) } AttentionBias;

/* RMSNorms of queries and keys: one for each head, or one over all heads side by side (OLMo 2). */
#define QK_NORMS(ROW)          \
    ROW(QK_NORM_NONE, "false") \
    ROW(QK_NORM_HEADS, "true") \
    ROW(QK_NORM_FULL, "full")
typedef enum { QK_NORMS(CHOICE_NAME) } QkNorm;

/* Places of a block's norms: before its layers, behind their outputs, or both; before layers that both read the block's
 * input: one norm, or one for each. */
#define BLOCK_NORM_PLACES(ROW)            \
    ROW(BLOCK_NORMS_PRE, "pre")           \
    ROW(BLOCK_NORMS_BOTH, "both")         \
    ROW(BLOCK_NORMS_POST, "post")         \
    ROW(BLOCK_NORMS_PARALLEL, "parallel") \
    ROW(BLOCK_NORMS_PARALLEL_TWO, "parallel_two")
typedef enum { BLOCK_NORM_PLACES(CHOICE_NAME) } BlockNorms;

/* Parts of a block that are computed again in backward. */
#define RECOMPUTE_LIST(ROW)               \
    ROW(RECOMPUTE_NONE, "none")           \
    ROW(RECOMPUTE_SELECTIVE, "selective") \
    ROW(RECOMPUTE_FULL, "full")
typedef enum { RECOMPUTE_LIST(CHOICE_NAME) RECOMPUTE_KINDS } Recompute;

/* How a block's tokens see those before them (model.mixer). */
#define MIXER_LIST(ROW)                    \
    ROW(MIXER_WORD_ATTENTION, "attention") \
    ROW(MIXER_WORD_DELTA, "delta")         \
    ROW(MIXER_WORD_MAMBA2, "mamba2")       \
    ROW(MIXER_WORD_KDA, "kda")             \
    ROW(MIXER_WORD_NONE, "none")
typedef enum { MIXER_LIST(CHOICE_NAME) MIXER_WORDS } MixerWord;

/* With cp: how queries meet the keys of other ranks: gathered; part by part; each rank gets some of the heads; or
 * neighbours do, in rings (world->cp_heads, cp_ring). STATE: a mixer hands its state from rank to rank. */
#define CONTEXT_COMM_LIST(ROW)                \
    ROW(CONTEXT_ALLGATHER, "allgather")       \
    ROW(CONTEXT_RING, "ring")                 \
    ROW(CONTEXT_A2A, "a2a")                   \
    ROW(CONTEXT_HIERARCHICAL, "hierarchical") \
    ROW(CONTEXT_STATE, "state")
typedef enum { CONTEXT_COMM_LIST(CHOICE_NAME) CONTEXT_COMMS } ContextComm;

/* Instructions of the CPU's kernels; auto: the best there are. */
#define ISA_LIST(ROW)         \
    ROW(ISA_AUTO, "auto")     \
    ROW(ISA_AVX512, "avx512") \
    ROW(ISA_AVX2, "avx2")     \
    ROW(ISA_C, "c")
typedef enum { ISA_LIST(CHOICE_NAME) ISA_COUNT } Isa;

/* ROW(NAME, "in configurations", number): how the CPU sums products of bf16 numbers (cpu/gemm.h): by TDPBF16PS's depths
 * of 32, by VDPBF16PS's chain of pairs, or by an fp32 chain of all. The best comes first; what is not said is 0. */
#define DOT_LIST(ROW)          \
    ROW(AMX, "amx", 2)         \
    ROW(VDPBF16, "vdpbf16", 1) \
    ROW(FMA, "fma", 0)
#define DOT_NUMBER(name, text, number) DOT_##name = (number),
typedef enum { DOT_LIST(DOT_NUMBER) DOT_KINDS = 3 } DotKind;
#undef DOT_NUMBER

/* ROW(NAME, "in configurations", type): precisions, each with the type (device/tensor.h) of what layers compute. */
#define PRECISIONS(ROW)     \
    ROW(FP32, "fp32", F32)  \
    ROW(BF16, "bf16", BF16) \
    ROW(FP16, "fp16", F16)  \
    ROW(FP8, "fp8", BF16)

#endif
