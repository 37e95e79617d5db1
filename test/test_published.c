/*
 * Predictions beside published runs (bench/published): FLOP a token are those that others count, and errors are no
 * larger than docs/published.md says. What makes them worse, in a step's ops and messages or in how long these are
 * taken to last, is seen here. No time is measured: all of it is arithmetic.
 */
#include "test.h"

#include "../bench/published/published.h"
#include "pipeline/simulate.h"

static Published rows, simumax;

static void read_all(void)
{
    if (rows.table.rows) return;
    OK(published_read("bench/published/rows.txt", &rows));
    OK(published_read("bench/published/simumax.txt", &simumax));
}

typedef enum { DENSE, MIXTURES, BOTH } Kind;

static Errors errors_of(const Published *p, const Rates *r, Kind kind)
{
    Errors e = { 0 };
    for (int i = 0; i < p->table.rows; i++)
        if (!is_out(p, i) && (kind == BOTH || is_mixture(p, i) == (kind == MIXTURES)))
            add_error(&e, error_of(p, i, run_time(&p->table, &p->run[i], r).seconds));
    return e;
}

static double mean_absolute(const Published *p, const Rates *r, Kind kind)
{
    const Errors e = errors_of(p, r, kind);
    return e.absolute / e.count;
}

/* The models as their authors count them, in billions; DeepSeek-V3 with its module for a further token. */
TEST(models_have_the_parameters_that_are_published)
{
    static const struct {
        const char *model;
        double billions;
    } cases[] = {
        { "llama2-7b", 6.738 },       { "llama2-13b", 13.016 },    { "llama2-70b", 68.977 },
        { "llama3-1b", 1.236 },       { "llama3-3b", 3.213 },      { "llama3-8b", 8.030 },
        { "llama3-70b", 70.554 },     { "llama3-405b", 405.853 },  { "qwen3-0.6b", .596 },
        { "qwen3-1.7b", 1.721 },      { "qwen3-4b", 4.022 },       { "qwen3-8b", 8.191 },
        { "qwen3-14b", 14.768 },      { "qwen3-32b", 32.762 },     { "qwen3-30b", 30.532 },
        { "qwen3-235b", 235.094 },    { "mixtral-8x7b", 46.703 },  { "mixtral-8x22b", 140.630 },
        { "gpt-oss-20b", 20.915 },    { "gpt-oss-120b", 116.829 }, { "deepseek-v2-lite", 15.706 },
        { "deepseek-v2", 235.741 },   { "deepseek-v3", 682.636 },  { "kimi-k2", 1026.408 },
        { "nemotron-340b", 341.029 },
    };
    static const char *const one_rank[] = { "run.device=cuda", "run.precision=bf16" };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[PATH_BYTES];
        Config c;
        TrainSpec spec;
        Grid grid;
        MemoryPlan plan;
        snprintf(path, sizeof path, "bench/published/models/%s.ini", cases[i].model);
        OK(config_read(&c, (ConfigSource){
                               .path = path, .overrides = one_rank, .override_count = 2, .world_size = 1 }));
        OK(grid_spec(&c, &grid));
        OK(train_spec(&c, c.model.vocab, &spec));
        OK(trainer_plan(&spec, grid, 0, &plan));
        CHECK(fabs(1e-9 * (double)plan.params.model - cases[i].billions) < .0006);
        config_release(&c);
    }
}

/* Published TFLOP/s over tokens/s. NeMo 24.07 counts attention to all keys, the others to those that are seen. */
TEST(flop_a_token_are_those_that_others_count)
{
    static const struct {
        const char *model;
        double gflop;
        bool all_keys;
    } cases[] = {
        { "gpt3-175b", 1077, true },     { "gpt3-20b", 128.2, true },   { "llama2-70b", 444.6, true },
        { "nemotron-340b", 2106, true }, { "llama3-8b", 51.48, false }, { "llama3-70b", 449.2, false },
        { "llama3-405b", 2524, false },  { "qwen3-30b", 23.01, false }, { "qwen3-235b", 148, false },
        { "deepseek-v3", 260, false },   { "kimi-k2", 204.5, false },
    };
    read_all();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const TableRow *r = NULL;
        const Run *run = NULL;
        for (int k = 0; k < rows.table.rows && !r; k++)
            if (!strcmp(word(&rows, k, "model"), cases[i].model)) r = &rows.table.row[k], run = &rows.run[k];
        CHECK_MSG(r, "%s", cases[i].model);
        if (!r) continue;
        const ModelSpec *m = &run->spec.model;
        const int64_t attention = model_attention_flop_per_token(m);
        const double flop =
            (double)(model_flop_per_token(m, run->tally[0].params) - (cases[i].all_keys ? 0 : attention / 2));
        CHECK_CLOSE(1e-9 * flop / cases[i].gflop, 1, .006, "%s", cases[i].model);
    }
}

