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

/* Warm-up forwards, then pairs of a forward and a backward, then the backwards that remain. */
static void warm_up_and_pair(Schedule *s, int rank, int warm)
{
    int f = 0, b = 0;
    while (f < warm && f < s->units) schedule_add(s, rank, ACT_F, rank, f++);
    while (f < s->units) {
        schedule_add(s, rank, ACT_F, rank, f++);
        schedule_add(s, rank, ACT_B, rank, b++);
    }
    while (b < s->units) schedule_add(s, rank, ACT_B, rank, b++);
}

/* Source: Narayanan et al. 2021 (PipeDream-Flush); Fan et al. 2021 (DAPPLE). */
void generate_1f1b(Schedule *s)
{
    for (int r = 0; r < s->ranks; r++) warm_up_and_pair(s, r, s->ranks - 1 - r);
}
