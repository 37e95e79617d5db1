/*
 * See theirs.h. A tensor is seen as rows of its last dim, some of which are a job; what of our parameter lies there is
 * a box of each part.
 */
#include "hf/theirs.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/half.h"
#include "base/int64.h"

enum { JOB_FLOATS = 1 << 20, Q8_BLOCK = 32, Q8_BLOCK_BYTES = 34 };

/* ---- the list ---- */

void theirs_name(const TheirsList *l, const Theirs *t, char out[HF_NAME_MAX])
{
    snprintf(out, HF_NAME_MAX, "%s", t->name ? t->name : theirs_part(l, t).name);
}

HfPart theirs_part(const TheirsList *l, const Theirs *t) { return hf_part(&l->spec.naming, t->param, t->first_part); }

int64_t stored_bytes(Stored s, int64_t count)
{
    switch (s) {
    case STORED_F32: return 4 * count;
    case STORED_BF16:
    case STORED_F16: return 2 * count;
    case STORED_Q8_0: return count / Q8_BLOCK * Q8_BLOCK_BYTES;
    }
    return 0;
}

int64_t theirs_bytes(const Theirs *t) { return stored_bytes(t->stored, t->count); }

static void put_tensor(TheirsList *l, Theirs t)
{
    const HfPart part = theirs_part(l, &t);
    t.count = 1;
    for (int d = 0; d < part.ndim; d++) t.count *= part.shape[d];
    t.width = t.param->spec.ndim == 1 ? t.count : part.shape[part.ndim - 1]; /* (a vector is one job) */
    t.job_rows = max64(1, JOB_FLOATS / t.width);
    t.stored = l->spec.stored(l->spec.user, t.param, t.name ? t.name : part.name, part.shape[part.ndim - 1]);
    t.first_job = l->job_count;
    l->job_count += (t.count / t.width + t.job_rows - 1) / t.job_rows;
    l->slot_floats = max64(l->slot_floats, t.width);
    l->total_bytes += theirs_bytes(&t);
    l->items[l->count++] = t;
}

static void put_tensors(TheirsList *l, const Param *p)
{
    const HfNaming *n = &l->spec.naming;
    if (hf_joins(n, p)) {
        l->items[l->count - 1].rest = p;
        return;
    }
    const int count = hf_part_count(n, p), step = hf_part_step(n, p);
    for (int k = 0, first = 0; k < step; first = k) {
        const HfPart part = hf_part(n, p, first);
        for (k++; k < step && !strcmp(hf_part(n, p, k).name, part.name);) k++;
        const int run = k - first;
        put_tensor(l,
                   (Theirs){ .param = p, .first_part = first, .run = run, .step = step, .parts = count / step * run });
    }
}

static HfPart part_of(const TheirsList *l, const Theirs *t, int i)
{
    return hf_part(&l->spec.naming, t->param, t->first_part + i / t->run * t->step + i % t->run);
}

static Err put_twins(TheirsList *l, SetupArena *a)
{
    HfTwin twin;
    const TheirsSpec *s = &l->spec;
    for (int i = 0; hf_twin(&s->naming, s->mtp_layers, i, &twin); i++) {
        char *name;
        const Param *p = &s->whole->items[param_find(s->whole, twin.ours)];
        const int parts = hf_part_count(&s->naming, p);
        if (!twin.written) continue;
        TRY(setup_strdup(a, twin.name, &name));
        put_tensor(l, (Theirs){ .param = p, .run = parts, .step = parts, .parts = parts, .name = name });
    }
    return ERR_OK;
}

static Err list_all(TheirsList *l, SetupArena *a)
{
    const ParamRegistry *whole = l->spec.whole;
    int64_t most = 2 * l->spec.mtp_layers;
    for (int i = 0; i < whole->count; i++) most += hf_part_count(&l->spec.naming, &whole->items[i]);
    TRY(setup_array(a, most, &l->items));
    l->slot_floats = JOB_FLOATS;
    for (int i = 0; i < whole->count; i++) put_tensors(l, &whole->items[i]);
    return l->spec.twins ? put_twins(l, a) : ERR_OK;
}

