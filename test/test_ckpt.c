/*
 * Checkpoints: what is written is what a plain parser reads, any layout loads what any other saved, damage of
 * any byte is found and named, and whatever file operation of a save fails or is the last one before kill -9,
 * the previous checkpoint stays and no half one is ever taken for whole.
 *
 * Every element has a value that follows from parameter, state, plain index and step, so that whatever is loaded
 * can be checked without the thing that was saved. Faults run in a child: this program again, with CKPT_CHILD.
 */
#include "test.h"

#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "ckpt/chunks.h"
#include "ckpt/ckpt.h"
#include "ckpt/safetensors.h"

enum { MAX_RANKS = 8 };

/* ---- a model on a grid of thread-ranks ---- */

typedef struct {
    bool big;          /* with a tensor of more than a chunk */
    bool weights_only; /* no moments */
    int change;        /* 1: a tensor fewer, 2: one more, 3: another shape */
} ModelKind;

static Err add_params(ParamRegistry *r, ModelKind k)
{
    int id;
    TRY(param_add(r, (ParamSpec){ .name = "embed.weight", .ndim = 2, .shape = { 37, 6 }, .padded_rows = 64, .cut = { CUT_TP } }, &id));
    TRY(param_add(r, (ParamSpec){ .name = "qkv.weight", .ndim = 2, .shape = { 32, k.change == 3 ? 6 : 5 }, .cut = { CUT_TP },
                                  .section = { 16, 8, 8 }, .interleave = 4 }, &id));
    TRY(param_add(r, (ParamSpec){ .name = "qkv.bias", .ndim = 1, .shape = { 32 }, .cut = { CUT_TP },
                                  .section = { 16, 8, 8 }, .interleave = 8 }, &id));
    TRY(param_add(r, (ParamSpec){ .name = "out.weight", .ndim = 2, .shape = { 5, 16 }, .cut = { CUT_NONE, CUT_TP } }, &id));
    if (k.change != 1) TRY(param_add(r, (ParamSpec){ .name = "norm.weight", .ndim = 1, .shape = { 7 } }, &id));
    if (k.change == 2) TRY(param_add(r, (ParamSpec){ .name = "more.weight", .ndim = 1, .shape = { 7 } }, &id));
    if (k.big) TRY(param_add(r, (ParamSpec){ .name = "big.weight", .ndim = 2, .shape = { 1000, 520 }, .cut = { CUT_TP } }, &id));
    return ERR_OK;
}

typedef struct {
    Grid grid;
    ModelKind kind;
    const char *run_dir, *path; /* where to save, what to load */
    int64_t step;               /* saved, or expected */
    int keep, saves;            /* checkpoints step .. step + saves - 1; 0 = 1 */
    bool load_weights_only, poison;
    /* out */
    Err err[MAX_RANKS];
    char message[MAX_RANKS][512];
    int64_t wrong[MAX_RANKS];
    bool damaged;
    CkptMeta meta; /* of rank 0; its texts are gone */
} Job;

typedef struct {
    Job *job;
    int rank;
    World world;
    SetupArena setup;
    ParamRegistry reg;
    ParamStore store;
    Device dev;
    void *memory;
} Rank;

static float element(int param, int state, int64_t index, int64_t step)
{
    return (float)(state * 4000000 + param * 600000 + index + step * 7);
}

static float *flat_of(Rank *r, int state)
{
    return state == 0 ? r->store.value.data : state == 1 ? r->store.m.data : r->store.v.data;
}

/* Plain index of a local element, by the definition in param.c; -1 for padding. */
static int64_t plain_index(const Param *p, int64_t at)
{
    int64_t row = param_plain_row(p, at / p->local[1]);
    return row < 0 ? -1 : row * p->spec.shape[1] + p->first[1] + at % p->local[1];
}

static Err rank_open(Rank *r)
{
    Arena state;
    Job *j = r->job;
    size_t bytes = j->kind.big ? 16 << 20 : 1 << 18;
    setup_init(&r->setup);
    param_registry_init(&r->reg, &r->setup, j->grid.tp, r->world.tp_rank);
    TRY(add_params(&r->reg, j->kind));
    r->dev = (Device){ .name = "cpu", .threads = 1 };
    r->dev.stream.dev = &r->dev;
    r->memory = aligned_alloc(ARENA_ALIGN, bytes);
    memset(r->memory, j->poison ? 0xFF : 0, bytes);
    arena_init(&state, "state", r->memory, (int64_t)bytes);
    return param_store_init(&r->store, &r->reg, &state, I64, j->kind.weights_only);
}

static void rank_fill(Rank *r, int64_t step)
{
    for (int i = 0; i < r->reg.count; i++) {
        const Param *p = &r->reg.items[i];
        ((int32_t *)r->store.shift.data)[i] = 20 + i + (int32_t)step;
        for (int s = 0; s < (r->job->kind.weights_only ? 1 : 3); s++)
            for (int64_t e = 0; e < p->count; e++)
                flat_of(r, s)[p->offset + e] =
                    plain_index(p, e) < 0 ? NAN : element(i, s, plain_index(p, e), step);
    }
}

/* Elements that are not what `step` should have given; padding and gaps must be 0. */
static int64_t rank_wrong(Rank *r, int64_t step)
{
    int64_t wrong = 0, gap = 0;
    for (int s = 0; s < (r->job->kind.weights_only ? 1 : 3); s++) {
        gap = 0;
        for (int i = 0; i < r->reg.count; i++) {
            const Param *p = &r->reg.items[i];
            for (; gap < p->offset; gap++) wrong += !(flat_of(r, s)[gap] == 0);
            for (int64_t e = 0; e < p->count; e++, gap++) {
                int64_t at = plain_index(p, e);
                float want = at < 0 || (s && r->job->load_weights_only) ? 0 : element(i, s, at, step);
                wrong += !(flat_of(r, s)[p->offset + e] == want);
            }
            if (!s && !r->job->load_weights_only) wrong += ((int32_t *)r->store.shift.data)[i] != 20 + i + step;
        }
    }
    return wrong;
}

