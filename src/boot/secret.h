/*
 * The secret of a run, which its ranks know and nobody else, and by which they know each other (boot/greet.h). The
 * launcher gives it in MEGATRAIN_SECRET. Where no launcher does, rank 0 leaves it for the others in a file that only
 * this user may read, in a folder that all of them see, until they have met.
 */
#ifndef MEGATRAIN_BOOT_SECRET_H
#define MEGATRAIN_BOOT_SECRET_H

#include "boot/boot.h"

/*
 * Fills b->secret. A worker that was started anew has that of the one before it. Rank 0 makes the file (and the folder)
 * or takes the one that an earlier start left; the others wait for it, at most timeout_s. ERR_STORAGE: it cannot be
 * made, is not this user's, or others may read it. ERR_RENDEZVOUS: it has not appeared, or b->stop was set.
 */
Err secret_find(Boot *b, const char *folder, double timeout_s);

/* All ranks have met, or will not: rank 0 takes that file away. */
void secret_forget(const Boot *b, const char *folder);

#endif
