/*
 * `tokenize --decode`: the ids on stdin (cli/cmd_data.c) and their bytes. Input: the text. What is accepted, written
 * as numbers with blanks between, is read again to the same ids; ids of the byte tokenizer decode to as many bytes.
 */
#include "cli/cmd_data.c"
#include "fuzz.h"

static void check_decode(const int32_t *ids, int64_t count)
{
    Tokenizer *t;
    char *bytes;
    int64_t size, ends = 0;
    if (tokenizer_open("byte", &t)) abort();
    Err err = tokenizer_decode(t, ids, count, &bytes, &size);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    for (int64_t i = 0; i < count && !err; i++) {
        ends += ids[i] == tokenizer_eod(t);
        FUZZ_CHECK(ids[i] <= tokenizer_eod(t), "id %d", ids[i]);
    }
    if (!err) {
        FUZZ_CHECK(size == count - ends, "%lld bytes of %lld ids", (long long)size, (long long)count);
        free(bytes);
    }
    tokenizer_close(t);
}

static void check_again(const int32_t *ids, int64_t count)
{
    char *text = malloc(12 * (size_t)count + 1);
    int32_t *again;
    int64_t n = 0, count_again;
    if (!text) abort();
    text[0] = 0;
    for (int64_t i = 0; i < count; i++) n += sprintf(text + n, i ? " %d" : "%d", ids[i]);
    Err err = parse_ids(text, n, &again, &count_again);
    FUZZ_CHECK(!err, "%s: %s", err_message(), text);
    FUZZ_CHECK(count == count_again && !memcmp(ids, again, (size_t)count * sizeof *ids), "other ids: %s",
               text);
    free(again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = fuzz_text(data, size);
    int32_t *ids = NULL;
    int64_t count = 0;
    fuzz_memory_start();
    Err err = parse_ids(text, (int64_t)size, &ids, &count);
    FUZZ_MEMORY_BOUND(size, 4, 64);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    if (!err) {
        check_decode(ids, count);
        check_again(ids, count);
    }
    free(ids);
    free(text);
    return 0;
}
