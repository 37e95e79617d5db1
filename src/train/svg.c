/*
 * The picture, from back to front: grid with round ticks, the range of the steps behind each point (faint),
 * their means (thin), the smoothed curve (strong), skipped steps as ticks on the lower edge, validation dots.
 *
 *   y axis   linear, from the smallest to the largest smoothed or validation loss; single spikes beyond it
 *            are clipped, or one bad step would flatten the whole curve
 *   colours  two sets, chosen by the reader's browser (prefers-color-scheme)
 *
 * Smoothing is a centred mean over points/40 neighbours on each side, so that the curve is not late. At the
 * beginning, where the loss falls so steeply that means lie above it, they are fewer.
 */
#include "train/svg.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"

enum {
    WIDTH = 900,
    HEIGHT = 480,
    LEFT = 72,
    RIGHT = 24,
    TOP = 48,
    BOTTOM = 56,
    COLORS = 4,
    TEXT_BYTES = 120
};

typedef struct {
    char *buf;
    int64_t used;
    const SvgCurve *c;
    double last_step, low, high; /* axes */
} Picture;

__attribute__((format(printf, 2, 3))) static void put(Picture *p, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(p->buf + p->used, (size_t)(SVG_BYTES - p->used), fmt, args);
    va_end(args);
    ASSERT(n >= 0 && p->used + n < SVG_BYTES);
    p->used += n;
}

/* Text between tags: the characters that mean something in XML, and control characters, which it forbids.
 * Long texts are cut between two characters. */
static void put_text(Picture *p, const char *text)
{
    for (int n = 0; *text && (n < TEXT_BYTES || (*text & 0xC0) == 0x80); text++, n++) {
        if (*text == '<') put(p, "&lt;");
        else if (*text == '>') put(p, "&gt;");
        else if (*text == '&') put(p, "&amp;");
        else if ((unsigned char)*text < 0x20 || *text == 0x7F) put(p, " ");
        else put(p, "%c", *text);
    }
}

static double x_of(const Picture *p, double step)
{
    return LEFT + (WIDTH - LEFT - RIGHT) * step / p->last_step;
}

/* Far outside values are pulled in: the clip hides them, and short numbers keep the file small. */
static double y_of(const Picture *p, double loss)
{
    double y = TOP + (HEIGHT - TOP - BOTTOM) * (p->high - loss) / (p->high - p->low);
    return fmin(fmax(y, -HEIGHT), 2 * HEIGHT);
}

static bool smoothed(const SvgCurve *c, int i, double *out)
{
    int reach = c->count / 40 > 1 ? c->count / 40 : 1;
    if (reach > i / 4) reach = i / 4;
    double sum = 0;
    int64_t n = 0;
    for (int k = i - reach; k <= i + reach && k < c->count; k++) {
        sum += c->points[k].sum;
        n += c->points[k].count;
    }
    if (n > 0) *out = sum / (double)n;
    return n > 0;
}

/* False if there is nothing to draw. */
static bool find_axes(Picture *p)
{
    const SvgCurve *c = p->c;
    double low = INFINITY, high = -INFINITY, y;
    p->last_step = 1;
    for (int i = 0; i < c->count; i++) {
        p->last_step = fmax(p->last_step, (double)c->points[i].step);
        if (!smoothed(c, i, &y)) continue;
        low = fmin(low, y);
        high = fmax(high, y);
    }
    for (int i = 0; i < c->dot_count; i++) {
        p->last_step = fmax(p->last_step, (double)c->dots[i].step);
        if (!isfinite(c->dots[i].loss)) continue;
        low = fmin(low, c->dots[i].loss);
        high = fmax(high, c->dots[i].loss);
    }
    if (!(low <= high)) return false;
    double margin = fmax(0.05 * (high - low), 1e-3 * fmax(1, fabs(high)));
    p->low = low - margin;
    p->high = high + margin;
    return true;
}

