/* See weights.h. */
#include "hf/weights.h"

#include <stdio.h>
#include <string.h>

#include "base/half.h"
#include "base/log.h"
#include "base/int64.h"

enum { RUN_BYTES = 1 << 14, MX_BLOCK = 32 };

/* ---- opening ---- */

static bool is_weight(const char *dtype)
{
    return !strcmp(dtype, "F32") || !strcmp(dtype, "BF16") || !strcmp(dtype, "F16");
}

static void shape_text(char out[96], int ndim, const int64_t *shape)
{
    int used = snprintf(out, 96, "[");
    for (int d = 0; d < ndim && used < 64; d++)
        used += snprintf(out + used, (size_t)(96 - used), d ? ", %lld" : "%lld", (long long)shape[d]);
    snprintf(out + used, (size_t)(96 - used), "]");
}

/* The first rows of a table of positions serve a model that is made for fewer. */
static bool has_first_rows(const HfTensor *t, int ndim, const int64_t *shape)
{
    static const char table[] = "wpe.weight";
    const size_t n = strlen(t->t.name), end = sizeof table - 1;
    return n >= end && !strcmp(t->t.name + n - end, table) && ndim == 2 && t->t.ndim == 2 &&
           t->t.shape[0] >= shape[0] && t->t.shape[1] == shape[1];
}

static Err use(HfWeights *m, const char *name, int ndim, const int64_t *shape, const HfTensor **out)
{
    char have[96], want[96];
    const HfTensor *t = *out = hf_folder_use(&m->folder, name);
    if (!t) return err_set(ERR_CKPT, "'%s' has no tensor '%s'", m->folder.path, name);
    bool same = t->t.ndim == ndim;
    for (int d = 0; d < ndim && same; d++) same = t->t.shape[d] == shape[d];
    if (same || has_first_rows(t, ndim, shape)) return ERR_OK;
    shape_text(have, t->t.ndim, t->t.shape);
    shape_text(want, ndim, shape);
    return err_set(ERR_CKPT, "'%s': tensor '%s' has shape %s, and the model's configuration says %s",
                   m->folder.files[t->file].path, name, have, want);
}

static Err wrong_dtype(const HfWeights *m, const HfTensor *t, const char *want)
{
    return err_set(ERR_CKPT, "'%s': tensor '%s' has dtype '%s', not %s", m->folder.files[t->file].path, t->t.name,
                   t->t.dtype, want);
}

/* The scales of a tensor in fp8. */
static Err use_scales(HfWeights *m, const HfTensor *t)
{
    char name[HF_NAME_MAX + 16];
    const HfTensor *scales;
    if (!m->block_rows || t->t.ndim != 2) return wrong_dtype(m, t, "F32, BF16 or F16");
    const int64_t shape[2] = { (t->t.shape[0] + m->block_rows - 1) / m->block_rows,
                               (t->t.shape[1] + m->block_cols - 1) / m->block_cols };
    snprintf(name, sizeof name, "%s_scale_inv", t->t.name);
    TRY(use(m, name, 2, shape, &scales));
    return strcmp(scales->t.dtype, "F32") ? wrong_dtype(m, scales, "F32") : ERR_OK;
}

/* Experts in MXFP4: NAME_blocks and NAME_scales. */
static Err use_mxfp4(HfWeights *m, const HfPart *part)
{
    char name[HF_NAME_MAX + 16];
    const HfTensor *t;
    const int64_t shape[4] = { part->shape[0], part->shape[1], part->shape[2] / MX_BLOCK, MX_BLOCK / 2 };
    if (part->shape[2] % MX_BLOCK)
        return err_set(ERR_CKPT, "'%s': '%s' is %lld wide, and MXFP4 has blocks of %d", m->folder.path, part->name,
                       (long long)part->shape[2], MX_BLOCK);
    snprintf(name, sizeof name, "%s_blocks", part->name);
    TRY(use(m, name, 4, shape, &t));
    if (strcmp(t->t.dtype, "U8")) return wrong_dtype(m, t, "U8");
    snprintf(name, sizeof name, "%s_scales", part->name);
    TRY(use(m, name, 3, shape, &t));
    return strcmp(t->t.dtype, "U8") ? wrong_dtype(m, t, "U8") : ERR_OK;
}

static bool is_mxfp4(const HfWeights *m, const HfPart *part) { return m->naming.mxfp4 && part->ndim == 3; }

static Err use_part(HfWeights *m, const HfPart *part)
{
    const HfTensor *t;
    if (is_mxfp4(m, part)) return use_mxfp4(m, part);
    TRY(use(m, part->name, part->ndim, part->shape, &t));
    if (!strcmp(t->t.dtype, "F8_E4M3")) return use_scales(m, t);
    return is_weight(t->t.dtype) ? ERR_OK : wrong_dtype(m, t, "F32, BF16 or F16");
}

