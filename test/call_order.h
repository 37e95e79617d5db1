/*
 * Can the calls that all ranks of a layout make ever wait for each other? The order of a pipeline's messages is proven
 * from its lists (pipeline/check.h); this proves that of all calls over all groups, which no list has: also of buckets
 * that go out in a backward, gathers that nobody waits for yet, tied tables, both replicas of a stage, first weights.
 *
 *   CallLog logs[ranks];            what each rank enqueues and waits for, in its order
 *   call_logs_record(...)           of a training step and an evaluation, on the null device: nothing can hang there
 *   call_order_check(shape, logs)   plays them against each other
 *
 * Calls of one group run in the order of issue, groups beside each other (docs/comm.md): a collective is over when all
 * members have come to it, a message when both its ends have, and a rank goes on from a wait when that call is over. A
 * call that is over never holds up another. So whatever order things happen in, they come to the same end, and one play
 * shows for all timings whether it is everybody's.
 *
 * On a GPU each group has a stream, and streams may share queues of the hardware: a call may then wait for whatever its
 * rank issued before. In a second play, in one queue, it waits for all of that. If this one comes to its end, no
 * sharing locks up, as each has fewer waits.
 */
#ifndef MEGATRAIN_TEST_CALL_ORDER_H
#define MEGATRAIN_TEST_CALL_ORDER_H

#include <stdlib.h>
#include <string.h>

#include "engine/trainer.h"

/* A call, or the wait for one. */
typedef struct {
    GroupKind group;
    int waits_for; /* the call's place in the log; -1: this is a call */
    CommCall call;
    int message_count; /* of an exchange */
    CommMessage messages[COMM_MESSAGES_MAX];
    uint32_t met; /* in the play: messages that are over, a bit each */
    bool over;
} LogEntry;

typedef struct {
    LogEntry *entries;
    int count, room;
    int at;                /* in the play: the next entry */
    int head[WORLD_COMMS]; /* and the call that runs in each group; -1: none */
} CallLog;

static inline void call_log_add(CallLog *log, LogEntry e)
{
    if (log->count == log->room) {
        log->room = log->room ? 2 * log->room : 256;
        log->entries = realloc(log->entries, (size_t)log->room * sizeof *log->entries);
        ASSERT(log->entries);
    }
    log->entries[log->count++] = e;
}

static inline void call_logs_free(CallLog *logs, int ranks)
{
    for (int i = 0; i < ranks; i++) free(logs[i].entries);
}

/* ---- recording ---- */

/* Log that the running rank writes to; NULL: it writes to none. */
static CallLog *call_log_now;

static inline Err log_wait(Stream *s, void *mark)
{
    (void)s;
    if (call_log_now) call_log_add(call_log_now, (LogEntry){ .waits_for = (int)(intptr_t)mark - 1 });
    return ERR_OK;
}

static inline Err log_host_wait(void *mark, double timeout_s)
{
    (void)timeout_s;
    return log_wait(NULL, mark);
}

static inline void log_mark_free(void *mark) { (void)mark; }

/* (an event's mark is the number of its call, counted from 1) */
static inline Err log_submit(Comm *c, const CommRequest *r)
{
    static const EventMarks marks = { log_wait, log_host_wait, log_mark_free };
    LogEntry e = { .group = (GroupKind)(c - (Comm *)c->impl), .waits_for = -1, .call = comm_call(r) };
    e.message_count = r->message_count;
    memcpy(e.messages, r->messages, sizeof e.messages);
    event_complete(r->done, ERR_OK, "");
    if (!call_log_now || c->size == 1) return ERR_OK;
    call_log_add(call_log_now, e);
    r->done->marks = &marks;
    r->done->mark = (void *)(intptr_t)call_log_now->count;
    r->done->marked = true;
    return ERR_OK;
}

static inline void log_close(Comm *c) { (void)c; }

static inline Err record_steps(Trainer *t)
{
    StepReport report;
    double loss;
    int64_t counted;
    for (int i = 0; i < 2; i++) /* (from the second on buckets go out as soon as they are complete) */
        TRY(trainer_step(t, (TokenSource){ 0 }, &report));
    return trainer_eval(t, (TokenSource){ 0 }, 0, t->spec.global_batch, &loss, &counted);
}

