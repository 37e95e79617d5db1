/*
 * Reads tokenizer files: tokenizer.json and GPT-2's pair of files. Both spell tokens in GPT-2's alphabet (alphabet.h).
 * Spellings are turned into bytes here, at once; the rest of the program knows bytes only.
 *
 * Every member of a tokenizer.json that could change an id is looked at: it is supported or
 * refused.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/file.h"
#include "base/json.h"
#include "base/utf8.h"
#include "data/alphabet.h"
#include "data/tokenizer_impl.h"

static const int64_t file_max_bytes = 256 << 20;

/* Writes the bytes that a spelling stands for (never more than it has); -1 if it uses another
 * alphabet. */
static int64_t spelling_bytes(const char *spelling, int64_t size, char *out)
{
    int64_t count = 0;
    int n;
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

/* Fills t->bpe with the tokens of a JSON object {spelling: id}; added tokens may be spelled in
 * plain text. */
static Err load_vocab(Tokenizer *t, const Json *vocab, const Json *added, int64_t merge_limit)
{
    int64_t highest = -1, room = 0;
    char *bytes;
    if (json_count(vocab) == 0) return err_set(ERR_DATA, "the vocabulary is empty or not an object");
    for (void *it = json_iter(vocab); it; it = json_next(vocab, it)) {
        TRY(add_id(&highest, json_iter_key(it), json_iter_value(it), json_count(vocab)));
        room += (int64_t)strlen(json_iter_key(it));
    }
    TRY(bpe_init(&t->bpe, &t->mem, highest + 1, merge_limit));
    TRY(setup_array(&t->mem, room, &bytes));
    for (void *it = json_iter(vocab); it; it = json_next(vocab, it)) {
        const char *spelling = json_iter_key(it);
        int64_t id = json_int(json_iter_value(it), -1);
        int64_t size = spelling_bytes(spelling, (int64_t)strlen(spelling), bytes);
        if (size < 0 && is_added(added, spelling, id)) continue;
        if (size < 0)
            return err_set(ERR_DATA, "token '%s' is not spelled in the byte-level alphabet", spelling);
        TRY(bpe_add_token(&t->bpe, id, bytes, size));
        bytes += size;
    }
    return bpe_finish(&t->bpe);
}

/* `bytes`: room for as many as both spellings have. */
static Err add_merge_in(Bpe *b, const char *left, int64_t left_size, const char *right, int64_t right_size,
                        char *bytes)
{
    int64_t l = spelling_bytes(left, left_size, bytes);
    int64_t r = l < 0 ? -1 : spelling_bytes(right, right_size, bytes + l);
    if (r < 0)
        return err_set(ERR_DATA, "merge '%lld' is not spelled in the byte-level alphabet",
                       (long long)b->merge_count + 1);
    return bpe_add_merge(b, (TokenText){ bytes, (int32_t)l }, (TokenText){ bytes + l, (int32_t)r });
}

/* One merge from its two spellings. They may be long: a text of one letter trains such tokens. */
static Err add_merge(Bpe *b, const char *left, int64_t left_size, const char *right, int64_t right_size)
{
    char room[1024];
    const int64_t size = left_size + right_size;
    if (left_size <= 0 || right_size <= 0)
        return err_set(ERR_DATA, "merge '%lld' is not two tokens", (long long)b->merge_count + 1);
    char *bytes = size <= (int64_t)sizeof room ? room : malloc((size_t)size);
    if (!bytes) return err_set(ERR_MEMORY, "no memory for a merge of '%lld' bytes", (long long)size);
    Err err = add_merge_in(b, left, left_size, right, right_size, bytes);
    if (bytes != room) free(bytes);
    return err;
}

/* A merge written "left right". */
static Err add_merge_line(Bpe *b, const char *line, int64_t size)
{
    const char *blank = memchr(line, ' ', (size_t)size);
    if (!blank || memchr(blank + 1, ' ', (size_t)(line + size - blank - 1)))
        return err_set(ERR_DATA, "merge '%lld' is not two tokens with a blank between",
                       (long long)b->merge_count + 1);
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
        const char *left = json_text(json_at(m, 0), &left_size),
                   *right = json_text(json_at(m, 1), &right_size);
        if (json_count(m) != 2 || !left || !right)
            return err_set(ERR_DATA, "merge '%lld' is neither \"a b\" nor [\"a\", \"b\"]", (long long)i + 1);
        TRY(add_merge(b, left, left_size, right, right_size));
    }
    return ERR_OK;
}

/* ---- the parts of a tokenizer.json around the model ---- */

static Err refuse(const char *what)
{
    err_set(ERR_DATA, "%s is not supported", what);
    err_hint("supported: byte-level BPE as in GPT-2, Llama 3 and Qwen");
    return ERR_DATA;
}

static bool is_absent(const Json *j) { return !j || json_is_null(j); }

static bool is_false(const Json *j)
{
    return is_absent(j) || !(json_is_true(j) || json_is_string(j) || json_is_number(j) || json_count(j));
}