static Err use_all(HfWeights *m, const ParamRegistry *whole)
{
    for (int i = 0; i < whole->count; i++) {
        const Param *p = &whole->items[i];
        char last[HF_NAME_MAX] = "";
        for (int k = 0; k < hf_part_count(&m->naming, p); k++) {
            const HfPart part = hf_part(&m->naming, p, k);
            if (strcmp(part.name, last)) TRY(use_part(m, &part));
            snprintf(last, sizeof last, "%s", part.name);
        }
    }
    return ERR_OK;
}

static const Param *twin_of(const ParamRegistry *whole, const HfTwin *t)
{
    const int id = param_find(whole, t->ours);
    ASSERT(id >= 0);
    return &whole->items[id];
}

static Err use_twins(HfWeights *m, const ParamRegistry *whole)
{
    HfTwin twin;
    for (int i = 0; hf_twin(&m->naming, m->mtp_layers, i, &twin); i++) {
        HfPart part = hf_part(&m->naming, twin_of(whole, &twin), 0);
        if (!hf_folder_find(&m->folder, twin.name)) continue;
        snprintf(part.name, sizeof part.name, "%s", twin.name);
        TRY(use_part(m, &part));
    }
    return ERR_OK;
}

static const char *find_prefix(const HfFolder *f, const HfConfig *hf)
{
    const char *const *prefixes = hf_prefixes(hf->kind, hf->wrapped);
    const char *const table = hf->kind == HF_GPT2 ? "wte.weight" : "embed_tokens.weight";
    char name[HF_NAME_MAX];
    for (const char *const *at = prefixes; *at; at++) {
        snprintf(name, sizeof name, "%s%s", *at, table);
        if (hf_folder_find(f, name)) return *at;
    }
    return *prefixes;
}

static bool has_name(const HfFolder *f, const char *part)
{
    for (int64_t i = 0; i < f->count; i++)
        if (strstr(f->tensors[i].t.name, part)) return true;
    return false;
}

/* Transformers saves Kimi Linear's dense layers under the name of mixtures, and OLMo Hybrid's norms behind attention
 * under that of others before a layer. */
static bool is_as_saved(const HfFolder *f, HfClass kind)
{
    if (kind == HF_OLMO_HYBRID) return !has_name(f, ".post_attention_layernorm.");
    return has_name(f, ".block_sparse_moe.gate_proj.");
}

/* Tensors that the model has no place for: some are passed over, those of modules of multi-token prediction aloud. */
static Err check_rest(const HfWeights *m, const HfConfig *hf)
{
    int64_t modules = 0, others = 0;
    const HfTensor *first = NULL;
    char more[64] = "";
    for (int64_t i = 0; i < m->folder.count; i++) {
        const HfTensor *t = &m->folder.tensors[i];
        const bool place = t->used || hf_ignored(&m->naming, hf->wrapped, m->mtp_layers, t->t.name);
        if (!place && !first) first = t;
        others += !place;
        modules += !t->used && !strncmp(t->t.name, "mtp.", 4);
    }
    if (others > 1) snprintf(more, sizeof more, ", and %lld others", (long long)others - 1);
    if (first)
        return err_set(ERR_CKPT, "'%s' holds tensor '%s'%s, which a model of its config.json does not have",
                       m->folder.files[first->file].path, first->t.name, more);
    if (modules)
        log_warn("'%s': %lld tensors of multi-token prediction (mtp.*) are left out", m->folder.files[0].path,
                 (long long)modules);
    return ERR_OK;
}

Err hf_weights_open(const char *path, const HfConfig *hf, const Config *cfg, const ParamRegistry *whole, SetupArena *a,
                    HfWeights *out)
{
    *out = (HfWeights){ .mtp_layers = cfg->model.mtp_layers };
    if (hf->store == HF_STORE_FP8_BLOCKS) {
        out->block_rows = hf->block_rows;
        out->block_cols = hf->block_cols;
    }
    TRY(hf_folder_open(path, a, &out->folder));
    out->naming = hf_naming(hf->kind, cfg, find_prefix(&out->folder, hf));
    out->naming.stacked = has_name(&out->folder, ".mlp.experts.gate_up_proj");
    out->naming.as_saved = is_as_saved(&out->folder, hf->kind);
    out->naming.mxfp4 = hf->store == HF_STORE_MXFP4;
    out->naming.halves = !hf->interleaved;
    TRY(use_all(out, whole));
    TRY(use_twins(out, whole));
    return check_rest(out, hf);
}

