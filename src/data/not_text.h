/* Files that are no text, told by their first bytes before they become tokens. */
#ifndef MEGATRAIN_DATA_NOT_TEXT_H
#define MEGATRAIN_DATA_NOT_TEXT_H

#include <stdint.h>

#include "base/err.h"

/* ERR_DATA naming what the file is, when its beginning is that of a known format or holds many zero bytes; the hint
 * says how its text is to be had. key: the column of a table, or the member of a JSON line, that holds the text. */
Err not_text_check(const char *path, const char *key, const char *beginning, int64_t size);

#endif
