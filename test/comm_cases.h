/*
 * Cases of every kind of call, run by each rank of a group over whatever table it has (test_comm.c: threads;
 * test_comm_gloo.c: processes), against sums computed here from the known inputs, by the definition of the
 * tree: left the largest power of two of ranks, right the rest.
 */
#ifndef MEGATRAIN_TEST_COMM_CASES_H
#define MEGATRAIN_TEST_COMM_CASES_H

#include "comm/grid.h"
#include "test.h"

static const int64_t case_counts[] = { 0, 1, 2, 3, 5, 7, 64, 1000, 2047, 33333 };
enum { CASE_COUNTS = sizeof case_counts / sizeof *case_counts };

/* What rank `rank` puts in at i: magnitudes differ, so that another order of additions gives other bits. */
static inline float case_float(int salt, int rank, int64_t i)
{
    uint64_t s = (uint64_t)salt << 40 ^ (uint64_t)rank << 32 ^ (uint64_t)i, x = test_rand(&s);
    return ldexpf((float)(int32_t)(x >> 32), (int)(x % 40) - 50);
}

static inline int64_t case_integer(int salt, int rank, int64_t i)
{
    uint64_t s = (uint64_t)salt << 40 ^ (uint64_t)rank << 32 ^ (uint64_t)i ^ 0x1234567;
    return (int64_t)test_rand(&s); /* sums wrap around */
}

static inline float case_tree(int salt, int first, int ranks, int64_t i)
{
    if (ranks == 1) return case_float(salt, first, i);
    int left = 1;
    while (2 * left < ranks) left *= 2;
    return case_tree(salt, first, left, i) + case_tree(salt, first + left, ranks - left, i);
}

static inline int64_t case_sum(int salt, int ranks, int64_t i)
{
    uint64_t sum = 0;
    for (int r = 0; r < ranks; r++) sum += (uint64_t)case_integer(salt, r, i);
    return (int64_t)sum;
}

static inline int64_t case_max(int salt, int ranks, int64_t i)
{
    int64_t max = case_integer(salt, 0, i);
    for (int r = 1; r < ranks; r++)
        if (case_integer(salt, r, i) > max) max = case_integer(salt, r, i);
    return max;
}

typedef struct {
    Comm *comm;
    Stream *stream;
    uint64_t digest; /* of all results */
} CaseRun;

static inline void case_digest(CaseRun *run, const void *data, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++) run->digest = (run->digest ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
}

static inline Tensor case_tensor(void *data, int64_t count)
{
    return (Tensor){ .data = data, .dtype = F32, .ndim = 1, .dim = { count }, .ld = count };
}

/* got[count] must be want(i0 + i), to the bit; the first difference is told. */
#define CASE_SAME(got, count, want, what)                                                           \
    do {                                                                                            \
        int64_t case_bad = 0, case_first = -1;                                                      \
        for (int64_t i = 0; i < (count); i++) {                                                     \
            __typeof__((got)[0]) case_want = (want);                                                \
            if (memcmp(&(got)[i], &case_want, sizeof case_want) && !case_bad++) case_first = i;     \
        }                                                                                           \
        CHECK_MSG(!case_bad, "%s: rank %d of %d, count %lld: %lld wrong, first at %lld", what,      \
                  run->comm->rank, run->comm->size, (long long)(count), (long long)case_bad,        \
                  (long long)case_first);                                                           \
    } while (0)

static inline Err case_all_gather(CaseRun *run, int64_t n, bool in_place)
{
    int size = run->comm->size, rank = run->comm->rank;
    float *dst = calloc((size_t)(n * size + 1), sizeof *dst), *src = dst + rank * n;
    if (!in_place) src = calloc((size_t)n + 1, sizeof *src);
    for (int64_t i = 0; i < n; i++) src[i] = case_float(1, rank, i);
    Err err = comm_all_gather(run->comm, run->stream, case_tensor(dst, n * size), case_tensor(src, n), NULL);
    if (!err) CASE_SAME(dst, n * size, case_float(1, (int)(i / n), i % n), "all-gather");
    case_digest(run, dst, n * size * (int64_t)sizeof *dst);
    if (!in_place) free(src);
    free(dst);
    return err;
}

