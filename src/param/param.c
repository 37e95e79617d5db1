/* The registry and its flat buffers; see param.h. Boxes and pieces for checkpoints are in shard.c. */
#include "param/shard.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/int64.h"
#include "base/mathx.h"
#include "base/rng.h"

enum { FILL_ELEMS = 1 << 20 };

ParamPlace param_place_single(void) { return param_place((Grid){ .tp = 1, .dp = 1 }, 0, ZERO_NONE); }

ParamPlace param_place(Grid g, int rank, ZeroCut zero)
{
    static const GroupKind axis[CUT_KINDS] = { [CUT_TP] = GROUP_TP, [CUT_EP] = GROUP_EP, [CUT_ETP] = GROUP_EXPERT_TP };
    static const GroupKind one[PARAM_GROUPS] = { GROUP_DP_CP, GROUP_EXPERT_DP, GROUP_DP_CP };
    static const GroupKind two[PARAM_GROUPS] = { GROUP_STAGE_LOW, GROUP_EXPERT_LOW, GROUP_STAGE_LOW };
    static const GroupKind near[PARAM_GROUPS] = { GROUP_ZERO, GROUP_EXPERT_ZERO, GROUP_ZERO };
    static const GroupKind far[PARAM_GROUPS] = { GROUP_ZERO_FAR, GROUP_EXPERT_ZERO_FAR, GROUP_ZERO_FAR };
    const GridShape s = grid_shape(g);
    ParamPlace p = { .zero = zero, .shards = { 1 } };
    for (Cut c = CUT_NONE + 1; c < CUT_KINDS; c++) {
        p.shards[c] = group_size(s, axis[c]);
        p.shard[c] = group_rank(s, axis[c], rank);
    }
    for (ParamGroup i = 0; i < PARAM_GROUPS; i++) {
        const GroupKind all = s.two_replicas ? two[i] : one[i], rest = s.two_replicas ? two[i] : far[i];
        const GroupKind kind = s.zero_group ? near[i] : all;
        const bool cut = zero && i != PARAM_STATE, again = cut && s.zero_group;
        const int others = again ? group_size(s, rest) : 1;
        p.copy[i] = group_rank(s, one[i], rank);
        p.near_shards[i] = cut ? group_size(s, kind) : 1;
        p.near_shard[i] = cut ? group_rank(s, kind, rank) : 0;
        p.zero_shards[i] = p.near_shards[i] * others;
        p.zero_shard[i] = p.near_shard[i] * others + (again ? group_rank(s, rest, rank) : 0);
    }
    return p;
}

int param_zero_group(Grid g, ZeroCut zero, int64_t asked)
{
    const int copies = g.dp * (g.cp ? g.cp : 1);
    if (asked && asked < copies) return (int)asked;
    return g.bidirectional && zero >= ZERO_GRADS ? copies : 0;
}

void param_registry_init(ParamRegistry *r, SetupArena *setup, ParamPlace place)
{
    *r = (ParamRegistry){ .place = place, .setup = setup };
}

/* Place of the name's index + 1, or the 0 where it belongs. */
static int *name_entry(const ParamRegistry *r, const char *name)
{
    uint64_t at = rng_key(0, name), mask = 2 * (uint64_t)r->capacity - 1;
    while (r->by_name[at & mask] && strcmp(r->items[r->by_name[at & mask] - 1].name, name)) at++;
    return &r->by_name[at & mask];
}

/* The tables double in setup memory; the old copies stay there, which is bounded by the final size. */
static Err grow(ParamRegistry *r)
{
    if (r->count < r->capacity) return ERR_OK;
    int capacity = r->capacity ? 2 * r->capacity : 64;
    Param *items;
    TRY(setup_array(r->setup, capacity, &items));
    TRY(setup_array(r->setup, 2 * (int64_t)capacity, &r->by_name));
    if (r->count) memcpy(items, r->items, (size_t)r->count * sizeof *items);
    r->items = items;
    r->capacity = capacity;
    for (int i = 0; i < r->count; i++) *name_entry(r, items[i].name) = i + 1;
    return ERR_OK;
}

static const char *const cut_names[CUT_KINDS] = { [CUT_TP] = "tp", [CUT_EP] = "ep", [CUT_ETP] = "etp" };

