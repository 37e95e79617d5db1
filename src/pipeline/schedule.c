/* Making a schedule from its spec; see schedule.h. */
#include "pipeline/schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/words.h"
#include "pipeline/check.h"
#include "pipeline/list.h"
#include "pipeline/passes.h"
#include "pipeline/table.h"

enum { SCHEDULES_MAX = 64 };
enum { RANKS_MAX = 1 << 12, SLICES_MAX = 1 << 10, UNITS_MAX = 1 << 24, STAGES_MAX = 1 << 15, VISITS_MAX = 1 << 27 };

const char *schedule_name(int i) { return i < schedule_table_count ? schedule_table[i].name : NULL; }

static Err no_memory(const Schedule *s)
{
    return err_set(ERR_MEMORY, "no memory for the lists of schedule '%s': %d ranks, %d micro-batches", s->name,
                   s->ranks, s->microbatches);
}

/* ---- the spec ---- */

static bool is_word_of(const char *words, const char *name, size_t size)
{
    while (words && *words) {
        size_t word = strcspn(words, " ");
        if (word == size && !strncmp(words, name, size)) return true;
        words += word + strspn(words + word, " ");
    }
    return false;
}

static const ScheduleKind *find_kind(const char *name, size_t size)
{
    for (int i = 0; i < schedule_table_count; i++) {
        const ScheduleKind *k = &schedule_table[i];
        if (is_word_of(k->name, name, size) || is_word_of(k->aliases, name, size)) return k;
    }
    return NULL;
}

static const char *nearest_name(const char *name)
{
    const char *names[SCHEDULES_MAX];
    ASSERT(schedule_table_count <= SCHEDULES_MAX);
    for (int i = 0; i < schedule_table_count; i++) names[i] = schedule_table[i].name;
    return word_nearest(name, names, schedule_table_count);
}

static Err unknown_name(const char *name)
{
    char all[512];
    size_t used = 0;
    all[0] = 0;
    for (int i = 0; i < schedule_table_count && used < sizeof all; i++)
        used += (size_t)snprintf(all + used, sizeof all - used, " %s", schedule_table[i].name);
    const char *nearest = nearest_name(name);
    err_set(ERR_CONFIG, "unknown schedule '%s'%s%s%s", name, nearest ? "; did you mean '" : "", nearest ? nearest : "",
            nearest ? "'?" : "");
    return err_hint("schedules:%s; '+split' behind a name splits its backwards", all);
}

static Err read_name(const ScheduleSpec *spec, Schedule *s)
{
    static const char suffix[] = "+split";
    const char *name = spec->name ? spec->name : "";
    size_t size = strlen(name), cut = sizeof suffix - 1;
    s->split = size > cut && !strcmp(name + size - cut, suffix);
    s->kind = find_kind(name, size - (s->split ? cut : 0));
    if (!s->kind) return unknown_name(name);
    snprintf(s->name, sizeof s->name, "%s", name);
    return ERR_OK;
}

Err schedule_two_way(const char *name, bool *out)
{
    Schedule s = { 0 };
    TRY(read_name(&(ScheduleSpec){ .name = name }, &s));
    *out = s.kind->placement == PLACE_TWO_WAY;
    return ERR_OK;
}

Err schedule_pairs(const char *name, bool *out)
{
    Schedule s = { 0 };
    TRY(read_name(&(ScheduleSpec){ .name = name }, &s));
    *out = s.kind->pairs;
    return ERR_OK;
}

Err schedule_versions(const char *name, Versions *out)
{
    Schedule s = { 0 };
    TRY(read_name(&(ScheduleSpec){ .name = name }, &s));
    *out = s.kind->versions;
    return ERR_OK;
}

/* The figures that follow from the others. */
static void derive(Schedule *s)
{
    const ScheduleKind *k = s->kind;
    if (k->waves) s->chunks = 2 * s->waves;
    s->placement = k->placement;
    s->versions = k->versions;
    s->replicas = k->placement == PLACE_TWO_WAY ? 2 : 1;
    s->stages = s->ranks * s->chunks;
    s->unit_div = k->unit_div ? k->unit_div : 1;
    s->units = s->microbatches * s->unit_div * s->slices * s->batches;
}

