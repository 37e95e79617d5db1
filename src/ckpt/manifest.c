/* Reading and checking manifests; see manifest.h. Their files: manifest_files.c. The writing side is in save.c. */
#include "ckpt/manifest.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/folder.h"

const char *const ckpt_state_names[CKPT_STATES] = { "value", "m", "v" };
int64_t manifest_max_bytes = INT64_C(4) << 30;
static const char *const state_prefix[CKPT_STATES] = { "", "m/", "v/" };

enum { MAX_SIDE_BY_SIDE = 4096 }; /* pieces of a tensor that share rows: they are compared pairwise */

/* Limits of a manifest's numbers. Bounds that depend on others, of a shape or a piece, are checked there. */
typedef struct {
    int64_t low, high;
} Range;

static const int64_t STEPS_MOST = 1000000000000, COUNT_MOST = INT64_C(1) << 62; /* (sums do not overflow) */

static const Range format_range = { 1, INT64_MAX }, shift_range = { CKPT_SHIFT_MIN, CKPT_SHIFT_MAX },
                   crc_range = { 0, UINT32_MAX }, natural = { 0, INT64_MAX };

static const struct {
    const char *in, *key; /* `in` NULL: the manifest itself */
    size_t offset;        /* where its member lies in CkptMeta */
    Range range;
} meta_numbers[] = {
    { NULL, "step", offsetof(CkptMeta, step), { 0, STEPS_MOST } },
    { NULL, "samples", offsetof(CkptMeta, samples), { 0, COUNT_MOST } },
    { NULL, "tokens", offsetof(CkptMeta, tokens), { 0, COUNT_MOST } },
    { NULL, "seed", offsetof(CkptMeta, seed), { 0, INT64_MAX } },
    { "blocks", "tp", offsetof(CkptMeta, tp_blocks), { 0, 4096 } },
    { "blocks", "seq", offsetof(CkptMeta, seq_blocks), { 0, 65536 } },
    { "blocks", "attn", offsetof(CkptMeta, attn_block), { 0, 65536 } },
};

/* Counters of other names are whatever their writer likes. */
static const struct {
    const char *name;
    Range range;
} counter_ranges[] = { { "updates", { 0, COUNT_MOST } },
                       { "skipped", { 0, STEPS_MOST } },
                       { "loss_scale_log2", { 0, 32 } },
                       { "loss_scale_good_steps", { 0, STEPS_MOST } } };

void ckpt_key(char out[KEY_MAX], int state, const char *name, int ndim, Box piece, const int64_t global[2])
{
    const char *prefix = state_prefix[state];
    long long row = piece.offset[0], column = piece.offset[1];
    if (piece.shape[0] == global[0] && piece.shape[1] == global[1]) snprintf(out, KEY_MAX, "%s%s", prefix, name);
    else if (ndim == 1) snprintf(out, KEY_MAX, "%s%s#%lld", prefix, name, row);
    else snprintf(out, KEY_MAX, "%s%s#%lld,%lld", prefix, name, row, column);
}

const char *ckpt_dtype_name(DType dtype) { return dtype == BF16 ? "BF16" : "F32"; }

void manifest_crc_text(char out[64], uint32_t crc, int64_t size_bytes)
{
    snprintf(out, 64, "crc32c %08x size %lld\n", crc, (long long)size_bytes);
}

/* ---- parsing ---- */

/* The lists that grow with the model and the ranks are parsed item by item: as a tree they take 9 times their size. */
typedef enum { LIST_PARAMS, LIST_FILES, LIST_PIECES, LIST_COUNT } List;
static const char *const list_keys[LIST_COUNT] = { "parameters", "files", "pieces" };

/* State of a manifest's parsing: for messages, and for memory. */
typedef struct {
    const char *path;
    SetupArena *arena;
    Manifest *m;
    JsonSpan lists[LIST_COUNT];
} Parse;

static Err bad(const Parse *p, const char *what, const char *name)
{
    return err_set(ERR_CKPT, "'%s': %s '%s'", p->path, what, name);
}

static Err check_range(const Parse *p, const char *key, int64_t value, Range r)
{
    if (value >= r.low && value <= r.high) return ERR_OK;
    return err_set(ERR_CKPT, "'%s': impossible number '%s': %lld, where %lld to %lld can be", p->path, key,
                   (long long)value, (long long)r.low, (long long)r.high);
}

