/*
 * A file that stands for a lock, on a file system that has no locks (base/file.c asks for it). It is made so that only
 * one process can make it, and says which. The system does not remove it when that process dies: a process of the same
 * host sees that and takes its place; from another host nobody can tell, and a person removes it.
 */
#ifndef MEGATRAIN_BASE_HELD_H
#define MEGATRAIN_BASE_HELD_H

#include <stdbool.h>

#include "base/err.h"

/* Makes PATH.held. fd: of the lock file at `path`, by which it is dropped. ERR_STORAGE: another process has it, which
 * the message names; ERR_IO. */
Err held_take(const char *path, int fd);
/* For who has a lock: another host may see the same folder without locks. ERR_STORAGE: its process has PATH.held. */
Err held_check(const char *path);
/* Does a file stand for the lock at `path`? */
bool held_stands(const char *path);
/* Removes what was taken with this descriptor, if anything was. */
void held_drop(int fd);

#endif
