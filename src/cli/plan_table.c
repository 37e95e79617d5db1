/*
 * What `plan` counts (plan.h). The numbers come from running the very first step and the evaluation on the null device
 * (trainer_plan), which is also what the run itself takes its memory by; there is no second formula, so they are exact.
 *
 * Ranks with the same tp, cp and pp rank hold the same shard and do the same work, and most cp ranks do.
 */
#include <stdlib.h>

#include "base/log.h"
#include "cli/plan.h"
#include "data/tokenizer.h"

enum { MAX_KINDS = 4096 };

/* ---- kinds of ranks ---- */

static bool same_plan(const MemoryPlan *a, const MemoryPlan *b)
{
    for (int i = 0; i < MEMORY_ROWS; i++)
        if (memory_plan_bytes(a, &memory_rows[i]) != memory_plan_bytes(b, &memory_rows[i])) return false;
    return a->work.flop == b->work.flop &&
           (a->muon.mean > 0 || (a->work.op_bytes == b->work.op_bytes && a->work.comm_bytes == b->work.comm_bytes));
}

/* Ranks of a stage own other matrices of Muon's, which take as much memory and almost as much work: the mean counts. */
static void even_out(MemoryPlan *p) { p->work.flop += (int64_t)p->muon.mean - (int64_t)p->muon.flop; }

/* The plan of one rank, as a kind of its own or as one more of the last kind. */
static Err count_rank(PlanTable *t, int rank, GridCoords at)
{
    PlanKind k = { .pp_rank = at.pp, .first_tp_rank = at.tp, .tp_ranks = 1, .first_cp_rank = at.cp, .cp_ranks = 1 };
    PlanKind *last = t->count ? &t->kinds[t->count - 1] : NULL;
    TRY(trainer_plan(&t->spec, t->grid, rank, &k.plan));
    even_out(&k.plan);
    if (last && last->pp_rank == at.pp && last->first_cp_rank == at.cp &&
        last->plan.params.flat == k.plan.params.flat && same_plan(&last->plan, &k.plan))
        last->tp_ranks++;
    else if (t->count < MAX_KINDS) t->kinds[t->count++] = k;
    else return err_set(ERR_CONFIG, "more than %d kinds of ranks", MAX_KINDS);
    return ERR_OK;
}

/* The kinds from `first` on, of one cp rank, are those before them, of its neighbour: one more rank of these. */
static void join_cp_ranks(PlanTable *t, int first)
{
    const int count = t->count - first;
    if (count > first) return;
    PlanKind *before = &t->kinds[first - count];
    const PlanKind *now = &t->kinds[first];
    for (int i = 0; i < count; i++)
        if (before[i].pp_rank != now[i].pp_rank || before[i].first_tp_rank != now[i].first_tp_rank ||
            before[i].tp_ranks != now[i].tp_ranks || !same_plan(&before[i].plan, &now[i].plan))
            return;
    for (int i = 0; i < count; i++) before[i].cp_ranks++;
    t->count = first;
}

/* Pipeline rank by pipeline rank, and cp rank by cp rank, the ranks of the first data-parallel replica. */
static Err count_kinds(PlanTable *t)
{
    const int size = grid_size(t->grid);
    for (int i = 0; i < t->grid.pp * t->grid.cp; i++) {
        const int first = t->count;
        for (int rank = 0; rank < size; rank++) {
            const GridCoords at = grid_coords(t->grid, rank);
            if (at.pp * t->grid.cp + at.cp == i && at.dp == 0) TRY(count_rank(t, rank, at));
        }
        if (first) join_cp_ranks(t, first);
    }
    return ERR_OK;
}

/* ---- the whole ---- */

Err plan_vocab(const Config *cfg, int64_t *out)
{
    Tokenizer *t;
    *out = cfg->model.vocab;
    if (*out > 0) return ERR_OK;
    Err err = tokenizer_open(cfg->data.tokenizer, &t);
    if (err) return err_hint("set model.vocab to plan without the tokenizer");
    *out = tokenizer_vocab(t);
    tokenizer_close(t);
    return ERR_OK;
}

/* Refusals at the start of the run. */
static Err check_gpu(const PlanTable *t)
{
    DeviceInfo here;
    if (t->target) return predict_allowed(t->target, &t->spec);
    if (t->spec.device.kind != DEVICE_CUDA || device_cuda_info(0, &here)) return ERR_OK;
    return fp8_spec_on_gpu(&t->spec.model.fp8, device_info_capability(&here), here.name);
}

Err plan_count(PlanTable *t)
{
    int64_t vocab;
    if (t->cfg->parallel.planned)
        log_warn("parallel.auto chooses a layout when a run begins; this is the one of the configuration "
                 "(plan --search says which it would be)");
    TRY(plan_vocab(t->cfg, &vocab));
    TRY(train_spec(t->cfg, vocab, &t->spec));
    TRY(check_gpu(t));
    TRY(grid_spec(t->cfg, &t->grid));
    t->kinds = calloc(MAX_KINDS, sizeof *t->kinds);
    if (!t->kinds) return err_set(ERR_MEMORY, "no memory for %d plans", MAX_KINDS);
    TRY(count_kinds(t));
    t->shards = calloc((size_t)grid_size(t->grid), sizeof *t->shards);
    if (!t->shards) return err_set(ERR_MEMORY, "no memory for %d ranks", grid_size(t->grid));
    TRY(trainer_shard_bytes(&t->spec, t->grid, t->shards));
    return plan_recompute(t);
}

void plan_free(PlanTable *t)
{
    free(t->kinds);
    free(t->shards);
}
