/*
 * JSON, against hand-written texts and what the writer wrote; the trace, which is read back as JSON.
 */
#include <malloc.h>
#include <pthread.h>

#include "base/json.h"
#include "base/trace.h"
#include "scratch.h"

/* ---- JSON ---- */

static Err parse(const char *text, Json **j)
{
    return json_parse("t.json", text, (int64_t)strlen(text), j);
}

TEST(json_reads)
{
    Json *j;
    int64_t n;
    OK(parse("{\"a\": [1, -2.5, \"x\\u0000y\", null, true], \"b\": {\"c\": 9007199254740993}} ", &j));
    const Json *a = json_get(j, "a");
    CHECK(json_is_object(j) && json_is_array(a) && json_count(a) == 5 && json_count(j) == 2);
    CHECK(json_int(json_at(a, 0), -1) == 1 && json_number(json_at(a, 0), 0) == 1);
    CHECK(json_number(json_at(a, 1), 0) == -2.5 && json_int(json_at(a, 1), -1) == -1);
    CHECK(memcmp(json_text(json_at(a, 2), &n), "x\0y", 3) == 0 && n == 3);
    CHECK(json_is_null(json_at(a, 3)) && json_is_true(json_at(a, 4)) && !json_is_true(json_at(a, 3)));
    CHECK(json_int(json_get(json_get(j, "b"), "c"), 0) == 9007199254740993);
    CHECK(!json_at(a, 5) && !json_at(a, -1) && !json_get(j, "z") && !json_get(a, "a") && !json_at(j, 0));
    CHECK(!json_get(NULL, "a") && !json_text(a, NULL) && json_int(NULL, 7) == 7 && json_count(NULL) == 0);
    CHECK(json_is_int(json_at(a, 0)) && !json_is_int(json_at(a, 1)) && json_is_number(json_at(a, 1)));
    CHECK(json_is_string(json_at(a, 2)) && !json_is_string(NULL));
    int members = 0;
    for (void *it = json_iter(j); it; it = json_next(j, it))
        members += strcmp(json_iter_key(it), "a") == 0 ? json_is_array(json_iter_value(it)) : 10;
    CHECK(members == 11);
    json_free(j);
    json_free(NULL);
}

TEST(json_refuses)
{
    static const char *const bad[] = {
        "", "{", "{\"a\":1,\"a\":2}", "{\"a\":1} x", "[1,]", "\"\xff\"", "[\"\xff\"]", "[NaN]", "[1e999]", "{a:1}",
        "[01]", "[\"\\ud800\"]", "[99999999999999999999]", "nul",
    };
    Json *j;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        FAILS(parse(bad[i], &j), ERR_IO, "'t.json' is not valid JSON: line ");
        CHECK_MSG(!j, "%s", bad[i]);
    }
    FAILS(parse("{\n \"a\": 1,\n \"a\": 2}", &j), ERR_IO, "line 3");
    char *deep = malloc(200001);
    memset(deep, '[', 200000);
    deep[200000] = 0;
    FAILS(parse(deep, &j), ERR_IO, "depth");
    free(deep);
    write_text("j", "[1, 2, 3]");
    FAILS(json_read_file(in_dir("j"), 8, &j), ERR_IO, "more than");
    OK(json_read_file(in_dir("j"), 9, &j));
    CHECK(json_count(j) == 3);
    json_free(j);
    OK(json_read_file(write_text("marked", "\xEF\xBB\xBF{\"a\":1}"), 64, &j));
    CHECK(json_int(json_get(j, "a"), 0) == 1);
    json_free(j);
}

/* ---- memory ---- */

/* Jansson's; its header and ours do not go together. */
void json_set_alloc_funcs(void *(*take)(size_t), void (*give_back)(void *));
static int64_t live_bytes, most_bytes, calls;

static void *count_malloc(size_t bytes)
{
    void *p = malloc(bytes);
    live_bytes += p ? (int64_t)malloc_usable_size(p) + 8 : 0;
    if (live_bytes > most_bytes) most_bytes = live_bytes;
    calls++;
    return p;
}

