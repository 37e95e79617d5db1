/*
 * Reads tokenizer files: tokenizer.json and GPT-2's pair of files. Tokens of bytes are spelled in GPT-2's alphabet
 * (alphabet.h); their spellings are turned into bytes here, at once. Tokens of characters are spelled as they are.
 *
 * Every member of a tokenizer.json that could change an id is looked at: it is supported or refused. Those around the
 * model are in tokenizer_parts.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/utf8.h"
#include "data/alphabet.h"
#include "data/tokenizer_impl.h"

/* Writes the bytes that a spelling stands for (never more than it has); -1 if it uses another
 * alphabet. */
static int64_t spelling_bytes(bool characters, const char *spelling, int64_t size, char *out)
{
    int64_t count = 0;
    int n;
    if (characters) return memcpy(out, spelling, (size_t)size), size;
    for (int64_t at = 0; at < size; at += n) {
        int byte = alphabet_byte(utf8_get(spelling + at, &n));
        if (byte < 0) return -1;
        out[count++] = (char)byte;
    }
    return count;
}

/* ---- vocabulary and merges ---- */

/* Takes an id of a vocabulary of `tokens`. Some leave ids out, but what a damaged id can make us allocate has a
 * bound. */
static Err add_id(int64_t *highest, const char *what, const Json *id, int64_t tokens)
{
    int64_t value = json_int(id, -1), limit = 4 * tokens + 1024;
    if (!json_is_int(id) || value < 0 || value >= limit || value >= INT32_MAX)
        return err_set(ERR_DATA, "the id of token '%s' is not a number in 0..%lld, among %lld tokens", what,
                       (long long)limit - 1, (long long)tokens);
    if (value > *highest) *highest = value;
    return ERR_OK;
}

static bool is_added(const Json *added, const char *spelling, int64_t id)
{
    for (int64_t i = 0; i < json_count(added); i++) {
        const Json *a = json_at(added, i);
        const char *content = json_text(json_get(a, "content"), NULL);
        if (content && strcmp(content, spelling) == 0 && json_int(json_get(a, "id"), -1) == id) return true;
    }
    return false;
}

/* Fills t->bpe with the tokens of a JSON object {spelling: id}; among tokens of bytes, added tokens may be spelled in
 * plain text. */
static Err load_vocab(Tokenizer *t, bool characters, const Json *vocab, const Json *added, int64_t merge_limit)
{
    int64_t highest = -1, room = 0;
    char *bytes;
    if (json_count(vocab) == 0) return err_set(ERR_DATA, "the vocabulary is empty or not an object");
    for (void *it = json_iter(vocab); it; it = json_next(vocab, it)) {
        TRY(add_id(&highest, json_iter_key(it), json_iter_value(it), json_count(vocab)));
        room += (int64_t)strlen(json_iter_key(it));
    }
    TRY(bpe_init(&t->bpe, &t->mem, highest + 1, merge_limit));
    t->bpe.characters = characters;
    TRY(setup_array(&t->mem, room, &bytes));
    for (void *it = json_iter(vocab); it; it = json_next(vocab, it)) {
        const char *spelling = json_iter_key(it);
        int64_t id = json_int(json_iter_value(it), -1);
        int64_t size = spelling_bytes(characters, spelling, (int64_t)strlen(spelling), bytes);
        if (size < 0 && is_added(added, spelling, id)) continue;
        if (size < 0) return err_set(ERR_DATA, "token '%s' is not spelled in the byte-level alphabet", spelling);
        TRY(bpe_add_token(&t->bpe, id, bytes, size));
        bytes += size;
    }
    return ERR_OK;
}

/* `bytes`: room for as many as both spellings have. */
static Err add_merge_in(Bpe *b, const char *left, int64_t left_size, const char *right, int64_t right_size, char *bytes)
{
    int64_t l = spelling_bytes(b->characters, left, left_size, bytes);
    int64_t r = l < 0 ? -1 : spelling_bytes(b->characters, right, right_size, bytes + l);
    if (r < 0)
        return err_set(ERR_DATA, "merge %lld is not spelled in the byte-level alphabet", (long long)b->merge_count + 1);
    return bpe_add_merge(b, (TokenText){ bytes, (int32_t)l }, (TokenText){ bytes + l, (int32_t)r });
}

