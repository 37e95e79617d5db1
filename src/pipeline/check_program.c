/* Messages, buffers and rendezvous; see check.h. */
#include <stdlib.h>

#include "pipeline/check.h"

enum { SENT = 1, RECEIVED = 2, MADE = 4, PAYLOADS = 2 };

typedef struct {
    const Schedule *s;
    uint8_t *state[PAYLOADS]; /* [replicas][stages][units] of the consumer: SENT, RECEIVED, MADE */
    int64_t *holds;           /* [buffers of the rank] 1 + what it holds, 0: free */
    int rank, at;
} Walk;

static Err wrong(const Walk *w, const char *what)
{
    const Action *a = &w->s->rank[w->rank].action[w->at];
    return err_set(ERR_INTERNAL, "rank %d, action %d: %s of unit %d at stage %d, replica %d %s", w->rank, w->at,
                   action_name(a->kind), a->microbatch, a->stage, a->replica, what);
}

/* Stage that makes what (payload, stage) consumes; outside the stages: nobody. */
static int producer_of(int payload, int stage) { return payload == PAYLOAD_ACTIVATION ? stage - 1 : stage + 1; }

/* A unit at one boundary, for `holds`. */
static int64_t thing(const Schedule *s, int payload, int64_t at)
{
    return 1 + at + payload * (int64_t)s->replicas * s->stages * s->units;
}

/* ---- buffers ---- */

static Err fill(Walk *w, int buffer, int64_t what)
{
    if (buffer < 0 || buffer >= w->s->rank[w->rank].buffers) return wrong(w, "has no buffer");
    if (w->holds[buffer]) return wrong(w, "overwrites a buffer that is still needed");
    w->holds[buffer] = what;
    return ERR_OK;
}

static Err empty(Walk *w, int buffer, int64_t what)
{
    if (buffer < 0 || buffer >= w->s->rank[w->rank].buffers) return wrong(w, "has no buffer");
    if (w->holds[buffer] != what) return wrong(w, "reads a buffer that holds something else");
    w->holds[buffer] = 0;
    return ERR_OK;
}

/* ---- actions ---- */

static Err check_message(Walk *w, const Action *a)
{
    const Schedule *s = w->s;
    const int from = producer_of(a->payload, a->stage);
    if (a->payload >= PAYLOADS || a->replica >= s->replicas || a->stage >= s->stages || from < 0 || from >= s->stages ||
        a->microbatch < 0 || a->microbatch >= s->units)
        return wrong(w, "is foreign: the schedule has no such message");
    const int source = schedule_rank_of(s, a->replica, from), target = schedule_rank_of(s, a->replica, a->stage);
    const bool send = a->kind == ACT_SEND;
    if ((send ? source : target) != w->rank || (send ? target : source) != a->peer || source == target)
        return wrong(w, "is foreign: it is between other ranks");
    const int64_t at = schedule_place(s, a->replica, a->stage, a->microbatch);
    uint8_t *state = &w->state[a->payload][at];
    if (*state & (send ? SENT : RECEIVED)) return wrong(w, "is there twice");
    *state |= send ? SENT : RECEIVED;
    if (send && !(*state & MADE)) return wrong(w, "comes before what it sends is made");
    return send ? empty(w, a->out, thing(s, a->payload, at)) : fill(w, a->in, thing(s, a->payload, at));
}

static Err check_group(const Walk *w, const Action *a)
{
    const ActionList *list = &w->s->rank[w->rank];
    if (!(a->flags & ACTION_MORE)) return ERR_OK;
    if (!action_is_message(a->kind) || w->at + 1 == list->count || !action_is_message(a[1].kind))
        return wrong(w, "is in a group with what is no message");
    return ERR_OK;
}

static Err read_input(Walk *w, const Action *a, int payload)
{
    const Schedule *s = w->s;
    const int from = producer_of(payload, a->stage);
    if (from < 0 || from >= s->stages || a->kind == ACT_W) return ERR_OK;
    const bool remote = schedule_rank_of(s, a->replica, from) != w->rank;
    for (int k = 0; k < a->count; k++) {
        const int64_t at = schedule_place(s, a->replica, a->stage, a->microbatch + k);
        if (remote && !(w->state[payload][at] & RECEIVED)) return wrong(w, "reads what has no RECV before it");
        TRY(empty(w, a->in + k, thing(s, payload, at)));
    }
    return ERR_OK;
}

