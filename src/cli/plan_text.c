/*
 * A plan as text: the rows of plan_figures.c, and tables of stages, groups and communication (plan.h). A column of a
 * table is a kind of ranks.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/int64.h"
#include "base/units.h"
#include "cli/plan.h"
#include "engine/expert_load.h"

enum {
    KINDS_ABREAST = 4,
    STAGES_SHOWN = 16, /* lines of the table of stages, without --all */
    FIGURES_MOST = 16,
    SENDERS_NAMED = 6
};

/* ---- what is planned ---- */

static void put_pipeline(const PlanTable *t)
{
    const MemoryPlan *p = &t->kinds[0].plan;
    const int directions = t->grid.bidirectional ? 2 : 1, chunks = p->stage_count / directions;
    printf("        %s, %d stages%s, %d on each rank; ranks are numbered %s\n", t->spec.pipeline.schedule,
           t->grid.pp * chunks, directions > 1 ? " in each of two directions" : "", p->stage_count,
           grid_order_text(t->grid));
}

/* "8 experts, 2 a token, of ffn 64 in 2 of 4 layers; shared expert of ffn 64, gated" */
static void put_mixture(const ModelSpec *m)
{
    const MixtureSpec *e = &m->moe;
    printf("        %d experts, %d a token, of ffn %lld in %d of %d layers", e->experts, e->topk, (long long)e->ffn,
           layer_set_count(&e->layers), m->layers);
    if (e->capacity.factor > 0) printf(", which take %g times the mean", e->capacity.factor);
    if (e->router.groups > 1) printf("; %d of %d groups a token", e->router.group_topk, e->router.groups);
    if (e->latent) printf(", between latents of %lld", (long long)e->latent);
    if (e->shared_ffn)
        printf("; shared expert of ffn %lld%s", (long long)e->shared_ffn, e->shared_gate ? ", gated" : "");
    putchar('\n');
}

/* What a rank's experts have room for, of a layer and of what passes through the stages at once; what they cannot get
 * more than. */
static void put_limits(const PlanTable *t)
{
    const MixtureSpec *e = &t->spec.model.moe;
    const Grid g = t->grid;
    const int64_t unit = t->kinds[0].plan.unit;
    const MoeCut cut = expert_load_cut(&t->spec, g, unit);
    const MoeLimits limits = moe_limits(&cut);
    char a[32], b[32], c[32];
    printf("experts %d on each of %d ranks, with room for %s rows of a layer and %smicro-batch; even is %s, "
           "the most that can come %s",
           e->experts / g.ep, g.ep * cut.etp, units_commas(a, limits.owned),
           unit < t->spec.micro_batch ? "part of a " : "", units_commas(b, cut.rows * e->topk * cut.etp),
           units_commas(c, limits.worst));
    if (e->capacity.redo && limits.piece < cut.rows)
        printf("; beyond it in %lld pieces", (long long)((cut.rows + limits.piece - 1) / limits.piece));
    putchar('\n');
}

/* What crosses the network and what stays on a host, of a step of the rank that sends the most. Results go from rank to
 * rank: to those elsewhere by their number. */
static void put_hosts(const PlanTable *t)
{
    const MoeCut cut = expert_load_cut(&t->spec, t->grid, t->kinds[0].plan.unit);
    const MoeLimits limits = moe_limits(&cut);
    const int ranks = cut.ep * cut.etp, here = ranks / cut.hosts;
    int64_t network = 0, inside = 0;
    char a[UNITS_BYTES], b[UNITS_BYTES];
    for (int i = 0; i < t->count; i++) {
        const MemoryPlan *p = &t->kinds[i].plan;
        const int64_t results = p->work.comm[GROUP_TP_EP][COMM_ALL_TO_ALL_ROWS].bytes / (ranks - 1);
        network = max64(network, p->work.comm[GROUP_EP_RAIL][COMM_ALL_TO_ALL_ROWS].bytes + results * (ranks - here));
        inside = max64(inside, p->work.comm[GROUP_EP_HOST][COMM_ALL_TO_ALL_ROWS].bytes + results * (here - 1));
    }
    printf("hosts   %d for each %d ranks with experts: a token's row goes to %.2f of them (even routing), at "
           "most to %lld; of a step's rows and results %s cross the network, %s stay on a host\n",
           cut.hosts, ranks, moe_even_hosts(&cut), (long long)(limits.crossing / cut.rows), units_bytes(a, network),
           units_bytes(b, inside));
}

