/*
 * Relations between the keys of attention (docs/attention.md), a part of config_check().
 */
#include <string.h>

#include "config/config_reader.h"
#include "base/layer_set.h"

/* A list over blocks: `form` says what its numbers are. */
static void check_pattern(ConfigReader *r, ConfigId id, const char *list, int64_t most, const char *form)
{
    char text[200];
    LayerPattern pattern;
    const int64_t length = layer_pattern_read(list, most, &pattern), layers = r->config->model.layers;
    snprintf(text, sizeof text, "must be %s, or a list of them with repetitions", form);
    RULE(length >= 0, text, id);
    snprintf(text, sizeof text, "the list is about %lld blocks, the model has %lld", (long long)length,
             (long long)layers);
    RULE(length <= layers, text, id, CFG_model_layers);
}

static void check_rope(ConfigReader *r)
{
    const Config *c = r->config;
    LayerPattern layers;
    const bool rope = c->model.position == MODEL_POSITION_ROPE;
    const bool valid = layer_pattern_read(c->model.rope_layers, 1, &layers) >= 0;
    check_pattern(r, CFG_model_rope_layers, c->model.rope_layers, 1, "0 or 1");
    RULE(!valid || layer_pattern_most(&layers), "no block has rotary positions: give a 1",
         CFG_model_rope_layers, CFG_model_position);
    config_take(r, "model.position=none model.rope_layers=1");
    RULE(rope || strcmp(c->model.rope_layers, config_defaults.model.rope_layers) == 0,
         "only position = rope has it", CFG_model_rope_layers, CFG_model_position);
    RULE(rope || !c->model.rope_dim, "only position = rope has it", CFG_model_rope_dim, CFG_model_position);
    RULE(!rope || c->model.attention == MODEL_ATTENTION_MLA || c->model.rope_dim ||
             c->model.head_dim % 2 == 0,
         "columns turn in pairs: rotary positions need an even head_dim, or rope_dim", CFG_model_head_dim,
         CFG_model_position);
    RULE(c->model.rope_dim % 2 == 0, "columns turn in pairs: it must be even", CFG_model_rope_dim);
    RULE(c->model.rope_dim <= c->model.head_dim, "a head has fewer columns", CFG_model_rope_dim,
         CFG_model_head_dim);
}

static void check_rope_scaling(ConfigReader *r)
{
    const Config *c = r->config;
    const bool plain = c->model.rope_scaling == MODEL_ROPE_SCALING_NONE;
    const bool yarn = c->model.rope_scaling == MODEL_ROPE_SCALING_YARN;
    const bool by_turns = yarn || c->model.rope_scaling == MODEL_ROPE_SCALING_LLAMA3;
    const char *const only = "only rope_scaling = llama3 or yarn reads it";
    RULE(plain || c->model.position == MODEL_POSITION_ROPE, "only position = rope has angles to scale",
         CFG_model_rope_scaling, CFG_model_position);
    RULE(!plain || c->model.rope_factor == 1, "nothing is scaled: give rope_scaling", CFG_model_rope_factor,
         CFG_model_rope_scaling);
    RULE(by_turns || !c->model.rope_original, only, CFG_model_rope_original, CFG_model_rope_scaling);
    RULE(by_turns || c->model.rope_slow == 1, only, CFG_model_rope_slow, CFG_model_rope_scaling);
    RULE(by_turns || c->model.rope_fast == 32, only, CFG_model_rope_fast, CFG_model_rope_scaling);
    RULE(!by_turns || c->model.rope_original, "seq / rope_factor is less than 1: give rope_original",
         CFG_model_rope_original, CFG_model_seq, CFG_model_rope_factor);
    RULE(c->model.rope_slow < c->model.rope_fast, "rope_slow must be below rope_fast", CFG_model_rope_slow,
         CFG_model_rope_fast);
    RULE(yarn || c->model.rope_magnitude == 1, "only rope_scaling = yarn reads it", CFG_model_rope_magnitude,
         CFG_model_rope_scaling);
    RULE(yarn || c->model.rope_truncate, "only rope_scaling = yarn reads it", CFG_model_rope_truncate,
         CFG_model_rope_scaling);
    RULE(!yarn || c->model.rope_base > 1, "yarn needs a base above 1", CFG_model_rope_base,
         CFG_model_rope_scaling);
}

/* The keys of latent attention, where it is not. */
static void check_no_latent(ConfigReader *r)
{
    const Config *c = r->config, *start = &config_defaults;
    const char *const only = "only attention = mla reads it";
    RULE(c->model.q_lora_rank == start->model.q_lora_rank, only, CFG_model_q_lora_rank, CFG_model_attention);
    RULE(c->model.kv_lora_rank == start->model.kv_lora_rank, only, CFG_model_kv_lora_rank,
         CFG_model_attention);
    RULE(c->model.qk_nope_head_dim == start->model.qk_nope_head_dim, only, CFG_model_qk_nope_head_dim,
         CFG_model_attention);
    RULE(c->model.qk_rope_head_dim == start->model.qk_rope_head_dim, only, CFG_model_qk_rope_head_dim,
         CFG_model_attention);
    RULE(c->model.v_head_dim == start->model.v_head_dim, only, CFG_model_v_head_dim, CFG_model_attention);
    RULE(c->model.rope_mscale_all == start->model.rope_mscale_all, only, CFG_model_rope_mscale_all,
         CFG_model_attention);
}

