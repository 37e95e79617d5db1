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
 * as many levels of slots as the tree is high. Leaves of any lengths (Gemm.starts) are taken as many at a time as a
 * slab holds.
 *
 * Leaves of whole tiles that will be integers are made one by one where gemm_leaf.h has a kernel for them, A is
 * transposed and they are not short (their mean counts); else, at the edges, and of leaves longer than a slab, up to
 * four at once (gemm_fixed.h).
 *
 * x w^T with few tokens is turned round (C^T = w x^T): the large operand is then A, which is read from
 * memory once and never packed, and only the small one is transposed.
 */
#include "cpu/gemm.h"

#include <math.h>
#include <omp.h>
#include <stdatomic.h>

#include "base/err.h"
#include "cpu/gemm_depths.h"
#include "cpu/gemm_fixed.h"
#include "cpu/gemm_kernel.h"
#include "cpu/gemm_narrow.h"
#include "cpu/gemm_pack.h"
#include "cpu/gelu.h"
#include "cpu/team.h"

/* Sizes; they change speed only. */
enum {
    SLAB_K = 384,                /* k's: TILE_ROWS x SLAB_K floats of A beside B in L1 */
    SLAB_K_SWAP = 768,           /* sums cannot wait in C: rather one slab than slots */
    SLAB_K_COPY_A = 256,         /* packed A stays in L1, and B in L2, with more columns */
    SLAB_K_FIXED = 512,          /* integers are twice as wide: rather fewer rounds over them */
    SLAB_BYTES = 600 << 10,      /* what packed B takes: L2 has room for another thread */
    SLAB_BYTES_WIDE = 800 << 10, /* a transposed A is packed for each column of tasks: fewer pay */
    CHUNK_ROWS = (TILE_ROWS < 32 ? 8 : 2) * TILE_ROWS, /* so many rows of a transposed A are packed at a time */
    TASK_ROWS_MIN = 96,                                /* below this, packing B for so few rows would show */
    TASK_ROWS_MIN_DIRECT = 256, /* an A that is not packed costs little when columns are cut instead */
    TASKS_PER_THREAD = 2,
    AHEAD_PACKED = 8, /* rows of B to prefetch */
    AHEAD_DIRECT = 24,
    DIRECT_ROWS = 2 * TILE_ROWS, /* up to so many rows B is not packed but read where it lies */
    SLOT_BYTES_MAX = 4 << 20,
    STREAM_BYTES = 4 << 20,
    LEAF_K_MIN = 16,                            /* of shorter leaves rather several are rounded at once */
    SMALL_FLOP = 200000,                        /* not worth a second thread */
    LEVELS = 12,                                /* the tree inside a slab has no more */
    TURNED = (TILE_ROWS + VEC - 1) / VEC * VEC, /* columns of a tile that is turned round */
};

#if !defined(GEMM_TILES)

/* A tile smaller than the largest instance, as several. */
static __attribute__((noinline)) void tile_edge(const TileKernels *kernels, const Tile *tile)
{
    Tile t = *tile;
    const int vecs = (int)(t.cols / VEC), rest = (int)(t.cols % VEC);
    for (int i = 0; t.rows > 0; i++) {
        const int rows = kernels[i].rows;
        for (; t.rows >= rows; t.rows -= rows) {
            Tile tail = t;
            tail.b += vecs * VEC;
            tail.c += vecs * VEC;
            if (vecs) kernels[i].by_vecs[vecs](&t, 0);
            if (rest) kernels[i].by_vecs[0](&tail, rest);
            t.a += rows * t.a_row;
            t.c += rows * t.c_row;
        }
    }
}

/* kernels NULL: depths. */
static inline void tile_run(const TileKernels *kernels, const Tile *t)
{
    if (!kernels) tile_depths(t);
    else if (t->rows == TILE_ROWS && t->cols == TILE_COLS) kernels[0].by_vecs[TILE_VECS](t, 0);
    else tile_edge(kernels, t);
}

TILE_FAMILY(TILE_FMA, tiles_fma)
TILE_FAMILY(TILE_FLUSHED, tiles_flushed)
#if defined(CPU_ISA_avx512)
LEAF_KERNEL(TILE_FMA, leaf_of_fma)
#endif
#else
static inline void tile_run(const TileKernels *kernels, const Tile *t)
{
    (void)kernels;
    tile_depths(t);
}
#endif

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* How a call is cut; and what its threads share. */
typedef struct {
    const Gemm *g;
    GemmOperand a, b;
    GemmForm form;
    const TileKernels *kernels;
    LeafKernel leaf_kernel; /* of whole tiles of I64; NULL: `kernels` serve these, too */
    int64_t M, N,
        K; /* the product that is computed: turned round if `swap`; K, as all k's below, in units of the form */
    bool swap, copy_a, copy_b;
    bool rows_of_a; /* of a copied A all that a row has lies together, else what a k has */
    bool in_place;  /* sums build up in C itself */
    bool stream;    /* the result, written once, passes the caches */
    int64_t leaf, slab, group;
    int64_t mean_leaf;        /* of all; `leaf` is the longest */
    const int64_t *starts;    /* Gemm.starts, in units, from 0 on; NULL: `leaf` says */
    int64_t run;              /* numbers of a leaf of bf16; K, if all leaves can be packed as one */
    int64_t slots;            /* levels of waiting sums */
    float quick;              /* leaves whose square is below this need no check */
    double magic;             /* Leaf.magic */
    int64_t a_panel, b_panel; /* floats from one packed panel to the next */
    int64_t rows, cols;       /* what a task has */
    int64_t row_tasks, tasks;
    int64_t a_elems, b_elems, slot_elems, thread_elems;
    char *workspace;
    int64_t starts_bytes; /* of the workspace, before what threads have */
    _Atomic int64_t next;
    atomic_bool overflow;
} Plan;

/* A thread's share of the leaves that leaf_kernel made. */
typedef struct {
    FixedAdd add; /* of the one that waits for the next kernel; its `leaf` NULL: none does */
    float leaves[2][TILE_ELEMS] __attribute__((aligned(64))); /* the one that waits, and the next one */
    int64_t sums[TILE_ELEMS] __attribute__((aligned(64)));    /* of a tile that has further leaves */
    int next;
} LeafWait;

