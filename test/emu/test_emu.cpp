/*
 * The emulator itself: right kernels give right answers (in the order of EMU_ORDER), the runtime's functions do and
 * refuse what CUDA's do. What ends a process is in test_emu_checks.cpp.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <thread>
#include <vector>

#include <unistd.h>

#include "test.h"

#include "kernels.h"

static cudaStream_t stream;

template <class T> static T *on_device(const std::vector<T> &host)
{
    void *p;
    CHECK(cudaMalloc(&p, host.size() * sizeof(T)) == cudaSuccess);
    CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    return static_cast<T *>(p);
}

template <class T> static std::vector<T> from_device(const T *p, size_t count)
{
    std::vector<T> host(count);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(cudaMemcpy(host.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return host;
}

template <class T> static void check_equal(const char *name, const std::vector<T> &got, const std::vector<T> &want)
{
    for (size_t i = 0; i < want.size(); i++)
        CHECK_MSG(got[i] == want[i], "%s[%zu] is %g, want %g", name, i, (double)got[i], (double)want[i]);
}

/* Expected refusals print a line; not in the way of the test's own. */
struct Quiet {
    int saved;
    Quiet() : saved(dup(2))
    {
        fflush(stderr);
        FILE *f = fopen("/dev/null", "w");
        dup2(fileno(f), 2);
        fclose(f);
    }
    ~Quiet()
    {
        fflush(stderr);
        dup2(saved, 2);
        close(saved);
    }
};

static std::vector<int> iota(size_t n)
{
    std::vector<int> v(n);
    for (size_t i = 0; i < n; i++) v[i] = static_cast<int>(i);
    return v;
}

/* ---- right kernels ---- */

TEST(indices)
{
    std::vector<int> want = iota(24 * 60);
    int *out = on_device(std::vector<int>(want.size(), -1));
    run_indices(out, dim3(2, 3, 4), dim3(5, 4, 3), stream);
    check_equal("index", from_device(out, want.size()), want);
    cudaFree(out);
}

TEST(block_sums)
{
    const int n = 300, blocks = 5;
    std::vector<float> x(n * blocks), want(blocks);
    for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(i * i % 17);
    for (size_t i = 0; i < x.size(); i++) want[i / n] += x[i];
    float *dx = on_device(x);
    for (int threads : { 32, 64, 256, 1024 }) {
        float *sums = on_device(std::vector<float>(blocks, -1));
        run_block_sum(sums, dx, n, blocks, threads, stream);
        check_equal("sum", from_device(sums, blocks), want);
        cudaFree(sums);
    }
    cudaFree(dx);
}

TEST(ticket)
{
    const int blocks = 7, n = 1000;
    int *x = on_device(iota(n));
    int64_t *sum = on_device(std::vector<int64_t>(1)), *part = on_device(std::vector<int64_t>(blocks));
    unsigned *ticket = on_device(std::vector<unsigned>(1));
    run_ticket_sum(sum, part, ticket, x, n, blocks, stream);
    check_equal("sum", from_device(sum, 1), { n * (n - 1) / 2 });
    cudaFree(x), cudaFree(sum), cudaFree(part), cudaFree(ticket);
}

TEST(warp_operations)
{
    uint32_t *out = on_device(std::vector<uint32_t>(32 * 16));
    run_warp(out, stream);
    const std::vector<uint32_t> got = from_device(out, 32 * 16);
    for (uint32_t lane = 0; lane < 32; lane++) {
        uint32_t match = 0;
        for (uint32_t i = 0; i < 32; i++) match |= (i / 5 == lane / 5 ? 1u : 0u) << i;
        const uint32_t want[16] = {
            15,
            (lane / 8 * 8 + 1) * 3,
            lane < 3 ? lane : lane - 3,
            lane % 16 + 3 < 16 ? lane + 3 : lane,
            lane ^ 6,
            0x49249249,
            2,
            match,
            static_cast<uint32_t>(-16),
            static_cast<uint32_t>(-16),
            0xffffffff,
            0xffffffff,
            lane < 8        ? lane ^ 1
            : lane % 8 == 7 ? lane
                            : lane + 1,
            2 * (31 - lane) + 1,
            lane ^ 1,
            32 - lane + 31 - lane,
        };
        for (int i = 0; i < 16; i++)
            CHECK_MSG(got[lane * 16 + i] == want[i], "lane %u, operation %d: %x, want %x", lane, i, got[lane * 16 + i],
                      want[i]);
    }
    cudaFree(out);
}

