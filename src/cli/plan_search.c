/*
 * plan --search (plan.h): the fastest layouts of a model on so many ranks, why others are not, what is possible with
 * less memory, and what more ranks give. plan/search.h does the search; this asks and prints.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/units.h"
#include "cli/config_arg.h"
#include "cli/memory_arg.h"
#include "cli/plan.h"
#include "plan/planner.h"
#include "plan/search.h"

enum { WORLDS = 8, REASON_BYTES = 400, JSON_BYTES = 1 << 16 };

/* A layout to compare with the best. */
typedef struct {
    char words[LAYOUT_WORDS];
    SearchResult r;
    char refused[REASON_BYTES]; /* "": it is legal */
} Compared;

/* A question, and what is known of all its answers. */
typedef struct {
    const PlanSearch *asked;
    Config base;
    SearchQuestion q;
    double step_tokens, tokens; /* of a step, of the whole run */
    Planner planner;
    Compared others[SEARCH_PLACES];
    int other_count;
} Query;

/* ---- asking ---- */

/* A word that is no key's is a mistake; a layout that rules refuse is an answer. */
static Err compare_one(Query *q, const char *words, int length)
{
    Compared *o = &q->others[q->other_count];
    snprintf(o->words, sizeof o->words, "%.*s", length, words);
    Err err = config_can_read(&q->base, o->words);
    if (err) return err_prefix(err, "--compare");
    err = search_evaluate_words(&q->q, o->words, &o->r);
    if (err == ERR_MEMORY) return err;
    if (err) snprintf(o->refused, sizeof o->refused, "%s", err_message());
    q->other_count++;
    q->q.place_s[q->q.places++] = err ? 0 : o->r.time.step_s;
    return ERR_OK;
}

static Err compare_others(Query *q, const char *text)
{
    while (*text) {
        text += strspn(text, " ;");
        const int length = (int)strcspn(text, ";");
        if (!length) break;
        if (q->other_count == SEARCH_PLACES || length >= LAYOUT_WORDS)
            return err_set(ERR_CONFIG, "--compare takes up to %d layouts of up to %d characters", SEARCH_PLACES,
                           LAYOUT_WORDS - 1);
        TRY(compare_one(q, text, length));
        text += length;
    }
    return ERR_OK;
}

static Err ask(Query *q, const PlanSearch *p)
{
    *q = (Query){ .asked = p };
    TRY(layout_base(config_source_here(p->config_path, p->overrides, 0), &q->base));
    const Config *c = &q->base;
    TRY(planner_open(&q->planner, p->device, (int)p->world));
    planner_warn(&q->planner.device, c, false);
    q->q = planner_question(&q->planner, c, p->world);
    q->q.best = (int)p->best;
    TRY(plan_vocab(c, &q->q.vocab));
    if (p->memory) TRY(memory_arg("memory", p->memory, &q->q.memory));
    if (p->compare) TRY(compare_others(q, p->compare));
    q->step_tokens = (double)c->derived.global_batch * (double)c->model.seq;
    q->tokens = c->train.tokens > 0 ? (double)c->train.tokens : q->step_tokens * (double)c->derived.steps;
    return ERR_OK;
}

/* ---- figures ---- */

static double rank_tokens(const SearchResult *r) { return r->time.tokens_s / grid_size(r->grid); }

/* Seconds that the busiest rank works in the step; behind them is rest_s. */
static double busy(const SearchResult *r) { return r->time.shares.now - r->time.rest_s; }

