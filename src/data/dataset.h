/*
 * A data set: samples of seq + 1 tokens over one source or a blend of several, in a fixed order. A source is a token
 * file, or several that are read as one (shards.h).
 *
 *   source       the concatenated documents of its split; sample i = tokens [i*seq, i*seq + seq]
 *                of those, so neighbours share one token; the remainder is dropped
 *   split        "969,30,1": train, valid, test get the documents [round(N a), round(N b)) in file
 *                order, with the cumulated normalized weights a, b, rounding half to even, as in
 *                Megatron
 *   position     samples consumed so far over the whole run, all ranks together
 *   epoch        position / samples; within an epoch a keyed permutation (order.h)
 *   blend        position -> (source, its own position) by blend_draw; each source has its own
 *                epochs
 *
 * From a step on, a run may read other data: a word @N begins what step N and later ones read,
 *
 *   web  @9001 0.7 books 0.3 web        9,000 steps of web alone, then a blend
 *
 * Each stage has its own draws, from 0 on; a file that an earlier stage has read goes on where that left it. Where a
 * stage begins follows from the batches of the steps (DatasetOptions.ramp). Not with a split or ORDER_MEGATRON.
 *
 * ORDER_MEGATRON keeps split and samples' length and has its own documents' order, epochs and blend
 * (megatron.h); it is made for a run of so many samples, and has those positions only.
 *
 * dataset_get is a pure function of the position: no state, any thread, any order of calls.
 */
#ifndef MEGATRAIN_DATA_DATASET_H
#define MEGATRAIN_DATA_DATASET_H

#include <stdint.h>

#include "base/batch_ramp.h"
#include "base/err.h"

typedef enum {
    ORDER_KEYED,   /* training: shuffled by a new permutation each epoch */
    ORDER_FILE,    /* validation: samples 0, 1, 2, ... of each file, again and again */
    ORDER_MEGATRON /* training: Megatron's shuffled index */
} DataOrder;

typedef enum { PART_TRAIN, PART_VALID, PART_TEST, PART_COUNT } DataPart;

typedef struct {
    const char *spec;  /* "prefix", or a blend "weight prefix weight prefix ..."; of several stages */
    const char *split; /* weights of train, valid, test; NULL or "": the whole files */
    DataPart part;     /* part of the split */
    int64_t seq;       /* T: how many tokens of a sample are predicted */
    int64_t vocab;     /* ids must be below this; 0: they are not checked */
    uint64_t seed;     /* data.seed; below 2^32 with ORDER_MEGATRON */
    DataOrder order;
    /* The tokenizer's name: token files known to be made with another are refused. NULL: that is not checked. */
    const char *tokenizer;
    uint32_t tokenizer_crc;
    int64_t samples;       /* how many the run reads; for ORDER_MEGATRON */
    const BatchRamp *ramp; /* the run's global batches; NULL: there are no stages */
} DatasetOptions;

typedef struct Dataset Dataset;

/*
 * Errors: ERR_CONFIG for a spec or split that cannot be read, ERR_DATA for token files that are
 * missing or damaged and for a part that has no document or not one whole sample.
 */
Err dataset_open(const DatasetOptions *o, Dataset **out);
void dataset_close(Dataset *d); /* NULL is fine */

/* Returns the ERR_CONFIG that dataset_open would for spec, split or order, without looking for a file. */
Err dataset_check_text(const DatasetOptions *o);

/* tokens[seq + 1] of the sample at a position. ERR_DATA for an id outside the vocabulary, and for a
 * position beyond the run of ORDER_MEGATRON. */
Err dataset_get(const Dataset *d, int64_t position, int32_t *tokens);

/* ERR_DATA: the samples at positions 0 .. count - 1 have an id outside the vocabulary. Not for ORDER_MEGATRON. */
Err dataset_check(const Dataset *d, int64_t count);

/* Source of the sample at a position. Not for ORDER_MEGATRON, whose samples come from many places. */
typedef struct {
    int source;          /* its number in the order of the spec */
    int64_t epoch;       /* epoch of that source */
    int64_t sample;      /* its number within the source's part */
    int64_t first_token; /* its first token, counted over the whole source */
} DatasetPlace;
DatasetPlace dataset_place(const Dataset *d, int64_t position);

/* The stage that is read at a position. */
typedef struct {
    int number, count; /* number of the stage, from 0 on; how many there are */
    int64_t first;     /* the position where it begins */
    const char *spec;  /* the text that it alone reads */
    int64_t samples;   /* all its files have so many in one epoch */
} DatasetStage;
DatasetStage dataset_stage(const Dataset *d, int64_t position);

int64_t dataset_seq(const Dataset *d);
int64_t dataset_samples(const Dataset *d); /* samples of one epoch, all files together; with one stage */
int64_t dataset_tokens(const Dataset *d);  /* tokens of the part, all files together */
int dataset_source_count(const Dataset *d);
int64_t dataset_index_bytes(const Dataset *d); /* bytes of the order's index; about 0 unless ORDER_MEGATRON */
const char *dataset_source_name(const Dataset *d, int source); /* its prefix, or the word for several files */
/* Do all its files end with this token? */
bool dataset_source_ends_with(const Dataset *d, int source, int32_t id);

/* A source as a whole, whatever part of it is used. */
typedef struct {
    const char *name;
    int64_t first;                    /* the position where its stage begins */
    int files;                        /* how many files are read as one */
    int64_t bytes, documents, tokens; /* how much all of them have; bytes of PREFIX.bin */
    uint32_t index_crc, content_crc;  /* CRCs of PREFIX.idx and PREFIX.bin; for several files see shards.h */
    bool has_content_crc;             /* PREFIX.crc has it */
} DatasetSource;
DatasetSource dataset_source(const Dataset *d, int source);

/* The path of one of its files of tokens, PREFIX.bin; NULL: it has no more. */
const char *dataset_file(const Dataset *d, int source, int file);

/* A CRC32C over indexes, split, weights, seq and, unless the order is the file's, seed. Two data sets with the same
 * one give the same samples, if the tokens are the same. */
uint32_t dataset_crc(const Dataset *d);

/* The checksum of what PREFIX.crc says of the tokens of all sources. False: a source's are not known. */
bool dataset_content_crc(const Dataset *d, uint32_t *crc);

/* Part p has the documents bounds[p] to bounds[p + 1] - 1 among `documents`. ERR_CONFIG: the text is no split. */
Err split_documents(const char *split, int64_t documents, int64_t bounds[PART_COUNT + 1]);

#endif
