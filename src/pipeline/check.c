/* Computes, versions and caps; see check.h. check_program.c has the messages. */
#include "pipeline/check.h"

#include <stdlib.h>

#include "pipeline/simulate.h"

enum { DONE_F = 1, DONE_I = 2, DONE_W = 4 };

typedef struct {
    const Schedule *s;
    uint8_t *done;                          /* [replicas][stages][units] DONE_* */
    int rank, at;                           /* where the walk is */
    int weights[2], reduces[2], updates[2]; /* W, REDUCE and UPDATE so far on the rank, by replica */
    int norms;
    int input; /* unit of the last dgrad on the rank, of sliced sequences; -1: none */
} Walk;

static Err wrong(const Walk *w, const char *what)
{
    const Action *a = &w->s->rank[w->rank].action[w->at];
    return err_set(ERR_INTERNAL, "rank %d, action %d: %s of unit %d at stage %d, replica %d %s", w->rank, w->at,
                   action_name(a->kind), a->microbatch, a->stage, a->replica, what);
}

/* ---- versions ---- */

static int at_least_0(int n) { return n > 0 ? n : 0; }

int check_version(const Schedule *s, int stage, int unit)
{
    switch (s->versions) {
    case VERSIONS_STEP: return 0;
    case VERSIONS_STASH: return at_least_0(unit - (s->ranks - 1 - stage));
    case VERSIONS_VERTICAL: return at_least_0(unit - (s->ranks - 1));
    case VERSIONS_DOUBLE: return at_least_0(unit / (s->microbatches * s->unit_div) - 1);
    }
    return 0;
}

static Err check_read(const Walk *w, const Action *a)
{
    const int newest = w->s->versions == VERSIONS_STEP ? 0 : w->updates[a->replica];
    const int want = check_version(w->s, a->stage, a->microbatch);
    if (a->version > newest) return wrong(w, "reads a version that was never there");
    if (newest - a->version != want) return wrong(w, "reads the wrong version of the weights");
    return ERR_OK;
}

/* ---- the end of a step ---- */

/* Weight halves that must be done on the rank before the replica's next update. */
static int weights_due(const Walk *w, int replica)
{
    const Schedule *s = w->s;
    if (s->versions == VERSIONS_DOUBLE) return (w->updates[0] + 1) * s->microbatches * s->unit_div;
    if (s->versions != VERSIONS_STEP) return w->updates[0] + 1;
    int units = 0;
    for (int k = 0; k < s->units; k++) units += s->unit_replica[k] == replica;
    return units * s->chunks;
}

static Err check_end(Walk *w, const Action *a)
{
    const int r = a->replica;
    if (r >= w->s->replicas) return wrong(w, "is foreign: there is no such replica");
    if (a->kind == ACT_NORM) w->norms++;
    if (a->kind != ACT_REDUCE && a->kind != ACT_UPDATE) return ERR_OK;
    if (w->weights[r] < weights_due(w, r)) return wrong(w, "is early: wgrads are still to come");
    if (a->kind == ACT_REDUCE) w->reduces[r]++;
    if (a->kind == ACT_REDUCE) return ERR_OK;
    if (w->reduces[r] <= w->updates[r]) return wrong(w, "is early: its gradients are not reduced");
    if (w->s->versions == VERSIONS_STEP && !w->norms) return wrong(w, "is early: there is no norm yet");
    w->updates[r]++;
    return ERR_OK;
}

static int updates_due(const Schedule *s)
{
    if (s->forward_only) return 0;
    if (s->versions == VERSIONS_STEP) return 1;
    return s->versions == VERSIONS_DOUBLE ? s->batches : s->units;
}

/* ---- computes ---- */

static Err check_place(const Walk *w, const Action *a)
{
    const Schedule *s = w->s;
    if (a->replica >= s->replicas || a->stage >= s->stages || a->microbatch < 0 || a->count < 1 ||
        a->microbatch > s->units - a->count)
        return wrong(w, "is foreign: the schedule has no such thing");
    if (schedule_rank_of(s, a->replica, a->stage) != w->rank)
        return wrong(w, "is foreign: another rank has this stage");
    if (!(a->flags & ACTION_PAIR)) return ERR_OK;
    const ActionList *list = &s->rank[w->rank];
    const bool pair = w->at + 1 < list->count && a->kind == ACT_F && (a[1].kind == ACT_B || a[1].kind == ACT_I);
    return pair ? ERR_OK : wrong(w, "is paired with what is no backward");
}

