/*
 * What a configuration means as a whole: config_check() judges by rules, those that stand under their keys in
 * config.def and others about many keys. A rule about a key whose value was refused is not looked at, so one mistake is
 * reported once. What a complaint proposes stands behind the rule, as config_take (config_hint.c), and never in its
 * text.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "config/config_reader.h"
#include "base/fp8.h"
#include "base/heads.h"
#include "base/int64.h"
#include "base/rank_list.h"
#include "base/run_files.h"

/* ---- facts that rules go by ---- */

static bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

/* Kernels divide by 1 - x, and compute in single precision: 0.99999999 is 1 there. */
static bool below_one(double x) { return (float)x < 1; }

static bool path_fits(const char *path)
{
    enum { LONGEST_NAME = 256 }; /* that is put behind it */
    _Static_assert(PATH_MAX - LONGEST_NAME == 3840, "config.def says how many bytes");
    return strlen(path) <= PATH_MAX - LONGEST_NAME;
}

/* Would it replace a file that the run writes, or reads again? (Older programs took such.) */
static bool is_of_the_run(const ConfigReader *r, const char *path)
{
    return *path && !r->compared && run_file_is_at(path, r->config->run.dir);
}

/* "98,2" or "969,30,1": two or three shares, at least one of them above 0. */
static bool split_is_valid(const char *text)
{
    double sum = 0;
    for (int shares = 1; shares <= 3; shares++) {
        char *end;
        double share = strtod(text, &end);
        if (end == text || !(share >= 0 && share <= 1e9)) return false;
        sum += share;
        if (*end == 0) return shares >= 2 && sum > 0;
        if (*end != ',') return false;
        text = end + 1;
    }
    return false;
}

static bool names_ranks(const Config *c, const char *list)
{
    return rank_list_read(list, (int)(c->derived.any_world ? CONFIG_RANKS_MAX : c->derived.world_size), NULL);
}

static bool is_alone(const Config *c) { return c->derived.world_size == 1 && !c->derived.any_world; }
static bool on_cpu(const Config *c) { return c->run.device == RUN_DEVICE_CPU; }

/* Do evaluations and checkpoints ever fall on the same steps, and on as many as either can? */
static bool evaluates_what_it_saves(const Config *c)
{
    const int64_t save = c->checkpoint.every, eval = c->train.eval_every;
    return save && eval && (save % eval == 0 || eval % save == 0);
}

/* Largest beta2 for moments in bf16. Multiplied by more, some numbers round back to themselves. */
#define BF16_BETA2_MOST (1 - 0x1p-8)

/* The length of the list; -1: it is none. */
static int64_t layers_recomputed(const Config *c)
{
    LayerPattern kinds;
    return config_recompute(c, &kinds);
}

/* Is there a use of model.head_dim? delta_key_dim may be filled in from it. */
static bool reads_head_dim(const Config *c)
{
    return config_has_attention(c) || c->origin[CFG_model_delta_key_dim].kind == ORIGIN_AUTO ||
           c->origin[CFG_model_kda_head_dim].kind == ORIGIN_AUTO;
}

/* (a resolved configuration says what it has stood for) */
static bool may_have_head_dim(const Config *c)
{
    return config_has_attention(c) || config_has_delta(c) || config_has_kda(c);
}

static bool has_rope(const Config *c) { return c->model.position == MODEL_POSITION_ROPE; }
/* (where no block has attention another rule says so) */
static bool may_turn(const Config *c) { return has_rope(c) || !config_has_attention(c); }
static bool scales_rope(const Config *c) { return c->model.rope_scaling != ROPE_PLAIN; }
static bool is_yarn(const Config *c) { return c->model.rope_scaling == ROPE_YARN; }
static bool scales_by_turns(const Config *c) { return is_yarn(c) || c->model.rope_scaling == ROPE_LLAMA3; }

/* Rows that GPUs read 16 bytes at a time. */
static bool fits_gpu(const Config *c, int64_t width) { return on_cpu(c) || !config_is_latent(c) || width % 8 == 0; }

/* The library of products takes other rows by no kernel that has been tried, or slowly. (Older programs ran such.) */
static bool gpu_rows_fit(const ConfigReader *r, int64_t width)
{
    const Config *c = r->config;
    return r->compared || on_cpu(c) || width % (c->run.precision == RUN_PRECISION_FP32 ? 4 : 8) == 0;
}

