/*
 * The largest logits of attention, and QK-clip, of whole steps: against the rule in float64, row by row of the plain
 * weights. That a layout changes nothing of them: test_array. Scores of one call against float64 loops: test_attention.
 */
#include <math.h>

#include "test.h"
#include "tiny.h"
#include "engine/step_report.h"

enum { STEPS = 2, BUCKET_BYTES = 64 << 10, ORDERS_MOST = 256 };

static const QkClip low = { 0.03f, 0.3f }; /* which all layers of these models are above from the first step on */

static TrainSpec asked(TrainSpec s)
{
    s.attention_logits = true;
    s.model.qk_norm = QK_NORM_NONE;
    s.update.bucket_bytes = BUCKET_BYTES;
    return s;
}

static TrainSpec clipped(TrainSpec s)
{
    s = asked(s);
    s.update.qk_clip = low;
    return s;
}

/* Windows, sinks and a gate, and two key heads for sixteen query heads, without a cap. */
static TrainSpec grouped(void)
{
    TrainSpec s = tiny_variants();
    s.model.attention_softcap = 0;
    return s;
}

/* ---- the rule ---- */

/* What rank 0 had after the last step, and where parameters begin in the plain array of all. */
typedef struct {
    int64_t order[ORDERS_MOST];
    int params;
    struct {
        char name[PARAM_NAME_MAX];
        int64_t start, rows, columns;
    } param[128];
} Seen;

static Err see(Trainer *t, void *user)
{
    Seen *s = user;
    if (t->world->rank) return ERR_OK;
    const int64_t orders = tensor_count(t->executor.ctx.logit_max);
    ASSERT(orders <= ORDERS_MOST && t->parts.whole.count <= 128);
    memcpy(s->order, t->flight.logits, (size_t)orders * sizeof *s->order);
    s->params = t->parts.whole.count;
    for (int i = 0; i < s->params; i++) {
        const Param *p = &t->parts.whole.items[i];
        snprintf(s->param[i].name, PARAM_NAME_MAX, "%s", p->name);
        s->param[i].start = tiny_start(t, i);
        s->param[i].rows = p->spec.shape[0], s->param[i].columns = p->spec.shape[1];
    }
    return ERR_OK;
}

static bool ends_with(const char *s, const char *tail)
{
    const size_t n = strlen(s), m = strlen(tail);
    return n >= m && !strcmp(s + n - m, tail);
}

static double largest(const int64_t *order, int first, int heads)
{
    double most = -INFINITY;
    for (int h = first; h < first + heads; h++) most = fmax(most, (double)logit_of_order(order[h]));
    return most;
}

/* Factor by which QK-clip multiplies a row of a parameter, in plain order. */
static double factor_of(const ModelSpec *m, QkClip clip, const Seen *s, int param, int64_t row)
{
    const char *name = s->param[param].name;
    const MlaWidths w = m->latent.width;
    const int64_t queries = (int64_t)m->heads * m->head_dim, keys = (int64_t)m->kv_heads * m->head_dim;
    const int group = m->heads / m->kv_heads;
    const double alpha = (double)clip.alpha, threshold = (double)clip.threshold;
    double power, most;
    int layer;
    if (sscanf(name, "layers.%d.", &layer) != 1) return 1;
    const int64_t *order = s->order + layer * m->heads;
    if (ends_with(name, "attn.qkv.weight") || ends_with(name, "attn.qkv.bias")) {
        if (row >= queries + keys) return 1;
        const int64_t key_head = row < queries ? row / m->head_dim / group : (row - queries) / m->head_dim;
        power = row < queries ? alpha : 1 - alpha;
        most = largest(order, (int)key_head * group, group);
    } else if (ends_with(name, "attn.q.weight") || ends_with(name, "attn.q_b.weight")) {
        power = row % (w.nope + w.rope) < w.nope ? alpha : 1;
        most = largest(order, (int)(row / (w.nope + w.rope)), 1);
    } else if (ends_with(name, "attn.kv_b.weight")) {
        if (row % (w.nope + w.value) >= w.nope) return 1;
        power = 1 - alpha;
        most = largest(order, (int)(row / (w.nope + w.value)), 1);
    } else return 1;
    return most > threshold ? pow(threshold / most, power) : 1;
}

