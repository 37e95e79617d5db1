/*
 * Memory of a run: all of it is taken before the first step, and it is what the plan says.
 *
 * malloc, calloc, realloc, aligned allocation and mmap are defined here and so stand before the C library's for
 * everything in the process: our objects, libgomp, Jansson. Who asked is told by the return address: inside this
 * executable it was our code. pwrite stands in too: the line of step 1 in metrics.jsonl starts the count, so a
 * whole train_run is counted as it is, with its evaluations, checkpoints and reading ahead.
 *
 * Sanitizers bring an allocator of their own: skipped there.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "base/clock.h"
#include "config/config.h"
#include "base/log.h"
#include "ckpt_fixture.h"
#include "data/indexed.h"
#include "data/loader.h"
#include "scratch.h"
#include "test.h"
#include "tiny.h"
#include "train/train.h"

/* ---- counting ---- */

enum { PLACES = 8 };

typedef struct {
    const void *caller;
    size_t bytes;
} Place;

static struct {
    atomic_bool on, starts_at_step_1;
    atomic_llong ours, ours_bytes;     /* asked for by this executable's code */
    atomic_llong others, others_bytes; /* by libraries */
    Place place[PLACES], other_place[PLACES];
    atomic_int steps, saves; /* seen in what is written */
} count;

static bool is_ours(const void *caller)
{
    extern const char __executable_start, etext;
    return (const char *)caller >= &__executable_start && (const char *)caller < &etext;
}

__attribute__((unused)) static void note(const void *caller, size_t bytes)
{
    if (!atomic_load_explicit(&count.on, memory_order_relaxed)) return;
    bool mine = is_ours(caller);
    long long n = atomic_fetch_add(mine ? &count.ours : &count.others, 1);
    atomic_fetch_add(mine ? &count.ours_bytes : &count.others_bytes, (long long)bytes);
    if (n < PLACES) (mine ? count.place : count.other_place)[n] = (Place){ caller, bytes };
}

static void count_start(void)
{
    atomic_store(&count.ours, 0);
    atomic_store(&count.ours_bytes, 0);
    atomic_store(&count.others, 0);
    atomic_store(&count.others_bytes, 0);
    atomic_store(&count.on, true);
}

static void count_stop(void) { atomic_store(&count.on, false); }

/* Prints places: library and offset, for addr2line. */
static void print_places(const char *who, const Place *p, long long n)
{
    Dl_info info;
    for (int i = 0; i < n && i < PLACES; i++) {
        if (!dladdr(p[i].caller, &info)) continue;
        fprintf(stderr, "    %s: %zu bytes from %s+0x%zx (%s)\n", who, p[i].bytes, info.dli_fname,
                (size_t)((const char *)p[i].caller - (const char *)info.dli_fbase),
                info.dli_sname ? info.dli_sname : "?");
    }
}

#if !defined(__SANITIZE_ADDRESS__)
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);

#define CALLER __builtin_return_address(0)

void *malloc(size_t bytes)
{
    note(CALLER, bytes);
    return __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    note(CALLER, n * bytes);
    return __libc_calloc(n, bytes);
}

void *realloc(void *p, size_t bytes)
{
    note(CALLER, bytes);
    return __libc_realloc(p, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    note(CALLER, bytes);
    return __libc_memalign(align, bytes);
}

int posix_memalign(void **out, size_t align, size_t bytes)
{
    note(CALLER, bytes);
    *out = __libc_memalign(align, bytes);
    return *out ? 0 : ENOMEM;
}

void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    note(CALLER, bytes);
    return (void *)syscall(SYS_mmap, at, bytes, prot, flags, fd, offset);
}
#endif

static bool says(const void *data, size_t bytes, const char *text)
{
    return memmem(data, bytes < 400 ? bytes : 400, text, strlen(text)) != NULL;
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    bool step = says(data, bytes, "{\"step\":") && says(data, bytes, "\"loss\":");
    ssize_t written = syscall(SYS_pwrite64, fd, data, bytes, offset);
    if (count.on) count.steps += step;
    if (count.on) count.saves += says(data, bytes, "{\"format\":1,");
    if (step && says(data, bytes, "{\"step\":1,") && atomic_exchange(&count.starts_at_step_1, false))
        count_start();
    return written;
}

