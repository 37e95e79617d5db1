/*
 * A communicator of one rank: NCCL itself on every machine that has it and one GPU, on the emulator its NCCL
 * (test/emu/nccl.cpp). Configuration, splits, calls that are "in progress", messages to oneself, finalizing, aborting.
 * Prints what calls take, and the memory of a communicator.
 */
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "nccl_world.h"
#include "test.h"

enum { BYTES = 256 << 10, CALLS = 50, WAIT_S = 60, BUSY_US = 50000 };

static NcclWorld world; /* nobody stops it */
static cudaStream_t stream;
static char *memory; /* BYTES that a call reads, as many that it writes */

static double free_mib(void)
{
    DeviceInfo gpu;
    OK(device_cuda_info(0, &gpu));
    return (double)gpu.free_bytes / (1 << 20);
}

static void check_result(ncclComm_t comm, ncclResult_t rc, const char *what)
{
    char why[WHY_BYTES];
    CHECK_MSG(!rc, "%s: %s", what, nccl_text(rc, comm, why));
}

static void settle(ncclComm_t comm, ncclResult_t rc, const char *what)
{
    check_result(comm, nccl_settle(&world, comm, rc, clock_s() + WAIT_S), what);
}

static void cuda(cudaError_t code) { CHECK_MSG(!code, "%s", cudaGetErrorString(code)); }

/* False: there is no GPU, or no NCCL. */
static bool begin(void)
{
    char why[256];
    const char *missing;
    device_cuda_for_several();
    if (!nccl_available(&missing) || !device_cuda_count(why, sizeof why)) return false;
    OK(nccl_set_variables(&(NcclOptions){ .size = 1 }));
    cuda(cudaSetDevice(0));
    if (stream) return true;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda(cudaMalloc((void **)&memory, 2 * BYTES));
    return true;
}

#define NEED_NCCL \
    if (!begin()) SKIP("a GPU and NCCL are needed")

static ncclComm_t open_alone(void)
{
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    ncclConfig_t config = nccl_config("alone");
    check_result(NULL, nccl.GetUniqueId(&id), "an id");
    const ncclResult_t rc = nccl.CommInitRankConfig(&comm, 1, id, 0, &config);
    settle(comm, rc, "a communicator");
    return comm;
}

/* As nccl.c does: `color` NCCL_SPLIT_NOCOLOR gives none. */
static ncclComm_t split(ncclComm_t base, int color)
{
    ncclComm_t comm = NULL;
    ncclConfig_t config = nccl_config("split");
    config.minCTAs = 1, config.maxCTAs = 4;
    const bool none = color == NCCL_SPLIT_NOCOLOR;
    settle(base, nccl.CommSplit(base, color, 0, &comm, none ? NULL : &config), "a split");
    CHECK(!comm == none);
    if (comm) settle(comm, ncclInProgress, "what was split off");
    return comm;
}

static void close_one(ncclComm_t comm)
{
    settle(comm, nccl.CommFinalize(comm), "finalizing");
    check_result(NULL, nccl.CommDestroy(comm), "destroying");
}

/* ---- calls ---- */

static ncclResult_t sum_floats(ncclComm_t c)
{
    return nccl.AllReduce(memory, memory + BYTES, BYTES / 4, ncclFloat32, ncclSum, c, stream);
}

static ncclResult_t sum_integers(ncclComm_t c)
{
    return nccl.AllReduce(memory, memory + BYTES, BYTES / 8, ncclUint64, ncclSum, c, stream);
}

static ncclResult_t largest(ncclComm_t c)
{
    return nccl.AllReduce(memory, memory + BYTES, BYTES / 8, ncclInt64, ncclMax, c, stream);
}

static ncclResult_t scatter(ncclComm_t c)
{
    return nccl.ReduceScatter(memory, memory + BYTES, BYTES / 4, ncclFloat32, ncclSum, c, stream);
}

static ncclResult_t gather(ncclComm_t c)
{
    return nccl.AllGather(memory, memory + BYTES, BYTES, ncclUint8, c, stream);
}

