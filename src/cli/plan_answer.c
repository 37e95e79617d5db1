/* See plan.h: the first lines of a plan, which answer what it is asked for. */
#include <math.h>
#include <stdio.h>

#include "base/processors.h"
#include "base/units.h"
#include "cli/plan.h"

/* ---- does it fit? ---- */

static void put_communicators(const PlanTable *t)
{
    const int count = world_groups(t->grid), pairs = plan_pairs(t);
    if (count) printf(" and %d communicator%s", count, count == 1 ? "" : "s");
    if (pairs) printf(", with %d pair%s of ranks on a host", pairs, pairs == 1 ? "" : "s");
}

static void put_fit(const PlanTable *t)
{
    char a[UNITS_BYTES], b[UNITS_BYTES], c[UNITS_BYTES], sold[32] = "there";
    const char *fits = plan_fits(t) ? "yes" : "no";
    units_bytes(a, plan_largest_total(t));
    units_bytes(b, t->target->memory_mib << 20);
    if (t->target->processors > 0) {
        printf("fits there: %s (%s of each rank, %s for all)\n", fits, a, b);
        return;
    }
    if (t->target->sold_gb > 0) snprintf(sold, sizeof sold, "%g GB", t->target->sold_gb);
    printf("fits %s: %s (%s of %s, and up to %s for CUDA's libraries", sold, fits, a, b,
           units_bytes(c, plan_library_bytes(t)));
    put_communicators(t);
    puts(")");
}

/* ---- how long? ---- */

static int64_t steps_of(const Config *c)
{
    return c->train.stop_at && c->train.stop_at < c->derived.steps ? c->train.stop_at : c->derived.steps;
}

static void put_time(const PlanTable *t)
{
    char step[UNITS_BYTES], run[UNITS_BYTES], steps[32], tokens[32];
    const Prediction *p = &t->predicted;
    printf("a step of %s, %s tokens/s; all %s steps %s (predicted for %s, not measured)\n", units_step(step, p->step_s),
           units_commas(tokens, llround(p->tokens_s)), units_commas(steps, steps_of(t->cfg)),
           units_seconds(run, p->step_s * (double)steps_of(t->cfg)), t->target->name);
}

/*
 * A processor's rates in whole steps, GFLOP/s in fp32: the least of small models, the most of large ones, as
 * docs/speed.md has them for AVX-512. Nothing is timed here, so that a plan is the same whatever else the machine does.
 */
static const struct {
    double least, most;
} rates[ISA_COUNT] = { [ISA_AVX512] = { 25, 100 }, [ISA_AVX2] = { 12, 50 }, [ISA_C] = { 1, 6 } };
static const double STEP_MOST_S = 0.02; /* what a step of a tiny model may take beside its FLOP */

/* A guess for the processors of this machine, where ranks have one each; within a factor, and said so. */
static void put_guess(const PlanTable *t)
{
    const double steps = (double)steps_of(t->cfg), flop = plan_flop(t);
    const int ranks = grid_size(t->grid), processors = processors_share(1, 1);
    const Isa isa = isa_best();
    char least[UNITS_BYTES], most[UNITS_BYTES], count[32];
    if (t->spec.device.kind != DEVICE_CPU || ranks > processors || !(rates[isa].least > 0)) return;
    const double narrow = t->spec.compute == F32 ? 1 : 2; /* products of 16 bits, where there are any */
    const double most_s = steps * (flop / (1e9 * rates[isa].least * processors) + STEP_MOST_S);
    char time[80] = "less than a second";
    if (most_s >= 1)
        snprintf(time, sizeof time, "about %s to %s",
                 units_seconds(least, steps * flop / (1e9 * rates[isa].most * narrow * processors)),
                 units_seconds(most, most_s));
    printf("%s steps take %s on the %d processor%s of this machine (a guess from FLOP; doctor --calibrate "
           "measures)\n",
           units_commas(count, steps_of(t->cfg)), time, processors, processors == 1 ? "" : "s");
}

void plan_put_answer(const PlanTable *t)
{
    char a[UNITS_BYTES], b[UNITS_BYTES];
    if (t->target) put_fit(t);
    if (t->has_time) put_time(t);
    else if (!t->target) put_guess(t);
    if (t->chosen) printf("train.micro_batch=auto: %s\n", t->chosen);
    printf("a rank takes %s%s, a checkpoint %s\n\n", t->count > 1 ? "at most " : "",
           units_bytes(a, plan_largest_total(t)), units_bytes(b, plan_checkpoint(t)));
}