static CkptMeta meta_of(int64_t step)
{
    return (CkptMeta){ .step = step, .samples = 15 * step, .tokens = 960 * step, .seed = -5, .tp_blocks = 8,
                       .seq_blocks = 4, .attn_block = 64, .reproducible = "layout", .program = "megatrain test",
                       .config = "[run]\nname = \"x\"\t\\ \xc3\xbc\n", .data = "corpus 123",
                       .counters = { { "skipped", 3 }, { "updates", INT64_MAX } }, .counter_count = 2 };
}

static Err rank_save(Rank *r)
{
    Job *j = r->job;
    Ckpt c;
    TRY(rank_open(r));
    TRY(ckpt_open(&c, (CkptOptions){ j->run_dir, &r->store, &r->world, &r->dev.stream, j->keep, 1000 }, &r->setup));
    setup_freeze(&r->setup); /* saving allocates nothing */
    for (int64_t step = j->step; step < j->step + (j->saves ? j->saves : 1); step++) {
        CkptMeta meta = meta_of(step);
        rank_fill(r, step);
        TRY(ckpt_save(&c, &meta));
    }
    return ERR_OK;
}

static Err rank_load(Rank *r)
{
    Job *j = r->job;
    bool damaged;
    CkptMeta meta;
    TRY(rank_open(r));
    CkptLoad l = { j->path, &r->store, &r->world, &r->dev.stream, j->load_weights_only };
    Err err = ckpt_load(&l, &r->setup, &meta, &damaged);
    if (r->rank == 0) j->damaged = damaged;
    if (err) return err;
    CkptMeta want = meta_of(j->step);
    j->wrong[r->rank] = rank_wrong(r, j->step);
    j->wrong[r->rank] += strcmp(meta.config, want.config) || strcmp(meta.data, want.data) || meta.seed != -5 ||
                         strcmp(meta.program, want.program) || strcmp(meta.reproducible, "layout") ||
                         ckpt_counter(&meta, "updates", 0) != INT64_MAX || ckpt_counter(&meta, "none", 9) != 9;
    if (r->rank == 0) j->meta = meta;
    return ERR_OK;
}

typedef struct {
    Rank rank;
    CommHub *hub;
    Err (*run)(Rank *);
} RankThread;

static void *rank_main(void *arg)
{
    RankThread *t = arg;
    Rank *r = &t->rank;
    Job *j = r->job;
    Err err = grid_size(j->grid) == 1 ? world_open_self(&r->world) : world_open_threads(&r->world, t->hub, j->grid, r->rank);
    bool opened = !err;
    if (!err) err = t->run(r);
    j->err[r->rank] = err;
    snprintf(j->message[r->rank], sizeof j->message[0], "%s", err ? err_message() : "");
    if (opened) world_close(&r->world);
    setup_release(&r->setup);
    free(r->memory);
    return NULL;
}

/* Runs all ranks; the kind they agree on, with rank 0's message as this thread's. */
static Err run_ranks(Job *j, Err (*run)(Rank *))
{
    int size = grid_size(j->grid);
    pthread_t threads[MAX_RANKS];
    static RankThread t[MAX_RANKS];
    CommHub *hub = NULL;
    if (size > 1) TRY(comm_hub_open(size, 0, &hub));
    for (int i = 0; i < size; i++) {
        t[i] = (RankThread){ .rank = { .job = j, .rank = i }, .hub = hub, .run = run };
        pthread_create(&threads[i], NULL, rank_main, &t[i]);
    }
    for (int i = 0; i < size; i++) pthread_join(threads[i], NULL);
    if (hub) comm_hub_close(hub);
    for (int i = 0; i < size; i++)
        if (!j->err[i] != !j->err[0]) return err_set(ERR_INTERNAL, "ranks disagree: %s", j->message[i]);
    return j->err[0] ? err_set(j->err[0], "%s", j->message[0]) : ERR_OK;
}

static Err save(Grid g, ModelKind k, const char *dir, int64_t step, int keep)
{
    Job j = { .grid = g, .kind = k, .run_dir = dir, .step = step, .keep = keep };
    return run_ranks(&j, rank_save);
}

/* Loads into poisoned memory; ERR_INTERNAL when an element is wrong. */
static Err load(Grid g, ModelKind k, const char *path, int64_t step)
{
    Job j = { .grid = g, .kind = k, .path = path, .step = step, .poison = true };
    TRY(run_ranks(&j, rank_load));
    if (j.meta.step != step || j.meta.samples != 15 * step || j.meta.tokens != 960 * step)
        return err_set(ERR_INTERNAL, "wrong numbers in the meta data");
    for (int i = 0; i < grid_size(g); i++)
        if (j.wrong[i]) return err_set(ERR_INTERNAL, "rank %d: %lld wrong elements", i, (long long)j.wrong[i]);
    return ERR_OK;
}

/* ---- folders ---- */

static const Grid ONE = { 1, 1, false };
static const ModelKind SMALL = { 0 };

static const char *fresh_dir(void)
{
    static char dir[64];
    snprintf(dir, sizeof dir, "/tmp/megatrain-test-ckpt-%d", (int)getpid());
    file_remove_tree(dir);
    return dir;
}

static const char *step_path(const char *dir, int64_t step, const char *file)
{
    static char path[4][300];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[0], "%s/checkpoints/step-%08lld%s%s", dir, (long long)step, *file ? "/" : "", file);
    return path[turn];
}

static char *read_file(const char *path, int64_t *size)
{
    char *text = NULL;
    OK(file_read_all(path, 64 << 20, &text, size));
    return text;
}

