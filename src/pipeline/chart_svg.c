/*
 * Pictures of schedules: chart_svg and chart_svg_runs of chart.h. From back to front: a hatched track a rank, on
 * which idle time shows; computes; unit numbers. Pairs that overlap share their time, one above the other.
 *
 *   colours  two sets, chosen by the reader's browser (prefers-color-scheme); kinds also differ in lightness
 *   size     the shortest compute is CELL wide, or a little less. A picture that is then wider than WIDTH_MAX, where
 *            a page would make its text too small, is drawn in two parts, one below the other. They hold all, or the
 *            beginning and the end alone.
 */
#include <math.h>
#include <string.h>

#include "base/svg.h"
#include "pipeline/chart.h"

enum {
    LEFT = 64,
    RIGHT = 24,
    TOP = 92,
    BOTTOM = 36,
    ROW = 30,
    BAR = 24,
    CAPTION = 30, /* above each of several runs */
    CELL = 22,
    CELL_LEAST = 19, /* a number of two digits has room */
    WIDTH_MIN = 640,
    WIDTH_MAX = 1040,
    PARTS = 2,
    PART_GAP = 30, /* between two parts: the axis of the upper one */
    SHADES = 4,
    UNEVEN = 4, /* a compute shorter than the mean over this may be narrower than CELL */
    DETAIL = 6000
};

typedef struct {
    const Schedule *s;
    const ChartRuns *runs;
    const Simulation *sim; /* the run that is drawn, */
    double top;            /* and where */
    Svg svg;               /* x: time, of the part that is drawn */
    int parts;
    double longest; /* time of the longest run */
    double shown;   /* time that a part shows */
    bool detail, captions;
} Picture;

static const char *const kind_class = "fbiw"; /* by ActionKind */

/* Number in SHADES of an action: by its chunk, from the first to the last, or by its replica. */
static int shade_of(const Schedule *s, const Action *a)
{
    if (s->replicas > 1) return a->replica * 2;
    return s->chunks <= SHADES ? schedule_chunk_of(s, a->stage)
                               : schedule_chunk_of(s, a->stage) * (SHADES - 1) / (s->chunks - 1);
}

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
    double least = INFINITY, longest = 0, sum = 0;
    for (int r = 0; r < p->s->ranks; r++)
        for (int i = 0; i < p->s->rank[r].count; i++) {
            const double time = plan->span[r][i].end - plan->span[r][i].start;
            if (!(time > 0)) continue;
            least = fmin(least, time);
            sum += time;
        }
    least = fmax(least, sum / (double)compute_count(p->s) / UNEVEN);
    for (int i = 0; i < p->runs->runs; i++) longest = fmax(longest, p->runs->run[i]->makespan);
    const double wide = longest / least * CELL, inner = fmin(fmax(wide, WIDTH_MIN), WIDTH_MAX);
    p->parts = wide * CELL_LEAST / CELL > WIDTH_MAX ? PARTS : 1;
    p->detail = p->parts > 1 || compute_count(p->s) <= DETAIL;
    p->longest = longest;
    p->shown = p->parts == 1 ? longest : fmin(longest / PARTS, inner / CELL * least);
    p->svg = svg_frame(p->svg.out, LEFT, 0, LEFT + inner, 0);
    p->svg.times = true;
}

static double part_height(const Picture *p) { return p->runs->runs * run_height(p); }

/* The picture's axes become those of a part. (Their lines stand out of the rows.) */
static void begin_part(Picture *p, int part)
{
    const double top = TOP + part * (part_height(p) + PART_GAP);
    p->svg.top = top - 6;
    p->svg.bottom = top + part_height(p) + 4;
    p->svg.first = part ? p->longest - p->shown : 0;
    p->svg.last = p->svg.first + p->shown;
}

/* ---- what stands around the rows ---- */

static void put_title(const Picture *p)
{
    const Schedule *s = p->s;
    if (p->runs->title) fprintf(p->svg.out, "%s; ", p->runs->title);
    fprintf(p->svg.out, "%s: %d rank%s, %d micro-batches", s->name, s->ranks, s->ranks == 1 ? "" : "s",
            s->microbatches);
    if (s->slices > 1) fprintf(p->svg.out, " in %d slices", s->slices);
    if (s->batches > 1) fprintf(p->svg.out, " in each of %d batches", s->batches);
    if (s->chunks > 1) fprintf(p->svg.out, ", %d chunks a rank", s->chunks);
    if (s->replicas > 1) fprintf(p->svg.out, ", two directions");
}

static void put_figures(const Picture *p)
{
    const Simulation *m = p->runs->run[0];
    if (p->runs->figures) {
        fputs(p->runs->figures, p->svg.out);
        return;
    }
    fprintf(p->svg.out, "time %g, of which %g idle: %.1f %% of the time, %.1f %% on top of the work", m->makespan,
            m->bubble, 100 * m->bubble / m->makespan, 100 * m->bubble / m->ideal);
}

