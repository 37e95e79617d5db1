/*
 * When what is counted happens: ops one behind the other, and the calls of each communicator beside them, one behind
 * the other as well. A call begins when what was issued before it is done; a wait holds the ops up until its call is.
 * Matrix work beside a call has fewer multiprocessors (join.c), memory work all of its rate.
 *
 *   ops    product 0 | product 1       | wait | ...
 *   tp                 exchange of 0 ......... |
 */
#ifndef MEGATRAIN_BENCH_TIME_LINE_H
#define MEGATRAIN_BENCH_TIME_LINE_H

#include "comm/grid.h"

enum { TIME_LINE_CALLS = 1 << 16 };

typedef struct {
    double link;                 /* bytes a second that a rank sends */
    double call_s;               /* what a call takes besides */
    double matrix_beside;        /* seconds of matrix work beside a call, to those without one */
    double now, waited;          /* how far the ops have come; of it they stood still */
    double until[WORLD_COMMS];   /* how far each communicator has */
    double end[TIME_LINE_CALLS]; /* of each call */
    int calls;
} TimeLine;

static TimeLine *time_line;

static inline double time_line_busy(void)
{
    double until = 0;
    for (int i = 0; i < WORLD_COMMS; i++) until = until > time_line->until[i] ? until : time_line->until[i];
    return until > time_line->now ? until - time_line->now : 0;
}

/* An op of so many seconds. */
static inline void time_line_op(double s, bool matrix)
{
    const double busy = time_line_busy(), slow = matrix ? time_line->matrix_beside : 1;
    time_line->now += s * slow <= busy ? s * slow : busy + (s - busy / slow);
}

static inline Err time_line_wait(Stream *stream, void *mark)
{
    (void)stream;
    const double end = time_line->end[(int)(intptr_t)mark - 1], wait = end - time_line->now;
    if (wait > 0) time_line->now = end, time_line->waited += wait;
    return ERR_OK;
}

static inline Err time_line_host_wait(void *mark, double timeout_s)
{
    (void)timeout_s;
    return time_line_wait(NULL, mark);
}

static inline void time_line_free(void *mark) { (void)mark; }

static inline Err time_line_submit(Comm *c, const CommRequest *r)
{
    static const EventMarks marks = { time_line_wait, time_line_host_wait, time_line_free };
    event_complete(r->done, ERR_OK, "");
    if (!time_line || c->size == 1) return ERR_OK;
    const int group = (int)(c - (Comm *)c->impl);
    double *until = &time_line->until[group];
    const double takes = (double)c->last_bytes / time_line->link + time_line->call_s;
    *until = (*until > time_line->now ? *until : time_line->now) + takes;
    ASSERT(time_line->calls < TIME_LINE_CALLS);
    time_line->end[time_line->calls++] = *until;
    r->done->marks = &marks;
    r->done->mark = (void *)(intptr_t)time_line->calls;
    r->done->marked = true;
    return ERR_OK;
}

static inline void time_line_close(Comm *c) { (void)c; }

/* From now on the calls of a null world are on it. */
static inline void time_line_of(World *world)
{
    static const CommTable table = { "time line", time_line_submit, time_line_close };
    for (int i = 0; i < WORLD_COMMS; i++) world->comm[i].table = &table, world->comm[i].impl = world->comm;
}

#endif