static void write_file(const char *path, const void *data, int64_t size)
{
    FILE *f = fopen(path, "wb");
    fwrite(data, 1, (size_t)size, f);
    fclose(f);
}

static int count_entries(const char *dir, const char *part)
{
    char command[400];
    int n = 0;
    snprintf(command, sizeof command, "ls %s/checkpoints | grep -c -- '%s'", dir, part);
    FILE *f = popen(command, "r");
    if (fscanf(f, "%d", &n) != 1) n = -1;
    pclose(f);
    return n;
}

/* Writes a manifest and the manifest.crc that makes it believable. */
static void write_manifest(const char *dir, int64_t step, const char *text)
{
    char crc[64];
    int64_t size = (int64_t)strlen(text);
    snprintf(crc, sizeof crc, "crc32c %08x size %lld\n", crc32c(0, text, (size_t)size), (long long)size);
    write_file(step_path(dir, step, "manifest.json"), text, size);
    write_file(step_path(dir, step, "manifest.crc"), crc, (int64_t)strlen(crc));
}

/* ---- safetensors ---- */

static const char golden[] =
    "58000000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a227074227d2c2261223a7b226474797065223a22"
    "463332222c227368617065223a5b325d2c22646174615f6f666673657473223a5b302c385d7d7d2020200000803f00000040";

static int64_t unhex(const char *hex, uint8_t *out)
{
    int64_t n = 0;
    for (unsigned b; sscanf(hex, "%2x", &b) == 1; hex += 2) out[n++] = (uint8_t)b;
    return n;
}

TEST(safetensors_golden_file_is_read_and_written)
{
    uint8_t bytes[256];
    int64_t size = unhex(golden, bytes);
    const char *dir = fresh_dir();
    char path[128], text[128];
    SetupArena a;
    StFile f;
    OK(file_make_dirs(dir));
    snprintf(path, sizeof path, "%s/x.safetensors", dir);
    write_file(path, bytes, size);
    setup_init(&a);
    OK(st_open(path, &a, &f));
    const StTensor *t = st_find(&f, "a");
    CHECK(f.count == 1 && t && !st_find(&f, "b") && !st_find(&f, "__metadata__"));
    CHECK(t->ndim == 1 && t->shape[0] == 2 && t->size_bytes == 8 && t->offset == 96 && !strcmp(t->dtype, "F32"));
    float x[2];
    memcpy(x, bytes + t->offset, 8);
    CHECK(x[0] == 1 && x[1] == 2);
    JsonOut j;
    json_out_init(&j, text, sizeof text);
    st_header_begin(&j);
    st_header_tensor(&j, &(StTensor){ "a", "F32", 1, { 2 }, 0, 8 });
    st_header_end(&j);
    CHECK(json_out_ok(&j) && st_padded(j.used_bytes) == bytes[0] && !memcmp(text, bytes + 8, (size_t)j.used_bytes));
    setup_release(&a);
}

static Err parse(const char *header, int64_t data_bytes)
{
    SetupArena a;
    StFile f;
    int64_t n = (int64_t)strlen(header);
    setup_init(&a);
    Err err = st_parse("x", header, n, 8 + n + data_bytes, &a, &f);
    setup_release(&a);
    return err;
}

#define T(dtype, shape, begin, end) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

TEST(safetensors_reader_believes_nothing)
{
    static const struct {
        const char *header;
        int64_t data_bytes;
        const char *text;
    } cases[] = {
        { "", 0, "not a safetensors" },
        { " {}", 0, "not a safetensors" },
        { "{", 0, "not valid JSON" },
        { "{} x", 0, "not valid JSON" },
        { "{\"a\":1}", 0, "dtype" },
        { "{\"a\":" T("F99", "[2]", "0", "8") "}", 8, "'F99'" },
        { "{\"a\":" T("F32", "[2]", "0", "8") ",\"a\":" T("F32", "[0]", "8", "8") "}", 8, "not valid JSON" },
        { "{\"a\":" T("F32", "[3]", "0", "8") "}", 8, "its shape says '12'" },
        { "{\"a\":" T("F32", "[-2]", "0", "8") "}", 8, "impossible shape" },
        { "{\"a\":" T("F32", "[1.5]", "0", "8") "}", 8, "impossible shape" },
        { "{\"a\":" T("F32", "[4611686018427387904,4]", "0", "0") "}", 0, "impossible shape" },
        { "{\"a\":" T("F32", "[1,1,1,1,1,1,1,1,1]", "0", "4") "}", 4, "at most '8' dims" },
        { "{\"a\":" T("F32", "2", "0", "8") "}", 8, "no shape" },
        { "{\"a\":" T("F32", "[2]", "0", "8") "}", 7, "of '7' bytes" },
        { "{\"a\":" T("F32", "[2]", "8", "0") "}", 8, "lies at" },
        { "{\"a\":" T("F32", "[2]", "-8", "0") "}", 8, "lies at" },
        { "{\"a\":" T("F32", "[2]", "0", "9223372036854775807") "}", 8, "lies at" },
        { "{\"a\":" T("F32", "[2]", "0", "99999999999999999999") "}", 8, "not valid JSON" },
        { "{\"a\":" T("F32", "[2]", "0", "8") "}", 9, "describes" },
        { "{\"a\":" T("F32", "[2]", "1", "9") "}", 9, "hole" },
        { "{\"a\":" T("F32", "[2]", "0", "8") ",\"b\":" T("F32", "[2]", "4", "12") "}", 12, "overlaps" },
        { "{\"a\":" T("F32", "[2]", "0", "8") ",\"b\":" T("F32", "[2]", "0", "8") "}", 8, "overlaps" },
        { "{\"\":" T("F32", "[2]", "0", "8") "}", 8, "empty name" },
        { "{\"a\\u0001\":" T("F32", "[2]", "0", "8") "}", 8, "control character" },
        { "{\"\xff\":" T("F32", "[2]", "0", "8") "}", 8, "not valid JSON" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        FAILS(parse(cases[i].header, cases[i].data_bytes), ERR_CKPT, cases[i].text);
    OK(parse("{}", 0));
    OK(parse("{\"b\":" T("BF16", "[2,0]", "8", "8") ",\"a\":" T("F64", "[]", "0", "8") "}   ", 8));
    int64_t n;
    FAILS(st_header_length("x", "\xff\xff\xff\xff\xff\xff\xff\xff", 1 << 20, &n), ERR_CKPT, "more than");
    FAILS(st_header_length("x", "\x09\0\0\0\0\0\0", 16, &n), ERR_CKPT, "in a file of '16'");
    OK(st_header_length("x", "\x08\0\0\0\0\0\0", 16, &n));
    char *name = malloc(6000);
    sprintf(name, "{\"%05000d\":" T("F32", "[2]", "0", "8") "}", 0);
    FAILS(parse(name, 8), ERR_CKPT, "longer than");
    free(name);
}

/* ---- round trips ---- */

TEST(every_layout_loads_what_any_other_saved)
{
    static const Grid grids[] = { { 1, 1, 0 }, { 2, 1, 1 }, { 4, 1, 0 }, { 2, 2, 0 }, { 1, 2, 0 } };
    uint64_t first = 0, digest;
    for (int a = 0; a < 5; a++) {
        const char *dir = fresh_dir();
        OK(save(grids[a], SMALL, dir, 20, 0));
        OK(ckpt_verify(step_path(dir, 20, "")));
        OK(ckpt_digest(step_path(dir, 20, ""), &digest));
        if (!a) first = digest;
        CHECK_MSG(digest == first, "tp %d dp %d", grids[a].tp, grids[a].dp);
        for (int b = 0; b < 5; b++) OK(load(grids[b], SMALL, step_path(dir, 20, ""), 20));
        CHECK(load(ONE, SMALL, step_path(dir, 20, ""), 21) == ERR_INTERNAL); /* the check can fail */
    }
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 21, 0));
    OK(ckpt_digest(step_path(dir, 21, ""), &digest));
    CHECK(digest != first);
}

