/*
 * Tokens that pass the experts in pieces, in a step that is done again because a rank's experts had not enough room in
 * it (Mode.retry_in_pieces). A piece is whole leaves of tokens, as many as fit wherever their rows go. Only what the
 * experts gave is kept of a piece, and backward makes the rest again. In any other step all tokens are one piece.
 */
#include "base/int64.h"
#include "layer/moe.h"

int64_t moe_run_tokens(const Ctx *c) { return c->canon.leaf_tokens; }

int64_t moe_piece_tokens(const Moe *m, const Ctx *c)
{
    return c->mode.retry_in_pieces ? moe_limits_of(m, c).piece : ctx_rows(c);
}

int64_t moe_even_rows(const Moe *m, const Ctx *c)
{
    return min64(moe_piece_tokens(m, c) * m->spec->topk * c->world->grid.etp, moe_limits_of(m, c).owned);
}

/* Pieces have places of their own, which no capacity makes smaller. */
int64_t moe_sent_rows(const Moe *m, const Ctx *c)
{
    return c->mode.retry_in_pieces ? ctx_rows(c) * m->spec->topk : moe_limits_of(m, c).sent;
}

MoeRows moe_piece_at(const Moe *m, const Ctx *c, const MoeRows *t, int64_t first)
{
    const int64_t K = m->spec->topk, per = moe_piece_tokens(m, c), n = min64(per, t->index_NK.dim[0] - first),
                  run = moe_run_tokens(c), lists = m->spec->experts * ((n + run - 1) / run);
    MoeRows p = *t;
    if (!c->mode.retry_in_pieces) return p;
    p.index_NK = tensor_row_slice(t->index_NK, first, n);
    p.weight_NK = tensor_row_slice(t->weight_NK, first, n);
    p.row_NK = tensor_row_slice(t->row_NK, first, n);
    p.choice_P = tensor_row_slice(t->choice_P, first * K, n * K);
    p.out_PL = tensor_row_slice(t->out_PL, first * K, n * K);
    p.offset = tensor_row_slice(t->offset, m->spec->experts * (first / run) + first / per, lists + 1);
    return p;
}

Err moe_learn_piece(const Moe *m, Ctx *c, MoeRows *p)
{
    const Dispatcher *d = moe_dispatcher(m, c);
    if (c->mode.retry_in_pieces) {
        p->owned = p->offset;
        if (d->remote) TRY(tensor_new(c->scratch, &p->owned, I64, c->world->grid.etp * (p->offset.dim[0] - 1) + 1));
        if (d->learned) TRY(tensor_new(c->scratch, &p->learned, I32, d->learned(m, c)));
    }
    TRY(d->learn(m, c, p));
    if (!d->remote) return ERR_OK;
    p->known = c->moves.known;
    TRY(device_mark(c->s, p->known));
    const bool turn = c->world->tp_ep.reads_lengths && c->moves.other_half; /* it has work for the device meanwhile */
    return turn ? c->moves.other_half(c->moves.pair) : ERR_OK;
}
