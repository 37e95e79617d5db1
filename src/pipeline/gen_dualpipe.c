/*
 * DualPipe and DualPipeV: two legs pass through every rank, and the forward of one is paired with the backward
 * of the other, so that the messages of experts hide behind computation.
 *
 *   DualPipe    legs are two replicas in opposite directions; a rank's position counts from its nearer end
 *   DualPipeV   legs are the way out and the way back of one replica, folded in a V
 *
 * Source: DeepSeek-AI 2024 (DeepSeek-V3, DualPipe); Qi et al. 2025 (its V form).
 */
#include "pipeline/table.h"

enum { PENDING_MAX = 1 << 12 }; /* input halves without their W: never more than there are ranks */

typedef struct {
    int replica, stage, first_unit;
    int forward, backward, weight; /* how many so far */
} Leg;

typedef struct {
    Schedule *s;
    int rank;
    bool paired;
    Leg leg[2];                   /* 0: the one whose early stages are near */
    uint8_t pending[PENDING_MAX]; /* ring of legs whose W is to come, the oldest first */
    int pending_first, pending_count;
} Dual;

static void add(Dual *d, ActionKind kind, int leg, int i, int flags)
{
    const Leg *l = &d->leg[leg];
    schedule_push(d->s, d->rank,
                  (Action){ .kind = (uint8_t)kind,
                            .replica = (uint8_t)l->replica,
                            .flags = (uint8_t)flags,
                            .stage = (uint16_t)l->stage,
                            .microbatch = l->first_unit + i,
                            .count = 1,
                            .in = -1,
                            .out = -1 });
}

static void add_F(Dual *d, int leg) { add(d, ACT_F, leg, d->leg[leg].forward++, 0); }

static void add_B(Dual *d, int leg)
{
    add(d, ACT_B, leg, d->leg[leg].backward++, 0);
    d->leg[leg].weight++;
}

static void add_I(Dual *d, int leg)
{
    add(d, ACT_I, leg, d->leg[leg].backward++, 0);
    ASSERT(d->pending_count < PENDING_MAX);
    d->pending[(d->pending_first + d->pending_count++) % PENDING_MAX] = (uint8_t)leg;
}

static void add_W(Dual *d)
{
    const int leg = d->pending[d->pending_first];
    ASSERT(d->pending_count > 0);
    d->pending_first = (d->pending_first + 1) % PENDING_MAX;
    d->pending_count--;
    add(d, ACT_W, leg, d->leg[leg].weight++, 0);
}

/* Forward of one leg and backward of the other. */
static void add_FB(Dual *d, int forward, int backward)
{
    add(d, ACT_F, forward, d->leg[forward].forward++, d->paired ? ACTION_PAIR : 0);
    add_B(d, backward);
}

/* The closing backwards; from half-way on their wgrads are left for later. */
static void close_legs(Dual *d, int h)
{
    const int half = 2 * ((h + 1) / 2) + (h % 2 == 0);
    for (int i = 0; i < 2 * (h + 1); i++)
        if (i < half) add_B(d, 1 - i % 2);
        else add_I(d, 1 - i % 2);
}

/* The eight phases of position h of H, with n units a leg. */
static void run_phases(Dual *d, int H, int h, int n)
{
    for (int i = 0; i < 2 * (H - h - 1); i++) add_F(d, 0);
    for (int i = 0; i < 2 * (h + 1); i++) add_F(d, i % 2);
    for (int i = 0; i < H - h - 1; i++) {
        add_I(d, 1);
        add_W(d);
        add_F(d, 1);
    }
    for (int i = 0; i < n - 2 * H + h + 1; i++) {
        const bool turn = i == 0 && h == H - 1; /* what goes back is what has just come */
        if (turn) add_F(d, 0);
        if (turn) add_B(d, 1);
        else add_FB(d, 0, 1);
        add_FB(d, 1, 0);
    }
    for (int i = 0; i < H - h - 1; i++) {
        add_B(d, 1);
        add_FB(d, 1, 0);
    }
    close_legs(d, h);
    for (int i = 0; i < H - h - 1; i++) {
        add_W(d);
        add_I(d, 0);
    }
    for (int i = 0; i < h + 1; i++) add_W(d);
}

static void generate(Schedule *s, bool paired)
{
    const int p = s->ranks, two_way = s->placement == PLACE_TWO_WAY;
    const int H = two_way ? p / 2 : p, n = two_way ? s->units / 2 : s->units;
    for (int r = 0; r < p; r++) {
        const bool swap = two_way && r >= H;
        Dual d = { .s = s, .rank = r, .paired = paired };
        for (int i = 0; i < 2; i++) {
            const int leg = swap ? 1 - i : i, replica = two_way ? leg : 0;
            d.leg[i] = (Leg){ .replica = replica,
                              .stage = schedule_stage_at(s, r, replica, two_way ? 0 : leg),
                              .first_unit = two_way ? leg * n : 0 };
        }
        run_phases(&d, H, swap ? p - 1 - r : r, n);
    }
}

void generate_dualpipe(Schedule *s) { generate(s, true); }
void generate_dualpipe_serial(Schedule *s) { generate(s, false); }
