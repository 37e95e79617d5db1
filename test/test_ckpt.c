/*
 * Checkpoints: what is written is what a plain parser reads, any layout loads what any other saved, what does
 * not fit is refused, the newest valid one is found, and only the newest are kept. Damage and failures of the
 * disk are in test_ckpt_damage.c.
 */
#include "ckpt/values.h"
#include "ckpt_fixture.h"

#include <stdatomic.h>

#include "ckpt/manifest.h"
#include "ckpt/safetensors.h"

/* ---- safetensors ---- */

static const char golden[] =
    "58000000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a227074227d2c2261223a7b22647479706522"
    "3a22"
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
    CHECK(t->ndim == 1 && t->shape[0] == 2 && t->size_bytes == 8 && t->offset == 96 &&
          !strcmp(t->dtype, "F32"));
    float x[2];
    memcpy(x, bytes + t->offset, 8);
    CHECK(x[0] == 1 && x[1] == 2);
    JsonOut j;
    json_out_init(&j, text, sizeof text);
    st_header_begin(&j);
    st_header_tensor(&j, &(StTensor){ "a", "F32", 1, { 2 }, 0, 8 });
    st_header_end(&j);
    CHECK(json_out_ok(&j) && st_padded(j.used_bytes) == bytes[0] &&
          !memcmp(text, bytes + 8, (size_t)j.used_bytes));
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

#define T(dtype, shape, begin, end) \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

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
        { "{\"a\":" T("F32", "[3]", "0", "8") "}", 8, "its shape says 12" },
        { "{\"a\":" T("F32", "[-2]", "0", "8") "}", 8, "impossible shape" },
        { "{\"a\":" T("F32", "[1.5]", "0", "8") "}", 8, "impossible shape" },
        { "{\"a\":" T("F32", "[4611686018427387904,4]", "0", "0") "}", 0, "impossible shape" },
        { "{\"a\":" T("F32", "[1,1,1,1,1,1,1,1,1]", "0", "4") "}", 4, "at most 8 dims" },
        { "{\"a\":" T("F32", "2", "0", "8") "}", 8, "no shape" },
        { "{\"a\":" T("F32", "[2]", "0", "8") "}", 7, "of 7 bytes" },
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
    OK(parse("{\"__metadata__\":{}}", 0));
    OK(parse("{\"__metadata__\":null}", 0));
    OK(parse("{\"b\":" T("BF16", "[2,0]", "8", "8") ",\"a\":" T("F64", "[]", "0", "8") "}   ", 8));
    int64_t n;
    FAILS(st_header_length("x", "\xff\xff\xff\xff\xff\xff\xff\xff", 1 << 20, &n), ERR_CKPT, "more than");
    FAILS(st_header_length("x", "\x09\0\0\0\0\0\0", 16, &n), ERR_CKPT, "in a file of 16");
    OK(st_header_length("x", "\x08\0\0\0\0\0\0", 16, &n));
    char *name = malloc(6000);
    sprintf(name, "{\"%05000d\":" T("F32", "[2]", "0", "8") "}", 0);
    FAILS(parse(name, 8), ERR_CKPT, "longer than");
    free(name);
}

/* ---- round trips ---- */

TEST(every_layout_loads_what_any_other_saved)
{
    static const struct {
        Grid grid;
        ZeroCut cut;
    } layouts[] = { { { 1, 1, 0 }, 0 },
                    { { 2, 1, 1 }, 0 },
                    { { 4, 1, 0 }, 0 },
                    { { 2, 2, 0 }, 0 },
                    { { 1, 2, 0 }, 0 },
                    { { 1, 2, 0 }, ZERO_STATES },
                    { { 2, 2, 0 }, ZERO_STATES },
                    { { 1, 3, 0 }, ZERO_STATES },
                    { { 1, 4, 0 }, ZERO_STATES },
                    { { 1, 2, 0 }, ZERO_VALUES },
                    { { 2, 2, 0 }, ZERO_GRADS },
                    { { 1, 3, 0 }, ZERO_VALUES },
                    { { 1, 4, .zero_group = 2 }, ZERO_VALUES },
                    { { 1, 4, .zero_group = 2 }, ZERO_STATES } };
    enum { COUNT = sizeof layouts / sizeof *layouts };
    uint64_t first = 0, digest;
    for (int a = 0; a < COUNT; a++) {
        const char *dir = fresh_dir();
        cut_states = layouts[a].cut;
        OK(save(layouts[a].grid, SMALL, dir, 20, 0));
        OK(ckpt_verify(step_path(dir, 20, "")));
        OK(ckpt_digest(step_path(dir, 20, ""), &digest));
        if (!a) first = digest;
        CHECK_MSG(digest == first, "tp %d dp %d, cut %d", layouts[a].grid.tp, layouts[a].grid.dp, cut_states);
        for (int b = 0; b < COUNT; b++) {
            cut_states = layouts[b].cut;
            OK(load(layouts[b].grid, SMALL, step_path(dir, 20, ""), 20));
            char again[256];
            snprintf(again, sizeof again, "%s/again%d", dir, b);
            OK(load_save(layouts[b].grid, SMALL, step_path(dir, 20, ""), again, 20));
            OK(ckpt_digest(step_path(again, 20, ""), &digest));
            CHECK_MSG(digest == first, "from layout %d through %d", a, b);
        }
        cut_states = ZERO_NONE;
        CHECK(load(ONE, SMALL, step_path(dir, 20, ""), 21) == ERR_INTERNAL); /* the check can fail */
    }
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 21, 0));
    OK(ckpt_digest(step_path(dir, 21, ""), &digest));
    CHECK(digest != first);
}

