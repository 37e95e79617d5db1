/* See plan.h: how long a step takes, and what it is spent on. */
#include <stdio.h>
#include <stdlib.h>

#include "base/json.h"
#include "cli/plan.h"

/* A share of the step, by name; of waiting for ranks by group. */
typedef struct {
    char name[48];
    double seconds;
} Share;

enum { SHARES_MOST = FAMILIES + WORLD_COMMS + 2 };

static int by_seconds(const void *a, const void *b)
{
    const double x = ((const Share *)a)->seconds, y = ((const Share *)b)->seconds;
    return (x < y) - (x > y);
}

/* Those above 0, the largest first; their number. */
static int shares_of(const Prediction *p, Share out[SHARES_MOST])
{
    Share all[SHARES_MOST];
    int n = 0, kept = 0;
    for (int i = 0; i < FAMILIES; i++, n++) {
        snprintf(all[n].name, sizeof all[n].name, "%s", family_name((OpFamily)i));
        all[n].seconds = p->shares.family[i];
    }
    for (int i = 0; i < WORLD_COMMS; i++, n++) {
        snprintf(all[n].name, sizeof all[n].name, "waits for %s", group_name((GroupKind)i));
        all[n].seconds = p->shares.waited[i];
    }
    all[n++] = (Share){ "waits for other stages", p->bubble_s };
    all[n++] = (Share){ "waits for the host", p->shares.idle };
    for (int i = 0; i < n; i++)
        if (all[i].seconds > 0) out[kept++] = all[i];
    qsort(out, (size_t)kept, sizeof *out, by_seconds);
    return kept;
}

Err plan_time(PlanTable *t)
{
    CostModel m;
    if (!t->target) return ERR_OK;
    if (cost_open(&m, t->target, grid_size(t->grid))) {
        snprintf(t->no_time, sizeof t->no_time, "%s", err_message());
        return ERR_OK;
    }
    TRY(predict(&m, &t->spec, t->grid, &t->predicted));
    t->has_time = true;
    return ERR_OK;
}

void plan_put_time(const PlanTable *t)
{
    const Prediction *p = &t->predicted;
    Share share[SHARES_MOST];
    if (!t->target) return;
    if (!t->has_time) {
        printf("\ntime    not predicted: %s\n", t->no_time);
        return;
    }
    printf("\ntime of a step on %s, predicted, not measured (docs/planner.md)\n", t->target->name);
    printf("  %.4g ms: %.0f tokens/s, %.0f on each rank; %.4g TFLOP/s on each", 1e3 * p->step_s, p->tokens_s,
           p->tokens_s / grid_size(t->grid), 1e-12 * p->flop_s);
    if (p->mfu > 0) printf(", MFU %.1f %%", 100 * p->mfu);
    if (t->grid.pp > 1) printf("\n  of it, on pp rank %d, which is busy longest:\n", t->predicted.pp_rank);
    else printf("\n  of it:\n");
    const int n = shares_of(p, share);
    for (int i = 0; i < n; i++)
        printf("  %-34s %12.2f ms %9.1f %%\n", share[i].name, 1e3 * share[i].seconds,
               100 * share[i].seconds / p->step_s);
}

void plan_json_time(JsonOut *j, const PlanTable *t)
{
    const Prediction *p = &t->predicted;
    Share share[SHARES_MOST];
    char bound[48];
    if (!t->has_time) return;
    json_open(j, "predicted", '{');
    json_put_number(j, "step_ms", 1e3 * p->step_s);
    json_put_number(j, "tokens_per_s", p->tokens_s);
    json_put_number(j, "tokens_per_s_gpu", p->tokens_s / grid_size(t->grid));
    json_put_number(j, "tflops", 1e-12 * p->flop_s);
    json_put_number(j, "mfu", p->mfu);
    json_put_text(j, "bound", prediction_bound(p, NULL, bound));
    json_put_int(j, "pp_rank", p->pp_rank);
    json_put_number(j, "launches", p->shares.launches);
    json_open(j, "ms", '{');
    const int n = shares_of(p, share);
    for (int i = 0; i < n; i++) json_put_number(j, share[i].name, 1e3 * share[i].seconds);
    json_close(j, '}');
    json_close(j, '}');
}
