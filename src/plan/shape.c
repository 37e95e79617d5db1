/* See shape.h. */
#include "plan/shape.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STAGES_MOST = 1024 };

/* The middle of a long step goes round: two ranks' micro-batches less make no difference but time, nor to rules about
 * shapes, which count micro-batches by as many as there are ranks, or twice as many. */
int shape_microbatches(int ranks, int microbatches)
{
    const int cycle = 2 * ranks;
    return microbatches <= 2 * cycle ? microbatches : cycle + microbatches % cycle;
}

static void add_held(const Schedule *s, const Action *a, int *now)
{
    const int at = 2 * (a->replica * s->chunks + schedule_chunk_of(s, a->stage));
    if (a->kind == ACT_F) now[at] += a->count, now[at + 1] += a->count;
    if (a->kind == ACT_B || a->kind == ACT_I) now[at] -= a->count;
    if (a->kind == ACT_B || a->kind == ACT_W) now[at + 1] -= a->count;
}

static Err find_held(Shape *p)
{
    const Schedule *s = &p->s;
    const int width = 2 * s->replicas * s->chunks;
    int *now = calloc((size_t)width, sizeof *now);
    p->held = calloc((size_t)s->ranks * (size_t)width, sizeof *p->held);
    p->split = calloc((size_t)s->ranks * (size_t)width / 2, sizeof *p->split);
    const bool made = now && p->held && p->split;
    for (int r = 0; r < s->ranks && made; r++) {
        int most = 0;
        memset(now, 0, (size_t)width * sizeof *now);
        for (int i = 0; i < s->rank[r].count; i++) {
            int sum = 0;
            const Action *a = &s->rank[r].action[i];
            if (!action_is_compute(a->kind)) continue;
            add_held(s, a, now);
            if (a->kind == ACT_I)
                p->split[r * width / 2 + a->replica * s->chunks + schedule_chunk_of(s, a->stage)] = true;
            for (int k = 1; k < width; k += 2) sum += now[k];
            if (sum <= most) continue;
            most = sum;
            memcpy(p->held + r * width, now, (size_t)width * sizeof *now);
        }
    }
    free(now);
    return made ? ERR_OK : err_set(ERR_MEMORY, "no memory for a schedule of %d ranks", s->ranks);
}

static ScheduleSpec spec_of(const Shape *p)
{
    return (ScheduleSpec){ .name = p->name, .ranks = p->ranks, .microbatches = p->microbatches, .chunks = p->chunks };
}

static Err make(Shape *p)
{
    const ScheduleSpec spec = spec_of(p);
    const Err err = schedule_shape(&spec, &p->s);
    p->legal = !err && p->s.stages <= STAGES_MOST;
    return err == ERR_CONFIG ? ERR_OK : err;
}

Err shape_lists(Shape *p)
{
    ScheduleSpec spec = spec_of(p);
    if (p->made || !p->legal) return ERR_OK;
    spec.microbatches = p->made = shape_microbatches(p->ranks, p->microbatches);
    const Err err = schedule_make(&spec, &p->s);
    p->legal = !err;
    if (err) schedule_free(&p->s);
    if (err) return err == ERR_CONFIG ? ERR_OK : err;
    TRY(find_held(p));
    return simulator_open(&p->s, &p->simulator);
}

static bool is_it(const Shape *p, const char *schedule, int ranks, int chunks, int microbatches)
{
    return p->ranks == ranks && p->chunks == chunks && p->microbatches == microbatches && !strcmp(p->name, schedule);
}

static Err grow(ShapeTable *t)
{
    if (t->count < t->capacity) return ERR_OK;
    t->capacity = t->capacity ? 2 * t->capacity : 64;
    Shape **more = realloc(t->shapes, (size_t)t->capacity * sizeof(Shape *));
    if (!more) return err_set(ERR_MEMORY, "no memory for %d schedules", t->capacity);
    t->shapes = more;
    return ERR_OK;
}

Err shape_get(ShapeTable *t, const char *schedule, int ranks, int chunks, int microbatches, Shape **out)
{
    for (int i = t->count - 1; i >= 0; i--)
        if (is_it(t->shapes[i], schedule, ranks, chunks, microbatches)) {
            *out = t->shapes[i];
            return ERR_OK;
        }
    TRY(grow(t));
    Shape *p = calloc(1, sizeof *p);
    if (!p) return err_set(ERR_MEMORY, "no memory for a schedule");
    *p = (Shape){ .ranks = ranks, .chunks = chunks, .microbatches = microbatches };
    snprintf(p->name, sizeof p->name, "%s", schedule);
    *out = t->shapes[t->count++] = p;
    return make(p);
}

void shape_table_free(ShapeTable *t)
{
    for (int i = 0; i < t->count; i++) {
        simulator_close(t->shapes[i]->simulator);
        schedule_free(&t->shapes[i]->s);
        free(t->shapes[i]->held);
        free(t->shapes[i]->split);
        free(t->shapes[i]);
    }
    free(t->shapes);
    *t = (ShapeTable){ 0 };
}

Err shape_replay(const Shape *p, const StageCost *costs, double hop, double *seconds)
{
    const Simulation *sim;
    const SimulateCosts c = { .stage = costs, .latency = hop };
    TRY(simulator_run(p->simulator, &c, &sim));
    /* the rank with most work has the rest of the step's before it */
    *seconds = sim->makespan + sim->ideal / p->made * (p->microbatches - p->made);
    return ERR_OK;
}