static Err get_int(const Parse *p, const Json *object, const char *key, Range range, int64_t *out)
{
    const Json *j = json_get(object, key);
    if (!json_is_int(j)) return bad(p, "missing or impossible number", key);
    *out = json_int(j, 0);
    return check_range(p, key, *out, range);
}

static Err get_text(const Parse *p, const Json *object, const char *key, const char **out)
{
    const char *text = json_text(json_get(object, key), NULL);
    if (!text) return bad(p, "missing text", key);
    return setup_strdup(p->arena, text, (char **)(uintptr_t)out);
}

/* A text that may be missing: "" then. */
static Err get_text_if(const Parse *p, const Json *object, const char *key, const char **out)
{
    *out = "";
    return json_get(object, key) ? get_text(p, object, key, out) : ERR_OK;
}

/* One or two numbers >= low; the second of a vector is `second`. */
static Err get_pair(const Parse *p, const Json *object, const char *key, int64_t low, int64_t second, int *ndim,
                    int64_t out[2])
{
    const Json *j = json_get(object, key);
    int64_t n = json_count(j);
    if (!json_is_array(j) || n < 1 || n > 2) return bad(p, "not one or two numbers:", key);
    out[0] = json_int(json_at(j, 0), -1);
    out[1] = n == 2 ? json_int(json_at(j, 1), -1) : second;
    if (out[0] < low || out[1] < (n == 2 ? low : second)) return bad(p, "impossible numbers:", key);
    *ndim = (int)n;
    return ERR_OK;
}

static Err count_items(const Parse *p, List list, int64_t most, int64_t *count)
{
    JsonSpan rest = p->lists[list], item;
    *count = 0;
    if (rest.text && *rest.text == '[')
        for (;; ++*count) {
            TRY_AS(ERR_CKPT, json_next_item(p->path, &rest, &item));
            if (!item.text) break;
        }
    if (!rest.text || *rest.text != ']' || *count > most) return bad(p, "missing or too long list", list_keys[list]);
    return ERR_OK;
}

/* Parses the items, which have been counted, in order. */
static Err each_item(const Parse *p, List list, Err (*parse)(const Parse *, const Json *, int64_t index))
{
    JsonSpan rest = p->lists[list], item;
    Json *j;
    for (int64_t i = 0;; i++) {
        TRY_AS(ERR_CKPT, json_next_item(p->path, &rest, &item));
        if (!item.text) return ERR_OK;
        TRY_AS(ERR_CKPT, json_parse(p->path, item.text, item.size_bytes, &j));
        Err err = parse(p, j, i);
        json_free(j);
        TRY(err);
    }
}

static Err check_counter(const Parse *p, const CkptMeta *meta, const CkptCounter *c)
{
    for (size_t i = 0; i < sizeof counter_ranges / sizeof *counter_ranges; i++)
        if (!strcmp(c->name, counter_ranges[i].name)) TRY(check_range(p, c->name, c->value, counter_ranges[i].range));
    if (strcmp(c->name, "skipped") || c->value <= meta->step) return ERR_OK;
    return err_set(ERR_CKPT, "'%s': %lld steps were skipped of %lld", p->path, (long long)c->value,
                   (long long)meta->step);
}

static Err parse_counters(const Parse *p, const Json *object, CkptMeta *meta)
{
    if (!json_is_object(object) || json_count(object) > CKPT_MAX_COUNTERS)
        return bad(p, "missing or too long object", "counters");
    for (void *it = json_iter(object); it; it = json_next(object, it)) {
        CkptCounter *c = &meta->counters[meta->counter_count++];
        if (!json_is_int(json_iter_value(it))) return bad(p, "not an integer:", json_iter_key(it));
        TRY(setup_strdup(p->arena, json_iter_key(it), (char **)(uintptr_t)&c->name));
        c->value = json_int(json_iter_value(it), 0);
        TRY(check_counter(p, meta, c));
    }
    return ERR_OK;
}

int64_t ckpt_counter(const CkptMeta *m, const char *name, int64_t otherwise)
{
    for (int i = 0; i < m->counter_count; i++)
        if (!strcmp(m->counters[i].name, name)) return m->counters[i].value;
    return otherwise;
}