/* One step with and one without QK-clip: weights differ by the factors alone, moments in nothing. */
static void check_rule(TrainSpec spec)
{
    Seen seen = { 0 };
    TinyRun run[2];
    int64_t scaled = 0, wrong = 0;
    for (int k = 0; k < 2; k++) {
        run[k] = (TinyRun){ .spec = k ? clipped(spec) : asked(spec), .grid = { .tp = 1, .dp = 1 }, .steps = 1,
                            .after = see, .user = &seen, .keep_state = true };
        tiny_train(&run[k]);
        CHECK_MSG(!run[k].err, "%s", run[k].message);
    }
    CHECK(run[0].logits == run[1].logits);
    for (int i = 0; i < seen.params; i++)
        for (int64_t e = 0; e < seen.param[i].rows * seen.param[i].columns; e++) {
            const int64_t row = e / seen.param[i].columns, at = seen.param[i].start + e;
            const double factor = factor_of(&spec.model, low, &seen, i, row);
            const double before = (double)run[0].state[0][at], after = (double)run[1].state[0][at];
            scaled += factor < 1;
            wrong += factor == 1 ? before != after : !(fabs(after - before * factor) <= 1.5e-7 * fabs(before));
        }
    CHECK_MSG(wrong == 0 && scaled > 1000, "%lld of %lld wrong", (long long)wrong, (long long)scaled);
    const size_t bytes = (size_t)run[0].global_count * sizeof(float);
    CHECK(!memcmp(run[0].state[1], run[1].state[1], bytes) && !memcmp(run[0].state[2], run[1].state[2], bytes));
    for (int k = 0; k < 6; k++) free(run[k / 3].state[k % 3]);
}

TEST(rows_of_queries_and_keys)
{
    const TrainSpec models[] = { tiny_gpt2(), grouped(), tiny_latent(tiny_llama(), 0), tiny_latent(tiny_llama(), 12) };
    for (int i = 0; i < 4; i++) check_rule(models[i]);
}

/* Biases that are not 0, too: they make queries and keys as weights do. */
static Err with_biases(Trainer *t, void *user)
{
    (void)user;
    const ParamStore *s = &t->stores[0];
    for (int i = 0; i < s->reg->count; i++) {
        const Tensor b = param_store_value(s, i, 0);
        if (!ends_with(s->reg->items[i].name, "attn.qkv.bias")) continue;
        for (int64_t r = 0; r < b.dim[0]; r++)
            ((float *)b.data)[r] = 0.2f + 0.01f * (float)(param_plain_row(&s->reg->items[i], r) % 7);
    }
    return ERR_OK;
}

/* The same samples in every step. */
static Err same_samples(void *user, int64_t first, int64_t count, int32_t *out)
{
    (void)first;
    return tiny_tokens(user, 0, count, out);
}

/* With a learning rate of 0, in the first block, whose input QK-clip leaves as it is: a head above the threshold comes
 * down to it, whichever share of the factor its queries take, and stays there. */
static Err scores_fall(Trainer *t, void *user)
{
    const QkClip clip = t->spec.update.qk_clip;
    const int heads = t->spec.model.heads;
    int64_t order[ORDERS_MOST];
    StepReport r;
    (void)user;
    for (int step = 0; step < 3; step++) {
        memcpy(order, t->flight.logits, (size_t)heads * sizeof *order);
        TRY(trainer_step(t, (TokenSource){ NULL, same_samples }, &r));
        for (int h = 0; h < heads; h++) {
            const double is = (double)logit_of_order(t->flight.logits[h]);
            CHECK_MSG(step ? fabs(is - (double)clip.threshold) < 1e-5 : is > (double)clip.threshold,
                      "step %d, head %d: %.8g, before %.8g", step, h, is, (double)logit_of_order(order[h]));
        }
    }
    return ERR_OK;
}

TEST(scores_fall_to_the_threshold)
{
    const TrainSpec models[] = { tiny_gpt2(), tiny_latent(tiny_llama(), 12) };
    for (int i = 0; i < 2; i++) {
        TrainSpec s = clipped(models[i]);
        s.model.dropout = s.model.attention_dropout = 0;
        s.global_batch = 2;
        s.update.lr = (LrSchedule){ .shape = LR_CONSTANT };
        s.update.qk_clip = (QkClip){ 0.01f, 0.7f };
        TinyRun r = { .spec = s, .grid = { .tp = 1, .dp = 1 }, .before = i ? NULL : with_biases, .after = scores_fall };
        tiny_train(&r);
        CHECK_MSG(!r.err, "%s", r.message);
    }
}

