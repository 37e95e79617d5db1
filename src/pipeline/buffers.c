/*
 * Boundary buffers: pass_buffers of passes.h. Walks each list once with the rank's pool. A free buffer is
 * chosen by its longest rest, so that the message that last left it has had most time to go.
 */
#include "pipeline/passes.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { PAYLOADS = 2, POOL_MAX = INT16_MAX };

/* How long a message is assumed to be under way once both sides have started it: one forward of a stage. */
static const double message_time = 1;

typedef struct {
    bool taken;
    double free_at; /* simulated time from which it may be used again */
} Buffer;

typedef struct {
    Schedule *s;
    Buffer *pool; /* [POOL_MAX] the pool of the present rank */
    int pool_count;
    bool too_many;
    /* The indices are payload and (replica, consumer's stage, unit) (schedule_place). */
    int16_t *at[PAYLOADS];   /* the buffer on the consumer's rank, which may be the producer's, too */
    int16_t *from[PAYLOADS]; /* the buffer on the producer's rank while the message is to be sent */
    double *gone[PAYLOADS];  /* the simulated time at which both sides have started the message */
    int32_t *first[PAYLOADS], *count[PAYLOADS]; /* units of the action that consumes it */
} Pass;

/* ---- what the actions read and write ---- */

/* Stage whose consumption `a` waits for (its own), or -1 where nothing comes in. */
static int input_stage(const Schedule *s, const Action *a)
{
    if (a->kind == ACT_F) return a->stage > 0 ? a->stage : -1;
    if (a->kind == ACT_B || a->kind == ACT_I) return a->stage < s->stages - 1 ? a->stage : -1;
    return -1;
}

/* Stage that consumes what `a` writes, or -1. */
static int output_stage(const Schedule *s, const Action *a)
{
    if (a->kind == ACT_F) return a->stage < s->stages - 1 ? a->stage + 1 : -1;
    if (a->kind == ACT_B || a->kind == ACT_I) return a->stage - 1;
    return -1;
}

static int payload_of(const Action *a) { return a->kind == ACT_F ? PAYLOAD_ACTIVATION : PAYLOAD_GRADIENT; }

static double unit_cost(const Action *a) { return a->kind == ACT_B ? 2.0 * a->count : a->count; }

/* Finds the units that each consumer takes at once, and when the receiving side comes to each message. */
static void look_ahead(Pass *p)
{
    const Schedule *s = p->s;
    for (int r = 0; r < s->ranks; r++) {
        double clock = 0;
        for (int i = 0; i < s->rank[r].count; i++) {
            const Action *a = &s->rank[r].action[i];
            if (action_is_compute(a->kind)) clock = fmax(clock, a->stamp) + unit_cost(a);
            if (a->kind == ACT_RECV)
                p->gone[a->payload][schedule_place(s, a->replica, a->stage, a->microbatch)] = fmax(clock, a->stamp);
            for (int k = 0; input_stage(s, a) >= 0 && k < a->count; k++) {
                int64_t at = schedule_place(s, a->replica, a->stage, a->microbatch + k);
                p->first[payload_of(a)][at] = a->microbatch;
                p->count[payload_of(a)][at] = a->count;
            }
        }
    }
}

/* ---- the pool ---- */

/* When the run of `count` buffers from `i` on is free, as far as the pool reaches; INFINITY if one is taken. */
static double rest_of(const Pass *p, int i, int count)
{
    double at = -INFINITY;
    for (int k = i; k < i + count && k < p->pool_count; k++)
        at = fmax(at, p->pool[k].taken ? INFINITY : p->pool[k].free_at);
    return at;
}

/* Takes `count` buffers in a row at simulated time `now`; the pool grows where none are free. */
static int take(Pass *p, int count, double now)
{
    int best = -1;
    double best_at = INFINITY;
    for (int i = 0; i + count <= p->pool_count; i++) {
        double at = rest_of(p, i, count);
        if (at <= now && at < best_at) best = i, best_at = at;
    }
    if (best < 0) { /* the tail, if it is free, and new ones behind it */
        best = p->pool_count;
        while (best > 0 && p->pool_count - best < count && rest_of(p, best - 1, 1) <= now) best--;
        if (best + count > POOL_MAX) {
            p->too_many = true;
            return 0;
        }
        if (best + count > p->pool_count) p->pool_count = best + count;
    }
    for (int k = best; k < best + count; k++) p->pool[k] = (Buffer){ .taken = true };
    return best;
}

static void give(Pass *p, int buffer, int count, double free_at)
{
    for (int k = buffer; k < buffer + count; k++) p->pool[k] = (Buffer){ .free_at = free_at };
}

