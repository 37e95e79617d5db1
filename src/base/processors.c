/* See processors.h. */
#include "base/processors.h"

#include <limits.h>
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Each is a `pause`, of 15 to 50 ns: 120 to 400 us. Fewer, and threads that wait a little at a barrier go to sleep some
 * 50 times in a step of 140 ms; more, and a busy neighbour costs as many times what a wait is worth. */
static const char spins[] = "8000";

static void wait_asleep(char **argv)
{
    char path[PATH_MAX]; /* (the link itself would be the process's name then) */
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0 || setenv("GOMP_SPINCOUNT", spins, 1)) return;
    path[n] = 0;
    execv(path, argv);
}

void processors_begin(char **argv)
{
    setenv("HWLOC_HIDE_ERRORS", "2", 0); /* what a BIOS says wrongly of its processors is not a run's error */
    wait_asleep(argv);
    if (!getenv("OMP_NUM_THREADS")) omp_set_num_threads(processors_share(1, 1));
}

Err processors_check(void)
{
    const char *text = getenv("OMP_NUM_THREADS");
    if (!text || omp_get_max_threads() <= PROCESSORS_THREADS_MOST) return ERR_OK;
    err_set(ERR_CONFIG, "environment: OMP_NUM_THREADS='%s': a rank has at most %d threads", text,
            PROCESSORS_THREADS_MOST);
    return err_hint("unset it: a rank then has as many as processors and model allow");
}

/* ---- the control groups' quota ---- */

/* Two numbers, in one file (version 2; "max": none) or two. False: there is no limit, or no such file. */
static bool read_quota(const char *folder, double *processors)
{
    static const char *const files[] = { "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us" };
    char path[PATH_MAX + 32];
    double x[3] = { 0 };
    int known[3] = { 0 };
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        FILE *f = fopen(path, "re");
        if (f && i == 0) known[0] = fscanf(f, "%lf %lf", &x[0], &x[2]);
        else if (f) known[i] = fscanf(f, "%lf", &x[i]);
        if (f) fclose(f);
    }
    const double quota = known[0] == 2 ? x[0] : known[1] == 1 && known[2] == 1 ? x[1] : 0;
    if (!(quota > 0 && x[2] > 0)) return false;
    *processors = quota / x[2];
    return true;
}

/* Reads what a group's folder says; false: nothing. */
typedef bool ReadGroup(const char *folder, double *value);

/* The least of a group's and those above it. `folder` is cut on the way. A container may see groups under names of
 * the machine: those that are not there are passed over, up to the first folder, which is its own. */
static double least_of_path(ReadGroup *read, char *folder, size_t mount_bytes)
{
    double least = 0, x;
    for (;;) {
        if (read(folder, &x) && (least == 0 || x < least)) least = x;
        char *slash = strrchr(folder, '/');
        if (strlen(folder) <= mount_bytes || !slash) return least;
        *slash = 0;
    }
}

/* Is "cpu" one of the words of "cpu,cpuacct"? */
static bool has_word(const char *words, size_t bytes, const char *word)
{
    const size_t n = strlen(word);
    for (const char *at = words, *end = words + bytes; at < end; at += strcspn(at, ",:") + 1)
        if (!strncmp(at, word, n) && strchr(",:", at[n])) return true;
    return false;
}

/* The least of all groups that this process is in; 0: none says anything. */
static double least_of_groups(const char *root, const char *controller, ReadGroup *read)
{
    char path[PATH_MAX], line[PATH_MAX];
    double least = 0;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) { /* "NUMBER:CONTROLLERS:/GROUP" */
        char *words = strchr(line, ':'), *group = words ? strchr(words + 1, ':') : NULL;
        if (!group) continue;
        const size_t bytes = (size_t)(group - ++words);
        if (bytes && !has_word(words, bytes, controller)) continue;
        group[1 + strcspn(group + 1, "\n")] = 0;
        const int mount =
            snprintf(path, sizeof path, "%s/sys/fs/cgroup%s%s", root, bytes ? "/" : "", bytes ? controller : "");
        snprintf(path + mount, sizeof path - (size_t)mount, "%s", group + 1);
        const double x = least_of_path(read, path, (size_t)mount);
        if (x > 0 && (least == 0 || x < least)) least = x;
    }
    if (f) fclose(f);
    return least;
}