/* ---- a whole run ---- */

static void make_tokens(const char *name, int documents)
{
    IndexedWriter *w;
    uint64_t seed = 5;
    int32_t ids[700];
    OK(indexed_create(in_dir(name), indexed_type_for(257), &w));
    for (int d = 0; d < documents; d++) {
        for (int i = 0; i < 700; i++) ids[i] = (int32_t)(test_rand(&seed) % 64);
        OK(indexed_add_tokens(w, ids, 700));
        OK(indexed_end_document(w));
    }
    OK(indexed_finish(w));
}

static void train_counted(const char *run_dir, const char *const *more, int more_count)
{
    char dir[256], train[256], valid[256];
    const char *overrides[32] = { dir,
                                  train,
                                  valid,
                                  "model.layers=2",
                                  "model.hidden=32",
                                  "model.heads=4",
                                  "model.seq=64",
                                  "model.dropout=0.1",
                                  "train.micro_batch=2",
                                  "train.global_batch=8",
                                  "train.steps=8",
                                  "train.eval_every=3",
                                  "train.eval_samples=16",
                                  "checkpoint.every=2",
                                  "checkpoint.keep=2",
                                  "debug.threads=2" };
    int n = 16;
    snprintf(dir, sizeof dir, "run.dir=%s", in_dir(run_dir));
    snprintf(train, sizeof train, "data.train=%s", in_dir("train"));
    snprintf(valid, sizeof valid, "data.valid=%s", in_dir("valid"));
    for (int i = 0; i < more_count; i++) overrides[n++] = more[i];
    Config cfg;
    OK(config_read(&cfg, (ConfigSource){ .overrides = overrides, .override_count = n }));
    count.steps = count.saves = 0;
    count.starts_at_step_1 = true;
    Boot alone;
    OK(boot_from_env(&alone));
    Err err = train_run(&cfg, &alone, NULL);
    count_stop();
    count.starts_at_step_1 = false;
    OK(err);
    config_release(&cfg);
}

/* Steps, evaluations, saves, the removal of old checkpoints, the curve: nothing is allocated by our objects. */
TEST(nothing_is_allocated_after_step_1)
{
    static const char *const kinds[][2] = { { "model.arch=gpt2", "log.trace_every=1" },
                                            { "model.arch=llama", "train.recompute=selective" },
                                            { "run.reproducible=run", "train.recompute=full" },
                                            { "train.offload=2", "model.arch=llama" } };
    if (SANITIZED) SKIP("sanitizers bring their own allocator");
    make_tokens("train", 40);
    make_tokens("valid", 10);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char name[32];
        log_set_level(LOG_WARN);
        snprintf(name, sizeof name, "run%zu", i);
        train_counted(name, kinds[i], 2);
        log_set_level(LOG_INFO);
        CHECK_MSG(count.steps == 7 && count.saves == 4, "%d steps, %d saves were seen", count.steps,
                  count.saves);
        CHECK_MSG(count.ours == 0, "%s %s: %lld allocations, %lld bytes", kinds[i][0], kinds[i][1],
                  count.ours, count.ours_bytes);
        print_places("ours", count.place, count.ours);
        /* the C library's own, while a save lists and clears folders: three at most, freed again */
        bool few = count.others <= 3 * count.saves && count.others_bytes <= count.saves * (int64_t)(96 << 10);
        CHECK_MSG(few, "%s %s: libraries: %lld allocations, %lld bytes", kinds[i][0], kinds[i][1],
                  count.others, count.others_bytes);
        if (!few) print_places("library", count.other_place, count.others);
    }
}

/* The counting counts. */
TEST(an_allocation_is_noticed)
{
    if (SANITIZED) SKIP("sanitizers bring their own allocator");
    SetupArena setup;
    Device cpu;
    void *p;
    OK(device_open(&cpu, (DeviceChoice){ .threads = 1 }));
    count_start();
    setup_init(&setup);
    OK(setup_alloc(&setup, 1000, &p));
    long long after_setup = count.ours;
    OK(device_alloc(&cpu, 4096, &p));
    count_stop();
    CHECK(after_setup == 1 && count.ours == 2 && count.ours_bytes >= 1000 + 4096);
    setup_release(&setup);
    device_free(&cpu, p, 4096);
    device_close(&cpu);
}

