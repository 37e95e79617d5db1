/* How long chains of products are. */
#ifndef MEGATRAIN_DEVICE_LEAF_H
#define MEGATRAIN_DEVICE_LEAF_H

#include <stdint.h>

/* Most products in a chain, in a sum that a rank forms whole. A chain's error grows with its length. */
enum { LEAF_MOST = 2048 };

/* A power of two of leaves, of which only the last may be shorter. */
static inline int64_t whole_leaf(int64_t length)
{
    int64_t parts = 1;
    while ((length + parts - 1) / parts > LEAF_MOST) parts *= 2;
    return (length + parts - 1) / parts;
}

#endif
