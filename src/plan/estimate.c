/* See estimate.h. */
#include "plan/estimate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "plan/partition.h"

enum { STAGES_MOST = 1024 };

/* ---- bytes of parameters ---- */

StateBytes state_bytes(const TrainSpec *s, Grid g)
{
    const int64_t wide = dtype_size(F32), narrow = s->compute == F32 ? 0 : dtype_size(s->compute);
    const int64_t grad = s->exact ? dtype_size(I64) : wide, value = narrow ? narrow : wide;
    const int64_t near = (s->update.zero >= ZERO_GRADS ? grad : 0) + (s->update.zero >= ZERO_VALUES ? value : 0);
    /* in f32 the weights that layers read are the optimizer's own */
    const int moments = optimizers[s->update.optimizer].moments; /* at least */
    const bool away = s->update.states_on_host && s->device.kind == DEVICE_CUDA;
    StateBytes b = { .cut = away ? 0 : moments * dtype_size(s->update.moments) + (narrow ? wide : 0),
                     .near = near,
                     .whole = grad + value - near };
    const ParamPlace at = param_place(g, 0, s->update.zero);
    b.dense_copies = at.zero_shards[PARAM_DENSE], b.expert_copies = at.zero_shards[PARAM_EXPERT];
    b.near_dense = at.near_shards[PARAM_DENSE], b.near_experts = at.near_shards[PARAM_EXPERT];
    return b;
}

static double part_state(const StateBytes *b, const PartCost *c)
{
    return (double)b->whole * (double)(c->dense + c->experts) +
           (double)b->cut * ((double)c->dense / b->dense_copies + (double)c->experts / b->expert_copies) +
           (double)b->near * ((double)c->dense / b->near_dense + (double)c->experts / b->near_experts);
}

/* ---- stages ---- */

static void add_part(PartCost *sum, const PartCost *p)
{
    for (int b = 0; b < BACKWARDS; b++) {
        sum->cost[b].f += p->cost[b].f;
        sum->cost[b].i += p->cost[b].i;
        sum->cost[b].w += p->cost[b].w;
        for (int r = 0; r < REGION_COUNT; r++) sum->kept[b][r] += p->kept[b][r];
    }
    sum->update += p->update;
    sum->reduce += p->reduce;
    sum->dense += p->dense;
    sum->experts += p->experts;
    if (p->scratch > sum->scratch) sum->scratch = p->scratch;
}

/* A ring or a tree of n ranks sends (n - 1) / n of what there is. */
static double reduce_of(const Pipeline *p, const PartCost *stage)
{
    const int was = p->inner->costs.copies, now = p->copies;
    return was <= 1 ? stage->reduce : stage->reduce * (1 - 1.0 / now) / (1 - 1.0 / was);
}

/* The share of gradients in what is summed and gathered once a step with ZERO_STATES. */
static double grads_share(const Pipeline *p)
{
    const TrainSpec *s = &p->inner->spec;
    const double grad = (double)dtype_size(s->exact ? I64 : F32), value = (double)dtype_size(s->compute);
    return grad / (grad + value);
}

/* Parts were measured with less cut than the pipeline has: what it sends in each unit, and not behind them. */
static bool sends_in_units(const Pipeline *p)
{
    return p->zero >= ZERO_GRADS && p->inner->spec.update.zero < ZERO_GRADS;
}

/* Share of a call's seconds by which work beside it takes longer. Devices whose files say nothing have it. */
static const double HELD_UP = 0.29;

static double beside(double ops, double calls) { return fmax(calls, ops + HELD_UP * calls); }

/* Lets a unit's messages go on beside it. */
static void send_in_units(const Pipeline *p, PartCost *stage)
{
    const double reduce = reduce_of(p, stage), sums = reduce * grads_share(p);
    const double gathers = p->zero == ZERO_VALUES ? reduce - sums : 0;
    for (int b = 0; b < BACKWARDS; b++) {
        StageCost *c = &stage->cost[b];
        c->f = beside(c->f, gathers);
        c->w = beside(c->i + c->w, sums + gathers) - c->i;
    }
    stage->reduce = p->zero == ZERO_VALUES ? 0 : stage->reduce * (1 - grads_share(p));
}

