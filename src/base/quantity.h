/* Numbers as people write them: 1e9, 1.5B, 64k, 2h30m. */
#ifndef MEGATRAIN_BASE_QUANTITY_H
#define MEGATRAIN_BASE_QUANTITY_H

#include <stdbool.h>
#include <stdint.h>

/* A whole number: digits with a point and an exponent, and k, M, B or T behind it: 10^3, 10^6, 10^9 and 10^12.
 * *letter: that one, or 0. NONE: it is no number, or not whole; BEYOND: it does not fit into 64 bits. */
typedef enum { QUANTITY_NONE, QUANTITY_WHOLE, QUANTITY_BEYOND } Quantity;
Quantity quantity_whole(const char *text, int64_t *out, char *letter);

/* Parts of days (d), hours, minutes and seconds, such as 2h, 90s or 1h30m, in seconds. False: it is none. */
bool quantity_seconds(const char *text, double *out);

#endif