/* Checks that tensors which the class lacks are 0 in it. */
static Err check_zeros(const TheirsList *l)
{
    float values[1024];
    for (int i = 0; i < l->spec.whole->count; i++) {
        const Param *p = &l->spec.whole->items[i];
        if (hf_part_count(&l->spec.naming, p)) continue;
        for (int64_t r = 0; r < p->spec.shape[0]; r++)
            for (int64_t c = 0, n; c < p->spec.shape[1]; c += n) {
                n = min64(1024, p->spec.shape[1] - c);
                TRY(ckpt_values_read(l->values, p->name, (Box){ { r, c }, { 1, n } }, values, n));
                for (int64_t k = 0; k < n; k++)
                    if (!(values[k] >= 0 && values[k] <= 0))
                        return err_set(ERR_CKPT, "tensor '%s' is not 0, and '%s' has no place for it", p->name,
                                       hf_class_names(l->spec.naming.kind)->model_type);
            }
    }
    return ERR_OK;
}

Err theirs_open(const TheirsSpec *spec, SetupArena *a, TheirsList *out)
{
    *out = (TheirsList){ .spec = *spec };
    TRY(ckpt_values_open(spec->from, a, &out->values));
    TRY(ckpt_values_fit(out->values, spec->whole));
    TRY(check_zeros(out));
    return list_all(out, a);
}

void theirs_close(TheirsList *l)
{
    jobs_close(l->jobs);
    progress_close(&l->progress);
    ckpt_values_close(l->values);
}

/* ---- numbers ---- */

static Err too_large(const Theirs *t, float x, const char *what)
{
    return err_set(ERR_CKPT, "tensor '%s' has %.9g, which is too large for %s", t->param->name, (double)x, what);
}

/* In place: floats become halves, which are too large only where the float is. */
static Err encode_halves(const Theirs *t, float *values, int64_t count)
{
    uint16_t *out = (uint16_t *)values;
    const bool f16 = t->stored == STORED_F16;
    const uint16_t exponent = f16 ? 0x7C00 : 0x7F80;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        const float x = half_float_of(bits);
        const uint16_t y = f16 ? f16_from_float(x) : bf16_from_float(x);
        if ((bits & 0x7F800000) != 0x7F800000 && (y & exponent) == exponent)
            return too_large(t, x, f16 ? "f16" : "bf16");
        memcpy(&out[i], &y, sizeof y);
    }
    return ERR_OK;
}

/* Bytes count in units of the largest magnitude over 127, halves away from zero; the scale is stored rounded, but
 * counting is by the scale itself. */
static Err encode_q8(const Theirs *t, float *values, int64_t count)
{
    uint8_t *out = (uint8_t *)values;
    for (int64_t b = 0; b < count / Q8_BLOCK; b++, out += Q8_BLOCK_BYTES) {
        float x[Q8_BLOCK], most = 0;
        memcpy(x, &values[b * Q8_BLOCK], sizeof x);
        for (int i = 0; i < Q8_BLOCK; i++)
            if (!isfinite(x[i]))
                return err_set(ERR_CKPT, "tensor '%s' has %g, which q8_0 has no place for", t->param->name,
                               (double)x[i]);
            else most = fmaxf(most, fabsf(x[i]));
        const float scale = most / 127, inverse = scale > 0 ? 1 / scale : 0;
        const uint16_t stored = f16_from_float(scale);
        if ((stored & 0x7C00) == 0x7C00) return too_large(t, most, "q8_0");
        memcpy(out, &stored, sizeof stored);
        for (int i = 0; i < Q8_BLOCK; i++) out[2 + i] = (uint8_t)(int8_t)roundf(x[i] * inverse);
    }
    return ERR_OK;
}

static Err encode(const Theirs *t, float *values, int64_t count)
{
    switch (t->stored) {
    case STORED_F32: return ERR_OK;
    case STORED_BF16:
    case STORED_F16: return encode_halves(t, values, count);
    case STORED_Q8_0: return encode_q8(t, values, count);
    }
    return ERR_OK;
}

