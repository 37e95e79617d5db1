/*
 * Communicators of ranks with GPUs (comm/gpu.h), as processes: every kind of call against a loop, over NCCL and staged
 * through the host; order, repeats, overlap with the device's work, failures. On the emulator with its NCCL; on a
 * machine with GPUs over NCCL on as many as there are, up to 8.
 */
#include <math.h>
#include <sys/syscall.h>

#include "base/half.h"
#include "comm/gpu.h"
#include "comm_cases.h"
#include "fork_ranks.h"
#include "layer/internal.h"

typedef struct {
    Device device;
    GlooWorld *gloo;
    NcclWorld *nccl;
    Comm all, part; /* all ranks, those of one parity */
    char *memory;
} Rank;

typedef struct {
    bool staged, shared /* one GPU, over NCCL */, check, any_order;
    int delay_ms;
} How;

enum { MEMORY_BYTES = 16 << 20 /* twice the largest gather, and room */, TIMEOUT_S = 60, SILENT_S = 10, LIMIT_S = 300 };

static const int all_ranks[SHARED_RANKS] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };

/* ---- what there is ---- */

static void count_gpus(int rank, int size, void *arg)
{
    (void)rank, (void)size, (void)arg;
    char why[256];
    const char *reason;
    DeviceInfo gpu;
    shared_page->flag = nccl_available(&reason) ? device_cuda_count(why, sizeof why) : 0;
    shared_page->digest[0] = device_cuda_info(0, &gpu) == ERR_OK && strstr(gpu.name, "Emulated");
    CHECK(true);
}

static bool emulated;

/* With NCCL; asked in a process of its own, for CUDA does not survive a fork. */
static int gpus(void)
{
    static int count = -1;
    if (count >= 0) return count;
    setenv("EMU_DEVICES", "4", 0);
    fork_ranks(count_gpus, 1, NULL, -1, LIMIT_S);
    emulated = shared_page->digest[0];
    return count = shared_page->flag < 8 ? shared_page->flag : 8;
}

#define NEED_GPUS(n) \
    if (gpus() < (n)) SKIP("%d GPUs with NCCL are needed, there are %d", n, gpus())

/* ---- a rank ---- */

static NcclOptions options_of(int rank, int size, int gpu, double timeout_s)
{
    return (NcclOptions){ .rank = rank, .size = size, .gpu = gpu, .timeout_s = timeout_s,
                          .store = { shared_page, shared_set, shared_get } };
}

static void open_rank(Rank *r, int rank, int size, How how, double timeout_s)
{
    void *memory;
    const int gpu = how.staged || how.shared ? 0 : rank;
    *r = (Rank){ 0 };
    device_cuda_for_several();
    OK(gloo_world_open((GlooOptions){ rank,
                                      size,
                                      "127.0.0.1",
                                      "a secret of tests",
                                      "a start",
                                      timeout_s,
                                      { shared_page, shared_set, shared_get } },
                       &r->gloo));
    NcclOptions o = options_of(rank, size, gpu, timeout_s);
    o.delay_ms = how.delay_ms;
    o.any_order = how.any_order;
    o.own_host = how.shared && rank;
    if (!how.staged) OK(nccl_world_open(&o, &r->nccl));
    int part[SHARED_RANKS], n = 0;
    for (int p = rank % 2; p < size; p += 2) part[n++] = p;
    if (how.staged) {
        OK(comm_open_staged(gpu, r->gloo, &r->all, "all", all_ranks, size));
        OK(comm_open_staged(gpu, r->gloo, &r->part, "part", part, n));
    } else {
        OK(comm_open_nccl(r->nccl, r->gloo, &r->all, "all", all_ranks, size,
                          (NcclUse){
                              .ctas = { .min = 1 }, .messages = MESSAGES_ALL_PAIRS, .pieces = size * CASE_CHUNKS }));
        OK(comm_open_nccl(r->nccl, r->gloo, &r->part, "part", part, n,
                          (NcclUse){ .ctas = { 1, 4 }, .messages = MESSAGES_ALL_PAIRS, .pieces = n * CASE_CHUNKS }));
    }
    comm_check_calls(&r->all, how.check);
    OK(device_open(&r->device, (DeviceChoice){ .kind = DEVICE_CUDA, .index = gpu }));
    OK(device_alloc(&r->device, MEMORY_BYTES, &memory));
    r->memory = memory;
}

static void close_rank(Rank *r)
{
    device_free(&r->device, r->memory, MEMORY_BYTES);
    device_close(&r->device);
    comm_close(&r->part);
    comm_close(&r->all);
    nccl_world_close(r->nccl);
    gloo_world_close(r->gloo);
}

/* ---- every kind of call ---- */

/* Sums of `ranks` summands in any order: nearer than this to the tree's. */
static float near_sum(int salt, int ranks, int64_t i)
{
    float sum = 0;
    for (int r = 0; r < ranks; r++) sum += fabsf(case_float(salt, r, i));
    return 0x1p-22f * sum;
}

typedef struct {
    Rank *r;
    Comm *c;
    int64_t n;
    bool staged;
    uint64_t digest;
} Run;

/* got[i] for [0, count) is the sum over ranks of what they have at first + i. */
static void check_sums(Run *run, const float *got, int64_t count, int salt, int64_t first, const char *what)
{
    int64_t bad = 0;
    for (int64_t i = 0; i < count; i++) {
        const float want = case_tree(salt, 0, run->c->size, first + i);
        const float far = run->staged ? 0 : near_sum(salt, run->c->size, first + i);
        bad += !(fabsf(got[i] - want) <= far);
    }
    CHECK_MSG(!bad, "%s of %lld: %lld wrong", what, (long long)count, (long long)bad);
    for (int64_t i = 0; i < count; i++)
        run->digest = (run->digest ^ *(const uint32_t *)&got[i]) * 0x100000001b3u;
}

static Stream *stream_of(Run *run) { return &run->r->device.stream; }

