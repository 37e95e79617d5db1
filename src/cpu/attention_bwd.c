/*
 * Attention, backward. Layout and bits: attention.h; forward: attention.c.
 *
 *   delta = sum over V of do o                 (16 lanes by index mod 16)
 *   p  = exp(s - lse)                          s = scale q k, recomputed, the same chain as forward
 *   dv = sum over queries of p keep do         keep: 0 or 1 / (1 - p_drop)
 *   ds = p (keep (do v) - delta) scale         with softcap: s = softcap t, t = tanh(scale / softcap q k), and
 *                                              scale (1 - t^2) in place of scale
 *   dq = sum over keys of ds k                 one chain, keys ascending
 *   dk = sum over queries of ds q              as dv: leaves and a tree
 *
 * A key row sums over query heads that tensor parallelism may spread over ranks, and over queries that context
 * parallelism spreads. So the sum is a binary tree over chunks of `chunk` heads; each of these is cut into leaves of
 * `leaf` global positions; a leaf is one chain over (head of the chunk, query) ascending; leaves meet in a
 * binary tree in the order 0, n-1, 1, n-2, ... in which the two spans of a zigzag rank are an aligned run:
 *
 *     cp = 2, n = 8    leaf  0 7 1 6 | 2 5 3 4       rank 0 holds positions of 0 1 6 7, rank 1 of 2 3 4 5
 *                            \_/ \_/   \_/ \_/
 *                             \___/     \___/        each rank returns its node,
 *                                 \_____/            the tree over ranks adds the rest
 *
 * (with several chunks on a rank it returns each chunk's: the tree over leaves is the inner one)
 *
 * A leaf whose queries see none of the keys counts as +0. Adding +0 can change no more than the sign of a
 * zero, which the last +0 settles; so the leaf is left out and only its place in the tree is kept.
 *
 * Mapping  one item = one (sample, key head): its dk, dv and its group's dq are summed by one thread, in runs
 *          of keys ascending, for each run over all chunks and leaves.
 * Work     T^2 (3 C + 2 V) FLOP a head and one exp a score, plus the masked half of the diagonal tiles.
 * Scratch  a run of keys, a tile of queries, and one (dk, dv) of the run for each level of the trees.
 * Source   Dao 2023 (FlashAttention-2), with the sums ordered as docs/determinism.md wants them.
 */
#include <omp.h>
#include <stdatomic.h>
#include <string.h>

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/rows.h"
#include "cpu/team.h"

Err CPU(attention_bwd)(Stream *s, const attention_bwd_args *args);

enum {
    KEY_RUN = 128, /* keys that share each copied tile of queries: more is faster until L2 is full */
    KEY_RUN_LEAST = 16,
    LEVELS = 80, /* both trees have no more */
};

/* A node of the tree under way. */
typedef struct {
    float *dk, *dv; /* [run][width], [run][v_width] */
    bool used;      /* false: +0 everywhere, contents undefined */
} Node;

/* A thread's scratch. */
typedef struct {
    AttnKeys keys;
    AttnTile tile;
    float *q, *q_across, *go, *go_across; /* the tile's rows, in lines and transposed */
    float *p, *ds;                        /* [run][ATTN_QUERIES] */
    float *ds_lines;                      /* ds for a product along keys, [units of run][ATTN_QUERIES] */
    float lse[ATTN_QUERIES], delta[ATTN_QUERIES];
    Node node[LEVELS];
    int top; /* nodes in use */
} Backward;

typedef struct {
    Attn a;
    const attention_bwd_args *args;
    int64_t run, leaves, chunks; /* chunks: of a group */
    bool apart;                  /* each chunk's dk and dv */
    int levels;
} BackwardCall;

/* Lays the scratch out from `base` on; returns its bytes. */
static int64_t backward_layout(Backward *f, const BackwardCall *call, float *base)
{
    const Attn *a = &call->a;
    int64_t used = 0, run = call->run, units = form_units(a->form, run);
#define TAKE(p, count) ((p) = (void *)(base + used), used += attn_lanes(count))
    TAKE(f->keys.k, run * a->k_row);
    TAKE(f->keys.v, run * a->v_row);
    TAKE(f->keys.position, run);
    TAKE(f->keys.seen, run);
    TAKE(f->q, ATTN_QUERIES * a->width);
    TAKE(f->go, ATTN_QUERIES * a->v_width);
    TAKE(f->q_across, ATTN_QUERIES * a->k_units);
    TAKE(f->go_across, ATTN_QUERIES * a->v_units);
    TAKE(f->p, run * ATTN_QUERIES);
    TAKE(f->ds, run * ATTN_QUERIES);
    f->keys.k_lines = f->keys.k, f->keys.v_lines = NULL;
    f->ds_lines = f->ds;
    if (a->paired) {
        TAKE(f->keys.k_lines, units * a->width);
        TAKE(f->ds_lines, units * ATTN_QUERIES);
    }
    for (int i = 0; i < call->levels; i++) {
        TAKE(f->node[i].dk, run * a->width);
        TAKE(f->node[i].dv, run * a->v_width);
    }
#undef TAKE
    return used * (int64_t)sizeof(float);
}