static Err write_output(Walk *w, const Action *a, int payload)
{
    const Schedule *s = w->s;
    const int to = payload == PAYLOAD_ACTIVATION ? a->stage + 1 : a->stage - 1;
    if (to < 0 || to >= s->stages || a->kind == ACT_W) return ERR_OK;
    for (int k = 0; k < a->count; k++) {
        const int64_t at = schedule_place(s, a->replica, to, a->microbatch + k);
        w->state[payload][at] |= MADE;
        TRY(fill(w, a->out + k, thing(s, payload, at)));
    }
    return ERR_OK;
}

/* An output is written while inputs are still there, and both halves of a pair at once. */
static Err check_buffers(Walk *w, const Action *a)
{
    const int payload = a->kind == ACT_F ? PAYLOAD_ACTIVATION : PAYLOAD_GRADIENT;
    if (w->at > 0 && a[-1].flags & ACTION_PAIR) return ERR_OK; /* done with its first half */
    TRY(write_output(w, a, payload));
    if (a->flags & ACTION_PAIR) {
        w->at++;
        TRY(write_output(w, a + 1, PAYLOAD_GRADIENT));
        TRY(read_input(w, a + 1, PAYLOAD_GRADIENT));
        w->at--;
    }
    return read_input(w, a, payload);
}

static Err check_rank(Walk *w)
{
    const ActionList *list = &w->s->rank[w->rank];
    w->holds = calloc((size_t)list->buffers + 1, sizeof *w->holds);
    if (!w->holds) return err_set(ERR_MEMORY, "no memory to check schedule '%s'", w->s->name);
    for (w->at = 0; w->at < list->count; w->at++) {
        const Action *a = &list->action[w->at];
        TRY(check_group(w, a));
        if (action_is_message(a->kind)) TRY(check_message(w, a));
        if (action_is_compute(a->kind)) TRY(check_buffers(w, a));
    }
    return ERR_OK;
}

/* Both sides of every message that some compute makes. */
static Err check_sides(const Walk *w)
{
    const Schedule *s = w->s;
    for (int payload = 0; payload < PAYLOADS; payload++)
        for (int stage = 0; stage < s->stages; stage++)
            for (int k = 0; k < s->units; k++) {
                const int replica = s->unit_replica[k], from = producer_of(payload, stage);
                const uint8_t state = w->state[payload][schedule_place(s, replica, stage, k)];
                if (from < 0 || from >= s->stages || !(state & MADE)) continue;
                if (schedule_rank_of(s, replica, from) == schedule_rank_of(s, replica, stage)) continue;
                if ((state & SENT) && (state & RECEIVED)) continue;
                return err_set(ERR_INTERNAL, "missing: %s of %s of unit %d for stage %d, replica %d",
                               state & SENT ? "RECV" : "SEND", payload ? "gradient" : "activation", k, stage, replica);
            }
    return ERR_OK;
}

Err check_messages(const Schedule *s)
{
    Walk w = { .s = s };
    const size_t places = (size_t)s->replicas * (size_t)s->stages * (size_t)s->units;
    Err err = ERR_OK;
    for (int i = 0; i < PAYLOADS; i++)
        if (!(w.state[i] = calloc(places, 1))) err = err_set(ERR_MEMORY, "no memory to check schedule '%s'", s->name);
    for (w.rank = 0; w.rank < s->ranks && !err; w.rank++) {
        err = check_rank(&w);
        free(w.holds);
    }
    if (!err) err = check_sides(&w);
    for (int i = 0; i < PAYLOADS; i++) free(w.state[i]);
    return err;
}

/* ---- rendezvous ---- */

typedef struct {
    const Schedule *s;
    int *first, *end; /* [ranks] the group that the rank has started; first == end: none */
    int *open;        /* [ranks] messages of it that have not met their other side */
    bool **met;       /* [ranks][count] */
    int *ready;       /* [ranks] stack of ranks that can go on */
    int ready_count;
} Meeting;

