/* See device_points.h. */
#include "config/device_points.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/words.h"

static const char OP[] = "op.", COMM[] = "comm.";

bool device_points_section(const char *section)
{
    return !strncmp(section, OP, strlen(OP)) || !strncmp(section, COMM, strlen(COMM));
}

Err device_points_add(DevicePoints *all, const DevicePoint *p)
{
    if (all->count == all->room) {
        const int room = all->room ? 2 * all->room : 256;
        DevicePoint *more = realloc(all->items, (size_t)room * sizeof *more);
        if (!more) return err_set(ERR_MEMORY, "no memory for what was measured of a device");
        all->items = more;
        all->room = room;
    }
    all->items[all->count++] = *p;
    return ERR_OK;
}

/* Points of a name, dtype, ranks and threads side by side, in the order of their shapes. */
static int by_place(const void *a, const void *b)
{
    const DevicePoint *p = a, *q = b;
    const int name = strcmp(p->name, q->name), dtype = strcmp(p->dtype, q->dtype);
    if (name || dtype) return name ? name : -dtype;
    if (p->ranks != q->ranks) return p->ranks - q->ranks;
    if (p->threads != q->threads) return q->threads - p->threads;
    for (int i = 0; i < p->dims; i++)
        if (p->shape[i] != q->shape[i]) return p->shape[i] < q->shape[i] ? -1 : 1;
    return 0;
}

Err device_points_order(DevicePoints *all)
{
    if (all->count) qsort(all->items, (size_t)all->count, sizeof *all->items, by_place);
    all->names = 0;
    for (int i = 0; i < all->count; i++) {
        if (i && !strcmp(all->items[i].name, all->items[i - 1].name)) continue;
        if (all->names == POINT_NAMES_MOST) return err_set(ERR_CONFIG, "more than %d sections of points", all->names);
        all->first[all->names++] = i;
    }
    return ERR_OK;
}

const DevicePoint *device_points_of(const DevicePoints *all, const char *name, int *count)
{
    for (int i = 0; i < all->names; i++) {
        const DevicePoint *first = &all->items[all->first[i]];
        if (strcmp(first->name, name) != 0) continue;
        *count = (i + 1 < all->names ? all->first[i + 1] : all->count) - all->first[i];
        return first;
    }
    return NULL;
}

void device_points_free(DevicePoints *all)
{
    free(all->items);
    *all = (DevicePoints){ 0 };
}

/* "256x512x128" */
static bool read_shape(const char *text, DevicePoint *p)
{
    char *end;
    for (p->dims = 0; p->dims < POINT_SHAPE_MOST; text = end + 1) {
        double *size = &p->shape[p->dims++];
        *size = strtod(text, &end);
        if (end == text || !(*size >= 1 && *size < 1e15) || *size != floor(*size)) return false;
        if (*end != 'x') return !*end;
    }
    return false;
}

static const double US_MOST = 1e12; /* 11 days */

/* Letters and digits, so that the line can be written and read again: a ';' would begin a comment. */
static bool is_word(const char *text)
{
    if (!*text) return false;
    for (; *text; text++)
        if (!isalnum((unsigned char)*text)) return false;
    return true;
}

static bool read_point(const char *value, bool op, DevicePoint *p)
{
    char shape[64];
    int at = 0;
    if (op) sscanf(value, "%7s %7dx%7d %63s %lf%n", p->dtype, &p->ranks, &p->threads, shape, &p->us, &at);
    else sscanf(value, "%7d %63s %lf%n", &p->ranks, shape, &p->us, &at);
    if (!op) p->threads = 1;
    return at > 0 && !value[at] && p->ranks > 0 && p->threads > 0 && p->us > 0 && p->us < US_MOST &&
           read_shape(shape, p) && (op ? is_word(p->dtype) : p->dims == 1);
}

Err device_points_read(DevicePoints *all, const char *section, const char *key, const char *value)
{
    const bool op = !strncmp(section, OP, strlen(OP));
    DevicePoint p = { 0 };
    const char *name = section + strlen(op ? OP : COMM);
    text_cut(p.name, sizeof p.name, name);
    if (strcmp(key, "us") != 0 || !*name || strcmp(p.name, name) != 0 || !read_point(value, op, &p))
        return err_set(ERR_CONFIG, "[%s] has lines such as 'us = %s'", section,
                       op ? "f32 2x1 256x512x128 690.5" : "2 65536 41.2");
    return device_points_add(all, &p);
}

void device_point_line(const DevicePoint *p, char out[POINT_LINE_BYTES])
{
    int at = *p->dtype ? snprintf(out, POINT_LINE_BYTES, "us = %s %dx%d ", p->dtype, p->ranks, p->threads)
                       : snprintf(out, POINT_LINE_BYTES, "us = %d ", p->ranks);
    for (int i = 0; i < p->dims; i++)
        at += snprintf(out + at, (size_t)(POINT_LINE_BYTES - at), "%s%.0f", i ? "x" : "", p->shape[i]);
    snprintf(out + at, (size_t)(POINT_LINE_BYTES - at), " %.4g", p->us);
}
