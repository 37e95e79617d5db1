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
    char *memory;    /* the device's, for messages: CASE_MEMORY_BYTES; NULL: in that of the host */
    bool together;   /* all members cut the list of messages at the same places (case_exchanges) */
    int64_t memory_bytes;
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

/* ---- rows from all to all ---- */

enum { CASE_CHUNKS = 3, CASE_RUNS = 2 };

typedef struct {
    int64_t n, width; /* most rows of a run; numbers of a row */
    int copies;       /* members that have the same chunks */
} CaseRowsShape;

/* Rows of one run of a piece: about one in three has none. */
static inline int64_t case_rows_of(int from, int to, int64_t chunk, int64_t run, int64_t n)
{
    uint64_t s = (uint64_t)(((from * 64 + to) * 64 + chunk) * 64 + run);
    const uint64_t x = test_rand(&s);
    return x % 3 ? (int64_t)(x % (uint64_t)(n + 1)) : 0;
}

typedef struct {
    float *data;     /* [rows][width] */
    int64_t *offset; /* of runs */
    int64_t rows, runs;
} CaseRows;

/* The rows of this member for all (by member, chunk), or of all for this one (by chunk, member). */
static inline CaseRows case_rows_make(const CaseRun *run, bool local, const CaseRowsShape *shape, bool fill)
{
    const int64_t n = shape->n, width = shape->width;
    const int size = run->comm->size, rank = run->comm->rank, outer = local ? size / shape->copies : CASE_CHUNKS;
    const int inner = local ? CASE_CHUNKS : size;
    CaseRows r = { .runs = outer * inner * CASE_RUNS };
    r.offset = calloc((size_t)r.runs + 1, sizeof *r.offset);
    r.data = calloc((size_t)((local ? shape->copies : 1) * r.runs * (n + 1) * width), sizeof *r.data);
    for (int i = 0, k = 0; i < outer * inner; i++)
        for (int64_t u = 0; u < CASE_RUNS; u++, k++) {
            const int other = local ? i / inner : i % inner, chunk = local ? i % inner : i / inner;
            const int from = local ? rank : other, to = local ? other : rank / shape->copies;
            const int64_t rows = case_rows_of(from, to, chunk, u, n), salt = ((from * 64 + to) * 64 + chunk) * 64 + u;
            for (int64_t e = 0; fill && e < rows * width; e++)
                r.data[r.rows * width + e] = case_float((int)salt, 0, e);
            r.rows += rows;
            r.offset[k + 1] = r.rows;
        }
    return r;
}

static inline void case_rows_free(CaseRows r)
{
    free(r.data);
    free(r.offset);
}

/* What the host has, where the call sees it: there, or copied to the next place in the device's memory. */
static inline void *case_place(CaseRun *run, int64_t *next, const void *host, int64_t bytes)
{
    if (!run->memory) return (void *)host;
    char *at = run->memory + *next;
    OK(device_write(run->stream, at, host, bytes));
    *next += (bytes + 255) / 256 * 256;
    return at;
}

static inline void case_fetch(CaseRun *run, void *host, const void *place, int64_t bytes)
{
    if (run->memory) OK(device_read(run->stream, host, place, bytes));
}

/*
 * Rows of `width` numbers, local to remote, and back. What each must hold follows from the counts alone; behind its
 * rows a tensor is as it was.
 */
