/* config check --layout: does a layout compute what one rank does? */
#ifndef MEGATRAIN_CLI_CHECK_LAYOUT_H
#define MEGATRAIN_CLI_CHECK_LAYOUT_H

#include "config/config.h"

/*
 * Trains two steps of a small model (small_run.h) in c's layout, in as many processes as it has ranks, and in one, on
 * the CPU, and compares every bit of weights and moments, and the losses; says so in one line. `name` is for that line.
 * ERR_NUMERICS: they differ. ERR_CONFIG: the layout does not promise equal bits. Other errors are the runs'.
 */
Err check_layout(const Config *c, const char *name);

#endif
