/* See search.h. */
#include "plan/search.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "plan/estimate.h"

/* (qsort takes no list that is not there) */
#define ORDER(items, count, before)                                            \
    do {                                                                       \
        if (count) qsort((items), (size_t)(count), sizeof *(items), (before)); \
    } while (0)

enum {
    REPLAYS = 600,      /* of the schedules of layouts of the least bounds, */
    HOPES = 100,        /* of such that another cut may make fit, */
    CUT_MORE = 300,     /* and of such that fit with more cut by ZeRO */
    CUT_UP = 24,        /* how many of these are cut unevenly as well, */
    CUTS = 3,           /* and how many cuts of each go on */
    FINALISTS = 24,     /* run dry at least, */
    CUT_FINALISTS = 72, /* with those where ZeRO cuts more, */
    FINALS = 1024,      /* and at most; */
    EFFORT = 160000,    /* less where dry runs take long, which are counted so: */
    EFFORT_OF_RUN = 64,
    EFFORTS_MOST = 40, /* so many times that, where what is run dry does not fit */
    SMALLEST = 64,     /* run dry where none of those fits, */
    TOGETHER = 8,      /* so many at once */
    VARIED = 6,        /* how many of the best are tried with other orders, other ZeRO, ..., */
    PAIRED = 2,        /* and of others that may pair units; */
    VARIANTS = 17      /* each so often at most */
};

/* What of memory the next layout of a front takes at most. */
static const double FRONT_STEP = 0.97;
enum { FRONT = 8 };

/* Finalists go on while estimates stay below the best exact time so much enlarged: by what a sum of parts is off. */
static const double SLACK = 1.05;

/* A layout that passed the rules of shape. */
typedef struct {
    Layout layout;
    int inner;
    double bound, seconds; /* at least; by a replay */
    int64_t bytes;         /* at least */
    bool too_large;        /* as it is cut */
} Candidate;

typedef struct {
    const SearchQuestion *q;
    SearchAnswer *out;
    const LayoutSpace *space;
    BlockKinds kinds;
    Inner *inners;
    int inner_count, inner_capacity;
    Candidate *items;
    int64_t count, capacity;
    ShapeTable shapes;
    Candidate smallest[TOGETHER]; /* that need least at least */
    int smallest_count;
    SearchResult *results; /* [FINALS + variants] */
    int result_count;
    int threads;
} Search;

/* ---- lists that grow ---- */

static Err grow(void **items, int64_t count, int64_t *capacity, size_t size)
{
    if (count < *capacity) return ERR_OK;
    const int64_t more = *capacity ? 2 * *capacity : 256;
    void *grown = realloc(*items, (size_t)more * size);
    if (!grown) return err_set(ERR_MEMORY, "no memory for %lld layouts", (long long)more);
    *items = grown;
    *capacity = more;
    return ERR_OK;
}

static Err add_inner(Search *s, const Layout *l)
{
    int64_t capacity = s->inner_capacity;
    TRY(grow((void **)&s->inners, s->inner_count, &capacity, sizeof *s->inners));
    s->inner_capacity = (int)capacity;
    s->inners[s->inner_count++] = (Inner){ .layout = *l };
    return ERR_OK;
}

static Err add_candidate(Search *s, const Candidate *c)
{
    TRY(grow((void **)&s->items, s->count, &s->capacity, sizeof *s->items));
    s->items[s->count++] = *c;
    return ERR_OK;
}

/* ---- which values are told apart ---- */

static bool is_first(const LayoutSpace *s, const Layout *l, LayoutKey key)
{
    return l->value[key] == s->value[key][0];
}

/* A key that does nothing beside the others has one value, the space's first. */
static bool inner_matters(const LayoutSpace *s, const Layout *l)
{
    const int *v = l->value;
    if (v[LAYOUT_TP] == 1 && !is_first(s, l, LAYOUT_SP)) return false;
    if (v[LAYOUT_CP] == 1 && !is_first(s, l, LAYOUT_CP_COMM)) return false;
    if (v[LAYOUT_EP] * v[LAYOUT_ETP] == 1 && !is_first(s, l, LAYOUT_DISPATCHER)) return false;
    return true;
}

static const struct {
    const char *name;
    int chunks; /* 0: any number above 1 */
} chunks_of[] = { { "1f1b", 1 }, { "seq1f1b", 1 }, { "zb-h1", 1 },     { "zb-h2", 1 },      { "dualpipe", 1 },
                  { "zb-v", 2 }, { "v-half", 2 },  { "dualpipev", 2 }, { "interleaved", 0 } };