void hf_weights_close(HfWeights *m) { hf_folder_close(&m->folder); }

/* ---- numbers ---- */

static float e4m3(uint8_t x)
{
    const int e = x >> 3 & 15, mantissa = x & 7;
    uint32_t bits = (uint32_t)(e + 120) << 23 | (uint32_t)mantissa << 20;
    float v;
    memcpy(&v, &bits, sizeof v);
    if (!e) v = (float)mantissa * 0x1p-9f;
    if (e == 15 && mantissa == 7) v = half_float_of(0x7FC00000);
    return x & 0x80 ? -v : v;
}

static void decode(const char *dtype, const void *from, int64_t count, int64_t step, float *out, int64_t ld)
{
    const uint32_t *words = from;
    const uint16_t *halves = from;
    const uint8_t *bytes = from;
    if (!strcmp(dtype, "F32"))
        for (int64_t i = 0; i < count; i++) out[i * ld] = half_float_of(words[i * step]);
    else if (!strcmp(dtype, "BF16"))
        for (int64_t i = 0; i < count; i++) out[i * ld] = bf16_to_float(halves[i * step]);
    else if (!strcmp(dtype, "F16"))
        for (int64_t i = 0; i < count; i++) out[i * ld] = f16_to_float(halves[i * step]);
    else
        for (int64_t i = 0; i < count; i++) out[i * ld] = e4m3(bytes[i * step]);
}

/* A run of elements first, first + step, ... of their tensor, to out[0], out[ld], ... */
typedef struct {
    int64_t first, step, count;
    float *out;
    int64_t ld;
} Run;

static Err read_plain(const HfWeights *m, const HfTensor *t, Run r)
{
    _Alignas(8) char buf[RUN_BYTES];
    const int64_t size = st_dtype_bytes(t->t.dtype), most = (RUN_BYTES / size - 1) / r.step + 1;
    if (r.step == 1 && r.ld == 1 && !strcmp(t->t.dtype, "F32"))
        return hf_folder_read(&m->folder, t, r.first * size, r.out, r.count * size);
    for (int64_t done = 0, n; done < r.count; done += n) {
        n = min64(r.count - done, most);
        TRY(hf_folder_read(&m->folder, t, (r.first + done * r.step) * size, buf, ((n - 1) * r.step + 1) * size));
        decode(t->t.dtype, buf, n, r.step, r.out + done * r.ld, r.ld);
    }
    return ERR_OK;
}

/* Runs of fp8 lie in one row of theirs. */
static Err scale(const HfWeights *m, const HfTensor *t, Run r)
{
    char name[HF_NAME_MAX + 16];
    const int64_t width = t->t.shape[1], row = r.first / width, column = r.first % width;
    float scales[64];
    snprintf(name, sizeof name, "%s_scale_inv", t->t.name);
    const HfTensor *s = hf_folder_find(&m->folder, name);
    ASSERT(s && r.step == 1 && column + r.count <= width);
    int64_t held = 0, held_end = 0;
    for (int64_t i = 0; i < r.count; i++) {
        const int64_t block = (column + i) / m->block_cols;
        if (block >= held_end) {
            held = block;
            held_end = min64(block + 64, s->t.shape[1]);
            TRY(hf_folder_read(&m->folder, s, (row / m->block_rows * s->t.shape[1] + held) * 4, scales,
                               (held_end - held) * 4));
        }
        r.out[i * r.ld] *= scales[block - held];
    }
    return ERR_OK;
}

/* Elements of a row in blocks of 32: two in a byte, the low one first, times a power of two for each block. */
static Err read_mxfp4(const HfWeights *m, const char *name, Run r)
{
    static const float values[16] = { 0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6 };
    char full[HF_NAME_MAX + 16];
    uint8_t bytes[512 + 1], scales[1024 / MX_BLOCK + 1];
    snprintf(full, sizeof full, "%s_blocks", name);
    const HfTensor *blocks = hf_folder_find(&m->folder, full);
    snprintf(full, sizeof full, "%s_scales", name);
    const HfTensor *powers = hf_folder_find(&m->folder, full);
    ASSERT(blocks && powers && r.step == 1);
    for (int64_t done = 0, n; done < r.count; done += n) {
        const int64_t at = r.first + done;
        n = min64(r.count - done, 1024);
        TRY(hf_folder_read(&m->folder, blocks, at / 2, bytes, (at + n + 1) / 2 - at / 2));
        TRY(hf_folder_read(&m->folder, powers, at / MX_BLOCK, scales, (at + n - 1) / MX_BLOCK - at / MX_BLOCK + 1));
        for (int64_t i = at; i < at + n; i++) {
            const int power = scales[i / MX_BLOCK - at / MX_BLOCK] - 127, high = (int)(i & 1) * 4;
            const float by = power < -126 ? 0x1p-127f : half_float_of((uint32_t)(power + 127) << 23);
            r.out[(done + i - at) * r.ld] = values[bytes[i / 2 - at / 2] >> high & 15] * by;
        }
    }
    return ERR_OK;
}

