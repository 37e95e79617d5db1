/* Reading token files; indexed_write.c writes them. */
#include "data/indexed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char magic[9] = "MMIDIDX\0"; /* its second zero belongs to it */

static const struct {
    const char *name;
    int size_bytes;
} types[] = {
    [TOKEN_U8] = { "u8", 1 },   [TOKEN_I8] = { "i8", 1 },   [TOKEN_I16] = { "i16", 2 },
    [TOKEN_I32] = { "i32", 4 }, [TOKEN_I64] = { "i64", 8 }, [TOKEN_U16] = { "u16", 2 },
};
enum { TYPE_COUNT = sizeof types / sizeof *types };

const char *token_type_name(TokenType type) { return types[type].name; }

TokenType indexed_type_for(int64_t vocab) { return vocab < INDEXED_U16_VOCAB ? TOKEN_U16 : TOKEN_I32; }

static int64_t load_i64(const Indexed *x, int64_t offset)
{
    int64_t v;
    memcpy(&v, (const char *)x->idx.data + offset, sizeof v);
    return v;
}

int64_t indexed_length(const Indexed *x, int64_t sequence)
{
    int32_t v;
    memcpy(&v, (const char *)x->idx.data + INDEXED_HEADER_BYTES + 4 * sequence, sizeof v);
    return v;
}

void indexed_fetch(const Indexed *x, int64_t sequence)
{
    __builtin_prefetch((const char *)x->idx.data + INDEXED_HEADER_BYTES + 4 * sequence);
}

static int64_t pointer_offset(const Indexed *x, int64_t sequence)
{
    return INDEXED_HEADER_BYTES + 4 * x->sequences + 8 * sequence;
}

static int64_t document_offset(const Indexed *x, int64_t entry)
{
    return INDEXED_HEADER_BYTES + 12 * x->sequences + 8 * entry;
}

int64_t indexed_start(const Indexed *x, int64_t sequence)
{
    return sequence == x->sequences ? x->tokens : load_i64(x, pointer_offset(x, sequence)) / x->token_bytes;
}

int64_t indexed_document_end(const Indexed *x, int64_t document)
{
    return load_i64(x, document_offset(x, document + 1));
}

/* ---- checks at opening ---- */

static Err make_again(void)
{
    return err_hint("make PREFIX.bin and PREFIX.idx again with `megatrain preprocess`, or copy both again");
}

static Err damaged(const Indexed *x, int64_t offset, const char *what)
{
    err_set(ERR_DATA, "token index '%s' is damaged at byte %lld: %s", x->idx.path, (long long)offset, what);
    return make_again();
}

/* Like damaged(), for one sequence or document. */
static Err damaged_item(const Indexed *x, int64_t offset, const char *item, int64_t number, const char *what)
{
    err_set(ERR_DATA, "token index '%s' is damaged at byte %lld: %s %lld %s", x->idx.path, (long long)offset, item,
            (long long)number, what);
    return make_again();
}

static Err check_type(Indexed *x)
{
    int type = ((const uint8_t *)x->idx.data)[17];
    if (type == 6 || type == 7) return damaged(x, 17, "its values are floating point numbers, not tokens");
    if (type >= TYPE_COUNT || types[type].size_bytes == 0) return damaged(x, 17, "the token type is unknown");
    x->type = (TokenType)type;
    x->token_bytes = types[type].size_bytes;
    return ERR_OK;
}

static Err check_header(Indexed *x)
{
    int64_t size = x->idx.size_bytes, bound = size / 4;
    if (size < INDEXED_HEADER_BYTES) return damaged(x, size, "the file is too short for a header");
    if (memcmp(x->idx.data, magic, sizeof magic) != 0) return damaged(x, 0, "it does not start with MMIDIDX");
    int64_t version = load_i64(x, 9), sequences = load_i64(x, 18), entries = load_i64(x, 26);
    if (version != INDEXED_VERSION) return damaged(x, 9, "the version is not 1");
    TRY(check_type(x));
    /* bounding both by the file's size first keeps the sum below from overflowing */
    if (sequences < 0 || sequences > bound) return damaged(x, 18, "more sequences than the file has room for");
    if (entries < 1 || entries > bound) return damaged(x, 26, "the number of documents does not fit the file");
    int64_t wanted = INDEXED_HEADER_BYTES + 12 * sequences + 8 * entries;
    if (sequences > 0 && size == wanted + sequences)
        return damaged(x, wanted, "it has sequence modes: multimodal data");
    if (size != wanted) return damaged(x, size < wanted ? size : wanted, "the file's size does not fit its counts");
    x->sequences = sequences;
    x->documents = entries - 1;
    return ERR_OK;
}

