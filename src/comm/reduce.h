/*
 * The sums of communicators: n ranks' arrays into one, element by element. Shared by all tables, so that a
 * reduction has the same bits whatever moves the data. Loops over elements vectorise; the order over ranks
 * is fixed.
 */
#ifndef MEGATRAIN_COMM_REDUCE_H
#define MEGATRAIN_COMM_REDUCE_H

#include "comm/comm.h"

/*
 * dst[count] from src[0..ranks) in rank order. Floats (COMM_REDUCE_TREE_F32, COMM_REDUCE_SCATTER_TREE_F32):
 * a binary tree, neighbours first, then pairs of pairs; what is left when the number of ranks is no power of
 * two is added from the last to the first. Integers: sum modulo 2^64, or maximum. dst may be one of src
 * exactly.
 */
void comm_reduce(CommKind kind, void *dst, const void *const *src, int ranks, int64_t count);

#endif