static Err in_range(const char *what, int value, int high)
{
    if (value >= 1 && value <= high) return ERR_OK;
    return err_set(ERR_CONFIG, "%s must be 1 to %d, not %d", what, high, value);
}

static Err read_slices(const Schedule *s)
{
    TRY(in_range("slices of a sequence", s->slices, SLICES_MAX));
    TRY(in_range("micro-batches", s->microbatches, UNITS_MAX / s->slices));
    if (s->slices == 1 || s->kind->sliced) return ERR_OK;
    err_set(ERR_CONFIG, "schedule '%s' passes whole sequences on, not %d slices of them", s->name, s->slices);
    return err_hint("schedule seq1f1b passes slices; 1 for any other");
}

/* The figures that a shape is given, each in its range: derive() multiplies them. */
static Err check_sizes(const Schedule *s)
{
    TRY(in_range("ranks of a pipeline", s->ranks, RANKS_MAX));
    TRY(in_range("micro-batches", s->microbatches, UNITS_MAX));
    TRY(in_range("chunks of a rank", s->chunks, STAGES_MAX / s->ranks));
    TRY(read_slices(s));
    TRY(in_range("batches", s->batches, UNITS_MAX / (2 * s->microbatches) + 1));
    return s->kind->waves ? in_range("waves", s->waves, STAGES_MAX / (2 * s->ranks)) : ERR_OK;
}

static Err check_visits(const Schedule *s)
{
    if ((int64_t)s->units * s->chunks <= VISITS_MAX) return ERR_OK;
    return err_set(ERR_CONFIG, "%d micro-batches through %d chunks a rank are more than %d visits",
                   s->microbatches * s->batches, s->chunks, VISITS_MAX);
}

static Err read_shape(const ScheduleSpec *spec, Schedule *s)
{
    const ScheduleKind *k = s->kind;
    const int chunks = k->chunks ? k->chunks : 2;
    s->ranks = spec->ranks;
    s->microbatches = spec->microbatches;
    s->chunks = spec->chunks ? spec->chunks : chunks;
    s->waves = spec->waves ? spec->waves : k->waves && spec->chunks > 1 ? spec->chunks / 2 : k->waves;
    s->group = k->grouped && spec->group ? spec->group : spec->ranks;
    s->slices = spec->slices ? spec->slices : 1;
    s->batches = k->batches && spec->batches ? spec->batches : k->batches ? k->batches : 1;
    s->cap = spec->cap;
    s->costs = spec->costs;
    s->table = spec->table;
    TRY(check_sizes(s));
    if (k->waves && spec->chunks && spec->chunks != 2 * s->waves)
        return err_set(ERR_CONFIG, "schedule '%s' has two chunks a rank for each wave, not %d", s->name, spec->chunks);
    derive(s);
    TRY(check_visits(s));
    if (k->chunks && s->chunks != k->chunks)
        return err_set(ERR_CONFIG, "schedule '%s' has %d chunk%s a rank, not %d", s->name, k->chunks,
                       k->chunks == 1 ? "" : "s", s->chunks);
    return ERR_OK;
}

/* ---- the nearest legal shape ---- */

/* Counts 0, 1, -1, 2, -2, ... up to `reach` on both sides. */
static int nearby(int i) { return i % 2 ? (i + 1) / 2 : -(i / 2); }

static bool legal_with(Schedule *s, int ranks, int microbatches, int group)
{
    if (ranks < 1 || microbatches < 1 || group < 1) return false;
    s->ranks = ranks;
    s->microbatches = microbatches;
    s->group = group;
    if (check_sizes(s)) return false;
    derive(s);
    return !check_visits(s) && !s->kind->rule(s);
}

/* Whether so many ranks have stages that the caller's model can be cut into. */
static bool stages_fit(const ScheduleSpec *spec, Schedule *s, int ranks)
{
    s->ranks = ranks;
    if (check_sizes(s)) return false;
    derive(s);
    return !spec->stages_fit || spec->stages_fit(s, spec->user);
}

/* On the ranks of `w`: first with two chunks instead of one, then with other micro-batches, then with another group. */
static bool find_on_ranks(const Schedule *w, Schedule *out, int reach)
{
    if (out->chunks != w->chunks && legal_with(out, w->ranks, w->microbatches, w->group)) return true;
    for (int i = 1; i <= reach; i++)
        if (legal_with(out, w->ranks, w->microbatches + nearby(i), w->group)) return true;
    for (int i = 1; i <= reach && w->kind->grouped; i++)
        if (legal_with(out, w->ranks, w->microbatches, w->group + nearby(i))) return true;
    return false;
}

