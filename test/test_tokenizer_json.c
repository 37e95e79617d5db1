/* Forms of tokenizer.json that are understood, refused or damaged; JSON lines. */
#include "test.h"

#include "base/utf8.h"
#include "data/jsonl.h"
#include "data/tokenizer.h"
#include "scratch.h"

#define TAIL "\"ab\":256,\"abc\":257,\"bc\":258"

/* The 256 bytes in GPT-2's alphabet, then `tail`. */
static void put_vocab(char *out, const char *tail)
{
    int next = 256, n = 0;
    for (int b = 0; b < 256; b++) {
        bool plain = (b > 32 && b < 127) || (b > 160 && b != 173);
        char c[5] = "";
        utf8_put(c, (uint32_t)(plain ? b : next++));
        n += sprintf(out + n, "\"%s%s\":%d,", b == '"' || b == '\\' ? "\\" : "", c, b);
    }
    strcpy(out + n, tail);
}

typedef struct {
    const char *merges, *model, *tail, *added, *pre, *normalizer, *top; /* NULL: the plain form */
    bool no_type;                                                       /* of the model */
} JsonParts;

static const char *make_json(JsonParts p)
{
    static char vocab[8192], text[96 << 10];
    put_vocab(vocab, p.tail ? p.tail : TAIL);
    snprintf(text, sizeof text,
             "{\"added_tokens\":[%s],%s\"normalizer\":%s,\"pre_tokenizer\":%s,\"decoder\":{"
             "\"type\":\"ByteLevel\"},"
             "\"model\":{%s%s\"vocab\":{%s},\"merges\":[%s]}}",
             p.added ? p.added : "", p.top ? p.top : "", p.normalizer ? p.normalizer : "null",
             p.pre ? p.pre : "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
             p.no_type ? "" : "\"type\":\"BPE\",", p.model ? p.model : "", vocab,
             p.merges ? p.merges : "\"a b\",[\"ab\",\"c\"]");
    return write_text("made.json", text);
}

static void check_ids(JsonParts p, const char *text, const char *want)
{
    Tokenizer *t;
    TokenList ids;
    char got[256] = "";
    OK(tokenizer_open(make_json(p), &t));
    OK(tokenizer_encode(t, text, (int64_t)strlen(text), &ids));
    for (int64_t i = 0; i < ids.count; i++)
        sprintf(got + strlen(got), "%s%d", i ? " " : "", ids.ids[i]);
    CHECK_MSG(strcmp(got, want) == 0, "'%s': got '%s', want '%s'", text, got, want);
    free(ids.ids);
    tokenizer_close(t);
}

TEST(json_forms)
{
    check_ids((JsonParts){ 0 }, "abcbc", "257 98 99");
    check_ids((JsonParts){ .no_type = true, .model = "\"unk_token\":\"\",\"end_of_word_suffix\":\"\"," }, "abcbc",
              "257 98 99"); /* as GPT-2's first file */
    check_ids((JsonParts){ .merges = "[\"b\",\"c\"],\"a b\"" }, "abc", "97 258");
    /* "abc" is a token that no merge reaches: only ignore_merges finds it */
    check_ids((JsonParts){ .merges = "\"a b\"", .model = "\"ignore_merges\":true," }, "abc", "257");
    check_ids((JsonParts){ .merges = "\"a b\"" }, "abc", "256 99");
    check_ids(
        (JsonParts){ .added =
                         "{\"id\":300,\"content\":\"<a>\"},{\"id\":301,\"content\":\"<a><b>\"}" },
        "<a><a><b>x", "300 301 120");
    check_ids((JsonParts){ .added = "{\"id\":300,\"content\":\"e\xCC\x81\",\"normalized\":true}",
                           .normalizer = "{\"type\":\"NFC\"}" },
              "e\xCC\x81\xC3\xA9", "300 300"); /* both spellings of the same letter */
    check_ids((JsonParts){ .normalizer = "{\"type\":\"NFC\"}" }, "e\xCC\x81", "195 169");
    check_ids((JsonParts){ 0 }, "e\xCC\x81", "101 204 129");
}

