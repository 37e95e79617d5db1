/*
 * Trace: named spans and counters of all threads, written as a Chrome trace that ui.perfetto.dev opens.
 *
 *   trace_open("runs/tiny/timeline.json");     once
 *   trace_start();                             for each step that is to be seen
 *   trace_begin("step"); trace_begin("forward"); ... trace_end(); trace_end();
 *   trace_stop();
 *   trace_close();
 *
 * While nothing is recorded, a call costs one load and a branch. Events go into a ring that trace_open allocated:
 * nothing else allocates, and the newest TRACE_EVENTS events are kept; a warning says how many were lost. Names are
 * not copied: pass literals. Spans nest, at most TRACE_DEPTH deep on a thread (ASSERT), and must end on the thread that
 * began them; those still open at trace_stop are left out.
 */
#ifndef MEGATRAIN_BASE_TRACE_H
#define MEGATRAIN_BASE_TRACE_H

#include "base/err.h"

enum { TRACE_EVENTS = 1 << 17, TRACE_DEPTH = 32, TRACE_TRACKS = 256 };

/* Takes the memory; `path` is where trace_stop writes. ERR_MEMORY. One trace at a time (ASSERT). */
Err trace_open(const char *path);
/* Forgets what was recorded before and records from now on. Opened and not recording (ASSERT). */
void trace_start(void);
/* Stops recording and writes the file over that of an earlier recording. Recording (ASSERT). ERR_IO. */
Err trace_stop(void);
/* Gives the memory back; writes nothing. Does nothing when no trace is open. */
void trace_close(void);

void trace_begin(const char *name);
void trace_end(void);
/* `number` tells counters of one name apart: each pair has a track. */
void trace_counter(const char *name, int number, double value);

/* Names the calling thread's track ("rank 3 compute"); copied, cut after 47 bytes. Also before trace_open. */
void trace_track(const char *name);

#endif
