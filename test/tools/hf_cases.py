"""
Models of transformers, small and random, for test_hf.sh. Run by a Python that has torch, transformers and safetensors
(make deps-hf).

    make OUT IDS [CLASS...]   OUT/CASE: a folder of each configuration below, and want.npy, its fp64 logits of the ids
    compare OUT RUNS EXPORTS IDS   a line a case: the largest difference of RUNS/CASE/got.npy, by the largest logit, and
                              what is wrong with EXPORTS/CASE: transformers does not open it, misses or finds too many
                              tensors, or has other logits
    fp8 FROM OUT              FROM with linear layers in e4m3 by blocks of 128 x 128; and OUT.plain: what they stand for
    mxfp4 FROM OUT            FROM with experts in MXFP4; and OUT.plain
    mtp FROM OUT              FROM with the tensors of a module of multi-token prediction
    train FOLDER TOKENS STEPS BATCH SEQ LR   losses of AdamW's steps in fp64, a line each
    text OUT EXPORTS PROMPT N TO   of the first case of each class the prompt and the N most likely tokens behind it, in
                              fp64, as TO/CASE.theirs; in TO/CASE.ids the ids that the export's tokenizer makes of it
    sgd OUT TOKENS BATCH LR   a line for the first case of each class: its name, and the losses before and behind a step
                              of plain SGD in fp64
"""
import json
import os
import shutil
import sys

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
import numpy as np
import torch
import transformers as T
from safetensors.torch import load_file, save_file


def sizes(hidden, ffn, layers, heads, kv_heads, head_dim, **more):
    out = dict(
        vocab_size=300,
        max_position_embeddings=64,
        initializer_range=0.1,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        bos_token_id=1,
        eos_token_id=2,
    )
    if head_dim:
        out["head_dim"] = head_dim
    return {**out, **more}


def latent(hidden, layers, heads, **more):
    return sizes(
        hidden, 72, layers, heads, heads, None, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, **more
    )


def linear(key_heads, value_heads, key, value, **more):
    return dict(linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=key,
        linear_value_head_dim=value, **more)  # fmt: skip


def kda(heads, width, **more):
    return dict(linear_num_heads=heads, linear_head_dim=width, **more)


def without_ffn(hidden, layers, heads, kv_heads, head_dim, **more):
    keys = sizes(hidden, 0, layers, heads, kv_heads, head_dim, **more)
    return {k: v for k, v in keys.items() if k != "intermediate_size"}


def mamba(heads, groups, state, **more):
    return dict(mamba_n_heads=heads, mamba_n_groups=groups, mamba_d_state=state, **more)


def nemotron(hidden, blocks, heads, kv_heads, head_dim, mamba_heads, mamba_dim, groups, state, **more):
    return dict(
        dict(sizes(hidden, 40, 0, heads, kv_heads, head_dim), layers_block_type=blocks, mamba_num_heads=mamba_heads,
             mamba_head_dim=mamba_dim, n_groups=groups, ssm_state_size=state, n_routed_experts=4, moe_intermediate_size=20,
             moe_shared_expert_intermediate_size=24), **more)  # fmt: skip


def latent_experts(hidden, layers, heads, **more):
    return latent(hidden, layers, heads, moe_intermediate_size=20, **more)


def gpt2(hidden, layers, heads, **more):
    return dict(vocab_size=300, n_positions=64, n_embd=hidden, n_layer=layers, n_head=heads, initializer_range=0.1, **more)


def neox(keys):
    return {k: v for k, v in keys.items() if k != "num_key_value_heads"}


def falcon(hidden, layers, heads, **more):
    return dict(vocab_size=300, max_position_embeddings=64, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, initializer_range=0.1, bos_token_id=1, eos_token_id=2, **more)  # fmt: skip


def rope(kind="default", theta=1e4, **more):
    return dict(rope_type=kind, rope_theta=theta, **more)


def yarn(factor, theta=1e4, **more):
    return rope("yarn", theta, factor=factor, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, **more)


