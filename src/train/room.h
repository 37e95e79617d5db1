/* Memory that a rank may plan with: what is free before any rank takes some. A run is held to all of it before step 1;
 * who chooses what a run takes leaves a host's reserve. */
#ifndef MEGATRAIN_TRAIN_ROOM_H
#define MEGATRAIN_TRAIN_ROOM_H

#include "config/config.h"
#include "device/device.h"
#include "train/ranks.h"

/* A tenth of a host's memory stays free, for the system and its file cache: what is free there changes. */
enum { ROOM_HOST_RESERVE = 10 };

static inline int64_t room_less_reserve(int64_t host_bytes) { return host_bytes - host_bytes / ROOM_HOST_RESERVE; }

/* For who chooses. */
typedef struct {
    int64_t host;  /* bytes of the host's memory, without the reserve */
    int64_t gpu;   /* bytes of a GPU, those of CUDA's libraries and communicators among them; 0: there is none */
    bool has_nccl; /* communicators are NCCL's */
} Room;

/* Bytes of the host's memory for one rank, the reserve among them; ranks NULL: of a process alone. */
int64_t room_of_host(const Ranks *ranks);

/* Bytes of the GPU for one rank, and the GPU. ERR_CONFIG: there is none. */
Err room_of_gpu(const Ranks *ranks, int index, DeviceInfo *gpu, int64_t *bytes);

/* Collective, after ranks_place: the room that each rank has. */
Err room_of_ranks(const Config *c, Ranks *ranks, Room *out);

/* The same of ranks that have not begun, were they all on this host. ERR_CONFIG: there is no GPU. */
Err room_on_this_host(const Config *c, Room *out);

#endif
