/*
 * Pre-tokenizing: cutting text into the pieces (words, numbers, runs of punctuation or blanks) inside which pairs are
 * merged. The cuts are part of a tokenizer, which states them as a regular expression of Oniguruma.
 *
 * It is rewritten for PCRE2 with its JIT, and means the same there: classes of characters are written out, so they are
 * those of Unicode 16 whatever the library knows, and white space is Unicode's 25 code points (without PCRE2_UCP `\s`
 * is ASCII only, with it `\s` has 26 code points). What the rewriting does not know is refused.
 *
 * Published patterns take a few steps for each byte of any text, and run in the JIT. Another pattern may take time that
 * grows with the square of the text or faster, so PCRE2 counts its steps, and they have a limit.
 */
#ifndef MEGATRAIN_DATA_PRETOKEN_H
#define MEGATRAIN_DATA_PRETOKEN_H

#include <stdint.h>

#include "base/err.h"

/* The published expressions of which split_cut knows something. */
typedef enum {
    SPLIT_GPT2,
    SPLIT_LLAMA3,
    SPLIT_QWEN,
    SPLIT_O200K,
    SPLIT_TEKKEN,
    SPLIT_DIGITS,
    SPLIT_DEEPSEEK_NUMBERS,
    SPLIT_DEEPSEEK_EAST_ASIA,
    SPLIT_DEEPSEEK,
    SPLIT_COUNT
} SplitKind;

const char *split_regex(SplitKind kind);

typedef struct Splitter Splitter;         /* a compiled pattern; any number of threads may use it */
typedef struct SplitterWork SplitterWork; /* memory that one thread needs to use it */

/* ERR_DATA: the expression has what is not supported, is none, or can match nothing at all. */
Err splitter_open(const char *regex, Splitter **out);
Err splitter_open_text(const char *text, int64_t size, Splitter **out); /* it matches this text */
void splitter_close(Splitter *s);                                       /* NULL is fine */
Err splitter_work_open(const Splitter *s, SplitterWork **out);
void splitter_work_close(SplitterWork *w); /* NULL is fine */

/* Steps that patterns which nobody published may take for `size` bytes of text; a new work has none. */
void splitter_work_allow(SplitterWork *w, int64_t size);

/*
 * *end = where the span that starts at `at` ends: a match, or what lies before the next match or the end of the text.
 * The text must be valid UTF-8, at < size, and `at` the *end of the call before, or 0 in a new text. ERR_DATA: it takes
 * more steps than were allowed. ERR_INTERNAL: PCRE2 gives up.
 */
Err splitter_next(SplitterWork *w, const char *text, int64_t size, int64_t at, int64_t *end, bool *is_match);

/* Behaviour of a pattern at the places of split_cut. */
typedef enum {
    SPLIT_ANYTHING, /* nothing is known */
    SPLIT_KEEPS,    /* no match lies on both sides, or depends on the other side */
    SPLIT_BEGINS    /* the same, and a piece begins there */
} SplitAtCut;
SplitAtCut splitter_at_cut(const Splitter *s);

/* The published expression that it is; SPLIT_COUNT: another one. */
SplitKind splitter_kind(const Splitter *s);

/*
 * The last place below `size` where published patterns start a new piece, whatever stands around: a blank, a line
 * feed, a comma or a full stop, ASCII's or East Asia's, behind a digit or a letter of any script that NFC does not
 * change (the look-ahead of the white-space rule looks only to the right of blanks). 0: there is none.
 */
int64_t split_cut(const char *text, int64_t size);

#endif
