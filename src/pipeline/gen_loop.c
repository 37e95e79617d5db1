/* Generators with loop placement: stage s on rank s mod p. */
#include "pipeline/table.h"

/* All forwards, then all backwards, both ascending. Source: Huang et al. 2019 (GPipe). */
void generate_gpipe(Schedule *s)
{
    for (int r = 0; r < s->ranks; r++) {
        for (int k = 0; k < s->units; k++) schedule_add(s, r, ACT_F, r, k);
        for (int k = 0; k < s->units; k++) schedule_add(s, r, ACT_B, r, k);
    }
}

/* The n-th unit of the backwards: micro-batches ascending, the slices of each descending. */
static int backward_unit(const Schedule *s, int n)
{
    const int slice = schedule_slice_of(s, n);
    return n - slice + s->slices - 1 - slice;
}

/* Warm-up forwards, then pairs of a forward and a backward, then the backwards that remain. */
static void warm_up_and_pair(Schedule *s, int rank, int warm)
{
    int f = 0, b = 0;
    while (f < warm && f < s->units) schedule_add(s, rank, ACT_F, rank, f++);
    while (f < s->units) {
        schedule_add(s, rank, ACT_F, rank, f++);
        schedule_add(s, rank, ACT_B, rank, backward_unit(s, b++));
    }
    while (b < s->units) schedule_add(s, rank, ACT_B, rank, backward_unit(s, b++));
}

/*
 * In slices the warm-up is longer by those before the first whole micro-batch, whose last slice has the first backward.
 * Source: Narayanan et al. 2021 (PipeDream-Flush); Fan et al. 2021 (DAPPLE); Sun et al. 2024 (Seq1F1B).
 */
void generate_1f1b(Schedule *s)
{
    for (int r = 0; r < s->ranks; r++) warm_up_and_pair(s, r, s->ranks - 1 - r + s->slices - 1);
}

/* Twice the warm-up, which hides the messages of forwards. Source: Zheng et al. 2022 (Alpa); DAPPLE, policy B. */
void generate_eager_1f1b(Schedule *s)
{
    for (int r = 0; r < s->ranks; r++) warm_up_and_pair(s, r, 2 * (s->ranks - 1 - r));
}

/* ---- several chunks a rank ---- */

/*
 * The n-th visit of a rank: micro-batches go in groups, each group through all chunks before the next one
 * begins; the last group may be smaller. A backward visits the chunks from the last to the first.
 */
static void add_visit(Schedule *s, int rank, ActionKind kind, int n)
{
    const int in_group = s->group * s->chunks, base = n / in_group * s->group;
    const int size = s->units - base < s->group ? s->units - base : s->group;
    int chunk = n % in_group / size;
    if (kind != ACT_F) chunk = s->chunks - 1 - chunk;
    schedule_add(s, rank, kind, schedule_stage_at(s, rank, 0, chunk), base + n % in_group % size);
}

/* Source: Narayanan et al. 2021 (Megatron-LM), with any group size. */
void generate_interleaved(Schedule *s)
{
    const int visits = s->units * s->chunks;
    for (int r = 0; r < s->ranks; r++) {
        const int warm = 2 * (s->ranks - 1 - r) + (s->chunks - 1) * s->group;
        int f = 0, b = 0;
        while (f < warm && f < visits) add_visit(s, r, ACT_F, f++);
        while (b < visits) {
            if (f < visits) add_visit(s, r, ACT_F, f++);
            add_visit(s, r, ACT_B, b++);
        }
    }
}

/* Chunk by chunk, all micro-batches: gpipe on a loop. Source: Lamy-Poirier 2023 (breadth-first). */
void generate_bfs(Schedule *s)
{
    s->group = s->units;
    for (int r = 0; r < s->ranks; r++) {
        for (int n = 0; n < s->units * s->chunks; n++) add_visit(s, r, ACT_F, n);
        for (int n = 0; n < s->units * s->chunks; n++) add_visit(s, r, ACT_B, n);
    }
}

/*
 * Zero bubble with a fixed rule: `depth` times the usual warm-up, then rounds of F, I and W, where the first
 * depth * rank rounds leave their W for the end.
 * Source: Qi et al. 2024 (ZB-H1: depth 1, ZB-H2: depth 2); with several chunks "interleaved zero bubble".
 */
static void zero_bubble(Schedule *s, int depth)
{
    const int visits = s->units * s->chunks;
    for (int r = 0; r < s->ranks; r++) {
        const int warm = depth * (s->ranks - 1 - r) + (s->chunks - 1) * s->ranks;
        int f = 0, i = 0, w = 0;
        while (f < warm && f < visits) add_visit(s, r, ACT_F, f++);
        while (i < visits) {
            if (f < visits) add_visit(s, r, ACT_F, f++);
            add_visit(s, r, ACT_I, i++);
            if (i > depth * r) add_visit(s, r, ACT_W, w++);
        }
        while (w < visits) add_visit(s, r, ACT_W, w++);
    }
}

void generate_zb_h1(Schedule *s) { zero_bubble(s, 1); }
void generate_zb_h2(Schedule *s) { zero_bubble(s, 2); }
