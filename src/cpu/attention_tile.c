/* The parts of attention.h that copy: rows into tiles of queries and runs of keys, weights into pairs. */
#include <string.h>

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/gemm_kernel.h"

/* Spans as rows, sorted by position; an empty one last. */
static Err sort_spans(const char *what, Spans s, int64_t rows, AttnSpan out[2])
{
    out[0] = (AttnSpan){ s.first[0], s.count[0], 0 };
    out[1] = (AttnSpan){ s.first[1], s.count[1], s.count[0] };
    if (s.count[0] < 0 || s.count[1] < 0 || s.count[0] + s.count[1] != rows)
        return err_set(ERR_SHAPE, "attention: spans of %s hold %lld + %lld positions, it has %lld rows", what,
                       (long long)s.count[0], (long long)s.count[1], (long long)rows);
    if (!out[0].count || (out[1].count && out[1].first < out[0].first)) {
        AttnSpan first = out[1];
        out[1] = out[0];
        out[0] = first;
    }
    bool apart = !out[1].count || out[0].first + out[0].count <= out[1].first;
    AttnSpan last = out[1].count ? out[1] : out[0];
    if (!apart || (rows && out[0].first < 0) || last.first + last.count > INT32_MAX)
        return err_set(ERR_SHAPE, "attention: spans of %s overlap or leave the range of positions", what);
    return ERR_OK;
}

static bool computes_in(DType t) { return t == F32 || t == BF16; }

/* Units of rows of n numbers. */
static void row_units(const Attn *a, int64_t n, int64_t *units, int64_t *row)
{
    *units = form_units(a->form, n);
    *row = a->paired ? attn_lanes(*units) : attn_lanes(n);
}

Err CPU(attn_open)(Attn *a, const Device *dev, Tensor result)
{
    int64_t H = a->q.dim[2], K = a->k.dim[2];
    if (!computes_in(a->q.dtype) || !computes_in(result.dtype))
        return err_set(ERR_CONFIG, "attention on the cpu computes in f32 or bf16, not %s",
                       dtype_name(computes_in(a->q.dtype) ? result.dtype : a->q.dtype));
    if (K < 1 || H % K)
        return err_set(ERR_SHAPE, "attention: %lld query heads on %lld key heads", (long long)H, (long long)K);
    if (a->block < 1) return err_set(ERR_SHAPE, "attention: block is %lld", (long long)a->block);
    a->C = a->q.dim[3];
    a->width = attn_lanes(a->C);
    a->V = a->v.dim[3];
    a->v_width = attn_lanes(a->V);
    a->group = H / K;
    a->form = a->q.dtype == BF16 ? CPU(gemm_form)(dev) : FORM_F32;
    a->paired = form_pairs(a->form);
    row_units(a, a->C, &a->k_units, &a->k_row);
    row_units(a, a->V, &a->v_units, &a->v_row);
    TRY(sort_spans("q", a->q_spans, a->q.dim[1], a->q_span));
    return sort_spans("k", a->k_spans, a->k.dim[1], a->k_span);
}

int64_t CPU(attn_keys_before)(const Attn *a, int64_t position)
{
    int64_t n = 0;
    for (int s = 0; s < 2; s++) {
        int64_t in = position - a->k_span[s].first;
        n += in < 0 ? 0 : in < a->k_span[s].count ? in : a->k_span[s].count;
    }
    return n;
}

int64_t CPU(attn_key_row)(const Attn *a, int64_t index)
{
    int64_t head = a->k_span[0].count;
    return index < head ? a->k_span[0].row + index : a->k_span[1].row + index - head;
}

/* Rows of one head lie far apart, where the processor does not look ahead by itself. */
enum { ROWS_AHEAD = 8 };

static void fetch_row(Tensor x, int64_t b, int64_t row, int64_t head)
{
    const int64_t bytes = x.dim[3] * (x.dtype == BF16 ? 2 : 4), line = 64;
    const char *p = attn_row(x, b, row, head);
    for (int64_t i = 0; i < bytes; i += line) __builtin_prefetch(p + i);
}

static void copy_padded(float *out, const float *in, int64_t n, int64_t width)
{
    int64_t i = 0;
    for (; i + VEC <= n; i += VEC) vf_store(out + i, vf_load(in + i));
    if (i < width) vf_store(out + i, vf_load_n(in + i, n - i));
}

static void widen_padded(float *out, const uint16_t *in, int64_t n)
{
    for (int64_t i = 0; i < n; i += VEC) vf_store(out + i, load_bf16(in + i, n - i));
}