/* ---- the plan ---- */

static TrainSpec spec_of(bool llama, Recompute recompute, int64_t T)
{
    TrainSpec s = llama ? tiny_llama() : tiny_gpt2();
    s.model.hidden = 32;
    s.model.heads = s.model.kv_heads = 2;
    s.model.head_dim = 16;
    s.model.ffn = 64;
    s.model.tp_blocks = 2;
    s.model.recompute = layer_pattern_all(recompute);
    s.model.seq = T;
    s.micro_batch = 1;
    s.global_batch = 2;
    s.seq_blocks = 4;
    s.attn_block = 64;
    return s;
}

static int64_t working_bytes(const MemoryPlan *p)
{
    return p->save + p->scratch;
}

static Err any_tokens(void *user, int64_t first, int64_t n, int32_t *out)
{
    int64_t width = *(const int64_t *)user + 1;
    for (int64_t i = 0; i < n * width; i++) out[i] = (int32_t)((first * width + i) * 7919 % TINY_VOCAB);
    return ERR_OK;
}

static Err one_request(void *user, int64_t first, int64_t n, int32_t *begin, bool *counts)
{
    const int64_t T = *(const int64_t *)user;
    (void)first;
    for (int64_t i = 0; i < n * T; i++) begin[i] = 0, counts[i] = true;
    return ERR_OK;
}

/* Twice the tokens, twice the memory; at 4096 all of it together is less than one table of T x T. */
TEST(memory_grows_linearly_with_the_sequence)
{
    for (int llama = 0; llama < 2; llama++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_FULL; recompute++) {
            int64_t bytes[4];
            for (int i = 0; i < 4; i++) {
                MemoryPlan p;
                TrainSpec s = spec_of(llama, (Recompute)recompute, (int64_t)512 << i);
                OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &p));
                bytes[i] = working_bytes(&p);
            }
            for (int i = 0; i < 2; i++) {
                double step = (double)(bytes[i + 1] - bytes[i]), next = (double)(bytes[i + 2] - bytes[i + 1]);
                CHECK_MSG(fabs(next / step - 2) < 0.01, "llama %d recompute %d, T %d: %lld %lld %lld", llama,
                          recompute, 512 << i, (long long)bytes[i], (long long)bytes[i + 1],
                          (long long)bytes[i + 2]);
            }
            CHECK_MSG(bytes[3] < (int64_t)4096 * 4096 * 4, "llama %d recompute %d: %lld bytes", llama,
                      recompute, (long long)bytes[3]);
        }
}

/* Layers in parallel, behind a norm each, keep what others keep but the stream between them: [R, D] fp32 a block. */
TEST(parallel_layers_keep_no_stream_between_them)
{
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_SELECTIVE; recompute++) {
        MemoryPlan serial, parallel;
        TrainSpec s = spec_of(true, (Recompute)recompute, 1024);
        OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &serial));
        s.model.block_norms = BLOCK_NORMS_PARALLEL_TWO;
        OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &parallel));
        const int64_t between = s.model.layers * s.model.seq * s.model.hidden * 4;
        CHECK_MSG(serial.save - parallel.save == between, "recompute %d: %lld bytes kept, one by one %lld", recompute,
                  (long long)parallel.save, (long long)serial.save);
    }
}

/* If cp ranks share a sequence, each keeps its share. A ring takes five parts of 2 cp of the keys and values, those of
 * their gradients among them, beside what attention takes alone, and the rank's heads and their gradients are copied
 * apart from qkv; gathered, they are there whole. In the order of arrival it takes ten: two blocks of keys and values,
 * three of gradients. */
