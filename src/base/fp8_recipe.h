/*
 * How operands of linear layers' products are brought to 8 bits, or to 4 (docs/precision.md): a recipe is a row of
 * facts. By them go the words of run.fp8, the rules about widths, the casts (layer/fp8.c) and the choice of GPUs
 * (layer/spec.c).
 */
#ifndef MEGATRAIN_BASE_FP8_RECIPE_H
#define MEGATRAIN_BASE_FP8_RECIPE_H

#include "base/fp8.h"

/*
 * ROW(NAME, "in configurations", bits, block, weight_rows, unit, scale, tensor, mixes, wide, gpus)
 *
 *   bits          of a code
 *   block         numbers of a row that have one scale; 0: the whole tensor has
 *   weight_rows   rows of a weight that have one; other operands have a scale for each row
 *   unit          widths, and rows of a micro-batch, are a multiple of it
 *   scale         how it follows from the largest magnitude
 *   tensor        scales need the largest magnitude of a whole tensor
 *   mixes         weight gradients are of tokens that are mixed (fp8_mix)
 *   wide          gradients of outputs have codes with a wider range (e5m2)
 *   gpus          what GPUs multiply it (device/fp8_gpus.h); FP8_FACTORS: none
 */
#define FP8_RECIPE_LIST(ROW)                                                                                      \
    ROW(TENSORWISE, "tensorwise", 8, 0, 0, 16, FP8_SCALE_EXACT, true, false, true, FP8_FACTOR_OF_TENSOR)          \
    ROW(BLOCKWISE, "blockwise", 8, 128, 128, 16, FP8_SCALE_POWER_OF_TWO, false, false, false, FP8_FACTORS_OF_128) \
    ROW(MXFP8, "mxfp8", 8, 32, 1, 32, FP8_SCALE_E8M0, false, false, false, FP8_FACTORS_OF_32)                     \
    ROW(NVFP4, "nvfp4", 4, 16, 16, 16, FP8_SCALE_TWO_LEVELS, true, true, false, FP8_FACTORS)

#define FP8_RECIPE_NAME(name, ...) FP8_##name,
typedef enum { FP8_NONE, FP8_RECIPE_LIST(FP8_RECIPE_NAME) FP8_RECIPES } Fp8Recipe;
#undef FP8_RECIPE_NAME

typedef struct {
    const char *name;
    int bits, block, weight_rows, unit;
    Fp8Scale scale;
    bool tensor, mixes, wide;
} Fp8Facts;

static inline const Fp8Facts *fp8_facts(Fp8Recipe r)
{
#define FP8_FACTS(name, text, bits, block, weight_rows, unit, scale, tensor, mixes, wide, gpus) \
    [FP8_##name] = { text, bits, block, weight_rows, unit, scale, tensor, mixes, wide },
    static const Fp8Facts all[] = { [FP8_NONE] = { "none", 8, 0, 0, 1, FP8_SCALE_EXACT, false, false, false },
                                    FP8_RECIPE_LIST(FP8_FACTS) };
#undef FP8_FACTS
    return &all[r];
}

/* How many largest magnitudes of inputs and of gradients of outputs? The second is of tokens that are mixed. */
static inline int fp8_amax_count(Fp8Recipe r) { return fp8_facts(r)->mixes ? 2 : 1; }

#endif
