/*
 * Numbers against PyTorch in float64: test/golden/ holds losses, gradients, gradient norms, rates and final
 * weights of tiny models, some of them mixtures of experts (see test/tools/golden.py, which made them and has the same
 * formula for initial weights and tokens). Checked with reproducible = layout and run: the first loss, the gradient of
 * every parameter, 20 AdamW steps with clipping and a cosine, the final weights, evaluation, generation's logits.
 * Recomputation and the micro-batch size must not change a bit.
 *
 * Gradients are seen through the executor's update hook: it is called between the norm and the update, which
 * clears them. There they are of the sum of the losses by the rows of a step; the update divides by those that count.
 */
#include "base/half.h"
#include "base/json.h"
#include "base/rng.h"
#include "test.h"
#include "engine/trainer.h"

/* ---- golden values ---- */

typedef struct {
    Json *file;
    const Json *c; /* the case */
    const char *name;
    TrainSpec spec;
} Golden;

static bool flag(const Json *j, const char *key)
{
    return json_is_true(json_get(j, key));
}

static int64_t whole(const Json *j, const char *key)
{
    CHECK_MSG(json_is_int(json_get(j, key)), "golden.json: no '%s'", key);
    return json_int(json_get(j, key), -1);
}

static double number(const Json *j, const char *key)
{
    CHECK_MSG(json_is_number(json_get(j, key)), "golden.json: no '%s'", key);
    return json_number(json_get(j, key), NAN);
}

static RouterScore score_of(const char *name)
{
    static const char *const names[] = { ROUTER_SCORES(CHOICE_TEXT) };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (name && !strcmp(name, names[i])) return (RouterScore)i;
    CHECK_MSG(0, "golden.json: router '%s'", name ? name : "none");
    return ROUTER_SOFTMAX;
}

static MixtureSpec mixture_of(const Json *e)
{
    const Json *layers = json_get(e, "layers");
    MixtureSpec m = { .experts = (int)whole(e, "experts"),
                      .topk = (int)whole(e, "topk"),
                      .ffn = whole(e, "ffn"),
                      .shared_ffn = whole(e, "shared_ffn"),
                      .shared_gate = flag(e, "shared_gate"),
                      .latent = json_int(json_get(e, "latent"), 0),
                      .router = { .score = score_of(json_text(json_get(e, "router"), NULL)),
                                  .normalize = flag(e, "normalize"),
                                  .scale = (float)number(e, "scale"),
                                  .groups = (int)whole(e, "groups"),
                                  .group_topk = (int)whole(e, "group_topk") },
                      .balance = { .unit = 1, .aux = json_get(e, "aux") ? (float)number(e, "aux") : 0 } };
    for (int64_t i = 0; i < json_count(layers); i++)
        m.layers.word[0] |= (uint64_t)json_int(json_at(layers, i), 0) << i;
    return m;
}

/* A number for each block. */
static LayerPattern pattern_of(const Json *list)
{
    LayerPattern p = { .runs = (int)json_count(list) };
    for (int i = 0; i < p.runs; i++) {
        p.value[i] = (int32_t)json_int(json_at(list, i), 0);
        p.times[i] = 1;
    }
    return p;
}

static RopeSpec rope_of(const Json *m)
{
    static const char *const names[] = { "plain", "linear", "llama3", "yarn" };
    const Json *s = json_get(m, "rope_scaling");
    RopeSpec r = { .layers = pattern_of(json_get(m, "rope")),
                   .base = (float)number(m, "rope_base"),
                   .local_base = json_get(m, "local_base") ? (float)number(m, "local_base") : 0,
                   .columns = (int)json_int(json_get(m, "rope_columns"), 0) };
    if (!s) return r;
    while (strcmp(json_text(json_get(s, "kind"), NULL), names[r.scaling])) r.scaling++;
    r.factor = number(s, "factor");
    if (r.scaling == ROPE_LINEAR) return r;
    r.original = number(s, "original");
    r.slow = number(s, "slow");
    r.fast = number(s, "fast");
    r.magnitude = r.scaling == ROPE_YARN ? number(s, "magnitude") : 1;
    r.truncate = r.scaling == ROPE_YARN && flag(s, "truncate");
    return r;
}

static LatentSpec latent_of(const Json *a, const Json *scaling)
{
    const double m = scaling ? 0.1 * number(a, "mscale_all") * log(number(scaling, "factor")) + 1 : 1;
    return (LatentSpec){ .width = { .q_rank = whole(a, "q_rank"),
                                    .kv_rank = whole(a, "kv_rank"),
                                    .nope = whole(a, "nope"),
                                    .rope = whole(a, "rope"),
                                    .value = whole(a, "value") },
                         .absorb = true,
                         .scale = (float)(m * m) };
}

