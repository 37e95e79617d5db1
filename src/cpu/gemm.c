/*
 * The product of gemm.h, fast.
 *
 * C is cut into tasks that threads take from a counter. A task needs nothing from another one: it packs its
 * own columns of B, k-slab by k-slab, and sweeps its rows over them, so there is no barrier and it does not
 * matter how many threads there are or how fast each one is.
 *
 *            task columns (panels of TILE_COLS)
 *          +-------+-------+---+
 *          |       |       |   |  slab of B, packed: stays in L2
 *          +-------+-------+---+
 *   +---+  +-------+-------+---+
 *   | A |  | tile  |       |   |  TILE_ROWS rows of A x slab: stay in L1; read where A lies, or packed in
 *   |   |  |       |       |   |  chunks when A is transposed
 *
 * The k dim:  slab <= group <= K. A group is what makes one entry of the binary tree over k: 2^n leaves
 * that fit a slab, or one long leaf in several slabs; a CHAIN is a single group. While a sum waits for more
 * slabs or for its sibling in the tree it lies in a slot of the task's own memory, tile by tile. There are
 * as many levels of slots as the tree is high.
 *
 * x w^T with few tokens is turned round (C^T = w x^T): the large operand is then A, which is read from
 * memory once and never packed, and only the small one is transposed.
 */
#include "cpu/gemm.h"

#include <omp.h>
#include <stdatomic.h>

#include "base/err.h"
#include "cpu/gemm_kernel.h"
#include "cpu/gemm_pack.h"

/* Sizes; they change speed only. */
enum {
    SLAB_K = 384,             /* k's: TILE_ROWS x SLAB_K floats of A beside B in L1 */
    SLAB_K_FIXED = 512,       /* I64: fewer passes over G are worth more */
    SLAB_BYTES = 320 << 10,   /* of packed B: in L2 with room for another thread */
    CHUNK_ROWS = 8 * TILE_ROWS, /* of a transposed A packed at a time */
    TASK_ROWS_MIN = 128,      /* below this, packing B for so few rows would show */
    TASKS_PER_THREAD = 4,
    DIRECT_ROWS = 2 * TILE_ROWS, /* with so few rows B is not packed but read where it lies */
    SLOT_BYTES_MAX = 4 << 20,
    SMALL_FLOP = 200000,      /* not worth a second thread */
    LEVELS = 12,              /* of the tree inside a slab */
};

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* How a call is cut; and what its threads share. */
typedef struct {
    const Gemm *g;
    GemmOperand a, b;
    int64_t M, N, K;         /* of the product computed: turned round if `swap` */
    bool swap, copy_a, copy_b;
    int64_t leaf, slab, group;
    int64_t slots;           /* levels of waiting sums */
    int64_t rows, cols;      /* of a task */
    int64_t row_tasks, tasks;
    int64_t a_elems, b_elems, slot_elems, thread_elems;
    char *workspace;
    _Atomic int64_t next;
    atomic_bool overflow;
} Plan;

/* A task in the hands of a thread. */
typedef struct {
    const Plan *p;
    int64_t row, rows, col, cols, panels;
    int64_t k, slab_k;             /* the current slab */
    int64_t group;                 /* its group's number */
    bool first, last, last_group;  /* the slab's place in its group; the group's in K */
    float *a, *b, *slot;
    int64_t chunk;                 /* first row of the packed chunk of A */
    bool overflow;
} Task;

/* ---- one tile, one slab ---- */

static float *slot_of(const Task *t, int64_t level, int64_t row, int64_t col)
{
    int64_t tile = row / TILE_ROWS * t->panels + col / TILE_COLS;
    return t->slot + level * t->p->slot_elems + tile * TILE_ELEMS;
}

