/*
 * A local range is first split into rectangles of whole-width or single-row form (shard_range), then each
 * rectangle into its (section, chunk) cells (put_cells): inside a cell neighbouring local rows are
 * neighbouring plain rows, so a cell is one box. Sections are the outer loop: that is plain order.
 *
 * param_plain_row() in param.c is the same mapping for a single row, written independently; test_shard holds
 * one to the other.
 */
#include "param/shard.h"

#include "base/int64.h"

Param shard_param(const Param *p, const ParamPlace *place)
{
    Param q = *p;
    const int64_t whole[2] = { p->spec.padded_rows / p->spec.stack, p->spec.shape[1] };
    ASSERT(p->spec.stack % place->shards[p->spec.stack_cut] == 0);
    q.matrices = p->spec.stack / place->shards[p->spec.stack_cut];
    q.first_matrix = q.matrices * place->shard[p->spec.stack_cut];
    for (int d = 0; d < 2; d++) {
        const int shards = place->shards[p->spec.cut[d]], shard = place->shard[p->spec.cut[d]];
        ASSERT(whole[d] % shards == 0 && shard >= 0 && shard < shards);
        q.local[d] = whole[d] / shards;
        q.first[d] = q.local[d] * shard;
    }
    q.local[0] *= q.matrices;
    q.count = q.local[0] * q.local[1];
    return q;
}

bool shard_is_cut(const Param *p, Cut axis)
{
    return p->spec.cut[0] == axis || p->spec.cut[1] == axis || p->spec.stack_cut == axis;
}

bool shard_owner(const Param *p, const ParamPlace *place)
{
    const ParamGroup g = p->spec.group;
    if (place->copy[g] > 0 && place->zero_shards[g] == 1) return false;
    const Cut axis = g == PARAM_EXPERT ? CUT_ETP : CUT_TP;
    return place->shard[axis] == 0 || shard_is_cut(p, axis);
}

/* Local rows [row, end) and columns [col, col_end) of p. */
typedef struct {
    int64_t row, end, col, col_end;
} Rect;

typedef struct {
    ShardBox *out;
    int capacity, count;
} BoxList;

static int64_t matrix_rows(const Param *p) { return p->local[0] / p->matrices; }

/* Rows [row, end) of the interleaved order of local matrix m, which are its plain rows from `plain` on, as one box. */
static void put_box(BoxList *l, const Param *p, int64_t m, Rect r, int64_t plain)
{
    if (l->count++ >= l->capacity) return;
    plain += (p->first_matrix + m) * (p->spec.shape[0] / p->spec.stack);
    l->out[l->count - 1] = (ShardBox){
        .box = { { plain, p->first[1] + r.col }, { r.end - r.row, r.col_end - r.col } },
        .at = (m * matrix_rows(p) + r.row - p->first[0]) * p->local[1] + r.col,
        .ld = p->local[1],
    };
}

/* Rows [row, end) of local matrix m. */
static void put_matrix(BoxList *l, const Param *p, int64_t m, Rect r)
{
    const ParamSpec *s = &p->spec;
    const int64_t all = s->shape[0] / s->stack;
    int sections = s->section[0] ? PARAM_MAX_SECTIONS : 1;
    int64_t chunks = s->section[0] ? s->interleave : 1; /* without sections chunks lie in plain order */
    int64_t chunk_rows = all / chunks, section_start = 0, in_chunk = 0;
    r.row += p->first[0];
    r.end = min64(r.end + p->first[0], all); /* padding stands behind the last plain row */
    if (r.row >= r.end || r.col >= r.col_end) return;
    for (int i = 0; i < sections; i++) {
        int64_t rows = s->section[0] ? s->section[i] : all, part = rows / chunks;
        if (!part) continue;
        for (int64_t c = r.row / chunk_rows; c * chunk_rows < r.end; c++) {
            int64_t cell = c * chunk_rows + in_chunk;
            Rect in = { max64(r.row, cell), min64(r.end, cell + part), r.col, r.col_end };
            if (in.row < in.end) put_box(l, p, m, in, section_start + c * part + in.row - cell);
        }
        section_start += rows;
        in_chunk += part;
    }
}

static void put_cells(BoxList *l, const Param *p, Rect r)
{
    const int64_t rows = matrix_rows(p);
    for (int64_t m = r.row / rows; m * rows < r.end; m++) {
        const Rect in = { max64(r.row - m * rows, 0), min64(r.end - m * rows, rows), r.col, r.col_end };
        put_matrix(l, p, m, in);
    }
}

int shard_boxes(const Param *p, ShardBox *out, int capacity)
{
    BoxList l = { out, capacity, 0 };
    put_cells(&l, p, (Rect){ 0, p->local[0], 0, p->local[1] });
    return l.count;
}

int shard_range(const Param *p, int64_t first, int64_t count, ShardBox *out, int capacity)
{
    BoxList l = { out, capacity, 0 };
    int64_t width = p->local[1], end = first + count;
    ASSERT(first >= 0 && count >= 0 && first <= p->count - count);
    if (!count) return 0;
    int64_t row = first / width, last = end / width; /* `last`: the row that holds what is left over */
    if (row == last) {
        put_cells(&l, p, (Rect){ row, row + 1, first % width, end % width });
        return l.count;
    }
    if (first % width) {
        put_cells(&l, p, (Rect){ row, row + 1, first % width, width });
        row++;
    }
    put_cells(&l, p, (Rect){ row, last, 0, width });
    put_cells(&l, p, (Rect){ last, last + 1, 0, end % width });
    return l.count;
}

int shard_merge(const ShardBox *boxes, int count, Box *merged)
{
    if (!count) return 0;
    *merged = boxes[0].box;
    int n = 1;
    for (; n < count; n++) {
        const Box *b = &boxes[n].box;
        if (b->offset[0] != merged->offset[0] + merged->shape[0] || b->offset[1] != merged->offset[1] ||
            b->shape[1] != merged->shape[1])
            break;
        merged->shape[0] += b->shape[0];
    }
    return n;
}

Box shard_global(const Param *p) { return (Box){ { 0, 0 }, { p->spec.shape[0], p->spec.shape[1] } }; }

int64_t box_count(Box b) { return b.shape[0] * b.shape[1]; }

bool box_intersect(Box a, Box b, Box *out)
{
    Box x;
    for (int d = 0; d < 2; d++) {
        int64_t low = max64(a.offset[d], b.offset[d]);
        int64_t high = min64(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
        if (low >= high) return false;
        x.offset[d] = low;
        x.shape[d] = high - low;
    }
    *out = x;
    return true;
}

bool shard_clip(ShardBox s, Box within, ShardBox *out)
{
    Box x;
    if (!box_intersect(s.box, within, &x)) return false;
    *out = (ShardBox){
        .box = x,
        .at = s.at + (x.offset[0] - s.box.offset[0]) * s.ld + x.offset[1] - s.box.offset[1],
        .ld = s.ld,
    };
    return true;
}
