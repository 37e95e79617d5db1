/*
 * Tiles of products of bf16 summed as DOT_AMX does (gemm.h): by vectors, for operands of FORM_DEPTHS; or, where gemm.c
 * is compiled a second time as gemm_tiles.c, by the instruction itself, for FORM_TILES. Used by gemm.c alone.
 */
#ifndef MEGATRAIN_CPU_GEMM_DEPTHS_H
#define MEGATRAIN_CPU_GEMM_DEPTHS_H

#include "cpu/gemm_form.h"
#include "cpu/gemm_kernel.h"

/* Sums of a tile while its depths run, TILE_COLS to a row. Columns count as whole vectors. */
typedef struct {
    float *at;
    int64_t rows, vecs;
} DepthSums;

#if defined(GEMM_TILES)
#include "cpu/tiles.h"

enum { TILE_SIDE = 16, DEPTH_UNITS = DEPTH / 2, UNIT = sizeof(float) };

/* Each thread that multiplies says so to its processor, and when it is done: what tiles hold is then not saved. */
static void depths_begin(void)
{
    TileShapes shapes = { .palette = 1 };
    for (int i = 0; i < 8; i++) shapes.rows[i] = TILE_SIDE, shapes.bytes[i] = TILE_SIDE * UNIT;
    __asm__ volatile("" ::"r"(&shapes) : "memory"); /* (GCC's says that it reads the first eight bytes) */
    _tile_loadconfig(&shapes);
}

static void depths_end(void) { _tile_release(); }

/* 16 rows of A at this depth; of fewer a copy, lest what lies behind them be read. */
static inline const float *depth_rows(const float *a, int64_t *row, int64_t rows, float *copy)
{
    if (rows >= TILE_SIDE) return a;
    for (int64_t i = 0; i < rows; i++) memcpy(copy + i * DEPTH_UNITS, a + i * *row, DEPTH_UNITS * sizeof *a);
    *row = DEPTH_UNITS;
    return copy;
}

/*
 * Up to 2 x 2 tiles of sums, in registers 0 to 3; A is in 4 and 5, B in 6 and 7. Registers are numbers of the
 * instructions, so each case is written out. (What C wrote before must be in memory: the intrinsics do not say that
 * they read it.)
 */
#define EACH_TILE(op)                  \
    do {                               \
        op(0, 0, 0);                   \
        if (wide) op(1, 0, 1);         \
        if (high) op(2, 1, 0);         \
        if (high && wide) op(3, 1, 1); \
    } while (0)
#define LOAD_SUM(n, i, j) _tile_loadd(n, s.at + (i)*TILE_SIDE * TILE_COLS + (j)*TILE_SIDE, TILE_COLS * UNIT)
#define STORE_SUM(n, i, j) _tile_stored(n, s.at + (i)*TILE_SIDE * TILE_COLS + (j)*TILE_SIDE, TILE_COLS * UNIT)
static void depths_add(const Tile *t, const float *a, const float *b, int64_t units, DepthSums s)
{
    float low_copy[TILE_SIDE * DEPTH_UNITS] __attribute__((aligned(64))) = { 0 };
    float high_copy[TILE_SIDE * DEPTH_UNITS] __attribute__((aligned(64))) = { 0 };
    const bool high = s.rows > TILE_SIDE, wide = s.vecs > 1;
    __asm__ volatile("" ::: "memory");
    EACH_TILE(LOAD_SUM);
    for (int64_t k = 0; k < units; k += DEPTH_UNITS, a += DEPTH_UNITS, b += DEPTH_UNITS * t->b_k) {
        int64_t low_row = t->a_row, high_row = t->a_row;
        const float *low_a = depth_rows(a, &low_row, s.rows, low_copy), *high_a = NULL;
        if (high) high_a = depth_rows(a + TILE_SIDE * t->a_row, &high_row, s.rows - TILE_SIDE, high_copy);
        __asm__ volatile("" ::: "memory");
        _tile_loadd(6, b, t->b_k * UNIT);
        _tile_loadd(4, low_a, low_row * UNIT);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) {
            _tile_loadd(7, b + VEC, t->b_k * UNIT);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (high) {
            _tile_loadd(5, high_a, high_row * UNIT);
            _tile_dpbf16ps(2, 5, 6);
            if (wide) _tile_dpbf16ps(3, 5, 7);
        }
    }
    EACH_TILE(STORE_SUM);
}
#undef EACH_TILE
#undef LOAD_SUM
#undef STORE_SUM
#else
static inline void depths_begin(void) {}
static inline void depths_end(void) {}

