/*
 * The keys of config.json, by class: what they are a name for (HfModel), or the values that alone are computed, or that
 * they change nothing. A key that has no row for a class is refused. Facts: the classes' own configurations in
 * transformers 4 and 5, and the files that the models were published with.
 */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "hf/model.h"

#define B(name) (1u << HF_##name)
#define ALL ((1u << HF_CLASSES) - 1)
#define LATENT (B(DEEPSEEK_V2) | B(DEEPSEEK_V3))
#define GEMMA (B(GEMMA2) | B(GEMMA3))
#define ROTARY (ALL & ~B(GPT2))
#define PLAIN (ROTARY & ~LATENT) /* heads of one width */
#define MIXTURE (B(QWEN3_MOE) | B(MIXTRAL) | B(GPT_OSS) | LATENT)
#define QWEN (B(QWEN2) | B(QWEN3))
#define WINDOWED (B(MISTRAL) | B(MIXTRAL) | B(PHI3) | QWEN | B(QWEN3_MOE) | B(GPT_OSS) | GEMMA)
#define BIASED (B(LLAMA) | B(QWEN3) | B(QWEN3_MOE) | LATENT | B(GPT_OSS) | GEMMA | B(OLMO2))

#define KEY(kind_, classes_, name_, member_, meaning_, ...) \
    { .name = name_,                                        \
      .classes = classes_,                                  \
      .kind = HF_KEY_##kind_,                               \
      .offset = offsetof(HfModel, member_),                 \
      .meaning = meaning_,                                  \
      __VA_ARGS__ },
/* a number that is not 0 */
#define SIZE(classes_, name_, member_, meaning_, ...) \
    KEY(INT, classes_, name_, member_, meaning_, .low = 1, __VA_ARGS__)
#define FIXED(classes_, name_, values_, meaning_) \
    { .name = name_, .classes = classes_, .kind = HF_KEY_FIXED, .values = values_, .meaning = meaning_ },
/* of a name that other programs do not need */
#define QUIET(classes_, name_, values_, meaning_) \
    { .name = name_,                              \
      .classes = classes_,                        \
      .kind = HF_KEY_FIXED,                       \
      .silent = true,                             \
      .values = values_,                          \
      .meaning = meaning_ },
#define IDLE(classes_, name_) { .name = name_, .classes = classes_, .kind = HF_KEY_IDLE, .silent = true },

