/*
 * See planner.h. Rates are shares of a datasheet's that bench/bench_predict.c has from kernels of this kind on an H100,
 * and are taken to be the same shares of others: what follows is a prediction that no GPU has confirmed.
 */
#include "plan/planner.h"

#include <string.h>

/* Shares of peaks: memory work; products; grouped products without wgmma; attention forward, backward. */
static const double MEMORY = 0.9 * 0.9, MATRIX = 740.0 / 989, FP32 = 0.8, GROUPED = 400.0 / 989,
                    ATTENTION_FWD = 330.0 / 989, ATTENTION_BWD = 270.0 / 989, LINK = 0.8, NETWORK = 0.8;
/* Between kernels of a graph; what a call takes to begin. */
static const double LAUNCH_S = 1.5e-6, LINK_S = 10e-6, NETWORK_S = 20e-6;
/* Products have so many multiprocessors less beside a call (train/join.c). */
static const double MATRIX_BESIDE = 132.0 / (132 - 16);

static ClockRates rates_of(const DeviceFile *d)
{
    const double matrix = d->bf16_tflops * 1e12;
    return (ClockRates){ .memory = MEMORY * d->memory_gb_s * 1e9,
                         .matrix = MATRIX * matrix,
                         .fp32 = FP32 * d->fp32_tflops * 1e12,
                         .grouped = GROUPED * matrix,
                         .attention_fwd = ATTENTION_FWD * matrix,
                         .attention_bwd = ATTENTION_BWD * matrix,
                         .link = LINK * d->link_gb_s * 1e9,
                         .network = NETWORK * d->network_gb_s * 1e9,
                         .launch_s = LAUNCH_S,
                         .link_s = LINK_S,
                         .network_s = NETWORK_S,
                         .matrix_beside = MATRIX_BESIDE,
                         .host_devices = (int)d->host_devices };
}

Err planner_open(Planner *p, const char *device)
{
    DeviceFile d;
    if (!device)
        return err_set(ERR_CONFIG, "plan --search asks how long things take on a device, and none is named"),
               err_hint("--device h100, or the path of a device's file");
    TRY(device_file_read(device, &d));
    if (!(d.bf16_tflops > 0) || !(d.fp32_tflops > 0) || !(d.memory_gb_s > 0) || !(d.link_gb_s > 0) ||
        !(d.network_gb_s > 0) || !(d.host_devices > 0))
        return err_set(ERR_CONFIG, "--device %s: its file does not say how fast it is", d.name),
               err_hint("a search needs bf16_tflops, fp32_tflops, memory_gb_s, link_gb_s, network_gb_s, host_devices");
    *p = (Planner){ .memory = d.memory_mib << 20, .peak_flop = d.bf16_tflops * 1e12, .rates = rates_of(&d) };
    memcpy(p->name, d.name, sizeof p->name);
    p->source = (CostSource){ &p->rates, step_clock_run };
    return ERR_OK;
}
