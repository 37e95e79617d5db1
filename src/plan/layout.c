/* See layout.h. */
#include "plan/layout.h"

#include <stdlib.h>
#include <string.h>

#include "base/dispatcher.h"
#include "train/spec.h"

/* The schedules that a step may take without being another algorithm, or slower by construction than one of these. A
 * fixed one is the base's. */
static const char *const schedules[] = { "1f1b",   "interleaved", "zb-h1",     "zb-h2",  "zb-v",
                                         "v-half", "dualpipe",    "dualpipev", "seq1f1b" };
enum { SLICED = 8 }; /* the one that passes slices, which no other does */

static const char *const exchanges[] = { CONTEXT_COMM_LIST(CHOICE_TEXT) };
static const char *const recomputes[] = { RECOMPUTE_LIST(CHOICE_TEXT) };
enum { SCHEDULES = sizeof schedules / sizeof *schedules };

static const ConfigId ids[LAYOUT_KEYS] = {
#define KEY(name, section, key) [LAYOUT_##name] = CFG_##section##_##key,
    LAYOUT_KEY_LIST(KEY)
#undef KEY
};

static void add(LayoutSpace *s, LayoutKey key, int64_t value)
{
    for (int i = 0; i < s->count[key]; i++)
        if (s->value[key][i] == value) return;
    if (s->count[key] < LAYOUT_VALUES) s->value[key][s->count[key]++] = (int)value;
}

static void add_divisors(LayoutSpace *s, LayoutKey key, int64_t of, int64_t most)
{
    for (int64_t d = 1; d <= of && d <= most; d++)
        if (of % d == 0) add(s, key, d);
}

static int64_t value_of(const Config *c, LayoutKey key)
{
    const ConfigKey *k = config_key(ids[key]);
    const void *at = (const char *)c + k->offset;
    if (k->kind == CONFIG_INT) return *(const int64_t *)at;
    return k->kind == CONFIG_TEXT ? 0 : *(const int *)at;
}

static void fill(LayoutSpace *s, LayoutLimits l)
{
    const Config *c = s->base;
    const int64_t world = s->world, batch = c->derived.global_batch;
    const bool experts = c->moe.experts > 0;
    add_divisors(s, LAYOUT_TP, world, l.tp_most);
    add(s, LAYOUT_SP, -1);
    if (!experts) add(s, LAYOUT_SP, 0);
    add_divisors(s, LAYOUT_CP, world, c->model.seq / l.cp_tokens > 1 ? c->model.seq / l.cp_tokens : 1);
    for (int i = 0; i < CONTEXT_COMMS; i++)
        if (i != CONTEXT_STATE || config_has_states(c)) add(s, LAYOUT_CP_COMM, i);
    for (int64_t b = 1; b <= l.batch_most && b <= batch; b *= 2) add(s, LAYOUT_MICRO_BATCH, b);
    for (int i = RECOMPUTE_NONE; i <= RECOMPUTE_FULL; i++) add(s, LAYOUT_RECOMPUTE, i);
    for (int64_t d = 1; d <= world && (d == 1 || d <= c->moe.experts); d++)
        if (world % d == 0 && (d == 1 || c->moe.experts % d == 0)) add(s, LAYOUT_EP, d);
    add_divisors(s, LAYOUT_ETP, world, experts ? l.tp_most : 1);
    for (int i = 0; i <= DISPATCH_NODE; i++) add(s, LAYOUT_DISPATCHER, i);
    add_divisors(s, LAYOUT_PP, world, c->model.layers);
    for (int64_t v = 1; v <= 12; v++) add(s, LAYOUT_VPP, v);
    for (int i = 0; i < SCHEDULES; i++)
        if ((i == SLICED) == (c->parallel.slices > 1)) add(s, LAYOUT_SCHEDULE, i);
    for (int zero = 1; zero >= 0; zero--) add(s, LAYOUT_ZERO, zero);
    for (int zero = 2; zero <= 3; zero++) add(s, LAYOUT_ZERO, zero);
    for (int i = 0; i < 2; i++) add(s, LAYOUT_ORDER, i);
    for (int i = 0; i < (experts ? 2 : 1); i++) add(s, LAYOUT_OVERLAP_MOE, i);
    for (int i = 0; i < 2; i++) add(s, LAYOUT_OVERLAP_TP, i); /* as many bands as are usual; none */
}

/* One rank, whatever the file says. */
static const char *const alone[] = { "parallel.tp=1",
                                     "parallel.sp=auto",
                                     "parallel.cp=1",
                                     "parallel.cp_comm=allgather",
                                     "parallel.cp_heads=0",
                                     "parallel.ep=1",
                                     "parallel.etp=1",
                                     "parallel.pp=1",
                                     "parallel.vpp=0",
                                     "parallel.schedule=auto",
                                     "parallel.group=0",
                                     "parallel.slices=1",
                                     "parallel.layout=",
                                     "parallel.overlap_moe=false",
                                     "parallel.overlap_tp=0",
                                     "train.micro_batch=1",
                                     "parallel.order=tp-cp-ep-dp-pp" };