/* A token meets all parameters but those of the experts that it is not sent to. */
static void put_params(const ModelSpec *m, int64_t params)
{
    char a[32], b[32];
    printf("        %s parameters", units_commas(a, params));
    if (m->moe.experts) printf(", %s of them active for a token", units_commas(b, model_active_params(m, params)));
    putchar('\n');
}

/* The device that is planned for, and where that came from: the same configuration is another plan elsewhere. */
static void put_device(const PlanTable *t)
{
    const Config *c = t->cfg;
    const bool found = c->origin[CFG_run_device].kind == ORIGIN_AUTO;
    const bool cpu = t->spec.device.kind == DEVICE_CPU;
    char precision[CONFIG_VALUE_BYTES];
    const bool dots = cpu && t->spec.compute == BF16;
    const bool theirs = t->target && *t->target->points.dot && c->origin[CFG_debug_dot].kind == ORIGIN_AUTO;
    printf("device  %s, %s%s%s%s\n",
           t->target ? t->target->name
           : cpu     ? "cpu"
                     : "cuda",
           config_value(c, CFG_run_precision, precision), dots ? ", products by " : "",
           !dots    ? ""
           : theirs ? t->target->points.dot
                    : dot_name(t->spec.device.dot),
           !found ? ""
           : cpu  ? " (this machine has no GPU; --device h100 plans for one)"
                  : " (this machine's; --device plans for another)");
}

static void put_fp8(const ModelSpec *m)
{
    const int keep = (m->layers - layer_set_count(&m->fp8.blocks)) / 2;
    printf("fp8     %s, blocks %d to %d%s; codes and factors lie in scratch while a product runs%s\n",
           fp8_facts(m->fp8.recipe)->name, keep, m->layers - keep - 1,
           !m->moe.experts  ? ""
           : m->fp8.experts ? ", experts too"
                            : ", experts in bf16",
           m->fp8.keeps_weights ? ", those of weights in state" : "");
}

static void put_latent(const ModelSpec *m)
{
    const MlaWidths *w = &m->latent.width;
    char queries[64] = "";
    if (w->q_rank) snprintf(queries, sizeof queries, "queries of latents of %lld, ", (long long)w->q_rank);
    printf("latent  %skeys and values of latents of %lld; a head: %lld columns, %lld %s, values of "
           "%lld\n",
           queries, (long long)w->kv_rank, (long long)w->nope, (long long)w->rope,
           m->rope.columns ? "with positions" : "of keys that heads share", (long long)w->value);
}

static void put_model(const PlanTable *t)
{
    const ModelSpec *m = &t->spec.model;
    int64_t tokens = t->spec.global_batch * m->seq;
    char a[32], b[32], c[32], pp[24], cp[24];
    put_device(t);
    printf("model   %d layers, hidden %lld, %d heads (%d for keys and values) of %d, ffn %lld, sequence %lld, "
           "vocabulary %lld\n",
           m->layers, (long long)m->hidden, m->heads, m->kv_heads, m->head_dim, (long long)m->ffn, (long long)m->seq,
           (long long)m->vocab);
    if (m->latent.width.kv_rank) put_latent(m);
    if (m->fp8.recipe) put_fp8(m);
    if (m->moe.experts) put_mixture(m);
    put_params(m, t->kinds[0].plan.params.model);
    snprintf(pp, sizeof pp, " x pp %d", t->grid.pp);
    snprintf(cp, sizeof cp, " x cp %d", t->grid.cp);
    printf("layout  %d rank%s = tp %d%s x dp %d%s, micro-batch %lld, %lld micro-batches a step on each rank\n",
           grid_size(t->grid), grid_size(t->grid) == 1 ? "" : "s", t->grid.tp, t->grid.cp > 1 ? cp : "", t->grid.dp,
           t->grid.pp > 1 ? pp : "", (long long)t->spec.micro_batch, (long long)t->cfg->derived.microbatches);
    if (t->grid.pp > 1) put_pipeline(t);
    if (t->grid.ep > 1) put_limits(t);
    if (t->grid.ep_hosts > 1) put_hosts(t);
    if (t->spec.ramp.count > 1)
        printf("ramp    train.global_batch = %s; what follows is of a step of the largest batch\n",
               t->cfg->train.global_batch);
    printf("step    %s samples, %s tokens; %s steps\n", units_commas(a, t->spec.global_batch), units_commas(b, tokens),
           units_commas(c, t->cfg->derived.steps));
}

