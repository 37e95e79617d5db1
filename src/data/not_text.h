/* Recognises files that are no text by their first bytes, before they become tokens. */
#ifndef MEGATRAIN_DATA_NOT_TEXT_H
#define MEGATRAIN_DATA_NOT_TEXT_H

#include <stdint.h>

#include "base/err.h"

/* ERR_DATA, which says what the file is: it begins as a known format does, or its beginning holds many zero bytes. The
 * hint says how to get its text. key: the column of a table, or the member of a JSON line, that holds the text. */
Err not_text_check(const char *path, const char *key, const char *beginning, int64_t size);

#endif
