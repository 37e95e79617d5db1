/*
 * The emulator's checks: each wrong program ends with a message that names what is wrong, in every lane. A wrong
 * program is a child: this program again, as `test_emu_checks --child KIND NUMBER`, which prints "survived" if
 * nothing stops it.
 */
#include <atomic>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#include "kernels.h"
#include "runtime.h"

/* The lane: kernels are instrumented; this file may be. */
#if defined(EMU_TSAN)
static const bool tsan = true;
#elif defined(__has_feature)
static const bool tsan = __has_feature(thread_sanitizer);
#else
static const bool tsan = false;
#endif
#if defined(EMU_ASAN)
static const bool asan = true;
#elif defined(__has_feature)
static const bool asan = __has_feature(address_sanitizer);
#else
static const bool asan = false;
#endif

struct Outcome {
    int status;
    std::string text;
    bool has(const char *part) const { return text.find(part) != std::string::npos; }
};

/* This program as a child, with `environment` before it; what it printed, and its exit status. */
static Outcome child(const std::string &environment, const std::string &kind, int number)
{
    char self[4096] = "", line[1024];
    CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    fflush(stdout);
    const std::string options = " ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=atexit_sleep_ms=0 '";
    const std::string what = kind + " " + std::to_string(number);
    FILE *f = popen((environment + options + self + "' --child " + what + " 2>&1").c_str(), "r");
    Outcome o;
    while (fgets(line, sizeof line, f)) o.text += line;
    const int status = pclose(f);
    o.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return o;
}

/* ---- wrong kernels ---- */

/* In the order of enum Wrong: what is printed; what AddressSanitizer or UBSan prints instead, where they come first. */
static const struct {
    const char *text, *sanitizer;
} wrongs[] = {
    { "which does not take part", nullptr },
    { "which does not take part", nullptr },
    { "the warp has diverged", nullptr },
    { "not in its own mask", nullptr },
    { "while other threads wait in __syncthreads at", nullptr },
    { "no thread can go on", nullptr },
    { "wrote behind the shared array 'numbers' (256 bytes)", "use-after-poison" },
    { "wrote behind the shared array 'dynamic' (256 bytes)", "use-after-poison" },
    { "52256 bytes of SHARED arrays, 49152 at most", nullptr },
    { "0 bytes behind the end of cudaMalloc", "unknown-crash" },
    { "wrote behind cudaMalloc", "use-after-poison" },
    { "not allocated", "SEGV" },
    { "ldmatrix at", nullptr },
    { "are not in shared memory", nullptr },
    { "__ldg: address", nullptr },
    { "not a multiple of 16", "survived" }, /* instrumented, the access is a call of memcpy */
    { "both must be multiples of 16", nullptr },
    { "is not device memory", nullptr },
    { "copies were not waited for", nullptr },
    { "the warp is not whole", nullptr },
    { "more stack", "stack-overflow" },
    { "argument 2 holds", nullptr },
    { "argument 2 holds", nullptr },
    { "__trap", nullptr },
    { "blocks of 40 threads, __launch_bounds__ allows 32", nullptr },
    { "50176 bytes of shared memory, 49152 at most", nullptr },
};
static_assert(sizeof wrongs / sizeof wrongs[0] == WRONG_COUNT, "one line for each");

TEST(wrong_kernels)
{
    for (int i = 0; i < WRONG_COUNT; i++) {
        if (tsan && wrongs[i].sanitizer) continue; /* memory errors: not this lane's */
        const Outcome o = child("", "wrong", i);
        const bool named = o.has(wrongs[i].text) || (asan && wrongs[i].sanitizer && o.has(wrongs[i].sanitizer));
        CHECK_MSG(named && (o.status != 0) == !o.has("survived"), "wrong kernel %d: status %d, wanted '%s', got\n%s", i,
                  o.status, wrongs[i].text, o.text.c_str());
    }
}

/* ---- wrong order ---- */