static int64_t up(int64_t a, int64_t by) { return a <= 0 ? 0 : (a + by - 1) / by; }

/* Copies a part's elements among [first, end) of their tensor to out[0...]. */
static Err fill_part(const TheirsList *l, const Theirs *t, const Param *p, const HfPart *part, int64_t first,
                     int64_t end, float *out, float *scratch)
{
    Box box = part->box;
    const int d = part->row < part->column; /* the dim of ours that goes from row to row of theirs */
    const int64_t stride = d ? part->column : part->row, start = part->first - part->first % t->width;
    int64_t low = 0, high = box.shape[d];
    if (stride >= t->width) {
        low = up(first - start, stride);
        high = min64(high, up(end - start, stride));
    }
    if (low >= high) return ERR_OK;
    box.offset[d] += low;
    box.shape[d] = high - low;
    const int64_t to = part->first + low * stride - first;
    if (part->column == 1 && part->row == box.shape[1] && !hf_part_differs(part)) /* as they are */
        return ckpt_values_read(l->values, p->name, box, out + to, part->row);
    TRY(ckpt_values_read(l->values, p->name, box, scratch, box.shape[1]));
    for (int64_t r = 0; r < box.shape[0]; r++) {
        const float *from = scratch + r * box.shape[1];
        float *row = out + to + r * part->row;
        if (hf_part_differs(part)) row[0] = from[0] / part->width - part->more; /* (a vector) */
        else if (part->column == 1) memcpy(row, from, (size_t)box.shape[1] * sizeof *row);
        else
            for (int64_t c = 0; c < box.shape[1]; c++) row[c * part->column] = from[c];
    }
    return ERR_OK;
}

static Err work(void *user, int64_t index, char *slot, char *scratch, int64_t *size_bytes)
{
    TheirsList *l = user;
    int64_t low = 0, high = l->count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (l->items[middle].first_job <= index) low = middle;
        else high = middle;
    }
    const Theirs *t = &l->items[low];
    const int64_t first = (index - t->first_job) * t->job_rows * t->width;
    const int64_t end = min64(t->count, first + t->job_rows * t->width);
    for (int k = 0; k < t->parts; k++) {
        const HfPart part = part_of(l, t, k);
        TRY(fill_part(l, t, t->param, &part, first, end, (float *)slot, (float *)scratch));
    }
    if (t->rest) {
        const HfPart part = hf_part(&l->spec.naming, t->rest, 0);
        TRY(fill_part(l, t, t->rest, &part, first, end, (float *)slot, (float *)scratch));
    }
    odd_look(&l->odd, (int)(t->param - l->spec.whole->items), (const float *)slot, end - first);
    *size_bytes = stored_bytes(t->stored, end - first);
    return encode(t, (float *)slot, end - first);
}

/* ---- streaming ---- */

Err theirs_start(TheirsList *l, int64_t first, SetupArena *a)
{
    TRY(odd_open(&l->odd, l->spec.whole, a));
    for (int64_t i = 0; i < first; i++) l->done_bytes += theirs_bytes(&l->items[i]);
    TRY(jobs_open(&(JobsSpec){ .user = l,
                               .work = work,
                               .first = first < l->count ? l->items[first].first_job : l->job_count,
                               .count = l->job_count,
                               .slot_bytes = l->slot_floats * (int64_t)sizeof(float),
                               .threads = l->spec.threads },
                  a, &l->jobs));
    progress_open(&l->progress, l->total_bytes, NULL);
    return ERR_OK;
}

Err theirs_put(TheirsList *l, const Theirs *t, ChunkWriter *w)
{
    const void *data;
    for (int64_t left = theirs_bytes(t), n; left; left -= n) {
        TRY(jobs_next(l->jobs, &data, &n));
        TRY(chunk_put(w, data, n));
        l->done_bytes += n;
        progress_show(&l->progress, l->done_bytes, 0);
    }
    if (l->done_bytes == l->total_bytes) odd_warn(&l->odd, l->spec.from);
    return ERR_OK;
}
