/*
 * The GPU of each rank, and what carries data between them: decided by all ranks from the same facts, which they
 * post in the store.
 *
 *   nccl     every rank has a GPU of its own, or so it is wanted: they need NCCL
 *   staged   all ranks share one GPU, or so it is wanted: through the host and Gloo (a warning says so)
 *
 * Some ranks that share a GPU and others that do not are an error, unless one of the two is wanted.
 */
#ifndef MEGATRAIN_TRAIN_GPUS_H
#define MEGATRAIN_TRAIN_GPUS_H

#include "base/placement.h"
#include "comm/gpu.h"
#include "boot/store.h"

typedef struct {
    bool nccl;          /* false: staged */
    bool own_host;      /* NcclOptions */
    int index;          /* number of this rank's GPU on its host */
    int sharers;        /* how many ranks have this GPU, this one included */
    int neighbours;     /* how many ranks of this host have a GPU near the same processors, this one included */
    PlacementNear near; /* what is near this GPU; of one rank alone nobody has looked */
    char text[160];     /* "NCCL 2.28.9", "staged through the host: all 2 ranks share one GPU" */
} RankGpu;

typedef enum { CARRIER_ANY, CARRIER_STAGED, CARRIER_NCCL } Carrier;

typedef struct {
    int rank, size;
    int local_rank, local_size; /* among those of this host, which take the GPUs there in turn */
    Carrier wanted;             /* of all ranks */
    bool near;                  /* processors near the GPUs are looked for */
    double timeout_s;
} GpuChoice;

/* Does NCCL carry data? shared: some ranks share a GPU. */
bool rank_gpu_takes_nccl(Carrier wanted, bool shared);

/*
 * Collective. ERR_CONFIG: there is no GPU, or too few; or NCCL is to carry data and a rank is without it, or they have
 * different versions of it, or NCCL refuses ranks that share a GPU.
 */
Err rank_gpu_choose(Store *s, const GpuChoice *c, RankGpu *out);

#endif
