/*
 * Schedules: tables and listings that an independent simulator wrote (golden/schedule*), closed forms on
 * thousands of other shapes, and programs that are broken on purpose (test_schedule_broken.c).
 */
#include "pipeline/check.h"
#include "pipeline/chart.h"
#include "pipeline/simulate.h"
#include "test.h"

static const SimulateCosts unit_costs = { .each = { 1, 1, 1 } };

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
    const SimulateCosts slow = { .each = { 4, 4, 4 }, .latency = 1 };
    OK(schedule_make(&spec, &s));
    OK(simulate(&s, &unit_costs, &sim));
    const double want[] = { sim.makespan, sim.ideal, sim.bubble, 0, 0, sim.span_bubble };
    for (int i = 0; i < 6; i++)
        if (i < 3 || i == 5)
            CHECK_MSG(want[i] == atof(row->column[4 + i]), "%s p=%d m=%d column %d: %g, not %s", name, s.ranks,
                      s.microbatches, 4 + i, want[i], row->column[4 + i]);
    CHECK_CLOSE(sim.bubble / sim.ideal, atof(row->column[7]), 6e-5, "%s", name);
    CHECK_CLOSE(sim.bubble / sim.makespan, atof(row->column[8]), 6e-5, "%s", name);
    if (*row->column[13]) CHECK(sim.bubble == atof(row->column[13]));
    CHECK(simulate_weight_copies(&s, 0) == atoi(row->column[12]));
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

/* Calls check(row) for every row behind the first; returns how many. */
static int each_row(const char *path, void (*check)(const Row *row))
{
    Row row;
    int rows = 0;
    FILE *f = fopen(path, "r");
    CHECK_MSG(f != NULL, "%s", path);
    for (bool head = true; f && read_row(f, &row); head = false) {
        if (head) continue;
        check(&row);
        rows++;
    }
    if (f) fclose(f);
    return rows;
}

TEST(golden_rows) { CHECK(each_row("test/golden/schedules.tsv", check_golden) == 237); }

/* ---- messages ---- */

/* Most messages that have landed on a rank before the compute that takes them: those stamped when that starts, or
 * earlier (the list may begin to receive more before it). */
static int most_landed(const ActionList *list)
{
    double landed_at[1 << 10]; /* by buffer; of what waits in it */
    int most = 0;
    for (int b = 0; b < list->buffers; b++) landed_at[b] = INFINITY;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        int now = 0;
        if (a->kind == ACT_RECV) landed_at[a->in] = a->stamp;
        for (int b = 0; action_is_compute(a->kind) && b < list->buffers; b++) now += landed_at[b] <= a->stamp;
        if (now > most) most = now;
        for (int k = 0; action_is_compute(a->kind) && a->in >= 0 && k < a->count; k++)
            landed_at[a->in + k] = INFINITY;
    }
    return most;
}

static void check_messages_of(const Row *row)
{
    char name[64];
    Schedule s;
    ScheduleSpec spec = spec_of(row, name);
    int sends = 0, receives = 0, landed = 0;
    OK(schedule_make(&spec, &s));
    for (int r = 0; r < s.ranks; r++) {
        const int here = most_landed(&s.rank[r]);
        if (here > landed) landed = here;
        for (int i = 0; i < s.rank[r].count; i++) {
            sends += s.rank[r].action[i].kind == ACT_SEND;
            receives += s.rank[r].action[i].kind == ACT_RECV;
        }
    }
    CHECK_MSG(sends == receives, "%s", name);
    CHECK_MSG(sends == atoi(row->column[3]), "%s p=%d m=%d: %d messages, not %s", name, s.ranks, s.microbatches,
              sends, row->column[3]);
    CHECK_MSG(landed == atoi(row->column[4]), "%s p=%d m=%d: %d landed, not %s", name, s.ranks, s.microbatches,
              landed, row->column[4]);
    schedule_free(&s);
}

TEST(messages) { CHECK(each_row("test/golden/schedule_messages.tsv", check_messages_of) == 72); }

/* ---- listings ---- */

/* "F3", "F3.s5", "F4x2.s1", "<F3.0|B5.3>": as the listings have it. */
static int put_compute(char *out, const Action *a, bool stages, bool second)
{
    const bool pair = a->flags & ACTION_PAIR;
    int n = sprintf(out, "%s%s%d", second ? "" : pair ? " <" : " ", action_name(a->kind), a->microbatch);
    if (a->count > 1) n += sprintf(out + n, "x%d", a->count);
    if (stages) n += sprintf(out + n, pair || second ? ".%d" : ".s%d", a->stage);
    return n + sprintf(out + n, "%s", pair ? "|" : second ? ">" : "");
}

