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
#include "record/axis.h"
#include "record/report_look.h"
#include "record/report_pictures.h"

enum {
    WIDTH = 560,
    HEIGHT = 300,
    LEFT = 62,
    RIGHT = 14,
    TOP = 12,
    BOTTOM = 46,
    SHORT_LINE = 12,
    FAR_OUTSIDE = 1000000
};
static const double STEEP_PART = 0.05; /* of the x axis */

typedef struct {
    double x, y; /* y NaN: a gap */
} Point;

typedef struct {
    const ReportChart *c;
    FILE *out;
    int number;
    double last_x, low, high; /* axes */
    Point points[CURVE_POINTS];
    int count;
} Picture;

/* ---- what is shown ---- */

static bool set_is(const Curve *c, int series, const char *name) { return !strcmp(c->name[series], name); }

/* The points of a run: smoothed, or as they are (`raw`), as those are always that somebody set. */
static void gather(Picture *p, const History *h, bool raw)
{
    const Curve *c = &h->curve[p->c->curve];
    p->count = 0;
    for (int i = 0; p->c->set && i < c->dot_count; i++) {
        const CurveDot *d = &c->dots[i];
        if (set_is(c, d->series, p->c->set))
            p->points[p->count++] = (Point){ (double)(p->c->by_tokens ? d->tokens : d->step), d->loss };
    }
    for (int i = 0; !p->c->set && i < c->count; i++) {
        const CurvePoint *s = &c->points[i];
        double y = s->count ? s->sum / (double)s->count : NAN;
        if (!raw && !p->c->is_set && !curve_smooth(c, i, &y)) y = NAN;
        p->points[p->count++] = (Point){ (double)(p->c->by_tokens ? s->tokens : s->step), y };
    }
}

/* The last point that has a value; -1: none has. */
static int last_value(const Picture *p)
{
    int last = p->count - 1;
    while (last >= 0 && !isfinite(p->points[last].y)) last--;
    return last;
}

/* For the values from from_x on, or for the last one of a run that ends before that. */
static void widen(Picture *p, double from_x)
{
    const int last = last_value(p);
    if (last < 0) return;
    if (p->points[last].x < from_x) from_x = p->points[last].x;
    for (int i = 0; i < p->count; i++) {
        const Point *q = &p->points[i];
        if (!isfinite(q->y) || q->x < from_x) continue;
        p->low = fmin(p->low, q->y);
        p->high = fmax(p->high, q->y);
    }
}

/* Are the steps' own values drawn, too? */
static bool shows_raw(const ReportChart *c, int count) { return !c->set && !c->is_set && count <= 4; }

/* For the values of the steps but spikes. */
static void widen_raw(Picture *p, const History *runs, int count, double from_x)
{
    const double low = p->low, high = p->high;
    for (int pass = 0; pass < 2; pass++) {
        const double most = pass ? axis_most(low, high, p->low) : high;
        for (int i = 0; i < count; i++) {
            gather(p, &runs[i], true);
            for (int k = 0; k < p->count; k++)
                if (p->points[k].y > most) p->points[k].y = most; /* (NaN: a gap still) */
            widen(p, from_x);
        }
    }
}

/* False if there is nothing to show. */
static bool find_axes(Picture *p, const History *runs, int count)
{
    p->low = INFINITY, p->high = -INFINITY, p->last_x = 0;
    for (int i = 0; i < count; i++) {
        gather(p, &runs[i], false);
        if (p->count) p->last_x = fmax(p->last_x, p->points[p->count - 1].x);
    }
    const bool steep = p->c->curve == HISTORY_LOSS && !p->c->set;
    const double from_x = steep ? STEEP_PART * p->last_x : 0;
    for (int i = 0; i < count; i++) {
        gather(p, &runs[i], false);
        widen(p, from_x);
    }
    if (!(p->low <= p->high) || !(p->last_x > 0)) return false;
    if (shows_raw(p->c, count)) widen_raw(p, runs, count, from_x);
    if (p->c->from_zero) p->low = fmin(p->low, 0);
    const double margin = fmax(0.05 * (p->high - p->low), 1e-3 * fabs(p->high));
    p->high += margin > 0 ? margin : 1e-3;
    if (!p->c->from_zero || p->low < 0) p->low -= margin > 0 ? margin : 1e-3;
    return isfinite(p->high - p->low);
}

