/*
 * train.micro_batch=auto: the largest micro-batch that divides the batch and whose plan fits every rank. Where there is
 * a pipeline it leaves each of its ranks 4 micro-batches a step (slices count), or where no number leaves so many, as
 * many as can be: else stages wait longer than larger products save.
 */
#ifndef MEGATRAIN_PLAN_MICRO_BATCH_H
#define MEGATRAIN_PLAN_MICRO_BATCH_H

#include "config/config.h"
#include "train/room.h"

/* What a micro-batch takes, on the rank that takes most: of a GPU with CUDA's libraries and communicators; of the host,
 * beside a GPU or without one. All 0: more than a plan counts. */
typedef struct {
    int64_t gpu, libraries, host;
} MicroBatchNeed;

typedef struct {
    int64_t samples; /* the micro-batch */
    MicroBatchNeed need;
    bool fits;    /* false: none does, and this is the least */
    int64_t next; /* the next larger one; 0: none is larger */
    MicroBatchNeed next_need;
    int64_t next_units; /* micro-batches, or their slices, that it would leave a pipeline; 0: memory is what it lacks */
    int64_t pp, slices; /* of the pipeline */
} MicroBatch;

/* Chooses for c, which the key is open of, and its ranks. ERR_CONFIG: the program's rules refuse every one. Errors:
 * those of trainer_plan. */
Err micro_batch_choose(const Config *c, int64_t vocab, const Room *room, MicroBatch *out);

/* The least that the program's rules take. ERR_CONFIG: there is none. */
Err micro_batch_least(const Config *c, int64_t *out);

/* "train.micro_batch=4" */
enum { MICRO_BATCH_WORD = 40 };
const char *micro_batch_word(int64_t samples, char out[MICRO_BATCH_WORD]);

/* May c have that micro-batch? ERR_CONFIG, with the rule: no. */
Err micro_batch_allowed(const Config *c, int64_t samples);

/* "160 samples: a rank needs 65.3 GiB of its 79.6 GiB of GPU memory, 768 MiB for CUDA's libraries among them; 240
 * samples need 96.5 GiB" */
enum { MICRO_BATCH_TEXT = 384 };
const char *micro_batch_text(const MicroBatch *m, const Room *room, char out[MICRO_BATCH_TEXT]);

#endif
