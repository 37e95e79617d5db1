/*
 * Ids and merges against hashes of what the `tokenizers` package gave (test/golden/tokens.json, made by
 * test/tools/golden_tokens.py): on a text of everything that is tricky, and on files of this machine where they are
 * the same. Decoding gives every text back. MEGATRAIN_TOKENS=all: all the files and a million random strings.
 */
#include "test.h"

#include <utf8proc.h>

#include "base/json.h"
#include "base/utf8.h"
#include "data/tokenizer.h"
#include "scratch.h"

static bool all_of_it(void)
{
    const char *wanted = getenv("MEGATRAIN_TOKENS");
    return wanted && strcmp(wanted, "all") == 0;
}

static Json *golden(void)
{
    static Json *j;
    if (!j) OK(json_read_file("test/golden/tokens.json", 1 << 24, &j));
    return j;
}

static uint64_t hash_next(uint64_t h, uint64_t value) { return h * 6364136223846793005u + value + 1; }

static bool hash_is(uint64_t h, const Json *want)
{
    char text[17];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)h);
    return json_text(want, NULL) && strcmp(text, json_text(want, NULL)) == 0;
}

static uint64_t hash_bytes(const char *bytes, int64_t size)
{
    uint64_t h = 0;
    for (int64_t i = 0; i < size; i++) h = hash_next(h, (uint8_t)bytes[i]);
    return h;
}

static uint64_t hash_ids(const TokenList *list)
{
    uint64_t h = 0;
    for (int64_t i = 0; i < list->count; i++) h = hash_next(h, (uint64_t)list->ids[i]);
    return h;
}

/* ---- the text ---- */

static char *tricky;
static int64_t tricky_size;

static int64_t put_part(char *out, const Json *parts, const Json *ranges, uint64_t r)
{
    int64_t size;
    if (r % 8) {
        const char *part = json_text(json_at(parts, (int64_t)((r >> 8) % (uint64_t)json_count(parts))), &size);
        memcpy(out, part, (size_t)size);
        return size;
    }
    const Json *range = json_at(ranges, (int64_t)((r >> 8) % (uint64_t)json_count(ranges)));
    int64_t low = json_int(json_at(range, 0), 0), high = json_int(json_at(range, 1), 0);
    return utf8_put(out, (uint32_t)(low + (int64_t)((r >> 32) % (uint64_t)(high - low + 1))));
}

static void make_tricky(void)
{
    if (tricky) return;
    int64_t limit = json_int(json_get(golden(), "size"), 0);
    uint64_t state = (uint64_t)json_int(json_get(golden(), "seed"), 0);
    tricky = malloc((size_t)limit + 64);
    while (tricky_size < limit)
        tricky_size += put_part(tricky + tricky_size, json_get(golden(), "parts"), json_get(golden(), "ranges"),
                                test_rand(&state));
    CHECK(limit > 0 && hash_is(hash_bytes(tricky, tricky_size), json_get(golden(), "text")));
}

/* The tokenizer that golden_tokens.py trained, its text in memory. */
static char *trained;

static void make_trained(void)
{
    int64_t size;
    if (trained) return;
    make_tricky();
    write_bytes("tricky.txt", tricky, tricky_size);
    const char *input = in_dir("tricky.txt");
    int64_t vocab = json_int(json_get(golden(), "vocab"), 0);
    OK(tokenizer_train(&(TokenizerTrainOptions){ &input, 1, vocab, in_dir("trained.json"), 2 }, NULL));
    OK(file_read_all(in_dir("trained.json"), 1 << 24, &trained, &size));
    CHECK(hash_is(hash_bytes(trained, size), json_get(golden(), "trained")));
}

TEST(training_equals_package)
{
    make_trained();
}

/* A form of the trained tokenizer: other members around its model. */
static const char *make_form(const Json *form)
{
    static const char mark[] = "\"ignore_merges\": false", instead[] = "\"ignore_merges\": true ";
    char *model = strstr(trained, "\"model\": {"), *whole = strstr(trained, mark);
    CHECK(model && whole);
    if (json_is_true(json_get(form, "ignore_merges"))) memcpy(whole, instead, sizeof mark - 1);
    const char *head = json_text(json_get(form, "head"), NULL);
    char *text = malloc(strlen(head) + strlen(model) + 1);
    strcat(strcpy(text, head), model);
    memcpy(whole, mark, sizeof mark - 1);
    const char *path = write_text("form.json", text);
    free(text);
    return path;
}

/* Opens a tokenizer of the golden file; false if it is one of the shared ones and not here. */
static bool open_form(const char *name, const Json *form, Tokenizer **out)
{
    char path[256];
    make_trained();
    if (strncmp(name, "shared/", 7)) {
        OK(tokenizer_open(make_form(form), out));
        return true;
    }
    snprintf(path, sizeof path, "../shared/fixtures/tokenizers/%s", name + 7);
    if (!file_exists(path)) return false;
    OK(tokenizer_open(path, out));
    return true;
}

/* ---- ids, and back ---- */

