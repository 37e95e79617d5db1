/* See tensors.h. The table below has a row for each kind of parameter and set of classes. */
#include "hf/tensors.h"

#include <stdio.h>
#include <string.h>

/* How the rows of a matrix lie in their tensors. */
typedef enum {
    WHOLE,       /* as they are */
    QKV,         /* queries, keys, values: three tensors */
    QKV_PAIRS,   /* the same, of each head of queries and keys rotary pairs are neighbours */
    QKV_GROUPS,  /* of each head of keys the queries that read it, then that and its values: one tensor */
    QKV_GATE,    /* QKV, and an output gate as wide as the queries */
    GATE_UP,     /* two tensors */
    THIRDS,      /* three of as many rows */
    QKV_DELTA,   /* queries, keys and values of linear attention: three tensors */
    QKVZ_DELTA,  /* these, and its gates: four */
    LATENTS_B,   /* two latents of KDA as wide as a head, then a number of each head: three tensors */
    ALTERNATING, /* gate and up row by row in turn: one tensor */
    QKV_GATED,   /* as QKV; of each head of queries, behind them, its gates */
    KEY_HEADS,   /* of each key head its queries and keys, the values and gates of the value heads that read it */
    KEY_PAIRS,   /* likewise two numbers of each value head */
    FIRST_ROWS,  /* rows before those of another parameter in one tensor: Mamba-2's Win and Wdt */
    LAST_ROWS,   /* these */
    QKV_Z,       /* queries, keys and values of linear attention, then its gates: two tensors */
    HEADS,       /* of each head the columns without positions, then rotary pairs, neighbours in theirs */
    LATENT       /* of the latent, then rotary pairs */
} Form;

enum {
    TRANSPOSED = 1,
    FUSED = 2, /* experts are one tensor of theirs, with an outer dim, its names without .weight; as MXFP4 they are not
                  transposed */
    OWN_NORMS_ONLY = 32, /* where parallel layers have a norm each */
    BARE = 4,            /* no prefix of the model stands before the name */
    PLAIN = 8,           /* a norm that multiplies by w itself, whatever others of the class do */
    STACKED = 64,        /* where the folder has all experts of a layer in one tensor */
    CHANNELS = 16,       /* a convolution of each channel alone: their tensor has a dim of 1 more */
    AS_SAVED = 128,      /* in files as transformers saves them */
    OF_HEADS = 256       /* a vector that is [1, 1, heads, 1] in theirs */
};

#define C(name) HF_CLASS_BIT(HF_##name)
#define EVERY HF_CLASS_ALL
#define GPT2 (C(GPT2) | C(GPT_BIGCODE))
#define REST (EVERY & ~GPT2)
#define OF_GPT (GPT2 | C(FALCON) | C(EXAONE3) | C(GPTJ)) /* "transformer.h.N." */
#define DEEPSEEK (C(DEEPSEEK_V2) | C(DEEPSEEK_V3))
#define LATENTS (DEEPSEEK | C(YOUTU) | C(GLM4_MOE_LITE) | C(MINICPM3) | C(SARVAM_MLA) | C(KIMI_LINEAR))
#define GLM_EXPERTS (C(GLM4_MOE) | C(GLM4_MOE_LITE) | C(DOTS1) | C(SOLAR_OPEN) | C(SARVAM_MOE) | C(SARVAM_MLA))
#define SHARED_GATED (C(QWEN2_MOE) | C(QWEN3_NEXT) | C(QWEN3_5_MOE))
#define SHARED_QWEN (SHARED_GATED | C(FLINT) | C(LARA_MINI))
#define QWEN3_5S (C(QWEN3_5) | C(QWEN3_5_MOE))
#define HYBRIDS (C(QWEN3_NEXT) | QWEN3_5S)
#define DENSE_GLM (C(GLM) | C(GLM4))
#define QWEN_NAMES                                                                                               \
    (C(QWEN2_MOE) | C(QWEN3_MOE) | C(OLMOE) | C(FLEX_OLMO) | DEEPSEEK | GLM_EXPERTS | C(HY_V3) | C(EXAONE_MOE) | \
     C(AFMOE) | C(QWEN3_NEXT) | C(QWEN3_5_MOE) | C(MELLUM) | C(FLINT) | C(LARA_MINI))
#define SHARED_DEEPSEEK (DEEPSEEK | GLM_EXPERTS | C(EXAONE_MOE) | C(AFMOE) | C(ARIA))
#define MIXTRAL_NAMES (C(MIXTRAL) | C(MINIMAX_M2) | C(KIMI_LINEAR))
#define GEMMAS (C(GEMMA2) | C(GEMMA3))
#define GRANITE_SHARED (C(GRANITEMOESHARED) | C(GRANITEMOEHYBRID) | C(GRANITEMOE_SWA))
#define GRANITE_EXPERTS (C(GRANITEMOE) | C(GRANITEMOESHARED) | C(GRANITEMOEHYBRID))
#define MAMBAS (C(GRANITEMOEHYBRID) | C(BAMBA))
#define OWN_NORMS (GEMMAS | C(OLMO2) | C(OLMO3) | C(EXAONE4) | C(FLEX_OLMO) | C(OLMO_HYBRID))
#define OFFSET_NORMS (GEMMAS | C(GEMMA) | C(VAULTGEMMA) | C(NEMOTRON) | HYBRIDS) /* they multiply by 1 + w */
#define MODULES (C(DEEPSEEK_V3) | C(GLM4_MOE) | C(GLM4_MOE_LITE))                /* of multi-token prediction */
#define MORE_BLOCKS (MODULES | C(HY_V3)) /* files hold such modules, whether they are read or not */

/* ours: the parameter's name behind "layers.N.", with or without .weight and .bias; theirs: behind their
 * "layers.N.", in the order of the form's parts, '#' the expert. */
typedef struct {
    HfClassSet classes;
    const char *ours, *theirs;
    Form form;
    int flags;
} Row;