static ncclResult_t to_self(ncclComm_t c)
{
    ncclResult_t rc = nccl.GroupStart();
    if (!rc) rc = nccl_queued(nccl.Send(memory, BYTES, ncclUint8, 0, c, stream));
    if (!rc) rc = nccl_queued(nccl.Recv(memory + BYTES, BYTES, ncclUint8, 0, c, stream));
    const ncclResult_t ended = nccl.GroupEnd();
    return rc ? rc : ended;
}

static const struct {
    const char *name;
    ncclResult_t (*call)(ncclComm_t c);
} calls[] = { { "sum of floats", sum_floats }, { "sum of integers", sum_integers }, { "largest", largest },
              { "reduce-scatter", scatter },   { "all-gather", gather },            { "message to itself", to_self } };
enum { KINDS = sizeof calls / sizeof *calls };

/* What came is what was there: of one rank's data every sum is these. */
static void check_call(ncclComm_t c, int kind)
{
    static unsigned char got[BYTES];
    const int byte = 17 + kind;
    int64_t wrong = 0;
    cuda(cudaMemsetAsync(memory, byte, BYTES, stream));
    cuda(cudaMemsetAsync(memory + BYTES, 0, BYTES, stream));
    settle(c, calls[kind].call(c), calls[kind].name);
    cuda(cudaMemcpyAsync(got, memory + BYTES, BYTES, cudaMemcpyDeviceToHost, stream));
    cuda(cudaStreamSynchronize(stream));
    for (int i = 0; i < BYTES; i++) wrong += got[i] != byte;
    CHECK_MSG(!wrong, "%s: %lld bytes of %d are wrong", calls[kind].name, (long long)wrong, BYTES);
}

static void time_call(ncclComm_t c, int kind)
{
    const double began = clock_s();
    for (int i = 0; i < CALLS; i++) settle(c, calls[kind].call(c), calls[kind].name);
    const double host = clock_s() - began;
    cuda(cudaStreamSynchronize(stream));
    printf("%-20s %8.1f us a call of the host's time, %8.1f with the device's\n", calls[kind].name, 1e6 * host / CALLS,
           1e6 * (clock_s() - began) / CALLS);
}

TEST(calls)
{
    NEED_NCCL;
    const double before = free_mib(), began = clock_s();
    ncclComm_t all = open_alone();
    const double opened = clock_s(), left = free_mib();
    ncclComm_t part = split(all, 0);
    printf("NCCL %s (%s)\n", nccl_version(), nccl_path());
    printf("opening %.1f ms, splitting %.1f ms\n", 1e3 * (opened - began), 1e3 * (clock_s() - opened));
    CHECK(!split(all, NCCL_SPLIT_NOCOLOR));
    for (int kind = 0; kind < KINDS; kind++) {
        check_call(all, kind);
        check_call(part, kind);
        time_call(part, kind);
    }
    printf("the first communicator took %.1f MiB, both with their calls %.1f MiB\n", before - left,
           before - free_mib());
    close_one(part);
    close_one(all);
    printf("closed, %.1f MiB less than before\n", before - free_mib());
}

static void be_busy(void *unused) { (void)unused, usleep(BUSY_US); }

/* While a call waits behind other work of its stream: the stream ends, and the next communicator works. */
TEST(abort)
{
    NEED_NCCL;
    ncclComm_t c = open_alone();
    settle(c, sum_floats(c), "a first call");
    cuda(cudaLaunchHostFunc(stream, be_busy, NULL));
    settle(c, sum_floats(c), "a call behind other work");
    check_result(NULL, nccl.CommAbort(c), "aborting");
    cuda(cudaStreamSynchronize(stream));
    c = open_alone();
    for (int kind = 0; kind < KINDS; kind++) check_call(c, kind);
    close_one(c);
}

/* A wrong call is an error of its own. (What the communicator is worth then is NCCL's to say: it is aborted.) */
TEST(wrong_calls)
{
    NEED_NCCL;
    ncclComm_t c = open_alone();
    const ncclDataType_t no_type = (ncclDataType_t)99;
    ncclResult_t rc = nccl.AllReduce(memory, memory + BYTES, 1, no_type, ncclSum, c, stream);
    rc = nccl_settle(&world, c, rc, clock_s() + WAIT_S);
    CHECK_MSG(rc == ncclInvalidArgument, "%s", nccl.GetErrorString(rc));
    check_result(NULL, nccl.CommAbort(c), "aborting");
}

TEST_MAIN
