/*
 * Time and payload per second of communication between processes of this machine (loopback), for 2 and 4 ranks,
 * every kind, small to large: the shortest of several series. `bench_comm ranks_2`: with two only.
 */
#include "../test/fork_ranks.h"

static Err call(Comm *c, Stream *s, CommKind kind, int64_t *dst, int64_t *src, int64_t bytes)
{
    int64_t n = bytes / 8 / c->size * c->size, part = n / c->size;
    Tensor whole = { .data = src, .dim = { 2 * n }, .ld = 2 * n, .ndim = 1, .dtype = F32 };
    Tensor slice = { .data = dst, .dim = { 2 * part }, .ld = 2 * part, .ndim = 1, .dtype = F32 };
    switch (kind) {
    case COMM_ALL_GATHER: return comm_all_gather(c, s, whole, slice, NULL);
    case COMM_REDUCE_TREE_F32: return comm_reduce_tree_f32(c, s, whole, NULL);
    case COMM_REDUCE_SCATTER_TREE_F32: return comm_reduce_scatter_tree_f32(c, s, slice, whole, NULL);
    case COMM_REDUCE_SCATTER_I64: return comm_reduce_scatter_i64(c, s, dst, src, part, NULL);
    case COMM_SUM_I64: return comm_sum_i64(c, s, src, n, NULL);
    case COMM_MAX_I64: return comm_max_i64(c, s, src, n, NULL);
    default: return comm_barrier(c, s);
    }
}

static void measure(Comm *c, Stream *s, CommKind kind, int64_t bytes)
{
    int64_t *dst = calloc(1, (size_t)bytes + 64), *src = calloc(1, (size_t)bytes + 64);
    int calls = bytes > 8 << 20 ? 3 : bytes > 64 << 10 ? 20 : 200;
    double best = 1e9;
    for (int series = 0; series < 5; series++) {
        OK(comm_barrier(c, s));
        double t0 = test_now();
        for (int i = 0; i < calls; i++) OK(call(c, s, kind, dst, src, bytes));
        double t = (test_now() - t0) / calls;
        if (t < best) best = t;
    }
    int64_t before = c->bytes[kind];
    OK(call(c, s, kind, dst, src, bytes));
    if (c->rank == 0)
        printf("%-20s %d ranks %9lld bytes %10.1f us %7.3f GB/s sent\n", comm_kind_name(kind), c->size,
               (long long)bytes, best * 1e6, (double)(c->bytes[kind] - before) / best * 1e-9);
    free(dst);
    free(src);
}

static void rank_body(int rank, int size, void *arg)
{
    static const int all[] = { 0, 1, 2, 3 };
    static const int64_t sizes[] = { 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20 };
    (void)arg;
    Device device;
    GlooWorld *world;
    Comm c;
    OK(device_open(&device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    const GlooStore store = { shared_page, shared_set, shared_get };
    const GlooOptions o = { rank, size, "127.0.0.1", "a secret of tests", "a start", 30, store };
    OK(gloo_world_open(o, &world));
    OK(comm_open_gloo(world, &c, "world", all, size));
    for (int kind = 0; kind < COMM_KIND_COUNT; kind++)
        for (int i = 0; i < (kind == COMM_BARRIER ? 1 : 6); i++)
            measure(&c, &device.stream, (CommKind)kind, kind == COMM_BARRIER ? 0 : sizes[i]);
    comm_close(&c);
    gloo_world_close(world);
    device_close(&device);
}

TEST(ranks_2) { fork_ranks(rank_body, 2, NULL, -1, 300); }
TEST(ranks_4) { fork_ranks(rank_body, 4, NULL, -1, 300); }

TEST_MAIN
