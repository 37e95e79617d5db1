/*
 * One picture of a report: a line a run. Lines differ in colour and dashes, validation losses also in the shape of
 * their marks; a description for screen readers names every run's last value.
 *
 * The y axis covers the smoothed values and, where they are drawn behind them, those of the steps but spikes far above;
 * the first steps of a loss, from where it falls steeply, do not count, or all the rest would be a flat line. Of a run
 * that has no others its last value counts: each run is to be seen.
 */
#include <math.h>
#include <string.h>

#include "base/units.h"
#include "record/report_pictures.h"

enum { WIDTH = 560, HEIGHT = 300, SHORT_LINE = 12 };
static const double STEEP_PART = 0.05; /* of the x axis */

typedef struct {
    const ReportChart *c;
    const History *runs;
    int run_count;
    Svg svg;
    SvgPoint points[CURVE_POINTS]; /* of the run that was gathered last */
    int count;
} Picture;

/* ---- what runs look like ---- */

const char *report_name(const History *runs, int count, int run)
{
    for (int i = 0; i < count; i++)
        if (i != run && strcmp(runs[i].name, runs[run].name) == 0) return runs[run].dir;
    return runs[run].name;
}

/* 12 pairs of colour and dashes, then the 12 others */
int report_mark(int run) { return (run + run / 12) % 4; }

void report_look(FILE *out, int run) { fprintf(out, "c%d k%d", run % 6, report_mark(run)); }

/* ---- what is shown ---- */

static double x_of(const Picture *p, int64_t step, int64_t tokens) { return (double)(p->c->by_tokens ? tokens : step); }

/* The points of a run: smoothed, or as they are (`raw`), as those are always that somebody set. */
static void gather(Picture *p, int run, bool raw)
{
    const Curve *c = &p->runs[run].curve[p->c->curve];
    p->count = p->c->set ? 0 : curve_line(c, p->c->by_tokens, !raw && !p->c->is_set, p->points);
    for (int i = 0; p->c->set && i < c->dot_count; i++) {
        const CurveDot *d = &c->dots[i];
        if (!strcmp(c->name[d->series], p->c->set))
            p->points[p->count++] = (SvgPoint){ x_of(p, d->step, d->tokens), d->loss };
    }
}

/* The last point that has a value; -1: none has. */
static int last_value(const Picture *p)
{
    int last = p->count - 1;
    while (last >= 0 && !isfinite(p->points[last].y)) last--;
    return last;
}

/*
 * Axes hold the runs' values from from_x on, or the last one of a run that ends before that; those above `most` count
 * as it.
 */
static void widen(Picture *p, bool raw, double from_x, double most)
{
    for (int i = 0; i < p->run_count; i++) {
        gather(p, i, raw);
        const int last = last_value(p);
        int first = 0;
        while (first < last && p->points[first].x < from_x) first++;
        for (int k = first; k <= last; k++)
            if (p->points[k].y > most) p->points[k].y = most; /* (NaN: a gap still) */
        svg_fit(&p->svg, p->points + first, last + 1 - first);
    }
}

/* Are the steps' own values drawn, too? */
static bool shows_raw(const Picture *p) { return !p->c->set && !p->c->is_set && p->run_count <= 4; }

/* False if there is nothing to show. */
static bool find_axes(Picture *p)
{
    Svg *s = &p->svg;
    for (int i = 0; i < p->run_count; i++) {
        gather(p, i, false);
        if (p->count) s->last = fmax(s->last, p->points[p->count - 1].x);
    }
    const bool steep = p->c->curve == HISTORY_LOSS && !p->c->set;
    const double from_x = steep ? STEEP_PART * s->last : 0;
    widen(p, false, from_x, INFINITY);
    if (!(s->low <= s->high) || !(s->last > 0)) return false;
    if (shows_raw(p)) { /* but for spikes */
        const double low = s->low, high = s->high;
        widen(p, true, from_x, high);
        widen(p, true, from_x, curve_most(low, high, s->low));
    }
    if (p->c->from_zero) s->low = fmin(s->low, 0);
    const double margin = fmax(0.05 * (s->high - s->low), 1e-3 * fabs(s->high));
    s->high += margin > 0 ? margin : 1e-3;
    if (!p->c->from_zero || s->low < 0) s->low -= margin > 0 ? margin : 1e-3;
    return isfinite(s->high - s->low);
}

/* ---- drawing ---- */

/* The beginning of a path that looks as the run does. */
static void open_path(const Picture *p, const char *class, int run)
{
    fprintf(p->svg.out, "<path class=\"%s ", class);
    report_look(p->svg.out, run);
    fprintf(p->svg.out, "\" ");
}

static void put_path(const Picture *p, const char *class, int run)
{
    open_path(p, class, run);
    fprintf(p->svg.out, "data-run=\"%d\" d=\"", run);
    svg_line(&p->svg, p->points, p->count);
    fprintf(p->svg.out, "\"/>\n");
}