/* ---- one tile of queries against one run of keys ---- */

/* Numbers that make scores of products. */
typedef struct {
    bool capped;
    vf scale, inner, cap;
} Scoring;

VEC_FN Scoring scoring_of(const Attn *a)
{
    const bool capped = a->softcap > 0;
    return (Scoring){ capped, vf_set1(a->scale), vf_set1(capped ? a->scale / a->softcap : 0), vf_set1(a->softcap) };
}

/* The score of a product, and the score's slope. */
VEC_FN vf score_and_slope(const Scoring *c, vf product, vf *slope)
{
    *slope = c->scale;
    if (!c->capped) return vf_mul(product, c->scale);
    const vf t = vf_tanh(vf_mul(product, c->inner));
    *slope = vf_mul(c->scale, vf_fnma(t, t, vf_set1(1.0f)));
    return vf_mul(t, c->cap);
}

/* p and ds hold q k and do v; they become p keep and ds. */
static void gradient_column(const BackwardCall *call, Backward *f, const AttnKeys *keys, int64_t column)
{
    const Attn *a = &call->a;
    AttnColumn c;
    attn_column(&c, a, &f->tile, column);
    bool mask = attn_needs_mask(&f->tile, keys);
    const Scoring scoring = scoring_of(a);
    const vf lse = vf_load(f->lse + column), delta = vf_load(f->delta + column);
    float *ps = f->p + column, *dss = f->ds + column;
    for (int64_t j = 0; j < keys->n; j++, ps += ATTN_QUERIES, dss += ATTN_QUERIES) {
        vf slope, score = score_and_slope(&scoring, vf_load(ps), &slope);
        vf p = vf_exp(vf_sub(score, lse)), dp = vf_load(dss), kept = p;
        if (mask) kept = p = vf_select(attn_visible(&c, keys->seen[j]), p, vf_zero());
        if (c.threshold) {
            vf keep = attn_keep(&c, keys->position[j]);
            kept = vf_mul(p, keep);
            dp = vf_mul(dp, keep);
        }
        vf_store(ps, kept);
        vf_store(dss, vf_mul(vf_mul(p, vf_sub(dp, delta)), slope));
    }
    if (!a->paired) return;
    CPU(attn_keys_paired)(a, f->ds_lines + column, f->ds + column, keys->n);
    CPU(attn_queries_paired)(a, f->ds, column, keys->n);
    CPU(attn_queries_paired)(a, f->p, column, keys->n);
}

static void tile_load(const BackwardCall *call, Backward *f)
{
    const AttnTile *t = &f->tile;
    CPU(attn_rows)(&call->a, f->q, f->q_across, call->args->q, t, true);
    CPU(attn_rows)(&call->a, f->go, f->go_across, call->args->go, t, true);
    memset(f->lse, 0, sizeof f->lse);
    memset(f->delta, 0, sizeof f->delta);
    for (int64_t i = 0; i < t->n; i++) {
        const float *dq = attn_row(call->args->dq, t->b, t->row + i, t->head);
        for (int64_t c = 0; c < call->a.C; c += VEC) __builtin_prefetch(dq + c, 1, 2); /* for later */
        f->lse[i] = *attn_value(call->args->lse, t->b, t->row + i, t->head);
        f->delta[i] = *attn_value(call->args->delta, t->b, t->row + i, t->head);
    }
}

static void node_clear(const BackwardCall *call, const Backward *f, Node *node)
{
    memset(node->dk, 0, (size_t)(f->keys.n * call->a.width) * sizeof(float));
    memset(node->dv, 0, (size_t)(f->keys.n * call->a.v_width) * sizeof(float));
    node->used = true;
}

