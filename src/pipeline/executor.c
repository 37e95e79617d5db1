/* See executor.h. */
#include "pipeline/executor.h"

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
    ASSERT(!"no slot: the list runs more micro-batches at once than schedule_in_flight counted");
    return NULL;
}

static void give_back(ExecutorSlot *s)
{
    for (int r = 0; r < REGION_COUNT; r++) arena_release(&s->slot.region[r], 0);
    s->microbatch = -1;
}

static Err forward(Executor *e, int microbatch)
{
    ExecutorSlot *s = slot_of(e, -1);
    Boundary none = { .count = 0 }, out;
    s->microbatch = microbatch;
    TRY(e->hooks.batch(e->hooks.user, microbatch, &s->batch));
    return stage_forward(e->stage, enter(e, s), &s->save, &none, &out, e->sums);
}

static Err backward(Executor *e, int microbatch, bool split)
{
    ExecutorSlot *s = slot_of(e, microbatch);
    Ctx *c = enter(e, s);
    Boundary none = { .count = 0 }, din;
    ArenaMark mark = arena_mark(c->scratch);
    c->split_backward = split;
    TRY(stage_backward(e->stage, c, &s->save, &none, &din));
    arena_release(c->scratch, mark);
    if (split) arena_release(&s->slot.region[REGION_I], 0);
    else give_back(s);
    return ERR_OK;
}

static Err weight_half(Executor *e, int microbatch)
{
    ExecutorSlot *s = slot_of(e, microbatch);
    TRY(wgrad_drain(enter(e, s)));
    give_back(s);
    return ERR_OK;
}

static Err run_action(Executor *e, const Action *a)
{
    switch (a->kind) {
    case ACT_F: return forward(e, a->microbatch);
    case ACT_B: return backward(e, a->microbatch, false);
    case ACT_I: return backward(e, a->microbatch, true);
    case ACT_W: return weight_half(e, a->microbatch);
    case ACT_REDUCE: return e->hooks.reduce(e->hooks.user);
    case ACT_NORM: return e->hooks.norm(e->hooks.user);
    case ACT_UPDATE: return e->hooks.update(e->hooks.user);
    }
    return err_set(ERR_INTERNAL, "unknown action %d", a->kind);
}

Err executor_run(Executor *e, const Action *list, int count)
{
    static const char *const names[] = { "forward", "backward", "input half", "weight half",
                                         "reduce",  "norm",     "update" };
    e->ctx.dropout_on = true;
    for (int i = 0; i < count; i++) {
        trace_begin(names[list[i].kind]);
        TRY(run_action(e, &list[i]));
        trace_end();
    }
    return ERR_OK;
}

Err executor_eval(Executor *e, int microbatch)
{
    e->ctx.dropout_on = false;
    TRY(forward(e, microbatch));
    give_back(slot_of(e, microbatch));
    return ERR_OK;
}
