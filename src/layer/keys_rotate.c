/*
 * Keys that come round a ring of ranks, in the order of arrival: where the bits of other layouts are not promised (in
 * the order of positions: keys_ring.c). What goes round is both parts of a rank:
 *
 *   turn                 0      1      2      3        cp = 4
 *   rank 1 works on      own    0's    3's    2's      each came from rank 0 during the turn before, and goes on to 2
 *
 * A rank waits for nobody before its own keys are done, and keys travel to a neighbour only, while those before them
 * are worked on. A part goes on as long as a rank ahead sees some of it, by causality and window. What the turns find
 * is merged by the running maximum and sum of each query's row (ops.def, attention_fwd).
 *
 * Backward: the same turns. The gradients of a part follow it a turn later: a rank adds its share to the sum that came
 * from the rank before, and the last one that has the part hands the sum to its owner, who adds its own.
 *
 *   during turn t   comes        parts of rank - t - 1       the sum for those of rank - t: of the ranks before
 *                   goes on      parts of rank - t           the sum for those of rank - t + 1, this rank's too
 *
 * Memory: keys and values of two ranks; in backward three times their gradients in fp32 (a sum that came, the share, a
 * sum that goes on), and in 16 bits once more for the share as the op writes it. The order is that of the ring, so a
 * repeat has the same bits. Sums that several turns form are in fp32, and rounded once.
 *
 * In the walk, held[turn % 2] are the parts [2, count] at work, and the other ones are on their way. pair is f32 [2
 * parts, sum that came | share]; sums, f32 [2 parts, count], go on; share is [2 parts, count] as the op writes it. In
 * fp32 it is absent, and the op writes to `pair`.
 */
#include "layer/keys.h"

/* ---- what travels ---- */

static int ranks_of(const KeyWalk *w) { return w->ring.parts / 2; }

/* The rank whose parts are at work in a turn. */
static int owner_at(const KeyWalk *w, int turn)
{
    const int n = ranks_of(w);
    return (w->ring.rank + 2 * n - turn) % n;
}

static int part_of(const KeyWalk *w, int owner, int i) { return context_part(CONTEXT_ZIGZAG, w->ring.parts, owner, i); }

/* Does one of the ranks first .. end - 1 places behind the owner see some of its part? */
static bool seen_by(const KeyWalk *w, int part, int first, int end)
{
    const int owner = context_owner(CONTEXT_ZIGZAG, w->ring.parts, part);
    for (int place = first; place < end; place++)
        if (ring_sees(&w->ring, (owner + place) % ranks_of(w), part)) return true;
    return false;
}

/* From `place` to the next: keys that are seen farther on, sums to which a rank behind the owner has added. */
static bool keys_go(const KeyWalk *w, int part, int place) { return seen_by(w, part, place + 1, ranks_of(w)); }
static bool sums_go(const KeyWalk *w, int part, int place) { return seen_by(w, part, 1, place + 1); }

/* To the next rank, or from the one before. */
static CommMessage message(const KeyWalk *w, bool send, Tensor part, MessageKind kind, int number)
{
    const int n = ranks_of(w);
    return (CommMessage){ .send = send,
                          .peer = (w->ring.rank + (send ? 1 : n - 1)) % n,
                          .data = part.data,
                          .bytes = tensor_bytes(part),
                          .what = { .kind = (uint16_t)kind, .stage = (uint16_t)number } };
}

static int key_messages(const KeyWalk *w, int turn, CommMessage *m)
{
    int count = 0;
    for (int i = 0; i < 2; i++) {
        const int out = part_of(w, owner_at(w, turn), i), in = part_of(w, owner_at(w, turn + 1), i);
        const Tensor here = tensor_row_slice(w->held[turn % 2], i, 1);
        const Tensor there = tensor_row_slice(w->held[(turn + 1) % 2], i, 1);
        if (keys_go(w, out, turn)) m[count++] = message(w, true, here, MESSAGE_KEYS, out);
        if (keys_go(w, in, turn)) m[count++] = message(w, false, there, MESSAGE_KEYS, in);
    }
    return count;
}

/* The sums that the turn before made. */
static int sum_messages(const KeyWalk *w, int turn, CommMessage *m)
{
    int count = 0;
    for (int i = 0; i < 2; i++) {
        const int out = part_of(w, owner_at(w, turn - 1), i), in = part_of(w, owner_at(w, turn), i);
        const Tensor here = tensor_row_slice(w->sums, i, 1), there = tensor_row_slice(w->pair, 2 * i, 1);
        if (sums_go(w, out, turn - 1)) m[count++] = message(w, true, here, MESSAGE_KEY_SUMS, out);
        if (sums_go(w, in, turn - 1)) m[count++] = message(w, false, there, MESSAGE_KEY_SUMS, in);
    }
    return count;
}

/* Posts the tensors that travel during a turn. */
static Err post(KeyWalk *w, int turn)
{
    CommMessage m[8];
    Comm *cp = w->ring.group;
    int count = turn < ranks_of(w) - 1 ? key_messages(w, turn, m) : 0;
    if (w->a && turn > 1) count += sum_messages(w, turn, m + count);
    w->moving = count > 0;
    return count ? comm_exchange(cp, w->c->s, m, count, &cp->pending) : ERR_OK;
}