/* "tp rank 0", "cp ranks 0-3", before it the separator; nothing where the axis has one rank. */
static size_t axis_name(const char *axis, int first, int count, int ranks, char *out, size_t size)
{
    const int last = first + count - 1;
    *out = 0;
    if (ranks == 1) return 0;
    if (count == 1) return (size_t)snprintf(out, size, "%s rank %d", axis, last);
    return (size_t)snprintf(out, size, "%s ranks %d-%d", axis, first, last);
}

/* "every rank", "tp ranks 0-3", "pp rank 2", "pp 2, tp rank 0", "tp ranks 0-3, cp rank 1" */
static void kind_name(const PlanTable *t, const PlanKind *k, char *out, size_t size)
{
    const bool all_cp = k->cp_ranks == t->grid.cp;
    char tp[32], cp[32];
    axis_name("tp", k->first_tp_rank, k->tp_ranks, t->grid.tp, tp, sizeof tp);
    axis_name("cp", k->first_cp_rank, k->cp_ranks, all_cp ? 1 : t->grid.cp, cp, sizeof cp);
    const char *comma = *tp && *cp ? ", " : "";
    if (t->grid.pp == 1) snprintf(out, size, "%s%s%s", *tp || *cp ? tp : "every rank", comma, cp);
    else if (k->tp_ranks == t->grid.tp && all_cp) snprintf(out, size, "pp rank %d", k->pp_rank);
    else snprintf(out, size, "pp %d, %s%s%s", k->pp_rank, tp, comma, cp);
}

/* ---- figures: a line each, or, of many kinds of ranks, a column each ---- */

static const char *figure_text(const PlanTable *t, const PlanKind *k, const PlanFigure *f, char *out)
{
    const int64_t value = plan_value(t, k, f);
    return f->is_count ? units_count(out, (double)value) : units_bytes(out, value);
}

/* On a GPU, what the host holds is no part of the total, and stands behind it. */
static bool is_apart(const PlanTable *t, const PlanFigure *f)
{
    return f->on_host && f->on_host(t) && t->kinds[0].plan.host_apart;
}

/* Those that are shown, in their order. Their number. */
static int choose_figures(const PlanTable *t, const PlanFigure *figures, const PlanFigure *out[FIGURES_MOST])
{
    int count = 0;
    for (int apart = 0; apart < 2; apart++)
        for (const PlanFigure *f = figures; f->key; f++)
            if (is_apart(t, f) == apart && (!f->shown || f->shown(t))) {
                ASSERT(count < FIGURES_MOST);
                out[count++] = f;
            }
    return count;
}

static void put_line(const PlanTable *t, const PlanFigure *f)
{
    char label[64], a[32], b[UNITS_BYTES];
    snprintf(label, sizeof label, "%s%s", is_apart(t, f) ? "of the host: " : "", f->label);
    printf("  %-34s", label);
    for (int i = 0; i < t->count; i++)
        printf(" %18s %9s", f->is_count ? "" : units_commas(a, plan_value(t, &t->kinds[i], f)),
               figure_text(t, &t->kinds[i], f, b));
    putchar('\n');
}

static void put_lines(const PlanTable *t, const char *title, const PlanFigure *const *figures, int count)
{
    printf("\n%-36s", title);
    for (int i = 0; i < t->count; i++) {
        char name[80];
        kind_name(t, &t->kinds[i], name, sizeof name);
        printf(" %18s %9s", name, "");
    }
    putchar('\n');
    for (int i = 0; i < count; i++) put_line(t, figures[i]);
}

static bool is_same(const PlanTable *t, const PlanFigure *f)
{
    int64_t first = plan_value(t, &t->kinds[0], f);
    for (int i = 1; i < t->count; i++)
        if (plan_value(t, &t->kinds[i], f) != first) return false;
    return true;
}

/* A row of a table with a column for each figure that differs between kinds of ranks: its head where `k` is NULL. */
static void put_cells(const PlanTable *t, const PlanKind *k, const PlanFigure *const *figures, int count)
{
    char text[UNITS_BYTES];
    for (int i = 0; i < count; i++)
        if (!is_same(t, figures[i])) printf(" %10s", k ? figure_text(t, k, figures[i], text) : figures[i]->heading);
    putchar('\n');
}