static void check_list(const Schedule *s, int rank, bool stages, const char *want)
{
    char got[4096];
    int used = sprintf(got, "r%d:", rank);
    for (int i = 0; i < s->rank[rank].count; i++) {
        const Action *a = &s->rank[rank].action[i];
        const bool second = i > 0 && a[-1].flags & ACTION_PAIR;
        if (action_is_compute(a->kind)) used += put_compute(got + used, a, stages, second);
    }
    CHECK_MSG(!strcmp(got, want), "%s\n    got  %s\n    want %s", s->name, got, want);
}

TEST(listings)
{
    char line[4096], name[64];
    Schedule s = { 0 };
    int rank = 0, lists = 0;
    FILE *f = fopen("test/golden/schedule_lists.txt", "r");
    CHECK(f != NULL);
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (line[0] == 'r') {
            check_list(&s, rank++, strstr(line, ".s"), line);
            lists++;
            continue;
        }
        ScheduleSpec spec = { .name = name };
        CHECK(sscanf(line, "%63s %d %d %d %d", name, &spec.ranks, &spec.microbatches, &spec.chunks,
                     &spec.group) >= 3);
        schedule_free(&s);
        OK(schedule_make(&spec, &s));
        rank = 0;
    }
    schedule_free(&s);
    CHECK(lists == 34);
    if (f) fclose(f);
}

/* ---- closed forms ---- */

/* At p ranks, m micro-batches, v chunks, groups of g: the bubble with costs F, I, W; negative: no closed form. */
typedef struct {
    const char *name;
    double (*bubble)(int p, int m, StageCost c);
    int (*peak)(int p, int m, int v, int g, int r); /* held to W on rank r; 0: no closed form */
    bool chunks, equal_costs;                      /* v is free; the bubble's form needs F = I = W */
} Form;

static int least(int a, int b) { return a < b ? a : b; }

static double fill_and_drain(int p, int m, StageCost c) { return (void)m, (p - 1) * (c.f + c.i + c.w); }
static double split_drain(int p, int m, StageCost c) { return (void)m, (p - 1) * (c.f + c.i); }
static double from_p(int p, int m, StageCost c) { return m >= p ? fill_and_drain(p, m, c) : -1; }
static double h1(int p, int m, StageCost c) { return m >= p ? (p - 1) * (c.f + c.i - c.w) : -1; }
static double h2(int p, int m, StageCost c) { return m >= 2 * p - 1 ? (p - 1) * c.f : -1; }
static double chimera(int p, int m, StageCost c)
{
    if (m % p) return (3 * p + 2 * m - 4 - 3 * m) * c.f;
    return (p - 2) * (m / p + 1) * c.f;
}
static double chimera_split(int p, int m, StageCost c) { return m % p ? -1 : (p - 2) * c.f; }
static double doubling(int p, int m, StageCost c) { return (void)m, 2 * (p - 2) * c.f; }
static double gems(int p, int m, StageCost c) { return (m * (2 * p + 1) + p - 1 - 3 * m) * c.f; }
static double wave(int p, int m, StageCost c) { return (2 * p - 2) * (m / p + 1) * c.f; }
static double wave_split(int p, int m, StageCost c) { return (void)m, (2 * p - 2) * c.f; }
static double dual(int p, int m, StageCost c) { return (void)m, (p - 2) * c.f; }
static double dual_serial(int p, int m, StageCost c) { return (void)m, (p / 2 - 1) * c.f; }
static double serial_v(int p, int m, StageCost c) { return (void)m, (p - 1) * c.f; }
static double unknown(int p, int m, StageCost c) { return (void)p, (void)m, (void)c, -1; }

#define PEAK(id, value)                                                                                    \
    static int id(int p, int m, int v, int g, int r)                                                       \
    {                                                                                                      \
        (void)p, (void)m, (void)v, (void)g, (void)r;                                                       \
        return (value);                                                                                    \
    }
PEAK(peak_all, m *v)
PEAK(peak_1f1b, least(m, p - r))
PEAK(peak_eager, least(m, 2 * (p - 1 - r) + 1))
PEAK(peak_interleaved, m % g ? 0 : least(m * v, 2 * (p - 1 - r) + (v - 1) * g + 1))
PEAK(peak_zb, m >= p ? p * v : 0)
PEAK(peak_h2, m >= 2 * p - 1 ? 2 * p - 1 : 0)
PEAK(peak_v, m >= 2 * p - 1 ? 2 * p : 0)
PEAK(peak_chimera, m % p ? 0 : p / 2 + 1 + least(r, p - 1 - r))
PEAK(peak_one, 1)
PEAK(peak_dual, p + 1)
PEAK(peak_dual_v, 2 * p + 1)
PEAK(peak_unknown, 0)

