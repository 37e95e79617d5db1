/*
 * plan: what a run will need, before it starts. The numbers come from running its very first step and its
 * evaluation on the null device (trainer_plan), which is also what the run itself takes its memory by; there
 * is no second formula, so the table is exact.
 *
 * Ranks with the same tp rank hold the same shard and do the same work; a column of the table is one of the
 * kinds that remain.
 */
#include <string.h>

#include "base/units.h"
#include "cli/config_arg.h"
#include "data/tokenizer.h"
#include "train/spec.h"

enum { MAX_KINDS = 64 };

/* Ranks that need the same. */
typedef struct {
    MemoryPlan plan;
    int64_t flat_count; /* elements of each flat buffer */
    int first_tp_rank, tp_ranks;
} Kind;

typedef struct {
    const Config *cfg;
    TrainSpec spec;
    Grid grid;
    Kind kinds[MAX_KINDS];
    int count;
} Table;

static const char *config_path;
static int64_t world_size = 1;

static const Option options[] = {
    { "config", OPTION_TEXT, &config_path, .required = true, .value = "FILE", .help = "configuration (INI)" },
    { "world", OPTION_INT, &world_size, .low = 1, .high = 1 << 20, .value = "N",
      .help = "ranks to plan for" },
};

/* ---- counting ---- */

/* What of the state is flat buffers: the registry, filled by the same code as in a run. */
static Err flat_elements(const Table *t, int tp_rank, int64_t *out)
{
    SetupArena setup;
    ParamRegistry registry;
    Stage stage;
    setup_init(&setup);
    param_registry_init(&registry, &setup, t->grid.tp, tp_rank);
    Err err = stage_register(&stage, &registry, &t->spec.model, 0, t->spec.model.layers, &setup);
    *out = registry.flat_count;
    setup_release(&setup);
    return err;
}

static bool same_plan(const MemoryPlan *a, const MemoryPlan *b)
{
    return a->state == b->state && a->save[REGION_I] == b->save[REGION_I] &&
           a->save[REGION_W] == b->save[REGION_W] && a->slots == b->slots && a->scratch == b->scratch &&
           a->workspace == b->workspace && a->staging == b->staging && a->flop == b->flop &&
           a->op_bytes == b->op_bytes && a->comm_bytes == b->comm_bytes;
}

static Err count_kinds(Table *t)
{
    for (int tp_rank = 0; tp_rank < t->grid.tp; tp_rank++) {
        Kind k = { .first_tp_rank = tp_rank, .tp_ranks = 1 };
        TRY(trainer_plan(&t->spec, t->grid, tp_rank, &k.plan)); /* tp is fastest: this is rank tp_rank */
        TRY(flat_elements(t, tp_rank, &k.flat_count));
        Kind *last = t->count ? &t->kinds[t->count - 1] : NULL;
        if (last && last->flat_count == k.flat_count && same_plan(&last->plan, &k.plan)) last->tp_ranks++;
        else if (t->count < MAX_KINDS) t->kinds[t->count++] = k;
        else return err_set(ERR_INTERNAL, "more than %d kinds of ranks", MAX_KINDS);
    }
    return ERR_OK;
}

/* ---- printing ---- */

/* 1234567 as 1,234,567. */
static const char *commas(char buf[32], int64_t value)
{
    char digits[24];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)value), used = 0;
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) buf[used++] = ',';
        buf[used++] = digits[i];
    }
    buf[used] = 0;
    return buf;
}

static void put_row(const Table *t, const char *name, int64_t (*value)(const Table *, const Kind *))
{
    char a[32], b[UNITS_BYTES];
    printf("  %-34s", name);
    for (int i = 0; i < t->count; i++) {
        int64_t bytes = value(t, &t->kinds[i]);
        printf(" %18s %9s", commas(a, bytes), units_bytes(b, bytes));
    }
    putchar('\n');
}

static int64_t grad_size(const Table *t) { return dtype_size(t->spec.exact ? I64 : F32); }

static int64_t weights(const Table *t, const Kind *k)
{
    (void)t;
    return k->flat_count * dtype_size(F32);
}

static int64_t narrow_weights(const Table *t, const Kind *k)
{
    return t->spec.compute == F32 ? 0 : k->flat_count * dtype_size(t->spec.compute);
}

static int64_t gradients(const Table *t, const Kind *k) { return k->flat_count * grad_size(t); }

static int64_t moments(const Table *t, const Kind *k)
{
    (void)t;
    return 2 * k->flat_count * dtype_size(F32);
}

static int64_t tables(const Table *t, const Kind *k)
{
    return k->plan.state - weights(t, k) - narrow_weights(t, k) - gradients(t, k) - moments(t, k);
}

static int64_t saves_I(const Table *t, const Kind *k)
{
    (void)t;
    return k->plan.slots * k->plan.save[REGION_I];
}

static int64_t saves_W(const Table *t, const Kind *k)
{
    (void)t;
    return k->plan.slots * k->plan.save[REGION_W];
}

static int64_t scratch(const Table *t, const Kind *k)
{
    (void)t;
    return k->plan.scratch;
}

static int64_t workspace(const Table *t, const Kind *k)
{
    (void)t;
    return k->plan.workspace;
}

static int64_t staging(const Table *t, const Kind *k)
{
    (void)t;
    return k->plan.staging;
}

static int64_t total(const Table *t, const Kind *k)
{
    (void)t;
    return memory_plan_total(&k->plan);
}

static int64_t op_bytes(const Table *t, const Kind *k)
{
    (void)t;
    return k->plan.op_bytes;
}

static int64_t comm_bytes(const Table *t, const Kind *k)
{
    (void)t;
    return k->plan.comm_bytes;
}

