/*
 * Ops on a GPU: the longer of their arithmetic and their bytes, and a gap before each kernel. See cost.h.
 *
 *   products     tiles on multiprocessors: the last wave may be partly empty, and each tile costs begin and end
 *   experts      the same over all experts' rows at once
 *   attention    of the pairs that see each other, by the width of a head and how many keys a query sees
 *   recurrences  FLOP on CUDA cores, of as many multiprocessors as there are blocks
 *   others       bytes of their tensors
 */
#include <math.h>
#include <string.h>

#include "base/int64.h"
#include "cost/cost.h"
#include "cost/measured.h"
#include "cost/reached.h"
#include "device/scan_room.h"

const char *family_name(OpFamily f)
{
    static const char *const names[FAMILIES] = {
        [FAMILY_PRODUCTS] = "products", [FAMILY_EXPERTS] = "experts' products", [FAMILY_ATTENTION] = "attention",
        [FAMILY_SCAN] = "recurrences",  [FAMILY_MEMORY] = "memory work",        [FAMILY_OPTIMIZER] = "optimizer",
    };
    return names[f];
}

OpFamily family_of(OpId id)
{
    switch (id) {
    case OP_linear_fwd:
    case OP_linear_dx:
    case OP_linear_dw:
    case OP_fp8_product:
    case OP_fp8_product_add: return FAMILY_PRODUCTS;
    case OP_grouped_fwd:
    case OP_grouped_dx:
    case OP_grouped_dw:
    case OP_fp8_grouped:
    case OP_fp8_grouped_add: return FAMILY_EXPERTS;
    case OP_attention_fwd:
    case OP_attention_bwd: return FAMILY_ATTENTION;
    case OP_delta_fwd:
    case OP_delta_bwd:
    case OP_kda_fwd:
    case OP_kda_bwd:
    case OP_mamba_fwd:
    case OP_mamba_bwd: return FAMILY_SCAN;
    case OP_adamw:
    case OP_one_moment:
    case OP_muon_moment:
    case OP_muon_pack:
    case OP_muon_apply:
    case OP_box_copy:
    case OP_normalize:
    case OP_mix:
    case OP_qk_clip:
    case OP_grad_stats:
    case OP_step_finish: return FAMILY_OPTIMIZER;
    default: return FAMILY_MEMORY;
    }
}

/* Kernels of a call; columns: of its rows. */
static int launches_of(OpId id, int64_t columns)
{
    enum { NORM_IN_BLOCK = 2048, SORT_KERNELS = 9 };
    switch (id) {
    case OP_norm_bwd: return columns <= NORM_IN_BLOCK ? 2 : 3;
    case OP_fp8_amax:
    case OP_fp8_cast_runs:
    case OP_bias_grad:
    case OP_delta_fwd: /* (by tensor cores) */
    case OP_attention_bwd: return 2;
    case OP_mamba_fwd: /* (by tensor cores) */
    case OP_delta_bwd:
    case OP_permute_index: return 3;
    case OP_mamba_bwd: return 5;
    case OP_embedding_grad: return SORT_KERNELS;
    default: return 1;
    }
}

static const Tensor *tensor_at(const OpField *f, const void *args)
{
    return (const Tensor *)(const void *)((const char *)args + f->offset);
}

static int64_t columns_of(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    const Tensor *first = info->field_count ? tensor_at(&info->fields[0], args) : NULL;
    return first && first->ndim ? first->dim[first->ndim - 1] : 0;
}

/* The letter of a field's dim, or 0. */
static char letter_at(const OpField *f, int dim)
{
    const char *p = f->dims + (*f->dims == '?');
    for (; *p && *p != ':'; p++)
        if (*p != ' ' && *p != '*' && !dim--) return *p;
    return 0;
}

/* Share of a tensor that is in use. Its dims may be letters that another one of the call knows more of. */
static double used_share(const OpInfo *info, const void *args, const OpField *f)
{
    const Tensor *t = tensor_at(f, args);
    const fp8_grouped_add_args *codes = args;
    if (info == op_info(OP_fp8_grouped_add) && (t == &codes->dy || t == &codes->x))
        return (double)codes_in_use(codes) / (double)t->dim[1];
    for (int i = 0; i < info->field_count; i++) {
        const Tensor *part = tensor_at(&info->fields[i], args);
        const char letter = part->expected ? letter_at(&info->fields[i], tensor_counted_dim(*part)) : 0;
        for (int d = 0; letter && d < t->ndim; d++)
            if (letter_at(f, d) == letter) return expected_share(*part);
    }
    return 1;
}

