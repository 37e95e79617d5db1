/*
 * Points that were measured on a device, in its file (config/config_device.h): times of single ops and collectives, a
 * line each, which `megatrain doctor --calibrate` writes and src/cost/measured.c looks up.
 *
 *   [op.linear_fwd]
 *   us = f32 2x1 256x512x128 690.5      dtype (f32, bf16, f16), ranks that did it at once x threads of each, shape,
 *                                       microseconds
 *   [comm.all-gather]
 *   us = 2 65536 41.2                    members, bytes that a member sends, microseconds
 *
 * A shape has one to three whole numbers; which these are, cost/measured.h says.
 */
#ifndef MEGATRAIN_CONFIG_DEVICE_POINTS_H
#define MEGATRAIN_CONFIG_DEVICE_POINTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

enum { POINT_NAME_BYTES = 28, POINT_DTYPE_BYTES = 8, POINT_LINE_BYTES = 128, POINT_SHAPE_MOST = 3 };

typedef struct {
    char name[POINT_NAME_BYTES];   /* name of an op (device/ops.def) or a collective (comm_kind_name) */
    char dtype[POINT_DTYPE_BYTES]; /* an op's dtype; "" for a collective */
    int ranks, threads;            /* as above; threads: 1 of a collective */
    int dims;
    double shape[POINT_SHAPE_MOST];
    double us;
} DevicePoint;

enum { POINT_NAMES_MOST = 256 };

/* isa, dot: by which instructions products of the CPU were computed, in words of debug.isa and debug.dot; "": it is not
 * said. */
typedef struct {
    char isa[POINT_DTYPE_BYTES], dot[POINT_DTYPE_BYTES];
    DevicePoint *items; /* freed by device_points_free */
    int count, room;
    int names;                   /* once they are in order a name's points are neighbours, */
    int first[POINT_NAMES_MOST]; /* and those of the i-th begin here */
} DevicePoints;

/* ERR_MEMORY. */
Err device_points_add(DevicePoints *all, const DevicePoint *p);
/* Orders points by name, dtype, ranks, threads, shape; to be called before points are looked up. ERR_CONFIG: too many
 * names. */
Err device_points_order(DevicePoints *all);
void device_points_free(DevicePoints *all);

/* The points of a name, *count of them; NULL: there is none. */
const DevicePoint *device_points_of(const DevicePoints *all, const char *name, int *count);

/* Whether a section of a device file has points. */
bool device_points_section(const char *section);
/* One line of it. ERR_CONFIG: it is none, or a figure is not above 0. ERR_MEMORY. */
Err device_points_read(DevicePoints *all, const char *section, const char *key, const char *value);
/* The line, without its section. */
void device_point_line(const DevicePoint *p, char out[POINT_LINE_BYTES]);

#endif
