/*
 * gemm.c once more, with tiles of TDPBF16PS below it instead of registers of vectors: one instruction multiplies
 * 16 x 16 x 16 pairs. Of the build for AVX-512 this file alone is compiled for AMX (Makefile), if the compiler knows
 * it. Whether the processor has it, whether the system lends it, and whether it keeps to its definition is asked at run
 * time (dot_tiles).
 */
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(CPU_ISA_avx512)
#define GEMM_TILES
#elif defined(TILE_EMULATION)
#define GEMM_TILES
#endif

#if defined(GEMM_TILES)
#include "cpu/gemm.c"

#include <math.h>
#include <stdlib.h>

/* Sizes of the check: A, B and C of three kinds, by products of several depths with a short one behind. */
enum { CHECK_ROWS = 32, CHECK_COLS = 32, CHECK_K = 84, CHECK_KINDS = 3 };
typedef struct {
    uint16_t a[CHECK_ROWS * CHECK_K], b[CHECK_K * CHECK_COLS];
    float want[CHECK_ROWS * CHECK_COLS], got[CHECK_ROWS * CHECK_COLS];
} TilesCheck;

/* Kind 0: numbers about 1, whose sums depend on their order; 1: products about 2^-126, and denormals; 2: as 0, some of
 * them infinite, no number, or 0 of either sign. */
static uint16_t check_number(uint32_t *state, int kind)
{
    static const uint16_t odd[] = { 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x807F, 0x0000, 0x8000, 0x0080, 0x7F7F };
    *state = *state * 1664525u + 1013904223u;
    const uint32_t bits = *state >> 8, sign_and_fraction = bits & 0x807F, draw = bits >> 16 & 0xFF;
    if (kind == 2 && draw < 3) return odd[(bits >> 7) % (sizeof odd / sizeof *odd)];
    if (kind == 1) return (uint16_t)(sign_and_fraction | (draw < 12 ? 0 : 54 + draw % 20) << 7);
    return (uint16_t)(sign_and_fraction | (120 + draw % 8) << 7);
}

static bool check_kind(TilesCheck *c, const Device *dev, int kind)
{
    uint32_t state = 1 + (uint32_t)kind;
    for (int i = 0; i < CHECK_ROWS * CHECK_K; i++) c->a[i] = check_number(&state, kind);
    for (int i = 0; i < CHECK_K * CHECK_COLS; i++) c->b[i] = check_number(&state, kind);
    for (int i = 0; i < CHECK_ROWS * CHECK_COLS; i++) /* denormals, too */
        c->want[i] = c->got[i] = bf16_to_float(check_number(&state, kind)) * (kind == 1 ? 0x1p-64f : 1);
    if (kind == 1) { /* the first element: 2^-126 - 2^-151, which rounds up to a number that is no denormal */
        for (int k = 0; k < CHECK_K; k++) c->a[k] = 0;
        c->a[0] = c->b[0] = bf16_from_float(0x1p-63f);
        c->a[2] = bf16_from_float(0x1p-75f), c->b[2 * CHECK_COLS] = bf16_from_float(-0x1p-76f);
        c->want[0] = c->got[0] = 0;
    }
    Gemm g = { .mode = GEMM_CHAIN,
               .M = CHECK_ROWS,
               .N = CHECK_COLS,
               .K = CHECK_K,
               .a = { .bf16 = c->a, .ld = CHECK_K },
               .b = { .bf16 = c->b, .ld = CHECK_COLS },
               .ldc = CHECK_COLS,
               .beta = true };
    Device without = *dev;
    g.c = c->want;
    CPU(gemm)(&without, &g);
    g.c = c->got;
    CPU(gemm_by_tiles)(dev, &g);
    for (int i = 0; i < CHECK_ROWS * CHECK_COLS; i++) {
        const bool none = isnan(c->want[i]) && isnan(c->got[i]);
        if (!none && memcmp(&c->want[i], &c->got[i], sizeof c->got[i])) return false;
    }
    return true;
}

bool CPU(tiles_agree)(void)
{
    enum { ROOM = 4 << 20 };
    TilesCheck *c = calloc(1, sizeof *c);
    Device dev = { .threads = 1, .dot = DOT_AMX, .workspace = aligned_alloc(64, ROOM), .workspace_bytes = ROOM };
    bool agree = c && dev.workspace;
    for (int kind = 0; agree && kind < CHECK_KINDS; kind++) agree = check_kind(c, &dev, kind);
    free(dev.workspace);
    free(c);
    return agree;
}
#else
#include "base/err.h"
#include "cpu/gemm.h"
#include "cpu/isa.h"

bool CPU(gemm_by_tiles)(const Device *dev, const Gemm *g)
{
    (void)dev, (void)g;
    ASSERT(!"this build has tiles");
    return false;
}
int64_t CPU(gemm_bytes_by_tiles)(const Device *dev, const Gemm *g) { return (void)dev, (void)g, 0; }
double CPU(gemm_speedup_by_tiles)(const Device *dev, const Gemm *g) { return (void)dev, (void)g, 1; }
bool CPU(tiles_agree)(void) { return false; }
#endif

#if defined(CPU_ISA_avx512)
#if defined(GEMM_TILES)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux (5.16 and later) lends the state of tiles, 8 KiB a thread, to a process that asks: to all its threads. */
bool cpu_avx512_has_tiles(void)
{
    enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    const unsigned bf16 = 1u << 22, tile = 1u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (bf16 | tile)) != (bf16 | tile)) return false;
    return syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#else
bool cpu_avx512_has_tiles(void) { return false; }
#endif
#endif
