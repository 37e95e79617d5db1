/* Fills in the keys that a configuration left open, from those that were given. */
#include <stdlib.h>
#include <string.h>

#include "config/config_reader.h"
#include "base/int64.h"
#include "base/mathx.h"

/* The recipes: what 'auto' means under each model.arch. */
static const struct {
    int position, norm, activation, bias, tied;
} recipes[] = {
    [MODEL_ARCH_GPT2] = { MODEL_POSITION_LEARNED, MODEL_NORM_LAYERNORM, MODEL_ACTIVATION_GELU, true, true },
    [MODEL_ARCH_LLAMA] = { MODEL_POSITION_ROPE, MODEL_NORM_RMSNORM, MODEL_ACTIVATION_SWIGLU, false, false },
};

/* Notes that `id` was filled in from the value of `from`: wrong if that is wrong. */
static void filled(ConfigReader *r, ConfigId id, ConfigId from)
{
    r->config->origin[id] = (ConfigOrigin){ ORIGIN_AUTO, 0 };
    r->bad[id] |= r->bad[from];
}

#define FILL(open, section, key, value, from)       \
    do {                                            \
        if (c->section.key == (open)) {             \
            c->section.key = (value);               \
            filled(r, CFG_##section##_##key, from); \
        }                                           \
    } while (0)

/* Largest power of two up to `most` that divides n. */
static int64_t power_in(int64_t n, int64_t most)
{
    while (most > 1 && n % most) most /= 2;
    return most;
}

/* Weight gradients are rounded once a block, so blocks are long; short sequences stay whole. */
static int64_t usual_seq_blocks(int64_t seq)
{
    enum { SHORTEST = 128 };
    int64_t blocks = power_in(seq, 8);
    while (blocks > 1 && seq / blocks < SHORTEST) blocks /= 2;
    return blocks;
}

bool config_is_default(const Config *c, ConfigId id)
{
    char a[CONFIG_VALUE_BYTES], b[CONFIG_VALUE_BYTES];
    const ConfigKey *key = config_key(id);
    const char *at = (const char *)c + key->offset, *usual = (const char *)&config_defaults + key->offset;
    if (key->kind == CONFIG_REAL) return *(const double *)at == *(const double *)usual; /* (-0 is 0) */
    return strcmp(config_value(c, id, a), config_value(&config_defaults, id, b)) == 0;
}

bool config_is_latent(const Config *c) { return c->model.attention == MODEL_ATTENTION_MLA; }

int64_t config_mixer(const Config *c, LayerPattern *out)
{
    static const char *const words[MIXER_WORDS] = { MIXER_LIST(CHOICE_TEXT) };
    return layer_pattern_read_words(c->model.mixer, words, MIXER_WORDS, out);
}

float config_mup_width(const Config *c)
{
    return c->optim.mup_base ? (float)c->model.hidden / (float)c->optim.mup_base : 1;
}

int64_t config_qkv_width(const Config *c) { return (c->model.heads + 2 * c->model.kv_heads) * c->model.head_dim; }

int64_t config_dense_ranks(const Config *c) { return c->parallel.tp * c->parallel.pp * c->parallel.cp; }
int64_t config_expert_ranks(const Config *c) { return c->parallel.ep * c->parallel.etp * c->parallel.pp; }

/* Whole blocks of all that tensor parallelism cuts; 0 is what the model lacks. */
static int64_t usual_tp_blocks(const Config *c)
{
    const bool attention = config_has_attention(c);
    const int64_t head = config_is_latent(c) ? 1 : c->model.head_dim, heads = attention ? c->model.heads * head : 0;
    const int64_t qkv = attention ? config_qkv_width(c) : 0;
    const int64_t mtp = c->model.mtp_layers ? c->model.hidden : 0;
    const int64_t delta = config_has_delta(c) ? c->model.delta_key_heads : 0;
    const int64_t mamba = config_has_mamba(c) ? c->model.mamba_groups : 0;
    const int64_t kda = config_has_kda(c) ? c->model.kda_heads : 0;
    const int64_t widths[] = { heads, qkv, c->model.ffn, c->moe.ffn, c->moe.shared_ffn, mtp, delta, mamba, kda };
    int64_t blocks = 8;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) blocks = power_in(widths[i], blocks);
    return blocks;
}

Activation config_activation(const Config *c)
{
#define ACTIVATION_OF(name, text, gated) [MODEL_ACTIVATION_##name] = ACT_##name,
    static const Activation all[] = { ACTIVATIONS(ACTIVATION_OF) };
#undef ACTIVATION_OF
    return all[c->model.activation];
}

