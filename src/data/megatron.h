/*
 * data.order = megatron: the samples that Megatron-LM's GPT data sets give for the same token files, split, seed
 * and length of the run, in the same order.
 *
 *   epochs      the fewest whose tokens hold `wanted` samples. The last one is apart when less than 80 % of its
 *               samples are wanted: it is then shuffled by itself and comes last.
 *   documents   the part's sequences, once an epoch, all shuffled together: a long row of tokens in which sample j
 *               is [j T, j T + T], neighbours sharing one token
 *   samples     all of them shuffled, those before the last epoch and those of it separately when it is apart
 *   shuffles    Fisher and Yates's from the end, all drawn from one Mersenne Twister, as NumPy's legacy
 *               RandomState(seed) does: 32-bit draws cut to the bits of i, until one is at most i
 *
 * Memory: 4 bytes an epoch for each document, 4 bytes a sample, 1 byte a sample of a blend. Megatron's second
 * table, where each sample starts, is not needed: token j T is found among the documents by their sums.
 *
 * A blend gives the next sample to the data set that is furthest behind its weight (the first of equals), and
 * asks each for 0.5 % more than its share. Sums of weights are formed as NumPy does, in its order of additions.
 *
 * Source: Megatron Core's GPTDataset and BlendedDataset; MT19937: Matsumoto & Nishimura 1998.
 */
#ifndef MEGATRAIN_DATA_MEGATRON_H
#define MEGATRAIN_DATA_MEGATRON_H

#include <stdint.h>

#include "base/arena.h"
#include "data/shards.h"

/* NumPy's legacy generator. */
typedef struct {
    uint32_t state[624];
    int used;
} Twister;

void twister_seed(Twister *t, uint32_t seed);
/* RandomState.shuffle of an array of n <= 2^32 elements. */
void twister_shuffle(Twister *t, uint32_t *items, int64_t n);

/* An index is built over the sequences [from, to) of a file. */
typedef struct {
    const Shards *file;
    int64_t from, to;
    int64_t seq;    /* T */
    int64_t wanted; /* how many samples the run will ask for */
    uint32_t seed;
} MegatronPart;

typedef struct {
    MegatronPart part;
    int64_t epochs, entries, samples;
    int64_t first_samples; /* how many are shuffled apart from the last epoch's; all if that is not apart */
    uint32_t *document;    /* [entries] sequences of the file, in order */
    int64_t *start;        /* tokens before every MEGATRON_STRIDE-th entry */
    uint32_t *shuffle;     /* [samples] position -> sample */
} MegatronIndex;

enum { MEGATRON_STRIDE = 32 };

/* The part must hold at least one sample. ERR_DATA: there are more documents or samples than 32 bits count.
 * ERR_MEMORY. */
Err megatron_index(MegatronIndex *x, MegatronPart part, SetupArena *mem);

/* Reads tokens[seq + 1] of the sample at a position below x->samples. ERR_DATA as in indexed_read. */
Err megatron_read(const MegatronIndex *x, int64_t position, int64_t vocab, int32_t *tokens);

/* The data set that each of the run's `size` samples comes from. */
typedef struct {
    int source_count;
    int64_t size;
    double *weight;  /* [source_count] as Megatron's greedy choice has them */
    int64_t *wanted; /* [source_count] samples to ask of each */
    int64_t *taken;  /* [source_count] samples that the draws take of each */
    uint8_t *source; /* [size] */
    int64_t *before; /* [size / MEGATRON_BLOCK + 1][source_count] draws before every such block */
} MegatronBlend;

enum { MEGATRON_BLOCK = 4096 };

/* Blends for a run of `samples`. There are 1 to 256 weights, positive, of any scale. ERR_MEMORY. */
Err megatron_blend(MegatronBlend *b, const double *weights, int source_count, int64_t samples, SetupArena *mem);

/* The data set of draw q < size, and how many draws that data set has had before. */
int megatron_draw(const MegatronBlend *b, int64_t q, int64_t *earlier);

/* numpy.sum of n doubles: in pairs, eight chains at a time. */
double megatron_sum(const double *x, int64_t n);

#endif
