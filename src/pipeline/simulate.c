/*
 * See simulate.h. Event-driven: a rank runs on until its next action lacks an output, and is woken by the
 * action that makes it. Lists are in order and messages disturb nobody, so the times do not depend on the
 * order in which ranks are looked at, and each action is looked at a bounded number of times.
 * Ranks that share processors go on from one begin or end of an action to the next, all together.
 */
#include "pipeline/simulate.h"

#include <math.h>
#include <stdlib.h>

enum { OUT_F, OUT_I, OUT_KINDS };

struct Simulator {
    const Schedule *s;
    const SimulateCosts *costs;
    Simulation out;
    double *made[OUT_KINDS]; /* [replicas][stages][units] when the output was ready; negative: not yet */
    int *waiter[OUT_KINDS];  /* the same shape: 1 + the rank that waits for it, 0: none */
    int *next;               /* [ranks] place in the list */
    double *clock;           /* [ranks] */
    double *left;            /* [ranks] of the action that it runs; negative: none */
    int *ready;              /* [ranks] stack of ranks to look at */
    int ready_count;
};

/* An output that an action needs. */
typedef struct {
    int kind, replica, stage, unit;
} Need;

/* The i-th of the up to two outputs that one unit of `a` needs; false behind the last. */
static bool need_of(const Schedule *s, const Action *a, int i, Need *n)
{
    *n = (Need){ OUT_F, a->replica, a->stage, 0 };
    if (a->kind == ACT_F) n->stage--;
    if (a->kind == ACT_W) n->kind = OUT_I;
    if (i == 1) *n = (Need){ OUT_I, a->replica, a->stage + 1, 0 };
    bool backward = a->kind == ACT_B || a->kind == ACT_I;
    return n->stage >= 0 && n->stage < s->stages && (i == 0 || (i == 1 && backward));
}

static double message_time(const Simulator *r, int replica, int from, int to)
{
    const SimulateCosts *c = r->costs;
    const int a = schedule_rank_of(r->s, replica, from), b = schedule_rank_of(r->s, replica, to);
    const int low = a < b ? a : b, high = a < b ? b : a;
    if (a == b) return 0;
    const double hop = c->hop ? c->hop[high - low == 1 ? low : high] : 0;
    return c->latency + hop + (c->bandwidth > 0 ? c->bytes / c->bandwidth : 0);
}

/* Moves *start to when all that `a` needs has arrived; false, with what lacks, if something was not made yet. */
static bool arrived(const Simulator *r, const Action *a, double *start, Need *lacks)
{
    Need n;
    for (int i = 0; need_of(r->s, a, i, &n) || i == 0; i++)
        for (int k = 0; k < a->count && need_of(r->s, a, i, &n); k++) {
            n.unit = a->microbatch + k;
            double at = r->made[n.kind][schedule_place(r->s, n.replica, n.stage, n.unit)];
            *lacks = n;
            if (at < 0) return false;
            at += message_time(r, n.replica, n.stage, a->stage);
            if (at > *start) *start = at;
        }
    return true;
}

static const StageCost *costs_of(const Simulator *r, const Action *a)
{
    return r->costs->stage ? &r->costs->stage[a->stage] : &r->costs->each;
}

static double cost_of(const Simulator *r, const Action *a)
{
    const StageCost *c = costs_of(r, a);
    double one = a->kind == ACT_F ? c->f : a->kind == ACT_I ? c->i : a->kind == ACT_W ? c->w : c->i + c->w;
    return a->count * one;
}

static int halves_of(const Action *a) { return a->flags & ACTION_PAIR ? 2 : 1; }

/* When the action, or the pair that it begins, ends if it starts then. */
static double end_of(const Simulator *r, const Action *a, double start)
{
    const int halves = halves_of(a);
    double end = start;
    for (int h = 0; h < halves; h++) end += cost_of(r, &a[h]);
    return halves == 2 ? end - costs_of(r, a)->pair : end;
}

static void wake(Simulator *r, int *waiter)
{
    if (*waiter) r->ready[r->ready_count++] = *waiter - 1;
    *waiter = 0;
}

static void publish(Simulator *r, const Action *a, double at)
{
    if (a->kind == ACT_W) return;
    int kind = a->kind == ACT_F ? OUT_F : OUT_I;
    for (int k = 0; k < a->count; k++) {
        int64_t i = schedule_place(r->s, a->replica, a->stage, a->microbatch + k);
        r->made[kind][i] = at;
        wake(r, &r->waiter[kind][i]);
    }
}

/* Runs the action at the rank's place, and with it the second half of a pair; false if it has to wait. */
static bool run_one(Simulator *r, int rank)
{
    const Action *a = &r->s->rank[rank].action[r->next[rank]];
    const int halves = halves_of(a);
    Span *span = &r->out.span[rank][r->next[rank]];
    double start = r->clock[rank], end;
    Need lacks;
    for (int h = 0; h < halves; h++)
        if (!arrived(r, &a[h], &start, &lacks)) {
            r->waiter[lacks.kind][schedule_place(r->s, lacks.replica, lacks.stage, lacks.unit)] = rank + 1;
            return false;
        }
    end = end_of(r, a, start);
    for (int h = 0; h < halves; h++) {
        span[h] = (Span){ start, end };
        publish(r, &a[h], end);
    }
    r->clock[rank] = end;
    r->next[rank] += halves;
    return true;
}

