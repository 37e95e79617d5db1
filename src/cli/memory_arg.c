/* See memory_arg.h. */
#include "cli/memory_arg.h"

#include <stdlib.h>
#include <string.h>

Err memory_arg(const char *option, const char *text, int64_t *bytes)
{
    static const struct {
        const char *unit;
        double bytes;
    } units[] = { { "GB", 1e9 }, { "GiB", (double)(1 << 30) }, { "MB", 1e6 }, { "MiB", (double)(1 << 20) } };
    char *end;
    const double number = strtod(text, &end);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        const double all = number * units[i].bytes;
        if (end == text || strcmp(end, units[i].unit) != 0 || !(all >= 1 && all < 1e15)) continue;
        *bytes = (int64_t)all;
        return ERR_OK;
    }
    return err_set(ERR_CONFIG, "--%s '%s' is no amount of memory", option, text),
           err_hint("a number and GB, GiB, MB or MiB: 80GB");
}