TEST(votes)
{
    int *out = on_device(std::vector<int>(3));
    for (int n : { 0, 1, 99, 100 }) {
        run_votes(out, n, 100, stream);
        check_equal("vote", from_device(out, 3), { n, n > 0, n == 100 });
    }
    cudaFree(out);
}

TEST(matrix_product)
{
    for (int type = 0; type < 2; type++) {
        std::vector<uint16_t> a(256), b(128);
        std::vector<float> fa(256), fb(128);
        uint64_t seed = 3;
        const auto fill = [&](std::vector<uint16_t> &bits, std::vector<float> &values) {
            for (size_t i = 0; i < bits.size(); i++) {
                float x = static_cast<float>(test_uniform(&seed, -2, 2));
                if (i % 7 == 0) x *= 1e-6f; /* subnormal in f16 */
                const __half h = __float2half(x);
                const __nv_bfloat16 bf = __float2bfloat16(x);
                memcpy(&bits[i], type ? static_cast<const void *>(&h) : &bf, 2);
                values[i] = type ? __half2float(h) : __bfloat162float(bf);
            }
        };
        fill(a, fa), fill(b, fb);
        a[5 * 16 + 1] = type ? 0x7bff : 0x4780, fa[5 * 16 + 1] = type ? 65504 : 65536; /* the largest f16 */
        a[6 * 16 + 1] = type ? 0x7c00 : 0x7f80, fa[6 * 16 + 1] = INFINITY;
        a[7 * 16 + 1] = type ? 0x7e00 : 0x7fc0, fa[7 * 16 + 1] = NAN;
        float *d = on_device(std::vector<float>(128));
        uint16_t *da = on_device(a), *db = on_device(b);
        run_mma(d, da, db, type, stream);
        const std::vector<float> got = from_device(d, 128);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                double want = 0;
                for (int k = 0; k < 16; k++) want += static_cast<double>(fa[i * 16 + k]) * fb[k * 8 + j];
                const float is = got[i * 8 + j];
                if (i == 6) CHECK(is == static_cast<float>(want)); /* infinite */
                else if (i == 7) CHECK(is != is);
                else CHECK_CLOSE(is, want, 1e-6, "type %d, row %d, column %d", type, i, j);
            }
        cudaFree(d), cudaFree(da), cudaFree(db);
    }
}

/* ---- rounding; EMU_ROUND=chip: as README.md says ---- */

static bool as_chip()
{
    const char *text = getenv("EMU_ROUND");
    return text && !strcmp(text, "chip");
}

static std::vector<float> values_of(Function f, const std::vector<float> &x)
{
    float *dx = on_device(x), *dy = on_device(std::vector<float>(x.size()));
    run_function(f, dy, dx, static_cast<int>(x.size()), stream);
    const std::vector<float> y = from_device(dy, x.size());
    cudaFree(dx), cudaFree(dy);
    return y;
}

/* 1 and 15 times three quarters of its last place: added one by one each rounds up to a whole one; an H100 keeps all of
 * each, and of their sum what fits. */
