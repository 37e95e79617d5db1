/* See gpus.h. */
#include "train/gpus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a rank posts. */
typedef struct {
    char uuid[40], nccl[24]; /* nccl: version, "" without the library */
    char why[160];           /* it is without */
} Fact;

static Err own_fact(int local_rank, RankGpu *g, Fact *own)
{
    char why[256];
    const char *missing;
    DeviceInfo gpu;
    const int count = device_cuda_count(why, sizeof why);
    if (!count) return err_set(ERR_CONFIG, "%s", why), err_hint("set run.device=cpu, or see nvidia-smi and the driver");
    g->index = local_rank % count;
    TRY(device_cuda_info(g->index, &gpu));
    snprintf(own->uuid, sizeof own->uuid, "%s", gpu.uuid);
    if (nccl_available(&missing)) snprintf(own->nccl, sizeof own->nccl, "%s", nccl_version());
    else snprintf(own->why, sizeof own->why, "%.150s", missing);
    return ERR_OK;
}

static Err exchange(Store *s, const GpuChoice *c, const Fact *own, Fact *all)
{
    char key[32];
    size_t n;
    snprintf(key, sizeof key, "gpu/%d", c->rank);
    TRY(store_set(s, key, own, sizeof *own));
    for (int p = 0; p < c->size; p++) {
        snprintf(key, sizeof key, "gpu/%d", p);
        TRY(store_get(s, key, &all[p], sizeof all[p], &n, c->timeout_s));
    }
    return ERR_OK;
}

/* Counts who has this rank's GPU; of two ranks that share one says so. */
static void find_sharers(const Fact *all, const GpuChoice *c, RankGpu *g)
{
    g->sharers = 0;
    for (int p = 0; p < c->size; p++) {
        g->sharers += !strcmp(all[p].uuid, all[c->rank].uuid);
        for (int q = 0; q < p && g->nccl; q++) {
            if (strcmp(all[p].uuid, all[q].uuid)) continue;
            g->nccl = false;
            snprintf(g->text, sizeof g->text, "staged through the host: ranks %d and %d share a GPU", q, p);
        }
    }
}

/* One version of NCCL on all. */
static Err check_nccl(const Fact *all, const GpuChoice *c)
{
    for (int p = 0; p < c->size; p++) {
        if (!*all[p].nccl)
            return err_set(ERR_CONFIG, "rank %d has a GPU of its own, but no NCCL: %s", p, all[p].why),
                   err_hint("install NCCL (libnccl2, or pip's nvidia-nccl), or name its folder in NCCL_HOME; or "
                            "parallel.staged=true, through the host and many times slower");
        if (strcmp(all[p].nccl, all[0].nccl))
            return err_set(ERR_CONFIG, "rank 0 has NCCL %s and rank %d has %s", all[0].nccl, p, all[p].nccl),
                   err_hint("install one version on all hosts");
    }
    return ERR_OK;
}

static Err decide(const Fact *all, const GpuChoice *c, RankGpu *g)
{
    g->nccl = !c->staged;
    snprintf(g->text, sizeof g->text, "staged through the host: parallel.staged=true");
    find_sharers(all, c, g);
    if (!g->nccl) return ERR_OK;
    TRY(check_nccl(all, c));
    snprintf(g->text, sizeof g->text, "NCCL %s", all[0].nccl);
    return ERR_OK;
}

Err rank_gpu_choose(Store *s, const GpuChoice *c, RankGpu *out)
{
    Fact own = { 0 }, *all = calloc((size_t)c->size, sizeof *all);
    if (!all) return err_set(ERR_MEMORY, "no memory for what %d ranks say about their GPUs", c->size);
    Err err = own_fact(c->local_rank, out, &own);
    if (!err) err = exchange(s, c, &own, all);
    if (!err) err = decide(all, c, out);
    free(all);
    return err;
}
