/*
 * See trainer_open.h: memory by the plan's limits, stages and their slots, the executor and its hooks, first weights.
 */
#include "engine/trainer_open.h"

#include <omp.h>
#include <string.h>

#include "base/heap.h"
#include "base/int64.h"
#include "base/log.h"
#include "engine/async.h"
#include "engine/expert_load.h"

/* The most units of a step over the ranks of a pipeline; their lists take some 100 MB of the host. */
enum { MAX_UNITS = 1 << 18 };

/* ---- hooks of the executor ---- */

/* A dp rank's samples are one contiguous share of the global batch. Any assignment gives the same bits. */
static Err hook_batch(void *user, int unit, Batch *b)
{
    Trainer *t = user;
    const Schedule *s = &t->parts.step;
    int64_t share = t->serving.batch / t->world->grid.dp;
    int64_t first = t->serving.first_sample + t->world->dp_rank * share + unit / s->slices * b->B;
    const int slice = schedule_slice_of(s, unit);
    int64_t count = t->serving.first_sample + t->serving.counting - first;
    if (count > b->B) count = b->B;
    if (count < 0) count = 0;
    b->first = first - t->serving.first_sample;
    if (s->slices > 1) b->span = spans_behind(t->batches.spec.span, slice * (b->seq / s->slices));
    /* (slices of a micro-batch come one after another) */
    const TokenSource *source = &t->serving.source;
    if (source->get && count && !slice) TRY(source->get(source->user, first, count, t->batches.tokens));
    if (source->requests && count && !slice)
        TRY(source->requests(source->user, first, count, t->batches.doc, t->batches.counts));
    return batch_fill(&t->batches, &t->device.stream, b, first, count);
}

static Err hook_tied(void *user)
{
    Trainer *t = user;
    return ddp_sum_stages(t->ddp, t->params.replicas);
}

static Err hook_reduce(void *user, int replica) { return ddp_reduce(&((Trainer *)user)->ddp[replica]); }

static Err hook_norm(void *user)
{
    Trainer *t = user;
    TRY(optim_sum_loss(&t->optim));
    return optim_norm(&t->optim);
}

static Err hook_update(void *user, int replica)
{
    Trainer *t = user;
    if (trainer_is_async(t)) return async_update(t, replica);
    TRY(optim_update(&t->optim, &t->stores[replica]));
    return ddp_gather(&t->ddp[replica]);
}

/* ---- opening ---- */

static int log2_ceil(WideCount n)
{
    int bits = 0;
    while (((WideCount)1 << bits) < n) bits++;
    return bits;
}

static Canon canon_of(const TrainSpec *s)
{
    Canon c = { .exact = s->exact, .tp_blocks = s->model.tp_blocks, .attn_block = s->attn_block };
    c.leaf_tokens = c.query_leaf = s->model.seq / s->seq_blocks;
    /* up to seq_blocks / 2 ranks share a sample, and its rows there up to tp_blocks: no leaf straddles a cut */
    const int64_t cuts = s->model.tp_blocks * (s->seq_blocks > 1 ? s->seq_blocks / 2 : 1);
    c.leaf_rows = s->model.seq % cuts ? 1 : 16;
    while (s->model.seq / cuts % c.leaf_rows || c.leaf_tokens % c.leaf_rows) c.leaf_rows /= 2;
    /* (modules of multi-token prediction read the table and the head once more each) */
    const bool heads = s->model.qk_norm == QK_NORM_HEADS && s->model.heads > s->model.mtp.count;
    const int64_t most = max64(heads ? s->model.heads : 1 + s->model.mtp.count, s->model.delta.value_heads);
    c.headroom_bits = log2_ceil((WideCount)s->global_batch * s->model.seq * most);
    return c;
}

static void open_arena(Trainer *t, Arena *a, const char *name, void *base, int64_t size_bytes)
{
    arena_init(a, name, base, size_bytes);
    a->poison = t->spec.poison && !t->device.is_null;
}

static Err alloc_arena(Trainer *t, Arena *a, const char *name, int64_t size_bytes)
{
    void *base;
    TRY(device_alloc(&t->device, size_bytes, &base));
    open_arena(t, a, name, base, size_bytes);
    return ERR_OK;
}