TEST(published_steps_within_the_errors_that_are_documented)
{
    read_all();
    const Errors dense = errors_of(&rows, &published_rates, DENSE);
    const Errors mixtures = errors_of(&rows, &published_rates, MIXTURES);
    CHECK(dense.count == 27 && mixtures.count == 18);
    CHECK_MSG(dense.absolute / dense.count < 5.3 && fabs(dense.worst) < 14.0, "%.2f %.1f",
              dense.absolute / dense.count, dense.worst);
    CHECK_MSG(mixtures.absolute / mixtures.count < 8.1 && fabs(mixtures.worst) < 18.5, "%.2f %.1f",
              mixtures.absolute / mixtures.count, mixtures.worst);
    CHECK_MSG(fabs(dense.sum / dense.count) < 1 && fabs(mixtures.sum / mixtures.count) < 2, "%.2f %.2f",
              dense.sum / dense.count, mixtures.sum / mixtures.count);
}

TEST(figures_that_were_not_fitted_are_near)
{
    read_all();
    CHECK(mean_absolute(&rows, &begin_rates, DENSE) < 6);
    CHECK(mean_absolute(&rows, &begin_rates, MIXTURES) < 11);
}

TEST(small_runs_by_one_rate_of_their_machine)
{
    Rates r = published_rates;
    read_all();
    r.bf16 = SIMUMAX_BF16;
    const Errors e = errors_of(&simumax, &r, BOTH);
    CHECK(e.count == 22);
    CHECK_MSG(e.absolute / e.count < 3.5 && fabs(e.worst) < 8, "%.2f %.1f", e.absolute / e.count, e.worst);
    CHECK(mean_absolute(&simumax, &published_rates, BOTH) > 20); /* (so much that rate is worth) */
}

/* What `megatrain plan` says of our own program, whose kernels' rates are set to these: its clock, its overlap, and the
 * simulator agree with measured steps where recipes say nothing that it does not know. */
TEST(dense_rows_in_16_bits_by_the_planner_itself)
{
    const Published *const all[] = { &rows, &simumax };
    Errors e = { 0 };
    read_all();
    for (int k = 0; k < 2; k++) {
        Rates r = published_rates;
        if (k) r.bf16 = SIMUMAX_BF16;
        for (int i = 0; i < all[k]->table.rows; i++) {
            double seconds;
            if (is_out(all[k], i) || !plan_can_tell(&all[k]->table, &all[k]->run[i])) continue;
            OK(plan_time_of(&all[k]->table, &all[k]->run[i], &r, &seconds));
            add_error(&e, error_of(all[k], i, seconds));
        }
    }
    CHECK(e.count == 20);
    CHECK_MSG(e.absolute / e.count < 4.8 && fabs(e.worst) < 15.5, "%.2f %.1f", e.absolute / e.count, e.worst);
}

TEST(memory_of_small_runs)
{
    Errors planned = { 0 }, kept = { 0 };
    read_all();
    for (int i = 0; i < simumax.table.rows; i++) {
        const double measured = number(&simumax, i, "gib") * 1073741824.0;
        double bytes, dummies;
        OK(memory_of(&simumax.run[i], &bytes, &dummies));
        add_error(&planned, percent(bytes, measured));
        add_error(&kept, percent(bytes + dummies, measured));
    }
    CHECK(planned.count == 22 && fabs(planned.worst) < 7 && planned.absolute / planned.count < 2.6);
    CHECK(fabs(kept.worst) < 2.5 && kept.absolute / kept.count < 1);
}

