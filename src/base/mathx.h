/*
 * Elementary functions in double, our own: the same bits on every machine, compiler and libc, which libm does
 * not promise. For what the host computes once or once a step: initial values, RoPE tables, learning rates.
 * (The kernels' float32 exp, log and tanh are in src/cpu/vec.h.) Only + - * / and bit moves are used, each of
 * them rounded as IEEE 754 says; built with -ffp-contract=off like everything here.
 *
 * Relative error below 1e-15 unless said otherwise; test_mathx compares with libm in long double. NaN gives
 * NaN; results too large are infinite.
 */
#ifndef MEGATRAIN_BASE_MATHX_H
#define MEGATRAIN_BASE_MATHX_H

double m_exp(double x);
double m_log(double x); /* x > 0; 0 gives -infinity, below 0 NaN */

/* Radians, |x| <= 1e6 (ASSERT). Absolute error below 1e-15. */
double m_sin(double x);
double m_cos(double x);

/* x >= 0 to a real power. Relative error below 4e-16 * (1 + |y ln x|). */
double m_pow(double x, double y);

#endif