static void put_columns(const PlanTable *t, const char *title, const PlanFigure *const *figures, int count)
{
    char text[UNITS_BYTES], name[80];
    printf("\n%-20s", title);
    put_cells(t, NULL, figures, count);
    for (int i = 0; i < t->count; i++) {
        kind_name(t, &t->kinds[i], name, sizeof name);
        printf("  %-18s", name);
        put_cells(t, &t->kinds[i], figures, count);
    }
    for (int i = 0; i < count; i++)
        if (is_same(t, figures[i]))
            printf("  each: %s %s\n", figures[i]->label, figure_text(t, &t->kinds[0], figures[i], text));
}

static const PlanKind *least_kind(const PlanTable *t)
{
    const PlanKind *least = t->kinds;
    for (int i = 1; i < t->count; i++)
        if (memory_plan_total(&t->kinds[i].plan) < memory_plan_total(&least->plan)) least = &t->kinds[i];
    return least;
}

/* The kinds that take the most and the least, of many. */
static void put_extremes(const PlanTable *t, const char *title, const PlanFigure *const *figures, int count)
{
    const PlanKind *most = plan_largest(t), *least = least_kind(t);
    PlanTable *brief = malloc(sizeof *brief);
    PlanKind *two = calloc(2, sizeof *two);
    if (brief && two) {
        two[0] = *most;
        two[1] = *least;
        *brief = *t;
        brief->kinds = two;
        brief->count = most == least ? 1 : 2;
        put_lines(brief, title, figures, count);
        printf("  (%s of %d kinds of ranks; --all shows each)\n",
               most == least ? "one" : "that of the most bytes and that of the least", t->count);
    }
    free(brief);
    free(two);
}

static void put_figures(const PlanTable *t, const char *title, const PlanFigure *figures)
{
    const PlanFigure *chosen[FIGURES_MOST];
    const int count = choose_figures(t, figures, chosen);
    if (t->count <= KINDS_ABREAST) put_lines(t, title, chosen, count);
    else if (t->all) put_columns(t, title, chosen, count);
    else put_extremes(t, title, chosen, count);
}

/* ---- stages, state, groups ---- */

static int stage_lines(const PlanTable *t)
{
    int n = 0;
    for (int i = 0; i < t->count; i++) n += t->kinds[i].plan.stage_count;
    return n;
}

/* Bytes that each stage keeps, and each rank takes. */
static void put_stages(const PlanTable *t)
{
    if (t->count == 1 && t->kinds[0].plan.stage_count == 1) return;
    if (!t->all && stage_lines(t) > STAGES_SHOWN) {
        printf("\nstages  what each keeps and what it has in flight: --all\n");
        return;
    }
    printf("\n%-18s %5s %7s %6s %9s %18s %18s %18s %18s\n", "stages", "stage", "replica", "blocks", "in flight",
           "a unit keeps to I", "to W", "saves of the rank", "rank's total");
    for (int i = 0; i < t->count; i++) {
        const MemoryPlan *p = &t->kinds[i].plan;
        for (int s = 0; s < p->stage_count; s++) {
            const StagePlan *q = &p->stages[s];
            char name[80], a[32], b[32], c[32], d[32];
            kind_name(t, &t->kinds[i], name, sizeof name);
            printf("  %-16s %5d %7d %6d %9d %19s %18s %18s %18s\n", s ? "" : name, q->stage, q->replica, q->layers,
                   q->in_flight, units_commas(a, q->save[REGION_I]), units_commas(b, q->save[REGION_W]),
                   s ? "" : units_commas(c, p->save), s ? "" : units_commas(d, memory_plan_total(p)));
        }
    }
}

/* Bytes of one parameter, and what the layout leaves empty. */
static void put_state(const PlanTable *t)
{
    const MemoryPlan *p = &t->kinds[0].plan;
    const PlanKind *k = &t->kinds[0];
    int64_t used = p->params.flat - p->params.padding;
    double each = (double)plan_param_bytes(t, k) / (double)used;
    char a[32], b[32];
    printf("\n  %.3f bytes of state a parameter of the rank (%s); %d bucket%s, %s elements of padding%s\n", each,
           units_commas(a, used), p->params.buckets, p->params.buckets == 1 ? "" : "s",
           units_commas(b, p->params.padding), t->spec.exact ? "; gradients are of 64-bit fixed point" : "");
}

static void put_memory(const PlanTable *t)
{
    put_figures(t, "bytes of one rank", plan_memory);
    put_state(t);
}

