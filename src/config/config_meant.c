/*
 * Guesses the key that was meant by an unknown name: another framework's name for it, the bare name of a key without
 * its section, or a mistype. The names are those of nanoGPT, llm.c, Megatron-LM, torchtitan and Hugging Face.
 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "config/config.h"

/* Names separated by blanks, and the key, or the two, that say the same here. A name with a point is of its section
 * alone. */
typedef struct {
    const char *names;
    ConfigId key, or_key; /* or_key: CFG_COUNT if there is one key only; key: too, if there is none, but a note */
    const char *values;   /* "theirs=ours" by blanks, for values that are others here; NULL: they are not */
    const char *note;     /* instead of a key */
} Alias;

static const Alias aliases[] = {
#define WORDS(names, section, key, values)              \
    {                                                   \
        names, CFG_##section##_##key, CFG_COUNT, values \
    }
#define ONE(names, section, key) WORDS(names, section, key, NULL)
#define TWO(names, section, key, or_key)                       \
    {                                                          \
        names, CFG_##section##_##key, CFG_##section##_##or_key \
    }
#define NOTE(names, note)                     \
    {                                         \
        names, CFG_COUNT, CFG_COUNT, "", note \
    }
    NOTE("parallel.dp dp dp_size data_parallel_size data_parallel_degree data_parallel_shard_degree "
         "data_parallel_replicate_degree num_gpus nproc_per_node",
         "dp follows from the number of ranks: what tp x cp x pp leave of them"),
    NOTE("model.flavor model.name", "a model is said by its sizes; config/ has published ones, as llama3-8b.ini"),
    NOTE("checkpoint.folder", "checkpoints lie in run.dir"),
    NOTE("compile compile.enable torch_compile", "nothing is compiled when a run starts: the key has no place here"),
    ONE("out_dir output_dir save_dir dump_folder", run, dir),
    ONE("run_name experiment_name wandb_run_name job.description", run, name),
    WORDS("dtype torch_dtype mixed_precision mixed_precision_param", run, precision,
          "bfloat16=bf16 bf16=bf16 float16=fp16 half=fp16 fp16=fp16 float32=fp32 float=fp32 fp32=fp32 no=fp32"),
    WORDS("bf16", run, precision, "true=bf16 false=fp32"),
    WORDS("fp16", run, precision, "true=fp16 false=fp32"),
    ONE("fp32_residual_connection", run, fp32_residual),
    ONE("random_seed training.seed job.seed", run, seed),
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
    ONE("attention_factor mscale", model, rope_magnitude),
    ONE("mscale_all_dim", model, rope_mscale_all),
    WORDS("multi_latent_attention", model, attention, "true=mla false=mha"),
    ONE("qk_pos_emb_head_dim", model, qk_rope_head_dim),
    ONE("attn_logit_softcapping attn_logit_softcap", model, attention_softcap),
    ONE("attention_sinks", model, sinks),
    WORDS("softmax_type", model, sinks, "learnable=true vanilla=false"),
    ONE("attention_output_gate attn_output_gate", model, attention_gate),
    ONE("sliding_window window_size", model, window),
    WORDS("normalization", model, norm, "rmsnorm=rmsnorm layernorm=layernorm"),
    WORDS("swiglu", model, activation, "true=swiglu false=gelu"),
    WORDS("squared_relu", model, activation, "true=relu2 false=gelu"),
    WORDS("position_embedding_type", model, position, "rope=rope learned_absolute=learned none=none"),
    WORDS("untie_embeddings_and_output_weights", model, tied, "true=false false=true"),
    ONE("rms_norm_eps layer_norm_eps layernorm_epsilon", model, norm_eps),
    ONE("tie_word_embeddings tie_embeddings", model, tied),
    ONE("hidden_dropout dropout_prob", model, dropout),
    ONE("init_method_std initializer_range", model, init_std),
    ONE("num_experts n_experts num_local_experts", moe, experts),
    ONE("num_experts_per_tok moe_router_topk top_k", moe, topk),
    ONE("tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size tensor_parallel_degree", parallel, tp),
    ONE("pipeline_model_parallel_size pipeline_parallel pp_size pipeline_parallel_degree", parallel, pp),
    ONE("context_parallel_size cp_size context_parallel_degree", parallel, cp),
    WORDS("cp_comm_type context_parallel_rotate_method", parallel, cp_comm,
          "p2p=ring all_gather=allgather allgather=allgather a2a=a2a a2a+p2p=hierarchical alltoall=ring"),
    ONE("expert_model_parallel_size expert_parallel_degree", parallel, ep),
    ONE("expert_tensor_parallel_size expert_tensor_parallel_degree", parallel, etp),
    ONE("num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size", parallel, vpp),
    WORDS("pipeline_parallel_schedule", parallel, schedule,
          "1f1b=1f1b gpipe=gpipe interleaved1f1b=interleaved zbvzerobubble=zb-v dualpipev=dualpipev"),
    ONE("sequence_parallel", parallel, sp),
    ONE("zero_stage", parallel, zero),
    WORDS("use_distributed_optimizer", parallel, zero, "true=1 false=0"),
    TWO("batch_size", train, micro_batch, global_batch),
    ONE("micro_batch_size device_batch_size per_device_train_batch_size local_batch_size "
        "pipeline_parallel_microbatch_size",
        train, micro_batch),
    ONE("global_batch_size", train, global_batch),
    WORDS("total_batch_size gradient_accumulation_steps grad_accum_steps", train, global_batch, ""),
    ONE("max_iters max_steps train_iters iters num_steps num_iterations total_steps", train, steps),
    TWO("epochs num_epochs num_train_epochs", train, steps, tokens),
    ONE("max_tokens total_tokens train_tokens", train, tokens),
    ONE("eval_interval eval_steps val_every validation.freq", train, eval_every),
    WORDS("eval_iters val_batches validation.steps", train, eval_samples, ""),
    WORDS("gradient_checkpointing activation_checkpointing", train, recompute, "true=full false=none"),
    ONE("recompute_granularity activation_checkpoint.mode", train, recompute),
    WORDS("optimizer optimizer.name", optim, name, "adamw=adamw adam=adamw muon=muon lion=lion sgd=sgd"),
    ONE("learning_rate max_lr", optim, lr),
    ONE("min_learning_rate", optim, min_lr),
    WORDS("lr_scheduler lr_schedule lr_scheduler_type lr_decay_style decay_type", optim, schedule,
          "constant=constant linear=linear cosine=cosine wsd=wsd inverse_square_root=inverse_sqrt"),
    WORDS("decay_lr", optim, schedule, "true=cosine false=constant"),
    ONE("min_lr_factor min_lr_rate lr_min", optim, min_lr_ratio),
    WORDS("decay_ratio", optim, wsd_decay, ""),
    ONE("warmup_iters warmup_steps num_warmup_steps lr_warmup_iters", optim, warmup),
    ONE("lr_decay_iters lr_decay_steps", optim, decay_steps),
    ONE("adam_beta1", optim, beta1),
    ONE("adam_beta2", optim, beta2),
    ONE("adam_eps adam_epsilon epsilon", optim, eps),
    ONE("mup_base_hidden_size scaling_base_hidden_size", optim, mup_base),
    ONE("mup_base_head_dim", optim, mup_head_dim),
    ONE("grad_clip clip_grad max_grad_norm max_norm", optim, clip),
    ONE("dataset data_path train_data train_data_path dataset_path", data, train),
    ONE("valid_data valid_data_path val_data eval_data validation", data, valid),
    ONE("tokenizer_path tokenizer_name tokenizer_model hf_assets_path", data, tokenizer),
    ONE("save_interval save_steps save_every checkpoint.interval", checkpoint, every),
    WORDS("checkpoint.enable checkpoint.enable_checkpoint", checkpoint, every, "false=0"),
    ONE("save_total_limit keep_latest_k", checkpoint, keep),
    ONE("resume_from_checkpoint", checkpoint, resume),
    WORDS("init_from", checkpoint, resume, "scratch=none resume=auto"),
    ONE("initial_load_path pretrained_checkpoint", checkpoint, load),
    WORDS("async_save async_mode", checkpoint, async,
          "true=true false=false disabled=false async=true "
          "async_with_pinned_mem=true"),
    ONE("log_interval logging_steps metrics.log_freq", log, every),
    WORDS("wandb wandb_log report_to tensorboard_dir enable_wandb", log, tensorboard, ""),
    ONE("enable_tensorboard", log, tensorboard),
    ONE("profile_freq", log, trace_every),
    WORDS("enable_profiling profile", log, trace_every, "true=100 false=0"),
    ONE("num_threads n_threads", debug, threads),
#undef WORDS
#undef ONE
#undef TWO
#undef NOTE
};

