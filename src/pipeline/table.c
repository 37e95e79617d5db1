/*
 * All schedules. A row's rule says which shapes are legal; it is asked again with shapes nearby to find the
 * one to recommend, so a rule is the only place that knows.
 */
#include "pipeline/table.h"

#include <stddef.h>

static const char *any_shape(const Schedule *s)
{
    (void)s;
    return NULL;
}

/*
 * A last group of fewer micro-batches than ranks can make ranks wait for each other for ever: 5 ranks, 7
 * micro-batches, groups of 5.
 */
static const char *groups_that_fill(const Schedule *s)
{
    const int rest = s->microbatches % s->group;
    if (s->chunks < 2) return "2 chunks a rank or more";
    if (s->group < s->ranks) return "groups of at least as many micro-batches as there are ranks";
    if (s->group > s->microbatches) return "at least as many micro-batches as a group has";
    if (rest && rest < s->ranks) return "a last group that is full or has a micro-batch for each rank";
    return NULL;
}

static const char *rounds_of_ranks(const Schedule *s)
{
    if (s->chunks < 2) return "2 chunks a rank or more";
    return s->microbatches % s->ranks ? "a multiple of the number of ranks in micro-batches" : NULL;
}

/* Else the version that a batch reads is not there in time. */
static const char *batch_in_time(const Schedule *s)
{
    return s->microbatches < s->ranks - 1 ? "at least as many micro-batches as ranks, less one" : NULL;
}

static const char *even_ranks(const Schedule *s) { return s->ranks % 2 ? "an even number of ranks" : NULL; }

static const char *blocks_of_ranks(const Schedule *s)
{
    if (s->microbatches % s->ranks) return "a multiple of the number of ranks in micro-batches";
    return NULL;
}

static const char *chimera_blocks(const Schedule *s)
{
    const int m = s->microbatches;
    if (s->ranks % 2) return even_ranks(s);
    if (m % s->ranks && (m > s->ranks || m % 2))
        return "a multiple of the number of ranks in micro-batches, or an even number below it";
    return NULL;
}

static const char *double_blocks(const Schedule *s)
{
    if (s->ranks % 2) return even_ranks(s);
    return s->microbatches % (2 * s->ranks) ? "a multiple of twice the number of ranks in micro-batches" : NULL;
}

static const char *even_blocks(const Schedule *s) { return s->ranks % 2 ? even_ranks(s) : blocks_of_ranks(s); }

static const char *two_units_a_rank(const Schedule *s)
{
    if (s->microbatches < 2 * s->ranks) return "at least twice as many micro-batches as ranks";
    return NULL;
}

static const char *dualpipe_shape(const Schedule *s)
{
    if (s->ranks % 2) return even_ranks(s);
    return s->microbatches % 2 ? "an even number of micro-batches" : two_units_a_rank(s);
}

/* One wave comes in blocks; more are list-scheduled. */
static const char *wave_blocks(const Schedule *s) { return s->waves == 1 ? blocks_of_ranks(s) : NULL; }

const ScheduleKind schedule_table[] = {
    { "gpipe", generate_gpipe, any_shape, PLACE_LOOP, .chunks = 1 },
    { "1f1b", generate_1f1b, any_shape, PLACE_LOOP, .chunks = 1, .aliases = "pipedream-flush dapple" },
    { "seq1f1b", generate_1f1b, any_shape, PLACE_LOOP, .chunks = 1, .sliced = true },
    { "eager-1f1b", generate_eager_1f1b, any_shape, PLACE_LOOP, .chunks = 1 },
    { "interleaved", generate_interleaved, groups_that_fill, PLACE_LOOP, .grouped = true },
    { "bfs", generate_bfs, any_shape, PLACE_LOOP },
    { "zb-h1", generate_zb_h1, any_shape, PLACE_LOOP, .chunks = 1 },
    { "zb-h1-int", generate_zb_h1, rounds_of_ranks, PLACE_LOOP },
    { "zb-h2", generate_zb_h2, any_shape, PLACE_LOOP, .chunks = 1 },
    { "pipedream", generate_1f1b, any_shape, PLACE_LOOP, VERSIONS_STASH, .chunks = 1, .batches = 1 },
    { "pipedream-vertical", generate_1f1b, any_shape, PLACE_LOOP, VERSIONS_VERTICAL, .chunks = 1, .batches = 1 },
    { "2bw", generate_1f1b, batch_in_time, PLACE_LOOP, VERSIONS_DOUBLE, .chunks = 1, .batches = 4,
      .aliases = "pipedream-2bw" },
    { "zb-v", generate_zb_v, any_shape, PLACE_WAVE, .chunks = 2 },
    { "v-half", generate_v_half, any_shape, PLACE_WAVE, .chunks = 2 },
    { "v-min", generate_v_min, any_shape, PLACE_WAVE, .chunks = 2, .aliases = "v-min-raw" },
    { "chimera", generate_chimera, chimera_blocks, PLACE_TWO_WAY, .chunks = 1, .aliases = "chimera-direct" },
    { "chimera-fdouble", generate_chimera_doubled, double_blocks, PLACE_TWO_WAY, .chunks = 1 },
    { "chimera-bhalf", generate_chimera_doubled, even_blocks, PLACE_TWO_WAY, .chunks = 1, .unit_div = 2 },
    { "gems", generate_gems, even_ranks, PLACE_TWO_WAY, .chunks = 1 },
    { "hanayo", generate_wave, wave_blocks, PLACE_WAVE, .waves = 1, .aliases = "hanayo-w1-direct" },
    { "dualpipe", generate_dualpipe, dualpipe_shape, PLACE_TWO_WAY, .chunks = 1, .pairs = true },
    { "dualpipe-serial", generate_dualpipe_serial, dualpipe_shape, PLACE_TWO_WAY, .chunks = 1 },
    { "dualpipev", generate_dualpipe, two_units_a_rank, PLACE_WAVE, .chunks = 2, .pairs = true },
    { "dualpipev-serial", generate_dualpipe_serial, two_units_a_rank, PLACE_WAVE, .chunks = 2 },
};
const int schedule_table_count = sizeof schedule_table / sizeof *schedule_table;
