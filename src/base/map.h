/*
 * Files mapped for reading. A file that is cut short while it is mapped, or whose disk fails, does not end the process
 * with SIGBUS: what cannot be read any more reads as zeros, and map_intact says so. Whoever reads a map asks after each
 * piece, before using it.
 */
#ifndef MEGATRAIN_BASE_MAP_H
#define MEGATRAIN_BASE_MAP_H

#include <stdint.h>

#include "base/err.h"

enum { MAPS_MAX = 32768 }; /* at a time, in a process; Linux allows 65530 of all kinds */

typedef struct {
    const void *data; /* NULL for an empty file */
    int64_t size_bytes;
    char *path; /* owned, for messages */
    int guard;  /* map.c's own */
} FileMap;

/* Read-only map of a regular file. ERR_IO; ERR_MEMORY. The first call takes over SIGBUS: a fault anywhere else still
 * ends the process. */
Err file_map(const char *path, FileMap *out);
void file_unmap(FileMap *map);

/* ERR_DATA if a part of the file was not there when it was read. From any thread. */
Err map_intact(const FileMap *map);

#endif