/* Facts of recipes are worth what they are said to be: without one, its rows are further off. */
TEST(a_fact_left_out_is_missed)
{
    static const char *const facts[] = { "experts", "attention" };
    read_all();
    for (int k = 0; k < 2; k++) {
        double with = 0, without = 0;
        int count = 0;
        for (int i = 0; i < rows.table.rows; i++) {
            Run *run = &rows.run[i];
            const Recipe all = run->recipe;
            if (is_out(&rows, i) || !fact(&all, facts[k]) || fact_is(&all, facts[k], "one")) continue;
            with += fabs(error_of(&rows, i, run_time(&rows.table, run, &published_rates).seconds));
            run->recipe.count = 0;
            for (int n = 0; n < all.count; n++)
                if (strncmp(all.fact[n], facts[k], strlen(facts[k])) != 0)
                    run->recipe.fact[run->recipe.count++] = all.fact[n];
            without += fabs(error_of(&rows, i, run_time(&rows.table, run, &published_rates).seconds));
            run->recipe = all;
            count++;
        }
        CHECK_MSG(count > 5 && without > 1.5 * with, "%s: %d rows, %.1f and %.1f", facts[k], count,
                  with / count, without / count);
    }
}

/* Stages as of a model with a head: the last takes `last` times the others. */
static double simulated(int ranks, int chunks, int microbatches, double last)
{
    enum { STAGES_MOST = 64 };
    StageCost cost[STAGES_MOST];
    const ScheduleSpec spec = { .name = chunks > 1 ? "interleaved" : "1f1b",
                                .ranks = ranks,
                                .chunks = chunks,
                                .microbatches = microbatches };
    Schedule s;
    Simulation sim;
    for (int i = 0; i < ranks * chunks; i++) cost[i] = (StageCost){ 1, 1, 1 };
    cost[ranks * chunks - 1] = (StageCost){ last, last, last };
    OK(schedule_make(&spec, &s));
    OK(simulate(&s, &(SimulateCosts){ .stage = cost }, &sim));
    const double makespan = sim.makespan;
    simulation_free(&sim, &s);
    schedule_free(&s);
    return makespan;
}

TEST(a_pipeline_in_closed_form_beside_the_simulator)
{
    static const struct {
        int ranks, chunks, microbatches;
        double last, within;
    } cases[] = {
        { 2, 1, 8, 1, 1e-9 },  { 4, 1, 16, 1, 1e-9 },  { 8, 1, 64, 1.3, 1e-9 }, { 8, 1, 32, 2, 1e-9 },
        { 4, 5, 32, 1, 1e-9 }, { 8, 4, 64, 1.5, .01 }, { 8, 5, 128, 1.5, .01 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int ranks = cases[i].ranks, chunks = cases[i].chunks;
        const double slowest = 3 * (chunks - 1 + cases[i].last), all = 3 * chunks * (ranks - 1) + slowest;
        const double closed = cases[i].microbatches * slowest + pipeline_bubble(all, slowest, chunks);
        const double exact = simulated(ranks, chunks, cases[i].microbatches, cases[i].last);
        CHECK_CLOSE(closed / exact, 1, cases[i].within, "%d ranks, %d chunks, last %g: %g, not %g", ranks,
                    chunks, cases[i].last, closed, exact);
    }
}

/* One tile of 128 x 256 on each multiprocessor: twice its elements times the sum's length, over the rate of one. */
TEST(a_product_of_one_wave_by_hand)
{
    const Machine m = {
        .bf16 = 100e12, .fp8 = 200e12, .memory = 1e15, .multiprocessors = 100, .host_devices = 8
    };
    Rates r = { .bf16 = .5, .fp8 = .5, .depth = 0, .memory = 1 };
    const Product p = { .rows = 128 * 100, .columns = 256, .depth = 1000, .count = 1 };
    const double one = 2. * 128 * 256 * 1000 / (.5 * 100e12 / 100);
    CHECK_CLOSE(product_time(&m, &r, p, false, false, false) / one, 1, 1e-12, "one wave");
    r.depth = 500;
    CHECK_CLOSE(product_time(&m, &r, p, false, false, false) / one, 1.5, 1e-12, "half as deep again");
    r.depth = 0;
    const Product more = { .rows = 128 * 100 + 1, .columns = 256, .depth = 1000, .count = 1 };
    const double longer = product_time(&m, &r, more, false, false, false) / one;
    CHECK(longer > 1.3 && longer <= 2);
}

TEST_MAIN