/* One row at one depth: two sums for each column, which stay in registers. */
VEC_FN void depth_row(const float *a, int64_t a_k, const float *b, int64_t b_k, float *sum, int vecs)
{
    vf even[TILE_VECS], odd[TILE_VECS];
    for (int v = 0; v < vecs; v++) even[v] = odd[v] = vf_zero();
    for (int64_t k = 0; k < DEPTH; k += 2, a += 2 * a_k, b += 2 * b_k) {
        const vf x = vf_set1(a[0]), y = vf_set1(a[a_k]);
        for (int v = 0; v < vecs; v++) {
            even[v] = vf_fma_flushed(x, vf_load(b + v * VEC), even[v]);
            odd[v] = vf_fma_flushed(y, vf_load(b + b_k + v * VEC), odd[v]);
        }
    }
    for (int v = 0; v < vecs; v++) {
        const vf both = vf_flush(vf_add(even[v], odd[v]));
        vf_store(sum + v * VEC, vf_flush(vf_add(vf_flush(vf_load(sum + v * VEC)), both)));
    }
}

static void depths_add(const Tile *t, const float *a, const float *b, int64_t units, DepthSums s)
{
    for (int64_t k = 0; k < units; k += DEPTH, a += DEPTH * t->a_k, b += DEPTH * t->b_k) {
        for (int64_t i = 0; i < s.rows; i++) {
            const float *row = a + i * t->a_row;
            float *sum = s.at + i * TILE_COLS;
            if (s.vecs == 1) depth_row(row, t->a_k, b, t->b_k, sum, 1);
            else if (s.vecs == 2) depth_row(row, t->a_k, b, t->b_k, sum, TILE_VECS > 1 ? 2 : 1);
            else depth_row(row, t->a_k, b, t->b_k, sum, TILE_VECS);
        }
    }
}
#endif

static inline vf depth_load(const float *p, int64_t left) { return left >= VEC ? vf_load(p) : vf_load_n(p, left); }

/* From the tile's C, or 0. */
static inline void depths_open(const Tile *t, const float *c, DepthSums s)
{
    for (int64_t i = 0; i < s.rows; i++)
        for (int64_t j = 0; j < s.vecs * VEC; j += VEC)
            vf_store(s.at + i * TILE_COLS + j,
                     t->start == TILE_CONTINUE ? depth_load(c + i * t->c_row + j, t->cols - j) : vf_zero());
}

/* To the tile's C. Returns the sum of all squares in each lane. */
static inline vf depths_close(const Tile *t, float *c, DepthSums s)
{
    vf squares = vf_zero();
    for (int64_t i = 0; i < s.rows; i++) {
        for (int64_t j = 0; j < s.vecs * VEC; j += VEC) {
            float *to = c + i * t->c_row + j;
            const int64_t left = t->cols - j;
            vf v = vf_load(s.at + i * TILE_COLS + j);
            squares = vf_fma(v, v, squares);
            if (t->start == TILE_ADD) v = vf_add(depth_load(to, left), v);
            if (left >= VEC) vf_store(to, v);
            else vf_store_n(to, v, left);
        }
    }
    return squares;
}

/* Does with a tile, and those that follow it, what the register kernels do (gemm_kernel.h). */
static __attribute__((noinline)) void tile_depths(const Tile *t)
{
    float memory[TILE_ELEMS] __attribute__((aligned(64)));
    const DepthSums s = { memory, t->rows, (t->cols + VEC - 1) / VEC };
    const float *a = t->a, *b = t->b;
    float *c = t->c;
    for (int64_t i = 0; i <= t->more; i++, c += t->c_tile) {
        const int64_t units = t->starts ? t->starts[i + 1] - t->starts[i] : t->k;
        depths_open(t, c, s);
        depths_add(t, a, b, units, s);
        const vf squares = depths_close(t, c, s);
        if (t->fixed && vm_any(vm_not(vf_lt(squares, vf_set1(t->fixed->limit2))))) t->fixed->beyond = true;
        a += t->starts ? units * t->a_k : t->a_tile;
        b += t->starts ? units * t->b_k : t->b_tile;
    }
}

#endif