static const Form forms[] = {
    { "gpipe", fill_and_drain, peak_all },
    { "gpipe+split", split_drain, peak_all },
    { "1f1b", fill_and_drain, peak_1f1b },
    { "1f1b+split", split_drain, peak_1f1b },
    { "eager-1f1b", fill_and_drain, peak_eager },
    { "interleaved", fill_and_drain, peak_interleaved, .chunks = true },
    { "interleaved+split", split_drain, peak_interleaved, .chunks = true },
    { "bfs", from_p, peak_all, .chunks = true },
    { "zb-h1", h1, peak_zb },
    { "zb-h1-int", h1, peak_zb, .chunks = true },
    { "zb-h2", h2, peak_h2, .equal_costs = true },
    { "zb-v", h2, peak_v, .equal_costs = true },
    { "v-half", unknown, peak_unknown },
    { "v-min", unknown, peak_unknown },
    { "chimera", chimera, peak_chimera, .equal_costs = true },
    { "chimera+split", chimera_split, peak_chimera, .equal_costs = true },
    { "chimera-fdouble", doubling, peak_unknown, .equal_costs = true },
    { "chimera-bhalf", doubling, peak_unknown, .equal_costs = true },
    { "gems", gems, peak_one, .equal_costs = true },
    { "hanayo", wave, peak_unknown, .equal_costs = true },
    { "hanayo+split", wave_split, peak_unknown, .equal_costs = true },
    { "dualpipe", dual, peak_dual, .equal_costs = true },
    { "dualpipe-serial", dual_serial, peak_dual, .equal_costs = true },
    { "dualpipev", wave_split, peak_dual_v, .equal_costs = true },
    { "dualpipev-serial", serial_v, peak_dual_v, .equal_costs = true },
};
enum { FORMS = sizeof forms / sizeof *forms };

/* A legal shape at random, or as near as the schedule's own rule has one (the hint names it). */
static bool make_random(uint64_t *seed, const Form *form, Schedule *s)
{
    const int p = 1 + (int)(test_rand(seed) % 16), m = 1 + (int)(test_rand(seed) % (4 * (uint64_t)p + 1));
    /* of any stages: what they are expected to take changes the order of messages alone */
    static StageCost costs[1024];
    for (int i = 0; i < 1024; i++)
        costs[i] = (StageCost){ 1 + test_rand(seed) % 3, 1 + test_rand(seed) % 3, 1 + test_rand(seed) % 3 };
    ScheduleSpec spec = { .name = form->name, .ranks = p, .microbatches = m, .costs = p % 2 ? costs : NULL };
    if (form->chunks) spec.chunks = 2 + (int)(test_rand(seed) % 3);
    if (strstr(form->name, "interleaved")) spec.group = p + (int)(test_rand(seed) % (uint64_t)p);
    Err err = schedule_make(&spec, s);
    const char *hint = strstr(err_hint_text(), "nearest legal shape: ");
    if (!err) return true;
    CHECK_MSG(err == ERR_CONFIG && hint, "%s p=%d m=%d: %s", spec.name, p, m, err_message());
    schedule_free(s);
    const int n = hint ? sscanf(hint, "nearest legal shape: %d ranks, %d micro-batches, groups of %d", &spec.ranks,
                                &spec.microbatches, &spec.group) : 0;
    CHECK(n >= 2);
    OK(schedule_make(&spec, s));
    return n >= 2;
}

static void check_form(const Form *form, const Schedule *s, StageCost c)
{
    Simulation sim;
    const int p = s->ranks, m = s->microbatches;
    const bool regular = !form->equal_costs || (c.f == c.i && c.i == c.w);
    const double want = regular ? form->bubble(p, m, c) : -1;
    OK(simulate(s, &(SimulateCosts){ .each = c }, &sim));
    CHECK_CLOSE(sim.ideal, m * s->unit_div * s->chunks * (c.f + c.i + c.w), 1e-12, "%s p=%d m=%d", form->name, p,
                m);
    CHECK(sim.bubble >= sim.span_bubble - 1e-9 && sim.span_bubble >= -1e-9);
    if (want >= 0)
        CHECK_CLOSE(sim.bubble, want, 1e-12, "%s p=%d m=%d v=%d g=%d, costs %g %g %g", form->name, p, m, s->chunks,
                    s->group, c.f, c.i, c.w);
    if (want >= 0 && (form->bubble == h2)) CHECK(sim.span_bubble == 0);
    for (int r = 0; r < p; r++) {
        const int peak = form->peak(p, m, s->chunks, s->group, r);
        if (peak)
            CHECK_MSG(simulate_peak(s, r, false) == peak, "%s p=%d m=%d v=%d g=%d rank %d: %d, not %d", form->name,
                      p, m, s->chunks, s->group, r, simulate_peak(s, r, false), peak);
    }
    simulation_free(&sim, s);
}