/* One merge from its two spellings. They may be long: a text of one letter trains such tokens. */
static Err add_merge(Bpe *b, const char *left, int64_t left_size, const char *right, int64_t right_size)
{
    char room[1024];
    const int64_t size = left_size + right_size;
    if (left_size <= 0 || right_size <= 0)
        return err_set(ERR_DATA, "merge %lld is not two tokens", (long long)b->merge_count + 1);
    char *bytes = size <= (int64_t)sizeof room ? room : malloc((size_t)size);
    if (!bytes) return err_set(ERR_MEMORY, "no memory for a merge of %lld bytes", (long long)size);
    Err err = add_merge_in(b, left, left_size, right, right_size, bytes);
    if (bytes != room) free(bytes);
    return err;
}

/* A merge written "left right". */
static Err add_merge_line(Bpe *b, const char *line, int64_t size)
{
    const char *blank = memchr(line, ' ', (size_t)size);
    if (!blank || memchr(blank + 1, ' ', (size_t)(line + size - blank - 1)))
        return err_set(ERR_DATA, "merge %lld is not two tokens with a blank between", (long long)b->merge_count + 1);
    return add_merge(b, line, blank - line, blank + 1, line + size - blank - 1);
}

/* Both forms in use: "left right" and ["left", "right"]. */
static Err load_merges(Bpe *b, const Json *merges)
{
    for (int64_t i = 0; i < json_count(merges); i++) {
        const Json *m = json_at(merges, i);
        int64_t size, left_size = 0, right_size = 0;
        if (json_is_string(m)) {
            const char *line = json_text(m, &size);
            TRY(add_merge_line(b, line, size));
            continue;
        }
        const char *left = json_text(json_at(m, 0), &left_size), *right = json_text(json_at(m, 1), &right_size);
        if (json_count(m) != 2 || !left || !right)
            return err_set(ERR_DATA, "merge %lld is neither \"a b\" nor [\"a\", \"b\"]", (long long)i + 1);
        TRY(add_merge(b, left, left_size, right, right_size));
    }
    return ERR_OK;
}

/* ---- the model ---- */

static bool is_empty_text(const Json *j)
{
    const char *text = json_text(j, NULL);
    return json_is_absent(j) || (text && !*text);
}

static Err check_model(const Json *model)
{
    const char *type = json_text(json_get(model, "type"), NULL);
    /* the first tokenizer.json of GPT-2 names no type; of the models, BPE alone has merges */
    if (type && strcmp(type, "BPE") != 0)
        return err_set(ERR_DATA, "the model '%s' is not supported, only BPE is", type);
    TRY(json_check_members(model, "the model",
                           "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk "
                           "byte_fallback ignore_merges vocab merges"));
    if (!json_is_object(json_get(model, "vocab"))) return err_set(ERR_DATA, "the model has no vocabulary");
    if (!json_is_array(json_get(model, "merges"))) return err_set(ERR_DATA, "the model has no list of merges");
    if (!json_is_absent(json_get(model, "dropout")) && json_number(json_get(model, "dropout"), 1) != 0)
        return err_set(ERR_DATA, "BPE dropout is not supported");
    if (!is_empty_text(json_get(model, "continuing_subword_prefix")) ||
        !is_empty_text(json_get(model, "end_of_word_suffix")))
        return err_set(ERR_DATA, "a subword prefix or suffix is not supported");
    return ERR_OK;
}

