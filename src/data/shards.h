/*
 * Tokens of one pair of token files, or of several that are read as if they were one: a word of data.train names
 *
 *   prefix                       one pair, PREFIX.bin and PREFIX.idx (indexed.h); either name is taken for the prefix
 *   folder, folder/part-*        all pairs in the folder, all whose prefix matches, in the order of their names' bytes
 *   @list.txt                    the prefixes in a text file, one a line, in its order; blank lines and lines that
 *                                begin with '#' say nothing
 *
 * Sequences, documents and tokens are counted through, over all files. The files may have different types of token.
 */
#ifndef MEGATRAIN_DATA_SHARDS_H
#define MEGATRAIN_DATA_SHARDS_H

#include <stdint.h>

#include "base/arena.h"
#include "data/indexed.h"

typedef struct {
    const char *name;          /* the prefix; of several files the word that named them */
    int count;                 /* of files */
    Indexed *file;             /* [count] */
    int64_t *sequence, *token; /* [count + 1] the first of each file; behind them how many there are */
    int64_t sequences, tokens; /* of all files */
    int64_t documents, bytes;  /* the same; bytes of all PREFIX.bin */
} Shards;

/* With tables in `mem`, which must outlive it. ERR_CONFIG: a list that cannot be read, or names a prefix twice.
 * ERR_DATA: there is none, or one is damaged (indexed_open). */
Err shards_open(const char *word, SetupArena *mem, Shards *out);
void shards_close(Shards *s); /* all zero is fine */

/* Does a word name files that are not there? Of a pattern it is not asked. */
bool shards_missing(const char *word);

/* ERR_DATA, as indexed_check_tokenizer, for the first file that is of another one. */
Err shards_check_tokenizer(const Shards *s, uint32_t tokenizer_crc, const char *name);

/* As indexed_length, indexed_start, indexed_fetch, indexed_read and indexed_check, counted over all files. */
int64_t shards_length(const Shards *s, int64_t sequence);
int64_t shards_start(const Shards *s, int64_t sequence);
void shards_fetch(const Shards *s, int64_t sequence);
Err shards_read(const Shards *s, int64_t first, int64_t count, int64_t vocab, int32_t *out);
Err shards_check(const Shards *s, int64_t first, int64_t count, int64_t vocab);

/* Does every file end with this token? */
bool shards_end_with(const Shards *s, int32_t id);

/* Continues a CRC32C over all PREFIX.idx. */
uint32_t shards_index_crc(const Shards *s, uint32_t crc);
/* The checksum that PREFIX.crc has of PREFIX.bin; of several files that of these checksums. False: one has none. */
bool shards_content_crc(const Shards *s, uint32_t *crc);

#endif
