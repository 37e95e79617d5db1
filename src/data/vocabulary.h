/* What a tokenizer consists of, for whoever writes it in another form (hf/gguf_tokens.c). */
#ifndef MEGATRAIN_DATA_VOCABULARY_H
#define MEGATRAIN_DATA_VOCABULARY_H

#include "data/pretoken.h"
#include "data/tokenizer.h"

typedef enum {
    TOKEN_UNUSED,
    TOKEN_PIECE,  /* merges lead to it, or it is a byte */
    TOKEN_ADDED,  /* it is cut out of a text before */
    TOKEN_SPECIAL /* it stands for no text */
} TokenKind;

TokenKind vocabulary_kind(const Tokenizer *t, int32_t id);

/* Ids of two tokens that become one. */
typedef struct {
    int32_t left, right;
} VocabularyMerge;

int64_t vocabulary_merge_count(const Tokenizer *t);
/* out [vocabulary_merge_count]: in their order, the first ones first. */
void vocabulary_merges(const Tokenizer *t, VocabularyMerge *out);

/*
 * Is it BPE of bytes whose texts are cut into pieces by published patterns alone, behind nothing but added tokens and
 * NFC? Then *out is the last of them. A tokenizer of single bytes needs none: its answer is SPLIT_GPT2.
 */
bool vocabulary_pattern(const Tokenizer *t, SplitKind *out);

#endif
