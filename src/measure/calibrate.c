/* See calibrate.h. Processes take the jobs of a list in the same order and write what they measured into shared
 * memory. */
#include "measure/calibrate.h"

#include <math.h>
#include <stdio.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/processors.h"
#include "base/words.h"
#include "cost/measured.h"
#include "measure/cases.h"
#include "measure/disk.h"
#include "measure/local_ranks.h"

enum {
    MOST_RANKS = 16,
    JOBS_MOST = 1024,
    SETS_MOST = 64,
    REPEATS_MOST = 400,
    REPEATS_LEAST = 3,
    ROUNDS_MOST = 8,
    SWEEPS = 3,
    FOUND_MOST = 2 * SWEEPS
};
static const int64_t ARENA_BYTES = 256 << 20, SETS_BYTES = 16 << 20, PRODUCT_BYTES = 16 << 20, PATTERN_LEAST = 1 << 14,
                     STAGING_BYTES = 64 << 20;

/* ---- what is measured of ops ---- */

typedef struct {
    OpId id;
    Dims d;
    Case c;
} Job;

/* One round: so many ranks, each with so many threads, go through all jobs. */
typedef struct {
    int ranks, threads;
    DType dtype;
} Round;

typedef struct {
    int count; /* times so far; 0: none, or there was no room */
    double us[FOUND_MOST];
    double tail; /* what one call in a hundred took at least, over the median: the most of all times */
    OpWork work;
} Measured;

typedef struct {
    int job_count, round_count;
    double budget_s; /* of a job */
    Round round[ROUNDS_MOST];
    int now; /* the round */
    double copy_gb_s[ROUNDS_MOST][MOST_RANKS];
    Job job[JOBS_MOST];
    Measured at[ROUNDS_MOST][MOST_RANKS][JOBS_MOST];
} OpTimes;

static void add_job(OpTimes *t, OpId id, Dims d, Case c)
{
    ASSERT(t->job_count < JOBS_MOST);
    t->job[t->job_count++] = (Job){ id, d, c };
}

static const int64_t row_counts[] = { 8, 32, 128, 512, 2048 }, widths[] = { 32, 128, 512, 2048 };

/* N rows, O outputs, I inputs: as an attention's projection is made. count: of widths. */
static void add_products(OpTimes *t, int count, double flop_most)
{
    enum { LEAF = 128 };
    static const OpId ids[] = { OP_linear_fwd, OP_linear_dx, OP_linear_dw };
    for (int i = 0; i < (count + 1) * count * count; i++) {
        const int64_t N = row_counts[i / count / count], O = widths[i / count % count], I = widths[i % count];
        if (2.0 * (double)N * (double)O * (double)I > flop_most) continue;
        const int64_t leaf = N < LEAF ? N : LEAF; /* of a weight's gradient */
        const Dims d = { "", .B = N / leaf, .T = leaf, .D = O, .F = 64, .V = 64, .H = 1, .K = 1, .C = I, 1, 1 };
        for (int k = 0; k < 3; k++) add_job(t, ids[k], d, (Case){ "grid", PROJ });
    }
}

static void add_grouped(OpTimes *t, int count, double flop_most)
{
    enum { EXPERTS = MEASURED_AT_ONCE };
    static const OpId ids[] = { OP_grouped_fwd, OP_grouped_dx, OP_grouped_dw };
    for (int i = 0; i < (count + 1) * count * count; i++) {
        const int64_t R = row_counts[i / count / count], O = widths[i / count % count], I = widths[i % count];
        if (2.0 * EXPERTS * (double)R * (double)O * (double)I > flop_most) continue;
        const Dims d = { "", .B = 1, .T = R * EXPERTS, .D = I, .F = O, .V = 64, .H = 1, .K = 1, .C = 16, EXPERTS, 1 };
        for (int k = 0; k < 3; k++) add_job(t, ids[k], d, (Case){ "grid", FC1 });
    }
}

