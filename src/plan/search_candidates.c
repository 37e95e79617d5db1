/* Candidates: pipelines of the inner layouts, what they take and need at least, and the schedules of the most promising
 * replayed. */
#include <string.h>
#include <stdlib.h>

#include "base/heap.h"
#include "plan/searching.h"

enum {
    REPLAYS = 600,  /* of the schedules of layouts of the least bounds, */
    HOPES = 100,    /* of such that another cut may make fit, */
    CUT_MORE = 300, /* and of such that fit with more cut by ZeRO */
    CUT_UP = 24,    /* how many of these are cut unevenly as well, */
    CUTS = 3        /* and how many cuts of each go on */
};

/* ---- which schedules are told apart ---- */

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
    if (alone && !s->fixed[LAYOUT_SCHEDULE] && !layout_is_first(s, l, LAYOUT_SCHEDULE)) return false;
    if (alone && !s->fixed[LAYOUT_VPP] && v[LAYOUT_VPP] > 1) return false;
    return s->fixed[LAYOUT_VPP] || may_have_chunks(layout_schedule(s, l), v[LAYOUT_VPP]);
}

/* ---- one candidate ---- */

static Err shape_of(Search *s, const Layout *l, Shape **out)
{
    return shape_get(&s->shapes, layout_schedule(s->space, l), l->value[LAYOUT_PP], l->value[LAYOUT_VPP],
                     (int)layout_microbatches(s->space, l), out);
}

static int64_t libraries_of(const Search *s, const Inner *in, Grid g)
{
    return s->q->libraries ? grid_library_bytes(g, in->sums_by_message, in->host_ranks) : 0;
}

Err search_pipeline(Search *s, const Layout *l, int inner, bool lists, StageShare *shares, Pipeline *out)
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

static Err add_candidate(Search *s, const Candidate *c)
{
    TRY(search_grow((void **)&s->items, s->count, &s->capacity, sizeof *s->items));
    s->items[s->count++] = *c;
    return ERR_OK;
}

static void keep_smallest(Search *s, const Candidate *c)
{
    int at = s->smallest_count;
    if (at == SEARCH_TOGETHER && c->bytes >= s->smallest[--at].bytes) return;
    if (s->smallest_count < SEARCH_TOGETHER) s->smallest_count++;
    for (; at && c->bytes < s->smallest[at - 1].bytes; at--) s->smallest[at] = s->smallest[at - 1];
    s->smallest[at] = *c;
}

/* ZeRO cuts as little as may fit. */
static Err visit_candidate(Search *s, const Layout *l, int inner)
{
    StageShare shares[SEARCH_STAGES];
    Pipeline p;
    Candidate c = { .layout = *l, .inner = inner };
    bool legal = false;
    do {
        const Err err = search_pipeline(s, &c.layout, inner, false, shares, &p);
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
Err search_candidates(Search *s, int inner)
{
    Layout l = s->inners[inner].layout;
    const LayoutSpace *space = s->space;
    for (int at = layout_next_pp(space, &l, 0); at < LAYOUT_VALUES; at = layout_next_pp(space, &l, at + 1))
        for (int v = 0; v < space->count[LAYOUT_VPP]; v++)
            for (int k = 0; k < space->count[LAYOUT_SCHEDULE]; k++) {
                l.value[LAYOUT_VPP] = space->value[LAYOUT_VPP][v];
                l.value[LAYOUT_SCHEDULE] = space->value[LAYOUT_SCHEDULE][k];
                s->out->looked_at++;
                if (outer_matters(space, &l)) TRY(visit_candidate(s, &l, inner));
            }
    return ERR_OK;
}

/* ---- the most promising ---- */

static int by_bound(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->bound < y->bound || x->bound > y->bound) return x->bound < y->bound ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

typedef enum { AS_USUAL, WITH_HOPE, CUT_FURTHER, REPLAYED } Replayed;

/* Replays a layout. *keep: it is legal, and it fits, or is one of those that another cut may make fit. */
static Err replay_one(Search *s, Candidate *c, int left[REPLAYED], bool *keep)
{
    StageShare shares[SEARCH_STAGES];
    Pipeline p;
    *keep = false;
    const Err err = search_pipeline(s, &c->layout, c->inner, true, shares, &p);
    if (err) return err == ERR_MEMORY ? err : ERR_OK;
    c->bytes = pipeline_bytes(&p);
    c->too_large = c->bytes > s->q->memory;
    s->out->small_enough += !c->too_large;
    const bool usual = layout_is_first(s->space, &c->layout, LAYOUT_ZERO);
    if (left[c->too_large ? WITH_HOPE : usual ? AS_USUAL : CUT_FURTHER]-- <= 0) return ERR_OK;
    TRY(pipeline_seconds(&p, &c->seconds));
    *keep = c->seconds > 0; /* (and a number) */
    return ERR_OK;
}

void search_count_possible(Search *s)
{
    for (int k = 0; k < s->q->places; k++)
        for (int64_t i = 0; i < s->count; i++) s->out->place[k].possible += s->items[i].bound < s->q->place_s[k];
}

/* Those of the least bounds are replayed, the others go; and what does not fit once more with more cut by ZeRO. */
Err search_replay(Search *s)
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
    StageShare shares[SEARCH_STAGES];
    Pipeline p;
    CutText cuts[CUTS];
    int count;
    TRY(search_pipeline(s, &c->layout, c->inner, true, shares, &p));
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
Err search_cut_best(Search *s)
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
