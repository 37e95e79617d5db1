/* See executor.h. */
#include "pipeline/executor.h"

#include "base/fault.h"
#include "base/trace.h"

/* Points the context at a slot. */
static Ctx *enter(Executor *e, ExecutorSlot *s)
{
    e->ctx.slot = &s->slot;
    e->ctx.batch = &s->batch;
    for (int r = 0; r < REGION_COUNT; r++) e->ctx.into[r] = &s->slot.region[r];
    return &e->ctx;
}

static ExecutorSlot *slot_of(Executor *e, int microbatch)
{
    for (int i = 0; i < e->slot_count; i++)
        if (e->slots[i].microbatch == microbatch) return &e->slots[i];
    ASSERT(!"no slot: the list runs more micro-batches at once than its part has slots");
    return NULL;
}

static void give_back(ExecutorSlot *s)
{
    for (int r = 0; r < REGION_COUNT; r++) arena_release(&s->slot.region[r], 0);
    s->microbatch = -1;
}

/*
 * An action has three parts: what the host does before (slots, the batch's rows), what is enqueued on the
 * device, and what the host does after. Only the middle one is recorded in a graph.
 */
static Err prepare(Executor *e, const Action *a)
{
    if (a->kind != ACT_F) return ERR_OK;
    ExecutorSlot *s = slot_of(e, -1);
    s->microbatch = a->microbatch;
    return e->hooks.batch(e->hooks.user, a->microbatch, &s->batch);
}

static Err backward(Executor *e, ExecutorSlot *s, bool split)
{
    Ctx *c = enter(e, s);
    Boundary none = { .count = 0 }, din;
    ArenaMark mark = arena_mark(c->scratch);
    c->split_backward = split;
    TRY(stage_backward(e->stage, c, &s->save, &none, &din));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

static Err enqueue(Executor *e, const Action *a)
{
    Boundary none = { .count = 0 }, out;
    ExecutorSlot *s = action_is_compute(a->kind) ? slot_of(e, a->microbatch) : NULL;
    switch ((ActionKind)a->kind) {
    case ACT_F: return stage_forward(e->stage, enter(e, s), &s->save, &none, &out, e->sums);
    case ACT_B: return backward(e, s, false);
    case ACT_I: return backward(e, s, true);
    case ACT_W: return wgrad_drain(enter(e, s));
    case ACT_REDUCE: return e->hooks.reduce(e->hooks.user);
    case ACT_NORM: return e->hooks.norm(e->hooks.user);
    case ACT_UPDATE: return e->hooks.update(e->hooks.user);
    case ACT_SEND:
    case ACT_RECV:
    case ACT_TIED:
    case ACT_KINDS: break;
    }
    return err_set(ERR_INTERNAL, "action %s with one stage", action_name(a->kind));
}

static void finish(Executor *e, const Action *a)
{
    if (a->kind == ACT_B || a->kind == ACT_W) give_back(slot_of(e, a->microbatch));
    if (a->kind == ACT_I) arena_release(&slot_of(e, a->microbatch)->slot.region[REGION_I], 0);
}

/* ---- graphs ---- */

Err executor_use_graphs(Executor *e, SetupArena *setup)
{
    return setup_array(setup, (int64_t)ACT_KINDS * e->slot_count * 2, &e->graphs);
}

void executor_release(Executor *e)
{
    for (int i = 0; e->graphs && i < ACT_KINDS * e->slot_count * 2; i++)
        device_graph_free(e->ctx.s->dev, e->graphs[i].graph);
}

static ActionGraph *graph_of(Executor *e, const Action *a)
{
    int slot = action_is_compute(a->kind) ? (int)(slot_of(e, a->microbatch) - e->slots) : 0;
    return &e->graphs[(a->kind * e->slot_count + slot) * 2 + (a->microbatch > 0)];
}

static Err enqueue_or_replay(Executor *e, const Action *a)
{
    if (!e->graphs) return enqueue(e, a);
    ActionGraph *g = graph_of(e, a);
    if (g->graph) return device_replay(e->ctx.s, g->graph);
    if (g->runs++ == 0) return enqueue(e, a);
    TRY(device_record_begin(e->ctx.s));
    Err err = enqueue(e, a), end = device_record_end(e->ctx.s, &g->graph);
    TRY(err ? err : end);
    return device_replay(e->ctx.s, g->graph);
}

static Err run_action(Executor *e, const Action *a)
{
    TRY(prepare(e, a));
    TRY(enqueue_or_replay(e, a));
    TRY(e->ctx.params->read_failed);
    finish(e, a);
    return ERR_OK;
}

Err executor_run(Executor *e, const Action *list, int count)
{
    static const char *const names[] = { "forward", "backward", "input half", "weight half", "send",
                                         "receive", "tied",     "reduce",     "norm",        "update" };
    e->ctx.dropout_on = true;
    for (int i = 0; i < count; i++) {
        if (!e->ctx.s->dev->is_null) fault_point(names[list[i].kind]);
        trace_begin(names[list[i].kind]);
        TRY(run_action(e, &list[i]));
        trace_end();
    }
    return ERR_OK;
}

Err executor_eval(Executor *e, int microbatch)
{
    const Action a = { .kind = ACT_F, .microbatch = microbatch };
    e->ctx.dropout_on = false;
    TRY(prepare(e, &a));
    TRY(enqueue(e, &a));
    TRY(e->ctx.params->read_failed);
    give_back(slot_of(e, microbatch));
    return ERR_OK;
}
