/* See quantity.h. */
#include "base/quantity.h"

#include <stdlib.h>
#include <string.h>

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* A number as value x 10^scale. */
typedef struct {
    __int128 value;
    int scale;
} Decimal;

enum { DIGITS_MAX = 30, SCALE_MAX = 40 };

/* False: there are no digits, or more than anybody writes. */
static bool read_digits(const char **at, Decimal *d)
{
    bool point = false;
    int count = 0;
    for (; is_digit(**at) || (**at == '.' && !point); ++*at) {
        if (**at == '.') {
            point = true;
            continue;
        }
        d->value = 10 * d->value + (**at - '0');
        d->scale -= point;
        if (++count > DIGITS_MAX) return false;
    }
    return count > 0;
}

static bool read_exponent(const char **at, Decimal *d)
{
    char *end;
    if (**at != 'e' && **at != 'E') return true;
    const char *digits = *at + 1 + (at[0][1] == '+' || at[0][1] == '-');
    if (!is_digit(*digits)) return false;
    const long exponent = strtol(*at + 1, &end, 10);
    *at = end;
    if (exponent < -SCALE_MAX) return false;
    d->scale += exponent < SCALE_MAX ? (int)exponent : SCALE_MAX;
    return true;
}

static bool read_letter(const char **at, Decimal *d, char *letter)
{
    static const char letters[] = "kMBT";
    *letter = 0;
    if (!**at) return true;
    const char *found = strchr(letters, **at == 'K' ? 'k' : **at);
    if (!found) return false;
    *letter = *(*at)++;
    d->scale += 3 * (int)(found - letters + 1);
    return true;
}

/* False: a part of 1 is left. */
static bool make_whole(Decimal *d)
{
    const __int128 beyond = (__int128)1 << 100;
    for (; d->scale < 0; d->scale++) {
        if (d->value % 10) return false;
        d->value /= 10;
    }
    for (; d->scale > 0 && d->value < beyond; d->scale--) d->value *= 10;
    return true;
}

Quantity quantity_whole(const char *text, int64_t *out, char *letter)
{
    Decimal d = { 0 };
    const bool negative = *text == '-';
    const char *at = text + (negative || *text == '+');
    const bool read = read_digits(&at, &d) && read_exponent(&at, &d) && read_letter(&at, &d, letter);
    if (!read || *at || !make_whole(&d)) return QUANTITY_NONE;
    if (d.value > INT64_MAX) return QUANTITY_BEYOND;
    *out = negative ? -(int64_t)d.value : (int64_t)d.value;
    return QUANTITY_WHOLE;
}

bool quantity_seconds(const char *text, double *out)
{
    static const char letters[] = "dhms";
    static const double seconds[] = { 86400, 3600, 60, 1 };
    int last = -1; /* a larger part comes first */
    *out = 0;
    while (*text) {
        char *end;
        if (!is_digit(*text) || text[1] == 'x' || text[1] == 'X') return false; /* (no hexadecimal) */
        const double count = strtod(text, &end);
        const char *unit = *end ? strchr(letters, *end) : NULL;
        if (!unit || unit - letters <= last) return false;
        last = (int)(unit - letters);
        *out += count * seconds[last];
        text = end + 1;
    }
    return last >= 0;
}
