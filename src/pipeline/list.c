/* See list.h. Time goes tick by tick; in each tick every rank decides once, from outputs of earlier ticks. */
#include "pipeline/list.h"

#include <stdlib.h>

#include "pipeline/table.h"

enum { OUT_F, OUT_I };

typedef struct {
    Schedule *s;
    int tick;
    int *end[2];           /* [stages][units] tick from which the output can be used; 0: not made yet */
    int *next[3];          /* [stages] next unit of F, of I or B, of W; units go in order on every stage */
    int *busy;             /* [ranks] tick at which the rank is free again */
    int *live;             /* [ranks] units held from F to W */
    int *fifo;             /* [ranks][chunks * units] stages whose W is to come */
    int *queued, *drained; /* [ranks] how many went in and out */
    int64_t left;          /* actions to go */
} Lists;

static bool open_lists(Lists *l)
{
    const Schedule *s = l->s;
    const size_t places = (size_t)s->stages * (size_t)s->units, ranks = (size_t)s->ranks;
    bool room = true;
    for (int i = 0; i < 2; i++) room &= (l->end[i] = calloc(places, sizeof(int))) != NULL;
    for (int i = 0; i < 3; i++) room &= (l->next[i] = calloc((size_t)s->stages, sizeof(int))) != NULL;
    room &= (l->busy = calloc(ranks, sizeof(int))) != NULL;
    room &= (l->live = calloc(ranks, sizeof(int))) != NULL;
    room &= (l->fifo = calloc(places, sizeof(int))) != NULL;
    room &= (l->queued = calloc(ranks, sizeof(int))) != NULL;
    room &= (l->drained = calloc(ranks, sizeof(int))) != NULL;
    return room;
}

static void close_lists(Lists *l)
{
    for (int i = 0; i < 2; i++) free(l->end[i]);
    for (int i = 0; i < 3; i++) free(l->next[i]);
    free(l->busy);
    free(l->live);
    free(l->fifo);
    free(l->queued);
    free(l->drained);
}

static bool made(const Lists *l, int output, int stage, int unit)
{
    const int end = l->end[output][(int64_t)stage * l->s->units + unit];
    return end > 0 && end <= l->tick;
}

/* Can the stage's next F (or I, or B) start now? */
static bool can_forward(const Lists *l, int stage)
{
    const int unit = l->next[OUT_F][stage];
    return unit < l->s->units && (stage == 0 || made(l, OUT_F, stage - 1, unit));
}

static bool can_backward(const Lists *l, int stage)
{
    const int unit = l->next[OUT_I][stage], last = l->s->stages - 1;
    return unit < l->s->units && made(l, OUT_F, stage, unit) && (stage == last || made(l, OUT_I, stage + 1, unit));
}

static void take(Lists *l, int rank, ActionKind kind, int stage)
{
    const int output = kind == ACT_F ? OUT_F : OUT_I, ticks = kind == ACT_B ? 2 : 1;
    const int unit = l->next[kind == ACT_W ? 2 : output][stage]++;
    schedule_add(l->s, rank, kind, stage, unit);
    l->busy[rank] = l->tick + ticks;
    l->left--;
    if (kind == ACT_F) l->live[rank]++;
    else if (kind != ACT_I) l->live[rank]--;
    if (kind != ACT_W) l->end[output][(int64_t)stage * l->s->units + unit] = l->tick + ticks;
    if (kind == ACT_I) l->fifo[(int64_t)rank * l->s->chunks * l->s->units + l->queued[rank]++] = stage;
}

/* Calls decide(rank) for every free rank in every tick until `left` actions are placed. */
static void run(Lists *l, void (*decide)(Lists *, int rank, const void *), const void *user)
{
    const bool room = open_lists(l);
    /* a list scheduler that can place nothing for this long never will */
    const int64_t patience = 4 * ((int64_t)l->s->stages + 1);
    int64_t idle = 0;
    for (l->tick = 1; room && l->left > 0 && idle < patience && !l->s->no_memory; l->tick++) {
        const int64_t before = l->left;
        for (int r = 0; r < l->s->ranks; r++)
            if (l->busy[r] <= l->tick) decide(l, r, user);
        idle = l->left < before ? 0 : idle + 1;
    }
    l->s->no_memory |= !room;
    close_lists(l);
}