/* A step that was not skipped is one update, or several of an asynchronous schedule, each of a sample at least. */
static Err check_updates(const Parse *p, const CkptMeta *m)
{
    const int64_t skipped = ckpt_counter(m, "skipped", 0), least = m->step - skipped;
    const int64_t updates = ckpt_counter(m, "updates", least);
    if (updates >= least && (updates == least || updates <= m->samples)) return ERR_OK;
    return err_set(ERR_CKPT,
                   "'%s': %lld updates do not belong to step %lld: %lld steps were skipped, %lld samples were read",
                   p->path, (long long)updates, (long long)m->step, (long long)skipped, (long long)m->samples);
}

static Err parse_valid(const Parse *p, const Json *list, CkptMeta *meta)
{
    if (!json_is_array(list) || json_count(list) > CKPT_MAX_VALID)
        return bad(p, "not a list, or a too long one:", "valid");
    for (int64_t i = 0; i < json_count(list); i++) {
        CkptValid *v = &meta->valid[meta->valid_count++];
        const Json *item = json_at(list, i), *loss = json_get(item, "loss");
        TRY(get_text(p, item, "set", &v->set));
        if (!json_is_number(loss)) return bad(p, "no validation loss on", v->set);
        v->loss = json_number(loss, NAN);
        if (json_get(item, "samples")) TRY(get_int(p, item, "samples", natural, &v->samples));
        if (json_get(item, "data")) TRY(get_int(p, item, "data", crc_range, &v->crc));
        v->has_content = json_get(item, "content") != NULL;
        if (v->has_content) TRY(get_int(p, item, "content", crc_range, &v->content));
    }
    return ERR_OK;
}

static Err parse_meta(const Parse *p, const Json *root, CkptMeta *meta)
{
    for (size_t i = 0; i < sizeof meta_numbers / sizeof *meta_numbers; i++) {
        const Json *in = meta_numbers[i].in ? json_get(root, meta_numbers[i].in) : root;
        int64_t *out = (int64_t *)((char *)meta + meta_numbers[i].offset);
        TRY(get_int(p, in, meta_numbers[i].key, meta_numbers[i].range, out));
    }
    TRY(get_text(p, root, "reproducible", &meta->reproducible));
    TRY(get_text(p, root, "program", &meta->program));
    TRY(get_text(p, root, "config", &meta->config));
    TRY(get_text(p, root, "data", &meta->data));
    TRY(get_text_if(p, root, "machine", &meta->machine)); /* (older checkpoints do not have these) */
    TRY(get_text_if(p, root, "job", &meta->job));
    TRY(get_text_if(p, root, "overrides", &meta->overrides));
    if (json_get(root, "valid")) TRY(parse_valid(p, json_get(root, "valid"), meta));
    TRY(parse_counters(p, json_get(root, "counters"), meta));
    return check_updates(p, meta);
}

/* No safetensors header takes these in a name. */
static bool has_control(const char *name)
{
    for (; *name; name++)
        if ((unsigned char)*name < 0x20 || *name == 0x7F) return true;
    return false;
}

static Err parse_param(const Parse *p, const Json *j, int64_t index)
{
    ManifestParam *q = &p->m->params[index];
    int64_t shift, elements;
    p->m->by_name[index] = (int)index;
    TRY(get_text(p, j, "name", &q->name));
    if (!*q->name || strlen(q->name) >= PARAM_NAME_MAX || strpbrk(q->name, "#/") || has_control(q->name))
        return bad(p, "impossible parameter name", q->name);
    TRY(get_pair(p, j, "shape", 1, 1, &q->ndim, q->shape));
    if (__builtin_mul_overflow(q->shape[0], q->shape[1], &elements) || elements > INT64_MAX / 8)
        return bad(p, "impossible shape of", q->name);
    Err err = get_int(p, j, "shift", shift_range, &shift);
    if (err) return err_prefix(err, "parameter '%s'", q->name);
    q->shift = (int32_t)shift;
    return ERR_OK;
}

static _Thread_local const Manifest *sorting; /* qsort has no argument for it */