static ModelSpec model_of(const Json *m)
{
    ModelSpec s = { .layers = (int)whole(m, "layers"),
                    .heads = (int)whole(m, "heads"),
                    .kv_heads = (int)whole(m, "kv_heads"),
                    .head_dim = (int)whole(m, "head_dim"),
                    .hidden = whole(m, "hidden"),
                    .ffn = whole(m, "ffn"),
                    .seq = whole(m, "seq"),
                    .vocab = whole(m, "vocab"),
                    .window = pattern_of(json_get(m, "window")),
                    .learned_positions = flag(m, "learned_positions"),
                    .rope = rope_of(m),
                    .rms = flag(m, "rms"),
                    .bias = flag(m, "bias"),
                    .tied = flag(m, "tied"),
                    .qk_norm = json_text(json_get(m, "qk_norm"), NULL) ? QK_NORM_FULL
                               : flag(m, "qk_norm") ? QK_NORM_HEADS : QK_NORM_NONE,
                    .activation = json_get(m, "limit") ? ACT_CLAMPED_SWIGLU : flag(m, "geglu") ? ACT_GEGLU
                                  : flag(m, "swiglu") ? ACT_SWIGLU : flag(m, "relu2") ? ACT_RELU2 : ACT_GELU,
                    .activation_limit = json_get(m, "limit") ? (float)number(m, "limit") : 0,
                    .attention_gate = json_get(m, "gate") != NULL,
                    .sinks = json_get(m, "sinks") != NULL,
                    .attention_softcap = json_get(m, "softcap") ? (float)number(m, "softcap") : 0,
                    .attention_scale = json_get(m, "score_scale") ? (float)number(m, "score_scale") : 0,
                    .embed_scale = json_get(m, "embed_scale") ? (float)number(m, "embed_scale") : 0,
                    .logits.softcap = json_get(m, "final_softcap") ? (float)number(m, "final_softcap") : 0,
                    .block_norms = json_get(m, "pre_norms") ? BLOCK_NORMS_POST
                                   : flag(m, "post_norms") ? BLOCK_NORMS_BOTH : BLOCK_NORMS_PRE,
                    .norm_eps = (float)number(m, "norm_eps"),
                    .init_std = 0.02f,
                    .tp_blocks = 2 };
    if (json_get(m, "moe")) s.moe = mixture_of(json_get(m, "moe"));
    if (json_get(m, "mla")) {
        s.latent = latent_of(json_get(m, "mla"), json_get(m, "rope_scaling"));
        s.mixer = layer_pattern_all(MIXER_LATENT);
        s.rope.columns = (int)s.latent.width.rope;
    }
    if (json_get(m, "mixers")) {
        s.mixer = pattern_of(json_get(m, "mixers"));
        for (int i = 0; i < s.layers; i++) s.mixer.value[i] = s.mixer.value[i] ? MIXER_ATTENTION : MIXER_NONE;
        for (int i = 0; i < s.layers; i++)
            s.without_ffn.word[0] |= (uint64_t)!json_int(json_at(json_get(m, "ffns"), i), 1) << i;
    }
    if (json_get(m, "mtp")) s.mtp = (MtpSpec){ (int)whole(m, "mtp"), (float)number(m, "mtp_weight") };
    int64_t padding = 16 * s.tp_blocks;
    s.padded_vocab = (s.vocab + padding - 1) / padding * padding;
    return s;
}

/* Read anew for each case of the test; the caller frees g->file. */
static void golden_open(Golden *g, const char *name)
{
    *g = (Golden){ .name = name };
    OK(json_read_file("test/golden/golden.json", 1 << 20, &g->file));
    for (int64_t i = 0; i < json_count(g->file); i++)
        if (!strcmp(json_text(json_get(json_at(g->file, i), "name"), NULL), name)) g->c = json_at(g->file, i);
    CHECK_MSG(g->c, "golden.json: no case '%s'", name);
    const Json *o = json_get(g->c, "optim"), *m = json_get(g->c, "model");
    g->spec = (TrainSpec){ .model = model_of(m),
                           .documents.eod = (int32_t)json_int(json_get(m, "eod"), -1),
                           .documents.mask = flag(m, "mask_eod"),
                           .documents.restart = flag(m, "reset_at_eod"),
                           .micro_batch = 2,
                           .global_batch = whole(g->c, "global_batch"),
                           .seq_blocks = 2,
                           .attn_block = 8,
                           .exact = true,
                           .update.adamw = { (float)number(o, "beta1"), (float)number(o, "beta2"),
                                             (float)number(o, "eps"), (float)number(o, "weight_decay") },
                           .update.clip = (float)number(o, "clip"),
                           .update.lr = { .shape = LR_COSINE,
                                          .lr = number(o, "lr"),
                                          .min_lr = number(o, "min_lr"),
                                          .warmup = whole(o, "warmup"),
                                          .decay_steps = whole(o, "steps") },
                           .seed = 1,
                           .device.threads = 2 };
}

static const Json *golden_step(const Golden *g, int64_t i)
{
    return json_at(json_get(g->c, "steps"), i);
}

/* The values of all parameters in plain order; the caller frees. */
static float *golden_values(const Golden *g, const char *kind, int64_t count)
{
    char path[128];
    snprintf(path, sizeof path, "test/golden/%s.%s.f32", g->name, kind);
    float *x = calloc((size_t)count + 1, sizeof *x);
    FILE *f = fopen(path, "rb");
    CHECK_MSG(f, "%s: cannot be opened", path);
    if (!f) return x;
    size_t got = fread(x, sizeof *x, (size_t)count + 1, f);
    CHECK_MSG((int64_t)got == count, "%s: %zu values, %lld parameters", path, got, (long long)count);
    fclose(f);
    return x;
}

/* ---- the formula of golden.py ---- */

static int64_t draw(const char *name, int64_t i)
{
    uint64_t h = 0xCBF29CE484222325u; /* FNV-1a */
    for (; *name; name++) h = (h ^ (uint8_t)*name) * 0x100000001B3u;
    return (int64_t)(rng_mix(h + (uint64_t)i) >> 48) - 32768;
}

static float weight_at(const Param *p, int64_t i)
{
    float x = (float)draw(p->name, i);
    size_t n = strlen(p->name);
    if (p->spec.ndim == 2) return x * 0x1p-17f;
    return n > 5 && !strcmp(p->name + n - 5, ".bias") ? x * 0x1p-18f : 1 + x * 0x1p-17f;
}

/* user: the ModelSpec */
static Err formula_tokens(void *user, int64_t first, int64_t count, int32_t *out)
{
    const ModelSpec *m = user;
    for (int64_t s = first; s < first + count; s++, out += m->seq + 1) {
        out[0] = (int32_t)(rng_mix((uint64_t)s) % (uint64_t)m->vocab);
        for (int64_t i = 0; i < m->seq; i++) {
            uint64_t noise = rng_mix(1000 * ((uint64_t)s + 1) + (uint64_t)i) % 4;
            out[i + 1] = (int32_t)((5 * (uint64_t)out[i] + noise) % (uint64_t)m->vocab);
        }
    }
    return ERR_OK;
}

/* ---- plain order and memory ---- */

/* Element (r, c) of a parameter in memory is element *plain of its plain values; false in padding. */
static bool plain_index(const Param *p, int64_t r, int64_t c, int64_t *plain)
{
    int64_t row = param_plain_row(p, r);
    *plain = row * p->spec.shape[1] + c;
    return row >= 0;
}

