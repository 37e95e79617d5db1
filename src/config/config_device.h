/*
 * Facts of a device that no code can ask where the device is absent: the files of config/devices/. `plan --device NAME`
 * plans for one; a run takes the peak rate of its own GPU there, by the GPU's name, for mfu.
 *
 *   [device]
 *   memory_mib = 81559       as the driver reports it (nvidia-smi)
 *   match = H100             part of the name that the driver gives the GPU
 *   bf16_tflops = 989        and the other numbers below
 *
 *   isa = avx512             of processors: by which instructions what follows was measured (debug.isa, debug.dot)
 *   dot = vdpbf16
 *
 *   [op.NAME], [comm.NAME]   what was measured (config/device_points.h)
 *
 * Only memory_mib is required; `plan` says no time where a number lacks that times need (cost/cost.h). Shares
 * are at most 1, counts whole. The folder is looked for under the current one, beside the program, and where
 * `make install` puts it.
 */
#ifndef MEGATRAIN_CONFIG_CONFIG_DEVICE_H
#define MEGATRAIN_CONFIG_CONFIG_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "config/device_points.h"

enum { DEVICE_NAME_BYTES = 64 };

/*
 * The numbers of a device: NUMBER(key, value where a file has none, meaning). 0: not known. Those with another value
 * are shares of a data sheet's figures that programs reach, or small times; docs/prediction.md has the source of each,
 * and how far a tenth of it moves predictions.
 */
#define DEVICE_NUMBERS(NUMBER)                                                                                    \
    NUMBER(sold_gb, 0, "memory that it is sold with")                                                             \
    NUMBER(bf16_tflops, 0, "products, dense")                                                                     \
    NUMBER(fp32_tflops, 0, "without TF32")                                                                        \
    NUMBER(fp8_tflops, 0, "products, dense")                                                                      \
    NUMBER(memory_gb_s, 0, "of device memory, read and written together")                                         \
    NUMBER(capability, 0, "of a GPU, as NVIDIA counts (9.0): which products of 8 bits it has")                    \
    NUMBER(multiprocessors, 0, "of a GPU; 0: the device is the processors of a host")                             \
    NUMBER(processors, 0, "of a host")                                                                            \
    NUMBER(attention_fwd_tflops, 0, "the best published kernel, heads 128 wide, long sequences, causal half")     \
    NUMBER(attention_bwd_tflops, 0, "the same, backward")                                                         \
    NUMBER(host_devices, 0, "devices that links connect with each other")                                         \
    NUMBER(link_gb_s, 0, "to those, one way, of a device")                                                        \
    NUMBER(network_gb_s, 0, "to others, one way, of a device")                                                    \
    NUMBER(link_us, 15, "what a call takes besides its bytes")                                                    \
    NUMBER(network_us, 30, "what a call between hosts takes besides")                                             \
    NUMBER(host_link_gb_s, 32, "between a GPU and its host's memory, one way")                                    \
    NUMBER(disk_gb_s, 0, "written to the run's folder by all ranks together")                                     \
    NUMBER(step_us, 0, "of the host, between the end of a step and the next")                                     \
    NUMBER(matrix_share, 0.71, "share of bf16_tflops that large products reach")                                  \
    NUMBER(tile_depth, 200, "elements of a sum that begin and end of a tile cost")                                \
    NUMBER(memory_share, 0.81, "share of memory_gb_s that memory work reaches")                                   \
    NUMBER(attention_share, 0.5, "share of attention's rates that megatrain's kernels reach")                     \
    NUMBER(experts_share, 0.44, "rate of products of all experts at once, over that of others")                   \
    NUMBER(hopper, 0, "1: megatrain's kernels for Hopper run there (wgmma, TMA)")                                 \
    NUMBER(link_share, 0.89, "share of the rates of links and networks that messages reach")                      \
    NUMBER(overlap_cost, 0.29, "of the shorter of an op and a call that go on at once, what it costs in the end") \
    NUMBER(gap_us, 1.5, "between two kernels")                                                                    \
    NUMBER(host_us, 5, "of the host, to issue a kernel")

typedef struct {
    char name[DEVICE_NAME_BYTES];  /* the file's, without .ini */
    char match[DEVICE_NAME_BYTES]; /* "": fits no GPU */
    int64_t memory_mib;
#define NUMBER(key, otherwise, meaning) double key;
    DEVICE_NUMBERS(NUMBER)
#undef NUMBER
    DevicePoints points;
} DeviceFile;

/* Bytes a second of a copy between a GPU and its host's memory. */
static inline double device_host_rate(const DeviceFile *f) { return 1e9 * f->host_link_gb_s * f->link_share; }

/* A GPU's compute capability: 90 is 9.0; 0: not known. */
static inline int device_capability(const DeviceFile *f) { return (int)(10 * f->capability + .5); }

/* Reads a device by a name (h100, H100) or by a path, which holds a '/' or ends in .ini. ERR_CONFIG: there is none, or
 * it is wrong. */
Err device_file_read(const char *name, DeviceFile *out);
void device_file_release(DeviceFile *f); /* frees its points; after an error, too */
/* The one with the longest `match` in the name of a GPU, without points; false: none. A file that cannot be read is
 * passed over. */
bool device_file_match(const char *gpu, DeviceFile *out);

/* The names that device_file_read knows, "cpu" first. */
void device_file_names(void (*each)(void *user, const char *name), void *user);

#endif