static void run_rank(Simulator *r, int rank)
{
    const ActionList *list = &r->s->rank[rank];
    while (r->next[rank] < list->count)
        if (!action_is_compute(list->action[r->next[rank]].kind)) r->next[rank]++;
        else if (!run_one(r, rank)) return;
}

static Err stuck(const Simulator *r, int rank)
{
    const Action *a = &r->s->rank[rank].action[r->next[rank]];
    const int halves = halves_of(a);
    double start = 0;
    Need n = { 0 };
    for (int h = 0; h < halves; h++)
        if (!arrived(r, &a[h], &start, &n)) break;
    return err_set(ERR_INTERNAL,
                   "cycle: rank %d waits for ever with %s of unit %d at stage %d for %s of unit %d at stage %d", rank,
                   action_name(a->kind), a->microbatch, a->stage, n.kind == OUT_F ? "F" : "I", n.unit, n.stage);
}

/* ---- ranks that share processors ---- */

/* Lets the rank begin its next action if it runs none and what that needs has arrived; else *next may become the time
 * when it will have. */
static void begin_shared(Simulator *r, int rank, double now, double *next)
{
    const ActionList *list = &r->s->rank[rank];
    const Action *a = &list->action[r->next[rank]];
    double start = 0;
    Need lacks;
    if (r->left[rank] >= 0 || r->next[rank] == list->count) return;
    for (int h = 0; h < halves_of(a); h++)
        if (!arrived(r, &a[h], &start, &lacks)) return;
    if (start > now) {
        *next = fmin(*next, start);
        return;
    }
    r->left[rank] = end_of(r, a, 0);
    for (int h = 0; h < halves_of(a); h++) r->out.span[rank][r->next[rank] + h].start = now;
}

static void skip_others(Simulator *r, int rank)
{
    const ActionList *list = &r->s->rank[rank];
    while (r->next[rank] < list->count && !action_is_compute(list->action[r->next[rank]].kind)) r->next[rank]++;
}

static void end_shared(Simulator *r, int rank, double now)
{
    const Action *a = &r->s->rank[rank].action[r->next[rank]];
    const int halves = halves_of(a);
    for (int h = 0; h < halves; h++) {
        r->out.span[rank][r->next[rank] + h].end = now;
        publish(r, &a[h], now);
    }
    r->left[rank] = -1;
    r->next[rank] += halves;
    skip_others(r, rank);
}

/* Up to where the next of them begins or ends; false: none runs and none will. */
static bool go_on_shared(Simulator *r, double *now)
{
    int running = 0;
    double next = INFINITY, least = INFINITY;
    for (int i = 0; i < r->s->ranks; i++) {
        begin_shared(r, i, *now, &next);
        if (r->left[i] < 0) continue;
        running++;
        least = fmin(least, r->left[i]);
    }
    if (!running && isinf(next)) return false;
    const double pace = fmin(1, r->costs->processors / running), end = *now + least / pace;
    const bool ends = end <= next;
    const double done = ends ? least : (next - *now) * pace;
    *now = ends ? end : next;
    for (int i = 0; i < r->s->ranks; i++)
        if (r->left[i] >= 0 && (r->left[i] -= done) <= 0) end_shared(r, i, *now);
    return true;
}

static void run_shared(Simulator *r)
{
    double now = 0;
    for (int i = 0; i < r->s->ranks; i++) r->left[i] = -1, skip_others(r, i);
    while (go_on_shared(r, &now)) continue;
}

/* ---- the whole ---- */

static Err take_memory(Simulator *r)
{
    const Schedule *s = r->s;
    const int64_t places = (int64_t)s->replicas * s->stages * s->units;
    bool room = (r->next = calloc((size_t)s->ranks, sizeof *r->next)) != NULL;
    room &= (r->clock = calloc((size_t)s->ranks, sizeof *r->clock)) != NULL;
    room &= (r->left = calloc((size_t)s->ranks, sizeof *r->left)) != NULL;
    room &= (r->ready = calloc((size_t)s->ranks, sizeof *r->ready)) != NULL;
    for (int k = 0; k < OUT_KINDS; k++) {
        room &= (r->made[k] = calloc((size_t)places, sizeof *r->made[k])) != NULL;
        room &= (r->waiter[k] = calloc((size_t)places, sizeof *r->waiter[k])) != NULL;
    }
    room &= (r->out.span = calloc((size_t)s->ranks, sizeof *r->out.span)) != NULL;
    for (int i = 0; room && i < s->ranks; i++)
        room = (r->out.span[i] = calloc((size_t)s->rank[i].count + 1, sizeof **r->out.span)) != NULL;
    return room ? ERR_OK : err_set(ERR_MEMORY, "no memory to simulate %d units on %d ranks", s->units, s->ranks);
}