/* A round distance (1, 2 or 5 times a power of ten) that gives about `wanted` ticks. */
static double tick_distance(double range, int wanted)
{
    double d = 1, least = range / wanted;
    while (d < least) d *= 10;
    while (d / 10 >= least) d /= 10;
    return d / 5 >= least ? d / 5 : d / 2 >= least ? d / 2 : d;
}

static void put_y_axis(Picture *p)
{
    double d = tick_distance(p->high - p->low, 6);
    int digits = 0;
    for (double t = d; t < 0.999 && digits < 9; t *= 10) digits++;
    for (double k = ceil(p->low / d); k * d <= p->high; k++) {
        double y = y_of(p, k * d);
        put(p, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>", LEFT, y, WIDTH - RIGHT);
        put(p, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.*f</text>\n", LEFT - 8, y + 4, digits, k * d);
    }
}

static void put_x_axis(Picture *p)
{
    double d = fmax(1, tick_distance(p->last_step, 8));
    double unit = d >= 1e9 ? 1e9 : d >= 1e6 ? 1e6 : d >= 1e3 ? 1e3 : 1;
    const char *suffix = unit == 1e9 ? "G" : unit == 1e6 ? "M" : unit == 1e3 ? "k" : "";
    for (double k = 0; k * d <= p->last_step; k++) {
        double x = x_of(p, k * d);
        put(p, "<path class=\"grid\" d=\"M%.1f %dV%d\"/>", x, TOP, HEIGHT - BOTTOM);
        put(p, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.10g%s</text>\n", x, HEIGHT - BOTTOM + 20,
            k * d / unit, k ? suffix : "");
    }
    put(p, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">step</text>\n", (LEFT + WIDTH - RIGHT) / 2,
        HEIGHT - 12);
}

/* One line through the points, broken where there is no finite loss. */
static void put_line(Picture *p, const char *class, bool smooth)
{
    const SvgCurve *c = p->c;
    bool pen_down = false;
    put(p, "<path class=\"%s\" d=\"", class);
    for (int i = 0; i < c->count; i++) {
        double y = 0;
        bool have = smooth ? smoothed(c, i, &y) : c->points[i].count > 0;
        if (have && !smooth) y = c->points[i].sum / (double)c->points[i].count;
        if (have) put(p, "%s%.1f %.1f", pen_down ? " " : "M", x_of(p, (double)c->points[i].step), y_of(p, y));
        /* a lone point becomes a visible dot by the round line cap */
        if (have && !pen_down) put(p, "h0L%.1f %.1f", x_of(p, (double)c->points[i].step), y_of(p, y));
        pen_down = have;
    }
    put(p, "\"/>\n");
}

/* Lowest to highest loss behind each point; drawn only where points stand for several steps. */
static void put_range(Picture *p)
{
    put(p, "<path class=\"range\" d=\"");
    for (int i = 0; i < p->c->count; i++) {
        const SvgPoint *s = &p->c->points[i];
        if (s->count > 1)
            put(p, "M%.1f %.1fV%.1f", x_of(p, (double)s->step), y_of(p, s->low), y_of(p, s->high));
    }
    put(p, "\"/>\n");
}

static void put_skipped(Picture *p)
{
    int total = 0;
    for (int i = 0; i < p->c->count; i++) total += p->c->points[i].skipped;
    if (!total) return;
    put(p, "<path class=\"skip\" d=\"");
    for (int i = 0; i < p->c->count; i++)
        if (p->c->points[i].skipped)
            put(p, "M%.1f %dv-10", x_of(p, (double)p->c->points[i].step), HEIGHT - BOTTOM);
    put(p, "\"><title>%d skipped step%s</title></path>\n", total, total == 1 ? "" : "s");
}

static void put_dots(Picture *p)
{
    for (int i = 0; i < p->c->dot_count; i++) {
        const SvgDot *d = &p->c->dots[i];
        if (!isfinite(d->loss)) continue;
        put(p,
            "<circle class=\"v%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"><title>step %lld: "
            "%.4f</title></circle>\n",
            d->series % COLORS, x_of(p, (double)d->step), y_of(p, d->loss), (long long)d->step, d->loss);
    }
}

static void put_legend(Picture *p)
{
    int x = LEFT;
    put(p, "<path class=\"mean\" d=\"M%d 34h20\"/><text x=\"%d\" y=\"38\">training loss</text>\n", x, x + 26);
    x += 130;
    for (int i = 0; i < p->c->series_count; i++) {
        const char *name = p->c->series[i];
        put(p, "<circle class=\"v%d\" cx=\"%d\" cy=\"34\" r=\"3.5\"/><text x=\"%d\" y=\"38\">validation%s",
            i % COLORS, x + 8, x + 18, *name ? " " : "");
        put_text(p, name);
        put(p, "</text>\n");
        x += 100 + 7 * (int)strlen(name);
    }
}

static void put_head(Picture *p)
{
    put(p,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-labelledby=\"t "
        "d\">\n",
        WIDTH, HEIGHT);
    put(p, "<title id=\"t\">Loss of ");
    put_text(p, p->c->title);
    put(p, "</title>\n<desc id=\"d\">");
    double y;
    if (p->c->count > 0 && smoothed(p->c, p->c->count - 1, &y))
        put(p, "Training loss in nats per token over %.0f steps, %.4f at the end. ", p->last_step, y);
    if (p->c->dot_count > 0)
        put(p, "The last validation loss is %.4f.", p->c->dots[p->c->dot_count - 1].loss);
    put(p, "</desc>\n");
    /* plain values rather than CSS variables, which picture viewers other than browsers do not know */
    put(p, "<style>\n"
           "text{font:13px system-ui,sans-serif;fill:#24292f}.name{font-weight:600}.paper{fill:#fff}\n"
           "path{fill:none}.grid{stroke:#d8dee4}.raw,.range,.mean{stroke:#0969da;stroke-linejoin:round;"
           "stroke-linecap:round}.range{opacity:.2;stroke-width:1.5}.raw{opacity:.4}.mean{stroke-width:2.5}"
           ".skip{stroke:#cf222e;stroke-width:2}\n"
           ".v0{fill:#bc4c00}.v1{fill:#1a7f37}.v2{fill:#8250df}.v3{fill:#bf3989}\n"
           "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#0d1117}.grid{stroke:#30363d}"
           ".raw,.range,.mean{stroke:#58a6ff}.skip{stroke:#ff7b72}"
           ".v0{fill:#f0883e}.v1{fill:#56d364}.v2{fill:#bc8cff}.v3{fill:#ff9bce}}\n</style>\n");
    put(p, "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n<text class=\"name\" x=\"%d\" y=\"20\">",
        WIDTH, HEIGHT, LEFT);
    put_text(p, p->c->title);
    put(p, ": loss, nats per token</text>\n");
}

int64_t svg_curve(const SvgCurve *c, char *buf)
{
    Picture p = { .buf = buf, .c = c };
    bool any = find_axes(&p);
    put_head(&p);
    if (!any) {
        put(&p, "<text x=\"%d\" y=\"%d\">no finite loss yet</text>\n</svg>\n", LEFT, HEIGHT / 2);
        return p.used;
    }
    put_y_axis(&p);
    put_x_axis(&p);
    put(&p,
        "<clipPath id=\"c\"><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/></clipPath>\n"
        "<g clip-path=\"url(#c)\">\n",
        LEFT, TOP, WIDTH - LEFT - RIGHT + 4, HEIGHT - TOP - BOTTOM);
    put_range(&p);
    put_line(&p, "raw", false);
    put_line(&p, "mean", true);
    put_skipped(&p);
    put_dots(&p);
    put(&p, "</g>\n");
    put_legend(&p);
    put(&p, "</svg>\n");
    return p.used;
}