/* sum[row][TILE_COLS] from the k's [k, k + count) of the slab. */
static void tile_chain(const Task *t, int64_t row, int64_t col, int64_t k, int64_t count, TileStart start,
                       float *sum)
{
    const Plan *p = t->p;
    int64_t cols = min64(t->cols - col, TILE_COLS);
    Tile tile = { .c = sum, .c_row = TILE_COLS, .k = count, .start = start };
    if (p->copy_a) {
        tile.a = t->a + (row - t->chunk) / TILE_ROWS * (TILE_ROWS * p->slab) + k * TILE_ROWS;
        tile.a_row = 1;
        tile.a_k = TILE_ROWS;
    } else {
        tile.a = p->a.data + (t->row + row) * p->a.ld + t->k + k;
        tile.a_row = p->a.ld;
        tile.a_k = 1;
    }
    if (p->copy_b) {
        cols = ceil_div(cols, VEC) * VEC;
        tile.b = t->b + col / TILE_COLS * (TILE_COLS * p->slab) + k * cols;
        tile.b_k = cols;
        tile.ahead = 8;
    } else {
        tile.b = p->b.data + (t->k + k) * p->b.ld + t->col + col;
        tile.b_k = p->b.ld;
        tile.ahead = 24;
    }
    tile_run(tile, min64(t->rows - row, TILE_ROWS), cols);
}

static void tile_add(float *x, const float *y)
{
    for (int i = 0; i < TILE_ELEMS; i += VEC) vf_store(x + i, vf_add(vf_load(x + i), vf_load(y + i)));
}

/* The leaves of this slab, a binary counter whose entry 0 is `sum`. */
static void tile_leaves(const Task *t, int64_t row, int64_t col, float *sum)
{
    float stack[LEVELS][TILE_ELEMS] __attribute__((aligned(64)));
    float *level[LEVELS + 1];
    int top = 0;
    level[0] = sum;
    for (int64_t k = 0, leaf = 0; k < t->slab_k; k += t->p->leaf, leaf++) {
        int64_t count = min64(t->p->leaf, t->slab_k - k);
        if (leaf & 1) {
            tile_chain(t, row, col, k, count, TILE_ADD, level[top - 1]);
        } else {
            if (top) level[top] = stack[top];
            tile_chain(t, row, col, k, count, TILE_SET, level[top++]);
        }
        for (int64_t x = leaf >> 1; (leaf & 1) && (x & 1); x >>= 1, top--) tile_add(level[top - 2], level[top - 1]);
    }
    for (; top > 1; top--) tile_add(level[top - 2], level[top - 1]);
}

/* sums += llrint(leaf * 2^shift), of `rows` rows. True if a lane did not fit; it then counts as 0. */
static bool tile_fix(int64_t *sums, const float *leaf, int64_t rows, int64_t cols, const Gemm *g)
{
    const vf scale = vf_set1(fix_scale(g->shift));
    const float limit = fix_limit(g->room);
    vm bad = vm_first_n(0);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = i * TILE_COLS; j < i * TILE_COLS + cols; j += VEC) {
            vf v = vf_mul(vf_load(leaf + j), scale);
            vm m = vf_fix_bad(v, limit);
            bad = vm_or(bad, m);
            v = vf_select(m, vf_zero(), v);
            vl_store(sums + j, vl_add(vl_load(sums + j), vl_from_f(v)));
        }
    }
    return vm_any(bad);
}

/* ---- where sums go ---- */

static void output_fixed(const Task *t, int64_t row, int64_t col, const int64_t *sums)
{
    const Gemm *g = t->p->g;
    int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    for (int64_t i = 0; i < rows; i++) {
        int64_t *out = g->fixed + (t->row + row + i) * g->ldc + t->col + col, j = 0;
        for (; j + VEC <= cols; j += VEC)
            vl_store(out + j, vl_add(vl_load(out + j), vl_load(sums + i * TILE_COLS + j)));
        for (; j < cols; j++) out[j] += sums[i * TILE_COLS + j];
    }
}