/* Whether so many chunks are worth to be asked of the schedule's own rule: it refuses the others. */
static bool may_have_chunks(const char *schedule, int chunks)
{
    for (size_t i = 0; i < sizeof chunks_of / sizeof *chunks_of; i++)
        if (!strcmp(schedule, chunks_of[i].name))
            return chunks_of[i].chunks ? chunks == chunks_of[i].chunks : chunks > 1;
    return true;
}

static bool outer_matters(const LayoutSpace *s, const Layout *l)
{
    const int *v = l->value;
    const bool alone = v[LAYOUT_PP] == 1;
    if (alone && !s->fixed[LAYOUT_SCHEDULE] && !is_first(s, l, LAYOUT_SCHEDULE)) return false;
    if (alone && !s->fixed[LAYOUT_VPP] && v[LAYOUT_VPP] > 1) return false;
    return s->fixed[LAYOUT_VPP] || may_have_chunks(layout_schedule(s, l), v[LAYOUT_VPP]);
}

/* ---- the inner layouts ---- */

/* Calls `visit` with every combination of the keys [from, to). */
static Err each(Search *s, Layout *l, int from, int to, Err (*visit)(Search *, Layout *))
{
    if (from == to) return visit(s, l);
    for (int i = 0; i < s->space->count[from]; i++) {
        l->value[from] = s->space->value[from][i];
        TRY(each(s, l, from + 1, to, visit));
    }
    return ERR_OK;
}

static void take_first(const LayoutSpace *s, Layout *l, int from)
{
    for (int k = from; k < LAYOUT_KEYS; k++) l->value[k] = s->value[k][0];
}

/* The first number of pipeline ranks from `at` on with which all is divided; LAYOUT_VALUES: there is none. */
static int next_pp(const LayoutSpace *s, Layout *l, int at)
{
    for (; at < s->count[LAYOUT_PP]; at++) {
        l->value[LAYOUT_PP] = s->value[LAYOUT_PP][at];
        if (layout_microbatches(s, l)) return at;
    }
    return LAYOUT_VALUES;
}

static Err visit_inner(Search *s, Layout *l)
{
    take_first(s->space, l, LAYOUT_INNER);
    if (!inner_matters(s->space, l) || next_pp(s->space, l, 0) == LAYOUT_VALUES) return ERR_OK;
    return add_inner(s, l);
}

/* The specification and grid of the first number of pipeline ranks with which the rules take it. */
static bool read_inner(const Search *s, Inner *in)
{
    const LayoutSpace *space = s->space;
    in->legal = false;
    for (int at = next_pp(space, &in->layout, 0); at < LAYOUT_VALUES && !in->legal;
         at = next_pp(space, &in->layout, at + 1)) {
        Config c;
        Layout l = in->layout;
        l.value[LAYOUT_VPP] = 1;
        in->legal = !layout_config(space, &l, &c) && !grid_read(&c, &in->grid) &&
                    !train_spec(&c, s->q->vocab, &in->spec);
        in->sums_by_message = spec_sums_by_message(&c);
        in->host_ranks = spec_host_ranks(&c);
        config_release(&c);
    }
    in->spec.pipeline = (PipelineSpec){ .schedule = "1f1b" }; /* (its texts went with the configuration) */
    return in->legal;
}

static bool same_dense(const Inner *a, const Inner *b)
{
    return !memcmp(a->layout.value, b->layout.value, LAYOUT_DENSE * sizeof(int));
}

/* The run of neighbours that differ in keys of experts alone: parts without experts are measured once. */
static int run_of(const Search *s, int first)
{
    int end = first + 1;
    while (end < s->inner_count && same_dense(&s->inners[first], &s->inners[end])) end++;
    return end;
}

static int64_t libraries_of(const Search *s, const Inner *in, Grid g)
{
    return s->q->libraries ? grid_library_bytes(g, in->sums_by_message, in->host_ranks) : 0;
}

/* What the pipeline that shares the weights best takes for them. Experts are cut in ep x etp parts at most: what
 * `whole`, measured with the experts in one part, says of others. */