static inline Err case_reduce_tree(CaseRun *run, int64_t n)
{
    float *buf = calloc((size_t)n + 1, sizeof *buf);
    for (int64_t i = 0; i < n; i++) buf[i] = case_float(2, run->comm->rank, i);
    Err err = comm_reduce_tree_f32(run->comm, run->stream, case_tensor(buf, n), NULL);
    if (!err) CASE_SAME(buf, n, case_tree(2, 0, run->comm->size, i), "reduce-tree");
    case_digest(run, buf, n * (int64_t)sizeof *buf);
    free(buf);
    return err;
}

static inline Err case_scatter_tree(CaseRun *run, int64_t n, bool in_place)
{
    int size = run->comm->size, rank = run->comm->rank;
    float *src = calloc((size_t)(n * size) + 1, sizeof *src), *dst = src + rank * n;
    if (!in_place) dst = calloc((size_t)n + 1, sizeof *dst);
    for (int64_t i = 0; i < n * size; i++) src[i] = case_float(3, rank, i);
    Err err = comm_reduce_scatter_tree_f32(run->comm, run->stream, case_tensor(dst, n), case_tensor(src, n * size),
                                           NULL);
    if (!err) CASE_SAME(dst, n, case_tree(3, 0, size, rank * n + i), "reduce-scatter-tree");
    case_digest(run, dst, n * (int64_t)sizeof *dst);
    for (int64_t i = 0; i < n; i++) dst[i] = case_float(3, rank, rank * n + i);
    CASE_SAME(src, n * size, case_float(3, rank, i), "reduce-scatter-tree's source");
    if (!in_place) free(dst);
    free(src);
    return err;
}

static inline Err case_scatter_i64(CaseRun *run, int64_t n, bool in_place)
{
    int size = run->comm->size, rank = run->comm->rank;
    int64_t *src = calloc((size_t)(n * size) + 1, sizeof *src), *dst = src + rank * n;
    if (!in_place) dst = calloc((size_t)n + 1, sizeof *dst);
    for (int64_t i = 0; i < n * size; i++) src[i] = case_integer(4, rank, i);
    Err err = comm_reduce_scatter_i64(run->comm, run->stream, dst, src, n, NULL);
    if (!err) CASE_SAME(dst, n, case_sum(4, size, rank * n + i), "reduce-scatter-i64");
    case_digest(run, dst, n * (int64_t)sizeof *dst);
    for (int64_t i = 0; i < n; i++) dst[i] = case_integer(4, rank, rank * n + i);
    CASE_SAME(src, n * size, case_integer(4, rank, i), "reduce-scatter-i64's source");
    if (!in_place) free(dst);
    free(src);
    return err;
}

static inline Err case_integers(CaseRun *run, int64_t n, bool max)
{
    int size = run->comm->size;
    int64_t *buf = calloc((size_t)n + 1, sizeof *buf);
    for (int64_t i = 0; i < n; i++) buf[i] = case_integer(5 + max, run->comm->rank, i);
    Err err = max ? comm_max_i64(run->comm, run->stream, buf, n, NULL)
                  : comm_sum_i64(run->comm, run->stream, buf, n, NULL);
    if (!err && max) CASE_SAME(buf, n, case_max(6, size, i), "max-i64");
    if (!err && !max) CASE_SAME(buf, n, case_sum(5, size, i), "sum-i64");
    case_digest(run, buf, n * (int64_t)sizeof *buf);
    free(buf);
    return err;
}

/* Every kind with n elements, in place and not. */
static inline Err case_all_kinds(CaseRun *run, int64_t n)
{
    TRY(case_all_gather(run, n, false));
    TRY(case_all_gather(run, n, true));
    TRY(case_reduce_tree(run, n));
    TRY(case_scatter_tree(run, n, false));
    TRY(case_scatter_tree(run, n, true));
    TRY(case_scatter_i64(run, n, false));
    TRY(case_scatter_i64(run, n, true));
    TRY(case_integers(run, n, false));
    TRY(case_integers(run, n, true));
    return comm_barrier(run->comm, run->stream);
}

/* ---- communicators of a grid ---- */