static void set_formula_weights(Trainer *t)
{
    int64_t at;
    for (int i = 0; i < t->stores[0].reg->count; i++) {
        const Param *p = &t->stores[0].reg->items[i];
        if (p->spec.group == PARAM_STATE) continue; /* zero, and no weight */
        const Tensor value = param_store_value(&t->stores[0], i, 0);
        float *w = param_zero_shard_master(&t->stores[0], i).data; /* (one rank has it all) */
        for (int64_t k = 0; k < p->count; k++) {
            w[k] = plain_index(p, k / p->local[1], k % p->local[1], &at) ? weight_at(p, at) : 0;
            if (value.dtype == BF16) ((uint16_t *)value.data)[k] = bf16_from_float(w[k]);
            else ((float *)value.data)[k] = w[k];
        }
    }
}

static double accumulator(Tensor g, int64_t k, int shift)
{
    return g.dtype == I64 ? ldexp((double)((const int64_t *)g.data)[k], -shift) : ((const float *)g.data)[k];
}

/* All weights or all gradients in plain order, one after the other. */
static void to_plain(const Trainer *t, bool gradients, double *out)
{
    const int32_t *shift = t->stats.shift.data;
    int64_t at;
    for (int i = 0; i < t->stores[0].reg->count; i++) {
        const Param *p = &t->stores[0].reg->items[i];
        if (p->spec.group == PARAM_STATE) continue; /* zero, and no weight */
        Tensor view = gradients ? param_store_grad(&t->stores[0], i) : param_store_value(&t->stores[0], i, 0);
        for (int64_t k = 0; k < p->count; k++) {
            double x = accumulator(view, k, shift[i]);
            if (plain_index(p, k / p->local[1], k % p->local[1], &at)) out[at] = x;
            else CHECK_MSG(x == 0, "%s: padding holds %g", p->name, x);
        }
        out += p->spec.shape[0] * p->spec.shape[1];
    }
}

enum { CHOSEN_MOST = 128 };

static void count_rows(const Trainer *t, double *rows)
{
    int n = 0;
    for (int i = 0; i < t->stores[0].reg->count; i++) {
        const Param *p = &t->stores[0].reg->items[i];
        for (int64_t k = 0; p->spec.group == PARAM_STATE && k < p->count && n < CHOSEN_MOST; k++)
            rows[n++] = accumulator(param_store_grad(&t->stores[0], i), k, 0);
    }
}

/* ---- one run ---- */

typedef struct {
    Golden g;
    World world;
    Trainer t;
    ExecutorHooks real;
    double *grad; /* of the first step; NULL = not wanted */
    int64_t batch; /* of which it is */
    double rows[CHOSEN_MOST]; /* that each expert of each mixture got then */
    int updates;
} Run;

static Err capture_update(void *user, int replica)
{
    Run *r = user;
    if (r->grad && r->updates++ == 0) to_plain(&r->t, true, r->grad), count_rows(&r->t, r->rows);
    return r->real.update(r->real.user, replica);
}

static Err forward_hook_batch(void *user, int microbatch, Batch *batch)
{
    Run *r = user;
    return r->real.batch(r->real.user, microbatch, batch);
}

static Err forward_hook_tied(void *user)
{
    Run *r = user;
    return r->real.tied(r->real.user);
}

static Err forward_hook_reduce(void *user, int replica)
{
    Run *r = user;
    return r->real.reduce(r->real.user, replica);
}

static Err forward_hook_norm(void *user)
{
    Run *r = user;
    return r->real.norm(r->real.user);
}

static void run_open(Run *r)
{
    MemoryPlan plan;
    OK(trainer_plan(&r->g.spec, (Grid){ .tp = 1, .dp = 1 }, 0, &plan));
    OK(world_open_self(&r->world));
    OK(trainer_open(&r->t, &r->g.spec, &r->world, &plan));
    r->real = r->t.executor.hooks;
    r->t.executor.hooks = (ExecutorHooks){ r, forward_hook_batch, forward_hook_tied, forward_hook_reduce,
                                           forward_hook_norm, capture_update };
    set_formula_weights(&r->t);
}

static void run_close(Run *r)
{
    trainer_close(&r->t);
    world_close(&r->world);
    json_free(r->g.file);
}

static TokenSource source_of(Run *r)
{
    return (TokenSource){ &r->g.spec.model, formula_tokens };
}

static int64_t plain_count(const Run *r)
{
    return param_trained(r->t.stores[0].reg);
}

static void check_registry(const Run *r)
{
    const Json *list = json_get(r->g.c, "params");
    int n = 0;
    for (int i = 0; i < r->t.stores[0].reg->count; i++) {
        const Param *p = &r->t.stores[0].reg->items[i];
        if (p->spec.group == PARAM_STATE) continue;
        const Json *shape = json_get(json_at(list, n), "shape");
        const char *name = json_text(json_get(json_at(list, n++), "name"), NULL);
        CHECK_MSG(name && !strcmp(name, p->name), "parameter %d is '%s', want '%s'", i, p->name, name ? name : "none");
        CHECK_MSG(json_count(shape) == p->spec.ndim, "%s", p->name);
        for (int d = 0; d < p->spec.ndim; d++)
            CHECK_MSG(json_int(json_at(shape, d), -1) == p->spec.shape[d], "%s, dim %d", p->name, d);
    }
    CHECK(json_count(list) == n);
}

static double norm_of(const double *x, const float *minus, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = x ? x[i] - (minus ? minus[i] : 0) : minus[i];
        sum += d * d;
    }
    return sqrt(sum);
}

/* Each tensor: norm(got - want) <= tol * max(norm(want), 1e-3 * norm of all). Worst ratio / tol, for the log. */
static double check_tensors(const Run *r, const char *what, const double *got, const float *want, double tol)
{
    double total = norm_of(NULL, want, plain_count(r)), worst = 0;
    for (int i = 0; i < r->t.stores[0].reg->count; i++) {
        const Param *p = &r->t.stores[0].reg->items[i];
        if (p->spec.group == PARAM_STATE) continue;
        int64_t n = p->spec.shape[0] * p->spec.shape[1];
        double limit = fmax(norm_of(NULL, want, n), 1e-3 * total), off = norm_of(got, want, n) / limit;
        CHECK_MSG(off <= tol, "%s %s of %s: off by %.3g of its norm %.3g", r->g.name, what, p->name, off, limit);
        worst = fmax(worst, off);
        got += n;
        want += n;
    }
    return worst;
}

