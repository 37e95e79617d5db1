/*
 * Byte-pair encoding: the model (tokens, merges) and the encoding of one piece.
 *
 * A piece starts as single bytes, or in a model of characters, as SentencePiece makes them, as single characters: one
 * that the vocabulary lacks becomes its bytes, each spelled <0xNN>, or else the unknown token. Again and again the
 * neighbouring pair with the lowest rank (its place in the list of merges) is replaced by its merged token, the
 * leftmost first among equals, until no neighbours are in the list. A heap of candidate pairs over a linked list does
 * it in O(n log n) also for a "word" of a megabyte; a small cache of pieces makes ordinary prose fast.
 *
 * The model never changes after loading and is shared by threads; each thread has its own BpeWork.
 * Source: Sennrich et al. 2016 (BPE), Radford et al. 2019 (on bytes).
 */
#ifndef MEGATRAIN_DATA_BPE_H
#define MEGATRAIN_DATA_BPE_H

#include <stdint.h>

#include "base/arena.h"
#include "base/err.h"

/* Token ids in an array that grows. Start with all zero, release with free(list.ids). */
typedef struct {
    int32_t *ids;
    int64_t count, capacity;
} TokenList;

Err token_list_add(TokenList *list, int32_t id);

typedef struct {
    const char *bytes; /* NULL: the id is not in use */
    int32_t size;
} TokenText;

typedef struct {
    uint64_t pair; /* left id << 32 | right id */
    int32_t rank;  /* 0 is merged first; -1: empty slot */
    int32_t merged;
} BpeMerge;

typedef struct {
    TokenText *tokens; /* [id_count] */
    int32_t id_count;
    int32_t byte_id[256];
    BpeMerge *merges; /* hash table of merge_mask + 1 slots */
    int64_t merge_mask, merge_count;
    int32_t *lookup; /* hash table of ids by bytes, -1 empty */
    int64_t lookup_mask;
    bool whole_pieces; /* a piece that is a token is taken as it is, before any merge */

    bool characters; /* byte_id then are the tokens <0xNN>, -1 where there is none */
    bool fuse_unknown;
    int32_t unknown; /* -1: every character has a token or the tokens of its bytes */
    /* No token of characters has BPE_BLANK behind one of these bytes, and BPE_BLANK is a token: there a piece falls
     * into words, which are merged apart and remembered. */
    bool word_ends[256];
} Bpe;

#define BPE_BLANK "\u2581" /* SentencePiece's blank */

/* Makes tables in `mem` for ids below id_count and at most merge_limit merges. */
Err bpe_init(Bpe *b, SetupArena *mem, int64_t id_count, int64_t merge_limit);

/* Adds a token; `bytes` must live as long as the model. ERR_DATA if the id or the bytes are taken. */
Err bpe_add_token(Bpe *b, int64_t id, const char *bytes, int64_t size);

/* Adds the next merge in rank. ERR_DATA: left, right or their join is no token, or the pair came
 * before. */
Err bpe_add_merge(Bpe *b, TokenText left, TokenText right);

/* One of these is to be called after all tokens. ERR_DATA: one of the 256 bytes is no token. */
Err bpe_finish_bytes(Bpe *b);
/*
 * ERR_DATA: some character would have no token at all.
 *
 *   unknown   the token of unknown characters; NULL: there is none
 *   fuse      a run of them is one token
 *   fallback  they become their bytes, those whose bytes all are tokens
 */
Err bpe_finish_characters(Bpe *b, const char *unknown, bool fuse, bool fallback);

/* The id of the token with these bytes; -1: there is none. */
int32_t bpe_find(const Bpe *b, const char *bytes, int64_t size);

typedef struct BpeWork BpeWork;
Err bpe_work_open(BpeWork **out);
void bpe_work_close(BpeWork *w); /* NULL is fine */

enum { BPE_PIECE_MAX_BYTES = 1 << 30 };

/* Appends the ids of one piece. ERR_DATA if it is longer than BPE_PIECE_MAX_BYTES; ERR_MEMORY. */
Err bpe_encode(const Bpe *b, BpeWork *w, const char *piece, int64_t size, TokenList *out);

/* Rest of a text when merges alone are done, by characters where tokens are of those: none becomes bytes. */
typedef struct {
    int64_t symbols; /* tokens, and characters that are none */
    int32_t id;      /* id of the one token that is left; -1: more is left */
    int32_t rank;    /* rank of the last merge; -1: there was none */
} BpeAlone;
Err bpe_alone(const Bpe *b, BpeWork *w, TokenText text, BpeAlone *out);

/* A hash of bytes for tables in memory only: nothing that is written to disk depends on it. */
uint64_t bytes_hash(const char *bytes, int64_t size);

#endif
