/* Text from outside, made fit for a terminal (base/plain.h), and where it is printed. */
#include "test.h"

#include "base/log.h"
#include "base/plain.h"
#include "base/utf8.h"
#include "scratch.h"

static const char *made(const char *text, const char *kept)
{
    static char out[256];
    snprintf(out, sizeof out, "%s", text);
    plain_make(out, kept);
    return out;
}

TEST(known_cases)
{
    static const struct {
        const char *in, *kept, *want;
    } cases[] = {
        { "plain", PLAIN_LINE, "plain" },
        { "h\xC3\xA9llo \xE2\x82\xAC \xF0\x9F\x98\x80", PLAIN_LINE, "h\xC3\xA9llo \xE2\x82\xAC \xF0\x9F\x98\x80" },
        { "a\033[2Jb\033]52;c;QQ==\a", PLAIN_LINE, "a?[2Jb?]52;c;QQ==?" },
        { "a\xC2\x9B" "2J\xC2\xA0", PLAIN_LINE, "a??2J\xC2\xA0" }, /* CSI as C1; U+00A0 is a blank */
        { "a\x9B" "2J\xFF", PLAIN_LINE, "a?2J?" },
        { "a\nb\tc\rd\x7F", PLAIN_LINE, "a?b?c?d?" },
        { "a\nb\tc\rd\x7F", PLAIN_LINES, "a\nb\tc?d?" },
        { "\033[1;31mred\033[0m\033[2J\033[m", PLAIN_COLORS, "\033[1;31mred\033[0m?[2J\033[m" },
        { "\033[1;31", PLAIN_COLORS, "?[1;31" },
        { "cut \xE2\x82", PLAIN_LINE, "cut ??" },
        { "a\u202Etxt.b\u2069 \u2070\u200F", PLAIN_LINES, "a???txt.b??? \u2070\u200F" }, /* turned round; not these */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *got = made(cases[i].in, cases[i].kept);
        CHECK_MSG(!strcmp(got, cases[i].want), "case %d: '%s'", (int)i, got);
    }
}

/* Every two bytes in a row, 0 among them, and what comes of them by both functions. */
TEST(any_bytes_become_plain)
{
    int wrong = 0;
    for (int a = 0; a < 256; a++)
        for (int b = 0; b < 256; b++) {
            const char in[] = { 'x', (char)a, (char)b, 'z', 0 };
            char *out = NULL, copy[sizeof in];
            size_t size;
            FILE *f = open_memstream(&out, &size);
            plain_put(f, in, 4, PLAIN_LINE);
            fclose(f);
            wrong += size != 4 || utf8_valid_bytes(out, 4) != 4;
            for (int i = 0; i < 4; i++) {
                const uint8_t c = (uint8_t)out[i];
                wrong += c < ' ' || c == 0x7F || (c == 0xC2 && (uint8_t)out[i + 1] < 0xA0);
            }
            memcpy(copy, in, sizeof in);
            plain_make(copy, PLAIN_LINE);
            wrong += a && b && strcmp(copy, out);
            free(out);
        }
    CHECK_MSG(wrong == 0, "%d", wrong);
}

TEST(errors_and_log_lines_are_plain)
{
    err_set(ERR_DATA, "cannot open '%s'", "a\xC2\x9B" "2J\xFF\033[2J\n");
    err_hint("%s", "b\xC2\x9B");
    CHECK(!strcmp(err_message(), "cannot open 'a??2J??[2J?'"));
    CHECK(!strcmp(err_hint_text(), "b??"));
    const char *path = write_text("log", "");
    CHECK(log_to_file(path));
    log_info("rank on '%s'", "host\033]0;x\a\xC2\x9B");
    char *text;
    int64_t size;
    OK(file_read_all(path, 1 << 16, &text, &size));
    CHECK_MSG(strstr(text, "rank on 'host?]0;x?" "?" "?'\n"), "%s", text);
    free(text);
}

TEST_MAIN