/* A task in the hands of a thread. */
typedef struct {
    const Plan *p;
    int64_t row, rows, col, cols, panels;
    int64_t k, slab_k;            /* the current slab */
    int64_t group;                /* its group's number */
    int64_t leaf, next_leaf;      /* with `starts`: the first leaf of the group and of the next group */
    bool first, last, last_group; /* the slab's place in its group; the group's in K */
    bool long_leaf;               /* the group is one leaf in several slabs */
    float *a, *b, *slot;
    int64_t chunk;                /* first row of the packed chunk of A */
    int64_t packed_col, packed_k; /* what of B is packed */
    const char *soon;             /* rows of integers that the kernel asks for beforehand */
    int64_t soon_rows;
    LeafWait *wait;
    bool overflow;
} Task;

/* ---- sums of one tile ---- */

/* Destination of a tile's sum: C itself, a slot, or a local array. */
typedef struct {
    float *at;
    int64_t ld;
} Sum;

static Sum slot_of(const Task *t, int64_t level, int64_t row, int64_t col)
{
    int64_t tile = row / TILE_ROWS * t->panels + col / TILE_COLS;
    return (Sum){ t->slot + level * t->p->slot_elems + tile * TILE_ELEMS, TILE_COLS };
}

/* The operands of a tile at the start of the slab. Outside C a tile has whole vectors: packed B is padded. */
static Tile tile_open(const Task *t, int64_t row, int64_t col)
{
    const Plan *p = t->p;
    Tile tile = { .rows = min64(t->rows - row, TILE_ROWS), .cols = min64(t->cols - col, TILE_COLS) };
    if (p->copy_a) {
        tile.a = t->a + (row - t->chunk) / TILE_ROWS * p->a_panel;
        tile.a_row = p->rows_of_a ? p->a_panel / TILE_ROWS : 1;
        tile.a_k = p->rows_of_a ? 1 : TILE_ROWS;
    } else if (form_packs(p->form)) {
        tile.a = (const void *)(p->a.bf16 + (t->row + row) * p->a.ld + 2 * t->k);
        tile.a_row = p->a.ld / 2;
        tile.a_k = 1;
    } else {
        tile.a = p->a.data + (t->row + row) * p->a.ld + t->k;
        tile.a_row = p->a.ld;
        tile.a_k = 1;
    }
    if (p->copy_b) {
        tile.b = t->b + col / TILE_COLS * p->b_panel;
        tile.b_k = panel_width(tile.cols);
        tile.ahead = AHEAD_PACKED;
        if (!p->in_place) tile.cols = tile.b_k;
    } else {
        tile.b = p->b.data + t->k * p->b.ld + t->col + col;
        tile.b_k = p->b.ld;
        tile.ahead = AHEAD_DIRECT;
    }
    return tile;
}

/* The next `count` k's, into `sum`. */
static inline void tile_chain(const Plan *p, Tile *tile, int64_t count, TileStart start, Sum sum)
{
    tile->k = count;
    tile->start = start;
    tile->c = sum.at;
    tile->c_row = sum.ld;
    tile_run(p->kernels, tile);
    tile->a += count * tile->a_k;
    tile->b += count * tile->b_k;
}

/* x += y */
static void sum_add(Sum x, Sum y, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++) {
        float *to = x.at + i * x.ld;
        const float *from = y.at + i * y.ld;
        int64_t j = 0;
        for (; j + VEC <= cols; j += VEC) vf_store(to + j, vf_add(vf_load(to + j), vf_load(from + j)));
        const int64_t n = cols - j;
        if (n) vf_store_n(to + j, vf_add(vf_load_n(to + j, n), vf_load_n(from + j, n)), n);
    }
}

/* The leaves of a slab: a binary counter whose entry 0 is `sum`. */
static void tile_leaves(const Plan *p, Tile *tile, int64_t slab, Sum sum)
{
    const int64_t leaf = p->leaf;
    static _Thread_local float stack[LEVELS][TILE_ELEMS] __attribute__((aligned(64))); /* (as LeafWait's) */
    Sum level[LEVELS] = { sum };
    int top = 0;
    for (int64_t k = 0, n = 0; k < slab; k += leaf, n++) {
        const int64_t count = min64(leaf, slab - k);
        if (top && !(n & 1)) level[top] = (Sum){ stack[top], TILE_COLS };
        if (n & 1) tile_chain(p, tile, count, TILE_ADD, level[top - 1]);
        else tile_chain(p, tile, count, TILE_SET, level[top++]);
        for (int64_t x = n; (x & 3) == 3; x >>= 1, top--)
            sum_add(level[top - 2], level[top - 1], tile->rows, tile->cols);
    }
    for (; top > 1; top--) sum_add(level[top - 2], level[top - 1], tile->rows, tile->cols);
}

/* ---- a tile of a float result: chain or leaves, then up the tree, then out ---- */

static vf load_left(const float *p, int64_t left) { return left >= VEC ? vf_load(p) : vf_load_n(p, left); }

/* The bias of columns from j on. */
static vf bias_at(const Gemm *g, int64_t j, int64_t left)
{
    return g->bias ? load_left(g->bias + j, left) : load_bf16(g->narrow.bias + j, left);
}

static bool has_bias(const Gemm *g) { return g->bias || g->narrow.bias; }

static void output_plain(const Task *t, int64_t row, int64_t col, Sum sum)
{
    const Gemm *g = t->p->g;
    int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    for (int64_t i = 0; i < rows; i++) {
        float *out = g->c + (t->row + row + i) * g->ldc + t->col + col;
        for (int64_t j = 0; j < cols; j += VEC) {
            const int64_t left = cols - j;
            vf v = load_left(sum.at + i * sum.ld + j, left);
            if (has_bias(g)) v = vf_add(v, bias_at(g, t->col + col + j, left));
            if (left >= VEC) vf_store(out + j, v);
            else vf_store_n(out + j, v, left);
        }
    }
}