/* In the order of enum Race: which order gives a wrong result; whether ThreadSanitizer sees a race. */
static const struct {
    bool forward, reverse, random, race;
} races[] = {
    { false, false, false, false }, /* none */
    { true, true, true, true },     /* no barrier */
    { true, true, true, true },     /* no wait */
    { true, false, true, true },    /* from the next lane */
    { false, true, true, true },    /* from the last lane */
    { false, false, false, true },  /* blocks */
    { false, false, true, true },   /* early copy */
};
static_assert(sizeof races / sizeof races[0] == RACE_COUNT, "one line for each");

TEST(wrong_order)
{
    static const char *const orders[] = { "forward", "reverse", "random:1", "random:2" };
    for (int i = 0; i < RACE_COUNT; i++) {
        bool race = false;
        for (int k = 0; k < 4; k++) {
            const bool seen = k == 0 ? races[i].forward : k == 1 ? races[i].reverse : races[i].random;
            const Outcome o = child(std::string("EMU_ORDER=") + orders[k], "race", i);
            CHECK_MSG(o.has(seen ? "wrong answer" : "right answer"), "race %d in order %s:\n%s", i, orders[k],
                      o.text.c_str());
            race = race || (o.has("data race") && o.has("wrong.cu:"));
            if (!races[i].race) CHECK_MSG(!o.has("data race"), "race %d:\n%s", i, o.text.c_str());
        }
        if (tsan) CHECK_MSG(race == races[i].race, "race %d: %s", i, race ? "seen" : "not seen");
    }
}

/* ---- Hopper ---- */

/* What must be said: in every order, or in some at least. */
struct Caught {
    const char *text;
    bool always;
};

/* In the order of enum RingWrong. */
static const Caught rings[] = {
    { "right answer", true },
    { "no barrier: barrier_init has not been here", true },
    { "this barrier was made before", true },
    { "barriers_ready() was left out", true },
    { "it expects too few", false }, /* or more come than are expected */
    { "no thread can go on", true },
    { "no thread can go on", true },
    { "waits for phase 0: it comes late", false }, /* or no thread can go on */
    { "more arrivals than the 1", false }, /* or a wrong answer */
    { "phase 3 has this parity, and the thread waits for phase 1", true },
    { "tma_load_3d", true },
    { "is no multiple of 128", true },
    { "coordinate -4: -8 bytes are no multiple of 16", true },
    { "no tensor map", true },
    { "row 63 of the box is not within one allocation", false }, /* or another row behind the end */
    { "ends while a copy", false }, /* or with bytes that nobody expects */
    { "right answer", true }, /* copies and products take addresses as they are */
    { "wrong answer", true },
    { "wrong answer", true },
    { "wrong answer", true },
    { "that must be 0 are not", true },
    { "wrong answer", true },
    { "descriptors", false }, /* or what it names is not aligned */
    { "no thread can go on", true },
    { "wgmma_begin(d) was left out", true },
    { "d was changed behind wgmma_begin(d)", true },
    { "d was written while products", true },
    { "products so far, of other threads", true },
    { "wgmma_end at", true },
    { "returns while products were not waited for", true },
    { "wrong answer", false },
    { "wrong answer", false },
    { "wrong answer", false },
    { "no thread can go on", false }, /* or somebody comes late */
};
static_assert(sizeof rings / sizeof rings[0] == RING_COUNT, "one line for each");

/* In the order of enum Together. */
static const Caught together[] = {
    { "right answer", true },
    { "a thread stored it and had no proxy_fence() since", true },
    { "a thread stored it and had no proxy_fence() since", false },
    { "a thread stored it and had no proxy_fence() since", true },
    { "wrong answer", false },
    { "right answer", true },
    { "no thread can go on", true },
    { "registers_take<160> at", true },
    { "of its warpgroup", true },
    { "the kernel has no __launch_bounds__", true },
    { "right answer", true },
    { "barrier 0; there are 1 to 15", true },
    { "named_arrive at", false }, /* or no thread can go on */
    { "no thread can go on", true },
    { "wrong answer", false },
};
static_assert(sizeof together / sizeof together[0] == TOGETHER_COUNT, "one line for each");

