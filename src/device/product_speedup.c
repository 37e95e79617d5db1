/* See product_speedup.h. */
#include "device/product_speedup.h"

#include <string.h>

ProductBy product_by_here(void) { return (ProductBy){ isa_best(), dot_best() }; }

ProductBy product_by_names(const char *isa, const char *dot)
{
    ProductBy by = product_by_here();
    bool has = false;
    for (Isa i = ISA_AUTO + 1; i < ISA_COUNT && *isa; i++)
        if (!strcmp(isa, isa_name(i)) && isa_supported(i)) by.isa = i, has = true;
    for (DotKind k = 0; k < DOT_KINDS && has; k++)
        if (!strcmp(dot, dot_name(k))) by.dot = k;
    return by;
}

double product_speedup(ProductBy by, OpId id, ProductShape shape, int threads)
{
    const Device dev = {
        .isa = by.isa, .threads = threads, .dot = by.dot, .dot_pairs = by.dot != DOT_FMA, .dot_tiles = by.dot == DOT_AMX
    };
    const bool shared = id == OP_linear_fwd || id == OP_linear_dx || id == OP_linear_dw;
    if (!shared || threads < 2) return 1;
    if (by.isa == ISA_AVX512) return cpu_avx512_product_speedup(&dev, id, shape);
    return by.isa == ISA_AVX2 ? cpu_avx2_product_speedup(&dev, id, shape) : cpu_c_product_speedup(&dev, id, shape);
}
