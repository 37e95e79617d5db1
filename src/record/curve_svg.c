/*
 * The picture, from back to front: grid with round ticks, the range of the steps behind each point (faint),
 * their means (thin), the smoothed curve (strong), skipped steps as ticks on the lower edge, validation dots.
 *
 *   y axis   linear, from the smallest to the largest loss that is drawn; spikes that stand far above the smoothed and
 *            validation losses (curve_most) are clipped, or one bad step would flatten the whole curve
 *   colours  two sets, chosen by the reader's browser (prefers-color-scheme)
 */
#include "record/curve.h"

#include <math.h>
#include <string.h>

#include "base/words.h"

enum { WIDTH = 900, HEIGHT = 480, LEFT = 72, BOTTOM = HEIGHT - 56, COLORS = 5, TITLE_BYTES = 121 };

/* False if there is nothing to draw. */
static bool find_axes(Svg *s, const Curve *c)
{
    SvgPoint points[CURVE_POINTS + CURVE_DOTS];
    int n = curve_line(c, false, true, points);
    for (const CurveDot *d = c->dots; d < c->dots + c->dot_count; d++)
        points[n++] = (SvgPoint){ (double)d->step, curve_can_show(d->loss) ? d->loss : NAN };
    svg_fit(s, points, n);
    if (!(s->low <= s->high)) return false;
    const double low = s->low, high = s->high;
    for (int i = 0; i < c->count; i++)
        if (c->points[i].count) s->low = fmin(s->low, c->points[i].low);
    const double most = curve_most(low, high, s->low);
    for (int i = 0; i < c->count; i++)
        if (c->points[i].count) s->high = fmax(s->high, fmin(c->points[i].high, most));
    const double margin = fmax(0.05 * (s->high - s->low), 1e-3 * fmax(1, fabs(s->high)));
    s->low -= margin;
    s->high += margin;
    return true;
}

static void put_line(const Svg *s, const Curve *c, const char *class, bool smooth)
{
    SvgPoint points[CURVE_POINTS];
    fprintf(s->out, "<path class=\"%s\" d=\"", class);
    svg_line(s, points, curve_line(c, false, smooth, points));
    fprintf(s->out, "\"/>\n");
}

/* Lowest to highest loss behind each point; drawn only where points stand for several steps. */
static void put_range(const Svg *s, const Curve *c)
{
    fprintf(s->out, "<path class=\"range\" d=\"");
    for (const CurvePoint *p = c->points; p < c->points + c->count; p++)
        if (p->count > 1)
            fprintf(s->out, "M%.1f %.1fV%.1f", svg_x(s, (double)p->step), svg_y(s, p->low), svg_y(s, p->high));
    fprintf(s->out, "\"/>\n");
}

static void put_skipped(const Svg *s, const Curve *c)
{
    const int64_t total = curve_skipped(c);
    if (!total) return;
    fprintf(s->out, "<path class=\"skip\" d=\"");
    for (const CurvePoint *p = c->points; p < c->points + c->count; p++)
        if (p->skipped) fprintf(s->out, "M%.1f %dv-10", svg_x(s, (double)p->step), BOTTOM);
    fprintf(s->out, "\"><title>%lld skipped step%s</title></path>\n", (long long)total, total == 1 ? "" : "s");
}

/* Sets differ in colour and in shape. */
static void put_mark(FILE *out, int series, double x, double y)
{
    fprintf(out, "<path class=\"v%d\" d=\"M%.1f %.1f%s\"", series % COLORS, x, y, svg_mark(series));
}

static void put_dots(const Svg *s, const Curve *c)
{
    for (const CurveDot *d = c->dots; d < c->dots + c->dot_count; d++) {
        const char *name = c->name[d->series];
        if (!curve_can_show(d->loss)) continue;
        put_mark(s->out, d->series, svg_x(s, (double)d->step), svg_y(s, d->loss));
        svg_text(s->out, "><title>", name, *name ? ", " : "");
        fprintf(s->out, "step %lld: %.4f</title></path>\n", (long long)d->step, d->loss);
    }
}

