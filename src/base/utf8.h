/*
 * UTF-8 by the book: no overlong forms, no surrogates, nothing above U+10FFFF. Text from outside
 * is checked here once; whatever runs after it (PCRE2, utf8proc) is told to trust it.
 */
#ifndef MEGATRAIN_BASE_UTF8_H
#define MEGATRAIN_BASE_UTF8_H

#include <stdint.h>
#include <string.h>

static inline int utf8_is_tail(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* Bytes (1 to 4) of the valid character at the front of s, which has `size` > 0 bytes; 0 if it is
 * not valid. */
static inline int utf8_char_bytes(const uint8_t *s, int64_t size)
{
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xC2 || s[0] > 0xF4) return 0;
    int n = s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    if (size < n || !utf8_is_tail(s[1])) return 0;
    /* the second byte decides about overlong forms, surrogates and the upper end */
    if (s[0] == 0xE0 && s[1] < 0xA0) return 0;
    if (s[0] == 0xED && s[1] > 0x9F) return 0;
    if (s[0] == 0xF0 && s[1] < 0x90) return 0;
    if (s[0] == 0xF4 && s[1] > 0x8F) return 0;
    for (int i = 2; i < n; i++)
        if (!utf8_is_tail(s[i])) return 0;
    return n;
}

/* Length in bytes of the longest valid beginning of the text. */
static inline int64_t utf8_valid_bytes(const char *text, int64_t size)
{
    const uint8_t *s = (const uint8_t *)text;
    int64_t i = 0;
    while (i < size) {
        uint64_t eight;
        if (size - i >= 8) { /* eight ASCII bytes at a time */
            memcpy(&eight, s + i, 8);
            if ((eight & 0x8080808080808080u) == 0) {
                i += 8;
                continue;
            }
        }
        int n = utf8_char_bytes(s + i, size - i);
        if (n == 0) break;
        i += n;
    }
    return i;
}

/* Code point of the valid character at s; *bytes = its length. */
static inline uint32_t utf8_get(const char *text, int *bytes)
{
    const uint8_t *s = (const uint8_t *)text;
    int n = s[0] < 0x80 ? 1 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    uint32_t c = n == 1 ? s[0] : s[0] & (0x7Fu >> n);
    for (int i = 1; i < n; i++) c = c << 6 | (s[i] & 0x3Fu);
    *bytes = n;
    return c;
}

/* Writes a code point (at most 4 bytes); returns its length. */
static inline int utf8_put(char *out, uint32_t c)
{
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    if (n == 1) {
        out[0] = (char)c;
        return 1;
    }
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)((0xF00u >> n) | c);
    return n;
}

#endif