/* On the ranks of `w`, then with other ranks too; true if a legal shape was found. */
static bool find_legal(const ScheduleSpec *spec, const Schedule *w, Schedule *out)
{
    Schedule near = *w;
    if (w->chunks == 1 && !w->kind->chunks) near.chunks = 2; /* every such schedule takes two */
    const int reach = 2 * (4 * w->ranks + 2);
    *out = near;
    if (stages_fit(spec, out, w->ranks) && find_on_ranks(w, out, reach)) return true;
    for (int i = 1; i <= 8; i++) {
        const int ranks = w->ranks + nearby(i);
        *out = near;
        if (!stages_fit(spec, out, ranks)) continue;
        for (int j = 0; j <= reach; j++)
            if (legal_with(out, ranks, w->microbatches + nearby(j), ranks)) return true;
    }
    return false;
}

/* "2 ranks, 8 micro-batches"; of interleaved "2 ranks, 8 micro-batches, groups of 2, 2 chunks a rank" */
static const char *shape_text(const Schedule *s, char *out, size_t size)
{
    char chunks[32] = "", groups[32] = "";
    if (!s->kind->chunks) snprintf(chunks, sizeof chunks, ", %d chunk%s a rank", s->chunks, s->chunks > 1 ? "s" : "");
    if (s->kind->grouped) snprintf(groups, sizeof groups, ", groups of %d", s->group);
    snprintf(out, size, "%d ranks, %d micro-batches%s%s", s->ranks, s->microbatches, groups, chunks);
    return out;
}

static Err check_rule(const ScheduleSpec *spec, const Schedule *s)
{
    const char *rule = s->kind->rule(s);
    Schedule legal;
    if (!rule) return ERR_OK;
    const bool found = find_legal(spec, s, &legal); /* before the error: what it tries has errors of its own */
    char text[128];
    Err err =
        err_set(ERR_CONFIG, "schedule '%s' needs %s; here are %s", s->name, rule, shape_text(s, text, sizeof text));
    if (!found) return err;
    return err_hint("nearest legal shape: %s", shape_text(&legal, text, sizeof text));
}

/* ---- making ---- */

static Err open_lists(Schedule *s)
{
    s->rank = calloc((size_t)s->ranks, sizeof *s->rank);
    s->unit_replica = calloc((size_t)s->units, sizeof *s->unit_replica);
    return s->rank && s->unit_replica ? ERR_OK : no_memory(s);
}

static void note_replicas(Schedule *s)
{
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) {
            const Action *a = &s->rank[r].action[i];
            for (int k = 0; a->kind == ACT_F && k < a->count; k++) s->unit_replica[a->microbatch + k] = a->replica;
        }
}

/* All passes behind the generator. */
static Err finish(Schedule *s)
{
    if (s->no_memory) return no_memory(s);
    if (s->split) TRY(pass_split(s));
    note_replicas(s);
    if (!s->forward_only) TRY(pass_sync(s));
    TRY(check_compute(s));
    TRY(pass_lower(s));
    TRY(pass_buffers(s));
    s->costs = NULL;
    TRY(check_messages(s));
    TRY(check_rendezvous(s));
    return check_cap(s);
}

Err schedule_shape(const ScheduleSpec *spec, Schedule *out)
{
    *out = (Schedule){ 0 };
    TRY(read_name(spec, out));
    TRY(read_shape(spec, out));
    return check_rule(spec, out);
}

Err schedule_make(const ScheduleSpec *spec, Schedule *out)
{
    TRY(schedule_shape(spec, out));
    TRY(open_lists(out));
    out->kind->generate(out);
    return finish(out);
}

Err schedule_forward(const ScheduleSpec *spec, Schedule *out)
{
    *out = (Schedule){ 0 };
    TRY(read_name(spec, out));
    TRY(read_shape(spec, out));
    out->forward_only = true;
    out->split = false;
    out->versions = VERSIONS_STEP;
    out->batches = 1;
    out->units = out->microbatches * out->unit_div * out->slices;
    TRY(open_lists(out));
    list_schedule_forward(out);
    return finish(out);
}
