/*
 * Predictions beside what others have measured: steps of published runs (published/rows.txt), steps and memory of small
 * ones (published/simumax.txt). Each row becomes a configuration of ours, with the model of published/models and the
 * facts of its recipe (published/recipes.txt); docs/planner.md explains the figures.
 *
 *   bench_published [ROW ...]     ROW: those whose model has this in its name; none: all
 */
#include <math.h>
#include <stdio.h>

#include "engine/trainer_open.h"
#include "published/tables.h"
#include "train/spec.h"

enum { OVERRIDES_MOST = 32, WORD_BYTES = 160, FACTS_MOST = 32, PATH_BYTES = 512 };

static const char *folder = "bench/published";
static const double GIB = 1073741824.0;

/* ---- a row ---- */

/* What a recipe says: the words of its line behind those of the recipes that it comes from. */
typedef struct {
    const char *fact[FACTS_MOST];
    int count;
} Recipe;

static Err recipe_read(const Table *recipes, const char *name, Recipe *out)
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
static const char *fact(const Recipe *r, const char *name)
{
    const size_t n = strlen(name);
    for (int i = r->count - 1; i >= 0; i--)
        if (!strncmp(r->fact[i], name, n) && r->fact[i][n] == '=') return r->fact[i] + n + 1;
    return NULL;
}

typedef struct {
    char word[OVERRIDES_MOST][WORD_BYTES];
    const char *text[OVERRIDES_MOST];
    int count;
} Overrides;

static void override_with(Overrides *o, const char *key, const char *value)
{
    ASSERT(o->count < OVERRIDES_MOST);
    snprintf(o->word[o->count], WORD_BYTES, "%s=%s", key, value);
    o->text[o->count] = o->word[o->count];
    o->count++;
}

static void override_unless(Overrides *o, const Table *t, const TableRow *r, const char *key, const char *column)
{
    const char *value = table_word(t, r, column);
    if (strcmp(value, "1") != 0) override_with(o, key, value);
}

/* A run of ours in the row's layout. */
static Overrides overrides_of(const Table *t, const TableRow *r, const Recipe *recipe)
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
    TrainSpec spec;
    Grid grid;
} Run;

static Err run_of(const Table *t, const TableRow *r, const Table *recipes, Run *out)
{
    static Config cfg;
    char path[PATH_BYTES];
    *out = (Run){ .row = r };
    TRY(recipe_read(recipes, table_word(t, r, "recipe"), &out->recipe));
    const Overrides o = overrides_of(t, r, &out->recipe);
    const char *words[OVERRIDES_MOST];
    for (int i = 0; i < o.count; i++) words[i] = o.word[i];
    snprintf(path, sizeof path, "%s/models/%s.ini", folder, table_word(t, r, "model"));
    Err err = config_read(&cfg, (ConfigSource){ .path = path,
                                                .overrides = words,
                                                .override_count = o.count,
                                                .world_size = (int64_t)table_number(t, r, "world") });
    if (!err) err = grid_spec(&cfg, &out->grid);
    if (!err) err = train_spec(&cfg, cfg.model.vocab, &out->spec);
    config_release(&cfg);
    return err ? err_prefix(err, "%s of %s", table_word(t, r, "recipe"), table_word(t, r, "model")) : ERR_OK;
}

/* ---- memory ---- */

/* A weight of each shape of a rank's blocks in 16 bits: what Transformer Engine keeps as a gradient that nobody
 * reads, since the sums in fp32 are what counts. */
static double dummy_gradients(const ParamRegistry *r)
{
    int64_t seen[64][2], bytes = 0;
    int count = 0;
    for (int i = 0; i < r->count; i++) {
        const Param *p = &r->items[i];
        int k = 0;
        if (p->spec.ndim != 2 || p->spec.group != PARAM_DENSE || strncmp(p->name, "layers.", 7) != 0) continue;
        while (k < count && (seen[k][0] != p->local[0] || seen[k][1] != p->local[1])) k++;
        if (k < count || count == 64) continue;
        seen[count][0] = p->local[0], seen[count][1] = p->local[1], count++;
        bytes += 2 * p->local[0] * p->local[1];
    }
    return (double)bytes;
}

/* Of the rank that needs the most: what is planned, and of that rank the gradients above. */
static Err memory_of(const Run *run, double *planned, double *dummies)
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

static void print_memory_head(void)
{
    printf("\nMemory of the rank that needs the most, GiB; `kept`: with a gradient in 16 bits of each shape of weight, "
           "which Transformer Engine keeps and we do not.\n\n"
           "| model | tp | pp | cp | ep | seq | measured | planned | error %% | kept | error %% | SimuMax's %% |\n"
           "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
}

static double percent(double value, double of) { return 100 * (value / of - 1); }