/* A row's units, with 0 up to whole vectors where a unit is one number. */
static inline void lay_row(const Attn *a, float *out, const void *row, int64_t n)
{
    if (a->form == FORM_F32) copy_padded(out, row, n, attn_lanes(n));
    else if (a->form == FORM_WIDE) widen_padded(out, row, n);
    else narrow_row(a->form, out, row, n);
}

/* Units of pairs of two rows' numbers, in one line or in two; 0 up to whole vectors. second NULL: 0. */
static void lay_pair(const Attn *a, float *out, const uint16_t *first, const uint16_t *second, int64_t n)
{
    const int64_t width = attn_lanes(n);
    for (int64_t i = 0; i < n; i += VEC) {
        const vf x = load_bf16(first + i, n - i), y = second ? load_bf16(second + i, n - i) : vf_zero();
        if (a->form == FORM_PAIRS) {
            vf_store(out + i, narrow_pairs(x, y));
            continue;
        }
        vf_store(out + i, vf_flush(y));
        vf_store(out + width + i, vf_flush(x));
    }
}

/* Begin of the lines that hold slot `at`, an even one. */
static float *line_at(const Attn *a, float *lines, int64_t at, int64_t width)
{
    return lines ? lines + form_units(a->form, at) * width : NULL;
}

static int64_t key_position(const Attn *a, int64_t index)
{
    return spans_position(a->k_spans, CPU(attn_key_row)(a, index));
}

/* Are keys number i and i + 1 a pair? */
static bool keys_pair(const Attn *a, int64_t i)
{
    const int64_t position = key_position(a, i);
    return position % 2 == 0 && key_position(a, i + 1) == position + 1 && (position + 1) % a->block;
}

static void take_key(const Attn *a, AttnKeys *keys, int64_t b, int64_t head, int64_t i, int64_t i1)
{
    const int64_t row = CPU(attn_key_row)(a, i), slot = keys->n++;
    const int64_t ahead = i + ROWS_AHEAD < i1 ? CPU(attn_key_row)(a, i + ROWS_AHEAD) : row;
    fetch_row(a->k, b, ahead, head);
    fetch_row(a->v, b, ahead, head);
    keys->position[slot] = keys->seen[slot] = (int32_t)spans_position(a->k_spans, row);
    if (keys->k) lay_row(a, keys->k + slot * a->k_row, attn_row(a->k, b, row, head), a->C);
    if (keys->v) lay_row(a, keys->v + slot * a->v_row, attn_row(a->v, b, row, head), a->V);
}

/* The second slot of a pair, empty. */
static void leave_slot(const Attn *a, AttnKeys *keys)
{
    const int64_t slot = keys->n++;
    keys->position[slot] = keys->position[slot - 1];
    keys->seen[slot] = EMPTY_SLOT;
    keys->empty = true;
    if (keys->k) memset(keys->k + slot * a->k_row, 0, (size_t)a->k_row * sizeof(float));
    if (keys->v) memset(keys->v + slot * a->v_row, 0, (size_t)a->v_row * sizeof(float));
}

/* Lines of the last two slots, of key number i and, if `two`, the next. */
static void take_lines(const Attn *a, AttnKeys *keys, int64_t b, int64_t head, int64_t i, bool two)
{
    const int64_t row = CPU(attn_key_row)(a, i), next = two ? CPU(attn_key_row)(a, i + 1) : row;
    float *k = line_at(a, keys->k_lines, keys->n - 2, a->width),
          *v = line_at(a, keys->v_lines, keys->n - 2, a->v_width);
    if (k) lay_pair(a, k, attn_row(a->k, b, row, head), two ? attn_row(a->k, b, next, head) : NULL, a->C);
    if (v) lay_pair(a, v, attn_row(a->v, b, row, head), two ? attn_row(a->v, b, next, head) : NULL, a->V);
}

int64_t CPU(attn_keys)(const Attn *a, AttnKeys *keys, int64_t b, int64_t head, int64_t i0, int64_t i1, int64_t slots)
{
    int64_t i = i0;
    keys->n = 0;
    keys->empty = false;
    while (i < i1 && keys->n < slots) {
        const bool two = a->paired && i + 1 < i1 && keys_pair(a, i);
        const int64_t first = i;
        take_key(a, keys, b, head, i++, i1);
        if (two) take_key(a, keys, b, head, i++, i1);
        else if (a->paired) leave_slot(a, keys);
        if (a->paired) take_lines(a, keys, b, head, first, two);
    }
    return i;
}

