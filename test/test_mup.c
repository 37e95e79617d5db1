/*
 * Maximal update parametrization (docs/mup.md) against its definition: how weights begin, what one update does with
 * them (a loop in float64), logits (a model whose head is smaller by the width has the same losses), scores. At the
 * base model's width nothing changes. That layouts agree: test_array.
 */
#include "test.h"
#include "tiny.h"

#include <math.h>

enum { BASE_HEAD = 2 }; /* head_dim of the base model, of 8 */

static TrainSpec wide(TrainSpec s, float width)
{
    s.model.mup = (MupSpec){ width, BASE_HEAD };
    return s;
}

static TrainSpec without_dropout(TrainSpec s)
{
    s.model.dropout = s.model.attention_dropout = 0;
    return s;
}

/* Every kind of matrix: of experts and their router, of a shared expert and its gate, of modules. */
static TrainSpec many_kinds(void)
{
    TrainSpec s = tiny_further(tiny_mixture(TINY_DEEPSEEK, 2), 1);
    s.model.learned_positions = s.model.bias = s.model.sinks = true;
    return s;
}

static TinyRun train(TrainSpec spec, Grid grid, int steps)
{
    TinyRun r = { .spec = spec, .grid = grid, .steps = steps, .keep_state = true };
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    return r;
}

static void release(TinyRun *r)
{
    for (int i = 0; i < 3; i++) free(r->state[i]);
}

/* ---- parameters, by their names ---- */

typedef struct {
    SetupArena setup;
    ParamRegistry reg;
    Stage stage;
} Whole;

static void whole_open(Whole *w, const ModelSpec *m)
{
    const StageShare all = stage_whole(m);
    setup_init(&w->setup);
    param_registry_init(&w->reg, &w->setup, param_place_single());
    OK(stages_register(&w->stage, &all, 1, &w->reg, m, &w->setup));
}

static bool ends_in(const char *name, const char *end)
{
    const size_t n = strlen(name), k = strlen(end);
    return n >= k && !strcmp(name + n - k, end);
}

/* The definition's three kinds: matrices of blocks; of them, what is added to the stream; and all others. */
static bool is_hidden(const char *name)
{
    static const char *const ends[] = {
        "attn.qkv.weight",  "attn.q.weight",    "attn.q_a.weight",  "attn.q_b.weight",
        "attn.kv_a.weight", "attn.kv_b.weight", "attn.gate.weight", "attn.proj.weight",
        "fc1.weight",       "fc2.weight",       "router.weight",    "shared_gate.weight"
    };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (ends_in(name, ends[i])) return true;
    return !strncmp(name, "mtp.", 4) && ends_in(name, ".proj.weight");
}

static double root_mean_square(const float *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum / (double)n);
}

/* The larger the model, the smaller its matrices: by sqrt(width), whatever else they are divided by. */
TEST(initial_weights)
{
    const TrainSpec specs[] = { tiny_gpt2(), many_kinds(), tiny_latent(tiny_llama(), 12) };
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++) {
        const double share = 1 / sqrt(6.25);
        TinyRun usual = train(specs[k], (Grid){ .tp = 1, .dp = 1 }, 0);
        TinyRun run = train(wide(specs[k], 6.25f), (Grid){ .tp = 1, .dp = 1 }, 0);
        Whole w;
        int hidden = 0, others = 0;
        whole_open(&w, &run.spec.model);
        for (int64_t i = 0, at = 0; i < w.reg.count; i++) {
            const Param *p = &w.reg.items[i];
            const int64_t n = p->spec.shape[0] * p->spec.shape[1];
            const float *was = usual.state[0] + at, *is = run.state[0] + at;
            at += n;
            if (p->spec.init != INIT_NORMAL) {
                CHECK(!memcmp(was, is, (size_t)n * sizeof *is) && !is_hidden(p->name));
                continue;
            }
            const double factor = is_hidden(p->name) ? share : 1;
            for (int64_t e = 0; e < n; e++) CHECK_CLOSE((double)is[e], factor * (double)was[e], 1e-6, "%s", p->name);
            const double std =
                0.02 * factor * (ends_in(p->name, "attn.proj.weight") || ends_in(p->name, "fc2.weight") ? 0.5 : 1);
            if (n > 4000) CHECK_CLOSE(root_mean_square(is, n), std, 0.06, "%s", p->name);
            CHECK_MSG(!!(p->spec.flags & PARAM_HIDDEN) == is_hidden(p->name), "%s", p->name);
            hidden += is_hidden(p->name);
            others += !is_hidden(p->name);
        }
        CHECK(hidden >= 8 && others >= 1);
        setup_release(&w.setup);
        release(&usual);
        release(&run);
    }
}

