/* Words: which one was meant, for unknown keys, commands and options; and text that is cut to fit. */
#ifndef MEGATRAIN_BASE_WORDS_H
#define MEGATRAIN_BASE_WORDS_H

#include <stdbool.h>
#include <stddef.h>

/* Insertions, deletions and replacements that turn a into b. Words of up to 63 bytes; longer ones are far. */
int word_distance(const char *a, const char *b);

/* The nearest of `words`, at most 2 edits away (1 for words of up to 3 bytes, none for
 * a single one: any two letters are alike); NULL if there is none. */
const char *word_nearest(const char *word, const char *const *words, int count);

bool text_ends(const char *text, const char *end);

/* The text, or what of it fits into size_bytes with a 0 behind it: cut between two characters, so that it is still
 * UTF-8. */
void text_cut(char *out, size_t size_bytes, const char *text);

/*
 * Words are parted by blanks. A word in quotes, 'my data/t', "my data/t" or @"my data/list", may have blanks. A quote
 * opens at the start of a word, or behind an '@' there, and closes before a blank or the end; anywhere else it is a
 * character like others.
 */
size_t word_length(const char *word);

/* The word without its quotes, which are cut off in place. */
char *word_bare(char *word);

#endif