/* (a schedule with slices has one stage a rank) */
static Err check_slice(Walk *w, const Action *a, int unit)
{
    const Schedule *s = w->s;
    const int slice = schedule_slice_of(s, unit), last = s->slices - 1;
    const uint8_t *done = &w->done[schedule_place(s, a->replica, a->stage, unit)];
    if (s->slices == 1) return ERR_OK;
    if (a->slice != schedule_slice_of(s, a->microbatch)) return wrong(w, "says it were another slice");
    if (a->kind == ACT_F && slice > 0 && !(done[-1] & DONE_F)) return wrong(w, "comes before the slice before it");
    if (a->kind == ACT_F || a->kind == ACT_W) return ERR_OK;
    if (slice < last && !(done[1] & DONE_I)) return wrong(w, "comes before the slice behind it");
    if (slice < last && w->input != unit + 1) return wrong(w, "has another micro-batch between its slices");
    w->input = unit;
    return ERR_OK;
}

static Err check_unit(Walk *w, const Action *a, int unit)
{
    uint8_t *done = &w->done[schedule_place(w->s, a->replica, a->stage, unit)];
    const bool forward = a->kind == ACT_F, input = a->kind == ACT_B || a->kind == ACT_I;
    const bool weight = a->kind == ACT_B || a->kind == ACT_W;
    const uint8_t now = (uint8_t)((forward ? DONE_F : 0) | (input ? DONE_I : 0) | (weight ? DONE_W : 0));
    if (*done & now) return wrong(w, "is there twice");
    if (w->s->unit_replica[unit] != a->replica) return wrong(w, "is foreign: the other replica has this unit");
    if (input && !(*done & DONE_F)) return wrong(w, "comes before its F");
    if (weight && !input && !(*done & DONE_I)) return wrong(w, "comes before its I");
    TRY(check_slice(w, a, unit));
    *done |= now;
    if (weight) w->weights[a->replica]++;
    return ERR_OK;
}

static Err check_action(Walk *w, const Action *a)
{
    if (action_is_message(a->kind)) return ERR_OK;
    if (!action_is_compute(a->kind)) return check_end(w, a);
    TRY(check_place(w, a));
    if (a->kind != ACT_W) TRY(check_read(w, a));
    for (int k = 0; k < a->count; k++) TRY(check_unit(w, a, a->microbatch + k));
    return ERR_OK;
}

static Err check_rank(Walk *w, int rank)
{
    const Schedule *s = w->s;
    *w = (Walk){ .s = s, .done = w->done, .rank = rank, .input = -1 };
    for (; w->at < s->rank[rank].count; w->at++) TRY(check_action(w, &s->rank[rank].action[w->at]));
    for (int r = 0; r < s->replicas; r++)
        if (w->updates[r] != updates_due(s))
            return err_set(ERR_INTERNAL, "rank %d: %d updates of replica %d, not %d", rank, w->updates[r], r,
                           updates_due(s));
    return ERR_OK;
}

static Err check_missing(const Walk *w)
{
    const Schedule *s = w->s;
    const int all = s->forward_only ? DONE_F : DONE_F | DONE_I | DONE_W;
    for (int stage = 0; stage < s->stages; stage++)
        for (int k = 0; k < s->units; k++) {
            const int lacks = all & ~w->done[schedule_place(s, s->unit_replica[k], stage, k)];
            if (!lacks) continue;
            return err_set(ERR_INTERNAL, "missing: %s of unit %d at stage %d, replica %d",
                           lacks & DONE_F   ? "F"
                           : lacks & DONE_I ? "I"
                                            : "W",
                           k, stage, s->unit_replica[k]);
        }
    return ERR_OK;
}

Err check_compute(const Schedule *s)
{
    Walk w = { .s = s };
    w.done = calloc((size_t)s->replicas * (size_t)s->stages * (size_t)s->units, 1);
    Err err = w.done ? ERR_OK : err_set(ERR_MEMORY, "no memory to check schedule '%s'", s->name);
    for (int r = 0; r < s->ranks && !err; r++) err = check_rank(&w, r);
    if (!err) err = check_missing(&w);
    free(w.done);
    return err;
}

Err check_cap(const Schedule *s)
{
    for (int r = 0; r < s->ranks && s->cap; r++)
        if (simulate_peak(s, r, false) > s->cap)
            return err_set(ERR_CONFIG, "schedule '%s' holds %d units on rank %d, more than the cap of %d", s->name,
                           simulate_peak(s, r, false), r, s->cap);
    return ERR_OK;
}
