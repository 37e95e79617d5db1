/*
 * Predictions beside what others have measured: steps of published runs (published/rows.txt), steps and memory of small
 * ones (published/simumax.txt). docs/published.md explains the tables.
 *
 *   bench_published [--moves] [--fit] [--rows FILE]
 *   bench_published --layouts FILE
 *
 * --moves: and by how much a tenth more of each constant moves predictions; --fit: and constants fitted to the rows,
 * and to all but those of one model; --rows: rows of FILE alone, which are as those of rows.txt;
 * --layouts: what megatrain itself would take in the layouts of such a file.
 */
#include "published/fit.h"
#include "published/published.h"

static const double GIB = 1073741824.0;

/* ---- errors ---- */

static void print_errors(const char *what, const Errors *e)
{
    if (!e->count) return;
    printf("| %s | %d | %.1f | %+.1f | %d %% | %+.1f |\n", what, e->count, e->absolute / e->count,
           e->sum / e->count, 100 * e->near / e->count, e->worst);
}

static void print_errors_head(void)
{
    printf("\n| rows | of them | mean absolute error %% | mean %% | within 10 %% | worst %% |\n"
           "| --- | ---: | ---: | ---: | ---: | ---: |\n");
}

static void print_rows(const Published *p, const Rates *r)
{
    printf("\nErrors are of tokens a second; shares of the predicted step: products, attention, memory work, "
           "messages "
           "of tp and cp, of ep, of dp, host, bubble, optimizer. (Rows in brackets do not count.)\n\n"
           "| model | devices | in | tp/pp/vpp/cp/ep | batch | recipe | measured | predicted | error %% | "
           "prod | "
           "attn | mem | tp | ep | dp | host | bub | opt |\n"
           "| --- | --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | "
           "---: | "
           "---: | ---: | ---: |\n");
    for (int i = 0; i < p->table.rows; i++) {
        const StepTime t = run_time(&p->table, &p->run[i], r);
        const double all = 100 / t.seconds, unit = all * p->run[i].units;
        const double rate = number(p, i, "batch") * number(p, i, "seq") / number(p, i, "world");
        const char *open = is_out(p, i) ? "(" : "", *close = is_out(p, i) ? ")" : "";
        printf("| %s | %s %s | %s | %s/%s/%s/%s/%s | %s | %s | %.0f | %.0f | %s%+.1f%s | %.0f | %.0f | %.0f "
               "| %.0f | "
               "%.0f | %.0f | %.0f | %.0f | %.0f |\n",
               word(p, i, "model"), word(p, i, "world"), word(p, i, "device"), word(p, i, "products"),
               word(p, i, "tp"), word(p, i, "pp"), word(p, i, "vpp"), word(p, i, "cp"), word(p, i, "ep"),
               word(p, i, "batch"), word(p, i, "recipe"), rate / measured_seconds(p, i), rate / t.seconds,
               open, error_of(p, i, t.seconds), close, unit * t.shares.product, unit * t.shares.attention,
               unit * t.shares.memory, unit * (t.shares.tp + t.shares.cp), unit * t.shares.ep, all * t.reduce,
               unit * t.shares.host, all * t.bubble, all * t.once);
    }
}

static void print_summary(const Published *p, const Rates *r)
{
    Errors dense = { 0 }, mixtures = { 0 }, all = { 0 }, out = { 0 };
    for (int i = 0; i < p->table.rows; i++) {
        const double e = error_of(p, i, run_time(&p->table, &p->run[i], r).seconds);
        if (is_out(p, i)) {
            add_error(&out, e);
            continue;
        }
        add_error(is_mixture(p, i) ? &mixtures : &dense, e);
        add_error(&all, e);
    }
    print_errors_head();
    print_errors("dense", &dense);
    print_errors("mixtures", &mixtures);
    print_errors("both", &all);
    print_errors("not counted", &out);
}

/* ---- fits ---- */

enum { FIT_TIMES = 6 };

static void fit_measure(const Published *p, const Rates *r, const Rates *begin, const bool fixed[RATES],
                        Fit *f)
{
    enum { TENTH = 10 };
    f->rows = p->table.rows, f->constants = RATES;
    for (int k = 0; k < RATES; k++) {
        Rates here = *r, first = *begin;
        f->moved[k] = log(*constant(&here, k) / *constant(&first, k));
        f->low[k] = fixed[k] ? f->moved[k] : log(constants[k].low / *constant(&first, k));
        f->high[k] = fixed[k] ? f->moved[k] : log(constants[k].high / *constant(&first, k));
    }
    for (int i = 0; i < f->rows; i++) {
        f->ratio[i] = log(ratio(p, i, r));
        for (int k = 0; k < RATES; k++) {
            Rates more = *r;
            *constant(&more, k) *= 1 + 1. / TENTH;
            f->slope[i][k] = (log(ratio(p, i, &more)) - f->ratio[i]) / log(1 + 1. / TENTH);
        }
    }
}