static void put_model(const Table *t)
{
    const ModelSpec *m = &t->spec.model;
    int64_t tokens = t->spec.global_batch * m->seq;
    char a[32], b[32], c[32];
    printf(
        "model   %d layers, hidden %lld, %d heads (%d for keys and values) of %d, ffn %lld, sequence %lld, "
        "vocabulary %lld\n",
        m->layers, (long long)m->hidden, m->heads, m->kv_heads, m->head_dim, (long long)m->ffn,
        (long long)m->seq, (long long)m->vocab);
    printf("        %s parameters\n", commas(a, t->kinds[0].plan.params));
    printf("layout  %d rank%s = tp %d x dp %d, micro-batch %lld, %lld micro-batches a step on each rank\n",
           grid_size(t->grid), grid_size(t->grid) == 1 ? "" : "s", t->grid.tp, t->grid.dp,
           (long long)t->spec.micro_batch, (long long)t->cfg->derived.microbatches);
    printf("step    %s samples, %s tokens; %s steps\n", commas(a, t->spec.global_batch), commas(b, tokens),
           commas(c, t->cfg->derived.steps));
}

static void put_kinds(const Table *t)
{
    printf("\n%-36s", "bytes of one rank");
    for (int i = 0; i < t->count; i++) {
        const Kind *k = &t->kinds[i];
        char name[64];
        int last = k->first_tp_rank + k->tp_ranks - 1;
        if (t->grid.tp == 1) snprintf(name, sizeof name, "every rank");
        else if (k->tp_ranks == 1) snprintf(name, sizeof name, "tp rank %d", last);
        else snprintf(name, sizeof name, "tp ranks %d-%d", k->first_tp_rank, last);
        printf(" %18s %9s", name, "");
    }
    putchar('\n');
}

static void put_memory(const Table *t)
{
    put_kinds(t);
    put_row(t, "weights (fp32)", weights);
    if (t->spec.compute != F32) put_row(t, "their 16-bit copy", narrow_weights);
    put_row(t, t->spec.exact ? "gradients (64-bit fixed point)" : "gradients", gradients);
    put_row(t, "moments", moments);
    put_row(t, "tables, batches, statistics", tables);
    put_row(t, "saves, freed after I (all slots)", saves_I);
    put_row(t, "saves, freed after W (all slots)", saves_W);
    put_row(t, "scratch of a layer call", scratch);
    put_row(t, "workspace of kernels, at most", workspace);
    if (t->spec.device == DEVICE_CPU && t->spec.compute != F32)
        put_row(t, "16-bit tensors widened for an op", staging);
    put_row(t, "total", total);
}

static void put_flop(const char *name, double per_token, double tokens)
{
    char a[UNITS_BYTES], b[UNITS_BYTES];
    printf("  %-34s %15s %15s\n", name, units_count(a, per_token), units_count(b, per_token * tokens));
}

static void put_work(const Table *t)
{
    const ModelSpec *m = &t->spec.model;
    double tokens = (double)t->spec.global_batch * (double)m->seq, all_flop = 0;
    int64_t params = t->kinds[0].plan.params, full = model_flop_per_token(m, params),
            attention = full - 6 * params;
    char a[UNITS_BYTES];
    printf("\nwork of one step, of one rank\n");
    put_row(t, "bytes read and written by ops", op_bytes);
    put_row(t, "bytes sent to other ranks", comm_bytes);
    printf("  %-34s", "FLOP of the ops");
    for (int i = 0; i < t->count; i++) {
        const Kind *k = &t->kinds[i];
        printf(" %18s %9s", "", units_count(a, (double)k->plan.flop));
        all_flop += (double)k->plan.flop * k->tp_ranks * t->grid.dp;
    }
    printf("\n\n%-36s %15s %15s\n", "FLOP", "a token", "a step");
    put_flop("counted op by op, all ranks", all_flop / tokens, tokens);
    put_flop("6 N + 12 L C T, what mfu uses", (double)full, tokens);
    put_flop("causal half: 6 N + 6 L C T", (double)(full - attention / 2), tokens);
}

/* ---- the command ---- */

/* With model.vocab given, a plan needs no tokenizer. */
static Err find_vocab(const Config *cfg, int64_t *out)
{
    Tokenizer *t;
    *out = cfg->model.vocab;
    if (*out > 0) return ERR_OK;
    Err err = tokenizer_open(cfg->data.tokenizer, &t);
    if (err) return err_hint("set model.vocab to plan without the tokenizer");
    *out = tokenizer_vocab(t);
    tokenizer_close(t);
    return ERR_OK;
}

static Err plan_config(const Config *cfg)
{
    Table t = { .cfg = cfg, .grid = grid_spec(cfg) };
    int64_t vocab;
    TRY(find_vocab(cfg, &vocab));
    TRY(train_spec(cfg, vocab, &t.spec));
    TRY(count_kinds(&t));
    put_model(&t);
    put_memory(&t);
    put_work(&t);
    return ERR_OK;
}

static Err plan(Words rest)
{
    Config c;
    Err err = config_arg(&c, config_path, rest, world_size);
    if (!err) err = plan_config(&c);
    config_release(&c);
    return err;
}

const Command command_plan = {
    .name = "plan",
    .summary = "exact bytes, FLOP and communication of one rank, from a dry run",
    .rest = REST_OVERRIDES,
    .text =
        "Runs a step and an evaluation on a device that computes nothing and counts everything. A run takes\n"
        "exactly this memory and no more. N: parameters; L C T: layers, width of all heads, sequence.\n",
    OPTIONS(options),
    .run = plan,
};
