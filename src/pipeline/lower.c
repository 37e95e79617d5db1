/*
 * Messages between ranks: pass_lower of passes.h. The list of a rank is a merge of two sequences that are in
 * order already: its own actions, and its messages sorted by stamp.
 *
 *   action     key
 *   compute    its simulated end
 *   message    the simulated end of the compute that produced it
 *   REDUCE ... the end of the compute before it, and so behind all messages where no compute follows
 */
#include "pipeline/passes.h"

#include <math.h>
#include <stdlib.h>

#include "pipeline/simulate.h"
#include "pipeline/table.h"

/* Costs that make stamps. Other costs move messages in the lists, and never endanger them. */
static SimulateCosts costs_of(const Schedule *s)
{
    for (int i = 0; s->costs && i < s->stages; i++) ASSERT(s->costs[i].f > 0 && s->costs[i].i > 0 && s->costs[i].w > 0);
    return (SimulateCosts){ .each = { 1, 1, 1 }, .stage = s->costs };
}

static Err no_memory(const Schedule *s)
{
    return err_set(ERR_MEMORY, "no memory for the messages of schedule '%s': %d ranks, %d micro-batches", s->name,
                   s->ranks, s->microbatches);
}

static int compare(double a, double b) { return (a > b) - (a < b); }

/* Orders by stamp; then by the order in which both sides of a group list their messages. */
static int by_stamp(const void *left, const void *right)
{
    const Action *a = left, *b = right;
    int order = compare(a->stamp, b->stamp);
    if (!order) order = a->payload - b->payload;
    if (!order) order = a->replica - b->replica;
    if (!order) order = a->stage - b->stage;
    return order ? order : compare(a->microbatch, b->microbatch);
}

/* Stage that consumes what `a` makes; -1: none, or on the same rank. */
static int consumer_of(const Schedule *s, const Action *a)
{
    if (!action_is_compute(a->kind) || a->kind == ACT_W) return -1;
    int stage = a->kind == ACT_F ? a->stage + 1 : a->stage - 1;
    if (stage < 0 || stage >= s->stages) return -1;
    bool here = schedule_rank_of(s, a->replica, stage) == schedule_rank_of(s, a->replica, a->stage);
    return here ? -1 : stage;
}

/* Both sides of each message of one compute, into the ranks' lists of messages. */
static void add_messages(Schedule *messages, int rank, const Action *a, double stamp)
{
    const int stage = consumer_of(messages, a);
    for (int k = 0; stage >= 0 && k < a->count; k++) {
        Action m = { .kind = ACT_SEND,
                     .replica = a->replica,
                     .payload = a->kind == ACT_F ? PAYLOAD_ACTIVATION : PAYLOAD_GRADIENT,
                     .stage = (uint16_t)stage,
                     .slice = (uint16_t)schedule_slice_of(messages, a->microbatch + k),
                     .microbatch = a->microbatch + k,
                     .count = 1,
                     .in = -1,
                     .out = -1,
                     .stamp = stamp };
        const int to = schedule_rank_of(messages, a->replica, stage);
        m.peer = (uint16_t)to;
        schedule_push(messages, rank, m);
        m.kind = ACT_RECV;
        m.peer = (uint16_t)rank;
        schedule_push(messages, to, m);
    }
}

/* Appends the messages of the rank up to `key`, marked as groups; returns how many were there before and now. */
static int put_messages(Schedule *s, int rank, const ActionList *messages, int next, double key)
{
    while (next < messages->count && messages->action[next].stamp <= key) {
        Action m = messages->action[next++];
        bool more = next < messages->count && messages->action[next].stamp == m.stamp;
        if (more) m.flags |= ACTION_MORE;
        schedule_push(s, rank, m);
    }
    return next;
}

static void merge(Schedule *s, int rank, const ActionList *own, const Span *span, const ActionList *messages)
{
    int next = 0;
    double key = 0;
    for (int i = 0; i < own->count; i++) {
        Action a = own->action[i];
        const bool compute = action_is_compute(a.kind);
        next = put_messages(s, rank, messages, next, compute ? nextafter(span[i].end, 0) : key);
        a.stamp = compute ? span[i].start : key;
        schedule_push(s, rank, a);
        if (compute) key = span[i].end;
    }
    put_messages(s, rank, messages, next, INFINITY);
}

static Err lower_with(Schedule *s, const Simulation *sim, Schedule *messages)
{
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++)
            add_messages(messages, r, &s->rank[r].action[i], sim->span[r][i].end);
    if (messages->no_memory) return no_memory(s);
    for (int r = 0; r < s->ranks; r++) {
        const ActionList own = s->rank[r], *m = &messages->rank[r];
        if (m->count) qsort(m->action, (size_t)m->count, sizeof *m->action, by_stamp);
        s->rank[r] = (ActionList){ 0 };
        merge(s, r, &own, sim->span[r], m);
        free(own.action);
    }
    return s->no_memory ? no_memory(s) : ERR_OK;
}

Err pass_lower(Schedule *s)
{
    Simulation sim;
    const SimulateCosts costs = costs_of(s);
    Schedule messages = *s; /* the same shape with lists of its own */
    messages.rank = calloc((size_t)s->ranks, sizeof *messages.rank);
    messages.unit_replica = NULL;
    Err err = messages.rank ? simulate(s, &costs, &sim) : no_memory(s);
    if (!err) err = lower_with(s, &sim, &messages);
    if (messages.rank) simulation_free(&sim, s);
    schedule_free(&messages);
    return err;
}
