/* See rank_list.h. */
#include "base/rank_list.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* A number of digits alone at *at, which moves behind it; -1 if there is none below `end`. */
static int read_rank(const char **at, int end)
{
    char *behind;
    if (**at < '0' || **at > '9') return -1;
    const long long rank = strtoll(*at, &behind, 10);
    *at = behind;
    return rank < end ? (int)rank : -1;
}

/* "3" or "3-5" at *at, which moves behind it. */
static bool read_item(const char **at, int ranks, int *first, int *last)
{
    *first = *last = read_rank(at, ranks);
    if (**at == '-') {
        ++*at;
        *last = read_rank(at, ranks);
    }
    return *first >= 0 && *last >= *first;
}

bool rank_list_read(const char *text, int ranks, bool *in)
{
    const bool all = !strcmp(text, "all");
    int first, last;
    for (int r = 0; in && r < ranks; r++) in[r] = all;
    for (const char *at = text; !all; at++) {
        if (!read_item(&at, ranks, &first, &last)) return false;
        for (int r = first; in && r <= last; r++) in[r] = true;
        if (!*at) return true;
        if (*at != ',') return false;
    }
    return true;
}