static int by_param_name(const void *a, const void *b)
{
    return strcmp(sorting->params[*(const int *)a].name, sorting->params[*(const int *)b].name);
}

static Err parse_params(const Parse *p)
{
    Manifest *m = p->m;
    int64_t count;
    TRY(count_items(p, LIST_PARAMS, INT_MAX, &count));
    TRY(setup_array(p->arena, count, &m->params));
    TRY(setup_array(p->arena, count, &m->by_name));
    TRY(each_item(p, LIST_PARAMS, parse_param));
    m->param_count = (int)count;
    sorting = m;
    if (m->param_count) qsort(m->by_name, (size_t)m->param_count, sizeof *m->by_name, by_param_name);
    for (int i = 1; i < m->param_count; i++)
        if (by_param_name(&m->by_name[i - 1], &m->by_name[i]) == 0)
            return bad(p, "twice the parameter", m->params[m->by_name[i]].name);
    return ERR_OK;
}

int manifest_find(const Manifest *m, const char *name)
{
    int low = 0, high = m->param_count;
    while (low < high) {
        int mid = low + (high - low) / 2, order = strcmp(name, m->params[m->by_name[mid]].name);
        if (order == 0) return m->by_name[mid];
        if (order < 0) high = mid;
        else low = mid + 1;
    }
    return -1;
}

static Err parse_file(const Parse *p, const Json *j, int64_t index)
{
    ManifestFile *f = &p->m->files[index];
    const Json *crcs = json_get(j, "crc32c");
    char *path;
    TRY(get_text(p, j, "name", &f->name));
    size_t length = strlen(f->name);
    if (!length || length > CKPT_NAME_MAX || strchr(f->name, '/') || f->name[0] == '.')
        return bad(p, "impossible file name", f->name);
    TRY(setup_alloc(p->arena, (int64_t)(strlen(p->m->folder) + length) + 2, (void **)&path));
    sprintf(path, "%s/%s", p->m->folder, f->name);
    f->path = path;
    TRY(get_int(p, j, "size", natural, &f->size_bytes));
    if (!json_is_array(crcs) || json_count(crcs) != chunk_count(f->size_bytes))
        return bad(p, "wrong number of checksums of", f->name);
    TRY(setup_array(p->arena, json_count(crcs), &f->crcs));
    for (int64_t i = 0; i < json_count(crcs); i++) {
        TRY(check_range(p, "crc32c", json_int(json_at(crcs, i), -1), crc_range));
        f->crcs[i] = (uint32_t)json_int(json_at(crcs, i), 0);
    }
    if (index && strcmp(f[-1].name, f->name) >= 0) return bad(p, "files are not in order at", f->name);
    return ERR_OK;
}

static Err parse_files(const Parse *p)
{
    Manifest *m = p->m;
    int64_t count;
    TRY(count_items(p, LIST_FILES, 1 << 20, &count));
    TRY(setup_array(p->arena, count, &m->files));
    TRY(each_item(p, LIST_FILES, parse_file));
    m->file_count = (int)count;
    return ERR_OK;
}

static int find_file(const Manifest *m, const char *name)
{
    int low = 0, high = m->file_count;
    while (low < high) {
        int mid = low + (high - low) / 2, order = strcmp(name, m->files[mid].name);
        if (order == 0) return mid;
        if (order < 0) high = mid;
        else low = mid + 1;
    }
    return -1;
}

static int find_state(const char *name)
{
    for (int i = 0; i < CKPT_STATES; i++)
        if (!strcmp(name, ckpt_state_names[i])) return i;
    return -1;
}