/* "tp 8, pp 4, vpp 5, interleaved, micro-batch 1, selective": what is not usual. */
static void put_short(const LayoutSpace *s, const Layout *l, char *out, size_t size)
{
    static const struct {
        LayoutKey key;
        const char *name;
    } numbers[] = { { LAYOUT_TP, "tp" },   { LAYOUT_CP, "cp" }, { LAYOUT_EP, "ep" },
                    { LAYOUT_ETP, "etp" }, { LAYOUT_PP, "pp" }, { LAYOUT_VPP, "vpp" } };
    char text[CONFIG_VALUE_BYTES];
    int n = snprintf(out, size, "dp %lld", (long long)layout_dp(s, l));
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (l->value[numbers[i].key] > 1)
            n += snprintf(out + n, size - (size_t)n, ", %s %d", numbers[i].name, l->value[numbers[i].key]);
    if (l->value[LAYOUT_PP] > 1) n += snprintf(out + n, size - (size_t)n, ", %s", layout_schedule(s, l));
    if (l->value[LAYOUT_CP] > 1)
        n += snprintf(out + n, size - (size_t)n, ", %s", layout_text(s, l, LAYOUT_CP_COMM, text));
    if (l->value[LAYOUT_EP] * l->value[LAYOUT_ETP] > 1)
        n += snprintf(out + n, size - (size_t)n, ", %s", layout_text(s, l, LAYOUT_DISPATCHER, text));
    n += snprintf(out + n, size - (size_t)n, ", micro-batch %d", l->value[LAYOUT_MICRO_BATCH]);
    n += snprintf(out + n, size - (size_t)n, ", recompute %s", layout_text(s, l, LAYOUT_RECOMPUTE, text));
    if (l->value[LAYOUT_ZERO] != 1) n += snprintf(out + n, size - (size_t)n, ", zero %d", l->value[LAYOUT_ZERO]);
    if (l->value[LAYOUT_ORDER]) n += snprintf(out + n, size - (size_t)n, ", dp last");
    if (l->value[LAYOUT_OVERLAP_MOE] > 0) n += snprintf(out + n, size - (size_t)n, ", overlap_moe");
    if (l->value[LAYOUT_OVERLAP_TP] == 1) n += snprintf(out + n, size - (size_t)n, ", no overlap_tp");
    if (*l->stages) snprintf(out + n, size - (size_t)n, ", %s", l->stages);
}

static void put_row(const LayoutSpace *s, const SearchResult *r, const char *head)
{
    char layout[400], bytes[UNITS_BYTES];
    put_short(s, &r->layout, layout, sizeof layout);
    printf("%8s %10.3f %13.0f %6.1f%% %7.1f%% %6.1f%% %12s  %s\n", head, r->time.step_s, rank_tokens(r),
           100 * r->time.mfu, 100 * r->time.bubble_s / r->time.step_s, 100 * r->time.rest_s / r->time.step_s,
           units_bytes(bytes, r->time.bytes), layout);
}

static void put_heading(const char *first)
{
    printf("%8s %10s %13s %7s %8s %7s %12s  %s\n", first, "step, s", "tokens/s/GPU", "MFU", "bubble", "update",
           "worst rank", "layout");
}

/* ---- why others are not better ---- */

typedef struct {
    const char *name;
    LayoutKey key;
    int value;
} Alternative;

static const Alternative alternatives[] = {
    { "no tensor parallelism", LAYOUT_TP, 1 },
    { "tensor parallelism over 8", LAYOUT_TP, 8 },
    { "no pipeline", LAYOUT_PP, 1 },
    { "a pipeline of 8", LAYOUT_PP, 8 },
    { "no expert parallelism", LAYOUT_EP, 1 },
    { "experts over 8", LAYOUT_EP, 8 },
    { "1F1B, even stages", LAYOUT_SCHEDULE, 0 },
    { "micro-batches of 1", LAYOUT_MICRO_BATCH, 1 },
    { "micro-batches of 2", LAYOUT_MICRO_BATCH, 2 },
    { "no recomputation", LAYOUT_RECOMPUTE, RECOMPUTE_NONE },
    { "selective recomputation", LAYOUT_RECOMPUTE, RECOMPUTE_SELECTIVE },
    { "full recomputation", LAYOUT_RECOMPUTE, RECOMPUTE_FULL },
    { "optimizer states whole", LAYOUT_ZERO, 0 },
    { "gradients cut, too", LAYOUT_ZERO, 2 },
    { "weights cut, too", LAYOUT_ZERO, 3 },
};
enum { ALTERNATIVES = sizeof alternatives / sizeof *alternatives };

