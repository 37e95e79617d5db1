/* See observer.h. */
#include "boot/observer.h"

#include <stdio.h>

void message_text(MessageLabel l, char *out, size_t size)
{
    static const char *const names[MESSAGE_KIND_COUNT] = {
        "message",       "activation",        "gradient", "keys and values",           "gradient of keys and values",
        "part of a sum", "rows of a product", "state",    "last rows of a convolution"
    };
    const char *name = names[l.kind < MESSAGE_KIND_COUNT ? l.kind : MESSAGE_PLAIN];
    if (l.kind == MESSAGE_PLAIN || l.kind >= MESSAGE_SUM) snprintf(out, size, "%s", name);
    else if (l.kind == MESSAGE_KEYS || l.kind == MESSAGE_KEY_SUMS) snprintf(out, size, "%s of part %u", name, l.stage);
    else snprintf(out, size, "%s of micro-batch %u for stage %u", name, l.microbatch, l.stage);
}
