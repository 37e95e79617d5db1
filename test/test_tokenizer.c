/*
 * Tokenizers against golden ids made with other programs (when the fixtures are there), against
 * naive re-implementations of encoding and training that share no code with src/data, and with
 * damaged files.
 */
#include "test.h"

#include "base/json.h"
#include "base/utf8.h"
#include "data/pretoken.h"
#include "data/tokenizer.h"
#include "scratch.h"

#define FIXTURES "../shared/fixtures/tokenizers"

static bool same_ids(const TokenList *a, const TokenList *b)
{
    return a->count == b->count &&
           (a->count == 0 || memcmp(a->ids, b->ids, (size_t)a->count * sizeof *a->ids) == 0);
}

/* ---- golden ids ---- */

static void check_golden(const char *spec, const char *member)
{
    Json *golden;
    Tokenizer *t;
    if (!file_exists(FIXTURES "/golden.json")) SKIP("no " FIXTURES);
    OK(json_read_file(FIXTURES "/golden.json", 1 << 24, &golden));
    OK(tokenizer_open(spec, &t));
    CHECK(json_count(golden) > 20);
    for (int64_t i = 0; i < json_count(golden); i++) {
        const Json *want = json_get(json_at(golden, i), member);
        int64_t size, decoded_size;
        const char *text = json_text(json_get(json_at(golden, i), "text"), &size);
        TokenList got;
        char *decoded;
        OK(tokenizer_encode(t, text, size, &got));
        bool same = got.count == json_count(want);
        for (int64_t k = 0; same && k < got.count; k++)
            same = got.ids[k] == json_int(json_at(want, k), -1);
        CHECK_MSG(same, "text %lld: '%s'", (long long)i, text);
        OK(tokenizer_decode(t, got.ids, got.count, &decoded, &decoded_size));
        if (strcmp(member, "gpt2") == 0) /* the other one normalizes */
            CHECK(decoded_size == size && memcmp(decoded, text, (size_t)size) == 0);
        free(decoded);
        free(got.ids);
    }
    json_free(golden);
    tokenizer_close(t);
}

TEST(golden_gpt2)
{
    check_golden(FIXTURES "/gpt2", "gpt2");
}

TEST(golden_qwen3)
{
    check_golden(FIXTURES "/qwen3/tokenizer.json", "qwen3");
}

/* Half of the limit on a tree's memory is enough for them. */
TEST(real_files_fit_into_memory_twice)
{
    static const char *const files[] = { FIXTURES "/gpt2", FIXTURES "/qwen3/tokenizer.json" };
    const int64_t usual = json_spare_bytes;
    if (!file_exists(FIXTURES)) SKIP("no " FIXTURES);
    json_spare_bytes = usual / 2;
    for (int i = 0; i < 2; i++) {
        Tokenizer *t;
        OK(tokenizer_open(files[i], &t));
        tokenizer_close(t);
    }
    json_spare_bytes = 0;
    for (int i = 0; i < 2; i++) {
        Tokenizer *t;
        FAILS(tokenizer_open(files[i], &t), ERR_DATA, "MiB are allowed");
    }
    json_spare_bytes = usual;
}

TEST(gpt2_special_ids)
{
    Tokenizer *t;
    TokenList ids;
    if (!file_exists(FIXTURES "/gpt2")) SKIP("no " FIXTURES);
    OK(tokenizer_open(FIXTURES "/gpt2", &t));
    CHECK(tokenizer_vocab(t) == 50257 && tokenizer_eod(t) == 50256);
    OK(tokenizer_encode(t, "<|endoftext|>", 13, &ids));
    CHECK(ids.count == 7); /* plain text: the folder form names no special tokens */
    free(ids.ids);
    tokenizer_close(t);
}

static void check_qwen_special(const Tokenizer *t)
{
    TokenList ids;
    CHECK(tokenizer_vocab(t) == 151669 && tokenizer_eod(t) == 151643);
    OK(tokenizer_encode(t, "a<|im_start|>b", 14, &ids));
    CHECK(ids.count == 3 && ids.ids[1] == 151644);
    free(ids.ids);
}

/* ---- UTF-8 and pieces ---- */

