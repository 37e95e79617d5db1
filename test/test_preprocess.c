/* Preprocessing end to end: documents, chunks, threads, errors. */
#include "test.h"

#include "data/indexed.h"
#include "data/jsonl.h"
#include "data/preprocess.h"
#include "data/resume.h"
#include "data/tokenizer.h"
#include "scratch.h"

static PreprocessResult preprocess(PreprocessOptions o)
{
    PreprocessResult r = { 0 };
    OK(preprocess_run(&o, &r));
    return r;
}

/* The documents of a pair as text, '|' after each. */
static void check_documents(const char *prefix, const char *want)
{
    Indexed x;
    char got[512] = "";
    size_t n = 0;
    OK(indexed_open(in_dir(prefix), &x));
    for (int64_t doc = 0, s = 0; doc < x.documents; doc++) {
        for (; s < indexed_document_end(&x, doc); s++)
            for (int64_t i = 0; i < indexed_length(&x, s); i++) {
                int32_t id;
                OK(indexed_read(&x, indexed_start(&x, s) + i, 1, 257, &id));
                got[n++] = id == 256 ? '$' : (char)id;
            }
        got[n++] = '|';
    }
    got[n] = 0;
    CHECK_MSG(strcmp(got, want) == 0, "got '%s', want '%s'", got, want);
    indexed_close(&x);
}

TEST(preprocess_documents)
{
    write_text("a.txt", "one\n\n \t\ntwo\nlines\r\n\r\nend");
    write_text("b.txt", "");
    write_text("c.txt", "\n\nx\n\n");
    write_text("d.jsonl", "{\"text\":\"A\\n\"}\n\n{\"b\":1,\"text\":\"\"}\n{\"text\":\"B\"}");
    const char *texts[] = { in_dir("a.txt"), in_dir("b.txt"), in_dir("c.txt") },
               *jsonl[] = { in_dir("d.jsonl") };
    PreprocessOptions o = {
        .inputs = texts, .input_count = 3, .tokenizer = "byte", .output = in_dir("out/p")
    };
    PreprocessResult r = preprocess(o);
    check_documents("out/p", "one\n\n \t\ntwo\nlines\r\n\r\nend||\n\nx\n\n|");
    CHECK(r.documents == 3 && r.empty_documents == 1 && r.tokens == 29 && r.input_bytes == 29 &&
          r.vocab == 257);
    o.append_eod = true;
    preprocess(o);
    check_documents("out/p", "one\n\n \t\ntwo\nlines\r\n\r\nend$||\n\nx\n\n$|");
    o.split_blank_lines = true;
    preprocess(o);
    check_documents("out/p", "one$|two\nlines$|end$|x$|");
    preprocess((PreprocessOptions){ .inputs = jsonl,
                                    .input_count = 1,
                                    .tokenizer = "byte",
                                    .output = in_dir("out/p"),
                                    .format = INPUT_JSONL,
                                    .append_eod = true });
    check_documents("out/p", "A\n$||B$|");
}

static char *make_corpus(int64_t bytes, int words_a_line)
{
    static const char *const words[] = { "alpha", "beta", "gamma", "caf\xC3\xA9",
                                         "42",    "...",  "it's",  "\xE6\x97\xA5\xE6\x9C\xAC" };
    uint64_t seed = 77;
    char *text = malloc((size_t)bytes + 64);
    int64_t n = 0;
    for (int k = 1; n < bytes; k++)
        n += sprintf(text + n, "%s%c", words[test_rand(&seed) % 8], k % words_a_line ? ' ' : '\n');
    text[n] = 0;
    return text;
}

/* Several chunks; one thread and three give the same files, and both the ids of the text encoded in
 * one go. */
TEST(preprocess_threads_and_chunks)
{
    char *text = make_corpus(3 << 20, 12);
    int64_t size = (int64_t)strlen(text);
    Tokenizer *t;
    TokenList ids;
    Indexed x;
    write_bytes("big.txt", text, size);
    const char *inputs[] = { in_dir("big.txt"), in_dir("big.txt") };
    char vocabulary[200];
    snprintf(vocabulary, sizeof vocabulary, "%s", in_dir("big.json"));
    OK(tokenizer_train(&(TokenizerTrainOptions){ inputs, 1, 290, vocabulary }, NULL));
    PreprocessOptions o = { .inputs = inputs,
                            .input_count = 2,
                            .tokenizer = vocabulary,
                            .output = in_dir("t1"),
                            .append_eod = true,
                            .threads = 1 };
    preprocess(o);
    o.threads = 3, o.output = in_dir("t3");
    preprocess(o);
    CHECK(same_files("t1.bin", "t3.bin") && same_files("t1.idx", "t3.idx"));
    OK(tokenizer_open(vocabulary, &t));
    OK(tokenizer_encode(t, text, size, &ids));
    OK(token_list_add(&ids, tokenizer_eod(t)));
    OK(indexed_open(in_dir("t1"), &x));
    int32_t *back = malloc((size_t)ids.count * sizeof *back);
    CHECK(x.documents == 2 && indexed_length(&x, 0) == ids.count && x.tokens == 2 * ids.count);
    for (int64_t half = 0; half < 2; half++) {
        OK(indexed_read(&x, half * ids.count, ids.count, 290, back));
        CHECK(memcmp(back, ids.ids, (size_t)ids.count * sizeof *back) == 0);
    }
    indexed_close(&x);
    free(back);
    free(ids.ids);
    free(text);
    tokenizer_close(t);
}

