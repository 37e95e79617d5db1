/* Inner layouts: all combinations of the keys that decide what a part of a model costs, and what their parts cost. */
#include <stdlib.h>
#include <string.h>

#include "plan/searching.h"

Err search_grow(void **items, int64_t count, int64_t *capacity, size_t size)
{
    if (count < *capacity) return ERR_OK;
    const int64_t more = *capacity ? 2 * *capacity : 256;
    void *grown = realloc(*items, (size_t)more * size);
    if (!grown) return err_set(ERR_MEMORY, "no memory for %lld layouts", (long long)more);
    *items = grown;
    *capacity = more;
    return ERR_OK;
}

Err search_add_inner(Search *s, const Layout *l)
{
    int64_t capacity = s->inner_capacity;
    TRY(search_grow((void **)&s->inners, s->inner_count, &capacity, sizeof *s->inners));
    s->inner_capacity = (int)capacity;
    s->inners[s->inner_count++] = (Inner){ .layout = *l };
    return ERR_OK;
}

/* ---- all of them ---- */

/* A key that does nothing beside the others has one value, the space's first. */
static bool inner_matters(const LayoutSpace *s, const Layout *l)
{
    const int *v = l->value;
    if (v[LAYOUT_TP] == 1 && !layout_is_first(s, l, LAYOUT_SP)) return false;
    if (v[LAYOUT_CP] == 1 && !layout_is_first(s, l, LAYOUT_CP_COMM)) return false;
    if (v[LAYOUT_EP] * v[LAYOUT_ETP] == 1 && !layout_is_first(s, l, LAYOUT_DISPATCHER)) return false;
    return true;
}

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

static Err visit_inner(Search *s, Layout *l)
{
    layout_take_first(s->space, l, LAYOUT_INNER);
    if (!inner_matters(s->space, l) || layout_next_pp(s->space, l, 0) == LAYOUT_VALUES) return ERR_OK;
    return search_add_inner(s, l);
}

/* ---- what their parts cost ---- */

/* The specification and grid of the first number of pipeline ranks with which the rules take it. */
bool search_read_inner(const Search *s, Inner *in)
{
    const LayoutSpace *space = s->space;
    in->legal = false;
    for (int at = layout_next_pp(space, &in->layout, 0); at < LAYOUT_VALUES && !in->legal;
         at = layout_next_pp(space, &in->layout, at + 1)) {
        Config c;
        Layout l = in->layout;
        l.value[LAYOUT_VPP] = 1;
        in->legal =
            !layout_config(space, &l, &c) && !grid_read(&c, &in->grid) && !train_spec(&c, s->q->vocab, &in->spec);
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
    for (int at = layout_next_pp(s->space, &guess.layout, 0); at < LAYOUT_VALUES;
         at = layout_next_pp(s->space, &guess.layout, at + 1)) {
        Grid g = in->grid;
        const Shape shape = { .ranks = guess.layout.value[LAYOUT_PP], .s.replicas = 1 };
        g.pp = shape.ranks;
        g.dp = (int)layout_dp(s->space, &guess.layout);
        g.bidirectional = false;
        g.zero_group = 0;
        TrainSpec spec = {
            .compute = in->spec.compute, .exact = in->spec.exact, .update = in->spec.update, .device = in->spec.device
        };
        while (layout_cut_more(s->space, &guess.layout)) {}
        spec.update.zero = layout_zero(s->space, &guess.layout);
        const Pipeline p = { .inner = &guess, .kinds = &s->kinds, .shape = &shape, .state = state_bytes(&spec, g) };
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
    const Err err = layer_costs(&s->q->source, &in->spec, in->grid, &s->kinds, PARTS_WITH_EXPERTS, &in->costs);
    in->measured = !err;
    return err == ERR_MEMORY ? err : ERR_OK;
}

Err search_measure_run(const Search *s, int first, int end, int64_t memory)
{
    LayerCosts whole;
    bool known = false;
    for (int i = first; i < end; i++) {
        Inner *in = &s->inners[i];
        if (!search_read_inner(s, in)) continue;
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
        if (search_measure_run(s, first[r], first[r + 1], s->q->memory)) {
#pragma omp atomic write
            failed = true;
        }
    free(first);
    return failed ? err_set(ERR_MEMORY, "no memory for dry runs of layouts") : ERR_OK;
}

Err search_inners(Search *s)
{
    Layout l = { .stages = "" };
    s->inner_count = 0;
    TRY(each(s, &l, 0, LAYOUT_INNER, visit_inner));
    return measure_inners(s);
}