/* The best with that one value, and what follows from it. False: it is the best's own, or means nothing here. */
static bool alternative_of(const LayoutSpace *s, const Layout *best, const Alternative *a, Layout *out)
{
    const bool experts = s->base->moe.experts > 0;
    *out = *best;
    out->value[a->key] = a->value;
    if (s->fixed[a->key] || best->value[a->key] == a->value || (a->key == LAYOUT_EP && !experts)) return false;
    if (a->key == LAYOUT_SCHEDULE && (best->value[LAYOUT_PP] == 1 || s->value[LAYOUT_SCHEDULE][0] != a->value))
        return false;
    if (a->key == LAYOUT_ZERO && layout_zero(s, out) == layout_zero(s, best)) return false;
    if (a->value == ZERO_VALUES && a->key == LAYOUT_ZERO && layout_zero(s, out) != ZERO_VALUES) return false;
    if ((a->key == LAYOUT_PP || a->key == LAYOUT_SCHEDULE) && !s->fixed[LAYOUT_SCHEDULE]) {
        out->value[LAYOUT_SCHEDULE] = s->value[LAYOUT_SCHEDULE][0];
        if (!s->fixed[LAYOUT_VPP]) out->value[LAYOUT_VPP] = 1;
        *out->stages = 0;
    }
    if (out->value[LAYOUT_TP] == 1 && !s->fixed[LAYOUT_SP]) out->value[LAYOUT_SP] = -1;
    return true;
}

/* By how much, and what of the step grew most. */
static void slower(const SearchResult *best, const SearchResult *r, char out[REASON_BYTES])
{
    PredictionShare was[PREDICTION_SHARES], is[PREDICTION_SHARES];
    int most = 0;
    prediction_shares(&best->time, was);
    prediction_shares(&r->time, is);
    for (int i = 1; i < PREDICTION_SHARES; i++)
        if (is[i].seconds - was[i].seconds > is[most].seconds - was[most].seconds) most = i;
    snprintf(out, REASON_BYTES, "%.1f%% slower: %s %+.3f s", 100 * (r->time.step_s / best->time.step_s - 1),
             is[most].name, is[most].seconds - was[most].seconds);
}

static void reason(const Query *q, const SearchAnswer *a, const Layout *l, char out[REASON_BYTES])
{
    char over[UNITS_BYTES];
    SearchResult r;
    if (!layout_microbatches(&a->space, l)) {
        snprintf(out, REASON_BYTES, "does not divide %lld ranks and a batch of %lld", (long long)q->q.world,
                 (long long)q->base.derived.global_batch);
    } else if (search_estimate(&q->q, &a->space, l, &r)) {
        snprintf(out, REASON_BYTES, "refused: %.380s", err_message());
    } else if (r.time.bytes > q->q.memory) {
        snprintf(out, REASON_BYTES, "%s too much on pipeline rank %d", units_bytes(over, r.time.bytes - q->q.memory),
                 r.time.worst_pp);
    } else slower(&a->best[0], &r, out);
}

static void put_alternatives(const Query *q, const SearchAnswer *a)
{
    char why[REASON_BYTES];
    Layout l;
    printf("\nwith the best layout, but\n");
    for (int i = 0; i < ALTERNATIVES; i++) {
        if (!alternative_of(&a->space, &a->best[0].layout, &alternatives[i], &l)) continue;
        reason(q, a, &l, why);
        printf("  %-28s %s\n", alternatives[i].name, why);
    }
}

/* ---- others ---- */