/* What the `tokenizers` package gives for the same file; 32 is a blank, 95 '_'. */
TEST(added_token_flags)
{
    static const struct {
        const char *flags, *text, *want;
    } cases[] = {
        { "\"lstrip\":false", " <m> b <m>", "32 300 301 32 300" },
        { "\"lstrip\":true", " <m> b <m>", "300 301 300" },
        { "\"lstrip\":true", "a\xC2\xA0\xE3\x80\x80<m><m>_ <m>", "97 300 300 95 300" },
        { "\"rstrip\":true", "<m> \xC2\x85_<m>", "300 95 300" },
        { "\"rstrip\":true", "<m>   b", "300 301" }, /* " b" begins inside what was swallowed */
        { "\"single_word\":true", "a<m> <m>\xCC\x81", "97 60 109 62 32 60 109 62 204 129" },
        { "\"single_word\":true", "-<m><m>\xC3\x97", "45 300 300 195 151" },
        { "\"single_word\":true", "<m>_ \xE4\xB8\xAD<m>", "60 109 62 95 32 228 184 173 60 109 62" },
        { "\"lstrip\":true,\"rstrip\":true", "a <m>  <m>\n", "97 300 300" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char added[256];
        snprintf(added, sizeof added, "{\"id\":300,\"content\":\"<m>\",%s},{\"id\":301,\"content\":\" b\"}",
                 cases[i].flags);
        check_ids((JsonParts){ .added = added }, cases[i].text, cases[i].want);
    }
    /* a token of blanks that swallows blanks: the second one has nothing left to stand for */
    check_ids((JsonParts){ .added = "{\"id\":300,\"content\":\"  \",\"lstrip\":true,\"rstrip\":true}" }, "a     b",
              "97 300 98");
    /* where one may be cut: not in front of what rstrip may swallow, nor where single_word looks back */
    Tokenizer *t;
    OK(tokenizer_open(make_json((JsonParts){ .added = "{\"id\":300,\"content\":\"xa\",\"rstrip\":true},"
                                                      "{\"id\":301,\"content\":\" b\",\"single_word\":true},"
                                                      "{\"id\":302,\"content\":\"c\\nd\"}" }),
                      &t));
    CHECK(tokenizer_cut(t, "y\nxa\n", 5) == 1 && tokenizer_cut(t, "y b", 3) == 0 && tokenizer_cut(t, "c\nd", 3) == 0);
    CHECK(tokenizer_cut(t, "c d\nb", 5) == 3);
    tokenizer_close(t);
}

/* The vocabulary with a token of that spelling. */
#define WITH_TOKEN(spelling) TAIL ",\"" spelling "\":259"

TEST(end_of_document)
{
    static const struct {
        const char *tail, *added;
        int32_t want;
    } cases[] = {
        { NULL, NULL, -1 },
        { NULL, "{\"id\":300,\"content\":\"<|endoftext|>\",\"special\":true}", 300 },
        { NULL,
          "{\"id\":300,\"content\":\"<\xEF\xBD\x9C"
          "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>\"}",
          300 },
        { NULL, "{\"id\":300,\"content\":\"<|end\xE2\x96\x81of\xE2\x96\x81sentence|>\"}", -1 },
        { NULL, "{\"id\":300,\"content\":\"</s>\"},{\"id\":301,\"content\":\"<|end_of_text|>\"}", 301 },
        { NULL, "{\"id\":300,\"content\":\"</s>\",\"special\":true},{\"id\":301,\"content\":\"<|endoftext|>\"}", 300 },
        { WITH_TOKEN("</s>"), "{\"id\":300,\"content\":\"<|im_end|>\",\"special\":true}", -1 }, /* HTML */
        { WITH_TOKEN("</s>"), "{\"id\":259,\"content\":\"</s>\",\"special\":true}", 259 },
        { WITH_TOKEN("</s>"), NULL, -1 },
        { WITH_TOKEN("<|endoftext|>"), NULL, 259 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Tokenizer *t;
        OK(tokenizer_open(make_json((JsonParts){ .tail = cases[i].tail, .added = cases[i].added }), &t));
        CHECK_MSG(tokenizer_eod(t) == cases[i].want, "case %zu: %d, want %d", i, tokenizer_eod(t), cases[i].want);
        tokenizer_close(t);
    }
}

/* A folder as Qwen is published: three files, of which two have the same vocabulary without its pattern and added
 * tokens. */
TEST(a_folder_with_both_forms)
{
    static char vocab[8192], text[8200];
    char *json;
    int64_t size;
    Tokenizer *t;
    TokenList ids;
    put_vocab(vocab, TAIL);
    snprintf(text, sizeof text, "{%s}", vocab);
    OK(file_make_dirs(in_dir("both")));
    write_text("both/vocab.json", text);
    write_text("both/merges.txt", "#version: 0.2\na b\nab c\n");
    OK(tokenizer_open(in_dir("both"), &t));
    CHECK(tokenizer_vocab(t) == 259 && tokenizer_eod(t) == -1);
    tokenizer_close(t);
    OK(file_read_all(make_json((JsonParts){ .added = "{\"id\":300,\"content\":\"<|endoftext|>\",\"special\":true}" }),
                     1 << 20, &json, &size));
    write_text("both/tokenizer.json", json);
    free(json);
    OK(tokenizer_open(in_dir("both"), &t));
    CHECK(tokenizer_vocab(t) == 301 && tokenizer_eod(t) == 300);
    OK(tokenizer_encode(t, "<|endoftext|>", 13, &ids));
    CHECK(ids.count == 1 && ids.ids[0] == 300);
    free(ids.ids);
    tokenizer_close(t);
}

TEST(an_added_token_has_up_to_65535_bytes)
{
    enum { MOST = 65535 };
    Tokenizer *t;
    char *added = malloc(MOST + 64);
    for (int extra = 0; extra < 2; extra++) {
        int n = sprintf(added, "{\"id\":300,\"content\":\"");
        memset(added + n, 'z', MOST + extra);
        strcpy(added + n + MOST + extra, "\"}");
        const char *path = make_json((JsonParts){ .added = added });
        if (extra) FAILS(tokenizer_open(path, &t), ERR_DATA, "an added token has 65536 bytes, at most 65535 can be");
        else {
            OK(tokenizer_open(path, &t));
            tokenizer_close(t);
        }
    }
    free(added);
    FAILS(tokenizer_open(make_json((JsonParts){ .added = "{\"id\":300,\"content\":\"\"}" }), &t), ERR_DATA,
          "no content");
}

TEST(many_added_tokens_in_many_blanks)
{
    enum { N = 1 << 19 };
    Tokenizer *t;
    TokenList ids;
    char *text = malloc(N);
    memset(text, ' ', N);
    for (int i = 0; i < 3; i++) {
        char added[128];
        snprintf(added, sizeof added, "{\"id\":300,\"content\":\"  \",\"lstrip\":%s,\"rstrip\":%s}",
                 i != 1 ? "true" : "false", i != 0 ? "true" : "false");
        OK(tokenizer_open(make_json((JsonParts){ .added = added }), &t));
        double start = test_now();
        OK(tokenizer_encode(t, text, N, &ids));
        CHECK_MSG(test_now() - start < 20, "%.1f s", test_now() - start); /* quadratic would be minutes */
        CHECK(ids.count == (i == 2 ? 1 : N / 2) && ids.ids[0] == 300);
        free(ids.ids);
        tokenizer_close(t);
    }
    free(text);
}

#define SPLIT(regex, behavior)                                                                             \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex "\"}," \
    "\"behavior\":\"" behavior "\"},{\"type\":\"ByteLevel\",\"use_regex\":false}]}"

/* A model of characters: "a", "b" and the tokens that are given. */
#define CHARACTERS(tokens, members, decoder)                                                             \
    "{\"decoder\":" decoder ",\"model\":{\"vocab\":{\"a\":0,\"b\":1" tokens "},\"merges\":[]" members "}}"
#define DECODERS(list) "{\"type\":\"Sequence\",\"decoders\":[" list "]}"
#define FUSE "{\"type\":\"Fuse\"}"
#define STRIP(start) "{\"type\":\"Strip\",\"content\":\" \",\"start\":" start ",\"stop\":0}"

TEST(refusals_of_characters)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        { CHARACTERS("", "", FUSE), "some characters would have no token" },
        { CHARACTERS(",\"<0x00>\":2", ",\"byte_fallback\":true", FUSE), "some characters would have no token" },
        { CHARACTERS("", ",\"unk_token\":\"?\"", FUSE), "the unk_token '?' is not in the vocabulary" },
        { CHARACTERS(",\"?\":2", ",\"unk_token\":\"?\"", "null"), "neither ByteLevel nor a decoder" },
        { CHARACTERS(",\"?\":2", ",\"unk_token\":\"?\"", "{\"type\":\"WordPiece\"}"), "the decoder 'WordPiece'" },
        { CHARACTERS(",\"?\":2", ",\"unk_token\":\"?\"", STRIP("1")), "behind Fuse" },
        { CHARACTERS(",\"?\":2", ",\"unk_token\":\"?\"", DECODERS(FUSE "," STRIP("2"))), "takes one blank" },
        { CHARACTERS(",\"?\":2", ",\"unk_token\":\"?\"", DECODERS(FUSE ",{\"type\":\"ByteFallback\"}")),
          "not supported behind the decoders before it" },
        { CHARACTERS(",\"?\":2", ",\"type\":\"WordPiece\"", FUSE), "the model 'WordPiece' is not supported" },
    };
    Tokenizer *t;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        FAILS(tokenizer_open(write_text("made.json", cases[i].text), &t), ERR_DATA, cases[i].message);
    OK(tokenizer_open(write_text("made.json", CHARACTERS(",\"?\":2", ",\"unk_token\":\"?\"", FUSE)), &t));
    tokenizer_close(t);
    OK(file_make_dirs(in_dir("spm")));
    write_text("spm/tokenizer.model", "x");
    FAILS(tokenizer_open(in_dir("spm"), &t), ERR_DATA, "is no tokenizer.json");
    FAILS(tokenizer_open(in_dir("spm/tokenizer.model"), &t), ERR_DATA, "is no tokenizer.json");
}