/* A host array of n elements, and its copy on the device at `at` bytes. */
static void put(Run *run, int64_t at, const void *host, int64_t bytes)
{
    OK(device_write(stream_of(run), run->r->memory + at, host, bytes));
}

static void get(Run *run, int64_t at, void *host, int64_t bytes)
{
    OK(device_read(stream_of(run), host, run->r->memory + at, bytes));
}

static Tensor at_bytes(Run *run, int64_t at, DType dtype, int64_t n)
{
    return (Tensor){ .data = run->r->memory + at, .dtype = dtype, .ndim = 1, .dim = { n }, .ld = n };
}

static void all_gather(Run *run, DType dtype, bool in_place)
{
    const int64_t n = run->n, bytes = n * dtype_size(dtype), size = run->c->size, own = MEMORY_BYTES / 2;
    uint8_t *host = calloc((size_t)(bytes * size) + 1, 1);
    const int64_t from = in_place ? run->c->rank * bytes : own;
    for (int64_t i = 0; i < bytes; i++) host[i] = (uint8_t)case_integer(1, run->c->rank, i);
    put(run, from, host, bytes);
    OK(comm_all_gather(run->c, stream_of(run), at_bytes(run, 0, dtype, n * size), at_bytes(run, from, dtype, n), NULL));
    get(run, 0, host, bytes * size);
    int64_t bad = 0;
    for (int64_t i = 0; i < bytes * size; i++) bad += host[i] != (uint8_t)case_integer(1, (int)(i / bytes), i % bytes);
    CHECK_MSG(!bad, "all-gather of %lld %s: %lld wrong bytes", (long long)n, dtype_name(dtype), (long long)bad);
    free(host);
}

static void reduce(Run *run)
{
    float *host = calloc((size_t)run->n + 1, sizeof *host);
    for (int64_t i = 0; i < run->n; i++) host[i] = case_float(2, run->c->rank, i);
    put(run, 0, host, run->n * 4);
    OK(comm_reduce_tree_f32(run->c, stream_of(run), at_bytes(run, 0, F32, run->n), NULL));
    get(run, 0, host, run->n * 4);
    check_sums(run, host, run->n, 2, 0, "reduce");
    free(host);
}

static void reduce_scatter(Run *run, bool in_place)
{
    const int64_t n = run->n, size = run->c->size, rank = run->c->rank;
    float *host = calloc((size_t)(n * size) + 1, sizeof *host);
    for (int64_t i = 0; i < n * size; i++) host[i] = case_float(3, (int)rank, i);
    put(run, 0, host, n * size * 4);
    const int64_t to = in_place ? rank * n * 4 : MEMORY_BYTES / 2;
    OK(comm_reduce_scatter_tree_f32(run->c, stream_of(run), at_bytes(run, to, F32, n), at_bytes(run, 0, F32, n * size),
                                    NULL));
    get(run, to, host, n * 4);
    const uint64_t before = run->digest; /* results differ from rank to rank */
    check_sums(run, host, n, 3, rank * n, "reduce-scatter");
    run->digest = before;
    free(host);
}

static void reduce_scatter_i64(Run *run)
{
    const int64_t n = run->n, size = run->c->size, rank = run->c->rank, to = MEMORY_BYTES / 2;
    int64_t *host = calloc((size_t)(n * size) + 1, sizeof *host), bad = 0;
    for (int64_t i = 0; i < n * size; i++) host[i] = case_integer(4, (int)rank, i);
    put(run, 0, host, n * size * 8);
    OK(comm_reduce_scatter_i64(run->c, stream_of(run), (int64_t *)(run->r->memory + to), (int64_t *)run->r->memory, n,
                               NULL));
    get(run, to, host, n * 8);
    for (int64_t i = 0; i < n; i++) bad += host[i] != case_sum(4, (int)size, rank * n + i);
    CHECK_MSG(!bad, "reduce-scatter-i64 of %lld: %lld wrong", (long long)n, (long long)bad);
    free(host);
}

static void integers(Run *run, bool max)
{
    const int64_t n = run->n;
    int64_t *host = calloc((size_t)n + 1, sizeof *host), *device = (int64_t *)run->r->memory, bad = 0;
    for (int64_t i = 0; i < n; i++) host[i] = case_integer(5 + max, run->c->rank, i);
    put(run, 0, host, n * 8);
    OK(max ? comm_max_i64(run->c, stream_of(run), device, n, NULL)
           : comm_sum_i64(run->c, stream_of(run), device, n, NULL));
    get(run, 0, host, n * 8);
    for (int64_t i = 0; i < n; i++)
        bad += host[i] != (max ? case_max(6, run->c->size, i) : case_sum(5, run->c->size, i));
    CHECK_MSG(!bad, "%s of %lld: %lld wrong", max ? "max" : "sum", (long long)n, (long long)bad);
    free(host);
}

static void all_kinds(Run *run, int64_t n)
{
    static const DType dtypes[] = { F32, BF16, F16, I32, I64 };
    run->n = n;
    for (int i = 0; i < 5; i++) all_gather(run, dtypes[i], i % 2);
    reduce(run);
    reduce_scatter(run, false);
    reduce_scatter(run, true);
    reduce_scatter_i64(run);
    integers(run, false);
    integers(run, true);
    OK(comm_barrier(run->c, stream_of(run)));
}

static void every_kind(int rank, int size, void *arg)
{
    static const int64_t counts[] = { 0, 1, 2, 3, 5, 64, 1000, 2047 };
    const How how = *(const How *)arg;
    Rank r;
    open_rank(&r, rank, size, how, TIMEOUT_S);
    Run all = { &r, &r.all, .staged = how.staged }, part = { &r, &r.part, .staged = how.staged };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        all_kinds(&all, counts[i]);
        if (part.c->size > 1) all_kinds(&part, counts[i]);
    }
    const int64_t large = 200001;
    all_kinds(&all, large);
    shared_page->digest[rank] = all.digest;
    /* by the minimal algorithm: reduce moves 2 (n-1)/n of the data, all-gather n-1 blocks */
    CHECK(r.all.calls[COMM_REDUCE_TREE_F32] == 9 && r.all.calls[COMM_ALL_GATHER] == 45);
    const int64_t elements = 0 + 1 + 2 + 3 + 5 + 64 + 1000 + 2047 + large;
    CHECK(r.all.bytes[COMM_ALL_GATHER] == elements * (4 + 2 + 2 + 4 + 8) * (size - 1));
    close_rank(&r);
}

