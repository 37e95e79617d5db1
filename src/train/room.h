/* Memory that a rank may plan with: what is free before any rank takes some. A run is held to it before step 1. */
#ifndef MEGATRAIN_TRAIN_ROOM_H
#define MEGATRAIN_TRAIN_ROOM_H

#include "config/config.h"
#include "device/device.h"
#include "train/ranks.h"

typedef struct {
    int64_t host;  /* bytes of the host's memory */
    int64_t gpu;   /* bytes of a GPU, those of CUDA's libraries and communicators among them; 0: there is none */
    bool has_nccl; /* communicators are NCCL's */
} Room;

/* Bytes of the host's memory for one rank; ranks NULL: of a process alone. */
int64_t room_of_host(const Ranks *ranks);

/* Bytes of the GPU for one rank, and the GPU. ERR_CONFIG: there is none. */
Err room_of_gpu(const Ranks *ranks, int index, DeviceInfo *gpu, int64_t *bytes);

/* Collective, after ranks_place: the room that each rank has. */
Err room_of_ranks(const Config *c, Ranks *ranks, Room *out);

#endif