static Err check_spec(const ParamRegistry *r, const ParamSpec *s)
{
    if (*name_entry(r, s->name)) return err_set(ERR_INTERNAL, "parameter '%s' twice", s->name);
    if (strlen(s->name) >= PARAM_NAME_MAX) return err_set(ERR_INTERNAL, "parameter name '%s' too long", s->name);
    int64_t sum = 0;
    for (int i = 0; i < PARAM_MAX_SECTIONS; i++) {
        sum += s->section[i];
        if (s->section[i] % s->interleave)
            return err_set(ERR_CONFIG, "%s: section of %lld rows does not divide into %lld chunks", s->name,
                           (long long)s->section[i], (long long)s->interleave);
    }
    if (sum && sum * s->stack != s->shape[0]) return err_set(ERR_INTERNAL, "%s: sections do not add up", s->name);
    const int shards = r->place.shards[s->cut[0]];
    if (sum && s->interleave % shards) /* a part would have rows of one section alone */
        return err_set(ERR_CONFIG, "%s: %lld chunks cannot be cut over %s=%d", s->name, (long long)s->interleave,
                       cut_names[s->cut[0]], shards),
               err_hint("parallel.%s must divide parallel.tp_blocks", cut_names[s->cut[0]]);
    return ERR_OK;
}

static Err check_cut(const ParamRegistry *r, const Param *p, const char *what, int64_t count, Cut axis)
{
    const int shards = r->place.shards[axis];
    if (count % shards == 0) return ERR_OK;
    return err_set(ERR_CONFIG, "%s: %lld %s cannot be cut over %s=%d", p->name, (long long)count, what, cut_names[axis],
                   shards);
}

static int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

Err param_add(ParamRegistry *r, ParamSpec spec, int *id)
{
    if (!spec.padded_rows) spec.padded_rows = spec.shape[0];
    if (!spec.interleave) spec.interleave = 1;
    if (!spec.stack) spec.stack = 1;
    if (!spec.init_repeat) spec.init_repeat = 1;
    if (spec.ndim == 1) spec.shape[1] = 1;
    TRY(grow(r));
    TRY(check_spec(r, &spec));
    Param *p = &r->items[r->count];
    snprintf(p->name, sizeof p->name, "%s", spec.name);
    p->spec = spec;
    p->spec.name = NULL; /* the caller's text may go; ours is p->name */
    p->copy = spec.flags & PARAM_COPY;
    const int64_t rows = spec.padded_rows / spec.stack;
    TRY(check_cut(r, p, "rows", rows, spec.cut[0]));
    TRY(check_cut(r, p, "columns", spec.shape[1], spec.cut[1]));
    TRY(check_cut(r, p, "matrices", spec.stack, spec.stack_cut));
    *p = shard_param(p, &r->place);
    p->moments = 2;
    p->unit = r->units;
    p->global = *id = r->count++;
    *name_entry(r, p->name) = r->count;
    return ERR_OK;
}

void param_begin_unit(ParamRegistry *r) { r->units++; }

int param_find(const ParamRegistry *r, const char *name) { return r->capacity ? *name_entry(r, name) - 1 : -1; }

Err param_number(ParamRegistry *r, const ParamRegistry *whole)
{
    for (int i = 0; i < r->count; i++) {
        r->items[i].global = param_find(whole, r->items[i].name);
        if (r->items[i].global < 0)
            return err_set(ERR_INTERNAL, "the whole model has no parameter '%s'", r->items[i].name);
    }
    return ERR_OK;
}

/* ---- layout ---- */

/* Few numbers are read often where weights are multiplied or added element by element, not by a product of matrices. */
static bool is_fp32(const ParamRegistry *r, const Param *p)
{
    const ParamSpec *s = &p->spec;
    const bool few = s->ndim == 1 || (s->flags & PARAM_TABLE && s->partial == PARTIAL_ROWS);
    return r->narrow && (s->flags & PARAM_FP32 || (r->fp32_vectors && few));
}

/* Elements of `value` that a number of the bucket takes. */
static int64_t value_elements(const Bucket *b) { return b->fp32 ? 2 : 1; }

