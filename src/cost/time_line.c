/* See time_line.h. */
#include "cost/time_line.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

/* ---- ops ---- */

/* A call that is under way lets ops come on at the pace of cost_pace_beside. */
static double stretched(const TimeLine *t, OpCost op, double begin)
{
    double busy = 0;
    for (int i = 0; i < WORLD_COMMS; i++) busy = fmax(busy, t->until[i] - begin);
    const double pace = cost_pace_beside(t->model), done = busy * pace;
    return op.seconds <= done ? op.seconds / pace : op.seconds - done + busy;
}

static void hear_op(OpEar *ear, OpId id, const void *args, double flop)
{
    TimeLine *t = (TimeLine *)(void *)ear;
    const OpCost op = cost_op(t->model, id, args, flop);
    TimeShares *sum = &t->shares;
    if (!t->graphs) t->host += op.host;
    else if (!t->in_piece && op.launches) t->host += op.host / op.launches;
    sum->pieces += !t->in_piece;
    t->in_piece = true;
    const double begin = fmax(sum->now, t->host), takes = stretched(t, op, begin);
    sum->idle += begin - sum->now;
    sum->family[family_of(id)] += takes;
    sum->op[id] += takes;
    sum->calls[id]++;
    sum->launches += op.launches;
    sum->now = begin + takes;
    if (family_of(id) == FAMILY_SCAN) t->turn = takes;
}

/* ---- calls ---- */

static TimeLine *line_of(const Comm *c)
{
    return (TimeLine *)(void *)((uintptr_t)c->table - offsetof(TimeLine, comms));
}

static int group_index(const TimeLine *t, const Comm *c) { return (int)(c - t->world->comm); }

static double *end_of(TimeLine *t, const CommOpen *o) { return &t->end[group_index(t, o->comm)][o - o->comm->open]; }

/* Whether all of the rank's group a are in its group b. */
static bool is_within(const TimeLine *t, int a, int b)
{
    const GridShape s = grid_shape(t->world->grid);
    const int mine = group_of(s, (GroupKind)a, t->world->rank), here = group_of(s, (GroupKind)b, t->world->rank);
    bool within = mine >= 0 && here >= 0 && group_size(s, (GroupKind)a) <= group_size(s, (GroupKind)b);
    int *members = within ? calloc((size_t)group_size(s, (GroupKind)a), sizeof *members) : NULL;
    if (!members) return a == b;
    group_members(s, (GroupKind)a, mine, members);
    for (int i = 0; i < group_size(s, (GroupKind)a); i++) within &= group_of(s, (GroupKind)b, members[i]) == here;
    free(members);
    return within;
}

/* (a host's processors alone have ranks that are late) */
static void meet(TimeLine *t, int group)
{
    for (int i = 0; i < WORLD_COMMS && t->model->cpu; i++) {
        if (!t->within[i][group]) t->within[i][group] = is_within(t, i, group) ? 1 : -1;
        if (t->within[i][group] > 0) t->met[i] = t->shares.now;
    }
}

static Err device_waits(Stream *s, void *mark)
{
    const CommOpen *o = mark;
    TimeLine *t = line_of(o->comm);
    const int group = group_index(t, o->comm);
    t->in_piece = false;
    const double wait = *end_of(t, o) - t->shares.now;
    if (wait > 0) {
        t->shares.waited[group] += wait;
        t->shares.now += wait;
    }
    if (group != GROUP_PP) meet(t, group);
    return t->marks_below->stream_wait(s, mark);
}

static Err host_waits(void *mark, double timeout_s)
{
    const CommOpen *o = mark;
    TimeLine *t = line_of(o->comm);
    if (t->model->cpu) return device_waits(NULL, mark); /* they are the same processors */
    t->host = fmax(t->host, *end_of(t, o));
    return t->marks_below->wait(mark, timeout_s);
}

static void free_mark(void *mark) { (void)mark; }

/* (of large groups it takes long, and most are never called) */
static CommPlace place_of(TimeLine *t, int group)
{
    CommPlace *p = &t->place[group];
    if (!p->size) *p = cost_place(t->model, grid_shape(t->world->grid), (GroupKind)group, t->world->rank);
    return *p;
}

static double call_seconds(const TimeLine *t, const CommRequest *r, CommPlace place, int64_t bytes)
{
    if (r->kind == COMM_EXCHANGE) return cost_exchange(t->model, place, r->messages, r->message_count);
    return cost_call(t->model, r->kind, place, bytes);
}

