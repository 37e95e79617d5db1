/*
 * NCCL, looked up when the first communicator is wanted: a program that needs none starts without the library. See
 * nccl_world.h. (The emulator's is linked: test/emu/nccl.cpp.)
 */
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "nccl_world.h"

#define SONAME "libnccl.so.2"

NcclLibrary nccl;

static struct {
    bool tried, loaded;
    int number;
    char why[WHY_BYTES], version[24], path[PATH_MAX];
} look_up;

/* ---- one library ---- */

#ifdef MEGATRAIN_NCCL_LINKED
static void *find(void *library, const char *name)
{
    (void)library;
#define FOUND(f) if (!strcmp(name, "nccl" #f)) return (void *)nccl##f;
    NCCL_FUNCTIONS(FOUND)
    return NULL;
}
static void *open_library(const char *path) { return (void)path, &nccl; }
static void close_library(void *library) { (void)library; }
#else
static void *find(void *library, const char *name) { return dlsym(library, name); }
static void *open_library(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void close_library(void *library) { dlclose(library); }
#endif

static bool is_fit(void *library, const char *path)
{
    Dl_info place;
    int v = 0;
    const char *missing = NULL;
#define LOOK_UP(f)                                                     \
    nccl.f = (__typeof__(&nccl##f))find(library, "nccl" #f);           \
    if (!nccl.f) missing = "nccl" #f;
    NCCL_FUNCTIONS(LOOK_UP)
    if (missing) return snprintf(look_up.why, sizeof look_up.why, "%.180s has no %s", path, missing), false;
    if (nccl.GetVersion(&v)) return snprintf(look_up.why, sizeof look_up.why, "%.180s has no version", path), false;
    snprintf(look_up.version, sizeof look_up.version, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    if (v < NCCL_OLDEST)
        return snprintf(look_up.why, sizeof look_up.why, "%.150s is NCCL %s; 2.21 or newer is needed", path,
                        look_up.version),
               false;
    look_up.number = v;
    if (!dladdr((void *)nccl.GetVersion, &place)) place.dli_fname = path;
    snprintf(look_up.path, sizeof look_up.path, "%s", place.dli_fname);
    return true;
}

/* Why not is in look_up.why. One that is not fit is closed: else its name would stand for all that come after. */
static bool load(const char *path)
{
    void *library = open_library(path);
    if (!library && *look_up.why) return false; /* what is wrong with one that is there says more */
    if (!library) return snprintf(look_up.why, sizeof look_up.why, "%.200s", dlerror()), false;
    if (is_fit(library, path)) return true;
    close_library(library);
    return false;
}

/* ---- where it may be ---- */

/* The first that is fit for use of those that a pattern of the shell names, the last by name first. */
static bool load_any(const char *folder, const char *below)
{
    char pattern[PATH_MAX];
    glob_t found;
    bool loaded = false;
    snprintf(pattern, sizeof pattern, "%s%s/" SONAME, folder, below);
    if (glob(pattern, GLOB_BRACE, NULL, &found)) return false;
    for (size_t i = found.gl_pathc; i-- > 0 && !loaded;) loaded = load(found.gl_pathv[i]);
    globfree(&found);
    return loaded;
}

/* NCCL from pip lies among the packages of a Python, whose program has its folder in PATH. */
static bool load_from_python(void)
{
    char folder[PATH_MAX];
    const char *path = getenv("PATH");
    for (const char *at = path ? path : ""; *at; at += strcspn(at, ":"), at += *at == ':') {
        snprintf(folder, sizeof folder, "%.*s", (int)strcspn(at, ":"), at);
        if (load_any(folder, "/../lib/python3*/{site,dist}-packages/nvidia/nccl/lib")) return true;
    }
    return false;
}

static bool load_from(const char *variable, const char *below)
{
    const char *folder = getenv(variable);
    return folder && *folder && load_any(folder, below);
}

/* Who names a folder wants no other library. */
static bool search(void)
{
    const char *home = getenv("NCCL_HOME");
    if (home && *home) {
        snprintf(look_up.why, sizeof look_up.why, "NCCL_HOME: no " SONAME " in %.180s/lib", home);
        return load_any(home, "/lib");
    }
    return load(SONAME) || load_from("CONDA_PREFIX", "/lib") ||
           load_from_python() || load_from("NVHPC_ROOT", "/comm_libs/nccl/lib") ||
           load_any("/opt/nvidia/hpc_sdk", "/Linux_*/*/comm_libs/nccl/lib");
}

bool nccl_available(const char **why)
{
    if (!look_up.tried) look_up.loaded = search();
    look_up.tried = true;
    *why = look_up.why;
    return look_up.loaded;
}

const char *nccl_version(void)
{
    const char *why;
    return nccl_available(&why) ? look_up.version : "";
}

const char *nccl_path(void)
{
    const char *why;
    return nccl_available(&why) ? look_up.path : "";
}

/* ---- settings ---- */

ncclConfig_t nccl_config(const char *name)
{
    const bool names = look_up.number >= NCCL_NAMES;
    const int any = NCCL_CONFIG_UNDEF_INT;
    return (ncclConfig_t){ .size = names ? sizeof(ncclConfig_t) : offsetof(ncclConfig_t, commName),
                           .magic = NCCL_MAGIC,
                           .version = names ? NCCL_NAMES : NCCL_OLDEST,
                           .blocking = 0,
                           .cgaClusterSize = any,
                           .minCTAs = any,
                           .maxCTAs = any,
                           .splitShare = any,
                           .trafficClass = any,
                           .commName = name,
                           .collnetEnable = any,
                           .CTAPolicy = any,
                           .shrinkShare = any,
                           .nvlsCTAs = any };
}

/* NCCL_ALGO: "ring,tree", "^nvls" (all but these), or such lists for some calls, "allreduce:tree;allgather:nvls". */
static bool names_nvls(const char *algo)
{
    char list[256];
    for (const char *at = algo; *at; at += strcspn(at, ";"), at += *at == ';') {
        snprintf(list, sizeof list, "%.*s", (int)strcspn(at, ";"), at);
        const char *colon = strchr(list, ':'), *names = colon ? colon + 1 : list;
        if (*names != '^' && strcasestr(names, "nvls")) return true;
    }
    return false;
}

/* What keeps NVLS from all that adds, behind a list for gathers. */
#define SUMS_WITHOUT ";allreduce:^nvls,nvlstree;reducescatter:^nvls,nvlstree;reduce:^nvls,nvlstree"

/* Gathers add nothing. From 2.24 on a list for them alone leaves the other calls theirs. */
static bool is_of_gathers(const char *algo)
{
    const char *others = strchr(algo, ';'), *why;
    return nccl_available(&why) && look_up.number >= NCCL_LISTS && !strncasecmp(algo, "allgather:", 10) &&
           (!others || !strcmp(others, SUMS_WITHOUT));
}

bool nccl_gathers_by_nvls(void)
{
    const char *algo = getenv("NCCL_ALGO");
    return algo && names_nvls(algo) && is_of_gathers(algo);
}

const char *nccl_asks_for_nvls(void)
{
    const char *enable = getenv("NCCL_NVLS_ENABLE"), *algo = getenv("NCCL_ALGO");
    if (enable && strcmp(enable, "0") != 0) return "NCCL_NVLS_ENABLE";
    return algo && names_nvls(algo) && !is_of_gathers(algo) ? "NCCL_ALGO" : NULL;
}

static void keep_nvls_out(void)
{
    char algo[512];
    if (!nccl_gathers_by_nvls()) {
        setenv("NCCL_NVLS_ENABLE", "0", 1);
        return;
    }
    snprintf(algo, sizeof algo, "%.*s" SUMS_WITHOUT, (int)strcspn(getenv("NCCL_ALGO"), ";"), getenv("NCCL_ALGO"));
    setenv("NCCL_ALGO", algo, 1);
}

/* Sums are added in an order that follows from these. */
static void tell_of_orders(void)
{
    static const char *const names[] = { "NCCL_ALGO",     "NCCL_PROTO",         "NCCL_MIN_CTAS",
                                         "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
                                         "NCCL_NTHREADS", "NCCL_BUFFSIZE",      "NCCL_TOPO_FILE",
                                         "NCCL_CROSS_NIC", "NCCL_GRAPH_FILE",   "NCCL_TUNER_PLUGIN" };
    char text[512] = "";
    size_t n = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && n < sizeof text; i++)
        if (getenv(names[i]))
            n += (size_t)snprintf(text + n, sizeof text - n, " %s=%.60s", names[i], getenv(names[i]));
    if (n) log_info("in the environment:%s; repeats need the same", text);
}

bool nccl_shares_gpus(void)
{
    const char *why, *asked = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return nccl_available(&why) && look_up.number >= NCCL_SHARES && asked && atoi(asked);
}

/*
 * NVLS by NCCL_NVLS_ENABLE, not by NCCL_ALGO, unless that has it for gathers: all versions take the first alike and are
 * then without any of its kinds, and it leaves NCCL_ALGO, whose lists have changed from version to version, to the
 * user. A variable of the environment goes before what NCCL's own file of settings says.
 */
Err nccl_set_variables(const NcclOptions *o)
{
    const char *asks = nccl_asks_for_nvls();
    if (getenv("NCCL_COMM_ID"))
        return err_set(ERR_CONFIG, "NCCL_COMM_ID is set: ranks would meet there, and not at the run's own store"),
               err_hint("unset NCCL_COMM_ID");
    if (asks && !o->any_order)
        return err_set(ERR_CONFIG, "%s=%s asks NCCL for NVLS, sums in switches whose order differs from call to call",
                       asks, getenv(asks)),
               err_hint("unset %s; or run.reproducible=off, if repeats need not give the same bits", asks);
    if (o->rank == 0 && !o->any_order) tell_of_orders();
    if (!o->any_order) keep_nvls_out();
    /* kernels of several groups start in the order of issue on every rank: none waits for another's multiprocessors */
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    char host[32];
    snprintf(host, sizeof host, "megatrain-rank-%d", o->rank);
    if (o->own_host) setenv("NCCL_HOSTID", host, 1);
    const char *switches = getenv("NCCL_COLLNET_ENABLE");
    if (o->rank == 0 && !o->any_order && switches && strcmp(switches, "0") != 0)
        log_warn("NCCL_COLLNET_ENABLE=%s: the network's switches may add in another order in each run; unset it if "
                 "repeats need the same bits",
                 switches);
    if (o->rank == 0 && look_up.number < NCCL_ORDERS)
        log_warn(
            "NCCL %s does not start kernels of several groups in one order on all ranks, as 2.26 does: if they ever "
            "wait for each other, the run ends after parallel.timeout_s",
            look_up.version);
    return ERR_OK;
}
