/* See disk.h. */
#include "measure/disk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/int64.h"

enum { BLOCK_BYTES = 4 << 20, PART_OF_FREE = 8 };

/* Blocks from one place in memory to another, checked as a chunk and as a part of the whole, and into the file. */
static Err write_blocks(FileWriter *w, char *blocks, int64_t most, double until)
{
    const char *from = blocks + BLOCK_BYTES;
    uint32_t whole = 0;
    while (w->written_bytes + BLOCK_BYTES <= most && (w->written_bytes == 0 || clock_s() < until)) {
        memcpy(blocks, from, BLOCK_BYTES);
        whole = crc32c(whole, blocks, BLOCK_BYTES);
        const uint32_t chunk = crc32c(0, blocks, BLOCK_BYTES);
        memcpy(blocks, &whole, sizeof whole);
        memcpy(blocks + sizeof whole, &chunk, sizeof chunk); /* (so that no block is like the one before it) */
        TRY(file_write(w, blocks, BLOCK_BYTES));
    }
    return file_sync(w);
}

static Err write_file(const char *folder, char *blocks, DiskLimits limits, double *gb_s)
{
    char path[PATH_MAX];
    FileWriter w;
    int64_t free_bytes;
    TRY(file_free_bytes(folder, &free_bytes));
    const int64_t most = min64(limits.bytes, free_bytes / PART_OF_FREE);
    if (most < BLOCK_BYTES) return err_set(ERR_STORAGE, "'%s' has no room for a file", folder);
    if (snprintf(path, sizeof path, "%s/disk", folder) >= (int)sizeof path)
        return err_set(ERR_STORAGE, "'%s' is too long for a folder", folder);
    TRY(file_create_beside(path, &w));
    unlink(w.path);
    const double begin = clock_s();
    const Err err = write_blocks(&w, blocks, most, begin + limits.seconds);
    *gb_s = 1e-9 * (double)w.written_bytes / (clock_s() - begin);
    close(w.fd);
    return err;
}

Err disk_measure(const char *folder, DiskLimits limits, double *gb_s)
{
    char *blocks = malloc(2 * BLOCK_BYTES);
    if (!blocks) return err_set(ERR_MEMORY, "no memory to write from");
    for (int i = 0; i < 2 * BLOCK_BYTES; i++) blocks[i] = (char)(i * 31 + i / 251);
    const Err err = write_file(folder, blocks, limits, gb_s);
    free(blocks);
    return err == ERR_IO ? err_as(err, ERR_STORAGE) : err;
}
