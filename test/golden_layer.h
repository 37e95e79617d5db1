/* Layers against the numbers of another program (../shared/fixtures/kinds): arrays of JSON, linear layers as loops. */
#ifndef MEGATRAIN_TEST_GOLDEN_LAYER_H
#define MEGATRAIN_TEST_GOLDEN_LAYER_H

#include "base/json.h"
#include "test.h"

/* All numbers of an array of any depth. */
static inline float *numbers(const Json *j, float *to)
{
    if (!json_count(j)) {
        *to = (float)json_number(j, NAN);
        return to + 1;
    }
    for (int64_t i = 0; i < json_count(j); i++) to = numbers(json_at(j, i), to);
    return to;
}

static inline void golden_numbers(const Json *from, const char *name, float *to, int64_t n)
{
    CHECK_MSG(numbers(json_get(from, name), to) == to + n, "%s", name);
}

static inline void golden_check(const Json *from, const char *name, const float *got, int64_t n)
{
    float want[512];
    CHECK(n <= 512);
    golden_numbers(from, name, want, n);
    for (int64_t i = 0; i < n; i++) CHECK_CLOSE((double)got[i], (double)want[i], 2e-6, "%s %d", name, (int)i);
}

/* y [rows][O] = x [rows][I] w^T; transposed: dx = dy w; sum: dw += dy^T x. */
static inline void times(float *y, const float *x, const float *w, int rows, int O, int I)
{
    for (int n = 0; n < rows; n++)
        for (int o = 0; o < O; o++) {
            double s = 0;
            for (int i = 0; i < I; i++) s += (double)x[n * I + i] * (double)w[o * I + i];
            y[n * O + o] = (float)s;
        }
}

static inline void times_back(float *dx, const float *dy, const float *w, int rows, int O, int I)
{
    for (int n = 0; n < rows; n++)
        for (int i = 0; i < I; i++)
            for (int o = 0; o < O; o++) dx[n * I + i] += dy[n * O + o] * w[o * I + i];
}

static inline void times_sum(float *dw, const float *dy, const float *x, int rows, int O, int I)
{
    for (int n = 0; n < rows; n++)
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i++) dw[o * I + i] += dy[n * O + o] * x[n * I + i];
}

#endif