/* The feed-forward width that is usual for the activation: gated ones have three matrices instead of two. */
static int64_t usual_ffn(const Config *c)
{
    int64_t D = c->model.hidden;
    return activation_gated(config_activation(c)) ? 8 * D / (3 * 64) * 64 : 4 * D;
}

static void resolve_name(ConfigReader *r)
{
    Config *c = r->config;
    if (!*c->run.name) {
        const char *slash = strrchr(c->path, '/'), *file = slash ? slash + 1 : c->path;
        size_t n = strlen(file);
        if (n > 4 && strcmp(file + n - 4, ".ini") == 0) n -= 4;
        const char *name = config_keep(r, "%.*s", (int)n, file), *why = config_text_fault(name);
        if (why) config_complain(r, "%s: run.name, from the file's name, %s: give run.name", c->path, why);
        r->bad[CFG_run_name] |= why != NULL;
        c->run.name = why || !*name ? "run" : name;
        filled(r, CFG_run_name, CFG_run_name);
    }
    if (!*c->run.dir) {
        c->run.dir = config_keep(r, "runs/%s", c->run.name);
        filled(r, CFG_run_dir, CFG_run_name);
    }
}

/* Weights of softmax add up to 1 by themselves, one weight alone would always be 1. */
static void resolve_moe(ConfigReader *r)
{
    Config *c = r->config;
    const bool softmax = c->moe.router == ROUTER_SOFTMAX;
    const bool several = c->moe.topk > 1 && c->moe.router != ROUTER_SOFTMAX_PRE;
    if (c->moe.experts) FILL(0, moe, ffn, c->model.ffn, CFG_model_ffn);
    FILL(-1, moe, normalize, c->moe.experts && (softmax || several), CFG_moe_router);
    const bool loss = c->moe.balance == MOE_BALANCE_AUX || c->moe.balance == MOE_BALANCE_SEQ_AUX ||
                      c->moe.balance == MOE_BALANCE_GLOBAL_AUX;
    FILL(-1, moe, aux_coeff, loss ? 0.01 : 0, CFG_moe_balance);
}

static void resolve_rope(ConfigReader *r)
{
    Config *c = r->config;
    const bool llama3 = c->model.rope_scaling == ROPE_LLAMA3;
    const bool yarn = c->model.rope_scaling == ROPE_YARN;
    FILL(-1, model, rope_factor, c->model.rope_scaling == ROPE_PLAIN ? 1 : 8, CFG_model_rope_scaling);
    if (llama3 || yarn)
        FILL(0, model, rope_original, (int64_t)((double)c->model.seq / c->model.rope_factor), CFG_model_seq);
    FILL(-1, model, rope_fast, llama3 ? 4 : 32, CFG_model_rope_scaling);
    const double log_factor = 0.1 * m_log(c->model.rope_factor);
    FILL(-1, model, rope_magnitude, yarn ? (log_factor + 1) / (c->model.rope_mscale_all * log_factor + 1) : 1,
         CFG_model_rope_factor);
}

/* Layers that blocks have; those of a wrong list are the usual ones. */
static void resolve_blocks(ConfigReader *r)
{
    Config *c = r->config;
    if (config_mixer(c, &c->derived.mixer) < 0) c->derived.mixer = layer_pattern_all(MIXER_WORD_ATTENTION);
    if (layer_pattern_read(c->model.ffn_layers, 1, &c->derived.ffn_layers) < 0)
        c->derived.ffn_layers = layer_pattern_all(1);
}

static void resolve_mixer(ConfigReader *r)
{
    Config *c = r->config;
    if (config_has_mamba(c)) FILL(0, model, mamba_heads, c->model.heads, CFG_model_heads);
    if (config_has_kda(c)) {
        FILL(0, model, kda_heads, c->model.heads, CFG_model_heads);
        FILL(0, model, kda_head_dim, c->model.head_dim, CFG_model_head_dim);
    }
    if (!config_has_delta(c)) return;
    FILL(0, model, delta_key_heads, c->model.heads, CFG_model_heads);
    FILL(0, model, delta_value_heads, c->model.delta_key_heads, CFG_model_delta_key_heads);
    FILL(0, model, delta_key_dim, c->model.head_dim, CFG_model_head_dim);
    FILL(0, model, delta_value_dim, c->model.delta_key_dim, CFG_model_delta_key_dim);
}