/* The name as frameworks' configurations have it: --Batch-Size is batch_size. */
static void plain_name(const char *name, char *out, size_t size)
{
    size_t n = 0;
    for (; name[n] && n < size - 1; n++) out[n] = name[n] == '-' ? '_' : (char)tolower((unsigned char)name[n]);
    out[n] = 0;
}

/* The text behind `name` in a list of words: the end of the word, or the value behind '='. NULL: it is not there. */
static const char *find_word(const char *list, const char *name)
{
    const size_t n = strlen(name);
    for (; *list; list += strcspn(list, " "), list += *list == ' ')
        if (!strncmp(list, name, n) && strchr(" =", list[n])) return list + n;
    return NULL;
}

static const Alias *find_alias(const char *section, const char *name)
{
    char plain[80], full[160];
    plain_name(name, plain, sizeof plain);
    snprintf(full, sizeof full, "%s.%s", section, plain);
    for (int pass = 0; pass < 2; pass++) /* (of one section before those of all) */
        for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
            if (find_word(aliases[i].names, pass ? plain : full)) return &aliases[i];
    return NULL;
}

int config_meant(const char *section, const char *name, ConfigId out[CONFIG_MEANT])
{
    const Alias *alias = find_alias(section, name);
    char plain[80];
    int count = 0;
    if (alias) {
        out[0] = alias->key;
        out[1] = alias->or_key;
        return (out[0] < CFG_COUNT) + (out[1] < CFG_COUNT);
    }
    plain_name(name, plain, sizeof plain);
    for (int i = 0; i < CFG_COUNT && !*section && count < CONFIG_MEANT; i++)
        if (strcmp(config_key((ConfigId)i)->name, plain) == 0) out[count++] = (ConfigId)i;
    if (count) return count;
    out[0] = config_nearest(section, name);
    return out[0] < CFG_COUNT;
}

