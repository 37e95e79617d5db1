/*
 * Operands of 8 bits, or 4, and their products; the formats and scales are base/fp8.h's.
 *
 * A product is that in fp32 of the numbers that codes stand for (op fp8_values), which device/widen.c makes as it
 * widens other tensors: so its order of sums is that of the linear ops in fp32, whatever the recipe.
 */
#include <stdatomic.h>

#include "base/fp8.h"
#include "base/int64.h"
#include "cpu/linear.h"
#include "cpu/rows.h"

enum { TILE = 128, TILE_ROWS_ONE = 32 }; /* rows of codes at a time; TILE_ROWS_ONE of blocks that are rows */

/* `count` numbers of a row from column i on. */
static void read_row(float *to, Tensor x, int64_t row, int64_t i, int64_t count)
{
    const int64_t at = tensor_row_at(x, row) + i;
    if (x.dtype == BF16) {
        const uint16_t *from = (const uint16_t *)x.data + at;
        for (int64_t k = 0; k < count; k++) to[k] = bf16_to_float(from[k]);
    } else {
        memcpy(to, (const float *)x.data + at, (size_t)count * sizeof *to);
    }
}

/* The largest of the magnitudes' bits and `most`. */
static uint32_t magnitude(const float *x, int64_t count, uint32_t most)
{
    for (int64_t k = 0; k < count; k++) {
        const uint32_t bits = half_float_bits(x[k]) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    return most;
}

/* ---- the largest magnitude ---- */

static void raise_to(_Atomic int64_t *to, uint32_t most)
{
    int64_t held = atomic_load(to);
    while (held < (int64_t)most && !atomic_compare_exchange_weak(to, &held, (int64_t)most)) continue;
}

static void amax_part(const void *args, int64_t first, int64_t end)
{
    const fp8_amax_args *a = args;
    float part[TILE];
    uint32_t most = 0;
    for (int64_t n = first; n < end; n++) {
        for (int64_t i = 0; i < a->x.dim[1]; i += TILE) {
            const int64_t count = min64(TILE, a->x.dim[1] - i);
            read_row(part, a->x, n, i, count);
            most = magnitude(part, count, most);
        }
    }
    raise_to(a->amax.data, most);
}

/* first and end: of runs of rows that are mixed with each other, in each column. */
static void mixed_amax_part(const void *args, int64_t first, int64_t end)
{
    const fp8_amax_args *a = args;
    float row[TILE], turned[TILE][FP8_MIXED];
    uint32_t most = 0;
    for (int64_t n = first; n < end; n++) {
        for (int64_t i = 0; i < a->x.dim[1]; i += TILE) {
            const int64_t count = min64(TILE, a->x.dim[1] - i);
            for (int64_t r = 0; r < FP8_MIXED; r++) {
                read_row(row, a->x, n * FP8_MIXED + r, i, count);
                for (int64_t k = 0; k < count; k++) turned[k][r] = row[k];
            }
            for (int64_t k = 0; k < count; k++) {
                fp8_mix(turned[k]);
                most = magnitude(turned[k], FP8_MIXED, most);
            }
        }
    }
    raise_to(a->amax.data, most);
}

static Err mixed_amax(Stream *s, const fp8_amax_args *a)
{
    if (rows_used(a->x) % FP8_MIXED)
        return err_set(ERR_SHAPE, "fp8_amax: %lld rows are not to be mixed, which is done with 16 at a time",
                       (long long)rows_used(a->x));
    if (a->fresh) *(int64_t *)a->amax.data = 0;
    par_rows(s, rows_used(a->x) / FP8_MIXED, FP8_MIXED * a->x.dim[1], mixed_amax_part, a);
    return ERR_OK;
}

Err CPU(fp8_amax)(Stream *s, const fp8_amax_args *a)
{
    if (a->mixed) return mixed_amax(s, a);
    if (a->fresh) *(int64_t *)a->amax.data = 0;
    par_rows(s, rows_used(a->x), a->x.dim[1], amax_part, a);
    return ERR_OK;
}

/* ---- codes ---- */

_Static_assert(sizeof(float[TILE][TILE]) <= CPU_SCRATCH_BYTES, "a tile fits");

/* Some rows and columns of y in fp32. */
typedef struct {
    float (*x)[TILE]; /* [TILE], the thread's scratch */
    int64_t row, column, rows, columns;
} CastTile;

/* One of the two things that a call writes. */
typedef struct {
    Tensor x, y, amax;
    Fp8Blocks blocks;
    bool transposed, mixed;
} Cast;

/* Reads a tile of x transposed: x's columns from t->row on, and its rows from `first` on. */
static void tile_read_turned(CastTile *t, Tensor x, int64_t first)
{
    float line[TILE];
    for (int64_t c = 0; c < t->columns; c++) {
        read_row(line, x, first + c, t->row, t->rows);
        for (int64_t r = 0; r < t->rows; r++) t->x[r][c] = line[r];
    }
}

static void tile_read(CastTile *t, const Cast *a)
{
    if (a->transposed) tile_read_turned(t, a->x, t->column);
    else
        for (int64_t r = 0; r < t->rows; r++) read_row(t->x[r], a->x, t->row + r, t->column, t->columns);
    for (int64_t r = 0; a->mixed && r < t->rows; r++)
        for (int64_t c = 0; c < t->columns; c += FP8_MIXED) fp8_mix(t->x[r] + c);
}

/* The code of NaN and the largest numbers come from base/fp8.h. */
static void write_codes(uint8_t *to, DType format, const float *x, float scale, int64_t count)
{
    if (format == E4M3)
        for (int64_t k = 0; k < count; k++) to[k] = e4m3_from_float(x[k] * scale);
    else if (format == E5M2)
        for (int64_t k = 0; k < count; k++) to[k] = e5m2_from_float(x[k] * scale);
    else
        for (int64_t k = 0; k < count; k++) to[k] = e2m1_from_float(x[k] * scale);
}

static float most_of(DType format) { return format == E4M3 ? E4M3_MOST : E5M2_MOST; }

static bool has_two_levels(Fp8Blocks b) { return b.scale == FP8_SCALE_TWO_LEVELS; }

/* The bits of the tensor's largest magnitude. */
static uint32_t amax_of(const Cast *a) { return (uint32_t) * (const int64_t *)a->amax.data; }

/* amax: of what has the factor. */
static Fp8Factor factor_of(const Cast *a, uint32_t amax)
{
    return has_two_levels(a->blocks) ? fp8_factor_two_levels(amax_of(a), amax)
                                     : fp8_factor(a->blocks.scale, amax, most_of(a->y.dtype));
}

/* Rows r to r + rows of the tile, by one factor for each block of columns, or by the tensor's. */
static void tile_write(const CastTile *t, const Cast *a, int64_t r, int64_t rows)
{
    const Tensor *factors = a->y.scale;
    const bool whole = !a->blocks.rows;
    const int64_t width = whole ? TILE : a->blocks.columns;
    for (int64_t c = 0; c < t->columns; c += width) {
        const int64_t count = min64(width, t->columns - c);
        uint32_t amax = 0;
        if (whole) amax = amax_of(a);
        else
            for (int64_t k = r; k < r + rows; k++) amax = magnitude(t->x[k] + c, count, amax);
        const Fp8Factor f = factor_of(a, amax);
        for (int64_t k = r; k < r + rows; k++)
            write_codes((uint8_t *)a->y.data + (t->row + k) * a->y.ld + t->column + c, a->y.dtype, t->x[k] + c, f.scale,
                        count);
        if (!whole) row_f32(*factors, (t->row + r) / a->blocks.rows)[(t->column + c) / a->blocks.columns] = f.back;
    }
}

static int64_t tile_rows(const Cast *a) { return a->blocks.rows > 1 ? TILE : TILE_ROWS_ONE; }

/* Casts the rows in use: those of x, which are columns of y if it is transposed. */
static void cast_part(const void *args, int64_t first, int64_t end)
{
    const Cast *a = args;
    const int64_t columns = a->transposed ? rows_used(a->x) : a->x.dim[1];
    const int64_t unit = a->blocks.rows ? a->blocks.rows : tile_rows(a);
    CastTile t = { .x = (float(*)[TILE])cpu_scratch };
    for (t.row = first; t.row < end; t.row += t.rows) {
        t.rows = min64(tile_rows(a), end - t.row);
        for (t.column = 0; t.column < columns; t.column += TILE) {
            t.columns = min64(TILE, columns - t.column);
            tile_read(&t, a);
            for (int64_t r = 0; r < t.rows; r += unit) tile_write(&t, a, r, min64(unit, t.rows - r));
        }
    }
}

static Err check_cast(const Cast *a)
{
    const int64_t rows = a->x.dim[a->transposed ? 1 : 0], columns = a->x.dim[a->transposed ? 0 : 1];
    const Tensor *f = a->y.scale;
    const bool blocks = a->blocks.rows && a->blocks.columns, two = has_two_levels(a->blocks);
    if (two ? !a->amax.data || !blocks : !a->amax.data == !blocks)
        return err_set(ERR_SHAPE, two ? "fp8_cast: factors of two levels are of blocks and of amax"
                                      : "fp8_cast: either blocks or amax say what has a factor");
    if (a->mixed && a->x.dim[0] % FP8_MIXED)
        return err_set(ERR_SHAPE, "fp8_cast: %lld rows are not to be mixed, which is done with 16 at a time",
                       (long long)a->x.dim[0]);
    if (two != (a->y.dtype == E2M1))
        return err_set(ERR_SHAPE, "fp8_cast: factors of two levels, and no others, are of e2m1");
    if (!blocks ? f->ndim != 1
                : f->ndim != 2 || f->dim[0] != fp8_block_count(rows, a->blocks.rows) ||
                      f->dim[1] != fp8_block_count(columns, a->blocks.columns))
        return err_set(ERR_SHAPE, "fp8_cast: %s has not a factor for each block", a->transposed ? "turned" : "y");
    return ERR_OK;
}

static Err cast_into(Stream *s, const Cast *a)
{
    TRY(check_cast(a));
    if (!a->blocks.rows) *(float *)a->y.scale->data = factor_of(a, amax_of(a)).back;
    par_units(s, a->transposed ? a->x.dim[1] : rows_used(a->x), a->x.dim[a->transposed ? 0 : 1], tile_rows(a),
              cast_part, a);
    return ERR_OK;
}

Err CPU(fp8_cast)(Stream *s, const fp8_cast_args *a)
{
    const Tensor turned_amax = a->turned_amax.data ? a->turned_amax : a->amax;
    const Cast y = { a->x, a->y, a->amax, a->blocks, false, false };
    const Cast turned = { a->x, a->turned, turned_amax, a->blocks, true, a->mixed };
    if (!a->y.data && !a->turned.data) return err_set(ERR_SHAPE, "fp8_cast: nothing is to be written");
    if (a->y.data) TRY(cast_into(s, &y));
    return a->turned.data ? cast_into(s, &turned) : ERR_OK;
}

/* ---- codes of rows in runs ---- */

/* Columns of y from a run's last number to the next run. */
static void clear_columns(const fp8_cast_runs_args *a, int64_t row, int64_t first, int64_t end)
{
    const int64_t B = a->blocks.columns;
    memset((uint8_t *)a->y.data + row * a->y.ld + first, 0, (size_t)(end - first));
    for (int64_t b = (first + B - 1) / B; b < end / B; b++) row_f32(*a->y.scale, row)[b] = 1;
}

static void cast_runs_part(const void *args, int64_t first, int64_t end)
{
    const fp8_cast_runs_args *a = args;
    const Cast as = { .x = a->x, .y = a->y, .blocks = a->blocks, .transposed = true };
    const int64_t *offset = a->offset.data, *begin = a->begin.data, runs = a->offset.dim[0] - 1;
    CastTile t = { .x = (float(*)[TILE])cpu_scratch };
    for (t.row = first; t.row < end; t.row += t.rows) {
        t.rows = min64(TILE_ROWS_ONE, end - t.row);
        for (int64_t run = 0; run < runs; run++) {
            const int64_t length = offset[run + 1] - offset[run];
            for (int64_t at = 0; at < length; at += t.columns) {
                t.columns = min64(TILE, length - at);
                t.column = begin[run] + at;
                tile_read_turned(&t, a->x, offset[run] + at);
                for (int64_t r = 0; r < t.rows; r++) tile_write(&t, &as, r, 1);
            }
            for (int64_t r = 0; r < t.rows; r++) clear_columns(a, t.row + r, begin[run] + length, begin[run + 1]);
        }
    }
}

static Err check_cast_runs(const fp8_cast_runs_args *a)
{
    const Tensor *f = a->y.scale;
    const int64_t B = a->blocks.columns, columns = a->y.dim[1];
    if (has_two_levels(a->blocks) || a->y.dtype == E2M1)
        return err_set(ERR_SHAPE, "fp8_cast_runs: rows in runs have no amax, which e2m1 needs");
    if (a->blocks.rows != 1 || B < 2 || columns % B || f->ndim != 2 || f->dim[0] != a->y.dim[0] ||
        f->dim[1] != columns / B)
        return err_set(ERR_SHAPE, "fp8_cast_runs: y has not whole blocks of columns, or not a factor for each");
    return ERR_OK;
}

Err CPU(fp8_cast_runs)(Stream *s, const fp8_cast_runs_args *a)
{
    const int64_t *offset = a->offset.data, X = a->offset.dim[0], B = a->blocks.columns;
    int64_t *begin = a->begin.data;
    TRY(check_cast_runs(a));
    for (int64_t i = 0; i < X; i++) begin[i] = B * (offset[i] / B + i);
    if (begin[X - 1] > a->y.dim[1])
        return err_set(ERR_SHAPE, "fp8_cast_runs: runs end at %lld, y has %lld columns", (long long)begin[X - 1],
                       (long long)a->y.dim[1]);
    par_units(s, a->x.dim[1], offset[X - 1], TILE_ROWS_ONE, cast_runs_part, a);
    return ERR_OK;
}

/* ---- back ---- */

/* Value of each code before its factor. */
typedef struct {
    const fp8_values_args *args;
    float of[256];
} CodeTable;

static void values_part(const void *args, int64_t first, int64_t end)
{
    const CodeTable *t = args;
    const fp8_values_args *a = t->args;
    const Tensor *f = a->x.scale;
    const bool whole = f->ndim == 1;
    const int64_t columns = a->x.dim[1], rows = whole ? 0 : fp8_block(a->x.dim[0], f->dim[0]);
    const int64_t width = whole ? columns : fp8_block(columns, f->dim[1]);
    for (int64_t n = first; n < end; n++) {
        const uint8_t *from = (const uint8_t *)a->x.data + n * a->x.ld;
        const float *factor = whole ? f->data : row_f32(*f, n / rows);
        float *to = row_f32(a->y, n);
        for (int64_t i = 0; i < columns; i += width, factor++)
            for (int64_t k = i; k < min64(i + width, columns); k++) to[k] = t->of[from[k]] * *factor;
    }
}

Err CPU(fp8_values)(Stream *s, const fp8_values_args *a)
{
    CodeTable t = { .args = a };
    for (int k = 0; k < 256; k++)
        t.of[k] = a->x.dtype == E4M3   ? e4m3_to_float((uint8_t)k)
                  : a->x.dtype == E5M2 ? e5m2_to_float((uint8_t)k)
                                       : e2m1_to_float((uint8_t)k);
    par_rows(s, rows_used(a->x), a->x.dim[1], values_part, &t);
    return ERR_OK;
}

/* ---- products, of operands that are in fp32 now (device/widen.c) ---- */

Err CPU(fp8_product)(Stream *s, const fp8_product_args *a)
{
    TRY(check_widened(a->x, a->w));
    const linear_fwd_args product = { .y = a->y, .x = a->x, .w = a->w, .bias = a->bias, .leaf = a->leaf };
    return CPU(linear_fwd)(s, &product);
}

Err CPU(fp8_product_add)(Stream *s, const fp8_product_add_args *a)
{
    TRY(check_widened(a->dy, a->x));
    const linear_dw_args to = { .dw = a->dw,
                                .shift = a->shift,
                                .overflow = a->overflow,
                                .leaf = a->leaf,
                                .headroom_bits = a->headroom_bits,
                                .fresh = a->fresh };
    return CPU(add_product)(s, &to, (GemmOperand){ a->dy.data, a->dy.ld, false },
                            (GemmOperand){ a->x.data, a->x.ld, true }, a->dy.dim[1]);
}
