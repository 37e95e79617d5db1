/*
 * Faults on purpose: how tests see what a run does when one of its ranks dies, freezes or hangs at a known place.
 *
 * MEGATRAIN_RANK_FAULT=RANK:POINT[:N]:ACTION in the environment: when that rank comes to the point the N-th time
 * (1), it does
 *
 *   kill   dies as by kill -9                 loop   that thread computes for ever, the others go on
 *   stop   stops as by SIGSTOP                exit   leaves with status 0 and without a word
 *   slow   sleeps for 0.2 s, and every time that it comes there again
 *   hold   goes on when the process that started it has ended
 *
 * Points are the names given to fault_point: rendezvous, met, connect, load, found, read, step, save, evaluate, end;
 * inspect, between listing and verifying; the actions of a step's list: forward, backward, "dgrad", "wgrad", messages,
 * "tied embedding", reduce, norm, update; and of a call between its messages, its kind: all-gather,
 * reduce-tree, sum-i64, exchange and so on.
 * Without the variable a point costs a load. (MEGATRAIN_FILE_FAULT does the like for file operations, base/file.h.)
 */
#ifndef MEGATRAIN_BASE_FAULT_H
#define MEGATRAIN_BASE_FAULT_H

/* Before there are other threads. A variable that says nothing of the above ends the process with status 2.
 * attempt: which of the rank's workers this is (run.restarts), from 0. The first MEGATRAIN_WORKERS_FAULT (1) meet the
 * fault. */
void fault_init(int rank, int attempt);

/* From any thread. */
void fault_point(const char *name);

#endif