TEST(files_of_several_chunks)
{
    const ModelKind big = { .big = true };
    static const Grid grids[] = { { 1, 1, 0 }, { 2, 1, 0 }, { 4, 1, 0 } };
    for (int a = 0; a < 3; a++) {
        const char *dir = fresh_dir();
        OK(save(grids[a], big, dir, 7, 2));
        for (int b = 0; b < 3; b++) OK(load(grids[b], big, step_path(dir, 7, ""), 7));
        int64_t size;
        char *bytes = read_file(step_path(dir, 7, "shard-00000.safetensors"), &size);
        CHECK(size > CHUNK_BYTES);
        bytes[CHUNK_BYTES + 12345] ^= 4;
        write_file(step_path(dir, 7, "shard-00000.safetensors"), bytes, size);
        FAILS(ckpt_verify(step_path(dir, 7, "")), ERR_CKPT, "shard-00000.safetensors' is damaged: bytes '1048576'");
        FAILS(load(grids[1], big, step_path(dir, 7, ""), 7), ERR_CKPT, "shard-00000.safetensors' is damaged: bytes '1048576'");
        free(bytes);
    }
}

TEST(weights_only)
{
    const char *dir = fresh_dir();
    OK(save(ONE, (ModelKind){ .weights_only = true }, dir, 3, 0));
    FAILS(load(ONE, SMALL, step_path(dir, 3, ""), 3), ERR_CKPT, "no moments of 'embed.weight'");
    OK(save(ONE, SMALL, dir, 4, 0));
    for (int step = 3; step <= 4; step++) {
        Job j = { .grid = { 2, 1, 0 }, .path = step_path(dir, step, ""), .step = step, .load_weights_only = true, .poison = true };
        OK(run_ranks(&j, rank_load));
        CHECK(j.wrong[0] == 0 && j.wrong[1] == 0);
        j.kind.weights_only = true; /* a store for evaluation */
        OK(run_ranks(&j, rank_load));
        CHECK(j.wrong[0] == 0 && j.wrong[1] == 0);
    }
}

/* A parser of ten lines in another language reads the same numbers, pieces put together, and checks the CRCs. */
static const char python_check[] =
    "import json, struct, sys, os\n"
    "d = sys.argv[1]; m = json.load(open(d + '/manifest.json')); step = m['step']\n"
    "def crc(b):\n"
    "    c = 0xFFFFFFFF\n"
    "    for x in b:\n"
    "        c ^= x\n"
    "        for _ in range(8): c = (c >> 1) ^ (0x82F63B78 if c & 1 else 0)\n"
    "    return c ^ 0xFFFFFFFF\n"
    "text = open(d + '/manifest.json', 'rb').read()\n"
    "assert open(d + '/manifest.crc').read() == 'crc32c %08x size %d\\n' % (crc(text), len(text))\n"
    "files = {}\n"
    "for f in m['files']:\n"
    "    b = open(d + '/' + f['name'], 'rb').read()\n"
    "    assert len(b) == f['size'] and [crc(b)] == f['crc32c']\n"
    "    n = struct.unpack('<Q', b[:8])[0]; h = json.loads(b[8:8+n]); h.pop('__metadata__')\n"
    "    assert n % 8 == 0 and sum(t['data_offsets'][1] - t['data_offsets'][0] for t in h.values()) == len(b) - 8 - n\n"
    "    files[f['name']] = (h, b[8+n:])\n"
    "index = {p['name']: i for i, p in enumerate(m['parameters'])}\n"
    "seen = 0\n"
    "for p in m['pieces']:\n"
    "    h, data = files[p['file']]; s = ['value', 'm', 'v'].index(p['state'])\n"
    "    key = ['', 'm/', 'v/'][s] + p['name']\n"
    "    if p['shape'] != p['global']: key += '#' + ','.join(map(str, p['offset']))\n"
    "    t = h[key]; assert t['dtype'] == 'F32' and t['shape'] == p['shape']\n"
    "    b, e = t['data_offsets']; x = struct.unpack('<%df' % ((e - b) // 4), data[b:e])\n"
    "    g = p['global'] + [1]; o = p['offset'] + [0]; w = (p['shape'] + [1])[1]\n"
    "    for i, v in enumerate(x):\n"
    "        at = (o[0] + i // w) * g[1] + o[1] + i % w\n"
    "        assert v == s * 4000000 + index[p['name']] * 600000 + at + step * 7, (key, i, v)\n"
    "    seen += len(x)\n"
    "print(seen)\n"
    "try:\n"
    "    import safetensors.numpy\n"
    "except ImportError: sys.exit(0)\n"
    "for f, (h, data) in files.items():\n"
    "    t = safetensors.numpy.load_file(d + '/' + f); assert sorted(t) == sorted(h)\n"
    "print('safetensors')\n";

