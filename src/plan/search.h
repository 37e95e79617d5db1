/*
 * The search for the fastest layout of a model on so many ranks (docs/planner.md):
 *
 *   layouts     every combination of the keys of layout.h that divides; the configuration's rules judge
 *   memory      a bound from dry runs of single parts (layer_cost.h); what cannot fit is left out
 *   time        sums of parts, the schedule replayed; the most promising are cut unevenly as well (partition.h)
 *   finalists   a dry run of every pipeline rank: bytes are exact, and time is that of the whole step
 *
 * Equal input gives equal answers, on any machine and with any number of threads.
 */
#ifndef MEGATRAIN_PLAN_SEARCH_H
#define MEGATRAIN_PLAN_SEARCH_H

#include "plan/layer_cost.h"
#include "plan/layout.h"
#include "plan/predict.h"
#include "train/spec.h"

enum { SEARCH_BEST = 32, SEARCH_PLACES = 8 };

typedef struct {
    const Config *base; /* layout_base's */
    int64_t world;      /* ranks */
    LayoutLimits limits;
    int64_t vocab;
    int64_t memory; /* bytes of a device; what libraries take is part of it */
    bool libraries; /* there are such: a GPU's */
    CostSource source;
    int best;    /* answers wanted, at most SEARCH_BEST */
    int threads; /* at once; 0: 1 */
    int places;  /* and where steps of so many seconds stand */
    double place_s[SEARCH_PLACES];
} SearchQuestion;

/* A layout, exactly. Seconds are those of the source. */
typedef struct {
    Layout layout;
    Grid grid;
    Prediction time; /* its bytes with those of libraries */
} SearchResult;

/* How many layouts that may fit are faster than a step: of those that were run dry, variants and cuts included, and of
 * all that are legal in shape at most, by the bound of the sums of their parts. */
typedef struct {
    int faster;
    int64_t possible;
} SearchPlace;

typedef struct {
    SearchResult best[SEARCH_BEST]; /* the fastest first */
    int count;
    SearchResult front[SEARCH_BEST]; /* of all that were run dry: none is faster with as little memory */
    int front_count;
    int64_t looked_at, legal,
        small_enough;    /* layouts: in the space; taken by rules of shape; not ruled out by memory */
    int64_t least_bytes; /* the least that a layout was found to need, by the bound where nothing fits */
    int dry_runs;
    Layout least; /* which layout that is */
    LayoutSpace space;
    SearchPlace place[SEARCH_PLACES];
} SearchAnswer;

/*
 * count 0: nothing fits, and least_bytes says what would. Errors: ERR_CONFIG where no layout is legal, with the last
 * rule that was broken; ERR_MEMORY; those of the source.
 */
Err search(const SearchQuestion *q, SearchAnswer *out);

/* An answer with count 0: is there no layout at all for so many ranks, rather than none that fits? */
bool search_found_none(const SearchAnswer *a);

/* One layout, by itself: ERR_CONFIG where a rule refuses it. Fits or not. */
Err search_evaluate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, SearchResult *out);

/* Any layout: "parallel.tp=8 parallel.pp=4 ...", other keys have the first values of their space, one rank's, or are
 * given; its `layout` does not count. */
Err search_evaluate_words(const SearchQuestion *q, const char *words, SearchResult *out);

/* Nearly the same, faster: as few micro-batches as show what more do, one rank of each pipeline rank; and what the
 * start of a run refuses beyond rules of the configuration may pass. */
Err search_estimate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, SearchResult *out);

/* A lower bound of the bytes that any rank's worst takes. For tests: 0 if the layout's parts cannot be measured. */
int64_t search_memory_bound(const SearchQuestion *q, const LayoutSpace *space, const Layout *l);

#endif
