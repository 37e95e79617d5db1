/*
 * A configuration from a file and a command line: read (config_read.c), completed (config_resolve.c), judged
 * (config_check.c). And once more with other values, for who looks for a way out of a mistake.
 */
#include <string.h>

#include "config/config_reader.h"
#include "base/log.h"

enum { WORD_BYTES = 160 };

/* ---- once more, with other values ---- */

/* Values that were filled in are left open again. */
static void leave_open(Config *c)
{
    static const size_t sizes[] = { [CONFIG_INT] = sizeof(int64_t),
                                    [CONFIG_REAL] = sizeof(double),
                                    [CONFIG_BOOL] = sizeof(int),
                                    [CONFIG_PICK] = sizeof(unsigned),
                                    [CONFIG_TEXT] = sizeof(char *) };
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        if (c->origin[i].kind != ORIGIN_AUTO) continue;
        memcpy((char *)c + key->offset, (const char *)&config_defaults + key->offset, sizes[key->kind]);
        c->origin[i] = (ConfigOrigin){ ORIGIN_DEFAULT, 0 };
    }
    if (c->derived.open_micro_batch) c->train.micro_batch = CONFIG_AUTO;
}

/* Completes c as it would be with that micro-batch. Does a rule refuse it for that? */
static bool refuses_micro_batch(const Config *c, int64_t micro_batch)
{
    static _Thread_local Config trial;
    ConfigReader r = { .config = &trial };
    trial = *c;
    setup_init(&trial.memory);
    trial.train.micro_batch = micro_batch;
    config_resolve(&r);
    config_check_rules(&r);
    config_release(&trial);
    return r.doubtful[CFG_train_micro_batch];
}

/* The least micro-batch that no rule refuses; 1 where there is none. */
static int64_t least_micro_batch(const Config *c)
{
    BatchRamp ramp;
    batch_ramp_read(c->train.global_batch, &ramp);
    const int64_t high = config_key(CFG_train_micro_batch)->int_high, most = batch_ramp_most(&ramp);
    for (int64_t n = 1; n <= most && n <= high; n++)
        if (batch_ramp_divides(&ramp, n) && !refuses_micro_batch(c, n)) return n;
    return 1;
}

/* Fills in what was left open, from what was given. */
static void complete(ConfigReader *r)
{
    Config *c = r->config;
    c->derived.open_micro_batch = c->train.micro_batch == CONFIG_AUTO;
    if (c->derived.open_micro_batch) c->train.micro_batch = least_micro_batch(c);
    config_resolve(r);
}

static void read_values(ConfigReader *r, const char *values)
{
    char word[WORD_BYTES];
    for (; *values; values += *values == ' ') {
        const size_t n = strcspn(values, " ");
        if (n >= sizeof word) config_complain(r, "'%.40s...': a word of %zu characters", values, n);
        snprintf(word, sizeof word, "%.*s", (int)n, values);
        if (n && n < sizeof word) config_read_override(r, word);
        values += n;
    }
}

/* r->config becomes c with those values, and those ranks unless 0; r says what is wrong with it. */
static void read_again(ConfigReader *r, const Config *c, const char *values, int64_t ranks)
{
    *r->config = *c;
    setup_init(&r->config->memory);
    leave_open(r->config);
    read_values(r, values);
    if (r->mistakes) return;
    if (ranks) r->config->derived.world_size = ranks, r->config->derived.any_world = false;
    complete(r);
    config_check_rules(r);
}

bool config_with(const Config *c, const char *values, Config *out)
{
    static _Thread_local Config same; /* two are too large for a stack */
    ConfigReader was = { .config = &same }, now = { .config = out };
    read_again(&was, c, "", 0);
    config_release(&same);
    read_again(&now, c, values, 0);
    return !was.memory && !now.memory && config_breaks_no_more(&now, &was);
}

/* The first mistake alone, and how many there are. */
static Err first_mistake(const ConfigReader *r)
{
    char more[40] = "";
    if (r->memory) return err_set(ERR_MEMORY, "no memory for the configuration's texts");
    if (!r->mistakes) return ERR_OK;
    if (r->mistakes > 1) snprintf(more, sizeof more, " (and %d more)", r->mistakes - 1);
    return err_set(ERR_CONFIG, "%.*s%s", (int)strcspn(r->report, "\n"), r->report, more);
}