static inline Err case_rows(CaseRun *run, const CaseRowsShape *shape)
{
    CaseRows local = case_rows_make(run, true, shape, true), remote = case_rows_make(run, false, shape, false);
    const CaseRows want = case_rows_make(run, false, shape, true), sent = case_rows_make(run, true, shape, true);
    const int64_t n = shape->n, row_bytes = shape->width * (int64_t)sizeof(float), count = local.runs * (n + 1);
    const int64_t array = count * row_bytes, there = remote.runs * (n + 1) * row_bytes, bytes = shape->copies * array;
    Event known;
    int64_t next = 0;
    CommRows rows = { .chunks = CASE_CHUNKS, .stride = CASE_RUNS, .copies = shape->copies };
    rows.remote_rows = remote.runs * (n + 1);
    rows.known = &known;
    rows.local = case_place(run, &next, local.data, bytes);
    rows.remote = case_place(run, &next, remote.data, there);
    rows.local_offset = case_place(run, &next, local.offset, (local.runs + 1) * 8);
    rows.remote_offset = case_place(run, &next, remote.offset, (remote.runs + 1) * 8);
    event_init(&known);
    OK(device_mark(run->stream, &known));
    Err err = comm_all_to_all_rows(run->comm, run->stream, &rows, count, row_bytes, NULL);
    case_fetch(run, remote.data, rows.remote, there);
    if (!err) CASE_SAME(remote.data, there / 4, want.data[i], "all-to-all");
    memset(local.data, 0, (size_t)bytes);
    if (run->memory) OK(device_write(run->stream, rows.local, local.data, bytes));
    rows.back = true;
    rows.known = NULL;
    if (!err) err = comm_all_to_all_rows(run->comm, run->stream, &rows, count, row_bytes, NULL);
    case_fetch(run, local.data, rows.local, bytes);
    if (!err) CASE_SAME(local.data, bytes / 4, sent.data[i % (array / 4)], "all-to-all and back");
    event_release(&known);
    case_digest(run, local.data, bytes);
    case_rows_free(local), case_rows_free(remote), case_rows_free(want), case_rows_free(sent);
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
    for (int copies = 1; copies <= 2; copies++)
        if (run->comm->size % copies == 0)
            TRY(case_rows(run, &(CaseRowsShape){ .n = n / 20, .width = 5, .copies = copies }));
    return comm_barrier(run->comm, run->stream);
}

/* ---- exchanges ---- */

/*
 * Random messages, in one order that all members know. Each cuts its own part of that list into exchanges where it
 * likes, and leaves up to FLIGHTS of them open. That cannot lock up: both ends of the first message that is not
 * through are in the exchange that their members run. Every 40th entry is a sum over all members.
 */
enum { CASE_FLIGHTS = 3, CASE_GUARD = 8, CASE_SUM_EVERY = 40, CASE_MESSAGE_MAX = 300001 };
enum { CASE_PLACE_BYTES = CASE_MESSAGE_MAX + CASE_GUARD + 7, /* a multiple of 16 */
       CASE_MEMORY_BYTES = CASE_FLIGHTS * COMM_MESSAGES_MAX * CASE_PLACE_BYTES };

typedef struct {
    int from, to; /* from -1: the sum */
    uint32_t number; /* of the messages of this pair and direction */
    int64_t bytes;
} CaseMessage;

typedef struct {
    Event done;
    int index, count; /* count 0: not in use */
    CommMessage messages[COMM_MESSAGES_MAX];
    CaseMessage what[COMM_MESSAGES_MAX];
    uint8_t *host[COMM_MESSAGES_MAX]; /* the contents, and guards */
} CaseFlight;

static inline uint8_t case_byte(CaseMessage m, int64_t i)
{
    uint64_t s =
        ((uint64_t)m.from << 48 ^ (uint64_t)m.to << 40 ^ (uint64_t)m.number << 8) + (uint64_t)i / 8 * 0x9e3779b1u;
    return (uint8_t)(test_rand(&s) >> 8 * (i % 8));
}

static inline CaseMessage *case_messages(uint64_t seed, int members, int total)
{
    static const int64_t sizes[] = { 0, 1, 3, 64, 1000, 4096, 70000, CASE_MESSAGE_MAX };
    uint32_t numbers[16][16] = { { 0 } };
    CaseMessage *list = calloc((size_t)total, sizeof *list);
    for (int i = 0; i < total; i++) {
        CaseMessage *m = &list[i];
        m->from = (int)(test_rand(&seed) % (uint64_t)members);
        m->to = (m->from + 1 + (int)(test_rand(&seed) % (uint64_t)(members - 1))) % members;
        m->bytes = sizes[test_rand(&seed) % (sizeof sizes / sizeof *sizes)];
        if (i % CASE_SUM_EVERY == CASE_SUM_EVERY - 1) m->from = -1;
        else m->number = numbers[m->from][m->to]++;
    }
    return list;
}

