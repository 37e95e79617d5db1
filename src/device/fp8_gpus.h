/*
 * GPUs that multiply codes of 8 bits, by what has a factor in common. One table serves who multiplies
 * (cuda/fp8_product.c), who begins a run (train/run.c), and who plans for a GPU that is absent (plan/predict.c).
 */
#ifndef MEGATRAIN_DEVICE_FP8_GPUS_H
#define MEGATRAIN_DEVICE_FP8_GPUS_H

#include "base/err.h"

typedef enum { FP8_FACTOR_OF_TENSOR, FP8_FACTORS_OF_128, FP8_FACTORS_OF_32, FP8_FACTORS } Fp8Factors;

/* capability: 90 is 9.0. gpu: its name, for the message. ERR_CONFIG: it has no such products. */
Err fp8_gpu_multiplies(Fp8Factors factors, int capability, const char *gpu);

#endif