TEST(shared_sequences_take_their_share)
{
    for (int kind = 0; kind < 4; kind++)
        for (int cp = 2; cp <= 8; cp *= 2) {
            MemoryPlan one, gathered, ring, a2a;
            const bool exact = kind / 2;
            TrainSpec s = spec_of(kind % 2, RECOMPUTE_NONE, 1 << 15);
            s.exact = exact;
            s.seq_blocks = 16;
            s.model.heads = s.model.kv_heads = s.model.tp_blocks = 8;
            const int64_t keys = 2 * s.model.seq * s.model.kv_heads * s.model.head_dim * 4;
            const Grid g = { .tp = 1, .cp = cp, .dp = 1 };
            OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &one));
            OK(trainer_plan(&s, g, cp - 1, &gathered));
            s.model.context = layer_pattern_all(CONTEXT_RING);
            OK(trainer_plan(&s, g, cp - 1, &ring));
            s.model.context = layer_pattern_all(CONTEXT_A2A);
            OK(trainer_plan(&s, g, cp - 1, &a2a));
            const double share = (double)one.save / cp;
            CHECK_MSG(fabs((double)ring.save / share - 1) < 0.01, "cp %d keeps %lld bytes, one rank %lld", cp,
                      (long long)ring.save, (long long)one.save);
            CHECK(ring.save == gathered.save && ring.save == a2a.save);
            const int64_t parts = exact ? 5 : 10;
            CHECK_MSG(ring.scratch <= one.scratch / cp + (parts + 3) * keys / (2 * cp) + 8192,
                      "cp %d, exact %d: scratch %lld, one rank %lld", cp, exact, (long long)ring.scratch,
                      (long long)one.scratch);
            CHECK_MSG(gathered.scratch > one.scratch / cp + keys && a2a.scratch <= gathered.scratch,
                      "cp %d: %lld, a2a %lld", cp, (long long)gathered.scratch, (long long)a2a.scratch);
        }
}

/* However many micro-batches a step has: one step of the plan is one step of the machine. */
TEST(planned_work_is_the_work_of_a_step)
{
    static const int64_t batches[] = { 1, 2, 3, 7 };
    for (int exact = 0; exact < 2; exact++)
        for (int i = 0; i < 4; i++) {
            TrainSpec s = tiny_llama();
            World world;
            MemoryPlan plan;
            Trainer t;
            StepReport report;
            s.exact = exact;
            s.micro_batch = 3;
            s.global_batch = 3 * batches[i];
            OK(world_open_self(&world));
            OK(trainer_plan(&s, world.grid, 0, &plan));
            OK(trainer_open(&t, &s, &world, &plan));
            int64_t flop = t.device.counters.flop, bytes = t.device.counters.bytes;
            OK(trainer_step(&t, (TokenSource){ NULL, tiny_tokens }, &report));
            CHECK(t.parts.step.microbatches == batches[i] && !report.redone);
            flop = t.device.counters.flop - flop;
            bytes = t.device.counters.bytes - bytes;
            CHECK_MSG(flop == plan.work.flop && bytes == plan.work.op_bytes,
                      "%d micro-batches: %lld FLOP and %lld bytes, planned %lld and %lld", t.parts.step.microbatches,
                      (long long)flop, (long long)bytes, (long long)plan.work.flop, (long long)plan.work.op_bytes);
            trainer_close(&t);
            world_close(&world);
        }
}

/* Halves of pairs in turn cost the scratch of forwards and no work. (test_pipeline: a run has it to the byte.) */
TEST(pairs_take_the_scratch_of_a_forward_more)
{
    const Grid grid = { .tp = 1, .dp = 2, .pp = 2, .ep = 2 };
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_FULL; recompute++) {
        MemoryPlan alone, forward, pairs;
        TrainSpec s = tiny_mixture(TINY_QWEN3, 8);
        s.pipeline.schedule = "dualpipev";
        s.global_batch = 32;
        s.model.recompute = layer_pattern_all(recompute);
        OK(trainer_plan(&s, grid, 0, &alone));
        s.overlap_moe = true;
        OK(trainer_plan(&s, grid, 0, &pairs));
        s.purpose.forward_only = true;
        OK(trainer_plan(&s, grid, 0, &forward));
        CHECK(alone.scratch_forward == 0 && forward.scratch_forward == 0 && pairs.scratch_forward > 0);
        CHECK_MSG(pairs.scratch_forward == forward.scratch && pairs.scratch == alone.scratch + forward.scratch,
                  "recompute %d: %lld of %lld, without pairs %lld, of a forward %lld", recompute,
                  (long long)pairs.scratch_forward, (long long)pairs.scratch, (long long)alone.scratch,
                  (long long)forward.scratch);
        CHECK(pairs.state == alone.state && pairs.save == alone.save && pairs.work.flop == alone.work.flop);
        CHECK(pairs.work.op_bytes == alone.work.op_bytes && pairs.work.comm_bytes == alone.work.comm_bytes);
    }
}

