/* Small functions of whole numbers. */
#ifndef MEGATRAIN_BASE_INT64_H
#define MEGATRAIN_BASE_INT64_H

#include <stdint.h>

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* The largest number that divides both, which are above 0. */
static inline int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The smallest number that both, which are above 0, divide; INT64_MAX when it is more than can be counted. */
static inline int64_t common_multiple(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a / common_divisor(a, b), b, &product) ? INT64_MAX : product;
}

#endif
