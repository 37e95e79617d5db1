/*
 * The processors that a process may use, and what its OpenMP threads do while they wait for one another.
 *
 * Waiting threads take a processor from whoever has work: from a neighbour's processes, and from our own thread that a
 * neighbour's keeps from running. So they spin for 0.12 to 0.4 ms, about what lies between two ops, and then sleep.
 * libgomp's own 300,000 spins are longer than a time slice.
 */
#ifndef MEGATRAIN_BASE_PROCESSORS_H
#define MEGATRAIN_BASE_PROCESSORS_H

#include <stdbool.h>

#include "base/err.h"

/*
 * The first thing a program does: threads wait as said above, and omp_get_max_threads() is processors_share(1, 1),
 * unless OMP_WAIT_POLICY or GOMP_SPINCOUNT, and OMP_NUM_THREADS, say otherwise. libgomp reads its environment before
 * main begins, so the program is started again in this process, once. Where that is not possible (no /proc) threads
 * wait as libgomp likes.
 */
void processors_begin(char **argv);

/* ERR_CONFIG where OMP_NUM_THREADS asks for more threads than debug.threads may: OpenMP would make them all, or end the
 * process where it cannot. */
enum { PROCESSORS_THREADS_MOST = 1024 };
Err processors_check(void);

/*
 * Processors for each of the processes that share them: those of this process's affinity over `same`, the number of
 * processes that have the same ones, and those that the quota of its control groups allows over `local`, all processes
 * of the run on this machine. At least 1.
 */
int processors_share(int same, int local);

/* The quota of this process's control groups (version 1 and 2), in processors; 0: none. root: "", or a folder that
 * stands for / in tests. */
double processors_quota(const char *root);

/* The least memory limit of this process's control groups and of all above them, in bytes, and what is left of it.
 * Files in memory, which the kernel may drop, count as left. 0: none has a limit. */
double group_memory_limit(const char *root);
double group_memory_left(const char *root);

/* Seconds that all programs together, and others of this machine's host, have had of this process's processors since
 * they were started; *own: those of this process and the children that it has waited for. False: nobody says so, or a
 * quota makes it no measure of what is left. */
bool processors_used(double *all, double *own);

#endif