static void close_bucket(ParamRegistry *r)
{
    Bucket *b = &r->buckets[r->bucket_count];
    if (!b->params) return;
    b->count = padded(r->flat_count - b->first, (int64_t)b->zero_shards * PARAM_ALIGN);
    const int64_t near = b->count / b->near_shards;
    r->flat_count = b->first + b->count;
    b->zero_first = r->zero_count;
    r->zero_count += b->count / b->zero_shards;
    r->value_count += (b->value_cut ? near : b->count) * value_elements(b);
    r->grad_count += b->grad_cut ? near : b->count;
    r->bucket_count++;
}

/* Are its gradients, and perhaps its values, whole only while somebody works on its unit? */
static bool cut_by_units(const ParamRegistry *r, const Param *p)
{
    const ParamSpec *s = &p->spec;
    const bool whole = s->partial == PARTIAL_NONE || s->partial == PARTIAL_STAGES;
    return r->place.zero >= ZERO_GRADS && s->ndim == 2 && s->group != PARAM_STATE && !is_fp32(r, p) &&
           (whole || r->place.shards[CUT_TP] == 1) && r->place.near_shards[s->group] > 1;
}

/* Kind by which a parameter is placed: with the rest of its unit, where no rank of tp has another part of its
 * gradient. */
static Partial partial_of(const ParamRegistry *r, const Param *p)
{
    return cut_by_units(r, p) && p->spec.partial != PARTIAL_STAGES ? PARTIAL_NONE : p->spec.partial;
}

static void open_bucket(ParamRegistry *r, const Param *p)
{
    Bucket *b = &r->buckets[r->bucket_count];
    const bool cut = cut_by_units(r, p);
    b->group = p->spec.group;
    b->zero_shards = r->place.zero_shards[b->group];
    b->zero_shard = r->place.zero_shard[b->group];
    b->near_shards = r->place.near_shards[b->group];
    b->near_shard = r->place.near_shard[b->group];
    b->first = r->flat_count;
    b->value_first = r->value_count;
    b->grad_first = r->grad_count;
    b->value_cut = cut && r->place.zero == ZERO_VALUES;
    b->grad_cut = cut;
    b->fp32 = is_fp32(r, p);
    b->unit = cut ? p->unit : -1;
}

static void place_param(ParamRegistry *r, int id, int nth)
{
    Param *p = &r->items[id];
    Bucket *b = &r->buckets[r->bucket_count];
    if (b->params && (b->unit != (cut_by_units(r, p) ? p->unit : -1) || b->fp32 != is_fp32(r, p))) {
        close_bucket(r);
        b++;
    }
    if (!b->params) open_bucket(r, p);
    b->params++;
    if (partial_of(r, p) != PARTIAL_NONE) b->partial = true;
    p->bucket = r->bucket_count;
    p->offset = r->flat_count;
    r->flat_count += padded(p->count, PARAM_ALIGN);
    r->order[nth] = id;
}

typedef enum { PLACED_UNITS, PLACED_WHOLE, PLACED_FP32, PLACED_KINDS } Placed;

static Placed placed_as(const ParamRegistry *r, const Param *p)
{
    return is_fp32(r, p) ? PLACED_FP32 : cut_by_units(r, p) ? PLACED_UNITS : PLACED_WHOLE;
}

/* The tensors of one kind, in backward's order, first those of units, then the others, those in fp32 last. */
static void place_kind(ParamRegistry *r, ParamGroup group, Partial kind, int64_t bucket_elems, int *nth)
{
    for (Placed as = 0; as < PLACED_KINDS; as++)
        for (int id = r->count - 1; id >= 0; id--) {
            const Param *p = &r->items[id];
            if (partial_of(r, p) != kind || p->spec.group != group || placed_as(r, p) != as) continue;
            place_param(r, id, (*nth)++);
            const Bucket *b = &r->buckets[r->bucket_count];
            if (b->unit < 0 && r->flat_count - b->first >= bucket_elems) close_bucket(r);
        }
}

/* Place in `grad` of the next parameter. */
static int64_t grad_end(const ParamRegistry *r)
{
    const Bucket *b = &r->buckets[r->bucket_count];
    return b->params ? b->grad_first + r->flat_count - b->first : r->grad_count;
}