/* A stranger's file may neither take unbounded time nor grow a text without bound. */
TEST(bounded_work_and_growth)
{
    char parts[2048] = "{\"type\":\"Sequence\",\"normalizers\":[";
    Tokenizer *t;
    TokenList ids;
    for (int i = 0; i < 20; i++)
        sprintf(parts + strlen(parts), "%s{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aa\"}",
                i ? "," : "");
    strcat(parts, "]}");
    OK(tokenizer_open(make_json((JsonParts){ .normalizer = parts }), &t));
    FAILS(tokenizer_encode(t, "aaaaaaaa", 8, &ids), ERR_DATA, "makes a text too long");
    CHECK(strstr(err_message(), ".json'"));
    tokenizer_close(t);
    OK(tokenizer_open(make_json((JsonParts){ .pre = SPLIT("[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?"
                                                          "[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[^~]?[~`]",
                                                          "Isolated") }),
                      &t));
    FAILS(tokenizer_encode(t, "a plain line of text, longer than forty characters", 50, &ids), ERR_DATA,
          "its split pattern takes too long");
    CHECK(strstr(err_message(), ".json'"));
    tokenizer_close(t);
}

TEST(json_refusals)
{
    static const struct {
        JsonParts parts;
        const char *message;
    } cases[] = {
        { { .model = "\"dropout\":0.1," }, "dropout" },
        { { .model = "\"end_of_word_suffix\":\"</w>\"," }, "suffix" },
        { { .normalizer = "{\"type\":\"Lowercase\"}" }, "normalizer" },
        { { .normalizer = "{\"type\":\"NFC\",\"form\":1}" }, "the member 'form' of the normalizer 'NFC'" },
        { { .normalizer = "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"a\"},\"content\":\"b\"}" }, "Regex" },
        { { .normalizer = "{\"type\":\"Sequence\",\"normalizers\":[null]}" }, "hole" },
        { { .normalizer = "{\"normalizers\":[]}" }, "the normalizer has no type" },
        { { .pre = "{\"type\":\"Whitespace\"}" }, "the pre_tokenizer 'Whitespace' is not supported" },
        { { .pre = "null" }, "the decoder ByteLevel is not supported without the pre_tokenizer" },
        { { .pre = "{\"type\":\"ByteLevel\",\"add_prefix_space\":1}" }, "neither true nor false" },
        { { .pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":\"ByteLevel\"}]}" },
          "not supported behind ByteLevel" },
        { { .pre = "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"last\"}" },
          "prepend_scheme 'last'" },
        { { .pre =
                "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"first\","
                "\"add_prefix_space\":false}" },
          "contradicts" },
        { { .pre = SPLIT("x", "Elsewhere") }, "behavior 'Elsewhere'" },
        { { .pre = SPLIT("x*", "Isolated") }, "can match the empty text" },
        { { .pre = SPLIT("", "Isolated") }, "a split pattern is empty" },
        { { .pre = SPLIT("(", "Isolated") }, "cannot be compiled" },
        { { .pre = SPLIT("a{,3}", "Isolated") }, "at '{,3}'" },
        { { .pre = SPLIT("a{3}?", "Isolated") }, "at '{3}?'" },
        { { .pre = SPLIT("a{3}+", "Isolated") }, "at '{3}+'" },
        { { .pre = SPLIT("a{2}{3}b", "Isolated") }, "quantifier does not follow" },
        { { .pre = SPLIT("(a+)+b", "Isolated") }, "at ')+b'" },
        { { .pre = SPLIT("^a", "Isolated") }, "at '^a'" },
        { { .pre = SPLIT("\\\\w", "Isolated") }, "at '\\w'" },
        { { .pre = SPLIT("\\\\p{Han}", "Isolated") }, "at '\\p{Han}'" },
        { { .pre = SPLIT("[a&&b]", "Isolated") }, "at '&&b]'" },
        { { .pre = SPLIT("[a[b]]", "Isolated") }, "at '[b]]'" },
        { { .pre = SPLIT("(?<=a)b", "Isolated") }, "at '(?<=a)b'" },
        { { .pre = SPLIT("(?i:(a)\\\\p{Lu})", "Isolated") }, "at '\\p{Lu})'" },
        { { .model = "\"dropped\":1," }, "the member 'dropped' of the model" },
        { { .top = "\"more\":1," }, "the member 'more' of the file" },
        { { .top = "\"truncation\":{\"max_length\":5}," }, "truncation" },
        { { .top = "\"post_processor\":{\"type\":\"BertProcessing\"}," }, "post_processor" },
        { { .added = "{\"id\":300,\"content\":\"ab\"}" }, "has the id 300, and 256 in the vocabulary" },
        { { .added = "{\"id\":97,\"content\":\"<m>\"}" }, "of another token" },
        { { .added = "{\"id\":300,\"content\":\"<a>\"},{\"id\":300,\"content\":\"<b>\"}" }, "two added tokens" },
        { { .added = "{\"id\":99999999999,\"content\":\"x\"}" }, "is not a number in" },
        { { .merges = "\"a b\",\"a b\"" }, "same as merge 1" },
        { { .merges = "\"a z\"" }, "merged token is not in the vocabulary" },
        { { .merges = "\"abc\"" }, "merge 1" },
        { { .merges = "\"ab\u0100\u0101 c\"" }, "not in the vocabulary" },
        { { .merges = "\"a \xE2\x82\xAC\"" }, "byte-level alphabet" },
        { { .merges = "[\"a\"]" }, "merge 1" },
        { { .merges = "7" }, "merge 1" },
    };
    Tokenizer *t;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        FAILS(tokenizer_open(make_json(cases[i].parts), &t), ERR_DATA, cases[i].message);
    FAILS(tokenizer_open(write_text("bad.json", "{\"model\":{\"type\":\"Unigram\",\"merges\":[]}}"),
                         &t),
          ERR_DATA, "the model 'Unigram' is not supported");
    FAILS(
        tokenizer_open(write_text("bad.json",
                                  "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},"
                                  "\"pre_tokenizer\":{\"type\":\"ByteLevel\"}}"),
                       &t),
        ERR_DATA, "no token stands for the byte");
    FAILS(tokenizer_open(write_text("bad.json", "{\"model\":"), &t), ERR_DATA, "not valid JSON");
    FAILS(tokenizer_open(write_text("bad.json", ""), &t), ERR_DATA, "bad.json");
    FAILS(tokenizer_open(write_text("bad.json", "[]"), &t), ERR_DATA, "not a tokenizer.json");
    FAILS(tokenizer_open(in_dir("nothing"), &t), ERR_DATA, "no tokenizer");
    OK(file_make_dirs(in_dir("folder")));
    FAILS(tokenizer_open(in_dir("folder"), &t), ERR_DATA, "no tokenizer in the folder");
}

