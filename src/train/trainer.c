/*
 * See trainer.h. Order of a step:
 *
 *   step values -> device | actions: F and B of every micro-batch, reduce, norm, update | step values -> host
 *
 * The host reads nothing in between. If a gradient leaf did not fit its fixed point the update has skipped
 * itself (an op decided that); the host then lowers all shifts and runs the same step again.
 */
#include "train/trainer.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#include "base/log.h"
#include "ckpt/ckpt.h"
#include "base/mathx.h"
#include "data/loader.h"

enum { FIRST_SHIFT = 40, SHIFT_STEP = 12, MAX_REDO = 2 };
enum {
    DRY_MICROBATCHES = 2,      /* that a dry run walks: the first, and one like all others */
    MAX_MICROBATCHES = 1 << 22 /* of a step on a rank: making the list then takes about 1 GB of the host */
};
static const int64_t UNLIMITED = (int64_t)1 << 45; /* of each arena of a dry run: 32 TiB */

int64_t memory_plan_host(const MemoryPlan *p) { return p->ahead + p->snapshot; }

int64_t memory_plan_total(const MemoryPlan *p)
{
    return p->state + p->slots * (p->save[REGION_I] + p->save[REGION_W]) + p->scratch + p->workspace +
           p->staging + (p->host_apart ? 0 : memory_plan_host(p));
}

/* ---- hooks of the executor ---- */

static Err write_rows(Trainer *t, Tensor dst, const void *src)
{
    return device_write(&t->device.stream, dst.data, src, tensor_bytes(dst));
}

/* Targets that follow an end of document are nobody's to predict: left out, as Megatron's eod_mask_loss does. */
static void leave_out_ends(const Trainer *t, const Batch *b, int32_t *targets)
{
    for (int64_t n = 0; n < b->B * b->T; n++) {
        const int64_t sample = n / b->T, position = spans_position(b->span, n - sample * b->T);
        if (t->host_tokens[sample * (b->seq + 1) + position] == t->spec.eod) targets[n] = -1;
    }
}

/* Behind each end of document a new one begins; a sample's first position always begins one. */
static void find_documents(const Trainer *t, const Batch *b)
{
    for (int64_t i = 0; i < b->B; i++) {
        const int32_t *token = t->host_tokens + i * (b->seq + 1);
        int32_t *doc = t->host_doc + i * b->seq, first = 0;
        for (int32_t p = 0; p < b->seq; p++) {
            doc[p] = first;
            if (token[p] == t->spec.eod) first = p + 1;
        }
    }
}

/* The rows' documents, and their positions in these. */
static Err fill_documents(Trainer *t, Batch *b)
{
    find_documents(t, b);
    for (int from_start = 0; from_start < 2; from_start++) {
        for (int64_t n = 0; n < b->B * b->T; n++) {
            const int64_t sample = n / b->T, position = spans_position(b->span, n - sample * b->T);
            const int32_t first = t->host_doc[sample * b->seq + position];
            t->host_rows[n] = from_start ? (int32_t)position - first : first;
        }
        TRY(write_rows(t, from_start ? b->place : b->doc, t->host_rows));
    }
    return ERR_OK;
}

/* tokens [B][seq + 1] -> the row tensors of a batch. */
static Err fill_batch(Trainer *t, Batch *b, int64_t first_sample)
{
    if (t->device.is_null) return ERR_OK;
    int64_t N = b->B * b->T, width = b->seq + 1;
    int32_t *rows = t->host_rows;
    int64_t *samples = (int64_t *)t->host_rows;
    for (int shift = 0; shift < 2; shift++) {
        for (int64_t n = 0; n < N; n++)
            rows[n] = t->host_tokens[n / b->T * width + spans_position(b->span, n % b->T) + shift];
        if (shift && t->spec.mask_eod) leave_out_ends(t, b, rows);
        TRY(write_rows(t, shift ? b->target : b->token, rows));
    }
    for (int64_t n = 0; n < N; n++) rows[n] = (int32_t)spans_position(b->span, n % b->T);
    TRY(write_rows(t, b->position, rows));
    if (b->doc.data) TRY(fill_documents(t, b));
    for (int64_t n = 0; n < N; n++) samples[n] = first_sample + n / b->T;
    TRY(write_rows(t, b->sample, samples));
    for (int64_t n = 0; n < b->B; n++) samples[n] = first_sample + n;
    return write_rows(t, b->samples, samples);
}

