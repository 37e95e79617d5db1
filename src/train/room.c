/* See room.h. */
#include "train/room.h"

#include "base/arena.h"
#include "train/join.h"

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
    *out = (Room){ .host = room_less_reserve(room_of_host(ranks)), .has_nccl = ranks->gpu.nccl };
    if (c->run.device == RUN_DEVICE_CUDA) TRY(room_of_gpu(ranks, ranks->gpu.index, &gpu, &out->gpu));
    TRY(ranks_least(ranks, "room/host", &out->host));
    return ranks_least(ranks, "room/gpu", &out->gpu);
}

/* Ranks take the GPUs in turn, so the first one has most of them. */
Err room_on_this_host(const Config *c, Room *out)
{
    char why[256];
    DeviceInfo gpu;
    const int64_t ranks = c->derived.world_size;
    *out = (Room){ .host = room_less_reserve(room_of_host(NULL) / ranks), .gpu = INT64_MAX };
    if (c->run.device != RUN_DEVICE_CUDA) return out->gpu = 0, ERR_OK;
    const int gpus = device_cuda_count(why, sizeof why);
    if (!gpus) return err_set(ERR_CONFIG, "%s", why);
    for (int i = 0; i < gpus && i < ranks; i++) {
        const int64_t sharers = ranks / gpus + (i < ranks % gpus);
        TRY(device_cuda_info(i, &gpu));
        if (gpu.free_bytes / sharers < out->gpu) out->gpu = gpu.free_bytes / sharers;
    }
    out->has_nccl = ranks > 1 && rank_gpu_takes_nccl(join_carrier(c), ranks > gpus);
    return ERR_OK;
}