Err param_layout(ParamRegistry *r, int64_t bucket_elems)
{
    int nth = 0;
    ASSERT(!r->flat_count);
    TRY(setup_array(r->setup, r->count + 1, &r->buckets)); /* one to look at behind the last */
    TRY(setup_array(r->setup, r->count, &r->order));
    place_kind(r, PARAM_EXPERT, PARTIAL_NONE, bucket_elems, &nth);
    close_bucket(r);
    for (Partial kind = PARTIAL_NONE; kind < PARTIAL_KINDS; kind++) {
        if (kind == PARTIAL_STAGES || r->buckets[r->bucket_count].grad_cut) close_bucket(r);
        r->partial_at[kind] = grad_end(r);
        place_kind(r, PARAM_DENSE, kind, bucket_elems, &nth);
    }
    close_bucket(r);
    place_kind(r, PARAM_STATE, PARTIAL_ROWS, bucket_elems, &nth);
    close_bucket(r);
    r->partial_at[PARTIAL_KINDS] = r->grad_count;
    ASSERT(nth == r->count);
    return ERR_OK;
}

/* The range of a parameter in one of `shards` parts of its bucket; where in a buffer that has this part at `first`. */
static ParamRange part_of(const ParamRegistry *r, int id, int shards, int shard, int64_t first)
{
    const Param *p = &r->items[id];
    const Bucket *b = &r->buckets[p->bucket];
    int64_t length = b->count / shards, start = b->first + shard * length;
    int64_t from = max64(start, p->offset), end = min64(start + length, p->offset + p->count);
    if (from >= end) return (ParamRange){ 0 };
    return (ParamRange){ from - p->offset, end - from, first + from - start };
}

ParamRange param_zero_shard_at(const ParamRegistry *r, int id, int shard)
{
    const Bucket *b = &r->buckets[r->items[id].bucket];
    return part_of(r, id, b->zero_shards, shard, b->zero_first);
}

ParamRange param_zero_shard(const ParamRegistry *r, int id)
{
    return param_zero_shard_at(r, id, r->buckets[r->items[id].bucket].zero_shard);
}

int64_t param_padding(const ParamRegistry *r)
{
    int64_t n = r->flat_count;
    for (int i = 0; i < r->count; i++) n -= r->items[i].count;
    return n;
}

int64_t param_total(const ParamRegistry *r)
{
    int64_t n = 0;
    for (int i = 0; i < r->count; i++) n += r->items[i].spec.shape[0] * r->items[i].spec.shape[1];
    return n;
}

int64_t param_trained(const ParamRegistry *r)
{
    int64_t n = param_total(r);
    for (int i = 0; i < r->count; i++)
        if (r->items[i].spec.group == PARAM_STATE) n -= r->items[i].spec.shape[0];
    return n;
}

Err grad_stats_init(GradStats *g, int count, bool gradients, Arena *state)
{
    *g = (GradStats){ .count = count };
    TRY(tensor_new(state, &g->shift, I32, count));
    TRY(tensor_new(state, &g->flags, I64, 2));
    g->overflow = tensor_of(g->flags.data, I32, 1);
    g->over_limit = tensor_of((int64_t *)g->flags.data + 1, I32, 1);
    if (!gradients) return ERR_OK;
    TRY(tensor_new(state, &g->next_shift, I32, count));
    TRY(tensor_new(state, &g->max, I64, count));
    return tensor_new(state, &g->sumsq, I64, count, 4);
}

/* Elements of m in a ZeRO shard whose parameters have one moment alone; padding behind them is of them. */
static int64_t without_v(const ParamRegistry *r, ParamGroup group, int shard)
{
    int64_t count = 0;
    for (int i = 0; i < r->count; i++)
        if (r->items[i].moments < 2 && r->items[i].spec.group == group)
            count += padded(param_zero_shard_at(r, i, shard).count, PARAM_ALIGN);
    return count;
}

/* Opens v like m, without parameters that have one moment alone. (Parameters begin at multiples of PARAM_ALIGN, and so
 * do shards.) All ranks take as much as the one whose shards have the most, so that they are alike. */