static const Row table[] = {
    { GPT2, "embedding.token", "wte", WHOLE, 0 },
    { GPT2, "embedding.position", "wpe", WHOLE, 0 },
    { GPT2, "norm1", "ln_1", WHOLE, 0 },
    { C(GPT2), "attn.qkv", "attn.c_attn", WHOLE, TRANSPOSED },
    { C(GPT_BIGCODE), "attn.qkv", "attn.c_attn", WHOLE, 0 },
    { C(GPT2), "attn.proj", "attn.c_proj", WHOLE, TRANSPOSED },
    { C(GPT_BIGCODE), "attn.proj", "attn.c_proj", WHOLE, 0 },
    { GPT2, "norm2", "ln_2", WHOLE, 0 },
    { C(GPT2), "mlp.fc1", "mlp.c_fc", WHOLE, TRANSPOSED },
    { C(GPT_BIGCODE), "mlp.fc1", "mlp.c_fc", WHOLE, 0 },
    { C(GPT2), "mlp.fc2", "mlp.c_proj", WHOLE, TRANSPOSED },
    { C(GPT_BIGCODE), "mlp.fc2", "mlp.c_proj", WHOLE, 0 },
    { GPT2, "final_norm", "ln_f", WHOLE, 0 },

    { C(GPTJ), "embedding.token", "wte", WHOLE, 0 },
    { C(GPTJ), "final_norm", "ln_f", WHOLE, 0 },
    { C(GPTJ), "norm1", "ln_1", WHOLE, 0 },
    { C(GPTJ), "attn.qkv", "attn.q_proj attn.k_proj attn.v_proj", QKV_PAIRS, 0 },
    { C(GPTJ), "attn.proj", "attn.out_proj", WHOLE, 0 },
    { C(GPTJ), "mlp.fc1", "mlp.fc_in", WHOLE, 0 },
    { C(GPTJ), "mlp.fc2", "mlp.fc_out", WHOLE, 0 },
    { C(PHI), "final_norm", "final_layernorm", WHOLE, 0 },
    { C(PHI), "attn.proj", "self_attn.dense", WHOLE, 0 },
    { C(PHI), "mlp.fc1", "mlp.fc1", WHOLE, 0 },
    { C(PHI), "mlp.fc2", "mlp.fc2", WHOLE, 0 },
    { C(GPT_NEOX), "embedding.token", "embed_in", WHOLE, 0 },
    { C(GPT_NEOX), "final_norm", "final_layer_norm", WHOLE, 0 },
    { C(GPT_NEOX), "head", "embed_out", WHOLE, BARE },
    { C(GPT_NEOX), "attn.qkv", "attention.query_key_value", QKV_GROUPS, 0 },
    { C(GPT_NEOX), "attn.proj", "attention.dense", WHOLE, 0 },
    { C(FALCON), "embedding.token", "word_embeddings", WHOLE, 0 },
    { C(FALCON), "final_norm", "ln_f", WHOLE, 0 },
    { C(FALCON), "norm1", "ln_attn", WHOLE, OWN_NORMS_ONLY },
    { C(FALCON), "norm2", "ln_mlp", WHOLE, OWN_NORMS_ONLY },
    { C(FALCON), "attn.qkv", "self_attention.query_key_value", QKV_GROUPS, 0 },
    { C(FALCON), "attn.proj", "self_attention.dense", WHOLE, 0 },
    { C(GPT_NEOX) | C(FALCON), "mlp.fc1", "mlp.dense_h_to_4h", WHOLE, 0 },
    { C(GPT_NEOX) | C(FALCON), "mlp.fc2", "mlp.dense_4h_to_h", WHOLE, 0 },
    { C(EXAONE3), "embedding.token", "wte", WHOLE, 0 },
    { C(EXAONE3), "final_norm", "ln_f", WHOLE, 0 },
    { C(EXAONE3), "norm1", "ln_1", WHOLE, 0 },
    { C(EXAONE3), "norm2", "ln_2", WHOLE, 0 },
    { C(EXAONE3), "attn.qkv", "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj", QKV, 0 },
    { C(EXAONE3), "attn.proj", "attn.attention.out_proj", WHOLE, 0 },
    { C(EXAONE3), "mlp.fc1", "mlp.c_fc_0 mlp.c_fc_1", GATE_UP, 0 },
    { C(EXAONE3), "mlp.fc2", "mlp.c_proj", WHOLE, 0 },
    { C(SARVAM_MOE), "embedding.token", "word_embeddings", WHOLE, 0 },
    { C(SARVAM_MOE), "attn.qkv", "attention.query_key_value", WHOLE, 0 },
    { C(SARVAM_MOE), "attn.proj", "attention.dense", WHOLE, 0 },
    { C(SARVAM_MOE), "attn.q_norm", "attention.query_layernorm", WHOLE, 0 },
    { C(SARVAM_MOE), "attn.k_norm", "attention.key_layernorm", WHOLE, 0 },
    { C(SARVAM_MOE), "mlp.router.bias", "mlp.gate.expert_bias", WHOLE, 0 },
    { C(NEMOTRON_H), "embedding.token", "embeddings", WHOLE, 0 },
    { C(NEMOTRON_H), "final_norm", "norm_f", WHOLE, 0 },
    { C(NEMOTRON_H), "norm1", "norm", WHOLE, 0 },
    { C(NEMOTRON_H), "norm2", "norm", WHOLE, 0 },
    { C(NEMOTRON_H), "attn.qkv", "mixer.q_proj mixer.k_proj mixer.v_proj", QKV, 0 },
    { C(NEMOTRON_H), "attn.proj", "mixer.o_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mamba.in", "mixer.in_proj", FIRST_ROWS, 0 },
    { C(NEMOTRON_H), "mamba.dt", "mixer.in_proj", LAST_ROWS, 0 },
    { C(NEMOTRON_H), "mamba.conv.weight", "mixer.conv1d.weight", WHOLE, CHANNELS },
    { C(NEMOTRON_H), "mamba.conv.bias", "mixer.conv1d.bias", WHOLE, 0 },
    { C(NEMOTRON_H), "mamba.a_log", "mixer.A_log", WHOLE, 0 },
    { C(NEMOTRON_H), "mamba.dt_bias", "mixer.dt_bias", WHOLE, 0 },
    { C(NEMOTRON_H), "mamba.skip", "mixer.D", WHOLE, 0 },
    { C(NEMOTRON_H), "mamba.norm", "mixer.norm", WHOLE, 0 },
    { C(NEMOTRON_H), "mamba.proj", "mixer.out_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.fc1", "mixer.up_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.fc2", "mixer.down_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.router.weight", "mixer.gate.weight", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.router.bias", "mixer.gate.e_score_correction_bias", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.experts.fc1", "mixer.experts.#.up_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.experts.fc2", "mixer.experts.#.down_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.latent_in", "mixer.fc1_latent_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.latent_out", "mixer.fc2_latent_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.shared.fc1", "mixer.shared_experts.up_proj", WHOLE, 0 },
    { C(NEMOTRON_H), "mlp.shared.fc2", "mixer.shared_experts.down_proj", WHOLE, 0 },
    { C(BAMBA), "final_norm", "final_layernorm", WHOLE, 0 },
    { C(BAMBA), "norm2", "pre_ff_layernorm", WHOLE, 0 },
    { REST, "embedding.token", "embed_tokens", WHOLE, 0 },
    { REST, "final_norm", "norm", WHOLE, 0 },
    { EVERY, "head", "lm_head", WHOLE, BARE },

    { C(GLM4), "post_norm1", "post_self_attn_layernorm", WHOLE, 0 },
    { C(GLM4), "post_norm2", "post_mlp_layernorm", WHOLE, 0 },
    { C(VAULTGEMMA), "norm2", "pre_feedforward_layernorm", WHOLE, 0 },
    { C(AFMOE), "norm1", "input_layernorm", WHOLE, 0 },
    { C(AFMOE), "post_norm1", "post_attention_layernorm", WHOLE, 0 },
    { C(AFMOE), "norm2", "pre_mlp_layernorm", WHOLE, 0 },
    { C(AFMOE), "post_norm2", "post_mlp_layernorm", WHOLE, 0 },
    { C(HYPERCLOVAX), "post_norm1", "post_norm1", WHOLE, 0 },
    { C(HYPERCLOVAX), "post_norm2", "post_norm2", WHOLE, 0 },
    { REST & ~OWN_NORMS, "norm1", "input_layernorm", WHOLE, 0 },
    { REST & ~OWN_NORMS, "norm2", "post_attention_layernorm", WHOLE, 0 },
    { C(OLMO_HYBRID), "norm1", "attention_layer_norm", WHOLE, 0 },
    { C(OLMO_HYBRID), "norm2", "feedforward_layer_norm", WHOLE, 0 },
    { C(OLMO_HYBRID), "post_norm1", "feedforward_layer_norm", WHOLE, AS_SAVED },
    { GEMMAS, "norm1", "input_layernorm", WHOLE, 0 },
    { OWN_NORMS, "post_norm1", "post_attention_layernorm", WHOLE, 0 },
    { GEMMAS, "norm2", "pre_feedforward_layernorm", WHOLE, 0 },
    { OWN_NORMS, "post_norm2", "post_feedforward_layernorm", WHOLE, 0 },

    { C(PHI3), "attn.qkv", "self_attn.qkv_proj", WHOLE, 0 },
    { C(AFMOE), "attn.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.gate_proj", QKV_GATE, 0 },
    { C(ERNIE4_5) | C(HELIUM) | C(COHERE) | C(COHERE2) | DENSE_GLM, "attn.qkv",
      "self_attn.q_proj self_attn.k_proj self_attn.v_proj", QKV_PAIRS, 0 },
    { HYBRIDS, "attn.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", QKV_GATED, 0 },
    { REST, "attn.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", QKV, 0 },
    { REST, "attn.q_norm", "self_attn.q_norm", WHOLE, 0 },
    { REST, "attn.k_norm", "self_attn.k_norm", WHOLE, 0 },
    { C(FLINT), "attn.sinks", "self_attn.softmax_offset", WHOLE, 0 },
    { REST, "attn.sinks", "self_attn.sinks", WHOLE, 0 },
    { REST, "attn.proj", "self_attn.o_proj", WHOLE, 0 },
    { LATENTS, "attn.q", "self_attn.q_proj", HEADS, 0 },
    { LATENTS, "attn.q_a", "self_attn.q_a_proj", WHOLE, 0 },
    { LATENTS, "attn.q_a_norm", "self_attn.q_a_layernorm", WHOLE, 0 },
    { LATENTS, "attn.q_b", "self_attn.q_b_proj", HEADS, 0 },
    { LATENTS, "attn.kv_a", "self_attn.kv_a_proj_with_mqa", LATENT, 0 },
    { LATENTS, "attn.kv_a_norm", "self_attn.kv_a_layernorm", WHOLE, 0 },
    { LATENTS, "attn.kv_b", "self_attn.kv_b_proj", WHOLE, 0 },

    { C(QWEN3_NEXT), "delta.qkvz", "linear_attn.in_proj_qkvz", KEY_HEADS, 0 },
    { C(QWEN3_NEXT), "delta.ba", "linear_attn.in_proj_ba", KEY_PAIRS, 0 },
    { QWEN3_5S, "delta.qkvz", "linear_attn.in_proj_qkv linear_attn.in_proj_z", QKV_Z, 0 },
    { QWEN3_5S, "delta.ba", "linear_attn.in_proj_b linear_attn.in_proj_a", GATE_UP, 0 },
    { HYBRIDS, "delta.conv", "linear_attn.conv1d", WHOLE, CHANNELS },
    { HYBRIDS, "delta.a_log", "linear_attn.A_log", WHOLE, 0 },
    { HYBRIDS, "delta.dt_bias", "linear_attn.dt_bias", WHOLE, 0 },
    { HYBRIDS, "delta.norm", "linear_attn.norm", WHOLE, PLAIN },
    { HYBRIDS, "delta.proj", "linear_attn.out_proj", WHOLE, 0 },

    { C(OLMO_HYBRID), "delta.qkvz", "linear_attn.q_proj linear_attn.k_proj linear_attn.v_proj linear_attn.g_proj",
      QKVZ_DELTA, 0 },
    { C(OLMO_HYBRID), "delta.ba", "linear_attn.b_proj linear_attn.a_proj", GATE_UP, 0 },
    { C(OLMO_HYBRID), "delta.conv", "linear_attn.q_conv1d linear_attn.k_conv1d linear_attn.v_conv1d", THIRDS,
      CHANNELS | AS_SAVED },
    { C(OLMO_HYBRID), "delta.conv", "linear_attn.q_conv1d linear_attn.k_conv1d linear_attn.v_conv1d", QKV_DELTA,
      CHANNELS },
    { C(OLMO_HYBRID), "delta.a_log", "linear_attn.A_log", WHOLE, 0 },
    { C(OLMO_HYBRID), "delta.dt_bias", "linear_attn.dt_bias", WHOLE, 0 },
    { C(OLMO_HYBRID), "delta.norm", "linear_attn.o_norm", WHOLE, 0 },
    { C(OLMO_HYBRID), "delta.proj", "linear_attn.o_proj", WHOLE, 0 },

    { C(LARA_MINI), "delta.qkvz", "linear_attn.in_proj", FIRST_ROWS, 0 },
    { C(LARA_MINI), "delta.ba", "linear_attn.in_proj", LAST_ROWS, 0 },
    { C(LARA_MINI), "delta.conv", "linear_attn.conv1d", WHOLE, CHANNELS },
    { C(LARA_MINI), "delta.a_log", "linear_attn.A_log", WHOLE, 0 },
    { C(LARA_MINI), "delta.dt_bias", "linear_attn.dt_bias", WHOLE, 0 },
    { C(LARA_MINI), "delta.norm", "linear_attn.out_norm", WHOLE, 0 },
    { C(LARA_MINI), "delta.proj", "linear_attn.out_proj", WHOLE, 0 },

    { MAMBAS, "mamba.in", "mamba.in_proj", FIRST_ROWS, 0 },
    { MAMBAS, "mamba.dt", "mamba.in_proj", LAST_ROWS, 0 },
    { MAMBAS, "mamba.conv.weight", "mamba.conv1d.weight", WHOLE, CHANNELS },
    { MAMBAS, "mamba.conv.bias", "mamba.conv1d.bias", WHOLE, 0 },
    { MAMBAS, "mamba.a_log", "mamba.A_log", WHOLE, 0 },
    { MAMBAS, "mamba.dt_bias", "mamba.dt_bias", WHOLE, 0 },
    { MAMBAS, "mamba.skip", "mamba.D", WHOLE, 0 },
    { MAMBAS, "mamba.norm", "mamba.norm", WHOLE, 0 },
    { MAMBAS, "mamba.proj", "mamba.out_proj", WHOLE, 0 },

    { C(KIMI_LINEAR), "kda.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", THIRDS, 0 },
    { C(KIMI_LINEAR), "kda.fgb", "self_attn.f_a_proj self_attn.g_a_proj self_attn.b_proj", LATENTS_B, 0 },
    { C(KIMI_LINEAR), "kda.decay", "self_attn.f_b_proj", WHOLE, 0 },
    { C(KIMI_LINEAR), "kda.gate", "self_attn.g_b_proj", WHOLE, 0 },
    { C(KIMI_LINEAR), "kda.conv", "self_attn.q_conv1d self_attn.k_conv1d self_attn.v_conv1d", THIRDS, CHANNELS },
    { C(KIMI_LINEAR), "kda.a_log", "self_attn.A_log", WHOLE, OF_HEADS },
    { C(KIMI_LINEAR), "kda.dt_bias", "self_attn.dt_bias", WHOLE, 0 },
    { C(KIMI_LINEAR), "kda.norm", "self_attn.o_norm", WHOLE, 0 },
    { C(KIMI_LINEAR), "kda.proj", "self_attn.o_proj", WHOLE, 0 },
    { C(KIMI_LINEAR), "mlp.fc1", "block_sparse_moe.gate_proj block_sparse_moe.up_proj", GATE_UP, AS_SAVED },
    { C(KIMI_LINEAR), "mlp.fc2", "block_sparse_moe.down_proj", WHOLE, AS_SAVED },
    { C(KIMI_LINEAR), "mlp.shared.fc1",
      "block_sparse_moe.shared_experts.gate_proj block_sparse_moe.shared_experts.up_proj", GATE_UP, 0 },
    { C(KIMI_LINEAR), "mlp.shared.fc2", "block_sparse_moe.shared_experts.down_proj", WHOLE, 0 },
    { C(KIMI_LINEAR), "mlp.router.bias", "block_sparse_moe.gate.e_score_correction_bias", WHOLE, 0 },

    { C(GRANITEMOEHYBRID), "mlp.fc1", "shared_mlp.input_linear", WHOLE, 0 },
    { C(GRANITEMOEHYBRID), "mlp.fc2", "shared_mlp.output_linear", WHOLE, 0 },
    { C(BAMBA), "mlp.fc1", "feed_forward.gate_proj feed_forward.up_proj", GATE_UP, 0 },
    { C(BAMBA), "mlp.fc2", "feed_forward.down_proj", WHOLE, 0 },
    { C(PHI3) | DENSE_GLM, "mlp.fc1", "mlp.gate_up_proj", WHOLE, 0 },
    { C(STARCODER2), "mlp.fc1", "mlp.c_fc", WHOLE, 0 },
    { C(STARCODER2), "mlp.fc2", "mlp.c_proj", WHOLE, 0 },
    { C(ARCEE) | C(JAIS2) | C(NEMOTRON), "mlp.fc1", "mlp.up_proj", WHOLE, 0 },
    { REST, "mlp.fc1", "mlp.gate_proj mlp.up_proj", GATE_UP, 0 },
    { REST, "mlp.fc2", "mlp.down_proj", WHOLE, 0 },
    { SHARED_DEEPSEEK, "mlp.shared.fc1", "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj", GATE_UP, 0 },
    { SHARED_DEEPSEEK, "mlp.shared.fc2", "mlp.shared_experts.down_proj", WHOLE, 0 },

    { SHARED_QWEN, "mlp.shared.fc1", "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj", GATE_UP, 0 },
    { SHARED_QWEN, "mlp.shared.fc2", "mlp.shared_expert.down_proj", WHOLE, 0 },
    { SHARED_GATED, "mlp.shared_gate", "mlp.shared_expert_gate", WHOLE, 0 },

    { MIXTRAL_NAMES, "mlp.router.weight", "block_sparse_moe.gate.weight", WHOLE, 0 },
    { MIXTRAL_NAMES, "mlp.experts.fc1", "block_sparse_moe.experts.#.w1 block_sparse_moe.experts.#.w3", GATE_UP, 0 },
    { MIXTRAL_NAMES, "mlp.experts.fc2", "block_sparse_moe.experts.#.w2", WHOLE, 0 },
    { C(MINIMAX_M2), "mlp.router.bias", "block_sparse_moe.e_score_correction_bias", WHOLE, 0 },
    { C(EXAONE_MOE), "mlp.router.bias", "mlp.e_score_correction_bias", WHOLE, 0 },
    { C(HY_V3) | C(AFMOE), "mlp.router.weight", "mlp.router.gate.weight", WHOLE, 0 },
    { C(HY_V3) | C(AFMOE), "mlp.router.bias", "mlp.expert_bias", WHOLE, 0 },
    { C(HY_V3), "mlp.shared.fc1", "mlp.shared_mlp.gate_proj mlp.shared_mlp.up_proj", GATE_UP, 0 },
    { C(HY_V3), "mlp.shared.fc2", "mlp.shared_mlp.down_proj", WHOLE, 0 },
    { QWEN_NAMES, "mlp.router.weight", "mlp.gate.weight", WHOLE, 0 },
    { C(DEEPSEEK_V3) | GLM_EXPERTS, "mlp.router.bias", "mlp.gate.e_score_correction_bias", WHOLE, 0 },
    { C(QWEN3_5_MOE), "mlp.experts.fc1", "mlp.experts.gate_up_proj", WHOLE, FUSED | STACKED },
    { C(QWEN3_5_MOE), "mlp.experts.fc2", "mlp.experts.down_proj", WHOLE, FUSED | STACKED },
    { C(LARA_MINI), "mlp.experts.fc1", "mlp.experts.gate_up_proj", WHOLE, FUSED },
    { C(LARA_MINI), "mlp.experts.fc2", "mlp.experts.down_proj", WHOLE, FUSED },
    { QWEN_NAMES, "mlp.experts.fc1", "mlp.experts.#.gate_proj mlp.experts.#.up_proj", GATE_UP, 0 },
    { QWEN_NAMES, "mlp.experts.fc2", "mlp.experts.#.down_proj", WHOLE, 0 },
    { C(GPT_OSS) | C(ARIA), "mlp.router.weight", "mlp.router.weight", WHOLE, 0 },
    { C(ARIA), "mlp.experts.fc1.weight", "mlp.experts.fc1.weight", WHOLE, TRANSPOSED | FUSED },
    { C(ARIA), "mlp.experts.fc2.weight", "mlp.experts.fc2.weight", WHOLE, TRANSPOSED | FUSED },
    { C(GPT_OSS), "mlp.router.logits.bias", "mlp.router.bias", WHOLE, 0 },
    { C(GPT_OSS), "mlp.experts.fc1", "mlp.experts.gate_up_proj", ALTERNATING, TRANSPOSED | FUSED },
    { C(GPT_OSS), "mlp.experts.fc2", "mlp.experts.down_proj", WHOLE, TRANSPOSED | FUSED },

    { C(GRANITEMOE_SWA), "mlp.router.weight", "block_sparse_moe.router.weight", WHOLE, 0 },
    { C(GRANITEMOE_SWA), "mlp.experts.fc1", "block_sparse_moe.experts.gate_up_proj", WHOLE, FUSED },
    { C(GRANITEMOE_SWA), "mlp.experts.fc2", "block_sparse_moe.experts.down_proj", WHOLE, FUSED },
    { GRANITE_EXPERTS, "mlp.router.weight", "block_sparse_moe.router.layer.weight", WHOLE, 0 },
    { GRANITE_EXPERTS, "mlp.experts.fc1.weight", "block_sparse_moe.input_linear.weight", WHOLE, FUSED },
    { GRANITE_EXPERTS, "mlp.experts.fc2.weight", "block_sparse_moe.output_linear.weight", WHOLE, FUSED },
    { GRANITE_SHARED, "mlp.shared.fc1", "shared_mlp.input_linear", WHOLE, 0 },
    { GRANITE_SHARED, "mlp.shared.fc2", "shared_mlp.output_linear", WHOLE, 0 },

    { MODULES, "embedding_norm", "enorm", WHOLE, 0 },
    { MODULES, "hidden_norm", "hnorm", WHOLE, 0 },
    { MODULES, "proj", "eh_proj", WHOLE, 0 },
};