static void every_kind_on(int size, How how)
{
    uint64_t digest;
    for (int i = 0; i < 2; i++) {
        fork_ranks(every_kind, size, &how, -1, LIMIT_S);
        for (int p = 1; p < size; p++) CHECK(shared_page->digest[p] == shared_page->digest[0]);
        if (i) CHECK_MSG(digest == shared_page->digest[0], "a repeat gives other bits");
        digest = shared_page->digest[0];
        CHECK(digest != 0);
    }
}

TEST(nccl_2)
{
    NEED_GPUS(2);
    every_kind_on(2, (How){ .check = true });
}

TEST(nccl_4)
{
    NEED_GPUS(4);
    every_kind_on(4, (How){ 0 });
}

TEST(nccl_gathers_by_nvls_4)
{
    NEED_GPUS(4);
    setenv("NCCL_ALGO", "allgather:nvls,ring", 1);
    every_kind_on(4, (How){ 0 });
    unsetenv("NCCL_ALGO");
}

/* The emulated NCCL adds in another order in each run, as NVLS may: so that the repeat in nccl_4 means something. */
TEST(nccl_any_order)
{
    uint64_t digest[2];
    NEED_GPUS(4);
    if (!emulated) SKIP("on a GPU repeats may agree");
    for (int i = 0; i < 2; i++) {
        fork_ranks(every_kind, 4, &(How){ .any_order = true }, -1, LIMIT_S);
        digest[i] = shared_page->digest[0];
        CHECK(shared_page->digest[3] == digest[i]);
    }
    CHECK(digest[0] != digest[1]);
}

TEST(nccl_delayed)
{
    NEED_GPUS(2);
    every_kind_on(2, (How){ .delay_ms = 1 });
}

TEST(staged_2)
{
    NEED_GPUS(1);
    every_kind_on(2, (How){ .staged = true });
}

TEST(staged_3)
{
    NEED_GPUS(1);
    every_kind_on(3, (How){ .staged = true, .check = true });
}

/* ---- rows from all to all ---- */

/* Rows of 20 bytes, and of whole 16; no rows, few, more than a piece's blocks take at once. */
static void rows_there_and_back(int rank, int size, void *arg)
{
    static const int64_t counts[] = { 0, 1, 2, 7, 100, 1000 };
    const How how = *(const How *)arg;
    Rank r;
    open_rank(&r, rank, size, how, TIMEOUT_S);
    for (int p = 0; p < 2; p++) {
        CaseRun c = { .comm = p ? &r.part : &r.all, .stream = &r.device.stream, .memory = r.memory };
        c.memory_bytes = MEMORY_BYTES;
        for (size_t i = 0; c.comm->size > 1 && i < sizeof counts / sizeof *counts; i++) {
            OK(case_rows(&c, &(CaseRowsShape){ .n = counts[i], .width = 5, .copies = 1 }));
            OK(case_rows(&c, &(CaseRowsShape){ .n = counts[i], .width = 8, .copies = c.comm->size % 2 ? 1 : 2 }));
        }
    }
    close_rank(&r);
}

TEST(rows)
{
    NEED_GPUS(4);
    fork_ranks(rows_there_and_back, 2, &(How){ .check = true }, -1, LIMIT_S);
    fork_ranks(rows_there_and_back, 4, &(How){ 0 }, -1, LIMIT_S);
    fork_ranks(rows_there_and_back, 2, &(How){ .delay_ms = 1 }, -1, LIMIT_S);
}

TEST(staged_rows)
{
    NEED_GPUS(1);
    fork_ranks(rows_there_and_back, 2, &(How){ .staged = true }, -1, LIMIT_S);
    fork_ranks(rows_there_and_back, 4, &(How){ .staged = true, .check = true }, -1, LIMIT_S);
}

/* Ranks that share a GPU: each is a host of its own to NCCL. */
TEST(one_gpu)
{
    NEED_GPUS(1);
    every_kind_on(2, (How){ .shared = true, .check = true });
    fork_ranks(rows_there_and_back, 2, &(How){ .shared = true }, -1, LIMIT_S);
}

/* ---- many calls at a time ---- */

/* More calls than are kept track of, of two groups, started in different orders; the device works on in between. */
static void in_flight(int rank, int size, void *arg)
{
    enum { CALLS = 600, N = 1024 };
    const How how = *(const How *)arg;
    static Event done[CALLS];
    static int64_t host[N];
    Rank r;
    open_rank(&r, rank, size, how, TIMEOUT_S);
    Stream *s = &r.device.stream;
    int64_t *sums = (int64_t *)r.memory, *own = sums + N;
    for (int i = 0; i < N; i++) host[i] = i;
    OK(device_write(s, sums, host, sizeof host));
    OK(device_write(s, own, host, sizeof host));
    for (int i = 0; i < CALLS; i++) event_init(&done[i]);
    for (int i = 0; i < CALLS; i++) {
        OK(comm_sum_i64(&r.all, s, sums, N, &done[i]));
        OK(stream_wait(s, &done[i]));
        if (i % 3 == 0) OK(comm_max_i64(&r.part, s, own, N, NULL));
    }
    OK(event_wait(&done[CALLS - 1], TIMEOUT_S));
    OK(device_read(s, host, sums, sizeof host));
    uint64_t factor = 1;
    for (int i = 0; i < CALLS; i++) factor *= (uint64_t)size;
    int64_t bad = 0;
    for (int i = 0; i < N; i++) bad += (uint64_t)host[i] != (uint64_t)i * factor;
    CHECK_MSG(!bad, "%lld sums are wrong", (long long)bad);
    for (int i = 0; i < CALLS; i++) event_release(&done[i]);
    close_rank(&r);
}

