#include "data/tokenizer.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/file.h"
#include "base/utf8.h"
#include "data/grow.h"
#include "data/tokenizer_impl.h"

enum { BYTE_VOCAB = 257, BYTE_EOD = 256 };

/* ---- opening ---- */

static Err load_folder(Tokenizer *t, const char *dir)
{
    static const char *const pairs[][2] = { { "encoder.json", "vocab.bpe" }, { "vocab.json", "merges.txt" } };
    char vocab[PATH_MAX], merges[PATH_MAX];
    if (strlen(dir) > PATH_MAX - 32) return err_set(ERR_DATA, "path is too long: '%s'", dir);
    /* first: what lies beside it, as Qwen is published, says nothing of split patterns and added tokens */
    snprintf(vocab, sizeof vocab, "%s/tokenizer.json", dir);
    if (file_exists(vocab)) return tokenizer_load_json(t, vocab);
    for (int i = 0; i < 2; i++) {
        snprintf(vocab, sizeof vocab, "%s/%s", dir, pairs[i][0]);
        snprintf(merges, sizeof merges, "%s/%s", dir, pairs[i][1]);
        if (file_exists(vocab) && file_exists(merges)) return tokenizer_load_pair(t, vocab, merges);
    }
    err_set(ERR_DATA, "no tokenizer in the folder '%s'", dir);
    err_hint("it must hold tokenizer.json, encoder.json + vocab.bpe, or vocab.json + merges.txt");
    return ERR_DATA;
}

static Err load(Tokenizer *t, const char *spec)
{
    if (strcmp(spec, "byte") == 0) {
        t->is_byte = true;
        t->vocab = BYTE_VOCAB;
        t->eod = BYTE_EOD;
        return ERR_OK;
    }
    if (!file_exists(spec)) {
        err_set(ERR_DATA, "no tokenizer '%s'", spec);
        err_hint("give `byte`, a tokenizer.json, or a folder with it or with encoder.json + vocab.bpe");
        return ERR_DATA;
    }
    TRY(file_is_dir(spec) ? load_folder(t, spec) : tokenizer_load_json(t, spec));
    return splitter_open(t->split, &t->splitter);
}

static int32_t find_added(const Tokenizer *t, const char *name, bool special)
{
    for (const AddedToken *a = t->added; a < t->added + t->added_count; a++)
        if (a->special == special && (size_t)t->text[a->id].size == strlen(name) &&
            memcmp(t->text[a->id].bytes, name, strlen(name)) == 0)
            return a->id;
    return -1;
}

/*
 * The token that vocabularies in use end a document with, the usual name first. Only an added one is meant as such:
 * the merges of web pages lead to "</s>", too. Without added ones, as in GPT-2's two files, its own is in the
 * vocabulary, where no merge leads.
 */
static int32_t find_eod(const Tokenizer *t)
{
    static const char *const names[] = { END_OF_TEXT, "<|end_of_text|>",
                                         "<\uFF5Cend\u2581of\u2581sentence\uFF5C>", "</s>" };
    const size_t count = sizeof names / sizeof *names;
    if (t->added_count == 0) return bpe_find(&t->bpe, END_OF_TEXT, (int64_t)strlen(END_OF_TEXT));
    for (size_t n = 0; n < 2 * count; n++) {
        int32_t id = find_added(t, names[n % count], n < count);
        if (id >= 0) return id;
    }
    return -1;
}

Err tokenizer_open(const char *spec, Tokenizer **out)
{
    Tokenizer *t = calloc(1, sizeof *t);
    if (!t) return err_set(ERR_MEMORY, "no memory for a tokenizer");
    setup_init(&t->mem);
    Err err = load(t, spec);
    if (err) {
        tokenizer_close(t);
        return err;
    }
    if (!t->is_byte) {
        added_index(t->added, t->added_count, t->sets);
        t->eod = find_eod(t);
    }
    *out = t;
    return ERR_OK;
}

