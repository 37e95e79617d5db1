/*
 * Tensor maps: what the bulk tensor copy of Hopper (hopper.cuh) knows of a tensor in device memory. The host makes
 * them; kernels get them by value, as __grid_constant__ parameters.
 *
 * tensor_map(out, ...)  rank 2 to 5, dimensions innermost first, dense in the innermost. dim: elements of each;
 *     stride: bytes from one element to the next of dimensions 1 and up; box: elements a copy moves of each, at most
 *     256, innermost at most the swizzle's bytes. data at a multiple of 16 bytes, strides multiples of 16. Elements of
 *     2 bytes, or of 1 where `codes` says so.
 *     ERR_SHAPE where the driver does not take it, ERR_DEVICE where it has no such call.
 *     Source: CUDA driver API, cuTensorMapEncodeTiled.
 */
#ifndef MEGATRAIN_CUDA_TENSOR_MAP_H
#define MEGATRAIN_CUDA_TENSOR_MAP_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef CUtensorMap TensorMap;

typedef struct {
    const void *data;
    int rank;
    int64_t dim[5], stride[5]; /* stride[0] is not read */
    int box[5];
    int swizzle; /* bytes: 0, 32, 64 or 128 */
    bool codes;
} TensorBox;

Err tensor_map(TensorMap *out, const TensorBox *b);

#ifdef __cplusplus
}
#endif

#endif
