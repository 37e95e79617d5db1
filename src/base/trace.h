/*
 * Trace: named spans and counters of all threads, written as a Chrome trace that ui.perfetto.dev opens.
 *
 *   trace_open("runs/tiny/timeline.json");     once
 *   trace_start();                             for each step that is to be seen
 *   trace_begin("step"); trace_begin("forward"); ... trace_end(); trace_end();
 *   trace_stop();
 *   trace_close();
 *
 * Several processes in one file: each records, trace_halt, then trace_text gives its events (train/timeline.h).
 *
 * While nothing is recorded, a call costs one load and a branch. Events go into a ring that trace_open allocated:
 * nothing else allocates, and the newest TRACE_EVENTS events are kept; a warning says how many were lost. Names are
 * not copied: pass literals. Spans nest, at most TRACE_DEPTH deep on a thread (ASSERT), and must end on the thread that
 * began them; those still open at trace_stop are left out.
 */
#ifndef MEGATRAIN_BASE_TRACE_H
#define MEGATRAIN_BASE_TRACE_H

#include <stdint.h>

#include "base/err.h"

enum { TRACE_EVENTS = 1 << 17, TRACE_DEPTH = 32, TRACE_TRACKS = 256 };

/* Takes the memory; `path` is where trace_stop writes. ERR_MEMORY. One trace at a time (ASSERT). */
Err trace_open(const char *path);
/* Forgets what was recorded before and records from now on. Opened and not recording (ASSERT). */
void trace_start(void);
/* Stops recording and writes the file over that of an earlier recording. Recording (ASSERT). ERR_IO. */
Err trace_stop(void);
/* Stops recording; what was recorded stays until the next trace_start. Recording (ASSERT). */
void trace_halt(void);
/* Gives the memory back; writes nothing. Does nothing when no trace is open. */
void trace_close(void);

void trace_begin(const char *name);
void trace_end(void);

/* Numbers that are shown with a span. Names are literals. */
enum { TRACE_ARGS = 4 };
typedef struct {
    const char *kind;         /* a word, shown as "kind"; or NULL */
    const char *const *names; /* [TRACE_ARGS], fewer end with NULL */
    int32_t value[TRACE_ARGS];
} TraceArgs;

void trace_begin_with(const char *name, const TraceArgs *args); /* copied */

/* An arrow from the span that is open here at its start to the one open at its end, in any thread or process. `id`
 * is its own among all arrows, 0 to 2^40 - 1. */
void trace_arrow(const char *name, int64_t id, bool end);

/* `number` tells counters of one name apart: each pair has a track. */
void trace_counter(const char *name, int number, double value);

/* Names the calling thread's track ("rank 3 compute"); copied, cut after 47 bytes. Also before trace_open. */
void trace_track(const char *name);

/* ---- recordings of several processes in one file ---- */

/* Nanoseconds of this host's monotonic clock: of spans, and of trace_start. */
int64_t trace_now(void);
int64_t trace_started(void);

/* How a process appears in the file. */
typedef struct {
    const char *name;
    int pid, place;     /* place: in the order of processes, from 1; 0: any */
    int64_t origin_ns;  /* time 0 by this process's clock; not later than trace_start */
    int64_t arrow_base; /* is added to the ids of its arrows */
} TraceProcess;

/*
 * Text of the events from *next (at first 0) on, and behind them the names of process and tracks: objects, each
 * with ",\n" before it, as many as fit into buf[size], size >= TRACE_TEXT. Returns its bytes, without a 0 behind
 * them, and moves *next on; 0: that was all. Not recording.
 */
enum { TRACE_TEXT = 1 << 12 };
int64_t trace_text(const TraceProcess *p, int64_t *next, char *buf, int64_t size);

#endif