static Err alloc_states(Trainer *t, int64_t size_bytes)
{
    void *base;
    if (!t->spec.update.states_on_host) return ERR_OK;
    TRY(device_alloc_far(&t->device, size_bytes, &base));
    open_arena(t, &t->memory.states, "states of the optimizer", base, size_bytes);
    return ERR_OK;
}

static Err open_slot(Trainer *t, const ExecutorStage *stage, ExecutorSlot *s, int number)
{
    BatchSpec batch = trainer_batch_spec(t);
    s->unit = -1;
    batch.further = t->spec.purpose.forward_only ? 0 : stage_further(stage->model);
    for (int r = 0; r < REGION_COUNT; r++) {
        s->slot.region[r].number = number;
        s->slot.region[r].poison = t->spec.poison && !t->device.is_null;
    }
    s->slot.segment_count = stage_segments(stage->model);
    s->slot.queue_capacity = stage_linears(stage->model);
    TRY(setup_array(&t->memory.setup, s->slot.segment_count, &s->slot.segments));
    TRY(setup_array(&t->memory.setup, s->slot.queue_capacity, &s->slot.queue));
    if (t->spec.model.offload) TRY(setup_array(&t->memory.setup, stage->model->share.layer_count, &s->slot.away));
    if (t->parts.step.slices > 1) TRY(stage_kept_init(stage->model, &s->slot.kept, &t->memory.setup));
    TRY(stage_save_init(stage->model, &s->save, &t->memory.setup));
    if (fp8_facts(t->spec.model.fp8.recipe)->tensor)
        TRY(tensor_new(&t->memory.state, &s->slot.amax, I64,
                       fp8_amax_count(t->spec.model.fp8.recipe) * stage->params->reg->count));
    return batch_alloc(&batch, &s->batch, &t->memory.state);
}

/* (a replica may get no unit in a step, but one in an evaluation, and that has all slices at once) */
static int units_in_flight(const Trainer *t, const ExecutorStage *s)
{
    const int least = t->parts.step.slices;
    if (t->spec.purpose.forward_only) return least;
    int n = schedule_in_flight(&t->parts.step, s->replica, s->stage, false);
    return n > least ? n : least;
}

static Err open_slices(Trainer *t, ExecutorStage *s)
{
    Ctx *c = &t->executor.ctx;
    if (c->slices.count == 1 || t->spec.purpose.forward_only) return ERR_OK;
    c->batch = &s->slots->batch;
    return stage_grads_init(s->model, c, &s->slice_grads, &t->memory.state, &t->memory.setup);
}

static Err open_stage(Trainer *t, int index, int *slots)
{
    const Schedule *schedule = &t->parts.step;
    ExecutorStage *s = &t->executor.stages[index];
    const int replica = index / schedule->chunks, chunk = index % schedule->chunks;
    *s = (ExecutorStage){ .stage = schedule_stage_at(schedule, t->world->pp_rank, replica, chunk),
                          .replica = replica,
                          .model = parts_stage(&t->parts, replica, chunk),
                          .params = &t->stores[replica] };
    s->turns_back = executor_turns_back(&schedule->rank[t->world->pp_rank], replica, s->stage);
    memcpy(s->save_bytes, t->plan.stages[index].save, sizeof s->save_bytes);
    s->away_bytes = t->plan.stages[index].away;
    TRY(expert_load_open_stage(t, s));
    s->slot_count = units_in_flight(t, s);
    TRY(setup_array(&t->memory.setup, s->slot_count, &s->slots));
    for (int i = 0; i < s->slot_count; i++) TRY(open_slot(t, s, &s->slots[i], (*slots)++));
    return open_slices(t, s);
}

/* Boundary tensors are as large as the residual stream of a unit on this rank; all its buffers have room for as many as
 * any of its stages has. */
