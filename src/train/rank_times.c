/* See rank_times.h. */
#include "train/rank_times.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

/* Every rank's name of its host. */
static Err gather_hosts(RankTimes *t)
{
    char own[RANK_HOST_BYTES] = "";
    if (gethostname(own, sizeof own - 1)) strcpy(own, "unknown");
    const int64_t words = RANK_HOST_BYTES / (int64_t)sizeof(int64_t);
    return comm_all_gather(&t->world->host, t->stream, tensor_of(t->host, I64, t->world->size, words),
                           tensor_of(own, I64, 1, words), NULL);
}

Err rank_times_open(RankTimes *t, World *world, Stream *stream, SetupArena *memory)
{
    *t = (RankTimes){ .world = world, .stream = stream, .named = -1 };
    TRY(setup_array(memory, 2 * world->size, &t->ns));
    TRY(setup_array(memory, world->size, &t->sorted));
    TRY(setup_array(memory, world->size, &t->host));
    return gather_hosts(t);
}

/* ---- who is slow ---- */

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* (a share of nothing is no number to show) */
static const double MEDIAN_LEAST_MS = 1e-3;

/* Least, median and most of a time, ms: of all ranks, or of the ranks of one stage. */
enum { ALL_STAGES = -1 };
static void spread(RankTimes *t, Grid grid, const int64_t *ns, int stage, double out[3])
{
    int n = 0;
    for (int r = 0; r < grid_size(grid); r++)
        if (stage == ALL_STAGES || grid_coords(grid, r).pp == stage) t->sorted[n++] = 1e-6 * (double)ns[r];
    qsort(t->sorted, (size_t)n, sizeof *t->sorted, ascending);
    out[0] = t->sorted[0];
    out[1] = t->sorted[(n - 1) / 2];
    out[2] = t->sorted[n - 1];
}

/* Is each rank a stage, so that its peers are other stages? */
static bool stages_are_single(Grid grid) { return grid.pp > 1 && grid_size(grid) == grid.pp; }

void rank_times_compare(RankTimes *t, Grid grid, MetricsRanks *out)
{
    const int size = grid_size(grid), stages = grid.pp > 0 ? grid.pp : 1;
    const bool alone = stages_are_single(grid);
    double peers[3];
    *out = (MetricsRanks){ .measured = true, .lag_ms = -1 };
    spread(t, grid, t->ns, ALL_STAGES, out->compute_ms);
    spread(t, grid, t->ns + size, ALL_STAGES, out->wait_ms);
    for (int stage = 0; stage < (alone ? 1 : stages); stage++) {
        spread(t, grid, t->ns, alone ? ALL_STAGES : stage, peers);
        if (!(peers[2] - peers[1] > out->lag_ms)) continue;
        out->lag_ms = peers[2] - peers[1];
        out->lag = out->lag_ms / fmax(peers[1], MEDIAN_LEAST_MS);
        for (int r = size - 1; r >= 0; r--)
            if ((alone || grid_coords(grid, r).pp == stage) && 1e-6 * (double)t->ns[r] == peers[2]) out->slowest = r;
    }
}

/* ---- who stays slow ---- */

static void say_slow(const RankTimes *t, const MetricsRanks *m)
{
    const GridCoords at = grid_coords(t->world->grid, m->slowest);
    log_warn("rank %d (host '%s'; pp %d, dp %d, cp %d, tp %d) is slow: in each of %d steps it computed at "
             "least %.0f %% "
             "longer than its peers, now %.0f %%, and they wait for it%s",
             m->slowest, t->host[m->slowest], at.pp, at.dp, at.cp, at.tp, LAG_STEPS, 100 * LAG_NOTABLE, 100 * m->lag,
             stages_are_single(t->world->grid)
                 ? "; its peers are other stages of the pipeline, which may have less work: parallel.layout "
                   "says which blocks are whose"
                 : "");
}

static void follow(RankTimes *t, MetricsRanks *m)
{
    const bool lags = m->lag >= LAG_NOTABLE;
    t->streak = !lags ? 0 : m->slowest == t->slow ? t->streak + 1 : 1;
    t->slow = m->slowest;
    m->notable = t->streak >= LAG_STEPS;
    if (!m->notable || t->named == m->slowest) return;
    t->named = m->slowest;
    if (t->world->rank == 0) say_slow(t, m);
}

Err rank_times_share(RankTimes *t, double compute_s, double wait_s, MetricsRanks *out)
{
    const int size = t->world->size, rank = t->world->rank;
    memset(t->ns, 0, 2 * (size_t)size * sizeof *t->ns);
    t->ns[rank] = (int64_t)(1e9 * compute_s);
    t->ns[size + rank] = (int64_t)(1e9 * wait_s);
    TRY(comm_sum_i64(&t->world->host, t->stream, t->ns, 2 * size, NULL)); /* (each its own: a gather) */
    rank_times_compare(t, t->world->grid, out);
    follow(t, out);
    return ERR_OK;
}
