/* See config_device.h. */
#include "config/config_device.h"

#include <dirent.h>
#include <ini.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/file.h"
#include "base/words.h"

enum { NAMES_MAX = 64, NAMES_BYTES = 1024, FILE_BYTES = 1 << 22 };

/* ---- one file ---- */

void device_file_release(DeviceFile *f) { device_points_free(&f->points); }

typedef struct {
    const char *key;
    size_t offset;
    double otherwise;
} Number;

static const Number numbers[] = {
#define NUMBER(name, value, meaning) { #name, offsetof(DeviceFile, name), value },
    DEVICE_NUMBERS(NUMBER)
#undef NUMBER
};
enum { NUMBERS = sizeof numbers / sizeof *numbers };

static double *number_at(DeviceFile *f, int i) { return (double *)(void *)((char *)f + numbers[i].offset); }

/* The number that a key is, where it is one; NULL: no such key. */
static double *number_of(DeviceFile *f, const char *key)
{
    for (int i = 0; i < NUMBERS; i++)
        if (!strcmp(key, numbers[i].key)) return number_at(f, i);
    return NULL;
}

static bool read_number(const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return end != text && !*end && *out > 1e-9 && *out < 1e9;
}

static bool is_count(const char *key)
{
    return !strcmp(key, "memory_mib") || !strcmp(key, "multiprocessors") || !strcmp(key, "processors") ||
           !strcmp(key, "host_devices");
}

/* What is wrong with it; NULL: nothing. There are whole devices, none reaches more than all of a rate, and an op
 * beside a call still comes on. */
static const char *fault(const char *key, double number)
{
    if (is_count(key) && number != floor(number)) return "whole";
    if (!strcmp(key, "overlap_cost") && number >= 1) return "below 1";
    if (!strcmp(key, "hopper") && number != 1) return "1, or left out";
    return text_ends(key, "_share") && number > 1 ? "at most 1" : NULL;
}

enum { WHY_BYTES = 320 };

typedef struct {
    DeviceFile *file;
    char why[WHY_BYTES]; /* of the first mistake */
} Reading;

static Err take_number(const char *key, const char *value, double *out)
{
    if (!read_number(value, out)) return err_set(ERR_CONFIG, "%s = '%s' is no number above 0", key, value);
    if (fault(key, *out)) return err_set(ERR_CONFIG, "%s = '%s' must be %s", key, value, fault(key, *out));
    return ERR_OK;
}

static Err take_line(DeviceFile *f, const char *section, const char *key, const char *value)
{
    double mib, *number = number_of(f, key);
    if (device_points_section(section)) return device_points_read(&f->points, section, key, value);
    if (strcmp(section, "device") != 0) return err_set(ERR_CONFIG, "no section '%s'", section);
    if (number) return take_number(key, value, number);
    if (strcmp(key, "match") == 0) return text_cut(f->match, sizeof f->match, value), ERR_OK;
    if (strcmp(key, "isa") == 0) return text_cut(f->points.isa, sizeof f->points.isa, value), ERR_OK;
    if (strcmp(key, "dot") == 0) return text_cut(f->points.dot, sizeof f->points.dot, value), ERR_OK;
    if (strcmp(key, "memory_mib") != 0) return err_set(ERR_CONFIG, "no key '%s'", key);
    TRY(take_number("memory_mib", value, &mib));
    f->memory_mib = (int64_t)mib;
    return ERR_OK;
}

/* inih's handler: 0 is a mistake in this line. */
static int take(void *user, const char *section, const char *key, const char *value)
{
    Reading *r = user;
    const Err err = take_line(r->file, section, key, value);
    if (err && !*r->why) text_cut(r->why, sizeof r->why, err_message());
    return !err;
}

/* The last part of a path, without .ini. */
static void name_of(const char *path, char out[DEVICE_NAME_BYTES])
{
    const char *slash = strrchr(path, '/');
    text_cut(out, DEVICE_NAME_BYTES, slash ? slash + 1 : path);
    if (text_ends(out, ".ini")) out[strlen(out) - 4] = 0;
}

static Err refuse_line(const char *path, int line, const char *why)
{
    err_set(ERR_CONFIG, "%s:%d: not a line of a device%s%s", path, line < 0 ? 0 : line, *why ? ": " : "", why);
    return err_hint("[device], then memory_mib and other numbers above 0, such as bf16_tflops = 989, shares at most 1, "
                    "counts whole, or match; or [op.NAME], [comm.NAME] as doctor --calibrate writes them");
}

