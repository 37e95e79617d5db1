/* The parts of attention.h that copy: rows into tiles of queries and runs of keys. */
#include <string.h>

#include "cpu/attention.h"
#include "cpu/gemm.h"

/* Spans as rows, sorted by position; an empty one last. */
static Err sort_spans(const char *what, Spans s, int64_t rows, AttnSpan out[2])
{
    out[0] = (AttnSpan){ s.first[0], s.count[0], 0 };
    out[1] = (AttnSpan){ s.first[1], s.count[1], s.count[0] };
    if (s.count[0] < 0 || s.count[1] < 0 || s.count[0] + s.count[1] != rows)
        return err_set(ERR_SHAPE, "attention: spans of %s hold '%lld' + '%lld' positions, it has '%lld' rows",
                       what, (long long)s.count[0], (long long)s.count[1], (long long)rows);
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

Err CPU(attn_open)(Attn *a, Tensor result)
{
    int64_t H = a->q.dim[2], K = a->k.dim[2];
    if (a->q.dtype != F32 || result.dtype != F32)
        return err_set(ERR_CONFIG, "attention on the cpu computes in f32, not %s",
                       dtype_name(a->q.dtype != F32 ? a->q.dtype : result.dtype));
    if (K < 1 || H % K)
        return err_set(ERR_SHAPE, "attention: '%lld' query heads on '%lld' key heads", (long long)H,
                       (long long)K);
    if (a->block < 1) return err_set(ERR_SHAPE, "attention: block is '%lld'", (long long)a->block);
    a->C = a->q.dim[3];
    a->width = attn_lanes(a->C);
    a->group = H / K;
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

static void fetch_row(const float *row, int64_t n)
{
    for (int64_t i = 0; i < n; i += VEC) __builtin_prefetch(row + i);
}

static void copy_padded(float *out, const float *in, int64_t n, int64_t width)
{
    int64_t i = 0;
    for (; i + VEC <= n; i += VEC) vf_store(out + i, vf_load(in + i));
    if (i < width) vf_store(out + i, vf_load_n(in + i, n - i));
}

void CPU(attn_keys)(const Attn *a, AttnKeys *keys, int64_t b, int64_t head, int64_t i0, int64_t i1)
{
    keys->n = i1 - i0;
    for (int64_t j = 0; j < keys->n; j++) {
        int64_t row = CPU(attn_key_row)(a, i0 + j);
        int64_t ahead = CPU(attn_key_row)(a, j + ROWS_AHEAD < keys->n ? i0 + j + ROWS_AHEAD : i0 + j);
        fetch_row(attn_row(a->k, b, ahead, head), a->C);
        fetch_row(attn_row(a->v, b, ahead, head), a->C);
        keys->position[j] = (int32_t)spans_position(a->k_spans, row);
        copy_padded(keys->k + j * a->width, attn_row(a->k, b, row, head), a->C, a->width);
        copy_padded(keys->v + j * a->width, attn_row(a->v, b, row, head), a->C, a->width);
    }
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
    return (AttnKeys){ .n = j1 > j0 ? j1 - j0 : 0,
                       .k = keys->k + j0 * a->width,
                       .v = keys->v + j0 * a->width,
                       .position = keys->position + j0 };
}

void CPU(attn_rows)(const Attn *a, float *dense, float *across, Tensor x, const AttnTile *t)
{
    int64_t lanes = attn_lanes(t->n), width = a->width;
    for (int64_t i = 0; i < t->n; i++) {
        fetch_row(attn_row(x, t->b, t->row + (i + ROWS_AHEAD < t->n ? i + ROWS_AHEAD : i), t->head), a->C);
        copy_padded(dense + i * width, attn_row(x, t->b, t->row + i, t->head), a->C, width);
    }
    memset(dense + t->n * width, 0, (size_t)((lanes - t->n) * width) * sizeof(float));
    CPU(transpose)(across, ATTN_QUERIES, dense, width, lanes, a->C);
}

Err CPU(attn_threads)(const Device *dev, int64_t items, int64_t bytes, int *out)
{
    int64_t n = dev->workspace_bytes / bytes;
    if (n < 1)
        return err_set(ERR_CONFIG, "attention needs '%lld' bytes of workspace, there are '%lld'",
                       (long long)bytes, (long long)dev->workspace_bytes),
               err_hint("a smaller attention block needs less");
    if (n > dev->threads) n = dev->threads;
    if (n > items) n = items;
    *out = n < 1 ? 1 : (int)n;
    return ERR_OK;
}
