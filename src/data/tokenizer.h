/*
 * Tokenizers: text to token ids and back. What a user may name:
 *
 *   byte                  ids 0-255 are the bytes, 256 ends a document
 *   FILE.json             a Hugging Face tokenizer.json with a BPE model, of bytes or of characters
 *   FOLDER                holding tokenizer.json, else encoder.json + vocab.bpe or vocab.json + merges.txt
 *
 * A tokenizer.json is loaded only if everything in it is understood: anything that would change an
 * id and is not supported is refused by name. Post-processors are read but nothing is added to a
 * text: pretraining wants the plain ids.
 *
 * The way of a text: valid UTF-8 runs | added tokens cut out | normalizers | added tokens of the normalized kind |
 * pre-tokenizer pieces (pretoken.h) | merges (bpe.h).
 * Added tokens are found anywhere in the text, leftmost first, the longest among those that start
 * at one place; the GPT-2 folder form has none, so "<|endoftext|>" in a text is ordinary text
 * there.
 *
 * A Tokenizer never changes after opening: threads share it, each with its own Encoder.
 * Where to read on: encode.c; added.h; tokenizer_json.c, tokenizer_parts.c and tokenizer_write.c (files);
 * bpe_train.c (training).
 */
#ifndef MEGATRAIN_DATA_TOKENIZER_H
#define MEGATRAIN_DATA_TOKENIZER_H

#include <stdint.h>

#include "base/err.h"
#include "data/bpe.h" /* TokenList */
#include "data/input.h"

typedef struct Tokenizer Tokenizer;
typedef struct Encoder Encoder;

/* ERR_DATA with the file and what about it is wrong or not supported. */
Err tokenizer_open(const char *spec, Tokenizer **out);
void tokenizer_close(Tokenizer *t); /* NULL is fine */

int32_t tokenizer_vocab(const Tokenizer *t); /* highest id + 1 */
int32_t tokenizer_eod(const Tokenizer *t);   /* id that ends a document; -1: the tokenizer has none */
/* CRC32C over all ids and their bytes: tells tokenizers apart in checkpoints. */
uint32_t tokenizer_crc(const Tokenizer *t);

/* The bytes of an id, which no 0 ends. NULL and 0: the id is not used, or is the end of document of `byte`.
 * begins: a text begins with it; without the blank that encoding may have put in front. */
const char *tokenizer_bytes(const Tokenizer *t, int32_t id, bool begins, int32_t *size);

Err encoder_open(const Tokenizer *t, Encoder **out);
void encoder_close(Encoder *e); /* NULL is fine */

/*
 * Appends the ids of a text to `out`.
 *
 *   continues       the text goes on behind a place of tokenizer_cut, up to which it was encoded before
 *   invalid_bytes   NULL: invalid UTF-8 is ERR_DATA naming the offset.
 *                   else: each invalid byte becomes its byte token, or the unknown token, and is added to this count.
 */
Err encoder_run(Encoder *e, const char *text, int64_t size, bool continues, TokenList *out, int64_t *invalid_bytes);

/*
 * Longest beginning of the text, in bytes, that can be encoded apart from the rest with the same
 * ids as both together (the rest with `continues`), whatever follows; 0 if there is no such place. Always less than
 * `size`.
 */
int64_t tokenizer_cut(const Tokenizer *t, const char *text, int64_t size);

/* Encodes one text with an encoder of its own. ERR_DATA: invalid UTF-8. Release with free(out->ids). */
Err tokenizer_encode(const Tokenizer *t, const char *text, int64_t size, TokenList *out);

/* *out: the bytes of all ids with a 0 byte after them; release with free. ERR_DATA names the place of an unknown id. */
Err tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, char **out, int64_t *size_bytes);

/* Writes what the folder of `t` has as a vocabulary and merges apart as one tokenizer.json, in which the end of
 * documents is an added token. ERR_DATA, ERR_IO. */
Err tokenizer_join(const Tokenizer *t, const char *folder, const char *path);

typedef struct {
    const char *const *inputs; /* inputs as in input.h */
    int input_count;
    int64_t vocab;      /* the size that is wanted: 256 bytes + merges + 1 end of document */
    const char *output; /* tokenizer.json, which is replaced atomically */
    int threads;        /* how many threads count words; 0: OpenMP's number. Changes nothing but the time */
    InputFormat format;
    const char *key;   /* member of JSON lines; NULL: "text" */
    bool skip_missing; /* as in PreprocessOptions */
} TokenizerTrainOptions;

/*
 * Trains byte-level BPE on GPT-2's pieces: the most frequent pair of neighbours is merged next;
 * among equally frequent ones that with the older left token, then the older right token, where
 * bytes are as old as their characters in GPT-2's alphabet say (alphabet.h). The `tokenizers` package
 * finds the same merges. Depends on the multiset of pieces only, not on threads or the order of files.
 * Ids: 0-255 the bytes, then the merges, then <|endoftext|>. Stops early, with a warning, when no
 * pair occurs twice.
 * *vocab_out (may be NULL) = the vocabulary's size. Invalid UTF-8 is left out of the counts, with
 * a warning.
 * Errors: ERR_DATA (input missing or empty), ERR_CONFIG (vocab below 257), ERR_IO (output).
 */
Err tokenizer_train(const TokenizerTrainOptions *o, int64_t *vocab_out);

#endif