static Err open_v(ParamStore *s, DType dtype, Arena *state)
{
    const ParamRegistry *r = s->reg;
    int64_t without = 0, least = 0;
    TRY(setup_array(r->setup, r->count, &s->before));
    for (int i = 0; i < r->count; i++) {
        const int id = r->order[i];
        s->before[id] = without;
        if (r->items[id].moments < 2) without += padded(param_zero_shard(r, id).count, PARAM_ALIGN);
    }
    for (ParamGroup g = 0; g < PARAM_GROUPS; g++) {
        int64_t fewest = without_v(r, g, 0);
        for (int k = 1; k < r->place.zero_shards[g]; k++) fewest = min64(fewest, without_v(r, g, k));
        least += fewest;
    }
    return tensor_new(state, &s->v, dtype, r->zero_count - least);
}

/* Numbers [first, first + count) of what `value`, or one as it was before, has of a bucket. */
static Tensor value_slice(Tensor value, const Bucket *k, int64_t first, int64_t count)
{
    const DType dtype = k->fp32 ? F32 : value.dtype;
    char *at = (char *)value.data + k->value_first * dtype_size(value.dtype) + first * dtype_size(dtype);
    return tensor_of(at, dtype, count);
}

Err param_store_init(ParamStore *s, const ParamRegistry *reg, const GradStats *stats, StoreMemory memory,
                     StoreKinds kinds)
{
    Arena *state = memory.state;
    *s = (ParamStore){ .reg = reg, .stats = stats, .trained = kinds.grads != GRADS_NONE };
    TRY(tensor_new(state, &s->value, kinds.value, reg->value_count));
    TRY(setup_array(reg->setup, reg->bucket_count, &s->whole_value));
    for (int b = 0; b < reg->bucket_count; b++) {
        const Bucket *k = &reg->buckets[b];
        if (!k->value_cut) s->whole_value[b] = value_slice(s->value, k, 0, k->count);
    }
    ASSERT(reg->narrow == (kinds.value != F32));
    s->master = s->value;
    if (kinds.value != F32) TRY(tensor_new(memory.states, &s->master, F32, reg->zero_count));
    if (kinds.grads == GRADS_NONE) return ERR_OK;
    TRY(setup_array(reg->setup, reg->count, &s->fresh));
    param_store_begin(s);
    TRY(tensor_new(state, &s->grad, kinds.grads == GRADS_F32 ? F32 : I64, reg->grad_count));
    TRY(setup_array(reg->setup, reg->bucket_count, &s->whole_grad));
    for (int b = 0; b < reg->bucket_count; b++) {
        const Bucket *k = &reg->buckets[b];
        if (!k->grad_cut) s->whole_grad[b] = tensor_row_slice(s->grad, k->grad_first, k->count);
    }
    TRY(tensor_new(memory.states, &s->m, kinds.moments, reg->zero_count));
    return open_v(s, kinds.moments, memory.states);
}

/* Begin of a range of this rank's ZeRO shard, in its bucket or in this rank's near shard of that. */
static int64_t shard_at(const ParamRegistry *r, int id, ParamRange x, bool cut)
{
    const Bucket *b = &r->buckets[r->items[id].bucket];
    if (!x.count) return 0;
    const int64_t near = cut ? b->near_shard * (b->count / b->near_shards) : 0;
    return r->items[id].offset - b->first + x.first - near;
}

/* The same in `value`, and in `grad`. */
static int64_t value_at(const ParamRegistry *r, int id, ParamRange x)
{
    const Bucket *b = &r->buckets[r->items[id].bucket];
    return b->value_first + shard_at(r, id, x, b->value_cut) * value_elements(b);
}

static int64_t grad_at(const ParamRegistry *r, int id, ParamRange x)
{
    const Bucket *b = &r->buckets[r->items[id].bucket];
    return b->grad_first + shard_at(r, id, x, b->grad_cut);
}

FlatPart param_flat_part(const ParamStore *s, int id, int64_t first, int64_t count)
{
    const ParamRegistry *r = s->reg;
    const Param *p = &r->items[id];
    ParamRange x = param_zero_shard(r, id);
    ASSERT(first >= x.first && first + count <= x.first + x.count);
    x.at += first - x.first;
    x.first = first;
    const bool decays = p->spec.flags & PARAM_DECAY, counts = !p->copy && shard_owner(p, &r->place);
    const bool wide = r->buckets[p->bucket].fp32;
    return (FlatPart){ .grad = grad_at(r, id, x),
                       .value = value_at(r, id, x),
                       .shard = x.at,
                       .v = p->moments < 2 ? 0 : x.at - s->before[id],
                       .count = count,
                       .number = p->global,
                       .flags = (decays ? FLAT_DECAYS : 0) | (counts ? FLAT_COUNTS : 0) |
                                (p->spec.flags & PARAM_HIDDEN ? FLAT_HIDDEN : 0) | (wide ? FLAT_WIDE : 0) |
                                (p->as_matrix ? FLAT_MUON : 0) };
}