#define PAIRED (C(LLAMA) | C(MISTRAL) | C(MIXTRAL))
#define IN_GGUF (PAIRED | C(QWEN2) | C(QWEN3) | C(QWEN3_MOE))

static const Row gguf_table[] = {
    { IN_GGUF, "embedding.token", "token_embd", WHOLE, 0 },
    { IN_GGUF, "final_norm", "output_norm", WHOLE, 0 },
    { IN_GGUF, "head", "output", WHOLE, 0 },
    { IN_GGUF, "norm1", "attn_norm", WHOLE, 0 },
    { IN_GGUF, "norm2", "ffn_norm", WHOLE, 0 },
    { PAIRED, "attn.qkv", "attn_q attn_k attn_v", QKV_PAIRS, 0 },
    { IN_GGUF, "attn.qkv", "attn_q attn_k attn_v", QKV, 0 },
    { IN_GGUF, "attn.q_norm", "attn_q_norm", WHOLE, 0 },
    { IN_GGUF, "attn.k_norm", "attn_k_norm", WHOLE, 0 },
    { IN_GGUF, "attn.proj", "attn_output", WHOLE, 0 },
    { IN_GGUF, "mlp.fc1", "ffn_gate ffn_up", GATE_UP, 0 },
    { IN_GGUF, "mlp.fc2", "ffn_down", WHOLE, 0 },
    { IN_GGUF, "mlp.router.weight", "ffn_gate_inp.weight", WHOLE, 0 },
    { IN_GGUF, "mlp.experts.fc1", "ffn_gate_exps ffn_up_exps", GATE_UP, FUSED },
    { IN_GGUF, "mlp.experts.fc2", "ffn_down_exps", WHOLE, FUSED },
};