/* Rows of the tile are columns of C. */
static void output_swapped(const Task *t, int64_t row, int64_t col, Sum sum)
{
    const Gemm *g = t->p->g;
    int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    float bias[TURNED];
    for (int64_t i = 0; has_bias(g) && i < rows; i += VEC) vf_store(bias + i, bias_at(g, t->row + row + i, rows - i));
    for (int64_t i = 0; has_bias(g) && i < rows; i++) {
        vf b = vf_set1(bias[i]);
        for (float *s = sum.at + i * sum.ld; s < sum.at + i * sum.ld + cols; s += VEC)
            vf_store(s, vf_add(vf_load(s), b));
    }
    transpose_any(g->c + (t->col + col) * g->ldc + t->row + row, g->ldc, sum.at, sum.ld, rows, cols);
}

/* Rows and columns of C, whichever way the product was turned. */
typedef struct {
    int64_t row, col, rows, cols;
} Part;

static void output_narrow(const Task *t, int64_t row, int64_t col, Sum sum)
{
    const Gemm *g = t->p->g;
    const GemmNarrow *n = &g->narrow;
    float turned[TILE_COLS * TURNED] __attribute__((aligned(64)));
    Part at = { t->row + row, t->col + col, min64(t->rows - row, TILE_ROWS), min64(t->cols - col, TILE_COLS) };
    if (t->p->swap) {
        transpose_any(turned, TURNED, sum.at, sum.ld, at.rows, at.cols);
        sum = (Sum){ turned, TURNED };
        at = (Part){ at.col, at.row, at.cols, at.rows };
    }
    for (int64_t i = 0; i < at.rows; i++) {
        uint16_t *out = n->c + (at.row + i) * g->ldc + at.col;
        for (int64_t j = 0; j < at.cols; j += VEC) {
            const int64_t left = at.cols - j;
            vf v = load_left(sum.at + i * sum.ld + j, left);
            if (has_bias(g)) v = vf_add(v, bias_at(g, at.col + j, left));
            if (n->gelu_x)
                v = vf_mul(v, gelu_slope(load_bf16(n->gelu_x + (at.row + i) * n->gelu_x_ld + at.col + j, left)));
            store_bf16(out + j, v, left);
            if (n->gelu)
                store_bf16(n->gelu + (at.row + i) * n->gelu_ld + at.col + j, gelu(load_bf16(out + j, left)), left);
        }
    }
}

static void tile_float(const Task *t, int64_t row, int64_t col)
{
    const Plan *p = t->p;
    const Gemm *g = p->g;
    float local[TILE_ELEMS] __attribute__((aligned(64)));
    int64_t level = __builtin_popcountll((uint64_t)t->group);
    Tile tile = tile_open(t, row, col);
    Sum sum = { local, TILE_COLS };
    if (p->in_place) sum = (Sum){ g->c + (t->row + row) * g->ldc + t->col + col, g->ldc };
    else if (p->slots) sum = slot_of(t, level, row, col);
    if (p->leaf < p->group) tile_leaves(p, &tile, t->slab_k, sum);
    else tile_chain(p, &tile, t->slab_k, t->first && !g->beta ? TILE_SET : TILE_CONTINUE, sum);
    if (!t->last) return;
    for (int64_t x = t->group; level > 0 && (t->last_group || (x & 1)); x >>= 1) {
        Sum sibling = slot_of(t, --level, row, col);
        sum_add(sibling, sum, tile.rows, tile.cols);
        sum = sibling;
    }
    if (!t->last_group) return;
    if (g->narrow.c) output_narrow(t, row, col, sum);
    else if (p->swap) output_swapped(t, row, col, sum);
    else if (!p->in_place || has_bias(g)) output_plain(t, row, col, sum);
}

/*
 * All full tiles of a row whose sums build up in C, or in slots and are not ready yet, in one call of the kernel;
 * returns the columns done. With few k's the way from tile to tile would otherwise cost as much as the tile.
 */
static int64_t tile_strip(const Task *t, int64_t row)
{
    const Plan *p = t->p;
    const Gemm *g = p->g;
    const int64_t full = t->cols / TILE_COLS;
    const int64_t level = g->mode == GEMM_I64 ? 0 : __builtin_popcountll((uint64_t)t->group);
    Tile tile = tile_open(t, row, 0);
    if (!full) return 0;
    Sum sum = { g->c + (t->row + row) * g->ldc + t->col, g->ldc };
    tile.more = full - 1;
    tile.b_tile = p->copy_b ? p->b_panel : TILE_COLS;
    tile.c_tile = TILE_COLS;
    if (!p->in_place) sum = slot_of(t, level, row, 0), tile.c_tile = TILE_ELEMS;
    tile.cols = TILE_COLS;
    tile_chain(p, &tile, t->slab_k, t->first && !(p->in_place && g->beta) ? TILE_SET : TILE_CONTINUE, sum);
    return full * TILE_COLS;
}

/* ---- a tile of a fixed-point result ---- */

/* Memory in which the integers of a tile wait for the next leaves. */
typedef struct {
    int64_t *at;
    int64_t ld;
} FixedSum;

/* Integers of a tile that do not lie in G, because its vectors are not whole there: added to it. */
static void output_fixed(const Task *t, int64_t row, int64_t col, FixedSum sum)
{
    const Gemm *g = t->p->g;
    const int64_t rows = min64(t->rows - row, TILE_ROWS), cols = min64(t->cols - col, TILE_COLS);
    int64_t *to = g->fixed + (t->row + row) * g->ldc + t->col + col;
    for (int64_t i = 0; i < rows; i++, to += g->ldc, sum.at += sum.ld)
        for (int64_t j = 0; j < cols; j++) to[j] = (g->beta || t->group ? to[j] : 0) + sum.at[j];
}

/* In G; in `memory` where G has no whole vectors. */
static FixedSum fixed_home(const Task *t, int64_t row, int64_t col, int64_t *memory)
{
    const Gemm *g = t->p->g;
    if (min64(t->cols - col, TILE_COLS) % VEC) return (FixedSum){ memory, TILE_COLS };
    return (FixedSum){ g->fixed + (t->row + row) * g->ldc + t->col + col, g->ldc };
}

