/*
 * Saves of blocks in the host's memory, from their forward to their backward.
 *
 *   forward    a block makes its saves, its input among them, in a buffer of the device; a copy of them leaves beside
 *              the blocks behind it
 *   backward   they come back, the last block's first, beside the backwards of blocks behind it
 *
 *   compute    | F 0 | F 1 | F 2 | ...          | B 3 | B 2 | B 1 | B 0 |
 *   copies           | 0   | 1   | 2      | 3 | 2     | 1   | 0   |
 *
 * There are OFFLOAD_BUFFERS, which blocks take in turn. A forward waits until what its buffer held has left; a copy
 * back begins when the block that had the buffer is done with it. Copies have a stream of their own (Device.copies), in
 * which they run in order; it waits for the compute stream, and this for it, by events alone.
 *
 * With wgrads apart from their dgrads, REGION_W stays on the device: a W reads it long after buffers have gone on.
 * Evaluation makes its saves in the same buffers, and nothing leaves.
 */
#ifndef MEGATRAIN_LAYER_OFFLOAD_H
#define MEGATRAIN_LAYER_OFFLOAD_H

#include "layer/layer.h"

enum { OFFLOAD_BUFFERS = 2 };

typedef struct {
    Arena room;
    Event filled; /* the compute stream is done with what is in `room`, for now */
    Event copied; /* it has left, or come back */
    bool copying; /* and the compute stream has not waited for that */
} OffloadBuffer;

struct Offload {
    OffloadBuffer buffer[OFFLOAD_BUFFERS]; /* their rooms are the caller's */
    Stream *copies;
    bool keep_w; /* REGION_W stays on the device */
};

/* Marks both of the device's streams once, so that events have all they need. ERR_MEMORY. */
Err offload_init(Offload *o, Device *dev, bool keep_w);
void offload_release(Offload *o);

/* Saves from now on are those of block `at` of the stage. They begin a segment. ERR_MEMORY as save_new. */
Err offload_begin(Ctx *c, int at);
/* They are all there, and leave; later ones go to the slot again. ERR_MEMORY: the slot's part of the host's memory is
 * too small. */
Err offload_leave(Ctx *c, int at);

/* Those of block `at` begin to come back. Of a backward's blocks the last comes first, and of each buffer only after
 * the backward of the block that had it before. */
Err offload_fetch(Ctx *c, int at);
/* From now on they are there. */
Err offload_arrive(Ctx *c, int at);

#endif
