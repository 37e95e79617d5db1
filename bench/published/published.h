/*
 * Published runs as runs of ours: rows of rows.txt and simumax.txt, each with a model of models/ and the facts of its
 * recipe (recipes.txt); what it would take by our model of time, and what memory by a dry run. Whoever includes this
 * gives `published_folder` a value if it does not run at the root of the repository.
 */
#ifndef MEGATRAIN_BENCH_PUBLISHED_H
#define MEGATRAIN_BENCH_PUBLISHED_H

#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "others.h"
#include "plan/predict.h"
#include "tables.h"
#include "train/spec.h"

enum { OVERRIDES_MOST = 32, WORD_BYTES = 160, FACTS_MOST = 32, PATH_BYTES = 512 };

static const char *published_folder = "bench/published";

/* ---- a row ---- */

/* A recipe: the words of its line behind those of the recipes that it comes from. */
typedef struct {
    const char *fact[FACTS_MOST];
    int count;
} Recipe;

static inline Err recipe_read(const Table *recipes, const char *name, Recipe *out)
{
    const TableRow *r = table_named(recipes, name);
    if (!r) return err_set(ERR_DATA, "there is no recipe '%s'", name);
    for (int i = 1; i < r->count; i++) {
        if (!strncmp(r->word[i], "from=", 5)) TRY(recipe_read(recipes, r->word[i] + 5, out));
        else if (out->count == FACTS_MOST) return err_set(ERR_DATA, "recipe '%s' has too many facts", name);
        else out->fact[out->count++] = r->word[i];
    }
    return ERR_OK;
}

/* The last value given; NULL: none is. */
static inline const char *fact(const Recipe *r, const char *name)
{
    const size_t n = strlen(name);
    for (int i = r->count - 1; i >= 0; i--)
        if (!strncmp(r->fact[i], name, n) && r->fact[i][n] == '=') return r->fact[i] + n + 1;
    return NULL;
}

static inline double fact_number(const Recipe *r, const char *name, double otherwise)
{
    const char *value = fact(r, name);
    return value ? strtod(value, NULL) : otherwise;
}

static inline bool fact_is(const Recipe *r, const char *name, const char *value)
{
    const char *given = fact(r, name);
    return given && !strcmp(given, value);
}

static inline bool overlaps(const Recipe *r, const char *what)
{
    const char *value = fact(r, "overlap");
    return value && strstr(value, what);
}

typedef struct {
    char word[OVERRIDES_MOST][WORD_BYTES];
    int count;
} Overrides;

static inline void override_with(Overrides *o, const char *key, const char *value)
{
    ASSERT(o->count < OVERRIDES_MOST);
    const int n = snprintf(o->word[o->count++], WORD_BYTES, "%s=%s", key, value);
    ASSERT(n < WORD_BYTES);
}

static inline void override_unless(Overrides *o, const Table *t, const TableRow *r, const char *key,
                                   const char *column)
{
    const char *value = table_word(t, r, column);
    if (strcmp(value, "1") != 0) override_with(o, key, value);
}

/* A run of ours in the row's layout. */
static inline Overrides overrides_of(const Table *t, const TableRow *r, const Recipe *recipe)
{
    Overrides o = { 0 };
    override_with(&o, "run.device", "cuda");
    override_with(&o, "run.precision", "bf16");
    override_with(&o, "parallel.zero", "1");
    override_with(&o, "model.seq", table_word(t, r, "seq"));
    override_with(&o, "train.micro_batch", table_word(t, r, "mbs"));
    override_with(&o, "train.global_batch", table_word(t, r, "batch"));
    override_unless(&o, t, r, "parallel.tp", "tp");
    override_unless(&o, t, r, "parallel.pp", "pp");
    override_unless(&o, t, r, "parallel.vpp", "vpp");
    override_unless(&o, t, r, "parallel.cp", "cp");
    override_unless(&o, t, r, "parallel.ep", "ep");
    if (strcmp(table_word(t, r, "tp"), "1") != 0 && !fact(recipe, "parallel.overlap_tp"))
        override_with(&o, "parallel.overlap_tp", "1");
    for (int i = 0; i < recipe->count; i++) {
        char key[WORD_BYTES];
        const size_t n = strcspn(recipe->fact[i], "=");
        snprintf(key, sizeof key, "%.*s", (int)n, recipe->fact[i]);
        if (strchr(key, '.')) override_with(&o, key, recipe->fact[i] + n + 1);
    }
    return o;
}

