/*
 * The stages of a tokenizer.json against the `tokenizers` package (test/golden/stages.json, made by
 * test/tools/golden_stages.py): normalizers, pre-tokenizers, added tokens, models of bytes and of characters, decoders;
 * and that a text which is cut where tokenizer_cut says has the ids of the whole.
 */
#include "test.h"

#include "base/json.h"
#include "base/utf8.h"
#include "data/tokenizer.h"
#include "scratch.h"

static Json *golden(void)
{
    static Json *j;
    if (!j) OK(json_read_file("test/golden/stages.json", 1 << 24, &j));
    return j;
}

static const char *text_of(const Json *j) { return json_text(j, NULL); }

/* The file of a form, with its model in the place of the mark. */
static const char *make_form(const Json *form)
{
    static const char mark[] = "#MODEL#";
    const char *text = text_of(json_get(form, "text")), *at = strstr(text, mark);
    const char *model = text_of(json_get(json_get(golden(), "models"), text_of(json_get(form, "model"))));
    char *whole;
    CHECK(at && model);
    CHECK(asprintf(&whole, "%.*s%s%s", (int)(at - text), text, model, at + strlen(mark)) > 0);
    const char *path = write_text("form.json", whole);
    free(whole);
    return path;
}

static void check_edge(const char *name, const Tokenizer *t, const Json *form, int64_t i)
{
    int64_t size, back_size, n = 0;
    const char *text = json_text(json_at(json_get(golden(), "edges"), i), &size);
    const char *want = text_of(json_at(json_get(form, "edges"), i));
    const char *want_back = text_of(json_at(json_get(form, "back"), i));
    char got[1024] = "", *back;
    TokenList ids;
    OK(tokenizer_encode(t, text, size, &ids));
    for (int64_t k = 0; k < ids.count; k++) n += sprintf(got + n, k ? " %d" : "%d", ids.ids[k]);
    CHECK_MSG(strcmp(got, want) == 0, "%s, '%s': got %s, want %s", name, text, got, want);
    OK(tokenizer_decode(t, ids.ids, ids.count, &back, &back_size));
    CHECK_MSG(strcmp(back, want_back) == 0, "%s, '%s': got '%s' back, want '%s'", name, text, back, want_back);
    free(back);
    free(ids.ids);
}

static uint64_t hash_next(uint64_t h, uint64_t value) { return h * 6364136223846793005u + value + 1; }

static void check_texts(const char *name, const Tokenizer *t, const Json *form)
{
    const Json *texts = json_get(golden(), "texts");
    uint64_t h = 0;
    char got[20];
    for (int64_t i = 0; i < json_count(texts); i++) {
        int64_t size;
        const char *text = json_text(json_at(texts, i), &size);
        TokenList ids;
        OK(tokenizer_encode(t, text, size, &ids));
        for (int64_t k = 0; k < ids.count; k++) h = hash_next(h, (uint64_t)ids.ids[k]);
        h = hash_next(h, UINT64_MAX);
        free(ids.ids);
    }
    snprintf(got, sizeof got, "%016llx", (unsigned long long)h);
    CHECK_MSG(strcmp(got, text_of(json_get(form, "ids"))) == 0, "%s: other ids of the random texts", name);
}

TEST(ids_and_texts_equal_package)
{
    const Json *forms = json_get(golden(), "forms"), *edges = json_get(golden(), "edges");
    CHECK(json_count(forms) > 35 && json_count(edges) > 30);
    for (void *it = json_iter(forms); it; it = json_next(forms, it)) {
        Tokenizer *t;
        OK(tokenizer_open(make_form(json_iter_value(it)), &t));
        for (int64_t i = 0; i < json_count(edges); i++) check_edge(json_iter_key(it), t, json_iter_value(it), i);
        check_texts(json_iter_key(it), t, json_iter_value(it));
        tokenizer_close(t);
    }
}

/* Two or three texts of the golden file joined, cut once and again. */
static int check_cuts(const char *name, const Tokenizer *t, Encoder *e, const char *text, int64_t size)
{
    TokenList whole = { 0 }, parts = { 0 };
    int64_t cut = tokenizer_cut(t, text, size), earlier = cut > 0 ? tokenizer_cut(t, text, cut) : 0;
    OK(encoder_run(e, text, size, false, &whole, NULL));
    if (earlier > 0) OK(encoder_run(e, text, earlier, false, &parts, NULL));
    if (cut > 0) OK(encoder_run(e, text + earlier, cut - earlier, earlier > 0, &parts, NULL));
    OK(encoder_run(e, text + cut, size - cut, cut > 0, &parts, NULL));
    CHECK_MSG(whole.count == parts.count && (!whole.count || !memcmp(whole.ids, parts.ids, (size_t)whole.count * 4)),
              "%s: '%s' cut at %lld", name, text, (long long)cut);
    free(whole.ids);
    free(parts.ids);
    return cut > 0;
}