/* (of a module of multi-token prediction, whose name the model's last norm has too) */
static const Row mtp_final_norm = { MODULES, "final_norm", "shared_head.norm", WHOLE, 0 };

/* ---- names ---- */

const char *const *hf_prefixes(HfClass kind, bool wrapped)
{
    static const char *const gpt2[] = { "transformer.", "", NULL };
    static const char *const neox[] = { "gpt_neox.", "", NULL };
    static const char *const plain[] = { "model.", "", NULL };
    static const char *const backbone[] = { "backbone.", "model.", "", NULL };
    static const char *const inner[] = { "language_model.model.", "model.language_model.", NULL };
    if (kind == HF_GPT_NEOX) return neox;
    if (kind == HF_NEMOTRON_H) return backbone;
    return wrapped ? inner : OF_GPT >> kind & 1 ? gpt2 : plain;
}

/* Rows of Win and Wsmall, which are one tensor in some classes. */
static void join_rows(HfClass kind, const Config *cfg, HfNaming *n)
{
    const int64_t keys = n->delta.key_heads * n->delta.key, values = n->delta.value_heads * n->delta.value;
    const int64_t heads = cfg->model.mamba_heads;
    const bool delta = kind == HF_LARA_MINI;
    n->last_rows = delta ? 2 * n->delta.value_heads : heads;
    n->first_rows = 2 * (delta ? keys + values
                               : heads * cfg->model.mamba_head_dim + cfg->model.mamba_groups * cfg->model.mamba_state);
}