static void count_free(void *p)
{
    if (p) live_bytes -= (int64_t)malloc_usable_size(p) + 8;
    free(p);
}

/* Parses with a limit for the tree; the most on the heap at a time goes to most_bytes. */
static Err parse_within(int64_t limit, const char *text, int64_t size)
{
    const int64_t usual = json_spare_bytes;
    Json *j;
    json_set_alloc_funcs(count_malloc, count_free);
    live_bytes = most_bytes = calls = 0;
    json_spare_bytes = limit - 2 * size;
    Err err = json_parse("t.json", text, size, &j);
    json_spare_bytes = usual;
    json_free(j);
    CHECK(live_bytes == 0);
    json_set_alloc_funcs(malloc, free);
    return err;
}

/* `count` times the item between the brackets; members have names of their own. malloc'ed */
static char *many(const char *item, char open, int64_t count, int64_t *size)
{
    char *text = malloc((size_t)count * (strlen(item) + 16) + 16);
    int64_t n = sprintf(text, "%c", open);
    for (int64_t i = 0; i < count; i++) {
        if (i) text[n++] = ',';
        if (open == '{') n += sprintf(text + n, "\"%llx\":", (long long)i);
        n += sprintf(text + n, "%s", item);
    }
    n += sprintf(text + n, "%c", open == '{' ? '}' : ']');
    *size = n;
    return text;
}

/* What a tree takes is never allowed with a byte less: for each kind of value, alone and in tables of all sizes around
 * those at which they are doubled. What is allowed in vain is at most 56 bytes a value, half of it where there is
 * text. */
/* Numbers of Python's that JSON lacks are strings; words in strings, and others, stay as they are. */
TEST(json_of_python)
{
    static const char text[] = "{\"a\": [0.0, Infinity, -Infinity,NaN], \"Infinity\": \"a NaN, \\\"Infinity\"}";
    static const char *const words[] = { "Infinity", "-Infinity", "NaN" };
    Json *j;
    FAILS(json_parse("x", text, sizeof text - 1, &j), ERR_IO, "near 'Infinity'");
    OK(json_parse_python("x", text, sizeof text - 1, &j));
    const Json *a = json_get(j, "a");
    CHECK(json_count(a) == 4 && json_number(json_at(a, 0), -1) == 0);
    for (int i = 0; i < 3; i++) CHECK(!strcmp(json_text(json_at(a, i + 1), NULL), words[i]));
    CHECK(!strcmp(json_text(json_get(j, "Infinity"), NULL), "a NaN, \"Infinity"));
    json_free(j);
    FAILS(json_parse_python("x", "[Infinit]", 9, &j), ERR_IO, "not valid JSON");
    FAILS(json_parse_python("x", "[1, \"Infinity", 13, &j), ERR_IO, "not valid JSON");
}

TEST(json_memory_was_counted_before)
{
    static const char *const items[] = {
        "null",
        "1",
        "-1.5e3",
        "\"\"",
        "\"abcdefgh\"",
        "\"\\u00e9\\n\\\"\"",
        "{}",
        "[]",
        "[[[[[]]]]]",
        "[1,2,3,4,5,6,7,8,9]",
        "{\"a\":1,\"b\":2,\"c\":3,\"d\":4,\"e\":5,\"f\":6,\"g\":7,\"h\":8,\"i\":9}",
        "[\"ab\",\"cd\"]",
        "{\"name\":\"embed\",\"shape\":[1,2],\"file\":\"shard-00000.safetensors\"}",
        "\"0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789\"",
    };
    static const int64_t counts[] = { 0, 1, 2, 8, 9, 17, 100, 129, 4097, 16385 };
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        for (size_t k = 0; k < 2 * sizeof counts / sizeof *counts; k++) {
            int64_t size, count = counts[k / 2];
            char *text = many(items[i], k % 2 ? '{' : '[', count, &size);
            OK(parse_within(1ll << 40, text, size));
            const int64_t took = most_bytes;
            FAILS(parse_within(took - 1, text, size), ERR_IO, "would take");
            CHECK(calls == 0); /* known before anything is taken */
            OK(parse_within(2 * took + 56 * count + (64 << 10), text, size));
            free(text);
        }
}

