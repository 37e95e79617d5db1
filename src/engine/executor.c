/* See executor.h. */
#include "engine/executor.h"

#include "base/clock.h"
#include "base/fault.h"
#include "base/trace.h"
#include "engine/action_trace.h"

/* ---- stages, slots, saves ---- */

static ExecutorStage *stage_of(Executor *e, const Action *a)
{
    for (int i = 0; i < e->stage_count; i++)
        if (e->stages[i].stage == a->stage && e->stages[i].replica == a->replica) return &e->stages[i];
    ASSERT(!"the list names a stage that is not this rank's");
    return NULL;
}

static ExecutorSlot *slot_of(ExecutorStage *s, int unit)
{
    for (int i = 0; i < s->slot_count; i++)
        if (s->slots[i].unit == unit) return &s->slots[i];
    ASSERT(!"no slot: the list runs more units at once than the stage has slots");
    return NULL;
}

static int slices_of(const Ctx *c) { return c->slices.count > 1 ? c->slices.count : 1; }

/* The slots of the slot's slice and those before it. */
static void enter_slices(Ctx *c, ExecutorStage *s, ExecutorSlot *slot)
{
    const int slices = slices_of(c);
    if (slices == 1) return;
    c->slices.at = slot->unit % slices;
    c->slices.grads = s->slice_grads;
    for (int i = 0; i <= c->slices.at; i++) c->slices.slots[i] = &slot_of(s, slot->unit - c->slices.at + i)->slot;
}

void executor_enter(Ctx *c, ExecutorStage *s, ExecutorSlot *slot)
{
    c->params = s->params;
    c->balance.so_far = s->loads_so_far;
    c->balance.losses = s->balance_losses;
    c->slot = &slot->slot;
    c->batch = &slot->batch;
    for (int r = 0; r < REGION_COUNT; r++) c->into[r] = &slot->slot.region[r];
    enter_slices(c, s, slot);
}

static Err take_region(Executor *e, ExecutorStage *s, ExecutorSlot *slot, Region r)
{
    static const char *const names[] = { "save (dgrad)", "save (wgrad)" };
    Arena *a = &slot->slot.region[r];
    const int number = a->number;
    const bool poison = a->poison;
    TRY(heap_take(&e->heap[r], s->save_bytes[r], &slot->block[r]));
    arena_init(a, names[r], (void *)((uintptr_t)e->heap[r].base + (uintptr_t)slot->block[r].offset), s->save_bytes[r]);
    a->number = number;
    a->poison = poison;
    return ERR_OK;
}

static void give_region(Executor *e, ExecutorStage *s, ExecutorSlot *slot, Region r)
{
    Arena *a = &slot->slot.region[r];
    if (a->peak_bytes > s->peak_bytes[r]) s->peak_bytes[r] = a->peak_bytes;
    arena_release(a, 0);
    heap_give(&e->heap[r], slot->block[r]);
    slot->block[r] = (SaveBlock){ 0 };
}

/* In the host's memory, where units of training alone have anything. */
static Err take_away(Executor *e, ExecutorStage *s, ExecutorSlot *slot)
{
    const int64_t bytes = e->ctx.mode.training ? s->away_bytes : 0;
    TRY(heap_take(&e->away, bytes, &slot->away));
    arena_init(&slot->slot.host, "offload", (void *)((uintptr_t)e->away.base + (uintptr_t)slot->away.offset), bytes);
    return ERR_OK;
}

static void give_away(Executor *e, ExecutorStage *s, ExecutorSlot *slot)
{
    if (slot->slot.host.peak_bytes > s->away_peak) s->away_peak = slot->slot.host.peak_bytes;
    heap_give(&e->away, slot->away);
    slot->away = (SaveBlock){ 0 };
}

Err executor_take(Executor *e, ExecutorStage *s, ExecutorSlot *slot)
{
    if (slot->slot.kept) stage_kept_clear(s->model, slot->slot.kept);
    for (Region r = 0; r < REGION_COUNT; r++) TRY(take_region(e, s, slot, r));
    return take_away(e, s, slot);
}

