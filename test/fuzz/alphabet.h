/* For the targets that read vocabularies: what must stand in each of them need not stand in each input. */
#ifndef MEGATRAIN_TEST_ALPHABET_H
#define MEGATRAIN_TEST_ALPHABET_H

#include "fuzz.h"

#include "base/utf8.h"

/* The 256 byte tokens of GPT-2's alphabet as JSON members, ids 0-255; static. */
static const char *alphabet_members(void)
{
    static char text[256 * 16];
    if (*text) return text;
    size_t n = 0;
    for (uint32_t byte = 0, other = 256; byte < 256; byte++) {
        bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        text[n++] = '"';
        if (byte == '"' || byte == '\\') text[n++] = '\\';
        n += (size_t)utf8_put(text + n, itself ? byte : other++);
        n += (size_t)sprintf(text + n, "\":%u%s", byte, byte < 255 ? "," : "");
    }
    return text;
}

/* A copy of the text with the first '@' replaced by them; malloc'ed. */
static inline char *with_alphabet(const char *text, size_t size, size_t *out_size)
{
    const char *at = memchr(text, '@', size), *members = alphabet_members();
    size_t before = at ? (size_t)(at - text) : size, n = at ? strlen(members) : 0,
           after = at ? size - before - 1 : 0;
    char *out = malloc(size + n + 1);
    if (!out) abort();
    memcpy(out, text, before);
    memcpy(out + before, members, n);
    if (after) memcpy(out + before + n, at + 1, after);
    *out_size = before + n + after;
    out[*out_size] = 0;
    return out;
}

#endif
