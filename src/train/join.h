/*
 * The ranks of a configuration: what has to be right before they meet, and what they compare when they have met.
 */
#ifndef MEGATRAIN_TRAIN_JOIN_H
#define MEGATRAIN_TRAIN_JOIN_H

#include "config/config.h"
#include "train/ranks.h"

/* parallel.staged. */
Carrier join_carrier(const Config *c);

/* Before join_ranks, of ranks that agree on their layout first: as ranks_meet, and they have the same configuration.
 * place: ranks_place, too. */
Err join_meet(Ranks *r, const Config *cfg, const Boot *boot, const char *folder, const volatile sig_atomic_t *stop,
              bool place);

/*
 * Opens the ranks that `boot` is one of; *r is zero, or join_meet's. stop: as in RanksOptions. *text: the resolved
 * configuration as text, which config.ini and every checkpoint hold; the caller frees it, also after an error.
 * ERR_CONFIG as in grid_spec, before anybody waits for anybody; errors as in ranks_open.
 */
Err join_ranks(Ranks *r, const Config *cfg, const Boot *boot, const char *folder, const volatile sig_atomic_t *stop,
               char **text);

/*
 * A mistake in the configuration, which every rank finds in the same words and file: rank 0's error line says it. With
 * scripts/launch.sh a rank knows that it was given other words, and says its own; with the same words it leaves the
 * error with launch.sh, for rank 0 may yet find another file under the name. Else it warns. Returns `err`.
 */
Err join_said_once(const Boot *boot, Err err);

#endif
