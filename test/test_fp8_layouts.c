/*
 * Training by operands of 8 bits, or 4 (layer/fp8.c): gradients are near those of bf16; blocks that are kept in bf16
 * are; codes that are kept are those of the weights that are there. tiny.h holds every step to the planned FLOP, bytes,
 * messages and memory. That layouts have the bits of one rank is test_array's.
 */
#include <math.h>

#include "base/fp8.h"
#include "test.h"
#include "tiny.h"

enum { STEPS = 4 };

/* Under a sanitizer (MEGATRAIN_LAYOUTS=brief) two steps, whose memory is looked at: numbers are compared without it. */
static int steps_of(int steps) { return brief() && steps > 2 ? 2 : steps; }

typedef struct {
    int dp, tp, sp, pp, micro, threads;
    int zero;
    const char *schedule;
    int ep; /* of a mixture; 0 = 1 */
} Layout;

static TinyRun run_of(TrainSpec spec, Layout l, int steps)
{
    TinyRun r = { .spec = spec, .grid = { .tp = l.tp, .dp = l.dp, .sp = l.sp, .pp = l.pp, .ep = l.ep },
                  .steps = steps };
    r.spec.micro_batch = l.micro;
    r.spec.device.threads = l.threads;
    r.spec.update.zero = l.zero;
    r.spec.update.bucket_bytes = 64 << 10;
    r.spec.update.overlap_grad = r.spec.update.overlap_param = l.zero > 0;
    if (l.schedule) r.spec.pipeline.schedule = l.schedule;
    return r;
}

/* Wide enough for ranks to have whole blocks. */
static TrainSpec spec_of(TrainSpec s, Fp8Recipe recipe, int keep)
{
    const int times = recipe == FP8_BLOCKWISE ? 4 : 2;
    s.compute = BF16;
    s.model.hidden *= times, s.model.ffn *= times, s.model.head_dim *= times;
    s.model.layers = 2 + keep;
    s.model.fp8 = fp8_between(recipe, s.model.layers, keep);
    s.update.lr.lr = 3e-3; /* (wider than others of tiny.h) */
    return s;
}

/* Looks at all linear layers' inputs. Mixed ones have sums of 16 numbers over 4, and as many squares in all. */
static Err look_at_inputs(Trainer *t, void *user)
{
    const ExecutorStage *s = &t->executor.stages[0];
    const int count = fp8_amax_count(t->spec.model.fp8.recipe);
    for (int id = 0; id < s->params->reg->count; id++) {
        const int64_t *amax = (const int64_t *)s->slots[0].slot.amax.data + count * id;
        const double plain = (double)half_float_of((uint32_t)amax[0]);
        const double mixed = (double)half_float_of((uint32_t)amax[count - 1]), near = 1 + 1e-6;
        if (!(s->params->reg->items[id].spec.flags & PARAM_EIGHT_BITS)) continue;
        CHECK_MSG(plain > 0 && isfinite(plain), "input of weight %d: %g", id, plain);
        CHECK_MSG(mixed <= 4 * near * plain && 4 * near * mixed >= plain, "weight %d: %g, mixed %g", id, plain, mixed);
        ++*(int *)user;
    }
    return ERR_OK;
}

/* (Where it is missing all trains as well: numbers are scaled by 1.) */
TEST(each_input_has_its_largest_magnitude)
{
    for (Fp8Recipe k = FP8_TENSORWISE; k < FP8_RECIPES; k++) {
        int seen = 0;
        if (!fp8_facts(k)->tensor) continue;
        TinyRun r = run_of(spec_of(tiny_gpt2(), k, 0), (Layout){ 1, 1, 0, 1, 2, 1 }, 1);
        r.after = look_at_inputs, r.user = &seen;
        tiny_train(&r);
        CHECK_MSG(!r.err && seen == 4 * r.spec.model.layers, "%s: %d inputs %s", fp8_facts(k)->name, seen, r.message);
    }
}

TEST(codes_of_4_bits_are_refused_on_gpus)
{
    static const int capabilities[] = { 89, 90, 100, 120 };
    const Fp8Spec four = { .recipe = FP8_NVFP4 }, eight = { .recipe = FP8_TENSORWISE };
    for (int i = 0; i < 4; i++) {
        OK(fp8_spec_on_gpu(&eight, capabilities[i], "a GPU"));
        CHECK(fp8_spec_on_gpu(&four, capabilities[i], "a GPU") == ERR_CONFIG &&
              strstr(err_message(), E2M1_NOT_ON_GPUS));
    }
}