double processors_quota(const char *root) { return least_of_groups(root, "cpu", read_quota); }

/* ---- the control groups' memory ---- */

#define NO_LIMIT 1e15 /* version 1 says "none" by a number above it */

/* The number in the first of two files that is there; false: in neither. */
static bool read_number(const char *folder, const char *name, const char *older, double *out)
{
    char path[PATH_MAX + 32];
    int known = 0;
    for (int i = 0; i < 2 && known != 1; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, i ? older : name);
        FILE *f = fopen(path, "re");
        if (f) known = fscanf(f, "%lf", out);
        if (f) fclose(f);
    }
    return known == 1;
}

static bool read_memory_limit(const char *folder, double *bytes)
{
    return read_number(folder, "memory.max", "memory.limit_in_bytes", bytes) && *bytes > 0 && *bytes < NO_LIMIT;
}

/* Pages of files, which the kernel takes back where a group is full: its own and those of the groups in it. */
static double cached_bytes(const char *folder)
{
    char path[PATH_MAX + 32], line[128];
    double x, own = 0, total = 0;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "inactive_file %lf", &x) == 1 || sscanf(line, "active_file %lf", &x) == 1) own += x;
        if (sscanf(line, "total_inactive_file %lf", &x) == 1 || sscanf(line, "total_active_file %lf", &x) == 1)
            total += x;
    }
    if (f) fclose(f);
    return total > 0 ? total : own;
}

static bool read_memory_left(const char *folder, double *bytes)
{
    double limit, used;
    if (!read_memory_limit(folder, &limit)) return false;
    if (!read_number(folder, "memory.current", "memory.usage_in_bytes", &used)) used = 0;
    *bytes = limit - used + cached_bytes(folder);
    if (*bytes > limit) *bytes = limit;
    if (*bytes < 1) *bytes = 1; /* (0 says that there is no limit) */
    return true;
}

double group_memory_limit(const char *root) { return least_of_groups(root, "memory", read_memory_limit); }

double group_memory_left(const char *root) { return least_of_groups(root, "memory", read_memory_left); }

/* ---- both ---- */

int processors_share(int same, int local)
{
    cpu_set_t set;
    const double quota = processors_quota("");
    long n = sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
    n /= same;
    if (quota > 0 && ceil(quota / local) < (double)n) n = (long)ceil(quota / local);
    return n < 1 ? 1 : (int)n;
}

/* ---- what others take ---- */

static double seconds_of(struct rusage *u)
{
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
           1e-6 * (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec);
}

bool processors_used(double *all, double *own)
{
    char line[512];
    struct rusage self, children;
    cpu_set_t set;
    double ticks = 0;
    if (processors_quota("") > 0 || sched_getaffinity(0, sizeof set, &set)) return false;
    FILE *f = fopen("/proc/stat", "re");
    if (!f) return false;
    while (fgets(line, sizeof line, f)) {
        unsigned cpu;
        double user, nice, system, stolen;
        if (sscanf(line, "cpu%u %lf %lf %lf %*f %*f %*f %*f %lf", &cpu, &user, &nice, &system, &stolen) == 5 &&
            cpu < CPU_SETSIZE && CPU_ISSET(cpu, &set))
            ticks += user + nice + system + stolen;
    }
    fclose(f);
    getrusage(RUSAGE_SELF, &self);
    getrusage(RUSAGE_CHILDREN, &children);
    *all = ticks / (double)sysconf(_SC_CLK_TCK);
    *own = seconds_of(&self) + seconds_of(&children);
    return ticks > 0;
}