TEST(sums_of_products)
{
    const auto bits = [](float x) {
        uint16_t half;
        const __nv_bfloat16 h = __float2bfloat16(x);
        return memcpy(&half, &h, 2), half;
    };
    std::vector<uint16_t> a(256), b(128);
    for (int k = 0; k < 16; k++) a[k] = bits(k ? 1.5f * 0x1p-12f : 1), b[k * 8] = bits(k ? 0x1p-12f : 1);
    float *d = on_device(std::vector<float>(128));
    uint16_t *da = on_device(a), *db = on_device(b);
    run_mma(d, da, db, 0, stream);
    CHECK(from_device(d, 128)[0] == 1 + (as_chip() ? 11 : 15) * 0x1p-23f);
    cudaFree(d), cudaFree(da), cudaFree(db);
}

TEST(functions)
{
    static double (*const exact[])(double) = { exp, exp, exp2, log, [](double x) { return 1 / x; } };
    for (int f = 0; f <= FUNCTION_RECIPROCAL; f++) {
        std::vector<float> x(500);
        uint64_t seed = 5;
        int off = 0;
        for (float &v : x) v = static_cast<float>(test_uniform(&seed, 0.1, 1));
        const std::vector<float> y = values_of(static_cast<Function>(f), x);
        for (size_t i = 0; i < x.size(); i++) {
            const double want = exact[f](x[i]), error = fabs(y[i] - want) / fabs(want);
            CHECK_MSG(error < 0x1p-21, "function %d of %g: %g, want %g", f, x[i], y[i], want);
            off += error > 0x1p-23;
        }
        CHECK_MSG(as_chip() ? off > 100 : off == 0, "function %d: %d results are off by more than a rounding", f, off);
    }
}

/* What CUDA documents: a divisor beyond 2^126 gives 0, ex2.approx.ftz no subnormal; whole powers are exact. */
TEST(edges_of_functions)
{
    check_equal("reciprocal", values_of(FUNCTION_RECIPROCAL, { 0x1p126f, 0x1.8p126f, -0x1p127f, INFINITY, 4, -0.5f }),
                { 0x1p-126f, 0, -0.0f, 0, 0.25f, -2 });
    check_equal("exp2", values_of(FUNCTION_EXP2, { -126, -126.5f, -149, 0, -3, 127, 128, -INFINITY }),
                { 0x1p-126f, 0, 0, 1, 0.125f, 0x1p127f, INFINITY, 0 });
    check_equal("exp", values_of(FUNCTION_FAST_EXP, { 0, -INFINITY, 100 }), { 1, 0, INFINITY });
}

TEST(contraction)
{
    const float x = 1 + 0x1p-12f, square = 1 + 0x1p-11f; /* rounded; exact it is 2^-24 more */
    check_equal("rounded twice", values_of(FUNCTION_SQUARE_RN_LESS, { x }), { square - 1 });
#ifdef __FMA__
    check_equal("rounded once", values_of(FUNCTION_SQUARE_LESS, { x }), { square - 1 + 0x1p-24f });
#endif
}

TEST(copies_in_flight)
{
    std::vector<float> from(64 * 8);
    for (size_t i = 0; i < from.size(); i++) from[i] = static_cast<float>(i);
    float *df = on_device(from), *to = on_device(std::vector<float>(from.size(), -1));
    for (int valid : { 0, 1, 37, 64 }) {
        run_pipeline(to, df, valid, stream);
        std::vector<float> want = from;
        for (size_t i = valid * 8; i < want.size(); i++) want[i] = 0;
        check_equal("copy", from_device(to, from.size()), want);
    }
    cudaFree(df), cudaFree(to);
}

TEST(late_copies)
{
    const char *order = getenv("EMU_ORDER");
    float *from = on_device(std::vector<float>(12, 1));
    int *out = on_device(std::vector<int>(3));
    run_waits(out, from, stream);
    const std::vector<int> got = from_device(out, 3);
    for (int i = 0; i < 3; i++) CHECK(got[i] >= i + 1 && got[i] <= 3);
    if (!order || order[0] != 'r' || order[1] != 'a')
        check_equal("landed", got, { 1, 2, 3 }); /* in random orders some are early */
    cudaFree(from), cudaFree(out);
}