static Err open_buffers(Trainer *t)
{
    Executor *e = &t->executor;
    const int step = t->parts.step.rank[t->world->pp_rank].buffers;
    const int forward = t->parts.forward.rank[t->world->pp_rank].buffers;
    const int64_t tokens = trainer_batch_spec(t).B * t->spec.model.seq / (t->world->cp.size * t->parts.step.slices);
    const int64_t rows = tokens / t->world->sp.size;
    e->last_stage = t->parts.step.stages - 1;
    e->last_inputs = stage_inputs(&t->spec.model, t->parts.shares[e->last_stage]);
    e->buffer_tensors = 1;
    for (int i = 0; i < e->stage_count; i++)
        if (e->stages[i].stage >= e->last_stage - 1) e->buffer_tensors = e->last_inputs;
    e->buffer_count = forward > step || t->spec.purpose.forward_only ? forward : step;
    TRY(setup_array(&t->memory.setup, e->buffer_count, &e->buffers));
    for (int i = 0; i < e->buffer_count; i++)
        TRY(tensor_new(&t->memory.state, &e->buffers[i], ctx_residual(&e->ctx), e->buffer_tensors * rows,
                       t->spec.model.hidden));
    return ERR_OK;
}

/* One behind the other in the save memory. */
static Err open_heaps(Trainer *t, int slots)
{
    SaveHeap *heap = t->executor.heap;
    const int64_t first = t->plan.save_region[REGION_I], all = t->memory.save.size_bytes;
    char *behind = (char *)((uintptr_t)t->memory.save.base + (uintptr_t)first);
    ASSERT(first <= all);
    TRY(heap_init(&heap[REGION_I], t->memory.save.base, first, slots, &t->memory.setup));
    TRY(heap_init(&heap[REGION_W], behind, all - first, slots, &t->memory.setup));
    return heap_init(&t->executor.away, t->memory.away, t->plan.offload_host, slots, &t->memory.setup);
}

/* Are wgrads of this rank apart from their dgrads? */
static bool splits(const ActionList *list)
{
    int i = 0;
    while (i < list->count && list->action[i].kind != ACT_I) i++;
    return i < list->count;
}

/* Memory of saves that leave the device: the host's, and on the device a pair of buffers, or one more for forwards in
 * pairs (pair.h). */
static Err open_offload(Trainer *t, bool pairs)
{
    Executor *e = &t->executor;
    const bool keep_w = splits(&t->parts.step.rank[t->world->pp_rank]);
    if (!t->spec.model.offload) return ERR_OK;
    ASSERT(t->parts.step.slices == 1 && !t->spec.graphs);
    TRY(device_alloc_far(&t->device, t->plan.offload_host, &t->memory.away));
    for (int i = 0; i < (pairs ? 2 : 1); i++) {
        TRY(offload_init(&e->offload[i], &t->device, keep_w));
        for (int b = 0; b < OFFLOAD_BUFFERS; b++) {
            TRY(alloc_arena(t, &e->offload[i].buffer[b].room, "offload buffer", t->plan.offload[i][b]));
            e->offload[i].buffer[b].room.number = i * OFFLOAD_BUFFERS + b;
        }
    }
    e->ctx.offload = &e->offload[0];
    return ERR_OK;
}

static bool has_scores(const ModelSpec *s)
{
    for (int i = 0; i < model_blocks(s); i++)
        if (model_score_heads(s, i) > 0) return true;
    return false;
}

static Err open_logits(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    const int blocks = model_blocks(&s->model);
    if (!has_scores(&s->model)) return ERR_OK;
    if (s->purpose.forward_only || !(s->attention_logits || s->update.qk_clip.threshold > 0)) return ERR_OK;
    TRY(tensor_new(&t->memory.state, &t->executor.ctx.logit_max, I64, blocks, s->model.heads));
    return setup_array(&t->memory.setup, blocks, &t->layer_logits);
}

