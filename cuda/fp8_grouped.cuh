/* The problem, as the two forms of experts' products of 8 bits share it (fp8_grouped.cu, fp8_grouped_hopper.cu). */
#ifndef MEGATRAIN_CUDA_FP8_GROUPED_CUH
#define MEGATRAIN_CUDA_FP8_GROUPED_CUH

#include "grouped.cuh"

struct CodeProduct {
    Grouped<uint8_t, void> g;
    const float *a_factors, *b_factors;
    int64_t a_rows, b_rows; /* of all codes: rows whose factors lie side by side */
    int64_t squares_ld;     /* fp8_grouped: of b's factors */
    bool beside;            /* experts' weights lie side by side */
};

/* On a GPU of compute capability 9.0, results on 16 bytes: done; else nothing happens. a, b: the codes of p. */
Err fp8_grouped_hopper(Stream *s, const CodeProduct &p, Tensor a, Tensor b, Tensor y, bool *done);
Err fp8_grouped_add_hopper(Stream *s, const CodeProduct &p, Tensor a, Tensor b, Tensor dw, bool *done);

#endif