/* On the points from the first on. */
static void put_marks(const Picture *p, int first, int run)
{
    open_path(p, "mark", run);
    fprintf(p->svg.out, "d=\"");
    for (const SvgPoint *q = p->points + first; q < p->points + p->count; q++)
        if (isfinite(q->y))
            fprintf(p->svg.out, "M%.2f %.2f%s", svg_x(&p->svg, q->x), svg_y(&p->svg, q->y), svg_mark(report_mark(run)));
    fprintf(p->svg.out, "\"/>\n");
}

/* Is the line too short to be seen, or to tell whose it is? */
static bool is_short(const Picture *p, int last)
{
    return svg_x(&p->svg, p->points[last].x) - svg_x(&p->svg, p->points[0].x) <= SHORT_LINE;
}

static void put_skipped(const Picture *p, int run)
{
    const Curve *c = &p->runs[run].curve[HISTORY_LOSS];
    const int64_t total = curve_skipped(c);
    if (!total) return;
    open_path(p, "skip", run);
    fprintf(p->svg.out, "d=\"");
    for (const CurvePoint *q = c->points; q < c->points + c->count; q++)
        if (q->skipped) fprintf(p->svg.out, "M%.1f %gv-9", svg_x(&p->svg, x_of(p, q->step, q->tokens)), p->svg.bottom);
    svg_text(p->svg.out, "\"><title>", report_name(p->runs, p->run_count, run), ": ");
    fprintf(p->svg.out, "%lld skipped step%s</title></path>\n", (long long)total, total == 1 ? "" : "s");
}

static void put_changes(const Picture *p, int run)
{
    const History *h = &p->runs[run];
    for (int i = 0; i < h->changes; i++) {
        const HistoryChange *c = &h->change[i];
        open_path(p, "change", run);
        fprintf(p->svg.out, "d=\"M%.1f %gV%g", svg_x(&p->svg, x_of(p, c->step, c->tokens)), p->svg.top, p->svg.bottom);
        svg_text(p->svg.out, "\"><title>", report_name(p->runs, p->run_count, run), ": ");
        svg_text(p->svg.out, "", c->key, " from ");
        svg_text(p->svg.out, "", c->was, " to ");
        svg_text(p->svg.out, "", c->is, "</title></path>\n");
    }
}

static void put_run(Picture *p, int run)
{
    if (shows_raw(p)) {
        gather(p, run, true);
        put_path(p, "raw", run);
    }
    gather(p, run, false);
    put_path(p, "line", run);
    const int last = last_value(p);
    if (p->c->set) put_marks(p, 0, run);
    else if (last >= 0 && is_short(p, last)) put_marks(p, last, run);
    if (p->c->mark_skipped) put_skipped(p, run);
    put_changes(p, run);
}

static void put_description(Picture *p)
{
    FILE *out = p->svg.out;
    char value[UNITS_BYTES], at[UNITS_BYTES];
    for (int i = 0; i < p->run_count; i++) {
        gather(p, i, false);
        const int last = last_value(p);
        svg_text(out, "", report_name(p->runs, p->run_count, i), last < 0 ? ": no value. " : ": ");
        if (last >= 0) {
            const double y = p->points[last].y;
            if (fabs(y) < 1e4) snprintf(value, sizeof value, "%.5g", y);
            fprintf(out, "%s at %s %s. ", fabs(y) < 1e4 ? value : units_count(value, y),
                    p->c->by_tokens ? "token" : "step", units_count(at, p->points[last].x));
        }
    }
}

static void put_title(const ReportChart *c, FILE *out)
{
    fprintf(out, "%s", c->title);
    if (c->set && *c->set) svg_text(out, " on ", c->set, "");
    fprintf(out, " by %s", c->by_tokens ? "tokens" : "step");
}

void report_chart(const ReportChart *c, const History *runs, int count, int number, FILE *out)
{
    Picture p = { .c = c, .runs = runs, .run_count = count, .svg = svg_frame(out, 62, 12, WIDTH - 14, HEIGHT - 46) };
    Svg *s = &p.svg;
    if (!find_axes(&p)) return;
    fprintf(out, "<figure><figcaption>");
    put_title(c, out);
    fprintf(out,
            "</figcaption>\n<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-labelledby=\"t%d d%d\" "
            "data-box=\"%g %g %g %g\" data-axes=\"%.9g %.9g %.9g\">\n<title id=\"t%d\">",
            WIDTH, HEIGHT, number, number, s->left, s->top, s->right, s->bottom, s->last, s->low, s->high, number);
    put_title(c, out);
    fprintf(out, "</title>\n<desc id=\"d%d\">", number);
    put_description(&p);
    fprintf(out, "</desc>\n");
    svg_y_axis(s, 7);
    svg_x_axis(s, 5, c->by_tokens ? "tokens" : "step");
    svg_clip(s, number, 6);
    for (int i = 0; i < count; i++) put_run(&p, i);
    fprintf(out, "</g>\n<path class=\"cursor\" d=\"\"/>\n</svg>\n<p class=\"read\" "
                 "aria-hidden=\"true\"></p></figure>\n");
}