static Err parse_piece(const Parse *p, const Json *j, int64_t index)
{
    ManifestPiece *q = &p->m->pieces[index];
    const char *name = json_text(json_get(j, "name"), NULL), *state = json_text(json_get(j, "state"), NULL);
    const char *file = json_text(json_get(j, "file"), NULL), *dtype = json_text(json_get(j, "dtype"), NULL);
    int64_t global[2];
    int ndim[3];
    if (!name || !state || !file || !dtype) return bad(p, "a piece without", "name, state, dtype or file");
    q->param = manifest_find(p->m, name);
    q->state = find_state(state);
    q->file = find_file(p->m, file);
    if (q->param < 0) return bad(p, "a piece of an unknown parameter", name);
    if (q->state < 0) return bad(p, "a piece of an unknown state", state);
    if (q->file < 0) return bad(p, "a piece in an unknown file", file);
    q->dtype = !strcmp(dtype, ckpt_dtype_name(BF16)) && q->state != STATE_VALUE ? BF16 : F32;
    if (strcmp(dtype, ckpt_dtype_name(q->dtype)))
        return err_set(ERR_CKPT, "'%s': '%s' has dtype '%s', '%s' is wanted", p->path, name, dtype, "F32");
    ManifestParam *t = &p->m->params[q->param];
    TRY(get_pair(p, j, "global", 1, 1, &ndim[0], global));
    TRY(get_pair(p, j, "offset", 0, 0, &ndim[1], q->box.offset));
    TRY(get_pair(p, j, "shape", 1, 1, &ndim[2], q->box.shape));
    for (int d = 0; d < 2; d++)
        if (ndim[0] != t->ndim || ndim[1] != t->ndim || ndim[2] != t->ndim || global[d] != t->shape[d] ||
            q->box.offset[d] > t->shape[d] - q->box.shape[d])
            return bad(p, "a piece lies outside of", name);
    t->has[q->state] = true;
    q->crc = -1;
    return json_get(j, "crc32c") ? get_int(p, j, "crc32c", crc_range, &q->crc) : ERR_OK;
}

static int by_tensor(const void *a, const void *b)
{
    const ManifestPiece *x = a, *y = b;
    if (x->param != y->param) return x->param < y->param ? -1 : 1;
    return (x->state > y->state) - (x->state < y->state);
}

static int by_file(const void *a, const void *b)
{
    const ManifestPiece *x = a, *y = b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->param != y->param) return x->param < y->param ? -1 : 1;
    if (x->box.offset[0] != y->box.offset[0]) return x->box.offset[0] < y->box.offset[0] ? -1 : 1;
    return (x->box.offset[1] > y->box.offset[1]) - (x->box.offset[1] < y->box.offset[1]);
}

/* The pieces of one state of one tensor by their first rows. */
static int by_place(const void *a, const void *b)
{
    const ManifestPiece *x = a, *y = b;
    if (by_tensor(a, b)) return by_tensor(a, b);
    for (int d = 0; d < 2; d++)
        if (x->box.offset[d] != y->box.offset[d]) return x->box.offset[d] < y->box.offset[d] ? -1 : 1;
    return 0;
}

/* n pieces of one state of one tensor, by_place: disjoint, and as many elements as it has. */
static Err check_tiling(const Parse *p, const ManifestPiece *q, int64_t n)
{
    const ManifestParam *t = &p->m->params[q->param];
    int64_t elements = 0, first = 0; /* first: those before it end above piece i and all that follow */
    Box x;
    for (int64_t i = 0; i < n; i++) {
        elements += box_count(q[i].box); /* cannot overflow: both terms are below INT64_MAX / 8 */
        if (elements > t->shape[0] * t->shape[1]) break;
        while (q[first].box.offset[0] + q[first].box.shape[0] <= q[i].box.offset[0]) first++;
        if (i - first > MAX_SIDE_BY_SIDE) return bad(p, "too many pieces side by side of", t->name);
        for (int64_t k = first; k < i; k++)
            if (box_intersect(q[i].box, q[k].box, &x)) return bad(p, "overlapping pieces of", t->name);
    }
    if (elements != t->shape[0] * t->shape[1]) return bad(p, "pieces do not make up the whole of", t->name);
    return ERR_OK;
}

/* The pieces, by file, fit into their files: no sum of their bytes overflows. */
static Err check_room(const Parse *p)
{
    int64_t left = 0;
    for (int64_t i = 0; i < p->m->piece_count; i++) {
        const ManifestPiece *q = &p->m->pieces[i];
        if (i == 0 || q->file != q[-1].file) left = p->m->files[q->file].size_bytes;
        left -= dtype_size(q->dtype) * box_count(q->box);
        if (left < 0) return bad(p, "the pieces are larger than their file", p->m->files[q->file].name);
    }
    return ERR_OK;
}