/* A place among the leaves of a slab. */
typedef struct {
    int64_t k, leaf;
} LeafPlace;

/* How many of the next leaves of a slab one call of the kernel makes: equal ones, of which the last may be short. */
static int64_t equal_leaves(const Task *t, Tile *tile, LeafPlace *at)
{
    const int64_t leaf = t->p->leaf, left = t->slab_k - at->k;
    int64_t count = LEAVES;
    if (left < LEAVES * leaf) count = max64(left / leaf, 1); /* seldom: a division takes long */
    tile->a_tile = leaf * tile->a_k, tile->b_tile = leaf * tile->b_k;
    tile->k = min64(leaf, left);
    at->k += count * leaf;
    return count;
}

/* The same of leaves of any lengths: those that follow each other without an empty one between them. */
static int64_t any_leaves(const Task *t, Tile *tile, LeafPlace *at)
{
    const int64_t *s = t->p->starts + at->leaf, end = s[0] + t->slab_k - at->k;
    int64_t count = 1;
    for (; s[0] == s[1]; s++) at->leaf++;
    while (count < LEAVES && s[count] < end && s[count] < s[count + 1]) count++;
    tile->starts = s;
    at->k += s[count] - s[0];
    at->leaf += count;
    return count;
}

/* The sums of the next leaves, at most LEAVES, TILE_ELEMS apart; returns how many. */
static int64_t leaf_sums(const Task *t, Tile *tile, LeafPlace *at, Sum sum)
{
    const int64_t k = at->k;
    int64_t count = 1;
    if (t->long_leaf) tile->k = at->k = t->slab_k;
    else count = t->p->starts ? any_leaves(t, tile, at) : equal_leaves(t, tile, at);
    tile->more = count - 1;
    tile->start = t->first ? TILE_SET : TILE_CONTINUE;
    tile->c = sum.at, tile->c_row = sum.ld;
    tile_run(t->p->kernels, tile);
    tile->a += (at->k - k) * tile->a_k, tile->b += (at->k - k) * tile->b_k;
    return count;
}

static TileFixed fixed_open(const Task *t)
{
    TileFixed fixed = { .limit2 = t->p->quick, .soon = t->soon, .soon_rows = t->soon_rows };
    fixed.soon_row = t->p->g->ldc * (int64_t)sizeof *t->p->g->fixed;
    return fixed;
}

/*
 * Leaves are chains in memory of their own, made by one call of the kernel; then all are converted and added at
 * once, so that integers, twice as wide, are read and written as seldom as can be.
 */
static void tile_fixed(Task *t, int64_t row, int64_t col)
{
    const Plan *p = t->p;
    const Gemm *g = p->g;
    float leaves[LEAVES * TILE_ELEMS] __attribute__((aligned(64)));
    int64_t memory[TILE_ELEMS] __attribute__((aligned(64)));
    TileFixed fixed = fixed_open(t);
    Tile tile = tile_open(t, row, col);
    const Sum sum = t->long_leaf ? slot_of(t, 0, row, col) : (Sum){ leaves, TILE_COLS };
    tile.fixed = t->last ? &fixed : NULL;
    tile.c_tile = TILE_ELEMS;
    if (!t->last) return tile_chain(p, &tile, t->slab_k, t->first ? TILE_SET : TILE_CONTINUE, sum);

    const FixedSum home = fixed_home(t, row, col, memory);
    const bool at_home = home.at != memory;
    FixedAdd add = { .leaf = sum.at, .rows = tile.rows, .cols = tile.cols };
    add.scale = fix_scale(g->shift), add.limit = fix_limit(g->headroom_bits);
    add.from = at_home && (t->group > 0 || g->beta) ? home.at : NULL, add.from_row = home.ld;
    for (LeafPlace at = { 0, t->leaf }; at.k < t->slab_k;) {
        const int64_t count = leaf_sums(t, &tile, &at, sum);
        const bool end = at.k >= t->slab_k;
        add.to = end ? home.at : memory, add.to_row = end ? home.ld : TILE_COLS;
        add.stream = end && p->stream && at_home;
        if (!fixed.beyond) fixed_add(&add, count);
        else if (fixed_add_checked(&add, count)) t->overflow = true;
        fixed.beyond = false;
        add.from = add.to, add.from_row = add.to_row;
    }
    if (!at_home) output_fixed(t, row, col, home);
}

/* ---- the same of a whole tile by leaf_kernel ---- */

static int64_t next_leaf(const Task *t, LeafPlace *at)
{
    const int64_t *s = t->p->starts;
    int64_t k = min64(t->p->leaf, t->slab_k - at->k);
    if (s) {
        while (s[at->leaf + 1] == s[at->leaf]) at->leaf++;
        k = s[at->leaf + 1] - s[at->leaf];
        at->leaf++;
    }
    at->k += k;
    return k;
}

/* Adds the leaf that waits, where no kernel comes that could. */
static void add_waiting(Task *t)
{
    if (t->wait->add.leaf) fixed_add(&t->wait->add, 1);
    t->wait->add.leaf = NULL;
}

/* Even the last leaf waits, for the first one of the next tile. One that must be looked at is added at once. */
static void tile_fixed_whole(Task *t, int64_t row, int64_t col)
{
    static const int64_t zero[TILE_COLS];
    const Plan *p = t->p;
    const Gemm *g = p->g;
    LeafWait *wait = t->wait;
    TileFixed fixed = fixed_open(t);
    const Tile tile = tile_open(t, row, col);
    Leaf leaf = { .a = tile.a, .b = tile.b, .magic = p->magic, .fixed = &fixed };
    int64_t *home = g->fixed + (t->row + row) * g->ldc + t->col + col;
    FixedAdd add = { .rows = TILE_ROWS, .cols = TILE_COLS, .from = zero };
    add.scale = fix_scale(g->shift), add.limit = fix_limit(g->headroom_bits);
    if (t->group > 0 || g->beta) add.from = home, add.from_row = g->ldc;
    for (LeafPlace at = { 0, t->leaf }; at.k < t->slab_k;) {
        leaf.k = next_leaf(t, &at);
        leaf.sum = wait->leaves[wait->next];
        leaf.waiting = wait->add.leaf ? &wait->add : NULL;
        p->leaf_kernel(&leaf);
        wait->next ^= 1;
        leaf.a += leaf.k * TILE_ROWS, leaf.b += leaf.k * TILE_COLS;
        const bool end = at.k >= t->slab_k;
        add.leaf = leaf.sum;
        add.to = end ? home : wait->sums, add.to_row = end ? g->ldc : TILE_COLS;
        add.stream = end && p->stream;
        wait->add = add;
        if (fixed.beyond) {
            if (fixed_add_checked(&add, 1)) t->overflow = true;
            wait->add.leaf = NULL;
            fixed.beyond = false;
        }
        add.from = add.to, add.from_row = add.to_row;
    }
}