enum { ALONE = sizeof alone / sizeof *alone };

/* Keys that belong to one value of parallel.zero: given up where the file has them. */
static const struct {
    ConfigId id;
    const char *word;
} of_zero[] = { { CFG_parallel_reshard, "parallel.reshard=auto" },
                { CFG_parallel_zero_group, "parallel.zero_group=0" } };
enum { OF_ZERO = sizeof of_zero / sizeof *of_zero };

/* The command line's words behind those. in_file: which of OF_ZERO the file has. */
static Err read_alone(ConfigSource source, const bool in_file[OF_ZERO], Config *out)
{
    const char **words = calloc(ALONE + OF_ZERO + (size_t)source.override_count, sizeof *words);
    int n = 0;
    if (!words) return err_set(ERR_MEMORY, "no memory for %d words", source.override_count);
    for (int i = 0; i < ALONE; i++) words[n++] = alone[i];
    for (int i = 0; i < OF_ZERO; i++)
        if (in_file[i]) words[n++] = of_zero[i].word;
    for (int i = 0; i < source.override_count; i++) words[n++] = source.overrides[i];
    source.overrides = words;
    source.override_count = n;
    const Err err = config_read(out, source);
    free(words);
    return err;
}

Err layout_base(ConfigSource source, Config *out)
{
    bool given[CFG_COUNT], in_file[OF_ZERO];
    source.world_size = CONFIG_ANY_WORLD;
    source.judge = NULL;
    const Err err = config_read(out, source);
    for (int i = 0; i < CFG_COUNT; i++) given[i] = out->origin[i].kind == ORIGIN_COMMAND_LINE;
    for (int i = 0; i < OF_ZERO; i++) in_file[i] = out->origin[of_zero[i].id].kind == ORIGIN_FILE;
    if (err && err != ERR_CONFIG) return err;
    config_release(out);
    if (read_alone(source, in_file, out)) {
        /* what the command line gives may need what the file does: a schedule its stages, an overlap its experts */
        ErrKept why;
        err_keep(&why);
        config_release(out);
        const Err again = config_read(out, source);
        return again ? err_again(&why, again) : ERR_OK;
    }
    for (int i = 0; i < CFG_COUNT; i++)
        if (!given[i] && out->origin[i].kind == ORIGIN_COMMAND_LINE) out->origin[i].kind = ORIGIN_FILE;
    return ERR_OK;
}

Err layout_config(const LayoutSpace *s, const Layout *l, Config *out)
{
    char words[LAYOUT_WORDS];
    layout_words(s, l, words);
    return config_for(s->base, s->world, words, out);
}

bool layout_key_is_given(const Config *base, ConfigId id)
{
    const bool open = id == CFG_train_micro_batch && base->derived.open_micro_batch;
    return base->origin[id].kind == ORIGIN_COMMAND_LINE && !open;
}

void layout_space(const Config *base, int64_t world, LayoutLimits limits, LayoutSpace *out)
{
    *out = (LayoutSpace){ .base = base, .world = world };
    fill(out, limits);
    out->fixed_stages = base->origin[CFG_parallel_layout].kind == ORIGIN_COMMAND_LINE;
    for (LayoutKey k = 0; k < LAYOUT_KEYS; k++) {
        if (!layout_key_is_given(base, ids[k])) continue;
        if (k == LAYOUT_VPP && !base->parallel.vpp) continue; /* (that is auto) */
        out->fixed[k] = true;
        out->count[k] = 0;
        add(out, k, value_of(base, k));
    }
    out->word[LAYOUT_CP_COMM] = base->parallel.cp_comm;
    out->word[LAYOUT_RECOMPUTE] = base->train.recompute;
    out->word[LAYOUT_SCHEDULE] = base->parallel.schedule;
}

const char *layout_schedule(const LayoutSpace *s, const Layout *l)
{
    return s->fixed[LAYOUT_SCHEDULE] ? s->word[LAYOUT_SCHEDULE] : schedules[l->value[LAYOUT_SCHEDULE]];
}

const char *layout_key_name(LayoutKey key, char buf[CONFIG_VALUE_BYTES])
{
    snprintf(buf, CONFIG_VALUE_BYTES, "%s.%s", config_key(ids[key])->section, config_key(ids[key])->name);
    return buf;
}

static const char *choice(const char *words, int index, char buf[CONFIG_VALUE_BYTES])
{
    for (; index; index--) words += strcspn(words, " ") + 1;
    snprintf(buf, CONFIG_VALUE_BYTES, "%.*s", (int)strcspn(words, " "), words);
    return buf;
}

