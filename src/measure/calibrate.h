/*
 * Times of this machine's CPUs for ops and collectives, measured in a minute or two into a device's file
 * (config/config_device.h), by which `megatrain plan --device FILE` predicts steps of runs here (docs/planner.md).
 *
 *   ops           every op of ops.def at some sizes (measure/cases.h), products and attention on a grid of shapes; by
 *                 one rank with all processors and with one thread, and by as many ranks at once as there are
 *                 processors
 *   collectives   every kind between 2 and 4 processes of this machine, small to large; how far ranks that do the same
 *                 are apart
 *   the disk      a file in the folder of checkpoints
 *
 * Each figure is the mean of repeats without their longest tenth, the middle of some sweeps over everything that lie
 * apart, the mean over ranks: what other programs of this machine do comes and goes.
 */
#ifndef MEGATRAIN_MEASURE_CALIBRATE_H
#define MEGATRAIN_MEASURE_CALIBRATE_H

#include "config/device_points.h"

typedef struct {
    double seconds;     /* to measure for, about; shapes that take long take longer */
    bool brief;         /* few and small shapes: a test of the whole way */
    const char *folder; /* folder that checkpoints go to */
} CalibrateOptions;

typedef struct {
    DevicePoints points;
    int processors;
    int64_t memory_mib;
    double fp32_tflops, bf16_tflops; /* rates of the fastest product */
    /* Rate of copies, bytes read and written; of all ranks that copy at once. */
    double memory_gb_s;
    double link_gb_s, link_us; /* a message between two processes: its rate, and the time of the smallest */
    double disk_gb_s;          /* 0: the folder takes no file; why: */
    char no_disk[200];
    double others; /* share of the processors that other programs had meanwhile; NaN: nobody knows */
    int noisy;     /* figures of which one call in a hundred took more than twice the median */
} Calibration;

/* To be called before the program has threads. The points are freed by device_points_free. ERR_MEMORY, and what
 * processes and communicators fail with. */
Err calibrate(CalibrateOptions o, Calibration *out);

/* The file, whole or not at all. ERR_STORAGE. */
Err calibration_write(const Calibration *c, const char *path);

#endif