/* Lengths, offsets and the size of PREFIX.bin must tell the same story. */
static Err check_sequences(Indexed *x)
{
    int64_t at = 0;
    for (int64_t s = 0; s < x->sequences; s++) {
        int64_t length = indexed_length(x, s), pointer = load_i64(x, pointer_offset(x, s));
        if (length < 0) return damaged_item(x, INDEXED_HEADER_BYTES + 4 * s, "sequence", s, "has a negative length");
        if (pointer < 0 || pointer > x->bin.size_bytes)
            return damaged_item(x, pointer_offset(x, s), "sequence", s, "starts beyond the end of PREFIX.bin");
        if (pointer != at)
            return damaged_item(x, pointer_offset(x, s), "sequence", s, "does not start where the one before it ends");
        at += length * x->token_bytes;
    }
    if (at == x->bin.size_bytes) {
        x->tokens = at / x->token_bytes;
        return ERR_OK;
    }
    err_set(ERR_DATA, "token file '%s' has %lld bytes, its index '%s' describes %lld", x->bin.path,
            (long long)x->bin.size_bytes, x->idx.path, (long long)at);
    err_hint("one of the two is truncated or belongs to another pair");
    return ERR_DATA;
}

static Err check_documents(const Indexed *x)
{
    int64_t before = load_i64(x, document_offset(x, 0));
    if (before != 0) return damaged(x, document_offset(x, 0), "the document list does not start with 0");
    for (int64_t d = 1; d <= x->documents; d++) {
        int64_t end = load_i64(x, document_offset(x, d));
        if (end < before || end > x->sequences)
            return damaged_item(x, document_offset(x, d), "document", d - 1,
                                "ends before it begins or beyond the sequences");
        before = end;
    }
    if (before != x->sequences)
        return damaged(x, document_offset(x, x->documents), "the document list does not cover all sequences");
    return ERR_OK;
}

static Err map_file(const char *prefix, const char *suffix, FileMap *out)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s%s", prefix, suffix) >= (int)sizeof path)
        return err_set(ERR_DATA, "path is too long: '%s'", prefix);
    if (file_exists(path)) return err_as(file_map(path, out), ERR_DATA);
    err_set(ERR_DATA, "no token file '%s'", path);
    err_hint("a data set is named by its prefix; `megatrain preprocess --output PREFIX` makes one");
    return ERR_DATA;
}

static Err intact(const Indexed *x)
{
    TRY(map_intact(&x->bin));
    return map_intact(&x->idx);
}

/* ---- checksums, where PREFIX.crc has them ---- */

static Err sum_hint(void)
{
    return err_hint("copy PREFIX.bin, .idx and .crc again; if the first two were made anew by another program, remove "
                    "PREFIX.crc");
}

static Err wrong_sum(const FileMap *m, uint32_t found, uint32_t crc)
{
    err_set(ERR_DATA, "'%s' is damaged: its checksum is %08x, PREFIX.crc says %08x", m->path, found, crc);
    return sum_hint();
}

static Err wrong_size(const FileMap *m, const char *path, long long size_bytes)
{
    err_set(ERR_DATA, "'%s' has %lld bytes, '%s' says %lld", m->path, (long long)m->size_bytes, path, size_bytes);
    return sum_hint();
}

static Err check_sums(const char *prefix, Indexed *x)
{
    char path[4096], again[INDEXED_SUMS_MAX], *text;
    int64_t bytes;
    int n = 0;
    long long bin_bytes = -1, idx_bytes = -1;
    uint32_t crc = 0;
    snprintf(path, sizeof path, "%s.crc", prefix);
    if (!file_exists(path)) return ERR_OK;
    TRY_AS(ERR_DATA, file_read_all(path, sizeof again, &text, &bytes));
    x->made_with = sscanf(text, INDEXED_MADE_WITH, &x->tokenizer_crc) == 1;
    if (x->made_with) n = snprintf(again, sizeof again, INDEXED_MADE_WITH, x->tokenizer_crc);
    sscanf(n < bytes ? text + n : "", INDEXED_SUMS, &x->bin_crc, &bin_bytes, &crc, &idx_bytes);
    snprintf(again + n, sizeof again - (size_t)n, INDEXED_SUMS, x->bin_crc, bin_bytes, crc, idx_bytes);
    const bool same = bytes == (int64_t)strlen(again) && !memcmp(text, again, (size_t)bytes);
    free(text);
    if (!same) {
        err_set(ERR_DATA, "'%s' does not hold the two checksums of token files", path);
        return err_hint("remove it: it is not needed; `megatrain preprocess` writes it");
    }
    if (bin_bytes != x->bin.size_bytes) return wrong_size(&x->bin, path, bin_bytes);
    if (idx_bytes != x->idx.size_bytes) return wrong_size(&x->idx, path, idx_bytes);
    uint32_t found = crc32c(0, x->idx.data, (size_t)x->idx.size_bytes);
    if (found != crc) return wrong_sum(&x->idx, found, crc);
    x->summed = true;
    return ERR_OK;
}

