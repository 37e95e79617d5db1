/* See layer_cost.h. */
#include "plan/layer_cost.h"

#include <stdio.h>
#include <string.h>

enum { LAYOUT_BYTES = 64 };

/* ---- kinds of blocks ---- */

static bool alike(const ModelSpec *m, int a, int b)
{
    return layer_pattern_at(&m->mixer, a) == layer_pattern_at(&m->mixer, b) &&
           layer_pattern_at(&m->window, a) == layer_pattern_at(&m->window, b) &&
           layer_pattern_at(&m->context, a) == layer_pattern_at(&m->context, b) &&
           layer_pattern_at(&m->rope.layers, a) == layer_pattern_at(&m->rope.layers, b) &&
           model_fp8(m, a) == model_fp8(m, b) && model_has_ffn(m, a) == model_has_ffn(m, b) &&
           (!m->moe.experts || layer_set_has(&m->moe.layers, a) == layer_set_has(&m->moe.layers, b));
}

bool block_kinds(const ModelSpec *m, BlockKinds *out)
{
    const int last = m->layers - 1;
    *out = (BlockKinds){ .count = 0 };
    for (int l = 0; l < m->layers; l++) {
        int k = 0;
        while (k < out->count && !alike(m, l, out->first[k])) k++;
        if (k == out->count && alike(m, l, last)) {
            out->kind[l] = BLOCK_KINDS; /* that one comes last */
            continue;
        }
        if (k == out->count) {
            if (k == BLOCK_KINDS - 1) return false;
            out->first[out->count++] = l;
        }
        out->kind[l] = (uint8_t)k;
    }
    for (int l = 0; l < m->layers; l++)
        if (out->kind[l] == BLOCK_KINDS) out->kind[l] = (uint8_t)out->count;
    out->first[out->count++] = last;
    return true;
}

/* ---- a model with one block of each ---- */

static LayerPattern thinned(const LayerPattern *p, const BlockKinds *k)
{
    LayerPattern out = { .runs = k->count };
    for (int i = 0; i < k->count; i++) {
        out.value[i] = (int32_t)layer_pattern_at(p, k->first[i]);
        out.times[i] = 1;
    }
    return out;
}

static LayerSet thinned_set(const LayerSet *s, const BlockKinds *k)
{
    LayerSet out = { { 0 } };
    for (int i = 0; i < k->count; i++)
        if (layer_set_has(s, k->first[i])) out.word[0] |= (uint64_t)1 << i;
    return out;
}

static ModelSpec thin_model(const ModelSpec *m, const BlockKinds *k)
{
    ModelSpec thin = *m;
    thin.layers = k->count;
    thin.mixer = thinned(&m->mixer, k);
    thin.window = thinned(&m->window, k);
    thin.context = thinned(&m->context, k);
    thin.rope.layers = thinned(&m->rope.layers, k);
    thin.without_ffn = thinned_set(&m->without_ffn, k);
    thin.fp8.blocks = thinned_set(&m->fp8.blocks, k);
    if (m->moe.experts) thin.moe.layers = thinned_set(&m->moe.layers, k);
    return thin;
}

/* "E|t|t|m|L" */
static void write_layout(const ModelSpec *thin, char out[LAYOUT_BYTES])
{
    int n = snprintf(out, LAYOUT_BYTES, "E|");
    for (int i = 0; i < thin->layers; i++) n += snprintf(out + n, (size_t)(LAYOUT_BYTES - n), "t|");
    if (thin->mtp.count) n += snprintf(out + n, (size_t)(LAYOUT_BYTES - n), "m*%d|", thin->mtp.count);
    snprintf(out + n, (size_t)(LAYOUT_BYTES - n), "L");
}

int grid_rank_at(Grid g, int pp_rank, int tp_rank, int cp_rank)
{
    const int plane = g.tp * (g.cp ? g.cp : 1);
    const int first = g.order == ORDER_PP_DP ? plane : plane * g.dp;
    return pp_rank * first + cp_rank * g.tp + tp_rank;
}

static Err measure(const CostSource *source, const TrainSpec *spec, Grid g, int stage, PartCost *out, LayerCosts *all)
{
    static const char *const schedules[BACKWARDS] = { "1f1b", "zb-h1" };
    TrainSpec s = *spec;
    *out = (PartCost){ .update = 0 };
    for (int b = 0; b < BACKWARDS; b++) {
        MemoryPlan plan;
        RankTimes times = { .tail = 0 };
        s.pipeline.schedule = schedules[b];
        TRY(source->dry_run(source->user, &s, g, grid_rank_at(g, stage, 0, 0), &plan, &times));
        out->cost[b] = times.stage[0];
        memcpy(out->kept[b], plan.stages[0].save, sizeof out->kept[b]);
        out->update = times.tail - times.reduce;
        out->reduce = times.reduce;
        out->experts = plan.params.experts;
        out->dense = plan.params.flat - plan.params.padding - plan.params.experts;
        if (!b || plan.scratch < out->scratch) out->scratch = plan.scratch;
        if (times.hop > all->hop) all->hop = times.hop;
    }
    return ERR_OK;
}

Err layer_costs(const CostSource *source, const TrainSpec *spec, Grid grid, const BlockKinds *kinds,
                PartsMeasured which, LayerCosts *out)
{
    char layout[LAYOUT_BYTES];
    TrainSpec s = *spec;
    Grid g = grid;
    s.model = thin_model(&spec->model, kinds);
    s.model.offload = 0; /* (a stage of one block has nothing to hide copies behind) */
    /* (of a list the kind that keeps least: what must fit is a lower bound) */
    s.model.recompute = layer_pattern_all((int32_t)layer_pattern_most(&spec->model.recompute));
    write_layout(&s.model, layout);
    s.pipeline = (PipelineSpec){ .layout = layout };
    s.overlap_moe = false;
    /* (a further unit costs what the first does, or more; but what weights need of 8 bits may be made once a step, and
     * a clock says what the fastest unit takes) */
    s.global_batch = (s.model.fp8.recipe ? 2 : 1) * s.micro_batch * g.dp;
    s.ramp = batch_ramp_flat(s.global_batch);
    const int modules = s.model.mtp.count > 0, head = 1 + kinds->count + modules;
    g.pp = head + 1;
    g.order = ORDER_DP_PP; /* (which holds all shapes) */
    g.bidirectional = false;
    TRY(trainer_grid(&s, &g));
    const bool all = which == PARTS_ALL;
    if (all) *out = (LayerCosts){ .hop = 0 };
    if (all) TRY(measure(source, &s, g, 0, &out->embedding, out));
    for (int i = 0; i < kinds->count; i++)
        if (all || layer_set_has(&s.model.moe.layers, i)) TRY(measure(source, &s, g, 1 + i, &out->block[i], out));
    if (modules && (all || layer_set_has(&s.model.moe.layers, kinds->count - 1)))
        TRY(measure(source, &s, g, head - 1, &out->modules, out));
    if (all) TRY(measure(source, &s, g, head, &out->head, out));
    out->copies = g.dp * (g.cp ? g.cp : 1);
    return ERR_OK;
}