/* Elements that all parts, or boxes, of the flat buffers (step.h) may have; of other ops more than any tensor has. */
static int64_t in_parts(OpId id, const void *args)
{
    const muon_pack_args *pack = args;
    const muon_apply_args *apply = args;
    switch (id) {
    case OP_grad_stats: return ((const grad_stats_args *)args)->chunks * FLAT_CHUNK;
    case OP_adamw: return ((const adamw_args *)args)->chunks * FLAT_CHUNK;
    case OP_one_moment: return ((const one_moment_args *)args)->chunks * FLAT_CHUNK;
    case OP_muon_moment: return ((const muon_moment_args *)args)->chunks * FLAT_CHUNK;
    case OP_muon_pack: return min64(pack->chunks * FLAT_CHUNK, tensor_count(pack->y));
    case OP_muon_apply: return min64(apply->chunks * FLAT_CHUNK, tensor_count(apply->x));
    case OP_box_copy: return ((const box_copy_args *)args)->chunks * FLAT_CHUNK;
    default: return INT64_MAX;
    }
}

/* Bytes of a tensor that pass memory: of a table the rows looked up, of flat buffers the parts, of others all. */
static double tensor_part(OpId id, const void *args, const OpField *f)
{
    const Tensor t = *tensor_at(f, args);
    int64_t rows = min64(t.dim[0], in_parts(id, args));
    if (id == OP_embedding_fwd && !strcmp(f->name, "table")) rows = ((const embedding_fwd_args *)args)->index.dim[0];
    if (id == OP_embedding_grad && !strcmp(f->name, "dtable")) rows = ((const embedding_grad_args *)args)->index.dim[0];
    return rows < t.dim[0] ? (double)tensor_bytes(t) * (double)rows / (double)t.dim[0] : (double)tensor_bytes(t);
}

/* Bytes that this call overwrites and other calls read and write: such gradients hold nothing yet. */
static double fresh_bytes(OpId id, const void *args)
{
    const linear_dw_args *dw = args;
    const norm_bwd_args *norm = args;
    const fp8_product_add_args *add = args;
    const fp8_grouped_add_args *codes = args;
    const grouped_dw_args *experts = args;
    if (id == OP_fp8_product_add && add->fresh) return (double)tensor_bytes(add->dw);
    if (id == OP_fp8_grouped_add && codes->fresh) return (double)tensor_bytes(codes->dw);
    if (id == OP_grouped_dw && experts->fresh) return (double)tensor_bytes(experts->dw);
    if (id == OP_linear_dw && dw->fresh) return (double)tensor_bytes(dw->dw);
    return id == OP_norm_bwd && norm->fresh_dx ? (double)tensor_bytes(norm->dx) : 0;
}

/* Each tensor once, what changes in place twice; of rows, or columns of codes, those in use. */
static double tensor_traffic(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    double bytes = 0;
    for (int i = 0; i < info->field_count; i++) {
        const OpField *f = &info->fields[i];
        if (!tensor_at(f, args)->data) continue;
        bytes += used_share(info, args, f) * tensor_part(id, args, f) * (f->read + f->written);
    }
    return bytes - fresh_bytes(id, args);
}

/* Bytes of the host's memory that an op reads, or writes if these are more: the link carries both ways at once. */
static double far_traffic(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    double read = 0, written = 0;
    for (int i = 0; i < info->field_count; i++) {
        const OpField *f = &info->fields[i];
        const Tensor *t = tensor_at(f, args);
        if (!t->data || !device_null_is_far(t->data)) continue;
        read += tensor_part(id, args, f) * f->read;
        written += tensor_part(id, args, f) * f->written;
    }
    return fmax(read, written);
}

/* ---- products ---- */

static Product product_of(OpId id, const void *args)
{
    const OpWork w = op_work(id, args);
    const double rows = w.shape[0], outputs = w.shape[1], inputs = w.shape[2];
    const double count = w.times;
    switch (id) {
    case OP_linear_dw:
    case OP_fp8_product_add:
    case OP_fp8_grouped_add:
    case OP_grouped_dw: return (Product){ outputs, inputs, rows, count };
    case OP_linear_dx:
    case OP_grouped_dx: return (Product){ rows, inputs, outputs, count };
    default: return (Product){ rows, outputs, inputs, count };
    }
}