/* ---- a task ---- */

/* Numbers of one leaf in the slab of bf16 operands. */
typedef struct {
    int64_t number, numbers; /* the first one's k, and how many */
    int64_t units;
} Run;

/* The one that begins `at` units behind the slab's first. */
static Run run_at(const Task *t, int64_t at)
{
    const Plan *p = t->p;
    const int64_t *starts = p->g->starts, k = t->k + at;
    int64_t unit = 0, number = 0, end = p->g->K;
    if (starts) {
        int64_t leaf = t->leaf;
        while (p->starts[leaf + 1] - p->starts[0] <= k) leaf++;
        unit = p->starts[leaf] - p->starts[0], number = starts[leaf] - starts[0], end = starts[leaf + 1] - starts[0];
    } else if (p->run < p->g->K) {
        unit = k - k % form_units(p->form, p->run), number = unit / form_units(p->form, p->run) * p->run;
        end = min64(number + p->run, p->g->K);
    }
    number += form_numbers(p->form, k - unit);
    const int64_t numbers = min64(end - number, form_numbers(p->form, t->slab_k - at));
    return (Run){ number, numbers, form_units(p->form, numbers) };
}

static void task_pack_b(Task *t)
{
    const Plan *p = t->p;
    if (t->packed_col == t->col && t->packed_k == t->k) return; /* the task above this one has packed it */
    t->packed_col = t->col;
    t->packed_k = t->k;
    if (p->form == FORM_F32) {
        if (p->b.transposed)
            pack_b_transposed(t->b, p->b_panel, p->b.data + t->col * p->b.ld + t->k, p->b.ld, t->slab_k, t->cols);
        else pack_b(t->b, p->b_panel, p->b.data + t->k * p->b.ld + t->col, p->b.ld, t->slab_k, t->cols);
        return;
    }
    for (int64_t at = 0; at < t->slab_k;) {
        const Run r = run_at(t, at);
        const uint16_t *from = p->b.bf16;
        if (p->b.transposed)
            narrow_pack_b_transposed(p->form, t->b, p->b_panel, at, from + t->col * p->b.ld + r.number, p->b.ld,
                                     r.numbers, t->cols);
        else
            narrow_pack_b(p->form, t->b, p->b_panel, at, from + r.number * p->b.ld + t->col, p->b.ld, r.numbers,
                          t->cols);
        at += r.units;
    }
}

/* A chunk of an A that is copied starts at this row. */
static void task_pack_a(Task *t, int64_t row)
{
    const Plan *p = t->p;
    const int64_t rows = min64(t->rows - row, CHUNK_ROWS), first = t->row + row;
    t->chunk = row;
    if (p->form == FORM_F32) {
        pack_a(t->a, p->a_panel, p->a.data + t->k * p->a.ld + first, p->a.ld, t->slab_k, rows);
        return;
    }
    for (int64_t at = 0; at < t->slab_k;) {
        const Run r = run_at(t, at);
        if (p->rows_of_a && p->a.transposed)
            narrow_pack_turned(p->form, t->a + at, p->a_panel / TILE_ROWS, p->a.bf16 + r.number * p->a.ld + first,
                               p->a.ld, r.numbers, rows);
        else if (p->rows_of_a)
            narrow_pack_rows(p->form, t->a + at, p->a_panel / TILE_ROWS, p->a.bf16 + first * p->a.ld + r.number,
                             p->a.ld, r.numbers, rows);
        else
            narrow_pack_a(p->form, t->a + at * TILE_ROWS, p->a_panel, p->a.bf16 + r.number * p->a.ld + first, p->a.ld,
                          r.numbers, rows);
        at += r.units;
    }
}

/* Asks for the C (or G) of a tile, from row `first` of it on, while the one before it is computed: else the chain waits
 * for memory. */
static void task_prefetch_c(const Task *t, int64_t row, int64_t col, int64_t first)
{
    const Gemm *g = t->p->g;
    const bool fixed = g->fixed != NULL;
    const int64_t size = fixed ? sizeof *g->fixed : sizeof *g->c, line = 64;
    const int64_t rows = min64(t->rows - row, TILE_ROWS), bytes = min64(t->cols - col, TILE_COLS) * size;
    const char *c = fixed ? (const char *)g->fixed : (const char *)g->c;
    c += ((t->row + row + first) * g->ldc + t->col + col) * size;
    for (int64_t i = first; i < rows; i++, c += g->ldc * size)
        for (int64_t j = 0; j < bytes; j += line) __builtin_prefetch(c + j, 1);
}

/* The same of integers: as many rows as there is time for by the kernel, the rest at once. */
static void task_prefetch_fixed(Task *t, int64_t row, int64_t col)
{
    const Gemm *g = t->p->g;
    const bool whole = t->cols - col >= TILE_COLS;
    const int64_t rows = min64(t->rows - row, TILE_ROWS), time = t->p->kernels ? t->slab_k / SOON_K : 0;
    t->soon = (const char *)(g->fixed + (t->row + row) * g->ldc + t->col + col);
    t->soon_rows = whole && rows > 0 ? min64(rows, time) : 0;
    task_prefetch_c(t, row, col, t->soon_rows);
}