TEST(python_reads_the_same_numbers)
{
    char command[512], line[64] = "";
    if (access("/usr/bin/python3", X_OK)) SKIP("no /usr/bin/python3");
    for (int tp = 1; tp <= 4; tp *= 2) {
        const char *dir = fresh_dir();
        OK(save((Grid){ tp, 1, false }, SMALL, dir, 5, 0));
        char script[128];
        snprintf(script, sizeof script, "%s/check.py", dir);
        write_file(script, python_check, (int64_t)strlen(python_check));
        snprintf(command, sizeof command, "/usr/bin/python3 %s %s", script, step_path(dir, 5, ""));
        FILE *f = popen(command, "r");
        int seen = 0;
        CHECK(fscanf(f, "%d", &seen) == 1 && seen == 3 * (37 * 6 + 32 * 5 + 32 + 5 * 16 + 7));
        bool package = fscanf(f, "%60s", line) == 1;
        CHECK(pclose(f) == 0);
        if (tp == 1 && !package) printf("    the Python package safetensors is not there: checked by a plain parser alone\n");
    }
}

/* ---- damage ---- */

static const char *const files_of_two[] = { "shard-00000.safetensors", "shard-00001.safetensors", "manifest.json", "manifest.crc" };

/* The failure must name the file; for the manifest's two files either will do. */
static bool names(const char *file)
{
    return strstr(err_message(), strncmp(file, "manifest", 8) ? file : "manifest.") != NULL;
}

TEST(every_flipped_byte_is_found_and_named)
{
    const char *dir = fresh_dir();
    OK(save((Grid){ 2, 1, false }, SMALL, dir, 1, 0));
    int64_t missed = 0, tried = 0;
    for (int i = 0; i < 4; i++) {
        int64_t size;
        const char *path = step_path(dir, 1, files_of_two[i]), *folder = step_path(dir, 1, "");
        char *bytes = read_file(path, &size);
        FILE *f = fopen(path, "r+b");
        setvbuf(f, NULL, _IONBF, 0);
        for (int64_t at = 0; at < size; at += i < 2 && at > 2500 ? 7 : 1)
            for (int bit = (int)(at % 8); bit < 8; bit += i == 3 ? 1 : 8) {
                char flipped = (char)(bytes[at] ^ 1 << bit);
                fseek(f, at, SEEK_SET), fwrite(&flipped, 1, 1, f);
                if (ckpt_verify(folder) != ERR_CKPT || !names(files_of_two[i])) missed++;
                fseek(f, at, SEEK_SET), fwrite(&bytes[at], 1, 1, f);
                tried++;
            }
        fclose(f);
        free(bytes);
        OK(ckpt_verify(folder));
    }
    CHECK_MSG(missed == 0 && tried > 8000, "%lld of %lld", (long long)missed, (long long)tried);
}

TEST(every_truncation_is_found_and_named)
{
    const char *dir = fresh_dir();
    char path[PATH_MAX];
    bool found;
    OK(save((Grid){ 2, 1, false }, SMALL, dir, 1, 0));
    for (int i = 0; i < 4; i++) {
        int64_t size, missed = 0;
        const char *file = step_path(dir, 1, files_of_two[i]), *folder = step_path(dir, 1, "");
        char *bytes = read_file(file, &size);
        for (int64_t n = 0; n < size; n += n > 64 && n < size - 64 ? 13 : 1) {
            write_file(file, bytes, n);
            if (ckpt_verify(folder) != ERR_CKPT || !names(files_of_two[i])) missed++;
            if (n % 5 == 0) {
                if (ckpt_find(dir, INT64_MAX, path, &found) != ERR_CKPT) missed++;
                if (load(ONE, SMALL, folder, 1) != ERR_CKPT || !names(files_of_two[i])) missed++;
            }
        }
        CHECK_MSG(missed == 0, "%s: %lld", files_of_two[i], (long long)missed);
        write_file(file, bytes, size);
        remove(file);
        FAILS(ckpt_verify(folder), ERR_CKPT, files_of_two[i]);
        write_file(file, bytes, size);
        free(bytes);
        OK(ckpt_verify(folder));
    }
}