/*
 * Without q/k norms the bias of the keys adds the same to all scores of a query, so its true gradient is 0 and
 * Adam turns whatever rounding leaves of it into steps: nothing to compare there.
 */
static void forget_key_biases(const Run *r, double *got, const float *want)
{
    const ModelSpec *m = &r->g.spec.model;
    int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
    for (int i = 0; i < r->t.stores[0].reg->count; i++) {
        const Param *p = &r->t.stores[0].reg->items[i];
        if (p->spec.group == PARAM_STATE) continue;
        if (!m->qk_norm && strstr(p->name, ".attn.qkv.bias"))
            for (int64_t k = q; k < q + kv; k++) got[k] = want[k];
        got += p->spec.shape[0] * p->spec.shape[1];
        want += p->spec.shape[0] * p->spec.shape[1];
    }
}

/* The losses of the modules of multi-token prediction, as many as there are. */
static void check_modules(const Run *r, const StepReport *report, const Json *want, double tolerance)
{
    const Json *losses = json_get(want, "mtp_loss");
    CHECK(json_count(losses) == r->g.spec.model.mtp.count);
    for (int i = 0; i < r->g.spec.model.mtp.count; i++)
        CHECK_CLOSE(report->mtp_loss[i] / json_number(json_at(losses, i), NAN), 1, tolerance, "module %d", i);
}

/* Rows whose target counts: of samples of several documents not all. */
static int64_t counted(const Run *r, const Json *step)
{
    return json_int(json_get(step, "counted"), r->g.spec.global_batch * r->g.spec.model.seq);
}

static void check_steps(Run *r)
{
    double worst = 0;
    int64_t steps = json_count(json_get(r->g.c, "steps"));
    CHECK(steps == 20);
    for (int64_t i = 0; i < steps; i++) {
        StepReport report;
        const Json *want = golden_step(&r->g, i);
        OK(trainer_step(&r->t, source_of(r), &report));
        double loss = number(want, "loss"), off = fabs(report.loss - loss) / loss;
        CHECK_MSG(off <= (i ? 1e-5 : 1e-6), "step %lld: loss %.9g, want %.9g", (long long)i + 1, report.loss, loss);
        worst = fmax(worst, off);
        check_modules(r, &report, want, i ? 1e-5 : 1e-6);
        CHECK_CLOSE(report.grad_norm / number(want, "grad_norm"), 1, i ? 1e-4 : 1e-6, "step %lld", (long long)i + 1);
        CHECK_CLOSE(report.lr / number(want, "lr"), 1, 1e-7, "step %lld", (long long)i + 1);
        CHECK(!report.skipped && report.counted == counted(r, want));
    }
    printf("    %s, %s: losses of %lld steps within %.2g", r->g.name, r->g.spec.exact ? "layout" : "run",
           (long long)steps, worst);
}

/* Evaluation sees the same loss as the first step will, and changes nothing. */
static void check_eval(Run *r)
{
    double loss = NAN;
    int64_t tokens = 0;
    OK(trainer_eval(&r->t, source_of(r), 0, r->g.spec.global_batch, &loss, &tokens));
    CHECK_CLOSE(loss / number(golden_step(&r->g, 0), "loss"), 1, 1e-6, "evaluation");
    CHECK(tokens == counted(r, golden_step(&r->g, 0)));
}

static void against_torch(const char *name, bool exact, bool final)
{
    Run r = { 0 };
    golden_open(&r.g, name);
    r.g.spec.exact = exact;
    run_open(&r);
    check_registry(&r);
    check_eval(&r);
    int64_t n = plain_count(&r);
    float *want = golden_values(&r.g, "grad", n);
    r.grad = calloc((size_t)n, sizeof *r.grad);
    check_steps(&r);
    const double nominal = (double)(r.g.spec.global_batch * r.g.spec.model.seq);
    for (int64_t i = 0; i < n; i++) r.grad[i] *= nominal / (double)counted(&r, golden_step(&r.g, 0));
    printf(", gradients %.2g", check_tensors(&r, "gradient", r.grad, want, 1e-5));
    free(want);
    if (final) {
        want = golden_values(&r.g, "final", n);
        to_plain(&r.t, false, r.grad);
        forget_key_biases(&r, r.grad, want);
        printf(", final weights %.2g", check_tensors(&r, "final weights", r.grad, want, 2e-5));
        free(want);
    }
    putchar('\n');
    free(r.grad);
    run_close(&r);
}

/* ---- bf16 ---- */

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Errors of each tensor's gradient, relative to its norm, in ascending order; returns how many they are. */
static int tensor_errors(const Run *r, const double *got, const float *want, double *off)
{
    const double total = norm_of(NULL, want, plain_count(r));
    int count = 0;
    for (int i = 0; i < r->t.stores[0].reg->count; i++) {
        const Param *p = &r->t.stores[0].reg->items[i];
        if (p->spec.group == PARAM_STATE) continue;
        const int64_t n = p->spec.shape[0] * p->spec.shape[1];
        off[count++] = norm_of(got, want, n) / fmax(norm_of(NULL, want, n), 1e-3 * total);
        got += n, want += n;
    }
    qsort(off, (size_t)count, sizeof *off, by_size);
    return count;
}

/* Median and largest of the tensors' errors of a step in bf16. */
typedef struct {
    double median, largest;
} Errors;

/* What may be fp32 beside bf16. */
typedef struct {
    bool residual, vectors;
} Wide;

typedef struct {
    const char *name;
    bool exact;
    DotKind dot;
    double most; /* errors in terms of PyTorch's, with a stream and vectors in fp32 */
} NarrowRun;

/* user: the Run, whose batch comes first. */
static Err tokens_from_batch(void *user, int64_t first, int64_t count, int32_t *out)
{
    Run *r = user;
    return formula_tokens(&r->g.spec.model, first + r->batch * r->g.spec.global_batch, count, out);
}

/* r->grad: gradients of the first step from r->batch on. Opens r, whose golden case is read. */
static void first_gradients(Run *r)
{
    StepReport report;
    run_open(r);
    r->grad = calloc((size_t)plain_count(r), sizeof *r->grad);
    OK(trainer_step(&r->t, (TokenSource){ r, tokens_from_batch }, &report));
}

