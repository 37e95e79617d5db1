/* A layout exactly: by a dry run of its ranks (search.h). */
#include <stdio.h>
#include <string.h>

#include "plan/search.h"

/* legal: ERR_OK, or the refusal of that configuration. */
static Err evaluate_config(const SearchQuestion *q, const Config *c, Err legal, bool brief, SearchResult *out)
{
    TrainSpec spec;
    Err err = legal;
    if (!err) err = brief ? grid_read(c, &out->grid) : grid_try(c, &out->grid);
    if (!err) err = train_spec(c, q->vocab, &spec);
    if (!err) err = trainer_grid(&spec, &out->grid);
    if (!err) err = predict_by(&q->source, &spec, out->grid, brief ? PREDICT_BRIEF : PREDICT_RANKS, &out->time);
    if (!err && q->libraries) out->time.bytes += spec_library_bytes(c, out->grid);
    return err;
}

static Err evaluate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, bool brief, SearchResult *out)
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
    layout_take_first(&space, &out->layout, 0);
    layout_words(&space, &out->layout, first);
    if (snprintf(all, sizeof all, "%s %s", first, words) >= (int)sizeof all)
        return err_set(ERR_CONFIG, "%zu characters are too many for a layout", strlen(words));
    const Err err = evaluate_config(q, &c, config_for(q->base, q->world, all, &c), false, out);
    config_release(&c);
    return err;
}

Err search_evaluate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, SearchResult *out)
{
    return evaluate(q, space, l, false, out);
}

Err search_estimate(const SearchQuestion *q, const LayoutSpace *space, const Layout *l, SearchResult *out)
{
    return evaluate(q, space, l, true, out);
}