static Err open_executor(Trainer *t)
{
    Executor *e = &t->executor;
    int slots = 0;
    e->stage_count = t->parts.step.replicas * t->parts.step.chunks;
    e->pp = &t->world->pp;
    e->hooks = (ExecutorHooks){ t, hook_batch, hook_tied, hook_reduce, hook_norm, hook_update, trainer_hook_rows };
    e->ctx = (Ctx){ .s = &t->device.stream,
                    .world = t->world,
                    .scratch = &t->memory.scratch,
                    .step = t->step_values,
                    .canon = canon_of(&t->spec),
                    .cut = t->spec.cut,
                    .bands = t->spec.overlap_tp,
                    .slices.count = t->parts.step.slices,
                    .dtype = t->spec.compute,
                    .fp32_residual = t->spec.fp32_residual,
                    .fp32_row_sums = t->spec.fp32_row_sums };
    TRY(tensor_new(&t->memory.state, &e->sums, I64, 3 * (1 + t->spec.model.mtp.count)));
    TRY(open_logits(t));
    TRY(model_rope_tables(&t->spec.model, e->ctx.s, &t->memory.state, &t->memory.setup, &e->ctx.rope));
    TRY(setup_array(&t->memory.setup, e->stage_count, &e->stages));
    for (int i = 0; i < e->stage_count; i++) TRY(open_stage(t, i, &slots));
    TRY(open_buffers(t));
    TRY(executor_init(e, &t->memory.setup));
    const bool pairs = t->spec.overlap_moe && !t->spec.purpose.forward_only && t->world->tp_ep.size > 1;
    TRY(open_offload(t, pairs));
    if (pairs) TRY(pair_open(&e->pair, &t->memory.scratch_forward, t->spec.model.offload ? &e->offload[1] : NULL));
    return open_heaps(t, slots);
}

static Err open_stores(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    const GradKind grads = s->purpose.forward_only ? GRADS_NONE : s->exact ? GRADS_I64 : GRADS_F32;
    t->params = (ParamSet){ .whole = &t->parts.whole,
                            .registries = t->parts.registries,
                            .ranks = t->world->grid.pp,
                            .replicas = t->parts.step.replicas,
                            .stores = t->stores,
                            .lower = schedule_lower_replica(&t->parts.step, t->world->pp_rank),
                            .stats = &t->stats };
    const StoreMemory memory = { &t->memory.state, s->update.states_on_host ? &t->memory.states : &t->memory.state };
    TRY(grad_stats_init(&t->stats, t->parts.whole.count, !s->purpose.forward_only, &t->memory.state));
    for (int r = 0; r < t->params.replicas; r++) {
        const ParamRegistry *reg = param_set_registry(&t->params, t->world->pp_rank, r);
        TRY(param_store_init(&t->stores[r], reg, &t->stats, memory,
                             (StoreKinds){ s->compute, s->update.moments, grads }));
        if (grads != GRADS_NONE) TRY(param_store_list_parts(&t->stores[r], &t->memory.state, &t->device.stream));
        TRY(fp8_keep_weights(&t->stores[r], &s->model.fp8, &t->memory.state));
        for (ParamGroup g = 0; g < PARAM_GROUPS; g++) {
            t->stores[r].group[g] = parts_group(&t->parts, t->world, r, g);
            t->stores[r].far[g] = parts_far(&t->parts, t->world, r, g);
        }
    }
    TRY(expert_load_open(t));
    return setup_array(&t->memory.setup, 2 * t->stats.count, &t->host_shift);
}

/* Initial weights, and shifts with room for the step's sums. */
static Err fill(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    const int threads = s->device.threads > 0 ? s->device.threads : omp_get_max_threads();
    const int64_t tokens = trainer_batch(t, 1) * s->model.seq / schedule_updates(&t->parts.step);
    /* (an update that does not fit is done again, but not where others have gone on meanwhile) */
    const int start = trainer_is_async(t) ? FIRST_SHIFT - SHIFT_STEP : FIRST_SHIFT;
    const int shift = start + log2_ceil(tokens) + s->extra_shift;
    for (int i = 0; i < t->stats.count; i++) t->host_shift[i] = shift;
    TRY(device_write(&t->device.stream, t->stats.shift.data, t->host_shift, tensor_bytes(t->stats.shift)));
    for (int r = 0; r < t->params.replicas; r++)
        TRY(param_store_fill(&t->stores[r], &t->device.stream, s->seed, threads));
    return param_set_publish(&t->params, &t->device.stream);
}

static Err open_muon(Trainer *t)
{
    if (t->spec.update.optimizer != OPTIMIZER_MUON || t->spec.purpose.forward_only) return ERR_OK;
    for (int r = 0; r < t->params.replicas; r++)
        TRY(muon_open(&t->muon[r], &t->stores[r], t->world, &t->spec.update.muon, &t->device.stream, &t->memory.state));
    t->optim.muon = t->muon;
    return ERR_OK;
}

