/*
 * Pictures of schedules: chart_svg and chart_svg_runs of chart.h. From back to front: a hatched track a rank, on
 * which idle time shows; computes; unit numbers. Pairs that overlap share their time, one above the other.
 *
 *   colours  two sets, chosen by the reader's browser (prefers-color-scheme); kinds also differ in lightness
 *   size     the shortest compute is CELL wide, within limits; schedules of more than DETAIL computes have
 *            neither numbers nor tool tips
 */
#include <math.h>
#include <string.h>

#include "pipeline/chart.h"

enum {
    LEFT = 64,
    RIGHT = 24,
    TOP = 92,
    BOTTOM = 40,
    ROW = 30,
    BAR = 24,
    CAPTION = 30, /* above each of several runs */
    CELL = 22,
    WIDTH_MIN = 640,
    WIDTH_MAX = 2400,
    SHADES = 4,
    DETAIL = 6000
};

typedef struct {
    const Schedule *s;
    const ChartRuns *runs;
    const Simulation *sim; /* the run that is drawn, */
    double top;            /* and where */
    FILE *out;
    double longest, width, height, scale; /* longest: of the runs; scale: pixels for a unit of time */
    bool detail, captions;
} Picture;

static const char *const kind_class = "fbiw"; /* by ActionKind */

/* Of SHADES: chunks from the first to the last stage, or the replica. */
static int shade_of(const Schedule *s, const Action *a)
{
    if (s->replicas > 1) return a->replica * 2;
    return s->chunks <= SHADES ? schedule_chunk_of(s, a->stage)
                               : schedule_chunk_of(s, a->stage) * (SHADES - 1) / (s->chunks - 1);
}

static double x_of(const Picture *p, double time) { return LEFT + time * p->scale; }

static double run_height(const Picture *p) { return (double)p->s->ranks * ROW + (p->captions ? CAPTION : 0); }

static int64_t compute_count(const Schedule *s)
{
    int64_t n = 0;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) n += action_is_compute(s->rank[r].action[i].kind);
    return n;
}

/* The scale is that of the last run: a plan's computes of one kind are equally long. */
static void measure(Picture *p)
{
    const Simulation *plan = p->runs->run[p->runs->runs - 1];
    double least = INFINITY;
    for (int r = 0; r < p->s->ranks; r++)
        for (int i = 0; i < p->s->rank[r].count; i++) {
            const double time = plan->span[r][i].end - plan->span[r][i].start;
            if (time > 0) least = fmin(least, time);
        }
    for (int i = 0; i < p->runs->runs; i++) p->longest = fmax(p->longest, p->runs->run[i]->makespan);
    const double inner = fmin(fmax(p->longest / least * CELL, WIDTH_MIN), WIDTH_MAX);
    p->scale = inner / p->longest;
    p->width = LEFT + inner + RIGHT;
    p->height = TOP + p->runs->runs * run_height(p) + BOTTOM;
    p->detail = compute_count(p->s) <= DETAIL;
}

/* ---- what stands around the rows ---- */

static void put_title(const Picture *p)
{
    const Schedule *s = p->s;
    if (p->runs->title) fprintf(p->out, "%s; ", p->runs->title);
    fprintf(p->out, "%s: %d rank%s, %d micro-batches", s->name, s->ranks, s->ranks == 1 ? "" : "s",
            s->microbatches);
    if (s->slices > 1) fprintf(p->out, " in %d slices", s->slices);
    if (s->batches > 1) fprintf(p->out, " in each of %d batches", s->batches);
    if (s->chunks > 1) fprintf(p->out, ", %d chunks a rank", s->chunks);
    if (s->replicas > 1) fprintf(p->out, ", two directions");
}

static void put_figures(const Picture *p)
{
    const Simulation *m = p->runs->run[0];
    if (p->runs->figures) {
        fputs(p->runs->figures, p->out);
        return;
    }
    fprintf(p->out, "time %g, of which %g idle: %.1f %% of the time, %.1f %% on top of the work", m->makespan,
            m->bubble, 100 * m->bubble / m->makespan, 100 * m->bubble / m->ideal);
}