void CPU(attn_tile)(const Attn *a, AttnTile *t, int64_t b, int64_t head, int64_t row, int64_t n)
{
    *t = (AttnTile){ .b = b, .head = head, .row = row, .n = n, .first = spans_position(a->q_spans, row) };
    const int32_t *doc = a->doc.data;
    t->low_min = INT32_MAX;
    for (int64_t i = 0; i < ATTN_QUERIES; i++) {
        int64_t low = doc && i < n ? doc[b * a->doc.ld + row + i] : 0;
        if (a->window > 0 && low < t->first + i - a->window + 1) low = t->first + i - a->window + 1;
        if (low < 0) low = 0;
        t->low[i] = i < n ? (int32_t)low : -1;
        if (i >= n) continue;
        if (low < t->low_min) t->low_min = low;
        if (low > t->low_max) t->low_max = low;
    }
}

/* First j with position[j] >= p. */
static int64_t lower_bound(const AttnKeys *keys, int64_t p)
{
    int64_t low = 0, high = keys->n;
    while (low < high) {
        int64_t mid = (low + high) / 2;
        if (keys->position[mid] < p) low = mid + 1;
        else high = mid;
    }
    return low;
}

AttnKeys CPU(attn_seen)(const Attn *a, const AttnTile *t, const AttnKeys *keys)
{
    int64_t j0 = lower_bound(keys, t->low_min), j1 = lower_bound(keys, t->first + t->n);
    if (a->paired) j0 -= j0 % 2, j1 += j1 % 2;
    return (AttnKeys){ .n = j1 > j0 ? j1 - j0 : 0,
                       .k = keys->k ? keys->k + j0 * a->k_row : NULL,
                       .v = keys->v ? keys->v + j0 * a->v_row : NULL,
                       .k_lines = line_at(a, keys->k_lines, j0, a->width),
                       .v_lines = line_at(a, keys->v_lines, j0, a->v_width),
                       .position = keys->position + j0,
                       .seen = keys->seen + j0,
                       .empty = keys->empty };
}

void CPU(attn_rows)(const Attn *a, float *lines, float *across, Tensor x, const AttnTile *t, bool wants_lines)
{
    int64_t lanes = attn_lanes(t->n), n = x.dim[3], width = attn_lanes(n), units, row;
    row_units(a, n, &units, &row);
    for (int64_t i = 0; i < t->n; i++) { /* at first `lines` has the rows that are turned */
        fetch_row(x, t->b, t->row + (i + ROWS_AHEAD < t->n ? i + ROWS_AHEAD : i), t->head);
        lay_row(a, lines + i * row, attn_row(x, t->b, t->row + i, t->head), n);
    }
    memset(lines + t->n * row, 0, (size_t)((lanes - t->n) * row) * sizeof(float));
    CPU(transpose)(across, ATTN_QUERIES, lines, row, lanes, units);
    for (int64_t i = 0; a->paired && wants_lines && i < t->n; i += 2)
        lay_pair(a, line_at(a, lines, i, width), attn_row(x, t->b, t->row + i, t->head),
                 i + 1 < t->n ? attn_row(x, t->b, t->row + i + 1, t->head) : NULL, n);
}

/* ---- weights ---- */

/* To bf16 as a product with pairs reads it. */
static vf rounded(vf x)
{
    uint16_t narrow[VEC];
    vf_store_bf16(narrow, vf_flush(x));
    return vf_load_bf16(narrow);
}

void CPU(attn_keys_paired)(const Attn *a, float *to, const float *from, int64_t n)
{
    if (a->form == FORM_PAIRS) return CPU(pairs_of_rows)(to, from, ATTN_QUERIES, n);
    for (int64_t j = 0; j < n; j += 2, to += 2 * ATTN_QUERIES, from += 2 * ATTN_QUERIES) {
        const vf first = rounded(vf_load(from)), second = rounded(vf_load(from + ATTN_QUERIES));
        vf_store(to, second);
        vf_store(to + ATTN_QUERIES, first);
    }
}

void CPU(attn_queries_paired)(const Attn *a, float *rows, int64_t column, int64_t n)
{
    float x[VEC];
    if (a->form == FORM_PAIRS) return CPU(pairs_of_columns)(rows + column / 2, rows + column, ATTN_QUERIES, n);
    for (int64_t j = 0; j < n; j++, rows += ATTN_QUERIES) {
        vf_store(x, rounded(vf_load(rows + column)));
        for (int i = 0; i < VEC; i++) rows[column + i] = x[i ^ 1];
    }
}

Err CPU(attn_threads)(const Device *dev, int64_t items, int64_t bytes, int *out)
{
    int64_t n = dev->workspace_bytes / bytes;
    if (n < 1)
        return err_set(ERR_CONFIG, "attention needs %lld bytes of workspace, there are %lld", (long long)bytes,
                       (long long)dev->workspace_bytes),
               err_hint("a smaller attention block needs less");
    if (n > dev->threads) n = dev->threads;
    if (n > items) n = items;
    *out = n < 1 ? 1 : (int)n;
    return ERR_OK;
}