/* The value as it is here: "=bf16"; "" where nobody knows. One that is the same here is said where there is no section,
 * for whoever wrote "key=value". */
static void translate(const Alias *alias, const char *section, const char *value, char out[64])
{
    char plain[48];
    const char *ours;
    *out = 0;
    if (!value) return;
    if (!alias || !alias->values) {
        if (!*section) snprintf(out, 64, "=%s", value);
        return;
    }
    plain_name(value, plain, sizeof plain);
    ours = find_word(alias->values, plain);
    if (ours) snprintf(out, 64, "%.*s", (int)strcspn(ours, " "), ours);
}

const char *config_suggest(const char *section, const char *name, const char *value, char out[CONFIG_SUGGEST_BYTES])
{
    ConfigId ids[CONFIG_MEANT];
    char ours[64];
    const Alias *alias = find_alias(section, name);
    const int count = config_meant(section, name, ids);
    translate(alias, section, value, ours);
    snprintf(out, CONFIG_SUGGEST_BYTES, "%s", alias && alias->note ? alias->note : "");
    for (int i = 0; i < count; i++) {
        const ConfigKey *key = config_key(ids[i]);
        const size_t used = strlen(out);
        snprintf(out + used, CONFIG_SUGGEST_BYTES - used, "%s'%s.%s%s'", i ? " or " : "did you mean ", key->section,
                 key->name, ours);
    }
    if (count) strncat(out, "?", CONFIG_SUGGEST_BYTES - strlen(out) - 1);
    return out;
}