void tokenizer_close(Tokenizer *t)
{
    if (!t) return;
    splitter_close(t->splitter);
    setup_release(&t->mem);
    free(t);
}

int32_t tokenizer_vocab(const Tokenizer *t) { return t->vocab; }

int32_t tokenizer_eod(const Tokenizer *t) { return t->eod; }

/* All 256 bytes in order, for tokenizer_bytes. */
#define BYTES4(n) (n), (n) + 1, (n) + 2, (n) + 3
#define BYTES16(n) BYTES4(n), BYTES4((n) + 4), BYTES4((n) + 8), BYTES4((n) + 12)
#define BYTES64(n) BYTES16(n), BYTES16((n) + 16), BYTES16((n) + 32), BYTES16((n) + 48)
static const uint8_t single_bytes[256] = { BYTES64(0), BYTES64(64), BYTES64(128), BYTES64(192) };

const char *tokenizer_bytes(const Tokenizer *t, int32_t id, int32_t *size)
{
    *size = 0;
    if (id < 0 || id >= t->vocab) return NULL;
    if (!t->is_byte) {
        *size = t->text[id].size;
        return t->text[id].bytes;
    }
    if (id == BYTE_EOD) return NULL;
    *size = 1;
    return (const char *)&single_bytes[id];
}

uint32_t tokenizer_crc(const Tokenizer *t)
{
    uint32_t crc = 0;
    for (int32_t id = 0; id < t->vocab; id++) {
        int32_t size;
        const char *bytes = tokenizer_bytes(t, id, &size);
        crc = crc32c(crc, &size, sizeof size);
        if (size) crc = crc32c(crc, bytes, (size_t)size);
    }
    return crc;
}

/* ---- encoding ---- */

struct Encoder {
    const Tokenizer *tokenizer;
    BpeWork *bpe;
    SplitterWork *split;
};

Err encoder_open(const Tokenizer *t, Encoder **out)
{
    Encoder *e = calloc(1, sizeof *e);
    if (!e) return err_set(ERR_MEMORY, "no memory for an encoder");
    e->tokenizer = t;
    Err err = t->is_byte ? ERR_OK : bpe_work_open(&e->bpe);
    if (!err && !t->is_byte) err = splitter_work_open(t->splitter, &e->split);
    if (err) encoder_close(e);
    else *out = e;
    return err;
}

void encoder_close(Encoder *e)
{
    if (!e) return;
    bpe_work_close(e->bpe);
    splitter_work_close(e->split);
    free(e);
}

static Err encode_pieces(Encoder *e, const char *text, int64_t size, TokenList *out)
{
    for (int64_t at = 0, end; at < size; at = end) {
        TRY(splitter_next(e->split, text, size, at, &end));
        TRY(bpe_encode(&e->tokenizer->bpe, e->bpe, text + at, end - at, out));
    }
    return ERR_OK;
}

/* The ids of the added tokens of a set, and of what stands between them by `between`. */
static Err encode_around(Encoder *e, const AddedSet *set, const char *text, int64_t size, TokenList *out,
                         Err (*between)(Encoder *, const char *, int64_t, TokenList *))
{
    int64_t done = 0, search = 0;
    for (AddedMatch m; added_next(set, text, size, done, &search, &m); done = m.to) {
        if (m.from > done) TRY(between(e, text + done, m.from - done, out));
        TRY(token_list_add(out, m.id));
    }
    return done < size ? between(e, text + done, size - done, out) : ERR_OK;
}

static Err encode_normalized(Encoder *e, const char *text, int64_t size, TokenList *out)
{
    return encode_around(e, &e->tokenizer->sets[1], text, size, out, encode_pieces);
}

/* No code point below U+0300 changes under NFC, whatever stands beside it. */
static bool is_plainly_nfc(const char *text, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        if ((uint8_t)text[i] >= 0xCC) return false;
    return true;
}