typedef struct {
    const TableRow *row;
    Recipe recipe;
    Config config; /* the specification points into it */
    TrainSpec spec;
    Grid grid;
    DeviceFile device;
    double units, counted; /* micro-batches of a step, and of the tallies */
    Tally *tally;          /* of each pipeline rank; the caller frees it */
} Run;

static inline Machine machine_of(const DeviceFile *d)
{
    return (Machine){ .bf16 = 1e12 * d->bf16_tflops,
                      .fp8 = 1e12 * d->fp8_tflops,
                      .memory = 1e9 * d->memory_gb_s,
                      .link = 1e9 * d->link_gb_s,
                      .network = 1e9 * d->network_gb_s,
                      .multiprocessors = (int)d->multiprocessors,
                      .host_devices = (int)d->host_devices,
                      .attention_fwd = 1e12 * d->attention_fwd_tflops,
                      .attention_bwd = 1e12 * d->attention_bwd_tflops };
}

/* A file of config/devices, or of this folder; with all that times need. */
static inline Err device_of(const char *name, DeviceFile *out)
{
    char path[PATH_BYTES];
    CostModel model;
    snprintf(path, sizeof path, "%s/%s.ini", published_folder, name);
    TRY(device_file_read(access(path, R_OK) ? name : path, out));
    return cost_open(&model, out, 1);
}

static inline Err run_of(const Table *t, const TableRow *r, const Table *recipes, Run *out)
{
    char path[PATH_BYTES];
    *out = (Run){ .row = r };
    TRY(device_of(table_word(t, r, "device"), &out->device));
    TRY(recipe_read(recipes, table_word(t, r, "recipe"), &out->recipe));
    const Overrides o = overrides_of(t, r, &out->recipe);
    const char *words[OVERRIDES_MOST];
    for (int i = 0; i < o.count; i++) words[i] = o.word[i];
    snprintf(path, sizeof path, "%s/models/%s.ini", published_folder, table_word(t, r, "model"));
    Err err = config_read(&out->config, (ConfigSource){ .path = path,
                                                        .overrides = words,
                                                        .override_count = o.count,
                                                        .world_size = (int64_t)table_number(t, r, "world") });
    if (!err) err = grid_spec(&out->config, &out->grid);
    if (!err) err = train_spec(&out->config, out->config.model.vocab, &out->spec);
    return err ? err_prefix(err, "%s of %s", table_word(t, r, "recipe"), table_word(t, r, "model")) : ERR_OK;
}

/* ---- time ---- */

/* The step of a run in seconds, and of it by what it is spent on. */
typedef struct {
    double seconds, bubble, once, reduce;
    Shares shares;
} StepTime;