static void put_style(FILE *out)
{
    fprintf(out, "<style>\n.n{font-size:11px;text-anchor:middle;pointer-events:none}.idle{fill:url(#h)}"
                 ".hatch{stroke-width:1.5}.step{stroke-width:2}\n");
    svg_rules(out, ".f0{fill:#2f6fd0|#5b93ea}.f1{fill:#5f95e2|#3f78d0}.f2{fill:#8fb7ee|#2c5aa3}"
                   ".f3{fill:#bfd7f8|#1f4276}\n"
                   ".b0{fill:#c25e14|#ee9a55}.b1{fill:#dd8038|#d07a34}.b2{fill:#eda56b|#a35a20}"
                   ".b3{fill:#f7cba6|#774016}\n"
                   ".i0{fill:#94700a|#e3c25a}.i1{fill:#b58d1f|#c29f33}.i2{fill:#dcbb5c|#86690f}"
                   ".i3{fill:#f0dfa3|#624c08}\n"
                   ".w0{fill:#2b7a55|#63bd90}.w1{fill:#4f9d77|#459c70}.w2{fill:#82bf9f|#317852}"
                   ".w3{fill:#b5dcc6|#235a3d}\n"
                   ".n0,.n1{fill:#ffffff|#0d1117}.n2,.n3{fill:#1f2328|#ffffff}.step{stroke:#8250df|#be8fff}");
    fprintf(out, "</style>\n<defs><pattern id=\"h\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" "
                 "patternTransform=\"rotate(45)\"><rect class=\"soft\" width=\"7\" height=\"7\"/>"
                 "<path class=\"grid hatch\" d=\"M0 0v7\"/></pattern></defs>\n");
}

static void put_head(const Picture *p)
{
    FILE *out = p->svg.out;
    const double width = p->svg.right + RIGHT;
    const double height = TOP + p->parts * (part_height(p) + PART_GAP) - PART_GAP + 4 + BOTTOM;
    svg_open(out, width, height);
    put_title(p);
    fprintf(out, "</title>\n<desc id=\"d\">");
    put_figures(p);
    fprintf(out, "; a row for each rank, time from left to right.</desc>\n");
    svg_ground(out, width, height);
    put_style(out);
    fprintf(out, "<text class=\"name\" x=\"%d\" y=\"24\">", LEFT);
    put_title(p);
    fprintf(out, "</text>\n<text x=\"%d\" y=\"44\">", LEFT);
    put_figures(p);
    if (p->parts * p->shown < 0.999 * p->longest)
        fprintf(out, "; shown are the first and the last %.3g%s%s", p->shown, p->runs->unit ? " " : "",
                p->runs->unit ? p->runs->unit : "");
    fprintf(out, "</text>\n");
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
        fprintf(p->svg.out, "<rect class=\"%c%d\" x=\"%d\" y=\"58\" width=\"14\" height=\"14\" rx=\"2\"/>", class,
                p->s->replicas > 1 ? 2 * i : i, x);
    fprintf(p->svg.out, "<text x=\"%d\" y=\"70\">%s</text>\n", x + 4, name);
    return x + 22 + 7 * (int)strlen(name);
}

static void put_legend(const Picture *p)
{
    static const char *const names[] = { "forward", "backward", "dgrad", "wgrad" };
    int x = LEFT;
    for (int kind = ACT_F; kind <= ACT_W; kind++)
        if (has_kind(p->s, kind)) x = put_swatches(p, x, kind_class[kind], names[kind]);
    fprintf(p->svg.out,
            "<rect class=\"idle\" x=\"%d\" y=\"58\" width=\"14\" height=\"14\" rx=\"2\"/><text x=\"%d\" "
            "y=\"70\">idle</text>\n",
            x, x + 20);
    x += 60;
    const char *shades = p->s->replicas > 1 ? "shade: direction" : "shade: chunk";
    if (p->s->replicas > 1 || p->s->chunks > 1)
        fprintf(p->svg.out, "<text class=\"dim\" x=\"%d\" y=\"70\">%s</text>\n", x, shades);
}

static void put_axis(const Picture *p)
{
    fprintf(p->svg.out, "<g class=\"dim\">\n");
    svg_x_axis(&p->svg, 10, NULL);
    if (p->runs->unit)
        fprintf(p->svg.out, "<text x=\"%d\" y=\"%.0f\" class=\"e\">%s</text>\n", LEFT - 8, p->svg.bottom + 17,
                p->runs->unit);
    fprintf(p->svg.out, "</g>\n");
}

/* ---- rows ---- */