static double x_of(const Picture *p, double x) { return LEFT + (WIDTH - LEFT - RIGHT) * x / p->last_x; }

/* Far outside values are pulled in: the clip hides them, and the page's script knows 1e6. */
static double y_of(const Picture *p, double y)
{
    const double at = TOP + (HEIGHT - TOP - BOTTOM) * (p->high - y) / (p->high - p->low);
    return fmin(fmax(at, -FAR_OUTSIDE), FAR_OUTSIDE);
}

/* ---- drawing ---- */

static void put_axes(const Picture *p)
{
    char label[AXIS_BYTES];
    double d = axis_distance(p->high - p->low, 7);
    for (double k = ceil(p->low / d); k * d <= p->high; k++)
        fprintf(p->out,
                "<path class=\"grid\" d=\"M%d %.1fH%d\"/><text x=\"%d\" y=\"%.1f\" class=\"e\">%s</text>\n",
                LEFT, y_of(p, k * d), WIDTH - RIGHT, LEFT - 7, y_of(p, k * d) + 4,
                axis_label(label, k * d, d));
    d = fmax(1, axis_distance(p->last_x, 5));
    for (double k = 0; k * d <= p->last_x * (1 + 1e-9); k++)
        fprintf(p->out,
                "<path class=\"grid\" d=\"M%.1f %dV%d\"/><text x=\"%.1f\" y=\"%d\" class=\"m\">%s</text>\n",
                x_of(p, k * d), TOP, HEIGHT - BOTTOM, x_of(p, k * d), HEIGHT - BOTTOM + 17,
                axis_label(label, k * d, d));
    fprintf(p->out, "<text x=\"%d\" y=\"%d\" class=\"m\">%s</text>\n", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6,
            p->c->by_tokens ? "tokens" : "step");
}

static void put_path(const Picture *p, const char *class, int run)
{
    bool pen_down = false;
    fprintf(p->out, "<path class=\"%s ", class);
    report_look(p->out, run);
    fprintf(p->out, "\" data-run=\"%d\" d=\"", run);
    for (int i = 0; i < p->count; i++) {
        const Point *q = &p->points[i];
        const bool have = isfinite(q->y);
        if (have && !pen_down) /* a lone point becomes visible by the round line cap */
            fprintf(p->out, "M%.2f %.2fh0L", x_of(p, q->x), y_of(p, q->y));
        if (have) fprintf(p->out, "%s%.2f %.2f", pen_down ? " " : "", x_of(p, q->x), y_of(p, q->y));
        pen_down = have;
    }
    fprintf(p->out, "\"/>\n");
}

static void put_marks(const Picture *p, int run)
{
    fprintf(p->out, "<path class=\"mark ");
    report_look(p->out, run);
    fprintf(p->out, "\" d=\"");
    for (int i = 0; i < p->count; i++)
        if (isfinite(p->points[i].y))
            fprintf(p->out, "M%.2f %.2f%s", x_of(p, p->points[i].x), y_of(p, p->points[i].y),
                    axis_mark(report_mark(run)));
    fprintf(p->out, "\"/>\n");
}

/* A line that is too short to be seen, or to tell whose it is, ends in its mark. */
static void put_short(const Picture *p, int run)
{
    const int last = last_value(p);
    if (last < 0 || x_of(p, p->points[last].x) - x_of(p, p->points[0].x) > SHORT_LINE) return;
    fprintf(p->out, "<path class=\"mark ");
    report_look(p->out, run);
    fprintf(p->out, "\" d=\"M%.2f %.2f%s\"/>\n", x_of(p, p->points[last].x), y_of(p, p->points[last].y),
            axis_mark(report_mark(run)));
}