HfNaming hf_naming(HfClass kind, const Config *cfg, const char *prefix)
{
    HfNaming n = { .kind = kind,
                   .prefix = prefix ? prefix : *hf_prefixes(kind, false),
                   .halves = kind == HF_MINICPM3 || kind == HF_KIMI_LINEAR,
                   .own_norms = cfg->model.block_norms == BLOCK_NORMS_PARALLEL_TWO,
                   .layers = cfg->model.layers,
                   .experts = cfg->moe.experts,
                   .heads = cfg->model.heads,
                   .kv_heads = cfg->model.kv_heads,
                   .head_dim = cfg->model.head_dim,
                   .turning = cfg->model.rope_dim ? cfg->model.rope_dim : cfg->model.head_dim,
                   .nope = cfg->model.qk_nope_head_dim,
                   .rope = cfg->model.qk_rope_head_dim,
                   .kv_rank = cfg->model.kv_lora_rank,
                   .delta = { cfg->model.delta_key_heads, cfg->model.delta_value_heads, cfg->model.delta_key_dim,
                              cfg->model.delta_value_dim },
                   .kda_head = cfg->model.kda_head_dim,
                   .tied = cfg->model.tied,
                   .width = config_mup_width(cfg) };
    join_rows(kind, cfg, &n);
    return n;
}