static inline Err case_add_message(CaseRun *run, CaseFlight *f, CaseMessage m)
{
    const int64_t bytes = m.bytes + CASE_GUARD;
    const bool send = m.from == run->comm->rank;
    char *place = run->memory + (f->index * COMM_MESSAGES_MAX + f->count) * (int64_t)CASE_PLACE_BYTES;
    uint8_t *data = malloc((size_t)bytes);
    memset(data, 0xA5, (size_t)bytes);
    for (int64_t i = 0; send && i < m.bytes; i++) data[i] = case_byte(m, i);
    f->what[f->count] = m;
    f->host[f->count] = data;
    f->messages[f->count++] = (CommMessage){ .send = send,
                                             .peer = send ? m.to : m.from,
                                             .data = run->memory ? (void *)place : data,
                                             .bytes = m.bytes,
                                             .what = { MESSAGE_ACTIVATION, (uint16_t)m.to, m.number } };
    return run->memory ? device_write(run->stream, place, data, bytes) : ERR_OK;
}

static inline Err case_finish_flight(CaseRun *run, CaseFlight *f, double timeout_s)
{
    if (!f->count) return ERR_OK;
    Err err = event_wait(&f->done, timeout_s);
    for (int k = 0; k < f->count; k++) {
        const CaseMessage m = f->what[k];
        uint8_t *data = f->host[k];
        int64_t wrong = 0;
        if (run->memory && !err) err = device_read(run->stream, data, f->messages[k].data, m.bytes + CASE_GUARD);
        for (int64_t i = 0; !err && i < m.bytes; i++) wrong += data[i] != case_byte(m, i);
        for (int64_t i = m.bytes; i < m.bytes + CASE_GUARD; i++) wrong += data[i] != 0xA5;
        CHECK_MSG(!wrong, "rank %d: message %u from %d to %d: %lld of %lld bytes wrong", run->comm->rank, m.number,
                  m.from, m.to, (long long)wrong, (long long)m.bytes);
        free(data);
    }
    f->count = 0;
    return err;
}

static inline Err case_start_flight(CaseRun *run, CaseFlight *f)
{
    CommMessage copy[COMM_MESSAGES_MAX];
    if (!f->count) return ERR_OK;
    memcpy(copy, f->messages, sizeof copy);
    Err err = comm_exchange(run->comm, run->stream, copy, f->count, &f->done);
    memset(copy, 0xFF, sizeof copy); /* the list is the caller's again */
    return err;
}

static inline Err case_exchanges(CaseRun *run, uint64_t seed, int total)
{
    const int members = run->comm->size, rank = run->comm->rank;
    CaseMessage *list = case_messages(seed, members, total);
    CaseFlight flights[CASE_FLIGHTS] = { 0 };
    uint64_t own = seed + 77 * (uint64_t)rank;
    int64_t sent = run->comm->bytes[COMM_EXCHANGE], want = 0, next = 0;
    Err err = ERR_OK;
    for (int i = 0; i < CASE_FLIGHTS; i++) {
        flights[i].index = i;
        event_init(&flights[i].done);
    }
    for (int i = 0; i < total && !err; i++) {
        CaseFlight *f = &flights[next % CASE_FLIGHTS];
        const bool mine = list[i].from == rank || (list[i].from >= 0 && list[i].to == rank);
        if (mine) err = case_add_message(run, f, list[i]);
        if (list[i].from == rank) want += list[i].bytes;
        const bool here =
            run->together ? i % 8 == 7 : f->count == COMM_MESSAGES_MAX || (mine && test_rand(&own) % 4 == 0);
        const bool cut = i == total - 1 || list[i].from < 0 || here;
        if (cut && f->count && !err) {
            err = case_start_flight(run, f);
            if (!err) err = case_finish_flight(run, &flights[++next % CASE_FLIGHTS], 30);
        }
        if (!err && list[i].from < 0)
            err = run->memory ? comm_barrier(run->comm, run->stream) : case_integers(run, 5, false);
    }
    for (int i = 0; i < CASE_FLIGHTS; i++) {
        Err ended = case_finish_flight(run, &flights[i], 30);
        if (!err) err = ended;
        event_release(&flights[i].done);
    }
    if (!err) CHECK(run->comm->bytes[COMM_EXCHANGE] - sent == want);
    free(list);
    return err;
}

