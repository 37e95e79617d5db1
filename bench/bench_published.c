/*
 * Predictions beside what others have measured: steps of published runs (published/rows.txt), steps and memory of small
 * ones (published/simumax.txt), and what megatrain would take in layouts that are published (published/layouts.txt).
 * docs/planner.md explains the tables.
 *
 *   bench_published             all tables, by the constants as they are
 *   bench_published --moves     and by how much a tenth more of each constant moves predictions
 *   bench_published --fit       constants fitted to the rows, and to all but those of one model
 *   bench_published --rows FILE rows of FILE alone, which are as those of rows.txt; models and recipes are ours
 */
#include "published/fit.h"
#include "published/published.h"

static const double GIB = 1073741824.0;

static double percent(double value, double of) { return 100 * (value / of - 1); }

/* ---- errors ---- */

typedef struct {
    int count, near;
    double sum, absolute, worst; /* percent */
} Errors;

static void add_error(Errors *e, double error)
{
    e->count++;
    e->near += fabs(error) < 10;
    e->sum += error;
    e->absolute += fabs(error);
    if (fabs(error) > fabs(e->worst)) e->worst = error;
}

static void print_errors(const char *what, const Errors *e)
{
    if (!e->count) return;
    printf("| %s | %d | %.1f | %+.1f | %d %% | %+.1f |\n", what, e->count, e->absolute / e->count, e->sum / e->count,
           100 * e->near / e->count, e->worst);
}

static void print_errors_head(void)
{
    printf("\n| rows | of them | mean absolute error %% | mean %% | within 10 %% | worst %% |\n"
           "| --- | ---: | ---: | ---: | ---: | ---: |\n");
}

/* ---- rows ---- */

/* Of large products on a device that is not short of power, others by comparison; docs/planner.md says where each is
 * from. */
static const Rates rates = { .bf16 = .713, .fp8 = .583, .depth = 342, .memory = .92, .attention = .80, .link = .90,
                             .overlap = .20, .host_us = 14.1 };

typedef struct {
    Table table, recipes;
    Run run[TABLE_ROWS];
} Published;

static Err published_read(const char *path, Published *p)
{
    char recipes[PATH_BYTES];
    snprintf(recipes, sizeof recipes, "%s/recipes.txt", published_folder);
    TRY(table_read(recipes, false, &p->recipes));
    TRY(table_read(path, true, &p->table));
    for (int i = 0; i < p->table.rows; i++) {
        TRY(run_of(&p->table, &p->table.row[i], &p->recipes, &p->run[i]));
        TRY(run_count(&p->run[i]));
    }
    return ERR_OK;
}

static void published_close(Published *p)
{
    for (int i = 0; i < p->table.rows; i++) free(p->run[i].tally), config_release(&p->run[i].config);
    free(p->table.text);
    free(p->recipes.text);
}