static PartCost stage_cost(const Pipeline *p, int stage)
{
    const StageShare s = p->shares[stage];
    const LayerCosts *c = &p->inner->costs;
    PartCost sum = { .update = 0 };
    if (s.embedding) add_part(&sum, &c->embedding);
    for (int l = 0; l < s.layer_count; l++) {
        PartCost block = c->block[p->kinds->kind[s.first_layer + l]];
        if (l < p->inner->spec.model.offload) /* (of times this is a bound: copies may have to be waited for) */
            block.kept[BACKWARD_WHOLE][REGION_I] = block.kept[BACKWARD_WHOLE][REGION_W] =
                block.kept[BACKWARD_SPLIT][REGION_I] = 0;
        add_part(&sum, &block);
    }
    if (s.mtp) add_part(&sum, &c->modules);
    if (s.head) add_part(&sum, &c->head);
    if (sends_in_units(p)) send_in_units(p, &sum);
    return sum;
}

static Err stage_costs(const Pipeline *p, PartCost **out)
{
    const int stages = p->shape->s.stages;
    *out = calloc((size_t)stages, sizeof **out);
    if (!*out) return err_set(ERR_MEMORY, "no memory for %d stages", stages);
    for (int i = 0; i < stages; i++) (*out)[i] = stage_cost(p, i);
    return ERR_OK;
}

static const int *held_by(const Shape *s, int rank, int replica, int chunk)
{
    return s->held + 2 * ((rank * s->s.replicas + replica) * s->s.chunks + chunk);
}

/* The backward that counts for a stage: if one is split, all of its units have room for such. */
static int backward_of(const Shape *s, int rank, int replica, int chunk)
{
    return s->split && s->split[(rank * s->s.replicas + replica) * s->s.chunks + chunk] ? BACKWARD_SPLIT
                                                                                        : BACKWARD_WHOLE;
}

static double rank_bytes(const Pipeline *p, int rank)
{
    const Schedule *s = &p->shape->s;
    PartCost all = { .update = 0 };
    double kept = 0;
    for (int r = 0; r < s->replicas; r++)
        for (int c = 0; c < s->chunks; c++) {
            const PartCost stage = stage_cost(p, schedule_stage_at(s, rank, r, c));
            const int *held = held_by(p->shape, rank, r, c), b = backward_of(p->shape, rank, r, c);
            add_part(&all, &stage);
            for (int k = 0; k < REGION_COUNT; k++) kept += (double)held[k] * (double)stage.kept[b][k];
        }
    return part_state(&p->state, &all) + kept + (double)all.scratch;
}

int64_t pipeline_bytes(const Pipeline *p)
{
    double most = 0;
    for (int rank = 0; rank < p->shape->ranks; rank++) {
        const double bytes = rank_bytes(p, rank);
        if (bytes > most) most = bytes;
    }
    return (int64_t)most + DEVICE_WORKSPACE_BYTES + p->libraries;
}

int64_t pipeline_mean_bytes(const Pipeline *p)
{
    const LayerCosts *c = &p->inner->costs;
    PartCost all = { .update = 0 };
    const int replicas = p->shape->s.replicas;
    add_part(&all, &c->embedding);
    add_part(&all, &c->modules);
    add_part(&all, &c->head);
    for (int l = 0; l < p->inner->spec.model.layers; l++) add_part(&all, &c->block[p->kinds->kind[l]]);
    return (int64_t)(part_state(&p->state, &all) * replicas / p->shape->ranks) + all.scratch + DEVICE_WORKSPACE_BYTES +
           p->libraries;
}

/* ---- seconds ---- */

static double seconds_of(const PartCost *c)
{
    double least = 0;
    for (int b = 0; b < BACKWARDS; b++) {
        const double s = c->cost[b].f + c->cost[b].i + c->cost[b].w;
        if (!b || s < least) least = s;
    }
    return least;
}

static double tail_of(const Pipeline *p, const PartCost *stage) { return stage->update + reduce_of(p, stage); }

double pipeline_bound(const Pipeline *p)
{
    const Schedule *s = &p->shape->s;
    double most = 0, tail = 0;
    for (int rank = 0; rank < p->shape->ranks; rank++) {
        double work = 0, end = 0;
        for (int r = 0; r < s->replicas; r++)
            for (int c = 0; c < s->chunks; c++) {
                const PartCost stage = stage_cost(p, schedule_stage_at(s, rank, r, c));
                work += seconds_of(&stage) / s->replicas;
                end += tail_of(p, &stage);
            }
        if (work > most) most = work;
        if (end > tail) tail = end;
    }
    return most * p->shape->microbatches + tail;
}

/* The longest of the ranks' ends of the step. */
static double longest_tail(const Pipeline *p, const PartCost *stages)
{
    const Schedule *s = &p->shape->s;
    double most = 0;
    for (int rank = 0; rank < s->ranks; rank++) {
        double end = 0;
        for (int r = 0; r < s->replicas; r++)
            for (int c = 0; c < s->chunks; c++) end += tail_of(p, &stages[schedule_stage_at(s, rank, r, c)]);
        if (end > most) most = end;
    }
    return most;
}

