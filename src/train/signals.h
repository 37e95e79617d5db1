/*
 * Signals of a training run. SIGTERM, SIGUSR1, SIGHUP (unless it is ignored, as under nohup) and the first SIGINT ask
 * for a checkpoint behind the step at work, a second SIGINT leaves at once.
 */
#ifndef MEGATRAIN_TRAIN_SIGNALS_H
#define MEGATRAIN_TRAIN_SIGNALS_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

extern volatile sig_atomic_t signals_stop; /* the last signal that asked this run to stop, or 0 */

/* Catches them from now on; the lead says at once what a signal does. *heard, unless that is NULL, counts them. */
void signals_catch(bool lead, volatile uint64_t *heard);

/* A launcher that is killed cannot end its ranks: they take its death for SIGTERM (scripts/launch.sh names itself). */
void signals_follow_launcher(void);

void signals_step(int64_t step); /* the step at work, for what is said */

#endif