/* Those that cannot be cut anywhere: nothing is known of their patterns, the whole text may be one token, or blanks
 * begin an added token that looks at what stands before it. */
static bool has_no_cuts(const char *name)
{
    static const char *const names[] = { "whole", "digits", "bytes, a text", "bytes, no regex", "bytes, Isolated",
                                         "bytes, Removed", "bytes, Merged", "bytes, Contiguous",
                                         "added, word", "added and gemma, word", "added and first, word" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(name, names[i], strlen(names[i])) == 0) return true;
    return false;
}

TEST(cuts_change_nothing)
{
    const Json *forms = json_get(golden(), "forms"), *texts = json_get(golden(), "texts");
    uint64_t seed = 12;
    for (void *it = json_iter(forms); it; it = json_next(forms, it)) {
        Tokenizer *t;
        Encoder *e;
        int cuts = 0;
        OK(tokenizer_open(make_form(json_iter_value(it)), &t));
        OK(encoder_open(t, &e));
        for (int round = 0; round < 200; round++) {
            char text[2048] = "";
            for (int k = 0; k < 4; k++)
                strcat(text, text_of(json_at(texts, (int64_t)(test_rand(&seed) % (uint64_t)json_count(texts)))));
            cuts += check_cuts(json_iter_key(it), t, e, text, (int64_t)strlen(text));
        }
        CHECK_MSG(has_no_cuts(json_iter_key(it)) ? cuts == 0 : cuts > 50, "%s: %d cuts", json_iter_key(it), cuts);
        encoder_close(e);
        tokenizer_close(t);
    }
}

static Tokenizer *open_form(const char *name)
{
    Tokenizer *t;
    OK(tokenizer_open(make_form(json_get(json_get(golden(), "forms"), name)), &t));
    return t;
}

/* A byte that is no text is the token of that byte, and what follows it begins no piece. */
TEST(bytes_that_are_no_text)
{
    Tokenizer *t = open_form("legacy");
    Encoder *e;
    TokenList ids = { 0 };
    char *back;
    int64_t size, invalid = 0;
    OK(encoder_open(t, &e));
    OK(encoder_run(e, "a\xFF" "b \xF0\x9F", 6, false, &ids, &invalid));
    CHECK(invalid == 3);
    OK(tokenizer_decode(t, ids.ids, ids.count, &back, &size));
    CHECK_MSG(size == 6 && memcmp(back, "a\xFF" "b \xF0\x9F", 6) == 0, "'%s'", back);
    free(back);
    free(ids.ids);
    encoder_close(e);
    tokenizer_close(t);
}

/* Token by token, as text is generated: the same as all at once. */
TEST(one_token_after_the_other)
{
    const Json *forms = json_get(golden(), "forms"), *texts = json_get(golden(), "texts");
    for (void *it = json_iter(forms); it; it = json_next(forms, it)) {
        Tokenizer *t;
        OK(tokenizer_open(make_form(json_iter_value(it)), &t));
        for (int64_t i = 0; i < json_count(texts); i += 10) {
            int64_t size, whole_size, n = 0;
            const char *text = json_text(json_at(texts, i), &size);
            char *whole, joined[4096];
            TokenList ids;
            OK(tokenizer_encode(t, text, size, &ids));
            OK(tokenizer_decode(t, ids.ids, ids.count, &whole, &whole_size));
            for (int64_t k = 0; k < ids.count; k++) {
                int32_t bytes;
                const char *token = tokenizer_bytes(t, ids.ids[k], k == 0, &bytes);
                memcpy(joined + n, token, (size_t)bytes);
                n += bytes;
            }
            CHECK_MSG(n == whole_size && memcmp(joined, whole, (size_t)n) == 0, "%s: '%s'", json_iter_key(it), text);
            free(whole);
            free(ids.ids);
        }
        tokenizer_close(t);
    }
}

/* Without a blank it is one piece for the model. */
TEST(a_long_text_is_not_quadratic)
{
    enum { N = 1 << 20 };
    static const char *const letters[] = { "thecat", "the cat " };
    Tokenizer *t = open_form("gemma");
    char *text = malloc(N + 1), *back;
    for (int kind = 0; kind < 2; kind++) {
        TokenList ids;
        int64_t size, period = (int64_t)strlen(letters[kind]);
        for (int64_t i = 0; i < N; i++) text[i] = letters[kind][i % period];
        const double start = test_now();
        OK(tokenizer_encode(t, text, N, &ids));
        CHECK_MSG(test_now() - start < 20, "%.1f s", test_now() - start); /* quadratic would be hours */
        OK(tokenizer_decode(t, ids.ids, ids.count, &back, &size));
        CHECK(size == N && memcmp(back, text, N) == 0 && ids.count < N);
        free(back);
        free(ids.ids);
    }
    free(text);
    tokenizer_close(t);
}

TEST_MAIN
