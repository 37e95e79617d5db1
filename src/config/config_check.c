/*
 * What a configuration means as a whole: config_check_unbuilt() is the list of what this build cannot do,
 * config_check() that of relations between keys. A rule about a key whose value was already refused, or is not built,
 * is not looked at, so one mistake is reported once. What a complaint proposes stands behind the rule, as config_take
 * (config_hint.c), and never in its text.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "config/config_reader.h"
#include "base/heads.h"
#include "base/layer_set.h"
#include "base/int64.h"
#include "base/rank_list.h"

/* ---- rules ---- */

static bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

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

/* Kernels divide by 1 - x, and compute in single precision: 0.99999999 is 1 there. */
static bool below_one(double x) { return (float)x < 1; }

static void check_model(ConfigReader *r)
{
    const Config *c = r->config;
    bool auto_dim = c->origin[CFG_model_head_dim].kind == ORIGIN_AUTO;
    bool cpu = c->run.device == RUN_DEVICE_CPU;
    RULE(!strchr(c->run.name, '/'), "a name must not contain '/'", CFG_run_name);
    RULE(strcmp(c->run.name, ".") != 0 && strcmp(c->run.name, "..") != 0,
         "a name of a folder that is there already", CFG_run_name);
    RULE(c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || (cpu && c->run.precision == RUN_PRECISION_FP32),
         "every layout gives the same bits on the CPU in fp32 only", CFG_run_reproducible, CFG_run_device,
         CFG_run_precision);
    config_take(r, "run.reproducible=run");
    RULE(!c->run.graphs || !cpu, "only device=cuda has graphs", CFG_run_graphs, CFG_run_device);
    RULE(!c->run.graphs || c->derived.world_size == 1,
         "graphs do not record communication: one rank alone has them", CFG_run_graphs);
    RULE(!c->run.autotune || !cpu, "only device=cuda has products to choose between", CFG_run_autotune,
         CFG_run_device);
    RULE(!c->debug.poison || cpu, "only the CPU's memory can be filled on release", CFG_debug_poison,
         CFG_run_device);
    RULE(c->model.heads % c->model.kv_heads == 0, "heads must be a multiple of kv_heads", CFG_model_heads,
         CFG_model_kv_heads);
    RULE(!auto_dim || config_is_latent(c) || c->model.hidden % c->model.heads == 0,
         "hidden must be a multiple of heads unless head_dim is given", CFG_model_hidden, CFG_model_heads);
    char most[80];
    snprintf(most, sizeof most, "head_dim, if not given hidden / heads, must not be above %lld",
             (long long)config_key(CFG_model_head_dim)->int_high);
    RULE(c->model.head_dim <= config_key(CFG_model_head_dim)->int_high, most, CFG_model_head_dim,
         CFG_model_hidden, CFG_model_heads);
    RULE(c->model.ffn > 0, "too narrow for the usual ffn: give model.ffn", CFG_model_hidden, CFG_model_ffn);
    RULE(c->model.activation == MODEL_ACTIVATION_CLAMPED_SWIGLU ||
             c->model.activation_limit == config_defaults.model.activation_limit,
         "only activation = clamped_swiglu reads it", CFG_model_activation_limit, CFG_model_activation);
    RULE(!c->model.mtp_layers || c->model.position != MODEL_POSITION_LEARNED,
         "multi-token prediction has no learned positions", CFG_model_mtp_layers, CFG_model_position);
    config_take(r, "model.position=rope, or model.position=none");
    RULE(c->model.mtp_layers || c->model.mtp_weight == config_defaults.model.mtp_weight,
         "no losses to weigh: give mtp_layers", CFG_model_mtp_weight, CFG_model_mtp_layers);
    RULE(c->model.layers + c->model.mtp_layers <= LAYERS_MAX, "at most 1024 with model.layers",
         CFG_model_mtp_layers, CFG_model_layers);
    RULE(below_one(c->model.dropout), "dropout must be below 1 in single precision", CFG_model_dropout);
    RULE(below_one(c->model.attention_dropout), "dropout must be below 1 in single precision",
         CFG_model_attention_dropout);
}

