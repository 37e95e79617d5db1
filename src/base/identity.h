/*
 * Identifies this program, to the byte, and where it runs: for --version, a run's starts and its checkpoints, so that a
 * result can be traced to the program that computed it.
 */
#ifndef MEGATRAIN_BASE_IDENTITY_H
#define MEGATRAIN_BASE_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* main's first call: the commit of the source, "8e2d0ea81234" or "8e2d0ea81234+changes", as the build found it; "": not
 * known, as without git. */
void identity_begin(const char *commit);
const char *identity_commit(void); /* "8e2d0ea81234 with changes", or "unknown" */

/* CRC32C of the program's file. ERR_IO: /proc/self/exe cannot be read. */
Err identity_binary(uint32_t *crc);

/* "0.1.0, commit 8e2d0ea81234 with changes, binary 1a2b3c4d"; "unknown" stands for what is not known. The same text for
 * the same file on every host and rank. */
const char *identity_program(void);

/* "host 'n0', Intel(R) Xeon(R) CPU": for people. */
enum { IDENTITY_MACHINE_BYTES = 256 };
void identity_machine(char out[IDENTITY_MACHINE_BYTES]);

/* This start of this running system, 36 characters: the same for all of its processes. "", false and errno: it
 * cannot be read. */
enum { IDENTITY_BOOT_BYTES = 37 };
bool identity_boot(char out[IDENTITY_BOOT_BYTES]);

#endif