static int64_t step_microbatches(const Trainer *t)
{
    return t->spec.global_batch / (t->spec.micro_batch * t->world->grid.dp);
}

/* A dp rank's samples are one contiguous share of the global batch. Any assignment gives the same bits. */
static Err hook_batch(void *user, int microbatch, Batch *b)
{
    Trainer *t = user;
    int64_t share = t->spec.global_batch / t->world->grid.dp;
    int64_t first = t->first_sample + t->world->dp_rank * share + microbatch * t->spec.micro_batch;
    if (t->source.get) TRY(t->source.get(t->source.user, first, b->B, t->host_tokens));
    return fill_batch(t, b, first);
}

static Err hook_reduce(void *user)
{
    Trainer *t = user;
    TRY(ddp_reduce(&t->ddp));
    return optim_sum_loss(&t->optim);
}

static Err hook_norm(void *user) { return optim_norm(&((Trainer *)user)->optim); }

static Err hook_update(void *user)
{
    Trainer *t = user;
    TRY(optim_update(&t->optim));
    return ddp_gather(&t->ddp);
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
    /* rows may be sharded over up to tp_blocks ranks: leaves must not straddle the cuts */
    c.leaf_rows = s->model.seq % s->model.tp_blocks ? 1 : 16;
    while (s->model.seq / s->model.tp_blocks % c.leaf_rows) c.leaf_rows /= 2;
    c.room = log2_ceil((WideCount)s->global_batch * s->model.seq * (s->model.qk_norm ? s->model.heads : 1));
    return c;
}

static Err alloc_batch(Trainer *t, Batch *b)
{
    int64_t N = t->spec.micro_batch * t->spec.model.seq;
    *b = (Batch){ .B = t->spec.micro_batch, .T = t->spec.model.seq, .seq = t->spec.model.seq };
    b->span = spans_whole(b->T);
    TRY(tensor_new(&t->state, &b->token, I32, N));
    TRY(tensor_new(&t->state, &b->target, I32, N));
    TRY(tensor_new(&t->state, &b->position, I32, N));
    if (t->spec.reset_at_eod) {
        TRY(tensor_new(&t->state, &b->doc, I32, b->B, b->T));
        TRY(tensor_new(&t->state, &b->place, I32, N));
    }
    TRY(tensor_new(&t->state, &b->sample, I64, N));
    return tensor_new(&t->state, &b->samples, I64, b->B);
}

static Err alloc_arena(Trainer *t, Arena *a, const char *name, int64_t size_bytes)
{
    void *base;
    TRY(device_alloc(&t->device, size_bytes, &base));
    arena_init(a, name, base, size_bytes);
    a->poison = t->spec.poison && !t->device.is_null;
    return ERR_OK;
}

static Err open_slot(Trainer *t, int number, const MemoryPlan *limits)
{
    ExecutorSlot *s = &t->executor.slots[number];
    s->microbatch = -1;
    TRY(alloc_arena(t, &s->slot.region[REGION_I], "save (input half)", limits->save[REGION_I]));
    TRY(alloc_arena(t, &s->slot.region[REGION_W], "save (weight half)", limits->save[REGION_W]));
    for (int r = 0; r < REGION_COUNT; r++) s->slot.region[r].number = number;
    s->slot.segment_count = stage_segments(&t->stage);
    s->slot.queue_capacity = stage_linears(&t->stage);
    TRY(setup_array(&t->setup, s->slot.segment_count, &s->slot.segments));
    TRY(setup_array(&t->setup, s->slot.queue_capacity, &s->slot.queue));
    TRY(stage_save_init(&t->stage, &s->save, &t->setup));
    return alloc_batch(t, &s->batch);
}

static Err make_schedule(Trainer *t, int microbatches)
{
    const ScheduleSpec spec = { .name = "1f1b", .ranks = 1, .microbatches = microbatches };
    schedule_free(&t->schedule);
    return schedule_make(&spec, &t->schedule);
}