/* Lists as many validation sets as there is room for; the others' names are on their marks. */
static void put_legend(const Curve *c, FILE *out)
{
    int x = LEFT;
    fprintf(out, "<path class=\"mean\" d=\"M%d 34h20\"/><text x=\"%d\" y=\"38\">training loss</text>\n", x, x + 26);
    x += 130;
    if (curve_skipped(c)) {
        fprintf(out, "<path class=\"skip\" d=\"M%d 39v-10\"/><text x=\"%d\" y=\"38\">skipped step</text>\n", x + 8,
                x + 18);
        x += 120;
    }
    for (int i = 0; i < c->names; i++) {
        const int width = 100 + 7 * (int)strlen(c->name[i]);
        if (x + width > WIDTH) continue;
        put_mark(out, i, x + 8, 34);
        fprintf(out, "/><text x=\"%d\" y=\"38\">validation", x + 18);
        svg_text(out, *c->name[i] ? " " : "", c->name[i], "</text>\n");
        x += width;
    }
}

/* For who does not see the picture. */
static void put_description(const Curve *c, double last_step, FILE *out)
{
    double y;
    const int64_t skipped = curve_skipped(c);
    int last = c->count - 1;
    while (last >= 0 && !curve_smooth(c, last, &y)) last--;
    if (last >= 0) {
        fprintf(out, "Training loss in nats per token over %.0f step%s, %.4f at ", last_step, last_step == 1 ? "" : "s",
                y);
        if (last == c->count - 1) fprintf(out, "the end. ");
        else fprintf(out, "step %lld. ", (long long)c->points[last].step);
    }
    for (int s = 0; s < c->names; s++) {
        int i = c->dot_count - 1;
        while (i >= 0 && c->dots[i].series != s) i--;
        if (i < 0) continue;
        svg_text(out, *c->name[s] ? "The last validation loss on " : "The last validation loss", c->name[s], "");
        const double loss = c->dots[i].loss;
        if (!isfinite(loss)) fprintf(out, " is not finite");
        else fprintf(out, curve_can_show(loss) ? " is %.4f" : " is %g", loss); /* huge ones in few letters */
        fprintf(out, " at step %lld. ", (long long)c->dots[i].step);
    }
    if (skipped) fprintf(out, "%lld step%s skipped. ", (long long)skipped, skipped == 1 ? " was" : "s were");
}

static void put_head(const Svg *s, const Curve *c, const char *title)
{
    svg_open(s->out, WIDTH, HEIGHT);
    svg_text(s->out, "Loss of ", title, "</title>\n<desc id=\"d\">");
    put_description(c, s->last, s->out);
    fprintf(s->out, "</desc>\n");
    svg_ground(s->out, WIDTH, HEIGHT);
    fprintf(s->out, "<style>\ntext,.name{font-size:13px}path{fill:none}.raw,.range,.mean{stroke-linejoin:round;"
                    "stroke-linecap:round}.range{opacity:.2;stroke-width:1.5}.raw{opacity:.4}"
                    ".mean{stroke-width:2.5}.skip{stroke-width:2}\n");
    svg_rules(s->out, ".raw,.range,.mean{stroke:" SVG_C0 "}.skip{stroke:#cf222e|#ff7b72}.v0{fill:" SVG_C1
                      "}.v1{fill:" SVG_C2 "}.v2{fill:" SVG_C3 "}.v3{fill:" SVG_C4 "}.v4{fill:" SVG_C5 "}");
    fprintf(s->out, "</style>\n<text class=\"name\" x=\"%d\" y=\"20\">", LEFT);
    svg_text(s->out, "", title, ": loss, nats per token</text>\n");
}

void curve_svg(const Curve *c, const char *title, FILE *out)
{
    Svg s = svg_frame(out, LEFT, 48, WIDTH - 24, BOTTOM);
    char name[TITLE_BYTES];
    s.last = 1;
    s.digits = 1;
    const bool any = find_axes(&s, c);
    text_cut(name, sizeof name, title);
    put_head(&s, c, name);
    if (!any) {
        fprintf(out, "<text x=\"%d\" y=\"%d\">no finite loss yet</text>\n</svg>\n", LEFT, HEIGHT / 2);
        return;
    }
    svg_y_axis(&s, 6);
    svg_x_axis(&s, 8, "step");
    svg_clip(&s, 0, 4);
    put_range(&s, c);
    put_line(&s, c, "raw", false);
    put_line(&s, c, "mean", true);
    put_skipped(&s, c);
    put_dots(&s, c);
    fprintf(out, "</g>\n");
    put_legend(c, out);
    fprintf(out, "</svg>\n");
}