static void task_tile(Task *t, int64_t row, int64_t col)
{
    const Plan *p = t->p;
    const bool whole = t->rows - row >= TILE_ROWS && t->cols - col >= TILE_COLS;
    if (p->g->mode != GEMM_I64) return tile_float(t, row, col);
    if (whole && p->leaf_kernel && !t->long_leaf) return tile_fixed_whole(t, row, col);
    add_waiting(t);
    tile_fixed(t, row, col);
}

static void task_slab(Task *t)
{
    const Plan *p = t->p;
    const bool fixed = p->g->mode == GEMM_I64 && t->last;
    const bool reread = (fixed && !p->stream) || (p->in_place && (p->g->beta || !t->first));
    const bool strips = p->leaf >= p->group && (p->in_place ? !has_bias(p->g) : !t->last);
    if (p->copy_b) task_pack_b(t);
    for (int64_t row = 0; row < t->rows; row += TILE_ROWS) {
        if (p->copy_a && row % CHUNK_ROWS == 0) task_pack_a(t, row);
        int64_t col = strips && t->rows - row >= TILE_ROWS ? tile_strip(t, row) : 0;
        for (; col < t->cols; col += TILE_COLS) {
            const bool end = col + TILE_COLS >= t->cols;
            const int64_t next_row = end ? row + TILE_ROWS : row, next_col = end ? 0 : col + TILE_COLS;
            if (reread && fixed) task_prefetch_fixed(t, next_row, next_col);
            else if (reread) task_prefetch_c(t, next_row, next_col, 0);
            task_tile(t, row, col);
        }
    }
}

/* End of the group that begins at k0: with `starts`, behind the last leaf that fits a slab, or behind a longer first
 * one. */
static int64_t group_end(Task *t, int64_t k0)
{
    const Plan *p = t->p;
    const int64_t *starts = p->starts;
    int64_t end = k0;
    if (!starts) return min64(k0 + p->group, p->K);
    t->leaf = t->next_leaf;
    while (end < p->K) {
        const int64_t next = starts[t->next_leaf + 1] - starts[0];
        if (next - k0 > p->slab && end > k0) break;
        end = next;
        t->next_leaf++;
    }
    return end;
}

static void task_run(Task *t, int64_t index)
{
    const Plan *p = t->p;
    t->row = index % p->row_tasks * p->rows;
    t->col = index / p->row_tasks * p->cols;
    t->rows = min64(p->rows, p->M - t->row);
    t->cols = min64(p->cols, p->N - t->col);
    t->panels = ceil_div(t->cols, TILE_COLS);
    t->group = t->next_leaf = 0;
    int64_t end = 0;
    do {
        const int64_t k0 = end;
        end = group_end(t, k0);
        t->last_group = end == p->K;
        t->long_leaf = end - k0 > p->slab;
        for (t->k = k0; t->k < end || t->k == k0; t->k += p->slab) {
            t->slab_k = min64(p->slab, end - t->k);
            t->first = t->k == k0;
            t->last = t->k + t->slab_k == end;
            task_slab(t);
        }
        t->group++;
    } while (end < p->K);
}

static void thread_run(Plan *p, int64_t thread)
{
    float *memory = (float *)(void *)(p->workspace + p->starts_bytes) + thread * p->thread_elems;
    static _Thread_local LeafWait wait; /* (larger than a frame may be) */
    wait.add.leaf = NULL, wait.next = 0;
    Task t = { .p = p, .packed_col = -1, .a = memory, .b = memory + p->a_elems, .wait = &wait };
    t.slot = t.b + p->b_elems;
    depths_begin();
    for (int64_t i; (i = atomic_fetch_add(&p->next, 1)) < p->tasks;) task_run(&t, i);
    depths_end();
    add_waiting(&t);
    if (t.overflow) atomic_store(&p->overflow, true);
    if (p->stream) atomic_thread_fence(memory_order_seq_cst); /* orders streamed lines, too */
}

/* ---- the plan ---- */

/* Leaves of Gemm.starts in units: the longest, and all together; `to`, if not NULL, where each begins. Returns how many
 * there are. */
static int64_t count_leaves(Plan *p, int64_t *to)
{
    const int64_t *s = p->g->starts, end = s[0] + p->g->K;
    int64_t count = 0;
    p->leaf = 1, p->K = 0;
    if (to) to[0] = 0;
    for (; s[count] < end; count++) {
        const int64_t units = form_units(p->form, s[count + 1] - s[count]);
        p->leaf = max64(p->leaf, units);
        p->K += units;
        if (to) to[count + 1] = p->K;
    }
    return count;
}

/* K and leaves in units of the form. */
static void plan_leaves(Plan *p)
{
    const Gemm *g = p->g;
    const int64_t step = form_step(p->form);
    const int64_t leaf = g->mode == GEMM_CHAIN ? g->K : min64(g->leaf, g->K);
    if (g->starts) {
        const int64_t count = count_leaves(p, NULL);
        p->mean_leaf = p->K / max64(count, 1);
        if (step > 1) p->starts_bytes = ceil_div((count + 1) * (int64_t)sizeof *p->starts, 64) * 64;
        else p->starts = g->starts;
        return;
    }
    p->run = leaf % step ? leaf : g->K;
    p->mean_leaf = p->leaf = max64(form_units(p->form, leaf), 1);
    p->K = form_units(p->form, g->K);
    if (p->run < g->K) p->K = g->K / leaf * p->leaf + form_units(p->form, g->K % leaf);
}

