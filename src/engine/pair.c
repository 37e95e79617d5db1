/* See pair.h. In a trace each half is cut into the spans of its turns. */
#include "engine/pair.h"

#include "base/trace.h"
#include "engine/action_trace.h"

/* The coroutine's stack is as large as a thread's, because kernels run on it. */
enum { STACK_BYTES = 8 << 20 };

Err pair_open(Pair *p, Arena *scratch, Offload *offload)
{
    *p = (Pair){ .scratch = scratch, .offload = offload };
    TRY(coroutine_open(STACK_BYTES, &p->forward));
    event_init(&p->moved);
    event_init(&p->known);
    return ERR_OK;
}

void pair_close(Pair *p)
{
    if (p->forward) event_release(&p->moved), event_release(&p->known);
    coroutine_close(p->forward);
    p->forward = NULL;
}

/* The forward's turn ends. (If the backward fails it is never resumed.) */
static Err stop_forward(void *pair)
{
    Pair *p = pair;
    coroutine_yield(p->forward);
    return ERR_OK;
}

Ctx *pair_forward_context(Pair *p, const Ctx *c)
{
    p->ctx = *c;
    p->ctx.scratch = p->scratch;
    p->ctx.offload = p->offload;
    p->ctx.moves.done = &p->moved;
    p->ctx.moves.known = &p->known;
    p->ctx.moves.other_half = p->running ? stop_forward : NULL;
    p->ctx.moves.pair = p;
    return &p->ctx;
}

static void run_forward(void *pair)
{
    Pair *p = pair;
    p->err = p->half(p->user, p->action);
}

static void resume_forward(Pair *p)
{
    trace_action(p->action);
    coroutine_resume(p->forward);
    trace_end();
}

/* In the middle of the backward. */
static Err turn_to_forward(void *pair)
{
    Pair *p = pair;
    if (coroutine_ended(p->forward)) return p->err;
    trace_end();
    resume_forward(p);
    trace_action(p->action + 1);
    return p->err;
}

static Err run_backward(Pair *p, Ctx *c)
{
    c->moves.other_half = turn_to_forward;
    c->moves.pair = p;
    trace_action(p->action + 1);
    Err err = p->half(p->user, p->action + 1);
    trace_end();
    c->moves.other_half = NULL;
    return err;
}

Err pair_run(Pair *p, Ctx *backward, const Action *a, PairHalf *half, void *user)
{
    p->action = a;
    p->half = half;
    p->user = user;
    p->err = ERR_OK;
    p->running = true;
    coroutine_start(p->forward, run_forward, p);
    resume_forward(p);
    Err err = p->err ? p->err : run_backward(p, backward);
    while (!err && !coroutine_ended(p->forward)) resume_forward(p);
    p->running = false;
    return err ? err : p->err;
}