static void put_style(const Picture *p)
{
    fprintf(p->out,
            "<style>\n"
            "text{font:12px "
            "system-ui,sans-serif;fill:#1f2328}.name{font-weight:600;font-size:15px}.dim{fill:#59636e}"
            ".n{font-size:11px;text-anchor:middle;pointer-events:none}.paper{fill:#fff}.idle{fill:url(#h)}"
            ".hatch{stroke:#d1d9e0;stroke-width:1.5}.back{fill:#f6f8fa}.grid{stroke:#d1d9e0;fill:none}\n"
            ".f0{fill:#2f6fd0}.f1{fill:#5f95e2}.f2{fill:#8fb7ee}.f3{fill:#bfd7f8}\n"
            ".b0{fill:#c25e14}.b1{fill:#dd8038}.b2{fill:#eda56b}.b3{fill:#f7cba6}\n"
            ".i0{fill:#94700a}.i1{fill:#b58d1f}.i2{fill:#dcbb5c}.i3{fill:#f0dfa3}\n"
            ".w0{fill:#2b7a55}.w1{fill:#4f9d77}.w2{fill:#82bf9f}.w3{fill:#b5dcc6}\n"
            ".n0,.n1{fill:#fff}.n2,.n3{fill:#1f2328}.step{stroke:#8250df;stroke-width:2}\n");
    fprintf(p->out,
            "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}.paper{fill:#0d1117}"
            ".hatch,.grid{stroke:#353c45}.back{fill:#151b23}.step{stroke:#be8fff}\n"
            ".f0{fill:#5b93ea}.f1{fill:#3f78d0}.f2{fill:#2c5aa3}.f3{fill:#1f4276}\n"
            ".b0{fill:#ee9a55}.b1{fill:#d07a34}.b2{fill:#a35a20}.b3{fill:#774016}\n"
            ".i0{fill:#e3c25a}.i1{fill:#c29f33}.i2{fill:#86690f}.i3{fill:#624c08}\n"
            ".w0{fill:#63bd90}.w1{fill:#459c70}.w2{fill:#317852}.w3{fill:#235a3d}\n"
            ".n0,.n1{fill:#0d1117}.n2,.n3{fill:#fff}}\n</style>\n"
            "<defs><pattern id=\"h\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" "
            "patternTransform=\"rotate(45)\"><rect class=\"back\" width=\"7\" height=\"7\"/><path "
            "class=\"hatch\" "
            "d=\"M0 0v7\"/></pattern></defs>\n");
}

static void put_head(const Picture *p)
{
    fprintf(p->out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" role=\"img\" "
            "aria-labelledby=\"t d\">\n<title id=\"t\">",
            p->width, p->height);
    put_title(p);
    fprintf(p->out, "</title>\n<desc id=\"d\">");
    put_figures(p);
    fprintf(p->out, "; a row for each rank, time from left to right.</desc>\n");
    put_style(p);
    fprintf(p->out,
            "<rect class=\"paper\" width=\"%.0f\" height=\"%.0f\"/>\n<text class=\"name\" x=\"%d\" y=\"24\">",
            p->width, p->height, LEFT);
    put_title(p);
    fprintf(p->out, "</text>\n<text x=\"%d\" y=\"44\">", LEFT);
    put_figures(p);
    fprintf(p->out, "</text>\n");
}

static bool has_kind(const Schedule *s, ActionKind kind)
{
    for (int i = 0; i < s->rank[0].count; i++)
        if (s->rank[0].action[i].kind == kind) return true;
    return false;
}

/* One entry of the legend: all shades of a colour and its name; returns where the next one begins. */
static int put_swatches(const Picture *p, int x, char class, const char *name)
{
    const int parts = p->s->replicas > 1 ? 2 : p->s->chunks < SHADES ? p->s->chunks : SHADES;
    for (int i = 0; i < parts; i++, x += 16)
        fprintf(p->out, "<rect class=\"%c%d\" x=\"%d\" y=\"58\" width=\"14\" height=\"14\" rx=\"2\"/>", class,
                p->s->replicas > 1 ? 2 * i : i, x);
    fprintf(p->out, "<text x=\"%d\" y=\"70\">%s</text>\n", x + 4, name);
    return x + 22 + 7 * (int)strlen(name);
}

static void put_legend(const Picture *p)
{
    static const char *const names[] = { "forward", "backward", "dgrad", "wgrad" };
    int x = LEFT;
    for (int kind = ACT_F; kind <= ACT_W; kind++)
        if (has_kind(p->s, kind)) x = put_swatches(p, x, kind_class[kind], names[kind]);
    fprintf(p->out,
            "<rect class=\"idle\" x=\"%d\" y=\"58\" width=\"14\" height=\"14\" rx=\"2\"/><text x=\"%d\" "
            "y=\"70\">idle</text>\n",
            x, x + 20);
    x += 60;
    const char *shades = p->s->replicas > 1 ? "shade: direction" : "shade: chunk";
    if (p->s->replicas > 1 || p->s->chunks > 1)
        fprintf(p->out, "<text class=\"dim\" x=\"%d\" y=\"70\">%s</text>\n", x, shades);
}

/* 1, 2 or 5 times a power of ten that leaves about ten ticks. */
static double round_distance(double range)
{
    const double power = pow(10, floor(log10(range / 10)));
    return range / 10 > 5 * power ? 10 * power : range / 10 > 2 * power ? 5 * power : 2 * power;
}

