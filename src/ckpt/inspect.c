/*
 * Answers questions about a checkpoint without a model: is every byte right, what is in it, is it the same as another.
 */
#include <string.h>

#include "base/plain.h"
#include "base/rng.h"
#include "base/words.h"
#include "ckpt/manifest.h"

typedef struct {
    SetupArena arena;
    Manifest m;
    char *chunk;
} Inspect;

static Err inspect_open(Inspect *x, const char *path)
{
    TRY(manifest_read(path, &x->arena, &x->m));
    return setup_array(&x->arena, CHUNK_BYTES, &x->chunk);
}

/* Calls `visit` for each file, opened, with its header parsed. */
static Err for_each_file(const char *path, Err (*visit)(Inspect *, int, ChunkReader *, const StFile *, void *),
                         void *arg)
{
    Inspect x = { 0 };
    setup_init(&x.arena);
    Err err = inspect_open(&x, path);
    for (int i = 0; !err && i < x.m.file_count; i++) {
        SetupArena a;
        ChunkReader r;
        StFile f;
        setup_init(&a);
        err = manifest_open(&x.m, i, x.chunk, &a, &r, &f);
        if (!err) err = manifest_blame(&x.m, &r, visit(&x, i, &r, &f, arg));
        setup_release(&a);
    }
    setup_release(&x.arena);
    return err;
}

static Err verify_file(Inspect *x, int file, ChunkReader *r, const StFile *f, void *unused)
{
    int64_t pieces = 0;
    const StTensor *t;
    (void)unused;
    for (int64_t i = 0; i < x->m.piece_count; i++) {
        if (x->m.pieces[i].file != file) continue;
        TRY(manifest_tensor(&x->m, &x->m.pieces[i], f, &t));
        pieces++;
    }
    if (pieces != f->count)
        return err_set(ERR_CKPT, "'%s' has %lld tensors, the manifest lists %lld", r->path, (long long)f->count,
                       (long long)pieces);
    return chunk_check_all(r);
}

Err ckpt_verify(const char *path) { return for_each_file(path, verify_file, NULL); }

/* ---- digest ---- */

enum { DIGEST_RUN = 1024 }; /* elements */

/* Reads n elements of a piece from number `at` on, as the bits of floats. */
static Err get_bits(const ManifestPiece *q, ChunkReader *r, int64_t offset, uint32_t *bits, int64_t n)
{
    uint16_t narrow[DIGEST_RUN];
    if (q->dtype == F32) return chunk_get(r, offset, bits, n * dtype_size(F32));
    TRY(chunk_get(r, offset, narrow, n * dtype_size(BF16)));
    for (int64_t i = 0; i < n; i++) bits[i] = (uint32_t)narrow[i] << 16;
    return ERR_OK;
}

/* The sum over elements of a mix of their global index and bits: order plays no part. */
static Err digest_piece(const ManifestPiece *q, const ManifestParam *p, ChunkReader *r, int64_t offset, uint64_t *sum)
{
    uint32_t bits[DIGEST_RUN];
    uint64_t key = rng_mix(rng_key((uint64_t)q->state, p->name) + (uint64_t)p->shape[1]);
    int64_t count = box_count(q->box);
    for (int64_t at = 0, n; at < count; at += n) {
        n = count - at < DIGEST_RUN ? count - at : DIGEST_RUN;
        TRY(get_bits(q, r, offset + at * dtype_size(q->dtype), bits, n));
        for (int64_t i = 0; i < n; i++) {
            int64_t row = q->box.offset[0] + (at + i) / q->box.shape[1];
            int64_t column = q->box.offset[1] + (at + i) % q->box.shape[1];
            *sum += rng_mix(rng_mix(key ^ (uint64_t)(row * p->shape[1] + column)) + bits[i]);
        }
    }
    return ERR_OK;
}

static Err digest_file(Inspect *x, int file, ChunkReader *r, const StFile *f, void *sum)
{
    for (int64_t i = 0; i < x->m.piece_count; i++) {
        const ManifestPiece *q = &x->m.pieces[i];
        const StTensor *t;
        if (q->file != file) continue;
        TRY(manifest_tensor(&x->m, q, f, &t));
        TRY(digest_piece(q, &x->m.params[q->param], r, t->offset, sum));
    }
    return ERR_OK;
}

Err ckpt_digest(const char *path, uint64_t *out)
{
    *out = 0;
    return for_each_file(path, digest_file, out);
}

