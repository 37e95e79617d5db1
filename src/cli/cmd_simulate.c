/*
 * simulate: a pipeline schedule on paper, or all that are legal at a shape. The lists are those that a run
 * executes; only their times are made up from --cost and --latency.
 */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/command.h"
#include "pipeline/chart.h"

enum { VARIANTS_MAX = 128, REASON_BYTES = 320 };

static const char *schedule_text, *cost_text = "1,1,1", *svg_path;
static int64_t stages, microbatches, chunks, group, waves, slices, batches;
static double latency;
static bool as_json, as_list, compare;

static const Option options[] = {
    { "schedule", OPTION_TEXT, &schedule_text, .value = "NAME", .help = "its name; +split behind it: B as I, W" },
    { "stages", OPTION_INT, &stages, .required = true, .low = 1, .high = 4096, .value = "P",
      .help = "ranks of the pipeline" },
    { "microbatches", OPTION_INT, &microbatches, .required = true, .low = 1, .high = 1 << 24, .value = "M",
      .help = "of a step (asynchronous: a batch)" },
    { "chunks", OPTION_INT, &chunks, .low = 1, .high = 4096, .value = "V", .help = "stages on a rank" },
    { "group", OPTION_INT, &group, .low = 1, .high = 1 << 24, .value = "G", .help = "of interleaved (P)" },
    { "waves", OPTION_INT, &waves, .low = 1, .high = 2048, .value = "W", .help = "of hanayo (1)" },
    { "slices", OPTION_INT, &slices, .low = 1, .high = 1024, .value = "K", .help = "of a sequence, in seq1f1b (1)" },
    { "batches", OPTION_INT, &batches, .low = 1, .high = 1 << 20, .value = "N",
      .help = "that an asynchronous schedule runs" },
    { "cost", OPTION_TEXT, &cost_text, .value = "F,I,W", .help = "of a chunk and a micro-batch" },
    { "latency", OPTION_REAL, &latency, .low = 0, .high = 1e12, .value = "C", .help = "of a message" },
    { "json", OPTION_FLAG, &as_json, .help = "figures as JSON" },
    { "list", OPTION_FLAG, &as_list, .help = "the actions of each rank" },
    { "svg", OPTION_TEXT, &svg_path, .value = "FILE", .help = "a picture too" },
    { "compare", OPTION_FLAG, &compare, .help = "all schedules; --cost is of a rank" },
};

/* One schedule and what became of it. */
typedef struct {
    Schedule s;
    Simulation sim;
    SimulateCosts costs;
} Paper;

static Err read_cost(StageCost *out)
{
    double *const parts[] = { &out->f, &out->i, &out->w };
    const char *at = cost_text;
    for (int i = 0; i < 3; i++) {
        char *end;
        *parts[i] = strtod(at, &end);
        if (end == at || *end != (i < 2 ? ',' : 0) || !(*parts[i] > 0 && *parts[i] <= 1e12))
            return err_set(ERR_CONFIG, "--cost wants three numbers above 0, as in 1,1,1 (F,I,W), not '%s'", cost_text);
        at = end + 1;
    }
    return ERR_OK;
}

static ScheduleSpec spec_of(const char *name)
{
    return (ScheduleSpec){ .name = name,
                           .ranks = (int)stages,
                           .microbatches = (int)microbatches,
                           .chunks = (int)chunks,
                           .group = (int)group,
                           .waves = (int)waves,
                           .slices = (int)slices,
                           .batches = (int)batches };
}

static void paper_free(Paper *p)
{
    simulation_free(&p->sim, &p->s);
    schedule_free(&p->s);
}

/* `whole`: the costs are of all chunks of a rank, and of a whole micro-batch. */
static Err paper_make(const ScheduleSpec *spec, const StageCost *cost, bool whole, Paper *p)
{
    *p = (Paper){ 0 };
    TRY(schedule_make(spec, &p->s));
    const double parts = whole ? p->s.chunks * p->s.unit_div * p->s.slices : 1;
    p->costs = (SimulateCosts){ .each = { cost->f / parts, cost->i / parts, cost->w / parts }, .latency = latency };
    return simulate(&p->s, &p->costs, &p->sim);
}

/* ---- figures ---- */

static int buffers_of(const Schedule *s, int rank) { return s->rank[rank].buffers; }
static int peak_w(const Schedule *s, int rank) { return simulate_peak(s, rank, false); }
static int peak_i(const Schedule *s, int rank) { return simulate_peak(s, rank, true); }

static int most_of(const Schedule *s, int (*value)(const Schedule *, int rank))
{
    int most = 0;
    for (int r = 0; r < s->ranks; r++) {
        const int here = value(s, r);
        if (here > most) most = here;
    }
    return most;
}

static int64_t messages_of(const Schedule *s)
{
    int64_t n = 0;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) n += s->rank[r].action[i].kind == ACT_SEND;
    return n;
}

static void put_array(JsonOut *j, const char *key, const Schedule *s, int (*value)(const Schedule *, int rank))
{
    json_open(j, key, '[');
    for (int r = 0; r < s->ranks; r++) json_put_int(j, NULL, value(s, r));
    json_close(j, ']');
}

