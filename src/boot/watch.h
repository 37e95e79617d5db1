/*
 * Liveness: is every rank alive and getting on, and if not, whose fault is it?
 *
 * Each rank has a watch connection to rank 0 and a thread that sends a beat over it: what the rank does, and how far
 * it is on every communicator. Rank 0's server judges; all ranks get one verdict that names one culprit:
 *
 *   killed   its connection ended without a goodbye                       known to all in 1 s           exit 7
 *   frozen   no beat for freeze_s: stopped, or its host is gone           freeze_s + 1 s                exit 7
 *   hung     nobody got on for stall_s; the culprit is who the others     stall_s + 1 s                 exit 8
 *            wait for: the lowest issued call on their communicator,
 *            or who owes them a message in it
 *   left     in order, but with an error of its own                       1 s                           its own
 *   error    a failure of communication that a rank reported              1 s                           its own
 *
 * An earlier line explains the later ones, so causes are collected for 0.3 s and the first line wins. If rank 0 is
 * killed or frozen, the others see that themselves. There is one verdict per run; docs/ranks.md has the reasons.
 *
 * All functions but watch_open and watch_close may be called from any thread, are cheap, and do nothing for NULL
 * (a run of one process). A process that forks must close the child's copies (see store.h).
 */
#ifndef MEGATRAIN_BOOT_WATCH_H
#define MEGATRAIN_BOOT_WATCH_H

#include "boot/observer.h"
#include "boot/store.h"

enum { WATCH_COMMS = 64, WATCH_NAME_BYTES = 12, WATCH_TEXT_BYTES = 640 };

typedef enum { WATCH_KILLED, WATCH_FROZEN, WATCH_HUNG, WATCH_LEFT, WATCH_ERROR, WATCH_WHAT_COUNT } WatchWhat;

typedef enum { PHASE_START, PHASE_LOAD, PHASE_STEP, PHASE_EVAL, PHASE_SAVE, PHASE_END, PHASE_COUNT } WatchPhase;

typedef struct {
    WatchWhat what;
    int rank, pid; /* who the culprit is */
    int exit_code; /* the ranks leave with this: 7, 8, or the status of a rank that left */
    char host[STORE_HOST_BYTES];
    char text[WATCH_TEXT_BYTES]; /* the event, with rank, host and pid */
} Verdict;

typedef enum { WATCH_FINE, WATCH_JUDGING, WATCH_JUDGED } WatchState;

typedef struct Watch Watch;

/* It is called once, on the watch thread, and may end the process. */
typedef void (*WatchFn)(void *context, const Verdict *v);

/* Every rank should open a watch. freeze_s > 0; stall_s 0: no hang is judged. Ranks may give different limits: the
 * longest holds. The Store must outlive the Watch. */
Err watch_open(Store *s, double freeze_s, double stall_s, WatchFn on_verdict, void *context, Watch **out);
/* Says goodbye. exit_code 0 or 75 does not concern the peers; with any other they leave with it, too, and with this
 * message. Rank 0 calls store_close afterwards, which passes that on. Takes at most 5 s + freeze_s. */
void watch_close(Watch *w, int exit_code, const char *message);

void watch_phase(Watch *w, WatchPhase phase, int64_t step); /* step: the step that runs or was the last */
/* Something got done. (So does every change that the other calls report.) */
void watch_progress(Watch *w);

/* Tells that this rank is a member of a communicator, and returns the observer of its calls. To be called before the
 * first of them. All members use this id. */
CommObserver watch_join(Watch *w, uint32_t comm_id, const char *name);

/* A rank whose communication failed calls this: it tells rank 0 and waits up to 2 s for the verdict, which names who
 * caused the failure. False: none came (w is NULL, or rank 0 is gone, too); the rank leaves with the error as it is. */
bool watch_report(Watch *w, Err err, const char *text, Verdict *out);

/* JUDGING: something is wrong somewhere, and the verdict is to come. JUDGED: *out (may be NULL) has it. */
WatchState watch_state(Watch *w, Verdict *out);

#endif