Err param_store_list_parts(ParamStore *s, Arena *state, Stream *stream)
{
    const ParamRegistry *r = s->reg;
    FlatPart *part;
    int n = 0;
    TRY(setup_array(r->setup, r->count, &part));
    s->chunks = 0;
    for (int i = 0; i < r->count; i++) {
        const Param *p = &r->items[i];
        const ParamRange x = param_zero_shard(r, i);
        if (p->spec.group == PARAM_STATE || !x.count) continue;
        part[n] = param_flat_part(s, i, x.first, x.count);
        part[n++].chunk = s->chunks;
        s->chunks += flat_chunks(x.count);
    }
    TRY(tensor_new(state, &s->parts, I64, n, sizeof *part / sizeof(int64_t)));
    return device_write(stream, s->parts.data, part, tensor_bytes(s->parts));
}

Err param_store_keep_older(ParamStore *s, int count, Arena *state)
{
    s->older_count = count;
    TRY(setup_array(s->reg->setup, count, &s->older));
    ASSERT(s->reg->place.zero < ZERO_VALUES);
    for (int i = 0; i < count; i++) TRY(tensor_new(state, &s->older[i], s->value.dtype, s->reg->value_count));
    return ERR_OK;
}

Err param_store_age(ParamStore *s, Stream *stream)
{
    if (s->older_count) {
        Tensor to = s->older[s->updates % s->older_count];
        TRY(device_copy(stream, to.data, s->value.data, tensor_bytes(to)));
    }
    s->updates++;
    return ERR_OK;
}

void param_store_forget(ParamStore *s)
{
    const ParamEights *e = &s->eights;
    for (int i = 0; i < s->reg->count && e->amax_known; i++) e->amax_known[i] = false;
    for (int i = 0; i < s->reg->count && e->cast; i++) e->cast[i] = false;
}

void param_store_begin(ParamStore *s)
{
    for (int i = 0; i < s->reg->count; i++) s->fresh[i] = true;
    param_store_forget(s);
}

Err param_store_clear_fresh(ParamStore *s, Stream *stream, int id)
{
    if (!s->fresh[id]) return ERR_OK;
    s->fresh[id] = false;
    return op(stream, fill_zero_acc, .x = tensor_reshape(param_store_grad(s, id), s->reg->items[id].count));
}

/* A parameter in all of its bucket. */
static Tensor view(const ParamStore *s, int id, Tensor whole)
{
    const Param *p = &s->reg->items[id];
    ASSERT(whole.data);
    char *at = (char *)whole.data + (p->offset - s->reg->buckets[p->bucket].first) * dtype_size(whole.dtype);
    if (p->spec.ndim == 1) return tensor_of(at, whole.dtype, p->local[0]);
    return tensor_of(at, whole.dtype, p->local[0], p->local[1]);
}

Tensor param_store_value(const ParamStore *s, int id, int age)
{
    const int b = s->reg->items[id].bucket;
    ASSERT(age >= 0 && age <= s->older_count && age <= s->updates);
    if (!age) return view(s, id, s->whole_value[b]);
    const Bucket *k = &s->reg->buckets[b];
    return view(s, id, value_slice(s->older[(s->updates - age) % s->older_count], k, 0, k->count));
}

Tensor param_store_grad(const ParamStore *s, int id) { return view(s, id, s->whole_grad[s->reg->items[id].bucket]); }

Tensor param_bucket_value(const ParamStore *s, int bucket)
{
    const Bucket *k = &s->reg->buckets[bucket];
    const int64_t count = k->count / k->near_shards;
    return value_slice(s->value, k, k->value_cut ? 0 : k->near_shard * count, count);
}

Tensor param_bucket_grad(const ParamStore *s, int bucket)
{
    const Bucket *k = &s->reg->buckets[bucket];
    const int64_t count = k->count / k->near_shards;
    return tensor_row_slice(s->grad, k->grad_first + (k->grad_cut ? 0 : k->near_shard * count), count);
}