static void put_skipped(const Picture *p, const History *runs, int count, int run)
{
    const Curve *c = &runs[run].curve[HISTORY_LOSS];
    const int64_t total = curve_skipped(c);
    if (!total) return;
    fprintf(p->out, "<path class=\"skip ");
    report_look(p->out, run);
    fprintf(p->out, "\" d=\"");
    for (int i = 0; i < c->count; i++)
        if (c->points[i].skipped)
            fprintf(p->out, "M%.1f %dv-9",
                    x_of(p, (double)(p->c->by_tokens ? c->points[i].tokens : c->points[i].step)),
                    HEIGHT - BOTTOM);
    fprintf(p->out, "\"><title>");
    report_text(p->out, report_name(runs, count, run));
    fprintf(p->out, ": %lld skipped step%s</title></path>\n", (long long)total, total == 1 ? "" : "s");
}

static void put_run(Picture *p, const History *runs, int count, int run, bool raw)
{
    const History *h = &runs[run];
    if (raw) {
        gather(p, h, true);
        put_path(p, "raw", run);
    }
    gather(p, h, false);
    put_path(p, "line", run);
    if (p->c->set) put_marks(p, run);
    else put_short(p, run);
    if (p->c->mark_skipped) put_skipped(p, runs, count, run);
}

static void put_description(Picture *p, const History *runs, int count)
{
    char value[UNITS_BYTES], at[UNITS_BYTES];
    fprintf(p->out, "<desc id=\"d%d\">", p->number);
    for (int i = 0; i < count; i++) {
        gather(p, &runs[i], false);
        const int last = last_value(p);
        report_text(p->out, report_name(runs, count, i));
        if (last < 0) fprintf(p->out, ": no value. ");
        else {
            const double y = p->points[last].y;
            if (fabs(y) < 1e4) snprintf(value, sizeof value, "%.5g", y);
            fprintf(p->out, ": %s at %s %s. ", fabs(y) < 1e4 ? value : units_count(value, y),
                    p->c->by_tokens ? "token" : "step", units_count(at, p->points[last].x));
        }
    }
    fprintf(p->out, "</desc>\n");
}

static void put_title(const ReportChart *c, FILE *out)
{
    fprintf(out, "%s", c->title);
    if (c->set && *c->set) {
        fprintf(out, " on ");
        report_text(out, c->set);
    }
    fprintf(out, " by %s", c->by_tokens ? "tokens" : "step");
}

void report_chart(const ReportChart *c, const History *runs, int count, int number, FILE *out)
{
    Picture p = { .c = c, .out = out, .number = number };
    if (!find_axes(&p, runs, count)) return;
    fprintf(out, "<figure><figcaption>");
    put_title(c, out);
    fprintf(out,
            "</figcaption>\n<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-labelledby=\"t%d d%d\" "
            "data-box=\"%d %d %d "
            "%d\" data-axes=\"%.9g %.9g %.9g\">\n<title id=\"t%d\">",
            WIDTH, HEIGHT, number, number, LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, p.last_x, p.low, p.high,
            number);
    put_title(c, out);
    fprintf(out, "</title>\n");
    put_description(&p, runs, count);
    put_axes(&p);
    fprintf(out,
            "<clipPath id=\"k%d\"><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/></clipPath>\n"
            "<g clip-path=\"url(#k%d)\">\n",
            number, LEFT, TOP, WIDTH - LEFT - RIGHT + 6, HEIGHT - TOP - BOTTOM, number);
    for (int i = 0; i < count; i++) put_run(&p, runs, count, i, shows_raw(c, count));
    fprintf(out, "</g>\n<path class=\"cursor\" d=\"\"/>\n</svg>\n<p class=\"read\" "
                 "aria-hidden=\"true\"></p></figure>\n");
}