/* "  checkpoint: 80,345,600 bytes (76.6 MiB) in 4 shards of 19.1 MiB to 19.2 MiB, and a manifest" */
static void put_checkpoint(const PlanTable *t)
{
    char a[32], b[UNITS_BYTES], c[UNITS_BYTES], d[UNITS_BYTES];
    int64_t least = INT64_MAX, most = 0;
    int shards = 0;
    for (int rank = 0; rank < grid_size(t->grid); rank++) {
        const int64_t bytes = t->shards[rank];
        if (!bytes) continue;
        shards++;
        if (bytes < least) least = bytes;
        if (bytes > most) most = bytes;
    }
    printf("\n  checkpoint: %s bytes (%s) in %d shard%s", units_commas(a, plan_checkpoint(t)),
           units_bytes(b, plan_checkpoint(t)), shards, shards == 1 ? "" : "s");
    if (shards > 1) printf(" of %s to %s", units_bytes(c, least), units_bytes(d, most));
    printf(", and a manifest\n");
}

enum { MEMBERS_SHOWN = 8, MEMBERS_COLUMNS = 48 };

static bool same_groups(GridShape s, GroupKind a, GroupKind b)
{
    if (group_size(s, a) != group_size(s, b)) return false;
    for (int rank = 0; rank < s.world; rank++)
        if (group_of(s, a, rank) != group_of(s, b, rank)) return false;
    return true;
}

/* "(0 1 2 3)", "(0 8 ... 56)" */
static void group_text(const int *members, int size, char *out, size_t room)
{
    size_t n = (size_t)snprintf(out, room, "(");
    for (int i = 0; i < size; i++) {
        const bool left_out = size > MEMBERS_SHOWN && i >= 2 && i < size - 1;
        if (left_out && i > 2) continue;
        if (left_out) n += (size_t)snprintf(out + n, room - n, " ...");
        else n += (size_t)snprintf(out + n, room - n, "%s%d", i ? " " : "", members[i]);
    }
    snprintf(out + n, room - n, ")");
}

/* As many groups as a line has room for, and how many there are. */
static void put_members(GridShape s, GroupKind kind, int *members)
{
    const int size = group_size(s, kind), count = group_count(s, kind);
    char text[160];
    for (int g = 0, columns = 0; g < count; g++) {
        group_members(s, kind, g, members);
        group_text(members, size, text, sizeof text);
        columns += (int)strlen(text) + 1;
        if (g && columns > MEMBERS_COLUMNS) {
            printf("... %d of %d ", count, size);
            return;
        }
        printf("%s ", text);
    }
}

/* Who shares a group: "(0 1) (2 3)   tp, tp-pp"; kinds of group with the same ranks share a line. */
static void put_groups(const PlanTable *t)
{
    const GridShape shape = grid_shape(t->grid);
    bool shown[GROUP_KINDS] = { false };
    int *members = calloc((size_t)shape.world, sizeof *members);
    for (GroupKind kind = 0; kind < GROUP_KINDS && members; kind++) {
        if (shown[kind] || group_size(shape, kind) == 1) continue;
        printf("groups  ");
        put_members(shape, kind, members);
        for (GroupKind other = kind; other < GROUP_KINDS; other++) {
            if (!same_groups(shape, kind, other)) continue;
            printf("%s %s", other == kind ? " " : ",", group_name(other));
            shown[other] = true;
        }
        putchar('\n');
    }
    free(members);
}

/* ---- communication and work ---- */

static int64_t grouped_bytes(const MemoryPlan *p, int group)
{
    int64_t n = 0;
    for (int k = 0; k < COMM_KIND_COUNT; k++) n += p->work.comm[group][k].bytes;
    return n;
}

static bool same_comm(const PlanKind *a, const PlanKind *b)
{
    return !memcmp(a->plan.work.comm, b->plan.work.comm, sizeof a->plan.work.comm);
}

/* "pp rank 1, pp rank 2": the kinds that send what kind `first` does. */
static void put_senders(const PlanTable *t, int first)
{
    int alike = 0, named = 0;
    for (int i = first; i < t->count; i++) alike += same_comm(&t->kinds[first], &t->kinds[i]);
    if (alike == t->count) alike = 0;
    for (int i = first; i < t->count && named < alike && named < SENDERS_NAMED; i++) {
        char name[80];
        if (!same_comm(&t->kinds[first], &t->kinds[i])) continue;
        kind_name(t, &t->kinds[i], name, sizeof name);
        printf("%s%s", named++ ? "; " : "", name);
    }
    if (!alike) puts("every rank");
    else if (named < alike) printf("; and %d more kinds of ranks\n", alike - named);
    else putchar('\n');
}