/* As many processors as ranks change nothing; one always has something to do; and between them nothing is shorter than
 * the work allows, nor longer than Graham's bound for those that are never idle while somebody has work. */
static void check_shared(const Schedule *s, StageCost c)
{
    Simulation alone, sim;
    SimulateCosts costs = { .each = c };
    const double work = s->ranks * s->microbatches * s->unit_div * s->chunks * (c.f + c.i + c.w);
    OK(simulate(s, &costs, &alone));
    costs.processors = s->ranks;
    OK(simulate(s, &costs, &sim));
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++) {
            CHECK_CLOSE(sim.span[r][i].start, alone.span[r][i].start, 1e-9, "%s rank %d", s->name, r);
            CHECK_CLOSE(sim.span[r][i].end, alone.span[r][i].end, 1e-9, "%s rank %d", s->name, r);
        }
    simulation_free(&sim, s);
    for (int p = 1; p < s->ranks; p = 2 * p + 1) {
        costs.processors = p;
        OK(simulate(s, &costs, &sim));
        if (p == 1) CHECK_CLOSE(sim.makespan, work, 1e-9, "%s on one", s->name);
        CHECK_MSG(sim.makespan >= fmax(work / p, alone.makespan) * (1 - 1e-9) &&
                      sim.makespan <= (work / p + (1 - 1.0 / p) * alone.makespan) * (1 + 1e-9),
                  "%s: %d ranks on %d take %g, the work %g, at once %g", s->name, s->ranks, p, sim.makespan, work,
                  alone.makespan);
        simulation_free(&sim, s);
    }
    simulation_free(&alone, s);
}

/* Checked by a program of its own that takes turns in small steps. */
TEST(four_on_two)
{
    Schedule s;
    Simulation sim;
    OK(schedule_make(&(ScheduleSpec){ "1f1b", 4, 8 }, &s));
    OK(simulate(&s, &(SimulateCosts){ .each = { 1, 1, 1 }, .processors = 2 }, &sim));
    CHECK_CLOSE(sim.makespan, 51, 1e-12, "without latency");
    simulation_free(&sim, &s);
    OK(simulate(&s, &(SimulateCosts){ .each = { 1, 1, 1 }, .latency = 0.25, .processors = 2 }, &sim));
    CHECK_CLOSE(sim.makespan, 52.08333333333333, 1e-12, "with latency");
    simulation_free(&sim, &s);
    schedule_free(&s);
}

/* Each of these programs has also been run to its end with blocking groups. */
TEST(closed_forms)
{
    uint64_t seed = 19;
    int shapes = 0;
    for (int i = 0; i < 2200; i++) {
        const Form *form = &forms[i % FORMS];
        Schedule s;
        if (!make_random(&seed, form, &s)) continue;
        check_form(form, &s, (StageCost){ 1, 1, 1 });
        check_form(form, &s, (StageCost){ 4, 5, 3 });
        if (i % 10 == 0) check_shared(&s, (StageCost){ 4, 5, 3 });
        OK(check_rendezvous(&s));
        schedule_free(&s);
        shapes++;
    }
    CHECK(shapes == 2200);
}

/* The published memory of the V schedules, in micro-batches of a whole rank. */
/* Seq1F1B at k slices: the bubble of 1F1B, of slices, and k - 1 slices held more than that has micro-batches. */
TEST(slices)
{
    uint64_t seed = 23;
    for (int i = 0; i < 120; i++) {
        const int p = 1 + (int)(test_rand(&seed) % 8), m = 1 + (int)(test_rand(&seed) % 12);
        const int k = 1 + (int)(test_rand(&seed) % 6);
        const StageCost c = { 4, 5, 3 };
        for (int split = 0; split < 2; split++) {
            const char *name = split ? "seq1f1b+split" : "seq1f1b";
            Schedule s;
            Simulation sim;
            OK(schedule_make(&(ScheduleSpec){ name, p, m, .slices = k }, &s));
            OK(simulate(&s, &(SimulateCosts){ .each = c }, &sim));
            CHECK(s.units == m * k && sim.ideal == m * k * 12);
            CHECK_MSG(sim.bubble == (p - 1) * (split ? 9 : 12), "%s p=%d m=%d k=%d: %g", name, p, m, k, sim.bubble);
            for (int r = 0; r < p; r++)
                CHECK_MSG(simulate_peak(&s, r, false) == least(m * k, p - r + k - 1), "%s p=%d m=%d k=%d rank %d: %d",
                          name, p, m, k, r, simulate_peak(&s, r, false));
            simulation_free(&sim, &s);
            schedule_free(&s);
        }
    }
}