/* ---- V ---- */

typedef struct {
    const double *when;
    int cap;
} Plan;

static double planned(const Lists *l, const Plan *p, int rank, int leg, bool input)
{
    const int stage = schedule_stage_at(l->s, rank, 0, leg), unit = l->next[input][stage];
    return p->when[list_plan_place(l->s, rank, leg, input, unit)];
}

/* Forwards of the second leg to come that the plan has before `time`. */
static int owed(const Lists *l, const Plan *p, int rank, double time)
{
    const int stage = schedule_stage_at(l->s, rank, 0, 1);
    int n = 0;
    for (int k = l->next[OUT_F][stage]; k < l->s->units; k++, n++)
        if (p->when[list_plan_place(l->s, rank, 1, false, k)] >= time) break;
    return n;
}

static bool admitted(const Lists *l, const Plan *p, int rank, int leg)
{
    if (leg == 1) return l->live[rank] < p->cap;
    return l->live[rank] + 1 + owed(l, p, rank, planned(l, p, rank, 0, false)) <= p->cap;
}

static void decide_v(Lists *l, int rank, const void *user)
{
    const Plan *p = user;
    int best = -1;
    for (int c = 0; c < 4; c++) { /* leg c / 2; F, then I */
        const int leg = c / 2, stage = schedule_stage_at(l->s, rank, 0, leg);
        const bool input = c % 2;
        if (input ? !can_backward(l, stage) : !can_forward(l, stage) || !admitted(l, p, rank, leg)) continue;
        if (best < 0 || planned(l, p, rank, leg, input) < planned(l, p, rank, best / 2, best % 2)) best = c;
    }
    if (best >= 0) take(l, rank, best % 2 ? ACT_I : ACT_F, schedule_stage_at(l->s, rank, 0, best / 2));
    else if (l->drained[rank] < l->queued[rank])
        take(l, rank, ACT_W, l->fifo[(int64_t)rank * l->s->chunks * l->s->units + l->drained[rank]++]);
}

void list_schedule_v(Schedule *s, const double *when, int cap)
{
    Lists l = { .s = s, .left = 3 * (int64_t)s->stages * s->units };
    run(&l, decide_v, &(Plan){ when, cap });
}

/* ---- waves ---- */

static void decide_wave(Lists *l, int rank, const void *user)
{
    const int open = *(const int *)user;
    for (int c = 0; c < l->s->chunks; c++) {
        const int stage = schedule_stage_at(l->s, rank, 0, c);
        if (!can_backward(l, stage)) continue;
        take(l, rank, ACT_B, stage);
        return;
    }
    for (int c = l->s->chunks - 1; c >= 0; c--) {
        const int stage = schedule_stage_at(l->s, rank, 0, c);
        if (!can_forward(l, stage)) continue;
        if (stage == 0 && l->next[OUT_F][0] - l->next[OUT_I][0] >= open) continue;
        take(l, rank, ACT_F, stage);
        return;
    }
}

void list_schedule_wave(Schedule *s, int open)
{
    Lists l = { .s = s, .left = 2 * (int64_t)s->stages * s->units };
    run(&l, decide_wave, &open);
}

/* ---- forwards alone ---- */

static void decide_forward(Lists *l, int rank, const void *user)
{
    (void)user;
    for (int c = l->s->chunks - 1; c >= 0; c--) {
        const int stage = schedule_stage_at(l->s, rank, 0, c);
        if (!can_forward(l, stage)) continue;
        take(l, rank, ACT_F, stage);
        return;
    }
}

void list_schedule_forward(Schedule *s)
{
    Lists l = { .s = s, .left = (int64_t)s->stages * s->units };
    run(&l, decide_forward, NULL);
}
