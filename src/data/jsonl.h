/*
 * One line of a JSON-lines file: finds a string member of the object on it. The whole line is checked for JSON
 * grammar, but bytes inside strings are passed on as they are, UTF-8 or not: what to do with them is the caller's
 * decision (a general JSON library refuses such lines). Nesting costs no stack, and a line may come in pieces, so that
 * its length costs no memory either.
 */
#ifndef MEGATRAIN_DATA_JSONL_H
#define MEGATRAIN_DATA_JSONL_H

#include <stdint.h>

#include "base/err.h"

enum { JSONL_DEPTH_MAX = 256, JSONL_KEY_PARTS = 8, JSONL_KEY_BYTES = 256, JSONL_MEMBERS_BYTES = 160 };

/* Decoded text. It grows as needed and is used again line after line. Start with all zero, free(text) at the end. */
typedef struct {
    char *text;
    int64_t size, capacity;
} JsonlText;

/* Place of the text: "text", or "a.b" for member b of the object that is member a; "\." is a dot in a name. */
typedef struct {
    char text[JSONL_KEY_BYTES]; /* the key as it was given, for messages */
    char names[JSONL_KEY_BYTES];
    int start[JSONL_KEY_PARTS + 1]; /* where each name begins in `names`, and where the last one ends */
    int parts;
    bool skip_missing; /* a line without the text, or with null in its place, is no error: jsonl_is_missing */
} JsonlKey;

/* ERR_CONFIG if the key is empty, too long or too deep, or one of its names is empty. */
Err jsonl_key(const char *text, JsonlKey *out);

/* A line that is being read; only jsonl.c looks inside. */
typedef struct {
    const JsonlKey *key;
    int64_t column;             /* how many bytes of the line were in earlier pieces */
    char open[JSONL_DEPTH_MAX]; /* '{' or '[' of the values we are inside of */
    int depth, on_path;         /* on_path: depth of the innermost object that the key leads through */
    int state, sink, after_string, step;
    const char *word;
    uint32_t code, high; /* the digits of a \u escape so far; the half of a pair that waits for the other */
    int name_at;         /* bytes of the key's name that the member's name has matched; -1: another name */
    bool matched, seen[JSONL_KEY_PARTS], found;
    char members[JSONL_MEMBERS_BYTES]; /* names of the object's own members, as far as there is room: for messages */
    int members_bytes;
} JsonlScan;

/*
 * The line in pieces: begin, feed any number of times, end. Each piece's part of the wanted text is added to `out`
 * (whose size the caller sets to 0 when it begins). \u escapes become UTF-8; half of a surrogate pair becomes U+FFFD.
 * ERR_DATA naming the column: not JSON, nested deeper than JSONL_DEPTH_MAX, no such member (but see
 * JsonlKey.skip_missing), member twice or not a string.
 */
void jsonl_begin(JsonlScan *s, const JsonlKey *key);
Err jsonl_feed(JsonlScan *s, const char *bytes, int64_t size, JsonlText *out);
Err jsonl_end(JsonlScan *s, JsonlText *out);

/* After the end: has the line no text, which its key allows? */
bool jsonl_is_missing(const JsonlScan *s);

/* Was there nothing but blanks so far? */
bool jsonl_blank(const JsonlScan *s);

/* Is this the beginning of JSON lines: the first line that is not blank is an object, or the beginning of one? */
bool jsonl_begins(const char *text, int64_t size);

/* Reads a whole line at once: out = the text of the member. */
Err jsonl_member(const char *line, int64_t size, const char *key, JsonlText *out);

#endif