static Err parse_pieces(const Parse *p)
{
    Manifest *m = p->m;
    TRY(count_items(p, LIST_PIECES, INT_MAX, &m->piece_count));
    TRY(setup_array(p->arena, m->piece_count, &m->pieces));
    TRY(each_item(p, LIST_PIECES, parse_piece));
    if (!m->piece_count) return ERR_OK;
    qsort(m->pieces, (size_t)m->piece_count, sizeof *m->pieces, by_place);
    for (int64_t i = 0, n; i < m->piece_count; i += n) {
        for (n = 1; i + n < m->piece_count && by_tensor(&m->pieces[i], &m->pieces[i + n]) == 0; n++) continue;
        TRY(check_tiling(p, &m->pieces[i], n));
    }
    qsort(m->pieces, (size_t)m->piece_count, sizeof *m->pieces, by_file);
    TRY(check_room(p));
    for (int i = 0; i < m->param_count; i++)
        if (!m->params[i].has[STATE_VALUE]) return bad(p, "no pieces of", m->params[i].name);
    return ERR_OK;
}

static Err parse_root(const Parse *p, const Json *root)
{
    TRY(get_int(p, root, "format", format_range, &p->m->format));
    if (p->m->format > CKPT_FORMAT)
        return err_set(ERR_CKPT, "'%s' has format version %lld, this program reads up to %d", p->path,
                       (long long)p->m->format, CKPT_FORMAT),
               err_hint("it was written by a newer megatrain: use that one");
    TRY(parse_meta(p, root, &p->m->meta));
    TRY(parse_params(p));
    TRY(parse_files(p));
    return parse_pieces(p);
}

/* Compares with manifest.crc, letter by letter. */
static Err check_crc(const char *folder, const char *path, const char *text, int64_t size_bytes)
{
    char crc_path[PATH_MAX], want[64], *found;
    int64_t found_bytes;
    if (snprintf(crc_path, sizeof crc_path, "%s/manifest.crc", folder) >= (int)sizeof crc_path)
        return err_set(ERR_CKPT, "path is too long: '%s'", folder);
    manifest_crc_text(want, crc32c(0, text, (size_t)size_bytes), size_bytes);
    TRY_AS(ERR_CKPT, file_read_all(crc_path, 4096, &found, &found_bytes));
    bool same = found_bytes == (int64_t)strlen(want) && !memcmp(found, want, strlen(want));
    free(found);
    if (same) return ERR_OK;
    return err_set(ERR_CKPT, "'%s' is damaged: it does not agree with '%s'", path, crc_path);
}

/* Refuses a step-N folder that holds another step. Folders are found by name, and whoever may write in a run's folder
 * must lead nobody elsewhere by a link. */
static Err check_is_own(const char *folder)
{
    CkptEntry e;
    return entry_of_path(folder, &e) ? err_as(file_check_link(folder), ERR_STORAGE) : ERR_OK;
}

/* And step-N holds the checkpoint of step N. */
static Err check_name(const Manifest *m)
{
    CkptEntry e;
    if (!entry_of_path(m->folder, &e) || e.step == m->meta.step) return ERR_OK;
    return err_set(ERR_CKPT, "'%s' holds a checkpoint of step %lld", m->folder, (long long)m->meta.step),
           err_hint("a folder that is called step-N is taken for step N: give it its name back");
}

Err manifest_read(const char *folder, SetupArena *a, Manifest *m)
{
    char path[PATH_MAX], *text;
    int64_t size_bytes;
    Json *root = NULL;
    *m = (Manifest){ 0 };
    if (snprintf(path, sizeof path, "%s/manifest.json", folder) >= (int)sizeof path)
        return err_set(ERR_CKPT, "path is too long: '%s'", folder);
    TRY(check_is_own(folder));
    TRY(setup_strdup(a, folder, (char **)(uintptr_t)&m->folder));
    TRY_AS(ERR_CKPT, file_read_all(path, manifest_max_bytes, &text, &size_bytes));
    Err err = check_crc(folder, path, text, size_bytes);
    Parse p = { .path = path, .arena = a, .m = m };
    if (!err) err = err_as(json_parse_without(path, text, size_bytes, list_keys, LIST_COUNT, p.lists, &root), ERR_CKPT);
    if (!err) err = parse_root(&p, root);
    if (!err) err = check_name(m);
    json_free(root);
    free(text);
    return err;
}