const char *layout_text(const LayoutSpace *s, const Layout *l, LayoutKey key, char buf[CONFIG_VALUE_BYTES])
{
    const ConfigKey *k = config_key(ids[key]);
    const int value = l->value[key];
    if (key == LAYOUT_SCHEDULE) return layout_schedule(s, l);
    if (key == LAYOUT_CP_COMM) return s->fixed[key] ? s->word[key] : exchanges[value];
    if (key == LAYOUT_RECOMPUTE) return s->fixed[key] ? s->word[key] : recomputes[value];
    if (k->kind == CONFIG_PICK) return choice(k->choices, value, buf);
    if (k->kind == CONFIG_BOOL) return value < 0 ? "auto" : value ? "true" : "false";
    snprintf(buf, CONFIG_VALUE_BYTES, "%d", value);
    return buf;
}

static bool is_of_experts(LayoutKey k)
{
    return k == LAYOUT_EP || k == LAYOUT_ETP || k == LAYOUT_DISPATCHER || k == LAYOUT_OVERLAP_MOE;
}

/* The value for the command line. One word is about blocks with attention; those with states exchange heads, or hand
 * states on. */
static const char *word_of(const LayoutSpace *s, const Layout *l, LayoutKey key, char buf[CONFIG_WAYS_BYTES])
{
    const int way = l->value[key];
    if (key != LAYOUT_CP_COMM || s->fixed[key] || l->value[LAYOUT_CP] == 1 || !config_has_states(s->base))
        return layout_text(s, l, key, buf);
    if (way == CONTEXT_STATE) config_ways(s->base, "state", "allgather", buf);
    else config_ways(s->base, "a2a", exchanges[way], buf);
    return buf;
}

void layout_words(const LayoutSpace *s, const Layout *l, char out[LAYOUT_WORDS])
{
    char name[CONFIG_VALUE_BYTES], value[CONFIG_WAYS_BYTES];
    int n = 0;
    *out = 0;
    for (LayoutKey k = 0; k < LAYOUT_KEYS; k++)
        if (!s->fixed[k] && (s->base->moe.experts || !is_of_experts(k)))
            n += snprintf(out + n, (size_t)(LAYOUT_WORDS - n), "%s%s=%s", n ? " " : "", layout_key_name(k, name),
                          word_of(s, l, k, value));
    for (int i = 0; i < OF_ZERO && !s->fixed[LAYOUT_ZERO]; i++)
        if (s->base->origin[of_zero[i].id].kind == ORIGIN_FILE)
            n += snprintf(out + n, (size_t)(LAYOUT_WORDS - n), "%s%s", n ? " " : "", of_zero[i].word);
    if (!s->fixed_stages)
        snprintf(out + n, (size_t)(LAYOUT_WORDS - n), "%sparallel.layout=%s", n ? " " : "", l->stages);
}

int64_t layout_dp(const LayoutSpace *s, const Layout *l)
{
    const int *v = l->value;
    const int64_t world = s->world, dense = (int64_t)v[LAYOUT_TP] * v[LAYOUT_CP] * v[LAYOUT_PP];
    const int64_t expert = (int64_t)v[LAYOUT_EP] * v[LAYOUT_ETP] * v[LAYOUT_PP];
    return world % dense || (s->base->moe.experts && world % expert) ? 0 : world / dense;
}

ZeroCut layout_zero(const LayoutSpace *s, const Layout *l)
{
    return spec_zero_cut(l->value[LAYOUT_ZERO], s->base->parallel.reshard, l->value[LAYOUT_PP]);
}

bool layout_cut_more(const LayoutSpace *s, Layout *l)
{
    const ZeroCut now = layout_zero(s, l);
    Layout more = *l;
    if (layout_dp(s, l) * l->value[LAYOUT_CP] == 1 || now == ZERO_NONE) return false;
    for (int i = 0; i < s->count[LAYOUT_ZERO]; i++) {
        more.value[LAYOUT_ZERO] = s->value[LAYOUT_ZERO][i];
        if (layout_zero(s, &more) <= now) continue;
        *l = more;
        return true;
    }
    return false;
}

int64_t layout_microbatches(const LayoutSpace *s, const Layout *l)
{
    const int64_t share = layout_dp(s, l) * l->value[LAYOUT_MICRO_BATCH];
    return share && batch_ramp_divides(&s->base->derived.batch, share) ? s->base->derived.global_batch / share : 0;
}

int layout_compare(const Layout *a, const Layout *b)
{
    for (LayoutKey k = 0; k < LAYOUT_KEYS; k++)
        if (a->value[k] != b->value[k]) return a->value[k] < b->value[k] ? -1 : 1;
    return strcmp(a->stages, b->stages);
}

bool layout_is_first(const LayoutSpace *s, const Layout *l, LayoutKey key) { return l->value[key] == s->value[key][0]; }

void layout_take_first(const LayoutSpace *s, Layout *l, int from)
{
    for (int k = from; k < LAYOUT_KEYS; k++) l->value[k] = s->value[k][0];
}

int layout_next_pp(const LayoutSpace *s, Layout *l, int at)
{
    for (; at < s->count[LAYOUT_PP]; at++) {
        l->value[LAYOUT_PP] = s->value[LAYOUT_PP][at];
        if (layout_microbatches(s, l)) return at;
    }
    return LAYOUT_VALUES;
}
