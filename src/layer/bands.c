/*
 * Rows that pass between ranks beside the products that read or make them (parallel.overlap_tp). The ranks of a group
 * are cut into bands of neighbours, and the N rows with them: a band's rows are those of its ranks, one run. A rank
 * goes through the bands in turn, its own first or last, so that in each turn every rank sends and receives as much.
 * Of 4 ranks in 2 bands, rank 0:
 *
 *   rows that come in                             rows that go out, to be summed
 *   exchange   of 1 | of 2, 3  |                  product    of 2, 3 | of 0, 1   |
 *   product         | of 0, 1  | of 2, 3          exchange           | to 2, 3   | to 1
 *
 * A product of some rows sums each of them as a product of all does (device/ops.def), so bands change no bit where that
 * order is fixed. What travels is the same, and so is the memory that it takes.
 */
#include "layer/internal.h"

/* ---- who meets whom ---- */

static int bands_of(const Comm *g, int wanted) { return g->size > 1 && wanted > 1 ? wanted : 1; }

/* Rows of the band that is `turn` ahead. */
static RowRun band_rows(const Comm *g, int bands, int turn, int64_t rows)
{
    const int each = g->size / bands, first = (g->rank / each + turn) % bands * each;
    const int64_t begin = rows * first / g->size, end = rows * (first + each) / g->size;
    return (RowRun){ begin, end - begin };
}

/* Is there another rank in the band? */
static bool meets(const Comm *g, int bands, int turn) { return turn || g->size > bands; }

/* ---- rows in ---- */

Err rows_in_begin(Ctx *c, Tensor x, RowBands *b)
{
    Comm *sp = &c->world->sp;
    *b = (RowBands){ .count = bands_of(sp, c->bands) };
    if (b->count == 1) return gather_rows_begin(c, x, &b->rows);
    TRY(tensor_new(c->scratch, &b->rows, x.dtype, x.dim[0] * sp->size, x.dim[1]));
    TRY(device_copy(c->s, equal_part(b->rows, sp->size, sp->rank).data, x.data, tensor_bytes(x)));
    const PartMoves gather = { .group = sp, .bands = b->count, .rows = b->rows, .kind = MESSAGE_ROWS };
    c->s->dev->beside++;
    for (int turn = 0; turn < b->count; turn++) TRY(exchange_band(c, &gather, turn, &sp->beside[turn]));
    return ERR_OK;
}

Err rows_in_band(Ctx *c, const RowBands *b, int turn, RowRun *run)
{
    Comm *sp = &c->world->sp;
    *run = band_rows(sp, b->count, turn, b->rows.dim[0]);
    if (b->count == 1) return gather_rows_end(c);
    if (turn == b->count - 1) c->s->dev->beside--;
    return meets(sp, b->count, turn) ? stream_wait(c->s, &sp->beside[turn]) : ERR_OK;
}

/* ---- rows out ---- */

Err rows_out_begin(Ctx *c, Tensor y, int bands, RowBands *b)
{
    const Comm *g = rows_group(c);
    *b = (RowBands){ .count = bands_of(g, bands), .sum.y = y };
    TRY(product_alloc(c, y, &b->rows));
    if (b->count == 1) return ERR_OK;
    const Tensor own = equal_part(b->rows, g->size, g->rank);
    return tensor_new(c->scratch, &b->sum.parts, b->rows.dtype, g->size * own.dim[0], own.dim[1]);
}

static int out_turn(const RowBands *b, int turn) { return (turn + 1) % b->count; }

RowRun rows_out_band(const Ctx *c, const RowBands *b, int turn)
{
    return band_rows(rows_group(c), b->count, out_turn(b, turn), b->rows.dim[0]);
}

static Err keep_own_part(Ctx *c, const Comm *g, const RowBands *b)
{
    const Tensor own = equal_part(b->rows, g->size, g->rank);
    return device_copy(c->s, equal_part(b->sum.parts, g->size, g->rank).data, own.data, tensor_bytes(own));
}

Err rows_out_send(Ctx *c, RowBands *b, int turn)
{
    Comm *g = rows_group(c);
    const int ahead = out_turn(b, turn);
    if (b->count == 1) return reduce_rows_begin(c, b->rows, b->sum.y, &b->sum);
    if (!ahead) TRY(keep_own_part(c, g, b));
    if (!meets(g, b->count, ahead)) return ERR_OK;
    const PartMoves scatter = {
        .group = g, .bands = b->count, .rows = b->rows, .parts = b->sum.parts, .kind = MESSAGE_SUM
    };
    if (!turn) c->s->dev->beside++;
    b->sum.done = &g->beside[turn]; /* the last of all is done when the others are */
    return exchange_band(c, &scatter, ahead, b->sum.done);
}