TEST(in_flight)
{
    NEED_GPUS(4);
    fork_ranks(in_flight, 4, &(How){ 0 }, -1, LIMIT_S);
    fork_ranks(in_flight, 2, &(How){ .staged = true }, -1, LIMIT_S);
}

/* ---- exchanges ---- */

static void exchanges(int rank, int size, void *arg)
{
    const How how = *(const How *)arg;
    Rank r;
    open_rank(&r, rank, size, how, TIMEOUT_S);
    CHECK((int)CASE_MEMORY_BYTES <= (int)MEMORY_BYTES);
    /* comparing over NCCL asks for that: the cases wait for data in between */
    const bool together = how.check && !how.staged;
    CaseRun all = { &r.all, &r.device.stream, 1, r.memory, together },
            part = { &r.part, &r.device.stream, 1, r.memory, 0 };
    OK(case_exchanges(&all, 1, 80));
    if (part.comm->size > 1) OK(case_exchanges(&part, 2, 40));
    close_rank(&r);
}

TEST(exchanges)
{
    NEED_GPUS(4);
    fork_ranks(exchanges, 2, &(How){ 0 }, -1, LIMIT_S);
    fork_ranks(exchanges, 4, &(How){ 0 }, -1, LIMIT_S);
    fork_ranks(exchanges, 4, &(How){ .check = true }, -1, LIMIT_S);
    fork_ranks(exchanges, 2, &(How){ .delay_ms = 1 }, -1, LIMIT_S);
}

TEST(staged_exchanges)
{
    NEED_GPUS(1);
    fork_ranks(exchanges, 2, &(How){ .staged = true }, -1, LIMIT_S);
    fork_ranks(exchanges, 4, &(How){ .staged = true, .check = true }, -1, LIMIT_S);
}

/* Longer than what is staged at a time, both ways at once, and an empty one between them. */
static void long_messages(int rank, int size, void *arg)
{
    enum { BYTES = 3 << 20 };
    static uint8_t host[BYTES];
    Rank r;
    open_rank(&r, rank, size, *(const How *)arg, TIMEOUT_S);
    Stream *s = &r.device.stream;
    for (int64_t i = 0; i < BYTES; i++) host[i] = (uint8_t)case_integer(7, rank, i);
    OK(device_write(s, r.memory, host, BYTES));
    const CommMessage m[] = { { .send = true, .peer = 1 - rank, .data = r.memory, .bytes = BYTES - rank },
                              { .send = true, .peer = 1 - rank },
                              { .peer = 1 - rank, .data = r.memory + BYTES, .bytes = BYTES - 1 + rank },
                              { .peer = 1 - rank } };
    OK(comm_exchange(&r.all, s, m, 4, NULL));
    OK(device_read(s, host, r.memory + BYTES, BYTES));
    int64_t wrong = 0;
    for (int64_t i = 0; i < m[2].bytes; i++) wrong += host[i] != (uint8_t)case_integer(7, 1 - rank, i);
    CHECK_MSG(!wrong, "%lld wrong bytes", (long long)wrong);
    CHECK(r.all.bytes[COMM_EXCHANGE] == BYTES - rank);
    close_rank(&r);
}

TEST(long_messages)
{
    NEED_GPUS(2);
    fork_ranks(long_messages, 2, &(How){ 0 }, -1, LIMIT_S);
    fork_ranks(long_messages, 2, &(How){ .staged = true }, -1, LIMIT_S);
    fork_ranks(long_messages, 2, &(How){ .staged = true, .check = true }, -1, LIMIT_S);
}

static Err open_grid_group(void *rank, Comm *c, GroupKind kind, const int *members, int size)
{
    Rank *r = rank;
    return comm_open_nccl(r->nccl, r->gloo, c, group_name(kind), members, size,
                          (NcclUse){ .messages = MESSAGES_ALL_PAIRS });
}

/* The groups of a pipeline: of a rank in the middle none is that of the ends. */
static void grid_worlds(int rank, int size, void *arg)
{
    static World w;
    Rank r;
    open_rank(&r, rank, size, (How){ 0 }, TIMEOUT_S);
    OK(world_open(&w, *(const Grid *)arg, rank, (CommOpener){ &r, open_grid_group }));
    for (int kind = 0; kind < WORLD_COMMS; kind++) {
        int64_t sum = rank + 1, want = 0;
        for (int p = 0; p < size; p++)
            if (case_together(w.grid, kind, rank, p)) want += p + 1;
        OK(device_write(&r.device.stream, r.memory, &sum, sizeof sum));
        OK(comm_sum_i64(&w.comm[kind], &r.device.stream, (int64_t *)r.memory, 1, NULL));
        OK(device_read(&r.device.stream, &sum, r.memory, sizeof sum));
        CHECK_MSG(sum == want, "%s of rank %d: %lld, not %lld", group_name(kind), rank, (long long)sum,
                  (long long)want);
    }
    world_close(&w);
    close_rank(&r);
}

TEST(grid_worlds)
{
    NEED_GPUS(4);
    fork_ranks(grid_worlds, 4, &(Grid){ .tp = 1, .dp = 1, .pp = 4 }, -1, LIMIT_S);
    fork_ranks(grid_worlds, 4, &(Grid){ .tp = 1, .dp = 2, .pp = 2, .order = ORDER_PP_DP, .bidirectional = true }, -1,
               LIMIT_S);
}

/* ---- rows beside products ---- */

enum { BAND_ROWS = 8 /* of a rank */, BAND_INPUTS = 16, BAND_OUTPUTS = 24, SCRATCH_BYTES = 64 << 10 };

/* Values so small that all sums are exact in 16 bits, whatever their order. */
static int row_value(int64_t n, int64_t i, int rank) { return (int)((n * 3 + i * 5 + n * i + rank * 7) % 3) - 1; }
static int weight_value(int64_t o, int64_t i, int rank) { return (int)((o * 11 + i * 13 + rank * 2) % 5) - 2; }

