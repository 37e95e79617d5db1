/*
 * Each op on the GPU beside what the machine allows: the rate of a device-to-device copy and that of one large
 * bf16 product, measured first, turn an op's fewest bytes (cases.c) and its FLOP into the time that it cannot
 * beat, its floor. share = floor / measured.
 *
 *   rooflines [--json FILE] [--only TEXT] [--autotune] [--leave N] [--seconds S] [--tiny]
 *   rooflines --room      needs no GPU: fails unless each case fits the memory that is taken for them
 *
 * Measured: CUDA events around each call, the median of many; calls rotate among argument sets that together are
 * several times the L2; a long copy goes ahead, so that the host's launches are not what is timed. FLOP are
 * counted for products and attention alone (causal attention: the half that is needed); an op that can move its
 * bytes in less than 10 us is too short to judge and only listed. --leave: products are those that leave so many
 * multiprocessors to a communicator (cuda/gemm.h). --tiny: small shapes, for the emulator.
 * Nothing here asserts a speed.
 */
#include "base/clock.h"
#include "cost/measured.h"
#include "measure/cases.h"
#include "device_cuda.h"
#include "gemm.h"
#include "gpu.h"

enum { SETS_MAX = 8, REPEATS_MAX = 50, REPEATS_MIN = 5, JSON_BYTES = 1 << 19, MODELS_MOST = 10 };
static const double SHORT_MS = 0.010, GOOD_SHARE = 0.85;

/* Widths, and the ops that are run at them: all, those with one of these words in their names, or attention alone. */
typedef struct {
    Dims d;
    const char *words;
    bool attention;
} Widths;

typedef struct {
    int64_t arena_bytes, copy_bytes, ahead_bytes, gemm, pattern_items;
    int models;
    Widths model[MODELS_MOST];
} Scale;

#define WIDE "linear_ fp8_ xent_ norm residual attention_ grouped_ silu swiglu"

static const Scale full = {
    .arena_bytes = (int64_t)14 << 30, /* two matrices of logits, 6.6 GB each, and what is small */
    .copy_bytes = (int64_t)4 << 30,
    .ahead_bytes = (int64_t)1 << 30,
    .gemm = 8192,
    .pattern_items = PATTERN_ITEMS,
    .models = 10,
    .model = { { { "768 wide, B64 T1024", 64, 1024, 768, 3072, 50304, 124475904, 12, 4, 64, 8, 2 } },
               { { "2048 wide, B8 T2048", 8, 2048, 2048, 8192, 50304, 124475904, 16, 4, 128, 64, 8 } },
               { { "4096 wide, B1 T8192", 1, 8192, 4096, 14336, 128256, 1 << 20, 32, 8, 128, 8, 2 }, WIDE },
               { { "64 experts, skewed", 8, 2048, 2048, 8192, 50304, 1 << 20, 16, 4, 128, 64, 8, true }, "grouped" },
               { { "128 experts", 8, 2048, 2048, 6144, 50304, 1 << 20, 16, 4, 128, 128, 8 }, "grouped" },
               { { "128 experts, skewed", 8, 2048, 2048, 6144, 50304, 1 << 20, 16, 4, 128, 128, 8, true }, "grouped" },
               { { "T 8192, heads of 64", 2, 8192, 1024, 64, 64, 64, 16, 4, 64, 1, 1 }, NULL, true },
               { { "T 32768, heads of 64", 1, 32768, 1024, 64, 64, 64, 16, 4, 64, 1, 1 }, NULL, true },
               { { "T 32768, heads of 128", 1, 32768, 2048, 64, 64, 64, 16, 4, 128, 1, 1 }, NULL, true },
               { { "T 131072, heads of 128", 1, 131072, 1024, 64, 64, 64, 8, 2, 128, 1, 1 }, NULL, true } },
};
static const Scale tiny = {
    .arena_bytes = 64 << 20,
    .copy_bytes = 1 << 20,
    .ahead_bytes = 1 << 16,
    .gemm = 64,
    .pattern_items = 1 << 12,
    .models = 3,
    .model = { { { "tiny, B2 T32", 2, 32, 128, 256, 256, 20000, 4, 2, 32, 4, 2 } },
               { { "4 experts, skewed", 2, 32, 128, 256, 256, 20000, 4, 2, 32, 4, 2, true }, "grouped" },
               { { "T 128", 1, 128, 128, 64, 64, 64, 4, 2, 32, 1, 1 }, NULL, true } },
};