static void output_plain(const Task *t, int64_t row, int64_t col, const float *sum)
{
    const Gemm *g = t->p->g;
    int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    const float *bias = g->bias ? g->bias + t->col + col : NULL;
    for (int64_t i = 0; i < rows; i++) {
        float *out = g->c + (t->row + row + i) * g->ldc + t->col + col;
        for (int64_t j = 0; j < cols; j += VEC) {
            int n = (int)min64(cols - j, VEC);
            vf v = vf_load(sum + i * TILE_COLS + j);
            if (bias) v = vf_add(v, vf_load_n(bias + j, n));
            vf_store_n(out + j, v, n);
        }
    }
}

/* Rows of the tile are columns of C. */
static void output_swapped(const Task *t, int64_t row, int64_t col, float *sum)
{
    const Gemm *g = t->p->g;
    int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    if (g->bias) {
        for (int64_t i = 0; i < rows; i++) {
            vf bias = vf_set1(g->bias[t->row + row + i]);
            for (float *s = sum + i * TILE_COLS; s < sum + (i + 1) * TILE_COLS; s += VEC)
                vf_store(s, vf_add(vf_load(s), bias));
        }
    }
    transpose_any(g->c + (t->col + col) * g->ldc + t->row + row, g->ldc, sum, TILE_COLS, rows, cols);
}

/* For beta: the chain goes on from C. */
static void input_plain(const Task *t, int64_t row, int64_t col, float *sum)
{
    const Gemm *g = t->p->g;
    int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += VEC)
            vf_store(sum + i * TILE_COLS + j, vf_load_n(g->c + (t->row + row + i) * g->ldc + t->col + col + j,
                                                        min64(cols - j, VEC)));
}

/* ---- one tile of a task, one slab: chain or leaves, then up the tree, then out ---- */

static void tile_float(const Task *t, int64_t row, int64_t col)
{
    const Plan *p = t->p;
    float local[TILE_ELEMS] __attribute__((aligned(64)));
    int64_t level = __builtin_popcountll((uint64_t)t->group);
    float *sum = p->slots ? slot_of(t, level, row, col) : local;
    if (p->leaf < p->group) {
        tile_leaves(t, row, col, sum);
    } else {
        bool load = p->g->beta && t->k == 0;
        if (load) input_plain(t, row, col, sum);
        tile_chain(t, row, col, 0, t->slab_k, load || !t->first ? TILE_CONTINUE : TILE_SET, sum);
    }
    if (!t->last) return;
    for (int64_t x = t->group; level > 0 && (t->last_group || (x & 1)); x >>= 1) {
        float *sibling = slot_of(t, --level, row, col);
        tile_add(sibling, sum);
        sum = sibling;
    }
    if (!t->last_group) return;
    if (p->swap) output_swapped(t, row, col, sum);
    else output_plain(t, row, col, sum);
}

static void tile_fixed(Task *t, int64_t row, int64_t col)
{
    const Plan *p = t->p;
    const int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    float local[TILE_ELEMS] __attribute__((aligned(64)));
    int64_t sums[TILE_ELEMS] __attribute__((aligned(64))) = { 0 };
    float *sum = p->slots ? slot_of(t, 0, row, col) : local;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j += 8)
            __builtin_prefetch(p->g->fixed + (t->row + row + i) * p->g->ldc + t->col + col + j, 1);
    for (int64_t k = 0; k < t->slab_k; k += p->leaf) {
        tile_chain(t, row, col, k, min64(p->leaf, t->slab_k - k), t->first ? TILE_SET : TILE_CONTINUE, sum);
        if (t->last && tile_fix(sums, sum, rows, cols, p->g)) t->overflow = true;
    }
    if (t->last) output_fixed(t, row, col, sums);
}

/* ---- a task ---- */