/* What a batch's gradients are, and which experts its rows choose. */
typedef struct {
    float *grad;
    double rows[CHOSEN_MOST];
} Truth;

/* The gradients of the first batch are those in float64, those of others are in fp32: they are a thousandth as far off
 * as those in bf16. The caller frees. */
static Truth truth_of(const char *name, int64_t batch)
{
    Run r = { .batch = batch };
    golden_open(&r.g, name);
    r.g.spec.exact = true;
    first_gradients(&r);
    const int64_t n = plain_count(&r);
    Truth out = { golden_values(&r.g, "grad", n) };
    memcpy(out.rows, r.rows, sizeof r.rows);
    if (!batch) check_tensors(&r, "gradient", r.grad, out.grad, 1e-5);
    for (int64_t i = 0; batch && i < n; i++) out.grad[i] = (float)r.grad[i];
    free(r.grad);
    run_close(&r);
    return out;
}

/* false: other experts are chosen, which is no error of rounding any more. */
static bool bf16_errors(const NarrowRun *of, Wide wide, int64_t batch, const Truth *want, Errors *out)
{
    Run r = { .batch = batch };
    golden_open(&r.g, of->name);
    r.g.spec.exact = of->exact;
    r.g.spec.compute = BF16;
    r.g.spec.fp32_residual = wide.residual;
    r.g.spec.fp32_vectors = wide.vectors;
    r.g.spec.fp32_row_sums = wide.residual && wide.vectors;
    r.g.spec.device.dot = of->dot;
    first_gradients(&r);
    double *off = calloc((size_t)r.t.stores[0].reg->count, sizeof *off);
    const int count = tensor_errors(&r, r.grad, want->grad, off);
    /* (of an even number the mean of two, as numpy's) */
    *out = (Errors){ (off[count / 2] + off[(count - 1) / 2]) / 2, off[count - 1] };
    free(off), free(r.grad);
    run_close(&r);
    return !memcmp(r.rows, want->rows, sizeof r.rows);
}

enum { WIDTHS = 3, BATCHES = 8 };

static Errors recorded(const Json *row) { return (Errors){ number(row, "median"), number(row, "largest") }; }

/* Several batches: the ratio of each, and the middle ones. */
typedef struct {
    double median[BATCHES], largest[BATCHES];
    int count;
} Ratios;

static void add_ratio(Ratios *r, Errors e, Errors by)
{
    r->median[r->count] = e.median / by.median;
    r->largest[r->count++] = e.largest / by.largest;
}

static double middle_of(double *x, int count)
{
    qsort(x, (size_t)count, sizeof *x, by_size);
    return (x[count / 2] + x[(count - 1) / 2]) / 2;
}

static Errors middle(Ratios *r)
{
    CHECK(r->count > 1);
    return (Errors){ middle_of(r->median, r->count), middle_of(r->largest, r->count) };
}

static bool below(Errors e, double most) { return e.median > 0 && e.median <= most && e.largest <= most; }

/*
 * Gradients of a step in bf16, by their errors, beside those of PyTorch under autocast, whose residual stream is fp32,
 * as are its weights of norms, biases and tables. With a stream and vectors in fp32 they come at least as near. That
 * holds for a mixture on other batches, too (docs/speed.md): of eight alone its middle ratio is good to a twentieth. A
 * ratio is the middle one of several batches, as that of one alone may be a fifth larger or smaller; batches in which
 * either chooses other experts than in float64 are left out. `rounded`: PyTorch's with all weights in bf16.
 */
static void bf16_beside_autocast(NarrowRun of)
{
    static const Wide wides[WIDTHS] = { { false, false }, { true, false }, { true, true } };
    Ratios ratio[WIDTHS + 1] = { 0 };
    Errors e[WIDTHS + 1], own;
    Golden g;
    golden_open(&g, of.name);
    const Json *rows = json_get(json_get(g.c, "autocast"), "batches");
    CHECK(json_count(rows) == BATCHES);
    for (int i = 0; i < BATCHES; i++) {
        const Json *row = json_at(rows, i), *rounded = json_get(row, "rounded");
        const int64_t batch = whole(row, "batch");
        const Truth want = truth_of(of.name, batch);
        for (int k = 0; k < WIDTHS; k++)
            if (bf16_errors(&of, wides[k], batch, &want, &own)) add_ratio(&ratio[k], own, recorded(row));
        if (rounded) add_ratio(&ratio[WIDTHS], recorded(rounded), recorded(row));
        free(want.grad);
    }
    printf("    %s, %s, %s, of PyTorch's median and largest:", of.name, of.exact ? "layout" : "run", dot_name(of.dot));
    for (int k = 0; k <= WIDTHS; k++) {
        static const char *const what[] = { "all bf16", "stream fp32", "vectors too", "PyTorch's with bf16 weights" };
        const int count = ratio[k].count;
        e[k] = middle(&ratio[k]);
        printf(" %s %.2f, %.2f (%d batches)%s", what[k], e[k].median, e[k].largest, count, k < WIDTHS ? ";" : "\n");
    }
    CHECK(below(e[0], 1.5) && below(e[1], 1.3) && below(e[2], of.most));
    CHECK(e[2].median < 0.95 * e[1].median && e[2].median < 0.95 * e[0].median);
    json_free(g.file);
}

TEST(bf16_gpt2) { bf16_beside_autocast((NarrowRun){ "gpt2", false, DOT_FMA, 0.95 }); }
TEST(bf16_gpt2_pairs) { bf16_beside_autocast((NarrowRun){ "gpt2", false, DOT_VDPBF16, 0.95 }); }
TEST(bf16_gpt2_layout) { bf16_beside_autocast((NarrowRun){ "gpt2", true, DOT_FMA, 0.95 }); }
TEST(bf16_llama) { bf16_beside_autocast((NarrowRun){ "llama", false, DOT_FMA, 0.95 }); }
TEST(bf16_llama_pairs) { bf16_beside_autocast((NarrowRun){ "llama", false, DOT_VDPBF16, 0.95 }); }
TEST(bf16_llama_layout) { bf16_beside_autocast((NarrowRun){ "llama", true, DOT_FMA, 0.95 }); }
TEST(bf16_gptoss) { bf16_beside_autocast((NarrowRun){ "gptoss", false, DOT_FMA, 1 }); }
TEST(bf16_gptoss_pairs) { bf16_beside_autocast((NarrowRun){ "gptoss", false, DOT_VDPBF16, 1 }); }

