/* See auto_layout.h. What ranks tell each other are words "section.key=value", behind the command line's. */
#include "cli/auto_layout.h"

#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "base/log.h"
#include "base/units.h"
#include "cli/config_arg.h"
#include "cli/going_on.h"
#include "cli/plan.h"
#include "device/device.h"
#include "plan/planner.h"
#include "train/spec.h"

/* ---- keys ---- */

/* Keys besides LAYOUT_KEYS that a space of layouts decides, most of them by leaving them alone. */
static const ConfigId others[] = { CFG_parallel_cp_heads, CFG_parallel_group, CFG_parallel_slices,
                                   CFG_parallel_overlap_tp, CFG_parallel_layout };
enum { OTHERS = sizeof others / sizeof *others, CHOSEN = LAYOUT_KEYS + OTHERS, WORD_BYTES = 224 };

static ConfigId chosen_key(int i)
{
    char name[CONFIG_VALUE_BYTES], *dot;
    ConfigId id = CFG_COUNT;
    if (i >= LAYOUT_KEYS) return others[i - LAYOUT_KEYS];
    layout_key_name((LayoutKey)i, name);
    dot = strchr(name, '.');
    *dot = 0;
    ASSERT(config_find(name, dot + 1, &id));
    return id;
}

static int put_word(const Config *c, ConfigId id, char *out, size_t size)
{
    char value[CONFIG_VALUE_BYTES];
    const ConfigKey *key = config_key(id);
    const int n = snprintf(out, size, "%s.%s=%s", key->section, key->name, config_value(c, id, value));
    return n < (int)size ? n : (int)size - 1;
}

/* A layout key that the file has stays where parallel.auto, which is above it in rank or beside it, is the file's. */
static bool stays(const Config *c, ConfigId id)
{
    return c->origin[CFG_parallel_planned].kind == ORIGIN_FILE && c->origin[id].kind == ORIGIN_FILE &&
           !(id == CFG_train_micro_batch && c->derived.open_micro_batch);
}

static ConfigSource source_of(const AutoLayout *a, int64_t world)
{
    return config_source_here(a->path, (Words){ a->given, a->given_count }, world);
}

Err auto_layout_open(AutoLayout *a, const char *path, Words words, Config *c)
{
    *a = (AutoLayout){ .path = path, .words = words };
    a->given = calloc((size_t)words.count + CHOSEN, sizeof *a->given);
    a->texts = calloc(CHOSEN, WORD_BYTES);
    if (!a->given || !a->texts) return err_set(ERR_MEMORY, "no memory for the words of a configuration");
    for (int i = 0; i < CHOSEN; i++) {
        char *text = a->texts + (size_t)i * WORD_BYTES;
        if (!stays(c, chosen_key(i))) continue;
        put_word(c, chosen_key(i), text, WORD_BYTES);
        a->given[a->given_count++] = text;
    }
    for (int i = 0; i < words.count; i++) a->given[a->given_count++] = words.items[i];
    config_release(c);
    return layout_base(source_of(a, 1), c);
}

void auto_layout_close(AutoLayout *a)
{
    free(a->given);
    free(a->texts);
    *a = (AutoLayout){ 0 };
}

static bool is_usual(const Config *c, ConfigId id)
{
    char is[CONFIG_VALUE_BYTES], usual[CONFIG_VALUE_BYTES];
    return c->origin[id].kind == ORIGIN_AUTO || !strcmp(config_value(c, id, is), config_default(id, usual));
}

/* The keys of `c` that were not given, as words. `base` knows which were: layout_base's. unusual: only those that are
 * not as without a word. */
static void put_words(const Config *base, const Config *c, bool unusual, char *out, size_t size)
{
    size_t n = 0;
    *out = 0;
    for (int i = 0; i < CHOSEN && n + 1 < size; i++) {
        if (layout_key_is_given(base, chosen_key(i))) continue;
        if (unusual && is_usual(c, chosen_key(i))) continue;
        if (n) out[n++] = ' ';
        n += (size_t)put_word(c, chosen_key(i), out + n, size - n);
    }
}

/* *out as a run reads it: with those words behind what was given. */
static Err read_with(const AutoLayout *a, const char *text, int64_t world, Config *out)
{
    char *copy = strdup(text), *rest = NULL;
    const char **all = calloc((size_t)a->given_count + CHOSEN, sizeof *all);
    ConfigSource source = source_of(a, world);
    Err err = copy && all ? ERR_OK : err_set(ERR_MEMORY, "no memory for the words of a layout");
    for (int i = 0; i < a->given_count && !err; i++) all[i] = a->given[i];
    for (char *w = copy ? strtok_r(copy, " ", &rest) : NULL; w && !err; w = strtok_r(NULL, " ", &rest)) {
        ASSERT(source.override_count < a->given_count + CHOSEN);
        all[source.override_count++] = w;
    }
    source.overrides = all;
    if (!err) err = config_read(out, source);
    free(all);
    free(copy);
    return err;
}

/* ---- the device ---- */

