/*
 * Generators with V placement: rank r holds stage r of the way out (leg a) and stage 2p - 1 - r of the way
 * back (leg b). Backwards are split.
 */
#include <stdlib.h>

#include "pipeline/list.h"
#include "pipeline/simulate.h"
#include "pipeline/table.h"

enum { LEGS = 2 };

typedef struct {
    Schedule *s;
    int rank;
    int f[LEGS], i[LEGS], w[LEGS]; /* how many so far */
} Legs;

static void add(Legs *l, ActionKind kind, int leg)
{
    int *next = kind == ACT_F ? l->f : kind == ACT_I ? l->i : l->w;
    schedule_add(l->s, l->rank, kind, schedule_stage_at(l->s, l->rank, 0, leg), next[leg]++);
}

/* ---- ZB-V ---- */

static void zb_v_rank(Legs *l, int p, int r, int units)
{
    for (int i = 0; i < 2 * (p - r) - 1; i++) add(l, ACT_F, 0);
    for (int i = 0; i < r; i++) add(l, ACT_F, 1), add(l, ACT_F, 0);
    for (int i = 0; i < p - r; i++) add(l, ACT_F, 1), add(l, ACT_I, 1), add(l, ACT_W, 1);
    while (l->f[1] < units) {
        if (l->f[0] < units) add(l, ACT_F, 0);
        add(l, ACT_I, 0), add(l, ACT_W, 0);
        add(l, ACT_F, 1), add(l, ACT_I, 1), add(l, ACT_W, 1);
    }
    for (int i = 0; i < r; i++) add(l, ACT_I, 0), add(l, ACT_I, 1);
    for (int i = 0; i < p - r; i++) add(l, ACT_I, 0), add(l, ACT_W, 0);
    while (l->w[1] < units) add(l, ACT_W, 1);
    while (l->w[0] < units) add(l, ACT_W, 0);
}

/* The closed form; needs 2p - 1 units. */
static void zb_v_full(Schedule *s)
{
    for (int r = 0; r < s->ranks; r++) {
        Legs l = { .s = s, .rank = r };
        zb_v_rank(&l, s->ranks, r, s->units);
    }
}

/* A schedule of the same shape with lists of its own. */
static Schedule sibling(const Schedule *s, int units)
{
    Schedule t = *s;
    t.units = units;
    t.unit_replica = NULL;
    t.rank = calloc((size_t)s->ranks, sizeof *t.rank);
    t.no_memory = !t.rank;
    return t;
}

static void drop_surplus(Schedule *t, int units)
{
    for (int r = 0; r < t->ranks; r++) {
        ActionList *list = &t->rank[r];
        int kept = 0;
        for (int i = 0; i < list->count; i++)
            if (list->action[i].microbatch < units) list->action[kept++] = list->action[i];
        list->count = kept;
    }
    t->units = units;
}

/* Starts of F and I in the closed form, as a plan for the list scheduler. */
static double *plan_of(const Schedule *s, const Schedule *full, const Simulation *sim)
{
    double *when = calloc((size_t)s->ranks * 4 * (size_t)s->units, sizeof *when);
    for (int r = 0; when && r < s->ranks; r++)
        for (int i = 0; i < full->rank[r].count; i++) {
            const Action *a = &full->rank[r].action[i];
            if (a->kind == ACT_W || a->microbatch >= s->units) continue;
            const int leg = schedule_chunk_of(s, a->stage);
            when[list_plan_place(s, r, leg, a->kind == ACT_I, a->microbatch)] = sim->span[r][i].start;
        }
    return when;
}

static double makespan(const Schedule *s)
{
    Simulation sim;
    double time = simulate(s, &(SimulateCosts){ .each = { 1, 1, 1 } }, &sim) ? -1 : sim.makespan;
    simulation_free(&sim, s);
    return time;
}

static void keep_lists(Schedule *s, Schedule *from)
{
    ActionList *rank = s->rank;
    s->rank = from->rank;
    from->rank = rank;
}

