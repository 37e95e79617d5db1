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
    int64_t start_ns, length_ns; /* length -1: a counter */
    double value;
    int track; /* of a counter: its number */
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
    } open[TRACE_DEPTH];
} mine;

static int64_t now_ns(void)
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
    if (trace.ring) trace.ring[trace.recorded++ % TRACE_EVENTS] = e;
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
        return err_set(ERR_MEMORY, "no memory for a trace of '%d' events", TRACE_EVENTS);
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
    trace.origin_ns = now_ns();
    pthread_mutex_unlock(&trace.lock);
    atomic_fetch_add(&trace.generation, 1);
    atomic_store(&trace.on, true);
}

void trace_begin(const char *name)
{
    if (!is_on()) return;
    int generation = atomic_load(&trace.generation);
    if (mine.generation != generation) {
        mine.generation = generation;
        mine.depth = 0;
    }
    ASSERT(mine.depth < TRACE_DEPTH);
    mine.open[mine.depth].name = name;
    mine.open[mine.depth++].start_ns = now_ns();
}

void trace_end(void)
{
    /* the span may have begun before the trace was opened */
    if (!is_on() || mine.generation != atomic_load(&trace.generation) || mine.depth == 0) return;
    mine.depth--;
    int64_t start_ns = mine.open[mine.depth].start_ns;
    record((TraceEvent){ mine.open[mine.depth].name, start_ns, now_ns() - start_ns, 0, my_track() });
}

void trace_counter(const char *name, int number, double value)
{
    if (is_on()) record((TraceEvent){ name, now_ns(), -1, value, number });
}

void trace_track(const char *name)
{
    int track = my_track();
    pthread_mutex_lock(&trace.lock);
    snprintf(trace.track_name[track], sizeof trace.track_name[track], "%s", name);
    pthread_mutex_unlock(&trace.lock);
}

/* ---- writing ---- */

/* Events are collected here and leave in large writes. */
typedef struct {
    FileWriter file;
    int64_t used;
    char text[1 << 15];
} Out;

static Err out_flush(Out *o)
{
    TRY(file_write(&o->file, o->text, o->used));
    o->used = 0;
    return ERR_OK;
}

static Err out_put(Out *o, const char *text, int64_t n)
{
    if (o->used + n > (int64_t)sizeof o->text) TRY(out_flush(o));
    memcpy(o->text + o->used, text, (size_t)n);
    o->used += n;
    return ERR_OK;
}

static Err out_object(Out *o, const JsonOut *j, bool first)
{
    ASSERT(json_out_ok(j));
    TRY(out_put(o, first ? "[\n" : ",\n", 2));
    return out_put(o, j->buf, j->used_bytes);
}

static Err write_event(Out *o, const TraceEvent *e, bool first)
{
    char buf[1024];
    JsonOut j;
    json_out_init(&j, buf, sizeof buf);
    json_open(&j, NULL, '{');
    json_put_text(&j, "name", e->name);
    json_put_text(&j, "ph", e->length_ns < 0 ? "C" : "X");
    json_put_int(&j, "pid", 0);
    if (e->length_ns >= 0) json_put_int(&j, "tid", e->track);
    else if (e->track)
        json_put_int(&j, "id", e->track); /* tracks of a process's counters go by name and id */
    json_put_milli(&j, "ts", e->start_ns - trace.origin_ns); /* in microseconds */
    if (e->length_ns >= 0) json_put_milli(&j, "dur", e->length_ns);
    if (e->length_ns < 0) {
        json_open(&j, "args", '{');
        json_put_number(&j, "value", e->value);
        json_close(&j, '}');
    }
    json_close(&j, '}');
    return out_object(o, &j, first);
}

/* Names the process (track 0) or a track. */
static Err write_name(Out *o, int track, const char *name)
{
    char buf[512];
    JsonOut j;
    json_out_init(&j, buf, sizeof buf);
    json_open(&j, NULL, '{');
    json_put_text(&j, "name", track ? "thread_name" : "process_name");
    json_put_text(&j, "ph", "M");
    json_put_int(&j, "pid", 0);
    json_put_int(&j, "tid", track);
    json_open(&j, "args", '{');
    json_put_text(&j, "name", name);
    json_close(&j, '}');
    json_close(&j, '}');
    return out_object(o, &j, false);
}

static Err write_all_events(Out *o)
{
    char process[48];
    int64_t kept = trace.recorded < TRACE_EVENTS ? trace.recorded : TRACE_EVENTS;
    if (kept < trace.recorded)
        log_warn("'%s' holds the newest %lld events, %lld before them found no room", trace.path,
                 (long long)kept, (long long)(trace.recorded - kept));
    for (int64_t i = 0; i < kept; i++)
        TRY(write_event(o, &trace.ring[(trace.recorded - kept + i) % TRACE_EVENTS], i == 0));
    snprintf(process, sizeof process, "megatrain rank %d", log_rank());
    if (kept) TRY(write_name(o, 0, process));
    for (int track = 1; kept && track < TRACE_TRACKS; track++)
        if (trace.track_name[track][0]) TRY(write_name(o, track, trace.track_name[track]));
    TRY(out_put(o, kept ? "\n]\n" : "[]\n", 3));
    return out_flush(o);
}

static Err write_file(const char *path)
{
    Out o;
    o.used = 0;
    TRY(file_create(path, &o.file));
    Err err = write_all_events(&o);
    if (!err) return file_sync_close(&o.file);
    file_abandon(&o.file);
    return err;
}

Err trace_stop(void)
{
    ASSERT(is_on());
    atomic_store(&trace.on, false);
    pthread_mutex_lock(&trace.lock);
    Err err = write_file(trace.path);
    pthread_mutex_unlock(&trace.lock);
    return err;
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