static const char *replaced(const char *text, const char *from, const char *to)
{
    static char out[65536];
    const char *at = strstr(text, from);
    if (!at) return NULL;
    snprintf(out, sizeof out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return out;
}

/* Manifests with a good checksum that nevertheless say something impossible. */
TEST(a_manifest_is_not_believed_beyond_its_checksum)
{
    static const char *const cases[][3] = {
        { "\"format\":1", "\"format\":0", "format" },
        { "\"format\":1", "\"format\":2", "format version '2'" },
        { "\"step\":1", "\"step\":-1", "step" },
        { "\"step\":1,", "", "step" },
        { "\"step\":1", "\"step\":\"1\"", "step" },
        { "\"tp\":8", "\"tp\":1e99", "tp" },
        { "\"skipped\":3", "\"skipped\":null", "skipped" },
        { "\"data\":", "\"date\":", "data" },
        { "\"parameters\":", "\"params\":", "parameters" },
        { "\"shape\":[37,6]", "\"shape\":[37]", "outside of 'embed.weight'" },
        { "\"shape\":[37,6]", "\"shape\":[4611686018427387904,6]", "shape of 'embed.weight'" },
        { "\"shape\":[37,6]", "\"shape\":[0,6]", "shape" },
        { "\"shape\":[37,6]", "\"shape\":[37,6,1]", "shape" },
        { "\"shift\":21", "\"shift\":99999999999", "shift" },
        { "\"name\":\"norm.weight\"", "\"name\":\"embed.weight\"", "twice" },
        { "\"name\":\"norm.weight\"", "\"name\":\"norm/weight\"", "norm/weight" },
        { "\"state\":\"m\"", "\"state\":\"value\"", "whole of 'embed.weight'" },
        { "\"state\":\"m\"", "\"state\":\"mm\"", "'mm'" },
        { "\"dtype\":\"F32\"", "\"dtype\":\"BF16\"", "'BF16'" },
        { "\"offset\":[0,0]", "\"offset\":[1,0]", "overlapping pieces of 'embed.weight'" },
        { "\"offset\":[0,0]", "\"offset\":[6,0]", "outside of 'embed.weight'" },
        { "\"offset\":[0,0]", "\"offset\":[9223372036854775807,0]", "outside" },
        { "\"offset\":[0,0]", "\"offset\":[-1,0]", "offset" },
        { "\"offset\":[0,0],\"shape\":[32,6]", "\"offset\":[0,0],\"shape\":[31,6]", "whole of 'embed.weight'" },
        { "\"file\":\"shard-00001.safetensors\"", "\"file\":\"shard-00009.safetensors\"", "shard-00009" },
        { "{\"name\":\"shard-00000.safetensors\"", "{\"name\":\"../shard-00000.safetensors\"", "../shard" },
        { "{\"name\":\"shard-00000.safetensors\"", "{\"name\":\".x\"", "'.x'" },
        { "{\"name\":\"shard-00001.safetensors\"", "{\"name\":\"shard-00000.safetensors\"", "order" },
        { "\"crc32c\":[", "\"crc32c\":[0,", "checksums" },
        { "\"crc32c\":[", "\"crc32c\":[-1", "checksum" },
    };
    const char *dir = fresh_dir(), *text;
    int64_t size;
    OK(save((Grid){ 2, 1, false }, SMALL, dir, 1, 0));
    char *good = read_file(step_path(dir, 1, "manifest.json"), &size);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_MSG((text = replaced(good, cases[i][0], cases[i][1])), "'%s' is not there", cases[i][0]);
        if (!text) continue;
        write_manifest(dir, 1, text);
        FAILS(ckpt_verify(step_path(dir, 1, "")), ERR_CKPT, cases[i][2]);
    }
    write_manifest(dir, 1, good);
    OK(ckpt_verify(step_path(dir, 1, "")));
    free(good);
}

TEST(swapped_shards_are_found)
{
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 1, 0));
    OK(save(ONE, SMALL, dir, 2, 0));
    rename(step_path(dir, 1, "shard-00000.safetensors"), step_path(dir, 1, "x"));
    rename(step_path(dir, 2, "shard-00000.safetensors"), step_path(dir, 1, "shard-00000.safetensors"));
    rename(step_path(dir, 1, "x"), step_path(dir, 2, "shard-00000.safetensors"));
    Job j = { .grid = { 1, 2, 0 }, .path = step_path(dir, 2, ""), .step = 2 };
    FAILS(run_ranks(&j, rank_load), ERR_CKPT, "step-00000002/shard-00000.safetensors' is damaged");
    CHECK(j.damaged);
}

TEST(a_checkpoint_of_another_model_is_refused)
{
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 1, 0));
    static const char *const text[] = { "", "has a tensor 'norm.weight'", "no tensor 'more.weight'",
                                        "tensor 'qkv.weight' has shape '[32, 5]'" };
    for (int change = 1; change <= 3; change++) {
        Job j = { .grid = { 2, 1, 0 }, .kind = { .change = change }, .path = step_path(dir, 1, ""), .damaged = true };
        FAILS(run_ranks(&j, rank_load), ERR_CKPT, text[change]);
        CHECK(!j.damaged);
    }
}

/* ---- finding, keeping ---- */

static char warnings[4096];

/* ckpt_find, with what it says on stderr. */
static Err find_with_warnings(const char *dir, char path[PATH_MAX], bool *found)
{
    FILE *f = tmpfile();
    fflush(stderr);
    int saved = dup(2);
    dup2(fileno(f), 2);
    log_set_level(LOG_INFO);
    Err err = ckpt_find(dir, INT64_MAX, path, found);
    log_set_level(LOG_ERROR);
    fflush(stderr);
    dup2(saved, 2);
    close(saved);
    rewind(f);
    warnings[fread(warnings, 1, sizeof warnings - 1, f)] = 0;
    fclose(f);
    return err;
}

