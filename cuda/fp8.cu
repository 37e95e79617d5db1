/* 8-bit operands and their products: not on a GPU yet (config.def refuses run.precision = fp8 there). */
#include "kernel.cuh"

static Err not_there(const char *op) { return err_set(ERR_SHAPE, "%s: no backend on cuda yet", op); }

extern "C" Err cuda_fp8_amax(Stream *, const fp8_amax_args *) { return not_there("fp8_amax"); }
extern "C" Err cuda_fp8_cast(Stream *, const fp8_cast_args *) { return not_there("fp8_cast"); }
extern "C" Err cuda_fp8_values(Stream *, const fp8_values_args *) { return not_there("fp8_values"); }
extern "C" Err cuda_fp8_product(Stream *, const fp8_product_args *) { return not_there("fp8_product"); }
extern "C" Err cuda_fp8_product_add(Stream *, const fp8_product_add_args *) { return not_there("fp8_product_add"); }