/* What layers read after some updates: vectors and positions as the masters are, matrices and the table of tokens
 * rounded. */
TEST(fp32_vectors_follow_masters)
{
    Run r = { 0 };
    StepReport report;
    golden_open(&r.g, "gpt2");
    r.g.spec.compute = BF16;
    r.g.spec.fp32_vectors = true;
    run_open(&r);
    for (int i = 0; i < 3; i++) OK(trainer_step(&r.t, source_of(&r), &report));
    const ParamStore *s = &r.t.stores[0];
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const Tensor value = param_store_value(s, i, 0), master = param_zero_shard_master(s, i);
        const bool wide = p->spec.ndim == 1 || !strcmp(p->name, "embedding.position.weight");
        const float *w = master.data;
        int moved = 0;
        CHECK_MSG(value.dtype == (wide ? F32 : BF16) && tensor_count(value) == p->count, "%s", p->name);
        for (int64_t k = 0; k < p->count; k++) {
            int64_t at;
            const float x = wide ? ((const float *)value.data)[k] : 0;
            const uint16_t y = wide ? 0 : ((const uint16_t *)value.data)[k];
            CHECK_MSG(wide ? x == w[k] : y == bf16_from_float(w[k]), "%s: element %lld", p->name, (long long)k);
            if (plain_index(p, k / p->local[1], k % p->local[1], &at)) moved += w[k] != weight_at(p, at);
        }
        CHECK_MSG(p->spec.group == PARAM_STATE || moved > 0, "%s did not change", p->name);
    }
    run_close(&r);
}

TEST(gpt2_layout) { against_torch("gpt2", true, true); }
TEST(gpt2_run) { against_torch("gpt2", false, true); }
TEST(llama_layout) { against_torch("llama", true, true); }
TEST(llama_run) { against_torch("llama", false, true); }
TEST(mixed_layout) { against_torch("mixed", true, false); }
TEST(mixed_run) { against_torch("mixed", false, false); }
TEST(mixtral_layout) { against_torch("mixtral", true, true); }
TEST(mixtral_run) { against_torch("mixtral", false, true); }
TEST(qwen3moe_layout) { against_torch("qwen3moe", true, true); }
TEST(qwen3moe_run) { against_torch("qwen3moe", false, true); }
TEST(deepseek_layout) { against_torch("deepseek", true, true); }
TEST(deepseek_run) { against_torch("deepseek", false, true); }
TEST(mixedmoe_layout) { against_torch("mixedmoe", true, false); }
TEST(mixedmoe_run) { against_torch("mixedmoe", false, false); }
TEST(patterns_layout) { against_torch("patterns", true, false); }
TEST(patterns_run) { against_torch("patterns", false, false); }
TEST(linear_layout) { against_torch("linear", true, false); }
TEST(llama31_layout) { against_torch("llama31", true, false); }
TEST(yarn_layout) { against_torch("yarn", true, false); }
TEST(gemma_layout) { against_torch("gemma", true, false); }
TEST(gemma_run) { against_torch("gemma", false, false); }
TEST(gemma2_layout) { against_torch("gemma2", true, false); }
TEST(gemma2_run) { against_torch("gemma2", false, false); }
TEST(gemma3_layout) { against_torch("gemma3", true, false); }
TEST(gemma3_run) { against_torch("gemma3", false, false); }
TEST(olmo2_layout) { against_torch("olmo2", true, false); }
TEST(olmo2_run) { against_torch("olmo2", false, false); }
TEST(relu2_layout) { against_torch("relu2", true, false); }
TEST(relu2_run) { against_torch("relu2", false, false); }
TEST(gptoss_layout) { against_torch("gptoss", true, false); }
TEST(gptoss_run) { against_torch("gptoss", false, false); }
TEST(nemotron_layout) { against_torch("nemotron", true, false); }
TEST(nemotron_run) { against_torch("nemotron", false, false); }
TEST(gptossfull_layout) { against_torch("gptossfull", true, false); }
TEST(gptossfull_run) { against_torch("gptossfull", false, false); }
TEST(qwen3next_layout) { against_torch("qwen3next", true, false); }
TEST(qwen3next_run) { against_torch("qwen3next", false, false); }
TEST(mla_layout) { against_torch("mla", true, false); }
TEST(mlasinks_layout) { against_torch("mlasinks", true, false); }
TEST(mla_run) { against_torch("mla", false, false); }
TEST(mlagate_layout) { against_torch("mlagate", true, false); }
TEST(mlagate_run) { against_torch("mlagate", false, false); }
TEST(sharedbias_layout) { against_torch("sharedbias", true, false); }
TEST(sharedbias_run) { against_torch("sharedbias", false, false); }
TEST(deepseekv3_layout) { against_torch("deepseekv3", true, false); }
TEST(mtp_layout) { against_torch("mtp", true, false); }
TEST(mtp_run) { against_torch("mtp", false, false); }
TEST(mtp2_layout) { against_torch("mtp2", true, false); }
TEST(mtp2_run) { against_torch("mtp2", false, false); }
TEST(mtpmask_layout) { against_torch("mtpmask", true, false); }
TEST(mtpmask_run) { against_torch("mtpmask", false, false); }
TEST(mtpreset_layout) { against_torch("mtpreset", true, false); }
TEST(mtpreset_run) { against_torch("mtpreset", false, false); }

/* ---- what must not change a bit ---- */

/* Weights and both moments after three steps; the caller frees. */
static float *state_after_steps(const Golden *g, Recompute recompute, int64_t micro_batch, int64_t *bytes)
{
    Run r = { .g = *g };
    StepReport report;
    r.g.file = NULL; /* the caller's */
    r.g.spec.model.recompute = layer_pattern_all(recompute);
    r.g.spec.micro_batch = micro_batch;
    run_open(&r);
    for (int i = 0; i < 3; i++) OK(trainer_step(&r.t, source_of(&r), &report));
    int64_t n = r.t.stores[0].reg->flat_count;
    *bytes = 3 * n * (int64_t)sizeof(float);
    float *state = malloc((size_t)*bytes);
    memcpy(state, r.t.stores[0].value.data, (size_t)(n * 4));
    memcpy(state + n, r.t.stores[0].m.data, (size_t)(n * 4));
    memcpy(state + 2 * n, r.t.stores[0].v.data, (size_t)(n * 4));
    run_close(&r);
    return state;
}