/* Coordinates of a rank by counting, in the order of the axes. */
static inline GridCoords case_coords(Grid g, int rank)
{
    GridCoords at = { 0 };
    for (int i = 0; i < rank; i++) {
        if (++at.tp < g.tp) continue;
        at.tp = 0;
        int *next = g.order == ORDER_DP_PP ? &at.dp : &at.pp, *last = g.order == ORDER_DP_PP ? &at.pp : &at.dp;
        if (++*next < (g.order == ORDER_DP_PP ? g.dp : g.pp)) continue;
        *next = 0;
        ++*last;
    }
    return at;
}

/* Are a and b members of one group, by what groups.h says of the kind? Every rank is together with itself. */
static inline bool case_together(Grid g, GroupKind kind, int rank_a, int rank_b)
{
    const GridCoords a = case_coords(g, rank_a), b = case_coords(g, rank_b);
    const bool tp = a.tp == b.tp, dp = a.dp == b.dp, pp = a.pp == b.pp;
    if (rank_a == rank_b) return true;
    switch (kind) {
    case GROUP_TP: return dp && pp;
    case GROUP_SP: return dp && pp && g.sp;
    case GROUP_KV: return dp && pp && a.tp / g.kv == b.tp / g.kv;
    case GROUP_DP: return tp && pp;
    case GROUP_PP: return tp && dp;
    case GROUP_EMBD: return tp && dp && (a.pp == 0 || a.pp == g.pp - 1) && (b.pp == 0 || b.pp == g.pp - 1);
    case GROUP_STAGE_LOW:
    case GROUP_STAGE_HIGH: return g.bidirectional && tp && (pp || a.pp + b.pp == g.pp - 1);
    default: return true; /* world, host */
    }
}

/* On every communicator of a rank: who is in it, and a sum of theirs. */
static inline Err case_world(World *w, Stream *s)
{
    for (int kind = 0; kind < WORLD_COMMS; kind++) {
        Comm *c = &w->comm[kind];
        int64_t members[64], sum = w->rank + 1, want = 0;
        int n = 0;
        for (int i = 0; i < 64; i++) members[i] = -1;
        members[c->rank] = w->rank;
        TRY(comm_all_gather(c, s, tensor_of(members, I64, (int64_t)c->size), tensor_of(&members[c->rank], I64, (int64_t)1),
                            NULL));
        TRY(comm_sum_i64(c, s, &sum, 1, NULL));
        for (int r = 0; r < w->size; r++) {
            if (!case_together(w->grid, kind, w->rank, r)) continue;
            CHECK_MSG(members[n++] == r, "%s of rank %d: member %d is %lld, not %d", group_name(kind), w->rank, n - 1,
                      (long long)members[n - 1], r);
            want += r + 1;
        }
        CHECK_MSG(c->size == n && sum == want && !strcmp(c->name, group_name(kind)), "%s of rank %d: %d members, not %d",
                  group_name(kind), w->rank, c->size, n);
        CHECK(world_first_member(w, kind) == members[0]);
    }
    CHECK(&w->tp == &w->comm[GROUP_TP] && &w->stage_high == &w->comm[GROUP_STAGE_HIGH] &&
          &w->host == &w->comm[GROUP_HOST]);
    const GridCoords at = case_coords(w->grid, w->rank);
    CHECK(w->tp_rank == at.tp && w->dp_rank == at.dp && w->pp_rank == at.pp && w->pp.rank == at.pp);
    return ERR_OK;
}

static const Grid case_grids[] = {
    { .tp = 2, .dp = 1, .sp = true },
    { .tp = 4, .dp = 2, .kv = 2 },
    { .tp = 1, .dp = 1, .pp = 2 },
    { .tp = 2, .dp = 2, .pp = 2, .sp = true },
    { .tp = 2, .dp = 2, .pp = 2, .order = ORDER_PP_DP, .kv = 2 },
    { .tp = 1, .dp = 2, .pp = 4 },
    { .tp = 1, .dp = 2, .pp = 4, .order = ORDER_PP_DP },
    { .tp = 1, .dp = 2, .pp = 4, .bidirectional = true },
    { .tp = 1, .dp = 2, .pp = 4, .order = ORDER_PP_DP, .bidirectional = true },
    { .tp = 2, .dp = 1, .pp = 4, .bidirectional = true },
    { .tp = 1, .dp = 1, .pp = 3 },
};
enum { CASE_GRIDS = sizeof case_grids / sizeof *case_grids };

#endif
