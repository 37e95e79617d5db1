/* The cases of 8-bit operands and their products. See cases.h, make_case.h. Option 1: blocks, else whole tensors. */
#include "measure/make_case.h"

enum { BLOCK = 128 };

/* The n-th codes of the call, of so many rows and columns, with factors of blocks `rows` high, or one. */
static Err make_codes(Maker *m, Tensor *out, int n, DType t, int64_t rows, int64_t columns, int64_t high)
{
    Tensor *f = &m->factors[n];
    const int64_t dims[] = { rows, columns };
    TRY(maker_tensor(m, out, 1, FILL_UNIFORM, t, 2, dims));
    const Fp8Blocks b = { (int)high, BLOCK, FP8_SCALE_POWER_OF_TWO };
    if (m->c->option % 2) {
        TRY(maker_tensor(m, f, 1, FILL_POSITIVE, F32, 2,
                         (int64_t[]){ fp8_block_count(rows, high), fp8_factor_ld(b, columns) }));
        *f = tensor_col_slice(*f, 0, fp8_block_count(columns, BLOCK));
    } else TRY(maker_tensor(m, f, 1, FILL_POSITIVE, F32, 1, (int64_t[]){ 1 }));
    out->scale = f;
    return ERR_OK;
}

BENCH(fp8_amax, { "qkv", QKV }, { "fc2", FC2 })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    MAKE(amax, 0, ZERO, I64, 1);
    ONCE(x, N, I);
    a->fresh = 1;
    return ERR_OK;
}

/* Casts of activations: as they are (option 0, 1), transposed (3), both (4, 5). */
BENCH(fp8_cast, { "fc2, tensor", FC2, 0 }, { "fc2, blocks", FC2, 1 }, { "fc2 transposed, blocks", FC2, 3 },
      { "fc2 both, tensor", FC2, 4 }, { "fc2 both, blocks", FC2, 5 })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    if (m->c->option % 2) a->blocks = (Fp8Blocks){ 1, BLOCK, FP8_SCALE_POWER_OF_TWO };
    else MAKE(amax, 0, ZERO, I64, 1);
    ONCE(x, N, I);
    if (m->c->option != 3) TRY(make_codes(m, &a->y, 0, E4M3, N, I, 1));
    return m->c->option < 2 ? ERR_OK : make_codes(m, &a->turned, 1, E4M3, I, N, 1);
}

BENCH(fp8_values, { "fc2, tensor", FC2 }, { "fc2, blocks", FC2, 1 })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    MAKE(y, 1, ZERO, F32, N, I);
    return make_codes(m, &a->x, 0, E4M3, N, I, 1);
}

BENCH(fp8_product, { "qkv", QKV }, { "proj", PROJ }, { "fc1", FC1 }, { "fc2", FC2 }, { "fc1, blocks", FC1, 1 })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    ONCE(y, N, O);
    TRY(make_codes(m, &a->x, 0, E4M3, N, I, 1));
    TRY(make_codes(m, &a->w, 1, E4M3, O, I, BLOCK));
    ONCE(bias, O);
    a->leaf = I;
    a->fast = 1;
    return ERR_OK;
}

BENCH(fp8_product_add, { "qkv", QKV }, { "proj", PROJ }, { "fc1", FC1 }, { "fc2", FC2 }, { "fc1, blocks", FC1, 1 })
{
    int64_t N, O, I;
    linear_dims(m, &N, &O, &I);
    MAKE(dw, 1, UNIFORM, m->acc, O, I);
    TRY(make_codes(m, &a->dy, 0, m->c->option ? E4M3 : E5M2, O, N, 1));
    TRY(make_codes(m, &a->x, 1, E4M3, I, N, 1));
    SHIFT_OF_GRADIENT;
    a->leaf = m->d->T;
    a->fresh = 1;
    return ERR_OK;
}

/* ---- of experts, in blocks ---- */

/* The columns that rows in runs need at most, an expert's being one. */
static int64_t columns_of_runs(const Maker *m, int64_t rows) { return BLOCK * (rows / BLOCK + m->d->experts); }

BENCH(fp8_cast_runs, { "fc1", FC1, 1 })
{
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_offset(m, &a->offset));
    MAKE(begin, 1, ZERO, I64, tensor_count(a->offset));
    ONCE(x, P, I);
    a->blocks = (Fp8Blocks){ 1, BLOCK, FP8_SCALE_POWER_OF_TWO };
    return make_codes(m, &a->y, 0, E4M3, I, BLOCK * (P / BLOCK + tensor_count(a->offset) - 1), 1);
}

BENCH(fp8_grouped, { "fc1", FC1, 1 }, { "fc2", FC2, 1 })
{
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_offset(m, &a->offset));
    ONCE(y, P, O);
    TRY(make_codes(m, &a->x, 0, E4M3, P, I, 1));
    TRY(make_codes(m, &a->w, 1, E4M3, m->d->experts * O, I, BLOCK));
    a->leaf = I;
    return ERR_OK;
}

/* Equally many rows for each expert. */
BENCH(fp8_grouped_add, { "fc1", FC1, 1 }, { "fc2", FC2, 1 })
{
    int64_t C = columns_of_runs(m, tokens_of(m) * m->d->topk), E = m->d->experts, O, I;
    expert_dims(m, &O, &I);
    MAKE(dw, 1, UNIFORM, m->acc, E, O, I);
    TRY(make_codes(m, &a->dy, 0, E4M3, O, C, 1));
    TRY(make_codes(m, &a->x, 1, E4M3, I, C, 1));
    MAKE(begin, 1, ZERO, I64, E + 1);
    SHIFT_OF_GRADIENT;
    a->fresh = 1;
    for (int64_t e = 0; e <= E; e++) {
        const int64_t at = C / BLOCK * e / E * BLOCK;
        TRY(device_write(&m->dev->stream, (int64_t *)a->begin.data + e, &at, sizeof at));
    }
    return ERR_OK;
}
