/* See plain.h. */
#include "base/plain.h"

#include <stdbool.h>
#include <string.h>

#include "base/utf8.h"

enum { ESCAPE = 0x1B, DELETE = 0x7F };

/* Bytes of the colour at s, an escape; 0: it is another sequence. */
static int64_t color_bytes(const char *s, int64_t size)
{
    int64_t n = 2;
    if (size < 3 || s[1] != '[') return 0;
    while (n < size && ((s[n] >= '0' && s[n] <= '9') || s[n] == ';')) n++;
    return n < size && s[n] == 'm' ? n + 1 : 0;
}

/* U+202A to U+202E and U+2066 to U+2069 turn what stands behind them round, up to their end or the line's. */
static bool turns_text(const uint8_t *s)
{
    return s[0] == 0xE2 &&
           ((s[1] == 0x80 && s[2] >= 0xAA && s[2] <= 0xAE) || (s[1] == 0x81 && s[2] >= 0xA6 && s[2] <= 0xA9));
}

/* Bytes of what may stay at the front of s; 0: its first byte may not. */
static int64_t plain_bytes(const char *s, int64_t size, const char *kept)
{
    const uint8_t c = (uint8_t)s[0];
    if (c < ' ' || c == DELETE) {
        if (!c || !strchr(kept, c)) return 0;
        return c == ESCAPE ? color_bytes(s, size) : 1;
    }
    const int n = utf8_char_bytes((const uint8_t *)s, size);
    if (n == 3 && turns_text((const uint8_t *)s)) return 0;
    return c == 0xC2 && n && (uint8_t)s[1] < 0xA0 ? 0 : n; /* U+0080 to U+009F: C1 */
}

void plain_make(char *text, const char *kept)
{
    const int64_t size = (int64_t)strlen(text);
    for (int64_t i = 0, n; i < size; i += n ? n : 1) {
        n = plain_bytes(text + i, size - i, kept);
        if (!n) text[i] = '?';
    }
}

void plain_put(FILE *out, const char *text, int64_t size_bytes, const char *kept)
{
    for (int64_t i = 0, n; i < size_bytes; i += n ? n : 1) {
        n = plain_bytes(text + i, size_bytes - i, kept);
        if (n) fwrite(text + i, 1, (size_t)n, out);
        else fputc('?', out);
    }
}
