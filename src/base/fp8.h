/*
 * The two 8-bit float formats and the one of 4 bits as bit patterns, to and from float, and the scales by which numbers
 * are brought into their range (docs/precision.md). Rounding is to nearest, ties to even; what is too large, infinity
 * too, becomes the largest number of its sign; every NaN becomes 0x7F. Needs the rounding mode and denormals of a fresh
 * thread.
 *
 *   e4m3  4 exponent bits, 3 of mantissa: 448 is the largest, 2^-9 the smallest positive number; no infinities
 *   e5m2  5 exponent bits, 2 of mantissa: 57344 and 2^-16; has infinities, which no number is rounded to
 *   e2m1  2 exponent bits, 1 of mantissa: 0 .5 1 1.5 2 3 4 6 and their negatives, in the low bits of a byte. No NaN: it
 *         becomes 6, and what it is multiplied by is NaN
 */
#ifndef MEGATRAIN_BASE_FP8_H
#define MEGATRAIN_BASE_FP8_H

#include <stdbool.h>
#include <stdint.h>

#include "base/half.h"

enum { E4M3_MOST = 448, E5M2_MOST = 57344, E2M1_MOST = 6 };

/* Why e2m1 is refused there, by whoever notices first. */
#define E2M1_NOT_ON_GPUS "codes of 4 bits have no products on GPUs here"

/* How a scale follows from the largest magnitude of what it is for. */
typedef enum {
    FP8_SCALE_EXACT,        /* MOST / amax */
    FP8_SCALE_POWER_OF_TWO, /* the power of two at or below that */
    FP8_SCALE_E8M0,         /* one over the power of two at or above amax / MOST: what an 8-bit exponent can say */
    /* E2m1's two: an e4m3 of a block, and a scale of the tensor (fp8_factor_two_levels). */
    FP8_SCALE_TWO_LEVELS
} Fp8Scale;

/* Numbers with one scale: blocks of rows and columns of the codes, the last ones cut short by the end. 0 rows and
 * columns: the whole tensor. */
typedef struct {
    int rows, columns; /* each 1, 16, 32 or 128 */
    Fp8Scale scale;
} Fp8Blocks;

/* Below the smallest normal number codes count units, as do the low bits of a float from 2^14 (2^7) on: a sum rounds
 * it. */
static inline uint8_t e4m3_from_float(float x)
{
    const uint32_t bits = half_float_bits(x), sign = bits >> 24 & 0x80, a = bits & 0x7FFFFFFF;
    const uint32_t small = half_float_bits(half_float_of(a) + 0x1p14f) - 0x46800000;
    const uint32_t normal = (a - 0x3C000000 + 0x7FFFF + (a >> 20 & 1)) >> 20;
    const uint32_t code = a < 0x3C800000 ? small : a < 0x43E00000 ? normal : 0x7E;
    return (uint8_t)(a > 0x7F800000 ? 0x7F : sign | code);
}

static inline uint8_t e5m2_from_float(float x)
{
    const uint32_t bits = half_float_bits(x), sign = bits >> 24 & 0x80, a = bits & 0x7FFFFFFF;
    const uint32_t small = half_float_bits(half_float_of(a) + 0x1p7f) - 0x43000000;
    const uint32_t normal = (a - 0x38000000 + 0xFFFFF + (a >> 21 & 1)) >> 21;
    const uint32_t code = a < 0x38800000 ? small : a < 0x47600000 ? normal : 0x7B;
    return (uint8_t)(a > 0x7F800000 ? 0x7F : sign | code);
}

static inline uint8_t e2m1_from_float(float x)
{
    const uint32_t bits = half_float_bits(x), sign = bits >> 28 & 8, a = bits & 0x7FFFFFFF;
    const uint32_t small = half_float_bits(half_float_of(a) + 0x1p22f) - 0x4A800000;
    const uint32_t normal = (a - 0x3F000000 + 0x1FFFFF + (a >> 22 & 1)) >> 22;
    const uint32_t code = a < 0x3F800000 ? small : a < 0x40C00000 ? normal : 7;
    return (uint8_t)(a > 0x7F800000 ? 7 : sign | code);
}

/* The exponent is rebased by a product, which is exact and takes denormals along. */
static inline float e4m3_to_float(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, bits = (uint32_t)(code & 0x7F) << 20;
    const uint32_t finite = half_float_bits(half_float_of(bits) * 0x1p120f);
    return half_float_of(sign | ((code & 0x7F) == 0x7F ? 0x7FC00000 : finite));
}

static inline float e5m2_to_float(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, bits = (uint32_t)(code & 0x7F) << 21;
    const uint32_t finite = half_float_bits(half_float_of(bits) * 0x1p112f);
    return half_float_of(sign | ((code & 0x7C) == 0x7C ? bits | 0x7F800000 : finite));
}

static inline float e2m1_to_float(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 8) << 28, bits = (uint32_t)(code & 7) << 22;
    return half_float_of(sign | half_float_bits(half_float_of(bits) * 0x1p126f));
}

/* A scale and what a code is multiplied by to have the number back. */
typedef struct {
    float scale, back;
} Fp8Factor;