static void refuses_at_once(char *text, int64_t size)
{
    char want[80];
    snprintf(want, sizeof want, "%lld MiB are allowed", (long long)(2 * size + (256 << 20)) >> 20);
    FAILS(parse_within(2 * size + json_spare_bytes, text, size), ERR_IO, want);
    CHECK(calls == 0 && most_bytes == 0 && strstr(err_hint_text(), "brackets"));
    free(text);
}

TEST(json_too_large_for_memory)
{
    enum { SIZE = 24 << 20 };
    int64_t size;
    char *text = many("{}", '[', SIZE / 3, &size);
    refuses_at_once(text, size);
    text = many("[[[[[[[[[[[[]]]]]]]]]]]]", '[', SIZE / 25, &size);
    refuses_at_once(text, size);
    text = many("{}", '{', SIZE / 12, &size);
    refuses_at_once(text, size);
    text = malloc(SIZE); /* and what is no JSON, but opens brackets */
    memset(text, '{', SIZE);
    refuses_at_once(text, SIZE);
    text = many("{}", '[', 1 << 20, &size); /* as large as is allowed */
    OK(parse_within(2 * size + json_spare_bytes, text, size));
    CHECK(most_bytes > 200 << 20 && most_bytes <= 2 * size + (256 << 20));
    free(text);
}

/* JSON as compact as it can be written: Llama 3's vocabulary and merges, in pairs, need less than half of the limit. */
TEST(json_of_a_large_vocabulary_fits_twice)
{
    enum { TOKENS = 128000, MERGES = 280147 };
    char *text = malloc(24 * TOKENS + 40 * MERGES);
    int64_t n = sprintf(text, "{\"model\":{\"vocab\":{");
    for (int i = 0; i < TOKENS; i++) n += sprintf(text + n, "%s\"\u0120t%d\":%d", i ? "," : "", i, i);
    n += sprintf(text + n, "},\"merges\":[");
    for (int i = 0; i < MERGES; i++) n += sprintf(text + n, "%s[\"a%d\",\"t%d\"]", i ? "," : "", i % 997, i);
    n += sprintf(text + n, "]}}");
    OK(parse_within(2 * n + json_spare_bytes / 2, text, n));
    printf("    %.1f MB of text, %.1f MiB of tree\n", (double)n / 1e6, (double)(most_bytes >> 20));
    free(text);
}

/* ---- in parts ---- */

static int64_t count_items(JsonSpan array, bool *bad)
{
    JsonSpan item;
    for (int64_t n = 0;; n++) {
        *bad = json_next_item("t.json", &array, &item) != ERR_OK;
        if (*bad || !item.text) return n;
    }
}

