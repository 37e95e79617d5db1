/* Options that are an amount of memory. */
#ifndef MEGATRAIN_CLI_MEMORY_ARG_H
#define MEGATRAIN_CLI_MEMORY_ARG_H

#include <stdint.h>

#include "base/err.h"

/* "80GB", "74.5GiB", "81559MiB" in bytes. ERR_CONFIG, naming the option: it is none. */
Err memory_arg(const char *option, const char *text, int64_t *bytes);

#endif
