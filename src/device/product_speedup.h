/*
 * How the CPU's threads share a product (src/cpu/gemm.c): a task is whole tiles, a small product has few tasks, and
 * what is too small to share is one thread's. So a product of so many threads is not as much faster as there are of
 * them, and between two sizes by how much is a matter of steps. A planner has to know it of shapes that nobody
 * measured.
 */
#ifndef MEGATRAIN_DEVICE_PRODUCT_SPEEDUP_H
#define MEGATRAIN_DEVICE_PRODUCT_SPEEDUP_H

#include "device/ops.h"

typedef struct {
    int64_t rows, outputs, inputs;
    bool bf16;
    bool fixed; /* linear_dw's dw is of fixed point, as with run.reproducible = layout */
} ProductShape;

/* The instructions of a product; product_by_here: this processor's best. */
typedef struct {
    Isa isa;
    DotKind dot;
} ProductBy;

ProductBy product_by_here(void);

/* The instructions that a device's file names (config/device_points.h). Those of here stand in if the file names none,
 * or names an instruction set that this processor cannot execute the rules of. */
ProductBy product_by_names(const char *isa, const char *dot);

/* How much faster so many threads are than one, were tasks all that counts, in linear_fwd, linear_dx and linear_dw.
 * Other ops: 1. */
double product_speedup(ProductBy by, OpId id, ProductShape shape, int threads);

/* The same for each build of src/cpu/ (linear.c). */
double cpu_avx512_product_speedup(const Device *dev, OpId id, ProductShape shape);
double cpu_avx2_product_speedup(const Device *dev, OpId id, ProductShape shape);
double cpu_c_product_speedup(const Device *dev, OpId id, ProductShape shape);

#endif
