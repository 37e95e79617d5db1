/*
 * data/encode.c on any bytes. The first byte chooses the tokenizer: `byte`, a small vocabulary with the pattern of
 * GPT-2, Llama 3 or Qwen (NFC), or one of characters, with a blank in front of each piece or of the first; added tokens
 * in them. Where nothing rewrites the text, the ids decode to the same bytes; every byte that is not UTF-8 is counted,
 * and a text cut where tokenizer_cut says gives the same ids.
 */
#include "alphabet.h"

#include "data/tokenizer.h"

enum { NFC = 3, LEGACY, FIRST, KINDS };
static Tokenizer *tokenizers[KINDS];
static Encoder *encoders[KINDS];

static const char *const llama3 =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| "
    "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+";
static const char *const qwen =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| "
    "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+";

static void open_kind(int kind)
{
    char json[1 << 14], pre[2048] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}";
    if (kind > 1)
        snprintf(
            pre, sizeof pre,
            "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"%s\"},"
            "\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":"
            "false}]}",
            kind == 2 ? llama3 : qwen);
    int n = snprintf(
        json, sizeof json,
        "{\"normalizer\":%s,\"pre_tokenizer\":%s,\"added_tokens\":[{\"id\":261,\"content\":\"<|e|>\"},"
        "{\"id\":262,\"content\":\"<|e|><|e|>\"},{\"id\":263,\"content\":\"\\u00e9!\",\"normalized\":true}],"
        "\"model\":{\"type\":\"BPE\",\"ignore_merges\":%s,\"vocab\":{%s,\"ab\":256,\"aba\":257,\"aa\":258,"
        "\"\\u0120a\":259,\"\\u00c3\\u00a9\":260},\"merges\":[\"a b\",\"a a\",\"ab a\",\"\\u0120 a\","
        "\"\\u00c3 \\u00a9\"]}}",
        kind == NFC ? "{\"type\":\"NFC\"}" : "null", pre, kind == 2 ? "true" : "false", alphabet_members());
    fuzz_write("kind.json", json, (size_t)n);
    Err err = tokenizer_open(kind ? fuzz_path("kind.json") : "byte", &tokenizers[kind]);
    if (!err) err = encoder_open(tokenizers[kind], &encoders[kind]);
    FUZZ_CHECK(!err, "%s", err_message());
}

static void open_characters(int kind)
{
    char json[1 << 14];
    int n =
        sprintf(json,
                "{\"normalizer\":%s,\"pre_tokenizer\":%s,\"decoder\":{\"type\":\"Fuse\"},\"added_tokens\":["
                "{\"id\":300,\"content\":\"<|e|>\"},{\"id\":301,\"content\":\"bb\",\"normalized\":true}],"
                "\"model\":{\"byte_fallback\":true,\"merges\":[\"a b\",\"\u2581 a\",\"ab a\"],\"vocab\":{",
                kind == FIRST ? "null"
                              : "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"\u2581\"},"
                                "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\u2581\"}]}",
                kind == FIRST ? "{\"type\":\"Metaspace\",\"replacement\":\"\u2581\",\"prepend_scheme\":\"first\"}"
                              : "null");
    for (int i = 0; i < 256; i++) n += sprintf(json + n, "\"<0x%02X>\":%d,", (unsigned)i, i);
    n += sprintf(json + n, "\"a\":256,\"b\":257,\"\u2581\":258,\"ab\":259,\"\u2581a\":260,\"aba\":261}}}");
    fuzz_write("kind.json", json, (size_t)n);
    Err err = tokenizer_open(fuzz_path("kind.json"), &tokenizers[kind]);
    if (!err) err = encoder_open(tokenizers[kind], &encoders[kind]);
    FUZZ_CHECK(!err, "%s", err_message());
}

static int64_t count_invalid(const char *text, int64_t size)
{
    int64_t n = 0;
    for (int64_t at = utf8_valid_bytes(text, size); at < size; at += utf8_valid_bytes(text + at, size - at))
        at++, n++;
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size) return 0;
    int kind = data[0] % KINDS;
    for (int i = 0; i < KINDS; i++)
        if (!tokenizers[i]) (i >= LEGACY ? open_characters : open_kind)(i);
    const Tokenizer *t = tokenizers[kind];
    Encoder *e = encoders[kind];
    char *text = fuzz_text(data + 1, size - 1), *back;
    int64_t n = (int64_t)size - 1, invalid = 0, back_size;
    TokenList ids = { 0 }, parts = { 0 };
    fuzz_memory_start();
    Err err = encoder_run(e, text, n, false, &ids, &invalid);
    /* 28 bytes of work a byte of the longest word, and an id, in an array that is being doubled. Three bytes may come
     * of one by NFC, which needs 12 for it, or as blanks are replaced: that is in three more such arrays */
    FUZZ_MEMORY_BOUND(n, kind >= NFC ? 3 * 40 + 3 * 9 : 40, 1 << 12);
    FUZZ_CHECK(!err, "%s", err_message());
    FUZZ_CHECK(invalid == count_invalid(text, n), "%lld bytes are not UTF-8", (long long)invalid);
    err = tokenizer_decode(t, ids.ids, ids.count, &back, &back_size);
    FUZZ_CHECK(!err, "%s", err_message());
    if (kind < NFC) FUZZ_CHECK(back_size == n && !memcmp(back, text, (size_t)n), "another text");
    int64_t cut = tokenizer_cut(t, text, n);
    FUZZ_CHECK(cut == 0 || (cut > 0 && cut < n), "cut at %lld", (long long)cut);
    if (!invalid) {
        err = encoder_run(e, text, cut, false, &parts, NULL);
        if (!err) err = encoder_run(e, text + cut, n - cut, cut > 0, &parts, NULL);
        FUZZ_CHECK(!err, "%s", err_message());
        FUZZ_CHECK(parts.count == ids.count &&
                       (!ids.count || !memcmp(parts.ids, ids.ids, (size_t)ids.count * sizeof *ids.ids)),
                   "other ids after a cut at %lld", (long long)cut);
    }
    free(back);
    free(ids.ids);
    free(parts.ids);
    free(text);
    return 0;
}
