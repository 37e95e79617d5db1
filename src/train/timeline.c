/* See timeline.h. Rank 0 asks for clocks, then takes text and times from one rank after the other. */
#include "train/timeline.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/rank_list.h"
#include "base/run_files.h"
#include "base/svg.h"
#include "base/trace.h"
#include "pipeline/chart.h"

enum { PIECE_BYTES = 64 << 10, LINE_BYTES = 320 };

/* A rank's answer, and what rank 0 makes of it. */
typedef struct {
    int64_t now, started; /* by its clock */
} Reading;

typedef struct {
    int64_t ahead, error, started; /* ns: ahead of rank 0's clock; started: by its own */
} Clock;

typedef struct {
    int64_t bytes; /* 0: that was all */
    char text[PIECE_BYTES];
} Piece;

struct Timeline {
    Trainer *trainer;
    SetupArena setup;
    bool *traced; /* [ranks] */
    Span *times;  /* when this rank's actions ran; NULL: there is no pipeline */
    Piece piece;
    /* rank 0: */
    Clock *clocks;       /* [ranks] */
    Simulation measured; /* ms */
    Simulator *simulator;
    StageCost *costs; /* [stages] ms */
    SvgSheet picture;
    char json_path[PATH_MAX], svg_path[PATH_MAX];
};

/* ---- opening ---- */

static const Schedule *schedule_of(const Timeline *t) { return &t->trainer->parts.step; }

static bool has_picture(const Timeline *t) { return t->times && t->trainer->device.kind == DEVICE_CPU; }

bool timeline_records(const Timeline *t) { return t->traced[t->trainer->world->rank]; }

/* In the picture the first of the ranks that differ in tp, cp or dp alone stands for all of them. */
static bool is_drawn(const Timeline *t, int rank)
{
    const GridCoords at = grid_coords(t->trainer->world->grid, rank);
    return has_picture(t) && !at.tp && !at.cp && !at.dp;
}

static Err open_picture(Timeline *t)
{
    const Schedule *s = schedule_of(t);
    TRY(setup_array(&t->setup, s->ranks, &t->measured.span));
    for (int r = 0; r < s->ranks; r++) TRY(setup_array(&t->setup, s->rank[r].count, &t->measured.span[r]));
    TRY(setup_array(&t->setup, s->stages, &t->costs));
    TRY(simulator_open(s, &t->simulator));
    return svg_sheet_open(&t->picture, &t->setup, chart_svg_bytes(s, 2) + 4 * LINE_BYTES);
}

static Err open_all(Timeline *t, const char *run_dir, const char *ranks)
{
    const World *w = t->trainer->world;
    TRY(setup_array(&t->setup, w->size, &t->traced));
    ASSERT(rank_list_read(ranks, w->size, t->traced));
    snprintf(t->json_path, sizeof t->json_path, "%s/" RUN_TIMELINE, run_dir);
    snprintf(t->svg_path, sizeof t->svg_path, "%s/" RUN_TIMELINE_PICTURE, run_dir);
    if (timeline_records(t)) TRY(trace_open(t->json_path));
    if (w->grid.pp > 1) TRY(setup_array(&t->setup, schedule_of(t)->rank[w->pp_rank].count, &t->times));
    if (w->rank) return ERR_OK;
    TRY(setup_array(&t->setup, w->size, &t->clocks));
    return has_picture(t) ? open_picture(t) : ERR_OK;
}

Err timeline_open(Trainer *trainer, const char *run_dir, const char *ranks, Timeline **out)
{
    Timeline *t = calloc(1, sizeof *t);
    *out = t;
    if (!t) return err_set(ERR_MEMORY, "no memory for a timeline");
    t->trainer = trainer;
    setup_init(&t->setup);
    Err err = open_all(t, run_dir, ranks);
    if (!err) return ERR_OK;
    timeline_close(t);
    *out = NULL;
    return err;
}

void timeline_close(Timeline *t)
{
    if (!t) return;
    t->trainer->executor.times = NULL;
    if (t->picture.out) fclose(t->picture.out);
    simulator_close(t->simulator);
    setup_release(&t->setup);
    free(t);
}

void timeline_start(Timeline *t)
{
    t->trainer->executor.times = t->times;
    if (timeline_records(t)) trace_start();
}

/* ---- between ranks ---- */

