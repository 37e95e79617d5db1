/*
 * Attention of shared sequences (context.c) over keys that come round a ring of ranks, in the order of arrival: where
 * the bits of other layouts are not promised (with the order of positions: context_ring.c). A block is both parts of a
 * rank:
 *
 *   turn                 0      1      2      3        cp = 4
 *   rank 1 works on      own    0's    3's    2's      each came from rank 0 during the turn before, and goes on to 2
 *
 * A rank waits for nobody before its own block is done, and each block travels to a neighbour only, while the one
 * before it is worked on. A part goes on as long as a rank ahead sees some of it, by causality and window. What the
 * turns find is merged by the running maximum and sum of each query's row (ops.def, attention_fwd).
 *
 * Backward: the same turns. The gradients of a part follow it a turn later: a rank adds its share to the sum that came
 * from the rank before, and the last one that has the block hands the sum to its owner, who adds its own.
 *
 *   during turn t   comes        block of rank - t - 1       the sum for the block of rank - t: of the ranks before
 *                   goes on      block of rank - t           the sum for the block of rank - t + 1, this rank's too
 *
 * Room: two blocks of keys and values; in backward three of gradients in fp32 (a sum that came, the share, a sum that
 * goes on), and in 16 bits one more for the share as the op writes it. The order is that of the ring, so a repeat has
 * the same bits. Sums that several turns form are in fp32, and rounded once.
 */
#include "layer/ring.h"

typedef struct {
    Ring of;
    int ranks, next, last; /* next, last: neighbours */
    Tensor block[2];       /* [2 parts, count]: at work and on its way, in turns */
    /* in backward */
    Tensor pair;  /* f32 [2 parts, sum that came | share] */
    Tensor sums;  /* f32 [2 parts, count]: they go on */
    Tensor share; /* as the op writes it, [2 parts, count]; absent in fp32: in `pair` */
} Rotation;

/* ---- what travels ---- */

static int block_owner(const Rotation *w, int turn) { return (w->of.rank + 2 * w->ranks - turn) % w->ranks; }

static int part_of(const Rotation *w, int owner, int i) { return i ? w->of.parts - 1 - owner : owner; }

/* Does one of the ranks first .. end - 1 places behind the owner see some of its part? */
static bool seen_by(const Rotation *w, int part, int first, int end)
{
    const int owner = ring_owner(&w->of, part);
    for (int place = first; place < end; place++)
        if (ring_sees(&w->of, (owner + place) % w->ranks, part)) return true;
    return false;
}

/* From `place` to the next: keys that are seen farther on, sums to which a rank behind the owner has added. */
static bool keys_go(const Rotation *w, int part, int place) { return seen_by(w, part, place + 1, w->ranks); }
static bool sums_go(const Rotation *w, int part, int place) { return seen_by(w, part, 1, place + 1); }

static CommMessage message(bool send, int peer, Tensor part, MessageKind kind, int number)
{
    return (CommMessage){ .send = send,
                          .peer = peer,
                          .data = part.data,
                          .bytes = tensor_bytes(part),
                          .what = { .kind = (uint16_t)kind, .stage = (uint16_t)number } };
}

static int key_messages(const Rotation *w, int turn, CommMessage *m)
{
    int count = 0;
    for (int i = 0; i < 2; i++) {
        const int out = part_of(w, block_owner(w, turn), i), in = part_of(w, block_owner(w, turn + 1), i);
        const Tensor here = tensor_row_slice(w->block[turn % 2], i, 1);
        const Tensor there = tensor_row_slice(w->block[(turn + 1) % 2], i, 1);
        if (keys_go(w, out, turn)) m[count++] = message(true, w->next, here, MESSAGE_KEYS, out);
        if (keys_go(w, in, turn)) m[count++] = message(false, w->last, there, MESSAGE_KEYS, in);
    }
    return count;
}

