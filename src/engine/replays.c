/* See replays.h. */
#include "engine/replays.h"

#include <stdlib.h>

#include "base/log.h"

/* After so many steps each of which differed from the one before it, no more are listened to. And so many recordings
 * are made at most: graphs take memory of the device that no plan knows. */
enum { DIFFERING_MOST = 16, RECORDINGS_MOST = 64 };

Err replays_open(Replays *r, const ActionList *list, SetupArena *setup)
{
    *r = (Replays){ .mode = REPLAYS_OFF };
    TRY(setup_array(setup, list->count, &r->first));
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        r->first[i] = r->unit_count;
        r->unit_count += action_is_compute(a->kind) && a->count > 1 ? a->count : 1;
    }
    return setup_array(setup, r->unit_count, &r->units);
}

void replays_release(Replays *r, Device *dev)
{
    for (int i = 0; i < r->recording_count; i++) {
        recording_release(r->recordings[i], dev);
        free(r->recordings[i]);
    }
    free(r->recordings);
    *r = (Replays){ .mode = REPLAYS_OFF };
}

/* How many recordings a step like the last one takes. */
static int digests_of(const Replays *r)
{
    int count = 0;
    for (int i = 0; i < r->unit_count; i++) {
        int k = 0;
        while (k < i && r->units[k].digest != r->units[i].digest) k++;
        count += k == i;
    }
    return count;
}

void replays_begin(Replays *r, bool plainly)
{
    r->mode = plainly || r->off ? REPLAYS_OFF
              : r->ready        ? REPLAYS_REPLAYS
              : r->same         ? REPLAYS_RECORDS
                                : REPLAYS_LISTENS;
    r->changed = false;
    r->refused = NULL;
}

static Recording *recording_of(const Replays *r, uint64_t digest)
{
    for (int i = 0; i < r->recording_count; i++)
        if (r->recordings[i]->digest == digest) return r->recordings[i];
    return NULL;
}

static Err add_recording(Replays *r, Recording **out)
{
    if (r->recording_count == r->recording_capacity) {
        const int more = r->recording_capacity ? 2 * r->recording_capacity : 16;
        Recording **moved = realloc(r->recordings, (size_t)more * sizeof *moved);
        if (!moved) return err_set(ERR_MEMORY, "no host memory for recordings");
        r->recordings = moved;
        r->recording_capacity = more;
    }
    *out = calloc(1, sizeof **out);
    if (!*out) return err_set(ERR_MEMORY, "no host memory for a recording");
    r->recordings[r->recording_count++] = *out;
    return ERR_OK;
}

/* The host code runs, and is listened to. */
static Err run_heard(Replays *r, Stream *s, UnitReplay *u, UnitWork *work, void *user)
{
    Recorder recorder;
    Recording *into = NULL;
    if (r->mode == REPLAYS_RECORDS && !recording_of(r, u->digest)) TRY(add_recording(r, &into));
    recorder_begin(&recorder, s, into);
    TRY(recorder_end(&recorder, s, work(user)));
    if (into && recorder.digest != u->digest) recording_release(into, s->dev); /* (the step differs) */
    r->changed = r->changed || recorder.digest != u->digest;
    u->digest = recorder.digest;
    if (!recorder.refused) return ERR_OK;
    r->refused = recorder.refused;
    if (into) recording_release(into, s->dev);
    return ERR_OK;
}

Err replays_run(Replays *r, Stream *s, int action, int unit, UnitWork *work, void *user)
{
    UnitReplay *u = &r->units[r->first[action] + unit];
    if (r->mode == REPLAYS_OFF) return work(user);
    if (r->mode != REPLAYS_REPLAYS) return run_heard(r, s, u, work, user);
    if (!u->recording) return err_set(ERR_INTERNAL, "action %d of the step was not recorded", action);
    return recording_replay(u->recording, s);
}

static void give_up(Replays *r)
{
    r->off = true;
    if (r->refused) log_warn("steps run without graphs, which cannot hold %s", r->refused);
    else if (r->same)
        log_warn("steps run without graphs: one has %d different units, more than %d", digests_of(r), RECORDINGS_MOST);
    else log_warn("steps run without graphs: each gives the device other work than the one before");
}

StepCounts replays_counts(const Replays *r)
{
    StepCounts sum = { .graphs = 0 };
    for (int i = 0; i < r->unit_count; i++) {
        const Recording *x = r->units[i].recording;
        if (x) sum.launches += x->launches, sum.graphs += x->graphs, sum.calls += x->calls;
    }
    return sum;
}

static void say(const Replays *r)
{
    const StepCounts n = replays_counts(r);
    log_info("graphs: a step's %lld launches are %lld graphs and %lld calls between them from here on (%d of %d "
             "recorded)",
             (long long)n.launches, (long long)n.graphs, (long long)n.calls, digests_of(r), r->unit_count);
}

void replays_end(Replays *r)
{
    if (r->mode != REPLAYS_LISTENS && r->mode != REPLAYS_RECORDS) return;
    const bool differs = r->changed || r->refused;
    r->same = differs ? 0 : r->same + 1;
    r->differing = differs ? r->differing + 1 : 0;
    if (r->differing == DIFFERING_MOST) give_up(r);
    else if (r->same == 1 && digests_of(r) > RECORDINGS_MOST) give_up(r);
    if (r->mode != REPLAYS_RECORDS || differs) return;
    for (int i = 0; i < r->unit_count; i++) r->units[i].recording = recording_of(r, r->units[i].digest);
    r->ready = true;
    say(r);
}

void replays_forget(Replays *r)
{
    r->ready = false;
    r->same = r->differing = 0;
    for (int i = 0; i < r->unit_count; i++) r->units[i] = (UnitReplay){ 0 };
}