/* How often all multiprocessors take a tile; long runs even out. */
static double waves(double tiles, double multiprocessors)
{
    enum { EVEN = 8 };
    const double all = tiles / multiprocessors;
    return all < EVEN ? ceil(all) : all + .5;
}

typedef struct {
    double rows, columns, rate; /* rate: of the best tile's */
} Tile;

static double tiled(Product p, Tile t, double multiprocessors, double tile_depth, bool apart)
{
    const double tiles = ceil(p.rows / t.rows) * ceil(p.columns / t.columns);
    const double together = waves(p.count * tiles, multiprocessors);
    const double each = 2 * t.rows * t.columns * (p.depth + tile_depth) / t.rate;
    const double rounds = apart && p.count > 1 ? (together + p.count * ceil(tiles / multiprocessors)) / 2 : together;
    return rounds * multiprocessors * each;
}

/* With so few tiles that some multiprocessors had none, the library cuts long sums into parts, which are tiles of their
 * own: each begins and ends. */
static double split(Product p, Tile t, double multiprocessors, double tile_depth, bool apart)
{
    enum { PARTS_MOST = 32, DEPTH_LEAST = 512 };
    double best = tiled(p, t, multiprocessors, tile_depth, apart);
    if (p.count * ceil(p.rows / t.rows) * ceil(p.columns / t.columns) >= multiprocessors) return best;
    for (int parts = 2; parts <= PARTS_MOST && p.depth / parts >= DEPTH_LEAST; parts++) {
        const Product part = { ceil(p.rows / t.rows) * t.rows * parts, p.columns, p.depth / parts, p.count };
        best = fmin(best, tiled(part, t, multiprocessors, tile_depth, apart));
    }
    return best;
}

/* (tiles that cuBLASLt has) */
double product_flop(Product p, double multiprocessors, double tile_depth, bool apart)
{
    static const Tile tiles[] = {
        { 128, 256, 1 }, { 256, 128, 1 }, { 128, 128, .87 }, { 64, 256, .7 }, { 64, 64, .5 }
    };
    double best = INFINITY;
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles; i++)
        best = fmin(best, split(p, tiles[i], multiprocessors, tile_depth, apart));
    return best;
}

static bool is_fp8(OpId id)
{
    return id == OP_fp8_product || id == OP_fp8_product_add || id == OP_fp8_grouped || id == OP_fp8_grouped_add;
}

static bool is_wide(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    if (is_fp8(id)) return false;
    for (int i = 0; i < info->field_count; i++) {
        const DType d = tensor_at(&info->fields[i], args)->dtype;
        if (d == BF16 || d == F16) return false;
    }
    return true;
}

/* On CUDA cores, of products in fp32: the same share of their peak as of others. */
static double peak_of(const CostModel *m, bool wide)
{
    return 1e12 * m->device->matrix_share * (wide ? m->device->fp32_tflops : m->device->bf16_tflops);
}

/* Products of 8 bits: of a device without them no rate is known, and that of 16 bits stands for it. A tile's begin and
 * end are of twice as many elements of the sum, which pass in the same time. */
static double fp8_seconds(const CostModel *m, Product p)
{
    const double peak = 1e12 * m->device->matrix_share * m->device->fp8_tflops * reached_by_fp8();
    const double flop = product_flop(p, m->device->multiprocessors, 2 * m->device->tile_depth, false);
    return flop / (m->device->fp8_tflops > 0 ? peak : peak_of(m, false));
}

static const Tile GROUPED_TILE = { 128, 128, 1 };    /* cuda/grouped.cu's */
static const Tile GROUPED_FP8_TILE = { 128, 64, 1 }; /* cuda/fp8_grouped.cu's; on Hopper the other */

static double fp8_experts_seconds(const CostModel *m, OpId id, Product p)
{
    const DeviceFile *d = m->device;
    const double peak = d->fp8_tflops > 0 ? 1e12 * d->matrix_share * d->fp8_tflops : peak_of(m, false);
    const KernelForm form = kernel_form(id, d->hopper > 0, 0);
    const Tile tile = form == FORM_WGMMA ? GROUPED_TILE : GROUPED_FP8_TILE;
    return tiled(p, tile, d->multiprocessors, 2 * d->tile_depth, false) /
           (peak * d->experts_share * reached_by_fp8_experts(id, form));
}

/* ---- attention ---- */