static Err open_executor(Trainer *t, const MemoryPlan *limits)
{
    Executor *e = &t->executor;
    TRY(make_schedule(t, t->microbatches));
    e->stage = &t->stage;
    e->hooks = (ExecutorHooks){ t, hook_batch, hook_reduce, hook_norm, hook_update };
    e->slot_count = schedule_in_flight(&t->schedule, 0, 0, false);
    e->ctx = (Ctx){ .s = &t->device.stream,
                    .world = t->world,
                    .params = &t->params,
                    .scratch = &t->scratch,
                    .step = t->step_values,
                    .canon = canon_of(&t->spec),
                    .dtype = t->spec.compute };
    TRY(tensor_new(&t->state, &e->sums, I64, 3));
    TRY(model_rope_tables(&t->spec.model, e->ctx.s, &t->state, &t->setup, &e->ctx.rope_cos,
                          &e->ctx.rope_sin));
    TRY(setup_array(&t->setup, e->slot_count, &e->slots));
    for (int i = 0; i < e->slot_count; i++) TRY(open_slot(t, i, limits));
    return ERR_OK;
}

/* Where tokens wait on their way to the device. */
static Err alloc_staging(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    if (t->device.is_null) return ERR_OK;
    TRY(setup_array(&t->setup, s->micro_batch * (s->model.seq + 1), &t->host_tokens));
    if (s->reset_at_eod) TRY(setup_array(&t->setup, s->micro_batch * s->model.seq, &t->host_doc));
    return setup_array(&t->setup, 2 * s->micro_batch * s->model.seq, &t->host_rows);
}

static GradKind grad_kind(const Trainer *t)
{
    if (t->spec.forward_only) return GRADS_NONE;
    return t->spec.exact ? GRADS_I64 : GRADS_F32;
}

static Err register_model(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    const World *w = t->world;
    int64_t bucket = s->bucket_bytes ? s->bucket_bytes / dtype_size(s->exact ? I64 : F32) : INT64_MAX;
    bool zero = s->zero && !s->forward_only;
    param_registry_init(&t->registry, &t->setup, w->grid.tp, w->tp_rank);
    TRY(stage_register(&t->stage, &t->registry, &s->model, 0, s->model.layers, &t->setup));
    return param_layout(&t->registry, bucket, zero ? w->grid.dp : 1, zero ? w->dp_rank : 0);
}

static Err build(Trainer *t, const MemoryPlan *limits)
{
    const TrainSpec *s = &t->spec;
    int64_t microbatches = step_microbatches(t);
    void *step_values;
    if (t->device.is_null && microbatches > DRY_MICROBATCHES) microbatches = DRY_MICROBATCHES;
    if (microbatches > MAX_MICROBATCHES)
        return err_set(ERR_CONFIG, "a step has %lld micro-batches on a rank; at most %d can be listed",
                       (long long)microbatches, MAX_MICROBATCHES),
               err_hint("raise train.micro_batch or lower train.global_batch");
    t->microbatches = (int)microbatches;
    TRY(register_model(t));
    TRY(alloc_arena(t, &t->state, "state", limits->state));
    TRY(alloc_arena(t, &t->scratch, "scratch", limits->scratch));
    TRY(param_store_init(&t->params, &t->registry, &t->state, s->compute, grad_kind(t)));
    TRY(arena_alloc(&t->state, sizeof(StepValues), &step_values));
    t->step_values = step_values;
    TRY(open_executor(t, limits));
    if (s->graphs && device_can_record(&t->device)) TRY(executor_use_graphs(&t->executor, &t->setup));
    if (s->generate) TRY(stage_kv_init(&t->stage, &t->kv, s->compute, &t->state, &t->setup));
    TRY(alloc_staging(t));
    TRY(ddp_init(&t->ddp, &t->params, &t->device.stream, t->world, s->overlap_grad, s->overlap_param));
    TRY(setup_array(&t->setup, 2 * t->registry.count, &t->host_shift));
    t->optim = (Optim){ .params = &t->params,
                        .stream = &t->device.stream,
                        .world = t->world,
                        .step = t->step_values,
                        .sums = t->executor.sums,
                        .adamw = s->adamw,
                        .room = t->executor.ctx.canon.room };
    int shift = FIRST_SHIFT + log2_ceil(s->global_batch * s->model.seq) + s->extra_shift;
    TRY(param_store_fill(&t->params, &t->device.stream, s->seed, shift,
                         s->threads > 0 ? s->threads : omp_get_max_threads()));
    return param_store_publish(&t->params, &t->device.stream, &t->world->dp);
}