/* As training has them: q, k and v are columns of one matrix, a head's beside each other. */
static const Case of_projection = { "causal, of one projection", .option = -1 };

typedef struct {
    Device dev;
    Arena arena;
    char *ahead; /* scale->ahead_bytes, for copy_ahead */
    GpuMarks marks;
    const Scale *scale;
    const char *only;
    double seconds; /* of measuring per case */
    bool autotune, enough, room;
    int leave; /* multiprocessors that products leave free */
    int64_t cache_bytes; /* L2 */
    double copy_rate, gemm_rate; /* bytes/s, FLOP/s */
    JsonOut json;
    int judged, below;
} Bench;

typedef struct {
    double median, least;
    int repeats;
} Timing;

/* ---- timing ---- */

/* Some 0.5 ms of copying: a head start for the host. */
static Err copy_ahead(Bench *b)
{
    int64_t half = b->scale->ahead_bytes / 2;
    for (int i = 0; i < 2; i++) TRY(device_copy(&b->dev.stream, b->ahead + half, b->ahead, half));
    return ERR_OK;
}

static Err time_repeats(Bench *b, OpId id, const AnyArgs *sets, int set_count, int repeats, double *ms)
{
    Stream *s = &b->dev.stream;
    TRY(copy_ahead(b));
    for (int r = 0; r < repeats; r++) {
        TRY(gpu_mark(&b->marks, 2 * r, s));
        TRY(run_any(s, id, &sets[r % set_count]));
        TRY(gpu_mark(&b->marks, 2 * r + 1, s));
    }
    TRY(device_sync(s));
    for (int r = 0; r < repeats; r++) TRY(gpu_ms(&b->marks, 2 * r, 2 * r + 1, &ms[r]));
    return ERR_OK;
}

static Err time_op(Bench *b, OpId id, const AnyArgs *sets, int set_count, Timing *out)
{
    double ms[REPEATS_MAX];
    TRY(time_repeats(b, id, sets, set_count, set_count, ms)); /* loads the module, makes plans */
    TRY(time_repeats(b, id, sets, set_count, set_count, ms));
    double once = gpu_median(ms, set_count), fit = b->seconds * 1e3 / (once > 1e-3 ? once : 1e-3);
    out->repeats = fit > REPEATS_MAX ? REPEATS_MAX : fit < REPEATS_MIN ? REPEATS_MIN : (int)fit;
    if (b->scale == &tiny) out->repeats = 1;
    TRY(time_repeats(b, id, sets, set_count, out->repeats, ms));
    out->median = gpu_median(ms, out->repeats);
    out->least = ms[0];
    return ERR_OK;
}

/* ---- the two rates ---- */

/* An idle GPU runs at a low clock, and takes a while to leave it. */
static Err wake_up(Bench *b, const AnyArgs *product)
{
    double until = clock_s() + (b->scale == &tiny ? 0 : 0.5);
    do {
        TRY(run_any(&b->dev.stream, OP_linear_fwd, product));
        TRY(device_sync(&b->dev.stream));
    } while (clock_s() < until);
    return ERR_OK;
}