/* A paragraph and a JSON line of many chunks, between short ones: the ids of the text encoded in one go. */
TEST(preprocess_long_documents)
{
    char *text = make_corpus(2 << 20, 9), *file = malloc(6 << 20);
    int64_t size = (int64_t)strlen(text), n;
    if (text[size - 1] == '\n' || text[size - 1] == ' ') size--;
    char vocabulary[200];
    write_bytes("long.txt", text, size);
    const char *inputs[] = { in_dir("long.txt") };
    snprintf(vocabulary, sizeof vocabulary, "%s", in_dir("long.json"));
    OK(tokenizer_train(&(TokenizerTrainOptions){ inputs, 1, 290, vocabulary }, NULL));
    Tokenizer *t;
    TokenList ids;
    OK(tokenizer_open(vocabulary, &t));
    OK(tokenizer_encode(t, text, size, &ids));
    for (int jsonl = 0; jsonl < 2; jsonl++) {
        Indexed x;
        n = sprintf(file, jsonl ? "{\"text\":\"alpha\"}\n{\"id\":[1,{}],\"text\":\"" : "alpha\n\n");
        for (int64_t i = 0; i < size; i++)
            if (jsonl && text[i] == '\n') n += sprintf(file + n, "\\n");
            else file[n++] = text[i];
        n += sprintf(file + n, jsonl ? "\",\"z\":null}\r\n\n{\"text\":\"beta\"}" : "\n \t\n\nbeta\n");
        write_bytes("long.in", file, n);
        const char *in[] = { in_dir("long.in") };
        preprocess((PreprocessOptions){ .inputs = in,
                                        .input_count = 1,
                                        .tokenizer = vocabulary,
                                        .output = in_dir("long"),
                                        .format = jsonl ? INPUT_JSONL : INPUT_TEXT,
                                        .split_blank_lines = !jsonl,
                                        .append_eod = true,
                                        .threads = 3 });
        OK(indexed_open(in_dir("long"), &x));
        int32_t *back = malloc((size_t)x.tokens * sizeof *back);
        OK(indexed_read(&x, 0, x.tokens, 290, back));
        CHECK(x.documents == 3 && indexed_length(&x, 1) == ids.count + 1);
        CHECK(memcmp(back + indexed_start(&x, 1), ids.ids, (size_t)ids.count * sizeof *back) == 0);
        CHECK(back[indexed_start(&x, 2) - 1] == tokenizer_eod(t) && back[x.tokens - 1] == tokenizer_eod(t));
        indexed_close(&x);
        free(back);
    }
    free(ids.ids);
    free(file);
    free(text);
    tokenizer_close(t);
}

TEST(preprocess_lines_in_chunks)
{
    enum { LINES = 30000 };
    char *text = malloc(LINES * 64);
    Indexed x;
    int64_t n = 0;
    for (int i = 0; i < LINES; i++)
        n += sprintf(text + n, "{\"id\":%d,\"body\":\"line number %d\"}\n", i, i);
    write_bytes("many.jsonl", text, n);
    const char *inputs[] = { in_dir("many.jsonl") };
    PreprocessOptions o = { .inputs = inputs,
                            .input_count = 1,
                            .tokenizer = "byte",
                            .output = in_dir("many"),
                            .format = INPUT_JSONL,
                            .key = "body",
                            .threads = 2 };
    CHECK(preprocess(o).documents == LINES);
    OK(indexed_open(in_dir("many"), &x));
    for (int64_t i = 0; i < LINES; i += 997) {
        char want[32], got[32] = "";
        int32_t ids[32];
        int64_t size = sprintf(want, "line number %lld", (long long)i);
        CHECK(indexed_length(&x, i) == size);
        OK(indexed_read(&x, indexed_start(&x, i), size, 256, ids));
        for (int64_t k = 0; k < size; k++) got[k] = (char)ids[k];
        CHECK(strcmp(got, want) == 0);
    }
    indexed_close(&x);
    text[n / 2] = '\n'; /* breaks a line in two */
    write_bytes("many.jsonl", text, n);
    PreprocessResult r;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "many.jsonl': line 15");
    free(text);
}

