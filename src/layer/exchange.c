/*
 * Parts of rows between the ranks of a group, all at once or band by band: for sums (sums.c) and for rows that pass
 * beside products (bands.c).
 */
#include "layer/internal.h"

/* The rank `turn` bands ahead and `k` places further on than this one, in rings of bands and of places. Both may be
 * negative, down to a whole ring. */
static int peer(const Comm *g, int bands, int turn, int k)
{
    const int each = g->size / bands, band = g->rank / each + turn, place = g->rank % each + k;
    return (band + bands) % bands * each + (place + each) % each;
}

Tensor equal_part(Tensor rows, int ranks, int i)
{
    const int64_t first = rows.dim[0] * i / ranks, end = rows.dim[0] * (i + 1) / ranks;
    return tensor_row_slice(rows, first, end - first);
}

/* scatter: the part of rows for rank `to`, which belongs to `from`'s place among its `parts`; else this rank's part of
 * rows, for the same part of `to`'s. */
static void put_messages(const PartMoves *p, int to, int from, CommMessage m[2])
{
    const Comm *g = p->group;
    const bool scatter = p->parts.data;
    const Tensor out = equal_part(p->rows, g->size, scatter ? to : g->rank);
    const Tensor in = equal_part(scatter ? p->parts : p->rows, g->size, from);
    const MessageLabel what = { .kind = p->kind };
    m[0] = (CommMessage){ .send = true, .peer = to, .data = out.data, .bytes = tensor_bytes(out), .what = what };
    m[1] = (CommMessage){ .peer = from, .data = in.data, .bytes = tensor_bytes(in), .what = what };
}

Err exchange_band(Ctx *c, const PartMoves *p, int turn, Event *done)
{
    const int each = p->group->size / p->bands;
    CommMessage m[COMM_MESSAGES_MAX];
    int count = 0;
    for (int k = turn ? 0 : 1; k < each; k++) {
        const bool last = k == each - 1;
        const int ahead = peer(p->group, p->bands, turn, k), behind = peer(p->group, p->bands, -turn, -k);
        if (p->parts.data) put_messages(p, ahead, behind, &m[count]);
        else put_messages(p, behind, ahead, &m[count]);
        count += 2;
        if (!last && count + 2 <= COMM_MESSAGES_MAX) continue;
        TRY(comm_exchange(p->group, c->s, m, count, last ? done : NULL));
        count = 0;
    }
    return ERR_OK;
}
