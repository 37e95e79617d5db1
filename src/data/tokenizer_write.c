/*
 * Writes a trained vocabulary as a tokenizer.json, to the byte as the `tokenizers` package writes it (pretty), so that
 * loading and saving it there changes nothing; and a vocabulary and merges that lie apart as one tokenizer.json.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/utf8.h"
#include "data/alphabet.h"
#include "data/grow.h"
#include "data/tokenizer_impl.h"

typedef struct {
    char *text;
    int64_t size, capacity;
} Output;

static Err put(Output *o, const char *text)
{
    int64_t n = (int64_t)strlen(text);
    TRY(grow_to(&o->text, &o->capacity, o->size + n));
    memcpy(o->text + o->size, text, (size_t)n);
    o->size += n;
    return ERR_OK;
}

static Err put_int(Output *o, int64_t value)
{
    char digits[24];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    return put(o, digits);
}

/* A token's spelling as a JSON string. */
static Err put_spelling(Output *o, TokenText token)
{
    TRY(grow_to(&o->text, &o->capacity, o->size + 2 * (int64_t)token.size + 2));
    o->text[o->size++] = '"';
    for (int32_t i = 0; i < token.size; i++) {
        uint32_t c = alphabet_char((uint8_t)token.bytes[i]);
        if (c == '"' || c == '\\') o->text[o->size++] = '\\';
        o->size += utf8_put(o->text + o->size, c);
    }
    o->text[o->size++] = '"';
    return ERR_OK;
}

static Err put_vocab(Output *o, const TokenText *tokens, int64_t token_count)
{
    TRY(put(o, "    \"vocab\": {\n"));
    for (int64_t id = 0; id < token_count; id++) {
        TRY(put(o, "      "));
        TRY(put_spelling(o, tokens[id]));
        TRY(put(o, ": "));
        TRY(put_int(o, id));
        TRY(put(o, ",\n"));
    }
    TRY(put(o, "      \"" END_OF_TEXT "\": "));
    TRY(put_int(o, token_count));
    return put(o, "\n    },\n");
}

static Err put_merges(Output *o, const TokenText *tokens, const TrainedMerge *merges, int64_t merge_count)
{
    if (merge_count == 0) return put(o, "    \"merges\": []\n");
    TRY(put(o, "    \"merges\": [\n"));
    for (int64_t i = 0; i < merge_count; i++) {
        TRY(put(o, i ? ",\n      [\n        " : "      [\n        "));
        TRY(put_spelling(o, tokens[merges[i].left]));
        TRY(put(o, ",\n        "));
        TRY(put_spelling(o, tokens[merges[i].right]));
        TRY(put(o, "\n      ]"));
    }
    return put(o, "\n    ]\n");
}

/* end_of_text: -1: there is none. */
static Err put_added(Output *o, int64_t end_of_text)
{
    if (end_of_text < 0) return put(o, "  \"added_tokens\": [],\n");
    TRY(put(o, "  \"added_tokens\": [\n    {\n      \"id\": "));
    TRY(put_int(o, end_of_text));
    return put(o, ",\n      \"content\": \"" END_OF_TEXT "\",\n      \"single_word\": false,\n"
                  "      \"lstrip\": false,\n      \"rstrip\": false,\n      \"normalized\": false,\n"
                  "      \"special\": true\n    }\n  ],\n");
}

static Err put_head(Output *o, int64_t end_of_text)
{
    TRY(put(o, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n"));
    TRY(put_added(o, end_of_text));
    TRY(put(o, "  \"normalizer\": null,\n"));
    TRY(put(o, "  \"pre_tokenizer\": {\n    \"type\": \"ByteLevel\",\n    \"add_prefix_space\": false,\n"
               "    \"trim_offsets\": true,\n    \"use_regex\": true\n  },\n  \"post_processor\": null,\n"));
    TRY(put(o, "  \"decoder\": {\n    \"type\": \"ByteLevel\",\n    \"add_prefix_space\": true,\n"
               "    \"trim_offsets\": true,\n    \"use_regex\": true\n  },\n"));
    return put(o, "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
                  "    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n"
                  "    \"fuse_unk\": false,\n    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n");
}

static Err put_all(Output *o, const TokenText *tokens, int64_t token_count, const TrainedMerge *merges,
                   int64_t merge_count)
{
    TRY(put_head(o, token_count));
    TRY(put_vocab(o, tokens, token_count));
    TRY(put_merges(o, tokens, merges, merge_count));
    return put(o, "  }\n}");
}

Err tokenizer_json_write(const char *path, const TokenText *tokens, int64_t token_count, const TrainedMerge *merges,
                         int64_t merge_count)
{
    Output o = { 0 };
    Err err = put_all(&o, tokens, token_count, merges, merge_count);
    if (!err) file_sweep_beside(path), err = file_replace(path, o.text, o.size);
    free(o.text);
    return err;
}

/* Lines of merges as texts of JSON; `line` 0 may be a note of the version. */
static Err put_merge_lines(Output *o, const char *text, int64_t size)
{
    const char *end = text + size, *stop;
    bool first = true;
    TRY(put(o, ",\n    \"merges\": ["));
    for (const char *line = text; line < end; line = stop + 1) {
        stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        const int64_t length = stop - line - (stop > line && stop[-1] == '\r');
        if (!length || (line == text && length >= 8 && !memcmp(line, "#version", 8))) continue;
        TRY(put(o, first ? "\n      \"" : ",\n      \""));
        TRY(grow_to(&o->text, &o->capacity, o->size + 2 * length + 1));
        for (int64_t i = 0; i < length; i++) {
            if (line[i] == '"' || line[i] == '\\') o->text[o->size++] = '\\';
            o->text[o->size++] = line[i];
        }
        TRY(put(o, "\""));
        first = false;
    }
    return put(o, "\n    ]\n");
}

/* (an object of JSON already) */
static Err put_text(Output *o, const char *text, int64_t size)
{
    TRY(grow_to(&o->text, &o->capacity, o->size + size));
    memcpy(o->text + o->size, text, (size_t)size);
    o->size += size;
    return ERR_OK;
}

static Err put_pair(Output *o, const char *vocab_path, const char *merges_path, int32_t end_of_text)
{
    char *vocab, *merges;
    int64_t vocab_bytes, merges_bytes;
    TRY_AS(ERR_DATA, file_read_all(vocab_path, TOKENIZER_FILE_MOST, &vocab, &vocab_bytes));
    Err err = err_as(file_read_all(merges_path, TOKENIZER_FILE_MOST, &merges, &merges_bytes), ERR_DATA);
    if (!err) {
        err = put_head(o, end_of_text);
        if (!err) err = put(o, "    \"vocab\": ");
        if (!err) err = put_text(o, vocab, vocab_bytes);
        if (!err) err = put_merge_lines(o, merges, merges_bytes);
        if (!err) err = put(o, "  }\n}\n");
        free(merges);
    }
    free(vocab);
    return err;
}

Err tokenizer_join(const Tokenizer *t, const char *folder, const char *path)
{
    char vocab[PATH_MAX], merges[PATH_MAX];
    Output o = { 0 };
    if (!tokenizer_find_pair(folder, vocab, merges))
        return err_set(ERR_DATA, "'%s' has no vocabulary and merges apart", folder);
    Err err = put_pair(&o, vocab, merges, tokenizer_eod(t));
    if (!err) err = file_replace(path, o.text, o.size);
    free(o.text);
    return err;
}
