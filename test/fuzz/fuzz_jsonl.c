/*
 * data/jsonl.c: the member "text" of a line. Where Jansson, too, reads the line, both find the same text; a text
 * that was found, written as JSON, is found again; a line in pieces is the line.
 */
#include "fuzz.h"

#include "base/json.h"
#include "data/jsonl.h"

/* (an empty text may be nowhere) */
static bool same_text(const char *a, int64_t n, const char *b, int64_t m)
{
    return n == m && (n == 0 || memcmp(a, b, (size_t)n) == 0);
}

static void check_like_jansson(const char *line, int64_t size, Err err, const JsonlText *found)
{
    ErrKept kept;
    Json *j;
    int64_t n;
    err_keep(&kept);
    if (json_parse("line", line, size, &j)) return; /* stricter: UTF-8, numbers in range, no key twice */
    const char *text = json_text(json_get(j, "text"), &n);
    if (!err) FUZZ_CHECK(text && same_text(text, n, found->text, found->size), "another text");
    else FUZZ_CHECK(!text || strstr(kept.message, "too deep"), "refused: %s", kept.message);
    json_free(j);
}

static void check_pieces(const char *line, int64_t size, Err err, const JsonlText *found)
{
    enum { PIECE = 3 };
    JsonlKey key;
    JsonlScan s;
    JsonlText text = { 0 };
    Err now = jsonl_key("text", &key);
    jsonl_begin(&s, &key);
    for (int64_t at = 0; at < size && !now; at += PIECE)
        now = jsonl_feed(&s, line + at, size - at < PIECE ? size - at : PIECE, &text);
    if (!now) now = jsonl_end(&s, &text);
    FUZZ_CHECK(now == err, "in pieces: %s", now ? err_message() : "accepted");
    FUZZ_CHECK(err || same_text(text.text, text.size, found->text, found->size), "another text in pieces");
    free(text.text);
}

static void check_again(const JsonlText *found)
{
    char *line = malloc(6 * (size_t)found->size + 32);
    if (!line) abort();
    size_t n = (size_t)sprintf(line, "{\"text\":\"");
    for (int64_t i = 0; i < found->size; i++) {
        unsigned char c = (unsigned char)found->text[i];
        if (c < 0x20 || c == '"' || c == '\\') n += (size_t)sprintf(line + n, "\\u%04X", (unsigned)c);
        else line[n++] = (char)c;
    }
    n += (size_t)sprintf(line + n, "\"}");
    JsonlText again = { 0 };
    Err err = jsonl_member(line, (int64_t)n, "text", &again);
    FUZZ_CHECK(!err, "%s", err_message());
    FUZZ_CHECK(same_text(again.text, again.size, found->text, found->size), "another text");
    free(again.text);
    free(line);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    JsonlText found = { 0 };
    fuzz_memory_start();
    Err err = jsonl_member((const char *)data, (int64_t)size, "text", &found);
    FUZZ_MEMORY_BOUND(size, 4, 256);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    check_like_jansson((const char *)data, (int64_t)size, err, &found);
    check_pieces((const char *)data, (int64_t)size, err, &found);
    if (!err) check_again(&found);
    free(found.text);
    return 0;
}