static void measure(const Schedule *s, Simulation *out)
{
    double span_bubble = 0, work;
    for (int r = 0; r < s->ranks; r++) {
        double first = -1, last = 0;
        work = 0;
        for (int i = 0; i < s->rank[r].count; i++) {
            const Span *t = &out->span[r][i];
            if (!action_is_compute(s->rank[r].action[i].kind)) continue;
            if (first < 0) first = t->start;
            bool second = i > 0 && s->rank[r].action[i - 1].flags & ACTION_PAIR;
            work += second ? 0 : t->end - t->start;
            last = t->end;
        }
        if (last > out->makespan) out->makespan = last;
        if (work > out->ideal) out->ideal = work;
        if (last - first - work > span_bubble) span_bubble = last - first - work;
    }
    out->span_bubble = span_bubble;
    out->bubble = out->makespan - out->ideal;
}

static Err run_all(Simulator *r)
{
    for (int i = r->s->ranks - 1; i >= 0; i--) r->ready[r->ready_count++] = i;
    if (r->costs->processors > 0) run_shared(r), r->ready_count = 0;
    while (r->ready_count > 0) run_rank(r, r->ready[--r->ready_count]);
    for (int i = 0; i < r->s->ranks; i++)
        if (r->next[i] < r->s->rank[i].count) return stuck(r, i);
    measure(r->s, &r->out);
    return ERR_OK;
}

Err simulator_open(const Schedule *s, Simulator **out)
{
    Simulator *r = calloc(1, sizeof *r);
    *out = NULL;
    if (!r) return err_set(ERR_MEMORY, "no memory to simulate a schedule");
    r->s = s;
    Err err = take_memory(r);
    if (err) simulator_close(r);
    else *out = r;
    return err;
}

Err simulator_run(Simulator *r, const SimulateCosts *costs, const Simulation **out)
{
    const Schedule *s = r->s;
    const int64_t places = (int64_t)s->replicas * s->stages * s->units;
    r->costs = costs;
    r->out = (Simulation){ .span = r->out.span };
    r->ready_count = 0;
    for (int i = 0; i < s->ranks; i++) r->clock[i] = r->next[i] = 0;
    for (int k = 0; k < OUT_KINDS; k++)
        for (int64_t i = 0; i < places; i++) r->made[k][i] = -1, r->waiter[k][i] = 0;
    *out = &r->out;
    return run_all(r);
}

void simulator_close(Simulator *r)
{
    if (!r) return;
    for (int k = 0; k < OUT_KINDS; k++) {
        free(r->made[k]);
        free(r->waiter[k]);
    }
    free(r->next);
    free(r->clock);
    free(r->left);
    free(r->ready);
    simulation_free(&r->out, r->s);
    free(r);
}

Err simulate(const Schedule *s, const SimulateCosts *costs, Simulation *out)
{
    Simulator *r;
    const Simulation *result;
    *out = (Simulation){ 0 };
    TRY(simulator_open(s, &r));
    Err err = simulator_run(r, costs, &result);
    *out = r->out;
    r->out.span = NULL; /* they are the caller's now */
    simulator_close(r);
    return err;
}

void simulation_free(Simulation *sim, const Schedule *s)
{
    for (int i = 0; sim->span && i < s->ranks; i++) free(sim->span[i]);
    free(sim->span);
    *sim = (Simulation){ 0 };
}

double simulation_idle(const Schedule *s, const Simulation *sim)
{
    double busy = 0;
    for (int r = 0; r < s->ranks; r++) {
        double end = 0;
        for (int i = 0; i < s->rank[r].count; i++) {
            const Span t = sim->span[r][i];
            if (!action_is_compute(s->rank[r].action[i].kind) || t.end <= end) continue;
            busy += t.end - (t.start > end ? t.start : end); /* (pairs share their time) */
            end = t.end;
        }
    }
    return 1 - busy / (s->ranks * sim->makespan);
}

/* ---- memory ---- */

int simulate_peak(const Schedule *s, int rank, bool until_input)
{
    int now = 0, most = 0;
    for (int i = 0; i < s->rank[rank].count; i++) {
        const Action *a = &s->rank[rank].action[i];
        if (a->kind == ACT_F && (now += a->count) > most) most = now;
        if (a->kind == ACT_B || a->kind == (until_input ? ACT_I : ACT_W)) now -= a->count;
    }
    return most;
}

int simulate_weight_copies(const Schedule *s, int rank)
{
    const ActionList *list = &s->rank[rank];
    int newest = 0, oldest, most = 1;
    if (s->versions == VERSIONS_STEP) return s->replicas;
    for (int i = 0; i < list->count; i++) newest += list->action[i].kind == ACT_UPDATE;
    oldest = newest;
    for (int i = list->count - 1; i >= 0; i--) { /* backwards: what is still to be read */
        const Action *a = &list->action[i];
        const bool reads = a->kind == ACT_F || a->kind == ACT_B || a->kind == ACT_I;
        if (reads && newest - a->version < oldest) oldest = newest - a->version;
        if (newest - oldest + 1 > most) most = newest - oldest + 1;
        if (a->kind == ACT_UPDATE && oldest > --newest) oldest = newest;
    }
    return most;
}