static inline Habits habits_of(const Table *t, const Run *run)
{
    const Recipe *r = &run->recipe;
    const ModelSpec *m = &run->spec.model;
    return (Habits){ .fp8 = strcmp(table_word(t, run->row, "products"), "bf16") != 0,
                     .cast_bytes = fact_number(r, "casts", 0),
                     .plain_outputs = m->padded_vocab / run->grid.tp,
                     .attention = fact_is(r, "attention", "unfused") ? 1 : fact_number(r, "attention", 1),
                     .unfused = fact_is(r, "attention", "unfused"),
                     .expert_by_expert = fact_is(r, "experts", "each"),
                     .rows_once = fact_is(r, "rows", "once"),
                     .graphs = fact_is(r, "graphs", "part"),
                     .hides_tp = overlaps(r, "tp"),
                     .hides_dp = overlaps(r, "dp"),
                     .hides_ep = overlaps(r, "ep"),
                     .gradient_bytes = fact_number(r, "gradients", 4),
                     .sharded = fact_is(r, "sharded", "true"),
                     .passes = fact_number(r, "passes", 1),
                     .mixture = m->moe.experts > 0,
                     .recompute = model_recompute(m, 0),
                     .experts = m->moe.experts,
                     .topk = m->moe.topk,
                     .hosts_most = (int)fact_number(r, "hosts", 0),
                     .tokens = (double)(run->spec.micro_batch * m->seq / run->grid.tp / run->grid.cp),
                     .row_bytes = 2 * (double)m->hidden };
}

/* Tallies of the first rank of each pipeline rank, over few micro-batches. */
static inline Err run_count(Run *run)
{
    TrainSpec spec = run->spec;
    const int64_t dp = run->grid.dp, all = spec.global_batch / (spec.micro_batch * dp);
    int64_t units = run->grid.pp > 1 ? run->grid.pp : 2;
    if (units > all) units = all;
    run->units = (double)all, run->counted = (double)units;
    spec.global_batch = units * spec.micro_batch * dp;
    run->tally = calloc((size_t)run->grid.pp, sizeof *run->tally);
    if (!run->tally) return err_set(ERR_MEMORY, "no memory to count in");
    for (int pp = 0; pp < run->grid.pp; pp++)
        TRY(tally_rank(&spec, run->grid, pp * (grid_size(run->grid) / run->grid.pp), &run->tally[pp]));
    return ERR_OK;
}

static inline double unit_time(const RankTime *t, double again, double overlap)
{
    return shares_sum(&t->unit) + again * t->forward + overlap * t->across;
}

/* Seconds of a step besides the slowest rank's work: the pipeline fills and empties with all others' work on a
 * micro-batch, a chunk at a time. all: seconds of a micro-batch, on all ranks together. (Tested beside the
 * simulator.) */
static inline double pipeline_bubble(double all, double slowest, double chunks)
{
    return (all - slowest) / chunks;
}

/* The slowest rank's work, micro-batch by micro-batch, and what fills and ends it. */
static inline StepTime run_time(const Table *t, const Run *run, const Rates *r)
{
    const Machine machine = machine_of(&run->device), *m = &machine;
    const Habits h = habits_of(t, run);
    const double again = fact_number(&run->recipe, "again", 0), chunks = table_number(t, run->row, "vpp");
    RankTime slowest = { 0 };
    double all = 0;
    for (int pp = 0; pp < run->grid.pp; pp++) {
        const RankTime one = rank_time(m, r, &h, &run->tally[pp], run->grid, run->counted);
        all += unit_time(&one, again, r->overlap);
        if (unit_time(&one, again, r->overlap) > unit_time(&slowest, again, r->overlap)) slowest = one;
    }
    const double unit = unit_time(&slowest, again, r->overlap);
    StepTime out = { .bubble = pipeline_bubble(all, unit, chunks),
                     .once = slowest.once,
                     .reduce = exposed(unit, slowest.reduce, r->overlap, h.hides_dp),
                     .shares = slowest.unit };
    out.shares.product += again * slowest.forward;
    out.seconds = run->units * unit + out.bubble + out.once + out.reduce;
    return out;
}

/*
 * The same by what `megatrain plan` says of our own program (plan/predict.h): its clock, its overlap, its simulator,
 * with these rates. It does not know of products in 8 bits, nor of what else recipes say of other programs' mixtures.
 */
static inline bool plan_can_tell(const Table *t, const Run *run)
{
    return !strcmp(table_word(t, run->row, "products"), "bf16") && !run->spec.model.moe.experts;
}