LLAMA3 = rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
TIED = dict(tie_word_embeddings=True)
GREEDY = dict(topk_method="greedy", n_group=1, topk_group=1)
CASES = {
    "llama": (
        T.LlamaConfig,
        sizes(48, 80, 3, 6, 2, 8, rms_norm_eps=1e-5),
        sizes(40, 56, 2, 5, 5, 8, rope_parameters=LLAMA3, **TIED),
        sizes(36, 40, 2, 3, 1, 14, attention_bias=True, mlp_bias=True, rope_parameters=rope("linear", factor=2.0)),
    ),
    "mistral": (
        T.MistralConfig,
        sizes(48, 80, 3, 6, 2, 8, sliding_window=7),
        sizes(40, 56, 2, 5, 1, 16, sliding_window=None, rope_parameters=rope(theta=1e6)),
        sizes(24, 40, 2, 3, 3, 8, sliding_window=1, **TIED),
    ),
    "qwen2": (
        T.Qwen2Config,
        sizes(48, 80, 3, 6, 2, 8, **TIED),
        sizes(40, 56, 4, 5, 1, 8, use_sliding_window=True, sliding_window=5, max_window_layers=2),
        sizes(36, 40, 2, 3, 3, 12, rope_parameters=yarn(4.0)),
    ),
    "qwen3": (
        T.Qwen3Config,
        sizes(48, 80, 3, 6, 2, 10),
        sizes(40, 56, 2, 5, 5, 16, rope_parameters=rope(theta=1e6), **TIED),
        sizes(24, 40, 4, 3, 1, 8, attention_bias=True, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "gpt2": (T.GPT2Config, gpt2(48, 3, 6), gpt2(40, 2, 5, n_inner=56), gpt2(24, 2, 3, layer_norm_epsilon=1e-4)),
    "mixtral": (
        T.MixtralConfig,
        sizes(48, 40, 2, 6, 2, 8, num_local_experts=4, num_experts_per_tok=2),
        sizes(40, 24, 3, 5, 1, 8, num_local_experts=6, num_experts_per_tok=3, sliding_window=9),
        sizes(24, 40, 2, 3, 3, 8, num_local_experts=3, num_experts_per_tok=1, **TIED),
    ),
    "qwen3_moe": (
        T.Qwen3MoeConfig,
        sizes(48, 80, 3, 6, 2, 8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
        sizes(
            40, 56, 4, 5, 1, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, decoder_sparse_step=2,
            norm_topk_prob=False,
        ),
        sizes(24, 40, 3, 3, 3, 8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=12, mlp_only_layers=[1], **TIED),
    ),  # fmt: skip
    "deepseek_v2": (
        T.DeepseekV2Config,
        latent_experts(48, 3, 4, q_lora_rank=None, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
            first_k_dense_replace=1, routed_scaling_factor=1.0, **GREEDY),
        latent_experts(42, 2, 3, q_lora_rank=20, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
            first_k_dense_replace=0, routed_scaling_factor=2.5, topk_method="group_limited_greedy", n_group=4, topk_group=2),
        latent_experts(35, 2, 5, q_lora_rank=12, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
            first_k_dense_replace=1, rope_parameters=yarn(40.0, mscale=0.707, mscale_all_dim=0.707), **TIED, **GREEDY),
    ),  # fmt: skip
    "deepseek_v3": (
        T.DeepseekV3Config,
        latent_experts(144, 3, 8, q_lora_rank=20, n_routed_experts=8, num_experts_per_tok=4, n_shared_experts=1,
            first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=4, topk_group=2),
        latent_experts(40, 2, 3, q_lora_rank=None, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
            first_k_dense_replace=0, n_group=1, topk_group=1, norm_topk_prob=True),
        latent_experts(32, 2, 5, q_lora_rank=12, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
            first_k_dense_replace=1, n_group=2, topk_group=1, rope_parameters=yarn(40.0, mscale=1.0, mscale_all_dim=1.0),
            **TIED),
    ),  # fmt: skip
    "gpt_oss": (
        T.GptOssConfig,
        sizes(64, 96, 4, 6, 2, 8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
            rope_parameters=yarn(4.0, 1.5e5, truncate=False)),
        sizes(40, 32, 2, 5, 1, 16, num_local_experts=6, num_experts_per_tok=4, sliding_window=8, rope_parameters=rope()),
        sizes(24, 20, 3, 3, 3, 8, num_local_experts=3, num_experts_per_tok=1, sliding_window=5, rope_parameters=rope(),
            layer_types=["full_attention", "sliding_attention", "sliding_attention"], **TIED),
    ),  # fmt: skip
    "gemma2": (
        T.Gemma2Config,
        sizes(48, 80, 4, 6, 2, 8, sliding_window=6, query_pre_attn_scalar=12),
        sizes(40, 56, 3, 5, 1, 16, sliding_window=9, query_pre_attn_scalar=16, attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0),
        sizes(24, 40, 2, 3, 3, 8, sliding_window=64, query_pre_attn_scalar=8),
    ),  # fmt: skip
    "gemma3": (
        T.Gemma3TextConfig,
        sizes(48, 80, 7, 6, 2, 8, sliding_window=6, query_pre_attn_scalar=12),
        sizes(40, 56, 3, 5, 1, 16, sliding_window=9, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        sizes(24, 40, 2, 3, 3, 8, sliding_window=64, query_pre_attn_scalar=8),
    ),  # fmt: skip
    "olmo2": (
        T.Olmo2Config,
        sizes(48, 80, 3, 6, 2, None),
        sizes(40, 56, 2, 5, 5, None, **TIED),
        sizes(36, 40, 2, 3, 1, None, rope_parameters=rope(theta=5e5)),
    ),
    "phi3": (
        T.Phi3Config,
        sizes(48, 80, 3, 6, 2, None, pad_token_id=0, sliding_window=7),
        sizes(40, 56, 2, 5, 5, None, pad_token_id=0, **TIED),
        sizes(48, 40, 2, 3, 1, None, pad_token_id=0, sliding_window=None),
    ),
    "qwen2_moe": (
        T.Qwen2MoeConfig,
        sizes(48, 80, 3, 6, 2, 8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=36),
        sizes(40, 56, 4, 5, 1, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, decoder_sparse_step=2,
            shared_expert_intermediate_size=12, norm_topk_prob=True, qkv_bias=False),
        sizes(24, 40, 3, 3, 3, 8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=12, mlp_only_layers=[1],
            shared_expert_intermediate_size=28, **TIED),
    ),  # fmt: skip
    "olmoe": (
        T.OlmoeConfig,
        sizes(48, 28, 3, 6, 2, None, num_experts=8, num_experts_per_tok=3),
        sizes(40, 24, 2, 5, 5, None, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, **TIED),
        sizes(36, 20, 2, 3, 1, None, num_experts=5, num_experts_per_tok=1, rope_parameters=rope(theta=5e5)),
    ),
    "olmo3": (
        T.Olmo3Config,
        sizes(48, 80, 5, 6, 2, None, sliding_window=7),
        sizes(40, 56, 2, 5, 5, None, sliding_window=9, layer_types=["full_attention", "sliding_attention"], **TIED),
        sizes(36, 40, 4, 3, 1, None, sliding_window=5, rope_scaling=yarn(4.0, 5e5)),
    ),
    "qwen3_next": (
        T.Qwen3NextConfig,
        sizes(48, 80, 4, 6, 2, 8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=20, norm_topk_prob=True, rms_norm_eps=1e-4, **linear(3, 6, 10, 7)),
        sizes(40, 56, 3, 5, 1, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, decoder_sparse_step=2,
            shared_expert_intermediate_size=12, norm_topk_prob=False, attention_bias=True, rms_norm_eps=1e-3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            **linear(4, 4, 6, 9, linear_conv_kernel_dim=3)),
        sizes(24, 40, 2, 3, 3, 16, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=12, mlp_only_layers=[1],
            shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"], **linear(1, 3, 8, 8),
            **TIED),
    ),  # fmt: skip
    "granitemoehybrid": (
        T.GraniteMoeHybridConfig,
        sizes(48, 28, 4, 6, 2, None, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=20,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            attention_multiplier=0.3, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5,
            **mamba(6, 2, 10)),
        sizes(40, 24, 2, 5, 5, None, num_local_experts=0, shared_intermediate_size=56, attention_bias=True,
            position_embedding_type="rope", rope_parameters=rope(theta=5e5),
            layer_types=["full_attention", "linear_attention"], **mamba(8, 1, 12, mamba_d_conv=3, mamba_conv_bias=False)),
        sizes(36, 20, 2, 3, 1, None, num_local_experts=5, num_experts_per_tok=1, shared_intermediate_size=12,
            time_step_limit=[0.5, float("inf")], layer_types=["linear_attention", "full_attention"],
            **mamba(4, 4, 8, mamba_expand=1), **TIED),
    ),  # fmt: skip
    "bamba": (
        T.BambaConfig,
        sizes(48, 80, 4, 6, 2, None, attn_layer_indices=[1], rms_norm_eps=1e-4, **mamba(6, 2, 10)),
        sizes(40, 56, 2, 5, 5, None, attn_layer_indices=[0], attention_bias=True, rope_parameters=rope(theta=5e5),
            **mamba(8, 4, 12, mamba_d_conv=3, mamba_conv_bias=False), **TIED),
        sizes(32, 40, 3, 4, 1, None, attn_layer_indices=[0, 2], mlp_bias=True, time_step_limit=[0.5, float("inf")],
            **mamba(4, 1, 8, mamba_expand=1)),
    ),  # fmt: skip
    "nemotron_h": (
        T.NemotronHConfig,
        nemotron(48, ["linear_attention", "moe", "full_attention", "mlp"], 4, 2, 12, 4, 16, 2, 8),
        nemotron(40, ["linear_attention", "moe", "linear_attention", "moe", "full_attention"], 5, 5, 8, 6, 8, 3, 12,
                 moe_latent_size=24, n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=2.5, conv_kernel=3,
                 use_conv_bias=False, layer_norm_epsilon=1e-4),
        nemotron(32, ["mlp", "full_attention", "mlp", "linear_attention"], 4, 1, 12, 8, 8, 1, 8, time_step_min=0.5),
    ),  # fmt: skip
    "kimi_linear": (
        T.KimiLinearConfig,
        latent_experts(48, 4, 4, num_local_experts=8, num_experts_per_tok=2, n_shared_experts=1, rms_norm_eps=1e-4,
            layer_types=["linear_attention"] * 3 + ["full_attention"], pad_token_id=0, **kda(3, 10)),
        latent_experts(42, 3, 3, q_lora_rank=20, num_local_experts=8, num_experts_per_tok=4, n_shared_experts=2,
            attention_bias=True, n_group=4, topk_group=2, norm_topk_prob=False, mlp_layer_types=["sparse", "dense", "sparse"],
            layer_types=["full_attention", "linear_attention", "full_attention"], pad_token_id=0,
            **kda(5, 7, linear_conv_kernel_dim=3)),
        latent_experts(35, 5, 5, num_local_experts=4, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.0,
            pad_token_id=0, **kda(2, 8)),
    ),  # fmt: skip
    "olmo_hybrid": (
        T.OlmoHybridConfig,
        sizes(48, 80, 4, 6, 2, None, pad_token_id=0, rope_parameters=dict(rope_theta=None, rope_type="default"),
            **linear(3, 6, 10, 7)),
        sizes(40, 56, 3, 5, 5, None, pad_token_id=0, rms_norm_eps=1e-3, rope_parameters=rope("linear", 5e5, factor=2.0),
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            **linear(4, 4, 6, 9, linear_conv_kernel_dim=3, linear_allow_neg_eigval=False)),
        sizes(36, 40, 2, 3, 1, None, pad_token_id=0, **TIED),
    ),  # fmt: skip
    "lara_mini": (
        T.LaraMiniConfig,
        without_ffn(48, 5, 6, 2, 8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=7,
            shared_expert_intermediate_size=20, rms_norm_eps=1e-4, tie_word_embeddings=False, **linear(3, 6, 10, 7)),
        without_ffn(40, 3, 5, 1, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, sliding_window=9,
            shared_expert_intermediate_size=12, norm_topk_prob=False, attention_bias=True, rms_norm_eps=1e-3,
            layer_types=["sliding_attention", "linear_attention", "linear_attention"], tie_word_embeddings=False,
            **linear(4, 4, 6, 9, linear_conv_kernel_dim=3)),
        without_ffn(24, 4, 3, 3, 16, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=12, sliding_window=5,
            shared_expert_intermediate_size=8, rope_parameters=rope(theta=1e6), **linear(1, 3, 8, 8)),
    ),  # fmt: skip
    "qwen3_5": (
        T.Qwen3_5TextConfig,
        sizes(48, 80, 4, 6, 2, 8, rms_norm_eps=1e-4, **linear(3, 6, 10, 7)),
        sizes(40, 56, 3, 5, 1, 16, attention_bias=True, rope_parameters=rope(theta=1e6, partial_rotary_factor=0.5),
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            **linear(4, 4, 6, 9, linear_conv_kernel_dim=3)),
        sizes(24, 40, 2, 3, 3, 16, layer_types=["linear_attention", "full_attention"], **linear(1, 3, 8, 8), **TIED),
    ),  # fmt: skip
    "qwen3_5_moe": (
        T.Qwen3_5MoeTextConfig,
        sizes(48, 80, 4, 6, 2, 8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=20, rms_norm_eps=1e-4, **linear(3, 6, 10, 7)),
        sizes(40, 56, 3, 5, 1, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
            shared_expert_intermediate_size=12, attention_bias=True, rms_norm_eps=1e-3,
            layer_types=["full_attention", "linear_attention", "linear_attention"], **linear(4, 4, 6, 9)),
        sizes(24, 40, 2, 3, 3, 16, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=12,
            shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"], **linear(1, 3, 8, 8),
            **TIED),
    ),  # fmt: skip
    "smollm3": (
        T.SmolLM3Config,
        sizes(48, 80, 5, 6, 2, None, pad_token_id=0),
        sizes(40, 56, 3, 5, 1, None, pad_token_id=0, no_rope_layers=[0, 1, 1], tie_word_embeddings=False, attention_bias=True),
        sizes(36, 40, 2, 3, 3, None, pad_token_id=0, no_rope_layer_interval=2, mlp_bias=True, rope_parameters=yarn(4.0, 5e6)),
    ),
    "glm4_moe": (
        T.Glm4MoeConfig,
        sizes(48, 80, 3, 6, 2, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=2, attention_bias=True,
            use_qk_norm=True, routed_scaling_factor=2.5),
        sizes(40, 56, 2, 5, 1, 12, moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
            first_k_dense_replace=0, norm_topk_prob=False, rope_parameters=rope(theta=1e6, partial_rotary_factor=0.5)),
        sizes(24, 40, 3, 3, 3, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=4, n_group=4,
            topk_group=2, first_k_dense_replace=2, rope_parameters=rope(partial_rotary_factor=0.25), **TIED),
    ),  # fmt: skip
    "minimax_m2": (
        T.MiniMaxM2Config,
        sizes(48, 28, 3, 6, 2, 8, num_local_experts=8, num_experts_per_tok=2, rotary_dim=4),
        sizes(40, 20, 2, 5, 1, 16, num_local_experts=6, num_experts_per_tok=3),
        sizes(24, 24, 2, 3, 3, 12, num_local_experts=5, num_experts_per_tok=2, rotary_dim=8, **TIED),
    ),
    "dots1": (
        T.Dots1Config,
        sizes(48, 80, 3, 6, 2, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2,
            first_k_dense_replace=1, norm_topk_prob=True, sliding_window=7, max_window_layers=2),
        sizes(40, 56, 2, 5, 1, 12, moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
            sliding_window=None, routed_scaling_factor=2.5),
        sizes(24, 40, 2, 3, 3, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=4, n_shared_experts=1,
            n_group=4, topk_group=2, sliding_window=5, layer_types=["full_attention", "sliding_attention"], **TIED),
    ),  # fmt: skip
    "solar_open": (
        T.SolarOpenConfig,
        sizes(48, 80, 3, 6, 2, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=2, attention_bias=True),
        sizes(40, 56, 2, 5, 1, 12, moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
            norm_topk_prob=False, routed_scaling_factor=2.5),
        sizes(24, 40, 2, 3, 3, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=4, n_group=4,
            topk_group=2, rope_parameters=yarn(4.0), **TIED),
    ),  # fmt: skip
    "hy_v3": (
        T.HYV3Config,
        sizes(48, 80, 3, 6, 2, 8, moe_intermediate_size=20, num_experts=8, num_experts_per_tok=2),
        sizes(40, 56, 3, 5, 1, 12, moe_intermediate_size=12, num_experts=6, num_experts_per_tok=3, num_shared_experts=2,
            router_scaling_factor=1.5, mlp_layer_types=["sparse", "dense", "sparse"]),
        sizes(24, 40, 2, 3, 3, 8, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2, attention_bias=True,
            rope_parameters=rope(theta=1e6), **TIED),
    ),  # fmt: skip
    "ernie4_5": (
        T.Ernie4_5Config,
        sizes(48, 80, 3, 6, 2, 8),
        sizes(40, 56, 2, 5, 1, 12, use_bias=True, tie_word_embeddings=False),
        sizes(36, 40, 2, 3, 3, 14, rope_parameters=rope(theta=1e4)),
    ),
    "seed_oss": (
        T.SeedOssConfig,
        sizes(48, 80, 3, 6, 2, 8, attention_dropout=0.0, residual_dropout=0.0),
        sizes(40, 56, 2, 5, 1, 12, attention_out_bias=True, mlp_bias=True, rope_parameters=rope(theta=1e7)),
        sizes(36, 40, 2, 3, 3, 14, attention_bias=False, rope_parameters=yarn(4.0), **TIED),
    ),
    "gemma": (
        T.GemmaConfig,
        sizes(48, 80, 3, 6, 2, 8),
        sizes(40, 56, 2, 5, 1, 16, rms_norm_eps=1e-5),
        sizes(24, 40, 2, 3, 3, 12, attention_bias=True, tie_word_embeddings=False),
    ),
    "exaone4": (
        T.Exaone4Config,
        sizes(48, 80, 5, 6, 2, 8, sliding_window=7),
        sizes(40, 56, 3, 5, 1, 12, sliding_window=9, sliding_window_pattern=2, rope_parameters=LLAMA3, **TIED),
        sizes(36, 40, 2, 3, 3, None, sliding_window=None, layer_types=["full_attention"] * 2),
    ),
    "youtu": (
        T.YoutuConfig,
        latent(48, 3, 4, q_lora_rank=20),
        latent(42, 2, 3, q_lora_rank=None, rope_interleave=False, tie_word_embeddings=False),
        latent(35, 2, 5, q_lora_rank=12, rope_parameters=yarn(40.0, mscale=1.0, mscale_all_dim=1.0)),
    ),
    "starcoder2": (
        T.Starcoder2Config,
        sizes(48, 80, 3, 6, 2, None),
        sizes(40, 56, 2, 5, 1, None, sliding_window=7, use_bias=False, tie_word_embeddings=False),
        sizes(36, 40, 2, 3, 3, None, norm_epsilon=1e-4, rope_parameters=rope(theta=1e6)),
    ),
    "stablelm": (
        T.StableLmConfig,
        sizes(96, 80, 3, 6, 2, None),
        sizes(80, 56, 2, 5, 1, None, use_qkv_bias=True, rope_parameters=rope(theta=1e6, partial_rotary_factor=0.5)),
        sizes(36, 40, 2, 3, 3, None, layer_norm_eps=1e-4, use_parallel_residual=True,
            rope_parameters=rope(partial_rotary_factor=1.0), **TIED),
    ),
    "exaone_moe": (
        T.ExaoneMoeConfig,
        sizes(48, 80, 5, 6, 2, 8, pad_token_id=0, sliding_window=7, moe_intermediate_size=20, num_experts=8,
            num_experts_per_tok=2),
        sizes(40, 56, 2, 5, 1, 12, pad_token_id=0, sliding_window=9, sliding_window_pattern=2, moe_intermediate_size=12,
            num_experts=6, num_experts_per_tok=3, num_shared_experts=2, norm_topk_prob=False, first_k_dense_replace=0),
        sizes(24, 40, 3, 3, 3, 8, sliding_window=5, moe_intermediate_size=20, num_experts=8, num_experts_per_tok=4,
            n_group=4, topk_group=2, mlp_layer_types=["sparse", "dense", "sparse"], **TIED),
    ),  # fmt: skip
    "flex_olmo": (
        T.FlexOlmoConfig,
        sizes(48, 28, 3, 6, 2, None, pad_token_id=0, num_experts=8, num_experts_per_tok=3),
        sizes(40, 24, 2, 5, 5, None, pad_token_id=0, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, **TIED),
        sizes(36, 20, 2, 3, 1, None, pad_token_id=0, num_experts=5, num_experts_per_tok=1, attention_bias=False,
            rope_parameters=rope(theta=1e4)),
    ),  # fmt: skip
    "ministral": (
        T.MinistralConfig,
        sizes(48, 80, 3, 6, 2, 8, sliding_window=7),
        sizes(40, 56, 4, 5, 1, 16, sliding_window=5, layer_types=["full_attention", "sliding_attention"] * 2),
        sizes(24, 40, 2, 3, 3, 12, sliding_window=9, rope_parameters=yarn(4.0), **TIED),
    ),
    "cwm": (
        T.CwmConfig,
        sizes(48, 80, 5, 6, 2, 8, sliding_window=7),
        sizes(40, 56, 2, 5, 1, 16, sliding_window=5, layer_types=["full_attention"] * 2, rope_parameters=rope(theta=1e4)),
        sizes(24, 40, 3, 3, 3, 8, sliding_window=9, mlp_bias=True, rope_parameters=LLAMA3, **TIED),
    ),
    "glm": (
        T.GlmConfig,
        sizes(48, 80, 3, 6, 2, 12, pad_token_id=0, rope_parameters=rope(partial_rotary_factor=0.5)),
        sizes(40, 56, 2, 5, 1, 16, pad_token_id=0, attention_bias=False, rms_norm_eps=1e-5,
            rope_parameters=rope(theta=1e6, partial_rotary_factor=0.25)),
        sizes(36, 40, 2, 3, 3, 8, pad_token_id=0, rope_parameters=rope(partial_rotary_factor=1.0), **TIED),
    ),  # fmt: skip
    "glm4": (
        T.Glm4Config,
        sizes(48, 80, 3, 6, 2, 12, pad_token_id=0, rope_parameters=rope(partial_rotary_factor=0.5)),
        sizes(40, 56, 2, 5, 1, 16, pad_token_id=0, attention_bias=False, rms_norm_eps=1e-5,
            rope_parameters=rope(theta=1e6, partial_rotary_factor=0.25)),
        sizes(36, 40, 2, 3, 3, 8, pad_token_id=0, rope_parameters=rope(partial_rotary_factor=1.0), **TIED),
    ),  # fmt: skip
    "granite": (
        T.GraniteConfig,
        sizes(48, 80, 3, 6, 2, None, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.2,
            logits_scaling=3.0),
        sizes(40, 56, 2, 5, 5, None, attention_bias=True, mlp_bias=True, residual_multiplier=1.7, rope_parameters=LLAMA3,
            **TIED),
        sizes(36, 40, 2, 3, 1, None, attention_multiplier=12**-0.5, logits_scaling=0.3),
    ),  # fmt: skip
    "vaultgemma": (
        T.VaultGemmaConfig,
        sizes(48, 80, 3, 6, 2, 8, sliding_window=7),
        sizes(40, 56, 2, 5, 1, 16, sliding_window=5, attn_logit_softcapping=None, final_logit_softcapping=None,
            query_pre_attn_scalar=24, rms_norm_eps=1e-5),
        sizes(24, 40, 2, 3, 3, 12, layer_types=["sliding_attention"] * 2, sliding_window=9, attention_bias=True,
            tie_word_embeddings=False),
    ),  # fmt: skip
    "hyperclovax": (
        T.HyperCLOVAXConfig,
        sizes(48, 80, 3, 6, 2, 12, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.2,
            logits_scaling=3.0),
        sizes(40, 56, 2, 5, 5, None, logits_scaling=0.3, rope_parameters=LLAMA3, **TIED),
        sizes(36, 40, 2, 3, 1, None, use_post_norm=False, attention_bias=True, mlp_bias=True),
    ),  # fmt: skip
    "granitemoe": (
        T.GraniteMoeConfig,
        sizes(48, 24, 3, 6, 2, None, num_local_experts=8, num_experts_per_tok=2, embedding_multiplier=12.0,
            residual_multiplier=0.22, attention_multiplier=0.2, logits_scaling=3.0),
        sizes(40, 20, 2, 5, 5, None, num_local_experts=6, num_experts_per_tok=3, attention_bias=True, **TIED),
        sizes(36, 28, 2, 3, 1, None, num_local_experts=5, num_experts_per_tok=1, residual_multiplier=1.7),
    ),  # fmt: skip
    "granitemoeshared": (
        T.GraniteMoeSharedConfig,
        sizes(48, 24, 3, 6, 2, None, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=40,
            residual_multiplier=0.22, attention_multiplier=0.2, logits_scaling=3.0),
        sizes(40, 20, 2, 5, 5, None, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=20, **TIED),
        sizes(36, 28, 2, 3, 1, None, num_local_experts=5, num_experts_per_tok=2, attention_bias=True),
    ),  # fmt: skip
    "glm4_moe_lite": (
        T.Glm4MoeLiteConfig,
        latent_experts(48, 3, 4, q_lora_rank=20, n_routed_experts=8, num_experts_per_tok=2, rms_norm_eps=0.01),
        latent_experts(42, 2, 3, q_lora_rank=None, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=2,
            mlp_layer_types=["sparse", "dense"], norm_topk_prob=False),
        latent_experts(35, 2, 5, q_lora_rank=12, rope_interleave=False, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
            rope_parameters=yarn(40.0, mscale=1.0, mscale_all_dim=1.0), **TIED),
    ),  # fmt: skip
    "minicpm3": (
        T.MiniCPM3Config,
        latent(48, 3, 4, q_lora_rank=20, dim_model_base=16, rms_norm_eps=0.01),
        latent(42, 2, 3, q_lora_rank=None, scale_emb=3, scale_depth=None, dim_model_base=None, tie_word_embeddings=False),
        latent(35, 2, 5, q_lora_rank=12, scale_depth=0.7, attention_bias=True, mlp_bias=True, dim_model_base=40),
    ),
    "afmoe": (
        T.AfmoeConfig,
        sizes(48, 80, 5, 6, 2, 8, sliding_window=7, moe_intermediate_size=20, num_experts=8, num_experts_per_tok=2,
            mup_enabled=True, route_scale=2.5),
        sizes(40, 56, 2, 5, 1, 12, sliding_window=9, global_attn_every_n_layers=2, moe_intermediate_size=12, num_experts=6,
            num_experts_per_tok=3, num_shared_experts=1, num_dense_layers=0),
        sizes(24, 40, 3, 3, 3, 8, sliding_window=5, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"], rope_parameters=LLAMA3, **TIED),
    ),  # fmt: skip
    "gpt_bigcode": (
        T.GPTBigCodeConfig,
        gpt2(48, 3, 6),
        gpt2(40, 2, 5, n_inner=56, layer_norm_epsilon=1e-4, activation_function="gelu"),
        gpt2(24, 2, 3, tie_word_embeddings=False),
    ),
    "gpt_neox": (
        T.GPTNeoXConfig,
        neox(sizes(96, 80, 3, 6, None, None)),
        neox(sizes(40, 56, 2, 5, None, None, hidden_act="gelu_new", attention_bias=False, layer_norm_eps=1e-4,
            rope_parameters=rope(theta=1e6, partial_rotary_factor=0.5))),
        neox(sizes(36, 40, 2, 3, None, None, use_parallel_residual=False,
            rope_parameters=rope(partial_rotary_factor=1.0), **TIED)),
    ),  # fmt: skip
    "falcon": (
        T.FalconConfig,
        falcon(48, 3, 6),
        falcon(48, 2, 6, new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=56,
            layer_norm_epsilon=1e-4, tie_word_embeddings=False),
        falcon(36, 2, 3, multi_query=False, parallel_attn=False, activation="gelu_new", rope_parameters=rope(theta=1e6)),
    ),  # fmt: skip
    "cohere": (
        T.CohereConfig,
        sizes(48, 80, 3, 6, 2, None, logit_scale=0.5),
        sizes(40, 56, 2, 5, 5, None, attention_bias=True, layer_norm_eps=1e-4, tie_word_embeddings=False),
        sizes(36, 40, 2, 3, 1, 16, logit_scale=1.0, rope_parameters=rope(theta=1e4)),
    ),
    "cohere2": (
        T.Cohere2Config,
        sizes(48, 80, 5, 6, 2, None, sliding_window=7, logit_scale=0.5),
        sizes(40, 56, 2, 5, 5, None, sliding_window=9, layer_types=["full_attention", "sliding_attention"],
            tie_word_embeddings=False),
        sizes(36, 40, 2, 3, 1, None, sliding_window=5, attention_bias=True, layer_types=["sliding_attention"] * 2),
    ),  # fmt: skip
    "helium": (
        T.HeliumConfig,
        sizes(48, 80, 3, 6, 2, 8, attention_bias=True),
        sizes(60, 56, 2, 5, 1, 12, rope_parameters=rope(theta=1e4), **TIED),
        sizes(42, 40, 2, 3, 3, 14, mlp_bias=True),
    ),
    "arcee": (
        T.ArceeConfig,
        sizes(48, 80, 3, 6, 2, 8, attention_bias=True),
        sizes(40, 56, 2, 5, 1, 16, rope_parameters=yarn(4.0), **TIED),
        sizes(36, 40, 2, 3, 3, 12, mlp_bias=True, rope_parameters=rope(theta=1e6)),
    ),
    "jais2": (
        T.Jais2Config,
        sizes(48, 80, 3, 6, 2, 8),
        sizes(40, 56, 2, 5, 1, 16, attention_bias=False, mlp_bias=False, rope_parameters=LLAMA3, **TIED),
        sizes(36, 40, 2, 3, 3, 12, attention_bias=False, layer_norm_eps=1e-3),
    ),
    "nemotron": (
        T.NemotronConfig,
        sizes(48, 80, 3, 6, 2, 8),
        sizes(40, 56, 2, 5, 1, 16, attention_bias=True, mlp_bias=True, norm_eps=1e-3,
            rope_parameters=rope(theta=1e6, partial_rotary_factor=0.25), **TIED),
        sizes(36, 40, 2, 3, 3, 10, mlp_bias=True, rope_parameters=rope(partial_rotary_factor=1.0)),
    ),  # fmt: skip
    "internlm3": (
        T.InternLM3Config,
        sizes(48, 80, 3, 6, 2, 8, attention_bias=True, mlp_bias=True),
        sizes(40, 56, 2, 5, 1, 16, rope_parameters=LLAMA3),
        sizes(36, 40, 2, 3, 3, 12, **TIED),
    ),
    "iquestcoder": (
        T.IQuestCoderConfig,
        sizes(48, 80, 3, 6, 2, 8),
        sizes(40, 56, 2, 5, 1, 16, attention_bias=True, rope_parameters=rope(theta=5e5)),
        sizes(36, 40, 2, 3, 3, 12, mlp_bias=True, **TIED),
    ),
    "exaone3": (
        T.ExaoneConfig,
        sizes(48, 80, 3, 6, 2, 8),
        sizes(40, 56, 2, 5, 1, None, rope_parameters=LLAMA3, **TIED),
        sizes(36, 40, 2, 3, 3, None, attention_bias=True, rms_norm_eps=1e-3),
    ),
    "sarvam_moe": (
        T.SarvamMoEConfig,
        sizes(48, 80, 3, 6, 2, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=2),
        sizes(40, 56, 2, 5, 1, 12, moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, attention_bias=True,
            first_k_dense_replace=0, norm_topk_prob=False, use_qk_norm=False),
        sizes(24, 40, 3, 3, 3, 8, moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=4, n_shared_experts=2,
            n_group=4, topk_group=2, first_k_dense_replace=2, **TIED),
    ),  # fmt: skip
    "sarvam_mla": (
        T.SarvamMLAConfig,
        latent_experts(48, 3, 4, n_routed_experts=8, num_experts_per_tok=4, n_shared_experts=1),
        latent_experts(40, 2, 3, q_lora_rank=20, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
            first_k_dense_replace=0),
        latent_experts(32, 2, 5, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=4, topk_group=2,
            rope_parameters=yarn(40.0, mscale=1.0, mscale_all_dim=1.0), **TIED),
    ),  # fmt: skip
    "mellum": (
        T.MellumConfig,
        sizes(48, 80, 4, 6, 2, 8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=7,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]),
        sizes(40, 56, 2, 5, 1, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=False,
            sliding_window=5, layer_types=["full_attention", "sliding_attention"], mlp_layer_types=["dense", "sparse"],
            rope_parameters=dict(full_attention=yarn(4.0, 5e5), sliding_attention=rope())),
        sizes(24, 40, 3, 3, 3, 8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=12, attention_bias=True, **TIED),
    ),  # fmt: skip
    "flint": (
        T.FlintConfig,
        sizes(48, 80, 5, 6, 2, 8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=7,
            shared_expert_intermediate_size=20),
        sizes(40, 56, 4, 5, 1, 16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=False,
            sliding_window=5, shared_expert_intermediate_size=12, mlp_only_layers=[], decoder_sparse_step=2,
            layer_types=["full_attention", "sliding_attention"] * 2, attention_bias=True),
        sizes(24, 40, 3, 3, 3, 8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=12, sliding_window=9,
            shared_expert_intermediate_size=28, mlp_only_layers=[1], norm_topk_prob=False, rope_parameters=rope(theta=5e5), **TIED),
    ),  # fmt: skip
    "granite_swa": (
        T.GraniteSWAConfig,
        sizes(48, 80, 5, 6, 2, None, sliding_window=7, embedding_multiplier=12.0, residual_multiplier=0.22,
            attention_multiplier=0.2, logits_scaling=3.0, layer_rope_theta=[0, 1e4, 1e4, 1e4, 0]),
        sizes(40, 56, 2, 5, 5, None, sliding_window=5, attention_bias=True, mlp_bias=True, rope_parameters=rope(theta=5e5),
            layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False),
        sizes(36, 40, 2, 3, 1, None, sliding_window=9, layer_rope_theta=[5e5, 0], residual_multiplier=1.7),
    ),  # fmt: skip
    "granitemoe_swa": (
        T.GraniteMoeSWAConfig,
        sizes(48, 28, 5, 6, 2, None, num_local_experts=8, num_experts_per_tok=2, sliding_window=7, attention_multiplier=0.2,
            shared_intermediate_size=20, layer_rope_theta=[0, 1e4, 1e4, 1e4, 0]),
        sizes(40, 24, 2, 5, 5, None, num_local_experts=6, num_experts_per_tok=3, sliding_window=5, attention_bias=True,
            rope_parameters=rope(theta=5e5), layer_types=["sliding_attention", "full_attention"], logits_scaling=2.0),
        sizes(36, 20, 2, 3, 1, None, num_local_experts=5, num_experts_per_tok=1, sliding_window=9,
            layer_rope_theta=[5e5, 0], residual_multiplier=0.5, **TIED),
    ),  # fmt: skip
    "phi": (
        T.PhiConfig,
        sizes(48, 80, 3, 6, 2, None),
        sizes(40, 56, 2, 5, 5, None, layer_norm_eps=1e-3, rope_parameters=rope(theta=1e6, partial_rotary_factor=0.25), **TIED),
        sizes(36, 40, 2, 3, 1, None, hidden_act="gelu", rope_parameters=rope(partial_rotary_factor=1.0)),
    ),
    "gptj": (
        T.GPTJConfig,
        gpt2(48, 3, 6, rotary_dim=4, bos_token_id=1, eos_token_id=2),
        gpt2(40, 2, 5, rotary_dim=8, n_inner=56, layer_norm_epsilon=1e-3, bos_token_id=1, eos_token_id=2),
        gpt2(36, 2, 3, rotary_dim=6, activation_function="gelu", bos_token_id=1, eos_token_id=2, **TIED),
    ),
    "aria": (
        T.AriaTextConfig,
        sizes(48, 28, 3, 6, 2, 8, moe_num_experts=8, moe_topk=2, moe_num_shared_experts=2),
        sizes(40, 24, 2, 5, 1, 8, moe_num_experts=6, moe_topk=3, moe_num_shared_experts=1, attention_bias=True,
            rope_parameters=rope(theta=5e6)),
        sizes(36, 20, 2, 3, 3, 12, moe_num_experts=5, moe_topk=1, moe_num_shared_experts=3, **TIED),
    ),  # fmt: skip
}


def open_model(folder, dtype):
    experts = "experts" in open(f"{folder}/config.json").read()
    kinds = dict(attn_implementation="eager", **({"experts_implementation": "eager"} if experts else {}))
    return T.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kinds)


def read_ids(path):
    return torch.tensor([[int(x) for x in line.split()] for line in open(path)])


def make(out, ids, *classes):
    for name, (config, *keys) in CASES.items():
        for i, k in enumerate(keys):
            if classes and name not in classes:
                continue
            torch.manual_seed(17 * i + len(name))
            model = T.AutoModelForCausalLM.from_config(config(**k)).float()
            with torch.no_grad():  # norms and biases, too, are no round numbers
                for p in model.parameters():
                    p += 0.05 * torch.randn_like(p)
                for b in (b for n, b in model.named_buffers() if "correction_bias" in n):
                    b += 0.3 * torch.randn_like(b)
            folder = f"{out}/{name}-{i}"
            model.save_pretrained(folder, max_shard_size="40KB" if i else "5GB")
            np.save(f"{folder}/want.npy", open_model(folder, torch.float64)(read_ids(ids)).logits.detach().numpy())


def alike(name, x, y, model):
    """The same numbers; Gemma's and Nemotron's norms w were 1 + w in between, so they are the same to the rounding of that."""
    if "norm" in name and model.config.model_type.startswith(("gemma", "vaultgemma", "nemotron", "qwen3_next", "qwen3_5")):
        return bool(((x - y).abs() <= 2.0**-23).all())
    return torch.equal(x, y)


def opens(export, original, ids):
    """What is wrong with an export, or nothing; of a class that is written as another one the tensors may differ, and
    the logits are the same."""
    try:
        a, said = T.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True, dtype=torch.float32)
    except Exception as e:
        return str(e).replace("\n", " ")
    b = open_model(original, torch.float32)
    said = {k: v for k, v in said.items() if v}
    if said:
        return str(said)
    one, other = a.state_dict(), b.state_dict()
    if type(a) is type(b) and (one.keys() != other.keys() or not all(alike(n, one[n], other[n], a) for n in other)):
        return f"is not {original}"
    with torch.no_grad():
        got = open_model(export, torch.float64).eval()(read_ids(ids), use_cache=False).logits.numpy()
    want = np.load(f"{original}/want.npy")
    gap = np.abs(got - want).max() / np.abs(want).max()
    return "" if gap < 1e-6 else f"has logits that differ by {gap:.2e}"


def differ(got, want):
    if not os.path.exists(got):
        return "none"
    a, b = np.load(got), np.load(want)
    return f"{np.abs(a - b).max() / np.abs(b).max():.2e}" if a.shape == b.shape else f"{a.shape}-{b.shape}"


def compare(originals, runs, exports, ids):
    for case in sorted(os.listdir(originals)):
        figure = differ(f"{runs}/{case}/got.npy", f"{originals}/{case}/want.npy")
        has = os.path.exists(f"{exports}/{case}")
        print(case, figure, opens(f"{exports}/{case}", f"{originals}/{case}", ids) if has else "")


def rewrite(source, out, change, config=lambda c: c):
    """A copy of a folder, in one file, with other tensors."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*", "*.npy"))
    tensors = {}
    for name in sorted(os.listdir(source)):
        if name.endswith(".safetensors"):
            tensors.update(load_file(f"{source}/{name}"))
    save_file({k: v.contiguous() for k, v in change(tensors).items()}, f"{out}/model.safetensors", {"format": "pt"})
    c = config(json.load(open(f"{out}/config.json")))
    json.dump(c, open(f"{out}/config.json", "w"))


def fp8(source, out):
    B = 128
    torch.manual_seed(3)

    def split(tensors, plain):
        result = {}
        for name, w in tensors.items():
            if w.dim() != 2 or not name.endswith("_proj.weight"):
                result[name] = w
                continue
            rows, columns = -(-w.shape[0] // B), -(-w.shape[1] // B)
            scale = 0.01 + torch.rand(rows, columns)
            wide = scale.repeat_interleave(B, 0).repeat_interleave(B, 1)[: w.shape[0], : w.shape[1]]
            q = (w / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            if plain:
                result[name] = q.float() * wide
            else:
                result.update({name: q, name + "_scale_inv": scale})
        return result

    said = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[B, B])
    rewrite(source, out, lambda t: split(t, False), lambda c: dict(c, quantization_config=said))
    torch.manual_seed(3)
    rewrite(source, out + ".plain", lambda t: split(t, True))


def mxfp4(source, out):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    torch.manual_seed(4)

    def split(tensors, plain):
        result = {}
        for name, w in tensors.items():
            if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
                result[name] = w
                continue
            E, inputs, outputs = w.shape
            codes = torch.randint(16, (E, outputs, inputs // 32, 32), dtype=torch.uint8)
            powers = torch.randint(115, 126, (E, outputs, inputs // 32), dtype=torch.uint8)
            if plain:
                wide = values[codes.long()] * torch.exp2(powers.float() - 127)[..., None]
                result[name] = wide.reshape(E, outputs, inputs).transpose(1, 2)
            else:
                result[name + "_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
                result[name + "_scales"] = powers
        return result

    said = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"])
    rewrite(source, out, lambda t: split(t, False), lambda c: dict(c, quantization_config=said))
    torch.manual_seed(4)
    rewrite(source, out + ".plain", lambda t: split(t, True))


def mtp(source, out):
    c = json.load(open(f"{source}/config.json"))
    L, h = c["num_hidden_layers"], c["hidden_size"]
    torch.manual_seed(5)

    def more(tensors):
        last, new = f"model.layers.{L - 1}.", f"model.layers.{L}."
        block = {new + k[len(last) :]: v + 0.1 * torch.randn_like(v) for k, v in tensors.items() if k.startswith(last)}
        block[new + "eh_proj.weight"] = torch.randn(h, 2 * h)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            block[f"{new}{name}.weight"] = torch.randn(h)
        block[new + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        block[new + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        return {**tensors, **block}

    rewrite(source, out, more, lambda c: dict(c, num_nextn_predict_layers=1))


def text(originals, exports, prompt, count, to):
    os.makedirs(to)
    for case in sorted(c for c in os.listdir(originals) if c.endswith("-0")):
        tokenizer = T.AutoTokenizer.from_pretrained(f"{exports}/{case}")
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        model, row = open_model(f"{originals}/{case}", torch.float64).eval(), torch.tensor([ids])
        for _ in range(int(count)):
            with torch.no_grad():
                token = model(row, use_cache=False).logits[0, -1, : len(tokenizer)].argmax()  # (rows that have tokens)
            row = torch.cat([row, token.view(1, 1)], 1)
        print(*ids, file=open(f"{to}/{case}.ids", "w"))
        said = tokenizer.decode(row[0]).replace("<|endoftext|>", "\n").replace("\x02", "\n")  # (ends: eos_token_id is 2)
        open(f"{to}/{case}.theirs", "w").write(said + "\n")


def loss_of(model, x):
    out = model(x[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), x[:, 1:].reshape(-1))


def sgd(originals, tokens, batch, lr):
    rows, batch = torch.from_numpy(np.load(tokens).astype(np.int64)), int(batch)
    for case in sorted(c for c in os.listdir(originals) if c.endswith("-0")):
        model = open_model(f"{originals}/{case}", torch.float64).eval()  # (no dropout)
        loss = loss_of(model, rows[:batch])
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= float(lr) * p.grad
            print(f"{case} {loss.item():.9f} {loss_of(model, rows[batch : 2 * batch]).item():.9f}")


def train(folder, tokens, steps, batch, seq, lr):
    steps, batch, seq, lr = int(steps), int(batch), int(seq), float(lr)
    rows = torch.from_numpy(np.load(tokens).astype(np.int64))
    model = open_model(folder, torch.float64).train()
    # (convolutions of single channels do not decay, nor do rates that have a dim too many)
    decays = lambda name, p: p.dim() > 1 and "conv1d" not in name and "A_log" not in name
    groups = [dict(params=[p for n, p in model.named_parameters() if decays(n, p) == some], weight_decay=0.1 * some)
        for some in (True, False)]  # fmt: skip
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    for step in range(steps):
        x = rows[step * batch : (step + 1) * batch]
        loss = loss_of(model, x)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        print(f"{step + 1} {loss.item():.9f}")


if __name__ == "__main__":
    dict(make=make, compare=compare, fp8=fp8, mxfp4=mxfp4, mtp=mtp, train=train, sgd=sgd, text=text)[sys.argv[1]](*sys.argv[2:])