Tensor param_bucket_own(const ParamStore *s, int bucket, Tensor near)
{
    const Bucket *k = &s->reg->buckets[bucket];
    const int64_t count = k->count / k->zero_shards, others = k->zero_shards / k->near_shards;
    return tensor_row_slice(near, k->zero_shard % others * count, count);
}

Tensor param_zero_shard_grad(const ParamStore *s, int id)
{
    const ParamRange x = param_zero_shard(s->reg, id);
    return tensor_row_slice(s->grad, grad_at(s->reg, id, x), x.count);
}

ParamRange param_held(const ParamStore *s, int id, Tensor flat)
{
    const Param *p = &s->reg->items[id];
    const Bucket *b = &s->reg->buckets[p->bucket];
    ParamRange x = param_zero_shard(s->reg, id);
    if (s->v.data && flat.data == s->v.data) {
        if (p->moments < 2) return (ParamRange){ 0 };
        x.at -= s->before[id];
    }
    if (flat.data != s->value.data) return x;
    if (!b->value_cut) return (ParamRange){ 0, p->count, b->value_first + p->offset - b->first };
    return part_of(s->reg, id, b->near_shards, b->near_shard, b->value_first);
}

int64_t param_origin(const ParamStore *s, int id, Tensor flat)
{
    const ParamRange x = param_held(s, id, flat);
    return x.at - x.first;
}

Tensor param_zero_shard_master(const ParamStore *s, int id)
{
    const ParamRange x = param_zero_shard(s->reg, id);
    const bool apart = s->master.data != s->value.data;
    return tensor_row_slice(s->master, apart ? x.at : value_at(s->reg, id, x), x.count);
}

Tensor param_zero_shard_value(const ParamStore *s, int id)
{
    const ParamRange x = param_zero_shard(s->reg, id);
    const Bucket *k = &s->reg->buckets[s->reg->items[id].bucket];
    return value_slice(s->value, k, shard_at(s->reg, id, x, k->value_cut), x.count);
}

Tensor param_store_shift(const ParamStore *s, int id)
{
    return tensor_row_slice(s->stats->shift, s->reg->items[id].global, 1);
}

ParamSet param_set_single(ParamStore *store, GradStats *stats)
{
    return (ParamSet){ store->reg, store->reg, 1, 1, store, 0, stats };
}

int64_t param_plain_row(const Param *p, int64_t r)
{
    const ParamSpec *s = &p->spec;
    const int64_t rows = s->shape[0] / s->stack, local = p->local[0] / p->matrices;
    int64_t row = p->first[0] + r % local, start = (p->first_matrix + r / local) * rows;
    if (row >= rows) return -1;
    if (!s->section[0]) return start + row;
    int64_t per_chunk = rows / s->interleave, chunk = row / per_chunk, in = row % per_chunk;
    for (int i = 0; i < PARAM_MAX_SECTIONS; i++) {
        int64_t part = s->section[i] / s->interleave;
        if (in < part) return start + chunk * part + in;
        in -= part;
        start += s->section[i];
    }
    ASSERT(!"row beyond the sections");
    return -1;
}

/*
 * Normal numbers, two per half of a Philox call, by Box and Muller; element i of a tensor uses counter i / 4.
 * Keyed by the plain global index: neither cut, padding nor interleaving enters.
 */
static float normal_at(const ParamSpec *s, uint64_t key, int64_t index)
{
    Philox r = philox(key, (uint32_t)(index >> 2), (uint32_t)(index >> 34), 0, 0);
    const uint32_t *u = &r.v[index & 2];
    double radius = sqrt(-2 * m_log(((double)u[0] + 1) * 0x1p-32)), angle = 2 * M_PI * (double)u[1] * 0x1p-32;
    return s->std * (float)(radius * (index & 1 ? m_sin(angle) : m_cos(angle)));
}

static float zero_at(const ParamSpec *s, uint64_t key, int64_t index)
{
    (void)s, (void)key, (void)index;
    return 0;
}

static float one_at(const ParamSpec *s, uint64_t key, int64_t index)
{
    (void)s, (void)key, (void)index;
    return 1;
}