static Err this_gpu(DeviceFile *out)
{
    DeviceInfo gpu;
    TRY(device_cuda_info(0, &gpu));
    if (!device_file_match(gpu.name, out))
        return err_set(ERR_CONFIG, "parallel.auto: no file of config/devices is of this machine's '%s'", gpu.name),
               err_hint("parallel.auto_device=h100, or the path of a file like config/devices/h100.ini");
    out->memory_mib = gpu.total_bytes >> 20;
    out->capability = device_info_capability(&gpu) / 10.;
    return ERR_OK;
}

/* How long things take here, and how much memory a rank has. */
static Err know_device(const Config *base, const Boot *boot, Planner *p)
{
    const bool cpu = base->run.device == RUN_DEVICE_CPU;
    const char *name = base->parallel.auto_device;
    *p = (Planner){ 0 };
    p->source = predict_source(&p->model);
    if (!*name && cpu)
        return err_set(ERR_CONFIG, "parallel.auto: nothing says how fast this machine's processors are"),
               err_hint("measure them once: megatrain doctor --calibrate here.ini; then "
                        "parallel.auto_device=here.ini");
    TRY(*name ? device_file_read(name, &p->device) : this_gpu(&p->device));
    TRY(cost_open(&p->model, &p->device, boot->size));
    if (p->model.cpu == cpu) return ERR_OK;
    return err_set(ERR_CONFIG, "parallel.auto_device: '%s' is %s, and run.device=%s", p->device.name,
                   cpu ? "a GPU" : "a host's processors", cpu ? "cpu" : "cuda"),
           err_hint(cpu ? "a file that megatrain doctor --calibrate wrote" : "a GPU's: h100, ...");
}

/* Memory for a rank. The ranks of a host share its processors' memory. */
static int64_t rank_memory(const Planner *p, const Boot *boot)
{
    const int64_t all = p->device.memory_mib << 20, here = boot->local_size > 0 ? boot->local_size : boot->size;
    return p->model.cpu ? all / here : all;
}

/* Bytes of its worst rank, with libraries. */
static Err bytes_of(const Planner *p, const Config *c, Grid grid, int64_t *bytes)
{
    TrainSpec spec;
    Prediction time;
    int64_t vocab;
    TRY(plan_vocab(c, &vocab));
    TRY(train_spec(c, vocab, &spec));
    TRY(trainer_grid(&spec, &grid));
    TRY(predict_by(&p->source, &spec, grid, PREDICT_RANKS, &time));
    *bytes = time.bytes + (p->model.cpu ? 0 : spec_library_bytes(c, grid));
    return ERR_OK;
}

/* ERR_PLAN: a rank takes more than it has. */
static Err fits(const Planner *p, const Config *c, const Boot *boot, Grid grid)
{
    char have[UNITS_BYTES], want[UNITS_BYTES];
    const int64_t most = rank_memory(p, boot);
    int64_t bytes = 0;
    TRY(bytes_of(p, c, grid, &bytes));
    if (bytes <= most) return ERR_OK;
    return err_set(ERR_PLAN, "it takes %s on a rank, which has %s", units_bytes(want, bytes), units_bytes(have, most));
}

/* ---- a run that goes on ---- */

/* Whether the layout is one of so many ranks that fits the device, if that is known; ERR_CONFIG or ERR_PLAN: it is not,
 * and why. */
static Err judge_kept(const AutoLayout *a, const Planner *p, const Boot *boot, const char *text)
{
    Config c = { 0 };
    Grid grid;
    Err err = read_with(a, text, boot->size, &c);
    if (!err) err = grid_spec(&c, &grid);
    if (!err && p) err = fits(p, &c, boot, grid);
    config_release(&c);
    return err;
}

/* The words of the checkpoint's layout, if it is one for so many ranks; else "". */
static Err judge_words(const AutoLayout *a, const Config *base, int64_t step, const Boot *boot, char *text)
{
    Planner p;
    Err err = ERR_OK;
    const Err unknown = know_device(base, boot, &p);
    const bool wrong = unknown && *base->parallel.auto_device;
    if (!wrong) err = judge_kept(a, unknown ? NULL : &p, boot, text);
    planner_close(&p);
    if (wrong) return unknown;
    if (err && err != ERR_CONFIG && err != ERR_PLAN) return err;
    if (err)
        log_info("parallel.auto: the layout of the checkpoint does not do on %d rank%s: %.*s: planning anew",
                 boot->size, boot->size == 1 ? "" : "s", (int)strcspn(err_message(), "\n"), err_message());
    else log_info("parallel.auto: the layout of the checkpoint of step %lld stays", (long long)step);
    if (err) *text = 0;
    return ERR_OK;
}

/* text "": there is none to keep, or it was not chosen. */
static Err keep_layout(const AutoLayout *a, const Config *base, const Boot *boot, char *text, size_t size)
{
    ON_HEAP(Config, was, 1);
    int64_t step;
    bool found;
    *text = 0;
    if (base->parallel.planned == PARALLEL_PLANNED_AGAIN) return ERR_OK;
    TRY(going_on(base, was, &step, &found));
    if (!found) return ERR_OK;
    if (was->parallel.planned) put_words(base, was, false, text, size);
    config_release(was);
    return *text ? judge_words(a, base, step, boot, text) : ERR_OK;
}

