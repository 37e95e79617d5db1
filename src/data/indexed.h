/*
 * Token files: PREFIX.bin holds the tokens of all sequences back to back, PREFIX.idx where each
 * starts and which make a document. The layout is Megatron's, byte for byte, little endian:
 *
 *   offset      bytes     content of PREFIX.idx
 *   0           9         "MMIDIDX" 0 0
 *   9           8         u64  version, 1
 *   17          1         u8   type of a token: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16
 *                              (6 f64 and 7 f32 exist too, but are no tokens)
 *   18          8         u64  sequences S
 *   26          8         u64  entries of the document list, = documents + 1
 *   34          4 S       i32  tokens of each sequence
 *   34 + 4 S    8 S       i64  byte offset of each sequence in PREFIX.bin
 *   34 + 12 S   8 (D+1)   i64  0, then for each document the number of sequences up to its end
 *
 * The arrays are not aligned. Everything is checked when a file is opened, so readers after that
 * can trust lengths and offsets: sequences follow one another without gaps and fill PREFIX.bin
 * exactly. Token values are checked when they are read.
 */
#ifndef MEGATRAIN_DATA_INDEXED_H
#define MEGATRAIN_DATA_INDEXED_H

#include <stdint.h>

#include "base/err.h"
#include "base/file.h"

enum { INDEXED_HEADER_BYTES = 34, INDEXED_VERSION = 1, INDEXED_U16_VOCAB = 65500 };

typedef enum {
    TOKEN_U8 = 1,
    TOKEN_I8 = 2,
    TOKEN_I16 = 3,
    TOKEN_I32 = 4,
    TOKEN_I64 = 5,
    TOKEN_U16 = 8
} TokenType;

typedef struct {
    FileMap bin, idx;
    TokenType type;
    int token_bytes;
    int64_t sequences, documents, tokens;
} Indexed;

/* Opens PREFIX.bin and PREFIX.idx, mapped. ERR_DATA naming file, offset and what is wrong. */
Err indexed_open(const char *prefix, Indexed *out);
void indexed_close(Indexed *x);

/* Of a sequence: how many tokens, and the first, counted over the whole file. */
int64_t indexed_length(const Indexed *x, int64_t sequence);
int64_t indexed_start(const Indexed *x, int64_t sequence);
/* Sequences up to the end of a document. */
int64_t indexed_document_end(const Indexed *x, int64_t document);

/*
 * out[count] = tokens [first, first + count) of the whole file, as i32. ERR_DATA if one is
 * negative or, with vocab > 0, not below vocab: the message names document, place in it and the
 * id.
 */
Err indexed_read(const Indexed *x, int64_t first, int64_t count, int64_t vocab, int32_t *out);

/* The same check without reading them anywhere. *highest (may be NULL) = the largest id. */
Err indexed_check(const Indexed *x, int64_t first, int64_t count, int64_t vocab, int64_t *highest);

/* The smallest type that Megatron would choose: u16 below 65500 ids, else i32. */
TokenType indexed_type_for(int64_t vocab);
const char *token_type_name(TokenType type);

/*
 * Writes a pair of files front to back. Both are built under temporary names; PREFIX.idx appears
 * last and only in indexed_finish, so a reader never finds a half-written pair. Memory: 12 bytes a
 * document.
 */
typedef struct IndexedWriter IndexedWriter;

Err indexed_create(const char *prefix, TokenType type, IndexedWriter **out);
/* More tokens of the present document. */
Err indexed_add_tokens(IndexedWriter *w, const int32_t *ids, int64_t count);
/* Ends the document: one sequence; a document without tokens has none, as in Megatron. */
Err indexed_end_document(IndexedWriter *w);
int64_t indexed_written_tokens(const IndexedWriter *w);
/* Syncs, renames, and frees the writer, also on error. ERR_DATA if there is no token at all. */
Err indexed_finish(IndexedWriter *w);
void indexed_abandon(IndexedWriter *w); /* leaves nothing behind; NULL is fine */

#endif