void executor_give(Executor *e, ExecutorStage *s, ExecutorSlot *slot)
{
    for (Region r = 0; r < REGION_COUNT; r++) give_region(e, s, slot, r);
    give_away(e, s, slot);
    slot->unit = -1;
}

/* ---- messages ---- */

/* Before a buffer is read or written. */
static Err wait_buffer(Executor *e, int buffer)
{
    if (buffer < 0 || e->moving[buffer] < 0) return ERR_OK;
    Transfer *t = &e->transfers[e->moving[buffer]];
    e->moving[buffer] = -1;
    t->buffers--;
    return stream_wait(e->ctx.s, &t->done);
}

static Transfer *free_transfer(Executor *e)
{
    for (int i = 0; i <= e->buffer_count; i++)
        if (!e->transfers[i].buffers) return &e->transfers[i];
    ASSERT(!"every buffer is part of one transfer at most");
    return NULL;
}

/*
 * Contents of the buffer that an action reads (`in`) or writes: of the boundary before its stage, or behind it. A
 * message names the stage that consumes it. Tensors that only modules of multi-token prediction made are not there in
 * evaluation.
 */
typedef struct {
    int tensors;
    bool hidden; /* what a head alone reads, which is no residual stream */
} Crossing;

static Crossing crossing_of(const Executor *e, const Action *a, bool in)
{
    const bool compute = action_is_compute(a->kind);
    const bool gradient = compute ? a->kind != ACT_F : a->payload == PAYLOAD_GRADIENT;
    const int before = a->stage + ((!compute || in) == gradient);
    const bool hidden = before == e->last_stage && e->last_inputs > 1;
    return (Crossing){ e->ctx.mode.training && hidden ? e->last_inputs : 1, hidden };
}

static Tensor tensors_in(const Executor *e, int buffer, Crossing what, int first, int count)
{
    Tensor all = e->buffers[buffer];
    const int64_t rows = all.dim[0] / e->buffer_tensors;
    if (what.hidden) all.dtype = e->ctx.dtype;
    return tensor_row_slice(all, first * rows, count * rows);
}

static CommMessage message_of(Executor *e, const Action *a)
{
    const bool send = a->kind == ACT_SEND;
    const Crossing what = crossing_of(e, a, !send);
    const Tensor t = tensors_in(e, send ? a->out : a->in, what, 0, what.tensors);
    return (CommMessage){ .send = send,
                          .peer = a->peer,
                          .data = t.data,
                          .bytes = tensor_bytes(t),
                          .what = { .kind = a->payload == PAYLOAD_GRADIENT ? MESSAGE_GRADIENT : MESSAGE_ACTIVATION,
                                    .stage = a->stage,
                                    .microbatch = (uint32_t)a->microbatch } };
}

/* How many units of an action are run; 0 or less: none. */
static int units_of(const Executor *e, const Action *a)
{
    const int count = a->count > 1 ? a->count : 1, left = e->units ? e->units - a->microbatch : count;
    return left < count ? left : count;
}

static int moved_buffer(const Action *a) { return a->kind == ACT_SEND ? a->out : a->in; }

/* The group that begins at a[0]; how many actions it has in *count. */
static Err exchange(Executor *e, const Action *a, int *count)
{
    int n = 0, end = 0;
    do {
        if (units_of(e, &a[end]) <= 0) continue;
        TRY(wait_buffer(e, moved_buffer(&a[end]))); /* of what was sent from it before */
        ASSERT(n < e->buffer_count);
        e->messages[n++] = message_of(e, &a[end]);
        trace_message(&a[end], e->runs);
    } while (a[end++].flags & ACTION_MORE);
    *count = end;
    if (!n) return ERR_OK;
    Transfer *t = free_transfer(e);
    t->buffers = n;
    for (int i = 0; i < end; i++)
        if (units_of(e, &a[i]) > 0) e->moving[moved_buffer(&a[i])] = (int)(t - e->transfers);
    return comm_exchange(e->pp, e->ctx.s, e->messages, n, &t->done);
}

static Err wait_all(Executor *e)
{
    for (int b = 0; b < e->buffer_count; b++) TRY(wait_buffer(e, b));
    return ERR_OK;
}