static Err put_values(Stream *s, Tensor t, int64_t first, int rank, int value(int64_t, int64_t, int))
{
    uint16_t host[SHARED_RANKS * BAND_ROWS * BAND_INPUTS];
    for (int64_t n = 0; n < t.dim[0]; n++)
        for (int64_t i = 0; i < BAND_INPUTS; i++)
            host[n * BAND_INPUTS + i] = bf16_from_float((float)value(first + n, i, rank));
    return device_write(s, t.data, host, tensor_bytes(t));
}

/* y = the rows x of all ranks times w, which is the same everywhere. */
static Err rows_come(Ctx *c, Tensor x, Tensor w, Tensor y)
{
    RowBands in;
    RowRun r;
    TRY(rows_in_begin(c, x, &in));
    for (int turn = 0; turn < in.count; turn++) {
        TRY(rows_in_band(c, &in, turn, &r));
        TRY(op(c->s, linear_fwd, .y = tensor_row_slice(y, r.first, r.count),
               .x = tensor_row_slice(in.rows, r.first, r.count), .w = w, .leaf = BAND_INPUTS));
    }
    return ERR_OK;
}

/* y = this rank's rows of the sum over ranks of x times w, or all of them if rows are not sharded. */
static Err rows_go(Ctx *c, Tensor x, Tensor w, Tensor y)
{
    RowBands out;
    TRY(rows_out_begin(c, y, c->bands, &out));
    for (int turn = 0; turn < out.count; turn++) {
        const RowRun r = rows_out_band(c, &out, turn);
        TRY(op(c->s, linear_fwd, .y = tensor_row_slice(out.rows, r.first, r.count),
               .x = tensor_row_slice(x, r.first, r.count), .w = w, .leaf = BAND_INPUTS));
        TRY(rows_out_send(c, &out, turn));
    }
    return reduce_rows_end(c, out.sum);
}

/* come: the rows of all ranks, times rank 0's weight; else rows from `first` on, each rank's times its own, summed. */
static void check_rows(Ctx *c, Tensor y, bool come, int64_t first, int ranks)
{
    uint16_t host[SHARED_RANKS * BAND_ROWS * BAND_OUTPUTS];
    int bad = 0;
    OK(device_read(c->s, host, y.data, tensor_bytes(y)));
    for (int64_t n = 0; n < y.dim[0]; n++)
        for (int64_t o = 0; o < BAND_OUTPUTS; o++) {
            int sum = 0;
            for (int r = 0; r < (come ? 1 : ranks); r++)
                for (int64_t i = 0; i < BAND_INPUTS; i++)
                    sum += row_value(first + n, i, r) * weight_value(o, i, r);
            bad += !(bf16_to_float(host[n * BAND_OUTPUTS + o]) == (float)sum);
        }
    CHECK_MSG(!bad, "%d bands, rows %s: %d of %lld wrong", c->bands, come ? "come" : "go", bad,
              (long long)tensor_count(y));
}

/* Once with `bands`; what lies in scratch and in y before is no number. */
static void in_bands(Ctx *c, char *memory, int rank, int ranks, int bands)
{
    const bool sharded = c->world->sp.size > 1;
    const int64_t all = ranks * BAND_ROWS, own = sharded ? BAND_ROWS : all;
    const Tensor x = tensor_of(memory, BF16, all, BAND_INPUTS);
    const Tensor w = tensor_of(memory + (1 << 20), BF16, BAND_OUTPUTS, BAND_INPUTS);
    const Tensor y = tensor_of(memory + (2 << 20), BF16, all, BAND_OUTPUTS);
    static uint8_t nothing[SCRATCH_BYTES];
    c->bands = bands;
    for (int come = 0; come < 1 + sharded; come++) {
        memset(nothing, 0xff, sizeof nothing);
        OK(device_write(c->s, c->scratch->base, nothing, SCRATCH_BYTES));
        OK(device_write(c->s, y.data, nothing, tensor_bytes(y)));
        OK(put_values(c->s, x, come ? rank * BAND_ROWS : 0, come ? 0 : rank, row_value));
        OK(put_values(c->s, w, 0, come ? 0 : rank, weight_value));
        const Tensor out = come ? y : tensor_row_slice(y, 0, own);
        OK(come ? rows_come(c, tensor_row_slice(x, 0, BAND_ROWS), w, y) : rows_go(c, x, w, out));
        CHECK(c->s->dev->beside == 0);
        check_rows(c, out, come, come || !sharded ? 0 : rank * BAND_ROWS, ranks);
        arena_release(c->scratch, 0);
    }
}

static void beside_products(int rank, int size, void *arg)
{
    const How how = *(const How *)arg;
    Rank r;
    Arena scratch;
    World world = { 0 };
    open_rank(&r, rank, size, how, TIMEOUT_S);
    arena_init(&scratch, "scratch", r.memory + (4 << 20), SCRATCH_BYTES);
    Ctx c = { .s = &r.device.stream, .world = &world, .scratch = &scratch, .dtype = BF16 };
    for (int sharded = 0; sharded < 2; sharded++) {
        Comm *group = sharded ? &world.sp : &world.tp, *other = sharded ? &world.tp : &world.sp;
        comm_open_self(other, "alone");
        if (how.staged) OK(comm_open_staged(0, r.gloo, group, "rows", all_ranks, size));
        else
            OK(comm_open_nccl(r.nccl, r.gloo, group, "rows", all_ranks, size,
                              (NcclUse){ .messages = MESSAGES_ALL_PAIRS }));
        for (int bands = 1; bands <= size; bands *= 2) in_bands(&c, r.memory, rank, size, bands);
        comm_close(&world.sp);
        comm_close(&world.tp);
    }
    close_rank(&r);
}

TEST(rows_in_bands)
{
    NEED_GPUS(2);
    fork_ranks(beside_products, gpus() < 4 ? 2 : 4, &(How){ 0 }, -1, LIMIT_S);
}

TEST(staged_rows_in_bands)
{
    NEED_GPUS(1);
    fork_ranks(beside_products, 4, &(How){ .staged = true }, -1, LIMIT_S);
}

