/*
 * What the tests of checkpoints share: a small model with a tensor of every kind (cut by rows and columns,
 * sections, padding, uncut) on a grid of thread-ranks, saved and loaded, and the folders that this leaves.
 *
 * Every element has a value that follows from parameter, state, plain index and step, so that whatever is
 * loaded can be checked without the thing that was saved.
 */
#ifndef MEGATRAIN_CKPT_FIXTURE_H
#define MEGATRAIN_CKPT_FIXTURE_H

#include "test.h"

#include <pthread.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "ckpt/chunks.h"
#include "ckpt_save.h"
#include "thread_ranks.h"

enum { MAX_RANKS = 8 };

/* ---- a model on a grid of thread-ranks ---- */

typedef struct {
    bool big;          /* with a tensor of more than a chunk */
    bool weights_only; /* no moments */
    int change;        /* 1: a tensor fewer, 2: one more, 3: another shape */
} ModelKind;

/* Adds parameters. A tensor is there if the change takes it: bit k of `in` is ModelKind.change == k. */
static inline Err add_params(ParamRegistry *r, ModelKind k)
{
    const struct {
        int in;
        ParamSpec spec;
    } table[] = {
        { 15, { .name = "embed.weight", .ndim = 2, .shape = { 37, 6 }, .cut = { CUT_TP }, .padded_rows = 64 } },
        { 15, { .name = "qkv.weight", .ndim = 2, .shape = { 32, k.change == 3 ? 6 : 5 }, .cut = { CUT_TP },
                .section = { 16, 8, 8 }, .interleave = 4 } },
        { 15, { .name = "qkv.bias", .ndim = 1, .shape = { 32 }, .cut = { CUT_TP }, .section = { 16, 8, 8 },
                .interleave = 8 } },
        { 15, { .name = "out.weight", .ndim = 2, .shape = { 5, 16 }, .cut = { CUT_NONE, CUT_TP } } },
        { 13, { .name = "norm.weight", .ndim = 1, .shape = { 7 } } },
        { 4, { .name = "more.weight", .ndim = 1, .shape = { 7 } } },
        { k.big ? 15 : 0, { .name = "big.weight", .ndim = 2, .shape = { 1000, 640 }, .cut = { CUT_TP } } },
    };
    int id;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].in >> k.change & 1) TRY(param_add(r, table[i].spec, &id));
    return ERR_OK;
}

/* What is cut over dp in the jobs that follow. */
static ZeroCut cut_states;

typedef struct {
    Grid grid;
    ModelKind kind;
    const char *run_dir, *path; /* where to save, what to load */
    int64_t step;               /* saved, or expected */
    int keep, saves;            /* checkpoints step .. step + saves - 1; 0 = 1 */
    int64_t keep_every, keep_best, bad_from;
    const double *loss; /* by step, on the set "sea"; NULL: not evaluated */
    int64_t valid_samples; /* that these losses are of */
    int64_t valid_content; /* the checksum of their tokens; 0: it is not known */
    const char *best_set;
    bool load_weights_only, poison, collect_waits;
    void (*loading)(bool begins); /* called before the first rank begins and after the last has ended */
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
    GradStats stats;
    ParamSet params;
    Device dev;
    void *memory;
    CommHub *hub; /* NULL: one rank */
} Rank;

static inline float element(int param, int state, int64_t index, int64_t step)
{
    return (float)(state * 4000000 + param * 600000 + index + step * 7);
}

static inline Tensor flat_of(Rank *r, int state)
{
    return state == 0 ? r->store.value : state == 1 ? r->store.m : r->store.v;
}

/* The elements of parameter i that this rank holds in `flat`; base[e] is element e. */
static inline ParamRange held(Rank *r, int i, Tensor flat, float **base)
{
    *base = (float *)flat.data + param_origin(&r->store, i, flat);
    return param_held(&r->store, i, flat);
}

/* Plain index of a local element, by the definition in param.c; -1 for padding. */
static inline int64_t plain_index(const Param *p, int64_t at)
{
    int64_t row = param_plain_row(p, at / p->local[1]);
    return row < 0 ? -1 : row * p->spec.shape[1] + p->first[1] + at % p->local[1];
}