static Err measure_gemm(Bench *b, Maker *m)
{
    static const Case square = { "square", PROJ };
    double n = (double)b->scale->gemm;
    AnyArgs args;
    Timing t;
    ArenaMark before = arena_mark(&b->arena);
    TRY(maker_make(m, OP_linear_fwd, &square, &args));
    TRY(wake_up(b, &args));
    TRY(time_op(b, OP_linear_fwd, &args, 1, &t));
    b->gemm_rate = 2 * n * n * n / t.median * 1e3;
    arena_release(&b->arena, before);
    return ERR_OK;
}

static Err measure_copy(Bench *b, Maker *m)
{
    enum { REPEATS = 10 };
    Stream *s = &b->dev.stream;
    double ms[REPEATS];
    int64_t size = b->scale->copy_bytes;
    Tensor from, to;
    TRY(maker_tensor(m, &from, 0, FILL_UNIFORM, F32, 1, &(int64_t){ size / 4 }));
    TRY(maker_tensor(m, &to, 0, FILL_ZERO, F32, 1, &(int64_t){ size / 4 }));
    for (int r = -2; r < REPEATS; r++) {
        if (r >= 0) TRY(gpu_mark(&b->marks, 2 * r, s));
        TRY(device_copy(s, to.data, from.data, size));
        if (r >= 0) TRY(gpu_mark(&b->marks, 2 * r + 1, s));
    }
    TRY(device_sync(s));
    for (int r = 0; r < REPEATS; r++) TRY(gpu_ms(&b->marks, 2 * r, 2 * r + 1, &ms[r]));
    b->copy_rate = 2 * (double)size / gpu_median(ms, REPEATS) * 1e3;
    return ERR_OK;
}

static Err measure_rates(Bench *b)
{
    int64_t n = b->scale->gemm;
    Dims square = { .name = "square", .B = 1, .T = n, .D = n, .V = n, .H = 1, .C = n };
    Maker m;
    TRY(maker_open(&m, &b->dev, &b->arena, &square, BF16, F32, b->scale->pattern_items));
    TRY(measure_gemm(b, &m));
    TRY(measure_copy(b, &m));
    maker_close(&m);
    arena_release(&b->arena, 0);
    json_put_number(&b->json, "copy_gb_s", b->copy_rate * 1e-9);
    json_put_number(&b->json, "gemm_tflop_s", b->gemm_rate * 1e-12);
    printf("device copy of %.2f GB: %.0f GB/s read and written; bf16 product of %lld^3: %.1f TFLOP/s\n",
           (double)b->scale->copy_bytes * 1e-9, b->copy_rate * 1e-9, (long long)b->scale->gemm, b->gemm_rate * 1e-12);
    return ERR_OK;
}

/* ---- a case ---- */

/* Writes a result as a point of a device's file (scripts/device-file.py). */
static void put_point(JsonOut *j, OpId id, const AnyArgs *args)
{
    const OpWork w = op_work(id, args);
    json_put_text(j, "dtype", op_dtype(id, args));
    json_put_number(j, "times", w.times);
    json_open(j, "shape", '[');
    for (int i = 0; i < w.dims; i++) json_put_number(j, NULL, w.shape[i]);
    json_close(j, ']');
}