Err pipeline_seconds(const Pipeline *p, double *seconds)
{
    ON_HEAP(StageCost, costs, STAGES_MOST);
    PartCost *stages;
    TRY(stage_costs(p, &stages));
    const Schedule *s = &p->shape->s;
    for (int i = 0; i < s->stages; i++)
        costs[i] = stages[i].cost[backward_of(p->shape, schedule_rank_of(s, 0, i), 0, schedule_chunk_of(s, i))];
    Err err = shape_replay(p->shape, costs, p->inner->costs.hop, seconds);
    *seconds += longest_tail(p, stages);
    free(stages);
    return err;
}

/* ---- cuts ---- */

/* Numbers of blocks a stage. The first has the embedding, the last the modules and the head. */
typedef struct {
    int blocks[STAGES_MOST], stages;
    int modules_stage; /* which has the modules; -1: there are none */
} Blocks;

static int write_stage(const Blocks *b, int s, char *out, size_t size)
{
    int n = snprintf(out, size, "%s", s ? "" : "E");
    if (b->blocks[s] > 1) n += snprintf(out + n, size - (size_t)n, "t*%d", b->blocks[s]);
    if (b->blocks[s] == 1) n += snprintf(out + n, size - (size_t)n, "t");
    if (s == b->modules_stage) n += snprintf(out + n, size - (size_t)n, "m");
    if (s == b->stages - 1) n += snprintf(out + n, size - (size_t)n, "L");
    return n;
}

/* "Et*4|(t*5|)*6t*4L"; false: it is too long for a configuration's word. */
static bool write_cut(const Blocks *b, int modules, char out[LAYOUT_TEXT])
{
    char one[48], next[48];
    int n = 0;
    for (int s = 0, same; s < b->stages && n < LAYOUT_TEXT; s += same) {
        write_stage(b, s, one, sizeof one);
        for (same = 1; s + same < b->stages - 1; same++) {
            write_stage(b, s + same, next, sizeof next);
            if (strcmp(one, next) != 0) break;
        }
        const bool last = s + same == b->stages;
        if (same > 1) n += snprintf(out + n, (size_t)(LAYOUT_TEXT - n), "(%s|)*%d", one, same);
        else n += snprintf(out + n, (size_t)(LAYOUT_TEXT - n), "%s%s", one, last ? "" : "|");
    }
    /* "m" stands for all of them */
    char *m = n < LAYOUT_TEXT && modules > 1 ? strchr(out, 'm') : NULL;
    if (m && n + 4 < LAYOUT_TEXT) {
        char rest[LAYOUT_TEXT];
        snprintf(rest, sizeof rest, "%s", m + 1);
        n = (int)(m - out);
        n += snprintf(m, (size_t)(LAYOUT_TEXT - n), "m*%d%s", modules, rest);
    }
    return n < LAYOUT_TEXT;
}

typedef struct {
    const Pipeline *p;
    int64_t memory;
    int most;
    CutText *out;
    int *count;
} CutSearch;

static void keep_cut(const CutSearch *c, const CutText *t)
{
    int i = *c->count;
    for (int k = 0; k < i; k++)
        if (!strcmp(c->out[k].text, t->text)) return;
    if (i == c->most && !(t->seconds < c->out[i - 1].seconds)) return;
    if (i < c->most) i = (*c->count)++;
    else i--;
    for (; i && t->seconds < c->out[i - 1].seconds; i--) c->out[i] = c->out[i - 1];
    c->out[i] = *t;
}

static Err try_cut(const CutSearch *c, const Blocks *b)
{
    StageShare shares[STAGES_MOST];
    CutText t;
    Pipeline p = *c->p;
    const ModelSpec *m = &p.inner->spec.model;
    if (!write_cut(b, m->mtp.count, t.text)) return ERR_OK;
    if (stage_shares(m, t.text, b->stages, shares)) return ERR_OK;
    p.shares = shares;
    if (pipeline_bytes(&p) > c->memory) return ERR_OK;
    TRY(pipeline_seconds(&p, &t.seconds));
    keep_cut(c, &t);
    return ERR_OK;
}

static ChainItem chain_item(const Pipeline *p, const PartCost *c)
{
    const int b = p->shape->split[0] ? BACKWARD_SPLIT : BACKWARD_WHOLE;
    ChainItem it = { .cost = c->cost[b], .state = (int64_t)part_state(&p->state, c) };
    for (int r = 0; r < REGION_COUNT; r++) it.kept += c->kept[b][r];
    return it;
}