/* Cuts and flips of a whole file: an error or a working tokenizer, never a crash (run under ASan
 * too). */
TEST(json_damage)
{
    char *text;
    int64_t size, refused = 0;
    uint64_t seed = 11;
    OK(file_read_all(make_json((JsonParts){ 0 }), 1 << 20, &text, &size));
    for (int round = 0; round < 150; round++) {
        int64_t n = round % 3 ? size : (int64_t)(test_rand(&seed) % (uint64_t)size);
        int64_t at = (int64_t)(test_rand(&seed) % (uint64_t)size);
        char old = text[at];
        if (round % 3) text[at] = (char)(old ^ 1 << test_rand(&seed) % 8);
        Tokenizer *t = NULL;
        OK(file_replace(in_dir("damaged.json"), text, n));
        Err err = tokenizer_open(in_dir("damaged.json"), &t);
        CHECK(err == ERR_OK || err == ERR_DATA);
        CHECK(round % 3 || err == ERR_DATA);
        refused += err != ERR_OK;
        if (!err) tokenizer_close(t);
        text[at] = old;
    }
    CHECK(refused > 60);
    free(text);
}

/* ---- JSON lines ---- */

TEST(jsonl)
{
    static const struct {
        const char *line, *want, *message; /* want NULL: fails with the message */
    } cases[] = {
        { "{\"text\":\"hi\"}", "hi", NULL },
        { " { \"a\" : [1, {\"text\":\"no\"}, [] , {}], \"text\" : \"y\\n\\u00e9\\/\" } ",
          "y\n\xC3\xA9/", NULL },
        { "{\"text\":\"\\ud83d\\ude00 \\ud83d x \\ude00\"}",
          "\xF0\x9F\x98\x80 \xEF\xBF\xBD x \xEF\xBF\xBD", NULL },
        { "{\"\\u0074ext\":\"escaped key\",\"z\":-1.5e+3}", "escaped key", NULL },
        { "{\"text\":\"first\",\"k\":\"a long one \\\" after it\",\"l\":null}", "first", NULL },
        { "{\"text\":\"raw \xFF byte\"}", "raw \xFF byte", NULL },
        { "{\"text\":\"\"}", "", NULL },
        { "{}", NULL, "no member 'text'" },
        { "[]", NULL, "one JSON object" },
        { "{\"text\":5}", NULL, "not a string" },
        { "{\"text\":\"a\",\"text\":\"b\"}", NULL, "twice" },
        { "{\"text\":\"a\"", NULL, "'}' was expected" },
        { "{\"text\":\"a", NULL, "does not end" },
        { "{\"text\":\"a\tb\"}", NULL, "control character" },
        { "{\"text\":\"\\x\"}", NULL, "escape" },
        { "{\"text\":\"\\u12g4\"}", NULL, "hexadecimal" },
        { "{\"text\":\"a\"} x", NULL, "follows" },
        { "{\"text\":\"a\",}", NULL, "expected" },
        { "{\"a\":01,\"text\":\"a\"}", NULL, "not a JSON value" },
        { "{\"a\":tru,\"text\":\"a\"}", NULL, "not a JSON value" },
        { "{\"a\":[1,2},\"text\":\"a\"}", NULL, "bracket" },
        { "{\"a\":{\"b\"},\"text\":\"a\"}", NULL, "':'" },
    };
    JsonlText out = { 0 };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Err err = jsonl_member(cases[i].line, (int64_t)strlen(cases[i].line), "text", &out);
        if (cases[i].want)
            CHECK_MSG(!err && out.size == (int64_t)strlen(cases[i].want) &&
                          memcmp(out.text, cases[i].want, (size_t)out.size) == 0,
                      "'%s': %s", cases[i].line, err ? err_message() : "other text");
        else
            CHECK_MSG(err == ERR_DATA && strstr(err_message(), cases[i].message), "'%s': %s",
                      cases[i].line, err_message());
    }
    char deep[1200] = "{\"a\":";
    memset(deep + 5, '[', 1000);
    FAILS(jsonl_member(deep, 1005, "text", &out), ERR_DATA, "nested too deep");
    free(out.text);
}

TEST_MAIN