/* ---- compute ---- */

static Boundary boundary(const Executor *e, int buffer, Crossing what)
{
    if (buffer < 0) return (Boundary){ .count = 0 };
    Boundary b = { .count = what.tensors };
    for (int i = 0; i < what.tensors; i++) b.t[i] = tensors_in(e, buffer, what, i, 1);
    return b;
}

/* Buffer of the n-th unit of an action. */
static int buffer_at(int first, int n) { return first < 0 ? -1 : first + n; }

static Err take_slot(Executor *e, const Action *a, int n)
{
    ExecutorStage *s = stage_of(e, a);
    ExecutorSlot *slot = slot_of(s, -1);
    TRY(executor_take(e, s, slot));
    slot->unit = a->microbatch + n;
    return ERR_OK;
}

static Err wait_input(Executor *e, const Action *a, int n)
{
    trace_wait(a, a->microbatch + n);
    TRY(wait_buffer(e, buffer_at(a->in, n)));
    trace_arrived(a, a->microbatch + n, e->runs);
    return ERR_OK;
}

/* Before an action of one or several units: its messages are there, and what stood in its buffers has gone. */
static Err wait_messages(Executor *e, const Action *a)
{
    for (int n = 0; n < units_of(e, a); n++) {
        const int in = buffer_at(a->in, n);
        TRY(in >= 0 && e->moving[in] >= 0 ? wait_input(e, a, n) : ERR_OK);
        TRY(wait_buffer(e, buffer_at(a->out, n)));
    }
    return ERR_OK;
}

/*
 * A unit of an action has three parts: what the host does before (the slot, the batch's rows), what is enqueued on the
 * device, and what the host does after. Only the middle one is recorded in a graph.
 */
static Err prepare(Executor *e, const Action *a, int n)
{
    if (a->kind != ACT_F) return ERR_OK;
    TRY(take_slot(e, a, n));
    ExecutorSlot *slot = slot_of(stage_of(e, a), a->microbatch + n);
    return e->hooks.batch(e->hooks.user, slot->unit, &slot->batch);
}

static Err model_forward(Executor *e, const ExecutorUnit *u)
{
    return stage_forward(u->stage->model, u->ctx, &u->slot->save, &u->in, &u->out, e->sums);
}

static Err model_backward(Executor *e, const ExecutorUnit *u)
{
    (void)e;
    return stage_backward(u->stage->model, u->ctx, &u->slot->save, &u->in, &u->out);
}

static Err model_weights(Executor *e, const ExecutorUnit *u)
{
    (void)e;
    return wgrad_drain(u->ctx);
}

static const ExecutorCompute model_compute = { model_forward, model_backward, model_weights };

static Ctx *context_of(Executor *e, const Action *a)
{
    return e->pair.forward && e->ctx.mode.training && a->kind == ACT_F ? pair_forward_context(&e->pair, &e->ctx)
                                                                       : &e->ctx;
}

static Err compute(Executor *e, const Action *a, const ExecutorUnit *u)
{
    if (a->kind == ACT_F) return e->compute->forward(e, u);
    return a->kind == ACT_W ? e->compute->weights(e, u) : e->compute->backward(e, u);
}

static Visit visit_of(Executor *e, const Action *a)
{
    if (!a) return (Visit){ .stage = -1 };
    return (Visit){ (int)(stage_of(e, a) - e->stages), a->kind == ACT_F ? PASS_FORWARD : PASS_BACKWARD };
}

static Err enqueue(Executor *e, const Action *a, int n)
{
    ExecutorStage *s = stage_of(e, a);
    Ctx *c = context_of(e, a);
    const ExecutorUnit u = { .stage = s,
                             .slot = slot_of(s, a->microbatch + n),
                             .in = boundary(e, buffer_at(a->in, n), crossing_of(e, a, true)),
                             .out = boundary(e, buffer_at(a->out, n), crossing_of(e, a, false)),
                             .ctx = c };
    executor_enter(c, s, u.slot);
    c->mode.split_backward = a->kind == ACT_I;
    c->mode.version = a->version;
    c->mode.pass = visit_of(e, a).pass;
    const ParamListener *l = &s->params->listener;
    if (l->begins) l->begins(l->user, visit_of(e, a), visit_of(e, e->next));
    TRY(compute(e, a, &u));
    const bool keeps = a->kind == ACT_F && c->mode.training && s->turns_back;
    return l->ended ? l->ended(l->user, c->mode.pass, keeps) : ERR_OK;
}