static void task_slab(Task *t)
{
    const Plan *p = t->p;
    if (p->copy_b) {
        const float *src = p->b.data + (p->b.transposed ? t->col * p->b.ld + t->k : t->k * p->b.ld + t->col);
        pack_b(t->b, p->slab * TILE_COLS, src, p->b.ld, p->b.transposed, t->slab_k, t->cols);
    }
    for (int64_t row = 0; row < t->rows; row += TILE_ROWS) {
        if (p->copy_a && row % CHUNK_ROWS == 0) {
            t->chunk = row;
            pack_a(t->a, p->slab * TILE_ROWS, p->a.data + t->k * p->a.ld + t->row + row, p->a.ld, t->slab_k,
                   min64(t->rows - row, CHUNK_ROWS));
        }
        for (int64_t col = 0; col < t->cols; col += TILE_COLS) {
            if (p->g->mode == GEMM_I64) tile_fixed(t, row, col);
            else tile_float(t, row, col);
        }
    }
}

static void task_run(Task *t, int64_t index)
{
    const Plan *p = t->p;
    t->row = index % p->row_tasks * p->rows;
    t->col = index / p->row_tasks * p->cols;
    t->rows = min64(p->rows, p->M - t->row);
    t->cols = min64(p->cols, p->N - t->col);
    t->panels = ceil_div(t->cols, TILE_COLS);
    t->group = 0;
    for (int64_t k0 = 0; k0 < p->K || k0 == 0; k0 += p->group, t->group++) {
        int64_t end = min64(k0 + p->group, p->K);
        t->last_group = end == p->K;
        for (t->k = k0; t->k < end || t->k == k0; t->k += p->slab) {
            t->slab_k = min64(p->slab, end - t->k);
            t->first = t->k == k0;
            t->last = t->k + t->slab_k == end;
            task_slab(t);
        }
    }
}

static void thread_run(Plan *p, int64_t thread)
{
    float *memory = (float *)p->workspace + thread * p->thread_elems;
    Task t = { .p = p, .a = memory, .b = memory + p->a_elems, .slot = memory + p->a_elems + p->b_elems };
    for (int64_t i; (i = atomic_fetch_add(&p->next, 1)) < p->tasks;) task_run(&t, i);
    if (t.overflow) atomic_store(&p->overflow, true);
}

/* ---- the plan ---- */

static void plan_k(Plan *p)
{
    const Gemm *g = p->g;
    int64_t most = g->mode == GEMM_I64 ? SLAB_K_FIXED : SLAB_K;
    p->leaf = g->mode == GEMM_CHAIN ? max64(p->K, 1) : min64(g->leaf, max64(p->K, 1));
    if (p->leaf > most) {
        p->group = p->leaf;
        p->slab = ceil_div(ceil_div(p->leaf, ceil_div(p->leaf, most)), VEC) * VEC;
    } else {
        int64_t leaves = p->leaf < p->K ? most / p->leaf : 1;
        if (g->mode == GEMM_TREE) leaves = (int64_t)1 << (63 - __builtin_clzll((uint64_t)leaves));
        p->slab = p->group = p->leaf * leaves;
    }
    int64_t groups = ceil_div(p->K, p->group);
    p->slots = p->group > p->slab ? 1 : 0;
    if (g->mode == GEMM_TREE && groups > 1) p->slots = 64 - __builtin_clzll((uint64_t)groups);
}