static inline Err rank_open(Rank *r)
{
    Arena state;
    Job *j = r->job;
    size_t bytes = j->kind.big ? 16 << 20 : 1 << 18;
    setup_init(&r->setup);
    param_registry_init(&r->reg, &r->setup, param_place(j->grid, r->world.rank, cut_states));
    TRY(add_params(&r->reg, j->kind));
    TRY(param_layout(&r->reg, 1000));
    TRY(device_open(&r->dev, (DeviceChoice){ .threads = 1 }));
    r->memory = aligned_alloc(ARENA_ALIGN, bytes);
    memset(r->memory, j->poison ? 0xFF : 0, bytes);
    arena_init(&state, "state", r->memory, (int64_t)bytes);
    TRY(grad_stats_init(&r->stats, r->reg.count, !j->kind.weights_only, &state));
    TRY(param_store_init(&r->store, &r->reg, &r->stats, (StoreMemory){ &state, &state },
                         (StoreKinds){ .grads = j->kind.weights_only ? GRADS_NONE : GRADS_I64 }));
    r->store.group[PARAM_DENSE] = j->grid.zero_group ? &r->world.zero : &r->world.dp;
    r->params = param_set_single(&r->store, &r->stats);
    return ERR_OK;
}

static inline void rank_fill(Rank *r, int64_t step)
{
    for (int i = 0; i < r->reg.count; i++) {
        const Param *p = &r->reg.items[i];
        ((int32_t *)r->stats.shift.data)[i] = 20 + i + (int32_t)step;
        for (int s = 0; s < (r->job->kind.weights_only ? 1 : 3); s++) {
            float *base;
            ParamRange x = held(r, i, flat_of(r, s), &base);
            for (int64_t e = x.first; e < x.first + x.count; e++)
                base[e] = plain_index(p, e) < 0 ? NAN : element(i, s, plain_index(p, e), step);
        }
    }
}

/* Elements that are not what `step` should have given; padding and gaps must be 0. */
static inline int64_t rank_wrong(Rank *r, int64_t step)
{
    int64_t wrong = 0;
    for (int s = 0; s < (r->job->kind.weights_only ? 1 : 3); s++) {
        Tensor flat = flat_of(r, s);
        char *covered = calloc(1, (size_t)tensor_count(flat));
        for (int i = 0; i < r->reg.count; i++) {
            const Param *p = &r->reg.items[i];
            float *base;
            ParamRange x = held(r, i, flat, &base);
            for (int64_t e = x.first; e < x.first + x.count; e++) {
                int64_t at = plain_index(p, e);
                float want = at < 0 || (s && r->job->load_weights_only) ? 0 : element(i, s, at, step);
                wrong += !(base[e] == want) + covered[base + e - (float *)flat.data]++;
            }
            if (!s && !r->job->load_weights_only)
                wrong += ((int32_t *)r->stats.shift.data)[i] != 20 + i + step;
        }
        for (int64_t i = 0; i < tensor_count(flat); i++) wrong += !covered[i] && !(((float *)flat.data)[i] == 0);
        free(covered);
    }
    return wrong;
}

static inline CkptMeta meta_of(int64_t step)
{
    return (CkptMeta){ .step = step,
                       .samples = 15 * step,
                       .tokens = 960 * step,
                       .seed = 5,
                       .tp_blocks = 8,
                       .seq_blocks = 4,
                       .attn_block = 64,
                       .reproducible = "layout",
                       .program = "megatrain test",
                       .config = "[run]\nname = \"x\"\t\\ \xc3\xbc\n",
                       .data = "corpus 123",
                       .counters = { { "skipped", 1 }, { "largest", INT64_MAX } },
                       .counter_count = 2 };
}

static inline CkptOptions options_of(Rank *r)
{
    const Job *j = r->job;
    return (CkptOptions){ .run_dir = j->run_dir,
                          .params = &r->params,
                          .world = &r->world,
                          .stream = &r->dev.stream,
                          .keep = j->keep,
                          .meta_bytes = 1000,
                          .bad_from = j->bad_from,
                          .keep_every = j->keep_every,
                          .keep_best = j->keep_best,
                          .best_set = j->best_set ? j->best_set : "sea" };
}

static inline CkptMeta evaluated(const Job *j, int64_t step)
{
    CkptMeta meta = meta_of(step);
    if (j->loss) meta.valid[meta.valid_count++] = (CkptValid){ "land", 0.5 };
    if (j->loss)
        meta.valid[meta.valid_count++] = (CkptValid){ .set = "sea",
                                                      .loss = j->loss[step],
                                                      .samples = j->valid_samples,
                                                      .crc = 7,
                                                      .content = j->valid_content,
                                                      .has_content = j->valid_content != 0 };
    return meta;
}