TEST(a_thread_saves_what_was_there_when_it_was_asked)
{
    static const struct {
        Grid grid;
        ZeroCut cut;
    } layouts[] = { { { 1, 1, 0 }, 0 }, { { 2, 1, 1 }, 0 }, { { 2, 2, 0 }, 0 }, { { 1, 4, 0 }, ZERO_VALUES } };
    char path[PATH_MAX];
    bool found;
    uint64_t digest, plain;
    for (int i = 0; i < 4; i++) {
        const char *dir = fresh_dir();
        cut_states = layouts[i].cut;
        OK(save(layouts[i].grid, SMALL, dir, 23, 2));
        OK(ckpt_digest(step_path(dir, 23, ""), &plain));
        file_remove_tree(dir);
        Job j = { .grid = layouts[i].grid, .run_dir = dir, .step = 20, .saves = 4, .keep = 2, .collect_waits = i % 2 };
        OK(run_ranks(&j, rank_save_async));
        OK(ckpt_find(dir, INT64_MAX, path, &found));
        CHECK(found && !strcmp(path, step_path(dir, 23, "")));
        OK(load(layouts[i].grid, SMALL, path, 23));
        OK(load(layouts[i].grid, SMALL, step_path(dir, 22, ""), 22));
        OK(ckpt_digest(path, &digest));
        CHECK(digest == plain && count_entries(dir, "step") == 2);
        cut_states = ZERO_NONE;
    }
}

/* What it says it takes is what is written, less headers. */
static int64_t snapshot_bytes[MAX_RANKS], shard_bytes[MAX_RANKS];

static Err rank_count(Rank *r)
{
    Ckpt c;
    TRY(rank_open(r));
    TRY(ckpt_snapshot_bytes(&r->params, &r->world, &snapshot_bytes[r->rank]));
    TRY(ckpt_open(&c, (CkptOptions){ r->job->run_dir, &r->params, &r->world, &r->dev.stream, 0, 1000 }, &r->setup));
    const int64_t bytes = c.file_bytes[r->rank];
    shard_bytes[r->rank] = bytes ? bytes - 8 - c.header_bytes[r->rank] : 0;
    return ERR_OK;
}

TEST(what_a_snapshot_takes_is_known)
{
    int64_t all = 0;
    const int64_t want = 3 * 4 * (37 * 6 + 32 * 5 + 32 + 5 * 16 + 7);
    for (cut_states = ZERO_NONE; cut_states <= ZERO_VALUES; cut_states++) {
        Job j = { .grid = { 2, 2, 0 }, .run_dir = fresh_dir() };
        OK(run_ranks(&j, rank_count));
        for (int i = all = 0; i < 4; i++) {
            CHECK(snapshot_bytes[i] == shard_bytes[i]);
            all += snapshot_bytes[i];
        }
        CHECK(all == want && (snapshot_bytes[3] > 0) == (cut_states > ZERO_NONE));
    }
    cut_states = ZERO_NONE;
}

/* Boxes of a tensor of more than two chunks, whose chunk 1 is damaged at a byte of it: what is read there fails, at
 * once and again, and the rest does not. */
