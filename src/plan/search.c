/* See search.h; searching.h names the parts. */
#include <stdlib.h>
#include <string.h>

#include "plan/searching.h"

/* The share of memory that the next layout of a front takes at most. */
static const double FRONT_STEP = 0.97;
enum { FRONT = 8 };

/* ---- where nothing fits ---- */

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
    for (int i = 0; i < s->inner_count && i < SEARCH_TOGETHER && s->inners[i].legal; i++) {
        TRY(search_measure_run(s, i, i + 1, INT64_MAX));
        if (s->inners[i].measured) TRY(search_candidates(s, i));
    }
    return ERR_OK;
}

/* Nothing fits: what needs least, exactly. */
static Err find_least(Search *s)
{
    Layout l[SEARCH_TOGETHER];
    if (s->result_count) return ERR_OK;
    if (!s->smallest_count) TRY(measure_smallest(s));
    const int n = s->smallest_count;
    for (int i = 0; i < n; i++) l[i] = s->smallest[i].layout;
    return search_run_dry(s, l, n);
}

/* ---- the whole ---- */

static void count_faster(Search *s)
{
    for (int k = 0; k < s->q->places; k++)
        for (int i = 0; i < s->result_count; i++)
            s->out->place[k].faster += s->results[i].time.step_s < s->q->place_s[k];
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
    if (!block_kinds(&s->inners[0].spec.model, &s->kinds))
        return err_set(ERR_CONFIG, "a search knows models of at most %d kinds of blocks", BLOCK_KINDS);
    TRY(search_inners(s));
    for (int i = 0; i < s->inner_count; i++)
        if (s->inners[i].measured) TRY(search_candidates(s, i));
    search_count_possible(s);
    TRY(search_replay(s));
    TRY(search_cut_best(s));
    TRY(search_finalists(s));
    if (!s->result_count) TRY(search_smallest(s));
    TRY(search_vary_best(s));
    count_faster(s);
    TRY(find_least(s));
    find_front(s);
    return search_confirm(s);
}

Err search(const SearchQuestion *q, SearchAnswer *out)
{
    memset(out, 0, sizeof *out);
    layout_space(q->base, q->world, q->limits, &out->space);
    out->least_bytes = INT64_MAX;
    Search s = { .q = q, .out = out, .space = &out->space };
    Layout first = { .stages = "" };
    s.threads = q->threads > 0 ? q->threads : 1;
    s.results = calloc((size_t)search_results_most(), sizeof *s.results);
    Err err = s.results ? search_add_inner(&s, &first) : err_set(ERR_MEMORY, "no memory for a search");
    if (!err) err = train_spec(q->base, q->vocab, &s.inners[0].spec);
    if (!err && q->source.model) err = predict_allowed(q->source.model->device, &s.inners[0].spec);
    if (!err) err = run(&s);
    shape_table_free(&s.shapes);
    free(s.results);
    free(s.inners);
    free(s.items);
    return err;
}

bool search_found_none(const SearchAnswer *a) { return !a->space.base || a->least_bytes == INT64_MAX; }

int64_t search_memory_bound(const SearchQuestion *q, const LayoutSpace *space, const Layout *l)
{
    SearchAnswer *unused = calloc(1, sizeof *unused);
    Search s = { .q = q, .out = unused, .space = space };
    StageShare shares[SEARCH_STAGES];
    Pipeline p;
    int64_t bytes = 0;
    if (unused && !search_add_inner(&s, l) && search_read_inner(&s, s.inners) &&
        block_kinds(&s.inners->spec.model, &s.kinds) && !search_measure_run(&s, 0, 1, INT64_MAX) &&
        s.inners->measured && !search_pipeline(&s, l, 0, true, shares, &p))
        bytes = pipeline_bytes(&p);
    free(unused);
    shape_table_free(&s.shapes);
    free(s.inners);
    return bytes;
}
