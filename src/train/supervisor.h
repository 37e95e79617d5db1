/*
 * A run that goes on by itself (run.restarts). The process that the launcher started holds the rank's place in the job:
 * it has no threads and no device, and starts a worker, which is the rank. Where the worker is lost, or ends because
 * another rank was, the supervisor starts the next one, and the workers meet anew.
 *
 *   launcher ─ supervisor of rank 0 ─ worker ... worker        Supervisors do not talk to each other. Workers do:
 *            ─ supervisor of rank 1 ─ worker ... worker        one verdict ends them all (boot/watch.h), and the
 *                                                              greeting says whose start is over (boot/host.c).
 *
 * What workers share with it: boot/supervised.h. Docs: docs/ranks.md, "A run that goes on by itself".
 */
#ifndef MEGATRAIN_TRAIN_SUPERVISOR_H
#define MEGATRAIN_TRAIN_SUPERVISOR_H

#include "boot/boot.h"
#include "config/config.h"

/*
 * Makes this process a supervisor, which ends with the last worker's exit status. Of cfg it reads run.restarts, run.dir
 * and three limits of time; config is the text of the configuration's file, for all workers. To be called before the
 * process has threads. It returns after an error alone: ERR_MEMORY.
 */
Err supervise(const Boot *boot, const Config *cfg, const char *config);

#endif
