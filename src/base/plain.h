/*
 * Text that others wrote (manifests, metrics, names of files, a model's output), made fit for a terminal and for a line
 * of ours: no control character, no mark that turns text round (U+202E), no byte that is not UTF-8; each becomes '?'.
 *
 * `kept` names control characters that may stay, such as "\n". With an escape in it colours stay (ESC [ digits and
 * semicolons m), and no other sequence does.
 */
#ifndef MEGATRAIN_BASE_PLAIN_H
#define MEGATRAIN_BASE_PLAIN_H

#include <stdint.h>
#include <stdio.h>

#define PLAIN_LINE ""
#define PLAIN_LINES "\n\t"
#define PLAIN_COLORS "\n\x1b"

/* In place; the length stays. */
void plain_make(char *text, const char *kept);

/* To a file; the text stays as it is. */
void plain_put(FILE *out, const char *text, int64_t size_bytes, const char *kept);

#endif