/* Sequences that ranks share, or that pass in slices, have the losses of one rank, not its bits. */
TEST(shared_sequences)
{
    for (Fp8Recipe k = FP8_TENSORWISE; k < FP8_RECIPES; k++) {
        TrainSpec s = spec_of(tiny_llama(), k, 0);
        s.exact = false;
        const int steps = steps_of(STEPS);
        TinyRun one = run_of(s, (Layout){ 1, 1, 0, 1, 2, 1 }, steps);
        TinyRun shared = run_of(s, (Layout){ 1, 2, 1, 1, 2, 1 }, steps),
                sliced = run_of(s, (Layout){ 1, 1, 0, 2, 2, 1 }, steps);
        shared.grid.cp = 2;
        sliced.spec.pipeline.schedule = "seq1f1b", sliced.spec.pipeline.slices = 2;
        tiny_train(&one), tiny_train(&shared), tiny_train(&sliced);
        CHECK_MSG(!one.err && !shared.err && !sliced.err, "%s %s %s", one.message, shared.message, sliced.message);
        for (int i = 0; i < steps; i++) {
            /* (what is rounded another way grows from step to step) */
            const double bound = i ? 5e-3 : k == FP8_NVFP4 ? 1e-3 : 2e-4;
            CHECK_CLOSE(shared.loss[i], one.loss[i], bound, "%s, step %d", fp8_facts(k)->name, i);
            CHECK_CLOSE(sliced.loss[i], one.loss[i], bound, "%s, step %d", fp8_facts(k)->name, i);
        }
    }
}

/* ---- what is kept of weights ---- */

typedef struct {
    double loss[2], eval[2];
} Further;

static Err go_on(Trainer *t, void *user)
{
    Further *f = user;
    StepReport report;
    int64_t counted;
    for (int i = 0; i < 2; i++) {
        TRY(trainer_eval(t, tiny_source(t), 0, t->spec.global_batch, &f->eval[i], &counted));
        param_store_forget(&t->stores[0]);
    }
    for (int i = 0; i < 2; i++) {
        TRY(tiny_step(t, &report));
        f->loss[i] = report.loss;
    }
    return ERR_OK;
}

/* Largest magnitudes of weights, and their codes, are those of the weights that are there: an evaluation and a step
 * make them anew, so that one between two steps changes nothing. */
TEST(weights_that_have_changed)
{
    for (int keeps = 0; keeps < 2; keeps++) {
        Further f = { 0 };
        TrainSpec s = spec_of(tiny_gpt2(), FP8_TENSORWISE, 0);
        s.model.fp8.keeps_weights = keeps;
        TinyRun all = run_of(s, (Layout){ 1, 1, 0, 1, 2, 1 }, 4), parted = run_of(s, (Layout){ 1, 1, 0, 1, 2, 1 }, 2);
        parted.after = go_on, parted.user = &f;
        tiny_train(&all), tiny_train(&parted);
        CHECK_MSG(!all.err && !parted.err, "%s %s", all.message, parted.message);
        CHECK(f.loss[0] == all.loss[2] && f.loss[1] == all.loss[3]);
        CHECK(f.eval[0] == f.eval[1]);
    }
}

typedef struct {
    double loss[2];
    int64_t ops[2], casts; /* of one batch, of two; weights that are cast */
} Batches;

static Err evaluate(Trainer *t, void *user)
{
    Batches *b = user;
    int64_t counted;
    for (int i = 0; i < t->stores[0].reg->count; i++)
        b->casts += (t->stores[0].reg->items[i].spec.flags & PARAM_EIGHT_BITS) != 0;
    for (int i = 0; i < 2; i++) {
        const int64_t before = t->device.counters.ops;
        TRY(trainer_eval(t, tiny_source(t), 0, (1 + i) * t->spec.global_batch, &b->loss[i], &counted));
        b->ops[i] = t->device.counters.ops - before;
    }
    return ERR_OK;
}

