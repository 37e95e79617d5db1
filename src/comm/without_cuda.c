/* In place of cuda/staged.c in builds that found no CUDA. */
#include "comm/gpu.h"

Err comm_open_staged(int gpu, GlooWorld *gloo, Comm *c, const char *name, const int *members, int size)
{
    (void)gpu, (void)gloo, (void)c, (void)name, (void)members, (void)size;
    return err_set(ERR_CONFIG, "this build has no CUDA backend"),
           err_hint("install the CUDA toolkit and build again, or set run.device=cpu");
}
