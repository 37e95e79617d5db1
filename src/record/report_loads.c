/*
 * A picture of a report: the load of a run's experts by layer over its steps (load_map.h). A row is a layer, the
 * stronger a cell's colour the busier the busiest expert; even use has none.
 */
#include <math.h>

#include "record/report_pictures.h"

enum { WIDTH = 560, ROWS_HEIGHT = 240, ROW_MOST = 30, LEVELS = 20 };

typedef struct {
    const LoadMap *m;
    Svg svg;
    double top, row; /* the load of the strongest colour; the height of a row */
} Picture;

/* Number in LEVELS of a load. */
static int level_of(const Picture *p, int layer, int bin)
{
    const double over = (load_map_at(p->m, layer, bin) - 1) / (p->top - 1);
    return (int)lrint(LEVELS * fmin(fmax(over, 0), 1));
}

static void put_cell(const Picture *p, int layer, int first, int end, int level)
{
    const Svg *s = &p->svg;
    const double left = first ? svg_x(s, (double)p->m->step[first - 1]) : s->left;
    if (level)
        fprintf(s->out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" opacity=\"%.2f\"/>\n", left,
                s->top + p->row * layer, svg_x(s, (double)p->m->step[end - 1]) - left, p->row, (double)level / LEVELS);
}

/* Neighbours of one colour are one cell. */
static void put_layer(const Picture *p, int layer)
{
    int first = 0;
    for (int b = 1; b <= p->m->bins; b++) {
        const int level = level_of(p, layer, first);
        if (b < p->m->bins && level_of(p, layer, b) == level) continue;
        put_cell(p, layer, first, b, level);
        first = b;
    }
}

static void put_axes(const Picture *p)
{
    const Svg *s = &p->svg;
    for (int l = 0; l < p->m->layers; l += (p->m->layers + 7) / 8)
        fprintf(s->out, "<text x=\"%g\" y=\"%.1f\" class=\"e\">%d</text>\n", s->left - 7,
                s->top + p->row * (l + 0.5) + 4, l);
    svg_x_axis(s, 5, NULL);
    fprintf(s->out,
            "<path class=\"grid\" d=\"M%g %gH%gV%.1fH%gZ\"/>\n"
            "<text x=\"%g\" y=\"%.1f\" class=\"m\">step; from no colour, 1, to the strongest, %.3g</text>\n",
            s->left, s->top, s->right, s->bottom, s->left, (s->left + s->right) / 2, s->bottom + 36, p->top);
}

static void put_description(const Picture *p, int number)
{
    fprintf(p->svg.out, "<desc id=\"d%d\">At the end: ", number);
    for (int l = 0; l < p->m->layers; l++)
        fprintf(p->svg.out, "%slayer %d %.3g", l ? ", " : "", l, load_map_at(p->m, l, p->m->bins - 1));
    fprintf(p->svg.out, ".</desc>\n");
}

static double strongest(const LoadMap *m)
{
    double most = 2;
    for (int l = 0; l < m->layers; l++)
        for (int b = 0; b < m->bins; b++) most = fmax(most, load_map_at(m, l, b));
    return most;
}

void report_loads(const History *runs, int count, int run, int number, FILE *out)
{
    const LoadMap *m = &runs[run].loads;
    if (!m->bins) return;
    const double row = fmin((double)ROWS_HEIGHT / m->layers, ROW_MOST);
    Picture p = { m, svg_frame(out, 62, 12, WIDTH - 14, 12 + row * m->layers), strongest(m), row };
    p.svg.last = (double)m->step[m->bins - 1];
    p.svg.bare = true;
    fprintf(out, "<figure class=\"map\"><figcaption>Load of experts by layer: busiest over mean");
    if (count > 1) svg_text(out, ", ", report_name(runs, count, run), "");
    fprintf(out, "</figcaption>\n<svg viewBox=\"0 0 %d %.0f\" role=\"img\" aria-labelledby=\"t%d d%d\">\n", WIDTH,
            p.svg.bottom + 46, number, number);
    fprintf(out, "<title id=\"t%d\">Load of experts by layer and step</title>\n", number);
    put_description(&p, number);
    for (int l = 0; l < m->layers; l++) put_layer(&p, l);
    put_axes(&p);
    fprintf(out, "</svg></figure>\n");
}
