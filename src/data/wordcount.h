/*
 * Distinct pieces (words) of the inputs by GPT-2's pattern, with their counts: what training a tokenizer reads.
 * Several threads take turns at chunks of the inputs (cut.h), each with a table of its own; the tables are added up at
 * the end. Which words there are and their counts depend on the texts alone, the order of words does not.
 */
#ifndef MEGATRAIN_DATA_WORDCOUNT_H
#define MEGATRAIN_DATA_WORDCOUNT_H

#include <stdint.h>

#include "base/err.h"
#include "data/input.h"

typedef struct {
    int64_t start; /* where its bytes begin in WordCounts.bytes */
    int64_t size;
    int64_t count;
} Word;

/* Start with all zero; release with word_counts_free. */
typedef struct {
    char *bytes;
    Word *words;
    int64_t *slots; /* hash table: word + 1, 0 empty */
    int64_t byte_count, byte_capacity, word_count, word_capacity, slot_count;
    int64_t invalid_bytes; /* how many bytes were no valid UTF-8, and so were not counted */
    int64_t missing_lines; /* how many JSON lines were passed over by skip_missing */
} WordCounts;

typedef struct {
    const char *const *paths; /* inputs as in input.h */
    int count;
    InputFormat format;
    const char *key;   /* member of JSON lines (jsonl.h: JsonlKey); NULL: "text" */
    int threads;       /* 0: OpenMP's number */
    bool skip_missing; /* as in PreprocessOptions */
} WordInputs;

/* Counts, and shows how far it is. ERR_DATA: an input is missing, damaged or cut short, or a line of it is no JSON.
 * ERR_CONFIG: the key is wrong. ERR_MEMORY. */
Err word_counts_of(const WordInputs *in, WordCounts *out);
void word_counts_free(WordCounts *w);

#endif