static Err arrived(const KeyWalk *w) { return w->moving ? stream_wait(w->c->s, &w->ring.group->pending) : ERR_OK; }

/* ---- backward ---- */

Err arrival_begin(KeyWalk *w)
{
    Ctx *c = w->c;
    const DType dtype = w->own[0].dtype;
    const int64_t count = (tensor_count(w->own[0]) + tensor_count(w->own[1])) / 2;
    TRY(tensor_new(c->scratch, &w->pair, F32, 4, count));
    TRY(tensor_new(c->scratch, &w->sums, F32, 2, count));
    return dtype == F32 ? ERR_OK : tensor_new(c->scratch, &w->share, dtype, 2, count);
}

/* Place where the op writes this rank's share of dk (0) or dv (1) of part i. */
static Tensor share_half(const KeyWalk *w, int i, int half)
{
    return w->share.data ? ring_half(&w->ring, w->share, i, half) : ring_half(&w->ring, w->pair, 2 * i + 1, half);
}

/* sums of part i = what came + this rank's share; of only one of them if the other is nothing. */
static Err add_share(const KeyWalk *w, int i, bool came, bool share)
{
    Ctx *c = w->c;
    const Tensor sum = tensor_row_slice(w->sums, i, 1), both = tensor_row_slice(w->pair, 2 * i, 2);
    const int64_t columns = w->ring.half[0][3] + w->ring.half[1][3], rows = tensor_count(sum) / columns;
    if (share && w->share.data) TRY(cast_values(c, tensor_row_slice(both, 1, 1), tensor_row_slice(w->share, i, 1)));
    if (came && share)
        return op(c->s, sum_parts, .y = tensor_reshape(sum, rows, columns),
                  .x = tensor_reshape(both, 2 * rows, columns), .parts = 2);
    if (!came && !share) return ERR_OK;
    return device_copy(c->s, sum.data, tensor_row_slice(both, share, 1).data, tensor_bytes(sum));
}

/* dk and dv, this rank's share for its own keys, and what came of the others. */
static Err add_to_own(const KeyWalk *w)
{
    Ctx *c = w->c;
    const Tensor own[2] = { w->a->dk, w->a->dv };
    for (int i = 0; i < 2; i++) {
        if (!sums_go(w, part_of(w, w->ring.rank, i), ranks_of(w) - 1)) continue;
        for (int half = 0; half < 2; half++) TRY(context_move_part(c, own[half], share_half(w, i, half), i, false));
        TRY(add_share(w, i, true, true));
        if (w->share.data) TRY(cast_values(c, tensor_row_slice(w->share, i, 1), tensor_row_slice(w->sums, i, 1)));
        for (int half = 0; half < 2; half++)
            TRY(context_move_part(c, own[half], ring_half(&w->ring, w->share.data ? w->share : w->sums, i, half), i,
                                  true));
    }
    return ERR_OK;
}

/* The sums of the ranks before, which have come, and this rank's share. */
static Err add_turn(const KeyWalk *w, int turn)
{
    for (int i = 0; i < 2; i++) {
        const int part = part_of(w, owner_at(w, turn), i);
        TRY(add_share(w, i, sums_go(w, part, turn - 1), ring_sees(&w->ring, w->ring.rank, part)));
    }
    return ERR_OK;
}

/* ---- turns: block 0 is all of this rank's keys, each other one a part ---- */

static int turn_of(int block) { return (block + 1) / 2; }
static int half_of(int block) { return (block + 1) % 2; }
static int part_at(const KeyWalk *w, int block) { return part_of(w, owner_at(w, turn_of(block)), half_of(block)); }

Err arrival_open(KeyWalk *w)
{
    w->ring = ring_of(w);
    w->blocks = w->ring.parts - 1;
    for (int i = 0; i < 2; i++)
        TRY(tensor_new(w->c->scratch, &w->held[i], w->ring.dtype, 2, ring_part_count(&w->ring)));
    return ring_pack(w, w->held[0]);
}

static Err end_turn(const KeyWalk *w, int turn)
{
    TRY(arrived(w));
    return w->a && turn > 0 ? add_turn(w, turn) : ERR_OK;
}

static Err begin_turn(KeyWalk *w, int turn)
{
    if (turn > 0) TRY(end_turn(w, turn - 1));
    return post(w, turn);
}

Err arrival_next(KeyWalk *w, int block)
{
    const int turn = turn_of(block);
    if (block == 0 || half_of(block) == 0) TRY(begin_turn(w, turn));
    if (turn > 0) ring_put(w, part_at(w, block), w->held[turn % 2], half_of(block));
    for (int i = block + 1; i < w->blocks; i++) w->at.more |= ring_sees(&w->ring, w->ring.rank, part_at(w, i));
    return ERR_OK;
}

Err arrival_give(KeyWalk *w)
{
    const int i = half_of(w->block), turn = turn_of(w->block);
    const Tensor dk = turn ? share_half(w, i, 0) : w->a->dk, dv = turn ? share_half(w, i, 1) : w->a->dv;
    attention_bwd_args a = keys_bwd_args(w, dk, dv);
    return w->at.seen ? op_attention_bwd(w->c->s, &a) : ERR_OK;
}

Err arrival_finish(KeyWalk *w)
{
    const int turns = ranks_of(w);
    TRY(begin_turn(w, turns));
    TRY(arrived(w));
    return add_to_own(w);
}