static int64_t weights_of(const Search *s, const Inner *in, const LayerCosts *whole)
{
    Inner guess = *in;
    int64_t least = INT64_MAX;
    const int parts = in->layout.value[LAYOUT_EP] * in->layout.value[LAYOUT_ETP];
    guess.costs = *whole;
    for (int k = 0; k < s->kinds.count; k++) guess.costs.block[k].experts /= parts;
    guess.costs.modules.experts /= parts;
    for (int at = next_pp(s->space, &guess.layout, 0); at < LAYOUT_VALUES;
         at = next_pp(s->space, &guess.layout, at + 1)) {
        Grid g = in->grid;
        const Shape shape = { .ranks = guess.layout.value[LAYOUT_PP], .s.replicas = 1 };
        g.pp = shape.ranks;
        g.dp = (int)layout_dp(s->space, &guess.layout);
        g.bidirectional = false;
        g.zero_group = 0;
        TrainSpec spec = { .compute = in->spec.compute,
                           .exact = in->spec.exact,
                           .update = in->spec.update,
                           .device = in->spec.device };
        while (layout_cut_more(s->space, &guess.layout)) {}
        spec.update.zero = layout_zero(s->space, &guess.layout);
        const Pipeline p = {
            .inner = &guess, .kinds = &s->kinds, .shape = &shape, .state = state_bytes(&spec, g)
        };
        const int64_t bytes = pipeline_mean_bytes(&p);
        if (bytes < least) least = bytes;
    }
    return least;
}

/* All experts' elements on one rank of a pipeline, to divide. */
static Err whole_experts(const Search *s, const Inner *in, LayerCosts *out)
{
    Grid g = in->grid;
    TrainSpec spec = in->spec;
    spec.model.moe.dispatcher = DISPATCH_ALLTOALL;
    if (g.ep) g.ep = g.etp = g.ep_hosts = 1;
    return layer_costs(&s->q->source, &spec, g, &s->kinds, PARTS_ALL, out);
}

static Err measure_one(const Search *s, Inner *in, const LayerCosts *whole)
{
    in->costs = *whole;
    in->measured = true;
    if (in->grid.ep * in->grid.etp <= 1) return ERR_OK;
    const Err err =
        layer_costs(&s->q->source, &in->spec, in->grid, &s->kinds, PARTS_WITH_EXPERTS, &in->costs);
    in->measured = !err;
    return err == ERR_MEMORY ? err : ERR_OK;
}

/* Neighbours with the same dense keys; those whose weights are more than `memory` are left out. */
static Err measure_run(const Search *s, int first, int end, int64_t memory)
{
    LayerCosts whole;
    bool known = false;
    for (int i = first; i < end; i++) {
        Inner *in = &s->inners[i];
        if (!read_inner(s, in)) continue;
        const Err err = known ? ERR_OK : whole_experts(s, in, &whole);
        if (err == ERR_MEMORY) return err;
        if ((in->legal = !err) == false) continue;
        known = true;
        in->weights = weights_of(s, in, &whole);
        if (in->weights <= memory) TRY(measure_one(s, in, &whole));
    }
    return ERR_OK;
}

static Err measure_inners(Search *s)
{
    int *first = calloc((size_t)s->inner_count + 1, sizeof *first), runs = 0;
    bool failed = false;
    if (!first) return err_set(ERR_MEMORY, "no memory for %d layouts", s->inner_count);
    for (int i = 0; i < s->inner_count; i = run_of(s, i)) first[runs++] = i;
    first[runs] = s->inner_count;
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
    for (int r = 0; r < runs; r++)
        if (measure_run(s, first[r], first[r + 1], s->q->memory)) {
#pragma omp atomic write
            failed = true;
        }
    free(first);
    return failed ? err_set(ERR_MEMORY, "no memory for dry runs of layouts") : ERR_OK;
}

/* ---- candidates ---- */

static Err shape_of(Search *s, const Layout *l, Shape **out)
{
    return shape_get(&s->shapes, layout_schedule(s->space, l), l->value[LAYOUT_PP], l->value[LAYOUT_VPP],
                     (int)layout_microbatches(s->space, l), out);
}

/* The pipeline of a layout whose inner part is known, with its lists or without; shares: [stages of the shape].
 * ERR_CONFIG where it is not legal. */