/* Without backwards: slices, whose keys later ones read, with the last one of them. */
static void finish_forward(Executor *e, ExecutorStage *s, int unit)
{
    const int slices = slices_of(&e->ctx);
    if (unit % slices + 1 < slices) return;
    for (int i = 0; i < slices; i++) executor_give(e, s, slot_of(s, unit - i));
}

static void finish(Executor *e, const Action *a, int n)
{
    ExecutorStage *s = stage_of(e, a);
    if (!e->ctx.mode.training) {
        finish_forward(e, s, a->microbatch + n);
        return;
    }
    ExecutorSlot *slot = slot_of(s, a->microbatch + n);
    if (a->kind == ACT_I) {
        give_region(e, s, slot, REGION_I);
        give_away(e, s, slot); /* (all that had left is back, and read) */
    }
    if (a->kind == ACT_B || a->kind == ACT_W) executor_give(e, s, slot);
}

/* ---- planning ---- */

/* Walks a list for the save memory alone. */
static Err walk_saves(Executor *e, const ActionList *list)
{
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        for (int n = 0; action_is_compute(a->kind) && n < a->count; n++) {
            if (a->kind == ACT_F) TRY(take_slot(e, a, n));
            finish(e, a, n);
        }
    }
    return ERR_OK;
}

/* The peak of a heap becomes *peak, and that is what it was. */
static void swap_peak(SaveHeap *h, int64_t *peak)
{
    const int64_t was = h->peak_bytes;
    h->peak_bytes = *peak;
    *peak = was;
}

static void swap_peaks(Executor *e, SaveNeed *peaks)
{
    for (int r = 0; r < REGION_COUNT; r++) swap_peak(&e->heap[r], &peaks->save[r]);
    swap_peak(&e->away, &peaks->away);
}

Err executor_need(Executor *e, const ActionList *list, bool training, SaveNeed *out)
{
    *out = (SaveNeed){ .away = 0 };
    e->ctx.mode.training = training;
    swap_peaks(e, out);
    Err err = walk_saves(e, list);
    swap_peaks(e, out);
    return err;
}

bool executor_turns_back(const ActionList *list, int replica, int stage)
{
    const Action *forward = NULL;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        if (!action_is_compute(a->kind)) continue;
        if (forward && (a->kind == ACT_F || a->kind == ACT_W || a->replica != replica || a->stage != stage ||
                        a->microbatch != forward->microbatch))
            return false;
        forward = a->kind == ACT_F && a->replica == replica && a->stage == stage ? a : NULL;
        if (forward && (a->count > 1 || a->flags & ACTION_PAIR)) return false;
    }
    return !forward;
}

/* ---- graphs ---- */

Err executor_use_graphs(Executor *e, const ActionList *list, SetupArena *setup)
{
    e->graphs = &e->replays;
    return replays_open(e->graphs, list, setup);
}

void executor_forget_graphs(Executor *e)
{
    if (e->graphs) replays_forget(e->graphs);
}

Err executor_init(Executor *e, SetupArena *setup)
{
    if (!e->compute) e->compute = &model_compute;
    TRY(setup_array(setup, e->buffer_count, &e->moving));
    TRY(setup_array(setup, e->buffer_count, &e->messages));
    TRY(setup_array(setup, e->buffer_count + 1, &e->transfers));
    for (int b = 0; b < e->buffer_count; b++) e->moving[b] = -1;
    for (int i = 0; i <= e->buffer_count; i++) event_init(&e->transfers[i].done);
    event_init(&e->moved);
    event_init(&e->known);
    e->ctx.moves.done = &e->moved;
    e->ctx.moves.known = &e->known;
    return ERR_OK;
}

