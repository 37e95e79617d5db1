/*
 * NCCL, looked up when the first communicator is wanted: a program that needs none starts without the library. See
 * nccl_world.h. (The emulator's is linked: test/emu/nccl.cpp.)
 */
#include <dlfcn.h>
#include <stdio.h>
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
