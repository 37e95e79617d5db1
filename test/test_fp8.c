/* The 8-bit formats and their scales (base/fp8.h), and the ops of operands in them (src/cpu/fp8.c). */
#include "base/fp8.h"
#include "ops_env.h"

/* A device that widens, as one that trains in bf16. */
static void wide_open(Device *dev, Isa isa, int threads)
{
    OK(device_open(dev, (DeviceChoice){ .threads = threads, .isa = isa, .staging_bytes = 1 << 24 }));
}

TEST(product_of_ones)
{
    enum { N = 3, O = 5, I = 40 };
    uint8_t x[N * I], w[O * I];
    float y[N * O], factor = 0.5f, sum[O * N] = { 0 }, values[N * I];
    int32_t overflow = 0, shift = 0;
    Device dev;
    wide_open(&dev, isa_best(), 1);
    memset(x, e4m3_from_float(2), sizeof x);
    memset(w, e4m3_from_float(3), sizeof w);
    const Tensor f = tensor_of(&factor, F32, 1);
    Tensor xt = tensor_of(x, E4M3, N, I), wt = tensor_of(w, E4M3, O, I);
    xt.scale = wt.scale = &f;
    OK(tested_op(&dev.stream, fp8_product, .y = tensor_of(y, F32, N, O), .x = xt, .w = wt, .leaf = I));
    OK(tested_op(&dev.stream, fp8_product_add, .dw = tensor_of(sum, F32, O, N), .dy = wt, .x = xt,
                 .shift = tensor_of(&shift, I32, 1), .overflow = tensor_of(&overflow, I32, 1), .leaf = I, .fresh = 1));
    OK(tested_op(&dev.stream, fp8_values, .y = tensor_of(values, F32, N, I), .x = xt));
    for (int i = 0; i < N * O; i++) CHECK(y[i] == 1.5f * I && sum[i] == 1.5f * I);
    for (int i = 0; i < N * I; i++) CHECK(values[i] == 1);
    int64_t amax = 0;
    OK(tested_op(&dev.stream, fp8_amax, .amax = tensor_of(&amax, I64, 1), .x = tensor_of(values, F32, N, I), .fresh = 1));
    OK(tested_op(&dev.stream, fp8_cast, .y = xt, .x = tensor_of(values, F32, N, I), .amax = tensor_of(&amax, I64, 1)));
    CHECK(factor == 1 / 448.0f && x[0] == 0x7E);
    device_close(&dev);
}

TEST_MAIN