bool hf_naming_gguf(HfClass kind, const Config *cfg, HfNaming *out)
{
    *out = hf_naming(kind, cfg, "");
    out->gguf = true;
    return IN_GGUF >> kind & 1;
}

/* A parameter's name taken apart. */
typedef struct {
    const Row *row;
    int64_t layer;      /* of theirs; -1: none */
    const char *suffix; /* ".weight", ".bias", or "" where the row has it */
} Place;

static bool row_is(const Row *r, const HfNaming *n, const char *name, const char **suffix)
{
    const size_t length = strlen(r->ours);
    if (r->flags & OWN_NORMS_ONLY && !n->own_norms) return false;
    if (r->flags & STACKED && !n->stacked) return false;
    if (r->flags & AS_SAVED && !n->as_saved) return false;
    if (!(r->classes >> n->kind & 1) || strncmp(name, r->ours, length)) return false;
    *suffix = name + length;
    return !**suffix || !strcmp(*suffix, ".weight") || !strcmp(*suffix, ".bias");
}

/* False: the class has no such tensor. */
static bool find(const HfNaming *n, const char *name, Place *out)
{
    long long number;
    int used = 0;
    *out = (Place){ .layer = -1 };
    if (sscanf(name, "layers.%lld.%n", &number, &used) == 1 && used) out->layer = number;
    else if (sscanf(name, "mtp.%lld.%n", &number, &used) == 1 && used) out->layer = n->layers + number;
    else used = 0;
    if (!strncmp(name, "mtp.", 4) && row_is(&mtp_final_norm, n, name + used, &out->suffix)) out->row = &mtp_final_norm;
    const Row *rows = n->gguf ? gguf_table : table;
    const size_t count = n->gguf ? sizeof gguf_table / sizeof *rows : sizeof table / sizeof *rows;
    for (size_t i = 0; !out->row && i < count; i++)
        if (row_is(&rows[i], n, name + used, &out->suffix)) out->row = &rows[i];
    return out->row;
}

static const char *layers_word(const HfNaming *n) { return n->gguf ? "blk" : OF_GPT >> n->kind & 1 ? "h" : "layers"; }

/* Prefix of the head's name: it lies beside the model, in its wrapper. */
static const char *bare_prefix(const HfNaming *n)
{
    static const char wrapper[] = "language_model.";
    return strncmp(n->prefix, wrapper, sizeof wrapper - 1) ? "" : wrapper;
}

/* The which-th name of a row, of expert e. */
static void make_name(const HfNaming *n, const Place *at, int which, int64_t e, char out[HF_NAME_MAX])
{
    const Row *r = at->row;
    const char *stem = r->theirs, *suffix = at->suffix;
    char layer[32] = "", expert[64];
    for (; which; which--) stem += strcspn(stem, " ") + 1;
    int length = (int)strcspn(stem, " ");
    const char *hash = memchr(stem, '#', (size_t)length);
    const int before = hash ? (int)(hash - stem) : length;
    snprintf(expert, sizeof expert, "%lld", (long long)e);
    if (at->layer >= 0) snprintf(layer, sizeof layer, "%s.%lld.", layers_word(n), (long long)at->layer);
    if (r->flags & FUSED && !n->gguf) suffix = strcmp(suffix, ".bias") ? "" : "_bias";
    snprintf(out, HF_NAME_MAX, "%s%s%.*s%s%.*s%s", r->flags & BARE ? bare_prefix(n) : n->prefix, layer, before, stem,
             hash ? expert : "", hash ? length - before - 1 : 0, hash ? hash + 1 : "", suffix);
}

/* ---- places ---- */

/* Some rows of a matrix of ours: rows [ours, ours + rows) are rows theirs, theirs + step, ... of tensor `which`, which
 * has their_rows. */
typedef struct {
    int64_t ours, rows, theirs, step, their_rows;
    int which;
} Slice;

/* First elements of its pairs, second ones, and rows that do not turn. */
static int pieces_of_head(const HfNaming *n) { return n->turning < n->head_dim ? 3 : 2; }