static Err pass(Timeline *t, int peer, bool send, void *data, int64_t bytes)
{
    const CommMessage m = { .send = send, .peer = peer, .data = data, .bytes = bytes };
    return comm_exchange(&t->trainer->world->host, &t->trainer->device.stream, &m, 1, NULL);
}

static Err ask_clock(Timeline *t, int rank)
{
    Clock *best = &t->clocks[rank];
    best->error = INT64_MAX;
    for (int i = 0; i < CLOCK_ASKED; i++) {
        Reading r = { 0 };
        const int64_t asked = trace_now();
        TRY(pass(t, rank, true, &r, sizeof r));
        TRY(pass(t, rank, false, &r, sizeof r));
        const int64_t half = (trace_now() - asked + 1) / 2;
        if (half < best->error) *best = (Clock){ r.now - (asked + half), half, r.started };
    }
    if (llabs(best->ahead) <= best->error) best->ahead = 0;
    return ERR_OK;
}

static Err answer_clock(Timeline *t)
{
    for (int i = 0; i < CLOCK_ASKED; i++) {
        Reading r;
        TRY(pass(t, 0, false, &r, sizeof r));
        r = (Reading){ trace_now(), timeline_records(t) ? trace_started() : INT64_MAX };
        TRY(pass(t, 0, true, &r, sizeof r));
    }
    return ERR_OK;
}

/* Time 0 of the file by rank 0's clock: when the first rank began to record. */
static int64_t origin_of(const Timeline *t)
{
    int64_t first = t->traced[0] ? trace_started() : INT64_MAX;
    for (int r = 1; r < t->trainer->world->size; r++) {
        if (!t->traced[r]) continue;
        const int64_t started = t->clocks[r].started - t->clocks[r].ahead;
        if (started < first) first = started;
    }
    return first;
}

enum { PROCESS_BYTES = 128 };

static TraceProcess process_of(const World *w, int64_t origin_ns, char name[PROCESS_BYTES])
{
    char host[49] = "";
    const Grid g = w->grid;
    const int plane = (w->dp_rank * g.cp + w->cp_rank) * g.tp + w->tp_rank; /* (messages stay in one) */
    char cp[20] = "";
    if (g.cp > 1) snprintf(cp, sizeof cp, "cp %d, ", w->cp_rank);
    if (gethostname(host, sizeof host - 1)) snprintf(host, sizeof host, "?");
    snprintf(name, PROCESS_BYTES, "rank %d on %s: pp %d, tp %d, %sdp %d", w->rank, host, w->pp_rank, w->tp_rank, cp,
             w->dp_rank);
    return (TraceProcess){ .name = name,
                           .pid = w->rank,
                           .place = 1 + plane * g.pp + w->pp_rank,
                           .origin_ns = origin_ns,
                           .arrow_base = (int64_t)plane << 40 };
}

/* ---- one file ---- */

/* A failure to write does not stop what the others send; it is told in the end. */
typedef struct {
    FileWriter file;
    bool begun; /* it holds an object */
    Err err;
    ErrKept why;
} Sink;

static void sink_note(Sink *s, Err err)
{
    if (!err || s->err) return;
    s->err = err;
    err_keep(&s->why);
}

static void sink_write(Sink *s, const void *data, int64_t bytes)
{
    if (!s->err) sink_note(s, file_write(&s->file, data, bytes));
}

/* Objects begin with a comma, which the first of the file must not. */
static void write_piece(Sink *sink, const char *text, int64_t bytes)
{
    if (!bytes) return;
    sink_write(sink, sink->begun ? text : "[", sink->begun ? bytes : 1);
    if (!sink->begun) sink_write(sink, text + 1, bytes - 1);
    sink->begun = true;
}

static void write_own(Timeline *t, int64_t origin_ns, Sink *sink)
{
    char name[PROCESS_BYTES];
    const TraceProcess p = process_of(t->trainer->world, origin_ns, name);
    int64_t next = 0, bytes;
    while ((bytes = trace_text(&p, &next, t->piece.text, PIECE_BYTES)) > 0) write_piece(sink, t->piece.text, bytes);
}