/* Arithmetic of the pairs that see each other: two products forward, five backward. */
static double attention_seconds(const CostModel *m, OpId id, const void *args)
{
    const OpWork w = op_work(id, args);
    const bool forward = id == OP_attention_fwd;
    const Tensor q = forward ? ((const attention_fwd_args *)args)->q : ((const attention_bwd_args *)args)->q;
    const double pairs = w.times * causal_pairs(w.shape[0], w.shape[1]);
    const double keys = pairs / (double)(q.dim[0] * q.dim[1] * q.dim[2]);
    const double best = 1e12 * (forward ? m->device->attention_fwd_tflops : m->device->attention_bwd_tflops);
    const KernelForm form = kernel_form(id, m->device->hopper > 0 && !is_wide(id, args), q.dim[3]);
    const double part = m->device->attention_share * reached_by_attention(id, form, q.dim[3]);
    const double rate = is_wide(id, args) ? peak_of(m, true) / 2 : best * part;
    return (forward ? 4 : 10) * pairs * w.shape[2] / (rate * keys / (keys + reached_short_keys(id, form)));
}

/* ---- recurrences ---- */

/* A block has a key head of a sample, whose windows it goes through in order (cuda/delta.cuh). */
static double plain_seconds(const CostModel *m, Tensor q, double flop)
{
    const double busy = fmin(1, (double)(q.dim[0] * q.dim[2]) / m->device->multiprocessors);
    return flop / (1e12 * m->device->fp32_tflops * busy * reached_by_scan(SCAN_PLAIN));
}

/* A block with tensor cores: 64 columns of a value head (cuda/delta_tiles_fwd.cu); backward all windows follow. */
static double delta_seconds(const CostModel *m, Tensor q, Tensor v, bool forward, double flop)
{
    enum { COLUMNS = 64 };
    if (v.dtype != BF16 || !delta_has_tiles(q.dim[3], v.dim[3])) return plain_seconds(m, q, flop);
    const double blocks = (double)(v.dim[0] * v.dim[2] * ((v.dim[3] + COLUMNS - 1) / COLUMNS));
    const double busy = fmin(1, blocks / m->device->multiprocessors), peak = 1e12 * m->device->bf16_tflops;
    if (forward) return flop / (peak * busy * reached_by_scan(SCAN_CHAIN));
    return flop / (peak * busy * reached_by_scan(SCAN_CHAIN_BACK)) + flop / (peak * reached_by_scan(SCAN_ROWS_BACK));
}

/* A block has a window of a group (cuda/mamba.cu). By tensor cores it has 8 heads of it, or 64 columns of the gradients
 * of its keys (cuda/mamba_tiles_fwd.cu, cuda/mamba_tiles_bwd.cu). */
static double mamba_seconds(const CostModel *m, Tensor q, Tensor x, bool forward, double flop)
{
    enum { HEADS = 8, COLUMNS = 64 };
    const bool tiles = x.dtype == BF16 && mamba_has_tiles(q.dim[3], x.dim[3]);
    const int64_t group = x.dim[2] / q.dim[2], windows = (q.dim[1] + MAMBA_WINDOW - 1) / MAMBA_WINDOW;
    const int64_t parts = forward ? (group + HEADS - 1) / HEADS : (q.dim[3] + COLUMNS - 1) / COLUMNS;
    const double blocks = (double)(q.dim[0] * windows * q.dim[2] * (tiles ? parts : 1));
    const double busy = fmin(1, blocks / m->device->multiprocessors);
    const double peak = tiles ? m->device->bf16_tflops : m->device->fp32_tflops;
    return flop / (1e12 * peak * busy * reached_by_scan(tiles ? SCAN_WINDOWS : SCAN_PLAIN));
}

static double scan_seconds(const CostModel *m, OpId id, const void *args, double flop)
{
    const mamba_fwd_args *fwd = args;
    const mamba_bwd_args *bwd = args;
    const delta_fwd_args *delta_fwd = args;
    const delta_bwd_args *delta_bwd = args;
    switch (id) {
    case OP_mamba_fwd: return mamba_seconds(m, fwd->q, fwd->x, true, flop);
    case OP_mamba_bwd: return mamba_seconds(m, bwd->q, bwd->x, false, flop);
    case OP_delta_fwd: return delta_seconds(m, delta_fwd->q, delta_fwd->v, true, flop);
    case OP_delta_bwd: return delta_seconds(m, delta_bwd->q, delta_bwd->v, false, flop);
    case OP_kda_fwd: return plain_seconds(m, ((const kda_fwd_args *)args)->q, flop);
    default: return plain_seconds(m, ((const kda_bwd_args *)args)->q, flop);
    }
}

