/*
 * doctor: what this machine offers a run, and what stands in its way. A line for each fact; lines that begin
 * with '!' say what is wrong and, behind a colon, what to do about it. Nothing is changed, and the exit status
 * is 0 unless something makes every run impossible.
 */
#include <omp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/placement.h"
#include "base/processors.h"
#include "base/plain.h"
#include "base/units.h"
#include "cli/command.h"
#include "cli/doctor.h"
#include "comm/gpu.h"
#include "device/device.h"
#include "measure/calibrate.h"
#include "train/bind.h"

enum { GIB = 1 << 30, LINE_BYTES = 512 };

static int problems;

static const char *device_path;
static double seconds; /* 0: not given */
static const char *folder;
static bool cluster;
static int64_t data_port;

static const Option options[] = {
    { "calibrate", OPTION_TEXT, &device_path, .value = "FILE",
      .help = "measures this machine's CPUs into a device's file, for plan --device FILE" },
    { "seconds", OPTION_REAL, &seconds, .low = 0.1, .high = 86400, .value = "S",
      .help = "with --calibrate: to measure for, about; below 10: few and small shapes; none: 90" },
    { "folder", OPTION_TEXT, &folder, .value = "DIR",
      .help = "where checkpoints go: --calibrate times its disk, --cluster looks who shares it; none: here" },
    { "cluster", OPTION_FLAG, &cluster, .help = "instead: the ranks that a launcher has started, a line each" },
    { "data-port", OPTION_INT, &data_port, .low = 1, .high = 49151, .value = "N",
      .help = "with --cluster: as parallel.data_port" },
};

__attribute__((format(printf, 2, 3))) static void advise(bool needed, const char *fmt, ...)
{
    va_list args;
    if (!needed) return;
    problems++;
    printf("! ");
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    putchar('\n');
}

/* The text behind `key` in a file of the kernel, up to the end of the line; "" if there is none. */
static void kernel_value(const char *path, const char *key, char out[LINE_BYTES])
{
    char line[LINE_BYTES];
    size_t n = strlen(key);
    out[0] = 0;
    FILE *f = fopen(path, "re");
    while (f && !out[0] && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, n) != 0) continue;
        const char *at = line + n;
        at += strspn(at, " \t:");
        snprintf(out, LINE_BYTES, "%.*s", (int)strcspn(at, "\n"), at);
    }
    if (f) fclose(f);
    plain_make(out, PLAIN_LINE);
}

/* Bytes of a /proc/meminfo line; 0: not to be seen. */
static int64_t meminfo(const char *key)
{
    char text[LINE_BYTES];
    kernel_value("/proc/meminfo", key, text);
    return strtoll(text, NULL, 10) * 1024;
}

/* ---- processor, memory, limits ---- */

static void check_processor(void)
{
    char model[LINE_BYTES], places[LINE_BYTES];
    kernel_value("/proc/cpuinfo", "model name", model);
    int allowed = processors_share(1, 1);
    int online = (int)sysconf(_SC_NPROCESSORS_ONLN), threads = omp_get_max_threads();
    printf("processor    %s\n", model[0] ? model : "unknown");
    printf("threads      %d processors online, %d allowed to this process, %d threads used\n", online, allowed,
           threads);
    printf("kernels      %s (of avx512, avx2, c)\n", isa_name(isa_best()));
    printf("bf16 dots    %s (debug.dot)\n",
           !dot_supported()             ? "fma; vdpbf16 and amx by other instructions, slowly"
           : dot_tiles() == TILES_AGREE ? "amx, vdpbf16, fma"
           : dot_tiles() == TILES_DIFFER
               ? "vdpbf16, fma; amx by other instructions, slowly: tiles do not sum as their manual says"
               : "vdpbf16, fma; amx by other instructions, slowly");
    bind_describe(places, sizeof places);
    printf("placement    %s\n", places);
    advise(threads > allowed, "more threads than processors: unset OMP_NUM_THREADS or set it to %d", allowed);
    advise(isa_best() == ISA_C, "no AVX2 with FMA, so runs are right but several times slower: take a "
                                "processor that has it (x86-64-v3)");
}

static void check_memory(void)
{
    char a[UNITS_BYTES], b[UNITS_BYTES], huge[LINE_BYTES];
    const int64_t limit = (int64_t)group_memory_limit(""), left = (int64_t)group_memory_left("");
    const int64_t total = meminfo("MemTotal");
    int64_t available = meminfo("MemAvailable");
    if (total && available) printf("memory       %s, %s available\n", units_bytes(a, total), units_bytes(b, available));
    else printf("memory       unknown (/proc/meminfo cannot be read)\n");
    if (limit > 0)
        printf("memory limit %s (control group), %s of it left\n", units_bytes(a, limit), units_bytes(b, left));
    if (left > 0 && left < available) available = left;
    kernel_value("/sys/kernel/mm/transparent_hugepage/enabled", "", huge);
    printf("huge pages   %s\n", huge[0] ? huge : "unknown");
    advise(strstr(huge, "[never]") != NULL, "huge pages are off, which may cost a few percent: echo madvise > "
                                            "/sys/kernel/mm/transparent_hugepage/enabled");
    advise(available && available < GIB,
           "less than 1 GiB of memory is available: end other programs, or take a model that "
           "'megatrain plan' says is small enough");
}