static void add_attention(OpTimes *t, const int64_t *lengths, int count)
{
    static const int64_t heads[] = { 16, 32, 64, 128 }; /* how wide they are */
    for (int i = 0; i < count; i++)
        for (int k = 0; k < 4; k++) {
            const Dims d = { "",
                             .B = 1,
                             .T = lengths[i],
                             .D = 64,
                             .F = 64,
                             .V = 64,
                             .H = MEASURED_AT_ONCE,
                             .K = MEASURED_AT_ONCE,
                             heads[k],
                             1,
                             1 };
            add_job(t, OP_attention_fwd, d, (Case){ "grid" });
            add_job(t, OP_attention_bwd, d, (Case){ "grid" });
        }
}

static bool on_grid(OpId id)
{
    return id == OP_linear_fwd || id == OP_linear_dx || id == OP_linear_dw || id == OP_grouped_fwd ||
           id == OP_grouped_dx || id == OP_grouped_dw || id == OP_attention_fwd || id == OP_attention_bwd;
}

/* All others at four sizes of a model: one case of each, the first, which is the usual one. */
static void add_others(OpTimes *t, int sizes)
{
    static const Dims models[] = {
        { "", 1, 32, 64, 128, 256, 1 << 14, 4, 2, 16, 4, 2 },
        { "", 2, 128, 128, 512, 1024, 1 << 18, 4, 2, 32, 8, 2 },
        { "", 4, 256, 256, 1024, 4096, 1 << 21, 8, 2, 32, 8, 2 },
        { "", 4, 512, 512, 2048, 8192, 1 << 23, 8, 2, 64, 16, 2 },
    };
    for (int i = 0; i < sizes; i++)
        for (int id = 0; id < OP_COUNT; id++)
            if (!on_grid((OpId)id)) add_job(t, (OpId)id, models[i], bench_ops[id]->cases[0]);
}

static void make_jobs(OpTimes *t, bool brief)
{
    static const int64_t lengths[] = { 32, 64, 128, 256, 512, 1024, 2048 };
    add_products(t, brief ? 1 : 4, 1.1e9);
    add_grouped(t, brief ? 1 : 3, 0.6e9);
    add_attention(t, lengths, brief ? 1 : 7);
    add_others(t, brief ? 1 : 4);
}

static void add_round(OpTimes *t, int ranks, int threads, DType dtype)
{
    for (int i = 0; i < t->round_count; i++)
        if (t->round[i].ranks == ranks && t->round[i].threads == threads && t->round[i].dtype == dtype) return;
    ASSERT(t->round_count < ROUNDS_MOST);
    t->round[t->round_count++] = (Round){ ranks, threads, dtype };
}

/* Makes rounds of threads, as runs share processors among ranks: one has them all, a model too small for that takes one
 * thread, or each has its share. */
static void make_rounds(OpTimes *t, int processors)
{
    const int most = processors < MOST_RANKS ? processors : MOST_RANKS;
    add_round(t, 1, 1, F32);
    if (processors >= 4) add_round(t, 2, processors / 2, F32);
    for (int i = 0; i < 2; i++) {
        add_round(t, 1, processors, i ? BF16 : F32);
        add_round(t, most, processors / most, i ? BF16 : F32);
    }
}

/* ---- a rank measures ---- */

enum { NEAREST_BYTES = 2 << 20 };

/* Work besides, of every thread in its NEAREST_BYTES of `other`: behind it nothing is in the nearest caches. */
static void forget(char *other, int threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
    memset(other + (int64_t)omp_get_thread_num() * NEAREST_BYTES, 1, NEAREST_BYTES);
}

typedef struct {
    LocalRank *rank;
    OpTimes *times;
    Device dev;
    Arena arena;
    Maker maker;
    Dims dims;   /* the maker's */
    char *other; /* of forget */
    ArenaMark patterns;
    AnyArgs sets[SETS_MOST];
    int set_count;
} Bench;

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A step adds up many calls, and with them their mean; of repeats the longest tenth is left out, which is what others
 * do on this machine. */
static double mean_us(double *s, int count)
{
    const int used = count - count / 10;
    double sum = 0;
    qsort(s, (size_t)count, sizeof *s, by_value);
    for (int i = 0; i < used; i++) sum += s[i];
    return 1e6 * sum / used;
}