/* In some order: at least in one of a few random ones, of which it takes as many as it needs. */
static void check_caught(const char *kind, int what, const Caught &c)
{
    static const char *const orders[] = { "forward", "reverse", "random:1", "random:2", "random:3",
                                          "random:4", "random:5", "random:6", "random:7", "random:8" };
    bool some = false;
    std::string all;
    for (int i = 0; i < (c.always ? 4 : 10) && (c.always || !some); i++) {
        const Outcome o = child(std::string("EMU_ORDER=") + orders[i], kind, what);
        all += std::string(orders[i]) + ": " + o.text;
        some = some || o.has(c.text);
        if (c.always) CHECK_MSG(o.has(c.text), "%s %d: wanted '%s', got\n%s", kind, what, c.text, all.c_str());
    }
    CHECK_MSG(some, "%s %d: wanted '%s', got\n%s", kind, what, c.text, all.c_str());
}

TEST(wrong_for_hopper)
{
    for (int i = 0; i < RING_COUNT; i++) check_caught("ring", i, rings[i]);
    for (int i = 0; i < TOGETHER_COUNT; i++) check_caught("together", i, together[i]);
}

TEST(other_gpus_have_no_such_instructions)
{
    for (const char *gpu : { "EMU_GPU=8.0", "EMU_GPU=10.0" }) {
        const Outcome o = child(gpu, "ring", RING_RIGHT);
        CHECK_MSG(o.status == 97 && o.has("has no such instruction"), "%s: %d %s", gpu, o.status, o.text.c_str());
    }
}

TEST(tensor_maps_beyond_the_limits)
{
    CUtensorMap map;
    void *p;
    CHECK(cudaMalloc(&p, 1 << 16) == cudaSuccess);
    const MapShape right = { 64, 64, 128, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B };
    CHECK(make_map(&map, p, right));
    MapShape m[7];
    for (MapShape &x : m) x = right;
    m[0].columns = 0;
    m[1].stride = 136;
    m[2].box_rows = 257;
    m[3].box_rows = 0;
    m[4].box_columns = 128; /* two rows of the swizzle */
    m[5].box_columns = 36;  /* no multiple of 16 bytes */
    m[6].rows = uint64_t{ 1 } << 33;
    for (const MapShape &x : m) CHECK(!make_map(&map, p, x));
    CHECK(!make_map(&map, static_cast<char *>(p) + 8, right));
    CHECK(!make_map(&map, &map, right)); /* the host's */
    m[4].swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
    CHECK(make_map(&map, p, m[4]));
    CHECK(cudaFree(p) == cudaSuccess);
}

/* ---- the host ---- */

TEST(host_mistakes)
{
    for (const char *keys : { "EMU_KEYS=1", "EMU_KEYS=0" }) { /* the same by protection keys and by mprotect */
        Outcome o = child(keys, "touch", 0);
        CHECK_MSG(o.status != 0 && o.has("host code touches device memory"), "%d %s", o.status, o.text.c_str());
        o = child(keys, "touch", 1);
        CHECK_MSG(o.status != 0 && !o.has("survived"), "%d %s", o.status, o.text.c_str());
        o = child(keys, "race", 0);
        CHECK_MSG(o.has("right answer"), "%d %s", o.status, o.text.c_str());
    }
    const Outcome o = child("EMU_ORDER=sideways", "race", 0);
    CHECK_MSG(o.status == 97 && o.has("EMU_ORDER=sideways"), "%s", o.text.c_str());
}

TEST(no_device)
{
    for (const char *none : { "EMU_DEVICES=0", "CUDA_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES=1" }) {
        const Outcome o = child(none, "devices", 0);
        CHECK_MSG(o.status == 0 && o.has("count 0: no CUDA-capable device is detected"), "%s", o.text.c_str());
    }
}

