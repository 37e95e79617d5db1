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
 * PREFIX.crc, which Megatron does not have and nothing needs, holds a line for each of the two, and before them, where
 * it is known, one for the tokenizer that made the ids (tokenizer_crc in tokenizer.h):
 *
 *   tokenizer crc32c 46dd794e
 *   bin crc32c 8a9136aa size 8
 *   idx crc32c 1c291ca3 size 86
 *
 * The format itself has no checksums. Most damage of PREFIX.idx contradicts the rest of it and is seen all the same;
 * a moved boundary between documents, and any other token in PREFIX.bin, is not: for that there is PREFIX.crc. Where
 * it is, the index is compared when a pair is opened, the tokens by indexed_verify.
 *
 * The arrays are not aligned. Everything is checked when a file is opened, so readers after that
 * can trust lengths and offsets: sequences follow one another without gaps and fill PREFIX.bin
 * exactly. Token values are checked when they are read.
 */
#ifndef MEGATRAIN_DATA_INDEXED_H
#define MEGATRAIN_DATA_INDEXED_H

#include <limits.h>
#include <stdint.h>

#include "base/err.h"
#include "base/file.h"
#include "base/map.h"

enum { INDEXED_HEADER_BYTES = 34, INDEXED_VERSION = 1, INDEXED_U16_VOCAB = 65500 };

/* PREFIX.crc is a text. It may have the tokenizer's checksum; it has CRC32C and bytes of PREFIX.bin, then of
 * PREFIX.idx. */
enum { INDEXED_SUMS_MAX = 200 };
#define INDEXED_MADE_WITH "tokenizer crc32c %08x\n"
#define INDEXED_SUMS "bin crc32c %08x size %lld\nidx crc32c %08x size %lld\n"

typedef enum { TOKEN_U8 = 1, TOKEN_I8 = 2, TOKEN_I16 = 3, TOKEN_I32 = 4, TOKEN_I64 = 5, TOKEN_U16 = 8 } TokenType;

typedef struct {
    FileMap bin, idx;
    TokenType type;
    int token_bytes;
    int64_t sequences, documents, tokens;
    bool summed; /* there is a PREFIX.crc, which says: */
    uint32_t bin_crc;
    bool made_with; /* it also says what the ids were made with: */
    uint32_t tokenizer_crc;
} Indexed;

/* Opens and maps PREFIX.bin and PREFIX.idx. ERR_DATA names file, offset and what is wrong. */
Err indexed_open(const char *prefix, Indexed *out);
void indexed_close(Indexed *x);

/* ERR_DATA: PREFIX.crc says that the ids were made with another tokenizer than this one. `name` is for the message. */
Err indexed_check_tokenizer(const Indexed *x, uint32_t tokenizer_crc, const char *name);

/* Reads all of PREFIX.bin. *known false: there is no PREFIX.crc to compare with. ERR_DATA. */
Err indexed_verify(const Indexed *x, bool *known);

/* How many tokens a sequence has; the number of its first token, counted over the whole file. */
int64_t indexed_length(const Indexed *x, int64_t sequence);
int64_t indexed_start(const Indexed *x, int64_t sequence);
/* The sequence's length will be asked for soon: begins to fetch it from memory. */
void indexed_fetch(const Indexed *x, int64_t sequence);
/* How many sequences there are up to the end of a document. */
int64_t indexed_document_end(const Indexed *x, int64_t document);

/*
 * out[count] = tokens [first, first + count) of the whole file, as i32. ERR_DATA: one is negative or, with vocab > 0,
 * not below vocab; the message names the document, the place in it and the id.
 */
Err indexed_read(const Indexed *x, int64_t first, int64_t count, int64_t vocab, int32_t *out);

/* Does the same check without storing the tokens. *highest (may be NULL) = the largest id. */
Err indexed_check(const Indexed *x, int64_t first, int64_t count, int64_t vocab, int64_t *highest);

/* The smallest type that Megatron would choose: u16 below 65500 ids, else i32. */
TokenType indexed_type_for(int64_t vocab);
const char *token_type_name(TokenType type);

/*
 * Writes a pair of files, and PREFIX.crc, front to back, in the folder PREFIX.part; PREFIX.idx appears last and only in
 * indexed_finish, so a reader never finds a half-written pair. Memory: 3 MiB, whatever is written. One writer of a
 * prefix at a time is the caller's business.
 */
typedef struct IndexedWriter IndexedWriter;

/* How much is written, so that a later process can go on. document_tokens: those of a document that has not ended. */
typedef struct {
    int64_t tokens, sequences, documents, document_tokens;
    uint32_t tokens_crc, lengths_crc;
} IndexedMark;

Err indexed_create(const char *prefix, TokenType type, IndexedWriter **out);
/* Goes on from what an earlier process synced; what it wrote after the mark is dropped. ERR_DATA: what was synced is
 * gone, or damaged. */
Err indexed_resume(const char *prefix, TokenType type, const IndexedMark *mark, IndexedWriter **out);

/* Was a job with this mark at its end stopped behind the last rename? All that is left to do then is to remove
 * PREFIX.part. */
bool indexed_published(const char *prefix, const IndexedMark *mark);

/* Adds tokens to the present document. */
Err indexed_add_tokens(IndexedWriter *w, const int32_t *ids, int64_t count);
/* Ends the document, which is one sequence. A document without tokens has no sequence, as in Megatron. */
Err indexed_end_document(IndexedWriter *w);

/* The tokenizer's checksum, which is to be noted in PREFIX.crc. */
void indexed_made_with(IndexedWriter *w, uint32_t tokenizer_crc);

int64_t indexed_written_tokens(const IndexedWriter *w);
IndexedMark indexed_now(const IndexedWriter *w);
Err indexed_sync(IndexedWriter *w); /* all that was written so far survives a power cut */

/* Syncs and renames the files and frees the writer, also on error. ERR_DATA: there is no token at all. */
Err indexed_finish(IndexedWriter *w);
/* Leaves PREFIX.part if something in it was synced, else nothing. NULL is fine. */
void indexed_abandon(IndexedWriter *w);

/* ERR_STORAGE: writing would remove what is not ours, because PREFIX.bin, .crc or .idx is a folder, a device or a pipe,
 * or because the folder PREFIX.part has a name in it that no job gives. */
Err indexed_check_place(const char *prefix);

/* out = PREFIX.part, followed by `name`. */
void indexed_part(const char *prefix, const char *name, char out[PATH_MAX]);

#endif