/* Keeps the figure found this time, from repeats that are in order. */
static void keep(Measured *m, double us, const double *s, int count)
{
    ASSERT(m->count < FOUND_MOST);
    m->us[m->count++] = us;
    m->tail = fmax(m->tail, s[(int64_t)(count - 1) * 99 / 100] / s[count / 2]);
}

/* The mean of what was found at several times, without the least and the most; of two, their mean. */
static double middle_us(const Measured *m)
{
    double us[FOUND_MOST], sum = 0;
    const int beside = m->count > 2, used = m->count - 2 * beside;
    memcpy(us, m->us, sizeof us);
    qsort(us, (size_t)m->count, sizeof *us, by_value);
    for (int i = 0; i < used; i++) sum += us[beside + i];
    return sum / used;
}

/* Patterns of these dims; neighbours in the list of jobs mostly have the same. */
static Err open_maker(Bench *b, const Dims *d)
{
    const Round *r = &b->times->round[b->times->now];
    const int64_t items = (PATTERN_LEAST + d->T - 1) / d->T * d->T;
    if (b->maker.tokens && !memcmp(&b->dims, d, sizeof *d)) return arena_release(&b->arena, b->patterns), ERR_OK;
    maker_close(&b->maker);
    arena_release(&b->arena, 0);
    b->dims = *d;
    TRY(maker_open(&b->maker, &b->dev, &b->arena, &b->dims, r->dtype, r->dtype == F32 ? I64 : F32, items));
    b->patterns = arena_mark(&b->arena);
    return ERR_OK;
}

/* Several sets of arguments take turns: in a step an op finds few of its tensors in the nearest cache. */
static Err make_sets(Bench *b, const Job *j)
{
    const int64_t most = on_grid(j->id) ? PRODUCT_BYTES : SETS_BYTES;
    TRY(open_maker(b, &j->d));
    TRY(maker_make(&b->maker, j->id, &j->c, &b->sets[0]));
    b->set_count = 1;
    while (b->set_count < SETS_MOST && b->set_count * b->maker.bytes < most)
        TRY(maker_make(&b->maker, j->id, &j->c, &b->sets[b->set_count++]));
    return ERR_OK;
}

static Err time_sets(Bench *b, const Job *j, Measured *out)
{
    double s[REPEATS_MOST];
    int n = 0;
    for (int i = 0; i < b->set_count; i++) TRY(run_any(&b->dev.stream, j->id, &b->sets[i]));
    TRY(local_ranks_meet(b->rank));
    const double begin = clock_s();
    double last = begin;
    while (n < REPEATS_MOST && (n < REPEATS_LEAST || last - begin < b->times->budget_s)) {
        forget(b->other, b->times->round[b->times->now].threads);
        last = clock_s();
        TRY(run_any(&b->dev.stream, j->id, &b->sets[n % b->set_count]));
        const double now = clock_s();
        s[n++] = now - last;
        last = now;
    }
    out->work = op_work(j->id, &b->sets[0]);
    keep(out, mean_us(s, n), s, n);
    return ERR_OK;
}

/* Measures a job. All ranks alike leave out one that does not fit a rank's memory. */
static Err measure_job(Bench *b, int i)
{
    const Job *j = &b->times->job[i];
    Measured *out = &b->times->at[b->times->now][b->rank->rank][i];
    Err err = make_sets(b, j);
    if (!err) err = time_sets(b, j, out);
    if (err == ERR_MEMORY) return ERR_OK;
    return err ? err_prefix(err, "%s", op_info(j->id)->name) : ERR_OK;
}

/* Copies half of the arena to the other half; counts bytes read and written. */
static Err measure_copy(Bench *b)
{
    enum { COPIES = 5 };
    const int64_t half = ARENA_BYTES / 2;
    double s[COPIES];
    TRY(local_ranks_meet(b->rank));
    for (int i = 0; i < COPIES; i++) {
        const double from = clock_s();
        TRY(device_copy(&b->dev.stream, b->arena.base + half, b->arena.base, half));
        s[i] = clock_s() - from;
    }
    const double rate = 2e-3 * (double)half / mean_us(s, COPIES);
    double *best = &b->times->copy_gb_s[b->times->now][b->rank->rank];
    *best = rate > *best ? rate : *best;
    return ERR_OK;
}