static void check_same(const Golden *g, const char *what, Recompute recompute, int64_t micro_batch, const float *want)
{
    int64_t bytes;
    float *got = state_after_steps(g, recompute, micro_batch, &bytes);
    CHECK_MSG(!memcmp(got, want, (size_t)bytes), "%s, %s: other bits", g->name, what);
    free(got);
}

static void same_bits(const char *name)
{
    Golden g;
    int64_t bytes;
    golden_open(&g, name);
    for (int exact = 0; exact < 2; exact++) {
        g.spec.exact = exact;
        float *want = state_after_steps(&g, RECOMPUTE_NONE, 2, &bytes);
        check_same(&g, "selective recomputation", RECOMPUTE_SELECTIVE, 2, want);
        check_same(&g, "full recomputation", RECOMPUTE_FULL, 2, want);
        if (exact) check_same(&g, "micro-batch 1", RECOMPUTE_NONE, 1, want);
        if (exact) check_same(&g, "micro-batch 4, full", RECOMPUTE_FULL, 4, want);
        free(want);
    }
    json_free(g.file);
}

TEST(same_bits_gpt2) { same_bits("gpt2"); }
TEST(same_bits_llama) { same_bits("llama"); }
TEST(same_bits_mixed) { same_bits("mixed"); }
TEST(same_bits_mixtral) { same_bits("mixtral"); }
TEST(same_bits_qwen3moe) { same_bits("qwen3moe"); }
TEST(same_bits_deepseek) { same_bits("deepseek"); }
TEST(same_bits_mixedmoe) { same_bits("mixedmoe"); }
TEST(same_bits_patterns) { same_bits("patterns"); }
TEST(same_bits_gemma) { same_bits("gemma"); }
TEST(same_bits_gemma2) { same_bits("gemma2"); }
TEST(same_bits_gemma3) { same_bits("gemma3"); }
TEST(same_bits_olmo2) { same_bits("olmo2"); }
TEST(same_bits_relu2) { same_bits("relu2"); }
TEST(same_bits_gptoss) { same_bits("gptoss"); }
TEST(same_bits_nemotron) { same_bits("nemotron"); }
TEST(same_bits_gptossfull) { same_bits("gptossfull"); }
TEST(same_bits_qwen3next) { same_bits("qwen3next"); }
TEST(same_bits_mla) { same_bits("mla"); }
TEST(same_bits_mlagate) { same_bits("mlagate"); }
TEST(same_bits_sharedbias) { same_bits("sharedbias"); }
TEST(same_bits_deepseekv3) { same_bits("deepseekv3"); }
TEST(same_bits_mtp) { same_bits("mtp"); }
TEST(same_bits_mtp2) { same_bits("mtp2"); }
TEST(same_bits_mtpmask) { same_bits("mtpmask"); }
TEST(same_bits_mtpreset) { same_bits("mtpreset"); }

/* ---- generation ---- */

static double nats(const float *logits, int64_t vocab, int32_t target)
{
    double sum = 0;
    for (int64_t i = 0; i < vocab; i++) sum += exp((double)logits[i] - logits[target]);
    return log(sum);
}

static void generation_open(Run *r, const char *name)
{
    *r = (Run){ 0 };
    golden_open(&r->g, name);
    r->g.spec.purpose.forward_only = r->g.spec.purpose.generate = true;
    r->g.spec.micro_batch = r->g.spec.global_batch = 1;
    run_open(r);
}

/*
 * Logits prefix by prefix, as generation asks for them, give the golden first loss when taken together; and the
 * same bits whether the prefix is given whole or in two parts, and, but for latent attention, token by token.
 */
static void check_logits(const char *name)
{
    Run r;
    generation_open(&r, name);
    const ModelSpec *m = &r.g.spec.model;
    const bool absorbs = m->latent.width.kv_rank > 0;
    int32_t tokens[256];
    float logits[256], again[256];
    double sum = 0;
    int64_t count = 0, samples = whole(r.g.c, "global_batch");
    for (int64_t s = 0; s < samples; s++) {
        OK(formula_tokens(&r.g.spec.model, s, 1, tokens));
        for (int64_t n = 1; n <= m->seq; n++, count++) {
            OK(trainer_logits(&r.t, tokens + n - 1, n - 1, 1, logits));
            sum += nats(logits, m->vocab, tokens[n]);
        }
        for (int64_t n = m->seq; n >= 1; n--) {
            OK(trainer_logits(&r.t, tokens, 0, n, again));
            CHECK(n < m->seq || absorbs || !memcmp(again, logits, (size_t)m->vocab * sizeof *logits));
            OK(trainer_logits(&r.t, tokens, 0, (n + 1) / 2, logits));
            if (n > 1) OK(trainer_logits(&r.t, tokens + (n + 1) / 2, (n + 1) / 2, n / 2, logits));
            CHECK((absorbs && n / 2 == 1) || !memcmp(again, logits, (size_t)m->vocab * sizeof *logits));
        }
    }
    CHECK_CLOSE(sum / (double)count / number(golden_step(&r.g, 0), "loss"), 1, 1e-6, "%s", name);
    run_close(&r);
}

TEST(logits_gpt2) { check_logits("gpt2"); }
TEST(logits_llama) { check_logits("llama"); }
TEST(logits_mixtral) { check_logits("mixtral"); }
TEST(logits_deepseek) { check_logits("deepseek"); }
TEST(logits_mixedmoe) { check_logits("mixedmoe"); }
TEST(logits_patterns) { check_logits("patterns"); }
TEST(logits_linear) { check_logits("linear"); }
TEST(logits_llama31) { check_logits("llama31"); }
TEST(logits_yarn) { check_logits("yarn"); }
TEST(logits_gemma) { check_logits("gemma"); }
TEST(logits_gemma2) { check_logits("gemma2"); }
TEST(logits_olmo2) { check_logits("olmo2"); }
TEST(logits_gptoss) { check_logits("gptoss"); }
TEST(logits_nemotron) { check_logits("nemotron"); }
TEST(logits_gptossfull) { check_logits("gptossfull"); }
TEST(logits_qwen3next) { check_logits("qwen3next"); }
TEST(logits_mla) { check_logits("mla"); }
TEST(logits_mlagate) { check_logits("mlagate"); }
TEST(logits_sharedbias) { check_logits("sharedbias"); }
TEST(logits_deepseekv3) { check_logits("deepseekv3"); }
TEST(logits_mtp) { check_logits("mtp"); }

