/* See values.h. Pieces are kept by tensor, with where each lies in its file. A chunk is checked when something of it is
 * first read: in the reader's memory if all of it was wanted. */
#include "ckpt/values.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/int64.h"
#include "ckpt/manifest.h"

enum { PART_BYTES = 1 << 14 };

typedef struct {
    Box box;
    int file;
    int64_t offset;
} Value;

struct CkptValues {
    Manifest m;
    int *fds;            /* [files], -1: not open */
    _Atomic bool **good; /* [files][chunks] whether its checksum is known to be right */
    int64_t *start;      /* [params + 1] where its values begin in: */
    Value *values;
};

/* start: how many pieces each tensor has, then where the next one goes, then where they begin. */
static Err sort_pieces(CkptValues *v, SetupArena *a)
{
    const Manifest *m = &v->m;
    TRY(setup_array(a, m->param_count + 2, &v->start));
    TRY(setup_array(a, m->piece_count, &v->values));
    for (int64_t i = 0; i < m->piece_count; i++)
        if (m->pieces[i].state == STATE_VALUE) v->start[m->pieces[i].param + 2]++;
    for (int i = 2; i <= m->param_count; i++) v->start[i] += v->start[i - 1];
    return ERR_OK;
}

static Err read_file(CkptValues *v, int file, char *chunk)
{
    const Manifest *m = &v->m;
    SetupArena header;
    ChunkReader r;
    StFile f;
    int64_t size_bytes;
    setup_init(&header);
    Err err = manifest_open(m, file, chunk, &header, &r, &f);
    if (!err) err = err_as(file_open_regular(m->files[file].path, &v->fds[file], &size_bytes), ERR_CKPT);
    for (int64_t i = 0; !err && i < m->piece_count; i++) {
        const ManifestPiece *q = &m->pieces[i];
        const StTensor *t;
        if (q->file != file || q->state != STATE_VALUE) continue;
        err = manifest_tensor(m, q, &f, &t);
        if (!err) v->values[v->start[q->param + 1]++] = (Value){ q->box, file, t->offset };
    }
    setup_release(&header);
    return err;
}

Err ckpt_values_open(const char *path, SetupArena *a, CkptValues **out)
{
    CkptValues *v;
    char *chunk;
    *out = NULL;
    TRY(setup_array(a, 1, &v));
    TRY(manifest_read(path, a, &v->m));
    TRY(setup_array(a, v->m.file_count, &v->fds));
    for (int i = 0; i < v->m.file_count; i++) v->fds[i] = -1;
    *out = v;
    TRY(setup_array(a, v->m.file_count, &v->good));
    for (int i = 0; i < v->m.file_count; i++) TRY(setup_array(a, chunk_count(v->m.files[i].size_bytes), &v->good[i]));
    TRY(setup_array(a, CHUNK_BYTES, &chunk));
    TRY(sort_pieces(v, a));
    for (int i = 0; i < v->m.file_count; i++) TRY(read_file(v, i, chunk));
    return ERR_OK;
}

void ckpt_values_close(CkptValues *v)
{
    for (int i = 0; v && v->fds && i < v->m.file_count; i++)
        if (v->fds[i] >= 0) close(v->fds[i]);
}

/* Bytes [at, at + size) of a file. */
static Err read_bytes(const CkptValues *v, int file, int64_t at, void *out, int64_t size_bytes)
{
    const char *path = v->m.files[file].path;
    int64_t got;
    TRY_AS(ERR_CKPT, file_read_some(v->fds[file], path, at, out, size_bytes, &got));
    return got == size_bytes ? ERR_OK : err_set(ERR_CKPT, "'%s' ends too early", path);
}

static Err judge(const CkptValues *v, int file, int64_t chunk, uint32_t crc)
{
    const ManifestFile *f = &v->m.files[file];
    TRY(chunk_judge(f->path, f->size_bytes, f->crcs, chunk, crc));
    atomic_store_explicit(&v->good[file][chunk], true, memory_order_relaxed);
    return ERR_OK;
}

