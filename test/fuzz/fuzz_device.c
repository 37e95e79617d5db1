/*
 * config/config_device.c and device_points.c: a device's file. Input: its text. What is accepted has numbers within
 * their bounds and points in order; written as `doctor --calibrate` writes points, it is read again with the same.
 */
#include <math.h>

#include "fuzz.h"

#include "config/config_device.h"

static void check_numbers(const DeviceFile *f)
{
#define NUMBER(key, otherwise, meaning) \
    FUZZ_CHECK(isfinite(f->key) && f->key >= 0 && f->key <= 1e9, #key " = %g", f->key);
    DEVICE_NUMBERS(NUMBER)
#undef NUMBER
    FUZZ_CHECK(f->memory_mib > 0, "%lld MiB", (long long)f->memory_mib);
    FUZZ_CHECK(f->matrix_share <= 1 && f->memory_share <= 1 && f->attention_share <= 1 &&
                   f->link_share <= 1 && f->experts_share <= 1 && f->overlap_cost < 1,
               "a share above 1");
}

static bool same_place(const DevicePoint *p, const DevicePoint *q)
{
    bool same = !strcmp(p->name, q->name) && !strcmp(p->dtype, q->dtype) && p->ranks == q->ranks &&
                p->threads == q->threads && p->dims == q->dims;
    for (int i = 0; same && i < p->dims; i++) same = p->shape[i] == q->shape[i];
    return same;
}

/* Each name's points are found, side by side. */
static void check_found(const DevicePoints *all)
{
    int seen = 0;
    for (int i = 0; i < all->count; i += seen) {
        const DevicePoint *p = device_points_of(all, all->items[i].name, &seen);
        FUZZ_CHECK(p == &all->items[i] && seen > 0, "points of '%s'", all->items[i].name);
        for (int k = 0; k < seen; k++)
            FUZZ_CHECK(!strcmp(p[k].name, p->name), "'%s' in '%s'", p[k].name, p->name);
    }
}

/* Name for name, so that of equal points, whose order is nobody's, none is compared with another. */
static void check_again(const DeviceFile *f)
{
    DeviceFile again;
    size_t room = 64 + (size_t)f->points.count * (POINT_LINE_BYTES + POINT_NAME_BYTES + 16), used;
    char *text = malloc(room);
    if (!text) abort();
    used = (size_t)sprintf(text, "[device]\nmemory_mib = %lld\n", (long long)f->memory_mib);
    for (int i = 0; i < f->points.count; i++) {
        const DevicePoint *p = &f->points.items[i];
        char line[POINT_LINE_BYTES];
        device_point_line(p, line);
        used += (size_t)sprintf(text + used, "[%s.%s]\n%s\n", *p->dtype ? "op" : "comm", p->name, line);
    }
    fuzz_write("again.ini", text, used);
    Err err = device_file_read(fuzz_path("again.ini"), &again);
    FUZZ_CHECK(!err, "%s:\n%s", err_message(), text);
    FUZZ_CHECK(again.memory_mib == f->memory_mib && again.points.count == f->points.count, "other numbers");
    for (int i = 0; i < f->points.count; i++) {
        const DevicePoint *p = &f->points.items[i], *q = &again.points.items[i];
        FUZZ_CHECK(same_place(p, q), "point %d:\n%s", i, text);
        const bool alone =
            (!i || !same_place(p - 1, p)) && (i + 1 == f->points.count || !same_place(p, p + 1));
        FUZZ_CHECK(!alone || fabs(p->us - q->us) <= 1e-3 * p->us, "%g us, then %g", p->us, q->us);
    }
    device_file_release(&again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    DeviceFile f;
    fuzz_write("in.ini", data, size);
    fuzz_memory_start();
    Err err = device_file_read(fuzz_path("in.ini"), &f);
    FUZZ_MEMORY_BOUND(size, 32, 48 << 10);
    fuzz_check_error(err, ERR_CONFIG, ERR_CONFIG, false);
    if (err) return 0;
    check_numbers(&f);
    check_found(&f.points);
    check_again(&f);
    device_file_release(&f);
    return 0;
}