static void resolve_model(ConfigReader *r)
{
    Config *c = r->config;
    resolve_blocks(r);
    if (!config_has_attention(c) && recipes[c->model.arch].position == MODEL_POSITION_ROPE)
        FILL(MODEL_POSITION_AUTO, model, position, MODEL_POSITION_NONE, CFG_model_mixer);
    FILL(MODEL_POSITION_AUTO, model, position, recipes[c->model.arch].position, CFG_model_arch);
    FILL(MODEL_NORM_AUTO, model, norm, recipes[c->model.arch].norm, CFG_model_arch);
    FILL(MODEL_ACTIVATION_AUTO, model, activation, recipes[c->model.arch].activation, CFG_model_arch);
    FILL(-1, model, bias, recipes[c->model.arch].bias, CFG_model_arch);
    FILL(ATTENTION_BIAS_AS_ALL, model, attention_bias, c->model.bias ? ATTENTION_BIAS_ALL : ATTENTION_BIAS_NONE,
         CFG_model_bias);
    FILL(-1, model, tied, recipes[c->model.arch].tied, CFG_model_arch);
    FILL(0, model, kv_heads, c->model.heads, CFG_model_heads);
    if (config_is_latent(c))
        FILL(0, model, head_dim, c->model.qk_nope_head_dim + c->model.qk_rope_head_dim, CFG_model_qk_nope_head_dim);
    FILL(0, model, head_dim, c->model.hidden / c->model.heads, CFG_model_hidden);
    FILL(0, model, ffn, usual_ffn(c), CFG_model_hidden);
    resolve_mixer(r);
    resolve_rope(r);
    resolve_moe(r);
    bool auto_dim = c->origin[CFG_model_head_dim].kind == ORIGIN_AUTO;
    r->bad[CFG_model_head_dim] |= auto_dim && r->bad[CFG_model_heads];
}

/* True if this layout cuts only between canonical blocks, so that its bits are every layout's. */
static bool layout_divides_blocks(const Config *c)
{
    const int64_t cp = c->parallel.cp;
    const bool by_cp = cp == 1 || c->parallel.seq_blocks % (2 * cp) == 0;
    return c->parallel.tp_blocks % c->parallel.tp == 0 && by_cp && config_slices_fit(c);
}

int64_t config_recompute(const Config *c, LayerPattern *out)
{
    static const char *const words[RECOMPUTE_KINDS] = { RECOMPUTE_LIST(CHOICE_TEXT) };
    return layer_pattern_read_words(c->train.recompute, words, RECOMPUTE_KINDS, out);
}

static int64_t fewest_ranks(const Config *c)
{
    const int64_t fewest = common_multiple(config_dense_ranks(c), config_expert_ranks(c));
    return fewest < CONFIG_RANKS_MAX ? fewest : CONFIG_RANKS_MAX;
}

/* vpp or slices alone ask for the schedule that is made for them. */
static void resolve_schedule(ConfigReader *r)
{
    Config *c = r->config;
    if (strcmp(c->parallel.schedule, "auto") != 0) return;
    c->parallel.schedule = c->parallel.slices > 1 ? "seq1f1b" : c->parallel.vpp > 1 ? "interleaved" : "1f1b";
    filled(r, CFG_parallel_schedule, c->parallel.slices > 1 ? CFG_parallel_slices : CFG_parallel_vpp);
}

static void resolve_parallel(ConfigReader *r)
{
    Config *c = r->config;
    resolve_schedule(r);
    FILL(0, parallel, tp_blocks, usual_tp_blocks(c), CFG_model_hidden);
    FILL(0, parallel, seq_blocks, usual_seq_blocks(c->model.seq), CFG_model_seq);
    FILL(0, parallel, attn_block, USUAL_ATTN_BLOCK, CFG_model_seq);
    FILL(-1, parallel, sp, c->parallel.tp > 1, CFG_parallel_tp);
    config_cp_comm(c, &c->derived.cp_comm);
    config_recompute(c, &c->derived.recompute);
    c->derived.cp_heads = config_cp_heads(c);

    const int64_t ranks = config_dense_ranks(c);
    if (c->derived.any_world) c->derived.world_size = fewest_ranks(c);
    c->derived.dp = c->derived.world_size % ranks == 0 ? c->derived.world_size / ranks : 1;
    c->derived.microbatches = c->derived.global_batch / (c->train.micro_batch * c->derived.dp);
}

static void resolve_batch(ConfigReader *r)
{
    Config *c = r->config;
    char place[512];
    const char *why = batch_ramp_read(c->train.global_batch, &c->derived.batch);
    c->derived.global_batch = batch_ramp_most(&c->derived.batch);
    c->derived.eval_samples = c->train.eval_samples;
    if (c->train.eval_batches) c->derived.eval_samples = c->train.eval_batches * c->derived.global_batch;
    if (!why) return;
    config_origin(c, CFG_train_global_batch, place, sizeof place);
    config_complain(r, "%s: train.global_batch = '%s': %s", place, c->train.global_batch, why);
    r->bad[CFG_train_global_batch] = true;
}