/* A line says the same, its failures and their columns too, when it comes byte by byte. */
TEST(jsonl_in_pieces)
{
    static const char *const lines[] = {
        "{\"a\":{\"b.c\":\"x\\ud83d\\ude00\\ud83dy\\n\\u00e9\",\"c\":[1.5e-3,-0,true,{}]},\"b\":null}",
        " { \"b\" : { \"a\" : { \"b.c\" : 1 } } , \"\\u0061\" : { \"b\\u002ec\" : \"found\" } } ",
        "{\"a\":{\"b\":{\"c\":\"not this\"}},\"b.c\":\"nor this\"}",
        "{\"a\":{\"b.c\":\"\\u12g4\"}}",
        "{\"a\":{\"b.c\":\"x\"},\"a\":{}}",
        "{\"a\":[{\"b.c\":\"x\"}]}",
        "{\"a\":{\"b.c\":\"x\"}} 1",
        "{\"a\":{\"b.c\":\"x\"},\"n\":1.}",
        "{\"a\":{\"b.c\":\"x\"},\"n\":tru}",
        "{\"a\":{\"b.c\":\"x",
    };
    static const char *const want[] = { "x\xF0\x9F\x98\x80\xEF\xBF\xBDy\n\xC3\xA9", "found" };
    JsonlText whole = { 0 }, pieces = { 0 };
    JsonlScan s;
    JsonlKey key;
    OK(jsonl_key("a.b\\.c", &key));
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        char message[256];
        int64_t size = (int64_t)strlen(lines[i]);
        Err err = jsonl_member(lines[i], size, "a.b\\.c", &whole), again = ERR_OK;
        snprintf(message, sizeof message, "%s", err ? err_message() : "");
        pieces.size = 0;
        jsonl_begin(&s, &key);
        for (int64_t at = 0; at < size && !again; at++) again = jsonl_feed(&s, lines[i] + at, 1, &pieces);
        if (!again) again = jsonl_end(&s, &pieces);
        CHECK_MSG(err == again && err == (i < 2 ? ERR_OK : ERR_DATA), "%s", lines[i]);
        CHECK_MSG(!err || strcmp(message, err_message()) == 0, "'%s', '%s'", message, err_message());
        CHECK(pieces.size == whole.size && memcmp(pieces.text, whole.text, (size_t)whole.size) == 0);
        CHECK(i >= 2 || (whole.size == (int64_t)strlen(want[i]) &&
                         memcmp(whole.text, want[i], (size_t)whole.size) == 0));
    }
    free(whole.text);
    free(pieces.text);
    FAILS(jsonl_key("a..b", &key), ERR_CONFIG, "empty name");
    FAILS(jsonl_key("1.2.3.4.5.6.7.8.9", &key), ERR_CONFIG, "too many names");
}

/* One job has published and is about to end when the next begins. */
TEST(a_folder_of_another_job_stays)
{
    int first, second;
    const char *prefix = in_dir("turn"), *lock = in_dir("turn.part/lock");
    OK(job_lock(prefix, &first));
    OK(file_remove_tree(in_dir("turn.part")));
    OK(job_lock(prefix, &second));
    job_unlock(prefix, first);
    CHECK(file_exists(lock));
    job_unlock(prefix, second);
    CHECK(!file_exists(in_dir("turn.part")));
}

TEST(preprocess_errors)
{
    write_bytes("none.txt", "", 0);
    write_bytes("bad.txt", "ok \xFF\xFE ok", 8);
    const char *none[] = { in_dir("none.txt") }, *gone[] = { in_dir("gone.txt") },
               *bad[] = { in_dir("bad.txt") };
    const char *folder[] = { scratch_dir };
    PreprocessResult r;
    PreprocessOptions o = { .inputs = none,
                            .input_count = 1,
                            .tokenizer = "byte",
                            .output = in_dir("err/x"),
                            .append_eod = true };
    FAILS(preprocess_run(&o, &r), ERR_DATA, "no text");
    o.inputs = gone;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "gone.txt");
    o.inputs = folder;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "not a regular file");
    o.inputs = bad, o.format = INPUT_JSONL;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "bad.txt': line 1: column 1");
    o.tokenizer = "nothing";
    FAILS(preprocess_run(&o, &r), ERR_DATA, "no tokenizer 'nothing'");
    CHECK(dir_is_empty("err")); /* nothing half-written is left */
    o.tokenizer = "byte", o.format = INPUT_TEXT, o.append_eod = false;
    r = preprocess(o);
    CHECK(r.invalid_bytes == 2);
    check_documents("err/x", "ok \xFF\xFE ok|");
    o.output = "/proc/none/x";
    FAILS(preprocess_run(&o, &r), ERR_IO, "/proc/none");
}

TEST_MAIN