static Err send_text(Timeline *t)
{
    int64_t origin_ns, next = 0;
    char name[PROCESS_BYTES];
    TRY(pass(t, 0, false, &origin_ns, sizeof origin_ns));
    const TraceProcess p = process_of(t->trainer->world, origin_ns, name);
    do {
        t->piece.bytes = trace_text(&p, &next, t->piece.text, PIECE_BYTES);
        TRY(pass(t, 0, true, &t->piece, sizeof t->piece));
    } while (t->piece.bytes);
    return ERR_OK;
}

static Err receive_text(Timeline *t, int rank, int64_t origin_ns, Sink *sink)
{
    int64_t theirs = origin_ns + t->clocks[rank].ahead;
    TRY(pass(t, rank, true, &theirs, sizeof theirs));
    do {
        TRY(pass(t, rank, false, &t->piece, sizeof t->piece));
        write_piece(sink, t->piece.text, t->piece.bytes);
    } while (t->piece.bytes);
    return ERR_OK;
}

static Err write_json(Timeline *t)
{
    Sink sink = { .err = ERR_OK };
    const int64_t origin_ns = origin_of(t);
    sink_note(&sink, file_create(t->json_path, &sink.file));
    const bool created = !sink.err;
    if (t->traced[0]) write_own(t, origin_ns, &sink);
    for (int r = 1; r < t->trainer->world->size; r++)
        if (t->traced[r]) TRY(receive_text(t, r, origin_ns, &sink));
    sink_write(&sink, "\n]\n", 3);
    if (!sink.err) return file_sync_close(&sink.file);
    if (created) file_abandon(&sink.file);
    return err_again(&sink.why, sink.err);
}

/* ---- the picture ---- */

static int64_t times_bytes(const Timeline *t, int pp_rank)
{
    return schedule_of(t)->rank[pp_rank].count * (int64_t)sizeof(Span);
}

static Err send_times(Timeline *t)
{
    const World *w = t->trainer->world;
    return is_drawn(t, w->rank) ? pass(t, 0, true, t->times, times_bytes(t, w->pp_rank)) : ERR_OK;
}

static Err receive_times(Timeline *t)
{
    const World *w = t->trainer->world;
    memcpy(t->measured.span[0], t->times, (size_t)times_bytes(t, 0));
    for (int r = 1; r < w->size; r++) {
        const GridCoords at = grid_coords(w->grid, r);
        if (!is_drawn(t, r)) continue;
        Span *span = t->measured.span[at.pp];
        TRY(pass(t, r, false, span, times_bytes(t, at.pp)));
        for (int i = 0; i < schedule_of(t)->rank[at.pp].count; i++) {
            span[i].start -= 1e-9 * (double)t->clocks[r].ahead;
            span[i].end -= 1e-9 * (double)t->clocks[r].ahead;
        }
    }
    return ERR_OK;
}

/* From seconds of a clock to milliseconds since the first compute began. */
static void begin_at_zero(Timeline *t)
{
    const Schedule *s = schedule_of(t);
    Simulation *m = &t->measured;
    double first = INFINITY;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++)
            if (action_is_compute(s->rank[r].action[i].kind)) first = fmin(first, m->span[r][i].start);
    m->makespan = 0;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) {
            Span *span = &m->span[r][i];
            *span = (Span){ 1e3 * (span->start - first), 1e3 * (span->end - first) };
            if (action_is_compute(s->rank[r].action[i].kind)) m->makespan = fmax(m->makespan, span->end);
        }
}

/* Mean time of a unit of each kind of compute of a stage, by ActionKind, and how many there were. */
typedef struct {
    double mean[ACT_W + 1], units[ACT_W + 1];
} Means;

/* Did two actions run in turn? How long each took of that time is not known. */
static bool shared(const Action *a, const Span *span)
{
    return a->flags & ACTION_PAIR && span[0].start == span[1].start;
}

/* (each stage has forwards and backwards outside pairs: its first and its last) */
static Means means_of(const Timeline *t, int stage)
{
    const Schedule *s = schedule_of(t);
    Means m = { .mean = { 0 } };
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) {
            const Action *a = &s->rank[r].action[i];
            const Span *span = &t->measured.span[r][i];
            if (!action_is_compute(a->kind) || a->stage != stage) continue;
            if (shared(a, span) || (i && shared(a - 1, span - 1))) continue;
            m.mean[a->kind] += span->end - span->start;
            m.units[a->kind] += a->count;
        }
    for (int k = ACT_F; k <= ACT_W; k++)
        if (m.units[k] > 0) m.mean[k] /= m.units[k];
    return m;
}

