/*
 * See partition.h. A cell of the table is (stages so far, items so far) and keeps its best partial cuts. The bound of a
 * stage needs nothing of the cut before it but how much work that is, a prefix sum, so that partial bounds combine by a
 * maximum.
 */
#include "plan/partition.h"

#include <stdlib.h>
#include <string.h>

/* A partial cut: its last stage begins behind item `from`, where it goes on as the `entry`-th of that cell. */
typedef struct {
    double bound, squares;
    int16_t from, entry;
} Partial;

typedef struct {
    Partial best[PARTITION_BEST];
    int count;
} Cell;

/* Sums over the items before each. */
typedef struct {
    double all, forward;
    int64_t state, kept;
} Prefix;

typedef struct {
    const Chain *c;
    Prefix *prefix; /* [count + 1] */
    Cell *cells;    /* [stages][count + 1] */
    int most;
} Table;

static double seconds(StageCost s) { return s.f + s.i + s.w; }

static void sum_items(const Chain *c, Prefix *p)
{
    p[0] = (Prefix){ 0 };
    for (int i = 0; i < c->count; i++) {
        const ChainItem *it = &c->items[i];
        p[i + 1] = (Prefix){ .all = p[i].all + seconds(it->cost),
                             .forward = p[i].forward + it->cost.f,
                             .state = p[i].state + it->state,
                             .kept = p[i].kept + it->kept };
    }
}

/* The stage `s` of the items from `from` up to before `to`: what of the step it makes at least. */
static double stage_bound(const Chain *c, const Prefix *p, int s, int from, int to)
{
    const double before = c->split ? p[from].forward + s * c->hop : p[from].all + 2 * s * c->hop;
    return c->units * (p[to].all - p[from].all) + before;
}

static bool stage_fits(const Chain *c, const Prefix *p, int s, int from, int to)
{
    const int64_t kept = p[to].kept - p[from].kept, state = p[to].state - p[from].state;
    int64_t all;
    return !__builtin_mul_overflow(kept, (int64_t)c->in_flight[s], &all) && !__builtin_add_overflow(all, state, &all) &&
           all <= c->limit;
}

/* (a wgrad of the first unit may be done beside its way) */
static double unit_bound(const Chain *c, const Prefix *p)
{
    double w = 0;
    for (int i = 0; i < c->count; i++) w += c->split ? c->items[i].cost.w : 0;
    return p[c->count].all - w + 2 * (c->stages - 1) * c->hop;
}

static bool is_better(const Partial *a, const Partial *b)
{
    if (a->bound < b->bound || a->bound > b->bound) return a->bound < b->bound;
    if (a->squares < b->squares || a->squares > b->squares) return a->squares < b->squares;
    return a->from != b->from ? a->from < b->from : a->entry < b->entry;
}

static void keep(Cell *cell, int most, Partial p)
{
    if (cell->count == most && !is_better(&p, &cell->best[most - 1])) return;
    int i = cell->count < most ? cell->count++ : most - 1;
    for (; i > 0 && is_better(&p, &cell->best[i - 1]); i--) cell->best[i] = cell->best[i - 1];
    cell->best[i] = p;
}

static Cell *cell_at(const Table *t, int stage, int items)
{
    return &t->cells[(size_t)stage * (size_t)(t->c->count + 1) + (size_t)items];
}

/* Stage s of items [from, to), behind each of the partial cuts that end at `from`. */
static void extend(const Table *t, int s, int from, int to)
{
    const Chain *c = t->c;
    if (!stage_fits(c, t->prefix, s, from, to)) return;
    const double bound = stage_bound(c, t->prefix, s, from, to);
    const double own = t->prefix[to].all - t->prefix[from].all;
    if (!s) {
        keep(cell_at(t, s, to), t->most, (Partial){ bound, own * own, 0, 0 });
        return;
    }
    const Cell *before = cell_at(t, s - 1, from);
    for (int e = 0; e < before->count; e++) {
        const Partial *b = &before->best[e];
        keep(cell_at(t, s, to), t->most,
             (Partial){ b->bound > bound ? b->bound : bound, b->squares + own * own, (int16_t)from, (int16_t)e });
    }
}

static void fill(const Table *t)
{
    const int stages = t->c->stages, items = t->c->count;
    for (int s = 0; s < stages; s++)
        for (int to = s + 1; to <= items - (stages - 1 - s); to++)
            for (int from = s; from < (s ? to : 1); from++) extend(t, s, from, to);
}

static ChainCut trace(const Table *t, int entry)
{
    ChainCut cut;
    memset(&cut, 0, sizeof cut);
    int to = t->c->count;
    cut.bound = cell_at(t, t->c->stages - 1, to)->best[entry].bound;
    for (int s = t->c->stages - 1; s >= 0; s--) {
        const Partial p = cell_at(t, s, to)->best[entry];
        cut.end[s] = (int16_t)to;
        to = p.from, entry = p.entry;
    }
    return cut;
}

Err partition(const Chain *c, int most, ChainCut *cuts, int *count)
{
    Table t = { .c = c, .most = most };
    *count = 0;
    ASSERT(most > 0 && most <= PARTITION_BEST && c->stages > 0 && c->stages <= PARTITION_STAGES);
    ASSERT(c->count <= PARTITION_ITEMS);
    if (c->count < c->stages) return ERR_OK;
    t.prefix = calloc((size_t)c->count + 1, sizeof *t.prefix);
    t.cells = calloc((size_t)c->stages * (size_t)(c->count + 1), sizeof *t.cells);
    if (t.prefix && t.cells) {
        sum_items(c, t.prefix);
        fill(&t);
        const double least = unit_bound(c, t.prefix);
        *count = cell_at(&t, c->stages - 1, c->count)->count;
        for (int i = 0; i < *count; i++) {
            cuts[i] = trace(&t, i);
            if (cuts[i].bound < least) cuts[i].bound = least;
        }
    }
    const bool made = t.prefix && t.cells;
    free(t.prefix);
    free(t.cells);
    return made ? ERR_OK : err_set(ERR_MEMORY, "no memory to cut %d items into %d stages", c->count, c->stages);
}

double partition_bound(const Chain *c, const int16_t *end)
{
    static _Thread_local Prefix p[1 + PARTITION_ITEMS]; /* too large for a stack */
    sum_items(c, p);
    double most = unit_bound(c, p);
    for (int s = 0; s < c->stages; s++) {
        const double b = stage_bound(c, p, s, s ? end[s - 1] : 0, end[s]);
        if (b > most) most = b;
    }
    return most;
}

bool partition_fits(const Chain *c, const int16_t *end)
{
    static _Thread_local Prefix p[1 + PARTITION_ITEMS]; /* too large for a stack */
    sum_items(c, p);
    for (int s = 0; s < c->stages; s++)
        if (!stage_fits(c, p, s, s ? end[s - 1] : 0, end[s])) return false;
    return true;
}