TEST(the_newest_valid_checkpoint_is_found)
{
    const char *dir = fresh_dir();
    char path[PATH_MAX];
    bool found = true;
    OK(ckpt_find(dir, INT64_MAX, path, &found)); /* no run folder */
    CHECK(!found && !ckpt_any(dir));
    OK(file_make_dirs(step_path(dir, 9, "")));
    rename(step_path(dir, 9, ""), step_path(dir, 9, "../step-00000009.tmp-abc"));
    OK(ckpt_find(dir, INT64_MAX, path, &found)); /* a leftover is no checkpoint */
    CHECK(!found);
    Job j = { .grid = ONE, .run_dir = dir, .step = 1, .saves = 3 };
    OK(run_ranks(&j, rank_save));
    CHECK(count_entries(dir, "tmp") == 0); /* and is removed by the next save */
    write_file(step_path(dir, 1, "../LATEST"), "nonsense", 8);
    OK(ckpt_find(dir, INT64_MAX, path, &found));
    CHECK(found && !strcmp(path, step_path(dir, 3, "")) && ckpt_any(dir));
    OK(ckpt_find(dir, 3, path, &found));
    CHECK(found && !strcmp(path, step_path(dir, 2, "")));
    write_file(step_path(dir, 3, "manifest.crc"), "", 0);
    OK(ckpt_find(dir, INT64_MAX, path, &found));
    CHECK(found && !strcmp(path, step_path(dir, 2, "")));
    remove(step_path(dir, 2, "shard-00000.safetensors"));
    OK(find_with_warnings(dir, path, &found));
    CHECK(strstr(warnings, "step-00000003/manifest.crc") && strstr(warnings, "step-00000002/shard-00000.safetensors"));
    CHECK(found && !strcmp(path, step_path(dir, 1, "")));
    rename(step_path(dir, 1, ""), step_path(dir, 1, "../step-00000001.old")); /* a replacement that did not end */
    OK(ckpt_find(dir, INT64_MAX, path, &found));
    CHECK(found && strstr(path, "step-00000001.old"));
    FAILS(ckpt_find(dir, 1, path, &found), ERR_CKPT, "none is valid");
    CHECK(!found);
    file_remove_tree(path);
    FAILS(ckpt_find(dir, INT64_MAX, path, &found), ERR_CKPT, "none is valid");
    CHECK(ckpt_any(dir));
}

TEST(a_checkpoint_of_a_later_format_is_not_passed_over)
{
    const char *dir = fresh_dir();
    char path[PATH_MAX];
    bool found;
    int64_t size;
    Job j = { .grid = ONE, .run_dir = dir, .step = 1, .saves = 2 };
    OK(run_ranks(&j, rank_save));
    char *text = read_file(step_path(dir, 2, "manifest.json"), &size);
    write_manifest(dir, 2, replaced(text, "\"format\":1", "\"format\":2"));
    FAILS(ckpt_find(dir, INT64_MAX, path, &found), ERR_CKPT, "format version '2'");
    CHECK(strstr(err_hint_text(), "newer"));
    free(text);
}

TEST(only_the_newest_are_kept)
{
    static const struct {
        int keep, left;
    } cases[] = { { 0, 6 }, { 1, 2 }, { 2, 2 }, { 3, 3 }, { 9, 6 } };
    for (int i = 0; i < 5; i++) {
        const char *dir = fresh_dir();
        Job j = { .grid = { 2, 1, 0 }, .run_dir = dir, .step = 1, .saves = 4, .keep = cases[i].keep };
        OK(run_ranks(&j, rank_save));
        j.step = 5, j.saves = 2; /* opened again: those of before count */
        OK(run_ranks(&j, rank_save));
        CHECK_MSG(count_entries(dir, "step-") == cases[i].left, "keep %d", cases[i].keep);
        for (int64_t step = 7 - cases[i].left; step <= 6; step++) OK(load(ONE, SMALL, step_path(dir, step, ""), step));
        char *text = read_file(step_path(dir, 6, "../LATEST"), &(int64_t){ 0 });
        CHECK(!strcmp(text, "step-00000006\n"));
        free(text);
    }
    const char *dir = fresh_dir(); /* damaged ones do not count, and are left for people to look at */
    Job j = { .grid = ONE, .run_dir = dir, .step = 1, .saves = 2, .keep = 2 };
    OK(run_ranks(&j, rank_save));
    write_file(step_path(dir, 2, "manifest.json"), "{}", 2);
    OK(save(ONE, SMALL, dir, 3, 2));
    CHECK(count_entries(dir, "step-") == 3);
    OK(ckpt_verify(step_path(dir, 1, "")));
    OK(save(ONE, SMALL, dir, 4, 2));
    CHECK(count_entries(dir, "step-") == 3 && !file_exists(step_path(dir, 1, "")));
}

TEST(a_step_can_be_saved_again)
{
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 1, 2));
    OK(save((Grid){ 2, 1, false }, SMALL, dir, 1, 2));
    CHECK(count_entries(dir, "step-") == 1 && file_exists(step_path(dir, 1, "shard-00001.safetensors")));
    write_file(step_path(dir, 1, "manifest.json"), "{}", 2);
    OK(save(ONE, SMALL, dir, 1, 2));
    OK(load(ONE, SMALL, step_path(dir, 1, ""), 1));
    CHECK(count_entries(dir, "step-") == 1);
}

TEST(a_run_folder_has_one_owner)
{
    const char *dir = fresh_dir();
    int fd, other;
    OK(ckpt_lock(dir, &fd));
    FAILS(ckpt_lock(dir, &other), ERR_STORAGE, "held by another run");
    file_unlock(fd);
    OK(ckpt_lock(dir, &fd));
    file_unlock(fd);
    write_file("/tmp/megatrain-test-ckpt-file", "", 0);
    FAILS(ckpt_lock("/tmp/megatrain-test-ckpt-file/run", &fd), ERR_STORAGE, "megatrain-test-ckpt-file");
    remove("/tmp/megatrain-test-ckpt-file");
}