/* ---- failures ---- */

/* Who learns of it by a message gets ERR_PEER, who only by the deadline ERR_HANG. The others wait for a message of rank
 * 1, or, with the deadline, for one of a rank that waits itself. */
static void one_dies_in_a_chain(int rank, int size, void *arg)
{
    const How how = *(const How *)arg;
    const bool silent = getenv("EMU_NCCL") != NULL;
    const CommMessage m = { .peer = (rank + size - 1) % size, .bytes = 1000, .what = { MESSAGE_GRADIENT, 3, 9 } };
    CommMessage receive = m;
    Rank r;
    int64_t one = 1;
    open_rank(&r, rank, size, how, silent ? SILENT_S : TIMEOUT_S);
    Stream *s = &r.device.stream;
    OK(device_write(s, r.memory, &one, sizeof one));
    OK(comm_sum_i64(&r.all, s, (int64_t *)r.memory, 1, NULL));
    OK(device_read(s, &one, r.memory, sizeof one));
    CHECK(one == size);
    shared_meet(size);
    if (rank == 1) kill(getpid(), SIGKILL);
    receive.data = r.memory;
    Err err = comm_exchange(&r.all, s, &receive, 1, NULL);
    if (!err) err = device_read(s, &one, r.memory, sizeof one);
    CHECK_MSG(err == (silent ? ERR_HANG : ERR_PEER), "%s: %s", err_name(err), err_message());
    if (silent)
        CHECK_MSG(strstr(err_message(), "to send: gradient of micro-batch 9 for stage 3) did not finish in 10"), "%s",
                  err_message());
    close_rank(&r);
}

TEST(a_rank_dies_in_a_chain)
{
    NEED_GPUS(4);
    fork_ranks(one_dies_in_a_chain, 4, &(How){ .staged = true }, 1, LIMIT_S);
    if (!emulated) SKIP("between GPUs of one host NCCL may notice or not");
    fork_ranks(one_dies_in_a_chain, 4, &(How){ 0 }, 1, LIMIT_S);
    setenv("EMU_NCCL", "silent", 1);
    fork_ranks(one_dies_in_a_chain, 4, &(How){ 0 }, 1, LIMIT_S);
    unsetenv("EMU_NCCL");
}

static void different_messages(int rank, int size, void *arg)
{
    Rank r;
    open_rank(&r, rank, size, *(const How *)arg, TIMEOUT_S);
    const CommMessage m = { .send = rank == 0, .peer = 1 - rank, .data = r.memory, .bytes = rank ? 700000 : 900000,
                            .what = { MESSAGE_ACTIVATION, 1, 4 } };
    int64_t host;
    Err err = comm_exchange(&r.all, &r.device.stream, &m, 1, NULL);
    if (!err) err = device_read(&r.device.stream, &host, r.memory, sizeof host);
    if (rank)
        CHECK_MSG(err == ERR_INTERNAL &&
                      strstr(err_message(), "message 0 from member 0 to member 1: sent as activation of "
                                            "micro-batch 4 for stage 1 of 900000 bytes, received as"),
                  "%s: %s", err_name(err), err_message());
    else CHECK_MSG(err != ERR_OK, "a message of another length was sent");
    close_rank(&r);
}

TEST(different_messages)
{
    NEED_GPUS(2);
    fork_ranks(different_messages, 2, &(How){ .check = true }, -1, LIMIT_S);
    fork_ranks(different_messages, 2, &(How){ .check = true, .staged = true }, -1, LIMIT_S);
}

static void one_dies(int rank, int size, void *arg)
{
    const How how = *(const How *)arg;
    Rank r;
    int64_t host[4] = { 1, 2, 3, 4 };
    const bool silent = getenv("EMU_NCCL") != NULL; /* only the deadline ends the wait */
    open_rank(&r, rank, size, how, silent ? SILENT_S : TIMEOUT_S);
    Stream *s = &r.device.stream;
    OK(device_write(s, r.memory, host, sizeof host));
    OK(comm_sum_i64(&r.all, s, (int64_t *)r.memory, 4, NULL));
    OK(device_read(s, host, r.memory, sizeof host));
    CHECK(host[3] == 4 * size);
    shared_meet(size);
    if (rank == 1) kill(getpid(), SIGKILL);
    Err err = comm_sum_i64(&r.all, s, (int64_t *)r.memory, 4, NULL);
    if (!err) err = device_read(s, host, r.memory, sizeof host);
    CHECK_MSG(err == (silent ? ERR_HANG : ERR_PEER), "%s: %s", err_name(err), err_message());
    CHECK_MSG(strstr(err_message(), "all"), "no group in '%s'", err_message());
    FAILS(comm_sum_i64(&r.all, s, (int64_t *)r.memory, 4, NULL), silent ? ERR_HANG : ERR_PEER, "all");
    close_rank(&r);
}

TEST(a_staged_rank_dies)
{
    NEED_GPUS(1);
    fork_ranks(one_dies, 3, &(How){ .staged = true }, 1, LIMIT_S);
}

TEST(a_rank_dies)
{
    NEED_GPUS(4);
    if (!emulated) SKIP("between GPUs of one host NCCL may notice or not");
    fork_ranks(one_dies, 4, &(How){ 0 }, 1, LIMIT_S);
    setenv("EMU_NCCL", "silent", 1);
    fork_ranks(one_dies, 4, &(How){ 0 }, 1, LIMIT_S);
    unsetenv("EMU_NCCL");
}

static void different_calls(int rank, int size, void *arg)
{
    Rank r;
    open_rank(&r, rank, size, *(const How *)arg, TIMEOUT_S);
    Stream *s = &r.device.stream;
    Err err = rank ? comm_sum_i64(&r.all, s, (int64_t *)r.memory, 4, NULL)
                   : comm_max_i64(&r.all, s, (int64_t *)r.memory, 4, NULL);
    CHECK_MSG(err == ERR_INTERNAL && strstr(err_message(), "max-i64 of 4") && strstr(err_message(), "sum-i64 of 4"),
              "%s: %s", err_name(err), err_message());
    close_rank(&r);
}

