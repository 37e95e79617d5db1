/* The rate that mfu is a share of (run.h): by the GPU's file, or measured. */
#include "base/clock.h"
#include "config/config_device.h"
#include "train/run.h"

#define MOST_S 0.1
enum { PRODUCTS = 32 }; /* so many in a row that are no faster end it (a GPU's clock may still rise) */

/* The best of a few square products in scratch memory; a tenth of a second at most. A stage that is the embedding alone
 * has little: the three matrices are one piece, whose rounding up is no more than that of the least scratch. */
static Err measure_rate(Run *r, double *flops)
{
    Stream *stream = &r->trainer.device.stream;
    Arena *a = &r->trainer.memory.scratch;
    ArenaMark mark = arena_mark(a);
    DType T = r->spec.device.kind == DEVICE_CPU ? F32 : r->spec.compute;
    Tensor all, x, w, y;
    int64_t n = 768;
    while (n > 1 && 3 * 4 * n * n > a->size_bytes - a->used_bytes)
        n = n > 8 ? (n / 2 + 7) / 8 * 8 : n / 2; /* (16-bit products take rows that begin on 16 bytes) */
    *flops = 0;
    TRY(tensor_new(a, &all, T, 3 * n, n));
    x = tensor_row_slice(all, 0, n);
    w = tensor_row_slice(all, n, n);
    y = tensor_row_slice(all, 2 * n, n);
    TRY(op(stream, fill_zero, .x = x));
    TRY(op(stream, fill_zero, .x = w));
    const double end = clock_s() + MOST_S;
    int slower = 0;
    do {
        TRY(device_sync(stream));
        double t0 = clock_s();
        TRY(op(stream, linear_fwd, .y = y, .x = x, .w = w, .leaf = n));
        TRY(device_sync(stream));
        double rate = 2.0 * (double)n * (double)n * (double)n / (clock_s() - t0);
        slower = rate > 1.01 * *flops ? 0 : slower + 1;
        if (rate > *flops) *flops = rate;
    } while ((slower < PRODUCTS || r->spec.device.kind != DEVICE_CPU) && clock_s() < end);
    arena_release(a, mark);
    return ERR_OK;
}

/* Takes the peak rate from the GPU's file, where it has one that says it (config_device.h). */
Err run_peak_rate(Run *r, double *flops, const char **source)
{
    DeviceInfo gpu;
    DeviceFile sheet;
    *flops = 0;
    *source = "data sheet:";
    if (r->spec.device.kind == DEVICE_CUDA) TRY(device_cuda_info(r->spec.device.index, &gpu));
    if (r->spec.device.kind == DEVICE_CUDA && device_file_match(gpu.name, &sheet))
        *flops = 1e12 * (r->spec.compute == F32 ? sheet.fp32_tflops : sheet.bf16_tflops);
    if (*flops > 0) return ERR_OK;
    *source = r->spec.device.kind == DEVICE_CPU ? "sgemm" : "measured products";
    return measure_rate(r, flops);
}