bool config_schedule_is(const Config *c, const char *name)
{
    const size_t n = strcspn(c->parallel.schedule, "+");
    return strlen(name) == n && !strncmp(c->parallel.schedule, name, n);
}

int config_unit_div(const Config *c) { return config_schedule_is(c, "chimera-bhalf") ? 2 : 1; }

/* The least slack with which a step can be done again in pieces (moe.overflow): a sequence block of each rank has room
 * wherever its rows go. */
static double least_slack(const Config *c)
{
    const int64_t cuts =
        c->parallel.cp * c->parallel.slices * (c->parallel.sp ? c->parallel.tp : 1) * config_unit_div(c);
    const int64_t own = c->moe.experts / c->parallel.ep, most = own < c->moe.topk ? own : c->moe.topk;
    const double blocks = (double)(c->train.micro_batch * c->parallel.seq_blocks) / (double)cuts; /* of a rank */
    return (double)(most * c->parallel.ep) / (blocks * (double)c->moe.topk);
}

bool config_updates_in_step(const Config *c)
{
    static const char *const names[] = { "pipedream", "pipedream-vertical", "2bw" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (config_schedule_is(c, names[i])) return true;
    return false;
}

/* Memory of a GPU is for the rows that usually come, and a step with more takes longer. (What a schedule has updated in
 * it cannot be done again.) */
static void resolve_room(ConfigReader *r)
{
    Config *c = r->config;
    const bool bounded = c->moe.experts && c->run.device == RUN_DEVICE_CUDA && c->parallel.ep * c->parallel.etp > 1 &&
                         !config_updates_in_step(c);
    const double least = bounded ? least_slack(c) : 0;
    FILL(-1, moe, slack, bounded ? (least > 2 ? least : 2) : 0, CFG_run_device);
    if (!bounded || c->moe.slack < least || c->origin[CFG_moe_overflow].kind != ORIGIN_DEFAULT) return;
    c->moe.overflow = MOE_OVERFLOW_REDO;
    filled(r, CFG_moe_overflow, CFG_run_device);
}

/* Bands of rows that pay: each fills a GPU's multiprocessors with the tiles of a product. */
static int64_t bands_beside_products(const Config *c)
{
    enum { BANDS_MOST = 4, ROWS_LEAST = 1024 };
    const int64_t rows = c->train.micro_batch * c->model.seq / c->parallel.cp;
    const bool fp8 = c->run.precision == RUN_PRECISION_FP8;
    const int64_t unit = fp8_facts(config_fp8_recipe(c))->unit;
    int64_t bands = BANDS_MOST;
    while (bands > 1 &&
           (c->parallel.tp % bands || rows / bands < ROWS_LEAST || (fp8 && rows % (unit * c->parallel.slices * bands))))
        bands--;
    return bands;
}

static void resolve_run(ConfigReader *r)
{
    Config *c = r->config;
    FILL(RUN_DEVICE_AUTO, run, device, c->derived.gpus ? RUN_DEVICE_CUDA : RUN_DEVICE_CPU, CFG_run_device);
    bool cpu = c->run.device == RUN_DEVICE_CPU;
    FILL(RUN_PRECISION_AUTO, run, precision, cpu ? RUN_PRECISION_FP32 : RUN_PRECISION_BF16, CFG_run_device);
    const bool plain = c->run.precision == RUN_PRECISION_FP32;
    FILL(-1, run, fp32_residual, cpu || plain, CFG_run_precision);
    FILL(-1, run, fp32_vectors, cpu || plain, CFG_run_precision);
    FILL(-1, run, fp32_row_sums, c->run.fp32_residual == 1 && c->run.fp32_vectors == 1, CFG_run_precision);
    const Fp8Facts *fp8 = fp8_facts(config_fp8_recipe(c));
    const bool blocks = c->run.precision == RUN_PRECISION_FP8 && !fp8->tensor;
    const int64_t block = fp8->block ? fp8->block : 1;
    /* (etp may change on resume, so it is not asked) */
    const bool whole = c->moe.experts && c->model.hidden % block == 0 && c->moe.ffn % block == 0;
    FILL(-1, run, fp8_experts, cpu && blocks && whole, CFG_run_precision);
    bool layout = layout_divides_blocks(c) && cpu && c->run.precision == RUN_PRECISION_FP32;
    FILL(RUN_REPRODUCIBLE_AUTO, run, reproducible, layout ? RUN_REPRODUCIBLE_LAYOUT : RUN_REPRODUCIBLE_RUN,
         CFG_run_device);
    /* (of several ranks no GPU has run them yet: docs/gpu.md) */
    const bool alone = c->derived.world_size == 1;
    FILL(-1, run, graphs, !cpu && alone && !c->train.offload && !config_updates_in_step(c), CFG_run_device);
    const bool tiles = config_has_dots(c) && c->derived.tiles, pairs = config_has_dots(c) && c->derived.pairs;
    FILL(DEBUG_DOT_AUTO, debug, dot,
         tiles   ? DEBUG_DOT_AMX
         : pairs ? DEBUG_DOT_VDPBF16
                 : DEBUG_DOT_FMA,
         CFG_run_precision);
    FILL(-1, run, autotune, !cpu, CFG_run_device);
    const bool copies = c->derived.dp * c->parallel.cp > 1; /* of dense weights: their gradients are summed */
    const bool gems = config_schedule_is(c, "gems");        /* refused beside it (config.def) */
    FILL(-1, parallel, overlap_grad, !cpu && copies && !gems, CFG_run_device);
    FILL(-1, parallel, overlap_param, !cpu && copies && c->parallel.zero, CFG_run_device);
    FILL(0, parallel, overlap_tp, cpu ? 1 : bands_beside_products(c), CFG_run_device);
}

/* A run of an expert's rows begins with each block and leaves part of a block of codes unfilled; and no GPU promises
 * the bits of all layouts. With fewer blocks still a step that is done again in pieces has longer pieces, for which its
 * memory then has room (least_slack): a slack that is given may be enough for the others alone. */
static void resolve_blocks_of_experts(ConfigReader *r)
{
    enum { BLOCKS_MOST = 4 };
    Config *c = r->config;
    const bool found = c->origin[CFG_parallel_seq_blocks].kind == ORIGIN_AUTO;
    const bool eights = c->run.precision == RUN_PRECISION_FP8 && c->run.fp8_experts;
    if (!found || !eights || c->run.device != RUN_DEVICE_CUDA || c->parallel.seq_blocks <= BLOCKS_MOST ||
        c->run.reproducible == RUN_REPRODUCIBLE_LAYOUT || c->moe.slack > 0)
        return;
    c->parallel.seq_blocks = BLOCKS_MOST;
    filled(r, CFG_parallel_seq_blocks, CFG_run_fp8_experts);
}

static void resolve_length(ConfigReader *r)
{
    Config *c = r->config;
    if (c->train.tokens > 0 && c->origin[CFG_train_steps].kind == ORIGIN_DEFAULT) {
        c->train.steps = 0;
        filled(r, CFG_train_steps, CFG_train_tokens);
    }
    bool by_tokens = c->train.tokens > 0;
    c->derived.steps = c->train.steps;
    if (by_tokens) c->derived.steps = batch_ramp_steps(&c->derived.batch, (c->train.tokens - 1) / c->model.seq + 1);
    c->derived.decay_steps = c->optim.decay_steps ? c->optim.decay_steps : c->derived.steps;
    int64_t tenth = c->derived.decay_steps / 10;
    c->derived.min_lr = c->optim.min_lr_ratio > 0 ? c->optim.min_lr_ratio * c->optim.lr : c->optim.min_lr;
    c->derived.wsd_decay = c->optim.wsd_decay ? c->optim.wsd_decay : tenth ? tenth : 1;
}

/* "100" or "100-104"; 0 and -1 when it is neither. */
static void resolve_trace(ConfigReader *r)
{
    Config *c = r->config;
    const char *text = c->log.trace_steps;
    char *end;
    c->derived.trace_first = c->derived.trace_last = 0;
    if (!*text) return;
    int64_t first = strtoll(text, &end, 10), last = first;
    if (*end == '-' && end[1] >= '0' && end[1] <= '9') last = strtoll(end + 1, &end, 10);
    const bool valid = *text >= '0' && *text <= '9' && !*end && first > 0 && last >= first && last < INT64_MAX;
    c->derived.trace_first = valid ? first : 0;
    c->derived.trace_last = valid ? last : -1;
}

void config_resolve(ConfigReader *r)
{
    resolve_name(r);
    resolve_model(r);
    resolve_batch(r);
    resolve_parallel(r);
    resolve_run(r);
    resolve_blocks_of_experts(r);
    resolve_room(r);
    resolve_length(r);
    resolve_trace(r);
}
