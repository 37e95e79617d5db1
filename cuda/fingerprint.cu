/*
 * The bits of a matrix as one number (fingerprint.h).
 *
 * Mapping   a block takes every gridDim.x-th row, a thread of it every FINGERPRINT_THREADS-th element. Sums are of
 *           integers, so their order is nothing to the result; the host adds those of the blocks.
 * Traffic   reads x once. It runs a few times for each shape of a run's products, never again: plain loads will do.
 */
#include "kernel.cuh"
extern "C" {
#include "fingerprint.h"
}

constexpr int FINGERPRINT_THREADS = 256, FINGERPRINT_BLOCKS = 512;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000; /* of a float's bits; NaN lies beyond */

/* (A 16-bit number's bits are those of the float that it is.) */
template <class T>
__global__ void __launch_bounds__(FINGERPRINT_THREADS)
    fingerprint_kernel(Rows<const T> x, int64_t rows, int64_t columns, Fingerprint *out)
{
    SHARED(uint64_t, bits, [FINGERPRINT_THREADS]);
    SHARED(int, zeros, [FINGERPRINT_THREADS]);
    SHARED(int, not_finite, [FINGERPRINT_THREADS]);
    uint64_t sum = 0;
    int zero = 0, wild = 0;
    for (int64_t n = blockIdx.x; n < rows; n += gridDim.x)
        for (int64_t i = threadIdx.x; i < columns; i += FINGERPRINT_THREADS) {
            const uint32_t value = __float_as_uint(to_float(x.at(n)[i])), magnitude = value & MAGNITUDE;
            sum += rng_mix(static_cast<uint64_t>(n * columns + i) ^ static_cast<uint64_t>(value) << 32);
            zero += magnitude == 0;
            wild += magnitude >= INFINITE;
        }
    bits[threadIdx.x] = sum;
    zeros[threadIdx.x] = zero;
    not_finite[threadIdx.x] = wild;
    __syncthreads();
    if (threadIdx.x) return;
    Fingerprint whole = { 0, 0, 0 };
    for (int t = 0; t < FINGERPRINT_THREADS; t++)
        whole.bits += bits[t], whole.zeros += zeros[t], whole.not_finite += not_finite[t];
    out[blockIdx.x] = whole;
}

template <class T> static void launch(Stream *s, Tensor x, int blocks, Fingerprint *parts)
{
    LAUNCH(fingerprint_kernel<T>, grid_blocks(blocks), FINGERPRINT_THREADS, 0, cuda_stream(s),
           rows_of<const T>(x), x.dim[0], x.dim[1], parts);
}

extern "C" Err cuda_fingerprint(Stream *s, Tensor x, Fingerprint *out)
{
    Fingerprint part[FINGERPRINT_BLOCKS], *parts = reinterpret_cast<Fingerprint *>(s->dev->workspace);
    const int blocks = x.dim[0] < FINGERPRINT_BLOCKS ? static_cast<int>(x.dim[0]) : FINGERPRINT_BLOCKS;
    DISPATCH(x.dtype, launch<T>(s, x, blocks, parts));
    TRY(device_read(s, part, parts, static_cast<int64_t>(sizeof *part) * blocks));
    *out = Fingerprint{ 0, 0, 0 };
    for (int b = 0; b < blocks; b++)
        out->bits += part[b].bits, out->zeros += part[b].zeros, out->not_finite += part[b].not_finite;
    return ERR_OK;
}
