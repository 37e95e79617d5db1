/*
 * Rank 0's server thread (inside boot/ only). It is the meeting point and the key/value store, and it hears what the
 * ranks' watch connections say. Others use it through store.h and watch.h.
 */
#ifndef MEGATRAIN_BOOT_HOST_H
#define MEGATRAIN_BOOT_HOST_H

#include "boot/boot.h"
#include "boot/greet.h"

enum { STORE_KEY_MAX = 255, STORE_VALUE_MAX = 1 << 20, STORE_FRAME_MAX = STORE_VALUE_MAX + STORE_KEY_MAX + 1 };

typedef struct Host Host;

/* Serves on `listener`, which it owns from then on. `self` is rank 0's own greeting. */
Err host_open(const Boot *boot, const Hello *self, int listener, Host **out);
/* Serves until the other ranks have closed their connections, at most timeout_s, and then ends. False: they did not all
 * end in order, and `why` tells more. */
bool host_close(Host *h, double timeout_s, char *why, size_t size);

#endif
