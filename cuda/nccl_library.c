/*
 * NCCL, looked up when the first communicator is wanted: a program that needs none starts without the library. See
 * nccl_world.h. (The emulator's is linked: test/emu/nccl.cpp.)
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_world.h"

enum { OLDEST = NCCL_VERSION(2, 27, 0) }; /* names of communicators */

NcclLibrary nccl;

static struct {
    bool tried, loaded;
    char why[WHY_BYTES], version[24];
} look_up;

#ifdef MEGATRAIN_NCCL_LINKED
static void *find(void *library, const char *name)
{
    (void)library;
#define FOUND(f) if (!strcmp(name, "nccl" #f)) return (void *)nccl##f;
    NCCL_FUNCTIONS(FOUND)
    return NULL;
}
static void *open_library(void) { return &nccl; }
#else
static void *find(void *library, const char *name) { return dlsym(library, name); }
static void *open_library(void) { return dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL); }
#endif

static bool load(void)
{
    int v = 0;
    void *library = open_library();
    if (!library) return snprintf(look_up.why, sizeof look_up.why, "%.200s", dlerror()), false;
    const char *missing = NULL;
#define LOOK_UP(f)                                                     \
    nccl.f = (__typeof__(&nccl##f))find(library, "nccl" #f);           \
    if (!nccl.f) missing = "nccl" #f;
    NCCL_FUNCTIONS(LOOK_UP)
    if (missing) return snprintf(look_up.why, sizeof look_up.why, "libnccl.so.2 has no %s", missing), false;
    if (nccl.GetVersion(&v)) return snprintf(look_up.why, sizeof look_up.why, "libnccl.so.2 has no version"), false;
    snprintf(look_up.version, sizeof look_up.version, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    if (v >= OLDEST) return true;
    snprintf(look_up.why, sizeof look_up.why, "libnccl.so.2 is %s; 2.27 or newer is needed", look_up.version);
    return false;
}

bool nccl_available(const char **why)
{
    if (!look_up.tried) look_up.loaded = load();
    look_up.tried = true;
    *why = look_up.why;
    return look_up.loaded;
}

const char *nccl_version(void)
{
    const char *why;
    return nccl_available(&why) ? look_up.version : "";
}

/* ---- variables ---- */

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

const char *nccl_asks_for_nvls(void)
{
    const char *enable = getenv("NCCL_NVLS_ENABLE"), *algo = getenv("NCCL_ALGO");
    if (enable && strcmp(enable, "0") != 0) return "NCCL_NVLS_ENABLE";
    return algo && names_nvls(algo) ? "NCCL_ALGO" : NULL;
}

/*
 * NVLS by NCCL_NVLS_ENABLE, not by NCCL_ALGO: all versions take it alike and are then without any of its kinds, and it
 * leaves NCCL_ALGO, whose lists have changed from version to version, to the user. A variable of the environment goes
 * before what NCCL's own file of settings says.
 */
Err nccl_set_variables(bool any_order)
{
    const char *asks = nccl_asks_for_nvls();
    if (getenv("NCCL_COMM_ID"))
        return err_set(ERR_CONFIG, "NCCL_COMM_ID is set: ranks would meet there, and not at the run's own store"),
               err_hint("unset NCCL_COMM_ID");
    if (asks && !any_order)
        return err_set(ERR_CONFIG, "%s=%s asks NCCL for NVLS, sums in switches whose order differs from call to call",
                       asks, getenv(asks)),
               err_hint("unset %s; or run.reproducible=off, if repeats need not give the same bits", asks);
    if (!any_order) setenv("NCCL_NVLS_ENABLE", "0", 1);
    /* kernels of several groups start in the order of issue on every rank: none waits for another's multiprocessors */
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    return ERR_OK;
}