const HfKey hf_keys[] = {
    /* sizes */
    SIZE(ALL, "vocab_size", vocab, "rows of the token table")
        SIZE(ROTARY, "max_position_embeddings", positions, "positions that the model is made for")
            SIZE(ROTARY, "hidden_size", hidden, "width of the residual stream")
                SIZE(ROTARY, "intermediate_size", ffn, "width of the feed-forward layer")
                    SIZE(ROTARY, "num_hidden_layers", layers, "blocks") SIZE(ROTARY, "num_attention_heads",
                                                                             heads, "query heads")
                        SIZE(ROTARY, "num_key_value_heads", kv_heads, "key and value heads", .nullable = true)
                            SIZE(PLAIN, "head_dim", head_dim, "width of a head", .nullable = true)
                                SIZE(B(GPT2), "n_positions", positions, "rows of the position table")
                                    SIZE(B(GPT2), "n_embd", hidden, "width of the residual stream")
                                        SIZE(B(GPT2), "n_layer", layers, "blocks")
                                            SIZE(B(GPT2), "n_head", heads, "heads")
                                                SIZE(B(GPT2), "n_inner", ffn,
                                                     "width of the feed-forward layer", .nullable = true)

    /* linear layers, norms, activations, dropout */
    FIXED(ROTARY & ~GEMMA, "hidden_act", "silu swish", "the activation of the feed-forward layer")
        FIXED(GEMMA, "hidden_activation", "gelu_pytorch_tanh", "the activation of the feed-forward layer")
            QUIET(GEMMA, "hidden_act", "gelu_pytorch_tanh", "the activation of the feed-forward layer")
                FIXED(B(GPT2), "activation_function", "gelu_new gelu_pytorch_tanh gelu_fast",
                      "the activation of the feed-forward layer") KEY(FLAG, ALL, "tie_word_embeddings", tied,
                                                                      "the head uses the token table")
                    KEY(FLAG, BIASED, "attention_bias", attention_bias, "biases in attention's linear layers")
                        KEY(FLAG, B(LLAMA), "mlp_bias", mlp_bias,
                            "biases in feed-forward layers") QUIET(B(DEEPSEEK_V2) | B(PHI3), "mlp_bias",
                                                                   "false", "biases in feed-forward layers")
                            QUIET(B(PHI3) | B(QWEN2) | B(MISTRAL) | B(MIXTRAL), "attention_bias", "false",
                                  "biases in attention's linear layers") QUIET(B(PHI3), "lm_head_bias",
                                                                               "false", "a bias of the head")
                                KEY(REAL, ROTARY, "rms_norm_eps", eps,
                                    "added to the mean square under a norm's root")
                                    KEY(REAL, B(GPT2), "layer_norm_epsilon", eps,
                                        "added to the variance under a norm's root")
                                        KEY(REAL, ALL, "initializer_range", init_std,
                                            "standard deviation of initial weights")
                                            KEY(REAL, ROTARY, "attention_dropout", attention_dropout,
                                                "dropout of attention weights", .nullable = true)
                                                KEY(REAL, B(GPT2), "attn_pdrop", attention_dropout,
                                                    "dropout of attention weights")
                                                    KEY(REAL, B(GPT2) | B(PHI3), "resid_pdrop",
                                                        branch_dropout, "dropout before each residual sum")
                                                        KEY(REAL, B(GPT2), "embd_pdrop", embedding_dropout,
                                                            "dropout after the embedding")

    /* attention */
    SIZE(WINDOWED, "sliding_window", window, "positions that a query sees", .nullable = true)
        KEY(FLAG, QWEN | B(QWEN3_MOE), "use_sliding_window", use_window, "sliding_window counts")
            KEY(INT, QWEN, "max_window_layers", full_layers, "blocks without a window, the first ones")
                KEY(INT, B(QWEN3_MOE), "max_window_layers", full_layers,
                    "blocks without a window, the first ones",
                    .silent = true) SIZE(B(GEMMA3), "sliding_window_pattern", period,
                                         "each block of so many has no window")
                    SIZE(B(GEMMA3), "_sliding_window_pattern", period, "each block of so many has no window",
                         .silent = true) KEY(TYPES, QWEN | B(GPT_OSS) | GEMMA, "layer_types", typed,
                                             "which blocks have a window", .nullable = true)
                        QUIET(GEMMA, "use_bidirectional_attention", "false", "queries see what follows them")
                            KEY(REAL, GEMMA, "attn_logit_softcapping", attention_cap, "cap of the scores",
                                .nullable = true) KEY(REAL, GEMMA, "final_logit_softcapping", final_cap,
                                                      "cap of the logits", .nullable = true)
                                KEY(REAL, GEMMA, "query_pre_attn_scalar", query_scalar,
                                    "scores are divided by its root")
                                    QUIET(B(GPT2), "scale_attn_weights", "true",
                                          "scores are divided by the root of a head's width")
                                        QUIET(B(GPT2), "scale_attn_by_inverse_layer_idx", "false",
                                              "scores are divided by the block's number, too")
                                            QUIET(B(GPT2), "reorder_and_upcast_attn", "false",
                                                  "scores are scaled in another order")
                                                QUIET(B(QWEN2) | B(QWEN3), "use_mrope", "false",
                                                      "positions in several axes")
                                                    QUIET(B(PHI3), "full_attn_mod", "1",
                                                          "blocks with attention of another kind")

    /* latent attention */
    SIZE(LATENT, "q_lora_rank", q_rank, "width of the queries' latent",
         .nullable = true) SIZE(LATENT, "kv_lora_rank", kv_rank, "width of the keys' and values' latent")
        SIZE(LATENT, "qk_nope_head_dim", nope, "columns of a head without positions")
            SIZE(LATENT, "qk_rope_head_dim", rope_dim, "columns of a head with positions")
                SIZE(LATENT, "v_head_dim", v_dim, "columns of a head's values")
                    KEY(FLAG, B(DEEPSEEK_V3), "rope_interleave", interleaved, "rotary pairs are neighbours")

    /* rotary positions */
    KEY(REAL, ROTARY, "rope_theta", theta, "base of the rotary angles")
        KEY(REAL, B(GEMMA3), "rope_local_base_freq", local_theta,
            "base of the rotary angles of blocks with a window")
            KEY(ROPE, ROTARY, "rope_scaling", rope_type, "how rotary angles are scaled", .nullable = true)
                KEY(ROPE, ROTARY, "rope_parameters", rope_type, "base and scaling of the rotary angles",
                    .nullable = true, .silent = true) KEY(REAL, B(PHI3), "partial_rotary_factor", partial,
                                                          "the part of a head's columns that turns")
                    QUIET(ROTARY & ~B(PHI3), "partial_rotary_factor", "1",
                          "only a part of a head's columns turns")

    /* experts */
    SIZE(B(MIXTRAL) | B(GPT_OSS) | B(QWEN3_MOE), "num_local_experts", experts,
         "experts") SIZE(B(QWEN3_MOE), "num_experts", experts,
                         "experts") KEY(INT, LATENT, "n_routed_experts", experts, "experts", .nullable = true)
        SIZE(MIXTURE, "num_experts_per_tok", topk, "experts of a token",
             .nullable = true) SIZE(B(GPT_OSS), "experts_per_token", topk, "experts of a token",
                                    .silent = true) SIZE(B(QWEN3_MOE) | LATENT, "moe_intermediate_size",
                                                         expert_ffn, "width of an expert")
            KEY(INT, LATENT, "n_shared_experts", shared, "experts that every token passes", .nullable = true)
                KEY(INT, LATENT, "first_k_dense_replace", first_dense,
                    "blocks without experts, the first ones") SIZE(B(QWEN3_MOE), "decoder_sparse_step",
                                                                   sparse_step,
                                                                   "each block of so many has experts")
                    KEY(LAYERS, B(QWEN3_MOE), "mlp_only_layers", dense,
                        "blocks without experts", .nullable = true) KEY(FLAG, B(QWEN3_MOE) | B(DEEPSEEK_V3),
                                                                        "norm_topk_prob", normalize,
                                                                        "weights are divided by their sum")
                        FIXED(B(DEEPSEEK_V2), "norm_topk_prob", "false", "weights are divided by their sum")
                            KEY(REAL, LATENT, "routed_scaling_factor",
                                scale, "multiplies the experts' weights") SIZE(LATENT, "n_group", groups,
                                                                               "groups of experts",
                                                                               .nullable = true)
                                SIZE(LATENT, "topk_group", group_topk, "groups that a token may be sent to",
                                     .nullable = true) KEY(WORD, B(DEEPSEEK_V2), "topk_method", method,
                                                           "how experts are chosen",
                                                           .values = "greedy group_limited_greedy")
                                    FIXED(B(DEEPSEEK_V3), "topk_method", "noaux_tc", "how experts are chosen")
                                        FIXED(B(DEEPSEEK_V2), "scoring_func", "softmax",
                                              "what the router makes of logits")
                                            FIXED(B(DEEPSEEK_V3), "scoring_func", "sigmoid",
                                                  "what the router makes of logits")
                                                FIXED(LATENT, "moe_layer_freq", "1",
                                                      "only each block of so many has experts")
                                                    KEY(INT, B(DEEPSEEK_V3), "num_nextn_predict_layers", mtp,
                                                        "modules of multi-token prediction")
                                                        KEY(REAL, B(GPT_OSS), "swiglu_limit", limit,
                                                            "bound of the experts' gates")
                                                            QUIET(B(GPT_OSS), "swiglu_alpha", "1.702",
                                                                  "factor inside of the experts' gates")
                                                                KEY(REAL, B(MIXTRAL), "router_jitter_noise",
                                                                    jitter,
                                                                    "noise on experts and router in training")
                                                                    KEY(INT, B(DEEPSEEK_V3), "num_mtp_layers",
                                                                        mtp,
                                                                        "modules of multi-token prediction",
                                                                        .silent = true)

    /* what a folder with a model is, too */
    KEY(STORE, ALL, "quantization_config", typed, "how weights are stored", .nullable = true, .silent = true)
        QUIET(ALL, "is_encoder_decoder", "false", "an encoder")
            QUIET(ALL, "add_cross_attention", "false", "attention to another sequence")
                QUIET(ALL, "cross_attention_hidden_size", "", "attention to another sequence")

    /* losses of training that megatrain has under keys of its own; how others compute and store */
    IDLE(MIXTURE, "router_aux_loss_coef") IDLE(MIXTURE, "output_router_logits") IDLE(LATENT, "aux_loss_alpha")
        IDLE(LATENT, "seq_aux") IDLE(LATENT, "ep_size") IDLE(B(LLAMA) | LATENT, "pretraining_tp")
            IDLE(LATENT, "head_dim") IDLE(LATENT, "qk_head_dim") IDLE(B(GPT_OSS), "initial_context_length")
                IDLE(B(PHI3), "embd_pdrop") IDLE(B(PHI3), "original_max_position_embeddings")
                    IDLE(B(PHI3), "interpolate_factor") IDLE(GEMMA, "cache_implementation")
                        IDLE(B(GPT2), "n_ctx") IDLE(B(GPT2), "summary_type") IDLE(B(GPT2), "summary_use_proj")
                            IDLE(B(GPT2), "summary_activation") IDLE(B(GPT2), "summary_proj_to_labels")
                                IDLE(B(GPT2), "summary_first_dropout")

    /* names, ids, text generation, other heads: of every class */
    IDLE(ALL, "model_type") IDLE(ALL, "architectures") IDLE(ALL, "auto_map") IDLE(
        ALL,
        "transformers_version") IDLE(ALL,
                                     "torch_dtype") IDLE(ALL,
                                                         "dtype") IDLE(ALL, "_name_or_path")
        IDLE(ALL, "name_or_path") IDLE(ALL, "_commit_hash") IDLE(ALL, "_attn_implementation") IDLE(
            ALL,
            "attn_implementation") IDLE(ALL, "_attn_implementation_autoset")
            IDLE(ALL, "_experts_implementation") IDLE(ALL, "use_cache") IDLE(ALL, "return_dict") IDLE(
                ALL,
                "output_hidden_states") IDLE(ALL, "output_attentions")
                IDLE(ALL, "torchscript") IDLE(ALL, "use_bfloat16") IDLE(ALL, "tf_legacy_loss") IDLE(
                    ALL,
                    "chunk_size_feed_forward") IDLE(ALL, "is_decoder")
                    IDLE(ALL, "tie_encoder_decoder") IDLE(ALL, "finetuning_task") IDLE(ALL, "id2label") IDLE(
                        ALL,
                        "label2id") IDLE(ALL, "num_labels")
                        IDLE(ALL, "task_specific_params") IDLE(ALL, "problem_type") IDLE(
                            ALL,
                            "prefix") IDLE(ALL,
                                           "tokenizer_class") IDLE(ALL,
                                                                   "bos_token_id") IDLE(ALL, "eos_token_id")
                            IDLE(ALL, "pad_token_id") IDLE(ALL,
                                                           "sep_token_id") IDLE(ALL, "decoder_start_token_id")
                                IDLE(ALL, "suppress_tokens") IDLE(ALL, "begin_suppress_tokens") IDLE(
                                    ALL,
                                    "max_length") IDLE(ALL, "min_length")
                                    IDLE(ALL, "do_sample") IDLE(ALL, "early_stopping") IDLE(ALL, "num_beams")
                                        IDLE(ALL, "num_beam_groups") IDLE(ALL, "diversity_penalty")
                                            IDLE(ALL, "temperature") IDLE(ALL,
                                                                          "top_k") IDLE(ALL, "top_p")
                                                IDLE(ALL, "typical_p") IDLE(ALL, "repetition_penalty") IDLE(
                                                    ALL,
                                                    "length_penalty") IDLE(ALL, "no_repeat_ngram_size")
                                                    IDLE(ALL, "encoder_no_repeat_ngram_size") IDLE(
                                                        ALL,
                                                        "bad_words_ids") IDLE(ALL, "num_return_sequences")
                                                        IDLE(ALL,
                                                             "output_scores") IDLE(ALL,
                                                                                   "return_dict_in_generate")
                                                            IDLE(ALL, "forced_bos_token_id") IDLE(
                                                                ALL,
                                                                "forced_eos_token_id")
                                                                IDLE(ALL, "remove_invalid_values") IDLE(
                                                                    ALL,
                                                                    "exponential_decay_length_penalty")
                                                                    IDLE(ALL, "gradient_checkpointing") IDLE(
                                                                        ALL,
                                                                        "unsloth_version")
                                                                        IDLE(ALL, "unsloth_fixed") QUIET(
                                                                            ALL, "pruned_heads", "{}",
                                                                            "heads that were taken out")
};
const int hf_key_count = sizeof hf_keys / sizeof *hf_keys;