/* The evaluation's list has the same slices, forwards alone. */
TEST(slices_forward_only)
{
    Schedule s;
    OK(schedule_forward(&(ScheduleSpec){ "seq1f1b", 3, 2, .slices = 4 }, &s));
    CHECK(s.units == 8 && schedule_slice_of(&s, 5) == 1);
    for (int i = 0, unit = 0; i < s.rank[1].count; i++) {
        const Action *a = &s.rank[1].action[i];
        if (a->kind == ACT_F) CHECK(a->microbatch == unit && a->slice == unit % 4);
        unit += a->kind == ACT_F;
    }
    schedule_free(&s);
}

TEST(v_memory)
{
    for (int p = 2; p <= 16; p++)
        for (int half = 0; half < 2; half++) {
            Schedule s;
            int most = 0;
            OK(schedule_make(&(ScheduleSpec){ half ? "v-half" : "v-min", p, 3 * p }, &s));
            for (int r = 0; r < p; r++) {
                const int peak = simulate_peak(&s, r, false);
                if (peak > most) most = peak;
            }
            const int want = half ? 2 * ((p + 2) / 2) : 2 * ((p + 4) / 3);
            CHECK_MSG(most == want, "%s p=%d: %d, not %d", s.name, p, most, want);
            schedule_free(&s);
        }
}

/* ---- unequal costs ---- */

/* Forwards of equal units through unequal stages take one unit's way and the slowest stage for each other unit. */
TEST(unequal_stages)
{
    uint64_t seed = 5;
    for (int i = 0; i < 60; i++) {
        StageCost stage[8];
        double sum = 0, slowest = 0;
        const int p = 1 + (int)(test_rand(&seed) % 8), m = 1 + (int)(test_rand(&seed) % 20);
        for (int k = 0; k < p; k++) {
            stage[k] = (StageCost){ 1 + (double)(test_rand(&seed) % 9), 100, 100 };
            sum += stage[k].f;
            if (stage[k].f > slowest) slowest = stage[k].f;
        }
        Schedule s;
        Simulation sim;
        OK(schedule_forward(&(ScheduleSpec){ "1f1b", p, m }, &s));
        OK(simulate(&s, &(SimulateCosts){ .stage = stage, .latency = 0.5, .bytes = 6, .bandwidth = 4 }, &sim));
        CHECK(sim.makespan == sum + (m - 1) * slowest + 2 * (p - 1));
        CHECK(sim.ideal == m * slowest);
        simulation_free(&sim, &s);
        schedule_free(&s);
    }
}

/* ---- what the passes promise ---- */

static bool in_order(const Action *a, const Action *b)
{
    if (a->payload != b->payload) return a->payload < b->payload;
    if (a->replica != b->replica) return a->replica < b->replica;
    if (a->stage != b->stage) return a->stage < b->stage;
    return a->microbatch < b->microbatch;
}

/* Groups list their messages in one order on both sides; nothing but the end of the step follows its beginning. */
static void check_promises(const Schedule *s, int rank)
{
    const ActionList *list = &s->rank[rank];
    bool ending = false;
    for (int i = 0; i < list->count; i++) {
        const Action *a = &list->action[i];
        if (a->flags & ACTION_MORE) CHECK_MSG(in_order(a, a + 1), "%s rank %d action %d", s->name, rank, i);
        if (!action_is_compute(a->kind) && !action_is_message(a->kind)) ending = true;
        else CHECK_MSG(!ending || s->versions != VERSIONS_STEP, "%s rank %d action %d", s->name, rank, i);
    }
    CHECK(ending);
}

TEST(promises)
{
    for (int i = 0; schedule_name(i); i++) {
        Schedule s;
        OK(schedule_make(&(ScheduleSpec){ schedule_name(i), 4, 16 }, &s));
        for (int r = 0; r < 4; r++) check_promises(&s, r);
        schedule_free(&s);
    }
}

/* Ranks that share two stages reduce them in one order. */
static bool marks_pairs(const Schedule *s)
{
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->rank[r].count; i++)
            if (s->rank[r].action[i].flags & ACTION_PAIR) return true;
    return false;
}

/* What the table says of a schedule its lists do. */
TEST(pairs)
{
    int count = 0;
    for (int i = 0; schedule_name(i); i++) {
        Schedule s;
        bool said;
        OK(schedule_make(&(ScheduleSpec){ .name = schedule_name(i), .ranks = 4, .microbatches = 8 }, &s));
        OK(schedule_pairs(schedule_name(i), &said));
        CHECK_MSG(said == marks_pairs(&s), "%s", s.name);
        count += said;
        schedule_free(&s);
    }
    CHECK(count == 2);
}

