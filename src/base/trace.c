/*
 * A span is recorded when it ends, as one event with start and length, so the ring may drop old events without
 * leaving ends that lack a beginning. Each thread keeps its open spans on a small stack of its own; a stack
 * left over from an earlier trace is recognised by its generation number.
 */
#include "base/trace.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

typedef struct {
    const char *name;
    char phase; /* of the format: X span, C counter, s and f the ends of an arrow */
    int track;  /* of a counter: its number */
    int64_t start_ns, length_ns;
    union {
        TraceArgs args; /* of a span */
        double value;   /* of a counter */
        int64_t id;     /* of an arrow */
    };
} TraceEvent;

static struct {
    atomic_bool on;
    atomic_int generation, track_count;
    pthread_mutex_t lock; /* of all below */
    TraceEvent *ring;
    int64_t recorded, origin_ns;
    char *path;
    char track_name[TRACE_TRACKS][48];
} trace = { .lock = PTHREAD_MUTEX_INITIALIZER };

static _Thread_local struct {
    int track; /* from 1; 0 = not given out yet */
    int generation, depth;
    struct {
        const char *name;
        int64_t start_ns;
        TraceArgs args;
    } open[TRACE_DEPTH];
} mine;

int64_t trace_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static bool is_on(void) { return atomic_load_explicit(&trace.on, memory_order_relaxed); }

/* Threads beyond TRACE_TRACKS share the last track. */
static int my_track(void)
{
    if (!mine.track) mine.track = atomic_fetch_add(&trace.track_count, 1) + 1;
    return mine.track < TRACE_TRACKS ? mine.track : TRACE_TRACKS - 1;
}

static void record(TraceEvent e)
{
    pthread_mutex_lock(&trace.lock);
    if (is_on()) trace.ring[trace.recorded++ % TRACE_EVENTS] = e; /* (not if trace_halt came between) */
    pthread_mutex_unlock(&trace.lock);
}

Err trace_open(const char *path)
{
    ASSERT(!trace.ring);
    char *copy = strdup(path);
    TraceEvent *ring = calloc(TRACE_EVENTS, sizeof *ring);
    if (!copy || !ring) {
        free(copy);
        free(ring);
        return err_set(ERR_MEMORY, "no memory for a trace of %d events", TRACE_EVENTS);
    }
    memset(ring, 1, TRACE_EVENTS * sizeof *ring); /* touch the pages now, not inside a step */
    pthread_mutex_lock(&trace.lock);
    trace.path = copy;
    trace.ring = ring;
    pthread_mutex_unlock(&trace.lock);
    return ERR_OK;
}

void trace_start(void)
{
    ASSERT(trace.ring && !is_on());
    pthread_mutex_lock(&trace.lock);
    trace.recorded = 0;
    trace.origin_ns = trace_now();
    pthread_mutex_unlock(&trace.lock);
    atomic_fetch_add(&trace.generation, 1);
    atomic_store(&trace.on, true);
}

int64_t trace_started(void) { return trace.origin_ns; }

void trace_begin_with(const char *name, const TraceArgs *args)
{
    if (!is_on()) return;
    int generation = atomic_load(&trace.generation);
    if (mine.generation != generation) {
        mine.generation = generation;
        mine.depth = 0;
    }
    ASSERT(mine.depth < TRACE_DEPTH);
    mine.open[mine.depth].name = name;
    mine.open[mine.depth].args = *args;
    mine.open[mine.depth++].start_ns = trace_now();
}

void trace_begin(const char *name) { trace_begin_with(name, &(TraceArgs){ 0 }); }

void trace_end(void)
{
    /* the span may have begun before the trace was opened */
    if (!is_on() || mine.generation != atomic_load(&trace.generation) || mine.depth == 0) return;
    mine.depth--;
    int64_t start_ns = mine.open[mine.depth].start_ns;
    record((TraceEvent){ .name = mine.open[mine.depth].name,
                         .phase = 'X',
                         .track = my_track(),
                         .start_ns = start_ns,
                         .length_ns = trace_now() - start_ns,
                         .args = mine.open[mine.depth].args });
}

void trace_counter(const char *name, int number, double value)
{
    if (is_on())
        record((TraceEvent){ .name = name, .phase = 'C', .track = number, .start_ns = trace_now(), .value = value });
}

void trace_arrow(const char *name, int64_t id, bool end)
{
    if (is_on())
        record((TraceEvent){
            .name = name, .phase = end ? 'f' : 's', .track = my_track(), .start_ns = trace_now(), .id = id });
}

void trace_track(const char *name)
{
    int track = my_track();
    pthread_mutex_lock(&trace.lock);
    snprintf(trace.track_name[track], sizeof trace.track_name[track], "%s", name);
    pthread_mutex_unlock(&trace.lock);
}

/* ---- text ---- */

static void put_args(JsonOut *j, const TraceArgs *a)
{
    if (!a->kind && !a->names) return;
    json_open(j, "args", '{');
    if (a->kind) json_put_text(j, "kind", a->kind);
    for (int i = 0; a->names && i < TRACE_ARGS && a->names[i]; i++) json_put_int(j, a->names[i], a->value[i]);
    json_close(j, '}');
}

static void put_counter(JsonOut *j, const TraceEvent *e)
{
    if (e->track) json_put_int(j, "id", e->track); /* tracks of a process's counters go by name and id */
    json_open(j, "args", '{');
    json_put_number(j, "value", e->value);
    json_close(j, '}');
}