/* Rows of a sample that a rank has at once. */
static int64_t rows_at_once(const Config *c) { return c->model.seq / (c->parallel.cp * c->parallel.slices); }

static int64_t unit_rows(const Config *c) { return c->train.micro_batch / config_unit_div(c) * rows_at_once(c); }

static bool is_fp8(const Config *c) { return c->run.precision == RUN_PRECISION_FP8; }
static const Fp8Facts *fp8_of(const Config *c) { return fp8_facts(config_fp8_recipe(c)); }

/* Are the linear layers' inputs and outputs in blocks, as ranks of tp have them, multiples of `unit`? Those of mixers
 * with states; then all others. */
static bool delta_widths_are_multiples(const Config *c, int64_t unit)
{
    const int64_t tp = c->parallel.tp, keys = c->model.delta_key_heads / tp * c->model.delta_key_dim;
    const int64_t values = c->model.delta_value_heads / tp * c->model.delta_value_dim;
    return !config_has_delta(c) || (2 * (keys + values) % unit == 0 && values % unit == 0);
}

static bool kda_widths_are_multiples(const Config *c, int64_t unit)
{
    return !config_has_kda(c) || (c->model.kda_heads / c->parallel.tp * c->model.kda_head_dim % unit == 0 &&
                                  c->model.kda_head_dim % unit == 0);
}

static bool mamba_widths_are_multiples(const Config *c, int64_t unit)
{
    const int64_t tp = c->parallel.tp, heads = c->model.mamba_heads / tp * c->model.mamba_head_dim;
    const int64_t keys = c->model.mamba_groups / tp * c->model.mamba_state;
    return !config_has_mamba(c) || (2 * (heads + keys) % unit == 0 && heads % unit == 0);
}

static bool widths_are_multiples(const Config *c, int64_t unit)
{
    const int64_t tp = c->parallel.tp, heads = c->model.heads / tp, C = c->model.head_dim;
    const int64_t kv = c->model.kv_heads * C / tp, value = config_is_latent(c) ? c->model.v_head_dim : C;
    const int64_t nope = c->model.qk_nope_head_dim, rope = c->model.qk_rope_head_dim;
    const int64_t kv_rank = c->model.kv_lora_rank, q_rank = c->model.q_lora_rank;
    const int64_t ffn = c->moe.experts ? c->moe.shared_ffn : 0;
    const int64_t latent[] = { kv_rank, kv_rank + rope, q_rank, heads * (nope + value) };
    bool fit = c->model.hidden % unit == 0 && c->model.ffn / tp % unit == 0 && ffn / tp % unit == 0;
    if (!config_has_attention(c)) return fit;
    fit = fit && heads * C % unit == 0 && heads * value % unit == 0;
    if (!config_is_latent(c)) return fit && kv % unit == 0;
    for (int i = 0; i < 4; i++) fit = fit && latent[i] % unit == 0;
    return fit;
}

static bool fp8_widths_fit(const Config *c, int64_t unit)
{
    const bool parts = !on_cpu(c) && config_is_latent(c); /* ranks have products of a part of the rows, too */
    return widths_are_multiples(c, unit) && unit_rows(c) % (parts ? unit * c->parallel.tp : unit) == 0;
}

/* The length of a block of experts' operands; where tensors have the scales none are built, and any length will do. */
static int64_t fp8_experts_block(const Config *c) { return fp8_of(c)->tensor ? 128 : fp8_of(c)->block; }

/* Have experts whole blocks, as ranks hold them? */
static bool fp8_experts_fit(const Config *c, int64_t block)
{
    const int64_t width = c->moe.latent ? c->moe.latent : c->model.hidden;
    return width % block == 0 && c->moe.ffn / c->parallel.etp % block == 0;
}

static const char *fp8_experts_text(const Config *c)
{
    static const char *const texts[2][2] = {
        { "hidden, and what etp leaves of an expert's width, must be multiples of 128",
          "hidden, and what etp leaves of an expert's width, must be multiples of 32" },
        { "experts' latent, and what etp leaves of their width, must be multiples of 128",
          "experts' latent, and what etp leaves of their width, must be multiples of 32" },
    };
    return texts[c->moe.latent > 0][fp8_experts_block(c) == 32];
}