/* A rank has scanned: its state leaves; or in backward, where that goes to the rank before, last rows come. */
static bool has_scanned(const CommRequest *r)
{
    const CommMessage *m = r->messages;
    if (r->kind != COMM_EXCHANGE || r->message_count != 1) return false;
    return m->what.kind == (m->send ? MESSAGE_STATE : MESSAGE_TAIL);
}

static Err submit(Comm *c, const CommRequest *r)
{
    static const EventMarks marks = { device_waits, host_waits, free_mark };
    TimeLine *t = line_of(c);
    const int group = group_index(t, c);
    TRY(t->comms_below->submit(c, r));
    if (c->size == 1) return ERR_OK;
    t->in_piece = false;
    /* (the host waits until the rows' offsets are there, the last of what it has enqueued) */
    if (r->rows.known && !t->model->cpu) t->host = fmax(t->host, t->shares.now);
    if (group != GROUP_PP) {
        double late = cost_skew(t->model, c->size, t->shares.now - t->met[group]);
        if (has_scanned(r)) {
            late += t->turn * (c->size - 1);
            t->turn = 0;
        }
        t->until[group] =
            fmax(t->until[group], t->shares.now + late) + call_seconds(t, r, place_of(t, group), c->last_bytes);
    }
    t->marks_below = r->done->marks;
    *end_of(t, r->done->mark) = group == GROUP_PP ? 0 : t->until[group];
    r->done->marks = &marks;
    return ERR_OK;
}

static void close_nothing(Comm *c) { (void)c; }

/* ---- copies ---- */

static TimeLine *line_of_device(const Stream *s)
{
    return (TimeLine *)(void *)((uintptr_t)s->dev->backend - offsetof(TimeLine, backend));
}

/* When all copies before a point are done. */
typedef struct {
    TimeLine *line;
    double at;
} CopiesMark;

static bool is_of_copies(const Stream *s) { return s == &s->dev->copies; }

static void stand_still(TimeLine *t, double until)
{
    const double wait = fmax(0, until - t->shares.now);
    t->shares.copied += wait;
    t->shares.now += wait;
}

static Err copy_later(Stream *s, void *to, const void *from, int64_t bytes)
{
    TimeLine *t = line_of_device(s);
    (void)to, (void)from;
    if (!is_of_copies(s)) return ERR_OK;
    t->copies = fmax(t->copies, t->shares.now) + cost_copy(t->model, bytes);
    if (t->model->cpu) stand_still(t, t->copies);
    return ERR_OK;
}

static Err wait_for_copies(Stream *s, void *mark)
{
    const CopiesMark *m = mark;
    (void)s;
    stand_still(m->line, m->at);
    return ERR_OK;
}

static Err host_waits_for_copies(void *mark, double timeout_s)
{
    const CopiesMark *m = mark;
    (void)timeout_s;
    m->line->host = fmax(m->line->host, m->at);
    return ERR_OK;
}

/* (what the compute stream does is on the line as it is issued) */
static Err mark_copies(Stream *s, Event *e)
{
    static const EventMarks marks = { wait_for_copies, host_waits_for_copies, free };
    TimeLine *t = line_of_device(s);
    if (!is_of_copies(s)) return ERR_OK;
    if (!e->mark) e->mark = malloc(sizeof(CopiesMark));
    if (!e->mark) return err_set(ERR_MEMORY, "no memory for a mark on a time line");
    *(CopiesMark *)e->mark = (CopiesMark){ t, t->copies };
    e->marks = &marks;
    e->marked = true;
    return ERR_OK;
}

/* ---- the line ---- */

void time_line_attach(TimeLine *t, const CostModel *model, Device *dev, World *world)
{
    *t = (TimeLine){ .comms = { "time line", submit, close_nothing },
                     .model = model,
                     .comms_below = world->comm[0].table,
                     .world = world };
    op_ear_attach(&t->ear, dev, hear_op);
    t->backend = *dev->backend;
    t->backend.read_later = t->backend.write_later = copy_later;
    t->backend.mark = mark_copies;
    dev->backend = &t->backend;
    for (int i = 0; i < WORLD_COMMS; i++) {
        ASSERT(world->comm[i].table == t->comms_below);
        world->comm[i].table = &t->comms;
    }
}
