/*
 * GPT-2's alphabet, in which tokenizer files spell tokens. It gives each byte a printable character: the 188 printable
 * ones of Latin-1 stand for themselves, the other 68 bytes are U+0100, U+0101, ... in ascending order (a blank is
 * U+0120).
 */
#ifndef MEGATRAIN_DATA_ALPHABET_H
#define MEGATRAIN_DATA_ALPHABET_H

#include <stdbool.h>
#include <stdint.h>

enum { ALPHABET_END = 256 + 68 }; /* all characters are below */

static inline bool alphabet_is_own(uint32_t byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
}

static inline uint32_t alphabet_char(uint8_t byte)
{
    if (alphabet_is_own(byte)) return byte;
    return 256u + (byte < 33 ? byte : byte < 161 ? byte - 127u + 33u : 67u);
}

/* The byte that a character stands for; -1 if none. */
static inline int alphabet_byte(uint32_t c)
{
    if (c < 256) return alphabet_is_own(c) ? (int)c : -1;
    c -= 256;
    return c < 33 ? (int)c : c < 67 ? (int)(c - 33 + 127) : c == 67 ? 173 : -1;
}

#endif
