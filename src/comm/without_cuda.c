/* In place of cuda/nccl*.c and cuda/staged.c in builds that found no CUDA. */
#include "comm/gpu.h"

static Err not_built(void)
{
    return err_set(ERR_CONFIG, "this build has no CUDA backend"),
           err_hint("install the CUDA toolkit and build again, or set run.device=cpu");
}

Err comm_open_staged(int gpu, GlooWorld *gloo, Comm *c, const char *name, const int *members, int size)
{
    (void)gpu, (void)gloo, (void)c, (void)name, (void)members, (void)size;
    return not_built();
}

bool nccl_available(const char **why)
{
    *why = "this build has no CUDA backend";
    return false;
}

const char *nccl_version(void) { return ""; }

const char *nccl_path(void) { return ""; }

bool nccl_shares_gpus(void) { return false; }

const char *nccl_asks_for_nvls(void) { return NULL; }
bool nccl_gathers_by_nvls(void) { return false; }

Err nccl_world_open(const NcclOptions *o, NcclWorld **out)
{
    (void)o;
    *out = NULL;
    return not_built();
}

void nccl_world_close(NcclWorld *world) { (void)world; }

void nccl_world_abort(NcclWorld *world, const char *why) { (void)world, (void)why; }

Err comm_open_nccl(NcclWorld *world, GlooWorld *gloo, Comm *c, const char *name, const int *members, int size,
                   NcclUse use)
{
    (void)world, (void)gloo, (void)c, (void)name, (void)members, (void)size, (void)use;
    return not_built();
}