/* The first launch of a kernel loads it, unless all were loaded before; a later one is allowed at any time. */
TEST(loading_beside_a_collective)
{
    const Outcome lazy = child("", "lazy", 1), before = child("", "lazy", 0),
                  eager = child("CUDA_MODULE_LOADING=EAGER", "lazy", 1);
    CHECK_MSG(lazy.status == 97 && lazy.has("scale_kernel at") && lazy.has("beside a running collective"), "%d %s",
              lazy.status, lazy.text.c_str());
    CHECK_MSG(before.has("survived"), "%s", before.text.c_str());
    CHECK_MSG(eager.has("survived"), "%s", eager.text.c_str());
}

TEST(streams_that_share_a_queue)
{
    const Outcome late = child("", "queue", 0), queue = child("EMU_STREAMS=queue", "queue", 0);
    CHECK_MSG(late.has("beside\nsurvived"), "%d %s", late.status, late.text.c_str());
    CHECK_MSG(queue.has("behind\nsurvived"), "%d %s", queue.status, queue.text.c_str());
}

/* A copy in one stream of what another makes: by chance before or after it, unless the one waits for the other. */
TEST(streams_that_come_on_by_chance)
{
    int before = 0, after = 0;
    for (int seed = 1; seed <= 24; seed++) {
        const std::string environment = "EMU_STREAMS=random EMU_SEED=" + std::to_string(seed);
        const Outcome alone = child(environment, "chance", 0), behind = child(environment, "chance", 1);
        before += alone.has("1 of 7");
        after += alone.has("7 of 7");
        CHECK_MSG(behind.has("7 of 7"), "seed %d: %s", seed, behind.text.c_str());
    }
    CHECK_MSG(before > 0 && after > 0 && before + after == 24, "%d before, %d after", before, after);
}

/* What a kernel may ask for, and what it may take with its arrays, is the imitated GPU's. */
TEST(architectures)
{
    static const struct {
        const char *environment, *text;
        int bytes;
    } rows[] = { { "", "9.0 grants 232448: success", 232448 },
                 { "EMU_GPU=8.0", "8.0 grants 166912: success", 166912 },
                 { "EMU_GPU=8.6", "8.6 grants 101376: success", 101376 },
                 { "EMU_GPU=8.6", "8.6 grants 101377: invalid value", 101377 },
                 { "EMU_GPU=8.9", "8.9 grants 166912: invalid value", 166912 },
                 { "EMU_GPU=12.0", "12.0 grants 101376: success", 101376 },
                 { "EMU_GPU=7.5", "EMU_GPU=7.5", 0 } };
    for (const auto &r : rows) {
        const Outcome o = child(r.environment, "gpu", r.bytes);
        CHECK_MSG(o.has(r.text), "%s: %s", r.environment, o.text.c_str());
        const bool taken = o.has("at most on") && o.status == 97;
        CHECK_MSG(taken == (o.has("success") != 0), "arrays beside all of it: status %d, %s", o.status, o.text.c_str());
    }
}

TEST(report)
{
    char name[] = "/tmp/emu_report_XXXXXX", line[256];
    const int fd = mkstemp(name);
    std::string text;
    CHECK(fd >= 0);
    child(std::string("EMU_REPORT=") + name, "report", 0);
    FILE *f = fdopen(fd, "r");
    while (fgets(line, sizeof line, f)) text += line;
    CHECK_MSG(text ==
                  "2 block_sum_kernel<float, 32>\n1 mma_kernel<__half>\n4 scale_kernel\n2560 bytes of device memory\n",
              "%s", text.c_str());
    fclose(f);
    unlink(name);
}

/* ---- children ---- */

static void *memory(size_t size)
{
    void *p;
    return cudaMalloc(&p, size) ? nullptr : p;
}

