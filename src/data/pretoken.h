/*
 * Pre-tokenizing: cutting text into the pieces (words, numbers, runs of punctuation or blanks)
 * inside which byte pairs are merged. The cuts are part of a tokenizer: three published patterns
 * are known, each under the exact regular expression that a tokenizer.json states.
 *
 * They run on PCRE2 with its JIT. White space is written out as Unicode's 25 code points: without
 * PCRE2_UCP `\s` is ASCII only, with it `\s` has 26 code points, so neither agrees with the
 * tokenizers in use.
 */
#ifndef MEGATRAIN_DATA_PRETOKEN_H
#define MEGATRAIN_DATA_PRETOKEN_H

#include <stdint.h>

#include "base/err.h"

typedef enum { SPLIT_GPT2, SPLIT_LLAMA3, SPLIT_QWEN, SPLIT_COUNT } SplitKind;

/* The kind whose published regular expression is exactly this; false if none is. */
bool split_find(const char *regex, SplitKind *out);
const char *split_name(SplitKind kind);

typedef struct Splitter Splitter;         /* a compiled pattern; any number of threads may use it */
typedef struct SplitterWork SplitterWork; /* what one thread needs to use it */

Err splitter_open(SplitKind kind, Splitter **out);
void splitter_close(Splitter *s); /* NULL is fine */
Err splitter_work_open(const Splitter *s, SplitterWork **out);
void splitter_work_close(SplitterWork *w);

/*
 * *end = where the piece that starts at `at` ends. The text must be valid UTF-8, at < size, and
 * `at` a former *end or 0. ERR_INTERNAL if the pattern engine gives up.
 */
Err splitter_next(SplitterWork *w, const char *text, int64_t size, int64_t at, int64_t *end);

/*
 * The last place below `size` where every pattern starts a new piece, whatever stands around: a blank, a line feed, a
 * comma or a full stop, ASCII's or East Asia's, behind a digit or a letter of any script that NFC does not change (the
 * look-ahead of the white-space rule looks only to the right of blanks). 0: there is none.
 */
int64_t split_cut(const char *text, int64_t size);

#endif