static int64_t best(const float *logits, int64_t vocab)
{
    int64_t at = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[at]) at = i;
    return at;
}

/* Work of one call of trainer_logits for n tokens behind `past`; the last one's logits. */
static int64_t work_of(Run *r, const int32_t *tokens, int64_t past, int64_t n, float *logits)
{
    const WideCount before = r->t.device.counters.flop;
    OK(trainer_logits(&r->t, tokens + past, past, n, logits));
    return (int64_t)(r->t.device.counters.flop - before);
}

/*
 * Greedy generation with the up-projection absorbed gives the tokens, and to roundings the logits, that the split form
 * gives for the whole text. With every token behind the first its work grows by the products with one cached row, that
 * of the split form by an up-projection and more.
 */
static void check_absorbed(const char *name)
{
    Run r;
    float logits[256], split[256];
    int32_t tokens[256] = { 3 };
    int64_t last = 0;
    generation_open(&r, name);
    const ModelSpec *m = &r.g.spec.model;
    const MlaWidths w = m->latent.width;
    const int64_t key = 2 * (int64_t)m->heads * (2 * w.kv_rank + w.rope); /* FLOP of one that is seen */
    for (int64_t n = 1; n < m->seq; n++) {
        const int64_t work = work_of(&r, tokens, n - 1, 1, logits);
        int64_t more = 0; /* (a window does not grow) */
        for (int i = 0; i < m->layers; i++) {
            const int64_t window = layer_pattern_at(&m->window, i);
            more += !window || n <= window ? key : 0;
        }
        if (n > 2)
            CHECK_MSG(work - last == more, "%s: token %d costs %lld more", name, (int)n, (long long)(work - last));
        last = work;
        OK(trainer_logits(&r.t, tokens, 0, n, split));
        for (int64_t i = 0; i < m->vocab; i++) CHECK_CLOSE((double)logits[i], (double)split[i], 2e-5, "%s", name);
        CHECK(best(logits, m->vocab) == best(split, m->vocab));
        tokens[n] = (int32_t)best(logits, m->vocab);
    }
    run_close(&r);
}

TEST(absorbed_mlasinks) { check_absorbed("mlasinks"); }
TEST(absorbed_mlagate) { check_absorbed("mlagate"); }
TEST(absorbed_mla) { check_absorbed("mla"); }
TEST(absorbed_deepseekv3) { check_absorbed("deepseekv3"); }

/* ---- learning rates ---- */

typedef struct {
    int64_t step;
    double want;
} Rate;

static void check_rates(const char *what, LrSchedule s, const Rate *r, int count)
{
    for (int i = 0; i < count; i++)
        CHECK_MSG(fabs(lr_at(&s, r[i].step) - r[i].want) <= 1e-6 * r[i].want + 1e-18, "%s, step %lld: %.9g, want %.9g",
                  what, (long long)r[i].step, lr_at(&s, r[i].step), r[i].want);
}

#define RATES(what, schedule, ...)                                                                 \
    check_rates((what), (schedule), (const Rate[]){ __VA_ARGS__ },                                 \
                (int)(sizeof((const Rate[]){ __VA_ARGS__ }) / sizeof(Rate)))

/* Worked by hand from the formulas, 100 steps of warm-up, decay until 1100. */
TEST(learning_rates)
{
    LrSchedule s = { LR_COSINE, 3e-4, 3e-5, 100, 1100, 400 };
    RATES("cosine", s, { 1, 3e-6 }, { 50, 1.5e-4 }, { 100, 3e-4 }, { 350, 2.6045941546e-4 }, { 600, 1.65e-4 },
          { 850, 6.954058454e-5 }, { 1100, 3e-5 }, { 5000, 3e-5 });
    s.shape = LR_LINEAR;
    RATES("linear", s, { 50, 1.5e-4 }, { 350, 2.325e-4 }, { 600, 1.65e-4 }, { 1100, 3e-5 }, { 1101, 3e-5 });
    s.shape = LR_CONSTANT;
    RATES("constant", s, { 50, 1.5e-4 }, { 101, 3e-4 }, { 1100, 3e-4 });
    s.shape = LR_INVERSE_SQRT;
    RATES("inverse_sqrt", s, { 50, 1.5e-4 }, { 100, 3e-4 }, { 225, 2e-4 }, { 400, 1.5e-4 }, { 1100, 9.04534034e-5 },
          { 1101, 3e-5 }, { 1000000, 3e-5 });
}

/* The share of lr - min_lr at quarters of the decay: 1, 0.6818, 0.4142, 0.1892, 0 = 2 * 0.5^r - 1. */
TEST(learning_rate_wsd)
{
    LrSchedule s = { LR_WSD, 1, 0, 10, 1000, 400 };
    RATES("wsd", s, { 5, 0.5 }, { 10, 1 }, { 11, 1 }, { 600, 1 }, { 700, 0.681792830507 }, { 800, 0.414213562373 },
          { 900, 0.189207115003 }, { 1001, 0 });
    CHECK(fabs(lr_at(&s, 1000)) <= 1e-15);
    s.min_lr = 0.5;
    RATES("wsd above min_lr", s, { 600, 1 }, { 800, 0.707106781187 }, { 1000, 0.5 }, { 2000, 0.5 });
}

TEST(learning_rate_without_warmup)
{
    LrSchedule s = { LR_LINEAR, 1, 0, 0, 10, 0 };
    RATES("linear", s, { 1, 0.9 }, { 5, 0.5 }, { 9, 0.1 });
    s.shape = LR_INVERSE_SQRT;
    RATES("inverse_sqrt", s, { 1, 1 }, { 4, 0.5 }, { 10, 0.316227766017 }, { 11, 0 }, { 100, 0 });
}

TEST_MAIN