static void put_json(JsonOut *j, const Paper *p)
{
    const Schedule *s = &p->s;
    json_open(j, NULL, '{');
    json_put_text(j, "schedule", s->name);
    json_put_int(j, "stages", s->ranks);
    json_put_int(j, "microbatches", s->microbatches);
    json_put_int(j, "chunks", s->chunks);
    json_put_int(j, "group", s->group);
    json_put_int(j, "waves", s->waves);
    json_put_int(j, "slices", s->slices);
    json_put_int(j, "batches", s->batches);
    json_put_int(j, "replicas", s->replicas);
    json_put_int(j, "units", s->units);
    json_put_number(j, "makespan", p->sim.makespan);
    json_put_number(j, "ideal", p->sim.ideal);
    json_put_number(j, "bubble", p->sim.bubble);
    json_put_number(j, "span_bubble", p->sim.span_bubble);
    put_array(j, "peak_hold_to_w", s, peak_w);
    put_array(j, "peak_hold_to_i", s, peak_i);
    json_put_int(j, "weight_copies", most_of(s, simulate_weight_copies));
    put_array(j, "boundary_buffers", s, buffers_of);
    json_put_int(j, "messages", messages_of(s));
    json_close(j, '}');
}

/* A few hundred bytes, and three numbers for each rank. */
static Err print_json(const Paper *p)
{
    const int64_t size = 1024 + 48 * (int64_t)p->s.ranks;
    char *buf = malloc((size_t)size);
    JsonOut j;
    if (!buf) return err_set(ERR_MEMORY, "no memory for a schedule as JSON");
    json_out_init(&j, buf, size);
    put_json(&j, p);
    ASSERT(json_out_ok(&j));
    fputs(buf, stdout);
    free(buf);
    return ERR_OK;
}

static void print_array(const char *what, const Schedule *s, int (*value)(const Schedule *, int rank))
{
    printf("%-37s", what);
    for (int r = 0; r < s->ranks && r < 16; r++) printf(" %d", value(s, r));
    printf("%s\n", s->ranks > 16 ? " ..." : "");
}

static void print_figures(const Paper *p)
{
    const Schedule *s = &p->s;
    const Simulation *m = &p->sim;
    printf("\n%s: %d ranks, %d micro-batches", s->name, s->ranks, s->microbatches);
    if (s->slices > 1) printf(" in %d slices", s->slices);
    if (s->batches > 1) printf(" in each of %d batches", s->batches);
    if (s->chunks > 1) printf(", %d chunks a rank", s->chunks);
    if (s->replicas > 1) printf(", two directions");
    if (s->unit_div > 1) printf(", in halves");
    printf("\n%-34s %g\n", "time", m->makespan);
    printf("%-37s %g\n", "work of a rank", m->ideal);
    printf("%-37s %g (%.1f %% of the work, %.1f %% of the time)\n", "bubble", m->bubble, 100 * m->bubble / m->ideal,
           100 * m->bubble / m->makespan);
    printf("%-37s %g\n", "bubble between first and last action", m->span_bubble);
    print_array("activations held until W, by rank", s, peak_w);
    print_array("activations held until I, by rank", s, peak_i);
    print_array("boundary buffers, by rank", s, buffers_of);
    printf("%-37s %lld\n", "messages", (long long)messages_of(s));
    printf("%-37s %d\n", "copies of the weights", most_of(s, simulate_weight_copies));
}

/* ---- one schedule ---- */

static Err write_svg(const Paper *p)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the picture");
    chart_svg(&p->s, &p->sim, f);
    const bool whole = !ferror(f);
    Err err = fclose(f) || !whole ? err_set(ERR_MEMORY, "no memory for the picture") : ERR_OK;
    if (!err) err = err_as(file_replace(svg_path, text, (int64_t)size), ERR_STORAGE);
    free(text);
    return err;
}

static Err show(const Paper *p)
{
    if (svg_path) TRY(write_svg(p));
    if (as_json) {
        TRY(print_json(p));
        putchar('\n');
        return ERR_OK;
    }
    if (as_list) {
        chart_list(&p->s, stdout);
        return ERR_OK;
    }
    chart_text(&p->s, &p->sim, stdout);
    print_figures(p);
    return ERR_OK;
}

static Err simulate_one(const StageCost *cost)
{
    const ScheduleSpec spec = spec_of(schedule_text);
    Paper p;
    if (svg_path) TRY(file_check_replaces(svg_path, "<svg"));
    Err err = paper_make(&spec, cost, false, &p);
    if (!err) err = show(&p);
    paper_free(&p);
    return err;
}

/* ---- all of them ---- */

/* A schedule's row of the table; the schedule itself is gone by then. */
typedef struct {
    char name[48];
    int chunks, copies, buffers;
    bool async;                    /* weights change while units are under way */
    double time, of_work, of_time; /* what a batch takes; the bubble in percent of work and of time */
    double held_w, held_i;         /* micro-batches of a whole rank */
} Row;

typedef struct {
    Row rows[VARIANTS_MAX];
    int count;
    char refused[VARIANTS_MAX][REASON_BYTES]; /* why a schedule is not among them */
    int refused_count;
} Table;