static Err open_optim(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    t->optim = (Optim){ .stores = t->params.replicas,
                        .stats = &t->stats,
                        .stream = &t->device.stream,
                        .world = t->world,
                        .step = t->step_values,
                        .sums = t->executor.sums,
                        .logit_max = t->executor.ctx.logit_max,
                        .scratch = &t->memory.scratch,
                        .kind = s->update.optimizer,
                        .adamw = s->update.adamw,
                        .hidden_rate = 1 / model_width(&s->model),
                        .qk_clip = s->update.qk_clip,
                        .bias_rate = s->model.moe.balance.bias_rate,
                        .headroom_bits = t->executor.ctx.canon.headroom_bits };
    for (int r = 0; r < t->params.replicas; r++) {
        t->optim.store[r] = &t->stores[r];
        const DdpSpec spec = { s->update.overlap_grad, s->update.overlap_param, .stages = t->executor.stage_count,
                               .in_turn = t->executor.pair.forward };
        TRY(ddp_init(&t->ddp[r], &t->stores[r], &t->device.stream, t->world, spec, &t->memory.state));
    }
    return open_muon(t);
}

static Err parts_spec(const TrainSpec *s, Grid g, PartsSpec *out)
{
    const int64_t microbatches = s->global_batch / (s->micro_batch * g.dp);
    if (microbatches > MAX_UNITS / g.pp)
        return err_set(ERR_CONFIG, "a step has %lld micro-batches on a rank; at most %d can be listed",
                       (long long)microbatches, MAX_UNITS / g.pp),
               err_hint("raise train.micro_batch or lower train.global_batch");
    *out =
        (PartsSpec){ .model = &s->model,
                     .pipeline = s->pipeline,
                     .microbatches = (int)microbatches,
                     .micro_batch = s->micro_batch,
                     .bucket_elems =
                         s->update.bucket_bytes ? s->update.bucket_bytes / dtype_size(s->exact ? I64 : F32) : INT64_MAX,
                     .zero = s->purpose.forward_only ? ZERO_NONE : s->update.zero,
                     .optimizer = s->update.optimizer,
                     .muon = &s->update.muon,
                     .narrow = s->compute != F32,
                     .fp32_vectors = s->fp32_vectors };
    return ERR_OK;
}

/*
 * Checks the rows of the parts of a micro-batch that a schedule passes on at once: as many on each rank of tp, and
 * whole leaves of gradients where ranks sum those of their own rows.
 */
static Err check_rows(const TrainSpec *s, Grid g, int64_t unit)
{
    const bool leaves = s->exact && model_sums_own_rows(&s->model);
    const int64_t pieces = unit * (leaves ? s->seq_blocks : s->model.seq);
    const int cp = g.cp ? g.cp : 1;
    if (!g.sp || unit == s->micro_batch || pieces % (g.tp * cp) == 0) return ERR_OK;
    err_set(ERR_CONFIG,
            "schedule '%s' passes on %lld of a micro-batch's %lld samples at once: with sp, tp%s must divide "
            "these x %s, here %lld x %lld",
            s->pipeline.schedule, (long long)unit, (long long)s->micro_batch, cp > 1 ? " x cp" : "",
            leaves ? "seq_blocks" : "seq", (long long)unit, (long long)(pieces / unit));
    return err_hint("raise train.micro_batch, or take a schedule that passes on whole micro-batches");
}

/* Older weights are whole. */
static Err check_zero(const TrainSpec *s)
{
    Versions versions;
    if (s->update.zero < ZERO_VALUES || !s->pipeline.schedule) return ERR_OK;
    TRY(schedule_versions(s->pipeline.schedule, &versions));
    if (versions == VERSIONS_STEP) return ERR_OK;
    err_set(ERR_CONFIG, "parallel.zero is at most 2 here: schedule '%s' keeps older weights beside the newest, whole",
            s->pipeline.schedule);
    return err_take("parallel.zero=2 parallel.reshard=auto"), err_take("parallel.reshard=never");
}

