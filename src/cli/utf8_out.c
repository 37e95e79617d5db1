/* See utf8_out.h. */
#include "cli/utf8_out.h"

#include <string.h>

#include "base/plain.h"
#include "base/utf8.h"

/* True if these bytes are valid so far: some continuation makes a character of them. */
static bool may_go_on(const uint8_t *s, int n)
{
    uint8_t whole[4];
    memcpy(whole, s, (size_t)n);
    /* one of these is in the narrower range that the second byte has after E0, ED, F0 and F4 */
    static const uint8_t tails[] = { 0x80, 0x90, 0xA0 };
    for (int k = 0; k < 3; k++) {
        memset(whole + n, tails[k], (size_t)(4 - n));
        if (utf8_char_bytes(whole, 4) > n) return true;
    }
    return false;
}

static void drop_first(Utf8Out *u, int n)
{
    u->held_bytes -= n;
    memmove(u->held, u->held + n, (size_t)u->held_bytes);
}

/* Writes what is decided: whole characters, and replacements for what can be none. */
static void settle(Utf8Out *u, bool end)
{
    while (u->held_bytes > 0) {
        int n = utf8_char_bytes(u->held, u->held_bytes);
        if (n > 0) {
            if (u->terminal) plain_put(u->file, (const char *)u->held, n, PLAIN_LINES);
            else fwrite(u->held, 1, (size_t)n, u->file);
            drop_first(u, n);
        } else if (!end && u->held_bytes < 4 && may_go_on(u->held, u->held_bytes)) return;
        else {
            /* one replacement for the longest beginning of a character, as the Unicode standard advises */
            n = 1;
            while (n + 1 < 4 && n < u->held_bytes && may_go_on(u->held, n) && may_go_on(u->held, n + 1)) n++;
            fputs("\xEF\xBF\xBD", u->file);
            drop_first(u, n);
        }
    }
}

void utf8_out_write(Utf8Out *u, const char *bytes, int64_t size_bytes)
{
    for (int64_t i = 0; i < size_bytes; i++) {
        u->held[u->held_bytes++] = (uint8_t)bytes[i];
        settle(u, false);
    }
}

void utf8_out_end(Utf8Out *u) { settle(u, true); }
