/*
 * One line of a JSON-lines file: finds a string member of the object on it. The whole line is
 * checked for JSON grammar, but bytes inside strings are passed on as they are, UTF-8 or not: what
 * to do with them is the caller's decision (a general JSON library refuses such lines). Nesting
 * costs no stack.
 */
#ifndef MEGATRAIN_DATA_JSONL_H
#define MEGATRAIN_DATA_JSONL_H

#include <stdint.h>

#include "base/err.h"

/* Decoded text; grows as needed and is used again line after line. Start with all zero, free(text)
 * at the end. */
typedef struct {
    char *text;
    int64_t size, capacity;
} JsonlText;

/*
 * out = the string member `key` of the object that the line consists of. \u escapes become UTF-8;
 * half of a surrogate pair becomes U+FFFD. ERR_DATA naming the column: not JSON, nested deeper
 * than 256, no such member, member twice or not a string.
 */
Err jsonl_member(const char *line, int64_t size, const char *key, JsonlText *out);

#endif