/* An evaluation casts each kept weight once, however many batches it has, and gives the losses that others give. */
TEST(batches_of_an_evaluation_share_codes)
{
    for (Fp8Recipe k = FP8_TENSORWISE; k < FP8_RECIPES; k++) {
        Batches b[2] = { 0 };
        for (int keeps = 0; keeps < 2; keeps++) {
            TrainSpec s = spec_of(tiny_gpt2(), k, 0);
            s.model.fp8.keeps_weights = keeps;
            TinyRun r = run_of(s, (Layout){ 1, 1, 0, 1, 2, 1 }, 1);
            r.after = evaluate, r.user = &b[keeps];
            tiny_train(&r);
            CHECK_MSG(!r.err, "%s", r.message);
        }
        CHECK(!memcmp(b[0].loss, b[1].loss, sizeof b[0].loss));
        /* (with it the tensor's largest magnitude, which is known as long) */
        const int64_t once = b[1].casts * (fp8_facts(k)->tensor ? 2 : 1), saved = 2 * b[1].ops[0] - b[1].ops[1];
        CHECK_MSG(b[1].casts > 0 && saved == once, "%s: %lld of %lld ops", fp8_facts(k)->name, (long long)saved,
                  (long long)once);
    }
}

/* Schedules that update on the way read older weights, too: nothing that is kept is of those. */
TEST(weights_of_some_updates_ago)
{
    for (int pp = 1; pp <= 2; pp++) {
        double loss[2][STEPS];
        for (int keeps = 0; keeps < 2; keeps++) {
            TrainSpec s = spec_of(tiny_gpt2(), FP8_TENSORWISE, 0);
            s.model.fp8.keeps_weights = keeps;
            s.exact = s.model.tied = false;
            s.update.clip = 0;
            TinyRun r = run_of(s, (Layout){ 1, 1, 0, pp, 2, 1, 0, "pipedream" }, steps_of(STEPS));
            tiny_train(&r);
            CHECK_MSG(!r.err, "%s", r.message);
            memcpy(loss[keeps], r.loss, sizeof *loss);
        }
        CHECK(!memcmp(loss[0], loss[1], sizeof *loss));
    }
}

/* ---- beside bf16 ---- */

/* Weights and moments after a step, of which the first moment is a tenth of the gradient. */
static TinyRun state_of(TrainSpec spec, int steps)
{
    TinyRun r = run_of(spec, (Layout){ 1, 1, 0, 1, 2, 1 }, steps);
    r.spec.update.clip = 0;
    r.keep_state = true;
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
    return r;
}

static void state_free(TinyRun *r)
{
    for (int i = 0; i < 3; i++) free(r->state[i]);
}

/* How far apart two first moments are, of the length of the second. */
static double apart(const TinyRun *a, const TinyRun *b)
{
    double difference = 0, length = 0;
    for (int64_t i = 0; i < a->global_count; i++) {
        const double x = (double)a->state[1][i], y = (double)b->state[1][i];
        difference += (x - y) * (x - y), length += y * y;
    }
    return sqrt(difference / length);
}

/* A number of 3 bits of mantissa is off by some 2.6 % on the average, so a product of two by 3.7 %; on the way back
 * through two blocks there are eight. Gradients of 2 bits, which a scale for a tensor goes with, add to that. With 1
 * bit of mantissa all is four times as far. */
TEST(gradients_are_near_those_of_bf16)
{
    const TrainSpec specs[] = { tiny_gpt2(), tiny_llama(), tiny_latent(tiny_llama(), 24) };
    for (int i = brief() ? 2 : 0; i < 3; i++) {
        double whole = 0, blocks = 0;
        TrainSpec s = spec_of(specs[i], FP8_BLOCKWISE, 0); /* (as wide for all) */
        if (i == 2) s.model.head_dim = 14;
        TrainSpec plain = s;
        plain.model.fp8.recipe = FP8_NONE;
        TinyRun fine = state_of(plain, 1);
        for (Fp8Recipe k = FP8_TENSORWISE; k < FP8_RECIPES; k++) {
            s.model.fp8.recipe = k;
            TinyRun coarse = state_of(s, 1);
            const double far = apart(&coarse, &fine);
            printf("    model %d, %-10s gradients %.4f apart, losses %.2e\n", i, fp8_facts(k)->name, far,
                   fabs(coarse.loss[0] - fine.loss[0]));
            const int times = k == FP8_NVFP4 ? 4 : 1;
            CHECK_MSG(far > 0.005 && far < (k == FP8_NVFP4 ? 0.45 : 0.15), "model %d, %s: gradients %.4f apart", i,
                      fp8_facts(k)->name, far);
            CHECK_CLOSE(coarse.loss[0], fine.loss[0], 5e-4 * times, "model %d, %s", i, fp8_facts(k)->name);
            if (k == FP8_TENSORWISE) whole = far;
            else if (k == FP8_NVFP4) CHECK_CLOSE(far, times * blocks, 0.1, "model %d", i);
            else
                CHECK_MSG(far < .9 * whole, "model %d, %s: no nearer than with a scale for a tensor", i,
                          fp8_facts(k)->name);
            if (k == FP8_MXFP8) blocks = far;
            state_free(&coarse);
        }
        state_free(&fine);
    }
}