/* (None is unknown where tokens are bytes: all bytes are tokens.) */
static Err load_model(Tokenizer *t, bool characters, const Json *model, const Json *added)
{
    const Json *unknown = json_get(model, "unk_token"), *merges = json_get(model, "merges");
    TRY(load_vocab(t, characters, json_get(model, "vocab"), added, json_count(merges)));
    if (characters)
        TRY(bpe_finish_characters(&t->bpe, is_empty_text(unknown) ? NULL : json_text(unknown, NULL),
                                  json_is_true(json_get(model, "fuse_unk")),
                                  json_is_true(json_get(model, "byte_fallback"))));
    else TRY(bpe_finish_bytes(&t->bpe));
    TRY(load_merges(&t->bpe, merges));
    t->bpe.whole_pieces = json_is_true(json_get(model, "ignore_merges"));
    return ERR_OK;
}

/* ---- added tokens ---- */

/* Text that an added token becomes where a text consists of it alone: that is sought in the normalized texts. */
static Err normalized_text(Tokenizer *t, const char *content, int64_t size, TokenText *out)
{
    StageBuffer buffers[2] = { { .most = token_most(size) }, { .most = token_most(size) } };
    Err err = ERR_OK;
    for (int i = 1; i <= t->normalizers && !err; i++)
        err = stage_rewrite(&t->stages[i], &content, &size, PLACE_FIRST, &buffers[i % 2]);
    if (!err && size == 0) err = err_set(ERR_DATA, "nothing is left of an added token when it is normalized");
    if (!err) err = tokenizer_copy_text(t, content, size, out);
    free(buffers[0].text);
    free(buffers[1].text);
    return err;
}

static Err load_added_token(Tokenizer *t, const Json *j, AddedToken *out)
{
    int64_t size = 0;
    const char *content = json_text(json_get(j, "content"), &size);
    if (!content || size == 0) return err_set(ERR_DATA, "an added token has no content");
    if (size > UINT16_MAX)
        return err_set(ERR_DATA, "an added token has %lld bytes, at most %d can be", (long long)size, UINT16_MAX);
    out->id = (int32_t)json_int(json_get(j, "id"), -1);
    out->normalized = json_is_true(json_get(j, "normalized"));
    out->special = json_is_true(json_get(j, "special"));
    out->single_word = json_is_true(json_get(j, "single_word"));
    out->lstrip = json_is_true(json_get(j, "lstrip"));
    out->rstrip = json_is_true(json_get(j, "rstrip"));
    TRY(tokenizer_copy_text(t, content, size, &out->text));
    t->text[out->id] = out->text;
    return out->normalized ? normalized_text(t, content, size, &out->text) : ERR_OK;
}

/* The id of an added token may be new, or that of the same text in the model's vocabulary. */
static Err check_added_id(const Tokenizer *t, const AddedToken *a, const bool *taken)
{
    if (taken[a->id]) return err_set(ERR_DATA, "two added tokens have the id %d", a->id);
    if (a->id >= t->bpe.id_count || !t->bpe.tokens[a->id].bytes) return ERR_OK;
    const TokenText *have = &t->bpe.tokens[a->id];
    if (have->size == t->text[a->id].size && memcmp(have->bytes, t->text[a->id].bytes, (size_t)have->size) == 0)
        return ERR_OK;
    return err_set(ERR_DATA, "added token '%.*s' has the id %d of another token", t->text[a->id].size,
                   t->text[a->id].bytes, a->id);
}

/* A text that the vocabulary spells, too, has one id. */
static Err check_added_spelling(const Json *vocab, const Json *added)
{
    const char *content = json_text(json_get(added, "content"), NULL);
    const Json *listed = content ? json_get(vocab, content) : NULL;
    int64_t id = json_int(json_get(added, "id"), -1);
    if (!listed || json_int(listed, -1) == id) return ERR_OK;
    return err_set(ERR_DATA, "added token '%s' has the id %lld, and %lld in the vocabulary", content, (long long)id,
                   (long long)json_int(listed, -1));
}