static void put_axis(const Picture *p)
{
    const double distance = round_distance(p->longest), bottom = p->height - BOTTOM;
    for (int i = 0; i * distance <= p->longest * (1 + 1e-9); i++) {
        const double x = x_of(p, i * distance);
        fprintf(p->out,
                "<path class=\"grid\" d=\"M%.1f %dV%.0f\"/><text class=\"dim\" x=\"%.1f\" y=\"%.0f\" "
                "text-anchor=\"middle\">%g</text>\n",
                x, TOP - 6, bottom + 4, x, bottom + 20, i * distance);
    }
    if (p->runs->unit)
        fprintf(p->out, "<text class=\"dim\" x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%s</text>\n", LEFT - 8,
                bottom + 20, p->runs->unit);
}

/* ---- rows ---- */

static void put_compute(const Picture *p, int rank, int i)
{
    const Action *a = &p->s->rank[rank].action[i];
    const Span t = p->sim->span[rank][i];
    const Span *other = p->sim->span[rank];
    const bool first = a->flags & ACTION_PAIR && other[i + 1].start == t.start;
    const bool second = i > 0 && a[-1].flags & ACTION_PAIR && other[i - 1].start == t.start;
    const double high = first || second ? BAR / 2.0 : BAR, gap = (t.end - t.start) * p->scale > 6 ? 1 : 0;
    const double x = x_of(p, t.start), y = p->top + (double)rank * ROW + (second ? BAR / 2.0 : 0);
    const double width = (t.end - t.start) * p->scale - gap;
    const int shade = shade_of(p->s, a);
    char unit[CHART_UNIT_BYTES];
    if (!p->detail) {
        fprintf(p->out, "<path class=\"%c%d\" d=\"M%.2f %.0fh%.2fv%.0fh-%.2fz\"/>\n", kind_class[a->kind],
                shade, x, y, width, high, width);
        return;
    }
    fprintf(p->out,
            "<rect class=\"%c%d\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"%.0f\" rx=\"2\"><title>%s of "
            "unit "
            "%s, stage %d: %g to %g</title></rect>",
            kind_class[a->kind], shade, x, y, width, high, action_name(a->kind),
            chart_unit(p->s, a->microbatch, unit), a->stage, t.start, t.end);
    if (width > 5 + 6.5 * (double)strlen(unit))
        fprintf(p->out, "<text class=\"n n%d\" x=\"%.1f\" y=\"%.1f\">%s</text>", shade, x + width / 2,
                y + high / 2 + 4, unit);
    fputc('\n', p->out);
}

static void put_row(const Picture *p, int rank)
{
    const ActionList *list = &p->s->rank[rank];
    const double y = p->top + (double)rank * ROW;
    double now = 0;
    fprintf(p->out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%s %d</text>\n", LEFT - 8,
            y + BAR / 2.0 + 4, p->captions ? "pp" : "rank", rank);
    fprintf(p->out, "<rect class=\"idle\" x=\"%d\" y=\"%.0f\" width=\"%.2f\" height=\"%d\" rx=\"2\"/>\n",
            LEFT, y, p->sim->makespan * p->scale, BAR);
    for (int i = 0; i < list->count; i++) {
        if (action_is_compute(list->action[i].kind)) {
            put_compute(p, rank, i);
            now = p->sim->span[rank][i].end;
        } else if (list->action[i].kind == ACT_UPDATE && p->s->versions != VERSIONS_STEP) {
            fprintf(p->out, "<path class=\"step\" d=\"M%.2f %.0fv%d\"><title>update</title></path>\n",
                    x_of(p, now), y - 2, BAR + 4);
        }
    }
}

static void put_run(Picture *p, int run)
{
    p->sim = p->runs->run[run];
    p->top = TOP + run * run_height(p) + (p->captions ? CAPTION : 0);
    if (p->captions)
        fprintf(p->out, "<text class=\"name\" x=\"%d\" y=\"%.0f\">%s</text>\n", LEFT, p->top - 9,
                p->runs->name[run]);
    for (int r = 0; r < p->s->ranks; r++) put_row(p, r);
}

void chart_svg_runs(const Schedule *s, const ChartRuns *runs, FILE *out)
{
    Picture p = { .s = s, .runs = runs, .out = out, .captions = runs->name[0] };
    measure(&p);
    put_head(&p);
    put_legend(&p);
    put_axis(&p);
    for (int i = 0; i < runs->runs; i++) put_run(&p, i);
    fprintf(out, "</svg>\n");
}

void chart_svg(const Schedule *s, const Simulation *sim, FILE *out)
{
    chart_svg_runs(s, &(ChartRuns){ .run = { sim }, .runs = 1 }, out);
}

int64_t chart_svg_bytes(const Schedule *s, int runs)
{
    enum { AROUND = 8 << 10, ROW_BYTES = 256, DETAIL_BYTES = 384, PLAIN_BYTES = 112, UPDATE_BYTES = 96 };
    const int64_t computes = compute_count(s);
    int64_t updates = 0;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) updates += s->rank[r].action[i].kind == ACT_UPDATE;
    return AROUND + runs * (s->ranks * ROW_BYTES + updates * UPDATE_BYTES +
                            computes * (computes <= DETAIL ? DETAIL_BYTES : PLAIN_BYTES));
}