static Row row_of(const Paper *p)
{
    const Schedule *s = &p->s;
    const double whole = s->chunks * s->unit_div * s->slices;
    Row row = { .chunks = s->chunks,
                .async = s->versions != VERSIONS_STEP,
                .copies = most_of(s, simulate_weight_copies),
                .buffers = most_of(s, buffers_of),
                .time = p->sim.makespan / s->batches,
                .of_work = 100 * p->sim.bubble / p->sim.ideal,
                .of_time = 100 * p->sim.bubble / p->sim.makespan,
                .held_w = most_of(s, peak_w) / whole,
                .held_i = most_of(s, peak_i) / whole };
    snprintf(row.name, sizeof row.name, "%s", s->name);
    return row;
}

/* Adds a schedule if it is legal at the shape; as JSON it is printed at once. */
static Err try_one(Table *t, const char *name, const StageCost *cost)
{
    ScheduleSpec spec = spec_of(name);
    Paper p;
    Err err = paper_make(&spec, cost, true, &p);
    for (int i = 1; i < 4 && err == ERR_CONFIG && (chunks || slices); i++) { /* what is fixed is the schedule's */
        paper_free(&p);
        spec.slices = i % 2 ? 0 : (int)slices;
        spec.chunks = i / 2 ? 0 : (int)chunks;
        err = paper_make(&spec, cost, true, &p);
    }
    if (!err && as_json) {
        if (t->count) putchar(',');
        err = print_json(&p);
    }
    if (!err) t->rows[t->count++] = row_of(&p);
    paper_free(&p);
    return err;
}

/* The schedule, and with its backwards split if they are whole. */
static Err try_both(Table *t, const char *name, const StageCost *cost)
{
    char split[64];
    snprintf(split, sizeof split, "%s+split", name);
    ASSERT(t->count + 2 <= VARIANTS_MAX);
    Err err = try_one(t, name, cost);
    if (err == ERR_CONFIG) {
        snprintf(t->refused[t->refused_count++], REASON_BYTES, "%s", err_message());
        return ERR_OK;
    }
    TRY(err);
    err = try_one(t, split, cost);
    return err == ERR_CONFIG ? ERR_OK : err;
}

static int by_time(const void *left, const void *right)
{
    const Row *a = left, *b = right;
    const int order = (a->time > b->time) - (a->time < b->time);
    return order ? order : strcmp(a->name, b->name);
}

static void print_table(Table *t)
{
    qsort(t->rows, (size_t)t->count, sizeof *t->rows, by_time);
    printf("%d ranks, %d micro-batches; costs %s of a rank's chunks together, latency %g of a message\n\n", (int)stages,
           (int)microbatches, cost_text, latency);
    printf("%-25s %7s %6s %10s %8s %8s %9s %9s %7s %9s\n", "schedule", "updates", "chunks", "time", "bubble", "bubble",
           "held", "held", "weight", "boundary");
    printf("%-25s %7s %6s %10s %8s %8s %9s %9s %7s %9s\n", "", "", "a rank", "a batch", "% work", "% time", "until W",
           "until I", "copies", "buffers");
    for (int i = 0; i < t->count; i++) {
        const Row *r = &t->rows[i];
        printf("%-25s %7s %6d %10.2f %8.1f %8.1f %9.2f %9.2f %7d %9d\n", r->name, r->async ? "async" : "sync",
               r->chunks, r->time, r->of_work, r->of_time, r->held_w, r->held_i, r->copies, r->buffers);
    }
    printf("\nupdates: async: weights change while a batch is under way, gradients are of older ones\n"
           "held: activations, in micro-batches of a whole rank; all figures of the rank that has most\n");
    for (int i = 0; i < t->refused_count; i++) printf("%s%s\n", i ? "" : "\nnot legal at this shape:\n", t->refused[i]);
}

static Err compare_all(const StageCost *cost)
{
    Table *t = calloc(1, sizeof *t);
    if (!t) return err_set(ERR_MEMORY, "no memory to compare schedules");
    Err err = ERR_OK;
    if (as_json) putchar('[');
    for (int i = 0; schedule_name(i) && !err; i++) err = try_both(t, schedule_name(i), cost);
    if (as_json) puts("]");
    else if (!err) print_table(t);
    free(t);
    return err;
}

static Err simulate_command(Words rest)
{
    StageCost cost;
    (void)rest;
    TRY(read_cost(&cost));
    if (compare && (schedule_text || as_list || svg_path))
        return err_set(ERR_CONFIG, "--compare shows all schedules: it goes without --schedule, --list and --svg");
    if (as_json && as_list) return err_set(ERR_CONFIG, "either --json or --list");
    if (compare) return compare_all(&cost);
    if (!schedule_text)
        return err_set(ERR_CONFIG, "'megatrain simulate' needs --schedule NAME, or --compare for all of them");
    return simulate_one(&cost);
}

const Command command_simulate = {
    .name = "simulate",
    .summary = "run a pipeline schedule on paper",
    OPTIONS(options),
    .run = simulate_command,
};
