/*
 * The picture, from back to front: grid with round ticks, the range of the steps behind each point (faint),
 * their means (thin), the smoothed curve (strong), skipped steps as ticks on the lower edge, validation dots.
 *
 *   y axis   linear, from the smallest to the largest loss that is drawn; spikes that stand far above the smoothed and
 *            validation losses (axis_most) are clipped, or one bad step would flatten the whole curve
 *   colours  two sets, chosen by the reader's browser (prefers-color-scheme)
 */
#include "record/svg.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "record/axis.h"

enum {
    WIDTH = 900,
    HEIGHT = 480,
    LEFT = 72,
    RIGHT = 24,
    TOP = 48,
    BOTTOM = 56,
    COLORS = 6,
    TEXT_BYTES = 120
};

typedef struct {
    char *buf;
    int64_t used;
    const Curve *c;
    const char *title;
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

/* False if there is nothing to draw. */
static bool find_axes(Picture *p)
{
    const Curve *c = p->c;
    double low = INFINITY, high = -INFINITY, y;
    p->last_step = 1;
    for (int i = 0; i < c->count; i++) {
        p->last_step = fmax(p->last_step, (double)c->points[i].step);
        if (!curve_smooth(c, i, &y)) continue;
        low = fmin(low, y);
        high = fmax(high, y);
    }
    for (int i = 0; i < c->dot_count; i++) {
        p->last_step = fmax(p->last_step, (double)c->dots[i].step);
        if (!curve_can_show(c->dots[i].loss)) continue;
        low = fmin(low, c->dots[i].loss);
        high = fmax(high, c->dots[i].loss);
    }
    if (!(low <= high)) return false;
    double lowest = low;
    for (int i = 0; i < c->count; i++)
        if (c->points[i].count) lowest = fmin(lowest, c->points[i].low);
    const double most = axis_most(low, high, lowest);
    for (int i = 0; i < c->count; i++)
        if (c->points[i].count) high = fmax(high, fmin(c->points[i].high, most));
    low = lowest;
    double margin = fmax(0.05 * (high - low), 1e-3 * fmax(1, fabs(high)));
    p->low = low - margin;
    p->high = high + margin;
    return true;
}

static void put_y_axis(Picture *p)
{
    double d = axis_distance(p->high - p->low, 6);
    char label[AXIS_BYTES];
    for (double k = ceil(p->low / d); k * d <= p->high; k++) {
        double y = y_of(p, k * d);
        put(p, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>", LEFT, y, WIDTH - RIGHT);
        put(p, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", LEFT - 8, y + 4,
            axis_label(label, k * d, d));
    }
}

static void put_x_axis(Picture *p)
{
    double d = fmax(1, axis_distance(p->last_step, 8));
    char label[AXIS_BYTES];
    for (double k = 0; k * d <= p->last_step; k++) {
        double x = x_of(p, k * d);
        put(p, "<path class=\"grid\" d=\"M%.1f %dV%d\"/>", x, TOP, HEIGHT - BOTTOM);
        put(p, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", x, HEIGHT - BOTTOM + 20,
            axis_label(label, k * d, d));
    }
    put(p, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">step</text>\n", (LEFT + WIDTH - RIGHT) / 2,
        HEIGHT - 12);
}

/* One line through the points, broken where there is no finite loss. */
static void put_line(Picture *p, const char *class, bool smooth)
{
    const Curve *c = p->c;
    bool pen_down = false;
    put(p, "<path class=\"%s\" d=\"", class);
    for (int i = 0; i < c->count; i++) {
        double y = 0;
        bool have = smooth ? curve_smooth(c, i, &y) : c->points[i].count > 0;
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
        const CurvePoint *s = &p->c->points[i];
        if (s->count > 1)
            put(p, "M%.1f %.1fV%.1f", x_of(p, (double)s->step), y_of(p, s->low), y_of(p, s->high));
    }
    put(p, "\"/>\n");
}

static void put_skipped(Picture *p)
{
    const int64_t total = curve_skipped(p->c);
    if (!total) return;
    put(p, "<path class=\"skip\" d=\"");
    for (int i = 0; i < p->c->count; i++)
        if (p->c->points[i].skipped)
            put(p, "M%.1f %dv-10", x_of(p, (double)p->c->points[i].step), HEIGHT - BOTTOM);
    put(p, "\"><title>%lld skipped step%s</title></path>\n", (long long)total, total == 1 ? "" : "s");
}

/* Sets differ in colour and in shape. */
static void put_mark(Picture *p, int series, double x, double y)
{
    put(p, "<path class=\"v%d\" d=\"M%.1f %.1f%s\"", series % COLORS, x, y, axis_mark(series));
}

static void put_dots(Picture *p)
{
    for (int i = 0; i < p->c->dot_count; i++) {
        const CurveDot *d = &p->c->dots[i];
        if (!curve_can_show(d->loss)) continue;
        put_mark(p, d->series, x_of(p, (double)d->step), y_of(p, d->loss));
        put(p, "><title>");
        put_text(p, p->c->name[d->series]);
        put(p, "%sstep %lld: %.4f</title></path>\n", *p->c->name[d->series] ? ", " : "", (long long)d->step,
            d->loss);
    }
}

/* As many validation sets as there is room for; the others' names are on their marks. */
static void put_legend(Picture *p)
{
    int x = LEFT;
    put(p, "<path class=\"mean\" d=\"M%d 34h20\"/><text x=\"%d\" y=\"38\">training loss</text>\n", x, x + 26);
    x += 130;
    if (curve_skipped(p->c)) {
        put(p, "<path class=\"skip\" d=\"M%d 39v-10\"/><text x=\"%d\" y=\"38\">skipped step</text>\n", x + 8,
            x + 18);
        x += 120;
    }
    for (int i = 0; i < p->c->names; i++) {
        const char *name = p->c->name[i];
        const int width = 100 + 7 * (int)strlen(name);
        if (x + width > WIDTH) continue;
        put_mark(p, i, x + 8, 34);
        put(p, "/><text x=\"%d\" y=\"38\">validation%s", x + 18, *name ? " " : "");
        put_text(p, name);
        put(p, "</text>\n");
        x += width;
    }
}

/* For who does not see the picture. */
static void put_description(Picture *p)
{
    double y;
    const int64_t skipped = curve_skipped(p->c);
    int last = p->c->count - 1;
    while (last >= 0 && !curve_smooth(p->c, last, &y)) last--;
    if (last >= 0) {
        put(p, "Training loss in nats per token over %.0f step%s, %.4f at ", p->last_step,
            p->last_step == 1 ? "" : "s", y);
        if (last == p->c->count - 1) put(p, "the end. ");
        else put(p, "step %lld. ", (long long)p->c->points[last].step);
    }
    for (int s = 0; s < p->c->names; s++) {
        int i = p->c->dot_count - 1;
        while (i >= 0 && p->c->dots[i].series != s) i--;
        if (i < 0) continue;
        put(p, "The last validation loss%s", *p->c->name[s] ? " on " : "");
        put_text(p, p->c->name[s]);
        const double loss = p->c->dots[i].loss;
        if (!isfinite(loss)) put(p, " is not finite");
        else put(p, curve_can_show(loss) ? " is %.4f" : " is %g", loss); /* huge ones in few letters */
        put(p, " at step %lld. ", (long long)p->c->dots[i].step);
    }
    if (skipped) put(p, "%lld step%s skipped. ", (long long)skipped, skipped == 1 ? " was" : "s were");
}

static void put_head(Picture *p)
{
    put(p,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-labelledby=\"t "
        "d\">\n",
        WIDTH, HEIGHT);
    put(p, "<title id=\"t\">Loss of ");
    put_text(p, p->title);
    put(p, "</title>\n<desc id=\"d\">");
    put_description(p);
    put(p, "</desc>\n");
    /* plain values rather than CSS variables, which picture viewers other than browsers do not know */
    put(p, "<style>\n"
           "text{font:13px system-ui,sans-serif;fill:#1f2328}.name{font-weight:600}.paper{fill:#fff}\n"
           "path{fill:none}.grid{stroke:#d1d9e0}.raw,.range,.mean{stroke:#003a99;stroke-linejoin:round;"
           "stroke-linecap:round}.range{opacity:.2;stroke-width:1.5}.raw{opacity:.4}.mean{stroke-width:2.5}"
           ".skip{stroke:#cf222e;stroke-width:2}\n"
           ".v0{fill:#d47019}.v1{fill:#6f976e}.v2{fill:#b07ab7}.v3{fill:#5e3300}.v4{fill:#20273c}.v5{fill:#"
           "0060a8}\n"
           "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#0d1117}.grid{stroke:#353c45}"
           ".raw,.range,.mean{stroke:#6b95f5}.skip{stroke:#ff7b72}.v0{fill:#e16c24}.v1{fill:#00ed96}"
           ".v2{fill:#a67393}.v3{fill:#ffe407}.v4{fill:#dbeeff}.v5{fill:#6b95f5}}\n</style>\n");
    put(p, "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n<text class=\"name\" x=\"%d\" y=\"20\">",
        WIDTH, HEIGHT, LEFT);
    put_text(p, p->title);
    put(p, ": loss, nats per token</text>\n");
}

int64_t svg_curve(const Curve *c, const char *title, char *buf)
{
    Picture p = { .buf = buf, .c = c, .title = title };
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