static inline Err plan_time_of(const Table *t, const Run *run, const Rates *r, double *seconds)
{
    enum { BANDS = 4 };
    const Habits h = habits_of(t, run);
    const double again = fact_number(&run->recipe, "again", 0);
    TrainSpec spec = run->spec;
    DeviceFile d = run->device;
    CostModel m;
    Prediction p, full = { 0 };
    d.matrix_share = r->bf16, d.tile_depth = r->depth, d.memory_share = r->memory, d.link_share = r->link;
    d.attention_share = r->attention * h.attention, d.overlap_cost = r->overlap;
    d.hopper = 0; /* kernels of others, whose rates these are */
    if (h.hides_tp && run->grid.tp > 1) spec.overlap_tp = run->grid.tp < BANDS ? run->grid.tp : BANDS;
    TRY(cost_open(&m, &d, grid_size(run->grid)));
    TRY(predict(&m, &spec, run->grid, &p));
    spec.model.recompute = layer_pattern_all(RECOMPUTE_FULL);
    if (again > 0) TRY(predict(&m, &spec, run->grid, &full));
    *seconds = p.step_s + again * (full.step_s - p.step_s);
    return ERR_OK;
}

/* ---- memory ---- */

/* A weight of each shape of a rank's blocks in 16 bits: what Transformer Engine keeps as a gradient that nobody
 * reads, since the sums in fp32 are what counts. */
static inline double dummy_gradients(const ParamRegistry *r)
{
    int64_t seen[64][2], bytes = 0;
    int count = 0;
    for (int i = 0; i < r->count; i++) {
        const Param *p = &r->items[i];
        int k = 0;
        if (p->spec.ndim != 2 || p->spec.group != PARAM_DENSE || strncmp(p->name, "layers.", 7) != 0)
            continue;
        while (k < count && (seen[k][0] != p->local[0] || seen[k][1] != p->local[1])) k++;
        if (k < count || count == 64) continue;
        seen[count][0] = p->local[0], seen[count][1] = p->local[1], count++;
        bytes += 2 * p->local[0] * p->local[1];
    }
    return (double)bytes;
}

/* Bytes of the rank that needs the most: what is planned, and that rank's gradients above. */
static inline Err memory_of(const Run *run, double *planned, double *dummies)
{
    *planned = 0;
    for (int pp = 0; pp < run->grid.pp; pp++) {
        const int rank = pp * (grid_size(run->grid) / run->grid.pp);
        MemoryPlan plan;
        World world;
        Trainer t;
        TRY(trainer_plan(&run->spec, run->grid, rank, &plan));
        if ((double)memory_plan_total(&plan) <= *planned) continue;
        *planned = (double)memory_plan_total(&plan);
        TRY(world_open_null(&world, run->grid, rank));
        Err err = trainer_open_on(&t, DEVICE_NULL, &run->spec, &world, &plan);
        if (!err) *dummies = dummy_gradients(t.stores[0].reg);
        trainer_close(&t);
        world_close(&world);
        TRY(err);
    }
    return ERR_OK;
}

/* ---- constants ---- */

/* Fitted by bench_published --fit, rounded; docs/published.md says where each began and what a tenth of it moves. */
static const Rates published_rates = { .bf16 = .71,
                                       .fp8 = .595,
                                       .depth = 200,
                                       .memory = .92,
                                       .attention = .81,
                                       .link = .89,
                                       .overlap = .29,
                                       .host_us = 10 };

/* The machine of simumax.txt is slower: of its devices' peak large products reach this, the one rate fitted to it. */
static const double SIMUMAX_BF16 = .446;

/* Public figures, and judgement between them: where the fit begins. */
static const Rates begin_rates = { .bf16 = .75,
                                   .fp8 = .62,
                                   .depth = 200,
                                   .memory = .85,
                                   .attention = .80,
                                   .link = .80,
                                   .overlap = .30,
                                   .host_us = 10 };