Err indexed_check_tokenizer(const Indexed *x, uint32_t tokenizer_crc, const char *name)
{
    if (!x->made_with || x->tokenizer_crc == tokenizer_crc) return ERR_OK;
    err_set(ERR_DATA, "'%s' was made with another tokenizer than '%s': checksums %08x and %08x", x->bin.path, name,
            x->tokenizer_crc, tokenizer_crc);
    return err_hint("name the tokenizer it was made with, or preprocess the text again; if this one only has more ids, "
                    "remove the tokenizer's line from PREFIX.crc");
}

Err indexed_verify(const Indexed *x, bool *known)
{
    *known = x->summed;
    if (!x->summed) return ERR_OK;
    uint32_t found = crc32c(0, x->bin.data, (size_t)x->bin.size_bytes);
    TRY(intact(x));
    return found == x->bin_crc ? ERR_OK : wrong_sum(&x->bin, found, x->bin_crc);
}

static Err open_checked(const char *prefix, Indexed *x)
{
    TRY(map_file(prefix, ".idx", &x->idx));
    TRY(map_file(prefix, ".bin", &x->bin));
    TRY(check_header(x));
    TRY(check_sequences(x));
    TRY(check_documents(x));
    TRY(check_sums(prefix, x));
    TRY(intact(x));
    if (x->tokens == 0) return err_set(ERR_DATA, "token file '%s' holds no tokens", x->bin.path);
    return ERR_OK;
}

Err indexed_open(const char *prefix, Indexed *out)
{
    *out = (Indexed){ 0 };
    Err err = open_checked(prefix, out);
    if (err) indexed_close(out);
    return err;
}

void indexed_close(Indexed *x)
{
    file_unmap(&x->bin);
    file_unmap(&x->idx);
}

/* ---- tokens ---- */

/* Names the document and the place of the token at `at`. */
static Err bad_token(const Indexed *x, int64_t at, int64_t id, int64_t vocab)
{
    int64_t low = 0, high = x->sequences - 1; /* the last sequence that starts at or before `at` */
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (indexed_start(x, middle) <= at) low = middle;
        else high = middle - 1;
    }
    int64_t sequence = low, first_token = indexed_start(x, sequence);
    low = 0, high = x->documents - 1; /* the first document that ends after the sequence */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (indexed_document_end(x, middle) > sequence) high = middle;
        else low = middle + 1;
    }
    err_set(ERR_DATA, "'%s': token id %lld at byte %lld (document %lld, position %lld) %s %lld", x->bin.path,
            (long long)id, (long long)(at * x->token_bytes), (long long)low, (long long)(at - first_token),
            "is outside the vocabulary of", (long long)vocab);
    err_hint("the file was made with another tokenizer, or model.vocab is too small");
    return ERR_DATA;
}

/* Widens tokens to i64; -1 never stands for a value that did not fit, as negative ids are refused
 * too. */
static int64_t token_at(const Indexed *x, int64_t at)
{
    const char *p = (const char *)x->bin.data + at * x->token_bytes;
    int64_t v = 0;
    int16_t i16;
    int32_t i32;
    switch (x->type) {
    case TOKEN_U8: return (uint8_t)*p;
    case TOKEN_I8: return (int8_t)*p;
    case TOKEN_I16: memcpy(&i16, p, 2); return i16;
    case TOKEN_U16: memcpy(&i16, p, 2); return (uint16_t)i16;
    case TOKEN_I32: memcpy(&i32, p, 4); return i32;
    case TOKEN_I64: memcpy(&v, p, 8); return v;
    }
    return -1;
}

Err indexed_read(const Indexed *x, int64_t first, int64_t count, int64_t vocab, int32_t *out)
{
    int64_t limit = vocab > 0 ? vocab : INT32_MAX;
    ASSERT(first >= 0 && count >= 0 && first <= x->tokens - count);
    for (int64_t i = 0; i < count; i++) {
        int64_t id = token_at(x, first + i);
        if (id < 0 || id >= limit) return bad_token(x, first + i, id, limit);
        out[i] = (int32_t)id;
    }
    return intact(x);
}

Err indexed_check(const Indexed *x, int64_t first, int64_t count, int64_t vocab, int64_t *highest)
{
    int64_t limit = vocab > 0 ? vocab : INT32_MAX, most = 0;
    ASSERT(first >= 0 && count >= 0 && first <= x->tokens - count);
    for (int64_t i = first; i < first + count; i++) {
        int64_t id = token_at(x, i);
        if (id < 0 || id >= limit) return bad_token(x, i, id, limit);
        if (id > most) most = id;
    }
    if (highest) *highest = most;
    return intact(x);
}