/* ---- a run that begins ---- */

/* Keys in which the best layout differs: "parallel.tp=4 parallel.pp=1". */
static void differing(const SearchAnswer *a, const SearchResult *r, char *out, size_t size)
{
    char name[CONFIG_VALUE_BYTES], text[CONFIG_VALUE_BYTES];
    const Layout *best = &a->best[0].layout, *l = &r->layout;
    size_t n = 0;
    *out = 0;
    for (LayoutKey k = 0; k < LAYOUT_KEYS && n + 1 < size; k++)
        if (l->value[k] != best->value[k])
            n += (size_t)snprintf(out + n, size - n, "%s%s=%s", n ? " " : "", layout_key_name(k, name),
                                  layout_text(&a->space, l, k, text));
    if (n + 1 < size && strcmp(l->stages, best->stages) != 0)
        snprintf(out + n, size - n, "%sparallel.layout=%s", n ? " " : "", l->stages);
}

static void say_choice(const Planner *p, const Config *base, const SearchAnswer *a, const Config *chosen)
{
    const SearchResult *best = &a->best[0];
    char bytes[UNITS_BYTES], other[LAYOUT_WORDS];
    put_words(base, chosen, true, other, sizeof other);
    log_info("parallel.auto: the layout on %lld x %s is %s%s", (long long)a->space.world, p->device.name,
             *other ? other : "that of the defaults", *other ? ", else the defaults" : "");
    log_info("parallel.auto: predicted are %.4g ms a step, and %s on the rank that takes most; %lld layouts "
             "are legal in shape, %d were run dry",
             1e3 * best->time.step_s, units_bytes(bytes, best->time.bytes), (long long)a->legal, a->dry_runs);
    for (int i = 1; i < a->count; i++) {
        differing(a, &a->best[i], other, sizeof other);
        log_info("parallel.auto: %.1f %% slower is %s", 100 * (a->best[i].time.step_s / best->time.step_s - 1), other);
    }
}

static Err nothing_fits(const SearchAnswer *a, const SearchQuestion *q)
{
    char have[UNITS_BYTES], want[UNITS_BYTES];
    if (search_found_none(a))
        return err_set(ERR_CONFIG,
                       "parallel.auto: no layout of this model divides %lld ranks, a batch of %lld samples "
                       "and the keys that are given",
                       (long long)q->world, (long long)q->base->derived.global_batch),
               err_hint("another number of ranks, train.global_batch, or fewer layout keys");
    return err_set(ERR_PLAN,
                   "parallel.auto: no layout on %lld ranks was found that fits %s: the least that one takes "
                   "is %s on a rank",
                   (long long)q->world, units_bytes(have, q->memory), units_bytes(want, a->least_bytes)),
           err_hint("more ranks, a smaller model, or fewer layout keys; megatrain plan --search says more");
}

static Err search_layout(const Config *base, const Boot *boot, const Planner *p, SearchAnswer *answer, char *text,
                         size_t size)
{
    enum { ANSWERS = 3 };
    Config chosen = { 0 };
    planner_warn(&p->device, base, true);
    SearchQuestion q = planner_question(p, base, boot->size);
    q.best = ANSWERS;
    q.memory = rank_memory(p, boot);
    TRY(plan_vocab(base, &q.vocab));
    TRY(search(&q, answer));
    if (!answer->count) return nothing_fits(answer, &q);
    const Err err = layout_config(&answer->space, &answer->best[0].layout, &chosen);
    if (err) return config_release(&chosen), err;
    put_words(base, &chosen, false, text, size);
    say_choice(p, base, answer, &chosen);
    config_release(&chosen);
    return ERR_OK;
}

static Err plan_layout(const Config *base, const Boot *boot, char *text, size_t size)
{
    Planner p;
    SearchAnswer *answer = malloc(sizeof *answer);
    if (!answer) return err_set(ERR_MEMORY, "no memory for an answer");
    Err err = know_device(base, boot, &p);
    if (!err) err = search_layout(base, boot, &p, answer, text, size);
    planner_close(&p);
    free(answer);
    return err;
}

/* ---- both ---- */

static Err choose(void *user, const Config *base, const Boot *boot, const Room *room, char *text, size_t size)
{
    (void)room;
    TRY(keep_layout(user, base, boot, text, size));
    return *text ? ERR_OK : plan_layout(base, boot, text, size);
}

static Err take(void *user, const char *text, const Boot *boot, Config *cfg)
{
    const AutoLayout *a = user;
    config_release(cfg);
    TRY(read_with(a, text, boot->size, cfg));
    return a->may_differ ? config_let_differ(cfg, a->may_differ) : ERR_OK;
}

LayoutChoice auto_layout_choice(AutoLayout *a) { return (LayoutChoice){ a, false, choose, take }; }