/* ---- the walk ---- */

/* The buffer of one unit's input on its consumer's rank; the first unit of an action takes those of all. */
static int land(Pass *p, const Action *a, int payload, int stage, int unit)
{
    int16_t *at = p->at[payload];
    const int64_t here = schedule_place(p->s, a->replica, stage, unit);
    if (at[here] < 0) {
        const int first = p->first[payload][here], count = p->count[payload][here];
        const int buffer = take(p, count, a->stamp);
        for (int k = 0; k < count; k++) at[schedule_place(p->s, a->replica, stage, first + k)] = (int16_t)(buffer + k);
    }
    return at[here];
}

static int write_out(Pass *p, const Action *a, int stage)
{
    const Schedule *s = p->s;
    const int payload = payload_of(a);
    if (schedule_rank_of(s, a->replica, stage) == schedule_rank_of(s, a->replica, a->stage)) {
        int buffer = land(p, a, payload, stage, a->microbatch);
        for (int k = 1; k < a->count; k++) {
            int next = land(p, a, payload, stage, a->microbatch + k);
            ASSERT(next == buffer + k); /* both sides of a turn take the same units at once */
        }
        return buffer;
    }
    const int buffer = take(p, a->count, a->stamp);
    for (int k = 0; k < a->count; k++)
        p->from[payload][schedule_place(s, a->replica, stage, a->microbatch + k)] = (int16_t)(buffer + k);
    return buffer;
}

static void assign(Pass *p, Action *a)
{
    const Schedule *s = p->s;
    const int64_t here = schedule_place(s, a->replica, a->stage, a->microbatch);
    if (a->kind == ACT_RECV) a->in = (int16_t)land(p, a, a->payload, a->stage, a->microbatch);
    if (a->kind == ACT_SEND) {
        a->out = p->from[a->payload][here];
        give(p, a->out, 1, p->gone[a->payload][here] + message_time);
    }
    if (input_stage(s, a) >= 0) a->in = p->at[payload_of(a)][here];
    if (output_stage(s, a) >= 0) a->out = (int16_t)write_out(p, a, output_stage(s, a));
}

static void release_input(Pass *p, const Action *a)
{
    if (input_stage(p->s, a) >= 0) give(p, a->in, a->count, a->stamp);
}

static void walk(Pass *p, ActionList *list)
{
    p->pool_count = 0;
    for (int i = 0; i < list->count && !p->too_many; i++) {
        Action *a = &list->action[i];
        const bool second = i > 0 && a[-1].flags & ACTION_PAIR;
        assign(p, a);
        if (a->flags & ACTION_PAIR) continue; /* its other half may run at the same time */
        release_input(p, a);
        if (second) release_input(p, a - 1);
    }
    list->buffers = p->pool_count;
}

static Err open_pass(Pass *p)
{
    const size_t places = (size_t)p->s->replicas * (size_t)p->s->stages * (size_t)p->s->units;
    bool room = (p->pool = calloc(POOL_MAX, sizeof *p->pool)) != NULL;
    for (int i = 0; i < PAYLOADS; i++) {
        room &= (p->at[i] = malloc(places * sizeof *p->at[i])) != NULL;
        room &= (p->from[i] = malloc(places * sizeof *p->from[i])) != NULL;
        room &= (p->gone[i] = calloc(places, sizeof *p->gone[i])) != NULL;
        room &= (p->first[i] = calloc(places, sizeof *p->first[i])) != NULL;
        room &= (p->count[i] = calloc(places, sizeof *p->count[i])) != NULL;
        for (size_t k = 0; room && k < places; k++) p->at[i][k] = p->from[i][k] = -1;
    }
    return room ? ERR_OK : err_set(ERR_MEMORY, "no memory for the buffers of schedule '%s'", p->s->name);
}

static void close_pass(Pass *p)
{
    free(p->pool);
    for (int i = 0; i < PAYLOADS; i++) {
        free(p->at[i]);
        free(p->from[i]);
        free(p->gone[i]);
        free(p->first[i]);
        free(p->count[i]);
    }
}

Err pass_buffers(Schedule *s)
{
    Pass p = { .s = s };
    Err err = open_pass(&p);
    if (!err) look_ahead(&p);
    for (int r = 0; r < s->ranks && !err; r++) {
        walk(&p, &s->rank[r]);
        if (p.too_many)
            err = err_set(ERR_CONFIG, "schedule '%s' needs more than %d boundary buffers on rank %d", s->name, POOL_MAX,
                          r);
    }
    close_pass(&p);
    return err;
}