static int race_child(enum Race what, cudaStream_t stream)
{
    int in[256], out[256], bad = 0;
    for (int i = 0; i < 256; i++) in[i] = 3 * i;
    int *din = static_cast<int *>(memory(sizeof in)), *dout = static_cast<int *>(memory(sizeof out));
    cudaMemcpy(din, in, sizeof in, cudaMemcpyHostToDevice);
    cudaMemset(dout, 0, sizeof out);
    run_race(what, dout, din, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(out, dout, sizeof out, cudaMemcpyDeviceToHost);
    for (int i = 0; i < (what == RACE_BLOCKS ? 32 : 256); i++) {
        int want = in[255 - i];
        if (what == RACE_FROM_NEXT) want = in[i % 32 < 31 ? i + 1 : i];
        if (what == RACE_FROM_LAST) want = in[i % 32 > 0 ? i - 1 : i];
        if (what == RACE_BLOCKS) want = 3 * (8 * i + 32 * 28);
        bad += out[i] != want;
    }
    printf("%s answer\n", bad ? "wrong" : "right");
    return 0;
}

static uint16_t bf16_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
}

/* Small integers, whose sums are the same in any order. */
static int ring_child(enum RingWrong what, cudaStream_t stream)
{
    enum { A = 64 * RING_DEPTH, B = RING_COLUMNS * RING_DEPTH, D = 64 * RING_COLUMNS };
    static uint16_t a[A], b[B];
    static float out[D];
    static int x[A], y[B];
    int bad = 0;
    for (int i = 0; i < A; i++) x[i] = i * 37 / 5 % 9 - 4, a[i] = bf16_bits(static_cast<float>(x[i]));
    for (int i = 0; i < B; i++) y[i] = i * 53 / 7 % 11 - 5, b[i] = bf16_bits(static_cast<float>(y[i]));
    uint16_t *da = static_cast<uint16_t *>(memory(sizeof a)), *db = static_cast<uint16_t *>(memory(sizeof b));
    float *dout = static_cast<float *>(memory(sizeof out));
    cudaMemcpy(da, a, sizeof a, cudaMemcpyHostToDevice);
    cudaMemcpy(db, b, sizeof b, cudaMemcpyHostToDevice);
    run_ring(what, dout, da, db, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(out, dout, sizeof out, cudaMemcpyDeviceToHost);
    for (int i = 0; i < D; i++) {
        int sum = 0;
        for (int k = 0; k < RING_DEPTH; k++)
            sum += x[i / RING_COLUMNS * RING_DEPTH + k] * y[i % RING_COLUMNS * RING_DEPTH + k];
        bad += out[i] != static_cast<float>(sum);
    }
    printf("%s answer\n", bad ? "wrong" : "right");
    return 0;
}

static int together_child(enum Together what, cudaStream_t stream)
{
    int out[384], bad = 0;
    float *dout = static_cast<float *>(memory(sizeof out));
    run_together(what, dout, stream);
    cudaStreamSynchronize(stream);
    cudaMemcpy(out, dout, sizeof out, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 384; i++) {
        float sum;
        memcpy(&sum, out + i, 4);
        if (what < REGISTERS_RIGHT) bad += i < 128 && sum != 64 * 32;
        else if (what < NAMED_RIGHT) bad += out[i] != 1;
        else bad += i < 32 && out[i] != i;
    }
    printf("%s answer\n", bad ? "wrong" : "right");
    return 0;
}

static int report_child(cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float *x = static_cast<float *>(memory(1024)), *y = static_cast<float *>(memory(1024));
    uint16_t *a = static_cast<uint16_t *>(memory(512));
    for (int i = 0; i < 2; i++) run_block_sum(y, x, 64, 4, 32, stream);
    run_mma(x, a, a, 1, stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    for (int i = 0; i < 2; i++) run_scale(x, 1, 0, 64, stream);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int i = 0; i < 2; i++) cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
    return 0;
}

static int devices_child(void)
{
    int count = -1;
    const cudaError_t e = cudaGetDeviceCount(&count);
    if (cudaSetDevice(0) != e || memory(4)) return 1;
    printf("count %d: %s\n", count, cudaGetErrorString(e));
    return 0;
}

/* All that the GPU has for one block, and then arrays beside it. */
static int gpu_child(int bytes, cudaStream_t stream)
{
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    allow_shared(bytes);
    const bool granted = cudaGetLastError() == cudaSuccess;
    printf("%d.%d grants %d: %s\n", p.major, p.minor, bytes, granted ? "success" : "invalid value");
    fflush(stdout);
    if (!granted || bytes != static_cast<int>(p.sharedMemPerBlockOptin)) return 0;
    run_shared(static_cast<int *>(memory(4)), 1, static_cast<size_t>(bytes), stream);
    cudaStreamSynchronize(stream);
    return 0;
}

static int lazy_child(bool late, cudaStream_t stream)
{
    cudaStream_t other;
    float *y = static_cast<float *>(memory(256));
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    if (!late) run_scale(y, 1, 0, 64, stream);
    int asked = 0;
    emu::submit_until(other, "collective", [asked]() mutable { return ++asked > 3; });
    run_scale(y, 1, 0, 64, stream);
    cudaStreamSynchronize(stream);
    puts("survived");
    return 0;
}

/* Does work of one stream wait for what was submitted to another before it? */
static int queue_child(cudaStream_t stream)
{
    cudaStream_t other;
    std::atomic<bool> open{ false };
    float *y = static_cast<float *>(memory(256));
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    run_scale(y, 1, 0, 64, stream);
    cudaStreamSynchronize(stream);
    emu::submit_until(other, "collective", [&open] { return open.load(); });
    run_scale(y, 1, 0, 64, stream);
    bool done = false;
    for (int i = 0; i < 20 && !done; i++) done = cudaStreamQuery(stream) == cudaSuccess;
    puts(done ? "beside" : "behind");
    open = true;
    cudaStreamSynchronize(stream);
    cudaStreamSynchronize(other);
    puts("survived");
    return 0;
}

/* What a copy sees of y, which a kernel of another stream makes 7 of 1. */
static int chance_child(bool waits, cudaStream_t stream)
{
    cudaStream_t other;
    cudaEvent_t made;
    float *y = static_cast<float *>(memory(256)), seen = 0;
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    cudaMemsetAsync(y, 0, 256, stream);
    run_scale(y, 1, 1, 64, stream);
    cudaStreamSynchronize(stream);
    run_scale(y, 7, 0, 64, stream);
    cudaEventRecord(made, stream);
    if (waits) cudaStreamWaitEvent(other, made, 0);
    cudaMemcpyAsync(&seen, y, sizeof seen, cudaMemcpyDeviceToHost, other);
    cudaStreamSynchronize(other);
    cudaStreamSynchronize(stream);
    printf("%g of 7\n", static_cast<double>(seen));
    return 0;
}

static int run_child(const std::string &kind, int number)
{
    cudaStream_t stream;
    if (kind == "devices") return devices_child();
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return 1;
    if (kind == "race") return race_child(static_cast<enum Race>(number), stream);
    if (kind == "ring") return ring_child(static_cast<enum RingWrong>(number), stream);
    if (kind == "together") return together_child(static_cast<enum Together>(number), stream);
    if (kind == "report") return report_child(stream);
    if (kind == "lazy") return lazy_child(number, stream);
    if (kind == "gpu") return gpu_child(number, stream);
    if (kind == "queue") return queue_child(stream);
    if (kind == "chance") return chance_child(number, stream);
    int *p = static_cast<int *>(memory(number == WRONG_GLOBAL_MARGIN && kind == "wrong" ? 100 : 256));
    if (kind == "wrong") run_wrong(static_cast<enum Wrong>(number), p, stream);
    else if (number == 0) p[3] = 1;
    else {
        cudaFree(p);
        printf("%d\n", p[0]);
    }
    cudaStreamSynchronize(stream);
    puts("survived");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 4 && !strcmp(argv[1], "--child")) return run_child(argv[2], atoi(argv[3]));
    return test_main(argc, argv);
}