/* What `rank` calls from its opening to two steps and an evaluation. */
static inline Err call_log_record(const TrainSpec *spec, Grid grid, int rank, CallLog *log)
{
    static const CommTable table = { "log", log_submit, log_close };
    const int64_t most = (int64_t)1 << 45;
    MemoryPlan limits = { .state = most, .save = most, .save_region = { most / 2 }, .scratch = most, .staging = most,
                          .scratch_forward = most / 2, .offload = { { most, most }, { most, most } },
                          .offload_host = most };
    for (int i = 0; i < PARTS_STAGES; i++)
        limits.stages[i] = (StagePlan){ .save = { most >> 16, most >> 16 }, .away = most >> 16 };
    TrainSpec on_null = *spec;
    World world;
    Trainer t;
    on_null.device.kind = DEVICE_NULL;
    TRY(world_open_null(&world, grid, rank));
    for (int i = 0; i < WORLD_COMMS; i++) world.comm[i].table = &table, world.comm[i].impl = world.comm;
    *log = (CallLog){ 0 };
    call_log_now = log;
    Err err = trainer_open(&t, &on_null, &world, &limits);
    if (!err) {
        err = record_steps(&t);
        trainer_close(&t);
    }
    call_log_now = NULL;
    world_close(&world);
    return err;
}

/* ---- playing ---- */

static inline LogEntry *call_in(CallLog *logs, int rank, GroupKind group)
{
    const int head = logs[rank].head[group];
    return head < 0 ? NULL : &logs[rank].entries[head];
}

/* The call that runs is over: the next one that the rank has issued there begins. */
static inline void call_ends(CallLog *log, GroupKind group)
{
    int i = log->head[group];
    log->entries[i].over = true;
    do i++;
    while (i < log->at && (log->entries[i].waits_for >= 0 || log->entries[i].group != group));
    log->head[group] = i < log->at ? i : -1;
}

typedef enum { GROUPS_BESIDE, ONE_QUEUE } CallQueues;

static inline bool any_runs(const CallLog *log)
{
    bool any = false;
    for (int g = 0; g < WORLD_COMMS; g++) any |= log->head[g] >= 0;
    return any;
}

/* Lets the rank go on as far as it can. */
static inline bool goes_on(CallLog *log, CallQueues queues)
{
    const int before = log->at;
    for (; log->at < log->count; log->at++) {
        const LogEntry *e = &log->entries[log->at];
        if (e->waits_for >= 0 && !log->entries[e->waits_for].over) break;
        if (e->waits_for < 0 && queues == ONE_QUEUE && any_runs(log)) break;
        if (e->waits_for < 0 && log->head[e->group] < 0) log->head[e->group] = log->at;
    }
    return log->at > before;
}

/* Plays a collective of a group. *moved is set if all members had come to it. */
static inline Err meet_all(CallLog *logs, GroupKind group, const int *members, int size, bool *moved)
{
    CommCall calls[64];
    char text[256];
    ASSERT(size <= 64);
    for (int i = 0; i < size; i++) {
        const LogEntry *e = call_in(logs, members[i], group);
        if (!e || e->call.kind == COMM_EXCHANGE) return ERR_OK;
        calls[i] = e->call;
    }
    if (!comm_same_calls(group_name(group), calls, size, text, sizeof text)) return err_set(ERR_INTERNAL, "%s", text);
    for (int i = 0; i < size; i++) call_ends(&logs[members[i]], group);
    *moved = true;
    return ERR_OK;
}

/* The first message of an exchange to (or from) a member that is not over; -1: none. */
static inline int message_with(const LogEntry *e, int peer, bool send)
{
    for (int i = 0; i < e->message_count; i++)
        if (!(e->met >> i & 1) && e->messages[i].peer == peer && e->messages[i].send == send) return i;
    return -1;
}

/* Plays as many messages from one member to another as both have come to. */
static inline Err meet_pair(CallLog *logs, GroupKind group, const int *members, int from, int to, bool *moved)
{
    LogEntry *a = call_in(logs, members[from], group), *b = call_in(logs, members[to], group);
    if (!a || !b || a->call.kind != COMM_EXCHANGE || b->call.kind != COMM_EXCHANGE) return ERR_OK;
    for (int i, k; (i = message_with(a, to, true)) >= 0 && (k = message_with(b, from, false)) >= 0; *moved = true) {
        const CommMessage *sent = &a->messages[i], *received = &b->messages[k];
        const CommNote ends[2] = { { 0, sent->bytes, sent->what }, { 0, received->bytes, received->what } };
        char text[256];
        if (!comm_same_message(group_name(group), from, to, ends, text, sizeof text))
            return err_set(ERR_INTERNAL, "%s", text);
        a->met |= 1u << i;
        b->met |= 1u << k;
    }
    return ERR_OK;
}