static void check_values_of_damaged(const char *folder, const char *damage)
{
    enum { ROWS = 1000, COLUMNS = 640 };
    static float out[ROWS * COLUMNS];
    SetupArena a;
    CkptValues *v;
    setup_init(&a);
    OK(ckpt_values_open(folder, &a, &v));
    int bad = 0;
    for (int64_t r = 0; r < ROWS; r += 10) {
        const Err err = ckpt_values_read(v, "big.weight", (Box){ { r, 3 }, { 10, 20 } }, out, 20);
        if (err) CHECK(err == ERR_CKPT && strstr(err_message(), damage));
        bad += err != ERR_OK;
    }
    CHECK_MSG(bad > 30 && bad < 70, "%d of 100 boxes", bad);
    for (int again = 0; again < 2; again++)
        FAILS(ckpt_values_read(v, "big.weight", (Box){ { 0, 0 }, { ROWS, COLUMNS } }, out, COLUMNS), ERR_CKPT, damage);
    ckpt_values_close(v);
    setup_release(&a);
}

TEST(files_of_several_chunks)
{
    const ModelKind big = { .big = true };
    static const Grid grids[] = { { .tp = 1, .dp = 1 }, { .tp = 2, .dp = 1 }, { .tp = 4, .dp = 1 } };
    for (int a = 0; a < 3; a++) {
        const char *dir = fresh_dir();
        OK(save(grids[a], big, dir, 7, 2));
        for (int b = 0; b < 3; b++) OK(load(grids[b], big, step_path(dir, 7, ""), 7));
        int64_t size;
        char *bytes = read_file(step_path(dir, 7, "shard-00000.safetensors"), &size);
        CHECK(size > CHUNK_BYTES);
        bytes[CHUNK_BYTES + 12345] ^= 4;
        write_file(step_path(dir, 7, "shard-00000.safetensors"), bytes, size);
        FAILS(ckpt_verify(step_path(dir, 7, "")), ERR_CKPT,
              "shard-00000.safetensors' is damaged: bytes 1048576");
        FAILS(load(grids[1], big, step_path(dir, 7, ""), 7), ERR_CKPT,
              "shard-00000.safetensors' is damaged: bytes 1048576");
        if (!a) check_values_of_damaged(step_path(dir, 7, ""), "is damaged: bytes 1048576");
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
        Job j = { .grid = { 2, 1, 0 },
                  .path = step_path(dir, step, ""),
                  .step = step,
                  .load_weights_only = true,
                  .poison = true };
        OK(run_ranks(&j, rank_load));
        CHECK(j.wrong[0] == 0 && j.wrong[1] == 0);
        j.kind.weights_only = true; /* a store for evaluation */
        OK(run_ranks(&j, rank_load));
        CHECK(j.wrong[0] == 0 && j.wrong[1] == 0);
    }
}

/* A parser of ten lines in another language reads the same numbers, pieces put together, and checks the CRCs.
 */
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
    "    assert n % 8 == 0 and sum(t['data_offsets'][1] - t['data_offsets'][0] for t in h.values()) == "
    "len(b) - 8 - n\n"
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
        OK(save((Grid){ .tp = tp, .dp = 1 }, SMALL, dir, 5, 0));
        char script[128];
        snprintf(script, sizeof script, "%s/check.py", dir);
        write_file(script, python_check, (int64_t)strlen(python_check));
        snprintf(command, sizeof command, "/usr/bin/python3 %s %s", script, step_path(dir, 5, ""));
        FILE *f = popen(command, "r");
        int seen = 0;
        CHECK(fscanf(f, "%d", &seen) == 1 && seen == 3 * (37 * 6 + 32 * 5 + 32 + 5 * 16 + 7));
        bool package = fscanf(f, "%60s", line) == 1;
        CHECK(pclose(f) == 0);
        if (tp == 1 && !package)
            printf("    the Python package safetensors is not there: checked by a plain parser alone\n");
    }
}