/* Where all blocks are kept the bits are those of bf16; where some are, they are not. */
TEST(blocks_that_are_kept)
{
    TrainSpec s = spec_of(tiny_gpt2(), FP8_TENSORWISE, 1);
    TrainSpec plain = s, all = s;
    plain.model.fp8.recipe = FP8_NONE;
    all.model.fp8 = fp8_between(FP8_TENSORWISE, all.model.layers, 2);
    TinyRun some = state_of(s, 2), none = state_of(plain, 2), every = state_of(all, 2);
    CHECK(every.hash == none.hash && some.hash != none.hash);
    state_free(&some), state_free(&none), state_free(&every);
}

/* Experts, as wide as blocks want them. */
static TrainSpec experts_of(TinyMixture kind, Fp8Recipe recipe)
{
    const bool blocks = recipe == FP8_BLOCKWISE;
    TrainSpec s = spec_of(tiny_mixture(kind, 2), recipe, 0);
    s.seq_blocks = 1;
    s.model.fp8.experts = true;
    s.model.moe.ffn = blocks ? 256 : 64;
    if (s.model.moe.shared_ffn) s.model.moe.shared_ffn = 256;
    return s;
}

/* A step that is done again in pieces, where rows have no room, has the codes of a run with room for all. */
TEST(experts_redone)
{
    for (Fp8Recipe k = brief() ? FP8_MXFP8 : FP8_BLOCKWISE; k <= FP8_MXFP8; k++) {
        TrainSpec s = experts_of(TINY_MIXTRAL, k);
        s.seq_blocks = 4;
        TinyRun whole = run_of(s, (Layout){ 1, 1, 0, 1, 2, 1 }, 1);
        tiny_train(&whole);
        s.model.moe.capacity = (Capacity){ .slack = 1, .redo = true };
        TinyRun pieces = run_of(s, (Layout){ 4, 1, 0, 1, 2, 1, .ep = 4 }, 1);
        tiny_train(&pieces);
        CHECK_MSG(!whole.err && !pieces.err && pieces.hash == whole.hash, "%s: %s %s", fp8_facts(k)->name,
                  whole.message, pieces.message);
        CHECK_MSG(pieces.retried_in_pieces > 0, "%s: no step lacked room", fp8_facts(k)->name);
    }
}

/* Experts of 8 bits beside those of bf16 in a model that else is the same. */
TEST(experts_gradients_are_near_those_of_bf16)
{
    for (Fp8Recipe k = brief() ? FP8_MXFP8 : FP8_BLOCKWISE; k <= FP8_MXFP8; k++) {
        TrainSpec s = experts_of(TINY_MIXTRAL, k), plain = s;
        plain.model.fp8.experts = false;
        TinyRun coarse = state_of(s, 1), fine = state_of(plain, 1);
        const double far = apart(&coarse, &fine);
        printf("    experts, %-10s gradients %.4f apart, losses %.2e\n", fp8_facts(k)->name, far,
               fabs(coarse.loss[0] - fine.loss[0]));
        CHECK_MSG(far > 0.005 && far < 0.13, "%s: gradients %.4f apart", fp8_facts(k)->name, far);
        CHECK_CLOSE(coarse.loss[0], fine.loss[0], 2e-4, "%s", fp8_facts(k)->name);
        state_free(&coarse), state_free(&fine);
    }
}

TEST_MAIN
