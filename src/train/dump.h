/*
 * debug.dump: the first products of 8 bits by one weight in the first step of a start, as a file of safetensors in the
 * run's folder, dump-RANK.safetensors. docs/precision.md says what is in it. What it keeps meanwhile is on the heap of
 * the host, for a look by hand; no plan counts it.
 */
#ifndef MEGATRAIN_TRAIN_DUMP_H
#define MEGATRAIN_TRAIN_DUMP_H

#include "layer/layer.h"

enum { DUMP_MOST = 20, DUMP_WHAT_BYTES = 24 };

typedef struct {
    char what[DUMP_WHAT_BYTES];
    DType dtype;
    int64_t rows, columns, bytes;
    void *data;
} DumpTensor;

typedef struct {
    const char *weight; /* NULL: nothing is dumped */
    Ctx *ctx;
    DumpTensor tensor[DUMP_MOST];
    int count;
} Dump;

/* Looks on from now on. weight: debug.dump; "": nobody does. */
void dump_begin(Dump *d, Ctx *ctx, const char *weight);
/* Writes what was seen, where something was, and looks on no longer; alone: a weight that no product was by is said. */
Err dump_end(Dump *d, const char *folder, int rank, bool alone);
/* Gives up what was seen; all zero is fine. */
void dump_close(Dump *d);

#endif