TEST(different_calls)
{
    NEED_GPUS(2);
    fork_ranks(different_calls, 2, &(How){ .check = true }, -1, LIMIT_S);
    fork_ranks(different_calls, 2, &(How){ .check = true, .staged = true }, -1, LIMIT_S);
}

static void *abort_soon(void *world)
{
    usleep(300 * 1000);
    nccl_world_abort(world, "the test says so");
    return NULL;
}

static void aborted(int rank, int size, void *arg)
{
    Rank r;
    pthread_t thread;
    open_rank(&r, rank, size, *(const How *)arg, TIMEOUT_S);
    Stream *s = &r.device.stream;
    int64_t host[4];
    if (rank == 1) pthread_create(&thread, NULL, abort_soon, r.nccl);
    if (rank == 1) {
        Err err = comm_sum_i64(&r.all, s, (int64_t *)r.memory, 4, NULL); /* rank 0 does not take part */
        if (!err) err = device_read(s, host, r.memory, sizeof host);
        CHECK_MSG(err == ERR_PEER && strstr(err_message(), "the test says so"), "%s", err_message());
        pthread_join(thread, NULL);
        shared_page->flag = 1;
    } else {
        for (const double end = test_now() + 20; !shared_page->flag && test_now() < end;) usleep(1000);
        nccl_world_abort(r.nccl, "rank 0, too");
        FAILS(comm_barrier(&r.all, s), ERR_PEER, "rank 0, too");
    }
    close_rank(&r);
}

TEST(aborted)
{
    NEED_GPUS(2);
    fork_ranks(aborted, 2, &(How){ 0 }, -1, LIMIT_S);
}

/* ---- a call that does not come back ---- */

static _Thread_local bool hangs;        /* where this thread asks next whether its call is through */
static _Thread_local time_t set_back_s; /* the wall clock, by so much, once this thread has read it */
static atomic_bool hanging, released;

int sched_yield(void)
{
    if (hangs) {
        hanging = true;
        while (!released) usleep(1000);
    }
    return (int)syscall(SYS_sched_yield);
}

int clock_gettime(clockid_t clock, struct timespec *t)
{
    const int rc = (int)syscall(SYS_clock_gettime, clock, t);
    if (clock == CLOCK_REALTIME) t->tv_sec += set_back_s, set_back_s = 0;
    return rc;
}

static void *abort_a_hang(void *world)
{
    while (!hanging) usleep(1000);
    set_back_s = 3600;
    nccl_world_abort(world, "the test says so");
    released = true;
    return NULL;
}

/* Nobody waits for it any longer than a few seconds, whatever the wall clock says. */
static void a_call_hangs(int rank, int size, void *arg)
{
    Rank r;
    pthread_t thread;
    open_rank(&r, rank, size, *(const How *)arg, TIMEOUT_S);
    pthread_create(&thread, NULL, abort_a_hang, r.nccl);
    hangs = true;
    FAILS(comm_sum_i64(&r.all, &r.device.stream, (int64_t *)r.memory, 4, NULL), ERR_PEER, "the test says so");
    hangs = false;
    pthread_join(thread, NULL);
    close_rank(&r);
}

TEST(a_call_hangs)
{
    NEED_GPUS(2);
    if (!emulated) SKIP("NCCL may be through with a call before it is asked");
    fork_ranks(a_call_hangs, 2, &(How){ 0 }, -1, LIMIT_S);
}

/* ---- what calls cost ---- */

static _Thread_local int naps;

int usleep(useconds_t us)
{
    naps++;
    return nanosleep(&(struct timespec){ us / 1000000, us % 1000000 * 1000 }, NULL);
}

/* NCCL is through with a call soon after it says that it is in progress: nobody sleeps meanwhile. */
static void prompt_calls(int rank, int size, void *arg)
{
    enum { CALLS = 20 };
    Rank r;
    Event done[CALLS];
    open_rank(&r, rank, size, *(const How *)arg, TIMEOUT_S);
    Stream *s = &r.device.stream;
    OK(device_zero(s, r.memory, CALLS * 4096));
    const int before = naps;
    for (int i = 0; i < CALLS; i++) {
        event_init(&done[i]);
        OK(comm_reduce_tree_f32(&r.all, s, tensor_of(r.memory + i * 4096, F32, 1000), &done[i]));
    }
    CHECK_MSG(!emulated || naps == before, "%d naps in %d calls", naps - before, CALLS);
    for (int i = 0; i < CALLS; i++) {
        OK(event_wait(&done[i], 0));
        event_release(&done[i]);
    }
    close_rank(&r);
}

TEST(prompt_calls)
{
    NEED_GPUS(2);
    fork_ranks(prompt_calls, 2, &(How){ 0 }, -1, LIMIT_S);
}

static int64_t free_bytes(int gpu)
{
    DeviceInfo info;
    OK(device_cuda_info(gpu, &info));
    return info.free_bytes;
}

/* What NCCL takes for its connections it has taken when groups are open: the run looks then at what is left. */
static void no_memory_later(int rank, int size, void *arg)
{
    Rank r;
    open_rank(&r, rank, size, *(const How *)arg, TIMEOUT_S);
    Stream *s = &r.device.stream;
    Comm *groups[] = { &r.all, &r.part };
    OK(device_zero(s, r.memory, 1 << 20));
    const int64_t before = free_bytes(rank);
    for (int i = 0; i < 2; i++) {
        Comm *c = groups[i];
        const int next = (c->rank + 1) % c->size, last = (c->rank + c->size - 1) % c->size;
        OK(comm_reduce_tree_f32(c, s, tensor_of(r.memory, F32, 500), NULL));
        OK(comm_all_gather(c, s, tensor_of(r.memory, F32, 100 * c->size), tensor_of(r.memory + 65536, F32, 100), NULL));
        OK(comm_reduce_scatter_i64(c, s, (int64_t *)r.memory, (int64_t *)(r.memory + 65536), 10, NULL));
        const CommMessage messages[] = { { .peer = next, .send = true, .data = r.memory, .bytes = 64 },
                                         { .peer = last, .data = r.memory + 4096, .bytes = 64 } };
        OK(comm_exchange(c, s, messages, 2, NULL));
    }
    CHECK_MSG(!emulated || free_bytes(rank) == before, "%lld bytes", (long long)(before - free_bytes(rank)));
    close_rank(&r);
}

