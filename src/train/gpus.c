/* See gpus.h. */
#include "train/gpus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a rank posts. */
typedef struct {
    char uuid[40], nccl[24]; /* nccl: version, "" without the library */
} Fact;

static Err own_fact(int local_rank, RankGpu *g, Fact *own)
{
    char why[256];
    DeviceInfo gpu;
    const int count = device_cuda_count(why, sizeof why);
    if (!count)
        return err_set(ERR_CONFIG, "%s", why),
               err_hint("set run.device=cpu, or see nvidia-smi and the driver");
    g->index = local_rank % count;
    TRY(device_cuda_info(g->index, &gpu));
    snprintf(own->uuid, sizeof own->uuid, "%s", gpu.uuid);
    snprintf(own->nccl, sizeof own->nccl, "%s", nccl_version());
    return ERR_OK;
}

static Err exchange(Store *s, int rank, int size, double timeout_s, const Fact *own, Fact *all)
{
    char key[32];
    size_t n;
    snprintf(key, sizeof key, "gpu/%d", rank);
    TRY(store_set(s, key, own, sizeof *own));
    for (int p = 0; p < size; p++) {
        snprintf(key, sizeof key, "gpu/%d", p);
        TRY(store_get(s, key, &all[p], sizeof all[p], &n, timeout_s));
    }
    return ERR_OK;
}

static Err decide(const Fact *all, int rank, int size, RankGpu *g)
{
    const char *why;
    g->nccl = true;
    g->sharers = 0;
    snprintf(g->text, sizeof g->text, "NCCL %s", all[0].nccl);
    for (int p = 0; p < size; p++) {
        g->sharers += !strcmp(all[p].uuid, all[rank].uuid);
        for (int q = 0; q < p && g->nccl; q++) {
            if (strcmp(all[p].uuid, all[q].uuid)) continue;
            g->nccl = false;
            snprintf(g->text, sizeof g->text, "staged through the host: ranks %d and %d share a GPU", q, p);
        }
    }
    for (int p = 0; p < size && g->nccl; p++) {
        if (!*all[p].nccl) {
            g->nccl = false;
            nccl_available(&why);
            snprintf(g->text, sizeof g->text, "staged through the host: rank %d is without NCCL%s%.90s", p,
                     p == rank ? ": " : "", p == rank ? why : "");
        } else if (strcmp(all[p].nccl, all[0].nccl)) {
            return err_set(ERR_CONFIG, "rank 0 has NCCL %s and rank %d has %s", all[0].nccl, p, all[p].nccl),
                   err_hint("install one version on all hosts");
        }
    }
    return ERR_OK;
}

Err rank_gpu_choose(Store *s, int rank, int size, int local_rank, double timeout_s, RankGpu *out)
{
    Fact own = { 0 }, *all = calloc((size_t)size, sizeof *all);
    if (!all) return err_set(ERR_MEMORY, "no memory for what %d ranks say about their GPUs", size);
    Err err = own_fact(local_rank, out, &own);
    if (!err) err = exchange(s, rank, size, timeout_s, &own, all);
    if (!err) err = decide(all, rank, size, out);
    free(all);
    return err;
}
