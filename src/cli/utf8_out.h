/*
 * Writes bytes that come in any pieces as valid UTF-8: a character whose end has not come yet is held back, and bytes
 * that cannot become one are written as U+FFFD.
 */
#ifndef MEGATRAIN_CLI_UTF8_OUT_H
#define MEGATRAIN_CLI_UTF8_OUT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    FILE *file;
    bool terminal;   /* a terminal gets no control characters but ends of lines and tabs (base/plain.h) */
    uint8_t held[4]; /* the beginning of a character, at most 3 bytes between calls */
    int held_bytes;
} Utf8Out;

void utf8_out_write(Utf8Out *u, const char *bytes, int64_t size_bytes); /* NULL with 0 is fine */
void utf8_out_end(Utf8Out *u); /* what is held back will not be completed: U+FFFD stands for it */

#endif