/* A copy; in NFC, each run of valid UTF-8 by itself, if asked for. */
static char *copy_text(const char *text, int64_t size, bool nfc, int64_t *out_size)
{
    char *out = malloc((size_t)size * 3 + 1);
    int64_t n = 0;
    for (int64_t at = 0; at < size;) {
        int64_t valid = nfc ? utf8_valid_bytes(text + at, size - at) : 0;
        if (valid == 0) {
            out[n++] = text[at++];
            continue;
        }
        utf8proc_uint8_t *composed;
        utf8proc_ssize_t length = utf8proc_map((const utf8proc_uint8_t *)text + at, valid, &composed,
                                               UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        CHECK(length >= 0 && length <= 3 * valid);
        memcpy(out + n, composed, (size_t)length);
        free(composed);
        n += length, at += valid;
    }
    *out_size = n;
    return out;
}

/* Encodes into *ids and back again. (An added token may be spelled otherwise than in NFC.) */
static void round_trip(const Tokenizer *t, Encoder *e, bool nfc, const char *text, int64_t size, TokenList *ids)
{
    char *decoded;
    int64_t size_decoded, back_size, want_size, invalid = 0;
    ids->count = 0;
    OK(encoder_run(e, text, size, false, ids, &invalid));
    OK(tokenizer_decode(t, ids->ids, ids->count, &decoded, &size_decoded));
    char *back = copy_text(decoded, size_decoded, nfc, &back_size), *want = copy_text(text, size, nfc, &want_size);
    CHECK_MSG(back_size == want_size && memcmp(back, want, (size_t)want_size) == 0, "%lld bytes '%.40s'",
              (long long)size, text);
    free(want);
    free(back);
    free(decoded);
}

/* Files of this machine; returns how many are as they were. */
static int check_files(const char *name, const Tokenizer *t, Encoder *e, bool nfc, int64_t limit)
{
    const Json *files = json_get(golden(), "files");
    int same = 0;
    TokenList ids = { 0 };
    for (int64_t i = 0; i < json_count(files) && limit > 0; i++) {
        const Json *f = json_at(files, i), *want = json_get(json_get(f, "ids"), name);
        const char *path = json_text(json_get(f, "path"), NULL);
        char *text;
        int64_t size;
        if (!want || !file_exists(path) || file_read_all(path, 1 << 22, &text, &size)) continue;
        if (hash_is(hash_bytes(text, size), json_get(f, "bytes"))) {
            round_trip(t, e, nfc, text, size, &ids);
            CHECK_MSG(hash_is(hash_ids(&ids), want), "%s, %s", name, path);
            limit -= size;
            same++;
        }
        free(text);
    }
    free(ids.ids);
    return same;
}

TEST(ids_equal_package)
{
    const Json *forms = json_get(golden(), "tokenizers");
    CHECK(json_count(forms) == 7);
    for (void *it = json_iter(forms); it; it = json_next(forms, it)) {
        const char *name = json_iter_key(it);
        const Json *form = json_iter_value(it);
        Tokenizer *t;
        Encoder *e;
        TokenList ids = { 0 };
        if (!open_form(name, form, &t)) {
            printf("    %s: not here\n", name);
            continue;
        }
        OK(encoder_open(t, &e));
        OK(encoder_run(e, tricky, tricky_size, false, &ids, NULL));
        CHECK_MSG(hash_is(hash_ids(&ids), json_get(form, "ids")), "%s", name);
        bool nfc = strstr(name, "qwen");
        int files = check_files(name, t, e, nfc, all_of_it() ? INT64_MAX : 300000);
        printf("    %s: %lld ids, %d files\n", name, (long long)ids.count, files);
        free(ids.ids);
        encoder_close(e);
        tokenizer_close(t);
    }
}

/* Short ones of all kinds: any bytes, parts of the text with a damaged byte, parts as they are. */
static int64_t random_string(uint64_t *state, char *text)
{
    uint64_t kind = test_rand(state) % 3;
    int64_t n = (int64_t)(test_rand(state) % 64), at = (int64_t)(test_rand(state) % (uint64_t)(tricky_size - 64));
    if (n == 0) return 0;
    memcpy(text, tricky + at, (size_t)n);
    for (int64_t i = 0; kind == 0 && i < n; i++) text[i] = (char)test_rand(state);
    if (kind == 1) text[test_rand(state) % (uint64_t)n] ^= (char)(1 << test_rand(state) % 8);
    return n;
}

TEST(round_trip_of_random_strings)
{
    static const char *const names[] = { "gpt2", "llama", "qwen" };
    int64_t count = all_of_it() ? 1000000 : 10000;
    for (int k = 0; k < 3; k++) {
        Tokenizer *t;
        Encoder *e;
        TokenList ids = { 0 };
        char text[64];
        uint64_t state = 23 + (uint64_t)k;
        CHECK(open_form(names[k], json_get(json_get(golden(), "tokenizers"), names[k]), &t));
        OK(encoder_open(t, &e));
        for (int64_t i = 0; i < count; i++) round_trip(t, e, k == 2, text, random_string(&state, text), &ids);
        free(ids.ids);
        encoder_close(e);
        tokenizer_close(t);
    }
}

TEST_MAIN