static void report(Bench *b, const Maker *m, OpId id, const AnyArgs *args, Timing t, int64_t flop)
{
    JsonOut *j = &b->json;
    double memory_ms = (double)m->bytes / b->copy_rate * 1e3, matrix_ms = (double)flop / b->gemm_rate * 1e3;
    double floor = memory_ms > matrix_ms ? memory_ms : matrix_ms, share = floor / t.median;
    double gb_s = (double)m->bytes * 1e-6 / t.median, tflop_s = (double)flop * 1e-9 / t.median;
    const char *bound = floor < SHORT_MS ? "short" : matrix_ms > memory_ms ? "matrix" : "memory";
    bool judged = !strcmp(bound, "memory"), below = judged && !(share >= GOOD_SHARE);
    char rate[32];
    b->judged += judged;
    b->below += below;
    json_open(j, NULL, '{');
    json_put_text(j, "op", op_info(id)->name);
    json_put_text(j, "case", m->c->what);
    json_put_text(j, "model", m->d->name);
    json_put_number(j, "ms", t.median);
    json_put_number(j, "least_ms", t.least);
    json_put_int(j, "repeats", t.repeats);
    json_put_int(j, "bytes", m->bytes);
    json_put_int(j, "flop", flop);
    json_put_number(j, "floor_ms", floor);
    json_put_text(j, "bound", bound);
    json_put_number(j, "gb_s", gb_s);
    json_put_number(j, "tflop_s", tflop_s);
    json_put_number(j, "share", share);
    if (m->c != &of_projection && !m->d->skewed) put_point(j, id, args);
    json_close(j, '}');
    if (*bound == 'm' && bound[1] == 'a') snprintf(rate, sizeof rate, "%7.1f TFLOP/s", tflop_s);
    else snprintf(rate, sizeof rate, "%7.0f GB/s   ", gb_s);
    printf("%-16s %-24s %9.4f ms %9.4f floor  %s", op_info(id)->name, m->c->what, t.median, floor, rate);
    if (*bound == 's') printf("   short\n");
    else printf("  %5.1f %%%s\n", 100 * share, below ? "  <" : "");
    fflush(stdout);
}

/* q, k and v, or their gradients, as columns of one matrix. */
static Err join_heads(Maker *m, Tensor *q, Tensor *k, Tensor *v)
{
    Tensor joined, *const parts[] = { q, k, v };
    const int64_t C = q->dim[3], dim[] = { tensor_rows(*q), 3 * C };
    TRY(maker_tensor(m, &joined, 0, FILL_UNIFORM, q->dtype, 2, dim));
    for (int i = 0; i < 3; i++) {
        parts[i]->data = (char *)joined.data + i * C * dtype_size(q->dtype);
        parts[i]->ld = 3 * C;
    }
    return ERR_OK;
}

static Err make_args(Maker *m, OpId id, const Case *c, AnyArgs *a)
{
    TRY(maker_make(m, id, c, a));
    if (c != &of_projection) return ERR_OK;
    attention_fwd_args *f = &a->attention_fwd;
    attention_bwd_args *b = &a->attention_bwd;
    if (id == OP_attention_fwd) return join_heads(m, &f->q, &f->k, &f->v);
    TRY(join_heads(m, &b->q, &b->k, &b->v));
    return join_heads(m, &b->dq, &b->dk, &b->dv);
}

/* Makes as many sets as fit, until they are four times the L2. */
static Err make_sets(Bench *b, Maker *m, OpId id, const Case *c, AnyArgs *sets, int *count)
{
    ArenaMark before = arena_mark(&b->arena);
    TRY(make_args(m, id, c, &sets[0]));
    int64_t size = arena_mark(&b->arena) - before, room = b->arena.size_bytes - arena_mark(&b->arena);
    for (*count = 1; *count < SETS_MAX && *count * size < 4 * b->cache_bytes && size <= room; ++*count, room -= size)
        TRY(make_args(m, id, c, &sets[*count]));
    return device_sync(&b->dev.stream);
}

/* FLOP that belong on matrix units. */
static bool counts_flop(OpId id)
{
    const char *name = op_info(id)->name;
    return !strncmp(name, "linear_", 7) || !strncmp(name, "fp8_product", 11) ||
           !strncmp(name, "fp8_grouped", 11) || id == OP_grouped_fwd || id == OP_grouped_dx ||
           id == OP_grouped_dw || id == OP_attention_fwd || id == OP_attention_bwd;
}

static Err run_case(Bench *b, Maker *m, OpId id, const Case *c)
{
    AnyArgs sets[SETS_MAX];
    Timing t;
    int count = 0;
    ArenaMark before = arena_mark(&b->arena);
    TRY(make_sets(b, m, id, c, sets, &count));
    int64_t flop = b->dev.counters.flop;
    TRY(run_any(&b->dev.stream, id, &sets[0]));
    flop = b->dev.counters.flop - flop;
    TRY(time_op(b, id, sets, count, &t));
    report(b, m, id, &sets[0], t, counts_flop(id) ? flop : 0);
    arena_release(&b->arena, before);
    return ERR_OK;
}