/* ---- any op ---- */

static double arithmetic_seconds(const CostModel *m, OpId id, const void *args, double flop)
{
    const bool wide = is_wide(id, args);
    const OpFamily family = family_of(id);
    if (family == FAMILY_ATTENTION) return attention_seconds(m, id, args);
    if (family == FAMILY_SCAN) return scan_seconds(m, id, args, flop);
    if (family != FAMILY_PRODUCTS && family != FAMILY_EXPERTS) return 0;
    const Product p = product_of(id, args);
    const double multiprocessors = m->device->multiprocessors, depth = m->device->tile_depth;
    if (is_fp8(id)) return family == FAMILY_EXPERTS ? fp8_experts_seconds(m, id, p) : fp8_seconds(m, p);
    if (family == FAMILY_PRODUCTS) return product_flop(p, multiprocessors, depth, false) / peak_of(m, wide);
    const double reached = reached_by_experts(id, kernel_form(id, m->device->hopper > 0 && !wide, 0));
    return tiled(p, GROUPED_TILE, multiprocessors, depth, false) /
           (peak_of(m, wide) * m->device->experts_share * reached);
}

/* Bytes of a tensor that a product's epilogue reads or writes besides: they come when the arithmetic is done. */
static double epilogue_bytes(OpId id, const void *args)
{
    const linear_fwd_args *fwd = args;
    const linear_dx_args *dx = args;
    const fp8_product_args *fp8 = args;
    if (id == OP_fp8_product && fp8->gelu.data) return (double)tensor_bytes(fp8->gelu);
    if (id == OP_linear_fwd && fwd->gelu.data) return (double)tensor_bytes(fwd->gelu);
    return id == OP_linear_dx && dx->gelu_x.data ? (double)tensor_bytes(dx->gelu_x) : 0;
}

/* Bytes a second of memory work: memory_share is that of a kernel at .9 of a copy's bandwidth. */
static double memory_rate(const CostModel *m, OpId id)
{
    static const double OF_COPY = .9;
    const OpFamily family = family_of(id);
    const bool memory = family == FAMILY_MEMORY || family == FAMILY_OPTIMIZER;
    const double all = 1e9 * m->device->memory_gb_s * m->device->memory_share;
    return memory ? all * reached_of_copy(id) / OF_COPY : all;
}

/* Cost on a GPU. A measured time, which includes the gap, counts more than shares of a data sheet. */
static OpCost gpu_cost(const CostModel *m, OpId id, const void *args, double flop)
{
    const double arithmetic = arithmetic_seconds(m, id, args, flop);
    const double epilogue = epilogue_bytes(id, args), rate = memory_rate(m, id);
    const double memory = (tensor_traffic(id, args) - epilogue) / rate;
    const int launches = launches_of(id, columns_of(id, args));
    const double far = far_traffic(id, args) / device_host_rate(m->device);
    double seconds = fmax(fmax(arithmetic, memory) + epilogue / rate, far) + 1e-6 * launches * m->device->gap_us;
    if (far == 0) measured_op(&m->device->points, id, args, 1, 1, &seconds);
    return (OpCost){ .seconds = seconds, .host = 1e-6 * launches * m->device->host_us, .launches = launches };
}

/* Cost on processors. Without a measured time it is arithmetic at the peak rate, or bytes at the rate of copies, which
 * the ranks share. */
static OpCost cpu_cost(const CostModel *m, OpId id, const void *args, double flop)
{
    const OpFamily family = family_of(id);
    const bool computes = family != FAMILY_MEMORY && family != FAMILY_OPTIMIZER;
    OpCost out = { .launches = 1 };
    if (measured_op(&m->device->points, id, args, m->ranks, m->threads, &out.seconds)) return out;
    const double share = 1e9 * m->device->memory_gb_s / m->ranks, peak = 1e12 * m->device->fp32_tflops / m->ranks;
    out.seconds = fmax(tensor_traffic(id, args) / share, computes ? flop / peak : 0);
    return out;
}

OpCost cost_op(const CostModel *m, OpId id, const void *args, double flop)
{
    return m->cpu ? cpu_cost(m, id, args, flop) : gpu_cost(m, id, args, flop);
}