/* Refuses what some mixer cannot do: a way for ranks of cp to meet; slices so short; backward of heads so wide. */
static Err check_mixers(const TrainSpec *s, Grid g)
{
    const int slices = s->pipeline.slices;
    if (g.cp > 1) TRY(model_check_ways(&s->model));
    if (!s->purpose.forward_only) TRY(model_check_room(&s->model, s->device.kind));
    const int64_t cp = g.cp > 1 ? g.cp : 1;
    return model_check_slices(&s->model, slices > 1 ? slices : 1, cp);
}

/* Refuses units of so many samples that do not fit. */
static Err check_unit(const TrainSpec *s, Grid g, int64_t unit)
{
    TRY(check_rows(s, g, unit));
    return expert_load_check_pieces(s, g, unit);
}

static Err open_parts(Trainer *t)
{
    PartsSpec spec;
    TRY(parts_spec(&t->spec, t->world->grid, &spec));
    TRY(async_check(&t->spec, t->world->grid.pp));
    TRY(check_zero(&t->spec));
    TRY(check_mixers(&t->spec, t->world->grid));
    TRY(parts_open(&t->parts, &spec, t->world, &t->memory.setup));
    TRY(expert_load_check_order(t));
    return check_unit(&t->spec, t->world->grid, trainer_batch_spec(t).B);
}

Err trainer_grid(const TrainSpec *s, Grid *grid)
{
    PartsSpec spec;
    if (!grid->pp) grid->pp = 1;
    TRY(parts_spec(s, *grid, &spec));
    return parts_table_ranks(&spec, grid->pp, grid->embd);
}

Err trainer_schedule(const TrainSpec *s, Grid grid, Schedule *out)
{
    PartsSpec spec;
    *out = (Schedule){ 0 };
    if (!grid.pp) grid.pp = 1;
    TRY(parts_spec(s, grid, &spec));
    return parts_schedule(&spec, grid.pp, out);
}

Err trainer_forwards(const TrainSpec *s, Grid grid, Schedule *out)
{
    PartsSpec spec;
    *out = (Schedule){ 0 };
    if (!grid.pp) grid.pp = 1;
    TRY(parts_spec(s, grid, &spec));
    return parts_forwards(&spec, grid.pp, out);
}

Err trainer_check_shape(const TrainSpec *s, Grid grid)
{
    PartsSpec spec;
    int64_t unit;
    if (!grid.pp) grid.pp = 1;
    TRY(parts_spec(s, grid, &spec));
    TRY(async_check(s, grid.pp));
    TRY(check_zero(s));
    TRY(check_mixers(s, grid));
    TRY(parts_check(&spec, grid.pp, &unit));
    return check_unit(s, grid, unit);
}

/* The parts are those that a run opens, by the same call: what it would refuse is refused here. */
Err trainer_check(const TrainSpec *s, Grid grid)
{
    ON_HEAP(World, world, 1);
    ON_HEAP(Trainer, t, 1);
    t->spec = *s;
    t->world = world;
    TRY(trainer_check_shape(s, grid));
    TRY(trainer_grid(s, &grid));
    TRY(world_open_null(world, grid, 0));
    setup_init(&t->memory.setup);
    Err err = open_parts(t);
    parts_release(&t->parts);
    setup_release(&t->memory.setup);
    world_close(world);
    return err;
}

/* Takes the memory into which a step's outcome is read. */
static Err open_flight(Trainer *t)
{
    const Tensor largest = t->executor.ctx.logit_max;
    const int64_t sums = tensor_bytes(t->executor.sums), logits = largest.data ? tensor_bytes(largest) : 0;
    void *block;
    event_init(&t->flight.done);
    TRY(device_host_alloc(&t->device, (int64_t)sizeof(StepValues) + sums + logits + expert_load_bytes(t), &block));
    t->flight.values = block;
    t->flight.sums = (int64_t *)(t->flight.values + 1);
    t->flight.logits = t->flight.sums + sums / (int64_t)sizeof *t->flight.sums;
    t->flight.loads = (char *)t->flight.logits + logits;
    return ERR_OK;
}