static Err open_on(Trainer *t, DeviceKind kind, const TrainSpec *spec, World *world, const MemoryPlan *limits)
{
    *t = (Trainer){ .spec = *spec, .world = world, .plan = *limits };
    setup_init(&t->setup);
    DeviceChoice choice = { .kind = kind, .index = spec->gpu, .threads = spec->threads, .isa = spec->isa };
    if (spec->device == DEVICE_CPU && spec->compute != F32) choice.staging_bytes = limits->staging;
    TRY(device_open(&t->device, choice));
    if (spec->compute == F16) t->loss_scale.log2 = LOSS_SCALE_START;
    return build(t, limits);
}

/* ---- planning ---- */

static Err too_much_work(void)
{
    err_set(ERR_CONFIG, "a step is more work on a rank than 64 bits count");
    return err_hint("lower train.global_batch, train.micro_batch or model.seq");
}

static Err work_so_far(const Trainer *t, MemoryPlan *out)
{
    const DeviceCounters *c = &t->device.counters;
    if (c->flop > INT64_MAX || c->bytes > INT64_MAX) return too_much_work();
    MemoryPlan w = { .flop = (int64_t)c->flop, .op_bytes = (int64_t)c->bytes };
    for (int i = 0; i < WORLD_COMMS; i++) {
        const Comm *comm = &t->world->comm[i];
        w.comm_bytes += comm->sent_bytes;
        for (int k = 0; k < COMM_KIND_COUNT; k++) w.comm[i][k] = (CommWork){ comm->calls[k], comm->bytes[k] };
    }
    *out = w;
    return ERR_OK;
}

/* false: a sum does not fit. */
static bool add_times(int64_t *sum, int64_t by, int64_t times)
{
    return !__builtin_mul_overflow(by, times, &by) && !__builtin_add_overflow(*sum, by, sum);
}

/* The counts of work, and none of memory: w += times * by. */
static bool add_work(MemoryPlan *w, const MemoryPlan *by, int64_t times)
{
    bool fits = add_times(&w->flop, by->flop, times) && add_times(&w->op_bytes, by->op_bytes, times) &&
                add_times(&w->comm_bytes, by->comm_bytes, times);
    for (int i = 0; i < WORLD_COMMS * COMM_KIND_COUNT && fits; i++) {
        CommWork *to = &w->comm[i / COMM_KIND_COUNT][i % COMM_KIND_COUNT];
        const CommWork *from = &by->comm[i / COMM_KIND_COUNT][i % COMM_KIND_COUNT];
        fits = add_times(&to->calls, from->calls, times) && add_times(&to->bytes, from->bytes, times);
    }
    return fits;
}

static Err dry_step(Trainer *t, int microbatches, MemoryPlan *work)
{
    StepReport report;
    MemoryPlan before;
    TRY(work_so_far(t, &before));
    TRY(make_schedule(t, microbatches));
    TRY(trainer_step(t, (TokenSource){ 0 }, &report));
    TRY(work_so_far(t, work));
    add_work(work, &before, -1);
    return ERR_OK;
}

/* All micro-batches have one shape: each after the first adds what the second adds. */
static Err count_step(Trainer *t, MemoryPlan *out)
{
    MemoryPlan more;
    int64_t times = step_microbatches(t) - 1;
    TRY(dry_step(t, 1, out));
    if (!times) return ERR_OK;
    TRY(dry_step(t, DRY_MICROBATCHES, &more));
    add_work(&more, out, -1);
    return add_work(out, &more, times) ? ERR_OK : too_much_work();
}