static int slices(const HfNaming *n, Form form)
{
    switch (form) {
    case FIRST_ROWS:
    case LAST_ROWS:
    case WHOLE: return 1;
    case QKVZ_DELTA: return 4;
    case QKV_DELTA:
    case THIRDS:
    case LATENTS_B:
    case QKV: return 3;
    case QKV_GROUPS: return 3 * (int)n->kv_heads;
    case QKV_GATE: return 4;
    case QKV_PAIRS: return pieces_of_head(n) * (int)(n->heads + n->kv_heads) + 1;
    case QKV_Z:
    case GATE_UP:
    case ALTERNATING: return 2;
    case QKV_GATED: return 2 * (int)n->heads + 2;
    case KEY_HEADS: return 4 * (int)n->delta.key_heads;
    case KEY_PAIRS: return 2 * (int)n->delta.key_heads;
    case HEADS: return 3 * (int)n->heads;
    case LATENT: return 3;
    }
    return 0;
}

/* The k-th of `head` rows that turn in pairs behind `before` that do not: those, then first elements, then second. */
static Slice pairs(const HfNaming *n, int64_t base, int64_t before, int k)
{
    const int64_t half = n->rope / 2, first = base + before;
    if (!k) return (Slice){ .ours = base, .rows = before, .theirs = base, .step = 1 };
    return (Slice){ .ours = first + (k - 1) * half,
                    .rows = half,
                    .theirs = first + (k - 1) * (n->halves ? half : 1),
                    .step = n->halves ? 1 : 2 };
}

/* The k-th of queries, keys (0, 1), values and a gate. */
static Slice third(const HfNaming *n, int k)
{
    const int64_t q = n->heads * n->head_dim, kv = n->kv_heads * n->head_dim, rows = k % 3 ? kv : q;
    return (Slice){ k ? q + (k - 1) * kv : 0, rows, 0, 1, rows, k };
}

/* The k-th piece of a head of queries or keys, then values. */
static Slice piece_of_head(const HfNaming *n, int k)
{
    const int heads = (int)n->heads, each = pieces_of_head(n);
    const int which = k < each * heads ? 0 : k < each * (heads + (int)n->kv_heads) ? 1 : 2;
    Slice s = third(n, which);
    if (which == 2) return s;
    const int in = k - each * heads * which, piece = in % each;
    const int64_t base = in / each * n->head_dim, half = n->turning / 2;
    s.ours += base + piece * half;
    s.rows = piece < 2 ? half : n->head_dim - n->turning;
    s.theirs = base + (piece < 2 ? piece : n->turning);
    s.step = piece < 2 ? 2 : 1;
    return s;
}

/* Queries and gates of a head in turn, then keys, then values. */
static Slice gated(const HfNaming *n, int k)
{
    const int heads = 2 * (int)n->heads;
    const int64_t before = (n->heads + 2 * n->kv_heads) * n->head_dim; /* of the gates, in ours */
    if (k >= heads) return third(n, k - heads + 1);
    return (Slice){ .ours = k / 2 * n->head_dim + (k % 2 ? before : 0),
                    .rows = n->head_dim,
                    .theirs = k * n->head_dim,
                    .step = 1,
                    .their_rows = heads * n->head_dim };
}

/* Section k % count of key head k / count; `width` of each section's rows of a key head. */
static Slice section_of_head(const HfNaming *n, const int64_t *width, int count, int k)
{
    Slice s = { .rows = width[k % count], .step = 1 };
    for (int i = 0; i < count; i++) s.their_rows += width[i] * n->delta.key_heads;
    s.theirs = k / count * (s.their_rows / n->delta.key_heads);
    s.ours = k / count * s.rows;
    for (int i = 0; i < k % count; i++) {
        s.theirs += width[i];
        s.ours += width[i] * n->delta.key_heads;
    }
    return s;
}

static Slice key_heads(const HfNaming *n, Form form, int k)
{
    const int64_t group = n->delta.value_heads / n->delta.key_heads, values = group * n->delta.value;
    const int64_t rows[] = { n->delta.key, n->delta.key, values, values }, pair[] = { group, group };
    return form == KEY_HEADS ? section_of_head(n, rows, 4, k) : section_of_head(n, pair, 2, k);
}

/* The k-th of queries, keys, values and gates of linear attention. */
static Slice of_delta(const HfNaming *n, int k)
{
    const int64_t keys = n->delta.key_heads * n->delta.key, values = n->delta.value_heads * n->delta.value;
    const int64_t rows = k < 2 ? keys : values;
    return (Slice){ k < 2 ? k * keys : 2 * keys + (k - 2) * values, rows, 0, 1, rows, k };
}

/* Queries, keys and values of linear attention, or its gates, of so many rows together. */
static Slice values_or_gates(const HfNaming *n, int64_t rows, int k)
{
    const int64_t gates = n->delta.value_heads * n->delta.value, mixed = rows - gates;
    return k ? (Slice){ mixed, gates, 0, 1, gates, 1 } : (Slice){ 0, mixed, 0, 1, mixed, 0 };
}

/* The k-th of two latents and a number of each head. */
static Slice latent_or_numbers(const HfNaming *n, int64_t rows, int k)
{
    const int64_t count = k < 2 ? n->kda_head : rows - 2 * n->kda_head;
    return (Slice){ k * n->kda_head, count, 0, 1, count, k };
}

/* The k-th of: a group's queries, its keys, its values, the next group's queries. */
static Slice part_of_group(const HfNaming *n, int64_t rows, int k)
{
    const int64_t group = n->heads / n->kv_heads, C = n->head_dim, at = k / 3, q = n->heads * C, kv = n->kv_heads * C;
    Slice s = {
        .ours = at * group * C, .rows = group * C, .theirs = at * (group + 2) * C, .step = 1, .their_rows = rows
    };
    if (k % 3 == 0) return s;
    s.ours = q + (k % 3 - 1) * kv + at * C;
    s.rows = C;
    s.theirs += (group + k % 3 - 1) * C;
    return s;
}

