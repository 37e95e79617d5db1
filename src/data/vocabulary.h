/* Parts of a tokenizer, for whoever writes it in another form (hf/gguf_tokens.c). */
#ifndef MEGATRAIN_DATA_VOCABULARY_H
#define MEGATRAIN_DATA_VOCABULARY_H

#include "data/added.h"
#include "data/pretoken.h"
#include "data/tokenizer.h"

typedef enum {
    TOKEN_UNUSED,
    TOKEN_PIECE,   /* merges lead to it, or it is a byte or a character */
    TOKEN_BYTE,    /* in a model of characters: a byte of a character without a token */
    TOKEN_ADDED,   /* it is cut out of a text before */
    TOKEN_SPECIAL, /* the same, and it stands for no text */
    TOKEN_UNKNOWN  /* such a one, for characters without tokens */
} TokenKind;

typedef struct {
    TokenKind kind;
    TokenText text; /* bytes, or characters as the model has them; bytes NULL: it has none */
} VocabularyToken;

/* out [tokenizer_vocab]. Texts live as long as the tokenizer. */
void vocabulary_tokens(const Tokenizer *t, VocabularyToken *out);

/* The added tokens. The text of one that is sought in normalized texts is normalized. */
const AddedToken *vocabulary_added(const Tokenizer *t, int64_t *count);

/* The tokens that its file puts before and behind a text for others who use it; -1: none. */
void vocabulary_around(const Tokenizer *t, int32_t *before, int32_t *behind);

/* Ids of two tokens that become one. */
typedef struct {
    int32_t left, right;
} VocabularyMerge;

int64_t vocabulary_merge_count(const Tokenizer *t);
/* out [vocabulary_merge_count]: in their order, the first ones first. */
void vocabulary_merges(const Tokenizer *t, VocabularyMerge *out);

/* out [count]: what is left of each text when it stands alone (bpe.h). ERR_MEMORY. */
Err vocabulary_alone(const Tokenizer *t, const TokenText *texts, int64_t count, BpeAlone *out);

/* Is a piece that is a token taken as it is, before any merge? */
bool vocabulary_takes_whole(const Tokenizer *t);

/*
 * Is it BPE of bytes whose texts are cut into pieces by one published pattern, behind nothing but added tokens and NFC?
 * Then *out is that; SPLIT_DEEPSEEK: by DeepSeek's three, one after the other. A tokenizer of single bytes needs none:
 * its answer is SPLIT_GPT2.
 */
bool vocabulary_pattern(const Tokenizer *t, SplitKind *out);

/*
 * Is it BPE of characters whose texts are not cut, but for added tokens, and in which blanks become BPE_BLANK and
 * nothing else changes? *prefix: but that one is put before the text, and before each part behind an added token.
 */
bool vocabulary_is_marked(const Tokenizer *t, bool *prefix);

#endif