static Err read_lines(const char *path, DeviceFile *out)
{
    char *text;
    int64_t size;
    *out = (DeviceFile){ 0 };
    for (int i = 0; i < NUMBERS; i++) *number_at(out, i) = numbers[i].otherwise;
    name_of(path, out->name);
    TRY_AS(ERR_CONFIG, file_read_all(path, FILE_BYTES, &text, &size));
    const bool is_text = (int64_t)strlen(text) == size;
    Reading r = { .file = out };
    const int line = is_text ? ini_parse_string(text, take, &r) : 0;
    free(text);
    if (!is_text) return err_set(ERR_CONFIG, "%s: not a text", path);
    if (line) return refuse_line(path, line, r.why);
    if (!out->memory_mib) return err_set(ERR_CONFIG, "%s: memory_mib is missing", path);
    return device_points_order(&out->points);
}

static Err read_path(const char *path, DeviceFile *out)
{
    const Err err = read_lines(path, out);
    if (err) device_file_release(out);
    return err;
}

/* ---- the folder ---- */

static bool is_folder(char out[PATH_MAX], const char *base, int base_bytes, const char *rest)
{
    return snprintf(out, PATH_MAX, "%.*s%s", base_bytes, base, rest) < PATH_MAX && file_is_dir(out);
}

static bool find_folder(char out[PATH_MAX])
{
    char program[PATH_MAX];
    if (is_folder(out, "", 0, "config/devices")) return true;
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n > 0 ? n : 0] = 0;
    const char *slash = strrchr(program, '/');
    const int folder = slash ? (int)(slash - program) : 0;
    return is_folder(out, program, folder, "/config/devices") ||
           is_folder(out, program, folder, "/../share/megatrain/config/devices");
}

typedef struct {
    char folder[PATH_MAX];
    char items[NAMES_MAX][DEVICE_NAME_BYTES]; /* in alphabetical order */
    int count;
} Names;

static int compare_names(const void *a, const void *b) { return strcmp(a, b); }

static Err list_names(Names *n)
{
    n->count = 0;
    if (!find_folder(n->folder))
        return err_set(ERR_CONFIG, "no folder config/devices, here or beside the program"),
               err_hint("--device takes the path of a device's file, too");
    DIR *d = opendir(n->folder);
    const struct dirent *e;
    while (d && (e = readdir(d)) && n->count < NAMES_MAX)
        if (text_ends(e->d_name, ".ini")) name_of(e->d_name, n->items[n->count++]);
    if (d) closedir(d);
    qsort(n->items, (size_t)n->count, sizeof *n->items, compare_names);
    return ERR_OK;
}

static Err read_named(const Names *n, int i, DeviceFile *out)
{
    char path[PATH_MAX + DEVICE_NAME_BYTES + 8];
    snprintf(path, sizeof path, "%s/%s.ini", n->folder, n->items[i]);
    return read_path(path, out);
}

static Err refuse(const Names *n, const char *name)
{
    char all[NAMES_BYTES] = "";
    if (strncasecmp(name, "mi", 2) == 0 && name[2] >= '0' && name[2] <= '9')
        return err_set(ERR_CONFIG, "device '%s' is AMD's: megatrain computes on NVIDIA's GPUs and on CPUs", name);
    for (int i = 0, used = 0; i < n->count && used < NAMES_BYTES - DEVICE_NAME_BYTES - 4; i++)
        used += snprintf(all + used, sizeof all - (size_t)used, "%s%s", i ? ", " : "", n->items[i]);
    err_set(ERR_CONFIG, "device '%s' is none that is known", name);
    return err_hint("cpu, %s; or the path of a file such as %s/h100.ini", all, n->folder);
}

static Err read_known(Names *n, const char *name, DeviceFile *out)
{
    TRY(list_names(n));
    for (int i = 0; i < n->count; i++)
        if (strcasecmp(name, n->items[i]) == 0) return read_named(n, i, out);
    return refuse(n, name);
}

void device_file_names(void (*each)(void *user, const char *name), void *user)
{
    Names *n = malloc(sizeof *n);
    each(user, "cpu");
    if (n && !list_names(n))
        for (int i = 0; i < n->count; i++) each(user, n->items[i]);
    free(n);
}

Err device_file_read(const char *name, DeviceFile *out)
{
    const bool is_path = strchr(name, '/') || text_ends(name, ".ini");
    if (is_path && !file_exists(name)) return err_set(ERR_CONFIG, "device: no file '%s'", name);
    if (is_path) return read_path(name, out);
    Names *n = malloc(sizeof *n);
    if (!n) return err_set(ERR_MEMORY, "no memory for the names of devices");
    Err err = read_known(n, name, out);
    free(n);
    return err;
}

bool device_file_match(const char *gpu, DeviceFile *out)
{
    Names *n = malloc(sizeof *n);
    size_t longest = 0;
    if (n && list_names(n)) n->count = 0;
    for (int i = 0; n && i < n->count; i++) {
        DeviceFile f;
        const bool fits = !read_named(n, i, &f) && strlen(f.match) > longest && strstr(gpu, f.match);
        device_file_release(&f);
        if (!fits) continue;
        longest = strlen(f.match);
        *out = f;
    }
    free(n);
    return longest > 0;
}
