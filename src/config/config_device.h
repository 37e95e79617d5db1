/*
 * Facts of a device that no code can ask where the device is absent: the files of config/devices/. `plan --device NAME`
 * plans for one; a run takes the peak rate of its own GPU there, by the GPU's name, for mfu.
 *
 *   [device]
 *   memory_mib = 81559       as the driver reports it (nvidia-smi)
 *   sold_gb = 80             what it is sold as
 *   bf16_tflops = 989        dense
 *   fp32_tflops = 67         without TF32
 *   memory_gb_s = 3350       bytes that memory reads and writes a second
 *   link_gb_s = 450          that it sends to devices of the same host, one way
 *   network_gb_s = 50        to others
 *   host_devices = 8         devices of a host
 *   match = H100             part of the name that the driver gives the GPU
 *
 * Only memory_mib is required. The folder is looked for under the current one, beside the program, and where
 * `make install` puts it.
 */
#ifndef MEGATRAIN_CONFIG_CONFIG_DEVICE_H
#define MEGATRAIN_CONFIG_CONFIG_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

enum { DEVICE_NAME_BYTES = 64 };

typedef struct {
    char name[DEVICE_NAME_BYTES];  /* the file's, without .ini */
    char match[DEVICE_NAME_BYTES]; /* "": fits no GPU */
    int64_t memory_mib;
    double sold_gb; /* 0: not said, nor the rates */
    double bf16_tflops, fp32_tflops;
    double memory_gb_s, link_gb_s, network_gb_s, host_devices;
} DeviceFile;

/* By a name (h100, H100) or by a path, which holds a '/' or ends in .ini. ERR_CONFIG: there is none, or it is wrong. */
Err device_file_read(const char *name, DeviceFile *out);
/* The one with the longest `match` in the name of a GPU; false: none. A file that cannot be read is passed over. */
bool device_file_match(const char *gpu, DeviceFile *out);

#endif
