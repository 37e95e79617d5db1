/*
 * Ranks with GPUs as processes: communicators whose tensors lie in device memory (docs/comm.md).
 *
 *   nccl     each rank has a GPU of its own, or so it is wanted: NCCL moves and sums the data
 *   staged   ranks share GPUs, or so it is wanted: through pinned host memory and Gloo
 *
 * Work is ordered after what the caller's stream holds, runs on a stream of the communicator's own, and the events
 * carry a point of that stream: later work on the caller's waits there, not on the host.
 *
 * NCCL's float sums are plain: the order of addition is NCCL's, the same for every run with the same ranks,
 * topology and NCCL_* variables, but not that of the tree. Not so with NVLS, where the switches between GPUs add: it is
 * kept out (NcclOptions). Integer sums are exact. Staged sums are the tree.
 *
 * Comparing calls (comm_check_calls) over NCCL makes the host wait for the peers to issue theirs, before the device has
 * anything: between an exchange of one rank and those of its peers that hold the other ends no host may wait for data
 * of one of them.
 *
 * Failures are those of comm/gloo.h. A monitor thread looks at NCCL's errors and at how long the oldest call has been
 * running; the first failure aborts all groups, which ends what hangs in their streams, and is what the next wait for
 * the device reports (Device.failure).
 */
#ifndef MEGATRAIN_COMM_GPU_H
#define MEGATRAIN_COMM_GPU_H

#include "comm/gloo.h"
#include "comm/groups.h"

typedef struct NcclWorld NcclWorld;

typedef struct {
    int rank, size;
    int gpu;          /* its index; no two ranks of a host may have the same GPU, unless nccl_shares_gpus() */
    bool own_host;    /* NCCL is to see this rank as a host of its own, and so lets it share a GPU */
    double timeout_s; /* limits connecting, and each call from when its inputs are there */
    int delay_ms;     /* every completion is held back that long */
    bool any_order;   /* a repeat need not have the same float sums: NVLS is NCCL's to use */
    GlooStore store;  /* as in gloo.h, with the key "nccl" */
} NcclOptions;

/* Is the library here, in NCCL_HOME, where the loader looks, in conda, among Python's packages or in the HPC SDK?
 * If not, `why`: "this build has no CUDA backend", or what is wrong with the library. */
bool nccl_available(const char **why);
/* "2.28.9": the version of the library that was loaded, and its file; "" without one. */
const char *nccl_version(void);
const char *nccl_path(void);
/* Is NCCL one that takes ranks of one host with one GPU where it is asked to, and is it? (2.30.3, experimental) */
bool nccl_shares_gpus(void);
/* The variable of the environment that asks NCCL for NVLS, for more than gathers; NULL: none does. */
const char *nccl_asks_for_nvls(void);
/* Does it ask for NVLS for gathers alone, which add nothing, and can NCCL tell them apart? (2.24) */
bool nccl_gathers_by_nvls(void);

/*
 * How much of a GPU's memory the connections of one group may take, by NCCL's default sizes (2.28). A connection takes
 * 9.2 MiB a channel (4 MiB of buffer, 4.7 and 0.5 for its two protocols of short messages), and a group has two
 * connections (a ring, and a tree or a switch) of 16 channels. Plans count with this number, which was not measured; a
 * run connects its groups before it looks at what is left.
 */
enum { NCCL_GROUP_BYTES = 300 << 20 };
/*
 * What a pair of ranks on one host takes besides that send each other messages, on each of them: up to 32 channels of
 * 12 MiB. 8 H100 were seen to take 3.28 GB each for the 7 others (NVIDIA/nccl#1685, 2025). NCCL_MAX_P2P_NCHANNELS
 * makes it less. Between hosts buffers are shared by all pairs of a group.
 */
enum { NCCL_PAIR_BYTES = 448 << 20 };

/* How many thread blocks, and so multiprocessors, a group's collectives take; 0: NCCL decides. */
typedef struct {
    int min, max;
} NcclCtas;

/* The use of a group. */
typedef struct {
    NcclCtas ctas;
    GroupMessages messages;
    int64_t pieces; /* pieces of an all-to-all of rows: members times chunks; 0: the group moves no rows */
} NcclUse;

/*
 * Collective. Sets variables of the environment that NCCL reads. ERR_CONFIG: NCCL_COMM_ID is set (the store brings
 * the ranks together), one asks for NVLS (unless o->any_order), or NCCL is not to be had. ERR_RENDEZVOUS: not
 * connected within timeout_s. The store's own errors as they are.
 */
Err nccl_world_open(const NcclOptions *o, NcclWorld **out);
/* All groups must be closed before. May be NULL. */
void nccl_world_close(NcclWorld *world);
/* From any thread, as gloo_world_abort; returns when nothing of ours runs on the device any more, in some seconds. */
void nccl_world_abort(NcclWorld *world, const char *why);

/*
 * A group of world ranks, ascending. *All* ranks of the world must call together, each for its own group: the groups of
 * one call have one size and no rank in common. A rank that is in none of them has size 0, and then a group of one.
 * Opens a group of `gloo` too, for comparing calls. Where all sizes are 1: self, and nobody need call.
 * Calls of each kind are made once, so that NCCL takes the memory of its connections now, not in the first step.
 */
Err comm_open_nccl(NcclWorld *world, GlooWorld *gloo, Comm *c, const char *name, const int *members, int size,
                   NcclUse use);

/* gpu: the index of this rank's GPU. Opens a group of `gloo`, whose rules hold. Takes 8 MiB of pinned memory, and in
 * addition as much as the largest exchange so far has moved. */
Err comm_open_staged(int gpu, GlooWorld *gloo, Comm *c, const char *name, const int *members, int size);

#endif