/* Bands of rows, of so many in all. */
static bool fp8_bands_fit(const Config *c, int64_t bands)
{
    return !is_fp8(c) || on_cpu(c) || bands < 2 || unit_rows(c) % (fp8_of(c)->unit * bands) == 0;
}

/* The canonical places of blocks are those of one rank and of one sample after the other. With sp a rank makes latents
 * of rows of its own. */
static bool fp8_blocks_fit(const Config *c, int64_t block)
{
    const bool own_rows = config_is_latent(c) && c->parallel.tp > 1 && c->parallel.sp;
    const bool states = delta_widths_are_multiples(c, block) && kda_widths_are_multiples(c, block) &&
                        mamba_widths_are_multiples(c, block);
    return c->model.seq % block == 0 && (c->parallel.tp == 1 || (states && widths_are_multiples(c, block))) &&
           (!own_rows || unit_rows(c) / c->parallel.tp % block == 0);
}

static bool is_balanced_by_loss(const Config *c)
{
    return c->moe.balance == MOE_BALANCE_AUX || c->moe.balance == MOE_BALANCE_SEQ_AUX ||
           c->moe.balance == MOE_BALANCE_GLOBAL_AUX;
}

static bool drops_rows(const Config *c)
{
    return c->moe.capacity > 0 || (c->moe.slack > 0 && c->moe.overflow == MOE_OVERFLOW_DROP);
}

/* ---- rules that stand under their keys ---- */

/* A section becomes a function, a key a block in which `it` is its value. */
#define UNUSED __attribute__((unused))
#define SECTION(name)                                \
    static void check_##name##_keys(ConfigReader *r) \
    {                                                \
        const Config *const c UNUSED = r->config;    \
        {
#define SECTION_END(name) \
    }                     \
    }