/* Modules of multi-token prediction have attention of their own, behind the last block. */
static Err module_has_logits(Trainer *t, void *user)
{
    StepReport r;
    (void)user;
    TRY(trainer_step(t, tiny_source(t), &r));
    for (int i = 0; i < 3; i++) CHECK_MSG(r.logits.by_layer[i] > 0, "layer %d: %g", i, r.logits.by_layer[i]);
    return ERR_OK;
}

TEST(logits_of_modules)
{
    TinyRun r = { .spec = clipped(tiny_further(tiny_llama(), 1)), .grid = { .tp = 1, .dp = 1, .pp = 2 },
                  .after = module_has_logits };
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
}

/* ---- whose logit it is ---- */

enum { LOUD_LAYER = 1, LOUD_HEAD = 5 };

/* One head's queries, a hundred times as long. */
static Err loud(Trainer *t, void *user)
{
    const ParamStore *s = &t->stores[0];
    const int64_t C = t->spec.model.head_dim;
    const int id = param_find(s->reg, "layers.1.attn.qkv.weight");
    (void)user;
    if (id < 0) return ERR_OK; /* (another stage's) */
    const Tensor w = param_store_value(s, id, 0);
    for (int64_t r = 0; r < w.dim[0]; r++) {
        if (param_plain_row(&s->reg->items[id], r) / C != LOUD_HEAD) continue;
        for (int64_t c = 0; c < w.dim[1]; c++) ((float *)w.data)[r * w.dim[1] + c] *= 100;
    }
    return ERR_OK;
}

static Err names_it(Trainer *t, void *user)
{
    StepReport r;
    (void)user;
    TRY(trainer_step(t, tiny_source(t), &r));
    CHECK_MSG(r.logits.layer == LOUD_LAYER && r.logits.head == LOUD_HEAD, "rank %d: layer %d head %d", t->world->rank,
              r.logits.layer, r.logits.head);
    CHECK(r.logits.by_layer[LOUD_LAYER] == r.logits.most && r.logits.by_layer[0] < r.logits.most);
    return ERR_OK;
}

TEST(logit_has_an_owner)
{
    const Grid grids[] = { { .tp = 1, .dp = 1 }, { .tp = 2, .dp = 1, .pp = 2 } };
    for (int i = 0; i < 2; i++) {
        TinyRun r = { .spec = asked(tiny_gpt2()), .grid = grids[i], .before = loud, .after = names_it };
        tiny_train(&r);
        CHECK_MSG(!r.err, "%s", r.message);
    }
}

/* ---- steps that are not steps ---- */

/* An evaluation, whose samples are others, leaves what the step has measured. */
static Err eval_is_apart(Trainer *t, void *user)
{
    const Tensor all = t->executor.ctx.logit_max;
    int64_t kept[ORDERS_MOST], counted;
    double loss;
    StepReport report;
    (void)user;
    TRY(trainer_step(t, tiny_source(t), &report));
    ASSERT(tensor_count(all) <= ORDERS_MOST);
    memset(all.data, 0, (size_t)tensor_bytes(all));
    memset(kept, 0, sizeof kept);
    TRY(trainer_eval(t, tiny_source(t), 100, 8, &loss, &counted));
    CHECK(!memcmp(kept, all.data, (size_t)tensor_bytes(all)));
    return ERR_OK;
}

