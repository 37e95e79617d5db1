/*
 * A split pattern that is run with every step counted. Anybody's pattern may backtrack for longer than anybody waits:
 * the match limit of PCRE2 counts neither the characters that a repeat reads nor the places where a search begins, and
 * its JIT counts otherwise than its interpreter. Here one step is one character read or one instruction, so whether a
 * text takes too long depends on the pattern and the text alone.
 *
 * It means what PCRE2 means by the pattern. PCRE2 has compiled it before, so that its syntax is known to be right, and
 * says which characters are in a class.
 */
#ifndef MEGATRAIN_DATA_BACKTRACK_H
#define MEGATRAIN_DATA_BACKTRACK_H

#include <stdint.h>

#include "base/err.h"

typedef struct Backtrack Backtrack;         /* a pattern; any number of threads may use it */
typedef struct BacktrackWork BacktrackWork; /* what one thread needs to use it */

/* `pattern`: as pretoken.c writes it for PCRE2, which took it. ERR_MEMORY. */
Err backtrack_open(const char *pattern, Backtrack **out);
void backtrack_close(Backtrack *b); /* NULL is fine */
Err backtrack_work_open(const Backtrack *b, BacktrackWork **out);
void backtrack_work_close(BacktrackWork *w); /* NULL is fine */

/*
 * *end: where the match ends that begins at `at`; -1: none begins there. The steps are taken from *steps. ERR_DATA, and
 * *steps is below 0: there were not enough.
 */
Err backtrack_match(BacktrackWork *w, const char *text, int64_t size, int64_t at, int64_t *steps,
                    int64_t *end);

#endif
