/*
 * What the files of the search (search.h) share, from a layout's keys to the answer; each calls those above it alone:
 *
 *   search_inner.c        keys that decide what a part of a model costs: all combinations, and their parts run dry
 *   search_candidates.c   pipelines of these: bounds of bytes and seconds, schedules replayed, uneven cuts
 *   search_exact.c        a layout by a dry run of its ranks
 *   search_finalists.c    the most promising run dry, varied, and the best confirmed
 *   search.c              one after the other, and what is said where nothing fits
 */
#ifndef MEGATRAIN_PLAN_SEARCHING_H
#define MEGATRAIN_PLAN_SEARCHING_H

#include "plan/estimate.h"
#include "plan/search.h"

/* (qsort takes no list that is not there) */
#define ORDER(items, count, before)                                            \
    do {                                                                       \
        if (count) qsort((items), (size_t)(count), sizeof *(items), (before)); \
    } while (0)

enum { SEARCH_TOGETHER = 8 }; /* layouts that are run dry at once */

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
    Candidate smallest[SEARCH_TOGETHER]; /* that need least at least */
    int smallest_count;
    SearchResult *results; /* [search_results_most()] */
    int result_count;
    int threads;
} Search;

/* Room for one more item in a list that grows. ERR_MEMORY. */
Err search_grow(void **items, int64_t count, int64_t *capacity, size_t size);

/* One inner layout more, read and measured later; is it legal? */
Err search_add_inner(Search *s, const Layout *l);
bool search_read_inner(const Search *s, Inner *in);

/* All inner layouts, measured where their weights fit the question's memory. ERR_MEMORY. */
Err search_inners(Search *s);

/* Measures the neighbours [first, end), which have the same dense keys; those whose weights are more than `memory` are
 * left out. ERR_MEMORY. */
Err search_measure_run(const Search *s, int first, int end, int64_t memory);

enum { SEARCH_STAGES = 1024 }; /* of a pipeline, at most */

/* The pipeline of a layout whose inner part is known, with its lists or without; shares: [stages of the shape].
 * ERR_CONFIG where it is not legal. */
Err search_pipeline(Search *s, const Layout *l, int inner, bool lists, StageShare *shares, Pipeline *out);

/* All pipelines with an inner layout become candidates, where they may fit. ERR_MEMORY. */
Err search_candidates(Search *s, int inner);

/* How many candidates may be faster than the question's places. */
void search_count_possible(Search *s);

/* Those of the least bounds are replayed, the others go; then the fastest are cut unevenly, too. ERR_MEMORY. */
Err search_replay(Search *s);
Err search_cut_best(Search *s);

/* Results at most. */
int search_results_most(void);

/* Runs layouts dry, at most SEARCH_TOGETHER: of those that differ in what ZeRO cuts alone the first that fits. */
Err search_run_dry(Search *s, const Layout *layouts, int count);

/* The most promising candidates, run dry; where none of them fits, those that need least. */
Err search_finalists(Search *s);
Err search_smallest(Search *s);

/* The best with other orders, other ZeRO, ...; then once more, whole: they are the answer. */
Err search_vary_best(Search *s);
Err search_confirm(Search *s);

#endif