static void check_nccl(ConfigReader *r)
{
    const Config *c = r->config;
    const bool cpu = c->run.device == RUN_DEVICE_CPU;
    const int64_t tp_min = c->parallel.nccl_tp_min_ctas, tp_max = c->parallel.nccl_tp_max_ctas;
    const int64_t dp_min = c->parallel.nccl_dp_min_ctas, dp_max = c->parallel.nccl_dp_max_ctas;
    RULE(!tp_max || tp_min <= tp_max, "the least must not be above the most", CFG_parallel_nccl_tp_min_ctas,
         CFG_parallel_nccl_tp_max_ctas);
    RULE(!dp_max || dp_min <= dp_max, "the least must not be above the most", CFG_parallel_nccl_dp_min_ctas,
         CFG_parallel_nccl_dp_max_ctas);
    RULE(!tp_min || !cpu, "only device=cuda has NCCL", CFG_parallel_nccl_tp_min_ctas, CFG_run_device);
    RULE(!tp_max || !cpu, "only device=cuda has NCCL", CFG_parallel_nccl_tp_max_ctas, CFG_run_device);
    RULE(!dp_min || !cpu, "only device=cuda has NCCL", CFG_parallel_nccl_dp_min_ctas, CFG_run_device);
    RULE(!dp_max || !cpu, "only device=cuda has NCCL", CFG_parallel_nccl_dp_max_ctas, CFG_run_device);
}

static void check_blocks(ConfigReader *r)
{
    const Config *c = r->config;
    int64_t B = c->parallel.tp_blocks;
    RULE(is_power_of_two(B), "must be a power of two", CFG_parallel_tp_blocks);
    RULE(c->model.ffn % B == 0, "tp_blocks must divide ffn", CFG_parallel_tp_blocks, CFG_model_ffn);
    RULE(!config_is_latent(c) || c->model.heads % B == 0, "with attention = mla tp_blocks must divide heads",
         CFG_parallel_tp_blocks, CFG_model_heads, CFG_model_attention);
    RULE(config_is_latent(c) || c->model.heads * c->model.head_dim % B == 0,
         "tp_blocks must divide heads * head_dim", CFG_parallel_tp_blocks, CFG_model_heads,
         CFG_model_head_dim);
    RULE(!c->model.mtp_layers || c->model.hidden % B == 0,
         "tp_blocks must divide hidden, the outputs of a projection of multi-token prediction",
         CFG_parallel_tp_blocks, CFG_model_hidden, CFG_model_mtp_layers);
    RULE(config_is_latent(c) || config_qkv_width(c) % B == 0,
         "tp_blocks must divide (heads + 2 kv_heads) * head_dim", CFG_parallel_tp_blocks, CFG_model_heads,
         CFG_model_kv_heads, CFG_model_head_dim);
    RULE(is_power_of_two(c->parallel.seq_blocks), "must be a power of two", CFG_parallel_seq_blocks);
    RULE(c->model.seq % c->parallel.seq_blocks == 0, "seq_blocks must divide seq", CFG_parallel_seq_blocks,
         CFG_model_seq);
    RULE(is_power_of_two(c->parallel.attn_block), "must be a power of two", CFG_parallel_attn_block);
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
    const int64_t parts =
        kv_head_parts(c->parallel.tp_blocks, c->model.heads, c->model.kv_heads, c->model.head_dim);
    snprintf(
        text, sizeof text,
        "tp must divide kv_heads x parts, here %lld x %lld: a kv head can be cut into tp_blocks / kv_heads "
        "parts, fewer where that does not divide head_dim or its query heads",
        (long long)c->model.kv_heads, (long long)parts);
    RULE(c->model.kv_heads * parts % tp == 0, text, CFG_parallel_tp, CFG_model_kv_heads, CFG_model_heads,
         CFG_model_head_dim, CFG_parallel_tp_blocks);
    config_take_near(r, CFG_parallel_tp);
    RULE(c->model.ffn % tp == 0, "tp must divide ffn", CFG_parallel_tp, CFG_model_ffn);
    RULE(!c->model.mtp_layers || c->model.hidden % tp == 0, "with mtp_layers, tp must divide hidden",
         CFG_parallel_tp, CFG_model_hidden, CFG_model_mtp_layers);
    RULE(!c->parallel.sp || tp > 1, "sp cuts rows over tensor-parallel ranks: it needs tp > 1",
         CFG_parallel_sp, CFG_parallel_tp);
    config_take(r, "parallel.sp=auto");
    RULE(!c->parallel.sp || c->train.micro_batch * c->model.seq % (tp * c->parallel.cp) == 0,
         c->parallel.cp > 1 ? "with sp, tp x cp must divide micro_batch * seq"
                            : "with sp, tp must divide micro_batch * seq",
         CFG_parallel_tp, CFG_train_micro_batch, CFG_model_seq);
    config_take(r, "parallel.sp=false");
    RULE(c->run.reproducible != RUN_REPRODUCIBLE_LAYOUT || c->parallel.tp_blocks % tp == 0,
         "the layout cuts inside a canonical block: tp must divide tp_blocks", CFG_run_reproducible,
         CFG_parallel_tp, CFG_parallel_tp_blocks);
    config_take(r, "parallel.tp_blocks=%lld, or run.reproducible=run", (long long)tp);
    const bool alone = world_size == 1 && !c->derived.any_world;
    RULE(!c->debug.comm_check || !alone, "one rank has no communication to compare", CFG_debug_comm_check);
    RULE(!c->debug.comm_delay_ms || !alone, "one rank has no communication to delay",
         CFG_debug_comm_delay_ms);
}