/* Of the turn before. */
static int sum_messages(const Rotation *w, int turn, CommMessage *m)
{
    int count = 0;
    for (int i = 0; i < 2; i++) {
        const int out = part_of(w, block_owner(w, turn - 1), i), in = part_of(w, block_owner(w, turn), i);
        const Tensor here = tensor_row_slice(w->sums, i, 1), there = tensor_row_slice(w->pair, 2 * i, 1);
        if (sums_go(w, out, turn - 1)) m[count++] = message(true, w->next, here, MESSAGE_KEY_SUMS, out);
        if (sums_go(w, in, turn - 1)) m[count++] = message(false, w->last, there, MESSAGE_KEY_SUMS, in);
    }
    return count;
}

/* What travels during a turn. *moving: wait for it at its end. */
static Err post(Ctx *c, const Rotation *w, int turn, bool *moving)
{
    CommMessage m[8];
    int count = turn < w->ranks - 1 ? key_messages(w, turn, m) : 0;
    if (w->sums.data && turn > 1) count += sum_messages(w, turn, m + count);
    *moving = count > 0;
    return count ? comm_exchange(w->of.group, c->s, m, count, &w->of.group->pending) : ERR_OK;
}

static Err arrived(Ctx *c, const Rotation *w, bool moving)
{
    return moving ? stream_wait(c->s, &w->of.group->pending) : ERR_OK;
}

/* For the keys and values k and v of this rank. */
static Err rotation_open(Ctx *c, Rotation *w, Comm *group, int64_t window, Tensor k, Tensor v)
{
    const int n = group->size;
    *w = (Rotation){ .of = ring_of(group, k, v, window), .ranks = n };
    w->next = (group->rank + 1) % n;
    w->last = (group->rank + n - 1) % n;
    for (int i = 0; i < 2; i++)
        TRY(tensor_new(c->scratch, &w->block[i], k.dtype, 2, ring_part_count(&w->of)));
    return ring_pack(c, &w->of, k, v, w->block[0]);
}

/* Part i of the block that is at work in a turn. */
static RingPart part_at_work(const Rotation *w, int turn, int i)
{
    const int part = part_of(w, block_owner(w, turn), i);
    return (RingPart){ .k = ring_half(&w->of, w->block[turn % 2], i, 0),
                       .v = ring_half(&w->of, w->block[turn % 2], i, 1),
                       .span = ring_span(&w->of, part),
                       .seen = ring_sees(&w->of, w->of.rank, part) };
}

/* ---- forward ---- */

/* Parts of others that this rank sees. */
static int parts_to_come(const Rotation *w)
{
    int count = 0;
    for (int turn = 1; turn < w->ranks; turn++)
        count += part_at_work(w, turn, 0).seen + part_at_work(w, turn, 1).seen;
    return count;
}

/* The block that is at work in a turn after the first; to_come: parts that are left. */
static Err attend_block(Ctx *c, const Rotation *w, int turn, attention_fwd_args a, int *to_come)
{
    for (int i = 0; i < 2; i++) {
        const RingPart part = part_at_work(w, turn, i);
        if (!part.seen) continue;
        a.k = part.k;
        a.v = part.v;
        a.k_span = part.span;
        a.resumed = true;
        a.unfinished = --*to_come > 0;
        TRY(op_attention_fwd(c->s, &a));
    }
    return ERR_OK;
}

