/*
 * data/tokenizer_json.c, GPT-2's pair of files. Input: encoder.json (its first '@' stands for the 256 byte tokens),
 * a 0 byte, vocab.bpe. The same vocabulary and merges as a tokenizer.json are accepted, too, and give a text the
 * same ids.
 */
#include "alphabet.h"

#include "base/file.h"
#include "data/tokenizer.h"

/* The lines of vocab.bpe as strings of JSON. */
static char *as_json(const char *vocab, const char *merges, size_t size)
{
    size_t room = strlen(vocab) + 8 * size + 512, n;
    char *out = malloc(room);
    const char *separator = "", *stop;
    if (!out) abort();
    n = (size_t)snprintf(out, room,
                         "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                         "\"model\":{\"type\":\"BPE\",\"vocab\":%s,\"merges\":[",
                         vocab);
    for (const char *line = merges, *end = merges + size; line < end; line = stop + 1) {
        stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        size_t length = (size_t)(stop - line) - (stop > line && stop[-1] == '\r');
        if (!length || (line == merges && length >= 8 && !memcmp(line, "#version", 8))) continue;
        n += (size_t)sprintf(out + n, "%s\"", separator);
        for (size_t i = 0; i < length; i++) {
            if (line[i] == '"' || line[i] == '\\') out[n++] = '\\';
            out[n++] = line[i];
        }
        out[n++] = '"';
        separator = ",";
    }
    sprintf(out + n, "]}}");
    return out;
}

static void check_same(const Tokenizer *t, const char *vocab, const char *merges, size_t size)
{
    static const char text[] = "Once upon a time, ab aab aaaa  bbb it's 12345 \xC3\xA9t\xC3\xA9\n\n abab";
    Tokenizer *other;
    TokenList a, b;
    const int mark = strncmp(vocab, "\xEF\xBB\xBF", 3) ? 0 : 3; /* a file may begin with it, a value may not */
    char *json = as_json(vocab + mark, merges, size);
    fuzz_write("other.json", json, strlen(json));
    Err err = tokenizer_open(fuzz_path("other.json"), &other);
    if (!err) err = tokenizer_encode(t, text, sizeof text - 1, &a);
    if (!err) err = tokenizer_encode(other, text, sizeof text - 1, &b);
    FUZZ_CHECK(!err, "%s: %s", err_message(), json);
    FUZZ_CHECK(a.count == b.count && !memcmp(a.ids, b.ids, (size_t)a.count * sizeof *a.ids), "other ids");
    FUZZ_CHECK(tokenizer_crc(t) == tokenizer_crc(other), "other tokens");
    free(a.ids);
    free(b.ids);
    tokenizer_close(other);
    free(json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Tokenizer *t;
    const uint8_t *end = memchr(data, 0, size);
    size_t n = end ? (size_t)(end - data) : size, vocab_size, rest = end ? size - n - 1 : 0;
    char *vocab = with_alphabet((const char *)data, n, &vocab_size),
         *merges = fuzz_text(data + size - rest, rest);
    if (file_make_dirs(fuzz_path("pair"))) abort();
    fuzz_write("pair/encoder.json", vocab, vocab_size);
    fuzz_write("pair/vocab.bpe", merges, rest);
    fuzz_memory_start();
    Err err = tokenizer_open(fuzz_path("pair"), &t);
    FUZZ_MEMORY_BOUND(vocab_size + rest, 4, FUZZ_JSON_BYTES + (2 << 20));
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    if (!err) {
        check_same(t, vocab, merges, rest);
        tokenizer_close(t);
    }
    free(vocab);
    free(merges);
    return 0;
}
