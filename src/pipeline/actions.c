/* A schedule's lists, and the questions that every generator, pass and reader asks of it; see schedule.h. */
#include <stdlib.h>

#include "pipeline/table.h"

const char *action_name(ActionKind kind)
{
    static const char *const names[] = { "F", "B", "I", "W", "SEND", "RECV", "TIED", "REDUCE", "NORM", "UPDATE" };
    return names[kind];
}

/* ---- placement ---- */

int schedule_rank_of(const Schedule *s, int replica, int stage)
{
    const int turn = stage / s->ranks, r = stage % s->ranks;
    bool back = s->placement == PLACE_TWO_WAY ? replica == 1 : s->placement == PLACE_WAVE && turn % 2 == 1;
    return back ? s->ranks - 1 - r : r;
}

int schedule_chunk_of(const Schedule *s, int stage) { return stage / s->ranks; }

int schedule_stage_at(const Schedule *s, int rank, int replica, int chunk)
{
    bool back = s->placement == PLACE_TWO_WAY ? replica == 1 : s->placement == PLACE_WAVE && chunk % 2 == 1;
    return chunk * s->ranks + (back ? s->ranks - 1 - rank : rank);
}

int schedule_lower_replica(const Schedule *s, int rank)
{
    return s->replicas > 1 && schedule_stage_at(s, rank, 1, 0) < schedule_stage_at(s, rank, 0, 0);
}

int schedule_updates(const Schedule *s)
{
    if (s->versions == VERSIONS_STEP) return 1;
    return s->versions == VERSIONS_DOUBLE ? s->batches : s->units;
}

int schedule_in_flight(const Schedule *s, int replica, int stage, bool until_input)
{
    const ActionList *list = &s->rank[schedule_rank_of(s, replica, stage)];
    int now = 0, most = 0;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        if (a->stage != stage || a->replica != replica) continue;
        if (a->kind == ACT_F && (now += a->count) > most) most = now;
        if (a->kind == ACT_B || a->kind == (until_input ? ACT_I : ACT_W)) now -= a->count;
    }
    return most;
}

/* ---- lists ---- */

void schedule_push(Schedule *s, int rank, Action a)
{
    ActionList *list = &s->rank[rank];
    if (list->count == list->capacity) {
        int capacity = list->capacity ? 2 * list->capacity : 64;
        Action *grown = s->no_memory ? NULL : realloc(list->action, (size_t)capacity * sizeof *grown);
        if (!grown) {
            s->no_memory = true;
            return;
        }
        list->action = grown;
        list->capacity = capacity;
    }
    list->action[list->count++] = a;
}

void schedule_add(Schedule *s, int rank, ActionKind kind, int stage, int microbatch)
{
    schedule_push(s, rank,
                  (Action){ .kind = (uint8_t)kind,
                            .stage = (uint16_t)stage,
                            .slice = (uint16_t)schedule_slice_of(s, microbatch),
                            .microbatch = microbatch,
                            .count = 1,
                            .in = -1,
                            .out = -1 });
}

void schedule_free(Schedule *s)
{
    for (int r = 0; s->rank && r < s->ranks; r++) free(s->rank[r].action);
    free(s->rank);
    free(s->unit_replica);
    *s = (Schedule){ 0 };
}
