/*
 * Recorded work: what host code gives to a device, kept so that it can be given again without that code.
 *
 *   piece   ops and copies, one after another: one graph, which the host launches at once
 *   call    between pieces, what no graph can hold: calls of communicators, marks of events and waits for them. The
 *           host makes it each time, with the arguments that it had when it was recorded (device_call)
 *
 *   | norm, product | all-gather | wait | product, attention, product | reduce-scatter | wait | ...
 *        piece          call       call            piece                    call         call
 *
 * Who gives the work, such as a layer, knows nothing of this. While a recorder is at work (Device.recorder), the first
 * op or copy behind a call begins a piece, and the next call ends it; the piece then runs before the call is made. So
 * whoever records has done all the work once it has ended, in the same order on all ranks as without a recorder, and no
 * event of a graph is waited for outside of it.
 *
 * A recorder sums up what was given in a digest: all arguments of ops, copies and calls. Host code that gave the same
 * digest has given the same work. It may also listen only, without recording anything.
 *
 * What makes the host wait for the device, or moves its memory, is done, but no recording can hold it (`refused`).
 */
#ifndef MEGATRAIN_DEVICE_RECORDER_H
#define MEGATRAIN_DEVICE_RECORDER_H

#include "device/device.h"
#include "device/digest.h"

/* A graph, or a call. */
typedef struct {
    DeviceGraph *graph;   /* NULL: a call */
    DeviceCall *call;     /* NULL: a graph */
    int64_t at, launches; /* where its arguments are; of a graph: how many launches it is in one */
} RecordedItem;

typedef struct {
    uint64_t digest;
    RecordedItem *items;
    int64_t count, capacity;
    char *args; /* arguments of calls, each aligned as malloc's memory is */
    int64_t args_bytes, args_capacity;
    int64_t graphs, calls, launches; /* launches: of all graphs, were they launched one by one */
    WideCount flop, bytes;           /* counts of its ops, for DeviceCounters */
    int64_t ops;
} Recording;

typedef struct Recorder {
    uint64_t digest;
    Recording *into;       /* NULL: it listens only */
    bool open;             /* a piece is being captured */
    int inside;            /* calls that are being made: what they ask of the device is part of them */
    const char *refused;   /* the first thing that no recording can hold; NULL: there was none */
    DeviceCounters before; /* the counters when it began */
} Recorder;

/* From here on the device's stream tells the recorder, until the end. */
void recorder_begin(Recorder *r, Stream *s, Recording *into);
/* err: what the host code between came to. It is returned, or what the end of the last piece came to. If either is a
 * failure `into` is empty. */
Err recorder_end(Recorder *r, Stream *s, Err err);

/* Gives the work once more. */
Err recording_replay(const Recording *r, Stream *s);
/* Frees what it holds; it is then empty. */
void recording_release(Recording *r, Device *dev);

/* ---- for device.c, ops.c and comm.c ---- */

/* Must the recorder hear of this? */
static inline bool recorder_hears(const Stream *s) { return s->dev->recorder && !s->dev->recorder->inside; }

/* An op or a copy is about to be given to a stream. */
Err recorder_work(Stream *s, uint64_t digest);
/* Something is about to be done that no recording can hold. `what`: a literal. */
Err recorder_refuse(Stream *s, const char *what);
/* Makes a call, and remembers it. */
Err recorder_call(Stream *s, DeviceCall *call, const void *args, int64_t bytes, uint64_t digest);

#endif
