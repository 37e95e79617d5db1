/* See small_run.h. Each cut takes the first of its values, from the smallest on, with which all rules still hold. */
#include "cli/small_run.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/spec.h"

enum { LAYERS = 8, HEAD_DIM = 8, WINDOW = 8, KEYS_OF_BLOCK = 8, TRIES = 64, WIDEST = 1024 };

typedef struct {
    const Config *c;
    char *words;
} Small;

static void add(char *words, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static bool try(const Small *k, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void add(char *words, const char *fmt, ...)
{
    const size_t used = strlen(words);
    va_list args;
    va_start(args, fmt);
    vsnprintf(words + used, SMALL_BYTES - used, fmt, args);
    va_end(args);
}

/* Keeps the words if the configuration is one with them. */
static bool try(const Small *k, const char *fmt, ...)
{
    const size_t used = strlen(k->words);
    va_list args;
    va_start(args, fmt);
    vsnprintf(k->words + used, SMALL_BYTES - used, fmt, args);
    va_end(args);
    if (spec_allows(k->c, k->words)) return true;
    k->words[used] = 0;
    return false;
}

static int64_t at_least(int64_t least, int64_t x) { return x > least ? x : least; }
static int64_t at_most(int64_t most, int64_t x) { return x < most ? x : most; }

/* ---- what is not of the model ---- */

static bool is_of(const ConfigKey *key, const char *sections)
{
    const char *found = strstr(sections, key->section);
    return found && found[strlen(key->section)] == ' ';
}

static void put_default(const ConfigKey *key, ConfigId id, char *words)
{
    char buf[CONFIG_VALUE_BYTES];
    const char *value = config_default(id, buf);
    add(words, " %s.%s=%s", key->section, key->name, strcmp(value, "(empty)") ? value : "");
}

/* Keys of the machine, of files and of what a run leaves are as without a word. */
static void put_plain(char *words)
{
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        const bool of_precision = i == CFG_run_precision || i == CFG_run_fp8 || i == CFG_run_fp8_weights;
        if (!key->fixed && !of_precision && is_of(key, "run data checkpoint log debug "))
            put_default(key, (ConfigId)i, words);
    }
}

/* The first rule that the words break. */
static Err why_not(const Small *k)
{
    Config small = { 0 };
    Grid grid;
    Err err = config_for(k->c, 0, k->words, &small);
    if (!err) err = grid_try(&small, &grid);
    config_release(&small);
    return err ? err : err_set(ERR_CONFIG, "config check --layout: the layout does not promise the bits of one rank");
}

static Err put_run(const Small *k, const char *data)
{
    put_plain(k->words);
    add(k->words,
        " run.device=cpu run.reproducible=layout run.bind=none debug.threads=1 data.train=%s data.split=", data);
    add(k->words, " train.steps=%d train.tokens=0 train.stop_at=0 train.max_minutes=0 train.eval_every=0", SMALL_STEPS);
    add(k->words, " train.eval_samples=0 train.eval_batches=0 train.eval_tasks= checkpoint.every=0 optim.warmup=0");
    add(k->words, " optim.decay_steps=0");
    for (int i = 0; i < 8; i++) { /* (each with each: the first that is enough) */
        const size_t used = strlen(k->words);
        if (i & 1) add(k->words, " optim.states=device");
        if (i & 2) add(k->words, " parallel.seq_blocks=%lld", 2 * (long long)k->c->parallel.cp);
        if (i & 4) add(k->words, " run.precision=fp32");
        if (spec_allows(k->c, k->words)) return ERR_OK;
        if (i < 7) k->words[used] = 0;
    }
    return why_not(k);
}

/* ---- the model ---- */

/* As many heads of keys as ranks need, and of queries that read each what the model has, up to four. */
static void cut_heads(const Small *k)
{
    const int64_t kv = k->c->model.kv_heads, tp = k->c->parallel.tp, group = at_most(4, k->c->model.heads / kv);
    const bool latent = config_is_latent(k->c);
    for (int64_t n = kv < tp ? kv : at_least(tp, at_most(2, kv)); n <= kv; n *= 2) {
        const int64_t heads = n * group;
        char more[256] = "";
        if (latent)
            snprintf(more, sizeof more,
                     " model.qk_nope_head_dim=8 model.qk_rope_head_dim=8 model.v_head_dim=8 model.kv_lora_rank=16%s",
                     k->c->model.q_lora_rank ? " model.q_lora_rank=16" : "");
        else
            snprintf(more, sizeof more, " model.kv_heads=%lld model.head_dim=%d%s", (long long)n, HEAD_DIM,
                     k->c->model.rope_dim ? " model.rope_dim=4" : "");
        if (try(k, " model.heads=%lld model.hidden=%lld%s", (long long)heads, (long long)heads * HEAD_DIM, more))
            return;
    }
}

static void cut_delta(const Small *k)
{
    const int64_t keys = k->c->model.delta_key_heads, tp = k->c->parallel.tp;
    if (!config_has_delta(k->c)) return;
    const int64_t group = k->c->model.delta_value_heads / keys;
    for (int64_t n = keys < tp ? keys : at_least(tp, at_most(2, keys)); n <= keys; n *= 2)
        if (try(k,
                " model.delta_key_heads=%lld model.delta_value_heads=%lld model.delta_key_dim=8 "
                "model.delta_value_dim=8",
                (long long)n, (long long)(n * group)))
            return;
}

static void cut_mamba(const Small *k)
{
    const int64_t groups = k->c->model.mamba_groups, tp = k->c->parallel.tp;
    if (!config_has_mamba(k->c)) return;
    const int64_t each = at_most(4, k->c->model.mamba_heads / groups);
    for (int64_t n = groups < tp ? groups : at_least(tp, at_most(2, groups)); n <= groups; n *= 2)
        if (try(k, " model.mamba_heads=%lld model.mamba_groups=%lld model.mamba_head_dim=8 model.mamba_state=8",
                (long long)(n * each), (long long)n))
            return;
}

/* One key: n, n + step, ... below `was`. */
static void cut_key(const Small *k, const char *key, int64_t first, int64_t step, int64_t was)
{
    for (int64_t n = first; n < was && n < first + TRIES * step; n += step)
        if (try(k, " %s=%lld", key, (long long)n)) return;
}

static void cut_experts(const Small *k)
{
    const int64_t ep = k->c->parallel.ep, topk = k->c->moe.topk;
    if (!k->c->moe.experts) return;
    cut_key(k, "moe.experts", (topk + 1 + ep - 1) / ep * ep, ep, k->c->moe.experts);
    cut_key(k, "moe.ffn", 16, 16, k->c->moe.ffn);
    if (k->c->moe.shared_ffn) cut_key(k, "moe.shared_ffn", 16, 16, k->c->moe.shared_ffn);
}

/* Windows that were wider than so many positions are that wide. */
static void cut_windows(const Small *k)
{
    char text[CONFIG_VALUE_BYTES], *out = text;
    for (const char *in = k->c->model.window; *in && out < text + sizeof text - 8;) {
        char *end = (char *)in;
        const bool times = in > k->c->model.window && in[-1] == '*';
        const long long n = isdigit((unsigned char)*in) ? strtoll(in, &end, 10) : 0;
        if (end == in) *out++ = *in++;
        else out += sprintf(out, "%lld", !times && n > WINDOW ? (long long)WINDOW : n), in = end;
    }
    *out = 0;
    try(k, " model.window=%s", text);
}

static void cut_batch(const Small *k)
{
    const int64_t dp = k->c->derived.dp, pp = k->c->parallel.pp, was = k->c->derived.microbatches;
    const int64_t some = at_most(was, pp > 1 ? 2 * pp : 2);
    for (int64_t samples = 1; samples <= 4; samples++)
        for (int64_t n = some; n < some + TRIES; n++)
            if (try(k, " train.micro_batch=%lld train.global_batch=%lld", (long long)samples,
                    (long long)(samples * n * dp)))
                return;
}

Err small_run_words(const Config *c, const char *data, char words[SMALL_BYTES])
{
    const Small k = { c, words };
    *words = 0;
    TRY(put_run(&k, data));
    cut_key(&k, "model.layers", LAYERS, 1, c->model.layers);
    cut_heads(&k);
    cut_delta(&k);
    cut_mamba(&k);
    cut_key(&k, "model.ffn", 32, 16, c->model.ffn);
    cut_experts(&k);
    cut_batch(&k);
    for (int64_t n = 16; n < c->model.seq && n < 16384; n *= 2)
        if (config_has_attention(c) ? try(&k, " model.seq=%lld parallel.attn_block=%d", (long long)n, KEYS_OF_BLOCK)
                                    : try(&k, " model.seq=%lld", (long long)n))
            break;
    cut_windows(&k);
    try(&k, " model.vocab=0");
    ASSERT(strlen(words) + 1 < SMALL_BYTES);
    Config small = { 0 };
    Err err = config_for(c, 0, words, &small);
    if (!err && (small.model.hidden > WIDEST || small.model.ffn > 4 * WIDEST))
        err = err_set(ERR_CONFIG, "config check --layout: no model of a width below %lld has this layout",
                      (long long)small.model.hidden);
    config_release(&small);
    return err;
}

void small_run_alone(const Config *small, char words[SMALL_BYTES])
{
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        if (!key->fixed && is_of(key, "parallel ")) put_default(key, (ConfigId)i, words);
    }
    add(words, " train.recompute=none train.offload=0 optim.states=device");
    if (small->moe.experts) add(words, " moe.dispatcher=alltoall");
    add(words, " parallel.tp_blocks=%lld parallel.seq_blocks=%lld parallel.attn_block=%lld",
        (long long)small->parallel.tp_blocks, (long long)small->parallel.seq_blocks,
        (long long)small->parallel.attn_block);
    ASSERT(strlen(words) + 1 < SMALL_BYTES);
}