static Err dry_run(Trainer *t, MemoryPlan *out)
{
    double loss;
    int64_t counted;
    if (t->kv) TRY(trainer_logits(t, NULL, 0, t->spec.model.seq, NULL));
    if (!t->spec.forward_only) TRY(count_step(t, out));
    TRY(trainer_eval(t, (TokenSource){ 0 }, 0, 1, &loss, &counted));
    MemoryPlan peak = trainer_peak(t);
    add_work(&peak, out, 1);
    peak.workspace = DEVICE_WORKSPACE_BYTES;
    peak.params = param_total(&t->registry);
    peak.flat_count = t->registry.flat_count;
    peak.slice_count = t->registry.flat_count / t->registry.slices;
    peak.padding = param_padding(&t->registry);
    peak.buckets = t->registry.bucket_count;
    peak.grad_bytes = t->params.grad.data ? tensor_bytes(t->params.grad) : 0;
    *out = peak;
    return ERR_OK;
}

Err trainer_plan(const TrainSpec *spec, Grid grid, int rank, MemoryPlan *out)
{
    World world;
    Trainer t;
    MemoryPlan unlimited = {
        .state = UNLIMITED, .save = { UNLIMITED, UNLIMITED }, .scratch = UNLIMITED, .staging = UNLIMITED
    };
    *out = (MemoryPlan){ 0 };
    TRY(world_open_null(&world, grid, rank));
    Err err = open_on(&t, DEVICE_NULL, spec, &world, &unlimited);
    if (!err) err = dry_run(&t, out);
    if (!err && spec->snapshot) err = ckpt_snapshot_bytes(&t.params, &world, &out->snapshot);
    if (spec->ahead) out->ahead = loader_bytes(spec->global_batch / grid.dp, spec->model.seq);
    out->host_apart = spec->device == DEVICE_CUDA;
    if (err == ERR_MEMORY) err_prefix(err, "this run needs more than %d TiB", (int)(UNLIMITED >> 40));
    trainer_close(&t);
    world_close(&world);
    return err;
}

Err trainer_open(Trainer *t, const TrainSpec *spec, World *world, const MemoryPlan *limits)
{
    Err err = open_on(t, spec->device, spec, world, limits);
    if (err) trainer_close(t);
    else setup_freeze(&t->setup);
    return err;
}

void trainer_close(Trainer *t)
{
    if (t->ddp.params && ddp_settle(&t->ddp))
        log_debug("%s", err_message()); /* gathers may still write here */
    ddp_release(&t->ddp);
    executor_release(&t->executor);
    schedule_free(&t->schedule);
    for (int i = 0; t->executor.slots && i < t->executor.slot_count; i++)
        for (int r = 0; r < REGION_COUNT; r++) {
            Arena *a = &t->executor.slots[i].slot.region[r];
            device_free(&t->device, a->base, a->size_bytes);
        }
    device_free(&t->device, t->scratch.base, t->scratch.size_bytes);
    device_free(&t->device, t->state.base, t->state.size_bytes);
    if (t->device.ops) device_close(&t->device);
    setup_release(&t->setup);
    *t = (Trainer){ 0 };
}

MemoryPlan trainer_peak(const Trainer *t)
{
    MemoryPlan p = { .state = t->state.peak_bytes,
                     .scratch = t->scratch.peak_bytes,
                     .slots = t->executor.slot_count,
                     .workspace = t->device.workspace_bytes,
                     .staging = t->device.staging.peak_bytes };
    for (int i = 0; i < p.slots; i++)
        for (int r = 0; r < REGION_COUNT; r++) {
            int64_t peak = t->executor.slots[i].slot.region[r].peak_bytes;
            if (peak > p.save[r]) p.save[r] = peak;
        }
    return p;
}

/* ---- one step ---- */

