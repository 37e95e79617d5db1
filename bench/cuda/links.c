/*
 * What NCCL moves between the GPUs of this machine, all of them up to 8, a process each: bytes that a rank sends a
 * second in the calls that training makes, beside the rate that predictions take (link.h).
 *
 *   links [--tiny] [--ranks N] [--json FILE]
 *
 * --ranks: so many processes, which share GPUs where there are fewer: whether NCCL works there, and not how fast.
 *
 * Bytes are those that a communicator counts, and `plan` with it: of the minimal algorithm, 2 (n-1)/n of the data for a
 * sum that all have, (n-1)/n for the others. Fails if ranks do not meet, or a call does; closes as a test does.
 */
#include "../link.h"
#include "base/clock.h"
#include "comm/gpu.h"
#include "fork_ranks.h"
#include "gpu.h"

enum { WARM_UP = 3, CALLS = 10, GPUS_MOST = 8, TIMEOUT_S = 60, LIMIT_S = 150, JSON_BYTES = 1 << 12 };
enum { LARGE_BYTES = 256 << 20, TINY_BYTES = 256 << 10 };

typedef struct {
    int64_t bytes; /* of data a rank */
    int gpus, ranks;
    const char *json;
} Options;

typedef struct {
    Device device;
    GlooWorld *gloo;
    NcclWorld *nccl;
    Comm all;
    char *memory; /* twice the data: in, out */
    int64_t bytes;
} Rank;

static Tensor part(const Rank *r, int64_t at, int64_t bytes)
{
    return tensor_of(r->memory + at, F32, bytes / (int64_t)sizeof(float));
}

/* Equal parts to and from each other rank. */
static Err exchange_all(Rank *r, int64_t share)
{
    CommMessage m[COMM_MESSAGES_MAX];
    int count = 0;
    for (int p = 0; p < r->all.size; p++) {
        if (p == r->all.rank) continue;
        m[count++] = (CommMessage){ .send = true, .peer = p, .data = r->memory + p * share, .bytes = share };
        m[count++] = (CommMessage){ .peer = p, .data = r->memory + r->bytes + p * share, .bytes = share };
    }
    return comm_exchange(&r->all, &r->device.stream, m, count, NULL);
}

static Err call(Rank *r, CommKind kind)
{
    Stream *s = &r->device.stream;
    const int64_t share = r->bytes / r->all.size;
    switch (kind) {
    case COMM_REDUCE_TREE_F32: return comm_reduce_tree_f32(&r->all, s, part(r, 0, r->bytes), NULL);
    case COMM_REDUCE_SCATTER_TREE_F32:
        return comm_reduce_scatter_tree_f32(&r->all, s, part(r, r->bytes, share), part(r, 0, r->bytes), NULL);
    case COMM_ALL_GATHER: return comm_all_gather(&r->all, s, part(r, 0, r->bytes), part(r, r->bytes, share), NULL);
    default: return exchange_all(r, share);
    }
}

static Err calls(Rank *r, CommKind kind, int count, double *seconds)
{
    TRY(comm_barrier(&r->all, &r->device.stream));
    TRY(device_sync(&r->device.stream));
    const double began = clock_s();
    for (int i = 0; i < count; i++) TRY(call(r, kind));
    TRY(device_sync(&r->device.stream));
    *seconds = clock_s() - began;
    return ERR_OK;
}

static Err measure(Rank *r, CommKind kind, JsonOut *j)
{
    double seconds;
    TRY(calls(r, kind, WARM_UP, &seconds));
    const int64_t before = r->all.sent_bytes;
    TRY(calls(r, kind, CALLS, &seconds));
    const double bytes = (double)(r->all.sent_bytes - before) / CALLS, rate = bytes * CALLS / seconds;
    if (r->all.rank) return ERR_OK;
    printf("%-24s %8.2f MB sent %9.3f ms %8.1f GB/s, %.2f of %.0f\n", comm_kind_name(kind), 1e-6 * bytes,
           1e3 * seconds / CALLS, 1e-9 * rate, rate / LINK, 1e-9 * LINK);
    json_open(j, NULL, '{');
    json_put_text(j, "call", comm_kind_name(kind));
    json_put_number(j, "bytes", bytes);
    json_put_number(j, "ms", 1e3 * seconds / CALLS);
    json_put_number(j, "gb_s", 1e-9 * rate);
    json_put_number(j, "share", rate / LINK);
    json_close(j, '}');
    return ERR_OK;
}