/* An exponent that is NaN's makes all codes NaN; 0 stands for the smallest power of two. */
static inline Fp8Factor fp8_factor_e8m0(float amax, float most)
{
    const uint32_t bits = half_float_bits(amax / most), mantissa = bits & 0x7FFFFF;
    uint32_t exponent = bits >> 23;
    if (half_float_bits(amax) > 0x7F800000) return (Fp8Factor){ half_float_of(0x7FC00000), half_float_of(0x7FC00000) };
    if (exponent == 0xFF) exponent = 0xFE;
    else if (mantissa && exponent != 0xFE && !(exponent == 0 && mantissa <= 0x400000)) exponent++;
    return (Fp8Factor){ half_float_of(exponent == 0xFE ? 0x400000 : (254 - exponent) << 23),
                        half_float_of(exponent == 0 ? 0x400000 : exponent << 23) };
}

/*
 * Factor of numbers whose largest magnitude has the bits `amax`; NaN and infinity are beyond all others. `most` is the
 * largest number that the format has. Where all are zeros, or a number is not finite, the scale is 1 (not of e8m0). A
 * scale that is too large for a float becomes the largest float.
 */
static inline Fp8Factor fp8_factor(Fp8Scale kind, uint32_t amax, float most)
{
    if (kind == FP8_SCALE_E8M0) return fp8_factor_e8m0(half_float_of(amax), most);
    if (amax == 0 || amax >= 0x7F800000) return (Fp8Factor){ 1, 1 };
    uint32_t bits = half_float_bits(most / half_float_of(amax));
    if (bits >= 0x7F800000) bits = 0x7F7FFFFF;
    if (kind == FP8_SCALE_POWER_OF_TWO) bits &= 0xFF800000;
    return (Fp8Factor){ half_float_of(bits), 1 / half_float_of(bits) };
}

/*
 * Of a block of e2m1 in a tensor: `amax` and `whole` are the bits of their largest magnitudes. The tensor's scale
 * brings the largest factor to 448 and the largest number to 6. The factor of a block is rounded to 8 bits, so its
 * largest number comes to a sixteenth more or less than 6 at most. That is so where the factor is a normal e4m3, for
 * an amax from whole / 28,672 on. Below, factors are whole units of 2^-9 and it is up to a half: of .51 units, which
 * become 1, the largest number comes to 3.06, of 1.49 to 8.94, which is cut to 6. A factor of 0 (of a block of zeros,
 * or of one too small for e4m3) has the largest scale of a float. NaN is in the factor, and so in the whole block.
 */
static inline Fp8Factor fp8_factor_two_levels(uint32_t whole, uint32_t amax)
{
    const float of_all = fp8_factor(FP8_SCALE_EXACT, whole, E4M3_MOST * E2M1_MOST).scale;
    const float back = e4m3_to_float(e4m3_from_float(half_float_of(amax) * of_all / E2M1_MOST)) / of_all;
    const float scale = 1 / back;
    return (Fp8Factor){ half_float_bits(scale) == 0x7F800000 ? half_float_of(0x7F7FFFFF) : scale, back };
}

/*
 * What weight gradients of e2m1 are made of instead of 16 tokens: H D x / 4, with Hadamard's matrix H and fixed signs
 * D, so that no one token has the largest magnitude alone. Products of two that are mixed so are those of the tokens.
 * Sums are those of pairs 1, 2, 4 and 8 apart, in fp32. One infinity makes all 16 infinite, two make some of them NaN.
 */
enum { FP8_MIXED = 16 };

static inline void fp8_mix(float x[FP8_MIXED])
{
    static const float signs[FP8_MIXED] = { 1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1 };
    for (int i = 0; i < FP8_MIXED; i++) x[i] *= signs[i];
    for (int apart = 1; apart < FP8_MIXED; apart *= 2) {
        for (int i = 0; i < FP8_MIXED; i++) {
            if (i & apart) continue;
            const float a = x[i], b = x[i + apart];
            x[i] = a + b, x[i + apart] = a - b;
        }
    }
    for (int i = 0; i < FP8_MIXED; i++) x[i] *= 0.25f;
}

/* Length of the blocks of which there are `blocks` in so many rows or columns. (Where two lengths would do they are as
 * good: there is one block, or each has one element.) */
static inline int64_t fp8_block(int64_t length, int64_t blocks)
{
    static const int64_t lengths[] = { 1, 32, 128, 16 };
    for (int i = 0; i < 4; i++)
        if ((length + lengths[i] - 1) / lengths[i] == blocks) return lengths[i];
    return length;
}

/* How many blocks there are; 0: of the whole length. */
static inline int64_t fp8_block_count(int64_t length, int64_t block)
{
    return block ? (length + block - 1) / block : 1;
}

/* Rows of factors of square blocks, and of e8m0, have room for a multiple of so many, as the products of GPUs want it;
 * with e8m0 there is also room for a multiple of so many rows: their tiles of 128 rows have a byte a factor. */
enum { FP8_FACTORS_UNIT = 4, FP8_E8M0_ROWS_UNIT = 32 };

static inline int64_t fp8_whole_units(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

/* Factors from one row of them to the next. */
static inline int64_t fp8_factor_ld(Fp8Blocks b, int64_t columns)
{
    const int64_t blocks = fp8_block_count(columns, b.columns);
    return b.rows > 1 || b.scale == FP8_SCALE_E8M0 ? fp8_whole_units(blocks, FP8_FACTORS_UNIT) : blocks;
}

/* Rows of factors that there is room for. */
static inline int64_t fp8_factor_rows(Fp8Blocks b, int64_t rows)
{
    const int64_t blocks = fp8_block_count(rows, b.rows);
    return b.scale == FP8_SCALE_E8M0 ? fp8_whole_units(blocks, FP8_E8M0_ROWS_UNIT) : blocks;
}

#endif