static Err pipeline_of(Search *s, const Layout *l, int inner, bool lists, StageShare *shares, Pipeline *out)
{
    Shape *shape;
    const Inner *in = &s->inners[inner];
    const int64_t asked = s->space->base->parallel.zero_group;
    Grid g = in->grid;
    TRY(shape_of(s, l, &shape));
    if (lists) TRY(shape_lists(shape));
    if (!shape->legal) return ERR_CONFIG;
    const char *stages = s->space->fixed_stages ? s->space->base->parallel.layout : l->stages;
    TRY(stage_shares(&in->spec.model, stages, shape->s.stages, shares));
    TrainSpec spec = in->spec;
    spec.update.zero = layout_zero(s->space, l);
    g.pp = shape->ranks;
    g.dp = (int)layout_dp(s->space, l);
    g.bidirectional = shape->s.replicas > 1;
    g.zero_group = param_zero_group(g, spec.update.zero, asked);
    if (asked > g.dp * (g.cp ? g.cp : 1) || !grid_fits(grid_shape(g))) return ERR_CONFIG;
    *out = (Pipeline){ .inner = in,
                       .kinds = &s->kinds,
                       .shape = shape,
                       .shares = shares,
                       .state = state_bytes(&spec, g),
                       .zero = spec.update.zero,
                       .copies = g.dp * (g.cp ? g.cp : 1),
                       .libraries = libraries_of(s, in, g) };
    return ERR_OK;
}

enum { STAGES_MOST = 1024 };

static void keep_smallest(Search *s, const Candidate *c)
{
    int at = s->smallest_count;
    if (at == TOGETHER && c->bytes >= s->smallest[--at].bytes) return;
    if (s->smallest_count < TOGETHER) s->smallest_count++;
    for (; at && c->bytes < s->smallest[at - 1].bytes; at--) s->smallest[at] = s->smallest[at - 1];
    s->smallest[at] = *c;
}

/* ZeRO cuts as little as may fit. */
static Err visit_candidate(Search *s, const Layout *l, int inner)
{
    StageShare shares[STAGES_MOST];
    Pipeline p;
    Candidate c = { .layout = *l, .inner = inner };
    bool legal = false;
    do {
        const Err err = pipeline_of(s, &c.layout, inner, false, shares, &p);
        if (err == ERR_MEMORY) return err;
        if (err) return ERR_OK;
        s->out->legal += !legal;
        legal = true;
        c.bytes = pipeline_mean_bytes(&p);
    } while (c.bytes > s->q->memory && layout_cut_more(s->space, &c.layout));
    c.bound = pipeline_bound(&p);
    keep_smallest(s, &c);
    return c.bytes > s->q->memory ? ERR_OK : add_candidate(s, &c);
}

/* All pipelines with an inner layout. Orders of ranks, ZeRO and overlaps are told apart among finalists. */
static Err visit_outer(Search *s, int inner)
{
    Layout l = s->inners[inner].layout;
    const LayoutSpace *space = s->space;
    for (int at = next_pp(space, &l, 0); at < LAYOUT_VALUES; at = next_pp(space, &l, at + 1))
        for (int v = 0; v < space->count[LAYOUT_VPP]; v++)
            for (int k = 0; k < space->count[LAYOUT_SCHEDULE]; k++) {
                l.value[LAYOUT_VPP] = space->value[LAYOUT_VPP][v];
                l.value[LAYOUT_SCHEDULE] = space->value[LAYOUT_SCHEDULE][k];
                s->out->looked_at++;
                if (outer_matters(space, &l)) TRY(visit_candidate(s, &l, inner));
            }
    return ERR_OK;
}

static int by_bound(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->bound < y->bound || x->bound > y->bound) return x->bound < y->bound ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

