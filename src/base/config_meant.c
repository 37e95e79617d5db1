/*
 * Which key was meant by a name that is none: another framework's name for it, the bare name of a key without its
 * section, or a mistype. The names are those of nanoGPT, llm.c, Megatron-LM, torchtitan and Hugging Face.
 */
#include <ctype.h>
#include <string.h>

#include "base/config.h"

/* Names separated by blanks, and the key, or the two, that say the same here. */
static const struct {
    const char *names;
    ConfigId key, or_key; /* or_key: CFG_COUNT if there is one key only */
} aliases[] = {
#define ONE(names, section, key)                \
    {                                           \
        names, CFG_##section##_##key, CFG_COUNT \
    }
#define TWO(names, section, key, or_key)                       \
    {                                                          \
        names, CFG_##section##_##key, CFG_##section##_##or_key \
    }
    ONE("out_dir output_dir save_dir", run, dir),
    ONE("run_name experiment_name wandb_run_name", run, name),
    ONE("dtype torch_dtype mixed_precision bf16 fp16", run, precision),
    ONE("random_seed", run, seed),
    ONE("n_layer n_layers num_layers num_hidden_layers", model, layers),
    ONE("n_embd n_embed hidden_size d_model dim embed_dim", model, hidden),
    ONE("n_head n_heads num_heads num_attention_heads", model, heads),
    ONE("n_kv_head n_kv_heads num_kv_heads num_key_value_heads num_query_groups", model, kv_heads),
    ONE("ffn_hidden_size intermediate_size d_ff ffn_dim", model, ffn),
    ONE("block_size seq_len seq_length sequence_length context_length max_seq_len n_ctx n_positions "
        "max_position_embeddings",
        model, seq),
    ONE("vocab_size", model, vocab),
    ONE("rope_theta rotary_base", model, rope_base),
    ONE("rotary_dim rotary_ndims", model, rope_dim),
    ONE("rope_type", model, rope_scaling),
    ONE("rope_scaling_factor", model, rope_factor),
    ONE("original_max_position_embeddings", model, rope_original),
    ONE("low_freq_factor beta_slow", model, rope_slow),
    ONE("high_freq_factor beta_fast", model, rope_fast),
    ONE("attention_factor", model, rope_magnitude),
    ONE("attn_logit_softcapping attn_logit_softcap", model, attention_softcap),
    ONE("softmax_type attention_sinks", model, sinks),
    ONE("attention_output_gate attn_output_gate", model, attention_gate),
    ONE("sliding_window window_size", model, window),
    ONE("rms_norm_eps layer_norm_eps layernorm_epsilon", model, norm_eps),
    ONE("tie_word_embeddings tie_embeddings", model, tied),
    ONE("hidden_dropout dropout_prob", model, dropout),
    ONE("init_method_std initializer_range", model, init_std),
    ONE("num_experts n_experts num_local_experts", moe, experts),
    ONE("num_experts_per_tok moe_router_topk top_k", moe, topk),
    ONE("tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size", parallel, tp),
    ONE("pipeline_model_parallel_size pipeline_parallel pp_size", parallel, pp),
    ONE("context_parallel_size cp_size", parallel, cp),
    ONE("cp_comm_type", parallel, cp_comm),
    ONE("expert_model_parallel_size", parallel, ep),
    ONE("expert_tensor_parallel_size", parallel, etp),
    ONE("sequence_parallel", parallel, sp),
    ONE("use_distributed_optimizer zero_stage", parallel, zero),
    TWO("batch_size", train, micro_batch, global_batch),
    ONE("micro_batch_size device_batch_size per_device_train_batch_size", train, micro_batch),
    ONE("global_batch_size total_batch_size gradient_accumulation_steps grad_accum_steps", train,
        global_batch),
    ONE("max_iters max_steps train_iters iters num_steps num_iterations total_steps", train, steps),
    TWO("epochs num_epochs num_train_epochs", train, steps, tokens),
    ONE("max_tokens total_tokens train_tokens", train, tokens),
    ONE("eval_interval eval_steps val_every", train, eval_every),
    ONE("eval_iters val_batches", train, eval_batches),
    ONE("gradient_checkpointing activation_checkpointing recompute_granularity", train, recompute),
    ONE("optimizer", optim, name),
    ONE("learning_rate max_lr", optim, lr),
    ONE("min_learning_rate", optim, min_lr),
    ONE("lr_scheduler lr_schedule lr_scheduler_type lr_decay_style decay_lr", optim, schedule),
    ONE("warmup_iters warmup_steps num_warmup_steps lr_warmup_iters", optim, warmup),
    ONE("lr_decay_iters lr_decay_steps", optim, decay_steps),
    ONE("adam_beta1", optim, beta1),
    ONE("adam_beta2", optim, beta2),
    ONE("adam_eps adam_epsilon epsilon", optim, eps),
    ONE("grad_clip clip_grad max_grad_norm", optim, clip),
    ONE("dataset data_path train_data train_data_path", data, train),
    ONE("valid_data valid_data_path val_data eval_data validation", data, valid),
    ONE("tokenizer_path tokenizer_name tokenizer_model", data, tokenizer),
    ONE("save_interval save_steps save_every", checkpoint, every),
    ONE("save_total_limit", checkpoint, keep),
    ONE("init_from resume_from_checkpoint", checkpoint, resume),
    ONE("log_interval logging_steps", log, every),
    ONE("wandb wandb_log report_to tensorboard_dir", log, tensorboard),
    ONE("num_threads n_threads", debug, threads),
#undef ONE
#undef TWO
};

/* The name as frameworks' configurations have it: --Batch-Size is batch_size. */
static void plain_name(const char *name, char *out, size_t size)
{
    size_t n = 0;
    for (; name[n] && n < size - 1; n++)
        out[n] = name[n] == '-' ? '_' : (char)tolower((unsigned char)name[n]);
    out[n] = 0;
}

static bool has_name(const char *names, const char *name)
{
    const size_t n = strlen(name);
    for (; *names; names += strcspn(names, " "), names += *names == ' ')
        if (strcspn(names, " ") == n && strncmp(names, name, n) == 0) return true;
    return false;
}

int config_meant(const char *section, const char *name, ConfigId out[CONFIG_MEANT])
{
    char plain[80];
    int count = 0;
    plain_name(name, plain, sizeof plain);
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        if (!has_name(aliases[i].names, plain)) continue;
        out[0] = aliases[i].key;
        out[1] = aliases[i].or_key;
        return out[1] == CFG_COUNT ? 1 : 2;
    }
    for (int i = 0; i < CFG_COUNT && !*section && count < CONFIG_MEANT; i++)
        if (strcmp(config_key((ConfigId)i)->name, plain) == 0) out[count++] = (ConfigId)i;
    if (count) return count;
    out[0] = config_nearest(section, name);
    return out[0] < CFG_COUNT;
}

const char *config_suggest(const char *section, const char *name, const char *value,
                           char out[CONFIG_SUGGEST_BYTES])
{
    ConfigId ids[CONFIG_MEANT];
    const int count = config_meant(section, name, ids);
    *out = 0;
    for (int i = 0; i < count; i++) {
        const ConfigKey *key = config_key(ids[i]);
        const size_t used = strlen(out);
        snprintf(out + used, CONFIG_SUGGEST_BYTES - used, "%s'%s.%s%s%s'", i ? " or " : "did you mean ",
                 key->section, key->name, value ? "=" : "", value ? value : "");
    }
    if (count) strncat(out, "?", CONFIG_SUGGEST_BYTES - strlen(out) - 1);
    return out;
}