Err config_for(const Config *c, int64_t ranks, const char *values, Config *out)
{
    ConfigReader now = { .config = out };
    read_again(&now, c, values, ranks);
    return first_mistake(&now);
}

Err config_can_read(const Config *c, const char *values)
{
    Config same = *c;
    ConfigReader now = { .config = &same };
    setup_init(&same.memory);
    read_values(&now, values);
    config_release(&same);
    return first_mistake(&now);
}

/* ---- the whole ---- */

static Err report(const ConfigReader *r)
{
    int length = (int)r->report_used - 1; /* without the last line's end */
    if (r->mistakes == 1) return err_set(ERR_CONFIG, "%.*s", length, r->report);
    return err_set(ERR_CONFIG, "%d mistakes in the configuration%s:\n%.*s", r->mistakes,
                   config_report_is_full(r) ? ", the first of them" : "", length, r->report);
}

/* Further mistakes, beside those that are known. */
static void judge(ConfigReader *r, ConfigSource source)
{
    bool doubtful[CFG_COUNT];
    for (int i = 0; i < CFG_COUNT; i++) doubtful[i] = r->bad[i] || r->doubtful[i];
    if (!r->mistakes || r->memory || !source.judge || source.judge(r->config, doubtful) != ERR_CONFIG) return;
    const char *hint = err_hint_text();
    config_complain(r, "%s%s%s", err_message(), *hint ? "; " : "", hint);
}

/* The blocks that keep the bits of all layouts where cp alone cuts them; 0: no number does. (A ring must not cut blocks
 * of keys either.) */
static int64_t blocks_for_cp(const Config *c)
{
    const LayerPattern *ways = &c->derived.cp_comm;
    const int64_t blocks = 2 * c->parallel.cp, part = c->model.seq / blocks;
    const bool ring = layer_pattern_has(ways, CONTEXT_RING) || layer_pattern_has(ways, CONTEXT_HIERARCHICAL);
    const bool power = (blocks & (blocks - 1)) == 0, whole = !ring || part % c->parallel.attn_block == 0;
    return power && whole && c->parallel.slices == 1 && c->model.seq % blocks == 0 ? blocks : 0;
}

/* A run that could have had the bits of all layouts, were it not for its cuts; said by its first rank. */
static void warn_of_bits(const Config *c)
{
    const bool by_tp = c->parallel.tp_blocks % c->parallel.tp != 0, by_cp = !by_tp && c->parallel.cp > 1;
    const int64_t cuts = by_tp ? c->parallel.tp : by_cp ? c->parallel.cp : c->parallel.slices;
    const int64_t blocks = by_cp ? blocks_for_cp(c) : 0;
    char instead[80] = "";
    if (log_rank() || c->origin[CFG_run_reproducible].kind != ORIGIN_AUTO || c->run.device != RUN_DEVICE_CPU ||
        c->run.reproducible != RUN_REPRODUCIBLE_RUN || c->run.precision != RUN_PRECISION_FP32)
        return;
    if (blocks)
        snprintf(instead, sizeof instead, "; a new run keeps them alike with parallel.seq_blocks=%lld",
                 (long long)blocks);
    log_warn("parallel.%s = %lld cuts inside a canonical block: this run is reproducible = run, its bits differ "
             "from those of other layouts%s",
             by_tp   ? "tp"
             : by_cp ? "cp"
                     : "slices",
             (long long)cuts, instead);
}

Err config_read(Config *c, ConfigSource source)
{
    ConfigReader r = { .config = c, .again = read_again, .written = source.earlier, .compared = source.compared };
    *c = config_defaults;
    setup_init(&c->memory);
    c->derived.world_size = source.world_size > 0 ? source.world_size : 1;
    c->derived.any_world = source.world_size == CONFIG_ANY_WORLD;
    c->derived.gpus = source.gpus;
    c->derived.pairs = source.pairs;
    c->derived.tiles = source.tiles;
    c->path = config_keep(&r, "%s", source.path ? source.path : "");
    if (source.text) config_read_text(&r, source.text);
    else if (source.path) TRY(config_read_file(&r, source.path));
    r.written = false;
    if (source.earlier) config_read_before(&r);
    for (int i = 0; i < source.override_count; i++) config_read_override(&r, source.overrides[i]);
    complete(&r);
    config_check(&r);
    judge(&r, source);
    if (r.memory) return err_set(ERR_MEMORY, "no memory for the configuration's texts");
    if (r.mistakes) return report(&r);
    warn_of_bits(c);
    return ERR_OK;
}
