/* See svg.h. */
#include "base/svg.h"

#include <math.h>
#include <string.h>

#include "base/file.h"
#include "base/utf8.h"

enum { LABEL_GAP = 7, LABEL_DROP = 17, NAME_DROP = 40 }; /* from the plot area to labels and names of axes */

Svg svg_frame(FILE *out, double left, double top, double right, double bottom)
{
    return (Svg){ out, left, top, right, bottom, .low = INFINITY, .high = -INFINITY, .digits = 2 };
}

void svg_fit(Svg *s, const SvgPoint *points, int count)
{
    for (int i = 0; i < count; i++) {
        s->last = fmax(s->last, points[i].x);
        if (!isfinite(points[i].y)) continue;
        s->low = fmin(s->low, points[i].y);
        s->high = fmax(s->high, points[i].y);
    }
}

double svg_x(const Svg *s, double x) { return s->left + (s->right - s->left) * (x - s->first) / (s->last - s->first); }

double svg_y(const Svg *s, double y)
{
    const double at = s->top + (s->bottom - s->top) * (s->high - y) / (s->high - s->low);
    return fmin(fmax(at, -SVG_FAR), SVG_FAR);
}

/* A round distance (1, 2 or 5 times a power of ten) that gives about `wanted` ticks over a range above 0. */
static double distance_of(double range, int wanted)
{
    double d = 1, least = range / wanted;
    while (d < least) d *= 10;
    while (d / 10 >= least) d /= 10;
    return d / 5 >= least ? d / 5 : d / 2 >= least ? d / 2 : d;
}

const char *svg_label(char buf[SVG_LABEL_BYTES], double value, double distance)
{
    static const struct {
        double unit;
        const char *suffix;
    } scales[] = { { 1e12, "T" }, { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } };
    int digits = 0;
    if (fabs(value) < 0.5 * distance) return snprintf(buf, SVG_LABEL_BYTES, "0"), buf;
    for (int i = 0; i < 4; i++) {
        const double unit = scales[i].unit;
        if (fabs(value) < 0.9999 * unit || distance < 0.0999 * unit) continue;
        return snprintf(buf, SVG_LABEL_BYTES, "%.4g%s", value / unit, scales[i].suffix), buf;
    }
    const int e = (int)floor(log10(distance) + 1e-9);
    if (distance < 1e-3 && fabs(value) < 1000 * distance) {
        const double m = value / pow(10, e), tens = round(m) / 10;
        if (fabs(m) < 9.5) snprintf(buf, SVG_LABEL_BYTES, "%.0fe%d", m, e);
        else if (fabs(m) < 99.5) snprintf(buf, SVG_LABEL_BYTES, "%.*fe%d", tens != floor(tens), tens, e + 1);
        else snprintf(buf, SVG_LABEL_BYTES, "%.3ge%d", tens / 10, e + 2);
        return buf;
    }
    if (fabs(value) >= 1e16 || distance < 1e-9) return snprintf(buf, SVG_LABEL_BYTES, "%.3g", value), buf;
    for (double t = distance; t < 0.999; t *= 10) digits++;
    return snprintf(buf, SVG_LABEL_BYTES, "%.*f", digits, value), buf;
}

void svg_x_axis(const Svg *s, int ticks, const char *name)
{
    const double distance = distance_of(s->last - s->first, ticks), d = s->times ? distance : fmax(1, distance);
    char label[SVG_LABEL_BYTES];
    for (double k = ceil(s->first / d); k * d <= s->last * (1 + 1e-9); k++) {
        const double x = svg_x(s, k * d);
        if (!s->bare) fprintf(s->out, "<path class=\"grid\" d=\"M%.1f %gV%g\"/>", x, s->top, s->bottom);
        if (s->times) snprintf(label, sizeof label, "%g", k * d);
        fprintf(s->out, "<text x=\"%.1f\" y=\"%g\" class=\"m\">%s</text>\n", x, s->bottom + LABEL_DROP,
                s->times ? label : svg_label(label, k * d, d));
    }
    if (name)
        fprintf(s->out, "<text x=\"%g\" y=\"%g\" class=\"m\">%s</text>\n", (s->left + s->right) / 2,
                s->bottom + NAME_DROP, name);
}

void svg_y_axis(const Svg *s, int ticks)
{
    const double d = distance_of(s->high - s->low, ticks);
    char label[SVG_LABEL_BYTES];
    for (double k = ceil(s->low / d); k * d <= s->high; k++) {
        const double y = svg_y(s, k * d);
        fprintf(s->out, "<path class=\"grid\" d=\"M%g %.1fH%g\"/><text x=\"%g\" y=\"%.1f\" class=\"e\">%s</text>\n",
                s->left, y, s->right, s->left - LABEL_GAP, y + 4, svg_label(label, k * d, d));
    }
}

