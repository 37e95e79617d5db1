/* See units.h. Three significant digits, so that a column of them keeps its width. */
#include "base/units.h"

#include <math.h>
#include <stdio.h>

static const char *scaled(char *buf, double value, double unit, const char *const *names, int count)
{
    int k = 0;
    /* 999.5 would be printed as 1000 */
    while (fabs(value) >= (unit == 1024 ? 1023.5 : 999.5) && k < count - 1) {
        value /= unit;
        k++;
    }
    int digits = k == 0 || fabs(value) >= 99.95 ? 0 : fabs(value) >= 9.995 ? 1 : 2;
    snprintf(buf, UNITS_BYTES, "%.*f%s", digits, value, names[k]);
    return buf;
}

const char *units_bytes(char buf[UNITS_BYTES], int64_t bytes)
{
    static const char *const names[] = { " B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB" };
    return scaled(buf, (double)bytes, 1024, names, 7);
}

const char *units_count(char buf[UNITS_BYTES], double count)
{
    static const char *const names[] = { "", "k", "M", "G", "T", "P", "E" };
    return scaled(buf, count, 1000, names, 7);
}

const char *units_seconds(char buf[UNITS_BYTES], double seconds)
{
    if (!(seconds >= 0 && seconds < 1e9)) snprintf(buf, UNITS_BYTES, "?");
    else if (seconds < 9.95) snprintf(buf, UNITS_BYTES, "%.1fs", seconds);
    else {
        int64_t s = (int64_t)(seconds + 0.5), m = s / 60, h = m / 60, d = h / 24;
        if (m == 0) snprintf(buf, UNITS_BYTES, "%ds", (int)s);
        else if (h == 0) snprintf(buf, UNITS_BYTES, "%dm%02ds", (int)m, (int)(s % 60));
        else if (d == 0) snprintf(buf, UNITS_BYTES, "%dh%02dm", (int)h, (int)(m % 60));
        else snprintf(buf, UNITS_BYTES, "%dd%02dh", (int)d, (int)(h % 24));
    }
    return buf;
}

const char *units_step(char buf[UNITS_BYTES], double seconds)
{
    if (!(seconds >= 0 && seconds < 600)) return units_seconds(buf, seconds);
    if (seconds < 1) snprintf(buf, UNITS_BYTES, "%.*f ms", seconds < 0.1 ? 2 : 1, 1e3 * seconds);
    else snprintf(buf, UNITS_BYTES, "%.*f s", seconds < 10 ? 2 : 1, seconds);
    return buf;
}

const char *units_commas(char buf[32], int64_t value)
{
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)value), used = 0;
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) buf[used++] = ',';
        buf[used++] = digits[i];
    }
    buf[used] = 0;
    return buf;
}
