/*
 * The two 16-bit float formats as bit patterns, to and from float. Rounding is to nearest, ties to even; what is
 * too large becomes infinity, every NaN becomes 0x7FFF. Needs the rounding mode and denormals of a fresh thread.
 *
 *   bf16  8 exponent bits, 7 of mantissa: the upper half of a float
 *   f16   5 exponent bits, 10 of mantissa: 65504 is the largest, 2^-24 the smallest positive number
 */
#ifndef MEGATRAIN_BASE_HALF_H
#define MEGATRAIN_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t half_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float half_float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float bf16_to_float(uint16_t h) { return half_float_of((uint32_t)h << 16); }

static inline uint16_t bf16_from_float(float x)
{
    uint32_t bits = half_float_bits(x), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : rounded);
}

/* The exponent is rebased by a product, which is exact and takes denormals along. */
static inline float f16_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, bits = (uint32_t)(h & 0x7FFF) << 13;
    uint32_t finite = half_float_bits(half_float_of(bits) * 0x1p112f);
    return half_float_of(sign | ((h & 0x7C00) == 0x7C00 ? bits | 0x7F800000 : finite));
}

/* Below 2^-14 an f16 counts units of 2^-24, as do the low bits of a float from 0.5 to 1: a sum rounds it. */
static inline uint16_t f16_from_float(float x)
{
    uint32_t bits = half_float_bits(x), sign = bits >> 16 & 0x8000, a = bits & 0x7FFFFFFF;
    uint32_t small = half_float_bits(half_float_of(a) + 0.5f) - 0x3F000000;
    uint32_t normal = (a - 0x38000000 + 0xFFF + (a >> 13 & 1)) >> 13;
    uint32_t h = a < 0x38800000 ? small : a < 0x477FF000 ? normal : 0x7C00;
    return (uint16_t)(a > 0x7F800000 ? 0x7FFF : sign | h);
}

#endif