/* Adds the tile's part to dq and to the leaf's node. */
static void tile_gradients(const BackwardCall *call, Backward *f, Node *leaf)
{
    const Attn *a = &call->a;
    const AttnTile *t = &f->tile;
    AttnKeys keys = CPU(attn_seen)(a, t, &f->keys);
    if (keys.n == 0) return;
    int64_t n = t->n, lanes = attn_lanes(n), width = a->width, slot = keys.position - f->keys.position;
    if (!leaf->used) node_clear(call, f, leaf);
    tile_load(call, f);

    TileGemm across = { .m = keys.n, .n = lanes, .a_k = 1, .ldb = ATTN_QUERIES, .ldc = ATTN_QUERIES };
    across.form = a->form;
    across.k = a->k_units, across.a_row = a->k_row;
    across.a = keys.k, across.b = f->q_across, across.c = f->p;
    CPU(tile_gemm)(&across);
    across.k = a->v_units, across.a_row = a->v_row;
    across.a = keys.v, across.b = f->go_across, across.c = f->ds;
    CPU(tile_gemm)(&across);
    for (int64_t column = 0; column < lanes; column += VEC) gradient_column(call, f, &keys, column);

    TileGemm add = { .m = keys.n, .a_row = ATTN_QUERIES, .a_k = 1, .beta = true, .form = a->form };
    add.k = form_units(a->form, n);
    add.n = add.ldb = add.ldc = width;
    add.a = f->ds, add.b = f->q, add.c = leaf->dk + slot * width;
    CPU(tile_gemm)(&add);
    add.n = add.ldb = add.ldc = a->v_width;
    add.a = f->p, add.b = f->go, add.c = leaf->dv + slot * a->v_width;
    CPU(tile_gemm)(&add);

    Tensor dq = call->args->dq;
    TileGemm rows = { .m = n,
                      .n = a->C,
                      .k = form_units(a->form, keys.n),
                      .a = f->ds_lines,
                      .a_row = 1,
                      .a_k = ATTN_QUERIES,
                      .b = keys.k_lines,
                      .ldb = width,
                      .c = attn_row(dq, t->b, t->row, t->head),
                      .ldc = tensor_row_at(dq, dq.dim[2]),
                      .beta = true,
                      .form = a->form };
    CPU(tile_gemm)(&rows);
}

/* ---- leaves and their tree ---- */

/* Global leaf at place z of the zigzag order. */
static int64_t zigzag_leaf(int64_t z, int64_t n) { return z & 1 ? n - 1 - z / 2 : z / 2; }

/* Rows [*row, *row + count) of a span that lie in the leaf; returns the count. */
static int64_t leaf_rows(const BackwardCall *call, const AttnSpan *span, int64_t leaf, int64_t *row)
{
    int64_t from = leaf * call->args->leaf, to = from + call->args->leaf;
    if (from < span->first) from = span->first;
    if (to > span->first + span->count) to = span->first + span->count;
    *row = span->row + from - span->first;
    return to > from ? to - from : 0;
}

/* The leaf's chain over (head of the chunk from query head `head` on, query), as the node at f->top; false if this
 * rank holds none of its queries. */
static bool leaf_gradients(const BackwardCall *call, Backward *f, int64_t b, int64_t head, int64_t leaf)
{
    const Attn *a = &call->a;
    Node *node = &f->node[f->top];
    int64_t row[2], count[2];
    for (int s = 0; s < 2; s++) count[s] = leaf_rows(call, &a->q_span[s], leaf, &row[s]);
    if (!count[0] && !count[1]) return false;
    node->used = false;
    for (int64_t h = head; h < head + call->args->chunk; h++)
        for (int s = 0; s < 2; s++)
            for (int64_t i = 0, n; i < count[s]; i += n) {
                n = count[s] - i < ATTN_QUERIES ? count[s] - i : ATTN_QUERIES;
                /* pairs begin at even positions */
                if (a->paired && spans_position(a->q_spans, row[s] + i) % 2) n = 1;
                CPU(attn_tile)(a, &f->tile, b, h, row[s] + i, n);
                tile_gradients(call, f, node);
            }
    return true;
}

/* n: a multiple of VEC. */
static void add_vectors(float *to, const float *from, int64_t n)
{
    for (int64_t i = 0; i < n; i += VEC) vf_store(to + i, vf_add(vf_load(to + i), vf_load(from + i)));
}

/* The two topmost nodes become one. */
static void join_top(const BackwardCall *call, Backward *f)
{
    Node *right = &f->node[--f->top], *left = right - 1;
    if (!right->used) return;
    if (!left->used) {
        Node empty = *left;
        *left = *right;
        *right = empty;
        return;
    }
    add_vectors(left->dk, right->dk, f->keys.n * call->a.width);
    add_vectors(left->dv, right->dv, f->keys.n * call->a.v_width);
}

