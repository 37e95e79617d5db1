/* See tile_emulation.h. Arithmetic is that of dot_step.h, in plain C, and shares nothing with src/cpu. */
#include "tile_emulation.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/half.h"
#include "dot_step.h"

TilesKind tiles_kind;
const char *tile_fault;
long tile_products;

static _Thread_local struct {
    TileShapes shapes;
    bool open;
    char data[8][16][64];
} tiles;

static bool fault(const char *what)
{
    if (!tile_fault) tile_fault = what;
    return false;
}

void tile_loadconfig(const TileShapes *shapes)
{
    static const TileShapes none;
    bool fits = shapes->palette == 1 && !shapes->start_row;
    fits = fits && !memcmp(shapes->reserved, none.reserved, sizeof none.reserved);
    fits = fits && !memcmp(shapes->no_bytes, none.no_bytes, sizeof none.no_bytes);
    fits = fits && !memcmp(shapes->no_rows, none.no_rows, sizeof none.no_rows);
    for (int i = 0; i < 8; i++) {
        fits = fits && shapes->rows[i] <= 16 && shapes->bytes[i] <= 64;
        fits = fits && !shapes->rows[i] == !shapes->bytes[i];
    }
    if (!fits) {
        fault("LDTILECFG: shapes that no processor takes");
        return;
    }
    memset(&tiles, 0, sizeof tiles);
    tiles.shapes = *shapes;
    tiles.open = true;
}

void tile_release(void) { memset(&tiles, 0, sizeof tiles); }

static bool in_use(int n)
{
    if (n < 0 || n > 7) return fault("a register that is none");
    return (tiles.open && tiles.shapes.rows[n]) || fault("a register without a shape");
}

void tile_move(int n, char *memory, int64_t stride, int to_memory)
{
    if (!in_use(n)) return;
    const int bytes = tiles.shapes.bytes[n];
    if (!to_memory) memset(tiles.data[n], 0, sizeof tiles.data[n]);
    if (to_memory && stride < bytes && tiles.shapes.rows[n] > 1) fault("TILESTORED: rows over each other");
    for (int i = 0; i < tiles.shapes.rows[n]; i++, memory += stride) {
        if (to_memory) memcpy(memory, tiles.data[n][i], (size_t)bytes);
        else memcpy(tiles.data[n][i], memory, (size_t)bytes);
    }
}

static float step(float a, float b, float c)
{
    if (tiles_kind == TILES_KEEP_DENORMALS) return fmaf(a, b, c);
    if (tiles_kind == TILES_ROUND_PRODUCTS) return flushed(flushed(flushed(a) * flushed(b)) + flushed(c));
    const float r = fmaf(flushed(a), flushed(b), flushed(c));
    if (fabsf(r) >= 0x1p-125f) return r; /* (not to spend time where nothing can be flushed) */
    return tiles_kind == TILES_FLUSH_BEFORE_ROUNDING && fabsf(r) == 0x1p-126f &&
                   fabs((double)a * (double)b + (double)c) < 0x1p-126
               ? copysignf(0, r)
               : dot_step(a, b, c);
}

static float sum(float x, float y)
{
    return tiles_kind == TILES_KEEP_DENORMALS ? x + y : flushed(flushed(x) + flushed(y));
}

/* One element: row `a` and column n of the rows of register b, `pairs` pairs. */
static float element(const uint16_t *a, const char (*b)[64], int n, int pairs, float c)
{
    float even = 0, odd = 0;
    for (int k = 0; k < pairs; k++) {
        uint16_t y[2];
        memcpy(y, b[k] + 4 * n, sizeof y);
        const float x0 = bf16_to_float(a[2 * k]), x1 = bf16_to_float(a[2 * k + 1]);
        const float y0 = bf16_to_float(y[0]), y1 = bf16_to_float(y[1]);
        if (tiles_kind == TILES_IN_PAIRS) {
            c = step(x0, y0, step(x1, y1, c));
            continue;
        }
        even = step(x0, y0, even), odd = step(x1, y1, odd);
    }
    if (tiles_kind == TILES_IN_PAIRS) return c;
    if (tiles_kind == TILES_ONE_BY_ONE) return sum(sum(c, even), odd);
    return tiles_kind == TILES_ODD_FIRST ? sum(sum(odd, even), c) : sum(c, sum(even, odd));
}

void tile_multiply(int c, int a, int b)
{
    const TileShapes *s = &tiles.shapes;
    if (!in_use(c) || !in_use(a) || !in_use(b)) return;
    bool fits = c != a && c != b && a != b && s->bytes[a] % 4 == 0 && s->bytes[b] % 4 == 0;
    fits = fits && s->rows[c] == s->rows[a] && s->bytes[c] == s->bytes[b] && s->bytes[a] / 4 == s->rows[b];
    if (!fits) {
        fault("TDPBF16PS: shapes that do not fit each other");
        return;
    }
    __atomic_fetch_add(&tile_products, 1, __ATOMIC_RELAXED);
    for (int m = 0; m < s->rows[c]; m++) {
        uint16_t row[32];
        float to[16];
        memcpy(row, tiles.data[a][m], sizeof row);
        memcpy(to, tiles.data[c][m], sizeof to);
        for (int n = 0; n < s->bytes[c] / 4; n++)
            to[n] = element(row, (const char(*)[64])tiles.data[b], n, s->rows[b], to[n]);
        memcpy(tiles.data[c][m], to, sizeof to);
    }
}