static bool has_type(const Json *j, const char *type)
{
    const char *name = json_text(json_get(j, "type"), NULL);
    return name && strcmp(name, type) == 0;
}

static bool is_empty_text(const Json *j)
{
    const char *text = json_text(j, NULL);
    return is_absent(j) || (text && !*text);
}

/* The one member of a Sequence, or the thing itself. */
static const Json *unwrap(const Json *j, const char *list)
{
    const Json *members = json_get(j, list);
    return has_type(j, "Sequence") && json_count(members) == 1 ? json_at(members, 0) : j;
}

static Err check_byte_level(const Json *j, bool own_regex)
{
    const Json *use = json_get(j, "use_regex"); /* true when left out */
    if (!has_type(j, "ByteLevel")) return refuse("this pre_tokenizer");
    if (!is_false(json_get(j, "add_prefix_space"))) return refuse("add_prefix_space");
    if ((is_absent(use) || json_is_true(use)) != own_regex)
        return refuse(own_regex ? "ByteLevel without a split pattern"
                                : "ByteLevel with a second split pattern");
    return ERR_OK;
}

static Err load_pre_tokenizer(Tokenizer *t, const Json *j)
{
    j = unwrap(j, "pretokenizers");
    t->split = SPLIT_GPT2;
    if (!has_type(j, "Sequence")) return check_byte_level(j, true);
    const Json *list = json_get(j, "pretokenizers"), *split = json_at(list, 0);
    const char *regex = json_text(json_get(json_get(split, "pattern"), "Regex"), NULL);
    const char *behavior = json_text(json_get(split, "behavior"), NULL);
    if (json_count(list) != 2 || !has_type(split, "Split") || !regex)
        return refuse("this pre_tokenizer sequence");
    if (!behavior || strcmp(behavior, "Isolated") != 0 || !is_false(json_get(split, "invert")))
        return refuse("a split that is not isolated");
    if (!split_find(regex, &t->split)) {
        err_set(ERR_DATA, "the split pattern is not one of the known ones: '%s'", regex);
        err_hint("known are those of GPT-2, Llama 3 and Qwen");
        return ERR_DATA;
    }
    return check_byte_level(json_at(list, 1), false);
}

static Err load_normalizer(Tokenizer *t, const Json *j)
{
    const Json *list = json_get(j, "normalizers");
    if (is_absent(j) || (has_type(j, "Sequence") && json_is_array(list) && json_count(list) == 0))
        return ERR_OK;
    if (!has_type(unwrap(j, "normalizers"), "NFC")) return refuse("a normalizer other than NFC");
    t->nfc = true;
    return ERR_OK;
}

/* What these do, adding tokens round a text, is left to the caller; unknown ones are not waved
 * through. */
static Err check_post_processor(const Json *j)
{
    const Json *list = json_get(j, "processors");
    if (is_absent(j)) return ERR_OK;
    if (!has_type(j, "Sequence")) {
        if (has_type(j, "ByteLevel") || has_type(j, "TemplateProcessing")) return ERR_OK;
        return refuse("this post_processor");
    }
    for (int64_t i = 0; i < json_count(list); i++)
        if (!has_type(json_at(list, i), "ByteLevel") && !has_type(json_at(list, i), "TemplateProcessing"))
            return refuse("this post_processor");
    return ERR_OK;
}

static Err check_model(const Json *model)
{
    /* the first tokenizer.json of GPT-2 names no type; of the models, BPE alone has merges */
    if (!is_absent(json_get(model, "type")) && !has_type(model, "BPE"))
        return refuse("a model other than BPE");
    if (!is_absent(json_get(model, "dropout")) && json_number(json_get(model, "dropout"), 1) != 0)
        return refuse("BPE dropout");
    if (!is_empty_text(json_get(model, "unk_token"))) return refuse("an unk_token");
    if (!is_empty_text(json_get(model, "continuing_subword_prefix")) ||
        !is_empty_text(json_get(model, "end_of_word_suffix")))
        return refuse("a subword prefix or suffix");
    if (!is_false(json_get(model, "byte_fallback"))) return refuse("byte_fallback");
    return ERR_OK;
}

static Err check_around(const Json *j)
{
    if (!is_absent(json_get(j, "truncation"))) return refuse("truncation");
    if (!is_absent(json_get(j, "padding"))) return refuse("padding");
    const Json *decoder = json_get(j, "decoder");
    if (!is_absent(decoder) && !has_type(unwrap(decoder, "decoders"), "ByteLevel"))
        return refuse("a decoder other than ByteLevel");
    return check_post_processor(json_get(j, "post_processor"));
}

/* ---- added tokens ---- */

static Err copy_text(SetupArena *mem, const char *text, int64_t size, TokenText *out)
{
    char *bytes;
    TRY(setup_array(mem, size, &bytes));
    memcpy(bytes, text, (size_t)size);
    *out = (TokenText){ bytes, (int32_t)size };
    return ERR_OK;
}