TEST(order_of_reduces)
{
    Schedule s;
    OK(schedule_make(&(ScheduleSpec){ "chimera", 6, 6 }, &s));
    for (int r = 0; r < 6; r++) {
        int stage[2], n = 0;
        for (int i = 0; i < s.rank[r].count; i++) {
            const Action *a = &s.rank[r].action[i];
            if (a->kind == ACT_REDUCE && n < 2) stage[n++] = a->stage;
        }
        CHECK(n == 2 && stage[0] == least(r, 5 - r) && stage[1] == 5 - stage[0]);
    }
    schedule_free(&s);
}

/* The pool does not grow with the number of micro-batches where the activations do not. */
TEST(bounded_buffers)
{
    static const char *const names[] = { "1f1b", "zb-h1", "zb-v", "v-half", "chimera", "dualpipe", "dualpipev" };
    for (int i = 0; i < 7; i++) {
        Schedule few, many;
        OK(schedule_make(&(ScheduleSpec){ names[i], 4, 16 }, &few));
        OK(schedule_make(&(ScheduleSpec){ names[i], 4, 80 }, &many));
        for (int r = 0; r < 4; r++)
            CHECK_MSG(many.rank[r].buffers == few.rank[r].buffers && few.rank[r].buffers <= 12, "%s rank %d: %d, %d",
                      names[i], r, few.rank[r].buffers, many.rank[r].buffers);
        schedule_free(&few);
        schedule_free(&many);
    }
}

/* Between p and 2p - 1 micro-batches the shorter of two lists is taken: 4 where list scheduling gives 5. */
TEST(zb_v_with_few_micro_batches)
{
    Schedule s;
    Simulation sim;
    OK(schedule_make(&(ScheduleSpec){ "zb-v", 4, 5 }, &s));
    OK(simulate(&s, &unit_costs, &sim));
    CHECK(sim.bubble == 4);
    simulation_free(&sim, &s);
    schedule_free(&s);
}

/* ---- weight versions ---- */

TEST(weight_versions)
{
    static const char *const names[] = { "pipedream", "pipedream-vertical", "2bw" };
    for (int kind = 0; kind < 3; kind++)
        for (int p = 1; p <= 8; p++) {
            Schedule s;
            Simulation sim;
            const int m = kind == 2 ? p : 3 * p, batches = kind == 2 ? 4 : 1;
            OK(schedule_make(&(ScheduleSpec){ names[kind], p, m }, &s));
            OK(simulate(&s, &unit_costs, &sim));
            CHECK(sim.makespan == 3 * (m * batches + p - 1));
            for (int r = 0; r < p; r++) {
                const int want = kind == 0 ? p - r : kind == 1 ? p : 2;
                CHECK_MSG(simulate_weight_copies(&s, r) == want, "%s p=%d rank %d: %d", s.name, p, r,
                          simulate_weight_copies(&s, r));
            }
            simulation_free(&sim, &s);
            schedule_free(&s);
        }
}

/* ---- forward only ---- */

TEST(forward_only)
{
    for (int i = 0; schedule_name(i); i++)
        for (int p = 1; p <= 6; p++)
            for (int m = 1; m <= 7; m += 2) {
                Schedule s;
                Simulation sim;
                OK(schedule_forward(&(ScheduleSpec){ schedule_name(i), p, m }, &s));
                OK(simulate(&s, &unit_costs, &sim));
                const int units = strcmp(s.name, "chimera-bhalf") ? m : 2 * m;
                CHECK(sim.ideal == units * s.chunks);
                if (s.chunks == 1) CHECK(sim.makespan == units + p - 1);
                CHECK(sim.makespan >= units * s.chunks);
                CHECK(simulate_peak(&s, 0, false) == units * s.chunks); /* nothing gives back: its user does */
                for (int r = 0; r < p; r++)
                    for (int k = 0; k < s.rank[r].count; k++) {
                        const ActionKind kind = s.rank[r].action[k].kind;
                        CHECK(kind == ACT_F || action_is_message(kind));
                    }
                simulation_free(&sim, &s);
                schedule_free(&s);
            }
}

/* ---- shapes ---- */