TEST(a_checkpoint_can_be_listed)
{
    const char *dir = fresh_dir();
    char *text = NULL;
    size_t size = 0;
    SetupArena a;
    CkptMeta meta;
    OK(save((Grid){ 2, 1, false }, SMALL, dir, 6, 0));
    FILE *f = open_memstream(&text, &size);
    OK(ckpt_print(step_path(dir, 6, ""), f));
    fclose(f);
    CHECK(strstr(text, "step          6") && strstr(text, "qkv.weight") && strstr(text, "[32, 5]") && strstr(text, "501 parameters"));
    free(text);
    setup_init(&a);
    OK(ckpt_meta(step_path(dir, 6, ""), &a, &meta));
    CHECK(meta.step == 6 && meta.attn_block == 64 && ckpt_counter(&meta, "skipped", 0) == 3 && !strcmp(meta.data, "corpus 123"));
    FAILS(ckpt_meta(step_path(dir, 7, ""), &a, &meta), ERR_CKPT, "step-00000007/manifest.json");
    FAILS(ckpt_print(dir, stdout), ERR_CKPT, "manifest.json");
    setup_release(&a);
}

/* ---- faults ---- */

/* The child: saves CKPT_STEP in CKPT_CHILD with CKPT_TP ranks; exit status: 0 or the kind of its failure. */
static int child_main(const char *dir)
{
    Err err = save((Grid){ atoi(getenv("CKPT_TP")), 1, false }, SMALL, dir, atoi(getenv("CKPT_STEP")), 2);
    return err ? 100 + (int)err : 0;
}

/* Runs the child with a fault; its wait status. `operations`: the count it prints, if it was asked for. */
static int run_child(const char *dir, int tp, int step, const char *fault, int *operations)
{
    char command[512], line[256];
    snprintf(command, sizeof command,
             "CKPT_CHILD=%s CKPT_TP=%d CKPT_STEP=%d MEGATRAIN_FILE_FAULT=%s exec /proc/%d/exe 2>&1", dir, tp, step, fault, (int)getpid());
    FILE *f = popen(command, "r");
    while (fgets(line, sizeof line, f))
        if (operations) sscanf(line, "file operations: %d", operations);
    return pclose(f);
}

/* Before: checkpoints of steps 1 and 2. The child saves `step`. */
static void prepare_faults(const char *dir)
{
    file_remove_tree(dir);
    Job j = { .grid = ONE, .run_dir = dir, .step = 1, .saves = 2 };
    OK(run_ranks(&j, rank_save));
}

/* After: the newest is what the outcome says, whole; step 2 is whole; and saving goes on. */
static void check_faults(const char *dir, int step, int status, const char *fault)
{
    char path[PATH_MAX];
    bool found;
    bool killed = WIFSIGNALED(status) || WEXITSTATUS(status) == 128 + 9;
    CkptMeta meta = { 0 };
    SetupArena a;
    setup_init(&a);
    OK(ckpt_find(dir, INT64_MAX, path, &found));
    CHECK_MSG(found, "%s", fault);
    OK(ckpt_meta(path, &a, &meta));
    OK(load((Grid){ 2, 1, false }, SMALL, path, meta.step));
    if (killed) CHECK_MSG(meta.step == 2 || meta.step == step, "%s", fault);
    else if (WEXITSTATUS(status)) {
        CHECK_MSG(WEXITSTATUS(status) == 100 + ERR_STORAGE, "%s: status %d", fault, WEXITSTATUS(status));
        CHECK_MSG(meta.step == 2, "%s", fault);
    } else CHECK_MSG(meta.step == step, "%s", fault);
    if (step != 2) OK(load(ONE, SMALL, step_path(dir, 2, ""), 2));
    OK(save(ONE, SMALL, dir, step, 2));
    OK(load(ONE, SMALL, step_path(dir, step, ""), step));
    CHECK_MSG(count_entries(dir, "tmp\\|old") == 0, "%s", fault);
    setup_release(&a);
}

static void each_fault(const char *kind, int tp, int step)
{
    const char *dir = fresh_dir();
    char fault[32];
    int operations = 0;
    prepare_faults(dir);
    CHECK(run_child(dir, tp, step, "count", &operations) == 0 && operations > 20);
    for (int n = 1; n <= operations; n++) {
        prepare_faults(dir);
        snprintf(fault, sizeof fault, "%s@%d", kind, n);
        int status = run_child(dir, tp, step, fault, NULL);
        if (!strcmp(kind, "kill")) CHECK_MSG(status != 0, "%s", fault);
        check_faults(dir, step, status, fault);
    }
    printf("    %s at each of %d file operations, tp %d, step %d\n", kind, operations, tp, step);
}

TEST(kill_at_every_file_operation) { each_fault("kill", 1, 3); }
TEST(kill_at_every_file_operation_of_a_replacement) { each_fault("kill", 1, 2); }
TEST(kill_at_every_file_operation_of_two_ranks) { each_fault("kill", 2, 3); }
TEST(disk_full_at_every_file_operation) { each_fault("enospc", 1, 3); }
TEST(disk_full_at_every_file_operation_of_two_ranks) { each_fault("enospc", 2, 3); }
TEST(io_error_at_every_file_operation) { each_fault("eio", 1, 3); }
TEST(io_error_at_every_file_operation_of_a_replacement) { each_fault("eio", 1, 2); }
TEST(short_write_at_every_file_operation) { each_fault("short", 1, 3); }

TEST(a_first_save_that_fails_leaves_no_checkpoint)
{
    char fault[32], path[PATH_MAX];
    const char *dir = fresh_dir();
    int operations = 0;
    bool found;
    CHECK(run_child(dir, 1, 1, "count", &operations) == 0);
    for (int n = 1; n <= operations; n++) {
        file_remove_tree(dir);
        snprintf(fault, sizeof fault, "%s@%d", n % 2 ? "kill" : "eio", n);
        run_child(dir, 1, 1, fault, NULL);
        OK(ckpt_find(dir, INT64_MAX, path, &found));
        if (found) OK(ckpt_verify(path));
    }
}

int main(int argc, char **argv)
{
    log_set_level(LOG_ERROR); /* damage is what is tried here: hundreds of warnings say nothing */
    if (getenv("CKPT_CHILD")) return child_main(getenv("CKPT_CHILD"));
    int status = test_main(argc, argv);
    file_remove_tree(fresh_dir());
    return status;
}
