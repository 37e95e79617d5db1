/* Finalists: the most promising candidates run dry, with other orders and other ZeRO, and the best confirmed. */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "plan/searching.h"

enum {
    FINALISTS = 24,     /* run dry at least, */
    CUT_FINALISTS = 72, /* with those where ZeRO cuts more, */
    FINALS = 1024,      /* and at most; */
    EFFORT = 160000,    /* less where dry runs take long, which are counted so: */
    EFFORT_OF_RUN = 64,
    EFFORTS_MOST = 40, /* so many times that, where what is run dry does not fit */
    SMALLEST = 64,     /* run dry where none of those fits, */
    VARIED = 6,        /* how many of the best are tried with other orders, other ZeRO, ..., */
    PAIRED = 2,        /* and of others that may pair units; */
    VARIANTS = 17      /* each so often at most */
};

/* Finalists go on while estimates stay below the best exact time so much enlarged: by what a sum of parts is off. */
static const double SLACK = 1.05;

int search_results_most(void) { return FINALS + SMALLEST + SEARCH_TOGETHER + (VARIED + PAIRED) * VARIANTS; }

/* ---- dry runs ---- */

/* Several layouts at once, in their order. Those that a rule refuses or that do not fit are passed over; which need
 * more memory than there is goes to `large`. */
static Err run_once(Search *s, const Layout *layouts, int count, Layout large[SEARCH_TOGETHER], int *too_large)
{
    SearchResult r[SEARCH_TOGETHER];
    Err err[SEARCH_TOGETHER];
    ASSERT(count <= SEARCH_TOGETHER);
    *too_large = 0;
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
    for (int i = 0; i < count; i++) err[i] = search_estimate(s->q, s->space, &layouts[i], &r[i]);
    for (int i = 0; i < count; i++) {
        if (err[i] == ERR_MEMORY) return err_set(ERR_MEMORY, "no memory for a dry run");
        if (err[i]) continue;
        s->out->dry_runs++;
        if (r[i].time.bytes < s->out->least_bytes) s->out->least_bytes = r[i].time.bytes, s->out->least = r[i].layout;
        const bool timed = r[i].time.step_s > 0 && r[i].time.step_s < DBL_MAX;
        if (r[i].time.bytes > s->q->memory) large[(*too_large)++] = layouts[i];
        else if (timed) s->results[s->result_count++] = r[i];
    }
    return ERR_OK;
}

/* The first layout that fits, of those that differ in what ZeRO cuts alone. */
Err search_run_dry(Search *s, const Layout *layouts, int count)
{
    Layout now[SEARCH_TOGETHER], large[SEARCH_TOGETHER];
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
    for (int i = 0; i < s->result_count; i++) usual += layout_is_first(s->space, &s->results[i].layout, LAYOUT_ZERO);
    return usual >= FINALISTS || s->result_count >= CUT_FINALISTS;
}

static int by_seconds(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->too_large != y->too_large) return x->too_large - y->too_large;
    if (x->seconds < y->seconds || x->seconds > y->seconds) return x->seconds < y->seconds ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

Err search_finalists(Search *s)
{
    ORDER(s->items, s->count, by_seconds);
    double effort = 0;
    for (int64_t i = 0; i < s->count && i + SEARCH_TOGETHER < FINALS;) {
        Layout l[SEARCH_TOGETHER];
        int n = 0;
        if (s->items[i].too_large) break;
        const bool enough = effort > EFFORT || s->items[i].seconds > SLACK * best_so_far(s);
        if (enough_finalists(s) && enough) break;
        for (; n < SEARCH_TOGETHER && i < s->count && !s->items[i].too_large; i++) {
            l[n++] = s->items[i].layout;
            effort += effort_of(s, &s->items[i].layout);
        }
        if (effort > EFFORTS_MOST * EFFORT) break;
        TRY(search_run_dry(s, l, n));
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
Err search_smallest(Search *s)
{
    ORDER(s->items, s->count, by_bytes);
    for (int64_t i = 0; i < s->count && i < SMALLEST && !s->result_count;) {
        Layout l[SEARCH_TOGETHER];
        int n = 0;
        for (; n < SEARCH_TOGETHER && i < s->count; i++) l[n++] = s->items[i].layout;
        TRY(search_run_dry(s, l, n));
    }
    return ERR_OK;
}

/* ---- variants ---- */

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

/* Keys that are told apart among the best alone. */
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
    for (int i = 0; i < n; i += SEARCH_TOGETHER)
        TRY(search_run_dry(s, l + i, n - i < SEARCH_TOGETHER ? n - i : SEARCH_TOGETHER));
    return ERR_OK;
}

static int compare_results(const SearchResult *x, const SearchResult *y)
{
    if (x->time.step_s < y->time.step_s || x->time.step_s > y->time.step_s)
        return x->time.step_s < y->time.step_s ? -1 : 1;
    if (x->time.bytes != y->time.bytes) return x->time.bytes < y->time.bytes ? -1 : 1;
    return layout_compare(&x->layout, &y->layout);
}

static int by_step(const void *a, const void *b) { return compare_results(a, b); }

/* The best, and of those that may pair a forward with a backward, which estimates know nothing of, the best. */
Err search_vary_best(Search *s)
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

/* The best counts, of layouts that differ in what finalists are varied by alone. */
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
Err search_confirm(Search *s)
{
    SearchAnswer *a = s->out;
    const int want = s->q->best < SEARCH_BEST ? s->q->best : SEARCH_BEST;
    for (int i = 0; i < s->result_count && a->count < want;) {
        Layout l[SEARCH_TOGETHER];
        SearchResult r[SEARCH_TOGETHER];
        Err err[SEARCH_TOGETHER];
        int n = 0;
        for (; n < SEARCH_TOGETHER && i < s->result_count; i++)
            if (!is_varied(a, l, n, &s->results[i].layout)) l[n++] = s->results[i].layout;
#pragma omp parallel for schedule(dynamic) num_threads(s->threads)
        for (int k = 0; k < n; k++) err[k] = search_evaluate(s->q, s->space, &l[k], &r[k]);
        for (int k = 0; k < n; k++) {
            if (err[k] == ERR_MEMORY) return err_set(ERR_MEMORY, "no memory for a dry run");
            if (!err[k] && r[k].time.bytes <= s->q->memory && a->count < SEARCH_BEST) a->best[a->count++] = r[k];
        }
    }
    ORDER(a->best, a->count, by_step);
    if (a->count > want) a->count = want;
    return ERR_OK;
}