/* ---- communicators of a grid ---- */

/* Coordinates of a rank by counting, in the order of the axes. */
static inline GridCoords case_coords(Grid g, int rank)
{
    GridCoords at = { 0 };
    for (int i = 0; i < rank; i++) {
        if (++at.tp < g.tp) continue;
        at.tp = 0;
        if (++at.cp < g.cp) continue;
        at.cp = 0;
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
    const bool tp = a.tp == b.tp, cp = a.cp == b.cp, dp = a.dp == b.dp, pp = a.pp == b.pp, many = g.cp > 1;
    const int ep = (g.ep ? g.ep : 1) * (g.etp ? g.etp : 1), n = many ? g.cp : 1; /* in_a, in_b: in the stage's plane */
    const int in_a = a.tp + g.tp * (a.cp + n * a.dp), in_b = b.tp + g.tp * (b.cp + n * b.dp);
    const bool same_ep = in_a % ep == in_b % ep, same_edp = in_a / ep == in_b / ep, mirrored = a.pp + b.pp == g.pp - 1;
    const int near = g.zero_group ? g.zero_group / n : 1, zero = g.zero_group * g.tp;
    const int block = zero > ep ? zero : ep; /* ranks of one group of ZeRO, with whole experts */
    if (rank_a == rank_b) return true;
    switch (kind) {
    case GROUP_TP: return cp && dp && pp;
    case GROUP_SP: return cp && dp && pp && g.sp;
    case GROUP_KV: return cp && dp && pp && a.tp / g.kv == b.tp / g.kv;
    case GROUP_DP: return !many && tp && pp;
    case GROUP_CP: return tp && dp && pp;
    case GROUP_CP_HEADS: return g.cp_heads > 1 && tp && dp && pp && a.cp / g.cp_heads == b.cp / g.cp_heads;
    case GROUP_CP_RING: return g.cp_heads > 1 && tp && dp && pp && a.cp % g.cp_heads == b.cp % g.cp_heads;
    case GROUP_DP_CP: return many && tp && pp;
    case GROUP_ZERO: return g.zero_group && tp && pp && a.dp / near == b.dp / near;
    case GROUP_ZERO_FAR: return g.zero_group && !g.bidirectional && tp && cp && pp && a.dp % near == b.dp % near;
    case GROUP_EXPERT_ZERO: return g.ep && g.zero_group && pp && same_ep && in_a / block == in_b / block;
    case GROUP_EXPERT_ZERO_FAR:
        return g.ep && g.zero_group && !g.bidirectional && pp && same_ep && in_a % block == in_b % block;
    case GROUP_OWNERS: return g.owners && (pp || (g.bidirectional && mirrored));
    case GROUP_PP: return tp && cp && dp;
    case GROUP_EMBD: return tp && cp && dp && (a.pp == 0 || a.pp == g.pp - 1) && (b.pp == 0 || b.pp == g.pp - 1);
    case GROUP_STAGE_LOW:
    case GROUP_STAGE_HIGH:
        return g.bidirectional && tp && (pp || mirrored) && (!g.zero_group || (cp && a.dp % near == b.dp % near));
    case GROUP_TP_EP: return g.ep && pp && same_edp;
    case GROUP_EP_HOST: return g.ep_hosts > 1 && pp && in_a / (ep / g.ep_hosts) == in_b / (ep / g.ep_hosts);
    case GROUP_EP_RAIL: return g.ep_hosts > 1 && pp && same_edp && in_a % (ep / g.ep_hosts) == in_b % (ep / g.ep_hosts);
    case GROUP_EXPERT_DP: return g.ep && pp && same_ep;
    case GROUP_EXPERT_LOW:
    case GROUP_EXPERT_HIGH:
        return g.ep && g.bidirectional && same_ep && (pp || mirrored) &&
               (!g.zero_group || in_a % block == in_b % block);
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
        TRY(comm_all_gather(c, s, tensor_of(members, I64, (int64_t)c->size),
                            tensor_of(&members[c->rank], I64, (int64_t)1), NULL));
        TRY(comm_sum_i64(c, s, &sum, 1, NULL));
        for (int r = 0; r < w->size; r++) {
            if (!case_together(w->grid, kind, w->rank, r)) continue;
            CHECK_MSG(members[n++] == r, "%s of rank %d: member %d is %lld, not %d", group_name(kind), w->rank, n - 1,
                      (long long)members[n - 1], r);
            want += r + 1;
        }
        CHECK_MSG(c->size == n && sum == want && !strcmp(c->name, group_name(kind)),
                  "%s of rank %d: %d members, not %d", group_name(kind), w->rank, c->size, n);
        CHECK(world_first_member(w, kind) == members[0]);
    }
    CHECK(&w->tp == &w->comm[GROUP_TP] && &w->stage_high == &w->comm[GROUP_STAGE_HIGH] &&
          &w->host == &w->comm[GROUP_HOST]);
    const GridCoords at = case_coords(w->grid, w->rank);
    CHECK(w->tp_rank == at.tp && w->cp_rank == at.cp && w->dp_rank == at.dp && w->pp_rank == at.pp &&
          w->pp.rank == at.pp);
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
    { .tp = 1, .dp = 4, .ep = 2 },
    { .tp = 2, .dp = 2, .pp = 2, .sp = true, .ep = 4 },
    { .tp = 2, .dp = 2, .pp = 2, .sp = true, .ep = 2, .order = ORDER_PP_DP },
    { .tp = 2, .dp = 2, .pp = 2, .sp = true, .ep = 2, .bidirectional = true },
    { .tp = 1, .cp = 2, .dp = 2 },
    { .tp = 2, .cp = 2, .dp = 1, .pp = 2, .order = ORDER_PP_DP },
    { .tp = 1, .cp = 2, .dp = 2, .pp = 2, .bidirectional = true },
    { .tp = 1, .cp = 2, .dp = 2, .pp = 2, .bidirectional = true, .order = ORDER_PP_DP },
    { .tp = 1, .cp = 2, .dp = 2, .pp = 2, .ep = 4 },
    { .tp = 1, .dp = 4, .ep = 4, .ep_hosts = 2 },
    { .tp = 2, .dp = 4, .sp = true, .ep = 4, .etp = 2, .ep_hosts = 2 },
    { .tp = 2, .dp = 2, .pp = 2, .sp = true, .ep = 2, .ep_hosts = 2, .order = ORDER_PP_DP },
    { .tp = 2, .cp = 4, .dp = 1, .cp_heads = 2 },
    { .tp = 1, .cp = 2, .dp = 4, .ep = 2, .zero_group = 4 },
    { .tp = 2, .dp = 4, .sp = true, .ep = 8, .zero_group = 2 },
    { .tp = 1, .dp = 4, .pp = 2, .ep = 1, .zero_group = 2, .order = ORDER_PP_DP },
    { .tp = 1, .dp = 2, .pp = 4, .zero_group = 2, .bidirectional = true },
    { .tp = 1, .cp = 2, .dp = 2, .pp = 2, .ep = 2, .zero_group = 2, .bidirectional = true, .order = ORDER_PP_DP },
    { .tp = 1, .dp = 4, .pp = 2, .ep = 2, .zero_group = 2, .bidirectional = true },
    { .tp = 2, .cp = 2, .dp = 2, .owners = true },
    { .tp = 2, .dp = 2, .pp = 2, .owners = true, .order = ORDER_PP_DP },
    { .tp = 1, .dp = 2, .pp = 4, .owners = true, .bidirectional = true },
    { .tp = 2,
      .dp = 2,
      .pp = 2,
      .ep = 2,
      .zero_group = 1,
      .owners = true,
      .bidirectional = true,
      .order = ORDER_PP_DP },
};
enum { CASE_GRIDS = sizeof case_grids / sizeof *case_grids };

#endif