#define ANY(section, key)                                   \
    }                                                       \
    {                                                       \
        const ConfigId self UNUSED = CFG_##section##_##key; \
        const __typeof__(c->section.key) it UNUSED = c->section.key;
#define MUST(holds, text, ...) RULE(holds, text, self, __VA_ARGS__);
#define ONLY(where, text, ...) RULE((where) || config_is_default(c, self), text, self, __VA_ARGS__);
#define TAKE(ways) config_take(r, ways);
#define TAKE_NEAR config_take_near(r, self);
#include "config/config.def"

/* ---- rules about many keys ---- */

/* Groups of ZeRO are equally many neighbours, with whole sequences; so are the ranks of the same experts in them. */
static void check_zero_group(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t group = c->parallel.zero_group, cp = c->parallel.cp, dp = c->derived.dp;
    const int64_t ranks = group * c->parallel.tp, experts = c->parallel.ep * c->parallel.etp;
    char text[200];
    if (!group || group == dp * cp || c->derived.any_world) return;
    snprintf(text, sizeof text, "a multiple of cp that divides the ranks of dp x cp, here %lld x %lld", (long long)dp,
             (long long)cp);
    RULE(group % cp == 0 && dp * cp % group == 0, text, CFG_parallel_zero_group, CFG_parallel_cp);
    config_take(r, "parallel.zero_group=0");
    if (!c->moe.experts) return;
    RULE(ranks % experts == 0 || experts % ranks == 0, "zero_group x tp must divide ep x etp, or the other way round",
         CFG_parallel_zero_group, CFG_parallel_ep, CFG_parallel_etp, CFG_parallel_tp);
    config_take(r, "parallel.zero_group=0");
}

static void check_layout(ConfigReader *r)
{
    const Config *c = r->config;
    int64_t tp = c->parallel.tp, world_size = c->derived.world_size;
    const int64_t dense = config_dense_ranks(c), expert = config_expert_ranks(c);
    const int64_t both = common_multiple(dense, expert);
    char text[200];
    snprintf(text, sizeof text, "tp x pp x cp must divide the number of ranks: the world size is %lld",
             (long long)world_size);
    RULE(world_size % dense == 0, text, CFG_parallel_tp, CFG_parallel_pp, CFG_parallel_cp);
    config_take_ranks(r, both);
    snprintf(text, sizeof text, "ep x etp x pp must divide the number of ranks: the world size is %lld",
             (long long)world_size);
    RULE(world_size % expert == 0, text, CFG_parallel_ep, CFG_parallel_etp, CFG_parallel_pp);
    config_take_ranks(r, both);
    const int64_t parts = kv_head_parts(c->parallel.tp_blocks, c->model.heads, c->model.kv_heads, c->model.head_dim);
    snprintf(text, sizeof text,
             "tp must divide kv_heads x parts, here %lld x %lld: a kv head can be cut into tp_blocks / kv_heads "
             "parts, fewer where that does not divide head_dim or its query heads",
             (long long)c->model.kv_heads, (long long)parts);
    RULE(!config_has_attention(c) || c->model.kv_heads * parts % tp == 0, text, CFG_parallel_tp, CFG_model_kv_heads,
         CFG_model_heads, CFG_model_head_dim, CFG_parallel_tp_blocks);
    config_take_near(r, CFG_parallel_tp);
    RULE(!c->parallel.sp || c->train.micro_batch * c->model.seq % (tp * c->parallel.cp) == 0,
         c->parallel.cp > 1 ? "with sp, tp x cp must divide micro_batch * seq"
                            : "with sp, tp must divide micro_batch * seq",
         CFG_parallel_tp, CFG_train_micro_batch, CFG_model_seq);
    config_take(r, "parallel.sp=false");
    RULE(c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || c->parallel.tp_blocks % tp == 0,
         "the layout cuts inside a canonical block: tp must divide tp_blocks", CFG_run_reproducible, CFG_parallel_tp,
         CFG_parallel_tp_blocks);
    config_take(r, "parallel.tp_blocks=%lld, or run.reproducible=run", (long long)tp);
    check_zero_group(r);
}

/* Who shortens a run to try it out wants it to stop early, not another schedule. */
static void short_trial(const Config *c, const char *rule, char *out, size_t size)
{
    const bool asked = c->origin[CFG_train_steps].kind >= ORIGIN_FILE && c->train.steps && !c->optim.decay_steps;
    if (asked)
        snprintf(out, size, "%s; to try the first steps of a longer run: train.stop_at=%lld instead of train.steps",
                 rule, (long long)c->train.steps);
    else snprintf(out, size, "%s", rule);
}

static void check_training(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t samples = batch_ramp_samples(&c->derived.batch, c->derived.steps);
    int64_t tokens;
    char text[200];
    snprintf(text, sizeof text, "global_batch must be a multiple of micro_batch x dp, where dp is %lld",
             (long long)c->derived.dp);
    RULE(batch_ramp_divides(&c->derived.batch, c->train.micro_batch * c->derived.dp), text, CFG_train_global_batch,
         CFG_train_micro_batch, CFG_parallel_tp, CFG_parallel_pp, CFG_parallel_cp);
    config_take_near(r, CFG_train_micro_batch);
    RULE(samples < INT64_MAX && !__builtin_mul_overflow(samples, c->model.seq, &tokens),
         "more tokens than can be counted", CFG_train_steps, CFG_train_global_batch, CFG_model_seq);
    short_trial(c, "the warm-up must be shorter than decay_steps (0: the run's steps)", text, sizeof text);
    RULE(!c->optim.warmup || c->optim.warmup < c->derived.decay_steps, text, CFG_optim_warmup, CFG_optim_decay_steps,
         CFG_train_steps, CFG_train_tokens);
    bool wsd = c->optim.schedule == LR_WSD;
    short_trial(c, "warm-up and closing decay must fit into decay_steps (0: the run's steps)", text, sizeof text);
    RULE(!wsd || c->derived.wsd_decay + c->optim.warmup <= c->derived.decay_steps, text, CFG_optim_wsd_decay,
         CFG_optim_warmup, CFG_optim_decay_steps, CFG_train_steps);
}

void config_check_rules(ConfigReader *r)
{
    config_check_mixer(r);
    check_run_keys(r);
    check_model_keys(r);
    check_parallel_keys(r);
    config_check_attention(r);
    if (r->config->moe.experts) check_moe_keys(r);
    config_check_moe(r);
    check_layout(r);
    config_check_context(r);
    config_check_slices(r);
    check_train_keys(r);
    check_optim_keys(r);
    check_training(r);
    check_data_keys(r);
    check_checkpoint_keys(r);
    check_log_keys(r);
    check_debug_keys(r);
}

/* All broken rules are known before a way out of any of them is tried. */
void config_check(ConfigReader *r)
{
    ConfigReader before = *r;
    config_check_rules(&before);
    if (before.mistakes == r->mistakes) return;
    r->before = &before;
    config_check_rules(r);
    r->before = NULL;
}
