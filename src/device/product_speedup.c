/* See product_speedup.h. */
#include "device/product_speedup.h"

double product_speedup(OpId id, ProductShape shape, int threads)
{
    const Isa isa = isa_best();
    const Device dev = { .isa = isa,
                         .threads = threads,
                         .dot = dot_best(),
                         .dot_pairs = dot_supported(),
                         .dot_tiles = dot_tiles() == TILES_AGREE };
    const bool shared = id == OP_linear_fwd || id == OP_linear_dx || id == OP_linear_dw;
    if (!shared || threads < 2) return 1;
    if (isa == ISA_AVX512) return cpu_avx512_product_speedup(&dev, id, shape);
    return isa == ISA_AVX2 ? cpu_avx2_product_speedup(&dev, id, shape)
                           : cpu_c_product_speedup(&dev, id, shape);
}
