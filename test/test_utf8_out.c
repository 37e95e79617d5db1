/* Text that comes byte by byte: whatever the cuts, the same valid UTF-8 comes out, and no more is held back
 * than must be. */
#include "test.h"

#include "base/utf8.h"
#include "cli/utf8_out.h"

/* What comes out of `bytes` given in pieces of `piece` bytes. */
static char *through(const char *bytes, int64_t size, int piece)
{
    static char text[4096];
    Utf8Out u = { .file = fmemopen(text, sizeof text, "w") };
    for (int64_t at = 0; at < size; at += piece) utf8_out_write(&u, bytes + at, size - at < piece ? size - at : piece);
    utf8_out_end(&u);
    fputc(0, u.file);
    fclose(u.file);
    return text;
}

#define BAD "\xEF\xBF\xBD"

TEST(known_cases)
{
    static const struct { const char *in, *want; } cases[] = {
        { "plain", "plain" },
        { "h\xC3\xA9llo \xE2\x82\xAC \xF0\x9F\x98\x80", "h\xC3\xA9llo \xE2\x82\xAC \xF0\x9F\x98\x80" },
        { "a\x80z", "a" BAD "z" },
        { "a\xC3", "a" BAD },
        { "a\xC3z", "a" BAD "z" },
        { "\xE2\x82z", BAD "z" },           /* a cut character is one replacement */
        { "\xE2\x82\xE2\x82\xAC", BAD "\xE2\x82\xAC" },
        { "\xF0\x9F\x98", BAD },
        { "\xC0\xAF", BAD BAD },            /* overlong */
        { "\xED\xA0\x80", BAD BAD BAD },    /* half a surrogate pair */
        { "\xF4\x90\x80\x80", BAD BAD BAD BAD }, /* above U+10FFFF */
        { "\xFF\xFE", BAD BAD },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int piece = 1; piece <= 5; piece++) {
            const char *got = through(cases[i].in, (int64_t)strlen(cases[i].in), piece);
            CHECK_MSG(strcmp(got, cases[i].want) == 0, "case %d, pieces of %d: '%s'", (int)i, piece, got);
        }
}

TEST(nothing_is_held_back_without_need)
{
    char text[16] = "";
    Utf8Out u = { .file = fmemopen(text, sizeof text, "w") };
    setbuf(u.file, NULL);
    utf8_out_write(&u, "a\xE2\x82", 3);
    CHECK(u.held_bytes == 2);
    utf8_out_write(&u, "\xAC", 1);
    CHECK(u.held_bytes == 0);
    utf8_out_write(&u, "\xF5", 1); /* no character begins so */
    CHECK(u.held_bytes == 0);
    fclose(u.file);
    CHECK(strcmp(text, "a\xE2\x82\xAC" BAD) == 0);
}

TEST(a_terminal_gets_no_escapes)
{
    static const char in[] = "a\033[2J\n\tb\xC2\x9B" "c\xC3\xA9";
    char text[2][32] = { "", "" };
    for (int terminal = 0; terminal < 2; terminal++) {
        Utf8Out u = { .file = fmemopen(text[terminal], sizeof text[0], "w"), .terminal = terminal };
        for (const char *at = in; *at; at++) utf8_out_write(&u, at, 1);
        fclose(u.file);
    }
    CHECK(!strcmp(text[0], in));
    CHECK(!strcmp(text[1], "a?[2J\n\tb?" "?c\xC3\xA9"));
}

TEST(any_bytes_become_valid_text)
{
    uint64_t seed = 7;
    for (int round = 0; round < 2000; round++) {
        char in[64], first[4096];
        int n = (int)(test_rand(&seed) % 64);
        static const uint8_t often[] = { 0xE0, 0xA0, 0x80, 0xED, 0x9F, 0xF0, 0x90, 0xF4, 0x8F, 'a', 0xC2, 0xBF };
        for (int i = 0; i < n; i++) in[i] = (char)often[test_rand(&seed) % sizeof often];
        strcpy(first, through(in, n, 1));
        CHECK(utf8_valid_bytes(first, (int64_t)strlen(first)) == (int64_t)strlen(first));
        CHECK(strcmp(first, through(in, n, 1 + (int)(test_rand(&seed) % 7))) == 0);
        if (utf8_valid_bytes(in, n) == n) CHECK(memcmp(first, in, (size_t)n) == 0);
    }
}

TEST_MAIN
