/*
 * The order in which grouped products compute their tiles (cuda/grouped_order.h, the kernel's own): each tile once, and
 * what device memory serves by a model of L2, near what any order takes.
 */
#include "../bench/l2_model.h"
#include "test.h"

/* Numbers blocks as grids do: down all rows of a column. */
static GroupedPlace down_columns(uint32_t block, uint32_t rows, uint32_t columns)
{
    (void)columns;
    return (GroupedPlace){ block % rows, block / rows };
}

TEST(each_tile_once)
{
    static const uint32_t sizes[] = { 1, 2, 15, 16, 17, 31, 32, 40, 129 };
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (int i = 0; i < SIZES; i++)
        for (int j = 0; j < SIZES; j++) {
            const uint32_t rows = sizes[i], columns = sizes[j];
            uint8_t times[129 * 129] = { 0 };
            int wrong = 0;
            for (uint32_t n = 0; n < rows * columns; n++) {
                const GroupedPlace p = grouped_place(n, rows, columns);
                if (p.row >= rows || p.column >= columns || times[p.row * columns + p.column]++) wrong++;
            }
            CHECK_MSG(wrong == 0, "%u x %u tiles: %d beside or twice", rows, columns, wrong);
        }
}

/* The last of a large grid: no product of numbers overflows. */
TEST(large_grids)
{
    const uint32_t rows = 1u << 16, columns = 1u << 15;
    const GroupedPlace p = grouped_place(rows * columns - 1, rows, columns);
    CHECK(p.row == rows - 1 && p.column == columns - 1);
}

/* ---- bytes ---- */

typedef struct {
    const char *name;
    GroupedShape shape;
} Case;

/* ep 8, 8,192 tokens on each rank, even routing. fc1 has gate and up. */
static const Case cases[] = {
    { "qwen3-30b fc1", { 65536, 1536, 2048, 16, false } },
    { "qwen3-30b fc1, dx", { 65536, 2048, 1536, 16, false } },
    { "qwen3-30b fc1, dw", { 1536, 2048, 4096, 16, true } },
    { "qwen3-30b fc2", { 65536, 2048, 768, 16, false } },
    { "qwen3-30b fc2, dx", { 65536, 768, 2048, 16, false } },
    { "qwen3-30b fc2, dw", { 2048, 768, 4096, 16, true } },
    { "mixtral-8x7b fc1", { 16384, 28672, 4096, 1, false } },
    { "mixtral-8x7b fc1, dx", { 16384, 4096, 28672, 1, false } },
    { "mixtral-8x7b fc1, dw", { 28672, 4096, 16384, 1, true } },
    { "mixtral-8x7b fc2", { 16384, 4096, 14336, 1, false } },
    { "mixtral-8x7b fc2, dx", { 16384, 14336, 4096, 1, false } },
    { "mixtral-8x7b fc2, dw", { 4096, 14336, 16384, 1, true } },
};
enum { CASES = sizeof cases / sizeof *cases };

/* Each matrix once: in 16 bits, but dw in 32. */
static double written(GroupedShape s)
{
    return (double)s.rows * (double)s.columns * (s.dw ? 4.0 * s.experts : 2.0);
}

static double each_once(GroupedShape s)
{
    const double a = (double)s.rows * (double)s.depth * (s.dw ? s.experts : 1), b = (double)s.columns * (double)s.depth;
    return 2 * (a + b * s.experts) + written(s);
}

/* What waves of W tiles read that share nothing with the wave before: a tile has two panels, and W tiles, as a square,
 * 2 sqrt(W). */
static double squares_apart(GroupedShape s)
{
    const double tiles = (double)(l2_tiles(s.rows) * l2_tiles(s.columns)) * (s.dw ? s.experts : 1);
    return 2 / sqrt(L2_WAVE) * tiles * (double)(L2_TILE * s.depth) * 2 + written(s);
}

static void check_case(const Case *c)
{
    const double is = (double)grouped_traffic(c->shape, grouped_place, L2_BYTES);
    const double was = (double)grouped_traffic(c->shape, down_columns, L2_BYTES);
    const double once = each_once(c->shape), apart = squares_apart(c->shape);
    const double fits = (double)grouped_traffic(c->shape, grouped_place, L2_BYTES / 2);
    printf("   %-22s each once %6.2f GB, down columns %6.2f, in bands %6.2f (half the L2: %6.2f)\n", c->name,
           once * 1e-9, was * 1e-9, is * 1e-9, fits * 1e-9);
    CHECK_MSG(is >= once * 0.999, "%s: fewer bytes than there are", c->name);
    CHECK_MSG(is <= 1.2 * once || is <= 1.3 * apart, "%s: %g bytes, each once %g, squares %g", c->name, is, once,
              apart);
    CHECK_MSG(fits <= 1.5 * once || fits <= 1.3 * apart, "%s: %g bytes with half the L2", c->name, fits);
}

TEST(bytes_of_memory)
{
    for (int i = 0; i < CASES; i++) check_case(&cases[i]);
}

/* The model itself: what is counted by hand. */
TEST(model)
{
    enum { ONE = L2_TILE };
    /* 2 x 3 tiles at once: each panel once */
    const GroupedShape small = { 2 * ONE, 3 * ONE, 4 * ONE, 1, false };
    CHECK(grouped_traffic(small, grouped_place, L2_BYTES) == (int64_t)each_once(small));
    /* Two waves of one column: the weights stay where L2 holds them, else they come once a wave */
    const GroupedShape tall = { 528 * ONE, ONE, 4 * ONE, 1, false };
    CHECK(grouped_traffic(tall, grouped_place, L2_BYTES) == (int64_t)each_once(tall));
    CHECK(grouped_traffic(tall, grouped_place, 300 * (int64_t)L2_PIECE) ==
          (int64_t)each_once(tall) + 4 * (int64_t)L2_PIECE);
    /* dw: a product for each expert, results of 4 bytes */
    const GroupedShape dw = { 2 * ONE, 2 * ONE, 4 * ONE, 3, true };
    CHECK(grouped_traffic(dw, grouped_place, L2_BYTES) == (int64_t)each_once(dw));
}

TEST_MAIN