/* Slice k of a matrix of `rows` rows. */
static Slice slice(const HfNaming *n, Form form, int64_t rows, int k)
{
    const int64_t half = rows / 2;
    Slice s = { .rows = rows, .step = 1, .their_rows = rows };
    switch (form) {
    case WHOLE: break;
    case QKV_GROUPS: s = part_of_group(n, rows, k); break;
    case QKV:
    case QKV_GATE: s = third(n, k); break;
    case QKV_PAIRS: s = piece_of_head(n, k); break;
    case GATE_UP: s = (Slice){ k * half, half, 0, 1, half, k }; break;
    case THIRDS: s = (Slice){ k * (rows / 3), rows / 3, 0, 1, rows / 3, k }; break;
    case QKV_DELTA:
    case QKVZ_DELTA: s = of_delta(n, k); break;
    case LATENTS_B: s = latent_or_numbers(n, rows, k); break;
    case ALTERNATING: s = (Slice){ k * half, half, k, 2, rows, 0 }; break;
    case QKV_GATED: s = gated(n, k); break;
    case QKV_Z: s = values_or_gates(n, rows, k); break;
    case KEY_HEADS:
    case KEY_PAIRS: s = key_heads(n, form, k); break;
    case FIRST_ROWS: s.their_rows += n->last_rows; break;
    case LAST_ROWS: s.theirs = n->first_rows, s.their_rows += n->first_rows; break;
    case HEADS: s = pairs(n, k / 3 * (n->nope + n->rope), n->nope, k % 3); break;
    case LATENT: s = pairs(n, 0, n->kv_rank, k); break;
    }
    if (form == HEADS || form == LATENT) s.their_rows = rows;
    return s;
}

static int64_t matrices(const HfNaming *n, const Row *r)
{
    return (r->flags & FUSED) || strchr(r->theirs, '#') ? n->experts : 1;
}

int hf_part_count(const HfNaming *n, const Param *p)
{
    Place at;
    return find(n, p->name, &at) ? (int)matrices(n, at.row) * slices(n, at.row->form) : 0;
}

bool hf_joins(const HfNaming *n, const Param *p)
{
    Place at;
    return find(n, p->name, &at) && at.row->form == LAST_ROWS;
}

int hf_part_step(const HfNaming *n, const Param *p)
{
    Place at;
    if (!find(n, p->name, &at)) return 0;
    return at.row->flags & FUSED ? slices(n, at.row->form) : hf_part_count(n, p);
}

void hf_part_range(const HfNaming *n, const Param *p, int64_t row, int64_t row_end, int *first, int *end)
{
    Place at;
    *first = *end = 0;
    if (!find(n, p->name, &at) || row >= row_end) return;
    const int64_t count = matrices(n, at.row), rows = p->spec.shape[0] / count;
    const int each = slices(n, at.row->form);
    *first = (int)(row / rows) * each;
    *end = (int)((row_end - 1) / rows + 1) * each;
}

HfPart hf_part(const HfNaming *n, const Param *p, int index)
{
    Place at;
    HfPart out = { .ndim = p->spec.ndim };
    ASSERT(find(n, p->name, &at));
    const Row *r = at.row;
    const int each = slices(n, r->form);
    const int64_t count = matrices(n, r), e = index / each, rows = p->spec.shape[0] / count, columns = p->spec.shape[1];
    const Slice s = slice(n, r->form, rows, index % each);
    const bool fused = r->flags & FUSED, vector = p->spec.ndim == 1;
    const bool turned = !vector && (r->flags & TRANSPOSED) && !(fused && n->mxfp4);
    make_name(n, &at, s.which, e, out.name);
    out.box = (Box){ { e * rows + s.ours, 0 }, { s.rows, columns } };
    int d = 0;
    if (fused) {
        out.ndim++;
        out.shape[d++] = count;
        out.first = e * s.their_rows * columns;
    }
    if (r->flags & OF_HEADS) out.shape[d++] = 1, out.shape[d++] = 1, out.ndim += 3;
    out.shape[d++] = turned ? columns : s.their_rows;
    if (r->flags & CHANNELS) out.shape[d++] = 1, out.ndim++;
    if (r->flags & OF_HEADS) out.shape[d] = 1;
    if (!vector) out.shape[d] = turned ? s.their_rows : columns;
    out.first += s.theirs * (turned ? 1 : columns);
    out.row = s.step * (turned ? 1 : columns);
    out.column = turned ? s.their_rows : 1;
    out.more =
        !(r->flags & PLAIN) && (OFFSET_NORMS >> n->kind & 1) && strstr(p->name, "norm") && strcmp(at.suffix, ".bias");
    out.width = strncmp(p->name, "final_norm.", strlen("final_norm.")) ? 1 : n->width;
    return out;
}

/* ---- what is there besides ---- */

bool hf_twin(const HfNaming *n, int64_t mtp_layers, int index, HfTwin *out)
{
    const char *const table_name = "embedding.token.weight", *const head = n->tied ? table_name : "head.weight";
    *out = (HfTwin){ .written = true };
    if (n->tied && !index--) {
        snprintf(out->name, sizeof out->name, "%slm_head.weight", bare_prefix(n));
        snprintf(out->ours, sizeof out->ours, "%s", table_name);
        out->written = false;
        return true;
    }
    if (!(MODULES >> n->kind & 1) || index / 2 >= mtp_layers) return false;
    snprintf(out->name, sizeof out->name, "%slayers.%lld.%s", n->prefix, (long long)(n->layers + index / 2),
             index % 2 ? "shared_head.head.weight" : "embed_tokens.weight");
    snprintf(out->ours, sizeof out->ours, "%s", index % 2 ? head : table_name);
    return true;
}

static bool ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), k = strlen(end);
    return n >= k && !strcmp(name + n - k, end);
}

bool hf_ignored(const HfNaming *n, bool wrapped, int64_t mtp_layers, const char *name)
{
    const size_t before = strlen(n->prefix);
    long long layer;
    const bool of_layer = !strncmp(name, n->prefix, before) && sscanf(name + before, "layers.%lld.", &layer) == 1;
    if (MORE_BLOCKS >> n->kind & 1 && !mtp_layers && of_layer && layer >= n->layers) return true;
    if ((C(EXAONE_MOE) | C(MELLUM) | HYBRIDS) >> n->kind & 1 && !strncmp(name, "mtp.", 4)) return true;
    if ((GPT2 | C(GPTJ)) >> n->kind & 1) return ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias");
    if (ends_with(name, ".rotary_emb.inv_freq") || ends_with(name, ".rotary_emb.cos_cached") ||
        ends_with(name, ".rotary_emb.sin_cached"))
        return true;
    return wrapped &&
           (strstr(name, "vision_tower.") || strstr(name, "model.visual.") || strstr(name, "multi_modal_projector."));
}
