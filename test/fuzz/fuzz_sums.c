/*
 * data/indexed.c: PREFIX.crc beside a good pair of files. Input: its text. It is accepted if it is what the writer
 * would have written but for the tokenizer and for the checksum of PREFIX.bin, which indexed_verify compares.
 */
#include "fuzz.h"

#include "data/indexed.h"

enum { TOKENS = 5, BIN_BYTES = 2 * TOKENS, IDX_BYTES = 34 + 2 * 12 + 3 * 8 };
static uint32_t bin_crc, idx_crc;

static void write_pair(void)
{
    static const int32_t ids[TOKENS] = { 1, 2, 3, 4, 5 };
    IndexedWriter *w;
    size_t n, m;
    Err err = indexed_create(fuzz_path("in"), TOKEN_U16, &w);
    for (int i = 0; i < 2 && !err; i++) {
        err = indexed_add_tokens(w, ids + 2 * i, 2 + i);
        if (!err) err = indexed_end_document(w);
    }
    if (!err) err = indexed_finish(w);
    FUZZ_CHECK(!err, "%s", err_message());
    char *bin = fuzz_read("in.bin", &n), *idx = fuzz_read("in.idx", &m);
    FUZZ_CHECK(n == BIN_BYTES && m == IDX_BYTES, "%zu and %zu bytes", n, m);
    bin_crc = crc32c(0, bin, n);
    idx_crc = crc32c(0, idx, m);
    free(bin);
    free(idx);
}

/* The eight digits behind these words; false if they are others. */
static bool number(const uint8_t **at, const uint8_t *end, const char *words, uint32_t *value)
{
    static const char digits[] = "0123456789abcdef";
    const size_t n = strlen(words);
    const uint8_t *p = *at;
    if ((size_t)(end - p) < n + 8 || memcmp(p, words, n) != 0) return false;
    *value = 0;
    for (p += n; p < *at + n + 8; p++) {
        const char *digit = *p ? strchr(digits, *p) : NULL;
        if (!digit) return false;
        *value = 16 * *value + (uint32_t)(digit - digits);
    }
    *at = p;
    return true;
}

/* The number that the text says for PREFIX.bin, if it is the right text around it; perhaps with a tokenizer before. */
static bool is_right(const uint8_t *data, size_t size, uint32_t *said, const uint32_t **tokenizer)
{
    static uint32_t crc;
    char right[INDEXED_SUMS_MAX];
    const uint8_t *at = data, *end = data + size;
    *tokenizer = NULL;
    if (number(&at, end, "tokenizer crc32c ", &crc) && at < end && *at == '\n') {
        *tokenizer = &crc;
        data = ++at;
        size = (size_t)(end - at);
    }
    at = data;
    if (!number(&at, end, "bin crc32c ", said)) return false;
    snprintf(right, sizeof right, INDEXED_SUMS, *said, (long long)BIN_BYTES, idx_crc, (long long)IDX_BYTES);
    return size == strlen(right) && !memcmp(data, right, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool written;
    Indexed x;
    uint32_t said;
    const uint32_t *tokenizer;
    bool known;
    if (!written) write_pair();
    written = true;
    fuzz_write("in.crc", data, size);
    fuzz_memory_start();
    Err err = indexed_open(fuzz_path("in"), &x);
    FUZZ_MEMORY_BOUND(0, 0, 1 << 14);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    FUZZ_CHECK(is_right(data, size, &said, &tokenizer) == !err, "%s", err ? err_message() : "accepted");
    if (err) return 0;
    FUZZ_CHECK(x.summed && x.bin_crc == said, "%08x, not %08x", x.bin_crc, said);
    FUZZ_CHECK(x.made_with == !!tokenizer, "a tokenizer: %d", x.made_with);
    if (tokenizer) {
        FUZZ_CHECK(indexed_check_tokenizer(&x, *tokenizer, "it") == ERR_OK, "%s", err_message());
        FUZZ_CHECK(indexed_check_tokenizer(&x, *tokenizer ^ 1, "it") == ERR_DATA, "another one is as good");
    }
    err = indexed_verify(&x, &known);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    FUZZ_CHECK(known && !err == (said == bin_crc), "%08x, and it is %08x", said, bin_crc);
    indexed_close(&x);
    return 0;
}