static void put_limit(const char *name, int resource)
{
    struct rlimit r;
    if (getrlimit(resource, &r) != 0) return;
    if (r.rlim_cur == RLIM_INFINITY) printf("%-12s unlimited\n", name);
    else printf("%-12s %llu (up to %llu)\n", name, (unsigned long long)r.rlim_cur, (unsigned long long)r.rlim_max);
}

static void check_limits(void)
{
    struct rlimit files, memory = { 0 };
    put_limit("open files", RLIMIT_NOFILE);
    put_limit("locked bytes", RLIMIT_MEMLOCK);
    const bool few_files = getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 1024;
    const bool little_space = getrlimit(RLIMIT_AS, &memory) == 0 && memory.rlim_cur != RLIM_INFINITY;
    advise(few_files, "few open files are allowed: ulimit -n 4096");
    advise(little_space, "address space is limited to %llu bytes: ulimit -v unlimited",
           (unsigned long long)memory.rlim_cur);
}

/* ---- devices, disk, tools ---- */

static void put_gpu(int index, const DeviceInfo *gpu)
{
    PlacementNear near;
    char total[UNITS_BYTES], left[UNITS_BYTES];
    placement_near_device(gpu->pci, &near);
    printf("gpu %-8d %s, compute capability %d.%d, %d multiprocessors, %s, %s free; CUDA driver %d.%d, "
           "runtime %d.%d; %s\n",
           index, gpu->name, gpu->major, gpu->minor, gpu->multiprocessors, units_bytes(total, gpu->total_bytes),
           units_bytes(left, gpu->free_bytes), gpu->driver / 1000, gpu->driver % 100 / 10, gpu->runtime / 1000,
           gpu->runtime % 100 / 10, near.text);
}

static void check_devices(void)
{
    char driver[LINE_BYTES], why[LINE_BYTES];
    kernel_value("/proc/driver/nvidia/version", "NVRM version", driver);
    DeviceInfo gpu;
    int gpus = device_cuda_count(why, sizeof why);
    printf("devices      cpu%s\n", gpus ? ", cuda" : "");
    if (driver[0]) printf("gpu driver   %s\n", driver);
    for (int i = 0; i < gpus && device_cuda_info(i, &gpu) == ERR_OK; i++) put_gpu(i, &gpu);
    if (!gpus)
        printf("no gpu       %s%s\n", why,
               device_has_cuda() ? "" : "; to have one, install the CUDA toolkit (12.4 or newer) and run make again");
    const char *missing = "";
    const bool no_blas = gpus && !device_cuda_blas(&missing);
    advise(no_blas,
           "runs on a GPU need cuBLASLt: install libcublas of CUDA's version, or name its folder in "
           "LD_LIBRARY_PATH (%s)",
           missing);
    if (nccl_available(&missing))
        printf("nccl         %s (%s); without NVLS, whose sums do not repeat, unless run.reproducible=off\n",
               nccl_version(), nccl_path());
    else printf("no nccl      %s; only runs on several GPUs want it\n", missing);
    advise(gpus > 1 && !nccl_available(&missing),
           "there are %d GPUs, but without NCCL ranks on them refuse to run: install libnccl2 or pip's "
           "nvidia-nccl, or name its folder in NCCL_HOME; or parallel.staged=true, through the host",
           gpus);
    const char *asks = nccl_asks_for_nvls();
    advise(asks,
           "%s asks NCCL for NVLS, whose sums do not repeat: runs on several GPUs refuse it without "
           "run.reproducible=off; unset it",
           asks);
    advise(driver[0] && !device_has_cuda(), "there is an NVIDIA GPU, but this build has no CUDA backend: "
                                            "install the CUDA toolkit (12.4 or newer) and run "
                                            "make again");
    advise(driver[0] && device_has_cuda() && !gpus,
           "there is an NVIDIA driver, but no GPU to use: %s (nvidia-smi should list them)", why);
}

static Err check_disk(void)
{
    int64_t free_bytes;
    char a[UNITS_BYTES];
    TRY_AS(ERR_STORAGE, file_free_bytes(".", &free_bytes));
    printf("disk         %s free here\n", units_bytes(a, free_bytes));
    advise(free_bytes < GIB,
           "less than 1 GiB is free and checkpoints may not fit: make room, or give checkpoint.keep and run.dir "
           "other values");
    advise(access(".", W_OK) != 0, "this folder is not writable: give run.dir a place that is");
    return ERR_OK;
}