TEST(no_memory_later)
{
    NEED_GPUS(4);
    fork_ranks(no_memory_later, 4, &(How){ 0 }, -1, LIMIT_S);
}

static void not_opened(int rank, int size, void *arg)
{
    NcclWorld *world;
    const char *what = arg;
    NcclOptions o = options_of(rank, size, rank, 2);
    if (!strcmp(what, "shared")) {
        o.gpu = 0;
        FAILS(nccl_world_open(&o, &world), ERR_CONFIG, "Duplicate GPU detected");
        CHECK(!world && !nccl_shares_gpus());
    } else if (!strcmp(what, "id")) {
        setenv("NCCL_COMM_ID", "127.0.0.1:5000", 1);
        FAILS(nccl_world_open(&o, &world), ERR_CONFIG, "NCCL_COMM_ID");
    } else if (strchr(what, '=')) {
        putenv(arg);
        FAILS(nccl_world_open(&o, &world), ERR_CONFIG, "for NVLS");
        CHECK(!strncmp(nccl_asks_for_nvls(), what, strcspn(what, "=")));
    } else if (rank) {
        CHECK(true); /* does not come */
    } else {
        FAILS(nccl_world_open(&o, &world), ERR_RENDEZVOUS, "within 2");
    }
}

TEST(not_opened)
{
    NEED_GPUS(2);
    fork_ranks(not_opened, 2, "shared", -1, LIMIT_S);
    fork_ranks(not_opened, 2, "id", -1, LIMIT_S);
    fork_ranks(not_opened, 2, "missing", -1, LIMIT_S);
    static char asks[][64] = { "NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE=2", "NCCL_ALGO=Ring,NVLS",
                               "NCCL_ALGO=allreduce:tree;reducescatter:nvlstree",
                               "NCCL_ALGO=allgather:nvls;allreduce:ring" };
    for (int i = 0; i < 5; i++) fork_ranks(not_opened, 1, asks[i], -1, LIMIT_S);
}

/* What the user set and does not ask for NVLS stays. */
static void opened(int rank, int size, void *arg)
{
    NcclWorld *world;
    NcclOptions o = options_of(rank, size, rank, TIMEOUT_S);
    if (arg) putenv(arg);
    OK(nccl_world_open(&o, &world));
    CHECK(!strcmp(getenv("NCCL_NVLS_ENABLE"), "0") && !nccl_asks_for_nvls());
    device_cuda_for_several();
    CHECK(!strcmp(getenv("CUDA_MODULE_LOADING"), "EAGER") && !strcmp(getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "32"));
    if (arg) CHECK(!strcmp(getenv("NCCL_ALGO"), strchr(arg, '=') + 1));
    nccl_world_close(world);
}

/* Gathers may have NVLS where NCCL has lists by function; all that adds is then without. */
static void opened_for_gathers(int rank, int size, void *version)
{
    NcclWorld *world;
    NcclOptions o = options_of(rank, size, rank, TIMEOUT_S);
    setenv("EMU_NCCL_VERSION", version, 1);
    setenv("NCCL_ALGO", "allgather:nvls,ring", 1);
    if (atoi(version) < 22400) {
        FAILS(nccl_world_open(&o, &world), ERR_CONFIG, "for NVLS");
        return;
    }
    OK(nccl_world_open(&o, &world));
    CHECK(!getenv("NCCL_NVLS_ENABLE") && !nccl_asks_for_nvls() && nccl_gathers_by_nvls());
    CHECK(!strncmp(getenv("NCCL_ALGO"), "allgather:nvls,ring;", 20));
    for (int i = 0; i < 3; i++) {
        static const char *const adds[] = { ";allreduce:^nvls,nvlstree", ";reducescatter:^nvls,nvlstree",
                                            ";reduce:^nvls,nvlstree" };
        CHECK(strstr(getenv("NCCL_ALGO"), adds[i]));
    }
    nccl_world_close(world);
}

TEST(opened_without_nvls)
{
    static char set[][64] = { "NCCL_ALGO=^NVLS,NVLSTree", "NCCL_ALGO=Ring",
                              "NCCL_ALGO=allreduce:^nvls;broadcast:ring" };
    NEED_GPUS(1);
    for (int i = -1; i < 3; i++) fork_ranks(opened, 1, i < 0 ? NULL : set[i], -1, LIMIT_S);
    if (emulated) fork_ranks(opened_for_gathers, 1, "22305", -1, LIMIT_S);
    fork_ranks(opened_for_gathers, 1, "22809", -1, LIMIT_S);
}

/* From 2.30.3 on NCCL can be asked to take ranks of one host with one GPU; an older one refuses them all the same. */
static void asked_to_share(int rank, int size, void *version)
{
    NcclWorld *world;
    setenv("EMU_NCCL_VERSION", version, 1);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    const bool can = nccl_shares_gpus();
    NcclOptions o = options_of(rank, size, 0, TIMEOUT_S);
    const Err err = nccl_world_open(&o, &world);
    CHECK_MSG(can == (atoi(version) >= 23003) && err == (can ? ERR_OK : ERR_CONFIG), "NCCL %s: %s", nccl_version(),
              err_message());
    nccl_world_close(world);
}

TEST(asked_to_share)
{
    NEED_GPUS(1);
    if (!emulated) SKIP("a GPU's NCCL has one version");
    fork_ranks(asked_to_share, 2, "23002", -1, LIMIT_S);
    fork_ranks(asked_to_share, 2, "23003", -1, LIMIT_S);
}

TEST_MAIN