/* Why the layout is not the best; the best may be slower than one that is outside of the space. */
static void why_not(const Query *q, const SearchAnswer *a, const Compared *o, char out[REASON_BYTES])
{
    char over[UNITS_BYTES];
    if (*o->refused) snprintf(out, REASON_BYTES, "refused: %.380s", o->refused);
    else if (o->r.time.bytes > q->q.memory)
        snprintf(out, REASON_BYTES, "%s too much on pipeline rank %d", units_bytes(over, o->r.time.bytes - q->q.memory),
                 o->r.time.worst_pp);
    else slower(&a->best[0], &o->r, out);
}

static void put_others(const Query *q, const SearchAnswer *a)
{
    char why[REASON_BYTES];
    if (!q->other_count) return;
    printf("\ncompared with the best\n");
    for (int i = 0; i < q->other_count; i++) {
        const Compared *o = &q->others[i];
        why_not(q, a, o, why);
        printf("  %s\n    %s\n", o->words, why);
        if (*o->refused) continue;
        printf("    %.3f s, MFU %.1f%%; %d of %d layouts that were run dry are faster, and %lld of %lld by "
               "the bound of "
               "their parts\n",
               o->r.time.step_s, 100 * o->r.time.mfu, a->place[i].faster, a->dry_runs, (long long)a->place[i].possible,
               (long long)a->legal);
    }
}

static void json_others(JsonOut *j, const Query *q, const SearchAnswer *a)
{
    char why[REASON_BYTES];
    json_open(j, "compared", '[');
    for (int i = 0; i < q->other_count; i++) {
        const Compared *o = &q->others[i];
        why_not(q, a, o, why);
        json_open(j, NULL, '{');
        json_put_text(j, "layout", o->words);
        json_put_text(j, "reason", why);
        json_put_number(j, "step_ms", *o->refused ? NAN : 1e3 * o->r.time.step_s);
        json_put_int(j, "bytes", o->r.time.bytes);
        json_put_int(j, "faster", a->place[i].faster);
        json_put_int(j, "possible", a->place[i].possible);
        json_close(j, '}');
    }
    json_close(j, ']');
}

/* ---- printing ---- */

static void put_fixed(const LayoutSpace *s)
{
    char name[CONFIG_VALUE_BYTES], value[CONFIG_VALUE_BYTES];
    Layout l = { .stages = "" };
    int count = 0;
    for (LayoutKey k = 0; k < LAYOUT_KEYS; k++) l.value[k] = s->value[k][0];
    printf("fixed by the command line:");
    for (LayoutKey k = 0; k < LAYOUT_KEYS; k++)
        if (s->fixed[k]) count++, printf(" %s=%s", layout_key_name(k, name), layout_text(s, &l, k, value));
    if (s->fixed_stages) count++, printf(" parallel.layout=%s", s->base->parallel.layout);
    printf("%s; layout keys of the file are free\n", count ? "" : " nothing");
}

/* Seconds that the run's tokens take, and the cost of its devices for so long. */
static double run_seconds(const Query *q, const SearchResult *r) { return q->tokens / q->step_tokens * r->time.step_s; }

static double run_cost(const Query *q, const SearchResult *r)
{
    return run_seconds(q, r) / 3600 * grid_size(r->grid) * q->asked->price;
}

static void put_cost(const Query *q, const SearchResult *r)
{
    char tokens[UNITS_BYTES], time[UNITS_BYTES];
    const double seconds = run_seconds(q, r);
    if (!(q->tokens > 0)) return;
    printf("%s tokens: %s on %lld", units_count(tokens, q->tokens), units_seconds(time, seconds),
           (long long)grid_size(r->grid));
    if (!isnan(q->asked->price)) printf(", %.1f k$ at %g $/h", run_cost(q, r) / 1000, q->asked->price);
    printf(" (without checkpoints, evaluation and failures)\n");
}

