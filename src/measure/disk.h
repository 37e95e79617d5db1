/* How fast checkpoints are written: a file in their folder, checked and synced as a shard is (ckpt/chunks.h). */
#ifndef MEGATRAIN_MEASURE_DISK_H
#define MEGATRAIN_MEASURE_DISK_H

#include <stdint.h>

#include "base/err.h"

typedef struct {
    int64_t bytes;  /* at most; no more than an eighth of what is free there */
    double seconds; /* to write for, about: no longer than that and a sync */
} DiskLimits;

/* In 10^9 bytes a second, of one process. The file has no name while it is written: nothing of it is ever left.
 * ERR_STORAGE: the folder takes no such file. ERR_MEMORY. */
Err disk_measure(const char *folder, DiskLimits limits, double *gb_s);

#endif