VEC_FN void store_row_of(Row out, const float *in, int64_t C)
{
    for (int64_t c = 0; c < C; c += VEC) row_put(out, c, vf_add(row_load(in + c, C - c), vf_zero()), C - c);
}

static void store_row(Row out, const float *in, int64_t C)
{
    if (out.narrow) store_row_of((Row){ out.data, true }, in, C);
    else store_row_of((Row){ out.data, false }, in, C);
}

/* A row of dk or dv; in NULL: 0. */
static void store_key(Tensor out, int64_t b, int64_t row, int64_t head, const float *in)
{
    const Row to = { attn_row(out, b, row, head), out.dtype == BF16 };
    if (in) store_row(to, in, out.dim[3]);
    else memset(to.data, 0, (size_t)(out.dim[3] * dtype_size(out.dtype)));
}

static void store_keys(const BackwardCall *call, const Backward *f, int64_t b, int64_t head, int64_t first)
{
    const Attn *a = &call->a;
    const float *dk = f->node[0].dk, *dv = f->node[0].dv;
    bool empty = f->top == 0 || !f->node[0].used;
    for (int64_t j = 0; j < f->keys.n; j++) {
        if (f->keys.seen[j] == EMPTY_SLOT) continue;
        int64_t row = CPU(attn_key_row)(a, first++);
        store_key(call->args->dk, b, row, head, empty ? NULL : dk + j * a->width);
        store_key(call->args->dv, b, row, head, empty ? NULL : dv + j * a->v_width);
    }
}

/* ---- one (sample, key head) ---- */

VEC_FN float row_dot_of(Row x, Row y, int64_t C)
{
    vf sum = vf_zero();
    for (int64_t c = 0; c < C; c += VEC) sum = vf_fma(row_get(x, c, C - c), row_get(y, c, C - c), sum);
    return vf_sum(sum);
}

/* Dot product of two rows of one dtype. */
static float row_dot(Row x, Row y, int64_t C)
{
    if (x.narrow) return row_dot_of((Row){ x.data, true }, (Row){ y.data, true }, C);
    return row_dot_of((Row){ x.data, false }, (Row){ y.data, false }, C);
}

/* delta, and dq = 0, for the queries of the group. */
static void begin_queries(const BackwardCall *call, int64_t b, int64_t head)
{
    const attention_bwd_args *x = call->args;
    for (int64_t row = 0; row < x->q.dim[1]; row++)
        for (int64_t h = head * call->a.group; h < (head + 1) * call->a.group; h++) {
            const Row go = { attn_row(x->go, b, row, h), x->go.dtype == BF16 },
                      o = { attn_row(x->o, b, row, h), x->o.dtype == BF16 };
            *attn_value(x->delta, b, row, h) = row_dot(go, o, call->a.V);
            memset(attn_row(x->dq, b, row, h), 0, (size_t)call->a.C * sizeof(float));
        }
}

/* The node at f->top is number `number` of its tree: takes its place, and pairs that it completes are joined. */
static void join_pairs(const BackwardCall *call, Backward *f, int64_t number)
{
    for (f->top++; number & 1; number >>= 1) join_top(call, f);
}

/* Like leaf_gradients, for the tree over all leaves. */
static bool chunk_gradients(const BackwardCall *call, Backward *f, int64_t b, int64_t head)
{
    const int bottom = f->top;
    for (int64_t z = 0, mine = 0; z < call->leaves; z++)
        if (leaf_gradients(call, f, b, head, zigzag_leaf(z, call->leaves))) join_pairs(call, f, mine++);
    while (f->top > bottom + 1) join_top(call, f);
    if (f->top == bottom) return false;
    f->top = bottom;
    return true;
}

/* dk and dv of the run of keys in f, which begins with key `first`. */
static void run_gradients(const BackwardCall *call, Backward *f, int64_t b, int64_t head, int64_t first)
{
    f->top = 0;
    for (int64_t n = 0; n < call->chunks; n++) {
        const bool any = chunk_gradients(call, f, b, head * call->a.group + n * call->args->chunk);
        if (any) join_pairs(call, f, call->apart ? 0 : n);
        if (!call->apart) continue;
        store_keys(call, f, n * call->args->q.dim[0] + b, head, first);
        f->top = 0;
    }
    if (call->apart) return;
    while (f->top > 1) join_top(call, f);
    store_keys(call, f, b, head, first);
}