static Err open_rank(Rank *r, int rank, int size, int gpus)
{
    int members[GPUS_MOST];
    const int gpu = rank % gpus;
    void *memory;
    device_cuda_for_several();
    for (int i = 0; i < size; i++) members[i] = i;
    const GlooStore store = { shared_page, shared_set, shared_get };
    const GlooOptions host = { rank, size, "127.0.0.1", "a secret of benchmarks", "benchmark", TIMEOUT_S, store };
    TRY(gloo_world_open(host, &r->gloo));
    const NcclOptions o = { .rank = rank, .size = size, .gpu = gpu, .own_host = rank >= gpus,
                            .timeout_s = TIMEOUT_S, .store = store };
    TRY(nccl_world_open(&o, &r->nccl));
    TRY(comm_open_nccl(r->nccl, r->gloo, &r->all, "all", members, size, (NcclUse){ .messages = MESSAGES_ALL_PAIRS }));
    TRY(device_open(&r->device, (DeviceChoice){ .kind = DEVICE_CUDA, .index = gpu }));
    TRY(device_alloc(&r->device, 2 * r->bytes, &memory));
    r->memory = memory;
    return ERR_OK;
}

static void close_rank(Rank *r)
{
    device_free(&r->device, r->memory, 2 * r->bytes);
    device_close(&r->device);
    comm_close(&r->all);
    nccl_world_close(r->nccl);
    gloo_world_close(r->gloo);
}

static Err bench(Rank *r, const Options *o)
{
    static const CommKind kinds[] = { COMM_REDUCE_TREE_F32, COMM_REDUCE_SCATTER_TREE_F32, COMM_ALL_GATHER,
                                      COMM_EXCHANGE };
    char text[JSON_BYTES];
    JsonOut j;
    json_out_init(&j, text, sizeof text);
    json_open(&j, NULL, '{');
    if (r->all.rank == 0) TRY(gpu_describe(&j));
    json_put_int(&j, "gpus", o->gpus);
    json_put_int(&j, "ranks", r->all.size);
    json_put_text(&j, "nccl", nccl_version());
    json_put_number(&j, "predicted_gb_s", 1e-9 * LINK);
    json_open(&j, "calls", '[');
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) TRY(measure(r, kinds[i], &j));
    json_close(&j, ']');
    json_close(&j, '}');
    return r->all.rank ? ERR_OK : gpu_write_json(&j, text, o->json);
}

static void run_rank(int rank, int size, void *arg)
{
    const Options *o = arg;
    Rank r = { .bytes = o->bytes / size / 1024 * size * 1024 };
    Err err = open_rank(&r, rank, size, o->gpus);
    if (!err) err = bench(&r, o);
    CHECK_MSG(!err, "rank %d: %s", rank, err_message());
    close_rank(&r);
}

/* In a process of its own: CUDA does not survive a fork. */
static void count_gpus(int rank, int size, void *arg)
{
    (void)rank, (void)size, (void)arg;
    char why[256];
    shared_page->flag = device_cuda_count(why, sizeof why);
    CHECK(true);
}

static Options options = { .bytes = LARGE_BYTES };

TEST(links)
{
    fork_ranks(count_gpus, 1, NULL, -1, TIMEOUT_S);
    const int count = shared_page->flag, ranks = options.ranks ? options.ranks : count;
    if (count < 1 || ranks < 2) SKIP("two GPUs or more are needed, there are %d", count);
    options.gpus = count < GPUS_MOST ? count : GPUS_MOST;
    fork_ranks(run_rank, ranks < GPUS_MOST ? ranks : GPUS_MOST, &options, -1, LIMIT_S);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--tiny")) options.bytes = TINY_BYTES;
        else if (!strcmp(argv[i], "--ranks") && i + 1 < argc) options.ranks = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--json") && i + 1 < argc) options.json = argv[++i];
        else return fprintf(stderr, "usage: links [--tiny] [--ranks N] [--json FILE]\n"), 2;
    }
    return test_main(1, argv);
}
