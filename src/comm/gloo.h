/*
 * Ranks as processes: communicators over Gloo's TCP transport (docs/comm.md).
 *
 * A GlooWorld is this process's connections to all ranks, one socket a pair, both of whose ends have shown that they
 * have the run's secret before Gloo sees it (comm/mesh.h). Groups share them: messages carry
 * the group's number, so opening a group needs no communication. Gloo moves the bytes; the collectives are our
 * own, so that sums are the same trees in the same order as everywhere else (comm/reduce.h).
 *
 * The first failure of any request ends the whole world: all connections of this process are closed, all its
 * pending and later requests fail, and so do those of ranks that wait for this one. (A rank that has nothing to
 * do with the lost one notices nothing; whoever watches the ranks calls gloo_world_abort.) A request fails with
 *
 *   ERR_PEER      a connection broke (the peer died, or stopped on an error of its own), or gloo_world_abort
 *   ERR_HANG      a peer did not take part within timeout_s
 *   ERR_INTERNAL  ranks issued different calls (comm_check_calls; without it they do not meet: ERR_HANG)
 *
 * Side effects on the process, which Gloo needs: SIGPIPE is ignored, and the calling thread, with all it
 * starts later, is scheduled as SCHED_BATCH.
 */
#ifndef MEGATRAIN_COMM_GLOO_H
#define MEGATRAIN_COMM_GLOO_H

#include "comm/comm.h"

typedef struct GlooWorld GlooWorld;

/* Store through which ranks find each other's addresses: set publishes a key, get waits for one. Called only by
 * gloo_world_open, on its thread; keys begin with "gloo/" and each is set once. */
typedef struct {
    void *user;
    Err (*set)(void *user, const char *key, const void *bytes, int64_t n);
    /* *n: bytes of the value, at most cap. Fails when the key does not appear within timeout_s. */
    Err (*get)(void *user, const char *key, void *bytes, int64_t cap, int64_t *n, double timeout_s);
} GlooStore;

typedef struct {
    int rank, size;
    const char *address; /* numeric: where other ranks reach this host; one family for all ranks */
    const char *secret;  /* the run's secret, which all its ranks know (boot/secret.h) */
    const char *start;   /* the start's name, which no other start has (store_start) */
    double timeout_s;    /* limits connecting, and each later wait for a peer */
    GlooStore store;
    int delay_ms;        /* every completion is held back that long (a test that nothing depends on timing) */
    int port, port_step; /* as MeshPlace */
} GlooOptions;

/*
 * Connects this rank with all others. ERR_CONFIG: the address is not numeric or not of this host.
 * ERR_RENDEZVOUS: a rank did not come. The store's own errors as they are.
 */
Err gloo_world_open(GlooOptions options, GlooWorld **out);

/*
 * All groups must be closed before. Does not wait for peers. May be NULL. Data that this rank sent in requests
 * that completed still arrives.
 */
void gloo_world_close(GlooWorld *world);

/* From any thread: pending and later requests of all groups end soon with ERR_PEER and this text. The first
 * call (or failure) wins. */
void gloo_world_abort(GlooWorld *world, const char *why);

/*
 * A group of world ranks, ascending; all members call with the same name, and all ranks open their groups in
 * the same order.
 * Nothing is sent. Memory: GLOO_SCRATCH_BYTES for blocks that wait to be summed, none of it for a group of
 * one or of none (which is comm_open_self). At most 65536 groups may ever contain the same two ranks: ERR_CONFIG.
 */
enum { GLOO_SCRATCH_BYTES = 2 << 20 };
Err comm_open_gloo(GlooWorld *world, Comm *c, const char *name, const int *members, int size);

const char *gloo_version(void); /* "0.5.0": the version of the headers that the build used */

#endif