void executor_release(Executor *e)
{
    if (e->graphs) replays_release(e->graphs, e->ctx.s->dev);
    for (int i = 0; e->transfers && i <= e->buffer_count; i++) event_release(&e->transfers[i].done);
    if (e->ctx.moves.done) event_release(&e->moved), event_release(&e->known);
    for (int i = 0; i < 2; i++) offload_release(&e->offload[i]);
    pair_close(&e->pair);
}

/* Enqueues the part of an action that goes to the device. */
static Err enqueue_any(Executor *e, const Action *a, int n)
{
    switch ((ActionKind)a->kind) {
    case ACT_F:
    case ACT_B:
    case ACT_I:
    case ACT_W: return enqueue(e, a, n);
    case ACT_TIED: return e->hooks.tied(e->hooks.user);
    case ACT_REDUCE: return e->hooks.reduce(e->hooks.user, a->replica);
    case ACT_NORM: return e->hooks.norm(e->hooks.user);
    case ACT_UPDATE: return e->hooks.update(e->hooks.user, a->replica);
    case ACT_SEND:
    case ACT_RECV:
    case ACT_KINDS: break;
    }
    return err_set(ERR_INTERNAL, "action %d cannot be enqueued", a->kind);
}

typedef struct {
    Executor *executor;
    const Action *action;
    int n;
} Unit;

static Err enqueue_unit(void *unit)
{
    const Unit *u = unit;
    return enqueue_any(u->executor, u->action, u->n);
}

/* Host code that gives the device work of an action's nth unit, or that work again. */
static Err work_or_replay(Executor *e, const Action *a, int n, UnitWork *work, void *user)
{
    if (!e->graphs || !e->ctx.mode.training) return work(user);
    return replays_run(e->graphs, e->ctx.s, (int)(a - e->list->action), n, work, user);
}

static Err enqueue_or_replay(Executor *e, const Action *a, int n)
{
    Unit u = { e, a, n };
    return work_or_replay(e, a, n, enqueue_unit, &u);
}

/* ---- the list ---- */

static Err params_failed(const Executor *e)
{
    for (int i = 0; i < e->stage_count; i++) TRY(e->stages[i].params->failed);
    return ERR_OK;
}

static Err hand_out_rows(Executor *e, const Action *a, int n)
{
    ExecutorStage *s = stage_of(e, a);
    if (!e->hooks.rows || e->ctx.mode.training || !s->model->share.head) return ERR_OK;
    return e->hooks.rows(e->hooks.user, slot_of(s, a->microbatch + n));
}

static Err run_unit(Executor *e, const Action *a, int n)
{
    const bool compute = action_is_compute(a->kind);
    if (compute) TRY(prepare(e, a, n));
    TRY(enqueue_or_replay(e, a, n));
    TRY(params_failed(e));
    if (compute) TRY(hand_out_rows(e, a, n));
    if (compute) finish(e, a, n);
    return ERR_OK;
}

/* The next action of a list, from `i` on, that runs and reads weights of a replica; NULL: there is none. */
static const Action *next_reader(const Executor *e, const ActionList *list, int i, int replica)
{
    for (; i < list->count; i++) {
        const Action *a = &list->action[i];
        if (action_is_compute(a->kind) && a->kind != ACT_W && a->replica == replica && units_of(e, a) > 0) return a;
    }
    return NULL;
}

static Err run_units(Executor *e, const Action *a)
{
    const Action *behind = e->next;
    const int units = action_is_compute(a->kind) ? units_of(e, a) : 1;
    for (int n = 0; n < units; n++) {
        e->next = n + 1 < units && a->kind != ACT_W ? a : behind;
        TRY(run_unit(e, a, n));
    }
    return ERR_OK;
}

/* Is it the first of two actions that run in turn, and are both run in this step? */
static bool in_turn(const Executor *e, const Action *a)
{
    return e->pair.forward && e->ctx.mode.training && a->flags & ACTION_PAIR && units_of(e, a) == 1 &&
           units_of(e, a + 1) == 1;
}