TEST(utf8)
{
    static const struct {
        const char *text;
        int64_t valid; /* bytes before the first that is not */
    } cases[] = {
        { "", 0 },
        { "abc", 3 },
        { "\xC3\xA9", 2 },
        { "\xE2\x82\xAC", 3 },
        { "\xF0\x9F\x98\x80", 4 },
        { "a\x80", 1 },
        { "\xC0\x80", 0 },
        { "\xC1\xBF", 0 },
        { "\xE0\x9F\xBF", 0 },
        { "\xE0\xA0\x80", 3 },
        { "\xED\x9F\xBF", 3 },
        { "\xED\xA0\x80", 0 },
        { "\xF0\x8F\xBF\xBF", 0 },
        { "\xF4\x8F\xBF\xBF", 4 },
        { "\xF4\x90\x80\x80", 0 },
        { "\xF5\x80\x80\x80", 0 },
        { "ab\xE2\x82", 2 },
        { "12345678\xFF", 8 },
        { "1234567\xC3\xA9\xFF", 9 },
        { "\xE2\x28\xA1", 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_MSG(utf8_valid_bytes(cases[i].text, (int64_t)strlen(cases[i].text)) == cases[i].valid,
                  "case %zu", i);
    for (uint32_t c = 1; c < 0x110000; c += c < 0x900 ? 1 : 97) {
        char text[4];
        int n = utf8_put(text, c), back;
        bool surrogate = c >= 0xD800 && c < 0xE000;
        CHECK(utf8_char_bytes((uint8_t *)text, n) == (surrogate ? 0 : n));
        CHECK(utf8_get(text, &back) == c && back == n);
    }
}

TEST(pieces)
{
    static const struct {
        SplitKind kind;
        const char *text, *want; /* pieces, '|' between */
    } cases[] = {
        { SPLIT_GPT2, "Hello, world's  end", "Hello|,| world|'s| | end" },
        { SPLIT_GPT2, "I'M it's 1234567", "I|'|M| it|'s| 1234567" },
        { SPLIT_GPT2, "a\n\n b", "a|\n\n| b" },
        { SPLIT_GPT2, "x \t\n", "x| \t\n" },
        /* no-break space, next line, ideographic space are white space; U+180E and U+200B are not */
        { SPLIT_GPT2, "a\u00A0\u00A0b", "a|\u00A0|\u00A0|b" },
        { SPLIT_GPT2, "a\xC2\x85\u3000!", "a|\xC2\x85|\u3000|!" },
        { SPLIT_GPT2, "a\u180E\u200Bb", "a|\u180E\u200B|b" },
        { SPLIT_GPT2, "..\n\nx", "..|\n|\n|x" },
        { SPLIT_LLAMA3, "I'M it's 1234567", "I|'M| it|'s| |123|456|7" },
        { SPLIT_LLAMA3, "..\n\nx", "..\n\n|x" },
        { SPLIT_LLAMA3, "(abc) \n  d", "(abc|)| \n| | d" },
        { SPLIT_QWEN, "x 1234", "x| |1|2|3|4" },
        { SPLIT_QWEN, "don'T\t\tgo", "don|'T|\t|\tgo" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Splitter *s;
        SplitterWork *w;
        char got[128];
        bool is_match;
        int64_t size = (int64_t)strlen(cases[i].text), n = 0;
        OK(splitter_open(split_regex(cases[i].kind), &s));
        OK(splitter_work_open(s, &w));
        for (int64_t at = 0, end; at < size; at = end) {
            OK(splitter_next(w, cases[i].text, size, at, &end, &is_match));
            n += snprintf(got + n, sizeof got - (size_t)n, "%s%.*s", at ? "|" : "", (int)(end - at),
                          cases[i].text + at);
        }
        CHECK_MSG(strcmp(got, cases[i].want) == 0, "%s '%s': got '%s', want '%s'",
                  split_regex(cases[i].kind), cases[i].text, got, cases[i].want);
        splitter_work_close(w);
        splitter_close(s);
    }
}

/* Patterns that look for a line feed behind blanks go back over all of them. */
TEST(a_long_run_of_blanks)
{
    enum { N = 11 << 20 };
    char *text = malloc(N);
    memset(text, ' ', N);
    text[N - 1] = 'x';
    for (SplitKind kind = 0; kind <= SPLIT_TEKKEN; kind++) {
        Splitter *s;
        bool is_match;
        SplitterWork *w;
        int64_t end = 0, last = 0;
        OK(splitter_open(split_regex(kind), &s));
        OK(splitter_work_open(s, &w));
        OK(splitter_next(w, text, N, 0, &end, &is_match));
        OK(splitter_next(w, text, N, end, &last, &is_match));
        CHECK_MSG(end == N - 2 && last == N, "%s: %lld", split_regex(kind), (long long)end);
        splitter_work_close(w);
        splitter_close(s);
    }
    free(text);
}

/* Long texts without an end to a word: nothing is refused, however many steps another pattern would be allowed. */
TEST(long_words_in_published_patterns)
{
    static const char *const of[] = { "a",  "A",  "aA",     "Aa",      "7",      "!",   "\n", " \n",
                                      "'s", " a", "\u4E2D", "e\u0301", "\u0301", "\t!", "(a" };
    enum { BYTES = 64 << 10 };
    char *text = malloc(BYTES + 8);
    for (SplitKind kind = 0; kind < SPLIT_COUNT; kind++)
        for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
            int64_t size = 0;
            while (size < BYTES) size += sprintf(text + size, "%s", of[i]);
            Splitter *s;
            SplitterWork *w;
            bool is_match;
            int64_t end;
            OK(splitter_open(split_regex(kind), &s));
            OK(splitter_work_open(s, &w));
            for (int64_t at = 0; at < size; at = end) OK(splitter_next(w, text, size, at, &end, &is_match));
            splitter_work_close(w);
            splitter_close(s);
        }
    free(text);
}

/* A pattern in a group means the same and is not published, so its steps are counted. */
TEST(counted_patterns_cut_as_published_ones)
{
    static const char *const of[] = { "a", "B", "\u00E9", "\u4E2D", "\u0301", "7", "\u0669", " ", "\n", "\r", "\u00A0",
                                      "'s", "'T", "'ll", "!", "\u3002", "/", "\U0001F600", "\t", "\u01C5", "\u02B0" };
    uint64_t seed = 11;
    for (SplitKind kind = 0; kind < SPLIT_COUNT; kind++) {
        char group[1024], text[4096];
        int64_t size = 0, ends[2] = { 0 };
        bool matches[2];
        Splitter *s[2];
        SplitterWork *w[2];
        snprintf(group, sizeof group, "(?:%s)", split_regex(kind));
        while (size < 4000) size += sprintf(text + size, "%s", of[test_rand(&seed) % (sizeof of / sizeof *of)]);
        OK(splitter_open(split_regex(kind), &s[0]));
        OK(splitter_open(group, &s[1]));
        CHECK(splitter_kind(s[0]) == kind && splitter_kind(s[1]) == SPLIT_COUNT);
        for (int i = 0; i < 2; i++) OK(splitter_work_open(s[i], &w[i]));
        splitter_work_allow(w[1], size);
        for (int64_t at = 0; at < size; at = ends[0]) {
            for (int i = 0; i < 2; i++) OK(splitter_next(w[i], text, size, at, &ends[i], &matches[i]));
            CHECK_MSG(ends[0] == ends[1] && matches[0] == matches[1], "%s at %lld: %lld, %lld", group, (long long)at,
                      (long long)ends[0], (long long)ends[1]);
        }
        for (int i = 0; i < 2; i++) splitter_work_close(w[i]), splitter_close(s[i]);
    }
}

/* Each of them takes time that grows with a power of the text, in a way that PCRE2's match limit does not count. */
TEST(patterns_that_take_too_long)
{
    static const char *const cases[] = { "(?:[^~]|[^~])", "[^~]?",          "(?:[^~]|[^~][^~])?", "[^~]*[^~]*",
                                         "[^~]*?[^~]*?",  "[^~]*(?=[^~]*)", "[^~]*(?=[^~]*+)",    "" };
    enum { BYTES = 64 << 10 };
    char *text = malloc(BYTES), pattern[2048];
    memset(text, 'a', BYTES);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Splitter *s;
        SplitterWork *w;
        bool is_match;
        int64_t end = 0;
        Err err = ERR_OK;
        for (int n = *pattern = 0; n < (i < 3 ? 40 : 1); n++) strcat(pattern, cases[i]);
        strcat(pattern, i + 1 < sizeof cases / sizeof *cases ? "[~`]" : "[^~]++[~`]|(?:[^~]{255}~)");
        OK(splitter_open(pattern, &s));
        OK(splitter_work_open(s, &w));
        splitter_work_allow(w, BYTES);
        for (int64_t at = 0; at < BYTES && !err; at = end) err = splitter_next(w, text, BYTES, at, &end, &is_match);
        CHECK_MSG(err == ERR_DATA && strstr(err_message(), "its split pattern takes too long"), "%s: %s", pattern,
                  err_message());
        splitter_work_close(w);
        splitter_close(s);
    }
    free(text);
}

TEST(long_repeats_are_refused)
{
    static const char *const cases[] = { "a{256}", "a{1,256}", "a{256,}", "(?:a{9999999999})" };
    Splitter *s;
    for (int i = 0; i < 4; i++) FAILS(splitter_open(cases[i], &s), ERR_DATA, "repeats something more than 255 times");
    OK(splitter_open("a{1,255}b{2,}", &s));
    splitter_close(s);
}

/* ---- byte ---- */

TEST(byte_tokenizer)
{
    Tokenizer *t;
    Encoder *e;
    TokenList ids = { 0 };
    char text[300], *back;
    int64_t invalid = 0, size;
    uint64_t seed = 5;
    OK(tokenizer_open("byte", &t));
    CHECK(tokenizer_vocab(t) == 257 && tokenizer_eod(t) == 256);
    OK(encoder_open(t, &e));
    for (int i = 0; i < 300; i++) text[i] = (char)test_rand(&seed);
    OK(encoder_run(e, text, 300, false, &ids, &invalid));
    CHECK(ids.count == 300 && invalid > 50 && invalid < 200);
    for (int i = 0; i < 300; i++) CHECK(ids.ids[i] == (uint8_t)text[i]);
    OK(tokenizer_decode(t, ids.ids, ids.count, &back, &size));
    CHECK(size == 300 && memcmp(back, text, 300) == 0);
    free(back);
    ids.count = 0;
    FAILS(encoder_run(e, "abc\xE9", 4, false, &ids, NULL), ERR_DATA, "offset 3");
    int32_t bad[] = { 1, 257 };
    FAILS(tokenizer_decode(t, bad, 2, &back, &size), ERR_DATA, "token 257 at position 1");
    free(ids.ids);
    encoder_close(e);
    tokenizer_close(t);
}

/* ---- training, against a trainer that counts everything anew for each merge ---- */

static const char *const training_text =
    "the cat sat on the mat, the cat ate the rat; that's that.\n"
    "banana bandana ananas abcabcabc bcbcbc aaaaaaa aaa 1234 1233 122 \"quoted\\back\"\n"
    "low lower lowest newer newest wide wider widest na\xC3\xAFve caf\xC3\xA9 "
    "\xF0\x9F\x98\x80\xF0\x9F\x98\x80\n";

enum { NAIVE_MAX = 600 };

typedef struct {
    char text[24];
    int size;
} NaiveToken;

typedef struct {
    NaiveToken tokens[NAIVE_MAX];
    int left[NAIVE_MAX], right[NAIVE_MAX], merge_count, token_count;
} Naive;

/* Pieces of the text laid end to end as symbols, -1 after each. */
static int naive_symbols(const char *text, int *symbols)
{
    Splitter *s;
    SplitterWork *w;
    bool is_match;
    int n = 0;
    OK(splitter_open(split_regex(SPLIT_GPT2), &s));
    OK(splitter_work_open(s, &w));
    for (int64_t at = 0, end, size = (int64_t)strlen(text); at < size; at = end) {
        OK(splitter_next(w, text, size, at, &end, &is_match));
        for (; at < end; at++) symbols[n++] = (uint8_t)text[at];
        symbols[n++] = -1;
    }
    splitter_work_close(w);
    splitter_close(s);
    return n;
}

static int naive_compare(const NaiveToken *a, const NaiveToken *b)
{
    int n = a->size < b->size ? a->size : b->size, c = memcmp(a->text, b->text, (size_t)n);
    return c ? c : a->size - b->size;
}

/* The printable bytes of Latin-1 go first, then the others, then merges as they were made. */
static int naive_age(int id)
{
    if (id > 255) return 1000 + id;
    return (id > 32 && id < 127) || (id > 160 && id != 173) ? id : 256 + id;
}

static bool naive_before(int l, int r, int bl, int br)
{
    return naive_age(l) < naive_age(bl) || (l == bl && naive_age(r) < naive_age(br));
}

static int naive_merge(int *symbols, int n, int l, int r, int joined)
{
    int k = 0;
    for (int i = 0; i < n; i++) {
        bool hit = symbols[i] == l && i + 1 < n && symbols[i + 1] == r;
        symbols[k++] = hit ? joined : symbols[i];
        i += hit;
    }
    return k;
}

/* One merge; false when no pair occurs twice. */
static bool naive_step(Naive *v, int *symbols, int *n)
{
    static int counts[NAIVE_MAX][NAIVE_MAX];
    int bl = -1, br = -1, best = 1;
    memset(counts, 0, sizeof counts);
    for (int i = 0; i + 1 < *n; i++)
        if (symbols[i] >= 0 && symbols[i + 1] >= 0) counts[symbols[i]][symbols[i + 1]]++;
    for (int l = 0; l < v->token_count; l++)
        for (int r = 0; r < v->token_count; r++)
            if (counts[l][r] > best ||
                (counts[l][r] == best && bl >= 0 && naive_before(l, r, bl, br)))
                best = counts[l][r], bl = l, br = r;
    if (bl < 0) return false;
    NaiveToken joined = v->tokens[bl];
    memcpy(joined.text + joined.size, v->tokens[br].text, (size_t)v->tokens[br].size);
    joined.size += v->tokens[br].size;
    int id = v->token_count;
    for (int k = 0; k < v->token_count; k++)
        if (naive_compare(&joined, &v->tokens[k]) == 0) id = k;
    if (id == v->token_count) v->tokens[v->token_count++] = joined;
    v->left[v->merge_count] = bl, v->right[v->merge_count++] = br;
    *n = naive_merge(symbols, *n, bl, br, id);
    return true;
}

static void naive_train(Naive *v, const char *text, int vocab)
{
    static int symbols[4096];
    int n = naive_symbols(text, symbols);
    memset(v, 0, sizeof *v);
    for (int i = 0; i < 256; i++) v->tokens[i].text[0] = (char)i, v->tokens[i].size = 1;
    v->token_count = 256;
    while (v->token_count < vocab - 1 && naive_step(v, symbols, &n)) {}
}

/* Applies the merges one after the other, each from left to right. */
static void naive_encode(const Naive *v, const char *text, TokenList *out)
{
    static int symbols[4096];
    int n = naive_symbols(text, symbols);
    for (int m = 0; m < v->merge_count; m++) {
        NaiveToken joined = v->tokens[v->left[m]];
        memcpy(joined.text + joined.size, v->tokens[v->right[m]].text,
               (size_t)v->tokens[v->right[m]].size);
        joined.size += v->tokens[v->right[m]].size;
        int id = 0;
        while (naive_compare(&v->tokens[id], &joined) != 0) id++;
        n = naive_merge(symbols, n, v->left[m], v->right[m], id);
    }
    *out = (TokenList){ 0 };
    for (int i = 0; i < n; i++)
        if (symbols[i] >= 0) OK(token_list_add(out, symbols[i]));
}

static Naive naive;

static const char *trained(int64_t vocab, int64_t *got)
{
    const char *inputs[1] = { write_text("train.txt", training_text) };
    const char *output = in_dir("trained.json");
    OK(tokenizer_train(&(TokenizerTrainOptions){ inputs, 1, vocab, output, 1 }, got));
    return output;
}

TEST(training_equals_naive)
{
    static const int vocabs[] = { 257, 258, 275, 288, 400 }; /* the text has no more than 290 */
    for (int i = 0; i < 5; i++) {
        int vocab = vocabs[i];
        Tokenizer *t;
        int64_t got;
        OK(tokenizer_open(trained(vocab, &got), &t));
        naive_train(&naive, training_text, vocab);
        CHECK(got == naive.token_count + 1 && tokenizer_vocab(t) == got &&
              tokenizer_eod(t) == got - 1);
        for (int id = 0; id < naive.token_count; id++) {
            int32_t size;
            const char *bytes = tokenizer_bytes(t, id, false, &size);
            CHECK_MSG(bytes && size == naive.tokens[id].size &&
                          memcmp(bytes, naive.tokens[id].text, (size_t)size) == 0,
                      "vocab %d, id %d: '%.*s' want '%.*s'", vocab, id, size, bytes,
                      naive.tokens[id].size, naive.tokens[id].text);
        }
        tokenizer_close(t);
    }
}

/* Cut into many chunks, the same file to the byte: at ends of words, with invalid bytes, without any good place. */
TEST(training_ignores_threads)
{
    enum { N = 3 << 19 };
    char *text = malloc(2 * N), *files[3];
    const char *path = in_dir("big.txt"), *out[3] = { in_dir("t1.json"), in_dir("t2.json"), in_dir("t5.json") };
    static const int threads[3] = { 1, 2, 5 };
    static const char *const words[] = { "the ", "cat\n", "cats", "  ", "1", ", ", "\xC3\xA9t\xC3\xA9 ", "\xFF", "'s" };
    uint64_t seed = 4;
    int64_t n = 0, sizes[3];
    while (n < N) {
        const char *word = words[test_rand(&seed) % (sizeof words / sizeof *words)];
        memcpy(text + n, word, strlen(word));
        n += (int64_t)strlen(word);
        if (test_rand(&seed) % 4 == 0) text[n++] = (char)('a' + test_rand(&seed) % 26);
    }
    for (int64_t end = n + (N >> 1); n < end; n++) text[n] = "-x"[n % 2];
    OK(file_replace(path, text, n));
    for (int i = 0; i < 3; i++) {
        OK(tokenizer_train(&(TokenizerTrainOptions){ &path, 1, 1000, out[i], threads[i] }, NULL));
        OK(file_read_all(out[i], 1 << 24, &files[i], &sizes[i]));
        CHECK(sizes[i] == sizes[0] && memcmp(files[i], files[0], (size_t)sizes[0]) == 0);
    }
    for (int i = 0; i < 3; i++) free(files[i]);
    free(text);
}

TEST(training_stops_early_and_ignores_file_order)
{
    int64_t got, again;
    const char *a = write_text("a.txt", "one two two three three three\n");
    const char *b = write_text("b.txt", "four four four four one\n"), *forth = in_dir("f.json"),
               *back = in_dir("g.json");
    const char *ab[] = { a, b }, *ba[] = { b, a };
    OK(tokenizer_train(&(TokenizerTrainOptions){ ab, 2, 5000, forth, 1 }, &got));
    OK(tokenizer_train(&(TokenizerTrainOptions){ ba, 2, 5000, back, 3 }, &again));
    CHECK(got == again && got > 260 && got < 300);
    char *x, *y;
    int64_t nx, ny;
    OK(file_read_all(forth, 1 << 20, &x, &nx));
    OK(file_read_all(back, 1 << 20, &y, &ny));
    CHECK(nx == ny && memcmp(x, y, (size_t)nx) == 0);
    free(x);
    free(y);
    const char *none[] = { in_dir("missing") }, *empty[] = { write_text("empty.txt", "") };
    FAILS(tokenizer_train(&(TokenizerTrainOptions){ none, 1, 300, forth, 2 }, NULL), ERR_DATA,
          "missing");
    FAILS(tokenizer_train(&(TokenizerTrainOptions){ empty, 1, 300, forth, 2 }, NULL), ERR_DATA,
          "no text");
    FAILS(tokenizer_train(&(TokenizerTrainOptions){ ab, 2, 256, forth, 2 }, NULL), ERR_CONFIG, "256");
}

/* One word of one letter: every merge doubles the longest token. */
TEST(training_finds_tokens_of_any_length)
{
    enum { N = 300000 };
    char *text = malloc(N + 1), *back;
    int64_t vocab, size;
    Tokenizer *t;
    TokenList ids;
    memset(text, 'a', N);
    text[N] = 0;
    const char *path = write_text("letter.txt", text), *out = in_dir("letter.json");
    OK(tokenizer_train(&(TokenizerTrainOptions){ &path, 1, 300, out, 1 }, &vocab));
    OK(tokenizer_open(out, &t));
    CHECK(tokenizer_vocab(t) == vocab);
    OK(tokenizer_encode(t, text, N, &ids));
    CHECK_MSG(ids.count < 10, "%lld ids", (long long)ids.count);
    OK(tokenizer_decode(t, ids.ids, ids.count, &back, &size));
    CHECK(size == N && memcmp(back, text, N) == 0);
    free(ids.ids);
    free(back);
    free(text);
    tokenizer_close(t);
}

/* ---- encoding ---- */

TEST(encoding_equals_naive)
{
    static const char *const parts[] = { "the", "cat", " ",   "an", "aaaa",     "bc",
                                         "\n",  "12",  "est", "!",  "\xC3\xA9", "w" };
    Tokenizer *t;
    int64_t got;
    uint64_t seed = 1;
    OK(tokenizer_open(trained(290, &got), &t));
    naive_train(&naive, training_text, 290);
    for (int round = 0; round < 200; round++) {
        char text[512] = "";
        for (int k = 0, n = (int)(test_rand(&seed) % 40); k < n; k++)
            strcat(text, parts[test_rand(&seed) % (sizeof parts / sizeof *parts)]);
        TokenList want, ids;
        naive_encode(&naive, text, &want);
        OK(tokenizer_encode(t, text, (int64_t)strlen(text), &ids));
        CHECK_MSG(same_ids(&ids, &want), "'%s'", text);
        free(want.ids);
        free(ids.ids);
    }
    tokenizer_close(t);
}

TEST(round_trip_of_any_bytes)
{
    Tokenizer *t;
    Encoder *e;
    int64_t got, size;
    uint64_t seed = 9;
    OK(tokenizer_open(trained(290, &got), &t));
    OK(encoder_open(t, &e));
    for (int round = 0; round < 300; round++) {
        char text[256], *back;
        int64_t n = (int64_t)(test_rand(&seed) % sizeof text), invalid = 0;
        for (int64_t i = 0; i < n; i++)
            text[i] =
                round % 2 ? (char)test_rand(&seed) : "ab \n\xC3\xA9\xF0\x9F"[test_rand(&seed) % 8];
        TokenList ids = { 0 };
        OK(encoder_run(e, text, n, false, &ids, &invalid));
        OK(tokenizer_decode(t, ids.ids, ids.count, &back, &size));
        CHECK(size == n && memcmp(back, text, (size_t)n) == 0);
        free(back);
        free(ids.ids);
    }
    encoder_close(e);
    tokenizer_close(t);
}

TEST(long_word_is_not_quadratic)
{
    enum { N = 1 << 20 };
    Tokenizer *t;
    int64_t got, size;
    char *text = malloc(N + 1), *back;
    TokenList ids;
    OK(tokenizer_open(trained(290, &got), &t));
    for (int i = 0; i < N; i++) text[i] = "aabanana"[i % 8];
    double start = test_now();
    OK(tokenizer_encode(t, text, N, &ids));
    CHECK_MSG(test_now() - start < 20, "%.1f s", test_now() - start); /* quadratic would be hours */
    OK(tokenizer_decode(t, ids.ids, ids.count, &back, &size));
    CHECK(size == N && memcmp(back, text, N) == 0 && ids.count < N / 8 * 6);
    memset(text, ' ', N); /* the look-ahead rule on a megabyte of blanks */
    free(ids.ids);
    OK(tokenizer_encode(t, text, N, &ids));
    CHECK(ids.count > 0);
    free(ids.ids);
    free(back);
    free(text);
    tokenizer_close(t);
}

/* The trained tokenizer with NFC and added tokens: of all flags, or such as only composing makes. */
static const char *flagged(const char *more)
{
    static const char mark[] = "\"added_tokens\": [", none[] = "\"normalizer\": null";
    char *text, *made;
    int64_t size, got;
    OK(file_read_all(trained(290, &got), 1 << 20, &text, &size));
    const char *at = strstr(text, mark), *nfc = strstr(text, none);
    CHECK(at && nfc > at);
    at += strlen(mark);
    CHECK(asprintf(&made, "%.*s%s%.*s\"normalizer\": {\"type\": \"NFC\"}%s", (int)(at - text), text, more,
                   (int)(nfc - at), at, nfc + strlen(none)) > 0);
    const char *path = write_text("flagged.json", made);
    free(text);
    free(made);
    return path;
}

static const char all_flags[] = "{\"id\":400,\"content\":\"cat\",\"rstrip\":true},"
                                "{\"id\":401,\"content\":\"..\",\"lstrip\":true,\"normalized\":true},"
                                "{\"id\":402,\"content\":\" A\",\"single_word\":true},"
                                "{\"id\":403,\"content\":\"s \",\"normalized\":true,\"rstrip\":true},"
                                "{\"id\":404,\"content\":\"\\n\",\"lstrip\":true,\"rstrip\":true},"
                                "{\"id\":405,\"content\":\"\\u5b57\\u3002\"},";
static const char composed[] = "{\"id\":400,\"content\":\"\\ud55c\",\"normalized\":true,\"rstrip\":true},"
                               "{\"id\":401,\"content\":\"\\u03a9\",\"normalized\":true,\"rstrip\":true},"
                               "{\"id\":402,\"content\":\"\\uff0c\",\"single_word\":true},";

TEST(cuts_change_nothing)
{
    static const char *const parts[] = { "cat",
                                         "s",
                                         "'s ",
                                         " ",
                                         "\n",
                                         "..",
                                         "12",
                                         "\xC3\xA9",
                                         "\xCC\x81",
                                         "<|x y|>",
                                         "<|x",
                                         " y|>",
                                         "A",
                                         "\xE5\xAD\x97",
                                         "\xE3\x80\x82",
                                         "\xEF\xBC\x8C",
                                         "\xED\x95\x98\xE1\x86\xAB",
                                         "\xE2\x84\xA6",
                                         "\xD0\xB6",
                                         "\xD9\x86",
                                         ",",
                                         "\xE3\x80\x80",
                                         "\xE3\x81\x8B",
                                         "\xE3\x82\x99",
                                         "\xCC\xB8",
                                         "\xE2\x81\x87",
                                         "\xC2\xA0",
                                         "\xF0\x9D\x90\x80" };
    static const char *const specs[] = { FIXTURES "/qwen3/tokenizer.json", "trained", "byte", all_flags, composed };
    uint64_t seed = 3;
    int64_t got;
    for (int s = 0; s < 5; s++) {
        Tokenizer *t;
        int64_t cuts = 0;
        if (s == 0 && !file_exists(specs[s])) continue;
        OK(tokenizer_open(s == 1 ? trained(290, &got) : s >= 3 ? flagged(specs[s]) : specs[s], &t));
        if (s == 0) check_qwen_special(t);
        for (int round = 0; round < 600; round++) {
            char text[512] = "";
            for (int k = 0, n = 1 + (int)(test_rand(&seed) % 40); k < n; k++)
                strcat(text, parts[test_rand(&seed) % (sizeof parts / sizeof *parts)]);
            TokenList whole, first, rest;
            int64_t size = (int64_t)strlen(text), cut = tokenizer_cut(t, text, size);
            CHECK(cut >= 0 && cut < size);
            cuts += cut > 0;
            OK(tokenizer_encode(t, text, size, &whole));
            OK(tokenizer_encode(t, text, cut, &first));
            OK(tokenizer_encode(t, text + cut, size - cut, &rest));
            for (int64_t i = 0; i < rest.count; i++) OK(token_list_add(&first, rest.ids[i]));
            CHECK_MSG(same_ids(&whole, &first), "'%s' at %lld", text, (long long)cut);
            free(whole.ids);
            free(first.ids);
            free(rest.ids);
        }
        CHECK_MSG(cuts > 50, "%s: %lld cuts", specs[s], (long long)cuts);
        tokenizer_close(t);
    }
}

TEST_MAIN