static void backward_item(const BackwardCall *call, Backward *f, int64_t b, int64_t head)
{
    const Attn *a = &call->a;
    int64_t keys = a->k.dim[1];
    if (!call->args->resumed) begin_queries(call, b, head);
    for (int64_t i = 0, next; i < keys; i = next) {
        next = CPU(attn_keys)(a, &f->keys, b, head, i, keys, call->run);
        run_gradients(call, f, b, head, i);
    }
    for (int64_t row = 0; row < a->q.dim[1]; row++)
        for (int64_t h = head * a->group; h < (head + 1) * a->group; h++) {
            float *dq = attn_row(call->args->dq, b, row, h);
            store_row((Row){ dq, false }, dq, a->C);
        }
}

static Err backward_open(BackwardCall *call, const Device *dev, int *threads)
{
    const attention_bwd_args *x = call->args;
    if (x->dq.dtype != F32) return err_set(ERR_SHAPE, "attention_bwd: dq is a sum in f32 here");
    TRY(CPU(attn_open)(&call->a, dev, x->dk));
    if (x->leaf < 1 || x->positions < 1)
        return err_set(ERR_SHAPE, "attention_bwd: leaf is %lld, positions %lld", (long long)x->leaf,
                       (long long)x->positions);
    if (x->chunk < 1 || call->a.group % x->chunk)
        return err_set(ERR_SHAPE, "attention_bwd: chunks of %lld query heads, %lld for a key head", (long long)x->chunk,
                       (long long)call->a.group);
    for (int s = 0; s < 2; s++)
        if (call->a.q_span[s].count && call->a.q_span[s].first + call->a.q_span[s].count > x->positions)
            return err_set(ERR_SHAPE, "attention_bwd: queries beyond position %lld", (long long)x->positions);
    call->leaves = (x->positions + x->leaf - 1) / x->leaf;
    call->chunks = call->a.group / x->chunk;
    call->apart = x->dk.dim[0] != x->q.dim[0];
    if (call->apart && x->dk.dim[0] != x->q.dim[0] * call->chunks)
        return err_set(ERR_SHAPE, "attention_bwd: dk is of %lld samples, not of %lld or %lld chunks of them",
                       (long long)x->dk.dim[0], (long long)x->q.dim[0], (long long)call->chunks);
    for (int64_t n = 1; n <= call->leaves; n *= 2) call->levels++;
    for (int64_t n = 1; n < call->chunks; n *= 2) call->levels++;
    int64_t items = x->q.dim[0] * x->k.dim[2];
    int64_t want = items < dev->threads ? items : dev->threads;
    Backward unused;
    for (call->run = KEY_RUN; call->run > KEY_RUN_LEAST; call->run /= 2)
        if (backward_layout(&unused, call, (float *)dev->workspace) * want <= dev->workspace_bytes) break;
    return CPU(attn_threads)(dev, items, backward_layout(&unused, call, (float *)dev->workspace), threads);
}

Err CPU(attention_bwd)(Stream *s, const attention_bwd_args *args)
{
    BackwardCall call = { .a = ATTN_OF(args), .args = args };
    int threads;
    atomic_llong next = 0;
    TRY(backward_open(&call, s->dev, &threads));
    int64_t K = args->k.dim[2], items = args->q.dim[0] * K;
#pragma omp parallel num_threads(team_of(s->dev, threads))
    if (omp_get_thread_num() < threads) {
        Backward f;
        int64_t bytes = backward_layout(&f, &call, (float *)s->dev->workspace);
        backward_layout(&f, &call, (float *)(s->dev->workspace + omp_get_thread_num() * bytes));
        for (int64_t i; (i = atomic_fetch_add(&next, 1)) < items;) backward_item(&call, &f, i / K, i % K);
    }
    return ERR_OK;
}

/* ---- the sinks ---- */

static void sink_rows(const void *args, int64_t first, int64_t end)
{
    const sink_bwd_args *a = args;
    const int64_t H = a->lse.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *lse = row_f32(a->lse, n), *delta = row_f32(a->delta, n), *sink = a->sink.data;
        float *dsink = row_f32(a->dsink, n);
        for (int64_t h = 0; h < H; h += VEC) {
            const int64_t left = H - h;
            const vf p = vf_exp(vf_sub(row_load(sink + h, left), row_load(lse + h, left)));
            row_store(dsink + h, vf_neg(vf_mul(p, row_load(delta + h, left))), left);
        }
    }
}

Err CPU(sink_bwd)(Stream *s, const sink_bwd_args *a)
{
    par_rows(s, rows_both(a->dsink, a->lse), a->lse.dim[1], sink_rows, a);
    return ERR_OK;
}
