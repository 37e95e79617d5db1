/*
 * A number that stands for the bits of a matrix, for gemm.c, which asks whether two algorithms gave the same ones
 * without keeping either result.
 */
#ifndef MEGATRAIN_CUDA_FINGERPRINT_H
#define MEGATRAIN_CUDA_FINGERPRINT_H

#include "device/device.h"

typedef struct {
    uint64_t bits;      /* a sum over all elements, of each one's bits mixed with its place */
    int64_t zeros;      /* elements that are 0 or -0 */
    int64_t not_finite; /* infinities and NaN */
} Fingerprint;

/*
 * Fingerprint of x [rows, columns] of F32, BF16 or F16, on the device. Waits for the stream; overwrites some of the
 * device's workspace.
 */
Err cuda_fingerprint(Stream *s, Tensor x, Fingerprint *out);

#endif