static void put_answer(const Query *q, const SearchAnswer *a)
{
    char words[LAYOUT_WORDS], head[16], memory[UNITS_BYTES];
    printf("%lld x %s of %s: predicted, not measured. %lld layouts looked at, %lld legal in shape, %d run dry\n",
           (long long)q->q.world, q->planner.device.name, units_bytes(memory, q->q.memory), (long long)a->looked_at,
           (long long)a->legal, a->dry_runs);
    put_fixed(&a->space);
    putchar('\n');
    put_heading("");
    for (int i = 0; i < a->count; i++) {
        snprintf(head, sizeof head, "%d", i + 1);
        put_row(&a->space, &a->best[i], head);
    }
    const PredictionShare bound = prediction_bound(&a->best[0].time);
    printf("\nbound by: %s, %.1f%% of the step\n", bound.name, 100 * bound.seconds / a->best[0].time.step_s);
    layout_words(&a->space, &a->best[0].layout, words);
    printf("\nthe best, to paste behind --config:\n  %s\n", words);
    printf("\nwith less memory\n");
    put_heading("");
    for (int i = 0; i < a->front_count; i++) put_row(&a->space, &a->front[i], "");
    put_alternatives(q, a);
    put_others(q, a);
    putchar('\n');
    put_cost(q, &a->best[0]);
}

static void json_result(JsonOut *j, const Query *q, const LayoutSpace *s, const SearchResult *r)
{
    char words[LAYOUT_WORDS];
    json_open(j, NULL, '{');
    layout_words(s, &r->layout, words);
    json_put_text(j, "layout", words);
    json_put_int(j, "world", grid_size(r->grid));
    json_put_number(j, "step_ms", 1e3 * r->time.step_s);
    json_put_number(j, "busy_ms", 1e3 * busy(r));
    json_put_number(j, "bubble_ms", 1e3 * r->time.bubble_s);
    json_put_number(j, "update_ms", 1e3 * r->time.rest_s);
    json_put_number(j, "tokens_per_s_gpu", rank_tokens(r));
    json_put_number(j, "run_s", run_seconds(q, r));
    json_put_number(j, "cost", run_cost(q, r));
    json_put_number(j, "mfu", r->time.mfu);
    json_put_int(j, "bytes", r->time.bytes);
    json_put_int(j, "worst_pp_rank", r->time.worst_pp);
    json_put_text(j, "bound", prediction_bound(&r->time).name);
    json_close(j, '}');
}