static Err build(Trainer *t, const MemoryPlan *limits)
{
    const TrainSpec *s = &t->spec;
    const BatchSpec batch = trainer_batch_spec(t);
    void *step_values;
    TRY(alloc_arena(t, &t->memory.state, "state", limits->state));
    TRY(alloc_states(t, limits->states));
    TRY(alloc_arena(t, &t->memory.scratch, "scratch", limits->scratch - limits->scratch_forward));
    TRY(alloc_arena(t, &t->memory.scratch_forward, "scratch of forwards", limits->scratch_forward));
    TRY(alloc_arena(t, &t->memory.save, "saves", limits->save));
    TRY(open_stores(t));
    TRY(arena_alloc(&t->memory.state, sizeof(StepValues), &step_values));
    t->step_values = step_values;
    TRY(open_executor(t));
    if (s->graphs && device_can_record(&t->device) && !trainer_is_async(t))
        TRY(executor_use_graphs(&t->executor, &t->parts.step.rank[t->world->pp_rank], &t->memory.setup));
    /* products are timed by gradients that do not overflow, and never while they are recorded */
    t->executor.graphs_wait = s->compute == F16;
    if (s->purpose.generate)
        TRY(stage_caches_init(parts_stage(&t->parts, 0, 0), &t->caches, s->compute, &t->memory.state,
                              &t->memory.setup));
    TRY(batches_init(&t->batches, &batch, t->device.is_null, &t->memory.setup));
    TRY(trainer_open_rows(t));
    TRY(open_flight(t));
    TRY(open_optim(t));
    TRY(async_open(t));
    return fill(t);
}

Err trainer_open_on(Trainer *t, DeviceKind kind, const TrainSpec *spec, World *world, const MemoryPlan *limits)
{
    *t = (Trainer){ .spec = *spec, .world = world, .plan = *limits };
    setup_init(&t->memory.setup);
    DeviceChoice choice = spec->device;
    choice.kind = kind;
    choice.pinned_bytes = limits->pinned;
    if (spec->device.kind == DEVICE_CPU && spec->compute != F32) choice.staging_bytes = limits->staging;
    TRY(device_open(&t->device, choice));
    if (spec->compute == F16) t->progress.loss_scale.log2 = LOSS_SCALE_START;
    TRY(open_parts(t));
    trainer_take_batch(t, 0, trainer_batch(t, 1));
    return build(t, limits);
}

Err trainer_open(Trainer *t, const TrainSpec *spec, World *world, const MemoryPlan *limits)
{
    Err err = trainer_open_on(t, spec->device.kind, spec, world, limits);
    if (err) trainer_close(t);
    else setup_freeze(&t->memory.setup);
    return err;
}

static void free_arena(Trainer *t, const Arena *a) { device_free(&t->device, a->base, a->size_bytes); }

Err trainer_settle(Trainer *t)
{
    for (int r = 0; r < t->params.replicas; r++)
        if (t->ddp[r].params) TRY(ddp_settle(&t->ddp[r]));
    return ERR_OK;
}

void trainer_close(Trainer *t)
{
    if (trainer_settle(t)) log_debug("%s", err_message()); /* gathers may still write here */
    for (int r = 0; r < REPLICAS; r++) ddp_release(&t->ddp[r]);
    executor_release(&t->executor);
    parts_release(&t->parts);
    for (int i = 0; i < 2 * OFFLOAD_BUFFERS; i++)
        free_arena(t, &t->executor.offload[i / OFFLOAD_BUFFERS].buffer[i % OFFLOAD_BUFFERS].room);
    if (t->device.ops) device_free_far(&t->device, t->memory.away, t->plan.offload_host);
    free_arena(t, &t->memory.save);
    free_arena(t, &t->memory.scratch_forward);
    free_arena(t, &t->memory.scratch);
    free_arena(t, &t->memory.state);
    device_free_far(&t->device, t->memory.states.base, t->memory.states.size_bytes);
    device_host_free(&t->device, t->flight.values);
    if (t->flight.values) event_release(&t->flight.done);
    if (t->device.ops) device_close(&t->device);
    setup_release(&t->memory.setup);
    *t = (Trainer){ 0 };
}