TEST(illegal_shapes)
{
    static const struct {
        ScheduleSpec spec;
        const char *message, *hint;
    } cases[] = {
        { { "dualpipe", 4, 7 }, "an even number of micro-batches", "4 ranks, 8 micro-batches" },
        { { "dualpipe", 3, 8 }, "an even number of ranks", "4 ranks, 8 micro-batches" },
        { { "dualpipev", 4, 6 }, "at least twice as many micro-batches as ranks", "4 ranks, 8 micro-batches" },
        { { "interleaved", 5, 7, .group = 5 }, "a last group that is full", "5 ranks, 5 micro-batches" },
        { { "interleaved", 4, 8, .group = 3 }, "groups of at least as many", "4 ranks, 8 micro-batches, groups of 4" },
        { { "interleaved", 4, 8, .chunks = 1 }, "2 chunks a rank or more", "groups of 4, 2 chunks a rank" },
        { { "hanayo", 4, 4, .chunks = 3 }, "two chunks a rank for each wave, not 3", "" },
        { { "hanayo", 4, 4, .chunks = 4, .waves = 1 }, "two chunks a rank for each wave, not 4", "" },
        { { "zbv", 4, 8 }, "unknown schedule 'zbv'; did you mean 'zb-v'?", "zb-h1" },
        { { "zb-h1-int", 4, 6 }, "a multiple of the number of ranks", "4 ranks, 8 micro-batches" },
        { { "chimera", 4, 6 }, "a multiple of the number of ranks", "4 ranks, 8 micro-batches" },
        { { "chimera-fdouble", 4, 4 }, "twice the number of ranks", "4 ranks, 8 micro-batches" },
        { { "hanayo", 4, 5 }, "a multiple of the number of ranks", "4 ranks, 4 micro-batches" },
        { { "2bw", 8, 6 }, "at least as many micro-batches as ranks, less one", "8 ranks, 7 micro-batches" },
        { { "1f1b", 4, 8, .chunks = 2 }, "has 1 chunk a rank, not 2", "" },
        { { "zb-h1+split", 4, 8 }, "backwards are split already", "" },
        { { "1f2b", 4, 8 }, "unknown schedule '1f2b'", "zb-h1" },
        { { NULL, 4, 8 }, "unknown schedule ''", "zb-h1" },
        { { "1f1b", 0, 8 }, "ranks of a pipeline must be 1 to", "" },
        { { "1f1b", 4, 0 }, "micro-batches must be 1 to", "" },
        { { "1f1b", 4, -3 }, "micro-batches must be 1 to", "" },
        { { "bfs", 4, 4, .chunks = 1 << 20 }, "chunks of a rank must be 1 to", "" },
        { { "bfs", 1, 1 << 24, .chunks = 1 << 10 }, "visits", "" },
        { { "hanayo", 4, 4, .waves = -1 }, "waves must be 1 to", "" },
        { { "1f1b", 4, 8, .slices = 2 }, "passes whole sequences on, not 2 slices", "schedule seq1f1b" },
        { { "seq1f1b", 4, 8, .slices = -1 }, "slices of a sequence must be 1 to", "" },
        { { "seq1f1b", 4, 1 << 15, .slices = 1 << 10 }, "micro-batches must be 1 to", "" },
        { { "gpipe", 4, 8, .cap = 7 }, "holds 8 units on rank 0, more than the cap of 7", "" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Schedule s;
        FAILS(schedule_make(&cases[i].spec, &s), ERR_CONFIG, cases[i].message);
        CHECK_MSG(strstr(err_hint_text(), cases[i].hint), "case %zu: %s", i, err_hint_text());
        schedule_free(&s);
    }
}

TEST(large)
{
    static const char *const names[] = { "1f1b", "interleaved", "bfs", "zb-v", "v-half", "chimera", "hanayo" };
    for (int i = 0; i < 7; i++) {
        Schedule s;
        Simulation sim;
        OK(schedule_make(&(ScheduleSpec){ names[i], 64, 512 }, &s));
        OK(simulate(&s, &unit_costs, &sim));
        CHECK(sim.ideal == 3 * 512 * s.chunks);
        simulation_free(&sim, &s);
        schedule_free(&s);
    }
}

/* Slots of one rank's parts together are no less than the rank ever holds, and no more than its list has. */
TEST(in_flight)
{
    Schedule s;
    OK(schedule_make(&(ScheduleSpec){ "chimera", 4, 8 }, &s));
    for (int r = 0; r < 4; r++) {
        int sum = 0;
        for (int replica = 0; replica < 2; replica++) {
            const int stage = schedule_stage_at(&s, r, replica, 0);
            CHECK(schedule_rank_of(&s, replica, stage) == r && schedule_chunk_of(&s, stage) == 0);
            sum += schedule_in_flight(&s, replica, stage, false);
        }
        CHECK(sum >= simulate_peak(&s, r, false) && sum <= 8);
    }
    CHECK(schedule_in_flight(&s, 0, 3, false) == 1); /* the last stage of a direction */
    schedule_free(&s);
    OK(schedule_make(&(ScheduleSpec){ "zb-h1", 4, 8 }, &s));
    CHECK(schedule_in_flight(&s, 0, 3, false) == 4 && schedule_in_flight(&s, 0, 3, true) == 1);
    schedule_free(&s);
}

/* ---- many simulations of one schedule; measured spans ---- */

static void check_again(const Schedule *s, Simulator *r, const StageCost each)
{
    const SimulateCosts costs = { .each = each };
    const Simulation *again;
    Simulation once;
    OK(simulate(s, &costs, &once));
    OK(simulator_run(r, &costs, &again));
    CHECK(again->makespan == once.makespan && again->ideal == once.ideal && again->bubble == once.bubble);
    for (int k = 0; k < s->ranks; k++)
        CHECK(!memcmp(again->span[k], once.span[k], (size_t)s->rank[k].count * sizeof(Span)));
    simulation_free(&once, s);
}

TEST(simulator_runs_again)
{
    static const char *const names[] = { "1f1b", "zb-v", "dualpipe" };
    for (int i = 0; i < 3; i++) {
        Schedule s;
        Simulator *r;
        OK(schedule_make(&(ScheduleSpec){ .name = names[i], .ranks = 4, .microbatches = 8 }, &s));
        OK(simulator_open(&s, &r));
        check_again(&s, r, (StageCost){ 5, 3, 7 });
        check_again(&s, r, (StageCost){ 1, 1, 1 }); /* shorter than the one before */
        simulator_close(r);
        schedule_free(&s);
    }
}

/* With even work the share is that of the bubble in the makespan; pairs share their time, whether both begin at once as
 * simulated or one after the other as measured. */
TEST(share_of_idle_time)
{
    static const char *const names[] = { "gpipe", "zb-h1", "dualpipev" };
    for (int i = 0; i < 3; i++) {
        Schedule s;
        Simulation sim;
        OK(schedule_make(&(ScheduleSpec){ .name = names[i], .ranks = 4, .microbatches = 8 }, &s));
        OK(simulate(&s, &(SimulateCosts){ .each = { 1, 1, 1 } }, &sim));
        const double idle = simulation_idle(&s, &sim);
        CHECK_CLOSE(idle, sim.bubble / sim.makespan, 1e-12, "%s", names[i]);
        CHECK(idle > 0);
        for (int r = 0; r < s.ranks; r++)
            for (int k = 0; k < s.rank[r].count; k++)
                if (s.rank[r].action[k].flags & ACTION_PAIR)
                    sim.span[r][k].end = sim.span[r][k + 1].start += (sim.span[r][k].end - sim.span[r][k].start) / 2;
        CHECK_CLOSE(simulation_idle(&s, &sim), idle, 1e-12, "%s, in turn", names[i]);
        simulation_free(&sim, &s);
        schedule_free(&s);
    }
}

static double svg_width(const char *text)
{
    const char *box = strstr(text, "viewBox=\"0 0 ");
    return box ? strtod(box + strlen("viewBox=\"0 0 "), NULL) : NAN;
}

/* Pictures of long times, many digits and many ranks stay below the bound. */
TEST(pictures_have_room)
{
    static const ScheduleSpec shapes[] = { { .name = "1f1b", .ranks = 1, .microbatches = 1 },
                                           { .name = "zb-v", .ranks = 16, .microbatches = 70 },
                                           { .name = "dualpipe", .ranks = 8, .microbatches = 700 },
                                           { .name = "pipedream", .ranks = 4, .microbatches = 50 } };
    for (int i = 0; i < 4; i++) {
        Schedule s;
        Simulation sim;
        char *text = NULL;
        size_t size = 0;
        OK(schedule_make(&shapes[i], &s));
        OK(simulate(&s, &(SimulateCosts){ .each = { 1e7 / 3, 1e6 / 7, 1.23456789e-4 } }, &sim));
        const ChartRuns runs = {
            .title = "t", .figures = "f", .unit = "ms", .name = { "a", "b" }, .run = { &sim, &sim }, .runs = 2
        };
        FILE *f = open_memstream(&text, &size);
        chart_svg_runs(&s, &runs, f);
        fclose(f);
        CHECK_MSG((int64_t)size <= chart_svg_bytes(&s, 2), "%s: %zu of %lld bytes", s.name, size,
                  (long long)chart_svg_bytes(&s, 2));
        /* what no page could show is its beginning and its end, at a scale at which numbers can be read */
        const bool cut = strstr(text, "shown are the first and the last");
        CHECK_MSG(cut == (i > 0) && strstr(text, "</svg>") && strstr(text, ">0</text>"), "%s", s.name);
        CHECK(svg_width(text) <= 1200);
        free(text);
        simulation_free(&sim, &s);
        schedule_free(&s);
    }
}

TEST_MAIN
