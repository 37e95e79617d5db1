/* A plan as JSON: the rows of plan_figures.c, key by key (plan.h). */
#include <stdio.h>
#include <stdlib.h>

#include "cli/plan.h"

static void json_figures(JsonOut *j, const PlanTable *t, const PlanKind *k, const PlanFigure *figures)
{
    for (const PlanFigure *f = figures; f->key; f++) {
        const int64_t value = plan_value(t, k, f);
        if (f->is_count) json_put_number(j, f->key, (double)value);
        else json_put_int(j, f->key, value);
    }
}

static void json_rank(JsonOut *j, const PlanTable *t, const PlanKind *k)
{
    json_open(j, NULL, '{');
    json_put_int(j, "pp_rank", k->pp_rank);
    json_put_int(j, "first_tp_rank", k->first_tp_rank);
    json_put_int(j, "tp_ranks", k->tp_ranks);
    json_put_int(j, "first_cp_rank", k->first_cp_rank);
    json_put_int(j, "cp_ranks", k->cp_ranks);
    json_figures(j, t, k, plan_memory);
    json_figures(j, t, k, plan_work);
    if (k->plan.muon.mean > 0) {
        json_put_number(j, "muon_flop", k->plan.muon.mean);
        json_put_number(j, "muon_imbalance", k->plan.muon.imbalance);
    }
    json_close(j, '}');
}

static void json_checkpoint(JsonOut *j, const PlanTable *t)
{
    json_put_int(j, "checkpoint_bytes", plan_checkpoint(t));
    json_open(j, "checkpoint_shards", '[');
    for (int rank = 0; rank < grid_size(t->grid); rank++) json_put_int(j, NULL, t->shards[rank]);
    json_close(j, ']');
}

/* Bytes are those of one rank; offload_host, read_ahead and snapshot are part of the total where memory_on_host is
 * false, and so are, with states_on_host, moments, and with 16 bits the weights. */
static void put_json(JsonOut *j, const PlanTable *t)
{
    const MemoryPlan *p = &t->kinds[0].plan;
    char precision[CONFIG_VALUE_BYTES];
    json_open(j, NULL, '{');
    json_put_text(j, "device", t->target ? t->target->name : t->spec.device.kind == DEVICE_CPU ? "cpu" : "cuda");
    json_put_text(j, "precision", config_value(t->cfg, CFG_run_precision, precision));
    json_put_int(j, "world", grid_size(t->grid));
    json_put_int(j, "tp", t->grid.tp);
    json_put_int(j, "cp", t->grid.cp);
    json_put_int(j, "pp", t->grid.pp);
    json_put_int(j, "dp", t->grid.dp);
    json_put_int(j, "micro_batch", t->spec.micro_batch);
    json_put_int(j, "microbatches", t->cfg->derived.microbatches);
    json_put_int(j, "step_tokens", t->spec.global_batch * t->spec.model.seq);
    json_put_int(j, "steps", t->cfg->derived.steps);
    json_put_int(j, "parameters", p->params.model);
    json_put_int(j, "active_parameters", model_active_params(&t->spec.model, p->params.model));
    json_put_int(j, "flop_per_token", model_flop_per_token(&t->spec.model, p->params.model));
    json_put_int(j, "largest_total", plan_largest_total(t));
    if (t->target) {
        json_put_int(j, "device_bytes", t->target->memory_mib << 20);
        json_put_int(j, "library_bytes", plan_library_bytes(t));
        json_put_bool(j, "fits", plan_fits(t));
    }
    json_checkpoint(j, t);
    json_put_bool(j, "memory_on_host", p->host_apart);
    json_put_bool(j, "states_on_host", t->spec.update.states_on_host);
    json_open(j, "ranks", '[');
    for (int i = 0; i < t->count; i++) json_rank(j, t, &t->kinds[i]);
    json_close(j, ']');
    plan_json_recompute(j, t);
    plan_json_time(j, t);
    json_close(j, '}');
}

Err plan_print_json(const PlanTable *t)
{
    enum { HEAD_BYTES = 16384, RANK_BYTES = 1024, SHARD_BYTES = 24 };
    const int64_t room = HEAD_BYTES + (int64_t)t->count * RANK_BYTES + (int64_t)grid_size(t->grid) * SHARD_BYTES;
    char *text = malloc((size_t)room);
    JsonOut j;
    if (!text) return err_set(ERR_MEMORY, "no memory for the plan's text");
    json_out_init(&j, text, room);
    put_json(&j, t);
    ASSERT(json_out_ok(&j));
    puts(text);
    free(text);
    return ERR_OK;
}