static void plan_k(Plan *p)
{
    const Gemm *g = p->g;
    const int64_t step = max64(form_units(p->form, form_step(p->form)), VEC); /* slabs begin with a depth */
    int64_t most = SLAB_K;
    if (p->copy_a) most = g->mode == GEMM_I64 ? SLAB_K_FIXED : SLAB_K_COPY_A;
    else if (p->swap) most = SLAB_K_SWAP;
    if (g->starts) {
        p->group = p->leaf;
        p->slab = min64(most, ceil_div(p->K, VEC) * VEC);
    } else if (p->leaf > most) {
        p->group = p->leaf;
        p->slab = ceil_div(ceil_div(p->leaf, ceil_div(p->leaf, most)), step) * step;
    } else {
        int64_t leaves = p->leaf < p->K ? most / p->leaf : 1;
        if (g->mode == GEMM_I64) leaves = min64(leaves, ceil_div(p->K, p->leaf)); /* a slab no deeper than K */
        if (g->mode == GEMM_TREE) leaves = (int64_t)1 << (63 - __builtin_clzll((uint64_t)leaves));
        p->slab = p->group = p->leaf * leaves;
    }
    int64_t groups = ceil_div(p->K, p->group);
    bool tree = g->mode == GEMM_TREE && groups > 1;
    p->in_place = g->mode != GEMM_I64 && !p->swap && !tree && !g->narrow.c;
    if (tree) p->slots = 64 - __builtin_clzll((uint64_t)groups);
    else p->slots = p->group > p->slab && !p->in_place;
    p->quick = fixed_quick(g->shift, g->headroom_bits);
    p->magic = ldexp(1.5, 52 - g->shift);
}

static void plan_tasks(Plan *p, int64_t threads)
{
    const int64_t panels = ceil_div(p->N, TILE_COLS), panel_bytes = p->slab * TILE_COLS * (int64_t)sizeof(float);
    const int64_t wanted = TASKS_PER_THREAD * threads;
    int64_t wide = p->copy_b ? max64((p->copy_a ? SLAB_BYTES_WIDE : SLAB_BYTES) / panel_bytes, 2) : 4;
    int64_t col_tasks = ceil_div(panels, wide), row_tasks = ceil_div(wanted, col_tasks);
    row_tasks = min64(row_tasks, ceil_div(p->M, p->copy_a ? TASK_ROWS_MIN : TASK_ROWS_MIN_DIRECT));
    if (p->slots) {
        int64_t level_bytes = min64(wide, panels) * TILE_COLS * p->M * (int64_t)sizeof(float);
        row_tasks = max64(row_tasks, ceil_div(level_bytes * p->slots, SLOT_BYTES_MAX));
    }
    col_tasks = max64(col_tasks, min64(ceil_div(wanted, row_tasks), p->copy_b ? panels / 2 : panels));
    wide = ceil_div(panels, col_tasks);
    col_tasks = ceil_div(panels, wide);
    p->cols = wide * TILE_COLS;
    p->rows = ceil_div(ceil_div(p->M, row_tasks), TILE_ROWS) * TILE_ROWS;
    p->row_tasks = ceil_div(p->M, p->rows);
    p->tasks = p->row_tasks * col_tasks;
    /* a line more than needed, so that the panels do not all start in the same sets of the cache */
    p->a_panel = p->rows_of_a ? (p->slab + VEC) * TILE_ROWS : p->slab * TILE_ROWS + VEC;
    p->b_panel = p->slab * TILE_COLS + VEC;
    p->a_elems = p->copy_a ? CHUNK_ROWS / TILE_ROWS * p->a_panel : 0;
    p->b_elems = p->copy_b ? wide * p->b_panel : 0;
    p->slot_elems = p->slots ? ceil_div(p->rows, TILE_ROWS) * wide * TILE_ELEMS : 0;
    p->thread_elems = ceil_div(p->a_elems + p->b_elems + p->slots * p->slot_elems, VEC) * VEC;
}

/* A result of integers in the order of the last cache's size, made in one go, of whole aligned lines. */
static void plan_stream(Plan *p)
{
    const Gemm *g = p->g;
    const int64_t element = sizeof *g->fixed;
    p->stream = g->mode == GEMM_I64 && !g->beta && p->K <= p->slab && (uintptr_t)g->fixed % 64 == 0 &&
                g->ldc * element % 64 == 0 && g->M * g->N * element >= STREAM_BYTES;
}

/* Worth turning round when transposing A instead of B saves more than storing C the other way costs. */
static void plan_operands(Plan *p)
{
    const Gemm *g = p->g;
    p->swap =
        g->mode != GEMM_I64 && !g->beta && g->b.transposed && !g->a.transposed && (g->N - g->M) * g->K > g->M * g->N;
    p->M = p->swap ? g->N : g->M;
    p->N = p->swap ? g->M : g->N;
    p->a = p->swap ? g->b : g->a;
    p->b = p->swap ? g->a : g->b;
    p->a.transposed ^= p->swap;
    p->b.transposed ^= p->swap;
    /* an A of pairs is read where it lies if they are pairs there, too */
    const bool pairs_lie =
        form_packs(p->form) && !p->a.transposed && p->run == g->K && g->K % form_step(p->form) == 0 && p->a.ld % 2 == 0;
    const bool rows = p->form == FORM_TILES || (p->form != FORM_F32 && !p->a.transposed);
    p->rows_of_a = rows && !pairs_lie;
    p->copy_a = p->a.transposed || p->rows_of_a;
    p->copy_b = p->b.transposed || p->M > DIRECT_ROWS || g->mode == GEMM_I64 || p->form != FORM_F32;
}

#if !defined(GEMM_TILES)
GemmForm CPU(gemm_form)(const Device *dev)
{
    if (dev->dot == DOT_FMA) return FORM_WIDE;
    return dev->dot_pairs ? FORM_PAIRS : FORM_SWAPPED;
}

static const TileKernels *kernels_of(GemmForm form)
{
    if (form == FORM_DEPTHS) return NULL;
    return form == FORM_PAIRS ? CPU(tile_pairs)() : form == FORM_SWAPPED ? tiles_flushed : tiles_fma;
}

static void plan_form(Plan *p, const Device *dev)
{
    p->form = !p->g->a.bf16 ? FORM_F32 : dev->dot == DOT_AMX ? FORM_DEPTHS : CPU(gemm_form)(dev);
    p->kernels = kernels_of(p->form);
    plan_leaves(p);
}

static LeafKernel leaf_kernel_of(GemmForm form)
{
#if defined(CPU_ISA_avx512)
    if (form == FORM_PAIRS) return CPU(leaf_pairs)();
    if (form == FORM_F32 || form == FORM_WIDE) return leaf_of_fma;
#endif
    (void)form;
    return NULL;
}
#else
static LeafKernel leaf_kernel_of(GemmForm form) { return (void)form, NULL; }

