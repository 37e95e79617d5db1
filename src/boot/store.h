/*
 * The ranks' meeting point and key/value store. Rank 0 hosts it on a thread of its own; every rank, 0 too, is a
 * client over TCP. For addresses, ids and fingerprints: small values, not data.
 *
 * Every call ends by its deadline. Failures are ERR_RENDEZVOUS (exit status 10) before all ranks have met and
 * ERR_PEER (7) after. The calls of one Store take turns: a store_get that waits holds up other threads' calls.
 * A process that forks must close the child's copy (exec does): an open copy hides the death of the parent.
 */
#ifndef MEGATRAIN_BOOT_STORE_H
#define MEGATRAIN_BOOT_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "boot/boot.h"

enum { STORE_HOST_BYTES = 64, STORE_VALUE_BYTES = 1 << 20 };

typedef struct Store Store;

/*
 * Meets the other ranks, which know each other by boot->secret: returns when all are there. Rank 0 listens on the
 * first free port of boot->port and the BOOT_PORTS - 1 following ones (on the loopback address alone if that is how
 * all ranks reach it); the others look for it there. ERR_RENDEZVOUS:
 *   ranks missing after timeout_s ("waited 30 s for ranks 1, 3 of 4"), on all that wait;
 *   two processes with one rank (both, and all that wait, name host and pid of both);
 *   boot->stop was set while ranks were missing;
 *   no free port; an address that cannot be resolved or reached.
 * What rank 0 told the others it says itself: there the error is rank 0's (err_elsewhere).
 */
Err store_open(const Boot *boot, double timeout_s, Store **out);
/* Says goodbye in order. Rank 0 serves on until the others have closed, at most timeout_s: ERR_PEER if one did not, or
 * ended otherwise. The Store is gone in any case. NULL is allowed. */
Err store_close(Store *s, double timeout_s);

Err store_set(Store *s, const char *key, const void *value, size_t size);
/* Waits for the key. *size: the size of the value; more than `capacity` is ERR_RENDEZVOUS. */
Err store_get(Store *s, const char *key, void *value, size_t capacity, size_t *size, double timeout_s);
/* Adds to a 64-bit counter that starts at 0. *sum (may be NULL): what it is then. */
Err store_add(Store *s, const char *key, int64_t delta, int64_t *sum);

/* Something that all ranks must have alike. */
typedef struct {
    const char *facts;      /* lines "what: value" */
    Err err;                /* the difference, as an error */
    const char *what, *way; /* how its message begins; what to do about it */
} Agreement;

/* Collective. The ranks compare digests of their facts, and two texts only where these differ. a->err on every rank if
 * one differs from rank 0's (whose error it is: err_elsewhere), naming the first such rank and line. */
Err store_agree(Store *s, const Agreement *a, double timeout_s);

/* The numeric address by which this process reaches rank 0, and so by which the others can reach this process. */
Err store_local_addr(const Store *s, char *out, size_t size);

int store_port(const Store *s); /* the port where the ranks met */

/* A text that the ranks of this start have in common, and no other start: the job and rank 0's process. */
const char *store_start(const Store *s);

#endif
