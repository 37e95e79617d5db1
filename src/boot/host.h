/*
 * Rank 0's server thread (inside boot/ only): the meeting point, the key/value store, and what the ranks' watch
 * connections say. Used through store.h and watch.h.
 */
#ifndef MEGATRAIN_BOOT_HOST_H
#define MEGATRAIN_BOOT_HOST_H

#include "boot/boot.h"
#include "boot/greet.h"

enum {
    STORE_KEY_MAX = 255,
    STORE_VALUE_MAX = 1 << 20,
    STORE_FRAME_MAX = STORE_VALUE_MAX + STORE_KEY_MAX + 1
};

typedef struct Host Host;

/* Serves on `listener` (taken over). `self` is rank 0's own greeting. */
Err host_open(const Boot *boot, const Hello *self, int listener, Host **out);
/* Serves until the other ranks have closed their connections, at most timeout_s; then ends. False: they did not all
 * end in order; `why` tells. */
bool host_close(Host *h, double timeout_s, char *why, size_t size);

#endif