/* Fills t->text and t->vocab from the model and the added tokens. */
static Err load_added(Tokenizer *t, const Json *vocab, const Json *list)
{
    int64_t highest = t->bpe.id_count - 1, count = json_count(list);
    bool *taken;
    for (int64_t i = 0; i < count; i++)
        TRY(add_id(&highest, "added", json_get(json_at(list, i), "id"), t->bpe.id_count + count));
    t->vocab = (int32_t)(highest + 1);
    TRY(setup_array(&t->mem, t->vocab, &t->text));
    TRY(setup_array(&t->mem, t->vocab, &taken));
    TRY(setup_array(&t->mem, count, &t->added));
    memcpy(t->text, t->bpe.tokens, (size_t)t->bpe.id_count * sizeof *t->text);
    for (int64_t i = 0; i < count; i++) {
        AddedToken *a = &t->added[i];
        TRY(check_added_spelling(vocab, json_at(list, i)));
        TRY(load_added_token(t, json_at(list, i), a));
        TRY(check_added_id(t, a, taken));
        taken[a->id] = true;
    }
    t->added_count = count;
    return ERR_OK;
}

/* ---- whole files ---- */

static Err load_parsed(Tokenizer *t, const Json *j)
{
    const Json *model = json_get(j, "model"), *added = json_get(j, "added_tokens");
    bool characters;
    if (!json_is_object(model)) return err_set(ERR_DATA, "there is no `model`: not a tokenizer.json");
    TRY(json_check_members(j, "the file",
                           "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder "
                           "model"));
    TRY(check_model(model));
    TRY(tokenizer_load_parts(t, j, &characters));
    TRY(load_model(t, characters, model, added));
    return load_added(t, json_get(model, "vocab"), added);
}

Err tokenizer_load_json(Tokenizer *t, const char *path)
{
    Json *j;
    TRY_AS(ERR_DATA, json_read_file(path, TOKENIZER_FILE_MOST, &j));
    Err err = load_parsed(t, j);
    json_free(j);
    return err ? err_prefix(err, "tokenizer '%s'", path) : ERR_OK;
}

/* vocab.bpe or merges.txt: an optional line "#version...", then a merge a line. */
static Err load_merge_lines(Bpe *b, const char *text, int64_t size)
{
    const char *end = text + size, *stop;
    for (const char *line = text; line < end; line = stop + 1) {
        stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        int64_t length = stop - line - (stop > line && stop[-1] == '\r');
        if (length == 0 || (line == text && length >= 8 && memcmp(line, "#version", 8) == 0)) continue;
        TRY(add_merge_line(b, line, length));
    }
    if (b->merge_count == 0) return err_set(ERR_DATA, "there are no merges");
    return ERR_OK;
}

static int64_t count_lines(const char *text, int64_t size)
{
    int64_t n = 1;
    for (int64_t i = 0; i < size; i++) n += text[i] == '\n';
    return n;
}

static Err load_pair_parsed(Tokenizer *t, const Json *vocab, const char *merges_path, const char *text, int64_t size)
{
    TRY(load_vocab(t, false, vocab, NULL, count_lines(text, size)));
    TRY(bpe_finish_bytes(&t->bpe));
    TRY(load_added(t, vocab, NULL));
    TRY(tokenizer_plain_parts(t));
    if (utf8_valid_bytes(text, size) != size) return err_set(ERR_DATA, "'%s' is not UTF-8", merges_path);
    Err err = load_merge_lines(&t->bpe, text, size);
    return err ? err_prefix(err, "'%s'", merges_path) : ERR_OK;
}

Err tokenizer_load_pair(Tokenizer *t, const char *vocab_path, const char *merges_path)
{
    Json *vocab;
    char *text;
    int64_t size;
    TRY_AS(ERR_DATA, json_read_file(vocab_path, TOKENIZER_FILE_MOST, &vocab));
    Err err = err_as(file_read_all(merges_path, TOKENIZER_FILE_MOST, &text, &size), ERR_DATA);
    if (!err) {
        err = load_pair_parsed(t, vocab, merges_path, text, size);
        free(text);
    }
    json_free(vocab);
    return err ? err_prefix(err, "tokenizer '%s'", vocab_path) : ERR_OK;
}