static Err measure_jobs(Bench *b)
{
    void *base;
    TRY(device_alloc(&b->dev, ARENA_BYTES, &base));
    arena_init(&b->arena, "calibrate", base, ARENA_BYTES);
    Err err = measure_copy(b);
    for (int i = 0; i < b->times->job_count && !err; i++) err = measure_job(b, i);
    maker_close(&b->maker);
    device_free(&b->dev, base, ARENA_BYTES);
    return err;
}

static Err measure_ops(LocalRank *r, void *user)
{
    OpTimes *t = user;
    const Round *round = &t->round[t->now];
    Bench *b = calloc(1, sizeof *b);
    if (b) b->other = calloc((size_t)round->threads, NEAREST_BYTES);
    if (!b || !b->other) return err_set(ERR_MEMORY, "no memory to measure with");
    b->rank = r;
    b->times = t;
    /* (staging: operands of 8 bits are widened, in fp32 as well) */
    TRY(device_open(&b->dev, (DeviceChoice){ .kind = DEVICE_CPU,
                                             .threads = round->threads,
                                             .dot = dot_best(), /* as debug.dot = auto */
                                             .staging_bytes = STAGING_BYTES }));
    const Err err = measure_jobs(b);
    device_close(&b->dev);
    free(b->other);
    free(b);
    return err;
}

/* ---- collectives ---- */

enum { COMM_SIZES = 5, COMM_REPEATS = 200 };
static const double NOISY_TAIL = 2;

/* Pieces of work, some 50 us each, that members come from. */
enum { WORK_SIZES = 6, WORK_ROWS = 32, WORK_OUTPUTS = 512, WORK_INPUTS = 128 };
static const int work_pieces[WORK_SIZES] = { 0, 1, 2, 4, 16, 64 };

typedef struct {
    int ranks, members; /* processes, and how many of them make calls together */
    double budget_s;    /* of a kind at a size */
    double behind_s;    /* of calls behind so much work */
    int sizes;
    int64_t bytes[COMM_KIND_COUNT][COMM_SIZES]; /* that a member sends */
    Measured at[MOST_RANKS][COMM_KIND_COUNT][COMM_SIZES];
    Measured behind[MOST_RANKS][WORK_SIZES], work[MOST_RANKS][WORK_SIZES];
} CommTimes;

typedef struct {
    Comm comm;
    int rank;   /* among all */
    bool turns; /* ranks are more than processors */
    Stream *stream;
    char *a, *b; /* of so many bytes each, for */
    int64_t bytes;
    char *other;    /* of forget */
    float *product; /* of work: its tensors, and */
    int pieces;     /* how many in a turn */
} CommBench;

static Err exchange_ring(CommBench *c)
{
    const int n = c->comm.size, me = c->comm.rank;
    const MessageLabel label = { 0 };
    const CommMessage messages[] = { { true, (me + 1) % n, c->a, c->bytes, label },
                                     { false, (me + n - 1) % n, c->b, c->bytes, label } };
    return comm_exchange(&c->comm, c->stream, messages, 2, NULL);
}

/* A chunk a member, as many rows for each. */
static Err all_to_all(CommBench *c)
{
    enum { ROW_BYTES = 64 };
    const int64_t n = c->comm.size, each = c->bytes / ROW_BYTES / n;
    int64_t offset[MOST_RANKS + 1];
    for (int i = 0; i <= n; i++) offset[i] = i * each;
    const CommRows rows = { .local = c->a,
                            .remote = c->b,
                            .local_offset = offset,
                            .remote_offset = offset,
                            .chunks = 1,
                            .stride = 1,
                            .copies = 1,
                            .remote_rows = n * each };
    return comm_all_to_all_rows(&c->comm, c->stream, &rows, n * each, ROW_BYTES, NULL);
}