Err context_rotate(Ctx *c, Comm *group, attention_fwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor o = a.o;
    Rotation w;
    bool moving;
    TRY(rotation_open(c, &w, group, a.window, a.k, a.v));
    TRY(several_calls(c, &a));
    int to_come = parts_to_come(&w);
    TRY(post(c, &w, 0, &moving));
    a.unfinished = to_come > 0;
    TRY(op_attention_fwd(c->s, &a));
    TRY(arrived(c, &w, moving));
    for (int turn = 1; turn < w.ranks; turn++) {
        TRY(post(c, &w, turn, &moving));
        TRY(attend_block(c, &w, turn, a, &to_come));
        TRY(arrived(c, &w, moving));
    }
    TRY(round_sum(c, o, a.o));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- backward ---- */

static Err sums_open(Ctx *c, Rotation *w)
{
    const int64_t count = ring_part_count(&w->of);
    TRY(tensor_new(c->scratch, &w->pair, F32, 4, count));
    TRY(tensor_new(c->scratch, &w->sums, F32, 2, count));
    if (w->of.dtype == F32) return ERR_OK;
    return tensor_new(c->scratch, &w->share, w->of.dtype, 2, count);
}

/* Where the op writes this rank's share of dk (0) or dv (1) of part i. */
static Tensor share_half(const Rotation *w, int i, int half)
{
    return w->share.data ? ring_half(&w->of, w->share, i, half) : ring_half(&w->of, w->pair, 2 * i + 1, half);
}

/* sums of part i = what came + this rank's share; of only one of them if the other is nothing. */
static Err add_share(Ctx *c, const Rotation *w, int i, bool came, bool share)
{
    const Tensor sum = tensor_row_slice(w->sums, i, 1), both = tensor_row_slice(w->pair, 2 * i, 2);
    const int64_t columns = w->of.half[0][3] + w->of.half[1][3], rows = tensor_count(sum) / columns;
    if (share && w->share.data)
        TRY(cast_values(c, tensor_row_slice(both, 1, 1), tensor_row_slice(w->share, i, 1)));
    if (came && share)
        return op(c->s, sum_parts, .y = tensor_reshape(sum, rows, columns),
                  .x = tensor_reshape(both, 2 * rows, columns), .parts = 2);
    if (!came && !share) return ERR_OK;
    return device_copy(c->s, sum.data, tensor_row_slice(both, share, 1).data, tensor_bytes(sum));
}

static Err block_backward(Ctx *c, const Rotation *w, int turn, attention_bwd_args a)
{
    for (int i = 0; i < 2; i++) {
        const RingPart part = part_at_work(w, turn, i);
        if (!part.seen) continue;
        a.k = part.k;
        a.v = part.v;
        a.dk = share_half(w, i, 0);
        a.dv = share_half(w, i, 1);
        a.k_span = part.span;
        a.resumed = true;
        TRY(op_attention_bwd(c->s, &a));
    }
    return ERR_OK;
}

/* dk and dv, this rank's share for its own keys, and what came of the others. */
static Err add_to_own(Ctx *c, const Rotation *w, Tensor dk, Tensor dv)
{
    const Tensor own[2] = { dk, dv };
    for (int i = 0; i < 2; i++) {
        if (!sums_go(w, part_of(w, w->of.rank, i), w->ranks - 1)) continue;
        for (int half = 0; half < 2; half++)
            TRY(context_move_part(c, own[half], share_half(w, i, half), i, false));
        TRY(add_share(c, w, i, true, true));
        if (w->share.data)
            TRY(cast_values(c, tensor_row_slice(w->share, i, 1), tensor_row_slice(w->sums, i, 1)));
        for (int half = 0; half < 2; half++)
            TRY(context_move_part(c, own[half],
                                  ring_half(&w->of, w->share.data ? w->share : w->sums, i, half), i, true));
    }
    return ERR_OK;
}

/* Of a turn after the first, when the sums of the ranks before are there. */
static Err add_turn(Ctx *c, const Rotation *w, int turn)
{
    for (int i = 0; i < 2; i++)
        TRY(add_share(c, w, i, sums_go(w, part_of(w, block_owner(w, turn), i), turn - 1),
                      part_at_work(w, turn, i).seen));
    return ERR_OK;
}

Err context_rotate_bwd(Ctx *c, Comm *group, attention_bwd_args a)
{
    ArenaMark mark = arena_mark(c->scratch);
    const Tensor dq = a.dq;
    Rotation w;
    bool moving;
    a.chunk = a.q.dim[2] / a.dk.dim[2];
    TRY(wide_sum(c, dq, &a.dq));
    TRY(rotation_open(c, &w, group, a.window, a.k, a.v));
    TRY(sums_open(c, &w));
    TRY(post(c, &w, 0, &moving));
    TRY(op_attention_bwd(c->s, &a));
    TRY(arrived(c, &w, moving));
    for (int turn = 1; turn < w.ranks; turn++) {
        TRY(post(c, &w, turn, &moving));
        TRY(block_backward(c, &w, turn, a));
        TRY(arrived(c, &w, moving));
        TRY(add_turn(c, &w, turn));
    }
    TRY(post(c, &w, w.ranks, &moving));
    TRY(arrived(c, &w, moving));
    TRY(add_to_own(c, &w, a.dk, a.dv));
    TRY(round_sum(c, dq, a.dq));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