/* AdamW's first update in float64: of matrices of blocks lr and eps are smaller by the width. eps is as large as
 * gradients are, and there is decay, so that each place of both factors shows. */
TEST(one_update)
{
    const TrainSpec specs[] = { tiny_gpt2(), many_kinds(), tiny_latent(tiny_llama(), 12) };
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++) {
        TrainSpec spec = wide(specs[k], 4);
        spec.update.adamw.eps = 1e-3f;
        spec.update.lr = (LrSchedule){ LR_CONSTANT, 1e-2, 0, 0, 20, 0 };
        TinyRun start = train(spec, (Grid){ .tp = 1, .dp = 1 }, 0), run = train(spec, (Grid){ .tp = 1, .dp = 1 }, 1);
        Whole w;
        double eps_shows = 0;
        whole_open(&w, &spec.model);
        for (int64_t i = 0, at = 0; i < w.reg.count; i++) {
            const Param *p = &w.reg.items[i];
            const int64_t n = p->spec.shape[0] * p->spec.shape[1];
            const double share = is_hidden(p->name) ? 0.25 : 1, decay = p->spec.ndim == 2 ? (double)0.1f : 0;
            for (int64_t e = at; e < at + n && p->spec.group != PARAM_STATE; e++) {
                const double before = (double)start.state[0][e], after = (double)run.state[0][e];
                const double m = (double)run.state[1][e] / 0.1, root = sqrt((double)run.state[2][e] / 0.05);
                const double change = 1e-2 * share * (m / (root + 1e-3 * share) + decay * before);
                CHECK_MSG(fabs(before - after - change) <= 1e-4 * fabs(change) + 2e-7 * fabs(before) + 1e-9,
                          "%s[%lld]: changes by %g, not %g", p->name, (long long)(e - at), before - after, change);
                eps_shows = fmax(eps_shows, fabs(m) / (root + 1e-3 * share));
            }
            at += n;
        }
        CHECK(eps_shows > 0.05);
        setup_release(&w.setup);
        release(&start);
        release(&run);
    }
}

/* ---- logits ---- */

/* The master weights of a model with factors. The head's are divided by `width`, those of the last linear of each
 * branch multiplied by `branch`: powers of two, so nothing is rounded. */
typedef struct {
    const float *weights;
    float width, branch;
    bool tied;
} Twin;

static float factor_of(const Twin *twin, const char *name)
{
    if (!strcmp(name, "head.weight")) return 1 / twin->width;
    return strstr(name, ".attn.proj.") || strstr(name, ".mlp.fc2.") ? twin->branch : 1;
}

/* before the steps: a tied table is the head of the other, too */
static Err take_weights(Trainer *t, void *user)
{
    const Twin *twin = user;
    const ParamStore *s = &t->stores[0];
    const ParamRegistry *whole = &t->parts.whole;
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const bool head = !strcmp(p->name, "head.weight");
        const float *from = twin->weights;
        int64_t start = 0;
        const char *name = head && twin->tied ? EMBEDDING_TABLE : p->name;
        for (int k = 0; strcmp(whole->items[k].name, name) != 0; k++)
            if (!(twin->tied && !strcmp(whole->items[k].name, "head.weight")))
                start += whole->items[k].spec.shape[0] * whole->items[k].spec.shape[1];
        float *to = (float *)s->master.data + param_origin(s, i, s->master);
        for (int64_t e = 0; e < p->count; e++) {
            const int64_t row = param_plain_row(p, e / p->local[1]);
            if (row < 0) continue;
            to[e] = from[start + row * p->spec.shape[1] + e % p->local[1]] * factor_of(twin, p->name);
        }
    }
    return ERR_OK;
}

/* The first loss of a model with factors is that of one without, whose weights have them. */
static void check_factors(TrainSpec factors, float width, float branch)
{
    const Grid one = { .tp = 1, .dp = 1 };
    TrainSpec usual = factors;
    usual.model.mup = (MupSpec){ 0 };
    usual.model.logits.scale = usual.model.residual_scale = 0;
    usual.model.tied = false;
    TinyRun start = train(factors, one, 0), run = train(factors, one, 1);
    Twin twin = { start.state[0], width, branch, factors.model.tied };
    TinyRun other = { .spec = usual, .grid = one, .steps = 1, .before = take_weights, .user = &twin };
    tiny_train(&other);
    CHECK_MSG(other.err == ERR_OK, "%s", other.message);
    CHECK_MSG(!memcmp(run.loss, other.loss, sizeof *run.loss), "loss %.17g, with other weights %.17g", run.loss[0],
              other.loss[0]);
    TinyRun plain = train(usual, one, 1); /* (the test would see it if nothing was divided) */
    CHECK(plain.loss[0] < run.loss[0] || plain.loss[0] > run.loss[0]);
    release(&start);
    release(&run);
    release(&plain);
}