TEST(shared_memory)
{
    int *out = on_device(std::vector<int>(3));
    run_shared(out, 3, 40000, stream);
    check_equal("shared", from_device(out, 3), { 1, 1, 1 });
    Quiet quiet;
    run_shared(out, 3, 100000, stream);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaSuccess);
    allow_shared(233 << 10);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    allow_shared(100000);
    run_shared(out, 3, 100000, stream);
    check_equal("shared", from_device(out, 3), { 1, 1, 1 });
    cudaFree(out);
}

TEST(launch_limits)
{
    int *out = on_device(std::vector<int>(1 << 16));
    const struct {
        dim3 grid, block;
        bool good;
    } launches[] = {
        { dim3(1), dim3(1024), true },      { dim3(1), dim3(1025), false }, { dim3(1), dim3(1, 1, 64), true },
        { dim3(1), dim3(1, 1, 65), false }, { dim3(0), dim3(32), false },   { dim3(1), dim3(0), false },
        { dim3(1, 65536), dim3(1), false }, { dim3(65535), dim3(1), true }, { dim3(0x80000000u), dim3(1), false },
    };
    Quiet quiet;
    for (const auto &l : launches) {
        run_indices(out, l.grid, l.block, stream);
        CHECK_MSG(cudaGetLastError() == (l.good ? cudaSuccess : cudaErrorInvalidConfiguration),
                  "grid %u, block %u,%u,%u", l.grid.x, l.block.x, l.block.y, l.block.z);
    }
    cudaStreamSynchronize(stream);
    cudaFree(out);
}

/* ---- the runtime ---- */

