/* train.micro_batch=auto: the largest micro-batch that divides the batch and whose plan fits every rank. */
#ifndef MEGATRAIN_PLAN_MICRO_BATCH_H
#define MEGATRAIN_PLAN_MICRO_BATCH_H

#include "config/config.h"
#include "train/room.h"

typedef struct {
    int64_t samples;          /* the micro-batch */
    int64_t bytes;            /* what its plan takes of a device, on the rank that takes most */
    bool fits;                /* false: none does, and this is the least */
    int64_t next, next_bytes; /* the next larger one, which does not fit; 0: none is larger */
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

/* "32: a rank takes 60.1 GiB of 78.3 GiB; 40 would take 82.0 GiB" */
enum { MICRO_BATCH_TEXT = 160 };
const char *micro_batch_text(const MicroBatch *m, const Room *room, char out[MICRO_BATCH_TEXT]);

#endif