/* What GPUs read 16 bytes at a time. */
static void check_latent_gpu(ConfigReader *r)
{
    const Config *c = r->config;
    const char *const eights = "on GPUs the widths of latent attention must be multiples of 8";
    if (c->run.device == RUN_DEVICE_CPU) return;
    RULE(c->model.q_lora_rank % 8 == 0, eights, CFG_model_q_lora_rank, CFG_run_device);
    RULE(c->model.kv_lora_rank % 8 == 0, eights, CFG_model_kv_lora_rank, CFG_run_device);
    RULE(c->model.qk_nope_head_dim % 8 == 0, eights, CFG_model_qk_nope_head_dim, CFG_run_device);
    RULE(c->model.qk_rope_head_dim % 8 == 0, eights, CFG_model_qk_rope_head_dim, CFG_run_device);
    RULE(c->model.v_head_dim % 8 == 0, eights, CFG_model_v_head_dim, CFG_run_device);
    RULE(c->model.qk_nope_head_dim + c->model.qk_rope_head_dim <= 256 && c->model.v_head_dim <= 256,
         "on GPUs heads have at most 256 columns of queries, and 256 of values", CFG_model_qk_nope_head_dim,
         CFG_model_qk_rope_head_dim, CFG_model_v_head_dim, CFG_run_device);
}

/* What else beside tp cuts the rows of a sample. */
static const char *context_factors(const Config *c)
{
    const bool cp = c->parallel.cp > 1, slices = c->parallel.slices > 1;
    return cp && slices ? " x cp x slices" : cp ? " x cp" : slices ? " x slices" : "";
}

/* With sp, ranks have their own rows of the latents, and of the gradients of their weights. */
static void check_latent_rows(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t cuts = c->parallel.cp * c->parallel.slices,
                  blocks = c->train.micro_batch * c->parallel.seq_blocks;
    const bool layout = c->run.reproducible == RUN_REPRODUCIBLE_LAYOUT && !c->moe.experts;
    char text[200];
    snprintf(text, sizeof text,
             "with sp a rank of latent attention must have whole leaves of gradients: tp%s must divide "
             "micro_batch x seq_blocks, here %lld x %lld",
             context_factors(c), (long long)c->train.micro_batch, (long long)c->parallel.seq_blocks);
    RULE(!layout || !c->parallel.sp || blocks % (c->parallel.tp * cuts) == 0, text, CFG_parallel_tp,
         CFG_train_micro_batch, CFG_parallel_seq_blocks, CFG_model_attention);
    config_take(r, "parallel.sp=false, or run.reproducible=run");
}

static void check_latent(ConfigReader *r)
{
    const Config *c = r->config;
    const bool yarn = c->model.rope_scaling == MODEL_ROPE_SCALING_YARN;
    if (c->model.attention != MODEL_ATTENTION_MLA) {
        check_no_latent(r);
        return;
    }
    RULE(c->model.kv_heads == c->model.heads, "latent attention has keys and values for each head",
         CFG_model_kv_heads, CFG_model_attention);
    config_take(r, "model.kv_heads=0");
    RULE(c->model.head_dim == c->model.qk_nope_head_dim + c->model.qk_rope_head_dim,
         "with attention = mla it is qk_nope_head_dim + qk_rope_head_dim", CFG_model_head_dim,
         CFG_model_qk_nope_head_dim, CFG_model_qk_rope_head_dim);
    config_take(r, "model.head_dim=0");
    RULE(c->model.position == MODEL_POSITION_ROPE, "latent attention has rotary positions",
         CFG_model_position, CFG_model_attention);
    config_take(r, "model.position=rope");
    RULE(!c->model.rope_dim, "with attention = mla it is qk_rope_head_dim", CFG_model_rope_dim,
         CFG_model_attention);
    config_take(r, "model.rope_dim=0");
    RULE(c->model.qk_rope_head_dim % 2 == 0, "columns turn in pairs: it must be even",
         CFG_model_qk_rope_head_dim);
    RULE(yarn || !(c->model.rope_mscale_all > 0), "only rope_scaling = yarn reads it",
         CFG_model_rope_mscale_all, CFG_model_rope_scaling);
    RULE(!c->model.qk_norm, "latent attention has norms of its own", CFG_model_qk_norm, CFG_model_attention);
    config_take(r, "model.qk_norm=false");
    check_latent_gpu(r);
    check_latent_rows(r);
}

void config_check_attention(ConfigReader *r)
{
    const Config *c = r->config;
    check_pattern(r, CFG_model_window, c->model.window, WINDOW_MOST, "a number of positions up to 16777216");
    check_rope(r);
    check_rope_scaling(r);
    check_latent(r);
    RULE(!(c->model.attention_softcap > 0) || c->model.attention_softcap >= 1e-3,
         "must be 0 (no cap), or 0.001 and more", CFG_model_attention_softcap);
}
