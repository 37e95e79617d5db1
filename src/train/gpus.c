/* See gpus.h. */
#include "train/gpus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/placement.h"

/* Facts that a rank posts. */
typedef struct {
    char uuid[40], nccl[24];         /* nccl: version, "" without the library */
    char why[160];                   /* it is without */
    char host[256];                  /* NCCL_HOSTID: a host's name, as NCCL is to see it */
    char name[64];                   /* of the host itself */
    int ranks, gpus;                 /* there; GPUs as this rank sees them */
    bool shares;                     /* NCCL takes ranks of one host with one GPU */
    char near[PLACEMENT_LIST_BYTES]; /* the processors near its GPU */
} Fact;

static Err own_fact(const GpuChoice *c, RankGpu *g, Fact *own)
{
    char why[256];
    const char *missing, *host = getenv("NCCL_HOSTID");
    DeviceInfo gpu;
    const int count = device_cuda_count(why, sizeof why);
    if (!count) return err_set(ERR_CONFIG, "%s", why), err_hint("set run.device=cpu, or see nvidia-smi and the driver");
    g->index = c->local_rank % count;
    own->ranks = c->local_size;
    own->gpus = count;
    gethostname(own->name, sizeof own->name - 1);
    TRY(device_cuda_info(g->index, &gpu));
    snprintf(own->uuid, sizeof own->uuid, "%s", gpu.uuid);
    if (nccl_available(&missing)) snprintf(own->nccl, sizeof own->nccl, "%s", nccl_version());
    else snprintf(own->why, sizeof own->why, "%.150s", missing);
    if (host && strlen(host) >= sizeof own->host)
        return err_set(ERR_CONFIG, "NCCL_HOSTID has %zu bytes, at most %zu are compared", strlen(host),
                       sizeof own->host - 1);
    snprintf(own->host, sizeof own->host, "%s", host ? host : "");
    own->shares = nccl_shares_gpus();
    if (c->near) placement_near_device(gpu.pci, &g->near);
    snprintf(own->near, sizeof own->near, "%s", g->near.list);
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

typedef struct {
    int low, high; /* ranks */
} Pair;

static bool share_gpu(const Fact *all, Pair p) { return !strcmp(all[p.low].uuid, all[p.high].uuid); }

/* Counts who has this rank's GPU, and finds the first two ranks that share one. */
static bool find_sharers(const Fact *all, const GpuChoice *c, RankGpu *g, Pair *first)
{
    bool found = false;
    g->sharers = 0;
    for (int p = 0; p < c->size; p++) {
        g->sharers += !strcmp(all[p].uuid, all[c->rank].uuid);
        for (int q = 0; q < p && !found; q++) found = share_gpu(all, *first = (Pair){ q, p });
    }
    return found;
}

static int neighbours(const Fact *all, const GpuChoice *c)
{
    const Fact *own = &all[c->rank];
    int count = 0;
    for (int p = 0; p < c->size; p++) count += !strcmp(all[p].name, own->name) && !strcmp(all[p].near, own->near);
    return count;
}

/* One version of NCCL on all. */
static Err check_nccl(const Fact *all, const GpuChoice *c)
{
    for (int p = 0; p < c->size; p++) {
        if (!*all[p].nccl)
            return err_set(ERR_CONFIG, "rank %d has %s: %s", p,
                           c->wanted == CARRIER_NCCL ? "no NCCL, which parallel.staged=false asks for"
                                                     : "a GPU of its own, but no NCCL",
                           all[p].why),
                   err_hint("install NCCL (libnccl2, or pip's nvidia-nccl), or name its folder in NCCL_HOME; or "
                            "parallel.staged=true, through the host and many times slower");
        if (strcmp(all[p].nccl, all[0].nccl))
            return err_set(ERR_CONFIG, "rank 0 has NCCL %s and rank %d has %s", all[0].nccl, p, all[p].nccl),
                   err_hint("install one version on all hosts");
    }
    return ERR_OK;
}

/* How NCCL is to take two ranks that share a GPU, which it refuses on one host unless it is asked to. */
typedef enum { SHARE_AS_IT_IS, SHARE_BY_SWITCH, SHARE_BY_NAME, SHARE_REFUSED } Share;

static Share share_how(const Fact *a, const Fact *b)
{
    if (strcmp(a->host, b->host)) return SHARE_AS_IT_IS; /* NCCL_HOSTID says that they are on different hosts */
    return a->shares && b->shares ? SHARE_BY_SWITCH : *a->host ? SHARE_REFUSED : SHARE_BY_NAME;
}

static Err share_over_nccl(const Fact *all, const GpuChoice *c, RankGpu *g, Pair first)
{
    static const char *const texts[] = { "NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE", "hosts of their own" };
    for (int p = 0; p < c->size; p++)
        for (int q = 0; q < p; q++) {
            const Share how = share_gpu(all, (Pair){ q, p }) ? share_how(&all[q], &all[p]) : SHARE_AS_IT_IS;
            if (how == SHARE_REFUSED)
                return err_set(ERR_CONFIG, "ranks %d and %d share a GPU and NCCL_HOSTID=%s, which NCCL %s refuses", q,
                               p, all[p].host, all[p].nccl),
                       err_hint("give each rank another NCCL_HOSTID, or none; from NCCL 2.30.3 on "
                                "NCCL_MULTI_RANK_GPU_ENABLE=1 allows it; or parallel.staged=auto, through the host");
            if (how == SHARE_BY_NAME && p == c->rank) g->own_host = true;
        }
    snprintf(g->text, sizeof g->text, "NCCL %s (ranks %d and %d share a GPU: %s)", all[0].nccl, first.low, first.high,
             texts[share_how(&all[first.low], &all[first.high])]);
    return ERR_OK;
}

bool rank_gpu_takes_nccl(Carrier wanted, bool shared)
{
    return wanted == CARRIER_NCCL || (wanted == CARRIER_ANY && !shared);
}

/* All on one GPU is how a layout is tried; some on one is a GPU that is missing. */
static Err check_sharers(const Fact *all, const GpuChoice *c, const RankGpu *g, Pair first)
{
    const Fact *f = &all[first.high];
    if (c->wanted != CARRIER_ANY || g->sharers == c->size) return ERR_OK;
    err_set(ERR_CONFIG, "ranks %d and %d share a GPU: host '%s' has %d ranks, which see %d GPU%s", first.low,
            first.high, f->name, f->ranks, f->gpus, f->gpus == 1 ? "" : "s");
    return err_hint("see nvidia-smi there: a GPU that fell off the bus is not in its list; start no more ranks than "
                    "GPUs; or parallel.staged=true, through the host and many times slower");
}

static Err decide(const Fact *all, const GpuChoice *c, RankGpu *g)
{
    Pair first = { 0 };
    const bool shared = find_sharers(all, c, g, &first);
    if (shared) TRY(check_sharers(all, c, g, first));
    g->neighbours = neighbours(all, c);
    g->nccl = rank_gpu_takes_nccl(c->wanted, shared);
    g->own_host = false;
    if (c->wanted == CARRIER_STAGED) snprintf(g->text, sizeof g->text, "staged through the host: parallel.staged=true");
    else snprintf(g->text, sizeof g->text, "staged through the host: all %d ranks share one GPU", c->size);
    if (!g->nccl) return ERR_OK;
    TRY(check_nccl(all, c));
    snprintf(g->text, sizeof g->text, "NCCL %s", all[0].nccl);
    return shared ? share_over_nccl(all, c, g, first) : ERR_OK;
}

Err rank_gpu_choose(Store *s, const GpuChoice *c, RankGpu *out)
{
    Fact own = { 0 }, *all = calloc((size_t)c->size, sizeof *all);
    if (!all) return err_set(ERR_MEMORY, "no memory for what %d ranks say about their GPUs", c->size);
    Err err = own_fact(c, out, &own);
    if (!err) err = exchange(s, c, &own, all);
    if (!err) err = decide(all, c, out);
    free(all);
    return err;
}