/* Fewer units than the closed form needs: the shorter of its list without the surplus, and list scheduling. */
static void zb_v_short(Schedule *s)
{
    Schedule full = sibling(s, 2 * s->ranks - 1);
    Simulation sim = { 0 };
    double *when = NULL;
    if (!full.no_memory) zb_v_full(&full);
    if (!full.no_memory && !simulate(&full, &(SimulateCosts){ .each = { 1, 1, 1 } }, &sim))
        when = plan_of(s, &full, &sim);
    simulation_free(&sim, &full);
    if (when) {
        list_schedule_v(s, when, 2 * s->ranks);
        drop_surplus(&full, s->units);
        if (makespan(&full) < makespan(s)) keep_lists(s, &full);
    }
    s->no_memory |= !when;
    free(when);
    schedule_free(&full);
}

/* Source: Qi et al. 2024 (Zero Bubble, section on ZB-V). */
void generate_zb_v(Schedule *s)
{
    if (s->units >= 2 * s->ranks - 1) zb_v_full(s);
    else zb_v_short(s);
}

/* ---- V-Min and V-Half: a building block repeated every 6 ticks ---- */

enum { PERIOD = 6 };

/* Ticks of Fa, Fb, Ia, Ib of unit 0 on a rank; the free ticks hold W. */
typedef struct {
    int at[2][LEGS]; /* [F, I][leg] */
} Block;

static Block v_min_block(int p, int r)
{
    const int d = p % 3 == 0 ? 2 : 0;
    return (Block){ { { r, 2 * p - 1 - r }, { 4 * p + d - 1 - r, 2 * p + d + r } } };
}

static Block v_half_block(int p, int r)
{
    const int d = p % 2 == 0 ? 3 : 0;
    return (Block){ { { 2 * r, 3 * p - 2 - r }, { 6 * p + d - 2 - r, 3 * p + d + 2 * r - 1 } } };
}

/* Adds what the block has at this tick; false if it is free. */
static bool add_planned(Legs *l, const Block *b, int tick, int *fifo, int *pending)
{
    for (int kind = 0; kind < 2; kind++)
        for (int leg = 0; leg < LEGS; leg++) {
            const int behind = tick - b->at[kind][leg];
            if (behind < 0 || behind % PERIOD || behind / PERIOD >= l->s->units) continue;
            add(l, kind ? ACT_I : ACT_F, leg);
            if (kind) fifo[(*pending)++] = leg;
            return true;
        }
    return false;
}

/* The grid's order, each rank as soon as it can. */
static void run_grid(Schedule *s, Block (*block)(int p, int r))
{
    int *fifo = calloc((size_t)LEGS * (size_t)s->units, sizeof *fifo); /* legs in the order of their I */
    for (int r = 0; fifo && r < s->ranks; r++) {
        Legs l = { .s = s, .rank = r };
        const Block b = block(s->ranks, r);
        for (int tick = 0, pending = 0, done = 0; done < LEGS * s->units; tick++)
            if (!add_planned(&l, &b, tick, fifo, &pending) && done < pending) add(&l, ACT_W, fifo[done++]);
    }
    s->no_memory |= !fifo;
    free(fifo);
}

/* Source: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory). */
void generate_v_min(Schedule *s) { run_grid(s, v_min_block); }

/* List scheduling along the grid's times, with no more memory than the grid's order takes. */
void generate_v_half(Schedule *s)
{
    Schedule raw = sibling(s, s->units);
    double *when = calloc((size_t)s->ranks * 4 * (size_t)s->units, sizeof *when);
    int cap = 0;
    if (!raw.no_memory) run_grid(&raw, v_half_block);
    for (int r = 0; when && !raw.no_memory && r < s->ranks; r++) {
        const Block b = v_half_block(s->ranks, r);
        const int peak = simulate_peak(&raw, r, false);
        if (peak > cap) cap = peak;
        for (int kind = 0; kind < 2; kind++)
            for (int leg = 0; leg < LEGS; leg++)
                for (int k = 0; k < s->units; k++)
                    when[list_plan_place(s, r, leg, kind, k)] = b.at[kind][leg] + PERIOD * k;
    }
    if (cap) list_schedule_v(s, when, cap);
    s->no_memory |= !when || raw.no_memory;
    free(when);
    schedule_free(&raw);
}
