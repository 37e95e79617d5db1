/*
 * Sums over ranks of 16-bit values (layer/sums.c) on ranks as threads: each has the bits of the tree over ranks in
 * fp32, rounded once, written here from its definition; for the bytes of 16 bits. Fewer rows than ranks, more messages
 * than an exchange has.
 */
#include "base/half.h"
#include "layer/layer.h"
#include "test.h"
#include "thread_ranks.h"

enum { RANKS = 11, ROWS_MOST = 64, COLUMNS = 5, SCRATCH_BYTES = 1 << 20 };

typedef struct {
    CommHub *hub;
    int rank, size;
    int64_t rows;
    bool sharded; /* each rank gets the sums of its rows, else all get all */
    Err err;
} SumRank;

/* Magnitudes differ, so that another order of additions, or one rounding more, gives other bits. */
static uint16_t value(int rank, int64_t i)
{
    uint64_t state = (uint64_t)rank << 32 | (uint64_t)i;
    const uint64_t x = test_rand(&state);
    return bf16_from_float(ldexpf((float)(int32_t)(x >> 32), (int)(x % 20) - 40));
}

/* Left the largest power of two of ranks, right the rest. */
static float tree(int first, int ranks, int64_t i)
{
    int left = 1;
    if (ranks == 1) return bf16_to_float(value(first, i));
    while (2 * left < ranks) left *= 2;
    return tree(first, left, i) + tree(first + left, ranks - left, i);
}

static Err sum(Ctx *c, const SumRank *t, Tensor x, Tensor y)
{
    Comm *group = &c->world->tp;
    TRY(t->sharded ? reduce_scatter_values(c, group, x, y) : reduce_values(c, group, x));
    const int64_t count = tensor_count(y), first = t->sharded ? t->rank * count : 0;
    const uint16_t *got = y.data;
    for (int64_t i = 0; i < count; i++)
        CHECK_MSG(got[i] == bf16_from_float(tree(0, t->size, first + i)),
                  "%d ranks, %lld rows, sharded %d: rank %d, element %lld: %g instead of %g", t->size,
                  (long long)t->rows, t->sharded, t->rank, (long long)i, bf16_to_float(got[i]),
                  tree(0, t->size, first + i));
    const int64_t part = 2 * COLUMNS * (t->sharded ? t->rows / t->size : t->rows);
    if (t->sharded) CHECK(group->sent_bytes == part * (t->size - 1));
    else if (t->rows % t->size == 0) CHECK(group->sent_bytes == 2 * part * (t->size - 1) / t->size);
    CHECK(c->scratch->used_bytes == 0);
    return ERR_OK;
}

static void *rank_main(void *arg)
{
    static const int all[RANKS] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 };
    SumRank *t = arg;
    Device device;
    World world = { 0 };
    Arena scratch;
    uint16_t x[ROWS_MOST * COLUMNS], part[ROWS_MOST * COLUMNS];
    char *memory = aligned_alloc(64, SCRATCH_BYTES);
    const int64_t rows = t->sharded ? t->rows / t->size : t->rows;
    OK(device_open(&device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1, .staging_bytes = SCRATCH_BYTES }));
    arena_init(&scratch, "scratch", memory, SCRATCH_BYTES);
    for (int64_t i = 0; i < t->rows * COLUMNS; i++) x[i] = value(t->rank, i);
    Ctx c = { .s = &device.stream, .world = &world, .scratch = &scratch, .dtype = BF16 };
    t->err = comm_open_threads(t->hub, &world.tp, "tp", t->rank, all, t->size);
    if (!t->err)
        t->err = sum(&c, t, tensor_of(x, BF16, t->rows, COLUMNS),
                     tensor_of(t->sharded ? part : x, BF16, rows, COLUMNS));
    comm_close(&world.tp);
    device_close(&device);
    free(memory);
    return NULL;
}

static void check_sums(int size, int64_t rows, bool sharded)
{
    SumRank t[RANKS];
    pthread_t thread[RANKS];
    CommHub *hub;
    OK(comm_hub_open(size, 0, &hub));
    for (int r = 0; r < size; r++) {
        t[r] = (SumRank){ .hub = hub, .rank = r, .size = size, .rows = rows, .sharded = sharded };
        CHECK(!pthread_create(&thread[r], NULL, rank_main, &t[r]));
    }
    for (int r = 0; r < size; r++) pthread_join(thread[r], NULL);
    for (int r = 0; r < size; r++) CHECK(!t[r].err);
    comm_hub_close(hub);
}

TEST(sums_of_all_ranks)
{
    static const int sizes[] = { 2, 3, 4, 7, 8, 9, 10, 11 };
    static const int64_t rows[] = { 1, 3, 8, 11, 56 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) check_sums(sizes[i], rows[k], false);
}

TEST(sums_of_own_rows)
{
    for (int size = 2; size <= RANKS; size++) {
        check_sums(size, size, true);
        check_sums(size, 5 * size, true);
    }
}

TEST_MAIN
