/*
 * A tokenizer as llama.cpp has it, so that it gives every text the ids that we give it, or an error.
 *
 *   of bytes         "gpt2": tokens, merges, and the name of the pattern that cuts texts
 *   of characters    "llama": tokens and scores. There two neighbours become a token where their texts together are
 *                    one, whichever they are; the token with the highest score first, of its places the leftmost.
 *
 * Why scores say what a list of merges says. In both ways a token's own characters merge as if nothing stood around
 * them, so each token has one last pair, whatever the text, and its rank makes the score. Two neighbours whose texts
 * make such a token are that pair. So the ways differ only where two neighbours make a text that is in the vocabulary
 * but that no merges lead to: a vocabulary where that can be is refused.
 *
 * What llama.cpp does otherwise whatever a file says: it composes no characters (NFC); with the patterns of o200k and
 * Tekken it knows the case of English letters alone, and cuts words at combining marks; a mark (U+2581) of the text
 * itself makes no added token. Ids are the same for its callers that let added tokens be found (parse_special).
 */
#ifndef MEGATRAIN_HF_GGUF_TOKENS_H
#define MEGATRAIN_HF_GGUF_TOKENS_H

#include "base/arena.h"
#include "data/tokenizer.h"

typedef struct {
    const char *model; /* "gpt2", "llama"; "none": no tokenizer, and nothing below */
    const char *pre;   /* name of the pattern, for "gpt2" */
    const TokenText *texts;
    const int32_t *types;
    const float *scores;     /* scores, for "llama" */
    const TokenText *merges; /* [merge_count] of "gpt2": two spellings with a blank between */
    int64_t merge_count;
    bool prefix; /* for "llama": a blank is put before a text, and behind each added token */
    int32_t bos, eos, unknown, padding;
    bool add_bos, add_eos; /* as the tokenizer's file has it done; training adds neither */
} GgufTokens;

/* For a token table of `vocab` rows; t NULL: none. All of it lives in `a`, and no longer than the tokenizer.
 * ERR_CONFIG: llama.cpp would give other ids; says why. */
Err gguf_tokens(const Tokenizer *t, int64_t vocab, SetupArena *a, GgufTokens *out);

/* ERR_CONFIG: a GGUF file cannot say this. */
Err gguf_cannot(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
