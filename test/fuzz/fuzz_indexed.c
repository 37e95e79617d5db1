/*
 * data/indexed.c. Input: the length of PREFIX.bin (2 bytes, little endian), PREFIX.bin, PREFIX.idx. In what is
 * accepted, sequences and documents tile the tokens; tokens written again are read again, and where the writer would
 * have made this pair (a sequence a document, its type of token), byte for byte.
 */
#include "fuzz.h"

#include "data/indexed.h"

static void check_tiling(const Indexed *x)
{
    int64_t at = 0, sequence = 0;
    for (int64_t s = 0; s < x->sequences; s++) {
        FUZZ_CHECK(indexed_start(x, s) == at && indexed_length(x, s) >= 0, "sequence %lld", (long long)s);
        at += indexed_length(x, s);
    }
    FUZZ_CHECK(at == x->tokens && indexed_start(x, x->sequences) == at, "%lld tokens", (long long)x->tokens);
    for (int64_t d = 0; d < x->documents; d++) {
        FUZZ_CHECK(indexed_document_end(x, d) >= sequence, "document %lld", (long long)d);
        sequence = indexed_document_end(x, d);
    }
    FUZZ_CHECK(sequence == x->sequences, "documents end at %lld", (long long)sequence);
}

static bool same_file(const char *a, const char *b)
{
    size_t n, m;
    char *x = fuzz_read(a, &n), *y = fuzz_read(b, &m);
    bool same = n == m && !memcmp(x, y, n);
    free(x);
    free(y);
    return same;
}

static void check_again(const Indexed *x, const int32_t *ids)
{
    IndexedWriter *w;
    Indexed again;
    bool ours = (x->type == TOKEN_U16 || x->type == TOKEN_I32) && x->documents == x->sequences;
    for (int64_t d = 0; d < x->documents; d++) ours = ours && indexed_document_end(x, d) == d + 1;
    for (int64_t s = 0; s < x->sequences; s++) ours = ours && indexed_length(x, s) > 0;
    Err err = indexed_create(fuzz_path("again"), x->type == TOKEN_U16 ? TOKEN_U16 : TOKEN_I32, &w);
    for (int64_t s = 0; s < x->sequences && !err; s++) {
        err = indexed_add_tokens(w, ids + indexed_start(x, s), indexed_length(x, s));
        if (!err) err = indexed_end_document(w);
    }
    if (!err) err = indexed_finish(w);
    if (!err) err = indexed_open(fuzz_path("again"), &again);
    FUZZ_CHECK(!err, "%s", err_message());
    int32_t *ids_again = malloc((size_t)x->tokens * sizeof *ids_again);
    if (!ids_again) abort();
    FUZZ_CHECK(again.tokens == x->tokens && !indexed_read(&again, 0, x->tokens, 0, ids_again), "%s",
               err_message());
    FUZZ_CHECK(!memcmp(ids, ids_again, (size_t)x->tokens * sizeof *ids), "other tokens");
    FUZZ_CHECK(!ours || (same_file("in.idx", "again.idx") && same_file("in.bin", "again.bin")),
               "other bytes");
    free(ids_again);
    indexed_close(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t bin = size < 2 ? 0 : data[0] + 256u * data[1], head = size < 2 ? size : 2;
    if (bin > size - head) bin = size - head;
    fuzz_write("in.bin", data + head, bin);
    fuzz_write("in.idx", data + head + bin, size - head - bin);
    Indexed x;
    fuzz_memory_start();
    Err err = indexed_open(fuzz_path("in"), &x);
    FUZZ_MEMORY_BOUND(0, 0, 1 << 14);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    if (err) return 0;
    check_tiling(&x);
    int32_t *ids = malloc((size_t)x.tokens * sizeof *ids);
    int64_t highest = -1;
    if (!ids) abort();
    err = indexed_read(&x, 0, x.tokens, 0, ids);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    FUZZ_CHECK(indexed_check(&x, 0, x.tokens, 0, &highest) == err, "reading and checking differ");
    for (int64_t i = 0; i < x.tokens && !err; i++) FUZZ_CHECK(ids[i] >= 0 && ids[i] <= highest, "%d", ids[i]);
    if (!err) check_again(&x, ids);
    free(ids);
    indexed_close(&x);
    return 0;
}