void svg_clip(const Svg *s, int number, double beyond)
{
    fprintf(s->out,
            "<clipPath id=\"k%d\"><rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\"/></clipPath>\n"
            "<g clip-path=\"url(#k%d)\">\n",
            number, s->left, s->top, s->right - s->left + beyond, s->bottom - s->top, number);
}

void svg_line(const Svg *s, const SvgPoint *points, int count)
{
    bool pen_down = false;
    for (int i = 0; i < count; i++) {
        const bool have = isfinite(points[i].y);
        const double x = svg_x(s, points[i].x), y = have ? svg_y(s, points[i].y) : 0;
        /* a lone point becomes a visible dot by the round line cap */
        if (have && !pen_down) fprintf(s->out, "M%.*f %.*fh0L", s->digits, x, s->digits, y);
        if (have) fprintf(s->out, "%s%.*f %.*f", pen_down ? " " : "", s->digits, x, s->digits, y);
        pen_down = have;
    }
}

const char *svg_mark(int series)
{
    static const char *const shapes[] = { "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "m-3.5-3.5h7v7h-7z", "m0-5l5 8.5h-10z",
                                          "m0-5l5 5l-5 5l-5-5z" };
    return shapes[series % 4];
}

void svg_text(FILE *out, const char *before, const char *text, const char *behind)
{
    const int64_t size = (int64_t)strlen(text);
    fputs(before, out);
    for (int64_t i = 0, n; i < size; i += n ? n : 1) {
        const unsigned char c = (unsigned char)text[i];
        n = utf8_char_bytes((const uint8_t *)text + i, size - i);
        if (n == 0) fputs("\xEF\xBF\xBD", out);
        else if (n == 2 && c == 0xC2 && (unsigned char)text[i + 1] < 0xA0) fputc(' ', out); /* C1 */
        else if (n > 1) fprintf(out, "%.*s", (int)n, text + i);
        else if (c == '<') fputs("&lt;", out);
        else if (c == '>') fputs("&gt;", out);
        else if (c == '&') fputs("&amp;", out);
        else if (c == '"') fputs("&quot;", out);
        else if (c == '\'') fputs("&#39;", out);
        else fputc(c < 0x20 || c == 0x7F ? ' ' : c, out);
    }
    fputs(behind, out);
}

void svg_open(FILE *out, double width, double height)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" role=\"img\" "
            "aria-labelledby=\"t d\">\n<title id=\"t\">",
            width, height);
}

static void put_set(FILE *out, const char *rules, bool dark)
{
    enum { COLOR_BYTES = sizeof "#1f2328" - 1 };
    for (const char *bar; (bar = strchr(rules, '|')); rules = bar + 1 + COLOR_BYTES)
        fprintf(out, "%.*s%.*s", (int)(bar - rules) - COLOR_BYTES, rules, COLOR_BYTES,
                dark ? bar + 1 : bar - COLOR_BYTES);
    fputs(rules, out);
}

/* (plain values rather than CSS variables, which picture viewers other than browsers do not know) */
void svg_rules(FILE *out, const char *rules)
{
    put_set(out, rules, false);
    fputs("\n@media(prefers-color-scheme:dark){", out);
    put_set(out, rules, true);
    fputs("}\n", out);
}

void svg_ground(FILE *out, double width, double height)
{
    fprintf(out, "<style>\ntext{font:12px system-ui,sans-serif}.name{font-weight:600;font-size:15px}"
                 ".e{text-anchor:end}.m{text-anchor:middle}.grid{fill:none}\n");
    svg_rules(out, "svg{fill:" SVG_INK "}.dim{fill:" SVG_DIM "}.soft{fill:" SVG_SOFT "}.paper{fill:" SVG_PAPER
                   "}.grid{stroke:" SVG_GRID "}");
    fprintf(out, "</style>\n<rect class=\"paper\" width=\"%.0f\" height=\"%.0f\"/>\n", width, height);
}

Err svg_sheet_open(SvgSheet *s, SetupArena *memory, int64_t size_bytes)
{
    TRY(setup_array(memory, size_bytes, &s->text));
    s->out = fmemopen(s->text, (size_t)size_bytes, "w");
    if (!s->out || setvbuf(s->out, s->stdio, _IOFBF, sizeof s->stdio))
        return err_set(ERR_MEMORY, "no memory for a picture");
    return ERR_OK;
}

Err svg_sheet_write(SvgSheet *s, const char *path)
{
    const bool whole = !fflush(s->out) && !ferror(s->out);
    const Err err = whole ? file_replace(path, s->text, ftell(s->out))
                          : err_set(ERR_INTERNAL, "there was too little room for the picture '%s'", path);
    rewind(s->out);
    return err;
}