static void plan_form(Plan *p, const Device *dev)
{
    (void)dev;
    p->form = FORM_TILES;
    plan_leaves(p);
}
#endif

/* (It reads A by columns.) */
static void plan_leaf_kernel(Plan *p)
{
    if (p->copy_a && !p->rows_of_a && p->mean_leaf >= LEAF_K_MIN) p->leaf_kernel = leaf_kernel_of(p->form);
}

/* The fixed-point result of no leaf at all. */
static void output_zero(const Gemm *g)
{
    for (int64_t i = 0; i < g->M && !g->beta; i++) memset(g->fixed + i * g->ldc, 0, (size_t)g->N * sizeof *g->fixed);
}

#if !defined(GEMM_TILES)
static bool by_tiles(const Device *dev, const Gemm *g) { return g->a.bf16 && dev->dot == DOT_AMX && dev->dot_tiles; }
#define OWN_NAME(name) CPU(name)
#else
static bool by_tiles(const Device *dev, const Gemm *g) { return (void)dev, (void)g, false; }
#define OWN_NAME(name) CPU(name##_by_tiles)
#endif

int64_t OWN_NAME(gemm_bytes)(const Device *dev, const Gemm *g)
{
    Plan p = { .g = g };
    if (by_tiles(dev, g)) return CPU(gemm_bytes_by_tiles)(dev, g);
    if (g->M == 0 || g->N == 0 || (g->K == 0 && g->mode == GEMM_I64)) return 0;
    plan_form(&p, dev);
    plan_operands(&p);
    plan_k(&p);
    plan_tasks(&p, 1);
    return p.starts_bytes + p.thread_elems * (int64_t)sizeof(float);
}

static int64_t threads_for(const Device *dev, const Gemm *g)
{
    return 2 * g->M * g->N * g->K < SMALL_FLOP ? 1 : dev->threads;
}

double OWN_NAME(gemm_speedup)(const Device *dev, const Gemm *g)
{
    enum { THREADS_MOST = 64 };
    double elements[THREADS_MOST] = { 0 }, most = 0;
    Plan p = { .g = g };
    const int64_t threads = min64(threads_for(dev, g), THREADS_MOST);
    if (by_tiles(dev, g)) return CPU(gemm_speedup_by_tiles)(dev, g);
    if (threads == 1 || g->M == 0 || g->N == 0 || g->K == 0) return 1;
    plan_form(&p, dev);
    plan_operands(&p);
    plan_k(&p);
    plan_tasks(&p, threads);
    for (int64_t i = 0; i < p.tasks; i++) {
        const int64_t row = i % p.row_tasks * p.rows, col = i / p.row_tasks * p.cols;
        int64_t first = 0; /* who is done with what it took before */
        for (int64_t k = 1; k < threads; k++)
            if (elements[k] < elements[first]) first = k;
        elements[first] += (double)(min64(p.rows, p.M - row) * min64(p.cols, p.N - col));
        most = elements[first] > most ? elements[first] : most;
    }
    return (double)(p.M * p.N) / most;
}

bool OWN_NAME(gemm)(const Device *dev, const Gemm *g)
{
    if (by_tiles(dev, g)) return CPU(gemm_by_tiles)(dev, g);
    Plan p = { .g = g, .workspace = dev->workspace };
    ASSERT(g->mode == GEMM_CHAIN || g->starts || g->leaf > 0);
    ASSERT(!g->starts || g->mode == GEMM_I64);
    ASSERT(!g->beta || g->mode != GEMM_TREE);
    ASSERT((g->mode == GEMM_I64) == (g->fixed != NULL));
    ASSERT(!g->a.bf16 == !g->b.bf16 && (g->a.bf16 || !g->narrow.c) && !(g->beta && g->narrow.c));
    ASSERT(g->mode != GEMM_I64 || (g->shift >= -126 && g->shift <= 127));
    if (g->M == 0 || g->N == 0) return false;
    if (g->K == 0 && g->mode == GEMM_I64) return output_zero(g), false;
    int64_t threads = threads_for(dev, g);
    plan_form(&p, dev);
    plan_operands(&p);
    plan_k(&p);
    plan_tasks(&p, threads);
    plan_stream(&p);
    plan_leaf_kernel(&p);
    if (p.starts_bytes) {
        ASSERT(p.starts_bytes <= dev->workspace_bytes);
        count_leaves(&p, (int64_t *)(void *)p.workspace);
        p.starts = (const int64_t *)(const void *)p.workspace;
    }
    const int64_t room = (dev->workspace_bytes - p.starts_bytes) / (int64_t)sizeof(float);
    ASSERT(p.thread_elems <= room);
    threads = min64(threads, p.tasks);
    if (p.thread_elems) threads = min64(threads, room / p.thread_elems);
#pragma omp parallel num_threads(team_of(dev, threads))
    if (omp_get_thread_num() < threads) thread_run(&p, omp_get_thread_num());
    return atomic_load(&p.overflow);
}

#if !defined(GEMM_TILES)
void CPU(transpose)(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols)
{
    transpose_any(dst, ldd, src, lds, rows, cols);
}

void CPU(tile_gemm)(const TileGemm *g)
{
    /* Two strips of 32 columns are faster than 48 + 16: a strip of 16 has too few chains in flight. */
    int64_t strip = g->n == 64 && TILE_VECS == 3 ? 32 : TILE_COLS;
    const TileKernels *kernels = kernels_of(g->form);
    for (int64_t j = 0; j < g->n; j += strip) {
        Tile t = { .b = g->b + j,
                   .b_k = g->ldb,
                   .a_row = g->a_row,
                   .a_k = g->a_k,
                   .c_row = g->ldc,
                   .k = g->k,
                   .cols = min64(g->n - j, strip),
                   .start = g->beta ? TILE_CONTINUE : TILE_SET };
        for (int64_t i = 0; i < g->m; i += TILE_ROWS) {
            t.a = g->a + i * g->a_row;
            t.c = g->c + i * g->ldc + j;
            t.rows = min64(g->m - i, TILE_ROWS);
            tile_run(kernels, &t);
        }
    }
}
#endif
