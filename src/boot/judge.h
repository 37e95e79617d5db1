/*
 * The judge of rank 0's server (inside boot/ only): takes what ranks say and what becomes of their connections, all
 * with a time, and says who is to blame. Nothing here reads a clock or a socket.
 */
#ifndef MEGATRAIN_BOOT_JUDGE_H
#define MEGATRAIN_BOOT_JUDGE_H

#include "boot/watch.h"

/* What travels in a beat: this head, then `comms` of WatchComm. */
typedef struct {
    uint32_t phase, comms;
    int64_t step;
    uint64_t progress;
    double beat_s, freeze_s, stall_s;
} WatchBeat;

typedef enum { WAITS_IN_COLLECTIVE, WAITS_IN_RECEIVE, WAITS_IN_SEND } WatchWaitsIn;

typedef struct {
    uint32_t id;
    char name[WATCH_NAME_BYTES];
    uint64_t issued, completed; /* collectives */
    uint64_t exchanges_issued, exchanges_completed;
    int32_t
        waits_for; /* world rank whose message (or taking of one) the call that runs waits for; OBSERVER_NOBODY */
    uint32_t waits_in; /* WatchWaitsIn */
    MessageLabel waits_what;
} WatchComm;

enum { BEAT_BYTES_MAX = sizeof(WatchBeat) + WATCH_COMMS * sizeof(WatchComm) };

typedef struct Judge Judge;

Judge *judge_open(int size); /* NULL without memory */
void judge_close(Judge *j);

void judge_name(Judge *j, int rank, const char *host, int pid);
/* All ranks are there: from now on one that does not open its watch is frozen after the others' freeze_s. */
void judge_met(Judge *j, double now);
void judge_watched(Judge *j, double now, int rank);
bool judge_beat(Judge *j, double now, int rank, const void *beat, size_t bytes); /* false: not a beat */
void judge_lost(Judge *j, double now, int rank); /* connection ended; ignored after judge_left */
void judge_left(Judge *j, double now, int rank, int exit_code, const char *text);
/* Left the store in order: a failure if it has neither left nor been watched at all, and others are. */
void judge_unwatched(Judge *j, double now, int rank);
void judge_report(Judge *j, double now, int rank, int exit_code, const char *text);
/* The judge itself was away: nobody is to blame for that time. */
void judge_was_away(Judge *j, double seconds);

/* To be called often. True, once: the verdict. */
bool judge_tick(Judge *j, double now, Verdict *out);
bool judge_is_judging(const Judge *j);
double judge_beat_s(const Judge *j, int rank); /* how often this rank wants a sign of life */

/* Where the caller is the witness: rank 0 lost or frozen, as the others see it. */
void judge_rank_0(Verdict *out, WatchWhat what, const char *host, int pid, double silent_s);

#endif
