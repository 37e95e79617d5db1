/*
 * Generators that place actions in a grid of slots, where nothing collides:
 *
 *   of D stages, the i-th forward of stage s stands in slot s + 2i, its backward in slot 2D - 1 - s + 2i
 *
 * Chimera runs two such pipelines in opposite directions, whose slots have opposite parity on every rank; a
 * wave (Hanayo) is the left half of a Chimera twice as deep, its two directions joined into one path. A block
 * of micro-batches is followed by the next one `shift` slots later.
 */
#include "pipeline/list.h"
#include "pipeline/table.h"

typedef struct {
    int depth;     /* D */
    int shift;     /* how many slots from block to block */
    int forwards;  /* how many one stage has in a block, each of `doubled` units */
    int backwards; /* how many one stage has in a block */
    int doubled;
    int block;     /* how many units a block has, both directions together */
    int direction; /* how many units from the first direction to the second, inside a block */
} SlotRule;

/* Block and index of what stands `behind` slots after the first of its kind; false if nothing does. */
static bool in_slot(const SlotRule *rule, int behind, int turns, int *block, int *i)
{
    if (behind < 0) return false;
    *block = behind / rule->shift;
    *i = behind % rule->shift / 2;
    return behind % rule->shift % 2 == 0 && *i < turns;
}

static void add_slot(Schedule *s, const SlotRule *rule, int rank, int slot, int leg)
{
    const bool two_way = s->placement == PLACE_TWO_WAY;
    const int stage = two_way ? schedule_stage_at(s, rank, leg, 0) : schedule_stage_at(s, rank, 0, leg);
    int block, i;
    Action a = { .replica = two_way ? (uint8_t)leg : 0, .stage = (uint16_t)stage, .in = -1, .out = -1 };
    if (in_slot(rule, slot - stage, rule->forwards, &block, &i)) {
        a.kind = ACT_F;
        a.count = rule->doubled;
    } else if (in_slot(rule, slot - (2 * rule->depth - 1 - stage), rule->backwards, &block, &i)) {
        a.kind = ACT_B;
        a.count = 1;
    } else {
        return;
    }
    a.microbatch = block * rule->block + leg * rule->direction + i * a.count;
    if (block * rule->block < s->units) schedule_push(s, rank, a);
}

static void fill_slots(Schedule *s, const SlotRule *rule)
{
    const int blocks = (s->units + rule->block - 1) / rule->block;
    const int slots = blocks * rule->shift + 4 * rule->depth;
    for (int r = 0; r < s->ranks; r++)
        for (int slot = 0; slot < slots; slot++)
            for (int leg = 0; leg < 2; leg++) add_slot(s, rule, r, slot, leg);
}

/* Blocks of p micro-batches one behind another, or one smaller block. Source: Li and Hoefler 2021 (Chimera). */
void generate_chimera(Schedule *s)
{
    const int p = s->ranks, block = s->units < p ? s->units : p;
    fill_slots(s, &(SlotRule){ .depth = p,
                               .shift = 2 * p,
                               .forwards = block / 2,
                               .backwards = block / 2,
                               .doubled = 1,
                               .block = block,
                               .direction = block / 2 });
}

/* A forward takes two units, a backward one: whole micro-batches (doubling), or halves of one (halving). */
void generate_chimera_doubled(Schedule *s)
{
    const int p = s->ranks;
    fill_slots(s, &(SlotRule){ .depth = p,
                               .shift = 3 * p,
                               .forwards = p / 2,
                               .backwards = p,
                               .doubled = 2,
                               .block = 2 * p,
                               .direction = p });
}

/* Source: Liu et al. 2023 (Hanayo). More than one wave has no grid here: it is list-scheduled. */
void generate_wave(Schedule *s)
{
    const int p = s->ranks;
    if (s->waves > 1) {
        list_schedule_wave(s, p);
        return;
    }
    fill_slots(s,
               &(SlotRule){ .depth = 2 * p, .shift = 4 * p, .forwards = p, .backwards = p, .doubled = 1, .block = p });
}

/* One micro-batch at a time, the next one in the other direction. Source: Jain et al. 2020 (GEMS). */
void generate_gems(Schedule *s)
{
    for (int r = 0; r < s->ranks; r++)
        for (int k = 0; k < s->units; k++)
            for (int half = 0; half < 2; half++)
                schedule_push(s, r,
                              (Action){ .kind = half ? ACT_B : ACT_F,
                                        .replica = (uint8_t)(k % 2),
                                        .stage = (uint16_t)schedule_stage_at(s, r, k % 2, 0),
                                        .microbatch = k,
                                        .count = 1,
                                        .in = -1,
                                        .out = -1 });
}