/* The rank's next message of this kind with `peer` that has not met its other side; -1: none started. */
static int head_of(const Meeting *m, int rank, ActionKind kind, int peer)
{
    const Action *list = m->s->rank[rank].action;
    for (int i = m->first[rank]; i < m->end[rank]; i++)
        if (!m->met[rank][i] && list[i].kind == kind && list[i].peer == peer) return i;
    return -1;
}

static void meet(Meeting *m, int rank, int i)
{
    m->met[rank][i] = true;
    if (--m->open[rank] == 0) {
        m->first[rank] = m->end[rank];
        m->ready[m->ready_count++] = rank;
    }
}

/* Lets messages from `source` to `target` meet as far as both have started them. */
static Err meet_all(Meeting *m, int source, int target)
{
    for (;;) {
        const int i = head_of(m, source, ACT_SEND, target), j = head_of(m, target, ACT_RECV, source);
        if (i < 0 || j < 0) return ERR_OK;
        const Action *a = &m->s->rank[source].action[i], *b = &m->s->rank[target].action[j];
        if (a->payload != b->payload || a->replica != b->replica || a->stage != b->stage ||
            a->microbatch != b->microbatch)
            return err_set(ERR_INTERNAL,
                           "order: rank %d sends unit %d for stage %d where rank %d expects unit %d for stage %d",
                           source, a->microbatch, a->stage, target, b->microbatch, b->stage);
        meet(m, source, i);
        meet(m, target, j);
    }
}

/* Runs the rank up to its next group and starts that. */
static Err go_on(Meeting *m, int rank)
{
    const ActionList *list = &m->s->rank[rank];
    int i = m->end[rank];
    while (i < list->count && !action_is_message(list->action[i].kind)) i++;
    m->first[rank] = m->end[rank] = i;
    while (i < list->count && action_is_message(list->action[i].kind) && list->action[i].flags & ACTION_MORE) i++;
    m->end[rank] = i < list->count ? i + 1 : i;
    m->open[rank] = m->end[rank] - m->first[rank];
    for (int k = m->first[rank]; k < m->end[rank] && m->open[rank] > 0; k++) {
        const int peer = list->action[k].peer;
        if (list->action[k].kind == ACT_SEND) TRY(meet_all(m, rank, peer));
        else TRY(meet_all(m, peer, rank));
    }
    return ERR_OK;
}

static Err run_meetings(Meeting *m)
{
    for (int r = 0; r < m->s->ranks; r++) m->ready[m->ready_count++] = r;
    while (m->ready_count > 0) TRY(go_on(m, m->ready[--m->ready_count]));
    for (int r = 0; r < m->s->ranks; r++)
        if (m->open[r] > 0) {
            const Action *a = &m->s->rank[r].action[m->first[r]];
            return err_set(ERR_INTERNAL, "deadlock: rank %d waits for ever at action %d, %s %s rank %d", r, m->first[r],
                           action_name(a->kind), a->kind == ACT_SEND ? "to" : "from", a->peer);
        }
    return ERR_OK;
}

Err check_rendezvous(const Schedule *s)
{
    const size_t ranks = (size_t)s->ranks;
    Meeting m = { .s = s,
                  .first = calloc(ranks, sizeof(int)),
                  .end = calloc(ranks, sizeof(int)),
                  .open = calloc(ranks, sizeof(int)),
                  .ready = calloc(ranks, sizeof(int)),
                  .met = calloc(ranks, sizeof(bool *)) };
    bool room = m.first && m.end && m.open && m.ready && m.met;
    for (int r = 0; room && r < s->ranks; r++)
        room = (m.met[r] = calloc((size_t)s->rank[r].count + 1, sizeof(bool))) != NULL;
    Err err = room ? run_meetings(&m) : err_set(ERR_MEMORY, "no memory to check schedule '%s'", s->name);
    for (int r = 0; m.met && r < s->ranks; r++) free(m.met[r]);
    free(m.first);
    free(m.end);
    free(m.open);
    free(m.ready);
    free(m.met);
    return err;
}