/* (an exchange without messages is over at once) */
static inline void end_exchange(CallLog *log, GroupKind group, bool *moved)
{
    const int head = log->head[group];
    if (head < 0 || log->entries[head].call.kind != COMM_EXCHANGE) return;
    if (log->entries[head].met + 1 != 1u << log->entries[head].message_count) return;
    call_ends(log, group);
    *moved = true;
}

static inline Err play_group(CallLog *logs, GroupKind group, const int *members, int size, bool *moved)
{
    TRY(meet_all(logs, group, members, size, moved));
    for (int a = 0; a < size; a++)
        for (int b = 0; b < size; b++)
            if (a != b) TRY(meet_pair(logs, group, members, a, b, moved));
    for (int i = 0; i < size; i++) end_exchange(&logs[members[i]], group, moved);
    return ERR_OK;
}

static inline Err stuck(const CallLog *log, int rank, const LogEntry *e, const char *what)
{
    return err_set(ERR_INTERNAL, "rank %d, entry %d: %s %s of %lld x %lld bytes (call %llu) in %s, which never ends",
                   rank, log->at, what, comm_kind_name((CommKind)e->call.kind), (long long)e->call.count,
                   (long long)e->call.elem_bytes, (unsigned long long)e->call.sequence, group_name(e->group));
}

static inline Err all_ended(const CallLog *logs, int ranks)
{
    for (int r = 0; r < ranks; r++) {
        const CallLog *log = &logs[r];
        if (log->at == log->count) continue;
        const LogEntry *e = &log->entries[log->at];
        if (e->waits_for >= 0) return stuck(log, r, &log->entries[e->waits_for], "waits for");
    }
    for (int r = 0; r < ranks; r++)
        for (int g = 0; g < WORLD_COMMS; g++)
            if (logs[r].head[g] >= 0) return stuck(&logs[r], r, &logs[r].entries[logs[r].head[g]], "has enqueued");
    return ERR_OK;
}

static inline void call_log_rewind(CallLog *log)
{
    log->at = 0;
    for (int i = 0; i < log->count; i++) log->entries[i].met = 0, log->entries[i].over = false;
    for (int g = 0; g < WORLD_COMMS; g++) log->head[g] = -1;
}

/* Who meets: ranks of a group of more than one. */
typedef struct {
    GroupKind kind;
    int size, members[64];
} Meeting;

/* Their number. */
static inline int meetings_of(GridShape shape, Meeting *out)
{
    int n = 0;
    for (int g = 0; g < WORLD_COMMS; g++)
        for (int i = 0; i < group_count(shape, g) && group_size(shape, g) > 1; i++) {
            out[n] = (Meeting){ .kind = g, .size = group_size(shape, g) };
            group_members(shape, g, i, out[n++].members);
        }
    return n;
}

/* logs[shape.world]. ERR_INTERNAL says who would wait for ever, or whose calls differ. */
static inline Err call_order_check(GridShape shape, CallLog *logs, CallQueues queues)
{
    static Meeting meetings[WORLD_COMMS * 64];
    const int count = meetings_of(shape, meetings);
    bool moved = true;
    for (int r = 0; r < shape.world; r++) call_log_rewind(&logs[r]);
    while (moved) {
        moved = false;
        for (int r = 0; r < shape.world; r++) moved |= goes_on(&logs[r], queues);
        for (int i = 0; i < count; i++)
            TRY(play_group(logs, meetings[i].kind, meetings[i].members, meetings[i].size, &moved));
    }
    return all_ended(logs, shape.world);
}

/* May a GPU have this layout? Those that parallel.overlap_grad refuses there would lock up. */
static inline bool may_share_queues(const TrainSpec *spec)
{
    return !spec->update.overlap_grad || strcmp(spec->pipeline.schedule ? spec->pipeline.schedule : "", "gems") != 0;
}

/* Records all ranks of a layout, and plays their calls. */
static inline Err call_order_of(const TrainSpec *spec, Grid grid)
{
    enum { RANKS = 64 };
    CallLog logs[RANKS] = { { 0 } };
    const int ranks = grid_size(grid);
    Err err = ERR_OK;
    ASSERT(ranks <= RANKS);
    for (int r = 0; r < ranks && !err; r++) err = call_log_record(spec, grid, r, &logs[r]);
    if (!err) err = call_order_check(grid_shape(grid), logs, GROUPS_BESIDE);
    if (!err && may_share_queues(spec))
        err = err_prefix(call_order_check(grid_shape(grid), logs, ONE_QUEUE), "in one queue");
    call_logs_free(logs, ranks);
    return err;
}

#endif