static inline Err rank_save(Rank *r)
{
    Job *j = r->job;
    Ckpt c;
    TRY(rank_open(r));
    TRY(ckpt_open(&c, options_of(r), &r->setup));
    setup_freeze(&r->setup); /* saving allocates nothing */
    for (int64_t step = j->step; step < j->step + (j->saves ? j->saves : 1); step++) {
        CkptMeta meta = evaluated(j, step);
        rank_fill(r, step);
        TRY(ckpt_save(&c, &meta));
    }
    return ERR_OK;
}

/* Like rank_save, by a thread: the state is another as soon as a save has been started. */
static inline Err rank_save_async(Rank *r)
{
    Job *j = r->job;
    Ckpt c = { 0 };
    Comm comm;
    CkptOutcome o = { 0 };
    int members[MAX_RANKS];
    for (int i = 0; i < MAX_RANKS; i++) members[i] = i;
    TRY(rank_open(r));
    if (r->hub) TRY(comm_open_threads(r->hub, &comm, "save", r->rank, members, grid_size(j->grid)));
    else comm_open_self(&comm, "save");
    Err err = ckpt_open(&c,
                        (CkptOptions){ j->run_dir, &r->params, &r->world, &r->dev.stream, j->keep, 1000, true, &comm },
                        &r->setup);
    setup_freeze(&r->setup);
    for (int64_t step = j->step; !err && step < j->step + (j->saves ? j->saves : 1); step++) {
        CkptMeta meta = meta_of(step);
        rank_fill(r, step);
        err = ckpt_start(&c, &meta);
        rank_fill(r, 1000 + step);
        if (err) break;
        while (!ckpt_collect(&c, j->collect_waits, &o)) usleep(100);
        if (o.step != step || ckpt_collect(&c, true, &o)) err = err_set(ERR_INTERNAL, "no outcome, or two");
        if (o.err) err = err_again(&o.why, o.err);
    }
    ckpt_close(&c);
    comm_close(&comm);
    return err;
}

static inline Err tell_loading(Rank *r, bool begins)
{
    if (!r->job->loading) return ERR_OK;
    TRY(comm_barrier(&r->world.world, &r->dev.stream));
    if (r->rank == 0) r->job->loading(begins);
    return comm_barrier(&r->world.world, &r->dev.stream);
}

static inline Err rank_load(Rank *r)
{
    Job *j = r->job;
    bool damaged;
    CkptMeta meta;
    TRY(rank_open(r));
    CkptLoad l = { j->path, &r->params, &r->world, &r->dev.stream, j->load_weights_only };
    TRY(tell_loading(r, true));
    Err err = ckpt_load(&l, &r->setup, &meta, &damaged);
    TRY(tell_loading(r, false));
    if (r->rank == 0) j->damaged = damaged;
    if (err) return err;
    CkptMeta want = meta_of(j->step);
    j->wrong[r->rank] = rank_wrong(r, j->step);
    j->wrong[r->rank] += strcmp(meta.config, want.config) || strcmp(meta.data, want.data) ||
                         meta.seed != 5 || strcmp(meta.program, want.program) ||
                         strcmp(meta.reproducible, "layout") ||
                         ckpt_counter(&meta, "largest", 0) != INT64_MAX ||
                         ckpt_counter(&meta, "none", 9) != 9;
    if (r->rank == 0) j->meta = meta;
    return ERR_OK;
}

static inline Err rank_load_save(Rank *r)
{
    Ckpt c;
    CkptMeta meta = meta_of(r->job->step);
    TRY(rank_load(r));
    TRY(ckpt_open(&c, (CkptOptions){ r->job->run_dir, &r->params, &r->world, &r->dev.stream, 0, 1000 }, &r->setup));
    return ckpt_save(&c, &meta);
}

typedef struct {
    Rank rank;
    Err (*run)(Rank *);
} RankThread;

static inline void *rank_main(void *arg)
{
    RankThread *t = arg;
    Rank *r = &t->rank;
    Job *j = r->job;
    Err err = grid_size(j->grid) == 1 ? world_open_self(&r->world)
                                      : world_open_threads(&r->world, r->hub, j->grid, r->rank);
    bool opened = !err;
    if (!err) err = t->run(r);
    j->err[r->rank] = err;
    snprintf(j->message[r->rank], sizeof j->message[0], "%s", err ? err_message() : "");
    if (opened) world_close(&r->world);
    setup_release(&r->setup);
    free(r->memory);
    device_close(&r->dev);
    return NULL;
}

