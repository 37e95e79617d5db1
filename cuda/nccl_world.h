/*
 * Inside the files that make communicators over NCCL (comm/gpu.h, docs/comm.md):
 *
 *   nccl.c           calls, groups, the world         nccl_monitor.c   failures, waiting for NCCL, the monitor thread
 *   nccl_rows.c      rows from all to all                  nccl_library.c   the library, looked up at run time
 *
 * A communicator is aborted by one thread while no other is inside NCCL with it: Group.calling.
 */
#ifndef MEGATRAIN_CUDA_NCCL_WORLD_H
#define MEGATRAIN_CUDA_NCCL_WORLD_H

#include <stdatomic.h>

#include "comm/gpu.h"
#include "device_cuda.h"
#include "nccl_api.h"

enum { GROUPS_MAX = WORLD_COMMS, FLIGHTS = 256, NAP_US = 200, WHY_BYTES = 256 };

/* ---- the library (nccl_library.c) ---- */

/* The functions that are called, by their names without "nccl". */
#define NCCL_FUNCTIONS(F)                                                                                           \
    F(AllGather) F(AllReduce) F(ReduceScatter) F(Send) F(Recv) F(GroupStart) F(GroupEnd) F(CommAbort)               \
    F(CommDestroy) F(CommFinalize) F(CommGetAsyncError) F(CommInitRankConfig) F(CommSplit) F(GetErrorString)        \
    F(GetLastError) F(GetUniqueId) F(GetVersion)

typedef struct {
#define MEMBER(name) __typeof__(&nccl##name) name;
    NCCL_FUNCTIONS(MEMBER)
#undef MEMBER
} NcclLibrary;

extern NcclLibrary nccl; /* to be called once nccl_available() has said yes */

/* Asking so often takes some 2 ms: calls, and the reading of some numbers, take tens of microseconds. */
enum { NCCL_SPINS = 4000 };

/* Result of a call inside a group. "In progress" is no error there: the call begins with GroupEnd. */
static inline ncclResult_t nccl_queued(ncclResult_t rc) { return rc == ncclInProgress ? ncclSuccess : rc; }

/* Sets the variables that NCCL reads with its first call, or refuses those that are set: ERR_CONFIG. Rank 0 warns
 * of what the library cannot do. */
Err nccl_set_variables(const NcclOptions *o);
/* Non-blocking, else as NCCL likes. `name` must stay; libraries before 2.27 have no names. */
ncclConfig_t nccl_config(const char *name);

/* ---- the world ---- */

/* A call that the device has not finished. */
typedef struct {
    cudaEvent_t ready, done;
    CommKind kind;
    int64_t count;
    uint64_t sequence;
    CommMessage message; /* of an exchange: the first that is received, else sent; bytes 0: all are empty */
} Flight;

typedef struct {
    NcclWorld *world;
    char name[24]; /* "tp0": NCCL's logs and ours */
    Comm host;     /* for comparing calls: */
    CommCall *calls; /* the members' */
    uint64_t *numbers; /* of messages so far: sent to each member, received from it; for comparing */
    int *members;      /* world ranks */
    int size;
    cudaStream_t stream;
    int64_t *cell; /* what a barrier sums */
    /* In a group that moves rows: where their offsets are read to, in pinned memory, and how many have room there. */
    cudaStream_t reading;
    cudaEvent_t read;
    int64_t *offsets, offset_count;
    CommObserver observer;
    pthread_mutex_t calling; /* held inside NCCL */
    _Atomic(ncclComm_t) comm; /* under calling, but for an abort that does not get it; NULL once aborted */
    pthread_mutex_t lock;    /* of what follows */
    Flight flights[FLIGHTS];
    int64_t issued, finished; /* flights so far */
    double since;             /* when the oldest flight was first seen with its inputs there; 0: not yet */
} Group;

struct NcclWorld {
    NcclOptions o;
    ncclComm_t base; /* all ranks; groups are split from it */
    pthread_t monitor;
    bool monitored;
    pthread_mutex_t lock; /* of what follows */
    Group *groups[GROUPS_MAX];
    Err kind;
    char why[WHY_BYTES];
    atomic_bool stopped, closing;
};

/* ---- messages, and rows from all to all (nccl_rows.c) ---- */

/* A message inside a group of calls; an empty one moves nothing, on both ends. */
ncclResult_t nccl_message(Group *g, bool send, int peer, void *data, int64_t bytes);

/* The host waits for the offsets of a call. From now on those of *r are the copies that it can read. Errors: those of
 * the world, or of the device; ERR_INTERNAL stops the world: the offsets do not fit. */
Err nccl_read_rows(Group *g, CommRequest *r);
/* The messages, once the offsets are read. */
ncclResult_t nccl_enqueue_rows(Group *g, const CommRequest *r);

/* ---- failures and waiting (nccl_monitor.c) ---- */

/* The error that stopped the world. */
Err nccl_stopped(NcclWorld *w);
/* Stops the world for this reason, unless it is stopped; returns what stopped it. Not from inside NCCL. */
Err nccl_stop(NcclWorld *w, Err kind, const char *why);
Err nccl_kind(ncclResult_t rc);
/* NCCL's words for a result, and for the last failure of `comm` (or NULL). */
const char *nccl_text(ncclResult_t rc, ncclComm_t comm, char text[WHY_BYTES]);

/* Polls until what was begun on `comm` is through, the world is stopped, or clock_s() is `until`: then ncclInProgress.
 * `rc` is what the call returned. */
ncclResult_t nccl_settle(NcclWorld *w, ncclComm_t comm, ncclResult_t rc, double until);

/* Counts what is finished, and tells the watch. Under g->lock. */
cudaError_t nccl_reap(Group *g);
/* The monitor's thread; `world` is a NcclWorld. */
void *nccl_monitor(void *world);

#endif