/* ---- print ---- */

static void put_text(const char *text, FILE *out) { plain_put(out, text, (int64_t)strlen(text), PLAIN_LINE); }

/* A text of several lines. */
static void print_lines(const char *label, const char *text, FILE *out)
{
    for (const char *at = text; *at; at += strcspn(at, "\n"), at += *at == '\n', label = "") {
        fprintf(out, "%-13s ", label);
        plain_put(out, at, (int64_t)strcspn(at, "\n"), PLAIN_LINE);
        fputc('\n', out);
    }
}

static void print_counter(const CkptCounter *c, FILE *out)
{
    char name[CKPT_NAME_MAX];
    text_cut(name, sizeof name, c->name);
    plain_make(name, PLAIN_LINE);
    fprintf(out, "%-13s %lld\n", name, (long long)c->value);
}

static void print_valid(const CkptValid *v, FILE *out)
{
    fprintf(out, "%-13s %.6f%s", "valid loss", v->loss, *v->set ? " on " : "");
    put_text(v->set, out);
    if (v->samples) fprintf(out, " (%lld samples)", (long long)v->samples);
    fputc('\n', out);
}

static void print_meta(const Manifest *m, FILE *out)
{
    const CkptMeta *a = &m->meta;
    int64_t bytes = 0, elements = 0;
    for (int i = 0; i < m->file_count; i++) bytes += m->files[i].size_bytes;
    for (int i = 0; i < m->param_count; i++) elements += m->params[i].shape[0] * m->params[i].shape[1];
    fprintf(out, "checkpoint    ");
    put_text(m->folder, out);
    fprintf(out, "\nformat        %lld, written by ", (long long)m->format);
    put_text(a->program, out);
    fputc('\n', out);
    print_lines("machine", a->machine, out);
    print_lines("job", a->job, out);
    fprintf(out, "step          %lld   samples %lld   tokens %lld\n", (long long)a->step, (long long)a->samples,
            (long long)a->tokens);
    fprintf(out, "seed          %lld   reproducible ", (long long)a->seed);
    put_text(a->reproducible, out);
    fprintf(out, "   blocks tp %lld seq %lld attn %lld\n", (long long)a->tp_blocks, (long long)a->seq_blocks,
            (long long)a->attn_block);
    print_lines("data", a->data, out);
    print_lines("overrides", a->overrides, out);
    for (int i = 0; i < a->counter_count; i++) print_counter(&a->counters[i], out);
    for (int i = 0; i < a->valid_count; i++) print_valid(&a->valid[i], out);
    fprintf(out, "contents      %d tensors, %lld parameters, %lld bytes in %d files\n\n", m->param_count,
            (long long)elements, (long long)bytes, m->file_count);
}

static DType dtype_of(const Manifest *m, int param, int state)
{
    int64_t i = 0;
    while (m->pieces[i].param != param || m->pieces[i].state != state) i++;
    return m->pieces[i].dtype;
}

static void print_param(const Manifest *m, int id, FILE *out)
{
    const ManifestParam *p = &m->params[id];
    char shape[64], name[PARAM_NAME_MAX];
    int pieces = 0;
    for (int64_t i = 0; i < m->piece_count; i++)
        pieces += m->pieces[i].param == id && m->pieces[i].state == STATE_VALUE;
    if (p->ndim == 1) snprintf(shape, sizeof shape, "[%lld]", (long long)p->shape[0]);
    else snprintf(shape, sizeof shape, "[%lld, %lld]", (long long)p->shape[0], (long long)p->shape[1]);
    text_cut(name, sizeof name, p->name);
    plain_make(name, PLAIN_LINE);
    fprintf(out, "%-40s F32 %-18s %3d piece%s shift %-4d", name, shape, pieces, pieces == 1 ? " " : "s", p->shift);
    for (int s = 0; s < CKPT_STATES; s++)
        if (p->has[s]) fprintf(out, " %s%s", ckpt_state_names[s], dtype_of(m, id, s) == BF16 ? " (BF16)" : "");
    fputc('\n', out);
}

Err ckpt_print(const char *path, FILE *out)
{
    SetupArena a;
    Manifest m;
    setup_init(&a);
    Err err = manifest_read(path, &a, &m);
    if (!err) {
        print_meta(&m, out);
        for (int i = 0; i < m.param_count; i++) print_param(&m, i, out);
    }
    setup_release(&a);
    return err;
}