/* Fitted to rows that are not out, nor of the model `without` (NULL: none is left out). */
static Rates fitted(const Published *p, Rates begin, const bool fixed[RATES], const char *without)
{
    static Fit f;
    Rates r = begin;
    for (int i = 0; i < p->table.rows; i++)
        f.out[i] = is_out(p, i) || (without && !strcmp(word(p, i, "model"), without));
    for (int n = 0; n < FIT_TIMES; n++) {
        double step[FIT_CONSTANTS];
        fit_measure(p, &r, &begin, fixed, &f);
        fit_step(&f, step);
        for (int k = 0; k < RATES; k++) *constant(&r, k) *= exp(step[k]);
    }
    return r;
}

static void print_constants(const char *what, Rates r)
{
    printf("%s:", what);
    for (int k = 0; k < RATES; k++) printf(" %s %.4g", constants[k].name, *constant(&r, k));
    printf("\n");
}

/* Each model's rows by constants that were fitted to the others'. */
static void print_left_out(const Published *p, Rates begin)
{
    const bool fixed[RATES] = { false };
    Errors dense = { 0 }, mixtures = { 0 }, both = { 0 };
    for (int i = 0; i < p->table.rows; i++) {
        int first = 0;
        while (strcmp(word(p, first, "model"), word(p, i, "model")) != 0) first++;
        if (first < i) continue;
        const Rates r = fitted(p, begin, fixed, word(p, i, "model"));
        for (int j = i; j < p->table.rows; j++) {
            if (is_out(p, j) || strcmp(word(p, j, "model"), word(p, i, "model")) != 0) continue;
            const double e = error_of(p, j, run_time(&p->table, &p->run[j], &r).seconds);
            add_error(is_mixture(p, j) ? &mixtures : &dense, e);
            add_error(&both, e);
        }
    }
    printf("\nEach model by constants fitted to the others:\n");
    print_errors_head();
    print_errors("dense", &dense);
    print_errors("mixtures", &mixtures);
    print_errors("both", &both);
}

/* Prints the change of the predicted speed when each constant grows by a tenth. */
static void print_moves(const Published *p, const Rates *r)
{
    printf("\n| a tenth more of | now | dense %% | mixtures %% |\n| --- | ---: | ---: | ---: |\n");
    for (int k = 0; k < RATES; k++) {
        Rates more = *r, now = *r;
        Errors dense = { 0 }, mixtures = { 0 };
        *constant(&more, k) *= 1.1;
        for (int i = 0; i < p->table.rows; i++)
            if (!is_out(p, i))
                add_error(is_mixture(p, i) ? &mixtures : &dense, percent(ratio(p, i, r), ratio(p, i, &more)));
        printf("| %s | %.4g | %+.2f | %+.2f |\n", constants[k].name, *constant(&now, k),
               dense.sum / dense.count, mixtures.sum / mixtures.count);
    }
}

/* ---- by the planner ---- */

/* Rows that `megatrain plan` can tell, too: dense ones in 16 bits. */
static Err print_planned(const Published *p, const Rates *r, Errors *all)
{
    for (int i = 0; i < p->table.rows; i++) {
        double seconds;
        if (is_out(p, i) || !plan_can_tell(&p->table, &p->run[i])) continue;
        TRY(plan_time_of(&p->table, &p->run[i], r, &seconds));
        const double error = error_of(p, i, seconds);
        add_error(all, error);
        printf("| %s | %s %s | %s/%s/%s/%s | %s | %s | %s | %+.1f | %+.1f |\n", word(p, i, "model"),
               word(p, i, "world"), word(p, i, "device"), word(p, i, "tp"), word(p, i, "pp"),
               word(p, i, "vpp"), word(p, i, "cp"), word(p, i, "batch"), word(p, i, "seq"),
               word(p, i, "recipe"), error, error_of(p, i, run_time(&p->table, &p->run[i], r).seconds));
    }
    return ERR_OK;
}

static Err print_by_planner(const Published *p, const Rates *r, const Published *simumax, const Rates *slower)
{
    Errors all = { 0 };
    printf("\nDense rows in 16 bits by the planner's own model, and as above:\n\n"
           "| model | devices | tp/pp/vpp/cp | batch | seq | recipe | plan's error %% | as above %% |\n"
           "| --- | --- | --- | ---: | ---: | --- | ---: | ---: |\n");
    TRY(print_planned(p, r, &all));
    if (simumax) TRY(print_planned(simumax, slower, &all));
    print_errors_head();
    print_errors("by the planner", &all);
    return ERR_OK;
}

/* megatrain itself in published layouts. */
static Err print_layouts(const Published *p)
{
    printf("\n| model | devices | tp/pp/vpp/cp/ep | recipe | published tokens/s | megatrain's, predicted | "
           "MFU %% | "
           "bound by | of the step %% |\n| --- | --- | --- | --- | ---: | ---: | ---: | --- | ---: |\n");
    for (int i = 0; i < p->table.rows; i++) {
        const Run *run = &p->run[i];
        CostModel m;
        Prediction t;
        TRY(cost_open(&m, &run->device, grid_size(run->grid)));
        TRY(predict(&m, &run->spec, run->grid, &t));
        const PredictionShare bound = prediction_bound(&t);
        printf("| %s | %s %s | %s/%s/%s/%s/%s | %s | %s | %.0f | %.1f | %s | %.0f |\n", word(p, i, "model"),
               word(p, i, "world"), word(p, i, "device"), word(p, i, "tp"), word(p, i, "pp"),
               word(p, i, "vpp"), word(p, i, "cp"), word(p, i, "ep"), word(p, i, "recipe"),
               word(p, i, "tok/s"), t.tokens_s / grid_size(run->grid), 100 * t.mfu, bound.name,
               100 * bound.seconds / t.step_s);
    }
    return ERR_OK;
}

