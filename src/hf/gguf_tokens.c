/* See gguf_tokens.h. */
#include "hf/gguf_tokens.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "data/alphabet.h"
#include "data/vocabulary.h"

#define END_OF_DOCUMENT "<|endoftext|>" /* of tokenizers whose own has no text */

enum { TYPE_NORMAL = 1, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER, TYPE_UNUSED, TYPE_BYTE };

/* Scores are floats, which count so far. */
enum { SCORES_MAX = 1 << 24 };

typedef struct {
    const Tokenizer *t;
    int64_t vocab;
    SetupArena *a;
    VocabularyToken *tokens; /* [vocab] */
    TokenText *texts;        /* [vocab] as the file has them */
    VocabularyMerge *merges;
    int64_t merge_count;
} Job;

Err gguf_cannot(const char *fmt, ...)
{
    char what[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    err_set(ERR_CONFIG, "a GGUF file cannot say %s", what);
    return err_hint("write --format hf, which transformers and vLLM open");
}

static bool same(TokenText x, TokenText y) { return x.size == y.size && memcmp(x.bytes, y.bytes, (size_t)x.size) == 0; }

static bool has(TokenText text, const char *part)
{
    return memmem(text.bytes, (size_t)text.size, part, strlen(part)) != NULL;
}

/* ---- added tokens ---- */

static bool is_run(TokenText t) { return memcmp(t.bytes, t.bytes + 1, (size_t)t.size - 1) == 0; }

/*
 * Does llama.cpp cut other tokens out of some text? It seeks the longest first, wherever it stands; here those of raw
 * texts come first, and of each kind the leftmost. Of two tokens in one text that share bytes, `a` the first, both ways
 * must take the same one. (Tokens that are runs of one character fill such a run from its start in both.)
 */
static bool cut_otherwise(const AddedToken *a, const AddedToken *b)
{
    const TokenText x = a->text, y = b->text;
    const bool one_kind = a->normalized == b->normalized, runs = is_run(x) && is_run(y) && *x.bytes == *y.bytes;
    const bool ours = one_kind || !a->normalized, theirs = x.size > y.size; /* (is the first one taken?) */
    if (one_kind && runs) return false;
    if (!one_kind && a->normalized && y.size <= x.size && memmem(x.bytes, (size_t)x.size, y.bytes, (size_t)y.size))
        return true;
    for (int32_t i = 1; i < x.size && (ours != theirs || x.size == y.size); i++)
        if (x.size - i < y.size && memcmp(x.bytes + i, y.bytes, (size_t)(x.size - i)) == 0) return true;
    return false;
}

static Err check_added(const Job *j, bool characters, bool prefix)
{
    int64_t count;
    const AddedToken *added = vocabulary_added(j->t, &count);
    for (int64_t i = 0; i < count; i++) {
        const AddedToken *a = &added[i];
        if (a->single_word || a->lstrip || a->rstrip)
            return gguf_cannot("what stands beside the added token '%.*s' (single_word, lstrip, rstrip)", a->text.size,
                               a->text.bytes);
        if (a->normalized && characters && (prefix || has(a->text, BPE_BLANK)))
            return gguf_cannot("that the added token '%.*s' is sought in the normalized text", a->text.size,
                               a->text.bytes);
        for (int64_t k = 0; k < count; k++)
            if (k != i && cut_otherwise(a, &added[k]))
                return gguf_cannot("which of the added tokens '%.*s' and '%.*s' is cut out where they share letters",
                                   a->text.size, a->text.bytes, added[k].text.size, added[k].text.bytes);
    }
    return ERR_OK;
}

/* ---- texts ---- */

static Err text_of_unused(const Job *j, int64_t id, TokenText *out)
{
    char *text;
    TRY(setup_array(j->a, 32, &text));
    *out = (TokenText){ text, snprintf(text, 32, "[PAD%lld]", (long long)id) };
    return ERR_OK;
}

static int compare(const void *x, const void *y)
{
    const TokenText *a = x, *b = y;
    const int order = memcmp(a->bytes, b->bytes, (size_t)(a->size < b->size ? a->size : b->size));
    return order ? order : (a->size > b->size) - (a->size < b->size);
}

/* llama.cpp finds tokens by their texts, which end where a 0 byte is. */
static Err check_texts(const Job *j)
{
    TokenText *sorted;
    TRY(setup_array(j->a, j->vocab, &sorted));
    memcpy(sorted, j->texts, (size_t)j->vocab * sizeof *sorted);
    qsort(sorted, (size_t)j->vocab, sizeof *sorted, compare);
    for (int64_t i = 0; i < j->vocab; i++) {
        const TokenText text = sorted[i];
        if (memchr(text.bytes, 0, (size_t)text.size)) return gguf_cannot("a token with a zero byte in it");
        if (i > 0 && same(text, sorted[i - 1]))
            return gguf_cannot("that two tokens have the text '%.*s'", text.size, text.bytes);
    }
    return ERR_OK;
}

/* ---- of bytes ---- */

/* In GPT-2's alphabet, in which a byte has at most two; returns where the text ends. */
static char *spell(TokenText bytes, char *out)
{
    for (int32_t i = 0; i < bytes.size; i++) out += utf8_put(out, alphabet_char((uint8_t)bytes.bytes[i]));
    return out;
}

static Err spell_tokens(const Job *j)
{
    int64_t room = 0;
    char *at;
    for (int64_t id = 0; id < j->vocab; id++)
        if (j->tokens[id].kind == TOKEN_PIECE) room += 2 * (int64_t)j->tokens[id].text.size;
    TRY(setup_array(j->a, room, &at));
    for (int64_t id = 0; id < j->vocab; id++) {
        if (j->tokens[id].kind != TOKEN_PIECE) continue;
        char *end = spell(j->tokens[id].text, at);
        j->texts[id] = (TokenText){ at, (int32_t)(end - at) };
        at = end;
    }
    return ERR_OK;
}

static Err spell_merges(const Job *j, const TokenText **out)
{
    TokenText *merges;
    int64_t room = 0;
    char *at;
    for (int64_t i = 0; i < j->merge_count; i++)
        room += 2 * ((int64_t)j->tokens[j->merges[i].left].text.size + j->tokens[j->merges[i].right].text.size) + 1;
    TRY(setup_array(j->a, room, &at));
    TRY(setup_array(j->a, j->merge_count, &merges));
    for (int64_t i = 0; i < j->merge_count; i++) {
        char *end = spell(j->tokens[j->merges[i].left].text, at);
        *end++ = ' ';
        end = spell(j->tokens[j->merges[i].right].text, end);
        merges[i] = (TokenText){ at, (int32_t)(end - at) };
        at = end;
    }
    *out = merges;
    return ERR_OK;
}

/* ERR_CONFIG: there is a token that no merges lead to, so that it matters whether whole pieces are taken first. */
static Err check_whole(const Job *j)
{
    TokenText *texts;
    BpeAlone *alone;
    TRY(setup_array(j->a, j->vocab, &texts));
    TRY(setup_array(j->a, j->vocab, &alone));
    for (int64_t id = 0; id < j->vocab; id++)
        if (j->tokens[id].kind == TOKEN_PIECE) texts[id] = j->tokens[id].text;
    TRY(vocabulary_alone(j->t, texts, j->vocab, alone));
    for (int64_t id = 0; id < j->vocab; id++)
        if (texts[id].size && alone[id].id != id)
            return gguf_cannot(
                "whether a piece that is a token is taken whole (ignore_merges) as this tokenizer does, and "
                "no merges lead to token %lld",
                (long long)id);
    return ERR_OK;
}

/* llama.cpp's name of a pattern, and whether it then takes whole pieces. */
static Err of_bytes(const Job *j, SplitKind split, GgufTokens *out)
{
    static const struct {
        const char *pre;
        bool whole;
    } names[] = { [SPLIT_GPT2] = { "gpt-2", false },   [SPLIT_LLAMA3] = { "llama-bpe", true },
                  [SPLIT_QWEN] = { "qwen2", false },   [SPLIT_O200K] = { "gpt-4o", false },
                  [SPLIT_TEKKEN] = { "tekken", true }, [SPLIT_DEEPSEEK] = { "deepseek-v3", false } };
    const bool whole = vocabulary_takes_whole(j->t);
    out->model = "gpt2";
    out->pre = names[split].pre;
    out->merge_count = j->merge_count;
    if (split == SPLIT_LLAMA3 && !whole) out->pre = "smaug-bpe"; /* the same pattern */
    else if (names[split].whole != whole) TRY(check_whole(j));
    TRY(spell_tokens(j));
    return spell_merges(j, &out->merges);
}

/* ---- of characters ---- */

static Err check_fallback(const Job *j)
{
    int bytes = 0;
    for (int64_t id = 0; id < j->vocab; id++) bytes += j->tokens[id].kind == TOKEN_BYTE;
    if (bytes != 256) return gguf_cannot("what becomes of characters whose bytes are no tokens (byte_fallback)");
    for (int64_t i = 0; i < j->merge_count; i++)
        if (j->tokens[j->merges[i].left].kind == TOKEN_BYTE || j->tokens[j->merges[i].right].kind == TOKEN_BYTE)
            return gguf_cannot("merges of bytes beside those of characters");
    return ERR_OK;
}

/* An added token is cut out of the text before blanks become marks, so what remains has it only if there is a mark in
 * it. */
static bool may_remain(VocabularyToken t)
{
    const bool added = t.kind == TOKEN_ADDED || t.kind == TOKEN_SPECIAL || t.kind == TOKEN_UNKNOWN;
    return !added || !t.text.bytes || has(t.text, BPE_BLANK);
}

static Err score(const Job *j, const float **out)
{
    float *scores;
    BpeAlone *alone;
    const bool whole = vocabulary_takes_whole(j->t);
    TRY(setup_array(j->a, j->vocab, &scores));
    TRY(setup_array(j->a, j->vocab, &alone));
    TRY(vocabulary_alone(j->t, j->texts, j->vocab, alone));
    for (int64_t id = 0; id < j->vocab; id++) {
        const bool reached = alone[id].id == id;
        scores[id] = reached && alone[id].rank >= 0 ? -(float)alone[id].rank : -(float)j->merge_count;
        if (reached || !may_remain(j->tokens[id])) continue;
        if (alone[id].symbols <= 2 || (whole && j->tokens[id].kind == TOKEN_PIECE))
            return gguf_cannot("that no merges lead to token %lld ('%.*s') from the two before it", (long long)id,
                               j->texts[id].size, j->texts[id].bytes);
    }
    *out = scores;
    return ERR_OK;
}

static Err of_characters(const Job *j, GgufTokens *out)
{
    out->model = "llama";
    if (j->merge_count > SCORES_MAX) return gguf_cannot("an order of more than 16777216 merges");
    TRY(check_fallback(j));
    return score(j, &out->scores);
}

/* ---- both ---- */

/* llama.cpp does not turn the marks of a user's token back into blanks, only those of a normal one. */
static int32_t type_of(VocabularyToken t, bool characters)
{
    static const int32_t types[] = {
        [TOKEN_UNUSED] = TYPE_UNUSED, [TOKEN_PIECE] = TYPE_NORMAL,    [TOKEN_BYTE] = TYPE_BYTE,
        [TOKEN_ADDED] = TYPE_USER,    [TOKEN_SPECIAL] = TYPE_CONTROL, [TOKEN_UNKNOWN] = TYPE_UNKNOWN
    };
    return characters && t.kind == TOKEN_ADDED && has(t.text, BPE_BLANK) ? TYPE_NORMAL : types[t.kind];
}

static Err read_tokens(Job *j, bool characters, GgufTokens *out)
{
    int32_t *types;
    TRY(setup_array(j->a, j->vocab, &j->tokens));
    TRY(setup_array(j->a, j->vocab, &j->texts));
    TRY(setup_array(j->a, j->vocab, &types));
    TRY(setup_array(j->a, j->merge_count, &j->merges));
    vocabulary_tokens(j->t, j->tokens);
    vocabulary_merges(j->t, j->merges);
    for (int64_t id = 0; id < j->vocab; id++) {
        const VocabularyToken token = j->tokens[id];
        types[id] = type_of(token, characters);
        j->texts[id] = token.text;
        if (token.kind == TOKEN_UNUSED) TRY(text_of_unused(j, id, &j->texts[id]));
        else if (!token.text.bytes) j->texts[id] = (TokenText){ END_OF_DOCUMENT, sizeof END_OF_DOCUMENT - 1 };
    }
    out->types = types;
    return ERR_OK;
}

/* Gives special tokens without an id the id of documents' end: where a file says none llama.cpp takes a number of its
 * own. */
static void find_ids(const Job *j, GgufTokens *out)
{
    static const char *const paddings[] = { "<pad>", "[PAD]", "<|pad|>" };
    out->bos = out->eos = out->unknown = out->padding = tokenizer_eod(j->t);
    int32_t before, behind;
    vocabulary_around(j->t, &before, &behind);
    out->add_bos = before >= 0;
    out->add_eos = behind >= 0;
    if (out->add_bos) out->bos = before;
    if (out->add_eos) out->eos = behind;
    for (int32_t id = 0; id < j->vocab; id++) {
        if (j->tokens[id].kind == TOKEN_UNKNOWN) out->unknown = id;
        for (size_t i = 0; i < sizeof paddings / sizeof *paddings; i++)
            if (j->tokens[id].kind == TOKEN_SPECIAL &&
                same(j->texts[id], (TokenText){ paddings[i], (int32_t)strlen(paddings[i]) }))
                out->padding = id;
    }
}

Err gguf_tokens(const Tokenizer *t, int64_t vocab, SetupArena *a, GgufTokens *out)
{
    SplitKind split;
    *out = (GgufTokens){ .model = "none" };
    if (!t) return ERR_OK;
    Job j = { .t = t, .vocab = vocab, .a = a, .merge_count = vocabulary_merge_count(t) };
    const bool bytes = vocabulary_pattern(t, &split), characters = vocabulary_is_marked(t, &out->prefix);
    if (!bytes && !characters) return gguf_cannot("how this tokenizer cuts texts into pieces (data.tokenizer)");
    if (tokenizer_vocab(t) > vocab) {
        err_set(ERR_CONFIG, "the tokenizer has ids up to %d, the model has %lld of them", tokenizer_vocab(t) - 1,
                (long long)vocab);
        return err_hint("put the tokenizer that the model was trained with where data.tokenizer says");
    }
    if (tokenizer_eod(t) < 0)
        return gguf_cannot("that no token ends a document: llama.cpp would take one all the same");
    TRY(check_added(&j, characters, out->prefix));
    TRY(read_tokens(&j, characters, out));
    TRY(bytes ? of_bytes(&j, split, out) : of_characters(&j, out));
    TRY(check_texts(&j));
    find_ids(&j, out);
    out->texts = j.texts;
    return ERR_OK;
}
