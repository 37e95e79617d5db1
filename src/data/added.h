/*
 * Added tokens: texts that are cut out before words are sought, such as <|endoftext|>.
 *
 * They are found from left to right, the longest of those that start at one place first; the search goes on behind the
 * text of a token. A token with single_word is passed over (and the search goes on behind it) unless no word character
 * stands on either side. lstrip and rstrip swallow the white space on that side, but lstrip none that a token before it
 * has swallowed. All of this is what the `tokenizers` package does, whose files have these words.
 */
#ifndef MEGATRAIN_DATA_ADDED_H
#define MEGATRAIN_DATA_ADDED_H

#include "data/bpe.h"

typedef struct {
    TokenText text;
    int32_t id;
    bool normalized; /* it is sought in the normalized text, not in the raw one */
    bool single_word, lstrip, rstrip;
    bool special; /* it stands for no text, such as the end of a document */
} AddedToken;

/* The tokens of one kind, raw or normalized. */
typedef struct {
    const AddedToken *tokens; /* longest first */
    int64_t count;
    bool starts[256];    /* some token starts with this byte */
    bool pairs[1 << 16]; /* first byte << 8 | second byte of some token, or any byte behind one of a single byte */
} AddedSet;

typedef struct {
    int64_t from, to; /* the bytes of the text that the token stands for, with swallowed blanks */
    int32_t id;
} AddedMatch;

/* Sorts the tokens and makes sets[0] of the raw ones, sets[1] of the normalized ones; both point into `tokens`. */
void added_index(AddedToken *tokens, int64_t count, AddedSet sets[2]);

/*
 * The first match at or behind *search; false if there is none. *search moves behind it.
 *
 *   done   end of the match before: no blanks in front of it are swallowed again
 */
bool added_next(const AddedSet *set, const char *text, int64_t size, int64_t done, int64_t *search, AddedMatch *out);

/*
 * May a text be cut between two bytes, where split_cut says (pretoken.h)? True if the set might then find something
 * else, whatever stands around them and however letters are composed.
 */
bool added_crosses(const AddedSet *set, char before, char behind);

#endif
