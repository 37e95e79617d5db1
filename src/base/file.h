/*
 * Files: read and write exactly, replace atomically, checksum. Everything that writes a checkpoint, a
 * token file or a run's outputs goes through here, so that tests can make any operation fail or kill the
 * process at it (file_fault), and nothing half-written is ever taken for whole.
 *
 * All functions return ERR_IO with a message naming path and system error; callers re-label it (err_as).
 * Short writes, EINTR and EAGAIN are handled here. Paths are opened O_CLOEXEC.
 */
#ifndef MEGATRAIN_BASE_FILE_H
#define MEGATRAIN_BASE_FILE_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* A file being written front to back. Errors stay: once one failed, all later calls fail. */
typedef struct {
    int fd;
    char path[PATH_MAX]; /* not allocated: training writes files too */
    int64_t written_bytes;
    bool failed, appends; /* appends: at the end of the file, wherever somebody else has cut it to */
} FileWriter;

/* A new file, which nobody else has open, in place of a file or a link that has the name. */
Err file_create(const char *path, FileWriter *out);
/* A new file, out->path: NAME.tmp- and a number. */
Err file_create_beside(const char *path, FileWriter *out);
/* Removes what killed processes have left under such names. For what a user names: a run folder is swept when a run
 * starts (train/run.h). */
void file_sweep_beside(const char *path);
Err file_append(const char *path, FileWriter *out); /* goes on behind what is there; made if missing */
/* Goes on behind the first size_bytes of a file that is there; what follows them is cut off. */
Err file_reopen(const char *path, int64_t size_bytes, FileWriter *out);
Err file_write(FileWriter *w, const void *data, int64_t size_bytes);
/* file_write, but a failure leaves the file as it was before, and the writer usable if that succeeds. */
Err file_write_or_undo(FileWriter *w, const void *data, int64_t size_bytes);
Err file_write_at(FileWriter *w, int64_t offset, const void *data, int64_t size_bytes);
Err file_sync(FileWriter *w);       /* fdatasync: what is written so far survives a power cut */
Err file_sync_close(FileWriter *w); /* fdatasync + close; the writer is closed also on error */
void file_abandon(FileWriter *w);   /* close and unlink; for error paths */

/* Does this process's limit (ulimit -n) leave so many descriptors? */
bool file_descriptors_left(int count);

/* For reading; anything but a regular file is refused. The caller closes *fd. */
Err file_open_regular(const char *path, int *fd, int64_t *size_bytes);
/* Reads from such a descriptor; *got is less than size_bytes only at the end of the file. */
Err file_read_some(int fd, const char *path, int64_t offset, void *out, int64_t size_bytes, int64_t *got);
/* Reads exactly size_bytes at offset; a short file is an error. */
Err file_read_at(const char *path, int64_t offset, void *out, int64_t size_bytes);
/*
 * Continues a CRC32C over a sample of a file's content: the whole file if it has at most `budget` bytes, else blocks of
 * 16 KiB, spread evenly from its first byte to its last, of `budget` bytes together. It tells files of other content
 * apart in milliseconds, however long they are; a few bytes that differ in a long file it may miss.
 */
Err file_sample_crc(const char *path, int64_t budget, uint32_t *crc);
/* Whole file into malloc'ed memory with a 0 byte after it. ERR_IO if larger than max_bytes. */
Err file_read_all(const char *path, int64_t max_bytes, char **out, int64_t *size_bytes);

/* ERR_IO: it is a link, and the link or what it leads to belongs neither to us nor to root. What goes on with a file or
 * a folder that is there asks this first. */
Err file_check_link(const char *path);

/* Writes a file beside it, syncs, renames over name (over a link's target), syncs the folder. What is there and is no
 * regular file is refused. */
Err file_replace(const char *name, const void *data, int64_t size_bytes);

/* The last part of file_replace, for a file that was made by file_create_beside(name) and is closed: it gets the name.
 * Its own is removed if that fails. */
Err file_take_place(const char *temp, const char *name);

/* ERR_IO for what file_replace would refuse, to be asked before the work whose result it is. */
Err file_check_output(const char *path);
/* ERR_STORAGE for that; ERR_CONFIG for a file that has something in it, and not `mark` among its first 4 KiB. It is
 * none of those that a command writes there, so replacing it would lose what another program or a person made. */
Err file_check_replaces(const char *path, const char *mark);
Err file_rename(const char *from, const char *to);
Err file_cut(const char *path, int64_t size_bytes); /* to its first bytes, synced */
Err file_sync_dir(const char *dir);
Err file_make_dirs(const char *path);    /* mkdir -p; the new names are synced */
Err file_make_parents(const char *path); /* mkdir -p of the folder it lies in */
Err file_remove_tree(const char *path);  /* rm -r; missing is fine. Never follows symbolic links. */
bool file_exists(const char *path);
bool file_holds(const char *folder, const char *name); /* is there a 'folder/name'? */
bool file_is_dir(const char *path);
Err file_size(const char *path, int64_t *out);
Err file_free_bytes(const char *path, int64_t *out); /* on the file system that holds path */

/* Exclusive lock file held for the life of the process; the holder's "host pid" is written inside. Where the file
 * system has no locks PATH.held stands for one (base/held.h). ERR_STORAGE naming the holder when another live process
 * has it. The holder may remove the file. */
Err file_lock(const char *path, int *fd_out);
void file_unlock(int fd);
/* Is the file at `path` the one that was opened as fd? It may have been removed, and made anew by another process. */
bool file_is_still(int fd, const char *path);

/* Castagnoli's CRC; start with 0, go on with the last value. crc32c_table: the same value without the
 * processor's own instruction, for processors that have none. */
uint32_t crc32c(uint32_t crc, const void *data, size_t size_bytes);
uint32_t crc32c_table(uint32_t crc, const void *data, size_t size_bytes);

/*
 * Faults, for tests: environment MEGATRAIN_FILE_FAULT="ACTION@N" or "ACTION@N:TEXT", read once: at the N-th file
 * operation that changes something (counted from 1 over create, write, cut, sync, close, rename, unlink, mkdir; with
 * TEXT only those on paths it occurs in: threads that write other files then do not count) do ACTION:
 * kill (SIGKILL; a write is half done first), enospc, eio, short (half of the write happens, then ENOSPC), eintr (a
 * create, write or sync is interrupted by a signal, a write half done first; no error may come of it).
 * "count" prints "file operations: N" on stderr at exit. A malformed value ends the process with exit 2.
 * No cost when unset. The first operation calls it; calling it again does nothing.
 */
void file_fault_init(void);

#endif