/*
 * The first blocks' saves leave the device: there are two buffers instead, and their bytes in the host's memory, of
 * each unit in flight. Blocks are alike, so a block's share is what two models of which one has a block more differ in.
 */
TEST(offloaded_layers_leave_the_device)
{
    enum { LAYERS = 6 };
    static const struct {
        const char *schedule;
        int pp;
    } ways[] = { { "1f1b", 1 }, { "1f1b", 2 }, { "gpipe", 2 }, { "zb-h1", 2 } };
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_FULL; recompute++) {
            const Grid grid = { .tp = 1, .dp = 1, .pp = ways[w].pp };
            const bool split = !strcmp(ways[w].schedule, "zb-h1");
            TrainSpec s = tiny_llama(), shorter;
            MemoryPlan kept, one_less, p;
            s.model.layers = LAYERS * ways[w].pp;
            s.model.recompute = layer_pattern_all(recompute);
            s.pipeline.schedule = ways[w].schedule;
            shorter = s;
            shorter.model.layers -= ways[w].pp;
            OK(trainer_plan(&s, grid, 0, &kept));
            OK(trainer_plan(&shorter, grid, 0, &one_less));
            CHECK(kept.offload_buffers == 0 && kept.offload_host == 0);
            const StagePlan *a = &kept.stages[0], *b = &one_less.stages[0];
            const int64_t block_i = a->save[REGION_I] - b->save[REGION_I],
                          block_w = a->save[REGION_W] - b->save[REGION_W];
            const int64_t block = block_i + (split ? 0 : block_w);
            for (int n = 1; n <= LAYERS; n++) {
                s.model.offload = n;
                OK(trainer_plan(&s, grid, 0, &p));
                CHECK_MSG(kept.save - p.save == n * block * a->in_flight && p.stages[0].away == n * block,
                          "%s, %d of recomputation %d: %lld less, a block %lld", ways[w].schedule, n, recompute,
                          (long long)(kept.save - p.save), (long long)block);
                CHECK(p.offload_host == n * block * a->in_flight && p.offload_buffers == (n == 1 ? 1 : 2) * block);
                CHECK(p.state == kept.state && p.scratch == kept.scratch && p.work.flop == kept.work.flop &&
                      p.work.op_bytes == kept.work.op_bytes);
                CHECK(memory_plan_host(&p) == memory_plan_host(&kept) + p.offload_host);
            }
            s.purpose.forward_only = true;
            OK(trainer_plan(&s, grid, 0, &p));
            CHECK(p.offload_host == 0 && p.offload_buffers == 2 * block);
            s.purpose.forward_only = false;
            s.device.kind = DEVICE_CUDA, s.exact = false;
            OK(trainer_plan(&s, grid, 0, &p));
            CHECK(memory_plan_total(&p) == p.state + p.save + p.offload_buffers + p.scratch + p.workspace &&
                  p.host_apart);
        }
}

/* What is sent beside ops, of rows whole and in bands of a rank each: in backward gathers and sums of column-parallel
 * products; then also those of the others, and of the logits in forward. */
TEST(bands_travel_beside_products)
{
    enum { TP = 4, LAYERS = 2 };
    const Grid grid = { .tp = TP, .dp = 1, .sp = true };
    TrainSpec s = tiny_gpt2();
    MemoryPlan whole, bands;
    s.model.layers = LAYERS;
    const int64_t rows = s.micro_batch * s.model.seq / TP, units = s.global_batch / s.micro_batch;
    const int64_t call = (TP - 1) * rows * s.model.hidden * (int64_t)sizeof(float) * units;
    OK(trainer_plan(&s, grid, 0, &whole));
    s.overlap_tp = TP;
    OK(trainer_plan(&s, grid, 0, &bands));
    CHECK_MSG(whole.work.comm_beside == (4 * LAYERS + 2) * call, "%lld, a call %lld", (long long)whole.work.comm_beside,
              (long long)call);
    CHECK_MSG(bands.work.comm_beside == (10 * LAYERS + 3) * call, "%lld, a call %lld",
              (long long)bands.work.comm_beside, (long long)call);
    CHECK(bands.work.comm_bytes == whole.work.comm_bytes && bands.save == whole.save && bands.state == whole.state);
    s.compute = BF16, s.exact = false;
    OK(trainer_plan(&s, grid, 0, &bands));
    s.overlap_tp = 1;
    OK(trainer_plan(&s, grid, 0, &whole));
    CHECK(2 * bands.work.comm_beside == (10 * LAYERS + 3) * call && bands.work.comm_bytes == whole.work.comm_bytes);
    CHECK(memory_plan_total(&bands) == memory_plan_total(&whole));
}

