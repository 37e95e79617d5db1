/* Who is slow, from made-up times: medians of peers, stages of one rank and of several, and when it is worth a word. */
#include <pthread.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "test.h"
#include "thread_ranks.h"
#include "train/rank_times.h"

enum { RANKS_MOST = 8 };

/* compute: ms of each rank. */
static MetricsRanks compare(Grid grid, const double *compute)
{
    int64_t ns[2 * RANKS_MOST] = { 0 };
    double sorted[RANKS_MOST];
    RankTimes t = { .ns = ns, .sorted = sorted };
    MetricsRanks m;
    for (int r = 0; r < grid_size(grid); r++) {
        ns[r] = (int64_t)(1e6 * compute[r]);
        ns[grid_size(grid) + r] = (int64_t)(1e6 * (200 - compute[r]));
    }
    rank_times_compare(&t, grid, &m);
    return m;
}

TEST(beside_the_median)
{
    const MetricsRanks m = compare((Grid){ .tp = 1, .cp = 1, .dp = 5, .pp = 1 }, (double[]){ 100, 104, 98, 141, 102 });
    CHECK(m.measured && m.slowest == 3);
    CHECK_CLOSE(m.lag_ms, 39, 1e-9);
    CHECK_CLOSE(m.lag, 39.0 / 102, 1e-12);
    CHECK(m.compute_ms[0] == 98 && m.compute_ms[1] == 102 && m.compute_ms[2] == 141);
    CHECK(m.wait_ms[0] == 59 && m.wait_ms[1] == 98 && m.wait_ms[2] == 102);
}

/* The lower of two ranks stands for both: in a mean half the lag would be lost. */
TEST(beside_one_other)
{
    const MetricsRanks m = compare((Grid){ .tp = 2, .cp = 1, .dp = 1, .pp = 1 }, (double[]){ 150, 100 });
    CHECK(m.slowest == 0 && m.lag_ms == 50 && m.lag == 0.5);
}

/* The last stage takes longer by itself: beside it stands its own peer, and the slow rank is of the first stage. */
TEST(beside_its_stage)
{
    Grid g = { .tp = 1, .cp = 1, .dp = 3, .pp = 2 };
    double compute[6];
    int slow = -1;
    for (int r = 0; r < 6; r++) {
        const GridCoords at = grid_coords(g, r);
        compute[r] = at.pp ? 180 + at.dp : 100;
        if (at.pp == 0 && at.dp == 1) compute[slow = r] = 130;
    }
    const MetricsRanks m = compare(g, compute);
    CHECK_MSG(m.slowest == slow && m.lag_ms == 30, "rank %d by %g ms", m.slowest, m.lag_ms);
}

/* Stages of one rank each have only each other. */
TEST(beside_other_stages)
{
    const MetricsRanks m = compare((Grid){ .tp = 1, .cp = 1, .dp = 1, .pp = 3 }, (double[]){ 100, 170, 101 });
    CHECK(m.slowest == 1 && m.lag_ms == 69);
}

TEST(nobody_is_slow)
{
    const MetricsRanks m = compare((Grid){ .tp = 1, .cp = 1, .dp = 2, .pp = 1 }, (double[]){ 0, 0 });
    CHECK(m.measured && m.slowest == 0 && m.lag_ms == 0 && m.lag == 0);
}

/* ---- over steps ---- */

/* The one of three ranks that is slow in a step; -1: none. */
static const int slow_in[] = { 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, -1, 1 };
enum { STEPS = sizeof slow_in / sizeof *slow_in };

typedef struct {
    CommHub *hub;
    Grid grid;
    int rank;
    MetricsRanks seen[STEPS];
    Err err;
} Member;

static Err share_all(Member *me)
{
    Device device;
    World world;
    RankTimes times;
    SetupArena memory;
    setup_init(&memory);
    TRY(device_open(&device, (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
    TRY(world_open_threads(&world, me->hub, me->grid, me->rank));
    TRY(rank_times_open(&times, &world, &device.stream, &memory));
    for (int i = 0; i < STEPS; i++) {
        const double compute_s = slow_in[i] == me->rank ? 0.0625 : 0.03125;
        TRY(rank_times_share(&times, compute_s, 0.0625 - compute_s, &me->seen[i]));
    }
    world_close(&world);
    device_close(&device);
    setup_release(&memory);
    return ERR_OK;
}

static void *member_main(void *arg)
{
    Member *me = arg;
    log_set_rank(me->rank, 3);
    me->err = share_all(me);
    return NULL;
}

/* Three ranks go through the steps; what their log says, which the caller frees. */
static char *log_of(Grid grid, Member m[3])
{
    pthread_t thread[3];
    CommHub *hub;
    char path[] = "/tmp/test_rank_times.XXXXXX", *text;
    int64_t size;
    close(mkstemp(path));
    CHECK(log_to_file(path));
    OK(comm_hub_open(3, 0, &hub));
    for (int r = 0; r < 3; r++) {
        m[r] = (Member){ .hub = hub, .grid = grid, .rank = r };
        pthread_create(&thread[r], NULL, member_main, &m[r]);
    }
    for (int r = 0; r < 3; r++) pthread_join(thread[r], NULL);
    comm_hub_close(hub);
    for (int r = 0; r < 3; r++) OK(m[r].err);
    OK(file_read_all(path, 1 << 16, &text, &size));
    unlink(path);
    return text;
}

TEST(notable_is_the_same_rank_five_times)
{
    Member m[3];
    char *text = log_of((Grid){ .tp = 1, .cp = 1, .dp = 3, .pp = 1 }, m), *first;
    for (int i = 0; i < STEPS; i++)
        for (int r = 0; r < 3; r++) {
            const MetricsRanks *s = &m[r].seen[i];
            CHECK_MSG(slow_in[i] < 0 ? s->lag == 0 : s->slowest == slow_in[i] && s->lag == 1,
                      "step %d, rank %d: %d by %g", i, r, s->slowest, s->lag);
            CHECK_MSG(s->notable == (i == 9 || i == 10), "step %d, rank %d", i, r);
        }
    first = strstr(text, "rank 1 (host '");
    CHECK_MSG(first && strstr(first, "pp 0, dp 1, cp 0, tp 0) is slow"), "%s", text);
    /* once, by rank 0 */
    CHECK(first && strstr(first, "now 100 %, and they wait for it") && !strstr(first + 10, "(host '"));
    CHECK(!strstr(text, "stages"));
    free(text);
}

/* Where ranks have no peers but other stages, the log does not call the one with most work a slow machine. */
TEST(stages_may_differ_in_work)
{
    Member m[3];
    char *text = log_of((Grid){ .tp = 1, .cp = 1, .dp = 1, .pp = 3 }, m);
    CHECK_MSG(strstr(text, "pp 1, dp 0, cp 0, tp 0) is slow") &&
                  strstr(text, "; its peers are other stages of the pipeline, which may have less work"), "%s", text);
    free(text);
}

TEST_MAIN