static int by_seconds(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->too_large != y->too_large) return x->too_large - y->too_large;
    if (x->seconds < y->seconds || x->seconds > y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

typedef enum { AS_USUAL, WITH_HOPE, CUT_FURTHER, REPLAYED } Replayed;

/* Replays a layout. *keep: it is legal, and it fits, or is one of those that another cut may make fit. */
static Err replay_one(Search *s, Candidate *c, int left[REPLAYED], bool *keep)
{
    StageShare shares[STAGES_MOST];
    Pipeline p;
    *keep = false;
    const Err err = pipeline_of(s, &c->layout, c->inner, true, shares, &p);
    if (err) return err == ERR_MEMORY ? err : ERR_OK;
    c->bytes = pipeline_bytes(&p);
    c->too_large = c->bytes > s->q->memory;
    s->out->small_enough += !c->too_large;
    const bool usual = is_first(s->space, &c->layout, LAYOUT_ZERO);
    if (left[c->too_large ? WITH_HOPE : usual ? AS_USUAL : CUT_FURTHER]-- <= 0) return ERR_OK;
    TRY(pipeline_seconds(&p, &c->seconds));
    *keep = c->seconds > 0; /* (and a number) */
    return ERR_OK;
}

static void count_possible(Search *s)
{
    for (int k = 0; k < s->q->places; k++)
        for (int64_t i = 0; i < s->count; i++)
            s->out->place[k].possible += s->items[i].bound < s->q->place_s[k];
}

static void count_faster(Search *s)
{
    for (int k = 0; k < s->q->places; k++)
        for (int i = 0; i < s->result_count; i++)
            s->out->place[k].faster += s->results[i].time.step_s < s->q->place_s[k];
}

/* Those of the least bounds are replayed, the others go; and what does not fit once more with more cut by ZeRO. */
static Err replay(Search *s)
{
    int left[REPLAYED] = { REPLAYS, HOPES, CUT_MORE };
    ON_HEAP(Candidate, kept, REPLAYS + HOPES + CUT_MORE);
    int count = 0;
    ORDER(s->items, s->count, by_bound);
    for (int64_t i = 0; i < s->count && left[AS_USUAL] > 0; i++) {
        Candidate c = s->items[i];
        do {
            bool keep;
            TRY(replay_one(s, &c, left, &keep));
            if (keep) kept[count++] = c;
        } while (c.too_large && layout_cut_more(s->space, &c.layout));
    }
    s->count = 0;
    for (int i = 0; i < count; i++) TRY(add_candidate(s, &kept[i]));
    return ERR_OK;
}

static Err cut_up(Search *s, const Candidate *c)
{
    StageShare shares[STAGES_MOST];
    Pipeline p;
    CutText cuts[CUTS];
    int count;
    TRY(pipeline_of(s, &c->layout, c->inner, true, shares, &p));
    TRY(pipeline_cuts(&p, s->q->memory, CUTS, cuts, &count));
    for (int i = 0; i < count; i++) {
        Candidate cut = *c;
        cut.too_large = false;
        cut.seconds = cuts[i].seconds;
        memcpy(cut.layout.stages, cuts[i].text, sizeof cut.layout.stages);
        TRY(add_candidate(s, &cut));
    }
    return ERR_OK;
}

/* The fastest, whether or not they fit as they are: another cut may. */
static Err cut_best(Search *s)
{
    Candidate best[CUT_UP];
    int count = 0;
    if (s->space->fixed_stages) return ERR_OK;
    for (int64_t i = 0; i < s->count; i++) {
        const Candidate *c = &s->items[i];
        int at = count;
        if (c->layout.value[LAYOUT_PP] == 1) continue;
        if (count == CUT_UP && !(c->seconds < best[count - 1].seconds)) continue;
        if (count < CUT_UP) count++;
        else at--;
        for (; at && c->seconds < best[at - 1].seconds; at--) best[at] = best[at - 1];
        best[at] = *c;
    }
    for (int i = 0; i < count; i++) TRY(cut_up(s, &best[i]));
    return ERR_OK;
}

/* ---- exactly ---- */

/* legal: ERR_OK, or the refusal of that configuration. */
static Err evaluate_config(const SearchQuestion *q, const Config *c, Err legal, bool brief, SearchResult *out)
{
    TrainSpec spec;
    Err err = legal;
    if (!err) err = brief ? grid_read(c, &out->grid) : grid_try(c, &out->grid);
    if (!err) err = train_spec(c, q->vocab, &spec);
    if (!err) err = trainer_grid(&spec, &out->grid);
    if (!err)
        err = predict_by(&q->source, &spec, out->grid, brief ? PREDICT_BRIEF : PREDICT_RANKS, &out->time);
    if (!err && q->libraries) out->time.bytes += spec_library_bytes(c, out->grid);
    return err;
}

static Err evaluate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, bool brief,
                    SearchResult *out)
{
    Config c;
    *out = (SearchResult){ .layout = *l };
    const Err err = evaluate_config(q, &c, layout_config(space, l, &c), brief, out);
    config_release(&c);
    return err;
}

Err search_evaluate_words(const SearchQuestion *q, const char *words, SearchResult *out)
{
    Config c;
    LayoutSpace space;
    char all[2 * LAYOUT_WORDS], first[LAYOUT_WORDS];
    *out = (SearchResult){ .layout = { .stages = "" } };
    layout_space(q->base, q->world, q->limits, &space);
    take_first(&space, &out->layout, 0);
    layout_words(&space, &out->layout, first);
    if (snprintf(all, sizeof all, "%s %s", first, words) >= (int)sizeof all)
        return err_set(ERR_CONFIG, "%zu characters are too many for a layout", strlen(words));
    const Err err = evaluate_config(q, &c, config_for(q->base, q->world, all, &c), false, out);
    config_release(&c);
    return err;
}