/* A plan costs no host memory in proportion to what is planned. Beyond what a list can hold it says so, as the run. */
TEST(planning_is_cheap)
{
    TrainSpec s = tiny_gpt2();
    MemoryPlan two, three, many, refused;
    s.micro_batch = 1;
    s.global_batch = 2;
    OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &two));
    s.global_batch = 3;
    OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &three));
    s.global_batch = 100000;
    OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &many));
    CHECK(memory_plan_total(&many) == memory_plan_total(&two));
    CHECK(many.work.flop == two.work.flop + 99998 * (three.work.flop - two.work.flop));
    s.global_batch = 1 << 20;
    FAILS(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &refused), ERR_CONFIG, "at most 262144 can be listed");
    s.global_batch = 1 << 17;
    s.model.hidden = s.model.ffn = 1 << 18;
    CHECK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &refused) == ERR_CONFIG);
    s = tiny_gpt2(); /* one micro-batch alone */
    s.micro_batch = s.global_batch = 256;
    s.model.seq = 1 << 24;
    FAILS(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &refused), ERR_CONFIG,
          "more work on a rank than 64 bits count");
    s = tiny_llama(); /* as many rows of heads as the keys allow, 2^66: a sanitizer sees if they overflow */
    s.micro_batch = 1 << 14, s.global_batch = 1 << 30;
    s.model.seq = 1 << 24, s.model.heads = 4096, s.model.hidden = 8 * 4096;
    FAILS(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &refused), ERR_MEMORY, "more than 32 TiB");
    s = tiny_gpt2();
    s.micro_batch = s.global_batch = 1 << 20;
    count_start();
    OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 1 }, 0, &many));
    count_stop();
    CHECK(memory_plan_total(&many) > (int64_t)1 << 36);
    if (!SANITIZED) CHECK_MSG(count.ours > 0 && count.ours_bytes < 4 << 20, "%lld bytes", count.ours_bytes);
}

/*
 * A real step, an evaluation: what is asked of the system while the trainer opens is the plan's total to the
 * byte, besides the tables of the host; nothing is afterwards; and the high-water marks are the plan's.
 */
TEST(a_long_sequence_takes_what_was_planned)
{
    enum { HOST_TABLES = 4 << 20 }; /* with what making the schedule takes for a moment */
    for (int llama = 0; llama < 2; llama++)
        for (int64_t T = 512; T <= 4096; T *= 8) {
            TrainSpec s = spec_of(llama, RECOMPUTE_SELECTIVE, T);
            World world;
            MemoryPlan plan;
            Trainer t;
            StepReport report;
            double loss;
            int64_t counted;
            TokenSource tokens = { &T, any_tokens }, requests = { &T, any_tokens, one_request };
            const RowScore *scores;
            s.purpose.scores = llama;
            s.model.offload = llama;
            OK(world_open_self(&world));
            OK(trainer_plan(&s, world.grid, 0, &plan));
            count_start();
            OK(trainer_open(&t, &s, &world, &plan));
            count_stop();
            int64_t host_bytes = count.ours_bytes - memory_plan_total(&plan);
            if (!SANITIZED)
                CHECK_MSG(host_bytes >= t.memory.setup.total_bytes &&
                              host_bytes < t.memory.setup.total_bytes + HOST_TABLES,
                          "T %lld: %lld bytes, the plan says %lld, the host's tables are %lld", (long long)T,
                          count.ours_bytes, (long long)memory_plan_total(&plan), (long long)t.memory.setup.total_bytes);
            CHECK(t.device.counters.alloc_bytes + t.device.workspace_bytes ==
                  memory_plan_total(&plan) - plan.offload_host);
            CHECK((plan.offload_host > 0) == llama);
            count_start();
            OK(trainer_step(&t, tokens, &report));
            OK(trainer_eval(&t, tokens, 0, s.global_batch, &loss, &counted));
            if (llama) OK(trainer_scores(&t, requests, 0, s.global_batch, &scores));
            count_stop();
            CHECK_CLOSE(loss, log(TINY_VOCAB), 0.1, " ");
            CHECK(count.ours == 0);
            MemoryPlan peak = trainer_peak(&t);
            CHECK(peak.state == plan.state && peak.scratch == plan.scratch && peak.save == plan.save);
            CHECK(peak.offload_buffers == plan.offload_buffers && peak.offload_host == plan.offload_host);
            CHECK(!memcmp(peak.stages, plan.stages, sizeof peak.stages));
            trainer_close(&t);
            world_close(&world);
        }
}