/* A chunk of which less is wanted than all. */
static Err check_chunk(const CkptValues *v, int file, int64_t chunk)
{
    char part[PART_BYTES];
    uint32_t crc = 0;
    const int64_t end = min64((chunk + 1) * CHUNK_BYTES, v->m.files[file].size_bytes);
    for (int64_t at = chunk * CHUNK_BYTES, n; at < end; at += n) {
        n = min64(PART_BYTES, end - at);
        TRY(read_bytes(v, file, at, part, n));
        crc = crc32c(crc, part, (size_t)n);
    }
    return judge(v, file, chunk, crc);
}

static Err read_run(const CkptValues *v, const Value *from, int64_t first, float *to, int64_t count)
{
    char *out = (char *)to;
    int64_t at = from->offset + first * (int64_t)sizeof *to;
    const int64_t end = at + count * (int64_t)sizeof *to;
    for (int64_t n; at < end; at += n, out += n) {
        const int64_t chunk = at / CHUNK_BYTES;
        const bool good = atomic_load_explicit(&v->good[from->file][chunk], memory_order_relaxed);
        n = min64(end, (chunk + 1) * CHUNK_BYTES) - at;
        if (!good && n < CHUNK_BYTES) TRY(check_chunk(v, from->file, chunk));
        TRY(read_bytes(v, from->file, at, out, n));
        if (!good && n == CHUNK_BYTES) TRY(judge(v, from->file, chunk, crc32c(0, out, (size_t)n)));
    }
    return ERR_OK;
}

static Err read_value(const CkptValues *v, const Value *from, Box box, float *out, int64_t ld)
{
    Box in;
    if (!box_intersect(from->box, box, &in)) return ERR_OK;
    const int64_t width = from->box.shape[1];
    int64_t rows = in.shape[0], columns = in.shape[1];
    const int64_t first = (in.offset[0] - from->box.offset[0]) * width + in.offset[1] - from->box.offset[1];
    out += (in.offset[0] - box.offset[0]) * ld + in.offset[1] - box.offset[1];
    if (columns == width && columns == ld) { /* rows touch on both sides */
        columns *= rows;
        rows = 1;
    }
    for (int64_t r = 0; r < rows; r++) TRY(read_run(v, from, first + r * width, out + r * ld, columns));
    return ERR_OK;
}

Err ckpt_values_read(const CkptValues *v, const char *name, Box box, float *out, int64_t ld)
{
    const int at = manifest_find(&v->m, name);
    if (at < 0) return err_set(ERR_CKPT, "checkpoint '%s' has no tensor '%s'", v->m.folder, name);
    for (int64_t i = v->start[at]; i < v->start[at + 1]; i++) TRY(read_value(v, &v->values[i], box, out, ld));
    return ERR_OK;
}

Err ckpt_values_fit(const CkptValues *v, const ParamRegistry *whole)
{
    for (int i = 0; i < whole->count; i++) {
        const Param *p = &whole->items[i];
        const int at = manifest_find(&v->m, p->name);
        const ManifestParam *q = at < 0 ? NULL : &v->m.params[at];
        if (!q || q->ndim != p->spec.ndim || memcmp(q->shape, p->spec.shape, sizeof q->shape) != 0)
            return err_set(ERR_CKPT, "checkpoint '%s' has tensor '%s' not, or not as its configuration says",
                           v->m.folder, p->name);
    }
    if (v->m.param_count == whole->count) return ERR_OK;
    return err_set(ERR_CKPT, "checkpoint '%s' has %d tensors, its configuration says %d", v->m.folder, v->m.param_count,
                   whole->count);
}

Err ckpt_tensor_shape(const char *path, const char *name, int64_t shape[2])
{
    SetupArena a;
    Manifest m;
    setup_init(&a);
    Err err = manifest_read(path, &a, &m);
    const int at = err ? -1 : manifest_find(&m, name);
    if (at >= 0) memcpy(shape, m.params[at].shape, sizeof m.params[at].shape);
    else if (!err) err = err_set(ERR_CKPT, "checkpoint '%s' has no tensor '%s'", path, name);
    setup_release(&a);
    return err;
}
