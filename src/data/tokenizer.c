#include "data/tokenizer.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "data/grow.h"
#include "data/tokenizer_impl.h"

enum { BYTE_VOCAB = 257, BYTE_EOD = 256 };

/* ---- opening ---- */

/* SentencePiece's own file. */
static Err refuse_model(const char *path)
{
    err_set(ERR_DATA, "'%s' is no tokenizer.json", path);
    return err_hint("transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER) in Python writes one "
                    "from it");
}

static bool ends_with(const char *text, const char *end)
{
    const size_t size = strlen(text), tail = strlen(end);
    return size >= tail && strcmp(text + size - tail, end) == 0;
}

bool tokenizer_find_pair(const char *dir, char vocab[PATH_MAX], char merges[PATH_MAX])
{
    static const char *const pairs[][2] = { { "encoder.json", "vocab.bpe" }, { "vocab.json", "merges.txt" } };
    for (int i = 0; i < 2; i++)
        if (snprintf(vocab, PATH_MAX, "%s/%s", dir, pairs[i][0]) < PATH_MAX && file_exists(vocab) &&
            snprintf(merges, PATH_MAX, "%s/%s", dir, pairs[i][1]) < PATH_MAX && file_exists(merges))
            return true;
    return false;
}

static Err load_folder(Tokenizer *t, const char *dir)
{
    char vocab[PATH_MAX], merges[PATH_MAX];
    if (strlen(dir) > PATH_MAX - 32) return err_set(ERR_DATA, "path is too long: '%s'", dir);
    /* first: what lies beside it, as Qwen is published, says nothing of split patterns and added tokens */
    snprintf(vocab, sizeof vocab, "%s/tokenizer.json", dir);
    if (file_exists(vocab)) return tokenizer_load_json(t, vocab);
    if (tokenizer_find_pair(dir, vocab, merges)) return tokenizer_load_pair(t, vocab, merges);
    snprintf(vocab, sizeof vocab, "%s/tokenizer.model", dir);
    if (file_exists(vocab)) return refuse_model(vocab);
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
        t->before = t->behind = -1;
        return ERR_OK;
    }
    if (!file_exists(spec)) {
        err_set(ERR_DATA, "no tokenizer '%s'", spec);
        err_hint("give `byte`, a tokenizer.json, or a folder with it or with encoder.json + vocab.bpe");
        return ERR_DATA;
    }
    if (ends_with(spec, ".model") && !file_is_dir(spec)) return refuse_model(spec);
    return file_is_dir(spec) ? load_folder(t, spec) : tokenizer_load_json(t, spec);
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
    static const char *const names[] = { END_OF_TEXT, "<|end_of_text|>", "<\uFF5Cend\u2581of\u2581sentence\uFF5C>",
                                         "</s>", "<eos>" };
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
    TokenText path = { 0 };
    Err err = tokenizer_copy_text(t, spec, (int64_t)strlen(spec) + 1, &path);
    t->path = path.bytes;
    if (!err) err = load(t, spec);
    if (!err && !t->is_byte) {
        added_index(t->added, t->added_count, t->sets);
        t->eod = find_eod(t);
        tokenizer_find_cuts(t);
        err = tokenizer_spell(t);
    }
    if (err) tokenizer_close(t);
    else *out = t;
    return err;
}

void tokenizer_close(Tokenizer *t)
{
    if (!t) return;
    for (int i = 0; i < t->stage_count; i++) splitter_close(t->stages[i].splitter);
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

const char *tokenizer_bytes(const Tokenizer *t, int32_t id, bool begins, int32_t *size)
{
    *size = 0;
    if (id < 0 || id >= t->vocab) return NULL;
    if (!t->is_byte) {
        const TokenText *text = begins ? &t->first[id] : &t->text[id];
        *size = text->size;
        return text->bytes;
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
        const char *bytes = tokenizer_bytes(t, id, false, &size);
        crc = crc32c(crc, &size, sizeof size);
        if (size) crc = crc32c(crc, bytes, (size_t)size);
    }
    return crc;
}

/* ---- decoding ---- */

Err tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, char **out, int64_t *size_bytes)
{
    StageBuffer all = { 0 };
    Err err = grow_to(&all.text, &all.capacity, 1);
    bool begins = true;
    for (int64_t i = 0; i < count && !err; i++) {
        int32_t size;
        const char *bytes = tokenizer_bytes(t, ids[i], begins, &size);
        if (!bytes && !(t->is_byte && ids[i] == BYTE_EOD))
            err = err_set(ERR_DATA, "token %d at position %lld is not in the vocabulary of %d", ids[i], (long long)i,
                          t->vocab);
        if (!err) err = grow_to(&all.text, &all.capacity, all.size + size + 1);
        if (!err && size) memcpy(all.text + all.size, bytes, (size_t)size);
        all.size += size;
        begins = false;
    }
    if (err) {
        free(all.text);
        return err;
    }
    all.text[all.size] = 0;
    *out = all.text;
    *size_bytes = all.size;
    return ERR_OK;
}