/* ---- boxes ---- */

static Err read_run(const HfWeights *m, const HfPart *part, const HfTensor *t, Run r)
{
    if (!t) return read_mxfp4(m, part->name, r);
    TRY(read_plain(m, t, r));
    return strcmp(t->t.dtype, "F8_E4M3") ? ERR_OK : scale(m, t, r);
}

/* A vector whose numbers are not theirs. */
static Err read_norm(const HfWeights *m, const HfPart *part, const HfTensor *t, Run r)
{
    TRY(read_run(m, part, t, r));
    for (int64_t i = 0; i < r.count; i++) r.out[i * r.ld] = (r.out[i * r.ld] + part->more) * part->width;
    return ERR_OK;
}

/* Reads a part's elements of a box; the box begins at `out`. Runs follow the smaller stride. */
static Err read_part(const HfWeights *m, const HfPart *part, Box box, float *out, int64_t ld)
{
    Box in;
    if (!box_intersect(part->box, box, &in)) return ERR_OK;
    const HfTensor *t = is_mxfp4(m, part) ? NULL : hf_folder_find(&m->folder, part->name);
    const bool along_rows = part->row < part->column, encoded = !t || !strcmp(t->t.dtype, "F8_E4M3");
    int64_t rows = in.shape[0], columns = in.shape[1];
    const int64_t first = part->first + (in.offset[0] - part->box.offset[0]) * part->row +
                          (in.offset[1] - part->box.offset[1]) * part->column;
    out += (in.offset[0] - box.offset[0]) * ld + in.offset[1] - box.offset[1];
    if (hf_part_differs(part)) return read_norm(m, part, t, (Run){ first, part->row, rows, out, ld });
    if (along_rows) {
        for (int64_t c = 0; c < columns; c++)
            TRY(read_run(m, part, t, (Run){ first + c * part->column, part->row, rows, out + c, ld }));
        return ERR_OK;
    }
    if (columns == part->row && columns == ld && part->column == 1 && !encoded) { /* rows touch: one run */
        columns *= rows;
        rows = 1;
    }
    for (int64_t r = 0; r < rows; r++)
        TRY(read_run(m, part, t, (Run){ first + r * part->row, part->column, columns, out + r * ld, 1 }));
    return ERR_OK;
}

Err hf_weights_read(const HfWeights *m, const Param *p, Box box, float *out, int64_t ld)
{
    int k, end;
    hf_part_range(&m->naming, p, box.offset[0], box.offset[0] + box.shape[0], &k, &end);
    if (k == end)
        for (int64_t r = 0; r < box.shape[0]; r++) memset(out + r * ld, 0, (size_t)box.shape[1] * sizeof *out);
    for (; k < end; k++) {
        const HfPart part = hf_part(&m->naming, p, k);
        TRY(read_part(m, &part, box, out, ld));
    }
    return ERR_OK;
}

/* ---- twins ---- */

static Err compare(const HfWeights *m, const Param *p, const HfTwin *twin)
{
    enum { COUNT = 1024 };
    float a[COUNT], b[COUNT];
    HfPart one = hf_part(&m->naming, p, 0), other = one;
    snprintf(other.name, sizeof other.name, "%s", twin->name);
    const HfTensor *s = hf_folder_find(&m->folder, one.name), *t = hf_folder_find(&m->folder, other.name);
    const int64_t count = box_count(one.box);
    for (int64_t at = 0, n; at < count; at += n) {
        n = min64(count - at, COUNT);
        TRY(read_run(m, &one, s, (Run){ at, 1, n, a, 1 }));
        TRY(read_run(m, &other, t, (Run){ at, 1, n, b, 1 }));
        if (memcmp(a, b, (size_t)n * sizeof *a))
            return err_set(ERR_CKPT, "'%s': tensors '%s' and '%s' differ, which are one in this model", m->folder.path,
                           one.name, other.name);
    }
    return ERR_OK;
}

Err hf_weights_check_twins(const HfWeights *m, const ParamRegistry *whole)
{
    HfTwin twin;
    for (int i = 0; hf_twin(&m->naming, m->mtp_layers, i, &twin); i++)
        if (hf_folder_find(&m->folder, twin.name)) TRY(compare(m, twin_of(whole, &twin), &twin));
    return ERR_OK;
}