static void put_arrow(JsonOut *j, const TraceEvent *e, const TraceProcess *p)
{
    json_put_text(j, "cat", "message");
    json_put_int(j, "id", p->arrow_base + e->id);
    if (e->phase == 'f') json_put_text(j, "bp", "e"); /* at the span around it, not at the next */
}

static void put_event(JsonOut *j, const TraceEvent *e, const TraceProcess *p)
{
    json_open(j, NULL, '{');
    json_put_text(j, "name", e->name);
    json_put_text(j, "ph", (char[]){ e->phase, 0 });
    json_put_int(j, "pid", p->pid);
    if (e->phase != 'C') json_put_int(j, "tid", e->track);
    json_put_milli(j, "ts", e->start_ns - p->origin_ns); /* in microseconds */
    if (e->phase == 'X') json_put_milli(j, "dur", e->length_ns);
    if (e->phase == 'X') put_args(j, &e->args);
    else if (e->phase == 'C') put_counter(j, e);
    else put_arrow(j, e, p);
    json_close(j, '}');
}

/* Names the process (track 0) or a track. */
static void put_name(JsonOut *j, int pid, int track, const char *name)
{
    json_open(j, NULL, '{');
    json_put_text(j, "name", track ? "thread_name" : "process_name");
    json_put_text(j, "ph", "M");
    json_put_int(j, "pid", pid);
    json_put_int(j, "tid", track);
    json_open(j, "args", '{');
    json_put_text(j, "name", name);
    json_close(j, '}');
    json_close(j, '}');
}

static void put_place(JsonOut *j, const TraceProcess *p)
{
    json_open(j, NULL, '{');
    json_put_text(j, "name", "process_sort_index");
    json_put_text(j, "ph", "M");
    json_put_int(j, "pid", p->pid);
    json_put_int(j, "tid", 0);
    json_open(j, "args", '{');
    json_put_int(j, "sort_index", p->place);
    json_close(j, '}');
    json_close(j, '}');
}

static int64_t kept(void) { return trace.recorded < TRACE_EVENTS ? trace.recorded : TRACE_EVENTS; }

/* The i-th object: events, the process, tracks. false: behind the last. What has no object leaves *j empty. */
static bool put_object(JsonOut *j, int64_t i, const TraceProcess *p)
{
    const int64_t track = i - kept() - 1;
    if (i < kept()) put_event(j, &trace.ring[(trace.recorded - kept() + i) % TRACE_EVENTS], p);
    else if (track == -1) put_name(j, p->pid, 0, p->name);
    else if (track == 0 && p->place) put_place(j, p);
    else if (track > 0 && track < TRACE_TRACKS && trace.track_name[track][0])
        put_name(j, p->pid, (int)track, trace.track_name[track]);
    return kept() && track < TRACE_TRACKS;
}

int64_t trace_text(const TraceProcess *p, int64_t *next, char *buf, int64_t size)
{
    int64_t used = 0;
    ASSERT(!is_on() && size >= TRACE_TEXT);
    pthread_mutex_lock(&trace.lock);
    for (; used + TRACE_TEXT / 4 <= size; ++*next) {
        JsonOut j;
        json_out_init(&j, buf + used + 2, TRACE_TEXT / 4 - 2);
        if (!put_object(&j, *next, p)) break;
        ASSERT(json_out_ok(&j));
        if (!j.used_bytes) continue;
        memcpy(buf + used, ",\n", 2);
        used += 2 + j.used_bytes;
    }
    pthread_mutex_unlock(&trace.lock);
    return used;
}

/* ---- one process's file ---- */

static Err write_text(FileWriter *file)
{
    static char buf[1 << 15];
    char name[48];
    int64_t next = 0, bytes;
    snprintf(name, sizeof name, "megatrain rank %d", log_rank());
    const TraceProcess p = { .name = name, .origin_ns = trace.origin_ns };
    TRY(file_write(file, kept() ? "[" : "[]\n", kept() ? 1 : 3));
    while ((bytes = trace_text(&p, &next, buf, sizeof buf)) > 0) {
        const bool first = file->written_bytes == 1;
        TRY(file_write(file, buf + first, bytes - first));
    }
    return kept() ? file_write(file, "\n]\n", 3) : ERR_OK;
}

static Err write_file(const char *path)
{
    FileWriter file;
    TRY(file_create(path, &file));
    Err err = write_text(&file);
    if (!err) return file_sync_close(&file);
    file_abandon(&file);
    return err;
}

void trace_halt(void)
{
    ASSERT(is_on());
    pthread_mutex_lock(&trace.lock);
    atomic_store(&trace.on, false);
    pthread_mutex_unlock(&trace.lock);
    if (kept() < trace.recorded)
        log_warn("'%s' holds the newest %lld events, %lld before them found no room", trace.path, (long long)kept(),
                 (long long)(trace.recorded - kept()));
}

Err trace_stop(void)
{
    trace_halt();
    return write_file(trace.path);
}

void trace_close(void)
{
    atomic_store(&trace.on, false);
    pthread_mutex_lock(&trace.lock);
    free(trace.ring);
    free(trace.path);
    trace.ring = NULL;
    trace.path = NULL;
    pthread_mutex_unlock(&trace.lock);
}
