/* See room.h. */
#include "train/room.h"

#include "base/arena.h"

int64_t room_of_host(const Ranks *ranks)
{
    if (!ranks) return (int64_t)host_free_bytes();
    return (int64_t)(ranks->host_free_bytes / ranks->local_size);
}

Err room_of_gpu(const Ranks *ranks, int index, DeviceInfo *gpu, int64_t *bytes)
{
    TRY(device_cuda_info(index, gpu));
    *bytes = gpu->free_bytes / (ranks ? ranks->gpu.sharers : 1);
    return ERR_OK;
}

Err room_of_ranks(const Config *c, Ranks *ranks, Room *out)
{
    DeviceInfo gpu;
    *out = (Room){ .host = room_of_host(ranks), .has_nccl = ranks->gpu.nccl };
    if (c->run.device == RUN_DEVICE_CUDA) TRY(room_of_gpu(ranks, ranks->gpu.index, &gpu, &out->gpu));
    TRY(ranks_least(ranks, "room/host", &out->host));
    return ranks_least(ranks, "room/gpu", &out->gpu);
}
