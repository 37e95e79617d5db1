/* See fp8_gpus.h. Source: cublasLt.h of CUDA 13 and the cuBLAS manual, "Narrow Precision Data Types Usage". */
#include "device/fp8_gpus.h"

#include <stdbool.h>

enum { FIRST_WITH_FP8 = 89, CAPABILITIES = 2 };

/* Capabilities that multiply with factors of blocks; names: as they are said. */
static const struct {
    int only[CAPABILITIES];
    const char *what, *names;
} products[FP8_FACTORS] = {
    [FP8_FACTORS_OF_128] = { { 90 }, "fp8 in blocks", "9.0" },
    [FP8_FACTORS_OF_32] = { { 100, 103 }, "mxfp8", "10.0 and 10.3" },
};

Err fp8_gpu_multiplies(Fp8Factors factors, int capability, const char *gpu)
{
    bool has = !products[factors].what;
    for (int i = 0; i < CAPABILITIES; i++) has |= products[factors].only[i] == capability;
    if (capability < FIRST_WITH_FP8)
        return err_set(ERR_CONFIG, "%s has no products of fp8", gpu),
               err_hint("they begin with compute capability 8.9: set run.precision=bf16");
    if (has) return ERR_OK;
    return err_set(ERR_CONFIG, "%s has products on compute capability %s alone, not on %s (%d.%d)",
                   products[factors].what, products[factors].names, gpu, capability / 10, capability % 10),
           err_hint("set run.fp8=tensorwise");
}