static Err call(CommBench *c, CommKind kind)
{
    const int64_t n = c->bytes / 8 / c->comm.size * c->comm.size, part = n / c->comm.size;
    const Tensor whole = tensor_of(c->a, F32, 2 * n), slice = tensor_of(c->b, F32, 2 * part);
    switch (kind) {
    case COMM_ALL_GATHER: return comm_all_gather(&c->comm, c->stream, whole, slice, NULL);
    case COMM_REDUCE_TREE_F32: return comm_reduce_tree_f32(&c->comm, c->stream, whole, NULL);
    case COMM_REDUCE_SCATTER_TREE_F32: return comm_reduce_scatter_tree_f32(&c->comm, c->stream, slice, whole, NULL);
    case COMM_REDUCE_SCATTER_I64:
        return comm_reduce_scatter_i64(&c->comm, c->stream, (int64_t *)c->b, (int64_t *)c->a, part, NULL);
    case COMM_SUM_I64: return comm_sum_i64(&c->comm, c->stream, (int64_t *)c->a, n, NULL);
    case COMM_MAX_I64: return comm_max_i64(&c->comm, c->stream, (int64_t *)c->a, n, NULL);
    case COMM_ALL_TO_ALL_ROWS: return all_to_all(c);
    case COMM_EXCHANGE: return exchange_ring(c);
    default: return comm_barrier(&c->comm, c->stream);
    }
}

/* Bytes that go through memory, and products behind them. */
static Err work(CommBench *c)
{
    enum { N = WORK_ROWS, O = WORK_OUTPUTS, I = WORK_INPUTS };
    float *x = c->product, *y = x + N * I, *w = y + N * O;
    forget(c->other, 1);
    for (int i = 0; i < c->pieces; i++)
        TRY(op(c->stream, linear_fwd, .y = tensor_of(y, F32, N, O), .x = tensor_of(x, F32, N, I),
               .w = tensor_of(w, F32, O, I), .leaf = I));
    return ERR_OK;
}

/* Seconds of a turn of work, and of a call behind it if there is one, on the average of a few turns. (Where ranks take
 * turns on the processors the first is done when others have hardly begun: there it is until all members are.) */
static Err time_turns(CommBench *c, const CommKind *kind, double *out)
{
    enum { TURNS = 4 };
    TRY(comm_barrier(&c->comm, c->stream));
    const double from = clock_s();
    for (int i = 0; i < TURNS; i++) {
        TRY(work(c));
        if (kind) TRY(call(c, *kind));
    }
    if (c->turns) TRY(comm_barrier(&c->comm, c->stream));
    *out = (clock_s() - from) / TURNS;
    return ERR_OK;
}

/* What calls add to the work between them, on all members as often as rank 0 finds time for. Members come to a call
 * from work of their own, as in a step: one is late, who waited for it has to wake up, and the threads that carry the
 * call find processors at work. alone: how long the work takes; or NULL. */
static Err time_calls(CommBench *c, CommKind kind, double budget_s, Measured *out, Measured *alone)
{
    double with[COMM_REPEATS], without[COMM_REPEATS];
    int64_t on = 1;
    int n = 0;
    TRY(call(c, kind));
    const double begin = clock_s();
    while (on && n < COMM_REPEATS) {
        TRY(time_turns(c, &kind, &with[n]));
        TRY(time_turns(c, NULL, &without[n++]));
        if (n < REPEATS_LEAST) continue;
        on = c->comm.rank == 0 && clock_s() - begin < budget_s;
        TRY(comm_sum_i64(&c->comm, c->stream, &on, 1, NULL));
    }
    const double took = mean_us(without, n);
    keep(out, fmax(mean_us(with, n) - took, 1), with, n);
    if (alone) keep(alone, took, without, n);
    return ERR_OK;
}

/* A small call behind more and more work. */
static Err time_behind(CommBench *c, CommTimes *t)
{
    enum { BYTES = 512 };
    c->bytes = BYTES;
    for (int i = 0; i < WORK_SIZES - (t->sizes < COMM_SIZES ? 3 : 0); i++) {
        c->pieces = work_pieces[i];
        TRY(time_calls(c, COMM_ALL_GATHER, t->behind_s, &t->behind[c->rank][i], &t->work[c->rank][i]));
    }
    c->pieces = 0;
    return ERR_OK;
}

