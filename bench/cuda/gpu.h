/*
 * Shared parts of the GPU benchmarks: time by CUDA events, the head of their JSON, arguments. They are built where the
 * CUDA backend is, for a GPU ($(BUILD)/gpu) and for the emulator, where only their way through the code means anything,
 * not their figures.
 */
#ifndef MEGATRAIN_BENCH_CUDA_GPU_H
#define MEGATRAIN_BENCH_CUDA_GPU_H

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "device/ops.h"

static inline Err gpu_check(cudaError_t code, const char *what)
{
    if (code == cudaSuccess) return ERR_OK;
    return err_set(ERR_DEVICE, "%s: %s", what, cudaGetErrorString(code));
}

static inline cudaStream_t gpu_stream(Stream *s) { return (cudaStream_t)s->handle; }

/* Marks in the order of the stream's work; mark i is an event that gpu_marks_open made. */
typedef struct {
    cudaEvent_t *events;
    int count;
} GpuMarks;

static inline Err gpu_marks_open(GpuMarks *m, int count)
{
    *m = (GpuMarks){ calloc((size_t)count, sizeof *m->events), count };
    if (!m->events) return err_set(ERR_MEMORY, "no memory for %d marks", count);
    for (int i = 0; i < count; i++) TRY(gpu_check(cudaEventCreate(&m->events[i]), "creating an event"));
    return ERR_OK;
}

static inline void gpu_marks_close(GpuMarks *m)
{
    for (int i = 0; m->events && i < m->count; i++)
        if (m->events[i]) cudaEventDestroy(m->events[i]);
    free(m->events);
}

static inline Err gpu_mark(GpuMarks *m, int i, Stream *s)
{
    ASSERT(i < m->count);
    return gpu_check(cudaEventRecord(m->events[i], gpu_stream(s)), "recording an event");
}

/* After device_sync. */
static inline Err gpu_ms(const GpuMarks *m, int from, int to, double *ms)
{
    float f = 0;
    TRY(gpu_check(cudaEventElapsedTime(&f, m->events[from], m->events[to]), "reading a time"));
    *ms = (double)f;
    return ERR_OK;
}

static inline int gpu_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double gpu_median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, gpu_by_value);
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

/* Describes the machine: date, device, driver, runtime. Also prints it. */
static inline Err gpu_describe(JsonOut *j)
{
    DeviceInfo d;
    char date[32], text[32];
    time_t now = time(NULL);
    TRY(device_cuda_info(0, &d));
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    json_put_text(j, "date", date);
    json_put_text(j, "device", d.name);
    snprintf(text, sizeof text, "%d.%d", d.major, d.minor);
    json_put_text(j, "compute_capability", text);
    json_put_int(j, "multiprocessors", d.multiprocessors);
    json_put_int(j, "memory_bytes", d.total_bytes);
    snprintf(text, sizeof text, "%d.%d", d.driver / 1000, d.driver % 1000 / 10);
    json_put_text(j, "driver_cuda", text);
    snprintf(text, sizeof text, "%d.%d", d.runtime / 1000, d.runtime % 1000 / 10);
    json_put_text(j, "runtime_cuda", text);
    printf("%s, compute capability %d.%d, %d multiprocessors, %.1f GiB; driver for CUDA %d.%d, runtime %s\n", d.name,
           d.major, d.minor, d.multiprocessors, (double)d.total_bytes / (1 << 30), d.driver / 1000,
           d.driver % 1000 / 10, text);
    return ERR_OK;
}

enum { GPU_TOO_SMALL = 77 }; /* exit status: nothing was run, and that is no failure */

/* Whether so much memory is free; says so if not. */
static inline Err gpu_has_room(int64_t bytes, bool *enough)
{
    DeviceInfo d;
    TRY(device_cuda_info(0, &d));
    *enough = d.free_bytes >= bytes;
    if (!*enough)
        printf("skipped: this needs %.1f GiB of device memory, %.1f GiB are free\n", (double)bytes / (1 << 30),
               (double)d.free_bytes / (1 << 30));
    return ERR_OK;
}

/* Writes the finished text; nothing without a path. */
static inline Err gpu_write_json(const JsonOut *j, const char *text, const char *path)
{
    if (!path) return ERR_OK;
    FILE *f = fopen(path, "w");
    if (!f || !json_out_ok(j) || fprintf(f, "%s\n", text) < 0 || fclose(f))
        return err_set(ERR_STORAGE, "cannot write '%s'", path);
    return ERR_OK;
}

#endif
