/*
 * Inside of Tokenizer, shared by tokenizer.c (use), tokenizer_json.c and tokenizer_write.c (files) and
 * bpe_train.c (training).
 */
#ifndef MEGATRAIN_DATA_TOKENIZER_IMPL_H
#define MEGATRAIN_DATA_TOKENIZER_IMPL_H

#include "data/added.h"
#include "data/bpe.h"
#include "data/pretoken.h"
#include "data/tokenizer.h"

struct Tokenizer {
    SetupArena mem; /* holds everything below except the pattern */
    bool is_byte;   /* the `byte` tokenizer: only vocab and eod are set */
    bool nfc;
    Bpe bpe;
    SplitKind split;
    Splitter *splitter;
    AddedToken *added;
    int64_t added_count;
    AddedSet sets[2]; /* the added tokens: raw ones, normalized ones */
    TokenText *text;  /* [vocab] the bytes of every id, added tokens included */
    int32_t vocab, eod;
};

/* Fill the model, `text`, added tokens and vocab of a zeroed tokenizer. ERR_DATA. */
Err tokenizer_load_json(Tokenizer *t, const char *path);
Err tokenizer_load_pair(Tokenizer *t, const char *vocab_path, const char *merges_path);

/* A merge found by training: the ids of its two tokens. */
typedef struct {
    int32_t left, right;
} TrainedMerge;

#define END_OF_TEXT "<|endoftext|>"

/* Writes a trained vocabulary; the id after the last token becomes END_OF_TEXT. ERR_IO. */
Err tokenizer_json_write(const char *path, const TokenText *tokens, int64_t token_count,
                         const TrainedMerge *merges, int64_t merge_count);

#endif