TEST(late_streams)
{
    void *p;
    float *y = on_device(std::vector<float>(64));
    CHECK(cudaMallocHost(&p, 256) == cudaSuccess);
    float *pinned = static_cast<float *>(p);
    pinned[0] = 1;
    CHECK(cudaMemcpyAsync(y, pinned, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    pinned[0] = 2; /* too early: the copy reads this */
    CHECK(from_device(y, 1)[0] == 2);
    float pageable = 3;
    CHECK(cudaMemcpyAsync(y, &pageable, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    pageable = 4; /* allowed: pageable memory is read before the call returns */
    run_scale(y, 2, 1, 1, stream);
    CHECK(cudaMemcpyAsync(pinned, y, 4, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    CHECK(pinned[0] == 2); /* not waited for */
    cudaStreamSynchronize(stream);
    CHECK(pinned[0] == 7);
    cudaFree(y), cudaFreeHost(p);
}

TEST(events)
{
    cudaStream_t other;
    cudaEvent_t a, b;
    float ms = -1;
    float *y = on_device(std::vector<float>(64, 1)), *z = on_device(std::vector<float>(64));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaEventCreate(&a) == cudaSuccess);
    CHECK(cudaEventCreate(&b) == cudaSuccess);
    CHECK(cudaEventQuery(a) == cudaSuccess); /* never recorded */
    cudaEventRecord(a, other);
    run_scale(y, 2, 0, 64, other);
    cudaMemcpyAsync(z, y, 256, cudaMemcpyDeviceToDevice, stream); /* does not wait: the old value */
    check_equal("unordered", from_device(z, 1), { 1.0f });
    cudaEventRecord(b, other);
    CHECK(cudaStreamWaitEvent(stream, b, 0) == cudaSuccess);
    cudaMemcpyAsync(z, y, 256, cudaMemcpyDeviceToDevice, stream);
    check_equal("ordered", from_device(z, 1), { 2.0f });
    CHECK(cudaEventElapsedTime(&ms, a, b) == cudaSuccess && ms >= 0);
    run_scale(y, 2, 0, 64, other);
    cudaEventRecord(b, other);
    CHECK(cudaEventElapsedTime(&ms, a, b) == cudaErrorNotReady);
    int asked = 0;
    while (cudaEventQuery(b) == cudaErrorNotReady) asked++;
    CHECK(asked > 0 && asked < 10);
    CHECK(cudaEventSynchronize(b) == cudaSuccess);
    CHECK(cudaEventDestroy(a) == cudaSuccess && cudaEventDestroy(b) == cudaSuccess &&
          cudaStreamDestroy(other) == cudaSuccess);
    Quiet quiet;
    CHECK(cudaStreamSynchronize(other) == cudaErrorInvalidResourceHandle);
    cudaFree(y), cudaFree(z);
    cudaGetLastError();
}

TEST(refused_copies)
{
    Quiet quiet;
    float host[64] = { 0 };
    float *y = on_device(std::vector<float>(64)), *gone = on_device(std::vector<float>(64));
    CHECK(cudaFree(gone) == cudaSuccess);
    CHECK(cudaMemcpy(y, host, 256, cudaMemcpyDeviceToHost) == cudaErrorInvalidMemcpyDirection);
    CHECK(cudaMemcpy(host, y, 256, cudaMemcpyHostToDevice) == cudaErrorInvalidMemcpyDirection);
    CHECK(cudaMemcpy(host, y, 256, cudaMemcpyDeviceToDevice) == cudaErrorInvalidMemcpyDirection);
    CHECK(cudaMemcpy(host, y + 1, 256, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(host, gone, 256, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(y + 8, y, 64, cudaMemcpyDeviceToDevice, stream) == cudaErrorInvalidValue); /* overlap */
    CHECK(cudaMemsetAsync(y + 60, 0, 20, stream) == cudaErrorInvalidValue);
    CHECK(cudaMemset(host, 0, 4) == cudaErrorInvalidValue);
    CHECK(cudaFree(gone) == cudaErrorInvalidValue);
    CHECK(cudaFree(y + 1) == cudaErrorInvalidValue);
    CHECK(cudaFreeHost(host) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(host, y, 256, cudaMemcpyDefault) == cudaSuccess);
    CHECK(cudaGetLastError() != cudaSuccess);
    cudaFree(y);
}

TEST(rows_of_a_matrix)
{
    std::vector<int> host = iota(30);
    int *d = on_device(std::vector<int>(40, -1));
    CHECK(cudaMemcpy2DAsync(d, 40, host.data(), 24, 16, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    const std::vector<int> got = from_device(d, 40);
    for (int i = 0; i < 40; i++) CHECK(got[i] == (i % 10 < 4 ? i / 10 * 6 + i % 10 : -1));
    Quiet quiet;
    CHECK(cudaMemcpy2DAsync(d, 52, host.data(), 24, 16, 4, cudaMemcpyHostToDevice, stream) == cudaErrorInvalidValue);
    cudaFree(d);
    cudaGetLastError();
}

TEST(memory_ends)
{
    setenv("EMU_MEMORY", "1000000", 1);
    size_t free_bytes, total_bytes;
    void *p, *q;
    CHECK(cudaMalloc(&p, 600000) == cudaSuccess);
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess);
    CHECK(total_bytes == 1000000 && free_bytes == 400000);
    CHECK(cudaMalloc(&q, 400001) == cudaErrorMemoryAllocation && q == nullptr);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaFree(p) == cudaSuccess && cudaMalloc(&q, 1000000) == cudaSuccess && cudaFree(q) == cudaSuccess);
    unsetenv("EMU_MEMORY");
}

TEST(new_memory_is_nan)
{
    void *p;
    CHECK(cudaMalloc(&p, 1000) == cudaSuccess);
    CHECK(reinterpret_cast<uintptr_t>(p) % 256 == 0);
    for (float x : from_device(static_cast<float *>(p), 250)) CHECK(x != x);
    cudaFree(p);
}

/* ---- graphs ---- */

TEST(graph)
{
    void *p;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStream_t side;
    cudaEvent_t fork, join;
    size_t nodes;
    float *y = on_device(std::vector<float>(100, 1)), *z = on_device(std::vector<float>(100, 1));
    CHECK(cudaMallocHost(&p, 400) == cudaSuccess);
    float *pinned = static_cast<float *>(p);
    cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), cudaEventCreateWithFlags(&join, cudaEventDisableTiming);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    run_scale(y, 2, 1, 100, stream);
    cudaEventRecord(fork, stream);
    CHECK(cudaStreamWaitEvent(side, fork, 0) == cudaSuccess);
    cudaMemsetAsync(z, 0, 400, side);
    run_scale(z, 1, 5, 100, side);
    cudaEventRecord(join, side);
    CHECK(cudaStreamWaitEvent(stream, join, 0) == cudaSuccess);
    run_scale(y, 3, 0, 100, stream);
    cudaMemcpyAsync(pinned, y, 400, cudaMemcpyDeviceToHost, stream);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    check_equal("not run", from_device(y, 1), { 1.0f });
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess && nodes == 5);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    for (float want = 9; want < 400; want = (2 * want + 1) * 3) { /* 9, 57, 345 */
        CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
        cudaStreamSynchronize(stream);
        CHECK_MSG(pinned[0] == want && pinned[99] == want, "%g, want %g", pinned[0], want);
        check_equal("side", from_device(z, 1), { 5.0f });
    }
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    cudaStreamDestroy(side), cudaEventDestroy(fork), cudaEventDestroy(join);
    cudaFree(y), cudaFree(z), cudaFreeHost(p);
}

/* What may not be called meanwhile is another thread's to call, where the capture is this thread's alone. */
TEST(captures_of_a_thread)
{
    cudaGraph_t graph;
    bool fine = false;
    const auto taken = [&fine] {
        std::thread other([&fine] {
            void *p;
            fine = cudaMalloc(&p, 4) == cudaSuccess && cudaFree(p) == cudaSuccess;
        });
        other.join();
        return fine;
    };
    Quiet quiet;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(taken());
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(!taken());
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
    cudaGetLastError();
}

TEST(spoilt_captures)
{
    Quiet quiet;
    void *p;
    cudaGraph_t graph;
    cudaStream_t side;
    cudaEvent_t event;
    float pageable = 0;
    float *y = on_device(std::vector<float>(100, 1));
    cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    const auto begin = [&] { CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess); };
    const auto spoilt = [&](cudaError_t got, cudaError_t want) {
        CHECK_MSG(got == want, "%s, not %s", cudaGetErrorName(got), cudaGetErrorName(want));
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
    };
    const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
    cudaEventRecord(event, side);
    begin(), spoilt(cudaMalloc(&p, 4), unsupported);
    begin(), spoilt(cudaStreamSynchronize(stream), unsupported);
    begin(), spoilt(cudaDeviceSynchronize(), unsupported);
    begin(), spoilt(cudaMemcpy(&pageable, y, 4, cudaMemcpyDeviceToHost), unsupported);
    begin(), spoilt(cudaMemcpyAsync(&pageable, y, 4, cudaMemcpyDeviceToHost, stream), unsupported);
    begin(), spoilt(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureIsolation);
    begin();
    cudaEventRecord(event, stream);
    CHECK(cudaEventSynchronize(event) == cudaErrorCapturedEvent);
    cudaStreamWaitEvent(side, event, 0);
    run_scale(y, 1, 1, 100, side);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureUnjoined && !graph);
    begin(); /* the stream is as before */
    run_scale(y, 1, 1, 100, stream);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    check_equal("never run", from_device(y, 1), { 1.0f });
    cudaStreamDestroy(side), cudaEventDestroy(event), cudaFree(y);
    cudaGetLastError();
}

int main(int argc, char **argv)
{
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return 1;
    return test_main(argc, argv);
}