TEST(a_checkpoint_of_another_model_is_refused)
{
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 1, 0));
    static const char *const text[] = { "", "has a tensor 'norm.weight'", "no tensor 'more.weight'",
                                        "tensor 'qkv.weight' has shape '[32, 5]'" };
    for (int change = 1; change <= 3; change++) {
        Job j = {
            .grid = { 2, 1, 0 }, .kind = { .change = change }, .path = step_path(dir, 1, ""), .damaged = true
        };
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
    OK(find_with_warnings(dir, path, &found));
    CHECK(found && !strcmp(path, step_path(dir, 2, "")));
    CHECK(strstr(warnings, "step-00000003/manifest.crc"));
    remove(step_path(dir, 2, "shard-00000.safetensors"));
    OK(find_with_warnings(dir, path, &found)); /* each damage is said once */
    CHECK(!strstr(warnings, "step-00000003/manifest.crc") &&
          strstr(warnings, "step-00000002/shard-00000.safetensors"));
    CHECK(found && !strcmp(path, step_path(dir, 1, "")));
    rename(step_path(dir, 1, ""),
           step_path(dir, 1, "../step-00000001.old")); /* a replacement that did not end */
    OK(ckpt_find(dir, INT64_MAX, path, &found));
    CHECK(found && strstr(path, "step-00000001.old"));
    FAILS(ckpt_find(dir, 1, path, &found), ERR_CKPT, "none is valid");
    CHECK(!found);
    file_remove_tree(path);
    FAILS(ckpt_find(dir, INT64_MAX, path, &found), ERR_CKPT, "none is valid");
    CHECK(ckpt_any(dir));
}

static atomic_bool stop_moving;
static atomic_int moves; /* that are left: while somebody looks, fewer than it looks again */

/* The checkpoint of `step`, as that of the next step; then the older one is not there any more. */
static bool move_on(const char *dir, int64_t step)
{
    char old[32], new[32], gone[PATH_MAX];
    int64_t size;
    char *text = read_file(step_path(dir, step, "manifest.json"), &size);
    snprintf(old, sizeof old, "\"step\":%lld", (long long)step);
    snprintf(new, sizeof new, "\"step\":%lld", (long long)step + 1);
    snprintf(gone, sizeof gone, "%s/checkpoints/gone", dir);
    OK(file_make_dirs(step_path(dir, 0, "")));
    write_manifest(dir, 0, replaced(text, old, new));
    free(text);
    return !link(step_path(dir, step, "shard-00000.safetensors"), step_path(dir, 0, "shard-00000.safetensors")) &&
           !rename(step_path(dir, 0, ""), step_path(dir, step + 1, "")) &&
           !rename(step_path(dir, step, ""), gone) && !file_remove_tree(gone);
}

/* Behaves like a run that keeps one checkpoint: there is always one, of an ever later step. */
static void *keep_moving(void *dir)
{
    for (int64_t step = 1; !stop_moving; usleep(1000)) {
        if (moves <= 0) continue;
        moves--;
        if (!move_on(dir, step)) return NULL;
        step++;
    }
    return dir;
}

TEST(a_checkpoint_that_vanishes_while_it_is_looked_at_gives_way_to_a_newer_one)
{
    const char *dir = fresh_dir();
    char path[PATH_MAX];
    bool found;
    pthread_t mover;
    void *moved;
    OK(save(ONE, SMALL, dir, 1, 0));
    pthread_create(&mover, NULL, keep_moving, (void *)dir);
    for (int i = 0; i < 1000; i++) {
        moves = CKPT_RESCANS - 1; /* (one more may be under way) */
        OK(ckpt_find(dir, INT64_MAX, path, &found));
        CHECK(found);
    }
    stop_moving = true;
    pthread_join(mover, &moved);
    CHECK(moved);
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
    FAILS(ckpt_find(dir, INT64_MAX, path, &found), ERR_CKPT, "format version 2");
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
        for (int64_t step = 7 - cases[i].left; step <= 6; step++)
            OK(load(ONE, SMALL, step_path(dir, step, ""), step));
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

/* The steps of a folder's checkpoints, as text. */
static const char *steps_of(const char *dir)
{
    static char text[256];
    char command[400];
    snprintf(command, sizeof command, "ls %s/checkpoints | sed -n 's/^step-0*//p' | sort -n | paste -sd ' '", dir);
    FILE *f = popen(command, "r");
    text[0] = 0;
    if (fgets(text, sizeof text, f)) text[strcspn(text, "\n")] = 0;
    pclose(f);
    return text;
}

#define LEFT(dir, want) CHECK_MSG(!strcmp(steps_of(dir), want), "%s, want %s", steps_of(dir), want)

TEST(every_nth_stays_beside_the_newest)
{
    const char *dir = fresh_dir();
    Job j = { .grid = { 2, 1, 0 }, .run_dir = dir, .step = 1, .saves = 8, .keep = 2, .keep_every = 3 };
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "3 6 7 8");
    j.step = 9, j.saves = 2; /* opened again */
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "3 6 9 10");
    OK(load(ONE, SMALL, step_path(dir, 3, ""), 3));
    j.step = 11, j.saves = 1, j.keep_every = 9; /* what holds is what the present start asks for */
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "9 10 11");
    j.step = 12, j.keep_every = 0;
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "11 12");
}