static Err time_kinds(CommBench *c, CommTimes *t)
{
    for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
        for (int i = 0; i < (kind == COMM_BARRIER ? 1 : t->sizes); i++) {
            c->bytes = (int64_t)512 << 4 * i;
            TRY(time_calls(c, (CommKind)kind, t->budget_s, &t->at[c->rank][kind][i], NULL));
            const int64_t before = c->comm.bytes[kind];
            TRY(call(c, (CommKind)kind));
            if (c->comm.rank == 0) t->bytes[kind][i] = c->comm.bytes[kind] - before;
        }
    return ERR_OK;
}

static Err measure_comm(LocalRank *r, void *user)
{
    int together[MOST_RANKS];
    char name[32];
    CommTimes *t = user;
    Device dev;
    GlooWorld *world;
    const size_t most = (size_t)512 << 4 * (t->sizes - 1);
    CommBench c = { .rank = r->rank,
                    .turns = r->size > processors_share(1, 1),
                    .a = calloc(2, most),
                    .b = calloc(2, most),
                    .other = calloc(1, NEAREST_BYTES) };
    c.product = calloc(WORK_ROWS * (WORK_INPUTS + WORK_OUTPUTS) + WORK_OUTPUTS * WORK_INPUTS, sizeof *c.product);
    if (!c.a || !c.b || !c.other || !c.product) return err_set(ERR_MEMORY, "no memory to measure with");
    const int first = r->rank / t->members * t->members;
    for (int i = 0; i < t->members; i++) together[i] = first + i;
    snprintf(name, sizeof name, "of %d", first);
    TRY(device_open(&dev, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    TRY(local_ranks_connect(r, &world));
    TRY(comm_open_gloo(world, &c.comm, name, together, t->members));
    c.stream = &dev.stream;
    Err err = t->members == t->ranks ? time_kinds(&c, t) : ERR_OK;
    if (!err) err = time_behind(&c, t);
    comm_close(&c.comm);
    gloo_world_close(world);
    device_close(&dev);
    free(c.a);
    free(c.b);
    free(c.other);
    free(c.product);
    return err;
}

/* ---- what comes of it ---- */

/* Over the ranks that did it at once: the mean, in microseconds; 0: one of them could not. */
static double mean_of(const Measured *first, int64_t stride, int ranks, double *tail)
{
    double sum = 0;
    *tail = 0;
    for (int r = 0; r < ranks; r++) {
        const Measured *one = (const Measured *)((const char *)first + r * stride);
        if (!one->count) return 0;
        sum += middle_us(one) / ranks;
        *tail = fmax(*tail, one->tail);
    }
    return sum;
}

static Err take_round(const OpTimes *t, Calibration *out)
{
    const Round *round = &t->round[t->now];
    double copies = 0;
    for (int r = 0; r < round->ranks; r++) copies += t->copy_gb_s[t->now][r];
    if (copies > out->memory_gb_s) out->memory_gb_s = copies;
    for (int i = 0; i < t->job_count; i++) {
        const Job *j = &t->job[i];
        double tail;
        const double us = mean_of(&t->at[t->now][0][i], sizeof t->at[0][0], round->ranks, &tail);
        const OpWork *work = &t->at[t->now][0][i].work;
        DevicePoint p = { .ranks = round->ranks, .threads = round->threads, .dims = work->dims };
        if (!(us > 0)) continue;
        snprintf(p.name, sizeof p.name, "%s", op_info(j->id)->name);
        snprintf(p.dtype, sizeof p.dtype, "%s", dtype_name(round->dtype));
        memcpy(p.shape, work->shape, sizeof p.shape);
        p.us = us / work->times;
        TRY(device_points_add(&out->points, &p));
        out->noisy += tail > NOISY_TAIL;
        double *best = round->dtype == F32 ? &out->fp32_tflops : &out->bf16_tflops;
        const double tflops = 2e-6 * p.shape[0] * p.shape[1] * p.shape[2] / p.us;
        if (j->id == OP_linear_fwd && tflops > *best) *best = tflops;
    }
    return ERR_OK;
}

static Err take_comm(const CommTimes *t, Calibration *out)
{
    const int members = t->members;
    for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
        for (int i = 0; i < (kind == COMM_BARRIER ? 1 : t->sizes); i++) {
            double tail;
            const double us = mean_of(&t->at[0][kind][i], sizeof t->at[0], members, &tail);
            DevicePoint p = { .ranks = members, .threads = 1, .dims = 1, .us = us };
            p.shape[0] = t->bytes[kind][i] > 0 ? (double)t->bytes[kind][i] : 1;
            snprintf(p.name, sizeof p.name, "%s", comm_kind_name((CommKind)kind));
            TRY(device_points_add(&out->points, &p));
            out->noisy += tail > NOISY_TAIL;
            if (kind != COMM_EXCHANGE || members != 2) continue;
            if (i == 0) out->link_us = us;
            out->link_gb_s = p.shape[0] / us * 1e-3;
        }
    return ERR_OK;
}

/* Takes the time that a small call adds behind so much work (where members are more than processors, their work took
 * turns). */
static Err take_behind(const CommTimes *t, Calibration *out)
{
    const bool all = t->members == t->ranks;
    for (int i = 0; i < WORK_SIZES && t->work[0][i].count; i++) {
        double tail;
        DevicePoint p = { .ranks = t->ranks, .threads = 1, .dims = 1 };
        snprintf(p.name, sizeof p.name, "%s", all ? SKEW_NAME : SKEW_PAIRS_NAME);
        p.shape[0] = ceil(mean_of(&t->work[0][i], sizeof t->work[0], t->ranks, &tail));
        p.us = fmax(mean_of(&t->behind[0][i], sizeof t->behind[0], t->ranks, &tail), 1e-3);
        TRY(device_points_add(&out->points, &p));
    }
    return ERR_OK;
}

static Err run_rounds(OpTimes *t, double sweep_s)
{
    t->budget_s = sweep_s / (t->round_count * t->job_count);
    for (t->now = 0; t->now < t->round_count; t->now++) TRY(local_ranks_run(t->round[t->now].ranks, measure_ops, t));
    return ERR_OK;
}

static Err take_ops(OpTimes *t, Calibration *out)
{
    for (t->now = 0; t->now < t->round_count; t->now++) TRY(take_round(t, out));
    return ERR_OK;
}

/* Ranks, and how many of them make calls together: all of them, or two pairs apart. */
static const int comm_ranks[][2] = { { 2, 2 }, { 4, 4 }, { 4, 2 } };
enum { COMM_RUNS = sizeof comm_ranks / sizeof *comm_ranks, COMM_ALL = COMM_RUNS - 1 };

static Err run_comm(CommTimes t[COMM_RUNS], double sweep_s)
{
    for (int i = 0; i < COMM_RUNS; i++) {
        t[i].ranks = comm_ranks[i][0], t[i].members = comm_ranks[i][1];
        t[i].budget_s = 0.4 * sweep_s / (COMM_ALL * COMM_KIND_COUNT * t[i].sizes);
        t[i].behind_s = 0.6 * sweep_s / (COMM_RUNS * WORK_SIZES);
        TRY(local_ranks_run(t[i].ranks, measure_comm, &t[i]));
    }
    return ERR_OK;
}

/* Sweeps over everything, one at least, as many as there is time for; half of the time of ops goes into making tensors.
 * What calls take depends most on the moment, on where the system has put threads of these processes: they are measured
 * by new ones, before and behind the ops. */
static Err sweep(CalibrateOptions o, OpTimes *ops, CommTimes comm[COMM_RUNS])
{
    const double begin = clock_s(), sweep_s = o.seconds / SWEEPS;
    double took = 0;
    for (int i = 0; i == 0 || (i < SWEEPS && took * (i + 1) / i < o.seconds); i++) {
        TRY(run_comm(comm, 0.15 * sweep_s));
        TRY(run_rounds(ops, 0.3 * sweep_s));
        if (!o.brief) TRY(run_comm(comm, 0.15 * sweep_s));
        took = clock_s() - begin;
    }
    return ERR_OK;
}

static Err run_all(CalibrateOptions o, OpTimes *ops, CommTimes comm[COMM_RUNS], Calibration *out)
{
    text_cut(out->points.isa, sizeof out->points.isa, isa_name(isa_best()));
    text_cut(out->points.dot, sizeof out->points.dot, dot_name(dot_best()));
    make_jobs(ops, o.brief);
    make_rounds(ops, out->processors);
    for (int i = 0; i < COMM_RUNS; i++) comm[i].sizes = o.brief ? 2 : COMM_SIZES;
    TRY(sweep(o, ops, comm));
    TRY(take_ops(ops, out));
    for (int i = 0; i < COMM_RUNS; i++) {
        if (i < COMM_ALL) TRY(take_comm(&comm[i], out));
        TRY(take_behind(&comm[i], out));
    }
    return device_points_order(&out->points);
}

typedef struct {
    bool known;
    double all, own, at;
} Used;

static void note_used(Used *u)
{
    u->known = processors_used(&u->all, &u->own);
    u->at = clock_s();
}

static double share_of_others(const Used *a, const Used *b, int processors)
{
    const double others = (b->all - a->all) - (b->own - a->own);
    return a->known && b->known ? fmax(0, others / (b->at - a->at) / processors) : NAN;
}

/* A folder that takes no file is said to be one; the rest is measured without. */
static Err measure_disk(CalibrateOptions o, Calibration *out)
{
    const DiskLimits limits = { o.brief ? 16 << 20 : 512 << 20, o.brief ? 0.2 : 4 };
    const Err err = disk_measure(o.folder, limits, &out->disk_gb_s);
    if (err != ERR_STORAGE) return err;
    out->disk_gb_s = 0;
    text_cut(out->no_disk, sizeof out->no_disk, err_message());
    return ERR_OK;
}

Err calibrate(CalibrateOptions o, Calibration *out)
{
    OpTimes *ops;
    CommTimes *comm;
    *out = (Calibration){ .processors = processors_share(1, 1) };
    TRY(measure_disk(o, out));
    out->memory_mib = sysconf(_SC_PHYS_PAGES) / 1024 * sysconf(_SC_PAGESIZE) / 1024;
    TRY(local_shared(sizeof *ops, (void **)&ops));
    Err err = local_shared(COMM_RUNS * sizeof *comm, (void **)&comm);
    if (!err) {
        Used before, after;
        note_used(&before);
        err = run_all(o, ops, comm, out);
        note_used(&after);
        out->others = share_of_others(&before, &after, out->processors);
        local_unshare(comm, COMM_RUNS * sizeof *comm);
    }
    local_unshare(ops, sizeof *ops);
    return err;
}

/* ---- the file ---- */

enum { HEAD_BYTES = 2048 };

static int64_t put_head(const Calibration *c, char *out)
{
    int64_t n = snprintf(out, HEAD_BYTES,
                         "; The CPUs of this machine, measured by megatrain doctor --calibrate. See docs/planner.md.\n"
                         "[device]\nmemory_mib = %lld\nprocessors = %d\nfp32_tflops = %.4g\nbf16_tflops = %.4g\n"
                         "memory_gb_s = %.4g\nlink_gb_s = %.4g\nlink_us = %.4g\nisa = %s\ndot = %s\n",
                         (long long)c->memory_mib, c->processors, c->fp32_tflops, c->bf16_tflops, c->memory_gb_s,
                         c->link_gb_s, c->link_us, c->points.isa, c->points.dot);
    if (c->disk_gb_s > 0) n += snprintf(out + n, HEAD_BYTES - (size_t)n, "disk_gb_s = %.4g\n", c->disk_gb_s);
    return n;
}

Err calibration_write(const Calibration *c, const char *path)
{
    char *text = malloc(HEAD_BYTES + (size_t)c->points.count * 2 * POINT_LINE_BYTES);
    if (!text) return err_set(ERR_MEMORY, "no memory for a device's file");
    int64_t at = put_head(c, text);
    for (int i = 0; i < c->points.count; i++) {
        const DevicePoint *p = &c->points.items[i];
        char line[POINT_LINE_BYTES];
        if (i == 0 || strcmp(p->name, p[-1].name) != 0)
            at += sprintf(text + at, "\n[%s.%s]\n", *p->dtype ? "op" : "comm", p->name);
        device_point_line(p, line);
        at += sprintf(text + at, "%s\n", line);
    }
    const Err err = file_replace(path, text, at);
    free(text);
    return err_as(err, ERR_STORAGE);
}
