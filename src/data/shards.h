/*
 * Tokens of one pair of token files, or of several that are read as if they were one: a word of data.train names
 *
 *   prefix                       one pair, PREFIX.bin and PREFIX.idx (indexed.h); either name is taken for the prefix
 *   folder, folder/part-*        all pairs in the folder, all whose prefix matches, in the order of their names' bytes
 *   @list.txt                    the prefixes in a text file, one a line (blanks in it are part of the name), in its
 *                                order; blank lines and lines that begin with '#' say nothing
 *
 * Sequences, documents and tokens are counted through, over all files. The files may have different types of token.
 */
#ifndef MEGATRAIN_DATA_SHARDS_H
#define MEGATRAIN_DATA_SHARDS_H

#include <stdint.h>

#include "base/arena.h"
#include "data/indexed.h"

typedef struct {
    const char *name;          /* the prefix; for several files the word that named them */
    int count;                 /* how many files */
    Indexed *file;             /* [count] */
    int64_t *sequence, *token; /* [count + 1] the first one of each file, and at the end how many there are */
    int64_t sequences, tokens; /* how many all files have */
    int64_t documents, bytes;  /* how many all files have; bytes of all PREFIX.bin */
} Shards;

/* Opens the files that `word` names, with tables in `mem`, which must outlive them. ERR_CONFIG: a list cannot be read,
 * or names a prefix twice. ERR_DATA: there is no file, or one is damaged (indexed_open). */
Err shards_open(const char *word, SetupArena *mem, Shards *out);
void shards_close(Shards *s); /* all zero is fine */

/* Does a word name files that are not there? Of a pattern it is not asked. */
bool shards_missing(const char *word);

/* Does indexed_check_tokenizer for all files: ERR_DATA names the first that was made with another one. */
Err shards_check_tokenizer(const Shards *s, uint32_t tokenizer_crc, const char *name);

/* These do what indexed_length, indexed_start, indexed_fetch, indexed_read and indexed_check do, counted over all
 * files. */
int64_t shards_length(const Shards *s, int64_t sequence);
int64_t shards_start(const Shards *s, int64_t sequence);
void shards_fetch(const Shards *s, int64_t sequence);
Err shards_read(const Shards *s, int64_t first, int64_t count, int64_t vocab, int32_t *out);
Err shards_check(const Shards *s, int64_t first, int64_t count, int64_t vocab);

/* Does every file end with this token? */
bool shards_end_with(const Shards *s, int32_t id);

/* Continues a CRC32C over all PREFIX.idx. */
uint32_t shards_index_crc(const Shards *s, uint32_t crc);
/* *crc: the checksum of PREFIX.bin that PREFIX.crc has; for several files the checksum of these. False: a file has
 * none. */
bool shards_content_crc(const Shards *s, uint32_t *crc);

#endif