static Err step_begin(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    int64_t update = t->updates + 1, nominal = s->global_batch * s->model.seq;
    StepValues v = { .step = t->step + 1,
                     .nominal = nominal,
                     .lr = (float)lr_at(&s->lr, update),
                     .correct1 = (float)(1 - m_pow(s->adamw.beta1, (double)update)),
                     .correct2 = (float)(1 - m_pow(s->adamw.beta2, (double)update)),
                     .clip = s->clip,
                     .loss_scale = ldexpf(1 / (float)nominal, (int)t->loss_scale.log2),
                     .unscale = ldexpf(1, -(int)t->loss_scale.log2) };
    Stream *stream = &t->device.stream;
    TRY(device_write(stream, t->step_values, &v, sizeof v));
    TRY(device_zero(stream, t->executor.sums.data, tensor_bytes(t->executor.sums)));
    param_store_begin(&t->params);
    ddp_begin(&t->ddp);
    return device_zero(stream, t->params.overflow_cell.data, tensor_bytes(t->params.overflow_cell));
}

/* True if the step is to be done again with a smaller loss scale: fp16 gradients that are not finite. */
static bool lower_loss_scale(Trainer *t, const StepValues *v)
{
    if (t->spec.compute != F16 || !v->nonfinite || v->loss_nonfinite || t->loss_scale.log2 == 0) return false;
    t->loss_scale = (LossScale){ .log2 = t->loss_scale.log2 - 1 };
    return true;
}

static void raise_loss_scale(Trainer *t)
{
    if (t->spec.compute != F16 || ++t->loss_scale.good_steps < LOSS_SCALE_WINDOW) return;
    t->loss_scale.good_steps = 0;
    if (t->loss_scale.log2 < LOSS_SCALE_START) t->loss_scale.log2++;
}

/* After an overflow: coarser fixed point for every gradient. Done on the host, between steps. */
static Err lower_shifts(Trainer *t, int by)
{
    Tensor shift = t->params.shift;
    int64_t n = t->registry.count;
    int32_t *now = t->host_shift + n;
    for (int64_t i = 0; i < n; i++) now[i] = t->host_shift[i] - by;
    return device_write(&t->device.stream, shift.data, now, tensor_bytes(shift));
}

/* Sums leave out what is not finite: of a bad step they are the loss and norm of something else. */
static void report_of(const StepValues *v, StepReport *r)
{
    double sum = (double)v->loss_fixed * exp2(-LOSS_FIXED_BITS);
    *r = (StepReport){ .step = v->step,
                       .loss = v->loss_nonfinite || v->counted == 0 ? NAN : sum / (double)v->counted,
                       .counted = v->counted,
                       .grad_norm = v->skip ? NAN : v->grad_norm,
                       .lr = v->lr,
                       .skipped = v->skip };
}

/* What a trace of this step begins with: some arenas do not change in it. */
static void show_arenas(const Trainer *t)
{
    arena_show(&t->state);
    arena_show(&t->scratch);
    for (int i = 0; i < t->executor.slot_count; i++)
        for (int r = 0; r < REGION_COUNT; r++) arena_show(&t->executor.slots[i].slot.region[r]);
}

Err trainer_step(Trainer *t, TokenSource source, StepReport *report)
{
    StepValues v = { 0 };
    Stream *stream = &t->device.stream;
    int redone = 0, rescaled = 0;
    const LossScale scale = t->loss_scale;
    t->source = source;
    t->first_sample = t->samples;
    show_arenas(t);
    TRY(device_read(stream, t->host_shift, t->params.shift.data, tensor_bytes(t->params.shift)));
    for (;;) {
        TRY(step_begin(t));
        TRY(executor_run(&t->executor, t->schedule.rank[0].action, t->schedule.rank[0].count));
        TRY(device_read(stream, &v, t->step_values, sizeof v));
        if (lower_loss_scale(t, &v)) rescaled++;
        else if (v.overflow && !v.nonfinite && redone < MAX_REDO) TRY(lower_shifts(t, SHIFT_STEP * ++redone));
        else break;
    }
    Tensor next = t->params.next_shift;
    if (!v.skip) TRY(device_copy(stream, t->params.shift.data, next.data, tensor_bytes(next)));
    else TRY(device_write(stream, t->params.shift.data, t->host_shift, tensor_bytes(next)));
    t->step++;
    t->samples += t->spec.global_batch;
    t->updates += !v.skip;
    if (!v.skip) raise_loss_scale(t);
    else t->loss_scale = scale; /* no scale was small enough: it was not the scale */
    t->skipped += v.skip;
    report_of(&v, report);
    report->redone = redone;
    report->rescaled = rescaled;
    return ERR_OK;
}