static Err encode_raw(Encoder *e, const char *text, int64_t size, TokenList *out)
{
    if (!e->tokenizer->nfc || is_plainly_nfc(text, size)) return encode_normalized(e, text, size, out);
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)size, &composed,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0)
        return err_set(n == UTF8PROC_ERROR_NOMEM ? ERR_MEMORY : ERR_DATA, "cannot normalize text: %s",
                       utf8proc_errmsg(n));
    Err err = encode_normalized(e, (const char *)composed, n, out);
    free(composed);
    return err;
}

static Err encode_valid(Encoder *e, const char *text, int64_t size, TokenList *out)
{
    if (e->tokenizer->is_byte) {
        TRY(grow_to(&out->ids, &out->capacity, out->count + size));
        for (int64_t i = 0; i < size; i++) out->ids[out->count++] = (uint8_t)text[i];
        return ERR_OK;
    }
    return encode_around(e, &e->tokenizer->sets[0], text, size, out, encode_raw);
}

Err encoder_run(Encoder *e, const char *text, int64_t size, TokenList *out, int64_t *invalid_bytes)
{
    int64_t at = 0;
    for (;;) {
        int64_t valid = utf8_valid_bytes(text + at, size - at);
        if (at + valid < size && !invalid_bytes)
            return err_set(ERR_DATA, "invalid UTF-8 at byte offset '%lld' (byte '0x%02x')",
                           (long long)(at + valid), (uint8_t)text[at + valid]);
        TRY(encode_valid(e, text + at, valid, out));
        at += valid;
        if (at == size) return ERR_OK;
        uint8_t byte = (uint8_t)text[at++];
        TRY(token_list_add(out, e->tokenizer->is_byte ? byte : e->tokenizer->bpe.byte_id[byte]));
        ++*invalid_bytes;
    }
}

/* (NFC joins nothing to what stands on either side of such a place.) */
int64_t tokenizer_cut(const Tokenizer *t, const char *text, int64_t size)
{
    if (t->is_byte) { /* anywhere but inside a character */
        int64_t last = size - 1;
        while (last > 0 && utf8_is_tail((uint8_t)text[last])) last--;
        return last < 0 ? 0 : last;
    }
    for (int64_t at = split_cut(text, size); at > 0; at = split_cut(text, at))
        if (!added_crosses(&t->sets[0], text[at - 1], text[at]) &&
            !added_crosses(&t->sets[1], text[at - 1], text[at]))
            return at;
    return 0;
}

Err tokenizer_encode(const Tokenizer *t, const char *text, int64_t size, TokenList *out)
{
    Encoder *e;
    *out = (TokenList){ 0 };
    TRY(encoder_open(t, &e));
    Err err = encoder_run(e, text, size, out, NULL);
    encoder_close(e);
    if (err) {
        free(out->ids);
        *out = (TokenList){ 0 };
    }
    return err;
}

/* ---- decoding ---- */

static Err check_ids(const Tokenizer *t, const int32_t *ids, int64_t count, int64_t *size_bytes)
{
    *size_bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t size;
        const char *bytes = tokenizer_bytes(t, ids[i], &size);
        if (!bytes && !(t->is_byte && ids[i] == BYTE_EOD))
            return err_set(ERR_DATA, "token '%d' at position '%lld' is not in the vocabulary of '%d'", ids[i],
                           (long long)i, t->vocab);
        *size_bytes += size;
    }
    return ERR_OK;
}

Err tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, char **out, int64_t *size_bytes)
{
    TRY(check_ids(t, ids, count, size_bytes));
    char *text = malloc((size_t)*size_bytes + 1), *at = text;
    if (!text) return err_set(ERR_MEMORY, "no memory for '%lld' bytes of text", (long long)*size_bytes);
    for (int64_t i = 0; i < count; i++) {
        int32_t size;
        const char *bytes = tokenizer_bytes(t, ids[i], &size);
        if (size) memcpy(at, bytes, (size_t)size);
        at += size;
    }
    *at = 0;
    *out = text;
    return ERR_OK;
}