static bool on_path(const char *program)
{
    const char *path = getenv("PATH");
    char full[PATH_MAX];
    for (const char *at = path ? path : ""; *at; at += strcspn(at, ":"), at += *at == ':') {
        int n = (int)strcspn(at, ":");
        if (snprintf(full, sizeof full, "%.*s/%s", n, at, program) < PATH_MAX && access(full, X_OK) == 0) return true;
    }
    return false;
}

/* Programs that make's targets call; a run needs none of them. */
static void check_tools(void)
{
    static const struct {
        const char *program, *package, *why;
    } tools[] = {
        { "gcc", "gcc", "make" },
        { "make", "make", "make" },
        { "xz", "xz-utils", "make demo" },
        { "bzip2", "bzip2", "make demo" },
        { "python3", "python3", "make bench, some tests" },
        { "clang-format", "clang-format", "make fmt" },
    };
    for (size_t i = 0; i < sizeof tools / sizeof *tools; i++)
        advise(!on_path(tools[i].program), "no %s (for %s): apt-get install %s, or make deps", tools[i].program,
               tools[i].why, tools[i].package);
}

/* Below so many seconds a calibration only shows that it works. */
static const double BRIEF_S = 10, USUAL_S = 90;
static const double BUSY = 0.05; /* a share of processors that others may have */

static Err calibrate_into(const char *path)
{
    const double wanted = seconds > 0 ? seconds : USUAL_S;
    Calibration c;
    TRY(file_check_replaces(path, "[device]"));
    if (folder && !file_is_dir(folder)) return err_set(ERR_STORAGE, "--folder '%s' is no folder", folder);
    Err err = calibrate((CalibrateOptions){ wanted, wanted < BRIEF_S, folder ? folder : "." }, &c);
    if (!err) err = calibration_write(&c, path);
    if (!err) {
        printf("measured     %d processors: products %.3g TFLOP/s in fp32, %.3g in bf16; copies %.3g GB/s; a "
               "message "
               "between processes %.3g us, %.3g GB/s\n",
               c.processors, c.fp32_tflops, c.bf16_tflops, c.memory_gb_s, c.link_us, c.link_gb_s);
        printf("written      %s: %d figures; megatrain plan --config FILE --device %s%s predicts by them\n", path,
               c.points.count, strchr(path, '/') ? "" : "./", path);
        if (c.disk_gb_s > 0) printf("disk         %.3g GB/s in %s\n", c.disk_gb_s, folder ? folder : "this folder");
        advise(!(c.disk_gb_s > 0), "the file has no disk_gb_s, by which plan says how long checkpoints take: %s",
               c.no_disk);
        advise(c.others > BUSY,
               "other programs had %.0f %% of the processors meanwhile: repeat it when nothing else runs here",
               100 * c.others);
        advise(c.noisy,
               "%d of the figures vary: of their calls one in a hundred took over twice the median; repeat it "
               "when nothing else runs here",
               c.noisy);
    }
    device_points_free(&c.points);
    return err;
}

static Err look_at_cluster(void)
{
    Boot boot;
    TRY(boot_from_env(&boot));
    log_set_rank(boot.rank, boot.size);
    if (boot.rank) log_set_level(LOG_WARN);
    return doctor_cluster(&boot, folder ? folder : ".", (int)data_port);
}

/* No option is passed over. */
static Err check_options(void)
{
    if (device_path && cluster)
        return err_set(ERR_CONFIG, "--calibrate is about this machine, --cluster about all ranks"),
               err_hint("give one of them");
    if (data_port && !cluster)
        return err_set(ERR_CONFIG, "--data-port is about the ranks of a cluster"), err_hint("add --cluster");
    if (seconds > 0 && !device_path)
        return err_set(ERR_CONFIG, "--seconds is about a calibration"), err_hint("add --calibrate FILE");
    if (folder && !device_path && !cluster)
        return err_set(ERR_CONFIG, "--folder is about a calibration"), err_hint("add --calibrate FILE, or --cluster");
    return ERR_OK;
}

static Err doctor(Words rest)
{
    (void)rest;
    problems = 0;
    TRY(check_options());
    if (device_path) return calibrate_into(device_path);
    if (cluster) return look_at_cluster();
    version_print(stdout);
    check_processor();
    check_memory();
    check_limits();
    check_devices();
    TRY(check_disk());
    check_tools();
    if (problems) printf("%d thing%s to look at, marked with '!'\n", problems, problems == 1 ? "" : "s");
    else printf("nothing is missing\n");
    return ERR_OK;
}

const Command command_doctor = {
    .name = "doctor",
    .summary = "what this machine offers, what is missing, how to get it",
    .text = "Under a launcher, as in srun -N4 megatrain doctor --cluster --folder runs: names, ports, "
            "clocks, locks,\n"
            "the folder and the program of every rank, in one table.\n",
    OPTIONS(options),
    .run = doctor,
};
