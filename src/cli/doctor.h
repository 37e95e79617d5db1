/* doctor's second part: the ranks that a launcher has started, in one table. */
#ifndef MEGATRAIN_CLI_DOCTOR_H
#define MEGATRAIN_CLI_DOCTOR_H

#include "boot/boot.h"

/*
 * Collective. The ranks meet as a run's do, connect each with each, and look at a folder that is to be a run's; rank 0
 * prints a line a rank, and what stands in a run's way. data_port: parallel.data_port, or 0. ERR_CONFIG (rank 0): a
 * rank is another program; ERR_RENDEZVOUS: they do not meet or connect; ERR_STORAGE: one does not see the folder.
 */
Err doctor_cluster(const Boot *boot, const char *folder, int data_port);

#endif