static bool is_attention(OpId id) { return id == OP_attention_fwd || id == OP_attention_bwd; }

/* Is one of the words in the op's name? */
static bool has_word(const char *words, const char *name)
{
    char word[32];
    for (int n = 0; sscanf(words, " %31s%n", word, &n) == 1; words += n)
        if (strstr(name, word)) return true;
    return false;
}

/* How many cases an op has at these widths; the one behind its own is attention's of one projection. */
static int cases_of(const Widths *w, OpId id)
{
    if (w->attention) return is_attention(id);
    if (w->words && !has_word(w->words, op_info(id)->name)) return 0;
    return bench_ops[id]->count + is_attention(id);
}

static const Case *case_of(const Widths *w, OpId id, int i)
{
    return w->attention || i == bench_ops[id]->count ? &of_projection : &bench_ops[id]->cases[i];
}

static Err run_op(Bench *b, Maker *m, const Widths *w, OpId id)
{
    if (b->only && !strstr(op_info(id)->name, b->only)) return ERR_OK;
    for (int i = 0; i < cases_of(w, id); i++) {
        const Case *c = case_of(w, id, i);
        const ArenaMark before = arena_mark(&b->arena);
        Err err = run_case(b, m, id, c);
        if (err == ERR_CONFIG && !strncmp(op_info(id)->name, "fp8_", 4)) { /* this GPU has no such products */
            printf("%s %s: %s\n", op_info(id)->name, c->what, err_message());
            arena_release(&b->arena, before);
        } else if (err) return err_prefix(err, "%s %s", op_info(id)->name, c->what);
    }
    return ERR_OK;
}

static Err run_model(Bench *b, const Widths *w)
{
    Maker m;
    const Dims *d = &w->d;
    printf("\n%s, bf16 %37s the least time   rate            share\n", d->name, "median");
    TRY(maker_open(&m, &b->dev, &b->arena, d, BF16, F32, b->scale->pattern_items));
    for (int id = 0; id < OP_COUNT; id++) TRY(run_op(b, &m, w, (OpId)id));
    maker_close(&m);
    arena_release(&b->arena, 0);
    return ERR_OK;
}

/* Has the arena room for every case? On a device that holds nothing: without a GPU, in a second. */
static Err check_room(Bench *b)
{
    void *base;
    TRY(device_open(&b->dev, (DeviceChoice){ .kind = DEVICE_NULL }));
    TRY(device_alloc(&b->dev, b->scale->arena_bytes, &base));
    arena_init(&b->arena, "bench", base, b->scale->arena_bytes);
    int cases = 0;
    for (int model = 0; model < b->scale->models; model++) {
        Maker m;
        TRY(maker_open(&m, &b->dev, &b->arena, &b->scale->model[model].d, BF16, F32, b->scale->pattern_items));
        for (int id = 0; id < OP_COUNT; id++)
            for (int i = 0; i < cases_of(&b->scale->model[model], (OpId)id); i++, cases++) {
                AnyArgs args;
                const Case *c = case_of(&b->scale->model[model], (OpId)id, i);
                const ArenaMark before = arena_mark(&b->arena);
                const Err err = make_args(&m, (OpId)id, c, &args);
                if (err) return err_prefix(err, "%s %s", op_info(id)->name, c->what);
                arena_release(&b->arena, before);
            }
        maker_close(&m);
        arena_release(&b->arena, 0);
    }
    printf("%d cases have room in %.0f GiB\n", cases, (double)b->scale->arena_bytes / (1 << 30));
    return ERR_OK;
}

/* ---- ---- */