static void check_logits(TrainSpec spec, float width, float scale)
{
    TrainSpec factors = without_dropout(spec);
    factors.model.mup = (MupSpec){ .width = width };
    factors.model.logits.scale = scale;
    check_factors(factors, width / scale, 1);
}

TEST(logits)
{
    TrainSpec cap = tiny_llama();
    cap.model.logits.softcap = 0.1f;
    check_logits(tiny_llama(), 4, 1);
    check_logits(tiny_gpt2(), 8, 1);
    check_logits(cap, 2, 1);
    TrainSpec further = tiny_further(tiny_llama(), 2);
    check_logits(further, 4, 1);
    further.model.tied = true;
    check_logits(further, 4, 1);
    check_logits(tiny_gpt2(), 1, 0.25f);
    check_logits(cap, 1, 4);
    check_logits(further, 8, 0.5f); /* (both factors) */
}

/* ---- branches ---- */

TEST(branches)
{
    TrainSpec specs[] = { without_dropout(tiny_gpt2()), without_dropout(tiny_llama()) };
    for (int k = 0; k < 2; k++) {
        specs[k].model.residual_scale = 0.25f;
        check_factors(specs[k], 1, 0.25f);
    }
}

/* ---- scores ---- */

TEST(scores)
{
    ModelSpec m = { .head_dim = 8 };
    CHECK(model_attention_scale(&m, 1) == 1 / sqrtf(8));
    m.mup = (MupSpec){ 4, 0 };
    CHECK(model_attention_scale(&m, 1) == 1 / sqrtf(8));
    m.mup.head_dim = 8;
    CHECK(model_attention_scale(&m, 1.5f) == 1.5f / sqrtf(8));
    m.mup.head_dim = 2;
    CHECK_CLOSE((double)model_attention_scale(&m, 3), 3 * sqrt(2) / 8, 1e-7, " ");
    m.attention_scale = 0.5f; /* of the base model */
    CHECK_CLOSE((double)model_attention_scale(&m, 1), 0.125, 1e-7, " ");

    const Grid one = { .tp = 1, .dp = 1 };
    const TrainSpec specs[] = { tiny_llama(), tiny_latent(tiny_llama(), 0) };
    for (int k = 0; k < 2; k++) {
        TrainSpec mup = specs[k], usual = specs[k];
        mup.model.mup = (MupSpec){ 1, BASE_HEAD };
        if (k)
            usual.model.latent.scale = 1.2f * model_attention_scale(&mup.model, 1) * sqrtf((float)usual.model.head_dim);
        else usual.model.attention_scale = sqrtf(2) / 8;
        TinyRun a = train(mup, one, 2), b = train(usual, one, 2), c = train(specs[k], one, 2);
        for (int i = 0; i < 2; i++) CHECK_CLOSE(a.loss[i], b.loss[i], k ? 1e-6 : 0, "step %d", i);
        CHECK(a.hash != c.hash);
        release(&a);
        release(&b);
        release(&c);
    }
}

/* ---- width 1 ---- */

TEST(base_model_is_unchanged)
{
    const TrainSpec specs[] = { tiny_gpt2(), many_kinds(), tiny_latent(tiny_llama(), 12) };
    for (size_t k = 0; k < sizeof specs / sizeof *specs; k++) {
        TrainSpec spec = specs[k];
        TinyRun usual = train(spec, (Grid){ .tp = 1, .dp = 1 }, 3);
        spec.model.mup = (MupSpec){ 1, spec.model.head_dim };
        TinyRun run = train(spec, (Grid){ .tp = 1, .dp = 1 }, 3);
        CHECK(run.hash == usual.hash);
        spec.model.mup.width = 1.0625f;
        TinyRun other = train(spec, (Grid){ .tp = 1, .dp = 1 }, 3);
        CHECK(other.hash != usual.hash);
        release(&usual);
        release(&run);
        release(&other);
    }
}

TEST_MAIN