static bool shown_before(const PlanTable *t, int kind)
{
    for (int i = 0; i < kind; i++)
        if (same_comm(&t->kinds[i], &t->kinds[kind])) return true;
    return false;
}

/* Bytes that each communicator sends, call by call; ranks that send the same share a table. */
static void put_comm(const PlanTable *t, int kind)
{
    const MemoryPlan *p = &t->kinds[kind].plan;
    if (!p->work.comm_bytes) return;
    printf("\n%-36s %15s %18s   ", "communication of one step", "calls", "bytes sent");
    put_senders(t, kind);
    for (int i = 0; i < WORLD_COMMS; i++)
        for (int k = 0; k < COMM_KIND_COUNT && grouped_bytes(p, i); k++) {
            char name[64], a[32], b[32];
            if (!p->work.comm[i][k].bytes) continue;
            snprintf(name, sizeof name, "%s %s", group_name((GroupKind)i), comm_kind_name((CommKind)k));
            printf("  %-34s %15s %18s", name, units_commas(a, p->work.comm[i][k].calls),
                   units_commas(b, p->work.comm[i][k].bytes));
            if (p->work.comm[i][k].most)
                printf("   if experts get equally many rows; at most %s", units_commas(a, p->work.comm[i][k].most));
            putchar('\n');
        }
}

static void put_flop(const char *name, double per_token, double tokens)
{
    char a[UNITS_BYTES], b[UNITS_BYTES];
    printf("  %-34s %15s %15s\n", name, units_count(a, per_token), units_count(b, per_token * tokens));
}

/* Muon's share, and how even its matrices are dealt to the ranks of a stage. */
static void put_muon(const PlanTable *t, double all_flop)
{
    double flop = 0, most = 0;
    for (int i = 0; i < t->count; i++) {
        const PlanKind *k = &t->kinds[i];
        flop += k->plan.muon.mean * k->tp_ranks * k->cp_ranks * t->grid.dp;
        most = fmax(most, k->plan.muon.imbalance);
    }
    printf("  of muon's matrices %.3g TFLOP a step, %.2f %% of all; the rank that owns the most has %.2f "
           "times the "
           "mean\n",
           1e-12 * flop, 100 * flop / all_flop, most);
}

static void put_work(const PlanTable *t)
{
    const ModelSpec *m = &t->spec.model;
    const double tokens = (double)t->spec.global_batch * (double)m->seq, all_flop = plan_flop(t);
    int64_t params = t->kinds[0].plan.params.model, full = model_flop_per_token(m, params),
            attention = model_attention_flop_per_token(m);
    put_figures(t, "work of one rank", plan_work);
    printf("\n%-36s %15s %15s\n", "FLOP", "a token", "a step");
    put_flop("counted op by op, all ranks", all_flop / tokens, tokens);
    put_flop(model_has_states(m) ? "6 N + 12 L C T + states, as mfu" : "6 N + 12 L C T, what mfu uses", (double)full,
             tokens);
    put_flop("causal half: keys that are seen", (double)(full - attention + model_causal_flop_per_token(m)), tokens);
    if (t->spec.update.optimizer == OPTIMIZER_MUON) put_muon(t, all_flop);
}

/* Without --all, the table of many kinds is that of the rank with the most bytes. */
static void put_communication(const PlanTable *t)
{
    const bool brief = !t->all && t->count > KINDS_ABREAST;
    const int largest = (int)(plan_largest(t) - t->kinds);
    bool others = false;
    for (int kind = 0; kind < t->count; kind++)
        if (brief) others |= !same_comm(&t->kinds[largest], &t->kinds[kind]);
        else if (!shown_before(t, kind)) put_comm(t, kind);
    if (brief) put_comm(t, largest);
    if (others) printf("  (other kinds of ranks send otherwise: --all)\n");
}

void plan_print_text(const PlanTable *t)
{
    plan_put_answer(t);
    put_model(t);
    put_groups(t);
    put_memory(t);
    put_checkpoint(t);
    put_stages(t);
    plan_put_recompute(t);
    put_work(t);
    put_communication(t);
    plan_put_time(t);
}