static void put_compute(const Picture *p, int rank, int i)
{
    FILE *out = p->svg.out;
    const Action *a = &p->s->rank[rank].action[i];
    const Span t = p->sim->span[rank][i];
    const Span *other = p->sim->span[rank];
    const bool first = a->flags & ACTION_PAIR && other[i + 1].start == t.start;
    const bool second = i > 0 && a[-1].flags & ACTION_PAIR && other[i - 1].start == t.start;
    if (t.end <= p->svg.first || t.start >= p->svg.last) return;
    const double x = svg_x(&p->svg, fmax(t.start, p->svg.first)),
                 y = p->top + (double)rank * ROW + (second ? BAR / 2.0 : 0);
    const double whole = svg_x(&p->svg, fmin(t.end, p->svg.last)) - x, width = whole > 6 ? whole - 1 : whole;
    const double high = first || second ? BAR / 2.0 : BAR;
    const int shade = shade_of(p->s, a);
    char unit[CHART_UNIT_BYTES];
    if (!p->detail) {
        fprintf(out, "<path class=\"%c%d\" d=\"M%.2f %.0fh%.2fv%.0fh-%.2fz\"/>\n", kind_class[a->kind], shade, x, y,
                width, high, width);
        return;
    }
    fprintf(out,
            "<rect class=\"%c%d\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"%.0f\" rx=\"2\"><title>%s of "
            "unit "
            "%s, stage %d: %g to %g</title></rect>",
            kind_class[a->kind], shade, x, y, width, high, action_name(a->kind), chart_unit(p->s, a->microbatch, unit),
            a->stage, t.start, t.end);
    if (width > 5 + 6.5 * (double)strlen(unit))
        fprintf(out, "<text class=\"n n%d\" x=\"%.1f\" y=\"%.1f\">%s</text>", shade, x + width / 2, y + high / 2 + 4,
                unit);
    fputc('\n', out);
}

static void put_row(const Picture *p, int rank)
{
    const ActionList *list = &p->s->rank[rank];
    const double y = p->top + (double)rank * ROW;
    double now = 0;
    fprintf(p->svg.out, "<text x=\"%d\" y=\"%.0f\" class=\"e\">%s %d</text>\n", LEFT - 8, y + BAR / 2.0 + 4,
            p->captions ? "pp" : "rank", rank);
    const double end = fmin(p->sim->makespan, p->svg.last);
    if (end > p->svg.first)
        fprintf(p->svg.out, "<rect class=\"idle\" x=\"%d\" y=\"%.0f\" width=\"%.2f\" height=\"%d\" rx=\"2\"/>\n", LEFT,
                y, svg_x(&p->svg, end) - LEFT, BAR);
    for (int i = 0; i < list->count; i++) {
        if (action_is_compute(list->action[i].kind)) {
            put_compute(p, rank, i);
            now = p->sim->span[rank][i].end;
        } else if (list->action[i].kind == ACT_UPDATE && p->s->versions != VERSIONS_STEP && now > p->svg.first &&
                   now <= p->svg.last) {
            fprintf(p->svg.out, "<path class=\"step\" d=\"M%.2f %.0fv%d\"><title>update</title></path>\n",
                    svg_x(&p->svg, now), y - 2, BAR + 4);
        }
    }
}

static void put_run(Picture *p, int run)
{
    p->sim = p->runs->run[run];
    p->top = p->svg.top + 6 + run * run_height(p) + (p->captions ? CAPTION : 0);
    if (p->captions)
        fprintf(p->svg.out, "<text class=\"name\" x=\"%d\" y=\"%.0f\">%s</text>\n", LEFT, p->top - 9,
                p->runs->name[run]);
    for (int r = 0; r < p->s->ranks; r++) put_row(p, r);
}

void chart_svg_runs(const Schedule *s, const ChartRuns *runs, FILE *out)
{
    Picture p = { .s = s, .runs = runs, .svg.out = out, .captions = runs->name[0] };
    measure(&p);
    put_head(&p);
    put_legend(&p);
    for (int part = 0; part < p.parts; part++) {
        begin_part(&p, part);
        put_axis(&p);
        for (int i = 0; i < runs->runs; i++) put_run(&p, i);
    }
    fprintf(out, "</svg>\n");
}

void chart_svg(const Schedule *s, const Simulation *sim, FILE *out)
{
    chart_svg_runs(s, &(ChartRuns){ .run = { sim }, .runs = 1 }, out);
}

int64_t chart_svg_bytes(const Schedule *s, int runs)
{
    enum { AROUND = 8 << 10, ROW_BYTES = 256, DETAIL_BYTES = 384, UPDATE_BYTES = 96 };
    const int64_t computes = compute_count(s);
    int64_t updates = 0;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) updates += s->rank[r].action[i].kind == ACT_UPDATE;
    /* (a compute that two parts share is drawn twice: at most one of a rank) */
    return AROUND + PARTS * runs * s->ranks * (ROW_BYTES + DETAIL_BYTES) +
           runs * (s->ranks * ROW_BYTES + updates * UPDATE_BYTES + computes * DETAIL_BYTES);
}
