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

const ScheduleKind schedule_table[] = {
    { "gpipe", generate_gpipe, any_shape, PLACE_LOOP, .chunks = 1 },
    { "1f1b", generate_1f1b, any_shape, PLACE_LOOP, .chunks = 1, .aliases = "pipedream-flush dapple" },
};
const int schedule_table_count = sizeof schedule_table / sizeof *schedule_table;
