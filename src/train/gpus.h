/*
 * Which GPU each rank has, and what carries data between them: decided by all ranks from the same facts, which they
 * post in the store.
 *
 *   nccl     every rank has a GPU of its own and NCCL is here
 *   staged   ranks share a GPU, or a rank has no NCCL: through the host and Gloo (a warning says so)
 */
#ifndef MEGATRAIN_TRAIN_GPUS_H
#define MEGATRAIN_TRAIN_GPUS_H

#include "comm/gpu.h"
#include "boot/store.h"

typedef struct {
    bool nccl;      /* false: staged */
    int index;      /* which of its host's GPUs this rank has */
    int sharers;    /* how many ranks have this GPU, this one included */
    char text[160]; /* "NCCL 2.28.9", "staged through the host: ranks 0 and 1 share a GPU" */
} RankGpu;

/*
 * Collective. local_rank: this rank among those of this host, which take its GPUs in turn. ERR_CONFIG: there is no GPU,
 * or ranks have different versions of NCCL.
 */
Err rank_gpu_choose(Store *s, int rank, int size, int local_rank, double timeout_s, RankGpu *out);

#endif