/* Who shortens a run to try it out wants it to stop early, not another schedule. */
static void short_trial(const Config *c, const char *rule, char *out, size_t size)
{
    const bool asked =
        c->origin[CFG_train_steps].kind >= ORIGIN_FILE && c->train.steps && !c->optim.decay_steps;
    if (asked)
        snprintf(out, size,
                 "%s; to try the first steps of a longer run: train.stop_at=%lld instead of train.steps",
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
    RULE(batch_ramp_divides(&c->derived.batch, c->train.micro_batch * c->derived.dp), text,
         CFG_train_global_batch, CFG_train_micro_batch, CFG_parallel_tp, CFG_parallel_pp, CFG_parallel_cp);
    config_take_near(r, CFG_train_micro_batch);
    RULE((c->train.steps > 0) != (c->train.tokens > 0), "give either steps or tokens", CFG_train_tokens,
         CFG_train_steps);
    RULE(samples < INT64_MAX && !__builtin_mul_overflow(samples, c->model.seq, &tokens),
         "more tokens than can be counted", CFG_train_steps, CFG_train_global_batch, CFG_model_seq);
    RULE(c->optim.min_lr <= c->optim.lr, "min_lr must not be above lr", CFG_optim_min_lr, CFG_optim_lr);
    RULE(below_one(c->optim.beta1), "must be below 1 in single precision", CFG_optim_beta1);
    RULE(below_one(c->optim.beta2), "must be below 1 in single precision", CFG_optim_beta2);
    short_trial(c, "the warm-up must be shorter than decay_steps (0: the run's steps)", text, sizeof text);
    RULE(!c->optim.warmup || c->optim.warmup < c->derived.decay_steps, text, CFG_optim_warmup,
         CFG_optim_decay_steps, CFG_train_steps, CFG_train_tokens);
    bool wsd = c->optim.schedule == OPTIM_SCHEDULE_WSD;
    RULE(!c->optim.wsd_decay || wsd, "only schedule = wsd has a closing decay", CFG_optim_wsd_decay,
         CFG_optim_schedule);
    short_trial(c, "warm-up and closing decay must fit into decay_steps (0: the run's steps)", text,
                sizeof text);
    RULE(!wsd || c->derived.wsd_decay + c->optim.warmup <= c->derived.decay_steps, text, CFG_optim_wsd_decay,
         CFG_optim_warmup, CFG_optim_decay_steps, CFG_train_steps);
}

/* Do evaluations and checkpoints ever fall on the same steps, and on as many as either can? */
static bool evaluates_what_it_saves(const Config *c)
{
    const int64_t save = c->checkpoint.every, eval = c->train.eval_every;
    return save && eval && (save % eval == 0 || eval % save == 0);
}

static void check_keeping(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t every = c->checkpoint.every, keep_every = c->checkpoint.keep_every;
    const bool best = c->checkpoint.keep_best > 0;
    RULE(!keep_every || (every && keep_every % every == 0),
         "keep_every must be a multiple of every: of the steps between, none is saved",
         CFG_checkpoint_keep_every, CFG_checkpoint_every);
    RULE(!best || *c->data.valid || *c->data.split,
         "the best is that with the lowest validation loss: give data.valid or data.split",
         CFG_checkpoint_keep_best, CFG_data_valid);
    RULE(!best || evaluates_what_it_saves(c),
         "what is saved must be evaluated: of checkpoint.every and train.eval_every, neither 0, one must "
         "divide the "
         "other",
         CFG_checkpoint_keep_best, CFG_checkpoint_every, CFG_train_eval_every);
    RULE(best || !*c->checkpoint.best_set, "only keep_best goes by a validation set", CFG_checkpoint_best_set,
         CFG_checkpoint_keep_best);
}

/* (with the longest name that is put behind it) */
enum { PATH_MOST = PATH_MAX - 256 };

static bool path_fits(const char *path) { return strlen(path) <= PATH_MOST; }

static void check_files(ConfigReader *r)
{
    const Config *c = r->config;
    char text[80];
    snprintf(text, sizeof text, "a path of at most %d bytes has room for names in it", PATH_MOST);
    RULE(path_fits(c->run.dir), text, CFG_run_dir);
    RULE(path_fits(c->data.tokenizer), text, CFG_data_tokenizer);
    RULE(path_fits(c->checkpoint.resume), text, CFG_checkpoint_resume);
    RULE(path_fits(c->checkpoint.load), text, CFG_checkpoint_load);
    RULE(!*c->data.valid || !*c->data.split, "give either valid or split", CFG_data_valid, CFG_data_split);
    RULE(!*c->data.split || split_is_valid(c->data.split),
         "must be two or three shares of documents, such as 98,2", CFG_data_split);
    RULE(c->data.order != DATA_ORDER_MEGATRON || c->data.seed <= UINT32_MAX,
         "Megatron's order takes seeds below 2^32", CFG_data_seed, CFG_data_order);
    RULE(*c->data.tokenizer, "must not be empty", CFG_data_tokenizer);
    RULE(*c->checkpoint.resume, "must be auto, none or a path", CFG_checkpoint_resume);
    RULE(c->derived.trace_last >= 0, "must be a step, or two in order such as 100-104", CFG_log_trace_steps);
    RULE(!*c->log.trace_steps || !c->log.trace_every, "give either trace_steps or trace_every",
         CFG_log_trace_steps, CFG_log_trace_every);
    RULE(!*c->log.trace_ranks ||
             rank_list_read(c->log.trace_ranks,
                            (int)(c->derived.any_world ? CONFIG_RANKS_MAX : c->derived.world_size), NULL),
         "must be ranks of the run, counted from 0, such as 0,3-5, or all", CFG_log_trace_ranks);
}

void config_check_rules(ConfigReader *r)
{
    check_model(r);
    check_nccl(r);
    check_blocks(r);
    config_check_attention(r);
    config_check_moe(r);
    check_layout(r);
    config_check_context(r);
    config_check_slices(r);
    check_training(r);
    check_files(r);
    check_keeping(r);
}

/* What is broken is known before a way out of any of it is tried. */
void config_check(ConfigReader *r)
{
    ConfigReader before = *r;
    config_check_rules(&before);
    if (before.mistakes == r->mistakes) return;
    r->before = &before;
    config_check_rules(r);
    r->before = NULL;
}

/* ---- what this build cannot do ---- */

static const ConfigUnbuilt unbuilt[] = {
    { "run.precision", "fp32 bf16 fp16", "fp8" },
};

const ConfigUnbuilt *config_unbuilt(int *count)
{
    *count = (int)(sizeof unbuilt / sizeof *unbuilt);
    return unbuilt;
}

static bool has_word(const char *words, const char *word)
{
    size_t n = strlen(word);
    for (; *words; words += strcspn(words, " "), words += *words == ' ')
        if (strcspn(words, " ") == n && strncmp(words, word, n) == 0) return true;
    return false;
}

void config_check_unbuilt(ConfigReader *r)
{
    char place[512], full[96], a[CONFIG_VALUE_BYTES], b[CONFIG_VALUE_BYTES];
    for (int i = 0; i < CFG_COUNT; i++) {
        ConfigId id = (ConfigId)i;
        const ConfigKey *key = config_key(id);
        snprintf(full, sizeof full, "%s.%s", key->section, key->name);
        for (size_t row = 0; row < sizeof unbuilt / sizeof *unbuilt; row++) {
            const ConfigUnbuilt *u = &unbuilt[row];
            if (strcmp(u->key, full) != 0 || r->bad[id]) continue;
            const char *value = config_value(r->config, id, a);
            const char *start = config_value(&config_defaults, id, b);
            if (u->allowed ? has_word(u->allowed, value) : strcmp(value, start) == 0) continue;
            config_origin(r->config, id, place, sizeof place);
            config_complain(r, "%s: %s = '%s': not built yet: %s", place, full, value, u->why);
            r->bad[id] = true;
        }
    }
}