/* What lies beside the arenas: two slices of the global batch, whatever the micro-batch. */
TEST(batches_read_ahead_take_what_was_planned)
{
    enum { SLACK = 512 << 10 }; /* arenas of the host grow by chunks */
    make_tokens("ahead", 40);
    for (int64_t G = 64; G <= 1 << 18; G *= 8) {
        Dataset *d;
        Loader *l;
        MemoryPlan with, without;
        TrainSpec s = tiny_gpt2();
        s.global_batch = G;
        OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 2 }, 0, &without));
        s.purpose.ahead = true;
        OK(trainer_plan(&s, (Grid){ .tp = 1, .dp = 2 }, 0, &with));
        const int64_t planned = memory_plan_total(&with) - memory_plan_total(&without);
        CHECK(planned == with.ahead && planned == G / 2 * 2 * 4 * (TINY_SEQ + 1));
        OK(dataset_open(&(DatasetOptions){ .spec = in_dir("ahead"), .seq = TINY_SEQ, .vocab = 257 }, &d));
        count_start();
        OK(loader_open(&(LoaderOptions){ .dataset = d, .first_step = 1, .ramp = batch_ramp_flat(G), .dp = 2 }, &l));
        count_stop();
        if (!SANITIZED)
            CHECK_MSG(count.ours_bytes >= planned && count.ours_bytes <= planned + SLACK,
                      "global batch %lld: %lld bytes, planned %lld", (long long)G, count.ours_bytes,
                      (long long)planned);
        loader_close(l);
        dataset_close(d);
    }
}

static void count_loading(bool begins)
{
    if (begins) count_start();
    else count_stop();
}

/* Bytes that the ranks of a grid ask for, freed or not, while they load what a rank alone has saved. */
static int64_t load_bytes(Grid g, ModelKind kind)
{
    char dir[256];
    snprintf(dir, sizeof dir, "%s", fresh_dir());
    OK(save(ONE, kind, dir, 20, 0));
    Job j = { .grid = g, .kind = kind, .path = step_path(dir, 20, ""), .step = 20, .loading = count_loading };
    OK(run_ranks(&j, rank_load));
    for (int r = 0; r < grid_size(g); r++) CHECK(j.wrong[r] == 0);
    return count.ours_bytes + count.others_bytes;
}

TEST(loading_takes_no_more_for_a_larger_model)
{
    if (SANITIZED) SKIP("the sanitizer has an allocator of its own");
    const ModelKind large = { .big = true }; /* by 12 MB of states */
    for (int i = 0; i < 2; i++) {
        const Grid g = i ? (Grid){ .tp = 2, .dp = 2 } : ONE;
        int64_t small_bytes = load_bytes(g, SMALL), large_bytes = load_bytes(g, large);
        CHECK_MSG(small_bytes > 1 << 20 && large_bytes < grid_size(g) * (int64_t)64 << 20, "%lld, %lld",
                  (long long)small_bytes, (long long)large_bytes);
        CHECK_MSG(large_bytes - small_bytes < grid_size(g) * (int64_t)64 << 10, "%lld, %lld", (long long)small_bytes,
                  (long long)large_bytes);
    }
}

TEST_MAIN
