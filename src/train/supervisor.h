/*
 * A run that goes on by itself (run.restarts). The process that the launcher started holds the rank's place in the job:
 * it has no threads and no device, and forks a worker, which is the rank. Where the worker is lost, or ends because
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

#include <stdint.h>

#include "boot/boot.h"

/*
 * Returns in each worker alone, with boot->attempt and boot->supervised; the supervisor ends its process with the last
 * worker's exit status. restarts: how many in a row without a new checkpoint. freeze_s: as of watch_open. To be called
 * before the process has threads. ERR_MEMORY: the first worker cannot be made.
 */
Err supervise(Boot *boot, int64_t restarts, double freeze_s);

#endif