TEST(json_in_parts)
{
    static const char *const keys[] = { "list", "l\"i", "none" };
    static const struct {
        const char *text, *rest; /* NULL: refused */
        int64_t items;           /* of `list`; -1: absent, -2: one is not there */
    } cases[] = {
        { "{\"a\":1,\"list\":[1,{\"x\":[2,\"]\"]},\"\\\"]\"],\"b\":{\"list\":2}}", "a b", 3 },
        { " { \"list\" : [ ] , \"a\" : [ ] } ", "a", 0 },
        { "{\"list\":[[],[[]],null]}", "", 3 },
        { "{}", "", -1 },
        { "{\"lists\":[1],\"b\":\"list\"}", "lists b", -1 },
        { "{\"list\":[1}}", "", -2 },
        { "{\"list\":[1,]}", "", -2 },
        { "{\"list\":[,1]}", "", -2 },
        { "{\"list\":[1 2]}", "", -2 },
        { "{\"list\":{\"a\":1}}", "", -2 },
        { "{\"list\":[1],\"list\":[2]}", NULL, 0 },
        { "{\"list\":[1],\"a\":1,\"a\":2}", NULL, 0 },
        { "{\"list\":[1],}", NULL, 0 },
        { "{\"list\":[1]", NULL, 0 },
        { "{\"list\":[1]} 1", NULL, 0 },
        { "{\"list\" [1]}", NULL, 0 },
        { "{\"list\":}", NULL, 0 },
        { "{\"a\":\"\\", NULL, 0 },
        { "", NULL, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        JsonSpan values[3];
        Json *rest;
        char names[64] = "", *text = strdup(cases[i].text);
        bool bad;
        Err err = json_parse_without("t.json", text, (int64_t)strlen(text), keys, 3, values, &rest);
        CHECK_MSG((err == ERR_OK) == (cases[i].rest != NULL), "%s", text);
        CHECK_MSG(!err || strstr(err_message(), "'t.json' is not valid JSON"), "%s", err_message());
        for (void *it = json_iter(rest); it; it = json_next(rest, it))
            sprintf(names + strlen(names), "%s%s", *names ? " " : "", json_iter_key(it));
        if (!err) {
            CHECK_MSG(strcmp(names, cases[i].rest) == 0, "%s: %s", text, names);
            CHECK((values[0].text != NULL) == (cases[i].items != -1) && !values[1].text && !values[2].text);
            int64_t n = count_items(values[0], &bad);
            CHECK_MSG(bad == (cases[i].items < 0) && (bad || n == cases[i].items), "%s: %d", text, (int)n);
        }
        json_free(rest);
        free(text);
    }
}

TEST(json_writes_and_reads_back)
{
    char buf[1024];
    JsonOut o;
    Json *j;
    json_out_init(&o, buf, sizeof buf);
    json_open(&o, NULL, '{');
    json_put_text(&o, "s", "q\"\\\n\x01\xc3\xa9");
    json_put_int(&o, "i", INT64_MIN);
    CHECK(json_put_number(&o, "d", 0.1));
    CHECK(!json_put_number(&o, "nan", (double)NAN) && !json_put_number(&o, "inf", (double)INFINITY));
    json_put_bool(&o, "b", true);
    json_open(&o, "a", '[');
    json_open(&o, NULL, '[');
    json_close(&o, ']');
    json_put_int(&o, NULL, 1);
    json_put_int(&o, NULL, 2);
    json_close(&o, ']');
    json_open(&o, "e", '{');
    json_close(&o, '}');
    json_put_bool(&o, "z", false);
    json_put_milli(&o, "ms", 12003);
    json_put_real(&o, "r", 7);
    json_put_real(&o, "t", -0.5);
    json_put_real(&o, "m", 1e-6);
    json_put_null(&o, "no");
    json_close(&o, '}');
    CHECK(json_out_ok(&o) && (int64_t)strlen(buf) == o.used_bytes);
    CHECK(strstr(buf,
                 "\"d\":0.1,\"nan\":null,\"inf\":null,\"b\":true,\"a\":[[],1,2],\"e\":{},\"z\":false,\"ms\":12.003,"
                 "\"r\":7.0,\"t\":-0.5,\"m\":1e-06,\"no\":null}"));
    OK(parse(buf, &j));
    CHECK(strcmp(json_text(json_get(j, "s"), NULL), "q\"\\\n\x01\xc3\xa9") == 0);
    CHECK(json_int(json_get(j, "i"), 0) == INT64_MIN && json_is_null(json_get(j, "nan")));
    json_free(j);

    uint64_t seed = 3;
    for (int i = 0; i < 2000; i++) { /* any bits read back exactly */
        uint64_t bits = test_rand(&seed);
        double d;
        memcpy(&d, &bits, 8);
        if (!isfinite(d)) continue;
        json_out_init(&o, buf, sizeof buf);
        json_put_number(&o, NULL, d);
        char *end;
        double back = strtod(buf, &end);
        CHECK(memcmp(&back, &d, 8) == 0 && *end == 0);
    }
}

TEST(json_writer_overflow)
{
    char buf[32];
    for (int64_t size = 1; size <= 24; size++) {
        memset(buf, 'G', sizeof buf);
        JsonOut o;
        json_out_init(&o, buf, size);
        json_open(&o, NULL, '{');
        json_put_text(&o, "key", "0123456789");
        json_close(&o, '}');
        CHECK(o.used_bytes == 20 && json_out_ok(&o) == (size > 20));
        for (int64_t i = size; i < 32; i++) CHECK(buf[i] == 'G');
        CHECK(memchr(buf, 0, (size_t)size) != NULL);
    }
}

/* ---- trace ---- */

static void *traced_thread(void *unused)
{
    (void)unused;
    trace_track("second \"track\"");
    trace_begin("other");
    trace_end();
    return NULL;
}

TEST(trace_writes_spans)
{
    const char *path = in_dir("timeline.json");
    char *text;
    int64_t size;
    trace_begin("closed"); /* nothing is open: nothing happens */
    trace_end();
    trace_counter("closed", 0, 1);
    trace_close();
    OK(trace_open(path));
    trace_begin("not recorded");
    trace_end();
    trace_start();
    trace_begin("of an earlier recording");
    trace_end();
    OK(trace_stop());
    trace_begin("begun outside");
    trace_start();
    trace_end();
    trace_track("main track");
    trace_begin("outer");
    static const char *const names[TRACE_ARGS] = { "stage", "unit" };
    trace_begin_with("inner", &(TraceArgs){ .kind = "F", .names = names, .value = { 5, -1, 7 } });
    usleep(2000);
    trace_end();
    trace_counter("loss", 3, 2.5);
    trace_end();
    trace_begin("never ended");
    pthread_t t;
    CHECK(pthread_create(&t, NULL, traced_thread, NULL) == 0);
    pthread_join(t, NULL);
    OK(trace_stop());
    trace_begin("too late");
    trace_end();

    Json *j;
    OK(json_read_file(path, 1 << 20, &j));
    CHECK(json_count(j) == 7); /* inner, loss, outer, other, the process's name, two track names */
    const Json *inner = json_at(j, 0), *loss = json_at(j, 1), *outer = json_at(j, 2), *other = json_at(j, 3);
    CHECK(strcmp(json_text(json_get(inner, "name"), NULL), "inner") == 0);
    CHECK(strcmp(json_text(json_get(outer, "name"), NULL), "outer") == 0);
    CHECK(json_number(json_get(json_get(loss, "args"), "value"), 0) == 2.5);
    const Json *args = json_get(inner, "args");
    CHECK(json_count(args) == 3 && !strcmp(json_text(json_get(args, "kind"), NULL), "F"));
    CHECK(json_int(json_get(args, "stage"), 0) == 5 && json_int(json_get(args, "unit"), 0) == -1);
    CHECK(!json_get(outer, "args"));
    double t0 = json_number(json_get(outer, "ts"), -1), t1 = json_number(json_get(inner, "ts"), -1);
    double d0 = json_number(json_get(outer, "dur"), -1), d1 = json_number(json_get(inner, "dur"), -1);
    CHECK(t0 >= 0 && t1 >= t0 && d1 >= 2000 && d1 < 5e6 && t1 + d1 <= t0 + d0 + 0.01);
    int64_t mine = json_int(json_get(outer, "tid"), -1), theirs = json_int(json_get(other, "tid"), -1);
    CHECK(mine > 0 && theirs > 0 && mine != theirs);
    bool named = false;
    CHECK(!strcmp(json_text(json_get(json_at(j, 4), "name"), NULL), "process_name"));
    CHECK(json_int(json_get(loss, "id"), 0) == 3 && !json_get(loss, "tid") && !json_get(loss, "dur"));
    for (int i = 5; i < 7; i++)
        named |= json_int(json_get(json_at(j, i), "tid"), -1) == theirs &&
                 strcmp(json_text(json_get(json_get(json_at(j, i), "args"), "name"), NULL), "second \"track\"") == 0;
    CHECK(named);
    json_free(j);
    trace_start(); /* the stack of the last recording is not this one's */
    trace_end();
    OK(trace_stop());
    trace_close();
    OK(file_read_all(path, 16, &text, &size));
    CHECK(size == 3 && memcmp(text, "[]\n", 3) == 0);
    free(text);
}

/* What a process gives to a file of several: pieces that end with whole objects, its own zero, its arrows' ids. */
TEST(trace_as_text)
{
    enum { SPANS = 40 };
    static char text[64 << 10];
    int64_t used = 1, next = 0, bytes;
    int pieces = 0;
    trace_track("a track");
    text[0] = '[';
    OK(trace_open(in_dir("unused.json")));
    trace_start();
    for (int i = 0; i < SPANS; i++) {
        trace_begin("span");
        trace_arrow("to", i, i % 2);
        trace_end();
    }
    trace_halt();
    trace_begin("too late");
    trace_end();
    const TraceProcess p = { "pp 1", 7, 2, trace_started() - 5000000, (int64_t)3 << 40 };
    for (; (bytes = trace_text(&p, &next, text + used, TRACE_TEXT)) > 0; used += bytes, pieces++)
        CHECK(bytes <= TRACE_TEXT && text[used] == ',' && text[used + bytes - 1] == '}');
    CHECK(pieces > 1 && trace_text(&p, &next, text + used, TRACE_TEXT) == 0);
    text[1] = ' ';
    text[used++] = ']';
    Json *j;
    OK(json_parse("text", text, used, &j));
    CHECK(json_count(j) >= 2 * SPANS + 3); /* and the process's name, its place, names of tracks */
    for (int i = 0; i < 2 * SPANS; i++) {
        const Json *e = json_at(j, i);
        const bool arrow = i % 2 == 0; /* recorded before its span, which is recorded when it ends */
        CHECK(json_int(json_get(e, "pid"), 0) == 7 && json_number(json_get(e, "ts"), 0) >= 5000);
        CHECK(!strcmp(json_text(json_get(e, "ph"), NULL), !arrow ? "X" : i / 2 % 2 ? "f" : "s"));
        CHECK(!arrow || json_int(json_get(e, "id"), 0) == ((int64_t)3 << 40) + i / 2);
    }
    json_free(j);
    CHECK(!file_exists(in_dir("unused.json")));
    trace_close();
}

TEST(trace_ring_keeps_the_newest_and_allocates_nothing)
{
    const char *path = in_dir("ring.json");
    OK(trace_open(path));
    trace_start();
    trace_begin("first");
    trace_end();
    struct mallinfo2 before = mallinfo2();
    for (int i = 0; i < TRACE_EVENTS + 10; i++) trace_counter("c", 0, i);
    for (int i = 0; i < 10; i++) trace_begin("span");
    for (int i = 0; i < 10; i++) trace_end();
    struct mallinfo2 after = mallinfo2();
    CHECK(before.uordblks == after.uordblks && before.hblks == after.hblks);
    OK(trace_stop());
    trace_close();
    Json *j;
    OK(json_read_file(path, 1 << 26, &j));
    CHECK(json_int(json_get(json_at(j, 0), "pid"), -1) == 0);
    CHECK(json_number(json_get(json_get(json_at(j, 0), "args"), "value"), -1) == 20);
    CHECK(strcmp(json_text(json_get(json_at(j, TRACE_EVENTS - 1), "name"), NULL), "span") == 0);
    json_free(j);
    OK(trace_open(in_dir("no/such/folder.json")));
    trace_start();
    FAILS(trace_stop(), ERR_IO, "cannot create");
    trace_close();
}

TEST_MAIN
