/* See axis.h. */
#include "record/axis.h"

#include <math.h>
#include <stdio.h>

double axis_distance(double range, int wanted)
{
    double d = 1, least = range / wanted;
    while (d < least) d *= 10;
    while (d / 10 >= least) d /= 10;
    return d / 5 >= least ? d / 5 : d / 2 >= least ? d / 2 : d;
}

const char *axis_label(char buf[AXIS_BYTES], double value, double distance)
{
    static const struct {
        double unit;
        const char *suffix;
    } scales[] = { { 1e12, "T" }, { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } };
    int digits = 0;
    if (fabs(value) < 0.5 * distance) return snprintf(buf, AXIS_BYTES, "0"), buf;
    for (int i = 0; i < 4; i++) {
        const double unit = scales[i].unit;
        if (fabs(value) < 0.9999 * unit || distance < 0.0999 * unit) continue;
        return snprintf(buf, AXIS_BYTES, "%.4g%s", value / unit, scales[i].suffix), buf;
    }
    const int e = (int)floor(log10(distance) + 1e-9);
    if (distance < 1e-3 && fabs(value) < 1000 * distance) {
        const double m = value / pow(10, e), tens = round(m) / 10;
        if (fabs(m) < 9.5) snprintf(buf, AXIS_BYTES, "%.0fe%d", m, e);
        else if (fabs(m) < 99.5) snprintf(buf, AXIS_BYTES, "%.*fe%d", tens != floor(tens), tens, e + 1);
        else snprintf(buf, AXIS_BYTES, "%.3ge%d", tens / 10, e + 2);
        return buf;
    }
    if (fabs(value) >= 1e16 || distance < 1e-9) return snprintf(buf, AXIS_BYTES, "%.3g", value), buf;
    for (double t = distance; t < 0.999; t *= 10) digits++;
    return snprintf(buf, AXIS_BYTES, "%.*f", digits, value), buf;
}

double axis_most(double low, double high, double lowest) { return high + (high - low) + 2 * (low - lowest); }

const char *axis_mark(int series)
{
    static const char *const shapes[] = { "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "m-3.5-3.5h7v7h-7z",
                                          "m0-5l5 8.5h-10z", "m0-5l5 5l-5 5l-5-5z" };
    return shapes[series % 4];
}