static Err open_bench(Bench *b)
{
    int cache = 0;
    void *base, *ahead;
    TRY(gpu_describe(&b->json));
    TRY(gpu_has_room(b->scale->arena_bytes + b->scale->ahead_bytes + DEVICE_LIBRARY_BYTES, &b->enough));
    if (!b->enough) return ERR_OK;
    TRY(device_open(&b->dev, (DeviceChoice){ .kind = DEVICE_CUDA }));
    TRY(gpu_check(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, 0), "reading the size of the L2"));
    b->cache_bytes = cache;
    json_put_int(&b->json, "l2_bytes", cache);
    json_put_bool(&b->json, "autotune", b->autotune);
    cuda_gemm_autotune(((CudaDevice *)b->dev.cuda)->gemm, b->autotune ? TUNE_SAME_BITS : TUNE_OFF);
    json_put_int(&b->json, "left_free", b->leave);
    cuda_gemm_leave_free(((CudaDevice *)b->dev.cuda)->gemm, b->leave);
    b->dev.beside = b->leave > 0;
    TRY(device_alloc(&b->dev, b->scale->arena_bytes, &base));
    TRY(device_alloc(&b->dev, b->scale->ahead_bytes, &ahead));
    arena_init(&b->arena, "bench", base, b->scale->arena_bytes);
    b->ahead = ahead;
    return gpu_marks_open(&b->marks, 2 * REPEATS_MAX);
}

static void close_bench(Bench *b)
{
    gpu_marks_close(&b->marks);
    device_free(&b->dev, b->arena.base, b->arena.size_bytes);
    device_free(&b->dev, b->ahead, b->scale->ahead_bytes);
    if (b->dev.ops) device_close(&b->dev);
}

static Err run_all(Bench *b)
{
    TRY(open_bench(b));
    if (!b->enough) return ERR_OK;
    TRY(measure_rates(b));
    json_open(&b->json, "ops", '[');
    for (int i = 0; i < b->scale->models; i++) TRY(run_model(b, &b->scale->model[i]));
    json_close(&b->json, ']');
    json_put_int(&b->json, "memory_bound", b->judged);
    json_put_int(&b->json, "memory_bound_below_85", b->below);
    printf("\n%d of %d cases bound by memory reach %.0f %% of the copy rate%s\n", b->judged - b->below, b->judged,
           100 * GOOD_SHARE, b->below ? "; the others are marked '<'" : "");
    return ERR_OK;
}

static bool parse(int argc, char **argv, Bench *b, const char **json_path)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--tiny")) b->scale = &tiny;
        else if (!strcmp(argv[i], "--autotune")) b->autotune = true;
        else if (!strcmp(argv[i], "--room")) b->room = true;
        else if (!value) return false;
        else if (i++, !strcmp(argv[i - 1], "--json")) *json_path = value;
        else if (!strcmp(argv[i - 1], "--only")) b->only = value;
        else if (!strcmp(argv[i - 1], "--leave")) b->leave = atoi(value);
        else if (!strcmp(argv[i - 1], "--seconds")) b->seconds = strtod(value, NULL);
        else return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    static Bench b = { .scale = &full, .seconds = 0.05 };
    static char json[JSON_BYTES];
    const char *json_path = NULL;
    if (!parse(argc, argv, &b, &json_path))
        return fprintf(stderr, "usage: rooflines [--json FILE] [--only TEXT] [--autotune] [--leave N] [--seconds S]"
                               " [--tiny]\n"
                               "       rooflines --room\n"), 2;
    json_out_init(&b.json, json, sizeof json);
    if (b.room) {
        const Err err = check_room(&b);
        if (err) err_print(err, true);
        return err_exit_code(err);
    }
    json_open(&b.json, NULL, '{');
    Err err = run_all(&b);
    json_close(&b.json, '}');
    if (!err && b.enough) err = gpu_write_json(&b.json, json, json_path);
    if (err) err_print(err, true);
    close_bench(&b);
    return err || b.enough ? err_exit_code(err) : GPU_TOO_SMALL;
}