/* (The action behind the pair follows the pair's forward; the pair's backward is under way.) */
static Err enqueue_half(void *executor, const Action *a)
{
    Executor *e = executor;
    const Action *behind = e->next;
    if (a->kind != ACT_F) e->next = NULL;
    Err err = enqueue(e, a, 0);
    e->next = behind;
    return err;
}

static Err enqueue_pair(void *unit)
{
    const Unit *u = unit;
    Executor *e = u->executor;
    return pair_run(&e->pair, &e->ctx, u->action, enqueue_half, e);
}

static void may_fail(const Executor *e, const Action *a)
{
    if (!e->ctx.s->dev->is_null) fault_point(action_span(a->kind));
}

static double now(const Executor *e) { return e->clock ? e->clock(e->clock_user) : clock_s(); }

static Err run_pair(Executor *e, const Action *a, Span *time)
{
    Unit both = { e, a, 0 };
    may_fail(e, &a[1]);
    for (int i = 0; i < 2; i++) TRY(wait_messages(e, &a[i]));
    if (time) time->start = now(e);
    for (int i = 0; i < 2; i++) TRY(prepare(e, &a[i], 0));
    TRY(work_or_replay(e, a, 0, enqueue_pair, &both));
    TRY(params_failed(e));
    for (int i = 0; i < 2; i++) finish(e, &a[i], 0);
    if (time) time->end = now(e);
    if (time) time[1] = time[0];
    return ERR_OK;
}

/* *count: actions of the list that are done by it. time: when it ran, without the wait for its messages; or NULL. */
static Err run_action(Executor *e, const ActionList *list, int i, Span *time, int *count)
{
    const Action *a = &list->action[i];
    *count = in_turn(e, a) ? 2 : 1;
    e->next = action_is_compute(a->kind) ? next_reader(e, list, i + *count, a->replica) : NULL;
    if (*count == 2) return run_pair(e, a, time);
    if (action_is_compute(a->kind)) TRY(wait_messages(e, a));
    if (time) time->start = now(e);
    trace_action(a);
    TRY(action_is_message(a->kind) ? exchange(e, a, count) : run_units(e, a));
    trace_end();
    if (time) time->end = now(e);
    return ERR_OK;
}

/* Actions `first` to `end` - 1 of a list. */
static Err run_actions(Executor *e, const ActionList *list, int first, int end)
{
    e->list = list;
    for (int i = first, done; i < end; i += done) {
        const Action *a = &list->action[i];
        may_fail(e, a);
        TRY(run_action(e, list, i, e->times && e->ctx.mode.training ? &e->times[i] : NULL, &done));
    }
    return wait_all(e);
}

/* The index of the norm; behind it come updates alone. */
static int update_begins(const ActionList *list)
{
    int i = 0;
    while (i < list->count && list->action[i].kind != ACT_NORM) i++;
    return i;
}

/* (Nothing of an evaluation is recorded, nor of a step whose experts get their tokens in pieces.) */
static void begin_step(Executor *e)
{
    if (e->graphs && e->ctx.mode.training) replays_begin(e->graphs, e->graphs_wait || e->ctx.mode.retry_in_pieces);
}

static void end_step(Executor *e)
{
    if (e->graphs && e->ctx.mode.training) replays_end(e->graphs);
}

Err executor_run_units(Executor *e, const ActionList *list)
{
    e->ctx.mode.training = true;
    begin_step(e);
    return run_actions(e, list, 0, update_begins(list));
}

Err executor_run_update(Executor *e, const ActionList *list)
{
    e->ctx.mode.training = true;
    TRY(run_actions(e, list, update_begins(list), list->count));
    end_step(e);
    e->runs++;
    return ERR_OK;
}

void executor_drop_units(Executor *e)
{
    for (int i = 0; i < e->stage_count; i++)
        for (int k = 0; k < e->stages[i].slot_count; k++)
            if (e->stages[i].slots[k].unit >= 0) executor_give(e, &e->stages[i], &e->stages[i].slots[k]);
}

Err executor_run(Executor *e, const ActionList *list, bool training)
{
    e->ctx.mode.training = training;
    begin_step(e);
    TRY(run_actions(e, list, 0, list->count));
    end_step(e);
    e->runs++;
    return ERR_OK;
}
