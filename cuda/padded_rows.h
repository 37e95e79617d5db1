/*
 * An all-to-all of rows whose counts only device memory knows (comm/comm.h, CommRows), by messages of fixed size: each
 * member has a slot of `most` rows for each other one, in which its pieces lie one behind the other, by chunk. The two
 * launchers between tensors and slots; the messages between them are nccl.c's.
 */
#ifndef MEGATRAIN_CUDA_PADDED_ROWS_H
#define MEGATRAIN_CUDA_PADDED_ROWS_H

#include "device/device.h"

typedef struct {
    char *local, *remote; /* this and offsets: as CommRows */
    const int64_t *local_offset, *remote_offset;
    int64_t local_rows, remote_rows; /* that the tensors have room for; of local, each of its arrays */
    int64_t chunks, stride, most;
    int copies;
    int64_t row_bytes; /* even */
    int members, rank;
    bool back;
    char *out, *in; /* [members - 1][most] rows: slots for the others, in their order, and of what they send */
} PaddedRows;

/* The slot of a member in `out` or `in`; of all but this rank. */
static inline char *padded_slot(const PaddedRows *p, char *slots, int member)
{
    return slots + (member - (member > p->rank)) * p->most * p->row_bytes;
}

/* What goes to others into their slots; what stays here, to where it belongs. */
Err cuda_pack_rows(Stream *s, const PaddedRows *p);
/* What came from others, from their slots to where it belongs. */
Err cuda_unpack_rows(Stream *s, const PaddedRows *p);

#endif
