/* See curve.h. */
#include "record/curve.h"

#include <math.h>
#include <string.h>

#include "base/words.h"

Err curve_open(Curve *c, SetupArena *memory, bool dots)
{
    *c = (Curve){ .stride = 1 };
    TRY(setup_array(memory, CURVE_POINTS, &c->points));
    return dots ? setup_array(memory, CURVE_DOTS, &c->dots) : ERR_OK;
}

static void point_merge(CurvePoint *to, const CurvePoint *from)
{
    to->step = from->step;
    to->tokens = from->tokens;
    to->count += from->count;
    to->sum += from->sum;
    to->low = fmin(to->low, from->low);
    to->high = fmax(to->high, from->high);
    to->skipped += from->skipped;
}

static bool same_point(const Curve *c, int64_t a, int64_t b) { return (a - 1) / c->stride == (b - 1) / c->stride; }

static void coarsen(Curve *c)
{
    int kept = 0;
    c->stride *= 2;
    for (int i = 0; i < c->count; i++) {
        if (kept > 0 && same_point(c, c->points[kept - 1].step, c->points[i].step))
            point_merge(&c->points[kept - 1], &c->points[i]);
        else c->points[kept++] = c->points[i];
    }
    c->count = kept;
}

void curve_add(Curve *c, int64_t step, int64_t tokens, double value, bool skipped)
{
    const bool shown = curve_can_show(value);
    CurvePoint one = { .step = step,
                       .tokens = tokens,
                       .count = shown,
                       .sum = shown ? value : 0,
                       .low = shown ? value : INFINITY,
                       .high = shown ? value : -INFINITY,
                       .skipped = skipped };
    while (c->count == CURVE_POINTS && !same_point(c, c->points[c->count - 1].step, step)) coarsen(c);
    if (c->count > 0 && same_point(c, c->points[c->count - 1].step, step)) point_merge(&c->points[c->count - 1], &one);
    else c->points[c->count++] = one;
}

void curve_cut_name(char out[CURVE_NAME_BYTES], const char *name) { text_cut(out, CURVE_NAME_BYTES, name); }

static int series_of(Curve *c, const char *name)
{
    char shown[CURVE_NAME_BYTES];
    curve_cut_name(shown, name);
    for (int i = 0; i < c->names; i++)
        if (strcmp(c->name[i], shown) == 0) return i;
    if (c->names == CURVE_NAMES) return CURVE_NAMES - 1;
    strcpy(c->name[c->names], shown);
    return c->names++;
}

/* Every second one of each series goes: sets that take turns must not lose one of them. */
static void drop_every_second(Curve *c)
{
    bool odd[CURVE_NAMES] = { false };
    int kept = 0;
    for (int i = 0; i < c->dot_count; i++) {
        bool *turn = &odd[c->dots[i].series];
        if (!*turn) c->dots[kept++] = c->dots[i];
        *turn = !*turn;
    }
    c->dot_count = kept;
}

void curve_add_dot(Curve *c, int64_t step, int64_t tokens, double loss, const char *name)
{
    if (c->dot_count == CURVE_DOTS) drop_every_second(c);
    c->dots[c->dot_count++] = (CurveDot){ step, tokens, loss, series_of(c, name) };
}

bool curve_smooth(const Curve *c, int i, double *out)
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

int64_t curve_skipped(const Curve *c)
{
    int64_t total = 0;
    for (int i = 0; i < c->count; i++) total += c->points[i].skipped;
    return total;
}

int curve_line(const Curve *c, bool by_tokens, bool smooth, SvgPoint out[CURVE_POINTS])
{
    for (int i = 0; i < c->count; i++) {
        const CurvePoint *p = &c->points[i];
        double y = p->count ? p->sum / (double)p->count : NAN;
        if (smooth && !curve_smooth(c, i, &y)) y = NAN;
        out[i] = (SvgPoint){ (double)(by_tokens ? p->tokens : p->step), y };
    }
    return c->count;
}

double curve_most(double low, double high, double lowest) { return high + (high - low) + 2 * (low - lowest); }
