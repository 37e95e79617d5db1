/* Processors that a process may use: quotas of control groups in made-up trees of both versions, and affinity. And that
 * the threads of ops live as long as their device's work. */
#include "test.h"

#include <dirent.h>
#include <sched.h>

#include "base/processors.h"
#include "device/ops.h"
#include "scratch.h"

/* A root with this /proc/self/cgroup, and files of groups, as pairs of path and text that end with NULL. */
static void make_groups(const char *groups, const char *const *files)
{
    char path[512], folder[512];
    OK(file_remove_tree(in_dir("root")));
    OK(file_make_dirs(in_dir("root/proc/self")));
    write_bytes("root/proc/self/cgroup", groups, (int64_t)strlen(groups));
    for (; *files; files += 2) {
        snprintf(path, sizeof path, "root/sys/fs/cgroup/%s", files[0]);
        snprintf(folder, sizeof folder, "%s", in_dir(path));
        *strrchr(folder, '/') = 0;
        OK(file_make_dirs(folder));
        write_bytes(path, files[1], (int64_t)strlen(files[1]));
    }
}

static double quota_of(const char *groups, const char *const *files)
{
    make_groups(groups, files);
    return processors_quota(in_dir("root"));
}

/* The limit in MiB, and what is left of it. */
static void check_memory(const char *groups, const char *const *files, double limit, double left)
{
    make_groups(groups, files);
    const double got = group_memory_limit(in_dir("root")) / (1 << 20),
                 rest = group_memory_left(in_dir("root")) / (1 << 20);
    CHECK_MSG(got == limit && rest == left, "%s: %g MiB, %g left", groups, got, rest);
}

TEST(memory_limits_of_groups)
{
    /* version 2: the least of the own group and all above it; files in memory can be dropped */
    check_memory("0::/a/b\n", (const char *const[]){ "a/b/memory.max", "max\n", NULL }, 0, 0);
    check_memory("0::/a/b\n",
                 (const char *const[]){ "a/b/memory.max", "max\n", "a/memory.max", "157286400\n", "a/memory.current",
                                        "104857600\n", "a/memory.stat",
                                        "anon 5\ninactive_file 10485760\nactive_file 10485760\n", NULL },
                 150, 70);
    check_memory("0::/a\n",
                 (const char *const[]){ "a/memory.max", "209715200\n", "a/memory.current", "0\n", "memory.max",
                                        "104857600\n", "memory.current", "52428800\n", NULL },
                 100, 50);
    /* version 1; its number for none */
    const char *older[] = { "memory/job/memory.limit_in_bytes",
                            "9223372036854771712\n",
                            "memory/job/memory.usage_in_bytes",
                            "1048576\n",
                            "memory/job/memory.stat",
                            "inactive_file 7\ntotal_inactive_file 524288\n",
                            NULL };
    check_memory("4:memory:/job/step\n3:cpu:/\n", older, 0, 0);
    older[1] = "2097152\n";
    check_memory("4:memory:/job/step\n3:cpu:/\n", older, 2, 1.5);
    check_memory("4:cpu:/job\n", older, 0, 0);
}

TEST(a_quota_of_version_2)
{
    CHECK(quota_of("0::/\n", (const char *const[]){ "cpu.max", "max 100000\n", NULL }) == 0);
    CHECK(quota_of("0::/\n", (const char *const[]){ "cpu.max", "250000 100000\n", NULL }) == 2.5);
    /* the least of a group and those above it; a file that is missing, or empty, says nothing */
    const char *two[] = { "a/b/cpu.max", "max 100000\n", "a/cpu.max", "300000 100000\n", NULL };
    CHECK(quota_of("0::/a/b\n", two) == 3);
    two[1] = "50000 100000\n";
    CHECK(quota_of("0::/a/b\n", two) == 0.5);
    CHECK(quota_of("0::/a/b\n", (const char *const[]){ "a/b/cpu.max", "", NULL }) == 0);
    /* a container sees its own group at the top, whatever the machine calls it */
    CHECK(quota_of("0::/docker/0123\n", (const char *const[]){ "cpu.max", "400000 100000\n", NULL }) == 4);
}

TEST(a_quota_of_version_1)
{
    const char *limited[] = { "cpu/job/cpu.cfs_quota_us", "150000\n", "cpu/job/cpu.cfs_period_us", "50000\n", NULL };
    CHECK(quota_of("4:memory:/job\n3:cpu,cpuacct:/job\n", limited) == 3);
    CHECK(quota_of("4:memory:/job\n3:cpuacct,cpu:/job/step\n", limited) == 3);
    CHECK(quota_of("5:cpuset:/job\n4:cpuacct:/job\n", limited) == 0); /* neither of these is "cpu" */
    limited[1] = "-1\n";
    CHECK(quota_of("3:cpu:/job\n0::/\n", limited) == 0);
}

TEST(without_control_groups)
{
    static const char *const none[] = { NULL };
    CHECK(quota_of("", none) == 0);
    CHECK(quota_of("nonsense\n0:\n::\n", none) == 0);
    CHECK(processors_quota(in_dir("nowhere")) == 0);
}

TEST(a_share_of_the_affinity)
{
    cpu_set_t all, one;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    const int allowed = processors_share(1, 1);
    CHECK(allowed >= 1 && allowed <= CPU_COUNT(&all));
    CHECK(processors_share(2, 1) == (CPU_COUNT(&all) / 2 > 1 ? CPU_COUNT(&all) / 2 : 1) || processors_quota("") > 0);
    CHECK(processors_share(CPU_COUNT(&all) + 1, 1) == 1);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && !CPU_COUNT(&one); i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(processors_share(1, 1) == 1);
    CHECK(sched_setaffinity(0, sizeof all, &all) == 0);
}

/* The highest id of this process's threads: one that is made later has a higher one, until ids begin anew. */
static int newest_thread(void)
{
    int newest = 0;
    DIR *d = opendir("/proc/self/task");
    for (struct dirent *e; (e = readdir(d));)
        if (atoi(e->d_name) > newest) newest = atoi(e->d_name);
    closedir(d);
    return newest;
}

static void product(Stream *s, Arena *a, int64_t n)
{
    const ArenaMark mark = arena_mark(a);
    Tensor x, w, y;
    OK(tensor_new(a, &x, F32, n, n));
    OK(tensor_new(a, &w, F32, n, n));
    OK(tensor_new(a, &y, F32, n, n));
    OK(op(s, fill_zero, .x = x));
    OK(op(s, fill_zero, .x = w));
    OK(op(s, linear_fwd, .y = y, .x = x, .w = w, .leaf = n));
    arena_release(a, mark);
}

/* libgomp ends the threads that a smaller team leaves out, and makes them anew for the next (cpu/team.h). */
TEST(ops_with_work_for_few_threads_end_none)
{
    enum { BYTES = 8 << 20, THREADS = 7 };
    Device dev;
    Arena a;
    OK(device_open(&dev, (DeviceChoice){ .kind = DEVICE_CPU, .threads = THREADS }));
    void *memory = aligned_alloc(ARENA_ALIGN, BYTES);
    arena_init(&a, "test", memory, BYTES);
    product(&dev.stream, &a, 512);
    const int before = newest_thread();
    for (int64_t n = 32; n <= 512; n += 32) product(&dev.stream, &a, n);
    CHECK(newest_thread() == before);
    device_close(&dev);
    free(memory);
}

int main(int argc, char **argv) { return test_main(argc, argv); }