TEST(the_best_stay_beside_the_newest)
{
    static const double loss[] = { [1] = 5, 3, 4, 2, 6, 2, NAN, 7, INFINITY, 1 };
    static const char *const left[] = {
        [1] = "1", "1 2", "2 3", "2 3 4", "2 4 5", "4 5 6", "4 6 7", "4 6 7 8", "4 6 8 9", "4 9 10"
    };                                     /* keep = 2, keep_best = 2; of equals the older */
    for (int anew = 0; anew < 2; anew++) { /* one start saves all; or each is saved by a start of its own */
        const char *dir = fresh_dir();
        Job j = { .grid = { 2, 1, 0 }, .run_dir = dir, .keep = 2, .keep_best = 2, .loss = loss };
        if (!anew) {
            j.step = 1, j.saves = 10;
            OK(run_ranks(&j, rank_save));
        }
        for (j.step = 1, j.saves = 1; anew && j.step <= 10; j.step++) {
            OK(run_ranks(&j, rank_save));
            LEFT(dir, left[j.step]);
        }
        LEFT(dir, left[10]);
        OK(load(ONE, SMALL, step_path(dir, 4, ""), 4));
        OK(ckpt_verify(step_path(dir, 4, "")));
    }
    const char *dir = fresh_dir(); /* both rules, and a set that nothing is known of */
    Job j = {
        .grid = ONE, .run_dir = dir, .step = 1, .saves = 8, .keep = 2, .keep_best = 1, .keep_every = 3, .loss = loss
    };
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "3 4 6 7 8");
    j.best_set = "sky", j.step = 9, j.saves = 1;
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "3 6 8 9");
}

/* A low loss on easier samples is no reason to drop the best on others. */
TEST(losses_of_other_samples_are_not_compared)
{
    static const double loss[] = { [1] = 3, 4, 5, 1, 2, 2, 2 };
    const char *dir = fresh_dir();
    Job j = {
        .grid = ONE, .run_dir = dir, .step = 1, .saves = 3, .keep = 2, .keep_best = 1, .loss = loss, .valid_samples = 8
    };
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "1 2 3");
    j.step = 4, j.saves = 4, j.valid_samples = 16;
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "1 4 6 7"); /* the best on 8 samples, the best on 16, the newest two */
}

/* Nor one on other tokens, where both are known. */
TEST(losses_on_other_tokens_are_not_compared)
{
    static const double loss[] = { [1] = 3, 4, 5, 1, 2, 2, 2 };
    for (int known = 0; known < 2; known++) {
        const char *dir = fresh_dir();
        Job j = { .grid = ONE, .run_dir = dir, .step = 1, .saves = 3, .keep = 2, .keep_best = 1, .loss = loss };
        j.valid_content = 5;
        OK(run_ranks(&j, rank_save));
        LEFT(dir, "1 2 3");
        j.step = 4, j.saves = 4, j.valid_content = known ? 6 : 0;
        OK(run_ranks(&j, rank_save));
        LEFT(dir, known ? "1 4 6 7" : "4 6 7");
    }
}

/* What was passed over as damaged is not the best, whatever its manifest says. */
TEST(a_damaged_one_is_not_the_best)
{
    static const double loss[] = { [1] = 5, 6, 7, 1, 9, 9 };
    const char *dir = fresh_dir();
    Job j = { .grid = ONE, .run_dir = dir, .step = 1, .saves = 4, .keep = 2, .keep_best = 1, .loss = loss };
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "3 4");
    j.step = 5, j.saves = 2, j.bad_from = 4;
    OK(run_ranks(&j, rank_save));
    LEFT(dir, "3 5 6");
}

/* The limit is another when the second step is saved. */
static Err rank_save_larger(Rank *r)
{
    Ckpt c;
    CkptMeta meta = meta_of(1);
    TRY(rank_open(r));
    TRY(ckpt_open(&c, (CkptOptions){ r->job->run_dir, &r->params, &r->world, &r->dev.stream, 2, 1000 }, &r->setup));
    rank_fill(r, 1);
    TRY(ckpt_save(&c, &meta));
    manifest_max_bytes = 1000;
    meta.step = 2;
    return ckpt_save(&c, &meta);
}