/* ---- memory ---- */

/* A row repeats the one before it with another batch, which memory does not depend on. */
static bool is_new(const Published *p, int row)
{
    static const char *const by[] = { "model", "tp", "pp", "cp", "seq" };
    for (int i = 0; i < row; i++) {
        int same = 0;
        for (int k = 0; k < 5; k++) same += !strcmp(word(p, i, by[k]), word(p, row, by[k]));
        if (same == 5) return false;
    }
    return true;
}

static Err print_memory(const Published *p)
{
    Errors planned = { 0 }, kept = { 0 }, theirs = { 0 };
    printf("\nMemory of the rank that needs the most, GiB. kept: and a gradient in 16 bits of each shape of "
           "weight, "
           "which Transformer Engine keeps and we do not.\n\n"
           "| model | tp | pp | cp | ep | seq | measured | planned | error %% | kept | error %% | SimuMax's "
           "%% |\n"
           "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    for (int i = 0; i < p->table.rows; i++) {
        const double measured = number(p, i, "gib");
        double bytes, dummies;
        if (!is_new(p, i)) continue;
        TRY(memory_of(&p->run[i], &bytes, &dummies));
        const double error = percent(bytes / GIB, measured),
                     with = percent((bytes + dummies) / GIB, measured);
        const double said = percent(number(p, i, "simumax_gib"), measured);
        add_error(&planned, error), add_error(&kept, with), add_error(&theirs, said);
        printf("| %s | %s | %s | %s | %s | %s | %.2f | %.2f | %+.1f | %.2f | %+.1f | %+.1f |\n",
               word(p, i, "model"), word(p, i, "tp"), word(p, i, "pp"), word(p, i, "cp"), word(p, i, "ep"),
               word(p, i, "seq"), measured, bytes / GIB, error, (bytes + dummies) / GIB, with, said);
    }
    print_errors_head();
    print_errors("planned", &planned);
    print_errors("with what is kept", &kept);
    print_errors("SimuMax's own", &theirs);
    return ERR_OK;
}

/* ---- all of it ---- */

static const bool none_fixed[RATES] = { false };

static Err print_all(const Published *p, const Published *simumax, bool moves, bool fit)
{
    Rates r = published_rates, slower = published_rates;
    slower.bf16 = SIMUMAX_BF16;
    print_constants("Constants", r);
    print_rows(p, &r);
    print_summary(p, &r);
    if (moves) print_moves(p, &r);
    if (fit) {
        bool but_bf16[RATES];
        for (int k = 0; k < RATES; k++) but_bf16[k] = k > 0;
        r = fitted(p, begin_rates, none_fixed, NULL);
        print_constants("\nWhere the fit begins", begin_rates);
        print_summary(p, &begin_rates);
        print_constants("\nFitted", r);
        print_summary(p, &r);
        print_left_out(p, begin_rates);
        if (simumax)
            print_constants("\nWith bf16 alone fitted to SimuMax's machine",
                            fitted(simumax, published_rates, but_bf16, NULL));
    }
    if (!simumax) return ERR_OK;
    print_constants("\nSimuMax's machine, with one rate of its own", slower);
    print_rows(simumax, &slower);
    print_summary(simumax, &slower);
    TRY(print_by_planner(p, &published_rates, simumax, &slower));
    return print_memory(simumax);
}

static int usage(void)
{
    fprintf(stderr, "usage: bench_published [--moves] [--fit] [--rows FILE]\n"
                    "       bench_published --layouts FILE\n");
    return 2;
}

int main(int argc, char **argv)
{
    static Published rows, simumax;
    char path[PATH_BYTES], beside[PATH_BYTES];
    const char *other = NULL;
    bool moves = false, fit = false, layouts = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--moves")) moves = true;
        else if (!strcmp(argv[i], "--fit")) fit = true;
        else if (!strcmp(argv[i], "--rows") && i + 1 < argc) other = argv[++i];
        else if (!strcmp(argv[i], "--layouts") && i + 1 < argc) other = argv[++i], layouts = true;
        else return usage();
    }
    snprintf(path, sizeof path, "%s/rows.txt", published_folder);
    snprintf(beside, sizeof beside, "%s/simumax.txt", published_folder);
    Err err = published_read(other ? other : path, &rows);
    if (!err && !other) err = published_read(beside, &simumax);
    if (!err && layouts) err = print_layouts(&rows);
    else if (!err) err = print_all(&rows, other ? NULL : &simumax, moves, fit);
    if (err) err_print(err, true);
    published_close(&rows);
    published_close(&simumax);
    return err_exit_code(err);
}