/* Embedding and first block, and last block and head, are items of their own, so that a stage of either alone is none:
 * it is the head that stages are made small for. */
static int chain_items(const Pipeline *p, ChainItem *items)
{
    const LayerCosts *c = &p->inner->costs;
    const ModelSpec *m = &p->inner->spec.model;
    int n = 0;
    items[n++] = chain_item(p, &c->embedding);
    for (int l = 0; l < m->layers; l++) items[n++] = chain_item(p, &c->block[p->kinds->kind[l]]);
    if (m->mtp.count) items[n++] = chain_item(p, &c->modules);
    items[n++] = chain_item(p, &c->head);
    return n;
}

static Blocks blocks_of(const ChainCut *cut, int stages, int layers, int modules)
{
    Blocks b = { .stages = stages, .modules_stage = -1 };
    for (int s = 0; s < stages; s++) {
        int from = s ? cut->end[s - 1] : 0, to = cut->end[s];
        if (modules && from <= 1 + layers && to > 1 + layers) b.modules_stage = s;
        if (from < 1) from = 1;
        if (to > 1 + layers) to = 1 + layers;
        b.blocks[s] = to > from ? to - from : 0;
    }
    return b;
}

/* Stages of one rank each. The dynamic program does not see scratch: the bound is asked of each cut. */
static Err cuts_of_chain(const CutSearch *c)
{
    const Pipeline *p = c->p;
    const Schedule *s = &p->shape->s;
    const ModelSpec *m = &p->inner->spec.model;
    ON_HEAP(ChainItem, items, PARTITION_ITEMS);
    int in_flight[PARTITION_STAGES], cuts_found;
    ChainCut *cuts;
    Chain chain = { .items = items, .stages = s->stages, .units = p->shape->microbatches, .hop = p->inner->costs.hop };
    if (s->stages > PARTITION_STAGES) return ERR_OK;
    for (int i = 0; i < s->stages; i++) in_flight[i] = held_by(p->shape, i, 0, 0)[REGION_W];
    chain.count = chain_items(p, items);
    chain.in_flight = in_flight;
    chain.split = p->shape->split[0];
    chain.limit = c->memory - p->libraries - DEVICE_WORKSPACE_BYTES;
    if (!(cuts = calloc(PARTITION_BEST, sizeof *cuts))) return err_set(ERR_MEMORY, "no memory for cuts");
    Err err = partition(&chain, PARTITION_BEST, cuts, &cuts_found);
    for (int i = 0; i < cuts_found && !err; i++) {
        const Blocks b = blocks_of(&cuts[i], s->stages, m->layers, m->mtp.count);
        err = try_cut(c, &b);
    }
    free(cuts);
    return err;
}

/* The first stage has `first` blocks less than an even share, the last `last`; the others share what is left, those in
 * the middle most. */
static bool trimmed(int layers, int stages, int first, int last, bool modules, Blocks *b)
{
    const int even = layers / stages, rest = layers % stages, inner = stages - 2;
    *b = (Blocks){ .stages = stages, .modules_stage = modules ? stages - 1 : -1 };
    if (inner < 1 || even < first || even < last) return false;
    const int more = rest + first + last, each = more / inner, odd = more % inner, at = (stages - odd) / 2;
    for (int s = 0; s < stages; s++) b->blocks[s] = even + each + (s >= at && s < at + odd);
    b->blocks[0] = even - first;
    b->blocks[stages - 1] = even - last;
    int sum = 0;
    for (int s = 0; s < stages; s++) sum += b->blocks[s];
    return sum == layers;
}

static Err cuts_of_ends(const CutSearch *c)
{
    enum { LESS_MOST = 3 };
    const ModelSpec *m = &c->p->inner->spec.model;
    Blocks b;
    for (int first = 0; first <= LESS_MOST; first++)
        for (int last = 0; last <= LESS_MOST; last++)
            if (trimmed(m->layers, c->p->shape->s.stages, first, last, m->mtp.count > 0, &b)) TRY(try_cut(c, &b));
    return ERR_OK;
}

Err pipeline_cuts(const Pipeline *p, int64_t memory, int most, CutText *out, int *count)
{
    const CutSearch c = { p, memory, most, out, count };
    const Schedule *s = &p->shape->s;
    *count = 0;
    if (s->stages == 1) return ERR_OK;
    return s->chunks * s->replicas == 1 ? cuts_of_chain(&c) : cuts_of_ends(&c);
}
