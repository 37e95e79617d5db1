/*
 * A picture of a report: the load of a run's experts by layer over its steps (load_map.h). A row is a layer, the
 * stronger a cell's colour the busier the busiest expert; even use has none.
 */
#include <math.h>

#include "record/axis.h"
#include "record/report_look.h"
#include "record/report_pictures.h"

enum {
    WIDTH = 560,
    LEFT = 62,
    RIGHT = 14,
    TOP = 12,
    BOTTOM = 46,
    ROWS_HEIGHT = 240,
    ROW_MOST = 30,
    LEVELS = 20
};

typedef struct {
    const LoadMap *m;
    FILE *out;
    double top, row; /* the load of the strongest colour; the height of a row */
} Picture;

static double bottom_of(const Picture *p) { return TOP + p->row * p->m->layers; }

static double x_of(const Picture *p, int64_t step)
{
    return LEFT + (WIDTH - LEFT - RIGHT) * (double)step / (double)p->m->step[p->m->bins - 1];
}

/* Of LEVELS. */
static int level_of(const Picture *p, int layer, int bin)
{
    const double over = (load_map_at(p->m, layer, bin) - 1) / (p->top - 1);
    return (int)lrint(LEVELS * fmin(fmax(over, 0), 1));
}

static void put_cell(const Picture *p, int layer, int first, int end, int level)
{
    const double left = first ? x_of(p, p->m->step[first - 1]) : LEFT, right = x_of(p, p->m->step[end - 1]);
    if (level)
        fprintf(p->out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" opacity=\"%.2f\"/>\n",
                left, TOP + p->row * layer, right - left, p->row, (double)level / LEVELS);
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
    const double last = (double)p->m->step[p->m->bins - 1], d = fmax(1, axis_distance(last, 5));
    const int every = (p->m->layers + 7) / 8;
    char label[AXIS_BYTES];
    for (int l = 0; l < p->m->layers; l += every)
        fprintf(p->out, "<text x=\"%d\" y=\"%.1f\" class=\"e\">%d</text>\n", LEFT - 7,
                TOP + p->row * (l + 0.5) + 4, l);
    for (double k = 0; k * d <= last * (1 + 1e-9); k++)
        fprintf(p->out, "<text x=\"%.1f\" y=\"%.1f\" class=\"m\">%s</text>\n",
                LEFT + (WIDTH - LEFT - RIGHT) * k * d / last, bottom_of(p) + 17, axis_label(label, k * d, d));
    fprintf(p->out, "<path class=\"grid\" d=\"M%d %dH%dV%.1fH%dZ\"/>\n", LEFT, TOP, WIDTH - RIGHT,
            bottom_of(p), LEFT);
    fprintf(p->out,
            "<text x=\"%d\" y=\"%.1f\" class=\"m\">step; from no colour, 1, to the strongest, %.3g</text>\n",
            (LEFT + WIDTH - RIGHT) / 2, bottom_of(p) + 36, p->top);
}

static void put_description(const Picture *p, int number)
{
    fprintf(p->out, "<desc id=\"d%d\">At the end: ", number);
    for (int l = 0; l < p->m->layers; l++)
        fprintf(p->out, "%slayer %d %.3g", l ? ", " : "", l, load_map_at(p->m, l, p->m->bins - 1));
    fprintf(p->out, ".</desc>\n");
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
    Picture p = { .m = &runs[run].loads, .out = out };
    if (!p.m->bins) return;
    p.top = strongest(p.m);
    p.row = fmin((double)ROWS_HEIGHT / p.m->layers, ROW_MOST);
    fprintf(out, "<figure class=\"map\"><figcaption>Load of experts by layer: busiest over mean");
    if (count > 1) {
        fprintf(out, ", ");
        report_text(out, report_name(runs, count, run));
    }
    fprintf(out, "</figcaption>\n<svg viewBox=\"0 0 %d %.0f\" role=\"img\" aria-labelledby=\"t%d d%d\">\n",
            WIDTH, bottom_of(&p) + BOTTOM, number, number);
    fprintf(out, "<title id=\"t%d\">Load of experts by layer and step</title>\n", number);
    put_description(&p, number);
    for (int l = 0; l < p.m->layers; l++) put_layer(&p, l);
    put_axes(&p);
    fprintf(out, "</svg></figure>\n");
}
