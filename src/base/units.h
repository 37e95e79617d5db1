/* Numbers for people: short texts for bytes, counts and durations. Into the caller's buffer, which is returned. */
#ifndef MEGATRAIN_BASE_UNITS_H
#define MEGATRAIN_BASE_UNITS_H

#include <stdint.h>

enum { UNITS_BYTES = 24 };

const char *units_bytes(char buf[UNITS_BYTES], int64_t bytes);    /* "812 B", "1.5 MiB", "12.3 GiB" */
const char *units_count(char buf[UNITS_BYTES], double count);     /* "812", "13.5k", "1.24M", "6.1T" */
const char *units_seconds(char buf[UNITS_BYTES], double seconds); /* "0.8s", "42s", "9m41s", "2h05m", "3d04h" */
const char *units_step(char buf[UNITS_BYTES], double seconds);    /* "71.8 ms", "118.4 s", "21m05s" */
const char *units_commas(char buf[32], int64_t value);            /* "1,234,567" */

#endif
