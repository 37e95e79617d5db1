/* Text of schedules: chart_list and chart_text of chart.h. */
#include "pipeline/chart.h"

#include <math.h>
#include <string.h>

enum { COLUMNS_MAX = 180, LABEL_BYTES = 32 };

const char *chart_unit(const Schedule *s, int unit, char out[CHART_UNIT_BYTES])
{
    if (s->slices == 1) snprintf(out, CHART_UNIT_BYTES, "%d", unit);
    else snprintf(out, CHART_UNIT_BYTES, "%d:%d", unit / s->slices, schedule_slice_of(s, unit));
    return out;
}

/* ---- lists ---- */

static void list_compute(const Schedule *s, const Action *a, FILE *out)
{
    char unit[CHART_UNIT_BYTES];
    fprintf(out, " %s%s", action_name(a->kind), chart_unit(s, a->microbatch, unit));
    if (a->count > 1) fprintf(out, "x%d", a->count);
    fprintf(out, ".s%d", a->stage);
    if (s->replicas > 1 && a->replica) fprintf(out, "'");
    if (a->version) fprintf(out, "@-%d", a->version);
    if (a->flags & ACTION_PAIR) fprintf(out, " |");
}

static void list_message(const Schedule *s, const Action *a, bool first, FILE *out)
{
    char unit[CHART_UNIT_BYTES];
    fprintf(out, "%s%s(%s%s.s%d, %s %d)%s", first ? " [" : " ", action_name(a->kind),
            a->payload == PAYLOAD_ACTIVATION ? "act" : "grad", chart_unit(s, a->microbatch, unit), a->stage,
            a->kind == ACT_SEND ? "to" : "from", a->peer, a->flags & ACTION_MORE ? "," : "]");
}

void chart_list(const Schedule *s, FILE *out)
{
    for (int r = 0; r < s->ranks; r++) {
        const ActionList *list = &s->rank[r];
        fprintf(out, "r%d:", r);
        for (int i = 0; i < list->count; i++) {
            const Action *a = &list->action[i];
            if (action_is_compute(a->kind)) list_compute(s, a, out);
            else if (action_is_message(a->kind)) list_message(s, a, i == 0 || !(a[-1].flags & ACTION_MORE), out);
            else
                fprintf(out, s->replicas > 1 && a->kind != ACT_NORM ? " %s.s%d" : " %s", action_name(a->kind),
                        a->stage);
        }
        fputc('\n', out);
    }
}

/* ---- over time ---- */

typedef struct {
    const Schedule *s;
    const Simulation *sim;
    double tick;      /* time of one cell */
    int cells, width; /* width: characters of a cell */
} Chart;

/* The shortest compute: one cell, if there is room. */
static double shortest(const Schedule *s, const Simulation *sim)
{
    double least = INFINITY;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) {
            const double time = sim->span[r][i].end - sim->span[r][i].start;
            if (time > 0 && time < least) least = time;
        }
    return least;
}

static void label_of(const Schedule *s, const Action *a, char out[LABEL_BYTES])
{
    const int part = s->replicas > 1 ? a->replica : schedule_chunk_of(s, a->stage);
    char unit[CHART_UNIT_BYTES];
    int n = snprintf(out, LABEL_BYTES, "%s%s", action_name(a->kind), chart_unit(s, a->microbatch, unit));
    if ((s->replicas > 1 || s->chunks > 1) && part < 26) snprintf(out + n, (size_t)(LABEL_BYTES - n), "%c", 'a' + part);
}

static int widest_label(const Schedule *s)
{
    int widest = 0;
    char label[LABEL_BYTES];
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) {
            if (!action_is_compute(s->rank[r].action[i].kind)) continue;
            label_of(s, &s->rank[r].action[i], label);
            if ((int)strlen(label) > widest) widest = (int)strlen(label);
        }
    return widest;
}

/* a NULL: idle. */
static void put_cell(const Chart *c, const Action *a, bool last, FILE *out)
{
    char label[LABEL_BYTES];
    if (c->width == 1) {
        fputs(a ? action_name(a->kind) : ".", out);
        return;
    }
    if (a) label_of(c->s, a, label);
    fprintf(out, "%-*s", last ? 0 : c->width, a ? label : ".");
}

static void put_row(const Chart *c, int rank, FILE *out)
{
    const ActionList *list = &c->s->rank[rank];
    int i = 0;
    fprintf(out, "r%-3d|", rank);
    for (int cell = 0; cell < c->cells; cell++) {
        const double at = (cell + 0.5) * c->tick;
        while (i < list->count && !(c->sim->span[rank][i].end > at)) i++;
        const bool busy = i < list->count && c->sim->span[rank][i].start <= at;
        put_cell(c, busy ? &list->action[i] : NULL, cell + 1 == c->cells, out);
    }
    fputc('\n', out);
}

void chart_text(const Schedule *s, const Simulation *sim, FILE *out)
{
    Chart c = { .s = s, .sim = sim, .tick = shortest(s, sim), .width = widest_label(s) + 1 };
    if (!(sim->makespan / c.tick * c.width <= COLUMNS_MAX)) c.width = 1;
    if (!(sim->makespan / c.tick <= COLUMNS_MAX)) c.tick = sim->makespan / COLUMNS_MAX;
    c.cells = (int)(sim->makespan / c.tick + 0.5);
    for (int r = 0; r < s->ranks; r++) put_row(&c, r, out);
}
