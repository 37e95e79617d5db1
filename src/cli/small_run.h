/*
 * A configuration cut to a small one, which is trained in seconds and keeps its layout: config check --layout runs it.
 * docs/configuration.md has the rule for users.
 */
#ifndef MEGATRAIN_CLI_SMALL_RUN_H
#define MEGATRAIN_CLI_SMALL_RUN_H

#include "config/config.h"

enum { SMALL_BYTES = 16384, SMALL_STEPS = 2 };

/* Values that make the small configuration of c, "section.key=value", parted by blanks; `data` is the prefix of its
 * token files, which have bytes. ERR_CONFIG: the layout does not promise equal bits, or no small model has it. */
Err small_run_words(const Config *c, const char *data, char words[SMALL_BYTES]);

/* Adds what makes one rank of a small configuration: every key of the layout is as without a word, and the canonical
 * blocks are those of the layout. */
void small_run_alone(const Config *small, char words[SMALL_BYTES]);

#endif