/* A simulated B takes I and W together: where a stage has B beside I and W, both are stretched to what all took. */
static StageCost cost_of(const Timeline *t, int stage)
{
    const Means m = means_of(t, stage);
    const double halves = m.mean[ACT_I] + m.mean[ACT_W], all = m.units[ACT_B] + m.units[ACT_I];
    if (!(halves > 0)) return (StageCost){ .f = m.mean[ACT_F], .i = m.mean[ACT_B] };
    const double by = (m.units[ACT_B] * m.mean[ACT_B] + m.units[ACT_I] * halves) / (all * halves);
    return (StageCost){ .f = m.mean[ACT_F], .i = by * m.mean[ACT_I], .w = by * m.mean[ACT_W] };
}

static void say_clocks(const Timeline *t, char *text, size_t size)
{
    int64_t worst = 0;
    for (int r = 1; r < t->trainer->world->size; r++)
        if (t->clocks[r].ahead && t->clocks[r].error > worst) worst = t->clocks[r].error;
    if (worst) snprintf(text, size, "clocks agree within %.2g ms", 1e-6 * (double)worst);
    else snprintf(text, size, "one clock");
}

static Err draw(Timeline *t, const Simulation *plan, const TimelineFigures *f)
{
    char title[LINE_BYTES], figures[LINE_BYTES], measured[LINE_BYTES], planned[LINE_BYTES], clocks[LINE_BYTES / 4];
    say_clocks(t, clocks, sizeof clocks);
    snprintf(title, sizeof title, "step %lld", (long long)t->trainer->progress.step);
    snprintf(figures, sizeof figures,
             "bubble %.1f %%, simulated %.1f %%: the share of all ranks' time, from the first compute to the "
             "end of "
             "the last, without compute; %s",
             100 * f->bubble, 100 * f->bubble_simulated, clocks);
    snprintf(measured, sizeof measured, "measured: %.4g ms, bubble %.1f %%", t->measured.makespan, 100 * f->bubble);
    snprintf(planned, sizeof planned,
             "simulated with each stage's mean costs, messages taking no time: %.4g ms, bubble %.1f %%", plan->makespan,
             100 * f->bubble_simulated);
    const ChartRuns runs = { .title = title,
                             .figures = figures,
                             .unit = "ms",
                             .name = { measured, planned },
                             .run = { &t->measured, plan },
                             .runs = 2 };
    chart_svg_runs(schedule_of(t), &runs, t->picture.out);
    return svg_sheet_write(&t->picture, t->svg_path);
}

static Err picture(Timeline *t, TimelineFigures *f)
{
    const Schedule *s = schedule_of(t);
    const Simulation *plan;
    begin_at_zero(t);
    for (int i = 0; i < s->stages; i++) t->costs[i] = cost_of(t, i);
    TRY(simulator_run(t->simulator, &(SimulateCosts){ .stage = t->costs }, &plan));
    *f = (TimelineFigures){ true, simulation_idle(s, &t->measured), simulation_idle(s, plan) };
    return draw(t, plan, f);
}

/* ---- the end of a recording ---- */

/* A file that cannot be written does not keep the ranks from each other: the times come in any case. */
static Err collect(Timeline *t, TimelineFigures *out)
{
    ErrKept why;
    for (int r = 1; r < t->trainer->world->size; r++)
        if (t->traced[r] || is_drawn(t, r)) TRY(ask_clock(t, r));
    Err err = write_json(t);
    if (!has_picture(t) || (err && err != ERR_IO)) return err;
    err_keep(&why);
    TRY(receive_times(t));
    return err ? err_again(&why, err) : picture(t, out);
}

static Err give(Timeline *t)
{
    const bool records = timeline_records(t);
    if (records || is_drawn(t, t->trainer->world->rank)) TRY(answer_clock(t));
    if (records) TRY(send_text(t));
    return send_times(t);
}

Err timeline_stop(Timeline *t, TimelineFigures *out)
{
    *out = (TimelineFigures){ 0 };
    t->trainer->executor.times = NULL;
    if (timeline_records(t)) trace_halt();
    return t->trainer->world->rank ? give(t) : collect(t, out);
}