static void plan_tasks(Plan *p, int64_t threads)
{
    int64_t panels = ceil_div(p->N, TILE_COLS), panel_bytes = p->slab * TILE_COLS * (int64_t)sizeof(float);
    int64_t wide = p->copy_b ? max64(SLAB_BYTES / panel_bytes, 1) : 4;
    wide = min64(wide, ceil_div(panels, TASKS_PER_THREAD * threads));
    if (p->copy_b) wide = max64(wide, min64(2, panels));
    wide = ceil_div(panels, ceil_div(panels, wide));
    p->cols = wide * TILE_COLS;
    int64_t col_tasks = ceil_div(panels, wide), row_tasks = 1;
    int64_t most = ceil_div(p->M, TASK_ROWS_MIN);
    if (p->slots) {
        int64_t level_bytes = p->cols * ceil_div(p->M, TILE_ROWS) * TILE_ROWS * (int64_t)sizeof(float);
        row_tasks = ceil_div(level_bytes * p->slots, SLOT_BYTES_MAX);
    }
    row_tasks = max64(row_tasks, min64(most, ceil_div(TASKS_PER_THREAD * threads, col_tasks)));
    p->rows = ceil_div(ceil_div(p->M, row_tasks), CHUNK_ROWS) * CHUNK_ROWS;
    p->row_tasks = ceil_div(p->M, p->rows);
    p->tasks = p->row_tasks * col_tasks;
    p->a_elems = p->copy_a ? CHUNK_ROWS * p->slab : 0;
    p->b_elems = p->copy_b ? wide * TILE_COLS * p->slab : 0;
    p->slot_elems = p->slots ? ceil_div(p->rows, TILE_ROWS) * wide * TILE_ELEMS : 0;
    p->thread_elems = ceil_div(p->a_elems + p->b_elems + p->slots * p->slot_elems, VEC) * VEC;
}

/* Worth turning round when transposing A instead of B saves more than storing C the other way costs. */
static void plan_operands(Plan *p)
{
    const Gemm *g = p->g;
    p->swap = g->mode != GEMM_I64 && !g->beta && g->b.transposed && !g->a.transposed &&
              (g->N - g->M) * g->K > g->M * g->N;
    p->M = p->swap ? g->N : g->M;
    p->N = p->swap ? g->M : g->N;
    p->K = g->K;
    p->a = p->swap ? g->b : g->a;
    p->b = p->swap ? g->a : g->b;
    p->a.transposed ^= p->swap;
    p->b.transposed ^= p->swap;
    p->copy_a = p->a.transposed;
    p->copy_b = p->b.transposed || p->M > DIRECT_ROWS || g->mode == GEMM_I64;
}

bool CPU(gemm)(const Device *dev, const Gemm *g)
{
    Plan p = { .g = g, .workspace = dev->workspace };
    ASSERT(g->mode == GEMM_CHAIN || (g->leaf > 0 && !g->beta));
    ASSERT(g->mode != GEMM_I64 || (g->shift >= -126 && g->shift <= 127));
    if (g->M == 0 || g->N == 0) return false;
    int64_t threads = 2 * g->M * g->N * g->K < SMALL_FLOP ? 1 : dev->threads;
    plan_operands(&p);
    plan_k(&p);
    plan_tasks(&p, threads);
    ASSERT(p.thread_elems * (int64_t)sizeof(float) <= dev->workspace_bytes);
    threads = min64(threads, p.tasks);
    if (p.thread_elems) threads = min64(threads, dev->workspace_bytes / (p.thread_elems * (int64_t)sizeof(float)));
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    thread_run(&p, omp_get_thread_num());
    return atomic_load(&p.overflow);
}

void CPU(transpose)(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols)
{
    transpose_any(dst, ldd, src, lds, rows, cols);
}

void CPU(tile_gemm)(const TileGemm *g)
{
    /* Two strips of 32 columns are faster than 48 + 16: a strip of 16 has too few chains in flight. */
    int64_t strip = g->n == 64 && TILE_VECS == 3 ? 32 : TILE_COLS;
    for (int64_t j = 0; j < g->n; j += strip) {
        int64_t cols = g->n - j < strip ? g->n - j : strip;
        Tile t = { .a = g->a, .a_row = g->a_row, .a_k = g->a_k, .b = g->b + j, .b_k = g->ldb, .c = g->c + j,
                   .c_row = g->ldc, .k = g->k, .start = g->beta ? TILE_CONTINUE : TILE_SET };
        tile_run(t, g->m, cols);
    }
}