/* Uniform in (0, 1). */
static double uniform_at(uint64_t key, int64_t index)
{
    const Philox r = philox(key, (uint32_t)(index >> 2), (uint32_t)(index >> 34), 0, 0);
    return ((double)r.v[index & 3] + 0.5) * 0x1p-32;
}

static float between_at(const ParamSpec *s, uint64_t key, int64_t index)
{
    return s->std * (float)(2 * uniform_at(key, index) - 1);
}

/* Rates of 1 to 16. */
static float log_rate_at(const ParamSpec *s, uint64_t key, int64_t index)
{
    (void)s;
    return (float)m_log(1 + 15 * uniform_at(key, index));
}

/* Times of 0.001 to 0.1, as many in each part of the logarithm: ln(e^t - 1) = t + ln(1 - e^-t). */
static float time_at(const ParamSpec *s, uint64_t key, int64_t index)
{
    (void)s;
    const double t = m_exp(m_log(0.001) + m_log(100) * uniform_at(key, index));
    return (float)(t + m_log(1 - m_exp(-t)));
}

/* Values by Init, for element `index` of the plain tensor, of which init_repeat rows are one. */
static float (*const begin_at[])(const ParamSpec *s, uint64_t key, int64_t index) = {
    [INIT_ZERO] = zero_at,       [INIT_ONE] = one_at,           [INIT_NORMAL] = normal_at,
    [INIT_UNIFORM] = between_at, [INIT_LOG_RATE] = log_rate_at, [INIT_TIME] = time_at,
};

/* Local elements [first, first + count). */
static void fill_elems(const Param *p, float *out, int64_t first, int64_t count, uint64_t key, int threads)
{
    const ParamSpec *s = &p->spec;
    const int64_t cols = p->local[1], end = first + count;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = first / cols; r <= (end - 1) / cols; r++) {
        int64_t row = param_plain_row(p, r);
        for (int64_t e = max64(r * cols, first); e < min64((r + 1) * cols, end); e++) {
            const int64_t index = row / s->init_repeat * s->shape[1] + p->first[1] + e - r * cols;
            out[e - first] = row < 0 ? 0 : begin_at[s->init](s, key, index);
        }
    }
}

/* Fills this rank's part of a parameter's master, by pieces of host memory, which the device then takes over. */
static Err fill_param(const ParamStore *s, int id, Stream *stream, float *host, uint64_t key, int threads)
{
    const Param *p = &s->reg->items[id];
    const ParamRange x = param_held(s, id, s->master);
    float *to = (float *)s->master.data + x.at;
    for (int64_t done = 0, count; done < x.count; done += count) {
        count = min64(x.count - done, FILL_ELEMS);
        fill_elems(p, host, x.first + done, count, key, threads);
        TRY(device_write(stream, to + done, host, count * (int64_t)sizeof *host));
    }
    return ERR_OK;
}

static Err publish(ParamStore *s, Stream *stream)
{
    const ParamRegistry *reg = s->reg;
    if (s->value.dtype == F32) return ERR_OK;
    for (int b = 0; b < reg->bucket_count; b++) {
        const Bucket *k = &reg->buckets[b];
        const Tensor near = param_bucket_value(s, b), own = param_bucket_own(s, b, near);
        TRY(op(stream, cast, .y = own, .x = tensor_row_slice(s->master, k->zero_first, tensor_count(own))));
        if (k->zero_shards > k->near_shards) TRY(comm_all_gather(s->far[k->group], stream, near, own, NULL));
        if (k->near_shards > 1 && !k->value_cut)
            TRY(comm_all_gather(s->group[k->group], stream, s->whole_value[b], near, NULL));
    }
    return ERR_OK;
}

Err param_set_publish(const ParamSet *s, Stream *stream)
{
    for (int i = 0; i < s->replicas; i++) TRY(publish(&s->stores[i ^ s->lower], stream));
    return ERR_OK;
}

Err param_store_fill(ParamStore *s, Stream *stream, uint64_t seed, int threads)
{
    if (stream->dev->is_null) return ERR_OK;
    float *host;
    TRY(setup_array(s->reg->setup, FILL_ELEMS, &host));
    for (int i = 0; i < s->reg->count; i++)
        TRY(fill_param(s, i, stream, host, rng_key(seed, s->reg->items[i].name), threads));
    return ERR_OK;
}