/* Of rope_scaling, and of rope_parameters, whose other name for rope_type is not read by old releases. */
const HfKey hf_rope_keys[] = {
    KEY(WORD, ROTARY, "rope_type", rope_type, "how rotary angles are scaled",
        .values = "default linear llama3 yarn") KEY(WORD, ROTARY, "type", rope_type,
                                                    "how rotary angles are scaled",
                                                    .values = "default linear llama3 yarn", .silent = true)
        KEY(REAL, ROTARY, "rope_theta", theta, "base of the rotary angles", .silent = true)
            KEY(REAL, ROTARY, "factor", factor, "what angles are divided by", .nullable = true)
                KEY(INT, ROTARY, "original_max_position_embeddings", original, "positions first trained on")
                    KEY(REAL, ROTARY, "low_freq_factor", slow, "pairs that turn so seldom are slowed in full")
                        KEY(REAL, ROTARY, "high_freq_factor", fast,
                            "pairs that turn so often stay as they are")
                            KEY(REAL, ROTARY, "beta_fast", beta_fast,
                                "pairs that turn so often stay as they are", .nullable = true)
                                KEY(REAL, ROTARY, "beta_slow", beta_slow,
                                    "pairs that turn so seldom are slowed in full",
                                    .nullable = true) KEY(REAL, ROTARY, "attention_factor", attention_factor,
                                                          "multiplies cosines and sines", .nullable = true)
                                    KEY(REAL, ROTARY, "mscale", mscale,
                                        "multiplies the log of the factor, of cosines and sines",
                                        .nullable = true)
                                        KEY(REAL, ROTARY, "mscale_all_dim", mscale_all,
                                            "multiplies the log of the factor, of scores", .nullable = true)
                                            KEY(FLAG, ROTARY, "truncate", truncate, "pairs are counted whole")
                                                KEY(REAL, B(PHI3), "partial_rotary_factor", partial,
                                                    "the part of a head's columns that turns", .silent = true)
                                                    QUIET(ROTARY & ~B(PHI3), "partial_rotary_factor", "1",
                                                          "only a part of a head's columns turns")
                                                        IDLE(ROTARY, "finetuned")
};
const int hf_rope_key_count = sizeof hf_rope_keys / sizeof *hf_rope_keys;

int hf_word(const char *words, const char *word)
{
    const size_t n = strlen(word);
    for (int i = 0;; i++) {
        const size_t size = strcspn(words, " ");
        if (size == n && memcmp(words, word, n) == 0) return i;
        if (!words[size]) return -1;
        words += size + 1;
    }
}

void hf_word_at(const char *words, int number, char *out, int size_bytes)
{
    for (; number > 0 && strchr(words, ' '); number--) words = strchr(words, ' ') + 1;
    snprintf(out, (size_t)size_bytes, "%.*s", (int)strcspn(words, " "), words);
}