/* Loss, counted tokens and non-finite flag of the global batch from t->first_sample on. */
static Err eval_batch(Trainer *t, int64_t sums[3])
{
    Stream *stream = &t->device.stream;
    Tensor device_sums = t->executor.sums;
    TRY(device_zero(stream, device_sums.data, tensor_bytes(device_sums)));
    for (int m = 0; m < t->microbatches; m++) TRY(executor_eval(&t->executor, m));
    TRY(comm_sum_i64(&t->world->dp, stream, device_sums.data, 3, NULL));
    return device_read(stream, sums, device_sums.data, tensor_bytes(device_sums));
}

/* A batch's sum fits 64 bits, that of an evaluation need not: nats and their fraction are added apart. */
Err trainer_eval(Trainer *t, TokenSource source, int64_t first, int64_t batches, double *loss,
                 int64_t *counted)
{
    const int64_t one = (int64_t)1 << LOSS_FIXED_BITS;
    int64_t sums[3] = { 0 }, nats = 0, rest = 0, bad = 0;
    t->source = source;
    *counted = 0;
    for (int64_t i = 0; i < batches; i++) {
        t->first_sample = first + i * t->spec.global_batch;
        TRY(eval_batch(t, sums));
        rest += sums[0] % one;
        nats += sums[0] / one + rest / one;
        rest %= one;
        *counted += sums[1];
        bad |= sums[2];
    }
    *loss = bad || !*counted ? NAN : ((double)nats + (double)rest / (double)one) / (double)*counted;
    return ERR_OK;
}

/* The rows of positions past .. past + n - 1 of a batch of one sample. */
static Batch batch_part(const Batch *whole, int64_t past, int64_t n)
{
    Batch part = *whole;
    part.T = n;
    part.span = (Spans){ { past, 0 }, { n, 0 } };
    part.token = tensor_row_slice(whole->token, 0, n);
    part.target = tensor_row_slice(whole->target, 0, n);
    part.position = tensor_row_slice(whole->position, 0, n);
    part.sample = tensor_row_slice(whole->sample, 0, n);
    if (whole->doc.data) {
        part.place = tensor_row_slice(whole->place, 0, n);
        part.doc = tensor_of(whole->doc.data, I32, 1, n);
    }
    return part;
}

Err trainer_logits(Trainer *t, const int32_t *tokens, int64_t past, int64_t n, float *logits)
{
    Executor *e = &t->executor;
    ExecutorSlot *s = &e->slots[0];
    Batch whole = s->batch;
    Tensor out, wide;
    ASSERT(t->kv && past >= 0 && n >= 1 && past + n <= whole.seq);
    s->batch = batch_part(&whole, past, n);
    if (tokens) memcpy(t->host_tokens + past, tokens, (size_t)n * sizeof *tokens);
    TRY(fill_batch(t, &s->batch, 0));
    e->ctx.dropout_on = false;
    e->ctx.slot = &s->slot;
    e->ctx.batch = &s->batch;
    for (int r = 0; r < REGION_COUNT; r++) e->ctx.into[r] = &s->slot.region[r];
    ArenaMark mark = arena_mark(&t->scratch);
    TRY(tensor_new(&t->scratch, &out, t->spec.compute, 1, t->spec.model.padded_vocab));
    TRY(stage_logits(&t->stage, &e->ctx, &s->save, t->kv, out));
    wide = tensor_reshape(out, t->spec.model.padded_vocab);
    if (t->spec.compute != F32) {
        TRY(tensor_new(&t->scratch, &wide, F32, t->spec.model.padded_vocab));
        TRY(op(&t->device.stream, cast, .y = wide, .x = tensor_reshape(out, t->spec.model.padded_vocab)));
    }
    if (logits)
        TRY(device_read(&t->device.stream, logits, wide.data, t->spec.model.vocab * (int64_t)sizeof *logits));
    arena_release(&t->scratch, mark);
    for (int r = 0; r < REGION_COUNT; r++) arena_release(&s->slot.region[r], 0);
    s->batch = whole;
    return ERR_OK;
}
