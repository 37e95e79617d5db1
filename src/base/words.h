/* Which word was meant: for unknown keys, commands and options. */
#ifndef MEGATRAIN_BASE_WORDS_H
#define MEGATRAIN_BASE_WORDS_H

/* Insertions, deletions and replacements that turn a into b. Words of up to 63 bytes; longer ones are far. */
int word_distance(const char *a, const char *b);

/* The nearest of `words`, at most 2 edits away (1 for words of up to 3 bytes); NULL if there is none. */
const char *word_nearest(const char *word, const char *const *words, int count);

#endif
