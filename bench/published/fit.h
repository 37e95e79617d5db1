/*
 * Constants that make the logarithms of many ratios small: least sums of |ratio|, by weights (each row's is 1 over its
 * last error), beside a pull of each constant to where it began. Rows depend on the logarithms of the constants in
 * straight lines, as far as a step goes: the caller measures slopes, takes a step, and measures anew.
 */
#ifndef MEGATRAIN_BENCH_FIT_H
#define MEGATRAIN_BENCH_FIT_H

#include <math.h>
#include <stdbool.h>

enum { FIT_CONSTANTS = 10, FIT_ROWS = 128 };

typedef struct {
    int rows, constants;
    double ratio[FIT_ROWS];                /* log of predicted over measured */
    double slope[FIT_ROWS][FIT_CONSTANTS]; /* of it, by the log of a constant */
    bool out[FIT_ROWS];                    /* does not count */
    double moved[FIT_CONSTANTS];           /* log of a constant over where it began */
    double low[FIT_CONSTANTS], high[FIT_CONSTANTS];
} Fit;

/* The pull: a constant that is e^(+-FIT_WIDTH) from its begin costs as much as one row of all that is off by FIT_WIDTH
 * costs; no row weighs more than one that is off by FIT_SMALL. */
static const double FIT_WIDTH = .2, FIT_SMALL = .03;

static inline double fit_ratio(const Fit *f, int row, const double *step)
{
    double r = f->ratio[row];
    for (int k = 0; k < f->constants; k++) r += f->slope[row][k] * step[k];
    return r;
}

/* The best value of one constant's step, the others being as they are. */
static inline double fit_one(const Fit *f, int k, const double *step, const double *weight)
{
    const double pull = 1 / FIT_WIDTH;
    double up = -pull * (f->moved[k] + step[k]), down = pull;
    for (int i = 0; i < f->rows; i++) {
        if (f->out[i]) continue;
        up -= weight[i] * f->slope[i][k] * fit_ratio(f, i, step);
        down += weight[i] * f->slope[i][k] * f->slope[i][k];
    }
    const double value = f->moved[k] + step[k] + up / down;
    return (value < f->low[k] ? f->low[k] : value > f->high[k] ? f->high[k] : value) - f->moved[k];
}

/* The step to add to the logarithms of the constants. */
static inline void fit_step(const Fit *f, double *step)
{
    enum { ROUNDS = 40, SWEEPS = 60 };
    double weight[FIT_ROWS];
    for (int k = 0; k < f->constants; k++) step[k] = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < f->rows; i++) weight[i] = 1 / fmax(fabs(fit_ratio(f, i, step)), FIT_SMALL);
        for (int sweep = 0; sweep < SWEEPS; sweep++)
            for (int k = 0; k < f->constants; k++) step[k] = fit_one(f, k, step, weight);
    }
}

#endif