TEST(a_manifest_that_could_not_be_read_is_never_written)
{
    const int64_t most = manifest_max_bytes;
    const char *dir = fresh_dir();
    Job j = { .grid = ONE, .run_dir = dir, .step = 1 };
    Job two = { .grid = { 1, 2, 0 }, .run_dir = dir, .step = 1 };
    manifest_max_bytes = 4096; /* before the first step where it can be foreseen */
    FAILS(run_ranks(&two, rank_save), ERR_CONFIG, "of 15 pieces of tensors from 2 ranks may take");
    CHECK(!ckpt_any(dir));
    manifest_max_bytes = most;
    FAILS(run_ranks(&j, rank_save_larger), ERR_STORAGE, "more than the 1000 that are read");
    manifest_max_bytes = most;
    CHECK(count_entries(dir, "step-") == 1);
    OK(load(ONE, SMALL, step_path(dir, 1, ""), 1));
}

TEST(a_step_can_be_saved_again)
{
    const char *dir = fresh_dir();
    OK(save(ONE, SMALL, dir, 1, 2));
    OK(save((Grid){ .tp = 2, .dp = 1 }, SMALL, dir, 1, 2));
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
    OK(save((Grid){ .tp = 2, .dp = 1 }, SMALL, dir, 6, 0));
    FILE *f = open_memstream(&text, &size);
    OK(ckpt_print(step_path(dir, 6, ""), f));
    fclose(f);
    CHECK(strstr(text, "step          6") && strstr(text, "qkv.weight") && strstr(text, "[32, 5]") &&
          strstr(text, "501 parameters"));
    setup_init(&a);
    OK(ckpt_meta(step_path(dir, 6, ""), &a, &meta));
    CHECK(meta.step == 6 && meta.attn_block == 64 && ckpt_counter(&meta, "skipped", 0) == 1 &&
          !strcmp(meta.data, "corpus 123"));
    CHECK(meta.valid_count == 0 && !strstr(text, "valid loss"));
    static const double loss[] = { [8] = 1.0 / 3 };
    Job j = { .grid = ONE, .run_dir = dir, .step = 8, .loss = loss };
    OK(run_ranks(&j, rank_save));
    OK(ckpt_meta(step_path(dir, 8, ""), &a, &meta));
    CHECK(meta.valid_count == 2 && !strcmp(meta.valid[1].set, "sea") && meta.valid[1].loss == 1.0 / 3);
    free(text);
    f = open_memstream(&text, &size);
    OK(ckpt_print(step_path(dir, 8, ""), f));
    fclose(f);
    CHECK(strstr(text, "valid loss    0.500000 on land\nvalid loss    0.333333 on sea\n"));
    free(text);
    FAILS(ckpt_meta(step_path(dir, 7, ""), &a, &meta), ERR_CKPT, "step-00000007/manifest.json");
    FAILS(ckpt_print(dir, stdout), ERR_CKPT, "manifest.json");
    setup_release(&a);
}

/* A manifest is another's file: no text of it reaches a terminal as more than text, or looks like a line of ours. */
TEST(what_is_listed_is_plain)
{
    static const char escapes[] = "\\u001b[2J\\u009b31m\\u0007\\nchecksums     every byte";
    static const char *const keys[] = { "\"program\":\"", "\"reproducible\":\"", "\"data\":\"", "\"config\":\"",
                                        "\"counters\":{\"" };
    const char *dir = fresh_dir();
    char *text = NULL, to[128];
    size_t size = 0;
    int64_t bytes;
    OK(save(ONE, SMALL, dir, 1, 0));
    char *good = read_file(step_path(dir, 1, "manifest.json"), &bytes);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        snprintf(to, sizeof to, "%s%s", keys[i], escapes);
        write_manifest(dir, 1, replaced(good, keys[i], to));
        FILE *f = open_memstream(&text, &size);
        OK(ckpt_print(step_path(dir, 1, ""), f));
        fclose(f);
        CHECK_MSG(!strpbrk(text, "\033\a") && !strstr(text, "\xC2\x9B"), "%s %s", keys[i], text);
        CHECK_MSG(!strstr(text, "\nchecksums"), "%s", keys[i]); /* (lines of data stand behind a label's width) */
        CHECK_MSG(strstr(text, "?[2J") || !strcmp(keys[i], "\"config\":\""), "%s", keys[i]);
        free(text);
    }
    free(good);
}

int main(int argc, char **argv)
{
    log_set_level(LOG_ERROR);
    int status = test_main(argc, argv);
    file_remove_tree(fresh_dir());
    return status;
}