/* A head that is not finite is told, and the step is skipped: nothing is scaled. */
static Err nan_is_told(Trainer *t, void *user)
{
    const ParamStore *s = &t->stores[0];
    const int id = param_find(s->reg, "layers.1.attn.qkv.weight");
    const int64_t C = t->spec.model.head_dim, bytes = tensor_bytes(s->value);
    float *w = param_store_value(s, id, 0).data, *before = malloc((size_t)bytes);
    StepReport r;
    (void)user;
    for (int64_t i = 0; i < s->reg->items[id].count; i++)
        if (param_plain_row(&s->reg->items[id], i / s->reg->items[id].local[1]) == 6 * C) w[i] = NAN;
    memcpy(before, s->value.data, (size_t)bytes);
    TRY(trainer_step(t, tiny_source(t), &r));
    CHECK(r.skipped && isnan(r.logits.most) && r.logits.layer == 1 && r.logits.head == 6);
    CHECK(isfinite(r.logits.by_layer[0]) && isnan(r.logits.by_layer[1]));
    CHECK(!memcmp(before, s->value.data, (size_t)bytes));
    free(before);
    return ERR_OK;
}

TEST(evaluation_is_no_step)
{
    TinyRun r = { .spec = clipped(tiny_gpt2()), .grid = { .tp = 1, .dp = 1 }, .after = eval_is_apart };
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
}

TEST(nan_of_a_head)
{
    TinyRun r = { .spec = clipped(tiny_gpt2()), .grid = { .tp = 1, .dp = 1 }, .after = nan_is_told };
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
}

/* ---- 16 bits ---- */

/* What layers read is the master, rounded, on every rank. */
static Err rounded(Trainer *t, void *user)
{
    const ParamStore *s = &t->stores[0];
    (void)user;
    for (int i = 0; i < s->reg->count; i++) {
        const Tensor master = param_zero_shard_master(s, i), value = param_zero_shard_value(s, i);
        int64_t wrong = 0;
        const float *is = master.data;
        if (s->reg->items[i].spec.ndim == 1) CHECK(value.dtype == (t->spec.fp32_vectors ? F32 : BF16));
        for (int64_t e = 0; e < master.dim[0]; e++)
            wrong += value.dtype == F32 ? !(((const float *)value.data)[e] == is[e])
                                        : ((const uint16_t *)value.data)[e] != bf16_from_float(is[e]);
        CHECK_MSG(wrong == 0, "%s: %lld", s->reg->items[i].name, (long long)wrong);
    }
    return ERR_OK;
}

/* Copies in 16 bits, and those of biases in fp32 beside them. */
TEST(copies_are_scaled)
{
    for (int wide = 0; wide < 2; wide++) {
        uint64_t hash = 0;
        for (ZeroCut zero = ZERO_NONE; zero <= ZERO_VALUES; zero++) {
            TinyRun r = { .spec = clipped(tiny_gpt2()), .grid = { .tp = 1, .dp = 2 }, .steps = STEPS };
            r.after = rounded;
            r.spec.compute = BF16;
            r.spec.fp32_vectors = wide;
            r.spec.exact = false;
            r.spec.update.zero = zero;
            tiny_train(&r);
            CHECK_MSG(!r.err, "%s", r.message);
            if (zero == ZERO_NONE) hash = r.hash;
            /* (of the others sums have another order) */
            CHECK_MSG(r.hash == hash || zero > ZERO_STATES, "fp32 vectors %d, zero %d", wide, (int)zero);
        }
    }
}

/* ---- models without scores ---- */

static Err no_logits(Trainer *t, void *user)
{
    const StepReport r = step_report(t);
    (void)user;
    CHECK(!t->executor.ctx.logit_max.data && !r.logits.by_layer);
    return ERR_OK;
}

TEST(no_scores_no_logits)
{
    TinyRun r = { .spec = asked(tiny_delta(tiny_llama())), .grid = { .tp = 1, .dp = 1 }, .steps = 1 };
    r.spec.model.mixer = layer_pattern_all(MIXER_DELTA);
    r.after = no_logits;
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
}

/* ---- schedules that update while they run ---- */

TEST(asynchronous_schedules_refuse)
{
    const Grid grid = { .tp = 1, .dp = 1, .pp = 2 };
    TrainSpec s = clipped(tiny_gpt2());
    s.update.clip = 0;
    s.model.tied = false;
    s.pipeline.schedule = "pipedream";
    FAILS(trainer_check(&s, grid), ERR_CONFIG, "QK-clip follows the largest logits of a whole step");
    s.update.qk_clip.threshold = 0;
    FAILS(trainer_check(&s, grid), ERR_CONFIG, "there are no largest logits of a whole step");
    s.attention_logits = false;
    OK(trainer_check(&s, grid));
}

TEST_MAIN