bool search_found_none(const SearchAnswer *a) { return !a->space.base || a->least_bytes == INT64_MAX; }

Err search_evaluate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, SearchResult *out)
{
    return evaluate(q, space, l, false, out);
}

Err search_estimate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, SearchResult *out)
{
    return evaluate(q, space, l, true, out);
}

static int compare_results(const SearchResult *x, const SearchResult *y)
{
    if (x->time.step_s < y->time.step_s || x->time.step_s > y->time.step_s)
        return x->time.step_s < y->time.step_s ? -1 : 1;
    if (x->time.bytes != y->time.bytes) return x->time.bytes < y->time.bytes ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

static int by_step(const void *a, const void *b) { return compare_results(a, b); }

/* Several layouts at once, in their order. Those that a rule refuses or that do not fit are passed over; which need
 * more memory than there is goes to `large`. */
static Err run_once(Search *s, const Layout *layouts, int count, Layout large[TOGETHER], int *too_large)
{
    SearchResult r[TOGETHER];
    Err err[TOGETHER];
    ASSERT(count <= TOGETHER);
    *too_large = 0;
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
    for (int i = 0; i < count; i++) err[i] = evaluate(s->q, s->space, &layouts[i], true, &r[i]);
    for (int i = 0; i < count; i++) {
        if (err[i] == ERR_MEMORY) return err_set(ERR_MEMORY, "no memory for a dry run");
        if (err[i]) continue;
        s->out->dry_runs++;
        if (r[i].time.bytes < s->out->least_bytes)
            s->out->least_bytes = r[i].time.bytes, s->out->least = r[i].layout;
        const bool timed = r[i].time.step_s > 0 && r[i].time.step_s < DBL_MAX;
        if (r[i].time.bytes > s->q->memory) large[(*too_large)++] = layouts[i];
        else if (timed) s->results[s->result_count++] = r[i];
    }
    return ERR_OK;
}

/* Of layouts that differ in what ZeRO cuts alone, the first that fits. */
static Err run_dry(Search *s, const Layout *layouts, int count)
{
    Layout now[TOGETHER], large[TOGETHER];
    memcpy(now, layouts, (size_t)count * sizeof *now);
    while (count) {
        int too_large;
        TRY(run_once(s, now, count, large, &too_large));
        count = 0;
        for (int i = 0; i < too_large; i++)
            if (layout_cut_more(s->space, &large[i])) now[count++] = large[i];
    }
    return ERR_OK;
}

static double best_so_far(const Search *s)
{
    double best = DBL_MAX;
    for (int i = 0; i < s->result_count; i++)
        if (s->results[i].time.step_s < best) best = s->results[i].time.step_s;
    return best;
}

/* Dry runs of all its ranks take about as long as so many actions of lists. */
static double effort_of(const Search *s, const Layout *l)
{
    const double ranks = l->value[LAYOUT_PP], chunks = l->value[LAYOUT_VPP];
    const int units = shape_microbatches((int)ranks, (int)layout_microbatches(s->space, l));
    return ranks * (EFFORT_OF_RUN + ranks * chunks * units);
}

/* What estimates know least of is what ZeRO-2 and 3 send beside ops: others are to be among them. */
static bool enough_finalists(const Search *s)
{
    int usual = 0;
    for (int i = 0; i < s->result_count; i++) usual += is_first(s->space, &s->results[i].layout, LAYOUT_ZERO);
    return usual >= FINALISTS || s->result_count >= CUT_FINALISTS;
}

static Err run_finalists(Search *s)
{
    ORDER(s->items, s->count, by_seconds);
    double effort = 0;
    for (int64_t i = 0; i < s->count && i + TOGETHER < FINALS;) {
        Layout l[TOGETHER];
        int n = 0;
        if (s->items[i].too_large) break;
        const bool enough = effort > EFFORT || s->items[i].seconds > SLACK * best_so_far(s);
        if (enough_finalists(s) && enough) break;
        for (; n < TOGETHER && i < s->count && !s->items[i].too_large; i++) {
            l[n++] = s->items[i].layout;
            effort += effort_of(s, &s->items[i].layout);
        }
        if (effort > EFFORTS_MOST * EFFORT) break;
        TRY(run_dry(s, l, n));
    }
    return ERR_OK;
}

static bool may_pair(const LayoutSpace *s, const Layout *l)
{
    bool pairs;
    return !schedule_pairs(layout_schedule(s, l), &pairs) && pairs;
}

/* Whether the key's other value is another layout, and one that may fit. */
static bool may_vary(const Search *s, const Layout *of, LayoutKey key)
{
    const int *v = of->value;
    if (s->space->count[key] < 2) return false;
    switch (key) {
    case LAYOUT_ZERO: return layout_dp(s->space, of) * v[LAYOUT_CP] > 1 && v[key] == ZERO_STATES;
    case LAYOUT_ORDER: return v[LAYOUT_PP] > 1;
    case LAYOUT_OVERLAP_MOE: return v[LAYOUT_EP] * v[LAYOUT_ETP] > 1 && may_pair(s->space, of);
    case LAYOUT_OVERLAP_TP: return v[LAYOUT_TP] > 1;
    default: return false;
    }
}

/* What is told apart among the best alone. */
static const LayoutKey varied[] = { LAYOUT_ZERO, LAYOUT_ORDER, LAYOUT_OVERLAP_MOE, LAYOUT_OVERLAP_TP };
enum { VARIED_KEYS = sizeof varied / sizeof *varied };

/* Every combination of two values of these keys but the layout's own; and what takes less memory. */
static Err vary(Search *s, const Layout *of)
{
    Layout l[VARIANTS];
    int n = 0;
    for (int bits = 1; bits < 1 << VARIED_KEYS; bits++) {
        bool other = true;
        l[n] = *of;
        for (int k = 0; k < VARIED_KEYS; k++) {
            if (!(bits >> k & 1)) continue;
            other &= may_vary(s, of, varied[k]);
            l[n].value[varied[k]] = s->space->value[varied[k]][1];
        }
        n += other;
    }
    for (Layout more = *of; layout_cut_more(s->space, &more);) l[n++] = more;
    for (int i = 0; i < n; i += TOGETHER) TRY(run_dry(s, l + i, n - i < TOGETHER ? n - i : TOGETHER));
    return ERR_OK;
}

/* The best, and of those that may pair a forward with a backward, which estimates know nothing of, the best. */
static Err vary_best(Search *s)
{
    Layout best[VARIED + PAIRED];
    int n = 0, pairs = 0;
    ORDER(s->results, s->result_count, by_step);
    for (int i = 0; i < s->result_count; i++) {
        const Layout *l = &s->results[i].layout;
        const bool more = i >= VARIED && pairs < PAIRED && may_vary(s, l, LAYOUT_OVERLAP_MOE);
        pairs += more;
        if (i < VARIED || more) best[n++] = *l;
    }
    for (int i = 0; i < n; i++) TRY(vary(s, &best[i]));
    ORDER(s->results, s->result_count, by_step);
    return ERR_OK;
}

/* Of layouts that differ in what finalists are varied by alone, the best counts. */
static bool is_varied(const SearchAnswer *a, const Layout *more, int count, const Layout *l)
{
    for (int i = 0; i < a->count + count; i++) {
        Layout of = i < a->count ? a->best[i].layout : more[i - a->count];
        for (int k = 0; k < VARIED_KEYS; k++) of.value[varied[k]] = l->value[varied[k]];
        if (!layout_compare(&of, l)) return true;
    }
    return false;
}

/* The best once more, whole: all rules, all that is in a step, each rank that may differ. */
static Err confirm(Search *s)
{
    SearchAnswer *a = s->out;
    const int want = s->q->best < SEARCH_BEST ? s->q->best : SEARCH_BEST;
    for (int i = 0; i < s->result_count && a->count < want;) {
        Layout l[TOGETHER];
        SearchResult r[TOGETHER];
        Err err[TOGETHER];
        int n = 0;
        for (; n < TOGETHER && i < s->result_count; i++)
            if (!is_varied(a, l, n, &s->results[i].layout)) l[n++] = s->results[i].layout;
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
        for (int k = 0; k < n; k++) err[k] = search_evaluate(s->q, s->space, &l[k], &r[k]);
        for (int k = 0; k < n; k++) {
            if (err[k] == ERR_MEMORY) return err_set(ERR_MEMORY, "no memory for a dry run");
            if (!err[k] && r[k].time.bytes <= s->q->memory && a->count < SEARCH_BEST)
                a->best[a->count++] = r[k];
        }
    }
    ORDER(a->best, a->count, by_step);
    if (a->count > want) a->count = want;
    return ERR_OK;
}

static int by_weights(const void *a, const void *b)
{
    const Inner *x = a, *y = b;
    if (x->legal != y->legal) return y->legal - x->legal;
    if (x->weights != y->weights) return x->weights < y->weights ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

/* No weights fit: those inner layouts whose weights take least are measured, after all. */
static Err measure_smallest(Search *s)
{
    ORDER(s->inners, s->inner_count, by_weights);
    for (int i = 0; i < s->inner_count && i < TOGETHER && s->inners[i].legal; i++) {
        TRY(measure_run(s, i, i + 1, INT64_MAX));
        if (s->inners[i].measured) TRY(visit_outer(s, i));
    }
    return ERR_OK;
}

static int by_bytes(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

/* None of the fast ones fits: those that need least of all that were replayed. */
static Err run_smallest(Search *s)
{
    ORDER(s->items, s->count, by_bytes);
    for (int64_t i = 0; i < s->count && i < SMALLEST && !s->result_count;) {
        Layout l[TOGETHER];
        int n = 0;
        for (; n < TOGETHER && i < s->count; i++) l[n++] = s->items[i].layout;
        TRY(run_dry(s, l, n));
    }
    return ERR_OK;
}

/* Nothing fits: what needs least, exactly. */
static Err find_least(Search *s)
{
    Layout l[TOGETHER];
    if (s->result_count) return ERR_OK;
    if (!s->smallest_count) TRY(measure_smallest(s));
    const int n = s->smallest_count;
    for (int i = 0; i < n; i++) l[i] = s->smallest[i].layout;
    return run_dry(s, l, n);
}

static void find_front(const Search *s)
{
    SearchAnswer *a = s->out;
    int64_t least = INT64_MAX;
    for (int i = 0; i < s->result_count; i++) {
        const SearchResult *r = &s->results[i];
        if ((double)r->time.bytes > FRONT_STEP * (double)least || a->front_count == FRONT) continue;
        least = r->time.bytes;
        a->front[a->front_count++] = *r;
    }
}

static Err run(Search *s)
{
    Layout l = { .stages = "" };
    if (!block_kinds(&s->inners[0].spec.model, &s->kinds))
        return err_set(ERR_CONFIG, "a search knows models of at most %d kinds of blocks", BLOCK_KINDS);
    s->inner_count = 0;
    TRY(each(s, &l, 0, LAYOUT_INNER, visit_inner));
    TRY(measure_inners(s));
    for (int i = 0; i < s->inner_count; i++)
        if (s->inners[i].measured) TRY(visit_outer(s, i));
    count_possible(s);
    TRY(replay(s));
    TRY(cut_best(s));
    TRY(run_finalists(s));
    if (!s->result_count) TRY(run_smallest(s));
    TRY(vary_best(s));
    count_faster(s);
    TRY(find_least(s));
    find_front(s);
    return confirm(s);
}

Err search(const SearchQuestion *q, SearchAnswer *out)
{
    memset(out, 0, sizeof *out);
    layout_space(q->base, q->world, q->limits, &out->space);
    out->least_bytes = INT64_MAX;
    Search s = { .q = q, .out = out, .space = &out->space };
    Layout first = { .stages = "" };
    s.threads = q->threads > 0 ? q->threads : 1;
    s.results = calloc(FINALS + SMALLEST + TOGETHER + (VARIED + PAIRED) * VARIANTS, sizeof *s.results);
    Err err = s.results ? add_inner(&s, &first) : err_set(ERR_MEMORY, "no memory for a search");
    if (!err) err = train_spec(q->base, q->vocab, &s.inners[0].spec);
    if (!err && q->source.model) err = predict_allowed(q->source.model->device, &s.inners[0].spec);
    if (!err) err = run(&s);
    shape_table_free(&s.shapes);
    free(s.results);
    free(s.inners);
    free(s.items);
    return err;
}

int64_t search_memory_bound(const SearchQuestion *q, const LayoutSpace *space, const Layout *l)
{
    SearchAnswer *unused = calloc(1, sizeof *unused);
    Search s = { .q = q, .out = unused, .space = space };
    StageShare shares[STAGES_MOST];
    Pipeline p;
    int64_t bytes = 0;
    if (unused && !add_inner(&s, l) && read_inner(&s, s.inners) &&
        block_kinds(&s.inners->spec.model, &s.kinds) && !measure_run(&s, 0, 1, INT64_MAX) &&
        s.inners->measured && !pipeline_of(&s, l, 0, true, shares, &p))
        bytes = pipeline_bytes(&p);
    free(unused);
    shape_table_free(&s.shapes);
    free(s.inners);
    return bytes;
}
