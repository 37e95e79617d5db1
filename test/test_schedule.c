/*
 * Schedules: every row of a table that an independent simulator wrote (golden/schedules.tsv), closed forms on
 * many more shapes, and programs that are broken on purpose.
 */
#include "pipeline/simulate.h"
#include "test.h"

#ifndef GOLDEN_DIR
#define GOLDEN_DIR "test/golden"
#endif

/* ---- golden rows ---- */

enum { COLUMNS = 15, ROW_BYTES = 1024 };

typedef struct {
    char text[ROW_BYTES];
    char *column[COLUMNS];
} Row;

static bool read_row(FILE *f, Row *row)
{
    if (!fgets(row->text, sizeof row->text, f)) return false;
    row->text[strcspn(row->text, "\n")] = 0;
    char *at = row->text;
    for (int i = 0; i < COLUMNS; i++) {
        row->column[i] = at;
        at += strcspn(at, "\t");
        if (*at) *at++ = 0;
    }
    return true;
}

/* "interleaved(v=2,g=2p)+split" -> "interleaved+split", 2 chunks, groups of 2p. */
static ScheduleSpec spec_of(const Row *row, char name[64])
{
    ScheduleSpec s = { .ranks = atoi(row->column[1]), .microbatches = atoi(row->column[2]) };
    const char *text = row->column[0], *open = strchr(text, '('), *close = strchr(text, ')');
    snprintf(name, 64, "%s", text);
    s.name = name;
    if (!open || !close) return s;
    snprintf(name, 64, "%.*s%s", (int)(open - text), text, close + 1);
    for (const char *at = open; at < close; at++) {
        int value = at[1] == '=' ? atoi(at + 2) : 0;
        if (*at == 'v' && value) s.chunks = value;
        if (*at == 'w' && value) s.waves = value;
        if (*at == 'g' && value) s.group = value * (at[3] == 'p' ? s.ranks : 1);
    }
    return s;
}

static void list_peaks(const Schedule *s, bool until_input, char out[256])
{
    int used = 0;
    for (int r = 0; r < s->ranks; r++)
        used += snprintf(out + used, (size_t)(256 - used), "%s%d", r ? "," : "",
                         simulate_peak(s, r, until_input));
}

static void check_golden(const Row *row)
{
    char name[64], peaks[256];
    Schedule s;
    Simulation sim;
    ScheduleSpec spec = spec_of(row, name);
    const SimulateCosts unit = { .each = { 1, 1, 1 } }, slow = { .each = { 4, 4, 4 }, .latency = 1 };
    OK(schedule_make(&spec, &s));
    OK(simulate(&s, &unit, &sim));
    const double want[] = { sim.makespan, sim.ideal, sim.bubble, 0, 0, sim.span_bubble };
    for (int i = 0; i < 6; i++)
        if (i < 3 || i == 5)
            CHECK_MSG(want[i] == atof(row->column[4 + i]), "%s p=%d m=%d column %d: %g, not %s", name, s.ranks,
                      s.microbatches, 4 + i, want[i], row->column[4 + i]);
    CHECK_CLOSE(sim.bubble / sim.ideal, atof(row->column[7]), 6e-5, "%s", name);
    CHECK_CLOSE(sim.bubble / sim.makespan, atof(row->column[8]), 6e-5, "%s", name);
    if (*row->column[13]) CHECK(sim.bubble == atof(row->column[13]));
    CHECK(s.chunks * s.unit_div == atoi(row->column[3]));
    list_peaks(&s, false, peaks);
    CHECK_MSG(!strcmp(peaks, row->column[10]), "%s p=%d m=%d: %s, not %s", name, s.ranks, s.microbatches, peaks,
              row->column[10]);
    list_peaks(&s, true, peaks);
    CHECK_MSG(!strcmp(peaks, row->column[11]), "%s p=%d m=%d: %s, not %s", name, s.ranks, s.microbatches, peaks,
              row->column[11]);
    simulation_free(&sim, &s);
    OK(simulate(&s, &slow, &sim));
    CHECK_MSG(sim.makespan == atof(row->column[14]), "%s p=%d m=%d: %g, not %s with latency", name, s.ranks,
              s.microbatches, sim.makespan, row->column[14]);
    simulation_free(&sim, &s);
    schedule_free(&s);
}

TEST(golden_rows)
{
    Row row;
    FILE *f = fopen(GOLDEN_DIR "/schedules.tsv", "r");
    CHECK(f != NULL);
    int rows = 0;
    for (bool head = true; f && read_row(f, &row); head = false) {
        if (head) continue;
        check_golden(&row);
        rows++;
    }
    CHECK(rows == 237);
    if (f) fclose(f);
}

TEST_MAIN