static void json_answer(JsonOut *j, const Query *q, const SearchAnswer *a)
{
    json_put_int(j, "world", q->q.world);
    json_put_text(j, "device", q->planner.device.name);
    json_put_int(j, "memory", q->q.memory);
    json_put_int(j, "looked_at", a->looked_at);
    json_put_int(j, "legal", a->legal);
    json_put_int(j, "dry_runs", a->dry_runs);
    json_put_number(j, "tokens", q->tokens);
    json_open(j, "best", '[');
    for (int i = 0; i < a->count; i++) json_result(j, q, &a->space, &a->best[i]);
    json_close(j, ']');
    json_open(j, "front", '[');
    for (int i = 0; i < a->front_count; i++) json_result(j, q, &a->space, &a->front[i]);
    json_close(j, ']');
    json_open(j, "alternatives", '[');
    for (int i = 0; i < ALTERNATIVES; i++) {
        char why[REASON_BYTES];
        Layout l;
        if (!alternative_of(&a->space, &a->best[0].layout, &alternatives[i], &l)) continue;
        reason(q, a, &l, why);
        json_open(j, NULL, '{');
        json_put_text(j, "name", alternatives[i].name);
        json_put_text(j, "reason", why);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_others(j, q, a);
}

/* ---- the whole ---- */

/* On how many ranks would it fit? Twice as many, again and again; then half as many. 0: on none of these. */
static int64_t world_that_fits(const Query *q)
{
    SearchAnswer *a = malloc(sizeof *a);
    SearchQuestion more = q->q;
    int64_t world = 0;
    more.best = 1;
    for (int i = 0; i < 5 && a && !world && more.world <= CONFIG_RANKS_MAX / 2; i++) {
        more.world *= 2;
        if (!search(&more, a) && a->count) world = more.world;
    }
    for (more.world = q->q.world / 2; a && !world && more.world > 0; more.world /= 2)
        if (!search(&more, a) && a->count) world = more.world;
    free(a);
    return world;
}

static Err nothing_fits(const Query *q, const SearchAnswer *a)
{
    char layout[400], have[UNITS_BYTES], want[UNITS_BYTES];
    if (search_found_none(a))
        return err_set(ERR_CONFIG,
                       "no layout of this model divides %lld ranks, a batch of %lld samples and what the "
                       "command line fixes",
                       (long long)q->q.world, (long long)q->base.derived.global_batch),
               err_hint("another --world, train.global_batch, or fewer fixed keys");
    put_short(&a->space, &a->least, layout, sizeof layout);
    const int64_t world = world_that_fits(q);
    err_set(ERR_PLAN, "no layout on %lld ranks was found that fits %s: the least that one takes is %s (%s)",
            (long long)q->q.world, units_bytes(have, q->q.memory), units_bytes(want, a->least_bytes), layout);
    return world ? err_hint("more memory, or %lld rank%s, on which one fits", (long long)world, world > 1 ? "s" : "")
                 : err_hint("more memory; no number of up to %lld ranks that was tried is enough",
                            (long long)q->q.world * 32);
}

/* The world, half of it, ... */
static Err put_worlds(Query *q, JsonOut *j)
{
    SearchAnswer *a = malloc(sizeof *a);
    if (!a) return err_set(ERR_MEMORY, "no memory for an answer");
    Err err = ERR_OK;
    if (!j) printf("\nfewer and fewer ranks\n"), put_heading("ranks");
    for (int i = 0; i < WORLDS && q->q.world && !err; i++) {
        char head[24];
        err = search(&q->q, a);
        if (err || !a->count) break;
        snprintf(head, sizeof head, "%lld", (long long)q->q.world);
        if (j) json_result(j, q, &a->space, &a->best[0]);
        else put_row(&a->space, &a->best[0], head), put_cost(q, &a->best[0]);
        if (q->q.world % 2) break;
        q->q.world /= 2;
    }
    free(a);
    return err == ERR_CONFIG ? ERR_OK : err;
}

static Err print_json(Query *q, const SearchAnswer *a)
{
    JsonOut j;
    char *text = malloc(JSON_BYTES);
    if (!text) return err_set(ERR_MEMORY, "no memory for the plan's text");
    json_out_init(&j, text, JSON_BYTES);
    json_open(&j, NULL, '{');
    json_answer(&j, q, a);
    Err err = ERR_OK;
    if (q->asked->max_world) {
        json_open(&j, "worlds", '[');
        err = put_worlds(q, &j);
        json_close(&j, ']');
    }
    json_close(&j, '}');
    ASSERT(json_out_ok(&j));
    if (!err) puts(text);
    free(text);
    return err;
}

static Err answer(Query *q, SearchAnswer *a)
{
    TRY(search(&q->q, a));
    if (!a->count) return nothing_fits(q, a);
    if (q->asked->as_json) return print_json(q, a);
    put_answer(q, a);
    return q->asked->max_world ? put_worlds(q, NULL) : ERR_OK;
}

Err plan_search(const PlanSearch *p)
{
    SearchAnswer *a = malloc(sizeof *a);
    Query *q = malloc(sizeof *q); /* (a configuration and more: too much for a stack) */
    if (!a || !q) return free(a), free(q), err_set(ERR_MEMORY, "no memory for an answer");
    Err err = ask(q, p);
    if (!err) err = answer(q, a);
    planner_close(&q->planner);
    config_release(&q->base);
    free(q);
    free(a);
    return err;
}
