/*
 * Batches: the row tensors of a micro-batch (layer/layer.h, Batch), made on the host from samples' tokens.
 */
#ifndef MEGATRAIN_ENGINE_BATCHES_H
#define MEGATRAIN_ENGINE_BATCHES_H

#include "layer/layer.h"

/* Documents in the stream of tokens. */
typedef struct {
    int32_t eod;  /* token that ends a document; for the next two */
    bool mask;    /* predictions made from it do not count */
    bool restart; /* positions and attention start anew behind it */
} DocumentSpec;

typedef struct {
    int64_t B, seq; /* samples of a batch, positions of a sample */
    Spans span;     /* those of them, in slices of the first one, that this rank has rows for */
    int further;    /* modules that look up and predict tokens further on (model/mtp.c) */
    DocumentSpec documents;
    int scores; /* rows of Batch.scores; 0: the rows of requests are never asked for */
} BatchSpec;

typedef struct {
    BatchSpec spec;
    int32_t *tokens; /* [B][seq + 1], for the caller to fill; NULL on the null device, as the next */
    int32_t *rows;   /* staging of one row tensor */
    int32_t *doc;    /* [B][seq] first position of each position's document, with documents.restart or scores */
    bool *counts;    /* [B][seq] whether what a position predicts counts, with scores */
    /* The samples are requests: the caller also fills doc and counts, and the ends of documents mean nothing. */
    bool requests;
} BatchMaker;

/* Tensors of one batch, in `state`. */
Err batch_alloc(const BatchSpec *spec, Batch *b, Arena *state);

/* Takes the memory in which tokens wait on their way to the device. */
Err batches_init(BatchMaker *m, const BatchSpec *spec, bool null_device, SetupArena *setup);
/* m->tokens, of `count` samples from `first_sample` on, into the tensors of a batch. The rest of the batch is filled up
 * with rows that do not count (b->filling). Positions are written only where the batch has others
 * (b->position_span). */
Err batch_fill(BatchMaker *m, Stream *s, Batch *b, int64_t first_sample, int64_t count);

int64_t batch_bytes(const Batch *b); /* bytes of its tensors */

/* The rows of positions past .. past + n - 1 of a batch of one sample. */
Batch batch_part(const Batch *whole, int64_t past, int64_t n);

#endif
