/* In place of cuda/nccl*.c in builds that found no NCCL. */
#include "comm/gpu.h"

bool nccl_available(const char **why)
{
    *why = "this build has no NCCL";
    return false;
}

const char *nccl_version(void) { return ""; }

const char *nccl_asks_for_nvls(void) { return NULL; }

static Err not_built(void)
{
    return err_set(ERR_CONFIG, "this build has no NCCL"),
           err_hint("install NCCL (libnccl-dev) and build again");
}

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