/* Runs all ranks; the kind they agree on, with rank 0's message as this thread's. */
static inline Err run_ranks(Job *j, Err (*run)(Rank *))
{
    int size = grid_size(j->grid);
    pthread_t threads[MAX_RANKS];
    static RankThread t[MAX_RANKS];
    CommHub *hub = NULL;
    if (size > 1) TRY(comm_hub_open(size, 0, &hub));
    for (int i = 0; i < size; i++) {
        t[i] = (RankThread){ .rank = { .job = j, .rank = i, .hub = hub }, .run = run };
        pthread_create(&threads[i], NULL, rank_main, &t[i]);
    }
    for (int i = 0; i < size; i++) pthread_join(threads[i], NULL);
    if (hub) comm_hub_close(hub);
    for (int i = 0; i < size; i++)
        if (!j->err[i] != !j->err[0]) return err_set(ERR_INTERNAL, "ranks disagree: %s", j->message[i]);
    return j->err[0] ? err_set(j->err[0], "%s", j->message[0]) : ERR_OK;
}

static inline Err save(Grid g, ModelKind k, const char *dir, int64_t step, int keep)
{
    Job j = { .grid = g, .kind = k, .run_dir = dir, .step = step, .keep = keep };
    return run_ranks(&j, rank_save);
}

/* Loads into poisoned memory; ERR_INTERNAL when an element is wrong. */
static inline Err load(Grid g, ModelKind k, const char *path, int64_t step)
{
    Job j = { .grid = g, .kind = k, .path = path, .step = step, .poison = true };
    TRY(run_ranks(&j, rank_load));
    if (j.meta.step != step || j.meta.samples != 15 * step || j.meta.tokens != 960 * step)
        return err_set(ERR_INTERNAL, "wrong numbers in the meta data");
    for (int i = 0; i < grid_size(g); i++)
        if (j.wrong[i])
            return err_set(ERR_INTERNAL, "rank %d: %lld wrong elements", i, (long long)j.wrong[i]);
    return ERR_OK;
}

/* Loads, and saves what was loaded into `dir`. */
static inline Err load_save(Grid g, ModelKind k, const char *path, const char *dir, int64_t step)
{
    Job j = { .grid = g, .kind = k, .path = path, .run_dir = dir, .step = step, .poison = true };
    return run_ranks(&j, rank_load_save);
}

/* ---- folders ---- */

static const Grid ONE = { .tp = 1, .dp = 1 };
static const ModelKind SMALL = { 0 };

static inline const char *fresh_dir(void)
{
    static char dir[64];
    const char *base = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm"; /* thousands of syncs: not on a disk */
    snprintf(dir, sizeof dir, "%s/megatrain-test-ckpt-%d", base, (int)getpid());
    file_remove_tree(dir);
    return dir;
}

static inline const char *step_path(const char *dir, int64_t step, const char *file)
{
    static char path[4][300];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[0], "%s/checkpoints/step-%08lld%s%s", dir, (long long)step,
             *file ? "/" : "", file);
    return path[turn];
}

static inline char *read_file(const char *path, int64_t *size)
{
    static char *text;
    OK(file_read_all(path, 64 << 20, &text, size));
    return text;
}

static inline void write_file(const char *path, const void *data, int64_t size)
{
    FILE *f = fopen(path, "wb");
    fwrite(data, 1, (size_t)size, f);
    fclose(f);
}

static inline int count_entries(const char *dir, const char *part)
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
static inline void write_manifest(const char *dir, int64_t step, const char *text)
{
    char crc[64];
    int64_t size = (int64_t)strlen(text);
    snprintf(crc, sizeof crc, "crc32c %08x size %lld\n", crc32c(0, text, (size_t)size), (long long)size);
    write_file(step_path(dir, step, "manifest.json"), text, size);
    write_file(step_path(dir, step, "manifest.crc"), crc, (int64_t)strlen(crc));
}

/* `text` with the first `from` replaced; NULL if there is none. */
static inline const char *replaced(const char *text, const char *from, const char *to)
{
    static char out[65536];
    const char *at = strstr(text, from);
    if (!at) return NULL;
    snprintf(out, sizeof out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return out;
}

#endif
