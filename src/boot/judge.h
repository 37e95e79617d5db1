/*
 * The judge of rank 0's server (inside boot/ only). It hears what ranks say and what becomes of their connections, all
 * with a time, and says who is to blame. Nothing here reads a clock or a socket.
 */
#ifndef MEGATRAIN_BOOT_JUDGE_H
#define MEGATRAIN_BOOT_JUDGE_H

#include "boot/watch.h"

/* A beat consists of this head and then `comms` times a WatchComm. */
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
    uint64_t issued, completed; /* how many collectives */
    uint64_t exchanges_issued, exchanges_completed;
    /* The call that runs waits for a message of this world rank, or until that has taken one. OBSERVER_NOBODY: for
     * none. */
    int32_t waits_for;
    uint32_t waits_in; /* a WatchWaitsIn */
    MessageLabel waits_what;
} WatchComm;

enum { BEAT_BYTES_MAX = sizeof(WatchBeat) + WATCH_COMMS * sizeof(WatchComm) };

typedef struct Judge Judge;

Judge *judge_open(int size); /* NULL: no memory */
void judge_close(Judge *j);

void judge_name(Judge *j, int rank, const char *host, int pid);
/* All ranks are there: from now on one that does not open its watch is frozen after the others' freeze_s. */
void judge_met(Judge *j, double now);
void judge_watched(Judge *j, double now, int rank);
bool judge_beat(Judge *j, double now, int rank, const void *beat, size_t bytes); /* false: this is no beat */
void judge_lost(Judge *j, double now, int rank); /* its connection ended; ignored after judge_left */
void judge_left(Judge *j, double now, int rank, int exit_code, const char *text);
/* The rank left the store in order. That is a failure if it has neither left its watch nor been watched at all, and
 * others are watched. */
void judge_unwatched(Judge *j, double now, int rank);
void judge_report(Judge *j, double now, int rank, int exit_code, const char *text);
/* The judge itself was away: nobody is to blame for that time. */
void judge_was_away(Judge *j, double seconds);

/* To be called often. True, which it is once: *out has the verdict. */
bool judge_tick(Judge *j, double now, Verdict *out);
bool judge_is_judging(const Judge *j);
double judge_beat_s(const Judge *j, int rank); /* how often this rank wants a sign of life */

/* Rank 0 is lost or frozen: the verdict of another rank, which has seen it itself. */
void judge_rank_0(Verdict *out, WatchWhat what, const char *host, int pid, double silent_s);

#endif