/* How far each may go. */
static const struct {
    const char *name;
    double low, high;
} constants[RATES] = {
    { "bf16", .40, .85 },      { "fp8", .35, .80 },  { "depth", 50, 800 },   { "memory", .70, .92 },
    { "attention", .50, 1.1 }, { "link", .60, .95 }, { "overlap", .05, .6 }, { "host_us", 2, 40 },
};

static inline double *constant(Rates *r, int k) { return (double *)r + k; }

/* ---- all rows of a file ---- */

static inline double percent(double value, double of) { return 100 * (value / of - 1); }

typedef struct {
    Table table, recipes;
    Run run[TABLE_ROWS];
} Published;

static inline Err check_columns(const Published *p)
{
    static const char *const needed[] = { "model", "world", "device", "products", "tp",  "pp",    "vpp",
                                          "cp",    "ep",    "mbs",    "batch",    "seq", "recipe" };
    const TableRow *first = &p->table.row[0];
    for (size_t k = 0; k < sizeof needed / sizeof *needed; k++)
        if (!p->table.rows || !table_word(&p->table, first, needed[k]))
            return err_set(ERR_DATA, "there is no column '%s'", needed[k]);
    if (!table_word(&p->table, first, "tok/s") && !table_word(&p->table, first, "step_ms"))
        return err_set(ERR_DATA, "there is no column 'tok/s', nor 'step_ms'");
    return ERR_OK;
}

static inline Err published_read(const char *path, Published *p)
{
    char recipes[PATH_BYTES];
    snprintf(recipes, sizeof recipes, "%s/recipes.txt", published_folder);
    TRY(table_read(recipes, false, &p->recipes));
    TRY(table_read(path, true, &p->table));
    const Err err = check_columns(p);
    if (err) return err_prefix(err, "%s", path);
    for (int i = 0; i < p->table.rows; i++) {
        TRY(run_of(&p->table, &p->table.row[i], &p->recipes, &p->run[i]));
        TRY(run_count(&p->run[i]));
    }
    return ERR_OK;
}

static inline void published_close(Published *p)
{
    for (int i = 0; i < p->table.rows; i++) {
        free(p->run[i].tally);
        config_release(&p->run[i].config);
        device_file_release(&p->run[i].device);
    }
    free(p->table.text);
    free(p->recipes.text);
}

static inline const char *word(const Published *p, int row, const char *name)
{
    return table_word(&p->table, &p->table.row[row], name);
}

static inline double number(const Published *p, int row, const char *name)
{
    return table_number(&p->table, &p->table.row[row], name);
}

static inline bool is_out(const Published *p, int row)
{
    const char *why = word(p, row, "out");
    return why && strcmp(why, "-") != 0;
}

static inline bool is_mixture(const Published *p, int row) { return p->run[row].spec.model.moe.experts > 0; }

static inline double measured_seconds(const Published *p, int row)
{
    const char *ms = word(p, row, "step_ms");
    if (ms) return 1e-3 * strtod(ms, NULL);
    return number(p, row, "batch") * number(p, row, "seq") / number(p, row, "world") /
           number(p, row, "tok/s");
}

/* Error against the figure that the row measured: speed, or time. */
static inline double error_of(const Published *p, int row, double seconds)
{
    const double measured = measured_seconds(p, row);
    return word(p, row, "step_ms") ? percent(seconds, measured) : percent(measured, seconds);
}

/* Predicted over measured time. */
static inline double ratio(const Published *p, int row, const Rates *r)
{
    return run_time(&p->table, &p->run[row], r).seconds / measured_seconds(p, row);
}

/* ---- errors ---- */

typedef struct {
    int count, near;
    double sum, absolute, worst; /* percent */
} Errors;

static inline void add_error(Errors *e, double error)
{
    e->count++;
    e->near += fabs(error) < 10;
    e->sum += error;
    e->absolute += fabs(error);
    if (fabs(error) > fabs(e->worst)) e->worst = error;
}

#endif