static Err normalized_text(Tokenizer *t, const char *content, int64_t size, TokenText *out)
{
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)content, (utf8proc_ssize_t)size, &composed,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0) return err_set(ERR_DATA, "cannot normalize added token '%s'", content);
    Err err = copy_text(&t->mem, (const char *)composed, n, out);
    free(composed);
    return err;
}

static Err load_added_token(Tokenizer *t, const Json *j, AddedToken *out)
{
    int64_t size = 0;
    const char *content = json_text(json_get(j, "content"), &size);
    if (!content || size == 0) return err_set(ERR_DATA, "an added token has no content");
    if (size > UINT16_MAX)
        return err_set(ERR_DATA, "an added token has %lld bytes, at most %d can be", (long long)size,
                       UINT16_MAX);
    out->id = (int32_t)json_int(json_get(j, "id"), -1);
    out->normalized = json_is_true(json_get(j, "normalized"));
    out->special = json_is_true(json_get(j, "special"));
    out->single_word = json_is_true(json_get(j, "single_word"));
    out->lstrip = json_is_true(json_get(j, "lstrip"));
    out->rstrip = json_is_true(json_get(j, "rstrip"));
    TRY(copy_text(&t->mem, content, size, &out->text));
    t->text[out->id] = out->text;
    return out->normalized && t->nfc ? normalized_text(t, content, size, &out->text) : ERR_OK;
}

/* The id of an added token may be new, or that of the same text in the model's vocabulary. */
static Err check_added_id(const Tokenizer *t, const AddedToken *a, const bool *taken)
{
    if (taken[a->id]) return err_set(ERR_DATA, "two added tokens have the id '%d'", a->id);
    if (a->id >= t->bpe.id_count || !t->bpe.tokens[a->id].bytes) return ERR_OK;
    const TokenText *have = &t->bpe.tokens[a->id];
    if (have->size == t->text[a->id].size &&
        memcmp(have->bytes, t->text[a->id].bytes, (size_t)have->size) == 0)
        return ERR_OK;
    return err_set(ERR_DATA, "added token '%.*s' has the id '%d' of another token", t->text[a->id].size,
                   t->text[a->id].bytes, a->id);
}

/* A text that the vocabulary spells, too, has one id. */
static Err check_added_spelling(const Json *vocab, const Json *added)
{
    const char *content = json_text(json_get(added, "content"), NULL);
    const Json *listed = content ? json_get(vocab, content) : NULL;
    int64_t id = json_int(json_get(added, "id"), -1);
    if (!listed || json_int(listed, -1) == id) return ERR_OK;
    return err_set(ERR_DATA, "added token '%s' has the id '%lld', and '%lld' in the vocabulary", content,
                   (long long)id, (long long)json_int(listed, -1));
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
    const Json *merges = json_get(model, "merges");
    if (!json_is_object(model)) return err_set(ERR_DATA, "there is no `model`: not a tokenizer.json");
    if (!json_is_array(merges)) return err_set(ERR_DATA, "the model has no list of merges");
    TRY(check_model(model));
    TRY(check_around(j));
    TRY(load_normalizer(t, json_get(j, "normalizer")));
    TRY(load_pre_tokenizer(t, json_get(j, "pre_tokenizer")));
    TRY(load_vocab(t, json_get(model, "vocab"), added, json_count(merges)));
    TRY(load_merges(&t->bpe, merges));
    t->bpe.whole_pieces = json_is_true(json_get(model, "ignore_merges"));
    return load_added(t, json_get(model, "vocab"), added);
}

Err tokenizer_load_json(Tokenizer *t, const char *path)
{
    Json *j;
    TRY_AS(ERR_DATA, json_read_file(path, file_max_bytes, &j));
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

static Err load_pair_parsed(Tokenizer *t, const Json *vocab, const char *merges_path, const char *text,
                            int64_t size)
{
    TRY(load_vocab(t, vocab, NULL, count_lines(text, size)));
    TRY(load_added(t, vocab, NULL));
    t->split = SPLIT_GPT2;
    if (utf8_valid_bytes(text, size) != size) return err_set(ERR_DATA, "'%s' is not UTF-8", merges_path);
    Err err = load_merge_lines(&t->bpe, text, size);
    return err ? err_prefix(err, "'%s'", merges_path) : ERR_OK;
}

Err tokenizer_load_pair(Tokenizer *t, const char *vocab_path, const char *merges_path)
{
    Json *vocab;
    char *text;
    int64_t size;
    TRY_AS(ERR_DATA, json_read_file(vocab_path, file_max_bytes, &vocab));
    Err err = err_as(file_read_all(merges_path, file_max_bytes, &text, &size), ERR_DATA);
    if (!err) {
        err = load_pair_parsed(t, vocab, merges_path, text, size);
        free(text);
    }
    json_free(vocab);
    return err ? err_prefix(err, "tokenizer '%s'", vocab_path) : ERR_OK;
}
