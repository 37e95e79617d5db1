/*
 * What balances routers, as metrics have it (engine/expert_load.h): the same bits from every layout, and in closed form
 * where all logits are 0. The definition itself, against float64: test_moe_ops.c.
 */
#include "test.h"

#include "engine/expert_load.h"
#include "tiny.h"

typedef struct {
    ExpertLoads loads[16]; /* of each rank */
} Told;

static Err read_loads(Trainer *t, void *user)
{
    Told *told = user;
    return expert_load_read(t, &told->loads[t->world->rank]);
}

/* Loads that all ranks tell alike. */
static ExpertLoads told_by(TrainSpec spec, Grid grid, int steps)
{
    static Told told;
    const int blocks = spec.model.layers + spec.model.mtp.count;
    TinyRun run = { .spec = spec, .grid = grid, .steps = steps, .after = read_loads, .user = &told };
    memset(&told, 0, sizeof told);
    tiny_train(&run);
    CHECK_MSG(!run.err, "tp %d sp %d cp %d dp %d pp %d ep %d: %s", grid.tp, grid.sp, grid.cp, grid.dp, grid.pp, grid.ep,
              run.message);
    for (int r = 1; r < grid_size(run.grid); r++) {
        const ExpertLoads *a = &told.loads[0], *b = &told.loads[r];
        CHECK(a->aux_loss == b->aux_loss && a->z_loss == b->z_loss &&
              !memcmp(a->load, b->load, (size_t)blocks * sizeof *a->load));
    }
    return told.loads[0];
}

static void same_everywhere(const char *name, TrainSpec spec, const Grid *grids, int count)
{
    const ExpertLoads one = told_by(spec, (Grid){ .tp = 1, .dp = 1 }, 2);
    CHECK_MSG(isfinite(one.aux_loss) && isfinite(one.z_loss) && one.aux_loss + one.z_loss > 0, "%s: %g, %g", name,
              one.aux_loss, one.z_loss);
    for (int i = 0; i < count; i++) {
        const Grid g = grids[i];
        const ExpertLoads other = told_by(spec, g, 2);
        CHECK_MSG(other.aux_loss == one.aux_loss && other.z_loss == one.z_loss,
                  "%s, tp %d sp %d cp %d dp %d pp %d ep %d: aux %.17g, z %.17g, one rank: %.17g, %.17g", name, g.tp,
                  g.sp, g.cp, g.dp, g.pp, g.ep, other.aux_loss, other.z_loss, one.aux_loss, one.z_loss);
        CHECK_MSG(!memcmp(other.load, one.load, sizeof one.load), "%s, layout %d: loads", name, i);
    }
}

TEST(the_same_bits_from_every_layout)
{
    static const Grid grids[] = { { .tp = 2, .dp = 1, .sp = true }, { .tp = 1, .dp = 1, .cp = 2 },
                                  { .tp = 1, .dp = 1, .pp = 2 }, { .tp = 1, .dp = 2, .ep = 2 },
                                  { .tp = 2, .dp = 2, .sp = true, .ep = 4 } };
    TrainSpec spec = tiny_mixture(TINY_MIXTRAL, 2);
    same_everywhere("aux and z", spec, grids, 5);
    spec.model.moe.balance.z = 0;
    CHECK(told_by(spec, grids[0], 1).z_loss == 0);
    same_everywhere("with modules", tiny_further(tiny_mixture(TINY_DEEPSEEK, 2), 1), grids, 4);
    spec.model.moe.balance.global = true;
    same_everywhere("the batch so far", spec, grids, 3);
}

/* Weights of 0 make all logits 0: each score is 1 / E, so that the auxiliary loss is 1 however rows choose, and the
 * z-loss is the square of log E. */
TEST(in_closed_form)
{
    for (TinyMixture kind = 0; kind < TINY_MIXTURES; kind++) {
        TrainSpec spec = tiny_mixture(kind, 3);
        spec.model.init_std = 0;
        const double z = spec.model.moe.balance.z > 0 ? log(spec.model.moe.experts) : 0;
        const ExpertLoads one = told_by(spec, (Grid){ .tp = 1, .dp = 1 }, 1);
        CHECK_CLOSE(one.aux_loss, 1, 1e-6);
        CHECK_CLOSE(one.z_loss, z * z, 1e-6);
    }
}

TEST_MAIN
